"""Ranks of vLLM that load together and then do something else: each is a fork of one process that has imported vLLM.

    python vllm_group.py SPECIFICATION.json

The specification has a folder, the number of ranks, and what they do: the name of a function here, with what it takes.
In the folder each rank leaves `pid.RANK`, what it says (`said.RANK`), its error (`error.RANK`), and the status when its
process has ended (`ended.RANK`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock
import penstock.integrations._vllm_loader
import pytest
import stubs
import torch
import vllm.model_executor.models.llama
import vllm.model_executor.models.qwen3_moe  # noqa: F401
from penstock import _events
from penstock.integrations import _remote
from penstock.integrations._engine import Loads
from penstock.integrations._mapped import Mapped
from penstock.integrations._recorder import Recorder
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.model_loader import get_model_loader
from vllm_model import (
    addresses,
    as_bytes,
    configured,
    created,
    current,
    digests,
    joined,
    left_deferred,
    load,
    poison,
    reload_weights,
)

PATIENCE = 120


class Rank:
    """What a function here is given."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.folder, self.rank, self.ranks = folder, rank, ranks

    def write(self, name: str, text: str) -> None:
        written = self.folder / f"{name}.{self.rank}.new"
        written.write_text(text)
        written.rename(self.folder / f"{name}.{self.rank}")

    def join(self, args: dict[str, Any], load_format: str, **options: Any) -> Any:
        """vLLM's configuration. The first one makes its groups."""
        args = {"tensor_parallel_size": self.ranks, "model_loader_extra_config": options, **args}
        config = configured(args, load_format)
        if not torch.distributed.is_initialized():
            joined(config, self.ranks, self.rank, self.folder / "meeting")
        return config


def _served(config: Any) -> tuple[Any, torch.nn.Module]:
    """The loader, and a model that is loaded and processed as for serving."""
    loader = get_model_loader(config.load_config)
    with current(config):
        return loader, loader.load_model(config, config.model_config)


def reloads(rank: Rank, folders: list[str], options: dict[str, Any], times: int) -> Any:
    """A load with the others, then reloads of one checkpoint and another in turn, each from memory that is poisoned."""
    expected = [digests(_served(rank.join({"model": folder}, "safetensors"))[1]) for folder in folders]
    config = rank.join({"model": folders[0]}, "penstock", **options)
    loader, model = _served(config)
    (report,) = loader.reports
    found = {"differ": expected[0] != expected[1], "exchange": report["exchange"], "fallbacks": report["fallbacks"]}
    found["first"], where = _different(expected[0], model), addresses(model)
    found |= {"reloads": [], "moved": [], "exchanges": []}
    run = Recorder.run

    def noted(self: Recorder, *args: Any) -> Any:
        report = run(self, *args)
        found["exchanges"].append({"loads": report["loads"], "exchange": report["exchange"]})
        return report

    Recorder.run = noted
    for number in range(1, times + 1):
        poison(model)
        with current(config):
            reload_weights(config, model, None, folders[number % 2], True)
        found["reloads"].append(_different(expected[number % 2], model))
        found["moved"] += [name for name, at in addresses(model).items() if where[name] != at]
    return found


def gives(rank: Rank, folders: list[str], refused: list[int]) -> Any:
    """A load and two reloads with mapped files, which some ranks cannot have. How tensors were given each time."""
    expected = [digests(_served(rank.join({"model": folder}, "safetensors"))[1]) for folder in folders]
    if rank.rank in refused:
        Mapped._not_here = lambda self, always: "not on this one"
    given: list[str] = []
    run = Loads.run

    def noted(self: Loads, model: torch.nn.Module) -> Any:
        reports = run(self, model)
        given.extend(report["given"] for report in reports)
        return reports

    Loads.run = noted
    config = rank.join({"model": folders[0]}, "penstock", mapped="on")
    _, model = _served(config)
    found = {"differ": expected[0] != expected[1], "first": _different(expected[0], model), "reloads": []}
    for number in (1, 2):
        poison(model)
        with current(config):
            reload_weights(config, model, None, folders[number % 2], True)
        found["reloads"].append(_different(expected[number % 2], model))
    return {**found, "given": given}


def _different(expected: dict[str, str], model: torch.nn.Module) -> list[str]:
    found = digests(model)
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


def adapters(rank: Rank, folder: str, adapter: str, options: dict[str, Any]) -> Any:
    """vLLM's own manager of adapters, for a model of its own loader and for one that the ranks have loaded together."""
    more = {"model": folder, "enable_lora": True, "max_lora_rank": 8}
    theirs, _ = _with_adapter(rank.join(more, "safetensors"), adapter)
    with penstock.patch():
        mine, loader = _with_adapter(rank.join(more, "penstock", **options), adapter)
    (report,) = loader.reports
    return {
        "exchange": report["exchange"],
        "fallbacks": report["fallbacks"],
        "tensors": len(mine),
        "of adapter": sum("lora" in name and "stacked" in name for name in mine),
        "not zero": sum("stacked" in name and bool(one.any()) for name, one in mine.items()),
        "different": sorted(
            name
            for name in theirs.keys() | mine.keys()
            if name not in theirs or name not in mine or not torch.equal(as_bytes(theirs[name]), as_bytes(mine[name]))
        ),
    }


def _with_adapter(config: Any, adapter: str) -> tuple[dict[str, torch.Tensor], Any]:
    """All parameters of a model, and the matrices of its adapter as this rank has them."""
    loader, model = _served(config)
    manager = WorkerLoRAManager(config, torch.device("cpu"), getattr(model, "embedding_modules", {}))
    with current(config):
        model = manager.create_lora_manager(model, config)
        request = LoRARequest("one", 1, adapter)
        assert manager.add_adapter(request)
        manager._adapter_manager.activate_adapter(1)
    found = {name: one.detach().clone() for name, one in model.named_parameters()}
    for name, module in model.named_modules():
        for kind in ("lora_a_stacked", "lora_b_stacked"):
            for number, one in enumerate(getattr(module, kind, ())):
                found[f"{name}.{kind}.{number}"] = one.clone()
    return found, loader


def loads(rank: Rank, folder: str, options: dict[str, Any]) -> Any:
    """One load, which begins when the test says so. When and with what it fails is said."""
    config = rank.join({"model": folder}, "penstock", **options)
    loader, model = created(config)
    rank.write("ready", "")
    limit = time.monotonic() + PATIENCE
    while not (rank.folder / "go").exists():
        assert time.monotonic() < limit
        time.sleep(0.005)
    try:
        load(loader, model, config)
    except penstock.PeerError as error:
        rank.write("failed", json.dumps({"when": time.time(), "rank": error.rank, "text": str(error)}))
        raise
    return {"left": left_deferred(model)}


def logged(rank: Rank, folder: str, index: str, bandwidth: int, none: str, empty: str) -> Any:
    """A slow load, a reload from a disk, two that fail, a load that fails, and one more: what vLLM logs of them is what
    it is about."""
    _events.EVERY = 0.3
    os.environ["PENSTOCK_LOG"] = "json"
    slow = {"weights": index, "storage": {"bandwidth": bandwidth}, "mapped": "off"}
    config = rank.join({"model": folder}, "penstock", **slow)
    logging.getLogger("penstock").warning("a warning of penstock")
    _, model = _served(config)
    config = rank.join({"model": folder}, "penstock", mapped="off")
    with current(config):
        reload_weights(config, model, None, folder, True)
    for place, options, error in (
        (None, {"weights": none}, penstock.NotFoundError),
        (empty, {}, penstock.UnsupportedError),
    ):
        config = rank.join({"model": folder}, "penstock", **options)
        with current(config), pytest.raises(error):
            reload_weights(config, model, None, place, True)
    with pytest.raises(penstock.NotFoundError):
        _served(rank.join({"model": folder}, "penstock", weights=none))
    del os.environ["PENSTOCK_LOG"]
    _served(rank.join({"model": folder}, "penstock", mapped="off"))


def _hold(rank: Rank, name: str) -> None:
    """Says that the rank has come so far, and waits until the test lets it go on."""
    rank.write(name, "")
    limit = time.monotonic() + PATIENCE
    while not (rank.folder / f"{name}.go").exists():
        assert time.monotonic() < limit
        time.sleep(0.005)


def one_version(rank: Rank, args: dict[str, Any], options: dict[str, Any], folders: list[str], point: str) -> Any:
    """A load of a model that is replaced at a point of it. Which of two versions the rank has then: 0, 1, or none."""
    expected = [digests(_served(rank.join({"model": folder}, "safetensors"))[1]) for folder in folders]
    config = rank.join(args, "penstock", **options)
    opens, run = _remote.open_checkpoint, Recorder.run

    def opened(*args: Any, **kwargs: Any) -> Any:
        if point == "opens" and rank.rank == 1:
            _hold(rank, "opens")
        found = opens(*args, **kwargs)
        if point == "opens" and rank.rank == 0:
            rank.write("opened", "")
        return found

    def running(self: Recorder, *args: Any) -> Any:
        rank.write("running", "")
        return run(self, *args)

    _remote.open_checkpoint, Recorder.run = opened, running
    if point == "before":
        _hold(rank, "before")

    def version(model: torch.nn.Module) -> list[int]:
        found = digests(model)
        return [number for number, one in enumerate(expected) if one == found]

    try:
        _, model = _served(config)
    except penstock.PenstockError as error:
        return {"error": type(error).__name__, "text": str(error)}
    found = {"differ": expected[0] != expected[1], "version": version(model)}
    if point == "reload":
        _hold(rank, "reload")
        poison(model)
        with current(config):
            reload_weights(config, model, None, None, True)
        found["reloaded"] = version(model)
    return found


def preloaded(rank: Rank, folder: str, options: dict[str, Any], sockets: str) -> Any:
    """The daemons of `vllm preload` load with Penstock, and an engine maps their weights."""
    import preloading

    plain = {"model": folder, "tensor_parallel_size": rank.ranks}
    given = {**plain, "model_loader_extra_config": options}
    with preloading.serving(rank.rank, given, rank.folder, sockets) as serves:
        expected = digests(_served(rank.join({"model": folder}, "safetensors"))[1])
        daemon = serves()
        config = rank.join({"model": folder}, "ipc_cache", socket_dir=sockets, fallback=False)
        engine = preloading.mapped(rank.rank, config, expected)
    return {"daemon": daemon, **engine}


def _main(spec: dict[str, Any], number: int, functions: dict[str, Any]) -> int:
    rank = Rank(Path(spec["folder"]), number, spec["ranks"])
    rank.write("pid", str(os.getpid()))
    try:
        does: Callable[..., Any] = functions[spec["do"]]
        rank.write("said", json.dumps(does(rank, **spec["with"])))
    except BaseException:
        rank.write("error", traceback.format_exc())
        return 1
    return 0


def main(functions: dict[str, Any] | None = None) -> None:
    """Does what it was told. ``functions``: by name; None for those of this module."""
    stubs.process_weights(pytest.MonkeyPatch())
    together(json.loads(Path(sys.argv[1]).read_text()), globals() if functions is None else functions)


def together(spec: dict[str, Any], functions: dict[str, Any]) -> None:
    """Forks the ranks of a specification, and waits until all of them have ended."""
    ranks = {}
    for number in range(spec["ranks"]):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = _main(spec, number, functions)
            finally:
                os._exit(status)
        ranks[pid] = number
    while ranks:
        pid, status = os.wait()
        number = ranks.pop(pid)
        at = Path(spec["folder"], f"ended.{number}.new")
        at.write_text(json.dumps({"when": time.time(), "status": os.waitstatus_to_exitcode(status)}))
        at.rename(at.with_suffix(""))


if __name__ == "__main__":
    main()
