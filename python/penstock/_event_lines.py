"""Events as they are written: a dict, and one line of JSON or text. No secret is in any of them.

docs/operations.md has the table of the keys, and the tests compare every event with it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from ._event_words import About, Failure, Logger, Measured, Out, rank_of_process
from ._report import SOURCES, size_text, time_text

VERSION = 1
"""The version of the keys. A key may be added to a version. None changes its meaning, and none goes."""

_HUB = re.compile(r"(?:^|/)models--([^/]+)/snapshots/([^/]+)")
_ADDRESS = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*):(/{1,2})([^\s'\"<>]*)")
#: The text before a secret, such as a header or a parameter of an address.
_NAMED = re.compile(
    r"(?i)\b((?:\w+[-_])*(?:x-(?:amz|goog|ms)-[\w-]+|signature|sig|password|passwd|secret[\w-]*|token|"
    r"api[-_]?key|account[-_]?key|access[-_]?key[\w-]*|credential|bearer)[\"']?(?:\s*[=:]\s*|\s+(?=\S*\d))[\"']?(?:bearer\s+)?)"
    r"[^\s\"'&,;]+"
)
#: Headers whose whole line is secret.
_HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie)([\"']?\s*[=:]\s*)[^\r\n]+")
_VARIABLE = re.compile(r"(?i)key|secret|token(?!iz)|passw|credential|(^|_)sas(_|$)")
#: A shorter value of such a variable could be part of any word.
_SHORTEST = 8


def _without_address(found: re.Match[str]) -> str:
    scheme, slashes, rest = found.groups()
    rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    host, slash, path = rest.partition("/")
    if "@" in host and (scheme.lower() != "hf" or ":" in host):
        host = host.rpartition("@")[2]
    return f"{scheme}:{slashes}{host}{slash}{path}"


def clean(text: str) -> str:
    """A text without what may be a secret, on one line.

    Addresses lose user names, passwords, query and fragment. What stands behind the name of a secret goes, and so do
    the values of variables of the environment with such names.
    """
    if "://" in text or ":/" in text:
        text = _ADDRESS.sub(_without_address, text)
    text = _HEADER.sub(r"\1\2***", text)
    text = _NAMED.sub(r"\1***", text)
    for name in os.environ:
        if _is_secret(name):
            value = os.environ.get(name, "")
            if len(value) >= _SHORTEST and value in text:
                text = text.replace(value, "***")
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


@cache
def _is_secret(name: str) -> bool:
    """Whether a variable of the environment is one whose value nobody may see."""
    return _VARIABLE.search(name) is not None


def model_of(of: Any) -> str:
    """The name of what is loaded: a repository, a folder, a file or an address."""
    if of is None:
        return ""
    listed = [os.fspath(of)] if isinstance(of, (str, os.PathLike)) else [os.fspath(path) for path in of]
    names = sorted({_named(str(path)) for path in listed})
    if len(names) > 1:
        folders = sorted({name.rpartition("/")[0] for name in names})
        names = folders if len(folders) == 1 else [f"{names[0]} and {len(names) - 1} more"]
    return clean(names[0]) if names else ""


def _named(path: str) -> str:
    """A snapshot in the Hub's cache by the name of its repository."""
    found = _HUB.search(path)
    return f"{found[1].replace('--', '/')}@{found[2][:12]}" if found else path


def progress(about: About, done: int, total: int, seconds: float) -> dict[str, Any]:
    """The event of a load that is not over."""
    return {
        "v": VERSION,
        "event": "progress",
        **_of(about),
        "time": round(time.time(), 3),
        "seconds": round(seconds, 3),
        "bytes": done,
        "total": total,
    }


def _of(about: About) -> dict[str, Any]:
    return {
        "verb": about.verb,
        "engine": about.engine,
        "model": model_of(about.of),
        "rank": rank_of_process(),
        "pid": os.getpid(),
    }


def ended(about: About, total: Measured, seconds: float, error: Failure | None) -> dict[str, Any]:
    """The event of one that has ended."""
    known = {"plan": total.plan, "move": total.move, "hand_out": total.hand_out, "sync": total.sync}
    phases = {**known, "caller": max(0.0, seconds - sum(known.values()))}
    mapped = total.sources[0] == sum(total.sources) and total.cache_hits >= total.nbytes
    outcome = "ok" if error is None else "cancelled" if error.cancelled else "failed"
    return {
        "v": VERSION,
        "event": "end",
        **_of(about),
        "outcome": outcome,
        "time": round(time.time(), 3),
        "seconds": round(seconds, 6),
        "phases": {name: round(took, 6) for name, took in phases.items()},
        "bytes": total.nbytes,
        "tensors": total.tensors,
        "sources": dict(zip(SOURCES, total.sources, strict=True)),
        "rate": None if mapped or not total.nbytes or not seconds else round(total.nbytes / seconds),
        "bound_by": total.bound_by or None,
        "requests": total.requests,
        "retries": total.retries,
        "busy": total.busy,
        "cache_hits": total.cache_hits,
        "exchange": None
        if not total.ranks
        else {"choice": total.choice, "ranks": total.ranks, "sent": total.sent, "received": total.sources[-1]},
        "fallbacks": [{"from": a, "to": b, "reason": clean(reason)} for a, b, reason in total.fallbacks],
        "error": None if error is None else _error(error),
    }


def _error(error: Failure) -> dict[str, Any]:
    return {
        "type": error.type,
        "message": clean(error.message),
        "file": None if error.file is None else clean(error.file),
        "range": None if error.range is None else list(error.range),
        "status": error.status,
    }


_VERBS = {"load_into": "load into", "safe_open": "reads", "start": "load"}


def text_of(event: Mapping[str, Any]) -> str:
    """An event on one line, for people."""
    engine = f" ({event['engine']})" if event["engine"] else ""
    what = f"penstock: {_VERBS.get(event['verb'], event['verb'])}{engine} of {event['model']}, rank {event['rank']}"
    done, seconds = event["bytes"], event["seconds"]
    if event["event"] == "progress":
        share = f" ({100 * done // event['total']}%)" if event["total"] else ""
        rate = f", {done / seconds / 1e9:.2f} GB/s" if seconds else ""
        return f"{what}: {size_text(done)} of {size_text(event['total'])}{share} after {time_text(seconds)}{rate}"
    many = f"{event['tensors']} tensor{'s' * (event['tensors'] != 1)}, {size_text(done)} in {time_text(seconds)}"
    if event["outcome"] != "ok":
        how = "was cancelled" if event["outcome"] == "cancelled" else "failed"
        many = f"{how} after {time_text(seconds)}, {many.partition(' in ')[0]}"
    elif event["rate"]:
        many += f" ({event['rate'] / 1e9:.2f} GB/s)"
    parts = [f"{what}: {many}"]
    sources = [f"{source} {size_text(nbytes)}" for source, nbytes in event["sources"].items() if nbytes]
    if sources:
        parts.append(", ".join(sources))
    phases = [f"{name.replace('_', '-')} {time_text(took)}" for name, took in event["phases"].items() if took >= 0.0005]
    if phases:
        parts.append(", ".join(phases))
    if event["bound_by"]:
        parts.append(f"bound by {event['bound_by']}")
    counts = [f"{event[key]} {key}" for key in ("requests", "retries", "busy") if event[key]]
    if event["cache_hits"]:
        counts.append(f"{size_text(event['cache_hits'])} were in the page cache")
    if counts:
        parts.append(", ".join(counts))
    if exchange := event["exchange"]:
        parts.append(f"exchange {exchange['choice']} among {exchange['ranks']} ranks")
    parts += [f"fell back from {one['from']} to {one['to']}: {one['reason']}" for one in event["fallbacks"]]
    if (error := event["error"]) and event["outcome"] == "failed":
        parts.append(_error_text(error))
    return "; ".join(parts)


def _error_text(error: Mapping[str, Any]) -> str:
    where = ""
    if error["file"] and error["file"] not in error["message"]:
        where = f"{error['file']}: "
    if error["range"]:
        where += f"bytes {error['range'][0]}..{error['range'][1]}: "
    return f"{error['type']}: {where}{error['message']}".rstrip(": ")


def write(out: Out, event: dict[str, Any]) -> None:
    """Writes an event as one line."""
    line = json.dumps(event, separators=(",", ":")) if out.format == "json" else text_of(event)
    failed = event.get("outcome") == "failed"
    logger: Logger | logging.Logger | logging.LoggerAdapter[Any]
    if out.logger is None:
        _to_stderr(line)
        return
    logger = logging.getLogger(out.logger) if isinstance(out.logger, str) else out.logger
    if isinstance(logger, (logging.Logger, logging.LoggerAdapter)):
        logger.log(logging.ERROR if failed else logging.INFO, "%s", line, extra={"penstock": event})
    elif failed:
        logger.error(line)
    else:
        logger.info(line)


def _to_stderr(line: str) -> None:
    """In one write, so that lines of several threads and ranks do not mix."""
    stream = sys.stderr
    if stream is not None:
        stream.write(line + "\n")
        stream.flush()
