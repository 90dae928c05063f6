"""What a load costs, in counts: system calls, instructions, memory blocks, garbage collections, threads, descriptors.

Counts and not times: they are the same on a busy machine and on a quiet one, so a bound can be close to what was found.
Each bound is what was found plus what the reason beside it allows. `tests/test_counts.py` counts reads and bytes,
`crates/core/tests/plan_counts.rs` what is planned, `crates/core/tests/allocation_counts.rs` allocations.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pagecache
import pytest
from models import MIB
from ordeal import load_factor
from penstock.synthetic import synth
from penstock.synthetic.synth import Layout, Tensor

#: The program of crates/load, optimised.
LOAD = os.environ.get("PENSTOCK_TEST_LOAD")

STRACE, VALGRIND = shutil.which("strace"), shutil.which("valgrind")


@dataclass(frozen=True)
class Bound:
    """A count, the most it may be, and why not more."""

    what: str
    found: float
    most: float
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.found:,.2f}, at most {self.most:,.2f} ({self.why})"


def hold(*bounds: Bound) -> None:
    """Prints what was found, and fails with all that is too much."""
    print(*bounds, sep="\n")
    broken = [str(bound) for bound in bounds if bound.found > bound.most]
    assert not broken, "\n".join(broken)


# --- System calls, threads and descriptors of a load ---

#: Loads one file, then counts from one call of access(2) to the next while it opens or loads another.
COUNTED = """
import json, os, sys
import numpy, penstock

def load(path, how):
    if how.pop("open", False):
        os.access("/counted/begin", 0)
        penstock.open(path)
        os.access("/counted/end", 0)
        return {"routes": {}, "fallbacks": []}
    checkpoint = penstock.open(path)
    if how.pop("into", False):
        arrays = {name: numpy.zeros(checkpoint[name].shape, dtype=numpy.uint8) for name in checkpoint.keys()}
        os.access("/counted/begin", 0)
        report = checkpoint.load_into(arrays, options=how, progress=False)
    else:
        os.access("/counted/begin", 0)
        tensors = checkpoint.load(framework="np", options=how, progress=False)
        report = checkpoint.last_report
    os.access("/counted/end", 0)
    return report

how = json.loads(sys.argv[3])
load(sys.argv[1], {**how, "open": False})  # what the first load of a process sets up
descriptors = len(os.listdir("/proc/self/fd"))
report = load(sys.argv[2], dict(how))
print(json.dumps({
    "routes": report["routes"], "fallbacks": [f["from"] for f in report["fallbacks"]],
    "descriptors": len(os.listdir("/proc/self/fd")) - descriptors,
}))
"""


@dataclass(frozen=True)
class Traced:
    """What a load asked of the kernel, and its account of itself."""

    calls: list[tuple[str, str]]
    report: dict[str, Any]

    @property
    def kinds(self) -> Counter[str]:
        """How many calls of which kind."""
        return Counter(kind_of(*call) for call in self.calls)


def kind_of(name: str, arguments: str) -> str:
    """What a call is for: to move bytes, touch, request or time pages, wait or wake, start a thread, or ask."""
    if name in ("clone", "clone3"):
        return "thread"
    if "/sys/" in arguments or "/proc/" in arguments:
        return "machine"
    if name == "process_vm_readv":
        return "touch"
    if "FADV_WILLNEED" in arguments:
        return "request"
    if any(word in arguments for word in ("MADV_POPULATE_WRITE", "MADV_NOHUGEPAGE", "THREAD_CPUTIME")):
        return "sample"
    if name.startswith(("pread", "io_")) or "MADV_POPULATE" in arguments:
        return "bytes"
    if name in ("futex", "poll", "ppoll", "epoll_wait", "epoll_pwait") or "eventfd" in arguments:
        return "waiting"
    return "other"


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Traced]:
    """Counts system calls of a load: trace(first, path, **options)."""
    if STRACE is None:
        pytest.skip("strace is not installed")
    probe = subprocess.run([STRACE, "-f", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"strace may not trace here: {probe.stderr.strip()}")
    log = tmp_path_factory.mktemp("strace") / "log"

    def run(first: Path, path: Path, **how: object) -> Traced:
        program = [sys.executable, "-c", COUNTED, str(first), str(path), json.dumps(how)]
        done = subprocess.run(
            [STRACE, "-f", "-qq", "-y", "-o", str(log), *program],
            capture_output=True,
            text=True,
            timeout=120 * load_factor(),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Traced(calls_between(log), json.loads(done.stdout))

    return run


#: How a call ends that a signal interrupts, or another thread on its way to sleep: it is made again, and counted then.
INTERRUPTED = re.compile(r"= \? ERESTART|= -1 EINTR")


def calls_between(log: Path) -> list[tuple[str, str]]:
    """Calls between the marks of the last load, of all threads; one that resumes was counted when it began.

    Calls that were interrupted are left out, and those that only go on with one: how many there are is up to others.
    """
    calls: dict[int, tuple[str, str]] = {}
    begun: dict[str, int] = {}
    counting = False
    for number, line in enumerate(log.read_text(errors="replace").splitlines()):
        if '"/counted/begin"' in line:
            calls, begun, counting = {}, {}, True
        elif '"/counted/end"' in line:
            counting = False
        elif counting and (call := re.match(r"(\d+)\s+(\w+)\((.*)", line)):
            thread, name, arguments = call.groups()
            if name == "restart_syscall" or INTERRUPTED.search(arguments):
                continue
            calls[number] = (name, arguments)
            if arguments.endswith("<unfinished ...>"):
                begun[thread] = number
        elif counting and (ended := re.match(r"(\d+)\s+<\.\.\. \w+ resumed>(.*)", line)):
            unfinished = begun.pop(ended[1], None)
            if unfinished is not None and INTERRUPTED.search(ended[2]):
                del calls[unfinished]
    return list(calls.values())


@pytest.mark.machine
def test_calls_that_are_interrupted_count_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("""7 access("/counted/begin", F_OK) = -1 ENOENT
7 futex(0x1, FUTEX_WAIT, 0, NULL <unfinished ...>
8 pread64(3</x>, ""..., 4096, 0) = 4096
7 <... futex resumed>) = ? ERESTARTSYS (To be restarted if SA_RESTART is set)
7 --- SIGCHLD {si_signo=SIGCHLD} ---
7 futex(0x1, FUTEX_WAIT, 0, NULL <unfinished ...>
8 poll([{fd=4, events=POLLIN}], 1, 1000) = ? ERESTART_RESTARTBLOCK (Interrupted by signal)
8 restart_syscall(<... resuming interrupted poll ...>) = 1
8 read(4<anon_inode:[eventfd]>, 0x1, 8) = -1 EINTR (Interrupted system call)
7 <... futex resumed>) = 0
7 access("/counted/end", F_OK) = -1 ENOENT
""")
    assert [name for name, _ in calls_between(log)] == ["pread64", "futex"]


#: One file of 256 MiB: 30 tensors of 8 MiB, and 4,096 of 4 KiB.
GUARD = Layout(
    "guard",
    (
        tuple(
            [Tensor(f"layers.{i}.weight", "U8", (8 * MIB,), hole=True) for i in range(30)]
            + [Tensor(f"layers.{i // 128}.scale.{i % 128}", "U8", (4096,), hole=True) for i in range(4096)]
        ),
    ),
)
NBYTES = 256 * MIB


@pytest.fixture(scope="session")
def guard(folder: Path) -> Path:
    """The file of 256 MiB, all of it holes: what it holds costs no call."""
    return synth.write(GUARD, folder / "guard") / "model.safetensors"


@pytest.fixture(scope="session")
def first(folder: Path) -> Path:
    """One small file, for the first load of a process."""
    tensors = tuple(Tensor(f"t.{i}", "U8", (4096,)) for i in range(8))
    return synth.write(Layout("guard-first", (tensors,)), folder / "guard-first") / "model.safetensors"


@dataclass(frozen=True)
class Route:
    """A way to load the file of 256 MiB, and the most system calls of each kind that it may take."""

    name: str
    how: dict[str, Any]
    #: To read, populate or submit, and to hear what became of it; to wait, wake and be woken; all others.
    bytes: int
    waiting: int
    other: int
    #: Threads started.
    threads: int
    why: str
    cold: bool = False
    #: To ask what the machine offers.
    machine: int = 60
    #: To touch pages: samples of each 2 MiB, whether they take as long once more, and the rest; of warm ones a few.
    touches: int = 0
    #: To request small pages, 128 KiB a call: the load does so if huge pages are slow to touch.
    requests: int = 0
    #: To find out whether huge pages are slow: 16 of new memory, and more if some are. (Every load asks for the
    #: processor time of its threads, too.)
    samples: int = 5


#: The file is read in 65 extents of 4 MiB, or, where it is mapped and resident, in 5. Two threads wherever there are
#: any, so that a machine of sixteen cores counts what one of two does. Found, in the order of the columns: 6 to 27, 15,
#: 43, 0; 65, 390 to 530, 165, 3; 65, 240 to 480, 84, 3; 65, 240 to 580, 223, 5; 32 to 68, 73 to 137, 72, 1; 10, 35 to
#: 51, 77, 1; 66, 160 to 475, 87, 3.
SYSTEM_CALLS = (
    Route(
        "mapped",
        {},
        30,
        20,
        55,
        0,
        "the caller's thread, in steps of 2 to 16 MiB while they are fast",
        machine=0,
        touches=10,
    ),
    Route(
        "mapped, cold",
        {"cache": "keep", "threads": 2},
        65,
        1000,
        200,
        3,
        "a madvise for each extent",
        cold=True,
        touches=3 * 130,
        requests=2100,
        samples=4 * 130,
    ),
    Route("buffered", {"copy": True, "threads": 2}, 65, 1000, 105, 3, "a pread for each extent", samples=64),
    Route("into tensors", {"into": True, "threads": 2}, 65, 1000, 290, 5, "a pread for each extent"),
    Route("io_uring", {"io": "uring"}, 100, 250, 90, 1, "to submit some reads, and to hear of some", samples=64),
    Route(
        "threads",
        {"io": "threads", "threads": 2},
        66,
        1000,
        105,
        3,
        "a pread for each extent, and the file's end",
        samples=64,
    ),
)

WAITING = "4 to 9 a read where two threads and the engine share a queue; with a lock or a wake-up more it is over 15"
OTHER = (
    "to open, map and ask about the file, and eight for each thread; cold, to find what is resident, 64 MiB at a time"
)
MACHINE = "cores that control groups leave, asked once: 20 in a group at the top; mappings, where it is loaded into: 32"
THREADS = "the engine's, two that read, two that copy"


@pytest.mark.parametrize("route", SYSTEM_CALLS, ids=lambda route: route.name)
@pytest.mark.machine
def test_system_calls_of_a_load(route: Route, trace: Callable[..., Traced], first: Path, guard: Path) -> None:
    pagecache.put([guard], "cold" if route.cold else "warm")
    traced = trace(first, guard, **route.how)
    if "io_uring" in traced.report["fallbacks"]:
        pytest.skip(f"this machine refuses {route.name}")
    kinds, per_gb = traced.kinds, 1e9 / NBYTES
    hold(
        Bound("calls per GB to move bytes", kinds["bytes"] * per_gb, route.bytes * per_gb, route.why),
        Bound("calls per GB to wait and wake", kinds["waiting"] * per_gb, route.waiting * per_gb, WAITING),
        Bound("calls per load to touch pages", kinds["touch"], route.touches, "1,024 pages a call, of 2 MiB at a time"),
        Bound("calls per load to request pages", kinds["request"], route.requests, "128 KiB a call, of 256 MiB"),
        Bound(
            "calls per load to time pages",
            kinds["sample"],
            route.samples,
            "of private memory one huge page of eight, three more if it is slow; of a cold mapping each 2 MiB",
        ),
        Bound("other calls per load", kinds["other"], route.other, OTHER),
        Bound("calls per load to ask what the machine offers", kinds["machine"], route.machine, MACHINE),
        Bound("threads started per load", kinds["thread"], route.threads, THREADS),
        Bound("descriptors left", traced.report["descriptors"], 0, "a load leaves none"),
    )


@pytest.mark.machine
def test_a_small_warm_load_starts_no_thread_and_leaves_no_descriptor(trace: Callable[..., Traced], first: Path) -> None:
    traced = trace(first, first)
    kinds = traced.kinds
    hold(
        Bound("threads", kinds["thread"], 0, "the caller's thread does it all: 50 us each otherwise"),
        Bound("calls to move bytes", kinds["bytes"], 2, "one extent, with a step for what is over 2 MiB"),
        Bound(
            "calls to wait and wake",
            kinds["waiting"],
            20,
            "descriptors made and closed, for which nobody waits; found: 15",
        ),
        Bound("calls to touch pages", kinds["touch"], 2, "of what is left to a first touch: 0.4 us a page"),
        Bound("other calls", kinds["other"], 40, "0.1 to 0.5 us each, and a small load takes 200 us; found: 33"),
        Bound("calls to ask what the machine offers", kinds["machine"], 0, "no other thread, so no question how many"),
        Bound("descriptors left", traced.report["descriptors"], 0, "a load leaves none"),
    )


@pytest.mark.parametrize(("source", "most"), [("file", 12), ("folder", 30)])
@pytest.mark.machine
def test_an_open_on_a_disk_that_was_loaded_from_starts_no_thread(
    trace: Callable[..., Traced], first: Path, tmp_path: Path, source: str, most: int
) -> None:
    if not os.major(tmp_path.stat().st_dev):
        pytest.skip("not on a block device, so that nobody remembers that it is local")
    # Of a shard's name: beside a `model.safetensors` the index is passed over, and the warning costs calls.
    file = Path(shutil.copy(first, tmp_path / "model-00001-of-00001.safetensors"))
    index = {"weight_map": {f"t.{i}": file.name for i in range(8)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    traced = trace(file, file if source == "file" else tmp_path, open=True)
    asked = [arguments for name, arguments in traced.calls if name == "openat2"]
    if any(f" {error} " in arguments for arguments in asked for error in ("ENOSYS", "EPERM", "EINVAL")):
        pytest.skip("this machine refuses to open only what is in memory")
    kinds, calls = traced.kinds, "0.1 to 0.5 us each, and an open takes 60 us; found: 9 and 25"
    hold(
        Bound("threads", kinds["thread"], 0, "50 us and two turns at the scheduler, which may take milliseconds"),
        Bound("calls to move bytes", kinds["bytes"], 1 if source == "file" else 2, "the header, and the index"),
        Bound("calls to wait and wake", kinds["waiting"], 0, "nobody to wait for"),
        Bound("calls to ask what the machine offers", kinds["machine"], 0, "no other thread, so no question how many"),
        Bound("other calls", kinds["other"], most, f"where it is, its kind, what is read of it: {calls}"),
    )


# --- Instructions per tensor ---


def many(path: Path, tensors: int) -> Path:
    """A checkpoint of so many tensors of 4 bytes with names as mixtures of experts have them, always the same."""
    part = ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "gate_proj.weight_scale")
    names = [f"model.layers.{i // 1024}.mlp.experts.{i // 4 % 256}.{part[i % 4]}" for i in range(tensors)]
    return synth.write_file(path, [Tensor(name, "F32", (1,)) for name in names])


FEW, MANY = 2000, 6000


@pytest.fixture(scope="session")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., float]:
    """Instructions per tensor of a program that is given a checkpoint: the slope between two of different size, so that
    what every start costs does not count. The checkpoint comes last of its arguments."""
    if VALGRIND is None:
        pytest.skip("valgrind is not installed")
    folder = tmp_path_factory.mktemp("instructions")
    checkpoints = [many(folder / f"{count}.safetensors", count) for count in (FEW, MANY)]

    def count(*program: str, **environment: str) -> float:
        running = [
            subprocess.Popen(
                # Threads take turns: by default one that waits in a loop can keep the others out.
                [
                    VALGRIND,
                    "--tool=callgrind",
                    "--callgrind-out-file=/dev/null",
                    "--fair-sched=yes",
                    *program,
                    str(path),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment},
            )
            for path in checkpoints
        ]
        found = []
        for process in running:
            _, errors = process.communicate(timeout=240 * load_factor())
            collected = re.search(r"Collected : (\d+)", errors)
            assert process.returncode == 0 and collected is not None, errors
            found.append(int(collected[1]))
        return (found[1] - found[0]) / (MANY - FEW)

    return count


@pytest.mark.parametrize(
    ("step", "arguments", "most", "why"),
    [
        # 2,803
        ("open", ("--open",), 3250, "100 bytes of JSON, parsed and checked at 20 to 30 instructions a byte"),
        # 4,390
        ("open, load mapped, hand out, drop", ("--unchecked",), 5000, "1,500 more: layout, schedule, engine, a view"),
        # 4,470
        ("open, load private, hand out, drop", ("--unchecked", "--copy"), 5100, "and its place in the arena"),
    ],
)
def test_instructions_per_tensor(
    instructions: Callable[..., float], step: str, arguments: tuple[str, ...], most: float, why: str
) -> None:
    if LOAD is None:
        pytest.skip("PENSTOCK_TEST_LOAD names no program: cargo build --release -p load")
    hold(Bound(f"{step}: instructions per tensor", instructions(LOAD, *arguments), most, why))


#: Opens and loads a checkpoint with as little Python around it as there can be.
LOADED = """
import sys, penstock
tensors = penstock.open(sys.argv[1]).load(framework="dlpack", progress=False)
"""


def test_instructions_per_tensor_in_python(instructions: Callable[..., float]) -> None:
    # Names are hashed alike every time. 15,985 with CPython 3.11; interpreters differ
    found = instructions(sys.executable, "-c", LOADED, PYTHONHASHSEED="0")
    why = "objects for name, shape, view and capsule; a garbage collection that is not paused adds thousands"
    hold(Bound("open, load, hand out in Python: instructions per tensor", found, 19_000, why))


# --- What a tensor costs in Python ---

#: Opens and loads a checkpoint twice, and prints what is there afterwards that was not there before: memory blocks,
#: then bytes (to count those makes blocks of its own).
KEPT = """
import gc, json, sys, tracemalloc
import penstock

def load(path):
    checkpoint = penstock.open(path)
    return checkpoint.load(framework=sys.argv[3], progress=False), len(checkpoint)

load(sys.argv[1])  # what the first load of a process sets up
gc.collect()
collections = []
gc.callbacks.append(lambda phase, info: phase == "start" and collections.append(info["generation"]))
found = {}
blocks = sys.getallocatedblocks()
tensors, count = load(sys.argv[2])
found["collections"] = len(collections)
gc.collect()
found["blocks"] = sys.getallocatedblocks() - blocks
assert len(tensors) == count
del tensors
tracemalloc.start()
tensors, count = load(sys.argv[2])
found["bytes"], found["peak"] = tracemalloc.get_traced_memory()
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("framework", "blocks", "nbytes", "passing", "why"),
    [
        # 2, 215, 35; 4, 407, 37; 5, 347, 37. Half a block more: the interpreter keeps some of its own.
        ("pt", 2.5, 260, 45, "the tensor and its name; what lies below it is torch's own"),
        ("np", 4.5, 490, 45, "the array, its shape, the view of the load that it keeps, its name"),
        ("dlpack", 5.5, 420, 45, "the object, its shape and dtype, the view of the load that it keeps, its name"),
    ],
)
def test_what_a_kept_tensor_costs_in_python(
    tmp_path: Path,
    python: Callable[..., subprocess.CompletedProcess[str]],
    framework: str,
    blocks: float,
    nbytes: float,
    passing: float,
    why: str,
) -> None:
    found: list[dict[str, float]] = []
    first = many(tmp_path / "first.safetensors", 10)
    for count in (FEW, MANY):
        done = python(KEPT, first, many(tmp_path / f"{count}.safetensors", count), framework)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    per_tensor = {what: (found[1][what] - found[0][what]) / (MANY - FEW) for what in found[0]}
    in_passing = per_tensor["peak"] - per_tensor["bytes"]
    hold(
        Bound(f"{framework}: memory blocks per tensor kept", per_tensor["blocks"], blocks, why),
        Bound(f"{framework}: bytes per tensor kept", per_tensor["bytes"], nbytes, why),
        Bound(f"{framework}: bytes per tensor in passing", in_passing, passing, "lists of wants, tensors and names"),
        # Unpaused, one for every 700 new objects that it tracks, and each looks at all of the younger ones
        Bound(f"{framework}: garbage collections", found[1]["collections"], 3, "paused while tensors are made"),
    )
