"""A folder of a repository of the Hub at one commit: the names of its files, and small ones whole."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from . import _core
from ._choices import Storage
from ._errors import InvalidError, NotFoundError
from ._hub import SCHEME, asks_network, parse
from ._hub_network import Pinned, Token, base, endpoint, explained, pin, token, without_credentials
from ._patience import patiently


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
        if not asks_network(source):
            text = "HF_HUB_OFFLINE is set: give the name without hf://, so that it is looked for in the local cache"
            raise NotFoundError(text, path=source)

        def ask() -> tuple[Token | None, Pinned]:
            sent = token()
            return sent, pin(source, reference, sent, storage)

        self._sent, self._pinned = patiently(ask, None, endpoint())
        self._source, self._most, self._storage = source, most, storage
        within, pinned = reference.within, self._pinned
        self.at = f"{SCHEME}{pinned.repository}@{pinned.commit}" + (f"/{within}" if within else "")
        """The address of ``source`` at this commit."""
        folder = within.rpartition("/")[0] if within in pinned.names else within
        self._folder = f"{folder}/" if folder else ""

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
        addresses = [base(self._pinned) + quote(self._folder + name) for name in files]
        return explained(
            self._source,
            self._pinned,
            self._sent,
            lambda bearer: _core.contents(addresses, self._most, None, without_credentials(self._storage), bearer),
        )
