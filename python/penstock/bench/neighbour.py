"""A neighbour that keeps memory or the disk busy while others load."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

#: Far more than any processor's cache, and little beside a checkpoint.
_BLOCK = 256 << 20
_READ = 1 << 20


class NeighbourEnded(Exception):
    """The neighbour is not there any more, so that nothing of this scenario can be told; the message says more."""


class Neighbour:
    """A process that hammers `what` ("memory", or "disk": the file `path`) while the context is open.

    Raises:
        NeighbourEnded: It did not start, or was gone when the context ended.
    """

    def __init__(self, what: str, path: Path) -> None:
        command = [sys.executable, "-m", "penstock.bench.neighbour", what, str(path)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Neighbour:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise NeighbourEnded(f"the neighbour ended with status {self._process.wait()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = self._process.poll()
        self._process.kill()
        self._process.communicate()
        if status is not None and kind is None:
            raise NeighbourEnded(f"the neighbour ended with status {status} while others were loading")


def hammer_memory(stop: threading.Event | None = None) -> None:
    """Copies one block to another, over and over, on one core."""
    import numpy as np

    source, target = np.ones(_BLOCK, dtype=np.uint8), np.zeros(_BLOCK, dtype=np.uint8)
    while stop is None or not stop.is_set():
        np.copyto(target, source)


def hammer_disk(path: Path, stop: threading.Event | None = None) -> None:
    """Reads a file past the page cache, over and over, two reads at a time."""

    def read() -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        with mmap.mmap(-1, _READ) as buffer:
            at, end = 0, os.fstat(descriptor).st_size
            while stop is None or not stop.is_set():
                os.preadv(descriptor, [buffer], at)
                at = at + _READ if at + _READ < end else 0
        os.close(descriptor)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    what, path = sys.argv[1:]
    print("running", flush=True)
    if what == "memory":
        hammer_memory()
    else:
        hammer_disk(Path(path))


if __name__ == "__main__":
    main()
