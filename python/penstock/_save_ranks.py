"""Ranks that save one checkpoint together: each writes whole tensors, and one request makes all of them visible.

1. The ranks meet (`Watch`), and from then on notice if one is gone. Each says what it has, and rank 0 makes the plan.
2. Rank 0 begins its save, and the others after it: it lists what was there before.
3. Parts of tensors come to their owners in one order. A rank that waits looks at the others.
4. Files become whole, under names with a tag: readers of this library pass over them until an index names them. A
   program that takes every file of a folder finds them. Each rank says that its own are whole, and from then on asks
   before it removes them.
5. The rank that asks first decides, see `_Ranks.decide`. Rank 0 asks when all are ready, and makes the index visible.
   A rank that gives up asks too: if it is first, nothing becomes visible, and each rank removes its files.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from . import _core, _running
from ._core import Options
from ._described import Described
from ._describing import checked_metadata, describe, device_kind, synchronize
from ._errors import ArgumentTypeError, InvalidError, NotFoundError, PeerError, PenstockError, PlanMismatchError
from ._events import observe
from ._gathering import MessageError, Messages, Whole, check_unmarked, mark_failed, new_tag, packed, why_unsendable
from ._group import Watch
from ._member import member_of, new_group
from ._memory import ADVICE, is_dtensor, part_of_dtensor
from ._paths import is_web
from ._patience import LOOK, asking, patiently
from ._placements import shape_of
from ._progress import Meter, Progress
from ._report import Report
from ._save_parts import Had, Owned, Piece, Plan, nbytes_of, planned, sent_kinds, sequence
from ._saving import SaveRequest, begin, report_of, supply

#: Seconds for which rank 0 waits until it sees the files of other ranks: some network file systems show them late.
_SHOWN = 10.0
#: Seconds for which a rank waits for the last word of a rank that is gone.
_LAST_WORD = 1.0
#: The advice for a DTensor whose parts are not known.
_ADVICE = "pad the tensor, or save the result of its `full_tensor()`, which counts as a replica on each rank"
_SUFFIX = ".safetensors"
_PUBLISH, _GIVE_UP = b"publish", b"give up"
_VISIBLE, _HIDDEN, _UNKNOWN = b"visible", b"hidden", b"unknown"


class _Local(NamedTuple):
    """A tensor of this rank, or its part of one."""

    had: Had | None
    """None: this rank is not in the DTensor's mesh, and has nothing of it."""
    described: Described
    tensor: Any


def are_several(group: Any) -> bool:
    """Whether several ranks save together."""
    return member_of(group).size > 1


def of_one_rank(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tensors of a rank that saves alone: it has all of its DTensors."""
    if not isinstance(tensors, Mapping):
        return tensors  # `described` says what is wrong
    return {name: _alone(name, value) if is_dtensor(value) else value for name, value in tensors.items()}


def _alone(name: str, value: Any) -> Any:
    local = _local(name, value)
    if local.had is None or (local.had.axes is not None and shape_of(local.had.axes) != local.had.shape):
        raise InvalidError(f"tensor {name} has parts on ranks that are not in group=", tensor=name)
    return local.tensor


def _local(name: str, value: Any) -> _Local:
    """A tensor as the ranks' plan has it."""
    if not is_dtensor(value):
        known = describe(name, value)
        return _Local(Had(name, known.dtype, known.shape, None, device_kind(value)), known, value)
    local = value.detach().to_local()
    known = describe(name, local)
    part = part_of_dtensor(value, known.dtype, known.shape)
    if part.problem is not None:
        problem = part.problem.replace("cannot be loaded", "cannot be saved").replace(ADVICE, _ADVICE)
        raise InvalidError(f"tensor {name} {problem}", tensor=name)
    had = None if part.axes is None else Had(name, known.dtype, part.whole, part.axes, device_kind(local))
    return _Local(had, known, local)


class _Ranks(Watch):
    """The ranks of one save."""

    _doing = "save"
    is_planned = False
    """The plan is known: messages may be under way."""
    is_common = False
    """All ranks have the error of this one, by themselves."""

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def tell(self, error: BaseException) -> None:
        """The others hear why this rank gives up. What differs all ranks see by themselves. Idempotent."""
        if not isinstance(error, PlanMismatchError) and not self.is_common:
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

    def is_hidden(self) -> bool:
        """Whether it is sure that the new checkpoint does not become visible. This rank has given up."""
        try:
            if self.decide(_GIVE_UP):
                return True
            if self._last_word("verdict") == _GIVE_UP:
                return True
            return self._last_word("outcome/0") == _HIDDEN
        except PenstockError:  # the store is gone: nobody knows
            return False

    def _last_word(self, key: str) -> bytes:
        limit = _LAST_WORD if 0 in self.closed() else self._store.limit
        key = self._prefix + key
        there = self._store.wait([key], None, time.monotonic(), limit)
        return self._store.get(key) if there else b""


def save(ask: Callable[[], tuple[SaveRequest, Mapping[str, Any]]], group: Any, progress: Progress) -> Report:
    """Saves this rank's part of a checkpoint, with all other ranks of the group.

    ``ask``: for the arguments, which are checked then. The other ranks hear what is wrong with them.
    """
    owner, lost = os.getpid(), None
    ranks = _Ranks(new_group(group))
    try:
        check_unmarked(group, ranks.rank, ranks.size)
        request, tensors = ask()
        with observe("save", request.shown) as seen:
            options = request.check()
            if not isinstance(tensors, Mapping):
                raise ArgumentTypeError(f"tensors: expected a dict of tensors, but got a {type(tensors).__name__}")
            local = {name: _local(name, value) for name, value in tensors.items()}
            synchronize([one.described for one in local.values()])
            ranks.meet(options, ("", "", "ranks that save together", "save", "0"))
            what = f"a save of ranks to {request.shown}"
            with _running.under_way(what), Meter(progress, "save", seen) as meter:
                report = _RankSave(request, options, local, ranks, group, meter).run()
            seen.add(report)
        return report
    except BaseException as error:
        lost = error.rank if isinstance(error, PeerError) else None
        ranks.tell(error)
        if ranks.is_planned and os.getpid() == owner:
            mark_failed(group, ranks.rank, ranks.size)
        raise
    finally:
        if os.getpid() == owner:
            ranks.clean(lost)


class _RankSave:
    """This rank's part of one save."""

    def __init__(
        self,
        request: SaveRequest,
        options: Options,
        local: Mapping[str, _Local],
        ranks: _Ranks,
        group: Any,
        meter: Meter,
    ) -> None:
        self._request, self._options, self._local = request, options, local
        self._ranks, self._rank, self._group, self._meter = ranks, ranks.rank, group, meter
        self._save: _core.Save | None = None
        self._messages: Messages | None = None
        self._tag = 0
        """The tag of this save's messages."""
        self._mine: dict[int, int] = {}
        """The numbers of this rank's tensors in its own save, by their numbers in the plan."""
        self._listed: list[tuple[str, Described]] = []
        self._late: list[int] = []
        """Tensors that are not in memory yet, in the order in which they are written."""
        self._is_sealed = self._is_decided = self._is_over = False

    def run(self) -> Report:
        """The report of this rank's files."""
        try:
            plan = self._agreed()
            self._gather(plan)
            while not self._core.sealed(LOOK):
                self._look()
            self._publish(plan)
            report = report_of(self._core, len(self._mine), self._request.fsync)
            report["files"] = [*(file.name for file in plan.files), self._index_name()]
            return report
        except BaseException as error:
            self._ranks.tell(error)  # first: to clear the place takes seconds
            self._give_up(error)
            raise
        finally:
            if self._messages is not None:
                self._messages.close()
            if self._save is not None:
                self._save.close()

    @property
    def _core(self) -> _core.Save:
        assert self._save is not None
        return self._save

    # --- What each rank writes ---

    def _agreed(self) -> Plan:
        """The plan of all ranks. This rank's save has begun."""
        has = [self._arguments(), [one.had for one in self._local.values() if one.had is not None]]
        self._ranks.say("has", zlib.compress(json.dumps(has).encode(), 1))
        if self._rank == 0:
            try:
                plan = self._planned([json.loads(zlib.decompress(one)) for one in self._ranks.all("has")])
            except PlanMismatchError as error:
                self._say_plan({"mismatch": [error.message, error.ranks, error.tensor]})
                raise
            if why := why_unsendable(self._group, 0, self._ranks.size, sent_kinds(plan)):
                self._say_plan({"unsendable": why})
                raise self._unsendable(why)
            self._tag = new_tag()
            self._begin(plan)  # before the others: it lists what is there
            self._ranks.is_planned = True
            self._say_plan({"plan": plan, "tag": self._tag})
            return plan
        found = json.loads(zlib.decompress(self._ranks.first("plan")))
        if "mismatch" in found:
            message, odd, tensor = found["mismatch"]
            raise PlanMismatchError(message, ranks=odd, tensor=tensor)
        if "unsendable" in found:
            raise self._unsendable(found["unsendable"])
        plan, self._tag = Plan.unpacked(found["plan"]), found["tag"]
        self._ranks.is_planned = True
        self._begin(plan)
        return plan

    def _unsendable(self, why: str) -> InvalidError:
        self._ranks.is_common = True
        return InvalidError(f"{why}; nothing was written")

    def _say_plan(self, what: Mapping[str, Any]) -> None:
        self._ranks.say("plan", zlib.compress(json.dumps(what).encode(), 1))

    def _arguments(self) -> dict[str, Any]:
        """The arguments that are to be the same on all ranks. Hosts may mount a folder at different paths."""
        of = self._request
        place = of.shown if is_web(of.folder) else ""
        metadata = checked_metadata(of.metadata)
        return {
            "directory": place,
            "name": of.name,
            "metadata": metadata,
            "max_shard_size": of.most,
            "layout": of.layout,
            "order": of.order,
            "fsync": of.fsync,
        }

    def _planned(self, found: Sequence[Any]) -> Plan:
        first = found[0][0]
        for rank, (arguments, _) in enumerate(found):
            for name, value in arguments.items():
                if value != first[name]:
                    text = f"rank {rank} saves with {name}={value!r}, and rank 0 with {first[name]!r}"
                    raise PlanMismatchError(f"{text}; nothing was written", ranks=[rank])
        lists = [[Had(name, dtype, tuple(shape), *more) for name, dtype, shape, *more in listed] for _, listed in found]
        if not any(lists):
            raise PlanMismatchError("no rank has a tensor; nothing was written", ranks=list(range(len(lists))))
        tag, stem = os.urandom(4).hex(), self._request.name.removesuffix(_SUFFIX)
        return planned(lists, self._shards, lambda n, count: f"{stem}-s{tag}-{n:05}-of-{count:05}{_SUFFIX}")

    def _shards(self, tensors: Sequence[Owned]) -> list[list[int]]:
        of = self._request
        heads = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
        metadata = checked_metadata(of.metadata)
        return _core.shards(heads, metadata, layout=of.layout, order=of.order, most=of.most)

    def _index_name(self) -> str:
        return f"{self._request.name.removesuffix(_SUFFIX)}{_SUFFIX}.index.json"

    def _begin(self, plan: Plan) -> None:
        """Starts this rank's save."""
        files = [file for file in plan.files if file.owner == self._rank]
        index = None
        if self._rank == 0:
            places = {plan.tensors[number].name: file.name for file in plan.files for number in file.tensors}
            total = sum(tensor.nbytes for tensor in plan.tensors)
            index = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"
        numbers = [number for number, tensor in enumerate(plan.tensors) if tensor.owner == self._rank]
        self._mine = {number: at for at, number in enumerate(numbers)}
        self._listed = [(plan.tensors[number].name, self._described(plan.tensors[number])) for number in numbers]
        self._late = [
            number
            for file in files
            for number in file.tensors
            if self._listed[self._mine[number]][1].address is None and plan.tensors[number].nbytes
        ]
        request = self._request if self._rank == 0 else self._request.of_other_rank()
        self._save = begin(request, dict(self._listed), ahead=True, share=([file.name for file in files], index))

    def _described(self, tensor: Owned) -> Described:
        if tensor.is_gathered and tensor.nbytes:
            return Described(tensor.dtype, tensor.shape, None, None, None)
        return self._local[tensor.name].described._replace(shape=tensor.shape)

    # --- Tensors on their way ---

    def _look(self) -> None:
        """Raises the error of this rank's save, or of another rank."""
        self._core.wait(0)
        self._ranks.look()
        self._meter.update(*self._core.progress())

    def _gather(self, plan: Plan) -> None:
        """Brings the parts of all tensors to their owners."""
        for number in sequence(plan):
            tensor = plan.tensors[number]
            if tensor.owner == self._rank:
                self._pack_before(number)
                self._receive(number, tensor)
            else:
                for piece in tensor.pieces:
                    if piece.rank == self._rank:
                        self._send(tensor)
        self._pack_before(None)

    def _pack_before(self, gathered: int | None) -> None:
        """Packs the tensors of this rank alone that are written before this one."""
        while self._late:
            number = self._late.pop(0)
            if number == gathered:
                return
            self._want(number)
            supply(self._core, self._listed)

    def _want(self, number: int) -> None:
        """Waits until there is room for a tensor, beside those that are not written yet."""
        while not self._core.want(self._mine[number], self._options.staging, LOOK):
            self._look()

    def _messages_of(self) -> Messages:
        if self._messages is None:
            self._messages = Messages(self._group, self._rank, self._ranks.size, self._tag)
        return self._messages

    def _send(self, tensor: Owned) -> None:
        try:
            self._messages_of().send(self._local[tensor.name].tensor, tensor.owner, self._look)
        except MessageError as error:
            raise self._lost(tensor, tensor.owner, "to", error) from error

    def _receive(self, number: int, tensor: Owned) -> None:
        self._want(number)
        wanted = self._core.wanted()
        assert wanted is not None and wanted[0] == self._mine[number]
        with wanted[1] as memory:
            whole = Whole(memory, tensor.dtype, tensor.shape)
            try:
                for piece in tensor.pieces:
                    whole.put(piece.axes, self._part(tensor, piece))
            finally:
                whole.close()
        self._core.supplied()

    def _part(self, tensor: Owned, piece: Piece) -> Any:
        """The bytes of a part of a tensor that this rank writes."""
        if piece.rank == self._rank:
            return packed(self._local[tensor.name].tensor).cpu()
        nbytes = nbytes_of(tensor.dtype, tensor.shape if piece.axes is None else shape_of(piece.axes))
        try:
            return self._messages_of().receive(nbytes, piece.kind, piece.rank, self._look)
        except MessageError as error:
            raise self._lost(tensor, piece.rank, "from", error) from error

    def _lost(self, tensor: Owned, rank: int, way: str, error: MessageError) -> PeerError:
        """The error for a message that failed: the other rank may be gone, and may have said why."""
        with suppress(PeerError):
            self._ranks.heed()
            why = f"tensor {tensor.name} does not come {way} rank {rank}: {error}"
            return self._ranks.gone(patience=_LAST_WORD) or PeerError(why, rank=rank, why=why)
        return self._told()

    def _told(self) -> PeerError:
        """The error that another rank has left."""
        try:
            self._ranks.look()
        except PeerError as error:
            return error
        return PeerError("another rank has given the save up")

    # --- The end ---

    def _publish(self, plan: Plan) -> None:
        """All files of this rank are whole. Waits for those of the others; then they become visible."""
        ranks, save = self._ranks, self._core
        self._is_sealed = True
        ranks.say("sealed")
        if self._rank == 0:
            ranks.all("sealed")
            self._check_files(plan)
            if not ranks.decide(_PUBLISH):
                raise self._told()
            self._is_decided = True
            save.approve()
        elif ranks.first("outcome") == _VISIBLE:
            save.approve()
        else:
            raise self._told()
        while not save.wait(LOOK):
            self._meter.update(*save.progress())
        self._is_over = True
        self._meter.update(*save.progress(), final=True)
        ranks.say("outcome", _VISIBLE)
        if self._rank == 0:
            with suppress(PeerError):  # it has its files, or it would not have come so far
                ranks.all("outcome")

    def _check_files(self, plan: Plan) -> None:
        """Raises unless this rank sees the files of all ranks: they may have saved to folders of their own."""
        folder, limit = self._request.folder, time.monotonic() + _SHOWN
        if is_web(folder):
            return

        def missing() -> list[str]:
            asking(folder)
            return [file.name for file in plan.files if not Path(folder, file.name).exists()]

        while lacks := patiently(missing, self._options.stall_timeout, folder):
            if time.monotonic() > limit:
                path = f"{folder}/{lacks[0]}"
                owner = next(file.owner for file in plan.files if file.name == lacks[0])
                why = f"rank {owner} has written it, and rank 0 does not see it: give a folder that all ranks share"
                raise NotFoundError(f"{path}: {why}; nothing is visible", path=path)
            self._look()
            time.sleep(LOOK)

    def _give_up(self, error: BaseException) -> None:
        """This rank's files go, unless the new checkpoint may be visible."""
        if self._save is None or self._is_over:
            return
        if self._rank == 0:
            if self._is_decided:
                self._save.close()
                what = _UNKNOWN if self._save.may_be_visible() else _HIDDEN
                with suppress(PenstockError):
                    self._ranks.say("outcome", what)
            return
        if not self._is_sealed:
            return
        hidden = False
        try:
            hidden = self._ranks.is_hidden()
        finally:
            if not hidden:
                self._save.approve()  # they stay
                if isinstance(error, PenstockError):
                    files = ", ".join(self._save.files())
                    error.message += f"; the new checkpoint may be visible, so these files stay: {files}"
