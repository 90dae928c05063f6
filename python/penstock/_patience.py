"""Python's own calls to file systems and servers that may hang, made on a thread that can be left behind.

A call into a network mount whose server is gone returns when the server is back, and until then no signal handler runs
on its thread. The core does its own calls in the same way (``detached.rs``).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from . import _core
from ._errors import CancelledError, LimitError, StalledError

T = TypeVar("T")

LOOK = 0.05
"""Seconds between two looks at the progress."""


KEPT = 0.02
"""Seconds for which a thread waits for the next work. A load asks 60 times. A start takes 180 to 310 us, to wake one
29."""


class _Asker(threading.Thread):
    """A thread that works for one caller after the other. A daemon: a call that hangs in the kernel must not keep the
    process from ending."""

    def __init__(self) -> None:
        super().__init__(name="penstock-ask", daemon=True)
        self.work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                work = self.work.get(timeout=KEPT)
            except Empty:
                with _idle_lock:
                    if self in _idle:
                        _idle.remove(self)
                        return
                work = self.work.get()  # it was taken just now
            if work is None:
                return
            work()
            del work  # what it holds on to is the caller's


#: The collector may end a handle within it, whose event is written on such a thread.
_idle_lock = threading.RLock()
_idle: list[_Asker] = []
"""Threads that wait for work."""


def _dismiss() -> None:
    """Ends those that wait. Python warns of a fork while threads run, and the child has none."""
    with _idle_lock:
        ended = _idle[:]
        _idle.clear()
    for one in ended:
        one.work.put(None)
    for one in ended:
        one.join(1)


def _forget() -> None:
    """In a forked child there are none."""
    global _idle_lock
    _idle_lock = threading.RLock()
    _idle.clear()


os.register_at_fork(before=_dismiss, after_in_child=_forget)


class _Asked:
    """The calls of one `patiently` to the file system."""

    def __init__(self, path: str | None) -> None:
        self.questions = 0
        self.path = path
        self.left = threading.Event()
        """Set when nobody waits for the work any more."""


class _Current(threading.local):
    asked: _Asked | None = None
    kept: _Asker | None = None
    """The thread that works for this one alone."""


_current = _Current()


@contextmanager
def kept_asker() -> Iterator[None]:
    """Keeps a thread for the questions of this one, if one can be started. From Python 3.12 on none can while the
    interpreter ends, and this one may have to ask then.
    """
    asker = _Asker()
    with suppress(RuntimeError):
        asker.start()
        _current.kept = asker
    try:
        yield
    finally:
        _current.kept = None
        asker.work.put(None)


def asking(path: str | os.PathLike[str]) -> None:
    """The work that `patiently` does on this thread asks about ``path`` next: all that it asked before is answered.

    Raises:
        CancelledError: nobody waits for the work any more.
    """
    asked = _current.asked
    if asked is not None:
        if asked.left.is_set():
            raise CancelledError("nobody waits for it any more", path=os.fspath(path))
        asked.questions += 1
        asked.path = os.fspath(path)


def pause(seconds: float) -> None:
    """Waits, before the work that `patiently` does asks again; not longer than anybody waits for the work."""
    if _current.asked is None:
        time.sleep(seconds)
    else:
        _current.asked.left.wait(seconds)


def stalled(stall: float, path: str | None) -> StalledError:
    """The error for a file system, or a server, that has not answered for ``stall`` seconds."""
    return StalledError(
        f"the storage has not answered for {stall:.1f} s; is its server stuck? (stall_timeout raises the limit)",
        path=path,
    )


def patiently(work: Callable[[], T], stall_timeout: float | None, path: str | None = None) -> T:
    """The result or error of ``work``, unless it hangs; Ctrl-C works meanwhile.

    Args:
        work: Asks the file system, and calls `asking` before each question.
        stall_timeout: Seconds without an answer before it counts as hung; None: as for the whole process.
        path: What the first question is about, for the error.

    Raises:
        StalledError: the file system hangs. The thread is left behind and ends when it is answered.
        LimitError: there can be no more threads.
    """
    stall = _core.stall_timeout(stall_timeout)
    asked = _Asked(path)
    result: list[T] = []
    failure: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        _current.asked = asked
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)
        finally:
            _current.asked = None
            if kept is None:
                with _idle_lock:
                    _idle.append(thread)  # before the caller goes on, and asks again
            over.set()

    kept, _current.kept = _current.kept, None  # a question of a `__del__` meanwhile has another thread
    with _idle_lock:
        idle = kept or (_idle.pop() if _idle else None)
    thread = idle or _Asker()
    thread.work.put(run)
    if idle is None:
        try:
            thread.start()
        except RuntimeError as error:
            raise LimitError(f"cannot start the thread that opens the files: {error}", path=path) from error
    before, waited, looked = 0, 0.0, time.monotonic()
    try:
        while not over.wait(min(LOOK, stall)):
            now = time.monotonic()
            # If this process was stopped, the thread that asks was too
            waited += min(now - looked, stall / 2)
            looked = now
            if asked.questions != before:
                before, waited = asked.questions, 0.0
            elif waited >= stall:
                raise stalled(stall, asked.path)
    finally:
        asked.left.set()
        if kept is not None:
            _current.kept = kept if over.is_set() else None  # one that hangs is left behind
            if not over.is_set():
                kept.work.put(None)
    if failure:
        try:
            raise failure[0]
        finally:
            failure.clear()  # or the error's traceback would keep itself alive
    return result[0]
