"""A page: one HTML file with its style, its script and plotly inside, which fetches nothing.

A policy in the page (Content-Security-Policy) allows the two scripts by their digests and no connection at all, so that
neither a name in the results nor a mistake here can make a browser run or fetch anything else.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from . import theme
from .figure import Figure, graph_objects
from .markup import Html, data, tag


class Page:
    """Counts charts, and puts the document around what it is given."""

    def __init__(self) -> None:
        graph_objects()  # before any work, where plotly is missing
        self.charts = 0

    def chart(self, figures: dict[str, Figure], label: str) -> Html:
        """A place for a chart and, beside it, the figures that the script draws there."""
        self.charts += 1
        height = next(iter(figures.values()))["layout"]["height"]
        place = tag(
            "div", id=f"chart-{self.charts}", class_="plot", style=f"height:{height}px", role="img", aria_label=label
        )
        return tag("figure", place, data(figures))

    def document(self, title: str, body: Html) -> Html:
        import plotly.offline

        here = Path(__file__).parent
        scripts = [plotly.offline.get_plotlyjs(), (here / "page.js").read_text("utf-8")]
        allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
        policy = (
            f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
            "base-uri 'none'; form-action 'none'"
        )
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", title),
            tag("style", Html(theme.variables() + (here / "page.css").read_text("utf-8"))),
        )
        needs = tag("noscript", tag("p", "The charts need JavaScript; the tables do not.", class_="notice"))
        settings = data({"dark": theme.dark_forms()}, id="settings")
        foot = [tag("script", Html(script)) for script in scripts]
        document = tag("html", head, "\n", tag("body", body, needs, settings, *foot), lang="en")
        return Html(f"<!DOCTYPE html>\n{document}\n")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def footer() -> Html:
    told = "GB are 1e9 bytes, seconds are wall clock. This page is complete in itself and fetches nothing."
    return tag("footer", tag("p", told, " Charts by plotly."))
