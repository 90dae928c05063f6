"""A signal handler, a `__del__` or a callback of the garbage collection uses what its own thread is using.

Python runs all three in the middle of whatever a thread does. Each test runs in a process of its own, because a lock
that is taken twice hangs for good.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ordeal
import penstock
import pytest
from conftest import Oracle, raw
from penstock.synthetic.synth import Tensor

HEAD = """
import contextlib, gc, os, signal, sys, threading, time
import penstock
from penstock import _load

path = sys.argv[1]
expected = penstock.load_file(path, framework="np")
names = sorted(expected)
checkpoint = penstock.open(path)
handle = penstock.safe_open(path, "np")
seen = []

def same(name, tensor):
    assert tensor.shape == expected[name].shape and tensor.tobytes() == expected[name].tobytes(), name

def read(*wanted):
    for name in wanted:
        same(name, handle.get_tensor(name))
        same(name, handle.get_slice(name)[:])
        seen.append(name)

class Dropped:
    def __del__(self):
        self.use()

def by_signal(use):
    signal.signal(signal.SIGUSR1, lambda *_: use())
    return lambda: signal.raise_signal(signal.SIGUSR1)

def by_del(use):
    def drop():
        dropped = Dropped()
        dropped.use = use
    return drop

def by_collection(use):
    def collect():
        def told(phase, info):
            if phase == "start":
                gc.callbacks.remove(told)
                use()
        gc.callbacks.append(told)
        gc.collect()
    return collect

def once_in(owner, name, re_enter):
    "Has `re_enter` called in the middle of the first call of this function."
    real, left = getattr(owner, name), [re_enter]
    def function(*args, **kwargs):
        if left:
            left.pop()()
        return real(*args, **kwargs)
    setattr(owner, name, function)

re_entering = {"signal": by_signal, "del": by_del, "gc": by_collection}[sys.argv[2]]
"""

WAYS = ["signal", "del", "gc"]


@pytest.fixture
def many(write) -> Path:
    return write(*(Tensor(f"t{i:02}", "F32", (16, 8)) for i in range(40)))


def run(program: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60 * ordeal.load_factor(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("way", WAYS)
def test_a_handle_may_be_read_while_its_own_thread_reads_from_it(many, way):
    program = """
read(*names[:4])  # those after them are mapped together
once_in(_load, "load", re_entering(lambda: read(names[6], names[20], names[21])))
read(*names[4:])
read(*names)
assert seen[4:7] == [names[6], names[20], names[21]], seen
print("right")
"""
    assert run(program, many, way) == "right\n"


@pytest.mark.parametrize("way", WAYS)
def test_the_tensor_that_is_being_read_may_be_read_as_well(many, way):
    program = """
read(*names[:4])
once_in(_load, "load", re_entering(lambda: read(names[4])))
read(*names[4:])
print(seen.count(names[4]))
"""
    assert run(program, many, way) == "2\n"


def test_signals_at_any_moment_leave_a_handle_right(many):
    """Hundreds of signals, wherever they fall."""
    program = """
at = [0]
def use():
    at[0] += 7
    read(names[at[0] % len(names)])
deep = []
def handler(*_):
    if len(deep) < 3:
        deep.append(None)
        use()
        deep.pop()
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0011, 0.0011)
for _ in range(30):
    handle = penstock.safe_open(path, "np")
    read(*names)
signal.setitimer(signal.ITIMER_REAL, 0)
assert at[0]
print("right")
"""
    assert run(program, many, "signal") == "right\n"


def test_threads_that_read_one_handle_map_nothing_ahead_at_the_same_time(many, monkeypatch):
    """What one thread maps ahead no other one maps ahead meanwhile, unless somebody has asked for it by then."""
    oracle, lock = Oracle(many), threading.Lock()
    coming: Counter[str] = Counter()
    asked: set[str] = set()
    ahead: list[str] = []
    twice: list[str] = []
    with penstock.safe_open(many, "np") as file, ThreadPoolExecutor(4) as pool:
        load = file._load

        def counted(names: list[str], slices: Any = None) -> Any:
            with lock:
                coming.update(names[1:])
                ahead.extend(names[1:])
                twice.extend(name for name in names[1:] if coming[name] > 1 and name not in asked)
            time.sleep(0.02)  # the other threads come by meanwhile
            try:
                return load(names, slices)
            finally:
                with lock:
                    coming.subtract(names[1:])

        def read(name: str) -> bytes:
            asked.add(name)
            return raw(file.get_tensor(name))

        monkeypatch.setattr(file, "_load", counted)
        # From both ends, each with neighbours past the middle
        monkeypatch.setattr("penstock._safe_open._AHEAD_TENSORS", 24)
        names = file.keys()
        wanted = [name for pair in zip(names[:20], reversed(names[20:]), strict=True) for name in pair]
        assert list(pool.map(read, wanted)) == [oracle[name] for name in wanted]
        assert len(ahead) >= 30
        assert not twice


def test_a_tensor_that_another_thread_is_loading_is_not_waited_for(many, monkeypatch):
    """Nor is it kept after both have it."""
    oracle, loading, go_on = Oracle(many), threading.Event(), threading.Event()
    with penstock.safe_open(many, "np") as file, ThreadPoolExecutor(1) as pool:
        wanted = file.keys()
        for name in wanted[:4]:
            file.get_tensor(name)
        load = file._load

        def held_up(names: list[str], slices: Any = None) -> Any:
            if len(names) > 1:
                loading.set()
                assert go_on.wait(60)
            return load(names, slices)

        monkeypatch.setattr(file, "_load", held_up)
        first = pool.submit(file.get_tensor, wanted[4])
        assert loading.wait(60)
        assert raw(file.get_tensor(wanted[9])) == oracle[wanted[9]]
        go_on.set()
        assert raw(first.result()) == oracle[wanted[4]]
        assert sorted(file._ahead) == sorted({*wanted[5:]} - {wanted[9]})
        assert not file._coming


def test_a_tensor_that_a_thread_has_or_wants_is_not_mapped_ahead_by_another(many, monkeypatch):
    """Neither one handed out before, nor one that a thread is about to load when another claims its neighbours."""
    oracle, claiming, claimed = Oracle(many), threading.Event(), threading.Event()
    loads: list[list[str]] = []
    with penstock.safe_open(many, "np") as file, ThreadPoolExecutor(1) as pool:
        wanted = file.keys()
        for name in wanted[:4]:
            file.get_tensor(name)
        load, wait_for = file._load, file._wait_for

        def counted(names: list[str], slices: Any = None) -> Any:
            loads.append(list(names))
            return load(names, slices)

        def late(name: str) -> None:
            wait_for(name)  # nobody maps it yet
            if name == wanted[9]:
                claiming.set()
                assert claimed.wait(60)

        monkeypatch.setattr(file, "_load", counted)
        monkeypatch.setattr(file, "_wait_for", late)
        other = pool.submit(file.get_tensor, wanted[9])
        assert claiming.wait(60)
        assert raw(file.get_tensor(wanted[4])) == oracle[wanted[4]]
        claimed.set()
        assert raw(other.result()) == oracle[wanted[9]]
        assert sorted(loads) == [wanted[4:9], wanted[9:]]
        # Who asks a second time has them mapped ahead a second time
        file._ahead.clear()
        file.get_tensor(wanted[4])
        assert sorted(loads[-1]) == sorted(wanted)


def test_threads_that_share_a_handle_map_no_tensor_twice(many, monkeypatch):
    monkeypatch.setattr("penstock._safe_open._PATIENCE", 60.0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(100):
            seen: list[str] = []
            with penstock.safe_open(many, "np") as file, ThreadPoolExecutor(4) as pool:
                load = file._load

                def counted(names: list[str], slices: Any = None, load: Any = load, seen: list[str] = seen) -> Any:
                    seen.extend(names)
                    return load(names, slices)

                monkeypatch.setattr(file, "_load", counted)
                list(pool.map(file.get_tensor, file.keys()))
                assert sorted(seen) == file.keys()
    finally:
        sys.setswitchinterval(before)


def test_a_load_that_fails_leaves_its_neighbours_to_others(many, monkeypatch):
    oracle = Oracle(many)
    with penstock.safe_open(many, "np") as file:
        wanted = file.keys()
        for name in wanted[:4]:
            file.get_tensor(name)
        monkeypatch.setattr(file, "_load", lambda names: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            file.get_tensor(wanted[4])
        monkeypatch.undo()
        assert not file._coming
        assert raw(file.get_tensor(wanted[4])) == oracle[wanted[4]]
        assert len(file._ahead) == len(wanted) - 1


def test_nothing_is_mapped_ahead_across_what_another_thread_maps(many):
    """Or its bytes would be mapped twice."""
    with penstock.safe_open(many, "np") as file:
        wanted = file.offset_keys()
        for name in wanted[:4]:
            file.get_tensor(name)
        file._given.update(wanted[4:12] + wanted[13:])  # so that the other thread has no neighbour
        load, started, may_end = file._load, threading.Event(), threading.Event()

        def held(names: list[str]) -> Any:
            if threading.current_thread() is other:
                started.set()
                assert may_end.wait(20)
            return load(names)

        file._load = held  # type: ignore[method-assign]
        other = threading.Thread(target=file.get_tensor, args=(wanted[12],))
        other.start()
        assert started.wait(20)
        file._given.difference_update(wanted[4:12] + wanted[13:])
        for name in (wanted[6], wanted[20]):
            assert raw(file.get_tensor(name)) == Oracle(many)[name]
            assert file._checkpoint.last_report.gap_bytes == 0
        assert set(file._ahead) == set(wanted[4:]) - {wanted[6], wanted[12], wanted[20]}
        may_end.set()
        other.join()


def test_a_handle_that_is_closed_during_a_load_keeps_nothing(many, monkeypatch):
    file = penstock.safe_open(many, "np")
    wanted = file.keys()
    for name in wanted[:4]:
        file.get_tensor(name)
    load = file._load

    def closed(names: list[str], slices: Any = None) -> Any:
        found = load(names, slices)
        file.__exit__(None, None, None)
        return found

    monkeypatch.setattr(file, "_load", closed)
    file.get_tensor(wanted[4])
    assert not file._ahead
    assert not file._coming


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_that_is_forked_during_a_load_reads_ahead_as_ever(many):
    program = """
for name in names[:4]:
    handle.get_tensor(name)
def fork():
    pid = os.fork()
    if pid == 0:
        for name in names:
            same(name, handle.get_tensor(name))
        print([len(names) for names in loads], sorted(handle._ahead), flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
loads, load = [], handle._load
def counted(names):
    loads.append(names)
    return load(names)
handle._load = counted
once_in(_load, "load", fork)
handle.get_tensor(names[4])
print("right")
"""
    # The child begins anew: it asks a second time for the four that its parent has had
    assert run(program, many, "signal") == "[36, 40] []\nright\n"


@pytest.mark.parametrize("way", WAYS)
def test_a_result_that_is_being_handed_out_is_refused_to_its_own_thread_alone(many, way):
    program = """
job = checkpoint.start(framework="np")
def use():
    try:
        job.result()
    except penstock.InvalidError as error:
        seen.append(str(error))
once_in(job._adapter, "tensors", re_entering(use))
for name, tensor in job.result().items():
    same(name, tensor)
assert len(seen) == 1 and "this very thread" in seen[0], seen
assert job.result() is job.result()
print("right")
"""
    assert run(program, many, way) == "right\n"


@pytest.mark.parametrize("way", WAYS)
def test_a_job_may_be_asked_for_its_result_while_its_own_thread_waits_for_it(many, way):
    program = """
job = checkpoint.start(framework="np")
class Waiting:
    def __init__(self, load): self.load = load
    def wait(self, timeout=None): return self.load.wait(timeout)
    def __getattr__(self, name): return getattr(self.load, name)
job._load = Waiting(job._load)
once_in(job._load, "wait", re_entering(lambda: seen.append(job.result())))
assert job.result() is seen[0]
for name in names: same(name, seen[0][name])
print("right")
"""
    assert run(program, many, way) == "right\n"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", ["next", "tensors"])
def test_a_prefetch_loader_in_use_is_refused_to_its_own_thread_alone(many, way, moment):
    """Else the outer call would wait for a tensor that the inner one took, or the other way round."""
    program = """
loader = handle.prefetch()
class Standing:
    def __init__(self, load): self.load = load
    def next(self, timeout=None): return self.load.next(timeout)
    def __getattr__(self, name): return getattr(self.load, name)
loader._load = Standing(loader._load)
def use():
    for call in (lambda: loader.take(names[0]), lambda: loader.take(names[5]), lambda: next(iter(loader))):
        try:
            call()
        except penstock.InvalidError as error:
            seen.append(str(error))
once_in(*((loader._load, "next") if sys.argv[3] == "next" else (loader._adapter, "tensors")), re_entering(use))
last = names[-1]
same(last, loader.take(last))
for name, tensor in loader:
    same(name, tensor)
    last = name
assert len(seen) == 3 and all("this very thread" in said for said in seen), seen
print("right")
"""
    assert run(program, many, way, moment) == "right\n"


@pytest.mark.parametrize("way", WAYS)
def test_a_prefetch_loader_that_is_closed_while_its_own_thread_takes_from_it_says_so(many, way):
    program = """
loader = handle.prefetch()
once_in(loader._adapter, "tensors", re_entering(loader.close))
try:
    loader.take(names[-1])
except penstock.InvalidError as error:
    assert "closed" in str(error), error
    print(len(loader._here))
"""
    assert run(program, many, way) == "0\n"


PATCHING = """
import safetensors, safetensors.torch
from penstock import _patch
theirs = safetensors.safe_open, safetensors.torch.load_file
def in_force():
    return safetensors.safe_open is not theirs[0] and safetensors.torch.load_file is not theirs[1]
def gone():
    return (safetensors.safe_open, safetensors.torch.load_file) == theirs
"""


@pytest.fixture
def each_in_a_child(torch_python: Any) -> Any:
    """Runs a program for each list of arguments, in children of one process: each_in_a_child(program, path, cases)."""
    return partial(_each_in_a_child, torch_python)


def _each_in_a_child(torch_python: Any, program: str, path: Path, cases: list[tuple[str, ...]]) -> list[str]:
    children = """
import json
for case in json.loads(sys.argv[2]):
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        sys.argv[2:] = case
        re_entering = {"signal": by_signal, "del": by_del, "gc": by_collection}[sys.argv[2]]
        exec(PROGRAM)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("right" if status == 0 else f"{case}: {status}", flush=True)
"""
    head, _, _ = HEAD.rpartition("re_entering = ")
    done = torch_python(f"{head}{PATCHING}\nPROGRAM = {program!r}\n{children}", path, json.dumps(cases))
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_a_patch_may_be_made_and_undone_in_the_middle_of_making_one(each_in_a_child, many):
    pytest.importorskip("safetensors")
    program = """
outer, inner = [], []
def use():
    inner.append(penstock.patch())
    assert in_force()
    if sys.argv[3] == "undone":
        inner[0].undo()
routing = _patch._routing
place = (routing.finder, "install") if sys.argv[4] == "install" else (routing, sys.argv[4])
once_in(*place, re_entering(use))
outer.append(penstock.patch())
assert in_force()
assert routing.finder in sys.meta_path and sys.meta_path.count(routing.finder) == 1
inner[0].undo()
assert in_force()
outer[0].undo()
assert gone() and routing.finder not in sys.meta_path
"""
    cases = [*itertools.product(WAYS, ("undone", "kept"), ("_learn", "_replace", "install"))]
    assert each_in_a_child(program, many, cases) == ["right"] * 18


def test_a_patch_may_be_made_in_the_middle_of_undoing_one(each_in_a_child, many):
    pytest.importorskip("safetensors")
    program = """
made = []
first = penstock.patch()
once_in(_patch, "_swap", re_entering(lambda: made.append(penstock.patch())))
first.undo()
assert len(made) == 1 and in_force()
assert _patch._routing.finder in sys.meta_path
first.undo()
assert in_force()
made[0].undo()
assert gone()
"""
    assert each_in_a_child(program, many, [(way,) for way in WAYS]) == ["right"] * 3


def test_imports_of_two_threads_do_not_wait_for_each_other(tmp_path, many):
    """One imports a module of the program which loads; the other loads what imports that module."""
    (tmp_path / "program.py").write_text(
        "import threading, penstock\n"
        "from penstock._late_imports import importing\n"
        "begun.set()\n"
        "assert inside.wait(60)\n"
        "with importing():\n    pass\n"
    )
    program = """
import builtins
from penstock._late_imports import importing
begun = builtins.begun = threading.Event()
inside = builtins.inside = threading.Event()
sys.path.insert(0, sys.argv[3])
thread = threading.Thread(target=__import__, args=("program",))
thread.start()
assert begun.wait(60)
with importing():
    inside.set()
    import program  # its module lock is the other thread's
thread.join()
print("right")
"""
    assert run(program, many, "signal", tmp_path) == "right\n"


def test_ctrl_c_on_the_way_into_an_import_leaves_no_fork_waiting(many):
    """Hundreds of interrupted imports; a fork then does not wait for any of them."""
    program = """
from penstock import _late_imports
_late_imports.PATIENCE = 1000.0
armed = []
def interrupt(*_):
    if armed:
        armed.clear()
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
for count in range(500):
    try:
        armed.append(None)
        signal.setitimer(signal.ITIMER_REAL, 2e-6 * (count % 40) + 1e-6)
        while armed:  # Python drops what is raised in a __del__
            with _late_imports.importing():
                pass
    except KeyboardInterrupt:
        pass
thread = threading.Thread(target=lambda: os.waitpid(os.fork() or os._exit(0), 0))
thread.start()
thread.join(30)
print("hangs" if thread.is_alive() else "right")
sys.stdout.flush()
os._exit(0)
"""
    assert run(program, many, "signal") == "right\n"


def test_a_digest_worker_that_is_held_up_does_not_hold_up_who_waits(many, tmp_path):
    """Nothing that a worker may hold is waited for: its `__del__` may want a lock that the waiting thread has."""
    program = """
from penstock import _digest
held = threading.Event()
class Slow(dict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        held.wait()
made = _digest._Hashing([path], {}, None, 1.0)
made._at_work = Slow()
try:
    made.run(False)
except penstock.StalledError as error:
    print(error.path == path)
held.set()
"""
    assert run(program, many, "signal") == "True\n"
