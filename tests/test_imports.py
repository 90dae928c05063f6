"""No module of the package and no file of a crate is in a circle of imports: each can be read with what it imports."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import penstock
import pytest
import rust_imports
from import_graph import Import, circles, told
from penstock import cli

ROOT = Path(penstock.__file__).parent.parent

#: The modules that import one whose name is known only when the program runs, and why: what they look up imports them,
#: or what they import, so that it could not be named.
LOOKUPS = {
    "penstock._frameworks": "the file of a framework, which imports what every framework has",
    "penstock._patch": "the counterpart of a module of safetensors, which has the name of a framework",
    "penstock.bench.child": "the loader that is measured",
    "penstock.integrations._drift": "places in an engine, whose form is compared with the known one",
    "penstock.selftest.peers": "the loaders that are compared",
}


def modules(root: Path) -> dict[str, Path]:
    """The files of Python below ``root`` by the names of their modules. Stubs stand for extension modules."""
    found = {}
    for path in sorted([*root.rglob("*.pyi"), *root.rglob("*.py")]):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


class Sources:
    """The imports of all modules below a folder, at module level and in functions, for type checkers too."""

    def __init__(self, root: Path) -> None:
        self.paths = modules(root)
        self.trees = {name: ast.parse(path.read_text()) for name, path in self.paths.items()}

    def _base(self, of: str, node: ast.ImportFrom) -> str:
        """The module that stands after ``from``."""
        if not node.level:
            return node.module or ""
        package = of.split(".")
        up = node.level - (self.paths[of].name == "__init__.py")
        return ".".join(package[: len(package) - up] + ([node.module] if node.module else []))

    def _defined(self, module: str, name: str) -> tuple[str, str]:
        """(module, name) where a name of ``module`` is defined: an `__init__` that re-exports is looked through."""
        if f"{module}.{name}" in self.paths:
            return f"{module}.{name}", ""
        if self.paths[module].name == "__init__.py":
            for node in self.trees[module].body:
                if isinstance(node, ast.ImportFrom):
                    base = self._base(module, node)
                    for alias in node.names:
                        if (alias.asname or alias.name) == name and base in self.paths:
                            return self._defined(base, alias.name)
        return module, name

    def imports(self) -> Iterator[Import]:
        for of, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Import):
                    for alias in node.names:
                        if alias.name in self.paths:
                            yield Import(of, alias.name, "", node.lineno)
                elif isinstance(node, ast.ImportFrom):
                    base = self._base(of, node)
                    if base in self.paths:
                        for alias in node.names:
                            yield Import(of, *self._defined(base, alias.name), node.lineno)

    def lookups(self) -> Iterator[tuple[str, int]]:
        """(module, line) of each import of a module whose name is not in the source, or is one of these."""
        for of, tree in self.trees.items():
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call):
                    continue
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called not in ("import_module", "__import__", "run_module"):
                    continue
                name = node.args[0] if node.args else None
                literal = name.value if isinstance(name, ast.Constant) else None
                if not isinstance(literal, str) or literal.startswith(".") or literal in self.paths:
                    yield of, node.lineno


def test_no_module_of_the_package_is_in_a_circle():
    assert told(Sources(ROOT).imports()) == ""


def test_modules_are_looked_up_by_name_only_where_that_is_the_point():
    assert {of for of, _ in Sources(ROOT).lookups()} == set(LOOKUPS)


# --- The crates ---

CRATES = Path(__file__).parents[1] / "crates"


@pytest.mark.parametrize("crate", ["core", "python", "serve"])
def test_no_file_of_a_crate_is_in_a_circle(crate: str):
    found = list(rust_imports.imports(CRATES / crate / "src"))
    assert len(found) > 50
    assert told(found) == ""


def test_what_stands_for_a_module_in_loom_stands_at_that_module():
    text = (CRATES / "core/src/lib.rs").read_text()
    found = re.findall(r'cfg_attr\(loom, path = "(\w+)/model\.rs"\)\]\s+(?:pub )?mod (\w+);', text)
    assert found == [("wake", "wake")]


#: The floors of the core, from the ground: files and folders of `src`. Those of one floor may use each other.
FLOORS = [
    [
        *("error.rs", "options.rs", "options", "sync.rs", "threads.rs", "wake.rs", "wake", "machine.rs", "mappings.rs"),
        "huge_pages.rs",
        "timer.rs",
        "detached.rs",
    ],
    ["extent.rs", "rows.rs", "way.rs", "fallback.rs", "memory.rs", "timeline.rs"],
    ["store", "source", "staging"],
    ["format", "device", "peers"],
    ["save", "plan", "engine", "stats.rs", "ceiling"],
    ["load", "pull.rs"],
    ["lib.rs"],
]


def test_no_file_of_the_core_takes_a_name_from_a_floor_above():
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    root = CRATES / "core/src"
    assert {path.relative_to(root).parts[0] for path in root.rglob("*.rs")} == set(floor)
    found = rust_imports.imports(root)
    up = [i for i in found if floor[Path(i.module).parts[0]] > floor[Path(i.of).parts[0]]]
    assert not up, "\n".join(f"{i.of}:{i.line} takes {i.name} of {i.module}" for i in up)


#: The floors of `store/remote`, from the ground. Those of one floor do not use each other.
REMOTE_FLOORS = [
    ["secret.rs", "environment.rs"],
    ["given.rs"],
    ["http"],
    ["transfer", "auth", "pages.rs"],
    ["listing.rs", "upload"],
    ["aws", "gcp", "azure", "toy"],
    ["settings.rs", "source.rs", "look.rs", "whole.rs"],
    ["provider.rs"],
    ["mod.rs"],
]


def test_no_folder_of_remote_stores_takes_a_name_from_its_own_floor_or_one_above():
    floor = {name: number for number, names in enumerate(REMOTE_FLOORS) for name in names}
    root, below = CRATES / "core/src", Path("store/remote")
    assert {path.relative_to(root / below).parts[0] for path in (root / below).rglob("*.rs")} == set(floor)
    wrong = []
    for i in rust_imports.imports(root):
        if below in Path(i.of).parents and below in Path(i.module).parents:
            of, module = (Path(file).relative_to(below).parts[0] for file in (i.of, i.module))
            if of != module and floor[module] >= floor[of]:
                wrong.append(f"{i.of}:{i.line} takes {i.name} of {i.module}")
    assert not wrong, "\n".join(wrong)


#: What of the core names files, besides `store` and `source`, and which.
NAMES_FILES = {
    "save": "files that are written",
    "pull.rs": "files that are written",
    "ceiling": "files whose rates are measured",
    "timeline.rs": "the trace",
    "error.rs": "where an error happened",
    "device/api.rs": "the driver's library",
    "huge_pages.rs": "/sys",
    "machine.rs": "/proc and /sys",
    "mappings.rs": "/proc",
    "memory.rs": "maps a descriptor that a store gives",
    "timer.rs": "timerfds",
    "wake.rs": "eventfds",
    "wake/model.rs": "eventfds",
    "load/transport.rs": "waits for eventfds",
    "load/shared.rs": "eventfds",
    "staging": "waits for eventfds; memory that has a descriptor",
    "device/mod.rs": "eventfds",
    "device/cpu.rs": "eventfds",
    "device/gpu/mod.rs": "eventfds",
    "peers": "connections to other ranks",
}
#: Names of files, of descriptors, and of what is done with them.
OF_FILES = re.compile(
    r"\b(Path|PathBuf|fs|OpenOptions|OwnedFd|BorrowedFd|RawFd|AsFd|AsRawFd|FromRawFd|is_dir|is_file|symlink\w*"
    r"|libc::(open|stat|lstat|fstat|pread|read|readv|posix_fadvise|mmap)\w*)\b"
)


def test_nothing_in_the_core_but_stores_and_sources_names_a_file_of_a_checkpoint():
    root = CRATES / "core/src"
    found, compiled = set(), rust_imports.files(root)
    for path in root.rglob("*.rs"):
        name = path.relative_to(root)
        if str(name) not in compiled or name.parts[0] in ("store", "source"):
            continue
        if OF_FILES.search(rust_imports.without_tests(path.read_text())):
            found.add(name.parts[0] if name.parts[0] in NAMES_FILES else str(name))
    assert found == set(NAMES_FILES)


@pytest.mark.parametrize(
    "code", ["use std::{fs, io};", "fn f(at: &Path)", "unsafe { libc::statx(", "at.is_dir()", "fd: Arc<OwnedFd>"]
)
def test_names_of_files_are_found_wherever_they_stand(code: str):
    assert OF_FILES.search(rust_imports.without_tests(code))


def test_circles_of_rust_are_found_wherever_their_paths_stand(tmp_path: Path):
    files = {
        "lib.rs": "mod a;\npub mod b;\nmod c;\npub use a::One;\n",
        "a.rs": "//! crate::b::two\npub struct One;\nfn f() { crate::b::two() }\n",
        "b/mod.rs": "mod d;\npub use d::two;\n",
        "b/d.rs": 'use crate::{One, c::{self, three}};\nfn two(_: One) { "crate::c::x" }\n',
        "c.rs": "fn three() {}\n#[cfg(test)]\nmod tests {\n    use crate::b::two;\n}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert told(rust_imports.imports(tmp_path)).splitlines() == [
        "these 2 modules import each other: a.rs, b/d.rs",
        "  a.rs imports of b/d.rs: two (line 3)",
        "  b/d.rs imports of a.rs: One (line 1)",
    ]


# --- The test itself ---


@pytest.fixture
def made_up(tmp_path: Path):
    """Writes modules, by their paths, and says which are in circles."""

    def write(files: dict[str, str]) -> Sources:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Sources(tmp_path)

    return write


PACKAGE = {
    "p/__init__.py": "from .a import one as first\n",
    "p/a.py": "from .b import two\none = 1\n",
    "p/b.py": "two = 2\n",
    "p/sub/__init__.py": "from ..a import one\n",
    "p/sub/c.py": "from . import d\nfrom .. import first\n",
    "p/sub/d.py": "",
}


def test_modules_that_import_in_one_direction_are_in_no_circle(made_up):
    assert circles(made_up(PACKAGE).imports()) == []


@pytest.mark.parametrize(
    "text",
    [
        "from .a import one\ntwo = 2\n",
        "from . import a\ntwo = 2\n",
        "import p.a\ntwo = 2\n",
        "from p import a\ntwo = 2\n",
        "def two():\n    from .a import one\n",
        "class Two:\n    def two(self):\n        if True:\n            from .a import one\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import one\ntwo = 2\n",
        "from . import first\ntwo = 2\n",  # through the package, which has it of `a`
        "from .sub import one\ntwo = 2\n",
        "from p import first\ntwo = 2\n",
    ],
)
def test_a_circle_is_found_wherever_its_imports_stand(made_up, text):
    sources = made_up(PACKAGE | {"p/b.py": text})
    assert circles(sources.imports()) == [["p.a", "p.b"]]
    assert "p.a imports of p.b: two (line 1)" in told(sources.imports())


def test_what_is_told_of_a_circle_is_its_shortest_way_round_and_what_ties_it(made_up):
    files = {"a.py": "from b import x, y\n", "b.py": "from c import z\nfrom d import w\n", "c.py": "import a\n"}
    sources = made_up(files | {"d.py": "from c import z\n", "e.py": "from a import x\n", "f.py": "import f\n"})
    assert told(sources.imports()).splitlines() == [
        "these 4 modules import each other: a, b, c, d",
        "  a imports of b: x (line 1), y (line 1)",
        "  b imports of c: z (line 1)",
        "  c imports of a: the module (line 1)",
        "these 1 modules import each other: f",
        "  f imports of f: the module (line 1)",
    ]


def test_a_lookup_by_name_is_found_unless_it_names_a_module_of_others(made_up):
    files = {"a.py": "import_module(name)\n", "b.py": "importlib.import_module('numpy')\n", "c.py": "__import__('a')\n"}
    assert [of for of, _ in made_up(files).lookups()] == ["a", "c"]


# --- What a command imports ---

#: Runs commands, one after the other; prints what each has imported of the benchmark, with its exit status.
RUN = """
import contextlib, io, json, sys
from penstock import cli
known, found = set(), {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            status = cli.main(words)
        except SystemExit as end:
            status = end.code
    new = {name for name in sys.modules if name.startswith("penstock.bench")} - known
    known |= new
    found[" ".join(words)] = [status, sorted(new)]
print(json.dumps(found))
"""


def test_no_command_but_bench_imports_the_benchmark(small: Path, tmp_path: Path, python):
    pytest.importorskip("plotly")
    source, trace, to = str(small), str(tmp_path / "trace.json"), str(tmp_path / "to")
    calls = [
        ["inspect", source],
        ["load", source, "--trace", trace],
        ["load", source, "--framework", "np"],
        ["plan", source, "--dp", "2"],
        ["verify", source],
        ["warm", source],
        ["evict", source],
        ["pull", "--help"],
        ["push", "--help"],
        ["cache", "ls", "--help"],
        ["doctor", source, "--no-measure"],
        ["trace", trace],
        ["trace", trace, "--html", str(tmp_path / "trace.html")],
        ["convert", source, to],
        ["synth", "--list"],
        ["synth", "gpt2", str(tmp_path / "gpt2"), "--scale", "0.001"],
        ["serve", "--help"],
        ["bench", "--help"],
        ["selftest", "--gpu", "--help"],
        ["engines", "report", "--help"],
    ]
    [commands] = [action for action in cli._parser()._actions if action.dest == "command"]
    assert {name for name, *_ in calls} == commands.choices.keys()
    helps = [["--help"], ["--version"], *([name, "--help"] for name in commands.choices if name != "bench")]
    done = python(RUN, json.dumps([*helps, ["inspect", "bench"], *calls]))
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    failed = {words: status for words, (status, _) in found.items() if status}
    assert failed.keys() <= {"inspect bench", f"evict {source}"}, (failed, done.stderr)  # what is mapped stays
    assert {words for words, (_, modules) in found.items() if modules} == {"bench --help"}


#: A declaration of a type that is not nested, in a file of Rust.
TYPE = re.compile(r"^(?:pub(?:\([a-z ]+\))? )?(?:unsafe )?(?:struct|enum|trait|union|type) (\w+)", re.M)
#: What only tests see, and the stand-in of a type of the same name.
UNSEEN = ("tests.rs", "mutated.rs", "virtual_time.rs", "model.rs")


def named_twice(folder: Path) -> dict[str, list[str]]:
    """The types of one name that several files below ``folder`` declare, with these files."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.rs")):
        if path.name not in UNSEEN and "simulator" not in path.parts:
            for name in TYPE.findall(path.read_text()):
                found.setdefault(name, []).append(str(path.relative_to(folder)))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_no_two_types_of_the_core_have_one_name():
    assert named_twice(ROOT.parent / "crates/core/src") == {}


def test_two_types_of_one_name_are_found(tmp_path: Path):
    (tmp_path / "below").mkdir()
    (tmp_path / "a.rs").write_text("pub(crate) struct Twice(u8);\nimpl Twice {}\n    struct Nested;\nenum Once { A }\n")
    (tmp_path / "below/b.rs").write_text("struct Nested;\ntype Twice = u8;\n")
    (tmp_path / "below/tests.rs").write_text("enum Once { A }\n")
    assert named_twice(tmp_path) == {"Twice": ["a.rs", "below/b.rs"]}
