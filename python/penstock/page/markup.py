"""HTML from text that nobody has looked at: file names, errors, names of contestants.

`tag` escapes whatever is not `Html` already, so that a page cannot be made with a hole by forgetting to.
"""

from __future__ import annotations

import html
import json
from typing import Any

_VOID = {"meta", "br", "hr", "col"}


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> Html:
    """Any value as HTML that shows it."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def join(*parts: object) -> Html:
    """HTML and text one after the other; `None` is nothing."""
    return Html("".join(text(part) for part in parts if part is not None))


def tag(element: str, /, *children: object, **attributes: object) -> Html:
    """An element. `class_` is `class`, other underscores are hyphens. An attribute that is `None` is left out."""
    opened = element
    for key, value in attributes.items():
        if value is None:
            continue
        key = key.rstrip("_").replace("_", "-")
        opened += f' {key}="{html.escape(str(value))}"'
    return Html(f"<{opened}>" if element in _VOID else f"<{opened}>{join(*children)}</{element}>")


def anchor(checkpoint: int, scenario: int | None = None) -> str:
    """The id of a checkpoint's section, or of one of its scenarios."""
    return f"c{checkpoint}" if scenario is None else f"c{checkpoint}-s{scenario}"


def plot_text(value: object) -> str:
    """Text inside a chart: plotly reads a few HTML elements in it, and would swallow others."""
    return html.escape(str(value), quote=False)


def data(document: Any, **attributes: object) -> Html:
    """JSON for the page's script, in an element that is never run and that nothing in the JSON can end."""
    found = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        found = found.replace(character, f"\\u{ord(character):04x}")
    return tag("script", Html(found), type="application/json", **attributes)
