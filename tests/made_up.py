"""Results and traces made up for the tests of the benchmark's page. They are of no machine and no load."""

from __future__ import annotations

import random
from typing import Any

GB = 1_000_000_000
MIB = 1 << 20


def row(
    checkpoint: str, scenario: str, contestant: str, kind: str, seconds: list[float], **more: Any
) -> dict[str, Any]:
    """One row of results, and what a run of the benchmark would have summed up from these loads."""
    median = sorted(seconds)[len(seconds) // 2]
    found: dict[str, Any] = {
        "checkpoint": checkpoint, "scenario": scenario, "contestant": contestant, "kind": kind, "semantics": "any",
        "loads": len(seconds), "median_s": median, "min_s": min(seconds), "max_s": max(seconds), "bytes": GB,
        "gb_per_s": GB / 1e9 / median,
    }  # fmt: skip
    if kind != "ceiling":
        found |= {"cpu_s": median / 10, "memory": 4096, "verified": True, "ranked": "load"}
        if scenario == "cold":
            found |= {"ranked": "last byte touched", "load_s": median / 2, "touch_s": median / 2}
        if "share" in more:
            found["ceiling_s"] = more["share"] * median
    return found | more


def results() -> dict[str, Any]:
    """Two checkpoints; a missed bound, a fault, a failure, a contestant ahead of penstock, and one that is absent."""
    rows = [
        row("a", "cold", "penstock", "penstock", [0.9, 1.0, 1.1], ceiling="direct", share=0.8, later_s=0.95),
        row("a", "cold", "penstock uring", "penstock", [0.8, 0.9, 1.0], ceiling="direct", share=0.8 / 0.9),
        row("a", "cold", "rival", "rival", [1.9, 2.0, 2.1], ceiling="direct", share=0.4),
        row("a", "cold", "ceiling: direct", "ceiling", [0.7, 0.8, 0.9]),
        row("a", "cold", "ceiling: place", "ceiling", [0.75, 0.85, 0.95]),
        row("a", "warm", "penstock", "penstock", [0.010, 0.012, 0.014]),
        row("a", "warm", "rival", "rival", [0.002, 0.003, 0.004], ceiling="direct", share=2.0, fault="above direct"),
        row("b", "cold", "penstock", "penstock", [0.9, 1.0, 1.1], ceiling="direct", share=0.7, later_s=0.5),
        row("b", "cold", "rival", "rival", [1.4, 1.5, 1.6], ceiling="direct", share=0.7 / 1.5),
        row("b", "cold", "penstock copy", "penstock", [1.1, 1.2, 1.3], semantics="private"),
        row("b", "cold", "private rival", "rival", [0.9, 1.0, 1.25], semantics="private"),
    ]
    rows.append({"checkpoint": "b", "scenario": "cold", "contestant": "other", "kind": "rival", "loads": 1})
    rows[-1] |= {"semantics": "any", "error": "RuntimeError: no room"}
    of = ("checkpoint", "scenario", "contestant")
    runs = [
        {key: r[key] for key in of} | {"seconds": r[key], "load": 0}
        for r in rows
        if "median_s" in r
        for key in ("min_s", "median_s", "max_s")
    ]
    for run in runs:
        if run["checkpoint"] == "b":  # the raw read right before each of them
            run["raw_s"] = 0.7
    runs += [{key: r[key] for key in of} | {"seconds": 0.5, "load": 1} for r in rows if "later_s" in r]
    return {
        "schema": 3, "time": "2026-01-02T03:04:05+00:00", "command": "penstock bench --made-up", "preset": None,
        "quick": False,
        "machine": {
            "cpu": "Made-up CPU", "cores": 4, "memory": 8 << 30, "kernel": "0.0", "file_system": "ext4",
            "python": "3.11.0", "versions": {"penstock": "0.0.0", "rival": "1.2", "absent one": None}, "gpu": None,
            "load_average": [3.5, 1.0, 0.5],
        },
        "load_average_at_end": [2.25, 2.0, 1.0],
        "absent": {"absent one": "No module named 'absent_one'"},
        "checkpoints": {"a": {"layout": "made up", "nbytes": GB, "tensors": 1234, "files": 2}},
        "calibration": [
            {"checkpoint": "a", "measure": "direct", "depth": 4, "block": 4 * MIB, "bytes": GB, "seconds": 0.9},
            {"checkpoint": "a", "measure": "direct", "depth": 8, "block": 4 * MIB, "bytes": GB, "seconds": 0.8},
        ],
        "rows": rows,
        "bounds": [
            {"checkpoint": "a", "claim": "cold: share", "value": 0.8, "sign": ">=", "bound": 0.9, "holds": False,
             "judged": True},
            {"checkpoint": "b", "claim": "cold: times", "value": 1.5, "sign": ">=", "bound": 1.0, "holds": True,
             "judged": True},
        ],
        "runs": runs,
        "traces": [{"checkpoint": "a", "scenario": "cold", "contestant": "penstock", "trace": trace()}],
    }  # fmt: skip


def trace(
    nbytes: int = GB, extent: int = 4 * MIB, readers: int = 4, copiers: int = 2, rate: float = 2e9
) -> dict[str, Any]:
    """A load that reads with O_DIRECT and copies out of slabs; storage is the slower side."""
    rng = random.Random(0)
    events: list[dict[str, Any]] = []
    names = ["plan", "engine", *(f"read {n}" for n in range(readers)), *(f"copy {n}" for n in range(copiers))]
    names += ["allocate", "hand-out", "consumer"]
    tids = {name: number for number, name in enumerate(names, 1)}
    for name, tid in tids.items():
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}})

    def add(lane: str, name: str, cat: str, begin: float, dur: float, **args: Any) -> None:
        ends = {"ph": "X", "name": name, "cat": cat, "ts": round(begin, 3), "dur": round(dur, 3), "pid": 1}
        events.append(ends | {"tid": tids[lane], "args": args})

    add("plan", "plan", "plan", 0, 600)
    add("allocate", "block", "allocate", 600, 2500, bytes=nbytes)
    free, busy, waited = [1000.0] * readers, [0.0] * copiers, 1000.0
    first = None
    for offset in range(0, nbytes, extent):
        reader = min(range(readers), key=lambda n: free[n])
        size = min(extent, nbytes - offset)
        took = size / (rate / readers) * 1e6 * rng.uniform(0.8, 1.3)
        add(f"read {reader}", "read", "direct", free[reader], took, file="/models/made-up/model.safetensors",
            offset=offset, bytes=size)  # fmt: skip
        free[reader] += took + rng.uniform(2, 40)
        copier = min(range(copiers), key=lambda n: busy[n])
        begin = max(free[reader], busy[copier])
        took = size / 6e9 * 1e6 * rng.uniform(0.9, 1.2)
        add(f"copy {copier}", "copy", "copy", begin, took, bytes=size)
        busy[copier] = begin + took
        first = first or busy[copier]
        if begin > waited:
            add("engine", "wait: source", "wait", waited, begin - waited)
            waited = begin + 30
        add("hand-out", "tensor", "hand-out", busy[copier], 12, tensor=f"layer.{offset}")
    end = max(busy)
    add("consumer", "wait: tensor", "wait", 0, end)
    report = {
        "seconds": end / 1e6,
        "bottleneck": "source",
        "nbytes": nbytes,
        "first_tensor_seconds": (first or 0) / 1e6,
    }
    return {"displayTimeUnit": "ms", "otherData": {"report": report, "version": "0.0.0"}, "traceEvents": events}
