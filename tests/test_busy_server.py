"""A server that has too much to do: pods that start together, their patience, and the budget of connections of a node.

`PENSTOCK_TEST_BUSY=1` has the full size: six pods of four ranks with 300 MB each, and 200 requests in a second.
"""

from __future__ import annotations

import http.server
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ordeal
import penstock
import pytest

WHOLE = os.environ.get("PENSTOCK_TEST_BUSY") == "1"
HERE = Path(__file__).parent
MIB = 1 << 20

#: One rank: when its load began and ended, and how often it asked again.
RANK = """
import json, sys, time
import penstock
begun = time.time()
said = json.loads(sys.argv[2])
loaded = penstock.open(sys.argv[1], storage=said).load(framework="np")
print(json.dumps({"begun": begun, "ended": time.time(), "tensors": len(loaded)}))
"""


class Size(NamedTuple):
    pods: int
    ranks: int
    nbytes: int
    rate: int
    request_bytes: int
    budget: int


SIZES = [Size(6, 4, 300_000_000, 200, 16 * MIB, 16)] if WHOLE else [Size(3, 2, 24 * MIB, 40, MIB, 6)]


def model(folder: Path, nbytes: int) -> Path:
    return ordeal.write(folder / "model.safetensors", 24, nbytes // 24, sparse=True)


@contextmanager
def busy(path: Path, rate: float, how: str, ports: int = 1) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Its ports, and what it has counted, as soon as it has ended."""
    command = [sys.executable, str(HERE / "busy_server.py"), str(path), str(rate), how, str(ports)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    counted: dict[str, Any] = {}
    try:
        yield json.loads(server.stdout.readline()), counted
        out, _ = server.communicate("", timeout=60)
        counted |= json.loads(out)
    finally:
        server.kill()
        server.wait()


def likely_most(mean: float, tenths: int) -> int:
    """What no tenth of a second passes in 9,999 of 10,000 runs, where so many retries come at random times (Poisson).

    Where they are few, 3 * mean is less than that: with a mean of a third, one retry alone is three times as many. From
    a mean of 9 on, 200 tenths stay below 3 * mean.
    """
    most, chance, at_most = 0, math.exp(-mean), math.exp(-mean)
    while tenths * (1 - at_most) > 1e-4:
        most += 1
        chance *= mean / most
        at_most += chance
    return most


def test_the_bound_of_retries_at_random_times():
    assert [likely_most(mean, 100) for mean in (0.1, 1.0, 5.0, 20.0)] == [4, 9, 19, 45]
    assert all(likely_most(mean, 200) <= 3 * mean for mean in range(9, 40))


def loaded_from(size: Size, how: str, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, int]]:
    """What each rank said, what the server has counted, and the budget of each port: that of one pod."""
    path = model(folder, size.nbytes)
    with busy(path, size.rate, how, size.pods) as (ports, counted):
        ranks = []
        budgets = [max(1, size.budget - (0 if WHOLE else 2 * pod)) for pod in range(size.pods)]
        for number in range(size.pods * size.ranks):
            pod = number % size.pods
            storage = {
                "connections_per_node": budgets[pod],
                "node_folder": str(folder / f"node-{pod}"),
                "request_bytes": size.request_bytes,
            }
            url = f"http://127.0.0.1:{ports[pod]}/{number}/model.safetensors"
            command = [sys.executable, "-c", RANK, url, json.dumps(storage)]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            time.sleep(1.0 / (size.pods * size.ranks))
        found = []
        for rank in ranks:
            out, error = rank.communicate(timeout=60 * ordeal.load_factor())
            assert rank.returncode == 0, error
            found.append(json.loads(out))
    return found, counted, {str(port): budget for port, budget in zip(ports, budgets, strict=True)}


@pytest.mark.parametrize("size", SIZES)
def test_pods_that_start_together_load_with_few_requests_in_vain(size: Size, tmp_path: Path) -> None:
    """At a server that counts within each second, and at one with a bucket that fills. Small sizes: at once."""
    hows = ("second", "bucket")
    for how in hows:
        (tmp_path / how).mkdir()
    with ThreadPoolExecutor(1 if WHOLE else len(hows)) as together:
        found = list(together.map(lambda how: loaded_from(size, how, tmp_path / how), hows))
    for how, (ranks, counted, budgets) in zip(hows, found, strict=True):
        assert [one["tensors"] for one in ranks] == [24] * len(ranks)
        most, requests = counted["most"], sorted(counted["requests"])
        assert most.keys() == budgets.keys()
        assert all(most[port] <= budgets[port] for port in most), (most, budgets)
        needed = sum(1 for *_, status in requests if status == 206)
        print(f"{how}: {len(requests)} requests, {needed} taken, in {requests[-1][0] - requests[0][0]:.1f} s")
        print(f"connections: {most} of {budgets}, and not closed by the server yet: {counted['most_seen']}")
        assert len(requests) <= 1.5 * needed
        check_retries(requests, max(one["begun"] for one in ranks) + 2.0)


def check_retries(requests: list[Any], since: float) -> None:
    """Retries by the tenth of a second, from two seconds after the last start: no waves of them."""
    refused, retries = set(), []
    for when, _, name, first, status in requests:
        if (name, first) in refused and when >= since:
            retries.append(int((when - since) * 10))
        refused.add((name, first)) if status == 503 else refused.discard((name, first))
    tenths = int((requests[-1][0] - since) * 10) + 1
    if tenths > 0 and retries:
        counts = [retries.count(tenth) for tenth in range(tenths)]
        mean, most = len(retries) / tenths, max(counts)
        # They come while the server refuses, not at one rate all the time: chance counts within the busiest second
        busiest = max(sum(counts[tenth : tenth + 10]) for tenth in range(tenths)) / 10
        likely = likely_most(busiest, tenths)
        print(f"retries: {len(retries)} in {tenths} tenths of a second, {most} at most in one, {likely} by chance")
        assert most <= max(3 * mean, likely), (most, mean)


class Moody(http.server.BaseHTTPRequestHandler):
    """Answers the first requests of a load in another way."""

    protocol_version = "HTTP/1.1"
    content: bytes
    refusals: list[tuple[int, bytes]]
    asked: list[float]

    def do_GET(self) -> None:
        first, last = (int(part) for part in self.headers["Range"].removeprefix("bytes=").split("-"))
        self.asked.append(time.monotonic())
        if self.refusals and first > 0:
            status, body = self.refusals.pop()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        part = self.content[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(self.content)}")
        self.send_header("ETag", '"one"')
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *about: object) -> None:
        pass


@contextmanager
def moody(path: Path, refusals: list[tuple[int, bytes]]) -> Iterator[tuple[str, list[float]]]:
    """The address of a file, whose data is refused so often, and when it was asked for."""
    asked: list[float] = []
    made = type("Made", (Moody,), {"content": path.read_bytes(), "refusals": refusals, "asked": asked})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), made)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/model.safetensors", asked
    finally:
        server.shutdown()
        server.server_close()


SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return ordeal.write(tmp_path / "model.safetensors", 1, 100_000)


@pytest.mark.parametrize(("status", "body"), [(503, SLOW_DOWN), (429, b""), (503, b"")])
def test_a_read_that_a_busy_server_refuses_is_asked_for_again(status: int, body: bytes, one: Path):
    """How often, and for how long: `crates/core/src/store/remote/transfer/tests.rs`, where no time passes."""
    with moody(one, [(status, body)]) as (url, asked):
        checkpoint = penstock.open(url)
        assert len(checkpoint.load(framework="np")) == 1
        assert len(asked) >= 2
        network = checkpoint.last_report["network"]
        assert (network["busy"], network["retries"]) == (1, 1)


@pytest.mark.sampled(0)
def test_a_read_that_fails_is_given_up_when_the_patience_is_over(one: Path):
    with moody(one, [(500, b"")] * 1000) as (url, _):
        begun = time.monotonic()
        with pytest.raises(penstock.ReadError, match=r"it was asked for .* times in") as caught:
            penstock.open(url, storage={"patience": 10}).load(framework="np")
        assert caught.value.status == 500
        assert 10.0 <= time.monotonic() - begun <= 22.0 * ordeal.load_factor()


def test_the_part_of_a_process_that_ends_is_free_at_once(one: Path, tmp_path: Path):
    """Also of one that is killed: the kernel frees its locks."""
    storage = {"connections_per_node": 1, "node_folder": str(tmp_path / "node")}
    program = """
import json, sys, penstock
from penstock import _core
stream = penstock.open(sys.argv[1], storage=json.loads(sys.argv[2])).stream(framework="np")
next(stream)
print("here", flush=True)
sys.stdin.read()
"""
    with moody(one, []) as (url, _):
        command = [sys.executable, "-c", program, url, json.dumps(storage)]
        for end in (signal.SIGKILL, None):
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert child.stdout is not None and child.stdout.readline() == "here\n"
            if end is None:
                child.communicate("")
            else:
                child.send_signal(end)
                child.wait()
            assert len(penstock.open(url, storage=storage).load(framework="np")) == 1


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("patience", -1, "must be seconds"),
        ("patience", "soon", "must be seconds"),
        ("patience", float("nan"), "must be seconds"),
        ("patience", True, "must be a number of seconds"),
        ("connections_per_node", 0, "from 1 to 65536"),
        ("connections_per_node", 1.5, "must be a whole number"),
        ("node_folder", 3, "must be a path"),
    ],
)
def test_settings_that_make_no_sense(setting: str, value: Any, says: str):
    with pytest.raises((ValueError, TypeError), match=says):
        penstock.open("http://127.0.0.1:1/x.safetensors", storage={setting: value})


def test_a_folder_that_cannot_be_had_is_an_error_that_names_it_and_the_setting(one: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with moody(one, []) as (url, _):
        storage: Any = {"connections_per_node": 4, "node_folder": tmp_path / "file" / "node"}
        with pytest.raises(penstock.PenstockError, match="node_folder"):
            penstock.open(url, storage=storage).load(framework="np")
