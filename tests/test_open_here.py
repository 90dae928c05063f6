"""`penstock.open` on the caller's own thread: for what is on a disk that was loaded from, and for nothing else."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ordeal
import pytest
import refusals
import slow_fs
from ordeal import await_line, begin, finish, run

LIMIT = 60.0
INDEX = "model.safetensors.index.json"


def resolves_cached(path: Path) -> bool:
    """Whether this kernel (5.12 and later) opens what is in its memory, and only that."""
    how = ctypes.create_string_buffer(struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, 0x20), 24)
    fd = ctypes.CDLL(None).syscall(refusals.number("openat2"), -100, os.fsencode(path), how, 24)
    if fd >= 0:
        os.close(fd)
    return fd >= 0


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder of two files with an index, and links to them, on a disk that can be known."""
    if not os.major(tmp_path.stat().st_dev):
        pytest.skip("the temporary folder is on no block device")
    if not resolves_cached(tmp_path):
        pytest.skip("openat2 does not know RESOLVE_CACHED here, or is refused")
    for name in "ab":
        ordeal.write(tmp_path / f"{name}.safetensors", 3, 1000)
    shards = {f"{name}.{i}": f"{name}.safetensors" for name in "ab" for i in range(3)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "link").symlink_to("a.safetensors")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.safetensors").symlink_to("../a.safetensors")
    (tmp_path / "plain" / "b.safetensors").symlink_to("../b.safetensors")
    return tmp_path


def written(folder: Path) -> Path:
    """One file and its index in a folder; gives the file."""
    file = ordeal.write(folder / "c.safetensors", 2, 1000)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(ordeal.entries(file)[1], file.name)}))
    return file


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A file with an index on tmpfs, which is no disk."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield written(Path(folder))


#: What can be opened of the folder `disk`, with its number of tensors.
SOURCES = {
    "file": ("folder / 'a.safetensors'", 3),
    "link": ("folder / 'link'", 3),
    "list": ("[folder / 'b.safetensors', folder / 'link']", 6),
    "folder": ("folder / 'plain'", 6),
    "folder with index": ("folder", 6),
    "index": (f"folder / {INDEX!r}", 6),
}

HEAD = """
import errno, sys
from pathlib import Path
import ordeal, penstock
import penstock._numpy
from refusals import *

def ways(source):
    "How many tensors there are; which error comes where no thread can be started, if one does."
    count = len(penstock.open(source))
    refuse(*NO_THREADS)
    try:
        assert len(penstock.open(source)) == count
        return count, "here"
    except penstock.LimitError as e:
        assert "cannot start the thread" in str(e), e
        return count, "aside"

folder = Path(sys.argv[1])
"""
LOADED = HEAD + "penstock.open(folder / 'b.safetensors').load(framework='np')\n"


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_on_a_disk_that_was_loaded_from_is_opened_without_a_thread(disk, source):
    opened, count = SOURCES[source]
    assert run(LOADED + f"print(*ways({opened}))", disk, timeout=LIMIT).split() == [str(count), "here"]


@pytest.mark.parametrize("source", SOURCES)
def test_before_the_first_load_nothing_is_known(disk, source):
    opened, count = SOURCES[source]
    assert run(HEAD + f"print(*ways({opened}))", disk, timeout=LIMIT).split() == [str(count), "aside"]


@pytest.mark.sampled
@pytest.mark.parametrize("error", ["EPERM", "ENOSYS", "EINVAL", "EAGAIN"])
@pytest.mark.parametrize("source", SOURCES)
def test_where_the_kernel_does_not_say_where_a_path_leads(disk, source, error):
    opened, count = SOURCES[source]
    program = LOADED + f"refuse(Refusal('openat2', errno.{error}))\nprint(*ways({opened}))"
    assert run(program, disk, timeout=LIMIT).split() == [str(count), "aside"]


def lead_away(disk: Path, away: Path) -> dict[str, str]:
    """Puts ways from the folder to a file elsewhere that has an index beside it; gives them as sources."""
    (disk / "away").symlink_to(away)
    for folder in ("mixed", "indexed", "by-index"):
        (disk / folder).mkdir()
        (disk / folder / away.name).symlink_to(away)
    (disk / "mixed" / "a.safetensors").symlink_to("../a.safetensors")
    shutil.copy(away.parent / INDEX, disk / "indexed" / INDEX)
    (disk / "by-index" / INDEX).symlink_to(away.parent / INDEX)
    return {
        "link": "folder / 'away'",
        "list": "[folder / 'a.safetensors', folder / 'away']",
        "folder": "folder / 'mixed'",
        "folder with index": "folder / 'indexed'",
        "folder with a link to an index": "folder / 'by-index'",
        "index": f"folder / 'by-index' / {INDEX!r}",
    }


#: The same, with their numbers of tensors.
AWAY = {
    "link": 2,
    "list": 5,
    "folder": 5,
    "folder with index": 2,
    "folder with a link to an index": 2,
    "index": 2,
}


@pytest.mark.parametrize("source", AWAY)
def test_what_leads_off_the_disk_is_opened_aside(disk, elsewhere, source):
    opened = lead_away(disk, elsewhere)[source]
    assert run(LOADED + f"print(*ways({opened}))", disk, timeout=LIMIT).split() == [str(AWAY[source]), "aside"]


@pytest.mark.sampled(7)
@pytest.mark.skipif("slow_fs.why_not() is not None", reason="no FUSE here")
@pytest.mark.parametrize(
    ("source", "request_"),
    # Nothing is looked up to get at a mount itself, nor to list it
    [*itertools.product(AWAY, ("lookup", "getattr", "open")), ("mount", "getattr"), ("mount", "open")],
)
def test_ctrl_c_ends_an_open_that_hangs_behind_a_link(disk, tmp_path_factory, source, request_):
    backing = tmp_path_factory.mktemp("backing")
    written(backing)
    program = (
        LOADED
        + """
print("ready", flush=True)
sys.stdin.readline()
try:
    penstock.open(eval(sys.argv[2]))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    )
    with slow_fs.mounted(backing) as fs:
        source = {**lead_away(disk, fs.path / "c.safetensors"), "mount": f"Path({str(fs.path)!r})"}[source]
        child = begin(program, disk, source)
        try:
            await_line(child, "ready")
            fs.tell(hang=[request_])
            child.stdin.write("\n")
            child.stdin.flush()
            fs.hangs()
            time.sleep(0.1)
            ordeal.interrupt(child, within=5.0)
        finally:
            fs.tell(hang=[])
        code, _, err = finish(child, 20)
        assert code == 0, err


def test_errors_are_the_same_on_either_thread(disk):
    program = (
        HEAD
        + """
(folder / "empty").mkdir()
(folder / "short.safetensors").write_bytes(b"123")
(folder / "loose").symlink_to("nowhere")
(folder / "gone").mkdir()
(folder / "gone" / "model.safetensors.index.json").write_text('{"weight_map": {"a.0": "a.safetensors"}}')
sources = [folder / name for name in ("nothing", "empty", "short.safetensors", "loose", "gone", "a.safetensors/b")]
sources += [[], [folder / "a.safetensors"] * 2, [folder / "a.safetensors", folder / "short.safetensors"], "", "a\\0b"]

def errors():
    for source in sources:
        try:
            penstock.open(source)
        except penstock.PenstockError as e:
            yield type(e).__name__, str(e), e.path, e.range, e.errno

before = list(errors())
assert len(before) == len(sources)
penstock.open(folder / "a.safetensors").load(framework="np")
assert list(errors()) == before, (before, list(errors()))
"""
    )
    run(program, disk, timeout=LIMIT)
