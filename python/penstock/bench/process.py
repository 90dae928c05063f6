"""One load in a fresh process: both ends of the pipe.

The child (this file run as a program) imports and prepares, says "ready", waits for a line on standard input, loads
once with the clock running, then touches every page and compares every byte with the files. The parent uses the wait to
put the page cache and the memory into the state that the scenario asks for.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import reference
from .contestants import CONTESTANTS, Contestant, State, noted
from .results import Run
from .verification import touch, verify

#: torch's name of each dtype that the benchmark's layouts use.
TORCH_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
}


# --- the parent's end -------------------------------------------------------------------------------------------


def load_once(contestant: Contestant, scenario: str, folder: Path, before: Callable[[], Run]) -> Run:
    """One fresh process; `before` runs when it has imported everything, just before its clock starts."""
    command = [sys.executable, "-m", "penstock.bench.process", str(CONTESTANTS.index(contestant))]
    process = subprocess.Popen(
        [*command, scenario, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | contestant.environment,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        line = process.stdout.readline()
        found: Run = {}
        if line.strip() == "ready":
            found = before()
            process.stdin.write("go\n")
            process.stdin.flush()
            line = process.stdout.readline()
        _, errors = process.communicate()
    if line.startswith("{"):
        return {**found, **json.loads(line)}
    return found | {"error": (errors.strip().splitlines() or ["no output"])[-1], "status": process.returncode}


# --- the child's end --------------------------------------------------------------------------------------------


def resident() -> int:
    """Anonymous and shared memory of this process, in bytes; pages of files are the page cache's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def touched_parameters(folder: Path) -> State:
    """What a model has before its weights arrive: a tensor for each, its pages in use."""
    import torch

    entries = reference.entries_of(folder).values()
    return {entry.name: torch.zeros(entry.shape, dtype=getattr(torch, TORCH_DTYPES[entry.dtype])) for entry in entries}


def run_once(contestant: Contestant, scenario: str, folder: Path) -> dict[str, Any]:
    begun = time.perf_counter()
    import torch

    importlib.import_module(contestant.module)
    if contestant.module == "safetensors":
        importlib.import_module("safetensors.torch")
    parameters: State = {}
    if scenario == "load_into":
        parameters = touched_parameters(folder)
        for tensor in parameters.values():
            tensor.fill_(0)
    torch.zeros(1)
    gc.collect()
    setup = time.perf_counter() - begun
    print("ready", flush=True)
    sys.stdin.readline()

    memory, cpu, begun = resident(), time.process_time(), time.perf_counter()
    state = contestant.load(folder, parameters)
    seconds = time.perf_counter() - begun
    result: dict[str, Any] = {
        "setup_s": setup,
        "load_s": seconds,
        "cpu_s": time.process_time() - cpu,
        "memory": resident() - memory,
        "tensors": len(state),
    }
    result |= touch(state)
    result |= verify(state, folder)
    return result | noted


def main() -> None:
    parser = argparse.ArgumentParser(description="One load by one contestant; `penstock bench` starts it.")
    parser.add_argument("index", type=int, help="position in CONTESTANTS")
    parser.add_argument("scenario")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    contestant = CONTESTANTS[arguments.index]
    os.environ.update(contestant.environment)
    try:
        result = run_once(contestant, arguments.scenario, arguments.folder)
    except ModuleNotFoundError as error:
        # Only the loader itself may be missing: anything else missing is a fault of this environment.
        if error.name != contestant.module:
            raise
        result = {"absent": str(error)}
    print(json.dumps(result, default=str), flush=True)


if __name__ == "__main__":
    main()
