"""A load of the core: how it begins, is waited for and is traced, and what ends it when the process forks or exits."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from . import _core
from ._errors import PenstockError
from ._framework import Adapter
from ._late_imports import importing
from ._paths import without_secrets
from ._progress import INTERVAL, Meter
from ._report import Report
from ._request import Request

K = TypeVar("K")
V = TypeVar("V")
#: Seconds between two looks at the saves that are waited for.
_LOOK = 0.05


class _Begun:
    """The words for a load in a message. No `NamedTuple`: its annotations would be compiled at each import."""

    __slots__ = ("core", "device", "stream")

    def __init__(self, core: _core.Checkpoint, device: str, stream: bool) -> None:
        self.core, self.device, self.stream = core, device, stream


Target = tuple[str, str]
"""The folder of a checkpoint and its name: equal for two saves that would remove each other's files."""


class Ending(Protocol):
    """Work in the background that comes to an end."""

    def done(self) -> bool: ...


class SaveTurn:
    """One save of this process to the folder of a checkpoint, from when it has come until it is over."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._has_returned = False
        self._save: RunningSave | None = None

    def goes_on(self, save: RunningSave) -> None:
        """The save goes on in the background after its call has returned."""
        self._save = save
        saves_to(self, self._target, of_ranks=False)

    def returns(self) -> None:
        """The call returns."""
        self._has_returned = True

    def done(self) -> bool:
        """True if the save is over."""
        return self._has_returned if self._save is None else self._save.done()


class RunningSave(Protocol):
    """A save in the background: that of one process is the core's own."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def done(self) -> bool: ...
    def copied(self, timeout: float | None = None) -> bool: ...
    def progress(self) -> tuple[int, int]: ...
    def close(self) -> None: ...
    def files(self) -> list[str]: ...
    def report(self) -> dict[str, Any]: ...


#: Loads that somebody still has, running or not.
_begun: weakref.WeakKeyDictionary[_core.Load, _Begun] = weakref.WeakKeyDictionary()
#: Streams that were not closed and have not come to their end.
_streams: weakref.WeakSet[_core.Load] = weakref.WeakSet()
#: Saves in the background that somebody still has, with their places.
_saves: weakref.WeakKeyDictionary[RunningSave, str] = weakref.WeakKeyDictionary()
#: Saves that are not over: their targets, True for one of ranks, and the thread whose call they end in (0: they run in
#: the background). See `turn_to` and `await_saves_to`.
_targets: weakref.WeakKeyDictionary[Ending, tuple[Target, bool, int]] = weakref.WeakKeyDictionary()
#: Held while a save looks for earlier ones, and takes its place behind them. A signal handler of the thread may save.
_places = threading.RLock()
#: Ranks that watch each other, with what they do in words.
_watches: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
#: Other work that is under way, by a number.
_others: dict[int, str] = {}
_numbers = itertools.count()
#: Functions that free something that other modules keep between loads.
keepers: list[Callable[[], None]] = []


def _stop_fills() -> None:
    _core.stop_fills("the process forked", 1)


def _forget() -> None:
    """In a forked child: what is under way there is the parent's."""
    global _places
    _places = threading.RLock()
    _core.leave_cache_to_parent()
    for known in (_begun, _streams, _saves, _targets, _watches, _others):
        known.clear()


# A thread that runs during a fork makes Python warn, and the child has none
os.register_at_fork(before=_stop_fills, after_in_child=_forget)


@atexit.register
def _end_all() -> None:
    """Ends what still runs when the interpreter exits: a GPU driver that is being torn down must not be called."""
    _core.exiting()
    _core.stop_fills("the process ends", 0)
    for load, _ in _still_there(_begun):
        load.close()
    given_up = []
    for save, place in _still_there(_saves):
        runs = not save.done()
        save.close()
        if runs and not _is_there(save):
            given_up.append(place)
    for place in given_up:  # a warning may be an error
        text = f"the save to {place} was given up, because the program ended before it was done: wait for its job"
        warnings.warn(text, RuntimeWarning, stacklevel=1)


def _is_there(save: RunningSave) -> bool:
    """True if a save that was closed had come to its end."""
    try:
        return save.wait(0)
    except PenstockError:
        return False


def _still_there(those: weakref.WeakKeyDictionary[K, V]) -> list[tuple[K, V]]:
    while True:
        try:
            return list(those.items())
        except RuntimeError:  # a daemon thread has begun one meanwhile
            continue


def begin(
    request: Request,
    adapter: Adapter | None,
    *,
    stream: bool = False,
    into: Sequence[tuple[int, int]] | None = None,
    strides: Sequence[tuple[int, Sequence[tuple[int, int]]]] | None = None,
    casts: Sequence[tuple[int, str]] | None = None,
    keep: object = None,
    fence: int = 0,
) -> _core.Load:
    """Starts a load in the core. The caller must close it."""
    selection, nothing = request.selection, request.device.is_meta
    caller_blocks = adapter is not None and adapter.caller_blocks
    exchange, options, apart = None, request.options, None
    if request.group is not None:
        wanted = selection.part([]) if nothing else selection
        with under_way("a load of ranks that come together"):
            agreed = request.group.agree(wanted, options, request.order, request.device)
        if agreed is not None:
            exchange, options, apart = agreed
    try:
        load = _core.Load.start(
            selection.core,
            options,
            wants=[] if nothing else selection.wants,
            regions=None if nothing else selection.regions,
            device=request.device.of_core,
            order=request.order,
            stream=stream,
            caller_blocks=caller_blocks,
            into=into,
            strides=strides,
            casts=casts,
            keep=keep,
            fence=fence,
            dlpack_device=None if adapter is None else adapter.dlpack_device,
            misaligned=adapter is not None and adapter.misaligned,
            exchange=exchange,
            apart=apart,
        )
    except BaseException:
        if exchange is not None:
            exchange[1].close()  # a traceback would keep the connections, and they say that this rank is alive
        raise
    _begun[load] = _Begun(selection.core, request.device.of_core, stream)
    if exchange is None and load.planned()[1]:
        with importing():
            from ._unwanted import say_planned
        say_planned(load, request, apart)
    if stream:
        _streams.add(load)
    if caller_blocks and not stream and adapter is not None:
        try:
            for first, end in load.grants():  # reads into them begin while the next ones are allocated
                adapter.grant(load, range(first, end))
        except BaseException:
            load.close()
            adapter.let_go()
            raise
    return load


def over(stream: _core.Load) -> None:
    """This stream was closed, or has come to its end."""
    _streams.discard(stream)


def saves(save: RunningSave, place: str) -> None:
    """This save runs in the background."""
    _saves[save] = place


def saves_to(save: Ending, target: Target, *, of_ranks: bool, thread: int = 0) -> None:
    """This save to the folder of a checkpoint runs: in a call of ``thread``, or in the background."""
    _targets[save] = (target, of_ranks, thread)


def _earlier(target: Target, only_of_ranks: bool) -> list[weakref.ref[Ending]]:
    """The saves to this target that run. Not those in whose call this thread is: they cannot end before."""
    here = threading.get_ident()
    return [
        weakref.ref(save)
        for save, (to, of_ranks, thread) in _still_there(_targets)
        if to == target and (of_ranks or not only_of_ranks) and thread != here
    ]


def _await(saves: list[weakref.ref[Ending]], go_on: Callable[[], object]) -> None:
    # A job that is dropped meanwhile gives its save up: nothing here may keep it
    for save in saves:
        while (runs := save()) is not None and not runs.done():
            del runs
            go_on()
            time.sleep(_LOOK)


def await_saves_to(target: Target, go_on: Callable[[], object]) -> None:
    """Waits for the saves of this process to this target, in the background and in calls of other threads: a later one
    would remove their files before they are visible.

    Args:
        go_on: Called again and again meanwhile; it may raise.
    """
    _await(_earlier(target, only_of_ranks=False), go_on)


@contextmanager
def turn_to(target: Target, *, only_of_ranks: bool) -> Iterator[SaveTurn]:
    """The same for a save that is not of ranks; later ones wait for it. Saves of ranks may come in another order on
    each rank, so one takes no place before all of its ranks have come.

    Args:
        only_of_ranks: Waits for saves of ranks only.
    """
    own = SaveTurn(target)
    try:
        with _places:
            earlier = _earlier(target, only_of_ranks)
            saves_to(own, target, of_ranks=False, thread=threading.get_ident())
        _await(earlier, lambda: None)
        yield own
    finally:
        own.returns()


def watches(watch: object, what: str) -> None:
    """These ranks watch each other from now on, until `watches_no_more`."""
    _watches[watch] = what


def watches_no_more(watch: object) -> None:
    """These ranks do not watch each other any more. Idempotent."""
    _watches.pop(watch, None)


@contextmanager
def under_way(what: str) -> Iterator[None]:
    """Something is under way that is no load, as long as the context lasts."""
    key = next(_numbers)
    _others[key] = what
    try:
        yield
    finally:
        _others.pop(key, None)


def all_under_way() -> list[str]:
    """The work under way in this process, in words: loads, open streams, ranks that watch each other, saves."""
    found = []
    for load, begun in _still_there(_begun):
        if load in _streams or not load.done():
            first, *more = begun.core.files()
            place = without_secrets(first) + f" and {len(more)} more files" * bool(more)
            found.append(f"{'an open stream' if begun.stream else 'a load'} of {place} to {begun.device}")
    found += [f"a save to {place}" for save, place in _still_there(_saves) if not save.done()]
    found += [what for _, what in _still_there(_watches)]
    found += list(_others.values())
    if leased := _core.under_way()[0]:
        found.append(f"{leased} loads of an engine that copies out of mapped files")
    return found


def close_ended() -> None:
    """Waits for the threads of loads and saves that have ended."""
    for load, _ in _still_there(_begun):
        if load.done():
            load.close()
    for save, _ in _still_there(_saves):
        if save.done():
            save.close()


def write_trace(load: _core.Load, report: Report) -> None:
    """Writes the trace of a load that asked for one. Where that fails the tensors are there all the same: a warning."""
    if load.traced:
        with importing():
            import json  # one load in a thousand

        try:
            load.write_trace(json.dumps(report, default=str))
        except (PenstockError, OSError) as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)


def await_load(load: _core.Load, meter: Meter) -> None:
    """Waits for the end of the load, showing its progress. Raises its error."""
    while not load.wait(INTERVAL if meter.active else None):
        meter.update(*load.progress())
    meter.update(*load.progress(), final=True)
