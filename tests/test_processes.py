"""Loads in several threads and processes: fork, spawn, staging shared by loads that wait for each other."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
import warnings
from pathlib import Path

import ordeal
import penstock
import pytest
from ordeal import Unchanged, contents, run, same

SLOW = {"io": "threads", "extent": 4096, "depth": 1, "threads": 1}
MIB = 1 << 20


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """24 MB. Not to be written to."""
    return ordeal.write(tmp_path_factory.mktemp("file") / "model.safetensors")


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Path:
    """4 GB of zeros that take no disk. Not to be written to."""
    return ordeal.write(tmp_path_factory.mktemp("slow") / "slow.safetensors", 128, 32 << 20, sparse=True)


HEAD = """
import gc, os, signal, sys, threading, time
from pathlib import Path
import ordeal, penstock, penstock._numpy
from ordeal import same
SLOW = dict(io="threads", extent=4096, depth=1, threads=1)
path, slow = sys.argv[1:3]
checkpoint = penstock.open(path)

def forked(child):
    "Runs child() after a fork; says how it ended."
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child()
            code = 0
        except BaseException as e:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    where = [[(t / what).read_text().strip() for what in ("comm", "syscall", "wchan")] for t in tasks]
    os.kill(pid, signal.SIGABRT)  # faulthandler writes the stacks
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"hung {where}"
"""


def test_a_child_loads_after_its_parent_has(file, slow):
    program = (
        HEAD
        + """
for options in ({}, dict(copy=True), *(dict(io=io) for io in "direct threads buffered uring_buffered".split())):
    kept = checkpoint.load(framework="np", options=options)
    def child():
        same(kept, path)  # what the parent loaded is there
        for o in ({}, options, dict(copy=True), dict(io="direct")):
            same(checkpoint.load(framework="np", options=o), path)
            same(dict(penstock.open(path).stream(framework="np", options=o)), path)
    assert forked(child) == 0, options
    same(kept, path)
    same(checkpoint.load(framework="np", options=options), path)
print("right")
"""
    )
    assert run(program, file, slow) == "right\n"


def test_a_child_of_a_load_in_progress_gets_an_error_or_a_fresh_load_and_the_parent_goes_on(file, slow):
    program = (
        HEAD
        + """
job = penstock.open(slow).start(framework="np", options=SLOW)
stream = checkpoint.stream(framework="np", options=dict(copy=True, window=2_000_000, extent=65536))
taken = dict([next(stream)])
def child():
    for use in (job.wait, job.result, job.done, job.cancel, job.close, lambda: job.progress, lambda: next(stream)):
        try:
            use()
        except penstock.ForkedError as e:
            assert "fork" in str(e)
        else:
            raise AssertionError("no error")
    same(checkpoint.load(framework="np"), path)
    same(checkpoint.load(framework="np", options=dict(io="direct")), path)
    same(checkpoint.load(framework="np", options=dict(copy=True)), path)
for _ in range(3):
    assert not job.done() and forked(child) == 0
taken.update(stream)
same(taken, path)
job.cancel()
print("right")
"""
    )
    assert run(program, file, slow) == "right\n"


def test_a_child_may_drop_what_its_parent_was_doing(file, slow):
    program = (
        HEAD
        + """
job = penstock.open(slow).start(framework="np", options=SLOW)
stream = checkpoint.stream(framework="np", options=dict(copy=True, window=2_000_000, extent=65536))
taken = dict([next(stream)])
def child():
    global job, stream, taken
    del job, stream, taken
    gc.collect()
    same(checkpoint.load(framework="np", options=dict(copy=True)), path)
assert forked(child) == 0
taken.update(stream)
same(taken, path)
job.cancel()
print("right")
"""
    )
    assert run(program, file, slow) == "right\n"


def test_a_child_may_exit_as_python_does(file, slow):
    """With the interpreter's own end, which drops everything: not by os._exit."""
    program = (
        HEAD
        + """
job = penstock.open(slow).start(framework="np", options=SLOW)
pid = os.fork()
if pid == 0:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert not job.done()
job.cancel()
"""
    )
    assert run(program, file, slow) == "7\n"


def test_forks_from_one_thread_while_others_load(file, slow):
    program = (
        HEAD
        + """
stop, wrong = threading.Event(), []
def loads(options):
    while not stop.is_set():
        try:
            same(checkpoint.load(framework="np", options=options), path)
        except BaseException as e:
            wrong.append(e)
            return
threads = [threading.Thread(target=loads, args=(o,)) for o in (dict(copy=True), dict(io="direct"), {})]
for t in threads: t.start()
for i in range(25):
    how = forked(lambda: checkpoint.load(framework="np", options=[dict(copy=True), dict(io="direct"), {}][i % 3]))
    assert how == 0, (i, how)
stop.set()
for t in threads: t.join()
assert not wrong, wrong
print("right")
"""
    )
    assert run(program, file, slow, timeout=60) == "right\n"


@pytest.mark.parametrize("io", ["direct", "uring", "threads"])
def test_forks_during_direct_reads_lose_no_byte_in_the_parent_or_in_a_child(file, slow, io):
    """While reads go on, children and parent compare and write what was handed out before the fork."""
    program = (
        HEAD
        + f"""
import numpy as np
path, io = Path(path), {io!r}
want = {{name: np.frombuffer(data, "uint8") for name, data in ordeal.contents(path).items()}}
def right(taken, flipped):
    for name, tensor in taken.items():
        assert np.array_equal(tensor.reshape(-1).view("uint8"), want[name] ^ (255 if name in flipped else 0)), name
def flip(tensor):
    tensor.reshape(-1).view("uint8")[...] ^= 255
def child(taken, flipped):
    try:
        right(taken, flipped)
        for name, tensor in taken.items():
            flip(tensor)
        right(taken, set(taken) - flipped)
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
    os._exit(1)
for turn in range(4):
    taken, flipped, children = {{}}, set(), []
    options = dict(io=io, cache="bypass", window=4_000_000, extent=65536, depth=[1, 8][turn % 2])
    for name, tensor in checkpoint.stream(framework="np", options=options):
        taken[name] = tensor
        if len(taken) % 4 == 1:
            children.append(os.fork())
            children[-1] or child(taken, flipped)
            flip(tensor)
            flipped.add(name)
    right(taken, flipped)
    # While a load is under way that hands nothing out before its end.
    with checkpoint.start(framework="np", options=dict(io=io, cache="bypass", extent=65536)) as job:
        for _ in range(4):
            children.append(os.fork())
            children[-1] or child(taken, flipped)
        right(job.result(), set())
    right(taken, flipped)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children if pid] == [0] * len(children)
print("right")
"""
    )
    assert run(program, file, slow, timeout=100) == "right\n"


# A module that takes half a second to import, by a thread that has begun to; `use` needs it too. Python's lock of a
# module belongs to a thread that a child does not have.
IMPORTING = """
import penstock._numpy
def use():
    if way == "load":
        checkpoint.load(framework="np")
    else:
        with penstock.safe_open(path, "np") as handle:
            name = handle.keys()[0]
            handle.get_slice(name)[:1] if way == "slice" else handle.get_tensor(name)
    penstock._numpy.numpy_dtype("BF16")
real, begun = penstock._numpy.importlib.import_module, threading.Event()
def imported(name):
    begun.set()
    return real(name)
penstock._numpy.importlib.import_module = imported
thread = threading.Thread(target=checkpoint.load, kwargs=dict(framework="np"))
thread.start()
begun.wait()
"""
SLOW_MODULE = "import logging, time; time.sleep(0.5); logging.getLogger('x')\nbfloat16 = float8_e4m3fn = 'uint8'\n"


@pytest.mark.parametrize("way", ["load", "safe_open", "slice"])
@pytest.mark.machine
def test_a_fork_waits_for_an_import_that_a_load_has_begun(file, slow, tmp_path, way):
    (tmp_path / "ml_dtypes.py").write_text(SLOW_MODULE)
    begin = HEAD.replace("penstock._numpy", "numpy") + f"way = {way!r}; sys.path.insert(0, {str(tmp_path)!r})\n"
    end = "began = time.monotonic()\nassert forked(use) == 0\nthread.join()\nprint(time.monotonic() - began)\n"
    assert float(run(begin + IMPORTING + end, file, slow)) < 8  # and not because the fork gave up waiting


# The same of penstock's own modules that are imported by the first call that needs them.
OWN = """
class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == module:
            begun.set()
            time.sleep(0.5)
def absent():
    try:
        penstock.open("no/such")
    except penstock.NotFoundError:
        pass
module, begun = sys.argv[3], threading.Event()
into = lambda: checkpoint.load_into({}, strict=False)
use = {"penstock._into": into, "penstock._digest": checkpoint.verify, "penstock._hub": absent}[module]
assert module not in sys.modules
sys.meta_path.insert(0, Slow)
thread = threading.Thread(target=use)
thread.start()
begun.wait()
began = time.monotonic()
assert forked(use) == 0
thread.join()
print(time.monotonic() - began)
"""


@pytest.mark.parametrize("module", ["penstock._into", "penstock._digest", "penstock._hub"])
@pytest.mark.machine
def test_a_fork_waits_for_an_import_of_a_module_of_our_own(file, slow, module):
    assert float(run(HEAD + OWN, file, slow, module)) < 8


def test_a_fork_that_cannot_wait_any_longer_leaves_the_child_able_to_load(file, slow, tmp_path):
    (tmp_path / "ml_dtypes.py").write_text(SLOW_MODULE)
    begin = HEAD.replace("penstock._numpy", "numpy") + f"way = 'load'; sys.path.insert(0, {str(tmp_path)!r})\n"
    early = "import penstock._late_imports\npenstock._late_imports.PATIENCE = 0.01\n"
    end = "assert forked(lambda: checkpoint.load(framework='dlpack')) == 0\n"
    end += "assert forked(lambda: penstock._late_imports.importing().__enter__()) == 0\nthread.join()\nprint('right')\n"
    assert run(begin + early + IMPORTING + end, file, slow) == "right\n"


# What a load imports may be the first that needs `logging`, whose hook then takes its lock before the fork waits. The
# import needs that lock afterwards, or is that of `logging` itself: the first dictionary that it makes is made after it
# has registered its hook, and before it takes its lock.
LOGGING = """
import os, signal, sys, threading, time, weakref
from penstock import _late_imports
_late_imports.PATIENCE = 1000.0
signal.alarm(60)
way, begun = sys.argv[1], threading.Event()
assert "logging" not in sys.modules
def hold(real):
    begun.set()
    time.sleep(0.5)
    return real
if way == "middle":
    made = weakref.WeakValueDictionary
    weakref.WeakValueDictionary = lambda: hold(made)()
def load():
    with _late_imports.importing():
        import logging
        if way == "after":
            hold(logging.getLogger)("x")
thread = threading.Thread(target=load)
thread.start()
assert begun.wait(60)
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    import logging
    logging.getLogger("y")
    os._exit(7)
thread.join()
logging = sys.modules["logging"]
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), logging._lock._is_owned())
"""


@pytest.mark.parametrize("way", ["after", "middle"])
def test_a_fork_waits_for_an_import_that_is_the_first_to_need_logging(python, way):
    done = python(LOGGING, way)
    assert done.stdout == "7 False\n", (done.returncode, done.stderr)


def work(path: str) -> int:
    """In a process of a pool."""
    checkpoint = penstock.open(path)
    for options in ({}, {"copy": True}, {"io": "direct"}):
        same(checkpoint.load(framework="np", options=options), path)
    return os.getpid()


def fail(path: str) -> None:
    penstock.open(path + ".gone")


def test_a_child_uses_a_handle_that_another_thread_was_using_at_the_fork(file, slow):
    program = (
        HEAD
        + """
handle = penstock.safe_open(path, framework="np")
name = handle.keys()[0]
load, held, go_on = handle._load, threading.Event(), threading.Event()
def loading(names, slices=None):
    held.set()
    go_on.wait()
    return load(names, slices)
handle._load = loading
thread = threading.Thread(target=handle.get_tensor, args=(name,))
thread.start()
held.wait()
def child():
    handle._load = load
    handle.get_tensor(name)
assert forked(child) == 0
go_on.set()
thread.join()
print("right")
"""
    )
    assert run(program, file, slow) == "right\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pool_of_processes(file, method):
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    work(str(file))
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        pids = pool.map_async(work, [str(file)] * 4).get(90)
        assert os.getpid() not in pids
        with pytest.raises(penstock.NotFoundError) as e:  # errors come back whole
            pool.apply_async(fail, (str(file),)).get(30)
        assert e.value.path == str(file) + ".gone"
        pool.close()
        pool.join()


def test_an_error_survives_pickling(file):
    with pytest.raises(penstock.NotFoundError) as e:
        fail(str(file))
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)


@pytest.mark.machine
def test_loads_from_several_threads_at_once(file):
    checkpoint, wrong, want = penstock.open(file), [], contents(file)
    kinds = [{}, {"copy": True}, *({"io": io} for io in ("direct", "buffered", "uring_buffered", "threads"))]

    def loads(i):
        try:
            for n in range(4):
                options = {**kinds[(i + n) % len(kinds)], "staging": 2 * MIB, "extent": MIB}
                same(checkpoint.load(framework="np", options=options), want)
                same(dict(checkpoint.stream(framework="np", options={**options, "window": MIB})), want)
        except BaseException as e:
            wrong.append(e)

    with Unchanged():
        threads = [threading.Thread(target=loads, args=(i,)) for i in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(90)
        assert not any(t.is_alive() for t in threads), "a deadlock"
    assert not wrong, wrong


@pytest.mark.parametrize("options", [{"copy": True}, {"io": "buffered"}, {"io": "direct"}])
@pytest.mark.machine
def test_a_stalled_stream_does_not_block_other_loads(file, options):
    """Its consumer may sleep for ever: the others share the staging memory with it."""
    checkpoint, want = penstock.open(file), contents(file)
    options = {**options, "staging": 2 * MIB, "extent": MIB}
    with Unchanged():
        stalled = [checkpoint.stream(framework="np", options={**options, "window": 2 * MIB}) for _ in range(6)]
        firsts = [next(s) for s in stalled]
        done = []

        def other():
            same(checkpoint.load(framework="np", options=options), want)
            same(dict(checkpoint.stream(framework="np", options=options)), want)
            done.append(True)

        threads = [threading.Thread(target=other) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        assert len(done) == 3, "blocked by streams that nobody takes from"
        # A load inside the consumer of a stream, too
        same(checkpoint.load(framework="np", options=options), want)
        for (name, tensor), s in zip(firsts, stalled, strict=True):
            same({name: tensor, **dict(s)}, want)
        del firsts, stalled, tensor, s


def test_one_stream_is_taken_from_by_several_threads_in_turn(file):
    stream = penstock.open(file).stream(framework="np", options={"window": 2 * MIB})
    taken, lock = {}, threading.Lock()

    def take():
        while True:
            with lock:
                try:
                    name, tensor = next(stream)
                except StopIteration:
                    return
                assert name not in taken
                taken[name] = tensor

    threads = [threading.Thread(target=take) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    same(taken, file)


def test_one_job_is_waited_for_and_cancelled_by_several_threads(slow):
    job = penstock.open(slow).start(framework="np", options=SLOW)
    ended = []

    def wait():
        try:
            job.wait()
        except penstock.CancelledError as e:
            ended.append(e)

    threads = [threading.Thread(target=wait) for _ in range(6)]
    for t in threads:
        t.start()
    time.sleep(0.2)
    cancels = [threading.Thread(target=job.cancel) for _ in range(3)]
    for t in cancels:
        t.start()
    for t in threads + cancels:
        t.join(10)
    assert len(ended) == 6
    assert not ordeal.threads()


@pytest.mark.machine
def test_other_python_threads_run_while_a_load_waits(slow):
    """The GIL is let go of."""
    count, job = 0, penstock.open(slow).start(framework="np", options=SLOW)
    waiter = threading.Thread(target=job.wait, args=(1.0,))
    waiter.start()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        count += 1
    assert waiter.is_alive()
    assert count > 10_000
    waiter.join()
    job.cancel()
