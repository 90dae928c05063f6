"""Programs of fastsafetensors and InstantTensor for process groups, on penstock's faces of them: several processes.

Where fastsafetensors is installed, it runs beside its face, on the CPU with the same group. InstantTensor needs GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import penstock
import pytest
import torch
from ranks_together import Ranks
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a, b and c: sizes that 2 and 4 divide, except of ``odd``, which neither does."""
    torch.manual_seed(0)
    folder: Path = tmp_path_factory.mktemp("faces")
    for letter in "abc":
        tensors = {
            f"{letter}0": torch.randn(16, 8),
            f"{letter}1": torch.randn(8, 12, 4).to(torch.bfloat16),
            f"{letter}2": torch.randint(0, 255, (4, 16), dtype=torch.uint8),
            f"{letter}.scalar": torch.tensor(7, dtype=torch.int64),
            f"{letter}.mask": torch.rand(8) > 0.5,
            f"{letter}.odd": torch.randn(7, 3, dtype=torch.float16),
        }
        if hasattr(torch, "float4_e2m1fn_x2"):
            tensors[f"{letter}.f4"] = torch.randint(0, 255, (8, 16), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        save_file(tensors, folder / f"{letter}.safetensors")
    return folder


@pytest.fixture
def run(together: Callable[..., Ranks]) -> Callable[..., Ranks]:
    """Runs a program. ``a``, ``b``, ``c`` are its files; ``held`` is what is in them."""
    prelude = """
import hashlib
from safetensors.torch import load_file
a, b, c = (f"{path}/{letter}.safetensors" for letter in "abc")
held = {name: tensor for file in (a, b, c) for name, tensor in load_file(file).items()}

def bits(tensor):
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), data[:8].hex(), hashlib.sha256(data).hexdigest()[:8]

def part(tensor, dim, number=None, count=None):
    size, number, count = tensor.shape[dim], rank if number is None else number, count or size_of_group
    block = -(-size // count)
    return tensor.narrow(dim, min(number * block, size), max(0, min(block, size - number * block)))

def equal(found, expected):
    assert bits(found) == bits(expected), (found, expected)

def refused(error, *arguments):
    try:
        arguments[0](*arguments[1:])
    except error as found:
        return found
    raise AssertionError(f"no {error}")

dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
world, size_of_group = dist.group.WORLD, size
from penstock.compat import fastsafetensors as face
"""
    return lambda program, size, path: together(prelude + program, size, path)


def done(ranks: Ranks, size: int) -> None:
    for rank in range(size):
        ranks.said(rank)


# fastsafetensors


@pytest.mark.skipif(find_spec("fastsafetensors") is None, reason="fastsafetensors is not installed")
@pytest.mark.parametrize("size", [2, 4])
def test_the_original_gives_every_rank_the_same(run, model, size):
    with run(
        """
import fastsafetensors as original
from fastsafetensors import st_types
files = {0: [c, a], 1: [b]}
names = [f"{letter}{what}" for letter in "cba" for what in ("0", "1", "2", ".scalar", ".mask")]
dims = {"a0": 1, "b1": 0, "a1": 1, "c2": 0, "c.mask": 0, "b.scalar": -1, "a.odd": -1, "c0": -1}
f4 = [name for name in ("a.f4", "b.f4", "c.f4") if name in held]
dims.update(dict.fromkeys(f4, 1))
told = []
for fst in (original, face):
    loader = fst.SafeTensorsFileLoader(world, "cpu", nogds=True)
    loader.add_filenames(files)
    fb = loader.copy_files_to_device()
    one = {"keys": loader.get_keys(), "places": list(fb.key_to_rank_lidx.items())}
    one["group"] = loader.pg.size(), loader.pg.rank()
    one["shapes"] = [(fb.get_shape(name), fb.get_filename(name)) for name in loader.get_keys()]
    one["whole"] = [bits(fb.get_tensor(name)) for name in names]
    one["columns"] = [bits(fb.get_sharded(name, 1)) for name in ("a0", "b0", "c1", *f4)]
    one["rows"] = [bits(fb.get_sharded_wrapped(name, 0).get_raw()) for name in ("a0", "b1", "b2", *f4)]
    one["planes"] = bits(fb.get_sharded("b1", 2))
    one["cast"] = bits(fb.get_tensor("b0", dtype=(st_types if fst is original else face).DType.F16))
    pushed = [fb.push_tensor(name, to) for name, to in (("a0", 1), ("b0", 1), ("b1", 0), ("c2", size - 1))]
    one["pushed"] = [tensor if tensor is None else bits(tensor) for tensor in pushed]
    one["joined"] = [bits(fb.get_multi_cols(list(some), dim).get_raw()) for some, dim in (
        (("a0", "c0"), 0), (("a0", "c0", "b0"), 1), (("b0",), 1), (("b0", "a0"), 0), (f4 or ("b0",), 1))]
    fb.close()
    fb = loader.copy_files_to_device()
    one["dict"] = {name: bits(tensor.get_raw()) for name, tensor in fb.as_dict(dims).items()}
    fb.close()
    loader.reset()
    loader.add_filenames({1: [a]})
    fb = loader.copy_files_to_device()
    one["again"] = list(fb.key_to_rank_lidx.items()), bits(fb.get_tensor("a.odd"))
    fb.close()
    loader.close()
    with fst.fastsafe_open({0: [a], 1: [b, c]}, pg=world, nogds=True) as f:
        # Each once: of a file that it has released, the original gives what happens to be in memory
        one["opened"] = f.keys(), [bits(f.get_tensor(name)) for name in f.keys()]
    loader = fst.ParallelLoader(world, [a, b, c], use_tqdm_on_load=False, nogds=True)
    one["yielded"] = {name: bits(tensor) for name, tensor in loader.iterate_weights()}
    loader.close()
    told.append(one)
for what, theirs in told[0].items():
    assert told[1][what] == theirs, (what, theirs, told[1][what])
assert len(told[1]["yielded"]) == len(held)
""",
        size,
        model,
    ) as ranks:
        done(ranks, size)


def test_the_example_of_its_paper(run, model):
    """A file for each of two ranks. Of one tensor both get the whole, of another one each gets its columns."""
    with run(
        """
loader = face.SafeTensorsFileLoader(world, torch.device("cpu"), nogds=True, debug_log=True)
loader.add_filenames({0: [a], 1: [b]})
fb = loader.copy_files_to_device()
equal(fb.get_tensor(tensor_name="a0"), held["a0"])
equal(fb.get_sharded(tensor_name="b0", dim=1), part(held["b0"], 1))
fb.close()
loader.close()
""",
        2,
        model,
    ) as ranks:
        done(ranks, 2)


@pytest.mark.parametrize("size", [2, 4])
def test_every_kind_of_share_equals_slicing_the_whole(run, model, size):
    """Also where the size is no multiple of the number of ranks, which the original cannot do."""
    with run(
        """
loader = face.SafeTensorsFileLoader(world, "cpu")
loader.add_filenames({0: [a, c], 1: [b]})
fb = loader.copy_files_to_device()
for name, tensor in held.items():
    for dim in range(tensor.dim()):
        whole, view = tensor, tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        equal(fb.get_sharded(name, dim).view(view.dtype), part(view, dim))
joined = fb.get_multi_cols(["c.odd", "b.odd", "a.odd"], 1).get_raw()
equal(joined, torch.cat([part(held[f"{letter}.odd"], 1) for letter in "acb"], 1))
found = fb.as_dict({"a.odd": 0, "b.odd": 1, "c.odd": -1})
for name, dim in (("a.odd", 0), ("b.odd", 1)):
    equal(found[name].get_raw(), part(held[name], dim))
equal(found["c.odd"].get_raw(), held["c.odd"])
half = loader.copy_files_to_device(dtype=torch.float64)
for name in half.key_to_rank_lidx:
    if "f4" not in name:
        equal(half.get_tensor(name), held[name].to(torch.float64))
""",
        size,
        model,
    ) as ranks:
        done(ranks, size)


def test_groups_that_are_not_the_first_ranks_of_the_world(run, model):
    """Ranks, of files and of ``push_tensor``, count within the group."""
    with run(
        """
for layout in ([[0, 3], [1, 2]], [[0, 1], [2, 3]]):
    groups = [dist.new_group(members) for members in layout]
    [group] = [group for group, members in zip(groups, layout) if rank in members]
    mine, size_of_group = group.rank(), 2
    loader = face.SafeTensorsFileLoader(group, "cpu")
    loader.add_filenames({1: [a]})
    fb = loader.copy_files_to_device()
    equal(fb.get_tensor("a0"), held["a0"])
    equal(fb.get_sharded("a1", 1), part(held["a1"], 1, mine, 2))
    pushed = fb.push_tensor("a2", 0)
    assert (pushed is None) == (mine == 1)
    if pushed is not None:
        equal(pushed, held["a2"])
    fb.close()
    loader.close()
    parallel = face.ParallelLoader(group, [a, b], use_tqdm_on_load=False)
    for name, tensor in parallel.iterate_weights():
        equal(tensor, held[name])
for pg in ((dist.PrefixStore("mine", store), rank, size), dist.device_mesh.init_device_mesh("cpu", (size,))):
    with face.fastsafe_open([a], pg=pg) as f:
        equal(f.get_tensor("a0"), held["a0"])
""",
        4,
        model,
    ) as ranks:
        done(ranks, 4)


def test_each_byte_leaves_storage_once_and_nothing_is_kept(run, model):
    with run(
        """
import weakref
read = []
ended = penstock.Checkpoint._ended
def counted(self, load):
    report = ended(self, load)
    own = [way["bytes"] for lane, way in report.routes.items() if lane not in ("rank", "neighbour")]
    read.append(sum(own) - report.slack_bytes - report.gap_bytes)
    return report
penstock.Checkpoint._ended = counted
loader = face.SafeTensorsFileLoader(world, "cpu")
loader.add_filenames({0: [a, c], 1: [b]})
for kind in ("in order", "backwards", "columns", "rows", "pushed", "dict", "parallel"):
    fb = loader.copy_files_to_device()
    assert not read
    names = [name for name in fb.key_to_rank_lidx if kind in ("in order", "parallel") or held[name].dim() > 1]
    if kind == "dict":
        taken = [tensor.get_raw() for tensor in fb.as_dict({name: i % 3 - 1 for i, name in enumerate(names)}).values()]
    elif kind == "parallel":
        taken = [tensor for _, tensor in face.ParallelLoader(world, [a, b, c]).iterate_weights()]
    else:
        call = {"in order": fb.get_tensor, "backwards": fb.get_tensor, "rows": lambda name: fb.get_sharded(name, 0),
                "columns": lambda name: fb.get_sharded(name, 1), "pushed": lambda name: fb.push_tensor(name, 0)}[kind]
        taken = [call(name) for name in (reversed(names) if kind == "backwards" else names)]
    refs = [weakref.ref(tensor) for tensor in taken if tensor is not None]
    assert refs or (kind == "pushed" and rank)
    del taken
    assert not [ref for ref in refs if ref() is not None], kind
    said[kind] = sum(read), sum(held[name].nbytes for name in names)
    read.clear()
    fb.close()
""",
        4,
        model,
    ) as ranks:
        said = ranks.all()
    for kind in said[0]:
        assert sum(one[kind][0] for one in said) == said[0][kind][1], kind


def test_what_is_wrong_is_an_error_on_every_rank_and_the_group_goes_on(run, model):
    with run(
        """
loader = face.SafeTensorsFileLoader(world, "cpu")
for wrong in ({3: [a]}, {-1: [a]}, {"0": [a]}):
    assert "the ranks of this group are 0, 1, 2" in str(refused(ValueError, loader.add_filenames, wrong))
loader.add_filenames({0: [a], 2: [b]})
assert "one rank" in str(refused(ValueError, lambda: loader.copy_files_to_device(borrowed_tensors=True)))
fb = loader.copy_files_to_device()
refused(KeyError, fb.get_tensor, "nowhere")
refused(ValueError, fb.get_sharded, "nowhere", 0)
refused(ValueError, fb.get_sharded, "a0", 2)
refused(ValueError, fb.get_sharded, "a.scalar", 0)
refused(ValueError, fb.get_sharded, "a0", -2)
refused(ValueError, fb.push_tensor, "a0", 3)
refused(ValueError, fb.get_multi_cols, ["a0", "b0"], -1)
refused(NotImplementedError, lambda: list(fb.iter_local_tensors(["a0"])))
equal(fb.get_tensor("a0"), held["a0"])
# One rank asks for something that is not there
try:
    fb.get_tensor("nowhere" if rank == 1 else "a0")
except KeyError:
    assert rank == 1
except penstock.PeerError as error:
    assert error.rank == 1 and "nowhere" in str(error)
# Each for another one: each gets its own
equal(fb.get_tensor("a0" if rank else "b0"), held["a0" if rank else "b0"])
# One has another file
other = face.SafeTensorsFileLoader(world, "cpu")
other.add_filenames({0: [c if rank == 2 else a]})
error = refused(penstock.PlanMismatchError, other.copy_files_to_device().get_tensor, "c0" if rank == 2 else "a0")
assert error.ranks == [2]
# One cannot open
os.path.exists(a)
third = face.SafeTensorsFileLoader(world, "cpu")
third.add_filenames({0: [a]})
if rank == 0:
    third._files = {a: third._files[a], a + "x": third._files[a]}
    third._rank_of[a + "x"] = 0
    refused(FileNotFoundError, third.copy_files_to_device)
else:
    assert "ax" not in str(refused(penstock.PeerError, third.copy_files_to_device().get_tensor, "a0"))
# One goes on when another one has closed its buffer
if rank == 1:
    fb.close()
    fb.close()
    refused(RuntimeError, fb.get_tensor, "a0")
else:
    error = refused(penstock.PeerError, fb.get_tensor, "a0")
    assert error.rank == 1 and "closed" in str(error)
    fb.close()
fb = loader.copy_files_to_device()
equal(fb.get_tensor("b0"), held["b0"])
""",
        3,
        model,
    ) as ranks:
        done(ranks, 3)


def test_tensors_in_order_are_read_ahead_until_the_order_ends(run, model):
    with run(
        """
loads = []
from penstock import _group_stream
load = _group_stream.GroupLoads.load
_group_stream.GroupLoads.load = lambda self, *a: (loads.append(1), load(self, *a))[1]
loader = face.SafeTensorsFileLoader(world, "cpu")
loader.add_filenames({1: [a, b], 0: [c]})
fb = loader.copy_files_to_device()
names = list(fb.key_to_rank_lidx)
assert names[0].startswith("c")
for name in names:
    equal(fb.get_tensor(name), held[name])
assert len(loads) == 4, loads
fb = loader.copy_files_to_device()
loads.clear()
for name in [*names[:9], *names[2:5], *names[9:]]:
    equal(fb.get_tensor(name), held[name])
assert len(loads) == 4 + 3 + len(names[9:]), loads
fb = loader.copy_files_to_device()
for name in names[:6]:
    equal(fb.get_tensor(name), held[name])
equal(fb.get_sharded("a0", 1), part(held["a0"], 1))
equal(fb.get_tensor(names[6]), held[names[6]])
equal(fb.get_tensor(names[0]), held[names[0]])
""",
        2,
        model,
    ) as ranks:
        done(ranks, 2)


def test_parallel_loaders_of_a_group(run, model):
    """Filters that differ, one that is left in the middle, one configured by a file, and everyone for itself."""
    with run(
        """
keep = [lambda name: name[0] != "b", lambda name: name.endswith("0"), lambda name: False][rank]
loader = face.ParallelLoader(world, [a, b, c], tensor_filter=keep, max_batch_bytes=1000, use_tqdm_on_load=False)
found = dict(loader.iterate_weights())
assert list(found) == [name for name in penstock.open([a, b, c]) if keep(name)]
for name, tensor in found.items():
    equal(tensor, held[name])
loader = face.ParallelLoader(world, [a, b, c], max_batch_bytes=1000, use_tqdm_on_load=False)
try:
    for number, (name, tensor) in enumerate(loader.iterate_weights()):
        equal(tensor, held[name])
        if number == 3 and rank == 1:
            break
    assert rank == 1
except penstock.PeerError as error:
    assert error.rank == 1 and rank != 1
assert len(dict(face.AutoLoader(world, [a, b, c]).iterate_weights())) == len(held)
assert list(face.ParallelLoader(world, []).iterate_weights()) == []
if rank == 2:
    assert len(dict(face.ParallelLoader(world, [a], all_local=True).iterate_weights())) == len(held) // 3
budgets = face.ParallelLoader(world, [a, b], max_batch_bytes=1000 + rank // 2, use_tqdm_on_load=False)
assert refused(penstock.PlanMismatchError, next, budgets.iterate_weights()).ranks == [2]
assert "borrowed" in str(refused(ValueError, lambda: face.ParallelLoader(
    world, [a], borrowed_tensors=True, accumulate_resident=False)))
missing = face.ParallelLoader(world, [a, c + "x"] if rank == 1 else [a, c])
error = refused(OSError, lambda: dict(missing.iterate_weights()))
assert isinstance(error, FileNotFoundError) == (rank == 1)
assert rank == 1 or (error.rank, "NotFoundError" in str(error)) == (1, True)
""",
        3,
        model,
    ) as ranks:
        done(ranks, 3)


def test_a_rank_that_ends_between_two_calls_is_named(run, model):
    with run(
        """
from penstock.compat.instanttensor import safe_open
loader = face.SafeTensorsFileLoader(world, "cpu")
loader.add_filenames({0: [a]})
fb = loader.copy_files_to_device()
equal(fb.get_tensor("a0"), held["a0"])
with safe_open([a], "pt", "cpu", world) as f:
    f.get_tensor("a0")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert refused(penstock.PeerError, fb.get_tensor, "a1").rank == 1
    assert refused(penstock.PeerError, f.get_tensor, "a1").rank == 1
""",
        3,
        model,
    ) as ranks:
        for rank in (0, 2):
            ranks.said(rank)


# InstantTensor


@pytest.mark.parametrize("group_size", [2, 4])
def test_instanttensor_in_groups_of_ranks_with_tensor_and_pipeline_parallelism(run, model, group_size):
    """What its own test does: in groups, each rank keeps its rows of the tensors of its stage, and makes a checksum."""
    with run(
        f"""
from functools import reduce
from penstock.compat.instanttensor import safe_open
load, tp, pp = {group_size}, 2, 2
groups = [dist.new_group(list(range(first, first + load))) for first in range(0, size, load)]
group = groups[rank // load]
with safe_open([c, a, b], framework="pt", device="cpu", load_now=False) as f:
    names = f.keys()
    described = {{name: f.get_tensor_metadata(name) for name in names}}
stage = -(-len(names) // pp)
mine = names[stage * (rank // tp % pp):][:stage]
into = {{}}
for name in mine:
    dtype, shape = described[name]
    into[name] = torch.empty(part(held[name].view(torch.uint8), 0, rank % tp, tp).shape if "f4" in name else
                             part(held[name], 0, rank % tp, tp).shape if shape else (), dtype=dtype)
seen = []
with safe_open([c, a, b], framework="pt", device="cpu", process_group=group, copy=False) as f:
    assert f.total_tensor_size == sum(tensor.nbytes for tensor in held.values())
    for name, tensor in f.tensors():
        seen.append(name)
        equal(tensor, held[name])
        if name in into:
            rows = tensor.view(torch.uint8) if "f4" in name else tensor
            rows = part(rows, 0, rank % tp, tp) if tensor.dim() else rows
            into[name].view(rows.dtype).copy_(rows)
assert [n for n in seen if held[n].nbytes] == [n for n in names if held[n].nbytes]
def checksum(tensors):
    data = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    words = (int.from_bytes(one[i:i + 8], "little") for one in data for i in range(0, len(one), 8))
    return reduce(lambda left, right: left ^ right, words, 0)
whole = [held[name].view(torch.uint8) if "f4" in name else held[name] for name in mine]
expected = checksum(part(tensor, 0, rank % tp, tp) if tensor.dim() else tensor for tensor in whole)
assert checksum(into.values()) == expected != 0
""",
        4,
        model,
    ) as ranks:
        done(ranks, 4)


def test_instanttensor_with_filters_and_ranks_that_leave(run, model):
    """The original refuses filters in a group. Here ranks may want different tensors."""
    with run(
        """
from penstock.compat.instanttensor import safe_open
files = [a, b, c]
def opened(**more):
    return safe_open(files, "pt", "cpu", world, **more)
patterns = [["a*", "c0"], None, []][rank]
with opened(tensor_filter=patterns, buffer_size=1000) as f:
    names = f.keys()
    assert names == [n for n in penstock.open(files) if patterns is None or n[0] + "*" in patterns or n in patterns]
    found = dict(f.tensors())
    assert list(found) == names
    for name, tensor in found.items():
        equal(tensor, held[name])
    assert not dict(f.tensors()).keys() ^ set(names)  # once more
with opened() as f:
    for name in f.keys():
        equal(f.get_tensor(name), held[name])
    for name in ("c0", "a0"):
        equal(f.get_tensor(name), held[name])
try:
    with opened(buffer_size=1000) as f:
        for number, (name, tensor) in enumerate(f.tensors()):
            equal(tensor, held[name])
            if number == 4 and rank == 1:
                break
    assert rank == 1
except penstock.PeerError as error:
    assert error.rank == 1 and number >= 4
with opened(tensor_filter=["a*"] if rank == 2 else None) as f:
    try:
        equal(f.get_tensor("b0"), held["b0"])
        raise AssertionError
    except penstock.UnknownTensorError:
        assert rank == 2
    except penstock.PeerError as error:
        assert error.rank == 2 and rank != 2
    equal(f.get_tensor("a0"), held["a0"])
    if rank == 0:
        f.__exit__(None, None, None)
    else:
        assert refused(penstock.PeerError, f.get_tensor, "a1").rank == 0
assert refused(penstock.PlanMismatchError, lambda: dict(opened(buffer_size=1000 + rank // 2).tensors())).ranks == [2]
error = refused(OSError, lambda: dict(
    safe_open([a, b + "x"] if rank == 0 else [a, b], "pt", "cpu", process_group=world).tensors()))
assert isinstance(error, FileNotFoundError) if rank == 0 else error.rank == 0
with opened() as f:
    assert len(dict(f.tensors())) == len(held)
""",
        3,
        model,
    ) as ranks:
        done(ranks, 3)


# The Run:ai model streamer

RUNAI = """
import os
from penstock.compat.runai_model_streamer import DistributedStreamer, FileChunks, SafetensorsStreamer
os.environ["RUNAI_STREAMER_DIST_TIMEOUT"] = "60"  # a rank that fails here leaves none waiting for longer
files, reports, real = [c, a, b], [], penstock.Checkpoint.stream
def stream(self, *arguments, **more):
    yield from real(self, *arguments, **more)
    reports.append(self.last_report)
penstock.Checkpoint.stream = stream
def streamed(**more):
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, is_distributed=True, **more)
        return dict(streamer.get_tensors())
"""


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_the_runai_streamer_read_for_each_other_if_they_are_told_to(run, model, size):
    with run(
        RUNAI
        + """
whole = sum(tensor.nbytes for tensor in held.values())
for how, alone in (("0", True), ("auto", True), ("1", False)):  # auto is for nccl
    os.environ["RUNAI_STREAMER_DIST"] = how
    found = streamed()
    assert sorted(found) == sorted(held)
    for name, tensor in found.items():
        equal(tensor, held[name])
        assert tensor.data_ptr() % tensor.element_size() == 0
    exchange = reports.pop()["exchange"]
    assert (exchange is None) == alone, exchange
mine = [name for number, name in enumerate(sorted(held)) if number % size == rank]
found = streamed(tensor_names=mine)
assert sorted(found) == mine
for name in mine:
    equal(found[name], held[name])
""",
        size,
        model,
    ) as ranks:
        done(ranks, size)


def test_ranks_of_the_runai_streamer_get_every_range(run, model):
    with run(
        RUNAI
        + """
content = {number: open(file, "rb").read() for number, file in enumerate(files)}
requests = [FileChunks(number, file, 5, [100, 0, 7, 300, 1]) for number, file in enumerate(files)]
os.environ["RUNAI_STREAMER_DIST"] = "1"
with DistributedStreamer() as streamer:
    streamer.stream_files(requests, None, "cpu", True)
    assert streamer.is_distributed
    found = {(id, number): bytes(tensor.numpy().tobytes()) for id, number, tensor in streamer.get_chunks()}
    streamer.stream_files([], None, "cpu", True)
    assert not list(streamer.get_chunks()) and not streamer.is_distributed
assert len(found) == 15
for (id, number), data in found.items():
    begin, end = ((5, 105), (105, 105), (105, 112), (112, 412), (412, 413))[number]
    assert data == content[id][begin:end]
""",
        3,
        model,
    ) as ranks:
        done(ranks, 3)


def test_ranks_of_the_runai_streamer_name_the_one_that_fails_or_leaves(run, model):
    with run(
        RUNAI
        + """
os.environ["RUNAI_STREAMER_DIST"] = "1"
files = [a, b + "x"] if rank == 1 else [a, b]
error = refused((ValueError, penstock.PeerError), streamed)
assert isinstance(error, FileNotFoundError) if rank == 1 else error.rank == 1, error
files = [a, b]
os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = "1000"
try:
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, is_distributed=True)
        for number, (name, tensor) in enumerate(streamer.get_tensors()):
            equal(tensor, held[name])
            if number == 3 and rank == 2:
                break
    assert rank == 2
except penstock.PeerError as error:
    assert error.rank == 2 and rank != 2, (error, error.rank)
assert sorted(streamed()) == sorted(name for name in held if name[0] in "ab")
""",
        3,
        model,
    ) as ranks:
        done(ranks, 3)


def test_a_process_that_is_in_no_such_group_is_refused():
    from penstock.compat import fastsafetensors, instanttensor

    class Other:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 0

    for group in (Other(), "world", (None, 0, 2), (None, 3, 2)):
        with pytest.raises(penstock.InvalidError):
            fastsafetensors.SafeTensorsFileLoader(group, "cpu")
        with pytest.raises(penstock.InvalidError):
            instanttensor.safe_open("none.safetensors", "pt", "cpu", group)
