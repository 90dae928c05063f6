"""vLLM loads models with `--load-format penstock` alone: the same parameters, each rank its own bytes, in one load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import WORLDS, World, models_of, ranks_of


def materialised(model: str, world: str, rank: int) -> dict[str, int]:
    """The operations that need bytes at once: none, except that GPT-OSS has one rank alone add the bias of a layer's
    output. The others zero the tensor that they were given, once for each layer of 4."""
    if model == "gpt-oss" and world in ("tp2", "tp4") and rank > 0:
        return {"aten.zero_.default": 4, "aten.copy_.default": 4}
    return {}


CASES = [(world, model, rank) for world in WORLDS for model in models_of(world) for rank in range(ranks_of(world))]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request: pytest.FixtureRequest) -> tuple[str, str, int]:
    found: tuple[str, str, int] = request.param
    return found


@pytest.fixture
def result(case: tuple[str, str, int], world: Callable[[str], World]) -> dict[str, Any]:
    name, model, rank = case
    return world(name).of(model, rank)


def test_the_entry_point_alone_makes_the_format_known(result: dict[str, Any]):
    assert result["loader"] == "penstock.integrations._vllm_loader"


def test_parameters_are_the_same_and_where_they_were(result: dict[str, Any]):
    assert result["parameters"] > 0
    assert result["different"] == []
    assert result["deferred"] == []
    assert result["moved"] == []


def test_one_load_without_detours(result: dict[str, Any], case: tuple[str, str, int]):
    (report,) = result["reports"]
    name, model, rank = case
    assert report["loads"] == 1
    assert report["copied_through"] == []
    assert report["fallbacks"] == []
    assert report["materialised"] == materialised(model, name, rank)


def test_a_rank_wants_its_own_bytes_exactly(result: dict[str, Any]):
    (report,) = result["reports"]
    assert report["nbytes"] == result["from_files"]
    assert report["read"] >= report["nbytes"]
