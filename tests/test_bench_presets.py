"""Published tables run again: what their rows say, and what a quick run of each has. Made-up loads only."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from penstock.bench import checkpoints, command, contestants, presets, rounds, tables
from penstock.bench.contestants import CONTESTANTS
from penstock.bench.forkserver import Forkserver
from penstock.bench.rounds import Bench, Settings
from penstock.bench.scenarios import SCENARIOS

NAMES = list(presets.PRESETS)


def arguments_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


# What is published


@pytest.mark.parametrize("name", NAMES)
def test_each_published_row_has_its_source_what_is_timed_and_what_is_not_said(name):
    for row in presets.published(name)["rows"]:
        assert row["source"].startswith("https://"), row["as"]
        assert row["measures"] and row["not_said"] and row["cache"], row["as"]
        assert "seconds" in row or "rate" in row
        if row["scenario"] == "cold" and row["cache"] == "not said":
            assert "page cache" in row["not_said"], "a row beside cold loads says so where its source does not"


def test_table_ii_of_the_paper_is_the_startup_of_vllm_in_four_rows():
    rows = [row for row in presets.published("fastsafetensors-paper")["rows"] if "vLLM" in row["as"]]
    found = {(row["checkpoint"], row["as"].rpartition(", ")[2]): [] for row in rows}
    for row in rows:
        assert (row["measures"], row["cache"]) == ("vLLM's startup", "not said")
        assert "GPUDirect Storage" in row["not_said"] and row["contestant"] in ("safetensors", "fastsafetensors")
        found[row["checkpoint"], row["as"].rpartition(", ")[2]].append(row["seconds"])
    assert found == {
        ("llama-2-7b", "1 x A100"): [7.29, 3.67],
        ("llama-2-13b", "1 x A100"): [16.04, 6.88],
        ("llama-2-13b", "2 x A100"): [14.35, 6.02],
        ("llama-2-13b", "4 x L40S"): [12.39, 4.74],
    }


def test_blocks_are_blocks_and_no_bounce_buffer(monkeypatch):
    """ROCm's tests 9 and 11 have blocks of 160 MB beside buffers of 16 and 32 MB."""
    given: dict[str, Any] = {}

    class Loader:
        def __init__(self, pg: Any, device: str, **settings: Any) -> None:
            given.update(settings)

        def add_filenames(self, files: Any) -> None:
            pass

        def copy_files_to_device(self, **settings: Any) -> SimpleNamespace:
            given.update(settings)
            return SimpleNamespace()

        def get_keys(self) -> list[str]:
            return []

        def close(self) -> None:
            pass

    module = ModuleType("fastsafetensors")
    module.SafeTensorsFileLoader = Loader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastsafetensors", module)
    rows = [row for row in presets.published("fastsafetensors-rocm")["rows"] if "blocks" in row["as"]]
    assert len(rows) == 2
    for row, (threads, buffer) in zip(rows, ((16, 16), (32, 32)), strict=True):
        given.clear()
        contestants.named(row["contestant"]).load(SimpleNamespace(device="cpu", paths=[]))  # type: ignore[arg-type]
        assert given == {
            "bbuf_size_kb": buffer << 10, "max_threads": threads, "nogds": True, "max_copy_block_size": 160 << 20,
        }  # fmt: skip
    given.clear()
    contestants.named("fastsafetensors 8 threads, 8 MB").load(SimpleNamespace(device="cpu", paths=[]))  # type: ignore[arg-type]
    assert given == {"bbuf_size_kb": 8 << 10, "max_threads": 8, "nogds": True}


def test_second_starts_stand_beside_stock_ones_and_no_published_row():
    preset = presets.PRESETS["anyscale-model-loader"]
    table = presets.published(preset.name)
    assert preset.scenarios == ("bucket", "bucket-tls", "bucket-second", "bucket-upload")
    assert not any(row["scenario"] in ("bucket-second", "bucket-upload") for row in table["rows"])
    assert any("no published figure of a second start" in reason for reason in table["not_comparable"])
    names = {name for _, scenario, name in preset.beside() if scenario == "bucket-second"}
    assert {"boto3 to disk once, safetensors", "urllib to disk once, penstock"} <= names
    bench = Bench(Settings(rounds=1, folders=[], preset=preset.name), Forkserver())
    assert {one.name for one in bench.entrants(SCENARIOS["bucket-second"], "x")} == {*names, "penstock url, disk cache"}
    for name in preset.quick():
        assert "bucket-second" in preset.quick()[name]


def test_saves_to_a_bucket_stand_beside_a_file_and_boto3():
    preset = presets.PRESETS["anyscale-model-loader"]
    assert any("no published figure of a save" in reason for reason in presets.published(preset.name)["not_comparable"])
    stock = {"safetensors to disk, boto3", "safetensors to memory, boto3"}
    assert {name for _, scenario, name in preset.beside() if scenario == "bucket-upload"} == stock
    for device in ("cpu", "cuda:0"):
        bench = Bench(Settings(rounds=1, folders=[], device=device, preset=preset.name), Forkserver())
        assert {one.name for one in bench.entrants(SCENARIOS["bucket-upload"], "x")} == {*stock, "penstock save"}
        assert bench.measures(SCENARIOS["bucket-upload"], bench.entrants(SCENARIOS["bucket-upload"], "x")) == []
    assert all("bucket-upload" in scenarios for scenarios in preset.quick().values())


# Quick runs


@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_has_at_most_two_small_models_and_the_scenarios_of_their_rows(name):
    found = command.kinds(arguments_of("--preset", name, "--quick"), [])
    assert 1 <= len(found) <= 2
    beside = presets.PRESETS[name].beside()
    for model, kind in found.items():
        assert kind.scenarios and all((model, one) in {row[:2] for row in beside} for one in kind.scenarios)
        layout = kind.layout()
        assert 0.01e9 < layout.nbytes <= 0.11e9
        assert len(layout.tensors) < 5000


@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_loads_what_published_rows_stand_beside_and_penstock(name):
    preset = presets.PRESETS[name]
    beside = preset.beside()
    named = (*command.PLAIN, *(contestant for _, _, contestant in beside))
    settings = Settings(rounds=1, folders=[], preset=name, contestants=named, beside=frozenset(beside))
    bench = Bench(settings, Forkserver())
    for model, scenarios in preset.quick().items():
        for one in scenarios:
            entrants = bench.entrants(SCENARIOS[one], model)
            assert any(not entrant.rival for entrant in entrants)
            assert all((model, one, entrant.name) in beside for entrant in entrants if entrant.rival)
    loads = sum(bench.planned(model, scenarios, True) for model, scenarios in preset.quick().items())
    assert 1 <= loads <= 60


class Ran:
    """A run of the command in which nothing is loaded: what is asked of the benchmark."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.checkpoints: list[tuple[str, tuple[str, ...]]] = []
        self.settings: Settings | None = None
        self.folder = folder
        ran = self

        def checkpoint(bench: Bench, name: str, layout: Any, scenarios: Any, routes: bool = True) -> Any:
            ran.checkpoints.append((name, tuple(scenarios)))
            ran.settings = bench.settings
            bench.checkpoints[name] = {"cut": layout.cut}
            yield from ()

        monkeypatch.setattr(Bench, "checkpoint", checkpoint)

    def run(self, *words: str) -> None:
        place = ["--folder", str(self.folder / "made"), "--json", str(self.folder / "results.json")]
        assert command.run(arguments_of(*words, *place))


@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_loads_comes_first_and_the_published_figures_last(name, monkeypatch, tmp_path, capsys):
    ran = Ran(monkeypatch, tmp_path)
    ran.run("--preset", name, "--quick")
    out, err = capsys.readouterr()
    chosen = [model for model, _ in ran.checkpoints]
    assert err.splitlines()[0].endswith(f" loads of {', '.join(chosen)}, none begins after 270 s")
    assert ran.settings is not None and ran.settings.seconds == presets.QUICK_SECONDS <= 300
    assert (ran.settings.rounds, ran.settings.ceilings, ran.settings.traces) == (1, False, False)
    table = presets.published(name)
    lines = [line for line in out.splitlines() if line.startswith("| ")]
    assert len(lines) == len(table["rows"]) + 1
    for line, row in zip(lines[1:], table["rows"], strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:4] == [row["checkpoint"], row["as"], row["measures"], row["cache"]]
        assert bool(cells[4]) == ("seconds" in row) and bool(cells[5]) == ("rate" in row)
    assert "ranks no loader" in out


@pytest.mark.sampled(0)
def test_the_summary_has_a_quick_run_too(monkeypatch, tmp_path, capsys):
    ran = Ran(monkeypatch, tmp_path)
    ran.run("--preset", "summary", "--quick")
    assert ran.checkpoints == [(name, ("cold", "cold-freed", "warm")) for name in ("dense", "moe")]
    assert ran.settings is not None and (ran.settings.seconds, ran.settings.rounds) == (presets.QUICK_SECONDS, 1)
    found = command.kinds(arguments_of("--preset", "summary", "--quick"), [])
    assert all(kind.layout().nbytes < 0.11e9 for kind in found.values())
    assert " loads of dense, moe, none begins after 270 s" in capsys.readouterr().err.splitlines()[0]


def test_a_run_says_first_how_many_loads_it_has(monkeypatch, tmp_path, capsys):
    Ran(monkeypatch, tmp_path).run("--quick", "--checkpoint", "minilm", "--contestant", "penstock", "--loads", "7")
    assert capsys.readouterr().err.splitlines()[0] == "7 loads of minilm"


def test_more_than_two_models_are_not_quick(monkeypatch, tmp_path):
    three = [word for model in ("llama-2-7b", "llama-2-13b", "llama-2-70b") for word in ("--checkpoint", model)]
    with pytest.raises(ValueError, match="at most 2 of --checkpoint"):
        Ran(monkeypatch, tmp_path).run("--preset", "fastsafetensors-paper", "--quick", *three)


def test_no_load_begins_after_the_time_is_over(monkeypatch, capsys):
    two = ("penstock", "safetensors")
    bench = Bench(Settings(2, [], contestants=two, ceilings=False, traces=False, seconds=10.0), Forkserver())
    clock = [bench._begun]
    monkeypatch.setattr(rounds.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(rounds, "evict", lambda files: None)

    def loads(entrant: Any, *more: Any) -> list[dict[str, Any]]:
        clock[0] += 6.0
        return [{"load_s": 6.0, "cpu_s": 1.0, "bytes": 1, "verified_bytes": 1, "load": 0}]

    monkeypatch.setattr(bench, "loads", loads)
    monkeypatch.setattr(rounds, "fill", lambda files: None)
    bench.scenario(SCENARIOS["latency"], checkpoints.Placed("x", "x", [], None, 1, 1), {})
    assert [run["contestant"] for run in bench.runs] == ["penstock", "safetensors"]
    assert set(bench.absent.values()) >= {"no time was left"}
    assert {"penstock, x, latency", "safetensors, x, latency"} <= set(bench.absent)


def test_a_quick_run_without_a_table_prints_none(capsys):
    about = {"cpu": "x", "cores": 1, "memory": 0, "kernel": "0", "file_system": "ext4", "python": "3", "versions": {}}
    result = {"machine": about | {"load_average": [0.0]}, "load_average_at_end": [0.0], "command": "penstock bench"}
    tables.print_results(result | {"rows": [], "bounds": [], "absent": {}, "quick": True, "checkpoints": {}})
    assert "|" not in capsys.readouterr().out


def test_contestants_of_one_table_take_part_in_no_other_run():
    assert {one.preset for one in CONTESTANTS} == {None, "fastsafetensors-rocm"}
