"""The rendezvous store of ranks that load together, of which every call ends.

A client of `torch.distributed.TCPStore` waits without limit for a host that was stopped, and raises errors of its own
if the host is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ._errors import PeerError, StalledError
from ._patience import asking, patiently

T = TypeVar("T")

#: Seconds between two questions for keys that are not there yet: the fewest, and the most. The store's own `wait` hears
#: no signal, and the one of torch writes two warnings to the log whenever its limit passes.
_PAUSES = (0.0005, 0.1)
#: A pause is this part of the time that was waited already, and of the limit of an answer at most.
_PART = 0.1
#: Seconds between two questions for the other key: each holds up ranks that still copy on the same processors
#: (docs/performance-notes.md, 27 November).
_NEWS = 0.02


class Store(Protocol):
    """The methods of a rendezvous store; the stores of `torch.distributed` have them."""

    def set(self, key: str, value: Any) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...


class RendezvousStore:
    """A store whose calls give an answer, or raise `PeerError`.

    Attributes:
        store: The store itself.
        limit: Seconds that an answer may take.
        stalled: Whether one took longer.
    """

    def __init__(self, store: Store, limit: float) -> None:
        self.store = store
        self.limit = limit
        self.stalled = False

    def set(self, key: str, value: Any) -> None:
        self.ask(lambda: self.store.set(key, value))

    def get(self, key: str) -> bytes:
        return self.ask(lambda: self.store.get(key))

    def get_all(self, keys: list[str], at_once: int = 64) -> list[bytes]:
        """The values of keys that are there: so many in one question, if the store takes that."""
        if not keys:
            return []
        extended = getattr(self.store, "has_extended_api", None)
        together = extended is not None and extended()
        step = at_once if together else 1

        def ask() -> list[bytes]:
            found: list[bytes] = []
            for at in range(0, len(keys), step):
                asking("")
                part = keys[at : at + step]
                found += self.store.multi_get(part) if together else [self.store.get(part[0])]  # type: ignore[attr-defined]
            return found

        return self.ask(ask)

    def add(self, key: str, amount: int) -> int:
        return self.ask(lambda: self.store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return self.ask(lambda: self.store.check(keys))

    def wait(self, keys: list[str], unless: str | None, begun: float, seconds: float) -> bool:
        """Waits so many seconds for keys, or until the key ``unless`` is there. Whether all of them are.

        One thread asks, and sleeps: to wake another one for each question takes more processor time than the question.

        Args:
            begun: The time when the caller began to wait: the longer ago, the longer are the pauses.
        """

        def ask() -> bool:
            end, asked = time.monotonic() + seconds, begun
            while (now := time.monotonic()) < end:
                asking("")
                if self.store.check(keys):
                    return True
                if unless is not None and now - asked >= _NEWS:
                    asked = now
                    asking("")
                    if self.store.check([unless]):
                        return False
                time.sleep(min(max((now - begun) * _PART, _PAUSES[0]), _PAUSES[1], self.limit * _PART))
            return False

        return self.ask(ask)

    def delete(self, keys: list[str]) -> None:
        """Deletes what is there of these, if the store can."""
        delete = getattr(self.store, "delete_key", None)
        if delete is None or not keys:
            return

        def ask() -> None:
            for key in keys:
                asking("")
                delete(key)

        self.ask(ask)

    def ask(self, question: Callable[[], T], says: str = "is gone") -> T:
        """The answer, or the error that says what is the matter with the store."""
        try:
            # On another thread: no signal handler runs while a store waits
            return patiently(question, self.limit)
        except StalledError:
            self.stalled = True
            raise self.failed(
                f"has not answered for {self.limit:.1f} s: its host was stopped, or the network to it is down "
                "(peer_timeout raises the limit)"
            ) from None
        except Exception as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise self.failed(f"{says}: {lines[0]}") from error

    def failed(self, why: str) -> PeerError:
        """The error that says what is the matter with the store."""
        host, port = host_of(self.store)
        at = f" at {host}:{port}" if host else ""
        return PeerError(f"the rendezvous store{at} {why}", host=host)


def host_of(store: Any) -> tuple[str | None, int]:
    """Name and port of the store's server; (None, 0) for a store that has none."""
    while getattr(store, "host", None) is None and getattr(store, "underlying_store", None) is not None:
        store = store.underlying_store
    return getattr(store, "host", None), getattr(store, "port", 0)
