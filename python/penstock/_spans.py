"""Events as spans of OpenTelemetry, where the program uses that. Its API is never imported here first.

A program that has not imported `opentelemetry.trace` has configured no provider either.
"""

from __future__ import annotations

import sys
from typing import Any

from ._core import __version__


def add(event: dict[str, Any]) -> None:
    """Makes a span that begins and ends as the load did, below the current span of this thread."""
    trace: Any = sys.modules["opentelemetry.trace"]
    end = int(event["time"] * 1e9)
    tracer = trace.get_tracer("penstock", __version__)
    span = tracer.start_span(f"penstock {event['verb']}", start_time=end - int(event["seconds"] * 1e9))
    if span.is_recording():  # there is a provider, and it takes this one
        span.set_attributes(attributes(event))
        if event["outcome"] == "failed":
            error = event["error"]
            span.set_status(trace.Status(trace.StatusCode.ERROR, f"{error['type']}: {error['message']}"))
    span.end(end_time=end)


def attributes(event: dict[str, Any], prefix: str = "penstock") -> dict[str, Any]:
    """The keys of an event with dots between them: attributes have no dicts in them, and no None."""
    found: dict[str, Any] = {}
    for key, value in event.items():
        name = f"{prefix}.{key}"
        if isinstance(value, dict):
            found.update(attributes(value, name))
        elif isinstance(value, list):
            texts = [
                f"{one['from']} -> {one['to']}: {one['reason']}" if isinstance(one, dict) else one for one in value
            ]
            if texts:
                found[name] = texts
        elif value is not None:
            found[name] = value
    return found
