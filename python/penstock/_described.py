"""A tensor that is to be saved, as the core takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Described(NamedTuple):
    """A tensor as the core takes it."""

    dtype: str
    shape: tuple[int, ...]
    gpu: int | None
    address: int | None
    """None of what is written to memory when its turn comes."""
    keep: object
    """Keeps the memory at `address` alive."""
    fill: Callable[[memoryview], object] | None = None
    """Where there is no address: writes all bytes to the memory that it is given, and lets go of that."""
