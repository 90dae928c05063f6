"""Loads past the page cache by each interface: ``python benches/direct.py [--gigabytes N] [--rounds N]``.

The contestants take turns, each load in a process of its own: ``io="uring"`` and ``"threads"``, O_DIRECT into
private memory. Where a container refuses io_uring, a load gets the second. It prints medians: the rate, and the
processor time per GB of all threads, the kernel's workers included. ``--folder`` is one on the disk.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
import penstock

INTERFACES = ("uring", "threads")
TENSORS = 64


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def load(path: str, io: str) -> None:
    """Loads once in this process. Prints seconds, processor seconds, and what was refused."""
    checkpoint = penstock.open(path)
    wall, cpu = time.perf_counter(), processor_seconds()
    tensors = checkpoint.load(framework="np", options={"io": io})
    wall, cpu = time.perf_counter() - wall, processor_seconds() - cpu
    report = checkpoint.last_report
    assert report is not None and len(tensors) == TENSORS
    used = [name for name, route in report.routes.items() if route["bytes"]]
    if used != ["direct"]:
        raise SystemExit(f"not read with O_DIRECT, but {used}: give --folder on a disk")
    print(json.dumps({"wall": wall, "cpu": cpu, "fallbacks": [str(f) for f in report.fallbacks]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", help="a folder on the disk to measure")
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        load(*given.load)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = str(Path(folder) / "direct.safetensors")
        rng = numpy.random.default_rng(1)
        each = int(given.gigabytes * 1e9) // TENSORS
        penstock.save_file({f"t{i}": rng.integers(0, 256, each, numpy.uint8) for i in range(TENSORS)}, path)
        nbytes = each * TENSORS
        found: dict[str, list[dict[str, float]]] = {io: [] for io in INTERFACES}
        for turn in range(given.rounds):
            for place in range(len(INTERFACES)):
                io = INTERFACES[(turn + place) % len(INTERFACES)]
                child = [sys.executable, __file__, "--load", path, io]
                told = json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True).stdout)
                if told["fallbacks"]:
                    print(f"{io}: {told['fallbacks']}")
                found[io].append(told)
    print(f"{nbytes / 1e9:.2f} GB, {given.rounds} rounds; medians")
    for io, loads in found.items():
        wall, cpu = (statistics.median(one[what] for one in loads) for what in ("wall", "cpu"))
        print(f"{io:8} {nbytes / 1e9 / wall:6.2f} GB/s   {cpu / (nbytes / 1e9):6.3f} s of processor time per GB")


if __name__ == "__main__":
    main()
