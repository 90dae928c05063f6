"""vLLM's weight daemon, as `vllm preload` runs it for each rank, and an engine that maps its weights, on a CPU.

Both are vLLM's own classes, in processes of their own, and talk over the daemon's own socket. What is replaced:

| | by | why |
|---|---|---|
| CUDA IPC | vLLM's own way for tensors that are not on a GPU: their bytes go through the socket | there is no GPU |
| `torch.accelerator`, in `_DEVICE` | functions that do nothing, and say 0 | there is none |
| the UUID of the GPU, which names the socket | the number of the rank | there is none |
| vLLM's check that the platform has CUDA IPC | nothing | it has none |

So this shows what the daemon's call makes of the loader, and that an engine gets those parameters. It does not show
that another process can map this memory by CUDA IPC: `penstock selftest --gpu` has that.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.model_loader import get_model_loader
from vllm_model import configured, current, digests, left_deferred, told

try:
    from vllm.model_executor.model_loader.weight_cache import daemon, ipc_loader
except ImportError:  # a vLLM without weight daemons
    daemon = ipc_loader = None

PATIENCE = 600
_DEVICE = {
    "set_device_index": None,
    "current_device_index": 0,
    "empty_cache": None,
    "memory_allocated": 0,
    "memory_reserved": 0,
    "get_memory_info": (0, 0),
}


def _without_a_gpu(rank: int) -> None:
    """Replaces what the table above lists, in this process."""
    for name, says in _DEVICE.items():
        setattr(torch.accelerator, name, lambda *args, says=says: says)
    for module in (daemon, ipc_loader):
        module.get_current_device_uuid = lambda: f"cpu-{rank}"
    ipc_loader.check_ipc_platform_support = lambda: None


def _serve(rank: int, args: dict[str, Any], place: Path, sockets: str) -> None:
    """What `vllm preload` has each of its processes do. It does not return."""
    loaders: list[Any] = []
    models: list[torch.nn.Module] = []
    get_model = daemon.WeightCacheDaemon.get_model

    def noted(load_config: Any) -> Any:
        loaders.append(get_model_loader(load_config))
        return loaders[-1]

    def kept(one: Any) -> torch.nn.Module:
        models.append(get_model(one))
        return models[-1]

    def ready(_: Any) -> None:
        found = {
            "loader": [type(loader).__module__ for loader in loaders],
            "reports": [told(report) for report in loaders[0].reports],
            "left": left_deferred(models[0]),
        }
        made = place / f"daemon.{rank}.new"
        made.write_text(json.dumps(found))
        made.rename(made.with_suffix(""))

    daemon.get_model_loader, daemon.WeightCacheDaemon.get_model = noted, kept
    config = configured(args, "penstock")
    daemon._run_daemon(rank, rank, config, f"file://{place / 'daemons'}", sockets, SimpleNamespace(put=ready))


@contextmanager
def serving(rank: int, args: dict[str, Any], place: Path, sockets: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """The daemon of a rank, in a process of its own. To be entered before this process has groups of vLLM's.

    Args:
        rank: Of tensor parallelism.
        args: Of vLLM, as for `vllm preload`.
        place: A folder that the daemons of all ranks share.
        sockets: A folder for their sockets. The kernel takes 107 bytes of a path, and vLLM's names have 55 or 87.

    Yields:
        A function that waits until the daemon serves, and says what its loader did.
    """
    said, failed = place / f"daemon.{rank}", place / f"daemon failed.{rank}"
    child = os.fork()
    if child == 0:
        try:
            _without_a_gpu(rank)
            _serve(rank, args, place, sockets)
        except BaseException:
            failed.write_text(traceback.format_exc())
        finally:
            os._exit(1)

    def serves() -> dict[str, Any]:
        limit = time.monotonic() + PATIENCE
        while not said.exists():
            assert not failed.exists(), failed.read_text()
            assert time.monotonic() < limit, "the daemon does not serve"
            time.sleep(0.01)
        found: dict[str, Any] = json.loads(said.read_text())
        return found

    try:
        yield serves
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def mapped(rank: int, config: Any, expected: dict[str, str]) -> dict[str, Any]:
    """What an engine's rank maps of its daemon, beside the digests of what it should be.

    Args:
        config: Of the engine, with load format ``ipc_cache``.
    """
    _without_a_gpu(rank)
    loader = get_model_loader(config.load_config)
    with current(config):
        model = loader.load_model(config, config.model_config)
    found = digests(model)
    return {
        "engine": type(loader).__name__,
        "tensors": len(found),
        "different": sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)),
    }
