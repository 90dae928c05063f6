"""Metrics of this process, in the text format of Prometheus: one file, written whole and renamed after each event.

The node exporter's textfile collector reads such a folder. The name of a file says whose it is, so that the files of
ended processes can be told and removed, and every series has it as a label: no two files have the same series.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ._core import __version__
from ._errors import LimitError, StalledError
from ._event_words import METRICS, warn_once
from ._patience import asking, patiently

PATIENCE = 5.0
"""Seconds after which a folder that does not answer is left alone for good."""
LEFT = 900.0
"""Seconds that the file of an ended process stays: several scrapes."""
FORGOTTEN = 7 * 86400.0
"""The same of a process on another machine, or in another container: whether it has ended cannot be seen."""
MODELS = 32
"""Models that have series of their own. Those of more are "other", so that no file grows without bound."""

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

FAMILIES: dict[str, tuple[str, str]] = {
    "penstock_build_info": ("gauge", "1, with the version of Penstock."),
    "penstock_loads_total": ("counter", "Loads, saves and other calls that have ended, by outcome."),
    "penstock_failures_total": ("counter", "Those that failed, by the type of the error."),
    "penstock_duration_seconds": ("histogram", "How long those took that succeeded."),
    "penstock_phase_seconds_total": ("counter", "Seconds of all of them by phase."),
    "penstock_bytes_total": ("counter", "Bytes of the tensors that were asked for."),
    "penstock_source_bytes_total": ("counter", "Bytes that were read or received, extra ones too, by source."),
    "penstock_cache_hit_bytes_total": ("counter", "Wanted bytes that were in the page cache."),
    "penstock_sent_bytes_total": ("counter", "Bytes that other ranks got of what this rank has read."),
    "penstock_requests_total": ("counter", "Requests to servers."),
    "penstock_retries_total": ("counter", "Requests that failed and were sent again."),
    "penstock_busy_total": ("counter", "Those that failed because the server had too much to do."),
    "penstock_fallbacks_total": ("counter", "What was refused, and done in another way."),
    "penstock_last_end_timestamp_seconds": ("gauge", "When the last load ended, in Unix time."),
    "penstock_last_rate_bytes_per_second": ("gauge", "Rate of the last load that moved bytes."),
}
"""By name: type and help."""

_NAME = re.compile(r"\.?penstock-(.+)-(\d+)-(\d+)-(\d+)\.(?:prom|tmp)")

_Labels = tuple[tuple[str, str], ...]


def _started(pid: int | str) -> str | None:
    """When a process was started, in ticks since the machine was; None if there is none, or nobody may see it."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


class Identity:
    """A name that tells this process from all others that write to the same folder."""

    def __init__(self) -> None:
        self.host = re.sub(r"[^\w.-]", "_", socket.gethostname()) or "host"
        try:
            # Containers may share the host's name, and number their processes alike
            self.namespace = str(Path("/proc/self/ns/pid").stat().st_ino)
        except OSError:
            self.namespace = "0"
        self.pid = os.getpid()
        self.text = f"{self.host}-{self.namespace}-{self.pid}-{_started('self') or 0}"

    def has_ended(self, found: re.Match[str]) -> bool | None:
        """Whether the process has that wrote a file of this name; None if that cannot be known."""
        host, namespace, pid, started = found.groups()
        if (host, namespace) != (self.host, self.namespace):
            return None
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            pass  # another user's
        now = _started(pid)
        return now is not None and now != started


class Registry:
    """The series of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.identity = Identity()
        self._values: dict[str, dict[_Labels, float]] = {name: {} for name in FAMILIES}
        self._counts: dict[_Labels, list[int]] = {}
        self._models: set[str] = set()
        self._pruned = 0.0
        self._hung: set[str] = set()

    def record(self, event: Mapping[str, Any]) -> None:
        """Adds an event to the series."""
        model = event["model"]
        if model not in self._models:
            model = "other" if len(self._models) >= MODELS else model
            self._models.add(model)
        base = {"engine": event["engine"] or "", "rank": str(event["rank"]), "process": self.identity.text}
        of = {"verb": event["verb"], "model": model, **base}

        def add(name: str, amount: float, **more: str) -> None:
            if amount:
                series = self._values[name]
                labels = tuple({**of, **more}.items())
                series[labels] = series.get(labels, 0) + amount

        add("penstock_loads_total", 1, outcome=event["outcome"])
        if event["outcome"] == "failed":
            add("penstock_failures_total", 1, error=event["error"]["type"])
        for phase, seconds in event["phases"].items():
            add("penstock_phase_seconds_total", seconds, phase=phase)
        for source, nbytes in event["sources"].items():
            add("penstock_source_bytes_total", nbytes, source=source)
        add("penstock_bytes_total", event["bytes"])
        add("penstock_cache_hit_bytes_total", event["cache_hits"])
        add("penstock_sent_bytes_total", (event["exchange"] or {}).get("sent", 0))
        add("penstock_requests_total", event["requests"])
        add("penstock_retries_total", event["retries"])
        add("penstock_busy_total", event["busy"])
        add("penstock_fallbacks_total", len(event["fallbacks"]))
        labels = tuple(of.items())
        self._values["penstock_last_end_timestamp_seconds"][labels] = event["time"]
        if event["rate"]:
            self._values["penstock_last_rate_bytes_per_second"][labels] = event["rate"]
        if event["outcome"] == "ok":
            labels = tuple({"verb": event["verb"], **base}.items())
            counts = self._counts.setdefault(labels, [0] * (len(BUCKETS) + 1))
            counts[sum(event["seconds"] > bound for bound in BUCKETS)] += 1
            sums = self._values["penstock_duration_seconds"]
            sums[labels] = sums.get(labels, 0.0) + event["seconds"]
        self._values["penstock_build_info"] = {(("version", __version__), ("process", self.identity.text)): 1}

    def text(self) -> str:
        """All series, as Prometheus reads them."""
        lines = []
        for name, (kind, help) in FAMILIES.items():
            series = self._values[name]
            if not series:
                continue
            lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
            for labels, value in series.items():
                if kind != "histogram":
                    lines.append(f"{name}{_labels(labels)} {_number(value)}")
                    continue
                counts, below = self._counts[labels], 0
                for bound, count in zip((*map(_number, BUCKETS), "+Inf"), counts, strict=True):
                    below += count
                    lines.append(f"{name}_bucket{_labels((*labels, ('le', bound)))} {below}")
                lines += [f"{name}_sum{_labels(labels)} {_number(value)}", f"{name}_count{_labels(labels)} {below}"]
        return "\n".join(lines) + "\n"

    def write(self, folder: str) -> None:
        """Writes the file anew. Removes those of processes that have ended, now and then."""
        place = Path(folder)
        unfinished = place / f".penstock-{self.identity.text}.tmp"
        try:
            unfinished.write_text(self.text())
            unfinished.replace(place / f"penstock-{self.identity.text}.prom")
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise
        now = time.time()
        if now - self._pruned > LEFT:
            self._pruned = now
            self._prune(place, now)

    def _prune(self, place: Path, now: float) -> None:
        with suppress(OSError):
            for entry in os.scandir(place):
                found = _NAME.fullmatch(entry.name)
                if found is None:
                    continue
                asking(entry.path)  # there may be thousands
                with suppress(OSError):  # another process removes it too
                    age, ended = now - entry.stat().st_mtime, self.identity.has_ended(found)
                    if (ended and age > LEFT) or (ended is None and age > FORGOTTEN):
                        os.unlink(entry.path)  # noqa: PTH108 - as `scandir` names it

    def add(self, folder: str, event: Mapping[str, Any]) -> None:
        """Records an event, and writes the file. Where that fails there is one warning, and the next event tries."""
        with self.lock:
            self.record(event)
            if folder in self._hung:
                return
            try:
                patiently(lambda: self.write(folder), PATIENCE, folder)
            except LimitError:  # no more threads, as at the end of the interpreter. Without one a write could hang
                return
            except StalledError:
                self._hung.add(folder)
                warn_once(f"{METRICS}={folder!r}: the folder does not answer: no metrics are written any more")
            except OSError as error:
                if folder not in _refused:
                    _refused.add(folder)
                    why = error.strerror or str(error)
                    warn_once(f"{METRICS}={folder!r}: metrics cannot be written: {why}")


def _labels(labels: _Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return escaped.encode("utf-8", "replace").decode()


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(round(value, 6))


_refused: set[str] = set()
"""Folders that there was a warning of."""
_registry: Registry | None = None
#: A handle whose event is written may be ended by the collector within it.
_making = threading.RLock()


def _forget_the_lock() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _making
    _making = threading.RLock()


os.register_at_fork(after_in_child=_forget_the_lock)


def add(folder: str, event: Mapping[str, Any]) -> None:
    """Records an event, and writes the file of this process."""
    global _registry
    with _making:
        if _registry is None or _registry.identity.pid != os.getpid():  # a forked child counts from zero
            _registry = Registry()
        registry = _registry
    registry.add(folder, event)
