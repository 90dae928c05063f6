"""The trace of a load: every read and copy is in it, within the load's time, and it is written whatever happens."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import penstock
import pytest
from penstock import cli
from penstock.synthetic.synth import Tensor


def spans(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The complete events of a trace by lane."""
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(lanes[event["tid"]], []).append(event)
    return found


def of(found: dict[str, list[dict[str, Any]]], kind: str) -> list[dict[str, Any]]:
    """The events of all lanes of a kind: "read" for `read 0`, `read 1`, ..."""
    return [event for lane, events in found.items() if lane.split()[0] == kind for event in events]


def disjoint(events: list[dict[str, Any]]) -> bool:
    ordered = sorted(events, key=lambda e: e["ts"])
    return all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in itertools.pairwise(ordered))


@pytest.mark.parametrize(
    ("options", "route"),
    [
        ({"io": "mapped"}, "mapped"),
        ({"io": "buffered"}, "buffered"),
        ({"io": "uring_buffered"}, "buffered"),
        ({"io": "uring", "cache": "bypass"}, "direct"),
        ({"io": "threads", "cache": "bypass"}, "direct"),
        ({"cache": "keep"}, None),
    ],
)
def test_every_byte_read_is_in_the_trace(gpt2, tmp_path, options, route):
    penstock.cli.main(["evict", str(gpt2)])
    to = tmp_path / "trace.json"
    checkpoint = penstock.open(gpt2)
    checkpoint.load(options=options | {"trace": to}, progress=False)
    report = checkpoint.last_report
    found = spans(to)
    reads = of(found, "read")
    routes = report["routes"]
    assert len(reads) == sum(r["extents"] for r in routes.values())
    # An extent may pass the end of the file by less than a page
    total = sum(r["bytes"] for r in routes.values())
    assert total <= sum(e["args"]["bytes"] for e in reads) < total + 4096 * len(checkpoint.files)
    if route is not None:
        assert {e["cat"] for e in reads} == {route}
    assert {e["args"]["file"] for e in reads} == set(checkpoint.files)
    end = report["seconds"] * 1e6
    assert all(e["ts"] >= 0 and e["ts"] + e["dur"] <= end + 1000 for e in reads)
    assert all(disjoint(events) for events in found.values())
    assert sum(e["args"]["tensors"] for e in found["hand-out"]) == len(checkpoint)
    assert [e["name"] for e in found["consumer"]] == ["hand-out"]
    assert len(found["plan"]) == 1
    document = json.loads(to.read_text())
    assert document["otherData"]["report"]["nbytes"] == checkpoint.nbytes


def test_copies_out_of_slabs_are_in_the_trace(llama, tmp_path):
    to = tmp_path / "trace.json"
    checkpoint = penstock.open(llama.source)
    name = next(n for n in checkpoint.keys() if len(checkpoint[n].shape) == 2)  # noqa: SIM118
    rows, columns = checkpoint[name].shape
    part = {name: (slice(0, rows), slice(0, columns // 2))}
    checkpoint.load(names=[name], slices=part, options={"io": "direct", "cache": "bypass", "trace": to}, progress=False)
    copies = of(spans(to), "copy")
    assert sum(e["args"]["bytes"] for e in copies) == checkpoint.last_report["nbytes"]


def test_a_stream_shows_its_consumer(llama, tmp_path):
    to = tmp_path / "trace.json"
    checkpoint = penstock.open(llama.source)
    count = sum(1 for _ in checkpoint.stream(options={"trace": to}, progress=False))
    consumed = [e for e in spans(to)["consumer"] if e["name"] == "consume"]
    assert len(consumed) == count == len(checkpoint)


def test_load_into_is_traced(llama, tmp_path):
    to = tmp_path / "trace.json"
    checkpoint = penstock.open(llama.source)
    state = checkpoint.load(options={"copy": True}, progress=False)
    report = checkpoint.load_into(state, options={"trace": to}, progress=False)
    reads = of(spans(to), "read")
    assert sum(e["args"]["bytes"] for e in reads) >= report["nbytes"] == checkpoint.nbytes


def test_a_load_that_fails_or_is_dropped_writes_its_trace(llama, tmp_path):
    source = llama.source
    checkpoint = penstock.open(source)
    to = tmp_path / "dropped.json"
    job = checkpoint.start(options={"trace": to})
    job.cancel()
    del job
    assert json.loads(to.read_text())["traceEvents"]
    for n, (name, tensor) in enumerate(checkpoint.stream(options={"trace": tmp_path / "left.json"}, progress=False)):
        del name, tensor
        if n == 1:
            break
    assert json.loads((tmp_path / "left.json").read_text())["traceEvents"]


def test_a_path_that_cannot_be_written_is_told_before_anything_is_read(llama, tmp_path):
    to = tmp_path / "nowhere" / "trace.json"
    with pytest.raises(FileNotFoundError, match="create the trace") as caught:
        penstock.open(llama.source).load(options={"trace": to}, progress=False)
    assert caught.value.path == str(to)


def test_a_trace_overwrites_a_trace_and_nothing_else(llama, tmp_path):
    shard = tmp_path / "model.safetensors"
    shutil.copy(penstock.open(llama.source).files[0], shard)
    before = shard.read_bytes()
    with pytest.raises(penstock.InvalidError, match="overwrite") as caught:
        penstock.open(shard).load(options={"trace": shard}, progress=False)
    assert caught.value.path == str(shard) and shard.read_bytes() == before
    to = tmp_path / "trace.json"
    to.touch()
    for _ in range(2):
        penstock.open(shard).load(options={"trace": to}, progress=False)
        assert of(spans(to), "read")


def test_what_fails_says_why_in_its_trace(llama, tmp_path):
    path, to = tmp_path / "model.safetensors", tmp_path / "trace.json"
    shutil.copy(penstock.open(llama.source).files[0], path)
    checkpoint = penstock.open(path)
    path.unlink()
    with pytest.raises(penstock.ChangedError) as caught:
        checkpoint.load(options={"trace": to}, progress=False)
    assert json.loads(to.read_text())["otherData"]["report"]["error"] in str(caught.value)


def test_each_load_of_a_process_has_a_file_of_its_own(llama, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_TRACE", str(tmp_path / "{pid}-{n}.json"))
    for _ in range(2):
        penstock.open(llama.source).load(progress=False)
    found = sorted(tmp_path.glob(f"{os.getpid()}-*.json"))
    assert len(found) == 2
    assert all(spans(path) for path in found)


def test_the_command_line_writes_one(gpt2, tmp_path, capsys):
    to = tmp_path / "trace.json"
    assert cli.main(["load", "--no-progress", "--trace", str(to), str(gpt2)]) == 0
    assert of(spans(to), "read")


@pytest.mark.parametrize("what", ["checkpoint", "folder", "text", "json", "header", "nothing", "latin"])
def test_the_command_tells_what_it_wants_in_a_line(cli, write, tmp_path, what):
    path = tmp_path / "given"
    if what == "checkpoint":
        path = write(Tensor("a", "F32", (100_000,)))
    elif what == "folder":
        path.mkdir()
    else:
        content = {
            "text": b"no trace at all\n" * 10_000,
            "json": b'{"a": [' + b"1, " * 10_000 + b"2]}",
            "header": b"{" + b" " * 7 + b"{" + b"\xff" * 100_000,
            "nothing": b"",
            "latin": b'{"traceEvents": "' + b"\xe9" * 100_000 + b'"}',
        }
        path.write_bytes(content[what])
    run = cli("trace", path)
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert len(run.stderr) < 400 + len(str(path))
    assert f"{path}: " in run.stderr and "penstock load --trace" in run.stderr
    assert ("penstock inspect" in run.stderr) == (what in ("checkpoint", "folder"))
    assert cli("trace", tmp_path / "none.json").returncode == 3
