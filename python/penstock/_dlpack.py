"""DLPack: tensors for whatever framework speaks it, without importing any."""

from __future__ import annotations

from collections.abc import Sequence

from . import _core
from ._device import Device
from ._dtypes import DTYPES, RAW
from ._errors import SliceError, UnsupportedError
from ._framework import Adapter, Framework
from ._indexing import Arrays, Indexing
from ._selection import Selection, TensorInfo


class DLTensor:
    """A loaded tensor that any DLPack consumer can take: ``jax.dlpack.from_dlpack(t)``, ``torch.from_dlpack(t)``, ...

    `penstock.save` and `penstock.save_file` take it too, and write it with the dtype and the shape of its header.

    Attributes:
        dtype: As spelled in the header; ``"U8"`` where DLPack lacks the tensor's own dtype (F4, F6), or for bytes.
        shape: In elements of ``dtype``.
        nbytes: Size in bytes.
    """

    __slots__ = ("_stored", "_view", "dtype", "nbytes", "shape")

    def __init__(self, view: _core.View, dtype: str, shape: tuple[int, ...]) -> None:
        # A tuple in each tensor would be one more object to make: only where it says something else
        self._stored: tuple[str, tuple[int, ...]] | None = None
        if DTYPES[dtype].dlpack is None:
            self._stored = (dtype, shape)
            dtype, shape = "U8", (view.nbytes,)
        self.dtype = dtype
        self.shape = shape
        self.nbytes = view.nbytes
        self._view = view

    @property
    def _format(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of its header."""
        return self._stored or (self.dtype, self.shape)

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A capsule that shares this tensor's memory. The bytes are complete, so any ``stream`` may use them at once.

        Raises:
            BufferError: a copy, or another device than the tensor's, was asked for.
        """
        if copy:
            raise BufferError("penstock does not copy: copy the tensor with the framework")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"this tensor is on DLPack device {self.__dlpack_device__()}, not {tuple(dl_device)}")
        code_bits = DTYPES[self.dtype].dlpack
        assert code_bits is not None
        return self._view.capsule(code_bits, self.shape)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(device type, device number) as DLPack counts them: (1, 0) is the CPU, (2, n) CUDA, (10, n) ROCm."""
        return self._view.__dlpack_device__()

    def __repr__(self) -> str:
        return f"DLTensor(dtype={self.dtype!r}, shape={self.shape!r}, device={self.__dlpack_device__()!r})"


class DLPack(Adapter):
    """Makes the `DLTensor` objects of one load. On a GPU the core allocates the memory itself."""

    def __init__(self, selection: Selection, device: Device, target: str | None) -> None:
        if target not in (None, RAW):
            raise UnsupportedError('framework="dlpack" does not cast: leave dtype out, or give dtype="raw"')
        self._selection = selection
        self._raw = target == RAW

    def tensors(self, load: _core.Load, wants: Sequence[int]) -> list[DLTensor]:
        """Tensors on these ready wants."""
        made = []
        for want, view in zip(wants, load.views(wants), strict=True):
            dtype, shape = self._selection.describe(want)
            if self._raw:
                dtype, shape = "U8", (view.nbytes,)
            made.append(DLTensor(view, dtype, shape))
        return made


def indexing(info: TensorInfo) -> Indexing:
    """How these are indexed: by slices, which the core can cut itself."""

    def refused(part: object) -> object:
        why = f'framework="dlpack" takes slices, not {part!r}'
        raise SliceError(f"slice of {info.name}: {why}", path=info.file, tensor=info.name)

    return Indexing(
        Arrays(refused, refused, reversible=False), info.shape, 1, refused, lambda tensor, index: refused(index)
    )


class _Framework(Framework):
    joins = False

    def adapter(self, selection: Selection, device: Device, target: str | None) -> Adapter:
        return DLPack(selection, device, target)

    def indexing(self, info: TensorInfo) -> Indexing:
        return indexing(info)


FRAMEWORK = _Framework()
