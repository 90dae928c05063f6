"""Views of a tensor as boxes: which hyper-rectangle of the tensor a view is, and where each element of that goes.

A view is a list of steps: so many positions, so far apart in the tensor, so far apart at the destination. Engines make
views with `narrow`, `chunk`, `view`, `transpose` and the like. Nearly all of them are boxes, even if dimensions were
split or joined on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Step = tuple[int, int, int]
"""(count, distance in the tensor, distance at the destination), both in elements."""


class Box(NamedTuple):
    """A hyper-rectangle of a tensor, and how it lies at its destination."""

    cut: tuple[tuple[int, int, int], ...]
    """(first, past-the-last, step) in each dimension of the tensor."""
    dims: list[tuple[int, int, int]]
    """(dimension of the tensor, count, distance at the destination). In row-major order of the box.

    Several of one dimension divide it: the first is the outermost. Dimensions of one element have none."""


def dense(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor, in elements."""
    strides, step = [0] * len(shape), 1
    for d in range(len(shape) - 1, -1, -1):
        strides[d] = step
        step *= shape[d]
    return strides


def box_of(shape: Sequence[int], steps: Sequence[Step], offset: int) -> Box | None:
    """The box of a contiguous tensor that a view is; None if it is none.

    Args:
        shape: Of the tensor.
        steps: Of the view, in any order. Every count is at least 1.
        offset: Where the view begins in the tensor, in elements.

    None also stands for views that show an element more than once (`expand`), and for those that leave the tensor.
    """
    strides = dense(shape)
    first, rest = [0] * len(shape), offset
    for d, stride in enumerate(strides):
        first[d], rest = divmod(rest, stride) if stride else (0, rest)
    if rest or any(at >= size for at, size in zip(first, shape, strict=True)):
        return None
    # By dimension: (step within it, count, distance at the destination)
    found: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for one in steps:
        if one[0] > 1 and not _divided(shape, strides, one, found):
            return None
    cut, dims = [], []
    for d, of_dimension in enumerate(found):
        if not of_dimension:
            cut.append((first[d], first[d] + 1, 1))
            continue
        of_dimension.sort(reverse=True)
        count, step = 1, of_dimension[-1][0]
        for own, n, _ in reversed(of_dimension):
            if own != step * count:
                return None
            count *= n
        past = first[d] + (count - 1) * step + 1
        if past > shape[d]:
            return None
        cut.append((first[d], past, step))
        dims += [(d, n, to) for _, n, to in of_dimension]
    return Box(tuple(cut), dims)


def _divided(shape: Sequence[int], strides: Sequence[int], one: Step, found: list[list[tuple[int, int, int]]]) -> bool:
    """Gives each dimension its part of a step of a view, which may run through several of them. False: it has none."""
    count, apart, to = one
    if apart <= 0:
        return False
    d = next((d for d, stride in enumerate(strides) if shape[d] > 1 and stride <= apart), None)
    while d is not None:
        step, beside = divmod(apart, strides[d])
        if beside:
            return False
        within = -(-shape[d] // step)  # positions of this step in the whole dimension
        if count <= within:
            found[d].append((step, count, to))
            return True
        # It goes on in the next dimension, at the same place: only a dimension that is gone through evenly does
        if shape[d] % step or count % within:
            return False
        if within > 1:
            found[d].append((step, within, to))
        count, apart, to = count // within, strides[d] * shape[d], to * within
        d = next((outer for outer in range(d - 1, -1, -1) if shape[outer] > 1), None)
    return False


def composed(box: Box, strides: Sequence[int], offset: int) -> tuple[list[Step], int]:
    """The steps and the offset of a box of a copy, in the tensor that the copy was made of a view of.

    Args:
        box: Of the copy.
        strides: Of the view, in elements, one for each dimension of the copy.
        offset: Of the view.
    """
    steps: list[Step] = []
    inner = 1
    for number in range(len(box.dims) - 1, -1, -1):
        d, count, to = box.dims[number]
        if number + 1 < len(box.dims) and box.dims[number + 1][0] == d:
            inner *= box.dims[number + 1][1]
        else:
            inner = 1
        steps.append((count, strides[d] * box.cut[d][2] * inner, to))
    return steps, offset + sum(cut[0] * stride for cut, stride in zip(box.cut, strides, strict=True))
