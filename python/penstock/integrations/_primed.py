"""Generators that hold something from the moment they are made, and not only once they are asked for a value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PRIMED: Any = None
"""The first value of such a generator. It is dropped: at that point the generator holds its resources."""


def primed(generator: Iterator[Any]) -> Iterator[Any]:
    """The generator, at its first ``yield``: its ``finally`` runs then even if nobody asks it for a value.

    One that was never started runs nothing when it is dropped.
    """
    next(generator)
    return generator
