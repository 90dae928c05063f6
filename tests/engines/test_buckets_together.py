"""Engines' ranks that read for each other, with weights in a real S3 server: each byte leaves it once.

As in test_buckets.py each rank asks the server through a port of its own, which counts what is served.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import World, ranks_of, run_world
from test_buckets import CREDENTIALS, Counted, extra, pytestmark, server, underway, without_weights
from test_sglang import Run
from versitygw import Server

__all__ = ["CREDENTIALS", "pytestmark", "server", "without_weights"]  # fixtures, and where they run

MODELS = ("qwen3-moe", "long-llama")
WORLDS = ("tp2", "tp4", "ep2")


def asked_for(model: str, port: int) -> dict[str, Any]:
    """What the user says. The parts of a tiny model lie closer to each other than the shortest gap that is not read."""
    options = {"gap": 0} if model == "qwen3-moe" else {}
    return {**extra(model, port), "exchange": "on", **options}


def has(world: str, model: str) -> bool:
    """Whether the world can load the model: a dense one has no experts to divide."""
    return world != "ep2" or model == "qwen3-moe"


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def check_served(ports: list[Counted], reports: list[dict[str, Any]], folder: Path) -> None:
    """Of all ranks together."""
    exchanged = [report["exchange"] for report in reports]
    assert sum(one["sent_bytes"] for one in exchanged) == sum(one["received_bytes"] for one in exchanged) > 0
    assert all(one["lent_bytes"] == one["sent_bytes"] for one in exchanged), "in shared memory, not by sockets"
    received = [report["network"]["received_bytes"] for report in reports]
    assert sum(received) <= 1.01 * size_of(folder) + sum(report["materialised_bytes"] for report in reports)
    if folder.parent.name.startswith("long-llama"):  # with what was read to open it, and with all that HTTP adds
        served = sum(port.served for port in ports)
        assert sum(received) < served <= 1.01 * size_of(folder) + sum(underway(report["network"]) for report in reports)


@pytest.fixture(scope="module")
def together(
    server: Server,
    checkpoint: Callable[[str], Path],
    without_weights: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """What a world of vLLM made of all models, and the port of each rank for each model. It runs once."""
    ran: dict[str, tuple[World, dict[tuple[str, int], Counted]]] = {}
    with ExitStack() as stack:

        def find(world: str) -> tuple[World, dict[tuple[str, int], Counted]]:
            if world not in ran:
                ranks = range(ranks_of(world))
                ports = {(model, rank): Counted(server.port) for model in MODELS for rank in ranks}
                for port in ports.values():
                    stack.callback(port.close)

                def given(model: str, rank: int) -> dict[str, Any]:
                    options = asked_for(model, ports[model, rank].port)
                    return {"model": str(without_weights(model)), "model_loader_extra_config": options}

                more = {model: [given(model, rank) for rank in ranks] for model in MODELS}
                folders = {model: checkpoint(model) for model in MODELS if has(world, model)}
                ran[world] = run_world(world, folders, tmp_path_factory.mktemp(world), more), ports
            return ran[world]

        yield find


@pytest.mark.parametrize(("world", "model"), [(w, m) for w in WORLDS for m in MODELS if has(w, m)])
def test_each_byte_leaves_the_server_once_for_all_ranks_of_vllm(
    world: str, model: str, together: Any, checkpoint: Callable[[str], Path]
) -> None:
    results, ports = together(world)
    ranks = range(ranks_of(world))
    found = [results.of(model, rank) for rank in ranks]
    for one in found:
        assert one["loader"] == "penstock.integrations._vllm_loader"
        assert one["parameters"] > 0
        assert (one["different"], one["moved"], one["deferred"]) == ([], [], [])
        assert [(report["loads"], report["fallbacks"]) for report in one["reports"]] == [(1, [])]
    check_served([ports[model, rank] for rank in ranks], [one["reports"][0] for one in found], checkpoint(model))


@pytest.mark.parametrize("world", WORLDS)
def test_each_byte_leaves_the_server_once_for_all_ranks_of_sglang(
    world: str,
    server: Server,
    checkpoint: Callable[[str], Path],
    without_weights: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    ranks, models = range(ranks_of(world)), [model for model in MODELS if has(world, model)]
    ports = {(model, rank): Counted(server.port) for model in models for rank in ranks}
    args = {"args": {"ep_size": 2}} if world == "ep2" else {}

    def task(model: str) -> dict[str, Any]:
        given = [asked_for(model, ports[model, rank].port) for rank in ranks]
        folders = {"folder": str(without_weights(model)), "weights": str(checkpoint(model))}
        return {"name": model, "do": "elsewhere", "with": {**folders, **args, "extra": given}}

    try:
        run = Run(len(ranks), [task(model) for model in models], tmp_path)
        for model in models:
            found = run.of(model)
            for one in found:
                assert one["parameters"] > 0
                assert (one["different"], one["left"]) == ([], [])
                assert [(report["loads"], report["fallbacks"]) for report in one["reports"]] == [(1, [])]
            reports = [{**one["reports"][0], **one["network"][0], **one["ranks"][0]} for one in found]
            check_served([ports[model, rank] for rank in ranks], reports, checkpoint(model))
    finally:
        for port in ports.values():
            port.close()
