"""No panic gets out of the extension: as PyO3's `PanicException` it would pass by every ``except Exception``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import entry_points
import penstock
import pytest
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor

SOURCES = Path(__file__).parents[1] / "crates" / "python" / "src"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small tensors."""
    path = tmp_path_factory.mktemp("entry") / "model.safetensors"
    return synth.write_file(path, [Tensor("a", "F32", (8,)), Tensor("b", "U8", (4,))])


def run(what: str, file: Path, folder: Path) -> list[str]:
    """Calls every entry point in a process of its own; what was printed."""
    done = subprocess.run(
        [sys.executable, entry_points.__file__, what, str(file), str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=240,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{lines[-1:]}\n{done.stderr[-3000:]}"
    assert {line.split()[1] for line in lines if line.startswith("entry:")} == entry_points.found()
    return lines


def test_where_no_thread_can_start_every_entry_point_raises_exceptions_only(file: Path, tmp_path: Path) -> None:
    lines = run("threads", file, tmp_path)
    assert [line for line in lines if not line.startswith("entry:")] == []


def test_whatever_the_arguments_every_entry_point_raises_exceptions_only(file: Path, tmp_path: Path) -> None:
    # Such an argument is an error of its own, and no panic that the guard has to turn into one
    lines = run("arguments", file, tmp_path)
    assert [line for line in lines if not line.startswith("entry:")] == []


@pytest.mark.skipif(find_spec("_testcapi") is None, reason="this Python has no _testcapi, which refuses allocations")
def test_whichever_allocation_is_refused_every_entry_point_raises_exceptions_only(file: Path, tmp_path: Path) -> None:
    lines = run("memory", file, tmp_path)
    assert [line for line in lines if line.startswith("escaped:")] == []
    # PyO3 panics where an object cannot be made: a test without any panic would show nothing
    panicked = {line.split()[2] for line in lines if line.startswith("panics:") and line.split()[1] != "0"}
    assert {"Load.report", "Checkpoint.keys", "Options.io", "Save.files", "View.address", "gpus"} <= panicked


def test_a_list_that_says_it_is_longer_than_memory_is_a_memory_error() -> None:
    for much in (entry_points.Lying(), range(1 << 40)):
        with pytest.raises(MemoryError, match="no memory for"):
            penstock._core.unwritable(much)  # type: ignore[arg-type]


def test_warming_where_no_thread_can_start_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5_000_000)
    program = (
        "import sys; from refusals import *; import penstock; from penstock import _core; refuse(*NO_THREADS)"
        "\ntry: _core.warm(sys.argv[1], 4)\nexcept penstock.LimitError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert str(path) in done.stdout and "cannot start the thread" in done.stdout, done.stderr


# --- What the sources say ---


def _code(path: Path) -> str:
    """A source without comments and without what is in strings, of the same length."""

    def blank(match: re.Match[str]) -> str:
        text = match[0]
        return f'"{" " * (len(text) - 2)}"' if text.startswith('"') else re.sub(r"[^\n]", " ", text)

    return re.sub(r'//[^\n]*|"(?:\\.|[^"\\])*"', blank, path.read_text(), flags=re.DOTALL)


def _closing(code: str, at: int) -> int:
    """Where the bracket at ``at`` is closed."""
    depth = 0
    for place in range(at, len(code)):
        depth += (code[place] in "({[") - (code[place] in ")}]")
        if depth == 0:
            return place
    raise AssertionError(f"never closed: {code[at : at + 80]}")


def _functions(code: str) -> Iterator[tuple[str, str, str]]:
    """Name, arguments and body of each function in some code, those inside of them left out. The name of one that a
    macro writes begins with "$"."""
    at = 0
    while match := re.compile(r"\bfn (\$?\w+)").search(code, at):
        opened = code.index("(", match.end())
        arguments = code[opened : _closing(code, opened) + 1]
        body = code.index("{", _closing(code, opened))
        at = _closing(code, body) + 1
        yield match[1], arguments, code[body + 1 : at - 1].strip()


def entry_functions(path: Path) -> Iterator[tuple[str, str, str]]:
    """The functions of a source that Python can call."""
    code = _code(path)
    for match in re.finditer(r"#\[(pymethods|pyfunction|pymodule_init)\b", code):
        if match[1] == "pymethods":
            block = code.index("{", match.end())
            yield from _functions(code[block + 1 : _closing(code, block)])
        else:
            yield next(_functions(code[match.end() :]))


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.rs")), ids=lambda path: path.name)
def test_every_entry_point_in_the_sources_goes_through_the_guard(path: Path) -> None:
    for name, arguments, body in entry_functions(path):
        guard = re.match(r"(?:crate::guard::)?(?:guarded|perform|answer)\(", body)
        assert guard is not None, f"{path.name}: {name} goes past the guard: {body[:80]}"
        assert _closing(body, guard.end() - 1) == len(body) - 1, f"{path.name}: {name} does more than its guard"
        bare = re.search(r": (?:Option<)?Vec\b", arguments)
        assert bare is None, f"{path.name}: {name} takes a list that is not Listed: {arguments}"


def test_the_sources_have_the_entry_points_that_the_extension_has() -> None:
    names = {name for path in SOURCES.glob("*.rs") for name, _, _ in entry_functions(path)} - {"init", "new"}
    names = names - {"$name"} | set(penstock.Options.names())  # a getter for each entry of the table
    assert names == {name.rpartition(".")[2] for name in entry_points.found()} - {"__new__"}


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.rs")), ids=lambda path: path.name)
def test_what_python_owns_or_frees_is_let_go_of_under_the_guard(path: Path) -> None:
    code = _code(path)
    for match in re.finditer(r"#\[pyclass\b", code):
        kind = re.compile(r"struct (\w+)\s*([({])").search(code, match.end())
        assert kind is not None
        fields = code[kind.start(2) : _closing(code, kind.start(2))]
        held = re.search(r"\bHeld<", fields) or kind[1] == "Options"  # plain values
        assert held, f"{path.name}: {kind[1]} owns something that is not Held: {fields}"
    if path.name != "guard.rs":
        for name, _, body in _functions(code):
            if name == "drop":
                assert body.startswith("letting_go("), f"{path.name}: {body}"
