"""From single loads to rows: medians, spread, rates and shares."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

Run = dict[str, Any]


def median(runs: Iterable[Run], key: str = "seconds") -> float:
    return float(statistics.median(run[key] for run in runs))


def summarise(runs: list[Run]) -> list[dict[str, Any]]:
    """One row per checkpoint, scenario and contestant: medians and spread."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["checkpoint"], run["scenario"], run["contestant"]), []).append(run)
    rows = []
    for (checkpoint, scenario, contestant), group in groups.items():
        row: dict[str, Any] = {"checkpoint": checkpoint, "scenario": scenario, "contestant": contestant}
        row["loads"] = len(group)
        failed = [run for run in group if "error" in run]
        if failed:
            rows.append(row | {"error": failed[0]["error"]})
            continue
        row |= {
            "median_s": median(group),
            "min_s": min(run["seconds"] for run in group),
            "max_s": max(run["seconds"] for run in group),
            "bytes": group[0]["bytes"],
            "gb_per_s": group[0]["bytes"] / 1e9 / median(group),
        }
        if "touch_s" in group[0]:
            row |= {"load_s": median(group, "load_s"), "touch_s": median(group, "touch_s")}
            row |= {"cpu_s": median(group, "cpu_s"), "memory": median(group, "memory")}
            if "open_s" in group[0]:
                row["open_s"] = median(group, "open_s")
            row["verified"] = all(run["verified_bytes"] == run["bytes"] and not run["different"] for run in group)
        if "raw_s" in group[0]:
            row["share_of_raw"] = statistics.median(run["raw_s"] / run["seconds"] for run in group)
        rows.append(row)
    return rows
