"""Quantised checkpoints in vLLM from the load to what is served, and reloads; what is quantised while it is loaded.

`test_vllm.py` compares parameters before vLLM processes them. Here a load is vLLM's `load_model`, processing included,
and so are reloads. Each case has tensors that are deferred, and mapped. What stands in for kernels is in stubs.py;
parameters that vLLM makes while it quantises hold poison.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantised import unreadable
from test_vllm_group import group

PROGRAM = "vllm_formats.py"
#: By case: the checkpoint, and vLLM's arguments.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{model}.{form}": (f"{model}.{form}", {})
        for model in ("llama", "qwen3-moe")
        for form in ("modelopt-fp4", "ct-nvfp4", "modelopt-fp8")
    },
    **{
        f"{model} online {way}": (model, {"quantization": way})
        for model in ("llama", "qwen3-moe")
        for way in ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel")
    },
}
RANKS = (1, 2)
#: What vLLM's own reload says, with its own format, where it fails. Such cases have no reload.
THEIR_RELOADS = {"qwen3-moe.modelopt-fp8": "IndexError('index 1 is out of bounds for dimension 0 with size 0')"}


@pytest.fixture(scope="session")
def ran(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[dict[str, Any]]]:
    """What each rank says of all cases. They run once for each number of ranks: an engine takes long to import."""
    found: dict[int, list[dict[str, Any]]] = {}

    def of(ranks: int) -> list[dict[str, Any]]:
        if ranks not in found:
            cases = {
                name: {"folders": [str(checkpoint(one)), str(checkpoint(one).with_suffix(".inverse"))], "args": args}
                for name, (one, args) in CASES.items()
            }
            place = tmp_path_factory.mktemp("formats") / "ranks"
            given = {"first": str(checkpoint("qwen3-moe")), "cases": cases}
            with group(place, ranks, "loads_and_reloads", program=PROGRAM, **given) as started:
                found[ranks] = started.said()
        return found[ranks]

    return of


@pytest.fixture(params=[(ranks, name) for ranks in RANKS for name in CASES], ids=lambda one: f"tp{one[0]}-{one[1]}")
def results(
    request: pytest.FixtureRequest, ran: Callable[[int], list[dict[str, Any]]]
) -> tuple[str, list[dict[str, Any]]]:
    ranks, name = request.param
    found = [rank[name] for rank in ran(ranks)]
    for one in found:
        if "error" in one:
            pytest.fail(one["error"])
    return name, found


@pytest.mark.parametrize("given", ["off", "on"], ids=["deferred", "mapped"])
def test_what_is_served_is_the_same_after_a_load_and_after_reloads(
    results: tuple[str, list[dict[str, Any]]], given: str
):
    name, each = results
    for found in each:
        assert found["differ"] > 0
        assert found["their reload"] == THEIR_RELOADS.get(name, "")
        reloads = [] if found["their reload"] else [[], []]
        one = found[given]
        assert one["loader"] == "penstock.integrations._vllm_loader"
        assert (one["first"], one["left"]) == ([], [])
        assert (one["reloads"], one["moved"]) == (reloads, [])
        [report] = one["reports"]
        assert report["given"] == ("deferred" if given == "off" else "mapped")
        assert (report["copied_through"], report["fallbacks"], report["materialised"]) == ([], [], {})
        if given == "off" and "online" in name:
            # Each of 4 layers has 4 parts that are quantised one by one. What is left then is one load, or part of that
            # of a layer with padding, which is quantised last
            assert 4 * 4 <= report["loads"] <= 4 * 4 + 1
        else:
            assert report["loads"] == 1


#: What vLLM 0.33 refuses by name itself: a checkpoint that says so, or an argument.
REFUSED: dict[str, tuple[dict[str, Any] | None, dict[str, Any], str]] = {
    "bitsandbytes, quantised before": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {},
        "bitsandbytes",
    ),
    "bitsandbytes, in flight": (None, {"quantization": "bitsandbytes"}, "bitsandbytes"),
}


@pytest.fixture(scope="session")
def starts(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place, llama = tmp_path_factory.mktemp("starts"), checkpoint("llama")
    refused = {
        name: {"model": str(unreadable(llama, place / str(number), about)), **args}
        for number, (name, (about, args, _)) in enumerate(REFUSED.items())
    }
    given = {"folder": str(llama), "refused": refused}
    with group(place / "ranks", 1, "starts", program=PROGRAM, **given) as started:
        found: dict[str, Any] = started.said()[0]
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_refuses_by_name_is_refused_before_anything_is_read(starts: dict[str, Any], name: str):
    theirs, mine = (starts["refused"][name][load_format] for load_format in ("safetensors", "penstock"))
    assert REFUSED[name][2] in mine["text"]
    # A shard that was opened would be another error: there is no header in any
    assert mine == theirs


def test_a_quantisation_with_a_loader_of_its_own_is_refused_before_a_model_is_made(starts: dict[str, Any]):
    """vLLM 0.33 has none; plugins bring some."""
    found = starts["own loader"]
    assert found["made"] == []
    assert len(found["said"]) == 4
    for name, text in found["said"].items():
        assert f"give --load-format {name.split()[0]}" in text


def test_a_vllm_that_quantises_in_another_way_is_refused_unless_the_user_accepts_its_own_way(starts: dict[str, Any]):
    found = starts["other ways"]
    why = "quantises layers while it loads them, in a way that Penstock does not know"
    assert why in found["refused"] and '{"strict": false}' in found["refused"]
    assert found["different"] == []
    assert why in found["fallbacks"][0]["reason"]
