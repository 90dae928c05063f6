"""Wants that are several ranges in a dimension: loaded piece by piece, and joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

from ._selection import Axes, Range, Region, Selection

Grid = tuple[int, ...]
"""Pieces in each dimension."""


def pieces_of(axes: Axes) -> Iterator[tuple[Region, Region]]:
    """The regions that make up a part, and where each comes to lie in it. The last dimension goes fastest."""
    places = [_places(ranges) for ranges in axes]
    for where in product(*(range(len(ranges)) for ranges in axes)):
        yield (
            [ranges[i] for ranges, i in zip(axes, where, strict=True)],
            [place[i] for place, i in zip(places, where, strict=True)],
        )


def _places(ranges: Sequence[Range]) -> list[Range]:
    found, begin = [], 0
    for one in ranges:
        found.append((begin, begin + len(range(*one)), 1))
        begin = found[-1][1]
    return found


def apart(selection: Selection) -> tuple[Selection, dict[int, Grid]]:
    """The selection with a want for each piece, and by the first of these what a want was cut into."""
    names: list[str] = []
    wants: list[int] = []
    regions: list[Region | None] = []
    grids: dict[int, Grid] = {}
    for want, name in enumerate(selection.names):
        axes = selection.scattered.get(want)
        if axes is None:
            found: list[Region | None] = [None if selection.regions is None else selection.regions[want]]
        else:
            found = [region for region, _ in pieces_of(axes)]
            grids[len(names)] = tuple(map(len, axes))
        names += [name] * len(found)
        wants += [selection.tensor(want)] * len(found)
        regions += found
    return Selection(selection.core, names, wants, regions), grids


class Joining:
    """Makes one tensor of the pieces of each want, as they come. For one load."""

    def __init__(self, grids: dict[int, Grid], join: Callable[[list[Any], int], Any]) -> None:
        self._join = join
        self._grids = grids
        self._first = {first + at: first for first, grid in grids.items() for at in range(prod(grid))}
        self._held: dict[int, dict[int, Any]] = {first: {} for first in grids}

    def add(self, want: int, tensor: Any) -> tuple[bool, Any]:
        """Whether the want that ``tensor`` is (a piece of) is complete, and its tensor if it is."""
        first = self._first.get(want)
        if first is None:
            return True, tensor
        held, grid = self._held[first], self._grids[first]
        held[want] = tensor
        if len(held) < prod(grid):
            return False, None
        del self._held[first]
        return True, self._joined([held[number] for number in sorted(held)], grid, 0)

    def _joined(self, parts: list[Any], grid: Grid, axis: int) -> Any:
        if not grid:
            return parts[0]
        each = len(parts) // grid[0]
        inner = [self._joined(parts[at : at + each], grid[1:], axis + 1) for at in range(0, len(parts), each)]
        return inner[0] if len(inner) == 1 else self._join(inner, axis)
