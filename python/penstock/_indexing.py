"""Indexes into tensors: the parts to read, and the index that is left to do on them.

Along each dimension an index names positions: a number one, a slice a progression, a list or a mask any. Their product
is what is read, so that a row slice reads its rows, a column slice its columns, and a list of rows those rows. What
remains is the same index, renumbered, which the framework itself applies to the compact tensor: dimensions that come
and go, repetitions and the order of positions stay its business.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ._selection import Region

_MOST_RANGES = 262_144
"""Ranges that a dimension is read in at most; more are read in one, with what lies between them."""

_MANY_RANGES, _MANY_RUNS = 1024, 65_536
"""Where a dimension is read in more ranges, or they make more runs of bytes, than this, those that are near are read as
one: what lies between them is read anyway, and a range costs 10 us, a run 0.3, and 64 bytes of memory."""


class Arrays(NamedTuple):
    """How a framework makes arrays to index with."""

    of: Callable[[Any], Any]
    """Makes an array of a part of an index; raises any error if it cannot."""
    ints: Callable[[list[int]], Any]
    """Makes an array of whole numbers."""
    reversible: bool
    """Whether slices may go backwards."""
    plain: Callable[[Any], Any] = lambda part: part
    """The number that the framework takes a part of an index for; else that part itself."""


class Plan(NamedTuple):
    """The parts to read, and the index that is left to do on them."""

    parts: list[Region]
    """Hyper-rectangles, in elements, to be joined in this order."""
    axis: int
    """The dimension along which they are joined."""
    rest: tuple[Any, ...]
    """The index to apply to the joined tensor; empty: none."""


class Indexing(NamedTuple):
    """How a framework indexes a tensor."""

    arrays: Arrays
    shape: tuple[int, ...]
    """The shape of the tensor, in the framework's elements."""
    unit: int
    """Elements of the file in one of the framework's, along the last dimension."""
    probe: Callable[[Any], object]
    """Applies an index to a tensor of that shape without any bytes, so that what is wrong with it raises."""
    take: Callable[[Any, Any], Any]
    """Applies an index to a tensor."""


class _Axis:
    """The positions read along one dimension: ranges in ascending order, at least one."""

    def __init__(self, ranges: list[range]) -> None:
        self.ranges = ranges or [range(0)]
        self._starts = [one.start for one in self.ranges]
        self._before = [0, *accumulate(len(one) for one in self.ranges)]

    @classmethod
    def of(cls, positions: Sequence[int]) -> _Axis:
        """An axis of ascending positions, each once: neighbours make one range, as do those that are evenly apart."""
        step = positions[1] - positions[0] if len(positions) > 2 else 1
        if step > 1 and all(after - at == step for at, after in pairwise(positions)):
            return cls([range(positions[0], positions[-1] + 1, step)])
        ranges: list[range] = []
        for at in positions:
            if ranges and ranges[-1].stop == at:
                ranges[-1] = range(ranges[-1].start, at + 1)
            else:
                ranges.append(range(at, at + 1))
        return cls(ranges)

    def whole(self) -> _Axis:
        """The same in one range, with all that lies between."""
        last = self.ranges[-1]
        return _Axis([range(self.ranges[0].start, last[-1] + 1)]) if last else self

    def closed(self, near: int) -> _Axis:
        """The same with what lies between two ranges, where that is no more than ``near`` positions."""
        ranges = [self.ranges[0]]
        for one in self.ranges[1:]:
            if one.start - ranges[-1].stop <= near:
                ranges[-1] = range(ranges[-1].start, one.stop)
            else:
                ranges.append(one)
        return _Axis(ranges)

    def __iter__(self) -> Iterator[int]:
        return (at for one in self.ranges for at in one)

    def place(self, position: int) -> int:
        """Where a position that is read comes to lie."""
        number = 0
        if len(self.ranges) > 1:
            from bisect import bisect_right  # slices need no more of Python than `import penstock` has brought

            number = bisect_right(self._starts, position) - 1
        return self._before[number] + self.ranges[number].index(position)


class _Slice:
    """A slice as ascending positions."""

    def __init__(self, part: slice, size: int) -> None:
        found = range(*part.indices(size))
        self.backwards = found.step < 0
        # One position and a step is one position
        ends = sorted((found[0], found[-1])) if found else (0, -1)
        self.wanted = range(ends[0], ends[1] + 1, abs(found.step) if len(found) > 1 else 1)
        self.axes = [_Axis([self.wanted])]

    def rest(self, axes: list[_Axis], arrays: Arrays) -> Any:
        if not self.wanted:
            return slice(None)
        first, last = axes[0].place(self.wanted[0]), axes[0].place(self.wanted[-1])
        step = self.wanted.step if axes[0].ranges[0].step == 1 else 1
        if self.backwards:
            return slice(last, first - 1 if first > 0 else None, -step)
        return slice(None) if (first, step) == (0, 1) else slice(first, last + 1, step)


class _Number:
    def __init__(self, at: int) -> None:
        self.axes = [_Axis([range(at, at + 1)])]

    def rest(self, axes: list[_Axis], arrays: Arrays) -> Any:
        return 0


class _Numbers:
    """An array of whole numbers, all of them positions."""

    def __init__(self, array: Any, numbers: list[int]) -> None:
        self.array, self.numbers = array, numbers
        self.axes = [_Axis.of(sorted(set(numbers)))]

    def rest(self, axes: list[_Axis], arrays: Arrays) -> Any:
        return arrays.ints([axes[0].place(at) for at in self.numbers]).reshape(self.array.shape)


class _Mask:
    """An array of booleans, one for each element of as many dimensions as it has."""

    def __init__(self, array: Any) -> None:
        self.array = array
        found = array.nonzero()
        # numpy gives a tuple with an array for each dimension, torch one array with a column for each
        columns = found if isinstance(found, tuple) else found.T
        self.axes = [_Axis.of(sorted(set(column.tolist()))) for column in columns]

    def rest(self, axes: list[_Axis], arrays: Arrays) -> Any:
        mask = self.array
        for dimension, axis in enumerate(axes):
            mask = mask[(slice(None),) * dimension + (arrays.ints(list(axis)),)]
        return mask


def _is_bool(part: Any) -> bool:
    return isinstance(part, bool) or (getattr(part, "ndim", None) == 0 and "bool" in str(getattr(part, "dtype", "")))


def _number(part: Any) -> int | None:
    """The whole number that a part of an index stands for; None: it is none, as a float array of zero dimensions."""
    try:
        return operator.index(part)
    except Exception:  # of whatever class that object likes
        return None


def _flat(values: Any) -> list[int]:
    """The numbers in nested lists, in order."""
    return [number for value in values for number in _flat(value)] if isinstance(values, list) else [values]


def _understood(part: Any, sizes: Sequence[int], arrays: Arrays) -> _Slice | _Number | _Numbers | _Mask | None:
    """The positions that a part of an index takes from the dimensions ``sizes``; None if only the framework can say."""
    if isinstance(part, slice):
        try:
            found = _Slice(part, sizes[0])
        except (TypeError, ValueError):
            return None
        return None if found.backwards and not arrays.reversible else found
    at = None if getattr(part, "ndim", 0) else _number(part)
    if at is not None:
        return _Number(at % sizes[0]) if -sizes[0] <= at < sizes[0] else None
    try:
        array = arrays.of(part)
    except Exception:
        return None
    kind = str(array.dtype)
    if "bool" in kind:
        return _Mask(array) if tuple(array.shape) == tuple(sizes[: array.ndim]) else None
    if "int" not in kind or kind.endswith("uint8"):  # of bytes torch makes masks
        return None
    numbers = _flat(array.tolist())
    if not all(-sizes[0] <= at < sizes[0] for at in numbers):
        return None
    return _Numbers(array, [at % sizes[0] for at in numbers])


def plan(index: Any, shape: Sequence[int], arrays: Arrays, unit: int = 1, near: int = 0) -> Plan | None:
    """The parts that ``tensor[index]`` needs; None if only the framework can say which, or report the error.

    Args:
        shape: Of the tensor, in the framework's elements.
        arrays: The framework's.
        unit: Elements of the file that make one of the framework's, along the last dimension.
        near: Of the framework's elements, as many as are read where they lie between wanted ones.
    """
    if isinstance(index, list) and any(not hasattr(part, "__index__") for part in index):
        return None  # torch takes some lists for tuples, which ones changes from release to release
    parts = [arrays.plain(part) for part in (index if isinstance(index, tuple) else [index])]
    dots = [i for i, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        return None
    # What stands behind an Ellipsis counts from the end
    front, back = (parts[: dots[0]], parts[dots[0] + 1 :]) if dots else (parts, [])
    before = _read(front, shape, arrays)
    taken = sum(map(_dimensions, back))
    if before is None or len(before[1]) + taken > len(shape):
        return None
    behind = _read(back, shape[len(shape) - taken :], arrays)
    if behind is None or len(behind[1]) != taken:
        return None
    between = shape[len(before[1]) : len(shape) - taken]
    middle = [_Slice(slice(None), size) for size in between]
    steps = [*before[0], *([Ellipsis] if dots and not middle else middle), *behind[0]]
    exact = [axis for one in steps if isinstance(one, (_Slice, _Number, _Numbers, _Mask)) for axis in one.axes]

    # Only the outermost scattered dimension is taken apart: products of several would be very many parts
    scattered = [i for i, axis in enumerate(exact) if len(axis.ranges) > 1]
    joined = scattered[0] if scattered else None
    if joined is not None:
        count, outer = (
            len(exact[joined].ranges),
            reduce(operator.mul, (len(axis.ranges[0]) for axis in exact[:joined]), 1),
        )
        if count > _MANY_RANGES or count * outer > _MANY_RUNS:
            exact[joined] = exact[joined].closed(near // max(1, reduce(operator.mul, shape[joined + 1 :], 1)))
        if len(exact[joined].ranges) > _MOST_RANGES:
            joined = None
    axes = [axis.whole() if i in scattered and i != joined else axis for i, axis in enumerate(exact)]
    if unit > 1 and axes:
        axes[-1] = axes[-1].whole()
        joined = None if joined == len(axes) - 1 else joined
    rest: list[Any] = []
    at = 0
    for one in steps:
        if isinstance(one, (_Slice, _Number, _Numbers, _Mask)):
            rest.append(one.rest(axes[at : at + len(one.axes)], arrays))
            at += len(one.axes)
        else:
            rest.append(one)
    regions: list[Region] = []
    for piece in axes[joined].ranges if joined is not None else [range(0)]:
        region = [piece if i == joined else axis.ranges[0] for i, axis in enumerate(axes)]
        regions.append([(one.start, max(one.start, one.stop), one.step) for one in region])
        if unit > 1 and region:
            first, last, _ = regions[-1][-1]
            regions[-1][-1] = (first * unit, last * unit, 1)
    plain = all(isinstance(one, slice) and one == slice(None) for one in rest)
    return Plan(regions, joined or 0, () if plain else tuple(rest))


def plan_of_slices(index: Any, shape: Sequence[int]) -> Plan | None:
    """The same as `plan` of whole numbers, and slices without steps, alone; None: it is another index.

    Half of what callers do in a loop is such an index, and `plan` takes longer than reading a row.
    """
    parts = index if type(index) is tuple else (index,)
    if len(parts) > len(shape):
        return None
    region: Region = []
    rest: list[Any] | None = None
    for part, size in zip(parts, shape, strict=False):
        if type(part) is slice:
            if not (part.step is None or (type(part.step) is int and part.step == 1)):
                return None
            try:
                first, last, _ = part.indices(size)
            except (TypeError, ValueError):
                return None
            region.append((first, last if last > first else first, 1))
        elif type(part) is int and -size <= part < size:
            at = part + size if part < 0 else part
            region.append((at, at + 1, 1))
            if rest is None:
                rest = [slice(None)] * (len(region) - 1)
            rest.append(0)
            continue
        else:
            return None
        if rest is not None:
            rest.append(slice(None))
    region += [(0, size, 1) for size in shape[len(parts) :]]
    return Plan([region], 0, () if rest is None else tuple(rest))


def _dimensions(part: Any) -> int:
    """How many dimensions a part of an index takes."""
    if part is None or _is_bool(part):
        return 0
    ndim = int(getattr(part, "ndim", 1)) if "bool" in str(getattr(part, "dtype", "")) else 1
    return _depth(part) if isinstance(part, list) else ndim


def _depth(part: Any) -> int:
    """Dimensions that a list takes: those of a mask are as many as it is deep."""
    depth, inner = 0, part
    while isinstance(inner, list) and inner:
        depth, inner = depth + 1, inner[0]
    return depth if isinstance(inner, bool) else 1


def _read(parts: list[Any], shape: Sequence[int], arrays: Arrays) -> tuple[list[Any], list[_Axis]] | None:
    """Parts of an index that take the first dimensions of ``shape``, and what they ask of those."""
    steps: list[Any] = []
    axes: list[_Axis] = []
    for part in parts:
        if part is None or _is_bool(part):
            steps.append(part)
            continue
        if len(axes) >= len(shape):
            return None
        found = _understood(part, shape[len(axes) :], arrays)
        if found is None or len(axes) + len(found.axes) > len(shape):
            return None
        steps.append(found)
        axes += found.axes
    return steps, axes
