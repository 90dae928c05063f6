"""Loads in the background."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Any

from . import _running
from ._collector import collector_paused
from ._errors import ArgumentTypeError, CancelledError, InvalidError, PenstockError, StalledError, raise_if_forked
from ._events import NOTHING
from ._framework import Adapter
from ._late_imports import importing
from ._report import Report, report_of
from ._request import Request


def copy_of(error: Exception) -> Exception:
    try:
        with importing():
            from copy import copy
        found = copy(error)
        if error.__cause__ is not None and error.__cause__.__traceback__ is None:  # one that holds no frames
            found.__cause__ = error.__cause__
        return found
    except Exception:  # one whose arguments are not those that it is made of
        return error


def seconds_of(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if not isinstance(timeout, (int, float)):
        raise ArgumentTypeError(f"timeout={timeout!r}: give a number of seconds, or None")
    try:
        return float(timeout)
    except OverflowError:  # longer than anybody waits
        return None


class Job:
    """A load that runs in the background. `Checkpoint.start` makes one, and it runs from then on.

    Use it as a context manager, or call `result`, `cancel` or `close`: after each of them nothing is running. If you
    drop a job, it is cancelled. A job belongs to its process: in a forked child every method raises `ForkedError`.
    """

    def __init__(self, request: Request, adapter: Adapter) -> None:
        self._owner = os.getpid()
        self._checkpoint = request.checkpoint
        self._names = request.selection.names
        self._adapter = adapter
        self._finish = request.finish
        self._cancelled = False
        self._result: dict[str, Any] | None = None
        self._error: Exception | None = None
        self._report: Report | None = None
        # Held while the tensors are made. A thread that waits for it waits for another that makes them, and can be
        # interrupted. A thread that has it already is in a signal handler or a `__del__`: see `_makes`
        self._handing_out = threading.RLock()
        self._makes = False
        self._seen, self._told = request.seen.begin(), False
        try:
            self._load = _running.begin(request, adapter)
        except BaseException as error:
            self._seen.end(error)
            raise

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until every byte is in place, at most ``timeout`` seconds (None: without limit).

        Returns True if every byte is in place, False if the time is over. Raises the error of a load that failed.
        """
        raise_if_forked(self._owner, "job")
        if self._result is not None:
            return True
        return self._load.wait(seconds_of(timeout))

    def done(self) -> bool:
        """Whether the load has ended, with success or with an error."""
        raise_if_forked(self._owner, "job")
        return self._result is not None or self._load.done()

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes in place, bytes wanted)."""
        raise_if_forked(self._owner, "job")
        return self._load.progress()

    @property
    def report(self) -> Report:
        """The report of the load. It is empty until the load has ended; `progress` says how far the load is."""
        raise_if_forked(self._owner, "job")
        return self._report if self._report is not None else report_of(self._load.report(), self._checkpoint._core)

    def cancel(self) -> None:
        """Stops the load and waits until it has stopped. `result` then raises `CancelledError`."""
        raise_if_forked(self._owner, "job")
        if self._result is None:
            self._cancelled = True
            self._load.cancel()
        self.close()
        self._tell(CancelledError("the job was cancelled before it was done"))

    def close(self) -> None:
        """Cancels a load that still runs, and frees its memory.

        `result` still gives the tensors of a load that has ended before: drop the job to free them. You may call this
        more than once. It never raises the error of the load.
        """
        raise_if_forked(self._owner, "job")
        self._load.close()
        try:
            self._load.wait(0)
        except PenstockError as error:
            self._let_go()
            if not self._cancelled and self._error is None:
                self._tell(error)
        else:
            if self._result is None and not self._makes and not self._cancelled and self._error is None:
                self._tell(None)  # nobody has asked for the tensors
        if (self._cancelled or self._error is not None) and not self._makes:
            self._let_go()

    def _let_go(self) -> None:
        """There will be no result. What holds on to the job, as a traceback does, must not hold on to gigabytes."""
        self._load.let_go()
        self._adapter.let_go()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Waits for the tensors and returns them by name, in the order asked for; each time the same dictionary.

        With ``dtype=`` the tensors are cast here, on the calling thread.

        Raises:
            StalledError: (a TimeoutError) the load is not done after ``timeout`` seconds. It goes on.
            CancelledError: the job was cancelled.
            InvalidError: called by a signal handler or a ``__del__`` while its own thread makes the result.
            PenstockError: the load failed. Each call raises this error.
        """
        raise_if_forked(self._owner, "job")
        if self._result is not None:
            return self._result
        seconds = seconds_of(timeout)
        self._raise_again()
        try:
            ended = self._load.wait(seconds)
        except BaseException as error:
            self._remember(error)
            raise
        if not ended:
            done, total = self._load.progress()
            raise StalledError(
                f"the load is not done after {timeout} s ({done} of {total} bytes are there); it goes on"
            )
        with self._handing_out:  # each tensor can be made once, and several threads may be waiting for them
            if self._result is not None:
                return self._result
            self._raise_again()
            if self._makes:
                raise InvalidError(
                    "this very thread is making the result just now: a signal handler or a __del__ that runs in the "
                    "middle of that cannot have it; it is there once the thread goes on"
                )
            self._makes = True
            try:
                return self._hand_out()
            except BaseException as error:
                if not (self._cancelled and isinstance(error, PenstockError)):
                    self._remember(error)
                    raise
                self._raise_again()  # cancelled by another thread in the middle of it
                raise
            finally:
                self._makes = False
                if self._result is None:
                    self._let_go()

    def _raise_again(self) -> None:
        """Raises what an earlier `result` has raised. It cannot be found again: the load is closed."""
        if self._error is not None:
            raise copy_of(self._error)
        if self._cancelled:
            raise CancelledError("the job was cancelled before it was done")

    def _remember(self, error: BaseException) -> None:
        """Ends the job with this error."""
        if isinstance(error, Exception):
            # Not the error itself: it will hold the frames of its catcher, and every object in them
            self._error = copy_of(error)
        else:
            self._cancelled = self._result is None
        self.close()
        self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        """Operators see its end, and what it had moved by then: once."""
        if self._told or self._seen is NOTHING:
            return
        self._told = True
        self._seen.add(self._report if self._report is not None else self.report)
        self._seen.end(error)

    def _hand_out(self) -> dict[str, Any]:
        adapter, names = self._adapter, self._names
        try:
            start = time.perf_counter()
            with collector_paused():
                tensors = adapter.tensors(self._load, range(len(names)))
                plain = self._finish is None and not adapter.casts
                made = dict(zip(names, tensors, strict=True)) if plain else None
            self._report = self._checkpoint._ended(self._load)
            self._report.handed_out(time.perf_counter() - start, cast=self._adapter.casts)
            self._load.mark("hand-out", start, time.perf_counter())
            _running.write_trace(self._load, self._report)
        finally:
            self._load.close()
        if made is None:
            made = {}
            for want, name in enumerate(names):
                tensor, tensors[want] = adapter.cast(tensors[want]), None  # no two copies of all
                complete = True
                if self._finish is not None:
                    complete, tensor = self._finish.add(want, tensor)
                if complete:
                    made[name] = tensor
        self._result = made
        self._tell(None)
        return made

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._result is None:
            self._cancelled = True
        self.close()
