"""Loads a matrix into a transposed tensor, beside torch's own copy of the same bytes: ``python benches/strided.py``.

Three contestants take turns in one process, on a file in memory or in the page cache:

- `transposed`: penstock fills a tensor whose rows are the file's columns
- `straight`: penstock fills a contiguous tensor: what it takes to move the same bytes without transposing them
- `torch`: ``destination.copy_(source.t())`` from a tensor that is in memory already

A load also reads, so what transposing costs is the difference between the first two. Medians of wall time, and of the
processor time of all threads.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import penstock
import torch

DTYPES = {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the wall clock, and of processor time of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(folder: Path, dtype: str, rows: int, columns: int, rounds: int, threads: int) -> None:
    kind = DTYPES[dtype]
    source = torch.randint(0, 250, (rows, columns), dtype=torch.uint8).to(kind)
    path = folder / f"{dtype}.safetensors"
    penstock.save_file({"a": source}, path)
    checkpoint = penstock.open(path)
    torch.set_num_threads(max(1, threads))
    transposed = torch.zeros(columns, rows, dtype=kind).t()
    straight = torch.zeros(rows, columns, dtype=kind)
    into = torch.zeros(columns, rows, dtype=kind)
    options = {"threads": threads}
    contestants: dict[str, Callable[[], object]] = {
        "transposed": lambda: checkpoint.load_into({"a": transposed}, options=options),
        "straight": lambda: checkpoint.load_into({"a": straight}, options=options),
        "torch": lambda: into.copy_(source.t()),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, work in contestants.items():
            took = timed(work)
            if turn:  # the first one warms up
                found[name].append(took)
    assert transposed.equal(source) and straight.equal(source) and into.equal(source.t())
    wall = {name: statistics.median(t[0] for t in times) for name, times in found.items()}
    cpu = {name: statistics.median(t[1] for t in times) for name, times in found.items()}
    print(f"{dtype} {rows} x {columns}, {source.nbytes / 1e6:.0f} MB, threads={threads or 'auto'}:")
    for name in contestants:
        print(f"  {name:10} {1e3 * wall[name]:7.1f} ms wall  {1e3 * cpu[name]:7.1f} ms of processors")
    more = cpu["transposed"] - cpu["straight"]
    print(
        f"  load / torch: {wall['transposed'] / wall['torch']:.2f} wall, "
        f"{cpu['transposed'] / cpu['torch']:.2f} processors; "
        f"transposing alone / torch: {more / cpu['torch']:.2f} processors"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="of both (0: as many as penstock takes, and 1 of torch)")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for dtype in given.dtypes:
            measure(Path(folder), dtype, given.rows, given.columns, given.rounds, given.threads)


if __name__ == "__main__":
    main()
