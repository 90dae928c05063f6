"""The log line of a load that reads much more than its rank wants: columns, where ranks do not read for each other."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import Any

from . import _core
from ._events import engine_of_process
from ._late_imports import importing
from ._report import Report, bytes_read, size_text
from ._request import Request

_SHARE, _LEAST = 1.25, 16 << 20
"""Bytes read by bytes wanted, and bytes read beyond those: a load with less of either says nothing."""

ASKED_FOR = "asked for"
ON_GPU = 'exchange between ranks with GPUs has not been verified on hardware: exchange="on" asks for it'
"""The reasons for which ranks load alone that an option ends."""

_TRIED = "tried: "
"""The beginning of the reason where ranks have tried both ways."""

_lock = threading.Lock()
_logged: set[tuple[int, str]] = set()
"""The checkpoints of this process that have had a line, each with the end of the line."""


def say_planned(load: _core.Load, request: Request, apart: tuple[int, str] | None) -> None:
    """Logs the bytes that a load without exchange is going to read in vain, and the option that ends that.

    Once for each checkpoint and reason: a stream of ranks is many loads. ``apart``: as in `Agreement`.
    """
    wanted, gaps = load.planned()
    if gaps < _LEAST or wanted + gaps < _SHARE * wanted:
        return
    why = _why(engine_of_process(), request.group is not None, apart)
    key = request.selection.core.fingerprint(), why
    with _lock:
        if not why or key in _logged:
            return
        _logged.add(key)
    with suppress(ImportError, OSError):  # a program that cannot read the standard library loads without logging
        with importing():
            import logging
        logging.getLogger("penstock").warning("penstock: %s. %s", _much("will be", wanted, wanted + gaps), why)


def _why(engine: str | None, in_group: bool, apart: tuple[int, str] | None) -> str:
    """The reason for which each rank reads for itself, and the option that ends that; "" for a rank without others."""
    ends = "Ranks that read for each other take each byte once: "
    if apart is None:
        # A rank of an engine, or in a group of its own, loads alone because the others do not want the same
        alone = in_group or engine or not _is_one_of_several()
        return "" if alone else f'{ends}give all ranks\' loads a group= and exchange="on"'
    reason = apart[1]
    if reason not in (ASKED_FOR, ON_GPU):
        return f"Each rank reads for itself: {reason}"
    on = '--model-loader-extra-config \'{"exchange": "on"}\'' if engine else 'exchange="on"'
    reason = 'exchange="off"' if reason == ASKED_FOR else reason
    return f"Each rank reads for itself: {reason}. {ends}{on}, or PENSTOCK_EXCHANGE=on"


def _is_one_of_several() -> bool:
    """Whether this process is a rank of a distributed job. Never imports torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_world_size() > 1)
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def _much(verb: str, wanted: int, read: int) -> str:
    times, gaps = read / max(wanted, 1), size_text(read - wanted)
    return (
        f"{size_text(read)} {verb} read for {size_text(wanted)} that this rank wants, {times:.1f} times as many: it "
        f"wants columns, as of row-parallel weights, and the gaps between them ({gaps}) are read too"
    )


def read_besides(report: Report) -> str | None:
    """The message for a load that has read much in vain because a trial chose so; None: no message.

    Before the trial nobody knows that. All other loads say it as soon as they are planned.
    """
    exchange: dict[str, Any] | None = report.get("exchange")
    if exchange is None or exchange["choice"] == "on" or not exchange["reason"].startswith(_TRIED):
        return None
    wanted = report["nbytes"]
    network = report.get("network") or {}
    read = max(bytes_read(report), network.get("received_bytes", 0))
    if read < _SHARE * wanted or read - wanted < _LEAST:
        return None
    return f"{_much('were', wanted, read)}. Each rank reads for itself: {exchange['reason']}"
