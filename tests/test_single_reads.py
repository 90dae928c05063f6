"""Tensors and slices that a caller asks for one at a time: over a file system that answers late, and out of the page
cache."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ordeal
import penstock
import penstock._load
import pytest
import slow_fs
from conftest import Oracle, raw
from ordeal import await_line, begin, finish, soon
from penstock.synthetic.synth import Tensor, write_file

safetensors = pytest.importorskip("safetensors")

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 256 * KIB
SMALL = [Tensor(f"t{number:04}", "F32", (32, 32)) for number in range(1000)]

needs_fuse = pytest.mark.skipif("slow_fs.why_not() is not None", reason="no FUSE here")


@pytest.fixture(scope="module")
def backing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backing")
    write_file(folder / "small.safetensors", SMALL)
    write_file(folder / "large.safetensors", [Tensor(f"l{number}", "F32", (512, 512)) for number in range(12)])
    return folder


@pytest.fixture(scope="module")
def mount(backing: Path) -> Iterator[slow_fs.SlowFs]:
    with slow_fs.mounted(backing) as fs:
        yield fs


@pytest.fixture
def fs(mount: slow_fs.SlowFs) -> Iterator[slow_fs.SlowFs]:
    mount.tell(latency=0.0, hang=[], fail=[], after=0, sizes={}, bad={}, cached=True, forget=True)
    yield mount
    mount.tell(latency=0.0, hang=[], fail=[], after=0, sizes={}, bad={}, cached=True)


@pytest.fixture
def fresh(fs: slow_fs.SlowFs, backing: Path) -> Iterator[Path]:
    """A file of the mount that may be changed, and its place behind it is `backing / name`."""
    shutil.copy(backing / "large.safetensors", backing / "fresh.safetensors")
    yield fs.path / "fresh.safetensors"
    (backing / "fresh.safetensors").unlink(missing_ok=True)


def halves(file: Any, names: list[str]) -> list[Any]:
    return [file.get_slice(name)[: file.get_slice(name).get_shape()[0] // 2] for name in names]


def columns(file: Any, names: list[str]) -> list[Any]:
    return [file.get_slice(name)[:, 8:24] for name in names]


WAYS: dict[str, Callable[[Any, list[str]], list[Any]]] = {
    "tensors": lambda file, names: [file.get_tensor(name) for name in names],
    "backwards": lambda file, names: [file.get_tensor(name) for name in reversed(names)],
    "whole slices": lambda file, names: [file.get_slice(name)[:] for name in names],
    "halves": halves,
    "columns": columns,
    "numbers": lambda file, names: [file.get_slice(name)[3] for name in names],
    "lists": lambda file, names: [file.get_slice(name)[[1, 5, 6]] for name in names],
}


@needs_fuse
@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cached", [pytest.param(True, marks=pytest.mark.machine), False], ids=["cached", "uncached"])
def test_a_loop_over_a_handle_opens_the_file_once_and_reads_each_block_once(
    fs: slow_fs.SlowFs, cached: bool, way: str, patched: bool
) -> None:
    path = str(fs.path / "small.safetensors")
    with safetensors.safe_open(path, "pt") as file:
        names = file.keys()
        expected = WAYS[way](file, names)
    fs.tell(forget=True, cached=cached)
    patch = penstock.patch() if patched else None
    try:
        opened = safetensors.safe_open if patched else penstock.safe_open
        with opened(path, "pt") as file:
            assert isinstance(file, penstock.safe_open)
            found = WAYS[way](file, names)
    finally:
        if patch is not None:
            patch.undo()
    told = fs.tell()
    requests, size = told["requests"], Path(path).stat().st_size
    assert all(raw(a) == raw(b) and a.shape == b.shape for a, b in zip(found, expected, strict=True))
    # The header, and the handle. safetensors opens it twice as well
    assert requests["open"] == 2
    # The header twice: opening drops what the kernel has. No block twice
    assert told["read_bytes"] <= size + 128 * KIB
    # A block is one read, the header is two. The last block is a short one. Through the page cache the kernel makes one
    # request of a read, or two where it likes; on a busy machine more, where it reads ahead for two blocks at once
    blocks = -(-size // BLOCK)
    assert requests["read"] <= (2 * (blocks + 2) if cached else blocks + 2)


@needs_fuse
@pytest.mark.parametrize("framework", ["np", "dlpack", "pt"])
def test_every_framework_reads_ahead(fs: slow_fs.SlowFs, backing: Path, framework: Any) -> None:
    path = fs.path / "small.safetensors"
    oracle = Oracle(backing / "small.safetensors")
    with penstock.safe_open(path, framework) as file:
        for name in file.keys()[:300]:
            assert raw(file.get_tensor(name)) == oracle[name]
            assert raw(file.get_slice(name)[1:3]) == oracle[name][128:384]
    assert fs.tell()["requests"]["open"] == 2


@needs_fuse
def test_long_tensors_are_read_by_several_threads_at_once(fs: slow_fs.SlowFs, backing: Path) -> None:
    path = fs.path / "large.safetensors"
    oracle = Oracle(backing / "large.safetensors")
    fs.tell(latency=0.02, forget=True)
    with penstock.safe_open(path, "np") as file:
        assert raw(file.get_tensor("l7")) == oracle["l7"]
    told = fs.tell()
    assert told["most_at_once"] >= 3
    assert told["requests"]["open"] == 2


# --- What is read ahead is bounded, and goes ---


@needs_fuse
def test_what_is_read_ahead_stays_within_the_window_and_goes_with_the_handle(fs: slow_fs.SlowFs) -> None:
    path = fs.path / "large.safetensors"
    file = penstock.safe_open(path, "np", options={"window": 2 * MIB})
    most = 0
    for name in file.offset_keys():
        file.get_slice(name)[:40]
        most = max(most, file._single.held)
    assert 0 < most <= 2 * MIB
    part = file.get_slice("l1")
    file.__exit__(None, None, None)
    assert file._single.held == 0
    soon(lambda: not descriptors(path) and not ordeal.threads())
    # A slice outlives the handle, and keeps nothing
    assert raw(part[2:4]) == Oracle(path)["l1"][2 * 2048 : 4 * 2048]
    soon(lambda: not descriptors(path) and not ordeal.threads())
    assert file._single.held == 0


@needs_fuse
def test_a_handle_that_is_dropped_closes_its_file(fs: slow_fs.SlowFs) -> None:
    path = fs.path / "large.safetensors"
    file = penstock.safe_open(path, "np")
    tensor = file.get_tensor("l0")
    part = file.get_slice("l1")
    assert len(descriptors(path)) == 1
    del file
    gc.collect()
    assert raw(part[:1]) == Oracle(path)["l1"][:2048]
    del part
    gc.collect()
    soon(lambda: not descriptors(path) and not ordeal.threads())
    assert raw(tensor) == Oracle(path)["l0"]


def descriptors(path: Path) -> list[Path]:
    """The descriptors of a file that this process has."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if fd.readlink() == path:
                found.append(fd)
    return found


def test_a_process_keeps_at_most_64_descriptors(tmp_path: Path) -> None:
    path = write_file(tmp_path / "one.safetensors", [Tensor("a", "F32", (8, 8))])
    path.read_bytes()
    files = [penstock.safe_open(path, "np") for _ in range(80)]
    for file in files:
        file.get_slice("a")[:2]
        assert len(descriptors(path)) <= 64
    assert len(descriptors(path)) == 64
    expected = Oracle(path)["a"]
    for file in files:
        assert raw(file.get_slice("a")[1:2]) == expected[32:64]
    assert len(descriptors(path)) <= 64
    del file, files
    gc.collect()
    assert not descriptors(path)


# --- Files that change, servers that fail ---


@needs_fuse
@pytest.mark.parametrize("read", ["get_tensor", "get_slice"])
@pytest.mark.parametrize("change", ["replaced", "removed", "rewritten", "truncated"])
def test_a_file_that_changes_is_a_changed_error_within_a_window(
    fresh: Path, backing: Path, change: str, read: str
) -> None:
    behind = backing / "fresh.safetensors"
    with penstock.safe_open(fresh, "pt") as file:
        names = file.keys()
        file.get_tensor(names[0])
        if change == "replaced":
            shutil.copy(behind, backing / "other")
            (backing / "other").rename(behind)
        elif change == "removed":
            behind.unlink()
        elif change == "rewritten":
            with behind.open("r+b") as out:
                out.seek(-10, 2)
                out.write(b"otherwise")
        else:
            os.truncate(behind, 2 * MIB)
        with pytest.raises(penstock.ChangedError, match=r"fresh\.safetensors"):
            for name in names[1:]:
                file.get_tensor(name) if read == "get_tensor" else file.get_slice(name)[1:]
        # And so it stays
        with pytest.raises(penstock.ChangedError, match=r"fresh\.safetensors"):
            file.get_slice(names[-1])[:3]


@needs_fuse
def test_what_was_read_ahead_is_looked_at_before_it_is_handed_out(
    fresh: Path, backing: Path, fs: slow_fs.SlowFs
) -> None:
    """A moment later, although no byte of it is read any more."""
    with penstock.safe_open(fresh, "pt") as file:
        file.get_slice("l0")[:1]
        shutil.copy(backing / "fresh.safetensors", backing / "other")
        (backing / "other").rename(backing / "fresh.safetensors")
        time.sleep(0.2)
        reads = fs.tell()["requests"]["read"]
        with pytest.raises(penstock.ChangedError, match=r"fresh\.safetensors"):
            file.get_slice("l0")[1:2]
        assert fs.tell()["requests"]["read"] == reads


@needs_fuse
@pytest.mark.parametrize("what", ["get_tensor", "get_slice"])
def test_a_server_that_hangs_is_an_error_that_names_file_and_bytes(fs: slow_fs.SlowFs, what: str) -> None:
    path = fs.path / "large.safetensors"
    file = penstock.safe_open(path, "np", options={"stall_timeout": 0.5})
    file.get_slice("l0")[:1]
    fs.tell(hang=["read"])
    with pytest.raises(penstock.StalledError, match="stall_timeout") as caught:
        file.get_tensor("l9") if what == "get_tensor" else file.get_slice("l9")[:4]
    assert str(path) in str(caught.value)
    assert caught.value.range is not None
    fs.tell(hang=[])
    assert raw(file.get_slice("l9")[:1]) == Oracle(path)["l9"][:2048]


@needs_fuse
@pytest.mark.parametrize("request_", ["lookup", "open"])
def test_a_server_that_hangs_before_the_first_read_is_an_error(fs: slow_fs.SlowFs, request_: str) -> None:
    path = fs.path / "large.safetensors"
    file = penstock.safe_open(path, "np", options={"stall_timeout": 0.5})
    fs.tell(hang=[request_])
    with pytest.raises(penstock.StalledError, match="stall_timeout") as caught:
        file.get_tensor("l0")
    assert str(path) in str(caught.value)
    fs.tell(hang=[])
    assert raw(file.get_tensor("l0")) == Oracle(path)["l0"]


@needs_fuse
def test_a_read_that_fails_is_an_error_and_the_next_one_is_a_new_one(fs: slow_fs.SlowFs) -> None:
    path = fs.path / "large.safetensors"
    with penstock.safe_open(path, "np") as file:
        at = file._checkpoint["l4"].offsets[0]
        fs.tell(bad={"large.safetensors": at + 100})
        assert file.get_tensor("l0").shape == (512, 512)
        for read in (lambda: file.get_tensor("l4"), lambda: file.get_slice("l4")[:2]):
            with pytest.raises(penstock.ReadError) as caught:
                read()
            assert caught.value.errno == 5
            assert caught.value.tensor == "l4"
            assert caught.value.range is not None
            assert str(path) in str(caught.value)
        fs.tell(bad={})
        assert raw(file.get_tensor("l4")) == Oracle(path)["l4"]


@needs_fuse
def test_ctrl_c_ends_a_read_that_hangs(fs: slow_fs.SlowFs) -> None:
    program = """
import sys, penstock
file = penstock.safe_open(sys.argv[1], "np")
file.get_slice("l0")[:1]
print("opened", flush=True)
sys.stdin.readline()
try:
    print("asked", flush=True)  # what is read ahead may hang before
    file.get_tensor("l9")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    child = begin(program, fs.path / "large.safetensors")
    await_line(child, "opened")
    fs.tell(hang=["read"])
    child.stdin.write("\n")
    child.stdin.flush()
    await_line(child, "asked")
    fs.hangs()
    child.send_signal(signal.SIGINT)
    try:
        await_line(child, "interrupted")
    finally:
        fs.tell(hang=[])
    assert finish(child, 20)[0] == 0


# --- Threads, and children ---


@needs_fuse
def test_threads_share_a_handle(fs: slow_fs.SlowFs, backing: Path) -> None:
    path = fs.path / "small.safetensors"
    oracle = Oracle(backing / "small.safetensors")
    with penstock.safe_open(path, "np") as file, ThreadPoolExecutor(4) as pool:
        names = file.keys()

        def read(name: str) -> bool:
            whole = raw(file.get_tensor(name)) == oracle[name]
            return whole and raw(file.get_slice(name)[4:8]) == oracle[name][512:1024]

        assert all(pool.map(read, names))
    assert fs.tell()["requests"]["open"] == 2


@needs_fuse
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_opens_its_own(fs: slow_fs.SlowFs) -> None:
    program = """
import os, sys, warnings, penstock
warnings.simplefilter("error")
expected = penstock.load_file(sys.argv[1], framework="np")
file = penstock.safe_open(sys.argv[1], "np")
part = file.get_slice("t0003")
names = file.keys()
for name in names[:400]:
    file.get_tensor(name)
pid = os.fork()
for name in names:
    assert file.get_tensor(name).tobytes() == expected[name].tobytes()
assert part[1:5].tobytes() == expected["t0003"][1:5].tobytes()
if pid == 0:
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print("right")
"""
    path = fs.path / "small.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "right\n", done.stderr


# --- Out of the page cache ---

LOCAL = [
    Tensor("table", "F32", (4096, 1024)),
    Tensor("flat", "BF16", (64, 1, 96)),
    Tensor("narrow", "U8", (256, 4001)),
    *SMALL[:50],
]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_file(tmp_path_factory.mktemp("local") / "model.safetensors", LOCAL)
    path.read_bytes()
    return path


#: Indices of parts of at most 1 MiB.
PARTS: dict[str, tuple[str, Any]] = {
    "a row": ("table", slice(77, 78)),
    "a number": ("table", 4095),
    "rows": ("table", slice(-256, None)),
    "a part of a row": ("table", (5, slice(100, 200))),
    "the first of small ones": ("t0007", slice(0, 1)),
    "columns": ("t0009", (slice(None), slice(3, 9))),
    "a column": ("narrow", (slice(None), slice(17, 18))),
    "columns of all rows": ("narrow", (slice(None), slice(1000, 3000))),
    "two rows apart": ("t0011", slice(None, None, 2)),
    "the middle dimension": ("flat", (slice(3, 9), 0)),
    "nothing": ("table", slice(8, 8)),
}


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("part", PARTS)
def test_a_small_part_starts_no_load(local: Path, part: str, framework: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, index = PARTS[part]
    with penstock.safe_open(local, framework) as file:
        whole = penstock.load_file(local, framework=framework)[name]
        local.read_bytes()
        monkeypatch.setattr(penstock._load, "load", None)
        found = file.get_slice(name)[index]
        assert raw(found) == raw(np.ascontiguousarray(whole[index]) if framework == "np" else whole[index])
        assert tuple(found.shape) == tuple(whole[index].shape)
        found[...] = 1  # its own memory


def test_a_small_part_takes_at_most_three_system_calls(local: Path, tmp_path: Path) -> None:
    program = """
import os, sys, penstock
file = penstock.safe_open(sys.argv[1], "np")
table, names = file.get_slice("table"), [name for name in file.keys() if name.startswith("t0")]
def parts():
    for number in range(0, 4000, 40):
        table[number : number + 1]
    for name in names:
        file.get_slice(name)[0:1], file.get_slice(name)[:, 3:9]
parts()
os.path.exists("/begin")
parts()
os.path.exists("/end")
"""
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-o", os.devnull, "true"], check=False).returncode:
        pytest.skip("strace is not installed, or may not trace here")
    log = tmp_path / "log"
    subprocess.run([strace, "-f", "-o", log, sys.executable, "-c", program, local], check=True, timeout=120)
    lines = log.read_text().splitlines()
    [first] = [number for number, line in enumerate(lines) if '"/begin"' in line]
    [last] = [number for number, line in enumerate(lines) if '"/end"' in line]
    calls = lines[first + 1 : last]
    assert len(calls) <= 3 * (100 + 2 * len(SMALL[:50])), calls[:40]
    # One copy, and a look at the file
    assert sum("preadv" in line for line in calls) == sum("statx" in line for line in calls) == 200
    assert not any("mmap" in line and "model.safetensors" in line for line in calls)


@pytest.mark.parametrize("change", ["rewritten", "truncated", "replaced"])
def test_a_small_part_of_a_file_that_changed_is_an_error(tmp_path: Path, change: str) -> None:
    path = write_file(tmp_path / "one.safetensors", [Tensor("a", "F32", (512, 512)), Tensor("b", "F32", (8,))])
    path.read_bytes()
    with penstock.safe_open(path, "pt") as file:
        part = file.get_slice("a")
        part[:2]
        if change == "rewritten":
            with path.open("r+b") as out:
                out.seek(-10, 2)
                out.write(b"otherwise")
        elif change == "truncated":
            os.truncate(path, 4096)
        else:
            Path(shutil.copy(path, tmp_path / "other")).replace(path)
        with pytest.raises(penstock.ChangedError, match=r"one\.safetensors"):
            part[3:5]


def test_threads_share_a_handle_of_a_local_file(local: Path) -> None:
    expected = Oracle(local)["table"]
    with penstock.safe_open(local, "pt") as file:
        part, wrong = file.get_slice("table"), []

        def read(start: int) -> None:
            for row in range(start, 4096, 64):
                if raw(part[row : row + 1]) != expected[row * 4096 : row * 4096 + 4096]:
                    wrong.append(row)

        threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
