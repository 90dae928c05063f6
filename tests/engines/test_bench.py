"""`make bench-engines`, on tiny checkpoints: every loader takes part, and what they load is compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).parents[2]
PROGRAM = str(TOP / "benches" / "engines.py")

pytest.importorskip("fastsafetensors")
pytest.importorskip("runai_model_streamer")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One round, two ranks, the disk not held to a rate."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, PROGRAM, str(folder), "--json", str(folder / "results.json"), "--size", "40e6"]
    command += ["--ranks", "2", "--rounds", "1", "--rate", "0", "--state", "cold, no limit", "--reload"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    tables = subprocess.run(
        [sys.executable, PROGRAM, "--tables", folder / "results.json"], check=True, capture_output=True, text=True
    )
    assert tables.stdout == done.stdout
    return found


@pytest.fixture(params=["llama", "qwen3-moe"])
def checkpoint(request: pytest.FixtureRequest, document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["checkpoints"][request.param]
    return found


LOADERS = ("penstock", "safetensors", "fastsafetensors, its device set to cpu", "runai_streamer")


def test_every_loader_has_a_time(checkpoint: dict[str, Any]):
    turns = checkpoint["turns"]["cold, no limit"]
    assert set(turns) == {*LOADERS, "ceiling: direct"}
    assert all(len(loads) == 1 and loads[0]["seconds"] > 0 for loads in turns.values())


@pytest.mark.parametrize("loader", ["penstock", "safetensors", "runai_streamer"])
def test_parameters_are_equal(checkpoint: dict[str, Any], loader: str):
    first, turn = checkpoint["checks"][loader], checkpoint["turns"]["cold, no limit"][loader][0]
    assert first["parameters"] == turn["parameters"] > 0.9 * checkpoint["nbytes"]
    assert (first["wrong"], turn["wrong"]) == (0, 0)


def test_a_rank_of_penstock_tells_what_it_read(checkpoint: dict[str, Any]):
    reports = checkpoint["turns"]["cold, no limit"]["penstock"][0]["reports"]
    assert len(reports) == 2
    assert sum(report["nbytes"] for report in reports) >= checkpoint["nbytes"]


@pytest.mark.parametrize("loader", ["penstock", "safetensors"])
def test_a_reload_has_a_time_and_the_same_parameters(checkpoint: dict[str, Any], loader: str):
    turn = checkpoint["turns"]["cold, no limit"][loader][0]
    assert turn["reload"] > 0
    assert checkpoint["checks"][loader]["wrong"] == 0


def test_no_shared_memory_is_left(document: dict[str, Any]):
    """That of ranks that have failed too: fastsafetensors does not run here."""
    assert document["shared_memory"]
    assert [name for name in document["shared_memory"] if Path(name).exists()] == []


def test_what_vllm_cannot_run_on_a_cpu_is_told_with_its_error(checkpoint: dict[str, Any]):
    assert "cuda" in checkpoint["checks"]["fastsafetensors"]["error"]
