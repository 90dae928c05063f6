"""Programs of the benchmark that save to versitygw, at a size that shows that they work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_server import program

pytest.importorskip("torch")

TOP = Path(__file__).parents[2]
#: boto3 is none of this environment: `make test-servers` installs it beside the servers.
CLIENTS = next(iter(program("clients").glob("lib/python*/site-packages")), None)
SERVERS = program("versitygw").parent


def run(*command: str, folder: Path) -> str:
    more = [str(CLIENTS)] if CLIENTS else []
    path = os.pathsep.join([*more, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("tls", [False, True])
def test_the_benchmark_of_saves_compares_every_client(tmp_path: Path, tls: bool) -> None:
    folders = [str(tmp_path / "a"), *([] if tls else ["/dev/shm"])]
    command = [sys.executable, str(TOP / "benches/upload.py"), *folders, "--tools", str(SERVERS)]
    more = ["--disk", str(tmp_path), "--gigabytes", "0.06", "--rounds", "1", "--json", "found.json"]
    said = run(*command, *more, *(["--tls"] if tls else []), folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [place["folder"] for place in found["places"]] == folders
    for place in found["places"]:
        ran = {name for name, runs in place["runs"].items() if runs}
        assert (
            ran | place["absent"].keys() == set(place["runs"]) and {"penstock.save", "loop", "loop, checksums"} <= ran
        )
        assert CLIENTS is None or not place["absent"], place["absent"]
        for name in ran:
            assert len(place["runs"][name]) == 1 and f"| {place['file_system']} | {name} |" in said
            for one in place["runs"][name]:
                assert one["bytes"] >= 50e6 and min(one["seconds"], one["cpu_s"], one["server_cpu_s"]) > 0, one
        assert len(place["claims"]) == len(ran) - 1
    assert not list(tmp_path.glob("penstock-*")) and not list(tmp_path.glob("a/*"))


def test_the_preset_has_saves_beside_a_file_and_boto3(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli", "bench", "--preset", "anyscale-model-loader", "--size", "2e7"]
    more = ["--scenario", "bucket-upload", "--rounds", "2", "--tools", str(SERVERS), "--json", "found.json"]
    said = run(*command, *more, folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row["contestant"]: row for row in found["rows"]}
    ours = rows["penstock save"]
    assert ours["verified"] and ours["semantics"] == "sent" and ours["median_s"] > 0
    if CLIENTS is None:
        assert "boto3" in found["absent"]["safetensors to disk, boto3"]
        return
    assert all(rows[name]["verified"] for name in ("safetensors to disk, boto3", "safetensors to memory, boto3"))
    states = {row["stock"]: row for row in found["states"]}
    assert states.keys() == {"safetensors to disk, boto3", "safetensors to memory, boto3"}
    for row in states.values():
        assert row["rounds"] == 2 and row["ours_served"] >= ours["bytes"] <= row["stock_served"]
    assert "| save to the bucket |" in said
    assert {bound["claim"] for bound in found["bounds"]} >= {
        f"bucket-upload: times as fast as {name}" for name in states
    }
    assert not list((tmp_path / ".bench").rglob("penstock-bucket-*")), "the bucket is gone"
