"""Saving, beside safetensors and what the disk takes: `python benches/save.py FOLDER [--gigabytes N] [--rounds N]`.

Everything is written to FOLDER, in turn, each time to a new name, from the same tensors of random bytes:

- to stable storage: `penstock.save_file`; `safetensors.torch.save_file` followed by fsync of the file and its
  directory; and the raw rate: O_DIRECT writes from one buffer by several threads into a file whose room is allocated,
  and fsync, of several block sizes and numbers of threads, of which the fastest in the median counts;
- into the page cache: both without fsync.

Seconds are medians over the rounds, whose order rotates. Between turns files are removed, and what is dirty written.
In the first round safetensors reads back every file but the raw ones, and all bytes are compared. It is told where
saving was faster than the raw writes: those were not measured at their best.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import penstock
import safetensors
import safetensors.torch
import torch

RAW = [(4 << 20, 8), (8 << 20, 8), (16 << 20, 4)]
"""(bytes of a write, writers) of the raw rate."""


def tensors(nbytes: int) -> dict[str, torch.Tensor]:
    """Layers as a transformer has them: large matrices, small norms."""
    made: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    layer = 0
    while sum(tensor.nbytes for tensor in made.values()) < nbytes:
        for name, shape in (("attn", (4096, 2048)), ("mlp", (2048, 8192)), ("norm", (2048,))):
            values = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
            made[f"layers.{layer}.{name}.weight"] = values.view(torch.bfloat16)
        layer += 1
    return made


def sync(path: Path) -> None:
    """Waits until a file and its name are on the disk."""
    for one in (path, path.parent):
        descriptor = os.open(one, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def raw(path: Path, size: int, block: int, writers: int) -> None:
    """As many bytes with nothing in the way."""
    buffer = mmap.mmap(-1, block)
    buffer.write(os.urandom(block))
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    os.posix_fallocate(descriptor, 0, pages)

    def write(offset: int) -> int:
        return os.pwrite(descriptor, memoryview(buffer)[: min(block, pages - offset)], offset)

    with ThreadPoolExecutor(writers) as pool:
        if sum(pool.map(write, range(0, pages, block))) != pages:
            sys.exit("raw: a write was cut short")
    os.fsync(descriptor)
    os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    state = tensors(int(arguments.gigabytes * 1e9))
    size = sum(tensor.nbytes for tensor in state.values())

    def theirs(path: Path) -> None:
        safetensors.torch.save_file(state, path)

    def theirs_synced(path: Path) -> None:
        safetensors.torch.save_file(state, path)
        sync(path)

    turns: dict[str, Callable[[Path], object]] = {
        "penstock, fsync": lambda path: penstock.save_file(state, path, progress=False),
        "safetensors, then fsync": theirs_synced,
        "penstock": lambda path: penstock.save_file(state, path, fsync=False, progress=False),
        "safetensors": theirs,
    }
    ceilings = {f"raw {block >> 20} MiB x {writers}": (block, writers) for block, writers in RAW}
    for name, setting in ceilings.items():
        turns[name] = partial(raw, size=size, block=setting[0], writers=setting[1])
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for number in range(arguments.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            path = arguments.folder / f"{number}.safetensors"
            os.sync()
            begun = time.perf_counter()
            turns[name](path)
            seconds[name].append(time.perf_counter() - begun)
            if number == 0 and name not in ceilings:
                loaded = safetensors.torch.load_file(path)
                same = all(torch.equal(loaded[n].view(torch.int16), t.view(torch.int16)) for n, t in state.items())
                if not same or len(loaded) != len(state):
                    sys.exit(f"{name}: the file does not hold what was saved")
                del loaded
            path.unlink()
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    ceiling = min(ceilings, key=medians.__getitem__)
    ratios = {
        "to stable storage: times as fast as safetensors": ("safetensors, then fsync", "penstock, fsync", 1.25),
        "to stable storage: share of the raw rate": (ceiling, "penstock, fsync", 0.9),
        "into the page cache: times as fast as safetensors": ("safetensors", "penstock", 1.0),
    }
    cores, kernel = os.cpu_count(), platform.release()
    print(f"{size / 1e9:.2f} GB in {len(state)} tensors, {arguments.rounds} rounds; {cores} cores, {kernel}")
    for name, found in seconds.items():
        rate, spread = size / medians[name] / 1e9, f"({min(found):.3f} to {max(found):.3f})"
        print(f"  {name:26} {medians[name]:.3f} s {spread}  {rate:.2f} GB/s")
    bounds = {claim: (medians[a] / medians[b], bound) for claim, (a, b, bound) in ratios.items()}
    for claim, (value, bound) in bounds.items():
        print(f"  {claim}: {value:.2f} (bound {bound})")
    if medians["penstock, fsync"] < medians[ceiling]:
        print("  measurement fault: faster than the raw writes, which were not measured at their best")
    if arguments.json:
        packages = (penstock, safetensors, torch)
        about = {"cores": cores, "kernel": kernel, "versions": {one.__name__: one.__version__ for one in packages}}
        result = {"arguments": sys.argv[1:], "nbytes": size, "seconds": seconds, "bounds": bounds}
        arguments.json.write_text(json.dumps(about | result) + "\n")


if __name__ == "__main__":
    main()
