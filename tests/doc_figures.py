"""Tables of documents, their figures, and the kept results of measurements that figures are compared with."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[1]
#: What the documents call loaders, where it is not what the benchmark calls them.
LOADERS = {"Run:ai": "runai streamer"}
SCENARIOS = {"`load_into`": "load_into", "cast to F16": "cast"}
OURS = {"any": "penstock", "private": "penstock copy", "into": "penstock load_into"}

_TIME = r"[\d.,]+ (?:ms|s)"


@dataclass
class Table:
    """One table of a document."""

    document: str
    line: int
    heading: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line} ({self.heading})"

    def is_measured(self) -> bool:
        """Whether it has times, rates or shares with two digits behind the point."""
        body = " ".join(" ".join(row) for row in self.rows)
        headed = any(
            re.fullmatch(r"(.* )?(s|ms|seconds|GB/s|MB/s)|.*(,|:) (s|ms|GB/s|MB/s)", one) for one in self.header
        )
        return bool(headed or re.search(r"\d (ms|s|us)\b", body) or len(re.findall(r"\b\d+\.\d\d\b", body)) > 2)


def tables(document: str) -> list[Table]:
    """All tables of a document, in order."""
    found: list[Table] = []
    heading, within, fenced = "", False, False
    for number, line in enumerate((TOP / document).read_text().splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if line.startswith("#") and not fenced:
            heading = line.lstrip("# ")
        if not line.startswith("|") or fenced:
            within = False
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if not within:
            found.append(Table(document, number, heading, cells))
            within = True
        elif not set(line) <= set("|-: "):
            found[-1].rows.append(cells)
    return found


@cache
def kept(name: str) -> Any:
    """A kept result."""
    return json.loads((TOP / "benches" / "results" / f"{name}.json").read_text())


@cache
def rows_of(name: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The rows of a kept result of `penstock bench`, by checkpoint, scenario and contestant."""
    return {(row["checkpoint"], row["scenario"], row["contestant"]): row for row in kept(name)["rows"]}


def fits(text: str, value: float) -> bool:
    """Whether a value is what a number in a text says, at the digits that it has. `MB` is 1e6 bytes, `ms` 1e-3 s."""
    found = re.fullmatch(r"\**([\d.,]+)\** ?(\w*)\**", text.strip())
    assert found is not None, text
    number, unit = found[1].replace(",", ""), found[2]
    scale = {"": 1.0, "s": 1.0, "ms": 1e-3, "MB": 1e6, "GB": 1e9}[unit]
    digits = len(number.partition(".")[2])
    return abs(value / scale - float(number)) <= 0.5 * 10**-digits * (1 + 1e-6) + 1e-12


def times(text: str) -> list[str]:
    """The times in a text, in order."""
    return re.findall(_TIME, text)


def scenario_of(text: str) -> tuple[str, str]:
    """What the first cell of a row means: the scenario, and the semantics of its loaders."""
    name = text.partition(", private")[0]
    name = SCENARIOS.get(name, name)
    semantics = "into" if name == "load_into" else "private" if text.endswith("private") else "any"
    return name, semantics


def check_loads(table: Table, result: str, checkpoint: str) -> None:
    """A table with the columns scenario, penstock, next best, others, ceilings."""
    rows = rows_of(result)
    ceilings = ""
    for cells in table.rows:
        where = f"{table.place}: {cells[0]}"
        scenario, semantics = scenario_of(cells[0])
        ours = rows[checkpoint, scenario, OURS[semantics]]
        told = re.fullmatch(
            rf"\**(?P<median>{_TIME})\** \((?P<min>{_TIME}) to (?P<max>{_TIME})\)(?:, later (?P<later>{_TIME}))?"
            r"(?:, (?P<share>[\d.]+) of `(?P<ceiling>\w+)`)?",
            cells[1],
        )
        assert told is not None, f"{where}: {cells[1]}"
        for key in ("median", "min", "max", "later"):
            if told[key] is not None:
                assert fits(told[key], ours[f"{key}_s"]), f"{where}: {key} {told[key]}, kept {ours[f'{key}_s']}"
        if told["share"] is not None:
            assert told["ceiling"] == ours["ceiling"] and fits(told["share"], ours["share"]), f"{where}: share"
        rivals = [one for cell in cells[2:4] for one in cell.split("; ") if one]
        for one in rivals:
            found = re.fullmatch(rf"(?P<name>.+?) (?P<median>{_TIME})(?:, later (?P<later>{_TIME}))?", one)
            assert found is not None, f"{where}: {one}"
            theirs = rows[checkpoint, scenario, LOADERS.get(found["name"], found["name"])]
            assert theirs["semantics"] == semantics, f"{where}: {one}"
            for key in ("median", "later"):
                if found[key] is not None:
                    assert fits(found[key], theirs[f"{key}_s"]), f"{where}: {one}, kept {theirs[f'{key}_s']}"
        best = min(
            row["median_s"]
            for (made, at, _), row in rows.items()
            if (made, at, row.get("semantics"), row["kind"]) == (checkpoint, scenario, semantics, "rival")
            and "median_s" in row
        )
        assert fits(times(cells[2])[0], best), f"{where}: the next best is another one"
        assert (ours["median_s"] > best) <= cells[1].startswith("**"), f"{where}: not first, and not bold"
        ceilings = ceilings if cells[4] == "as above" else cells[4]
        for stage, time in re.findall(rf"`(\w+)` ({_TIME})", ceilings):
            assert fits(time, rows[checkpoint, scenario, f"ceiling: {stage}"]["median_s"]), f"{where}: {stage}"
