"""SGLang's ranks that read for each other: the same parameters, and each byte leaves the storage once."""

from __future__ import annotations

from pathlib import Path

import penstock
import pytest
from test_sglang import MADE, MODELS, Run, places

__all__ = ["places"]  # a fixture

RANKS = 2


@pytest.fixture(scope="module")
def together(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All models, past the page cache, which would hide what is read twice."""
    extra = [{"exchange": "on", "cache": "bypass", "gap": 0}] * RANKS
    tasks = []
    for name in MODELS:
        folders = dict.fromkeys(("folder", "weights"), str(places[name]))
        tasks.append({"name": name, "do": "elsewhere", "with": {**folders, "extra": extra}})
    return Run(RANKS, tasks, tmp_path_factory.mktemp("together"))


@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_read_for_each_other_have_the_same_parameters_and_read_each_byte_once(
    together: Run, places: dict[str, Path], name: str
) -> None:
    found = together.of(name)
    for one in found:
        assert (one["different"], one["left"], one["parameters"]) == ([], [], MADE[name][1])
        assert [(report["loads"], report["fallbacks"]) for report in one["reports"]] == [(1, [])]
    ranks = [one["ranks"][0] for one in found]
    exchanged = [one["exchange"] for one in ranks]
    assert sum(e["sent_bytes"] for e in exchanged) == sum(e["received_bytes"] for e in exchanged) > 0
    assert all(e["lent_bytes"] == e["sent_bytes"] for e in exchanged), "in shared memory, not by sockets"
    # What a loader asks for at once, each rank reads alone: DeepSeek's two projections
    at_once = sum(one["reports"][0]["materialised_bytes"] for one in found)
    read = sum(one["read"] - one["slack_bytes"] for one in ranks)
    assert read <= 1.01 * penstock.open(places[name]).nbytes + at_once
