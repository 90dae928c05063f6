"""Checkpoints in fake-gcs-server, which speaks Google Cloud Storage's protocol. `make test-servers` builds it.

PENSTOCK_TEST_SERVERS names the folder with its binary. It asks for no token, and does not look at `If-Match`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np
import object_stores as stores
import penstock
import pytest
from conftest import LAYOUT, Oracle, raw
from penstock import _core
from real_server import RealServer, program

torch = pytest.importorskip("torch")

INDEX = "model.safetensors.index.json"
PROGRAM = program("fake-gcs-server")
if not PROGRAM.exists():
    pytest.skip("fake-gcs-server was not built: it needs Go", allow_module_level=True)


class Server(RealServer):
    """A server with one bucket, `models`, whose objects are the files of `folder`/data/models when it starts."""

    def __init__(self, folder: Path) -> None:
        rest = ["-scheme", "http", "-backend", "memory", "-data", folder / "data"]
        super().__init__(
            folder,
            lambda port: [
                PROGRAM, "-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}", *rest
            ],
        )  # fmt: skip

    def put(self, key: str, content: bytes) -> None:
        target = f"/upload/storage/v1/b/models/o?uploadType=media&name={quote(key, safe='')}"
        self.send("POST", target, content, {}, 200)

    def storage(self) -> Any:
        return {"endpoint": self.endpoint, "anonymous": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory, small, big) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fake-gcs")
    bucket = folder / "data/models"
    shutil.copytree(small, bucket / "small")
    (bucket / "no index").mkdir()
    for name in LAYOUT.files:
        shutil.copy(small / name, bucket / "no index")
    shutil.copy(big, bucket / "big.safetensors")
    server = Server(folder)
    try:
        yield server
    finally:
        server.close()


@pytest.mark.parametrize(
    "source",
    ["gs://models/small/", "gs://models/small", f"gs://models/small/{INDEX}", "gs://models/no index/",
     [f"gs://models/no index/{name}" for name in LAYOUT.files]],
    ids=str,
)  # fmt: skip
def test_loads(server, small, source):
    checkpoint = penstock.open(source, storage=server.storage())
    Oracle(small).same(checkpoint.load(framework="pt"))
    Oracle(small).same(dict(checkpoint.stream(framework="pt")))


def test_many_requests(server, big):
    checkpoint = penstock.open("gs://models/big.safetensors", storage=server.storage())
    Oracle(big).same(checkpoint.load(framework="pt", options={"extent": 1 << 20}))


def test_a_bucket_with_more_names_than_a_page(server, small):
    name = LAYOUT.files[0]
    for number in range(1005):
        server.put(f"many/{number:04}.txt", b"")
    server.put(f"many/{name}", (small / name).read_bytes())
    Oracle(small / name).same(penstock.open("gs://models/many/", storage=server.storage()).load(framework="np"))


def test_the_variable_of_the_emulator(server, small, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{server.port}")
    Oracle(small).same(penstock.open("gs://models/small/").load(framework="np"))


def test_slices(server, small):
    checkpoint = penstock.open("gs://models/small/", storage=server.storage())
    part = checkpoint.load(slices={"layers.0.attn.weight": np.s_[3:7, 5:]}, names=["layers.0.attn.weight"])
    whole = np.frombuffer(Oracle(small)["layers.0.attn.weight"], np.float32).reshape(48, 40)
    assert raw(part["layers.0.attn.weight"]) == whole[3:7, 5:].tobytes()


def test_keys_with_odd_letters(server, small):
    content = (small / LAYOUT.files[0]).read_bytes()
    for odd in ("a b", "\u00e4#?&=+%41", "$!'()*,;:@|^`{}~"):
        server.put(f"{odd}/x.safetensors", content)
        checkpoint = penstock.open(f"gs://models/{odd}/x.safetensors", storage=server.storage())
        Oracle(small / LAYOUT.files[0]).same(checkpoint.load(framework="np"))


def test_what_is_not_there(server):
    for source in ("gs://models/none.safetensors", "gs://models/none/", "gs://nobody/x.safetensors"):
        with pytest.raises(penstock.NotFoundError):
            penstock.open(source, storage=server.storage())


def test_an_object_that_is_replaced_is_changed(server, small):
    """It sends the new one whatever `If-Match` says: the ETags are compared."""
    content = (small / LAYOUT.files[0]).read_bytes()
    server.put("replaced.safetensors", content)
    checkpoint = penstock.open("gs://models/replaced.safetensors", storage=server.storage())
    server.put("replaced.safetensors", content[:-1] + b"?")
    with pytest.raises(penstock.ChangedError):
        checkpoint.load(framework="np")


def reader(server, prefix):
    def read(name: str) -> bytes:
        with urlopen(f"{server.endpoint}/storage/v1/b/models/o/{prefix}%2F{quote(name)}?alt=media") as answer:
            return answer.read()

    return read


def test_what_is_saved_comes_back(server, tmp_path):
    stores.what_is_saved_comes_back("gs://models/saved", server.storage(), tmp_path, reader(server, "saved"))


def test_a_checkpoint_that_was_saved_meanwhile_stays(server):
    stores.a_checkpoint_that_was_saved_meanwhile_stays("gs://models/saved-twice", server.storage())


def test_what_is_pushed_comes_back(server, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_STATE_FOLDER", str(tmp_path / "state"))
    stores.what_is_pushed_comes_back("gs://models/pushed", server.storage(), tmp_path, reader(server, "pushed"))


def test_what_a_killed_push_has_left_is_cleared_when_pushed_again(server, tmp_path):
    place, storage = "gs://models/killed-pushed", server.storage()
    stores.what_a_killed_push_has_left_is_cleared(
        place, storage, tmp_path, lambda: set(_core.names_in(f"{place}/", None, storage))
    )
