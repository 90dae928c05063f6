"""Bar charts of the loads of one scenario, as plotly figures in plain JSON."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from ...page.figure import AXIS, Figure, checked, layout
from ...page.markup import plot_text
from ...page.theme import light
from ...page.units import TIMES, digits, duration, rate, size, unit_for
from ..results import TOUCHED
from .findings import SEMANTICS, Row, alike, ceiling_name, finished, loads_of

ROW = 40  # px for one bar and the space around it
HEADING = 0.75  # of a row, for the heading of a group
LABEL = 22  # px above the bars for the name of one ceiling
MIDDLE = 0.55  # of the axis: right of it the name of a ceiling stands to the left of its line


@dataclass(frozen=True)
class Scale:
    """The unit of bars: seconds in a unit that suits them, or GB/s."""

    unit: str
    title: str
    per_second: bool
    scale: float

    def of(self, seconds: float, nbytes: float) -> float:
        return nbytes / seconds / self.scale if self.per_second else seconds / self.scale

    def at(self, length: float) -> str:
        """A length of this scale, for people."""
        return rate(length * self.scale) if self.per_second else duration(length * self.scale)

    def told(self, seconds: float, nbytes: float) -> str:
        return rate(nbytes / seconds) if self.per_second else duration(seconds)


def bars(rows: list[Row], runs: list[Row]) -> dict[str, Figure] | None:
    """The charts of one checkpoint and scenario, by `seconds` and by `rate`; `None` where no loader finished."""
    done = [row for row in finished(rows) if row.get("kind") != "ceiling"]
    if not done:
        return None
    unit, scale = unit_for([float(row.get("max_s") or row["median_s"]) for row in done], TIMES)
    of_time = {"s": "seconds", "ms": "milliseconds", "µs": "microseconds"}[unit]
    scales = {
        "seconds": Scale(unit, f"{of_time}, shorter is better", False, scale),
        "rate": Scale("GB/s", "GB/s, longer is better", True, 1e9),
    }
    return {name: _Bars(rows, runs, how).figure() for name, how in scales.items()}


class _Bars:
    """One chart: loaders that give the like together under a heading, the fastest first, what failed last."""

    def __init__(self, rows: list[Row], runs: list[Row], how: Scale) -> None:
        self.how = how
        self.bars: list[tuple[float, Row]] = []
        self.failed: list[tuple[float, Row]] = []
        self.headings: list[tuple[float, str]] = []
        groups = alike(rows)
        self.end = 0.0
        for semantics, group in groups.items():
            if len(groups) > 1:
                self.headings.append((self.end + 0.1, SEMANTICS.get(str(semantics), str(semantics))))
                self.end += HEADING
            for row in sorted(finished(group), key=lambda row: float(row["median_s"])):
                self.bars.append((self.end, row))
                self.end += 1
            for row in group:
                if row.get("median_s") is None:
                    self.failed.append((self.end, row))
                    self.end += 1
        self.ceilings = finished(rows, "ceiling")
        # What a share is of is drawn where the share has it, and each ceiling for as many bytes as the loads move
        self.nbytes = max((float(row["bytes"]) for _, row in self.bars), default=0.0)
        self.shared = {
            ceiling_name(str(row["ceiling"])): float(row["ceiling_s"]) / float(row["bytes"])
            for _, row in self.bars
            if row.get("ceiling") and row.get("ceiling_s")
        }
        self.first = [loads_of(runs, row) for _, row in self.bars]
        self.later = [loads_of(runs, row, later=True) for _, row in self.bars]
        self.top = 12 + LABEL * len(self.ceilings)
        self.inside = round(ROW * self.end)
        lengths = [self.ceiling(row) for row in self.ceilings] + [self.ends(row)[1] for _, row in self.bars]
        self.alone = [
            (how.of(float(row["load_s"]), row["bytes"]), y) for y, row in self.bars if row.get("ranked") == TOUCHED
        ]
        lengths += [length for length, _ in self.alone]
        for (_, row), first, later in zip(self.bars, self.first, self.later, strict=True):
            lengths += [how.of(seconds, row["bytes"]) for seconds in first + later]
        self.reach = 1.04 * max(lengths)

    def length(self, row: Row) -> float:
        return self.how.of(float(row["median_s"]), row["bytes"])

    def ceiling(self, row: Row) -> float:
        """Where a ceiling is drawn: its time for as many bytes as the loads move, or its rate."""
        rate = self.shared.get(ceiling_name(row["contestant"]), float(row["median_s"]) / row["bytes"])
        return self.how.of(rate * self.nbytes, self.nbytes)

    def ends(self, row: Row) -> tuple[float, float]:
        """The whisker: of the fastest and the slowest load."""
        nbytes = self.nbytes if row.get("kind") == "ceiling" else row["bytes"]
        scale = nbytes / row["bytes"]
        seconds = [float(row.get(key) or row["median_s"]) * scale for key in ("min_s", "max_s")]
        low, high = sorted(self.how.of(each, nbytes) for each in seconds)
        return low, high

    def figure(self) -> Figure:
        traces: list[dict[str, Any]] = []
        for name, ours, role in (("penstock", True, "accent"), ("rival", False, "neutral")):
            group = [(y, row) for y, row in self.bars if (row.get("kind") == "penstock") == ours]
            if group:
                traces.append({"type": "bar", "name": name} | self._bars(group, role))
        points = [
            (self.how.of(seconds, row["bytes"]), y + 0.2 * _jitter(number))
            for (y, row), loads in zip(self.bars, self.first, strict=True)
            for number, seconds in enumerate(loads)
        ]
        ring = {"size": 6, "color": light("page"), "line": {"color": light("hand-out"), "width": 1.25}}
        traces += _marks("loads", points, ring | {"opacity": 0.9 if len(points) < 200 else 0.5})
        points = [
            (self.how.of(seconds, row["bytes"]), y + 0.2 * _jitter(number))
            for (y, row), loads in zip(self.bars, self.later, strict=True)
            for number, seconds in enumerate(loads)
        ]
        traces += _marks(
            "later loads", points, {"size": 4, "symbol": "diamond", "color": light("text"), "opacity": 0.35}
        )
        tick = {"size": 22, "symbol": "line-ns", "line": {"color": light("page"), "width": 3}}
        traces += _marks("load alone", self.alone, tick)
        points = [(self.how.of(float(row["later_s"]), row["bytes"]), y) for y, row in self.bars if row.get("later_s")]
        diamond = {
            "size": 10,
            "symbol": "diamond",
            "color": light("text"),
            "line": {"color": light("page"), "width": 1},
        }
        traces += _marks("later", points, diamond)
        shapes, names = self._ceilings()
        arrangement = layout(self.top + self.inside + AXIS) | {
            "margin": {"l": 10, "r": 76, "t": self.top, "b": AXIS},
            "bargap": 0,
            "barmode": "overlay",
            "hovermode": "closest",
            "dragmode": False,
            "shapes": shapes,
            "annotations": [
                *(_heading(y, text) for y, text in self.headings),
                *(_value(y, row, self.how) for y, row in self.bars),
                *(_failure(y, row) for y, row in self.failed),
                *names,
            ],
            "xaxis": self._along(),
            "yaxis": self._down(),
        }
        return checked(traces, arrangement)

    def _bars(self, group: list[tuple[float, Row]], role: str) -> dict[str, Any]:
        lengths = [self.length(row) for _, row in group]
        spread = [self.ends(row) for _, row in group]
        return {
            "orientation": "h",
            "y": [y for y, _ in group],
            "x": lengths,
            "width": 0.6,
            "marker": {
                "color": light(role),
                "line": {"width": 0},
                "pattern": {
                    "shape": ["/" if row.get("fault") else "" for _, row in group],
                    "fgcolor": light("page"),
                    "bgcolor": light(role),
                    "size": 7,
                },
            },
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [high - length for length, (_, high) in zip(lengths, spread, strict=True)],
                "arrayminus": [length - low for length, (low, _) in zip(lengths, spread, strict=True)],
                "color": light("text"),
                "thickness": 1.25,
                "width": 5,
            },
            "hovertext": [_hover(row) for _, row in group],
            "hoverinfo": "text",
        }

    def _ceilings(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Lines, with the spread of those that loads are compared with, and their names above."""
        compared = {ceiling_name(str(row["ceiling"])) for _, row in self.bars if row.get("ceiling")}
        shapes, names = [], []
        stacked = _stacked([(self.ceiling(row), row) for row in self.ceilings], self.reach)
        for rise, (at, row) in enumerate(stacked):
            name = ceiling_name(row["contestant"])
            main = name in compared or not compared
            low, high = self.ends(row)
            across = {"xref": "x", "yref": "paper"}
            if main and high > low:
                band = across | {"type": "rect", "x0": low, "x1": min(high, self.reach), "y0": 0, "y1": 1}
                band |= {"line": {"width": 0}, "fillcolor": light("muted"), "opacity": 0.12, "layer": "below"}
                shapes.append(band)
            line = across | {"type": "line", "x0": at, "x1": at, "layer": "above"}
            style = {"color": light("text"), "width": 2 if main else 1.25, "dash": "dash" if main else "dot"}
            shapes.append(line | {"y0": 0, "y1": 1, "line": style, "name": f"ceiling: {name}"})
            if rise:  # a hair line from the bars up to the name
                up = 1 + LABEL * rise / self.inside
                shapes.append(line | {"y0": 1, "y1": up, "line": style | {"width": 1, "dash": "dot"}, "name": "leader"})
            names.append(
                across
                | {
                    "x": at, "y": 1, "showarrow": False, "yanchor": "bottom", "yshift": LABEL * rise + 2,
                    "xanchor": "right" if at > MIDDLE * self.reach else "left",
                    "text": f"ceiling <b>{plot_text(name)}</b> {self.how.at(at)}",
                    "font": {"size": 12, "color": light("text" if main else "muted")},
                    "bgcolor": light("page"), "borderpad": 1,
                }
            )  # fmt: skip
        return shapes, names

    def _along(self) -> dict[str, Any]:
        return {
            "range": [0, self.reach],
            "fixedrange": True,
            "gridcolor": light("rule"),
            "zeroline": True,
            "zerolinecolor": light("muted"),
            "tickfont": {"size": 12, "color": light("muted")},
            "nticks": 7,
            "title": {"text": self.how.title, "font": {"size": 12, "color": light("muted")}, "standoff": 8},
        }

    def _down(self) -> dict[str, Any]:
        rows = [*self.bars, *self.failed]
        return {
            "range": [self.end - 0.5, -0.5],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "tickvals": [y for y, _ in rows],
            "ticktext": [_label(row) for _, row in rows],
            "tickfont": {"size": 13, "color": light("text")},
            "ticklabelstandoff": 8,
            "automargin": True,
        }


def _marks(name: str, points: list[tuple[float, float]], marker: dict[str, Any]) -> list[dict[str, Any]]:
    """A trace of single points; none where there are none."""
    if not points:
        return []
    xs, ys = zip(*points, strict=True)
    mark = {"type": "scatter", "name": name, "mode": "markers", "x": list(xs), "y": list(ys)}
    return [mark | {"marker": marker, "hoverinfo": "skip"}]


def _jitter(number: int) -> float:
    """-1 to 1, neighbours far apart, always the same."""
    return 2 * ((number * 0.618034 + 0.5) % 1) - 1


def _stacked(ceilings: list[tuple[float, Row]], reach: float) -> list[tuple[float, Row]]:
    """Ceilings in the order in which their names are stacked, the lowest first: none lies over another's line.

    A name runs to the right of its line, and to the left of it where the line stands in the right half.
    """
    right = sorted((one for one in ceilings if one[0] <= MIDDLE * reach), key=lambda one: -one[0])
    left = sorted((one for one in ceilings if one[0] > MIDDLE * reach), key=lambda one: one[0])
    return left + right


def _label(row: Row) -> str:
    """The name beside a bar, in two lines where it is long: phones are narrow."""
    name = "<br>".join(plot_text(line) for line in textwrap.wrap(str(row["contestant"]), 18) or [""])
    return f'<b style="color:{light("accent")}">{name}</b>' if row.get("kind") == "penstock" else name


def _heading(y: float, text: str) -> dict[str, Any]:
    return {
        "xref": "paper", "yref": "y", "x": 0, "y": y, "showarrow": False, "xanchor": "left", "xshift": 2,
        "text": plot_text(text), "font": {"size": 12, "color": light("muted")}, "bgcolor": light("page"),
    }  # fmt: skip


def _value(y: float, row: Row, how: Scale) -> dict[str, Any]:
    told = how.told(float(row["median_s"]), row["bytes"])
    penstock = row.get("kind") == "penstock"
    return {
        "xref": "paper", "yref": "y", "x": 1, "y": y, "showarrow": False, "xanchor": "right", "xshift": 74,
        "text": f"<b>{told}</b>" if penstock else told,
        "font": {"size": 13, "color": light("accent" if penstock else "text")},
    }  # fmt: skip


def _failure(y: float, row: Row) -> dict[str, Any]:
    reason = textwrap.shorten(str(row.get("error", "no figures")), 60, placeholder=" …")
    return {
        "xref": "paper", "yref": "y", "x": 0, "y": y, "showarrow": False, "xanchor": "left", "xshift": 6,
        "text": f"failed: {plot_text(reason)}", "font": {"size": 12, "color": light("bad")},
    }  # fmt: skip


def _hover(row: Row) -> str:
    median, nbytes = float(row["median_s"]), float(row["bytes"])
    lines = [f"<b>{plot_text(row['contestant'])}</b>", f"{duration(median)}, {rate(nbytes / median)}"]
    if "min_s" in row and "max_s" in row:
        lines.append(f"{duration(row['min_s'])} to {duration(row['max_s'])} in {row.get('loads', '?')} loads")
    if row.get("later_s"):
        lines.append(f"later loads of the same process {duration(row['later_s'])}")
    if row.get("ranked") == TOUCHED:
        lines[1] += " to the last byte touched"
        lines.append(f"the load alone {duration(row['load_s'])}, the touch {duration(row['touch_s'])}")
    if row.get("share") is not None:
        lines.append(f"{digits(row['share'])} of ceiling {plot_text(ceiling_name(str(row.get('ceiling', ''))))}")
    if row.get("cpu_s") is not None:
        lines.append(f"CPU {duration(row['cpu_s'])}")
    if row.get("memory") is not None:
        lines.append(f"memory {size(row['memory'])}")
    if row.get("fault"):
        lines.append(f"measurement fault: {plot_text(row['fault'])}")
    return "<br>".join(lines)
