"""Writes what type checkers and the documentation say of the options, from the table in the core.

    python tools/option_docs.py [--check]

The table is `crates/core/src/options/table.rs`. Build the extension first (`make develop`). The texts stand between two
markers in `python/penstock/_core.pyi` and `docs/tuning.md`. `--check` writes nothing. It fails if a file is not what it
would be.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from penstock import _choices, _core
from penstock._options import default_text

ROOT = Path(__file__).resolve().parent.parent
#: What a keyword takes besides None, and what the attribute gives, by the form of an option.
TYPES = {
    "Undecided": ("bool", "bool | None"),
    "Size": ("int | str", "int"),
    "SizeOrAuto": ("int | str", 'int | Literal["auto"]'),
    "Count": ("int", "int"),
    "Seconds": ("float", "float"),
    "Text": ("str", "str"),
    "File": ("str | os.PathLike[str]", "str"),
}
#: The names of the types of `penstock._choices`, by their values.
CHOICES = {get_args(kind): name for name, kind in vars(_choices).items() if get_args(kind)}


def types(option: dict[str, Any]) -> tuple[str, str]:
    """What the keyword of an option takes besides None, and what its attribute gives."""
    if option["form"] != "Choice":
        return TYPES[option["form"]]
    listed = ", ".join(f'"{text}"' for text in option["texts"])
    kind = CHOICES.get(tuple(option["texts"]), f"Literal[{listed}]")
    return kind, kind


def stubs(options: list[dict[str, Any]]) -> str:
    """The keywords and the attributes of `Options` for type checkers."""
    keywords = [f"        {option['name']}: {types(option)[0]} | None = None,\n" for option in options]
    attributes = [f"    @property\n    def {option['name']}(self) -> {types(option)[1]}: ...\n" for option in options]
    head = "    def __new__(\n        cls,\n        *,\n"
    return "".join([head, *keywords, "    ) -> Options: ...\n", *attributes])


def default_cell(option: dict[str, Any]) -> str:
    """The default of an option as a table shows it: 4 MiB, 120 s, `"auto"`."""
    text = default_text(option)
    match option["form"]:
        case "Undecided":
            return f"`{text}`"
        case "Choice" | "SizeOrAuto":
            return f'`"{text}"`'
        case "Text" | "File":
            return f'`"{option["default"]}"`' + (f": {option['means']}" if option["means"] else "")
        case "Seconds":
            return f"{text} s"
    return re.sub(r"(?<=\d)(?=[KMG]iB)", " ", text)


def rows(options: list[dict[str, Any]]) -> str:
    """The table of some options in the documentation."""
    lines = ["\n| option | default | meaning; when to change it |\n|---|---|---|\n"]
    for option in options:
        meaning = " ".join(option["doc"].partition("\n\n")[2].split())
        lines.append(f"| `{option['name']}` | {default_cell(option)} | {meaning} |\n")
    return "".join([*lines, "\n"])


def _of(group: str) -> list[dict[str, Any]]:
    return [option for option in _core.option_table() if option["group"] == group]


#: What stands between the markers of a file.
PARTS: list[tuple[str, str, Callable[[], str]]] = [
    ("python/penstock/_core.pyi", "options", lambda: stubs(_core.option_table())),
    ("docs/tuning.md", "everyday options", lambda: rows(_of("everyday"))),
    ("docs/tuning.md", "advanced options", lambda: rows(_of("advanced"))),
]


def written(text: str, name: str, part: str) -> str:
    """The text of a file with ``part`` between the markers of this name.

    Raises:
        ValueError: the text does not have these markers once.
    """
    head, begin, rest = text.partition(f"{name}: begin ")
    old, end, tail = rest.partition(f"{name}: end")
    if not begin or not end or f"{name}: begin " in tail:
        raise ValueError(f"there are no markers `{name}: begin` and `{name}: end`")
    marker, _, between = old.partition("\n")
    sign = between.rpartition("\n")[2]  # "    # " or "<!-- "
    return f"{head}{begin}{marker}\n{part}{sign}{end}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not up to date")
    check: bool = parser.parse_args().check
    changed = set()
    for path, name, part in PARTS:
        file = ROOT / path
        old = file.read_text()
        new = written(old, name, part())
        if new != old:
            changed.add(path)
            if not check:
                file.write_text(new)
    for path in sorted(changed):
        print(f"{path}: {'not as the table of the options: run tools/option_docs.py' if check else 'written anew'}")
    return 1 if changed and check else 0


if __name__ == "__main__":
    sys.exit(main())
