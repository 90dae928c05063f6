"""Saves in the background: `penstock.save(..., wait=False)`, to files and to a double of S3."""

from __future__ import annotations

import mmap
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
from s3_server import error, serving
from upload_server import Uploads, settings

MIB = 1 << 20
PLACE = "s3://bucket/models/one"


@pytest.fixture
def bucket() -> Iterator[Uploads]:
    with serving(Uploads()) as found:
        yield found


def tensors(seed: int = 0, count: int = 4, size: int = 5 * MIB) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"layers.{i}.w": random.integers(0, 255, size + i, np.uint8) for i in range(count)}


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


def loaded(bucket: Uploads) -> dict[str, Any]:
    return penstock.open(f"{PLACE}/", storage=settings(bucket)).load(framework="np")


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("most", [None, 6 * MIB])
def test_a_job_writes_the_files_that_a_call_writes(
    tmp_path: Path, snapshot: bool, fsync: bool, most: int | None
) -> None:
    state = tensors()
    expected = penstock.save(state, tmp_path / "waited", max_shard_size=most, fsync=fsync)
    place, more = tmp_path / "job", {"max_shard_size": most, "fsync": fsync, "snapshot": snapshot}
    with penstock.save(state, place, wait=False, **more) as job:
        report = job.result()
        assert job.result() is report and job.report is report
        assert job.wait(0) and job.done() and job.copied(0)
        assert job.progress == (report.file_bytes, report.file_bytes)
    for name in expected.files:
        assert (place / name).read_bytes() == (tmp_path / "waited" / name).read_bytes(), name
    keys = ("files", "nbytes", "file_bytes", "tensors", "fsync")
    assert {key: report[key] for key in keys} == {key: expected[key] for key in keys}
    one = penstock.save_file(state, tmp_path / "one.safetensors", wait=False, snapshot=snapshot, fsync=fsync)
    one.result()
    assert same(penstock.open(tmp_path / "one.safetensors").load(framework="np"), state)


def test_the_tensors_may_change_when_all_parts_are_confirmed(bucket: Uploads) -> None:
    state = tensors()
    expected = {name: array.copy() for name, array in state.items()}
    held = bucket.hold_parts()
    job = penstock.save(state, PLACE, wait=False, storage=settings(bucket))
    assert not job.copied(0.1) and not job.wait(0) and not job.done()
    bucket.refuses = late = Held("POST", "uploadId")
    held.set()
    assert job.copied()
    for array in state.values():
        array[:] = 0
    assert not job.done() and not bucket.objects
    late.goes_on.set()
    job.result()
    assert same(loaded(bucket), expected)


class Held:
    """Nothing is answered to requests of this method with this query, until it goes on."""

    def __init__(self, method: str, query: str) -> None:
        self.of, self.goes_on = (method, query), threading.Event()

    def __call__(self, method: str, key: str, query: dict[str, str]) -> None:
        if method == self.of[0] and self.of[1] in query:
            self.goes_on.wait(120)


def test_a_snapshot_lets_go_of_the_tensors_before_anything_is_sent(bucket: Uploads) -> None:
    state = tensors()
    expected = {name: array.copy() for name, array in state.items()}
    held = bucket.hold_parts()
    job = penstock.save(state, PLACE, wait=False, snapshot=True, storage=settings(bucket))
    assert job.copied()
    for array in state.values():
        array[:] = 0
    assert job.progress[0] == 0 and not job.done()
    held.set()
    assert job.result().nbytes == sum(array.nbytes for array in expected.values())
    assert same(loaded(bucket), expected)


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_snapshot_that_does_not_fit_is_refused_and_nothing_is_written(
    bucket: Uploads, tmp_path: Path, place: str
) -> None:
    nbytes = 1 << 44  # address space, of which no page is ever there
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    state = {"w": np.frombuffer(memory, np.uint8)}
    at = tmp_path / "there" if place == "folder" else PLACE
    with pytest.raises(penstock.OutOfMemoryError, match=r"a snapshot takes \d+ bytes.*nothing was written"):
        penstock.save(state, at, wait=False, snapshot=True, max_shard_size=None, storage=settings(bucket))
    late = {"w": np.frombuffer(memory, np.uint8)[::2]}
    with pytest.raises(penstock.OutOfMemoryError, match="packing tensors before they are written takes"):
        penstock.save(late, at, wait=False, max_shard_size=None, storage=settings(bucket))
    assert not (tmp_path / "there").exists() and not bucket.requests
    del state, late


@pytest.mark.parametrize("snapshot", [False, True])
def test_tensors_that_must_be_packed_are_packed_before_the_call_returns(bucket: Uploads, snapshot: bool) -> None:
    torch = pytest.importorskip("torch")
    state = {f"w{i}": torch.randn(900, 700).t() for i in range(12)} | {"plain": torch.randn(1000)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    held = bucket.hold_parts()
    job = penstock.save(state, PLACE, wait=False, snapshot=snapshot, max_shard_size=9_000_000, storage=settings(bucket))
    for i in range(12):
        state[f"w{i}"].zero_()
    assert not job.done()
    held.set()
    job.result()
    found = penstock.open(f"{PLACE}/", storage=settings(bucket)).load()
    assert all(torch.equal(found[name], expected[name]) for name in expected) and len(found) == 13


def test_a_tensor_that_cannot_be_packed_ends_the_save_at_once(bucket: Uploads, tmp_path: Path) -> None:
    class Broken(np.ndarray):
        pass

    state = {"w": np.arange(10_000.0).reshape(100, 100).T, "x": np.ones(3)}
    described = penstock._save.describe("w", state["w"])

    def fails(memory: memoryview) -> None:
        raise RuntimeError("on purpose")

    for place in (PLACE, tmp_path / "folder"):
        with pytest.raises(penstock.WriteError, match="w cannot be packed: on purpose"):
            penstock.save({**state, "w": described._replace(fill=fails)}, place, wait=False, storage=settings(bucket))
    assert not bucket.objects and not bucket.under_way and not list((tmp_path / "folder").iterdir())


@pytest.mark.parametrize("how", ["cancel", "close", "leave", "drop", "interrupt"])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_job_that_is_given_up_leaves_nothing(bucket: Uploads, how: str, snapshot: bool) -> None:
    penstock.save({"old": np.arange(9)}, PLACE, storage=settings(bucket))
    before = dict(bucket.objects)
    bucket.delay = 0.05
    held = bucket.hold_parts()
    job = penstock.save(tensors(), PLACE, wait=False, snapshot=snapshot, storage=settings(bucket))
    timer = threading.Timer(0.3, held.set)
    timer.start()
    if how == "leave":
        with job:
            pass
    elif how == "interrupt":
        threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            job.result()
    elif how != "drop":
        getattr(job, how)()
    if how == "drop":
        del job
    else:
        assert job.done()
        for _ in range(2):
            with pytest.raises(penstock.CancelledError):
                job.result()
        job.cancel()
        job.close()
    timer.join()
    assert bucket.objects == before and not bucket.under_way


def test_a_failed_job_gives_the_same_error_every_time(bucket: Uploads) -> None:
    bucket.refuses = lambda method, key, query: (
        error(400, "InvalidRequest", "on purpose") if query.get("partNumber") == "2" else None
    )
    job = penstock.save(tensors(), PLACE, wait=False, storage=settings(bucket))
    errors = []
    for ask in (job.result, job.wait, job.copied, job.result):
        with pytest.raises(penstock.PenstockError, match="on purpose") as caught:
            ask()
        errors.append(caught.value)
    assert len({(type(one), str(one)) for one in errors}) == 1
    assert job.done() and not bucket.objects and not bucket.under_way


def test_a_result_that_is_not_there_in_time_is_a_timeout_and_comes_later(bucket: Uploads) -> None:
    held = bucket.hold_parts()
    job = penstock.save(tensors(), PLACE, wait=False, storage=settings(bucket))
    with pytest.raises(penstock.StalledError, match=r"is not done after 0.05 s \(0 of \d+ bytes"):
        job.result(0.05)
    assert not job.wait(0.01)
    held.set()
    job.result()
    assert same(loaded(bucket), tensors())


def test_cancelling_a_save_that_is_done_changes_nothing(tmp_path: Path) -> None:
    job = penstock.save(tensors(), tmp_path, wait=False)
    assert job.wait()
    job.cancel()
    assert job.result().files == ["model.safetensors"]
    assert same(penstock.open(tmp_path).load(framework="np"), tensors())


def test_arguments_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    state: Any = tensors(count=1)
    for more, message in (
        ({"snapshot": True}, "give wait=False"),
        ({"wait": 0}, "give True or False"),
        ({"wait": False, "snapshot": 1}, "give True or False"),
        ({"wait": False, "progress": True}, "ask its job"),
    ):
        for call in (penstock.save, penstock.save_file):
            with pytest.raises(penstock.InvalidError, match=message):
                call(state, tmp_path / "x", **more)
    assert not list(tmp_path.iterdir())


def test_quiesce_names_a_save_in_the_background(bucket: Uploads) -> None:
    held = bucket.hold_parts()
    job = penstock.save(tensors(), PLACE, wait=False, storage=settings(bucket))
    with pytest.raises(penstock.BusyError) as caught:
        penstock.quiesce()
    assert f"a save to {PLACE}" in str(caught.value)
    held.set()
    job.result()
    penstock.quiesce()


def test_a_job_in_a_forked_child_is_a_clear_error(tmp_path: Path, torch_python: Any) -> None:
    code = """
import os, sys, numpy, penstock
job = penstock.save({"w": numpy.arange(3_000_000)}, sys.argv[1], wait=False)
child = os.fork()
if child == 0:
    for ask in (job.result, job.done, job.copied, job.cancel):
        try:
            ask()
            os._exit(1)
        except penstock.ForkedError as error:
            assert "save in the child instead" in str(error)
    os._exit(7)
_, status = os.waitpid(child, 0)
assert job.result().files == ["model.safetensors"]
print(os.waitstatus_to_exitcode(status))
"""
    run = torch_python(code, tmp_path)
    assert run.stdout.strip() == "7", run.stderr
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".safetensors"] == ["model.safetensors"]


def test_an_interpreter_that_ends_gives_the_save_up_and_says_so(bucket: Uploads, torch_python: Any) -> None:
    held = bucket.hold_parts()
    threading.Timer(2.0, held.set).start()
    code = f"""
import numpy, penstock
job = penstock.save({{"w": numpy.arange(3_000_000)}}, {PLACE!r}, wait=False, storage={settings(bucket)!r})
"""
    run = torch_python(code)
    assert run.returncode == 0
    assert f"the save to {PLACE} was given up, because the program ended" in run.stderr
    assert not bucket.objects and not bucket.under_way


@pytest.mark.parametrize("end", ["done", "failed", "closed"])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_job_that_has_ended_lets_go_of_the_tensors(bucket: Uploads, end: str, snapshot: bool) -> None:
    """The threads that write let go. Python has the tensors back with the next call, whatever it is."""
    held = bucket.hold_parts()
    if end == "failed":
        bucket.refuses = lambda method, key, query: (
            error(400, "InvalidRequest", "on purpose") if query.get("partNumber") == "2" else None
        )
    state = tensors()
    gone = [weakref.ref(array) for array in state.values()]
    job = penstock.save(state, PLACE, wait=False, snapshot=snapshot, storage=settings(bucket))
    del state
    assert job.copied() if snapshot else all(ref() is not None for ref in gone)
    if end == "closed":
        timer = threading.Timer(0.2, held.set)
        timer.start()
        job.close()
        timer.join()
    held.set()
    limit = time.monotonic() + 60
    while any(ref() is not None for ref in gone):
        assert time.monotonic() < limit, "the tensors stay"
        time.sleep(0.01)
        penstock.Options()
    assert job.progress[1] > 20 * MIB and job.report.files == ["model.safetensors"]
    if end == "done":
        assert job.result().nbytes == sum(array.nbytes for array in tensors().values())


@pytest.mark.machine
def test_a_snapshot_goes_when_its_save_has_ended(tmp_path: Path, torch_python: Any) -> None:
    code = """
import sys, numpy, penstock
def memory(what):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024
state = {"w": numpy.ones(96_000_000, numpy.uint8)}
before, jobs = memory("VmRSS"), []
for number in range(3):
    jobs.append(penstock.save(state, f"{sys.argv[1]}/{number}", wait=False, snapshot=True, fsync=False))
    jobs[-1].wait()
print(memory("VmHWM") - before)
"""
    run = torch_python(code, tmp_path)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 1.5 * 96_000_000, "never two snapshots"


@pytest.mark.parametrize("snapshot", [False, True])
def test_what_is_copied_stays_so(bucket: Uploads, snapshot: bool) -> None:
    """Also if the save fails afterwards."""
    bucket.refuses = lambda method, key, query: (
        error(400, "InvalidRequest", "on purpose") if method == "POST" and "uploadId" in query else None
    )
    job = penstock.save(tensors(), PLACE, wait=False, snapshot=snapshot, storage=settings(bucket))
    with pytest.raises(penstock.PenstockError, match="on purpose"):
        job.result()
    assert job.copied() and job.copied(0)
    bucket.refuses = late = Held("POST", "uploadId")
    job = penstock.save(tensors(), PLACE, wait=False, snapshot=snapshot, storage=settings(bucket))
    assert job.copied()
    threading.Timer(0.2, late.goes_on.set).start()
    job.cancel()
    assert job.copied()


def test_a_warning_that_is_an_error_keeps_no_save_from_being_closed(bucket: Uploads, torch_python: Any) -> None:
    held = bucket.hold_parts()
    threading.Timer(2.0, held.set).start()
    code = f"""
import warnings, numpy, penstock
warnings.simplefilter("error")
state, storage = {{"w": numpy.arange(3_000_000)}}, {settings(bucket)!r}
jobs = [penstock.save(state, {PLACE!r} + n, wait=False, storage=storage) for n in "ab"]
"""
    run = torch_python(code)
    assert "was given up, because the program ended" in run.stderr
    assert not bucket.objects and not bucket.under_way
