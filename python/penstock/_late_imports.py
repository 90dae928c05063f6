"""Imports that are put off until somebody needs them, and forks.

A child that is forked while another thread imports a module waits for ever when it comes to import it too: Python's
lock of that module belongs to a thread that the child does not have. So a fork waits until such an import is over.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from types import TracebackType

#: Seconds that a fork waits. Longer, and it may be that the import waits for whoever forks.
PATIENCE = 10.0


class Importing:
    """Held while a framework is imported that a load is the first to need."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._forks = threading.local()
        self._after_logging = False
        self._tell_forks()

    def _tell_forks(self) -> None:
        os.register_at_fork(before=self._before, after_in_parent=self._after, after_in_child=self._in_child)

    def __enter__(self) -> None:
        self._lock.acquire()
        if not self._after_logging:
            try:
                self._ask_before_logging()
            except BaseException:
                self._lock.release()
                raise

    def _ask_before_logging(self) -> None:
        # Before a fork those that came last are asked first, and logging holds its lock from then on, which what is
        # imported meanwhile may want: so this comes again after it. Who may not read the standard library any more goes
        # without
        with suppress(ImportError, OSError):
            import logging  # noqa: F401
        self._tell_forks()
        self._after_logging = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def _before(self) -> None:
        held = self._forks.__dict__.setdefault("held", [])
        held.append(None)
        if self._lock.acquire(timeout=PATIENCE):
            held[-1] = self._lock

    def _after(self) -> None:
        held = self._forks.__dict__.get("held")
        lock = held.pop() if held else None
        if lock is not None:
            lock.release()

    def _in_child(self) -> None:
        held = self._forks.__dict__.get("held")
        if not held or held[-1] is None:
            # It is held by a thread that is not here
            self._lock = threading.RLock()
        self._after()


importing = Importing()
