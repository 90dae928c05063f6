"""Where events go: loggers, standard error, progress. What is in none of them. Forks, threads, the end of a process."""

from __future__ import annotations

import json
import logging
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import penstock
import pytest
from event_schema import Events, check, collected
from penstock import _events
from penstock._event_lines import clean, text_of
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from test_web import Web


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[Events]:
    with collected(monkeypatch) as found:
        yield found


def load(path: object, **options: Any) -> None:
    penstock.open(path).load(framework="np", **options)  # type: ignore[arg-type]


# Where they go


def test_nothing_is_written_unless_it_is_asked_for(capfd: Any, shard: Path, caplog: Any) -> None:
    with caplog.at_level(logging.DEBUG):
        load(shard)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_standard_error(capfd: Any, shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_LOG", "json")
    load(shard)
    [line] = capfd.readouterr().err.splitlines()
    check(json.loads(line))
    monkeypatch.setenv("PENSTOCK_LOG", "text")
    load(shard)
    [line] = capfd.readouterr().err.splitlines()
    assert re.match(rf"penstock: load of {re.escape(str(shard))}, rank 0: \d+ tensors?, .* in .* s", line)
    monkeypatch.setenv("PENSTOCK_LOG", "off")
    load(shard)
    assert capfd.readouterr().err == ""


def test_a_logger_of_python_gets_the_event_as_a_dict_too(shard: Path, caplog: Any, capfd: Any) -> None:
    penstock.set_logger(logging.getLogger("mine"))
    try:
        with caplog.at_level(logging.INFO, "mine"):
            load(shard)
            with pytest.raises(penstock.UnknownTensorError):
                load(shard, names=["nonsense"])
    finally:
        penstock.set_logger(None)
    good, bad = caplog.records
    assert (good.name, good.levelname, bad.levelname) == ("mine", "INFO", "ERROR")
    check(good.penstock)
    assert good.getMessage() == text_of(good.penstock)
    assert "failed after" in bad.getMessage()
    assert "UnknownTensorError: " in bad.getMessage()
    assert capfd.readouterr().err == ""
    load(shard)
    assert len(caplog.records) == 2


@pytest.mark.parametrize(("engine", "logger"), [("vllm", "vllm.penstock"), ("sglang", "sglang.penstock")])
def test_in_a_process_of_an_engine_its_logger_gets_the_lines(
    engine: str, logger: str, shard: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_events, "_engine", None)
    _events.in_engine(engine)
    with caplog.at_level(logging.INFO, logger):
        load(shard)
        [record] = caplog.records
        assert (record.name, record.levelname) == (logger, "INFO")
        assert record.getMessage().startswith(f"penstock: load ({engine}) of {shard}, rank 0: ")
        monkeypatch.setenv("PENSTOCK_LOG", "json")
        load(shard)
        check(json.loads(caplog.records[-1].getMessage()))
        monkeypatch.setenv("PENSTOCK_LOG", "off")
        load(shard)
        assert len(caplog.records) == 2


def test_a_logger_that_fails_does_not_fail_a_load(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def info(self, line: str) -> None:
            raise OSError("this logger is broken")

        error = info

    monkeypatch.setattr("penstock._event_words._warned", set())
    penstock.set_logger(Broken())
    try:
        with pytest.warns(RuntimeWarning, match="an event of a load is lost: OSError: this logger is broken") as said:
            load(shard)
            load(shard)
    finally:
        penstock.set_logger(None)
    assert len(said) == 1


# Progress


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    folder = tmp_path / "served"
    folder.mkdir()
    synth.write_file(folder / "model.safetensors", [Tensor(f"t{n}", "U8", (1 << 18,)) for n in range(8)])
    found = Web(folder)
    yield found
    found.close()


@pytest.mark.parametrize("how", ["load", "stream", "load_into", "start"])
def test_a_slow_load_says_how_far_it_is(how: str, events: Events, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_events, "EVERY", 0.3)
    checkpoint = penstock.open(web("model.safetensors"), storage={"bandwidth": "2MB"})
    if how == "load":
        checkpoint.load(framework="np")
    elif how == "stream":
        dict(checkpoint.stream(framework="np"))
    elif how == "load_into":
        import numpy as np

        checkpoint.load_into({f"t{n}": np.empty(1 << 18, "u1") for n in range(8)})
    else:
        with checkpoint.start(framework="np") as job:
            job.result()
        assert len(events) == 1  # nobody waits: its owner asks for `progress`
        return
    *lines, end = events
    assert end["event"] == "end"
    assert len(lines) >= 2
    assert {line["event"] for line in lines} == {"progress"}
    assert [line["bytes"] for line in lines] == sorted(line["bytes"] for line in lines)
    assert {line["total"] for line in lines} == {checkpoint.nbytes}
    assert all(line["verb"] == how for line in lines)


def test_a_short_load_says_nothing_before_its_end(events: Events, shard: Path) -> None:
    assert _events.EVERY == 5.0
    load(shard)
    assert events.one()["event"] == "end"


def test_progress_as_text() -> None:
    event = {"event": "progress", "engine": "vllm", "verb": "load", "model": "m", "rank": 3, "seconds": 5.0}
    said = text_of({**event, "bytes": 3_200_000_000, "total": 16_000_000_000})
    assert said == "penstock: load (vllm) of m, rank 3: 3.20 GB of 16.00 GB (20%) after 5.00 s, 0.64 GB/s"


# Secrets


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("https://user:hunter2@host/a/b?X-Amz-Signature=abc#d: no", "https://host/a/b no"),
        ("s3://KEY:SECRET@bucket/a", "s3://bucket/a"),
        ("az://container/a?sv=1&sig=abcdef", "az://container/a"),
        ("hf://org/name@main/folder", "hf://org/name@main/folder"),
        ("hf://name@main", "hf://name@main"),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("sent with Bearer abc.d1", "sent with Bearer ***"),
        ("sent token=abc123, then", "sent token=***, then"),
        ('{"session_token": "abc"}', '{"session_token": "***"}'),
        ("the tokenizer of /models/token/x is a key", "the tokenizer of /models/token/x is a key"),
        ("two\nlines\x1b[31m", "two lines [31m"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: ***"),
        ("Authorization: AWS4-HMAC-SHA256 Credential=AKIAEXAMPLE/x, Signature=abc", "Authorization: ***"),
        ("Cookie: session=abcdef", "Cookie: ***"),
        ("client_secret=abcdef and my_password=ghijkl", "client_secret=*** and my_password=***"),
        ("aws_secret_access_key = abcdef", "aws_secret_access_key = ***"),
    ],
)
def test_texts_are_cleaned(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "planted-aws-secret-1",
    "AWS_SESSION_TOKEN": "planted-session-2",
    "HF_TOKEN": "planted-hub-token-3",
    "AZURE_STORAGE_KEY": "cGxhbnRlZC1henVyZS00",
    "PENSTOCK_PEER_KEY": "planted-peer-5",
    "MY_PASSWORD": "planted-password-6",
}

LEAKS = """
import os, sys, warnings
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
trace.set_tracer_provider(provider)
import penstock
base, path = sys.argv[1:]
for where in (base.replace("http://", "http://planted-user-7:planted-word-8@"), base + "?sig=planted-signature-9"):
    for name in ("model", "none"):
        try:
            checkpoint = penstock.open(where.replace("model", name))
        except penstock.PenstockError:
            continue
        assert "?" in where
        checkpoint.load(framework="dlpack")
        dict(checkpoint.stream(framework="dlpack"))
storage = {"secret_access_key": "planted-setting-10", "access_key_id": "planted-id-11", "proxy": "http://u:planted-12@localhost:1"}
try:
    penstock.open("s3://planted-key-13:planted-14@bucket/model.safetensors", storage={**storage, "patience": 0.1})
except penstock.PenstockError:
    pass
class Leaks(Exception):
    pass
def leak(done, total):
    raise Leaks("planted-callback-15")
try:
    penstock.open(path).load(framework="dlpack", progress=leak)
except Leaks:
    pass
error = penstock.ReadError(f"{os.environ['HF_TOKEN']} https://h/x?token=planted-query-16", path="https://u:planted-17@h/x?planted-18")
from penstock._events import observe
observe("load", "https://u:planted-19@h/x?planted-20").begin().end(error)
"""


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_output_has_a_secret(form: str, python: Any, web: Web, tmp_path: Path, shard: Path) -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    environment = {**SECRETS, "PENSTOCK_LOG": form, "PENSTOCK_METRICS": str(metrics), "NO_PROXY": "*"}
    done = python(LEAKS, web("model.safetensors"), shard, **environment)
    assert done.returncode == 0, done.stderr
    [file] = metrics.iterdir()
    outputs = {"lines": done.stderr, "spans": done.stdout, "metrics": file.read_text()}
    lines = done.stderr.splitlines()
    assert len(lines) == 8  # 4 opens that fail, 3 loads, a stream
    assert done.stdout.count('"name": "penstock load"') == 3
    assert "penstock_failures_total" in outputs["metrics"]
    for name, text in outputs.items():
        assert "planted" not in text, (name, text)
        assert not [value for value in SECRETS.values() if value in text], name


# Processes, threads, the end


def test_threads_give_an_event_for_each_of_their_loads(events: Events, shard: Path) -> None:
    checkpoint = penstock.open(shard)
    with penstock.safe_open(shard, "np") as file:
        names = file.keys()

        def work() -> None:
            for _ in range(5):
                checkpoint.load(framework="np")
                file.get_tensor(names[0])

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [event["verb"] for event in events] == ["load"] * 30
        events.clear()
    nbytes = penstock.open(shard)[names[0]].nbytes
    assert events.one()["bytes"] >= 30 * nbytes


CHILD = """
import os, sys, penstock
path = sys.argv[1]
checkpoint = penstock.open(path)
file = penstock.safe_open(path, "dlpack")
name = file.keys()[0]
file.get_tensor(name)
job = checkpoint.start(framework="dlpack")
job.wait()
child = os.fork()
if not child:
    penstock.open(path).load(framework="dlpack")
    sys.exit(0)
os.waitpid(child, 0)
job.result()
"""


def test_a_forked_child_speaks_of_its_own_loads_only(python: Any, shard: Path) -> None:
    done = python(CHILD, shard, PENSTOCK_LOG="json")
    events = [json.loads(line) for line in done.stderr.splitlines()]
    said = [(event["verb"], event["outcome"], event["pid"] == events[-1]["pid"]) for event in events]
    assert said == [("load", "ok", False), ("start", "ok", True), ("safe_open", "ok", True)]


INTERRUPTED = """
import sys, penstock, signal, os
for number, _ in enumerate(penstock.open(sys.argv[1]).stream(framework="dlpack")):
    if number == 1:
        os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_in_a_stream_gives_its_event(python: Any, small: Path) -> None:
    done = python(INTERRUPTED, small, PENSTOCK_LOG="json")
    assert done.returncode in (1, 130, -signal.SIGINT)
    [line] = [line for line in done.stderr.splitlines() if line.startswith("{")]
    event = json.loads(line)
    check(event)
    assert (event["verb"], event["outcome"]) == ("stream", "cancelled")


AT_EXIT = """
import logging, sys, penstock
logging.basicConfig(filename=sys.argv[2], level=logging.INFO, format="%(message)s")
penstock.set_logger(logging.getLogger())
file = penstock.safe_open(sys.argv[1], "dlpack")
file.get_tensor(file.keys()[0])
stream = penstock.open(sys.argv[1]).stream(framework="dlpack")
next(stream)
job = penstock.open(sys.argv[1]).start(framework="dlpack")
sys.modules["kept"] = (file, stream, job)
"""


def test_what_is_open_at_the_end_of_the_process_is_not_lost(python: Any, small: Path, tmp_path: Path) -> None:
    [first, *_] = sorted(small.glob("*.safetensors")) if small.is_dir() else [small]
    log = tmp_path / "log"
    done = python(AT_EXIT, first, log, PENSTOCK_LOG="json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    found = {event["verb"]: event["outcome"] for event in events}
    assert found["safe_open"] == "ok"
    assert found["stream"] == "cancelled"
    assert found["start"] in ("ok", "cancelled")
    assert len(events) == 3


def test_an_event_in_the_middle_of_another_one_comes_after_it(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a garbage collection drops a job while a line is written."""
    monkeypatch.setenv("PENSTOCK_LOG", "json")
    checkpoint = penstock.open(shard)
    inside, verbs = [], []

    class Nested:
        def info(self, line: str) -> None:
            assert not inside
            inside.append(True)
            if not verbs:
                checkpoint.start(framework="np").cancel()
            verbs.append(json.loads(line)["verb"])
            inside.pop()

        error = info

    penstock.set_logger(Nested())
    try:
        checkpoint.load(framework="np")
    finally:
        penstock.set_logger(None)
    assert verbs == ["load", "start"]
