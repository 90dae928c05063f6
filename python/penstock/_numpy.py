"""numpy: arrays on the bytes that a load has brought."""

from __future__ import annotations

import importlib
import importlib.util
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy

from . import _core
from ._device import Device
from ._dtypes import CASTABLE, DTYPES, RAW
from ._errors import MissingDtypeError, UnsupportedError
from ._framework import Adapter, Framework
from ._indexing import Arrays, Indexing
from ._late_imports import importing
from ._selection import Selection, TensorInfo


@cache
def numpy_dtype(name: str) -> Any:
    """numpy's dtype for one of the format (BF16 and F8 through ml_dtypes, if that is installed), or None."""
    dtype = DTYPES[name]
    if dtype.numpy is not None:
        return numpy.dtype(dtype.numpy)
    if dtype.ml_dtypes is not None and importlib.util.find_spec("ml_dtypes") is not None:
        with importing():
            found = getattr(importlib.import_module("ml_dtypes"), dtype.ml_dtypes, None)
        return None if found is None else numpy.dtype(found)
    return None


def _help(dtype: str) -> str:
    return " (the package ml_dtypes adds it)" if DTYPES[dtype].ml_dtypes else ""


def of_bytes(data: bytes, carriers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Every tensor of a file's content by name, in memory of its own. ``carriers`` are those of `Numpy`."""
    core = _core.Checkpoint.from_bytes(data)
    made: dict[str, Any] = {}
    for number in range(len(core)):
        name, dtype, shape, _, begin, end = core.info(number)
        kind = numpy_dtype(dtype) if dtype not in (carriers or {}) else numpy.dtype((carriers or {})[dtype])
        if kind is None:
            raise MissingDtypeError(f"tensor {name} is {dtype}, which numpy lacks{_help(dtype)}", tensor=name)
        made[name] = numpy.frombuffer(bytearray(memoryview(data)[begin:end]), numpy.uint8).view(kind).reshape(shape)
    return made


def indexing(info: TensorInfo) -> Indexing:
    """How numpy indexes a tensor of the checkpoint."""

    def array(part: Any) -> Any:
        made = numpy.asarray(part)
        return made.astype(numpy.intp) if isinstance(part, (list, tuple)) and made.size == 0 else made

    def plain(part: Any) -> Any:
        # numpy takes whatever has `__index__` for a number, tensors of one element too, but its own arrays and booleans
        if hasattr(part, "__index__") and not isinstance(part, (numpy.ndarray, numpy.bool_, bool)):
            with suppress(Exception):
                return operator.index(part)
        return part

    arrays = Arrays(array, lambda numbers: numpy.array(numbers, numpy.intp), reversible=True, plain=plain)
    nothing = numpy.broadcast_to(numpy.empty((), bool), info.shape)
    # As safetensors an array in every case: numpy gives a scalar, which is none, where all dimensions are numbers
    return Indexing(arrays, info.shape, 1, nothing.__getitem__, lambda array, index: numpy.asarray(array[index]))


class Numpy(Adapter):
    """Makes the numpy arrays of one load: writable, aligned to their dtype, each keeping its block alive.

    Args:
        carriers: By dtypes of the format numpy's dtypes to give in their place, of the same size: for a framework that
            has them where numpy does not.
    """

    def __init__(self, selection: Selection, target: str | None, carriers: Mapping[str, str] | None = None) -> None:
        self._selection = selection
        self._raw = target == RAW
        self._carriers = {name: numpy.dtype(kind) for name, kind in (carriers or {}).items()}
        for name, wants in () if self._raw else selection.by_dtype().items():
            if self._dtype(name) is None:
                self._lacks(name, wants[0])
        self._target = None if target is None or self._raw else numpy_dtype(target)
        if target == "BF16" and self._target is None:
            raise MissingDtypeError("dtype=bfloat16: numpy lacks it unless the package ml_dtypes is installed")
        self._castable = {numpy_dtype(name) for name in CASTABLE} - {None}

    def _dtype(self, name: str) -> Any:
        return self._carriers.get(name) or numpy_dtype(name)

    def _lacks(self, name: str, want: int) -> None:
        raise MissingDtypeError(
            f"tensor {self._selection.names[want]} is {name}, which numpy lacks{_help(name)}; "
            'dtype="raw" or framework="dlpack" gives its bytes',
            path=self._selection.file(want),
            tensor=self._selection.names[want],
        )

    def tensors(self, load: _core.Load, wants: Sequence[int]) -> list[Any]:
        """Arrays on these ready wants."""
        asarray = numpy.asarray
        arrays: list[Any] = [asarray(view) for view in load.views(wants)]
        if not self._raw:
            describe = self._selection.describe
            for i, want in enumerate(wants):
                name, shape = describe(want)
                try:
                    arrays[i] = arrays[i].view(self._dtype(name)).reshape(shape)
                except ValueError as why:  # an empty tensor whose other dimensions are too large for numpy
                    raise UnsupportedError(
                        f"tensor {self._selection.names[want]} of shape {list(shape)}: {why}",
                        path=self._selection.file(want),
                        tensor=self._selection.names[want],
                    ) from None
        return arrays

    def _as_target(self, array: Any) -> Any:
        return array.astype(self._target)


class _Framework(Framework):
    def adapter(self, selection: Selection, device: Device, target: str | None) -> Adapter:
        return Numpy(selection, target)

    def indexing(self, info: TensorInfo) -> Indexing:
        return indexing(info)

    def joined(self, parts: list[Any], axis: int) -> Any:
        return numpy.concatenate(parts, axis)


FRAMEWORK = _Framework()
