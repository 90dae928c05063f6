"""The log line of a load that read much more than its rank wanted: row-parallel weights, without exchange."""

from __future__ import annotations

from typing import Any

from .._report import Report, bytes_read, size_text

_SHARE, _LEAST = 1.25, 16 << 20
"""Bytes read by bytes wanted, and bytes read beyond those: a load with less of either says nothing."""


_NOT_ASKED_FOR = "asked for"
"""The reason of a report if exchange is off by an option, or by the default on a GPU."""


def read_besides(report: Report) -> str | None:
    """The message for a load whose rank read or received much more than it wanted; None: no message."""
    exchange: dict[str, Any] | None = report.get("exchange")
    if exchange is None or exchange["choice"] == "on":
        return None  # one rank alone, or each byte once
    wanted = report["nbytes"]
    network = report.get("network") or {}
    read = max(bytes_read(report), network.get("received_bytes", 0))
    if read < _SHARE * wanted or read - wanted < _LEAST:
        return None
    times = f"{read / max(wanted, 1):.1f} times as many"
    said = (
        f"{size_text(read)} were read for {size_text(wanted)} that this rank wants, {times}: "
        "row-parallel weights are cut along their rows, and the bytes between the pieces are read too"
    )
    if exchange["reason"] != _NOT_ASKED_FOR:
        return f"{said}. Each rank reads for itself: {exchange['reason']}"
    return (
        f"{said}. Ranks that read for each other take each byte once, which has not run on a GPU yet: "
        '--model-loader-extra-config \'{"exchange": "on"}\''
    )
