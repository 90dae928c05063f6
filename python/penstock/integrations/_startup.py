"""The phases of an engine's start, and how long each of them takes. Imports no engine, and not torch."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

ENGINES = ("vllm", "sglang")
DEVICES = ("cpu", "cuda")
#: Seconds that a start may take: the largest models need half an hour from a network.
TIMEOUT = 3600.0

#: In the order of a start.
PHASES = (
    "download",
    "import",
    "configuration",
    "model_creation",
    "recording",
    "reading",
    "post_processing",
    "compilation",
)


_MARK = "_penstock_phase"


class Phases:
    """Seconds of each phase of one process, on the monotonic clock.

    Phases nest. While an inner one lasts, the outer one does not count, so all of them together take at most as long as
    the process. Only the thread that made this object is timed.

    Args:
        began: When the process was started, on the monotonic clock, which all processes share; None: now.
        changed: Called with the name of each phase that begins or goes on, and with "" if there is none.
    """

    def __init__(self, began: float | None = None, changed: Callable[[str], None] | None = None) -> None:
        self.began = time.monotonic() if began is None else began
        self.seconds: dict[str, float] = {}
        self.reasons: dict[str, str] = {}
        """The reason that a phase did not take place, or did not end well."""
        self._running: str | None = None
        self._since = self.began
        self._thread = threading.get_ident()
        self._changed = changed

    @contextmanager
    def phase(self, name: str, since: float | None = None) -> Iterator[None]:
        """A phase, which lasts as long as the context. ``since``: when it really began, if that was before."""
        if threading.get_ident() != self._thread:
            yield
            return
        outer = self._running
        self._turn(name)
        if since is not None:
            self._since = since
        try:
            yield
        except BaseException as error:
            if failed_in(error) is None:
                with suppress(AttributeError, TypeError):  # an engine's own kind of exception may take no attributes
                    setattr(error, _MARK, name)
            raise
        finally:
            self._turn(outer)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``; each of its calls is a phase."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return call

    def _turn(self, name: str | None) -> None:
        now = time.monotonic()
        if self._running is not None:
            self.seconds[self._running] = self.seconds.get(self._running, 0.0) + now - self._since
        self._running, self._since = name, now
        if self._changed is not None:
            self._changed(name or "")

    def document(self) -> dict[str, dict[str, Any]]:
        """By phase, as JSON: ``seconds``, or None and the ``reason``."""
        return {
            name: {
                "seconds": None if name in self.reasons else self.seconds.get(name),
                "reason": self.reasons.get(name, None if name in self.seconds else "the engine did not go through it"),
            }
            for name in PHASES
        }


def failed_in(error: BaseException) -> str | None:
    """The innermost phase that an exception ended."""
    found: str | None = getattr(error, _MARK, None)
    return found


_measured: Phases | None = None


def measure(phases: Phases) -> None:
    """Has `phase` count in this object, in this process, from now on."""
    global _measured
    _measured = phases


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase of the start that is measured, if one is."""
    if _measured is None:
        yield
        return
    with _measured.phase(name):
        yield
