"""A folder of a repository of the Hub at one commit: the names of its files, and small ones whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from . import _core
from ._choices import Storage
from ._errors import InvalidError, NotFoundError
from ._hub import SCHEME, asks_network, cached_folder, parse
from ._hub_network import (
    Access,
    Pinned,
    Token,
    base,
    endpoint,
    explained,
    open_commit,
    pin,
    token,
    without_credentials,
)
from ._patience import T, patiently


class HubFolder:
    """The folder that ``source`` is, or is in, at the commit that its revision is now.

    Args:
        source: ``hf://...``.
        most: Bytes of a file that can be read.
        storage: How servers are asked.

    Raises:
        NotFoundError, AccessError, ReadError: as `pin`. Also a NotFoundError: the Hub may not be asked.
        InvalidError: this is not the name of a repository.
        StalledError: the Hub does not answer.
    """

    def __init__(self, source: str, most: int, storage: Storage | None = None) -> None:
        reference = parse(source)
        if reference is None:
            raise InvalidError(f"{source} is not the name of a repository: hf://org/name@revision")
        if not asks_network(source, storage):
            why = "offline=True" if _core.asks_for_versions(storage) is False else "HF_HUB_OFFLINE is set"
            text = f"{why}: give the name without hf://, so that it is looked for in the local cache"
            raise NotFoundError(text, path=source)

        def ask() -> tuple[Token | None, Pinned]:
            sent = token()
            return sent, pin(source, reference, sent, storage)

        self._sent, self._pinned = patiently(ask, None, endpoint())
        self._source, self._most, self._storage = source, most, storage
        self._reference = reference
        within, pinned = reference.within, self._pinned
        self.at = f"{SCHEME}{pinned.repository}@{pinned.commit}" + (f"/{within}" if within else "")
        """The address of ``source`` at this commit."""
        folder = within.rpartition("/")[0] if within in pinned.names else within
        self._folder = f"{folder}/" if folder else ""

    def open(self, variant: str | None = None) -> _core.Checkpoint:
        """The checkpoint that ``source`` is at this commit.

        Raises:
            NotFoundError, AccessError, ReadError: as `open_commit`.
        """
        source, storage = self._source, self._storage
        return open_commit(source, self._reference, self._pinned, self._sent, None, storage, variant)

    def address(self, name: str) -> str:
        """The web address of a file of the folder."""
        return base(self._pinned) + quote(self._folder + name)

    def name(self, address: str) -> str:
        """The path in the folder of the file at this address."""
        return unquote(address).removeprefix(unquote(self.address("")))

    def kept(self, name: str) -> Path | None:
        """Where the local cache has a file of the folder at this commit; None if it lacks it."""
        snapshot = cached_folder(self._reference.repository) / "snapshots" / self._pinned.commit
        path = snapshot / f"{self._folder}{name}"
        return path if path.is_file() else None

    def asked(self, ask: Callable[[Access, Storage | None], T]) -> T:
        """The result of ``ask``, which asks the Hub with this access and these settings."""
        storage = without_credentials(self._storage)
        return explained(self._source, self._pinned, self._sent, lambda access: ask(access, storage))

    def names(self, within: str) -> list[str]:
        """The names of the files in a folder of it ("": in itself). Those of folders in there end with a slash."""
        prefix = self._folder + (f"{within}/" if within else "")
        below = [name.removeprefix(prefix) for name in self._pinned.names if name.startswith(prefix)]
        return list(dict.fromkeys(name[: name.find("/") + 1] or name for name in below))

    def read(self, files: Sequence[str]) -> list[bytes]:
        """All bytes of these files.

        Raises:
            UnsupportedError: one of them is too long.
            AccessError, ReadError: the Hub does not give them.
        """
        addresses = [self.address(name) for name in files]
        return self.asked(lambda access, storage: _core.contents(addresses, self._most, None, storage, *access))
