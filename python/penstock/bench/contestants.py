"""The loaders that the benchmark compares, a few lines each.

A contestant loads a checkpoint folder into CPU memory, opening included, and returns the tensors by name. To add a
rival, write one function here and name it in `CONTESTANTS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import reference

State = dict[str, Any]


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
