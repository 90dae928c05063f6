"""Loads in a fresh process: the child's end of the pipe; `process` is the other.

It imports and prepares, says that it is ready, and waits. Told to go, it loads once with the clock running, touches
every page of the tensors (timed apart), and says how that went. Told to settle, it waits until the loader has ended
what it does in the background. Told to verify, it compares every byte with the files. Then it drops the tensors and is
ready for its next load.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import reference
from .contestants import Contestant, named
from .job import Job, State
from .page_cache import free_memory
from .results import Run
from .verification import CASTABLE, torch_dtype, touch, verify


@dataclass(frozen=True)
class Order:
    """The job of a process, as its first input line has it."""

    contestant: str
    device: str
    #: The files that the contestant reads, and the folder that holds all of them, if one does.
    files: list[str]
    folder: str | None
    #: The shards that the result is compared with.
    compared: list[str]
    into: bool = False
    #: Where a web server has the files, if one does, and the folder with the programs that fetch them.
    urls: list[str] = field(default_factory=list)
    tools: str | None = None
    #: The folder of a first start and a second one.
    kept: str | None = None
    #: Penstock's `storage` for a bucket that takes the tensors, and the folder that has its objects as files.
    bucket: dict[str, Any] | None = None
    objects: str | None = None
    dtype: str | None = None
    trace: str | None = None
    #: Bytes of memory that the process uses and frees before each load, as the bare receive loop does before its own.
    prepared: int = 0


def resident() -> int:
    """Anonymous and shared memory of this process, in bytes; pages of files are the page cache's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def processor_time() -> float:
    """Seconds of this process, and of those that it has started and waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def touched_parameters(files: list[Path], device: str) -> State:
    """A model's tensors before its weights arrive, their pages in use."""
    import torch

    entries = reference.entries_of(files).values()
    made = {entry.name: torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device=device) for entry in entries}
    for tensor in made.values():
        tensor.fill_(0)
    return made


def filled_parameters(files: list[Path], device: str) -> State:
    """The tensors of a checkpoint, read without any loader."""
    import torch

    made: State = {}
    for entry in reference.entries_of(files).values():
        flat = torch.from_numpy(reference.raw(entry)) if entry.nbytes else torch.empty(0, dtype=torch.uint8)
        made[entry.name] = flat.view(torch_dtype(entry.dtype)).reshape(entry.shape).to(device)
    return made


def parameters_of(order: Order, files: list[Path]) -> State:
    """The tensors that are there before the clock runs."""
    if order.bucket is not None:
        return filled_parameters(files, order.device)
    return touched_parameters(files, order.device) if order.into else {}


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
    memory, cpu, begun = resident(), processor_time(), time.perf_counter()
    state, first = gathered(contestant.load(job))
    for name in names:
        state[name] = state[name].to(torch_dtype(job.dtype or ""))
    if job.device != "cpu":
        torch.cuda.synchronize(job.device)
    seconds = time.perf_counter() - begun
    run: Run = {"load_s": seconds, "first_tensor_s": min(first - begun, seconds), "cpu_s": processor_time() - cpu}
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
        parameters=parameters_of(order, compared),
        dtype=order.dtype,
        trace=order.trace,
        urls=order.urls,
        tools=None if order.tools is None else Path(order.tools),
        kept=None if order.kept is None else Path(order.kept),
        bucket=order.bucket,
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
        free_memory(order.prepared)
        run, state = load(contestant, job, compared)
        # At once: a loader that goes on in the background after it has returned gains no time by that.
        say(run | touch(state) if order.device == "cpu" else run)
        told = hear()
        found: Run = {"load": number, "setup_s": setup}
        if told == "verify":
            if order.objects is not None:
                state = filled_parameters(sorted(Path(order.objects).glob("*.safetensors")), "cpu")
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
