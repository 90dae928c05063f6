"""Tensors that are to be filled: where their bytes are, and whether they can be written to.

A write to memory that is read-only, freed or smaller than its tensor kills the process. So it is looked at first.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from . import _accelerator, _core
from ._device import CPU, Device
from ._dtypes import DTYPES
from ._errors import InvalidError, UnsupportedError
from ._late_imports import importing
from ._selection import Axes, Region


class Memory:
    """The memory of one tensor that is to be filled, with every name that the tensor goes by."""

    __slots__ = (
        "address", "contiguous", "device", "dtype", "names", "nbytes", "placed", "problem", "shape", "tensor", "within"
    )  # fmt: skip

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
        self.within: Any = None
        """The DTensor whose local shard this is, or None."""
        self.placed: tuple[tuple[int, ...], Axes | None] | None = None
        """A local shard's whole shape, and its part of it; no part: this process has none."""

    def part(self, place: Region) -> Memory:
        """The memory of a part of it, by the same names."""
        if self.dtype == "F4":
            place = [*place[:-1], (place[-1][0] // 2, place[-1][1] // 2, 1)]
        tensor = self.tensor.detach() if is_torch(self.tensor) else self.tensor
        found = memory_of(tensor[tuple(slice(*one) for one in place)])
        assert found is not None
        found.names, found.within = self.names, self.within
        return found

    def item_size(self) -> int:
        """Bytes of an element."""
        return int(self.tensor.itemsize if is_numpy(self.tensor) else self.tensor.element_size())

    def steps(self) -> tuple[list[tuple[int, int]], int]:
        """Where its bytes are: (count, step in bytes, maybe negative) per dimension, and the bytes of an element."""
        tensor = self.tensor
        if is_numpy(tensor):
            return list(zip(tensor.shape, tensor.strides, strict=True)), tensor.itemsize
        size = tensor.element_size()
        return [(n, size * step) for n, step in zip(tensor.shape, tensor.stride(), strict=True)], size


def is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


@cache
def _torch_names() -> dict[Any, str]:
    """The format's names of torch's dtypes; the first one, where torch has one dtype for several."""
    with importing():
        from ._torch import torch_dtype

    return {kind: name for name in reversed(list(DTYPES)) if (kind := torch_dtype(name)) is not None}


def _torch_memory(tensor: Any) -> Memory:
    to = Memory(tensor)
    try:
        to.problem = _of_torch(to, tensor)
    except RuntimeError as error:  # a tensor that is none by itself, as inside of torch.func.vmap
        to.problem = f"has no memory of its own: {str(error).partition('. ')[0]}"
    return to


def _of_torch(to: Memory, tensor: Any) -> str | None:
    """Fills in what is known of a torch tensor; what is wrong with it."""
    import torch

    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)):
        return f"is a {kind.__name__}, which is not one plain tensor in memory: give the local tensor inside it"
    if tensor.is_nested:
        return "is nested: several tensors in one"
    to.shape = tuple(tensor.shape)
    to.dtype = _torch_names().get(tensor.dtype) or str(tensor.dtype)
    if to.dtype == "F4" and to.shape:
        to.shape = (*to.shape[:-1], 2 * to.shape[-1])
    if tensor.is_meta:
        return 'is on the "meta" device and has no memory: allocate it first, as with module.to_empty(device=...)'
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}, and only strided tensors can be filled"
    if tensor.is_conj() or tensor.is_neg():
        return "is a conjugated or negated view"
    try:
        to.device = _accelerator.device_of(tensor)
    except UnsupportedError as error:
        return str(error)
    to.address = tensor.data_ptr()
    size = tensor.element_size()
    to.nbytes = tensor.numel() * size
    to.contiguous = tensor.is_contiguous()
    if not to.nbytes:
        return None
    if not to.contiguous and _overlaps_itself(to):
        return "is expanded: several of its elements share memory"
    # A storage can be made smaller under its tensors, as FSDP does to free parameters
    start, past = (0, to.nbytes) if to.contiguous else _span(to, 0)
    needed, there = tensor.storage_offset() * size + past - start, tensor.untyped_storage().nbytes()
    if there < needed:
        what = "is larger than its memory" if there else "has no memory"
        return f"{what}: its storage has {there} bytes, and it needs {needed}"
    return None


def _numpy_memory(array: Any) -> Memory:
    with importing():
        from ._numpy import numpy_dtype

    to = Memory(array)
    to.shape = tuple(array.shape)
    # numpy takes None for float64, so what numpy lacks must not be compared
    known = ((name, numpy_dtype(name)) for name in DTYPES)
    to.dtype = next((name for name, own in known if own is not None and own == array.dtype), str(array.dtype))
    to.nbytes = array.nbytes
    to.address = array.__array_interface__["data"][0]
    to.contiguous = bool(array.flags.c_contiguous)
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    if not array.flags.writeable:
        to.problem = "is read-only"
    elif masked is not None and isinstance(array, masked):
        to.problem = "is a MaskedArray, and its mask does not fit new values: give its .data"
    elif not to.contiguous and to.nbytes and _overlaps_itself(to):
        to.problem = "is broadcast: several of its elements are the same memory"
    return to


def is_dtensor(value: Any) -> bool:
    """Whether this is a `DTensor` of torch. Its module takes long to import, and need not be there."""
    return is_torch(value) and all(hasattr(type(value), name) for name in ("device_mesh", "placements", "to_local"))


def _of_dtensor(value: Any) -> Memory:
    """The memory of a DTensor's local shard, and which part of the whole that is."""
    with importing():
        import torch

    with torch.no_grad():
        to = _torch_memory(value.to_local())
    to.within = value
    placed_as = part_of_dtensor(value, to.dtype, to.shape)
    if placed_as.axes is not None or placed_as.problem is None:
        to.placed = placed_as.whole, placed_as.axes
    to.problem = placed_as.problem if placed_as.axes is None else to.problem or placed_as.problem
    return to


#: The advice for a DTensor whose parts are not known, in loads.
ADVICE = "pad the tensor, or load the part with a list of Destination"


class LocalPart(NamedTuple):
    """A DTensor's local shard, as a part of the whole."""

    whole: tuple[int, ...]
    axes: Axes | None
    """None: this process has no part."""
    problem: str | None


def part_of_dtensor(value: Any, dtype: str, local: tuple[int, ...]) -> LocalPart:
    """The part of a DTensor that its local shard is, which has ``local`` as its shape in the format's terms."""
    with importing():
        from ._placements import paired, placed, placed_backwards, shape_of

    whole = tuple(value.shape)
    if dtype == "F4" and whole:
        whole = (*whole[:-1], 2 * whole[-1])
    mesh, coordinates, placements = value.device_mesh, value.device_mesh.get_coordinate(), value.placements
    if coordinates is None:
        return LocalPart(whole, None, None)
    try:
        axes = paired(dtype, whole, lambda shape: placed(placements, shape, mesh.shape, coordinates))
        fsdps = paired(dtype, whole, lambda shape: placed_backwards(placements, shape, mesh.shape, coordinates) or [])
    except InvalidError as error:
        return LocalPart(whole, None, f"is a DTensor that cannot be loaded: {error.message}")
    ways = [axes, fsdps] if fsdps and fsdps != axes else [axes]
    fitting = [one for one in ways if shape_of(one) == local]
    part = (fitting or [axes])[0]
    if len(fitting) == 1:
        return LocalPart(whole, part, None)
    placed_so = f"is a DTensor of shape {list(whole)}, placed as ({', '.join(map(str, placements))}) on {mesh.shape}"
    if fitting:
        problem = (
            f"{placed_so}, which does not divide it evenly: FSDP2 and distribute_tensor make different "
            f"local shards of it: {ADVICE}"
        )
    else:
        problem = f"{placed_so}: its local shard has shape {list(local)}, and this rank's is {list(shape_of(axes))}"
    return LocalPart(whole, part, problem)


def memory_of(tensor: Any) -> Memory | None:
    """The memory of a torch tensor or a numpy array; None if it is neither."""
    if is_torch(tensor):
        return _torch_memory(tensor)
    return _numpy_memory(tensor) if is_numpy(tensor) else None


def memories(given: Any) -> list[Memory]:
    """The memory of each distinct tensor in a module or mapping. Names of one and the same tensor share one."""
    state_dict = getattr(given, "state_dict", None)
    if not isinstance(given, Mapping) and callable(state_dict):
        values = [(name, t) for name, t in state_dict(keep_vars=True).items() if is_torch(t)]
    elif isinstance(given, Mapping):
        values = list(given.items())
    else:
        raise InvalidError(
            f"load_into: {type(given).__name__} is none of these: a torch module, a mapping of names to tensors, "
            "a list of penstock.Destination"
        )
    found: list[Memory] = []
    by_memory: dict[Any, Memory] = {}
    for name, value in values:
        if not isinstance(name, str):
            raise InvalidError(f"load_into: {name!r} is not the name of a tensor: give a string")
        to = _of_dtensor(value) if is_dtensor(value) else memory_of(value)
        if to is None:
            raise InvalidError(f"load_into: {name} is a {type(value).__name__}, not a torch tensor or numpy array")
        to = by_memory.setdefault(identity(to, value), to)
        if not to.names:
            found.append(to)
        to.names.append(name)
    return found


def identity(to: Memory, value: Any) -> Any:
    """A key that is equal for tied tensors alone: the same memory in the same view. ``to`` is the memory of ``value``.

    A view of other shape, strides or dtype is another tensor, although it has bytes in common. Without memory only the
    same object is the same tensor.
    """
    if not to.address or not to.nbytes:
        return id(value)
    strides: Any = ()
    if not to.contiguous:
        strides = value.stride() if is_torch(value) else value.strides
    return to.device, to.address, to.dtype, to.shape, strides, str(to.placed)


def is_dense(to: Memory) -> bool:
    """Whether its elements fill the memory from its first byte to its last."""
    start, past = _span(to)
    return to.problem is None and to.nbytes > 0 and past - start == to.nbytes and not _overlaps_itself(to)


def covers(a: Memory, b: Memory) -> bool:
    """Whether every byte of ``b`` is a byte of ``a``. A no may be wrong where ``a`` has holes."""
    (start, past), (begin, end) = _span(a), _span(b)
    return a.device == b.device and start <= begin and end <= past and is_dense(a)


class Covered:
    """The bytes that tensors have between them, once they are filled."""

    def __init__(self, filled: Sequence[Memory]) -> None:
        spans: dict[Any, list[tuple[int, int]]] = {}
        for other in filled:
            if is_dense(other):
                spans.setdefault(other.device, []).append(_span(other))
        #: By device: where stretches without a hole begin, and where they end, in order.
        self._stretches: dict[Any, tuple[list[int], list[int]]] = {}
        for device, found in spans.items():
            begins: list[int] = []
            ends: list[int] = []
            for start, end in sorted(found):
                if ends and start <= ends[-1]:
                    ends[-1] = max(ends[-1], end)
                else:
                    begins.append(start)
                    ends.append(end)
            self._stretches[device] = begins, ends

    def __contains__(self, to: Memory) -> bool:
        """Whether they have every byte of this one."""
        if to.problem is not None or not to.nbytes or to.device not in self._stretches:
            return False
        begins, ends = self._stretches[to.device]
        start, past = _span(to)
        at = bisect_right(begins, start) - 1
        return at >= 0 and past <= ends[at]


def _overlaps_itself(to: Memory) -> bool:
    """Whether several of its elements may be the same memory: steps that are shorter than what they step over."""
    dimensions, inner = to.steps()
    for step, n in sorted((abs(step), n) for n, step in dimensions if n > 1):
        if step < inner:
            return True
        inner += (n - 1) * step
    return False


def _span(to: Memory, address: int | None = None) -> tuple[int, int]:
    """Addresses of its first byte and behind its last; ``address``, if given, counts as that of its first element."""
    address = to.address if address is None else address
    if to.contiguous:
        return address, address + to.nbytes
    dimensions, size = to.steps()
    ends = [(n - 1) * step for n, step in dimensions]
    return address + sum(e for e in ends if e < 0), address + sum(e for e in ends if e > 0) + size


def overlap(a: Memory, b: Memory) -> bool:
    """Whether two tensors whose spans meet have a byte in common. Columns of one matrix do not, for instance."""
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


def share_bytes(a: Memory, b: Memory) -> bool:
    """Whether two tensors have a byte in common."""
    spans = [(to, *_span(to)) for to in (a, b)]
    (_, begin, past), (_, other, end) = spans
    return begin < end and other < past and not _interleave(spans) and overlap(a, b)


class _Elsewhere:
    """The array interface of numpy for the shape and steps of a destination."""

    def __init__(self, to: Memory, address: int) -> None:
        dimensions, size = to.steps()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(n for n, _ in dimensions),
            "strides": tuple(step for _, step in dimensions),
            "data": (address, False),
        }


def memory_problems(found: list[Memory], views: list[tuple[Memory, Memory]] | None = None) -> list[str]:
    """Destinations that overlap each other, or whose memory may not be written to.

    ``views``, if given, gets the pairs of which one covers the other. These are no problem then.
    """
    problems = []
    filled = [(to, *_span(to)) for to in found if to.problem is None and to.nbytes]
    filled.sort(key=lambda entry: (entry[0].device, entry[1]))
    for together in _whose_spans_meet(filled):
        if not _interleave(together):
            problems += _overlaps(together, views)
    on_cpu = [(to, start, past) for to, start, past in filled if to.device.is_cpu]
    for number, why in _core.unwritable([(start, past) for _, start, past in on_cpu]):
        problems.append(f"{on_cpu[number][0].names[0]} {why}")
    return problems


#: A destination, and the addresses of its first byte and behind its last.
_Spanning = tuple[Memory, int, int]


def _whose_spans_meet(ordered: list[_Spanning]) -> Iterator[list[_Spanning]]:
    """Destinations of one device by address, in groups of two and more with nothing free between them."""
    group: list[_Spanning] = []
    past = 0
    for entry in ordered:
        if group and (entry[1] >= past or entry[0].device != group[0][0].device):
            if len(group) > 1:
                yield group
            group = []
        past = max(past, entry[2]) if group else entry[2]
        group.append(entry)
    if len(group) > 1:
        yield group


def _within_a_row(group: list[_Spanning]) -> tuple[int, list[tuple[int, int]]]:
    """The largest step of any of them, and what each one has of a row of that length: where it begins, and its length.

    Steps of a whole row lead to the same place in another one. So those that share nothing within a row share no byte.
    """
    layouts = [to.steps() if not to.contiguous else ([], to.nbytes) for to, _, _ in group]
    row = max((abs(step) for dimensions, _ in layouts for n, step in dimensions if n > 1), default=0)
    places = []
    for (_, start, _), (dimensions, size) in zip(group, layouts, strict=True):
        length = size + sum((n - 1) * abs(step) for n, step in dimensions if n > 1 and step % row)
        places.append((start % row if row else 0, length))
    return row, places


def _interleave(group: list[_Spanning]) -> bool:
    """Whether they are side by side in each row of one matrix. Then they share no byte; others may share none either.

    This looks at each once. Looking at every pair took 75 s for 4,000 columns of a matrix of 64 rows.
    """
    row, places = _within_a_row(group)
    places.sort()
    ends = [place + length for place, length in places]
    begins = [place for place, _ in places[1:]] + [places[0][0] + row]  # the first one again, in the next row
    return all(end <= begin for end, begin in zip(ends, begins, strict=True))


def _overlaps(group: list[_Spanning], views: list[tuple[Memory, Memory]] | None) -> list[str]:
    """Problems of destinations that share a byte with one before them, by address; see `memory_problems`."""
    problems = []
    row, places = _within_a_row(group)
    near: list[tuple[int, int, int]] = []  # number in the group, and place and length within a row
    for b, ((_, start, _), (place, length)) in enumerate(zip(group, places, strict=True)):
        near = [entry for entry in near if group[entry[0]][2] > start]
        for a, place_a, length_a in near:
            if row and length_a <= (place - place_a) % row <= row - length:
                continue
            if overlap(group[a][0], group[b][0]):
                pair = group[a][0], group[b][0]
                if views is not None and (covers(*pair) or covers(*pair[::-1])):
                    views.append(pair)
                    continue
                one, other = (group[i][0].names[0] for i in (a, b))
                problems.append(f"{other} overlaps {one} in memory without being the same tensor")
                break
        near.append((b, place, length))
    return problems
