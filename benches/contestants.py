"""The loaders that the benchmark compares, a few lines each, and the process in which one of them runs once.

A contestant loads a checkpoint folder into CPU memory, opening included, and returns the tensors by name. To add a
rival, write one function here and name it in `CONTESTANTS`.

Run as a program this file is one process of the benchmark: it imports and prepares, says "ready", waits for a line on
standard input, loads once with the clock running, then touches every page and compares every byte with the files.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import reference

State = dict[str, Any]

#: torch's name of each dtype that the benchmark's layouts use.
TORCH_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
}


@dataclass(frozen=True)
class Contestant:
    """`load(folder, parameters)` returns tensors by name; parameters are given where existing ones are to be filled."""

    name: str
    module: str
    load: Callable[[Path, State], State]
    scenarios: tuple[str, ...]
    rival: bool = True
    environment: dict[str, str] = field(default_factory=dict)


# --- penstock --------------------------------------------------------------------------------------------------------


def penstock(**options: Any) -> Callable[[Path, State], State]:
    def load(folder: Path, _: State) -> State:
        import penstock

        chosen = penstock.Options(**options) if options else None
        begun = time.perf_counter()
        checkpoint = penstock.open(folder)
        noted["open_s"] = time.perf_counter() - begun
        state: State = checkpoint.load(device="cpu", progress=False, options=chosen)
        noted["report"] = plain(checkpoint.last_report)
        return state

    return load


def penstock_load_into(folder: Path, parameters: State) -> State:
    import penstock

    noted["report"] = plain(penstock.open(folder).load_into(parameters, progress=False))
    return parameters


#: What a contestant tells of its load besides, for the JSON: penstock's report and its seconds for opening.
noted: dict[str, Any] = {}


def plain(value: Any) -> Any:
    """A report as JSON can hold it."""
    return dict(value) if isinstance(value, Mapping) else repr(value)


# --- peers -----------------------------------------------------------------------------------------------------------


def safetensors_load_file(folder: Path, _: State) -> State:
    from safetensors.torch import load_file

    state: State = {}
    for path in reference.files_of(folder):
        state.update(load_file(path))
    return state


def safetensors_pread(folder: Path, _: State) -> State:
    from safetensors.torch import load_file

    state: State = {}
    for path in reference.files_of(folder):
        state.update(load_file(path, backend="pread"))
    return state


def safetensors_clone(folder: Path, _: State) -> State:
    from safetensors import safe_open

    state: State = {}
    for path in reference.files_of(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                state[name] = file.get_tensor(name).clone()
    return state


def safetensors_copy(folder: Path, parameters: State) -> State:
    for name, tensor in safetensors_load_file(folder, parameters).items():
        parameters[name].copy_(tensor)
    return parameters


def fastsafetensors(folder: Path, _: State) -> State:
    from fastsafetensors import fastsafe_open

    files = [str(path) for path in reference.files_of(folder)]
    with fastsafe_open(filenames=files, nogds=True, device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


def fastsafetensors_copy(folder: Path, parameters: State) -> State:
    for name, tensor in fastsafetensors(folder, parameters).items():
        parameters[name].copy_(tensor)
    return parameters


# fastsafetensors reads with O_DIRECT unless told otherwise. Warm, that would be a race against the disk: there it has
# the page cache, its better setting; cold it runs with both.
_BUFFERED = {"FASTSAFETENSORS_ODIRECT": "0"}

CONTESTANTS = [
    Contestant("penstock", "penstock", penstock(), ("cold", "warm"), rival=False),
    Contestant("penstock keep", "penstock", penstock(cache="keep"), ("cold-routes",), rival=False),
    Contestant("penstock bypass", "penstock", penstock(cache="bypass"), ("cold-routes",), rival=False),
    Contestant("penstock mapped", "penstock", penstock(io="mapped"), ("cold-routes", "warm-routes"), rival=False),
    Contestant(
        "penstock buffered", "penstock", penstock(io="buffered"), ("cold-routes", "private-routes"), rival=False
    ),
    Contestant("penstock uring", "penstock", penstock(io="uring"), ("cold-routes",), rival=False),
    Contestant("penstock aio", "penstock", penstock(io="aio"), ("cold-routes",), rival=False),
    Contestant("penstock threads", "penstock", penstock(io="threads"), ("cold-routes",), rival=False),
    Contestant("penstock copy", "penstock", penstock(copy=True), ("private",), rival=False),
    Contestant("penstock load_into", "penstock", penstock_load_into, ("load_into",), rival=False),
    Contestant("safetensors", "safetensors", safetensors_load_file, ("cold", "warm")),
    Contestant("safetensors pread", "safetensors", safetensors_pread, ("private",)),
    Contestant("safetensors clone", "safetensors", safetensors_clone, ("private",)),
    Contestant("safetensors copy_", "safetensors", safetensors_copy, ("load_into",)),
    Contestant("fastsafetensors", "fastsafetensors", fastsafetensors, ("cold",)),
    Contestant("fastsafetensors buffered", "fastsafetensors", fastsafetensors, ("cold",), environment=_BUFFERED),
    Contestant("fastsafetensors", "fastsafetensors", fastsafetensors, ("private",), environment=_BUFFERED),
    Contestant("fastsafetensors copy_", "fastsafetensors", fastsafetensors_copy, ("load_into",), environment=_BUFFERED),
]


# --- one process -----------------------------------------------------------------------------------------------------


def bytes_at(address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory as a flat array. Owns nothing: the tensor must outlive it."""
    if nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def tensor_bytes(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a contiguous torch tensor on the CPU, whatever its dtype."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return bytes_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def touch(state: State) -> dict[str, float]:
    """Reads one byte of every page of every tensor, in address order: seconds and page faults.

    A load that left nothing to do takes no major fault here. Tensors within a page of each other are touched as one
    range, so that this does not measure Python.
    """
    page = resource.getpagesize()
    spans: list[list[int]] = []
    for start, end in sorted(
        (array.ctypes.data, array.ctypes.data + array.nbytes) for array in map(tensor_bytes, state.values())
    ):
        if spans and start - spans[-1][1] < page:
            spans[-1][1] = max(end, spans[-1][1])
        elif end > start:
            spans.append([start, end])
    arrays = [bytes_at(start - start % page, end - start + start % page) for start, end in spans]
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for array in arrays:
        int(array[::page].sum(dtype=np.uint64))
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "touch_s": seconds,
        "touch_major_faults": after.ru_majflt - before.ru_majflt,
        "touch_minor_faults": after.ru_minflt - before.ru_minflt,
    }


def verify(state: State, folder: Path) -> dict[str, Any]:
    """Compares every byte with the files, which are read anew without any loader."""
    comparer = reference.Comparer(folder)
    different = [name for name in comparer.entries if name not in state]
    different += [name for name, tensor in state.items() if not comparer.same(name, tensor_bytes(tensor))]
    comparer.close()
    return {
        "bytes": sum(entry.nbytes for entry in comparer.entries.values()),
        "verified_bytes": sum(entry.nbytes for name, entry in comparer.entries.items() if name not in set(different)),
        "different": different[:10],
    }


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
    parser = argparse.ArgumentParser(description="One load by one contestant; for bench.py.")
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
