"""Saved from GPU memory: every byte, many small tensors, strided ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock

from . import checkpoints
from .gpus import Gpu

Sources = Callable[[str], Path]
Contents = Callable[[str], dict[str, bytes]]


@pytest.mark.parametrize("framework", ["pt", "dlpack"])
@pytest.mark.parametrize("name", ["gpt2", "moe", "many", "crooked", "large"])
def test_what_was_loaded_can_be_saved(
    gpu: Gpu, sources: Sources, contents: Contents, tmp_path: Path, name: str, framework: Any
) -> None:
    tensors = penstock.open(sources(name)).load(gpu.device(), framework=framework, progress=False)
    penstock.save_file(tensors, tmp_path / "saved.safetensors")
    assert checkpoints.content(tmp_path / "saved.safetensors") == contents(name)


def test_a_strided_tensor(gpu: Gpu, sources: Sources, tmp_path: Path) -> None:
    whole = penstock.open(sources("crooked")).load(gpu.device(), names=["columns"], progress=False)["columns"]
    expected = gpu.raw(whole.t())
    penstock.save_file({"turned": whole.t()}, tmp_path / "saved.safetensors")
    assert checkpoints.content(tmp_path / "saved.safetensors") == {"turned": expected}


def test_what_queued_work_writes_is_saved(gpu: Gpu, tmp_path: Path) -> None:
    if gpu.fake:
        pytest.skip("to torch, and so to what saves, the memory of the stand-in is on the CPU")
    tensors = {str(i): gpu.busy_memory((9, 1 << 16), gpu.torch.float32) for i in range(8)}
    penstock.save_file(tensors, tmp_path / "saved.safetensors")
    for name, content in checkpoints.content(tmp_path / "saved.safetensors").items():
        assert set(content) == {0x55}, name


def test_a_checkpoint_in_shards(gpu: Gpu, sources: Sources, contents: Contents, tmp_path: Path) -> None:
    tensors = penstock.open(sources("large")).load(gpu.device(), progress=False)
    penstock.save(tensors, tmp_path / "shards", max_shard_size="20MiB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert checkpoints.content(tmp_path / "shards") == contents("large")
