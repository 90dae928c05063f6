"""Loading into tensors that exist already: everything is compared first, then the bytes go to their final place."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from . import _accelerator, _core
from ._device import CPU, Device
from ._dtypes import DTYPES
from ._errors import InvalidError, MismatchError, PenstockError, UnsupportedError
from ._load import Request, await_load, begin, collector_paused, make_adapter, stream, write_trace
from ._progress import Meter, Progress
from ._report import Report, merged, report_of
from ._selection import Selection


class _Destination:
    """One tensor to be filled, with every name that it goes by."""

    __slots__ = (
        "address",
        "contiguous",
        "device",
        "dtype",
        "names",
        "nbytes",
        "problem",
        "shape",
        "tensor",
    )

    def __init__(self, tensor: Any) -> None:
        self.names: list[str] = []
        self.tensor = tensor
        self.device: Device = CPU
        self.address = 0
        self.nbytes = 0
        self.dtype = ""
        self.shape: tuple[int, ...] = ()
        self.contiguous = True
        self.problem: str | None = None

    def steps(self) -> tuple[list[tuple[int, int]], int]:
        """Where its bytes are: (count, step in bytes, maybe negative) per dimension, and the bytes of an element."""
        tensor = self.tensor
        if _is_numpy(tensor):
            return list(zip(tensor.shape, tensor.strides, strict=True)), tensor.itemsize
        size = tensor.element_size()
        return [(n, size * step) for n, step in zip(tensor.shape, tensor.stride(), strict=True)], size


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


@cache
def _torch_names() -> dict[Any, str]:
    """The format's names of torch's dtypes; the first one, where torch has one dtype for several."""
    from ._torch import torch_dtype

    return {kind: name for name in reversed(list(DTYPES)) if (kind := torch_dtype(name)) is not None}


def _torch_destination(tensor: Any) -> _Destination:
    import torch

    to = _Destination(tensor)
    to.shape = tuple(tensor.shape)
    to.dtype = _torch_names().get(tensor.dtype) or str(tensor.dtype)
    if to.dtype == "F4" and to.shape:
        to.shape = (*to.shape[:-1], 2 * to.shape[-1])
    if tensor.is_meta:
        to.problem = 'is on the "meta" device and has no memory: allocate it first, as with module.to_empty(device=...)'
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)):
        to.problem = f"is a {type(tensor).__name__}, whose memory is not one plain tensor: give the local tensor inside"
    elif tensor.layout is not torch.strided:
        to.problem = f"has layout {tensor.layout}, not the plain strided one"
    elif tensor.is_conj() or tensor.is_neg():
        to.problem = "is a conjugated or negated view"
    else:
        try:
            to.device = _accelerator.device_of(tensor)
        except UnsupportedError as error:
            to.problem = str(error)
            return to
        to.address = tensor.data_ptr()
        to.nbytes = tensor.numel() * tensor.element_size()
        to.contiguous = tensor.is_contiguous()
        if not to.contiguous and to.nbytes and _overlaps_itself(to):
            to.problem = "is expanded: several of its elements are the same memory"
    return to


def _numpy_destination(array: Any) -> _Destination:
    from ._numpy import numpy_dtype

    to = _Destination(array)
    to.shape = tuple(array.shape)
    # numpy takes None for float64, so what numpy lacks must not be compared
    known = ((name, numpy_dtype(name)) for name in DTYPES)
    to.dtype = next((name for name, own in known if own is not None and own == array.dtype), str(array.dtype))
    to.nbytes = array.nbytes
    to.address = array.__array_interface__["data"][0]
    to.contiguous = bool(array.flags.c_contiguous)
    if not array.flags.writeable:
        to.problem = "is read-only"
    elif not to.contiguous and to.nbytes and _overlaps_itself(to):
        to.problem = "is broadcast: several of its elements are the same memory"
    return to


def _destinations(given: Any) -> list[_Destination]:
    """The distinct destinations in a module or mapping. Names of one and the same tensor share one."""
    state_dict = getattr(given, "state_dict", None)
    if not isinstance(given, Mapping) and callable(state_dict):
        values = [(name, t) for name, t in state_dict(keep_vars=True).items() if _is_torch(t)]
    elif isinstance(given, Mapping):
        values = list(given.items())
    else:
        raise InvalidError(
            f"load_into: {type(given).__name__} is neither a torch module nor a mapping of names to tensors"
        )
    found: list[_Destination] = []
    by_memory: dict[Any, _Destination] = {}
    for name, value in values:
        if not isinstance(name, str):
            raise InvalidError(f"load_into: {name!r} is no name of a tensor")
        if _is_torch(value):
            to = _torch_destination(value)
            strides = value.stride() if to.problem is None and not to.contiguous else ()
        elif _is_numpy(value):
            to = _numpy_destination(value)
            strides = () if to.contiguous else value.strides
        else:
            raise InvalidError(f"load_into: {name} is a {type(value).__name__}, not a torch tensor or numpy array")
        # Tied: the same memory seen in the same way. Without memory only the same object is the same tensor
        same: Any = (to.device, to.address, to.dtype, to.shape, strides) if to.address and to.nbytes else id(value)
        to = by_memory.setdefault(same, to)
        if not to.names:
            found.append(to)
        to.names.append(name)
    return found


def _writable_ranges() -> list[tuple[int, int]] | None:
    """Address ranges that this process may write to, ascending and joined; None where /proc does not say."""
    ranges: list[tuple[int, int]] = []
    try:
        with Path("/proc/self/maps").open("rb") as maps:
            for line in maps:
                span, mode = line.split(b" ", 2)[:2]
                if mode[1:2] != b"w":
                    continue
                start, end = (int(x, 16) for x in span.split(b"-"))
                if ranges and ranges[-1][1] == start:
                    ranges[-1] = (ranges[-1][0], end)
                else:
                    ranges.append((start, end))
    except (OSError, ValueError):
        return None
    return ranges


def _overlaps_itself(to: _Destination) -> bool:
    """Whether several of its elements may be the same memory: steps that are shorter than what they step over."""
    dimensions, inner = to.steps()
    for step, n in sorted((abs(step), n) for n, step in dimensions if n > 1):
        if step < inner:
            return True
        inner += (n - 1) * step
    return False


def _span(to: _Destination) -> tuple[int, int]:
    """Addresses of its first byte and behind its last."""
    if to.contiguous:
        return to.address, to.address + to.nbytes
    dimensions, size = to.steps()
    ends = [(n - 1) * step for n, step in dimensions]
    return to.address + sum(e for e in ends if e < 0), to.address + sum(e for e in ends if e > 0) + size


def _overlap(a: _Destination, b: _Destination) -> bool:
    """Whether two destinations whose spans meet have a byte in common. Columns of one matrix do not, for instance."""
    if a.contiguous and b.contiguous:
        return True
    try:
        import numpy
    except ModuleNotFoundError:
        return True  # for want of anything that knows better
    # Arrays with the same steps at addresses where nothing is: only addresses are compared
    start = min(_span(a)[0], _span(b)[0]) - 4096
    arrays = [numpy.asarray(_Elsewhere(to, to.address - start)) for to in (a, b)]
    work: Any = 1_000_000  # numpy's own types know of 0 and -1 only
    try:
        return bool(numpy.shares_memory(arrays[0], arrays[1], max_work=work))
    except RuntimeError:  # TooHardError: dimensions and steps that no tensor has
        return True


class _Elsewhere:
    """What numpy needs to know of an array with the shape and steps of a destination."""

    def __init__(self, to: _Destination, address: int) -> None:
        dimensions, size = to.steps()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(n for n, _ in dimensions),
            "strides": tuple(step for _, step in dimensions),
            "data": (address, False),
        }


def _memory_problems(found: list[_Destination]) -> list[str]:
    """Destinations that overlap each other, or whose memory may not be written to."""
    problems = []
    filled = [(to, *_span(to)) for to in found if to.problem is None and to.nbytes]
    filled.sort(key=lambda entry: (entry[0].device, entry[1]))
    near: list[tuple[_Destination, int]] = []
    for b, start, end in filled:
        near = [(a, past) for a, past in near if a.device == b.device and past > start]
        for a, _ in near:
            if _overlap(a, b):
                problems.append(f"{b.names[0]} overlaps {a.names[0]} in memory without being the same tensor")
                break
        near.append((b, end))
    placed = [to for to, _, _ in filled if to.contiguous]
    ranges = _writable_ranges()
    if ranges is not None:
        starts = [start for start, _ in ranges]
        for to in placed:
            if not to.device.is_cpu:
                continue
            at = bisect.bisect_right(starts, to.address) - 1
            if at < 0 or ranges[at][1] < to.address + to.nbytes:
                problems.append(f"{to.names[0]} is in memory that this process may not write to")
    return problems


def _match(
    selection: Selection, found: list[_Destination], strict: bool
) -> tuple[list[tuple[int, _Destination]], list[str], list[str]]:
    """((want, destination) pairs, missing names, unexpected names). Raises MismatchError listing all that is wrong."""
    wants = {name: want for want, name in enumerate(selection.names)}
    pairs: list[tuple[int, _Destination]] = []
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
            problems.append(f"{name} has shape {list(shape)} in the checkpoint, and its destination {list(to.shape)}")
        if dtype != to.dtype:
            problems.append(f"{name} is {dtype} in the checkpoint, and its destination {to.dtype}")
        pairs.append((wants[name], to))
    unexpected = [name for name in selection.names if name not in known]
    problems += _memory_problems([to for _, to in pairs])
    if strict:
        problems += [f"{name} is missing: the checkpoint has no such tensor" for name in missing]
        problems += [f"{name} is unexpected: there is no destination for it" for name in unexpected]
    if problems:
        files = selection.core.files()
        where = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
        error = MismatchError(
            f"{where}: {len(problems)} problem{'s' * (len(problems) > 1)} with the destinations; nothing was loaded\n  "
            + "\n  ".join(problems),
            path=files[0] if files else None,
        )
        error.problems = problems  # type: ignore[attr-defined]
        error.touched = []  # type: ignore[attr-defined]
        raise error
    return sorted(pairs, key=lambda pair: pair[0]), missing, unexpected


class _Part:
    """The load into the contiguous destinations of one device."""

    def __init__(self, request: Request, pairs: list[tuple[int, _Destination]], device: Device) -> None:
        self.destinations = [to for _, to in pairs]
        fence, event = (0, None) if device.is_cpu else _accelerator.Accelerator(device).fence()
        part = request.selection.part([want for want, _ in pairs])
        self.load: _core.Load = begin(
            request._replace(selection=part, device=device),
            None,
            into=[(to.address, to.nbytes) for to in self.destinations],
            keep=([to.tensor for to in self.destinations], event),
            fence=fence,
        )


def load_into(request: Request, given: Any, strict: bool, progress: Progress) -> Report:
    """Fills the destinations, wherever they are; see `Checkpoint.load_into`."""
    with collector_paused():  # else it goes through all of the model's tensors, several times
        pairs, missing, unexpected = _match(request.selection, _destinations(given), strict)
    straight = [(want, to) for want, to in pairs if to.contiguous]
    roundabout = [(want, to) for want, to in pairs if not to.contiguous]
    parts: list[_Part] = []
    reports: list[Report] = []
    copied: list[_Destination] = []
    try:
        with Meter(progress, "load_into") as meter:
            for device in sorted({to.device for _, to in straight}):
                on_it = [(want, to) for want, to in straight if to.device == device]
                parts.append(_Part(request, on_it, device))
            for part in parts:
                await_load(part.load, meter)
            reports += [report_of(part.load.report(), request.checkpoint.warnings) for part in parts]
            for part, report in zip(parts, reports, strict=True):
                write_trace(part.load, report)
        for device in sorted({to.device for _, to in roundabout}):
            on_it = [(want, to) for want, to in roundabout if to.device == device]
            reports.append(_copy_through(request, on_it, device, copied))
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
    report = merged(reports) if reports else Report(seconds=0.0, nbytes=0, tensors=0, gbps=0.0)
    report["missing"], report["unexpected"] = missing, unexpected
    report["copied_through"] = [name for _, to in roundabout for name in to.names]
    return report


def _copy_through(
    request: Request, pairs: list[tuple[int, _Destination]], device: Device, copied: list[_Destination]
) -> Report:
    """Loads non-contiguous destinations by way of one temporary each, a window of them at a time."""
    reports = []
    for framework, is_kind in (("pt", _is_torch), ("np", _is_numpy)):
        those = [(want, to) for want, to in pairs if is_kind(to.tensor)]
        if not those:
            continue
        part = request.selection.part([want for want, _ in those])
        by_name = {request.selection.names[want]: to for want, to in those}
        adapter = make_adapter(framework, part, device, None)
        for name, tensor in stream(request._replace(selection=part, device=device), adapter, False):
            to = by_name[name]
            copied.append(to)
            if framework == "pt":
                import torch

                with torch.no_grad():
                    to.tensor.copy_(tensor)
            else:
                to.tensor[...] = tensor
        reports.append(request.checkpoint.last_report or Report())
    return merged(reports)


def _bump_versions(tensors: Any) -> None:
    """Tells autograd that these tensors were written to: what was saved of them for a backward pass is void."""
    torch = sys.modules.get("torch")
    bump = getattr(getattr(getattr(torch, "autograd", None), "graph", None), "increment_version", None)
    if bump is not None:
        for tensor in tensors:
            if _is_torch(tensor) and not tensor.is_inference():
                bump(tensor)


def _say_touched(error: BaseException, touched: list[str]) -> None:
    """Adds to an error, or whatever else ended the load, which destinations are no longer what they were."""
    more = f" and {len(touched) - 5} more" if len(touched) > 5 else ""
    said = (
        f"no longer what they were: {', '.join(touched[:5])}{more} (all of them in the error's .touched)"
        if touched
        else "no destination was changed"
    )
    error.touched = touched  # type: ignore[attr-defined]
    if isinstance(error, PenstockError):
        error.message += f"; {said}"
    elif sys.version_info >= (3, 11):
        error.add_note(f"load_into: {said}")
