"""Loads of 2 GB in a pod that may have 1.25 x of it besides what its process has before: no kill, no wrong byte.

The control group is of the version that this machine has: `make pod-v2` runs these tests with version 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ordeal
import pytest
import versitygw
from penstock.bench.served import BUCKET, Served
from restricted_pods import Model, Pods, digests

WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {"way": "load"},
    "torch": {"way": "load", "framework": "pt"},
    "kept": {"way": "load", "options": {"cache": "keep"}},
    "copied": {"way": "load", "options": {"copy": True}},
    "copied, kept": {"way": "load", "options": {"copy": True, "cache": "keep"}},
    "copied, past the page cache": {"way": "load", "options": {"copy": True, "cache": "bypass"}},
    "load_into": {"way": "load_into"},
    "load_into, kept": {"way": "load_into", "options": {"cache": "keep"}},
    "load_into, past the page cache": {"way": "load_into", "options": {"cache": "bypass"}},
    "stream": {"way": "stream"},
    "stream, past the page cache": {"way": "stream", "options": {"cache": "bypass"}},
}


#: What the report says where all of `staging` does not fit.
LESS_STAGING = ("staging memory", "less of it")


def is_unified() -> bool:
    """Whether this machine's memory controller has version 2."""
    try:
        return "memory" in Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
    except FileNotFoundError:
        return False


def besides(mounted_model: Model) -> list[str]:
    return ["--memory-besides", str(mounted_model.nbytes * 5 // 4)]


def held_to(found: dict[str, Any], mounted_model: Model) -> None:
    """The limit held, and was what it should be."""
    assert found["oom_kill"] == 0, found
    assert found["version"] == (2 if is_unified() else 1), found
    assert mounted_model.nbytes * 5 // 4 <= found["limit"] <= mounted_model.nbytes * 5 // 4 + (1 << 30), found


@pytest.mark.parametrize("way", WAYS)
def test_a_cold_load_fits(pods: Pods, large_model: Model, way: str):
    large_model.evict()
    ended = pods.python({**WAYS[way], "source": "/models"}, large_model.volume, *besides(large_model), "--shm", "0")
    assert ended.result["digests"] == large_model.digests
    held_to(ended.facts, large_model)
    assert set(ended.fallbacks) <= {("io_uring", "threads")}, ended.result["text"]


@pytest.mark.parametrize("way", WAYS)
def test_a_load_fits_where_a_quarter_is_less_than_the_staging_memory(pods: Pods, middling_model: Model, way: str):
    middling_model.evict()
    volume = middling_model.volume
    ended = pods.python({**WAYS[way], "source": "/models"}, volume, *besides(middling_model), "--shm", "0")
    assert ended.result["digests"] == middling_model.digests
    held_to(ended.facts, middling_model)
    assert set(ended.fallbacks) <= {("io_uring", "threads"), LESS_STAGING}, ended.result["text"]
    if way in {"load_into", "load_into, past the page cache"}:  # through the page cache no slab is needed
        assert LESS_STAGING in ended.fallbacks


@contextmanager
def in_s3(model: Model, folder: Path) -> Iterator[dict[str, Any]]:
    """The files of a checkpoint in an S3 server: versitygw, if it is built, else netbench, which knows no keys."""
    if os.environ.get("PENSTOCK_TEST_SERVERS"):
        server = versitygw.Server(folder)
        try:
            for file in model.files:
                os.link(file, folder / "data/models" / file.name)
            yield {"source": "s3://models/", "storage": server.storage()}
        finally:
            server.close()
        return
    with Served(model.folder, Path(os.environ["PENSTOCK_TEST_NETBENCH"])) as served:
        keys = {"access_key_id": "none", "secret_access_key": "none"}
        storage = {"endpoint": served.origin, "region": "us-east-1", **keys}
        yield {"source": [f"s3://{BUCKET}/{file.name}" for file in model.files], "storage": storage}


@pytest.mark.parametrize("way", ["load", "load_into", "stream"])
@pytest.mark.parametrize("size", ["large", "middling"])
def test_a_load_from_s3_fits(pods: Pods, request: pytest.FixtureRequest, tmp_path: Path, way: str, size: str):
    model: Model = request.getfixturevalue(f"{size}_model")
    with in_s3(model, tmp_path) as given:
        ended = pods.python({"way": way, **given}, *besides(model), "--shm", "0")
    assert ended.result["digests"] == model.digests
    held_to(ended.facts, model)
    assert set(ended.fallbacks) <= ({LESS_STAGING} if size == "middling" else set())


def test_a_load_from_a_web_server_fits(pods: Pods, large_model: Model):
    with Served(large_model.folder, Path(os.environ["PENSTOCK_TEST_NETBENCH"])) as served:
        specification = {"way": "load", "source": served.urls(large_model.files)}
        ended = pods.python(specification, *besides(large_model), "--shm", "0")
    assert ended.result["digests"] == large_model.digests
    held_to(ended.facts, large_model)


@pytest.mark.parametrize("size", ["large", "middling"])
def test_a_save_fits(pods: Pods, request: pytest.FixtureRequest, empty_dir: Path, size: str):
    model: Model = request.getfixturevalue(f"{size}_model")
    model.evict()
    specification = {"way": "save", "source": "/models", "to": "/tmp/saved.safetensors"}
    try:
        ended = pods.python(specification, model.volume, *besides(model), f"--volume={empty_dir}:/tmp:rw")
        assert digests(empty_dir / "saved.safetensors") == model.digests
    finally:
        (empty_dir / "saved.safetensors").unlink(missing_ok=True)
    held_to(ended.facts, model)


def test_a_copy_that_cannot_fit_is_an_error_and_no_kill(pods: Pods, tmp_path: Path):
    folder = tmp_path / "models"
    ordeal.write(folder / "model.safetensors", 64, 32_000_001, sparse=True)
    specification = {"way": "load", "source": "/models", "options": {"copy": True}}
    with pytest.raises(ordeal.Died, match="OutOfMemoryError") as ended:
        pods.python(specification, f"--volume={folder}:/models", "--memory", str(1 << 30))
    assert "'oom_kill': 0" in str(ended.value)


def test_a_process_that_takes_more_is_killed_and_counted(pods: Pods):
    """The limit is real, and these tests see a kill."""
    if len(Path("/proc/swaps").read_text().splitlines()) > 1:
        pytest.skip("this machine swaps: what is above the limit may go there")
    command = [sys.executable, "-c", "held = bytes([1]) * (400 << 20)"]
    with pytest.raises(ordeal.Died, match="'oom_kill': 1") as ended:
        pods.run(command, "--memory", str(200 << 20))
    assert str(ended.value).startswith("status 137")


def test_a_mapped_load_may_be_larger_than_the_limit(pods: Pods, large_model: Model):
    large_model.evict()
    ended = pods.python(
        {"way": "load", "source": "/models"}, large_model.volume, "--memory", str(large_model.nbytes // 2)
    )
    assert ended.result["digests"] == large_model.digests
    assert ended.facts["oom_kill"] == 0
