"""Nodes that give each other what their disk caches have: a bucket that counts, and `penstock serve` on caches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certificates
import ordeal
import penstock
import pytest
from disk_caches import MIB, Asked, files, finished, serving, settings, there, wants_server
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
def slow_bucket(model: Path) -> Iterator[Served]:
    """It does not bring the model before the mirrors have said what they have."""
    with serving(model.parent, rate_per_connection="2e6", most_connections="16") as served:
        yield served


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@contextlib.contextmanager
def node(cache: Path, *options: str, **variables: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a node that serves its cache, and its process."""
    options = options if "--port" in options else ("--port", "0", *options)
    words = [sys.executable, "-m", "penstock.cli", "serve", str(cache), "--json", *options]
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
def test_a_node_gives_another_one_the_whole_model(slow_bucket, model, tmp_path, keeps):
    finished(loaded(slow_bucket, model, tmp_path / "a", []))
    with node(tmp_path / "a") as (address, _), Asked(slow_bucket) as asked:
        report = loaded(slow_bucket, model, tmp_path / "b" if keeps else None, [address], disk_cache_dropped="forget")
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


def test_a_mirror_that_is_started_again_during_a_load_is_asked_again(slow_bucket, model, tmp_path, stack):
    finished(loaded(slow_bucket, model, tmp_path / "a", []))
    address, process = stack.enter_context(node(tmp_path / "a"))
    again: list[str] = []

    def start_again() -> None:
        limit = time.monotonic() + 60 * ordeal.load_factor()
        while there(tmp_path / "b") < 4 * MIB and time.monotonic() < limit:
            time.sleep(0.01)
        process.kill()
        process.wait()
        time.sleep(4)  # one that is back sooner is not left: its reads are sent again
        again.append(stack.enter_context(node(tmp_path / "a", "--port", address.rpartition(":")[2]))[0])

    beside = threading.Thread(target=start_again)
    beside.start()
    # Alone the bucket would need 25 s: it brings 2 MB/s on one connection
    report = loaded(slow_bucket, model, tmp_path / "b", [address], connections=1, bandwidth=8_000_000)
    beside.join()
    assert again == [address]
    # It had brought 4 MiB, and what was on its way
    assert report.routes["mirror"]["bytes"] >= 16 * MIB, report.routes
    assert [report.fallbacks[0][side] for side in ("from", "to")] == ["mirror", "server"]
    [data] = files(tmp_path / "b", ".data")
    finished(report)
    assert data.read_bytes() == model.read_bytes()


def test_a_token_opens_a_mirror_and_goes_nowhere_in_the_clear(slow_bucket, model, tmp_path):
    finished(loaded(slow_bucket, model, tmp_path / "a", []))
    (tmp_path / "token").write_text("s3cr3t-t0k3n")
    with node(tmp_path / "a", "--token-file", str(tmp_path / "token")) as (address, _):
        report = loaded(slow_bucket, model, None, [address], mirror_token="s3cr3t-t0k3n")
        assert report.routes["mirror"]["bytes"] > 0
    with pytest.raises(penstock.InvalidError, match="readable on the way"):
        penstock.open(
            slow_bucket.urls([model])[0], storage={"mirrors": ["http://192.0.2.1:1"], "mirror_token": "s3cr3t"}
        )


def test_a_cache_lists_nothing_and_gives_objects_by_their_names_alone(bucket, model, tmp_path):
    finished(loaded(bucket, model, tmp_path / "a", []))
    [data] = files(tmp_path / "a", ".data")
    with node(tmp_path / "a") as (address, _):
        for path in ("objects/", f"objects/{data.parent.name}/{data.name}", "penstock-disk-cache", "cache/", "cache/x"):
            assert status(f"{address}/{path}") in (403, 404), path
        assert status(f"{address}/cache/{data.stem}") == status(f"{address}/cache/{data.stem}.blocks") == 200


LOAD = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import ordeal, penstock
from pathlib import Path
url, model, storage = json.loads(sys.argv[2])
sys.stdin.readline()
checkpoint = penstock.open(url, storage=storage)
ordeal.same(checkpoint.load(framework="np", progress=False), Path(model))
report = checkpoint.last_report
assert report.disk_cache.wait(600)
print(json.dumps([{lane: way["bytes"] for lane, way in report.routes.items()}, [str(one) for one in report.fallbacks]]))
"""


@pytest.mark.parametrize(("nodes", "bound"), [(2, 1.15), (4, 1.3)])
def test_nodes_that_start_together_read_the_bucket_about_once(tmp_path, stack, nodes, bound):
    """Processes, each with a server and a cache. All name the same mirrors, also themselves. The bucket is slow: they
    can be faster than it."""
    model = ordeal.write(tmp_path / "model" / "model.safetensors", 16, 6 * MIB + 5)
    bucket = stack.enter_context(serving(model.parent, rate_per_connection="1e6", most_connections=str(8 * nodes)))
    caches = [tmp_path / f"node-{number}" for number in range(nodes)]
    for cache in caches:
        cache.mkdir(mode=0o700)
    mirrors = [stack.enter_context(node(cache))[0] for cache in caches]
    loads = []
    for cache in caches:
        order = [bucket.urls([model])[0], str(model), settings(cache, mirrors=mirrors)]
        words = [sys.executable, "-c", LOAD, json.dumps(sys.path), json.dumps(order)]
        loads.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        stack.callback(loads[-1].kill)
    with Asked(bucket) as asked:
        said = [load.stdin.write("\n") and load.stdin.flush() for load in loads]
        said = [json.loads(load.communicate(timeout=120 * ordeal.load_factor())[0]) for load in loads]
    assert asked.bytes <= bound * model.stat().st_size + nodes * HEADS
    for routes, fallbacks in said:
        assert routes["mirror"] >= model.stat().st_size * 0.3
        assert not fallbacks


def test_mirrors_over_https_give_to_those_who_have_the_token_and_trust_the_certificate(slow_bucket, model, tmp_path):
    authority, certificate, key = certificates.made(tmp_path)
    finished(loaded(slow_bucket, model, tmp_path / "a", []))
    (tmp_path / "token").write_text("s3cr3t-t0k3n")
    options = ["--token-file", tmp_path / "token", "--tls-cert", certificate, "--tls-key", key]
    with node(tmp_path / "a", *map(str, options)) as (address, _):
        # The certificate is of a name
        address = address.replace("127.0.0.1", "localhost")
        assert address.startswith("https://localhost:")
        known = {"mirror_token": "s3cr3t-t0k3n", "ca": str(authority)}
        report = loaded(slow_bucket, model, tmp_path / "b", [address], **known)
        assert report.routes["mirror"]["bytes"] >= model.stat().st_size * 0.4
        assert not report.fallbacks
        for wrong, why in (({"mirror_token": "another-t0k3n"}, "401"), ({"ca": None}, "certificate")):
            given = {name: text for name, text in (known | wrong).items() if text is not None}
            report = loaded(slow_bucket, model, None, [address], **given)
            assert report.routes.get("mirror", {"bytes": 0})["bytes"] == 0
            [fallback] = report.fallbacks
            assert fallback["from"] == "mirror" and why in fallback["reason"] and address in fallback["reason"]
            assert "t0k3n" not in fallback["reason"]


@pytest.fixture
def silent() -> Iterator[list[str]]:
    """The addresses of servers that take connections and never answer."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(7)]
        yield [f"http://127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def test_dead_mirrors_cost_a_load_little_time_and_are_named(bucket, model, tmp_path, silent):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refused = [f"http://127.0.0.1:{closed.getsockname()[1]}"]
    for mirrors in (silent, refused):
        begun = time.monotonic()
        report = loaded(bucket, model, tmp_path / str(len(mirrors)), mirrors)
        assert time.monotonic() - begun < 5 * ordeal.load_factor()
        assert report.routes["network"]["bytes"] >= model.stat().st_size - HEADS
    assert [refused[0] in fallback["reason"] for fallback in report.fallbacks] == [True]


def test_a_server_that_starts_before_the_cache_is_there_serves_it_later_and_no_files(slow_bucket, model, tmp_path):
    (tmp_path / "a").mkdir(mode=0o700)
    with node(tmp_path / "a") as (address, _):
        assert status(f"{address}/objects/") == 404
        finished(loaded(slow_bucket, model, tmp_path / "a", []))
        [data] = files(tmp_path / "a", ".data")
        assert status(f"{address}/objects/{data.parent.name}/{data.name}") == 404
        assert status(f"{address}/cache/{data.stem}") == 200
        report = loaded(slow_bucket, model, tmp_path / "b", [address])
    assert report.routes["mirror"]["bytes"] >= model.stat().st_size * 0.4


def test_a_board_has_a_weak_etag_because_it_changes(bucket, model, tmp_path):
    finished(loaded(bucket, model, tmp_path / "a", []))
    [data] = files(tmp_path / "a", ".data")
    with node(tmp_path / "a") as (address, _):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{address}/cache/{data.stem}.blocks", timeout=30) as answer:
            etag, board = answer.headers["ETag"], answer.read()
        assert etag.startswith('W/"')
        # A bit and a checksum for each block, and the number of the node
        blocks = -(-model.stat().st_size // MIB)
        assert len(board) == -(-blocks // 8) + 4 * blocks + 8
        assert board[-8:] != bytes(8)
        request = urllib.request.Request(f"{address}/cache/{data.stem}.blocks", headers={"If-None-Match": etag})
        with opener.open(request, timeout=30) as answer:
            assert answer.status == 200
