"""vLLM's LoRA resolver by Penstock: found by its entry point, asked by vLLM's server, loaded as its workers load."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import penstock
import pytest
import torch
from local_server import local_server
from penstock.integrations import vllm as plugin
from penstock.integrations._lora_settings import PREFIX
from test_vllm_lora import adapter as adapter
from test_vllm_lora import load
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest
from vllm.lora import lora_model
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolverRegistry
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm_model import as_bytes, configured, created, current

BASE = "org/base"


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers does not last."""
    monkeypatch.setattr(LoRAResolverRegistry, "resolvers", {})
    monkeypatch.setattr(lora_model, "safetensors", lora_model.safetensors)


class Served(NamedTuple):
    address: str
    asked: list[str]
    objects: dict[str, bytes]


@pytest.fixture
def served(adapter: Path) -> Iterator[Served]:
    """A web server that has the adapter at /loras/mine, and something beside it; and what it was asked for."""
    settings = json.loads((adapter / "adapter_config.json").read_bytes())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": BASE}))
    objects = {
        f"/{folder}/{path.name}": path.read_bytes() for folder in ("loras/mine", "x") for path in adapter.iterdir()
    }
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            content = objects.get(self.path)
            if content is None:
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            part = content[first : last + 1]
            self.send_response(206)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)

        def log_message(self, *about: object) -> None:
            pass

    with local_server(Handler) as place:
        yield Served(f"http://{place}/loras", asked, objects)


def serving(add: Callable[[LoRARequest], Any]) -> OpenAIServingModels:
    """vLLM's own object that answers for adapters; `add` stands for its engine, which loads one."""

    async def add_lora(request: LoRARequest) -> None:
        add(request)

    client: Any = SimpleNamespace(
        model_config=SimpleNamespace(model=BASE, max_model_len=128),
        add_lora=add_lora,
        renderer=None,
        input_processor=None,
    )
    return OpenAIServingModels(client, [])


@pytest.mark.parametrize("kind", ["folder", "address"])
def test_an_adapter_by_its_name(
    kind: str, adapter: Path, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = load(adapter)
    address, asked, _ = served
    monkeypatch.setenv(PREFIX, str(adapter.parent) if kind == "folder" else address)
    name = adapter.name if kind == "folder" else "mine"
    plugin.register_lora()
    plugin.register_lora()  # vLLM may call plugins repeatedly
    assert list(LoRAResolverRegistry.get_supported_resolvers()) == ["Penstock Resolver"]
    mine: dict[str, torch.Tensor] = {}
    models = serving(lambda request: mine.update(load(Path(request.lora_path))))
    found = asyncio.run(models.resolve_lora(name))
    assert isinstance(found, LoRARequest) and found.lora_name == name
    assert mine.keys() == theirs.keys()
    assert [key for key in mine if not torch.equal(as_bytes(mine[key]), as_bytes(theirs[key]))] == []
    # Nothing of the weights is in the folder that vLLM has
    held = sum(path.stat().st_size for path in Path(found.lora_path).iterdir())
    assert held < sum(path.stat().st_size for path in adapter.iterdir()) / 5
    # What safetensors itself opens is opened as before
    assert load(adapter).keys() == theirs.keys()
    before = len(asked)
    for unknown in ("none", "../x", "..", "/x", "mine/../../x"):
        missing = asyncio.run(models.resolve_lora(unknown))
        assert not isinstance(missing, LoRARequest) and missing.error.code == 404, unknown
    assert len(asked) - before == (1 if kind == "address" else 0)  # for the one that is a name


def test_a_client_that_disconnects_meanwhile_leaves_no_folder_in_use(
    adapter: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM cancels the wait, and the thread goes on."""
    monkeypatch.setenv(PREFIX, str(adapter.parent))
    plugin.register_lora()
    resolver: Any = LoRAResolverRegistry.get_resolver("Penstock Resolver")
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()
    find = resolver._adapters.find

    def slow(*asked: str) -> Any:
        begun.set()
        assert go.wait(60)
        found = find(*asked)
        ended.set()
        return found

    monkeypatch.setattr(resolver._adapters, "find", slow)

    async def cancelled() -> None:
        request = asyncio.ensure_future(resolver.resolve_lora(BASE, adapter.name))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    asyncio.run(cancelled())
    go.set()
    assert ended.wait(60)
    resolver._threads.shutdown()  # the thread has let go of what it returned
    gc.collect()
    assert [folder for folder, _ in resolver._adapters._released] == list(resolver._adapters._folders.values()) != []


def test_an_adapter_that_is_replaced_under_a_request_is_not_loaded(
    adapter: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX, str(adapter.parent))
    plugin.register_lora()

    def add(request: LoRARequest) -> None:
        content = bytearray((adapter / "adapter_model.safetensors").read_bytes())
        content[-1] ^= 1
        (adapter / "adapter_model.safetensors").write_bytes(content)
        with pytest.raises(penstock.ChangedError, match="unload it in the engine"):
            load(Path(request.lora_path))
        raise RuntimeError

    refused = asyncio.run(serving(add).resolve_lora(adapter.name))
    assert not isinstance(refused, LoRARequest) and refused.error.code == 400


@pytest.fixture
def manager(
    checkpoint: Callable[[str], Path], alone: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LRUCacheWorkerLoRAManager]:
    """What a worker of vLLM has adapters in. There is room for one, on the device and in memory."""
    limits = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 1}
    config = configured({"model": str(checkpoint("llama")), **limits})
    _, model = created(config)
    found = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), getattr(model, "embedding_modules", {}))
    with current(config):
        found.create_lora_manager(model, config)
        yield found


def on_device(manager: LRUCacheWorkerLoRAManager) -> dict[str, torch.Tensor]:
    """The matrices that the model computes with."""
    return {
        f"{name}.{kind}.{number}": as_bytes(one).clone()
        for name, module in manager._adapter_manager.model.named_modules()
        for kind in ("lora_a_stacked", "lora_b_stacked")
        for number, one in enumerate(getattr(module, kind, ()))
    }


def test_an_adapter_that_vllm_gave_up_comes_back_without_its_bucket(
    adapter: Path, served: Served, manager: LRUCacheWorkerLoRAManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads it again in the middle of a step, and an error there ends its engine."""
    settings = json.loads((adapter / "adapter_config.json").read_bytes())
    for path in adapter.iterdir():
        served.objects[f"/loras/other/{path.name}"] = path.read_bytes()
    # vLLM multiplies by 16 / 8, in place
    served.objects["/loras/other/adapter_config.json"] = json.dumps({**settings, "lora_alpha": 16}).encode()
    monkeypatch.setenv(PREFIX, served.address)
    plugin.register_lora()
    models = serving(manager.add_adapter)
    requests, first = {}, {}
    for name in ("mine", "other"):
        requests[name] = asyncio.run(models.resolve_lora(name))
        assert isinstance(requests[name], LoRARequest)
        first[name] = on_device(manager)
        assert any(bool(one.any()) for one in first[name].values())
    assert [key for key in first["mine"] if not torch.equal(first["mine"][key], first["other"][key])] != []
    served.objects.clear()
    served.asked.clear()
    for name in ("mine", "other", "mine", "other"):
        assert manager.list_adapters() != {requests[name].lora_int_id}  # it was given up for the other one
        manager.set_active_adapters({requests[name]}, None)
        again = on_device(manager)
        assert [key for key, one in first[name].items() if not torch.equal(one, again[key])] == []
    assert served.asked == []


def test_a_folder_is_kept_as_long_as_a_request_of_vllm_names_it(
    adapter: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX, served.address)
    plugin.register_lora()
    released = LoRAResolverRegistry.get_resolver("Penstock Resolver")._adapters._released
    sent: list[bytes] = []
    models = serving(lambda request: sent.append(MsgpackEncoder().encode(request)[0]))
    found = asyncio.run(models.resolve_lora("mine"))
    assert isinstance(found, LoRARequest)
    # The engine gets a plain request
    plain = MsgpackDecoder(LoRARequest).decode(sent)
    assert type(plain) is LoRARequest and plain == found and found == plain and hash(plain) == hash(found)
    assert (plain.lora_path, plain.lora_int_id) == (found.lora_path, found.lora_int_id)
    folder = found.lora_path
    asyncio.run(models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name="mine")))
    again = asyncio.run(models.resolve_lora("mine"))
    gc.collect()
    assert again.lora_path != folder and not released  # the first one is still waiting
    del found
    gc.collect()
    assert [path for path, _ in released] == [folder]
    # One that could not be loaded
    models = serving(lambda request: 1 / 0)
    assert asyncio.run(models.resolve_lora("mine")).error.code == 400
    gc.collect()
    assert len(released) == 2


def test_without_a_prefix_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PREFIX, raising=False)
    before = lora_model.safetensors
    plugin.register_lora()
    assert list(LoRAResolverRegistry.get_supported_resolvers()) == [] and lora_model.safetensors is before


def test_a_vllm_that_reads_adapters_in_another_way_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX, str(tmp_path))
    monkeypatch.delattr(lora_model, "safetensors")
    with pytest.raises(penstock.UnsupportedError, match=f"unset {PREFIX}, and use vLLM's own resolvers"):
        plugin.register_lora()
    assert list(LoRAResolverRegistry.get_supported_resolvers()) == []


def test_the_entry_point_is_there_and_vllm_calls_it(adapter: Path, tmp_path: Path) -> None:
    """In a process of its own, by vLLM's own search for plugins."""
    environment = {**os.environ, PREFIX: str(adapter.parent)}
    if not any(point.name == "penstock_lora" for point in entry_points(group="vllm.general_plugins")):
        # This installation is older than the entry point. `make engines` installs anew
        about = tmp_path / "site" / "penstock_lora_entry-0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-lora-entry\nVersion: 0\n")
        lines = (Path(__file__).parents[2] / "pyproject.toml").read_text().split('[project.entry-points."vllm.')[1]
        points = [
            line.replace('"', "") for line in lines.split("[")[0].splitlines()[1:] if line.startswith("penstock_lora")
        ]
        (about / "entry_points.txt").write_text("[vllm.general_plugins]\n" + "\n".join(points) + "\n")
        environment["PYTHONPATH"] = os.pathsep.join([str(about.parent), environment.get("PYTHONPATH", "")])
    program = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.lora.resolver import LoRAResolverRegistry
print(list(LoRAResolverRegistry.get_supported_resolvers()))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "['Penstock Resolver']"
    environment[PREFIX] = "/not/there"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode != 0 and "PENSTOCK_LORA_PREFIX='/not/there': there is no such folder" in done.stderr
