"""The first touch of parameters that an engine copies into itself.

The system zeroes each page at its first touch. In small pages this takes most of the processor time of a copy from the
page cache: 0.13 s of 0.2 s for 360 MB. So this module asks for huge pages, where the system gives them on request.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .. import _core

logger = logging.getLogger("penstock")

LEAST = 1 << 22
"""Smaller memory is left as it is: it has one huge page or none."""


def memory_of(parameter: torch.Tensor) -> tuple[int, int]:
    """The private memory of the CPU (address, bytes) that a parameter has; (0, 0) if it has none, or little.

    A class of parameters of an engine's own may raise what it likes.
    """
    if is_lazy(parameter):  # it has no shape yet
        return 0, 0
    try:
        storage = parameter.untyped_storage()
    except NotImplementedError:  # a sparse tensor, or one whose memory is a library's own
        return 0, 0
    try:
        if storage.device.type == "cpu" and storage.nbytes() >= LEAST and not storage.is_shared():
            return storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # of a tensor that wraps others: it has no address
        pass
    return 0, 0


def _memory(parameter: torch.Tensor, name: str) -> tuple[int, int]:
    """The same. If it cannot be asked for, the parameter gets no huge pages, and a log says so: it can be loaded."""
    try:
        return memory_of(parameter)
    except Exception as error:
        kind, why = type(parameter).__name__, f"{type(error).__name__}: {error}"
        logger.debug("penstock: parameter %s, a %s, gets no huge pages: its memory is not known: %s", name, kind, why)
        return 0, 0


class Parameters:
    """The parameters of a model, which were just made, in their order. It keeps none of them alive.

    Args:
        model: Their model.
        page_timing: The choice of the options.
        ask: Asks for huge pages.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        page_timing: bool | None,
        ask: Callable[..., _core.FirstTouch] = _core.FirstTouch.ask,
    ) -> None:
        found = {
            place: (name, weakref.ref(parameter))
            for name, parameter in model.named_parameters()
            if (place := _memory(parameter, name))[1]
        }
        self._places, self._owners = list(found), list(found.values())
        asked = ask(self._places, page_timing) if found else None
        self._core = asked if asked is not None and asked.nbytes else None
        self._next, self._due = 0, 0

    @property
    def nbytes(self) -> int:
        """Bytes that get huge pages if these are fast."""
        return 0 if self._core is None else self._core.nbytes

    def _is_there(self, place: int) -> bool:
        """True if the parameter still has this memory. The engine may have replaced it."""
        name, owner = self._owners[place]
        parameter = owner()
        return parameter is not None and _memory(parameter, name) == self._places[place]

    def _there(self) -> list[int]:
        return [place for place in range(len(self._places)) if self._is_there(place)]

    def ahead(self, nbytes: int) -> None:
        """The engine is about to write so many bytes more. Some huge pages are timed; the rest comes in small ones if
        they are slow."""
        if self._core is None or self._core.are_slow:
            return
        self._due += nbytes
        while self._due > 0 and self._next < len(self._places):
            looked = self._core.ahead(self._next, self._due) if self._is_there(self._next) else 0
            if self._core.are_slow:
                self._core.turn_small(self._there())
                return
            self._due -= looked
            self._next += not looked

    def end(self) -> None:
        """The engine has written all that it will. Idempotent."""
        if self._core is not None:
            self._core.end(self._there())
            self._core = None


def touching(
    tensors: Iterator[tuple[str, Any]], sizes: Mapping[str, int], parameters: Parameters
) -> Iterator[tuple[str, Any]]:
    """The same tensors. The engine writes as large a part of its memory with each as that has of all bytes.

    Args:
        tensors: What the engine copies, in any order.
        sizes: The bytes of each.
        parameters: Where it copies them to.
    """
    part = parameters.nbytes / max(1, sum(sizes.values()))
    for name, tensor in tensors:
        parameters.ahead(int(part * sizes[name]))
        yield name, tensor
