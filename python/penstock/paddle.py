"""The functions of ``safetensors.paddle``, on this engine: change the import, and nothing else.

from penstock.paddle import load_file, save_file
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import paddle

from . import _safe_open, _save
from ._checkpoint import Source
from ._choices import Backend, Layout
from ._core import Options
from ._device import parse_device
from ._errors import SafetensorError
from ._frameworks import check_device
from ._safe_open import safe_open
from ._via_numpy import ViaNumpy

__all__ = ["SafetensorError", "load", "load_file", "safe_open", "save", "save_file"]

FRAMEWORK = ViaNumpy(
    "paddle",
    paddle,
    lambda array: paddle.to_tensor(array, place="cpu"),
    lambda tensor: tensor.detach().cpu().numpy(),
    carriers={"BF16": "int16", "F8_E4M3": "uint8", "F8_E5M2": "uint8"},
    lacks=["U16"],  # numpy's uint16 is Paddle's bfloat16
)


def load_file(
    filename: Source,
    device: Any = "cpu",
    *,
    backend: Backend = "mmap",
    options: Options | Mapping[str, Any] | None = None,
) -> dict[str, paddle.Tensor]:
    """Every tensor of a file (or of several, or of a directory) by name, in CPU memory."""
    return _safe_open.load_file(filename, device, framework="paddle", backend=backend, options=options)


def load(data: bytes, device: Any = "cpu") -> dict[str, paddle.Tensor]:
    """Every tensor of a file's content by name, in CPU memory.

    Raises:
        HeaderError, TruncatedError: if the bytes are no such file.
    """
    check_device("paddle", parse_device(device))
    return FRAMEWORK.of_bytes(data)


def save_file(
    tensors: dict[str, paddle.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    layout: Layout = "aligned",
    fsync: bool = False,
    options: Options | Mapping[str, Any] | None = None,
) -> None:
    """Saves tensors to a file, which is there whole or not at all: see `penstock.save_file`."""
    found = FRAMEWORK.arrays_of(tensors)
    _save.save_file(found, filename, metadata, layout=layout, fsync=fsync, progress=False, options=options)


def save(
    tensors: dict[str, paddle.Tensor], metadata: dict[str, str] | None = None, *, layout: Layout = "compact"
) -> bytes:
    """The content of a file with these tensors."""
    return _save.to_bytes(FRAMEWORK.arrays_of(tensors), metadata, layout=layout)
