"""Loads into models whose parameters are DTensors: tensor parallel, FSDP2, and both; with a group and alone."""

from __future__ import annotations

from pathlib import Path

import penstock
import pytest
import torch
from conftest import raw
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from placed_ranks import alone
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
if torch.distributed.is_available():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

#: A model whose sizes divide evenly, or not; and what fills it in each way that there is.
MODEL = """
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.up = nn.Linear(16, wide)
        self.down = nn.Linear(wide, 16, bias=False)
        self.norm = nn.LayerNorm(16)
    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

class Model(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.embed = nn.Embedding(21, 16)
        self.blocks = nn.ModuleList(Block(wide) for _ in range(2))
        self.head = nn.Linear(16, 21, bias=False, dtype=torch.bfloat16)
        self.gain = nn.Parameter(torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    def forward(self, at):
        x = self.embed(at)
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(torch.bfloat16)) * self.gain[0]

plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

def built(tp=None, dp=None, wide=24):
    model = Model(wide)
    for block in model.blocks:
        if tp is not None:
            parallelize_module(block, tp, plan)
        if dp is not None:
            fully_shard(block, mesh=dp)
    if dp is not None:
        fully_shard(model.head, mesh=dp)
        fully_shard(model, mesh=dp)
    return model

def emptied(model):
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(7)
    return model

def filled(model, report):
    state = model.state_dict()
    assert report.missing == report.unexpected == []
    for name, found in state.items():
        if isinstance(found, DTensor):
            found = found.full_tensor()
        assert torch.equal(found, whole[name]), name
    return sum(isinstance(tensor, DTensor) for tensor in state.values())
"""


def write_model(folder: Path) -> Path:
    """Writes the weights of `MODEL`."""
    torch.manual_seed(3)
    tensors = {"embed.weight": torch.randn(21, 16), "head.weight": torch.randn(21, 16).bfloat16()}
    for block in range(2):
        at = f"blocks.{block}"
        tensors |= {f"{at}.up.weight": torch.randn(24, 16), f"{at}.up.bias": torch.randn(24)}
        tensors |= {f"{at}.down.weight": torch.randn(16, 24)}
        tensors |= {f"{at}.norm.weight": torch.randn(16), f"{at}.norm.bias": torch.randn(16)}
    tensors |= {"gain": torch.randn(3), "steps": torch.tensor(12)}
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path)


def test_a_model_of_dtensors_gets_what_each_rank_has_of_it(placed, model):
    """Sizes that do not divide: 21 rows over 4 ranks, a gain of 3 elements of which the last rank has none."""
    program = (
        MODEL
        + """
grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
ways = {
    "tp": {"tp": init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))},
    "fsdp": {"dp": line},
    "hsdp": {"dp": grid},
    "fsdp and tp": {"dp": grid["dp"], "tp": grid["tp"]},
}
for way, meshes in ways.items():
    made = built(**meshes)
    groups = dist.group.WORLD, grid, None
    said[way] = [filled(emptied(made), checkpoint.load_into(made, group=group)) for group in groups]
    if way == "fsdp and tp":
        said["strided"] = str(made.state_dict()["blocks.0.up.weight"].placements)
        report = checkpoint.load_into(emptied(made), group=grid, options={"cache": "bypass", "gap": 0})
        read = sum(one["bytes"] for lane, one in report.routes.items() if lane not in ("rank", "neighbour"))
        said["read"] = read - report.slack_bytes - report.gap_bytes
    if way == "fsdp":  # also where a forward pass has left parameters that are not sharded
        assert made(torch.arange(5)).isfinite().all()
        said["run"] = filled(emptied(made), checkpoint.load_into(made, group=line))
dist.barrier()
dist.destroy_process_group()
"""
    )
    with placed(program, 4, model) as ranks:
        said = ranks.all()
    for one in said:
        assert one["tp"] == [6] * 3
        assert one["fsdp"] == one["hsdp"] == one["fsdp and tp"] == [13] * 3
        assert one["run"] == 13 and "_StridedShard" in one["strided"]
    assert sum(one["read"] for one in said) == penstock.open(model).nbytes


def test_fsdp_under_tp_is_filled_where_its_sizes_do_not_divide(placed, model):
    """7 rows: FSDP2 divides 4 and 3 among 3 ranks each, and its placements as torch reads them give others to two."""
    program = (
        MODEL
        + """
grid = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
made = nn.Linear(4, 7)
with torch.no_grad():
    made.weight.copy_(torch.arange(28.0).reshape(7, 4)), made.bias.copy_(torch.arange(7.0))
if rank == 0:
    from safetensors.torch import save_file
    save_file(made.state_dict(), f"{folder}/uneven.safetensors")
parallelize_module(made, grid["tp"], ColwiseParallel())
fully_shard(made, mesh=grid["dp"])
dist.barrier()
expected = [tensor.to_local().clone() for tensor in made.parameters()]
uneven = penstock.open(f"{folder}/uneven.safetensors")
for group in (grid, None):
    uneven.load_into(emptied(made), group=group)
    assert all(torch.equal(p.to_local(), e) for p, e in zip(made.parameters(), expected))
said["rows"] = expected[1].tolist()
dist.barrier()
dist.destroy_process_group()
"""
    )
    with placed(program, 6, model) as ranks:
        rows = [ranks.said(rank)["rows"] for rank in range(6)]
    assert rows == [[0, 1], [4], [2, 3], [5], [], [6]]


def test_a_local_shard_that_may_be_either_is_not_guessed_at(tmp_path):
    """27 rows over 4 ranks of TP and 3 of FSDP2: of one rank the shard has one row in both ways, and not the same."""
    save_file({"a": torch.arange(27.0)}, tmp_path / "a.safetensors")
    checkpoint = penstock.open(tmp_path / "a.safetensors")

    def into(rank: int, rows: int) -> torch.Tensor:
        with alone(rank, 12):
            mesh = init_device_mesh("cpu", (3, 4))
            given = torch.full((rows,), 7.0), mesh, [_StridedShard(0, split_factor=4), Shard(0)]
            tensor = DTensor.from_local(*given, run_check=False, shape=torch.Size([27]), stride=(1,))
            checkpoint.load_into({"a": tensor})
            return tensor.to_local()

    assert into(0, 3).tolist() == [0, 1, 2]
    with pytest.raises(penstock.MismatchError, match="does not divide it evenly: FSDP2 and distribute_tensor make"):
        into(10, 1)
    with pytest.raises(penstock.MismatchError, match=r"its local shard has shape \[4\], and this rank's is \[1\]"):
        into(10, 4)


@pytest.mark.parametrize("rank", range(4))
def test_local_shards_of_every_dtype_are_filled(tmp_path, rank):
    """Also in several pieces, without elements, and without dimensions; each rank alone."""
    dtypes = [name for name in synth.BITS if name[:3] != "F6_" and penstock.torch_dtype(name) is not None]
    tensors = [Tensor(name, name, (7, 6)) for name in dtypes]
    tensors += [Tensor("scalar", "F32", ()), Tensor("none", "BF16", (0, 5)), Tensor("few", "F16", (1, 3))]
    checkpoint = penstock.open(synth.write_file(tmp_path / "dtypes.safetensors", tensors))
    strided = [_StridedShard(1, split_factor=3), _StridedShard(0, split_factor=2)]
    for placements in ([Replicate(), Shard(0)], [Shard(1), Shard(0)], strided):
        places = {name: placements if info.shape else [Replicate()] * 2 for name, info in checkpoint.items()}
        wants = checkpoint.for_rank(rank, (2, 2), places)
        expected = checkpoint.load(names=wants, slices=wants)
        with alone(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            whole = checkpoint.load("meta")
            into = {
                name: DTensor.from_local(
                    torch.zeros(local.shape, dtype=torch.uint8).view(local.dtype)
                    if local.dtype == getattr(torch, "float4_e2m1fn_x2", None)
                    else torch.empty_like(local),
                    mesh,
                    places[name],
                    run_check=False,
                    shape=whole[name].shape,
                    stride=whole[name].stride(),
                )
                for name, local in expected.items()
            }
            checkpoint.load_into(into)
            for name, local in expected.items():
                assert raw(into[name].to_local()) == raw(local), (name, placements)
        pieces = sum(any(isinstance(one, list) for one in cut) for cut in wants.values())
        assert (pieces > 10) == (placements is strided)


def test_what_does_not_fit_is_named_before_a_byte_moves(placed, model):
    program = """
    mesh = init_device_mesh("cpu", (2,))
    embed = whole["embed.weight"]
    few = torch.full((3, 16), 7.0)
    short = DTensor.from_local(few, mesh, [S(0)], run_check=False, shape=embed.shape, stride=(16, 1))
    fine = distribute_tensor(torch.full((16,), 7.0), mesh, [S(0)])
    into = {
        "embed.weight": short,
        "blocks.0.up.weight": distribute_tensor(torch.empty(24, 18), mesh, [S(0)]),
        "blocks.0.down.weight": distribute_tensor(torch.empty(16, 24), mesh, [S(0)]).to(torch.float16),
        "blocks.1.up.weight": DTensor.from_local(torch.empty(24, 16), mesh, [Partial()], run_check=False),
        "blocks.1.down.weight": distribute_tensor(torch.empty(16, 24, device="meta"), mesh, [S(1)]),
        "blocks.0.norm.weight": fine,
    }
    try:
        checkpoint.load_into(into, strict=False, group=mesh)
    except penstock.MismatchError as error:
        said["problems"], said["touched"] = sorted(error.problems), error.touched
    except penstock.PeerError as error:
        said["problems"] = said["touched"] = None
    assert torch.equal(fine.full_tensor(), torch.full((16,), 7.0))
    # A part of a part: rows of the checkpoint's tensor, divided between the ranks; in pieces; tied
    rows = distribute_tensor(torch.zeros(10, 16), mesh, [S(0)])
    twice = distribute_tensor(torch.zeros(24, 16), mesh, [SS(0, split_factor=3)])
    report = checkpoint.load_into(
        {"embed.weight": rows, "blocks.0.up.weight": twice, "tied": twice}, strict=False, group=mesh,
        slices={"embed.weight": slice(1, 21, 2)},
    )
    assert torch.equal(rows.full_tensor(), embed[1::2])
    assert torch.equal(twice.full_tensor(), whole["blocks.0.up.weight"])
    said["missing"] = report.missing
    local = twice.to_local()
    before = local._version, twice._version
    checkpoint.load_into({"blocks.0.up.weight": twice}, strict=False)
    said["bumped"] = [local._version > before[0], twice._version > before[1]]
    # One that is in no rank's place here is no destination of this process
    first = DeviceMesh("cpu", [0])
    there = distribute_tensor(torch.zeros(16), first, [S(0)])
    report = checkpoint.load_into({"blocks.0.norm.bias": there}, names="blocks.0.norm.bias", group=mesh)
    said["tensors"] = report.tensors
    said["there"] = rank == 1 or torch.equal(there.to_local(), whole["blocks.0.norm.bias"])
    try:
        checkpoint.load_into([penstock.Destination("blocks.0.norm.bias", fine)])
    except penstock.MismatchError as error:
        said["destination"] = str(error)
    dist.barrier()
    dist.destroy_process_group()
    """
    with placed(program, 2, model) as ranks:
        said = ranks.all()
    for rank, one in enumerate(said):
        problems = one["problems"]
        assert len(problems) == 5 and one["touched"] == []
        assert "F32 in the checkpoint, but F16" in problems[0], problems
        assert "blocks.0.up.weight has shape [24, 16] in the checkpoint, but [24, 18]" in problems[1]
        assert 'blocks.1.down.weight is on the "meta" device' in problems[2]
        assert "blocks.1.up.weight is a DTensor that cannot be loaded: placement P(sum)" in problems[3]
        assert f"its local shard has shape [3, 16], and this rank's is [{11 - rank}, 16]" in problems[4]
        assert one["missing"] == []
        assert one["bumped"] == [True, True]
        assert one["there"] and "give the local tensor" in one["destination"]
    assert [one["tensors"] for one in said] == [1, 0]
