"""fastsafetensors' saver: a checkpoint as a set of shards of about equal size."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .. import _save
from .._dtypes import DTYPES
from .._errors import InvalidError, NoSpaceError
from .._frameworks import need
from .._paths import local_path
from ._fastsafetensors_loader import check_framework
from ._fastsafetensors_types import DType, TorchTensor, torch_dtype

_INDEX, _COUNT, _SET = "fst.shard.index", "fst.shard.count", "fst.shard.set"
"""Metadata by which fastsafetensors tells the shards of one save, and their order."""

_THREADS = 8
"""The original's default: it asks for nothing in particular."""


@dataclass
class WriteEntry:
    """One tensor to save."""

    name: str
    dtype: DType
    shape: list[int]
    """Extent per dimension, in elements of the file; of F4 that is twice what torch says."""
    nbytes: int
    source: Any = None
    """The tensor, or whatever the `FillFn` makes its bytes of."""


FillFn = Callable[[list[tuple[memoryview, WriteEntry]]], None]
"""Writes the bytes of every entry to its buffer, and keeps none of them. Called once, with the largest first."""

ShardMetadataFn = Callable[[Sequence[WriteEntry]], Mapping[str, str]]
"""Metadata for the shard that has these entries."""


def plain_entry(name: str, tensor: Any, *, framework: str = "pytorch") -> WriteEntry:
    """The entry of a torch tensor, or of one in a `TorchTensor`."""
    check_framework(framework)
    wrapped = tensor if isinstance(tensor, TorchTensor) else TorchTensor.of(tensor)
    return WriteEntry(name, wrapped.dtype, wrapped.get_shape(), wrapped.get_nbytes(), tensor)


def _positive(**settings: int) -> None:
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidError(f"{name}={value!r}: give a whole number of at least 1")


def _check_entries(entries: Sequence[WriteEntry]) -> None:
    names = set()
    for entry in entries:
        if entry.name in names or entry.name == "__metadata__":
            why = f"tensor {entry.name}: the name is there twice, or the format's own"
            raise InvalidError(why, tensor=entry.name)
        names.add(entry.name)
        dtype = DType(entry.dtype)
        what = f"tensor {entry.name}: {dtype.value} of shape {list(entry.shape)}"
        if dtype is DType.AUTO or any(size < 0 for size in entry.shape):
            raise InvalidError(f"{what} is nothing to save", tensor=entry.name)
        bits = prod(entry.shape) * DTYPES[dtype.value].bits
        if bits != 8 * entry.nbytes:
            why = f"{what} is {bits / 8:g} bytes, not {entry.nbytes}"
            raise InvalidError(why, tensor=entry.name, expected=entry.nbytes, found=bits // 8)


def _check_metadata(*given: Mapping[str, str]) -> None:
    for metadata in given:
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise InvalidError(f"metadata: {key!r}: {value!r}: the format has strings only")


def _divided(entries: Sequence[WriteEntry], count: int) -> list[list[WriteEntry]]:
    """Each entry, the largest first, goes to the shard that has least."""
    shards: list[list[WriteEntry]] = [[] for _ in range(count)]
    sizes = [0] * count
    for entry in sorted(entries, key=lambda entry: -entry.nbytes):
        least = sizes.index(min(sizes))
        shards[least].append(entry)
        sizes[least] += entry.nbytes
    return shards


def _filled(entries: Sequence[WriteEntry], fill: FillFn) -> dict[str, Any]:
    """By name, the bytes that ``fill`` makes, in memory: they are written when all of them are there."""
    need("pt")
    import torch

    memory = {entry.name: mmap.mmap(-1, max(entry.nbytes, 1)) for entry in entries}
    buffers = {entry.name: memoryview(memory[entry.name])[: entry.nbytes] for entry in entries}
    try:
        fill([(buffers[entry.name], entry) for entry in sorted(entries, key=lambda entry: -entry.nbytes)])
    finally:
        for buffer in buffers.values():
            buffer.release()
    return {
        entry.name: torch.frombuffer(memory[entry.name], dtype=torch.uint8, count=max(entry.nbytes, 1))[: entry.nbytes]
        for entry in entries
    }


def _tensor(entry: WriteEntry, source: Any) -> Any:
    """The source's bytes as the entry describes them."""
    need("pt")
    import torch

    tensor = source.get_raw() if isinstance(source, TorchTensor) else source
    if not isinstance(tensor, torch.Tensor):
        why = f"tensor {entry.name} is a {type(tensor).__name__}: give torch tensors, or a fill function"
        raise InvalidError(why, tensor=entry.name)
    if tensor.nbytes != entry.nbytes:
        why = f"tensor {entry.name} has {tensor.nbytes} bytes, not the {entry.nbytes} of its entry"
        raise InvalidError(why, tensor=entry.name, expected=entry.nbytes, found=tensor.nbytes)
    dtype, shape = torch_dtype(DType(entry.dtype)), list(entry.shape)
    if DType(entry.dtype) is DType.F4:
        shape[-1] //= 2
    plain = tensor.detach().contiguous()
    if plain.dtype is dtype and list(plain.shape) == shape:
        return plain
    return plain.reshape(-1).view(torch.uint8).view(dtype).reshape(shape)


def _check_room(folder: Path, wanted: int, spare: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < wanted + spare:
        raise NoSpaceError(
            f"{wanted} bytes are to be saved and {spare} left free, and there are {free}",
            path=str(folder),
            errno=errno.ENOSPC,
        )


def save_sharded(
    entries: Sequence[WriteEntry],
    base: str,
    *,
    num_shards: int = 16,
    fill: FillFn | None = None,
    framework: str = "pytorch",
    min_free_bytes: int = 0,
    fsync: bool = False,
    metadata: Mapping[str, str] | None = None,
    shard0_metadata: Mapping[str, str] | None = None,
    shard_metadata: ShardMetadataFn | None = None,
    header_align: int = 8,
    num_threads: int = _THREADS,
) -> list[str]:
    """Saves entries as ``{base}-00001-of-00016.safetensors`` and so on: all of them get their names, or none.

    Args:
        fill: Makes the bytes of all entries, in memory; by default they are those of the sources, torch tensors.
        min_free_bytes: What is to be left free on the file system.
        metadata: For every shard; ``shard0_metadata`` for the first, ``shard_metadata`` by what a shard has.
        header_align: Accepted: the data begins at a page.
        num_threads: Threads that write; the default leaves it to penstock.

    Returns:
        The paths, in order.

    Raises:
        InvalidError: entries, metadata or settings that make no sense. NoSpaceError: too little room.
    """
    check_framework(framework)
    _positive(num_shards=num_shards, num_threads=num_threads)
    if header_align < 8 or header_align % 8:
        raise InvalidError(f"header_align={header_align!r}: give a multiple of 8")
    _check_entries(entries)
    _check_metadata(metadata or {}, shard0_metadata or {})
    local_path(base, "base")
    paths = [f"{base}-{number:05}-of-{num_shards:05}.safetensors" for number in range(1, num_shards + 1)]
    shards, mark = _divided(entries, num_shards), uuid.uuid4().hex
    headers: list[dict[str, str]] = []
    for number, shard in enumerate(shards):
        more = {} if shard_metadata is None else dict(shard_metadata(tuple(shard)))
        _check_metadata(more)
        place = {_INDEX: str(number), _COUNT: str(num_shards), _SET: mark}
        if not place.keys().isdisjoint(more):
            raise InvalidError(f"metadata: {', '.join(place.keys() & more.keys())}: these keys tell the shards apart")
        headers.append({**(metadata or {}), **((shard0_metadata or {}) if number == 0 else {}), **place, **more})
    folder = Path(base).parent.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    _check_room(folder, sum(entry.nbytes for entry in entries), min_free_bytes)
    made = None if fill is None else _filled(entries, fill)
    options = {} if num_threads == _THREADS else {"threads": num_threads}
    unnamed = [Path(f"{path}.tmp.{mark}") for path in paths]
    try:
        for path, shard, header in zip(unnamed, shards, headers, strict=True):
            tensors = {e.name: _tensor(e, e.source if made is None else made[e.name]) for e in shard}
            _save.save_file(tensors, path, header, fsync=fsync, progress=False, options=options)
        for path, name in zip(unnamed, paths, strict=True):
            path.replace(name)
    finally:
        for path in unnamed:
            with contextlib.suppress(OSError):
                path.unlink()
    if fsync:
        _sync(folder)
    return paths


def _sync(folder: Path) -> None:
    """Has the names in a folder on stable storage."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ParallelSaver:
    """Settings for saving checkpoints as shards: those of `save_sharded`."""

    def __init__(
        self,
        *,
        num_shards: int = 16,
        framework: str = "pytorch",
        num_threads: int = _THREADS,
        shard_metadata: ShardMetadataFn | None = None,
        fill: FillFn | None = None,
        min_free_bytes: int = 0,
        fsync: bool = False,
    ) -> None:
        check_framework(framework)
        _positive(num_shards=num_shards, num_threads=num_threads)
        self.num_shards = num_shards
        self.framework = framework
        self.num_threads = num_threads
        self.shard_metadata = shard_metadata
        self.fill = fill
        self.min_free_bytes = min_free_bytes
        self.fsync = fsync

    def save(
        self,
        tensors: Mapping[str, Any],
        base: str,
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
        header_align: int = 8,
    ) -> list[str]:
        """Saves torch tensors, or such in a `TorchTensor`, by name. Returns the paths."""
        entries = [plain_entry(name, tensor, framework=self.framework) for name, tensor in tensors.items()]
        return self.save_entries(
            entries, base, metadata=metadata, shard0_metadata=shard0_metadata, header_align=header_align
        )

    def save_entries(
        self,
        entries: Sequence[WriteEntry],
        base: str,
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
        header_align: int = 8,
    ) -> list[str]:
        """Saves entries. Returns the paths."""
        return save_sharded(
            entries,
            base,
            num_shards=self.num_shards,
            fill=self.fill,
            framework=self.framework,
            min_free_bytes=self.min_free_bytes,
            fsync=self.fsync,
            metadata=metadata,
            shard0_metadata=shard0_metadata,
            shard_metadata=self.shard_metadata,
            header_align=header_align,
            num_threads=self.num_threads,
        )
