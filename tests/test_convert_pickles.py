"""`penstock convert` of what torch.save wrote: every kind of file, nothing in it run, and advice that works."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import tarfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import penstock
import pytest
import torch
from penstock import cli
from penstock._convert import convert
from penstock._pickles import tensors_of, weights

STATE = {"w": torch.arange(12.0).reshape(3, 4), "v": torch.ones(2, 5).t(), "h": torch.ones(3).bfloat16()}


def written(path: Path, what: Any = None, old: bool = False, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(STATE if what is None else what, path, _use_new_zipfile_serialization=not old, **more)
    return path


def converted(source: Any, to: Path, *, warned: bool = False) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        convert([str(source)], to, fsync=False, progress=False)
    mine = [
        str(one.message)
        for one in told
        if one.category is RuntimeWarning and "although its name says otherwise" in str(one.message)
    ]
    assert bool(mine) is warned, mine
    return dict(penstock.open(to).load())


def is_state(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor] = STATE) -> None:
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in state)


# Files


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("name", ["m.bin", "m.pt", "m.pth", "m.ckpt"])
def test_a_file_of_any_format_and_name_is_converted(tmp_path: Path, name: str, old: bool, protocol: int):
    try:
        source = written(tmp_path / "from" / name, old=old, pickle_protocol=protocol)
        torch.load(source, weights_only=True)
    except Exception:
        pytest.skip("torch itself does not read that")
    is_state(converted(source, tmp_path / "to"))
    is_state(converted(source.parent, tmp_path / "folder"))


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module"])
@pytest.mark.parametrize("old", [True, False])
def test_what_trainers_put_around_a_state_dict_is_left_out(tmp_path: Path, key: str, old: bool):
    around = {"epoch": 3, "global_step": torch.tensor(5), key: STATE, "hyper": {"lr": 0.1}, "callbacks": [1, None]}
    is_state(converted(written(tmp_path / "last.ckpt", around, old), tmp_path / "to"))


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("name", ["model.safetensors", "x.safetensors"])
def test_a_pickle_with_the_name_of_a_safetensors_file_is_converted_with_a_warning(tmp_path: Path, name: str, old: bool):
    source = written(tmp_path / "from" / name, old=old)
    with pytest.raises(penstock.NotACheckpointError, match="penstock convert"):
        penstock.open(source)
    is_state(converted(source, tmp_path / "to", warned=True))
    is_state(converted(source.parent, tmp_path / "folder", warned=True))


@pytest.mark.parametrize("name", ["model.bin", "pytorch_model.bin", "m.ckpt", "m.pt"])
def test_a_safetensors_file_with_the_name_of_a_pickle_is_converted_with_a_warning(tmp_path: Path, name: str):
    source = tmp_path / "from" / name
    source.parent.mkdir()
    penstock.save_file(STATE, source, fsync=False)
    is_state(converted(source, tmp_path / "to", warned=True))
    is_state(converted(source.parent, tmp_path / "folder", warned=True))


def test_shards_of_an_index_may_be_pickles_of_any_name(tmp_path: Path):
    names = {"w": "model-1.safetensors", "v": "model-2.safetensors", "h": "model-2.safetensors"}
    for file in set(names.values()):
        written(tmp_path / "from" / file, {name: STATE[name] for name in names if names[name] == file})
    index = tmp_path / "from/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    is_state(converted(index, tmp_path / "to", warned=True))
    is_state(converted(tmp_path / "from", tmp_path / "folder", warned=True))


# Folders

#: Files of a folder, and those of them that hold its weights; None: an error. "+" marks an index.
FOLDERS: dict[str, tuple[list[str], list[str] | None]] = {
    "transformers": (["pytorch_model.bin", "training_args.bin"], ["pytorch_model.bin"]),
    "diffusers": (["diffusion_pytorch_model.bin", "optimizer.bin"], ["diffusion_pytorch_model.bin"]),
    "peft": (["adapter_model.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"], ["adapter_model.bin"]),
    "a base and its adapter": (["adapter_model.bin", "pytorch_model.bin"], ["pytorch_model.bin"]),
    "variants beside": (["pytorch_model.bin", "pytorch_model.fp16.bin"], ["pytorch_model.bin"]),
    "one variant": (["diffusion_pytorch_model.fp16.bin"], ["diffusion_pytorch_model.fp16.bin"]),
    "variants": (["pytorch_model.fp16.bin", "pytorch_model.ema.bin"], None),
    "shards": (
        ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "optimizer.pt"],
        ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
    ),
    "shards of diffusers": (
        ["diffusion_pytorch_model-00001-of-00002.bin", "diffusion_pytorch_model-00002-of-00002.bin"],
        ["diffusion_pytorch_model-00001-of-00002.bin", "diffusion_pytorch_model-00002-of-00002.bin"],
    ),
    "ckpt": (["last.ckpt", "optimizer.pt"], ["last.ckpt"]),
    "pt": (["model.pt", "optimizer.pt", "scaler.pt", "scheduler.pt", "rng_state_0.pth"], ["model.pt"]),
    "accelerate": (
        ["model.bin", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "sampler.bin"],
        ["model.bin"],
    ),
    "deepspeed": (
        ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
        ["mp_rank_00_model_states.pt"],
    ),
    "shards of a variant": (
        ["pytorch_model.fp16-00001-of-00002.bin", "pytorch_model.fp16-00002-of-00002.bin"],
        ["pytorch_model.fp16-00001-of-00002.bin", "pytorch_model.fp16-00002-of-00002.bin"],
    ),
    "shards of a variant, as diffusers wrote them": (
        ["diffusion_pytorch_model-00001-of-00002.fp16.bin", "diffusion_pytorch_model-00002-of-00002.fp16.bin"],
        ["diffusion_pytorch_model-00001-of-00002.fp16.bin", "diffusion_pytorch_model-00002-of-00002.fp16.bin"],
    ),
    "shards of two variants": (["pytorch_model.fp16-00001-of-00001.bin", "pytorch_model.ema-00001-of-00001.bin"], None),
    "shards from 0": (["m-0-of-2.pt", "m-1-of-2.pt"], ["m-0-of-2.pt", "m-1-of-2.pt"]),
    "names that begin alike": (
        ["optimus-7b.bin", "samplernn.bin", "scalerank.bin", "optimizer_1.bin", "optim.bin", "optimizers.bin"],
        ["optimus-7b.bin", "samplernn.bin", "scalerank.bin"],
    ),
    "names that end alike": (["maxoptim.pt", "rank0_optim.pt", "x-optimizer.pt", "optim_states.pt"], ["maxoptim.pt"]),
    "hidden": (["._pytorch_model.bin", "model.pth"], ["model.pth"]),
    "a training": (["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"], None),
    "an optimizer": (["optimizer.pt"], None),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_the_weights_of_a_folder_are_found_and_the_state_of_a_training_never(tmp_path: Path, case: str):
    names, expected = FOLDERS[case]
    for number, name in enumerate(names):
        written(tmp_path / "from" / name, {f"{name}.{number}": torch.full((3,), float(number))})
    if expected is None:
        with pytest.raises(penstock.PenstockError, match=r"state of a training|several variants"):
            convert([str(tmp_path / "from")], tmp_path / "to")
        assert not (tmp_path / "to").exists()
        return
    assert [path.name for path in weights([str(tmp_path / "from")])] == expected
    found = converted(tmp_path / "from", tmp_path / "to")
    assert sorted(found) == sorted(f"{name}.{number}" for number, name in enumerate(names) if name in expected)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["pytorch_model-00001-of-00003.bin", "pytorch_model-00002-of-00003.bin"], "pytorch_model-00003-of-00003.bin"),
        (["adapter_model-00002-of-00002.bin"], "adapter_model-00001-of-00002.bin"),
        (["pytorch_model.fp16-00001-of-00002.bin"], "pytorch_model.fp16-00002-of-00002.bin"),
        (["diffusion_pytorch_model-00001-of-00002.fp16.bin"], "diffusion_pytorch_model-00002-of-00002.fp16.bin"),
        (["m-0-of-3.pt", "m-2-of-3.pt"], "m-1-of-3.pt"),
        (["m-1-of-999999999999.pth"], "m-2-of-999999999999.pth, m-3"),
    ],
)
def test_a_set_of_shards_of_which_one_is_missing_is_refused(tmp_path: Path, names: list[str], missing: str):
    for name in names:
        written(tmp_path / "from" / name)
    with pytest.raises(penstock.NotFoundError, match=f"missing in .*: {re.escape(missing)}"):
        convert([str(tmp_path / "from")], tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_two_sets_of_shards_are_refused(tmp_path: Path):
    for name in ("m-1-of-1.pt", "m-1-of-2.pt", "m-2-of-2.pt"):
        written(tmp_path / "from" / name)
    with pytest.raises(penstock.InvalidError, match=r"several sets of shards.*m-\*-of-1\.pt, m-\*-of-2\.pt"):
        convert([str(tmp_path / "from")], tmp_path / "to")


def test_weights_that_are_passed_over_are_named(tmp_path: Path):
    written(tmp_path / "from/tokenizer_extra.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(tmp_path / "from/optimizer.pt")
        assert weights([str(tmp_path / "from")]) == [tmp_path / "from/tokenizer_extra.bin"]
    written(tmp_path / "from/model.pth")
    with pytest.warns(RuntimeWarning, match=r"model\.pth passed over, and tokenizer_extra\.bin converted"):
        convert([str(tmp_path / "from")], tmp_path / "to", fsync=False, progress=False)


@pytest.mark.parametrize(("names", "verb"), [(["optimizer.pt"], "holds"), (["optimizer.pt", "scaler.pt"], "hold")])
def test_the_state_of_a_training_alone_is_named(tmp_path: Path, names: list[str], verb: str):
    for name in names:
        written(tmp_path / name)
    with pytest.raises(penstock.NotFoundError, match=f"{names[-1]} {verb} the state of a training"):
        weights([str(tmp_path)])


# Code


class Evil:
    """Leaves a mark where it is run."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def evil_files(folder: Path, mark: Path) -> dict[str, Path]:
    """Files of every format that run code when they are unpickled without care."""
    folder.mkdir(exist_ok=True)
    found = {}
    for name in ("m.bin", "m.pt", "m.ckpt", "m.pth", "m.safetensors", "pytorch_model.bin", "adapter_model.bin"):
        for old in (True, False):
            for where, what in {
                "value": {"w": torch.ones(3), "x": Evil(mark)},
                "all": Evil(mark),
                "inside": {"state_dict": {"w": torch.ones(2)}, "hyper": Evil(mark)},
            }.items():
                path = folder / f"{where}-{old}" / name
                found[f"{name} {where} {'old' if old else 'zip'}"] = written(path, what, old)
    for protocol in range(6):
        path = folder / f"plain{protocol}" / "m.bin"
        path.parent.mkdir()
        path.write_bytes(pickle.dumps(Evil(mark), protocol=protocol))
        found[f"plain pickle {protocol}"] = path
    path = folder / "tar" / "m.pt"
    path.parent.mkdir()
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            data = pickle.dumps(Evil(mark))
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    found["tar"] = path
    path = folder / "zip" / "m.bin"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", pickle.dumps(Evil(mark), protocol=2))
        made.writestr("archive/version", "3\n")
    found["zip by hand"] = path
    return found


def test_nothing_in_a_pickle_is_run_in_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    mark = tmp_path / "ran"
    files = evil_files(tmp_path / "from", mark)
    assert len(files) > 40
    for case, path in files.items():
        for source in (path, path.parent):
            for dtype in (None, "bfloat16"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    with pytest.raises(penstock.PenstockError) as caught:
                        convert([str(source)], tmp_path / "to", dtype=dtype)
                assert not mark.exists(), f"{case} was run"
                assert "weights_only=False" not in str(caught.value) and "weights_only` to `False" not in str(
                    caught.value
                )
    assert not (tmp_path / "to").exists()


def test_a_mapping_that_torch_is_refused_is_a_read_that_runs_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real, asked = torch.load, []

    def refused(*args: Any, **more: Any) -> Any:
        asked.append(more)
        if more.get("mmap"):
            raise RuntimeError("unable to mmap 12 bytes from file </x>: Cannot allocate memory (12)")
        return real(*args, **more)

    monkeypatch.setattr(torch, "load", refused)
    is_state(converted(written(tmp_path / "m.bin"), tmp_path / "to"))
    with pytest.raises(penstock.InvalidError, match="code"):
        convert([str(written(tmp_path / "evil.bin", {"a": Evil(tmp_path / "ran")}))], tmp_path / "no")
    assert not (tmp_path / "ran").exists()
    assert len(asked) == 4 and all(more["weights_only"] is True for more in asked)


@pytest.mark.parametrize(
    ("version", "is_safe"),
    [("2.6.0", True), ("2.10.1+cu130", True), ("3.0", True), ("2.6.0a0+git1234", True), ("2.5.1+cu121", False),
     ("1.13.1", False), ("unknown", False)],
)  # fmt: skip
def test_a_torch_that_may_run_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_safe: bool
):
    source = written(tmp_path / "m.bin")
    monkeypatch.setattr(torch, "__version__", version)
    if is_safe:
        assert [name for name, _ in tensors_of(source)] == list(STATE)
        return
    monkeypatch.setattr(torch, "load", lambda *args, **more: pytest.fail("it is loaded"))
    with pytest.raises(penstock.UnsupportedError, match=rf"torch {re.escape(version)} .*CVE-2025-32434.*Update torch"):
        convert([str(source)], tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_an_error_names_what_would_run_and_its_advice_works(tmp_path: Path):
    model = torch.nn.Linear(3, 2)
    torch.save(model, tmp_path / "whole.pt")
    with pytest.raises(penstock.InvalidError, match=r"torch\.nn\.modules\.linear\.Linear.*model\.state_dict\(\)"):
        convert([str(tmp_path / "whole.pt")], tmp_path / "no")
    torch.save(model.state_dict(), tmp_path / "tensors.pt")
    is_state(converted(tmp_path / "tensors.pt", tmp_path / "to"), dict(model.state_dict()))


# Other files

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 12\n" % 7


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "m.ckpt", "adapter_model.bin"])
@pytest.mark.parametrize(
    ("content", "told"),
    [(POINTER, "git lfs pull"), (b"<!doctype html><p>404", "web page"), (b"", "empty"), (b"GGUF" + bytes(80), "GGUF")],
)
def test_what_is_no_checkpoint_is_told(tmp_path: Path, name: str, content: bytes, told: str):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / name).write_bytes(content)
    with pytest.raises(penstock.NotACheckpointError, match=told):
        convert([str(tmp_path / "from" / name)], tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_pointer_among_shards_is_told(tmp_path: Path):
    written(tmp_path / "pytorch_model-00001-of-00002.bin")
    (tmp_path / "pytorch_model-00002-of-00002.bin").write_bytes(POINTER)
    with pytest.raises(penstock.NotACheckpointError, match=r"00002-of-00002.*git lfs pull"):
        convert([str(tmp_path)], tmp_path / "to")


def advice(error: penstock.PenstockError) -> str:
    """The command that an error names."""
    found = re.search(r"`penstock (convert [A-Z ]+)`", str(error))
    assert found, error
    return found[1]


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "m.pt", "m.pth", "m.ckpt", "model.safetensors", "adapter_model.bin"]
)
@pytest.mark.parametrize("as_folder", [True, False])
def test_the_command_that_an_error_names_works(tmp_path: Path, name: str, old: bool, as_folder: bool):
    path = written(tmp_path / "from" / name, old=old)
    source = path.parent if as_folder else path
    with pytest.raises(penstock.PenstockError) as caught:
        penstock.open(source)
    words = advice(caught.value).split()
    named = {"FILE": path, "FOLDER": path.parent, "DIRECTORY": tmp_path / "to"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cli.main([str(named.get(word, word)) for word in words]) in (0, None)
    is_state(dict(penstock.open(tmp_path / "to").load()))


def test_a_folder_with_the_state_of_a_training_alone_gets_no_such_advice(tmp_path: Path):
    written(tmp_path / "optimizer.pt")
    with pytest.raises(penstock.NotFoundError) as caught:
        penstock.open(tmp_path)
    assert "penstock convert" not in str(caught.value)


def test_pickles_of_the_hub_cache_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    storage = tmp_path / "hub/models--org--name"
    written(storage / "snapshots" / ("a" * 40) / "pytorch_model.bin")
    (storage / "refs").mkdir()
    (storage / "refs/main").write_text("a" * 40)
    for number, source in enumerate(("org/name", "hf://org/name", "hf://org/name/pytorch_model.bin")):
        is_state(converted(source, tmp_path / f"to{number}"))


def test_files_of_both_kinds_are_not_mixed(tmp_path: Path):
    written(tmp_path / "a.bin")
    penstock.save_file({"x": torch.ones(3)}, tmp_path / "b.safetensors", fsync=False)
    with pytest.raises(penstock.InvalidError, match=r"and not b\.safetensors"):
        convert([str(tmp_path / "a.bin"), str(tmp_path / "b.safetensors")], tmp_path / "to")


# What a file holds besides


SMALL = {"w": torch.arange(3.0), "b": torch.ones(2, 2)}


def convert_one(content: Any, to: Path, **how: Any) -> tuple[dict[str, Any], str]:
    """What is converted of a file with this content, and the warnings."""
    torch.save(content, to / "m.pth", **how)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        convert([str(to / "m.pth")], to / "out", fsync=False, progress=False)
    return penstock.open(to / "out").load(), " ".join(str(one.message) for one in told)


@pytest.mark.parametrize("key", ["params", "params_ema", "generator", "weight", "net_g", "ema", "student"])
def test_the_only_state_dict_that_a_trainer_saved_is_converted(tmp_path: Path, key: str):
    """BasicSR's, RVC's and others have their own names for it."""
    found, told = convert_one(
        {key: SMALL, "iter": 7, "config": [1], "optimizer": {"state": {}}, "version": "v2"}, tmp_path
    )
    assert all(torch.equal(found[name], SMALL[name]) for name in SMALL) and not told


@pytest.mark.parametrize(
    ("taken", "other"),
    [("state_dict", "state_dict_ema"), ("model", "ema"), ("params_ema", "params"), ("module", "generator")],
)
def test_of_two_state_dicts_the_usual_one_counts_and_the_other_is_told(tmp_path: Path, taken: str, other: str):
    zeros = {name: torch.zeros_like(tensor) for name, tensor in SMALL.items()}
    found, told = convert_one({other: zeros, taken: SMALL}, tmp_path)
    assert all(torch.equal(found[name], SMALL[name]) for name in SMALL)
    assert f"{taken!r} are converted" in told and f"{other!r} passed over" in told


@pytest.mark.parametrize(
    "content",
    [
        {"generator": SMALL, "discriminator": SMALL},
        {"w": SMALL["w"], "more": SMALL},
        {"encoder": {"layer": SMALL}},
        {**SMALL, "step": 7},
        {("a", 1): SMALL["w"]},
        {0: SMALL["w"]},
    ],
    ids=["two", "beside tensors", "nested", "a number", "a tuple", "an index"],
)
def test_what_is_not_one_state_dict_is_refused(tmp_path: Path, content: Any):
    with pytest.raises(penstock.InvalidError) as caught:
        convert_one(content, tmp_path)
    assert "is a Tensor, not a tensor" not in str(caught.value)


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("old", [False, True])
def test_a_later_protocol_is_read_or_told_and_the_advice_works(tmp_path: Path, protocol: int, old: bool):
    how = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": not old}
    try:
        found, _ = convert_one(SMALL, tmp_path, **how)
    except penstock.InvalidError as error:
        assert "pickle, of a later protocol" in str(error) and "without pickle_protocol=" in str(error)
        found, _ = convert_one(SMALL, tmp_path, _use_new_zipfile_serialization=not old)
    assert all(torch.equal(found[name], SMALL[name]) for name in SMALL)


@pytest.mark.parametrize(
    "names",
    [["consolidated.00.pth", "consolidated.01.pth"], ["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"]],
)
def test_parts_of_ranks_are_not_taken_for_a_choice(tmp_path: Path, names: list[str]):
    """One of them would be a part of each tensor."""
    for name in names:
        torch.save(SMALL, tmp_path / name)
    with pytest.raises(penstock.InvalidError, match="one rank's part of a model") as caught:
        convert([str(tmp_path)], tmp_path / "out", progress=False)
    assert "give one of them" not in str(caught.value)
