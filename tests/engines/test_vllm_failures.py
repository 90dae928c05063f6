"""A load of vLLM that fails has a typed error. Parameters are unchanged, or the error says which are not."""

from __future__ import annotations

import inspect
import json
import logging
import shutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import penstock
import pytest
import safetensors.torch
import slow_fs
import torch
from penstock import Checkpoint, Destination
from penstock._errors import MissingDtypeError
from penstock.integrations._engine import settings_of
from penstock.integrations._recorder import Recorder
from tiny_models import Tensors, edited
from vllm.model_executor.model_loader import default_loader
from vllm_model import POISON, as_bytes, configured, created, digests, load

pytestmark = pytest.mark.usefixtures("alone")

#: A tensor of the last layer: much has been recorded, and would have been loaded, when it comes.
LAST = "model.layers.3.mlp.down_proj.weight"


@pytest.fixture
def model(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint of two shards and more that a test may damage."""
    return shutil.copytree(checkpoint("unpadded"), tmp_path / "model")


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) > 1
    return found


def changed(tensor: torch.Tensor) -> bool:
    return bool((as_bytes(tensor) != POISON).any())


def failed(
    folder: Path, error: type[BaseException], match: str, **options: Any
) -> tuple[BaseException, torch.nn.Module]:
    """The error of a load, and the model."""
    config = configured({"model": str(folder), "model_loader_extra_config": options}, "penstock")
    loader, model = created(config)
    with pytest.raises(error, match=match) as caught:
        load(loader, model, config)
    return caught.value, model


def exchanged(folder: Path, change: Callable[[str, list[int], bytes], tuple[str, list[int], bytes]]) -> None:
    """Has one tensor of a checkpoint made another one."""
    done = []

    def make(tensors: Tensors) -> Tensors:
        done.extend(name for name in tensors if name == LAST)
        return {name: change(*tensor) if name == LAST else tensor for name, tensor in tensors.items()}

    edited(folder, make)
    assert done == [LAST]


def unchanged(model: torch.nn.Module) -> None:
    assert [name for name, parameter in model.named_parameters() if changed(parameter)] == []


def test_a_truncated_shard(model: Path):
    shard = shards(model)[-1]
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1)
    error, loaded = failed(model, penstock.TruncatedError, shard.name)
    assert isinstance(error, EOFError)
    unchanged(loaded)


def test_a_shard_that_only_the_index_names(model: Path):
    shard = shards(model)[-1]
    shard.unlink()
    _, loaded = failed(model, FileNotFoundError, shard.name)
    unchanged(loaded)


def superseded(folder: Path, name: str) -> None:
    """Has the last shard hold a new version of a tensor of the first one, and the index name the last one."""
    first, last = shards(folder)[0], shards(folder)[-1]
    old = safetensors.torch.load_file(first)
    new = {**safetensors.torch.load_file(last), name: -old[name]}
    safetensors.torch.save_file(new, last, {"format": "pt"})
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name] = last.name
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("newer", ["last", "first"])
def test_of_a_tensor_in_two_shards_the_index_says_which(model: Path, newer: str, tmp_path: Path):
    """vLLM gives its loader the files without their index."""
    name = next(name for name in safetensors.torch.load_file(shards(model)[0]) if name.endswith("down_proj.weight"))
    plain = shutil.copytree(model, tmp_path / "plain")
    superseded(model, name)
    if newer == "first":
        path = model / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"][name] = shards(model)[0].name
        path.write_text(json.dumps(index))
    else:  # the same, without the old version
        changed = safetensors.torch.load_file(shards(plain)[0])
        changed[name] = -changed[name]
        safetensors.torch.save_file(changed, shards(plain)[0], {"format": "pt"})
    found = []
    for folder, load_format in ((model, "penstock"), (plain, "safetensors")):
        config = configured({"model": str(folder)}, load_format)
        loader, loaded = created(config)
        load(loader, loaded, config)
        found.append(digests(loaded))
        assert not getattr(loader, "fallbacks", [])
    assert found[0] == found[1]


def test_a_name_in_two_files_without_an_index_is_an_error_that_names_both(model: Path):
    name = next(name for name in safetensors.torch.load_file(shards(model)[0]))
    superseded(model, name)
    (model / "model.safetensors.index.json").unlink()
    error, loaded = failed(model, penstock.HeaderError, f"{name}.* is also in")
    assert shards(model)[0].name in str(error)
    assert shards(model)[-1].name in str(error)
    unchanged(loaded)


def test_only_pickles_are_an_error_that_names_convert(model: Path):
    for shard in shards(model):
        torch.save(safetensors.torch.load_file(shard), shard.with_name(f"pytorch_{shard.stem}.bin"))
        shard.unlink()
    (model / "model.safetensors.index.json").unlink()
    error, loaded = failed(model, penstock.UnsupportedError, "penstock convert .*--load-format auto")
    assert "pytorch_model-00001" in str(error)
    unchanged(loaded)


def test_a_tensor_of_another_shape(model: Path):
    """vLLM's own loaders compare shapes, of deferred tensors too."""
    exchanged(model, lambda dtype, shape, data: (dtype, shape[::-1], data))
    _, loaded = failed(model, RuntimeError, "exceeds dimension size")
    unchanged(loaded)


def test_a_dtype_that_torch_lacks(model: Path):
    """No fallback: vLLM's own way would meet it after it has overwritten parameters."""
    exchanged(model, lambda dtype, shape, data: ("F6_E2M3", shape, data[: len(data) * 6 // 16]))
    error, loaded = failed(model, MissingDtypeError, "F6_E2M3")
    assert isinstance(error, TypeError)
    assert error.tensor == LAST
    unchanged(loaded)


@pytest.fixture
def destinations(monkeypatch: pytest.MonkeyPatch) -> list[Destination]:
    """What loads go to, as they are made."""
    found: list[Destination] = []
    load_into = Checkpoint.load_into

    def noted(self: Checkpoint, into: Any, *args: Any, **kwargs: Any) -> Any:
        found.extend(into)
        return load_into(self, into, *args, **kwargs)

    monkeypatch.setattr(Checkpoint, "load_into", noted)
    return found


def what_changed(destinations: list[Destination]) -> set[str]:
    """The names whose destinations were overwritten, wholly or in part."""
    assert len(destinations) == 39, "one for every tensor of the checkpoint"
    return {one.name for one in destinations if changed(one.into)}


@pytest.fixture
def failing(model: Path) -> Iterator[Callable[[Path], None]]:
    """The file system of the checkpoint can be told which file's reads fail."""
    if (why := slow_fs.why_not()) is not None:
        pytest.skip(why)
    with slow_fs.mounted(model) as fs:
        yield fs


@pytest.mark.parametrize("good", [0, 20])
def test_a_read_error(
    good: int, failing: Any, model: Path, destinations: list[Destination], monkeypatch: pytest.MonkeyPatch
):
    run = Recorder.run

    def fails(self: Recorder, *args: Any) -> Any:
        failing.tell(fail=["read"], after=good, forget=True)
        return run(self, *args)

    monkeypatch.setattr(Recorder, "run", fails)
    error, _ = failed(failing.path, penstock.ReadError, "Input/output error", extent=1 << 16)
    assert isinstance(error, OSError)
    assert error.errno == 5
    found = what_changed(destinations)
    assert bool(found) == bool(good)
    assert len(found) < len(destinations)
    assert found == set(error.touched)


def test_a_shard_that_shrinks_meanwhile(model: Path, destinations: list[Destination], monkeypatch: pytest.MonkeyPatch):
    run, shard = Recorder.run, shards(model)[-1]

    def shrinks(self: Recorder, *args: Any) -> Any:
        with shard.open("r+b") as file:
            file.truncate(shard.stat().st_size // 2)
        return run(self, *args)

    monkeypatch.setattr(Recorder, "run", shrinks)
    error, loaded = failed(model, penstock.ChangedError, shard.name)
    assert what_changed(destinations) == set(error.touched) == set()
    unchanged(loaded)


@pytest.fixture
def undeferrable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be deferred."""

    def refuses(self: Recorder, *args: Any) -> Any:
        raise penstock.UnsupportedError("not this one")

    monkeypatch.setattr(Recorder, "check", refuses)


@pytest.mark.usefixtures("undeferrable")
def test_what_cannot_be_deferred_is_an_error_that_says_how_to_accept_vllms_own_way(model: Path):
    error, loaded = failed(model, penstock.UnsupportedError, "vLLM would load in its own way: not this one")
    assert "false" in str(error) and "PENSTOCK_STRICT=0" in str(error)
    unchanged(loaded)


@pytest.mark.usefixtures("undeferrable")
@pytest.mark.parametrize("variable", [False, True])
def test_what_cannot_be_deferred_is_loaded_as_vllm_does_if_the_user_accepts_that(
    model: Path, variable: bool, monkeypatch: pytest.MonkeyPatch
):
    if variable:
        monkeypatch.setenv("PENSTOCK_STRICT", "0")
    extra = {} if variable else {"strict": False}
    config = configured({"model": str(model), "model_loader_extra_config": extra}, "penstock")
    loader, mine = created(config)
    load(loader, mine, config)
    assert loader.fallbacks == ["not this one"]
    (report,) = loader.reports
    (fallback,) = report["fallbacks"]
    assert fallback == {"from": "penstock", "to": "the engine's own loader", "reason": "not this one"}
    assert report["copies"] == 0
    config = configured({"model": str(model)})
    loader, theirs = created(config)
    load(loader, theirs, config)
    assert digests(mine) == digests(theirs)


def test_tensors_of_torchao_are_left_to_vllm(model: Path, monkeypatch: pytest.MonkeyPatch):
    """vLLM's own way gets them. Here that is a stand-in that says what it was given."""
    given: list[tuple[Any, ...]] = []

    def own(files: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        given.append(args)
        return iter(())

    monkeypatch.setattr(default_loader, "safetensors_weights_iterator", own)
    config = configured({"model": str(model), "model_loader_extra_config": {"strict": False}}, "penstock")
    loader, mine = created(config)
    loader.load_config.safetensors_load_strategy = "torchao"
    with pytest.raises(ValueError, match="not initialized"):
        load(loader, mine, config)
    assert given
    assert "torchao" in given[0]
    assert loader.fallbacks == ["the checkpoint holds tensors of torchao's classes"]


Loader = default_loader.DefaultModelLoader


def rewritten(monkeypatch: pytest.MonkeyPatch, method: str, old: str, new: str, called: str | None = None) -> None:
    """A vLLM whose loader's method has another text. ``called``: the name of the method there."""
    text = textwrap.dedent(inspect.getsource(getattr(Loader, method)))
    assert old in text
    made: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{text.replace(old, new)}", vars(default_loader), made)
    monkeypatch.setattr(Loader, called or method, made[called or method], raising=False)


def iterator_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_loader, "shard_iterator", default_loader.safetensors_weights_iterator, raising=False)
    rewritten(monkeypatch, "_get_weights_iterator", "= safetensors_weights_iterator(", "= shard_iterator(")


def iterator_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator_renamed(monkeypatch)
    monkeypatch.delattr(default_loader, "safetensors_weights_iterator")


def iterator_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader import weight_utils

    monkeypatch.setattr(default_loader, "weight_utils", weight_utils, raising=False)
    new = "= weight_utils.safetensors_weights_iterator("
    rewritten(monkeypatch, "_get_weights_iterator", "= safetensors_weights_iterator(", new)


def threads_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    old = 'extra_config.get("enable_multithread_load")'
    rewritten(monkeypatch, "_get_weights_iterator", old, 'extra_config.get("enable_multithread_load", True)')


def files_chosen_later(monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten(monkeypatch, "_get_weights_iterator", "return ((", "yield from ((")


def method_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = "def _get_weights_iterator(", "def _weights_of("
    rewritten(monkeypatch, "_get_weights_iterator", old, new, "_weights_of")
    rewritten(monkeypatch, "get_all_weights", "self._get_weights_iterator(", "self._weights_of(")


def methods_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    method_renamed(monkeypatch)
    monkeypatch.setattr(Loader, "every_weight", Loader.get_all_weights, raising=False)
    rewritten(monkeypatch, "load_weights", "self.get_all_weights(", "self.every_weight(")


#: A vLLM of another version, and whether parameters are as they were when that is noticed.
DRIFTS: list[tuple[Callable[[pytest.MonkeyPatch], None], bool]] = [
    (iterator_renamed, True),
    (iterator_gone, True),
    (iterator_elsewhere, True),
    (threads_by_default, True),
    (files_chosen_later, True),
    (method_renamed, True),
    (methods_renamed, False),
]


def test_a_prefetch_of_vllms_own_does_not_take_over(model: Path):
    config = configured({"model": str(model), "safetensors_load_strategy": "prefetch"}, "penstock")
    assert config.load_config.safetensors_load_strategy == "prefetch"
    loader, loaded = created(config)
    load(loader, loaded, config)
    theirs = configured({"model": str(model)})
    own, expected = created(theirs)
    load(own, expected, theirs)
    assert digests(loaded) == digests(expected)
    assert [report["fallbacks"] for report in loader.reports] == [[]]


@pytest.mark.parametrize(("drift", "early"), DRIFTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_vllm_that_does_not_call_what_it_used_to_is_an_error(
    drift: Callable[[pytest.MonkeyPatch], None], early: bool, model: Path, monkeypatch: pytest.MonkeyPatch
):
    drift(monkeypatch)
    _, loaded = failed(model, penstock.UnsupportedError, "vLLM would load in its own way: ")
    if early:
        unchanged(loaded)


@pytest.mark.parametrize("drift", [drift for drift, _ in DRIFTS], ids=lambda drift: drift.__name__)
def test_a_vllm_that_does_not_call_what_it_used_to_loads_its_own_way_with_a_warning_if_that_is_accepted(
    drift: Callable[[pytest.MonkeyPatch], None],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    drift(monkeypatch)
    config = configured({"model": str(model), "model_loader_extra_config": {"strict": False}}, "penstock")
    loader, mine = created(config)
    with caplog.at_level(logging.WARNING, "penstock"):
        load(loader, mine, config)
    # A record that vLLM's logger gets too is one: pytest 9.2 listens there
    said = [one.getMessage() for one in dict.fromkeys(caplog.records) if one.name == "penstock"]
    assert len(said) == 1 and said[0].startswith("penstock: loading as vLLM does: "), said
    assert [f["reason"] for f in loader.reports[0]["fallbacks"]] == loader.fallbacks != []
    config = configured({"model": str(model)})
    loader, theirs = created(config)
    load(loader, theirs, config)
    assert digests(mine) == digests(theirs)


@pytest.mark.parametrize("drift", [drift for drift, _ in DRIFTS[:-1]], ids=lambda drift: drift.__name__)
def test_a_reload_that_does_not_call_what_it_used_to_is_an_error(
    drift: Callable[[pytest.MonkeyPatch], None], model: Path, monkeypatch: pytest.MonkeyPatch
):
    config = configured({"model": str(model)}, "penstock")
    loader, mine = created(config)
    load(loader, mine, config)
    drift(monkeypatch)
    with pytest.raises(penstock.UnsupportedError, match="vLLM would load in its own way: "):
        list(loader.get_all_weights(config.model_config, mine))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"strict": "no"}, "vLLM: strict='no': give true or false"),
        ({"storage": {"secret_access_key": "hunter2"}}, "vLLM logs its arguments.*AWS_SECRET_ACCESS_KEY"),
        ({"storage": {"session_token": "hunter2"}}, "session_token in storage"),
        ({"storage": {"account_key": "hunter2", "sas_token": "hunter2"}}, "account_key and sas_token in storage"),
        ({"storage": {"bogus": "hunter2"}}, "unknown settings bogus of storage; it takes connections, "),
        ({"storage": "hunter2"}, "storage is no object of settings"),
    ],
)
def test_settings_that_make_no_sense(given: dict[str, Any], says: str):
    with pytest.raises(penstock.InvalidError, match=says) as caught:
        settings_of(given, "vLLM")
    assert "hunter2" not in str(caught.value)
