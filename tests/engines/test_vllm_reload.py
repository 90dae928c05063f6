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
from penstock.integrations import _vllm_loader
from penstock.integrations._recorder import Recorder
from penstock.integrations._reload import Reloader
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm_model import addresses, configured, current, digests, poison, reload_weights

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


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[penstock.Report]:
    """Of each reload that makes its loads in the end."""
    found: list[penstock.Report] = []
    run = Recorder.run

    def noted(self: Recorder, *args: Any) -> penstock.Report:
        found.append(run(self, *args))
        return found[-1]

    monkeypatch.setattr(Recorder, "run", noted)
    return found


def whole(model: torch.nn.Module) -> int:
    """Bytes of all parameters without padding. vLLM copies those with padding (the vocabulary) when a reload ends."""
    padded = ("embed_tokens", "lm_head")
    return sum(one.nbytes for name, one in model.named_parameters() if not any(part in name for part in padded))


def test_a_reload_is_one_load_straight_into_the_parameters_that_are_served(
    checkpoint: Callable[[str], Path], reports: list[penstock.Report], monkeypatch: pytest.MonkeyPatch
):
    first = checkpoint("llama")
    model, config = served(first, "penstock")
    reports.clear()
    redirected: list[int] = []
    redirect = Recorder.redirect

    def noted(self: Recorder, made: torch.Tensor, to: torch.Tensor) -> bool:
        found = redirect(self, made, to)
        redirected.extend([made.nbytes] * found)
        return found

    monkeypatch.setattr(Recorder, "redirect", noted)
    reload(model, config, first.with_suffix(".inverse"))
    (report,) = reports
    parameters = whole(model)
    assert (report["loads"], report["nbytes"], report["materialised"]) == (1, parameters, {})
    # None of vLLM's copies to the parameters that are served moved a byte.
    assert sum(redirected) == parameters


@pytest.mark.parametrize("folders", ["qwen3-moe"], indirect=True)
def test_experts_are_loaded_before_they_are_processed(
    folders: list[Path], expected: list[dict[str, str]], reports: list[penstock.Report]
):
    model, config = served(folders[0], "penstock")
    reports.clear()
    reload(model, config, folders[1])
    (report,) = reports
    layers = config.model_config.hf_config.num_hidden_layers
    assert 1 < report["loads"] <= layers + 1
    assert report["nbytes"] == whole(model)
    assert digests(model) == expected[1]


@pytest.mark.parametrize("folders", MODELS, indirect=True)
def test_where_nothing_can_be_put_off_a_reload_reads_ahead_all_that_it_copies(
    folders: list[Path], expected: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
):
    """As with quantised weights."""
    model, config = served(folders[0], "penstock")
    made: list[Reloader] = []
    weights = Reloader.weights

    def noted(self: Reloader) -> Any:
        made.append(self)
        return weights(self)

    monkeypatch.setattr(_vllm_loader, "waits", lambda *args: False)
    monkeypatch.setattr(Reloader, "weights", noted)
    reload(model, config, folders[1])
    (reloader,) = made
    assert reloader.read_besides == 0
    assert digests(model) == expected[1]


@pytest.mark.parametrize("folders", ["llama"], indirect=True)
def test_a_reload_of_what_cannot_be_deferred_is_vllms(
    folders: list[Path],
    expected: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def refuses(self: Any, *args: Any) -> None:
        raise penstock.UnsupportedError("not this one")

    model, config = served(folders[0], "penstock", strict=False)
    monkeypatch.setattr(Recorder, "check", refuses)
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


@pytest.mark.parametrize("folders", ["llama"], indirect=True)
def test_weights_of_two_places(folders: list[Path], expected: list[dict[str, str]], tmp_path: Path):
    """A second place that the model names. Layers get tensors of both; the padded vocabulary comes from the first."""
    model, config = served(folders[0], "penstock")
    where = addresses(model)
    both = [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(both):
        shutil.copytree(folders[1], folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        tensors = penstock.load_file(folders[1], framework="pt")
        half = {name: tensors[name] for name in sorted(tensors)[number::2]}
        assert number or any("embed_tokens" in name or "lm_head" in name for name in half)
        penstock.save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    model.secondary_weights = [DefaultModelLoader.Source(str(both[1]), revision=None)]
    for _ in range(2):
        poison(model, 0xA7)
        reload(model, config, both[0])
        assert digests(model) == expected[1]
        assert addresses(model) == where
