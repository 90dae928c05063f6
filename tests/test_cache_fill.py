"""The page cache is filled after a load that went past it, and nothing else is disturbed by that."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ordeal
import pagecache
import penstock
import pytest
from penstock.bench.memory_limit import MemoryLimit, NoMemoryLimit

MIB = 1 << 20
TENSORS, NBYTES = 24, 8 * MIB

#: Begins to fill the page cache while a stream that nobody takes from wants the disk, so that nothing is filled yet.
PAUSED = """
import json, os, sys, time
import penstock, refusals
path, other = sys.argv[1], sys.argv[2]
stream = iter(penstock.open(other).stream(framework="np", options=dict(copy=True, window=1 << 20, extent=1 << 16)))
next(stream)
fill = penstock.open(path)._core.fill()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("fill") / "model.safetensors"
    ordeal.write(path, TENSORS, NBYTES)
    yield path
    path.unlink()


@pytest.fixture
def cold(model: Path) -> Path:
    pagecache.put([model], "cold")
    return model


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A cold file for a load that wants the disk meanwhile."""
    path = ordeal.write(tmp_path / "other.safetensors", TENSORS, 1 * MIB)
    pagecache.put([path], "cold")
    return path


def all_of(path: Path) -> int:
    return -(-path.stat().st_size // pagecache.PAGE) * pagecache.PAGE


def load_that_fills(path: Path) -> penstock.Report:
    """A copied load whose bytes went past the page cache. That is up to the pace of the disk: several are tried."""
    for _attempt in range(8):
        pagecache.put([path], "cold")
        checkpoint = penstock.open(path)
        checkpoint.load(framework="np", options={"copy": True}, progress=False)
        report = checkpoint.last_report
        assert report is not None
        if report.cache == "fill":
            return report
            assert report.cache == "keep"
    pytest.skip("this disk is as fast through the page cache")


def test_a_copied_load_without_an_option_leaves_the_next_start_warm(model: Path) -> None:
    report = load_that_fills(model)
    assert report.routes["direct"]["bytes"] > 0 and "the storage gives" in report.cache_reason
    fill = report.cache_fill
    assert isinstance(fill, penstock.CacheFill)
    assert fill.wait(60)
    assert (fill.state, fill.reason, fill.nbytes) == ("finished", "", fill.total)
    assert fill.seconds > 0 and "finished" in repr(fill) and "cache fill" in str(report)
    assert pagecache.resident_bytes([model]) == all_of(model)
    assert not ordeal.threads(fills=True)
    second = penstock.open(model)
    ordeal.same(second.load(framework="np", options={"copy": True}, progress=False), model)
    assert second.last_report.routes["direct"]["bytes"] == 0
    assert second.last_report.cache == "keep" and second.last_report.cache_fill is None
    assert json.loads(json.dumps(report, default=str))["cache"] == "fill"


@pytest.mark.parametrize("options", [{"copy": True, "cache": "bypass"}, {"io": "direct"}, {}], ids=str)
def test_nothing_is_filled_where_the_choice_was_made(cold: Path, options: Any) -> None:
    checkpoint = penstock.open(cold)
    checkpoint.load(framework="np", options=options, progress=False)
    assert checkpoint.last_report.cache_fill is None
    assert not ordeal.threads(fills=True)


def test_it_pauses_while_the_process_wants_the_disk_and_goes_on_afterwards(cold: Path, other: Path) -> None:
    stream = iter(penstock.open(other).stream(framework="np", options={"copy": True, "window": MIB, "extent": 1 << 16}))
    next(stream)
    fill = penstock.open(cold)._core.fill()
    assert fill is not None
    assert not fill.wait(0.3)
    assert (fill.state, fill.nbytes) == ("running", 0)
    assert pagecache.resident_bytes([cold]) < MIB  # its header was read
    assert "penstock-fill" not in ordeal.threads(0, fills=True)
    stream.close()
    assert fill.wait(60)
    assert (fill.state, fill.nbytes) == ("finished", cold.stat().st_size)
    assert pagecache.resident_bytes([cold]) >= all_of(cold) - MIB


def dropped(path: Path, size: int) -> None:
    """Drops the first bytes of a file, as the kernel does when it wants memory. Pages that are read just then stay."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)


def test_after_a_load_that_keeps_the_page_cache_no_page_is_missing_either(model: Path, other: Path) -> None:
    """What its trial has read past the page cache, and what the kernel has taken back since."""
    for _attempt in range(8):
        pagecache.put([model, other], "cold")
        stream = iter(
            penstock.open(other).stream(framework="np", options={"copy": True, "window": MIB, "extent": 1 << 16})
        )
        next(stream)
        checkpoint = penstock.open(model)
        checkpoint.load(framework="np", options={"copy": True}, progress=False)
        dropped(model, NBYTES)
        stream.close()
        report = checkpoint.last_report
        assert report is not None and report.cache_fill is not None
        assert report.cache_fill.wait(60) and report.cache_fill.state == "finished"
        assert pagecache.resident_bytes([model]) == all_of(model), report.cache
        if report.cache == "keep":
            return
        assert report.cache == "fill"
    pytest.skip("this disk is slower through the page cache each time")


def test_pages_that_the_kernel_takes_back_while_it_fills_are_filled_again(cold: Path, other: Path) -> None:
    fill = penstock.open(cold)._core.fill()
    assert fill is not None
    while fill.nbytes < NBYTES and fill.state == "running":
        time.sleep(0.001)
    stream = iter(penstock.open(other).stream(framework="np", options={"copy": True, "window": MIB, "extent": 1 << 16}))
    next(stream)
    filled = fill.nbytes
    dropped(cold, NBYTES)
    lacks = all_of(cold) - pagecache.resident_bytes([cold])
    stream.close()
    assert fill.wait(60) and (fill.state, fill.nbytes) == ("finished", fill.total)
    assert pagecache.resident_bytes([cold]) == all_of(cold)
    if filled == fill.total or not lacks:
        raise ordeal.NotQuiet("it was over before pages were dropped")


def test_a_save_wants_the_disk_too(cold: Path, tmp_path: Path) -> None:
    """Of fills and saves that begin at once, no fill is left that does not go on."""
    import numpy as np

    fills = []
    for number in range(5):
        fills.append(penstock.open(cold)._core.fill())
        penstock.save_file({"a": np.zeros(1000)}, tmp_path / f"{number}.safetensors", progress=False)
    assert all(fill.wait(60) and fill.state == "finished" for fill in fills)


def test_pages_that_are_dropped_are_not_brought_back(cold: Path, other: Path) -> None:
    stream = iter(penstock.open(other).stream(framework="np", options={"copy": True, "window": MIB, "extent": 1 << 16}))
    next(stream)
    fill = penstock.open(cold)._core.fill()
    assert fill is not None
    penstock._core.evict(str(cold))
    stream.close()
    assert (fill.wait(60), fill.state, fill.nbytes) == (True, "stopped", 0)
    assert pagecache.resident_bytes([cold]) < MIB  # its header was read


def test_a_file_that_changes_is_left_alone(tmp_path: Path, other: Path) -> None:
    path = ordeal.write(tmp_path / "changes.safetensors", 4, NBYTES)
    stream = iter(penstock.open(other).stream(framework="np", options={"copy": True, "window": MIB, "extent": 1 << 16}))
    next(stream)
    pagecache.put([path], "cold")
    fill = penstock.open(path)._core.fill()
    assert fill is not None
    os.utime(path, (1, 1))
    stream.close()
    assert (fill.wait(60), fill.state, fill.nbytes) == (True, "stopped", 0)
    assert "was written to" in fill.reason and str(path) in fill.reason
    assert pagecache.resident_bytes([path]) < MIB  # its header was read


def test_it_can_be_stopped(cold: Path, other: Path) -> None:
    stream = iter(penstock.open(other).stream(framework="np", options={"copy": True, "window": MIB, "extent": 1 << 16}))
    next(stream)
    first, second = (penstock.open(cold)._core.fill() for _ in range(2))
    assert first is not None and second is not None
    first.stop()
    assert (first.state, second.state) == ("stopped", "running")
    assert first.reason == "it was told to stop" and first.wait(0)
    stream.close()
    assert second.wait(60) and second.state == "finished"


def test_a_fork_ends_it(cold: Path, other: Path) -> None:
    """Python warns of forks beside threads, and the child has none that would go on."""
    program = (
        PAUSED
        + """
pid = os.fork()
if pid == 0:
    assert fill.wait() and fill.state == "stopped" and "parent process" in fill.reason, fill
    fill.stop()
    again = penstock.open(path)._core.fill()
    assert again.wait(60) and again.state == "finished", again
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
print(fill.state, fill.reason)
"""
    )
    assert ordeal.run(program, cold, other) == "stopped the process forked\n"


def test_a_process_that_ends_does_not_wait_for_it(cold: Path, other: Path) -> None:
    """Also with a daemon thread that waits, and what was filled until then stays."""
    program = (
        PAUSED
        + """
import threading
stream.close()
threading.Thread(target=fill.wait, daemon=True).start()
while fill.nbytes == 0:
    time.sleep(0.001)
print(fill.nbytes)
"""
    )
    filled = int(ordeal.run(program, cold, other))
    assert 0 < filled <= pagecache.resident_bytes([cold])


def test_ctrl_c_ends_a_wait_for_it_and_nothing_else(cold: Path, other: Path) -> None:
    program = (
        PAUSED
        + """
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    fill.wait()
except KeyboardInterrupt:
    print(fill.state)
stream.close()
assert fill.wait(60)
print(fill.state)
"""
    )
    assert ordeal.run(program, cold, other) == "running\nfinished\n"


def test_where_no_thread_can_be_started_it_says_so(cold: Path, other: Path) -> None:
    program = (
        PAUSED
        + """
refusals.refuse(*refusals.NO_THREADS)
stream.close()
assert fill.wait(60)
print(fill.state, fill.reason)
"""
    )
    assert ordeal.run(program, cold, other).startswith("stopped no thread can be started: ")


def test_it_ends_where_the_memory_left_no_longer_holds_the_rest(cold: Path, other: Path) -> None:
    program = (
        PAUSED
        + """
print(os.getpid(), flush=True)
sys.stdin.readline()
stream.close()
assert fill.wait(60)
print(json.dumps([fill.state, fill.nbytes, fill.reason]))
"""
    )
    try:
        limit = MemoryLimit(160 * MIB)
    except NoMemoryLimit as why:
        pytest.skip(str(why))
    with limit:
        process = ordeal.begin(program, cold, other)
        assert process.stdout is not None and process.stdin is not None
        limit.hold(int(process.stdout.readline()))
        process.stdin.write("go on\n")
        code, said, errors = ordeal.finish(process, 60)
    assert code == 0, errors
    state, nbytes, reason = json.loads(said)
    assert (state, nbytes) == ("stopped", 0) and "do not fit into the memory left" in reason
    assert pagecache.resident_bytes([cold]) < MIB  # its header was read
