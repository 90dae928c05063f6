"""Streams of ranks that load together: one load of all ranks after the other, each of one window.

Windows are cut where whole tensors end, so they are the same on all ranks, whatever each wants of them. Everything that
a stream leaves in the store lies in a part of its own. So it does not matter in which order ranks go on with several
streams, or when they let go of one.
"""

from __future__ import annotations

import hashlib
import math
import os
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from . import _core, _load
from ._core import Options
from ._errors import CancelledError, PeerError, PenstockError, UnsupportedError, raise_if_forked
from ._framework import Adapter
from ._group import Rendezvous, Watch, say
from ._job import Job
from ._member import Member, new_group
from ._progress import INTERVAL, Meter, Progress
from ._report import Report, merged
from ._request import Request
from ._selection import Selection


def compare(group: Any, checkpoint: Any, options: Options) -> None:
    """Has the ranks of a group compare the versions of their files, before something that they do without each other.

    Raises:
        PeerError: a rank did not come, is gone, or cannot load.
        PlanMismatchError: they have different checkpoints, or versions.
    """
    member = new_group(group)
    if member.size == 1:
        return
    watch = Watch(member)
    try:
        with watch:
            watch.settle(checkpoint._core, options, "compared", "compared with each other")
            # Whoever has them all may go: the others have them too, or hear of it
            watch.confirm()
    finally:
        watch.clean()


class GroupLoads:
    """The loads of one object, each of all ranks of a group. All ranks make theirs in the same order."""

    def __init__(self, group: Any) -> None:
        self.member = new_group(group)
        self._settled: Watch | None = None
        self._lost: int | None = None

    def load(
        self, core: _core.Checkpoint, options: Options, prepare: Callable[[], tuple[Request, Adapter]]
    ) -> dict[str, Any]:
        """One load of all ranks. The others hear what ``prepare`` raises. The first one compares their checkpoints."""
        if self._settled is None:
            watch = Watch(self.member)
            try:
                with watch:
                    watch.settle(core, options, "loads", "loaded by several calls")
            except BaseException:
                watch.drop()
                raise
            self._settled = watch
        try:
            with Rendezvous(self.member, self._settled) as rendezvous:
                request, adapter = prepare()
                return _load.load(request._replace(group=rendezvous), adapter, False)
        except Exception as error:
            blamed = self._settled.blamed(error)
            if isinstance(blamed, PeerError):
                self._lost = blamed.rank
            if blamed is error:
                raise
            raise blamed from error

    def say(self, error: BaseException) -> None:
        """Tells the others why this rank does not come to their next load."""
        say(self.member, error)

    def close(self) -> None:
        """There are no more loads. Idempotent."""
        if self._settled is not None:
            self._settled.clean(self._lost)


class _Window(NamedTuple):
    """The tensors of one load."""

    nbytes: int
    """Bytes of the whole tensors."""
    wants: list[int]
    """This rank's, in the order of reading."""


def _windows(selection: Selection, sequence: Sequence[int], most: int) -> list[_Window]:
    """Cuts the tensors ``sequence`` into windows of at most ``most`` bytes, or of one tensor."""
    wants = {selection.tensor(want): want for want in range(len(selection))}
    windows: list[_Window] = []
    nbytes, mine = 0, list[int]()
    for tensor in sequence:
        _, _, _, _, begin, end = selection.core.info(tensor)
        if nbytes and nbytes + end - begin > most:
            windows.append(_Window(nbytes, mine))
            nbytes, mine = 0, []
        nbytes += end - begin
        if tensor in wants:
            mine.append(wants[tensor])
    windows.append(_Window(nbytes, mine))
    return windows


def _nbytes(selection: Selection) -> int:
    """Bytes of what is wanted."""
    total = 0
    for want in range(len(selection)):
        _, _, shape, _, begin, end = selection.core.info(selection.tensor(want))
        _, part = selection.describe(want)
        total += (end - begin) * math.prod(part) // max(1, math.prod(shape))
    return total


class _Stream(NamedTuple):
    """One stream of one rank."""

    request: Request
    sequence: Sequence[int]
    adapter: Callable[[Selection], Adapter]
    progress: Progress
    ended: Callable[[Report], object]
    member: Member
    watch: Watch


def _start(stream: _Stream, window: _Window) -> Job | Exception:
    """The load of a window, or why there is none: what was loaded before is handed out first."""
    try:
        with Rendezvous(stream.member, stream.watch) as rendezvous:
            part = stream.request.selection.part(window.wants)
            request = stream.request._replace(selection=part, group=rendezvous, seen=stream.request.seen.part())
            return Job(request, stream.adapter(part))
    except Exception as error:
        return stream.watch.blamed(error)


def _result(job: Job | Exception | None, meter: Meter, before: int, total: int) -> tuple[dict[str, Any], Report]:
    assert job is not None
    if isinstance(job, Exception):
        raise job
    try:
        while not job.wait(INTERVAL if meter.active else None):
            meter.update(before + job.progress[0], total)
        return job.result(), job.report
    except BaseException:
        job.cancel()  # which the others hear, if they do not know yet
        raise


def _steps(stream: _Stream) -> Generator[tuple[str, Any], None, None]:
    owner, most = os.getpid(), stream.request.options.window
    selection = stream.request.selection
    reports: list[Report] = []
    job: Job | Exception | None = None
    following: _Window | None = None
    told = False  # the others know, or need not know, that this rank goes on no more
    lost: int | None = None
    try:
        with stream.request.seen as seen, Meter(stream.progress, "load", seen) as meter:
            told = True
            with stream.watch:
                # One half is handed out while the other one is read
                windows = _windows(selection, stream.sequence, max(1, most // 2))
                mine = sum(1 << number for number, window in enumerate(windows) if window.wants)
                meant = f"stream {hashlib.sha256(array('I', stream.sequence).tobytes()).hexdigest()[:16]} {most}"
                by = f"{len(stream.sequence)} tensors by {stream.request.order}"
                described = f"a stream of {by}, with a window of {most} bytes"
                wanted = stream.watch.settle(selection.core, stream.request.options, meant, described, mine)
            windows = [window for number, window in enumerate(windows) if wanted >> number & 1] or windows[:1]
            done, total = 0, _nbytes(selection) if meter.active else 0
            job = _start(stream, windows[0])
            for number, window in enumerate(windows):
                following = windows[number + 1] if number + 1 < len(windows) else None
                told = True
                tensors, report = _result(job, meter, done, total)
                job, told = None, False
                reports.append(report)
                done += report["nbytes"]
                meter.update(done, total, final=following is None)
                if following is not None and window.nbytes + following.nbytes <= most:
                    told = True
                    job = _start(stream, following)
                    told = isinstance(job, Exception)
                for want in window.wants:
                    # One that is gone may have needed nobody any more. One that was stopped is waited for
                    if following is not None and (stopped := stream.watch.stopped()) is not None:
                        raise stopped
                    name = selection.names[want]
                    yield name, tensors.pop(name)
                    raise_if_forked(owner, "stream")
                if following is not None and job is None:
                    told = True
                    job = _start(stream, following)
            told = True
            stream.ended(merged(reports, sum(r["seconds"] for r in reports), sum(r["cpu_seconds"] for r in reports)))
    except PeerError as error:
        lost = error.rank
        raise
    finally:
        if os.getpid() == owner:
            if not told:
                _leave(stream, job, following)
            stream.watch.clean(lost)


def _leave(stream: _Stream, job: Job | Exception | None, following: _Window | None) -> None:
    """Tells the other ranks that this one goes on no more."""
    ended = False
    if isinstance(job, Job):
        job.cancel()
        with suppress(PenstockError):
            ended = job._load.wait(0)
    # A load that was under way has failed, and the others hear that. Else they are about to wait for this rank
    if following is not None and (job is None or ended):
        say(stream.member, CancelledError("its iterator was closed before the end"))


class GroupStream:
    """An iterator over (name, tensor), as `Checkpoint.stream` gives it where several ranks load together."""

    def __init__(self, stream: _Stream) -> None:
        self._owner = os.getpid()
        self._watch: Watch | None = stream.watch
        # Its frame must not refer to this object, or dropping this would not end it
        self._steps = _steps(stream)

    def __iter__(self) -> GroupStream:
        return self

    def __next__(self) -> tuple[str, Any]:
        self._watch = None
        return next(self._steps)

    def close(self) -> None:
        """Stops it. The other ranks get what all have read, and then a PeerError. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None and os.getpid() == self._owner:
            watch._fail(CancelledError("its iterator was closed before it began"))
        self._steps.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


def stream(
    group: Any,
    prepare: Callable[[], Request],
    adapter: Callable[[Selection], Adapter],
    progress: Progress,
    ended: Callable[[Report], object],
    sequence: Sequence[int] | None = None,
) -> Iterator[tuple[str, Any]]:
    """The stream of one rank of a group. Every rank makes one, in the same order as its loads.

    Args:
        prepare: Makes sense of the arguments of the stream. The other ranks hear what it raises.
        adapter: Makes the adapter for a part of what is wanted.
        ended: Gets the report of the whole.
        sequence: Numbers of the tensors among which those that ranks want are, in the order of reading; None: all.
    """
    member = new_group(group)
    watch = Watch(member)
    with watch:
        request = prepare()
        if request.finish is not None and member.size > 1:
            text = "stream with group=: slices= has a list of slices in one dimension; load such tensors with load"
            raise UnsupportedError(text)
    if member.size == 1:
        return _load.stream(request, adapter(request.selection), progress)
    if sequence is None:
        sequence = request.selection.core.in_order(request.order)
    return GroupStream(_Stream(request, sequence, adapter, progress, ended, member, watch))
