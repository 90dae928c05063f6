"""What a load left behind: every page touched, every byte compared with the files."""

from __future__ import annotations

import ctypes
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from . import reference
from .contestants import State


def bytes_at(address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory as a flat array. Owns nothing: the tensor must outlive it."""
    if nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def tensor_bytes(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a contiguous torch tensor on the CPU, whatever its dtype."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return bytes_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def touch(state: State) -> dict[str, float]:
    """Reads one byte of every page of every tensor, in address order: seconds and page faults.

    A load that left nothing to do takes no major fault here. Tensors within a page of each other are touched as one
    range, so that this does not measure Python.
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
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for array in arrays:
        int(array[::page].sum(dtype=np.uint64))
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "touch_s": seconds,
        "touch_major_faults": after.ru_majflt - before.ru_majflt,
        "touch_minor_faults": after.ru_minflt - before.ru_minflt,
    }


def verify(state: State, folder: Path) -> dict[str, Any]:
    """Compares every byte with the files, which are read anew without any loader."""
    comparer = reference.Comparer(folder)
    different = [name for name in comparer.entries if name not in state]
    different += [name for name, tensor in state.items() if not comparer.same(name, tensor_bytes(tensor))]
    comparer.close()
    return {
        "bytes": sum(entry.nbytes for entry in comparer.entries.values()),
        "verified_bytes": sum(entry.nbytes for name, entry in comparer.entries.items() if name not in set(different)),
        "different": different[:10],
    }
