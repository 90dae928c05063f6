"""Ranks that save one checkpoint together: each writes whole tensors, and one request makes all of them visible.

1. The ranks meet (`Watch`), and from then on notice if one is gone. Each says what it has, and rank 0 makes the plan.
2. Rank 0 begins its save, and the others after it: it lists what was there before.
3. Parts of tensors come to their owners in one order. A rank that waits looks at the others.
   With ``wait=False`` the call returns then. A thread does the rest, with the store alone (`_save_thread`).
4. Files become whole, under names with a tag: readers of this library pass over them until an index names them. A
   program that takes every file of a folder finds them. Each rank says that its own are whole, and from then on asks
   before it removes them.
5. The rank that asks first decides, see `SavingRanks.decide`. Rank 0 asks when all are ready, and makes the index
   visible. A rank that gives up asks too: if it is first, nothing becomes visible, and each rank removes its files.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from . import _core, _running
from ._core import Options
from ._described import Described
from ._describing import checked_metadata, describe, device_kind, synchronize
from ._errors import (
    ArgumentTypeError,
    CancelledError,
    InvalidError,
    NotFoundError,
    OutOfMemoryError,
    PeerError,
    PenstockError,
    PlanMismatchError,
)
from ._events import observe
from ._gathering import MessageError, Messages, Whole, check_unmarked, mark_failed, new_tag, packed, why_unsendable
from ._member import member_of, new_group
from ._memory import ADVICE, is_dtensor, part_of_dtensor
from ._paths import is_web
from ._patience import LOOK, asking, patiently
from ._placements import shape_of
from ._progress import Meter, Progress
from ._report import Report
from ._save_job import SaveJob
from ._save_meeting import HIDDEN, LAST_WORD, PUBLISH, UNKNOWN, VISIBLE, SavingRanks, meeting
from ._save_parts import Had, Owned, Piece, Plan, nbytes_of, planned, sent_kinds, sequence
from ._save_room import Room, lack_of_room
from ._save_thread import SaveHandle, SaveThread
from ._saving import SaveRequest, begin, check_room, report_of, supply, target_of

#: Seconds for which rank 0 waits until it sees the files of other ranks: some network file systems show them late.
_SHOWN = 10.0
#: Seconds between two looks of the thread of a job at the other ranks: nobody waits for it.
_SELDOM = 0.2
#: The advice for a DTensor whose parts are not known.
_ADVICE = "pad the tensor, or save the result of its `full_tensor()`, which counts as a replica on each rank"
_SUFFIX = ".safetensors"


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


Ask = Callable[[], tuple[SaveRequest, Mapping[str, Any]]]
"""For the arguments, which are checked then. The other ranks hear what is wrong with them."""


@contextmanager
def _sending(ranks: SavingRanks, group: Any) -> Iterator[None]:
    """Messages are sent through the group: if this fails, some may be under way for ever."""
    owner = os.getpid()
    try:
        check_unmarked(group, ranks.rank, ranks.size)
        yield
    except BaseException:
        if ranks.is_planned and os.getpid() == owner:
            mark_failed(group, ranks.rank, ranks.size)
        raise


def _met(ranks: SavingRanks, request: SaveRequest, tensors: Mapping[str, Any]) -> tuple[Options, dict[str, _Local]]:
    """The options and the tensors of this rank. All ranks have come, and watch each other."""
    options = request.check()
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(f"tensors: expected a dict of tensors, but got a {type(tensors).__name__}")
    local = {name: _local(name, value) for name, value in tensors.items()}
    synchronize([one.described for one in local.values()])
    ranks.meet(options, ("", "", "ranks that save together", "save", "0"))
    return options, local


def save(ask: Ask, group: Any, progress: Progress) -> Report:
    """Saves this rank's part of a checkpoint, with all other ranks of the group."""
    ranks = SavingRanks(new_group(group))
    with meeting(ranks), _sending(ranks, group):
        request, tensors = ask()
        with observe("save", request.shown) as seen:
            options, local = _met(ranks, request, tensors)
            what = f"a save of ranks to {request.shown}"
            with (
                _running.under_way(what),
                Meter(progress, "save", seen) as meter,
                _RankSave(request, options, local, ranks, group, meter) as share,
            ):
                share.gather()
                report = share.finish()
            seen.add(report)
        return report


def start(ask: Ask, group: Any, snapshot: bool) -> SaveJob:
    """The same in the background.

    The plan, and all messages of the process group, come before this returns: on another thread they would mix with
    those of the program. What is left needs this rank's save and the store.
    """
    ranks = SavingRanks(new_group(group))
    with ExitStack() as leaving:
        leaving.enter_context(meeting(ranks))
        with _sending(ranks, group):
            request, tensors = ask()
            seen = observe("save", request.shown).begin()
            try:
                ranks.connect()
                options, local = _met(ranks, request, tensors)
                share = _RankSave(request, options, local, ranks, group, Meter(False, "save"), snapshot=snapshot)
                leaving.enter_context(share)
                del tensors, local
                share.gather()
                ranks.go_apart(share.target)
                return SaveJob(_finished_apart(share, ranks, leaving), request.shown, share.count, request.fsync, seen)
            except BaseException as error:
                seen.end(error)
                raise


def _finished_apart(share: _RankSave, ranks: SavingRanks, leaving: ExitStack) -> SaveHandle:
    """The rest of a save, on a thread of its own, which leaves the contexts at its end."""
    core, files, reads = share.core, share.files, share.reads_tensors
    handed = leaving.pop_all()
    thread = SaveThread(share.finish, handed, ranks.give_up)
    handle = SaveHandle(core, thread, files, reads)
    try:
        thread.start()
    except BaseException:  # Ctrl-C, too: the thread may run by now
        if thread.withdraw():
            leaving.push(handed)
        else:
            handle.close()
        raise
    return handle


class _RankSave:
    """This rank's part of one save."""

    def __init__(
        self,
        request: SaveRequest,
        options: Options,
        local: Mapping[str, _Local],
        ranks: SavingRanks,
        group: Any,
        meter: Meter,
        *,
        snapshot: bool | None = None,
    ) -> None:
        """``snapshot``: copy all tensors first; None: the caller waits until the save is done."""
        self._request, self._options, self._local = request, options, local
        self.target = target_of(request)
        self._ranks, self._rank, self._group, self._meter = ranks, ranks.rank, group, meter
        self._is_job, self._snapshot = snapshot is not None, bool(snapshot)
        self._pace = _SELDOM if self._is_job else LOOK
        self._plan: Plan | None = None
        self._save: _core.Save | None = None
        self._messages: Messages | None = None
        self._reads_tensors = True
        self._tag = 0
        """The tag of this save's messages."""
        self._mine: dict[int, int] = {}
        """The numbers of this rank's tensors in its own save, by their numbers in the plan."""
        self._listed: list[tuple[str, Described]] = []
        self._late: list[int] = []
        """Tensors that are not in memory yet, in the order in which they are written."""
        self._is_sealed = self._is_decided = self._is_over = False

    def __enter__(self) -> _RankSave:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._give_up(error)
        finally:
            self._end_messages()
            if self._save is not None:
                self._save.close()

    def gather(self) -> None:
        """Agrees with the other ranks, and brings all tensors to their owners. No message is sent after that."""
        self._plan = plan = self._agreed()
        _running.saves_to(self._ranks, self.target, of_ranks=True, thread=threading.get_ident())
        self._gather(plan)
        self._end_messages()
        if self._is_job:  # its thread shall keep none of them
            self._local, self._listed, self._group = {}, [], None

    def finish(self) -> Report:
        """Waits until the files of all ranks are whole, and visible. The report of this rank's files."""
        while not self.core.sealed(self._pace):
            self._look()
        self._publish(self.plan)
        report = report_of(self.core, self.count, self._request.fsync)
        report["files"] = self.files
        return report

    @property
    def core(self) -> _core.Save:
        """The save of this rank's files."""
        assert self._save is not None
        return self._save

    @property
    def plan(self) -> Plan:
        """The plan of all ranks."""
        assert self._plan is not None
        return self._plan

    @property
    def files(self) -> list[str]:
        """The names of the files of all ranks, the index last."""
        return [*(file.name for file in self.plan.files), self._index_name()]

    @property
    def count(self) -> int:
        """The number of tensors that this rank writes."""
        return len(self._mine)

    @property
    def reads_tensors(self) -> bool:
        """True if bytes are read from the caller's tensors after all tensors have come to their owners."""
        return self._reads_tensors

    # --- What each rank writes ---

    def _agreed(self) -> Plan:
        """The plan of all ranks. This rank's save has begun."""
        # Also one of another group: rank 0 begins when all have said what they have
        _running.await_saves_to(self.target, self._ranks.look)
        known = [one for one in self._local.values() if one.had is not None]
        # They take memory until they are written, as those that are gathered
        late = [number for number, one in enumerate(known) if self._snapshot or one.described.address is None]
        has = [self._arguments(), [one.had for one in known], late, Room.found(self._ranks.machine)]
        self._ranks.say("has", zlib.compress(json.dumps(has).encode(), 1))
        if self._rank == 0:
            try:
                found = [json.loads(zlib.decompress(one)) for one in self._ranks.all("has")]
                plan = self._planned(found)
            except PlanMismatchError as error:
                self._say_plan({"mismatch": [error.message, error.ranks, error.tensor]})
                raise
            if why := why_unsendable(self._group, 0, self._ranks.size, sent_kinds(plan)):
                self._say_plan({"unsendable": why})
                raise self._unsendable(why)
            if self._is_job and (why := self._lack_of_room(plan, found)):
                self._say_plan({"full": why})
                raise self._full(why)
            self._tag = new_tag()
            self._begin(plan)  # before the others: it lists what is there
            self._ranks.is_planned = True
            self._say_plan({"plan": plan, "tag": self._tag})
            return plan
        told = json.loads(zlib.decompress(self._ranks.first("plan")))
        if "mismatch" in told:
            message, odd, tensor = told["mismatch"]
            raise PlanMismatchError(message, ranks=odd, tensor=tensor)
        if "unsendable" in told:
            raise self._unsendable(told["unsendable"])
        if "full" in told:
            raise self._full(told["full"])
        plan, self._tag = Plan.unpacked(told["plan"]), told["tag"]
        self._ranks.is_planned = True
        self._begin(plan)
        return plan

    def _unsendable(self, why: str) -> InvalidError:
        self._ranks.is_common = True
        return InvalidError(f"{why}; nothing was written")

    def _full(self, why: str) -> OutOfMemoryError:
        self._ranks.is_common = True
        what = "a snapshot" if self._snapshot else "gathering and packing tensors before the call returns"
        return OutOfMemoryError(f"{what} takes, of {why}; nothing was written")

    def _lack_of_room(self, plan: Plan, found: Sequence[Any]) -> str:
        """The reason why ranks of a machine cannot keep their bytes until they are written; "" if they can."""
        late = [{listed[number][0] for number in numbers} for _, listed, numbers, _ in found]
        kept = [0] * len(found)
        for tensor in plan.tensors:
            if tensor.is_gathered or tensor.name in late[tensor.owner]:
                kept[tensor.owner] += tensor.nbytes
        return lack_of_room(kept, [Room(*room) for *_, room in found])

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
        for rank, (arguments, *_) in enumerate(found):
            for name, value in arguments.items():
                if value != first[name]:
                    text = f"rank {rank} saves with {name}={value!r}, and rank 0 with {first[name]!r}"
                    raise PlanMismatchError(f"{text}; nothing was written", ranks=[rank])
        lists = [
            [Had(name, dtype, tuple(shape), *more) for name, dtype, shape, *more in listed] for _, listed, *_ in found
        ]
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
        self._reads_tensors = any(one.address is not None and prod(one.shape) for _, one in self._listed)
        if self._is_job and not self._snapshot:
            nbytes = sum(plan.tensors[number].nbytes for number in self._late)
            check_room(nbytes, "gathering and packing tensors before the call returns")
        request = self._request if self._rank == 0 else self._request.of_other_rank()
        share = ([file.name for file in files], index)
        self._save = begin(request, dict(self._listed), snapshot=self._snapshot, ahead=True, share=share)

    def _described(self, tensor: Owned) -> Described:
        if tensor.is_gathered and tensor.nbytes:
            return Described(tensor.dtype, tensor.shape, None, None, None)
        return self._local[tensor.name].described._replace(shape=tensor.shape)

    # --- Tensors on their way ---

    def _look(self) -> None:
        """Raises the error of this rank's save, or of another rank."""
        self.core.wait(0)
        self._ranks.look()
        self._meter.update(*self.core.progress())

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
            supply(self.core, self._listed)

    def _want(self, number: int) -> None:
        """Waits until there is room for a tensor, beside those that are not written yet."""
        room = None if self._is_job else self._options.staging  # a job has room for all of them
        while not self.core.want(self._mine[number], room, LOOK):
            self._look()

    def _messages_of(self) -> Messages:
        if self._messages is None:
            size, settled = self._ranks.size, self._is_job
            self._messages = Messages(self._group, self._rank, size, self._tag, settled=settled)
        return self._messages

    def _end_messages(self) -> None:
        if self._messages is not None:
            self._messages.close()
            self._messages = None

    def _send(self, tensor: Owned) -> None:
        try:
            self._messages_of().send(self._local[tensor.name].tensor, tensor.owner, self._look)
        except MessageError as error:
            raise self._lost(tensor, tensor.owner, "to", error) from error

    def _receive(self, number: int, tensor: Owned) -> None:
        self._want(number)
        wanted = self.core.wanted()
        assert wanted is not None and wanted[0] == self._mine[number]
        with wanted[1] as memory:
            whole = Whole(memory, tensor.dtype, tensor.shape)
            try:
                for piece in tensor.pieces:
                    whole.put(piece.axes, self._part(tensor, piece))
            finally:
                whole.close()
        self.core.supplied()

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
            return self._ranks.gone(patience=LAST_WORD) or PeerError(why, rank=rank, why=why)
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
        ranks, save = self._ranks, self.core
        self._is_sealed = True
        ranks.say("sealed")
        if self._rank == 0:
            ranks.all("sealed")
            self._check_files(plan)
            if not ranks.decide(PUBLISH):
                raise self._told()
            self._is_decided = True
            save.approve()
        elif self._outcome() == VISIBLE:
            save.approve()
        else:
            raise self._told()
        while not save.wait(self._pace):
            self._meter.update(*save.progress())
            if ranks.give_up.is_set() and self._rank == 0:
                save.close()
                if not save.wait(0):  # a call of it hangs
                    left = "; the new checkpoint may be visible" * save.may_be_visible()
                    raise CancelledError(f"the save was given up by its job before it was done{left}")
                break  # it was done
        self._is_over = ranks.is_visible = True
        self._meter.update(*save.progress(), final=True)
        with suppress(PeerError):  # all files are there, and the new checkpoint is visible: nothing can fail any more
            ranks.say("outcome", VISIBLE)
            if self._rank == 0:
                ranks.all("outcome")

    def _outcome(self) -> bytes:
        """The word of rank 0 about what became of the save."""
        try:
            return self._ranks.first("outcome")
        except PenstockError:
            # Another rank is gone, or this one's job gives up. If rank 0 has decided before, this save ends as it says
            if self._ranks.fate() != VISIBLE:
                raise
            return VISIBLE

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
        """The others hear it. This rank's files go, unless the new checkpoint may be visible."""
        ranks, save = self._ranks, self._save
        if save is None or self._is_over or self._rank == 0 or not self._is_sealed:
            ranks.tell(error)  # first: to clear the place takes seconds
            if self._rank == 0 and save is not None and self._is_decided and not self._is_over:
                save.close()
                with suppress(PenstockError):
                    ranks.say("outcome", UNKNOWN if save.may_be_visible() else HIDDEN)
            return
        fate = UNKNOWN
        try:
            # Rank 0 may publish, which takes as long as its storage takes. Who presses Ctrl-C waits a limited time
            fate = ranks.fate(math.inf if isinstance(error, PenstockError) else ranks.limit)
            ranks.tell(error)
        finally:
            if fate != HIDDEN:
                save.approve()  # they stay
                if isinstance(error, PenstockError):
                    files, is_so = ", ".join(save.files()), "is" if fate == VISIBLE else "may be"
                    error.message += f"; the new checkpoint {is_so} visible, so these files stay: {files}"
