"""`safe_open` and `load_file`: the interface of safetensors, on this engine."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from . import _load
from ._checkpoint import Checkpoint, Source, open
from ._core import Options
from ._errors import InvalidError, PenstockError, UnsupportedError
from ._report import Report
from ._selection import unknown

_SINGLES = 4
"""Tensors that are loaded one by one before a caller counts as one who wants them all."""
_AHEAD_BYTES, _AHEAD_TENSORS = 256 << 20, 4096
"""What one load then maps at most. A load costs 0.2 ms whatever its size, and its tensors keep a mapping, of which a
process may have 65,530."""

#: Handles that somebody still has.
_handles: weakref.WeakSet[safe_open] = weakref.WeakSet()


def _unlock_all() -> None:
    """In a forked child: a lock that another thread held is held for ever, by a thread that the child does not have."""
    for handle in list(_handles):
        handle._lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock_all)

_BACKENDS: dict[str | None, dict[str, Any]] = {None: {}, "mmap": {}, "pread": {"copy": True}}


def _state(file: str) -> tuple[int, ...] | None:
    """What tells whether somebody has changed the file; None where it cannot be looked at."""
    try:
        now = Path(file).stat()
    except OSError:
        return None
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


class Slice:
    """One tensor of an open file, not yet read: index it to get a tensor. Outlives the file's handle."""

    def __init__(self, opened: safe_open, name: str) -> None:
        self._opened = opened
        self._name = name
        self._info = opened._checkpoint[name]

    def get_shape(self) -> list[int]:
        """Extent per dimension, in elements."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """The dtype as spelled in the header, such as "BF16"."""
        return self._info.dtype

    def __getitem__(self, index: Any) -> Any:
        """What indexing the whole tensor would give.

        Of whole numbers and ranges with step 1 only the bytes asked for are read; anything else that the framework can
        index with (steps, lists, masks, None) reads the whole tensor first.
        """
        cuts = None if self._info.dtype in ("F4", "F6_E2M3", "F6_E3M2") else self._rectangle(index)
        if cuts is None:
            return self._opened._one(self._name)[index]
        if cuts == tuple(slice(0, size) for size in self._info.shape):
            return self._opened._one(self._name)
        rectangle = tuple(cut if isinstance(cut, slice) else slice(cut, cut + 1) for cut in cuts)
        part = self._opened._load([self._name], {self._name: rectangle})[self._name]
        if all(isinstance(cut, slice) for cut in cuts):
            return part
        return part[tuple(slice(None) if isinstance(cut, slice) else 0 for cut in cuts)]

    def _rectangle(self, index: Any) -> tuple[slice | int, ...] | None:
        """``index`` as one range or number per dimension, all within the tensor; None if it is anything else."""
        shape = self._info.shape
        parts = index if isinstance(index, tuple) else (index,)
        dots = [i for i, part in enumerate(parts) if part is Ellipsis]
        if len(dots) > 1:
            return None
        if dots:
            fill = (slice(None),) * (len(shape) - len(parts) + 1)
            parts = parts[: dots[0]] + fill + parts[dots[0] + 1 :]
        if len(parts) > len(shape):
            return None
        cuts: list[slice | int] = []
        for part, size in zip(parts, shape, strict=False):
            if isinstance(part, slice):
                try:
                    start, stop, step = part.indices(size)
                except (TypeError, ValueError):
                    return None
                if step != 1:
                    return None
                cuts.append(slice(start, max(start, stop)))
            elif type(part) is int and -size <= part < size:
                cuts.append(part % size)
            else:  # out of range too: the framework has its own error for that
                return None
        return tuple(cuts)


class safe_open:
    """Opens safetensors files lazily, as ``safetensors.safe_open`` does, and takes several files or a folder as well.

    Args:
        filename: A file, a list of files, a directory, or an index file.
        framework: "pt", "np" or "dlpack".
        device: As in `Checkpoint.load`. A GPU is touched with the first tensor, not before.
        backend: Accepted for compatibility: "mmap" changes nothing, "pread" asks for private copies.
        options: `Options`, or a dict of its keywords.

    Usable with and without ``with``. Tensors and slices outlive the handle.
    """

    def __init__(
        self,
        filename: Source,
        framework: str | None = "pt",
        device: Any = "cpu",
        *,
        backend: str | None = None,
        options: Options | Mapping[str, Any] | None = None,
    ) -> None:
        if backend not in _BACKENDS:
            raise InvalidError(f'backend={backend!r}: give "mmap" or "pread", or leave it out')
        self._framework = _load.framework_named(framework)
        self._device = _load.device_for(device, framework)
        self._options = _load.make_options(options, **_BACKENDS[backend])
        self._checkpoint: Checkpoint = open(filename)
        self._closed = False
        self._lock = threading.Lock()
        self._singles = 0
        self._reads_ahead = self._device.is_cpu and self._options.copy is not True
        # Mapped, not yet asked for, with their file and its state before
        self._ahead: dict[str, tuple[Any, str, tuple[int, ...]]] = {}
        _handles.add(self)

    def _open(self) -> Checkpoint:
        if self._closed:
            raise PenstockError("File is closed", path=self._checkpoint.files[0])
        return self._checkpoint

    def _load(self, names: Sequence[str] | None, slices: Any = None) -> dict[str, Any]:
        prepared = _load.prepare(self._checkpoint, self._device, names, None, self._framework, self._options, slices)
        return _load.load(*prepared, False)

    def _one(self, name: str) -> Any:
        """The whole tensor called ``name``; from the fifth one on its neighbours in the file are mapped with it."""
        if not self._reads_ahead:
            return self._load([name])[name]
        with self._lock:
            tensor, file, state = self._ahead.pop(name, (None, "", None))
            if tensor is not None and state == _state(file):
                return tensor
            file = self._checkpoint[name].file
            # Of a file that has changed since, a load of the one tensor tells what is wrong
            alone = tensor is not None or self._singles < _SINGLES
            state = None if alone else _state(file)
            names = [name] if state is None else self._neighbours(name)
            try:
                loaded = self._load(names)
            except UnsupportedError:  # perhaps a neighbour's dtype, of which the caller knows nothing
                if len(names) == 1:
                    raise
                self._reads_ahead = False
                loaded = self._load([name])
            self._singles += 1
            report = self._checkpoint.last_report or Report()
            if any(way["bytes"] for route, way in report.routes.items() if route != "mapped"):
                self._reads_ahead = False  # reading ahead into private memory would be a second checkpoint's worth
            tensor = loaded.pop(name)
            if state is not None and not self._closed:
                self._ahead.update((other, (mapped, file, state)) for other, mapped in loaded.items())
            return tensor

    def _neighbours(self, name: str) -> list[str]:
        """``name`` and the tensors after and before it in its file that are not mapped yet, within the limits."""
        core = self._checkpoint._core
        at = core.index(name)
        first, last = core.file_tensors(core.info(at)[3])
        names, nbytes = [name], 0
        for number in (*range(at + 1, last), *range(at - 1, first - 1, -1)):
            if len(names) >= _AHEAD_TENSORS or nbytes >= _AHEAD_BYTES:
                break
            other, _, _, _, begin, end = core.info(number)
            if other not in self._ahead and nbytes + end - begin <= _AHEAD_BYTES:
                names.append(other)
                nbytes += end - begin
        return names

    def keys(self) -> list[str]:
        """The tensors' names, sorted."""
        return sorted(self._open().keys())

    def offset_keys(self) -> list[str]:
        """The tensors' names in file order."""
        return self._open().keys()

    def metadata(self) -> dict[str, str] | None:
        """The files' ``__metadata__``, or None if there is none."""
        return self._open()._core.metadata()

    def get_tensor(self, name: str) -> Any:
        """The tensor called ``name``. Raises UnknownTensorError, a SafetensorError and KeyError."""
        if name not in self._open():
            raise unknown(self._checkpoint._core, name)
        return self._one(name)

    def get_tensors(self) -> dict[str, Any]:
        """Every tensor by name."""
        self._open()
        return self._load(None)

    def get_slice(self, name: str) -> Slice:
        """The tensor called ``name``, to be indexed."""
        self._open()
        return Slice(self, name)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, tensor) in file order, reading ahead."""
        return self._open().stream(str(self._device), framework=self._framework, options=self._options)

    def __enter__(self) -> safe_open:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._ahead.clear()


def load_file(
    filename: Source,
    device: Any = "cpu",
    *,
    framework: str | None = None,
    backend: str | None = None,
    options: Options | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Every tensor of one or more files by name: ``safetensors.torch.load_file`` on this engine."""
    return safe_open(filename, framework, device, backend=backend, options=options).get_tensors()
