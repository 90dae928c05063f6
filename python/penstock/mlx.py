"""The functions of ``safetensors.mlx``, on this engine: change the import, and nothing else.

from penstock.mlx import load_file, save_file
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import mlx.core

from . import _safe_open, _save
from ._checkpoint import Source
from ._choices import Backend, Layout
from ._core import Options
from ._errors import SafetensorError
from ._safe_open import safe_open
from ._via_numpy import ViaNumpy

__all__ = ["SafetensorError", "load", "load_file", "safe_open", "save", "save_file"]

FRAMEWORK = ViaNumpy("mlx", mlx.core, mlx.core.array)


def load_file(
    filename: Source, *, backend: Backend = "mmap", options: Options | Mapping[str, Any] | None = None
) -> dict[str, mlx.core.array]:
    """Every tensor of a file (or of several, or of a directory) by name."""
    return _safe_open.load_file(filename, framework="mlx", backend=backend, options=options)


def load(data: bytes) -> dict[str, mlx.core.array]:
    """Every tensor of a file's content by name.

    Raises:
        HeaderError, TruncatedError: if the bytes are no such file.
    """
    return FRAMEWORK.of_bytes(data)


def save_file(
    tensors: dict[str, mlx.core.array],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    layout: Layout = "aligned",
    fsync: bool = False,
    options: Options | Mapping[str, Any] | None = None,
) -> None:
    """Saves arrays to a file, which is there whole or not at all: see `penstock.save_file`."""
    found = FRAMEWORK.arrays_of(tensors)
    _save.save_file(found, filename, metadata, layout=layout, fsync=fsync, progress=False, options=options)


def save(
    tensors: dict[str, mlx.core.array], metadata: dict[str, str] | None = None, *, layout: Layout = "compact"
) -> bytes:
    """The content of a file with these arrays."""
    return _save.to_bytes(FRAMEWORK.arrays_of(tensors), metadata, layout=layout)
