"""What the rows of a benchmark say, before anybody looks at them: who is first, what missed, what cannot be true."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


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


def of_penstock(rows: list[Row]) -> Row | None:
    """Penstock as it comes: `penstock` where it is there, else the first of its rows (forced routes come after)."""
    ours = finished(rows, "penstock")
    return next((row for row in ours if row["contestant"] == "penstock"), ours[0] if ours else None)


@dataclass(frozen=True)
class Contest:
    """Penstock beside the fastest other loader of like semantics."""

    checkpoint: str
    scenario: str
    semantics: str | None
    loads: str  # "first" or "later": of the process
    ours: Row
    rival: Row

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
            loaders = [row for row in all_of_it if row.get("kind") != "ceiling"]
            for semantics in dict.fromkeys(row.get("semantics") for row in loaders):
                alike = [row for row in loaders if row.get("semantics") == semantics]
                for loads, key in (("first", "median_s"), ("later", "later_s")):
                    with_figures = [row for row in alike if row.get(key)]
                    ours, rivals = of_penstock(with_figures), finished(with_figures, "rival")
                    if ours is not None and rivals:
                        rival = min(rivals, key=lambda row: float(row[key]))
                        found.append(Contest(checkpoint, scenario, semantics, loads, ours, rival))
    return found


@dataclass(frozen=True)
class Verdict:
    """What the page says first."""

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


def verdict(results: dict[str, Any]) -> Verdict:
    rows: list[Row] = results.get("rows", [])
    bounds: list[Row] = results.get("bounds", [])
    judged = [bound for bound in bounds if bound.get("judged")]
    loads = [row for row in finished(rows) if row.get("kind") != "ceiling"]
    return Verdict(
        held=[bound for bound in judged if bound["holds"]],
        missed=[bound for bound in judged if not bound["holds"]],
        unjudged=[bound for bound in bounds if not bound.get("judged")],
        contests=contests(rows),
        faults=[row for row in rows if row.get("fault")],
        failed=[row for row in rows if row.get("median_s") is None],
        unverified=[row for row in loads if not row.get("verified")],
        verified=sum(bool(row.get("verified")) for row in loads),
    )
