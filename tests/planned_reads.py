"""Which reads a slice takes, worked out from the index and the documentation of `gap` and `extent` alone."""

from __future__ import annotations

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
    places = np.unique(np.arange(int(np.prod(shape))).reshape(shape)[index])
    found = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return [(offset + int(run[0]) * size, offset + (int(run[-1]) + 1) * size) for run in found if run.size]


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
            inside = [(max(a, at), min(b, past)) for a, b in span if a < past and b > at]
            if inside:
                first, last = inside[0][0], inside[-1][1]
                yield (down(first), min(up(last), size)) if pages else (first, last)
            at = past


def pages_of(ranges: Iterable[Range]) -> set[int]:
    """Numbers of the file's pages that byte ranges touch."""
    return {page for first, past in ranges for page in range(first // PAGE, -(-past // PAGE))}
