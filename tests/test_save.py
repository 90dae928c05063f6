"""Saving: the files are what safetensors reads and writes, and nothing half-made is ever there."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import penstock
import penstock.numpy
import penstock.torch
import pytest
import torch
from conftest import raw
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from penstock._dtypes import DTYPES
from penstock._torch import torch_dtype
from penstock.bench import reference
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

safetensors = pytest.importorskip("safetensors")
pytest.importorskip("safetensors.numpy")
pytest.importorskip("safetensors.torch")

PAGE = 4096
#: For programs that have the kernel refuse something.
HERE = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    made = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return made.view(dtype).reshape(shape)


def inside(folder: Path) -> list[str]:
    """Names of what is in a directory."""
    return sorted(path.name for path in folder.iterdir())


def several() -> dict[str, torch.Tensor]:
    """Odd and even sizes, a scalar, an empty one, names that sort otherwise than they stand."""
    return {
        "z.weight": bits((300, 512), torch.float32, 1),
        "a.bias": bits((7,), torch.float16, 2),
        "step": bits((), torch.int64, 3),
        "none": bits((0, 3), torch.bfloat16),
        "m.norm": bits((64,), torch.float32, 4),
        "odd": bits((13,), torch.uint8, 5),
        "b.weight": bits((1024, 1024), torch.bfloat16, 6),
    }


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("layout", ["aligned", "compact"])
def test_a_file_is_what_safetensors_reads(tmp_path: Path, layout: str, fsync: bool):
    path = tmp_path / "model.safetensors"
    report = penstock.save_file(several(), path, {"format": "pt"}, layout=layout, fsync=fsync)
    same(safetensors.torch.load_file(path), several())
    same(penstock.load_file(path), several())
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert report.file_bytes == path.stat().st_size
    assert (report.direct_bytes > 0) is (fsync and not report.fallbacks)
    assert inside(tmp_path) == ["model.safetensors"]


def test_large_tensors_of_the_default_layout_are_aligned(tmp_path: Path):
    penstock.save_file(several(), tmp_path / "a.safetensors")
    for info in map(penstock.open(tmp_path / "a.safetensors").__getitem__, several()):
        size = 4096 if info.nbytes % 4096 == 0 else 256 if info.nbytes % 256 == 0 else 1
        assert info.offsets[0] % size == 0, info


TORCH_DTYPES = [name for name in DTYPES if torch_dtype(name) is not None and name != "F4"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(TORCH_DTYPES), st.lists(st.integers(0, 9), max_size=3)),
        max_size=8,
    ),
    metadata=st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=1),
)
def test_compact_files_are_byte_for_byte_those_of_safetensors(tmp_path: Path, tensors: Any, metadata: Any):
    assume(tensors or metadata != {})  # of which safetensors 0.8 writes a header that is no JSON
    state = {
        name: bits(tuple(shape), torch_dtype(dtype), seed)
        for seed, (name, (dtype, shape)) in enumerate(tensors.items())
    }
    safetensors.torch.save_file(state, tmp_path / "theirs", metadata)
    for fsync in (True, False):
        penstock.save_file(state, tmp_path / "ours", metadata, layout="compact", fsync=fsync)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert penstock.torch.save(state, metadata) == (tmp_path / "theirs").read_bytes()
    same(penstock.torch.load((tmp_path / "theirs").read_bytes()), state)


def test_every_dtype_of_torch_is_saved(tmp_path: Path):
    state = {name: bits((4, 6), torch_dtype(name), i) for i, name in enumerate(TORCH_DTYPES)}
    four = torch_dtype("F4")
    if four is not None:
        state["F4"] = bits((4, 6), four, 99)
    penstock.save_file(state, tmp_path / "all.safetensors")
    opened = penstock.open(tmp_path / "all.safetensors")
    assert {name: opened[name].dtype for name in opened} == {name: name for name in state}
    assert four is None or opened["F4"].shape == (4, 12)
    same(opened.load(), state)


def test_arrays_of_numpy_are_saved(tmp_path: Path):
    arrays = {
        "f": np.arange(12, dtype=np.float32).reshape(3, 4),
        "t": np.arange(12, dtype=np.int16).reshape(3, 4).T,
        "b": np.array([1.5, 2.5], ">f8"),
        "s": np.float16(3),
        "o": np.array([True, False]),
    }
    penstock.numpy.save_file({k: np.asarray(v) for k, v in arrays.items()}, tmp_path / "n.safetensors")
    for reader in (safetensors.numpy.load_file, penstock.numpy.load_file):
        found = reader(tmp_path / "n.safetensors")
        for name, array in arrays.items():
            assert np.array_equal(found[name], array), name
    again = penstock.numpy.load(penstock.numpy.save({k: np.asarray(v) for k, v in arrays.items()}))
    assert all(np.array_equal(again[name], array) for name, array in arrays.items())


def test_views_that_are_not_contiguous_are_packed(tmp_path: Path):
    whole = bits((64, 64), torch.float32, 1)
    complex_ = torch.randn(5, dtype=torch.complex64)
    state = {"t": whole.T, "part": whole[3:5, ::2], "conj": complex_.conj(), "neg": torch.randn(4)[1:]}
    penstock.save_file(state, tmp_path / "v.safetensors")
    found = safetensors.torch.load_file(tmp_path / "v.safetensors")
    same(found, {name: tensor.resolve_conj().contiguous() for name, tensor in state.items()})


@pytest.mark.parametrize("order", ["file", "layer"])
@pytest.mark.parametrize("size", ["1.2MB", 700_000, 1, None])
def test_a_sharded_checkpoint_is_one_that_everybody_reads(tmp_path: Path, size: Any, order: str):
    report = penstock.save(several(), tmp_path / "out", {"k": "v"}, max_shard_size=size, order=order, fsync=False)
    same(dict(penstock.open(tmp_path / "out").load()), several())
    assert sorted(report.files) == inside(tmp_path / "out")
    found = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        found.update(safetensors.torch.load_file(path))
        limit = {"1.2MB": 1_200_000, None: 1 << 60}.get(size, size)
        sizes = [tensor.nbytes for tensor in safetensors.torch.load_file(path).values()]
        assert sum(sizes) <= limit or len([n for n in sizes if n]) == 1
    same({name: found[name] for name in several()}, several())
    if size is None:
        assert report.files == ["model.safetensors"]
        return
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(several())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in several().values())


def test_a_later_save_leaves_nothing_of_an_earlier_one(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter.safetensors").write_bytes(b"somebody else's")
    for size in (1, 700_000, None, 700_000):
        report = penstock.save(several(), tmp_path, max_shard_size=size, fsync=False)
        assert set(inside(tmp_path)) == {*report.files, "config.json", "adapter.safetensors"}


def snapshot(folder: Path, files: dict[str, bytes]) -> Path:
    """A directory of links to blobs that are called what their bytes hash to, as in the cache of the Hub."""
    out = folder / "snapshots" / "4f2a"
    (folder / "blobs").mkdir()
    out.mkdir(parents=True)
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (out / name).symlink_to(os.path.relpath(blob, out))
    return out


def is_intact(blobs: Path) -> bool:
    """Whether each blob still is what its name says."""
    return all(hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name for blob in blobs.iterdir())


SAVERS: dict[str, Callable[[dict[str, torch.Tensor], Path], object]] = {
    "penstock": penstock.save_file,
    "penstock, page cache": partial(penstock.save_file, fsync=False),
    "penstock.torch": penstock.torch.save_file,
    "safetensors": safetensors.torch.save_file,
}


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("leads_to", ["../blobs/4f2a", "nowhere", "no/where", "link", "another"])
def test_a_save_over_a_link_replaces_the_link_as_safetensors_does(tmp_path: Path, leads_to: str, saver: str):
    (tmp_path / "blobs").mkdir()
    blob = tmp_path / "blobs" / "4f2a"
    blob.write_bytes(b"shared")
    blob.chmod(0o604)
    out = tmp_path / "out"
    out.mkdir()
    (out / "another").symlink_to("../blobs/4f2a")
    (out / "link").symlink_to(leads_to)
    SAVERS[saver]({"a": torch.ones(3)}, out / "link")
    assert not (out / "link").is_symlink()
    assert torch.equal(safetensors.torch.load_file(out / "link")["a"], torch.ones(3))
    assert blob.read_bytes() == b"shared" and (out / "another").is_symlink()
    assert inside(out) == ["another", "link"] and inside(blob.parent) == ["4f2a"]
    if saver != "safetensors":  # whose files are their owner's alone, old or new
        (out / "fresh").touch()
        assert (out / "link").stat().st_mode == (out / "fresh").stat().st_mode


def test_a_save_into_a_snapshot_leaves_the_blobs_as_they_are(tmp_path: Path):
    names = ("model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors")
    earlier = {name: name.encode() for name in (*names, "model-00007-of-00007.safetensors", "config.json")}
    for size, count in ((16, 3), (None, 1)):
        (tmp_path / str(size)).mkdir()
        out = snapshot(tmp_path / str(size), earlier)
        report = penstock.save({"a": torch.ones(3), "b": torch.zeros(4)}, out, max_shard_size=size)
        assert len(report.files) == count and inside(out) == sorted([*report.files, "config.json"])
        assert [name for name in inside(out) if (out / name).is_symlink()] == ["config.json"]
        assert torch.equal(penstock.open(out).load()["b"], torch.zeros(4))
        blobs = out.parents[1] / "blobs"
        assert len(inside(blobs)) == len(earlier) and is_intact(blobs)


def test_a_link_to_a_shard_of_an_earlier_save_goes_with_that_shard(tmp_path: Path):
    penstock.save({"a": torch.ones(3), "b": torch.zeros(4)}, tmp_path, max_shard_size=16)
    (tmp_path / "model.safetensors").symlink_to("model-00001-of-00002.safetensors")
    penstock.save({"a": torch.ones(5)}, tmp_path)
    assert inside(tmp_path) == ["model.safetensors"]
    assert torch.equal(penstock.open(tmp_path).load()["a"], torch.ones(5))


def test_a_linked_directory_stays(tmp_path: Path):
    real = tmp_path / "real"
    (real / "shards").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (real / "model-00003-of-00003.safetensors").symlink_to("shards")
    penstock.save({"a": torch.ones(3)}, tmp_path / "link")
    penstock.save_file({"a": torch.ones(3)}, tmp_path / "link" / "one.safetensors")
    assert (tmp_path / "link").is_symlink()
    assert inside(real) == ["model-00003-of-00003.safetensors", "model.safetensors", "one.safetensors", "shards"]
    with pytest.raises(penstock.InvalidError, match=r"link.*it is a directory"):
        penstock.save_file({"a": torch.ones(3)}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and inside(real / "shards") == []


@pytest.mark.parametrize("what", ["/dev/null", "pipe", "/proc/self/fd/1", "/proc/self/fd/99"])
def test_a_link_to_what_is_no_plain_file_is_refused_and_stays(tmp_path: Path, what: str):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(what)
    with pytest.raises(penstock.InvalidError, match=r"link.*cannot write to it"):
        penstock.save_file({"a": torch.ones(3)}, tmp_path / "link")
    assert inside(tmp_path) == ["link", "pipe"] and (tmp_path / "link").is_symlink()


def test_what_is_left_of_an_earlier_save_and_cannot_be_removed_is_an_error(tmp_path: Path, python: Callable[..., Any]):
    code = """
import os, sys, numpy as np, penstock
os.chdir(sys.argv[1])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    penstock.save({"a": np.ones(3, "f4")}, ".")
except penstock.AccessError as error:
    print(error.path, error)
"""
    if os.getuid():
        pytest.skip("only root can become somebody else")
    out, theirs = tmp_path / "out", tmp_path / "out" / "model-00001-of-00002.safetensors"
    out.mkdir()
    out.chmod(0o1777)
    theirs.write_bytes(b"root's")
    for end in ("-00001-of-00001.safetensors", "-00002-of-00002.safetensors", ".safetensors.index.json"):
        (out / f"model{end}").touch()
        os.chown(out / f"model{end}", 65534, 65534)
    done = python(code, out)
    path, _, message = done.stdout.partition(" ")
    assert path == f"./{theirs.name}" and "earlier save (the new save is complete)" in message, done.stderr
    assert inside(out) == sorted(["model.safetensors", theirs.name])  # what can be removed is
    assert torch.equal(penstock.open(out / "model.safetensors").load()["a"], torch.ones(3))


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(penstock.NotFoundError, match="make the directory"):
        penstock.save({"a": torch.ones(3)}, tmp_path / "file" / "inside")
    with pytest.raises(penstock.InvalidError, match="it is a file"):
        penstock.save({"a": torch.ones(3)}, tmp_path / "file")


@pytest.mark.parametrize("fsync", [True, False])
def test_new_names_and_new_directories_reach_the_disk(tmp_path: Path, fsync: bool):
    code = "import sys, numpy, penstock; penstock.save({'a': numpy.ones(9)}, sys.argv[1], fsync=sys.argv[2] == 'True')"
    if shutil.which("strace") is None or subprocess.run(["strace", "-o", os.devnull, "true"], check=False).returncode:
        pytest.skip("strace is not installed, or may not trace here")
    log = tmp_path / "log"
    traced = ["strace", "-f", "-y", "-e", "trace=fsync,/^rename", "-o", log, sys.executable, "-c", code]
    subprocess.run([*traced, tmp_path / "new" / "out", str(fsync)], check=True, timeout=120)
    lines = [line for line in log.read_text().splitlines() if str(tmp_path) in line]
    renamed = max(number for number, line in enumerate(lines) if "rename" in line)
    synced = {line.split("<")[1].split(">")[0] for line in lines[renamed:] if "fsync(" in line}
    assert synced == ({str(tmp_path / part) for part in ("", "new", "new/out")} if fsync else set())


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("step", torch.tensor(3))


def test_a_modules_tied_tensors_are_saved_once_and_loaded_into_both(tmp_path: Path):
    torch.manual_seed(0)
    module = Tied()
    penstock.save(module, tmp_path / "m", fsync=False)
    assert sorted(penstock.open(tmp_path / "m")) == ["embed.weight", "step"]
    penstock.torch.save_model(module, tmp_path / "ours.safetensors")
    safetensors.torch.save_model(module, tmp_path / "theirs.safetensors")
    for path in (tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"):
        for load in (penstock.torch.load_model, safetensors.torch.load_model):
            other = Tied()
            assert load(other, path) == (set(), [])
            assert torch.equal(other.head.weight, module.embed.weight)
        assert penstock.open(path).metadata == {"head.weight": "embed.weight"}
    with pytest.raises(RuntimeError, match=r'(?s)Missing.*"0\.weight".*Unexpected.*"embed\.weight"'):
        penstock.torch.load_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), tmp_path / "ours.safetensors")
    missing, unexpected = penstock.torch.load_model(
        torch.nn.Sequential(torch.nn.Linear(2, 2)), tmp_path / "ours.safetensors", strict=False
    )
    assert (missing, set(unexpected)) == ({"0.weight", "0.bias"}, {"embed.weight", "step"})


def test_fastsafetensors_reads_the_default_layout(tmp_path: Path):
    fastsafetensors = pytest.importorskip("fastsafetensors")
    state = {name: tensor for name, tensor in several().items() if tensor.numel()}  # it reads no empty ones
    penstock.save(state, tmp_path, max_shard_size=700_000, fsync=False)
    files = sorted(map(str, tmp_path.glob("*.safetensors")))
    assert len(files) > 1
    with fastsafetensors.fastsafe_open(files, device="cpu", nogds=True) as opened:
        same({name: opened.get_tensor(name).clone() for name in state}, state)


def test_transformers_reads_a_saved_module(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=99, **small)
    model = transformers.BertForMaskedLM(config).eval()  # with tied embeddings
    penstock.save(model, tmp_path, max_shard_size=20_000, fsync=False)
    config.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path).eval()
    same(dict(again.state_dict()), dict(model.state_dict()))
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight


class Stand(torch.Tensor):
    """Stands for another tensor, as distributed and quantized ones do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Stand:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


def test_a_tensor_without_memory_is_not_saved_as_something_else(tmp_path: Path):
    with pytest.raises(penstock.InvalidError, match=r"tensor w is a Stand"):
        penstock.save_file({"w": Stand(torch.ones(3))}, tmp_path / "x")
    assert inside(tmp_path) == []


WHOLE = torch.zeros(10, 10)
REFUSED: list[tuple[str, Any, type[Exception]]] = [
    ("share memory", {"a": WHOLE, "b": WHOLE[2:]}, RuntimeError),
    ("not contiguous", {"a": torch.zeros(4, 4).T}, ValueError),
    ("sparse", {"a": torch.zeros(4, 4).to_sparse()}, ValueError),
    ("not a torch.Tensor", {"a": [1, 2]}, ValueError),
    ("dict", [("a", WHOLE)], ValueError),
]


@pytest.mark.parametrize(("match", "tensors", "error"), REFUSED, ids=[r[0] for r in REFUSED])
def test_what_safetensors_refuses_is_refused_with_the_same_kind_of_error(
    tmp_path: Path, match: str, tensors: Any, error: type[Exception]
):
    for save in (
        lambda: penstock.torch.save_file(tensors, tmp_path / "x"),
        lambda: penstock.torch.save(tensors),
    ):
        with pytest.raises(error, match=match):
            save()
    with pytest.raises(error):
        safetensors.torch.save_file(tensors, tmp_path / "x")
    assert inside(tmp_path) == []


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"metadata": {"a": 1}}, "must be strings"),
        ({"layout": "loose"}, "aligned, compact"),
        ({"order": "size"}, "file, layer"),
        ({"fsync": "yes"}, "True or False"),
        ({"options": {"nonsense": 1}}, "everyday options: "),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, more: dict[str, Any], match: str):
    with pytest.raises(penstock.InvalidError, match=match):
        penstock.save_file({"a": torch.zeros(2)}, tmp_path / "x", **more)
    for tensors in (
        {"a": object()},
        {3: torch.zeros(2)},
        {"__metadata__": torch.zeros(2)},
        {"a": torch.zeros(2, device="meta")},
    ):
        with pytest.raises(penstock.InvalidError):
            penstock.save_file(tensors, tmp_path / "x")
    with pytest.raises(penstock.InvalidError, match="max_shard_size"):
        penstock.save({}, tmp_path, max_shard_size="many")
    assert inside(tmp_path) == []


def test_nothing_is_a_checkpoint_too(tmp_path: Path):
    penstock.save_file({}, tmp_path / "x.safetensors")
    assert safetensors.torch.load_file(tmp_path / "x.safetensors") == {}


def test_a_file_may_be_saved_over_the_one_that_its_tensors_are_mapped_from(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    penstock.save_file(several(), path)
    for fsync in (True, False):
        loaded = penstock.load_file(path)
        penstock.save_file({f"new {name}": tensor for name, tensor in loaded.items()}, path, fsync=fsync)
        same(loaded, several())
        penstock.save_file({name.removeprefix("new "): t for name, t in penstock.load_file(path).items()}, path)
    same(penstock.load_file(path), several())


def test_a_file_that_is_replaced_leaves_its_mode_to_the_new_one(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    for mode in (0o640, 0o666, 0o400):
        penstock.save_file({"a": torch.ones(3)}, path)
        path.chmod(mode)
        penstock.save_file({"a": torch.ones(4)}, path)
        assert path.stat().st_mode & 0o7777 == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to somebody else needs root")
@pytest.mark.parametrize(
    ("owner", "mode", "umask", "expected"),
    [
        ((0, 0), 0o6771, 0o022, 0o6771),  # one's own file: as if it had been written over
        ((0, 0), 0o666, 0o077, 0o666),
        ((1234, 1234), 0o6755, 0o022, 0o644),
        ((1234, 1234), 0o4666, 0o022, 0o644),
        ((1234, 1234), 0o777, 0o077, 0o600),
        ((1234, 1234), 0o600, 0o022, 0o600),  # never wider than the old file
        ((1234, 0), 0o2664, 0o022, 0o644),
        ((0, 1234), 0o6664, 0o022, 0o644),  # the group that could write it is not the new file's
        ((0, 1234), 0o607, 0o022, 0o607),
    ],
)
def test_a_file_of_somebody_else_leaves_no_more_than_the_umask_allows(
    tmp_path: Path, owner: tuple[int, int], mode: int, umask: int, expected: int
):
    names = ("one.safetensors", "model.safetensors.index.json")
    for name in names:
        (tmp_path / name).touch()
        os.chown(tmp_path / name, *owner)
        (tmp_path / name).chmod(mode)
    before = os.umask(umask)
    try:
        penstock.save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
        penstock.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path, max_shard_size=12, fsync=False)
    finally:
        os.umask(before)
    for name in names:
        found = (tmp_path / name).stat()
        assert (found.st_uid, found.st_gid, oct(found.st_mode & 0o7777)) == (0, 0, oct(expected)), name


# Failures


@pytest.mark.skipif(os.geteuid() != 0, reason="making a file immutable needs root")
def test_shards_of_two_saves_never_have_an_index(tmp_path: Path):
    first = {f"w{i}": torch.full((1000,), float(i)) for i in range(2)}
    report = penstock.save(first, tmp_path, max_shard_size=4000)
    assert len(report.files) == 3
    last = tmp_path / report.files[1]
    if subprocess.run(["chattr", "+i", last], capture_output=True, check=False).returncode != 0:
        pytest.skip("no immutable files here")
    try:
        with pytest.raises(penstock.AccessError, match=r"00002-of-00002.*its name"):
            penstock.save({name: tensor + 1 for name, tensor in first.items()}, tmp_path, max_shard_size=4000)
    finally:
        subprocess.run(["chattr", "-i", last], check=True)
    assert inside(tmp_path) == [".penstock-unfinished", *report.files[:2]]
    with pytest.raises(penstock.NotFoundError, match="may be of two saves"):
        penstock.open(tmp_path)
    assert torch.equal(penstock.load_file(last)["w1"], first["w1"])
    # The next save makes the folder whole.
    report = penstock.save(first, tmp_path, max_shard_size=4000)
    assert inside(tmp_path) == report.files
    assert all(torch.equal(tensor, first[name]) for name, tensor in penstock.open(tmp_path).load("cpu").items())


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "full"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("cannot mount a file system here")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("fsync", [True, False])
def test_a_full_disk_is_said_and_leaves_the_old_file(full_disk: Path, fsync: bool):
    path = full_disk / "m.safetensors"
    penstock.save_file({"a": torch.ones(10)}, path, fsync=fsync)
    with pytest.raises(penstock.NoSpaceError, match=r"m\.safetensors.*room for [0-9]+ bytes") as caught:
        penstock.save_file({"a": torch.zeros(3 << 20)}, path, fsync=fsync)
    assert isinstance(caught.value, OSError)
    assert torch.equal(penstock.load_file(path)["a"], torch.ones(10))
    assert inside(full_disk) == ["m.safetensors"]
    with pytest.raises(penstock.NoSpaceError):
        penstock.save({f"w{i}": torch.zeros(1 << 18) for i in range(5)}, full_disk, max_shard_size="1MiB", fsync=fsync)
    assert inside(full_disk) == ["m.safetensors"]


@pytest.fixture
def quota(tmp_path: Path) -> Iterator[Path]:
    """A file system on which user 65534 may have 2 MiB, and a directory there that is theirs."""
    image, place = tmp_path / "image", tmp_path / "quota"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    made = subprocess.run(
        ["mkfs.ext4", "-q", "-O", "quota", "-E", "quotatype=usrquota", image], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip("no file system with quotas can be made here")
    if subprocess.run(["mount", "-o", "loop,usrquota", image, place], capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system with quotas can be mounted here")
    try:
        device = next(line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if str(place) in line)
        # struct if_dqblk: block limits are in KiB, and QIF_BLIMITS says that those alone count
        limits = struct.pack("8QI4x", 2048, 2048, 0, 0, 0, 0, 0, 0, 1)
        set_quota = (0x800008 << 8) & 0xFFFFFFFF
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.quotactl(ctypes.c_int(set_quota), device.encode(), 65534, limits) != 0:
            pytest.skip(f"quotas: {os.strerror(ctypes.get_errno())}")
        (place / "theirs").mkdir()
        os.chown(place / "theirs", 65534, 65534)
        for path in (tmp_path, *tmp_path.parents[:3]):
            path.chmod(path.stat().st_mode | 0o011)
        yield place / "theirs"
    finally:
        subprocess.run(["umount", place], check=True)


REFUSED_CALLS = [
    ("fallocate", "EDQUOT", True, "NoSpaceError"),
    ("fallocate", "EIO", True, "WriteError"),
    ("pwrite64", "EDQUOT", True, "NoSpaceError"),
    ("pwrite64", "ENOSPC", True, "NoSpaceError"),
    ("pwrite64", "EIO", True, "WriteError"),
    ("pwritev", "EDQUOT", False, "NoSpaceError"),
    ("pwritev", "EIO", False, "WriteError"),
    ("fsync", "EIO", True, "WriteError"),
    ("linkat", "EDQUOT", True, "NoSpaceError"),
    ("linkat", "EPERM", False, "AccessError"),
]


@pytest.mark.parametrize(("call", "error", "fsync", "kind"), REFUSED_CALLS)
def test_what_the_kernel_refuses_is_a_typed_error_that_leaves_the_old_file(
    tmp_path: Path, python: Callable[..., Any], call: str, error: str, fsync: bool, kind: str
):
    code = """
import errno, os, sys, numpy as np, penstock, refusals
path, call, error, fsync = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "True"
penstock.save_file({"a": np.ones(10, "f4")}, path, fsync=fsync)
refusals.refuse(refusals.Refusal(call, getattr(errno, error)))
try:
    penstock.save_file({"a": np.zeros(1 << 20, "f4")}, path, fsync=fsync)
except penstock.PenstockError as caught:
    print(type(caught).__name__, errno.errorcode[caught.errno], path in str(caught), os.listdir(os.path.dirname(path)))
print(penstock.open(path).load(framework="np")["a"].sum().item())
"""
    done = python(code, tmp_path / "m.safetensors", call, error, fsync, PYTHONPATH=HERE)
    assert done.stdout.split("\n")[:2] == [f"{kind} {error} True ['m.safetensors']", "10.0"], done.stderr


def test_where_o_direct_and_nameless_files_are_refused_the_save_goes_on(tmp_path: Path, python: Callable[..., Any]):
    code = """
import errno, os, sys, numpy as np, penstock, refusals
refusals.refuse(
    refusals.Refusal("openat", errno.EINVAL, 2, bit=refusals.O_DIRECT),
    refusals.Refusal("openat", errno.EOPNOTSUPP, 2, bit=os.O_TMPFILE & ~os.O_DIRECTORY),
    refusals.Refusal("fallocate", errno.EOPNOTSUPP),
)
report = penstock.save_file({"a": np.arange(1 << 20)}, sys.argv[1])
same = np.array_equal(penstock.open(sys.argv[1]).load(framework="np")["a"], np.arange(1 << 20))
print(same, report.direct_bytes, [one["to"] for one in report.fallbacks], os.listdir(os.path.dirname(sys.argv[1])))
"""
    done = python(code, tmp_path / "m.safetensors", PYTHONPATH=HERE)
    assert done.stdout.strip() == "True 0 ['page cache'] ['m.safetensors']", done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("fsync", [True, False])
def test_a_quota_is_said_and_leaves_the_old_file(quota: Path, torch_python: Callable[..., Any], fsync: bool):
    code = """
import errno, os, sys, torch, penstock
os.setgid(65534); os.setuid(65534)
fsync = sys.argv[2] == "True"
penstock.save_file({"a": torch.ones(10)}, sys.argv[1], fsync=fsync)
try:
    penstock.save_file({"a": torch.zeros(1 << 20)}, sys.argv[1], fsync=fsync)
except penstock.NoSpaceError as error:
    print(errno.errorcode[error.errno], sys.argv[1] in str(error), os.listdir(os.path.dirname(sys.argv[1])))
print(penstock.load_file(sys.argv[1])["a"].sum().item())
"""
    done = torch_python(code, quota / "m.safetensors", fsync)
    assert done.stdout.split("\n")[:2] == ["EDQUOT True ['m.safetensors']", "10.0"], done.stderr


@pytest.mark.parametrize("fsync", [True, False])
def test_a_limit_on_the_size_of_files_is_said(tmp_path: Path, python: Callable[..., Any], fsync: bool):
    code = """
import os, resource, sys, numpy as np, penstock
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    penstock.save_file({"a": np.zeros(1 << 20, "f4")}, sys.argv[1], fsync=sys.argv[2] == "True")
except penstock.NoSpaceError as error:
    print(error.errno, os.listdir(os.path.dirname(sys.argv[1])))
"""
    done = python(code, tmp_path / "big.safetensors", fsync)
    assert done.stdout.strip() == "27 []", done.stderr


@pytest.mark.parametrize("end", ["/", "//", "/."])
def test_a_file_name_that_ends_in_a_slash_is_an_error(tmp_path: Path, end: str):
    for save in (penstock.save_file, penstock.torch.save_file, safetensors.torch.save_file):
        with pytest.raises(safetensors.SafetensorError) as caught:
            save({"a": torch.ones(2)}, f"{tmp_path}/x{end}")
        if save is not safetensors.torch.save_file:
            assert isinstance(caught.value, penstock.InvalidError)
            assert f"x{end}" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_places_where_no_file_can_be_are_typed_errors(tmp_path: Path):
    with pytest.raises(penstock.NotFoundError):
        penstock.save_file({"a": torch.ones(2)}, tmp_path / "nowhere" / "m.safetensors")
    with pytest.raises(penstock.InvalidError, match="directory"):
        penstock.save_file({"a": torch.ones(2)}, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(penstock.InvalidError, match="pipe"):
        penstock.save_file({"a": torch.ones(2)}, tmp_path / "pipe")
    with pytest.raises(penstock.InvalidError, match="device"):
        penstock.save_file({"a": torch.ones(2)}, "/dev/null")
    (tmp_path / "file").touch()
    with pytest.raises(penstock.InvalidError, match="is a file"):
        penstock.save({"a": torch.ones(2)}, tmp_path / "file")
    with pytest.raises(penstock.NotFoundError):
        penstock.save_file({"a": torch.ones(2)}, tmp_path / "file" / "m.safetensors")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to be")
def test_a_directory_that_may_not_be_written_to_is_an_access_error(tmp_path: Path, python: Callable[..., Any]):
    (tmp_path / "m.safetensors").write_bytes(b"old")
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(0o755)
    code = """
import os, sys, numpy as np, penstock
os.setuid(65534)
try:
    penstock.save_file({"a": np.ones(2, "f4")}, sys.argv[1])
except penstock.AccessError as error:
    print(type(error).__name__)
"""
    done = python(code, tmp_path / "m.safetensors")
    assert done.stdout.strip() == "AccessError", done.stderr
    assert (tmp_path / "m.safetensors").read_bytes() == b"old"


ENDLESS = """
import sys, numpy as np, penstock
state = {f"w{i}": np.full(1 << 20, i, "f4") for i in range(32)}
print("ready", flush=True)
while True:
    penstock.save_file(state, sys.argv[1], fsync=sys.argv[2] == "True")
    print("saved", flush=True)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fsync", [True, False])
def test_whoever_is_killed_at_any_moment_leaves_a_whole_file_or_none(tmp_path: Path, fsync: bool):
    path = tmp_path / "m.safetensors"
    for delay, saved in ((0.0, False), (0.03, False), (0.15, False), (0.0, True), (0.02, True), (0.08, True)):
        process = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, path, str(fsync)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        if saved:  # then a file is there, and is being replaced
            assert process.stdout.readline() == b"saved\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert path.exists() or not saved
        if path.exists():
            found = penstock.load_file(path)
            assert all(torch.equal(found[f"w{i}"], torch.full((1 << 20,), float(i))) for i in range(32))
        # A name is given to the whole file for a moment, on its way to its own
        assert len(inside(tmp_path)) <= 1 + sum(name.startswith(".penstock-") for name in inside(tmp_path))
        for left in tmp_path.glob(".penstock-*"):
            left.unlink()


@pytest.mark.machine
def test_ctrl_c_ends_a_save_at_once_and_leaves_nothing(tmp_path: Path):
    code = """
import os, signal, sys, threading, torch, penstock
state = {"w": torch.zeros(1 << 29)}
threading.Timer(0.15, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    while True:
        penstock.save_file(state, sys.argv[1])
except KeyboardInterrupt:
    print([name for name in os.listdir(os.path.dirname(sys.argv[1])) if name.startswith(".")], threading.active_count())
"""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "m.safetensors"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.startswith("[]"), done.stderr
    assert time.monotonic() - begun < 60


def test_what_makes_a_tensor_may_save_and_load_meanwhile(tmp_path: Path):
    small: dict[str, Any] = {"staging": "2MiB", "extent": "1MiB", "stall_timeout": 20}
    content = bits((3 << 20,), torch.uint8)
    state: dict[str, Any] = {}

    def fill(memory: memoryview) -> None:
        path = tmp_path / "aside.safetensors"
        penstock.save_file({"a": content}, path, options=small)
        target = {"a": torch.empty(len(content), 2, dtype=torch.uint8)[:, 0]}  # strided: by way of slabs
        penstock.open(path).load_into(target, options=small)
        memory[:] = target["a"].contiguous().numpy().data

    for i in range(3):
        state[f"w{i}"] = penstock._save.Described("U8", (len(content),), None, None, None, fill)
    penstock.save_file(state, tmp_path / "m.safetensors", options=small)
    found = penstock.open(tmp_path / "m.safetensors").load()
    assert all(torch.equal(found[name], content) for name in state)


def test_tensors_of_dlpack_are_saved_with_the_dtypes_of_their_headers(tmp_path: Path):
    tensors = [
        Tensor("f6", "F6_E2M3", (4, 2)),
        Tensor("odd f4", "F4", (2, 3)),
        Tensor("w", "F32", (3, 5)),
        Tensor("none", "F6_E3M2", (0,)),
        Tensor("u", "U16", ()),
    ]
    source = synth.write_file(tmp_path / "m.safetensors", tensors)
    opened = penstock.open(source)
    before = {
        name: (e.dtype, tuple(e.shape), reference.raw(e).tobytes()) for name, e in reference.entries_of(source).items()
    }
    for options in ({}, {"copy": True}):
        loaded = opened.load(framework="dlpack", options=options)
        assert loaded["f6"].dtype == "U8" and loaded["f6"].shape == (6,)
        penstock.save_file(loaded, tmp_path / "one.safetensors")
        found = reference.entries_of(tmp_path / "one.safetensors")
        assert {name: (e.dtype, tuple(e.shape), reference.raw(e).tobytes()) for name, e in found.items()} == before
        report = penstock.save(loaded, tmp_path / "shards", max_shard_size=10, fsync=False)
        assert len(report.files) > 2
        assert [penstock.open(tmp_path / "shards")[name].dtype for name in before] == [
            kind for kind, _, _ in before.values()
        ]
    part = opened.load(names=["w"], framework="dlpack", slices={"w": slice(1, 2)})
    penstock.save_file(part, tmp_path / "part.safetensors")
    assert penstock.open(tmp_path / "part.safetensors")["w"].shape == (1, 5)
    # Those of dtype="raw" are the bytes that were asked for.
    penstock.save_file(opened.load(framework="dlpack", dtype="raw"), tmp_path / "raw.safetensors")
    assert {penstock.open(tmp_path / "raw.safetensors")[name].dtype for name in before} == {"U8"}


@pytest.mark.machine
def test_memory_stays_within_the_staging(tmp_path: Path, python: Callable[..., Any]):
    code = """
import resource, sys, torch, penstock
state = {f"w{i}": torch.ones(16 << 20) for i in range(8)}
penstock.save_file({"a": torch.ones(4)}, sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = penstock.save_file(state, sys.argv[1], fsync=sys.argv[2] == "True")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10, report.peak_staging)
"""
    for fsync in (True, False):
        done = python(code, tmp_path / "m.safetensors", fsync)
        grown, staging = map(int, done.stdout.split())
        assert grown <= staging + (64 << 20), done.stderr


@pytest.mark.machine
def test_tensors_are_packed_a_few_at_a_time(tmp_path: Path, python: Callable[..., Any]):
    code = """
import resource, sys, torch, penstock
state = {f"w{i}": torch.full((2048, 2048), float(i)).T for i in range(32)}
penstock.save_file({"a": torch.ones(4)}, sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = penstock.save_file(state, sys.argv[1], fsync=sys.argv[2] == "True")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10, report.peak_staging, report.threads)
"""
    for fsync in (True, False):
        done = python(code, tmp_path / "m.safetensors", fsync)
        grown, staging, threads = map(int, done.stdout.split())
        # Of 32 tensors of 16 MiB those that a thread has a part of.
        assert grown <= staging + (64 << 20) + threads * (16 << 20) < 32 * (16 << 20), done.stderr
        found = dict(penstock.open(tmp_path / "m.safetensors").load())
        assert all(bool((found[f"w{i}"] == i).all()) for i in range(32))


@pytest.mark.parametrize(
    "cause, error",
    [
        (MemoryError("no room"), penstock.OutOfMemoryError),
        (torch.cuda.OutOfMemoryError("no room"), penstock.OutOfMemoryError),
        (RuntimeError("illegal memory access"), penstock.WriteError),
        (penstock.DeviceError("gone"), penstock.DeviceError),
    ],
)
def test_a_tensor_that_cannot_be_packed_is_named(tmp_path: Path, cause: Exception, error: type[Exception]):
    def fails(memory: memoryview) -> None:
        assert len(memory) == 8
        raise cause

    late = penstock._save.Described("F32", (2,), None, None, None, fails)
    tensors = {"a": torch.ones(2), "late": late}
    text = "^gone$" if cause.__class__ is penstock.DeviceError else f"tensor late cannot be packed: {cause}"
    with pytest.raises(error, match=text):
        penstock.save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(error, match=text):
        penstock._save.to_bytes(tensors, None, layout="compact")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_from_where_it_is_waits_for_its_turn():
    """GPUs' tensors too, by those of torch that have all but values: there is no GPU here."""
    with FakeTensorMode():
        fake = {device: torch.empty(4, 6, device=device) for device in ("cpu", "cuda")}
    for device, tensor in fake.items():
        for late, what in ((False, tensor), (True, tensor.t()), (True, torch.complex(tensor, tensor).conj())):
            with mock.patch.object(type(what), "data_ptr", lambda _: 64):
                described = penstock._save.describe("a", what)
            assert (described.fill is not None, described.address is None) == (late, late), device
            assert described.gpu == (0 if device == "cuda" and not late else None)


def test_a_save_that_is_told_of_its_progress(tmp_path: Path):
    told: list[tuple[int, int]] = []
    report = penstock.save_file(several(), tmp_path / "m", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (report.file_bytes, report.file_bytes)
    assert report.gbps > 0


@pytest.mark.parametrize(
    ("name", "why"), [("n" * 256, "too long"), ("ä" * 128, "too long"), ("a\0b", "NUL"), ("a" * 5000, "too long")]
)
def test_a_name_that_no_file_can_have_is_refused_before_a_byte_is_written(tmp_path: Path, name: str, why: str):
    with pytest.raises(penstock.InvalidError, match=why):
        penstock.save_file({"a": np.ones(3)}, f"{tmp_path}/{name}")
    assert not list(tmp_path.iterdir())
    penstock.save_file({"a": np.ones(3)}, tmp_path / ("n" * 255), fsync=False)
