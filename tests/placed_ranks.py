"""Processes that are ranks of a mesh: those of `ranks_together`, with what DTensor brings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ranks_together import Nursery, Ranks, starter

#: What programs of ranks begin with. `bits`: every tensor as integers of its size, of which torch can do everything.
PLACED = """
S, R, SS = Shard, Replicate(), _StridedShard
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


@pytest.fixture
def placed(nursery: Nursery, tmp_path: Path) -> Callable[..., Ranks]:
    """Starts ranks of a mesh: (program, size, path, **given)."""
    return starter(nursery, tmp_path, PLACED)
