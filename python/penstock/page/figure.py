"""Figures of plotly in plain JSON: what all of them have in common."""

from __future__ import annotations

import json
from typing import Any

from .theme import FONT, light

AXIS = 56  # px below the bars for ticks and title

Figure = dict[str, Any]


def graph_objects() -> Any:
    """plotly, which is wanted here and nowhere else in penstock."""
    try:
        import plotly.graph_objects
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the page draws its charts with plotly, which is not installed: pip install plotly", name=error.name
        ) from error
    return plotly.graph_objects


def checked(traces: list[dict[str, Any]], arrangement: dict[str, Any]) -> Figure:
    """A figure as JSON has it, checked by plotly, without the defaults of its template.

    Made at once: adding traces and layout to a figure one after the other takes plotly five times as long.
    """
    found: Figure = json.loads(graph_objects().Figure(data=traces, layout=arrangement).to_json())
    found["layout"].pop("template", None)
    return found


def layout(height: int) -> dict[str, Any]:
    """The layout that all charts share."""
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
