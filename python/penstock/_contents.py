"""The bytes of files on servers, in the order in which they stand there, as they come. Nothing of them is kept."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from . import _core, _running
from ._device import CPU
from ._dtypes import DTYPES
from ._options import make_options
from ._progress import INTERVAL
from ._request import Opened, Request
from ._selection import Region, Selection

PIECE = 16 << 20
"""Most bytes that come at once, except of tensors whose parts are no whole bytes."""


class Piece(NamedTuple):
    """A part of a tensor whose bytes stand together."""

    tensor: int
    region: Region | None
    """None: all of it."""
    nbytes: int


def pieces(core: _core.Checkpoint, tensors: Iterable[int]) -> Iterator[Piece]:
    """These tensors in pieces, none of them empty."""
    for tensor in tensors:
        _, dtype, shape, _, begin, end = core.info(tensor)
        bits = DTYPES[dtype].bits
        if end - begin > PIECE and bits % 8 == 0:
            yield from _cut(tensor, shape, bits // 8)
        elif end > begin:
            yield Piece(tensor, None, end - begin)


def _cut(tensor: int, shape: Sequence[int], itemsize: int) -> Iterator[Piece]:
    # The first dimension of which one index is no more than a piece
    blocks = [itemsize * math.prod(shape[d + 1 :]) for d in range(len(shape))]
    d = next(d for d, block in enumerate(blocks) if block <= PIECE)
    step, whole = PIECE // blocks[d], [(0, size, 1) for size in shape[d + 1 :]]
    for outer in itertools.product(*map(range, shape[:d])):
        for first in range(0, shape[d], step):
            last = min(first + step, shape[d])
            region = [*((at, at + 1, 1) for at in outer), (first, last, 1), *whole]
            yield Piece(tensor, region, (last - first) * blocks[d])


def received(
    core: _core.Checkpoint,
    wanted: Sequence[Piece],
    window: int,
    stall_timeout: float | None = None,
    reports: list[dict[str, Any]] | None = None,
) -> Iterator[memoryview | None]:
    """The bytes of each piece, in the order in which they stand in their files. They are gone when the next are asked
    for.

    None: nothing came for `INTERVAL` seconds. ``window`` is the most bytes that are read ahead. ``reports`` gets the
    core's report in the end, also if the iterator is closed before.
    """
    options = make_options({"window": window, "copy": True, "stall_timeout": stall_timeout})
    selection = Selection(core, [], [piece.tensor for piece in wanted], [piece.region for piece in wanted])
    load = _running.begin(Request(cast(Opened, None), selection, CPU, options, "file"), None, stream=True)
    try:
        while (want := load.next(INTERVAL)) is not None:
            if isinstance(want, bool):
                yield None
                continue
            [view] = load.views([want])
            yield memoryview((ctypes.c_char * view.nbytes).from_address(view.address))
            del view
            load.take(want)
        load.wait()
    finally:
        _running.over(load)
        load.close()
        if reports is not None:
            reports.append(load.report())
        load.let_go()
