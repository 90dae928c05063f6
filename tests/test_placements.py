"""Parts of tensors as DTensor places them: what a rank wants, and loads of ranks that make DTensors or fill them."""

from __future__ import annotations

import itertools
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
import torch
from conftest import same
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock._placements import at_rank, cut_of, placed, shape_of
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from placed_ranks import alone
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
if torch.distributed.is_available():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

S, R = Shard, Replicate


# --- The pure part ---


@st.composite
def distributed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, list[Any]]:
    """A shape, a mesh, one of its ranks, and placements."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(-len(shape), len(shape) - 1)
    strided = st.builds(
        lambda dim, by: _StridedShard(dim, split_factor=by), st.integers(0, len(shape) - 1), st.integers(1, 5)
    )
    placement = st.one_of(dims.map(Shard), strided, st.just(Replicate()))
    placements = draw(st.lists(placement, min_size=len(mesh), max_size=len(mesh)))
    return shape, mesh, draw(st.integers(0, prod(mesh) - 1)), placements


def indexed(tensor: torch.Tensor, cut: tuple[Any, ...]) -> torch.Tensor:
    """The part that ``slices=`` takes from a tensor, as numpy indexes it."""
    for dim, ranges in enumerate(cut):
        numbers = np.arange(tensor.shape[dim])
        listed = ranges if isinstance(ranges, list) else [ranges]
        tensor = tensor.index_select(dim, torch.from_numpy(np.concatenate([numbers[one] for one in listed])))
    return tensor


@settings(deadline=None, max_examples=150)
@given(distributed())
def test_the_part_of_a_rank_is_what_distribute_tensor_gives_it(case):
    shape, mesh_shape, rank, placements = case
    size, coordinates = at_rank(rank, mesh_shape)
    axes = placed(placements, shape, size, coordinates)
    whole = torch.arange(prod(shape)).reshape(shape)
    with alone(rank, prod(mesh_shape)):
        mesh = init_device_mesh("cpu", mesh_shape)
        assert tuple(mesh.get_coordinate()) == coordinates
        expected = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        local, first = compute_local_shape_and_global_offset(whole.shape, mesh, expected.placements)
    assert torch.equal(indexed(whole, cut_of(axes)), expected.to_local())
    assert shape_of(axes) == tuple(local)
    if prod(local):
        assert tuple(ranges[0][0] for ranges in axes) == tuple(first)


@settings(deadline=None, max_examples=100)
@given(distributed())
def test_the_parts_of_all_ranks_are_the_whole_once_for_each_replica(case):
    shape, mesh_shape, _, placements = case
    count = torch.zeros(shape, dtype=torch.int64)
    for rank in range(prod(mesh_shape)):
        axes = placed(placements, shape, *at_rank(rank, mesh_shape))
        for part in itertools.product(*axes):
            count[tuple(slice(*one) for one in part)] += 1
    replicas = prod(n for n, p in zip(mesh_shape, placements, strict=True) if p.is_replicate())
    assert (count == replicas).all()


@pytest.fixture
def checkpoint(tmp_path: Path) -> penstock.Checkpoint:
    tensors = {
        "0.up": torch.randn(7, 6),
        "0.norm": torch.randn(5),
        "1.up": torch.randn(8, 6).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return penstock.open(tmp_path / "model.safetensors")


def test_wants_are_given_to_a_load_as_they_are(checkpoint):
    def rule(info):
        if info.name.startswith("1."):
            return None
        return [R(), S(0)] if info.name.endswith("up") else [R(), R()]

    wants = checkpoint.for_rank(4, (2, 3), rule)
    assert wants == {"0.up": (slice(3, 6), slice(0, 6)), "0.norm": (slice(0, 5),), "scalar": ()}
    state, whole = checkpoint.load(names=wants, slices=wants), checkpoint.load()
    assert state.keys() == wants.keys()
    assert all(same(state[name], indexed(whole[name], wants[name])) for name in wants)


def test_a_part_in_several_ranges_is_a_list_of_slices(checkpoint):
    rule = {"0.up": [_StridedShard(0, split_factor=3), _StridedShard(1, split_factor=2)], "1.up": [S(0), S(-1)]}
    wants = checkpoint.for_rank(1, (2, 2), rule)
    assert wants == {
        "0.up": ([slice(0, 2), slice(3, 5), slice(6, 7)], [slice(2, 3), slice(5, 6)]),
        "1.up": (slice(0, 4), slice(3, 6)),
    }
    state, whole = checkpoint.load(names=wants, slices=wants), checkpoint.load()
    assert all(same(state[name], indexed(whole[name], wants[name])) for name in wants)


def test_a_rule_may_ask_where_the_rank_is(checkpoint):
    asked = []

    def rule(info, coordinates):
        asked.append(coordinates)
        stage, _ = coordinates
        return [R(), R()] if info.name.startswith(f"{stage}.") else None

    assert list(checkpoint.for_rank(1, (2, 3), rule)) == ["0.norm", "0.up"]
    assert list(checkpoint.for_rank(3, [2, 3], rule)) == ["1.up"]
    assert set(asked) == {(0, 1), (1, 0)}
    # A default is no question
    assert list(checkpoint.for_rank(0, 2, lambda info, name="scalar": [R()] if info.name == name else None)) == [
        "scalar"
    ]


def test_wants_need_no_torch(checkpoint, python):
    code = """
import sys, penstock
sys.modules["torch"] = None
class Shard:
    dim = 0
    def is_shard(self): return True
    def is_replicate(self): return False
wants = penstock.open(sys.argv[1]).for_rank(1, 2, {"0.up": [Shard()]})
print(wants, len(penstock.open(sys.argv[1]).load(names=wants, slices=wants, framework="np")["0.up"]))
"""
    done = python(code, checkpoint.files[0])
    assert done.stdout == "{'0.up': (slice(4, 7, None), slice(0, 6, None))} 3\n", done.stderr


@pytest.mark.parametrize(
    ("rank", "mesh", "placements", "error", "said"),
    [
        (6, (2, 3), [R(), R()], penstock.InvalidError, "ranks 0 to 5"),
        (-1, 2, [R()], penstock.InvalidError, "ranks 0 to 1"),
        (0, (2, 0), [R(), R()], penstock.InvalidError, "1 or more"),
        (0, (), [], penstock.InvalidError, "1 or more"),
        (0, "ab", [R()], penstock.InvalidError, "ranks in each dimension"),
        (0, 2.5, [R()], TypeError, "ranks in each dimension"),
        (0.5, 2, [R()], TypeError, "whole number"),
        (0, 2, [R(), R()], penstock.InvalidError, "0.up it gives 2 placements, and the mesh has 1"),
        (0, 2, S(0), TypeError, "0.up it says"),
        (0, 2, "R", TypeError, "0.up it says"),
        (0, 2, [S(2)], penstock.InvalidError, r"0.up of shape \[7, 6\]: placement S\(2\): the tensor has 2 dimensions"),
        (0, 2, [S(-3)], penstock.InvalidError, "has 2 dimensions"),
        (0, 2, [Partial()], penstock.InvalidError, "it is a part of a sum"),
        (0, 2, ["shard"], TypeError, "0.up of shape .*give Shard, Replicate or _StridedShard"),
    ],
)
def test_what_is_no_place_in_a_mesh_is_an_error(checkpoint, rank, mesh, placements, error, said):
    with pytest.raises(error, match=said):
        checkpoint.for_rank(rank, mesh, {"0.up": placements})


def test_a_rule_that_is_none_is_an_error(checkpoint):
    with pytest.raises(penstock.UnknownTensorError, match=r"0\.upp.*did you mean 0\.up"):
        checkpoint.for_rank(0, 2, {"0.upp": [S(0)]})
    with pytest.raises(TypeError, match="rule=3"):
        checkpoint.for_rank(0, 2, 3)
    with pytest.raises(penstock.InvalidError, match=r"scalar of shape \[\].*0 dimensions") as caught:
        checkpoint.for_rank(0, 2, lambda info: [S(0)])
    assert caught.value.tensor == "scalar"


def test_pairs_of_f4_stay_together(tmp_path: Path):
    path = synth.write_file(tmp_path / "f4.safetensors", [Tensor("a", "F4", (3, 10)), Tensor("odd", "F4", (2, 3))])
    checkpoint = penstock.open(path)
    wants = [checkpoint.for_rank(rank, 3, {"a": [S(1)]})["a"] for rank in range(3)]
    assert wants == [(slice(0, 3), slice(a, b)) for a, b in [(0, 4), (4, 8), (8, 10)]]
    assert checkpoint.for_rank(1, 2, {"odd": [S(0)]}) == {"odd": (slice(1, 2), slice(0, 3))}
    strided = checkpoint.for_rank(0, 2, {"a": [_StridedShard(1, split_factor=2)]})
    assert strided == {"a": (slice(0, 3), [slice(0, 4), slice(6, 8)])}
    if hasattr(torch, "float4_e2m1fn_x2"):
        whole = checkpoint.load(names=["a"])["a"].view(torch.uint8)
        state = checkpoint.load(names=strided, slices=strided)["a"]
        assert state.dtype == torch.float4_e2m1fn_x2
        assert torch.equal(state.view(torch.uint8), whole[:, [0, 1, 3]])


# --- Lists of slices ---

CUTS = {
    "0.up": ([slice(0, 2), slice(4, 7, 2)], [slice(3, 4), slice(0, 2)]),
    "0.norm": [slice(0, 1), slice(3, 5)],
    "1.up": ([slice(5, 5), slice(1, 3)], ...),
}


def test_lists_of_slices_are_loaded_as_what_they_name(checkpoint):
    whole = checkpoint.load()
    expected = {
        name: indexed(whole[name], cut if isinstance(cut, tuple) else (cut,))
        for name, cut in {**CUTS, "1.up": CUTS["1.up"][:1]}.items()
    } | {"scalar": whole["scalar"]}
    for state in (
        checkpoint.load(slices=CUTS),
        checkpoint.load(slices=lambda info: CUTS.get(info.name), options={"cache": "bypass"}),
        dict(checkpoint.stream(slices=CUTS, order="layer")),
        checkpoint.start(slices=CUTS).result(),
    ):
        assert state.keys() == whole.keys()
        assert all(same(state[name], expected[name]) for name in whole)
    half = checkpoint.load(slices=CUTS, dtype=torch.float16)
    assert all(same(half[name], expected[name].half()) for name in ("0.up", "0.norm", "scalar"))
    assert {name: (t.shape, t.is_meta) for name, t in checkpoint.load("meta", slices=CUTS).items()} == {
        name: (t.shape, True) for name, t in expected.items()
    }
    array = checkpoint.load(names="0.*", slices={k: CUTS[k] for k in ("0.up", "0.norm")}, framework="np")
    assert all(np.array_equal(array[name], expected[name].numpy()) for name in array)
    into = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    into["0.up"] = torch.empty(3, 4).t()
    checkpoint.load_into(into, slices=CUTS)
    assert all(same(into[name], expected[name]) for name in whole)


def test_pieces_go_through_a_copy_where_the_destination_needs_one(checkpoint):
    cut, whole = CUTS["0.up"], checkpoint.load(names=["0.up"])["0.up"]
    into = np.zeros((4, 3), np.float32)[::-1, ::-1]
    report = checkpoint.load_into({"0.up": into}, names=["0.up"], slices={"0.up": cut})
    assert np.array_equal(into, indexed(whole, cut).numpy())
    assert report["copied_through"] == ["0.up"]


def test_lists_of_slices_are_refused_where_nothing_joins_them(checkpoint):
    with pytest.raises(penstock.UnsupportedError, match=r'dtype="raw" takes one slice'):
        checkpoint.load(slices=CUTS, dtype="raw")
    with pytest.raises(penstock.UnsupportedError, match="framework='dlpack' takes one slice"):
        checkpoint.load(slices=CUTS, framework="dlpack")
    with penstock.safe_open(checkpoint.files[0]) as file, pytest.raises(penstock.SliceError, match="no list"):
        file.prefetch(CUTS)
    with pytest.raises(penstock.MismatchError, match="needs a slice"):
        checkpoint.load_into([penstock.Destination("0.norm", torch.empty(3), cut=CUTS["0.norm"])])
    with pytest.raises(penstock.SliceError, match="outside dimension 0"):
        checkpoint.load(slices={"0.norm": [slice(0, 1), slice(3, 6)]})
    with pytest.raises(penstock.MismatchError, match=r"0.norm has shape \[3\] in the checkpoint, but \[4\]"):
        checkpoint.load_into({"0.norm": torch.empty(4)}, names=["0.norm"], slices={"0.norm": CUTS["0.norm"]})


def test_a_failed_load_names_each_destination_once(checkpoint):
    """Also one that is filled in several pieces."""
    into = {"0.up": torch.empty(4, 3), "0.norm": torch.empty(3), "1.up": torch.empty(2, 6, dtype=torch.float8_e4m3fn)}

    def interrupted(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        checkpoint.load_into(into, names=list(into), slices=CUTS, progress=interrupted)
    assert sorted(caught.value.touched) == sorted(into)


# --- Ranks ---


@pytest.fixture
def dtypes(tmp_path: Path) -> Path:
    """A tensor of each dtype that torch has, with uneven sizes; others of odd shapes."""
    tensors = [
        Tensor(dtype, dtype, (7, 6))
        for dtype in synth.BITS
        if not dtype.startswith("F6_") and penstock.torch_dtype(dtype) is not None
    ]
    tensors += [Tensor("scalar", "F32", ()), Tensor("none", "BF16", (0, 5)), Tensor("few", "F16", (2, 3, 40))]
    return synth.write_file(tmp_path / "dtypes.safetensors", tensors)


def test_dtensors_of_a_mesh_are_those_of_distribute_tensor(placed, dtypes):
    """On four ranks: meshes of one and two dimensions, in any order of ranks; every dtype; divided in every way."""
    program = """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    turned = DeviceMesh("cpu", [[3, 1], [0, 2]])
    line = DeviceMesh("cpu", [2, 0, 3, 1])
    part = grid["tp"]
    two = [[S(0), S(0)], [R, S(1)], [S(1), R], [S(-1), S(0)], [SS(0, split_factor=2), S(0)], [R, R],
           [SS(1, split_factor=2), R], [SS(0, split_factor=3), SS(1, split_factor=2)]]
    said["checked"] = said["read"] = 0
    one = [[S(0)], [S(1)], [R], [SS(0, split_factor=2)]]
    for mesh, ways in ((grid, two), (turned, two[:5]), (line, one), (part, one[:1])):
        for way in ways:
            def rule(info):
                return [R] * mesh.ndim if not info.shape else way
            options = {"cache": "bypass", "gap": 0}
            found = checkpoint.load(group=mesh, placements=rule, options=options)
            assert list(found) == list(whole)
            said["checked"] += sum(check(n, t, mesh, rule(checkpoint[n])) for n, t in found.items())
            report = checkpoint.last_report
            # All of it lies in few pages, and what nobody wants of these is counted apart
            read = sum(way["bytes"] for lane, way in report.routes.items() if lane not in ("rank", "neighbour"))
            said["read"] += read - report.slack_bytes - report.gap_bytes
    keys = [f"penstock/{what}" for what in ("loads/0", f"loads/{rank}")]
    dist.barrier()
    dist.destroy_process_group()
    """
    with placed(program, 4, dtypes) as ranks:
        said = ranks.all()
    checkpoint = penstock.open(dtypes)
    assert [one["checked"] for one in said] == [18 * len(checkpoint)] * 4
    # Each load of the four reads every byte once; a mesh of two ranks is two such loads
    assert sum(one["read"] for one in said) == (17 + 2) * checkpoint.nbytes


def test_placements_go_with_the_other_arguments(placed, dtypes):
    program = """
    mesh = init_device_mesh("cpu", (1, 2))
    rule = lambda info: None if info.name in ("none", "scalar") else [R, S(0)]
    found = checkpoint.load(group=mesh, placements=rule, names=["few", "none", "F64", "I64"], dtype=torch.bfloat16)
    assert list(found) == ["few", "F64", "I64"]
    assert [t.dtype for t in found.values()] == [torch.bfloat16] * 2 + [torch.int64]
    for name, tensor in found.items():
        assert tensor.shape == whole[name].shape
        expected = distribute_tensor(whole[name].to(tensor.dtype), mesh, [R, S(0)], src_data_rank=None).to_local()
        assert torch.equal(bits(tensor.to_local()), bits(expected)), name
    for strided in ({"few": [R, SS(2, split_factor=5)]}, {"few": [S(0), SS(2, split_factor=5)]}):
        job = checkpoint.start(group=mesh, placements=strided)
        check("few", job.result()["few"], mesh, strided["few"])
        half = checkpoint.load(group=mesh, placements=strided, dtype="F32")["few"]
        assert half.dtype == torch.float32
        assert torch.equal(bits(half.to_local()), bits(job.result()["few"].to_local().float()))
    meta = checkpoint.load("meta", group=mesh, placements=rule)
    assert meta["few"].is_meta and meta["few"].to_local().shape == local("few", mesh, [R, S(0)]).to_local().shape
    # What goes wrong on one rank the others hear of
    for number, (asked, kind) in enumerate([
        ({"slices": {"few": slice(0, 1)}}, penstock.InvalidError),
        ({"framework": "np"}, penstock.UnsupportedError),
        ({"dtype": "raw"}, penstock.InvalidError),
        ({"device": "xpu"}, penstock.PenstockError),
        ({"placements": {"few": [R]}}, penstock.InvalidError),
        ({"placements": {"few": [R, Partial()]}}, penstock.InvalidError),
        ({"placements": {"fewer": [R, R]}}, penstock.UnknownTensorError),
    ]):
        try:
            asked = asked if rank == number % 2 else {}
            checkpoint.load(**{"group": mesh, "placements": {"few": [R, S(0)]}, **asked})
        except penstock.PeerError as error:
            assert rank != number % 2 and error.rank == number % 2, (asked, error)
        except kind as error:
            assert rank == number % 2, (asked, error)
        else:
            raise AssertionError(asked)
    try:
        checkpoint.load(group=dist.group.WORLD, placements=rule)
    except TypeError as error:
        said["text"] = str(error)
    said["again"] = check("few", checkpoint.load(group=mesh, placements=rule)["few"], mesh, [R, S(0)])
    dist.barrier()
    dist.destroy_process_group()
    """
    with placed(program, 2, dtypes) as ranks:
        for rank in range(2):
            said = ranks.said(rank)
            assert said["again"] == 1
            assert "give group= a DeviceMesh, not a ProcessGroup" in said["text"]


def test_a_mesh_of_three_dimensions_and_one_of_some_ranks(placed, dtypes):
    """Eight ranks; then those of one half alone, while the others load something else."""
    program = """
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    way = [R, SS(0, split_factor=2), S(0)]
    found = checkpoint.load(group=cube, placements=lambda info: way if info.shape else [R] * 3)
    said["checked"] = sum(check(n, t, cube, way if t.ndim else [R] * 3) for n, t in found.items())
    stage = cube["dp", "tp"]
    way = [S(0), S(1)] if rank < 4 else [S(1), SS(0, split_factor=3)]
    for name in (("few", "F32") if rank < 4 else ("I8",)):
        said["checked"] += check(name, checkpoint.load(group=stage, placements={name: way})[name], stage, way)
    mine = DeviceMesh("cpu", [[0, 1], [2, 3]])
    try:
        found = checkpoint.load(group=mine, placements={"few": [R, R]})
        said["few"] = check("few", found["few"], mine, [R, R])
    except penstock.InvalidError as error:
        said["text"] = str(error)
    wants = checkpoint.for_rank(rank, (8,), lambda info: [S(0)] if info.shape else None)
    state = checkpoint.load(names=wants, slices=wants, group=cube)
    line = init_device_mesh("cpu", (8,))
    assert all(torch.equal(bits(t), local(n, line, [S(0)]).to_local()) for n, t in state.items())
    dist.barrier()
    dist.destroy_process_group()
    """
    with placed(program, 8, dtypes) as ranks:
        said = ranks.all()
    count = len(penstock.open(dtypes))
    assert [one["checked"] for one in said] == [count + 2] * 4 + [count + 1] * 4
    assert [one.get("few") for one in said] == [1] * 4 + [None] * 4
    assert all("not a member of that DeviceMesh" in one["text"] for one in said[4:])


# --- One tensor ---


def test_one_tensor_is_divided_or_given_to_all(placed, dtypes):
    """Uneven: 7 rows and 6 columns for 4 ranks, 2 of 3 numbers; of the scalar nothing can be divided."""
    program = """
    groups = [dist.group.WORLD, (dist.PrefixStore("mine", store), rank, size), init_device_mesh("cpu", (2, 2)),
              DeviceMesh("cpu", [2, 0, 3, 1])]
    said["checked"] = said["read"] = said["whole"] = 0
    for number, group in enumerate(groups):
        mine = [2, 0, 3, 1].index(rank) if number == 3 else rank
        for name, dim in (("F32", 0), ("F8_E4M3", 1), ("few", -1), ("F4", -1), ("few", 0), ("none", 1), ("none", 0)):
            if name not in whole:
                continue
            found = penstock.get_sharded(checkpoint, name, dim, group, options={"cache": "bypass", "gap": 0})
            parts = torch.chunk(bits(whole[name]), size, dim)
            parts += (parts[0].narrow(dim, 0, 0),) * (size - len(parts))
            assert found.dtype == whole[name].dtype and torch.equal(bits(found), parts[mine].contiguous()), (name, dim)
            said["checked"] += 1
        for name in ("BF16", "scalar", "none", "few"):
            found = penstock.broadcast(checkpoint, name, group, options={"cache": "bypass", "gap": 0})
            assert torch.equal(bits(found), bits(whole[name])) and found.shape == whole[name].shape
            said["whole"] += 1
            report = checkpoint.last_report
            own = [way["bytes"] for lane, way in report.routes.items() if lane not in ("rank", "neighbour")]
            said["read"] += sum(own) - report.slack_bytes - report.gap_bytes
    array = penstock.get_sharded(checkpoint, "F32", 0, group, dtype="float16", framework="np")
    said["array"] = [type(array).__name__, str(array.dtype), array.shape]
    wrong = [("F33", 0, penstock.UnknownTensorError), ("F*", 0, penstock.UnknownTensorError),
             ("scalar", 0, penstock.SliceError), ("F32", 2, penstock.SliceError), ("F32", -3, penstock.SliceError)]
    for number, (name, dim, kind) in enumerate(wrong):
        try:
            penstock.get_sharded(checkpoint, *((name, dim) if rank == number % 4 else ("F32", 0)), dist.group.WORLD)
        except penstock.PeerError as error:
            assert rank != number % 4 and error.rank == number % 4
        except kind as error:
            assert rank == number % 4
        else:
            raise AssertionError(name)
    try:
        penstock.broadcast(path, "F32", dist.group.WORLD)
    except TypeError as error:
        said["text"] = str(error)
    dist.barrier()
    dist.destroy_process_group()
    """
    with placed(program, 4, dtypes) as ranks:
        said = ranks.all()
    checkpoint = penstock.open(dtypes)
    assert {one["checked"] for one in said} == {28 if "F4" in checkpoint else 24}
    assert [one["whole"] for one in said] == [16] * 4
    assert sum(one["read"] for one in said) == 4 * sum(checkpoint[n].nbytes for n in ("BF16", "scalar", "none", "few"))
    assert [one["array"] for one in said] == [["ndarray", "float16", [n, 6]] for n in (2, 1, 2, 2)]
    assert all("give what penstock.open returns" in one["text"] for one in said)
