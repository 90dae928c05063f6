"""Reloads: tensors whose copies are made at once, from parts that are read ahead.

An engine that reloads processes each layer as soon as its last tensor has been copied. So nothing can be put off. But
the first load has shown which part of each tensor is copied. Those parts are streamed, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .._checkpoint import Checkpoint
from .._selection import TensorInfo
from ._deferred import Deferred, Root, arranged, destination_of, kind_of, piece_of, planned
from ._region import Box

Cuts = dict[str, tuple[slice, ...]]
"""By name: the smallest part of the tensor that has all that was copied of it."""


def cuts_of(copied: Iterable[tuple[str, tuple[slice, ...]]]) -> Cuts:
    """The parts that these copies (name, part) are of."""
    found: Cuts = {}
    for name, cut in copied:
        _add(found, name, cut)
    return found


def _add(cuts: Cuts, name: str, cut: tuple[slice, ...]) -> None:
    before = cuts.get(name)
    cuts[name] = tuple(
        slice(min(a.start, b.start), max(a.stop, b.stop)) for a, b in zip(before or cut, cut, strict=True)
    )


def _fits(info: TensorInfo, cut: tuple[slice, ...]) -> bool:
    return len(cut) == len(info.shape) and all(part.stop <= n for part, n in zip(cut, info.shape, strict=True))


class Reloader:
    """Gives the tensors of a checkpoint, each with the part of it that is expected to be copied.

    Args:
        checkpoint: What to load.
        keep: Which tensors to give; None gives all of them.
        device: Where the parts are read to.
        options: Of the loads.
        cuts: The parts. A tensor without one is read when it is needed. None: they are not known, and tensors are read
            whole.
        learn: Gets the parts, when all tensors were given, if they were not known. Copies of later add to them.

    Raises:
        MissingDtypeError: torch has no such dtype.
        UnsupportedError: torch cannot hold a tensor.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        keep: Callable[[str], bool] | None,
        device: torch.device,
        options: Any,
        cuts: Cuts | None,
        learn: Callable[[Cuts], None] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.read_besides = 0
        """Bytes that were not read ahead."""
        self._device = device
        self._options = options
        self._names = checkpoint.keys()
        self._cuts: Cuts = {}
        self._learn = learn if cuts is None else None
        self._copied: Cuts = {}
        self._roots: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        for number, (name, info) in enumerate(checkpoint.items()):
            if keep is None or keep(name):
                dtype, shape = kind_of(info)
                self._roots[name] = number, shape, dtype
                if cuts is None:
                    self._cuts[name] = tuple(slice(0, n) for n in info.shape)
                    continue
                cut = cuts.get(name)
                known = cut is not None and _fits(info, cut)
                self._cuts[name] = cut if known and cut is not None else tuple(slice(0, 0) for _ in info.shape)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) layer by layer."""
        stream = self.checkpoint.stream(
            self._device, list(self._roots), "layer", framework="pt", slices=self._cuts, options=self._options
        )
        for name, part in stream:
            number, shape, dtype = self._roots[name]
            root = Root(self, number, shape, dtype)
            root.part = self._cuts[name], part
            yield name, Deferred(root, torch.empty(shape, dtype=dtype, device="meta"), self._device)
            del root, part  # or they would stay until the next one is there
        if self._learn is not None:
            self._learn(self._copied)

    # As `Recording` says

    def copied(self, to: torch.Tensor, source: Deferred) -> bool:
        """Makes a copy at once, of what has been read ahead."""
        if to.numel() == 0:
            return to.shape == source.shape
        plan = planned(to, source)
        piece = None if plan is None else _piece(plan.tensor, plan.box)
        if plan is None or piece is None:
            return False
        if self._learn is not None:
            _add(self._copied, self._names[plan.tensor.index], plan.cut)
        plan.into.copy_(piece if plan.axes is not None else piece.reshape(()))
        return True

    def read(self, tensor: Root, box: Box, to: torch.Tensor) -> None:
        """Fills a new tensor, from the file if its part was not read ahead."""
        piece = _piece(tensor, box)
        if piece is not None:
            arranged(to, box).copy_(piece)
            return
        self.read_besides += to.nbytes
        destination = destination_of(self._names[tensor.index], tensor, box, to)
        self.checkpoint.load_into([destination], progress=False, options=self._options)

    def about_to_touch(self, tensor: torch.Tensor) -> None:
        """Nothing is outstanding."""

    def count(self, operation: str, nbytes: int) -> None:
        """Nothing is counted."""

    def wrote(self, index: int) -> None:
        """Every copy is made at once, so an error is of the engine's."""


def _piece(tensor: Root, box: Box) -> torch.Tensor | None:
    """A box of a tensor out of the part of it that has been read; None if that part does not have all of it."""
    return None if tensor.part is None else piece_of(box, *tensor.part)
