"""SGLang's ranks that read for each other: the same parameters, and each byte leaves the storage once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import penstock
import pytest
from test_sglang import MADE, MODELS, Run, places

__all__ = ["places"]  # a fixture

#: Models of four ranks. "experts": two pairs of them divide the experts
FOUR = ["llama", "qwen3-moe", "experts"]


@pytest.fixture(scope="module")
def together(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Run]:
    """Models by so many ranks, past the page cache, which would hide what is read twice."""
    ran: dict[int, Run] = {}

    def run(size: int) -> Run:
        if size not in ran:
            tasks = []
            for name in [*MODELS, "experts"] if size == 2 else FOUR:
                folders = dict.fromkeys(("folder", "weights"), str(places[named(name)]))
                extra = [{"exchange": "on", "cache": "bypass", "gap": 0}] * size
                args = {"args": {"ep_size": 2}} if name == "experts" else {}
                tasks.append({"name": name, "do": "elsewhere", "with": {**folders, **args, "extra": extra}})
            ran[size] = Run(size, tasks, tmp_path_factory.mktemp(f"together-{size}"))
        return ran[size]

    return run


def named(name: str) -> str:
    """The checkpoint: experts are those of Qwen3-MoE, divided among ranks."""
    return "qwen3-moe" if name == "experts" else name


@pytest.mark.parametrize(
    ("size", "name"), [*((2, name) for name in [*MODELS, "experts"]), *((4, name) for name in FOUR)]
)
def test_ranks_that_read_for_each_other_have_the_same_parameters_and_read_each_byte_once(
    together: Callable[[int], Run], places: dict[str, Path], size: int, name: str
) -> None:
    found = together(size).of(name)
    for one in found:
        assert (one["different"], one["left"], one["parameters"]) == ([], [], MADE[named(name)][1])
        assert [(report["loads"], report["fallbacks"]) for report in one["reports"]] == [(1, [])]
    ranks = [one["ranks"][0] for one in found]
    exchanged = [one["exchange"] for one in ranks]
    assert sum(e["sent_bytes"] for e in exchanged) == sum(e["received_bytes"] for e in exchanged) > 0
    assert all(e["lent_bytes"] == e["sent_bytes"] for e in exchanged), "in shared memory, not by sockets"
    # What a loader asks for at once, each rank reads alone: DeepSeek's two projections
    at_once = sum(one["reports"][0]["materialised_bytes"] for one in found)
    read = sum(one["read"] - one["slack_bytes"] for one in ranks)
    assert read <= 1.01 * penstock.open(places[named(name)]).nbytes + at_once
