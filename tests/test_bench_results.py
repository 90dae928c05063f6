"""What the benchmark makes of its measurements: rows, shares, faults, bounds, published figures. Made-up loads only."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from penstock.bench import bounds, command, presets, tables
from penstock.bench.contestants import CONTESTANTS
from penstock.bench.forkserver import Forkserver
from penstock.bench.results import ALONE, TOLERANCE, TOUCHED, percentile, summarise
from penstock.bench.rounds import Bench, Settings
from penstock.bench.scenarios import SCENARIOS, accepts, ceilings, chosen
from penstock.synthetic.layouts import MODELS

GB = 10**9


def load(seconds: float, contestant: str = "penstock", scenario: str = "cold", **more: Any) -> dict[str, Any]:
    """One verified load of a gigabyte."""
    run = {"checkpoint": "x", "scenario": scenario, "contestant": contestant, "kind": "rival", "semantics": "any"}
    run |= {"seconds": seconds, "load_s": seconds, "cpu_s": seconds / 2, "bytes": GB, "verified_bytes": GB}
    if contestant.startswith("penstock"):
        run["kind"] = "penstock"
    return run | {"different": [], "load": 0, "memory": 0} | more


def ceiling(seconds: float, measure: str, scenario: str) -> dict[str, Any]:
    run = {"checkpoint": "x", "scenario": scenario, "contestant": f"ceiling: {measure}", "kind": "ceiling"}
    return run | {"seconds": seconds, "load_s": seconds, "bytes": GB, "ceiling": "threads 2"}


def row_of(runs: list[dict[str, Any]], contestant: str = "penstock", **more: Any) -> dict[str, Any]:
    return next(row for row in summarise(runs, [], **more) if row["contestant"] == contestant)


def test_a_row_has_the_median_the_spread_and_the_rate_of_first_loads():
    row = row_of([load(seconds) for seconds in (1.0, 4.0, 2.0)])
    assert (row["median_s"], row["min_s"], row["max_s"], row["loads"]) == (2.0, 1.0, 4.0, 3)
    assert row["gb_per_s"] == 0.5
    assert row["cpu_s_per_gb"] == 1.0
    assert row["verified"] is True
    assert "later_s" not in row


def test_later_loads_of_a_process_stand_apart_from_the_first():
    later = [load(0.01 * n, scenario="latency", load=n) for n in range(1, 101)]
    row = row_of([load(9.0, scenario="latency"), *later])
    assert row["median_s"] == 9.0
    assert row["later_s"] == pytest.approx(0.505)
    assert row["p99_s"] == pytest.approx(0.99)


def test_the_percentile_is_a_value_that_was_measured():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0
    assert percentile([7.0], 1) == 7.0


def test_one_byte_that_differs_is_in_the_row():
    assert row_of([load(1.0), load(1.0, verified_bytes=GB - 1)])["verified"] is False
    assert row_of([load(1.0), load(1.0, different=["a"])])["verified"] is False
    assert row_of([load(1.0), load(1.0, load=1, different=["a"])])["verified"] is False


def test_a_failure_takes_the_place_of_figures():
    row = row_of([load(1.0), {**load(1.0), "error": "no"}])
    assert row["error"] == "no"
    assert "median_s" not in row


def test_cold_loads_are_put_beside_the_raw_read_right_before_each():
    row = row_of([load(2.0, raw_s=1.0), load(4.0, raw_s=3.0), load(2.0, raw_s=1.5)])
    assert row["ceiling"] == "direct"
    assert row["share"] == 0.75
    assert "fault" not in row


def test_the_way_that_reads_faster_is_the_ceiling_of_a_cold_load():
    runs = [load(2.0, raw_s=1.5), ceiling(1.0, "populate", "cold")]
    row = row_of(runs)
    assert (row["ceiling"], row["share"]) == ("populate", 0.5)


@pytest.mark.parametrize(("seconds", "fault"), [(1.0 - TOLERANCE - 0.01, True), (1.0 - TOLERANCE + 0.01, False)])
def test_a_load_above_its_ceiling_is_a_fault(seconds, fault):
    runs = [load(seconds, scenario="private", semantics="private"), ceiling(1.0, "fresh", "private")]
    row = row_of([*runs, ceiling(1.5, "fresh", "private")])
    assert ("fault" in row) is fault
    assert row["share"] == pytest.approx(1.25 / seconds)


def test_the_fastest_measurement_of_a_ceiling_decides_also_if_it_is_of_the_calibration():
    runs = [load(0.6, scenario="private", semantics="private"), ceiling(1.0, "fresh", "private")]
    at_rest = {"checkpoint": "x", "measure": "fresh", "bytes": GB, "seconds": 0.5}
    assert "fault" in row_of(runs)
    [row] = [row for row in summarise(runs, [at_rest]) if row["kind"] == "penstock"]
    assert "fault" not in row


def test_a_share_is_of_the_ceilings_median_which_the_row_names():
    # Before this contestant's own loads the disk happened to be slow; the share is of the ceiling that is drawn
    runs = [load(2.0, raw_s=1.5), load(1.0, "safetensors", raw_s=0.5), load(1.0, "safetensors", raw_s=0.5)]
    for row in summarise(runs, []):
        assert row["ceiling_s"] == pytest.approx(0.5)
        assert row["share"] == pytest.approx(row["ceiling_s"] / row["median_s"])


def test_a_fault_names_the_ceiling_that_was_that_fast():
    # `direct` is usually the faster one and so the ceiling; `populate` was once faster than it ever was
    runs = [load(0.5, raw_s=0.8), load(0.5, raw_s=0.8), ceiling(0.7, "populate", "cold")]
    runs += [ceiling(1.0, "populate", "cold"), ceiling(1.0, "populate", "cold")]
    row = row_of(runs)
    assert row["ceiling"] == "direct"
    assert "populate alone took 0.700 s at its fastest" in row["fault"]


def recorded(*runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs as the benchmark keeps them: with the time that they are ranked by."""
    bench = Bench(Settings(rounds=1, folders=[]), Forkserver())
    for run in runs:
        bench.record(run | {"round": 0})
    return bench.runs


EARLY = {"touch_s": 2.0, "touch_cpu_s": 0.5, "touch_absent_bytes": 0, "touch_major_faults": 0}
LATE = {"touch_s": 0.1, "touch_cpu_s": 0.1, "touch_absent_bytes": 0, "touch_major_faults": 0}


@pytest.mark.parametrize("scenario", [one.name for one in SCENARIOS.values() if one.from_disk])
def test_loads_from_the_disk_are_ranked_by_the_last_byte_touched(scenario, capsys):
    # One returns at once and leaves it to the first touch to bring the pages; no page counts as absent
    runs = recorded(load(0.1, "safetensors", scenario, **EARLY), load(1.0, "penstock", scenario, **LATE))
    rows = summarise(runs, [])
    early, late = rows
    assert (early["contestant"], early["median_s"], early["load_s"]) == ("safetensors", 2.1, 0.1)
    assert (late["contestant"], late["median_s"], late["load_s"]) == ("penstock", 1.1, 1.0)
    assert early["ranked"] == late["ranked"] == TOUCHED
    assert early["cpu_s"] == pytest.approx(0.05 + 0.5)  # the touch's too
    tables.print_tables({"rows": rows, "bounds": [], "preset": None})
    printed = capsys.readouterr().out
    assert "ranked by the time to the last byte touched" in printed
    assert "| | last byte s | load s |" in printed
    assert printed.index("| penstock | 1.100 | 1.000 |") < printed.index("| safetensors | 2.100 | 0.100 |")


@pytest.mark.parametrize("scenario", [one.name for one in SCENARIOS.values() if not one.from_disk])
def test_other_loads_are_ranked_by_the_load_alone(scenario, capsys):
    rows = summarise(recorded(load(0.1, "safetensors", scenario, **EARLY)), [])
    assert (rows[0]["median_s"], rows[0]["ranked"]) == (0.1, ALONE)
    tables.print_tables({"rows": rows, "bounds": [], "preset": None})
    assert "ranked by the time of the load alone" in capsys.readouterr().out


def test_what_a_load_left_on_the_disk_is_added_where_the_load_alone_is_ranked():
    [row] = summarise(recorded(load(0.1, scenario="warm", **EARLY | {"touch_absent_bytes": 4096})), [])
    assert row["median_s"] == 2.1
    assert row["cpu_s"] == pytest.approx(0.55)


def test_on_a_gpu_there_is_nothing_to_touch():
    [row] = summarise(recorded(load(0.1)), [], on_gpu=True)
    assert (row["median_s"], row["ranked"]) == (0.1, ALONE)


def test_cold_means_both_states_of_memory_and_whoever_takes_part_in_one_takes_part_in_both():
    assert chosen(["warm", "cold"]) == ("warm", "cold", "cold-freed")
    assert chosen(["cold-freed"]) == ("cold-freed",)
    assert (SCENARIOS["cold"].state, SCENARIOS["cold-freed"].state) == (
        "memory in use before",
        "memory given back before",
    )
    for one in CONTESTANTS:
        assert ("cold" in one.scenarios) is ("cold-freed" in one.scenarios), one.name


def test_the_summary_is_three_checkpoints_cold_and_warm_without_ceilings():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args(["--preset", "summary"])
    found = command.kinds(arguments, [])
    assert {name: chosen(kind.scenarios) for name, kind in found.items()} == dict.fromkeys(
        ("gpt2", "dense", "moe"), ("cold", "cold-freed", "warm")
    )
    assert set(presets.SUMMARY.contestants) <= {one.name for one in CONTESTANTS}
    assert "summary" not in presets.PRESETS  # there is no published table to print beside it


def test_a_second_start_stands_beside_a_warm_one_and_tells_how_long_the_fill_took(capsys):
    more = {"semantics": "private", "warm_s": 1.0, "first_s": 3.0, "fill_s": 0.7, "fill_state": "finished"}
    runs = [load(seconds, "penstock copy", "second", **more) for seconds in (1.05, 1.2)]
    runs.append(load(1.05, "penstock copy", "second", **more | {"fill_s": 9.0, "fill_state": "stopped"}))
    rows = summarise(runs, [])
    [claim] = [row for row in bounds.bounds(rows, judged=True) if row["claim"].startswith("second, copied")]
    assert claim["holds"]
    assert claim["value"] == pytest.approx(1.1 / 1.05)
    tables.print_tables({"rows": rows, "bounds": [], "preset": None})
    heading, _, line = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][:3]
    told = dict(zip(heading.split(" | "), line.split(" | "), strict=True))
    assert (told["median s"], told["warm s"], told["fill s"]) == ("1.050", "1.000", "0.700")


def program(name: str) -> ModuleType:
    """A program of `benches/`, which is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "benches" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_promises_of_copied_loads_are_judged_by_what_was_measured(capsys):
    copied = program("copied")

    def turn(seconds: float, cache: str = "keep", **more: Any) -> list[dict[str, Any]]:
        return [{"seconds": seconds, "cpu": 0.1, "cache": cache, "reason": ""} | more]

    fill = {"state": "finished", "reason": "", "seconds": 0.5, "nbytes": GB}
    turns = {"cold, no option": turn(2.2, "fill", fill=fill), "cold, keep": turn(3.0), "cold, bypass": turn(1.9)}
    turns |= {"second, no option": turn(1.0, fill=fill | {"state": "stopped"}), "warm, no option": turn(1.0)}
    of = {"nbytes": GB, "turns": turns, "warm loads": {"loads": 200, "median": 1.0, "p99": 1.9}}
    of["promises"] = copied.promises(of)
    assert [(round(one["value"], 2), one["holds"]) for one in of["promises"]] == [
        (1.16, False), (1.0, True), (1.9, True),
    ]  # fmt: skip
    about = {"cpu": "x", "cores": 2, "kernel": "6", "file_system": "ext4", "load_average": [0.5]}
    document = {"machine": about, "load_average_at_end": [1.0], "time": "now", "seconds": 1, "command": "python it"}
    copied.show(document | {"rounds": 1, "checkpoints": {"x": of}})
    printed = capsys.readouterr().out
    assert "| cold, no option | 2.200 | 1.16 | 2.200 | 2.200 | 0.100 | fill 1; filled in 0.50 s |" in printed
    assert "| second, no option | 1.000 | 1.00 | 1.000 | 1.000 | 0.100 | keep 1; 1 not filled |" in printed
    assert "- cold: times as long as the faster of keep and bypass: 1.16 (at most 1.1): **missed**" in printed
    assert "200 warm loads of one process: median 1.0000 s, p99 1.9000 s" in printed


def test_where_a_first_touch_is_no_slower_the_missing_bytes_alone_decide_of_a_second_start(capsys):
    copied = program("copied")

    def judged(first: float, second: float, warm: float, missing: int = 0) -> list[bool | None]:
        """Of the missing bytes, and of the second start, where the first touch takes so many us and another 0.3."""
        load = {"cpu": 0.1, "cache": "keep", "reason": "", "missing": missing}
        turns = {"second, no option": [load | {"seconds": second}], "warm, no option": [load | {"seconds": warm}]}
        of = {"nbytes": GB, "turns": turns, "touches": [{"first": first, "second": 0.3}] * 3}
        of["promises"] = copied.promises(of)
        about = {"cpu": "x", "cores": 2, "kernel": "6", "file_system": "ext4", "load_average": [0.5]}
        document = {"machine": about, "load_average_at_end": [1.0], "time": "now", "seconds": 1, "command": "it"}
        copied.show(document | {"rounds": 1, "checkpoints": {"x": of}})
        return [one["holds"] for one in of["promises"]]

    assert judged(9.0, 1.05, 1.0) == [True, True]
    assert judged(9.0, 0.059, 0.05) == [True, True]
    assert judged(9.0, 1.2, 1.0, missing=4096) == [False, False]
    capsys.readouterr()
    assert judged(0.3, 1.2, 1.0, missing=4096) == [False, None]
    printed = capsys.readouterr().out
    assert "first touch 0.30 us of processor time a page, second touch 0.30 us" in printed
    assert "1.20, decides nothing: a first touch is not slower" in printed


def test_the_tables_of_the_documents_are_medians_and_ranges_to_the_last_byte_touched(tmp_path, monkeypatch, capsys):
    readme = program("readme")
    runs = []
    for scenario in ("cold", "cold-freed", "warm"):
        for times, contestant in enumerate(readme.LOADERS, 1):
            for seconds in (0.2, 0.4, 0.3):
                more = LATE if scenario != "warm" else LATE | {"touch_s": 0.001}
                seconds *= times if scenario == "cold" else 1.5 / times if scenario == "cold-freed" else times / 100
                runs.append(load(seconds, contestant, scenario, checkpoint="gpt2", **more))
    results = tmp_path / "results.json"
    about = {"cpu": "x", "cores": 2, "kernel": "6"}
    results.write_text(json.dumps({"runs": recorded(*runs), "machine": about, "time": "now", "command": "it"}))
    page = tmp_path / "page.md"
    places = [
        "before",
        "<!-- figures: short -->",
        "old",
        "<!-- end -->",
        "<!-- figures: cold -->",
        "",
        "<!-- end -->",
        "",
    ]
    page.write_text("\n".join(places))
    monkeypatch.setattr(readme, "CHECKPOINTS", {"gpt2": "GPT-2"})
    monkeypatch.setattr(sys, "argv", ["readme.py", str(results), "--write", str(page)])
    for _ in range(2):
        readme.main()
        lines = page.read_text().splitlines()
        assert lines[:4] == [*places[:2], "|  | GPT-2: cold | GPT-2: warm |", "|---|---|---|"]
        assert lines[4:8] == [
            "| Penstock | **0.40 s** | **4 ms** |",
            "| safetensors | 0.70 s | 7 ms |",
            "| fastsafetensors | 1.30 s | 13 ms |",
            "| Run:ai | 1.60 s | 16 ms |",
        ]
        assert lines[8:10] == places[3:5]
        assert lines[12].startswith("| gpt2, cold | 0.40 s (0.30 to 0.50) | 0.70 s") and lines[12].endswith("| 0.57 |")
        assert lines[13].startswith("| gpt2, cold-freed | **0.55 s (0.40 to 0.70)** |")
    assert lines[12] in capsys.readouterr().out
    kept, made = tmp_path / "kept.json", page.read_text()
    monkeypatch.setattr(sys, "argv", ["readme.py", str(results), "--keep", str(kept)])
    readme.main()
    assert "runs" not in json.loads(kept.read_text())
    page.write_text("\n".join(places))
    monkeypatch.setattr(sys, "argv", ["readme.py", str(kept), "--write", str(page)])
    readme.main()
    assert page.read_text() == made  # as from all of the loads
    monkeypatch.setattr(sys, "argv", ["readme.py", str(results), "--write", str(page)])
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="nothing was written"):
        readme.main()
    results.write_text(json.dumps({"runs": [], "machine": about, "time": "now", "command": "it"}))
    with pytest.raises(SystemExit, match="no verified loads of gpt2, cold, penstock"):
        readme.main()


def test_the_tables_of_the_documents_are_those_of_the_result_file():
    top = Path(__file__).parents[1]
    results = json.loads((top / "benches/results/two-core-vm-summary.json").read_text())
    for document in (top / "README.md", top / "docs/benchmarks.md"):
        text = document.read_text()
        assert program("readme").filled(text, results, str(document)) == text


def test_no_result_that_is_kept_has_single_loads():
    for path in (Path(__file__).parents[1] / "benches/results").iterdir():
        kept = json.loads(path.read_text())
        assert not {"runs", "traces"} & kept.keys(), f"{path}: benches/readme.py RESULTS --keep {path}"


def test_a_quick_run_prints_no_time_and_no_ranking(capsys):
    rows = summarise([load(0.9, "safetensors"), load(0.5, raw_s=0.1), ceiling(0.1, "populate", "cold")], [])
    about = {"cpu": "x", "cores": 1, "memory": 0, "kernel": "0", "file_system": "ext4", "python": "3", "versions": {}}
    result = {"machine": about | {"load_average": [0.0]}, "load_average_at_end": [0.0], "command": "penstock bench"}
    result |= {"rows": rows, "bounds": bounds.bounds(rows, judged=False), "absent": {}, "quick": True}
    assert result["bounds"]
    tables.print_results(result)
    printed = capsys.readouterr().out
    _, found = printed.split(
        "A quick run is too small to be judged: it shows that everything works, and ranks no loader."
    )
    assert not re.search(r"\d\.\d|GB/s|share|bound|fast", found)
    assert found.index("safetensors") < found.index("penstock")  # in their turn, the slower one first
    assert found.count("1 load of 1000 MB, every byte verified") == 2


def test_zero_copy_has_no_ceiling_and_so_no_fault():
    row = row_of([load(1e-6, scenario="warm"), ceiling(1.0, "copy", "warm")])
    assert "ceiling" not in row
    assert "fault" not in row


def test_on_a_gpu_the_slower_stage_is_the_ceiling():
    runs = [load(2.0, scenario="warm"), ceiling(1.0, "copy", "warm"), ceiling(0.5, "host_to_device", "warm")]
    row = row_of(runs, on_gpu=True)
    assert (row["ceiling"], row["share"]) == ("copy", 0.5)
    half = [load(2.0, scenario="warm"), ceiling(0.5, "host_to_device", "warm")]
    assert "ceiling" not in row_of(half, on_gpu=True)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_every_scenario_compares_penstock_with_a_rival_of_like_semantics(scenario, on_gpu):
    device = "cuda" if on_gpu else "cpu"
    there = [
        one
        for one in CONTESTANTS
        if device in one.devices
        and accepts(scenario, one.semantics, on_gpu)
        and (not one.scenarios or scenario.name in one.scenarios)
        and one.preset is None
    ]
    ours = {one.semantics for one in there if not one.rival}
    rivals = {one.semantics for one in there if one.rival}
    if on_gpu and not {"any", "into", "served", "kept", "sent"} & set(scenario.semantics):
        assert not there  # memory of a GPU is private memory: `warm` compares it
        return
    assert ours & rivals
    for one in there:
        for way in ceilings(scenario, one.semantics, on_gpu):
            assert ("host_to_device" in way) is on_gpu


def test_names_of_contestants_are_unique():
    names = [one.name for one in CONTESTANTS]
    assert len(names) == len(set(names))
    assert all(set(one.scenarios) <= set(SCENARIOS) for one in CONTESTANTS)


def test_bounds_ask_for_the_fastest_among_like_semantics():
    runs = [load(1.0), load(2.0, "safetensors"), load(0.5, "torch.load", semantics="private")]
    found = bounds.bounds(summarise(runs, []), judged=True)
    [first] = [bound for bound in found if "fastest rival" in bound["claim"]]
    assert "safetensors" in first["claim"]
    assert (first["value"], first["holds"], first["judged"]) == (2.0, True, True)
    slower = bounds.bounds(summarise([load(3.0), load(2.0, "safetensors")], []), judged=True)
    assert not next(bound for bound in slower if "fastest rival" in bound["claim"])["holds"]


def test_auto_is_held_to_the_faster_of_keep_and_bypass():
    runs = [load(1.2), load(1.0, "penstock keep"), load(5.0, "penstock bypass")]
    [bound] = [one for one in bounds.bounds(summarise(runs, []), True) if "keep and bypass" in one["claim"]]
    assert bound["value"] == pytest.approx(1 / 1.2)
    assert not bound["holds"]


def test_every_preset_has_published_figures_with_their_source_and_names_what_there_is():
    names = {one.name for one in CONTESTANTS}
    for preset in presets.PRESETS.values():
        table = presets.published(preset.name)
        assert set(preset.models) <= set(MODELS)
        assert set(preset.scenarios) <= set(SCENARIOS)
        assert set(preset.contestants) <= names
        assert table["not_comparable"]
        for row in table["rows"]:
            assert table["source"].startswith("https://")
            assert row["checkpoint"] in preset.models
            assert row["scenario"] in preset.scenarios
            assert row["contestant"] is None or row["contestant"] in (preset.contestants or names)


def test_published_rates_agree_with_their_seconds_in_their_unit():
    # 548,105,171 bytes of GPT-2 in 0.268 s are 1.91 GiB/s and 2.05 GB/s
    table = presets.published("fastsafetensors-rocm")
    sizes = {"gpt2": 548_105_171, "gpt2-medium": 1_519_984_962}
    for row in table["rows"]:
        if not row["as"].startswith("to F16"):  # its rate is that of the bytes that came out
            assert sizes[row["checkpoint"]] / 2**30 / row["seconds"] == pytest.approx(row["rate"], rel=0.03)


def test_published_rows_name_the_threads_and_the_buffer_of_their_contestant():
    # Tests 1 to 3, 5, 6, 8, 9 and 11 of the table, by their seconds: (threads, MB of buffer)
    ran = {0.268: (16, 16), 0.246: (32, 32), 0.243: (8, 8), 0.410: (32, 32), 0.332: (32, 32), 0.195: (16, 16)}
    ran |= {0.235: (16, 16), 0.265: (32, 32)}
    rows = [row for row in presets.published("fastsafetensors-rocm")["rows"] if "mmap" not in row["as"]]
    assert len(rows) == len(ran)
    for row in rows:
        threads, megabytes = ran[row["seconds"]]
        assert f"{threads} threads, {megabytes} MB" in row["as"]
        # Tests 9 and 11 have blocks of 160 MB besides
        blocks = ", blocks of 160 MB" if row["seconds"] in (0.235, 0.265) else ""
        assert row["contestant"] == f"fastsafetensors {threads} threads, {megabytes} MB{blocks}"


def test_the_io_uring_study_has_its_source_and_figures():
    table = presets.published("io-uring-study")
    assert "Making Cold Start Latencies go Brrrr, Part 1" in table["title"] and "Parasail" in table["title"]
    for row in table["rows"]:
        assert 67 < row["rate"] * row["seconds"] < 69  # GiB: all of one model


def test_a_preset_prints_published_figures_beside_ours():
    run = load(0.5, "fastsafetensors 16 threads, 16 MB", "warm", checkpoint="gpt2")
    result = {"preset": "fastsafetensors-rocm", "checkpoints": {"gpt2": {"cut": "half of it"}}}
    text = presets.comparison(result | {"rows": summarise([run], [])})
    [line] = [line for line in text.splitlines() if "nogds, 16 threads, 16 MB |" in line and "gpt2 " in line]
    assert "| 0.268 | 2.05 |" in line  # GiB/s turned into GB/s
    assert "| 0.500 | 2.00 |" in line
    assert "GiB/s" in text
    assert "half of it" in text


def test_tables_show_faults_and_leave_out_empty_columns(capsys):
    runs = [load(0.5, scenario="private", semantics="private"), ceiling(1.0, "fresh", "private")]
    result = {"rows": summarise(runs, []), "bounds": [], "preset": None, "absent": {}}
    tables.print_tables(result)
    printed = capsys.readouterr().out
    assert "penstock (measurement fault)" in printed
    assert "GPU MB" not in printed
