"""Fences: work that is queued on other streams, memory that the allocator hands out again, graphs that are captured."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock

from .checkpoints import MIB, same
from .gpus import Gpu

Sources = Callable[[str], Path]
Contents = Callable[[str], dict[str, bytes]]


def test_what_is_handed_out_can_be_read_on_any_stream_at_once(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    for name in ("gpt2", "large", "many"):
        tensors = penstock.open(sources(name)).load(gpu.device(), progress=False)
        gpu.read_at_once({k: t for k, t in tensors.items() if t.numel()}, contents(name))
        del tensors
        gc.collect()


def test_memory_that_is_handed_out_again_while_work_on_it_is_queued(
    gpu: Gpu, sources: Sources, contents: Contents
) -> None:
    for _ in range(3):
        gpu.freed_memory(9 * MIB, 8)
        tensors = penstock.open(sources("large")).load(gpu.device(), progress=False)
        same(gpu, tensors, contents("large"))
        del tensors


def test_the_same_on_another_stream(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    with gpu.another_stream():
        for _ in range(3):
            gpu.freed_memory(9 * MIB, 8)
            tensors = penstock.open(sources("large")).load(gpu.device(), progress=False)
            same(gpu, tensors, contents("large"))
            del tensors
            gc.collect()


def test_the_same_of_a_stream_of_tensors(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    expected = contents("large")
    for key, tensor in penstock.open(sources("large")).stream(gpu.device(), window="20MiB", progress=False):
        gpu.read_at_once({key: tensor}, {key: expected[key]})
        del tensor
        gpu.freed_memory(9 * MIB, 2)


def test_a_load_beside_a_capture_breaks_neither(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    """Registering included: the pool is empty when the load begins. torch may not allocate during a capture."""
    opened = penstock.open(sources("large"))
    for released in (True, False):
        if released:
            penstock.release_staging()
        with gpu.capturing():
            tensors = opened.load(gpu.device(), framework="dlpack", progress=False)
        assert list(tensors) == list(contents("large"))
        del tensors
        gc.collect()


def test_a_load_into_parameters_beside_a_capture(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    opened = penstock.open(sources("gpt2"))
    like = opened.load("cpu", progress=False)
    to = {key: gpu.torch.empty(tuple(t.shape), dtype=t.dtype, device=gpu.device()) for key, t in like.items()}
    gpu.synchronize()
    penstock.release_staging()
    with gpu.capturing():
        job = penstock.open(sources("large")).start(gpu.device(), framework="dlpack")
        job.wait()
        del job
    opened.load_into(to, progress=False)
    same(gpu, to, contents("gpt2"))


def test_a_capture_that_begins_during_a_load(gpu: Gpu, sources: Sources) -> None:
    opened = penstock.open(sources("large"))
    options = {"extent": "1MiB", "staging": "8MiB"}
    job = opened.start(gpu.device(), framework="dlpack", options=options)
    with gpu.capturing():
        job.wait()
    assert len(job.result()) == len(opened)


@pytest.mark.parametrize("mode", ["inference_mode", "default device", "memory pool"])
def test_under_what_torch_has_in_force(gpu: Gpu, sources: Sources, contents: Contents, mode: str) -> None:
    torch = gpu.torch
    opened = penstock.open(sources("gpt2"))
    if mode == "inference_mode":
        with torch.inference_mode():
            tensors = opened.load(gpu.device(), progress=False)
    elif gpu.fake:
        pytest.skip("the stand-in for torch has no default device and no memory pools")
    elif mode == "default device":
        with torch.device(gpu.device()):
            tensors = opened.load(gpu.device(), progress=False)
    else:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            tensors = opened.load(gpu.device(), progress=False)
    same(gpu, tensors, contents("gpt2"))
