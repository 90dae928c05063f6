"""The tensors of each file, as the streamer of Run:ai describes them: made when somebody looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from .. import _dtypes
from .._errors import UnsupportedError

if TYPE_CHECKING:
    from .._core import Checkpoint


class Offsets(NamedTuple):
    """The place of a tensor in the data section of its file."""

    start: int
    end: int

    def get_diff(self) -> int:
        """Bytes."""
        return self.end - self.start


class SafetensorMetadata(NamedTuple):
    """The entry of a tensor in the header of its file."""

    name: str
    shape: list[int]
    """As in the header: of F4 it counts single elements."""
    dtype: str
    """In the spelling of the header."""
    offsets: Offsets

    def get_bytesize(self) -> int:
        """Bytes in the file."""
        return self.offsets.get_diff()

    def get_storage_shape(self) -> list[int]:
        """The shape of the torch tensor: of F4 the last dimension counts pairs."""
        return [*self.shape[:-1], self.shape[-1] // 2] if self.dtype == "F4" else list(self.shape)

    def get_item_count(self) -> int:
        """Elements of the torch tensor."""
        return math.prod(self.get_storage_shape())

    def get_torch_dtype(self) -> Any:
        """The torch.dtype.

        Raises:
            UnsupportedError: torch lacks it.
        """
        import torch

        found = getattr(torch, _dtypes.DTYPES[self.dtype].torch or "", None)
        if found is None:
            raise UnsupportedError(f"tensor {self.name} is {self.dtype}, which torch {torch.__version__} lacks")
        return found

    def get_element_size(self) -> int:
        """Bytes of one element of the torch tensor."""
        return max(1, _dtypes.DTYPES[self.dtype].bits // 8)


class Described(Sequence[SafetensorMetadata]):
    """The wanted tensors of one file, in the order of their offsets."""

    def __init__(self, core: Checkpoint, file: int, wanted: frozenset[str] | None) -> None:
        self._core, self._start = core, core.data_start(file)
        numbers: Sequence[int] = range(*core.file_tensors(file))
        if wanted is not None:
            numbers = [number for number in numbers if core.info(number)[0] in wanted]
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> SafetensorMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> list[SafetensorMetadata]: ...
    def __getitem__(self, index: int | slice) -> SafetensorMetadata | list[SafetensorMetadata]:
        if isinstance(index, slice):
            return [self._one(number) for number in self._numbers[index]]
        return self._one(self._numbers[index])

    def _one(self, number: int) -> SafetensorMetadata:
        name, dtype, shape, _, begin, end = self._core.info(number)
        return SafetensorMetadata(name, list(shape), dtype, Offsets(begin - self._start, end - self._start))
