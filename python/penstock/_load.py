"""Loads on the thread of their caller: in one go, or as a stream."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from . import _running
from ._collector import collector_paused
from ._errors import raise_if_forked
from ._events import NOTHING
from ._framework import Adapter
from ._job import Job
from ._progress import INTERVAL, Meter, Progress
from ._report import Report, report_of
from ._request import Request


def load(request: Request, adapter: Adapter, progress: Progress) -> dict[str, Any]:
    """Every want's tensor by name."""
    if adapter.casts and request.group is None:
        # As a stream, so that at no time more than the window exists in both dtypes
        start = time.perf_counter()
        reports: list[Report] = []
        arrived = dict(stream(request, adapter, progress, reports, counted=False))
        for report in reports:
            report.handed_out(max(0.0, time.perf_counter() - start - report["seconds"]), cast=adapter.casts)
            request.seen.add(report)
        return {name: arrived[name] for name in request.selection.names}
    with Meter(progress, "load", request.seen) as meter, Job(request, adapter) as job:
        _running.await_load(job._load, meter)
        # Until the tensors are the caller's: a collection just before would go through all of them, and find nothing
        with collector_paused():
            return job.result()


def stream(
    request: Request, adapter: Adapter, progress: Progress, reports: list[Report] | None = None, *, counted: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yields (name, tensor) as tensors become ready; blocks are granted on the thread that iterates.

    ``reports`` gets the report of this load: another thread may have ended a load of the checkpoint since.
    ``counted``: what operators see of the request ends here, with this report. The caller adds to it otherwise.
    """
    owner, names, finish = os.getpid(), request.selection.names, request.finish
    with request.seen if counted else NOTHING, Meter(progress, "load", request.seen) as meter:
        load, over = _running.begin(request, adapter, stream=True), False
        try:
            if request.device.is_meta:
                for number, tensor in enumerate(adapter.tensors(load, range(len(names)))):
                    complete, tensor = (True, tensor) if finish is None else finish.add(number, tensor)
                    if complete:
                        yield names[number], adapter.cast(tensor)
            while True:
                want = load.next(INTERVAL if meter.active else None)
                if want is None:
                    break
                if meter.active:
                    meter.update(*load.progress())
                if want is True:
                    adapter.grant(load, load.wanted_blocks())
                    continue
                if want is False:
                    continue
                [tensor] = adapter.tensors(load, [want])
                load.take(want)
                if adapter.casts:
                    tensor = adapter.cast(tensor)
                if finish is not None:
                    complete, tensor = finish.add(want, tensor)
                    if not complete:
                        continue
                begun = time.perf_counter() if load.traced else 0.0
                yield names[want], tensor
                del tensor  # or the frame would keep it until the next one is there
                if begun:
                    load.mark("consume", begun, time.perf_counter())
                raise_if_forked(owner, "stream")
            load.wait()
            meter.update(*load.progress(), final=True)
            report = request.checkpoint._ended(load)
            if reports is not None:
                reports.append(report)
            over = True
            if counted:
                request.seen.add(report)
            _running.write_trace(load, report)
        finally:
            if os.getpid() == owner:
                _running.over(load)
                load.let_go()
                adapter.let_go()
                if not over and counted and request.seen is not NOTHING:
                    request.seen.add(report_of(load.report(), request.checkpoint._core))
