"""The starts of a model on a node, state by state: stock, from the server, and from the disk of an earlier start.

Stock is a plain client that downloads to the disk, and a loader that maps the files. Of a save to a bucket it is a
file, and a plain client that uploads it. Ratios are those of the same round; the median and the range of all rounds are
given.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .results import Run
from .scenarios import SECOND, UPLOAD

#: The clients that download, the strongest last.
TOOLS = ("urllib", "boto3", "go")


@dataclass(frozen=True)
class State:
    name: str
    scenario: str
    #: The time of a run that counts.
    time: str
    #: The count of a run: bytes that the server has given, or taken.
    served: str
    #: Names of contestants.
    stock: str
    ours: str


STATES = (
    *(
        State("from the bucket, nothing kept", "bucket", "seconds", "served_bytes", f"{tool} to disk, safetensors",
              "penstock url")
        for tool in TOOLS
    ),
    *(
        State(name, SECOND, time, served, f"{tool} to disk once, safetensors", "penstock url, disk cache")
        for name, time, served in (
            ("first start", "first_s", "first_served_bytes"), ("second start", "seconds", "served_bytes")
        )
        for tool in TOOLS
    ),
    State("second start", SECOND, "seconds", "served_bytes", "urllib to disk once, penstock",
          "penstock url, disk cache"),
    *(
        State("save to the bucket", UPLOAD, "seconds", "taken_bytes", f"safetensors to {where}, boto3", "penstock save")
        for where in ("disk", "memory")
    ),
)  # fmt: skip


def states(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """One row per checkpoint and state in which both were run."""
    by_place: dict[tuple[str, str, str], dict[int, Run]] = {}
    for run in runs:
        if "seconds" in run and "error" not in run and run.get("load", 0) == 0:
            place = run["checkpoint"], run["scenario"], run["contestant"]
            by_place.setdefault(place, {})[run["round"]] = run
    found = []
    for checkpoint in dict.fromkeys(place[0] for place in by_place):
        for state in STATES:
            stock, ours = (by_place.get((checkpoint, state.scenario, name), {}) for name in (state.stock, state.ours))
            rounds = sorted(stock.keys() & ours.keys())
            if not rounds:
                continue
            ratios = [stock[number][state.time] / ours[number][state.time] for number in rounds]
            row: dict[str, Any] = {"checkpoint": checkpoint, "state": state.name, "rounds": len(rounds)}
            for name, label, of in (("stock", state.stock, stock), ("ours", state.ours, ours)):
                row[name] = label
                row[f"{name}_s"] = statistics.median(of[number][state.time] for number in rounds)
                served = [of[number][state.served] for number in rounds if state.served in of[number]]
                row[f"{name}_served"] = int(statistics.median(served)) if served else None
            found.append(row | {"times": [statistics.median(ratios), min(ratios), max(ratios)]})
    return found


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The rows as Markdown; nothing without rows."""
    rows = list(rows)
    if not rows:
        return []
    lines = [
        "",
        "Starts on one node, and saves, medians; times as fast by round, median and range; bytes that the server gave "
        "or took:",
        "",
        "| checkpoint | state | stock | s | served MB | Penstock | s | served MB | times as fast | rounds |",
        f"|{'---|' * 10}",
    ]
    for row in rows:
        served = ["" if row[key] is None else f"{row[key] / 1e6:.2f}" for key in ("stock_served", "ours_served")]
        median, least, most = row["times"]
        cells = [row["checkpoint"], row["state"], row["stock"], f"{row['stock_s']:.3f}", served[0], row["ours"]]
        cells += [f"{row['ours_s']:.3f}", served[1], f"{median:.2f} ({least:.2f} to {most:.2f})", str(row["rounds"])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
