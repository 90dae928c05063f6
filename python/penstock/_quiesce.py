"""``penstock.quiesce``: nothing of Penstock is left in the process, before something makes an image of it."""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from pathlib import Path

from . import _core, _running
from ._errors import ArgumentTypeError, BusyError, InvalidError, StalledError

#: Seconds of one look at what is left: Ctrl-C is heard in between.
_TURN = 0.02
#: The reason of a fill of the page cache that was ended.
_REASON = "penstock.quiesce ended it"
_OURS = "penstock-"
#: Threads of the kernel that worked for a ring. They end a moment after it.
_OF_RINGS = "iou-"
_RING = "anon_inode:[io_uring]"


def quiesce(timeout: float | None = 10.0) -> None:
    """Ends what loads have left in this process, and waits until it is gone. Nothing of it is needed.

    That is: fills of the page cache, threads that read ahead and the files that they keep open, threads that still ask
    a server for something, leases, staging memory with its registrations at a GPU's driver, and what is known of
    servers (credentials, addresses). Checkpoints and tensors stay valid. The next load makes everything anew.

    For programs that make an image of the process (CRIU, vLLM's snapshots), or that give its memory to something else.
    May be called repeatedly, from any thread, and in a forked child.

    Args:
        timeout: Seconds to wait for threads to end; None waits without a limit.

    Raises:
        BusyError: a load, a `Job`, an open stream, a save, or a group of ranks is under way. Nothing was ended.
        StalledError: something has not ended within ``timeout``: a name server does not answer, or a read hangs.
        InvalidError: ``timeout`` is no such number.
    """
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float))):
        raise ArgumentTypeError(f"timeout={timeout!r}: give a number of seconds, or None")
    if timeout is not None and not timeout >= 0:
        raise InvalidError(f"timeout={timeout!r}: give 0 or more seconds, or None")
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    _refuse(_running.all_under_way())
    for let_go in list(_running.keepers):
        let_go()
    while True:
        left = deadline - time.monotonic()
        _running.close_ended()
        _core.quiesce(_REASON, max(0.0, min(_TURN, left)))
        remains = _remains()
        if not remains:
            return
        # A load that another thread began meanwhile has threads too
        _refuse(_running.all_under_way())
        if left <= 0:
            raise StalledError(
                f"after {timeout} s there is still {', '.join(remains)}: wait longer (timeout=), or find out what hangs"
            )
        time.sleep(_TURN)


def _refuse(busy: list[str]) -> None:
    if busy:
        more = f" and {len(busy) - 3} more" * (len(busy) > 3)
        raise BusyError(
            f"{'; '.join(busy[:3])}{more} is under way: wait for it or close it, then call penstock.quiesce again",
            busy=busy,
        )


def _remains() -> list[str]:
    """The parts of Penstock that still run or are open in this process, in words."""
    found = []
    rings = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            rings += str(descriptor.readlink()) == _RING
    hanging = _core.under_way()[1]
    if rings and hanging:
        found.append(f"{hanging} reads that hang in the kernel, with their memory")
    own = threading.get_native_id()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            name = (task / "comm").read_text().strip()
            # Where there are rings of other libraries, such threads may be theirs
            ours = name.startswith(_OURS) or (name.startswith(_OF_RINGS) and not rings)
            if ours and int(task.name) != own:
                found.append(f"the thread {name}")
    # Threads of Python's have names of their own, and only from 3.14 on in the kernel too
    for thread in threading.enumerate():
        if thread.name.startswith(_OURS) and thread.native_id != own and thread.is_alive():
            found.append(f"the thread {thread.name}")
    return sorted(set(found))
