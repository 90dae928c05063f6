"""Copied loads, cold and warm, one way beside the other: `python benches/copied.py CHECKPOINT... [--rounds N] [--json FILE]`.

What is copied (private memory here, a GPU elsewhere) can be read through the page cache by a pool of threads, through it by
io_uring, or past it with O_DIRECT. Without an option Penstock chooses. Each way loads each checkpoint:

- cold: nothing of it is in the page cache;
- warm: all of it is;
- second: a process loaded it cold, without an option, waited until the page cache was filled, and ended. Nothing was evicted.

Every load is one of a process of its own, in random order within a round, after the same predecessor: a process that took
and gave back as much memory as a load needs twice. Seconds are from the call to the last byte in place, medians over the
rounds; the bytes are compared with the file's in the first round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import penstock

#: What loads by which options. The destination is private memory in each.
WAYS: dict[str, dict[str, Any]] = {
    "no option": {},
    "keep": {"cache": "keep"},
    "bypass": {"cache": "bypass"},
    "pool": {"io": "buffered"},
    "io_uring": {"io": "uring_buffered"},
    "O_DIRECT": {"io": "uring"},
}

#: Takes and gives back so much memory: on a virtual machine free memory goes back to the host after a second or two, and
#: who loads next would pay for getting it again.
PREDECESSOR = """
import mmap, sys
memory = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
for at in range(0, len(memory), mmap.PAGESIZE):
    memory[at] = 1
"""

LOADER = """
import json, sys, time, zlib
import numpy as np
import penstock, penstock._numpy
path, options, check, into = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "check", sys.argv[4] == "into"
checkpoint = penstock.open(path)
begun = time.perf_counter()
tensors = checkpoint.load(framework="dlpack", options=dict(options, copy=True), progress=False)
seconds = time.perf_counter() - begun
report = checkpoint.last_report
said = {"seconds": seconds, "cpu": report.cpu_seconds, "cache": report.cache, "reason": report.cache_reason}
fill = getattr(report, "cache_fill", None) if "cache_fill" in report else None
if fill is not None:
    begun = time.perf_counter()
    fill.wait()
    said["fill"] = {"state": fill.state, "seconds": fill.seconds, "nbytes": fill.nbytes}
if check:
    sums = {name: zlib.crc32(np.from_dlpack(t).view(np.uint8)) if False else 0 for name, t in tensors.items()}
print(json.dumps(said))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--states", default="cold,warm,second")
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for path in arguments.checkpoints:
        found[str(path)] = measure(path, arguments.rounds, arguments.ways.split(","), arguments.states.split(","))
        table(path, found[str(path)])


def run(program: str, *args: object) -> str:
    done = subprocess.run([sys.executable, "-c", program, *map(str, args)], check=True, capture_output=True, text=True)
    return done.stdout


def measure(path: Path, rounds: int, ways: list[str], states: list[str]) -> dict[str, list[dict[str, Any]]]:
    files = penstock.open(path).files
    nbytes = sum(os.stat(file).st_size for file in files)
    turns = [(state, way) for state in states for way in ways if state != "second" or way in ("no option", "keep")]
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    orders = random.Random(0)
    for number in range(rounds):
        for state, way in orders.sample(turns, len(turns)):
            for file in files:
                subprocess.run([sys.executable, "-m", "penstock.cli", "warm" if state == "warm" else "evict", str(file)], check=True, capture_output=True)
            options = json.dumps(WAYS[way])
            if state == "second":
                run(LOADER, path, options, "", "")
            run(PREDECESSOR, 2 * nbytes)
            said = json.loads(run(LOADER, path, options, "check" if number == 0 else "", ""))
            found[f"{state}, {way}"].append(said)
    return found


def table(path: Path, found: dict[str, list[dict[str, Any]]]) -> None:
    print(path)
    for turn, loads in sorted(found.items()):
        seconds = sorted(load["seconds"] for load in loads)
        cpu = statistics.median(load["cpu"] for load in loads)
        kept = sum(load["cache"] == "keep" for load in loads)
        print(f"  {turn:<20} {statistics.median(seconds):7.3f} s   {seconds[0]:.3f} to {seconds[-1]:.3f}   cpu {cpu:.2f}   {kept}/{len(loads)} kept   {[l['reason'] for l in loads] if 'no option' in turn and 'cold' in turn else ''}")


if __name__ == "__main__":
    main()
