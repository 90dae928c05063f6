"""The page cache and the disk as the kernel counts them, without penstock.

What a test has brought into the page cache is locked there until it ends: the kernel gives up pages whenever it likes,
on some virtual machines all the time. `given_up` tells which pages went nevertheless.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import resource
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from ordeal import NotQuiet

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_CACHESTAT, _MADV_DONTFORK = 451, 10


def resident(path: str | os.PathLike[str]) -> npt.NDArray[np.bool_]:
    """Which pages of a file are in the page cache. mincore tells the truth to who owns the file or may write to it."""
    size = Path(path).stat().st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        flags = np.zeros(-(-size // PAGE), dtype=np.uint8)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(flags.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore", path)
    return (flags & 1).astype(bool)


def resident_bytes(paths: Iterable[str | os.PathLike[str]]) -> int:
    """Bytes of whole pages in the page cache."""
    return sum(int(resident(path).sum()) * PAGE for path in paths)


def evict(path: str | os.PathLike[str], start: int = 0) -> None:
    """Drops a file's pages from `start` on, repeatedly: pages that somebody maps, or writes back just now, stay.

    Where they do for two seconds it is an error, and where no file's pages can be dropped the test is skipped.
    """
    _let_go(path)
    if _drop(path, start):
        _watched[str(path)] = _given_up(path)
        return
    with tempfile.NamedTemporaryFile(dir=Path(path).parent) as other:
        other.write(b"x" * (1 << 20))
        other.flush()
        assert not _drop(other.name, 0), f"{path}: pages stay in the page cache; is a mapping of it alive?"
    pytest.skip(f"{path}: this kernel or file system keeps its pages")


def _drop(path: str | os.PathLike[str], start: int) -> bool:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        for attempt in range(20):
            if attempt == 1:
                gc.collect()  # `pytest.raises(...) as info` makes a cycle, and what the test had loaded is in it
            os.posix_fadvise(file.fileno(), start, 0, os.POSIX_FADV_DONTNEED)
            # A folio that reaches over the start is kept whole; the largest is 2 MiB
            if not resident(path)[-(-start // PAGE) + (512 if start else 0) :].any():
                return True
            time.sleep(0.01 * attempt)
    return False


def warm(path: str | os.PathLike[str]) -> None:
    """Reads a file into the page cache.

    Without read-ahead: it marks pages, and whoever reads such a page later sets off the next window, up to 8 MiB on
    some disks. After `evict` of what follows, that would bring in pages which nobody asked for.
    """
    _read(path)
    hold(path)


def _read(path: str | os.PathLike[str], size: int | None = None) -> None:
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        buffer = bytearray(1 << 20)
        while (size is None or file.tell() < size) and file.readinto(buffer):
            pass


# --- Keeping it so ---

#: Locked mappings by path: their addresses and sizes.
_held: dict[str, tuple[int, int]] = {}
#: Files that this test has brought into a state, with the pages that had been given up before.
_watched: dict[str, int] = {}


def hold(path: str | os.PathLike[str], size: int | None = None) -> None:
    """Locks a file, or its first bytes, in the page cache until the test ends, where this user may lock so much.

    Raises:
        NotQuiet: They are not all there.
    """
    _let_go(path)
    size = Path(path).stat().st_size if size is None else size
    if not size:
        return
    # By hand: `mmap.mmap` keeps a descriptor of the file, which tests would find
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        how = (ctypes.c_int(mmap.PROT_READ), ctypes.c_int(mmap.MAP_SHARED), ctypes.c_int(fd), ctypes.c_long(0))
        address = _libc.mmap(None, ctypes.c_size_t(size), *how)
    finally:
        os.close(fd)
    memory = ctypes.c_void_p(address), ctypes.c_size_t(size)
    # A forked child must not keep the pages mapped
    _libc.madvise(*memory, _MADV_DONTFORK)
    _libc.madvise(*memory, mmap.MADV_RANDOM)
    if _libc.mlock(*memory):
        _libc.munmap(*memory)
    else:
        _held[str(path)] = (address, size)
    _watched[str(path)] = _given_up(path)
    if not resident(path)[: size // PAGE].all():
        raise NotQuiet(f"pages of {Path(path).name} do not stay in the page cache")


def _let_go(path: str | os.PathLike[str]) -> None:
    if held := _held.pop(str(path), None):
        _libc.munmap(ctypes.c_void_p(held[0]), ctypes.c_size_t(held[1]))


def let_go() -> None:
    """Unlocks everything: at the end of a test."""
    for path in list(_held):
        _let_go(path)
    _watched.clear()


def given_up() -> int:
    """Pages of this test's files that the kernel gave up since they were brought into their state."""
    found = 0
    for path, before in _watched.items():
        with contextlib.suppress(OSError):
            found += max(0, _given_up(path) - before)
    return found


def _given_up(path: str | os.PathLike[str]) -> int:
    """Pages of a file that the kernel has reclaimed and nobody has read or dropped since; 0 before Linux 6.5."""
    every, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        failed = _libc.syscall(ctypes.c_long(_CACHESTAT), fd, every, found, 0)
    finally:
        os.close(fd)
    return 0 if failed else int(found[3])


# --- States ---


STATES = ("warm", "cold", "half")


def put(paths: Iterable[str | os.PathLike[str]], state: str) -> None:
    """Brings files into a state: all of them in the page cache, nothing, or the first half of each."""
    for path in paths:
        if state != "warm":
            evict(path)
        if state == "warm":
            warm(path)
        if state == "half":
            half = Path(path).stat().st_size // 2 // PAGE * PAGE
            _read(path)
            evict(path, half)
            hold(path, half)


def near(paths: Iterable[str | os.PathLike[str]], state: str) -> None:
    """Brings files near a state, as far as others let it, and looks at nothing."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if state != "cold":
            _read(path, None if state == "warm" else Path(path).stat().st_size // 2)


def disk_bytes_of_process() -> int:
    """Bytes that this process, its threads and its O_DIRECT reads have caused to be read from block devices."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise AssertionError("/proc/self/io has no read_bytes")


class FromDisk:
    """What this process reads from block devices within a ``with`` block."""

    nbytes = 0
    #: Faults for which the kernel read pages of a mapped file.
    faults = 0

    def __enter__(self) -> FromDisk:
        self._before = disk_bytes_of_process(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return self

    def __exit__(self, *_error: object) -> None:
        nbytes, faults = disk_bytes_of_process(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        self.nbytes, self.faults = nbytes - self._before[0], faults - self._before[1]

    def check(self, nbytes: int, *, mapped: bool) -> None:
        """Asserts that it was so many bytes.

        Raises:
            NotQuiet: a page of the program was read, which the kernel had given up. Reads of files make no faults;
                with ``mapped`` bytes that is not known.
        """
        if self.nbytes != nbytes and self.faults and not mapped:
            raise NotQuiet(f"{self.faults} pages of the program were given up and came from the disk")
        assert self.nbytes == nbytes


def disk_bytes_of_device(path: str | os.PathLike[str]) -> int:
    """Bytes that anybody has read from the block device below a file."""
    device = Path(path).stat().st_dev
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    if not stat.exists():
        pytest.skip(f"{path} is not on one block device")
    return int(stat.read_text().split()[2]) * 512
