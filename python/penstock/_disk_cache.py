"""``penstock cache``: what the disk cache has, what goes out of it, and whether its bytes are those that came."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import _core
from ._choices import Storage
from ._errors import InvalidError, LimitError, NotFoundError
from ._progress import INTERVAL, Meter, Progress
from ._report import size_text
from ._terminal import styled, table, wrapped

VARIABLE = "PENSTOCK_STORAGE_DISK_CACHE"
_MARKER = "penstock-disk-cache"
"""The file that says that a folder is a disk cache."""
_RUN = 16
"""Blocks, of 1 MiB, that a thread compares in one call."""
_BLOCK = 1 << 20
_MOST_THREADS = 8


def open_cache(folder: str | None, storage: Storage) -> _core.CacheFolder:
    """The disk cache in a folder that is there; None: the one of the settings, or of the environment.

    Raises:
        InvalidError: no folder is named.
        NotFoundError: it is no disk cache.
    """
    folder = folder or os.fspath(storage.get("disk_cache") or os.environ.get(VARIABLE, ""))
    if not folder:
        raise InvalidError(f"which disk cache? Give --disk-cache FOLDER, or set {VARIABLE}")
    if not Path(folder, _MARKER).is_file():
        raise NotFoundError("there is no disk cache here", path=folder)
    return _core.CacheFolder({**storage, "disk_cache": folder})


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _rows(entries: list[dict[str, Any]], now: float) -> list[list[str]]:
    rows = [["address", "version", "size", "there", "on disk", "last use", ""]]
    for entry in entries:
        share = f"{100 * entry['there'] // entry['size']}%" if entry["size"] else "100%"
        version = entry["version"].strip('"')
        rows.append(
            [
                entry["address"],
                version if len(version) <= 12 else f"{version[:11]}…",
                size_text(entry["size"]),
                share,
                size_text(entry["disk"]),
                f"{_age(now - entry['used'])} ago",
                ", ".join(
                    word for word, is_so in (("open", entry["open"]), ("in the Hub's cache", entry["linked"])) if is_so
                ),
            ]
        )
    return rows


def listed(cache: _core.CacheFolder) -> dict[str, Any]:
    """The objects of the cache, their sums, and its limits."""
    entries = cache.entries()
    total, free, keep, most = cache.room()
    sums = {key: sum(entry[key] for entry in entries) for key in ("size", "there", "disk")}
    writable, private = cache.access()
    return {
        "folder": cache.path(),
        "entries": entries,
        "total": {"entries": len(entries), **sums, "open": sum(entry["open"] for entry in entries)},
        "file_system": {"nbytes": total, "free": free},
        "limits": {"free": keep, "size": most},
        "writable": writable,
        "private": private,
    }


def described(found: Mapping[str, Any]) -> str:
    """The result of `listed`, as text."""
    entries, sums, limits = found["entries"], found["total"], found["limits"]
    file_system = found["file_system"]
    head = f"{found['folder']}: {len(entries)} object{'s' * (len(entries) != 1)}"
    if entries:
        head += f", {size_text(sums['there'])} of {size_text(sums['size'])} there, {size_text(sums['disk'])} on disk"
    lines = [styled(wrapped(head), "bold")]
    if entries:
        newest = sorted(entries, key=lambda entry: -entry["used"])
        lines += ["", table(_rows(newest, time.time()), right=(2, 3, 4, 5)), ""]
    limit = "no limit of its own" if limits["size"] is None else f"at most {size_text(limits['size'])} in the cache"
    room = f"free {size_text(file_system['free'])} of {size_text(file_system['nbytes'])}; {limit}; "
    lines.append(wrapped(f"{room}{size_text(limits['free'])} stay free"))
    if not found["writable"]:
        lines.append("this user may only read it")
    return "\n".join(lines)


def pruned(cache: _core.CacheFolder, dry_run: bool, **how: Any) -> dict[str, Any]:
    """Removes entries that nobody has open: see `_core.CacheFolder.prune`."""
    gone, open_, kept = cache.prune(dry_run=dry_run, **how)
    return {"folder": cache.path(), "dry_run": dry_run, "gone": gone, "open": open_, "kept": kept}


def describe_pruned(found: Mapping[str, Any]) -> str:
    """The result of `pruned`, as text."""

    def line(word: str, entry: Mapping[str, Any], why: str = "") -> list[str]:
        return [word, entry["address"], size_text(entry["disk"]), why]

    word = "would go" if found["dry_run"] else "gone"
    rows = [line(word, entry) for entry in found["gone"]]
    rows += [line("stays", entry, "a process has it open") for entry in found["open"]]
    lines = [table(rows, right=(2,), narrow=1)] if rows else []

    def many(entries: list[dict[str, Any]]) -> str:
        return f"{len(entries)} object{'s' * (len(entries) != 1)}, {size_text(sum(entry['disk'] for entry in entries))}"

    lines.append(f"{'would go' if found['dry_run'] else 'gone'}: {many(found['gone'])}")
    lines += [f"open, so they stay: {many(found['open'])}"] if found["open"] else []
    lines += [f"not chosen, so they stay: {many(found['kept'])}"] if found["kept"] else []
    return "\n".join(lines)


class _Run(NamedTuple):
    """Blocks of an entry that a thread compares."""

    entry: dict[str, Any]
    first: int
    past: int


class _Comparing:
    """The threads that compare blocks."""

    def __init__(self, cache: _core.CacheFolder, entries: list[dict[str, Any]], keep: bool) -> None:
        self._cache, self._keep = cache, keep
        runs = []
        for entry in entries:
            blocks = -(-entry["size"] // _BLOCK)
            runs += [_Run(entry, first, min(first + _RUN, blocks)) for first in range(0, blocks, _RUN)]
        self._left = deque(runs)
        self.bad: list[dict[str, Any]] = []
        self.nbytes = 0
        self._counted = threading.Lock()
        self._failure: BaseException | None = None
        self._stop = False

    def run(self, progress: Progress) -> None:
        total = sum({run.entry["id"]: run.entry["there"] for run in self._left}.values())
        count = min(len(self._left), len(os.sched_getaffinity(0)), _MOST_THREADS)
        names = (f"penstock-compare-{i}" for i in range(count))
        threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        with Meter(progress, "compare") as meter:
            try:
                for thread in threads:
                    _start(thread, alone=thread is threads[0])
                for thread in threads:
                    while thread.ident is not None and thread.is_alive():
                        thread.join(INTERVAL)
                        meter.update(self.nbytes, total)
            finally:
                self._stop = True
            meter.update(self.nbytes, self.nbytes, final=True)
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            while not self._stop:
                try:
                    run = self._left.popleft()
                except IndexError:
                    return
                entry = run.entry
                found = self._cache.verify(entry["id"], run.first, run.past, not self._keep)
                if found is None:
                    continue  # evicted meanwhile
                nbytes, bad = found
                with self._counted:
                    self.nbytes += nbytes
                    about = {"address": entry["address"], "version": entry["version"], "path": entry["path"]}
                    self.bad += [{**about, "begin": begin, "end": end} for begin, end in bad]
        except BaseException as failure:
            self._failure, self._stop = failure, True


def _start(thread: threading.Thread, alone: bool) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        if alone:  # fewer do the work too; none cannot
            raise LimitError(f"cannot start the thread that compares: {error}") from error


def compared(cache: _core.CacheFolder, prefix: str, keep: bool, progress: Progress) -> dict[str, Any]:
    """Compares the blocks of all entries whose address begins with ``prefix`` with their checksums.

    Args:
        keep: Bad blocks stay as they are. Otherwise they are missing from now on, so that the next load fetches them.
    """
    begun = time.perf_counter()
    entries = [entry for entry in cache.entries() if entry["address"].startswith(prefix)]
    comparing = _Comparing(cache, entries, keep)
    comparing.run(progress)
    bad = sorted(comparing.bad, key=lambda block: (block["address"], block["version"], block["begin"]))
    return {
        "ok": not bad,
        "folder": cache.path(),
        "entries": len(entries),
        "nbytes": comparing.nbytes,
        "seconds": time.perf_counter() - begun,
        "bad": bad,
        "kept": keep,
    }


def describe_compared(found: Mapping[str, Any]) -> str:
    """The result of `compared`, as text."""
    bad = found["bad"]
    mark = styled("FAILED", "bold red")
    lines = [f"{mark}  {block['address']}: bytes {block['begin']} to {block['end']}" for block in bad]
    seconds = max(found["seconds"], 1e-9)
    rate = f"{found['nbytes'] / seconds / 1e9:.2f} GB/s"
    many = f"{found['entries']} object{'s' * (found['entries'] != 1)}"
    head = f"{size_text(found['nbytes'])} of {many} compared with their checksums in {seconds:.1f} s: {rate}"
    lines.append(f"{head}; {len(bad)} bad block{'s' * (len(bad) != 1)}" if bad else f"{head}; all well")
    if bad:
        lines.append("they stay as they are" if found["kept"] else "the next load fetches them again")
    return "\n".join(lines)
