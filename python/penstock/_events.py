"""Output for operators: one event at the end of a load, lines while it takes long, metrics and spans.

An `Operation` is one call that moves bytes. Loads that it makes for itself are its parts, and give no events of their
own. If nobody listens, `observe` gives `NOTHING`, for two microseconds. docs/operations.md describes the events.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ._errors import ArgumentTypeError, CancelledError, InvalidError
from ._event_words import LOG, METRICS, About, Failure, Logger, Measured, Out, failure_of, measured, warn_once
from ._late_imports import importing
from ._report import Report

FORMATS = ("json", "text", "off")

ENGINE_LOGGERS = {"vllm": "vllm.penstock", "sglang": "sglang.penstock"}
"""Where the lines go in the processes of an engine: below the logger that the engine configures."""

EVERY = 5.0
"""Seconds between two lines of progress, and before the first."""
_FOLD = 256
"""Parts that are kept before they are summed: a handle may be asked for millions of tensors."""


_logger: Logger | None = None
_engine: str | None = None


def set_logger(logger: Logger | None) -> None:
    """Sends events and progress of this process to a logger, as text unless ``PENSTOCK_LOG`` says ``json`` or ``off``.

    Args:
        logger: A `logging.Logger`, or any object whose ``info`` and ``error`` take one text. A `logging.Logger` gets
            the event as the attribute ``penstock`` of its records, too: a dict. None: as before the first call.

    Raises:
        ArgumentTypeError: it has no such methods.
    """
    global _logger
    if logger is not None and not all(callable(getattr(logger, name, None)) for name in ("info", "error")):
        raise ArgumentTypeError(f"logger={logger!r}: give a logging.Logger, or an object with info and error")
    _logger = logger


def in_engine(engine: str) -> None:
    """Knows from now on that this process is an engine's."""
    global _engine
    _engine = engine


def engine_of_process() -> str | None:
    """The engine of which this process is one."""
    return _engine


def _format() -> str | None:
    """The format that was asked for, or None.

    Raises:
        InvalidError: PENSTOCK_LOG has another value.
    """
    value = os.environ.get(LOG)
    if not value:
        return None
    if value not in FORMATS:
        raise InvalidError(f"{LOG}={value!r}: give one of {', '.join(FORMATS)}")
    return value


def _out(engine: str | None) -> Out | None:
    """None: nobody listens."""
    asked, metrics = _format(), os.environ.get(METRICS) or None
    logger: Logger | str | None = _logger
    if logger is None:
        logger = ENGINE_LOGGERS.get(engine or _engine or "")
    format = None if asked == "off" or (asked is None and logger is None) else asked or "text"
    spans = "opentelemetry.trace" in sys.modules
    if format is None and metrics is None and not spans:
        return None
    return Out(format, logger, metrics, spans)


class Operation:
    """One call that moves bytes, from its beginning to its event. A context manager: leaving it ends it.

    Args:
        verb: What was called, such as "load".
        of: What it is of: the model's name or address, files, or a checkpoint.
        out: Where its events go.
        engine: Whose loader it is, such as "vllm".
        kept: It is a handle, which is read many times: its event has the sum, and another one what is read after that.
    """

    lines: bool
    """Whether lines of progress are wanted."""

    def __init__(self, verb: str, of: Any, out: Out, engine: str | None = None, kept: bool = False) -> None:
        self.verb, self.of, self.out, self.engine = verb, of, out, engine
        self.lines = out.format is not None
        self.begun = self.wall = 0.0
        self._pid = os.getpid()
        self.kept = kept
        self._parts: list[Measured] = []
        self._failure: Failure | None = None
        # Popped by the end that counts: one step, which needs no lock
        self._left = [True]
        _open.add(self)

    def begin(self) -> Operation:
        """Its time counts from here. What has not begun, and moved nothing, gives no event."""
        if not self.begun:
            self.wall, self.begun = time.time(), time.perf_counter()
        return self

    def add(self, report: Report) -> None:
        """A load, or save, that was made for it and has ended."""
        part = measured(report)
        if self.verb == "convert":
            # It is about what is written. Where that comes from, the loads know
            nothing = Measured().sources
            part = part._replace(sources=nothing) if "file_bytes" in report else part._replace(nbytes=0, tensors=0)
        self.count(part)

    def count(self, part: Measured) -> None:
        """The same of reads that have no report."""
        self.begin()
        self._parts.append(part)
        if len(self._parts) > _FOLD:
            self._parts.append(self._fold())

    def _fold(self) -> Measured:
        total: Measured | None = None
        while self._parts:
            try:
                part = self._parts.pop()
            except IndexError:  # another thread has taken it
                break
            total = part if total is None else part.and_(total)
        return total or Measured()

    def fell_back(self, reason: str) -> None:
        """The engine's own way was taken."""
        self.count(Measured(fallbacks=(("penstock", "the engine's own loader", reason),)))

    def fail(self, error: BaseException) -> None:
        """One of many reads has failed. The first error is the handle's."""
        self.begin()
        if self._failure is None:
            self._failure = failure_of(error)

    def forget(self) -> None:
        """It is none, after all: there is no event."""
        self._left.clear()

    def part(self) -> Part:
        """The object for a load that is a part of this operation."""
        return Part(self)

    def named(self, of: Any) -> None:
        """Sets the model or files, if they were not known."""
        if self.of is None:
            self.of = of

    def called(self, verb: str) -> None:
        """A handle that is read once, by this call."""
        self.verb, self.kept = verb, False

    def progress(self, done: int, total: int, seconds: float) -> None:
        """Says how far a load of it is after so many seconds."""
        if self._pid == os.getpid():
            about = self._about()
            _say(lambda: _progress(about, done, total, seconds))

    def _about(self) -> About:
        return About(self.verb, self.of, self.engine, self.out, self.wall)

    def end(self, error: BaseException | None = None, *, dropped: bool = False) -> None:
        """Makes the event. Only the first call counts, except of a handle. In a forked child none does."""
        try:
            if self._pid != os.getpid() or not self._left.pop():
                return
        except IndexError:
            return
        try:
            counted, total = bool(self._parts), self._fold()
            if not self.begun or (self.kept and not counted and self._failure is None and error is None):
                return
            seconds = total.seconds if self.kept else time.perf_counter() - self.begun
            if dropped and error is None:
                error = CancelledError("it was dropped before its end")
            failure = self._failure if error is None else failure_of(error)
            self._failure = None
            about = self._about()
            _say(lambda: _ended(about, total, seconds, failure))
        finally:
            if self.kept:
                self._left.append(True)

    def __enter__(self) -> Operation:
        return self.begin()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)

    def __del__(self) -> None:
        try:
            self.end(dropped=not self.kept)
        except Exception:  # the interpreter may be half gone
            return


class Part:
    """The object for a load that is a part of an operation: the operation sees the moved bytes, and its own end."""

    def __init__(self, whole: Operation) -> None:
        self.whole = whole
        self.lines = whole.lines
        self.add, self.count, self.fell_back, self.progress = whole.add, whole.count, whole.fell_back, whole.progress

    def begin(self) -> Part:
        return self

    def forget(self) -> None: ...

    def named(self, of: Any) -> None:
        self.whole.named(of)

    def called(self, verb: str) -> None:
        """Nothing: the operation has its name."""

    def fail(self, error: BaseException) -> None:
        if self.whole.kept and not failure_of(error).cancelled:
            self.whole.fail(error)

    def part(self) -> Part:
        return self

    def end(self, error: BaseException | None = None, *, dropped: bool = False) -> None:
        if error is not None:
            self.fail(error)

    def __enter__(self) -> Part:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)


class Nothing:
    """An operation that nobody wants to hear of."""

    lines = False

    def begin(self) -> Nothing:
        return self

    def add(self, report: Report) -> None: ...
    def count(self, part: Measured) -> None: ...
    def fell_back(self, reason: str) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def progress(self, done: int, total: int, seconds: float) -> None: ...
    def called(self, verb: str) -> None: ...
    def named(self, of: Any) -> None: ...
    def forget(self) -> None: ...
    def end(self, error: BaseException | None = None, *, dropped: bool = False) -> None: ...

    def part(self) -> Nothing:
        return self

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None: ...


Seen = Operation | Part | Nothing
NOTHING = Nothing()


class _Current(threading.local):
    """The operations of engines, and of conversions, that this thread is in."""

    def __init__(self) -> None:
        self.inside: list[Operation | Nothing] = []
        self.emitting = False


_current = _Current()
_open: weakref.WeakSet[Operation] = weakref.WeakSet()
"""The operations that may still give an event."""
_later: list[Callable[[], object]] = []
"""Events that came while their thread made another one, as in a `__del__`."""


def observe(verb: str, of: Any = None, *, engine: str | None = None, kept: bool = False) -> Seen:
    """The operation of a call, for operators; `NOTHING` if nobody listens.

    Args:
        of: A `Checkpoint`, or what it would be opened as.

    Raises:
        InvalidError: PENSTOCK_LOG has a value that it cannot have.
    """
    if _current.inside:
        return _current.inside[-1].part()
    within: Seen | None = getattr(of, "_within", None)
    if within is not None:
        return within.part()
    out = _out(engine)
    if out is None:
        return NOTHING
    # Not the checkpoint: what it is a part of may be this operation, which ends when nothing refers to it any more
    named = of if of is None or isinstance(of, (str, list, tuple)) else _named(of)
    return Operation(verb, named, out, engine or getattr(of, "_engine", None) or _engine, kept)


def _named(of: Any) -> Any:
    """The name that a checkpoint was opened as, or its files."""
    named = getattr(of, "_named", None)
    return named if named is not None else getattr(of, "files", of)


@contextmanager
def unseen() -> Iterator[None]:
    """Loads that begin within it are counted by their caller."""
    _current.inside.append(NOTHING)
    try:
        yield
    finally:
        _current.inside.pop()


def through(seen: Seen, tensors: Iterator[Any]) -> Iterator[Any]:
    """The values of an iterator. Its operation begins with the first and ends with the last."""
    with seen:
        yield from tensors


@contextmanager
def around(seen: Seen) -> Iterator[Seen]:
    """An operation of which every load on this thread is a part, whatever checkpoint it is of."""
    if not isinstance(seen, Operation):
        with seen:
            yield seen
        return
    with seen, within(seen):
        yield seen


@contextmanager
def within(seen: Seen) -> Iterator[None]:
    """Counts each load that begins on this thread as a part of an operation. Does not end the operation."""
    if not isinstance(seen, Operation):
        yield
        return
    _current.inside.append(seen)
    try:
        yield
    finally:
        _current.inside.remove(seen)


def _progress(about: About, done: int, total: int, seconds: float) -> None:
    with importing():
        from . import _event_lines

    _event_lines.write(about.out, _event_lines.progress(about, done, total, seconds))


def _ended(about: About, total: Measured, seconds: float, error: Failure | None) -> None:
    with importing():
        from . import _event_lines

    event, out = _event_lines.ended(about, total, seconds, error), about.out
    if out.format is not None:
        _safely(lambda: _event_lines.write(out, event))
    if out.metrics is not None:
        with importing():
            from . import _metrics

        folder = out.metrics
        _safely(lambda: _metrics.add(folder, event))
    if out.spans:
        with importing():
            from . import _spans

        _safely(lambda: _spans.add(event))


def _safely(work: Callable[[], object]) -> None:
    """Does it. No load fails for it: one warning."""
    try:
        work()
    except Exception as error:
        with suppress(Warning):  # the program makes errors of warnings
            warn_once(f"an event of a load is lost: {type(error).__name__}: {error}")


def _say(work: Callable[[], object]) -> None:
    """Does it, or leaves it to what this thread is in: a `__del__` may come in the middle of writing another event."""
    if _current.emitting:
        _later.append(work)
        return
    _current.emitting = True
    try:
        _safely(work)
        while _later:
            _safely(_later.pop())
    except IndexError:  # another thread has done it
        return
    finally:
        _current.emitting = False


def _begin_child() -> None:
    """A forked child has none of its parent's operations, and metrics of its own."""
    _open.clear()
    _later.clear()
    _current.inside.clear()
    _current.emitting = False


os.register_at_fork(after_in_child=_begin_child)


@atexit.register
def _end_all() -> None:
    """Ends the operations that are still open, at the end of the interpreter."""
    for one in _still_open():
        one.end(dropped=not one.kept)


def _still_open() -> list[Operation]:
    while True:
        try:
            return list(_open)
        except RuntimeError:  # another thread has begun one meanwhile
            continue
