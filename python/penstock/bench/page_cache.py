"""The page cache before a load, and memory that was freed just now. Nothing of penstock is used: it is a contestant."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_CACHESTAT = 451  # Linux 6.5, the same number on every architecture


def resident_bytes(paths: Iterable[Path]) -> int | None:
    """Bytes of the files in the page cache; `None` where the kernel does not tell (before 6.5, or not our files)."""
    pages = 0
    for path in paths:
        with path.open("rb") as file:
            span = (ctypes.c_uint64 * 2)(0, 0)
            counts = (ctypes.c_uint64 * 5)()
            if _libc.syscall(_CACHESTAT, file.fileno(), span, counts, 0) != 0:
                return None
            pages += counts[0]
    return pages * os.sysconf("SC_PAGESIZE")


def is_full(paths: list[Path]) -> bool:
    """Whether the page cache is known to hold all of the files."""
    return resident_bytes(paths) == sum(-(-path.stat().st_size // mmap.PAGESIZE) * mmap.PAGESIZE for path in paths)


def evict(paths: Iterable[Path]) -> None:
    """Drops the files from the page cache. Only clean pages go, hence the sync."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def evict_all(paths: list[Path]) -> None:
    """As `evict`, again and again for a second: the kernel leaves a page that it is working on."""
    for _ in range(20):
        evict(paths)
        if not resident_bytes(paths):
            return
        time.sleep(0.05)


def evict_second_half(paths: Iterable[Path]) -> None:
    """Drops the second half of each file from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            half = path.stat().st_size // 2 // mmap.PAGESIZE * mmap.PAGESIZE
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), half, 0, os.POSIX_FADV_DONTNEED)


def fill(paths: Iterable[Path]) -> None:
    """Reads the files into the page cache."""
    buffer = bytearray(8 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def free_memory(nbytes: int) -> int:
    """Uses and frees that much memory, so that it is there: a virtual machine gives free memory back to its host.

    At most two thirds of what is free, so that it takes none from the page cache. Returns how much it was.
    """
    nbytes = min(nbytes, os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE * 2 // 3)
    if nbytes <= 0:
        return 0
    # Shared memory, which is the default, has small pages: what it leaves is not what huge pages are made of
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, nbytes)
        gc.collect()  # the view of it, or it cannot be closed
    return nbytes
