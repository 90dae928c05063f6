"""Loads in a fresh process: the parent's end of the pipe; `child` is the other.

While the child waits, the parent puts the page cache and the memory into the state that the scenario asks for, and
looks at what a load left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO

from .child import Order
from .forkserver import Forkserver, ServerEnded
from .results import Run

#: Seconds between two looks at a process' memory: a look takes about 30 us, so this costs less than 1% of one core.
_SAMPLED_EVERY = 0.005
#: A load that takes longer than this and than its bytes at 20 MB/s hangs.
_PATIENCE = 300.0


class LoadFailed(Exception):
    """The process ended, or did not answer in time; the message is the last line that it wrote."""


class LoadProcess:
    """A process that loads as often as it is told to. Leaving its context ends it."""

    def __init__(self, server: Forkserver, order: Order, environment: Mapping[str, str], nbytes: int) -> None:
        self._server = server
        self._patience = max(_PATIENCE, nbytes / 20e6)
        self._status: int | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        hears, to = os.pipe()
        of, says = os.pipe()
        self._to, self._of = open(to, "w"), open(of)  # noqa: SIM115 - closed with the process
        try:
            #: Its number.
            self.pid = server.fork(environment, hears, says, self._errors.fileno())
        except ServerEnded as error:
            self._close()
            raise LoadFailed(str(error)) from None
        finally:
            os.close(hears)
            os.close(says)
        self.say(json.dumps(asdict(order)))

    def __enter__(self) -> LoadProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._kill()
        try:
            with contextlib.suppress(BrokenPipeError):
                self._to.close()  # it ends where it is not told to go on
            self._of.read()
            self._ended()
        finally:
            self._close()

    def _close(self) -> None:
        for one in (self._to, self._of, self._errors):
            with contextlib.suppress(BrokenPipeError):
                one.close()

    def _kill(self) -> None:
        # Its number is its own until somebody has waited for it.
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def _ended(self) -> int:
        """Waits for its end; the exit status, or less than 0: the signal."""
        if self._status is None:
            try:
                self._status = self._server.wait(self.pid)
            except ServerEnded as error:
                self._status = -1  # nobody can tell any more
                raise LoadFailed(f"the process that it was forked from has ended: {error}") from None
        return self._status

    def hear(self) -> Run:
        """The next thing that the process says."""
        timer = threading.Timer(self._patience, self._kill)
        timer.start()
        line = self._of.readline()
        in_time = timer.is_alive()
        timer.cancel()
        if line:
            said: Run = json.loads(line)
            return said
        raise self._failed("" if in_time else f"did not answer within {self._patience:.0f} s")

    def _failed(self, otherwise: str) -> LoadFailed:
        status = self._ended()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines() or [f"ended with status {status}"]
        return LoadFailed(otherwise or lines[-1])

    def say(self, what: str) -> None:
        """Tells the process to go on: `load`, then `verify`, `settle` or `drop`; `end` at the end."""
        try:
            self._to.write(what + "\n")
            self._to.flush()
        except BrokenPipeError:
            raise self._failed("") from None


def memory_of(pid: int) -> dict[str, int]:
    """A process' anonymous and shared memory, and what is pinned of it, in bytes; nothing once it has ended.

    Pinned is what the kernel accounts for, such as io_uring's buffers; a GPU driver's registrations are not among it.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    found = {"memory": 0, "pinned": 0}
    for line in text.splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            found["memory"] += int(line.split()[1]) << 10
        elif line.startswith("VmPin:"):
            found["pinned"] += int(line.split()[1]) << 10
    return found


#: Gives figures by name.
Probe = Callable[[], dict[str, int]]


class Sampled:
    """Peaks of what probes give while the context is open, beyond what they gave before it.

    Processes are looked at from outside, so that nothing of them is slowed down.
    """

    def __init__(self, probes: list[Probe]) -> None:
        self._probes = probes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._before = self._now()
        #: Bytes.
        self.peaks: dict[str, int] = {}

    def _now(self) -> dict[str, int]:
        """Sums over all probes."""
        found: dict[str, int] = {}
        for probe in self._probes:
            for name, value in probe().items():
                found[name] = found.get(name, 0) + value
        return found

    def _look(self) -> None:
        while True:
            for name, value in self._now().items():
                self.peaks[name] = max(self.peaks.get(name, 0), value - self._before.get(name, 0))
            if self._over.wait(_SAMPLED_EVERY):
                return

    def __enter__(self) -> Sampled:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
