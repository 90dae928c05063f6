"""What goes wrong on the way to a GPU: each is a typed error that names a file, and leaves nothing behind.

Nothing: no device memory, no registration, no stream, event or context of the driver, no thread, no descriptor.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakegpu
import penstock
import pytest
import torch
from fakegpu import FakeGpu, FakeTorch, fresh, settle, threads, torch_on
from ordeal import load_factor
from penstock.bench import reference
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor

pytestmark = pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)

OPTIONS = {"staging": "16MiB", "extent": "1MiB"}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    with fresh() as fake:
        yield fake


@pytest.fixture
def gpu(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    with torch_on(fake, monkeypatch) as side:
        yield side


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = [Tensor(f"layers.{i}.w", "F32", (4, 1 << 18)) for i in range(12)]
    tensors += [Tensor(f"layers.{i}.small", "BF16", (77,)) for i in range(12)]
    return synth.write_file(tmp_path_factory.mktemp("gpu") / "x.safetensors", tensors)


def fails(file: Path, kind: str, load: Callable[[], Any]) -> penstock.PenstockError:
    with pytest.raises(penstock.PenstockError) as caught:
        load()
    error = caught.value
    assert error.kind == kind, error
    assert file.name in str(error), error
    # What a traceback holds on to must not be device memory; the rest goes with it.
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def works(fake: FakeGpu, file: Path) -> None:
    entries = reference.entries_of(file)
    for name, tensor in penstock.open(file).load("cuda:0", framework="dlpack").items():
        assert fake.read(tensor._view.address, tensor.nbytes) == reference.raw(entries[name]).tobytes()


#: A driver's function, which call of it fails, with what, and what the load then says.
CALLS = [
    ("cuInit", 1, 999, "Device"),
    ("cuInit", 1, 100, "Unsupported"),
    ("cuDeviceGetCount", 1, 999, "Device"),
    ("cuDevicePrimaryCtxRetain", 1, 2, "OutOfMemory"),
    ("cuDevicePrimaryCtxRetain", 1, 999, "Device"),
    ("cuCtxSetCurrent", 1, 999, "Device"),
    ("cuStreamCreate", 1, 2, "OutOfMemory"),
    ("cuEventCreate", 1, 999, "Device"),
    ("cuEventRecord", 3, 999, "Device"),
    ("cuEventSynchronize", 2, 999, "Device"),
    ("cuMemAlloc_v2", 1, 2, "OutOfMemory"),
    ("cuMemAlloc_v2", 1, 999, "Device"),
    ("cuMemcpyHtoDAsync_v2", 1, 999, "Device"),
    ("cuMemcpyHtoDAsync_v2", 7, 719, "Device"),
]


@pytest.mark.parametrize(("call", "nth", "code", "kind"), CALLS)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_failing_driver_without_a_framework(
    fake: FakeGpu, file: Path, call: str, nth: int, code: int, kind: str, streamed: bool
) -> None:
    opened = penstock.open(file)
    fake.configure(fail=f"{call}:{nth}:{code}", copy_delay_us=300)

    def load() -> None:
        if streamed:
            for _ in opened.stream("cuda:0", framework="dlpack", options=OPTIONS):
                pass
        else:
            opened.load("cuda:0", framework="dlpack", options=OPTIONS)

    error = fails(file, kind, load)
    assert call in str(error) and str(code) in str(error), error
    fake.configure(fail="")
    gc.collect()
    assert (fake.counter("device_bytes"), settle(threads, [])) == (0, [])
    works(fake, file)


@pytest.mark.parametrize(
    ("call", "nth"),
    [("cuStreamCreate", 1), ("cuStreamWaitEvent", 1), ("cuEventSynchronize", 2), ("cuMemcpyHtoDAsync_v2", 5)],
)
def test_a_failing_driver_with_torch(gpu: FakeTorch, file: Path, call: str, nth: int) -> None:
    opened = penstock.open(file)
    gpu.fake.configure(fail=f"{call}:{nth}:999", copy_delay_us=300)
    fails(file, "Device", lambda: opened.load("cuda:0", options=OPTIONS))
    gpu.fake.configure(fail="")
    gc.collect()
    assert gpu.pool.live == 0
    works(gpu.fake, file)


@pytest.mark.parametrize("way", ["load", "stream", "job"])
def test_whoever_holds_on_to_a_failed_load_holds_on_to_no_memory_of_torch(
    gpu: FakeTorch, tmp_path: Path, way: str
) -> None:
    # Large enough for a block each.
    file = synth.write_file(tmp_path / "x.safetensors", [Tensor(f"{i}", "F32", (9, 1 << 18)) for i in range(4)])
    opened, kept = penstock.open(file), []
    if way == "job":
        kept.append(opened.start("cuda:0", options=OPTIONS))
        kept[0].cancel()
    else:
        gpu.fake.configure(fail="cuMemcpyHtoDAsync_v2:5:999", copy_delay_us=300)
        with pytest.raises(penstock.DeviceError) as caught:
            opened.load("cuda:0", options=OPTIONS) if way == "load" else dict(opened.stream("cuda:0", options=OPTIONS))
        kept.append(caught.value)
        gpu.fake.configure(fail="")
    gc.collect()
    assert gpu.pool.live == 0
    kept.clear()


def test_memory_that_does_not_suffice(fake: FakeGpu, file: Path) -> None:
    fake.configure(memory=20_000_000)
    for streamed in (False, True):

        def load(streamed: bool = streamed) -> None:
            opened = penstock.open(file)
            if streamed:
                _ = dict(opened.stream("cuda:0", framework="dlpack", options=OPTIONS))
            else:
                opened.load("cuda:0", framework="dlpack", options=OPTIONS)

        fails(file, "OutOfMemory", load)
        gc.collect()
        assert fake.counter("device_bytes") == 0
    fake.configure(memory=1 << 30)
    works(fake, file)


def test_torch_without_memory(gpu: FakeTorch, file: Path) -> None:
    gpu.pool.limit = 20_000_000
    opened = penstock.open(file)
    error = fails(file, "OutOfMemory", lambda: opened.load("cuda:0", options=OPTIONS))
    assert isinstance(error, MemoryError) and "GPU 0" in str(error)
    fails(file, "OutOfMemory", lambda: dict(opened.stream("cuda:0", options=OPTIONS, window="8MiB")))
    gc.collect()
    assert gpu.pool.live == 0
    gpu.pool.limit = 1 << 40
    assert len(opened.load("cuda:0")) == 24


@pytest.mark.machine
def test_a_context_lost_in_the_middle(fake: FakeGpu, file: Path) -> None:
    fake.configure(sticky="6:700")
    error = fails(file, "Device", lambda: penstock.open(file).load("cuda:0", framework="dlpack", options=OPTIONS))
    assert "700" in str(error) and "must be restarted" in str(error)
    # And for everybody after: nothing works in this process, but it says so at once.
    started = time.monotonic()
    fails(file, "Device", lambda: penstock.open(file).load("cuda:0", framework="dlpack", options=OPTIONS))
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("code", [214, 700, 702, 710, 714, 715, 716, 717, 718, 719])
def test_every_error_that_loses_the_context_says_that_the_process_has_to_be_started_anew(
    fake: FakeGpu, file: Path, code: int
) -> None:
    fake.configure(sticky=f"3:{code}")
    error = fails(file, "Device", lambda: penstock.open(file).load("cuda:0", framework="dlpack", options=OPTIONS))
    assert f"({code})" in str(error) and "must be restarted" in str(error), error


@pytest.mark.parametrize("code", [201, 709])
def test_a_context_that_others_have_destroyed_is_let_go_of_with_the_staging_memory(
    fake: FakeGpu, file: Path, code: int
) -> None:
    """`cudaDeviceReset` destroys the primary context, and the pool would keep a dead one for ever."""
    penstock.open(file).load("cuda:0", framework="dlpack", options=OPTIONS)
    gc.collect()
    assert settle(threads, []) == [] and fake.counter("contexts_retained") == 1
    fake.configure(fail=f"cuCtxSetCurrent:1:{code}")
    error = fails(file, "Device", lambda: penstock.open(file).load("cuda:0", framework="dlpack", options=OPTIONS))
    assert "release_staging()" in str(error), error
    fake.configure(fail="")
    penstock.release_staging()
    assert (fake.counter("contexts_retained"), fake.counter("registered_bytes")) == (0, 0)
    works(fake, file)


@pytest.mark.parametrize("code", [801, 712, 1, 2])
def test_a_refused_registration_is_a_fallback_in_the_report(fake: FakeGpu, file: Path, code: int) -> None:
    fake.configure(strict=0, refuse_register=code)
    opened = penstock.open(file)
    tensors = opened.load("cuda:0", framework="dlpack", options=OPTIONS)
    fallbacks = [f for f in opened.last_report.fallbacks if f["to"] == "plain staging memory"]
    assert len(fallbacks) == 1 and str(code) in fallbacks[0]["reason"]
    entries = reference.entries_of(file)
    assert all(fake.read(t._view.address, t.nbytes) == reference.raw(entries[n]).tobytes() for n, t in tensors.items())
    assert fake.counter("registered_bytes") == 0


def test_a_limit_on_registered_memory_in_the_middle(fake: FakeGpu, file: Path) -> None:
    fake.configure(strict=0, register_limit=5 << 20)
    opened = penstock.open(file)
    opened.load("cuda:0", framework="dlpack", options=OPTIONS)
    assert any("staging" in f["to"] for f in opened.last_report.fallbacks), opened.last_report.fallbacks


def test_a_gpu_that_is_not_there(fake: FakeGpu, file: Path) -> None:
    opened = penstock.open(file)
    error = fails(file, "Invalid", lambda: opened.load("cuda:3", framework="dlpack"))
    assert "3" in str(error)
    fake.configure(devices=0)
    fails(file, "Unsupported", lambda: opened.load("cuda:0", framework="dlpack"))
    fake.configure(devices=1)


def test_a_driver_that_is_not_there(fake: FakeGpu, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", str(tmp_path / "libnothing.so"))
    opened = penstock.open(file)
    error = fails(file, "Unsupported", lambda: opened.load("cuda:0", framework="dlpack"))
    assert "libnothing.so" in str(error), error
    assert "libnothing.so" in penstock._core.gpus()["reason"]
    error = fails(file, "Device", lambda: opened.load("cuda:0", framework="pt"))
    assert "torch" in str(error) and "libnothing.so" in str(error)
    # As safetensors: the file opens, and the first tensor fails.
    with penstock.safe_open(file, framework="pt", device="cuda:0") as f:
        assert len(f.keys()) == 24
        fails(file, "Device", lambda: f.get_tensor("layers.0.w"))


# --- loads that are not let finish ----------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.02])
@pytest.mark.parametrize("how", ["cancel", "close", "drop"])
@pytest.mark.parametrize("name", ["dlpack", "pt"])
def test_a_job_that_is_not_let_finish(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, file: Path, name: str, how: str, delay: float
) -> None:
    fake.configure(copy_delay_us=3000)
    with torch_on(fake, monkeypatch) as gpu:
        job = penstock.open(file).start("cuda:0", framework=name, options=OPTIONS)
        time.sleep(delay)
        started = time.monotonic()
        if how == "cancel":
            job.cancel()
            with pytest.raises(penstock.CancelledError):
                job.result()
        elif how == "close":
            job.close()
        assert how == "drop" or (settle(threads, []) == [] and time.monotonic() - started < 5 * load_factor())
        del job
        gc.collect()
        assert settle(threads, []) == []
        penstock.Options()
        assert (gpu.pool.live, fake.counter("device_bytes")) == (0, 0)


@pytest.mark.parametrize("name", ["dlpack", "pt"])
@pytest.mark.parametrize("taken", [0, 1, 7])
def test_a_stream_whose_consumer_fails_or_leaves(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, file: Path, name: str, taken: int
) -> None:
    fake.configure(copy_delay_us=2000)

    def consume(leave: bool) -> None:
        stream = penstock.open(file).stream("cuda:0", framework=name, options=OPTIONS, window="8MiB")
        for i, _ in enumerate(stream):
            if i == taken:
                if leave:
                    return
                raise KeyError("the consumer's own")

    with torch_on(fake, monkeypatch) as gpu:
        with pytest.raises(KeyError):
            consume(False)
        consume(True)
        gc.collect()
        assert settle(threads, []) == []
        penstock.Options()
        assert (gpu.pool.live, fake.counter("device_bytes")) == (0, 0)


@pytest.mark.parametrize(
    ("call", "refused"),
    [
        ("cuMemcpyHtoDAsync_v2:1", 1),
        ("cuMemcpyHtoDAsync_v2:9", 1),
        ("cuMemcpyHtoDAsync_v2:40", 1),
        ("cuMemcpyBatchAsync:1", 12),
        ("cuEventRecord:3", 0),
        ("cuStreamCreate:1", 0),
    ],
)
def test_load_into_says_what_it_touched(gpu: FakeTorch, file: Path, call: str, refused: int) -> None:
    """What was written, and what the call that failed was to write: no driver says that it wrote nothing."""
    opened = penstock.open(file)
    to = {name: gpu.destination(tensor) for name, tensor in opened.load("cpu").items()}
    gpu.fake.control("stream_synchronize", gpu.stream, 0)

    def contents() -> dict[str, bytes]:
        return {name: gpu.fake.read(tensor.data_ptr(), tensor.nbytes) for name, tensor in to.items()}

    before = contents()
    gpu.fake.configure(fail=f"{call}:999")
    error = fails(file, "Device", lambda: opened.load_into(to, options=OPTIONS))
    gpu.fake.configure(fail="")
    after = contents()
    changed = {name for name in to if before[name] != after[name]}
    assert len(changed) < len(to)
    assert changed <= set(error.touched)
    assert len(set(error.touched) - changed) <= refused
    assert call.startswith("cuStreamCreate") or error.touched
    opened.load_into(to)


@pytest.mark.parametrize("nth", [1, 2, 9])
def test_parts_of_one_matrix_count_each_for_itself(gpu: FakeTorch, file: Path, nth: int) -> None:
    opened = penstock.open(file)
    names = [name for name in opened if name.endswith(".w")]
    matrix = gpu.pool.empty(len(names) << 22).view(torch.float32).reshape(4, len(names), 1 << 18)
    gpu.fake.control("stream_synchronize", gpu.stream, 0)
    before = matrix.clone()
    to = [penstock.Destination(name, matrix[:, i]) for i, name in enumerate(names)]
    gpu.fake.configure(fail=f"cuMemcpyHtoDAsync_v2:{nth}:999")
    error = fails(file, "Device", lambda: opened.load_into(to, options=OPTIONS))
    changed = {name for i, name in enumerate(names) if not torch.equal(matrix[:, i], before[:, i])}
    assert len(error.touched) < len(names)
    assert changed <= set(error.touched)
    assert len(set(error.touched) - changed) <= 1


# --- processes that end, fork or hang -------------------------------------------------------------------------------

HANG = """
import gc, sys, time, fakegpu, penstock
from fakegpu import FakeGpu, settle, threads
fake = FakeGpu()
fake.configure(hang_copy=5, strict=1)
opened = penstock.open(sys.argv[1])
options = {"staging": "16MiB", "extent": "1MiB", "stall_timeout": 0.5}
started = time.monotonic()
try:
    opened.load("cuda:0", framework="dlpack", options=options)
except penstock.StalledError as error:
    took = time.monotonic() - started
    assert "x.safetensors" in str(error) and "device" in str(error), error
else:
    sys.exit("no error")
assert took < 5, took
# Only what the hanging copies may still touch stays: no other load gets it.
assert fake.counter("registered_bytes") > 0
fake.control("release_hang")
assert settle(threads, []) == [], threads()
gc.collect()
penstock._core.release_staging()
assert settle(lambda: fake.counter("device_bytes"), 0) == 0
assert fake.counter("streams") == fake.counter("events") == 0
assert len(opened.load("cuda:0", framework="dlpack", options=options)) == 24
assert fake.misuses == [], fake.misuses
print("well")
"""

EXIT = """
import sys, threading, penstock
opened = penstock.open(sys.argv[1])
how = sys.argv[2]
options = {"staging": "16MiB", "extent": "1MiB"}
if how == "job":
    kept = opened.start("cuda:0", framework="dlpack", options=options)
elif how == "stream":
    kept = opened.stream("cuda:0", framework="dlpack", options=options, window="8MiB")
    first = next(kept)
elif how == "thread":
    # The driver is at work, and most of the copies are still to come.
    moving = threading.Event()
    moved = lambda arrived, total: arrived and moving.set()
    arguments = {"framework": "dlpack", "options": options, "progress": moved}
    threading.Thread(target=opened.load, args=["cuda:0"], kwargs=arguments, daemon=True).start()
    assert moving.wait(15)
elif how == "tensors":
    kept = opened.load("cuda:0", framework="dlpack", options=options)
elif how == "raise":
    kept = opened.start("cuda:0", framework="dlpack", options=options)
    raise SystemExit(3)
print("well")
"""

FORK = """
import os, sys, penstock, fakegpu
opened = penstock.open(sys.argv[1])
options = {"staging": "16MiB", "extent": "1MiB"}
running = opened.start("cuda:0", framework="dlpack", options=options)
stream = opened.stream("cuda:0", framework="dlpack", options=options, window="8MiB")
first = next(stream)
child = os.fork()
if child == 0:
    def refused(kind, f):
        try:
            f()
        except penstock.ForkedError as error:
            assert "fork" in str(error), error
        else:
            os._exit(kind)
    refused(11, lambda: running.result())
    refused(12, lambda: next(stream))
    refused(13, lambda: opened.load("cuda:0", framework="dlpack"))
    refused(14, lambda: opened.start("cuda:0", framework="dlpack").result())
    if len(opened.load("cpu", framework="dlpack", options={"copy": True})) != 24:
        os._exit(15)
    del running, stream, first
    import gc
    gc.collect()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert len(running.result()) == 24
rest = dict(stream)
assert len(rest) == 23
del first, rest, running, stream
fake = fakegpu.FakeGpu()
import gc
gc.collect()
penstock._core.release_staging()
assert (fake.misuses, fake.leaks) == ([], []), (fake.misuses, fake.leaks)
print("well")
"""


LOOKED = """
import os, penstock
assert len(penstock._core.gpus()["gpus"]) == 1
child = os.fork()
if child == 0:
    found = penstock._core.gpus()
    os._exit(0 if found["gpus"] == [] and "fork" in found["reason"] else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
print("well")
"""


def environment(**more: str) -> dict[str, str]:
    here = Path(__file__).parent
    return {
        "PENSTOCK_GPU_LIBRARY": f"cuda:{fakegpu.LIBRARY}",
        "PYTHONPATH": f"{here}:{Path(penstock.__file__).parents[1]}",
        **more,
    }


@pytest.mark.machine
def test_a_copy_that_hangs_is_an_error_in_bounded_time(python: Any, file: Path) -> None:
    run = python(HANG, file, **environment())
    assert (run.returncode, run.stdout.strip()) == (0, "well"), run.stderr


@pytest.mark.parametrize("how", ["job", "stream", "thread", "tensors", "raise"])
@pytest.mark.machine
def test_a_process_ends_in_the_middle_of_a_load(python: Any, file: Path, tmp_path: Path, how: str) -> None:
    report = tmp_path / "report"
    started = time.monotonic()
    run = python(EXIT, file, how, **environment(FAKEGPU_REPORT=str(report), FAKEGPU_COPY_DELAY_US="5000"))
    assert time.monotonic() - started < 20
    assert run.returncode == (3 if how == "raise" else 0), run.stderr
    # Whoever waits for a load in a daemon thread is told that it was cancelled, and may be stopped before saying so.
    assert run.stderr == "" or (how == "thread" and run.stderr.startswith("Exception in thread")), run.stderr
    assert not [line for line in report.read_text().splitlines() if not line.startswith("leak:")]


def test_a_child_of_a_process_that_has_looked_for_gpus_is_told_so(python: Any) -> None:
    run = python(LOOKED, **environment())
    assert (run.returncode, run.stdout.strip()) == (0, "well"), run.stderr
    # The driver is not asked in the child: it would answer with odd codes, or hang.
    assert "used-after-fork" not in run.stderr


def test_a_forked_child_is_told_and_the_parent_goes_on(torch_python: Any, file: Path) -> None:
    run = torch_python(FORK, file, **environment(FAKEGPU_COPY_DELAY_US="3000"))
    assert (run.returncode, run.stdout.strip()) == (0, "well"), run.stderr
