"""Loads under adverse conditions: what the tests and the processes that they start have in common.

Checkpoints are written and checked here byte by byte, by `json`, `struct` and numpy, without penstock.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

HERE = Path(__file__).parent
T = TypeVar("T")


class NotQuiet(Exception):
    """The precondition of a test cannot be had on this machine now; the message says which (`machine.py`)."""


class Wrong(AssertionError):
    """A wrong result: a failure on every machine, however busy (`machine.py`)."""


class Hung(AssertionError):
    """Something does not end: a failure on every machine."""


class Died(AssertionError):
    """A process that must succeed did not: a failure on every machine."""


def results(check: Callable[..., T]) -> Callable[..., T]:
    """For a function that compares results: what it asserts is `Wrong` where it fails."""

    @functools.wraps(check)
    def wrapped(*args: Any, **kwargs: Any) -> T:
        try:
            return check(*args, **kwargs)
        except AssertionError as error:
            raise Wrong(str(error)) from error

    return wrapped


def load_factor() -> float:
    """How many tasks there are for each processor, 1 at least: bounds that tell a hang from work are as much longer."""
    minute, _, _, runnable, *_ = Path("/proc/loadavg").read_text().replace("/", " ").split()
    return max(1.0, max(float(minute), float(runnable)) / len(os.sched_getaffinity(0)))


def write(path: Path, tensors: int = 24, nbytes: int = 1_000_000, seed: int = 0, sparse: bool = False) -> Path:
    """One shard file of ``tensors`` U8 tensors of ``nbytes`` bytes each; ``sparse`` ones are zero and take no disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries: dict[str, Any] = {
        f"{path.stem}.{i}": {"dtype": "U8", "shape": [nbytes], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
        for i in range(tensors)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        if sparse:
            f.truncate(f.tell() + tensors * nbytes)
        else:
            random = np.random.default_rng(seed)
            for _ in range(tensors):
                f.write(random.bytes(nbytes))
        f.flush()
        os.fsync(f.fileno())
    return path


def entries(path: str | os.PathLike[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    """Where the data of a shard file starts, and its header."""
    with open(path, "rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        return 8 + length, json.loads(f.read(length))


def evict(path: str | os.PathLike[str]) -> None:
    """Out of the page cache with it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def raw(tensor: Any) -> bytes:
    """The bytes of a torch tensor or numpy array."""
    return bytes(memoryview(tensor.numpy() if hasattr(tensor, "numpy") else tensor))


def contents(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """The tensors of a shard file."""
    data, header = entries(path)
    whole = Path(path).read_bytes()
    return {n: whole[data + e["data_offsets"][0] : data + e["data_offsets"][1]] for n, e in header.items()}


def same(tensors: dict[str, Any], of: str | os.PathLike[str] | dict[str, bytes]) -> None:
    """Asserts that these are all tensors of a shard file (or of what `contents` said of it), byte for byte."""
    expected = of if isinstance(of, dict) else contents(of)
    if sorted(tensors) != sorted(expected):
        raise Wrong(f"there are {sorted(tensors)}, not {sorted(expected)}")
    for name, tensor in tensors.items():
        if memoryview(tensor.numpy() if hasattr(tensor, "numpy") else tensor) != expected[name]:
            raise Wrong(f"wrong bytes: {name}")


def threads(patience: float = 0.5, fills: bool = False) -> list[str]:
    """Names of the threads of this process that belong to a load.

    One that was joined may be listed a moment longer, on a busy machine for seconds: waits.
    The thread that fills the page cache after a load belongs to none; ``fills`` lists it too.
    """
    until = time.monotonic() + patience * load_factor()
    while (found := [n for n in _threads() if fills or n != "penstock-fill"]) and time.monotonic() < until:
        time.sleep(0.001)
    return found


#: Threads that a failed test has left running, by id: they are no finding of the tests after it.
_given_up: set[str] = set()


def give_up_threads() -> None:
    """Lists the threads that run now no longer."""
    _given_up.update(task.name for task in Path("/proc/self/task").iterdir())


def _threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        if task.name not in _given_up:
            with contextlib.suppress(OSError):
                names.append((task / "comm").read_text().strip())
    return [n for n in names if n.startswith("penstock-")]


def tasks() -> int:
    """Threads of this process, whatever their names: one that begins still has that of its parent."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def descriptors() -> list[str]:
    """What this process has open, by kind; the listing itself left out."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(fd.readlink()))
    return sorted(f for f in found if not f.startswith("/proc/"))


def maps() -> list[str]:
    """The mappings of this process."""
    return Path("/proc/self/maps").read_text().splitlines()


def file_maps() -> list[str]:
    """Mappings of shard files."""
    return [line for line in maps() if ".safetensors" in line]


def resident() -> int:
    """Anonymous and shared memory of this process that is resident, in bytes: file pages are the page cache's."""
    status = Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem")))


class Unchanged:
    """Asserts that what happened inside left no thread, descriptor, file mapping or memory behind."""

    def __init__(self, memory: int = 80 << 20) -> None:
        # The ring keeps up to 64 MiB of slabs for the next load
        self.memory = memory

    def __enter__(self) -> Unchanged:
        gc.collect()
        self.before = (descriptors(), len(file_maps()), resident())
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.check()

    def check(self) -> None:
        gc.collect()
        assert threads() == [], threads()
        known = list(self.before[0])
        for d in descriptors():
            if d in known:
                known.remove(d)
            else:
                # One event descriptor of the ring and the like last for the process: never a file
                assert ".safetensors" not in d, f"left open: {d}"
        assert len(descriptors()) <= len(self.before[0]) + 4, descriptors()
        assert len(file_maps()) <= self.before[1], file_maps()
        assert resident() <= self.before[2] + self.memory, f"{resident() - self.before[2]} bytes left behind"


def told(report: Any) -> list[tuple[str, str]]:
    """The fallbacks that a report names."""
    return [(f["from"], f["to"]) for f in report["fallbacks"]]


def begin(program: str, *arguments: object, **more: Any) -> subprocess.Popen[str]:
    """Starts a Python of its own on ``program``, with this folder's modules at hand."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    environment |= more.pop("environment", {})
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **more,
    )


def finish(child: subprocess.Popen[str], timeout: float = 30.0) -> tuple[int, str, str]:
    """Its exit code, output and errors. A child that hangs shows where, and is `Hung`."""
    try:
        out, err = child.communicate(timeout=timeout * load_factor())
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)  # faulthandler writes the stacks
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, err = child.communicate(timeout=5)
            raise Hung(f"the process hangs\n{out}\n{err}") from None
        child.kill()
        raise Hung("the process hangs and cannot be stopped") from None
    return child.returncode, out, err


def run(program: str, *arguments: object, timeout: float = 30.0, **more: Any) -> str:
    """What a program that must succeed writes, run in a Python of its own."""
    code, out, err = finish(begin(program, *arguments, **more), timeout)
    if code != 0:
        raise Died(f"exit code {code}\n{out}\n{err}")
    return out


def interrupt(child: subprocess.Popen[str], within: float) -> None:
    """Ctrl-C, of which the child must tell by the line "interrupted" within so many seconds (of a quiet machine)."""
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    await_line(child, "interrupted")
    assert time.monotonic() - began < within * load_factor()


def await_line(child: subprocess.Popen[str], line: str) -> None:
    """Waits until a child has written this line."""
    assert child.stdout is not None
    while (got := child.stdout.readline()) != line + "\n":
        if not got:
            raise Died(f"the child ended before it wrote {line!r}: {child.stderr.read() if child.stderr else ''}")


def soon(what: Any, timeout: float = 5.0) -> None:
    """Waits until ``what()`` is true."""
    until = time.monotonic() + timeout * load_factor()
    while not what():
        assert time.monotonic() < until, "did not happen"
        time.sleep(0.005)
