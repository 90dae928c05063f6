"""One event for each load: of every verb, with the keys of docs/operations.md."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
import torch
from event_schema import KEYS, PAGE, Events, check, collected
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from test_web import Web

SOURCES = ("mapped", "buffered", "direct", "network", "mirror", "disk_cache", "rank")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[Events]:
    with collected(monkeypatch) as found:
        yield found


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    folder = tmp_path / "served"
    folder.mkdir()
    synth.write_file(folder / "model.safetensors", [Tensor(f"t{n}", "BF16", (256, 256)) for n in range(8)])
    found = Web(folder)
    yield found
    found.close()


def moved(event: dict[str, Any]) -> int:
    return sum(event["sources"].values())


def is_ok(event: dict[str, Any], verb: str, nbytes: int, engine: str | None = None) -> None:
    assert (event["event"], event["verb"], event["outcome"]) == ("end", verb, "ok")
    assert (event["engine"], event["bytes"], event["rank"], event["pid"]) == (engine, nbytes, 0, os.getpid())
    assert event["error"] is None


def test_load(events: Events, small: Path) -> None:
    checkpoint = penstock.open(small)
    assert events == []
    checkpoint.load()
    event = events.one()
    is_ok(event, "load", checkpoint.nbytes)
    assert event["tensors"] == len(checkpoint)
    assert event["model"] == str(small)
    assert moved(event) >= checkpoint.nbytes
    assert sum(event["phases"].values()) == pytest.approx(event["seconds"], abs=1e-4)
    checkpoint.load(dtype=torch.float32)
    is_ok(events.one(), "load", checkpoint.nbytes)


def test_stream(events: Events, small: Path) -> None:
    checkpoint = penstock.open(small)
    for _ in checkpoint.stream():
        assert events == []
    is_ok(events.one(), "stream", checkpoint.nbytes)


def test_a_stream_that_is_closed_early_was_cancelled(events: Events, small: Path) -> None:
    stream: Any = penstock.open(small).stream()
    next(stream)
    stream.close()
    event = events.one()
    assert (event["verb"], event["outcome"], event["error"]["type"]) == ("stream", "cancelled", "GeneratorExit")
    penstock.open(small).stream()  # never begun
    assert events == []


def test_load_into(events: Events, small: Path) -> None:
    checkpoint = penstock.open(small)
    target = {name: tensor.clone() for name, tensor in checkpoint.load().items()}
    events.clear()
    checkpoint.load_into(target)
    is_ok(events.one(), "load_into", checkpoint.nbytes)


def test_load_into_by_detours_is_one_event(events: Events, shard: Path) -> None:
    checkpoint = penstock.open(shard)
    name = next(iter(checkpoint))
    info = checkpoint[name]
    target = np.zeros(info.shape[::-1] if len(info.shape) < 2 else info.shape, np.dtype("u1"))
    found = checkpoint.load(framework="np", names=[name])[name]
    events.clear()
    target = np.zeros_like(found)[::-1]
    checkpoint.load_into({name: target}, strict=False)
    assert events.one()["verb"] == "load_into"


def test_start(events: Events, small: Path) -> None:
    checkpoint = penstock.open(small)
    with checkpoint.start() as job:
        job.result()
    is_ok(events.one(), "start", checkpoint.nbytes)
    job = checkpoint.start()
    job.wait()
    job.close()
    is_ok(events.one(), "start", checkpoint.nbytes)
    job.result()
    assert events == []


def test_a_job_that_is_dropped_or_cancelled_says_so(events: Events, small: Path) -> None:
    checkpoint = penstock.open(small)
    job = checkpoint.start()
    job.cancel()
    assert events.one()["outcome"] == "cancelled"
    checkpoint.start()
    assert events.one()["outcome"] == "cancelled"


def test_load_file(events: Events, shard: Path) -> None:
    penstock.load_file(shard)
    is_ok(events.one(), "load_file", penstock.open(shard).nbytes)


def test_a_handle_that_is_asked_many_times_gives_one_event(events: Events, shard: Path) -> None:
    checkpoint = penstock.open(shard)
    with penstock.safe_open(shard) as file:
        for name in checkpoint:
            file.get_tensor(name)
            file.get_slice(name)[...]
        with file.prefetch() as ahead:
            dict(ahead)
        assert events == []
    event = events.one()
    assert (event["verb"], event["outcome"]) == ("safe_open", "ok")
    assert event["bytes"] >= 2 * checkpoint.nbytes
    with penstock.safe_open(shard) as file:
        file.keys()
    assert events == []  # nothing was read
    file = penstock.safe_open(shard)
    file.get_tensor(next(iter(checkpoint)))
    del file
    assert events.one()["verb"] == "safe_open"


def test_what_a_handle_reads_ahead_counts_once(events: Events, shard: Path) -> None:
    names, nbytes = list(penstock.open(shard)), penstock.open(shard).nbytes
    with penstock.safe_open(shard) as file:
        ahead = file.prefetch()
        for name in names:
            ahead.take(name)
        ahead.close()
        ahead.close()
    event = events.one()
    assert (event["bytes"], event["tensors"], event["outcome"]) == (nbytes, len(names), "ok")
    with penstock.safe_open(shard) as file:
        file.prefetch().close()
        assert len(file.get_tensors()) == len(names)
    assert events.one()["outcome"] == "ok"


def test_save_and_save_file(events: Events, tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(1000), "b": torch.ones(10)}
    penstock.save_file(tensors, tmp_path / "x.safetensors", fsync=False)
    event = events.one()
    is_ok(event, "save", 4040)
    assert event["model"] == str(tmp_path / "x.safetensors")
    penstock.save(tensors, tmp_path / "folder", fsync=False)
    event = events.one()
    is_ok(event, "save", 4040)
    assert event["model"] == str(tmp_path / "folder")
    assert moved(event) >= 4040


def test_convert(events: Events, small: Path, tmp_path: Path) -> None:
    from penstock._convert import convert

    report = convert([str(small)], tmp_path / "out", fsync=False)
    event = events.one()
    is_ok(event, "convert", report.nbytes)
    assert event["model"] == str(small)
    assert event["tensors"] == report.tensors
    assert report.nbytes <= moved(event) < 2 * report.nbytes


def test_convert_from_a_server(events: Events, web: Web, tmp_path: Path) -> None:
    from penstock._convert import convert

    report = convert([web("model.safetensors")], tmp_path / "out", fsync=False)
    event = events.one()
    is_ok(event, "convert", report.nbytes)
    assert event["sources"]["network"] >= report.nbytes
    assert moved(event) == event["sources"]["network"]


def test_verify(events: Events, shard: Path) -> None:
    penstock.open(shard).verify(progress=False)
    is_ok(events.one(), "verify", shard.stat().st_size)


def test_warm_and_other_commands(cli: Any, shard: Path) -> None:
    done = cli("warm", shard, PENSTOCK_LOG="json")
    [line] = done.stderr.splitlines()
    event = json.loads(line)
    check(event)
    assert (event["verb"], event["outcome"], event["bytes"]) == ("warm", "ok", shard.stat().st_size)
    done = cli("load", shard, "--json", PENSTOCK_LOG="json")
    assert json.loads(done.stderr)["verb"] == "load"
    json.loads(done.stdout)


def test_an_open_that_fails(events: Events, tmp_path: Path) -> None:
    with pytest.raises(penstock.NotFoundError):
        penstock.open(tmp_path / "none.safetensors")
    event = events.one()
    assert (event["verb"], event["outcome"], event["error"]["type"]) == ("open", "failed", "NotFoundError")
    assert event["error"]["file"] == event["model"] == str(tmp_path / "none.safetensors")


def test_a_load_that_fails_says_error_file_and_range(events: Events, small: Path, shard: Path) -> None:
    checkpoint = penstock.open(shard)
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 1000)
    with pytest.raises(penstock.PenstockError) as raised:
        checkpoint.load(options={"copy": True})
    event = events.one()
    assert event["outcome"] == "failed"
    assert event["error"]["type"] == type(raised.value).__name__
    assert event["error"]["file"] == str(shard)
    assert event["error"]["range"] == (None if raised.value.range is None else list(raised.value.range))
    with pytest.raises(penstock.UnknownTensorError):
        penstock.open(small).load(names=["nonsense"])
    assert events.one()["error"]["type"] == "UnknownTensorError"
    for begin in (
        lambda: penstock.open(small).start(names=["nonsense"]),
        lambda: penstock.open(small).stream(names=["nonsense"]),
        lambda: penstock.open(small).load_into({"nonsense": torch.zeros(1)}),
    ):
        with pytest.raises(penstock.PenstockError):
            begin()
        assert events.one()["outcome"] == "failed"


def test_bytes_of_a_server_are_the_networks(events: Events, web: Web) -> None:
    checkpoint = penstock.open(web("model.safetensors"))
    checkpoint.load()
    event = events.one()
    is_ok(event, "load", checkpoint.nbytes)
    assert event["sources"]["network"] >= checkpoint.nbytes
    assert moved(event) == event["sources"]["network"]
    assert event["requests"] > 0
    assert event["model"] == web("model.safetensors")


def test_files_of_a_server_and_of_a_disk_in_one_load(events: Events, web: Web, shard: Path) -> None:
    local = penstock.open(shard).nbytes
    checkpoint = penstock.open([web("model.safetensors"), str(shard)])
    checkpoint.load(options={"copy": True, "gap": 0, "io": "buffered"})
    sources = events.one()["sources"]
    assert sources["network"] == checkpoint.nbytes - local
    assert sources["buffered"] == local


@pytest.mark.parametrize("io", ["mapped", "buffered", "direct"])
def test_each_route_is_the_source_of_its_name(events: Events, shard: Path, io: Any) -> None:
    penstock.open(shard).load(options={"io": io, "cache": "bypass" if io == "direct" else "keep"})
    event = events.one()
    # A file system may have no O_DIRECT
    assert {source for source, nbytes in event["sources"].items() if nbytes} == {io} or event["fallbacks"]


def test_handles_of_a_patched_library(events: Events, shard: Path) -> None:
    with penstock.patch():
        import safetensors
        import safetensors.torch

        with safetensors.safe_open(str(shard), "pt") as file:
            for name in penstock.open(shard):
                file.get_tensor(name)
        event = events.one()
        assert (event["verb"], event["engine"]) == ("safe_open", "patch")
        safetensors.torch.load_file(str(shard))
        event = events.one()
        assert (event["verb"], event["engine"]) == ("load_file", "patch")
        # Whether safetensors can open it is not known yet
        with pytest.raises(Exception, match=r"."):
            safetensors.safe_open(str(shard.parent), "pt")
        assert events == []


def test_dcp(events: Events, shard: Path) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    import torch.distributed.checkpoint as dcp
    from penstock.integrations.dcp import StorageReader

    state = {name: tensor.clone() for name, tensor in penstock.open(shard).load().items()}
    events.clear()
    dcp.load(state, storage_reader=StorageReader(shard), no_dist=True)
    is_ok(events.one(), "load_into", penstock.open(shard).nbytes, "dcp")


def test_tgis(events: Events, shard: Path) -> None:
    from penstock.integrations.tgis import Weights

    class Alone:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 1

    weights = Weights(shard, "cpu", None, Alone())
    for name in weights.checkpoint:
        weights.get_tensor(name)
    nbytes = weights.checkpoint.nbytes
    assert events == []
    del weights
    is_ok(events.one(), "load", nbytes, "tgis")


GROUP = """
import json
class Events(list):
    def info(self, line):
        self.append(json.loads(line))
    error = info
events = Events()
penstock.set_logger(events)
os.environ["PENSTOCK_LOG"] = "json"
os.environ["RANK"] = str(rank)
checkpoint = penstock.open(path)
checkpoint.load(group=group, options={"exchange": "on", "copy": True})
dict(checkpoint.stream(group=group, options={"exchange": "on", "copy": True}))
said["events"] = events
said["nbytes"] = checkpoint.nbytes
said["report"] = checkpoint.last_report["exchange"]
"""


def test_ranks_that_load_together(together: Callable[..., Any], big: Path) -> None:
    with together(GROUP, 2, big) as started:
        said = started.all()
    for rank, one in enumerate(said):
        assert [event["verb"] for event in one["events"]] == ["load", "stream"]
        for event in one["events"]:
            check(event)
            assert (event["rank"], event["outcome"], event["bytes"]) == (rank, "ok", one["nbytes"])
            assert event["exchange"]["choice"] == "on"
            assert event["exchange"]["ranks"] == 2
            assert event["sources"]["rank"] == event["exchange"]["received"] > 0
            # Each reads a part, and no byte counts twice
            assert one["nbytes"] <= moved(event) <= 1.05 * one["nbytes"]


def test_every_key_that_is_described_is_there_and_so_is_every_verb(events: Events, shard: Path) -> None:
    penstock.open(shard).load()
    assert set(events.one()) == set(KEYS) - {"total"}
    code = "".join(path.read_text() for path in Path(penstock.__file__).parent.rglob("*.py"))
    verbs = set(re.findall(r"""observe\(\s*"(\w+)\"""", code)) | {"load_file"}
    table = PAGE.read_text().partition("## What one event is")[2].partition("\n## ")[0]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")]
    assert verbs == set(re.findall(r"`(\w+)`", " ".join(cells))) - {"verb", "engine", "vllm", "sglang"}


def test_a_loader_that_is_recorded_is_one_event(events: Events, shard: Path) -> None:
    """As an engine's plugin does it, on several threads."""
    import threading

    from penstock._events import around, observe
    from penstock.integrations._engine import Chosen, Loads

    loads = Loads(torch.device("cpu"), None)
    model = torch.nn.Module()
    expected = penstock.open(shard)
    made = {name: torch.nn.Parameter(torch.empty_like(t), False) for name, t in expected.load().items()}
    events.clear()
    with around(observe("load", engine="vllm")) as loads.seen, loads.barrier():
        threads = []
        for name, tensor in loads.weights(Chosen([str(shard)]), None, lambda: iter(())):
            made[name].data.copy_(tensor)
            # A loader may look at a value, on a thread of its own
            thread = threading.Thread(target=lambda tensor=tensor: tensor.flatten()[:1].clone())
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()
        loads.run(model)
    event = events.one()
    assert (event["verb"], event["engine"], event["outcome"]) == ("load", "vllm", "ok")
    assert event["bytes"] >= expected.nbytes
    assert event["model"] == str(shard)


def test_an_engine_that_fails_says_so_once(events: Events, shard: Path, tmp_path: Path) -> None:
    from penstock._events import around, observe
    from penstock.integrations._engine import Chosen, Loads

    loads = Loads(torch.device("cpu"), None)
    with (
        pytest.raises(penstock.NotFoundError),
        around(observe("load", engine="sglang")) as loads.seen,
        loads.barrier(),
    ):
        dict(loads.weights(Chosen([str(tmp_path / "none.safetensors")]), None, lambda: iter(())))
    event = events.one()
    assert (event["engine"], event["error"]["type"]) == ("sglang", "NotFoundError")


def test_in_a_process_without_events_nothing_of_them_is_imported(python: Any, shard: Path) -> None:
    code = """
import sys, penstock
penstock.open(sys.argv[1]).load(framework="dlpack")
print([name for name in ("_event_lines", "_metrics", "_spans") if f"penstock.{name}" in sys.modules])
"""
    assert python(code, shard).stdout == "[]\n"


def test_a_wrong_value_is_refused(monkeypatch: pytest.MonkeyPatch, shard: Path) -> None:
    monkeypatch.setenv("PENSTOCK_LOG", "yes")
    checkpoint = penstock.open(shard)
    with pytest.raises(penstock.InvalidError, match="PENSTOCK_LOG='yes': give one of json, text, off"):
        checkpoint.load()
    with pytest.raises(TypeError, match=r"logger=3: give a logging\.Logger"):
        penstock.set_logger(3)  # type: ignore[arg-type]
