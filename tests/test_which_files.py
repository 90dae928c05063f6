"""Which files of a folder are opened, and what is told of the others: the table of docs/compatibility.md.

The table itself is tested beside the function, in `crates/core/src/format/choose.rs`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
from penstock._convert import convert
from penstock.cli import main
from safetensors.numpy import save_file

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)\.safetensors")


def number_of(name: str) -> float:
    """What every tensor of a file holds, so that it is known where a tensor came from."""
    return float(sum(name.encode()) * 31 % 10007)


def make(folder: Path, names: Iterable[str]) -> Path:
    """A folder with these files. Shards of one set have a tensor each; every other file is a checkpoint of two."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(names)
    for name in names:
        if name.endswith(".json") or not name.endswith(".safetensors"):
            continue
        if name.startswith("._") or name == ".safetensors":
            (folder / name).write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X        " if name.startswith("._") else b"")
            continue
        found = SHARD.fullmatch(name)
        tensors = ["w0", "w1"] if found is None else [f"w{int(found[2]) - 1}"]
        save_file({one: np.full(4, number_of(name), "float32") for one in tensors}, folder / name)
    for name in names:
        if not name.endswith(".json"):
            continue
        stem, _, variant = name.removesuffix(".json").partition(".safetensors.index")
        variant = variant.removeprefix(".")
        if name.startswith("._"):
            (folder / name).write_bytes(b"\0\5\x16\7")
            continue
        base, _, dotted = stem.partition(".")
        label = variant or dotted
        spelled = f"{base}.{label}" if label else base
        map_of = {f"w{n}": f"{spelled}-{n + 1:05}-of-00002.safetensors" for n in range(2)}
        (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": map_of}))
    return folder


def shards(stem: str) -> list[str]:
    return [f"{stem}-0000{n}-of-00002.safetensors" for n in (1, 2)]


def loaded(folder: Path, **options: Any) -> dict[str, float]:
    """The files that tensors came from, as their numbers."""
    return {name: float(tensor[0]) for name, tensor in penstock.open(folder, **options).load(framework="np").items()}


def expected_of(names: Iterable[str]) -> list[str] | None:
    """The second reading of the table, for names of a pool in which every dotted part is a variant."""
    seen = {name for name in names if not name.startswith(".")}
    index = "{}.safetensors.index.json"
    for group in (False, True):
        of = {name for name in seen if name.startswith("consolidated") is group}
        plain = {name for name in of if not re.search(r"\.(fp16|bf16)", name)}
        sets = ["consolidated"] if group else ["model", "diffusion_pytorch_model", "adapter_model"]
        for stem in sets:
            single, listed = f"{stem}.safetensors" in plain, index.format(stem) in plain
            if listed and (stem == "diffusion_pytorch_model" or not single):
                return shards(stem)
            if single:
                return [f"{stem}.safetensors"]
        indexes = [name for name in plain if name.endswith(".json")]
        if len(indexes) == 1:
            return shards(indexes[0].partition(".")[0])
        if indexes:
            return None
        if plain:
            return sorted(plain)
    return None


POOL = [
    ["model.safetensors"], ["model.safetensors.index.json", *shards("model")], shards("model"),
    ["diffusion_pytorch_model.safetensors"],
    ["diffusion_pytorch_model.safetensors.index.json", *shards("diffusion_pytorch_model")],
    ["adapter_model.safetensors"], ["consolidated.safetensors"], ["weights.safetensors"],
    ["weights.safetensors.index.json", *shards("weights")],
    ["model.fp16.safetensors"], ["model.fp16.safetensors.index.json", *shards("model.fp16")],
    ["model.safetensors.index.bf16.json", *shards("model.bf16")],
    ["diffusion_pytorch_model.fp16.safetensors.index.json", *shards("diffusion_pytorch_model.fp16")],
    ["._model.safetensors"], ["._model.safetensors.index.json"], [".hidden.safetensors"], [".safetensors"],
    ["config.json"],
]  # fmt: skip


@pytest.mark.parametrize("seed", range(120))
def test_any_folder_is_what_the_table_says_or_is_refused(tmp_path: Path, seed: int):
    chance = random.Random(seed)
    names = sorted({name for part in chance.sample(POOL, chance.randrange(1, 7)) for name in part})
    names = [name for name in names if name != "config.json"]
    folder = make(tmp_path / "model", names)
    expected = expected_of(names)
    if expected is None or len([n for n in expected if SHARD.fullmatch(n)]) not in (0, len(expected)):
        return
    whole = [name for name in expected if not SHARD.fullmatch(name)]
    try:
        checkpoint = penstock.open(folder)
    except penstock.PenstockError as error:
        # Files of several checkpoints are refused, and both are named
        assert len(whole) > 1 or len({n.partition("-0000")[0] for n in expected}) > 1, error
        return
    assert sorted(Path(file).name for file in checkpoint.files) == expected
    values = {name: float(tensor[0]) for name, tensor in checkpoint.load(framework="np").items()}
    assert set(values.values()) <= {number_of(name) for name in expected}
    opened = {*expected, *(n for n in names if n.endswith(".json") and not n.startswith(".") and n.startswith(
        expected[0].partition("-0000")[0] + ".safetensors.index") and SHARD.fullmatch(expected[0]))}  # fmt: skip
    told = " ".join(checkpoint.warnings)
    for name in set(names) - opened:
        assert name in told, (names, checkpoint.warnings)


@pytest.mark.parametrize("saved", ["model.safetensors", "weights.safetensors"])
@pytest.mark.parametrize("beside", ["model.fp16.safetensors.index.json", "model.safetensors.index.fp16.json"])
def test_what_was_just_saved_is_what_is_loaded(tmp_path: Path, beside: str, saved: str):
    folder = make(tmp_path, [beside, *shards("model.fp16")])
    penstock.save({"w0": np.full(4, 7, "float32"), "w1": np.full(4, 7, "float32")}, folder, name=saved, fsync=False)
    assert loaded(folder) == {"w0": 7, "w1": 7}
    assert loaded(folder, variant="fp16") == {f"w{n}": number_of(name) for n, name in enumerate(shards("model.fp16"))}


def test_every_way_in_takes_a_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = make(tmp_path / "model", ["model.safetensors", "model.fp16.safetensors", "model.v2.safetensors"])
    expected = {"w0": number_of("model.fp16.safetensors"), "w1": number_of("model.fp16.safetensors")}
    assert loaded(folder, variant="fp16") == expected
    with penstock.safe_open(folder, "np", variant="fp16") as opened:
        assert float(opened.get_tensor("w0")[0]) == expected["w0"]
    for command in ("inspect", "verify", "load", "warm"):
        assert main([command, str(folder), "--variant", "fp16", "--json"]) == 0
        said = capsys.readouterr().out
        assert "model.fp16.safetensors" in said or command == "load"
    assert main(["convert", str(folder), str(tmp_path / "out"), "--variant", "fp16", "--json"]) == 0
    assert loaded(tmp_path / "out") == expected
    capsys.readouterr()
    assert main(["inspect", str(folder), "--variant", "fp8"]) == 3
    assert 'the variants here are "fp16", "v2"' in capsys.readouterr().err
    for bad in ("", "a/b", ".fp16", "fp*"):
        with pytest.raises(ValueError, match="variant="):
            penstock.open(folder, variant=bad)
    with pytest.raises(TypeError, match="variant=3"):
        penstock.open(folder, variant=3)  # type: ignore[arg-type]
    for source in (folder / "model.safetensors", [folder / "model.safetensors"]):
        with pytest.raises(penstock.InvalidError, match="chooses among the files of a folder"):
            penstock.open(source, variant="fp16")


def test_the_command_line_and_the_log_name_what_was_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    folder = make(tmp_path, ["model.safetensors", "consolidated.safetensors", "._model.safetensors"])
    for command in ("inspect", "verify"):
        assert main([command, str(folder)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "passed over: ._model.safetensors, consolidated.safetensors" in said
        assert "passed over: ._model.safetensors, consolidated.safetensors" in caplog.text
        caplog.clear()


def _index(folder: Path, mapping: Mapping[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))


def test_verify_tells_what_the_index_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    old, new = shards("model")
    save_file({"w0": np.zeros(2), "w1": np.zeros(2)}, tmp_path / old)
    save_file({"w1": np.ones(2), "w2": np.ones(2)}, tmp_path / new)
    _index(tmp_path, {"w0": old, "w1": new, "w2": new, "gone": new})
    assert main(["verify", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert any("1 tensor: passed over" in text and "`w1`" in text and new in text for text in document["warnings"])
    assert any(
        "1 tensor of the index is in no shard file" in text and "`gone`" in text for text in document["warnings"]
    )
    for source in (tmp_path, [tmp_path / old, tmp_path / new]):
        state = penstock.open(source).load(framework="np")
        assert {name: float(tensor[0]) for name, tensor in state.items()} == {"w0": 0, "w1": 1, "w2": 1}
    with penstock.safe_open([tmp_path / new, tmp_path / old], "np") as opened:
        assert float(opened.get_tensor("w1")[0]) == 1
    convert([str(tmp_path)], tmp_path / "out", progress=False)
    assert float(penstock.open(tmp_path / "out").load(framework="np")["w1"][0]) == 1


@pytest.mark.parametrize("seed", range(30))
def test_a_list_and_its_folder_are_the_same_whatever_the_index_decides(tmp_path: Path, seed: int):
    """Shards with random tensors, of which some are in several; an index that names one of the places of each."""
    chance = random.Random(seed)
    files = [f"part-{n}.safetensors" for n in range(chance.randrange(2, 6))]
    places = {f"t{n}": chance.sample(files, chance.choice([1, 1, 1, 2, 3][: 2 + len(files)]) if len(files) > 2 else 1)
              for n in range(12)}  # fmt: skip
    places |= {f"own{n}": [file] for n, file in enumerate(files)}
    for number, file in enumerate(files):
        here = [name for name in places if file in places[name]]
        chance.shuffle(here)
        save_file({name: np.full(chance.randrange(1, 5), number, "float32") for name in here}, tmp_path / file)
    mapping = {name: chance.choice(found) for name, found in places.items()}
    _index(tmp_path, mapping)
    expected = {name: files.index(file) for name, file in mapping.items()}
    for source in (tmp_path, [tmp_path / file for file in files], [str(tmp_path / file) for file in reversed(files)]):
        checkpoint = penstock.open(source)
        state = checkpoint.load(framework="np")
        assert {name: int(tensor[0]) for name, tensor in state.items()} == expected
        passed = [
            int(found[1]) for text in checkpoint.warnings if (found := re.search(r": (\d+) tensors?: passed", text))
        ]
        assert sum(passed) == sum(len(found) - 1 for found in places.values())
        for name in checkpoint:
            assert Path(checkpoint[name].file).name == mapping[name]
        assert {name: int(tensor[0]) for name, tensor in checkpoint.stream(framework="np")} == expected


# Sets of shards by their names


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        (["model-00001-of-00002.safetensors"], ["model-00002-of-00002.safetensors"]),
        (["w-2-of-3.safetensors"], ["w-1-of-3.safetensors", "w-3-of-3.safetensors"]),
        (["m-00000-of-00002.safetensors"], ["m-00001-of-00002.safetensors"]),
        (["consolidated-00001-of-00002.safetensors"], ["consolidated-00002-of-00002.safetensors"]),
        (["model.fp16-00002-of-00002.safetensors"], ["model.fp16-00001-of-00002.safetensors"]),
        (["model-00001-of-00002.fp16.safetensors"], ["model-00002-of-00002.fp16.safetensors"]),
        (["diffusion_pytorch_model-00003-of-00003.safetensors", "diffusion_pytorch_model-00001-of-00003.safetensors"],
         ["diffusion_pytorch_model-00002-of-00003.safetensors"]),
    ],
)  # fmt: skip
def test_shards_that_are_missing_are_told_without_an_index_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], there: list[str], missing: list[str]
):
    for n, name in enumerate(there):
        save_file({f"w{n}": np.ones(2)}, tmp_path / name)
    told = " ".join(penstock.open(tmp_path).warnings)
    assert all(name in told for name in missing) and f"{len(missing)} more" in told, told
    assert main(["verify", str(tmp_path)]) == 0
    assert missing[0] in " ".join(capsys.readouterr().out.split())
    for n, name in enumerate(missing):
        save_file({f"v{n}": np.ones(2)}, tmp_path / name)
    assert "shard files, " not in " ".join(penstock.open(tmp_path).warnings)
