"""From single loads to rows: medians, spread, rates, and the share of what the machine allows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from .scenarios import SCENARIOS, ceilings

Run = dict[str, Any]
Row = dict[str, Any]

#: The time that rows are ranked by, as a run's and a row's `ranked` names it. Older result files have none: the load.
TOUCHED, ALONE = "last byte touched", "load"

#: How much faster than the fastest measurement of its ceiling the median of a contestant must be to be called a fault.
#: Both sides are few measurements on a machine that does other things too. The fastest of the ceiling has noise on its
#: side already (a median is compared with a minimum); what is left is that it may not have been tried at its best.
TOLERANCE = 0.05


def median(runs: Iterable[Run], key: str = "seconds") -> float:
    return float(statistics.median(run[key] for run in runs))


def percentile(values: Iterable[float], percent: float) -> float:
    """The nearest-rank percentile: the smallest value that so many percent of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def summarise(runs: list[Run], calibration: list[dict[str, Any]], on_gpu: bool = False) -> list[Row]:
    """One row per checkpoint, scenario and contestant."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["checkpoint"], run["scenario"], run["contestant"]), []).append(run)
    rows = []
    for (checkpoint, scenario, contestant), group in groups.items():
        row: Row = {"checkpoint": checkpoint, "scenario": scenario, "contestant": contestant}
        row |= {"kind": group[0]["kind"], "semantics": group[0].get("semantics"), "loads": len(group)}
        failed = [run for run in group if "error" in run]
        rows.append(row | ({"error": failed[0]["error"]} if failed else figures(group)))
    judge(rows, runs, calibration, on_gpu)
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def figures(group: list[Run]) -> Row:
    """The figures of one contestant: of the first load of each process, and apart from them of the later ones."""
    first = [run for run in group if run.get("load", 0) == 0]
    later = [run["seconds"] for run in group if run.get("load", 0) > 0]
    nbytes = first[0]["bytes"]
    row: Row = {
        "median_s": median(first),
        "min_s": min(run["seconds"] for run in first),
        "max_s": max(run["seconds"] for run in first),
        "bytes": nbytes,
        "gb_per_s": nbytes / 1e9 / median(first),
    }
    if later:
        row |= {"later_s": float(statistics.median(later)), "p99_s": percentile(later, 99)}
    if "ranked" in first[0]:
        row["ranked"] = first[0]["ranked"]
    for name in ("first_tensor_s", "load_s", "touch_s", "open_s", "cpu_s", "setup_s", "first_s", "warm_s"):
        if all(name in run for run in first):
            row[name] = median(first, name)
    fills = [run["fill_s"] for run in first if run.get("fill_state") == "finished"]
    if fills:
        row["fill_s"] = float(statistics.median(fills))
    kept = [run["kept_s"] for run in first if "kept_s" in run]
    if kept:
        row["kept_s"] = float(statistics.median(kept))
    served = ("served_bytes", "served_requests", "served_connections", "served_stalled", "first_served_bytes")
    for name in ("memory", "pinned", "device_memory", "cache_left", *served):
        known = [run[name] for run in first if run.get(name) is not None]
        if known:
            row[name] = int(statistics.median(known))
    if "cpu_s" in row:
        row["cpu_s_per_gb"] = row["cpu_s"] / (nbytes / 1e9)
    if "verified_bytes" in first[0]:
        row["verified"] = all(run["verified_bytes"] == run["bytes"] and not run["different"] for run in group)
    if "ceiling" in first[0]:
        row["settings"] = first[0]["ceiling"]
    return row


def judge(rows: list[Row], runs: list[Run], calibration: list[dict[str, Any]], on_gpu: bool) -> None:
    """Puts each row beside its ceiling: `ceiling`, its `ceiling_s`, `share`, and `fault` where the row is above it.

    The share is of `ceiling_s`: the ceiling's median for as many bytes. The page draws the ceiling there too.
    """
    for row in rows:
        if row["kind"] == "ceiling" or "error" in row:
            continue
        scenario = SCENARIOS[row["scenario"]]
        beside = [run for run in runs if (run["checkpoint"], run["scenario"]) == (row["checkpoint"], row["scenario"])]
        # Measured with the machine at rest on the same files: a bound also where a neighbour is about
        rested = [] if scenario.tmpfs or scenario.cache == "half" else calibration
        found: list[tuple[float, float, str]] = []
        for way in ceilings(scenario, row["semantics"], on_gpu):
            stages = []
            for stage in way:
                usual = [rate for run in beside if (rate := seconds_per_byte(run, stage)) is not None]
                at_rest = [
                    one["seconds"] / one["bytes"]
                    for one in rested
                    if (one["checkpoint"], one["measure"]) == (row["checkpoint"], stage) and one["bytes"]
                ]
                if usual:
                    stages.append((statistics.median(usual), min(usual + at_rest), stage))
            if len(stages) == len(way):
                found.append(max(stages))
        if not found:
            continue
        usual_rate, _, row["ceiling"] = min(found)
        row["ceiling_s"] = usual_rate * row["bytes"]
        row["share"] = row["ceiling_s"] / row["median_s"]
        # Of all ways the fastest single measurement: it may be of another way than the one that is usually the fastest.
        best_rate, name = min(stage[1:] for stage in found)
        best = best_rate * row["bytes"]
        if row["median_s"] < best * (1 - TOLERANCE):
            row["fault"] = (
                f"{row['median_s']:.3f} s, and {name} alone took {best:.3f} s at its fastest: either that was not "
                "measured at its best, or the load did not do all of its work"
            )


def seconds_per_byte(run: Run, stage: str) -> float | None:
    """The facts of a ceiling's stage: one that was measured in turn, or the raw read right before a load."""
    if run["contestant"] == f"ceiling: {stage}" and run.get("bytes"):
        return float(run["seconds"] / run["bytes"])
    if stage == "direct" and "raw_s" in run and run.get("bytes") and run["kind"] != "ceiling":
        return float(run["raw_s"] / run["bytes"])
    return None


def left_on_disk(run: Run) -> bool:
    """Whether touching the tensors still read from the disk: such a load was not over when it returned."""
    return bool(run.get("touch_absent_bytes", 0) > 0 or run.get("touch_major_faults", 0) > 0)


def alone(run: Run) -> float:
    """Seconds of the load alone, and of the touch only where that still read from the disk."""
    return float(run["load_s"] + (run["touch_s"] if left_on_disk(run) else 0))


def together(runs: list[Run]) -> Run:
    """The findings of processes that loaded at the same time, as one: the slowest one's seconds, all of their work."""
    if len(runs) == 1:
        return runs[0]
    slowest = max(runs, key=lambda run: run["load_s"] + run.get("touch_s", 0.0))
    return slowest | {
        "cpu_s": sum(run["cpu_s"] for run in runs),
        "touch_cpu_s": sum(run.get("touch_cpu_s", 0.0) for run in runs),
        "memory": sum(run["memory"] for run in runs),
        "verified_bytes": min(run["verified_bytes"] for run in runs),
        "different": [name for run in runs for name in run["different"]],
    }


def beyond(peaks: dict[str, int], run: Run, nbytes: int) -> Run:
    """Peaks of memory as they stand in a run; a short load may have ended between two looks."""
    found: Run = {"memory": max(peaks.get("memory", 0), run["memory"])}
    if peaks.get("pinned"):
        found["pinned"] = peaks["pinned"]
    if "device_memory" in peaks:
        found["device_memory"] = max(0, peaks["device_memory"] - nbytes)
    return found
