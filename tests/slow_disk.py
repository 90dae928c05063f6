"""A disk that is slow for one process: the block controller of control groups holds its reads or writes to a rate.

A control group of version 1 holds only the writes that a process waits for itself: O_DIRECT, and `fdatasync`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal


class NotHere(Exception):
    """No such group can be made; the message says why."""


def device_of(path: Path) -> str:
    """The disk (not the partition) that a file lies on, as control groups name it.

    Raises:
        NotHere: if it lies on no disk.
    """
    number = path.stat().st_dev
    entry = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not entry.exists():
        raise NotHere(f"{path} is on no block device of its own")
    entry = entry.resolve()
    return ((entry.parent if (entry / "partition").exists() else entry) / "dev").read_text().strip()


@contextlib.contextmanager
def group(path: Path, bytes_per_second: int, what: Literal["read", "write"] = "read") -> Iterator[Path]:
    """A control group that reads from the disk of `path`, or writes to it, at most so fast.

    Gives the file that takes its pids.

    Raises:
        NotHere: if there is no such controller, or no right to use it.
    """
    device = device_of(path)
    for parent, limit, text in (
        (Path("/sys/fs/cgroup/blkio"), f"blkio.throttle.{what}_bps_device", f"{device} {bytes_per_second}"),
        (Path("/sys/fs/cgroup"), "io.max", f"{device} {what[0]}bps={bytes_per_second}"),
    ):
        folder = parent / f"penstock-test-{os.getpid()}"
        if not (parent / "cgroup.procs").exists():
            continue
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(text)
        except OSError:
            folder.rmdir()
            continue
        try:
            yield folder / "cgroup.procs"
        finally:
            for _attempt in range(100):  # the kernel lets go of a group a moment after its last process
                with contextlib.suppress(OSError):
                    folder.rmdir()
                if not folder.exists():
                    break
                time.sleep(0.02)
        return
    raise NotHere("no block controller that this user may use")
