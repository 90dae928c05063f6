"""The description of a framework: a `Framework`, which makes an `Adapter` for each load.

A framework is one file, which imports it and has its `Framework` as ``FRAMEWORK``; `_frameworks` lists the files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from . import _core
from ._device import Device
from ._selection import Selection, TensorInfo

if TYPE_CHECKING:  # it takes a millisecond, and a load of whole tensors needs none of it
    from ._indexing import Indexing


class Adapter:
    """Makes one framework's tensors for one load. What is here is true of views on the core's own memory."""

    misaligned = False
    """Whether tensors may begin at any address, and so keep their place in a file that misaligns them."""

    _target: Any = None
    """The framework's dtype that is asked for, or None."""
    _castable: Collection[Any] = ()
    """The framework's dtypes that are cast to it."""

    @property
    def caller_blocks(self) -> bool:
        """Whether the load's block memory is granted by the adapter."""
        return False

    @property
    def casts(self) -> bool:
        """Whether `cast` may change anything."""
        return self._target is not None

    @property
    def dlpack_device(self) -> tuple[int, int] | None:
        """The DLPack device that capsules carry; None: the core knows."""
        return None

    def grant(self, load: _core.Load, blocks: Sequence[int]) -> None:
        """Gives the load the memory of these blocks."""

    def tensors(self, load: _core.Load, wants: Sequence[int]) -> list[Any]:
        """Tensors on these ready wants."""
        raise NotImplementedError

    def cast(self, tensor: Any) -> Any:
        """The tensor in the dtype asked for, where that applies to it."""
        if self._target is None or tensor.dtype == self._target or tensor.dtype not in self._castable:
            return tensor
        return self._as_target(tensor)

    def _as_target(self, tensor: Any) -> Any:
        raise NotImplementedError

    def let_go(self) -> None:
        """Lets go of the memory of blocks that no tensor was made of: their load has failed, or is over."""


class Framework:
    """A framework. What is here is true of one whose tensors share the memory of a load, and are indexed themselves."""

    views = True
    """Whether tensors are views on the memory of a load. Others are copies of it."""

    joins = True
    """Whether there is a `joined`."""

    def adapter(self, selection: Selection, device: Device, target: str | None) -> Adapter:
        """The adapter that makes the tensors of a load, cast to ``target``: a dtype of the format, or `RAW`.

        Raises:
            UnsupportedError: before a byte moves, if the framework lacks a wanted dtype.
        """
        raise NotImplementedError

    def of_capsules(self) -> tuple[dict[str, tuple[int, int, int]], Callable[[object], Any]] | None:
        """The dtypes whose tensors on the CPU are DLPack capsules taken as they are, and what takes one.

        None: `adapter` makes all tensors."""
        return None

    def indexing(self, info: TensorInfo) -> Indexing:
        """How this framework indexes a tensor of the checkpoint."""
        raise NotImplementedError

    def joined(self, parts: list[Any], axis: int) -> Any:
        """Tensors as one."""
        raise NotImplementedError

    def sliced_by(self, device: Device) -> Framework:
        """The framework whose tensors are indexed in place of this one's; `of_slice` then makes this one's."""
        return self

    def check_slice(self, info: TensorInfo) -> None:
        """Raises UnsupportedError if the framework has no tensor of a slice of this one."""

    def slices(self, selection: Selection, device: Device) -> Adapter:
        """The adapter that makes the tensors that `sliced_by` indexes."""
        return self.adapter(selection, device, None)

    def of_slice(self, part: Any, dtype: str) -> Any:
        """The tensor of a slice of a tensor that has this dtype of the format."""
        return part
