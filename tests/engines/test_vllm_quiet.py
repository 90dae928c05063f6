"""vLLM and snapshots: `penstock.quiesce` leaves nothing of a start, and a reload works where its folders are gone."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import penstock
import pytest
import torch
from penstock.integrations import _sleep, _vllm_loader
from s3_server import KEYS, Bucket, serving
from test_vllm_reload import reload, served
from test_vllm_reload import without_compiled_operators as without_compiled_operators
from vllm.model_executor.model_loader import get_model_loader
from vllm.snapshot.runtime import LocalSnapshotTools, SnapshotCreateError, _validate_tcp_connections
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_model import addresses, configured, current, digests

MODEL = "llama"

pytestmark = pytest.mark.usefixtures("alone")


def descriptors() -> list[str]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(descriptor.readlink()).split(":[")[0])
        except OSError:
            continue  # that of this listing
    return sorted(found)


def threads() -> list[str]:
    return [name for task in Path("/proc/self/task").iterdir() if (name := comm(task)).startswith(("penstock", "iou"))]


def comm(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:
        return ""  # it has just ended


def refused() -> None:
    """What vLLM looks at before it makes a snapshot, by its own code: rings, and connections to somewhere else."""
    tools = LocalSnapshotTools()
    rings, sockets = tools._descriptor_inventory((os.getpid(),))
    assert rings == ()
    _validate_tcp_connections(tools._tcp_records(), sockets)


@pytest.mark.parametrize("options", [{}, {"io": "direct", "mapped": "off"}], ids=["as it is", "rings"])
def test_nothing_of_a_start_is_left_and_a_reload_is_as_the_first(
    options: dict[str, Any], checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(MODEL)
    expected = [digests(served(each, "safetensors")[0]) for each in (folder, folder.with_suffix(".inverse"))]
    penstock.quiesce()
    before = descriptors()
    model, config = served(folder, "penstock", **options)
    where = addresses(model)
    for number in (1, 0, 1):
        penstock.quiesce(timeout=60)
        assert threads() == [] and descriptors() == before
        refused()
        reload(model, config, [folder, folder.with_suffix(".inverse")][number])
        assert digests(model) == expected[number] and addresses(model) == where


def test_a_start_from_a_bucket_reloads_where_its_folders_are_gone(
    checkpoint: Callable[[str], Path], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(MODEL)
    folders = [folder, folder.with_suffix(".inverse")]
    versions = [{f"m/{path.name}": path.read_bytes() for path in each.iterdir() if path.is_file()} for each in folders]
    expected = [digests(served(each, "safetensors")[0]) for each in folders]
    key, secret = next(iter(KEYS.items()))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with serving(Bucket(versions[0])) as bucket:
        storage = {"endpoint": bucket.endpoint, "region": bucket.region}
        model, config = served_at(storage)
        assert digests(model) == expected[0]
        assert any(path.startswith(str(temporary)) for path in descriptors())
        penstock.quiesce()
        assert threads() == [] and not any(path.startswith(str(temporary)) for path in descriptors())
        refused()
        # Restored on another machine: neither the folder nor the directory is there
        shutil.rmtree(temporary)
        for number in (0, 1):
            bucket.objects.update(versions[number])
            reload(model, config)
            assert digests(model) == expected[number]
        penstock.quiesce()
        refused()


def served_at(storage: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    """A model that is served from the bucket."""
    given = {"model": "s3://bucket/m/", "model_loader_extra_config": {"storage": storage}}
    config = configured(given, "penstock")
    with current(config):
        return get_model_loader(config.load_config).load_model(config, config.model_config), config


def test_vllm_itself_would_refuse_a_connection(temporary: Path) -> None:
    """What `refused` looks at is really looked at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = os.fork()
        if other == 0:
            accepted, _ = server.accept()
            accepted.recv(1)
            os._exit(0)
        with socket.create_connection(server.getsockname()), pytest.raises(SnapshotCreateError, match="TCP connection"):
            refused()
    os.waitpid(other, 0)


def test_an_engine_that_sleeps_is_quiet(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's workers for GPUs are the ones that sleep: here a class with their method, where vLLM has theirs."""
    called: list[str] = []

    class Worker:
        def sleep(self, level: int = 1) -> str:
            called.append(f"sleep {level}")
            return "asleep"

    async def sleep(self: Any, level: int = 1, mode: str = "abort") -> None:
        called.append(f"server sleeps {level}")

    module: Any = ModuleType("vllm.v1.worker.gpu_worker")
    module.Worker = Worker
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", module)
    monkeypatch.setattr(AsyncLLM, "sleep", sleep)
    monkeypatch.setattr(_sleep, "quiesce", lambda: called.append("quiesce"))
    served(checkpoint(MODEL), "penstock")
    _sleep.install_in_server()
    _sleep.install_in_server()
    assert Worker().sleep(2) == "asleep"
    asyncio.run(AsyncLLM.sleep(SimpleNamespace(), 2))  # type: ignore[arg-type]
    assert called == ["sleep 2", "quiesce", "server sleeps 2", "quiesce"]

    def busy() -> None:
        raise penstock.BusyError("a load of x is under way")

    monkeypatch.setattr(_sleep, "quiesce", busy)
    assert Worker().sleep() == "asleep"
    assert "still has something of a load: a load of x is under way" in caplog.text


def test_the_real_classes_have_what_is_hooked() -> None:
    from vllm.v1.worker import gpu_worker

    assert callable(gpu_worker.Worker.sleep) and asyncio.iscoroutinefunction(AsyncLLM.sleep)
    assert _vllm_loader.install_in_worker is _sleep.install_in_worker
