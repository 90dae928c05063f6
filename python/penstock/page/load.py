"""The page of one load, from its trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import lanes, timeline
from .document import Page, footer
from .markup import Html, join, tag
from .units import rate, size

#: The note on a timeline of a load that is ranked by more.
LOAD_ALONE = "A timeline ends when the load returns; cold loads are ranked by the time to the last byte touched."


def write_trace(
    trace: dict[str, Any], path: str | Path, title: str = "One load", disk: float | str | None = None
) -> None:
    """Writes a page with the timeline of one load.

    Args:
        trace: What `penstock load --trace` writes.
        path: The HTML file to write.
        title: The heading.
        disk: The disk's ceiling, in bytes a second; or why it is not known.

    Raises:
        ValueError: this is no such trace.
        ModuleNotFoundError: plotly is not installed.
        OSError: the file cannot be written.
    """
    page = Page()
    summary = timeline.summarise(trace)
    other: dict[str, Any] = trace.get("otherData") or {}
    tensors, version = (other.get("report") or {}).get("tensors"), other.get("version")
    told = [
        f"{tensors:,} tensors" if tensors else None,
        size(summary.nbytes) if summary.nbytes else None,
        rate(summary.nbytes / summary.total) if summary.nbytes and summary.total else None,
        f"penstock {version}" if version else None,
    ]
    lead = tag("p", " · ".join(part for part in told if part), class_="lead")
    top = tag("header", tag("h1", title), lead, class_="top")
    if isinstance(disk, str):
        said = f"The disk's ceiling is not drawn: {disk}."
    else:
        said = f"The disk's ceiling: {rate(disk)}, read past the page cache with no loader in the way." if disk else ""
    note = tag("p", f"{said} {LOAD_ALONE}".strip(), class_="note")
    main = tag("main", note, section(page, trace, None, None if isinstance(disk, str) else disk))
    Path(path).write_text(page.document(title, join(top, main, footer())), "utf-8")


def section(page: Page, trace: dict[str, Any], title: str | None, disk: float | None) -> Html:
    """A load as a chart, below what bounded it; beside the rates the disk's, in bytes a second."""
    found = timeline.lanes(trace)
    said = timeline.summarise(trace, found).sentence()
    names = {
        "direct": "read, O_DIRECT",
        "buffered": "read, page cache",
        "mapped": "read, mapped",
        "network": "received, server",
        "rank": "received, rank",
        "neighbour": "shared, rank",
        "wait": "engine waits",
    }
    key = [tag("li", tag("i", style=f"background:var(--{role})"), names.get(role, role)) for role in lanes.roles(found)]
    chart = page.chart({"lanes": lanes.figure(trace, disk)}, f"Timeline: {said}") if found else None
    return tag(
        "div",
        tag("h3", title) if title else None,
        tag("p", said),
        tag("ul", *key, class_="key"),
        chart,
        class_="lanes",
    )
