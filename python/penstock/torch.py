"""The functions of ``safetensors.torch``, on this engine: change the import, and nothing else.

from penstock.torch import load_file, save_file
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from . import _safe_open, _save
from ._checkpoint import Source
from ._choices import Backend, Layout
from ._core import Options
from ._errors import ArgumentTypeError, InvalidError, NoValuesError, SafetensorError, SharedMemoryError
from ._safe_open import safe_open
from ._shared import duplicates, groups
from ._torch import of_bytes
from ._unsaveable import check, not_a_tensor, without_counterpart

__all__ = ["SafetensorError", "load", "load_file", "load_model", "safe_open", "save", "save_file", "save_model"]


def load_file(
    filename: Source,
    device: str | int | torch.device = "cpu",
    *,
    backend: Backend = "mmap",
    options: Options | Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Every tensor of a file (or of several, or of a directory) by name, on ``device``."""
    return _safe_open.load_file(filename, device, framework="pt", backend=backend, options=options)


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Every tensor of a file's content by name, on the CPU. The bytes are copied.

    Raises:
        HeaderError, TruncatedError: if the bytes are no such file.
    """
    return of_bytes(data)


def _refuse(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises for values that no file can hold."""
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(f"expected a dict of tensors by name, but got a {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise not_a_tensor(name, tensor)
    sparse = [name for name, tensor in tensors.items() if tensor.layout != torch.strided]
    if sparse:
        for name in sparse:
            if tensors[name].is_nested:
                raise without_counterpart(name, tensors[name])
        raise InvalidError(
            f"{', '.join(sparse)}: the format has no sparse tensors. `.to_dense()` makes dense ones, "
            "which may be much larger"
        )
    without = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
    if without:
        raise NoValuesError(f"{', '.join(without)}: on the meta device: there are no values to save")
    check(tensors)


def _check(tensors: Mapping[str, torch.Tensor], help: str = "") -> None:
    """Raises what ``safetensors.torch`` raises for tensors that it does not save."""
    _refuse(tensors)
    shared = groups(tensors)
    if shared:
        listed = "; ".join(", ".join(names) for names in shared)
        raise SharedMemoryError(
            f"these tensors share memory: {listed}. Saved one by one they take more room, and are no longer one "
            "when they are loaded. `save_model` saves a module's tied tensors once; `.clone()` makes separate ones"
        )
    scattered = [name for name, tensor in tensors.items() if not tensor.is_contiguous()]
    if scattered:
        raise InvalidError(
            f"{', '.join(scattered)}: not contiguous. `.contiguous()` makes a packed copy; of views of a larger tensor "
            f"save the larger one, and slice it when it is loaded{help}"
        )


def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    layout: Layout = "aligned",
    fsync: bool = False,
    options: Options | Mapping[str, Any] | None = None,
) -> None:
    """Saves tensors to a file, which is there whole or not at all; see `penstock.save_file`.

    Raises:
        InvalidError: (a ValueError) what is no tensor, sparse, or not contiguous.
        SharedMemoryError: (a RuntimeError too) tensors that share memory.
    """
    _check(tensors)
    _save.save_file(tensors, filename, metadata, layout=layout, fsync=fsync, progress=False, options=options)


def save(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None, *, layout: Layout = "compact"
) -> bytes:
    """The content of a file with these tensors. Raises what `save_file` does."""
    _check(tensors)
    return _save.to_bytes(tensors, metadata, layout=layout)


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    layout: Layout = "aligned",
    fsync: bool = False,
    options: Options | Mapping[str, Any] | None = None,
) -> None:
    """Saves a module's tensors to a file, tied ones once: the metadata says under which name.

    Args:
        force_contiguous: Whether tensors that are not contiguous are packed, or are an error.

    Raises:
        SharedMemoryError: (a RuntimeError) none of the tensors that share memory covers all of it.
        InvalidError: as `save_file`.
    """
    state = model.state_dict()
    _refuse(state)
    more = dict(metadata or {})
    for kept, names in duplicates(state).items():
        for name in names:
            more.setdefault(name, kept)
            del state[name]
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    _check(state, ". `force_contiguous=True` packs them")
    found = more or metadata
    _save.save_file(state, filename, found, layout=layout, fsync=fsync, progress=False, options=options)


def load_model(
    model: torch.nn.Module,
    filename: Source,
    strict: bool = True,
    device: str | int | torch.device = "cpu",
    *,
    backend: Backend = "mmap",
    options: Options | Mapping[str, Any] | None = None,
) -> tuple[set[str], list[str]]:
    """Loads a file's tensors into a module; those that are tied to one that the file has are not missed.

    Returns:
        Names of the module's that were not loaded, and names of the file's that the module lacks.

    Raises:
        RuntimeError: with ``strict``, if there are any.
    """
    loaded = load_file(filename, device, backend=backend, options=options)
    tied = duplicates(model.state_dict(), preferred=loaded.keys())
    absent, surplus = model.load_state_dict(loaded, strict=False)
    missing, unexpected = set(absent), list(surplus)
    for names in tied.values():
        for name in names:
            if name in missing:
                missing.remove(name)
            else:  # loaded twice: the file has both
                unexpected.append(name)
    if strict and (missing or unexpected):
        # torch's own form: programs parse it
        said = f"Error(s) in loading state_dict for {type(model).__name__}:"
        for what, names in (("Missing", sorted(missing)), ("Unexpected", sorted(unexpected))):
            if names:
                said += f"\n    {what} key(s) in state_dict: " + ", ".join(f'"{name}"' for name in names)
        raise RuntimeError(said)
    return missing, unexpected
