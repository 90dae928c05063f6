"""Options for what other loaders' settings say of reading: how far ahead, how much at once, how many at a time."""

from __future__ import annotations

from typing import Any

from .._core import Options

MOST_READS = 1024
"""The most reads in flight that a face takes: MAX_IO_DEPTH of InstantTensor 0.2.2 (csrc/instant_tensor/common.hpp)."""
MOST_EXTENT = 1 << 30
"""The most bytes of one read, as `Options.extent` takes them."""
_PAGE = 4096


def reading(
    *, window: int | None = None, extent: int | None = None, threads: int | None = None, depth: int | None = None
) -> dict[str, Any]:
    """Keywords of `Options`; None leaves one out.

    Args:
        window: Most bytes read ahead of the consumer. Staging memory is no more, and has room for two reads.
        extent: Most bytes of one read. It becomes whole pages.
        threads: Threads that read and copy; 0 adapts.
        depth: Reads in flight.
    """
    settings: dict[str, Any] = {}
    if extent is not None:
        settings["extent"] = -(-extent // _PAGE) * _PAGE
    if window is not None:
        settings["window"] = window
    settings |= staging_within(window, settings.get("extent"))
    if threads:
        settings["threads"] = threads
    if depth is not None:
        settings["depth"] = depth
    return settings


def staging_within(most: int | None, extent: int | None) -> dict[str, Any]:
    """The staging memory that is at most ``most`` bytes, and at least two reads; empty if that is the default."""
    default = Options()
    staging = max(min(default.staging, most or default.staging), 2 * (extent or default.extent))
    return {"staging": staging} if staging != default.staging else {}
