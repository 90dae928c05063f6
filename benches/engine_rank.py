"""One rank of vLLM, in a process of its own: loads a model, reloads it, tells what that took. For `engines.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import resource
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Not timed, like every import: what a loader would import in the middle of its load. Models too: that saves seconds
import penstock.integrations._vllm_loader
import pytest
import stubs
import torch.distributed
import vllm.model_executor.models.llama
import vllm.model_executor.models.qwen3_moe  # noqa: F401
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform
from vllm_model import configured, current, digests, joined, load, poison

for peer in ("fastsafetensors.parallel_loader", "runai_model_streamer"):
    with contextlib.suppress(ImportError):  # not every platform has it; then its load fails, and the table says so
        importlib.import_module(peer)


@dataclasses.dataclass(frozen=True)
class Order:
    """What a rank loads, and how."""

    folder: Path
    rank: int
    size: int
    """Number of ranks."""
    meeting: Path
    """A file to meet at, which is not there yet."""
    load_format: str
    arguments: dict[str, Any]
    """More arguments of vLLM."""
    on_cpu: bool
    """Whether fastsafetensors is told to use the CPU. vLLM names a GPU to it."""
    poisoned: bool
    """Whether the parameters hold other bytes before the load, and are memory in use. vLLM gives them fresh memory."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """More of it."""


def main(order: Order, pipe: Connection) -> None:
    """Makes a model and says which shared memory it has. Then it hears of a control group, loads, says what that took.

    Then it does what it is told: "digests" of all parameters, "process" them for serving, "poison" them, "reload" them,
    which is timed, or "end".
    """
    try:
        _load(order, pipe)
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
    finally:
        # vLLM's groups hold shared memory that outlives a process
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def _load(order: Order, pipe: Connection) -> None:
    os.environ.update(order.environment)
    arguments = {"model": str(order.folder), "tensor_parallel_size": order.size, "use_tqdm_on_load": False}
    config = configured({**arguments, **order.arguments}, order.load_format, "auto")
    joined(config, order.size, order.rank, order.meeting)
    if order.on_cpu:
        _fastsafetensors_on_cpu()
    loader = get_model_loader(config.load_config)
    with current(config):
        model = loader.create_model(config, config.model_config)
    if order.poisoned:
        poison(model)
    pipe.send({"shared": shared_memory()})
    group: Path | None = pipe.recv()
    if group is not None:
        group.write_text(str(os.getpid()))
    found = _timed(lambda: load(loader, model, config))
    found["parameters"] = sum(parameter.nbytes for parameter in model.parameters())
    found["reports"] = [_told(report) for report in getattr(loader, "reports", [])]
    pipe.send(found)
    orders: dict[str, Callable[[], Any]] = {
        "digests": lambda: digests(model),
        "process": lambda: _process(model, config),
        "poison": lambda: poison(model),
        "reload": lambda: _timed(lambda: _reload(model, config)),
    }
    while (told := pipe.recv()) != "end":
        pipe.send(orders[told]() or {})


def _timed(work: Callable[[], None]) -> dict[str, Any]:
    """What something took that all ranks do."""
    torch.distributed.barrier()
    disk, processor, begun = _from_disk(), _processor(), time.perf_counter()
    work()
    own = time.perf_counter() - begun
    processor, disk = _processor() - processor, _from_disk() - disk
    torch.distributed.barrier()
    return {"seconds": time.perf_counter() - begun, "own": own, "cpu": processor, "disk": disk}


def _process(model: torch.nn.Module, config: Any) -> None:
    """What vLLM does to weights before it serves them, without the operators that its wheel lacks for a CPU."""
    stubs.process_weights(pytest.MonkeyPatch())
    with current(config):
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))


def _reload(model: torch.nn.Module, config: Any) -> None:
    with current(config):
        reload_weights(config, model, None, None, True)


def shared_memory() -> list[str]:
    """The shared memory that this process has mapped, by its path."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(maxsplit=5)[5] for line in lines if "/dev/shm/psm_" in line and "(deleted)" not in line})


def _fastsafetensors_on_cpu() -> None:
    """vLLM asks for the device `cuda:N`; on a CPU its N is "cpu", which torch refuses. Nothing else is changed."""

    parallel_loader = importlib.import_module("fastsafetensors.parallel_loader")

    class OnCpu(parallel_loader.ParallelLoader):  # type: ignore[name-defined, misc]
        def __init__(self, *arguments: Any, device: str, **more: Any) -> None:
            super().__init__(*arguments, device="cpu", **more)

    parallel_loader.ParallelLoader = OnCpu  # type: ignore[attr-defined]
    current_platform.current_device = lambda: 0


def _told(report: penstock.Report) -> dict[str, Any]:
    """What of a report is small and plain."""
    keys = (
        "seconds",
        "cpu_seconds",
        "nbytes",
        "gap_bytes",
        "slack_bytes",
        "routes",
        "exchange",
        "cache",
        "cache_reason",
        "fallbacks",
        "given",
        "given_reason",
    )
    return {key: report[key] for key in keys if key in report}


def _from_disk() -> int:
    """Bytes that the disk has given to this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes:")))


def _processor() -> float:
    """Processor seconds of all threads of this process, in the kernel too."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
