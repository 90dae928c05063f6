"""The imports of a Rust crate, file by file: for the test that finds circles.

A path is followed to the file that defines what it names, through the modules that only re-export it. What only tests
import does not count. Good enough for these crates: no macro makes a module, and no file has two modules with code.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from import_graph import Import

_LITERALS = re.compile(
    r"""//[^\n]*|/\*.*?\*/|b?r(\#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?'(?:\\.|[^'\\])'""",
    re.DOTALL,
)
_TESTS = re.compile(r"#\[cfg\((?:all\()?test\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*")
_TEST_FILE = re.compile(r"#\[cfg\((?:all\()?test\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?mod (\w+);")
_USE = re.compile(r"(?P<seen>pub(?:\([^)]*\))?\s+)?use\s+(?P<tree>[^;]+);")
_PATH = re.compile(r"(?<![\w:])(?:crate|super|self|[a-z_]\w*)(?:::\w+)+")


def without_tests(code: str) -> str:
    """The code without comments, literals, and items that only tests have; its lines keep their numbers."""

    def lines(text: str) -> str:
        return "\n" * text.count("\n")

    code = _LITERALS.sub(lambda found: ('""' if '"' in found[0] else " ") + lines(found[0]), code)
    while found := _TESTS.search(code):
        at = found.end()
        brace, end = code.find("{", at), code.find(";", at)
        if end >= 0 and (brace < 0 or end < brace):
            at = end + 1
        else:
            depth, at = 1, brace + 1
            while depth and at < len(code):
                depth += {"{": 1, "}": -1}.get(code[at], 0)
                at += 1
        code = code[: found.start()] + lines(code[found.start() : at]) + code[at:]
    return code


def leaves(tree: str) -> Iterator[tuple[str, ...]]:
    """The paths of a `use`: `a::{b, c::d as e}` is a::b and a::c::d."""
    tree = tree.strip()
    if "{" not in tree:
        yield tuple(tree.split(" as ")[0].strip().split("::"))
        return
    head, rest = tree.split("{", 1)
    rest, part, depth = rest.rsplit("}", 1)[0], "", 0
    prefix = tuple(head.strip().removesuffix("::").split("::")) if head.strip() else ()
    for letter in rest + ",":
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter != "," or depth:
            part += letter
            continue
        if part.strip():
            for leaf in leaves(part):
                yield prefix if leaf == ("self",) else prefix + leaf
        part = ""


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


class _Crate:
    def __init__(self, root: Path) -> None:
        self.root = root
        #: module path -> file
        self.files: dict[tuple[str, ...], str] = {}
        for file in sorted(root.rglob("*.rs")):
            parts = file.relative_to(root).with_suffix("").parts
            module = parts[:-1] if parts[-1] in ("mod", "lib") else parts
            self.files[module] = str(file.relative_to(root))
        texts = {module: (root / file).read_text() for module, file in self.files.items()}
        for_tests = [(*module, name) for module, text in texts.items() for name in _TEST_FILE.findall(text)]
        for module in list(self.files):
            if any(module[: len(tests)] == tests for tests in for_tests):
                del self.files[module]
        self.code = {module: without_tests(texts[module]) for module in self.files}
        #: module -> name that it re-exports -> where that comes from
        self.exports: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = defaultdict(dict)
        #: module -> (path, line)
        self.uses: dict[tuple[str, ...], list[tuple[tuple[str, ...], int]]] = defaultdict(list)
        self.body: dict[tuple[str, ...], str] = {}
        for module, code in self.code.items():
            for found in _USE.finditer(code):
                for leaf in leaves(found["tree"]):
                    full = self.absolute(module, leaf)
                    if full is None:
                        continue
                    if found["seen"]:
                        self.exports[module][leaf[-1]] = full
                    else:
                        self.uses[module].append((full, _line(code, found.start())))
            self.body[module] = _USE.sub(lambda found: "\n" * found[0].count("\n"), code)

    def absolute(self, module: tuple[str, ...], path: tuple[str, ...]) -> tuple[str, ...] | None:
        """The path from the crate's root, or `None` for another crate's."""
        if path[0] == "crate":
            return path[1:]
        at = module
        if path[0] in ("super", "self"):
            while path and path[0] in ("super", "self"):
                at = at[:-1] if path[0] == "super" else at
                path = path[1:]
            return at + path
        return at + path if (*at, path[0]) in self.files else None

    def home(self, path: tuple[str, ...]) -> tuple[tuple[str, ...], str] | None:
        """The module that defines what `path` names, and the name."""
        for _ in range(10):
            known = next((n for n in range(len(path), -1, -1) if path[:n] in self.files), 0)
            module, rest = path[:known], path[known:]
            if not rest:
                return (module, "") if module else None
            further = self.exports[module].get(rest[0])
            if further is None:
                return module, rest[0]
            path = further + rest[1:]
        return None


def files(root: Path) -> set[str]:
    """The files below `root` that are not compiled for tests only."""
    return set(_Crate(root).files.values())


def imports(root: Path) -> Iterator[Import]:
    """What each file below `root`, a crate's `src`, takes from the others."""
    crate = _Crate(root)
    for module, file in crate.files.items():
        body = crate.body[module]
        paths = list(crate.uses[module])
        for match in _PATH.finditer(body):
            full = crate.absolute(module, tuple(match[0].split("::")))
            if full is not None:
                paths.append((full, _line(body, match.start())))
        # What a module re-exports and uses itself.
        words = {match[0]: match.start() for match in re.finditer(r"\w+", body)}
        paths += [(full, _line(body, words[name])) for name, full in crate.exports[module].items() if name in words]
        for path, line in paths:
            home = crate.home(path)
            # A module without a name behind it: what is taken follows in the path of each use.
            if home is not None and home[0] != module and home[1]:
                yield Import(file, crate.files[home[0]], home[1], line)
