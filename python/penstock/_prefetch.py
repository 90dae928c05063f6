"""Tensors that are loaded in the background and taken by name, or as they come."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from . import _running
from ._errors import CancelledError, InvalidError, PenstockError, UnknownTensorError, raise_if_forked
from ._events import NOTHING
from ._framework import Adapter
from ._report import report_of
from ._request import Request


class PrefetchLoader:
    """Tensors that are being loaded. `safe_open.prefetch` makes it. Use it as a context manager, or close it.

    The load runs in the background, at most ``Options.window`` bytes ahead of the program that takes the tensors. Each
    tensor is handed out once, complete on any stream. You may keep it after `close`. Threads may share the loader.
    """

    def __init__(self, request: Request, adapter: Adapter) -> None:
        self._owner = os.getpid()
        self._checkpoint = request.checkpoint
        self._names = request.selection.names
        self._left = set(self._names)
        self._here: dict[str, Any] = {}
        self._adapter = adapter
        # Held while a tensor is waited for and made, so that other threads wait; the thread that has it is refused
        self._one_at_a_time = threading.RLock()
        self._in_use = False
        self._closed = False
        self._seen, self._told = request.seen.begin(), False
        self._load = _running.begin(request, adapter, stream=True)
        try:
            if request.device.is_meta:
                made = adapter.tensors(self._load, range(len(self._names)))
                self._here.update(zip(self._names, map(adapter.cast, made), strict=True))
            self._pump(0.0)  # so that memory on a GPU is granted before anybody asks for a tensor
        except BaseException:
            self.close()
            raise

    def _pump(self, timeout: float | None) -> bool:
        """Takes what is next, waiting for it at most so long; False once there is no more."""
        while True:
            try:
                want = self._load.next(timeout)
            except PenstockError as error:
                self._tell(error)
                raise
            if want is None:
                self._load.wait()
                self._checkpoint._ended(self._load)
                self._tell(None)
                return False
            if want is True:
                self._adapter.grant(self._load, self._load.wanted_blocks())
                continue
            if want is False:
                return True
            try:
                [tensor] = self._adapter.tensors(self._load, [want])
            except PenstockError:
                self._check_open()  # closed meanwhile: that is why
                raise
            self._load.take(want)
            self._here[self._names[want]] = self._adapter.cast(tensor)
            if self._closed:
                self._here.clear()
                self._check_open()
            return True

    def names(self) -> list[str]:
        """The names that this loader hands out, in file order."""
        return list(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def take(self, name: str) -> Any:
        """The tensor ``name``, or the slice of it that was planned. Waits until it is loaded.

        Raises:
            UnknownTensorError: it is not among the names, or was taken before.
            InvalidError: the loader is closed, or a signal handler or a ``__del__`` calls this while its thread does.
            PenstockError: the load failed.
        """
        with self._alone():
            if name not in self._left:
                why = "was taken before: each is handed out once" if name in self._names else "is not in the plan"
                raise UnknownTensorError(f"tensor {name} {why}", path=self._checkpoint.files[0], tensor=name)
            while name not in self._here:
                if not self._pump(None):
                    raise self._lost(name)
            self._left.discard(name)
            return self._here.pop(name)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, tensor) of what nobody has taken yet, as it arrives."""
        while True:
            with self._alone():
                while not self._here:
                    if not self._left:
                        return
                    if not self._pump(None):
                        raise self._lost(min(self._left))
                name = next(iter(self._here))
                self._left.discard(name)
                tensor = self._here.pop(name)
            yield name, tensor

    def _lost(self, name: str) -> CancelledError:
        return CancelledError(
            f"tensor {name} is lost: an error or Ctrl-C came while it was handed out; plan a new prefetch of it",
            path=self._checkpoint.files[0],
            tensor=name,
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else takes tensors meanwhile: other threads wait.

        A signal handler or a ``__del__`` that its own thread runs in the middle cannot wait for that. It must not go on
        either: the tensor that it wants may be the one that the thread holds, and a full window brings no other.
        """
        with self._one_at_a_time:
            self._check_open()
            if self._in_use:
                raise InvalidError(
                    "this very thread is taking a tensor from the prefetch loader: a signal handler or a __del__ that "
                    "runs in the middle of that cannot take another",
                    path=self._checkpoint.files[0],
                )
            self._in_use = True
            try:
                yield
            finally:
                self._in_use = False

    def _check_open(self) -> None:
        raise_if_forked(self._owner, "prefetch loader")
        if self._closed:
            raise InvalidError("the prefetch loader is closed", path=self._checkpoint.files[0])

    def close(self) -> None:
        """Stops the load and frees the tensors that nobody has taken. You may call it more than once."""
        if os.getpid() != self._owner:
            return
        self._closed = True
        _running.over(self._load)
        self._load.let_go()
        self._here.clear()
        self._adapter.let_go()
        self._tell(CancelledError("the prefetch loader was closed before its end") if self._left else None)

    def _tell(self, error: PenstockError | None) -> None:
        """Operators see its end, and what it had moved by then: once."""
        if self._told or self._seen is NOTHING:
            return
        self._told = True
        self._seen.add(report_of(self._load.report(), self._checkpoint._core))
        self._seen.end(error)

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
