"""The extension module: thin bindings of the Rust core. Not public; `penstock` re-exports what is.

Errors of the core are raised as what `penstock._errors.from_core(kind, message, path, range, errno)` returns.
"""

import os
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, final

from penstock._choices import Cache, CacheState, Exchange, FillState, Io, Layout, Order, Scope, Sequencing, Storage

__all__ = [
    "Bucket",
    "CacheFill",
    "CacheFolder",
    "Checkpoint",
    "DiskCache",
    "FirstTouch",
    "HubLayout",
    "Leased",
    "Load",
    "Lookout",
    "Mesh",
    "Options",
    "Pass",
    "Pull",
    "Reader",
    "Save",
    "Seat",
    "Server",
    "Shares",
    "Standing",
    "View",
    "__version__",
    "asks_for_versions",
    "authorities",
    "bound",
    "built",
    "ceiling",
    "certificates",
    "contents",
    "evict",
    "exiting",
    "gpus",
    "head",
    "look",
    "names_in",
    "option_table",
    "is_resident",
    "leave_cache_to_parent",
    "missing_where_mappable",
    "pack_wants",
    "probe",
    "proxy",
    "quiesce",
    "release_staging",
    "residency",
    "shards",
    "stall_timeout",
    "stop_fills",
    "stop_reading_ahead",
    "schemes",
    "storage_settings",
    "storage_table",
    "traffic",
    "unchecked_hosts",
    "under_way",
    "unwritable",
    "warm",
]

__version__: Final[str]

@final
class Options:
    """Options of one load: see `penstock.Options`. An unknown keyword is a ValueError that lists the known ones."""

    # options: begin (python tools/option_docs.py)
    def __new__(
        cls,
        *,
        cache: Cache | None = None,
        copy: bool | None = None,
        window: int | str | None = None,
        staging: int | str | None = None,
        threads: int | None = None,
        stall_timeout: float | None = None,
        io: Io | None = None,
        extent: int | str | None = None,
        depth: int | None = None,
        gap: int | str | None = None,
        page_timing: bool | None = None,
        pinning_threads: int | None = None,
        exchange: Exchange | None = None,
        scope: Scope | None = None,
        shared_slabs: bool | None = None,
        peer_timeout: float | None = None,
        join_timeout: float | None = None,
        ports: str | None = None,
        bind: str | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> Options: ...
    @property
    def cache(self) -> Cache: ...
    @property
    def copy(self) -> bool | None: ...
    @property
    def window(self) -> int: ...
    @property
    def staging(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def stall_timeout(self) -> float: ...
    @property
    def io(self) -> Io: ...
    @property
    def extent(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def gap(self) -> int | Literal["auto"]: ...
    @property
    def page_timing(self) -> bool | None: ...
    @property
    def pinning_threads(self) -> int: ...
    @property
    def exchange(self) -> Exchange: ...
    @property
    def scope(self) -> Scope: ...
    @property
    def shared_slabs(self) -> bool: ...
    @property
    def peer_timeout(self) -> float: ...
    @property
    def join_timeout(self) -> float: ...
    @property
    def ports(self) -> str: ...
    @property
    def bind(self) -> str: ...
    @property
    def trace(self) -> str: ...
    # options: end
    def __reduce__(self) -> tuple[Callable[[], Options], tuple[()]]: ...
    @property
    def _least_gap(self) -> int: ...
    @staticmethod
    def names() -> list[str]:
        """The everyday ones first."""
    @staticmethod
    def groups() -> dict[str, list[str]]:
        """Names by group: "everyday", "advanced"."""

@final
class Checkpoint:
    """A validated checkpoint. Tensors are numbered in file order."""

    @staticmethod
    def open(
        sources: Sequence[str],
        stall_timeout: float | None = None,
        storage: Storage | None = None,
        bearer: tuple[str, str] | None = None,
        hub: HubLayout | None = None,
        variant: str | None = None,
        leftover: bool = True,
        names: Sequence[str] | None = None,
    ) -> Checkpoint:
        """Ctrl-C raises. stall_timeout: as `stall_timeout` takes it. storage: as `penstock.Storage`.

        bearer: ("https://host", token). The token is sent to this server and to no other, also after a redirect.
        hub: where the disk cache brings files that it has whole.
        variant: whose files are meant in a folder. leftover: an index may be passed over if none of its files is there.
        names: what the folder holds, where its server does not list it.
        """
    @staticmethod
    def to_open(place: str, names: Sequence[str], variant: str | None = None) -> list[int]:
        """Positions of the names in one place that `open` chooses: that of an index, or shards in natural order."""
    @staticmethod
    def from_bytes(data: bytes) -> Checkpoint:
        """The checkpoint of a whole file's content, for its header; there is no file to load from."""
    @staticmethod
    def of_ranges(
        files: Sequence[tuple[str, Sequence[tuple[int, int]]]],
        stall_timeout: float | None = None,
        storage: Storage | None = None,
    ) -> Checkpoint:
        """The checkpoint of some bytes of files of any content: a tensor of U8 for each range (first byte, past the
        last). Its name is its number, over all files. The ranges of a file ascend. The other arguments: as `open`."""
    def __len__(self) -> int: ...
    def __contains__(self, name: object, /) -> bool: ...
    def keys(self) -> list[str]: ...
    def index(self, name: str) -> int: ...
    def info(self, index: int) -> tuple[str, str, tuple[int, ...], int, int, int]:
        """(name, dtype, shape, file number, begin, end) with offsets counted from the start of the file."""
    def matching(self, patterns: Sequence[str]) -> list[int]: ...
    def in_order(self, order: Sequencing) -> list[int]:
        """Numbers of all tensors in the order in which a load of all of them reads."""
    def by_dtype(self, wants: Sequence[int] | None = None) -> dict[str, list[int]]:
        """Positions in `wants` (tensor numbers; None: all) by dtype name, each list ascending."""
    def files(self) -> list[str]:
        """Paths as `os.fsdecode` gives them."""
    def path(self, file: int) -> str:
        """One of `files`."""
    def metadata(self) -> dict[str, str] | None: ...
    def file_metadata(self, file: int) -> dict[str, str] | None: ...
    def file_tensors(self, file: int) -> tuple[int, int]: ...
    def data_start(self, file: int) -> int: ...
    def identity(self) -> tuple[int, bool]:
        """A number that tells the versions of the files apart, and whether it does so on every machine."""
    def versions(self) -> list[str]:
        """For each file a text that tells its versions apart: on every machine for objects, on this one for files."""
    def samples(self) -> list[int]:
        """For each file a number of what some of its pages hold, or of its store's validator. Blocks."""
    def fingerprint(self) -> int:
        """Tells checkpoints apart: tensors, their places, and the sizes of the files."""
    def nbytes(self) -> int: ...
    def warnings(self) -> list[str]: ...
    def fill(self) -> CacheFill | None:
        """Fills the page cache with all of it in the background, as a load does that went past it."""
    def look(self, file: int, times: int = 1) -> dict[str, Any]:
        """As the function `look`, of a file on a server."""
    def header_bytes(self, file: int) -> bytes:
        """The header of a file on a server, read once more: all bytes before its tensors."""
    def check_copy(self, file: int, first: int, past: int) -> tuple[list[tuple[int, int]], bool]:
        """Compares these blocks, of 1 MiB, of the disk cache's copy of a file with their checksums.

        Returns the ranges of those that are bad, and whether they stay so because the cache can only be read. Otherwise
        they are fetched again when they are wanted.
        """

    def verify_unchanged(self) -> None: ...

@final
class CacheFill:
    """The page cache being filled after a load: see `penstock.CacheFill`."""

    @property
    def state(self) -> FillState: ...
    @property
    def reason(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def stop(self) -> None: ...

@final
class DiskCache:
    """The work of the disk cache for a load: see `penstock.DiskCache`."""

    @property
    def state(self) -> CacheState: ...
    @property
    def reason(self) -> str: ...
    @property
    def cached_bytes(self) -> int: ...
    @property
    def network_bytes(self) -> int: ...
    @property
    def written_bytes(self) -> int: ...
    @property
    def dropped_bytes(self) -> int: ...
    @property
    def fetched_again_bytes(self) -> int: ...
    @property
    def cpu_seconds(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def __add__(self, other: DiskCache, /) -> DiskCache: ...
    def __radd__(self, other: DiskCache, /) -> DiskCache: ...

def leave_cache_to_parent() -> None:
    """In a forked child: the parent's part of the disk cache is the parent's alone."""

@final
class CacheFolder:
    """The folder of the disk cache that ``storage`` names: for commands.

    An entry has "id", "address", "version", "size", "there" (bytes that are there), "disk" (bytes that are free on the
    disk when it is removed), "linked" (the Hub's cache has its file too, so none are), "used" (Unix seconds of the last
    use), "open" (somebody has it open) and "path".
    """

    def __new__(cls, storage: Storage | None = None) -> CacheFolder: ...
    def access(self) -> tuple[bool, bool]:
        """Whether this process may write to it, and whether nobody else than this user and root may."""

    def path(self) -> str: ...
    def entries(self) -> list[dict[str, Any]]:
        """The entries, least recently used first."""

    def room(self) -> tuple[int, int, int, int | None]:
        """Bytes of the file system, those that are free, those that stay free, and the most bytes of the cache."""

    def prune(
        self,
        *,
        to_size: int | None = None,
        older_than: float | None = None,
        prefix: str | None = None,
        dry_run: bool = False,
    ) -> list[list[dict[str, Any]]]:
        """Removes the entries that were not used for ``older_than`` seconds, that are too many for ``to_size`` bytes,
        or whose address begins with ``prefix``; without one of these all. Returns the entries that went, those that
        stay because they are open, and the others."""

    def verify(self, id: str, first: int, past: int, forget: bool) -> tuple[int, list[tuple[int, int]]] | None:
        """Compares these blocks of an entry with their CRC32C: how many bytes were compared, and the ranges of bad
        blocks; None if the entry is gone. ``forget``: bad blocks are missing from now on."""

@final
class HubLayout:
    """The place of a commit of a repository in huggingface_hub's cache.

    asked: when the Hub said that ``revision`` is this commit (Unix seconds). files: the address of each, its path in
    the repository, and its sha256 or git's sha1.
    """

    def __new__(
        cls,
        cache: str,
        repository: str,
        commit: str,
        *,
        revision: str | None,
        asked: float,
        symlinks: bool,
        files: Sequence[tuple[str, str, str]],
    ) -> HubLayout: ...

@final
class Pull:
    """Copies of whole objects that a thread makes: into the disk cache, or into files of a folder."""

    @staticmethod
    def start(
        files: Sequence[tuple[str, str | None, tuple[str, int, int | None] | None]],
        options: Options,
        storage: Storage | None = None,
        bearer: tuple[str, str] | None = None,
        hub: HubLayout | None = None,
    ) -> Pull:
        """Starts it. A file is its address, the path that it goes to (None: only into the disk cache), and version,
        size and CRC32C of the file that is there. With a CRC32C of None the file is not read to compare it."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def progress(self) -> tuple[int, int, int]:
        """Bytes that are there, bytes in all, bytes that servers sent."""

    def files(self) -> list[tuple[int, str | None, bool, bool, int | None]]:
        """For each file: size, strong version, whether it was there before, whether it is there now, CRC32C if it was
        written."""

    def uncached(self) -> str:
        """The reason for which the disk cache lacks something that files have; otherwise empty."""

    def close(self) -> None: ...

def stop_fills(reason: str = "it was told to stop", patience: float = 1.0) -> None:
    """Ends every fill of this process and waits until their thread has ended, at most `patience` seconds."""

@final
class Server:
    """An HTTP server of a folder (`penstock serve`), on threads of its own, until `stop`."""

    @staticmethod
    def start(
        folder: str,
        host: str,
        port: int,
        *,
        token: str | None,
        strangers: bool,
        tls: tuple[str, str] | None,
        access_log: bool,
        sends_files: bool,
        connections: int,
    ) -> Server:
        """Starts it. `strangers`: other machines may read without a token. `tls`: certificate chain and key (PEM)."""
    @property
    def address(self) -> tuple[str, int]: ...
    def stop(self, patience: float = 0.5) -> None:
        """Ends it, and waits for its threads, at most `patience` seconds."""

def look(address: str, times: int = 1, storage: Storage | None = None) -> dict[str, Any] | None:
    """Requests for the first byte of the object at this address, `times` at most, and their times (`penstock doctor`).

    None if no store has such addresses. "servers": those that were asked, each redirects to the next, with "server",
    "addresses", "lookup_seconds", "connect_seconds", "tls_seconds", "first_byte_seconds", "status" (None: not reached,
    or there is none). "round_trips": seconds from each request to its answer, of the last server. "connections" to it.
    "size" and "validator" ("strong ETag", "weak ETag", "date", "size") of the object. "error": an exception, or None.
    Blocks.
    """

def names_in(
    place: str, stall_timeout: float | None = None, storage: Storage | None = None, *, folders: bool = False
) -> list[str]:
    """The names of what lies directly in a folder, or under an address. InvalidError: it is a file.

    folders: Those of folders in a store are among them, and end with a slash.
    """

def contents(
    files: Sequence[str],
    most: int,
    stall_timeout: float | None = None,
    storage: Storage | None = None,
    bearer: tuple[str, str] | None = None,
    hub: HubLayout | None = None,
) -> list[bytes]:
    """All bytes of each of these files or objects, several at a time. UnsupportedError: one has more than `most`.

    bearer, hub: as in `Checkpoint.open`.
    """

def proxy(address: str, storage: Storage | None = None) -> tuple[str, str | None] | None:
    """Host and port of the proxy for an address, and the value of Proxy-Authorization."""

def asks_for_versions(storage: Storage | None = None) -> bool | None:
    """Whether the disk cache of these settings asks servers for versions (not ``offline``); None: there is none."""

def schemes() -> list[str]:
    """The schemes of all addresses that there is a store for, in small letters."""

def storage_settings() -> list[str]:
    """Names of the settings of `penstock.Storage`."""

def storage_table() -> list[dict[str, Any]]:
    """The entries of all settings, in their order: "name", "group" (of the documentation), "form", "texts" and "doc" as
    in `option_table`, "default" (a number, or None)."""

def head(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: dict[str, str] | None, *, layout: Layout, order: Order
) -> tuple[bytes, list[int]]:
    """The beginning of a file with these (name, dtype, shape), and in which order their bytes follow it."""

def shards(
    tensors: Sequence[tuple[str, str, Sequence[int]]],
    metadata: dict[str, str] | None,
    *,
    layout: Layout,
    order: Order,
    most: int | None,
) -> list[list[int]]:
    """For each file of a save of these (name, dtype, shape) the numbers of its tensors, in their order there. Files
    without a tensor are left out."""

@final
class Bucket:
    """The bucket of an address, asked about leftovers and cleared. Each call can be interrupted."""

    def __new__(cls, address: str, storage: object = None) -> Bucket: ...
    def identity(self) -> str | None:
        """The text that names the address for everybody: the service, and the address. Asks nobody."""
    def version(self, address: str) -> str | None:
        """The version of an object; None if there is none."""
    def age(self, address: str) -> float | None:
        """Seconds since an object was written, by the server's clock; None if there is none."""
    def remove(self, address: str) -> bool:
        """Removes an object. True: its bytes stay as an old version. One that is not there is no error."""
    def forget(self, address: str, name: str) -> None:
        """Has the server forget an upload with this name. One that it does not know is no error."""
    def unfinished(self) -> list[tuple[str, str, float]] | None:
        """The uploads below the address that have not ended: of each the address of its object, its name, and the
        seconds since it began. None where the service forgets them by itself, and lists none."""

@final
class Save:
    """One save, running in the background from the moment it is made."""

    @staticmethod
    def start(
        folder: str,
        name: str,
        tensors: Sequence[tuple[str, str, Sequence[int], int | None, int | None]],
        metadata: dict[str, str] | None,
        options: Options,
        *,
        layout: Layout,
        order: Order,
        most: int | None,
        sync: bool,
        checkpoint: bool,
        keep: object,
        storage: object = None,
        snapshot: bool = False,
        ahead: bool = False,
        share: tuple[Sequence[str], str | None] | None = None,
    ) -> Save:
        """Plans, makes the files and starts writing.

        tensors: (name, dtype, shape, number of the GPU or None, address) of contiguous memory with no work under way on
        it; `keep` is held until nothing reads it any more. Where the address is None, the tensor is
        `wanted` when its turn comes. most: bytes of tensors per shard. sync: wait for stable storage. checkpoint: make
        the directory, and remove what an earlier save of this name has left in it. storage: how servers are asked, if
        `folder` is an address. snapshot: copy everything to memory of this process first. ahead: tensors without an
        address are `wanted` when the caller says so with `want`. share: the names of the files of this rank, which has
        a part of a checkpoint, and the index if this rank writes it: the files become whole, and wait for `approve`.
        """
    @staticmethod
    def push(
        address: str,
        files: Sequence[tuple[str, str]],
        index: tuple[str, str, str | None] | None,
        small: Sequence[tuple[str, bytes, str]],
        checkpoint: str,
        journal: str,
        machine: str,
        options: Options,
        storage: object = None,
    ) -> Save:
        """Uploads files as they are.

        files: name and path of each file with tensors. index: name, text and path of the index, if there are several.
        small: names, contents and paths of further objects, which come before the checkpoint is visible. checkpoint:
        the name of the file, or of the index without ``.index.json``. journal: the file to write the journal to.
        machine: the name of this machine in it.
        """
    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the save, or until it wants a tensor; False if `timeout` (seconds) passed first. Raises
        its error. Ctrl-C raises."""
    def copied(self, timeout: float | None = None) -> bool:
        """Waits until all bytes have left the tensors; False if `timeout` (seconds) passed first. Raises its error."""
    def sealed(self, timeout: float | None = None) -> bool:
        """Waits until the files of this rank are whole; False if `timeout` (seconds) passed first. Raises its error."""
    def approve(self) -> None:
        """The files of all ranks are whole."""
    def may_be_visible(self) -> bool:
        """Whether readers may see the new checkpoint."""
    def done(self) -> bool:
        """Whether the save has ended, with success or with an error."""
    def want(self, tensor: int, room: int | None = None, timeout: float | None = None) -> bool:
        """Makes this tensor the wanted one, if such tensors have `room` bytes of memory for it or nothing else can be
        written. False if there was no room for `timeout` (seconds). Raises its error."""
    def wanted(self) -> tuple[int, memoryview] | None:
        """The number of the tensor that is to be written to memory next, and where. That is gone once this is closed,
        or the tensor `supplied` and written: nothing may refer to it any more by then."""
    def supplied(self) -> None:
        """All bytes of the tensor that was wanted are there."""
    def progress(self) -> tuple[int, int]:
        """(bytes written, bytes in all)."""
    def close(self) -> None:
        """Gives up what still runs: files that have no name yet never get one."""
    def files(self) -> list[str]:
        """Names of the files, the index last."""
    def report(self) -> dict[str, Any]: ...

@final
class Lookout:
    """A rank that answers at ``host``, and watches the others, while no load of them is under way."""

    def __new__(cls, host: str, options: Options, known: Pass) -> Lookout: ...
    @property
    def pulse(self) -> int:
        """The port at which it answers."""
    def watch(self, pulses: Sequence[tuple[str, int, bytes]], silence: float) -> None:
        """Watches the others from now on. pulses: (host, pulse, token) of all. silence: seconds without an answer."""
    def look(self) -> None:
        """Raises PeerError if a rank was stopped."""
    def close(self) -> None:
        """Answers no more, and watches nobody."""

@final
class Reader:
    """Reads tensors of a checkpoint one at a time, to CPU memory. It belongs to the process that made it.

    Files on network file systems are read ahead in the order of the calls; small parts of other files are copied out of
    the page cache. None in place of a tensor: this is for a load.
    """

    def __new__(cls, checkpoint: Checkpoint, options: Options) -> Reader: ...
    def is_distant(self, file: int) -> bool:
        """Whether this file is on a network file system. Opens it at first. Ctrl-C raises."""
    def view(self, tensor: int, region: Sequence[tuple[int, int, int]] | None = None) -> View | None:
        """The bytes of (a part of) a tensor. region: (start, stop, step) per dimension. Ctrl-C raises."""
    def tensor(
        self,
        tensor: int,
        region: Sequence[tuple[int, int, int]] | None,
        dtypes: dict[str, tuple[int, int, int]],
        convert: Callable[[object], Any],
    ) -> Any:
        """`convert(capsule)` of them. dtypes: as in `Load.capsules`. None also if the dtype is not among them."""
    @property
    def held(self) -> int:
        """Bytes of what was read ahead."""
    def release(self) -> None:
        """Lets go of what was read ahead, and closes the files. Nothing is kept any more from now on."""

def stop_reading_ahead(patience: float) -> None:
    """Ends the threads of all readers of this process and waits for them, at most `patience` seconds."""

@final
class Pass:
    """The pass of a rank for the others: its number, 16 random bytes, and a proof of its key if it has one.

    Raises InvalidError for a key that is none, and what the system says of the file that is to have it.
    """

    def __new__(cls, rank: int, token: bytes) -> Pass: ...
    def mark(self) -> str:
        """A text by which others see whether they have the same key; "" without one."""
    def matches(self, rank: int, token: bytes, mark: str) -> bool:
        """Whether a rank with this token and mark has the same key, or none as this one."""

@final
class Seat:
    """A rank's own address, before it knows those of the others: it listens at ``host``, at two ports."""

    def __new__(cls, host: str, options: Options, known: Pass) -> Seat: ...
    @property
    def port(self) -> int: ...
    @property
    def pulse(self) -> int:
        """The port at which others ask whether this rank is there."""
    def watch(self, pulses: Sequence[tuple[str, int, bytes]], silence: float) -> None:
        """Watches the others from now on. pulses: (host, pulse, token) of all. silence: seconds without an answer."""
    def look(self, ranks: Sequence[int]) -> None:
        """Raises PeerError if one of these ranks is not there any more. One that has failed is not there either."""
    def close(self) -> None:
        """Listens no more."""
    def join(
        self,
        addresses: Sequence[tuple[str, int] | None],
        token: bytes,
        timeout: float,
        go_on: Callable[[], bool] | None = None,
    ) -> Mesh:
        """Connects to all others. addresses: (host, port) of all ranks. token: 16 bytes that name this load.

        go_on is asked every 50 ms whether to go on waiting; what it raises is raised.

        Raises PeerError if a rank does not come within ``timeout`` seconds, cannot be reached, or has another key.
        """

@final
class Standing:
    """Connections that stand between loads: a process that ends closes its own. It listens at ``host``, at one port."""

    def __new__(cls, host: str, options: Options, known: Pass) -> Standing: ...
    @property
    def port(self) -> int: ...
    def join(
        self,
        addresses: Sequence[tuple[str, int]],
        pulses: Sequence[tuple[str, int, bytes]],
        token: bytes,
        timeout: float,
        silence: float,
        go_on: Callable[[], bool] | None = None,
    ) -> None:
        """Connects to all others, and listens no more. addresses, token, go_on: as `Seat.join` takes them.

        pulses: (host, pulse, token) of all. silence: seconds without an answer.

        Raises PeerError if a rank does not come within ``timeout`` seconds, is gone, cannot be reached, or has another
        key.
        """
    def closed(self) -> list[tuple[int, int | None]]:
        """Ranks that have closed their connection, and for which rank each has given up (None: it has not said so)."""
    def close(self, blamed: int | None = None) -> None:
        """Closes them. blamed: the rank for which this one gives up."""

@final
class Mesh:
    """The connections of a rank to all others. A load takes them."""

    def close(self) -> None:
        """Closes them, if no load has taken them."""

@final
class Shares:
    """The reader of each byte of a checkpoint that several ranks load together.

    lists: what ranks want, as `pack_wants` gives it. of_rank: the number of each rank's list.
    trial: the ranks find out whether they exchange it.
    """

    def __new__(
        cls, checkpoint: Checkpoint, lists: Sequence[bytes], of_rank: Sequence[int], trial: bool = False
    ) -> Shares: ...
    def shared_bytes(self) -> list[int]:
        """For each rank: bytes that it reads for itself and others."""

def is_resident(
    checkpoint: Checkpoint,
    wants: Sequence[int] | None = None,
    regions: Sequence[Sequence[tuple[int, int, int]] | None] | None = None,
) -> bool:
    """Whether this machine's page cache holds everything that a rank wants. Asks the file systems."""

def missing_where_mappable(checkpoint: Checkpoint, wants: Sequence[int] | None = None) -> tuple[int, int] | str:
    """How many bytes from the first to the last wanted one of each file the page cache does not hold, and how many
    there are; a text that says why, if a file cannot be mapped under a lease. Asks the file systems."""

def traffic(
    checkpoint: Checkpoint,
    lists: Sequence[bytes],
    of_rank: Sequence[int],
    nodes: Sequence[int],
    within_nodes: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Bytes that ranks read, send and receive together, and would read alone. Opens no file.

    nodes: for each rank, the number of its node. within_nodes: only ranks of one node read for each other. Returns for
    each rank (wanted, read, unwanted, reads, parcels, sent, received, read alone, unwanted alone, reads alone), and for
    each node (read, read alone, sent to other nodes, received from other nodes), in bytes.
    """

def pack_wants(
    checkpoint: Checkpoint,
    wants: Sequence[int] | None,
    regions: Sequence[Sequence[tuple[int, int, int]] | None] | None = None,
) -> bytes:
    """The wants of a rank, as bytes for the others."""

@final
class FirstTouch:
    """Memory of somebody else that is about to be written to for the first time: it may come in huge pages."""

    @staticmethod
    def ask(places: Sequence[tuple[int, int]], page_timing: bool | None = None) -> FirstTouch:
        """Asks for huge pages in these places (address, bytes), where that is of use. Changes no byte.

        ``page_timing`` is that of the options."""
    def ahead(self, place: int, nbytes: int) -> int:
        """Says that the next so many bytes of a place are about to be written: times some of their huge pages.

        Returns the bytes of the pages that were looked at, 0 if there are no more, or they `are_slow`."""
    def turn_small(self, places: Sequence[int]) -> None:
        """Has the pages of these places that nobody has touched come as small ones."""
    def end(self, places: Sequence[int]) -> None:
        """Says that all is written: the kernel may make huge pages of these places again."""
    @property
    def nbytes(self) -> int:
        """Bytes of whole huge pages that were asked for."""
    @property
    def are_slow(self) -> bool:
        """Whether huge pages turned out to be slow."""

@final
class Leased:
    """Leases on the files that a load has mapped. They last as long as it is there or a view of the load is alive.

    As soon as another program waits for a file, what is alive becomes private memory, and the leases are given back."""

    def hand(self, want: int, make: Callable[[], Any]) -> Any:
        """Calls ``make``, which makes the view of this want, and returns what it returns. Returns None without a call
        if no further view is handed out. Raises ChangedError if a file was changed all the same."""
    def end(self) -> None:
        """Nothing more is handed out. The leases last as long as a view is alive."""
    def settle(self) -> None:
        """Ends the handing out, makes private memory of the views that are alive, and waits until the leases are given
        back.

        Raises ChangedError as `hand`, InvalidError if a view was written to meanwhile; and another PenstockError if a
        view cannot become private: the leases then last until it is gone, and the next call tries again."""
    @staticmethod
    def abandon_all() -> None:
        """In a forked child: closes the descriptors of all leases."""
    @property
    def asked(self) -> int | None:
        """The number of the file that another program waits for, or has waited for."""
    @property
    def alive(self) -> int:
        """How many views are alive."""
    @property
    def full(self) -> bool:
        """Whether `hand` has refused a view because views of ``most_alive`` bytes were alive."""
    @property
    def over(self) -> bool:
        """Whether this process holds no lease any more. A forked child holds none."""

@final
class Load:
    """One load, running in the background from the moment it is made."""

    @staticmethod
    def start(
        checkpoint: Checkpoint,
        options: Options,
        *,
        wants: Sequence[int] | None = None,
        regions: Sequence[Sequence[tuple[int, int, int]] | None] | None = None,
        device: str = "cpu",
        order: Sequencing = "file",
        stream: bool = False,
        caller_blocks: bool = False,
        into: Sequence[tuple[int, int]] | None = None,
        strides: Sequence[tuple[int, Sequence[tuple[int, int]]]] | None = None,
        casts: Sequence[tuple[int, str]] | None = None,
        keep: object = None,
        fence: int = 0,
        dlpack_device: tuple[int, int] | None = None,
        misaligned: bool = False,
        exchange: tuple[Shares, Mesh] | None = None,
        apart: tuple[int, str] | None = None,
    ) -> Load:
        """Plans and starts.

        wants: tensor numbers (None: all). regions: per want, one (start, stop) per dimension, or None for the whole.
        device: "cpu", "cuda:N", "rocm:N", or "gpu:N" with whichever driver there is. stream: bound read-ahead by
        options.window until `take`.
        caller_blocks: GPU block memory comes from the caller (`blocks`, `grant`); else it is the core's own.
        into: per want (address, nbytes) of caller memory on `device`; `keep` is held until the load ends; `fence` is a
        CUevent that the copies wait for. strides: (want, dimensions) of memory that is not contiguous: (count, bytes
        from one to the next) of each dimension, outermost first. The elements of the want fill them in row-major order;
        only their number has to be that of the want. The memory's nbytes count from the first element to the end of the
        last one. casts: (want, dtype) of memory that has another dtype than the tensor, in the spelling of the format:
        F16, BF16, F32 and F64, converted to each other ("cpu" only). Raises UnsupportedError for others, and for a
        tensor whose elements the file misaligns.
        dlpack_device: what capsules say (None: by device and driver).
        misaligned: tensors that a file misaligns may keep their place in it, mapped or read.
        exchange: what several ranks want, and the connections to the others, which the load takes.
        """
    def blocks(self) -> list[int]:
        """Sizes in bytes of the destination blocks, in the order of hand-out."""
    def grants(self) -> list[tuple[int, int]]:
        """(first, behind the last) of the blocks that the caller allocates and grants together, in order."""
    def places(self) -> list[tuple[int, int, int]]:
        """(block, offset, nbytes) of each want."""
    def wanted_blocks(self) -> list[int]:
        """Blocks that the engine would like granted now (stream: those inside the window), not yet granted."""
    def grant(self, block: int, address: int, keep: object, fence: int = 0) -> None: ...
    def next(self, timeout: float | None = None) -> int | bool | None:
        """The next want in hand-out order; None at the end; True: blocks want granting; False: timed out."""
    def take(self, want: int) -> None:
        """The consumer has taken this want: its bytes no longer count against the window."""
    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the load; False if `timeout` (seconds) passed first. Raises its error. Ctrl-C raises."""
    def done(self) -> bool: ...
    def cancel(self) -> None: ...
    def close(self) -> None:
        """Cancels if still running and waits until nothing of it runs any more. Idempotent."""
    def let_go(self) -> None:
        """Closes it and lets go of everything that was not handed out. Idempotent."""
    def progress(self) -> tuple[int, int]:
        """(bytes ready, bytes wanted)."""
    def planned(self) -> tuple[int, int]:
        """(wanted bytes, bytes of gaps between them that the plan reads); no gaps if the load maps resident pages and
        reads nothing."""
    def report(self) -> dict[str, Any]: ...
    @property
    def traced(self) -> bool:
        """Whether `options.trace` asked for a trace."""
    def mark(self, name: str, begun: float, ended: float) -> None:
        """Adds what the consumer did to the trace, with times of `time.perf_counter()`."""
    def write_trace(self, report: str) -> None:
        """Writes the trace with this report (JSON) in it; once only. A traced load that is dropped does so too."""
    def touched(self) -> list[int]:
        """Wants (with `into`) whose destination has an overwritten byte; known when the load has ended."""
    def address(self, want: int) -> int: ...
    def lease(self, most_alive: int) -> Leased | str:
        """Leases the files that are mapped, before anything is handed out; a text that says why there are no leases.
        While views of ``most_alive`` bytes are alive, no further view is handed out.

        Raises ChangedError if a file is no longer what it was, InvalidError if they were leased before."""
    def capsule(self, want: int, dtype: tuple[int, int], shape: Sequence[int]) -> object:
        """A DLPack capsule ("dltensor") that owns a share of the block. dtype: (code, bits). Once per want."""
    def capsules(
        self, wants: Sequence[int], dtypes: dict[str, tuple[int, int, int]], convert: Callable[[object], Any]
    ) -> list[Any]:
        """`convert(capsule)` for many ready wants, with the loop in Rust.

        dtypes: per dtype name (DLPack code, bits, elements of the last dimension that make up one DLPack element).
        """
    def views(self, wants: Sequence[int]) -> list[View]: ...

@final
class View:
    """Bytes of one ready want, owning a share of its block and nothing else of the load.

    `__array_interface__` (CPU only): uint8, 1-D, writable. `__dlpack__`: the same bytes as uint8.
    """

    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def capsule(self, dtype: tuple[int, int], shape: Sequence[int]) -> object:
        """A DLPack capsule ("dltensor") of the whole view on its device; as often as wanted. dtype: (code, bits)."""
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __dlpack__(self, *, stream: object = None, **kwargs: object) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

def bound(bind: str) -> str | None:
    """The address that ``bind=`` means: itself, or one of an interface. None: it is empty.

    Raises InvalidError if it is neither, or this machine has no such interface.
    """

def ceiling(
    measure: str,
    paths: Sequence[str | PathLike[str]] | None = None,
    *,
    engine: str = "threads",
    threads: int = 2,
    depth: int = 8,
    block: int = 4194304,
    device: int = 0,
    nbytes: int = 1073741824,
) -> dict[str, Any]:
    """Moves the bytes of files, or bytes to a GPU, once with no loader in the way: for the benchmark.

    measure: "direct", "place", "populate", "copy", "fresh" (of files); "host_to_device", "device_alloc" (of GPU
    `device`, `nbytes` bytes). engine: "threads"; "uring" for direct; "mapped" for copy and fresh. Returns the settings
    with `bytes` moved and `seconds`. An unknown name is an InvalidError that lists the known ones.
    """

def residency(path: str, stall_timeout: float | None = None) -> tuple[int, int, int]:
    """(resident bytes, size in bytes, number of probes) of one file in the page cache. Ctrl-C raises."""

def evict(path: str) -> int:
    """Drops the file's clean pages from the page cache; bytes still resident afterwards. Ctrl-C raises."""

def warm(path: str, threads: int = 0, stall_timeout: float | None = None) -> int:
    """Reads the file into the page cache; bytes resident afterwards. Ctrl-C raises, and so do `stall_timeout` seconds
    in which nothing is read (StalledError; None is as in `open`)."""

def built() -> tuple[str, str, list[str], bool]:
    """(commit or "unknown", target, Cargo features, whether it is optimised) of this extension module."""

def probe(path: str) -> dict[str, Any]:
    """Facts of the machine and of the file system of `path`: for `penstock doctor`."""

def authorities(storage: Storage | None = None) -> list[Path]:
    """The files and folders with the certificates that https trusts. UnsupportedError: there are none."""

def certificates(storage: Storage | None = None) -> bytes | None:
    """The certificates that https trusts (DER, one after the other); None: all. UnsupportedError: there are none."""

def unchecked_hosts() -> list[str]:
    """Hosts that TLS has connected to without a check of their certificates, each once in a process."""

def unwritable(spans: Sequence[tuple[int, int]]) -> list[tuple[int, str]]:
    """The address ranges (first byte, past the last) that cannot be written to, by number, and the reasons."""

def option_table() -> list[dict[str, Any]]:
    """The entries of all options, in their order: "name", "group", "form" (kind of values), "word" (for a value, on the
    command line), "texts" (those of a choice), "default", "means" (what a default means that is no value of its own: 0
    or ""), "help" (for the command line), "doc" (for `help`, an empty line, for the documentation).
    """

def stall_timeout(value: float | None = None) -> float:
    """Seconds without progress after which the file system counts as hung: `value`, else PENSTOCK_STALL_TIMEOUT, else
    the default. Raises ValueError for what is no such time."""

def quiesce(reason: str, patience: float) -> int:
    """Ends what loads have left in this process, and gives back idle staging memory: how many bytes. Waits `patience`
    seconds at most. Threads that were told to end may do so a moment later."""

def under_way() -> tuple[int, int]:
    """Loads of this process that hand out of leased files now; reads that hang in the kernel and were left behind."""

def release_staging() -> int:
    """Gives staging memory that no load uses back to the system, with its registrations and GPU contexts.

    Loads to GPUs keep their registered (pinned) staging memory for the next one, up to half of the `staging` option
    (128 MiB by default), and other loads 64 MiB. Call this when the process loads no more. Returns the number of bytes.
    The next load makes what it needs anew. Safe at any time: memory that a load uses is not touched.
    """

def exiting() -> None:
    """The calling thread ends the interpreter: others that wait for a cancelled load then go no further."""

def gpus() -> dict[str, Any]:
    """Drivers and GPUs found, or why not."""
