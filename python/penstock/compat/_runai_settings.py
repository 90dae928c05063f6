"""Environment variables and credentials of the Run:ai model streamer, as settings of Penstock.

`MOOT` and `WITHOUT_EFFECT` name the variables that have no counterpart here, each with its reason.
"""

from __future__ import annotations

import os
import re
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from .._choices import Storage
from .._errors import InvalidError
from ._instanttensor_backends import Backend, io_for
from ._process_group import ranks_of
from ._reading import MOST_EXTENT, MOST_READS, reading, staging_within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._process_group import Ranks

SCHEMES = ("s3", "gs", "az")
"""The schemes of addresses that the streamer knows."""

_P = "RUNAI_STREAMER_"
MEMORY_LIMIT, CUDA_ALIGNMENT = f"{_P}MEMORY_LIMIT", f"{_P}CUDA_ALIGNMENT"
_CONCURRENCY, _CHUNK = f"{_P}CONCURRENCY", f"{_P}CHUNK_BYTESIZE"
_FILE_CHUNK, _DEPTH, _STRATEGY = f"{_P}FS_CHUNK_BYTESIZE", f"{_P}FS_QUEUE_DEPTH", f"{_P}FS_STRATEGY"
_OBJECT_CONCURRENCY, _CONNECTIONS = f"{_P}OBJ_CONCURRENCY", f"{_P}S3_MAX_CONNECTIONS"
_VIRTUAL, _UNSIGNED, _ENDPOINT = f"{_P}S3_USE_VIRTUAL_ADDRESSING", f"{_P}S3_UNSIGNED", f"{_P}S3_ENDPOINT"
_GCS_FILE, _GCS_ANONYMOUS = f"{_P}GCS_CREDENTIAL_FILE", f"{_P}GCS_USE_ANONYMOUS_CREDENTIALS"
_DIST, _GLOBAL, _TIMEOUT = f"{_P}DIST", f"{_P}DIST_GLOBAL", f"{_P}DIST_TIMEOUT"
_EMULATOR, _GOOGLE_FILE = "CLOUD_STORAGE_EMULATOR_ENDPOINT", "GOOGLE_APPLICATION_CREDENTIALS"

USED = (
    MEMORY_LIMIT, _CONCURRENCY, _CHUNK, _FILE_CHUNK, _DEPTH, _STRATEGY, _OBJECT_CONCURRENCY, _CONNECTIONS, _VIRTUAL,
    _UNSIGNED, _ENDPOINT, _GCS_FILE, _GCS_ANONYMOUS, _DIST, _GLOBAL, _TIMEOUT,
)  # fmt: skip
"""The variables that count."""
MOOT = {
    f"{_P}NO_BOTO3_SESSION": "credentials are those that the tools of AWS take, with boto3 or without it",
    f"{_P}PROCESS_GROUP_SIZE": "threads adapt to the processors that are free",
    CUDA_ALIGNMENT: "each tensor has memory of its own, which is aligned",
    f"{_P}DIST_BUFFER_MIN_BYTESIZE": "ranks send each other what they read, without a buffer for broadcasts",
}
"""Variables without an effect that nobody misses: there is no warning for them."""
WITHOUT_EFFECT = {
    f"{_P}RING_BUFFERS": f"there is no ring of buffers; {MEMORY_LIMIT} bounds what is read ahead",
    f"{_P}MAX_PADS_PER_BUFFER": "there is no ring of buffers",
    f"{_P}PARTITION_POLICY": "the bytes of a load are divided evenly among the ranks",
    f"{_P}FS_MAX_ENGINES": f"one load has one engine; {_CONCURRENCY} sets its threads",
    f"{_P}FS_REGISTER_BUFFERS": "Penstock decides about registered buffers",
    f"{_P}FS_NO_REGISTER_BUFFERS": "Penstock decides about registered buffers",
    f"{_P}INFLIGHT_WINDOW_MARGIN": f"{MEMORY_LIMIT} bounds what is read ahead",
    f"{_P}PINNED_MEMORY_MODE": "memory for GPUs is pinned where it pays; options of `penstock.open(...).stream` set it",
    f"{_P}DEVICE_SLAB_BYTES": "tensors are placed on the GPU directly",
    f"{_P}S3_MAX_INFLIGHT_MIB": f"{MEMORY_LIMIT} bounds what is read ahead",
    f"{_P}S3_TARGET_GBPS": "connections adapt; PENSTOCK_STORAGE_BANDWIDTH is a limit",
    f"{_P}S3_TIMEOUT": "PENSTOCK_STALL_TIMEOUT says how long a server may be silent",
    f"{_P}S3_REQUEST_TIMEOUT_MS": "PENSTOCK_STALL_TIMEOUT says how long a server may be silent",
    f"{_P}S3_LOW_SPEED_LIMIT": "PENSTOCK_STALL_TIMEOUT says how long a server may be silent",
    f"{_P}S3_TRACE": "the trace of a load is `Options.trace` (PENSTOCK_TRACE)",
    f"{_P}GCS_USE_GRPC": "Google Cloud Storage is asked over HTTP; gRPC is not supported",
    f"{_P}EXPERIMENTAL_AZURE_CACHE_ENABLED": "PENSTOCK_STORAGE_DISK_CACHE names a folder that keeps what was received",
    f"{_P}EXPERIMENTAL_AZURE_CACHE_LIB": "PENSTOCK_STORAGE_DISK_CACHE names a folder that keeps what was received",
    f"{_P}LOG_LEVEL": 'the logger is called "penstock"',
    f"{_P}LOG_TO_STDERR": 'the logger is called "penstock"',
    f"{_P}LOG_FILE": 'the logger is called "penstock"',
}
"""Variables without an effect, and the reason: each that is set gets a RuntimeWarning, once in a process."""

_STRATEGIES = {
    "io_uring_direct": Backend.URING,
    "io_uring_buffered": Backend.URING_BUFFERED,
    "libaio_direct": Backend.AIO,
    "sync_buffered": Backend.AIO_BUFFERED,
}
"""How files are read: the values of RUNAI_STREAMER_FS_STRATEGY in 0.17.1."""
_LEAST_OF_FILES, _LEAST_OF_OBJECTS = 2 << 20, 5 << 20
"""Run:ai raises a smaller RUNAI_STREAMER_CHUNK_BYTESIZE to these (docs/src/env-vars.md at f73a19a)."""
_warned: set[str] = set()


class S3Credentials:
    """Keys for S3 that a program gives; None leaves one to the environment."""

    def __init__(
        self,
        access_key_id: str | None = None,
        secret_access_key: str | None = None,
        session_token: str | None = None,
        region_name: str | None = None,
        endpoint: str | None = None,
    ) -> None:
        self.access_key_id, self.secret_access_key, self.session_token = access_key_id, secret_access_key, session_token
        self.region_name, self.endpoint = region_name, endpoint

    def __repr__(self) -> str:
        return f"S3Credentials(region_name={self.region_name!r}, endpoint={self.endpoint!r})"  # and no secrets


def scheme_of(path: str) -> str | None:
    """The scheme of an address in a bucket or container; None for a path of this machine."""
    scheme = path.partition("://")[0]
    return scheme if scheme in SCHEMES and path.startswith(f"{scheme}://") else None


def warn_of_variables() -> None:
    """A RuntimeWarning for each variable of the streamer that is set and has no effect."""
    for name in sorted(os.environ):
        if not name.startswith(_P) or name in USED or name in MOOT or name in _warned:
            continue
        _warned.add(name)
        why = WITHOUT_EFFECT.get(name, "Penstock does not know this variable")
        warnings.warn(f"{name} has no effect: {why}", RuntimeWarning, stacklevel=4)


def _whole(name: str, least: int, most: int | None = None) -> int | None:
    """The whole number in a variable; None if it is not set.

    Raises:
        InvalidError: it is something else, or out of its bounds.
    """
    text = os.environ.get(name)
    if text is None:
        return None
    value = int(text) if re.fullmatch(r"\s*[+-]?\d+\s*", text) else None
    if value is None or value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise InvalidError(f"{name}={text!r}: give a whole number of at least {least}{upper}")
    return value


def _flag(name: str) -> bool | None:
    """The value of a variable that is 0 or 1; None if it is not set."""
    text = os.environ.get(name)
    value = None if text is None else {"0": False, "false": False, "1": True, "true": True}.get(text.lower())
    if text is not None and value is None:
        raise InvalidError(f"{name}={text!r}: give 0 or 1")
    return value


# Buckets


def storage_for(paths: Sequence[str], credentials: Any = None) -> Storage | None:
    """How the server of these addresses is asked; None for files.

    Raises:
        InvalidError: a variable makes no sense.
    """
    scheme = next(filter(None, map(scheme_of, paths)), None)
    if scheme is None:
        return None
    most = _whole(_OBJECT_CONCURRENCY, 1)
    chunk = _whole(_CHUNK, 0, MOST_EXTENT)
    found: dict[str, Any] = {
        "connections": _whole(_CONCURRENCY, 1) if most is None else most,
        "request_bytes": None if chunk is None else max(chunk, _LEAST_OF_OBJECTS),
    }
    if scheme == "s3":
        found |= _of_s3(credentials)
    elif scheme == "gs":
        found |= _of_google()
    return cast("Storage", {name: value for name, value in found.items() if value is not None}) or None


def _of_s3(credentials: Any) -> dict[str, Any]:
    virtual, connections = _flag(_VIRTUAL), _whole(_CONNECTIONS, 1)
    found: dict[str, Any] = {
        "addressing": None if virtual is None else "virtual" if virtual else "path",
        "anonymous": _flag(_UNSIGNED) or None,
        "ca": os.environ.get("AWS_CA_BUNDLE") or None,
        "endpoint": None if os.environ.get("AWS_ENDPOINT_URL") else os.environ.get(_ENDPOINT) or None,
    }
    if connections is not None:
        found["connections"] = connections
    if credentials is not None:
        names = ("access_key_id", "secret_access_key", "session_token", "endpoint")
        given = {name: getattr(credentials, name, None) for name in names}
        given["region"] = getattr(credentials, "region_name", None)
        found |= {name: value for name, value in given.items() if value is not None}
    return found


def _of_google() -> dict[str, Any]:
    file, known = os.environ.get(_GCS_FILE), os.environ.get(_GOOGLE_FILE)
    if file and known and file != known:
        text = f"{_GCS_FILE} and {_GOOGLE_FILE} name two files: Penstock takes the second; give one"
        raise InvalidError(text, path=file)
    if file:
        os.environ[_GOOGLE_FILE] = file  # where the core, and Google's own tools, look for it
    emulator = os.environ.get(_EMULATOR)
    return {"endpoint": emulator or None, "anonymous": _flag(_GCS_ANONYMOUS) or bool(emulator) or None}


# Reading


class Limit(NamedTuple):
    """The bound of the memory for what is read ahead of the consumer."""

    nbytes: int | None
    """Bytes; 0 for one tensor at a time; None: none was set."""
    everything: bool = False
    """True: there is no bound."""

    @staticmethod
    def of(given: int | None) -> Limit:
        """The bound that a program gives, or else the variable: -1 is for none."""
        value = _whole(MEMORY_LIMIT, -1) if given is None else given
        return Limit(None, everything=True) if value == -1 else Limit(value)

    def shared(self, ranks: int) -> Limit:
        """The part of one of several ranks: the variable is for all of a node."""
        return self if not self.nbytes else Limit(max(1, self.nbytes // ranks))


def options_for(paths: Sequence[str], on_cpu: bool, nbytes: int, ranks: int, limit: Limit) -> dict[str, Any]:
    """Keywords of `Options` for what the variables say.

    Args:
        paths: The files.
        on_cpu: True if tensors go to the memory of the machine. It is bounded then by what is read ahead.
        nbytes: Bytes of all tensors.
        ranks: How many processes read together.

    Raises:
        InvalidError: a variable makes no sense.
        UnsupportedError: none of the strategies can be used.
    """
    local, limit = [path for path in paths if scheme_of(path) is None], limit.shared(ranks)
    settings = reading(depth=_whole(_DEPTH, 1, MOST_READS))
    if local:
        general = _whole(_CHUNK, 0, MOST_EXTENT)
        own = _whole(_FILE_CHUNK, 0, MOST_EXTENT)
        chunk = general if own is None else own
        extent = None if chunk is None else max(chunk, _LEAST_OF_FILES)
        settings |= reading(extent=extent, threads=_whole(_CONCURRENCY, 1))
        if (io := io_for(_strategies(), local, mapped=False)) is not None:
            settings["io"] = io
    if limit.everything and on_cpu:
        settings["window"] = max(1, nbytes)
    elif limit.nbytes is not None:
        most = max(1, limit.nbytes)
        settings |= {"window": most} if on_cpu else {}
        settings |= staging_within(most, settings.get("extent"))
    return settings | _of_ranks(ranks)


def _strategies() -> list[Backend]:
    text = os.environ.get(_STRATEGY)
    names = [] if text is None else [name.strip() for name in text.split(",") if name.strip()]
    if text is not None and (not names or any(name not in _STRATEGIES for name in names)):
        raise InvalidError(f"{_STRATEGY}={text!r}: give one or more of {', '.join(_STRATEGIES)}, between commas")
    return [_STRATEGIES[name] for name in names]


# Ranks


def ranks_for(is_distributed: bool, on_cpu: bool) -> Ranks | None:
    """The ranks that read for each other: those of torch.distributed, if it has been initialized; None: each alone.

    As Run:ai's own: RUNAI_STREAMER_DIST=auto is for GPUs whose ranks have the backend nccl, 1 for all others too.

    Raises:
        InvalidError: RUNAI_STREAMER_DIST makes no sense.
    """
    if not is_distributed:
        return None
    how = os.environ.get(_DIST, "auto")
    if how not in ("0", "1", "auto"):
        raise InvalidError(f"{_DIST}={how!r}: give 0, 1 or auto")
    import torch

    if how == "0" or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    if how == "auto" and (on_cpu or "nccl" not in torch.distributed.get_backend()):
        return None
    return ranks_of(torch.distributed.group.WORLD, "is_distributed")


def _of_ranks(ranks: int) -> dict[str, Any]:
    if ranks == 1:
        return {}
    timeout = _whole(_TIMEOUT, 1)
    waits = {} if timeout is None else {"join_timeout": float(timeout)}
    return {"scope": "world" if _flag(_GLOBAL) else "node", **waits}
