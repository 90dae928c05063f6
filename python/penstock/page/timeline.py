"""A load from its trace: its lanes, what bounded it, and which events can be drawn as one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .units import duration, percent

#: Kinds of lanes from top to bottom.
KINDS = ("plan", "engine", "read", "copy", "device", "allocate", "hand-out", "consumer")
STEPS = 700  # of the time axis: what is closer than one of them cannot be told apart on a screen
TINY = 3  # steps: events shorter than that are drawn together with their neighbours
LONGEST = 12  # steps: what is drawn together

Interval = tuple[float, float]


@dataclass(frozen=True)
class Event:
    """One piece of work; microseconds from the start of the load."""

    name: str
    route: str  # its `cat`
    begin: float
    end: float
    file: str | None = None
    offset: int | None = None
    nbytes: int = 0


@dataclass
class Lane:
    name: str
    events: list[Event] = field(default_factory=list)

    @cached_property
    def kind(self) -> str:
        return re.sub(r"[\s#:]*\d+$", "", self.name)

    @cached_property
    def number(self) -> int:
        found = re.search(r"\d+$", self.name)
        return int(found[0]) if found else 0


@dataclass(frozen=True)
class Bar:
    """One event, or several tiny ones that are drawn as one."""

    begin: float
    end: float
    busy: float
    events: tuple[Event, ...]


def lanes(trace: dict[str, Any]) -> list[Lane]:
    """The lanes of a Chrome trace that hold events, in the order of the page.

    Raises:
        ValueError: this is no such trace.
    """
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise ValueError("this is not a trace: it has no list of traceEvents")
    found: dict[tuple[Any, Any], Lane] = {}
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            found[event.get("pid"), event.get("tid")] = Lane(str(event["args"]["name"]))
    for event in events:
        if event.get("ph") != "X":
            continue
        key = event.get("pid"), event.get("tid")
        lane = found.setdefault(key, Lane(f"thread {key[1]}"))
        args, begin = event.get("args") or {}, float(event["ts"])
        file = args.get("file")
        lane.events.append(
            Event(
                str(event.get("name", "")), str(event.get("cat", "")), begin, begin + float(event.get("dur", 0)),
                None if file is None else str(file), args.get("offset"), int(args.get("bytes") or 0),
            )
        )  # fmt: skip
    filled = [lane for lane in found.values() if lane.events]
    for lane in filled:
        lane.events.sort(key=lambda event: (event.begin, event.end))

    def order(lane: Lane) -> tuple[int, str, int]:
        known = KINDS.index(lane.kind) if lane.kind in KINDS else len(KINDS)
        return known, lane.kind, lane.number

    return sorted(filled, key=order)


def files(trace: dict[str, Any]) -> list[Path]:
    """The files that a load read, by its trace."""
    names = dict.fromkeys(event.file for lane in lanes(trace) for event in lane.events if event.file is not None)
    return list(map(Path, names))


def union(intervals: Iterable[Interval]) -> float:
    """How long at least one of them lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


@dataclass(frozen=True)
class Summary:
    """The limits of a load. Seconds; shares of `total`."""

    total: float
    bound_by: str | None
    reading: float
    copies: float | None  # None: there were none to make
    waiting: float
    waited_for: str | None
    first_tensor: float | None
    nbytes: int

    def sentence(self) -> str:
        bound = f"bound by {self.bound_by}" if self.bound_by else "what bounded it is not in the trace"
        copies = "no copies to make" if self.copies is None else f"copies {percent(self.copies)}"
        waiting = f"the engine waited {percent(self.waiting)}"
        if self.waited_for:
            waiting += f", most of it for {self.waited_for}"
        said = (
            f"{duration(self.total)} in total, {bound}. Reads under way {percent(self.reading)} of the time, {copies}; "
        )
        return said + waiting + "."


def summarise(trace: dict[str, Any], found: list[Lane] | None = None) -> Summary:
    """Adds up a trace: overlapping work of several lanes counts once."""
    found = lanes(trace) if found is None else found
    report: dict[str, Any] = (trace.get("otherData") or {}).get("report") or {}
    span = max((event.end for lane in found for event in lane.events), default=0.0)
    total = span or float(report.get("seconds", 0.0)) * 1e6

    def share(*kinds: str) -> float | None:
        intervals = [(event.begin, event.end) for lane in found if lane.kind in kinds for event in lane.events]
        return min(1.0, union(intervals) / total) if intervals and total else None

    waits: dict[str, float] = {}
    for event in (event for lane in found if lane.kind == "engine" for event in lane.events if event.route == "wait"):
        stage = event.name.partition(":")[2].strip() or event.name
        waits[stage] = waits.get(stage, 0.0) + event.end - event.begin
    waiting = [(e.begin, e.end) for lane in found if lane.kind == "engine" for e in lane.events if e.route == "wait"]
    reads = [event for lane in found if lane.kind == "read" for event in lane.events]
    return Summary(
        total=total / 1e6,
        bound_by=report.get("bottleneck"),
        reading=share("read") or 0.0,
        copies=share("copy", "device"),
        waiting=min(1.0, union(waiting) / total) if total else 0.0,
        waited_for=max(waits, key=lambda stage: waits[stage]) if waits else None,
        first_tensor=report.get("first_tensor_seconds"),
        nbytes=int(report.get("nbytes") or sum(event.nbytes for event in reads)),
    )


def drawn_together(events: list[Event], step: float) -> list[Bar]:
    """Bars for the events of one lane and colour, in order: tiny ones with less than a step between them become one."""
    bars: list[Bar] = []
    group: list[Event] = []

    def close() -> None:
        if group:
            begin, end = group[0].begin, max(event.end for event in group)
            bars.append(Bar(begin, end, union((event.begin, event.end) for event in group), tuple(group)))
            group.clear()

    for event in events:
        tiny = event.end - event.begin < TINY * step
        if group and not (
            tiny
            and group[-1].end - group[-1].begin < TINY * step
            and event.begin - max(other.end for other in group[-4:]) < step
            and event.end - group[0].begin < LONGEST * step
        ):
            close()
        group.append(event)
    close()
    return bars
