"""Spans of OpenTelemetry, in its own exporter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk.trace")

PROGRAM = """
import json, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
import penstock
with trace.get_tracer("mine").start_as_current_span("request"):
    checkpoint = penstock.open(sys.argv[1])
    checkpoint.load(framework="np")
    try:
        checkpoint.load(names=["nonsense"])
    except penstock.UnknownTensorError:
        pass
    with penstock.safe_open(sys.argv[1], "np") as file:
        for name in file.keys():
            file.get_tensor(name)
print(json.dumps([json.loads(span.to_json()) for span in exporter.get_finished_spans()]))
"""


def test_a_span_for_each_load_below_the_current_one(python: Any, shard: Path) -> None:
    import json
    from datetime import datetime

    import penstock

    done = python(PROGRAM, shard)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no lines were asked for
    good, bad, handle, request = json.loads(done.stdout)
    assert [span["name"] for span in (good, bad, handle)] == ["penstock load", "penstock load", "penstock safe_open"]
    assert {span["parent_id"] for span in (good, bad, handle)} == {request["context"]["span_id"]}
    assert good["attributes"]["penstock.bytes"] == penstock.open(shard).nbytes
    assert good["attributes"]["penstock.model"] == str(shard)
    assert good["attributes"]["penstock.outcome"] == "ok"
    assert sum(v for k, v in good["attributes"].items() if k.startswith("penstock.sources.")) > 0
    assert (good["status"]["status_code"], bad["status"]["status_code"]) == ("UNSET", "ERROR")
    assert bad["attributes"]["penstock.error.type"] == "UnknownTensorError"
    begun, ended = (datetime.fromisoformat(good[key].rstrip("Z")) for key in ("start_time", "end_time"))
    took = (ended - begun).total_seconds()
    assert took == pytest.approx(good["attributes"]["penstock.seconds"], abs=2e-3)


def test_without_a_provider_nothing_is_recorded_and_without_the_api_nothing_is_imported(
    python: Any, shard: Path
) -> None:
    code = """
import sys
{}
import penstock
print(len(penstock.open(sys.argv[1]).load(framework="np")))
print([name for name in sys.modules if name.startswith("opentelemetry")] if {} else "there")
"""
    done = python(code.format("import opentelemetry.trace", False), shard)
    assert (done.stdout.splitlines()[1], done.stderr) == ("there", "")
    done = python(code.format("", True), shard)
    assert (done.stdout.splitlines()[1], done.stderr) == ("[]", "")
