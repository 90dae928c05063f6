"""Tensors of every framework as the core takes them for a save, and how those are packed that are not in memory so."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any

from ._described import Described
from ._dlpack import DLTensor
from ._dtypes import DTYPES
from ._errors import (
    ArgumentTypeError,
    InternalError,
    InvalidError,
    MissingDtypeError,
    NoValuesError,
    OutOfMemoryError,
    PenstockError,
    WriteError,
)
from ._text import check_text
from ._unsaveable import check_memory, check_one, not_a_tensor, without_counterpart, without_memory


@cache
def _torch_names() -> dict[Any, str]:
    import torch

    return {getattr(torch, d.torch): name for name, d in DTYPES.items() if d.torch and hasattr(torch, d.torch)}


def _of_torch(name: str, tensor: Any) -> Described:
    import torch

    dtype = _torch_names().get(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise without_counterpart(name, tensor)
    if tensor.device.type == "meta":
        raise NoValuesError(f"tensor {name} is on the meta device: it has no values to save", tensor=name)
    if type(tensor) is not torch.Tensor:
        check_one(name, tensor)
    check_memory(name, tensor)
    plain = tensor.detach()
    packed = plain.is_contiguous() and not plain.is_conj() and not plain.is_neg()
    known = plain.device.type in ("cpu", "cuda")
    late = not packed or not known
    gpu = plain.device.index if plain.device.type == "cuda" else None
    try:
        address = plain.data_ptr() if known else 0
    except RuntimeError:  # of tensors that only stand for others
        address = 0
    if known and not address and plain.numel():
        raise without_memory(name, tensor)
    shape = tuple(plain.shape)
    if dtype == "F4" and shape:
        shape = (*shape[:-1], 2 * shape[-1])
    if late:
        return Described(dtype, shape, None, None, plain, partial(fill_torch, plain, plain.dtype))
    return Described(dtype, shape, gpu, address, plain)


def fill_torch(tensor: Any, dtype: Any, memory: memoryview) -> None:
    """Writes a torch tensor of any device, packed and cast to ``dtype``, to memory."""
    import torch

    tensor = tensor.as_subclass(torch.Tensor)  # a subclass might keep the destination
    if dtype == tensor.dtype and dtype.itemsize == 1:
        # There are dtypes that torch cannot copy
        tensor, dtype = tensor.view(torch.uint8), torch.uint8
    packed = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tensor.shape)
    try:
        packed.copy_(tensor)
    finally:
        del packed  # an error's traceback would keep it, and the memory goes


def fill_numpy(array: Any, dtype: Any, memory: memoryview) -> None:
    """Writes an array, packed and cast to ``dtype``, to memory."""
    import numpy as np

    packed = np.frombuffer(memory, dtype).reshape(array.shape)
    try:
        packed[...] = array
    finally:
        del packed


@cache
def _numpy_names() -> dict[str, str]:
    names = {d.ml_dtypes: name for name, d in DTYPES.items() if d.ml_dtypes}
    return names | {d.numpy: name for name, d in DTYPES.items() if d.numpy}


def _of_numpy(name: str, array: Any) -> Described:
    dtype = _numpy_names().get(array.dtype.name)
    if dtype is None:
        why = f"is an array of {array.dtype}: the format has no such dtype"
        if array.dtype.kind in "fc":
            why += f". Save `.astype({'complex64' if array.dtype.kind == 'c' else 'float64'!r})` of it"
        elif array.dtype.kind in "mM":
            why += ". Save `.view('int64')` of it, and the unit in the metadata"
        raise MissingDtypeError(f"tensor {name} {why}", tensor=name)
    swapped = sys.byteorder == "big" or array.dtype.byteorder == ">"
    if swapped or not array.flags.c_contiguous:
        little = array.dtype.newbyteorder("<") if swapped else array.dtype
        return Described(dtype, tuple(array.shape), None, None, array, partial(fill_numpy, array, little))
    return Described(dtype, tuple(array.shape), None, array.__array_interface__["data"][0], array)


def _of_dlpack(tensor: DLTensor) -> Described:
    kind, number = tensor.__dlpack_device__()
    return Described(*tensor._format, None if kind == 1 else number, tensor._view.address, tensor)


def describe(name: object, value: Any) -> Described:
    """The description of a tensor of any framework.

    Raises:
        InvalidError: it is no tensor, or has no values.
        UnsupportedError: the format lacks its dtype.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"{name!r} is not a string: the name of a tensor is a string")
    check_text("the name of a tensor", name)
    if isinstance(value, Described):
        return value
    if isinstance(value, DLTensor):
        return _of_dlpack(value)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(name, value)
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if isinstance(value, numpy.ma.MaskedArray) and numpy.ma.is_masked(value):
            why = "has masked values, which no file can hold: save the result of `.filled()`, and its `.mask`"
            raise InvalidError(f"tensor {name} {why}", tensor=name)
        return _of_numpy(name, numpy.asarray(value))
    if name.endswith("_extra_state") and not hasattr(value, "shape"):
        raise not_a_tensor(name, value)
    if hasattr(value, "__array__") and hasattr(value, "shape"):  # jax, tensorflow, mlx
        return _of_numpy(name, import_module("numpy").asarray(value))
    raise InvalidError(f"{name} is a {type(value).__name__}: give tensors of torch, or arrays of numpy or JAX")


def synchronize(tensors: list[Described]) -> None:
    """Waits for what torch still does to tensors on GPUs."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    # Tensors of the core were complete when they were handed out. Torch may have written to them since, where it uses
    # GPUs at all.
    used = torch.cuda.is_initialized()
    for gpu in {t.gpu for t in tensors if t.gpu is not None and (used or not isinstance(t.keep, DLTensor))}:
        torch.cuda.current_stream(gpu).synchronize()
    # Another thread, with a stream of its own, may pack those that are not in memory as they are saved.
    late: list[Any] = [t.keep for t in tensors if t.address is None and device_kind(t.keep) != "cpu"]
    for device in {tensor.device for tensor in late}:
        current = getattr(getattr(torch, device.type, None), "current_stream", None)
        if current is not None:  # MPS has one stream, and no such call
            current(device).synchronize()


def device_kind(value: Any) -> str:
    """The kind of device that a tensor is on, such as "cuda"."""
    return str(getattr(getattr(value, "device", None), "type", "cpu"))


def checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise ArgumentTypeError(f"metadata={metadata!r}: give a dict of strings")
    found = dict(metadata)
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ArgumentTypeError(f"metadata: {key!r}: {value!r}: keys and values must be strings")
        check_text("a key of the metadata", key)
        check_text(f"the metadata {key!r}", value)
    return found


def fill(name: str, tensor: Described, memory: memoryview) -> None:
    """Writes a tensor that the save wants to its memory, to which nothing refers afterwards."""
    if tensor.fill is None:
        raise InternalError("the save asked for a tensor again; please report this")
    try:
        with memory:
            tensor.fill(memory)
    except PenstockError:
        raise
    except Exception as cause:
        torch = sys.modules.get("torch")
        full = (MemoryError, torch.cuda.OutOfMemoryError) if torch is not None else MemoryError
        kind = OutOfMemoryError if isinstance(cause, full) else WriteError
        raise kind(f"tensor {name} cannot be packed: {cause}") from cause
