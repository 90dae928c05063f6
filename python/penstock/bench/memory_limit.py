"""A control group in which a process may have only so much memory, where this process may make one."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


class NoMemoryLimit(Exception):
    """No group can be made; the message says why."""


class MemoryLimit:
    """Holds processes within a limit until the context ends, when they must have ended. Version 2 or 1.

    Raises:
        NoMemoryLimit: if no group can be made here; the message says why.
    """

    def __init__(self, nbytes: int) -> None:
        refused: list[str] = []
        for parent, limit in _hierarchies():
            group = parent / f"penstock-bench-{os.getpid()}"
            try:
                group.mkdir()
                try:
                    (group / limit).write_text(str(nbytes))
                except OSError:
                    group.rmdir()
                    raise
            except OSError as error:
                refused.append(f"{error.filename}: {error.strerror}")
                continue
            self._group = group
            return
        raise NoMemoryLimit("; ".join(refused) or "no memory controller is mounted")

    def hold(self, pid: int) -> None:
        """Moves a process into the group. What it has already counts elsewhere."""
        (self._group / "cgroup.procs").write_text(str(pid))

    def __enter__(self) -> MemoryLimit:
        return self

    def __exit__(self, *_: object) -> None:
        # The kernel lets go of a group a moment after its last process
        for _attempt in range(100):
            with contextlib.suppress(OSError):
                self._group.rmdir()
                return
            time.sleep(0.02)


def _hierarchies() -> list[tuple[Path, str]]:
    """Groups of this process under which one may be made, each with the name of the file that holds the limit."""
    mine = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            mine[controller] = path.lstrip("/")
    found = []
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup2" and "" in mine:
            found.append((Path(place) / mine[""], "memory.max"))
        elif kind == "cgroup" and "memory" in options.split(",") and "memory" in mine:
            found.append((Path(place) / mine["memory"], "memory.limit_in_bytes"))
    return found
