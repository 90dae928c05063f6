"""numpy: arrays on the bytes that a load has brought."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

from . import _core
from ._device import Device
from ._dtypes import CASTABLE, DTYPES, RAW
from ._errors import UnsupportedError
from ._selection import Selection


@cache
def numpy_dtype(name: str) -> Any:
    """numpy's dtype for one of the format (BF16 and F8 through ml_dtypes, if that is installed), or None."""
    import numpy

    dtype = DTYPES[name]
    if dtype.numpy is not None:
        return numpy.dtype(dtype.numpy)
    if dtype.ml_dtypes is not None and importlib.util.find_spec("ml_dtypes") is not None:
        found = getattr(importlib.import_module("ml_dtypes"), dtype.ml_dtypes, None)
        return None if found is None else numpy.dtype(found)
    return None


class Numpy:
    """Makes the numpy arrays of one load: writable, aligned to their dtype, each keeping its block alive."""

    framework = "np"
    misaligned = False
    caller_blocks = False
    dlpack_device = None

    def __init__(self, selection: Selection, device: Device, target: str | None) -> None:
        import numpy

        self._numpy: Any = numpy
        self._selection = selection
        self._raw = target == RAW
        if not device.is_cpu:
            raise UnsupportedError(
                f'device={str(device)!r}: numpy arrays live in CPU memory; framework="dlpack" or "pt" loads to a GPU'
            )
        for name, wants in () if self._raw else selection.by_dtype().items():
            if numpy_dtype(name) is None:
                self._lacks(name, wants[0])
        self._target = None if target is None or self._raw else numpy_dtype(target)
        if target == "BF16" and self._target is None:
            raise UnsupportedError("dtype=bfloat16: numpy lacks it unless the package ml_dtypes is installed")
        self._castable = {numpy_dtype(name) for name in CASTABLE} - {None}

    def _lacks(self, name: str, want: int) -> None:
        help = "the package ml_dtypes adds it; " if DTYPES[name].ml_dtypes else ""
        raise UnsupportedError(
            f"tensor {self._selection.names[want]} is {name}, which numpy lacks; {help}"
            'dtype="raw" or framework="dlpack" gives its bytes',
            path=self._selection.file(want),
        )

    def grant(self, load: _core.Load, blocks: Sequence[int]) -> None:
        """Nothing: the blocks of a load to the CPU are the core's."""

    def tensors(self, load: _core.Load, wants: Sequence[int]) -> list[Any]:
        """Arrays on these ready wants."""
        asarray = self._numpy.asarray
        arrays = [asarray(view) for view in load.views(wants)]
        if not self._raw:
            describe = self._selection.describe
            for i, want in enumerate(wants):
                name, shape = describe(want)
                try:
                    arrays[i] = arrays[i].view(numpy_dtype(name)).reshape(shape)
                except ValueError as why:  # an empty tensor whose other dimensions are too large for numpy
                    raise UnsupportedError(
                        f"tensor {self._selection.names[want]} of shape {list(shape)}: {why}",
                        path=self._selection.file(want),
                    ) from None
        return arrays

    @property
    def casts(self) -> bool:
        """Whether `cast` may change anything."""
        return self._target is not None

    def cast(self, array: Any) -> Any:
        """The array in the dtype asked for, where that applies to it."""
        if self._target is None or array.dtype == self._target or array.dtype not in self._castable:
            return array
        return array.astype(self._target)

    def let_go(self) -> None:
        """Nothing: the blocks are the core's."""
