"""Saving where a call is refused: in another way if nothing can be lost by it, else an error, never half a file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
import refusing_fs
import slow_fs

HERE = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
NEW = {"a": np.arange(3 << 18, dtype="f4"), "b": np.ones(7, "f4"), "c": np.zeros((0, 3), "f2")}
OLD = {"old": np.full(5, 3.0, "f4")}

#: What some file systems refuse: calls with their errno, and what else they are like.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no rename": {"refuse": {"rename": errno.ENOSYS}},
    "no rename: EPERM": {"refuse": {"rename": errno.EPERM, "chmod": errno.EPERM}},
    "no rename: EOPNOTSUPP": {"refuse": {"rename": errno.EOPNOTSUPP, "link": errno.EOPNOTSUPP}},
    "no rename: EXDEV": {"refuse": {"rename": errno.EXDEV, "link": errno.EXDEV}},
    "no rename: EINVAL": {"refuse": {"rename": errno.EINVAL, "link": errno.EPERM}},
    "no rename: EIO": {"refuse": {"rename": errno.EIO, "link": errno.EIO}},
    "no ftruncate": {"refuse": {"ftruncate": errno.ENOSYS}},
    "no ftruncate: EPERM": {"refuse": {"ftruncate": errno.EPERM}},
    "no ftruncate: EIO": {"refuse": {"ftruncate": errno.EIO, "fallocate": errno.EOPNOTSUPP}},
    "no fsync": {"refuse": {"fsync": errno.EINVAL, "fsyncdir": errno.EINVAL}},
    "no fsync: EOPNOTSUPP": {"refuse": {"fsync": errno.EOPNOTSUPP}},
    "no O_DIRECT": {"direct": False},
    "in order": {"sequential": True},
    "hdfs": {"sequential": True, "refuse": {"ftruncate": errno.EOPNOTSUPP, "link": errno.EOPNOTSUPP}},
    "mountpoint-s3": {
        "source": "mountpoint-s3",
        "sequential": True,
        "refuse": dict.fromkeys(("rename", "link", "chmod", "unlink", "ftruncate"), errno.EPERM),
    },
    "nothing": {
        "sequential": True,
        "direct": False,
        "refuse": dict.fromkeys(
            ("rename", "link", "chmod", "ftruncate", "fsync", "fsyncdir", "fallocate"), errno.EINVAL
        ),
    },
}
#: Those where an old file cannot be replaced.
KEPT = [name for name, how in KINDS.items() if "rename" in how.get("refuse", {})]
fuse = pytest.mark.skipif("slow_fs.why_not() is not None", reason="no FUSE here")
root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def same(path: Path, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    found = penstock.open(path).load(framework="np")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.sampled
@fuse
@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_file_is_saved_whatever_is_refused(tmp_path: Path, kind: str, fsync: bool):
    with refusing_fs.mounted(tmp_path, **KINDS[kind]) as fs:
        report = penstock.save_file(NEW, fs.path / "m.safetensors", fsync=fsync)
        assert fs.inside() == ["m.safetensors"]
        same(fs.path / "m.safetensors", NEW)
        told = {one["from"] for one in report.fallbacks}
    same(tmp_path / "m.safetensors", NEW)
    refused = KINDS[kind].get("refuse", {})
    assert ("fsync" in told) is (fsync and "fsync" in refused)


@pytest.mark.sampled
@fuse
@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_old_file_is_replaced_or_stays_and_the_error_names_the_call(tmp_path: Path, kind: str, fsync: bool):
    penstock.save_file(OLD, tmp_path / "m.safetensors")
    before = (tmp_path / "m.safetensors").read_bytes()
    with refusing_fs.mounted(tmp_path, **KINDS[kind]) as fs:
        path = fs.path / "m.safetensors"
        if kind not in KEPT:
            penstock.save_file(NEW, path, fsync=fsync)
            same(tmp_path / "m.safetensors", NEW)
        else:
            with pytest.raises(penstock.PenstockError, match=r"m\.safetensors.*\(rename\).*remove it first") as caught:
                penstock.save_file(NEW, path, fsync=fsync)
            assert isinstance(caught.value, OSError) and caught.value.errno
            assert path.read_bytes() == before
        assert fs.inside() == ["m.safetensors"]
        if kind in KEPT and kind != "mountpoint-s3":  # the way out
            path.unlink()
            penstock.save_file(NEW, path, fsync=fsync)
            same(path, NEW)
            assert fs.inside() == ["m.safetensors"]


@fuse
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_shards_is_saved_whatever_is_refused(tmp_path: Path, kind: str):
    with refusing_fs.mounted(tmp_path, **KINDS[kind]) as fs:
        report = penstock.save(NEW, fs.path / "new", max_shard_size=1 << 20)
        assert len(report.files) == 3
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(report.files)
        same(tmp_path / "new", NEW)
        more = {name: array + 1 for name, array in NEW.items()}
        if kind in KEPT:
            with pytest.raises(penstock.PenstockError, match="rename"):
                penstock.save(more, fs.path / "new", max_shard_size=1 << 20)
            same(tmp_path / "new", NEW)
        else:
            penstock.save(more, fs.path / "new", max_shard_size=1 << 20)
            same(tmp_path / "new", more)
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(report.files)


@pytest.mark.sampled
@fuse
@pytest.mark.parametrize("call", ["write", "flush", "fsync"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_fails_in_the_middle_leaves_nothing_and_keeps_the_old_file(tmp_path: Path, kind: str, call: str):
    penstock.save_file(OLD, tmp_path / "old.safetensors")
    how = KINDS[kind]
    refuse = how.get("refuse", {}) | {call: errno.EIO}
    after = {"write": 5}
    with refusing_fs.mounted(tmp_path, **(how | {"refuse": refuse, "after": after})) as fs:
        for name in ("old", "new"):
            with pytest.raises(penstock.PenstockError, match=rf"{name}\.safetensors"):
                penstock.save_file(NEW, fs.path / f"{name}.safetensors", fsync=True)
    left = [path.name for path in tmp_path.iterdir() if path.name != "old.safetensors"]
    if "unlink" in how.get("refuse", {}) and call != "write":
        # Whole, and not confirmed: nobody may remove it.
        assert left in ([], ["new.safetensors"])
    else:
        assert left == []
    same(tmp_path / "old.safetensors", OLD)


SAVER = """
import sys, numpy as np, penstock
data = {"a": np.ones(8 << 20, "f4")}
print("ready", flush=True)
penstock.save_file(data, sys.argv[1], fsync=False)
"""


def holds_a_mebibyte(folder: Path) -> bool:
    """Whether a file of a folder is that large: one that gets another name meanwhile is looked at next time."""
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if entry.stat().st_size > 1 << 20:
                return True
    return False


@fuse
@pytest.mark.parametrize("kind", [name for name, how in KINDS.items() if not how.get("sequential")])
def test_a_killed_save_leaves_no_file_that_a_reader_would_take(tmp_path: Path, kind: str):
    with refusing_fs.mounted(tmp_path, **KINDS[kind]) as fs:
        path = fs.path / "m.safetensors"
        saver = subprocess.Popen([sys.executable, "-c", SAVER, path], stdout=subprocess.PIPE, text=True)
        assert saver.stdout is not None and saver.stdout.readline() == "ready\n"
        until = time.monotonic() + 60
        while not holds_a_mebibyte(tmp_path):
            assert time.monotonic() < until
            time.sleep(0.001)
        saver.send_signal(signal.SIGKILL)
        saver.wait()
        saver.stdout.close()
    if (tmp_path / "m.safetensors").exists() and (tmp_path / "m.safetensors").read_bytes()[:8] != bytes(8):
        same(tmp_path / "m.safetensors", {"a": np.ones(8 << 20, "f4")})


def alone(code: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program in a mount namespace of its own."""
    head = """
import ctypes, errno, json, os, subprocess, sys
import numpy as np, penstock
from pathlib import Path
NEW = {"a": np.arange(3 << 18, dtype="f4"), "b": np.ones(7, "f4")}
def mount(*words):
    subprocess.run(["mount", *map(str, words)], check=True)
def same(path):
    found = penstock.open(path).load(framework="np")
    return found.keys() == NEW.keys() and all(np.array_equal(found[name], NEW[name]) for name in NEW)
def attempt(path, fsync):
    try:
        report = penstock.save_file(NEW, path, fsync=fsync)
        return "saved" if same(path) else "wrong", [one["from"] for one in report.fallbacks]
    except penstock.PenstockError as error:
        return type(error).__name__, str(error)
"""
    program = [sys.executable, "-c", head + textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(
        ["unshare", "-m", *program],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": HERE},
    )
    if done.returncode == 1 and "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return done


@root
@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("content", ["empty", "old"])
def test_a_mounted_file_is_written_if_it_is_empty(tmp_path: Path, content: str, fsync: bool):
    """docker -v FILE and Kubernetes' subPath: no file can take the name of a mounted one."""
    for name in ("host", "inside"):
        (tmp_path / name).mkdir()
    (tmp_path / "host/m.safetensors").write_bytes(b"" if content == "empty" else b"old")
    (tmp_path / "inside/m.safetensors").touch()
    code = """
    folder, fsync = Path(sys.argv[1]), sys.argv[2] == "True"
    mount("--bind", folder / "host/m.safetensors", folder / "inside/m.safetensors")
    print(json.dumps(attempt(folder / "inside/m.safetensors", fsync)))
    """
    what, told = json.loads(alone(code, tmp_path, fsync).stdout)
    assert [path.name for path in (tmp_path / "inside").iterdir()] == ["m.safetensors"]
    assert (tmp_path / "inside/m.safetensors").stat().st_size == 0
    if content == "empty":
        assert (what, told) == ("saved", ["rename"])
        same(tmp_path / "host/m.safetensors", {name: NEW[name] for name in "ab"})
    else:
        assert what == "WriteError" and "rename" in told and "mount its folder" in told, told
        assert (tmp_path / "host/m.safetensors").read_bytes() == b"old"


@root
def test_a_mounted_file_that_was_emptied_and_one_whose_folder_is_mounted_are_saved(tmp_path: Path):
    """The ways out that the error names."""
    for name in ("host", "inside", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "host/m.safetensors").write_bytes(b"old")
    (tmp_path / "inside/m.safetensors").touch()
    code = """
    folder = Path(sys.argv[1])
    mount("--bind", folder / "host", folder / "folder")
    print(attempt(folder / "folder/m.safetensors", True)[0])
    (folder / "host/m.safetensors").write_bytes(b"old")
    mount("--bind", folder / "host/m.safetensors", folder / "inside/m.safetensors")
    print(attempt(folder / "inside/m.safetensors", True)[0])
    subprocess.run(["truncate", "-s", "0", folder / "inside/m.safetensors"], check=True)
    print(attempt(folder / "inside/m.safetensors", True)[0])
    """
    assert alone(code, tmp_path).stdout.split() == ["saved", "WriteError", "saved"]


@root
@pytest.mark.parametrize("how", ["read-only", "another user", "no permission"])
@pytest.mark.parametrize("content", ["none", "empty", "old"])
def test_a_writable_file_in_a_folder_that_is_not(tmp_path: Path, how: str, content: str):
    folder = tmp_path / "folder"
    folder.mkdir()
    for above in (tmp_path, *tmp_path.parents[:3]):
        above.chmod(above.stat().st_mode | 0o055)
    path = folder / "m.safetensors"
    if content != "none":
        path.write_bytes(b"" if content == "empty" else b"old")
        path.chmod(0o666)
    if how == "no permission":
        os.chown(folder, 65534, 65534)
        folder.chmod(0o555)
    code = """
    path, how, there = Path(sys.argv[1]), sys.argv[2], sys.argv[3] != "none"
    if how == "read-only":
        mount("-o", "bind,ro", path.parent, path.parent)
        if there:
            mount("--bind", path, path)
            mount("-o", "remount,bind,rw", path)
    else:
        os.setgid(65534)
        os.setuid(65534)
    print(json.dumps(attempt(path, True)))
    """
    what, told = json.loads(alone(code, path, how, content).stdout)
    if content == "empty":
        assert what == "saved", told
        same(path, {name: NEW[name] for name in "ab"})
    else:
        assert what in ("AccessError", "WriteError"), told
        call = "rename" if how == "read-only" and content == "old" else "open"
        assert f"({call})" in told and str(path) in told, told
        assert "another folder" in told or "its folder" in told, told
        assert content == "none" or path.read_bytes() == b"old"
    assert [path.name for path in folder.iterdir()] == ([] if content == "none" else ["m.safetensors"])


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM", "EXDEV", "EIO"])
@pytest.mark.parametrize("old", [True, False])
def test_where_a_sandbox_refuses_rename_a_second_name_does(tmp_path: Path, python: Any, error: str, old: bool):
    """A file system that renames, and a filter of system calls that does not let it."""
    code = """
import errno, os, sys, numpy as np, penstock, refusals
path, error, old = sys.argv[1], getattr(errno, sys.argv[2]), sys.argv[3] == "True"
if old:
    penstock.save_file({"a": np.ones(3, "f4")}, path)
refusals.refuse(*(refusals.Refusal(call, error) for call in ("rename", "renameat", "renameat2")))
try:
    penstock.save_file({"a": np.zeros(3, "f4")}, path)
except penstock.PenstockError as caught:
    print("(rename)" in str(caught), end=" ")
print(penstock.open(path).load(framework="np")["a"].sum().item(), os.listdir(os.path.dirname(path)))
"""
    done = python(code, tmp_path / "m.safetensors", error, old, PYTHONPATH=HERE)
    expected = "True 3.0 ['m.safetensors']" if old else "0.0 ['m.safetensors']"
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize("error", ["ENOSYS", "EINVAL", "EPERM"])
@pytest.mark.parametrize("call", ["ftruncate", "fsync"])
def test_where_a_sandbox_refuses_it_the_save_goes_on_without(tmp_path: Path, python: Any, call: str, error: str):
    code = """
import errno, os, sys, numpy as np, penstock, refusals
refusals.refuse(refusals.Refusal(sys.argv[2], getattr(errno, sys.argv[3])))
try:
    report = penstock.save_file({"a": np.arange(1 << 20)}, sys.argv[1])
    same = np.array_equal(penstock.open(sys.argv[1]).load(framework="np")["a"], np.arange(1 << 20))
    print(same, [(one["from"], sys.argv[1] in one["reason"]) for one in report.fallbacks])
except penstock.PenstockError as caught:
    print(type(caught).__name__, "fsync" in str(caught))
print(os.listdir(os.path.dirname(sys.argv[1])))
"""
    done = python(code, tmp_path / "m.safetensors", call, error, PYTHONPATH=HERE)
    expected = {
        "ftruncate": "True [('O_DIRECT', True)]",
        "fsync": "True [('fsync', True), ('fsync of the directory', False)]",
    }[call]
    if (call, error) == ("fsync", "EPERM"):  # not what a file system says that knows no fsync
        assert done.stdout.split("\n")[:2] == ["AccessError True", "[]"], done.stderr
    else:
        assert done.stdout.split("\n")[:2] == [expected, "['m.safetensors']"], done.stderr


@fuse
def test_bytes_go_to_such_a_file_system_in_order_and_several_files_side_by_side(tmp_path: Path):
    many = {f"w{i}": np.full(1 << 18, i, "f4") for i in range(24)}
    with refusing_fs.mounted(tmp_path, sequential=True) as fs:
        report = penstock.save(many, fs.path, max_shard_size=4 << 20, options={"extent": 1 << 20, "threads": 8})
        same(tmp_path, many)
        assert len(report.files) == 7
        assert report.threads > 1


@fuse
def test_a_mount_that_ends_in_the_middle_is_an_error(tmp_path: Path):
    how = {"refuse": {"write": errno.ENOTCONN}, "after": {"write": 3}}
    with refusing_fs.mounted(tmp_path, **how) as fs, pytest.raises(penstock.WriteError, match="Transport endpoint"):
        penstock.save_file(NEW, fs.path / "m.safetensors")
    assert not list(tmp_path.iterdir())


assert slow_fs  # named in a condition above
