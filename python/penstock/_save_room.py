"""Memory that ranks of one machine share, before they keep what a save in the background needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from . import _core


class Room(NamedTuple):
    """Memory that a rank could have, and who has it with this rank."""

    machine: str
    limited: str
    """Control group and namespace: ranks with equal ones share a limit."""
    free: int
    """Available bytes of the machine."""
    left: int
    """Available bytes of this process, where a control group may limit it."""

    @classmethod
    def found(cls, machine: str) -> Room:
        left = int(_core.probe("/")["memory_available"])
        try:
            limited = Path("/proc/self/cgroup").read_text() + str(Path("/proc/self/ns/cgroup").readlink())
            lines = Path("/proc/meminfo").read_text().splitlines()
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        except (OSError, StopIteration):
            limited, free = "", left
        return cls(machine, limited, free, left)


def lack_of_room(kept: Sequence[int], rooms: Sequence[Room]) -> str:
    """The reason why ranks cannot keep so many bytes each; "" if they can. Each of them alone may have enough."""
    shared: dict[tuple[str, str], list[int]] = {}
    for rank, room in enumerate(rooms):
        shared.setdefault((room.machine, ""), []).append(rank)
        if room.limited:
            shared.setdefault((room.machine, room.limited), []).append(rank)
    for (_, limited), ranks in shared.items():
        nbytes = sum(kept[rank] for rank in ranks)
        available = min(rooms[rank].left if limited else rooms[rank].free for rank in ranks)
        if nbytes and nbytes > available:
            of = f"rank {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"
            return f"{of} together: {nbytes} bytes of memory of one machine, and {available} are available"
    return ""
