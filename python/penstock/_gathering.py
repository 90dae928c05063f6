"""Parts of tensors on their way from rank to rank: messages through the process group that the caller gave."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import product
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ._dtypes import DTYPES
from ._errors import InvalidError, LimitError
from ._late_imports import importing
from ._member import is_mesh
from ._patience import LOOK
from ._placements import shape_of
from ._selection import Axes

T = TypeVar("T")

#: The kinds of memory that messages of a backend can carry. Of other backends: those that torch uses them for.
_CARRIES = {"gloo": ("cpu",), "nccl": ("cuda",)}
#: Backends that keep messages of different tags apart.
_TAGGED = ("gloo",)
#: By process group: why its messages cannot be told from those of a save that failed.
_LEFT: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


class MessageError(Exception):
    """A message did not go or come: the other rank may be gone."""


class Messages:
    """Messages of this rank, one after the other, on a thread that can be left behind: a rank that waits for one must
    notice that its sender is gone, and Ctrl-C.

    After an error a message may be under way for ever. Its memory belongs to the thread. The messages of another save
    have another ``tag``.

    ``settled``: a tensor may change when it is sent. NCCL sends on a stream, after the call.
    """

    def __init__(self, group: Any, rank: int, size: int, tag: int, *, settled: bool = False) -> None:
        self._group, self._ranks = _process_group(group, rank, size)
        self._tag, self._settled = tag, settled
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._room: dict[str, Any] = {}
        """By kinds of devices: memory that messages come to, one after the other."""

    def send(self, tensor: Any, to: int, look: Callable[[], object]) -> None:
        """Sends the bytes of a tensor. ``look`` is called meanwhile, and may raise."""

        def work() -> None:
            from torch import distributed

            with _on(tensor.device):
                distributed.send(packed(tensor), self._ranks[to], group=self._group, tag=self._tag)
                if self._settled:
                    _await_stream(tensor.device)

        self._do(work, look)

    def receive(self, nbytes: int, kind: str, of: int, look: Callable[[], object]) -> Any:
        """So many bytes, in memory of this process, until the next call. ``kind``: of the device they come from."""
        import torch

        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

        def work() -> Any:
            from torch import distributed

            with _on(device):
                room = self._room.get(kind)
                if room is None or room.numel() < nbytes:
                    del room
                    self._room.pop(kind, None)  # never both
                    self._room[kind] = room = torch.empty(nbytes, dtype=torch.uint8, device=device)
                found = room[:nbytes]
                distributed.recv(found, self._ranks[of], group=self._group, tag=self._tag)
                return found.cpu()

        return self._do(work, look)

    def _do(self, work: Callable[[], T], look: Callable[[], object]) -> T:
        over, result, failure = threading.Event(), list[T](), list[BaseException]()

        def run() -> None:
            try:
                result.append(work())
            except BaseException as error:
                failure.append(error)
            finally:
                over.set()

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="penstock-gather", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                raise LimitError(f"cannot start the thread that sends tensors to other ranks: {error}") from error
        self._work.put(run)
        while not over.wait(LOOK):
            look()
        if failure:
            cause = failure.pop()
            lines = str(cause).splitlines() or [type(cause).__name__]
            raise MessageError(lines[0]) from cause
        return result.pop()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # what it holds on to is the caller's

    def close(self) -> None:
        """Nothing more is sent or received."""
        self._work.put(None)


def _process_group(group: Any, rank: int, size: int) -> tuple[Any, Sequence[int]]:
    """The process group that messages go through, and the global ranks of the group's ranks."""
    with importing():
        from torch import distributed

    if is_mesh(group):
        if group.ndim == 1:
            group = group.get_group()
        else:
            return None, [int(one) for one in group.mesh.flatten().tolist()]
    if not isinstance(group, tuple):
        return group, [distributed.get_global_rank(group, one) for one in range(size)]
    there = distributed.is_available() and distributed.is_initialized()
    if there and (distributed.get_rank(), distributed.get_world_size()) == (rank, size):
        return None, range(size)
    raise InvalidError(
        "group: parts of tensors are on several ranks, and a store brings them nowhere: give a process group or a "
        "DeviceMesh of these ranks"
    )


def new_tag() -> int:
    """A tag for the messages of one save: a large number, so a program's own messages have others."""
    return 1 << 30 | int.from_bytes(os.urandom(4), "big") >> 2


def why_unsendable(group: Any, rank: int, size: int, kinds: Collection[str]) -> str | None:
    """The reason why messages of this group cannot carry memory of these kinds of devices; None: they can."""
    if not kinds:
        return None
    try:
        backends = _backends(_process_group(group, rank, size)[0])
    except InvalidError as error:
        return error.message
    for kind in sorted(kinds):
        backend = backends.get(kind)
        if backend is None:
            return f"group: it has no backend for {kind} devices, and parts of tensors are on them"
        if kind not in _CARRIES.get(backend, (kind,)):
            return (
                f"group: its backend for {kind} devices is {backend}, which sends no memory of them, and parts of "
                f"tensors are there: give a group with another backend for {kind}"
            )
    return None


def _backends(group: Any) -> dict[str, str]:
    """The backends of a process group, by kinds of devices."""
    from torch import distributed

    found: dict[str, str] = {}
    for pair in distributed.get_backend_config(group).split(","):
        kind, _, backend = pair.partition(":")
        found[kind] = backend
    return found


def mark_failed(group: Any, rank: int, size: int) -> None:
    """A save of this group has failed: a message of it may still come, where the backend does not keep tags apart."""
    if "torch.distributed" not in sys.modules:
        return  # the group is a store, which sends nothing
    with suppress(Exception):  # so it may be here, or the group is gone
        found = _process_group(group, rank, size)[0]
        mixing = sorted(set(_backends(found).values()) - set(_TAGGED))
        if mixing:
            _LEFT[_not_none(found)] = (
                f"group: an earlier save with it has failed. Messages of {', '.join(mixing)} that were on their way "
                "then could be taken for those of this save: make a new process group"
            )


def check_unmarked(group: Any, rank: int, size: int) -> None:
    """Raises InvalidError if messages of a save that failed may still come."""
    why = None
    if not _LEFT:
        return
    with suppress(InvalidError):  # a store sends nothing
        why = _LEFT.get(_not_none(_process_group(group, rank, size)[0]))
    if why is not None:
        raise InvalidError(why)


def _not_none(group: Any) -> Any:
    from torch import distributed

    return distributed.group.WORLD if group is None else group


class _on:
    """The device that messages of this thread go through."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __enter__(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.set_device(self._device)

    def __exit__(self, *_: object) -> None: ...


def _await_stream(device: Any) -> None:
    """Waits for the work of this thread's stream on a device."""
    import torch

    current = getattr(getattr(torch, device.type, None), "current_stream", None)
    if device.type != "cpu" and current is not None:
        current(device).synchronize()


def packed(tensor: Any) -> Any:
    """The bytes of a tensor, one after the other."""
    import torch

    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    if plain.element_size() == 1:
        plain = plain.view(torch.uint8)  # there are dtypes that torch cannot copy
    return plain.contiguous().reshape(-1).view(torch.uint8)


class Whole:
    """A tensor that is put together in memory which the save gives."""

    def __init__(self, memory: memoryview, dtype: str, shape: Sequence[int]) -> None:
        import torch

        self._bits = DTYPES[dtype].bits
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8).view(self._in_bytes(shape))

    def _in_bytes(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] * self._bits // 8) if shape else (self._bits // 8,)

    def put(self, axes: Axes | None, part: Any) -> None:
        """Puts the bytes of a part in their places."""
        if axes is None or not axes:
            self._bytes.reshape(-1).copy_(part)
            return
        part = part.view(self._in_bytes(shape_of(axes)))
        for places in product(*map(self._runs, axes[:-1]), self._runs(axes[-1], self._bits)):
            to, of = (tuple(slice(*place[which]) for place in places) for which in (0, 1))
            self._bytes[to].copy_(part[of])

    @staticmethod
    def _runs(ranges: Sequence[tuple[int, int, int]], bits: int = 8) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """For each range of a dimension: its place in the whole, and in the part."""
        found, at = [], 0
        for first, past, _ in ranges:
            count = past - first
            found.append(tuple((a * bits // 8, b * bits // 8) for a, b in ((first, past), (at, at + count))))
            at += count
        return found  # type: ignore[return-value]

    def close(self) -> None:
        """Lets go of the memory."""
        del self._bytes
