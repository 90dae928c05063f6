"""Reads of one tensor, or of one part, at a time: for handles whose callers loop, where a load for each would cost more
than its bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from . import _core
from ._device import CPU, Device
from ._framework import Adapter, Framework
from ._selection import Region, Selection


def _stop_reading_ahead() -> None:
    _core.stop_reading_ahead(0.2)


_forks = 0
"""Forks that led to this process. `os.getpid` is a system call."""


def _count_fork() -> None:
    global _forks
    _forks += 1


# A thread that runs during a fork makes Python warn, and the child has none
os.register_at_fork(before=_stop_reading_ahead, after_in_child=_count_fork)


class _Found:
    """The source of an adapter's tensor, in place of a load: one view."""

    def __init__(self, view: _core.View) -> None:
        self._view = view

    def views(self, wants: Sequence[int]) -> list[_core.View]:
        return [self._view for _ in wants]

    def capsules(self, wants: Sequence[int], dtypes: Any, convert: Any) -> list[Any]:
        """None of them: torch asks for those among several tensors that need no detour."""
        assert not wants
        return []


class SingleReads:
    """The reads of one handle, to CPU memory. Threads may share it, and a forked child reads by itself.

    Tensors on network file systems are read ahead, in the order in which they are asked for. Of files on this machine
    small parts that are in the page cache are copied. Everything else is for a load: then the answer is None.
    """

    def __init__(self, core: _core.Checkpoint, options: _core.Options) -> None:
        self._core, self._options = core, options
        self._reader: tuple[int, _core.Reader] | None = None
        self._distant: dict[int, bool] = {}
        self._released = False

    @property
    def _own(self) -> _core.Reader:
        """The reader of this process: a forked child leaves its parent's alone."""
        if self._reader is None or self._reader[0] != _forks:
            reader = _core.Reader(self._core, self._options)
            if self._released:
                reader.release()
            self._reader = _forks, reader
        return self._reader[1]

    @property
    def held(self) -> int:
        """Bytes that were read ahead."""
        return 0 if self._reader is None else self._own.held

    def is_distant(self, file: int) -> bool:
        """Whether file number ``file`` is on a network file system."""
        known = self._distant.get(file)
        if known is None:
            known = self._distant[file] = self._own.is_distant(file)
        return known

    def tensor(
        self,
        number: int,
        name: str,
        dtype: str,
        region: Region | None,
        framework: Framework,
        adapter: Callable[[Selection, Device], Adapter],
    ) -> Any:
        """``framework``'s tensor of (a part of) tensor ``number``, made by ``adapter`` unless the core makes it itself;
        None: a load is needed for it."""
        by_core = framework.of_capsules()
        if by_core is not None and dtype in by_core[0]:
            return self._own.tensor(number, region, *by_core)
        made_by = adapter(Selection(self._core, [name], [number], None if region is None else [region]), CPU)
        view = self._own.view(number, region)
        return None if view is None else made_by.tensors(_Found(view), [0])[0]  # type: ignore[arg-type]

    def release(self) -> None:
        """Lets go of what was read ahead, and closes the files. What is asked for later is read without either."""
        self._released = True
        if self._reader is not None and self._reader[0] == _forks:
            self._reader[1].release()
