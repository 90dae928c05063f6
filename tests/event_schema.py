"""The keys of events, as the table of docs/operations.md has them, and what collects events in a test."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import penstock

PAGE = Path(__file__).parent.parent / "docs" / "operations.md"

_ONLY = {"progress": {"total"}, "end": set()}


def _rows() -> dict[str, str]:
    """The type of each key."""
    text = re.search(r"^## Keys\n(.*?)(?=^## )", PAGE.read_text(), re.M | re.S)
    assert text
    found = {}
    for line in text[1].splitlines():
        if line.startswith("| `"):
            _, names, kind, _ = line.split("|", 3)
            found |= dict.fromkeys(re.findall(r"`(\w+)`", names), kind.strip())
    return found


KEYS = _rows()
_LATER = list(KEYS)[list(KEYS).index("outcome") :]
"""Those of events of what has ended."""


def _is(value: Any, kind: str) -> bool:
    if kind.startswith("`"):
        return value in re.findall(r"`(\w+)`", kind)
    if kind.endswith(" or null"):
        return value is None or _is(value, kind.removesuffix(" or null"))
    if kind == "integer":
        return type(value) is int and value >= 0
    if kind == "number":
        return type(value) in (int, float) and value >= 0
    if kind == "text":
        return isinstance(value, str)
    if kind == "list of objects":
        return isinstance(value, list) and all(isinstance(one, dict) for one in value)
    if kind.startswith("object of "):
        of = kind.removeprefix("object of ").removesuffix("s")
        return isinstance(value, dict) and all(_is(one, of) for one in value.values())
    assert kind == "object", kind
    return isinstance(value, dict)


def check(event: dict[str, Any]) -> None:
    """Asserts that an event has these keys, no others, and values of these types."""
    expected = set(KEYS) - ({"total"} if event["event"] == "end" else set(_LATER))
    assert set(event) == expected
    wrong = {key: value for key, value in event.items() if not _is(value, KEYS[key])}
    assert wrong == {}
    assert event["v"] == 1
    if event["event"] == "end":
        assert set(event["sources"]) == {"mapped", "buffered", "direct", "network", "mirror", "disk_cache", "rank"}
        assert set(event["phases"]) == {"plan", "move", "hand_out", "sync", "caller"}
        assert (event["error"] is None) == (event["outcome"] == "ok")
        if event["error"] is not None:
            assert set(event["error"]) == {"type", "message", "file", "range", "status"}


class Events(list[dict[str, Any]]):
    """A logger that keeps events, checked."""

    def info(self, line: str) -> None:
        event = json.loads(line)
        assert "\n" not in line
        check(event)
        self.append(event)

    error = info

    def one(self) -> dict[str, Any]:
        [event] = self
        self.clear()
        return event


@contextmanager
def collected(monkeypatch: Any) -> Iterator[Events]:
    monkeypatch.setenv("PENSTOCK_LOG", "json")
    events = Events()
    penstock.set_logger(events)
    try:
        yield events
    finally:
        penstock.set_logger(None)
