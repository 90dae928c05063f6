"""The bound that InstantTensor's ``max_free_mem_usage`` sets: a share of the free memory of the device."""

from __future__ import annotations

import math
import os
from typing import Any

from .. import _accelerator, _core
from .._device import Device
from .._errors import InvalidError, UnsupportedError
from .._report import size_text

VARIABLE = "INSTANTTENSOR_MAX_FREE_MEM_USAGE"


def share_of(value: Any) -> float | None:
    """The share asked for, by argument or else by environment variable; None if nobody asks.

    Raises:
        InvalidError: it is no number above 0 and up to 1.
    """
    given = value if value is not None else os.environ.get(VARIABLE)
    if given is None:
        return None
    try:
        share = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        share = math.nan
    if not 0 < share <= 1:
        raise InvalidError(f"max_free_mem_usage={given!r}: give None or a number above 0 and up to 1")
    return share


def window_within(share: float, device: Device, window: int, asked: bool, ranks: bool) -> int:
    """Most bytes read ahead within this share of what is free on the device.

    Args:
        window: Most bytes read ahead without it.
        asked: Whether the program set ``window`` itself, by ``buffer_size``.
        ranks: Whether several ranks read together. They need the same window, so none of them shrinks its own.

    Raises:
        UnsupportedError: (a RuntimeError) the share is less than a window that must not shrink, or nothing is free.
    """
    free = _free_on(device)
    budget = int(free * share)
    if window <= budget:
        return window
    if asked or ranks or budget < 1:
        why = f"max_free_mem_usage={share:g} leaves {budget} bytes of {device} ({size_text(free)} free)"
        what = f"buffer_size ({window}) exceeds them" if asked else f"{window} bytes are to be read ahead"
        todo = "the same smaller buffer_size to all ranks" if ranks else "a smaller buffer_size, or a larger share"
        raise UnsupportedError(f"{why}: {what}. Give {todo}")
    return budget


def _free_on(device: Device) -> int:
    """Free bytes: of the machine for the CPU, and for a GPU that shares the machine's memory."""
    if device.is_cpu or _is_integrated(device):
        return int(_core.probe("/")["memory_available"])
    return int(_accelerator.Accelerator(device).free())


def _is_integrated(device: Device) -> bool:
    gpus = _core.gpus()["gpus"]
    return device.number < len(gpus) and bool(gpus[device.number]["integrated"])
