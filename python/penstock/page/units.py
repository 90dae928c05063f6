"""Seconds, rates and sizes for people. GB are 1e9 bytes."""

from __future__ import annotations

import math

#: Units of time, the largest first: (name, seconds).
TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def digits(value: float, significant: int = 3) -> str:
    """A number with three significant digits, and no digits lost before the point."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    places = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    return f"{round(value, places):,.{places}f}"


def unit_for(values: list[float], units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    """The unit in which the largest of the values is at least 1."""
    largest = max((abs(value) for value in values), default=0.0)
    return next((unit for unit in units if largest >= unit[1]), units[-1])


def duration(seconds: float) -> str:
    """304 ms, 1.58 s, 12.3 µs."""
    name, scale = unit_for([seconds], TIMES)
    return f"{digits(seconds / scale)} {name}"


def size(nbytes: float) -> str:
    """548 MB, 2.95 GB."""
    name, scale = unit_for([nbytes], SIZES)
    return f"{digits(nbytes / scale)} {name}"


def rate(bytes_per_second: float) -> str:
    """1.80 GB/s."""
    return f"{digits(bytes_per_second / 1e9)} GB/s"


def percent(share: float) -> str:
    """97%, <1% and >99% where rounding would say none or all of it."""
    if 0 < share < 0.01:
        return "<1%"
    if 0.99 < share < 0.9999:
        return ">99%"
    return f"{share * 100:.0f}%"


def places(values: list[float]) -> int:
    """Decimals for a column of figures: three digits for the smallest of them, as far as the largest leaves room."""
    smallest = min((abs(value) for value in values if value), default=1.0)
    largest = max((abs(value) for value in values), default=0.0)
    room = next((room for limit, room in ((1000, 0), (100, 1), (10, 2), (1, 3)) if largest >= limit), 4)
    return min(room, max(0, 2 - math.floor(math.log10(smallest))))
