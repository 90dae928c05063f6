"""Findings in the rows of a benchmark: the first loader, missed bounds, rows that cannot be true."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..results import TOUCHED

Row = dict[str, Any]

#: The results of a load, by `semantics`: only loaders with the same kind of result are compared.
SEMANTICS = {"any": "any memory", "private": "private memory", "into": "existing tensors"}
#: Penstock as it comes, no route forced.
PLAIN = ("penstock", "penstock copy", "penstock load_into")


def ceiling_name(name: str) -> str:
    """`place` of `ceiling: place`."""
    return name.removeprefix("ceiling:").strip()


def sections(rows: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """The rows by checkpoint and scenario, in the order in which they were measured."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault(row["checkpoint"], {}).setdefault(row["scenario"], []).append(row)
    return found


def finished(rows: Iterable[Row], kind: str | None = None) -> list[Row]:
    """Rows with figures, of one kind or of any."""
    return [row for row in rows if row.get("median_s") is not None and kind in (None, row.get("kind"))]


def alike(rows: Iterable[Row]) -> dict[str | None, list[Row]]:
    """Loaders by semantics, in the order of `SEMANTICS`."""
    found: dict[str | None, list[Row]] = {}
    for row in rows:
        if row.get("kind") != "ceiling":
            found.setdefault(row.get("semantics"), []).append(row)
    known = list(SEMANTICS)
    return dict(sorted(found.items(), key=lambda item: known.index(item[0]) if item[0] in known else len(known)))


def loads_of(runs: Iterable[Row], row: Row, later: bool = False) -> list[float]:
    """The seconds of every load that a row sums up: the first ones of their processes, or the later ones."""
    keys = ("checkpoint", "scenario", "contestant")
    return [
        float(run["seconds"])
        for run in runs
        if run.get("seconds") and all(run.get(key) == row[key] for key in keys) and (run.get("load", 0) > 0) == later
    ]


def with_ceilings(rows: list[Row], runs: list[Row]) -> list[Row]:
    """The rows of one scenario, and one for the raw read that was timed right before each load, if it was."""
    named = {ceiling_name(str(row["ceiling"])) for row in rows if row.get("ceiling")}
    there = {ceiling_name(row["contestant"]) for row in rows if row.get("kind") == "ceiling"}
    if "direct" not in named - there:
        return rows
    of = {key: rows[0][key] for key in ("checkpoint", "scenario")}
    before = [run for run in runs if run.get("raw_s") and all(run.get(key) == value for key, value in of.items())]
    if not before:
        return rows
    seconds, nbytes = [float(run["raw_s"]) for run in before], next(row["bytes"] for row in rows if row.get("bytes"))
    raw = of | {"contestant": "ceiling: direct", "kind": "ceiling", "loads": len(seconds), "bytes": nbytes}
    raw |= {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
    return [*rows, raw | {"gb_per_s": nbytes / raw["median_s"] / 1e9}]


def of_penstock(rows: list[Row]) -> Row | None:
    """Penstock as it comes, else the first of its rows."""
    ours = finished(rows, "penstock")
    return next((row for row in ours if row["contestant"] in PLAIN), ours[0] if ours else None)


@dataclass(frozen=True)
class Contest:
    """Penstock beside the fastest other loader of like semantics."""

    checkpoint: str
    scenario: str
    semantics: str | None
    several: bool  # semantics in this scenario
    loads: str  # "first" or "later": of the process
    ours: Row
    rival: Row

    @property
    def what(self) -> str:
        """The difference of this contest from others of the scenario."""
        kind = SEMANTICS.get(str(self.semantics), self.semantics) if self.several else None
        return ", ".join(part for part in (kind, "later loads" if self.loads == "later" else None) if part)

    @property
    def touched(self) -> bool:
        """Whether it is about the time to the last byte touched."""
        return self.loads == "first" and self.ours.get("ranked") == TOUCHED

    @property
    def key(self) -> str:
        return "median_s" if self.loads == "first" else "later_s"

    @property
    def times(self) -> float:
        """How many times as fast as the rival."""
        return float(self.rival[self.key]) / float(self.ours[self.key])

    @property
    def first(self) -> bool:
        return self.times >= 1

    @property
    def overlap(self) -> bool:
        """Whether the slowest of one and the fastest of the other lie the other way round."""
        if self.loads != "first" or any("min_s" not in row or "max_s" not in row for row in (self.ours, self.rival)):
            return False
        return bool(self.ours["min_s"] <= self.rival["max_s"] and self.rival["min_s"] <= self.ours["max_s"])


def contests(rows: list[Row]) -> list[Contest]:
    """One for each checkpoint, scenario and semantics in which penstock and another loader both finished."""
    found = []
    for checkpoint, scenarios in sections(rows).items():
        for scenario, all_of_it in scenarios.items():
            groups = alike(all_of_it)
            for semantics, rows_alike in groups.items():
                for loads, key in (("first", "median_s"), ("later", "later_s")):
                    with_figures = [row for row in rows_alike if row.get(key)]
                    ours, rivals = of_penstock(with_figures), finished(with_figures, "rival")
                    if ours is not None and rivals:
                        rival = min(rivals, key=lambda row: float(row[key]))
                        found.append(Contest(checkpoint, scenario, semantics, len(groups) > 1, loads, ours, rival))
    return found


@dataclass(frozen=True)
class Verdict:
    """The first words of the page."""

    held: list[Row]
    missed: list[Row]
    unjudged: list[Row]
    contests: list[Contest]
    faults: list[Row]
    failed: list[Row]
    unverified: list[Row]
    verified: int

    @property
    def behind(self) -> list[Contest]:
        return [contest for contest in self.contests if not contest.first]


def judged(results: dict[str, Any]) -> Verdict:
    rows: list[Row] = results.get("rows", [])
    bounds: list[Row] = results.get("bounds", [])
    to_judge = [bound for bound in bounds if bound.get("judged")]
    loads = [row for row in finished(rows) if row.get("kind") != "ceiling"]
    return Verdict(
        held=[bound for bound in to_judge if bound["holds"]],
        missed=[bound for bound in to_judge if not bound["holds"]],
        unjudged=[bound for bound in bounds if not bound.get("judged")],
        contests=[] if results.get("quick") else contests(rows),  # too small a run to say which is first
        faults=[row for row in rows if row.get("fault")],
        failed=[row for row in rows if row.get("median_s") is None],
        unverified=[row for row in loads if not row.get("verified")],
        verified=sum(bool(row.get("verified")) for row in loads),
    )
