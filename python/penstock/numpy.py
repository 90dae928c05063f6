"""The functions of ``safetensors.numpy``, on this engine: change the import, and nothing else.

from penstock.numpy import load_file, save_file
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _safe_open, _save
from ._checkpoint import Source
from ._choices import Backend, Layout
from ._core import Options
from ._errors import ArgumentTypeError, SafetensorError
from ._numpy import of_bytes
from ._safe_open import safe_open

__all__ = ["SafetensorError", "load", "load_file", "safe_open", "save", "save_file"]

Array = npt.NDArray[Any]


def load_file(
    filename: Source, *, backend: Backend = "mmap", options: Options | Mapping[str, Any] | None = None
) -> dict[str, Array]:
    """Every tensor of a file (or of several, or of a directory) by name, as numpy arrays."""
    return _safe_open.load_file(filename, framework="np", backend=backend, options=options)


def load(data: bytes) -> dict[str, Array]:
    """Every tensor of a file's content by name. The bytes are copied.

    Raises:
        HeaderError, TruncatedError: if the bytes are no such file.
    """
    return of_bytes(data)


def _checked(tensors: Mapping[str, Array]) -> None:
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(f"expected a dict of arrays by name, but got a {type(tensors).__name__}")
    for name, array in tensors.items():
        if not isinstance(array, (np.ndarray, np.generic)):
            raise ArgumentTypeError(f"{name} is a {type(array).__name__}, not a numpy array")


def save_file(
    tensor_dict: dict[str, Array],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    layout: Layout = "aligned",
    fsync: bool = False,
    options: Options | Mapping[str, Any] | None = None,
) -> None:
    """Saves arrays to a file, which is there whole or not at all; see `penstock.save_file`.

    Arrays that are not C-contiguous are packed first. (``safetensors.numpy`` writes their memory as it lies there,
    under the shape of the view.)
    """
    _checked(tensor_dict)
    _save.save_file(tensor_dict, filename, metadata, layout=layout, fsync=fsync, progress=False, options=options)


def save(tensor_dict: dict[str, Array], metadata: dict[str, str] | None = None, *, layout: Layout = "compact") -> bytes:
    """The content of a file with these arrays."""
    _checked(tensor_dict)
    return _save.to_bytes(tensor_dict, metadata, layout=layout)
