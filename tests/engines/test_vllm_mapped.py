"""vLLM copies out of mapped files itself: right values in loads and reloads, whatever other programs do with the files
meanwhile, and no lease is left."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ordeal
import penstock
import pytest
import stubs
import torch
from leases import leases_on
from penstock.integrations import _engine, _mapped, _vllm_loader, _vllm_reload
from penstock.integrations._mapped import Mapped
from penstock.integrations._reload import Reloader
from test_vllm_group import group
from test_vllm_reload import expected, folders, reload, served
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader import default_loader
from vllm_model import addresses, configured, created, digests, load, poison

__all__ = ["expected", "folders"]  # fixtures

MODELS = ["llama", "qwen3-moe"]
#: Seconds that a writer may wait. The kernel itself ends a lease after 45.
SOON = 20.0

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(autouse=True)
def without_compiled_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    stubs.process_weights(monkeypatch)
    # All models of a process share these modules. A reload that fails leaves their buffers without bytes
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[penstock.Report]:
    """Of each load and reload."""
    found: list[penstock.Report] = []
    run = _engine.Loads.run

    def noted(self: _engine.Loads, model: torch.nn.Module) -> list[penstock.Report]:
        made = run(self, model)
        found.extend(made)
        return made

    monkeypatch.setattr(_engine.Loads, "run", noted)
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def left_nothing(folder: Path) -> None:
    """Another program may write to each file now, and this process has none of them open."""
    gc.collect()
    limit = time.monotonic() + SOON * ordeal.load_factor()
    for path in files(folder):
        # To ask by an open would have it given back
        while leases_on(path):
            assert time.monotonic() < limit, f"a lease on {path} is left"
            time.sleep(0.01)
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert not {str(path) for path in files(folder)} & set(opened)


WRITER = """
import sys, time
begun = time.monotonic()
with open(sys.argv[1], sys.argv[2]):
    print(time.monotonic() - begun)
"""


class Interrupted:
    """After so many tensors of a load another program opens one of its files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int, mode: str) -> None:
        self.waited: list[float] = []
        weights = Mapped.weights

        def interrupted(mapped: Mapped, order: str = "file") -> Iterator[tuple[str, Any]]:
            for number, found in enumerate(weights(mapped, order)):
                yield found
                del found
                if number == after:
                    path = mapped.checkpoint.files[-1]
                    done = subprocess.run(
                        [sys.executable, "-c", WRITER, path, mode],
                        capture_output=True,
                        text=True,
                        timeout=60,
                        check=True,
                    )
                    self.waited.append(float(done.stdout))

        monkeypatch.setattr(Mapped, "weights", interrupted)

    def check(self) -> None:
        assert len(self.waited) == 1 and self.waited[0] < SOON * ordeal.load_factor(), self.waited


@pytest.mark.parametrize("folders", MODELS, indirect=True)
@pytest.mark.parametrize("after", [0, 20])
def test_a_program_that_opens_a_file_in_the_middle_of_a_load(
    folders: list[Path], expected: list[dict[str, str]], after: int, monkeypatch: pytest.MonkeyPatch, reports: Any
) -> None:
    program = Interrupted(monkeypatch, after, "r+b")
    model, _ = served(folders[0], "penstock", mapped="on")
    program.check()
    assert digests(model) == expected[0]
    [report] = reports
    [fallback] = report["fallbacks"]
    assert report["given"] == "mapped" and (fallback["from"], fallback["to"]) == ("mapped", "read")
    left_nothing(folders[0])


@pytest.mark.parametrize("folders", ["qwen3-moe"], indirect=True)
@pytest.mark.parametrize("again", [False, True], ids=["load", "reload"])
def test_a_program_that_empties_a_file_in_the_middle(
    folders: list[Path], tmp_path: Path, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    model, config = served(folders[1], "penstock", mapped="on") if again else (None, None)
    program = Interrupted(monkeypatch, 9, "wb")
    with pytest.raises(penstock.ChangedError) as caught:
        if model is not None:
            reload(model, config, folder)
        else:
            served(folder, "penstock", mapped="on")
    program.check()
    assert len(caught.value.touched) == 10
    del caught
    left_nothing(folder)


@pytest.mark.parametrize("folders", MODELS, indirect=True)
def test_a_file_without_a_lease_is_recorded(folders: list[Path], expected: list[dict[str, str]], reports: Any) -> None:
    path = files(folders[0])[-1]
    with path.open("r+b"):
        model, config = served(folders[0], "penstock", mapped="on")
        assert digests(model) == expected[0]
        poison(model)
        reload(model, config)
    assert digests(model) == expected[0]
    first = reports[0]
    assert first["given"] == "deferred" and str(path) in first["given_reason"]
    left_nothing(folders[0])


@pytest.mark.parametrize("folders", ["tied-llama"], indirect=True)
def test_tied_weights(folders: list[Path], expected: list[dict[str, str]]) -> None:
    model, config = served(folders[0], "penstock", mapped="on")
    assert digests(model) == expected[0]
    reload(model, config, folders[1])
    assert digests(model) == expected[1]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("folders", MODELS, indirect=True)
def test_reloads_out_of_mapped_files(folders: list[Path], expected: list[dict[str, str]], reports: Any) -> None:
    model, config = served(folders[0], "penstock", mapped="on")
    where = addresses(model)
    for number in range(1, 7):
        poison(model)
        reload(model, config, folders[number % 2])
        assert digests(model) == expected[number % 2]
        assert addresses(model) == where
        left_nothing(folders[number % 2])
    assert [report["given"] for report in reports] == ["mapped"] * 7


@pytest.mark.parametrize("folders", MODELS, indirect=True)
@pytest.mark.parametrize("after", [0, 7, 30])
def test_a_program_that_opens_a_file_in_the_middle_of_a_reload(
    folders: list[Path], expected: list[dict[str, str]], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that wait for more tensors have theirs still."""
    model, config = served(folders[0], "penstock", mapped="on")
    program = Interrupted(monkeypatch, after, "r+b")
    reload(model, config, folders[1])
    program.check()
    assert digests(model) == expected[1]
    left_nothing(folders[1])


@pytest.mark.parametrize("folders", ["qwen3-moe"], indirect=True)
def test_a_reload_that_fails_leaves_no_lease_to_the_next_one(
    folders: list[Path], expected: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = served(folders[0], "penstock", mapped="on")
    own = type(model).load_weights

    def fails(self: Any, weights: Any) -> Any:
        for number, (_, tensor) in enumerate(weights):
            if number == 5:
                kept.append(tensor)
                raise RuntimeError("it fails here")

    kept: list[torch.Tensor] = []
    monkeypatch.setattr(type(model), "load_weights", fails)
    with pytest.raises(RuntimeError, match="fails here"):
        reload(model, config, folders[1])
    monkeypatch.setattr(type(model), "load_weights", own)
    left = kept[0].clone()
    reload(model, config, folders[1])
    assert digests(model) == expected[1]
    assert torch.equal(kept[0], left)
    left_nothing(folders[1])


@pytest.mark.parametrize("folders", ["llama"], indirect=True)
def test_a_reload_whose_end_fails_leaves_no_lease(
    folders: list[Path], expected: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = served(folders[0], "penstock", mapped="on")

    def fails(recorders: Any) -> None:
        raise RuntimeError("it fails here")

    lent: list[Mapped] = []
    lend = _vllm_reload.lend
    monkeypatch.setattr(_vllm_loader, "lend", lambda mapped: (lent.append(mapped), lend(mapped)))
    with monkeypatch.context() as patched:
        patched.setattr(_vllm_reload, "_flush", fails)
        with pytest.raises(RuntimeError, match="fails here"):
            reload(model, config, folders[1])
    assert len(lent) == 1 and lent[0].leased.over and not _vllm_reload._lent
    left_nothing(folders[1])


@pytest.mark.parametrize("folders", ["llama"], indirect=True)
def test_a_vllm_whose_reloads_do_not_say_when_they_end_gets_no_mapped_files(
    folders: list[Path], expected: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, reports: Any
) -> None:
    model, config = served(folders[0], "penstock", mapped="on")
    monkeypatch.setattr(_vllm_reload, "_hooked", lambda: False)
    reload(model, config, folders[1])
    assert digests(model) == expected[1]
    assert [report["given"] for report in reports] == ["mapped"]
    left_nothing(folders[1])


@pytest.mark.parametrize("folders", MODELS, indirect=True)
def test_a_streamed_reload_after_a_mapped_load(
    folders: list[Path], expected: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first load has not shown what is copied: tensors are read whole, and the next reload knows."""
    model, config = served(folders[0], "penstock", mapped="on")
    made: list[Reloader] = []
    weights = Reloader.weights

    def noted(self: Reloader) -> Any:
        made.append(self)
        return weights(self)

    def refused(self: Mapped, always: bool) -> str:
        return "not now"

    monkeypatch.setattr(_vllm_loader, "waits", lambda *args: False)
    monkeypatch.setattr(_mapped.Mapped, "_not_here", refused)
    monkeypatch.setattr(Reloader, "weights", noted)
    for number in (1, 2):
        reload(model, config, folders[number % 2])
        assert digests(model) == expected[number % 2]
        assert [one.read_besides for one in made] == [0] * number
    assert _vllm_loader._first_loads[model].cuts


@pytest.mark.parametrize("folders", ["llama"], indirect=True)
def test_where_copies_take_longer_tensors_are_deferred(
    folders: list[Path], expected: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, reports: Any
) -> None:
    monkeypatch.setattr(_mapped, "COPYING", 1e3)
    model, config = served(folders[0], "penstock", mapped="auto")
    reload(model, config, folders[1])
    assert digests(model) == expected[1]
    assert reports[0]["given"] == "deferred" and "takes less time" in reports[0]["given_reason"]


@pytest.mark.parametrize("folders", ["llama"], indirect=True)
def test_parameters_that_keep_what_they_were_given_are_no_files(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader that does not copy: ``parameter.data = tensor``."""
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    config = configured({"model": str(folder)}, "penstock", "on")
    loader, model = created(config)
    name = "model.norm.weight"

    def keeps(self: Any, weights: Any) -> set[str]:
        for given, tensor in weights:
            if given == name:
                dict(self.named_parameters())[name].data = tensor
        return {name for name, _ in self.named_parameters()}

    monkeypatch.setattr(type(model), "load_weights", keeps)
    load(loader, model, config)
    left_nothing(folder)
    right = penstock.open(folder).load(names=[name])[name].clone()
    for path in files(folder):
        path.write_bytes(b"")
    assert torch.equal(dict(model.named_parameters())[name], right)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("refused", [[], [1]], ids=["all", "one cannot"])
def test_ranks_get_mapped_files_all_or_none(
    model: str, refused: list[int], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    both = [checkpoint(model), checkpoint(model).with_suffix(".inverse")]
    with group(tmp_path / "ranks", 2, "gives", folders=list(map(str, both)), refused=refused) as ranks:
        found = ranks.said()
    for one in found:
        assert one["differ"]
        assert (one["first"], one["reloads"]) == ([], [[], []])
        assert one["given"][0] == ("deferred" if refused else "mapped")
        assert refused or one["given"] == ["mapped"] * 3
    for folder in both:
        left_nothing(folder)


def test_vllms_own_iterator_is_as_it_was(checkpoint: Callable[[str], Path]) -> None:
    before = default_loader.safetensors_weights_iterator
    served(checkpoint("llama"), "penstock", mapped="on")
    assert default_loader.safetensors_weights_iterator is before
