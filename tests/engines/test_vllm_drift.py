"""A vLLM that Penstock does not know: its start fails and says what to do, or says once that nobody has tried it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock
import pytest
import vllm
from penstock.integrations import _drift
from penstock.integrations._known import VLLM
from penstock.integrations.vllm import register
from test_vllm_failures import iterator_gone, iterator_renamed, method_renamed, methods_renamed, rewritten
from vllm.config.load import LoadConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader import default_loader, get_model_loader
from vllm.model_executor.model_loader.reload import layerwise
from vllm_model import configured, created, digests, load

pytestmark = pytest.mark.usefixtures("alone")

LAST = VLLM.tested[-1]
#: A release that nobody has tried.
NEW = "0.99.0"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Registers the plugin as a new process would, in which nothing has been said."""

    def start() -> None:
        monkeypatch.delenv(_drift._SAID, raising=False)
        monkeypatch.delitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "penstock", raising=False)
        for name in ("create_engine_config", "create_model_config"):
            if name in vars(EngineArgs):
                monkeypatch.setattr(EngineArgs, name, vars(EngineArgs)[name])
        register()

    return start


@pytest.fixture
def expected(checkpoint: Callable[[str], Path]) -> dict[str, str]:
    """What vLLM's own loader makes of the model."""
    config = configured({"model": str(checkpoint("llama"))})
    loader, model = created(config)
    load(loader, model, config)
    return digests(model)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What Penstock has logged since the last call."""
    caplog.set_level(logging.WARNING, "penstock")

    def said() -> list[str]:
        # pytest 9.2 hears loggers that do not propagate too: a record that vLLM's has been given is there twice
        found = [one.getMessage() for one in dict.fromkeys(caplog.records) if one.name == "penstock"]
        caplog.clear()
        return found

    return said


def another_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten(monkeypatch, "_get_weights_iterator", "self, source: Source", "self, source: Source, rank: int = 0")


def parameters_turned_round(monkeypatch: pytest.MonkeyPatch) -> None:
    own = default_loader.DefaultModelLoader.load_weights

    def load_weights(self: Any, model_config: Any, model: Any) -> Any:
        return own(self, model, model_config)

    monkeypatch.setattr(default_loader.DefaultModelLoader, "load_weights", load_weights)


def experts_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    own = default_loader.safetensors_weights_iterator

    def safetensors_weights_iterator(hf_weights_files: Any, *, expert_ids: Any = None, **more: Any) -> Any:
        return own(hf_weights_files, local_expert_ids=expert_ids, **more)

    monkeypatch.setattr(default_loader, "safetensors_weights_iterator", safetensors_weights_iterator)


def reload_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(layerwise, "_layerwise_process")


#: What is different, and what the error says of it.
DIFFERENT: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (iterator_renamed, "DefaultModelLoader._get_weights_iterator of .* does not call safetensors_weights_iterator"),
    (iterator_gone, "has no attribute 'safetensors_weights_iterator'"),
    (method_renamed, "DefaultModelLoader.get_all_weights of .* does not call _get_weights_iterator"),
    (methods_renamed, "DefaultModelLoader.load_weights of .* does not call get_all_weights"),
    (another_parameter, "DefaultModelLoader._get_weights_iterator of .* takes self, source, rank, not self, source"),
    (parameters_turned_round, "load_weights of .* takes self, model_config, model, not self, model, model_config"),
    (experts_by_another_name, "safetensors_weights_iterator of .* takes hf_weights_files, expert_ids, more, not"),
    (reload_renamed, "has no attribute '_layerwise_process'"),
]
BY_NAME = pytest.mark.parametrize(("change", "says"), DIFFERENT, ids=lambda value: getattr(value, "__name__", ""))


@BY_NAME
@pytest.mark.parametrize("version", [None, NEW])
def test_a_place_of_another_form_fails_the_start_by_name_and_says_what_to_do(
    change: Callable[[pytest.MonkeyPatch], None],
    says: str,
    version: str | None,
    start: Callable[[], None],
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if version is not None:
        monkeypatch.setattr(vllm, "__version__", version)
    change(monkeypatch)
    start()
    with pytest.raises(penstock.UnsupportedError, match=says) as caught:
        configured({"model": str(checkpoint("llama"))}, "penstock")
    assert f"in vLLM {version or vllm.__version__} " in str(caught.value)
    assert f"{LAST}, the last known version" in str(caught.value)
    assert f"install a release that Penstock was tested with ({_drift.tested(VLLM)})" in str(caught.value)
    assert '{"strict": false}' in str(caught.value)
    # A rank, which is given its configuration
    with pytest.raises(penstock.UnsupportedError, match=says):
        get_model_loader(LoadConfig(load_format="penstock"))


@pytest.mark.parametrize(
    "change", [iterator_renamed, iterator_gone, method_renamed, methods_renamed, another_parameter, reload_renamed]
)
def test_a_place_of_another_form_is_one_warning_and_vllms_own_way_if_the_user_accepts_that(
    change: Callable[[pytest.MonkeyPatch], None],
    expected: dict[str, str],
    start: Callable[[], None],
    said: Callable[[], list[str]],
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(monkeypatch)
    start()
    given = {"model": str(checkpoint("llama")), "model_loader_extra_config": {"strict": False}}
    config = configured(given, "penstock")
    loader, mine = created(config)
    load(loader, mine, config)
    assert digests(mine) == expected
    assert type(loader).__name__ == "FallbackModelLoader"
    (warning,) = said()
    assert warning.startswith("penstock: loading as vLLM does: in vLLM ")


def test_a_release_that_nobody_has_tried_says_so_once_and_loads(
    expected: dict[str, str],
    start: Callable[[], None],
    said: Callable[[], list[str]],
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    minor = tuple(map(int, vllm.__version__.split(".")[:2]))
    # One that need not have what this release lacks
    new = "0.1.0" if any(hook.since > minor for hook in VLLM.hooks) else NEW
    monkeypatch.setattr(vllm, "__version__", new)
    start()
    assert said() == []
    configured({"model": str(checkpoint("llama"))})
    assert said() == [], "another load format is none of Penstock's business"
    for times in range(2):
        config = configured({"model": str(checkpoint("llama"))}, "penstock")
        loader, mine = created(config)
        load(loader, mine, config)
        warnings = said()
        assert len(warnings) == (0 if times else 1), warnings
        if warnings:
            assert warnings[0].startswith(f"penstock: vLLM {new} is not a release that Penstock was tested with (vLLM ")
            assert LAST in warnings[0]
    assert type(loader).__module__ == "penstock.integrations._vllm_loader"
    assert digests(mine) == expected


def test_every_place_of_this_release_has_the_known_form_and_it_starts_without_a_word_if_it_was_tested(
    start: Callable[[], None], said: Callable[[], list[str]], checkpoint: Callable[[str], Path]
) -> None:
    assert _drift.difference(VLLM) is None
    start()
    config = configured({"model": str(checkpoint("llama"))}, "penstock")
    assert type(get_model_loader(config.load_config)).__module__ == "penstock.integrations._vllm_loader"
    assert len(said()) == (0 if _drift.is_tested(VLLM, vllm.__version__) else 1)


def test_what_replaces_a_place_has_its_form(checkpoint: Callable[[str], Path]) -> None:
    """Penstock's own methods take what vLLM gives those that they replace."""
    from penstock.integrations._vllm_loader import PenstockModelLoader

    of_vllm = default_loader.DefaultModelLoader
    for name in ("__init__", "load_weights", "get_all_weights", "_get_weights_iterator", "download_model"):
        assert list(inspect.signature(getattr(PenstockModelLoader, name)).parameters) == list(
            inspect.signature(getattr(of_vllm, name)).parameters
        ), name
