"""The part of a tensor for a rank of a mesh, as `torch.distributed.tensor` places it. Pure: no torch, no ranks asked.

Placements are known by what they have, not by their class: `Shard` by ``is_shard()`` and ``dim``, `_StridedShard` by
``split_factor`` and ``dim``, `Replicate` by ``is_replicate()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from ._core import Checkpoint
from ._errors import ArgumentTypeError, InvalidError
from ._selection import Axes, Placements, Range, Rule, TensorInfo, unknown


def chunk(size: int, parts: int, number: int) -> tuple[int, int]:
    """(first, past-the-last) of part ``number`` of ``parts``, as `torch.chunk` divides: the last ones may be empty."""
    each = -(-size // parts)
    first = min(size, each * number)
    return first, min(size, first + each)


def taken(ranges: Sequence[Range], first: int, past: int) -> list[Range]:
    """The positions from number ``first`` to ``past`` of those that the ranges list one after the other."""
    found: list[Range] = []
    begin = 0
    for start, stop, step in ranges:
        count = len(range(start, stop, step))
        low, high = max(first, begin) - begin, min(past, begin + count) - begin
        begin += count
        if low >= high:
            continue
        one = start + low * step, start + (high - 1) * step + 1, step
        if found and found[-1][2] == step == 1 and found[-1][1] == one[0]:
            one = found.pop()[0], one[1], 1
        found.append(one)
    return found or [(0, 0, 1)]


def _count(ranges: Sequence[Range]) -> int:
    return sum(len(range(*one)) for one in ranges)


def placed(
    placements: Placements | Any, shape: Sequence[int], mesh_shape: Sequence[int], coordinates: Sequence[int]
) -> Axes:
    """The part that the rank at ``coordinates`` has: for each dimension of the tensor the ranges of its positions.

    It is that of `distribute_tensor`: placements divide from left to right, each what the ones before it have left.

    Raises:
        InvalidError: no such placements of a tensor of this shape.
    """
    axes: Axes = [[(0, size, 1)] for size in shape]
    for parts, at, placement in zip(mesh_shape, coordinates, placements, strict=True):
        dim = sharded_dim(placement, len(shape))
        if dim is None:
            continue
        ranges = axes[dim]
        size, split = _count(ranges), int(getattr(placement, "split_factor", 1))
        found: list[Range] = []
        for number in range(split):
            first, past = chunk(size, split, number)
            low, high = chunk(past - first, parts, at)
            if low < high:
                found += taken(ranges, first + low, first + high)
        axes[dim] = taken(found, 0, _count(found))
    return axes


def placed_backwards(
    placements: Placements, shape: Sequence[int], mesh_shape: Sequence[int], coordinates: Sequence[int]
) -> Axes | None:
    """The part that FSDP2 gives a rank of a tensor that others, such as TP, have divided before; None: it did not.

    FSDP2 divides last and stands first in the mesh. Its placement, a `_StridedShard`, says so: ``split_factor`` is in
    how many parts those behind it have divided the dimension. Where these sizes divide evenly, `placed` is the same.
    Elsewhere it is not, and torch's own `full_tensor` and DCP take the one for the other.
    """
    strided = False
    for number, placement in enumerate(placements):
        split = getattr(placement, "split_factor", None)
        if split is not None:
            behind = zip(mesh_shape[number + 1 :], placements[number + 1 :], strict=True)
            if split != prod(n for n, p in behind if sharded_dim(p, len(shape)) == sharded_dim(placement, len(shape))):
                return None
            strided = True
    if not strided:
        return None
    axes: Axes = [[(0, size, 1)] for size in shape]
    for parts, at, placement in reversed(list(zip(mesh_shape, coordinates, placements, strict=True))):
        dim = sharded_dim(placement, len(shape))
        if dim is not None:
            axes[dim] = taken(axes[dim], *chunk(_count(axes[dim]), parts, at))
    return axes


def sharded_dim(placement: Any, ndim: int) -> int | None:
    """The dimension that a placement divides, counted from 0; None: every rank has all.

    Raises:
        InvalidError: it says neither, or divides a dimension that is not there.
    """
    if _says(placement, "is_replicate"):
        return None
    if _says(placement, "is_partial"):
        raise InvalidError(
            f"placement {placement}: it is a part of a sum, and a checkpoint has the whole sum: give Replicate()"
        )
    dim = getattr(placement, "dim", None)
    if not isinstance(dim, int) or not (_says(placement, "is_shard") or hasattr(placement, "split_factor")):
        raise ArgumentTypeError(
            f"placement {placement!r}: give Shard, Replicate or _StridedShard of torch.distributed.tensor"
        )
    if not -ndim <= dim < ndim:
        raise InvalidError(f"placement {placement}: the tensor has {ndim} dimension{'s' * (ndim != 1)}")
    return dim % ndim


def _says(placement: Any, what: str) -> bool:
    asked = getattr(placement, what, None)
    return callable(asked) and bool(asked())


def shape_of(axes: Axes) -> tuple[int, ...]:
    """Positions in each dimension."""
    return tuple(map(_count, axes))


def of_part(axes: Axes, part: Axes) -> Axes:
    """The part of a part: ``part``, which has no steps, counts the positions of ``axes``."""
    return [
        [one for first, past, _ in inner for one in taken(outer, first, past)]
        for outer, inner in zip(axes, part, strict=True)
    ]


def cut_of(axes: Axes) -> tuple[slice | list[slice], ...]:
    """The part as ``slices=`` takes it: one slice per dimension, a list of them where one does not do."""
    made = [[slice(first, past, None if step == 1 else step) for first, past, step in ranges] for ranges in axes]
    return tuple(slices[0] if len(slices) == 1 else slices for slices in made)


class Mesh:
    """One rank's place in a mesh, and what a rule says that it has."""

    def __init__(self, shape: Sequence[int], coordinates: Sequence[int], rule: Rule, argument: str = "rule") -> None:
        self.shape = tuple(shape)
        self.coordinates = tuple(coordinates)
        self._rule = rule
        self._argument = argument
        if not callable(rule) and not isinstance(rule, Mapping):
            raise ArgumentTypeError(
                f"{argument}={rule!r}: give a function from TensorInfo to placements or None, or a dict of them by name"
            )
        self._two = callable(rule) and _takes_two(rule)
        self._known: dict[Any, Axes] = {}  # models have many tensors of few shapes

    def check_names(self, core: Checkpoint) -> None:
        """Raises UnknownTensorError if the rule is a dict with a name that the checkpoint does not have."""
        for name in () if callable(self._rule) else self._rule:
            if name not in core:
                raise unknown(core, name)

    def placements(self, info: TensorInfo) -> list[Any] | None:
        """The rule's placement for each dimension of the mesh, or None if the tensor is not wanted."""
        if not callable(self._rule):
            found = self._rule.get(info.name)
        else:
            found = self._rule(info, self.coordinates) if self._two else self._rule(info)
        if found is None:
            return None
        if isinstance(found, str) or not isinstance(found, Sequence):
            raise ArgumentTypeError(
                f"{self._argument}: of {info.name} it says {found!r}: give a list with a placement for each dimension "
                "of the mesh, or None",
                tensor=info.name,
            )
        if len(found) != len(self.shape):
            raise InvalidError(
                f"{self._argument}: of {info.name} it gives {len(found)} placements, and the mesh has "
                f"{len(self.shape)} dimensions",
                tensor=info.name,
            )
        return list(found)

    def axes(self, info: TensorInfo, placements: Placements) -> Axes:
        """The rank's part of a tensor. Of F4 in pairs along its last dimension, as torch counts."""
        # To some versions of torch `Shard` equals `_StridedShard`
        key = info.dtype == "F4", info.shape, *[(type(p), getattr(p, "split_factor", 1), p) for p in placements]
        try:
            found = self._known.get(key)
        except TypeError:  # placements without a hash
            return self._axes(info, placements)
        if found is None:
            found = self._known[key] = self._axes(info, placements)
        return found

    def _axes(self, info: TensorInfo, placements: Placements) -> Axes:
        try:
            return paired(info.dtype, info.shape, lambda shape: placed(placements, shape, self.shape, self.coordinates))
        except InvalidError as error:
            error.message = f"{self._argument}: {info.name} of shape {list(info.shape)}: {error.message}"
            error.tensor, error.path = info.name, info.file
            raise


def paired(dtype: str, shape: Sequence[int], part: Callable[[Sequence[int]], Axes]) -> Axes:
    """A part of a tensor of the checkpoint. F4 are pairs along the last dimension to torch: ``part`` divides these."""
    if dtype != "F4" or not shape or shape[-1] % 2:
        return part(shape)
    axes = part([*shape[:-1], shape[-1] // 2])
    return axes and [*axes[:-1], [(2 * first, 2 * past, 1) for first, past, _ in axes[-1]]]


def _takes_two(rule: Callable[..., Any]) -> bool:
    """Whether a function has two arguments that it does not do without."""
    import inspect

    try:
        parameters = inspect.signature(rule).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return False
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in by_position and one.default is one.empty for one in parameters) == 2


def at_rank(rank: int, mesh_shape: int | Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a mesh, and the coordinates of its rank number ``rank``, where the last dimension counts fastest.

    Raises:
        InvalidError: no such mesh, or no such rank in it.
    """
    try:
        shape = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(map(int, mesh_shape))
    except (TypeError, ValueError):
        why = f"mesh_shape={mesh_shape!r}: give the ranks in each dimension, such as (2, 4)"
        raise ArgumentTypeError(why) from None
    if not shape or min(shape) < 1:
        raise InvalidError(f"mesh_shape={mesh_shape!r}: give the ranks in each dimension, 1 or more")
    if not isinstance(rank, int):
        raise ArgumentTypeError(f"rank={rank!r}: give a whole number")
    if not 0 <= rank < prod(shape):
        raise InvalidError(f"rank={rank}: a mesh of shape {shape} has ranks 0 to {prod(shape) - 1}")
    coordinates: list[int] = []
    for size in reversed(shape):
        rank, at = divmod(rank, size)
        coordinates.insert(0, at)
    return shape, tuple(coordinates)
