"""vLLM's `reload_weights` with format `penstock`: right values at the same addresses, and no memory is left behind."""

from __future__ import annotations

import ctypes
import gc
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock
import psutil
import pytest
import stubs
import torch
from penstock.integrations._reload import Reloader
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm_model import addresses, configured, current, digests, poison

MIB = 1 << 20
MODELS = ["llama", "qwen3-moe"]

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(autouse=True)
def without_compiled_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    stubs.process_weights(monkeypatch)


def served(folder: Path, load_format: str, **options: Any) -> tuple[torch.nn.Module, Any]:
    """A model that is loaded and processed as for serving, and its configuration."""
    config = configured({"model": str(folder), "model_loader_extra_config": options}, load_format)
    with current(config):
        model = get_model_loader(config.load_config).load_model(config, config.model_config)
    return model, config


def reload(model: torch.nn.Module, config: Any, folder: Path | str | None = None) -> None:
    with current(config):
        reload_weights(config, model, None, None if folder is None else str(folder), True)


def resident() -> int:
    """Bytes of this process in memory, without what malloc keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


@pytest.fixture
def folders(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> list[Path]:
    """Two checkpoints of one model, of which no tensor has a byte in common."""
    first = checkpoint(request.param)
    return [first, first.with_suffix(".inverse")]


@pytest.fixture
def expected(folders: list[Path]) -> list[dict[str, str]]:
    """What vLLM's own format makes of both."""
    found = [digests(served(folder, "safetensors")[0]) for folder in folders]
    assert found[0] != found[1]
    return found


@pytest.mark.parametrize("folders", MODELS, indirect=True)
def test_twenty_reloads(folders: list[Path], expected: list[dict[str, str]]):
    model, config = served(folders[0], "penstock")
    assert digests(model) == expected[0]
    where, sizes = addresses(model), []
    for number in range(1, 21):
        reload(model, config, folders[number % 2])
        assert digests(model) == expected[number % 2]
        assert addresses(model) == where
        sizes.append(resident())
    assert max(sizes[5:]) - sizes[4] <= MIB


@pytest.mark.parametrize("folders", MODELS, indirect=True)
def test_a_reload_after_memory_was_discarded(folders: list[Path], expected: list[dict[str, str]]):
    """As sleep of level 2 does: parameters are whatever memory has, buffers are kept by vLLM itself."""
    model, config = served(folders[0], "penstock")
    where = addresses(model)
    for byte in (0x00, 0xA7):
        poison(model, byte)
        assert digests(model) != expected[0]
        reload(model, config)
        assert digests(model) == expected[0]
        assert addresses(model) == where


@pytest.mark.parametrize("folders", MODELS, indirect=True)
def test_a_reload_reads_ahead_all_that_it_copies(folders: list[Path], monkeypatch: pytest.MonkeyPatch):
    model, config = served(folders[0], "penstock")
    made: list[Reloader] = []
    weights = Reloader.weights

    def noted(self: Reloader) -> Any:
        made.append(self)
        return weights(self)

    monkeypatch.setattr(Reloader, "weights", noted)
    reload(model, config, folders[1])
    (reloader,) = made
    assert reloader.read_besides == 0


@pytest.mark.parametrize("folders", ["llama"], indirect=True)
def test_a_reload_of_what_cannot_be_deferred_is_vllms(
    folders: list[Path],
    expected: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def refuses(self: Reloader, *args: Any) -> None:
        raise penstock.UnsupportedError("not this one")

    model, config = served(folders[0], "penstock")
    monkeypatch.setattr(Reloader, "__init__", refuses)
    with caplog.at_level(logging.WARNING, "penstock"):
        reload(model, config, folders[1])
    assert "not this one" in caplog.text
    assert digests(model) == expected[1]


@pytest.mark.parametrize("folders", ["llama"], indirect=True)
def test_weights_of_another_place(folders: list[Path], expected: list[dict[str, str]], tmp_path: Path):
    """`weights=` is where the model is loaded from, and reloaded. A path that a reload names comes first."""
    model, config = served(folders[0], "penstock", weights=str(folders[1]))
    assert digests(model) == expected[1]
    poison(model)
    reload(model, config)
    assert digests(model) == expected[1]
    third = shutil.copytree(folders[0], tmp_path / "third")
    reload(model, config, third)
    assert digests(model) == expected[0]
