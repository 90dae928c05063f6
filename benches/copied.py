"""Copied loads, cold and warm: `python benches/copied.py CHECKPOINT... [--rounds N] [--ways A,B] [--warm N]`.

What is copied (into private memory here, to a GPU elsewhere) can be read through the page cache by a pool of threads,
through it by io_uring, or past it with O_DIRECT. Without an option Penstock chooses. Each way loads each checkpoint:

- cold: nothing of it is in the page cache;
- warm: all of it is, as `penstock warm` or an earlier turn has put it there;
- second: a process loaded it cold in that way, waited until the page cache was filled where it is, and ended. Nothing
  was evicted since.

Every load has a process of its own. The turns of a round are in random order, each after the same predecessor: a
process that took twice the memory of a load and gave it back. Seconds are from the call to the last byte in place,
medians over the rounds. (Tests compare the bytes of every way.) At the end one process loads the checkpoint warm,
without an option, so many times as `--warm` says: median and 99th percentile.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import penstock
from penstock.bench.machine import machine

#: Options of each way. The destination is private memory in all of them.
WAYS: dict[str, dict[str, Any]] = {
    "no option": {},
    "keep": {"cache": "keep"},
    "bypass": {"cache": "bypass"},
    "pool": {"io": "buffered"},
    "io_uring": {"io": "uring_buffered"},
    "O_DIRECT": {"io": "uring"},
}
SECOND = ("no option", "keep", "io_uring")

#: Takes and gives back so much memory. On a virtual machine free memory goes back to the host after a second or two,
#: and the next load would pay for getting it again.
PREDECESSOR = """
import mmap, sys
memory = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
for at in range(0, len(memory), mmap.PAGESIZE):
    memory[at] = 1
"""

#: Loads so many times, and says what each load took and chose.
LOADER = """
import json, sys, time
import penstock, penstock._numpy
path, options, times = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
said = []
for _ in range(times):
    checkpoint = penstock.open(path)
    begun = time.perf_counter()
    tensors = checkpoint.load(framework="dlpack", options={**options, "copy": True}, progress=False)
    seconds = time.perf_counter() - begun
    report = checkpoint.last_report
    said.append({"seconds": seconds, "cpu": report.cpu_seconds, "cache": report.cache, "reason": report.cache_reason})
if (fill := report.cache_fill) is not None:
    fill.wait()
    said[-1]["fill"] = {"state": fill.state, "reason": fill.reason, "seconds": fill.seconds, "nbytes": fill.nbytes}
print(json.dumps(said))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--states", type=lambda text: text.split(","), default=["cold", "warm", "second"])
    parser.add_argument("--warm", type=int, default=200, help="warm loads of one process; 0: none")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    there = machine(arguments.checkpoints, None)
    print("machine: " + ", ".join(f"{key} {value}" for key, value in there.items() if key != "versions" and value))
    document: dict[str, Any] = {"machine": there, "rounds": arguments.rounds, "checkpoints": {}}
    for path in arguments.checkpoints:
        found = measure(path, arguments.rounds, arguments.ways, arguments.states)
        document["checkpoints"][path.name] = {"turns": found}
        print(f"\n{path.name}")
        show(found)
        if arguments.warm:
            document["checkpoints"][path.name]["warm loads"] = many = repeated(path, arguments.warm)
            print(f"  {arguments.warm} warm loads of one process: ", end="")
            ratio = many["p99"] / many["median"]
            print(f"median {many['median']:.4f} s, p99 {many['p99']:.4f} s, {ratio:.2f} x median")
        if arguments.json:
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")


def run(program: str, *arguments: object) -> str:
    """What a program prints that runs in a Python of its own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def put(files: list[str], state: str) -> None:
    """Brings files into the page cache, or out of it."""
    command = "warm" if state == "warm" else "evict"
    subprocess.run([sys.executable, "-m", "penstock.cli", command, *files], check=True, stdout=subprocess.DEVNULL)


def measure(path: Path, rounds: int, ways: list[str], states: list[str]) -> dict[str, list[dict[str, Any]]]:
    checkpoint = penstock.open(path)
    files = list(map(str, checkpoint.files))
    turns = [(state, way) for state in states for way in ways if state != "second" or way in SECOND]
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    orders = random.Random(0)
    for _ in range(rounds):
        for state, way in orders.sample(turns, len(turns)):
            options = json.dumps(WAYS[way])
            put(files, state)
            first = json.loads(run(LOADER, path, options, 1))[0] if state == "second" else {}
            run(PREDECESSOR, 2 * checkpoint.nbytes)
            said = json.loads(run(LOADER, path, options, 1))[0]
            found[f"{state}, {way}"].append({**said, **{key: value for key, value in first.items() if key == "fill"}})
    return dict(sorted(found.items()))


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    """The medians as a table. Ratios are to the fastest way of the same state."""
    print(f"  {'':<20}{'median s':>9}{'ratio':>7}{'least':>8}{'most':>8}{'cpu s':>7}  page cache")
    medians = {turn: statistics.median(load["seconds"] for load in loads) for turn, loads in found.items()}
    for turn, loads in found.items():
        best = min(seconds for other, seconds in medians.items() if other.split(",")[0] == turn.split(",")[0])
        seconds = [load["seconds"] for load in loads]
        cpu = statistics.median(load["cpu"] for load in loads)
        kinds = {kind: sum(load["cache"] == kind for load in loads) for kind in ("keep", "fill", "bypass")}
        said = ", ".join(f"{kind} {count}" for kind, count in kinds.items() if count)
        fills = [load["fill"]["seconds"] for load in loads if load.get("fill", {}).get("state") == "finished"]
        if fills:
            said += f"; filled in {statistics.median(fills):.2f} s"
        print(f"  {turn:<20}{medians[turn]:9.3f}{medians[turn] / best:7.2f}", end="")
        print(f"{min(seconds):8.3f}{max(seconds):8.3f}{cpu:7.2f}  {said}")


def repeated(path: Path, times: int) -> dict[str, float]:
    """Warm loads of one process, without an option."""
    put(list(map(str, penstock.open(path).files)), "warm")
    seconds = sorted(load["seconds"] for load in json.loads(run(LOADER, path, "{}", times)))
    return {"median": statistics.median(seconds), "p99": seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]}


if __name__ == "__main__":
    main()
