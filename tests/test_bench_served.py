"""The scenarios `bucket`: the server, its link model, the clients, and a run of the benchmark over all of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from penstock.bench import bounds, checkpoints, page_cache, predecessor, rounds, starts
from penstock.bench.contestants import named
from penstock.bench.forkserver import Forkserver
from penstock.bench.rounds import Bench, Settings
from penstock.bench.scenarios import SCENARIOS
from penstock.bench.served import CLIENTS, NotServed, Served, program

#: The folder of the programs.
TOOLS = os.environ.get("PENSTOCK_TEST_NETBENCH")
wants_tools = pytest.mark.skipif(
    not TOOLS, reason="PENSTOCK_TEST_NETBENCH names no folder: cargo build --release -p netbench"
)


def serving(file: Path, *, tls: bool = False, **link: str) -> Served:
    assert TOOLS
    return Served(file.parent, Path(TOOLS), tls=tls, link={name.replace("_", "-"): text for name, text in link.items()})


def get(url: str, **headers: str) -> tuple[int, bytes]:
    asked = urllib.request.Request(url, headers={name.replace("_", "-"): text for name, text in headers.items()})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@wants_tools
def test_the_server_gives_ranges_of_one_version_and_counts_them(big: Path):
    whole = big.read_bytes()
    with serving(big) as served:
        [url] = served.urls([big])
        assert get(url, Range="bytes=10-19") == (206, whole[10:20])
        assert get(url, Range="bytes=-5") == (206, whole[-5:])
        assert get(url) == (200, whole)
        assert get(url, Range=f"bytes={len(whole)}-")[0] == 416
        assert get(url, Range="bytes=0-1", If_Match='"another"')[0] == 412
        assert get(f"{url}.none")[0] == 404
        counts = served.counts()
    assert (counts["requests"], counts["bytes"]) == (6, len(whole) + 15)


@wants_tools
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_fetches_every_byte_once(big: Path, client: str, tls: bool):
    try:
        program("netbench-go" if client == "go" else "netbench", Path(TOOLS or ""))
    except NotServed as error:
        pytest.skip(str(error))
    with serving(big, tls=tls) as served:
        found = served.fetch(client, [big], connections=4)
        counts = served.counts()
    assert found["bytes"] == counts["bytes"] == big.stat().st_size
    assert found["seconds"] > 0 and found["cpu_s"] > 0


@wants_tools
def test_the_link_model_gives_no_byte_before_its_time(big: Path):
    """A connection of 100 MB/s after 200 ms: 10 MB take 300 ms at least, of which 50 ms may be caught up."""
    with serving(big, rate_per_connection="100e6", first_byte="200") as served:
        begun = time.perf_counter()
        assert get(served.urls([big])[0], Range="bytes=0-9999999")[0] == 206
        assert time.perf_counter() - begun >= 0.25


@wants_tools
def test_a_stalled_answer_stops_in_its_middle(big: Path):
    with serving(big, stall_percent="100") as served:
        [url] = served.urls([big])
        asked = urllib.request.Request(url, headers={"Range": "bytes=0-999"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=60) as answer:
            assert len(answer.read(500)) == 500
            while not served.counts()["stalled"]:
                time.sleep(0.01)
        assert served.counts()["bytes"] == 500


def test_a_program_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(NotServed, match=r"there is no netbench in .*make netbench"):
        Served(tmp_path, tmp_path)


@wants_tools
def test_options_that_the_server_does_not_know_are_refused(big: Path):
    with pytest.raises(NotServed, match="no such option: --rate"):
        serving(big, rate="1")


#: The command line, without the seconds that a machine takes to give freed memory back before each load is timed.
AT_ONCE = """
import sys
from penstock.bench import rounds
rounds.GIVEN_BACK = 0
from penstock.cli import main
sys.exit(main())
"""


@pytest.mark.sampled(0)
@wants_tools
def test_the_benchmark_compares_loads_from_a_server(tmp_path: Path):
    """Without netbench-go, where there is no Go, what needs it is absent; Run:ai's streamer may be."""
    command = [
        sys.executable, "-c", AT_ONCE, "bench", "--preset", "anyscale-model-loader", "--size", "2e7",
        "--rounds", "1", "--no-traces", "--tools", str(TOOLS), "--link", "first-byte=1", "--json", "found.json",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {(row["scenario"], row["contestant"]): row for row in found["rows"]}
    for scenario in ("bucket", "bucket-tls"):
        for name in ("penstock url", "penstock url load_into"):
            assert rows[scenario, name]["verified"]
            assert rows[scenario, name]["bytes"] <= rows[scenario, name]["served_bytes"]
        assert {"ceiling: loop", "ceiling: loop touched"} <= {name for where, name in rows if where == scenario}
        if shutil.which("netbench-go", path=TOOLS):
            assert rows[scenario, "go to memory, safetensors"]["verified"]
            assert (scenario, "ceiling: go") in rows
    assert any("bare loop" in bound["claim"] for bound in found["bounds"])
    assert "Anyscale" in done.stdout
    # The second starts: whole, from the disk, beside what the first ones have received
    for name in ("penstock url, disk cache", "urllib to disk once, penstock", "urllib to disk once, safetensors"):
        row = rows["bucket-second", name]
        assert row["verified"] and row["ranked"] == "last byte touched" and row["first_s"] > 0
        assert row["bytes"] <= row["first_served_bytes"] <= 1.05 * row["bytes"] + (1 << 20)
        assert row["served_bytes"] < (1 << 20)
        assert row["ceiling"] in ("direct", "populate")
    assert rows["bucket-second", "urllib to disk once, safetensors"]["served_bytes"] == 0
    assert rows["bucket-second", "penstock url, disk cache"]["served_requests"] > 0, "it has asked for versions"
    claims = {bound["claim"]: bound for bound in found["bounds"] if bound["claim"].startswith("bucket-second")}
    assert claims["bucket-second: MiB served"]["holds"]
    assert any("without the time of opening" in claim for claim in claims)
    said = {(row["state"], row["stock"]) for row in found["states"]}
    urllib = ("urllib to disk once, safetensors", "urllib to disk once, penstock")
    assert {("first start", urllib[0]), *(("second start", one) for one in urllib)} <= said
    for row in found["states"]:
        assert row["rounds"] == 1 and row["ours"].startswith("penstock url")
        assert row["times"] == [row["stock_s"] / row["ours_s"]] * 3
        assert f"| {row['state']} | {row['stock']} |" in done.stdout
    assert not list((tmp_path / ".bench").rglob("penstock-kept-*")), "what was kept is gone"
    if not (shutil.which("versitygw", path=TOOLS) or shutil.which("versitygw")):
        assert "make versitygw" in found["absent"]["scenario bucket-upload"]


def second(nbytes: int, resident: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """The runs of a second start, of which so many bytes were kept, and so many of them stay in the page cache."""
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(bytes(100))
    loader = named("urllib to disk once, safetensors")
    for where in (rounds, page_cache):
        monkeypatch.setattr(where, "resident_bytes", lambda files: resident)
    monkeypatch.setattr(page_cache.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(predecessor, "run", lambda *about: {})
    bench = Bench(Settings(1, [tmp_path], ceilings=False, traces=False), Forkserver())

    def first_start(contestant: Any, order: Any, placed: Any, files: Any, state: str) -> dict[str, Any]:
        assert state == "bucket"
        Path(order.kept, shard.name).write_bytes(bytes(nbytes))
        return {"first_s": 1.0}

    monkeypatch.setattr(bench, "first_start", first_start)
    monkeypatch.setattr(bench, "process", lambda *about: contextlib.nullcontext(Said()))
    placed = checkpoints.Placed("x", "x", [shard], tmp_path, 100, 1)
    return bench.loads(loader, SCENARIOS["bucket-second"], placed, None)


class Said:
    """A process that loads nothing, and says that it has."""

    pid = 1

    def hear(self) -> dict[str, Any]:
        return {"load_s": 1.0, "cpu_s": 1.0, "memory": 0, "bytes": 100, "verified_bytes": 100, "different": []}

    def say(self, what: str) -> None:
        pass


def test_a_second_start_counts_only_if_the_first_one_has_kept_everything_on_the_disk_alone(monkeypatch, tmp_path):
    [run] = second(100, 0, monkeypatch, tmp_path)
    assert (run["first_s"], run["load_s"], run["resident_before"]) == (1.0, 1.0, 0)
    [run] = second(99, 0, monkeypatch, tmp_path)
    assert run["error"] == "the first start has kept 99 of 100 bytes"
    [run] = second(100, 4096, monkeypatch, tmp_path)
    assert run["error"] == "4096 bytes of what was kept stay in the page cache"


def test_states_are_compared_round_by_round():
    def run(name: str, number: int, seconds: float, first: float, **more: object) -> dict[str, object]:
        about = {"checkpoint": "x", "scenario": "bucket-second", "contestant": name, "round": number, "load": 0}
        times = {"seconds": seconds, "first_s": first, "served_bytes": 1000, "first_served_bytes": 2_000_000}
        return about | times | more

    stock, ours = "boto3 to disk once, safetensors", "penstock url, disk cache"
    runs = [run(stock, number, 2.0, 3.0 + number) for number in range(3)]
    runs += [run(ours, 0, 1.0, 1.0), run(ours, 1, 2.0, 1.0), run(ours, 2, 1.0, 1.0, error="no such luck")]
    found = {row["state"]: row for row in starts.states(runs)}
    assert found.keys() == {"first start", "second start"}
    assert found["first start"]["times"] == [3.5, 3.0, 4.0] and found["first start"]["rounds"] == 2
    assert found["second start"]["times"] == [1.5, 1.0, 2.0]
    assert (found["first start"]["ours_served"], found["second start"]["ours_served"]) == (2_000_000, 1000)
    assert "| 1.50 (1.00 to 2.00) | 2 |" in "\n".join(starts.table(found.values()))
    assert starts.table(starts.states(runs[:3])) == []


def test_bounds_of_a_second_start():
    def row(name: str, seconds: float, **more: object) -> dict[str, object]:
        about = {"checkpoint": "x", "scenario": "bucket-second", "contestant": name, "kind": "rival"}
        return about | {"median_s": seconds, "gb_per_s": 1 / seconds, "bytes": 100} | more

    rows = [
        row("penstock url, disk cache", 1.2, kind="penstock", open_s=0.1, served_bytes=2 << 20),
        row("urllib to disk once, penstock", 1.05, kind="penstock", open_s=0.05),
        row("boto3 to disk once, safetensors", 1.8),
    ]
    found = {bound["claim"]: bound for bound in bounds.bounds(rows, judged=True)}
    values = {claim.partition(": ")[2]: (round(bound["value"], 3), bound["holds"]) for claim, bound in found.items()}
    assert values == {
        "MiB served": (2.0, False),
        "times as fast as boto3 to disk once, safetensors": (1.5, True),
        "time by that of downloaded files, without the time of opening": (1.1, False),
    }


def test_bounds_of_saves_to_a_bucket():
    def row(name: str, seconds: float, kind: str) -> dict[str, object]:
        return {"checkpoint": "x", "scenario": "bucket-upload", "contestant": name, "kind": kind, "median_s": seconds}

    rows = [row("penstock save", 1.0, "penstock"), row("safetensors to disk, boto3", 1.25, "rival")]
    [found] = bounds.bounds(rows, judged=True)
    assert found["claim"] == "bucket-upload: times as fast as safetensors to disk, boto3"
    assert (found["value"], found["bound"], found["holds"]) == (1.25, 1.3, False)


def test_saves_are_a_state_of_their_own():
    def run(name: str, number: int, seconds: float, taken: int) -> dict[str, object]:
        about = {"checkpoint": "x", "scenario": "bucket-upload", "contestant": name, "round": number}
        return about | {"seconds": seconds, "taken_bytes": taken}

    runs = [run("safetensors to disk, boto3", number, 3.0, 100) for number in range(3)]
    runs += [run("penstock save", number, 1.5 + number, 104) for number in range(3)]
    [found] = starts.states(runs)
    assert (found["state"], found["stock_served"], found["ours_served"]) == ("save to the bucket", 100, 104)
    assert found["times"] == [1.2, 3.0 / 3.5, 2.0]
    assert "| save to the bucket | safetensors to disk, boto3 |" in "\n".join(starts.table([found]))


def test_bounds_of_loads_from_a_server():
    def row(name: str, seconds: float, **more: object) -> dict[str, object]:
        about = {"checkpoint": "x", "scenario": "bucket", "contestant": name, "kind": "rival", "median_s": seconds}
        return about | {"gb_per_s": 1 / seconds, "bytes": 100} | more

    rows = [
        row("penstock url", 1.0, kind="penstock", cpu_s_per_gb=0.3, served_bytes=102),
        row("ceiling: loop", 0.8, kind="ceiling", cpu_s_per_gb=0.2),
        row("a download", 1.5),
    ]
    found = {bound["claim"]: bound for bound in bounds.bounds(rows, judged=True) if bound["claim"].startswith("bucket")}
    values = {claim.partition(": ")[2]: (round(bound["value"], 3), bound["holds"]) for claim, bound in found.items()}
    assert values == {
        "processor seconds per GB by those of the bare loop": (1.5, False),
        "share of the bare loop's rate": (0.8, False),
        "bytes served by those wanted": (1.02, False),
        "times as fast as a download": (1.5, False),
    }
