"""What holds for every object store, whatever its protocol: the tests of each call it with a server of theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
from conftest import LAYOUT, Oracle
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
