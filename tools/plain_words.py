"""Lists documentation whose first word hides the noun: "What a rank sends" in place of "Messages of a rank".

    python tools/plain_words.py [--count] [TREE ...]

Prints the file, the line and the first line of each such text, for the given trees or for all. `--count` prints the
number of each tree instead. The trees:

- `core`, `python-crate`, `serve`: comments `///` and `//!` in `crates/core/src`, `crates/python/src` and
  `crates/serve/src`, tests included;
- `package`: docstrings, and comments `#:`, in `python/penstock`, type stubs included.

A text is listed if it begins with one of `WORDS`. Three words are left out, because good texts begin with them too:
"Whether" (a field or function that is true or false: "Whether the file is mapped"), "Where" ("Where extents are cut")
and "How" ("How many connections there are"). "For", "With" and "In" begin a sentence and hide no noun.

`tests/test_plain_words.py` holds the numbers, which may only fall. Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TREES = {
    "core": "crates/core/src",
    "python-crate": "crates/python/src",
    "serve": "crates/serve/src",
    "package": "python/penstock",
}
#: First words that stand in place of a noun. "Those" and "Of" lean on the text before them.
WORDS = ("What", "Whatever", "Who", "Whoever", "Whose", "Whom", "Which", "Why", "Those", "That", "Of")
_HIDDEN = re.compile(rf"(?:{'|'.join(WORDS)})\b")
_RUST = re.compile(r"\s*(///(?!/)|//!)\s?(.*)")


class Text(NamedTuple):
    """The first line of a documentation text, and its place."""

    path: Path
    line: int
    text: str

    def hides_the_noun(self) -> bool:
        """True if the text begins with one of `WORDS`."""
        return _HIDDEN.match(self.text) is not None


def rust_texts(path: Path) -> Iterator[Text]:
    """The doc comments of a Rust file. Lines of the same kind that follow each other are one text. A heading such as
    `# Errors` begins another one."""
    before = ""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        found = _RUST.match(line)
        kind = found[1] if found else ""
        if found and kind != before:
            yield Text(path, number, found[2].strip())
        # The text below a heading is one of its own
        before = "" if found and found[2].startswith("# ") else kind


def python_texts(path: Path) -> Iterator[Text]:
    """The docstrings of a Python file, strings below an attribute included, and its comments that begin with `#:`."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Text(path, node.lineno, node.value.value.strip().partition("\n")[0])
    before = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.string.startswith("#:"):
            if token.start[0] != before + 1:
                yield Text(path, token.start[0], token.string[2:].strip())
            before = token.start[0]


def texts(tree: str) -> Iterator[Text]:
    """All documentation texts of a tree, by file and line."""
    for path in sorted((ROOT / TREES[tree]).rglob("*")):
        if path.suffix == ".rs":
            yield from rust_texts(path)
        elif path.suffix in (".py", ".pyi"):
            yield from sorted(python_texts(path), key=lambda text: text.line)


def hidden(tree: str) -> list[Text]:
    """The texts of a tree that hide their noun."""
    return [text for text in texts(tree) if text.hides_the_noun()]


def main(arguments: list[str]) -> int:
    """Prints the list, or the numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", action="store_true", help="the number of each tree")
    parser.add_argument("trees", nargs="*", metavar="TREE", help=", ".join(TREES))
    asked = parser.parse_args(arguments)
    if unknown := set(asked.trees) - TREES.keys():
        parser.error(f"no such tree: {', '.join(sorted(unknown))}")
    for tree in asked.trees or TREES:
        found = hidden(tree)
        if asked.count:
            print(f"{tree}: {len(found)}")
        else:
            for text in found:
                print(f"{text.path.relative_to(ROOT)}:{text.line}: {text.text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
