"""The end of a save of ranks, on a thread of its own.

The thread knows nothing of the job: a job that is dropped gives its save up. What ranks do then, and in which order, is
in `_save_ranks`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from . import _core
from ._errors import InternalError, LimitError, PenstockError
from ._job import copy_of
from ._patience import LOOK, kept_asker

#: Seconds for which a save that is dropped is waited for: the collector may drop it while its thread cannot go on.
_DROPPED = 10.0


class SaveThread:
    """The thread, and how it has ended.

    Args:
        finish: Brings the save to its end. Raises its error.
        leaving: Is left at the end, with the error if there is one.
        give_up: Set when the save is to be given up.
    """

    def __init__(self, finish: Callable[[], object], leaving: ExitStack, give_up: threading.Event) -> None:
        self._work = [(finish, leaving)]
        self.give_up = give_up
        self.over = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-save-ranks", daemon=True)

    def start(self) -> None:
        """Starts it.

        Raises:
            LimitError: there can be no more threads.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            raise LimitError(f"cannot start the thread that ends the save: {error}") from error

    def withdraw(self) -> bool:
        """Takes the work back, after a start that failed or was interrupted. False if the thread has begun it."""
        try:
            self._work.pop()
        except IndexError:
            return False
        self.over.set()
        return True

    def _run(self) -> None:
        try:
            finish, leaving = self._work.pop()
        except IndexError:
            return  # it was withdrawn
        try:
            with kept_asker(), leaving:
                finish()
        except PenstockError as error:
            self.error = copy_of(error)  # not itself: it has the frames of its thread, and every object in them
        except BaseException as error:
            self.error = InternalError(f"the thread that ends the save has failed: {error!r}; please report this")
            self.error.__cause__ = copy_of(error) if isinstance(error, Exception) else None
        finally:
            del finish, leaving
            self.over.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for its end; False if ``timeout`` (seconds) passed first. Ctrl-C works at once, whichever thread the
        kernel tells.
        """
        end = None if timeout is None else time.monotonic() + max(0.0, timeout)
        while not self.over.wait(LOOK if end is None else min(LOOK, max(0.0, end - time.monotonic()))):
            if end is not None and time.monotonic() >= end:
                return False
        return True

    def raise_error(self) -> None:
        """Raises the error of a save that has failed."""
        if self.error is not None:
            raise copy_of(self.error)


class SaveHandle:
    """One rank's save as its `SaveJob` has it. To drop it gives the save up.

    Args:
        core: The save of this rank's files.
        thread: The thread that brings it to its end.
        files: The names of the files of all ranks.
        reads_tensors: False if no byte is read from the caller's tensors any more.
    """

    def __init__(self, core: _core.Save, thread: SaveThread, files: Sequence[str], reads_tensors: bool) -> None:
        self._owner = os.getpid()
        self._core, self._thread, self._files, self._reads_tensors = core, thread, list(files), reads_tensors

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the save; False if ``timeout`` (seconds) passed first. Raises its error."""
        ended = self._thread.wait(timeout)
        if ended:
            self._thread.raise_error()
        return ended

    def done(self) -> bool:
        return self._thread.over.is_set()

    def copied(self, timeout: float | None = None) -> bool:
        """Waits until the tensors may change; False if ``timeout`` (seconds) passed first. Raises the error."""
        if not self._reads_tensors:
            return True
        begun = time.monotonic()
        try:
            return self._core.copied(timeout)
        except PenstockError as error:
            failed = error
        # The thread knows why: another rank, or a server. What it has to clear may take seconds
        if not self._thread.wait(None if timeout is None else timeout - (time.monotonic() - begun)):
            return False
        self._thread.raise_error()
        raise failed

    def progress(self) -> tuple[int, int]:
        return self._core.progress()

    def report(self) -> dict[str, Any]:
        return self._core.report()

    def files(self) -> list[str]:
        return list(self._files)

    def close(self) -> None:
        """Gives the save up if it still runs, and waits until nothing of it runs."""
        self._thread.give_up.set()
        self._thread.wait()

    def __del__(self) -> None:
        with suppress(AttributeError):  # it was not made
            if self._owner == os.getpid():
                self._thread.give_up.set()
                # The collector may run on the thread itself, or on one that answers its questions
                if not threading.current_thread().name.startswith("penstock-"):
                    self._thread.wait(_DROPPED)
