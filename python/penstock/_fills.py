"""One want and the memory that it goes to: whether they fit, and in which order the bytes lie there."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ._dtypes import CASTABLE, DTYPES
from ._memory import Memory, is_numpy, is_torch
from ._selection import Selection


class Fill:
    """A destination that fits what is wanted of a tensor."""

    __slots__ = ("_backwards", "cast", "dims", "memory", "name", "order", "spread")

    def __init__(self, memory: Memory, name: str, order: Sequence[int] | None, cast: str | None, spread: bool) -> None:
        self.memory = memory
        self.name = name
        """The name of the tensor in the checkpoint."""
        self.order = order
        """The dimensions of the memory in the order of the checkpoint's; None: the same."""
        self.cast = cast
        """The dtype to convert to, or None."""
        self.spread = spread
        """Whether each of its elements gets the one that is wanted."""
        self.dims: list[tuple[int, int]] | None = None
        """(count, bytes from one to the next) in the want's order; None: contiguous."""
        self._backwards = False
        if spread or (memory.contiguous and order is None):
            return
        steps, size = memory.steps()
        dims = [steps[d] for d in (range(len(steps)) if order is None else order) if steps[d][0] > 1]
        self._backwards = any(step < 0 for _, step in dims)
        for n, step in reversed(dims):
            if step != size:
                self.dims = dims
                break
            size *= n

    def straight(self, selection: Selection, want: int) -> bool:
        """Whether the core can fill it."""
        if self._backwards:
            return False
        if self.cast is not None:
            # The core converts on the CPU, if no element lies in two reads
            _, dtype, _, _, begin, _ = selection.core.info(selection.tensor(want))
            return self.memory.device.is_cpu and begin % (DTYPES[dtype].bits // 8) == 0
        return True

    def span(self) -> int:
        """Bytes from its first element to the end of its last one, where all of them come behind the first."""
        memory = self.memory
        if not memory.nbytes:
            return 0
        size = memory.item_size()
        if self.spread:
            return size
        return memory.nbytes if self.dims is None else sum((n - 1) * step for n, step in self.dims) + size

    def copy(self, tensor: Any) -> None:
        """Copies a loaded tensor, which has the dimensions of the checkpoint's."""
        to = self.memory.tensor
        if is_numpy(to):
            import numpy

            there = to.view(numpy.ndarray)  # not by a subclass' own idea of assignment
            if self.order is not None:
                there = there.transpose(self.order)
            there[...] = tensor.reshape(()) if self.spread else tensor.reshape(there.shape)
            return
        import torch

        # An inference tensor may be written to in that mode alone
        with torch.inference_mode() if to.is_inference() else torch.no_grad():
            if self.spread:
                to.copy_(tensor.reshape(()))
                return
            there = to if self.order is None else to.permute(list(self.order))
            there.copy_((tensor.view(to.dtype) if self._as_bytes(tensor) else tensor).reshape(there.shape))

    def _as_bytes(self, tensor: Any) -> bool:
        return self.cast is None and tensor.dtype != self.memory.tensor.dtype

    def spread_out(self) -> None:
        """Gives all elements the value of the first one, which has been loaded."""
        to = self.memory.tensor
        if is_numpy(to):
            to[...] = to[(0,) * to.ndim]
        elif is_torch(to):
            import torch

            with torch.inference_mode() if to.is_inference() else torch.no_grad():
                to.copy_(to[(0,) * to.dim()].clone())


def fitted(
    to: Memory,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    axes: Sequence[int | None] | None = None,
    cast: bool = False,
    one_for_all: bool = False,
) -> tuple[Fill, list[str]]:
    """The destination for a want of this dtype and shape, and what is wrong with it.

    Args:
        to: Where it goes.
        name: The tensor's.
        dtype: The tensor's, as in the header.
        shape: Of what is wanted, in elements of the tensor.
        axes: As in `Destination`.
        cast: As in `Destination`.
        one_for_all: Whether one element fits any shape.
    """
    problems = []
    order: Sequence[int] | None = None
    one = one_for_all and axes is None and prod(shape) == 1 and to.nbytes > 0
    if axes is not None:
        order, wrong = _order(to, shape, axes, dtype)
        if wrong:
            problems.append(f"{name}: {wrong}")
    elif shape != to.shape and not one:
        problems.append(f"{name} has shape {list(shape)} in the checkpoint, but {list(to.shape)} in its destination")
    target = None
    if dtype != to.dtype:
        if cast and dtype in CASTABLE and to.dtype in CASTABLE:
            target = to.dtype
        elif to.dtype != "U8" or DTYPES[dtype].bits != 8:
            why = ", and cast=True converts F16, BF16, F32 and F64 only" if cast else ""
            problems.append(f"{name} is {dtype} in the checkpoint, but {to.dtype} in its destination{why}")
    if problems:
        return Fill(to, name, None, None, True), problems
    return Fill(to, name, order, target, one and to.nbytes > to.item_size()), problems


def _order(
    to: Memory, shape: tuple[int, ...], axes: Sequence[int | None], dtype: str
) -> tuple[Sequence[int] | None, str | None]:
    """The dimensions of a destination in the order of the checkpoint's, and what is wrong with its axes."""
    if len(axes) != len(to.shape):
        return None, f"{len(axes)} axes for a destination of {len(to.shape)} dimensions"
    behind: list[list[int]] = [[] for _ in shape]
    rest = []
    for d, axis in enumerate(axes):
        if axis is None:
            if to.shape[d] != 1:
                return None, f"axes[{d}] is None, but the destination has {to.shape[d]} elements in that dimension"
            rest.append(d)
        elif isinstance(axis, int) and 0 <= axis < len(shape):
            behind[axis].append(d)
        else:
            return None, f"axes[{d}] is {axis!r}: the checkpoint's tensor has dimensions 0 to {len(shape) - 1}"
    if DTYPES[dtype].bits < 8 and axes and axes[-1] != len(shape) - 1:
        return None, f"{dtype} has several elements in a byte, so the last dimension has to be the last one of both"
    for axis, (wanted, own) in enumerate(zip(shape, behind, strict=True)):
        given = prod(to.shape[d] for d in own)
        if given != wanted:
            text = f"dimension {axis} has {wanted} wanted elements, and {given} in the destination"
            return None, f"{text} (axes={list(axes)})"
    order = [d for own in behind for d in own] + rest
    return (None if order == sorted(order) else order), None
