"""Counts the lines of product code that are neither blank nor comment, in Rust and in Python.

    python tools/product_lines.py [--at REV] [--against REV]

Prints the lines of each folder, and of each language. `--at` counts a revision of git in place of the working tree;
`--against` prints another revision beside it, and the difference.

Rust: the files that the crates of the product reach from `lib.rs` by `mod`, without what only a test build, loom, a
fuzzer or the feature `testing` compiles (`#[cfg(test)]` on a module, a function, a field, a statement), and without
documentation comments. Python: the package and what is installed beside it, without `penstock.bench`,
`penstock.selftest`, stubs (`.pyi`), docstrings and strings that stand alone below an attribute. So tests, simulators,
examples, benchmarks and crates for development are not counted. A line with code and a comment counts, and a line of a
string that is not blank.

Standard library and git only.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
#: The crates that end in a wheel. The other ones of the workspace are for tests and benchmarks.
CRATES = ("crates/core", "crates/python", "crates/serve", "crates/crc-fast")
PACKAGES = ("python/", "patch/")
NO_PRODUCT = ("python/penstock/bench/", "python/penstock/selftest/")
LANGUAGES = {".rs": "Rust", ".py": "Python"}


# --- Rust -----------------------------------------------------------------------------------------------------------


class Token(NamedTuple):
    """A word, a number, a literal or one sign of Rust, and where it stands in the text."""

    text: str
    start: int
    end: int


_SPACE = re.compile(r"(?:\s+|//[^\n]*)+")
_COMMENT_EDGE = re.compile(r"/\*|\*/")
_RAW_STRING = re.compile(r'[bc]?r(#*)"')
_LITERAL = re.compile(
    r"""
    [bc]?"(?:[^"\\]|\\.)*"              # a string
    | b?'(?:[^'\\\n]|\\[^\n][^'\n]*)'   # a character, and not a lifetime
    """,
    re.VERBOSE | re.DOTALL,
)
_WORD = re.compile(r"(?:r\#)?\w+|.", re.DOTALL)


def _end_of_comment(text: str, at: int) -> int:
    """Where the block comment that begins at `at` ends: they nest."""
    depth = 0
    for edge in _COMMENT_EDGE.finditer(text, at):
        depth += 1 if edge.group() == "/*" else -1
        if depth == 0:
            return edge.end()
    raise ValueError("a block comment that does not end")


def tokens(text: str) -> Iterator[Token]:
    """The tokens of a file of Rust; comments are none."""
    at = 0
    while at < len(text):
        if space := _SPACE.match(text, at):
            at = space.end()
            continue
        if text.startswith("/*", at):
            at = _end_of_comment(text, at)
            continue
        if raw := _RAW_STRING.match(text, at):
            closing = '"' + raw[1]
            end = text.index(closing, raw.end()) + len(closing)
        else:
            found = _LITERAL.match(text, at) or _WORD.match(text, at)
            assert found is not None
            end = found.end()
        yield Token(text[at:end], at, end)
        at = end


def _holds(predicate: list[str]) -> bool | None:
    """Whether a predicate of `cfg` holds in a build of the product; None if some builds differ. Takes what it reads."""
    name = predicate.pop(0)
    if predicate and predicate[0] == "(":
        predicate.pop(0)
        parts: list[bool | None] = []
        while predicate[0] != ")":
            parts.append(_holds(predicate))
            if predicate[0] == ",":
                predicate.pop(0)
        predicate.pop(0)
        if name == "not":
            return None if parts[0] is None else not parts[0]
        settles = name == "any"  # one part that is true settles `any`, one that is false settles `all`
        if settles in parts:
            return settles
        return None if None in parts else not settles
    if predicate and predicate[0] == "=":
        value = predicate[1]
        del predicate[:2]
        return False if (name, value) == ("feature", '"testing"') else None
    return False if name in ("test", "loom", "fuzzing") else None


_OPENING = {"(": ")", "[": "]", "{": "}"}
_ITEMS = {
    *("async", "const", "enum", "extern", "fn", "impl", "let", "macro_rules", "mod", "static", "struct", "trait"),
    *("type", "union", "unsafe", "use"),
}
#: What ends at a semicolon, also behind a brace that closes.
_TO_SEMICOLON = {"let", "static", "type", "use"}
#: What stands behind a brace within an expression or an arm, and so does not begin another item.
_GOES_ON = {"else", "=", "."}


class _Source:
    """The tokens of one file, and where what stands at one of them ends."""

    def __init__(self, text: str) -> None:
        self.tokens = list(tokens(text))
        self.words = [token.text for token in self.tokens]

    def word(self, at: int) -> str:
        return self.words[at] if at < len(self.words) else ""

    def closed(self, at: int) -> int:
        """The token behind the bracket that closes the one at `at`."""
        depth = 0
        while True:
            word = self.words[at]
            depth += (word in _OPENING) - (word in _OPENING.values())
            at += 1
            if depth == 0:
                return at

    def attribute(self, at: int) -> int:
        """The bracket of the attribute that begins at `at`; 0 if none does."""
        if self.word(at) != "#":
            return 0
        bracket = at + 2 if self.word(at + 1) == "!" else at + 1
        return bracket if self.word(bracket) == "[" else 0

    def left_out(self, bracket: int) -> bool:
        """Whether an attribute is a `cfg` that holds in no build of the product."""
        if self.words[bracket + 1 : bracket + 3] != ["cfg", "("]:
            return False
        return _holds(self.words[bracket + 3 : self.closed(bracket) - 2]) is False

    def end(self, at: int) -> int:
        """The token behind the item, field, arm or statement at `at`."""
        while bracket := self.attribute(at):
            at = self.closed(bracket)
        if self.word(at) == "pub":
            at = self.closed(at + 1) if self.word(at + 1) == "(" else at + 1
        first = self.word(at)
        semicolon = first in _TO_SEMICOLON or (first == "const" and self.word(at + 2) == ":")
        angles = 0
        while at < len(self.words):
            word = self.words[at]
            if word in _OPENING.values():  # of what the last field stands in
                return at
            if word in _OPENING:
                at = self.closed(at)
                if word == "{" and not semicolon and self.word(at) not in _GOES_ON:
                    return at + 1 if self.word(at) in (",", ";") else at
                continue
            at += 1
            if word == "<":
                angles += 1
            elif word == ">" and self.words[at - 2] not in ("-", "="):
                angles -= 1
            elif word == ";" or (word == "," and angles <= 0 and first not in _ITEMS):
                return at
        return at


class Rust(NamedTuple):
    """What one file of Rust holds of the product."""

    lines: int
    modules: list[str]
    """The names of the modules that stand in other files."""


def rust(text: str) -> Rust:
    """Counts a file of Rust."""
    source = _Source(text)
    kept: list[Token] = []
    modules: list[str] = []
    at = 0
    while at < len(source.tokens):
        bracket = source.attribute(at)
        if bracket and source.left_out(bracket):
            if source.word(at + 1) == "!":
                return Rust(0, [])
            # An attribute that stood before this one belongs to the item too, and is left in: there are few
            at = source.end(at)
            continue
        if source.word(at) == "mod" and source.word(at + 2) == ";":
            modules.append(source.word(at + 1))
        kept.append(source.tokens[at])
        at += 1
    return Rust(_touched(text, kept), modules)


def _touched(text: str, kept: list[Token]) -> int:
    """The lines that tokens stand on, without blank ones within strings."""
    starts = [0, *(found.end() for found in re.finditer("\n", text))]
    lines = text.split("\n")
    touched: set[int] = set()
    line = 0
    for token in kept:
        while line + 1 < len(starts) and starts[line + 1] <= token.start:
            line += 1
        touched.update(range(line, line + token.text.count("\n") + 1))
    return sum(1 for line in touched if lines[line].strip())


def crate(files: Mapping[str, str], root: str) -> dict[str, int]:
    """The lines of each file of a crate that its `lib.rs` at `root` reaches.

    Raises:
        ValueError: a module is in no file that `mod` finds without an attribute `path`.
    """
    counts: dict[str, int] = {}
    waiting = [root]
    while waiting:
        path = PurePosixPath(waiting.pop())
        counts[str(path)], modules = rust(files[str(path)])
        folder = path.parent if path.stem in ("lib", "mod") else path.with_suffix("")
        for name in modules:
            found = [p for p in (f"{folder}/{name}.rs", f"{folder}/{name}/mod.rs") if p in files]
            if not found:
                raise ValueError(f"{path}: mod {name} is in no file")
            waiting += found
    return counts


# --- Python ---------------------------------------------------------------------------------------------------------

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING),
    tokenize.ENDMARKER,
}


def python(text: str) -> int:
    """Counts the lines of a file of Python."""
    documentation: set[tuple[int, int]] = set()
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        # A docstring, or what is said about the attribute above it. Columns of ast are bytes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            column = len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
            documentation.add((node.lineno, column))
    touched: set[int] = set()
    skipping = False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        skipping = token.start in documentation or (skipping and token.type == tokenize.STRING)
        if not skipping and token.type not in _NO_CODE:
            touched.update(range(token.start[0], token.end[0] + 1))
    return sum(1 for line in touched if lines[line - 1].strip())


# --- The product ----------------------------------------------------------------------------------------------------


def count(files: Mapping[str, str]) -> dict[str, int]:
    """The lines of each file of the product, by its path in the repository."""
    counts: dict[str, int] = {}
    for name in CRATES:
        if (root := f"{name}/src/lib.rs") in files:
            counts |= crate(files, root)
    for path, text in files.items():
        if path.endswith(".py") and path.startswith(PACKAGES) and not path.startswith(NO_PRODUCT):
            counts[path] = python(text)
    return counts


def _wanted(paths: list[str]) -> list[str]:
    return sorted(path for path in paths if PurePosixPath(path).suffix in LANGUAGES)


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout


def files_at(revision: str | None) -> dict[str, str]:
    """The files of both languages in a revision, or in the working tree with None, without those that git ignores."""
    roots = [*CRATES, *PACKAGES]
    if revision is None:
        listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *roots)
        present = [path for path in _wanted(listed.decode().split("\0")) if (ROOT / path).is_file()]
        return {path: (ROOT / path).read_text() for path in present}
    listed = _git("ls-tree", "-r", "-z", "--name-only", revision, "--", *roots)
    wanted = _wanted(listed.decode().split("\0"))
    if not wanted:
        return {}
    found: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", revision, "--", *wanted))) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                found[member.name] = file.read().decode()
    return found


def folder(path: str) -> str:
    """The row of a file: its folder, of the folders below a crate's `src` or the package only the first."""
    parts = PurePosixPath(path).parent.parts
    above = 3 if parts[0] == "crates" else 2
    return "/".join(parts[: above + 1])


def table(counts: list[dict[str, int]], titles: list[str]) -> str:
    """The lines of each folder and the sums of each language: a column for each count, then the difference of two."""
    rows: dict[str, list[int]] = {}
    for suffix, language in LANGUAGES.items():
        sums = [Counter[str]() for _ in counts]
        for column, of_files in zip(sums, counts, strict=True):
            for path, lines in of_files.items():
                if path.endswith(suffix):
                    column[folder(path)] += lines
        for name in sorted(set().union(*sums)):
            rows[name] = [column[name] for column in sums]
        rows[language] = [column.total() for column in sums]
    cells = [["folder", *titles, *(["difference"] if len(counts) == 2 else [])]]
    for name, lines_of in rows.items():
        difference = [f"{lines_of[1] - lines_of[0]:+,}"] if len(counts) == 2 else []
        cells.append([name, *(f"{lines:,}" for lines in lines_of), *difference])
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    said = []
    for row in cells:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        said.append("  ".join([row[0].ljust(widths[0]), *numbers]))
        if row[0] in LANGUAGES.values():
            said.append("")
    return "\n".join(said).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at", metavar="REV", help="count this revision of git (default: the working tree)")
    parser.add_argument("--against", metavar="REV", help="count this revision too, and print the difference")
    arguments = parser.parse_args()
    at: str | None = arguments.at
    against: str | None = arguments.against
    try:
        counts = [count(files_at(at))]
        if against is not None:
            counts.insert(0, count(files_at(against)))
    except (ValueError, SyntaxError) as refused:
        print(refused, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as refused:  # git has said why
        return int(refused.returncode)
    titles = ["lines"] if against is None else [against, at or "working tree"]
    print(table(counts, titles))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
