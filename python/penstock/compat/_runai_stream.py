"""The life of a streamer of Run:ai's interface: its context, and in it one stream after the other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any

from .. import _device
from .._checkpoint import Checkpoint
from .._errors import InvalidError, TruncatedError
from .._frameworks import need_torch
from ._errors import ClosedStreamerError, value_errors
from ._process_group import told_of_stream
from ._runai_settings import Limit, options_for, ranks_for, scheme_of, warn_of_variables

Opening = Callable[[], tuple[Checkpoint, list[str] | None]]
"""Opens the files; gives the names of the tensors that are wanted, or None for all."""


class Streams:
    """A context in which streams run, one after the other. Leaving it ends the one that runs."""

    def __init__(self) -> None:
        self._entered = False
        self._pairs: Any = None
        """The stream that was asked for: an iterator; None if there is none."""
        self._under_way = 0
        """Generators that hand it out, and have neither ended nor been closed."""
        self.together = False
        """True if the ranks of a group read for each other in it."""

    def enter(self) -> None:
        """Begins the context."""
        self._entered = True

    def leave(self, kind: type[BaseException] | None = None, *_: BaseException | TracebackType | None) -> None:
        """Ends the context and what runs in it."""
        self._entered = False
        self._let_go()

    def check(self) -> None:
        """Raises ClosedStreamerError outside the context."""
        if not self._entered:
            raise ClosedStreamerError("the streamer is outside its context: use it inside `with ... as streamer:`")

    def _let_go(self) -> None:
        pairs, self._pairs = self._pairs, None
        if pairs is not None:
            pairs.close()

    def begin(
        self, paths: Sequence[str], opening: Opening, device: Any, is_distributed: bool, memory_limit: int | None = None
    ) -> Checkpoint | None:
        """Opens files, and makes the stream of them, which reads nothing yet. Lets go of one that nobody has begun.

        Returns:
            None if an object is cut short: whoever reads gets that error then, as from Run:ai's own streamer, which
            does not ask a server for the size.

        Raises:
            InvalidError: the stream before is under way.
        """
        self.check()
        if self._under_way:
            raise InvalidError("the stream before is under way: read it to its end, or close its iterator, first")
        self._let_go()
        need_torch()
        warn_of_variables()
        where = _device.any_device(device)
        ranks = ranks_for(is_distributed, where.is_cpu)
        self.together = ranks is not None
        loads = None if ranks is None else ranks.loads()
        with told_of_stream(loads):
            try:
                checkpoint, names = opening()
            except TruncatedError as error:
                if not any(map(scheme_of, paths)):
                    raise
                self._pairs = _failing(error)
                return None
            limit, size = Limit.of(memory_limit), 1 if ranks is None else ranks.size()
            options = options_for(paths, where.is_cpu, checkpoint.nbytes, size, limit)
            self._pairs = checkpoint.stream(
                device if device is not None else "cpu",
                names,
                framework="pt",
                options=options,
                group=None if loads is None else loads.member,
            )
        return checkpoint

    def nothing(self) -> None:
        """Makes a stream of no files."""
        self.check()
        self._let_go()
        self.together = False

    def pairs(self) -> Generator[tuple[str, Any], None, None]:
        """(name, tensor) of the stream that was made last; nothing if it was read before.

        Raises:
            ClosedStreamerError: the context ended, before or in the middle.
        """
        with value_errors():
            self.check()
            pairs = self._pairs
            if pairs is None:
                return
            self._under_way += 1
            try:
                for name, tensor in pairs:
                    yield name, tensor
                    del tensor  # or this frame would keep it until the next one is there
                    self.check()  # the stream has been closed: it would end here as if that had been all
            finally:
                self._under_way -= 1
                pairs.close()


def _failing(error: TruncatedError) -> Generator[tuple[str, Any], None, None]:
    raise error
    yield
