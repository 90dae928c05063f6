"""Which reads a slice takes, worked out from the index and the documentation of `gap` and `extent` alone."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

PAGE = 4096
HUGE = 2 << 20

Range = tuple[int, int]


def runs(offset: int, shape: tuple[int, ...], size: int, index: Any) -> list[Range]:
    """The byte ranges, ascending, that the elements named by a numpy index take in a file.

    offset: of the tensor's first byte. size: bytes of an element.
    """
    wanted = np.zeros(shape, dtype=bool)
    wanted[index] = True
    places = np.flatnonzero(wanted)
    if not places.size:
        return []
    ends = np.flatnonzero(np.diff(places) != 1)
    first, last = places[[0, *(ends + 1)]], places[[*ends, -1]]
    return list(zip((offset + first * size).tolist(), (offset + (last + 1) * size).tolist(), strict=True))


def within(ranges: list[Range], first: int, past: int) -> Range | None:
    """From the first to the last byte of ascending ranges that lies between these two; None if none does."""
    begin = bisect.bisect_right(ranges, first, key=lambda r: r[1])
    end = bisect.bisect_left(ranges, past, key=lambda r: r[0])
    return (max(ranges[begin][0], first), min(ranges[end - 1][1], past)) if begin < end else None


def down(at: int, unit: int = PAGE) -> int:
    return at // unit * unit


def up(at: int, unit: int = PAGE) -> int:
    return -(-at // unit) * unit


def reads(
    wanted: Iterable[Range], size: int, *, extent: int, gap: int, pages: bool, cut: int = PAGE
) -> Iterator[Range]:
    """(first, past-the-last) byte of each read of a file of `size` bytes.

    Ranges at most `gap` apart, or on the same page, are read together; what is longer than `extent` is cut at multiples
    of `cut`, the last two reads sharing evenly; gaps at either end of a read are left out. `pages`: reads are of whole
    pages, as O_DIRECT's and a mapping's are.
    """
    spans: list[list[Range]] = []
    for start, end in wanted:
        if spans and (start <= spans[-1][-1][1] + gap or down(start) < up(spans[-1][-1][1])):
            spans[-1].append((start, end))
        else:
            spans.append([(start, end)])
    for span in spans:
        at, end = (down(span[0][0]), up(span[-1][1])) if pages else (span[0][0], span[-1][1])
        while at < end:
            left, furthest = end - at, down(at + extent, cut)
            past = end if left <= extent else min(up(at + left // 2, cut), furthest) if left < 2 * extent else furthest
            if inside := within(span, at, past):
                first, last = inside
                yield (down(first), min(up(last), size)) if pages else (first, last)
            at = past


def pages_of(ranges: Iterable[Range]) -> set[int]:
    """Numbers of the file's pages that byte ranges touch."""
    return {page for first, past in ranges for page in range(first // PAGE, -(-past // PAGE))}
