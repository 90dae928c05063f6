"""What other programs do on this machine while a test runs, and whether it is quiet.

Standard library only: `tools/rust_tests.py` judges by it as `machine.py` does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Every reason to skip a test because of what others did on the machine begins so.
PREFIX = "the machine was not quiet: "
TRIES = 3
#: Quiet: in the minute before, no task waited longer than this share for processor, disk or memory. Percent.
QUIET = 10.0
#: Of all tests, at most so many may be skipped for it on a quiet machine.
MOST = 0.01
#: What `make test` found before it began to build, as `pressure` writes it.
VARIABLE = "PENSTOCK_TEST_PRESSURE"

RESOURCES = ("cpu", "io", "memory")


def pressure() -> str:
    """The share of the last minute in which some task waited for each resource: "cpu=1.5 io=0.2 memory=0.0".

    Empty where the kernel does not say (before 4.20, or without CONFIG_PSI).
    """
    found = []
    for resource in RESOURCES:
        with contextlib.suppress(OSError):
            for line in Path("/proc/pressure", resource).read_text().splitlines():
                if line.startswith("some "):
                    found.append(f"{resource}={line.split('avg60=')[1].split()[0]}")
    return " ".join(found)


def pressure_before() -> str:
    """What it was before the run: as `make test` found it, before it began to build, or else as it is now."""
    return os.environ.get(VARIABLE) or pressure()


def is_quiet(pressure: str) -> bool:
    """Whether a machine of this pressure was quiet. One that does not say was not."""
    values = dict(part.split("=") for part in pressure.split())
    return all(resource in values and float(values[resource]) < QUIET for resource in RESOURCES)


@dataclass(frozen=True)
class Moment:
    """What everybody has done on this machine until now, and what this process and its children have."""

    at: float
    #: Seconds of processor time in user mode, those that a hypervisor took away included. The kernel's own threads
    #: (they write back, they answer interrupts) have none, so that what a test asks of the kernel does not count.
    processor: float
    own_processor: float
    #: Bytes read from disks.
    disk: int
    own_disk: int
    #: Pages of everybody that the kernel looked at to free memory.
    scanned: int
    #: Pages of the test's own files that it gave up.
    given_up: int

    @staticmethod
    def now(given_up: int = 0) -> Moment:
        processor, disk = 0.0, 0
        for pid in _family():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                processor += (int(fields[11]) + int(fields[13])) / _TICKS  # utime and cutime
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/io").read_text().splitlines()
                disk += sum(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
        vm = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        scanned = int(vm.get("pgscan_anon", 0)) + int(vm.get("pgscan_file", 0))
        seen = (_processor(), processor, int(vm["pgpgin"]) << 10, disk, scanned, given_up)
        return Moment(time.monotonic(), *seen)

    def disturbance(self, since: Moment) -> str | None:
        """What others did since then that a test may have noticed; None where the machine was quiet."""
        seconds = self.at - since.at
        found = []
        others = (self.processor - since.processor) - (self.own_processor - since.own_processor)
        # Two ticks of the clock are no evidence
        if others > 0.1 * seconds and others * _TICKS > 2:
            found.append(f"others had a processor for {others:.1f} of {seconds:.1f} s")
        read = (self.disk - since.disk) - (self.own_disk - since.own_disk)
        if read > max(20e6 * seconds, 4e6):
            found.append(f"others read {read / 1e6:.0f} MB from disks")
        if self.given_up:
            found.append(f"the kernel gave up {self.given_up} pages of the test's files")
        if self.scanned > since.scanned:
            found.append("the kernel was freeing memory")
        return ", ".join(found) or None


_TICKS = os.sysconf("SC_CLK_TCK")


def _family() -> Iterator[int]:
    """This process and all that descend from it."""
    waiting = [os.getpid()]
    while waiting:
        yield (pid := waiting.pop())
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    waiting += map(int, (task / "children").read_text().split())


def _processor() -> float:
    with open("/proc/stat") as file:
        user, nice, _system, _idle, _wait, _irq, _softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + steal) / _TICKS
