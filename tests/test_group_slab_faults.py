"""Ranks of one machine that are killed, stopped or fail while slabs are lent: what others hear, and whose bytes.

A lender whose load has failed does not wait for its borrowers. So what counts is that a borrower never reads what the
lender loads later: all later loads are of files whose bytes the first one does not have, into slabs that the first one
had.

`PENSTOCK_TEST_RANKS=1` (`make ranks`) runs all points of time; otherwise a sample.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import fakegpu
import numpy as np
import ordeal
import pytest
import safetensors.numpy
import slow_fs
from ranks_together import Ranks, state, until, until_stopped

WHOLE = os.environ.get("PENSTOCK_TEST_RANKS") == "1"
SIZE = 4
#: Seconds of silence after which a rank counts as dead.
SILENCE = 1.5
#: Tensors of a file, of a MiB each. A rank reads as many, one after the other.
TENSORS = 24
STEPS = TENSORS // SIZE


def why_no_faults() -> str | None:
    """Why this process cannot wait for a write to a page, or nothing."""
    number = {"x86_64": 323, "aarch64": 282}.get(os.uname().machine)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = -1 if number is None else libc.syscall(number, os.O_CLOEXEC)
    if fd < 0:
        return f"no userfaultfd here: {errno.errorcode.get(ctypes.get_errno(), 'unknown')}"
    os.close(fd)
    return None


NO_FAULTS = why_no_faults()
STRACE = shutil.which("strace")


def drawn(path: Path, seed: int, low: int, high: int) -> Path:
    generator = np.random.default_rng(seed)
    tensors = {f"{n:02}": generator.integers(low, high, 1 << 20, dtype=np.uint8) for n in range(TENSORS)}
    safetensors.numpy.save_file(tensors, path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of bytes from 1 to 127."""
    return drawn(tmp_path_factory.mktemp("faults") / "model.safetensors", 1, 1, 128)


@pytest.fixture(scope="module")
def other(model: Path) -> Path:
    """The same tensors, of bytes from 128 to 255."""
    return drawn(model.parent / "other.safetensors", 2, 128, 256)


#: Destinations begin with zeros, which no file has.
LOADS = """
import gc, platform, resource
from pathlib import Path

SLAB = "memfd:penstock-slab"
options = {"staging": 16 << 20, "extent": 1 << 20, "threads": 2, "shared_slabs": shared, "peer_timeout": silence}
checkpoints = {which: penstock.open(which) for which in (path, other)}
expected = {which: safetensors.torch.load_file(which) for which in (path, other)}

old = 0  # what is in destinations before

def fresh():
    # Written to: a page that was never written to has no protection to lift
    return {name: torch.empty_like(tensor).fill_(0) for name, tensor in expected[path].items()}

def wrong(into, of):
    "Tensors with a byte that is neither the one from before nor that of the file."
    return [name for name, found in into.items() if not ((found == old) | (found == expected[of][name])).all()]

def load(name, ranks, of=path, into=None, **more):
    "How a load of these ranks ends."
    into = fresh() if into is None else into
    group = dist.PrefixStore(name, store), ranks.index(rank), len(ranks)
    outcome = {}
    try:
        report = checkpoints[of].load_into(into, group=group, options={**options, **more.pop("options", {})}, **more)
        outcome["same"] = sum(torch.equal(into[name], expected[of][name]) for name in into)
        outcome["lent"] = report.exchange["lent_bytes"] if report.exchange else 0
    except (penstock.PenstockError, KeyboardInterrupt, ZeroDivisionError) as error:
        outcome["error"], outcome["text"] = type(error).__name__, str(error)
        if isinstance(error, penstock.PeerError):
            told = [ranks[error.rank], error.why, error.since]
            outcome["peer"], outcome["why"], outcome["since"] = told
    outcome["when"], outcome["wrong"] = time.time(), wrong(into, of)
    return outcome

def left():
    "What loads could leave: threads, descriptors, listening sockets; slabs; sockets of links."
    gc.collect()
    sockets = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            sockets.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass  # that of this listing
    mapped = sum(SLAB in line for line in open("/proc/self/maps"))
    named = [line.split() for line in open("/proc/net/unix") if "@penstock-" in line]
    return [traces(), mapped, sum(f"socket:[{line[6]}]" in sockets for line in named)]

def settled_left(before):
    limit = time.monotonic() + 5
    while left() != before and time.monotonic() < limit:
        time.sleep(0.01)  # a thread that has answered may still be ending
    return left()

def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "TZ"
    except OSError:
        return False

def hold_write(tensor, then):
    "The next write to the middle of a tensor waits until `then` has returned. Gives what has to be closed at the end."
    import fcntl, mmap
    faults = libc.syscall({"x86_64": 323, "aarch64": 282}[platform.machine()], os.O_CLOEXEC)
    page = (tensor.data_ptr() + tensor.numel() // 2) // mmap.PAGESIZE * mmap.PAGESIZE
    UFFDIO_API, UFFDIO_REGISTER, UFFDIO_WRITEPROTECT = 0xC018AA3F, 0xC020AA00, 0xC018AA06
    fcntl.ioctl(faults, UFFDIO_API, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
    fcntl.ioctl(faults, UFFDIO_REGISTER, bytearray(struct.pack("QQQQ", page, mmap.PAGESIZE, 2, 0)))
    def protect(mode):
        fcntl.ioctl(faults, UFFDIO_WRITEPROTECT, bytearray(struct.pack("QQQ", page, mmap.PAGESIZE, mode)))
    protect(1)
    def wait():
        os.read(faults, 32)
        try:
            then()
        finally:
            protect(0)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return faults

everyone = list(range(4))

class Another:
    "Another load of this process, in the middle of a copy: slabs that come back meanwhile stay, for the next load."
    def __init__(self):
        # Every other byte: that is copied out of staging memory
        into = torch.empty(2 << 20, dtype=torch.uint8).fill_(0)[::2]
        begun, self.over = threading.Event(), threading.Event()
        self.faults = hold_write(into, lambda: (begun.set(), self.over.wait()))
        given = {"strict": False, "options": options}
        self.thread = threading.Thread(target=checkpoints[path].load_into, args=[{"00": into}], kwargs=given)
        self.thread.start()
        assert begun.wait(60)
    def end(self):
        self.over.set()
        self.thread.join()
        os.close(self.faults)
"""

FAULT = (
    LOADS
    + """
def act():
    write(folder, "fired", str(time.time()))
    os.kill(int(wait_for(f"{folder}/pid.{which}")), fault)
    if which == rank:
        wait_for(f"{folder}/resume.go")
    else:
        while running(int(wait_for(f"{folder}/pid.{which}"))):
            time.sleep(0.001)

write(folder, f"pid.{rank}", str(os.getpid()))
survivors = [one for one in everyone if one != which]
if rank in everyone:
    # What the first load of a process sets up
    said["first"] = load("first", everyone, options={"trace": f"{folder}/trace.{rank}"})
    events = json.load(open(f"{folder}/trace.{rank}"))["traceEvents"]
    reads = [event["args"]["offset"] for event in events if "offset" in event["args"] and event["name"] == "read"]
    said["own"] = sorted({offset >> 20 for offset in reads} - {tensors})
    before = left()
    another, into = Another(), fresh()
    faults = hold_write(into[tensor], act) if rank == held else None
    hold("armed")
    said["fault"] = load("fault", everyone, into=into)
    if rank == which:
        said["alone"] = load("alone", [rank], other)
    else:
        said["again"] = [load(f"again{n}", survivors, [other, other, path][n % 3]) for n in range(4)]
if rank != which:
    said["all"] = load("all", [*survivors, 4])
if rank in everyone:
    if faults is not None:
        os.close(faults)
    another.end()
    del another, into
    said["left"] = [before, settled_left(before)]
"""
)

#: (signal, rank, where in its load, how far). A taker copies out of the slab of another rank, a reader lends its slab
#: to a rank that copies out of it, an owner copies out of its slab itself. They are stopped there in the middle of a
#: tensor. `sent` and `heard`: after so many messages on its links.
Point = tuple[int, int, str, int]


def points() -> list[Point]:
    """Fifty for each signal: each rank in turn, spread over its load."""
    found: list[Point] = []
    for fault, number in itertools.product((signal.SIGKILL, signal.SIGSTOP), range(50)):
        which, (part, kind) = number % SIZE, divmod(number // SIZE, 5)
        where = ["taker", "reader", "sent", "heard", "owner"][kind]
        far = {"sent": 1 + 12 * part + 3 * which, "heard": 2 + 17 * part + 4 * which}
        found.append((fault, which, where, far.get(where, 2 * part + which // 2)))
    return found if WHOLE else [found[number] for number in (0, 51, 62)]


def named(point: Point) -> str:
    fault, which, where, far = point
    return f"{signal.Signals(fault).name} of rank {which}, {where} {far}"


def fits(point: Point) -> None:
    if NO_FAULTS is not None:
        pytest.skip(NO_FAULTS)
    if point[2] in ("sent", "heard") and not may_trace():
        pytest.skip("strace is not installed, or may not attach to a process here")


@cache
def may_trace() -> bool:
    if STRACE is None:
        return False
    with subprocess.Popen(["sleep", "1"]) as other:
        command = [STRACE, "-o", os.devnull, "-p", str(other.pid)]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0


@contextmanager
def traced(pid: int, fault: int, where: str, far: int, log: Path) -> Iterator[Callable[[], bool]]:
    """Sends the process a signal when one of its threads has sent, or looked for, that many messages. Gives whether it
    has come.
    """
    call, name = {"sent": "sendmsg", "heard": "recvmsg"}[where], signal.Signals(fault).name
    command = [str(STRACE), "-f", "-o", str(log), "-e", f"trace={call}", "-p", str(pid)]
    command += ["-e", f"inject={call}:signal={name}:when={far}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        assert "attached" in strace.stderr.readline()
        try:
            words = {signal.SIGKILL: "+++ killed by", signal.SIGSTOP: "--- stopped by"}
            yield lambda: words[signal.Signals(fault)] in log.read_text()
        finally:
            # The process stays as it is, stopped or not. To detach properly it would wait for threads that are gone
            strace.kill()


@pytest.mark.parametrize("point", points(), ids=named)
def test_a_rank_that_is_killed_or_stopped_while_slabs_are_lent_is_named_and_nobody_gets_a_wrong_byte(
    together: Callable[..., Ranks], model: Path, other: Path, tmp_path: Path, point: Point
) -> None:
    fits(point)
    fault, which, where, far = point
    neighbour = (which + 1 + far % (SIZE - 1)) % SIZE
    reader = {"taker": neighbour, "reader": which, "owner": which}.get(where, which)
    held = {"taker": which, "reader": neighbour, "owner": which}.get(where, -1)
    given = {"which": which, "fault": int(fault), "held": held, "tensor": f"{reader * STEPS + far % STEPS:02}"}
    given |= {"shared": True, "silence": SILENCE, "other": str(other), "tensors": TENSORS}
    # The fifth process takes the place of the one that is gone
    with together(FAULT, SIZE + 1, model, **given) as ranks:
        ranks.held("armed", range(SIZE))
        survivors = [rank for rank in range(SIZE) if rank != which]
        if held < 0:
            with traced(ranks.pids[which], fault, where, far, tmp_path / "strace") as come:
                ranks.release("armed")
                until(come)
                fired = time.time()
            if fault == signal.SIGSTOP:
                until_stopped(ranks.pids[which])
            ranks.release("resume")
        else:
            ranks.release("armed")
            until((ranks.folder / "fired").exists)
            fired = float((ranks.folder / "fired").read_text())
        said = {rank: ranks.said(rank) for rank in [*survivors, SIZE]}
        limit = (SILENCE if fault == signal.SIGSTOP else 0.0) + 1.0 * ordeal.load_factor()
        for rank in survivors:
            one = said[rank]
            assert one["first"]["same"] == TENSORS and one["first"]["lent"] > 0, one["first"]
            assert one["own"] == list(range(rank * STEPS, (rank + 1) * STEPS)), (
                "it reads other tensors than this test thinks"
            )
            assert (one["fault"].get("peer"), one["fault"]["wrong"]) == (which, []), (rank, one["fault"])
            assert one["fault"]["why"] in one["fault"]["text"], one["fault"]
            assert one["fault"]["when"] - fired < limit, (rank, one["fault"], fired)
            assert [load.get("same") for load in one["again"]] == [TENSORS] * 4, (rank, one["again"])
            assert all(load["lent"] > 0 for load in one["again"]), (rank, one["again"])
            assert one["left"][0] == one["left"][1], (rank, one["left"])
            assert one["left"][1][1:] == [0, 0], (rank, one["left"])
        assert [said[rank]["all"].get("same") for rank in said] == [TENSORS] * SIZE, [
            one["all"] for one in said.values()
        ]
        if fault == signal.SIGSTOP:
            assert state(ranks.pids[which]) == "T"
            ranks.release("resume")
            os.kill(ranks.pids[which], signal.SIGCONT)
            late = ranks.said(which)
            assert "peer" in late["fault"] and late["fault"]["wrong"] == [], late["fault"]
            assert late["alone"].get("same") == TENSORS, late["alone"]
            assert late["left"][0] == late["left"][1] and late["left"][1][1:] == [0, 0], late["left"]
        # Other tests have folders there
        assert not [path for path in Path("/dev/shm").glob("*penstock*") if path.is_file()]


#: A rank's copy out of another rank's slab ends only when the others have loaded again, several times.
SLOW = (
    LOADS
    + """
if library:
    sys.path.insert(0, tests)
    os.environ["PENSTOCK_GPU_LIBRARY"] = f"cuda:{library}"
    import fakegpu
    from penstock import _accelerator, _core
    fake = fakegpu.FakeGpu()
    gpu = fakegpu.FakeTorch(fake)
    _accelerator._torch = lambda: gpu
    _accelerator.device_of = gpu.device_of
    _accelerator.Accelerator.dlpack_device = 1, 0
    old = 0x55  # written there by what ran on the device before

    def fresh():
        return {name: gpu.destination(tensor) for name, tensor in expected[path].items()}

    def seen(into):
        fake.control("drain")
        for tensor in into.values():
            fake.control("host_access", tensor.data_ptr(), tensor.nbytes, 0)

    def wrong(into, of, wrong=wrong):
        seen(into)
        return wrong(into, of)

    def checked(checkpoint):
        load_into = checkpoint.load_into
        def then_seen(into, **more):
            report = load_into(into, **more)
            seen(into)
            return report
        checkpoint.load_into = then_seen

borrower, lenders = 1, [one for one in everyone if one not in (1, victim)]
write(folder, f"pid.{rank}", str(os.getpid()))

def strike():
    # No load can end meanwhile: this one lacks that tensor
    time.sleep(0.3)
    write(folder, "fired", str(time.time()))
    os.kill(int(wait_for(f"{folder}/pid.{victim}")), fault)
    wait_for(f"{folder}/reloaded.go")

def strike_when_it_hangs(copies):
    while fake.counter("copies") < copies:
        time.sleep(0.001)
    strike()
    fake.control("release_hang")

if library:
    for checkpoint in checkpoints.values():
        checked(checkpoint)
said["first"] = load("first", everyone)
into, another = fresh(), None
if rank == borrower and library:
    fake.configure(hang_copy=6)
    threading.Thread(target=strike_when_it_hangs, args=[fake.counter("copies") + 6]).start()
elif rank == borrower:
    faults = hold_write(into["00"], strike)  # rank 0 reads it
elif not library:
    another = Another()
hold("armed")
said["fault"] = load("fault", everyone, into=into)
if rank in lenders:
    said["again"] = [load(f"again{n}", lenders, [other, other, path][n % 3]) for n in range(4)]
    hold("reloaded")
elif rank == borrower:
    wait_for(f"{folder}/reloaded.go")
if rank == borrower or rank in lenders:
    said["all"] = load("all", sorted({borrower, *lenders}))
if another is not None:
    another.end()
if library:
    del into, another
    gc.collect()
    gpu.close()
    _core.release_staging()
    said["misuses"], said["leaks"] = fake.misuses, fake.leaks
said["left"] = left()[1:]
"""
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("what", ["another rank is killed", "it is stopped", "it is interrupted"])
def test_a_copy_that_outlasts_its_load_gets_its_bytes_though_the_lender_loads_again(
    together: Callable[..., Ranks], model: Path, other: Path, what: str, device: str
) -> None:
    why = NO_FAULTS if device == "cpu" else None if fakegpu.LIBRARY else fakegpu.NO_LIBRARY
    if why is not None:
        pytest.skip(why)
    kinds = {"another rank is killed": (3, signal.SIGKILL), "it is stopped": (1, signal.SIGSTOP)}
    victim, fault = kinds.get(what, (1, signal.SIGINT))
    given = {"victim": victim, "fault": int(fault), "shared": True, "silence": SILENCE, "other": str(other)}
    given |= {"library": fakegpu.LIBRARY if device == "gpu" else None, "tests": str(Path(__file__).parent)}
    lenders = [rank for rank in range(SIZE) if rank not in (1, victim)]
    with together(SLOW, SIZE, model, **given) as ranks:
        ranks.held("armed")
        ranks.release("armed")
        ranks.held("reloaded", lenders)
        assert not (ranks.folder / "said.1").exists()
        fired = float((ranks.folder / "fired").read_text())
        ranks.release("reloaded")
        if fault == signal.SIGSTOP:
            assert state(ranks.pids[1]) == "T"
            os.kill(ranks.pids[1], signal.SIGCONT)
        said = {rank: ranks.said(rank) for rank in sorted([1, *lenders])}
    limit = (SILENCE if fault == signal.SIGSTOP else 0.0) + 1.0 * ordeal.load_factor()
    for rank in lenders:
        told = said[rank]["fault"]
        assert (told.get("peer"), told["wrong"]) == (victim, []), (rank, told)
        assert told["when"] - fired < limit, (rank, told, fired)
        assert [load.get("same") for load in said[rank]["again"]] == [TENSORS] * 4, (rank, said[rank]["again"])
        assert all(load["lent"] > 0 for load in said[rank]["again"]), (rank, said[rank]["again"])
    own = said[1]["fault"]
    assert own["error"] == ("KeyboardInterrupt" if fault == signal.SIGINT else "PeerError"), own
    assert own["wrong"] == [], own
    for rank, one in said.items():
        assert one["first"]["same"] == one["all"].get("same") == TENSORS, (rank, one["first"], one["all"])
        assert one["left"] == [0, 0], (rank, one["left"])
        assert one.get("misuses", []) == one.get("leaks", []) == [], (rank, one)


#: Rank 1 fails in the middle of a load, in each of these ways.
FAILS = (
    LOADS
    + """
size = 3
everyone = [0, 1, 2]
options["join_timeout"] = 60
said["first"] = load("first", everyone)
before = left()
# The same content, of a file that is slow, or stalls
of = own if rank == 1 else slow
checkpoints[of], expected[of] = penstock.open(of), expected[path]
options.update(cache="bypass", depth=1, threads=1)
fired = False

def progress(done, total):
    global fired
    if fired or rank != 1 or done < total // 3:
        return
    fired = True
    if how == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    elif how == "its caller raises":
        1 / 0
    elif how == "truncated":
        os.truncate(truncated, 1 << 20)

more = {"options": {"stall_timeout": 1.0} if how == "stalled" and rank == 1 else {}}
hold("armed")
if how == "closed early":
    outcome = {}
    try:
        group = dist.PrefixStore("fault", store), rank, size
        stream = checkpoints[of].stream(group=group, options={**options, "window": 6 << 20})
        for number, (name, tensor) in enumerate(stream, 1):
            assert torch.equal(tensor, expected[path][name])
            if rank == 1 and number == 8:
                break
        stream.close()
    except penstock.PeerError as error:
        outcome = {"error": type(error).__name__, "text": str(error), "why": error.why, "peer": error.rank}
    said["fault"] = {"wrong": [], **outcome}
else:
    said["fault"] = load("fault", everyone, of, progress=progress, **more)
del checkpoints[of]
hold("told")
said["again"] = [load(f"again{n}", everyone, [other, path][n]) for n in range(2)]
said["left"] = [before, settled_left(before)]
"""
)

#: How rank 1 fails, its own errors, and a part of what the others hear.
FAILURES: dict[str, tuple[set[str | None], str]] = {
    "interrupted": ({"KeyboardInterrupt"}, "cancelled"),
    "its caller raises": ({"ZeroDivisionError"}, "cancelled"),
    "truncated": ({"TruncatedError", "ChangedError"}, ".safetensors"),
    "stalled": ({"StalledError"}, ".safetensors"),
    "closed early": ({None}, ""),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", FAILURES)
def test_a_rank_that_fails_is_told_in_the_same_way_whether_slabs_are_shared_or_not(
    together: Callable[..., Ranks], model: Path, other: Path, tmp_path: Path, how: str
) -> None:
    why = slow_fs.why_not()
    if why is not None:
        pytest.skip(why)
    for shared in (True, False):
        copies = tmp_path / f"{shared}"
        copies.mkdir()
        own = Path(shutil.copy(model, copies / "own.safetensors"))
        slow = Path(shutil.copy(model, copies / "slow.safetensors"))
        given = {"how": how, "truncated": str(own), "other": str(other), "shared": shared, "silence": 20.0}
        with slow_fs.mounted(copies) as fs:
            # Only one rank's reads stall
            given |= {"own": str(fs.path / own.name), "slow": str(slow if how == "stalled" else fs.path / slow.name)}
            fs.tell(latency=0.03)
            with together(FAILS, 3, model, **given) as ranks:
                ranks.held("armed")
                if how == "stalled":
                    fs.tell(forget=True, hang=["read"], after=3)
                ranks.release("armed")
                ranks.held("told")
                fs.tell(hang=[])
                ranks.release("told")
                said = ranks.all()
        own_errors, part = FAILURES[how]
        assert said[1]["fault"].get("error") in own_errors, said[1]["fault"]
        for rank in (0, 2):
            told = said[rank]["fault"]
            assert (told.get("error"), told.get("peer")) == ("PeerError", 1), (rank, told)
            assert part in told["why"] and told["why"] in told["text"], (rank, told)
        for rank, one in enumerate(said):
            assert one["fault"]["wrong"] == [], (rank, one["fault"])
            assert (one["first"]["lent"] > 0) == shared, (rank, one["first"])
            assert [load.get("same") for load in one["again"]] == [TENSORS] * 2, (rank, one["again"])
            assert one["left"][0] == one["left"][1] and one["left"][1][1:] == [0, 0], (rank, one["left"])
