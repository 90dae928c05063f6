"""`dcp.load` through `penstock.integrations.dcp.StorageReader`, beside torch's own reader of such checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import penstock
import pytest
import torch
from conftest import same
from safetensors.torch import save_file

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
dcp = pytest.importorskip("torch.distributed.checkpoint")
hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
Stock = hf_storage.HuggingFaceStorageReader

from penstock.integrations.dcp import StorageReader  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files and their index: several dtypes, sizes that do not divide, a scalar, and a tensor without elements."""
    torch.manual_seed(5)
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    for layer in range(2):
        files[layer] |= {
            f"layers.{layer}.up.weight": torch.randn(24, 16),
            f"layers.{layer}.up.bias": torch.randn(24),
            f"layers.{layer}.down.weight": torch.randn(16, 24),
            f"layers.{layer}.norm.weight": torch.randn(16).bfloat16(),
            f"layers.{layer}.scale": torch.randn(7, 4).to(torch.float8_e4m3fn),
        }
    files[0] |= {"embed": torch.randn(21, 16), "steps": torch.tensor(3), "none": torch.empty(0, 16)}
    path = tmp_path / "model"
    path.mkdir()
    index = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file(tensors, path / name)
        index |= dict.fromkeys(tensors, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def empty(folder: Path) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 1) for name, tensor in penstock.open(folder).load().items()}


def test_a_state_dict_becomes_what_the_stock_reader_makes_of_it(folder):
    ours, theirs = empty(folder), empty(folder)
    reader = StorageReader(folder)
    dcp.load(ours, storage_reader=reader)
    dcp.load(theirs, storage_reader=Stock(str(folder)))
    assert ours.keys() == theirs.keys()
    assert all(same(ours[name], theirs[name]) for name in ours)
    assert reader.last_report is not None
    assert reader.last_report.nbytes == penstock.open(folder).nbytes and not reader.last_report["copied_through"]


def test_nested_strided_and_other_dtypes_are_filled_as_the_stock_reader_fills_them(folder):
    def asked() -> dict[str, Any]:
        return {
            "layers": {"0": {"up": {"weight": torch.zeros(16, 24).t(), "bias": torch.zeros(24, dtype=torch.float16)}}},
            "layers.1": {"norm.weight": torch.zeros(16), "scale": torch.zeros(7, 4, dtype=torch.bfloat16)},
            "steps": torch.zeros((), dtype=torch.int32),
            "embed": torch.zeros(21, 32)[:, ::2],
        }

    ours, theirs = asked(), asked()
    reader = StorageReader(penstock.open(folder))
    dcp.load(ours, storage_reader=reader)
    dcp.load(theirs, storage_reader=Stock(str(folder)))
    flat = torch.utils._pytree.tree_leaves
    assert len(flat(ours)) == 6
    for one, other in zip(flat(ours), flat(theirs), strict=True):
        assert one.stride() == other.stride() and same(one, other)
    wanted = [*ours["layers"]["0"]["up"].values(), *ours["layers.1"].values(), ours["steps"], ours["embed"]]
    assert reader.last_report is not None and reader.last_report.tensors == len(wanted)
    # A part of the checkpoint is read, and no more
    one = {"layers.1.up.bias": torch.zeros(24)}
    dcp.load(one, checkpoint_id=str(folder), storage_reader=reader)
    assert reader.last_report.nbytes == 96


def test_tied_tensors_get_one_of_their_names(folder):
    tied = torch.zeros(24)
    state = {"layers.0.up.bias": tied, "layers.1.up.bias": tied}
    dcp.load(state, storage_reader=StorageReader(folder))
    whole = penstock.open(folder).load()
    assert torch.equal(tied, whole["layers.1.up.bias"])


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"embed": torch.zeros(21, 16), "lost": torch.zeros(2)}, "Missing key in checkpoint state_dict: lost"),
        ({"embed": torch.zeros(21, 17)}, "Size mismatch between saved"),
    ],
)
def test_what_the_checkpoint_does_not_have_is_the_error_of_the_stock_reader(folder, state, said):
    texts = []
    for reader in (StorageReader(folder), Stock(str(folder))):
        with pytest.raises(dcp.api.CheckpointException) as caught:
            dcp.load(dict(state), storage_reader=reader)
        [error] = [failure[0] for failure in caught.value.failures.values()]
        texts.append((type(error), str(error)))
    assert texts[0] == texts[1]
    assert said in texts[0][1]


def test_tensors_that_may_be_missing_are_left_alone(folder):
    state = {"embed": torch.zeros(21, 16), "lost": torch.full((2,), 7.0)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=StorageReader(folder), planner=planner)
    assert state["lost"].eq(7).all() and same(state["embed"], penstock.open(folder).load(names=["embed"])["embed"])


def failure(state: dict[str, Any], reader: StorageReader) -> str:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(state, storage_reader=reader)
    [error] = [failure[0] for failure in caught.value.failures.values()]
    return f"{type(error).__name__}: {error}"


def test_a_checkpoint_that_is_none_says_why(folder, tmp_path):
    assert "nowhere" in failure({}, StorageReader(tmp_path / "nowhere"))
    shards = tmp_path / "shards"
    shards.mkdir()
    for number, first in enumerate((0, 4), 1):
        info = json.dumps({"a": {"saved_offsets": [first, 0]}})
        save_file({"a": torch.zeros(4, 3)}, shards / f"{number}.safetensors", {"DCP_SHARDING_INFO": info})
    assert "save_distributed=True" in failure({"a": torch.zeros(8, 3)}, StorageReader(shards))
    assert "save_distributed=True" in failure({"a": torch.zeros(8, 3)}, StorageReader(shards / "2.safetensors"))
    first = {"a": torch.ones(4, 3)}
    dcp.load(first, storage_reader=StorageReader(shards / "1.safetensors"))
    assert first["a"].eq(0).all()
    assert StorageReader.validate_checkpoint_id(folder) and not StorageReader.validate_checkpoint_id(3)  # type: ignore[arg-type]


def test_what_cannot_be_filled_is_said_before_a_byte_moves(folder):
    memory = torch.full((30,), 7.0)
    said = failure({"layers.0.up.bias": memory[6:], "layers.1.up.bias": memory[:24]}, StorageReader(folder))
    assert said.startswith("MismatchError") and "overlaps" in said
    assert memory.eq(7).all()


MODELS = """
from torch import nn
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from penstock.integrations.dcp import StorageReader

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16, bias=False)
        self.norm = nn.LayerNorm(16, bias=False, dtype=torch.bfloat16)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.embed = nn.Parameter(torch.zeros(21, 16))
        self.register_buffer("steps", torch.tensor(0))

plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

def state_of(tp, dp):
    model = Model()
    for layer in model.layers:
        if tp is not None:
            parallelize_module(layer, tp, plan)
        if dp is not None:
            fully_shard(layer, mesh=dp)
    if dp is not None:
        fully_shard(model, mesh=dp)
    return model.state_dict()

def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
"""


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_fill_their_shards_and_read_each_byte_once(placed, folder, size):
    program = (
        MODELS
        + """
line = init_device_mesh("cpu", (size,))
grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
ways = {"plain": (None, None), "tp": (line, None), "fsdp": (None, line), "fsdp and tp": (grid["tp"], grid["dp"])}
for way, meshes in ways.items():
    theirs = state_of(*meshes)
    dcp.load(theirs, storage_reader=HuggingFaceStorageReader(path))
    read = []
    for group in (dist.group.WORLD, grid, None):
        ours = state_of(*meshes)
        reader = StorageReader(path, group=group, options={"cache": "bypass", "gap": 0})
        dcp.load(ours, storage_reader=reader)
        assert ours.keys() == theirs.keys() and len(ours) == 10
        for name in ours:
            assert type(ours[name]) is type(theirs[name])
            assert torch.equal(local(ours[name]), local(theirs[name])), (way, name)
            full = ours[name].full_tensor() if isinstance(ours[name], DTensor) else ours[name]
            assert torch.equal(full, whole[name]), (way, name)
        report = reader.last_report
        own = [way["bytes"] for lane, way in report.routes.items() if lane not in ("rank", "neighbour")]
        read.append(sum(own) - report.slack_bytes - report.gap_bytes)
    said[way] = read
    said[way + " dtensors"] = sum(isinstance(tensor, DTensor) for tensor in ours.values())
    said["wanted"] = sum(whole[name].nbytes for name in ours)
dist.barrier()
dist.destroy_process_group()
"""
    )
    with placed(program, size, folder) as ranks:
        said = ranks.all()
    wanted = said[0]["wanted"]
    for way in ("plain", "tp", "fsdp", "fsdp and tp"):
        together, mesh, alone = (sum(reads) for reads in zip(*(one[way] for one in said), strict=True))
        assert together == mesh == wanted, way
        assert alone > wanted, way  # what all ranks have, and pieces of rows
    assert [said[0][f"{way} dtensors"] for way in ("plain", "tp", "fsdp", "fsdp and tp")] == [0, 6, 9, 9]


def test_a_rank_that_cannot_resolve_its_tensors_tells_the_others(placed, folder):
    program = """
    import torch.distributed.checkpoint as dcp
    from penstock.integrations.dcp import StorageReader

    class Failing(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, item):
            if rank == 1:
                raise ValueError("not today")
            return super().resolve_tensor(item)

    try:
        reader = StorageReader(path, group=dist.group.WORLD)
        dcp.load({"embed": torch.zeros(21, 16)}, storage_reader=reader, planner=Failing())
    except dcp.api.CheckpointException as error:
        said["failures"] = {number: f"{type(one[0]).__name__}: {one[0]}" for number, one in error.failures.items()}
    state = {"embed": torch.zeros(21, 16)}
    dcp.load(state, storage_reader=StorageReader(path, group=dist.group.WORLD))
    said["again"] = torch.equal(state["embed"], whole["embed"])
    dist.barrier()
    dist.destroy_process_group()
    """
    with placed(program, 2, folder) as ranks:
        for rank in range(2):
            said = ranks.said(rank)
            assert "ValueError: not today" in said["failures"]["1"]
            assert said["failures"]["0"].startswith("PeerError") and "not today" in said["failures"]["0"]
            assert said["again"]
