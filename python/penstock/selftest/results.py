"""The findings of a run, line by line, so that a run that is cut off keeps them; and the report, which can be sent."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

#: The folder for results; not set: nothing is written down.
FOLDER = "PENSTOCK_SELFTEST_OUT"
JOURNAL = "journal.jsonl"


def journal() -> Path | None:
    folder = os.environ.get(FOLDER)
    return Path(folder, JOURNAL) if folder else None


def note(**what: Any) -> None:
    """Adds one line. It is on its way to the disk when this returns, whatever becomes of the process."""
    if (path := journal()) is not None:
        line = (json.dumps(what, default=str) + "\n").encode()
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def row(table: str, **cells: Any) -> None:
    """Adds a row to a table, and prints it."""
    note(table=table, row=cells)
    print(f"{table}: " + ", ".join(f"{name} {text(value)}" for name, value in cells.items()), flush=True)


def read(folder: Path) -> list[dict[str, Any]]:
    """All lines. The last one of a process that was killed may be incomplete: it is left out."""
    found = []
    path = folder / JOURNAL
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def text(value: Any) -> str:
    """A cell of a table."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown; a column for each name that any of them has."""
    names = list(dict.fromkeys(name for cells in rows for name in cells))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(text(cells.get(name, "")) for name in names) + " |" for cells in rows]
    return "\n".join(lines)


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Tests by outcome, tables by name, and what else was noted."""
    tests: dict[str, dict[str, Any]] = {}
    tables: dict[str, list[dict[str, Any]]] = {}
    machine: dict[str, Any] = {}
    parts = []
    for line in lines:
        if "started" in line:
            # One that has started and of which nothing more is heard has taken its process with it
            tests[line["started"]] = {"outcome": "lost", "reason": "its process ended during it", "seconds": 0.0}
        elif "test" in line:
            tests[line["test"]] = {key: line[key] for key in ("outcome", "reason", "seconds")}
        elif "table" in line:
            tables.setdefault(line["table"], []).append(line["row"])
        elif "machine" in line:
            machine |= line["machine"]
        elif "part" in line:
            parts.append(line)
    return {"machine": machine, "parts": parts, "tests": tests, "tables": tables}


def markdown(found: dict[str, Any]) -> str:
    """The summary as a page."""
    pages = ["# Penstock on a GPU", ""]
    if found["machine"].get("fake"):
        pages += ["**On the fake driver: these figures say nothing about any hardware.**", ""]
    if reason := found["machine"].get("no GPU"):
        pages += [f"**There is no GPU here: {reason}** Nothing was tested and nothing was measured.", ""]
    pages += [table([{"of": name, "": value} for name, value in found["machine"].items()]), ""]
    outcomes = [test["outcome"] for test in found["tests"].values()]
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in ("passed", "failed", "lost", "skipped"))
    pages += ["## Tests", "", counts, ""]
    if found["parts"]:
        pages += [table(found["parts"]), ""]
    named = [
        {"test": name, "outcome": test["outcome"], "reason": test["reason"][:300]}
        for name, test in found["tests"].items()
        if test["outcome"] != "passed"
    ]
    if named:
        pages += [table(named), ""]
    for name, rows in found["tables"].items():
        pages += [f"## {name}", "", table(rows), ""]
    return "\n".join(pages)


class Anonymous:
    """Texts without the names of this host, of its user, and of the folders in which the suite and its files lie."""

    def __init__(self, files: Path) -> None:
        folders = {str(files): "FILES", os.environ.get(FOLDER, ""): "OUT", str(Path.cwd()): "HERE"}
        folders |= {sys.prefix: "PYTHON", str(Path(__file__).parents[2]): "PACKAGES", str(Path.home()): "~"}
        # The longest first: one may lie in another
        ordered = sorted((folder for folder in folders if len(folder) > 1), key=len, reverse=True)
        self._folders = [(folder, folders[folder]) for folder in ordered]
        self._names = {socket.gethostname(): "HOST", socket.gethostname().partition(".")[0]: "HOST"}
        with contextlib.suppress(KeyError, OSError):  # a user without a name, as in many containers
            self._names[getpass.getuser()] = "USER"
        self._names = {name: shown for name, shown in self._names.items() if name not in _NAMES_OF_NOBODY}

    def text(self, text: str) -> str:
        for folder, shown in self._folders:
            text = text.replace(folder, shown)
        for name, shown in self._names.items():
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown, text)
        return text


#: Names that tell nothing of anybody.
_NAMES_OF_NOBODY = ("", "root", "user", "nobody", "localhost", "ubuntu", "debian")
