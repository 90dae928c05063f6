"""The device's memory: what a load uses, what it does when there is too little, and torch's other allocators."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock

from . import results
from .checkpoints import MIB, same
from .gpus import Gpu

Sources = Callable[[str], Path]
Contents = Callable[[str], dict[str, bytes]]


def test_a_load_takes_little_beyond_the_weights(gpu: Gpu, sources: Sources) -> None:
    penstock.release_staging()
    before = gpu.in_use()
    opened = penstock.open(sources("large"))
    tensors = opened.load(gpu.device(), progress=False)
    gpu.synchronize()
    beyond = gpu.in_use() - before - opened.nbytes
    results.row("device memory", of="beyond the weights, large", MiB=beyond / MIB)
    assert len(tensors) == len(opened) and beyond <= 64 * MIB


def test_memory_comes_back_when_tensors_go(gpu: Gpu, sources: Sources) -> None:
    opened = penstock.open(sources("large"))
    del opened  # what it takes once has been taken
    before = gpu.in_use()
    for framework in ("pt", "dlpack"):
        for _ in range(3):
            tensors = penstock.open(sources("large")).load(gpu.device(), framework=framework, progress=False)
            del tensors
            gc.collect()
        assert gpu.in_use() - before <= 16 * MIB, framework


def test_torch_without_memory(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    with gpu.allocator_left_with(20 * MIB):
        for streamed in (False, True):
            opened = penstock.open(sources("large"))
            with pytest.raises(penstock.OutOfMemoryError) as caught:
                if streamed:
                    _ = dict(opened.stream(gpu.device(), window="8MiB", progress=False))
                else:
                    opened.load(gpu.device(), progress=False)
            assert "GPU 0" in str(caught.value)
            caught.value.__traceback__ = None
            del caught
            gc.collect()
    same(gpu, penstock.open(sources("large")).load(gpu.device(), progress=False), contents("large"))


def test_the_device_without_memory(gpu: Gpu, sources: Sources) -> None:
    opened = penstock.open(sources("large"))
    opened.load(gpu.device(), framework="dlpack", progress=False)
    gc.collect()
    with gpu.device_left_with(20 * MIB), pytest.raises(penstock.OutOfMemoryError) as caught:
        opened.load(gpu.device(), framework="dlpack", progress=False)
    caught.value.__traceback__ = None
    assert "large.safetensors" in str(caught.value)
    assert len(opened.load(gpu.device(), framework="dlpack", progress=False)) == len(opened)


ALLOCATORS = [
    "expandable_segments:True",
    "backend:cudaMallocAsync",
    "pinned_use_cuda_host_register:True",
    "max_split_size_mb:32",
]


@pytest.mark.parametrize("setting", ALLOCATORS)
def test_another_allocator(sources: Sources, program: Callable[..., str], setting: str) -> None:
    """Memory that is freed while work on it is queued, again, with what else torch can allocate by."""
    program(
        """
source = Path(sys.argv[1])
expected = checkpoints.content(source)
for _ in range(3):
    gpu.freed_memory(9 << 20, 8)
    tensors = penstock.open(source).load(device, progress=False)
    checkpoints.same(gpu, tensors, expected)
    to = {name: gpu.busy_memory(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    penstock.open(source).load_into(to, progress=False)
    checkpoints.same(gpu, to, expected)
    half = dict(penstock.open(source).stream(device, dtype="float16", window="20MiB", progress=False))
    del tensors, to, half
    gc.collect()
penstock.release_staging()
gpu.close()
""",
        sources("large"),
        PYTORCH_CUDA_ALLOC_CONF=setting,
        PYTORCH_ALLOC_CONF=setting,
    )


def test_tensors_can_be_shared_between_processes(gpu: Gpu, sources: Sources) -> None:
    if gpu.fake:
        pytest.skip("the stand-in for torch shares nothing")
    # Alone in its block, and one that shares a block: to that one IPC does not apply (docs/api.md)
    alone = penstock.open(sources("large")).load(gpu.device(), names=["layers.0.w"], progress=False)["layers.0.w"]
    together = penstock.open(sources("gpt2")).load(gpu.device(), progress=False)["ln_f.bias"]
    for what, tensor in (("alone", alone), ("in a shared block", together), ("cloned of it", together.clone())):
        shared: Any
        try:
            shared = tensor.untyped_storage()._share_cuda_() and "yes"
        except RuntimeError as error:
            shared = str(error).splitlines()[0][:80]
        results.row("sharing between processes", tensor=what, shared=shared)
        assert shared == "yes" or what == "in a shared block", shared
