"""The words of events: what is summed of reports, what is said of errors, and where events go."""

import os
import sys
import warnings
from typing import Any, NamedTuple, Protocol

from ._errors import CancelledError, PenstockError
from ._report import SOURCES, Report, sources_of

LOG, METRICS = "PENSTOCK_LOG", "PENSTOCK_METRICS"
"""The variables: how events are written (and whether), and the folder of the metrics."""


def rank_of_process() -> int:
    """This process' rank in a distributed job, 0 outside of one. Never imports torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    try:
        return int(os.environ.get("RANK", "0"))
    except ValueError:
        return 0


class Logger(Protocol):
    """The argument of `set_logger`: a `logging.Logger`, or any object with these methods."""

    def info(self, message: str, /) -> object: ...
    def error(self, message: str, /) -> object: ...


class Out(NamedTuple):
    """Where the events of an operation go."""

    format: str | None
    """"json" or "text"; None: no line is written."""
    logger: Logger | str | None
    """The receiver of the lines; a name is that of a logger of Python. None: the standard error output."""
    metrics: str | None
    """The folder of the metrics."""
    spans: bool
    """Whether the program has imported OpenTelemetry."""


class About(NamedTuple):
    """The call that an event is about."""

    verb: str
    of: Any
    """The model's name or address, or files."""
    engine: str | None
    out: Out
    begun: float
    """Unix time."""


def by_source(**nbytes: int) -> tuple[int, ...]:
    """Bytes by source, in the order of `SOURCES`."""
    return tuple(nbytes.get(source, 0) for source in SOURCES)


class Measured(NamedTuple):
    """The keys of reports that are summed."""

    nbytes: int = 0
    tensors: int = 0
    seconds: float = 0.0
    sources: tuple[int, ...] = (0,) * len(SOURCES)
    plan: float = 0.0
    move: float = 0.0
    hand_out: float = 0.0
    sync: float = 0.0
    requests: int = 0
    retries: int = 0
    busy: int = 0
    cache_hits: int = 0
    sent: int = 0
    ranks: int = 0
    choice: str | None = None
    fallbacks: tuple[tuple[str, str, str], ...] = ()
    bound_by: str | None = None
    longest: float = 0.0

    def and_(self, other: "Measured") -> "Measured":
        """Both. What bounded the longest bounds both."""
        longer = self if self.longest >= other.longest else other
        return Measured(
            self.nbytes + other.nbytes,
            self.tensors + other.tensors,
            self.seconds + other.seconds,
            tuple(a + b for a, b in zip(self.sources, other.sources, strict=True)),
            self.plan + other.plan,
            self.move + other.move,
            self.hand_out + other.hand_out,
            self.sync + other.sync,
            self.requests + other.requests,
            self.retries + other.retries,
            self.busy + other.busy,
            self.cache_hits + other.cache_hits,
            self.sent + other.sent,
            max(self.ranks, other.ranks),
            "on" if "on" in (self.choice, other.choice) else self.choice or other.choice,
            (*self.fallbacks, *(one for one in other.fallbacks if one not in self.fallbacks)),
            longer.bound_by,
            longer.longest,
        )


def measured(report: Report) -> Measured:
    """The summed keys of one report of a load or a save."""
    get, sources = report.get, sources_of(report)
    seconds, plan, sync = get("seconds", 0.0), get("plan_seconds", 0.0), get("sync_seconds", 0.0)
    hand_out = get("hand_out_seconds", 0.0)
    network, exchange = get("network") or {}, get("exchange") or {}
    return Measured(
        get("nbytes", 0),
        get("tensors", 0),
        seconds + hand_out,
        tuple(sources.values()),
        plan,
        max(0.0, seconds - plan - sync),
        hand_out,
        sync,
        network.get("requests", 0),
        network.get("retries", 0),
        network.get("busy", 0),
        min(get("resident_bytes", 0), get("nbytes", 0)),
        exchange.get("sent_bytes", 0),
        exchange.get("ranks", 0),
        exchange.get("choice"),
        tuple((one["from"], one["to"], one["reason"]) for one in get("fallbacks", ())),
        get("bottleneck"),
        seconds,
    )


class Failure(NamedTuple):
    """The words of an event for an error. Not the error itself: that holds frames, and every object in them."""

    type: str
    message: str
    file: str | None
    range: tuple[int, int] | None
    status: int | None
    cancelled: bool
    """Whether the caller ended it: by Ctrl-C, by closing or dropping it."""


def failure_of(error: BaseException) -> Failure:
    """The words for an error. The message of another package's error is left out: it may say anything."""
    cancelled = isinstance(error, (CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit))
    if not isinstance(error, PenstockError):
        return Failure(type(error).__name__, "", None, None, None, cancelled)
    return Failure(type(error).__name__, error.message, error.path, error.range, error.status, cancelled)


_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Warns of something that events met, once in a process."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
