"""Imports that are put off until somebody needs them, and forks.

A child that is forked while another thread imports a module waits for ever when it comes to import it too: Python's
lock of that module belongs to a thread that the child does not have. So a fork waits until such an import is over.

Python calls the hooks before a fork in reverse order of registration. The hook of `logging` takes a lock that an import
may need, and that `logging` itself needs to be imported. If it was registered after ours, which happens where a load is
the first that needs `logging`, it has taken that lock when ours is called. Ours lets go of it while it waits. (Or this
module would have to import `logging` first, for 5 ms: a quarter of ``import penstock``.)
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

#: Seconds that a fork waits. Longer, and it may be that the import waits for the thread that forks.
PATIENCE = 10.0
#: Seconds between two looks.
LOOK = 0.002


class _Import:
    """One import: a context manager to be entered once. It also ends when nothing refers to it any more, because Ctrl-C
    can come in the first line of ``__exit__``."""

    __slots__ = ("_of",)

    def __init__(self, of: Importing) -> None:
        self._of = of

    def __enter__(self) -> None:
        try:
            self._of.enter(self)
        except BaseException:
            self._of.leave(self)
            raise

    def __exit__(self, *_: object) -> None:
        self._of.leave(self)

    def __del__(self) -> None:
        self._of.leave(self)


class Importing:
    """``with importing():`` stands around the import of a framework that a load is the first to need.

    Several threads may be in it at once: Python itself keeps them apart, module by module, and sees where they would
    wait for each other. Only forks and imports exclude each other. There is no lock in it, because signal handlers,
    ``__del__`` and whole programs run in the middle of an import: each step is one operation on a dict.
    """

    def __init__(self) -> None:
        # The thread of each import; and of each fork, with how many it is in
        self._imports: dict[int, int] = {}
        self._forks: dict[int, int] = {}
        os.register_at_fork(before=self._before, after_in_parent=self._after, after_in_child=self._in_child)

    def __call__(self) -> _Import:
        return _Import(self)

    def enter(self, one: _Import) -> None:
        """Begins an import; waits while another thread forks."""
        me, patience = threading.get_ident(), time.monotonic() + PATIENCE
        inside = me in list(self._imports.values())  # an import of the same thread: the fork waits for that
        while True:
            # First said, then looked: of this thread and one that begins to fork, one sees the other
            self._imports[id(one)] = me
            if inside or not _others(self._forks, me) or time.monotonic() > patience:
                return
            self.leave(one)
            time.sleep(LOOK)

    def leave(self, one: _Import) -> None:
        """Ends an import. Idempotent."""
        self._imports.pop(id(one), None)

    def _before(self) -> None:
        me, patience = threading.get_ident(), time.monotonic() + PATIENCE
        self._forks[me] = self._forks.get(me, 0) + 1
        if _others(self._imports.values(), me):
            with _logging_unlocked():
                while _others(self._imports.values(), me) and time.monotonic() < patience:
                    time.sleep(LOOK)

    def _after(self) -> None:
        me = threading.get_ident()
        if self._forks.get(me, 0) > 1:
            self._forks[me] -= 1
        else:
            self._forks.pop(me, None)

    def _in_child(self) -> None:
        # Other threads are not here
        me = threading.get_ident()
        self._imports = {one: thread for one, thread in self._imports.items() if thread == me}
        self._forks = {thread: count for thread, count in self._forks.items() if thread == me}
        self._after()


def _others(threads: Iterable[int], me: int) -> bool:
    return any(thread != me for thread in list(threads))


@contextmanager
def _logging_unlocked() -> Iterator[None]:
    """Lets go of the lock of `logging` if this thread has it, as it has where the hook of `logging` came first."""
    lock = getattr(sys.modules.get("logging"), "_lock", None)
    if lock is None or not lock._is_owned():
        yield
        return
    lock.release()
    try:
        yield
    finally:
        lock.acquire()


importing = Importing()
