"""Groups of ranks as programs pass them, and the rank of a group that this process is."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from ._core import Options
from ._errors import ArgumentTypeError, InvalidError, PenstockError
from ._group_store import RendezvousStore, Store

#: By the store of the default group, then by ranks: the part of it that a mesh of several dimensions uses.
_MESHES: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()

#: By store, then by rank: `Member.left`.
_LEFT: WeakKeyDictionary[Store, dict[int, list[list[str]]]] = WeakKeyDictionary()


class Member:
    """One rank of a group.

    Attributes:
        store: The rendezvous store.
        rank: The number of this rank.
        size: The number of ranks.
        prefix: The prefix of the group's keys, if it has a part of the store for itself; else "".
        left: For each load the keys that this rank has left in the store. It deletes them when all have come to a next
            one.
    """

    def __init__(self, store: Store, rank: int, size: int, prefix: str = "") -> None:
        self.store, self.rank, self.size, self.prefix = store, rank, size, prefix
        self.left: list[list[str]] = []
        self._groups: list[Member] = []
        self._numbers = Counter[str]()
        self._over = False
        if not prefix:
            with suppress(TypeError):  # no weak reference to it can be made: they would be kept for ever
                self.left = _LEFT.setdefault(store, {}).setdefault(rank, [])

    def number(self, store: RendezvousStore, what: str) -> int:
        """The number of this rank's next load, or of another thing that all ranks make in the same order."""
        if not self.prefix:
            return store.add(f"penstock/{what}/{self.rank}", 1)
        self._numbers[what] += 1  # no other process counts here
        return self._numbers[what]

    def leave(self, limit: float | None = None) -> None:
        """This rank does nothing more with a group of `new_group`. When all have left, the store has nothing of it.

        ``limit``: seconds that an answer of the store may take. Idempotent.
        """
        if not self.prefix or self._over or getattr(self.store, "delete_key", None) is None:
            return
        self._over = True
        store = RendezvousStore(self.store, Options().peer_timeout if limit is None else limit)
        over = f"{self.prefix}over"
        self.left.append([over, f"{over}/{self.rank}"])
        with suppress(PenstockError):  # the store may be gone, and takes them with it
            store.set(f"{over}/{self.rank}", json.dumps(self._all_left()))
            if store.add(over, 1) == self.size:
                lists = store.get_all([f"{over}/{each}" for each in range(self.size)])
                store.delete(sorted({key for keys in lists for key in json.loads(keys)}))

    def _all_left(self) -> list[str]:
        """The keys of this group and of those that were made of it."""
        return [key for keys in self.left for key in keys] + [key for one in self._groups for key in one._all_left()]


def member_of(group: Any) -> Member:
    """The rank that this process is of a group: a process group, a `DeviceMesh`, or (store, rank, size).

    Raises:
        ArgumentTypeError: it is none of these.
        InvalidError: this process is no member.
    """
    if isinstance(group, Member):
        return group
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


def new_group(group: Any) -> Member:
    """A group of the same ranks, with a part of the store for itself. All ranks make theirs in the same order."""
    of = member_of(group)
    number = of.number(RendezvousStore(of.store, Options().peer_timeout), "corners") if of.size > 1 else 0
    made = Member(of.store, of.rank, of.size, f"{of.prefix}penstock/corner/{number}/" if number else "")
    if of.prefix:
        of._groups.append(made)
    return made


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
        member = member_of(group)
        return member.rank, member.size
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
