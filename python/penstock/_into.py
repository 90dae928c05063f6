"""Loading into tensors that exist already: everything is compared first, then the bytes go to their final place."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from . import _accelerator, _core, _running
from ._collector import collector_paused
from ._destinations import Destination, destinations, is_numpy, is_torch, memory_problems
from ._device import Device
from ._errors import MismatchError, PenstockError
from ._frameworks import make_adapter
from ._load import stream
from ._progress import Meter, Progress
from ._report import Report, merged, report_of
from ._request import Request
from ._selection import Selection

_SHOWN = 10
"""Problems that the text of an error shows; `problems` has all of them."""


def _match(
    selection: Selection, found: list[Destination], strict: bool
) -> tuple[list[tuple[int, Destination]], list[str], list[str]]:
    """((want, destination) pairs, missing names, unexpected names). Raises MismatchError listing all that is wrong."""
    wants = {name: want for want, name in enumerate(selection.names)}
    pairs: list[tuple[int, Destination]] = []
    missing: list[str] = []
    problems: list[str] = []
    known: set[str] = set()
    for to in found:
        present = [name for name in to.names if name in wants]
        known.update(present)
        if not present:
            missing.extend(to.names)
            continue
        name = present[-1]  # as load_state_dict, where of several names for one tensor the last one wins
        if to.problem is not None:
            problems.append(f"{name} {to.problem}")
            continue
        dtype, shape = selection.describe(wants[name])
        if shape != to.shape:
            problems.append(
                f"{name} has shape {list(shape)} in the checkpoint, but {list(to.shape)} in its destination"
            )
        if dtype != to.dtype:
            problems.append(f"{name} is {dtype} in the checkpoint, but {to.dtype} in its destination")
        pairs.append((wants[name], to))
    unexpected = [name for name in selection.names if name not in known]
    problems += memory_problems([to for _, to in pairs])
    if strict:
        problems += [f"{name} is missing: the checkpoint has no such tensor" for name in missing]
        problems += [f"{name} is unexpected: there is no destination for it" for name in unexpected]
    if problems:
        raise _mismatch(selection.core.files(), problems)
    return sorted(pairs, key=lambda pair: pair[0]), missing, unexpected


def _mismatch(files: Sequence[str], problems: list[str]) -> MismatchError:
    """The error for destinations that do not fit. It is made here, so that no frame of its traceback holds it."""
    where = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
    error = MismatchError(
        f"{where}: {len(problems)} problem{'s' * (len(problems) > 1)} with the destinations; nothing was loaded\n  "
        + "\n  ".join(problems[:_SHOWN])
        + f"\n  and {len(problems) - _SHOWN} more: .problems of this error lists all of them"
        * (len(problems) > _SHOWN),
        path=files[0] if files else None,
    )
    error.problems = problems  # type: ignore[attr-defined]
    error.touched = []  # type: ignore[attr-defined]
    return error


class _Part:
    """The load into the destinations of one device that the core fills itself."""

    def __init__(self, request: Request, pairs: list[tuple[int, Destination]], device: Device) -> None:
        self.destinations = [to for _, to in pairs]
        fence, event = (0, None) if device.is_cpu else _accelerator.Accelerator(device).fence()
        part = request.selection.part([want for want, _ in pairs])
        self.load: _core.Load = _running.begin(
            request._replace(selection=part, device=device),
            None,
            into=[(to.address, to.span()) for to in self.destinations],
            strides=[(i, to.strides()) for i, to in enumerate(self.destinations) if not to.contiguous],
            keep=([to.tensor for to in self.destinations], event),
            fence=fence,
        )


def load_into(request: Request, given: Any, strict: bool, progress: Progress) -> Report:
    """Fills the destinations, wherever they are; see `Checkpoint.load_into`."""
    with collector_paused():  # else it goes through all of the model's tensors, several times
        pairs, missing, unexpected = _match(request.selection, destinations(given), strict)
    straight = [(want, to) for want, to in pairs if to.straight]
    roundabout = [(want, to) for want, to in pairs if not to.straight]
    detours = _detours(request, roundabout)
    parts: list[_Part] = []
    reports: list[Report] = []
    copied: list[Destination] = []
    began, cpu = time.perf_counter(), time.process_time()
    try:
        with Meter(progress, "load_into") as meter:
            devices = {to.device for _, to in straight}
            # Where there is nothing to fill, a load of nothing gives its report
            for device in sorted(devices) if devices or roundabout else [request.device]:
                on_it = [(want, to) for want, to in straight if to.device == device]
                parts.append(_Part(request, on_it, device))
            for part in parts:
                _running.await_load(part.load, meter)
            reports += [report_of(part.load.report(), request.checkpoint.warnings) for part in parts]
            for part, report in zip(parts, reports, strict=True):
                _running.write_trace(part.load, report)
        reports += [detour.run(copied) for detour in detours]
        took = time.perf_counter() - began, time.process_time() - cpu
    except BaseException as error:
        for part in parts:
            part.load.close()
        touched = [to for part in parts for to in (part.destinations[i] for i in part.load.touched())] + copied
        _say_touched(error, [name for to in touched for name in to.names])
        raise
    finally:
        for part in parts:
            part.load.close()
    _bump_versions(to.tensor for _, to in straight)
    report = merged(reports, *took)
    report["missing"], report["unexpected"] = missing, unexpected
    report["copied_through"] = [name for _, to in roundabout for name in to.names]
    return report


class _Detour:
    """The load into destinations of one framework on one device that the core cannot fill: through temporary tensors.

    Made before the first byte moves, so that what the framework lacks is found out in time.
    """

    def __init__(self, request: Request, pairs: list[tuple[int, Destination]], framework: str, device: Device) -> None:
        part = request.selection.part([want for want, _ in pairs])
        self._by_name = {request.selection.names[want]: to for want, to in pairs}
        self._request = request._replace(selection=part, device=device)
        self._adapter = make_adapter(framework, part, device, None)

    def run(self, copied: list[Destination]) -> Report:
        """Fills them, a window of them at a time. ``copied`` gets those that are no longer what they were."""
        reports: list[Report] = []
        for name, tensor in stream(self._request, self._adapter, False, reports):
            to = self._by_name[name]
            copied.append(to)
            _copy(to.tensor, tensor)
        return reports[0]


def _detours(request: Request, pairs: list[tuple[int, Destination]]) -> list[_Detour]:
    """The loads that fill these destinations. The core itself can fill none of them."""
    found = []
    for device in sorted({to.device for _, to in pairs}):
        for framework, is_kind in (("pt", is_torch), ("np", is_numpy)):
            those = [(want, to) for want, to in pairs if to.device == device and is_kind(to.tensor)]
            if those:
                found.append(_Detour(request, those, framework, device))
    return found


def _copy(to: Any, tensor: Any) -> None:
    """Copies a loaded tensor into a destination of the same shape and dtype."""
    if is_numpy(to):
        import numpy

        to.view(numpy.ndarray)[...] = tensor  # not by a subclass' own idea of assignment
        return
    import torch

    # An inference tensor may be written to in that mode alone
    with torch.inference_mode() if to.is_inference() else torch.no_grad():
        to.copy_(tensor)


def _bump_versions(tensors: Any) -> None:
    """Tells autograd that these tensors were written to: what was saved of them for a backward pass is void."""
    torch = sys.modules.get("torch")
    bump = getattr(getattr(getattr(torch, "autograd", None), "graph", None), "increment_version", None)
    if bump is not None:
        for tensor in tensors:
            if is_torch(tensor) and not tensor.is_inference():
                bump(tensor)


def _say_touched(error: BaseException, touched: list[str]) -> None:
    """Adds to an error, or whatever else ended the load, which destinations are no longer what they were."""
    more = f" and {len(touched) - 5} more" if len(touched) > 5 else ""
    said = (
        f"overwritten, wholly or in part: {', '.join(touched[:5])}{more} (.touched of this error lists all)"
        if touched
        else "no destination was changed"
    )
    error.touched = touched  # type: ignore[attr-defined]
    if isinstance(error, PenstockError):
        error.message += f"; {said}"
    elif sys.version_info >= (3, 11):
        error.add_note(f"load_into: {said}")
