"""Nodes that give each other what their disk caches have: a bucket that counts, and `penstock serve` on caches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ordeal
import penstock
import pytest
from disk_caches import MIB, Asked, files, finished, serving, settings, wants_server
from penstock.bench.served import Served

pytestmark = wants_server
#: Bytes of requests that learn a version, and read a header.
HEADS = MIB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 MiB in 16 tensors. Not to be written to."""
    return ordeal.write(tmp_path_factory.mktemp("mirrored") / "model.safetensors", 16, 3 * MIB + 5)


@pytest.fixture
def bucket(model: Path) -> Iterator[Served]:
    with serving(model.parent) as served:
        yield served


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@contextlib.contextmanager
def node(cache: Path, *options: str, **variables: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a node that serves its cache, and its process."""
    words = [sys.executable, "-m", "penstock.cli", "serve", str(cache), "--port", "0", "--json", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while not lines or lines[-1].rstrip() != "}":
                lines.append(process.stdout.readline())
                assert lines[-1]
            yield json.loads("".join(lines))["address"], process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def loaded(bucket: Served, model: Path, cache: Path | None, mirrors: list[str], **more: Any) -> Any:
    """Loads the model with right bytes, and gives the report."""
    storage = settings(cache, **more) if cache is not None else dict(more)
    if mirrors:
        storage["mirrors"] = mirrors
    checkpoint = penstock.open(bucket.urls([model])[0], storage=storage)
    ordeal.same(checkpoint.load(framework="np", progress=False), model)
    return checkpoint.last_report


def status(address: str) -> int:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("keeps", [True, False], ids=["with a cache", "without"])
def test_a_node_gives_another_one_the_whole_model(bucket, model, tmp_path, keeps):
    finished(loaded(bucket, model, tmp_path / "a", []))
    with node(tmp_path / "a") as (address, _), Asked(bucket) as asked:
        report = loaded(bucket, model, tmp_path / "b" if keeps else None, [address], disk_cache_dropped="forget")
    size = model.stat().st_size
    # The node begins with the server, until the first look at the board.
    assert asked.bytes <= size * 0.6 + HEADS
    assert report.routes["mirror"]["bytes"] + report.routes["network"]["bytes"] >= size - HEADS
    assert report.routes["mirror"]["bytes"] >= size * 0.4
    assert not report.fallbacks


def test_a_node_gives_the_blocks_that_it_has(bucket, model, tmp_path):
    checkpoint = penstock.open(bucket.urls([model])[0], storage=settings(tmp_path / "a"))
    checkpoint.load(names=list(checkpoint)[:8], framework="np", progress=False)
    finished(checkpoint.last_report)
    with node(tmp_path / "a") as (address, _):
        report = loaded(bucket, model, tmp_path / "b", [address])
    finished(report)
    assert report.routes["network"]["bytes"] >= 8 * 3 * MIB - HEADS, "what nobody else has"
    [data] = files(tmp_path / "b", ".data")
    assert data.read_bytes() == model.read_bytes()


@pytest.mark.parametrize("how", ["nobody listens", "no cache", "no token", "another version", "killed", "stopped"])
def test_a_mirror_that_fails_is_left(bucket, model, tmp_path, stack, how):
    cache = tmp_path / "a"
    if how == "another version":
        model = ordeal.write(tmp_path / "model.safetensors", 15, 3 * MIB + 5)
        bucket = stack.enter_context(serving(tmp_path))
        finished(loaded(bucket, model, cache, []))
        ordeal.write(model, 16, 3 * MIB + 5)
    elif how == "no cache":
        cache = model.parent
    else:
        finished(loaded(bucket, model, cache, []))
    options = ["--token-file", str(tmp_path / "token")] if how == "no token" else []
    (tmp_path / "token").write_text("s3cr3t-t0k3n")
    with node(cache, *options) as (address, process):
        if how == "nobody listens":
            process.kill()
            process.wait()
        if how in ("killed", "stopped"):
            sent = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how]
            threading.Timer(0.05, process.send_signal, [sent]).start()
        begun = time.monotonic()
        report = loaded(bucket, model, tmp_path / "b", [address])
        assert time.monotonic() - begun < 60
    finished(report)
    if how not in ("killed", "stopped"):
        assert report.routes["mirror"]["bytes"] == 0
    [data] = files(tmp_path / "b", ".data")
    assert data.read_bytes() == model.read_bytes()


def test_a_token_opens_a_mirror_and_goes_nowhere_in_the_clear(bucket, model, tmp_path):
    finished(loaded(bucket, model, tmp_path / "a", []))
    (tmp_path / "token").write_text("s3cr3t-t0k3n")
    with node(tmp_path / "a", "--token-file", str(tmp_path / "token")) as (address, _):
        report = loaded(bucket, model, None, [address], mirror_token="s3cr3t-t0k3n")
        assert report.routes["mirror"]["bytes"] > 0
    with pytest.raises(penstock.InvalidError, match="readable on the way"):
        penstock.open(bucket.urls([model])[0], storage={"mirrors": ["http://192.0.2.1:1"], "mirror_token": "s3cr3t"})


def test_a_cache_lists_nothing_and_gives_objects_by_their_names_alone(bucket, model, tmp_path):
    finished(loaded(bucket, model, tmp_path / "a", []))
    [data] = files(tmp_path / "a", ".data")
    with node(tmp_path / "a") as (address, _):
        for path in ("objects/", f"objects/{data.parent.name}/{data.name}", "penstock-disk-cache", "cache/", "cache/x"):
            assert status(f"{address}/{path}") in (403, 404), path
        assert status(f"{address}/cache/{data.stem}") == status(f"{address}/cache/{data.stem}.blocks") == 200


def test_two_nodes_that_start_together_share_the_bucket(model, tmp_path):
    """Each takes from the bucket about half: the link decides how fast that is."""
    with serving(model.parent, rate_per_connection="2e6") as bucket, contextlib.ExitStack() as stack:
        caches = [tmp_path / "a", tmp_path / "b"]
        url = bucket.urls([model])[0]
        for cache in caches:  # the folder is there before its server
            penstock.open(url, storage=settings(cache))
        addresses = [stack.enter_context(node(cache))[0] for cache in caches]
        reports: list[Any] = [None, None]

        def load(number: int) -> None:
            reports[number] = loaded(bucket, model, caches[number], [addresses[1 - number]])

        with Asked(bucket) as asked:
            threads = [threading.Thread(target=load, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for report in reports:
                finished(report)
    assert all(report is not None for report in reports)
    assert asked.bytes < 2 * model.stat().st_size, "each has taken something from the other"
    assert all(report.routes["mirror"]["bytes"] > 0 for report in reports)
