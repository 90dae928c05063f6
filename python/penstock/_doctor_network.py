"""Facts of servers that matter for a load: ``penstock doctor`` with a web address, or a repository of the Hub."""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import accumulate
from statistics import median
from typing import Any, cast

from . import _core, _hub
from ._checkpoint import Checkpoint, open_as
from ._choices import Storage
from ._contents import Piece, pieces, received
from ._doctor import environment, shown
from ._errors import InvalidError, PenstockError
from ._paths import is_web, without_secrets
from ._patience import patiently
from ._report import size_text, time_text

_ASKED = 5
"""Requests from which the round trip is taken."""
_SECONDS = 3.0
"""The longest that one rate is measured."""
_ONE, _MANY = 64 << 20, 1 << 30
"""Most bytes that are received to measure one connection, and many."""
_LEAST = 8 << 20
"""Fewest bytes for a rate. With fewer, most of the time is that of the first answer."""
_WINDOW = 256 << 20
_FASTER = 1.25
"""Many connections are faster than one if they bring so many times as much."""
_LONG = 0.02
"""Seconds of a round trip that slices of many small pieces notice."""

_VARIABLES = "PENSTOCK_|SSL_CERT_(FILE|DIR)$|(https?|all|no)_proxy$"
"""Prefixes of the variables that matter for every server."""
_MORE_VARIABLES = {
    "hf": "HF_|HUGGING_FACE_",
    "s3": "AWS_|REQUESTS_CA_BUNDLE$",
    "az": "AZURE_|IDENTITY_(ENDPOINT|HEADER)$",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS|GCE_|CLOUDSDK_|STORAGE_EMULATOR_HOST|NO_GCE_CHECK",
}
"""And for the servers of one scheme."""


def examine(
    source: str, storage: Storage | None = None, *, measure: bool = True, stall_timeout: float | None = None
) -> dict[str, Any]:
    """Everything that `describe` shows, for the servers of ``source``: seconds, bytes, GB/s (1e9). Never a secret.

    ``ok`` says whether the checkpoint could be opened; ``error`` says why not. Measuring receives 64 MiB at most on one
    connection and 1 GiB at most on many, for 3 seconds each, and keeps nothing of it.

    Raises:
        InvalidError: ``source`` or a setting makes no sense.
    """
    scheme = source.partition("://")[0].lower() if is_web(source) else "hf"
    more = [_MORE_VARIABLES[scheme]] if scheme in _MORE_VARIABLES else []
    found: dict[str, Any] = {
        "penstock": _core.__version__,
        "executable": sys.executable,
        "system": f"Linux {platform.release()} on {platform.machine()}, Python {platform.python_version()}",
        "source": without_secrets(source),
        "settings": _settings(storage or {}),
        "hub": None if is_web(source) else _hub_facts(),
        "ok": False,
        "error": None,
        "checkpoint": None,
        "asked": None,
        "proxy": None,
        "rates": {},
        "environment": environment(re.compile("|".join([_VARIABLES, *more]), re.IGNORECASE)),
    }
    try:
        begun = time.perf_counter()
        checkpoint = open_as("path", source, stall_timeout, storage)
        core = checkpoint._core
        found["checkpoint"] = {
            "files": len(checkpoint.files),
            "tensors": len(checkpoint),
            "nbytes": checkpoint.nbytes,
            "open_seconds": time.perf_counter() - begun,
        }
        largest = max(range(len(checkpoint.files)), key=lambda file: _data(core, file))
        address = checkpoint.files[largest]
        looked = patiently(lambda: core.look(largest, _ASKED), stall_timeout, address)
        found["asked"] = _plain(looked, address)
        if looked["error"] is not None:
            raise looked["error"]
        found["ok"] = True
        if measure:
            found["rates"] = _rates(source, storage, checkpoint, stall_timeout)
    except InvalidError:
        raise
    except PenstockError as error:
        found["ok"], found["error"] = False, _told(error)
        if found["asked"] is None and is_web(source):
            looked_at = patiently(lambda: _core.look(source, 1, storage), stall_timeout, without_secrets(source))
            found["asked"] = looked_at and _plain(looked_at, without_secrets(source))
    found["proxy"] = _proxy(found, storage)
    found["therefore"] = _advice(found)
    return found


def _proxy(found: dict[str, Any], storage: Storage | None) -> str | None:
    """Host and port of the proxy for the last server that was asked, or else for the Hub."""
    asked = found["asked"]
    if asked is not None and asked["servers"]:
        server = str(asked["servers"][-1]["server"])
    elif found["hub"] is not None:
        server = str(found["hub"]["endpoint"])
    else:
        return None
    with suppress(PenstockError):  # a variable that makes no sense, which is in the error
        proxy = _core.proxy(server, storage)
        return None if proxy is None else proxy[0]
    return None


def _told(error: PenstockError) -> dict[str, Any]:
    about = {"kind": error.kind, "path": error.path, "message": str(error)}
    return about | {"status": error.status, "request_id": error.request_id}


def _plain(looked: dict[str, Any], address: str) -> dict[str, Any]:
    """The findings of a look, as numbers and texts."""
    error = looked["error"]
    statuses = [server["status"] for server in looked["servers"]]
    ranges = None if not statuses or statuses[-1] not in (200, 206) else statuses[-1] == 206
    return {**looked, "address": address, "ranges": ranges, "error": None if error is None else _told(error)}


def _hub_facts() -> dict[str, Any]:
    from . import _hub_network

    sent = _hub_network.token()
    return {"endpoint": without_secrets(_hub_network.endpoint()), "token": None if sent is None else sent.source}


def _settings(storage: Storage) -> dict[str, dict[str, Any]]:
    """The value of each setting of ``storage=``, and its source."""
    found: dict[str, dict[str, Any]] = {}
    given, environ = cast("dict[str, Any]", storage), environment(re.compile(""))
    for setting in _core.storage_table():
        name = setting["name"]
        variable = f"PENSTOCK_STORAGE_{name.upper()}"
        if given.get(name) is not None:
            found[name] = {"value": shown(name, given[name]), "from": "storage="}
        elif variable in environ:
            found[name] = {"value": environ[variable], "from": variable}
        elif setting["default"] is not None:
            found[name] = {"value": str(setting["default"]), "from": "default"}
        elif name == "ca":
            named = [variable for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR") if environ.get(variable)]
            variable = ", ".join(named) or "the system's"
            try:
                places = [str(place) for place in _core.authorities(storage)]
                found[name] = {"value": ", ".join(places), "from": variable}
            except PenstockError:
                found[name] = {"value": "none", "from": variable}
    return found


# Rates


def _data(core: _core.Checkpoint, file: int) -> int:
    first, last = core.file_tensors(file)
    return core.info(last - 1)[5] - core.data_start(file) if last > first else 0


def _rates(
    source: str, storage: Storage | None, checkpoint: Checkpoint, stall_timeout: float | None
) -> dict[str, dict[str, Any]]:
    """The rates of one connection and of many, each of other bytes if there are enough."""
    core = checkpoint._core
    wanted = [piece for piece in pieces(core, range(len(core))) if _is_remote(checkpoint, piece)]
    total = sum(piece.nbytes for piece in wanted)
    first = _upto(wanted, min(_ONE, max(_LEAST, total // 4)))
    others = wanted[len(first) :]
    rest = _upto(others if sum(piece.nbytes for piece in others) >= _LEAST else wanted, _MANY)
    alone = cast("Storage", {**(storage or {}), "connections": 1})
    # What was opened by a name is there by now: nobody needs to be told again that the cache lacks it
    explicit = source if is_web(source) or source.startswith(_hub.SCHEME) else _hub.SCHEME + source
    one = open_as("path", explicit, stall_timeout, alone)._core
    return {"one": _rate(one, first, stall_timeout), "many": _rate(core, rest, stall_timeout)}


def _is_remote(checkpoint: Checkpoint, piece: Piece) -> bool:
    return is_web(checkpoint._core.path(checkpoint._core.info(piece.tensor)[3]))


def _upto(wanted: Sequence[Piece], most: int) -> list[Piece]:
    """The first of these, of so many bytes together; at least one, if there is one."""
    sums = list(accumulate(piece.nbytes for piece in wanted))
    return list(wanted[: max(1, sum(reached <= most for reached in sums))])


def _rate(core: _core.Checkpoint, wanted: Sequence[Piece], stall_timeout: float | None) -> dict[str, Any]:
    """The rate of a load of these, connecting included."""
    if not wanted:
        return {"error": "the checkpoint has no bytes to measure with"}
    reports: list[dict[str, Any]] = []
    begun = time.perf_counter()
    with closing(cast(Any, received(core, wanted, _WINDOW, stall_timeout, reports))) as parts:
        for _ in parts:
            if (seconds := time.perf_counter() - begun) > _SECONDS:
                break
        seconds = time.perf_counter() - begun
    network = reports[0]["network"]
    return {"gbps": network["received_bytes"] / seconds / 1e9, "seconds": seconds, **network}


# What follows


def _advice(found: dict[str, Any]) -> list[str]:
    asked, error = found["asked"], found["error"]
    said: list[str] = []
    if error is not None:
        said.append(_why(found))
    if asked is not None and asked["ranges"] is not None and error is None:
        if asked["validator"] != "strong ETag":
            said.append(
                "the server gives no strong ETag: sizes and dates are compared instead, and a file that is replaced by "
                "another of the same size and date is not noticed. Have the server send ETags"
            )
        if asked["connections"] > 1:
            said.append("the server closes its connections: each request waits for a new one. Turn on keep-alive")
        servers = [server["server"] for server in asked["servers"]]
        if servers[0] != servers[-1]:
            said.append(f"the bytes come from {servers[-1]}: a firewall must let through to both")
        if median(asked["round_trips"]) >= _LONG:
            said.append("a request waits long for its answer: slices in many small pieces take longer than their bytes")
        said += _of_rates(found)
    if found["proxy"] is not None:
        said.append(f"the server is reached through the proxy {found['proxy']}")
    return said


def _why(found: dict[str, Any]) -> str:
    """Advice for the error."""
    asked, error = found["asked"], found["error"]
    if asked is not None and asked["ranges"] is False:
        return "the server does not support range requests: nginx, Apache and every object store do"
    if found["checkpoint"] is not None:
        return "the checkpoint can be opened, and its bytes cannot all be read: see the error"
    server = asked["servers"][-1] if asked is not None and asked["servers"] else None
    if server is None:
        return "the checkpoint cannot be opened: see the error"
    if asked["error"] is None:
        return "the server sends what was asked for, and it cannot be opened as a checkpoint: see the error"
    if error["kind"] == "Unsupported":
        return "the checkpoint cannot be opened: see the error"
    if server["status"] in (401, 403):
        return "the server answers, and does not let us: is the address right, and if it is signed, is it still valid?"
    if server["status"] is not None:
        return f"the server answers, with status {server['status']}: is the address right?"
    if "certificate" in error["message"]:
        return "TLS does not trust the server: name the certificates of your authority, --storage ca=FILE"
    if server["addresses"] == 0:
        return "the server's name has no address: is it spelled right, and does this machine have a name server?"
    if server["connect_seconds"] is None:
        return "no server takes connections there: is the port right, does the server run, does a firewall drop them?"
    return "the connection is there, and the server does not answer as a web server does: see the error"


def _of_rates(found: dict[str, Any]) -> list[str]:
    if not found["rates"]:
        return []
    one, many = found["rates"]["one"], found["rates"]["many"]
    if "gbps" not in one or "gbps" not in many:
        return []
    said = []
    retries = one["retries"] + many["retries"]
    if retries:
        said.append(f"{retries} requests failed and were sent again: the server is busy, or connections break off")
    few = many["received_bytes"] < _LEAST and many["seconds"] < _SECONDS
    most = int(found["settings"]["connections"]["value"])
    if few:
        said.append("the checkpoint is too small to measure a rate: most of the time is that of the first answers")
    elif many["gbps"] < _FASTER * one["gbps"]:
        said.append("more connections bring no more than one: the network, the server or this machine is the limit")
    elif many["connections"] >= most:
        said.append(f"all {most} connections were used, and more may bring more: raise the setting connections")
    else:
        said.append("many connections are faster than one: a load has as many as bring more")
    if not few and many["gbps"]:
        seconds = found["checkpoint"]["nbytes"] / many["gbps"] / 1e9
        said.append(f"at this rate the whole checkpoint takes {time_text(seconds)}")
    return said


# For people


def describe(found: dict[str, Any]) -> str:
    """`examine`'s result for people."""
    rows = [("penstock", found["penstock"]), ("system", found["system"]), ("source", found["source"])]
    if hub := found["hub"]:
        token = f"token from {hub['token']}" if hub["token"] else "no token"
        rows.append(("Hub", f"{hub['endpoint']}, {token}"))
    if about := found["checkpoint"]:
        files = f"{about['files']} file{'s' * (about['files'] != 1)}"
        size = f"{about['tensors']:,} tensors, {size_text(about['nbytes'])} in {files}"
        rows.append(("opened", f"{size}, in {time_text(about['open_seconds'])}"))
    if asked := found["asked"]:
        rows += [("server" if n == 0 else "leads to", _server(one)) for n, one in enumerate(asked["servers"])]
        if asked["size"] is not None:
            kept = "kept" if asked["connections"] == 1 else "closed"
            times = f"median of {len(asked['round_trips'])} requests, connection {kept}"
            rows.append(("round trip", f"{time_text(median(asked['round_trips']))} ({times})"))
        if asked["ranges"] is not None:
            rows.append(("ranges", "supported" if asked["ranges"] else "not supported"))
        if asked["validator"]:
            rows.append(("version", f"told by {asked['validator']}"))
    names = {"one": "1 connection", "many": "many"}
    rows += [(names[key], _rate_text(rate)) for key, rate in found["rates"].items()]
    settings = [f"{name} {about['value']} ({about['from']})" for name, about in found["settings"].items()]
    rows.append(("settings", ", ".join(settings)))
    if found["environment"]:
        rows.append(("environment", ", ".join(f"{k}={v}" for k, v in found["environment"].items())))
    if found["error"]:
        rows.append(("error", found["error"]["message"]))
    width = max(len(label) for label, _ in rows) + 2
    lines = [f"{label:<{width}}{text}" for label, text in rows]
    return "\n".join([*lines, "", "therefore:", *(f"  - {said}" for said in found["therefore"])])


def _server(asked: dict[str, Any]) -> str:
    steps = []
    if asked["lookup_seconds"] is not None:
        count = asked["addresses"]
        steps.append(f"name {time_text(asked['lookup_seconds'])} ({count} address{'es' * (count != 1)})")
    for key, label in (("connect_seconds", "connect"), ("tls_seconds", "TLS"), ("first_byte_seconds", "first byte")):
        if asked[key] is not None:
            steps.append(f"{label} {time_text(asked[key])}")
    if asked["status"] is not None:
        steps.append(f"status {asked['status']}")
    return f"{asked['server']}: {', '.join(steps) or 'not reached'}"


def _rate_text(rate: dict[str, Any]) -> str:
    if "error" in rate:
        return str(rate["error"])
    count = rate["connections"]
    parts = [f"{size_text(rate['received_bytes'])} in {time_text(rate['seconds'])}", f"{rate['requests']} requests"]
    parts.append(f"{count} connection{'s' * (count != 1)}")
    return f"{size_text(rate['gbps'] * 1e9)}/s ({', '.join(parts)})"
