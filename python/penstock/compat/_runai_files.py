"""Byte ranges of any files through the interface of the Run:ai model streamer."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from .. import _core
from .._checkpoint import Checkpoint
from .._errors import InvalidError
from .._paths import source_path
from .._tls import warn_of_unchecked
from ._errors import value_errors
from ._runai_settings import storage_for
from ._runai_stream import Streams


class FileChunks:
    """A file, and the ranges of its bytes that are wanted.

    Args:
        id: A number that no other of a call has.
        path: The file, or its address.
        offsets: The first byte of each range. Or, as before 0.17, that of the first one: the others follow each other.
        sizes: The bytes of each range.
        offset, chunks: Their names before 0.17.
    """

    def __init__(
        self,
        id: int,
        path: str,
        offsets: Sequence[int] | int | None = None,
        sizes: Sequence[int] | None = None,
        *,
        offset: int | None = None,
        chunks: Sequence[int] | None = None,
    ) -> None:
        begins, lengths = offset if offsets is None else offsets, chunks if sizes is None else sizes
        if begins is None or lengths is None:
            raise InvalidError("FileChunks: give the offsets and the sizes of its ranges")
        if isinstance(begins, int):
            begins = _one_after_the_other(begins, lengths)
        if len(begins) != len(lengths):
            raise InvalidError(f"FileChunks: {len(begins)} offsets and {len(lengths)} sizes: give as many of each")
        self.id, self.path, self.offsets, self.sizes = id, path, list(begins), list(lengths)

    @staticmethod
    def contiguous(id: int, path: str, offset: int, sizes: Sequence[int]) -> FileChunks:
        """Ranges that follow each other, the first from ``offset``."""
        return FileChunks(id, path, offset, sizes)

    @property
    def offset(self) -> int:
        """The first byte of the first range; 0 without one."""
        return self.offsets[0] if self.offsets else 0

    @property
    def chunks(self) -> list[int]:
        """The bytes of each range."""
        return self.sizes

    def total_size(self) -> int:
        """Bytes of all ranges."""
        return sum(self.sizes)

    def max_chunk_size(self) -> int:
        """Bytes of the longest range."""
        return max(self.sizes)

    def __repr__(self) -> str:
        return f"FileChunks(id={self.id!r}, path={self.path!r}, {len(self.sizes)} ranges, {self.total_size()} bytes)"


def _one_after_the_other(first: int, sizes: Sequence[int]) -> list[int]:
    begins = []
    for size in sizes:
        begins.append(first)
        first += size
    return begins


class _Part(NamedTuple):
    """A range that somebody wants, in what is read for it."""

    id: int
    number: int
    """Its number among the ranges of its `FileChunks`."""
    begin: int
    """Its first byte, counted from that of what is read."""
    end: int


class _Read(NamedTuple):
    """A range that is read, and what is wanted of it."""

    begin: int
    end: int
    parts: list[_Part]


class _Plan(NamedTuple):
    """The reads that a call takes."""

    files: dict[str, list[_Read]]
    """The reads of each file."""
    empty: list[_Part]
    """Ranges without a byte, for which nothing is read."""


def _reads(ranges: list[tuple[int, int, int, int]]) -> list[_Read]:
    """The ranges of one file that are read: ascending, each byte once.

    Args:
        ranges: First byte, one past the last, the id of the `FileChunks`, and the number of the range in it.
    """
    found: list[_Read] = []
    for begin, end, id, number in sorted(ranges):
        last = found[-1] if found else None
        if last is not None and begin < last.end:  # they overlap: both are cut out of one read
            found[-1] = last = last._replace(end=max(last.end, end))
        else:
            last = _Read(begin, end, [])
            found.append(last)
        last.parts.append(_Part(id, number, begin - last.begin, end - last.begin))
    return found


def _plan(requests: Sequence[FileChunks]) -> _Plan:
    """The reads for these requests."""
    by_path: dict[str, list[tuple[int, int, int, int]]] = {}
    ids: set[int] = set()
    empty: list[_Part] = []
    for request in requests:
        if request.id in ids:
            raise InvalidError(f"two FileChunks have the id {request.id!r}: give each its own", path=request.path)
        ids.add(request.id)
        path = source_path(request.path, "path")
        for number, (begin, size) in enumerate(zip(request.offsets, request.sizes, strict=True)):
            if begin < 0 or size < 0:
                raise InvalidError(f"range {number} begins at {begin} and has {size} bytes", path=path)
            if size:
                by_path.setdefault(path, []).append((begin, begin + size, request.id, number))
            else:
                empty.append(_Part(request.id, number, 0, 0))
    return _Plan({path: _reads(ranges) for path, ranges in by_path.items()}, empty)


class _Ranges:
    """Streams of byte ranges: what both classes do."""

    def __init__(self) -> None:
        self._streams = Streams()
        self._wanted: list[_Read] = []
        self._empty: list[_Part] = []
        self._device: Any = "cpu"

    def _enter(self) -> None:
        self._streams.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._streams.leave()

    def _stream(
        self,
        requests: Sequence[FileChunks],
        credentials: Any,
        device: Any,
        is_distributed: bool,
        memory_limit: int | None = None,
    ) -> None:
        plan = _plan(requests)
        paths = list(plan.files)

        def opening() -> tuple[Checkpoint, None]:
            files = [(path, [(read.begin, read.end) for read in reads]) for path, reads in plan.files.items()]
            core = _core.Checkpoint.of_ranges(files, None, storage_for(paths, credentials))
            warn_of_unchecked()
            return Checkpoint(core), None

        if paths:
            self._streams.begin(paths, opening, device, is_distributed, memory_limit)
        else:
            self._streams.nothing()
        self._wanted = [read for reads in plan.files.values() for read in reads]
        self._empty, self._device = plan.empty, "cpu" if device is None else device

    def get_chunks(self) -> Generator[tuple[int, int, Any], None, None]:
        """Yields (id, number, bytes) of each range, as they come: a uint8 tensor of shape (1, size), the caller's own.

        Raises:
            ValueError: a read failed, or the context ended.
        """
        import torch

        with value_errors():
            self._streams.check()
        empty, self._empty = self._empty, []
        for part in empty:
            yield part.id, part.number, torch.empty((1, 0), dtype=torch.uint8, device=self._device)
        for name, tensor in self._streams.pairs():
            read = self._wanted[int(name)]
            if len(read.parts) == 1:
                yield read.parts[0].id, read.parts[0].number, tensor.view(1, -1)
            else:
                for part in read.parts:  # each gets its own memory
                    yield part.id, part.number, tensor[part.begin : part.end].clone().view(1, -1)
            del tensor  # or this frame would keep it until the next one is there


class FileStreamer(_Ranges):
    """Reads byte ranges of files and objects of any content, and yields each as it comes.

    Use it as a context manager: `stream_files`, then `get_chunks`.
    """

    def __enter__(self) -> FileStreamer:
        self._enter()
        return self

    def stream_files(
        self,
        file_stream_requests: Sequence[FileChunks],
        credentials: Any = None,
        device: Any = "cpu",
        memory_limit: int | None = None,
        owned: bool = True,
    ) -> None:
        """Asks for the ranges.

        Args:
            file_stream_requests: The files, each with an ``id`` of its own.
            credentials: `S3Credentials`, or None.
            device: Where the bytes go.
            memory_limit: As RUNAI_STREAMER_MEMORY_LIMIT; None takes that.
            owned: What is yielded is the caller's own either way.

        Raises:
            ValueError: no such file, a range beyond its end, or arguments that make no sense.
        """
        with value_errors():
            self._stream(file_stream_requests, credentials, device, False, memory_limit)


class DistributedStreamer(_Ranges):
    """A `FileStreamer` of ranks that read for each other: each gets every range."""

    @property
    def is_distributed(self) -> bool:
        """True if the ranks read for each other in the stream that was asked for last."""
        return self._streams.together

    def __enter__(self) -> DistributedStreamer:
        self._enter()
        return self

    def stream_files(
        self,
        file_stream_requests: Sequence[FileChunks],
        credentials: Any,
        device: Any,
        is_distributed: bool,
        owned: bool = True,
        discover_ranks: bool = True,
    ) -> None:
        """Asks for the ranges. ``is_distributed``: the ranks of torch.distributed read for each other, if it has been
        initialized; all make the same call. ``discover_ranks`` has no effect. The rest is as in `FileStreamer`.

        Raises:
            ValueError: as `FileStreamer.stream_files`.
        """
        with value_errors():
            self._stream(file_stream_requests, credentials, device, is_distributed)
