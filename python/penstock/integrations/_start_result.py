"""The result of a rank's start, as JSON."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .._report import Report, bytes_read
from ._startup import Phases


def summed(reports: Iterable[Report]) -> dict[str, Any] | None:
    """The totals of the loads of a rank; None if Penstock made none."""
    reports = list(reports)
    if not reports:
        return None
    materialised: Counter[str] = Counter()
    for report in reports:
        materialised.update(report.get("materialised", {}))
    return {
        "wanted_bytes": sum(report["nbytes"] for report in reports),
        "read_bytes": sum(map(bytes_read, reports)),
        "disk_cache_bytes": _from_disk_caches(reports),
        "received_bytes": sum((report.get("exchange") or {}).get("received_bytes", 0) for report in reports),
        "gap_bytes": sum(report.get("gap_bytes", 0) for report in reports),
        **{key: sum(report.get(key, 0) for report in reports) for key in ("loads", "copies", "materialised_bytes")},
        "materialised": dict(materialised),
        "given": sorted({report["given"] for report in reports if "given" in report}),
        "fallbacks": [one for report in reports for one in report.get("fallbacks", ())],
    }


def _from_disk_caches(reports: list[Report]) -> int | None:
    """The bytes that came from a disk cache; None if no load had one."""
    caches = [report["disk_cache"] for report in reports if report.get("disk_cache") is not None]
    return sum(cache.cached_bytes for cache in caches) if caches else None


def explain(phases: Phases, specification: dict[str, Any], load: dict[str, Any] | None) -> None:
    """Says of each phase that did not take place why."""
    load_format = specification["load_format"]
    records = "nothing was recorded: this engine's interface is not known, or penstock was not asked"
    if load_format != "penstock":
        records = f"load format {load_format} records nothing"
    reasons = {
        "download": "nothing to download: a local folder"
        if Path(specification["model"]).is_dir()
        else "the engine's loader downloaded nothing",
        "recording": records,
        "compilation": "a CPU: this report ends with the loading"
        if specification["device"] == "cpu"
        else "the engine compiled nothing",
    }
    if load is not None and load["loads"] == 0 and load["fallbacks"]:
        # What looked like a recording was the engine's own way of loading
        phases.seconds["reading"] = phases.seconds.get("reading", 0.0) + phases.seconds.pop("recording", 0.0)
        reasons["recording"] = f"loaded as the engine does: {load['fallbacks'][0]['reason']}"
    if load is not None and load["given"] == ["mapped"]:
        phases.seconds["reading"] = phases.seconds.get("reading", 0.0) + phases.seconds.pop("recording", 0.0)
        reasons["recording"] = "nothing was recorded: the engine copied out of mapped files itself"
    for name, reason in reasons.items():
        if name not in phases.seconds:
            phases.reasons.setdefault(name, reason)


def result(phases: Phases, load: dict[str, Any] | None, ready: float | None = None) -> dict[str, Any]:
    """The result of a rank that was ready at ``ready``, by default now."""
    took = (time.monotonic() if ready is None else ready) - phases.began
    found = phases.document()
    other = took - sum(phase["seconds"] or 0.0 for phase in found.values())
    return {"phases": found, "other_seconds": other, "ready_seconds": took, "load": load}
