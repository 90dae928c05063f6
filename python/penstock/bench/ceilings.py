"""What the machine allows: the same bytes moved with no loader in the way, by `penstock._core.ceiling`.

Each measurement runs in a process of its own. The settings are those that were the fastest on the files at hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

Settings = dict[str, Any]
MIB = 1 << 20

#: What is measured of cold files, and what of files in the page cache.
COLD, WARM = ("direct", "place", "populate"), ("copy", "fresh")
#: What is measured of a GPU.
GPU = ("host_to_device", "device_alloc")


def settings(measure: str, quick: bool = False) -> list[Settings]:
    """Settings that are tried for a ceiling: numbers of workers up to twice the cores, and sizes that matter to it."""
    cores = len(os.sched_getaffinity(0))
    workers = sorted({count for count in (1, 2, 4, 8, 16, cores, 2 * cores) if count <= max(4, 2 * cores)})
    tried: dict[str, list[Settings]] = {
        "direct": [
            *({"engine": "uring", "depth": depth} for depth in (4, 2, 8, 32)),
            {"engine": "uring", "depth": 16, "block": MIB},
            *({"threads": count} for count in (2, 4, 16)),
        ],
        "place": [{"threads": count} for count in (4, 8, 16)],
        "populate": [{"threads": count} for count in (4, 8, 16)],
        "copy": [
            *({"threads": count, "block": 2 * MIB} for count in workers),
            *({"threads": count, "block": 2 * MIB, "engine": "mapped"} for count in workers if count >= cores),
        ],
        "fresh": [
            *({"threads": count, "block": block * MIB} for count in workers if count >= cores for block in (2, 4, 32)),
            {"threads": cores, "block": 4 * MIB, "engine": "mapped"},
        ],
        "host_to_device": [
            {"threads": streams, "depth": 4, "block": block * MIB} for block in (4, 16, 64) for streams in (1, 2)
        ],
        "device_alloc": [{"block": block * MIB} for block in (2, 32, 512)],
    }
    return tried[measure][:2] if quick else tried[measure]


def measure(name: str, chosen: Settings, paths: list[Path], device: int = 0, nbytes: int = 0) -> dict[str, Any]:
    """One measurement in a fresh process: its settings, `bytes` and `seconds`.

    Raises:
        RuntimeError: with the last line that the process wrote, where it failed.
    """
    more = {"device": device, "nbytes": nbytes} if name in GPU else {}
    order = json.dumps([name, [] if name in GPU else [str(path) for path in paths], chosen | more])
    command = [sys.executable, "-m", "penstock.bench.ceilings", order]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


#: Bytes of the files of a trace that are read to measure the disk: about a second.
_ENOUGH = 1 << 30


def disk(files: list[Path]) -> float | str:
    """What the disk under these files gives past the page cache, in bytes a second; or why that is not known.

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


def text(chosen: Settings) -> str:
    """Settings as they stand in a table."""
    sizes = {name: f"{value >> 20} MiB" if name == "block" else value for name, value in chosen.items()}
    return " ".join(f"{name} {value}" for name, value in sizes.items())


def main() -> None:
    from penstock import _core

    name, paths, chosen = json.loads(sys.argv[1])
    print(json.dumps(_core.ceiling(name, paths, **chosen)))


if __name__ == "__main__":
    main()
