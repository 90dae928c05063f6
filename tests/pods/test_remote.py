"""Loads from servers in a restricted pod."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ordeal
import pytest
import versitygw
from penstock.bench.served import Served
from restricted_pods import Model, Pods
from s3_server import KEYS, Bucket, serving
from test_hub_network import Hub

KEY, SECRET = next(iter(KEYS.items()))
WAYS: dict[str, dict[str, Any]] = {
    "load": {"way": "load"},
    "load_into": {"way": "load_into"},
    "stream": {"way": "stream", "options": {"window": 16_000_000}},
}


@pytest.fixture(scope="module")
def s3(mounted_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The settings of an S3 server with the checkpoint: versitygw, if it is built; else the double of `make test`."""
    if os.environ.get("PENSTOCK_TEST_SERVERS"):
        server = versitygw.Server(tmp_path_factory.mktemp("versitygw"))
        try:
            for file in mounted_model.files:
                server.put(f"llama/{file.name}", file.read_bytes())
            server.put("llama/config.json", b"{}")
            yield {"source": "s3://models/llama/", **server.storage()}
        finally:
            server.close()
        return
    objects = {f"llama/{file.name}": file.read_bytes() for file in mounted_model.files}
    with serving(Bucket({**objects, "llama/config.json": b"{}"})) as bucket:
        yield {
            "source": "s3://bucket/llama/", "endpoint": bucket.endpoint, "region": bucket.region,
            "access_key_id": KEY, "secret_access_key": SECRET,
        }  # fmt: skip


@pytest.mark.parametrize("shm", ["0", str(64 << 20)])
@pytest.mark.parametrize("way", WAYS)
def test_a_load_from_s3_is_right(pods: Pods, mounted_model: Model, s3: dict[str, str], way: str, shm: str):
    storage = {name: value for name, value in s3.items() if name != "source"}
    specification = {**WAYS[way], "source": s3["source"], "storage": storage}
    ended = pods.python(specification, "--shm", shm)
    assert ended.result["digests"] == mounted_model.digests
    assert ended.fallbacks == []
    assert ended.result["network"]["received_bytes"] >= mounted_model.nbytes
    assert s3["secret_access_key"] not in ended.said + ended.errors


def test_credentials_come_from_the_environment_where_there_is_no_home(
    pods: Pods, mounted_model: Model, s3: dict[str, str]
):
    variables = {
        "AWS_ACCESS_KEY_ID": s3["access_key_id"], "AWS_SECRET_ACCESS_KEY": s3["secret_access_key"],
        "AWS_ENDPOINT_URL_S3": s3["endpoint"], "AWS_REGION": s3["region"], "HOME": "/nonexistent",
    }  # fmt: skip
    ended = pods.python({"way": "load", "source": s3["source"]}, "--shm", "0", **variables)
    assert ended.result["digests"] == mounted_model.digests


def test_an_engine_wants_a_folder_to_write_to_and_says_so(pods: Pods, s3: dict[str, str], empty_dir: Path):
    storage = {name: value for name, value in s3.items() if name != "source"}
    specification = {"way": "fetch", "source": s3["source"], "storage": storage}
    found = pods.python(specification, "--shm", "0").result
    assert found["error"] == "WriteError"
    assert "emptyDir" in found["message"] and "TMPDIR" in found["message"]
    found = pods.python(specification, "--shm", "0", f"--volume={empty_dir}:/tmp:rw").result
    assert {"config.json", "model.safetensors"} <= set(found["files"])


def test_a_budget_of_connections_wants_a_folder_and_says_so(pods: Pods, mounted_model: Model, s3: dict[str, str]):
    storage = {name: value for name, value in s3.items() if name != "source"}
    storage["connections_per_node"] = 8  # type: ignore[assignment]
    specification = {"way": "load", "source": s3["source"], "storage": storage}
    assert pods.python(specification).result["digests"] == mounted_model.digests  # in /dev/shm
    with pytest.raises(ordeal.Died, match=r"node_folder.*names another folder"):
        pods.python(specification, "--shm", "0")


def test_a_load_from_the_hub_is_right_without_a_cache(pods: Pods, mounted_model: Model, tmp_path: Path):
    hub = Hub(tmp_path / "hub")
    try:
        hub.add("org/llama", mounted_model.folder)
        ended = pods.python(
            {"way": "load", "source": "hf://org/llama"}, "--shm", "0", HF_ENDPOINT=hub.endpoint, NO_PROXY="127.0.0.1"
        )
        assert ended.result["digests"] == mounted_model.digests
        assert ended.fallbacks == []
    finally:
        hub.close()


@pytest.mark.parametrize("tls", [False, True])
def test_a_load_from_a_web_server_is_right(pods: Pods, mounted_model: Model, tls: bool):
    with Served(mounted_model.folder, Path(os.environ["PENSTOCK_TEST_NETBENCH"]), tls=tls) as served:
        options, storage = ["--shm", "0"], {}
        if tls:
            authority = Path(served.environment["SSL_CERT_FILE"])
            options.append(f"--volume={authority}:/etc-ca/ca.pem")
            storage = {"ca": "/etc-ca/ca.pem"}
        source = served.urls(mounted_model.files)[0]
        ended = pods.python({"way": "load", "source": source, "storage": storage}, *options)
    assert ended.result["digests"] == mounted_model.digests
