"""Programs that save with fastsafetensors, on its own code and on `penstock.compat.fastsafetensors`."""

from __future__ import annotations

import errno
import importlib
import json
import os
from collections import namedtuple
from pathlib import Path
from types import ModuleType
from typing import Any

import penstock
import pytest
import torch
from conftest import raw
from penstock.compat import fastsafetensors as face


@pytest.fixture(params=["penstock.compat.fastsafetensors", "fastsafetensors"])
def fst(request: pytest.FixtureRequest) -> ModuleType:
    """The module that the program imports."""
    module = pytest.importorskip(request.param)
    if not hasattr(module, "ParallelSaver"):
        pytest.skip("this fastsafetensors does not save")
    return module


def of(fst: ModuleType, name: str) -> Any:
    """What is here in the module itself, and there in a submodule."""
    return getattr(fst if fst is face else importlib.import_module("fastsafetensors.saver"), name)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    made = {f"layers.{i}.w": torch.arange(100 * (i + 1), dtype=torch.float32).reshape(i + 1, 100) for i in range(9)}
    made["half"] = torch.randn(33, 7).to(torch.bfloat16)
    made["scalar"] = torch.tensor(7)
    made["none"] = torch.empty(0, 3, dtype=torch.float16)
    made["turned"] = torch.randn(6, 4).t()
    return made


def headers(paths: list[str]) -> list[dict[str, Any]]:
    found = []
    for path in paths:
        with open(path, "rb") as file:
            found.append(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    return found


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_saved_as_shards_of_about_equal_size(fst, tensors, tmp_path):
    base = str(tmp_path / "made" / "model")
    saver = fst.ParallelSaver(num_shards=3, num_threads=2)
    paths = saver.save(tensors, base, metadata={"format": "pt"}, shard0_metadata={"index": "here"})
    assert paths == [f"{base}-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names_in(tmp_path / "made") == [Path(path).name for path in paths]
    loaded = penstock.load_file(paths)
    assert {name: (raw(t), t.dtype, t.shape) for name, t in loaded.items()} == {
        name: (raw(t), t.dtype, t.shape) for name, t in tensors.items()
    }
    found = headers(paths)
    metadata = [header.pop("__metadata__") for header in found]
    assert [data["format"] for data in metadata] == ["pt"] * 3
    assert ["index" in data for data in metadata] == [True, False, False]
    assert [data["fst.shard.index"] for data in metadata] == ["0", "1", "2"]
    assert {data["fst.shard.count"] for data in metadata} == {"3"}
    assert len({data["fst.shard.set"] for data in metadata}) == 1
    sizes = [sum(tensors[name].nbytes for name in header) for header in found]
    assert max(sizes) - min(sizes) <= max(tensor.nbytes for tensor in tensors.values())
    # The largest first, each to the shard that has least
    assert "layers.8.w" in found[0]
    assert "layers.7.w" in found[1]
    assert {"layers.6.w", "layers.5.w"} <= found[2].keys()


def test_what_was_saved_is_loaded_by_the_loader(fst, tensors, tmp_path):
    paths = fst.ParallelSaver(num_shards=2).save(tensors, str(tmp_path / "m"))
    loader = fst.SafeTensorsFileLoader(fst.SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: paths})
    fb = loader.copy_files_to_device()
    for name, tensor in tensors.items():
        assert raw(fb.get_tensor(name)) == raw(tensor), name
    fb.close()
    loader.close()


def test_bytes_may_be_made_as_they_are_written(fst, tmp_path):
    entry, dtype = of(fst, "WriteEntry"), face.DType
    if fst is not face:
        dtype = importlib.import_module("fastsafetensors.st_types").DType
    order: list[str] = []

    def fill(work):
        for buffer, entry in work:
            order.append(entry.name)
            assert len(buffer) == entry.nbytes
            buffer[:] = bytes([entry.source]) * entry.nbytes

    entries = [
        entry("small", dtype.F16, [3, 2], 12, source=1),
        entry("large", dtype.U8, [40], 40, source=2),
        entry("middle", dtype.F8_E4M3, [5, 4], 20, source=3),
        entry("empty", dtype.F32, [0], 0, source=4),
    ]

    def contents(shard):
        return {"has": ",".join(each.name for each in shard)}

    saver = fst.ParallelSaver(num_shards=2, fill=fill, shard_metadata=contents)
    paths = saver.save_entries(entries, str(tmp_path / "m"))
    assert order == ["large", "middle", "small", "empty"]
    loaded = penstock.load_file(paths)
    assert {name: raw(tensor) for name, tensor in loaded.items()} == {
        "small": b"\1" * 12,
        "large": b"\2" * 40,
        "middle": b"\3" * 20,
        "empty": b"",
    }
    assert loaded["middle"].dtype is torch.float8_e4m3fn
    assert [header["__metadata__"]["has"] for header in headers(paths)] == ["large", "middle,small,empty"]


def test_a_fill_that_fails_leaves_the_old_files(fst, tensors, tmp_path):
    base = str(tmp_path / "m")
    paths = fst.ParallelSaver(num_shards=2).save(tensors, base)
    before = [Path(path).read_bytes() for path in paths]

    def fill(work):
        raise RuntimeError("no bytes today")

    with pytest.raises(RuntimeError, match="no bytes today"):
        fst.ParallelSaver(num_shards=2, fill=fill).save(tensors, base)
    assert names_in(tmp_path) == [Path(path).name for path in paths]
    assert [Path(path).read_bytes() for path in paths] == before


@pytest.mark.parametrize("settings", [{"num_shards": 0}, {"num_threads": 0}])
def test_settings_that_make_no_sense_are_refused(fst, settings):
    with pytest.raises(ValueError):
        fst.ParallelSaver(**settings)


@pytest.mark.parametrize(
    ("name", "shape", "nbytes"), [("__metadata__", [2], 8), ("twice", [2], 8), ("w", [3], 8), ("w", [-2], 8)]
)
def test_entries_that_make_no_sense_are_refused(fst, tmp_path, name, shape, nbytes):
    dtype = face.DType if fst is face else importlib.import_module("fastsafetensors.st_types").DType
    entry = of(fst, "WriteEntry")
    entries = [entry("twice", dtype.F32, [2], 8, torch.zeros(2)), entry(name, dtype.F32, shape, nbytes, torch.zeros(2))]
    with pytest.raises(ValueError):
        fst.ParallelSaver(num_shards=1).save_entries(entries, str(tmp_path / "m"))
    assert not list(tmp_path.iterdir())


def test_metadata_is_of_strings(fst, tensors, tmp_path):
    for settings in ({"metadata": {"a": 1}}, {"shard0_metadata": {1: "a"}}):
        with pytest.raises(ValueError):
            fst.ParallelSaver(num_shards=1).save(tensors, str(tmp_path / "m"), **settings)


def test_room_is_left(fst, tensors, tmp_path):
    with pytest.raises(OSError):
        fst.ParallelSaver(num_shards=1, min_free_bytes=1 << 60).save(tensors, str(tmp_path / "m"))
    assert not list(tmp_path.iterdir())


# On this side alone


def test_the_original_takes_the_shards_for_a_set_of_its_own(tensors, tmp_path):
    saver = pytest.importorskip("fastsafetensors.saver")
    paths = face.ParallelSaver(num_shards=3).save(tensors, str(tmp_path / "m"))
    Meta = namedtuple("Meta", "src metadata")
    metas = [Meta(path, header["__metadata__"]) for path, header in zip(paths, headers(paths), strict=True)]
    saver.validate_shard_set(metas)
    with pytest.raises(ValueError):
        saver.validate_shard_set(metas[::-1])


def test_a_shard_that_cannot_be_written_leaves_the_old_ones(tensors, tmp_path, monkeypatch):
    base = str(tmp_path / "m")
    saver = face.ParallelSaver(num_shards=3)
    paths = saver.save(tensors, base)
    before = [Path(path).read_bytes() for path in paths]
    save_file, calls = penstock._save.save_file, []

    def third_time_unlucky(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[1])
        if len(calls) == 3:
            raise penstock._errors.NoSpaceError("the disk is full", errno=errno.ENOSPC)
        return save_file(*args, **kwargs)

    monkeypatch.setattr(penstock._save, "save_file", third_time_unlucky)
    with pytest.raises(OSError) as caught:
        saver.save(tensors, base)
    assert caught.value.errno == errno.ENOSPC
    assert [Path(path).read_bytes() for path in paths] == before
    assert names_in(tmp_path) == [Path(path).name for path in paths]


def test_nothing_is_on_its_way_to_storage_where_that_was_asked_for(tensors, tmp_path, monkeypatch):
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()) or real(fd))
    reports, save_file = [], penstock._save.save_file
    monkeypatch.setattr(
        penstock._save, "save_file", lambda *args, **more: reports.append(save_file(*args, **more)) or reports[-1]
    )
    face.save_sharded([face.plain_entry("w", tensors["half"])], str(tmp_path / "m"), num_shards=2, fsync=True)
    assert [report["fsync"] for report in reports] == [True, True]
    assert synced == [tmp_path]


def test_only_torch_is_saved(tmp_path):
    with pytest.raises(penstock.UnsupportedError):
        face.ParallelSaver(framework="paddle")
    with pytest.raises(ValueError, match="give torch tensors"):
        face.save_sharded([face.WriteEntry("w", face.DType.U8, [2], 2, b"ab")], str(tmp_path / "m"), num_shards=1)
    with pytest.raises(ValueError, match="these keys tell the shards apart"):
        entry = face.plain_entry("w", torch.zeros(2))
        face.save_sharded([entry], str(tmp_path / "m"), shard_metadata=lambda shard: {"fst.shard.set": "mine"})


def test_wrapped_tensors_and_pairs_of_four_bits(tmp_path):
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no F4")
    pairs = torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2)
    [path] = face.ParallelSaver(num_shards=1).save(
        {"f4": face.TorchTensor.of(pairs), "w": face.TorchTensor.of(torch.ones(3))}, str(tmp_path / "m")
    )
    assert penstock.open(path)["f4"].shape == (3, 8)
    assert raw(penstock.load_file(path)["f4"].view(torch.uint8)) == bytes(range(12))
