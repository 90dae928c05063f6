"""The fixed sets of values that options and arguments take, as types: a type checker and an editor know them.

Each list stands once in Python, here. `tests/test_api_types.py` compares them with what the core takes.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict, get_args

from ._errors import ArgumentTypeError, InvalidError

Exchange = Literal["auto", "on", "off"]
Scope = Literal["world", "node"]
"""`Options.scope`: which ranks read for each other."""
Io = Literal["auto", "mapped", "buffered", "uring_buffered", "direct", "uring", "threads"]
"""`Options.io`: the way of reading."""

Cache = Literal["auto", "keep", "bypass"]
"""`Options.cache`: what stays in the page cache."""

Framework = Literal[
    "pt", "torch", "pytorch", "np", "numpy", "jax", "flax", "tf", "tensorflow", "paddle", "mlx", "dlpack"
]
"""``framework=``: whose tensors are made."""

Order = Literal["file", "layer"]
"""``order=`` of reading and of saving."""
ORDERS: tuple[Order, ...] = get_args(Order)
Sequencing = Literal["file", "layer", "asked"]
"""The order of a load in the core: a stream of named tensors hands out in the order asked for."""

Layout = Literal["aligned", "compact"]
"""``layout=`` of a saved file."""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

Backend = Literal["mmap", "pread"]
"""``backend=`` of the functions that safetensors has too."""

NameMatch = Literal["glob", "exact", "regex"]
"""``tensor_name_match_mode=`` of the InstantTensor interface."""

FillState = Literal["running", "finished", "stopped"]
"""`CacheFill.state`."""

CacheState = Literal["running", "finished"]
"""`DiskCache.state`."""


class Storage(TypedDict, total=False):
    """``storage=``: how servers are asked. Files on disks need none of it.

    The settings hold for an open and for all loads of its checkpoint. An environment variable, ``PENSTOCK_STORAGE_``
    and the name in capitals, sets another default for a whole process; a setting in code wins over it. None leaves a
    setting out.
    """

    # settings: begin (python tools/option_docs.py)
    connections: int | None
    """The most connections of one load (default 256). It begins with 16, and has more while more bring more."""

    request_bytes: int | None
    """The most bytes of one request, 65,536 (64 KiB) to 1,073,741,824 (1 GiB); default 16 MiB."""

    ca: str | os.PathLike[str] | None
    """A file (PEM) with the certificates to trust, or a folder of such files, instead of the system's: those of
    authorities, or that of a server, byte for byte."""

    tls_verify: bool | None
    """False: the certificates of servers are not checked. There is a warning for each host."""

    endpoint: str | None
    """The server, such as "http://127.0.0.1:9000", instead of AWS, Google or Azure."""

    region: str | None
    """S3: the region of the bucket. A wrong one is corrected if the server names the right one."""

    addressing: Literal["path", "virtual"] | None
    """S3: where the bucket stands in an address. Default: "virtual" for AWS, "path" for an ``endpoint``."""

    anonymous: bool | None
    """S3, Google Cloud Storage, Azure: True sends requests without a signature or token, for public buckets."""

    requester_pays: bool | None
    """S3: True says that the requester pays."""

    access_key_id: str | None
    """S3: the key to sign with, with its secret. Default: what the tools of AWS would take."""

    secret_access_key: str | None
    """S3: the secret of ``access_key_id``."""

    session_token: str | None
    """S3: the token of a temporary ``access_key_id``."""

    profile: str | None
    """S3: a profile of ~/.aws/credentials and ~/.aws/config."""

    account_name: str | None
    """Azure: the storage account. Default: what the tools of Azure would take."""

    account_key: str | None
    """Azure: a key of the account, to sign with."""

    sas_token: str | None
    """Azure: a shared access signature, instead of a key."""

    credentials: Callable[[], Mapping[str, object]] | None
    """A callable that gives the credentials: for S3 ``access_key_id``, ``secret_access_key`` and perhaps
    ``session_token``, for Google Cloud Storage, Azure and ``https://`` servers ``token``. ``expires_at`` (seconds since
    the epoch, or a datetime with a time zone) says when they become invalid. It is called when they are needed, again
    before they expire, and when a server refuses them, on a thread of its own."""

    proxy: str | None
    """"http://host:port", perhaps with "user:password@" before the host: all servers are reached through it. "" is for
    none. Default: what HTTPS_PROXY, http_proxy, ALL_PROXY and NO_PROXY say; never for this machine."""

    bandwidth: int | str | None
    """The most bytes that one load receives in a second, over all its connections: a number, or a size such as "500MB";
    65,536 (64 KiB) or more. Default: no limit."""

    interfaces: Sequence[str] | str | None
    """Network interfaces, such as ["eth0", "eth1"]: the connections that receive tensors are bound to them in turn."""

    patience: float | None
    """Seconds for which a read that fails is asked for again, at least. Default: 8 times, about 9 s; where the server
    says that it has too much to do (429, 503, SlowDown), as long as ``stall_timeout``, at least."""

    connections_per_node: int | None
    """The most connections of all processes of this node together that set it. Each that loads has its share."""

    node_folder: str | os.PathLike[str] | None
    """The folder with the locks of ``connections_per_node``: processes with the same one share a budget. Default: a
    folder of this user in /dev/shm, or in /tmp."""

    disk_cache: str | os.PathLike[str] | None
    """A folder on a local disk that keeps what loads receive from servers: the next start, and other processes of this
    node, take it from there."""

    disk_cache_size: int | str | None
    """The most bytes of the disk cache: a number, or a size such as "500GB". Default: no limit."""

    disk_cache_free: int | str | None
    """Bytes of the file system that the disk cache leaves free. Default: 10% of it, 20 GiB at most."""

    disk_cache_shared: bool | None
    """True: the group of the folder may write to it, so that several users share it."""

    disk_cache_verify: bool | None
    """True: what comes from the disk cache is compared with its checksums, and bad bytes are fetched again."""

    disk_cache_dropped: Literal["fetch", "forget"] | None
    """Bytes that came faster than the disk took them: "fetch" asks for them again after the load (default), "forget"
    leaves them to the next load."""

    mirrors: Sequence[str] | str | None
    """Addresses of other nodes that run ``penstock serve`` on their disk cache, such as ["http://node-a:8080"]: what
    they have of an object, in its very version, comes from them."""

    mirror_token: str | None
    """The bearer token that all ``mirrors`` want. Over https only, except to this machine."""

    offline: bool | None
    """True: no server is asked. What the disk cache has, in the version that it had last, is loaded; all else is an
    error."""
    # settings: end


def check_variant(variant: object) -> None:
    """Raises InvalidError if this cannot be the variant of a file's name: `fp16` in `model.fp16.safetensors`."""
    if variant is None:
        return
    if not isinstance(variant, str):
        raise ArgumentTypeError(f'variant={variant!r}: give a part of a name, such as "fp16", or leave it out')
    if not variant or variant.strip(".") != variant or any(c in variant for c in "/\0\\*?"):
        raise InvalidError(f'variant={variant!r}: give a part of a name, such as "fp16" of model.fp16.safetensors')


def check_choice(argument: str, value: object, values: tuple[str, ...]) -> None:
    """Raises InvalidError if ``value`` is none of the values that this argument takes."""
    if value not in values:
        raise InvalidError(f"{argument}={value!r}: give one of {', '.join(values)}")
