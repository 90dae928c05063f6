"""The start report without an engine: its phases, its processes and what becomes of them, and its command.

`tests/engines/test_startup.py` has the engines.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import penstock
import pytest
from penstock import EngineError, InvalidError, StalledError, UnsupportedError
from penstock.integrations import _start_report, _startup
from penstock.integrations._report_command import described
from penstock.integrations._start_result import explain, result, summed
from penstock.integrations._startup import PHASES, Phases, failed_in

#: Seconds that a process may take for what takes it far less.
LONG = 60

# --- Phases ---


class Clock:
    """A clock that stands still unless it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(_startup, "time", found)
    return found


def test_an_inner_phase_does_not_count_for_the_outer_one(clock: Clock):
    phases = Phases()
    with phases.phase("reading"):
        clock.now += 1
        with phases.phase("recording"):
            clock.now += 2
            with phases.phase("reading"):
                clock.now += 4
            clock.now += 8
        clock.now += 16
    clock.now += 32
    assert phases.seconds == {"reading": 21, "recording": 10}


def test_a_phase_may_have_begun_before_python_did(clock: Clock):
    phases = Phases(began=clock.now - 3)
    with phases.phase("import", since=phases.began):
        clock.now += 1
    assert phases.seconds == {"import": 4}


def test_other_threads_do_not_count(clock: Clock):
    phases = Phases()

    def load() -> None:
        with phases.phase("reading"):
            clock.now += 1

    with phases.phase("recording"):
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert phases.seconds == {"recording": 1}


def test_an_error_knows_the_innermost_phase_that_it_ended():
    phases = Phases()
    with pytest.raises(OSError, match="no") as caught, phases.phase("recording"):
        phases.timed("reading", no)()
    assert failed_in(caught.value) == "reading"
    with pytest.raises(OSError, match="no") as caught, phases.phase("recording"):
        no()
    assert failed_in(caught.value) == "recording"
    with pytest.raises(OSError, match="no") as caught:
        no()
    assert failed_in(caught.value) is None


def no() -> None:
    raise OSError("no")


def test_each_change_is_told():
    told: list[str] = []
    phases = Phases(changed=told.append)
    with phases.phase("reading"):
        phases.timed("recording", lambda: None)()
    assert told == ["reading", "recording", "reading", ""]


def test_nothing_is_measured_unless_something_measures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_startup, "_measured", None)
    with _startup.phase("reading"):
        pass
    phases = Phases()
    _startup.measure(phases)
    with _startup.phase("reading"):
        pass
    assert phases.seconds.keys() == {"reading"}


def test_what_a_recorder_reads_is_reading(small: Path, monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    from penstock.integrations import Recorder

    told: list[str] = []
    monkeypatch.setattr(_startup, "_measured", Phases(changed=told.append))
    recorder = Recorder(penstock.open(small))
    tensors = dict(recorder.weights())
    name = max(tensors, key=lambda one: tensors[one].numel())
    into = torch.empty(tensors[name].shape, dtype=tensors[name].dtype)
    with recorder.barrier(), _startup.phase("recording"):
        into.copy_(tensors[name])
        assert told == ["recording"]
        tensors[name].sum()
        assert told == ["recording", "reading", "recording"]
    recorder.run()
    assert told[3:] == ["", "reading", ""]
    assert torch.equal(into.view(torch.uint8), penstock.open(small).load(names=name)[name].view(torch.uint8))


# --- What ranks say ---

SPECIFICATION: dict[str, Any] = {"model": "/there/is/none", "load_format": "penstock", "device": "cpu"}


def a_report(**more: Any) -> penstock.Report:
    routes = {"mapped": {"bytes": 60}, "direct": {"bytes": 50}}
    return penstock.Report(
        {"nbytes": 100, "routes": routes, "gap_bytes": 10, "loads": 1, "copies": 3, "materialised_bytes": 4}
        | {"materialised": {"aten.cat.default": 2}, "fallbacks": []}
        | more
    )


def test_reports_add_up():
    assert summed([]) is None
    assert summed([a_report(exchange=None), a_report(exchange={"received_bytes": 14})]) == {
        "wanted_bytes": 200,
        "read_bytes": 220,
        "disk_cache_bytes": None,
        "received_bytes": 14,
        "gap_bytes": 20,
        "loads": 2,
        "copies": 6,
        "materialised_bytes": 8,
        "materialised": {"aten.cat.default": 4},
        "given": [],
        "fallbacks": [],
    }
    assert summed([a_report(given="mapped"), a_report(given="mapped")])["given"] == ["mapped"]
    cached = [a_report(disk_cache=SimpleNamespace(cached_bytes=nbytes)) for nbytes in (40, 2)]
    assert summed([a_report(disk_cache=None), *cached])["disk_cache_bytes"] == 42


def test_a_phase_without_time_has_a_reason(tmp_path: Path):
    phases = Phases()
    explain(phases, SPECIFICATION | {"model": str(tmp_path), "load_format": "dummy"}, None)
    found = phases.document()
    assert list(found) == list(PHASES)
    assert "local folder" in found["download"]["reason"]
    assert "dummy" in found["recording"]["reason"]
    assert "CPU" in found["compilation"]["reason"]
    phases = Phases()
    phases.seconds["download"] = 1.0
    explain(phases, SPECIFICATION, None)
    assert phases.document()["download"] == {"seconds": 1.0, "reason": None}


def test_what_the_engine_copied_out_of_mapped_files_was_no_recording():
    phases = Phases()
    phases.seconds |= {"recording": 3.0, "reading": 1.0}
    explain(phases, SPECIFICATION, summed([a_report(given="mapped")]))
    found = phases.document()
    assert found["reading"]["seconds"] == 4.0
    assert found["recording"]["seconds"] is None
    assert "copied out of mapped files" in found["recording"]["reason"]


def test_what_the_engine_loaded_itself_was_no_recording():
    phases = Phases()
    phases.seconds |= {"recording": 3.0, "reading": 1.0}
    nothing = penstock.Report(tensors=0, nbytes=0, loads=0, fallbacks=[{"from": "a", "to": "b", "reason": "odd F4"}])
    explain(phases, SPECIFICATION, summed([nothing]))
    found = phases.document()
    assert found["reading"]["seconds"] == 4.0
    assert found["recording"]["seconds"] is None
    assert "odd F4" in found["recording"]["reason"]


def rank_of(clock: Clock, reading: float, ready: float) -> dict[str, Any]:
    phases = Phases(began=clock.now)
    phases.seconds |= {"import": 1.0, "reading": reading}
    explain(phases, SPECIFICATION, None)
    return result(phases, summed([a_report()]), clock.now + ready)


def test_the_slowest_rank_of_each_phase(clock: Clock):
    ranks = [rank_of(clock, 2, 5), rank_of(clock, 4, 6), rank_of(clock, 3, 9)]
    found = _start_report.merged(ranks)
    assert list(found["phases"]) == [*PHASES, "ready"]
    assert found["phases"]["import"] == {"seconds": 1, "rank": 0, "reason": None}
    assert found["phases"]["reading"] == {"seconds": 4, "rank": 1, "reason": None}
    assert found["phases"]["ready"] == {"seconds": 9, "rank": 2, "reason": None}
    assert found["phases"]["download"]["seconds"] is found["phases"]["download"]["rank"] is None
    assert [rank["other_seconds"] for rank in found["ranks"]] == [2, 1, 5]


def test_a_report_as_text(clock: Clock):
    head = {"engine": "vllm", "engine_version": "1.2", "load_format": "penstock", "device": "cuda"}
    serving = {
        "first_token": {"seconds": 12.0},
        "device_memory": [{"free_bytes": 3 * 10**9, "total_bytes": 8 * 10**9}],
    }
    text = described(head | _start_report.merged([rank_of(clock, 2, 5), rank_of(clock, 4, 6)]) | serving)
    lines = [line.split() for line in text.splitlines()]
    assert ["reading", "4.00", "s", "rank", "1"] in lines
    assert ["ready", "6.00", "s", "rank", "1"] in lines
    assert "rank 1: wanted 100 B, read 110 B, 1 load, 3 copies" in text
    rank = rank_of(clock, 2, 5)
    rank["load"]["disk_cache_bytes"] = 70
    text = described(head | _start_report.merged([rank]) | serving)
    assert "rank 0: wanted 100 B, read 110 B, 70 B from the disk cache, 1 load, 3 copies" in text
    assert "  2 x aten.cat.default needed bytes at once" in text
    assert "first token after 12.00 s" in text
    assert "rank 0: 3.00 GB of 8.00 GB free" in text


# --- Processes ---

#: What stand-ins of ranks have. `say` writes a result, as a rank does. `alone`: this rank does what the test is about.
PREAMBLE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
specification, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
folder, alone = Path(specification["folder"]), rank == specification["alone"]
pids = Path(specification["pids"])
(pids / str(os.getpid())).touch()
while len(list(pids.iterdir())) < specification["ranks"]:
    time.sleep(0.01)
def say(found):
    (folder / f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs three processes of a program, and checks that none of them is left, nor what they have started."""

    def run(program: str, timeout: float = LONG) -> list[dict[str, Any]]:
        monkeypatch.setattr(_start_report, "_PROGRAM", PREAMBLE + program)
        specification = {"device": "cpu", "alone": 1, "ranks": 3, "pids": str(tmp_path)}
        try:
            return _start_report.run(specification, 3, timeout)
        finally:
            assert len(list(tmp_path.iterdir())) >= 3
            assert [one.name for one in tmp_path.iterdir() if runs(int(one.name))] == []

    return run


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_all_ranks_are_heard(ranks):
    assert ranks("say({'me': rank})") == [{"me": 0}, {"me": 1}, {"me": 2}]


def test_a_rank_that_fails_is_named_with_the_cause(ranks):
    program = """
error = {"type": "OSError", "message": "no such luck", "path": "/a/b"}
if alone:
    print("all of it")
    say({"error": error, "phase": "model_creation"})
    sys.exit(1)
time.sleep(1000)
"""
    with pytest.raises(EngineError, match=r"rank 1 failed in model creation: OSError: no such luck") as caught:
        ranks(program)
    assert (caught.value.rank, caught.value.path, caught.value.kind) == (1, "/a/b", "Engine")
    assert "all of it" in str(caught.value.__cause__)


HEARSAY = """
error = {"type": "PeerError", "message": "rank 1 has failed", "path": None}
if rank == 0:
    say({"error": error, "phase": "reading"})
    sys.exit(1)
"""


def test_a_rank_that_fails_because_another_did_is_not_named(ranks):
    program = """
if alone:
    time.sleep(0.3)
    say({"error": {"type": "OSError", "message": "no such luck", "path": "/a/b"}, "phase": "reading"})
    sys.exit(1)
time.sleep(1000)
"""
    with pytest.raises(EngineError, match=r"rank 1 failed in reading: OSError: no such luck") as caught:
        ranks(HEARSAY + program)
    assert (caught.value.rank, caught.value.path) == (1, "/a/b")


def test_a_rank_that_fails_because_another_did_is_named_where_that_one_does_not_end(ranks):
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 0 failed in reading: PeerError: rank 1 has failed"):
        ranks(HEARSAY + "time.sleep(1000)")
    assert time.monotonic() - begun < LONG


def test_a_rank_that_is_killed_is_named_with_its_last_words(ranks):
    program = """
if alone:
    (folder / f"{rank}.phase").write_text("reading             ")
    print("\\n".join(f"line {n}" for n in range(9)), file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1000)
"""
    with pytest.raises(EngineError, match=r"rank 1 was ended by SIGKILL in reading, .*: line 4\nline 5") as caught:
        ranks(program)
    assert "line 3" not in str(caught.value)
    assert caught.value.rank == 1


@pytest.mark.parametrize(("program", "how"), [("sys.exit(7)", "status 7"), ("", "status 0")])
def test_a_rank_that_says_nothing_is_named(ranks, program: str, how: str):
    with pytest.raises(EngineError, match=rf"rank 1 ended with {how}, and said last: nothing"):
        ranks(f"if alone:\n    {program or 'pass'}\nelse:\n    say({{}})")


@pytest.mark.sampled(0)
def test_a_rank_that_hangs_is_named_with_its_phase(ranks):
    program = """
if alone:
    (folder / f"{rank}.phase").write_text("post_processing     ")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
say({})
"""
    with pytest.raises(StalledError, match=r"not ended after 15 s:.* rank 1 in post processing"):
        ranks(program, timeout=15)


def test_what_a_rank_has_started_ends_with_it(ranks):
    program = """
if alone:
    started = subprocess.Popen(["sleep", "1000"])
    (pids / str(started.pid)).touch()
say({})
"""
    assert ranks(program) == [{}, {}, {}]


#: A process that starts a rank, says which, and waits.
STARTS = """
import signal, sys, time
from penstock.integrations import _start_report
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
_start_report._PROGRAM = sys.argv[2]
_start_report.run({"device": "cpu", "alone": 0, "ranks": 1, "pids": sys.argv[1]}, 1, 1000)
"""
WAITS = (
    PREAMBLE
    + """
import threading
from penstock.integrations._start_rank import end_with_parent
threading.Thread(target=end_with_parent, args=(folder,), daemon=True).start()
started = subprocess.Popen(["sleep", "1000"])
(pids / str(started.pid)).touch()
time.sleep(1000)
"""
)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_the_command_ends(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, how: signal.Signals
):
    command, temporary = [sys.executable, "-c", STARTS, str(tmp_path), WAITS], tmp_path_factory.mktemp("temporary")
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(temporary)})
    try:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        assert len(list(temporary.iterdir())) == 1
        process.send_signal(how)
        process.wait(LONG)
        pids = [int(one.name) for one in tmp_path.iterdir()]
        wait_until(lambda: not any(map(runs, pids)))
        assert list(temporary.iterdir()) == []
    finally:
        process.kill()


def wait_until(holds) -> None:
    deadline = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- The command ---


def test_an_engine_that_is_not_installed(cli):
    pytest.importorskip("torch")
    for engine in ("vllm", "sglang"):
        if _installed(engine):
            pytest.skip(f"{engine} is installed")
        done = cli("engines", "report", "x", "--engine", engine, "--json")
        assert done.returncode == 3
        error = json.loads(done.stdout)["error"]
        assert error["kind"] == "Unsupported"
        assert f"pip install {engine}" in error["message"]


def _installed(package: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x", "--engine", "vlm"], "Did you mean vllm?"),
        (["x", "--tensor-parralel-size", "2"], "Did you mean --tensor-parallel-size?"),
        (["x", "--tensor-parallel-size", "0"], "'0' is not a number of ranks"),
        (["x", "--timeout", "-1"], "'-1' is not a positive number of seconds"),
        (["x", "--engine-args", "[1]"], "'[1]' is not an object of JSON"),
        (["x", "--model-loader-extra-config", "{"], "'{' is not JSON"),
        ([], "MODEL"),
    ],
)
def test_wrong_usage(cli, arguments: list[str], said: str):
    done = cli("engines", "report", *arguments, "--json")
    assert done.returncode == 2
    assert said in json.loads(done.stdout)["error"]["message"]
    assert done.stderr.startswith("usage: penstock engines report")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size cannot be given here"),
        ({"tp_size": 2, "device": "cuda"}, "device, tp_size cannot be given here"),
        ({"pipeline_parallel_size": "x"}, "pipeline_parallel_size='x' is not a number of ranks"),
    ],
)
def test_arguments_that_change_what_is_measured_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], said: str
):
    monkeypatch.setattr(_start_report, "version", lambda package: "0")
    with pytest.raises(InvalidError, match=said):
        _start_report.report("x", device="cpu", engine_args=arguments)


def test_sglang_is_measured_without_pipeline_parallelism():
    with pytest.raises(UnsupportedError, match="without pipeline"):
        _start_report.report("x", engine="sglang", device="cpu", engine_args={"pipeline_parallel_size": 2})


def test_sglang_is_measured_on_a_cpu_alone(cli):
    done = cli("engines", "report", "x", "--engine", "sglang", "--device", "cuda")
    assert done.returncode == 3
    assert "on a CPU alone" in done.stderr


@pytest.mark.skipif("_installed('vllm')", reason="vLLM would start")
def test_the_command_imports_no_torch(python):
    program = """
import sys
from penstock.cli import main
main(["engines", "report", "x"])
print([name for name in ("torch", "numpy", "vllm") if name in sys.modules])
"""
    assert python(program).stdout.strip() == "[]"
