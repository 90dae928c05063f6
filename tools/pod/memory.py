"""The control group of a pod's memory, version 2 or 1."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any


class NoGroup(Exception):
    """No control group can be made here; the message says why."""


class Group:
    """A control group for the processes of one pod. `close` removes it, when they have ended.

    Raises:
        NoGroup: none can be made here.
    """

    def __init__(self) -> None:
        refused: list[str] = []
        for version, parent in _parents():
            folder = parent / f"penstock-pod-{os.getpid()}"
            try:
                if version == 2:
                    # The controller is inherited only where the group above says so
                    with contextlib.suppress(OSError):
                        (parent / "cgroup.subtree_control").write_text("+memory")
                folder.mkdir()
                if not (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).exists():
                    folder.rmdir()
                    refused.append(f"{folder}: no memory controller")
                    continue
            except OSError as error:
                refused.append(f"{error.filename}: {error.strerror}")
                continue
            self.version, self.folder = version, folder
            self.limit: int | None = None
            return
        raise NoGroup("; ".join(refused) or "no memory controller is mounted")

    def join(self) -> None:
        """The calling process, and what it starts, belong to the group from here on."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def restrict(self, nbytes: int) -> None:
        """No more memory than this, page cache included, and no swap."""
        names = ("memory.max",) if self.version == 2 else ("memory.limit_in_bytes",)
        (self.folder / names[0]).write_text(str(nbytes))
        # Neither file is there where the kernel counts no swap
        swap, most = ("memory.swap.max", 0) if self.version == 2 else ("memory.memsw.limit_in_bytes", nbytes)
        with contextlib.suppress(OSError):
            (self.folder / swap).write_text(str(most))
        self.limit = self._number("memory.max" if self.version == 2 else "memory.limit_in_bytes")

    def held(self) -> int:
        """Bytes that the processes hold now: what they use, except page cache that none of them has mapped."""
        stat = self._table("memory.stat")
        if self.version == 2:
            return self._number("memory.current") - stat["file"] + stat["file_mapped"]
        inactive, active = stat["total_inactive_file"], stat["total_active_file"]
        return self._number("memory.usage_in_bytes") - inactive - active + stat["total_mapped_file"]

    def facts(self) -> dict[str, Any]:
        """What came of the limit: bytes; how often the kernel killed (``oom_kill``) or had to make room (``full``)."""
        if self.version == 2:
            events = self._table("memory.events")
            peak = self._number("memory.peak") if (self.folder / "memory.peak").exists() else None
            kills, full = events["oom_kill"], events["max"]
        else:
            peak, kills = self._number("memory.max_usage_in_bytes"), self._table("memory.oom_control")["oom_kill"]
            full = self._number("memory.failcnt")
        return {"version": self.version, "limit": self.limit, "peak": peak, "oom_kill": kills, "full": full}

    def close(self) -> None:
        # The kernel lets go of a group a moment after its last process
        for _ in range(200):
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.02)

    def _number(self, name: str) -> int:
        return int((self.folder / name).read_text())

    def _table(self, name: str) -> dict[str, int]:
        return {key: int(value) for key, value in map(str.split, (self.folder / name).read_text().splitlines())}


def _parents() -> list[tuple[int, Path]]:
    """Groups under which one may be made: that of this process, and the one at the top."""
    mine = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            mine[controller] = path.lstrip("/")
    found = []
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup2" and "" in mine:
            found += [(2, Path(place) / mine[""]), (2, Path(place))]
        elif kind == "cgroup" and "memory" in options.split(",") and "memory" in mine:
            found += [(1, Path(place) / mine["memory"]), (1, Path(place))]
    return found
