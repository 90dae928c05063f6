"""One load as lanes on a time axis, from its trace: what each part of the loader was busy with, and when."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import Any

from .charts import Figure, graph_objects, layout, plain
from .markup import plot_text
from .theme import light
from .units import TIMES, digits, duration, percent, size, unit_for

#: Kinds of lanes from top to bottom.
KINDS = ("plan", "engine", "read", "copy", "device", "allocate", "hand-out", "consumer")
ROUTES = ("direct", "buffered", "mapped")
LANES = 12  # of one kind; more of them share rows
LANE = 24  # px
TOP = 22  # px above it all
STEPS = 700  # of the time axis: what is closer than one of them cannot be told apart on a screen
TINY = 3  # steps: events shorter than that are drawn together with their neighbours
LONGEST = 12  # steps: what is drawn together
BINS = 100  # of the rates above the lanes

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


def union(intervals: Iterable[Interval]) -> float:
    """How long at least one of them lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


@dataclass(frozen=True)
class Summary:
    """What bounded a load. Seconds; shares of `total`."""

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


def _role(lane: Lane, event: Event) -> str:
    if lane.kind == "read":
        return event.route if event.route in ROUTES else "direct"
    if lane.kind == "engine":
        return "wait" if event.route == "wait" else "plan"
    return lane.kind if lane.kind in KINDS else "consumer"


def _rows(found: list[Lane]) -> list[tuple[str, list[Lane]]]:
    """Rows of the chart: a lane each, or several lanes of a kind where there are many."""
    rows: list[tuple[str, list[Lane]]] = []
    for kind in dict.fromkeys(lane.kind for lane in found):
        alike = [lane for lane in found if lane.kind == kind]
        per = -(-len(alike) // LANES)
        for first in range(0, len(alike), per):
            part = alike[first : first + per]
            rows.append((part[0].name if len(part) == 1 else f"{part[0].name}–{part[-1].number}", part))
    return rows


def roles(found: list[Lane]) -> list[str]:
    """What the colours of these lanes stand for, for the key."""
    seen = {_role(lane, event) for lane in found for event in lane.events}
    return [
        role for role in (*ROUTES, "copy", "device", "wait", "plan", "allocate", "hand-out", "consumer") if role in seen
    ]


def figure(trace: dict[str, Any]) -> Figure:
    """The lanes and, above them, the rates at which bytes arrived."""
    go = graph_objects()
    found = lanes(trace)
    summary = summarise(trace, found)
    span = max(summary.total * 1e6, 1e-9)
    unit, scale = unit_for([summary.total], TIMES)
    to_unit = 1e-6 / scale
    rows = _rows(found)
    rates = _rates(found, span)
    above = 84 if rates else 0
    height = TOP + above + LANE * len(rows) + 56
    below = 1 - above / (above + LANE * len(rows)) if rows else 1.0

    by_role: dict[str, list[tuple[int, str, Bar]]] = {}
    for place, (name, part) in enumerate(rows):
        for role in {_role(lane, event) for lane in part for event in lane.events}:
            for lane in part:
                events = [event for event in lane.events if _role(lane, event) == role]
                label = lane.name if len(part) > 1 else name
                by_role.setdefault(role, []).extend((place, label, bar) for bar in drawn_together(events, span / STEPS))
    drawn = go.Figure()
    for role, bars in by_role.items():
        drawn.add_bar(
            name=role,
            orientation="h",
            y=[place for place, _, _ in bars],
            base=[round(bar.begin * to_unit, 6) for _, _, bar in bars],
            x=[round(max(bar.end - bar.begin, span / STEPS / 2) * to_unit, 6) for _, _, bar in bars],
            width=0.72,
            marker={
                "color": light(role),
                "opacity": [round(0.35 + 0.65 * _density(bar), 2) for _, _, bar in bars],
                "line": {
                    "color": light("page"),
                    "width": [
                        0.75 if len(bar.events) == 1 and bar.end - bar.begin >= TINY * span / STEPS else 0
                        for _, _, bar in bars
                    ],
                },
            },
            hovertext=[_hover(label, bar) for _, label, bar in bars],
            hoverinfo="text",
        )
    for role, points in rates.items():
        drawn.add_scatter(
            name=f"{role} rate",
            mode="lines",
            line={"color": light(role), "width": 1.5, "shape": "hv"},
            fill="tozeroy" if role == "direct" else "none",
            fillcolor=light("accent-soft"),
            x=[round(number * span / BINS * to_unit, 6) for number in range(BINS + 1)],
            y=[round(point, 4) for point in [*points, points[-1]]],
            yaxis="y2",
            hovertemplate="%{y:.2f} GB/s<extra></extra>",
        )
    shapes, annotations = [], []
    if summary.first_tensor is not None and 0 < summary.first_tensor < summary.total:
        at = summary.first_tensor / scale
        shapes.append(
            {
                "type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "layer": "above",
                "line": {"color": light("text"), "width": 1, "dash": "dot"}, "name": "first tensor",
            }
        )  # fmt: skip
        late = at > 0.8 * summary.total / scale
        annotations.append(
            {
                "xref": "x", "yref": "paper", "x": at, "y": 1, "yanchor": "bottom", "showarrow": False,
                "xanchor": "right" if late else "left", "text": "first tensor",
                "font": {"size": 12, "color": light("muted")},
            }
        )  # fmt: skip
    axis = {"tickfont": {"size": 12, "color": light("muted")}, "zeroline": False}
    drawn.update_layout(
        **layout(height),
        margin={"l": 10, "r": 12, "t": TOP, "b": 56},
        barmode="overlay",
        bargap=0,
        hovermode="closest",
        dragmode="zoom",
        shapes=shapes,
        annotations=annotations,
        xaxis=axis
        | {
            "range": [0, summary.total / scale * 1.002],
            "gridcolor": light("rule"),
            "nticks": 9,
            "title": {"text": _axis(unit), "font": {"size": 12, "color": light("muted")}, "standoff": 8},
            "anchor": "y",
        },
        yaxis={
            "domain": [0, below - (0.02 if rates else 0)],
            "range": [len(rows) - 0.5, -0.5],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "tickvals": list(range(len(rows))),
            "ticktext": [plot_text(name) for name, _ in rows],
            "tickfont": {"size": 12, "color": light("text")},
            "ticklabelstandoff": 6,
            "automargin": True,
        },
        yaxis2=axis
        | {
            "domain": [below, 1],
            "rangemode": "tozero",
            "fixedrange": True,
            "gridcolor": light("rule"),
            "nticks": 4,
            "ticksuffix": " GB/s",
            "showticksuffix": "last",
            "automargin": True,
            "anchor": "x",
            "visible": bool(rates),
        },
    )
    return plain(drawn)


def _axis(unit: str) -> str:
    return {"s": "seconds", "ms": "milliseconds", "µs": "microseconds"}[unit] + " from the start of the load"


def _density(bar: Bar) -> float:
    return min(1.0, bar.busy / (bar.end - bar.begin)) if len(bar.events) > 1 and bar.end > bar.begin else 1.0


def _rates(found: list[Lane], span: float) -> dict[str, list[float]]:
    """GB/s in each bin, of reads and of copies; an event's bytes count evenly while it lasts."""
    rates: dict[str, list[float]] = {}
    width = span / BINS
    for role, kinds in (("direct", ("read",)), ("copy", ("copy",)), ("device", ("device",))):
        events = [event for lane in found if lane.kind in kinds for event in lane.events if event.nbytes]
        if not events:
            continue
        bins = [0.0] * BINS
        for event in events:
            per = event.nbytes / max(event.end - event.begin, 1e-3)
            for number in range(int(event.begin / width), min(BINS, int(event.end / width) + 1)):
                inside = min(event.end, (number + 1) * width) - max(event.begin, number * width)
                bins[number] += per * max(0.0, inside)
        rates[role] = [nbytes / width * 1e-3 for nbytes in bins]  # bytes per microsecond are MB/s
    return rates


def _hover(label: str, bar: Bar) -> str:
    nbytes, seconds = sum(event.nbytes for event in bar.events), (bar.end - bar.begin) / 1e6
    first = bar.events[0]
    lines = [f"<b>{plot_text(label)}</b> {plot_text(first.name)}"]
    if len(bar.events) > 1:
        lines = [f"<b>{plot_text(label)}</b> {len(bar.events)} events, busy {percent(_density(bar))}"]
    lines.append(f"{duration(bar.begin / 1e6)} + {duration(seconds)}")
    if nbytes:
        lines.append(f"{size(nbytes)}" + (f", {digits(nbytes / seconds / 1e9)} GB/s" if seconds else ""))
    if first.file is not None:
        at = "" if first.offset is None else f" at {first.offset:,}"
        lines.append(plot_text(PurePath(first.file).name) + at)
    return "<br>".join(lines)
