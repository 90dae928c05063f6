"""Imports that are put off until somebody needs them, and forks.

A child that is forked while another thread imports a module waits for ever when it comes to import it too: Python's
lock of that module belongs to a thread that the child does not have. So a fork waits until such an import is over.
"""

from __future__ import annotations

import os
import threading

#: Seconds that a fork waits. Longer, and it may be that the import waits for whoever forks.
PATIENCE = 10.0

importing = threading.RLock()
"""Held while a module is imported that a load or a save is the first to need."""

_of_thread = threading.local()


def _before() -> None:
    _of_thread.held = importing.acquire(timeout=PATIENCE)


def _after() -> None:
    if getattr(_of_thread, "held", False):
        importing.release()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
