"""Loads that end early, by Ctrl-C, kill, exceptions, dropped jobs and streams, or with the interpreter."""

from __future__ import annotations

import gc
import signal
import threading
import time
from pathlib import Path

import fakegpu
import ordeal
import penstock
import pytest
from ordeal import Unchanged, await_line, begin, finish, run, same, soon

#: What compares times or measures memory. The others run beside other tests.
observes = pytest.mark.machine

#: Reads of 4 KiB one after the other: about 50 us each, so that the sparse file below takes ten seconds and more.
SLOW = {"io": "threads", "extent": 4096, "depth": 1, "threads": 1}


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Path:
    """1 GB of zeros that take no disk. Not to be written to."""
    return ordeal.write(tmp_path_factory.mktemp("slow") / "slow.safetensors", 32, 32 << 20, sparse=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """24 MB. Not to be written to."""
    return ordeal.write(tmp_path_factory.mktemp("file") / "model.safetensors")


HEAD = """
import gc, os, signal, sys, threading, time
import ordeal, penstock, penstock._numpy
SLOW = dict(io="threads", extent=4096, depth=1, threads=1)
checkpoint = penstock.open(sys.argv[1])
"""

WAYS = {
    "load": "checkpoint.load(framework='np', options=SLOW)",
    "load, showing progress": "checkpoint.load(framework='np', options=SLOW, progress=lambda done, total: None)",
    "stream": "list(checkpoint.stream(framework='np', options=SLOW))",
    "wait": "checkpoint.start(framework='np', options=SLOW).wait()",
    "wait with a timeout": "checkpoint.start(framework='np', options=SLOW).wait(60)",
    "result": "checkpoint.start(framework='np', options=SLOW).result()",
    "load_into": "checkpoint.load_into(into, options=SLOW)",
    "safe_open": "penstock.safe_open(sys.argv[1], framework='np', options=SLOW).get_tensor('big')",
}


def is_under_way(child) -> None:
    """Waits until a load of the child reads, and a moment longer: then its main thread waits for it."""

    def reads() -> bool:
        tasks = Path(f"/proc/{child.pid}/task").iterdir()
        names = {(task / "comm").read_text().strip() for task in tasks}
        return any(name.startswith("penstock-") and name != "penstock-fill" for name in names)

    soon(reads, 20)
    time.sleep(0.1)


@observes
@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_ends_it_within_half_a_second_and_leaves_nothing(slow, tmp_path, way):
    if way == "safe_open":
        slow = ordeal.write(tmp_path / "one.safetensors", 1, 1 << 30, sparse=True)
    program = (
        HEAD
        + f"""
import numpy
into = {{n: numpy.empty(checkpoint[n].shape, "uint8") for n in checkpoint}} if {way!r} == "load_into" else None
small = penstock.open(sys.argv[2])
small.load(framework="np", options=dict(copy=True))  # what is set up once and stays
with ordeal.Unchanged(1200 << 20 if into else 80 << 20):
    print("ready", flush=True)
    try:
        {WAYS[way].replace("'big'", "'one.0'")}
        print("not interrupted")
    except KeyboardInterrupt:
        took = time.monotonic() - float(sys.stdin.readline())
        print("interrupted", took < 0.5, took, flush=True)
ordeal.same(small.load(framework="np", options=dict(copy=True)), sys.argv[2])
print("loads again")
"""
    )
    child = begin(program, slow, ordeal.write(tmp_path / "small.safetensors", 3, 100_000))
    await_line(child, "ready")
    is_under_way(child)
    child.stdin.write(f"{time.monotonic()}\n")
    child.stdin.flush()
    child.send_signal(signal.SIGINT)
    code, out, err = finish(child)
    assert code == 0, out + err
    assert out.startswith("interrupted True"), out
    assert out.endswith("loads again\n")


@observes
@pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)
def test_ctrl_c_ends_a_save_that_waits_for_staging(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    program = """
import os, sys, threading, time
import fakegpu, numpy, ordeal, penstock
from penstock._save import Described
SMALL = dict(staging="2MiB", extent="1MiB", stall_timeout=100)
nbytes = 8 << 20
fake = fakegpu.FakeGpu()
memory = fakegpu.mmap.mmap(-1, nbytes)
address = numpy.frombuffer(memory, "u1").__array_interface__["data"][0]
fake.control("adopt", address, nbytes, 0)
fake.configure(copy_delay_us=100_000_000)
# Its copies out of the GPU do not end, so that it keeps its slabs.
held = Described("U8", (nbytes,), 0, address, memory)
holder = lambda: penstock.save_file({"held": held}, sys.argv[1] + "/held", options=SMALL)
import penstock._save
penstock._save._synchronize = lambda tensors: None  # that is torch's
threading.Thread(target=holder, daemon=True).start()
while fake.counter("copies") < 2:
    time.sleep(0.001)
print("ready", flush=True)
try:
    penstock.save_file({"w": numpy.ones(1 << 20)}, sys.argv[1] + "/w", options=SMALL)
    print("not interrupted")
except KeyboardInterrupt:
    took = time.monotonic() - float(sys.stdin.readline())
    print("interrupted", took < 2, took, os.listdir(sys.argv[1]), flush=True)
os._exit(0)
"""
    child = begin(program, tmp_path)
    await_line(child, "ready")
    time.sleep(0.5)
    child.stdin.write(f"{time.monotonic()}\n")
    child.stdin.flush()
    child.send_signal(signal.SIGINT)
    code, out, err = finish(child)
    assert code == 0, out + err
    assert out.startswith("interrupted True"), out
    assert out.endswith("[]\n"), out


@observes
def test_a_signal_handler_of_the_program_runs_while_it_waits(slow):
    program = (
        HEAD
        + """
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(time.monotonic()))
job = checkpoint.start(framework="np", options=SLOW)
sent = time.monotonic() + 0.3
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
assert not job.wait(1.5)
print(len(seen), seen[0] - sent < 0.5)
job.cancel()
"""
    )
    assert run(program, slow) == "1 True\n"


def test_signals_by_the_hundred_do_not_disturb_reads(file):
    program = (
        HEAD
        + """
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
for options in (dict(copy=True), *(dict(io=io) for io in "direct threads buffered uring_buffered".split()), {}):
    for _ in range(3):
        ordeal.evict(sys.argv[1])
        ordeal.same(checkpoint.load(framework="np", options={**options, "extent": 65536}), sys.argv[1])
signal.setitimer(signal.ITIMER_REAL, 0)
print("right")
"""
    )
    assert run(program, file) == "right\n"


@observes  # others write to these folders
@pytest.mark.parametrize("moment", [0.0, 0.05, 0.3])
def test_kill_9_leaves_no_file(slow, tmp_path, moment):
    before = {*Path("/dev/shm").iterdir(), *Path("/tmp").iterdir()}
    child = begin(
        HEAD + "print('go', flush=True); checkpoint.load(framework='np', options=dict(SLOW, staging=1<<20))",
        slow,
        cwd=tmp_path,
        environment={"TMPDIR": str(tmp_path)},
    )
    await_line(child, "go")
    time.sleep(moment)
    child.kill()
    assert child.wait(10) == -signal.SIGKILL
    child.communicate()
    made = {*Path("/dev/shm").iterdir(), *Path("/tmp").iterdir()} - before
    assert not [name for name in made if "penstock" in name.name]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [SLOW, {"copy": True}, {"io": "direct"}, {"io": "mapped"}, {"io": "buffered"}])
def test_an_exception_in_the_consumer_of_a_stream(file, options):
    checkpoint = penstock.open(file)

    def consume():
        for i, _ in enumerate(checkpoint.stream(framework="np", options={**options, "window": 2_000_000})):
            if i == 2:
                raise LookupError("mine")

    with Unchanged(), pytest.raises(LookupError, match="mine"):
        consume()
    same(checkpoint.load(framework="np"), file)


@observes
def test_a_stream_that_is_dropped_closed_or_never_begun(slow):
    checkpoint = penstock.open(slow)
    with Unchanged():
        for _ in range(5):
            stream = checkpoint.stream(framework="np", options={**SLOW, "extent": 65536})
            next(stream)
            del stream
            stream = checkpoint.stream(framework="np", options={**SLOW, "extent": 65536})
            next(stream)
            began = time.monotonic()
            stream.close()
            assert time.monotonic() - began < 0.5
            with pytest.raises(StopIteration):
                next(stream)
            checkpoint.stream(framework="np", options=SLOW)


@observes
def test_a_job_that_is_dropped_ends(slow):
    checkpoint = penstock.open(slow)
    with Unchanged():
        for _ in range(5):
            before = ordeal.tasks()
            job = checkpoint.start(framework="np", options=SLOW)
            began = time.monotonic()
            del job
            gc.collect()
            assert time.monotonic() - began < 1.0
            soon(lambda before=before: not ordeal.threads() and ordeal.tasks() <= before)


def test_an_exception_in_a_progress_callback(slow):
    checkpoint = penstock.open(slow)

    def progress(done, total):
        raise LookupError("mine")

    with Unchanged(), pytest.raises(LookupError, match="mine"):
        checkpoint.load(framework="np", options=SLOW, progress=progress)


ENDS = {
    "a running job": "job = checkpoint.start(framework='np', options=SLOW); time.sleep(0.1)",
    "a stream in the middle": "s = checkpoint.stream(framework='np', options=SLOW, order='file'); first = next(s)",
    "a stream kept in a cycle": (
        "class C: pass\nc = C(); c.me = c; c.s = checkpoint.stream(framework='np', options=SLOW); next(c.s)"
    ),
    "tensors": "tensors = checkpoint.load(framework='np', options=dict(io='mapped'))",
    "a failed load": "os.truncate(sys.argv[1], 5000)\ntry: checkpoint.load(framework='np')\nexcept Exception: pass",
    "a daemon thread that loads": (
        "t = threading.Thread(target=lambda: checkpoint.load(framework='np', options=SLOW), daemon=True); t.start()\n"
        "time.sleep(0.3)"
    ),
    "an uncaught exception": "job = checkpoint.start(framework='np', options=SLOW); raise SystemExit(0)",
    "an exit from a signal handler": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); os.kill(os.getpid(), signal.SIGTERM)\n"
        "checkpoint.load(framework='np', options=SLOW)"
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_the_interpreter_ends_with(tmp_path, what):
    path = ordeal.write(tmp_path / "model.safetensors", 16, 16 << 20, sparse=True)
    began = time.monotonic()
    code, out, err = finish(begin(HEAD + ENDS[what], path), 30)
    assert (code, out, err) == (0, "", "")
    assert time.monotonic() - began < 15 * ordeal.load_factor()


@observes  # its thread has half a second to begin
def test_a_thread_that_is_joined_at_exit_is_not_held_for_ever(slow):
    """By a handler that runs after ours, because it was registered before."""
    program = """
import atexit, sys, threading, time
threads = []
atexit.register(lambda: [thread.join() for thread in threads])
import penstock
checkpoint = penstock.open(sys.argv[1])
slow = dict(io="threads", extent=4096, depth=1, threads=1)
def load():
    try:
        checkpoint.load(framework="np", options=slow)
    except penstock.CancelledError:
        print("cancelled")
threads.append(threading.Thread(target=load, daemon=True))
threads[0].start()
time.sleep(0.5)
"""
    assert run(program, slow, timeout=15) == "cancelled\n"


@observes
def test_whoever_closes_a_job_finds_it_ended(slow):
    """However many close it at once: engine and read threads are gone for each of them."""
    checkpoint = penstock.open(slow)
    for _ in range(5):
        job = checkpoint.start(framework="np", options={**SLOW, "extent": 64 << 20, "staging": 256 << 20})
        time.sleep(0.05)
        found: list[list[str]] = []
        closers = [
            threading.Thread(target=lambda job=job, found=found: (job.close(), found.append(ordeal.threads(0.02))))
            for _ in range(3)
        ]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        assert found == [[], [], []]


def test_tensors_outlive_everything_that_made_them(file):
    program = (
        HEAD
        + """
tensors = checkpoint.load(framework="np", options=dict(copy=True))
one = dict(penstock.open(sys.argv[1]).stream(framework="np"))["model.5"]
want = ordeal.contents(sys.argv[1])
del checkpoint
gc.collect()
for name in list(tensors):
    assert bytes(memoryview(tensors.pop(name))) == want[name]
assert bytes(memoryview(one)) == want["model.5"]
one[:] = 7  # and they may be written to
print("right")
"""
    )
    assert run(program, file) == "right\n"


@observes
def test_a_hundred_loads_in_a_row_leave_nothing(file):
    checkpoint = penstock.open(file)
    kinds = [{}, {"copy": True}, {"io": "direct"}, {"io": "buffered"}, {"io": "uring_buffered"}, {"io": "threads"}]
    for options in kinds:
        checkpoint.load(framework="np", options=options)
    gc.collect()
    maps, resident = len(ordeal.maps()), ordeal.resident()
    with Unchanged(16 << 20):
        for i in range(100):
            checkpoint.load(framework="np", options=kinds[i % len(kinds)])
            if i % 10 == 0:
                stream = checkpoint.stream(framework="np", options=kinds[i // 10 % len(kinds)])
                next(stream)
                stream.close()
    assert len(ordeal.maps()) <= maps + 10
    assert ordeal.resident() <= resident + (16 << 20)
