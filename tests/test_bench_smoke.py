"""The benchmark runs, compares every byte, and says what it found: counts and shapes, never times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

# Some fifteen processes that import torch each, and a release build of the ceilings: minutes on two busy cores.
pytestmark = pytest.mark.timeout(1200)

BENCH = [sys.executable, "-m", "penstock.cli", "bench"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bench")
    report = folder / "results.json"
    command = [*BENCH, "--quick", "--rounds", "1", "--checkpoint", "moe", "--no-routes"]
    done = subprocess.run(
        [*command, "--folder", folder, "--json", report], capture_output=True, text=True, check=False, timeout=1100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    found["printed"] = done.stdout
    return found


def test_names_the_machine_the_versions_and_the_command(outcome: dict[str, Any]) -> None:
    assert outcome["schema"] == 1
    assert outcome["quick"] is True
    assert "--checkpoint moe" in outcome["command"]
    assert {"cpu", "cores", "memory", "kernel", "file_system", "python", "versions"} <= set(outcome["machine"])
    assert outcome["machine"]["versions"]["safetensors"]


def test_every_load_has_every_byte_compared_with_the_files(outcome: dict[str, Any]) -> None:
    loads = [run for run in outcome["runs"] if not run["contestant"].startswith("ceiling")]
    assert loads
    for run in loads:
        assert "error" not in run, run
        assert run["tensors"] == 9266
        assert run["verified_bytes"] == run["bytes"] > 80_000_000
        assert run["different"] == []


def test_every_scenario_has_penstock_and_a_rival(outcome: dict[str, Any]) -> None:
    seen = {(row["scenario"], row["contestant"]) for row in outcome["rows"]}
    for scenario, ours, rival in [
        ("cold", "penstock", "safetensors"),
        ("warm", "penstock", "safetensors"),
        ("private", "penstock copy", "safetensors clone"),
        ("load_into", "penstock load_into", "safetensors copy_"),
    ]:
        assert (scenario, ours) in seen
        assert (scenario, rival) in seen


def test_cold_loads_start_with_nothing_resident_and_beside_a_raw_read(outcome: dict[str, Any]) -> None:
    cold = [run for run in outcome["runs"] if run["scenario"] == "cold"]
    assert all(run["raw_s"] > 0 for run in cold if not run["contestant"].startswith("ceiling"))
    # `None`: a kernel that does not tell.
    assert all(run["resident_before"] in (0, None) for run in cold)


def test_warm_loads_start_with_everything_resident(outcome: dict[str, Any]) -> None:
    warm = [run for run in outcome["runs"] if run["scenario"] == "warm"]
    assert all(run["resident_before"] is None or run["resident_before"] >= run["bytes"] for run in warm)


def test_a_quick_run_states_the_bounds_without_judging(outcome: dict[str, Any]) -> None:
    claims = [row["claim"] for row in outcome["bounds"]]
    assert any(claim.startswith("cold: share of the raw O_DIRECT read") for claim in claims)
    assert not any(row["judged"] for row in outcome["bounds"])
    assert "too small to be judged" in outcome["printed"]


def test_a_result_file_can_be_had_as_tables(outcome: dict[str, Any], tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps({key: outcome[key] for key in ("rows", "bounds")}))
    printed = subprocess.run([*BENCH, "--tables", results], capture_output=True, text=True, check=True)
    cells = [line.split("|")[1].strip() for line in printed.stdout.splitlines() if line.startswith("| ")]
    assert {row["contestant"] for row in outcome["rows"]} <= set(cells)
    assert cells.count("moe") == len(outcome["bounds"])
