"""The report of a load: what moved, which way, how fast, and what held it up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import _core


def size_text(nbytes: float) -> str:
    """Bytes for people: 1.50 GB, with GB = 1e9."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"


def time_text(seconds: float) -> str:
    """A time for people: 1.50 s, 20.0 ms."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


class Report(dict[str, Any]):
    """The report of a load or save: a dictionary. Every key is an attribute too, and ``print(report)`` gives a summary.

    Sizes are in bytes, times in seconds, rates in GB/s (1 GB = 1e9 bytes). docs/api.md describes the keys.
    """

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"this report has no {key!r}; it has {', '.join(self)}") from None

    _cast = False

    def handed_out(self, seconds: float, *, cast: bool = False) -> None:
        """Adds what making (and, with ``cast``, casting) tensors took after the bytes were there."""
        self["hand_out_seconds"] = seconds
        self._cast = cast
        if self["tensors"]:
            self["seconds_per_tensor"] = (self["seconds"] + seconds) / self["tensors"]

    def _moved_nothing(self) -> bool:
        """Whether all bytes were in the page cache and were mapped: then a rate would be no rate of anything."""
        if self._cast:
            return False
        taken = {route for route, way in self.get("routes", {}).items() if way.get("extents")}
        return taken == {"mapped"} and self.get("resident_bytes", 0) >= self.get("nbytes", 0) > 0

    def __str__(self) -> str:
        get = self.get
        # A cast is part of what was asked for: its time counts here, though the bytes were there before it
        seconds = get("seconds", 0.0) + get("hand_out_seconds", 0.0)
        rate = f"{get('nbytes', 0) / seconds / 1e9:.2f} GB/s" if seconds else ""
        if self._moved_nothing():
            rate = "mapped, no byte moved"
        tensors = get("tensors", 0)
        lines = [
            f"{tensors} tensor{'s' * (tensors != 1)}, {size_text(get('nbytes', 0))} in {time_text(seconds)}"
            + f": {rate}" * bool(rate)
        ]

        def line(label: str, text: str) -> None:
            lines.append(f"  {label:<14}{text}")

        times = [
            f"{label} {time_text(get(key, 0.0))}"
            for label, key in (
                ("plan", "plan_seconds"),
                ("first tensor", "first_tensor_seconds"),
                ("hand-out", "hand_out_seconds"),
                ("CPU", "cpu_seconds"),
            )
            if get(key) is not None
        ]
        if times:
            line("time", ", ".join(times))
        if get("seconds_per_tensor") is not None:
            line("per tensor", f"{get('seconds_per_tensor', 0.0) * 1e6:.1f} us")
        for route, way in get("routes", {}).items():
            if (
                way.get("extents")
                and get({"network": "network", **dict.fromkeys(FROM_RANKS, "exchange")}.get(route, "")) is None
            ):
                extents = way["extents"]
                line(route, f"{size_text(way.get('bytes', 0))} in {extents} extent{'s' * (extents != 1)}")
        if get("first_touch_bytes"):
            cost = get("first_touch_seconds")
            line(
                "first touch",
                f"{size_text(get('first_touch_bytes', 0))} of that are mapped when they are first touched"
                + (f": about {time_text(cost)}" if cost is not None else ""),
            )
        if get("touched_pages"):
            line("touched", f"{get('touched_pages')} pages in {get('touch_calls')} calls, while the disk worked")
        if network := get("network"):
            found = f"{size_text(network['received_bytes'])} in {network['requests']} requests on "
            found += f"{network['connections']} connections"
            repeated = (("retries", "sent again"), ("moved_requests", "moved"))
            more = [f"{network[key]} {what}" for key, what in repeated if network[key]]
            line("network", ", ".join([found, *more]))
        if exchange := get("exchange"):
            sent, received = size_text(exchange["sent_bytes"]), size_text(exchange["received_bytes"])
            lent = f", {size_text(exchange['lent_bytes'])} of it in shared memory" if exchange["lent_bytes"] else ""
            line("exchanged", f"{received} came from {exchange['ranks'] - 1} other ranks, {sent} went to them{lent}")
            line("exchange", f"{exchange['choice']} ({exchange['reason']})")
        if get("bottleneck"):
            line("bound by", str(get("bottleneck")))
        waits = {k: v for k, v in get("waits", {}).items() if v}
        if waits:
            line("waited for", ", ".join(f"{stage} {time_text(s)}" for stage, s in waits.items()))
        if get("peak_staging"):
            line("staging", f"{size_text(get('peak_staging', 0))} at most")
        if get("slack_bytes") or get("gap_bytes"):
            slack, gaps = size_text(get("slack_bytes", 0)), size_text(get("gap_bytes", 0))
            limit = f" of at most {size_text(get('gap_limit', 0))}" if get("gap_bytes") else ""
            line("extra bytes", f"{slack} for alignment, {gaps} in gaps{limit}")
        if get("cache"):
            line("page cache", ": ".join(str(part) for part in (get("cache"), get("cache_reason")) if part))
        if (fill := get("cache_fill")) is not None:
            text = f"{fill.state}, {size_text(fill.nbytes)} of {size_text(fill.total)} in {time_text(fill.seconds)}"
            line("cache fill", f"{text}: {fill.reason}" if fill.reason else text)
        if (kept := get("disk_cache")) is not None:
            text = f"{size_text(kept.cached_bytes)} from it, {size_text(kept.network_bytes)} from servers, "
            text += f"{size_text(kept.written_bytes)} written"
            text += f", {size_text(kept.dropped_bytes)} dropped" if kept.dropped_bytes else ""
            line("disk cache", f"{text}: {kept.reason}" if kept.reason else text)
        for fallback in get("fallbacks", ()):
            line("fell back", f"{fallback.get('from')} -> {fallback.get('to')}: {fallback.get('reason')}")
        if get("copied_through"):
            line("not in place", f"{len(get('copied_through', ()))} destinations are strided: copied once more")
        for name in ("missing", "unexpected"):
            if get(name):
                line(name, f"{len(get(name, ()))} tensors, {get(name, [''])[0]} first")
        for warning in get("warnings", ()):
            line("warning", str(warning))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Report({super().__repr__()})"


SOURCES = ("mapped", "buffered", "direct", "network", "mirror", "disk_cache", "rank")
"""Where bytes come from, in events and metrics."""
FROM_RANKS = ("rank", "neighbour")
"""The lanes of bytes that other ranks have read: sent through a socket, or taken out of their staging memory."""


def sources_of(report: Report) -> dict[str, int]:
    """The bytes of a load by where they came from, extra ones included; of a save, by how they were written.

    The lanes of the core, by their names. Those of other stores are ``network``; ``rank`` has all that other ranks have
    read. Bytes that a server sent twice count twice.
    """
    found = dict.fromkeys(SOURCES, 0)
    if "file_bytes" in report:
        found["direct"] = report.get("direct_bytes", 0)
        found["buffered"] = max(0, report["file_bytes"] - found["direct"])
        return found
    for lane, way in report.get("routes", {}).items():
        source = "rank" if lane in FROM_RANKS else lane
        found[source if source in found else "network"] += way["bytes"]
    if network := report.get("network"):
        found["network"] = network["received_bytes"]
    return found


def bytes_read(report: Report) -> int:
    """The bytes that a load has read itself, extra ones included: of all lanes except those of other ranks."""
    return sum(way["bytes"] for lane, way in report.get("routes", {}).items() if lane not in FROM_RANKS)


def report_of(found: dict[str, Any], core: _core.Checkpoint) -> Report:
    """The core's counters of one load of this checkpoint as a report."""
    report = Report(found, warnings=core.warnings())
    report["gaps"] = {core.info(tensor)[0]: nbytes for tensor, nbytes in report["gaps"].items()}
    report["gbps"] = report["nbytes"] / report["seconds"] / 1e9 if report["seconds"] else 0.0
    report["seconds_per_tensor"] = report["seconds"] / report["tensors"] if report["tensors"] else None
    return report


def merged(reports: list[Report], seconds: float, cpu_seconds: float) -> Report:
    """One report for loads that took so long as one, some of them at once. What bounded the longest bounded it."""
    if len(reports) == 1:
        return reports[0]
    total = Report()
    for report in reports:
        for key, value in report.items():
            total[key] = _merge(key, total[key], value) if key in total else value
    if reports:
        total.update(seconds=seconds, cpu_seconds=cpu_seconds)
    if total.get("seconds"):
        total["gbps"] = total.get("nbytes", 0) / total["seconds"] / 1e9
    if total.get("tensors"):
        total["seconds_per_tensor"] = total.get("seconds", 0.0) / total["tensors"]
    if reports:  # what bounds the longest part bounds the whole
        total["bottleneck"] = max(reports, key=lambda r: r.get("seconds", 0.0)).get("bottleneck")
    return total


def _merge(key: str, a: Any, b: Any) -> Any:
    if isinstance(a, dict) and isinstance(b, dict):
        return {k: _merge(k, a[k], b[k]) if k in a and k in b else a.get(k, b.get(k)) for k in {**a, **b}}
    if isinstance(a, list) and isinstance(b, list):
        return a + [item for item in b if item not in a]
    if key == "first_touch_seconds" and (a is None or b is None):
        return None  # of a part it is not known
    if key in ("network", "exchange") and (a is None or b is None):
        return b or a
    if key == "disk_cache" and a is not None and b is not None:
        return a + b
    if key in ("cache_fill", "disk_cache"):  # one after the other: the last one ends last
        return b or a
    if isinstance(a, bool) or not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return b if a is None else a
    if key == "first_tensor_seconds":
        return min(a, b)
    return max(a, b) if key in ("peak_staging", "gap_limit", "ranks") else a + b
