"""Records what an engine's loader does with the tensors of a checkpoint, and then does it as one load.

The loader gets `Deferred` tensors. It narrows, views and copies them as ever. The copies are recorded; `Recorder.run`
loads exactly the bytes that were copied, straight to where they were copied to.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .._checkpoint import Checkpoint
from .._choices import ORDERS, Order, check_choice
from .._destination import Destination
from .._errors import PenstockError
from .._memory import memory_of, share_bytes
from .._report import Report, merged
from ._deferred import (
    SET_DATA,
    Deferred,
    Planned,
    Root,
    arranged,
    assign_data,
    destination_of,
    kind_of,
    piece_of,
    planned,
    with_memory,
)
from ._region import Box
from ._startup import phase

#: Bytes of a tensor that is read with all others of its size, if one of them is read.
_SMALL = 64


def say_written(error: BaseException, names: Sequence[str]) -> None:
    """Adds to an error that ended a load what had been overwritten before that load."""
    error.touched = [*names, *getattr(error, "touched", ())]  # type: ignore[attr-defined]
    if names and isinstance(error, PenstockError):
        error.message += f"; overwritten before: {', '.join(names[:5])}{' and more' * (len(names) > 5)}"


class _Copy:
    """One recorded copy that has not been made."""

    __slots__ = ("begin", "destination", "end", "steps")

    def __init__(self, destination: Destination, begin: int, end: int, steps: tuple[Any, ...]) -> None:
        self.destination = destination
        self.begin = begin
        """Address of the first byte that it writes."""
        self.end = end
        """Address behind the last one."""
        self.steps = steps
        """Where the bytes between lie."""


class _Outstanding:
    """The copies that have not been made, by the memory that they go to. No two of them share a byte."""

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[list[int], list[_Copy]]] = {}
        self._longest: dict[int, int] = {}
        self.count = 0

    def add(self, storage: int, copy: _Copy) -> None:
        begins, copies = self._by_storage.setdefault(storage, ([], []))
        at = len(begins) if not begins or begins[-1] <= copy.begin else bisect_left(begins, copy.begin)
        begins.insert(at, copy.begin)
        copies.insert(at, copy)
        self._longest[storage] = max(self._longest.get(storage, 0), copy.end - copy.begin)
        self.count += 1

    def meeting(self, storage: int, begin: int, end: int) -> list[_Copy]:
        """The entries whose span meets these addresses."""
        found = self._by_storage.get(storage)
        if found is None:
            return []
        begins, copies = found
        first = bisect_left(begins, begin - self._longest[storage])
        met = []
        for copy in copies[first:]:
            if copy.begin >= end:
                break
            if copy.end > begin:
                met.append(copy)
        return met

    def drop(self, storage: int, copy: _Copy) -> None:
        begins, copies = self._by_storage[storage]
        at = next(i for i in range(bisect_left(begins, copy.begin), len(copies)) if copies[i] is copy)
        del begins[at], copies[at]
        self.count -= 1

    def take(self) -> list[_Copy]:
        """All of them, and none are left."""
        found = [copy for _, copies in self._by_storage.values() for copy in copies]
        self._by_storage, self._longest, self.count = {}, {}, 0
        return found


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(its storage's address, address of its first byte, address behind its last one)."""
    size, begin = tensor.element_size(), tensor.data_ptr()
    if tensor.is_contiguous():
        end = begin + tensor.numel() * size
    else:
        end = begin + size * (1 + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True)))
    return tensor.untyped_storage().data_ptr(), begin, end


def _real_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The real tensors among the arguments of an operation, in its lists too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, Deferred):
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _real_tensors(value)


def _onto_itself(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation copies a tensor to its own memory. torch does nothing then."""
    if func is not torch.ops.aten.copy_.default:
        return False
    to, source = args[0], args[1]
    if isinstance(to, Deferred) or isinstance(source, Deferred) or to.is_meta or source.is_meta:
        return False
    kinds = [(one.data_ptr(), one.dtype, one.size(), one.stride()) for one in (to, source)]
    return kinds[0] == kinds[1]


#: Operations that copy a tensor into another one: `Recording.copied` gets them.
_GIVES = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Tensor)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at what every operation of this thread touches, before it runs."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorders = recorders

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would turn its compiler off and on around each operation, which was a tenth of a recording."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view and any(one._outstanding.count for one in self._recorders) and not _onto_itself(func, args):
            # A recorder looks at the destinations of its own deferred tensors itself
            own = None
            if func in _GIVES and isinstance(args[1], Deferred):
                own = args[1]._root.recording
            for value in _real_tensors(args):
                for recorder in self._recorders:
                    if recorder is not own:
                        recorder.about_to_touch(value)
            for value in _real_tensors(kwargs.values()):
                for recorder in self._recorders:
                    recorder.about_to_touch(value)
        return func(*args, **kwargs)


#: Methods that read a tensor's bytes and never reach the dispatcher.
_READ_DIRECTLY = frozenset(getattr(torch.Tensor, name) for name in ("numpy", "tolist", "__array__", "__dlpack__"))


class _Calls(TorchFunctionMode):
    """Sees what the dispatcher never does: ``parameter.data = deferred``, of which torch tells the parameter alone, and
    what reads bytes directly.
    """

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        super().__init__()
        self._recorders = recorders

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READ_DIRECTLY and not isinstance(args[0], Deferred):
            for recorder in self._recorders:
                recorder.about_to_touch(args[0])
        if len(args) == 2 and isinstance(args[1], Deferred) and func == SET_DATA and not isinstance(args[0], Deferred):
            return assign_data(*args)
        return func(*args, **(kwargs or {}))


@contextmanager
def watching(recorders: Sequence[Recorder]) -> Iterator[None]:
    """`Recorder.barrier` for several at once, which may become more meanwhile."""
    with _Calls(recorders), _Watch(recorders):
        yield


class Recorder:
    """Gives an engine's loader the tensors of a checkpoint without their bytes, and loads what it copies of them.

        recorder = Recorder(checkpoint, device=device)
        with recorder.barrier():
            model.load_weights(recorder.weights())
            report = recorder.run(model)

    Args:
        checkpoint: What to load.
        keep: Which tensors to give: a function from a name to True or False. None gives all of them.
        device: The device that the tensors claim to be on. Engines take slower paths for tensors of the CPU.
        options: Of the loads, as for `Checkpoint.load`.

    The loader's threads may use the tensors. Operations on other tensors are watched on the thread of `barrier` only.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        keep: Callable[[str], bool] | None = None,
        device: Any = "cpu",
        options: Any = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.materialised: Counter[str] = Counter()
        """Operations that got a real tensor, by name, and how often. They were not part of a load."""
        self.materialised_bytes = 0
        """Bytes of those tensors."""
        self.copies = 0
        """Copies that were recorded."""
        self.overwritten = 0
        """Recorded copies that were never made, because another one took their place."""
        self._keep = keep
        self._device = torch.device(device)
        self._options = options
        self._outstanding = _Outstanding()
        self._lock = threading.RLock()
        self._reports: list[Report] = []
        self._layout: list[tuple[str, tuple[slice, ...]]] = []
        self._names = checkpoint.keys()
        self._small: dict[int, torch.Tensor] | None = None
        self._small_numbers = {
            number
            for number, info in enumerate(checkpoint.values())
            if info.nbytes <= _SMALL and info.dtype != "F4" and (keep is None or keep(info.name))
        }
        self._written: list[str] = []
        self._group: Any = None
        self._given = False
        #: Whether the load of all ranks has been made, or tried.
        self.joined = False
        self._ended = False

    # What the loader gets

    def expect(self, group: Any) -> None:
        """Has the load of all ranks made before `run`, if the loader has got all tensors and then touches one.

        Every rank makes one such load of each recorder; what else has to be read each reads alone. None: not before
        `run`.
        """
        self._group = group

    def check(self) -> None:
        """Raises MissingDtypeError if torch has no dtype for a tensor, UnsupportedError if no shape. Reads nothing."""
        for info in self.checkpoint.values():
            if self._keep is None or self._keep(info.name):
                kind_of(info)

    def weights(self, prefix: str = "", order: Order | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (``prefix`` + name, deferred tensor) for the tensors of the checkpoint.

        Args:
            prefix: Put before each name.
            order: "file" (the default), or "layer" for the tensors of one layer together.

        Raises:
            MissingDtypeError: torch has no such dtype.
        """
        check_choice("order", order or "file", ORDERS)
        infos = self.checkpoint.values()
        # Nothing changes a tensor without bytes, so those of one shape share one
        twins: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}
        numbers: Any = range(len(infos))
        if order == "layer":
            numbers = sorted(numbers, key=lambda i: layer_of(infos[i].name))
        for number in numbers:
            info = infos[number]
            if self._keep is not None and not self._keep(info.name):
                continue
            dtype, shape = kind_of(info)
            twin = twins.get((shape, dtype))
            if twin is None:
                twin = twins[shape, dtype] = torch.empty(shape, dtype=dtype, device="meta")
            yield prefix + info.name, Deferred(Root(self, number, shape, dtype), twin, self._device)
        self._given = True

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """Within it, an operation that reads or overwrites bytes that are still to come has those loaded first."""
        with watching([self]):
            yield

    # What happens to it

    def copied(self, to: torch.Tensor, source: Deferred) -> bool:
        """Records a copy; see `Recording`."""
        if to.numel() == 0:
            return to.shape == source.shape
        if self._ended:
            return False
        plan = planned(to, source)
        if plan is None:
            return False
        destination = self._destination(plan)
        with self._lock:
            storage, begin, end = _span(to)
            steps = (tuple(to.size()), to.stride())
            for old in self._outstanding.meeting(storage, begin, end):
                if (old.begin, old.end, old.steps) == (begin, end, steps):
                    self._outstanding.drop(storage, old)
                    self.overwritten += 1
                elif _share_bytes(old.destination.into, to):
                    self._load()
                    break
            self._outstanding.add(storage, _Copy(destination, begin, end, steps))
            self.copies += 1
            self._layout.append((destination.name, plan.cut))
        return True

    def _destination(self, plan: Planned) -> Destination:
        return Destination(self._names[plan.tensor.index], plan.into, plan.cut, plan.axes, plan.cast)

    def read(self, tensor: Root, box: Box, to: torch.Tensor) -> None:
        """Reads a box at once; see `Recording`."""
        with phase("reading"):
            if tensor.index in self._small_numbers:
                small = self._small_tensors()[tensor.index]
                piece = piece_of(box, [slice(0, n) for n in small.shape], small)
                if piece is not None:
                    arranged(to, box).copy_(piece)
                    return
            destination = destination_of(self._names[tensor.index], tensor, box, to)
            self.checkpoint.load_into([destination], progress=False, options=self._options)

    def _small_tensors(self) -> dict[int, torch.Tensor]:
        """Tensors of a few elements, all of them in one load: a loader asks for the value of each scale in turn."""
        with self._lock:
            if self._small is None:
                with _disable_current_modes():
                    names = [self._names[number] for number in self._small_numbers]
                    found = self.checkpoint.load("cpu", names, None, "pt", False, self._options)
                self._small = {number: found[self._names[number]] for number in self._small_numbers}
            return self._small

    def wrote(self, index: int) -> None:
        """Knows that a copy was made at once; see `Recording`."""
        with self._lock:
            self._written.append(self._names[index])

    def about_to_touch(self, tensor: torch.Tensor) -> None:
        """Loads what goes to these bytes, if anything does; see `Recording`."""
        if not self._outstanding.count or tensor.is_meta or tensor.layout is not torch.strided:
            return
        try:
            storage, begin, end = _span(tensor)
        except RuntimeError:  # it has no memory that could be asked for, as under `torch.compile`
            return
        with self._lock:
            met = self._outstanding.meeting(storage, begin, end)
            if any(_share_bytes(copy.destination.into, tensor) for copy in met):
                # Some models change their parameters at the end of their own loader, on all ranks
                self._load(self._group if self._given else None)

    def count(self, operation: str, nbytes: int) -> None:
        """Counts an operation that got a real tensor; see `Recording`."""
        with self._lock:
            self.materialised[operation] += 1
            self.materialised_bytes += nbytes

    def _load(self, group: Any = None) -> None:
        """Makes all copies that are outstanding, in one load: with a group in one of all its ranks, and always."""
        group = None if self.joined else group
        copies = self._outstanding.take()
        if copies or group is not None:
            self.joined = self.joined or group is not None
            with phase("reading"), _disable_current_modes():
                destinations = [copy.destination for copy in copies]
                try:
                    report = self.checkpoint.load_into(destinations, progress=False, options=self._options, group=group)
                except BaseException as error:
                    say_written(error, self._written)
                    raise
            self._reports.append(report)
            self._written += [destination.name for destination in destinations]

    def flush(self) -> None:
        """Makes all copies that are outstanding, in one load of this rank alone."""
        with self._lock:
            self._load()

    def end(self) -> None:
        """From now on copies are made at once, one by one: no load comes that could make what would be recorded."""
        self._ended = True

    def redirect(self, made: torch.Tensor, to: torch.Tensor) -> bool:
        """Sends what goes to all of one tensor to another one instead.

        Returns:
            False, and nothing has changed, if not all bytes of the first one are outstanding, or if the other one has
            another shape or dtype.
        """
        if isinstance(made, Deferred) or made.is_meta or to.is_meta or made.data_ptr() == to.data_ptr():
            return False
        like = (made.dtype, made.size(), made.stride(), made.device) == (to.dtype, to.size(), to.stride(), to.device)
        if not like or not made.is_contiguous() or not made.numel():
            return False
        with self._lock:
            storage, begin, end = _span(made)
            met = self._outstanding.meeting(storage, begin, end)
            whole = sum(copy.destination.into.nbytes for copy in met) == end - begin
            if not whole or any(copy.destination.into.dtype != made.dtype for copy in met):
                return False
            if self._outstanding.meeting(*_span(to)):
                self._load()  # of a layer that was given twice
                return False
            whither, first, _ = _span(to)
            with _disable_current_modes():
                flat = to.detach()
                for copy in met:
                    self._outstanding.drop(storage, copy)
                    into = copy.destination.into
                    offset = flat.storage_offset() + (copy.begin - begin) // flat.element_size()
                    moved = flat.as_strided(into.size(), into.stride(), offset)
                    of = copy.destination
                    destination = Destination(of.name, moved, of.cut, of.axes, of.cast)
                    at = copy.begin - begin + first
                    self._outstanding.add(whither, _Copy(destination, at, at + copy.end - copy.begin, copy.steps))
        return True

    # What comes of it

    @property
    def written(self) -> list[str]:
        """The names of the tensors that have been written to their destinations, one for each."""
        return list(self._written)

    @property
    def layout(self) -> list[tuple[str, tuple[slice, ...]]]:
        """(name, cut) of every copy that was recorded, in the order of recording."""
        return list(self._layout)

    def run(self, model: torch.nn.Module | None = None, group: Any = None) -> Report:
        """Loads all that is outstanding.

        Args:
            group: As `Checkpoint.load_into` takes it. All ranks make this call; what is outstanding in each is loaded
                together. What has to be read after that each reads alone.
            model: If given, none of its parameters and buffers is deferred afterwards: those that are get bytes of
                their own, and are counted.

        Returns:
            One report for all loads of this recorder, with ``loads`` (how many there were), ``copies`` (recorded) and
            ``materialised`` (operations that needed bytes at once, by name).

        Raises:
            PenstockError: a load failed. ``touched`` lists the names of the tensors whose destinations were
                overwritten, wholly or in part, by this load and by those before it.
        """
        with self._lock:
            self._load(group)
        if model is not None:
            # Without the lock: settling may read at once, and a thread that reads takes the lock
            self._settle(model)
        with self._lock:
            self._load()
            if not self._reports:
                self._reports.append(self.checkpoint.load_into([], progress=False, options=self._options))
            loads = [report for report in self._reports if report["tensors"]]
            total = merged(
                self._reports,
                sum(report["seconds"] for report in self._reports),
                sum(report["cpu_seconds"] for report in self._reports),
            )
            report = Report(total)
            report["loads"], report["copies"] = len(loads), self.copies
            report["materialised"] = dict(self.materialised)
            report["materialised_bytes"] = self.materialised_bytes
            return report

    def _settle(self, model: torch.nn.Module) -> None:
        """Gives parameters, buffers and other attributes that are deferred memory of their own."""
        for module in model.modules():
            stores = (("parameter", module._parameters), ("buffer", module._buffers), ("attribute", vars(module)))
            for kind, store in stores:
                for name, value in list(store.items()):
                    if not isinstance(value, Deferred):
                        continue
                    self.count(f"{kind} left", value.nbytes)
                    made = with_memory(value)
                    if isinstance(value, torch.nn.Parameter):
                        made = torch.nn.Parameter(made, requires_grad=value.requires_grad)
                    store[name] = made  # type: ignore[assignment]


def layer_of(name: str) -> tuple[Any, ...]:
    """A key that sorts names by layer: numbers in them count as numbers."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split("."))


def _share_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage whose spans meet have a byte in common."""
    one, other = memory_of(a), memory_of(b)
    return one is None or other is None or share_bytes(one, other)
