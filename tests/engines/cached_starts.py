"""The common part of starts from a bucket behind a disk cache, of either engine: what the server has sent, and the wait
until the cache has all of what came."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from penstock import _core

#: Seconds until the cache has what a start has received.
PATIENCE = 120


def sent(port: int) -> int:
    """The bytes that the server has sent so far, by the port that tells."""
    with closing(socket.create_connection(("127.0.0.1", port))) as telling, telling.makefile() as said:
        return int(said.read())


def until_kept(storage: Mapping[str, Any]) -> dict[str, int]:
    """Waits until the cache has every byte of every object that it knows. Their sizes by their names."""
    cache = _core.CacheFolder(dict(storage))
    limit = time.monotonic() + PATIENCE
    while True:
        entries = cache.entries()
        if entries and all(entry["there"] == entry["size"] for entry in entries):
            return {entry["address"].rpartition("/")[2]: entry["size"] for entry in entries}
        lacks = [(entry["address"], entry["there"], entry["size"]) for entry in entries]
        assert time.monotonic() < limit, f"the cache lacks something: {lacks}"
        time.sleep(0.05)


def start(begins: Callable[[], dict[str, Any]], storage: Mapping[str, Any], port: int) -> dict[str, Any]:
    """What an engine says that begins here, and the bytes that the server had sent before and after it."""
    before = sent(port)
    found = begins()
    kept = until_kept(storage)
    return {**found, "before": before, "after": sent(port), "kept": kept, "cache": storage["disk_cache"]}


def contents(folder: Path) -> dict[str, str]:
    """Digests of the small files that an engine finds in its folder."""
    files = (path for path in folder.iterdir() if path.is_file() and path.suffix != ".safetensors")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def told(report: Mapping[str, Any]) -> dict[str, Any]:
    """The facts about one load that are compared."""
    cache = report["disk_cache"]
    return {
        "nbytes": report["nbytes"],
        "fallbacks": report["fallbacks"],
        "cached_bytes": cache.cached_bytes,
        "network_bytes": cache.network_bytes,
        "reason": cache.reason,
    }
