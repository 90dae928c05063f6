"""Engines' loaders with weights in a real S3 server: the same parameters as from a disk, and each rank's own bytes.

`make engines` runs these tests where `make test-servers` has built the server. Each rank asks it through a port of its
own, which counts what is served.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, WORLDS, World, ranks_of, run_world
from on_cpu import ENVIRONMENT
from versitygw import KEY, REGION, SECRET, Server

pytestmark = pytest.mark.skipif(
    not os.environ.get("PENSTOCK_TEST_SERVERS"), reason="there is no server: `make test-servers` builds it"
)

MODELS = ("qwen3-moe", "long-llama")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


def models_of(world: str) -> list[str]:
    """vLLM refuses expert parallel ranks for a model without experts."""
    return [model for model in MODELS if model == "qwen3-moe" or not WORLDS[world].get("enable_expert_parallel")]


class Counted:
    """A port that leads to another one, and counts the bytes that come back."""

    def __init__(self, to: int) -> None:
        self.served = 0
        self._to, self._lock = to, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                for pair in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while got := source.recv(1 << 18):
                if counts:
                    with self._lock:
                        self.served += len(got)
                sink.sendall(got)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the weights of the models. The ranks' environment has credentials for it."""
    server = Server(tmp_path_factory.mktemp("versitygw"))
    try:
        for model in MODELS:
            for path in checkpoint(model).glob("*.safetensors*"):
                server.put(f"{model}/{path.name}", path.read_bytes())
        with pytest.MonkeyPatch.context() as patch:
            for name, value in CREDENTIALS.items():
                patch.setenv(name, value)
            yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def without_weights(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A folder with what a model's folder has besides the weights."""
    made: dict[str, Path] = {}

    def find(model: str) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp(model) / "model"
            shutil.copytree(checkpoint(model), made[model], ignore=shutil.ignore_patterns("*.safetensors*"))
        return made[model]

    return find


def extra(model: str, port: int) -> dict[str, Any]:
    """What the user says."""
    storage = {"endpoint": f"http://127.0.0.1:{port}", "region": REGION}
    return {"weights": f"s3://models/{model}/", "storage": storage}


@pytest.fixture(scope="module")
def loaded(
    server: Server,
    checkpoint: Callable[[str], Path],
    without_weights: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], tuple[World, dict[tuple[str, int], Counted]]]]:
    """What a world made of all models, and the port of each rank for each model. It runs once."""
    ran: dict[str, tuple[World, dict[tuple[str, int], Counted]]] = {}
    with ExitStack() as stack:

        def find(name: str) -> tuple[World, dict[tuple[str, int], Counted]]:
            if name not in ran:
                models, ranks = models_of(name), range(ranks_of(name))
                ports = {(model, rank): Counted(server.port) for model in models for rank in ranks}
                for port in ports.values():
                    stack.callback(port.close)
                more = {
                    model: [
                        {
                            "model": str(without_weights(model)),
                            "model_loader_extra_config": extra(model, ports[model, rank].port),
                        }
                        for rank in ranks
                    ]
                    for model in models
                }
                folders = {model: checkpoint(model) for model in models}
                ran[name] = run_world(name, folders, tmp_path_factory.mktemp(name), more), ports
            return ran[name]

        yield find


CASES = [(world, model, rank) for world in WORLDS for model in models_of(world) for rank in range(ranks_of(world))]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request: pytest.FixtureRequest) -> tuple[str, str, int]:
    found: tuple[str, str, int] = request.param
    return found


def test_parameters_are_those_from_a_disk(case: tuple[str, str, int], loaded: Any):
    world, model, rank = case
    result = loaded(world)[0].of(model, rank)
    assert result["loader"] == "penstock.integrations._vllm_loader"
    assert result["parameters"] > 0
    assert (result["different"], result["deferred"], result["moved"]) == ([], [], [])
    (report,) = result["reports"]
    assert (report["loads"], report["copied_through"], report["fallbacks"]) == (1, [], [])
    assert report["nbytes"] == result["from_files"]


def test_a_rank_receives_its_own_bytes(case: tuple[str, str, int], loaded: Any):
    world, model, rank = case
    found, ports = loaded(world)
    (report,) = found.of(model, rank)["reports"]
    wanted, received = report["nbytes"] + report["gap_bytes"], report["network"]["received_bytes"]
    assert report["nbytes"] <= received <= wanted * 1.01
    if model == "long-llama":  # with what was read to open it, and with all that HTTP adds
        assert received < ports[model, rank].served <= wanted * 1.01
