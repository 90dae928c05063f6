"""What the disk cache has whole of a repository of the Hub is in huggingface_hub's cache too, under its names: either
program finds what the other one fetched."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ordeal
import penstock
import pytest
from conftest import LAYOUT, Oracle
from disk_caches import NOBODY, as_root, files, finished, open_to_all, settings, small_disk, user
from ordeal import await_line, begin, finish
from penstock import _hub_network
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from test_hub_network import COMMIT, GOOD, INDEX, OTHER, Hub, home, hub  # noqa: F401

MIB = 1 << 20
NAMES = [INDEX, *LAYOUT.files]

#: A program with huggingface_hub, which is asked for what it finds offline.
OFFLINE = """
import json, os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
import huggingface_hub as hub
name, files = sys.argv[1], sys.argv[2:]
found = [hub.hf_hub_download(name, file) for file in files]
snapshot = hub.snapshot_download(name)
info = hub.scan_cache_dir()
print(json.dumps({"files": found, "snapshot": snapshot, "warnings": [str(w) for w in info.warnings],
                  "unfinished": len(getattr(info, "incomplete_files", ())),
                  "repositories": [[repo.repo_id, repo.nb_files, repo.size_on_disk] for repo in info.repos]}))
"""
DOWNLOAD = "import sys, huggingface_hub; print(huggingface_hub.snapshot_download(sys.argv[1]))"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def offline(python):
    """What huggingface_hub finds offline."""
    pytest.importorskip("huggingface_hub")

    def ask(name: str, *names: str) -> dict[str, Any]:
        done = python(OFFLINE, name, *names)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    return ask


def root(home: Path, name: str = "org/name") -> Path:  # noqa: F811
    return home / "hub" / f"models--{name.replace('/', '--')}"


def pointer(home: Path, name: str, commit: str = COMMIT, repository: str = "org/name") -> Path:  # noqa: F811
    return root(home, repository) / "snapshots" / commit / name


def loaded(source: str, cache: Path, **more: Any) -> tuple[dict[str, Any], Any]:
    """A load, and the work of the disk cache when that has ended; None if all was in the Hub's cache."""
    checkpoint = penstock.open(source, storage=settings(cache, **more))
    tensors = checkpoint.load(framework="pt")
    report = checkpoint.last_report
    assert report is not None
    return tensors, report.disk_cache and finished(report)


def right(home: Path) -> int:  # noqa: F811
    """Asserts that each blob is what its name says, and that links lead to blobs. Returns how many blobs there are."""
    count = 0
    for blob in (home / "hub").glob("*/blobs/*"):
        if blob.name.endswith(".incomplete"):
            continue
        content = blob.read_bytes()
        named = hashlib.sha256(content) if len(blob.name) == 64 else hashlib.sha1(b"blob %d\0" % len(content) + content)
        if named.hexdigest() != blob.name:
            raise ordeal.Wrong(f"{blob} has other bytes")
        count += 1
    for path in (home / "hub").glob("*/snapshots/*/**/*"):
        assert path.exists(), f"{path} leads to nothing"
    return count


# Either finds what the other one fetched


def test_huggingface_hub_opens_offline_what_a_load_received(hub, home, small, cache, offline, monkeypatch):  # noqa: F811
    tensors, work = loaded("hf://org/name", cache)
    Oracle(small).same(tensors)
    assert work.reason == "", work
    found = offline("org/name", *NAMES)
    for path, name in zip(found["files"], NAMES, strict=True):
        assert Path(path).read_bytes() == (small / name).read_bytes()
        assert str(Path(path).readlink()) == f"../../blobs/{Path(path).resolve().name}"
    size = sum((small / name).stat().st_size for name in NAMES)
    assert found["snapshot"] == str(pointer(home, ""))
    assert (found["warnings"], found["unfinished"]) == ([], 0)
    assert found["repositories"] == [["org/name", len(NAMES), size]]
    assert (root(home) / "refs" / "main").read_text() == COMMIT
    assert right(home) == len(NAMES)
    # On the disk it is once, and the cache gives its files the mode of the Hub's
    for name in LAYOUT.files:
        assert pointer(home, name).stat().st_ino in {path.stat().st_ino for path in files(cache, ".data")}
    umask = os.umask(0o022)
    os.umask(umask)
    assert pointer(home, NAMES[1]).stat().st_mode & 0o777 == 0o666 & ~umask & ~0o022
    # The next open asks the Hub for the commit, and for nothing else
    hub.forget()
    again = penstock.open("hf://org/name", storage=settings(cache))
    assert all(file.startswith(str(home)) for file in again.files)
    assert hub.counts() == {"api": 1, "resolve": 0, "storage": 0}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Oracle(small).same(penstock.open("org/name", storage=settings(cache)).load(framework="pt"))
    assert hub.counts()["api"] == 1


def test_a_load_opens_what_huggingface_hub_fetched(hub, home, small, cache, python):  # noqa: F811
    pytest.importorskip("huggingface_hub")
    assert python(DOWNLOAD, "org/name").returncode == 0
    hub.forget()
    checkpoint = penstock.open("org/name", storage=settings(cache))
    Oracle(small).same(checkpoint.load(framework="pt"))
    assert hub.counts() == {"api": 1, "resolve": 0, "storage": 0}
    assert not cache.exists()


def test_a_pull_brings_the_small_files_too_and_waits_for_all(hub, home, small, cache, offline, tmp_path, python):  # noqa: F811
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    for name in ("config.json", "tokenizer.json"):
        hub.add("org/name", tmp_path / name)
    done = python(
        "import sys; from penstock import cli; sys.exit(cli.main(sys.argv[1:]))",
        *("pull", "hf://org/name", "--storage", f"disk_cache={cache}", "--storage", "disk_cache_free=0"),
    )
    assert done.returncode == 0, done.stderr
    found = offline("org/name", "config.json", "tokenizer.json", *NAMES)
    assert (found["warnings"], found["unfinished"], right(home)) == ([], 0, len(NAMES) + 2)
    assert Path(found["files"][0]).read_text() == '{"model_type": "llama"}'


def test_a_pull_leaves_what_huggingface_hub_fetched(hub, home, cache, python):  # noqa: F811
    from penstock import _pull

    pytest.importorskip("huggingface_hub")
    assert python(DOWNLOAD, "org/name").returncode == 0
    hub.forget()
    pulled = _pull.pull("hf://org/name", storage=settings(cache))
    assert sorted(file.path for file in pulled.files) == sorted(NAMES) and all(file.was_there for file in pulled.files)
    assert pulled.received_bytes == 0


def test_a_part_stays_in_the_disk_cache_until_the_rest_is_there(hub, home, cache, tmp_path, offline):  # noqa: F811
    hub.add("org/two", two_shards(tmp_path))
    checkpoint = penstock.open("hf://org/two", storage=settings(cache))
    checkpoint.load(framework="pt", names=["a.0"])
    work = finished(checkpoint.last_report)
    assert work.written_bytes > 0 and work.reason == ""
    assert [path.name for path in root(home, "org/two").glob("snapshots/*/*")] == [INDEX]
    _, work = loaded("hf://org/two", cache)
    assert work.cached_bytes > 0 and work.reason == ""
    found = offline("org/two", INDEX)
    assert len(list(Path(found["snapshot"]).iterdir())) == 3 and right(home) == 3


def two_shards(tmp_path: Path) -> Path:
    """A folder with two shards of 6 MB, and their index."""
    (tmp_path / "two").mkdir()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weights = {}
    for name, letter in zip(names, "ab", strict=True):
        tensors = [Tensor(f"{letter}.{i}", "F32", (500_000,)) for i in range(3)]
        synth.write_file(tmp_path / "two" / name, tensors)
        weights |= {tensor.name: name for tensor in tensors}
    (tmp_path / "two" / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return tmp_path / "two"


def test_what_the_disk_cache_has_from_before_goes_there_without_the_server(hub, home, cache, small):  # noqa: F811
    loaded("hf://org/name", cache)
    shutil.rmtree(home)
    hub.forget()
    tensors, work = loaded("hf://org/name", cache)
    Oracle(small).same(tensors)
    assert hub.counts()["storage"] == len(LAYOUT.files)  # a byte of each, for its version
    assert work.reason == "" and right(home) == len(NAMES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("round", range(3))
def test_both_at_once_on_one_repository(hub, home, cache, tmp_path, offline, round):  # noqa: F811
    hub.add("org/two", two_shards(tmp_path))
    pytest.importorskip("huggingface_hub")
    theirs = [
        subprocess.Popen([sys.executable, "-c", DOWNLOAD, "org/two"], stdout=subprocess.DEVNULL) for _ in range(2)
    ]
    try:
        for _ in range(4):
            tensors, _ = loaded("hf://org/two", cache)
            assert len(tensors) == 6
    finally:
        assert [one.wait(60 * ordeal.load_factor()) for one in theirs] == [0, 0]
    tensors, _ = loaded("hf://org/two", cache)
    Oracle(tmp_path / "two").same(tensors)
    found = offline("org/two", INDEX)
    assert (found["warnings"], found["unfinished"], right(home)) == ([], 0, 3)


# What the Hub says of now


def test_a_branch_that_has_moved_is_another_commit_for_the_next_open(hub, home, cache, tmp_path, offline):  # noqa: F811
    loaded("hf://org/name", cache)
    hub.add("org/name", two_shards(tmp_path), "main", commit=OTHER)
    checkpoint = penstock.open("org/name", storage=settings(cache))
    checkpoint.load(framework="pt", names=["a.0"])
    finished(checkpoint.last_report)
    # Offline the old one is whole, and the new one is not
    assert sorted(path.name for path in pointer(home, "", OTHER).iterdir()) == [INDEX]
    tensors, _ = loaded("org/name", cache)
    Oracle(tmp_path / "two").same(tensors)
    assert (root(home) / "refs" / "main").read_text() == OTHER
    assert offline("org/name", INDEX)["warnings"] == []


def test_the_hub_is_asked_with_this_token_also_for_what_is_there(hub, home, small, cache, monkeypatch):  # noqa: F811
    hub.add("org/private", small, private=True)
    monkeypatch.setenv("HF_TOKEN", GOOD)
    loaded("hf://org/private", cache)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(penstock.NotFoundError, match=r"or it is private.*HF_HUB_OFFLINE=1 asks nobody"):
        penstock.open("hf://org/private", storage=settings(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(penstock.open("hf://org/private", storage=settings(cache))) == len(LAYOUT.tensors)


def test_a_hub_that_cannot_be_reached_costs_the_question_only(hub, home, small, cache, monkeypatch, caplog):  # noqa: F811
    loaded("hf://org/name", cache)
    hub.close()
    monkeypatch.setattr(_hub_network, "_FIRST_PAUSE", 0.01)
    with caplog.at_level(logging.WARNING, "penstock"):
        checkpoint = penstock.open("hf://org/name", storage=settings(cache))
    assert f"is commit {COMMIT} of the local Hub cache" in caplog.text
    Oracle(small).same(checkpoint.load(framework="pt"))
    assert len(penstock.open("hf://org/name", storage=settings(cache, offline=True))) == len(LAYOUT.tensors)
    with pytest.raises(penstock.NotFoundError, match="no such repository in the local Hub cache"):
        penstock.open("hf://org/other", storage=settings(cache, offline=True))


def test_offline_asks_the_hub_nothing(hub, cache):  # noqa: F811
    with pytest.raises(penstock.NotFoundError):
        penstock.open("hf://org/name", storage=settings(cache, offline=True))
    assert hub.asked() == []


# Nothing else gets a name there


def test_bytes_with_another_sha256_are_told_and_kept_nowhere(hub, home, small, cache):  # noqa: F811
    wrong = LAYOUT.files[1]
    hub.set(digests={wrong: "0" * 64})
    for _ in range(2):
        hub.forget()
        tensors, work = loaded("hf://org/name", cache)
        Oracle(small).same(tensors)
        assert wrong in work.reason and "the server sent other bytes than the Hub names" in work.reason
        assert sorted(path.name for path in pointer(home, "").iterdir()) == sorted({*NAMES} - {wrong})
        # The disk cache has it no more: it is received each time
        assert any(line["Range"] for line in hub.asked("storage"))
    hub.set(digests={})
    _, work = loaded("hf://org/name", cache)
    assert work.reason == "" and right(home) == len(NAMES)


def test_a_pull_of_bytes_with_another_sha256_fails(hub, home, cache, monkeypatch):  # noqa: F811
    from penstock import _pull

    hub.set(digests={LAYOUT.files[1]: "0" * 64})
    with pytest.raises(penstock.LimitError, match="the server sent other bytes than the Hub names"):
        _pull.pull("hf://org/name", storage=settings(cache))
    assert not pointer(home, LAYOUT.files[1]).exists()


def test_without_symbolic_links_the_files_themselves_are_in_the_snapshot(hub, home, cache, offline, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_HUB_DISABLE_SYMLINKS", "1")
    _, work = loaded("hf://org/name", cache)
    assert work.reason == ""
    for name in NAMES:
        path = pointer(home, name)
        assert path.is_file() and not path.is_symlink()
    found = offline("org/name", *NAMES)
    assert (found["warnings"], found["unfinished"]) == ([], 0)


def test_a_link_to_nothing_is_mended(hub, home, small, cache, offline):  # noqa: F811
    loaded("hf://org/name", cache)
    blob = pointer(home, LAYOUT.files[0]).resolve()
    blob.unlink()
    tensors, work = loaded("hf://org/name", cache)
    Oracle(small).same(tensors)
    assert work.reason == "" and blob.exists() and offline("org/name")["warnings"] == []


def test_a_blob_that_huggingface_hub_is_fetching_is_left_to_it(hub, home, cache):  # noqa: F811
    import fcntl

    digest = hashlib.sha256((hub.folder / "org/name" / COMMIT / LAYOUT.files[0]).read_bytes()).hexdigest()
    lock = home / "hub" / ".locks" / "models--org--name" / f"{digest}.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        _, work = loaded("hf://org/name", cache)
    assert "huggingface_hub holds its lock" in work.reason and digest in work.reason
    assert not pointer(home, LAYOUT.files[0]).exists() and pointer(home, LAYOUT.files[1]).exists()
    loaded("hf://org/name", cache)
    assert pointer(home, LAYOUT.files[0]).exists()


# Folders that take nothing


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder on another file system than that of the tests."""
    if Path("/dev/shm").stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("/dev/shm is on the file system of the tests")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        yield Path(place)


def test_on_another_file_system_there_is_a_copy(hub, small, cache, elsewhere, offline, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_HOME", str(elsewhere))
    _, work = loaded("hf://org/name", cache)
    assert work.reason == "" and right(elsewhere) == len(NAMES)
    for name in NAMES:
        assert pointer(elsewhere, name).stat().st_dev != cache.stat().st_dev
    found = offline("org/name", *NAMES)
    assert (found["warnings"], found["unfinished"]) == ([], 0)


@as_root
def test_a_full_disk_costs_the_copy_and_not_the_load(hub, small, cache, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_HOME", str(tmp_path / "full"))
    hub.add("org/two", two_shards(tmp_path))
    with small_disk(tmp_path / "full", 4 * MIB):
        tensors, work = loaded("hf://org/two", cache)
        Oracle(tmp_path / "two").same(tensors)
        assert "a copy would leave less than 10% of that, or 20 GiB, free" in work.reason
        assert right(tmp_path / "full") == 1  # the index
        # Full in the middle: something else takes the room
        (tmp_path / "full" / "other").write_bytes(bytes(3 * MIB))
        shutil.rmtree(root(tmp_path / "full", "org/two"))
        _, work = loaded("hf://org/name", cache)
        right(tmp_path / "full")


@as_root
def test_a_folder_that_cannot_be_written_costs_the_name_and_not_the_load(hub, small, monkeypatch):  # noqa: F811
    with open_to_all() as place:
        (place / "home").mkdir(mode=0o755)
        monkeypatch.setenv("HF_HOME", str(place / "home"))
        (place / "own").mkdir()
        os.chown(place / "own", NOBODY, NOBODY)
        with user(NOBODY):
            tensors, work = loaded("hf://org/name", place / "own" / "cache")
        Oracle(small).same(tensors)
        assert "cannot make the folder" in work.reason and "not in the Hub's cache" in work.reason
        assert list((place / "home").iterdir()) == []


@as_root
def test_nothing_is_written_to_a_folder_of_another_user(hub, home, small, cache):  # noqa: F811
    root(home).mkdir(parents=True)
    os.chown(root(home), NOBODY, NOBODY)
    tensors, work = loaded("hf://org/name", cache)
    Oracle(small).same(tensors)
    assert f"it belongs to another user ({NOBODY})" in work.reason
    assert list(root(home).iterdir()) == []


def test_a_cache_of_several_users_gives_no_file_away(hub, home, small, cache):  # noqa: F811
    cache.mkdir()
    cache.chmod(0o2770)
    tensors, work = loaded("hf://org/name", cache, disk_cache_shared=True)
    Oracle(small).same(tensors)
    assert "several users share the disk cache" in work.reason and right(home) == 0


# Processes that end

PULL = """
import sys
from penstock import _pull
print("begun", flush=True)
_pull.pull(sys.argv[1], storage={"disk_cache": sys.argv[2], "disk_cache_free": 0})
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wait", [0.02 * number for number in range(12)])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_process_that_is_killed_leaves_no_half_file(request, cache, tmp_path, wait, where, offline, monkeypatch):
    hub = request.getfixturevalue("hub")  # noqa: F811
    at = request.getfixturevalue("home" if where == "here" else "elsewhere")
    monkeypatch.setenv("HF_HOME", str(at))
    hub.add("org/two", two_shards(tmp_path))
    loaded("hf://org/two", cache)
    shutil.rmtree(at, ignore_errors=True)
    # The cache has all: what is killed is the way to the Hub's cache
    with begin(PULL, "hf://org/two", cache) as running:
        await_line(running, "begun")
        time.sleep(wait)
        running.kill()
        running.wait()
    right(at)
    _, work = loaded("hf://org/two", cache)
    assert (work is None or work.reason == "") and right(at) == 3  # None: it was done before
    assert offline("org/two", INDEX)["warnings"] == []


INTERRUPTED = """
import sys, penstock
checkpoint = penstock.open(sys.argv[1], storage={"disk_cache": sys.argv[2], "disk_cache_free": 0})
checkpoint.load(framework="pt")
try:
    print("loaded", flush=True)
    while True:
        checkpoint.last_report.disk_cache.wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    assert checkpoint.last_report.disk_cache.wait(60)
"""


def test_ctrl_c_ends_the_wait_and_not_the_work(hub, home, cache, tmp_path):  # noqa: F811
    hub.add("org/two", two_shards(tmp_path))
    with begin(INTERRUPTED, "hf://org/two", cache) as running:
        await_line(running, "loaded")
        ordeal.interrupt(running, 10)
        assert finish(running, 60)[0] == 0
    assert right(home) == 3


def test_quiesce_ends_the_work(hub, home, cache, small):  # noqa: F811
    checkpoint = penstock.open("hf://org/name", storage=settings(cache))
    tensors = checkpoint.load(framework="pt")
    patience = 10 * ordeal.load_factor()
    penstock.quiesce(timeout=patience)
    assert checkpoint.last_report.disk_cache.wait(patience)
    right(home)
    Oracle(small).same(tensors)


# What the cache counts


def test_the_cache_counts_nothing_that_the_hub_keeps_and_removes_nothing_of_it(hub, home, cache, small, capsys):  # noqa: F811
    from penstock import cli

    loaded("hf://org/name", cache)
    blobs = {path: path.stat().st_size for path in root(home).glob("blobs/*")}
    assert cli.main(["cache", "ls", "--disk-cache", str(cache), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(entry["linked"] and entry["disk"] == 0 for entry in found["entries"])
    # Its most bytes are free for others, and what goes out of it stays there
    assert loaded("hf://org/name", cache, disk_cache_size=8 * MIB)[1] is None
    assert cli.main(["cache", "prune", "--all", "--disk-cache", str(cache)]) == 0
    assert files(cache, ".data") == [] and {path: path.stat().st_size for path in blobs} == blobs
    assert right(home) == len(NAMES)
