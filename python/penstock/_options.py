"""``options=``: the `Options` that are meant by what a function was given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ._core import Options
from ._errors import InvalidError
from ._late_imports import importing
from ._paths import local_path


def options_listed() -> str:
    """The names of all options by group, for an error."""
    return "; ".join(f"{group} options: {', '.join(names)}" for group, names in Options.groups().items())


def default_text(option: Mapping[str, Any]) -> str:
    """The default of an entry of `_core.option_table`, as the command line shows it: 4MiB, 120, 0: adapts, auto."""
    default = option["default"]
    if option["means"]:
        return f"{default}: {option['means']}" if default != "" else str(option["means"])
    if option["form"] == "Size":
        for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
            if default and default % (1 << power) == 0:
                return f"{default >> power}{unit}"
    return f"{default:g}" if option["form"] == "Seconds" else str(default)


def make_options(options: Options | Mapping[str, Any] | None, **changes: Any) -> Options:
    """The options meant by an `Options`, a mapping of its keywords, or None, with ``changes`` applied."""
    if isinstance(options, Options):
        if not changes:
            return _checked(options)
        given = {name: getattr(options, name) for name in Options.names()}
    elif options is None:
        given = {}
    elif isinstance(options, Mapping):
        given = dict(options)
    else:
        raise InvalidError(f"options={options!r}: give penstock.Options(...) or a dict with the same keywords")
    given.update(changes)
    unknown = [str(name) for name in given if name not in Options.names()]
    if unknown:
        with importing():
            import difflib

        close = [name for word in unknown for name in difflib.get_close_matches(word, Options.names(), 1)]
        raise InvalidError(
            f"unknown option{'s' * (len(unknown) > 1)} {', '.join(unknown)}"
            + f" (did you mean {', '.join(close)}?)" * bool(close)
            + f"; {options_listed()}"
        )
    if isinstance(given.get("trace"), os.PathLike):
        given["trace"] = local_path(given["trace"], "trace", written=True)
    return _checked(Options(**given))


def _checked(options: Options) -> Options:
    if options.trace:
        local_path(options.trace, "trace", written=True)
    return options
