"""Checkpoints in a real S3 server: versitygw, with and without TLS. `make test-servers` builds it and runs this."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import certificates
import fakegpu
import numpy as np
import object_stores as stores
import penstock
import pytest
from conftest import LAYOUT, Oracle, raw
from penstock import _core
from readers_beside_saves import each_read_is_one_version
from saving_costs import MIB, bounded, saved
from versitygw import SECRET, Server

torch = pytest.importorskip("torch")

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", params=["http", "https"])
def server(tmp_path_factory, small, big, request) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("versitygw")
    certificate = certificates.made(tmp_path_factory.mktemp("authority")) if request.param == "https" else ()
    server = Server(folder, *certificate)
    try:
        for path in small.iterdir():
            server.put(f"small/{path.name}", path.read_bytes())
        for name in LAYOUT.files:
            server.put(f"no index/{name}", (small / name).read_bytes())
        server.put("big.safetensors", big.read_bytes())
        yield server
    finally:
        server.close()


@pytest.mark.parametrize(
    "source",
    ["s3://models/small/", "s3://models/small", f"s3://models/small/{INDEX}", "s3://models/no index/",
     [f"s3://models/no index/{name}" for name in LAYOUT.files]],
    ids=str,
)  # fmt: skip
def test_loads(server, small, source):
    checkpoint = penstock.open(source, storage=server.storage())
    Oracle(small).same(checkpoint.load(framework="pt"))
    Oracle(small).same(dict(checkpoint.stream(framework="pt")))


def test_many_requests(server, big):
    checkpoint = penstock.open("s3://models/big.safetensors", storage=server.storage())
    Oracle(big).same(checkpoint.load(framework="pt", options={"extent": 1 << 20}))


def test_a_bucket_with_more_names_than_a_page(server, small):
    name = LAYOUT.files[0]
    for number in range(1005):
        server.put(f"many/{number:04}.txt", b"")
    server.put(f"many/{name}", (small / name).read_bytes())
    Oracle(small / name).same(penstock.open("s3://models/many/", storage=server.storage()).load(framework="np"))


def test_slices_and_tensors_that_exist(server, small):
    oracle = Oracle(small)
    checkpoint = penstock.open("s3://models/small/", storage=server.storage())
    into = {name: torch.zeros(oracle.shape(name), dtype=tensor.dtype) for name, tensor in checkpoint.load().items()}
    checkpoint.load_into(into)
    assert {name: raw(tensor) for name, tensor in into.items()} == {name: oracle[name] for name in oracle.entries}
    part = checkpoint.load(slices={"layers.0.attn.weight": np.s_[3:7, 5:]}, names=["layers.0.attn.weight"])
    whole = np.frombuffer(oracle["layers.0.attn.weight"], np.float32).reshape(48, 40)
    assert raw(part["layers.0.attn.weight"]) == whole[3:7, 5:].tobytes()
    with penstock.safe_open(f"s3://models/small/{LAYOUT.files[0]}", "np", storage=server.storage()) as opened:
        assert raw(opened.get_tensor("layers.0.attn.weight")) == whole.tobytes()


def test_keys_with_odd_letters(server, small):
    for odd in ("a b", "\u00e4#?&=+%41", "$!'()*,;:@|^`{}~"):
        server.put(f"{odd}/x.safetensors", (small / LAYOUT.files[0]).read_bytes())
        checkpoint = penstock.open(f"s3://models/{odd}/x.safetensors", storage=server.storage())
        Oracle(small / LAYOUT.files[0]).same(checkpoint.load(framework="np"))


ERRORS: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "no key": ("s3://models/none.safetensors", {}, penstock.NotFoundError, "NoSuchKey"),
    "no prefix": ("s3://models/none/", {}, penstock.NotFoundError, "no object whose key begins"),
    "no bucket": ("s3://nobody/x.safetensors", {}, penstock.NotFoundError, "NoSuchBucket"),
    "no bucket to list": ("s3://nobody/x/", {}, penstock.NotFoundError, "NoSuchBucket"),
    "wrong secret": ("s3://models/small/", {"secret_access_key": "x"}, penstock.AccessError, "SignatureDoesNotMatch"),
    "wrong secret of a file": (
        "s3://models/big.safetensors",
        {"secret_access_key": "x"},
        penstock.AccessError,
        "SignatureDoesNotMatch",
    ),
    "not signed": (
        "s3://models/big.safetensors",
        {"anonymous": True, "access_key_id": None, "secret_access_key": None},
        penstock.AccessError,
        "AccessDenied.*was not signed",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors(server, what):
    source, more, kind, says = ERRORS[what]
    with pytest.raises(kind, match=says) as caught:
        penstock.open(source, storage=server.storage(**more))
    assert SECRET not in repr(caught.value)


def test_a_wrong_region_is_corrected(server, small):
    for source in ("s3://models/small/", f"s3://models/small/{INDEX}"):
        checkpoint = penstock.open(source, storage=server.storage(region="us-west-9"))
        Oracle(small).same(checkpoint.load(framework="np"))


def test_an_object_that_is_replaced_is_changed(server, small):
    content = (small / LAYOUT.files[0]).read_bytes()
    server.put("replaced.safetensors", content)
    checkpoint = penstock.open("s3://models/replaced.safetensors", storage=server.storage())
    server.put("replaced.safetensors", content[:-1] + b"?")
    with pytest.raises(penstock.ChangedError):
        checkpoint.load(framework="np")


def test_only_an_authority_that_is_named_is_trusted(server):
    if not server.authority:
        pytest.skip("there is no TLS")
    for source in ("s3://models/big.safetensors", "s3://models/small/"):  # read, and listed
        with pytest.raises(penstock.ReadError, match="certificate is not trusted"):
            penstock.open(source, storage=server.storage(ca=None))


def test_small_files(server):
    server.put("small files/config.json", b"{}")
    server.put("small files/empty.txt", b"")
    server.put("small files/folder/other.json", b"[]")
    folder, storage = "s3://models/small files/", server.storage()
    names = _core.names_in(folder, None, storage)
    assert sorted(names) == ["config.json", "empty.txt"]
    assert _core.contents([folder + name for name in sorted(names)], 2, None, storage) == [b"{}", b""]


def test_what_is_saved_comes_back(server, tmp_path):
    data = server.data / "models/saved"
    stores.what_is_saved_comes_back(
        "s3://models/saved", server.storage(), tmp_path, lambda name: (data / name).read_bytes()
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("saves", [20, 200])
def test_each_read_beside_saves_is_one_version_or_says_that_it_changed(server, saves):
    found = each_read_is_one_version(f"s3://models/read {saves}", server.storage(), saves)
    assert found["whole"] >= saves / 20, found


@pytest.mark.parametrize("kind", ["in order", "packed", "gpu"])
def test_a_save_takes_staging_memory_and_little_more(server, tmp_path, kind):
    if kind == "gpu" and not fakegpu.LIBRARY:
        pytest.skip(fakegpu.NO_LIBRARY)
    try:
        found = saved(kind, "s3://models/memory", server.storage(), {}, tmp_path)
        assert found["file_bytes"] == (server.data / "models/memory/model.safetensors").stat().st_size
        bounded(found, 256 * MIB)
    finally:
        shutil.rmtree(server.data / "models/memory", ignore_errors=True)


def test_a_checkpoint_that_was_saved_meanwhile_stays(server):
    stores.a_checkpoint_that_was_saved_meanwhile_stays("s3://models/saved twice", server.storage())


def test_what_is_pushed_comes_back(server, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_STATE_FOLDER", str(tmp_path / "state"))
    data = server.data / "models/pushed"
    stores.what_is_pushed_comes_back(
        "s3://models/pushed", server.storage(), tmp_path, lambda name: (data / name).read_bytes()
    )


def test_what_a_killed_push_has_left_is_cleared_when_pushed_again(server, tmp_path):
    data, uploads = server.data / "models/killed-pushed", server.data / "models/.sgwtmp/multipart"
    stores.what_a_killed_push_has_left_is_cleared(
        "s3://models/killed-pushed",
        server.storage(),
        tmp_path,
        lambda: {path.name for path in data.iterdir()},
        lambda: sum(path.is_dir() for path in uploads.glob("*/*")) if uploads.is_dir() else 0,
    )
