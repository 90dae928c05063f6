"""Rates of the machine: the same bytes moved with no loader in the way, by `penstock._core.ceiling`.

Each measurement runs in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

Settings = dict[str, Any]

#: Measures of a GPU. They need no file.
GPU = ("host_to_device", "device_alloc")


def measure(name: str, chosen: Settings, paths: list[Path], device: int = 0, nbytes: int = 0) -> dict[str, Any]:
    """One measurement in a fresh process: its settings, `bytes` and `seconds`.

    Raises:
        RuntimeError: with the last line that the process wrote, where it failed.
    """
    more = {"device": device, "nbytes": nbytes} if name in GPU else {}
    order = json.dumps([name, [] if name in GPU else [str(path) for path in paths], chosen | more])
    command = [sys.executable, "-m", "penstock._ceiling", order]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


#: Bytes of the files of a trace that are read to measure the disk: about a second.
_ENOUGH = 1 << 30


def disk(files: list[Path]) -> float | str:
    """The rate of the disk under these files past the page cache, in bytes a second; or why it is not known.

    Reads whole files, the smallest first, until it is enough.
    """
    chosen, nbytes = [], 0
    try:
        for size, path in sorted((path.stat().st_size, path) for path in files):
            if nbytes < _ENOUGH and size:
                chosen.append(path)
                nbytes += size
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    if not chosen:
        return "the trace names no file"
    rates, refused = [], ""
    for tried in ({"engine": "uring", "depth": 4}, {"threads": 4}):
        try:
            found = measure("direct", tried, chosen)
            rates.append(found["bytes"] / found["seconds"])
        except RuntimeError as error:
            refused = str(error)
    return max(rates) if rates else refused


def main() -> None:
    from penstock import _core

    name, paths, chosen = json.loads(sys.argv[1])
    print(json.dumps(_core.ceiling(name, paths, **chosen)))


if __name__ == "__main__":
    main()
