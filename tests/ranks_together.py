"""Processes that load together: the ranks of a group, the host of their store, and what is counted outside of them.

A `Nursery` is a process that imports once what all ranks need (torch takes seconds), and forks them, for all tests of a
pytest process. Each rank runs the text of the same program, with the environment that its test has. These names are
there for it:

| name | what it is |
|---|---|
| `rank`, `size`, `path`, `folder` | of these ranks |
| `store` | their `TCPStore`. A process of its own hosts it, or the rank that the test names |
| `group` | (store, rank, size) |
| `said` | a dict; the test gets it when the program has ended |
| `of(n)` | the rank's slice of n elements |
| `sharded(info)` | what a tensor-parallel rank wants of a tensor, by its name: columns, rows, or all |
| `same(tensors, slices)` | asserts that they are what safetensors reads; how many they are |
| `hold(name)` | says that the rank has come so far, and waits until the test releases it |
| `traces()` | threads, descriptors and listening sockets of this process that a load could leave |
| `counted()` | the numbers of all its threads and of all its descriptors |
| `settled(left)` | asserts that soon they are no more than `left` |
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ordeal
import pytest

#: The process that forks the ranks. An order is a line with a folder where the rest of it is; the answer is a line with
#: process ids.
NURSERY = r"""
import ctypes, fcntl, gc, json, linecache, os, select, signal, socket, struct, sys, threading, time, traceback
from datetime import timedelta
import torch, torch.distributed as dist
import penstock, penstock._group_stream, penstock._into, penstock._torch
import encodings.idna, safetensors.torch
from safetensors import safe_open
try:
    # Where torch has them. The first is what a dispatch mode, and what DTensor does first, import
    import torch._dynamo
    import torch.distributed.checkpoint, torch.distributed.fsdp
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError:
    pass
# What is there now no rank looks through for garbage
gc.collect()
gc.freeze()

def write(folder, name, text=""):
    with open(f"{folder}/{name}.new", "w") as file:
        file.write(text)
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}")

def wait_for(file):
    while not os.path.exists(file):
        time.sleep(0.002)
    with open(file) as opened:
        return opened.read()

def hosted(folder):
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    write(folder, "port", str(server.port))
    return server

CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP, PR_SET_PDEATHSIG = 0x40000000, 0x8914, 1, 1
libc = ctypes.CDLL(None, use_errno=True)

def must(result):
    if result:
        raise OSError(ctypes.get_errno(), "cannot have a network of its own")

def host(order):
    if order["fenced"]:
        must(libc.unshare(CLONE_NEWNET))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any:
            fcntl.ioctl(any, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    server = hosted(order["folder"])
    while True:
        signal.pause()

def reader_of(path):
    if path.endswith(".safetensors"):
        return {path: safe_open(path, "pt")}
    names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    return {name: safe_open(f"{path}/{name}", "pt") for name in names}

def names_of(order, rank):
    size, path, folder = order["size"], order["path"], order["folder"]
    if order["hosted_by"] == rank:
        store = hosted(folder)
    else:
        port = int(wait_for(f"{folder}/port"))
        if order["fenced"]:
            with open(f"/proc/{order['host']}/ns/net") as network:
                must(libc.setns(network.fileno(), CLONE_NEWNET))
        store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))

    def of(n):
        return slice(n * rank // size, n * (rank + 1) // size)

    def sharded(info):
        if info.name.endswith("down"):
            return (slice(None), of(info.shape[1]))
        return of(info.shape[0]) if info.name.endswith(("up", "experts")) else None

    def raw(tensor):
        return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)

    def same(found, slices=None):
        checkpoint, compared = penstock.open(path), set()
        for file in reader_of(path).values():
            for name in file.keys():
                if name in found:
                    cut = slices(checkpoint[name]) if slices else None
                    whole, tensor = file.get_tensor(name), found[name]
                    expected = whole if cut is None else whole[cut]
                    assert tensor.dtype == expected.dtype and tensor.shape == expected.shape, name
                    assert torch.equal(raw(tensor), raw(expected)), name
                    compared.add(name)
        assert compared == found.keys(), "not of the checkpoint"
        return len(found)

    def hold(name="held"):
        write(folder, f"{name}.{rank}")
        wait_for(f"{folder}/{name}.go")

    def traces():
        threads, found = [], []
        for task in os.listdir("/proc/self/task"):
            try:
                threads.append(open(f"/proc/self/task/{task}/comm").read().strip())
            except OSError:
                pass  # it has just ended
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                pass  # that of this listing
        listening = 0
        for table in ("tcp", "tcp6"):
            for line in open(f"/proc/self/net/{table}").readlines()[1:]:
                listening += line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in found
        kinds = sorted(one.split(":")[0] for one in found)
        return [sorted(thread for thread in threads if thread.startswith("penstock")), kinds, listening]

    def counted():
        return [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]

    def settled(left):
        # Soon: a thread that has answered may still be ending, on a busy machine for seconds
        limit = time.monotonic() + 30
        while any(now > then for now, then in zip(counted(), left)):
            assert time.monotonic() < limit, (counted(), left)
            time.sleep(0.01)

    names = dict(rank=rank, size=size, path=path, folder=folder, store=store, group=(store, rank, size), said={})
    names.update(of=of, sharded=sharded, same=same, hold=hold, traces=traces, counted=counted, settled=settled)
    return {**globals(), **names, **order["given"]}

def program(order, rank):
    folder, text = order["folder"], order["program"]
    linecache.cache["<program>"] = (len(text), None, text.splitlines(True), "<program>")
    try:
        names = names_of(order, rank)
        exec(compile(text, "<program>", "exec"), names)
        write(folder, f"said.{rank}", json.dumps(names["said"]))
        if order["hosted_by"] == rank:
            wait_for(f"{folder}/over")
    except BaseException:
        write(folder, f"failed.{rank}", traceback.format_exc())

# What a rank prints is no answer
answers, nothing = os.fdopen(os.dup(1), "w"), os.open(os.devnull, os.O_RDWR)
os.dup2(2, 1)
nursery = os.getpid()
hearing, speaking = os.pipe()
for end in (hearing, speaking):
    os.set_blocking(end, False)
signal.set_wakeup_fd(speaking, warn_on_full_buffer=False)
signal.signal(signal.SIGCHLD, lambda *_: None)
#: The folder and number of each process.
running = {}

def fork(run, order, number):
    pid = os.fork()
    if pid == 0:
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives the nursery
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(nothing, 0)
            for fd in (nothing, hearing, speaking, answers.fileno()):
                os.close(fd)
            for name in os.environ.keys() - order["environment"].keys():
                del os.environ[name]
            os.environ.update(order["environment"])
            if os.getppid() == nursery:
                run(order, number) if number is not None else run(order)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    running[pid] = order["folder"], number
    return pid

print("ready", file=answers, flush=True)
while True:
    ready, _, _ = select.select([0, hearing], [], [])
    if hearing in ready:
        os.read(hearing, 4096)
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        folder, number = running.pop(pid)
        try:
            write(folder, f"ended.{number}", str(status))
        except FileNotFoundError:
            pass  # nobody waits for it any more
    if 0 in ready:
        line = sys.stdin.buffer.raw.readline()
        if not line:
            break
        with open(line.decode().rstrip("\n") + "/order") as file:
            order = json.load(file)
        hosts = [fork(host, order, None)] if order["hosted_by"] is None else []
        order["host"] = hosts and hosts[0]
        ranks = [fork(program, order, rank) for rank in range(order["size"])]
        print(json.dumps([ranks, hosts]), file=answers, flush=True)
# What runs yet ends with it. The end of an interpreter that has torch takes a second, and changes nothing
os._exit(0)
"""


def until(there: Callable[[], bool], seconds: float = 120.0) -> None:
    """Waits for what must come. The limit only tells a hang from work."""
    limit = time.monotonic() + seconds * ordeal.load_factor()
    while not there():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.002)


def until_stopped(pid: int) -> None:
    """Waits until a process has stopped: one that ends instead has not done what it was to do."""
    until(lambda: state(pid) in "TZ")
    assert state(pid) == "T", "it ended, and did not stop"


def state(pid: int) -> str:
    """What the kernel says of a process: `R`, `S`, `T` (stopped), `Z` (gone)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


class Ranks:
    """Processes that run the same program, and the host of their store."""

    def __init__(self, folder: Path, pids: list[int], hosts: list[int]) -> None:
        self.folder = folder
        self.pids = pids
        #: The process that hosts the store, unless a rank does.
        self.hosts = hosts

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for number, pid in [*enumerate(self.pids), *((None, pid) for pid in self.hosts)]:
            if not (self.folder / f"ended.{number}").exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                until((self.folder / f"ended.{number}").exists)

    def ended(self, rank: int | None) -> None:
        """Waits until a rank's process is gone; None: the host of the store."""
        until((self.folder / f"ended.{rank}").exists)

    def held(self, name: str = "held", ranks: Sequence[int] | None = None) -> None:
        """Waits until ranks (None: all) have come so far, or have failed."""
        for rank in range(len(self.pids)) if ranks is None else ranks:
            marks = [self.folder / f"{name}.{rank}", self.folder / f"failed.{rank}"]
            until(lambda marks=marks: any(mark.exists() for mark in marks))  # type: ignore[misc]

    def release(self, name: str = "held", text: str = "") -> None:
        new = self.folder / f"{name}.go.new"
        new.write_text(text)
        new.rename(self.folder / f"{name}.go")  # a rank that waits for it reads it whole

    def said(self, rank: int) -> dict[str, Any]:
        """What a rank's program has left in `said`."""
        marks = [self.folder / f"{name}.{rank}" for name in ("said", "failed", "ended")]
        until(lambda: any(mark.exists() for mark in marks))
        assert not marks[1].exists(), f"rank {rank}:\n{marks[1].read_text()}"
        assert marks[0].exists(), f"rank {rank} was killed"
        found: dict[str, Any] = json.loads(marks[0].read_text())
        return found

    def all(self) -> list[dict[str, Any]]:
        """What all of them have said."""
        return [self.said(rank) for rank in range(len(self.pids))]

    def read_bytes(self, rank: int) -> int:
        """Bytes that storage has given to a rank's process, as the kernel counts them."""
        lines = Path(f"/proc/{self.pids[rank]}/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

    def loopback_bytes(self) -> int:
        """Bytes that left through the loopback device of the ranks' network namespace, with all headers."""
        lines = Path(f"/proc/{self.pids[0]}/net/dev").read_text().splitlines()
        return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def environment() -> dict[str, str]:
    """That of ranks: the one of the test."""
    more = {
        # Otherwise torch warns, for each connection, that this network has no name server
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # With files in the page cache ranks would have nothing to say to each other
        "PENSTOCK_EXCHANGE": "on",
        # As torchrun gives to ranks; and a process that forks may have no other thread than the one that does
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return {**os.environ, **more}


def ordered(
    program: str,
    size: int,
    path: Path,
    folder: Path,
    *,
    hosted_by: int | None = None,
    fenced: bool = False,
    **given: Any,
) -> Path:
    """Makes the folder of an order for `size` ranks: there they say what they do.

    `given`: more names for the program. `fenced`: they have a network of their own, that of their store's host. Its
    loopback device counts what they send, and nothing else.
    """
    folder.mkdir()
    order = {"program": textwrap.dedent(program), "size": size, "path": str(path), "folder": str(folder)}
    order |= {"hosted_by": hosted_by, "fenced": fenced, "given": given, "environment": environment()}
    (folder / "order").write_text(json.dumps(order))
    return folder


class Nursery:
    """A process that forks ranks."""

    def __init__(self) -> None:
        command, pipe = [sys.executable, "-c", NURSERY], subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, start_new_session=True, env=environment()
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._orders, self._answers = self.process.stdin, self.process.stdout
        assert self._answers.readline() == "ready\n"

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        self.process.wait()
        self._answers.close()

    def run(self, program: str, size: int, path: Path, folder: Path, **more: Any) -> Ranks:
        """Starts ranks, as `ordered` says."""
        print(ordered(program, size, path, folder, **more), file=self._orders, flush=True)
        answer = self._answers.readline()
        assert answer, "the nursery is gone"
        return Ranks(folder, *json.loads(answer))


def starter(nursery: Nursery, folder: Path, prelude: str = "") -> Callable[..., Ranks]:
    """What starts ranks, each time in a folder of their own. `prelude`: what their programs begin with."""
    numbers = itertools.count()

    def start(program: str, size: int, path: Path, **given: Any) -> Ranks:
        program = prelude + textwrap.dedent(program)
        return nursery.run(program, size, path, folder / f"ranks{next(numbers)}", **given)

    return start


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    pytest.importorskip("torch.distributed")
    with contextlib.closing(Nursery()) as found:
        yield found


@pytest.fixture
def together(nursery: Nursery, tmp_path: Path) -> Callable[..., Ranks]:
    """Starts ranks: (program, size, path, **given)."""
    return starter(nursery, tmp_path)
