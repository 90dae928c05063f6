"""What holds for every object store, whatever its protocol: the tests of each call it with a server of theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
from conftest import LAYOUT, Oracle
from penstock import _journal
from penstock._push import push
from s3_server import Bucket


def a_folder_is_listed_page_by_page_and_loaded(bucket: Bucket, small: Path, scheme: str, storage: Any) -> None:
    bucket.objects |= {"m/": b"", "m/other/x.safetensors": b"", "m/README.md": b"", "mm": b""}
    del bucket.objects["m/model.safetensors.index.json"]
    for address in (f"{scheme}://bucket/m/", f"{scheme}://bucket/m", f"{scheme.upper()}://bucket/m"):
        checkpoint = penstock.open(address, storage=storage)
        assert [Path(file).name for file in checkpoint.files] == LAYOUT.files
    Oracle(small).same(checkpoint.load(framework="np"))
    assert bucket.listings == 3 * 3
    report = checkpoint.last_report
    assert {lane for lane, way in report.routes.items() if way["bytes"]} == {"network"}
    assert report.routes["network"]["bytes"] == report.nbytes + report.gap_bytes


def an_index_and_files_need_no_listing(bucket: Bucket, small: Path, scheme: str, storage: Any) -> None:
    folder = f"{scheme}://bucket/m/"
    for source in (f"{folder}model.safetensors.index.json", [f"{folder}{name}" for name in LAYOUT.files]):
        checkpoint = penstock.open(source, storage=storage)
        Oracle(small).same(checkpoint.load(framework="np"))
    part = checkpoint.load(slices={"layers.0.attn.weight": np.s_[3:7, 5:]}, names=["layers.0.attn.weight"])
    whole = np.frombuffer(Oracle(small)["layers.0.attn.weight"], np.float32).reshape(48, 40)
    assert np.asarray(part["layers.0.attn.weight"]).tobytes() == whole[3:7, 5:].tobytes()
    assert bucket.listings == 0


def keys_may_have_odd_letters(bucket: Bucket, small: Path, scheme: str, storage: Any) -> None:
    name = LAYOUT.files[0]
    for odd in ("a b", "ä#?&=+%41", "x//y", "$!'()*,;:@|^`{}~"):
        bucket.objects[f"{odd}/{name}"] = bucket.objects[f"m/{name}"]
        checkpoint = penstock.open(f"{scheme}://bucket/{odd}/{name}", storage=storage)
        Oracle(small / name).same(checkpoint.load(framework="np"))
    for rest in ("bucket/a/../b.safetensors", "bu cket/x.safetensors", "/x.safetensors"):
        with pytest.raises(penstock.InvalidError):
            penstock.open(f"{scheme}://{rest}", storage=storage)


def an_object_that_is_replaced_is_changed(bucket: Bucket, scheme: str, storage: Any) -> None:
    checkpoint = penstock.open(f"{scheme}://bucket/m/", storage=storage)
    name = f"m/{LAYOUT.files[1]}"
    bucket.objects[name] = bucket.objects[name][:-1] + b"?"
    with pytest.raises(penstock.ChangedError) as caught:
        checkpoint.load(framework="np")
    assert caught.value.path == f"{scheme}://bucket/{name}"


def an_expired_credential_is_renewed_once(
    bucket: Bucket, big: Path, folder: str, storage: Any, first: str, others: set[str], says: str
) -> None:
    """The ``first`` credential expires in a load, and then all ``others``: ``says`` is in the refusal."""
    bucket.objects = {"m/model.safetensors": big.read_bytes()}
    checkpoint = penstock.open(folder, storage=storage)
    assert bucket.credentials == 1
    bucket.expired = {first}
    options: Any = {"extent": 1 << 20, "staging": 16 << 20}
    Oracle(big).same(checkpoint.load(framework="np", options=options))
    assert bucket.credentials == 2
    assert sum(key == first for _, key in bucket.asked) <= 2 + 16, "as many as there are connections"
    # One that stays refused is an error, and not asked for without end
    bucket.expired = others
    before = len(bucket.asked)
    with pytest.raises(penstock.AccessError, match=says):
        checkpoint.load(framework="np", options=options)
    # Each request asks once for another, if it has not seen the newest.
    assert bucket.credentials <= 2 + 16 and len(bucket.asked) - before <= 3 * 16


def what_works_on_files_only_refuses_addresses(scheme: str, folder: Path) -> None:
    with pytest.raises(penstock.InvalidError, match=f"{scheme}:// is not supported here"):
        penstock.load_file(f"{scheme}://bucket/x.safetensors", options={"trace": f"{scheme}://bucket/trace.json"})
    assert list(folder.iterdir()) == []


def what_is_saved_comes_back(place: str, storage: Any, folder: Path, read: Callable[[str], bytes]) -> None:
    """Saves under ``place``, read back by Penstock, and by ``read``: another client, asked by an object's name."""
    random = np.random.default_rng(7)
    states = [{f"w{i}": random.integers(0, 255, 9_000_000 + i, np.uint8) for i in range(4)} for _ in range(2)]

    def same(state: dict[str, Any]) -> None:
        found = penstock.open(f"{place}/", storage=storage).load(framework="np")
        assert found.keys() == state.keys() and all((found[name] == state[name]).all() for name in state)

    for most in (None, "20MB", "20MB", None):
        state = states[most is None]
        report = penstock.save(state, place, max_shard_size=most, storage=storage)
        same(state)
        assert len(report.files) == (1 if most is None else 3) and report.file_bytes > 36_000_000
        penstock.save(state, folder, max_shard_size=most)
        ours = sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors")
        theirs = sorted(name for name in report.files if name.endswith(".safetensors"))
        assert [(folder / name).read_bytes() for name in ours] == [read(name) for name in theirs]
    at = f"{place}/a b/one.safetensors"
    penstock.save_file({"x": np.arange(10)}, at, storage=storage)
    penstock.save_file({"x": np.arange(9)}, at, storage=storage)
    assert penstock.load_file(at, framework="np", storage=storage)["x"].tolist() == list(range(9))


def a_checkpoint_that_was_saved_meanwhile_stays(place: str, storage: Any) -> None:
    """One save runs while another one begins and ends: into a prefix that is empty, and over a checkpoint."""
    for number, most in enumerate((None, "20MB", None, "20MB")):
        # No content comes twice: for some servers it would be the same version
        states = [{"w": np.full(size, number, np.uint8), "v": np.full(9, size)} for size in (30_000_000, 1_000_000)]
        failed: list[int] = []

        def second(
            done: int, total: int, failed: list[int] = failed, most: str | None = most, state: Any = states[1]
        ) -> None:
            if not failed:
                failed.append(0)
                try:
                    penstock.save(state, place, max_shard_size=most, storage=storage)
                except penstock.ChangedError:
                    failed[0] = 2

        slow = {**storage, "bandwidth": "20MB"}
        try:
            penstock.save(states[0], place, max_shard_size=most, progress=second, storage=slow)
            assert failed == [2], "the first one was the earlier one"
            winner = states[0]
        except penstock.ChangedError:
            assert failed == [0]
            winner = states[1]
        found = penstock.open(f"{place}/", storage=storage).load(framework="np")
        assert all((found[name] == winner[name]).all() for name in winner)


def what_is_pushed_comes_back(place: str, storage: Any, folder: Path, read: Callable[[str], bytes]) -> None:
    """Pushes under ``place``, read back by ``read``: another client, asked by an object's name."""
    random = np.random.default_rng(8)
    for number, most in enumerate(("12MB", None, "12MB", "12MB")):
        source = folder / f"pushed-{number}"
        state = {f"w{i}": random.integers(0, 255, 9_000_000 + i, np.uint8) for i in range(3)}
        penstock.save(state, source, max_shard_size=most)
        (source / "config.json").write_text(json.dumps({"number": number}))
        found = push(source, place, storage=storage)
        for file in found.files:
            content = (source / file.path).read_bytes()
            assert read(file.address.removeprefix(f"{place}/")) == content or file.path.endswith(".index.json")
        back = penstock.open(f"{place}/", storage=storage).load(framework="np")
        assert all((back[name] == state[name]).all() for name in state) and back.keys() == state.keys()


def what_a_killed_push_has_left_is_cleared(
    place: str, storage: Any, folder: Path, names: Callable[[], set[str]], kept: Any = None
) -> None:
    """A push is killed in the middle, over a checkpoint; the next one to the bucket clears what it has left.

    Args:
        names: The names of all objects under ``place``.
        kept: Counts uploads that have not ended; None: the service forgets them by itself.
    """
    state = {f"w{i}": np.full(8_000_000, i, np.uint8) for i in range(3)}
    penstock.save(state, folder / "new", max_shard_size="10MB")
    penstock.save({"old": np.arange(9)}, place, storage=storage)
    # Three shards: the names of the new ones are taken, so they get the tag of the push
    old = {name: np.arange(9) for name in ("old", "more", "third")}
    penstock.save(old, place, max_shard_size=80, storage=storage)
    penstock.save({"x": np.arange(9)}, folder / "x")
    before = names()
    given = [f"--storage={name}={value}" for name, value in {**storage, "bandwidth": "6MB"}.items()]
    program = [sys.executable, "-m", "penstock.cli", "push", str(folder / "new"), place, *given]
    state_folder = folder / "state"
    process = subprocess.Popen(program, env={**os.environ, _journal.VARIABLE: str(state_folder)})
    try:
        ends = time.monotonic() + 60
        while not any(path.read_text().count("object") >= 3 for path in state_folder.rglob("*.jsonl")):
            assert process.poll() is None and time.monotonic() < ends
            time.sleep(0.01)
        running = subprocess.run(
            [sys.executable, "-m", "penstock.cli", "push", str(folder / "x"), f"{place}-beside", *given[:-1]],
            env={**os.environ, _journal.VARIABLE: str(state_folder)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "cleared" not in running.stdout, "it runs"
        assert process.poll() is None, "it is in its middle"
    finally:
        process.kill()
        process.wait()
    assert before <= names() and (kept is None or kept() > 0)
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "push", str(folder / "x"), f"{place}-beside", *given[:-1]],
        env={**os.environ, _journal.VARIABLE: str(state_folder)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "not cleared" not in done.stdout and (kept is None or "cleared an incomplete upload" in done.stdout)
    assert names() == before and (kept is None or kept() == 0) and not list(state_folder.rglob("*.*"))
    found = penstock.open(f"{place}/", storage=storage).load(framework="np")
    assert found["old"].tolist() == list(range(9))
