"""Load format ``penstock`` was asked for, and an engine does not use it: an error, or a warning if the user says so."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from .._errors import InvalidError, UnsupportedError

STRICT = "strict"
"""The key in what the user gives the engine for its loader."""
VARIABLE = "PENSTOCK_STRICT"
"""The variable with its default for a process."""
_VALUES = {"1": True, "true": True, "0": False, "false": False}
_logger = logging.getLogger("penstock")


def strict_of(given: Any, engine: str) -> bool:
    """Whether a load of the engine's own is an error. ``given``: what the user gave the engine for its loader.

    Raises:
        InvalidError: the value is neither true nor false.
    """
    value = given.get(STRICT) if isinstance(given, Mapping) else None
    if isinstance(value, bool):
        return value
    if value is not None:
        raise InvalidError(f"{engine}: {STRICT}={value!r}: give true or false")
    text = os.environ.get(VARIABLE, "1")
    if text.lower() not in _VALUES:
        raise InvalidError(f"{VARIABLE}={text!r}: give one of {', '.join(_VALUES)}")
    return _VALUES[text.lower()]


def not_used(engine: str, why: str, strict: bool, way_out: str = "") -> None:
    """Says that the engine loads in its own way.

    Args:
        way_out: What else the user can do, as a main clause.

    Raises:
        UnsupportedError: ``strict``.
    """
    if strict:
        ways = f"{way_out}, or " if way_out else ""
        raise UnsupportedError(
            f"{engine}: load format penstock was asked for, and {engine} would load in its own way: {why}; {ways}"
            f"accept that with --model-loader-extra-config '{{\"{STRICT}\": false}}' or {VARIABLE}=0"
        )
    _logger.warning("penstock: loading as %s does: %s", engine, why)
