"""The process that ends right before a load from the disk.

The same load can take several times as long after one process as after another. In a virtual machine whose host takes
back free memory, the first touch of a page can cost microseconds, and how many pages cost that depends on what memory
was used for just before. So every contestant of a row comes after the same predecessor:

- `mapped`: it mapped the files and touched every page. That is memory in use before: the host has it in place.
- `freed`: it took as much private memory as the checkpoint, touched it and gave it back.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .page_cache import fill, free_memory, is_full

MAPPED, FREED = "mapped", "freed"
#: The state that a predecessor leaves behind, for people.
STATES = {MAPPED: "memory in use before", FREED: "memory given back before"}


class PredecessorFailed(Exception):
    """The predecessor did not reach its end: the load after it would not be comparable. The message says why."""


def run(kind: str, paths: Iterable[Path], nbytes: int) -> dict[str, Any]:
    """Runs a predecessor to its end. What it did: `kind` and the number of `bytes` that it touched.

    Args:
        kind: `MAPPED` or `FREED`.
        paths: What the next load reads.
        nbytes: The private memory that `FREED` takes; at most two thirds of the free memory.

    Raises:
        PredecessorFailed: with the last line that the process wrote, where it failed.
    """
    command = [sys.executable, "-m", "penstock.bench.predecessor", kind, str(nbytes), *map(str, paths)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        raise PredecessorFailed(f"the process before the load: {lines[-1]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def map_and_touch(paths: list[Path]) -> int:
    """Maps files and reads one byte of every page; the number of bytes mapped."""
    if not is_full(paths):
        fill(paths)  # several times as fast as page faults that wait for the disk
    mapped = 0
    for path in paths:
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes:
                with mmap.mmap(file.fileno(), nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ) as memory:
                    memory[:: mmap.PAGESIZE]
            mapped += nbytes
    return mapped


def main() -> None:
    kind, nbytes, *paths = sys.argv[1:]
    touched = map_and_touch(list(map(Path, paths))) if kind == MAPPED else free_memory(int(nbytes))
    print(json.dumps({"kind": kind, "bytes": touched}))


if __name__ == "__main__":
    main()
