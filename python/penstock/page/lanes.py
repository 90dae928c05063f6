"""A load as a chart: lanes on one time axis, and above them the rates at which bytes arrived."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from .figure import AXIS, Figure, checked, layout
from .markup import plot_text
from .theme import light
from .timeline import KINDS, STEPS, TINY, Bar, Event, Lane, Summary, drawn_together, lanes, summarise
from .units import TIMES, digits, duration, percent, size, unit_for

ROUTES = ("direct", "buffered", "mapped", "network", "rank", "neighbour")
LANES = 12  # of one kind; more of them share rows
LANE = 24  # px
RATES = 84  # px above the lanes
TOP = 22  # px above it all
BINS = 100  # of the rates


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
    """The meanings of the colours of these lanes, for the key."""
    seen = {_role(lane, event) for lane in found for event in lane.events}
    return [
        role for role in (*ROUTES, "copy", "device", "wait", "plan", "allocate", "hand-out", "consumer") if role in seen
    ]


def figure(trace: dict[str, Any], disk: float | None = None) -> Figure:
    """The lanes and, above them, the rates at which bytes arrived; beside them the disk's, in bytes a second."""
    found = lanes(trace)
    summary = summarise(trace, found)
    span = max(summary.total * 1e6, 1e-9)
    rows, rates = _rows(found), _rates(found, span)
    unit, scale = unit_for([summary.total], TIMES)
    to_unit = 1e-6 / scale
    traces = _bars(rows, span, to_unit) + _lines(rates, span, to_unit)
    shapes, annotations = _first_tensor(summary, scale)
    above = RATES if rates else 0
    below = 1 - above / (above + LANE * len(rows))  # the part of the height that the lanes take
    quiet = {"tickfont": {"size": 12, "color": light("muted")}, "zeroline": False}
    arrangement = layout(TOP + above + LANE * len(rows) + AXIS) | {
        "margin": {"l": 10, "r": 12, "t": TOP, "b": AXIS},
        "barmode": "overlay",
        "bargap": 0,
        "hovermode": "closest",
        "dragmode": "zoom",
        "shapes": shapes,
        "annotations": annotations,
        "xaxis": quiet
        | {
            "range": [0, summary.total / scale * 1.002],
            "gridcolor": light("rule"),
            "nticks": 9,
            "title": {"text": _axis(unit), "font": {"size": 12, "color": light("muted")}, "standoff": 8},
            "anchor": "y",
        },
        "yaxis": {
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
    }
    if rates:
        if disk is not None:
            line, name = _disk(disk / 1e9)
            shapes.append(line)
            annotations.append(name)
        highest = max([*(point for points in rates.values() for point in points), (disk or 0) / 1e9])
        arrangement["yaxis2"] = quiet | {
            "domain": [below, 1],
            "range": [0, 1.25 * highest or 1],
            "fixedrange": True,
            "gridcolor": light("rule"),
            "nticks": 4,
            "ticksuffix": " GB/s",
            "showticksuffix": "last",
            "automargin": True,
            "anchor": "x",
        }
    return checked(traces, arrangement)


def _bars(rows: list[tuple[str, list[Lane]]], span: float, to_unit: float) -> list[dict[str, Any]]:
    """A trace of bars for each colour."""
    step = span / STEPS
    by_role: dict[str, list[tuple[int, str, Bar]]] = {}
    for place, (_, part) in enumerate(rows):
        for lane in part:
            events: dict[str, list[Event]] = {}
            for event in lane.events:
                events.setdefault(_role(lane, event), []).append(event)
            for role, alike in events.items():
                bars = drawn_together(alike, step)
                by_role.setdefault(role, []).extend((place, lane.name, bar) for bar in bars)
    return [
        {
            "type": "bar",
            "name": role,
            "orientation": "h",
            "y": [place for place, _, _ in bars],
            "base": [round(bar.begin * to_unit, 6) for _, _, bar in bars],
            "x": [round(max(bar.end - bar.begin, step / 2) * to_unit, 6) for _, _, bar in bars],
            "width": 0.72,
            "marker": {
                "color": light(role),
                "opacity": [round(0.35 + 0.65 * _density(bar), 2) for _, _, bar in bars],
                "line": {"color": light("page"), "width": [_edge(bar, step) for _, _, bar in bars]},
            },
            "hovertext": [_hover(label, bar) for _, label, bar in bars],
            "hoverinfo": "text",
        }
        for role, bars in by_role.items()
    ]


def _edge(bar: Bar, step: float) -> float:
    """px between neighbours: none where a bar is many events, whose ends would look like those of one."""
    return 0.75 if len(bar.events) == 1 and bar.end - bar.begin >= TINY * step else 0


def _lines(rates: dict[str, list[float]], span: float, to_unit: float) -> list[dict[str, Any]]:
    return [
        {
            "type": "scatter",
            "name": f"{role} rate",
            "mode": "lines",
            "line": {"color": light(role), "width": 1.5, "shape": "hv"},
            "fill": "tozeroy" if role == "direct" else "none",
            "fillcolor": light("accent-soft"),
            "x": [round(number * span / BINS * to_unit, 6) for number in range(BINS + 1)],
            "y": [round(point, 4) for point in [*points, points[-1]]],
            "yaxis": "y2",
            "hovertemplate": "%{y:.2f} GB/s<extra></extra>",
        }
        for role, points in rates.items()
    ]


def _first_tensor(summary: Summary, scale: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A line where the first tensor was ready, and its name above the chart."""
    if summary.first_tensor is None or not 0 < summary.first_tensor < summary.total:
        return [], []
    at = summary.first_tensor / scale
    line = {
        "type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "layer": "above",
        "line": {"color": light("text"), "width": 1, "dash": "dot"}, "name": "first tensor",
    }  # fmt: skip
    name = {
        "xref": "x", "yref": "paper", "x": at, "y": 1, "yanchor": "bottom", "showarrow": False,
        "xanchor": "right" if summary.first_tensor > 0.8 * summary.total else "left", "text": "first tensor",
        "font": {"size": 12, "color": light("muted")},
    }  # fmt: skip
    return [line], [name]


def _disk(at: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """A line at the rate of the disk with no loader in the way, and its name above it."""
    line = {
        "type": "line", "xref": "paper", "yref": "y2", "x0": 0, "x1": 1, "y0": at, "y1": at, "layer": "above",
        "line": {"color": light("text"), "width": 1.25, "dash": "dash"}, "name": "ceiling: disk",
    }  # fmt: skip
    name = {
        "xref": "paper", "yref": "y2", "x": 1, "y": at, "xanchor": "right", "yanchor": "bottom", "showarrow": False,
        "text": f"ceiling <b>disk</b> {digits(at)} GB/s", "font": {"size": 12, "color": light("muted")},
        "bgcolor": light("page"), "borderpad": 1,
    }  # fmt: skip
    return line, name


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
