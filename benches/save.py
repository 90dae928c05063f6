"""Saving, beside safetensors and what the disk takes: `python benches/save.py FOLDER [--gigabytes N] [--rounds N]`.

Everything is written to FOLDER, in turn, each time to a new name, from the same tensors of random bytes:

- to stable storage: `penstock.save_file`; `safetensors.torch.save_file` followed by fsync of the file and its
  directory; and the raw rate: O_DIRECT writes by eight threads into a file whose room is allocated, and fsync, of
  several block sizes, of which the fastest in the median counts: from one buffer, which stays in the processor's
  cache, and from memory for all of the bytes, as a save has to;
- into the page cache: both without fsync.

Seconds are medians over the rounds, each in an order of its own. Before every turn what is dirty is written, and as
many bytes as a save needs are put into the page cache and removed again: on a virtual machine free memory goes back to
the host after a second or two, and who writes next would pay for getting it again. In the first round safetensors reads
back every file but the raw ones, and all bytes are compared. It is told where saving was faster than the raw writes
from one buffer: those were not measured at their best.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
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

BLOCKS = [2 << 20, 4 << 20, 8 << 20]
"""Bytes of a write of the raw rate."""

WRITERS = 8


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


def fill(path: Path, size: int) -> None:
    """Takes as much page cache as a save of ``size`` bytes, and gives it back."""
    block = bytes(4 << 20)
    with path.open("xb", buffering=0) as file:
        for _ in range(0, size, len(block)):
            file.write(block)
    path.unlink()


def noise(nbytes: int) -> mmap.mmap:
    """At least so many bytes, random in every 16 MiB, in huge pages, which the device takes in fewer pieces."""
    step = 16 << 20
    pattern = os.urandom(step)
    buffer = mmap.mmap(-1, -(-nbytes // step) * step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    for _ in range(0, len(buffer), step):
        buffer.write(pattern)
    return buffer


def raw(path: Path, buffer: mmap.mmap, size: int, block: int) -> None:
    """As many bytes with nothing in the way."""
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    os.posix_fallocate(descriptor, 0, pages)
    memory = memoryview(buffer)

    def write(offset: int) -> int:
        length, start = min(block, pages - offset), offset % len(buffer)
        return os.pwrite(descriptor, memory[start : start + length], offset)

    with ThreadPoolExecutor(WRITERS) as pool:
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
    ceilings: dict[str, list[str]] = {}
    for kind, buffer in (("one buffer", noise(1)), ("all bytes", noise(size + mmap.PAGESIZE))):
        ceilings[kind] = [f"raw, {kind}, {block >> 20} MiB" for block in BLOCKS]
        for name, block in zip(ceilings[kind], BLOCKS, strict=True):
            turns[name] = partial(raw, buffer=buffer, size=size, block=block)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    orders = random.Random(0)
    for number in range(arguments.rounds):
        for name in orders.sample(names, len(names)):
            path = arguments.folder / f"{number}.safetensors"
            os.sync()
            fill(path, size)
            begun = time.perf_counter()
            turns[name](path)
            seconds[name].append(time.perf_counter() - begun)
            if number == 0 and not name.startswith("raw"):
                loaded = safetensors.torch.load_file(path)
                same = all(torch.equal(loaded[n].view(torch.int16), t.view(torch.int16)) for n, t in state.items())
                if not same or len(loaded) != len(state):
                    sys.exit(f"{name}: the file does not hold what was saved")
                del loaded
            path.unlink()
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    hot, cold = (min(ceilings[kind], key=medians.__getitem__) for kind in ("one buffer", "all bytes"))
    ratios = {
        "to stable storage: times as fast as safetensors": ("safetensors, then fsync", "penstock, fsync", 1.25),
        "to stable storage: share of the raw rate from one buffer": (hot, "penstock, fsync", 0.9),
        "to stable storage: share of the raw rate from all bytes": (cold, "penstock, fsync", 0.9),
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
    if medians["penstock, fsync"] < medians[hot]:
        print("  measurement fault: faster than the raw writes, which were not measured at their best")
    if arguments.json:
        packages = (penstock, safetensors, torch)
        about = {"cores": cores, "kernel": kernel, "versions": {one.__name__: one.__version__ for one in packages}}
        result = {"arguments": sys.argv[1:], "nbytes": size, "seconds": seconds, "bounds": bounds}
        arguments.json.write_text(json.dumps(about | result) + "\n")


if __name__ == "__main__":
    main()
