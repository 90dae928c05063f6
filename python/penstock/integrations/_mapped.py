"""Tensors that show the files of a checkpoint, for an engine's loader that copies out of them itself.

A recorded load costs a quarter of a millisecond for each tensor, before the first byte moves. Where the page cache has
the files and the parameters are in CPU memory, the engine's own copies may be done by then. So the engine gets mapped
tensors. The files are leased meanwhile: another program that wants to change them waits. As soon as one does, the
tensors that the engine has become private memory, the leases are given back, and the rest is read.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from .. import _core, _running
from .._checkpoint import Checkpoint
from .._core import Options
from .._device import CPU
from .._errors import CancelledError, LimitError, PenstockError, UnsupportedError, raise_if_forked
from .._events import NOTHING, Seen, unseen
from .._framework import Adapter
from .._options import make_options
from .._patience import patiently
from .._progress import Meter
from .._report import Report, merged, report_of
from .._request import Request, prepare
from ._recorder import layer_of, say_written

logger = logging.getLogger("penstock")

RECORDING = 0.25e-3
"""Seconds that it takes to record what an engine does with one tensor."""
COPYING = 4e9
"""Bytes a second that the ranks of a machine copy out of the page cache together."""
MISSING = 64
"""One byte of so many may be missing in the page cache: the load brings them there."""
KEPT = 4_000_000_000
"""Bytes of tensors that an engine may have at once. Before another program may write to a file, they are copied: a few
seconds, of the 45 after which the kernel lets it write."""

# A child would keep the leases when this process has ended
os.register_at_fork(after_in_child=_core.Leased.abandon_all)


def forced(options: Options) -> str:
    """The reason that these options leave no choice; "" if they do."""
    if options.exchange == "on":
        return 'exchange="on" was asked for'
    if options.cache != "auto":
        return f'cache="{options.cache}" was asked for'
    if options.io not in ("auto", "mapped"):
        return f'io="{options.io}" was asked for'
    if options.copy:
        return "copy=True was asked for"
    return ""


def close_all(several: Sequence[Mapped]) -> None:
    """Closes them all. Raises the first error then."""
    errors = []
    for one in several:
        try:
            one.close()
        except PenstockError as error:
            errors.append(error)
    if errors:
        raise errors[0]


class NotMapped(Exception):
    """Tensors cannot be given as mapped files, or need not be; the message says why."""


class Mapped:
    """The tensors of a checkpoint as mapped files, with leases on them.

    Args:
        checkpoint: What to load.
        keep: Which tensors to give; None gives all of them.
        options: Of the load.
        always: Whether the engine's copies are better even where recording takes less time than they do.
        seen: What operators see of it: how far the engine is.

    Raises:
        NotMapped: the recorded way is better, or the only one.
        PenstockError: a file cannot be read, or has changed.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        keep: Callable[[str], bool] | None,
        options: Options,
        always: bool,
        seen: Seen = NOTHING,
    ) -> None:
        self.checkpoint = checkpoint
        self._seen = seen
        self._options = options
        self._owner = os.getpid()
        self._given = 0
        self._broken = ""
        """The reason that the rest was read."""
        self._read: Report | None = None
        self._ended: float | None = None
        self._names = [name for name in checkpoint if keep is None or keep(name)]
        if why := forced(options) or self._not_here(always):
            raise NotMapped(why)
        self._begun = time.perf_counter()
        try:
            request, adapter = prepare(checkpoint, CPU, self._names, None, "pt", options)
        except UnsupportedError as error:
            raise NotMapped(str(error)) from error
        self._adapter: Adapter = adapter
        self._request: Request = request
        try:
            self._load = _running.begin(request, adapter)
        except LimitError as error:
            raise NotMapped(str(error)) from error
        try:
            with Meter(False, "load") as meter:
                try:
                    _running.await_load(self._load, meter)
                except LimitError as error:
                    raise NotMapped(str(error)) from error
            for refused in self._load.report()["fallbacks"]:
                raise NotMapped(refused["reason"])
            leased = self._load.lease(KEPT)
            if isinstance(leased, str):
                raise NotMapped(leased)
        except BaseException:
            self._load.let_go()
            raise
        self.leased = leased

    def _not_here(self, always: bool) -> str:
        """The reason that reading the files is better, as far as is known; "" if it is not."""
        core = self.checkpoint._core
        wants = [core.index(name) for name in self._names]
        if not wants:
            return "there are no tensors"
        files = core.files()
        found = patiently(
            lambda: _core.missing_where_mappable(core, wants), self._options.stall_timeout, files[0] if files else ""
        )
        if isinstance(found, str):
            return found
        missing, span = found
        if missing * MISSING > span:
            return f"{missing} of {span} bytes are not in the page cache"
        if not always and span / COPYING > len(wants) * RECORDING:
            return f"to record {len(wants)} tensors takes less time than to copy {span} bytes"
        return ""

    @property
    def page_timing(self) -> bool | None:
        """The choice of its options."""
        return self._options.page_timing

    def sizes(self) -> dict[str, int]:
        """The bytes of each tensor that it gives."""
        return {name: self.checkpoint[name].nbytes for name in self._names}

    def weights(self, order: str = "file") -> Iterator[tuple[str, Any]]:
        """Yields (name, tensor), once. The tensors are to be read only, and may be kept.

        Args:
            order: "file", or "layer" for the tensors of one layer together.

        Raises:
            ChangedError: another program has changed a file. What was given before has the old bytes.
            InvalidError: a tensor was written to while it became private memory, and a part of that may be lost.
        """
        wants = list(range(len(self._names)))
        if order == "layer":
            wants.sort(key=lambda want: layer_of(self._names[want]))
        meter, done = Meter(False, "load", self._seen), 0
        try:
            for want in wants:
                if meter.active:
                    meter.update(done, self._load.progress()[1])
                    done += self.checkpoint[self._names[want]].nbytes
                made = self.leased.hand(want, partial(self._adapter.tensors, self._load, [want]))
                if made is None:
                    break
                self._given += 1
                yield self._names[want], made.pop()
                raise_if_forked(self._owner, "load")
            self._load.let_go()
            self.leased.end()
            if self._given < len(wants):
                yield from self._rest([self._names[want] for want in wants[self._given :]])
        except BaseException as error:
            # What somebody has of it may be kept for long: by the traceback, for example
            with suppress(PenstockError):
                self.close()
            if isinstance(error, PenstockError):
                say_written(error, [self._names[want] for want in wants[: self._given]])
            raise
        finally:
            self._ended = time.perf_counter()

    def _rest(self, names: list[str]) -> Iterator[tuple[str, Any]]:
        """Reads what can no longer be mapped."""
        self.leased.settle()
        asked = self.leased.asked
        if asked is not None:
            self._broken = f"another program opened {self.checkpoint.files[asked]} to write to it"
        elif self.leased.full:
            self._broken = f"the engine keeps {KEPT / 1e9:g} GB of tensors or more"
        else:
            raise CancelledError("its files are no longer leased", path=self.checkpoint.files[0])
        logger.warning("penstock: %s: %d of %d tensors are read", self._broken, len(names), len(self._names))
        options = make_options(self._options, copy=True, io="auto")
        with unseen():  # the report has it
            rest = self.checkpoint.stream("cpu", names, framework="pt", options=options)
        yield from rest
        self._read = self.checkpoint.last_report

    def report(self) -> Report:
        """The report of the load. Its ``seconds`` contain the engine's work between two tensors."""
        found = report_of(self._load.report(), self.checkpoint._core)
        if self._broken:
            tensors, nbytes = found["tensors"], found["nbytes"]
            found = merged([found, self._read or Report()], 0.0, found["cpu_seconds"])
            # Those that were read are not two
            found["tensors"], found["nbytes"] = tensors, nbytes
            found["fallbacks"] = [*found["fallbacks"], {"from": "mapped", "to": "read", "reason": self._broken}]
        found["seconds"] = (self._ended or time.perf_counter()) - self._begun
        found["gbps"] = found["nbytes"] / found["seconds"] / 1e9
        found["seconds_per_tensor"] = found["seconds"] / max(1, found["tensors"])
        return found

    def close(self) -> None:
        """Gives the leases back. Tensors that somebody has become private memory. Idempotent.

        Raises:
            ChangedError: a file was changed although it was leased.
            InvalidError: a tensor was written to while it became private memory, and a part of that may be lost.
            PenstockError: a tensor cannot become private memory. Another program could change what somebody has.
        """
        if os.getpid() == self._owner:
            self._load.let_go()
            self.leased.settle()
