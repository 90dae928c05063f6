"""Bar charts of the loads of one scenario, as plotly figures in plain JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import Any

from .findings import Row, ceiling_name, finished
from .markup import plot_text
from .theme import FONT, light
from .units import TIMES, digits, duration, rate, size, unit_for

ROW = 40  # px for one bar and the space around it
LABEL = 22  # px above the bars for the name of one ceiling
MIDDLE = 0.55  # of the axis: right of it the name of a ceiling stands to the left of its line
AXIS = 56  # px below the bars for ticks and title

Figure = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """What the lengths of bars mean: seconds in a unit that suits them, or GB/s."""

    unit: str
    title: str
    per_second: bool
    scale: float

    def of(self, seconds: float, nbytes: float) -> float:
        return nbytes / seconds / self.scale if self.per_second else seconds / self.scale

    def told(self, seconds: float, nbytes: float) -> str:
        return rate(nbytes / seconds) if self.per_second else duration(seconds)


def graph_objects() -> Any:
    """plotly, which is wanted here and nowhere else in penstock."""
    try:
        import plotly.graph_objects
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the page draws its charts with plotly, which is not installed: pip install plotly", name=error.name
        ) from error
    return plotly.graph_objects


def plain(figure: Any) -> Figure:
    """A figure as JSON has it, checked by plotly, without the defaults of its template."""
    found: Figure = json.loads(figure.to_json())
    found["layout"].pop("template", None)
    return found


def layout(height: int) -> dict[str, Any]:
    """What every chart has in common."""
    return {
        "height": height,
        "font": {"family": FONT, "size": 13, "color": light("text")},
        "paper_bgcolor": light("page"),
        "plot_bgcolor": light("page"),
        "showlegend": False,
        "template": None,
        "hoverlabel": {
            "bgcolor": light("surface"),
            "bordercolor": light("rule"),
            "font": {"family": FONT, "size": 13, "color": light("text")},
            "align": "left",
        },
    }


def loads_of(runs: list[Row], row: Row) -> list[float]:
    """The seconds of every load that a row sums up."""
    keys = ("checkpoint", "scenario", "contestant")
    alike = [run for run in runs if all(run.get(key) == row[key] for key in keys)]
    return [seconds for run in alike if (seconds := run.get("seconds", run.get("load_s"))) and "error" not in run]


def bars(rows: list[Row], runs: list[Row]) -> dict[str, Figure] | None:
    """The charts of one checkpoint and scenario, by `seconds` and by `rate`; `None` where no loader finished."""
    loaders = sorted(
        (row for row in finished(rows) if row.get("kind") != "ceiling"), key=lambda row: float(row["median_s"])
    )
    if not loaders:
        return None
    failed = [row for row in rows if row.get("median_s") is None and row.get("kind") != "ceiling"]
    ceilings = sorted(finished(rows, "ceiling"), key=lambda row: float(row["median_s"]))
    unit, scale = unit_for([float(row.get("max_s") or row["median_s"]) for row in loaders], TIMES)
    of_time = {"s": "seconds", "ms": "milliseconds", "µs": "microseconds"}[unit]
    scales = {
        "seconds": Scale(unit, f"{of_time}, shorter is better", False, scale),
        "rate": Scale("GB/s", "GB/s, longer is better", True, 1e9),
    }
    return {name: _bars(loaders, failed, ceilings, runs, how) for name, how in scales.items()}


def _bars(loaders: list[Row], failed: list[Row], ceilings: list[Row], runs: list[Row], how: Scale) -> Figure:
    go = graph_objects()
    compared = {ceiling_name(str(row["ceiling"])) for row in loaders if row.get("ceiling")}
    top = 12 + LABEL * len(ceilings)
    count = len(loaders) + len(failed)
    height = top + ROW * count + AXIS

    def ends(row: Row) -> tuple[float, float]:
        seconds = [float(row.get(key) or row["median_s"]) for key in ("min_s", "max_s")]
        low, high = sorted(how.of(each, row["bytes"]) for each in seconds)
        return low, high

    dots = {id(row): loads_of(runs, row) for row in loaders}
    reach = 1.04 * max(
        [max(ends(row)[1], *(how.of(s, row["bytes"]) for s in dots[id(row)]), 0.0) for row in loaders]
        + [how.of(float(row["median_s"]), row["bytes"]) for row in ceilings]
    )
    figure = go.Figure()
    for kind, role in (("penstock", "accent"), ("rival", "neutral")):
        alike = [
            (place, row) for place, row in enumerate(loaders) if (row.get("kind") == "penstock") == (role == "accent")
        ]
        if not alike:
            continue
        lengths = [how.of(float(row["median_s"]), row["bytes"]) for _, row in alike]
        figure.add_bar(
            name=kind,
            orientation="h",
            y=[place for place, _ in alike],
            x=lengths,
            width=0.6,
            marker={
                "color": light(role),
                "line": {"width": 0},
                "pattern": {
                    "shape": ["/" if row.get("fault") else "" for _, row in alike],
                    "fgcolor": light("page"),
                    "bgcolor": light(role),
                    "size": 7,
                },
            },
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [ends(row)[1] - length for length, (_, row) in zip(lengths, alike, strict=True)],
                "arrayminus": [length - ends(row)[0] for length, (_, row) in zip(lengths, alike, strict=True)],
                "color": light("text"),
                "thickness": 1.25,
                "width": 5,
            },
            hovertext=[_hover(row) for _, row in alike],
            hoverinfo="text",
        )
    points = [
        (how.of(seconds, row["bytes"]), place + 0.2 * _jitter(number))
        for place, row in enumerate(loaders)
        for number, seconds in enumerate(dots[id(row)])
    ]
    if points:
        figure.add_scatter(
            name="loads",
            mode="markers",
            x=[x for x, _ in points],
            y=[y for _, y in points],
            marker={
                "size": 6,
                "color": light("page"),
                "opacity": 0.9 if len(points) < 200 else 0.5,
                "line": {"color": light("hand-out"), "width": 1.25},
            },
            hoverinfo="skip",
        )
    later = [(place, row) for place, row in enumerate(loaders) if row.get("later_s")]
    if later:
        figure.add_scatter(
            name="later",
            mode="markers",
            x=[how.of(float(row["later_s"]), row["bytes"]) for _, row in later],
            y=[place for place, _ in later],
            marker={
                "symbol": "diamond",
                "size": 9,
                "color": light("text"),
                "line": {"color": light("page"), "width": 1},
            },
            hoverinfo="skip",
        )

    annotations = [_value(place, row, how) for place, row in enumerate(loaders)]
    annotations += [_failure(len(loaders) + number, row) for number, row in enumerate(failed)]
    shapes = []
    for rise, (at, row) in enumerate(
        _stacked([(how.of(float(row["median_s"]), row["bytes"]), row) for row in ceilings], reach)
    ):
        name = ceiling_name(row["contestant"])
        main = name in compared or not compared
        low, high = ends(row)
        if main and high > low:
            band = {"type": "rect", "xref": "x", "yref": "paper", "x0": low, "x1": min(high, reach), "y0": 0, "y1": 1}
            shapes.append(band | {"line": {"width": 0}, "fillcolor": light("muted"), "opacity": 0.12, "layer": "below"})
        line = {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "layer": "above"}
        style = {"color": light("text"), "width": 2 if main else 1.25, "dash": "dash" if main else "dot"}
        shapes.append(line | {"y0": 0, "y1": 1, "line": style, "name": f"ceiling: {name}"})
        if rise:  # a hair line from the bars up to the name
            up = 1 + LABEL * rise / (height - top - AXIS)
            shapes.append(line | {"y0": 1, "y1": up, "line": style | {"width": 1, "dash": "dot"}, "name": "leader"})
        annotations.append(
            {
                "xref": "x", "yref": "paper", "x": at, "y": 1, "showarrow": False, "yanchor": "bottom",
                "yshift": LABEL * rise + 2, "xanchor": "right" if at > MIDDLE * reach else "left",
                "text": f"ceiling <b>{plot_text(name)}</b> {how.told(float(row['median_s']), row['bytes'])}",
                "font": {"size": 12, "color": light("text" if main else "muted")},
                "bgcolor": light("page"), "borderpad": 1,
            }
        )  # fmt: skip

    figure.update_layout(
        **layout(height),
        margin={"l": 10, "r": 76, "t": top, "b": AXIS},
        bargap=0,
        barmode="overlay",
        hovermode="closest",
        dragmode=False,
        shapes=shapes,
        annotations=annotations,
        xaxis={
            "range": [0, reach],
            "fixedrange": True,
            "gridcolor": light("rule"),
            "zeroline": True,
            "zerolinecolor": light("muted"),
            "tickfont": {"size": 12, "color": light("muted")},
            "nticks": 7,
            "title": {"text": how.title, "font": {"size": 12, "color": light("muted")}, "standoff": 8},
            "automargin": False,
        },
        yaxis={
            "range": [count - 0.5, -0.5],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "tickvals": list(range(count)),
            "ticktext": [_label(row) for row in loaders + failed],
            "tickfont": {"size": 13, "color": light("text")},
            "ticklabelstandoff": 8,
            "automargin": True,
        },
    )
    return plain(figure)


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


def _value(place: int, row: Row, how: Scale) -> dict[str, Any]:
    told = how.told(float(row["median_s"]), row["bytes"])
    penstock = row.get("kind") == "penstock"
    return {
        "xref": "paper", "yref": "y", "x": 1, "y": place, "showarrow": False, "xanchor": "right", "xshift": 74,
        "text": f"<b>{told}</b>" if penstock else told,
        "font": {"size": 13, "color": light("accent" if penstock else "text")},
    }  # fmt: skip


def _failure(place: int, row: Row) -> dict[str, Any]:
    reason = textwrap.shorten(str(row.get("error", "no figures")), 60, placeholder=" …")
    return {
        "xref": "paper", "yref": "y", "x": 0, "y": place, "showarrow": False, "xanchor": "left", "xshift": 6,
        "text": f"failed: {plot_text(reason)}", "font": {"size": 12, "color": light("bad")},
    }  # fmt: skip


def _hover(row: Row) -> str:
    median, nbytes = float(row["median_s"]), float(row["bytes"])
    lines = [f"<b>{plot_text(row['contestant'])}</b>", f"{duration(median)}, {rate(nbytes / median)}"]
    if "min_s" in row and "max_s" in row:
        lines.append(f"{duration(row['min_s'])} to {duration(row['max_s'])} in {row.get('loads', '?')} loads")
    if row.get("later_s"):
        lines.append(f"later loads of the same process {duration(row['later_s'])}")
    if row.get("share") is not None:
        lines.append(f"{digits(row['share'])} of ceiling {plot_text(ceiling_name(str(row.get('ceiling', ''))))}")
    if row.get("cpu_s") is not None:
        lines.append(f"CPU {duration(row['cpu_s'])}")
    if row.get("memory") is not None:
        lines.append(f"memory {size(row['memory'])}")
    if row.get("fault"):
        lines.append(f"measurement fault: {plot_text(row['fault'])}")
    return "<br>".join(lines)
