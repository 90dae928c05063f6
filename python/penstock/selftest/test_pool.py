"""The pool of registered staging memory on a real driver."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock

from . import gpus, results
from .checkpoints import same
from .gpus import Gpu

Sources = Callable[[str], Path]
Contents = Callable[[str], dict[str, bytes]]


def grown() -> None:
    """Waits until nothing registers in the background any more."""
    assert gpus.settle(lambda: not gpus.threads()), gpus.threads()


def test_a_second_load_registers_nothing(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    penstock.release_staging()
    before, opened, counted, times = gpu.registrations(), penstock.open(sources("large")), [], []
    for _ in range(4):
        begun = time.perf_counter()
        tensors = opened.load(gpu.device(), progress=False)
        gpu.synchronize()
        times.append(time.perf_counter() - begun)
        grown()
        counted.append(gpu.registrations())
        report = opened.last_report
        assert report and not [f for f in report.fallbacks if "staging" in f["to"]]
        del tensors
        gc.collect()
    for number, seconds in enumerate(times, 1):
        gbps = opened.nbytes / seconds / 1e9
        results.row("loads one after the other", load=number, ms=seconds * 1e3, **{"GB/s": gbps})
    if before is None:
        pytest.skip("registrations cannot be seen with this driver")
    assert counted[0] != before, "the first load registers"
    assert counted[1] == counted[2] == counted[3] == counted[0]
    same(gpu, opened.load(gpu.device(), progress=False), contents("large"))


def test_released_staging_memory_is_registered_anew(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    opened = penstock.open(sources("gpt2"))
    opened.load(gpu.device(), progress=False)
    grown()
    assert penstock.release_staging() > 0
    assert penstock.release_staging() == 0
    same(gpu, opened.load(gpu.device(), progress=False), contents("gpt2"))


def test_staging_memory_that_a_load_uses_is_not_released(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    stream = penstock.open(sources("large")).stream(gpu.device(), window="16MiB", progress=False)
    expected = contents("large")
    for name, tensor in stream:
        penstock.release_staging()
        assert gpu.raw(tensor) == expected[name], name
        del tensor


def test_released_while_the_pool_grows(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    for _ in range(5):
        penstock.release_staging()
        job = penstock.open(sources("large")).start(gpu.device())
        penstock.release_staging()
        tensors = job.result()
        penstock.release_staging()
        same(gpu, tensors, contents("large"))
        del tensors, job
        gc.collect()
