"""Processes that are ranks of a mesh: those of `test_group`, with what DTensor brings."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import test_group
import torch
from test_group import Ranks

#: What programs of ranks have besides: every tensor as integers of its size, of which torch can do everything.
IMPORTS = """
import torch.distributed.checkpoint, torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
S, R, SS = Shard, Replicate(), _StridedShard
"""
PLACED = """
checkpoint = penstock.open(path)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

def bits(tensor):
    of = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(of)

whole = {name: tensor for name, tensor in checkpoint.load().items()}

def local(name, mesh, placements):
    return distribute_tensor(bits(whole[name]), mesh, placements, src_data_rank=None)

def check(name, found, mesh, placements):
    expected = local(name, mesh, placements)
    assert isinstance(found, DTensor) and found.placements == expected.placements, (name, found.placements)
    assert found.shape == whole[name].shape and found.stride() == whole[name].contiguous().stride(), name
    assert found.dtype == whole[name].dtype and found.device_mesh is mesh and not found.requires_grad
    assert torch.equal(bits(found.to_local()), expected.to_local()), (name, placements)
    assert found.to_local().is_contiguous()
    return 1
"""


@contextlib.contextmanager
def alone(rank: int, size: int) -> Iterator[None]:
    """This process as one rank of many, none of which is there: torch computes, and sends nothing."""
    pretended = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=pretended.FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def runner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    """Starts ranks: takes their program, their number and the path of their checkpoint."""
    folder = folder / "ranks"
    folder.mkdir()
    # One process imports it for all
    monkeypatch.setattr(test_group, "PRELUDE", test_group.PRELUDE.replace("\nsize, path", f"{IMPORTS}\nsize, path", 1))
    return lambda program, size, path: Ranks(PLACED + textwrap.dedent(program), size, path, folder)
