"""Programs written for the Run:ai model streamer, that load from buckets: versitygw, fake-gcs-server, Azurite.

The scenarios are those of its own tests, in programs of our own; `make runai-examples` runs its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import penstock
import pytest
import versitygw
from conftest import LAYOUT, Oracle, raw
from penstock.compat.runai_model_streamer import (
    FileChunks,
    FileStreamer,
    ObjectStorageModel,
    S3Credentials,
    SafetensorsStreamer,
    list_safetensors,
    pull_files,
)
from real_server import RealServer, program

torch = pytest.importorskip("torch")

PROGRAMS = {"gs": "fake-gcs-server", "az": "azurite/node_modules/.bin/azurite-blob"}
SMALL = {"m/config.json": b'{"model_type": "llama"}', "m/tokenizer/vocab.txt": b"a\nb", "m/odd #?&+% \u00e4.bin": b"x"}


class Google(RealServer):
    """fake-gcs-server, with these objects in the bucket `models`."""

    def __init__(self, folder: Path, objects: dict[str, bytes]) -> None:
        super().__init__(
            folder,
            lambda port: [
                program(PROGRAMS["gs"]), "-host", "127.0.0.1", "-port", str(port),
                "-public-host", f"127.0.0.1:{port}", "-scheme", "http", "-backend", "memory",
            ],
        )  # fmt: skip
        body = b'{"name": "models"}'
        self.send("POST", "/storage/v1/b?project=p", body, {"Content-Type": "application/json"}, 200)
        for key, content in objects.items():
            target = f"/upload/storage/v1/b/models/o?uploadType=media&name={quote(key, safe='')}"
            self.send("POST", target, content, {}, 200)


class Place(NamedTuple):
    """A bucket, and the variables by which programs reach it."""

    scheme: str
    variables: dict[str, str]

    @property
    def address(self) -> str:
        return f"{self.scheme}://models"


def objects_of(small: Path, big: Path) -> dict[str, bytes]:
    shards = {f"m/{name}": (small / name).read_bytes() for name in LAYOUT.files}
    return {**shards, **SMALL, "m/deep/er/x.safetensors": b"no model", "big.safetensors": big.read_bytes(),
            "cut.safetensors": (small / LAYOUT.files[0]).read_bytes()[:-10]}  # fmt: skip


def of_s3(folder: Path, objects: dict[str, bytes]) -> tuple[RealServer, dict[str, str]]:
    server = versitygw.Server(folder)
    for key, content in objects.items():
        server.put(key, content)
    return server, {
        "AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": versitygw.KEY,
        "AWS_SECRET_ACCESS_KEY": versitygw.SECRET, "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }  # fmt: skip


def of_google(folder: Path, objects: dict[str, bytes]) -> tuple[RealServer, dict[str, str]]:
    server = Google(folder, objects)
    return server, {
        "CLOUD_STORAGE_EMULATOR_ENDPOINT": server.endpoint, "RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS": "True"
    }  # fmt: skip


def of_azure(folder: Path, objects: dict[str, bytes]) -> tuple[RealServer, dict[str, str]]:
    import test_azurite as azurite

    server = azurite.Server(folder)
    for key, content in objects.items():
        server.put(f"models/{key}", "", content, **{"x-ms-blob-type": "BlockBlob"})
    text = f"DefaultEndpointsProtocol=http;AccountName={azurite.ACCOUNT};AccountKey={azurite.KEY};"
    return server, {"AZURE_STORAGE_CONNECTION_STRING": f"{text}BlobEndpoint={server.endpoint};"}


MADE: dict[str, Any] = {"s3": of_s3, "gs": of_google, "az": of_azure}


@pytest.fixture(scope="module", params=MADE)
def place(tmp_path_factory, small, big, request) -> Iterator[Place]:
    scheme = request.param
    if scheme in PROGRAMS and not program(PROGRAMS[scheme]).exists():
        pytest.skip(f"{PROGRAMS[scheme]} was not built")
    if scheme == "az" and shutil.which("node") is None:
        pytest.skip("Azurite needs Node")
    server, variables = MADE[scheme](tmp_path_factory.mktemp(f"runai-{scheme}"), objects_of(small, big))
    try:
        yield Place(scheme, variables)
    finally:
        server.close()


@pytest.fixture(autouse=True)
def reached(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "RUNAI_", "CLOUD_STORAGE_"))]:
        monkeypatch.delenv(name)
    for name, text in place.variables.items():
        monkeypatch.setenv(name, text)


def in_folder(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_listed_and_streamed(place, small):
    files = list_safetensors(f"{place.address}/m")
    assert files == [f"{place.address}/m/{name}" for name in sorted(LAYOUT.files)]
    assert list_safetensors(f"{place.address}/m/") == files
    assert list_safetensors(f"{place.address}/m/tokenizer") == list_safetensors(f"{place.address}/none/") == []
    assert list_safetensors(place.address) == [f"{place.address}/{name}.safetensors" for name in ("big", "cut")]
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        assert sum(map(len, streamer.files_to_tensors_metadata.values())) == len(Oracle(small).entries)
        kept = dict(streamer.get_tensors())
    Oracle(small).same(kept)


def test_settings_of_requests_and_memory_hold(place, big, monkeypatch):
    for name, text in (("CONCURRENCY", "3"), ("CHUNK_BYTESIZE", "5242880"), ("MEMORY_LIMIT", "8000000")):
        monkeypatch.setenv(f"RUNAI_STREAMER_{name}", text)
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(f"{place.address}/big.safetensors", None, "cpu")
        Oracle(big).same(dict(streamer.get_tensors()))


def test_an_object_that_is_cut_short_is_an_error_of_the_iteration(place):
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(f"{place.address}/cut.safetensors")
        with pytest.raises(ValueError, match=r"cut\.safetensors.*10 bytes short") as caught:
            list(streamer.get_tensors())
        assert isinstance(caught.value, penstock.TruncatedError)
        assert list(streamer.get_tensors()) == []


def test_what_is_not_there_is_a_value_error(place):
    with SafetensorsStreamer() as streamer, pytest.raises(ValueError) as caught:
        streamer.stream_file(f"{place.address}/none.safetensors")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(ValueError):
        list_safetensors(f"{place.scheme}://nobody-has-this/m")


def test_files_are_pulled_with_the_folders_in_it_as_patterns_say(place, small, tmp_path):
    model = {key.removeprefix("m/"): content for key, content in objects_of(small, small / LAYOUT.files[0]).items()
             if key.startswith("m/")}  # fmt: skip
    pull_files(f"{place.address}/m", str(tmp_path / "all"))
    assert in_folder(tmp_path / "all") == model
    pull_files(f"{place.address}/m/", str(tmp_path / "some"), ignore_pattern=["*.safetensors", "*.bin"])
    assert sorted(in_folder(tmp_path / "some")) == ["config.json", "tokenizer/vocab.txt"]
    pull_files(f"{place.address}/m", str(tmp_path / "one"), allow_pattern=["m/config.json", "config.json", "*.none"])
    assert in_folder(tmp_path / "one") == {"config.json": SMALL["m/config.json"]}
    for pattern in (["config.json"], []):
        pull_files(f"{place.address}/m", str(tmp_path / "none"), allow_pattern=pattern)
    pull_files(f"{place.address}/nothing", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists(), "keys are compared whole, and nothing is no error"


def test_a_model_is_pulled_once(place, tmp_path):
    for _ in range(2):
        with ObjectStorageModel(model_path=f"{place.address}/m", dst=str(tmp_path / "model")) as model:
            model.pull_files(ignore_pattern=["*.safetensors"])
        assert sorted(in_folder(tmp_path / "model")) == sorted(
            [".runai_complete", *(key.removeprefix("m/") for key in SMALL)]
        )
    (tmp_path / "model" / "config.json").unlink()
    with ObjectStorageModel(f"{place.address}/m", str(tmp_path / "model")) as model:
        model.pull_files()
    assert not (tmp_path / "model" / "config.json").exists(), "it is complete: nobody looks"
    with (
        pytest.raises(RuntimeError, match="no file"),
        ObjectStorageModel(f"{place.address}/nothing", str(tmp_path / "empty")) as model,
    ):
        model.pull_files()


def test_ranges_of_objects(place, big):
    content = big.read_bytes()
    requests = [
        FileChunks(4, f"{place.address}/big.safetensors", 8, [1000, 0, 5_000_000, 3]),
        FileChunks(2, f"{place.address}/m/config.json", [5, 0], [10, 5]),
    ]
    with FileStreamer() as streamer:
        streamer.stream_files(requests)
        found = {(id, number): raw(tensor) for id, number, tensor in streamer.get_chunks()}
    assert found == {
        (4, 0): content[8:1008], (4, 1): b"", (4, 2): content[1008:5_001_008], (4, 3): content[5_001_008:5_001_011],
        (2, 0): SMALL["m/config.json"][5:15], (2, 1): SMALL["m/config.json"][:5],
    }  # fmt: skip


def test_keys_that_a_program_gives_win(place, monkeypatch):
    if place.scheme != "s3":
        pytest.skip("S3Credentials are for S3")
    keys = S3Credentials(versitygw.KEY, versitygw.SECRET, region_name=versitygw.REGION)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ValueError) as caught:
        list_safetensors(f"{place.address}/m")
    assert isinstance(caught.value, PermissionError)
    assert len(list_safetensors(f"{place.address}/m", keys)) == len(LAYOUT.files)
    monkeypatch.setenv("RUNAI_STREAMER_S3_UNSIGNED", "1")
    with pytest.raises(penstock.AccessError, match="not signed"):
        list_safetensors(f"{place.address}/m")
