"""`penstock convert`: a checkpoint written anew: in another order, layout, dtype or number of shards, out of pickles.

Tensors are mapped, and cast when their turn comes, so that converting takes the staging of the save and a few tensors
of memory, however large the checkpoint is. What is not cast is copied as bytes: no framework has to know its dtype.
Tensors on servers are streamed. A layout puts some of them later in their shard than they come: these are kept so long.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from . import _pickles, _save
from ._checkpoint import Checkpoint, open_as
from ._choices import Layout, Order, Storage
from ._described import Described
from ._dlpack import DLTensor
from ._dtypes import CASTABLE, RAW, cast_target
from ._errors import InvalidError, MissingDtypeError, NotACheckpointError, NotFoundError
from ._events import around, observe
from ._paths import is_web, source_path, target_folder, target_path
from ._progress import Progress
from ._report import Report

_WINDOW = 256 << 20
"""Bytes that are read ahead from servers."""


def _unpickled(files: Sequence[Path]) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors of files that torch.save wrote, read without running anything that is in them."""
    from ._shared import tied

    tensors: dict[str, Any] = {}
    for file in files:
        for name, tensor in _pickles.tensors_of(file):
            if name in tensors:
                way_out = "give one of them"
                if _pickles.of_a_rank(file):
                    way_out = (
                        "by its name it is one rank's part of a model, and the program that made it joins the parts"
                    )
                raise InvalidError(f"two files have a tensor {name}: {way_out}", path=str(file), tensor=name)
            tensors[name] = tensor
    left = tied(tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in left}, {"format": "pt", **left}


def _warn(files: Iterable[Path]) -> None:
    """Says that files are not what their names say."""
    for file in files:
        what = "a safetensors file" if file.suffix in _pickles.SUFFIXES else "a file of torch.save"
        warnings.warn(
            f"{file} is {what}, although its name says otherwise: it is converted as such", RuntimeWarning, stacklevel=4
        )


def _cast(tensors: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The tensors, of which those that can be cast are when their turn comes."""
    return {name: _cast_later(_save.describe(name, tensor), tensor, kind) for name, tensor in tensors.items()}


def _cast_later(found: Described, tensor: Any, kind: str) -> Described:
    if found.dtype == kind or found.dtype not in CASTABLE:
        return found
    return Described(kind, found.shape, None, None, tensor, _casting(tensor, kind))


def _casting(tensor: Any, kind: str) -> Callable[[memoryview], object]:
    """Writes the tensor, cast, to memory."""
    if hasattr(tensor, "detach"):
        from ._torch import torch_dtype

        return partial(_save.fill_torch, tensor, torch_dtype(kind))
    from ._numpy import numpy_dtype

    target = numpy_dtype(kind)
    if target is None:
        raise MissingDtypeError(f"dtype={kind}: numpy lacks it unless the package ml_dtypes is installed")
    return partial(_save.fill_numpy, tensor, target)


def _to_cast(checkpoint: Checkpoint, kind: str | None) -> set[str]:
    return {name for name, info in checkpoint.items() if kind not in (None, info.dtype) and info.dtype in CASTABLE}


def _tensors(checkpoint: Checkpoint, kind: str | None) -> dict[str, Any]:
    """The tensors of a checkpoint: those that are to be cast as a framework has them, the others as bytes."""
    cast = _to_cast(checkpoint, kind)
    found = checkpoint.load(names=lambda name: name in cast, progress=False) if cast else {}
    plain: dict[str, Any] = {}
    if len(cast) < len(checkpoint):
        plain = checkpoint.load(names=lambda name: name not in cast, framework="dlpack", dtype=RAW, progress=False)
    made: dict[str, Any] = {}
    for name in checkpoint:
        info = checkpoint[name]
        made[name] = found[name] if name in cast else DLTensor(plain[name]._view, info.dtype, info.shape)
    return made


class _Arrivals:
    """The tensors of a stream by name. Those that come before they are asked for are kept until then."""

    def __init__(self, stream: Iterator[tuple[str, Any]]) -> None:
        self._stream = stream
        self._early: dict[str, Any] = {}

    def take(self, name: str) -> Any:
        while name not in self._early:
            arrived, tensor = next(self._stream)
            self._early[arrived] = tensor
        return self._early.pop(name)


def _streamed(checkpoint: Checkpoint, kind: str | None, order: Order, until: ExitStack) -> dict[str, Any]:
    """The tensors of a checkpoint on servers, each read shortly before it is written, as long as ``until`` is open."""
    cast = _to_cast(checkpoint, kind)

    def stream(casts: bool) -> _Arrivals:
        how: dict[str, Any] = {} if casts else {"framework": "dlpack", "dtype": RAW}
        wanted = [name for name in checkpoint if (name in cast) is casts]
        made: Any = checkpoint.stream("cpu", wanted, order, _WINDOW, **how)
        until.callback(made.close)
        return _Arrivals(made)

    tensors, raw = stream(True) if cast else None, stream(False)

    def fill(name: str, memory: memoryview) -> None:
        if tensors is not None and name in cast and kind is not None:
            _casting(tensors.take(name), kind)(memory)
            return
        view = raw.take(name)._view
        place = (ctypes.c_char * len(memory)).from_buffer(memory)
        try:
            ctypes.memmove(place, view.address, view.nbytes)
        finally:
            del place  # an error's traceback would keep it, and the memory goes

    return {
        name: Described(str(kind) if name in cast else info.dtype, info.shape, None, None, None, partial(fill, name))
        for name, info in checkpoint.items()
    }


def convert(
    sources: Sequence[str],
    directory: str | os.PathLike[str],
    *,
    dtype: Any = None,
    max_shard_size: int | str | None = "5GB",
    layout: Layout = "aligned",
    order: Order = "file",
    fsync: bool = True,
    progress: Progress = None,
    storage: Storage | None = None,
    variant: str | None = None,
) -> Report:
    """Writes the checkpoint that ``sources`` name to a directory, or to an address of a bucket.

    Args:
        sources: What `penstock.open` takes, or files that torch.save wrote, or a directory or an index of those. What a
            file is follows from its content. If its name says something else, there is a RuntimeWarning.
        dtype: Casts floating-point tensors of 16 bits and more.
        storage: How servers are asked, as for `penstock.open`; that of the result too.
        variant: Whose safetensors files are meant, as for `penstock.open`.

    The other arguments, what is returned and the errors are those of `penstock.save`.
    """
    kind = cast_target(dtype)
    if kind is not None and kind not in CASTABLE:
        raise InvalidError(f"dtype={dtype!r}: give one of {', '.join(CASTABLE)}")
    for source in sources:
        if len(sources) > 1 or not str(source).startswith("hf://"):
            source_path(source, "sources")
    target = target_path(directory, "directory")
    with around(observe("convert", list(sources))), ExitStack() as until:
        tensors, metadata, read_from = _source(sources, kind, order, storage, until, variant)
        if kind is not None:
            tensors = _cast(tensors, kind)
        if _is_folder_of(target, read_from):
            raise InvalidError(f"directory={target!r} is the folder of the checkpoint: give another folder")
        return _save.save(
            tensors,
            target,
            metadata,
            max_shard_size=max_shard_size,
            layout=layout,
            order=order,
            fsync=fsync,
            progress=progress,
            storage=storage if is_web(target) else None,
        )


def _is_folder_of(target: str, files: Sequence[str]) -> bool:
    """Whether one of these files, which are read until the new ones are written, lies in this folder."""
    if is_web(target):
        return any(path.rpartition("/")[0] == target_folder(target, "directory") for path in files)
    folder = Path(target)
    return folder.is_dir() and any(not is_web(path) and folder.samefile(Path(path).parent) for path in files)


def _source(
    sources: Sequence[str],
    kind: str | None,
    order: Order,
    storage: Storage | None,
    until: ExitStack,
    variant: str | None,
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Tensors, metadata, and the files that they are read from."""
    pickles = _pickles.weights(sources)
    if pickles:
        if variant is not None:
            raise InvalidError(
                f"variant={variant!r} is for safetensors files, and these are torch.save's: give the files"
            )
        _warn(path for path in pickles if path.suffix not in _pickles.SUFFIXES)
        return *_unpickled(pickles), [str(path) for path in pickles]
    misnamed = _pickles.misnamed(sources)
    _warn(map(Path, misnamed or ()))
    given = misnamed or (list(sources) if len(sources) > 1 else sources[0])
    try:
        checkpoint = open_as("sources", given, storage=storage, variant=variant)
    except (NotACheckpointError, NotFoundError) as error:
        if is_web(sources[0]) or not Path(sources[0]).exists():
            raise _pickles.not_here(sources[0], error) from None
        raise
    if any(is_web(path) for path in checkpoint.files):
        return _streamed(checkpoint, kind, order, until), checkpoint.metadata, checkpoint.files
    return _tensors(checkpoint, kind), checkpoint.metadata, checkpoint.files
