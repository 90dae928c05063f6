"""The choice among the backends that a caller of the InstantTensor interface asks for: tried in order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from .. import _core
from .._errors import InvalidError, UnsupportedError
from .._patience import asking, patiently


class Backend(Enum):
    """How files are read. Each stands for a value of `Options.io`."""

    AIO = 0
    AIO_BUFFERED = 1
    URING = 2
    URING_BUFFERED = 3
    CUFILE = 4
    MMAP = 5


class BackendPolicy(Enum):
    """A list of backends by what they have in common: through the page cache, io_uring first, else MMAP."""

    BUFFERED = "BUFFERED"


Choice = Backend | BackendPolicy


class _Route(NamedTuple):
    """The meaning of a backend here, and its needs."""

    io: str
    interface: str | None = None
    """The key of `_core.probe` that says why the kernel refuses its interface."""
    direct: bool = False
    """Whether the file system must take O_DIRECT."""
    missing: str | None = None
    """The reason that Penstock cannot take this route on any machine."""


_ROUTES: dict[Backend, _Route] = {
    # Penstock does not use Linux AIO: where io_uring is refused, a pool of threads reads as fast
    Backend.AIO: _Route("threads", direct=True),
    Backend.AIO_BUFFERED: _Route("buffered"),
    Backend.URING: _Route("uring", "io_uring", direct=True),
    Backend.URING_BUFFERED: _Route("uring_buffered", "io_uring"),
    Backend.CUFILE: _Route("direct", missing="cuFile is not available: Penstock has no GPUDirect Storage"),
    # InstantTensor copies from its mapping. Only without a copy, and on the CPU, do tensors stay in it here
    Backend.MMAP: _Route("buffered"),
}
_LISTS: dict[BackendPolicy, tuple[Backend, ...]] = {BackendPolicy.BUFFERED: (Backend.URING_BUFFERED, Backend.MMAP)}
"""The backends that a policy stands for, in the order of InstantTensor 0.2.2."""
_BY_NAME: dict[str, Choice] = {choice.name: choice for choice in (*Backend, *BackendPolicy)}
_NAMES = ", ".join(_BY_NAME)


def candidates(backend: Any) -> Sequence[Backend]:
    """The backends asked for, by argument or else by INSTANTTENSOR_BACKEND; none if nobody asks.

    A policy is the list that it stands for.
    """
    found: list[Backend] = []
    for choice in _choices(backend):
        found += [choice] if isinstance(choice, Backend) else _LISTS[choice]
    return found


def _choices(backend: Any) -> Sequence[Choice]:
    if backend is None:
        text = os.environ.get("INSTANTTENSOR_BACKEND")
        if text is None:
            return ()
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names or any(name not in _BY_NAME for name in names):
            raise InvalidError(f"INSTANTTENSOR_BACKEND={text!r}: give one or more of {_NAMES}, between commas")
        return [_BY_NAME[name] for name in names]
    listed = backend if isinstance(backend, (list, tuple)) else [backend]
    if any(not isinstance(choice, (Backend, BackendPolicy)) for choice in listed):
        raise TypeError(f"backend={backend!r}: give a Backend or BackendPolicy, or a list of them: {_NAMES}")
    if not listed:
        raise InvalidError(f"backend=[]: give None, or one or more of {_NAMES}")
    return listed


def io_for(asked: Sequence[Backend], files: Sequence[str], mapped: bool) -> str | None:
    """The value of `Options.io` for the first of these backends that can read these files; None if none was asked for.

    Args:
        asked: What `candidates` returned.
        files: The paths of the shard files.
        mapped: Whether tensors may stay in a mapping.

    Raises:
        UnsupportedError: (a RuntimeError) none of them can be used; says why for each.
        StalledError: the file system does not answer.
    """
    here, rejected = _Here(files), []
    for choice in asked:
        why = _ROUTES[choice].missing or (here.obstacle(_ROUTES[choice]) if files else None)
        if why is None:
            return "mapped" if mapped and choice is Backend.MMAP else _ROUTES[choice].io
        rejected.append(f"{choice.name}: {why}")
    if not rejected:
        return None
    raise UnsupportedError(
        f"none of the backends asked for can be used ({'; '.join(rejected)}). AIO_BUFFERED and MMAP work everywhere",
        path=files[0] if files else None,
    )


class _Disk(NamedTuple):
    """The facts of one file system."""

    path: str
    facts: dict[str, Any]
    refusal: str | None
    """The reason that a file on it cannot be opened with O_DIRECT."""


class _Here:
    """The facts of the kernel and of the file systems of some files. Asked for once, and only if a backend needs it."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files

    @cached_property
    def _disks(self) -> list[_Disk]:
        return patiently(self._look, None, self._files[0])

    def _look(self) -> list[_Disk]:
        first: dict[int, str] = {}
        for path in self._files:
            asking(path)
            first.setdefault(Path(path).stat().st_dev, path)
        disks = []
        for path in first.values():
            asking(path)
            refusal = None
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
            except OSError as error:
                refusal = error.strerror
            asking(path)
            disks.append(_Disk(path, _core.probe(path), refusal))
        return disks

    def obstacle(self, route: _Route) -> str | None:
        """The reason that this route cannot be taken, or None."""
        if route.interface is not None and (refusal := self._disks[0].facts[route.interface]) is not None:
            return str(refusal)
        for disk in self._disks if route.direct else ():
            if disk.facts["direct_align"] is None or disk.refusal is not None:
                because = f" ({disk.refusal})" if disk.refusal is not None else ""
                return f"the file system of {disk.path}, {disk.facts['fs']}, refuses O_DIRECT{because}"
        return None
