"""Frameworks that take numpy's arrays: JAX, TensorFlow, Paddle, MLX.

They hold tensors for unchangeable, or copy on the way in. Their slices are numpy's, made before the tensor is: what an
index means there changes from framework to framework (JAX clamps what is out of range, TensorFlow takes no lists).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from . import _core
from ._device import Device
from ._dlpack import DLPack
from ._dtypes import DTYPES, RAW
from ._errors import ArgumentTypeError, MissingDtypeError
from ._frameworks import module_named
from ._numpy import Numpy, numpy_dtype, of_bytes
from ._save import Described
from ._selection import Selection


class Framework(NamedTuple):
    """How a framework takes an array, and gives it back."""

    module: str
    package: str
    """What to install."""
    tensor: Callable[[Any, Any], Any]
    """The tensor of (module, array), in memory of its own."""
    array: Callable[[Any], Any]
    """numpy's array of a tensor."""
    carriers: Mapping[str, str] = {}
    """Dtypes of the format that the framework has and numpy has not, and by which of numpy's their bits come."""
    lacks: Sequence[str] = ()
    """Dtypes of the format that the framework takes for others."""


def _asarray(tensor: Any) -> Any:
    import numpy

    return numpy.asarray(tensor)


FRAMEWORKS = {
    "jax": Framework("jax.numpy", "jax", lambda jnp, array: jnp.array(array), _asarray),
    "tf": Framework("tensorflow", "tensorflow", lambda tf, array: tf.constant(array), lambda tensor: tensor.numpy()),
    "paddle": Framework(
        "paddle",
        "paddlepaddle",
        lambda paddle, array: paddle.to_tensor(array, place="cpu"),
        lambda tensor: tensor.detach().cpu().numpy(),
        {"BF16": "int16", "F8_E4M3": "uint8", "F8_E5M2": "uint8"},
        ("U16",),  # numpy's uint16 is Paddle's bfloat16
    ),
    "mlx": Framework("mlx.core", "mlx", lambda mx, array: mx.array(array), _asarray),
}


def module_of(name: str) -> Any:
    """The module of a framework.

    Raises:
        MissingFrameworkError: it is not installed.
    """
    framework = FRAMEWORKS[name]
    return module_named(framework.module, name, framework.package)


def tensor_of(name: str, array: Any, dtype: str) -> Any:
    """A framework's tensor of numpy's array, which has this dtype of the format or carries it."""
    import numpy

    framework, module = FRAMEWORKS[name], module_of(name)
    tensor = framework.tensor(module, numpy.require(array, requirements="C"))  # MLX takes none that go backwards
    return tensor.view(getattr(module, str(DTYPES[dtype].torch))) if dtype in framework.carriers else tensor


@cache
def takes(name: str, dtype: str) -> str | None:
    """Why a framework has no tensors of this dtype of the format; None: it has."""
    import numpy

    framework = FRAMEWORKS[name]
    kind = framework.carriers.get(dtype) or numpy_dtype(dtype)
    if kind is None:
        return "numpy, by way of which it comes, lacks it"
    if dtype in framework.lacks:
        return "it would come as another"
    try:
        tensor_of(name, numpy.zeros(1, kind), dtype)
    except Exception as why:  # each framework has its own
        return str(why).splitlines()[0] if str(why) else type(why).__name__
    return None


def check_dtype(framework: str, dtype: str, name: str, file: str | None) -> None:
    """Raises MissingDtypeError if the framework has no tensor like the one called ``name``."""
    why = takes(framework, dtype)
    if why is not None:
        raise MissingDtypeError(
            f"tensor {name} is {dtype}, which framework={framework!r} lacks ({why}); "
            'dtype="raw" or framework="dlpack" gives its bytes',
            path=file,
        )


def _described(framework: Framework, tensor: Any) -> Any:
    """numpy's array of a tensor, or what there is to save of one whose dtype numpy lacks."""
    spelled = str(tensor.dtype).rpartition(".")[2]
    for dtype, kind in framework.carriers.items():
        if DTYPES[dtype].torch == spelled:
            array = framework.array(tensor.contiguous().view(kind))
            return Described(dtype, array.shape, None, array.__array_interface__["data"][0], array)
    return framework.array(tensor)


def arrays_of(name: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """What there is to save of a framework's tensors, by name.

    Raises:
        ArgumentTypeError: no tensors by name.
    """
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(f"expected a dict of tensors by name, but got a {type(tensors).__name__}")
    found = {}
    for key, tensor in tensors.items():
        if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
            raise ArgumentTypeError(f"{key} is a {type(tensor).__name__}, not a tensor")
        found[key] = _described(FRAMEWORKS[name], tensor)
    return found


def tensors_of_bytes(name: str, data: bytes) -> dict[str, Any]:
    """Every tensor of a file's content by name."""
    core = _core.Checkpoint.from_bytes(data)
    dtypes = {}
    for number in range(len(core)):
        key, dtypes[key] = core.info(number)[:2]
        check_dtype(name, dtypes[key], key, None)
    arrays = of_bytes(data, FRAMEWORKS[name].carriers)
    return {key: tensor_of(name, array, dtypes[key]) for key, array in arrays.items()}


def arrays(name: str, selection: Selection) -> Numpy:
    """Makes numpy's arrays to make a framework's tensors of, by `tensor_of`."""
    return Numpy(selection, None, FRAMEWORKS[name].carriers)


class ViaNumpy:
    """Makes one framework's tensors of one load: of numpy's arrays on the CPU, for JAX of DLPack's tensors on a GPU."""

    misaligned = False
    caller_blocks = False

    def __init__(self, name: str, selection: Selection, device: Device, target: str | None) -> None:
        self.framework = name
        module_of(name)
        for dtype, wants in () if target == RAW else selection.by_dtype().items():
            check_dtype(name, dtype, selection.names[wants[0]], selection.file(wants[0]))
        self._on_cpu, self._selection, self._raw = device.is_cpu, selection, target == RAW
        # What is cast is numpy's, or it would be left alone
        carriers = FRAMEWORKS[name].carriers if target is None else None
        self._inner: Any = Numpy(selection, target, carriers) if device.is_cpu else DLPack(selection, device, target)
        self.dlpack_device: tuple[int, int] | None = self._inner.dlpack_device

    def grant(self, load: _core.Load, blocks: Sequence[int]) -> None:
        """Nothing: the blocks are the core's."""

    def tensors(self, load: _core.Load, wants: Sequence[int]) -> list[Any]:
        """Tensors on these ready wants, cast already."""
        made = self._inner.tensors(load, wants)
        if self._on_cpu:
            return [self._tensor(array, want) for array, want in zip(made, wants, strict=True)]
        from_dlpack = importlib.import_module("jax.dlpack").from_dlpack
        return [from_dlpack(tensor) for tensor in made]

    def _tensor(self, array: Any, want: int) -> Any:
        dtype = "U8" if self._raw else self._selection.describe(want)[0]
        if self._inner.casts:  # nothing is carried then
            return FRAMEWORKS[self.framework].tensor(module_of(self.framework), self._inner.cast(array))
        return tensor_of(self.framework, array, dtype)

    @property
    def casts(self) -> bool:
        """Whether `cast` may change anything: it does not, as tensors are made of arrays that were."""
        return bool(self._inner.casts)

    def cast(self, tensor: Any) -> Any:
        """The tensor as it is."""
        return tensor

    def let_go(self) -> None:
        """Nothing: the blocks are the core's."""
