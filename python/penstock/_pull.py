"""``penstock pull``: whole models from servers, into the disk cache, or as plain files into a folder.

The files of a model are its weights, their index, and the small files that an engine wants. In a folder the small files
come last, so that a folder with a configuration has the weights. `_core.Pull` moves the bytes: a file has its name when
it is complete and on the disk. `MANIFEST` notes the version of each: a file that is there in the server's version is
not fetched again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from . import _core
from ._choices import Storage
from ._errors import BusyError, InvalidError, LimitError, NotFoundError, UnsupportedError, WriteError
from ._hub import SCHEME
from ._hub_folder import HubFolder
from ._hub_network import Access
from ._options import make_options
from ._paths import is_web, without_secrets
from ._progress import INTERVAL, Meter, Progress
from ._report import size_text
from ._running import under_way
from ._tls import warn_of_unchecked
from .integrations._small_files import small_files

MANIFEST = ".penstock-pull.json"
"""The file of a folder that says which versions its files have."""
MOST = 64 << 20
"""Bytes of a small file. The largest tokenizers have half of that."""
_LONGEST = 250
"""Bytes of the name of a file."""
_DEEPEST = 32
"""Folders in folders of what comes along. A link that leads back has no end."""

Ask = Callable[[Access, Storage | None], Any]


class _Files(NamedTuple):
    """Files of one place: the address of each, by its path in a folder."""

    addresses: dict[str, str]
    asked: Callable[[Ask], Any]
    """Calls a function with what their server wants, and the settings."""
    kept: Callable[[str], Path | None] = lambda path: None
    """Where the Hub's cache has the file of this path: loads open it there, so the disk cache need not have it."""


class PulledFile(NamedTuple):
    """A file that is there now."""

    path: str
    """Its path in the folder."""
    address: str
    nbytes: int
    version: str | None
    was_there: bool
    crc32c: int | None = None
    """The checksum of a file that was written."""


class Pulled(NamedTuple):
    """The result of `pull`."""

    files: list[PulledFile]
    received_bytes: int
    """Bytes that servers sent."""
    uncached: str
    """The reason for which the disk cache lacks something of it; empty without one."""
    seconds: float


def _plain(storage: Storage) -> Callable[[Ask], Any]:
    return lambda ask: ask(Access(), storage)


def checked(path: str, place: str) -> str:
    """``path``, if it stays in a folder.

    Raises:
        UnsupportedError: it does not, or no file can be called so.
    """
    for part in path.split("/"):
        if part in ("", ".", "..") or "\0" in part or len(os.fsencode(part)) > _LONGEST or part == MANIFEST:
            text = f"{without_secrets(place)}: {path!r} is the path of no file that can be in a folder"
            raise UnsupportedError(text, path=without_secrets(place))
    return path


def _model(address: str, storage: Storage, variant: str | None, code: bool) -> tuple[_Files, _Files]:
    """The weights of a model, and its other files."""
    if address.startswith(SCHEME):
        hub = HubFolder(address, MOST, storage)
        weights = {hub.name(file): file for file in hub.open(variant).files()}
        others = {name: hub.address(name) for name in small_files(address, hub.names, hub.read, code)}
        return _of_model(address, weights, others, hub.asked, hub.kept)
    core = _core.Checkpoint.open([address], None, storage, variant=variant)
    warn_of_unchecked()
    if address.lower().startswith(("http://", "https://")):
        # What may be a signature is in no path that the core shows
        place, query = re.split(r"(?=[?#])", address, maxsplit=1) if re.search(r"[?#]", address) else (address, "")
        folder = place.rpartition("/")[0] + "/"
        if not all(file.startswith(folder) for file in core.files()):
            raise UnsupportedError(
                "a name and a password in an address: give storage= credentials", path=without_secrets(address)
            )
        weights = {file.removeprefix(folder): file + query for file in core.files()}
        others = {} if place in core.files() else {place.removeprefix(folder): address}
        return _of_model(address, weights, others, _plain(storage))
    # As `penstock.open`: what ends like a file is one. One slash ends a folder; if there are more, they are of its name
    folder = address.rpartition("/")[0] if address.endswith((".safetensors", ".json")) else address.removesuffix("/")

    def names(within: str) -> list[str]:
        return _core.names_in("/".join(filter(None, (folder, within))) + "/", None, storage, folders=True)

    def read(files: Sequence[str]) -> list[bytes]:
        return _core.contents([f"{folder}/{name}" for name in files], MOST, None, storage)

    weights = {file.removeprefix(f"{folder}/"): file for file in core.files()}
    others = {name: f"{folder}/{name}" for name in small_files(address, names, read, code)}
    return _of_model(address, weights, others, _plain(storage))


def _of_model(
    address: str,
    weights: dict[str, str],
    others: dict[str, str],
    asked: Callable[[Ask], Any],
    kept: Callable[[str], Path | None] = lambda path: None,
) -> tuple[_Files, _Files]:
    for path in (*weights, *others):
        checked(path, address)
    rest = {path: others[path] for path in sorted(others) if path not in weights}
    return _Files(weights, asked, kept), _Files(rest, asked, kept)


def _all_below(place: str, storage: Storage) -> _Files:
    """All files of a folder, and of the folders in it."""
    if place.lower().startswith(("http://", "https://")):
        text = "a web server does not say which files it has: give a folder in an object store, on the Hub, or here"
        raise InvalidError(f"{without_secrets(place)}: {text}")
    asked = _plain(storage)
    if place.startswith(SCHEME):
        hub = HubFolder(place, MOST, storage)
        names, asked = hub.names, hub.asked
        address: Callable[[str], str] = hub.address
    elif is_web(place):
        folder = place.removesuffix("/")
        address = f"{folder}/".__add__

        def names(within: str) -> list[str]:
            return _core.names_in("/".join(filter(None, (folder, within))) + "/", None, storage, folders=True)

    else:
        if not Path(place).is_dir():
            raise NotFoundError("there is no such folder", path=place)
        address = f"{place}/".__add__

        def names(within: str) -> list[str]:
            with os.scandir(Path(place, within)) as found:
                return sorted(entry.name + "/" * entry.is_dir() for entry in found)

    found: dict[str, str] = {}
    folders = [""]
    while folders:
        within = folders.pop()
        if within.count("/") >= _DEEPEST:
            text = f"{within[:60]}… lies in more than {_DEEPEST} folders: is there a link that leads back?"
            raise LimitError(f"{without_secrets(place)}: {text}", path=without_secrets(place))
        for name in names(within):
            path = checked((f"{within}/{name}" if within else name).removesuffix("/"), place)
            if name.endswith("/"):
                folders.append(path)
            else:
                found[path] = address(path)
    if not found:
        raise NotFoundError("there is no file", path=without_secrets(place))
    return _Files(dict(sorted(found.items())), asked)


# A folder


def _seen(path: Path) -> dict[str, int]:
    """The facts of a file that change when it is edited or replaced."""
    stat = os.lstat(path)
    return {"nbytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "inode": stat.st_ino}


class _Folder:
    """A folder that files are written to, and its manifest."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._noted: dict[str, dict[str, Any]] = {}
        self._now: set[str] = set()
        """Files that this pull has noted."""
        self._found: dict[str, dict[str, int]] = {}
        """Facts of the files that were there before it."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else pulls into it meanwhile."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise WriteError(f"cannot make the folder: {error}", path=str(self.path), errno=error.errno) from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError("another `penstock pull` writes to this folder", path=str(self.path)) from None
            except OSError:  # some file systems have no locks
                pass
            with suppress(OSError, ValueError, KeyError, TypeError):
                noted = json.loads((self.path / MANIFEST).read_text("utf-8"))
                self._noted = dict(noted["files"]) if noted["format"] == 1 else {}
            yield
        finally:
            os.close(lock)

    def known(self, path: str, address: str) -> tuple[str, int, int | None] | None:
        """Version, size and checksum of a file that was written; no checksum if it is the same file with the same
        times.

        The time of a change (ctime) counts too. A program can set the time of the content (mtime) back, as ``touch``
        and ``rsync`` do, and not this one.
        """
        with suppress(OSError, KeyError, TypeError, ValueError):
            noted, self._found[path] = self._noted[path], _seen(self.path / path)
            if noted["address"] == without_secrets(address):
                is_same = all(noted[name] == value for name, value in self._found[path].items())
                return str(noted["version"]), int(noted["nbytes"]), None if is_same else int(noted["crc32c"])
        return None

    def place(self, path: str) -> str:
        """The path of a file, in folders that are there."""
        found = self.path / path
        try:
            found.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(f"cannot make the folder: {error}", path=str(found.parent), errno=error.errno) from error
        return str(found)

    def note(self, files: Sequence[PulledFile]) -> None:
        """Writes down the versions of these files."""
        for file in files:
            # It may have been edited since it was noted in this pull
            if file.version is None or file.path in self._now:
                continue
            self._now.add(file.path)
            if file.was_there:
                self._noted[file.path] |= self._found[file.path]
            else:
                about = {"address": file.address, "version": file.version, "crc32c": file.crc32c}
                self._noted[file.path] = about | _seen(self.path / file.path)
        text = json.dumps({"format": 1, "files": self._noted}, indent=1)
        new = self.path / f"{MANIFEST}.part"
        new.write_text(text, "utf-8")
        new.replace(self.path / MANIFEST)


# The pull


class _Moving:
    """Files that are moved, one place after the other."""

    def __init__(self, folder: _Folder | None, meter: Meter) -> None:
        self._folder, self._meter = folder, meter
        self._before = (0, 0)
        self.files: list[PulledFile] = []
        self.received, self.uncached = 0, ""

    def move(self, files: _Files, prefix: str = "") -> None:
        """Moves these files, those of which the folder has the version excepted."""
        addresses = {prefix + path: address for path, address in files.addresses.items()}
        if taken := sorted(set(addresses) & {file.path for file in self.files}):
            raise InvalidError(f"two files would be called {taken[0]!r}")
        if self._folder is None:
            there = {path: found for path in files.addresses if (found := files.kept(path)) is not None}
            for path, found in there.items():
                address = without_secrets(addresses.pop(prefix + path))
                self.files.append(PulledFile(prefix + path, address, found.stat().st_size, None, True))
        if addresses:
            files.asked(lambda access, storage: self._move(addresses, access, storage))

    def _move(self, addresses: Mapping[str, str], access: Access, storage: Storage | None) -> None:
        folder = self._folder
        asked: list[tuple[str, str | None, tuple[str, int, int | None] | None]] = [
            (address, None, None) if folder is None else (address, folder.place(path), folder.known(path, address))
            for path, address in addresses.items()
        ]
        pull = _core.Pull.start(asked, make_options(None), storage, *access)
        seen = 0
        try:
            while not pull.wait(INTERVAL):
                self._show(pull)
                complete = sum(file[3] for file in pull.files())
                if folder is not None and complete > seen:
                    seen = complete
                    folder.note(self._complete(addresses, pull))
            self._show(pull)
        finally:
            pull.close()
            complete_ones = self._complete(addresses, pull)
            if folder is not None:
                folder.note(complete_ones)
            done, total, received = pull.progress()
            self.received += received
            self._before = (self._before[0] + done, self._before[1] + total)
            self.uncached = self.uncached or pull.uncached()
            self.files += complete_ones

    def _show(self, pull: _core.Pull) -> None:
        done, total, _ = pull.progress()
        self._meter.update(self._before[0] + done, self._before[1] + total)

    def finish(self) -> None:
        """The last update of the meter."""
        self._meter.update(*self._before, final=True)

    def _complete(self, addresses: Mapping[str, str], pull: _core.Pull) -> list[PulledFile]:
        files = zip(addresses.items(), pull.files(), strict=False)
        return [
            PulledFile(path, without_secrets(address), size, version, was_there, crc32c)
            for (path, address), (size, version, was_there, complete, crc32c) in files
            if complete
        ]


def pull(
    address: str,
    folder: str | None = None,
    *,
    also: Sequence[str] = (),
    storage: Storage | None = None,
    variant: str | None = None,
    progress: Progress = None,
) -> Pulled:
    """Fetches all files that a load of a model needs.

    Args:
        address: Of a model: of a folder in an object store or on the Hub, or of an index or a shard file.
        folder: Where plain files go. None: the disk cache of ``storage``, or of the environment.
        also: Further folders, all of whose files come along: addresses, and with ``folder`` folders of this machine
            too. In ``folder`` they have the last part of their own name.

    Returns:
        All of it is there.

    Raises:
        InvalidError: there is neither a folder nor a disk cache; or this is no address.
        BusyError: another pull writes to the folder.
        UnsupportedError: a name that a server lists leads out of the folder.
        PenstockError: as `penstock.open` and `penstock.save`. What was complete by then stays.
    """
    begun = time.perf_counter()
    if not is_web(address) and not address.startswith(SCHEME):
        raise InvalidError(f"{address!r} is no address: give s3://, gs://, az://, https:// or hf://org/name")
    settings = cast("Storage", dict(storage or {}))
    code, into = True, None
    if folder is None:
        for place in also:
            if not is_web(place) and not place.startswith(SCHEME):
                raise InvalidError(f"{place!r} is a folder of this machine: without FOLDER nothing of it is fetched")
        _, code = _core.CacheFolder(settings).access()  # code comes from a private cache only
    else:
        into = _Folder(folder)
    with under_way(f"a pull of {without_secrets(address)}"), Meter(progress, "pull") as meter:
        moving = _Moving(into, meter)
        with into.held() if into is not None else nullcontext():
            weights, others = _model(address, settings, variant, code)
            moving.move(weights)
            for place in also:
                name = re.split(r"[?#]", place)[0].rstrip("/").rpartition("/")[2]
                moving.move(_all_below(place, settings), f"{checked(name, place)}/")
            moving.move(others)
        moving.finish()
    return Pulled(moving.files, moving.received, moving.uncached, time.perf_counter() - begun)


def described(pulled: Pulled, folder: str | None, cache: str | None) -> str:
    """The result of `pull`, as text."""
    nbytes = sum(file.nbytes for file in pulled.files)
    many = f"{len(pulled.files)} file{'s' * (len(pulled.files) != 1)}"
    where = folder if folder is not None else f"the disk cache {cache}"
    lines = [f"{many}, {size_text(nbytes)}, in {where}"]
    if all(file.was_there for file in pulled.files):
        lines.append(f"all of it was there before: asked for the versions in {pulled.seconds:.1f} s")
    else:
        rate = f": {pulled.received_bytes / pulled.seconds / 1e9:.2f} GB/s" if pulled.received_bytes else ""
        lines.append(f"received {size_text(pulled.received_bytes)} in {pulled.seconds:.1f} s{rate}")
    if pulled.uncached:
        lines.append(f"not all of it is in the disk cache: {pulled.uncached}")
    return "\n".join(lines)
