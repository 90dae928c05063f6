"""The best options on this machine: GPT-2, warm, into a table. Nothing is judged except that it loads."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.bench import page_cache
from penstock.synthetic import layouts, synth
from penstock.synthetic.synth import Tensor

from . import checkpoints, gpus, results
from .gpus import Gpu

ROUNDS = 2 if checkpoints.QUICK else 5
#: Seconds for all of a table's rows: those that come too late are left out.
SECONDS = float(os.environ.get("PENSTOCK_SELFTEST_SWEEP", "45"))

#: Options that differ in size come first: each needs a pool of its own
GRID: list[dict[str, Any]] = [
    {"extent": extent, "staging": staging, "threads": threads}
    for extent in ("4MiB", "2MiB", "1MiB", "8MiB")
    for staging in ("256MiB", "64MiB", "128MiB", "512MiB", "32MiB")
    for threads in (16, 12, 10, 8, 14, 6)
]
OPTIONS: list[dict[str, Any]] = [{}, {"io": "direct"}, {"io": "uring_buffered"}]


@pytest.fixture(scope="module")
def gpt2(folder: Path) -> Path:
    layout = checkpoints.gpt2(128) if checkpoints.QUICK else layouts.build("gpt2")
    source = synth.write(layout, folder / "gpt2-whole")
    page_cache.fill(sorted(source.glob("*.safetensors")))
    return source


@pytest.fixture
def in_time() -> Iterator[Any]:
    deadline = time.monotonic() + SECONDS
    yield lambda: time.monotonic() < deadline


def once(gpu: Gpu, source: Path, options: dict[str, Any]) -> tuple[float, Any]:
    """Seconds of opening and loading, until the device has it all, and the report."""
    begun = time.perf_counter()
    opened = penstock.open(source)
    tensors = opened.load(gpu.device(), options=options, progress=False)
    gpu.synchronize()
    seconds = time.perf_counter() - begun
    assert len(tensors) == len(opened)
    return seconds, opened.last_report


def cells(seconds: list[float], report: Any) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "median ms": median * 1e3,
        "least ms": min(seconds) * 1e3,
        "GB/s": report.nbytes / median / 1e9,
        "bound by": report.bottleneck,
        "plan ms": report.plan_seconds * 1e3,
        "hand-out ms": report.hand_out_seconds * 1e3,
        "CPU s": report.cpu_seconds,
        "staging MiB": report.peak_staging >> 20,
        "waits ms": {stage: round(s * 1e3, 1) for stage, s in report.waits.items() if s > 1e-4},
        "fallbacks": len(report.fallbacks),
    }


@pytest.mark.parametrize("pinning", [1, 2, 4])
def test_the_first_loads_with_an_empty_pool(gpu: Gpu, gpt2: Path, pinning: int) -> None:
    gpu.forget()  # allocating is a part of a first load
    penstock.release_staging()
    for number in range(1, 4 if pinning > 1 else 5):
        seconds, report = once(gpu, gpt2, {"pinning_threads": pinning})
        assert gpus.settle(lambda: not gpus.threads())
        registers = {"threads that register": pinning}
        results.row("first loads of GPT-2, warm", **registers, load=number, **cells([seconds], report))
        gc.collect()


def test_options(gpu: Gpu, gpt2: Path, in_time: Any) -> None:
    """Each with a pool of its own, which two loads make: a pool of larger slabs would serve too, with fewer of them."""
    pool: Any = None
    for options in [*OPTIONS, *(GRID[:2] if checkpoints.QUICK else GRID)]:
        if not in_time():
            results.row("options, GPT-2, warm", options=str(options), fallbacks="no time left")
            continue
        if pool != (pool := (options.get("extent"), options.get("staging"))):
            penstock.release_staging()
            for _ in range(2):
                once(gpu, gpt2, options)
                assert gpus.settle(lambda: not gpus.threads())
        runs = []
        for _ in range(ROUNDS):
            seconds, report = once(gpu, gpt2, options)
            runs.append(seconds)
            gc.collect()
        named = ", ".join(f"{name} {value}" for name, value in options.items()) or "none"
        results.row("options, GPT-2, warm", options=named, **cells(runs, report))
    penstock.release_staging()


def test_a_trace(gpu: Gpu, gpt2: Path) -> None:
    folder = os.environ.get(results.FOLDER)
    if not folder:
        pytest.skip("no folder for results")
    trace = Path(folder, "trace.json")
    once(gpu, gpt2, {"trace": str(trace)})
    assert trace.stat().st_size > 0


@pytest.mark.parametrize("size", [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20])
def test_tensors_of_one_size(gpu: Gpu, folder: Path, size: int) -> None:
    """Whether copies of up to 256 KiB are well submitted together, and larger ones alone: into existing tensors."""
    # The tensors that stand in for a GPU's take milliseconds each, in Python
    total = (8 << 20) if checkpoints.QUICK or gpus.FAKE else (256 << 20)
    tensors = [Tensor(f"t{i}", "U8", (size,)) for i in range(max(1, total // size))]
    source = synth.write_file(folder / f"of-{size}.safetensors", tensors)
    opened = penstock.open(source)
    to = {
        name: gpu.torch.empty(tuple(opened[name].shape), dtype=gpu.torch.uint8, device=gpu.device()) for name in opened
    }
    gpu.synchronize()
    runs: dict[str, list[float]] = {"load": [], "load_into": []}
    for _ in range(ROUNDS + 1):
        ways: tuple[tuple[str, Callable[[], object]], ...] = (
            ("load", lambda: opened.load(gpu.device(), progress=False)),
            ("load_into", lambda: opened.load_into(to, progress=False)),
        )
        for way, work in ways:
            begun = time.perf_counter()
            work()
            gpu.synchronize()
            runs[way].append(time.perf_counter() - begun)
            gc.collect()
    for way, seconds in runs.items():
        later = statistics.median(seconds[1:])
        each = later / len(tensors) * 1e6
        rate = opened.nbytes / later / 1e9
        results.row(
            "tensors of one size", **{"KiB": size >> 10, "way": way, "ms": later * 1e3, "us each": each, "GB/s": rate}
        )
    source.unlink()


@pytest.mark.parametrize("width", [64, 256, 1024, 4096, 16384])
def test_columns(gpu: Gpu, folder: Path, width: int) -> None:
    """Columns of one tensor: narrow rows are gathered into transfers of up to 1 MiB, wide ones are copied as rows."""
    rows, whole = (64, 1 << 15) if checkpoints.QUICK else (4096, 1 << 15)
    source = folder / f"columns-{rows}.safetensors"
    if not source.exists():
        synth.write_file(source, [Tensor("w", "U8", (rows, whole))])
    opened = penstock.open(source)
    runs = []
    for _ in range(ROUNDS + 1):
        begun = time.perf_counter()
        part = opened.load(gpu.device(), slices={"w": (slice(None), slice(3, 3 + width))}, progress=False)["w"]
        gpu.synchronize()
        runs.append(time.perf_counter() - begun)
        assert tuple(part.shape) == (rows, width)
        del part
        gc.collect()
    later = statistics.median(runs[1:])
    results.row("columns", **{"row bytes": width, "ms": later * 1e3, "GB/s": rows * width / later / 1e9})
