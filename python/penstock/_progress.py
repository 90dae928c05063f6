"""Progress bars, in bytes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from . import _events
from ._errors import InvalidError
from ._event_words import rank_of_process
from ._events import NOTHING, Seen
from ._late_imports import importing

Progress = bool | Callable[[int, int], object] | None
"""True: a bar. None: a bar if stderr is a terminal. False: nothing. Callable: given (bytes done, bytes in all)."""

INTERVAL = 0.1
"""Seconds between two updates."""


class _Sink(Protocol):
    def update(self, done: int, total: int) -> None: ...
    def close(self) -> None: ...


class _Tqdm:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def update(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


class _Plain:
    """A line on stderr, rewritten on a terminal and repeated every few seconds elsewhere."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._tty = sys.stderr.isatty()
        self._every = INTERVAL if self._tty else 5.0
        self._next = 0.0
        self._last = (0, 0)
        self._begun: tuple[float, int] | None = None

    def _write(self, end: str) -> None:
        done, total = self._last
        share = 100.0 * done / total if total else 100.0
        sys.stderr.write(f"\r{self._label}: {done / 1e9:.2f}/{total / 1e9:.2f} GB ({share:.0f}%){self._pace()}" + end)
        sys.stderr.flush()

    def _pace(self) -> str:
        """The rate since the first bytes, and the time that is left at this rate."""
        now, (done, total) = time.monotonic(), self._last
        begun, first = self._begun = self._begun or (now, done)
        if done <= first or now <= begun:
            return ""
        rate = (done - first) / (now - begun)
        return f", {rate / 1e9:.2f} GB/s, {max(0, total - done) / rate:.0f} s left"

    def update(self, done: int, total: int) -> None:
        self._last = (done, total)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            self._write("" if self._tty else "\n")

    def close(self) -> None:
        self._write("\n")


class _Call:
    def __init__(self, function: Callable[[int, int], object]) -> None:
        self._function = function

    def update(self, done: int, total: int) -> None:
        self._function(done, total)

    def close(self) -> None:
        pass


def _sink(progress: Progress, label: str) -> _Sink | None:
    if progress is False:
        return None
    if progress is not None and progress is not True:
        if not callable(progress):
            raise InvalidError(
                f"progress={progress!r}: give True, False, None or a function of (bytes done, bytes in all)"
            )
        return _Call(progress)
    if rank_of_process() != 0 or (progress is None and not (sys.stderr is not None and sys.stderr.isatty())):
        return None
    try:
        with importing():
            from tqdm.auto import tqdm
    except ImportError:
        return _Plain(label)
    return _Tqdm(tqdm(desc=label, unit="B", unit_scale=True, unit_divisor=1000, leave=True))


class Meter:
    """Shows how far a load has come; does nothing, at no cost, where nobody is looking.

    In a distributed job only rank 0 shows a bar. A function is called on every rank. ``seen`` writes lines for
    operators, also where there is no bar.
    """

    def __init__(self, progress: Progress, label: str, seen: Seen = NOTHING) -> None:
        self._sink = _sink(progress, label)
        self._seen = seen
        self._next = 0.0
        if seen.lines:
            self._begun = time.monotonic()
            self._next_line = self._begun + _events.EVERY

    @property
    def active(self) -> bool:
        """Whether anybody is looking."""
        return self._sink is not None or self._seen.lines

    def update(self, done: int, total: int, *, final: bool = False) -> None:
        """Shows ``done`` of ``total`` bytes, at most every `INTERVAL` seconds unless ``final``."""
        if not self.active:
            return
        now = time.monotonic()
        if self._seen.lines and now >= self._next_line and not final:
            self._next_line = now + _events.EVERY
            self._seen.progress(done, total, now - self._begun)
        if self._sink is None:
            return
        if final or now >= self._next:
            self._next = now + INTERVAL
            self._sink.update(done, total)

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sink is not None:
            self._sink.close()
