"""A save of the core: its arguments, how it begins, and how its caller waits for it and packs tensors meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from . import _core, _running
from ._choices import LAYOUTS, ORDERS, Layout, Order, Storage, check_choice
from ._core import Options
from ._described import Described
from ._describing import checked_metadata, describe, fill, synchronize
from ._errors import ArgumentTypeError, InvalidError, OutOfMemoryError
from ._options import make_options
from ._paths import is_web, without_secrets
from ._progress import INTERVAL, Meter
from ._report import Report


class SaveRequest(NamedTuple):
    """The arguments of a save."""

    folder: str
    name: str
    metadata: Mapping[str, str] | None
    most: int | None
    """Bytes of tensors per shard."""
    layout: Layout
    order: Order
    fsync: bool
    options: Options | Mapping[str, Any] | None
    storage: Storage | None
    checkpoint: bool
    """The folder is that of a checkpoint: files of an earlier save of the name are removed."""

    @property
    def shown(self) -> str:
        """The place, for messages."""
        folder = without_secrets(self.folder)
        return folder if self.checkpoint else f"{folder}/{self.name}"

    def of_other_rank(self) -> SaveRequest:
        """The same for a rank that leaves the folder, and what was there before, to rank 0."""
        return self._replace(checkpoint=False)

    def check(self) -> Options:
        """The options. Raises for an argument that no save takes."""
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("order", self.order, ORDERS)
        if not isinstance(self.fsync, bool):
            raise InvalidError(f"fsync={self.fsync!r}: give True or False")
        return make_options(self.options)


def target_of(request: SaveRequest) -> _running.Target:
    """The target of a save to the folder of a checkpoint, however the folder is spelled."""
    folder, name = request.folder, request.name.removesuffix(".safetensors")
    if is_web(folder):
        return folder.rstrip("/"), name
    # On this thread, where the core makes the files too: a program that ends, or has left its user, has no other
    return os.path.realpath(folder), name


@contextmanager
def taking_turn(request: SaveRequest) -> Iterator[_running.SaveTurn | None]:
    """Waits for the earlier saves of this process that are in the way of this one. Later ones wait for it. None: a
    single file is in nobody's way.
    """
    if not request.checkpoint:
        yield None
        return
    # The server tells two saves to one address apart: the later one fails
    with _running.turn_to(target_of(request), only_of_ranks=is_web(request.folder)) as turn:
        yield turn


def described(tensors: Mapping[str, Any]) -> dict[str, Described]:
    """The tensors as the core takes them, with all work on them done."""
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(f"tensors: expected a dict of tensors by name, but got a {type(tensors).__name__}")
    found = {name: describe(name, value) for name, value in tensors.items()}
    synchronize(list(found.values()))
    return found


def begin(
    request: SaveRequest,
    found: Mapping[str, Described],
    *,
    snapshot: bool = False,
    ahead: bool = False,
    share: tuple[Sequence[str], str | None] | None = None,
) -> _core.Save:
    """Starts a save in the core. The caller must close it."""
    return _core.Save.start(
        request.folder,
        request.name,
        [(name, d.dtype, d.shape, d.gpu, d.address) for name, d in found.items()],
        checked_metadata(request.metadata),
        request.check(),
        layout=request.layout,
        order=request.order,
        most=request.most,
        sync=request.fsync,
        checkpoint=request.checkpoint,
        keep=[d.keep for d in found.values()],
        storage=request.storage,
        snapshot=snapshot,
        ahead=ahead,
        share=share,
    )


def supply(save: _core.Save, listed: Sequence[tuple[str, Described]]) -> bool:
    """Packs the tensor that the save wants now, if it wants one."""
    wanted = save.wanted()
    if wanted is None:
        return False
    number, memory = wanted
    fill(*listed[number], memory)
    save.supplied()
    return True


def supply_all(save: _core.Save, listed: Sequence[tuple[str, Described]]) -> None:
    """Packs every tensor that must be packed, ahead of the save."""
    for number, (_, tensor) in enumerate(listed):
        if tensor.address is None:
            save.want(number)
            supply(save, listed)


def check_room(nbytes: int, what: str) -> None:
    """Raises OutOfMemoryError if this process cannot have so many bytes more."""
    available = int(_core.probe("/")["memory_available"])
    if nbytes > available:
        raise OutOfMemoryError(
            f"{what} takes {nbytes} bytes of memory, and {available} are available; nothing was written"
        )


def await_save(save: _core.Save, listed: Sequence[tuple[str, Described]], meter: Meter) -> None:
    """Waits for the end of a save, and packs the tensors that it wants. Raises its error."""
    while True:
        over = save.wait(INTERVAL if meter.active else None)
        if not supply(save, listed) and over:
            break
        meter.update(*save.progress())
    meter.update(*save.progress(), final=True)


def report_of(save: _running.RunningSave, tensors: int, fsync: bool) -> Report:
    """The report of a save."""
    return Report(save.report(), tensors=tensors, fsync=fsync)
