"""Runs a command on a machine that others keep busy: the tests have to be right there too.

    python tools/busy.py [--folder FOLDER] [--available BYTES] [--limit SECONDS] -- COMMAND...

Beside it run two loops that want a processor each, a program that takes memory until less than 2 GB are available, and
one that reads a file on the disk of FOLDER, past the page cache. They end with the command, and with this program
however it ends. The command has a session of its own, and whatever it leaves running there is ended. The exit code is
the command's; 124 where it took longer than the limit.

The command is told that the machine is busy: pressure that was read before this began would say that it is quiet.

Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from neighbours import RESOURCES, VARIABLE

CHUNK = 64 << 20
#: Of what the reader reads again and again: more than a disk keeps in its own memory.
FILE = 1 << 30
PR_SET_PDEATHSIG = 1


def available() -> int:
    """Bytes that a program can still have: of the machine, or less where a control group of this process has less."""
    with open("/proc/meminfo") as file:
        found = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = "/sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = "/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for group in (Path(path), *Path(path).parents):
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                limit, used = (int(Path(root, str(group).lstrip("/"), name).read_text()) for name in names)
                found = min(found, limit - used)
    return found


def spin() -> None:
    """Wants a processor all the time."""
    while True:
        pass


def hoard(most: int) -> None:
    """Leaves a little less than so many bytes: takes memory in chunks, and gives it back where others need it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # before any test, should it come to that
    held: list[mmap.mmap] = []
    while True:
        left = available()
        if left > most - CHUNK:
            chunk = mmap.mmap(-1, CHUNK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for page in range(0, CHUNK, mmap.PAGESIZE):
                chunk[page] = 1
            held.append(chunk)
        elif left < most // 2 and held:
            for _ in range(min(4, len(held))):
                held.pop().close()
        else:
            time.sleep(0.02)


def read(folder: Path) -> None:
    """Reads a file from its disk, from the start to the end, for ever."""
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name, where the file system can
        block = os.urandom(1 << 20)
        for _ in range(FILE // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        try:
            fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_DIRECT)
        except OSError:  # a file system in memory
            fd = file.fileno()
        buffer = mmap.mmap(-1, 1 << 20)
        while True:
            for offset in range(0, FILE, len(block)):
                os.preadv(fd, [buffer], offset)


def start(work: Callable[[], None], parent: int) -> int:
    """Runs something in a process of its own, which ends with this one."""
    child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # temporary files go
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == parent:
            work()
    except SystemExit:
        pass
    finally:
        os._exit(0)


@contextlib.contextmanager
def busy(folder: Path, most: int) -> Iterator[None]:
    """A busy machine, as long as this lasts."""
    parent = os.getpid()
    children = [start(work, parent) for work in (spin, spin, lambda: hoard(most), lambda: read(folder))]
    try:
        until = time.monotonic() + 120
        while available() > most and time.monotonic() < until:
            time.sleep(0.1)
        print(f"busy: {available() / 1e9:.1f} GB available, load {os.getloadavg()[0]:.1f}", flush=True)
        yield
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        for child in children:
            os.waitpid(child, 0)


class Ending:
    """Exits at a signal, but not while a command is being started: nobody would end it."""

    def __init__(self) -> None:
        self.starting = False
        self._status: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._heard)

    def _heard(self, number: int, _frame: object) -> None:
        self._status = 128 + number
        if not self.starting:
            sys.exit(self._status)

    def started(self) -> None:
        """Exits if a signal has come meanwhile."""
        self.starting = False
        if self._status is not None:
            sys.exit(self._status)


def run(command: list[str], environment: dict[str, str], limit: float, ending: Ending) -> int:
    """Runs a command in a session of its own. Then ends every process of its group that still runs.

    Raises:
        subprocess.TimeoutExpired: It took longer than `limit` seconds.
    """
    ending.starting = True
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        ending.started()
        return child.wait(limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
            until = time.monotonic() + 10
            while time.monotonic() < until:
                child.poll()
                os.killpg(child.pid, 0)  # is any of it left?
                time.sleep(0.05)
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to read from (default: here)")
    parser.add_argument("--available", type=float, default=2e9, metavar="BYTES", help="leave less (default: 2e9)")
    parser.add_argument(
        "--limit", type=float, default=3 * 3600, metavar="SECONDS", help="of the command (default: 3 h)"
    )
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    ending = Ending()
    told = os.environ | {VARIABLE: " ".join(f"{resource}=100" for resource in RESOURCES)}
    with busy(arguments.folder, int(arguments.available)):
        try:
            return run(arguments.command, told, arguments.limit, ending)
        except subprocess.TimeoutExpired:
            return 124


if __name__ == "__main__":
    sys.exit(main())
