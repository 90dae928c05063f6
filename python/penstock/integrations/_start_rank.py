"""One process of a start report: a rank on a CPU, or all of an engine on a GPU. `_start_report` starts it.

It ends with the process that started it, whatever happens to that one: its standard input is a pipe from there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .._report import Report
from ._startup import Phases, measure


def summed(reports: Iterable[Report]) -> dict[str, Any] | None:
    """What the loads of a rank moved; None if Penstock made none."""
    reports = list(reports)
    if not reports:
        return None
    materialised: Counter[str] = Counter()
    for report in reports:
        materialised.update(report.get("materialised", {}))
    return {
        "wanted_bytes": sum(report["nbytes"] for report in reports),
        "read_bytes": sum(way["bytes"] for report in reports for way in report.get("routes", {}).values()),
        "gap_bytes": sum(report.get("gap_bytes", 0) for report in reports),
        **{key: sum(report.get(key, 0) for report in reports) for key in ("loads", "copies", "materialised_bytes")},
        "materialised": dict(materialised),
        "fallbacks": [one for report in reports for one in report.get("fallbacks", ())],
    }


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
    for name, reason in reasons.items():
        if name not in phases.seconds:
            phases.reasons.setdefault(name, reason)


def result(phases: Phases, load: dict[str, Any] | None, ready: float | None = None) -> dict[str, Any]:
    """What a rank says of itself, which was ready at ``ready``, by default now."""
    took = (time.monotonic() if ready is None else ready) - phases.began
    other = took - sum(phases.seconds.values())
    return {"phases": phases.document(), "other_seconds": other, "ready_seconds": took, "load": load}


def main() -> None:
    """Measures a start: the arguments are a file with what to start, a rank, and when the process was started."""
    specification, rank, began = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), float(sys.argv[3])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    folder = Path(specification["folder"])
    running = os.open(folder / f"{rank}.phase", os.O_WRONLY | os.O_CREAT)

    def changed(name: str) -> None:
        os.pwrite(running, name.ljust(20).encode(), 0)

    phases = Phases(began, changed)
    measure(phases)
    try:
        found, status = _started(specification, rank, phases), 0
    except BaseException as error:
        traceback.print_exc()
        what = {"type": type(error).__name__, "message": str(error), "path": getattr(error, "path", None)}
        found, status = {"error": what, "phase": phases.failed}, 1
    partial = folder / f"{rank}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(folder / f"{rank}.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not by way of what an engine does at exit: other ranks may be waited for there


def _started(specification: dict[str, Any], rank: int, phases: Phases) -> dict[str, Any]:
    start: Callable[[dict[str, Any], int, Phases], dict[str, Any]]
    with phases.phase("import", since=phases.began):
        if specification["engine"] == "sglang":
            from ._sglang_start import start
        elif specification["device"] == "cpu":
            from ._vllm_start import start
        else:
            from ._vllm_serve import start
    return start(specification, rank, phases)


def _end_with_parent() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
