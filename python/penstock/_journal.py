"""Journals of pushes: files of this machine that say what a push has begun. A killed process leaves one.

The core writes them (``save/journal.rs``), and holds a lock on each as long as its push runs. The kernel releases it
when the process is gone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import stat
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
    if state.startswith("/"):
        return Path(state) / "penstock/push"
    try:
        home = Path("~").expanduser()
    except RuntimeError as error:
        text = f"there is no home folder for the journals of pushes: set {VARIABLE}"
        raise WriteError(text, path="~/.local/state/penstock/push") from error
    return home / ".local/state/penstock/push"


def new() -> str:
    """The path of a journal that is to be written."""
    return str(folder() / f"{uuid.uuid4().hex}{_SUFFIX}")


def machine() -> str:
    """The text that names this machine in journals. A digest: the identity itself is nobody's business."""

    def content(path: str) -> str:
        try:
            return Path(path).read_text().strip()
        except OSError:
            return ""

    found = content("/etc/machine-id")
    if len(found) != 32:  # a container has none, or "uninitialized"
        found = f"{content('/proc/sys/kernel/random/boot_id')} {os.uname().nodename}"
    return hashlib.sha256(f"penstock push {found}".encode()).hexdigest()[:32]


class Journal:
    """The lines of a journal. Those of objects that are not below the head's address are ignored."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        lines = []
        for line in text.splitlines():
            with suppress(ValueError):  # the last one may break off where the process was killed
                found = json.loads(line)
                lines += [found] if isinstance(found, dict) else []
        self._head: dict[str, Any] = lines[0] if lines and _is_head(lines[0]) else {}
        self._lines = [line for line in lines if self._is_below(line.get("object"))]

    def _is_below(self, address: object) -> bool:
        below = f"{self.address.rstrip('/')}/"
        if not self._head or not isinstance(address, str) or not address.startswith(below):
            return False
        return not {"", ".", ".."} & set(address.removeprefix(below).split("/"))

    @property
    def address(self) -> str:
        """Where the push goes; empty without a head."""
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

    @property
    def machine(self) -> str:
        """The machine of the push."""
        return str(self._head.get("machine", ""))

    def has_tag(self, address: str) -> bool:
        """Whether an object can be this push's alone: its name has the tag that this push made."""
        tag = self._head.get("tag", "")
        return re.fullmatch(rf".*-{tag}(-\d{{5}}-of-\d{{5}})?\.safetensors", address) is not None

    def objects(self) -> list[str]:
        """The addresses of the objects that were begun."""
        return list(dict.fromkeys(line["object"] for line in self._lines))

    def uploads(self) -> list[tuple[str, str]]:
        """The address of each object, and the server's name of its upload."""
        return [(line["object"], str(line["upload"])) for line in self._lines if "upload" in line]

    def versions(self) -> dict[str, str | None]:
        """The versions of the objects that are complete."""
        return {line["object"]: line["version"] for line in self._lines if "version" in line}


def _is_head(line: dict[str, Any]) -> bool:
    texts = (line.get(name) for name in ("folder", "machine", "tag"))
    return all(isinstance(text, str) and text for text in texts) and bool(re.fullmatch("s[0-9a-f]{8}", line["tag"]))


def _failed(path: Path, error: OSError) -> WriteError:
    text = f"cannot read the journals of pushes ({VARIABLE}): {error.strerror}"
    return WriteError(text, path=str(path), errno=error.errno)


def _distrusted(status: os.stat_result) -> str | None:
    """The reason for which a file or folder may say what another user wants it to say."""
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return "it is no regular file"
    if status.st_uid != os.geteuid():
        return "it is of another user"
    if stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users may write to it"
    return None


def _all(passed_over: list[str]) -> list[Path]:
    place = folder()
    try:
        found = sorted(path for path in place.iterdir() if path.suffix == _SUFFIX)
        why = _distrusted(place.stat())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _failed(place, error) from error
    if found and why:
        passed_over.append(f"{place}: {why}, so the journals in it are passed over")
        return []
    return found


@contextmanager
def _locked(path: Path, passed_over: list[str]) -> Iterator[tuple[bool, Journal] | None]:
    """Whether this process has the lock on a journal now, and the journal. None: it is gone, or passed over."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        try:
            why = _distrusted(path.lstat())
        except OSError:
            why = None
        if why is None:
            raise _failed(path, error) from error
        passed_over.append(f"{path}: {why}, so this journal is passed over")
        yield None
        return
    try:
        yield _examined(path, file, passed_over)
    finally:
        os.close(file)


def _examined(path: Path, file: int, passed_over: list[str]) -> tuple[bool, Journal] | None:
    try:
        if why := _distrusted(os.fstat(file)):
            passed_over.append(f"{path}: {why}, so this journal is passed over")
            return None
        mine = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mine = False
        # Another one may have cleared and removed it since it was opened
        if mine and not os.fstat(file).st_nlink:
            return None
        with open(file, encoding="utf-8", errors="replace", closefd=False) as opened:
            return mine, Journal(path, opened.read())
    except OSError as error:
        raise _failed(path, error) from error


def dead(passed_over: list[str]) -> Iterator[Journal]:
    """The journals of killed pushes of this machine, each locked until the next one.

    Args:
        passed_over: Gets the reasons for which journals are passed over. Those of other machines are none.
    """
    here = machine()
    for path in _all(passed_over):
        with _locked(path, passed_over) as found:
            if found and found[0] and found[1].machine == here:
                yield found[1]


def live() -> list[Journal]:
    """The journals of pushes that run, also of another machine with the same state folder."""
    journals = []
    for path in _all([]):
        with _locked(path, []) as found:
            if found and not found[0]:
                journals.append(found[1])
    return journals
