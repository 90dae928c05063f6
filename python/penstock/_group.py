"""Several ranks that load together: what they agree on before a byte moves, and how they notice that one is gone.

All of it goes through the rendezvous store of the group (`torch.distributed.Store`): no collective, so a group of some
ranks needs none of the others, and nothing that the program sends through its groups is disturbed.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from . import _core, _running
from ._core import Options
from ._device import Device
from ._errors import InvalidError, PeerError, PenstockError, PlanMismatchError
from ._group_store import RendezvousStore, Store, host_of
from ._member import Member, member_of
from ._options import make_options
from ._request import Agreement
from ._selection import Selection
from ._unwanted import ASKED_FOR, ON_GPU

#: The version of the ranks' protocol. Ranks of different versions must not load together.
_PROTOCOL = 6
#: Seconds between two looks at the other ranks themselves, while this one waits for them.
_LOOK = 0.05
#: Names that an error lists.
_SHOWN = 8


#: By store, then by rank: the ranks that watch each other there (`penstock.joined`).
_JOINED: WeakKeyDictionary[Store, dict[int, list[Watch]]] = WeakKeyDictionary()

#: Loads of which a rank that waits for nobody leaves the keys in the store, for others that come later.
_KEPT = 8
#: Bytes of wants that a rank sets without asking whether another one has set the same.
_FEW = 4096
#: Lists of wants in one question: a list may be large, and each answer has a limit of time.
_WANTS_AT_ONCE = 4


class _Entry(NamedTuple):
    """The entry of a rank in the store."""

    protocol: int
    host: str
    address: str
    port: int
    #: The port at which it says that it is there.
    pulse: int
    #: 16 random bytes, as hexadecimal digits: those of rank 0 name the load.
    token: str
    #: A code that shows others whether they have its key, and nothing else; "" if it has none.
    mark: str
    checkpoint: str
    #: A number that tells the versions of its files apart; those of two machines differ.
    identity: str
    described: str
    order: str
    wants: str
    #: Its `peer_timeout`.
    silence: float
    #: The value of ``exchange=``: "auto", "on" or "off".
    exchange: str
    #: The reason for which it prefers to load alone, if it may choose; "" if it has none.
    alone: str
    #: Its machine, and which ranks are to read for each other: "world" or "node".
    machine: str
    scope: str


def joined_in(member: Member) -> list[Watch]:
    """The watches in the store of a group, whatever part of it the group has. The list may be changed."""
    try:
        return _JOINED.setdefault(member.store, {}).setdefault(member.rank, [])
    except TypeError:  # no weak reference to it can be made: it would be kept for ever
        return []


class Rendezvous:
    """One load of a group, before it begins. Every rank makes one for each load, in the same order.

    ``settled``: the ranks' watch, if they have compared their files already.
    """

    _doing = "load"
    """The verb for an error."""

    def __init__(self, group: Any, settled: Watch | None = None) -> None:
        self._member = member_of(group)
        self._rank, self._size = self._member.rank, self._member.size
        self._store = RendezvousStore(self._member.store, Options().peer_timeout)
        #: All ranks have the same files.
        self._compared = settled is not None
        #: All ranks have come.
        self._met = False
        #: The item that each rank still owes.
        self._awaited = "rank"
        self._over = False
        self._seat: _core.Seat | None = None
        self._number: int | None = None
        #: The keys that this rank has made.
        self._made: list[str] = []
        #: The store has failed after it was needed.
        self._deaf = False
        #: The addresses of all ranks are known: they can be asked whether they are there.
        self._asks = False
        #: The watches of these ranks.
        self._watches = [*joined_in(self._member), *([] if settled is None else [settled])]

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._over and self._size > 1:
            # The others wait for this rank: they hear why it does not come. All ranks see for themselves what differs
            if not isinstance(error, PlanMismatchError):
                self._fail(error)
            if self._seat is not None:
                self._seat.close()  # the frames of the error would hold the port open, and others wait there

    @property
    def _prefix(self) -> str:
        """The prefix of all keys of this load."""
        if self._number is None:
            self._number = self._member.number(self._store, "loads")
        return f"{self._member.prefix}penstock/{self._number}/"

    def _set(self, what: str, value: Any = "") -> None:
        """Sets a key of this load. This rank deletes it when all have come to a next one, if not before."""
        if not self._made:
            self._member.left.append(self._made)
        self._made.append(self._prefix + what)
        self._store.set(self._prefix + what, value)

    def _fail(self, error: BaseException) -> None:
        failed = [self._rank, _host(), f"cannot {self._doing}: {type(error).__name__}: {error}"]
        if isinstance(error, PeerError):
            failed = [error.rank, error.host, f"(rank {self._rank} says so): {error}"]
        if self._store.stalled:
            return  # it would not answer now either
        try:
            if not self._store.check([self._prefix + "failed"]):
                self._set("failed", json.dumps(failed))
        except PenstockError:  # the store may be what has failed: the first error matters
            return

    def _go_on(self) -> bool:
        """True. Raises the error of a rank that cannot load, is gone, or was stopped."""
        self.heed()
        for watch in self._watches:
            gone = watch.gone()
            if gone is None:
                continue
            self.heed()  # it has said why before it went
            watch.heed()
            keys = [f"{self._prefix}{self._awaited}/{rank}" for rank in watch.closed()]
            if not self._met and gone.rank in watch.closed() and self._store.check(keys):
                continue  # they have come, and have loaded alone meanwhile; or their connections will tell
            raise gone
        return True

    def heed(self) -> None:
        """Raises the error that a rank has left in the store."""
        if self._store.check([self._prefix + "failed"]):
            rank, host, why = json.loads(self._store.get(self._prefix + "failed"))
            text = f"rank {rank} ({host}) {why}" if host else f"rank {rank} {why}"
            raise PeerError(text, rank=rank, host=host, why=why)

    def _go_on_meeting(self) -> bool:
        """The same, once all entries were read: ranks meet without the store, and without its news if it is gone."""
        if not self._deaf:
            try:
                failed = self._store.check([self._prefix + "failed"])
            except PenstockError:
                self._deaf, failed = True, False
            if failed:
                self._go_on()
        return True

    def agree(self, selection: Selection, options: Options, order: str, device: Device) -> Agreement | None:
        """Compares what all ranks mean, divides what they want, and connects them. None: this rank is alone.

        Raises:
            PeerError: a rank did not come, or cannot load.
            PlanMismatchError: ranks have different checkpoints or orders.
        """
        if self._size == 1:
            return None
        import hashlib
        import zlib

        store, core = self._store, selection.core
        store.limit = min(options.peer_timeout, options.join_timeout)
        deadline = time.monotonic() + options.join_timeout
        wants = zlib.compress(_core.pack_wants(core, selection.wants, selection.regions), 1)
        wanted = hashlib.sha256(wants).hexdigest()[:32]
        address, token = _address(store, options), os.urandom(16)
        known = _pass(self._rank, token, options)
        seat = self._seat = _core.Seat(address, options, known)
        alone = _rather_alone(selection, options, device)
        waits = options.exchange != "off" and alone != ON_GPU
        before = [keys for keys in self._member.left if keys is not self._made]
        # A question takes longer than a few bytes
        if waits and (len(wants) <= _FEW or not store.check([self._prefix + wanted])):
            self._set(wanted, wants)
        described = f"{len(core)} tensors, {core.nbytes()} bytes in {len(core.files())} files"
        mine = _Entry(
            _PROTOCOL, _host(), address, seat.port, seat.pulse, token.hex(), known.mark(), f"{core.fingerprint():016x}",
            _identity(core), described, order, wanted, options.peer_timeout, options.exchange, alone, _machine(),
            options.scope,
        )  # fmt: skip
        self._set(f"rank/{self._rank}", json.dumps(mine))
        if not waits and self._compared:
            # Ranks that wait see that here
            self._forget(before[: -_KEPT + 1])
            return self._apart(options, alone or ASKED_FOR)
        entries = self._entries(deadline)
        self._met = True
        self._forget(before)  # all ranks have come to this load, so those are over
        _compare_keys(entries, self._rank, known)
        _compare(entries)
        auto, within = options.exchange == "auto", options.scope == "node"
        unreachable = _unreachable(entries)
        if not unreachable:
            seat.watch(_pulses(entries), max(entry.silence for entry in entries))
            self._asks = True
        # Exchange or not: ranks load one version, or none
        if not self._compared and len({entry.identity for entry in entries}) > 1:
            self._compare_contents(core, entries, deadline, options.stall_timeout)
        unreachable = "" if within else unreachable
        if reason := (ASKED_FOR if options.exchange == "off" else auto and (_all_alone(entries) or unreachable)):
            self._part(min(deadline, time.monotonic() + options.peer_timeout))
            return self._apart(options, reason)
        if unreachable:
            raise InvalidError(f"group: {unreachable}")
        members = [rank for rank, entry in enumerate(entries) if not within or entry.machine == mine.machine]
        lists = sorted({entries[rank].wants for rank in members})
        others = [key for key in lists if key != wanted]
        found = dict(zip(others, store.get_all([self._prefix + key for key in others], _WANTS_AT_ONCE), strict=True))
        packed = [zlib.decompress(found.get(key, wants)) for key in lists]
        of_rank = [lists.index(entries[rank].wants) if rank in members else len(lists) for rank in range(self._size)]
        if within:
            # Ranks of one machine do not hear when the others have read everything in the store
            self._part(min(deadline, time.monotonic() + options.peer_timeout))
            here = [entries[rank] for rank in members]
            unreachable = _unreachable(here)
            reason = _NO_OTHERS if len(here) == 1 else (_all_alone(here) or unreachable) if auto else ""
            if reason:
                return self._apart(options, reason)
            if unreachable:
                raise InvalidError(f"group: {unreachable}")
            packed.append(_core.pack_wants(core, [], None))  # what the others want of these
        shares = _core.Shares(core, packed, of_rank, options.exchange == "auto")
        addresses = [(entry.address, entry.port) if rank in members else None for rank, entry in enumerate(entries)]
        seconds = max(1.0, deadline - time.monotonic())
        mesh = seat.join(addresses, bytes.fromhex(entries[0].token), seconds, self._go_on_meeting)
        try:
            self._over = True
            if not within:
                # All are connected, so all have read everything
                self._forget([self._made])
            silence = max(entry.silence for entry in entries)
            return Agreement((shares, mesh), make_options(options, peer_timeout=silence))
        except BaseException:
            mesh.close()  # a traceback would keep it, and it says that this rank is alive
            raise

    def confirm(self) -> None:
        """Waits until all ranks have come so far, however long that takes: those that are gone are noticed."""
        if self._size == 1:
            return
        self._set(f"done/{self._rank}")
        self._await("done", math.inf)
        self._over = True

    def vote(self, core: _core.Checkpoint, options: Options, against: str) -> str:
        """Compares the files of all ranks, which are joined, and what they say of something that all do or none.

        ``against``: why this rank cannot; "" if it can. Returns why not all can.

        Raises:
            PeerError: a rank did not come, or cannot load.
            PlanMismatchError: ranks have different checkpoints.
        """
        if self._size == 1:
            return against
        described = f"{len(core)} tensors, {core.nbytes()} bytes in {len(core.files())} files"
        entry = _Entry(
            _PROTOCOL, _host(), "", 0, 0, "", "", f"{core.fingerprint():016x}", _identity(core), described, "voted on",
            "", options.peer_timeout, options.exchange, against, _machine(), options.scope,
        )  # fmt: skip
        deadline = time.monotonic() + options.join_timeout
        self._set(f"rank/{self._rank}", json.dumps(entry))
        entries = self._entries(deadline)
        self._met = True
        _compare(entries)
        if len({entry.identity for entry in entries}) > 1:
            self._compare_contents(core, entries, deadline, options.stall_timeout)
        self._over = True
        if len({entry.machine for entry in entries}) > 1:
            return "the ranks are on several machines"
        of_others = [f"rank {rank}: {entry.alone}" for rank, entry in enumerate(entries) if entry.alone]
        return against or next(iter(of_others), "")

    def _part(self, deadline: float) -> None:
        """Waits until all ranks have read what they need in the store: it may be in one of their processes."""
        try:
            count = self._store.add(self._prefix + "read", 1)
            if count == 1:
                self._made += [self._prefix + "read", self._prefix + "parted"]  # whoever sets the latter
            if count == self._size:
                self._store.set(self._prefix + "parted", "")
            else:
                now = time.monotonic()
                self._store.wait([self._prefix + "parted"], None, now, deadline - now)
        except PeerError:  # nobody needs the store any more
            return

    def _apart(self, options: Options, reason: str) -> Agreement:
        """Each rank loads alone."""
        self._over = True
        if self._seat is not None:
            self._seat.close()
        return Agreement(None, options, (self._size, reason))

    def _entries(self, deadline: float) -> list[_Entry]:
        found = [json.loads(blob) for blob in self._gathered("rank", deadline)]
        odd = [rank for rank, fields in enumerate(found) if fields[0] != _PROTOCOL]
        if odd:
            ranks = ", ".join(map(str, odd[:_SHOWN]))
            text = f"rank {ranks} has another version of penstock than rank {self._rank}; nothing was read"
            raise PlanMismatchError(text, ranks=odd)
        return [_Entry(*fields) for fields in found]

    def _gathered(self, what: str, deadline: float) -> list[bytes]:
        """The entries of all ranks under one key."""
        return self._store.get_all(self._await(what, deadline))

    def _await(self, what: str, deadline: float) -> list[str]:
        """Waits until all ranks have an entry under one key. Returns the keys."""
        self._awaited = what
        keys = [f"{self._prefix}{what}/{rank}" for rank in range(self._size)]
        begun = time.monotonic()
        failed = self._prefix + "failed"
        while not self._store.wait(keys, failed, begun, min(_LOOK, deadline - time.monotonic())):
            self._go_on()
            self._look(keys)
            if time.monotonic() >= deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if not missing:
                    break
                listed = ", ".join(map(str, missing[:_SHOWN])) + ", ..." * (len(missing) > _SHOWN)
                ranks = f"rank{'s' * (len(missing) > 1)} {listed}"
                why = "did not come to the load in time (join_timeout raises the limit)"
                raise PeerError(f"{ranks} of {self._size} {why}", rank=missing[0], why=why)
        return keys

    def _look(self, keys: list[str]) -> None:
        """Raises the error of a rank that has come, and is not there any more. ``keys``: what ranks are waited for."""
        if self._seat is None or not self._asks:
            return
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        try:
            self._seat.look(missing)
        except PeerError:
            self._go_on()  # it may have said why
            if not self._store.check(keys):
                raise

    def _compare_contents(
        self, core: _core.Checkpoint, entries: Sequence[_Entry], deadline: float, stall_timeout: float
    ) -> None:
        """Compares some pages of each file: those of two training steps have equal headers and sizes."""
        from ._patience import patiently

        files = core.files()
        mine = patiently(core.samples, stall_timeout, files[0] if files else "")
        self._set(f"samples/{self._rank}", json.dumps(mine))
        found = [json.loads(blob) for blob in self._gathered("samples", deadline)]
        for number, values in enumerate(zip(*found, strict=True)):
            odd = _odd(values)
            if odd:
                ranks = ", ".join(f"{rank} ({entries[rank].host})" for rank in odd[:_SHOWN])
                raise PlanMismatchError(
                    f"rank {ranks} has another content in file {number + 1} of {len(files)} than the others have; "
                    "nothing was read but some pages",
                    ranks=odd,
                    path=files[number],
                )

    def _forget(self, loads: list[list[str]]) -> None:
        """Deletes keys that this rank has left in the store."""
        old = [key for keys in loads for key in keys]
        left = self._member.left
        left[:] = [keys for keys in left if not any(keys is one for one in loads)]
        for keys in loads:
            keys.clear()
        with suppress(PenstockError):  # not every store can
            self._store.delete(old)


class Watch(Rendezvous):
    """A rendezvous before the first of several loads. From then on the ranks notice if one is gone or was stopped."""

    _standing: _core.Standing | None = None
    """Connections to the others, and ``_hosts`` theirs, once all have come."""
    _lookout: _core.Lookout | None = None
    """The lookout, which notices a rank that was stopped."""
    _hosts: Sequence[str] = ()

    @property
    def machine(self) -> str:
        """The machine of this rank: the same for two ranks only where one kernel runs them."""
        return _machine()

    def settle(self, core: _core.Checkpoint, options: Options, meant: str, described: str, mine: int = 0) -> int:
        """Compares what all ranks mean. ``described`` says in an error what ``meant`` stands for.

        Returns the bits that any rank has in ``mine``.

        Raises:
            PeerError: a rank did not come, or cannot load.
            PlanMismatchError: ranks have different checkpoints, or mean something else.
        """
        described = f"{len(core)} tensors, {core.nbytes()} bytes in {len(core.files())} files; {described}"
        return self.meet(options, (f"{core.fingerprint():016x}", _identity(core), described, meant, f"{mine:x}"), core)

    def meet(
        self, options: Options, means: tuple[str, str, str, str, str], core: _core.Checkpoint | None = None
    ) -> int:
        """Waits for all ranks, and watches them from then on.

        ``means``: their checkpoint and its identity; what they do, in words and as compared; a number with bits.
        """
        self._store.limit = min(options.peer_timeout, options.join_timeout)
        deadline = time.monotonic() + options.join_timeout
        _running.watches(self, f"rank {self._rank} of {self._size} ranks that load together, which watches the others")
        address, token = _address(self._store, options), os.urandom(16)
        known = _pass(self._rank, token, options)
        self._standing = _core.Standing(address, options, known)
        self._lookout = _core.Lookout(address, options, known)
        checkpoint, identity, described, order, wants = means
        entry = _Entry(
            _PROTOCOL, _host(), address, self._standing.port, self._lookout.pulse, token.hex(), known.mark(),
            checkpoint, identity, described, order, wants, options.peer_timeout, options.exchange, "", "",
            options.scope,
        )  # fmt: skip
        self._set(f"rank/{self._rank}", json.dumps(entry))
        entries = self._entries(deadline)
        _compare_keys(entries, self._rank, known)
        _compare(entries)
        self._hosts = [entry.host for entry in entries]
        # From here on a rank that is stopped is noticed
        silence = max(entry.silence for entry in entries)
        self._lookout.watch(_pulses(entries), silence)
        self._watches.append(self)
        if core is not None and len({entry.identity for entry in entries}) > 1:
            self._compare_contents(core, entries, deadline, options.stall_timeout)
        addresses = [(entry.address, entry.port) for entry in entries]
        named, seconds = bytes.fromhex(entries[0].token), max(1.0, deadline - time.monotonic())
        self._standing.join(addresses, _pulses(entries), named, seconds, silence, self._go_on)
        self._over = True
        found = 0
        for entry in entries:
            found |= int(entry.wants, 16)
        return found

    def closed(self) -> dict[int, int | None]:
        """Ranks that have closed their connections, and for which rank each of them has given up."""
        return dict(self._standing.closed()) if self._standing is not None else {}

    def stopped(self) -> PeerError | None:
        """The error for a rank that was stopped."""
        try:
            if self._lookout is not None:
                self._lookout.look()
        except PeerError as error:
            host = self._hosts[error.rank] if error.rank is not None and error.rank < len(self._hosts) else error.host
            why = error.why or str(error)
            return PeerError(f"rank {error.rank} ({host}) {why}", rank=error.rank, host=host, why=why)
        return None

    def gone(self, patience: float = 0.0) -> PeerError | None:
        """The error for a rank that is gone, or was stopped.

        Those that have given up for another one say so, and it is named.
        """
        if (stopped := self.stopped()) is not None:
            return stopped
        limit = time.monotonic() + patience
        while not (closed := self.closed()) and time.monotonic() < limit:
            time.sleep(_LOOK)
        for rank, blamed in sorted(closed.items(), key=lambda one: (one[1] is not None, one[0])):
            lost = rank if blamed is None else blamed
            why = "is gone: its process has ended, or it has given up"
            text = f"rank {lost} ({self._hosts[lost]}) {why}"
            if lost == self._rank:
                why = f"has given up: it had no sign of life of this rank, {lost}"
                text = f"rank {rank} ({self._hosts[rank]}) {why}"
            elif blamed is not None:
                text = f"{text} (rank {rank} says so)"
            return PeerError(text, rank=lost, host=self._hosts[lost], why=why)
        return None

    def blamed(self, error: Exception) -> Exception:
        """The error to raise for an error of the store: its host may be the rank that is gone."""
        of_store = not isinstance(error, PenstockError) or (isinstance(error, PeerError) and error.rank is None)
        return (self.gone(patience=1.0) if of_store else None) or error

    def drop(self, lost: int | None = None) -> None:
        """Closes the connections. ``lost``: the rank for which this one gives up. Idempotent."""
        if self._standing is not None:
            self._standing.close(lost)
        if self._lookout is not None:
            self._lookout.close()
            self._lookout = None
        _running.watches_no_more(self)

    def clean(self, lost: int | None = None) -> None:
        """Closes the connections, and leaves the group. Idempotent.

        ``lost``: the rank for which this one gives up.
        """
        self.drop(lost)
        if not self._store.stalled:
            self._member.leave(self._store.limit)


def say(member: Member, error: BaseException) -> None:
    """Tells the other ranks why this one does not come to their next load."""
    if member.size > 1:
        with suppress(BaseException), Rendezvous(member):
            raise error


def confirm(group: Any) -> None:
    """Waits until all ranks of a group, which are joined, have come so far.

    Raises:
        PeerError: one of them has failed, is gone, or was stopped.
    """
    with Rendezvous(group) as rendezvous:
        rendezvous.confirm()


def _odd(values: Sequence[object]) -> list[int]:
    """The numbers of those that differ from most."""
    [(usual, _)] = Counter(values).most_common(1)
    return [number for number, value in enumerate(values) if value != usual]


def _identity(core: _core.Checkpoint) -> str:
    """The same on two ranks only where their files are the same."""
    found, everywhere = core.identity()
    if everywhere:
        return f"{found:016x}"
    return f"{found:016x}@{_machine()}"


def _machine() -> str:
    """The same for two ranks only where one kernel runs them: they share its page cache."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return _host()


def _pass(rank: int, token: bytes, options: Options) -> _core.Pass:
    """The code that this rank shows the others. Its key may be in a file, and a file system may hang."""
    from ._patience import patiently

    file = os.environ.get("PENSTOCK_PEER_KEY_FILE")
    if file is None:
        return _core.Pass(rank, token)
    return patiently(lambda: _core.Pass(rank, token), options.stall_timeout, file)


def _pulses(entries: Sequence[_Entry]) -> list[tuple[str, int, bytes]]:
    """Where ranks say that they are there, and by which bytes they are known."""
    return [(entry.address, entry.pulse, bytes.fromhex(entry.token)) for entry in entries]


def _compare_keys(entries: Sequence[_Entry], rank: int, known: _core.Pass) -> None:
    """Raises PlanMismatchError if ranks have different keys, or only some of them have one. It names the fewer."""
    alike = [known.matches(other, bytes.fromhex(entry.token), entry.mark) for other, entry in enumerate(entries)]
    if all(alike):
        return
    # A rank sees who has its own key, and not whether the others have one key
    odd = [other for other, same in enumerate(alike) if same == (2 * sum(alike) < len(alike))]
    ranks = ", ".join(f"{other} ({entries[other].host})" for other in odd[:_SHOWN])
    keyless = [other for other, entry in enumerate(entries) if not entry.mark]
    if keyless and len(keyless) < len(entries):
        without = ", ".join(map(str, keyless[:_SHOWN])) + ", ..." * (len(keyless) > _SHOWN)
        why = f"PENSTOCK_PEER_KEY differs: rank {without} has none, and the others have one"
    else:
        why = f"PENSTOCK_PEER_KEY differs: rank {ranks} has another one than the others, as rank {rank} sees it"
    raise PlanMismatchError(f"{why}; nothing was read. Give all ranks the same key, or none", ranks=odd)


def _compare(entries: Sequence[_Entry]) -> None:
    """Raises PlanMismatchError if ranks mean different things: it names those that differ from most."""
    differences: list[tuple[str, Callable[[_Entry], object]]] = [
        ("has another checkpoint", lambda e: e.checkpoint),
        ("has another order", lambda e: e.order),
        ("has another exchange", lambda e: e.exchange),
        ("has another scope", lambda e: e.scope),
    ]
    for what, of in differences:
        values = [of(entry) for entry in entries]
        odd = _odd(values)
        if odd:
            like = next(rank for rank in range(len(values)) if rank not in odd)
            shown = [like, *odd[:_SHOWN]]
            texts = "; ".join(f"rank {rank} ({entries[rank].host}): {entries[rank].described}" for rank in shown)
            raise PlanMismatchError(
                f"rank {', '.join(map(str, odd[:_SHOWN]))} {what} than the others; nothing was read ({texts})",
                ranks=odd,
            )


def _unreachable(entries: Sequence[_Entry]) -> str:
    """The rank that others cannot reach, and the reason; "" if there is none."""
    if len({entry.host for entry in entries}) > 1:
        for rank, entry in enumerate(entries):
            if ipaddress.ip_address(entry.address).is_loopback:
                return (
                    f"rank {rank} ({entry.host}) is reached at {entry.address} only, and others are on other "
                    "hosts: set GLOO_SOCKET_IFNAME to the interface that they reach, or give its address as bind="
                )
    return ""


#: The reason for which a rank prefers to load alone.
_RESIDENT = "the page cache of every rank holds all of its wanted bytes"
_NO_OTHERS = 'scope="node", and no other rank is on this machine'


def _rather_alone(selection: Selection, options: Options, device: Device) -> str:
    """The reason for which this rank prefers to load alone, if it may choose; "" if it has none."""
    if options.exchange != "auto":
        return ""
    if not device.is_cpu and not device.is_meta:
        return ON_GPU
    if options.io not in ("auto", "mapped", "buffered", "uring_buffered"):
        return ""  # past the page cache, whatever that holds
    from ._patience import patiently

    core = selection.core
    files = core.files()
    resident = patiently(
        lambda: _core.is_resident(core, selection.wants, selection.regions),
        options.stall_timeout,
        files[0] if files else "",
    )
    return _RESIDENT if resident else ""


def _all_alone(entries: Sequence[_Entry]) -> str:
    """The reason for which all ranks load alone; "" if a trial decides."""
    if any(entry.alone == ON_GPU for entry in entries):
        return ON_GPU
    return _RESIDENT if all(entry.alone == _RESIDENT for entry in entries) else ""


def _host() -> str:
    return socket.gethostname()


def _address(store: RendezvousStore, options: Options) -> str:
    """The address at which this rank listens, and at which the others reach it.

    That of ``bind=``; else that of the interface in GLOO_SOCKET_IFNAME; else that from which the store's server is
    reached; else, where the store has no server, that of this host's name.
    """
    if options.bind:
        return str(_core.bound(options.bind))
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if name:
        return _address_of(name)
    host, port = host_of(store.store)
    if host is None:
        try:
            return socket.gethostbyname(socket.gethostname())
        except OSError:
            return "127.0.0.1"
    name = host

    def reached() -> str:
        kind, _, _, _, to = socket.getaddrinfo(name, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(to)  # sends nothing
            return str(probe.getsockname()[0])

    return store.ask(reached, "cannot be reached")


def _address_of(interface: str) -> str:
    try:
        return str(_core.bound(interface))
    except InvalidError as error:
        raise InvalidError(f"GLOO_SOCKET_IFNAME={interface!r}: {error.message}") from error
