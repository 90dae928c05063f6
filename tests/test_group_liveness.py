"""Ranks that are busy, or starved, are alive: no load fails for that."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import penstock
import pytest
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from ranks_together import Ranks

WHOLE = os.environ.get("PENSTOCK_TEST_RANKS") == "1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = [Tensor(f"{number}", "U8", (2 << 20,)) for number in range(16)]
    return synth.write_file(tmp_path_factory.mktemp("liveness") / "model.safetensors", tensors)


@pytest.mark.parametrize(("silence", "held"), [(1.0, 3.0), *([(5.0, 20.0)] if WHOLE else [])])
def test_a_rank_that_holds_the_interpreters_lock_is_alive(
    together: Callable[..., Ranks], model: Path, silence: float, held: float
) -> None:
    """As C code does that forgets to let go of it: in the middle of the load, and while ranks agree."""
    program = """
    import ctypes, threading
    def hold_the_lock(*_):
        if not said.get("held"):
            begun = time.monotonic()
            ctypes.PyDLL(None).usleep(int(held * 1e6))
            said["held"] = time.monotonic() - begun
    checkpoint, options = penstock.open(path), {"peer_timeout": silence}
    progress = hold_the_lock if rank == 1 else None
    said["middle"] = same(checkpoint.load(group=group, options=options, progress=progress))
    said["first"] = said.pop("held", None)
    if rank == 1:
        thread = threading.Timer(0.05, hold_the_lock)
        thread.start()
    else:
        time.sleep(0.1)
    said["agreement"] = same(checkpoint.load(group=group, options=options))
    if rank == 1:
        thread.join()
    """
    with together(program, 3, model, silence=silence, held=held) as ranks:
        said = ranks.all()
    assert [(one["middle"], one["agreement"]) for one in said] == [(16, 16)] * 3
    assert said[1]["first"] >= held and said[1]["held"] >= held


@contextlib.contextmanager
def a_tenth_of_a_core(pid: int) -> Iterator[str]:
    """Gives a process that much: by a control group, or else by stopping it nine times out of ten."""
    for parent, limits in (
        (Path("/sys/fs/cgroup/cpu"), {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "10000"}),
        (Path("/sys/fs/cgroup"), {"cpu.max": "10000 100000"}),
    ):
        group = parent / f"penstock-test-{pid}"
        home = (parent / "cgroup.procs") if (parent / "cgroup.procs").exists() else None
        if home is None:
            continue
        try:
            group.mkdir()
            for name, value in limits.items():
                (group / name).write_text(value)
            (group / "cgroup.procs").write_text(str(pid))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield "a control group"
        finally:
            with contextlib.suppress(OSError):
                home.write_text(str(pid))
            for _ in range(100):
                with contextlib.suppress(OSError):
                    group.rmdir()
                if not group.exists():
                    break
                time.sleep(0.02)
        return
    over = threading.Event()

    def throttle() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                over.wait(0.18)
                os.kill(pid, signal.SIGCONT)
                over.wait(0.02)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield "signals"
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_rank_that_has_a_tenth_of_a_core_loads(together: Callable[..., Ranks], model: Path) -> None:
    program = """
    checkpoint = penstock.open(path)
    hold()
    for number in range(loads):
        said["tensors"] = same(checkpoint.load(group=group, options={"peer_timeout": 5}))
    """
    with together(program, 3, model, loads=20 if WHOLE else 3) as ranks:
        ranks.held()
        with a_tenth_of_a_core(ranks.pids[1]):
            ranks.release()
            said = ranks.all()
    assert [one["tensors"] for one in said] == [len(penstock.open(model))] * 3
