"""vLLM's ranks that read for each other: the same parameters, and each byte leaves the storage once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import penstock
import pytest
from conftest import World, ranks_of, run_world

MODELS = ("llama", "qwen3-moe", "deepseek")


def models_of(world: str) -> list[str]:
    """vLLM refuses expert parallel ranks for a model without experts."""
    return [model for model in MODELS if model != "llama" or world != "ep2"]


@pytest.fixture(scope="module")
def together(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], World]:
    """What a world made of all models, with ``exchange`` on or off. It runs once."""
    ran: dict[tuple[str, str], World] = {}

    def find(world: str, exchange: str) -> World:
        if (world, exchange) not in ran:
            # Past the page cache, which would hide what is read twice
            extra = {"model_loader_extra_config": {"exchange": exchange, "cache": "bypass", "gap": 0}}
            models = {model: checkpoint(model) for model in models_of(world)}
            more = {model: [extra] * ranks_of(world) for model in models}
            ran[world, exchange] = run_world(world, models, tmp_path_factory.mktemp(f"{world}-{exchange}"), more)
        return ran[world, exchange]

    return find


@pytest.mark.parametrize(("world", "model"), [(w, m) for w in ("tp2", "tp4", "ep2") for m in models_of(w)])
def test_ranks_that_read_for_each_other_have_the_same_parameters_and_read_each_byte_once(
    together: Callable[[str, str], World], checkpoint: Callable[[str], Path], world: str, model: str
) -> None:
    found = [together(world, "on").of(model, rank) for rank in range(ranks_of(world))]
    for one in found:
        assert one["loader"] == "penstock.integrations._vllm_loader"
        assert (one["different"], one["moved"], one["deferred"]) == ([], [], [])
        assert not any(report["fallbacks"] for report in one["reports"])
    reports = [report for one in found for report in one["reports"]]
    exchanged = [report["exchange"] for report in reports if report["exchange"]]
    assert len(exchanged) == ranks_of(world)
    assert sum(e["sent_bytes"] for e in exchanged) == sum(e["received_bytes"] for e in exchanged) > 0
    assert all(e["lent_bytes"] == e["sent_bytes"] for e in exchanged), "in shared memory, not by sockets"
    # What a loader asks for at once, each rank reads alone: a few scales
    at_once = sum(report["materialised_bytes"] for report in reports)
    read = sum(report["read"] - report["slack_bytes"] for report in reports)
    assert read <= 1.01 * penstock.open(checkpoint(model)).nbytes + at_once


def test_an_unknown_exchange_is_refused() -> None:
    from penstock.integrations._engine import settings_of

    with pytest.raises(penstock.InvalidError, match=r"""exchange='fast': must be one of "auto", "on", "off\""""):
        settings_of({"exchange": "fast"}, "vLLM")
    assert settings_of({"exchange": "on"}, "vLLM").options.exchange == "on"
    assert settings_of({}, "vLLM").options.exchange == "auto"
