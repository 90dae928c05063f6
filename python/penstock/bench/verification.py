"""Checks of a load's result: every page touched, every byte compared with the files."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from . import reference

#: torch's name of each dtype of the format that torch has.
_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}


def torch_dtype(name: str) -> Any:
    """torch's dtype for a dtype's name in a header."""
    import torch

    return getattr(torch, _TORCH_NAMES[name])


def bytes_at(address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory as a flat array. Owns nothing: the tensor must outlive it."""
    if nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def tensor_bytes(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a contiguous torch tensor on the CPU, whatever its dtype."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return bytes_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


_libc = ctypes.CDLL(None, use_errno=True)


def absent_bytes(array: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """Bytes of the pages of some memory, which begins with a page, that would have to be read from a file.

    0 where the kernel does not tell: of files that are not ours.
    """
    page = resource.getpagesize()
    found = np.zeros(-(-array.nbytes // page), dtype=np.uint8)
    if _libc.mincore(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), found.ctypes.data_as(_BYTES)):
        raise OSError(ctypes.get_errno(), "mincore")
    return int((found & 1 == 0).sum()) * page


_BYTES = ctypes.POINTER(ctypes.c_ubyte)


def touch(state: dict[str, Any]) -> dict[str, float]:
    """Reads one byte of every page of every tensor, in address order, by one thread: for every contestant the same.

    Gives seconds, processor time and page faults. `touch_absent_bytes` are the bytes of pages that were not in memory
    before. The faults alone do not show them: the kernel reads ahead for a program that goes through a mapping in
    order, and a wait for a page that is on its way is no major fault. Tensors within a page of each other are touched
    as one range, so that this does not measure Python.
    """
    page = resource.getpagesize()
    spans: list[list[int]] = []
    for start, end in sorted(
        (array.ctypes.data, array.ctypes.data + array.nbytes) for array in map(tensor_bytes, state.values())
    ):
        if spans and start - spans[-1][1] < page:
            spans[-1][1] = max(end, spans[-1][1])
        elif end > start:
            spans.append([start, end])
    arrays = [bytes_at(start - start % page, end - start + start % page) for start, end in spans]
    absent = sum(absent_bytes(array) for array in arrays)
    before, begun, cpu = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), time.process_time()
    for array in arrays:
        int(array[::page].sum(dtype=np.uint64))
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "touch_s": seconds,
        "touch_absent_bytes": absent,
        "touch_cpu_s": time.process_time() - cpu,
        "touch_major_faults": after.ru_majflt - before.ru_majflt,
        "touch_minor_faults": after.ru_minflt - before.ru_minflt,
    }


def verify(state: dict[str, Any], files: Iterable[Path], dtype: str | None = None) -> dict[str, Any]:
    """Compares every byte with the files, which are read anew without any loader.

    Tensors on a GPU come to the host for it, one by one. With a `dtype` floating-point tensors are compared with what
    torch makes of the file's bytes; not-a-numbers are all the same then.
    """
    files = list(files)
    comparer = reference.Comparer(files)
    wrong = [name for name in comparer.entries if name not in state]
    for name, tensor in state.items():
        if dtype is not None and name in comparer.entries and comparer.entries[name].dtype in CASTABLE:
            same = _same_as_cast(comparer.entries[name], tensor.cpu(), dtype)
        else:
            same = comparer.same(name, tensor_bytes(tensor.cpu().contiguous()))
        if not same:
            wrong.append(name)
    comparer.close()
    different = set(wrong)
    return {
        "bytes": sum(entry.nbytes for entry in comparer.entries.values()),
        "verified_bytes": sum(entry.nbytes for name, entry in comparer.entries.items() if name not in different),
        "different": wrong[:10],
    }


#: Dtypes that a cast applies to.
CASTABLE = ("F16", "BF16", "F32", "F64")


def _same_as_cast(entry: reference.Entry, tensor: Any, dtype: str) -> bool:
    import torch

    if tensor.dtype != torch_dtype(dtype) or tuple(tensor.shape) != entry.shape:
        return False
    if entry.nbytes == 0:
        return True
    expected = torch.from_numpy(reference.raw(entry)).view(torch_dtype(entry.dtype)).reshape(entry.shape)
    expected = expected.to(tensor.dtype)
    numbers = ~expected.isnan()
    return torch.equal(numbers, ~tensor.isnan()) and torch.equal(expected[numbers], tensor[numbers])
