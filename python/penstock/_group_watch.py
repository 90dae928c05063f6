"""Connections that tell a rank that another one is gone, where no load is under way that would."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ._errors import LimitError, PeerError

#: Seconds that a stranger may take to say nothing.
_HELLO = 1.0
#: Bytes of the number of a rank.
_WORD = 4
#: Seconds between two looks at whether to go on waiting.
_LOOK = 0.05


class Watch:
    """Connections to all other ranks: a process that ends closes its own.

    All that is said on them, before they are closed, is for which rank this one has given up.
    """

    def __init__(self, address: str) -> None:
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._of: dict[socket.socket, int] = {}
        self._closed: dict[int, int | None] = {}
        self._listener: socket.socket | None = None
        try:
            self._listener = socket.socket(self._family, socket.SOCK_STREAM)
            self._listener.bind((address, 0))
            self._listener.listen(1024)
        except OSError as error:
            self.close()
            raise LimitError(f"cannot listen at {address} for other ranks: {error}") from error

    @property
    def port(self) -> int:
        """Where others reach this rank."""
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    def join(
        self,
        rank: int,
        addresses: Sequence[tuple[str, int]],
        token: bytes,
        deadline: float,
        go_on: Callable[[], bool],
    ) -> None:
        """Connects to all others, which listen already. ``token`` names those that belong together.

        Raises PeerError if one does not come before ``deadline``, and what ``go_on`` raises.
        """
        for other, (host, port) in enumerate(addresses[:rank]):
            one = socket.socket(self._family, socket.SOCK_STREAM)
            self._of[one] = other
            one.settimeout(max(1.0, deadline - time.monotonic()))
            try:
                one.connect((host, port))
                one.sendall(token + rank.to_bytes(_WORD, "big"))
            except OSError as error:
                go_on()  # it may have said why
                why = f"cannot be reached at {host}: {error}"
                raise PeerError(f"rank {other} {why}", rank=other, why=why) from error
            one.setblocking(False)
        listener = self._listener
        assert listener is not None
        missing = set(range(rank + 1, len(addresses)))
        while missing:
            go_on()
            if time.monotonic() > deadline:
                why = "did not connect in time"
                raise PeerError(f"rank {min(missing)} {why}", rank=min(missing), why=why)
            poll = select.poll()  # `select` takes no descriptor of 1024 and more
            poll.register(listener, select.POLLIN)
            if poll.poll(_LOOK * 1e3):
                one, _ = listener.accept()
                other = _hello(one, token)
                if other in missing:
                    missing.remove(other)
                    self._of[one] = other
                    one.setblocking(False)
                else:
                    one.close()
        listener.close()
        self._listener = None

    def closed(self) -> dict[int, int | None]:
        """Ranks that have closed their connection, and for which rank each of them has given up (None: not said)."""
        poll = select.poll()
        by_number = {one.fileno(): one for one, rank in self._of.items() if rank not in self._closed}
        for number in by_number:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(0):
            try:
                said = by_number[number].recv(_WORD)
            except OSError:
                said = b""
            blamed = int.from_bytes(said, "big") if len(said) == _WORD else None
            self._closed[self._of[by_number[number]]] = blamed
        return self._closed

    def close(self, blamed: int | None = None) -> None:
        """Closes them. ``blamed``: the rank for which this one gives up. Idempotent."""
        for one in self._of:
            with suppress(OSError):
                if blamed is not None:
                    one.send(blamed.to_bytes(_WORD, "big"))
                one.close()
        if self._listener is not None:
            self._listener.close()
        self._of, self._listener = {}, None

    def __del__(self) -> None:
        self.close()


def _hello(one: socket.socket, token: bytes) -> int:
    """The rank that has connected; -1: nobody of ours."""
    said = b""
    limit = time.monotonic() + _HELLO
    try:
        while len(said) < len(token) + _WORD:
            one.settimeout(max(0.01, limit - time.monotonic()))
            more = one.recv(len(token) + _WORD - len(said))
            if not more:
                return -1
            said += more
    except OSError:
        return -1
    return int.from_bytes(said[len(token) :], "big") if said.startswith(token) else -1
