"""Frameworks that take numpy's arrays: JAX, TensorFlow, Paddle, MLX.

They hold tensors for unchangeable, or copy on the way in. Their slices are numpy's, made before the tensor is: what an
index means there changes from framework to framework (JAX clamps what is out of range, TensorFlow takes no lists).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy

from . import _core, _numpy
from ._described import Described
from ._device import Device
from ._dlpack import DLPack
from ._dtypes import DTYPES, RAW
from ._errors import ArgumentTypeError, MissingDtypeError
from ._framework import Adapter, Framework
from ._indexing import Indexing
from ._numpy import Numpy, numpy_dtype
from ._selection import Selection, TensorInfo


class ViaNumpy(Framework):
    """How a framework takes an array, and gives it back.

    Args:
        name: What it is called here.
        module: Its module, which has its dtypes.
        tensor: Makes a tensor of an array, in memory of its own.
        array: Makes numpy's array of a tensor.
        carriers: Dtypes of the format that the framework has and numpy has not, and in which of numpy's their bits
            come.
        lacks: Dtypes of the format that the framework takes for others.
        from_dlpack: Makes a tensor of one of DLPack on a GPU, and `joined` several into one: where it has any there.
    """

    views = False

    def __init__(
        self,
        name: str,
        module: Any,
        tensor: Callable[[Any], Any],
        array: Callable[[Any], Any] = numpy.asarray,
        *,
        carriers: Mapping[str, str] | None = None,
        lacks: Sequence[str] = (),
        from_dlpack: Callable[[Any], Any] | None = None,
        joined: Callable[[list[Any], int], Any] | None = None,
    ) -> None:
        self.name, self.module, self.tensor, self.array = name, module, tensor, array
        self.carriers, self.lacks = carriers or {}, lacks
        self.from_dlpack, self._joined = from_dlpack, joined
        self.takes = cache(self._takes)

    def tensor_of(self, array: Any, dtype: str) -> Any:
        """The tensor of numpy's array, which has this dtype of the format or carries it."""
        tensor = self.tensor(numpy.require(array, requirements="C"))  # MLX takes none that go backwards
        return tensor.view(getattr(self.module, str(DTYPES[dtype].torch))) if dtype in self.carriers else tensor

    def _takes(self, dtype: str) -> str | None:
        """The reason that the framework has no tensors of this dtype of the format; None: it has."""
        kind = self.carriers.get(dtype) or numpy_dtype(dtype)
        if kind is None:
            return "numpy, by way of which it comes, lacks it"
        if dtype in self.lacks:
            return "it would come as another"
        try:
            self.tensor_of(numpy.zeros(1, kind), dtype)
        except Exception as why:  # each framework has its own
            return str(why).splitlines()[0] if str(why) else type(why).__name__
        return None

    def check_dtype(self, dtype: str, name: str, file: str | None) -> None:
        """Raises MissingDtypeError if the framework has no tensor like the one called ``name``."""
        why = self.takes(dtype)
        if why is not None:
            raise MissingDtypeError(
                f"tensor {name} is {dtype}, which framework={self.name!r} lacks ({why}); "
                'dtype="raw" or framework="dlpack" gives its bytes',
                path=file,
                tensor=name,
            )

    def arrays_of(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays to save, by name.

        Raises:
            ArgumentTypeError: no tensors by name.
        """
        if not isinstance(tensors, Mapping):
            raise ArgumentTypeError(f"expected a dict of tensors by name, but got a {type(tensors).__name__}")
        for name, tensor in tensors.items():
            if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
                raise ArgumentTypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
        return {name: self._described(tensor) for name, tensor in tensors.items()}

    def _described(self, tensor: Any) -> Any:
        """numpy's array of a tensor, or what there is to save of one whose dtype numpy lacks."""
        spelled = str(tensor.dtype).rpartition(".")[2]
        for dtype, kind in self.carriers.items():
            if DTYPES[dtype].torch == spelled:
                array = self.array(tensor.contiguous().view(kind))
                return Described(dtype, array.shape, None, array.__array_interface__["data"][0], array)
        return self.array(tensor)

    def of_bytes(self, data: bytes) -> dict[str, Any]:
        """Every tensor of a file's content by name."""
        core = _core.Checkpoint.from_bytes(data)
        dtypes = {}
        for number in range(len(core)):
            key, dtypes[key] = core.info(number)[:2]
            self.check_dtype(dtypes[key], key, None)
        arrays = _numpy.of_bytes(data, self.carriers)
        return {key: self.tensor_of(array, dtypes[key]) for key, array in arrays.items()}

    # What a `Framework` has

    def adapter(self, selection: Selection, device: Device, target: str | None) -> Adapter:
        return _ViaNumpy(self, selection, device, target)

    def indexing(self, info: TensorInfo) -> Indexing:
        return _numpy.indexing(info)._replace(take=lambda tensor, index: tensor[index])

    @property
    def joins(self) -> bool:  # type: ignore[override]
        return self._joined is not None

    def joined(self, parts: list[Any], axis: int) -> Any:
        assert self._joined is not None
        return self._joined(parts, axis)

    def sliced_by(self, device: Device) -> Framework:
        return _numpy.FRAMEWORK if device.is_cpu else self

    def check_slice(self, info: TensorInfo) -> None:
        self.check_dtype(info.dtype, info.name, info.file)

    def slices(self, selection: Selection, device: Device) -> Adapter:
        return Numpy(selection, None, self.carriers) if device.is_cpu else self.adapter(selection, device, None)

    def of_slice(self, part: Any, dtype: str) -> Any:
        return self.tensor_of(part, dtype)


class _ViaNumpy(Adapter):
    """Makes one framework's tensors of one load: of numpy's arrays on the CPU, of DLPack's tensors on a GPU."""

    def __init__(self, framework: ViaNumpy, selection: Selection, device: Device, target: str | None) -> None:
        self._framework = framework
        for dtype, wants in () if target == RAW else selection.by_dtype().items():
            framework.check_dtype(dtype, selection.names[wants[0]], selection.file(wants[0]))
        self._on_cpu, self._selection, self._raw = device.is_cpu, selection, target == RAW
        # What is cast is numpy's, or it would be left alone
        carriers = framework.carriers if target is None else None
        self._inner: Adapter = (
            Numpy(selection, target, carriers) if device.is_cpu else DLPack(selection, device, target)
        )

    def tensors(self, load: _core.Load, wants: Sequence[int]) -> list[Any]:
        """Tensors on these ready wants, cast already."""
        made = self._inner.tensors(load, wants)
        if self._on_cpu:
            return [self._tensor(array, want) for array, want in zip(made, wants, strict=True)]
        assert self._framework.from_dlpack is not None
        return [self._framework.from_dlpack(tensor) for tensor in made]

    def _tensor(self, array: Any, want: int) -> Any:
        if self._inner.casts:  # nothing is carried then
            return self._framework.tensor(self._inner.cast(array))
        return self._framework.tensor_of(array, "U8" if self._raw else self._selection.describe(want)[0])

    @property
    def casts(self) -> bool:
        """Whether the tensors are cast, which they are before `cast` has them."""
        return self._inner.casts
