"""Whether an engine is one that Penstock knows: its release, and the form of each place that Penstock hooks into.

A release that was not tested is no error: if every place has the form that is known, the process says so once, and goes
on. A place of another form is an error at the start, before anything is loaded.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import re
import sys
import zlib
from collections.abc import Sequence
from typing import Any

from ._known import Engine, Hook

__all__ = ["difference", "is_tested", "once_per_process", "tested", "version_of", "way_out", "warn_untested"]

_logger = logging.getLogger("penstock")
#: Messages that were given. Processes that this one starts inherit them: an engine's ranks need not repeat them.
_SAID = "_PENSTOCK_SAID"


def version_of(engine: Engine) -> str | None:
    """The version of the engine that this process has imported; None if it has none, or does not say it."""
    found = getattr(sys.modules.get(engine.module), "__version__", None)
    return found if isinstance(found, str) else None


def _numbers(version: str, digits: int) -> tuple[int, ...]:
    """The first numbers of a version: (0, 33) of 0.33.1+cpu."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return () if release is None else tuple(map(int, release[0].split(".")))[:digits]


def is_tested(engine: Engine, version: str | None) -> bool:
    """Whether the tests ran with this minor release. A version that is not known is not tested."""
    minor = _numbers(version or "", engine.digits)
    return any(_numbers(one, engine.digits) == minor for one in engine.tested)


def tested(engine: Engine) -> str:
    """The releases that the tests ran with, as words."""
    return f"{engine.name} {', '.join(engine.tested)}"


def way_out(engine: Engine) -> str:
    """Advice to the user, as a main clause."""
    return f"install a release that Penstock was tested with ({tested(engine)})"


def difference(engine: Engine) -> str | None:
    """The places of the engine that differ from the known form; None if there are none.

    Imports the modules that the places are in.
    """
    minor = _numbers(version_of(engine) or "", engine.digits)
    expected = [hook for hook in engine.hooks if not hook.since or not minor or minor >= hook.since]
    found = [why for hook in expected if (why := _other_form(hook)) is not None]
    if not found:
        return None
    version = version_of(engine) or "of a version that it does not say"
    places = (
        f"{len(found)} places that Penstock hooks into have" if found[1:] else "a place that Penstock hooks into has"
    )
    known = f"another form than in {engine.tested[-1]}, the last known version"
    return f"in {engine.name} {version} {places} {known}: {'; '.join(found)}"


def _other_form(hook: Hook) -> str | None:
    """The difference of a place from its known form."""
    module, _, name = hook.place.partition(":")
    shown = f"{name} of {module}"
    try:
        found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception as error:  # a module that has changed fails in ways of its own
        return f"{shown}: {error}"
    if lacking := [one for one in hook.fields if one not in getattr(found, "__dataclass_fields__", {})]:
        return f"{shown} lacks {', '.join(lacking)}"
    if hook.takes is not None:
        try:
            takes = list(inspect.signature(found).parameters)
        except (TypeError, ValueError) as error:
            return f"{shown}: {error}"
        wanted = [one.strip() for one in hook.takes.split(",") if one.strip()]
        if not _fits(takes, wanted):
            return f"{shown} takes {', '.join(takes) or 'nothing'}, not {hook.takes or 'nothing'}"
    code: Any = getattr(inspect.unwrap(found), "__code__", None)
    if unused := [one for one in hook.calls if code is None or one not in code.co_names]:
        return f"{shown} does not call {', '.join(unused)}"
    return None


def _fits(takes: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether parameters are those that are wanted; ``...`` stands for any number of others."""
    if not wanted:
        return not takes
    if wanted[0] == "...":
        return any(_fits(takes[start:], wanted[1:]) for start in range(len(takes) + 1))
    return bool(takes) and takes[0] == wanted[0] and _fits(takes[1:], wanted[1:])


def once_per_process(text: str) -> bool:
    """True if this text was not logged before, by this process or by the processes that started it.

    A second engine in a process does not log it again: the text is about the installed release, which stays the same
    while the process lives.
    """
    mark = f"{zlib.crc32(text.encode()):08x}"
    said = os.environ.get(_SAID, "").split()
    if mark in said:
        return False
    os.environ[_SAID] = " ".join([*said, mark])
    return True


def warn_untested(engine: Engine) -> None:
    """Says once in a process that the tests did not run with this release, and that every place has a known form."""
    version = version_of(engine)
    if sys.modules.get(engine.module) is None or is_tested(engine, version):
        return
    text = (
        f"penstock: {engine.name} {version or 'of an unknown version'} is not a release that Penstock was tested with "
        f"({tested(engine)}); every place that it hooks into has the form that it knows, so it loads"
    )
    if once_per_process(text):
        _logger.warning("%s", text)
