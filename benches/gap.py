"""What `gap="auto"` does on storage that answers slowly: `python benches/gap.py`.

The first sixth of each row of a matrix is loaded, 5,000 pieces of 4 KiB, through a FUSE file system that waits before
each answer (tests/slow_fs.py). Both ways take turns. Needs the right to mount.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import penstock
import torch
from penstock.synthetic.synth import Tensor, write_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import pagecache
import slow_fs

ROWS, ROW, PART = 5000, 24 << 10, 4 << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--latency", nargs="+", type=float, default=[0.5, 3.0, 20.0], help="milliseconds of each answer"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_file(Path(folder) / "model.safetensors", [Tensor("matrix", "U8", (ROWS, ROW))])
        for latency in args.latency:
            took: dict[str, list[float]] = {"16KiB": [], "auto": []}
            with slow_fs.mounted(Path(folder)) as fs:
                fs.tell(latency=latency / 1e3)
                path = fs.path / "model.safetensors"
                for number in range(args.rounds):
                    for gap in sorted(took, reverse=number % 2 == 0):
                        pagecache.evict(path)
                        into = torch.zeros(ROWS, PART, dtype=torch.uint8)
                        part = penstock.Destination("matrix", into, (slice(0, ROWS), slice(0, PART)))
                        began = time.perf_counter()
                        report = penstock.open(path).load_into([part], options={"gap": gap}, progress=False)
                        took[gap].append(time.perf_counter() - began)
                        limit = report["gap_limit"]
                        reads = sum(way["extents"] for way in report["routes"].values())
                        print(f"{latency:g} ms, {gap:5}: {took[gap][-1]:.2f} s, gaps up to {limit}, {reads} reads")
            ratios = [a / b for a, b in zip(took["16KiB"], took["auto"], strict=True)]
            print(
                f"{latency:g} ms: 16KiB / auto {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
