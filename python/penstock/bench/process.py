"""Loads in a fresh process: both ends of the pipe.

The child (`main`) imports and prepares, says that it is ready, and waits. Told to go, it loads once with the clock
running, touches every page of the tensors (timed apart), and says how that went. Told to settle, it waits until the
loader has ended what it does in the background. Told to verify, it compares every byte with the files. Then it drops
the tensors and is ready for its next load. The parent uses the waits to put the page cache and the memory into the
state that the scenario asks for, and to look at what a load left behind.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from . import reference
from .contestants import Contestant, Job, State, named
from .forkserver import Forkserver, ServerEnded
from .results import Run
from .verification import CASTABLE, torch_dtype, touch, verify

#: Seconds between two looks at a process' memory: a look takes about 30 us, so this costs less than 1% of one core.
_SAMPLED_EVERY = 0.005
#: A load that takes longer than this and than its bytes at 20 MB/s hangs.
_PATIENCE = 300.0


@dataclass(frozen=True)
class Order:
    """What a process is to load, as it travels on the first line that it hears."""

    contestant: str
    device: str
    #: What the contestant reads, and the folder that holds it all, if one does.
    files: list[str]
    folder: str | None
    #: The shards that the result is compared with.
    compared: list[str]
    into: bool = False
    dtype: str | None = None
    trace: str | None = None


# --- the parent's end ------------------------------------------------------------------------------------------------


class LoadFailed(Exception):
    """The process ended, or did not answer in time; the message is the last line that it wrote."""


class LoadProcess:
    """A process that loads as often as it is told to. Leaving its context ends it."""

    def __init__(self, server: Forkserver, order: Order, environment: Mapping[str, str], nbytes: int) -> None:
        self._server = server
        self._patience = max(_PATIENCE, nbytes / 20e6)
        self._status: int | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        hears, to = os.pipe()
        of, says = os.pipe()
        self._to, self._of = open(to, "w"), open(of)  # noqa: SIM115 - closed with the process
        try:
            #: Its number.
            self.pid = server.fork(environment, hears, says, self._errors.fileno())
        except ServerEnded as error:
            self._close()
            raise LoadFailed(str(error)) from None
        finally:
            os.close(hears)
            os.close(says)
        self.say(json.dumps(asdict(order)))

    def __enter__(self) -> LoadProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._kill()
        try:
            with contextlib.suppress(BrokenPipeError):
                self._to.close()  # it ends where it is not told to go on
            self._of.read()
            self._ended()
        finally:
            self._close()

    def _close(self) -> None:
        for one in (self._to, self._of, self._errors):
            with contextlib.suppress(BrokenPipeError):
                one.close()

    def _kill(self) -> None:
        # Its number is its own until somebody has waited for it.
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def _ended(self) -> int:
        """Waits for its end; the exit status, or less than 0: the signal."""
        if self._status is None:
            try:
                self._status = self._server.wait(self.pid)
            except ServerEnded as error:
                self._status = -1  # nobody can tell any more
                raise LoadFailed(f"the process that it was forked from has ended: {error}") from None
        return self._status

    def hear(self) -> Run:
        """The next thing that the process says."""
        timer = threading.Timer(self._patience, self._kill)
        timer.start()
        line = self._of.readline()
        in_time = timer.is_alive()
        timer.cancel()
        if line:
            said: Run = json.loads(line)
            return said
        raise self._failed("" if in_time else f"did not answer within {self._patience:.0f} s")

    def _failed(self, otherwise: str) -> LoadFailed:
        status = self._ended()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines() or [f"ended with status {status}"]
        return LoadFailed(otherwise or lines[-1])

    def say(self, what: str) -> None:
        """Tells the process to go on: `load`, then `verify`, `settle` or `drop`; `end` at the end."""
        try:
            self._to.write(what + "\n")
            self._to.flush()
        except BrokenPipeError:
            raise self._failed("") from None


def memory_of(pid: int) -> dict[str, int]:
    """A process' anonymous and shared memory, and what is pinned of it, in bytes; nothing once it has ended.

    Pinned is what the kernel accounts for, such as io_uring's buffers; a GPU driver's registrations are not among it.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    found = {"memory": 0, "pinned": 0}
    for line in text.splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            found["memory"] += int(line.split()[1]) << 10
        elif line.startswith("VmPin:"):
            found["pinned"] += int(line.split()[1]) << 10
    return found


#: Gives figures by name.
Probe = Callable[[], dict[str, int]]


class Sampled:
    """Peaks of what probes give while the context is open, beyond what they gave before it.

    Processes are looked at from outside, so that nothing of them is slowed down.
    """

    def __init__(self, probes: list[Probe]) -> None:
        self._probes = probes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._before = self._now()
        #: Bytes.
        self.peaks: dict[str, int] = {}

    def _now(self) -> dict[str, int]:
        """Sums over all probes."""
        found: dict[str, int] = {}
        for probe in self._probes:
            for name, value in probe().items():
                found[name] = found.get(name, 0) + value
        return found

    def _look(self) -> None:
        while True:
            for name, value in self._now().items():
                self.peaks[name] = max(self.peaks.get(name, 0), value - self._before.get(name, 0))
            if self._over.wait(_SAMPLED_EVERY):
                return

    def __enter__(self) -> Sampled:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


# --- the child's end -------------------------------------------------------------------------------------------------


def resident() -> int:
    """Anonymous and shared memory of this process, in bytes; pages of files are the page cache's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def touched_parameters(files: list[Path], device: str) -> State:
    """What a model has before its weights arrive: a tensor for each, its pages in use."""
    import torch

    entries = reference.entries_of(files).values()
    made = {entry.name: torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device=device) for entry in entries}
    for tensor in made.values():
        tensor.fill_(0)
    return made


def gathered(loaded: Mapping[str, Any] | Iterator[tuple[str, Any]]) -> tuple[State, float]:
    """Tensors by name, and when the first one was there."""
    if isinstance(loaded, Mapping):
        return loaded if isinstance(loaded, dict) else dict(loaded), time.perf_counter()
    state: State = {}
    for name, tensor in loaded:
        state[name] = tensor
        break
    first = time.perf_counter()
    state.update(loaded)
    return state, first


def load(contestant: Contestant, job: Job, compared: list[Path]) -> tuple[Run, State]:
    """One load with the clock running."""
    import torch

    job.noted.clear()
    job.background.clear()
    castable = reference.entries_of(compared) if job.dtype and not contestant.casts else {}
    names = [name for name, entry in castable.items() if entry.dtype in CASTABLE]
    memory, cpu, begun = resident(), time.process_time(), time.perf_counter()
    state, first = gathered(contestant.load(job))
    for name in names:
        state[name] = state[name].to(torch_dtype(job.dtype or ""))
    if job.device != "cpu":
        torch.cuda.synchronize(job.device)
    seconds = time.perf_counter() - begun
    run: Run = {"load_s": seconds, "first_tensor_s": min(first - begun, seconds), "cpu_s": time.process_time() - cpu}
    return run | {"memory": resident() - memory, "tensors": len(state)} | job.noted, state


def serve(order: Order, hear: Callable[[], str], say: Callable[[Run], None]) -> None:
    """Prepares, then loads and verifies as it is told."""
    begun = time.perf_counter()
    import torch

    contestant = named(order.contestant)
    try:
        importlib.import_module(contestant.module)
    except ImportError as error:
        # Only the loader itself may be missing: anything else missing is a fault of this environment.
        if not isinstance(error, ModuleNotFoundError) or error.name == contestant.module:
            say({"absent": str(error)})
            return
        raise
    # A program that names these at its start has imported them before its first load.
    if contestant.module in ("safetensors", "penstock"):
        importlib.import_module({"safetensors": "safetensors.torch", "penstock": "penstock._torch"}[contestant.module])
    obstacle = contestant.obstacle()
    if obstacle is not None:
        say({"absent": obstacle})
        return
    compared = [Path(path) for path in order.compared]
    job = Job(
        files=[Path(path) for path in order.files],
        folder=None if order.folder is None else Path(order.folder),
        device=order.device,
        parameters=touched_parameters(compared, order.device) if order.into else {},
        dtype=order.dtype,
        trace=order.trace,
    )
    torch.ones(1 << 22).clone()  # starts torch's threads, which are no part of a load
    torch.zeros(1, device=order.device)
    if order.device != "cpu":
        torch.cuda.synchronize(order.device)
    gc.collect()
    setup = time.perf_counter() - begun
    say({"ready": True})
    number = 0
    while hear() == "load":
        run, state = load(contestant, job, compared)
        # At once: a loader that goes on in the background after it has returned gains no time by that.
        say(run | touch(state) if order.device == "cpu" else run)
        told = hear()
        found: Run = {"load": number, "setup_s": setup}
        if told == "verify":
            found |= verify(state, compared, order.dtype)
        elif told == "settle":
            for wait in job.background:
                found |= wait()
        say(found)
        number += 1
        del state
        gc.collect()


def main() -> None:
    order = Order(**json.loads(sys.stdin.readline()))
    # What loaders print is not for the parent.
    with os.fdopen(os.dup(1), "w") as pipe:
        os.dup2(2, 1)

        def say(what: Run) -> None:
            pipe.write(json.dumps(what, default=str) + "\n")
            pipe.flush()

        serve(order, lambda: sys.stdin.readline().strip(), say)
