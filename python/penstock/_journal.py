"""Journals of pushes: files of this machine that say what a push has begun. A killed process leaves one.

The core writes them (``save/journal.rs``), and holds a lock on each as long as its push runs. The kernel releases it
when the process is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ._errors import InvalidError, WriteError

VARIABLE = "PENSTOCK_STATE_FOLDER"
_SUFFIX = ".jsonl"


def folder() -> Path:
    """Where journals are: a folder of this user."""
    named = os.environ.get(VARIABLE)
    if named:
        place = Path(named)
        if not place.is_absolute():
            raise InvalidError(f"{VARIABLE}={named!r}: give an absolute path")
        return place / "push"
    state = os.environ.get("XDG_STATE_HOME", "")
    home = Path(state) if state.startswith("/") else Path("~/.local/state").expanduser()
    return home / "penstock/push"


def new() -> str:
    """The path of a journal that is to be written."""
    return str(folder() / f"{uuid.uuid4().hex}{_SUFFIX}")


class Journal:
    """The lines of a journal."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        lines = []
        for line in text.splitlines():
            with suppress(ValueError):  # the last one may break off where the process was killed
                found = json.loads(line)
                lines += [found] if isinstance(found, dict) else []
        self._head: dict[str, Any] = lines[0] if lines and "folder" in lines[0] else {}
        self._lines = [line for line in lines if isinstance(line.get("object"), str)]

    @property
    def address(self) -> str:
        """Where the push goes; empty if the journal does not say so."""
        return str(self._head.get("folder", ""))

    @property
    def identity(self) -> str | None:
        """The service and the address, as `_core.Bucket.identity` names them."""
        found = self._head.get("identity")
        return None if found is None else str(found)

    @property
    def index(self) -> str | None:
        """The name of the index that makes the checkpoint visible; None: its only file does."""
        found = self._head.get("index")
        return None if found is None else str(found)

    def objects(self) -> list[str]:
        """The addresses of the objects that were begun."""
        return list(dict.fromkeys(line["object"] for line in self._lines))

    def uploads(self) -> list[tuple[str, str]]:
        """The address of each object, and the server's name of its upload."""
        return [(line["object"], str(line["upload"])) for line in self._lines if "upload" in line]

    def versions(self) -> dict[str, str | None]:
        """The versions of the objects that are complete."""
        return {line["object"]: line["version"] for line in self._lines if "version" in line}


def _all() -> list[Path]:
    place = folder()
    try:
        return sorted(path for path in place.iterdir() if path.suffix == _SUFFIX)
    except FileNotFoundError:
        return []
    except OSError as error:
        text = f"cannot read the journals of pushes ({VARIABLE}): {error.strerror}"
        raise WriteError(text, path=str(place), errno=error.errno) from error


@contextmanager
def _locked(path: Path) -> Iterator[bool | None]:
    """Whether this process has the lock on the file now; None: the file is gone."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield None
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        # Another one may have cleared and removed it since it was opened
        yield True if os.fstat(file).st_nlink else None
    finally:
        os.close(file)


def dead() -> Iterator[Journal]:
    """The journals of pushes that were killed, each locked until the next one."""
    for path in _all():
        with _locked(path) as mine:
            if mine:
                yield Journal(path, path.read_text("utf-8", "replace"))


def live() -> list[Journal]:
    """The journals of pushes that run."""
    found = []
    for path in _all():
        with _locked(path) as mine:
            if mine is False:
                with suppress(FileNotFoundError):
                    found.append(Journal(path, path.read_text("utf-8", "replace")))
    return found
