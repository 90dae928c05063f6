"""Penstock and its peers in one rotation, each load in a new process, beside what the machine allows: tables.

usage: python -m penstock.selftest.peers DEVICE FOLDER SECONDS

The contestants are those of `penstock bench`. torch is imported once, in the process that all others are forked from;
that one touches no GPU. Every table begins with the ceilings: pinned memory to the device, and raw O_DIRECT (cold) or
copies out of the page cache (warm). Times are medians; the ratios are bytes per second over those of the ceilings.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import PenstockError
from penstock.bench import contestants, page_cache, reference
from penstock.bench.contestants import Contestant
from penstock.bench.gpu_memory import GpuMemory
from penstock.bench.job import Job
from penstock.bench.verification import torch_dtype
from penstock.synthetic import layouts, synth

from . import results
from .checkpoints import QUICK

NAMES = [
    "penstock",
    "penstock load_into",
    "safetensors",
    "safetensors prefetch",
    "fastsafetensors",
    "fastsafetensors buffered",
    "instanttensor",
    "instanttensor uring_buffered",
    "runai streamer",
    "pread floor",
]
#: Left out by state: one that reads warm files past the page cache, and those that read cold ones through it.
NOT_WARM = ("fastsafetensors",)
NOT_COLD = ("penstock load_into", "fastsafetensors buffered", "instanttensor uring_buffered")

MIB = 1 << 20
NO_TIME = "no time left"


@dataclass(frozen=True)
class Row:
    """A checkpoint, in what state its files are, how often each contestant gets a process, and its loads in each."""

    checkpoint: str
    state: str
    rounds: int
    loads: int
    #: The loaders that take part; none named: all.
    only: tuple[str, ...] = ()


#: For 16 GB: those that could be as fast as the link
FAST = ("penstock", "penstock load_into", "fastsafetensors buffered", "instanttensor uring_buffered", "pread floor")
FAST_COLD = ("penstock", "fastsafetensors", "instanttensor", "safetensors prefetch", "pread floor")
PLAN = [
    Row("gpt2", "warm", 2, 5),
    Row("llama-3-8b", "warm", 1, 3, FAST),
    Row("gpt2", "cold", 2, 1),
    Row("llama-3-8b", "cold", 1, 1, FAST_COLD),
    Row("moe", "warm", 1, 4),
    Row("gpt2-medium", "warm", 1, 4),
    Row("gpt2-medium", "cold", 1, 1),
]
QUICK_PLAN = [Row("moe", "warm", 1, 2), Row("moe", "cold", 1, 1)]

Found = dict[str, Any]


def write(name: str, folder: Path) -> list[Path]:
    if QUICK:
        layout = synth.qwen3_moe(4e6)
    elif name == "moe":
        layout = synth.qwen3_moe(1e9)
    else:
        layout = layouts.build(name)
    return reference.files_of(synth.write(layout, folder / f"peers-{name}"))


def ceiling(measure: str, files: list[Path], device: str) -> Found:
    """The best of a few settings, in GB/s."""
    from penstock import _core

    tried: dict[str, list[dict[str, Any]]] = {
        "host_to_device": [
            {"threads": streams, "block": block * MIB, "depth": 4, "nbytes": (64 if QUICK else 4096) * MIB}
            for streams, block in ((1, 4), (1, 64), (2, 16))
        ],
        "direct": [{"engine": "uring", "depth": depth} for depth in (32, 8, 4)] + [{"threads": 4}],
        "copy": [{"threads": count, "block": 2 * MIB} for count in (4, 8, os.cpu_count() or 8)],
    }
    best = 0.0
    # The best setting of a small checkpoint is that of a large one too
    few = QUICK or (measure == "direct" and sum(path.stat().st_size for path in files) > 4e9)
    for chosen in tried[measure][:1] if few else tried[measure]:
        if measure == "direct":
            page_cache.evict(files)
        number = int(device.partition(":")[2] or 0)
        given: list[str] = [] if measure == "host_to_device" else [str(path) for path in files]
        more: dict[str, Any] = {"device": number} if measure == "host_to_device" else {}
        moved = _core.ceiling(measure, given, **chosen, **more)
        best = max(best, moved["bytes"] / moved["seconds"] / 1e9)
    return {"GB/s": best}


def load(contestant: Contestant, files: list[Path], device: str, state: str, loads: int) -> Found:
    """Loads in this process: seconds of each, and a sum of what was loaded."""
    import torch

    gpu = device != "cpu"
    synchronize: Callable[[], None] = torch.cuda.synchronize if gpu else lambda: None
    torch.zeros(1, device=device)
    synchronize()
    os.environ.update(contestant.environment)
    __import__(
        {"safetensors": "safetensors.torch", "penstock": "penstock._torch"}.get(contestant.module, contestant.module)
    )
    if obstacle := contestant.obstacle():
        return {"error": obstacle}
    parameters = {}
    if contestant.semantics == "into":
        entries = reference.entries_of(files)
        parameters = {n: torch.zeros(e.shape, dtype=torch_dtype(e.dtype), device=device) for n, e in entries.items()}
        synchronize()
    job = Job(files, None, device, parameters)
    seconds, processor, sums = [], [], []
    if state == "cold":
        page_cache.evict(files)
    for _ in range(loads):
        cpu, begun = time.process_time(), time.perf_counter()
        loaded = contestant.load(job)
        tensors = loaded if isinstance(loaded, Mapping) else dict(loaded)
        synchronize()
        seconds.append(time.perf_counter() - begun)
        processor.append(time.process_time() - cpu)
        total = 0
        for name in sorted(tensors):
            flat = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
            total = (total * 31 + int(flat[::4096].sum(dtype=torch.int64))) % (1 << 61)
        sums.append(total)
        del loaded, tensors
        gc.collect()
        synchronize()
    return {"seconds": seconds, "cpu": processor, "sums": sums}


def in_a_fork(work: Callable[[], Found], seconds: float, used: Callable[[], int]) -> Found:
    """The result of `work` in a child, or the reason that it gave none; and the most GPU memory in use meanwhile."""
    read, write_end = os.pipe()
    before = used()
    child = os.fork()
    if child == 0:
        os.close(read)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        try:
            found = work()
        except BaseException as error:
            found = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        try:
            os.write(write_end, json.dumps(found, default=str).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(write_end)
    deadline, text, peak, late = time.monotonic() + seconds, b"", 0, False
    while not text.endswith(b"\n"):
        peak = max(peak, used() - before)
        if select.select([read], [], [], 0.02)[0]:
            more = os.read(read, 1 << 16)
            if not more:
                break
            text += more
        elif late := time.monotonic() > deadline:
            break
    os.close(read)
    if late or not text:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    try:
        found = json.loads(text)
    except ValueError:
        found = {"error": f"ended after {seconds:.0f} s" if late else f"its process ended with status {status}"}
    return {**found, "peak": peak}


def run(row: Row, files: list[Path], device: str, end: float, used: Callable[[], int]) -> None:
    """One table."""
    nbytes = sum(path.stat().st_size for path in files)
    limit = 30 + nbytes / 0.3e9
    table = f"{row.checkpoint}, {nbytes / 1e9:.2f} GB, {row.state}"

    def left() -> float:
        return min(limit, end - time.monotonic())

    if row.state == "warm":
        page_cache.fill(files)
    ceilings: dict[str, float] = {}
    kinds = ["copy" if row.state == "warm" else "direct"] + (["host_to_device"] if device != "cpu" else [])
    for kind in kinds:
        found = in_a_fork(lambda k=kind: ceiling(k, files, device), left(), used)  # type: ignore[misc]
        ceilings[kind] = found.get("GB/s", 0.0)
        cells = {"GB/s": found["GB/s"]} if "GB/s" in found else {"error": found.get("error")}
        results.row(table, contestant=f"ceiling: {kind}", **cells)
    left_out = NOT_WARM if row.state == "warm" else NOT_COLD
    entered = [contestants.named(name) for name in NAMES if name not in left_out]
    entered = [c for c in entered if ("cpu" if device == "cpu" else "cuda") in c.devices]
    entered = [c for c in entered if not row.only or c.name in row.only]
    runs: dict[str, list[Found]] = {contestant.name: [] for contestant in entered}
    for number in range(row.rounds):
        turn = number * 3 % len(entered)
        for contestant in entered[turn:] + entered[:turn]:
            if any("error" in found for found in runs[contestant.name]):
                continue
            if left() < 10:
                break
            if row.state == "warm" and not page_cache.is_full(files):
                page_cache.fill(files)
            work = lambda c=contestant: load(c, files, device, row.state, row.loads)  # noqa: E731
            runs[contestant.name].append(in_a_fork(work, left(), used))
            results.note(raw=table, contestant=contestant.name, found=runs[contestant.name][-1])
    for name, of_name in runs.items():
        results.row(table, contestant=name, **line(of_name, nbytes, ceilings))
    sums = {s for of_name in runs.values() for f in of_name for s in f.get("sums", ())}
    if len(sums) > 1:
        results.row(table, contestant="THE CONTENT DIFFERS", error=str(sums))


def line(found: list[Found], nbytes: int, ceilings: dict[str, float]) -> dict[str, Any]:
    """A contestant's row: medians over its processes, and their ratios to the ceilings."""
    well = [f for f in found if "seconds" in f]
    if not well:
        return {"error": found[0].get("error") if found else NO_TIME}
    first = statistics.median(f["seconds"][0] for f in well)
    later = [s for f in well for s in f["seconds"][1:]]
    best = statistics.median(later) if later else first
    cells: dict[str, Any] = {
        "first ms": first * 1e3,
        "later ms": best * 1e3 if later else "",
        "least ms": min(later or [first]) * 1e3,
        "GB/s": nbytes / best / 1e9,
        "CPU s": statistics.median(f["cpu"][-1] for f in well),
        "GPU memory beyond, MB": statistics.median(max(0, f["peak"] - nbytes) for f in well) / 1e6,
    }
    for kind, rate in ceilings.items():
        if rate:
            cells[f"of {kind}"] = f"{nbytes / best / 1e9 / rate:.2f}"
    return cells


def main() -> None:
    device, folder, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    end = time.monotonic() + seconds
    import torch  # noqa: F401 - for the children; no GPU is touched here

    used: Callable[[], int] = lambda: 0  # noqa: E731
    if device != "cpu":
        try:
            memory = GpuMemory(0)
            used = lambda: memory.in_use().get("device_memory", 0)  # noqa: E731
        except (OSError, AttributeError):
            pass
    for row in QUICK_PLAN if QUICK else PLAN:
        if end - time.monotonic() < 15 and not QUICK:
            results.row("peers", checkpoint=row.checkpoint, state=row.state, left_out="no time left")
            continue
        try:
            files = write(row.checkpoint, folder)
        except (PenstockError, OSError) as error:  # no room on the disk
            results.row("peers", checkpoint=row.checkpoint, state=row.state, left_out=str(error))
            continue
        run(row, files, device, end, used)


if __name__ == "__main__":
    main()
