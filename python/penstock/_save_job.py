"""Saves in the background."""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType

from . import _running
from ._errors import CancelledError, PenstockError, StalledError, raise_if_forked
from ._events import NOTHING, Seen
from ._job import copy_of, seconds_of
from ._report import Report
from ._saving import report_of


class SaveJob:
    """A save that runs in the background. ``penstock.save(..., wait=False)`` makes one, and it runs from then on.

    Use it as a context manager, or call `result`, `cancel` or `close`: after each of them nothing is running. A save
    is given up if its job is cancelled, closed or dropped before it is done, or if the interpreter ends. It leaves
    nothing that a reader could see, and the old checkpoint as it was. A job belongs to its process: in a forked child
    every method raises `ForkedError`.
    """

    def __init__(
        self,
        save: _running.RunningSave,
        place: str,
        tensors: int,
        fsync: bool,
        seen: Seen,
        turn: _running.SaveTurn | None = None,
    ) -> None:
        self._owner = os.getpid()
        self._save, self._place = save, place
        self._turn = turn  # later saves to the place wait for it, as long as somebody has this job
        self._tensors, self._fsync = tensors, fsync
        self._cancelled: CancelledError | None = None
        self._copied = False
        self._error: Exception | None = None
        self._report: Report | None = None
        self._seen, self._told = seen, False
        _running.saves(save, place)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the new checkpoint, or file, is there: at most ``timeout`` seconds (None: without limit).

        Returns True if it is there, False if the time is over. Raises the error of a save that failed.
        """
        self._check_process()
        self._raise_again()
        return self._report is not None or self._save.wait(seconds_of(timeout))

    def done(self) -> bool:
        """Whether the save has ended, with success or with an error."""
        self._check_process()
        return self._report is not None or self._error is not None or self._cancelled is not None or self._save.done()

    def copied(self, timeout: float | None = None) -> bool:
        """Waits until all bytes have left the tensors, at most ``timeout`` seconds (None: without limit).

        Returns True if they have: from then on the tensors may change. Without a snapshot that is when every byte is
        written, or confirmed by the server. It is about the tensors of this process. Raises the error of a save that
        failed before. Once it is True it stays so, also if the save fails later or is cancelled.
        """
        self._check_process()
        seconds = seconds_of(timeout)
        if not self._copied and self._report is None:
            self._raise_again()
            self._copied = self._save.copied(seconds)
        return True if self._report is not None else self._copied

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes written, bytes in all), of the files."""
        self._check_process()
        return self._save.progress()

    @property
    def report(self) -> Report:
        """The report of the save. It is incomplete until the save has ended."""
        self._check_process()
        return self._report if self._report is not None else self._report_now()

    def result(self, timeout: float | None = None) -> Report:
        """Waits for the end of the save, and returns its report; each time the same.

        Raises:
            StalledError: (a TimeoutError) the save is not done after ``timeout`` seconds. It goes on.
            CancelledError: the job was cancelled.
            PenstockError: the save failed. Each call raises this error.
        """
        self._check_process()
        if self._report is not None:
            return self._report
        seconds = seconds_of(timeout)
        self._raise_again()
        try:
            ended = self._save.wait(seconds)
        except BaseException as error:
            self._remember(error)
            raise
        if not ended:
            done, total = self._save.progress()
            raise StalledError(
                f"the save to {self._place} is not done after {timeout} s ({done} of {total} bytes are written); it "
                "goes on"
            )
        return self._end()

    def cancel(self) -> None:
        """Gives the save up, and waits until nothing of it runs. `result` then raises `CancelledError`.

        A save that is done by then stays.
        """
        self.close()

    def close(self) -> None:
        """As `cancel`. You may call this more than once. It never raises the error of the save."""
        self._check_process()
        if self._report is not None or self._error is not None:
            return
        self._save.close()
        self._note_copied()
        left = ""
        try:
            ended = self._save.wait(0)  # False: a call of it hangs, and is left behind
        except CancelledError as error:
            ended, left = False, error.message.partition("; ")[2]  # such as: what could not be cleared
        except PenstockError as error:
            self._remember(error)
            return
        if ended:
            self._end()
        elif self._cancelled is None:
            text = f"the save to {self._place} was cancelled before it was done" + f"; {left}" * bool(left)
            self._cancelled = CancelledError(text)
            self._tell(self._cancelled)

    def _note_copied(self) -> None:
        """Remembers if all bytes had left the tensors before the save ended."""
        with suppress(PenstockError):
            self._copied = self._copied or self._save.copied(0)

    def _check_process(self) -> None:
        raise_if_forked(self._owner, "save", "save in the child instead")

    def _report_now(self) -> Report:
        report = report_of(self._save, self._tensors, self._fsync)
        report["files"] = self._save.files()
        return report

    def _end(self) -> Report:
        """The new checkpoint is there."""
        if self._report is None:
            self._report = self._report_now()
            self._save.close()
            self._tell(None)
        return self._report

    def _raise_again(self) -> None:
        if self._error is not None:
            raise copy_of(self._error)
        if self._cancelled is not None:
            raise copy_of(self._cancelled)

    def _remember(self, error: BaseException) -> None:
        """Ends the job with this error."""
        if isinstance(error, Exception):
            # Not the error itself: it will hold the frames of its catcher, and every object in them
            self._error = copy_of(error)
            self._save.close()
            self._note_copied()
            self._tell(error)
        else:
            self.close()

    def _tell(self, error: BaseException | None) -> None:
        """Operators see its end, once."""
        if self._told or self._seen is NOTHING:
            return
        self._told = True
        self._seen.add(self._report if self._report is not None else self._report_now())
        self._seen.end(error)

    def __enter__(self) -> SaveJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
