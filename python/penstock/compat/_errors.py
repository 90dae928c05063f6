"""Errors that programs written for other loaders catch as something else than programs written for safetensors do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .._errors import (
    AccessError,
    CancelledError,
    ChangedError,
    DeviceError,
    NotFoundError,
    PenstockError,
    ReadError,
    StalledError,
    TruncatedError,
    UnknownTensorError,
    UnsupportedError,
)


class MissingTensorError(UnknownTensorError, ValueError):
    """A name that the files do not contain, or that the filter leaves out. fastsafetensors has both, by the method."""


class ClosedError(PenstockError, RuntimeError):
    """A handle, buffer or loader that has been closed was asked for something."""

    kind = "Invalid"


# The streamer of Run:ai raises a ValueError whatever has failed


class ClosedStreamerError(ClosedError, ValueError):
    """A streamer outside its context was asked for something."""


class MissingFileError(NotFoundError, ValueError):
    """A file or object that is not there."""


class NoAccessError(AccessError, ValueError):
    """A file or object that may not be read."""


class CutShortError(TruncatedError, ValueError):
    """A file or object that ends before its tensors do."""


class OverwrittenError(ChangedError, ValueError):
    """A file or object that is not what it was when it was opened."""


class FailedReadError(ReadError, ValueError):
    """A read that failed."""


class NoAnswerError(StalledError, ValueError):
    """A file system or server that does not answer."""


class NotPossibleError(UnsupportedError, ValueError):
    """A dtype, a device or a kind of storage that cannot be loaded."""


class NoDeviceError(DeviceError, ValueError):
    """A device that cannot be used."""


_AS_VALUE_ERRORS: tuple[tuple[type[PenstockError], type[PenstockError]], ...] = (
    (NotFoundError, MissingFileError),
    (AccessError, NoAccessError),
    (TruncatedError, CutShortError),
    (ChangedError, OverwrittenError),
    (ReadError, FailedReadError),
    (StalledError, NoAnswerError),
    (UnknownTensorError, MissingTensorError),
    (UnsupportedError, NotPossibleError),
    (DeviceError, NoDeviceError),
    (ClosedError, ClosedStreamerError),
)


def as_value_error(error: PenstockError) -> PenstockError:
    """The same error as a ValueError, where it says something of files, names, dtypes or devices."""
    if isinstance(error, (ValueError, CancelledError)):
        return error
    for kind, made in _AS_VALUE_ERRORS:
        if isinstance(error, kind):
            found = made(error.message)
            found.__dict__.update(error.__dict__)
            found.errno, found.path, found.__traceback__ = error.errno, error.path, error.__traceback__
            return found
    return error


@contextmanager
def value_errors() -> Iterator[None]:
    """Raises errors of files, names, dtypes and devices as ValueErrors too."""
    try:
        yield
    except PenstockError as error:
        found = as_value_error(error)
        if found is error:
            raise
        raise found from error.__cause__
