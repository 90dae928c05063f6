"""One process of a start report: a rank on a CPU, or all of an engine on a GPU. `_start_report` starts it.

It ends with the process that started it, whatever happens to that one: its standard input is a pipe from there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._fetched import remove_all
from ._startup import Phases, failed_in, measure


def main() -> None:
    """Measures a start: the arguments are a file with what to start, a rank, and when the process was started."""
    specification, rank, began = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), float(sys.argv[3])
    folder = Path(specification["folder"])
    threading.Thread(target=end_with_parent, args=(folder,), daemon=True).start()
    running = os.open(folder / f"{rank}.phase", os.O_WRONLY | os.O_CREAT)

    def changed(name: str) -> None:
        os.pwrite(running, name.ljust(20).encode(), 0)

    phases = Phases(began, changed)
    measure(phases)
    try:
        found, status = _started(specification, rank, phases), 0
    except BaseException as error:
        traceback.print_exc()
        path = getattr(error, "path", None) or getattr(error, "filename", None)
        what = {"type": type(error).__name__, "message": str(error), "path": path and str(path)}
        found, status = {"error": what, "phase": failed_in(error)}, 1
    partial = folder / f"{rank}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(folder / f"{rank}.json")
    remove_all()
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


def end_with_parent(folder: Path) -> None:
    """Waits for the end of the process that started this one, and leaves nothing behind that it would have removed."""
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    remove_all()
    # Python's process that removes shared memory outlives SIGTERM, and does so when the others have ended. What else
    # outlives it is killed from another session.
    kill = f"sleep 1; kill -KILL -- -{os.getpgrp()}"
    subprocess.Popen(["/bin/sh", "-c", kill], start_new_session=True, stderr=subprocess.DEVNULL)
    os.killpg(0, signal.SIGTERM)
