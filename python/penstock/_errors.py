"""Errors: one family, split by kind, each also a subclass of the exception people already catch for it.

The core raises what `from_core` returns. Every error carries ``kind``, and where they are known ``path``, ``range``,
``errno``, ``tensor``, ``expected``, ``found``, ``status`` and ``request_id``. Its text says what happened, in which
file and bytes, why, and where it helps what to do next. All of them survive pickling, so that they cross process
boundaries (data loaders, launchers) unchanged.
"""

from __future__ import annotations

from typing import Any

try:
    from safetensors import SafetensorError as SafetensorError
except ImportError:  # safetensors is not a dependency: without it nobody can be catching its error

    class SafetensorError(Exception):  # type: ignore[no-redef]
        """Stands in for ``safetensors.SafetensorError`` where safetensors is not installed."""


class PenstockError(SafetensorError):
    """Any failure of penstock.

    Attributes:
        kind: What kind of failure, such as ``"Truncated"``; one per subclass.
        path: The file concerned, or None.
        range: (first, past-the-last) byte within ``path``, or None.
        errno: The operating system's error number where it was the cause, or None.
        tensor: The name of the tensor concerned, or None. Of several names that are unknown, the first.
        expected: What should have been there: a number in the unit of the message (a size, an offset, dimensions), or
            a text (bounds, a file's name, a file's state); or None.
        found: What was there instead, or None.
        status: The status (HTTP) of the server's answer that was the cause, or None.
        request_id: The server's name for that request, which its owner can look up, or None.
    """

    kind: str = "Internal"
    path: str | None
    range: tuple[int, int] | None
    errno: int | None
    tensor: str | None
    expected: int | str | None
    found: int | str | None
    status: int | None
    request_id: str | None

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        range: tuple[int, int] | None = None,
        errno: int | None = None,
        tensor: str | None = None,
        expected: int | str | None = None,
        found: int | str | None = None,
        status: int | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.range = range
        self.errno = errno
        self.tensor = tensor
        self.expected = expected
        self.found = found
        self.status = status
        self.request_id = request_id

    def __str__(self) -> str:
        where = ""
        if self.path is not None and self.path not in self.message:
            where += f"{self.path}: "
        if self.range is not None:
            where += f"bytes {self.range[0]}..{self.range[1]}: "
        return where + self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # `OSError` keeps `errno` outside `__dict__`, and `ImportError` keeps `path` there.
        return _rebuild, (type(self), self.message), {**self.__dict__, "errno": self.errno, "path": self.path}


def _rebuild(cls: type[PenstockError], message: str) -> PenstockError:
    return cls(message)


class NotFoundError(PenstockError, FileNotFoundError):
    """The file, directory or index does not exist."""

    kind = "NotFound"


class AccessError(PenstockError, PermissionError):
    """The operating system, or a server, refused access."""

    kind = "Permission"


class NotACheckpointError(PenstockError, ValueError):
    """The file is not a shard file: a directory, a FIFO, a Git LFS pointer, an unfinished download."""

    kind = "NotACheckpoint"


class HeaderError(PenstockError, ValueError):
    """A shard file's header is malformed."""

    kind = "Header"


class IndexFileError(PenstockError, ValueError):
    """The index file is malformed, or it disagrees with the shard files."""

    kind = "Index"


class TruncatedError(PenstockError, EOFError):
    """The file is shorter than its header says, or ended in the middle of a read."""

    kind = "Truncated"


class DigestError(PenstockError, ValueError):
    """The content of a file does not match its digest.

    Attributes:
        problems: One line per damaged file.
    """

    kind = "Digest"
    problems: list[str]


class ChangedError(PenstockError, RuntimeError):
    """The file changed between opening the checkpoint and the end of the load."""

    kind = "Changed"


class UnknownTensorError(PenstockError, KeyError):
    """A name that the checkpoint does not contain."""

    kind = "UnknownTensor"


class SliceError(PenstockError, ValueError):
    """A slice outside its tensor, or one that does not fall on whole bytes."""

    kind = "Slice"


class InvalidError(PenstockError, ValueError):
    """Invalid options or arguments, alone or together."""

    kind = "Invalid"


class UnsupportedError(PenstockError, NotImplementedError):
    """This build, machine or framework cannot do that."""

    kind = "Unsupported"


class MismatchError(PenstockError, ValueError):
    """The destinations of `load_into` do not match the checkpoint. ``problems`` lists everything that is wrong."""

    kind = "Mismatch"


class ReadError(PenstockError, OSError):
    """The operating system reported an I/O error."""

    kind = "Io"


class WriteError(PenstockError, OSError):
    """A file could not be written: an I/O error, or a tensor that cannot be packed."""

    kind = "Write"


class NoSpaceError(WriteError):
    """A file does not fit: the disk is full, or a quota or a limit forbids more."""

    kind = "NoSpace"


class StalledError(PenstockError, TimeoutError):
    """Nothing moved for longer than the stall timeout."""

    kind = "Timeout"


class CancelledError(PenstockError):
    """The load was cancelled."""

    kind = "Cancelled"


class PeerError(PenstockError, ConnectionError):
    """Another rank of the load has failed, died, or does not answer. The load has failed on all ranks.

    Attributes:
        rank: The rank whose failure it is, or None.
        host: That rank's host, or None.
        why: What happened to it, without its number and host: the error that it tells of, or how it was found to be
            gone.
        since: How many seconds ago it was heard of last when it was given up; None where it, or another rank, has said
            what happened, and where it never came.
    """

    kind = "Peer"
    rank: int | None
    host: str | None
    why: str
    since: float | None

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        why: str | None = None,
        since: float | None = None,
        **more: Any,
    ) -> None:
        super().__init__(message, **more)
        self.rank = rank
        self.host = host
        self.why = message if why is None else why
        self.since = since


class PlanMismatchError(PenstockError, ValueError):
    """Ranks that are to load together do not mean the same. Nothing was read.

    Attributes:
        ranks: The ranks that differ from the others.
    """

    kind = "PlanMismatch"
    ranks: list[int]

    def __init__(self, message: str, *, ranks: list[int] | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.ranks = ranks or []


class DeviceError(PenstockError, RuntimeError):
    """The GPU or its driver reported an error, or there is no GPU."""

    kind = "Device"


class OutOfMemoryError(PenstockError, MemoryError):
    """There is not enough memory on the host or the device."""

    kind = "OutOfMemory"


class LimitError(PenstockError, OSError):
    """A limit of the system: descriptors, threads, mappings, locked memory; disk space for `penstock synth`."""

    kind = "Limit"


class BusyError(PenstockError, RuntimeError):
    """`penstock.quiesce` found something under way.

    Attributes:
        busy: What is under way, one line each.
    """

    kind = "Busy"
    busy: list[str]

    def __init__(self, message: str, *, busy: list[str] | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.busy = busy or []


class ForkedError(PenstockError, RuntimeError):
    """The process forked: a job or handle of the parent was used in the child."""

    kind = "Forked"


class EngineError(PenstockError, RuntimeError):
    """A serving engine failed to start.

    Attributes:
        rank: The number of the rank that failed first.
    """

    kind = "Engine"
    rank: int | None

    def __init__(self, message: str, *, rank: int | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.rank = rank


class InternalError(PenstockError, RuntimeError):
    """A bug in penstock."""

    kind = "Internal"


# Of no kind of their own: errors that programs written for safetensors catch as something else besides. What
# safetensors raises for the same mistake changes from function to function; each class here is all of it.


class ArgumentTypeError(InvalidError, TypeError, AttributeError):
    """An argument of the wrong type, such as a name that is a number."""


class SchemeError(InvalidError, FileNotFoundError):
    """A path that begins with a scheme, such as ``s3://``, where paths of mounted file systems are taken."""


class SharedMemoryError(InvalidError, RuntimeError):
    """Tensors share memory and cannot be saved one by one, or none of them covers all of it."""


class NoValuesError(InvalidError, NotImplementedError):
    """A tensor on the meta device has no values to save."""


class MissingFrameworkError(UnsupportedError, ModuleNotFoundError):
    """The framework asked for is not installed."""


class MissingDtypeError(UnsupportedError, AttributeError, TypeError, KeyError):
    """The framework, or the format, has no such dtype."""


class SliceIndexError(SliceError, IndexError):
    """An index outside the tensor, or with more dimensions than it has."""


class SliceTypeError(SliceError, TypeError):
    """An index of the wrong type."""


_BY_KIND: dict[str, type[PenstockError]] = {
    cls.kind: cls
    for cls in (
        NotFoundError,
        AccessError,
        NotACheckpointError,
        HeaderError,
        IndexFileError,
        TruncatedError,
        DigestError,
        ChangedError,
        UnknownTensorError,
        SliceError,
        InvalidError,
        UnsupportedError,
        MismatchError,
        ReadError,
        WriteError,
        NoSpaceError,
        StalledError,
        CancelledError,
        PeerError,
        PlanMismatchError,
        DeviceError,
        OutOfMemoryError,
        LimitError,
        BusyError,
        ForkedError,
        EngineError,
        InternalError,
    )
}


def from_core(
    kind: str,
    message: str,
    path: str | None = None,
    range: tuple[int, int] | None = None,
    errno: int | None = None,
    tensor: str | None = None,
    values: tuple[int | str, int | str] | None = None,
    status: int | None = None,
    request_id: str | None = None,
    peer: tuple[int, str, str | None, float | None] | None = None,
) -> PenstockError:
    """The exception for an error of the core, whose ``ErrorKind`` variant is called ``kind``.

    ``values`` is what was expected and what was found.
    """
    expected, found = values or (None, None)
    cls = _BY_KIND.get(kind, PenstockError)
    error = cls(message, path=path, range=range, errno=errno, tensor=tensor, expected=expected, found=found)
    error.status, error.request_id = status, request_id
    if isinstance(error, PeerError) and peer is not None:
        error.rank, error.host, why, error.since = peer
        error.why = error.why if why is None else why
    error.kind = kind  # the enum is non-exhaustive: a kind added there is still an error here
    return error


def raise_if_forked(
    owner: int, what: str, instead: str = "open the checkpoint and start the load in the child instead"
) -> None:
    """Raises `ForkedError` if ``owner`` is not this process: ``what`` belongs to the process that made it."""
    import os

    if os.getpid() != owner:
        raise ForkedError(
            f"this {what} was made by process {owner} and cannot be used in its forked child {os.getpid()}: "
            f"threads do not survive a fork; {instead}"
        )
