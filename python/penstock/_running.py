"""A load of the core: how it begins, is waited for and is traced, and what ends it when the process forks or exits."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Sequence

from . import _core
from ._errors import PenstockError
from ._framework import Adapter
from ._late_imports import importing
from ._progress import INTERVAL, Meter
from ._report import Report
from ._request import Request

#: Loads that somebody still has, running or not.
_begun: weakref.WeakSet[_core.Load] = weakref.WeakSet()


def _stop_fills() -> None:
    _core.stop_fills("the process forked", 1)


# A thread that runs during a fork makes Python warn, and the child has none
os.register_at_fork(before=_stop_fills)


@atexit.register
def _end_all() -> None:
    """Ends what still runs when the interpreter exits: a GPU driver that is being torn down must not be called."""
    _core.exiting()
    _core.stop_fills("the process ends", 0)
    for load in _still_there():
        load.close()


def _still_there() -> list[_core.Load]:
    while True:
        try:
            return list(_begun)
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
    together, options, apart = None, request.options, None
    if request.group is not None:
        wanted = selection.part([]) if nothing else selection
        agreed = request.group.agree(wanted, options, request.order, request.device)
        if agreed is not None:
            together, options, apart = agreed
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
            together=together,
            apart=apart,
        )
    except BaseException:
        if together is not None:
            together[1].close()  # a traceback would keep the connections, and they say that this rank is alive
        raise
    _begun.add(load)
    if caller_blocks and not stream and adapter is not None:
        try:
            for first, end in load.grants():  # reads into them begin while the next ones are allocated
                adapter.grant(load, range(first, end))
        except BaseException:
            load.close()
            adapter.let_go()
            raise
    return load


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
