"""Ranks that save together, as each of them sees the others: what they say, and who decides."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from . import _running
from ._errors import CancelledError, InvalidError, PeerError, PenstockError, PlanMismatchError
from ._group import Watch
from ._group_store import Store
from ._patience import LOOK

#: Seconds for which a rank waits for the last word of a rank that is gone.
LAST_WORD = 1.0
PUBLISH, GIVE_UP = b"publish", b"give up"
VISIBLE, HIDDEN, UNKNOWN = b"visible", b"hidden", b"unknown"


class SavingRanks(Watch):
    """The ranks of one save."""

    _doing = "save"
    is_planned = False
    """The plan is known: messages may be under way."""
    is_common = False
    """All ranks have the error of this one, by themselves."""
    is_published = False
    """Rank 0 makes the new checkpoint visible: this rank cannot stop it any more."""
    is_visible = False
    """The new checkpoint is visible: it is too late to give up."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._shared, self._owner = self._member.store, os.getpid()
        self._own: Store | None = None
        self._fate: bytes | None = None
        self.give_up = threading.Event()
        """Set when the job of this save was cancelled or dropped."""
        self.over = threading.Event()
        """Set when this rank does nothing more of this save."""

    def await_earlier(self) -> None:
        """Waits for the save of this rank in this group that still runs in the background: a program that saves faster
        than the storage takes is slowed down.
        """
        for one in list(_apart):
            if (one._owner, one._rank) == (os.getpid(), self._rank) and one._shared is self._shared:
                while not one.over.wait(LOOK):  # in pieces, for Ctrl-C
                    pass

    def done(self) -> bool:
        """True if this rank does nothing more of this save."""
        return self.over.is_set()

    def connect(self) -> None:
        """Makes the connection to the store that a thread of ours has for itself: the program may block its own.

        Raises:
            InvalidError: the store cannot be cloned.
        """
        clone = getattr(self._shared, "clone", None)
        why = "it has no clone(), which those of torch have from 2.8 on"
        if clone is not None:
            try:
                self._own = self._store.ask(clone, "cannot be cloned")
            except PeerError as error:
                if self._store.stalled:
                    raise
                why = error.message
        if self._own is None:
            needs = "a save in the background needs a connection to the store for itself"
            raise InvalidError(f"group: {needs}: {why}; nothing was written. Save with wait=True")

    def go_apart(self, target: _running.Target) -> None:
        """From now on a thread of ours asks the store, beside the program. `joined` may end before."""
        assert self._own is not None
        self._watches = [self]
        self._store.store = self._member.store = self._own
        _apart.append(self)
        _running.saves_to(self, target, of_ranks=True)

    def leave(self) -> None:
        """This rank does nothing more of this save, and has no connection of its own to the store any more."""
        with suppress(ValueError):
            _apart.remove(self)
        self._watches = []
        self._store.store = self._member.store = self._shared
        self._own = None
        self.over.set()

    def _go_on(self) -> bool:
        if self.give_up.is_set() and not self.is_visible:
            raise CancelledError("the save was given up by its job before it was done")
        return super()._go_on()

    @property
    def limit(self) -> float:
        """Seconds that an answer of the store may take."""
        return self._store.limit

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def tell(self, error: BaseException) -> None:
        """The others hear why this rank gives up. What differs all ranks see by themselves. They hear nothing if rank 0
        publishes: the save ends well without this rank. Idempotent.
        """
        if not isinstance(error, PlanMismatchError) and not self.is_common and not self.is_published:
            with suppress(BaseException):
                self._fail(error)

    def say(self, what: str, value: bytes = b"") -> None:
        """Says something that others wait for."""
        self._set(f"{what}/{self._rank}", value)

    def all(self, what: str) -> list[bytes]:
        """Waits for what every rank says, however long that takes: those that are gone are noticed."""
        return self._gathered(what, math.inf)

    def first(self, what: str) -> bytes:
        """Waits for what rank 0 says."""
        self._awaited = what
        key, begun = f"{self._prefix}{what}/0", time.monotonic()
        while not self._store.wait([key], self._prefix + "failed", begun, LOOK):
            self._go_on()
        return self._store.get(key)

    def look(self) -> None:
        """Raises the error of a rank that has failed, is gone, or was stopped."""
        self._awaited = "sealed"
        self._go_on()

    def decide(self, what: bytes) -> bool:
        """Decides what becomes of the save; False if another rank has done so before."""
        if self._store.add(self._prefix + "decision", 1) != 1:
            return False
        self._made.append(self._prefix + "decision")
        self._set("verdict", what)
        return True

    def fate(self, limit: float = math.inf) -> bytes:
        """The fate of the new checkpoint, now that this rank gives up: HIDDEN only if that is sure. Asks once.

        Once rank 0 publishes, its word counts, and is waited for as long as rank 0 is neither gone nor stopped: others
        may be gone meanwhile.

        Args:
            limit: Seconds for which that word is waited for.
        """
        if self._fate is None:
            self._fate = UNKNOWN
            with suppress(PenstockError):  # the store is gone: nobody knows
                self._fate = self._find_fate(limit)
        return self._fate

    def _find_fate(self, limit: float) -> bytes:
        if self.decide(GIVE_UP):
            return HIDDEN
        verdict = self._last_word("verdict", self._store.limit)
        if verdict == GIVE_UP:
            return HIDDEN
        self.is_published = verdict == PUBLISH
        return self._last_word("outcome/0", limit) or UNKNOWN

    def _last_word(self, key: str, limit: float) -> bytes:
        """The value of a key, also if some ranks have failed; nothing if rank 0 is gone, or after ``limit`` seconds."""
        keys, begun = [self._prefix + key], time.monotonic()
        while not self._store.wait(keys, None, begun, LOOK):
            stopped = self.stopped()
            if 0 in self.closed() or (stopped is not None and stopped.rank == 0):
                if not self._store.wait(keys, None, time.monotonic(), LAST_WORD):
                    return b""
                break
            if time.monotonic() - begun >= limit:
                return b""
        return self._store.get(keys[0])


_apart: list[SavingRanks] = []
"""Saves of this process that run in the background."""


@contextmanager
def meeting(ranks: SavingRanks) -> Iterator[None]:
    """One save of ranks, from before they meet. The others hear of an error, and this rank leaves at the end."""
    owner, lost = os.getpid(), None
    try:
        ranks.await_earlier()
        yield
    except BaseException as error:
        if os.getpid() == owner:
            lost = error.rank if isinstance(error, PeerError) else None
            ranks.tell(error)
        raise
    finally:
        if os.getpid() == owner:
            ranks.clean(lost)
            ranks.leave()
