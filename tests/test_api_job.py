"""`Checkpoint.start`: a load in the background."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import penstock
import pytest
from conftest import LAYOUT, Oracle
from penstock._job import Job
from penstock.synthetic.synth import Tensor


def test_a_job_gives_what_load_gives(small):
    with penstock.open(small).start() as job:
        tensors = job.result()
        Oracle(small).same(tensors)
        assert job.result() is tensors
        assert job.wait(0)
        assert job.done()
        assert job.progress == (LAYOUT.nbytes, LAYOUT.nbytes)
        assert job.report.nbytes == LAYOUT.nbytes


def test_several_threads_are_given_one_result(small):
    checkpoint, together = penstock.open(small), threading.Barrier(4)

    def ask(job):
        together.wait()
        return job.result()

    for _ in range(30):
        with checkpoint.start() as job, ThreadPoolExecutor(4) as pool:
            given = list(pool.map(ask, [job] * 4))
        assert all(result is given[0] for result in given)


def test_a_job_needs_no_context_manager(small):
    checkpoint = penstock.open(small)
    Oracle(small).same(checkpoint.start().result())
    assert checkpoint.last_report.tensors == len(checkpoint)


def test_a_job_casts_cuts_and_selects(opened):
    name = "embed.weight"
    result = opened.start(names=[name], slices={name: slice(0, 2)}, dtype="float32").result()
    assert tuple(result[name].shape) == (2, 48)
    assert str(result[name].dtype) == "torch.float32"


def test_wait_says_whether_the_load_is_done(big):
    with penstock.open(big).start(options={"copy": True}) as job:
        while not job.wait(0.01):
            done, total = job.progress
            assert 0 <= done <= total == 96_000_000
        assert job.wait()


def test_arguments_are_checked_at_once(opened):
    with pytest.raises(penstock.UnknownTensorError):
        opened.start(names="nope")
    with pytest.raises(ValueError, match="layer"):
        opened.start(order="random")


def test_a_cancelled_job_says_so(big):
    job = penstock.open(big).start(options={"copy": True, "io": "direct"})
    job.cancel()
    with pytest.raises(penstock.CancelledError):
        job.result()
    job.cancel()
    job.close()


@pytest.mark.parametrize(
    "error", [penstock.ReadError("broken", path="/a", range=(0, 8)), RuntimeError("full")], ids=str
)
def test_a_failed_job_gives_the_same_error_every_time(small, monkeypatch, error):
    # What fails here once would succeed the next time, or say that the tensors were handed out before
    monkeypatch.setattr(Job, "_hand_out", Mock(side_effect=[error]))
    job = penstock.open(small).start()
    errors = []
    for _ in range(3):
        with pytest.raises(type(error), match=r"broken|full") as caught:
            job.result()
        errors.append(caught.value)
    assert len({(type(error), str(error), tuple(vars(error))) for error in errors}) == 1
    # None of them holds the frames in which an earlier one was caught
    assert len({id(error) for error in errors}) == 3
    assert job.done()


def test_cancelling_a_job_that_has_given_its_result_changes_nothing(small):
    job = penstock.open(small).start()
    tensors = job.result()
    job.cancel()
    assert job.result() is tensors
    Oracle(small).same(tensors)


def test_leaving_the_block_or_dropping_the_job_stops_it(big):
    for _ in range(3):
        with penstock.open(big).start(options={"copy": True}):
            pass
        penstock.open(big).start(options={"copy": True})


def test_a_result_that_is_not_there_in_time_is_a_timeout_and_comes_later(big, python):
    # A stalling source would be better; at a few GB/s 96 MB take more than the microsecond allowed here
    job = penstock.open(big).start(options={"copy": True, "io": "direct", "depth": 1})
    try:
        job.result(timeout=1e-6)
    except TimeoutError as error:
        assert isinstance(error, penstock.StalledError)
        assert "bytes" in str(error)
    Oracle(big).same(job.result())


def test_a_job_in_a_forked_child_is_a_clear_error_and_the_child_can_load(big, small, torch_python):
    code = """
import os, sys, penstock
job = penstock.open(sys.argv[1]).start(options={"copy": True})
child = os.fork()
if child == 0:
    try:
        job.result()
    except penstock.ForkedError as error:
        assert "fork" in str(error) and str(os.getpid()) in str(error)
        assert len(penstock.open(sys.argv[2]).load()) == 11
        os._exit(7)
    os._exit(1)
_, status = os.waitpid(child, 0)
assert len(job.result()) == 24
print(os.waitstatus_to_exitcode(status))
"""
    run = torch_python(code, big, small)
    assert run.stdout.strip() == "7", run.stderr


@pytest.mark.machine
def test_an_interpreter_that_exits_with_a_job_running_ends(big, torch_python):
    start = time.monotonic()
    run = torch_python("import sys, penstock; job = penstock.open(sys.argv[1]).start(options={'copy': True})", big)
    assert (run.returncode, run.stderr) == (0, "")
    assert time.monotonic() - start < 30


class Given(Exception):
    """What a caller raises in the middle of a load that has all its bytes."""


def _given(*_: object) -> None:
    raise Given


def _in_the_block(checkpoint, **how):
    with checkpoint.start(**how) as job:
        job.wait()
        raise Given


def _consuming(checkpoint, **how):
    for pair in checkpoint.stream(**how):
        del pair  # the caller's own
        raise Given


def _prefetching(checkpoint, options, framework):
    with penstock.safe_open(checkpoint.files, framework, options=options) as file, file.prefetch() as loader:
        next(iter(loader))
        raise Given


ENDED_BY_ITS_CALLER = {
    "progress": lambda checkpoint, **how: checkpoint.load(progress=_given, **how),
    "progress, cast": lambda checkpoint, **how: checkpoint.load(progress=_given, dtype="float16", **how),
    "progress of a stream": lambda checkpoint, **how: list(checkpoint.stream(progress=_given, **how)),
    "in the block of a job": _in_the_block,
    "between the tensors of a stream": _consuming,
    "between those of a prefetch loader": _prefetching,
}


def anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


@pytest.mark.parametrize("way", ENDED_BY_ITS_CALLER)
def test_errors_that_are_dropped_leave_no_memory_behind(write, way):
    path = write(*(Tensor(f"t{i}", "F32", (500, 1000)) for i in range(4)))
    checkpoint = penstock.open(path)
    for number in range(90):
        if number == 10:
            before = anonymous()
        with pytest.raises(Given):
            ENDED_BY_ITS_CALLER[way](checkpoint, options={"copy": True}, framework="np")
    assert anonymous() - before < 30_000_000  # 80 loads of 8 MB


@pytest.mark.parametrize("framework", ["np", "pt"])
@pytest.mark.parametrize("options", [{"copy": True}, {}], ids=["private", "mapped"])
@pytest.mark.parametrize("way", ENDED_BY_ITS_CALLER)
def test_an_error_that_is_kept_keeps_no_memory_of_its_load(write, way, options, framework):
    """Its traceback has the frames in which the load is, and with them the job."""
    path = write(*(Tensor(f"t{i}", "F32", (500, 1000)) for i in range(4)))
    checkpoint, kept = penstock.open(path), []

    for number in range(25):
        if number == 5:
            before = anonymous()
        with pytest.raises(Given) as raised:
            ENDED_BY_ITS_CALLER[way](checkpoint, options=options, framework=framework)
        kept.append(raised)
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert anonymous() - before < 40_000_000  # 20 loads of 8 MB


def test_a_job_that_an_error_has_ended_says_so(small):
    job = penstock.open(small).start(framework="np")
    with pytest.raises(Given), job:
        job.wait()
        raise Given
    for _ in range(2):
        with pytest.raises(penstock.CancelledError):
            job.result()


def test_a_job_that_was_closed_when_it_was_done_still_gives_its_result(small):
    with penstock.open(small).start(framework="np") as job:
        job.wait()
    Oracle(small).same(job.result())
