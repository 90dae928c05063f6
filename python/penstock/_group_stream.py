"""Streams of ranks that load together: one load of all ranks after the other, each of one window.

Windows are cut where whole tensors end, so they are the same on all ranks, whatever each wants of them. Everything that
a stream leaves in the store lies in a corner of its own. So it does not matter in which order ranks go on with several
streams, or when they let go of one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from . import _core, _load, _running
from ._core import Options
from ._errors import CancelledError, PeerError, PenstockError, UnsupportedError, raise_if_forked
from ._framework import Adapter
from ._group import (
    _PROTOCOL,
    Gathering,
    Member,
    _address,
    _compare,
    _compare_keys,
    _Entry,
    _host,
    _identity,
    _pass,
    _pulses,
    left_in,
    member_of,
)
from ._job import Job
from ._progress import INTERVAL, Meter, Progress
from ._rendezvous import Rendezvous, Store
from ._report import Report, merged
from ._request import Request
from ._selection import Selection

#: Seconds between two looks at the connections.
_LOOK = 0.05


class _Corner:
    """A part of a store, for keys that nobody else has."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.underlying_store = store
        self.penstock_whole = getattr(store, "penstock_whole", store)
        self._prefix = prefix
        self._mine: set[str] = set()
        """The keys that this rank has made there."""
        self._left = False

    def set(self, key: str, value: Any) -> None:
        self._mine.add(key)
        self.underlying_store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        return self.underlying_store.get(self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        self._mine.add(key)
        return self.underlying_store.add(self._prefix + key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.underlying_store.check([self._prefix + key for key in keys])

    def has_extended_api(self) -> bool:
        return bool(getattr(self.underlying_store, "has_extended_api", bool)())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        store: Any = self.underlying_store
        return list(store.multi_get([self._prefix + key for key in keys]))

    def delete_key(self, key: str) -> None:
        self._mine.discard(key)
        delete = getattr(self.underlying_store, "delete_key", None)
        if delete is not None:
            delete(self._prefix + key)

    def penstock_forget(self, keys: Sequence[str]) -> None:
        """Another rank deletes these keys."""
        self._mine.difference_update(keys)

    def leave(self, rank: int, size: int, limit: float) -> None:
        """This rank does nothing more here. The last one to say so deletes all that is left. Idempotent."""
        if self._left or getattr(self.underlying_store, "delete_key", None) is None:
            return
        self._left = True
        store = Rendezvous(self.underlying_store, limit)
        over = f"{self._prefix}over"
        with suppress(PenstockError):  # the store may be gone, and takes them with it
            store.set(f"{over}/{rank}", json.dumps(sorted(self._mine)))
            if store.add(over, 1) < size:
                return
            lists = [f"{over}/{each}" for each in range(size)]
            made = {key for keys in store.get_all(lists) for key in json.loads(keys)}
            store.delete([*(self._prefix + key for key in sorted(made)), *lists, over])


def corner(group: Any) -> Member:
    """A group of the same ranks, with a part of the store for itself. All ranks make theirs in the same order."""
    store, rank, size = member_of(group)
    number = Rendezvous(store, Options().peer_timeout).add(f"penstock/corners/{rank}", 1) if size > 1 else 0
    return Member(_Corner(store, f"penstock/corner/{number}/"), rank, size)


def leave(member: Member, limit: float | None = None) -> None:
    """Says that this rank does nothing more in its group's corner. When all have, the store has nothing of it."""
    if member.size > 1 and isinstance(member.store, _Corner):
        member.store.leave(member.rank, member.size, Options().peer_timeout if limit is None else limit)


def say(member: Member, error: BaseException) -> None:
    """Tells the other ranks why this one does not come to their next load."""
    if member.size > 1:
        with suppress(BaseException), Gathering(member):
            raise error


class _Settling(Gathering):
    """The agreement of ranks before the first of several loads."""

    watch: _core.Standing | None = None
    """Connections to the others, and ``hosts`` theirs, once all have come."""
    lookout: _core.Lookout | None = None
    """The lookout, which notices a rank that was stopped."""
    hosts: Sequence[str] = ()

    def settle(self, core: _core.Checkpoint, options: Options, meant: str, described: str, mine: int = 0) -> int:
        """Compares what all ranks mean. ``described`` says in an error what ``meant`` stands for.

        Returns the bits that any rank has in ``mine``.

        Raises:
            PeerError: a rank did not come, or cannot load.
            PlanMismatchError: ranks have different checkpoints, or mean something else.
        """
        described = f"{len(core)} tensors, {core.nbytes()} bytes in {len(core.files())} files; {described}"
        return self.meet(options, (f"{core.fingerprint():016x}", _identity(core), described, meant, f"{mine:x}"), core)

    def meet(
        self, options: Options, means: tuple[str, str, str, str, str], core: _core.Checkpoint | None = None
    ) -> int:
        """Waits for all ranks, and watches them from then on.

        ``means``: their checkpoint and its identity; what they do, in words and as compared; a number with bits.
        """
        deadline = time.monotonic() + options.join_timeout
        _running.watches(self, f"rank {self._rank} of {self._size} ranks that load together, which watches the others")
        address, token = _address(self._store, options), os.urandom(16)
        known = _pass(self._rank, token, options)
        self.watch = _core.Standing(address, options, known)
        self.lookout = _core.Lookout(address, options, known)
        checkpoint, identity, described, order, wants = means
        entry = _Entry(
            _PROTOCOL, _host(), address, self.watch.port, self.lookout.pulse, token.hex(), known.mark(), checkpoint,
            identity, described, order, wants, options.peer_timeout, options.exchange, "", "", options.scope,
        )  # fmt: skip
        self._store.set(self._key(self._rank), json.dumps(entry))
        left_in(self._store.store, self._rank).append((self._prefix, None))  # the first load deletes it
        entries = self._entries(deadline)
        _compare_keys(entries, self._rank, known)
        _compare(entries)
        self.hosts = [entry.host for entry in entries]
        # From here on a rank that is stopped is noticed
        silence = max(entry.silence for entry in entries)
        self.lookout.watch(_pulses(entries), silence)
        self._companies = (*self._companies, self)
        if core is not None and len({entry.identity for entry in entries}) > 1:
            self._compare_contents(core, entries, deadline, options.stall_timeout)
        addresses = [(entry.address, entry.port) for entry in entries]
        named, seconds = bytes.fromhex(entries[0].token), max(1.0, deadline - time.monotonic())
        self.watch.join(addresses, _pulses(entries), named, seconds, silence, self._go_on)
        self._over = True
        found = 0
        for entry in entries:
            found |= int(entry.wants, 16)
        return found

    def closed(self) -> dict[int, int | None]:
        """Ranks that have closed their connections, and for which rank each of them has given up."""
        return dict(self.watch.closed()) if self.watch is not None else {}

    def stopped(self) -> PeerError | None:
        """The error for a rank that was stopped."""
        try:
            if self.lookout is not None:
                self.lookout.look()
        except PeerError as error:
            host = self.hosts[error.rank] if error.rank is not None and error.rank < len(self.hosts) else error.host
            why = error.why or str(error)
            return PeerError(f"rank {error.rank} ({host}) {why}", rank=error.rank, host=host, why=why)
        return None

    def gone(self, patience: float = 0.0) -> PeerError | None:
        """The error for a rank that is gone, or was stopped.

        Those that have given up for another one say so, and it is named.
        """
        if (stopped := self.stopped()) is not None:
            return stopped
        limit = time.monotonic() + patience
        while not (closed := self.closed()) and time.monotonic() < limit:
            time.sleep(_LOOK)
        for rank, blamed in sorted(closed.items(), key=lambda one: (one[1] is not None, one[0])):
            lost = rank if blamed is None else blamed
            why = "is gone: its process has ended, or it has given up"
            text = f"rank {lost} ({self.hosts[lost]}) {why}"
            if lost == self._rank:
                why = f"has given up: it had no sign of life of this rank, {lost}"
                text = f"rank {rank} ({self.hosts[rank]}) {why}"
            elif blamed is not None:
                text = f"{text} (rank {rank} says so)"
            return PeerError(text, rank=lost, host=self.hosts[lost], why=why)
        return None

    def blamed(self, error: Exception) -> Exception:
        """The error to raise for an error of the store: its host may be the rank that is gone."""
        of_store = not isinstance(error, PenstockError) or (isinstance(error, PeerError) and error.rank is None)
        return (self.gone(patience=1.0) if of_store else None) or error

    def drop(self, lost: int | None = None) -> None:
        """Closes the connections. ``lost``: the rank for which this one gives up. Idempotent."""
        if self.watch is not None:
            self.watch.close(lost)
        if self.lookout is not None:
            self.lookout.close()
            self.lookout = None
        _running.watches_no_more(self)

    def clean(self, lost: int | None = None) -> None:
        """Closes the connections, and deletes what only this rank has used in the store. Idempotent.

        ``lost``: the rank for which this one gives up.
        """
        self.drop(lost)
        left_in(self._store.store, self._rank).clear()
        with suppress(PenstockError):
            self._store.delete([f"penstock/loads/{self._rank}"])
        if not self._store.stalled:
            leave(Member(self._store.store, self._rank, self._size), self._store.limit)


def compare(group: Any, checkpoint: Any, options: Options) -> None:
    """Has the ranks of a group compare the versions of their files, before something that they do without each other.

    Raises:
        PeerError: a rank did not come, is gone, or cannot load.
        PlanMismatchError: they have different checkpoints, or versions.
    """
    member = corner(group)
    if member.size == 1:
        return
    together = _Settling(member)
    try:
        with together:
            together.settle(checkpoint._core, options, "compared", "compared with each other")
            # Whoever has them all may go: the others have them too, or hear of it
            together.confirm()
    finally:
        together.clean()


class _Meeting(Gathering):
    """A load of ranks that have settled, before it begins: a rank that is gone is not waited for."""

    def __init__(self, settled: _Settling, member: Member) -> None:
        super().__init__(member, compared=True)
        self._companies = (*self._companies, settled)


class Company:
    """The ranks of one object whose calls are loads of them all. All ranks make theirs in the same order."""

    def __init__(self, group: Any) -> None:
        self.member = corner(group)
        self._settled: _Settling | None = None
        self._lost: int | None = None

    def load(
        self, core: _core.Checkpoint, options: Options, prepare: Callable[[], tuple[Request, Adapter]]
    ) -> dict[str, Any]:
        """One load of all ranks. The others hear what ``prepare`` raises. The first one compares their checkpoints."""
        if self._settled is None:
            together = _Settling(self.member)
            try:
                with together:
                    together.settle(core, options, "loads", "loaded by several calls")
            except BaseException:
                together.drop()
                raise
            self._settled = together
        try:
            with _Meeting(self._settled, self.member) as meeting:
                request, adapter = prepare()
                return _load.load(request._replace(group=meeting), adapter, False)
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


class _Plan(NamedTuple):
    """The plan of a stream."""

    request: Request
    sequence: Sequence[int]
    adapter: Callable[[Selection], Adapter]
    progress: Progress
    ended: Callable[[Report], object]
    member: Member
    together: _Settling


def _start(plan: _Plan, window: _Window) -> Job | Exception:
    """The load of a window, or why there is none: what was loaded before is handed out first."""
    try:
        with _Meeting(plan.together, plan.member) as together:
            part = plan.request.selection.part(window.wants)
            request = plan.request._replace(selection=part, group=together, seen=plan.request.seen.part())
            return Job(request, plan.adapter(part))
    except Exception as error:
        return plan.together.blamed(error)


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


def _steps(plan: _Plan) -> Generator[tuple[str, Any], None, None]:
    owner, most = os.getpid(), plan.request.options.window
    selection = plan.request.selection
    reports: list[Report] = []
    job: Job | Exception | None = None
    following: _Window | None = None
    told = False  # the others know, or need not know, that this rank goes on no more
    lost: int | None = None
    try:
        with plan.request.seen as seen, Meter(plan.progress, "load", seen) as meter:
            told = True
            with plan.together:
                # One half is handed out while the other one is read
                windows = _windows(selection, plan.sequence, max(1, most // 2))
                mine = sum(1 << number for number, window in enumerate(windows) if window.wants)
                meant = f"stream {hashlib.sha256(array('I', plan.sequence).tobytes()).hexdigest()[:16]} {most}"
                described = (
                    f"a stream of {len(plan.sequence)} tensors by {plan.request.order}, with a window of {most} bytes"
                )
                wanted = plan.together.settle(selection.core, plan.request.options, meant, described, mine)
            windows = [window for number, window in enumerate(windows) if wanted >> number & 1] or windows[:1]
            done, total = 0, _nbytes(selection) if meter.active else 0
            job = _start(plan, windows[0])
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
                    job = _start(plan, following)
                    told = isinstance(job, Exception)
                for want in window.wants:
                    # One that is gone may have needed nobody any more. One that was stopped is waited for
                    if following is not None and (stopped := plan.together.stopped()) is not None:
                        raise stopped
                    name = selection.names[want]
                    yield name, tensors.pop(name)
                    raise_if_forked(owner, "stream")
                if following is not None and job is None:
                    told = True
                    job = _start(plan, following)
            told = True
            plan.ended(merged(reports, sum(r["seconds"] for r in reports), sum(r["cpu_seconds"] for r in reports)))
    except PeerError as error:
        lost = error.rank
        raise
    finally:
        if os.getpid() == owner:
            if not told:
                _leave(plan, job, following)
            plan.together.clean(lost)


def _leave(plan: _Plan, job: Job | Exception | None, following: _Window | None) -> None:
    """Tells the other ranks that this one goes on no more."""
    ended = False
    if isinstance(job, Job):
        job.cancel()
        with suppress(PenstockError):
            ended = job._load.wait(0)
    # A load that was under way has failed, and the others hear that. Else they are about to wait for this rank
    if following is not None and (job is None or ended):
        say(plan.member, CancelledError("its iterator was closed before the end"))


class GroupStream:
    """An iterator over (name, tensor), as `Checkpoint.stream` gives it where several ranks load together."""

    def __init__(self, plan: _Plan) -> None:
        self._owner = os.getpid()
        self._together: _Settling | None = plan.together
        # Its frame must not refer to this object, or dropping this would not end it
        self._steps = _steps(plan)

    def __iter__(self) -> GroupStream:
        return self

    def __next__(self) -> tuple[str, Any]:
        self._together = None
        return next(self._steps)

    def close(self) -> None:
        """Stops it. The other ranks get what all have read, and then a PeerError. Idempotent."""
        together, self._together = self._together, None
        if together is not None and os.getpid() == self._owner:
            together._fail(CancelledError("its iterator was closed before it began"))
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
    member = corner(group)
    together = _Settling(member)
    with together:
        request = prepare()
        if request.finish is not None and member.size > 1:
            text = "stream with group=: slices= has a list of slices in one dimension; load such tensors with load"
            raise UnsupportedError(text)
    if member.size == 1:
        return _load.stream(request, adapter(request.selection), progress)
    if sequence is None:
        sequence = request.selection.core.in_order(request.order)
    return GroupStream(_Plan(request, sequence, adapter, progress, ended, member, together))
