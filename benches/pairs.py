"""Two builds beside each other: ``python benches/pairs.py OLD NEW [--rounds N] [--checkpoint C] [--scenario S]``.

OLD and NEW are folders with a package `penstock` that is built: `python/` of two trees. For each row of `penstock
bench` (a checkpoint, a scenario, a way of penstock's) both builds load, each in a process of its own, every byte
compared. The build that goes first changes each round. A line has the median of old time / new time over the pairs,
and an interval that contains the median of such ratios with a probability of at least 95%: order statistics, no
assumption about their distribution. An interval that lies below 0.97 as a whole is called slower. Run such a row once
more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from penstock.bench.scenarios import CORE

#: Below this, old time / new time is a regression.
SLOWER = 0.97
#: Ways that have no option that forces a route.
WAYS = ("penstock", "penstock copy", "penstock stream", "penstock load_into")


def interval(ratios: list[float]) -> tuple[float, float]:
    """The narrowest pair of order statistics that contains the median with a probability of 95% or more."""
    ordered, n = sorted(ratios), len(ratios)
    outside = 0.0
    for below in range(n // 2):
        outside += 2 * math.comb(n, below) / 2**n
        if outside > 0.05:
            return ordered[max(0, below - 1)], ordered[n - max(1, below)]
    return ordered[0], ordered[-1]


Rows = dict[tuple[str, str], tuple[float, float]]


def environment(tree: str) -> dict[str, str]:
    """The environment of a child that imports the build of this tree."""
    return {**os.environ, "PYTHONPATH": tree, "PYTHONSAFEPATH": "1"}


def built(tree: str) -> str:
    """The folder, if a child that is told to imports its build."""
    folder = str(Path(tree).resolve())
    command = [sys.executable, "-c", "from penstock import _core; print(_core.__file__)"]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, check=False)
    if not done.stdout.startswith(folder + os.sep):
        raise SystemExit(f"{tree} has no package penstock that is built: give `python/` of a tree after `make develop`")
    return folder


def rows(tree: str, folder: Path, checkpoint: str, scenario: str, ways: list[str]) -> Rows:
    """One load of each scenario and way: seconds (of later loads of a process, if it loads several), processor time."""
    out = folder / "row.json"
    command = [sys.executable, "-m", "penstock.cli", "bench", "--rounds", "1", "--no-ceilings", "--no-traces"]
    command += ["--checkpoint", checkpoint, "--scenario", scenario, "--json", str(out)]
    command += [part for way in ways for part in ("--contestant", way)]
    done = subprocess.run(command, env=environment(tree), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tree}: {' '.join(command)}\n{done.stderr[-2000:]}")
    found: Rows = {}
    for row in json.loads(out.read_text())["rows"]:
        if "error" in row or not row.get("verified", True):
            raise SystemExit(f"{tree}: {row}")
        if row["contestant"] in ways:
            took = row.get("later_s", row["median_s"])
            found[row["scenario"], row["contestant"]] = took, row.get("cpu_s", math.nan)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs=2, metavar="TREE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--checkpoint", action="append")
    parser.add_argument("--scenario", action="append")
    parser.add_argument("--way", action="append")
    given = parser.parse_args()
    if given.rounds < 6:
        parser.error("fewer than 6 rounds have no interval of 95%")
    trees = [built(tree) for tree in given.trees]
    slower = 0
    with tempfile.TemporaryDirectory() as folder:
        for checkpoint in given.checkpoint or ["gpt2", "dense", "moe"]:
            for scenario in given.scenario or CORE:
                if scenario == "cold-freed" and "cold" in (given.scenario or CORE):
                    continue  # it comes with `cold`
                times: dict[tuple[str, str], list[list[tuple[float, float]]]] = defaultdict(lambda: [[], []])
                for turn in range(given.rounds):
                    for build in (0, 1) if turn % 2 else (1, 0):
                        found = rows(trees[build], Path(folder), checkpoint, scenario, given.way or list(WAYS))
                        for row, took in found.items():
                            times[row][build].append(took)
                for (state, way), (old, new) in times.items():
                    ratios = [a[0] / b[0] for a, b in zip(old, new, strict=True)]
                    low, high = interval(ratios)
                    cpu = [statistics.median(one[1] for one in build) for build in (old, new)]
                    slower += high < SLOWER
                    print(
                        f"{checkpoint:6} {state:10} {way:18} old/new {statistics.median(ratios):.3f} "
                        f"[{low:.3f}, {high:.3f}]  new {statistics.median(t[0] for t in new) * 1e3:8.1f} ms  "
                        f"processor {cpu[0]:.3f} -> {cpu[1]:.3f} s{'  SLOWER' * (high < SLOWER)}",
                        flush=True,
                    )
    print(f"{slower} rows slower")


if __name__ == "__main__":
    main()
