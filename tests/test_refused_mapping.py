"""Files that the kernel does not map, and overlays whose layers are not on this machine: they are read."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ordeal
import penstock
import pytest
import refusing_fs
import slow_fs
from ordeal import file_maps

HERE = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
fuse = pytest.mark.skipif("slow_fs.why_not() is not None", reason="no FUSE here")
GIB = 1 << 30


def sparse(path: Path, nbytes: int, value: float) -> Path:
    """A file with a tensor of ``nbytes`` bytes that takes no room, and one of 4 bytes behind it."""
    big = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
    head = json.dumps({"big": big, "w": {"dtype": "F32", "shape": [1], "data_offsets": [nbytes, nbytes + 4]}}).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.seek(8 + len(head) + nbytes)
        file.write(struct.pack("<f", value))
    return path


LIMITED = """
import json, os, resource, sys
import penstock
path, limit, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
checkpoint = penstock.open(path)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
told = []
if how == "load":
    found = checkpoint.load(names=["w"], framework="np")["w"]
    fallbacks = checkpoint.last_report.fallbacks
    told = [(one["from"], one["to"], "Cannot allocate memory" in one["reason"]) for one in fallbacks]
elif how == "stream":
    (_, found), = checkpoint.stream(names=["w"], framework="np")
elif how == "safe_open":
    with penstock.safe_open(path, "np") as file:
        found = file.get_tensor("w")
        assert file.get_slice("big")[1 << 29 : (1 << 29) + 3].tolist() == [0, 0, 0]
elif how == "copy=False":
    found = checkpoint.load(names=["w"], framework="np", options={"copy": False})["w"]
elif how == "into":
    import numpy
    found = numpy.zeros(1, "f4")
    checkpoint.load_into({"w": found}, strict=False)
print(json.dumps([found.tolist(), told]))
"""


@pytest.mark.parametrize("how", ["load", "stream", "safe_open", "copy=False", "into"])
def test_four_bytes_of_a_file_that_is_larger_than_the_limit_of_addresses(
    tmp_path: Path, python: Callable[..., Any], how: str
):
    path = sparse(tmp_path / "m.safetensors", 6 * GIB, 7.0)
    done = python(LIMITED, path, 5 * GIB, how)
    assert done.returncode == 0, done.stderr
    found, told = json.loads(done.stdout)
    assert found == [7.0]
    assert told == ([["mmap", "read", True]] if how == "load" else [])


def test_of_files_of_which_some_could_be_mapped_each_is_read(tmp_path: Path, python: Callable[..., Any]):
    for number in range(3):
        sparse(tmp_path / f"part{number}.safetensors", 2 * GIB, number)
    code = """
import resource, sys, penstock
from pathlib import Path
files = sorted(map(str, Path(sys.argv[1]).glob("*.safetensors")))
resource.setrlimit(resource.RLIMIT_AS, (5 << 30, 5 << 30))
print([penstock.open(path).load(names=["w"], framework="np")["w"].item() for path in files])
"""
    done = python(code, tmp_path)
    assert done.stdout.strip() == "[0.0, 1.0, 2.0]", done.stderr


def test_more_than_the_limit_allows_is_an_error_that_says_so(tmp_path: Path, python: Callable[..., Any]):
    path = sparse(tmp_path / "m.safetensors", 6 * GIB, 7.0)
    code = """
import resource, sys, penstock
checkpoint = penstock.open(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (5 << 30, 5 << 30))
for options in ({}, {"io": "mapped"}):
    try:
        checkpoint.load(framework="np", options=options)
    except penstock.OutOfMemoryError as error:
        print("limit" in str(error), sys.argv[1] in str(error))
"""
    done = python(code, path)
    assert done.stdout.split("\n")[:2] == ["True True", "True True"], done.stderr


@pytest.mark.parametrize("error", ["ENODEV", "ENOMEM", "EACCES", "EPERM", "EINVAL", "EOPNOTSUPP", "EAGAIN", "ENOSYS"])
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_mapping_that_is_refused_is_a_read(small: Path, python: Callable[..., Any], error: str, dtype: str | None):
    code = """
import errno, sys, numpy as np, penstock, refusals
path, error, dtype = sys.argv[1], getattr(errno, sys.argv[2]), sys.argv[3]
more = {} if dtype == "None" else {"dtype": dtype}
expected = penstock.open(path).load(framework="np", options={"copy": True}, **more)
refusals.refuse(refusals.Refusal("mmap", error, argument=3, value=0x4002))  # MAP_PRIVATE | MAP_NORESERVE: files
checkpoint = penstock.open(path)
found = checkpoint.load(framework="np", **more)
told = [one for one in checkpoint.last_report.fallbacks if one["from"] == "mmap"]
print(all(found[name].tobytes() == expected[name].tobytes() for name in expected), len(told))
assert checkpoint.last_report.routes["mapped"]["bytes"] == 0
assert not [one for one in told if path not in one["reason"]]
"""
    done = python(code, small, error, dtype, PYTHONPATH=HERE)
    assert done.stdout.strip() == "True 1", done.stderr


def test_io_mapped_is_an_error_where_the_kernel_refuses(small: Path, python: Callable[..., Any]):
    code = """
import errno, sys, penstock, refusals
refusals.refuse(refusals.Refusal("mmap", errno.ENODEV, argument=3, value=0x4002))
try:
    penstock.open(sys.argv[1]).load(framework="np", options={"io": "mapped"})
except penstock.PenstockError as error:
    print(error.errno == errno.ENODEV, "map" in str(error))
"""
    assert python(code, small, PYTHONPATH=HERE).stdout.strip() == "True True"


# Overlays


@pytest.fixture
def layered(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts overlays over given lower layers."""
    mounted: list[Path] = []

    def mount(*lower: Path, hidden: bool = False) -> Path:
        place = tmp_path / f"overlay{len(mounted)}"
        for name in ("upper", "work", "merged"):
            (place / name).mkdir(parents=True)
        layers = ":".join(map(str, lower))
        how = f"lowerdir={layers},upperdir={place / 'upper'},workdir={place / 'work'}"
        command = ["mount", "-t", "overlay", "overlay", "-o", how, place / "merged"]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("no overlay can be mounted here")
        mounted.append(place / "merged")
        return place / "merged"

    yield mount
    for place in reversed(mounted):
        subprocess.run(["umount", "-l", place], check=True)


def load(path: Path, **options: Any) -> tuple[Any, penstock.Report]:
    checkpoint = penstock.open(path)
    tensors = checkpoint.load(framework="np", options=options)
    assert checkpoint.last_report is not None
    return tensors, checkpoint.last_report


@fuse
def test_an_overlay_over_fuse_is_no_disk_of_this_machine(tmp_path: Path, layered: Callable[..., Path]):
    (tmp_path / "backing").mkdir()
    ordeal.write(tmp_path / "backing/model.safetensors", 8, 1 << 20)
    with slow_fs.mounted(tmp_path / "backing") as fs:
        path = layered(fs.path) / "model.safetensors"
        tensors, report = load(path)
        ordeal.same(tensors, tmp_path / "backing/model.safetensors")
        assert report.routes["mapped"]["bytes"] == report.routes["direct"]["bytes"] == 0
        assert not [line for line in file_maps() if str(path.parent) in line]
        with pytest.raises(penstock.UnsupportedError, match="never mapped"):
            load(path, io="mapped")
        # Of the same overlay, what was written here lies on the disk.
        ordeal.write(path.parent / "here.safetensors", 8, 1 << 20)
        assert load(path.parent / "here.safetensors")[1].routes["mapped"]["bytes"] > 0


@fuse
def test_an_overlay_over_a_disk_and_fuse_is_what_the_file_lies_on(tmp_path: Path, layered: Callable[..., Path]):
    for name, file in (("far", "far"), ("near", "near")):
        (tmp_path / name).mkdir()
        ordeal.write(tmp_path / name / f"{file}.safetensors", 4, 1 << 20)
    with slow_fs.mounted(tmp_path / "far") as fs:
        merged = layered(tmp_path / "near", fs.path)
        assert load(merged / "near.safetensors")[1].routes["mapped"]["bytes"] > 0
        assert load(merged / "far.safetensors")[1].routes["mapped"]["bytes"] == 0
        # An overlay over an overlay.
        again = layered(merged)
        assert load(again / "near.safetensors")[1].routes["mapped"]["bytes"] > 0
        assert load(again / "far.safetensors")[1].routes["mapped"]["bytes"] == 0


def test_an_overlay_over_memory_and_one_over_a_disk_are_mapped(tmp_path: Path, layered: Callable[..., Path]):
    shm = Path("/dev/shm") / f"penstock-overlay-{os.getpid()}"
    for folder in (tmp_path / "disk", shm):
        folder.mkdir()
        ordeal.write(folder / "model.safetensors", 4, 1 << 20)
    try:
        for folder in (tmp_path / "disk", shm):
            assert load(layered(folder) / "model.safetensors")[1].routes["mapped"]["bytes"] > 0
    finally:
        (shm / "model.safetensors").unlink()
        shm.rmdir()


# FUSE


@fuse
@pytest.mark.parametrize("threads", [1, 4, 16])
def test_each_reader_of_a_fuse_file_has_a_descriptor_and_reads_forward(tmp_path: Path, threads: int):
    ordeal.write(tmp_path / "model.safetensors", 64, 1 << 20)
    with refusing_fs.mounted(tmp_path) as fs:
        checkpoint = penstock.open(fs.path / "model.safetensors")
        tensors = checkpoint.load(framework="np", options={"threads": threads, "extent": 1 << 20, "cache": "keep"})
        ordeal.same(tensors, tmp_path / "model.safetensors")
        told = fs.end()
    by_handle: dict[int, list[int]] = {}
    for handle, offset in told["reads"]:
        by_handle.setdefault(handle, []).append(offset)
    data = [offsets for offsets in by_handle.values() if max(offsets) > 1 << 20]
    assert 1 <= len(data) <= threads
    if threads > 1:
        assert len(data) > 1, "all on one descriptor"
    # The kernel reads ahead, into the next extent too, and those requests overtake each other: the first of each counts
    extents = [[*dict.fromkeys(offset >> 20 for offset in offsets)] for offsets in data]
    assert all(those == sorted(those) for those in extents), extents


@fuse
def test_few_descriptors_are_enough_for_many_readers(tmp_path: Path, python: Callable[..., Any]):
    ordeal.write(tmp_path / "model.safetensors", 64, 1 << 20)
    code = """
import os, resource, sys, penstock
checkpoint = penstock.open(sys.argv[1])
most = len(os.listdir("/proc/self/fd")) + 8
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
print(len(checkpoint.load(framework="np", options={"threads": 32})))
"""
    with refusing_fs.mounted(tmp_path) as fs:
        done = python(code, fs.path / "model.safetensors")
    assert done.stdout.strip() == "64", done.stderr
