"""The plan of ranks that save together: which rank writes which tensor, and which ranks send it. Pure: no torch.

Every tensor is whole in one file. A tensor of which ranks have parts goes to its *owner*, the rank that writes it.
Owners are chosen so that all write about as many bytes: see `_owners`. Tensors come to their owners in one order that
all ranks know, in which the owners take turns: see `sequence`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

from ._dtypes import DTYPES
from ._errors import PlanMismatchError
from ._placements import shape_of
from ._selection import Axes


class Had(NamedTuple):
    """A tensor of one rank, or its part of one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: Axes | None
    """Its part; None: all of it."""
    kind: str
    """The kind of device that the part is on, such as "cuda"."""


class Piece(NamedTuple):
    """A part of a tensor, and the rank that gives it."""

    rank: int
    axes: Axes | None
    kind: str


class Owned(NamedTuple):
    """A tensor of the checkpoint, and the rank that writes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    owner: int
    pieces: list[Piece]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)

    @property
    def is_gathered(self) -> bool:
        """Whether its owner does not have all of it."""
        return any(piece.rank != self.owner or piece.axes is not None for piece in self.pieces)


class File(NamedTuple):
    """A file of the checkpoint."""

    name: str
    owner: int
    tensors: list[int]
    """Numbers of its tensors, in their order in the file."""


class Plan(NamedTuple):
    """The files of all ranks."""

    tensors: list[Owned]
    files: list[File]

    def packed(self) -> list[Any]:
        """The plan as JSON has it."""
        return [self.tensors, self.files]

    @classmethod
    def unpacked(cls, packed: Sequence[Any]) -> Plan:
        tensors, files = packed
        return cls(
            [
                Owned(name, dtype, tuple(shape), owner, [Piece(rank, axes, kind) for rank, axes, kind in pieces])
                for name, dtype, shape, owner, pieces in tensors
            ],
            [File(*file) for file in files],
        )


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return prod(shape) * DTYPES[dtype].bits // 8


def planned(
    lists: Sequence[Sequence[Had]], shards: Callable[[list[Owned]], list[list[int]]], named: Callable[[int, int], str]
) -> Plan:
    """The plan for what all ranks have.

    Args:
        lists: What each rank has, in its order.
        shards: For tensors of one owner: which stand together in a file, and in which order.
        named: The name of a file, by its number from 1 and the number of all.

    Raises:
        PlanMismatchError: ranks have different tensors by one name, or not all parts of one.
    """
    ranks_of: dict[str, list[int]] = {}
    found: dict[tuple[str, int], Had] = {}
    for rank, listed in enumerate(lists):
        for had in listed:
            ranks_of.setdefault(had.name, []).append(rank)
            found[had.name, rank] = had
    divided = [_Divided.of([(rank, found[name, rank]) for rank in ranks]) for name, ranks in ranks_of.items()]
    owners = _owners(divided, len(lists))
    sent = [0] * len(lists)
    tensors = [one.given_to(owner, sent) for one, owner in zip(divided, owners, strict=True)]
    files: list[File] = []
    for owner in range(len(lists)):
        mine = [number for number, tensor in enumerate(tensors) if tensor.owner == owner]
        groups = shards([tensors[number] for number in mine]) if mine else []
        files += [File("", owner, [mine[number] for number in group]) for group in groups]
    return Plan(tensors, [file._replace(name=named(n, len(files))) for n, file in enumerate(files, 1)])


class _Divided(NamedTuple):
    """A tensor, and the ranks that have each of its parts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: list[tuple[Axes | None, list[tuple[int, str]]]]
    may_own: tuple[int, ...]
    """Ranks that have all of it; if there is none, those that have a part, be it without an element."""

    @classmethod
    def of(cls, haves: list[tuple[int, Had]]) -> _Divided:
        _, first = haves[0]
        for rank, had in haves:
            if (had.dtype, had.shape) != (first.dtype, first.shape):
                shown = [f"{one.dtype} of shape {list(one.shape)} on rank {r}" for r, one in (haves[0], (rank, had))]
                text = f"tensor {first.name} is {' and '.join(shown)}; nothing was written"
                raise PlanMismatchError(text, ranks=[rank], tensor=first.name)
        empty = not prod(first.shape)
        whole = [
            (rank, had.kind) for rank, had in haves if had.axes is None or empty or shape_of(had.axes) == had.shape
        ]
        if whole:
            ranks = tuple(rank for rank, _ in whole)
            return cls(first.name, first.dtype, first.shape, [(None, whole)], ranks)
        by_part: dict[Any, tuple[Axes, list[tuple[int, str]]]] = {}
        for rank, had in haves:
            assert had.axes is not None
            if prod(shape_of(had.axes)):
                key = tuple(tuple(tuple(one) for one in ranges) for ranges in had.axes)
                by_part.setdefault(key, (had.axes, []))[1].append((rank, had.kind))
        there = sum(prod(shape_of(axes)) for axes, _ in by_part.values())
        if there != prod(first.shape) or not _are_apart(frozenset(by_part)):
            text = (
                f"tensor {first.name} of shape {list(first.shape)}: the ranks' parts of it do not make a whole, they "
                f"have {there} of {prod(first.shape)} elements; nothing was written"
            )
            raise PlanMismatchError(text, ranks=[rank for rank, _ in haves], tensor=first.name)
        return cls(first.name, first.dtype, first.shape, list(by_part.values()), tuple(rank for rank, _ in haves))

    def given_to(self, owner: int, sent: list[int]) -> Owned:
        """The tensor as this rank writes it: of each part it takes its own, or that of the rank that has sent least."""
        pieces = []
        for axes, ranks in self.parts:
            rank, kind = min(ranks, key=lambda one: (one[0] != owner, sent[one[0]], one[0]))
            pieces.append(Piece(rank, axes, kind))
            if rank != owner:
                sent[rank] += nbytes_of(self.dtype, self.shape if axes is None else shape_of(axes))
        return Owned(self.name, self.dtype, self.shape, owner, pieces)


@cache
def _are_apart(parts: frozenset[Any]) -> bool:
    """Whether no two parts have an element in common: models have few ways to divide a tensor, and many tensors."""
    listed = list(parts)
    return all(_apart(a, b) for number, a in enumerate(listed) for b in listed[:number])


def _apart(a: Any, b: Any) -> bool:
    """Whether two parts differ in one dimension altogether. The ranges of a part have no steps."""
    return any(
        all(past <= begin or end <= first for first, past, _ in one for begin, end, _ in other)
        for one, other in zip(a, b, strict=True)
    )


def _owners(divided: Sequence[_Divided], size: int) -> list[int]:
    """The rank that writes each tensor. Ranks write about as many bytes each, as far as they may own so many.

    Tensors that few ranks may own come first. Neighbours stay together: each rank gets a run of them.
    """
    loads = [0] * size
    owners = [0] * len(divided)
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, one in enumerate(divided):
        groups.setdefault(one.may_own, []).append(number)
    for ranks, numbers in sorted(groups.items(), key=lambda item: (len(item[0]), item[0])):
        sizes = [nbytes_of(divided[number].dtype, divided[number].shape) for number in numbers]
        waiting, left = sorted(ranks), sum(sizes)
        level = _level([loads[rank] for rank in waiting], left)
        for number, nbytes in zip(numbers, sizes, strict=True):
            # A tensor that would not fit by more than its half is the next rank's
            while len(waiting) > 1 and loads[waiting[0]] + nbytes / 2 > level:
                waiting.pop(0)
                level = _level([loads[rank] for rank in waiting], left)
            owners[number] = waiting[0]
            loads[waiting[0]] += nbytes
            left -= nbytes
    return owners


def _level(loads: Sequence[int], nbytes: int) -> float:
    """The height that all reach if so many bytes are poured on these."""
    level, below = 0.0, sorted(loads)
    for count in range(1, len(below) + 1):
        level = (sum(below[:count]) + nbytes) / count
        if count == len(below) or level <= below[count]:
            break
    return level


def sequence(plan: Plan) -> list[int]:
    """Numbers of the tensors that are gathered, in the order in which all ranks bring them to their owners.

    Each owner gets its own in the order of its files. The owners take turns by what each has written by then: so all of
    them have something to write.
    """
    begun: dict[int, int] = {}
    due: list[tuple[int, int, int]] = []
    for file in plan.files:
        for number in file.tensors:
            tensor = plan.tensors[number]
            at = begun.get(file.owner, 0)
            if tensor.is_gathered and tensor.nbytes:
                due.append((at, file.owner, number))
            begun[file.owner] = at + tensor.nbytes
    return [number for _, _, number in sorted(due, key=lambda one: one[:2])]


def sent_kinds(plan: Plan) -> set[str]:
    """The kinds of devices whose memory ranks send each other."""
    sent = (piece for one in plan.tensors if one.nbytes for piece in one.pieces if piece.rank != one.owner)
    return {piece.kind for piece in sent}
