"""Writes what type checkers and the documentation say of options and of settings of stores: the tables of the core.

    python tools/option_docs.py [--check]

The tables are `crates/core/src/options/table.rs` and `crates/core/src/store/remote/settings.rs`. Build the extension
first (`make develop`). The texts stand between two markers: those of options in `python/penstock/_core.pyi` and
`docs/tuning.md`, those of settings in `python/penstock/_choices.py` and `docs/api.md`. `--check` writes nothing. It
fails if a file is not what it would be.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from penstock import _choices, _core
from penstock._options import default_text

ROOT = Path(__file__).resolve().parent.parent
#: What a keyword takes besides None, and what the attribute gives, by the form of an option or a setting.
TYPES = {
    "Flag": ("bool", "bool"),
    "Undecided": ("bool", "bool | None"),
    "Size": ("int | str", "int"),
    "SizeOrAuto": ("int | str", 'int | Literal["auto"]'),
    "Count": ("int", "int"),
    "Seconds": ("float", "float"),
    "Text": ("str", "str"),
    "Secret": ("str", "str"),
    "Names": ("Sequence[str] | str", "list[str]"),
    "File": ("str | os.PathLike[str]", "str"),
    "Callable": ("Callable[[], Mapping[str, object]]", "Callable[[], Mapping[str, object]]"),
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
        case "Flag" | "Undecided":
            return f"`{text}`"
        case "Choice" | "SizeOrAuto":
            return f'`"{text}"`'
        case "Text" | "File":
            return f'`"{option["default"]}"`' + (f": {option['means']}" if option["means"] else "")
        case "Seconds":
            return f"{text} s"
    return re.sub(r"(?<=\d)(?=[KMG]iB)", " ", text)


def descriptions(entry: dict[str, Any]) -> tuple[str, str]:
    """What Python says of an option or a setting, and what the documentation does."""
    python, _, documentation = entry["doc"].partition("\n\n")
    return " ".join(python.split()), " ".join(documentation.split())


def rows(group: str) -> str:
    """The table of the options of a group in the documentation."""
    lines = ["\n| option | default | meaning; when to change it |\n|---|---|---|\n"]
    for option in _core.option_table():
        if option["group"] == group:
            lines.append(f"| `{option['name']}` | {default_cell(option)} | {descriptions(option)[1]} |\n")
    return "".join([*lines, "\n"])


def members() -> str:
    """The members of the type `Storage`."""
    lines = []
    for setting in _core.storage_table():
        said = textwrap.fill(
            f'"""{descriptions(setting)[0].replace("`", "``")}"""',
            120,
            initial_indent="    ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines.append(f"    {setting['name']}: {types(setting)[0]} | None\n{said}\n")
    return "\n".join(lines)


def setting_rows(group: str) -> str:
    """The table of the settings of a group in the documentation. A setting without a description there shares the row
    of the next one."""
    lines, names = ["\n| setting | meaning |\n|---|---|\n"], []
    for setting in _core.storage_table():
        if setting["group"] == group:
            names.append(f"`{setting['name']}`")
            if meaning := descriptions(setting)[1]:
                lines.append(f"| {', '.join(names)} | {meaning} |\n")
                names = []
    return "".join([*lines, "\n"])


#: What stands between the markers of a file.
PARTS: list[tuple[str, str, Callable[[], str]]] = [
    ("python/penstock/_core.pyi", "options", lambda: stubs(_core.option_table())),
    ("docs/tuning.md", "everyday options", lambda: rows("everyday")),
    ("docs/tuning.md", "advanced options", lambda: rows("advanced")),
    ("python/penstock/_choices.py", "settings", members),
    ("docs/api.md", "settings of web servers", lambda: setting_rows("web")),
    ("docs/api.md", "settings of S3", lambda: setting_rows("s3")),
    ("docs/api.md", "settings of Azure", lambda: setting_rows("azure")),
    ("docs/api.md", "settings of the disk cache", lambda: setting_rows("cache")),
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
        print(f"{path}: {'not as the table in the core says: run tools/option_docs.py' if check else 'written anew'}")
    return 1 if changed and check else 0


if __name__ == "__main__":
    sys.exit(main())
