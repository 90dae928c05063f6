"""The benchmark runs, compares every byte, and says what it found: counts and shapes, never times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ordeal import results
from penstock.bench.scenarios import COLD

# Some twenty processes that import torch each, and what they say of the page cache: once, and alone.
pytestmark = [pytest.mark.timeout(600), pytest.mark.machine]

BENCH = [sys.executable, "-m", "penstock.cli", "bench"]
TWO = ["penstock", "safetensors", "penstock load_into", "safetensors copy_", "penstock copy", "pread floor"]


def bench(folder: Path, *arguments: str) -> dict[str, Any]:
    report = folder / "results.json"
    done = subprocess.run(
        [*BENCH, "--quick", "--rounds", "1", "--folder", folder, "--json", report, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    return found | {"printed": done.stdout}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    contestants = [word for name in TWO for word in ("--contestant", name)]
    return bench(tmp_path_factory.mktemp("bench"), "--checkpoint", "dense", "--no-traces", "--no-routes", *contestants)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The scenarios that are not compared of every checkpoint, with shards in two folders."""
    folder = tmp_path_factory.mktemp("bench")
    names = ("tmpfs", "second", "two", "limited", "latency")
    scenarios = [word for name in names for word in ("--scenario", name)]
    only = ["--contestant", "penstock copy", "--loads", "3", "--no-traces"]
    spread = ["--folder", str(folder / "second drive")]
    return bench(folder, "--checkpoint", "dense", "--size", "3e7", *only, *scenarios, *spread)


def loads_of(outcome: dict[str, Any], scenario: str | None = None) -> list[dict[str, Any]]:
    return [run for run in outcome["runs"] if run["kind"] != "ceiling" and scenario in (None, run["scenario"])]


def test_names_the_machine_the_versions_and_the_command(outcome: dict[str, Any]) -> None:
    assert outcome["schema"] == 3
    assert outcome["quick"] is True
    assert outcome["preset"] is None
    assert "--checkpoint dense" in outcome["command"]
    wanted = {"cpu", "cores", "memory", "kernel", "file_system", "python", "versions", "gpu", "load_average"}
    assert wanted <= set(outcome["machine"])
    assert outcome["machine"]["versions"]["safetensors"]
    assert outcome["checkpoints"]["dense"]["tensors"] == 39
    assert outcome["absent"]["instanttensor"]  # it loads to GPUs only


@results
def test_every_load_has_every_byte_compared_with_the_files(outcome: dict[str, Any], others: dict[str, Any]) -> None:
    for run in loads_of(outcome) + loads_of(others):
        assert "error" not in run, run
        assert run["verified_bytes"] == run["bytes"] > 10_000_000
        assert run["different"] == []
    assert {run["tensors"] for run in loads_of(outcome)} == {39}
    assert all(row["verified"] for row in outcome["rows"] + others["rows"] if row["kind"] != "ceiling")


def test_every_scenario_has_penstock_and_a_rival(outcome: dict[str, Any]) -> None:
    seen = {(row["scenario"], row["contestant"], row["kind"]) for row in outcome["rows"]}
    for scenario, ours, rival in [
        ("cold", "penstock", "safetensors"),
        ("cold-freed", "penstock", "safetensors"),
        ("warm", "penstock", "safetensors"),
        ("private", "penstock copy", "pread floor"),
        ("load_into", "penstock load_into", "safetensors copy_"),
    ]:
        assert (scenario, ours, "penstock") in seen
        assert (scenario, rival, "rival") in seen


def test_rows_have_the_columns_of_the_schema(outcome: dict[str, Any]) -> None:
    always = {
        "checkpoint",
        "scenario",
        "contestant",
        "kind",
        "loads",
        "median_s",
        "min_s",
        "max_s",
        "bytes",
        "gb_per_s",
    }
    measured = {"semantics", "first_tensor_s", "load_s", "touch_s", "cpu_s", "cpu_s_per_gb", "memory", "setup_s"}
    measured |= {"ranked"}
    for row in outcome["rows"]:
        assert always <= set(row), row
        if row["kind"] != "ceiling":
            assert measured | {"verified"} <= set(row), row
            assert 0 < row["first_tensor_s"] <= row["load_s"]
            assert ("ceiling" in row) is ("share" in row) is (row["scenario"] != "warm"), row
    private = next(row for row in outcome["rows"] if row["contestant"] == "penstock copy")
    assert private["memory"] > 0.9 * private["bytes"]


@pytest.mark.parametrize("scenario", COLD)
def test_cold_loads_start_with_nothing_resident_and_beside_a_raw_read(outcome: dict[str, Any], scenario: str) -> None:
    assert all(run["raw_s"] > 0 for run in loads_of(outcome, scenario))
    # `None`: a kernel that does not tell.
    assert all(run["resident_before"] in (0, None) for run in outcome["runs"] if run["scenario"] == scenario)


@pytest.mark.parametrize(("scenario", "kind"), [("cold", "mapped"), ("cold-freed", "freed")])
def test_every_cold_contestant_comes_after_the_same_predecessor(
    outcome: dict[str, Any], scenario: str, kind: str
) -> None:
    runs = [run for run in outcome["runs"] if run["scenario"] == scenario]
    assert {run["kind"] for run in runs} == {"penstock", "rival", "ceiling"}
    size = next(run["bytes"] for run in runs if run["kind"] == "ceiling")  # of the files
    assert [run["predecessor"] for run in runs] == [{"kind": kind, "bytes": size}] * len(runs)
    assert not any("predecessor" in run for run in outcome["runs"] if run["scenario"] not in COLD)


def test_cold_loads_are_ranked_by_the_last_byte_touched(outcome: dict[str, Any]) -> None:
    for run in loads_of(outcome):
        if run["scenario"] in COLD:
            assert run["seconds"] == run["load_s"] + run["touch_s"]
            assert run["ranked"] == "last byte touched"
        else:
            assert run["ranked"] == "load"


def test_a_second_start_comes_after_the_fill_and_beside_a_warm_one(others: dict[str, Any]) -> None:
    [run] = loads_of(others, "second")
    assert run["first_s"] > 0
    assert run["warm_s"] > 0
    if "fill_s" in run:
        assert run["fill_state"] in ("finished", "stopped")  # and not running any more


def test_ceilings_can_be_left_out(tmp_path: Path) -> None:
    only = ["--contestant", "pread floor", "--scenario", "cold", "--no-ceilings", "--no-traces", "--size", "3e7"]
    found = bench(tmp_path, "--checkpoint", "llama-2-7b", *only)
    assert [run["kind"] for run in found["runs"]] == ["rival"] * 2
    assert found["calibration"] == []
    assert not any("raw_s" in run for run in found["runs"])


def test_warm_loads_start_with_everything_resident(outcome: dict[str, Any]) -> None:
    first = [run for run in loads_of(outcome, "warm") if run["load"] == 0]
    assert all(run["resident_before"] is None or run["resident_before"] >= run["bytes"] for run in first)


def test_scenarios_put_the_page_cache_into_their_state(others: dict[str, Any]) -> None:
    assert not [name for name in others["absent"] if name.startswith("scenario") and "limited" not in name]
    for run in loads_of(others):
        before, scenario = run.get("resident_before"), run["scenario"]
        if before is None or run["load"] > 0:
            continue
        if scenario in ("two", "limited"):
            assert before == 0
        elif scenario != "second":  # it finds what the loader before it left
            assert before >= run["bytes"]


def test_latency_has_a_row_of_first_loads_and_one_of_later_ones(others: dict[str, Any]) -> None:
    [row] = [row for row in others["rows"] if row["scenario"] == "latency" and row["kind"] == "penstock"]
    assert row["loads"] == 3
    assert row["later_s"] <= row["p99_s"]


def test_shards_lie_in_all_folders(others: dict[str, Any]) -> None:
    assert others["checkpoints"]["dense"]["files"] == 3


def test_ceilings_are_measured_beside_what_they_bound(outcome: dict[str, Any]) -> None:
    measured = {(one["checkpoint"], one["measure"]) for one in outcome["calibration"]}
    assert {("dense", measure) for measure in ("direct", "populate", "place", "fresh", "copy")} <= measured
    in_turn = {(row["scenario"], row["contestant"]) for row in outcome["rows"] if row["kind"] == "ceiling"}
    assert {("cold", "ceiling: populate"), ("private", "ceiling: fresh"), ("load_into", "ceiling: copy")} <= in_turn


def test_a_quick_run_states_the_bounds_without_judging(outcome: dict[str, Any]) -> None:
    claims = [row["claim"] for row in outcome["bounds"]]
    assert any(claim.startswith("cold: share of") for claim in claims)
    assert any("fastest rival (safetensors)" in claim for claim in claims)
    assert not any(row["judged"] for row in outcome["bounds"])
    assert "too small to be judged: it shows that everything works, and ranks no loader" in outcome["printed"]
    assert "fastest rival" not in outcome["printed"]
    assert "GB/s" not in outcome["printed"]


def test_a_result_file_can_be_had_as_tables_and_as_a_page(outcome: dict[str, Any], tmp_path: Path) -> None:
    results, page = tmp_path / "results.json", tmp_path / "page.html"
    results.write_text(json.dumps(outcome))
    command = [*BENCH, "--tables", results, "--html", page]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    text = page.read_text()
    assert all(row["contestant"] in text for row in outcome["rows"])
    cells = [line.split("|")[1].strip() for line in printed.stdout.splitlines() if line.startswith("| ")]
    assert {row["contestant"] for row in outcome["rows"]} <= {
        cell.removesuffix(" (measurement fault)") for cell in cells
    }
    assert cells.count("dense") == len(outcome["bounds"])


@pytest.mark.parametrize("wrong", [["--checkpoint", "nonsense"], ["--contestant", "nobody"], ["--device", "tpu"]])
def test_what_is_not_there_is_a_wrong_usage_that_says_what_is(wrong: list[str], tmp_path: Path) -> None:
    done = subprocess.run([*BENCH, *wrong, "--folder", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there are" in done.stderr
    assert {"--checkpoint": "gpt2", "--contestant": "fastsafetensors", "--device": "cuda"}[wrong[0]] in done.stderr
