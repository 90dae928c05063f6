"""The contents of files, hashed and compared with the digests that are known of them."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from . import _core
from ._contents import pieces, received
from ._errors import (
    AccessError,
    DigestError,
    InternalError,
    LimitError,
    NotFoundError,
    PenstockError,
    ReadError,
    StalledError,
)
from ._event_words import Measured, by_source
from ._events import NOTHING, Seen
from ._hub import Expected, expected_digest
from ._late_imports import importing
from ._paths import is_web
from ._patience import asking, patiently, stalled
from ._progress import INTERVAL, Meter, Progress
from ._running import under_way

_CHUNK = 4 << 20
"""Bytes per read. hashlib lets other threads run meanwhile; much larger chunks would leave the processor's cache."""

_MOST_THREADS = 8
"""A core with SHA instructions hashes about 1 GB/s (1.07 measured): more of them would wait for the disk."""

_WINDOW = 128 << 20
"""Bytes of one file on a server that are read ahead of the hash."""

_BLOCK = 1 << 20
"""Bytes of a block of the disk cache."""

_BLOCKS = 16
"""Blocks that are compared at once."""

_PATIENCE = 2.0
"""Seconds that an interrupted check waits for reads that hang before it leaves them behind."""


class Digest(NamedTuple):
    """The verdict on one file."""

    path: str
    algorithm: str
    """"sha256" or "git-sha1": see `Expected`."""
    digest: str | None
    """The hash of the content, in hexadecimal; None if it could not be read."""
    expected: Expected | None
    """The expected hash, and its source; None if there is none."""
    error: PenstockError | None
    """The damage, or the reason that the file could not be read."""


def digests(
    paths: Sequence[str],
    listed: Mapping[str, Expected] | None = None,
    progress: Progress = False,
    stall_timeout: float | None = None,
    core: _core.Checkpoint | None = None,
    seen: Seen = NOTHING,
) -> list[Digest]:
    """Hashes files, several at once, and compares each with what is known of it.

    Args:
        paths: The files.
        listed: What they are to hash to, by path; for others the Hub cache they lie in is asked.
        progress: As in `Checkpoint.load`.
        stall_timeout: Seconds in which the file system answers nothing before it counts as hung; None: as in `open`.
        core: The checkpoint whose files are the first ones, in its order. Those on servers are read through it.
        seen: What operators see of it.

    Returns:
        One per path, in their order.

    Raises:
        StalledError: the file system hangs; names a file that is waited for.
    """
    with under_way(f"a verification of {len(paths)} files"):
        return _Hashing(paths, listed or {}, core, _core.stall_timeout(stall_timeout)).run(progress, seen)


def raise_for(found: Sequence[Digest]) -> None:
    """Raises for the files that are damaged, or else for one that could not be read; returns if there are none."""
    errors = [digest.error for digest in found if digest.error is not None]
    if not any(isinstance(error, DigestError) for error in errors):
        if errors:
            raise errors[0]
        return
    problems = [str(error) for error in errors]
    path = next(error.path for error in errors if isinstance(error, DigestError))
    message = "; ".join(problems)
    error = DigestError(message if len(problems) == 1 else f"{len(problems)} files: {message}", path=path)
    error.problems = problems
    raise error


class _Hashing:
    def __init__(
        self, paths: Sequence[str], listed: Mapping[str, Expected], core: _core.Checkpoint | None, stall: float
    ) -> None:
        self._paths = paths
        self._listed = listed
        self._core = core
        self._stall = stall
        self._done: dict[int, Digest] = {}
        # Numbers of the files that are being read, the longest at work first
        self._at_work: dict[int, None] = {}
        self._failure: BaseException | None = None
        # Bytes read of each file that was opened. No lock: each worker writes to entries of its own, one operation each
        self._read: dict[int, int] = {}
        #: Parts of copies that were compared. A lost count costs nothing
        self._copies = 0
        self._stop = threading.Event()
        self._finished = threading.Event()

    def run(self, progress: Progress, seen: Seen = NOTHING) -> list[Digest]:
        stall = self._stall
        sizes = patiently(lambda: [self._size(i) for i in range(len(self._paths))], stall) if self._paths else []
        # The largest first: otherwise it may be alone at the end
        self._left = sorted(range(len(sizes)), key=lambda i: sizes[i])
        count = min(len(sizes), len(os.sched_getaffinity(0)), _MOST_THREADS)
        # Daemons: a read that hangs in the kernel must not keep the process from ending
        threads = [threading.Thread(target=self._work, name=f"penstock-hash-{i}", daemon=True) for i in range(count)]
        patience = _PATIENCE
        with Meter(progress, "verify", seen) as meter:
            try:
                for thread in threads:
                    self._start(thread, alone=thread is threads[0])
                before, moved = self._moved(), time.monotonic()
                while len(self._done) < len(self._paths) and self._failure is None:
                    self._finished.wait(min(INTERVAL, stall))
                    self._finished.clear()
                    meter.update(self._bytes(), sum(sizes))
                    if (now := self._moved()) != before:
                        before, moved = now, time.monotonic()
                    elif time.monotonic() - moved >= stall:
                        patience = 0.0  # they have been waited for
                        waited_for = next(iter(list(self._at_work)), 0)
                        raise stalled(stall, self._paths[waited_for])
            finally:
                self._stop.set()
                until = time.monotonic() + patience
                for thread in threads:
                    if thread.ident is not None:
                        thread.join(max(0.0, until - time.monotonic()))
            meter.update(self._bytes(), sum(sizes), final=True)
        if seen is not NOTHING:
            seen.count(self._measured())
        if self._failure is not None:
            raise self._failure
        return [self._done[i] for i in range(len(self._paths))]

    def _measured(self) -> Measured:
        distant = sum(nbytes for i, nbytes in self._read.items() if is_web(self._paths[i]))
        nbytes = self._bytes()
        return Measured(nbytes=nbytes, sources=by_source(buffered=nbytes - distant, network=distant))

    def _start(self, thread: threading.Thread, alone: bool) -> None:
        try:
            thread.start()
        except RuntimeError as error:
            if alone:  # fewer do the work too; none cannot
                raise LimitError(
                    f"cannot start the thread that reads the files: {error}", path=self._paths[0]
                ) from error

    def _moved(self) -> tuple[int, int, int, int]:
        """Changes with every answer of the file system."""
        return self._bytes(), len(self._read), len(self._done), self._copies

    def _bytes(self) -> int:
        return sum(list(self._read.values()))

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    i = self._left.pop()
                except IndexError:
                    return
                self._at_work[i] = None
                digest = self._examine(i)
                del self._at_work[i]
                self._done[i] = digest
                self._finished.set()
        except BaseException as failure:
            self._failure = failure
            self._finished.set()

    def _examine(self, i: int) -> Digest:
        path = self._paths[i]
        expected = self._listed.get(path) or (None if is_web(path) else expected_digest(path))
        algorithm = expected.algorithm if expected else "sha256"
        try:
            digest = self._hash(i, algorithm)
        except StalledError:
            raise
        except PenstockError as error:
            return Digest(path, algorithm, None, expected, error)
        except OSError as error:
            return Digest(path, algorithm, None, expected, _unreadable(path, error))
        damage = None
        if expected is not None and digest != expected.digest:
            message = f"{path}: {algorithm} is {digest} and should be {expected.digest}: the file is damaged"
            if is_web(path):
                message += ", or was on the way here"
            elif expected.source != "list":
                # Downloading again would find the blob there and keep it
                message += f", remove {os.path.realpath(path)} and download it again"
            damage = DigestError(message, path=path)
        return Digest(path, algorithm, digest, expected, damage)

    def _hash(self, i: int, algorithm: str) -> str:
        digest = None
        for size, chunk in self._received(i) if is_web(self._paths[i]) else self._read_file(i):
            if digest is None and algorithm == "sha256":
                digest = hashlib.sha256()
            elif digest is None:
                digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
            digest.update(chunk)
            self._read[i] = self._read.get(i, 0) + len(chunk)
            if self._stop.is_set():
                break
        if digest is None:
            raise InternalError("no byte of it was read", path=self._paths[i])
        return digest.hexdigest()

    def _read_file(self, i: int) -> Iterator[tuple[int, memoryview]]:
        """The size of a file, and its bytes; nothing of an empty one, once."""
        with open(self._paths[i], "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            chunk = memoryview(bytearray(_CHUNK))
            yield size, chunk[:0]
            while count := file.readinto(chunk):
                yield size, chunk[:count]

    def _received(self, i: int) -> Iterator[tuple[int, memoryview]]:
        """The same of a file on a server: its header, and then its tensors, between which the format has no gaps."""
        core = self._core
        if core is None:
            raise InternalError("a file on a server that no checkpoint has", path=self._paths[i])
        size = _size_of(core, i)
        self._check_copy(core, i, size)
        header = core.header_bytes(i)
        yield size, memoryview(header)
        for chunk in received(core, list(pieces(core, range(*core.file_tensors(i)))), _WINDOW, self._stall):
            yield size, memoryview(b"") if chunk is None else chunk

    def _check_copy(self, core: _core.Checkpoint, i: int, size: int) -> None:
        """Compares what the disk cache has of a file with its checksums: bad blocks are fetched again.

        Raises:
            DigestError: there are bad blocks in a cache that can only be read.
        """
        path = self._paths[i]
        for first in range(0, -(-size // _BLOCK), _BLOCKS):
            bad, stay = core.check_copy(i, first, first + _BLOCKS)
            self._copies += 1
            for begin, end in bad:
                message = f"{path}: bytes {begin} to {end} in the disk cache are not those that came"
                if stay:
                    raise DigestError(f"{message}, and this user may only read it", path=path)
                with importing():
                    import logging
                logging.getLogger("penstock").warning("%s: they are fetched again", message)
            if self._stop.is_set():
                return

    def _size(self, i: int) -> int:
        path = self._paths[i]
        if is_web(path) and self._core is not None:
            return _size_of(self._core, i)
        asking(path)
        try:
            return Path(path).stat().st_size
        except OSError:
            return 0  # the thread that is to read it will say why


def _size_of(core: _core.Checkpoint, file: int) -> int:
    """The size of a file of the checkpoint: its last tensor ends there."""
    first, last = core.file_tensors(file)
    return core.info(last - 1)[5] if last > first else core.data_start(file)


def _unreadable(path: str, error: OSError) -> PenstockError:
    message = f"{path}: cannot be read: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        return NotFoundError(message, path=path, errno=error.errno)
    kind = AccessError if isinstance(error, PermissionError) else ReadError
    return kind(message, path=path, errno=error.errno)
