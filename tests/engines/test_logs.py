"""What vLLM's and SGLang's own logs say of Penstock's loads: a line for each rank and load, and progress of slow ones.

The weights come from a web server, slowly, so that there is progress to be told. What ranks write is read where the
engine writes all else: in the format that its own configuration gives every line. Each rank also keeps metrics.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from event_schema import check
from test_sglang import Run
from test_vllm_group import group

SERVER = Path(__file__).parent.parent / "web_server.py"
RANKS = 2
#: A secret in the address of the weights.
QUERY = "?X-Amz-Signature=planted"


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, SERVER, model], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    with subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL):
        yield f"http://127.0.0.1:{port}/"
        process.kill()
        process.wait()


@pytest.fixture
def asked(model: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each rank does; with the environment of all."""
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(model / "config.json", empty)
    monkeypatch.setenv("PENSTOCK_METRICS", str(metrics))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    nbytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return {
        "folder": str(model),
        "index": f"{server}model.safetensors.index.json{QUERY}",
        "bandwidth": max(1 << 16, nbytes // RANKS // 3),  # three seconds
        "none": f"{server}none.safetensors{QUERY}",
        "empty": str(empty),
    }


def events(lines: list[str]) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        start = line.find('{"v":1')
        if start >= 0:
            found.append(json.loads(line[start:]))
            check(found[-1])
    return found


def told(log: str, engine: str, head: str, model: Path, server: str, metrics: Path) -> None:
    """Asserts what a log has: `head` is how each line of the engine begins."""
    assert "planted" not in log
    lines = [line for line in log.splitlines() if '{"v":1' in line or "penstock: load" in line]
    assert all(re.match(head, line) for line in lines), lines[:3]
    found = events(lines)
    for rank in range(RANKS):
        mine = [event for event in found if event["rank"] == rank]
        ends = [event for event in mine if event["event"] == "end"]
        later = "load" if engine == "sglang" else "reload"
        assert [(event["verb"], event["engine"], event["outcome"]) for event in ends] == [
            ("load", engine, "ok"),
            (later, engine, "ok"),
            (later, engine, "failed"),
            (later, engine, "failed"),
            ("load", engine, "failed"),
        ]
        slow, again, *failures = ends
        assert slow["model"].startswith(server)
        assert slow["sources"]["network"] > 0
        assert again["model"] == str(model)
        assert slow["bytes"] == again["bytes"] > 0
        for failed in (failures[0], failures[2]):
            assert failed["error"]["type"] == "NotFoundError"
            assert failed["error"]["file"].endswith("none.safetensors")
            assert failed["model"] == f"{server}none.safetensors"
        assert failures[1]["error"]["type"] == "UnsupportedError"
        assert failures[1]["model"] == str(metrics.parent / "empty")
        progress = [event for event in mine if event["event"] == "progress"]
        assert len(progress) >= 2
        assert {event["total"] for event in progress} == {slow["bytes"]}
    # The last load of each rank is logged as text: one line at its end. On a busy machine its progress is told too
    texts = [line for line in lines if "penstock: load" in line and not re.search(r", rank \d: .* of .* after ", line)]
    assert len(texts) == RANKS
    assert all(
        re.search(rf"load \({engine}\) of {re.escape(str(model))}, rank \d: \d+ tensors, ", one) for one in texts
    )
    files = [path.read_text() for path in metrics.glob("*.prom")]
    assert len(files) == RANKS
    for text in files:
        assert "planted" not in text
        assert f'penstock_loads_total{{verb="load",model="{model}",engine="{engine}"' in text
    if engine == "vllm":
        # Warnings of Penstock, which vLLM does not configure the logger of
        assert [re.match(head, line) is not None for line in log.splitlines() if "a warning of penstock" in line] == [
            True
        ] * RANKS


def test_vllm(asked: dict[str, Any], model: Path, server: str, tmp_path: Path) -> None:
    with group(tmp_path / "ranks", RANKS, "logged", **asked) as ranks:
        ranks.said()
    head = r"\(.*pid=\d+\) (INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[.*\] "
    told((tmp_path / "ranks" / "log").read_text(), "vllm", head, model, server, tmp_path / "metrics")


def test_sglang(asked: dict[str, Any], model: Path, server: str, tmp_path: Path) -> None:
    run = Run(RANKS, [{"name": "logged", "do": "logged", "with": asked}], tmp_path)
    for found in run.of("logged"):
        assert [good for good, _ in found["said"]] == [False] * 3, found
    log = "".join((tmp_path / f"log.{rank}").read_text() for rank in range(RANKS))
    told(log, "sglang", r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d TP\d\] ", model, server, tmp_path / "metrics")
