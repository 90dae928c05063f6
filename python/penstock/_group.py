"""Several ranks that load together: who they are, what they agree on before a byte moves, how they find each other.

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
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from . import _core
from ._core import Options
from ._device import Device
from ._errors import ArgumentTypeError, InvalidError, PeerError, PenstockError, PlanMismatchError
from ._options import make_options
from ._rendezvous import Rendezvous, Store, host_of
from ._request import Agreement
from ._selection import Selection

#: The version of the ranks' protocol. Ranks of different versions must not load together.
_PROTOCOL = 5
#: Seconds between two looks into the store: the first, and the longest. Its own `wait` hears no signal, and those of
#: torch write two warnings to the log whenever a limit passes.
_LOOK = (0.0005, 0.1)
#: The limit of the cost of looks: a pause is this part of the time that was waited already, or more.
_PART = 0.1
#: Seconds between two questions whether a rank has failed. Those that wait on a processor beside ranks that still copy
#: hold them up (docs/performance-notes.md, 27 November).
_NEWS = 0.02
#: Names that an error lists.
_SHOWN = 8


#: By the store of the default group, then by ranks: the part of it that a mesh of several dimensions uses.
_MESHES: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()

#: By store, then by rank: what loads have left there, until a next one comes (prefix, what was wanted).
_LEFT: WeakKeyDictionary[Store, dict[int, list[tuple[str, str | None]]]] = WeakKeyDictionary()

#: By store, then by rank: the ranks that are joined there (`penstock.joined`).
_JOINED: WeakKeyDictionary[Store, dict[int, list[Company]]] = WeakKeyDictionary()


#: Loads of which a rank that waits for nobody leaves that much: others may come later, and see what it was asked for.
_KEPT = 8


class Company(Protocol):
    """Ranks that have met, and that notice if one of them is gone or was stopped."""

    def gone(self) -> PeerError | None:
        """The error for a rank that is gone, or was stopped."""
        ...

    def closed(self) -> Mapping[int, int | None]:
        """Ranks that have closed their connections. They may have come to a load before."""
        ...

    def heed(self) -> None:
        """Raises the error that one of them has left before it went."""
        ...


class Member(NamedTuple):
    """One rank of a group."""

    store: Store
    rank: int
    size: int


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


def member_of(group: Any) -> Member:
    """The rank that this process is of a group: a process group, a `DeviceMesh`, or (store, rank, size).

    Raises:
        ArgumentTypeError: it is none of these.
        InvalidError: this process is no member.
    """
    if isinstance(group, tuple) and len(group) == 3:
        store, rank, size = group
        if not isinstance(rank, int) or not isinstance(size, int) or not 0 <= rank < size:
            raise InvalidError(f"group: rank {rank!r} of {size!r}: give (store, rank, size) with 0 <= rank < size")
        if not all(callable(getattr(store, name, None)) for name in ("set", "get", "add", "check")):
            raise ArgumentTypeError(f"group: {store!r} is not a store: it needs set, get, add and check")
        return Member(store, rank, size)
    if is_mesh(group):
        if group.ndim != 1:
            return _member_of_mesh(group)
        group = group.get_group()
    if not (callable(getattr(group, "rank", None)) and callable(getattr(group, "size", None))):
        raise ArgumentTypeError(
            f"group: a {type(group).__name__} is not a process group, a DeviceMesh or (store, rank, size)"
        )
    from torch.distributed import distributed_c10d

    known = distributed_c10d._world.pg_map.get(group)
    if known is None:
        raise InvalidError("group: this process is not a member of that process group, or it was destroyed")
    return Member(known[1], group.rank(), group.size())


def is_mesh(group: Any) -> bool:
    """Whether this is a `DeviceMesh`."""
    return hasattr(group, "mesh_dim_names") and callable(getattr(group, "get_coordinate", None))


def coordinates_in(mesh: Any) -> tuple[int, ...]:
    """Where this process is in a `DeviceMesh`. Raises InvalidError if it is no member."""
    found = mesh.get_coordinate()
    if found is None:
        raise InvalidError("group: this process is not a member of that DeviceMesh")
    return tuple(found)


def place_in(group: Any) -> tuple[int, int]:
    """(rank, size) of this process in a group. In a `DeviceMesh` the last dimension counts fastest."""
    if not is_mesh(group):
        _, rank, size = member_of(group)
        return rank, size
    rank, size = 0, 1
    for at, count in zip(coordinates_in(group), group.shape, strict=True):
        rank, size = rank * count + at, size * count
    return rank, size


def _member_of_mesh(mesh: Any) -> Member:
    """The rank in a mesh of several dimensions. torch has no group of its ranks, and to make one all would be needed.

    So its ranks meet in a part of the default group's store that is named after them.
    """
    import hashlib

    from torch import distributed
    from torch.distributed import distributed_c10d

    world: Any = distributed.group.WORLD
    rank, size = place_in(mesh)
    known = distributed_c10d._world.pg_map.get(world)
    if known is None:
        raise InvalidError("group: a DeviceMesh of several dimensions needs the default process group, which is gone")
    ranks = f"{tuple(mesh.shape)} {mesh.mesh.flatten().tolist()}"
    parts = _MESHES.setdefault(known[1], {})
    if ranks not in parts:
        prefix = f"penstock/mesh/{hashlib.sha256(ranks.encode()).hexdigest()[:16]}"
        parts[ranks] = distributed_c10d.PrefixStore(prefix, known[1])
    return Member(parts[ranks], rank, size)


def left_in(store: Store, rank: int) -> list[tuple[str, str | None]]:
    """The keys that loads have left in a store: (prefix, wants). The list may be changed."""
    try:
        return _LEFT.setdefault(store, {}).setdefault(rank, [])
    except TypeError:  # no weak reference to it can be made: it would be kept for ever
        return []


def joined_in(store: Any, rank: int) -> list[Company]:
    """The companies of a rank in a store, or in the one of which this is a part. It may be changed."""
    store = getattr(store, "penstock_whole", store)
    try:
        return _JOINED.setdefault(store, {}).setdefault(rank, [])
    except TypeError:  # no weak reference to it can be made: it would be kept for ever
        return []


class Gathering:
    """One load of a group, before it begins. Every rank makes one for each load, in the same order.

    ``compared``: all ranks know already that their files have the same content.
    """

    def __init__(self, group: Any, compared: bool = False) -> None:
        store, self._rank, self._size = member_of(group)
        self._store = Rendezvous(store, Options().peer_timeout)
        self._compared = compared
        #: All ranks have come.
        self._met = False
        #: The item that each rank still owes.
        self._awaited = "rank"
        self._over = False
        self._seat: _core.Seat | None = None
        self._number: int | None = None
        #: The store has failed after it was needed.
        self._deaf = False
        #: The addresses of all ranks are known.
        self._watches = False
        #: The companies in which these ranks have met before.
        self._companies: Sequence[Company] = tuple(joined_in(store, self._rank))

    def __enter__(self) -> Gathering:
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
            self._number = self._store.add(f"penstock/loads/{self._rank}", 1)
        return f"penstock/{self._number}/"

    def _fail(self, error: BaseException) -> None:
        failed = [self._rank, _host(), f"cannot load: {type(error).__name__}: {error}"]
        if isinstance(error, PeerError):
            failed = [error.rank, error.host, f"(rank {self._rank} says so): {error}"]
        if self._store.stalled:
            return  # it would not answer now either
        try:
            if not self._store.check([self._prefix + "failed"]):
                self._store.set(self._prefix + "failed", json.dumps(failed))
        except PenstockError:  # the store may be what has failed: the first error matters
            return

    def _go_on(self) -> bool:
        """True. Raises the error of a rank that cannot load, is gone, or was stopped."""
        self.heed()
        for company in self._companies:
            gone = company.gone()
            if gone is None:
                continue
            self.heed()  # it has said why before it went
            company.heed()
            keys = [f"{self._prefix}{self._awaited}/{rank}" for rank in company.closed()]
            if not self._met and gone.rank in company.closed() and self._store.check(keys):
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

    def _key(self, rank: int) -> str:
        return f"{self._prefix}rank/{rank}"

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
        waits = options.exchange != "off" and alone != _ON_GPU
        if waits and not store.check([self._prefix + wanted]):
            store.set(self._prefix + wanted, wants)
        described = f"{len(core)} tensors, {core.nbytes()} bytes in {len(core.files())} files"
        mine = _Entry(
            _PROTOCOL, _host(), address, seat.port, seat.pulse, token.hex(), known.mark(), f"{core.fingerprint():016x}",
            _identity(core), described, order, wanted, options.peer_timeout, options.exchange, alone, _machine(),
            options.scope,
        )  # fmt: skip
        store.set(self._key(self._rank), json.dumps(mine))
        left, this = left_in(store.store, self._rank), (self._prefix, wanted if waits else None)
        before = list(left)
        left.append(this)
        if not waits and self._compared:
            # Ranks that wait see that here
            for one in before[: -_KEPT + 1]:
                left.remove(one)
                self._forget(*one)
            return self._apart(options, alone or "asked for")
        entries = self._entries(deadline)
        self._met = True
        for one in before:  # all ranks have come to this load, so those are over
            left.remove(one)
            self._forget(*one)
        _compare_keys(entries, self._rank, known)
        _compare(entries)
        auto, within = options.exchange == "auto", options.scope == "node"
        unreachable = _unreachable(entries)
        if not unreachable:
            seat.watch(_pulses(entries), max(entry.silence for entry in entries))
            self._watches = True
        # Exchange or not: ranks load one version, or none
        if not self._compared and len({entry.identity for entry in entries}) > 1:
            self._compare_contents(core, entries, deadline, options.stall_timeout)
        unreachable = "" if within else unreachable
        if reason := ("asked for" if options.exchange == "off" else auto and (_all_alone(entries) or unreachable)):
            self._part(min(deadline, time.monotonic() + options.peer_timeout))
            return self._apart(options, reason)
        if unreachable:
            raise InvalidError(f"group: {unreachable}")
        members = [rank for rank, entry in enumerate(entries) if not within or entry.machine == mine.machine]
        lists = sorted({entries[rank].wants for rank in members})
        packed = [zlib.decompress(wants if key == wanted else store.get(self._prefix + key)) for key in lists]
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
                first = next(rank for rank, entry in enumerate(entries) if entry.wants == wanted)
                self._forget(self._prefix, wanted if first == self._rank else None)
                left.remove(this)
            silence = max(entry.silence for entry in entries)
            return Agreement((shares, mesh), make_options(options, peer_timeout=silence))
        except BaseException:
            mesh.close()  # a traceback would keep it, and it says that this rank is alive
            raise

    def confirm(self) -> None:
        """Waits until all ranks have come so far, however long that takes: those that are gone are noticed."""
        if self._size == 1:
            return
        self._store.set(f"{self._prefix}done/{self._rank}", "")
        left_in(self._store.store, self._rank).append((self._prefix, None))
        self._gathered("done", math.inf)
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
        self._store.set(self._key(self._rank), json.dumps(entry))
        left_in(self._store.store, self._rank).append((self._prefix, None))  # the next load deletes it
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
        pause = _LOOK[0]
        try:
            if self._store.add(self._prefix + "read", 1) == self._size:
                self._store.set(self._prefix + "parted", "")
            while not self._store.check([self._prefix + "parted"]) and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, _LOOK[1])
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
        self._awaited = what
        keys = [f"{self._prefix}{what}/{rank}" for rank in range(self._size)]
        begun = time.monotonic()
        heard = -math.inf
        while not self._store.check(keys):
            waited = time.monotonic() - begun
            if waited - heard >= _NEWS:
                self._go_on()
                heard = waited
            time.sleep(min(max(waited * _PART, _LOOK[0]), _LOOK[1]))
            if waited >= _LOOK[1]:
                self._look(keys)
            if time.monotonic() >= deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if not missing:
                    break
                listed = ", ".join(map(str, missing[:_SHOWN])) + ", ..." * (len(missing) > _SHOWN)
                ranks = f"rank{'s' * (len(missing) > 1)} {listed}"
                why = "did not come to the load in time (join_timeout raises the limit)"
                raise PeerError(f"{ranks} of {self._size} {why}", rank=missing[0], why=why)
        return self._store.get_all(keys)

    def _look(self, keys: list[str]) -> None:
        """Raises the error of a rank that has come, and is not there any more. ``keys``: what ranks are waited for."""
        if self._seat is None or not self._watches:
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
        self._store.set(f"{self._prefix}samples/{self._rank}", json.dumps(mine))
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

    def _forget(self, prefix: str, wanted: str | None) -> None:
        """Deletes what this rank has left in the store."""
        keys = [f"{prefix}{what}/{self._rank}" for what in ("rank", "samples", "done")]
        counters = [prefix + what for what in ("read", "parted")]
        if self._rank == 0:
            keys += counters
        elif (forget := getattr(self._store.store, "penstock_forget", None)) is not None:
            forget(counters)
        try:
            self._store.delete([*keys, prefix + wanted] if wanted is not None else keys)
        except PenstockError:  # not every store can
            return


def confirm(group: Any) -> None:
    """Waits until all ranks of a group, which are joined, have come so far.

    Raises:
        PeerError: one of them has failed, is gone, or was stopped.
    """
    with Gathering(group) as gathering:
        gathering.confirm()


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
_ON_GPU = 'exchange between ranks with GPUs has not been verified on hardware: exchange="on" asks for it'


def _rather_alone(selection: Selection, options: Options, device: Device) -> str:
    """The reason for which this rank prefers to load alone, if it may choose; "" if it has none."""
    if options.exchange != "auto":
        return ""
    if not device.is_cpu and not device.is_meta:
        return _ON_GPU
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
    if any(entry.alone == _ON_GPU for entry in entries):
        return _ON_GPU
    return _RESIDENT if all(entry.alone == _RESIDENT for entry in entries) else ""


def _host() -> str:
    return socket.gethostname()


def _address(store: Rendezvous, options: Options) -> str:
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
