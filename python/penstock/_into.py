"""Loading into tensors that exist already: everything is compared first, then the bytes go to their final place."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import _accelerator, _core, _running
from ._collector import collector_paused
from ._destination import Destination
from ._device import Device
from ._errors import InvalidError, MismatchError, PenstockError, SliceError
from ._events import NOTHING
from ._fills import Fill, fitted
from ._frameworks import make_adapter
from ._late_imports import importing
from ._load import stream
from ._memory import Covered, Memory, is_numpy, is_torch, memories, memory_of, memory_problems
from ._progress import Meter, Progress
from ._report import Report, merged, report_of
from ._request import Request
from ._selection import Region, Selection, info_of, region_of, unknown

_SHOWN = 10
"""Problems that the text of an error shows; `problems` has all of them."""


class _Matched:
    """The destinations to fill, and names that only one side has."""

    def __init__(
        self,
        selection: Selection,
        fills: list[Fill],
        missing: list[str],
        unexpected: list[str],
        turns: Mapping[int, int] | None = None,
    ) -> None:
        self.selection = selection
        """The wants, in the order of the fills."""
        self.fills = fills
        self.missing = missing
        self.unexpected = unexpected
        self._turns = turns or {}

    def turn(self, fill: Fill) -> int:
        """How many fills come before it, one after the other, because they are of the same bytes."""
        return self._turns.get(id(fill.memory), 0)


def _by_name(selection: Selection, found: list[Memory], strict: bool) -> _Matched:
    """Tensors of a module or mapping and the wants of their names. Raises MismatchError listing all that is wrong."""
    wants = {name: want for want, name in enumerate(selection.names)}
    pairs: list[tuple[int, Region | None, Fill]] = []
    absent: list[Memory] = []
    problems: list[str] = []
    known: set[str] = set()
    for to in found:
        present = [name for name in to.names if name in wants]
        known.update(present)
        if not present:
            absent.append(to)
            continue
        name = present[-1]  # as load_state_dict, where of several names for one tensor the last one wins
        if to.problem is not None:
            problems.append(f"{name} {to.problem}")
            continue
        want = wants[name]
        dtype, shape = selection.describe(want)
        if to.placed is None and want not in selection.scattered:
            fill, wrong = fitted(to, name, dtype, shape)
            problems += wrong
            pairs.append((want, None if selection.regions is None else selection.regions[want], fill))
            continue
        there = to.shape if to.placed is None else to.placed[0]
        if shape != there:
            problems.append(f"{name} has shape {list(shape)} in the checkpoint, but {list(there)} in its destination")
            continue
        for region, part in _parts(selection, want, to):
            fill, wrong = fitted(part, name, dtype, tuple(len(range(*one)) for one in region))
            pairs.append((want, region, fill))
            if wrong:
                problems += wrong
                break  # the other parts have the same
    unexpected = [name for name in selection.names if name not in known]
    filled = [fill.memory for _, _, fill in pairs]
    views: list[tuple[Memory, Memory]] = []
    problems += memory_problems(filled, views)
    # A view of tensors that are loaded gets its bytes with them: savers leave it out
    covered = Covered(filled if absent else [])
    missing = [name for to in absent if to not in covered for name in to.names]
    if strict:
        problems += [f"{name} is missing: the checkpoint has no such tensor" for name in missing]
        problems += [f"{name} is unexpected: there is no destination for it" for name in unexpected]
    if problems:
        raise _mismatch(selection.core.files(), problems)
    turns = _turns(filled, views)
    pairs.sort(key=lambda pair: pair[0])
    wanted = selection.with_regions([(want, region) for want, region, _ in pairs])
    return _Matched(wanted, [fill for _, _, fill in pairs], missing, unexpected, turns)


def _turns(found: Sequence[Memory], views: Sequence[tuple[Memory, Memory]]) -> dict[int, int]:
    """The turn of each that shares bytes with one before it, by its id: as in `load_state_dict`, the last counts."""
    if not views:
        return {}
    place = {id(to): number for number, to in enumerate(found)}
    turns: dict[int, int] = {}
    for one, other in sorted(
        (sorted(pair, key=lambda to: place[id(to)]) for pair in views), key=lambda p: place[id(p[1])]
    ):
        turns[id(other)] = max(turns.get(id(other), 0), turns.get(id(one), 0) + 1)
    return turns


def _parts(selection: Selection, want: int, to: Memory) -> Iterator[tuple[Region, Memory]]:
    """The regions of a want that go to a destination, and the memory of each."""
    with importing():
        from ._pieces import pieces_of
        from ._placements import of_part

    axes = selection.axes(want)
    if to.placed is not None:
        if to.placed[1] is None:
            return
        axes = of_part(axes, to.placed[1])
    pieces = list(pieces_of(axes))
    for region, place in pieces:
        yield region, to if len(pieces) == 1 else to.part(place)


def _by_destination(core: _core.Checkpoint, given: Sequence[Destination], strict: bool) -> _Matched:
    """Each destination and its want. Raises MismatchError listing all that is wrong."""
    found: list[tuple[int, Region | None, Fill]] = []
    missing: list[str] = []
    problems: list[str] = []
    for at in given:
        if at.name not in core:
            missing.append(at.name)
            continue
        to = memory_of(at.into)
        if to is None:
            kind = type(at.into).__name__
            text = f"load_into: the destination of {at.name} is a {kind}, not a torch tensor or numpy array"
            raise InvalidError(text)
        to.names.append(at.name)
        if to.problem is not None:
            problems.append(f"{at.name} {to.problem}")
            continue
        index = core.index(at.name)
        _, dtype, shape, _, _, _ = core.info(index)
        region = None
        if at.cut is not None:
            try:
                region = region_of(info_of(core, index), at.cut)
            except SliceError as error:
                problems.append(str(error))
                continue
            shape = tuple(len(range(*part)) for part in region)
        fill, wrong = fitted(to, at.name, dtype, shape, at.axes, at.cast, one_for_all=True)
        problems += wrong
        found.append((index, region, fill))
    problems += memory_problems([fill.memory for _, _, fill in found])
    if strict:
        problems += [str(unknown(core, name)) for name in missing]
    if problems:
        raise _mismatch(core.files(), problems)
    selection = Selection(
        core,
        [fill.name for _, _, fill in found],
        [index for index, _, _ in found],
        [region for _, region, _ in found] if any(region is not None for _, region, _ in found) else None,
    )
    return _Matched(selection, [fill for _, _, fill in found], missing, [])


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


def is_list(given: Any) -> bool:
    """Whether these are destinations, in a list or tuple."""
    return isinstance(given, (list, tuple)) and all(isinstance(one, Destination) for one in given)


class _Part:
    """The load into the destinations of one device that the core fills itself."""

    def __init__(self, request: Request, pairs: list[tuple[int, Fill]], device: Device) -> None:
        self.fills = [fill for _, fill in pairs]
        fence, event = (0, None) if device.is_cpu else _accelerator.Accelerator(device).fence()
        part = request.selection.part([want for want, _ in pairs])
        self.load: _core.Load = _running.begin(
            request._replace(selection=part, device=device),
            None,
            into=[(fill.memory.address, fill.span()) for fill in self.fills],
            strides=[(i, fill.dims) for i, fill in enumerate(self.fills) if fill.dims is not None],
            casts=[(i, fill.cast) for i, fill in enumerate(self.fills) if fill.cast is not None],
            keep=([fill.memory.tensor for fill in self.fills], event),
            fence=fence,
        )


def load_into(request: Request, given: Any, strict: bool, progress: Progress) -> Report:
    """Fills the destinations, wherever they are; see `Checkpoint.load_into`."""
    with collector_paused():  # else it goes through all of the model's tensors, several times
        if is_list(given):
            matched = _by_destination(request.selection.core, given, strict)
        else:
            matched = _by_name(request.selection, memories(given), strict)
    request = request._replace(selection=matched.selection)
    straight = [
        (want, fill)
        for want, fill in enumerate(matched.fills)
        if not matched.turn(fill) and fill.straight(matched.selection, want)
    ]
    taken = {want for want, _ in straight}
    roundabout = [(want, fill) for want, fill in enumerate(matched.fills) if want not in taken]
    detours: list[_Detour] = []
    for turn in sorted({matched.turn(fill) for _, fill in roundabout}):
        detours += _detours(request, [(want, fill) for want, fill in roundabout if matched.turn(fill) == turn])
    parts: list[_Part] = []
    reports: list[Report] = []
    copied: list[Fill] = []
    began, cpu = time.perf_counter(), time.process_time()
    try:
        with Meter(progress, "load_into", request.seen) as meter:
            devices = sorted({fill.memory.device for _, fill in straight})
            # Where there is nothing to fill, a load of nothing gives its report; and other ranks wait for this one
            if not devices and (request.group is not None or not roundabout):
                devices = [request.device]
            # One load of each rank is the group's: that onto the device that gets most
            shared = max(
                devices, key=lambda d: sum(f.memory.nbytes for _, f in straight if f.memory.device == d), default=None
            )
            for device in sorted(devices, key=lambda d: d != shared):
                on_it = [(want, fill) for want, fill in straight if fill.memory.device == device]
                asked = request if device == shared else request._replace(group=None)
                parts.append(_Part(asked, on_it, device))
            for part in parts:
                _running.await_load(part.load, meter)
            reports += [report_of(part.load.report(), request.selection.core) for part in parts]
            for part, report in zip(parts, reports, strict=True):
                _running.write_trace(part.load, report)
        reports += [detour.run(copied) for detour in detours]
        for _, fill in straight:
            if fill.spread:
                fill.spread_out()
        took = time.perf_counter() - began, time.process_time() - cpu
    except BaseException as error:
        for part in parts:
            part.load.close()
        touched = [fill for part in parts for fill in (part.fills[i] for i in part.load.touched())] + copied
        _say_touched(error, _names(touched))
        raise
    finally:
        for part in parts:
            part.load.close()
    _bump_versions(tensor for _, fill in straight for tensor in (fill.memory.tensor, fill.memory.within))
    report = merged(reports, *took)
    report["missing"], report["unexpected"] = matched.missing, matched.unexpected
    report["copied_through"] = _names([fill for _, fill in roundabout])
    request.seen.add(report)
    return report


def _names(fills: Sequence[Fill]) -> list[str]:
    """The names of the destinations, of which each may be filled in several pieces."""
    each = {id(fill.memory.names): fill.memory.names for fill in fills}
    return [name for names in each.values() for name in names]


class _Detour:
    """The load into destinations of one framework on one device that the core cannot fill: through temporary tensors.

    Made before the first byte moves, so that what the framework lacks is found out in time.
    """

    def __init__(self, request: Request, pairs: list[tuple[int, Fill]], framework: str, device: Device) -> None:
        part = request.selection.part([want for want, _ in pairs])
        self._by_name = {request.selection.names[want]: fill for want, fill in pairs}
        self._request = request._replace(selection=part, device=device, group=None, seen=NOTHING)
        self._adapter = make_adapter(framework, part, device, None)

    def run(self, copied: list[Fill]) -> Report:
        """Fills them, a window of them at a time. ``copied`` gets those that are no longer what they were."""
        reports: list[Report] = []
        for name, tensor in stream(self._request, self._adapter, False, reports):
            fill = self._by_name[name]
            copied.append(fill)
            fill.copy(tensor)
        return reports[0]


def _detours(request: Request, pairs: list[tuple[int, Fill]]) -> Iterator[_Detour]:
    """The loads that fill these destinations. The core itself can fill none of them."""
    while pairs:
        # A name comes once in each of them
        once: dict[str, tuple[int, Fill]] = {}
        rest = []
        for pair in pairs:
            if once.setdefault(request.selection.names[pair[0]], pair) is not pair:
                rest.append(pair)
        pairs = rest
        for device in sorted({fill.memory.device for _, fill in once.values()}):
            for framework, is_kind in (("pt", is_torch), ("np", is_numpy)):
                those = [
                    (want, fill)
                    for want, fill in once.values()
                    if fill.memory.device == device and is_kind(fill.memory.tensor)
                ]
                if those:
                    yield _Detour(request, those, framework, device)


def _bump_versions(tensors: Iterable[Any]) -> None:
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
