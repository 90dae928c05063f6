"""`Destination`: one place for a tensor of a checkpoint, or for a part of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._errors import ArgumentTypeError
from ._selection import Cut


class Destination:
    """A tensor in memory that a tensor of the checkpoint, or a part of one, is loaded into.

    `Checkpoint.load_into` takes a list of them. One tensor of the checkpoint may have any number of destinations.

        fused = torch.empty(2 * 4096, 1024, dtype=torch.bfloat16)
        checkpoint.load_into([
            penstock.Destination("gate_proj.weight", fused[:4096]),
            penstock.Destination("up_proj.weight", fused[4096:]),
        ])

    Args:
        name: The tensor's name in the checkpoint.
        into: A torch tensor or numpy array. It may be strided, on a GPU too. A U8 tensor takes the bytes of any dtype
            of 8 bits.
        cut: The part that is wanted, as in ``slices=`` of `Checkpoint.load`. None: all of it.
        axes: For each dimension of ``into``, which dimension of the checkpoint's tensor is behind it, counted from 0.
            None in its place: a dimension of one element with none behind it. Dimensions of the checkpoint's tensor
            that are left out have one element in the cut. Several dimensions of ``into`` may divide one of the
            checkpoint's: the first is the outermost. No axes: the dimensions of both are the same.
        cast: Whether F16, BF16, F32 and F64 are converted to the dtype of ``into``, if that is one of these. The result
            is that of ``Tensor.to``.

    If the cut has one element and there are no axes, ``into`` may have any shape: each of its elements gets that one.
    """

    __slots__ = ("axes", "cast", "cut", "into", "name")

    def __init__(
        self,
        name: str,
        into: Any,
        cut: Cut | None = None,
        axes: Sequence[int | None] | None = None,
        cast: bool = False,
    ) -> None:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"Destination: {name!r} is not the name of a tensor: give a string")
        self.name = name
        self.into = into
        self.cut = cut
        self.axes = axes
        self.cast = cast

    def __repr__(self) -> str:
        more = "".join(
            f", {name}={value}"
            for name, value in (("cut", self.cut), ("axes", self.axes), ("cast", self.cast or None))
            if value is not None
        )
        shape, dtype = getattr(self.into, "shape", ()), getattr(self.into, "dtype", type(self.into).__name__)
        return f"Destination({self.name!r}, {dtype} of shape {list(shape)}{more})"
