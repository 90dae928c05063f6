"""`penstock convert`: the same tensors in other files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ordeal
import penstock
import penstock._convert
import pytest
import torch
from conftest import raw
from penstock.bench import reference
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor

Command = Callable[..., Any]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(raw(a[name]) == raw(b[name]) and a[name].shape == b[name].shape for name in a)


@pytest.mark.parametrize(
    "more", [(), ("--layout", "compact"), ("--order", "layer"), ("--max-shard-size", "3kB")], ids=str
)
def test_a_checkpoint_is_written_anew(small: Path, tmp_path: Path, cli: Command, more: tuple[str, ...]):
    done = cli("convert", small, tmp_path / "new", "--no-fsync", "--json", *more)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["report"]
    assert report["tensors"] == len(penstock.open(small))
    assert (len(report["files"]) > 1) is ("3kB" in more)
    same(dict(penstock.open(tmp_path / "new").load()), dict(penstock.open(small).load()))


def test_tensors_are_cast(small: Path, tmp_path: Path, torch_cli: Command):
    assert torch_cli("convert", small, tmp_path / "half", "--dtype", "bfloat16").returncode == 0
    same(dict(penstock.open(tmp_path / "half").load()), dict(penstock.open(small).load(dtype="bfloat16")))


def test_tensors_are_cast_without_torch(tmp_path: Path, python: Callable[..., Any]):
    state = {"w": torch.randn(33, 7), "half": torch.randn(5).half(), "step": torch.arange(3)}
    penstock.save_file(state, tmp_path / "m.safetensors", fsync=False)
    code = """
import sys
sys.modules["torch"] = None
from penstock._convert import convert
convert([sys.argv[1]], sys.argv[2], dtype="float16", progress=False)
"""
    done = python(code, tmp_path / "m.safetensors", tmp_path / "half")
    assert done.returncode == 0, done.stderr
    same(dict(penstock.open(tmp_path / "half").load()), state | {"w": state["w"].half()})


#: Dtypes of less than a byte, and shapes that no framework can hold.
NARROW = [
    Tensor("f6", "F6_E2M3", (4, 2)),
    Tensor("w", "F32", (3, 5)),
    Tensor("other f6", "F6_E3M2", (3, 8)),
    Tensor("odd f4", "F4", (2, 3)),
    Tensor("f4", "F4", (2, 4)),
    Tensor("none", "F6_E2M3", (0, 3)),
    Tensor("half", "F16", (7,)),
]


def entries(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What the files hold, read without penstock."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found = {name: entry for file in files for name, entry in reference.entries_of(file).items()}
    return {name: (e.dtype, tuple(e.shape), reference.raw(e).tobytes()) for name, e in found.items()}


@pytest.mark.parametrize("size", ["5GB", "20"])
def test_what_no_framework_has_is_written_anew_as_bytes(tmp_path: Path, cli: Command, size: str):
    source = synth.write_file(tmp_path / "m.safetensors", NARROW)
    done = cli("convert", source, tmp_path / "new", "--max-shard-size", size, "--json")
    assert done.returncode == 0, done.stderr
    assert (len(json.loads(done.stdout)["report"]["files"]) > 1) is (size == "20")
    assert entries(tmp_path / "new") == entries(source)
    same(dict(penstock.open(tmp_path / "new").load(dtype="raw")), dict(penstock.open(source).load(dtype="raw")))


def test_what_no_framework_has_stays_where_others_are_cast(tmp_path: Path, torch_cli: Command):
    source = synth.write_file(tmp_path / "m.safetensors", NARROW)
    assert torch_cli("convert", source, tmp_path / "half", "--dtype", "bfloat16").returncode == 0
    found, before = entries(tmp_path / "half"), entries(source)
    assert {name for name in found if found[name] != before[name]} == {"w", "half"}
    assert found["w"][:2] == ("BF16", (3, 5)) and found["half"][:2] == ("BF16", (7,))


def test_a_plain_copy_needs_no_framework(small: Path, tmp_path: Path, python: Callable[..., Any]):
    code = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
from penstock._convert import convert
convert([sys.argv[1]], sys.argv[2], progress=False)
"""
    done = python(code, small, tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert entries(tmp_path / "new") == entries(small)


def test_a_tensor_without_values_is_named_before_anything_is_written(tmp_path: Path):
    torch.save({"w": torch.ones(3), "empty": torch.ones(3, device="meta")}, tmp_path / "m.bin")
    for dtype in (None, "bfloat16"):
        with pytest.raises(penstock.PenstockError, match="empty is on the meta device"):
            penstock._convert.convert([str(tmp_path / "m.bin")], tmp_path / "to", dtype=dtype)
    assert not list(tmp_path.glob("to/*"))


@pytest.mark.parametrize("kind", ["safetensors", "pickle"])
@pytest.mark.machine
def test_tensors_are_cast_a_few_at_a_time(tmp_path: Path, kind: str):
    state = {f"w{i}": torch.full((2048, 2048), float(i)) for i in range(32)}
    source = tmp_path / "from"
    source.mkdir()
    if kind == "pickle":
        torch.save(state, source / "pytorch_model.bin")
    else:
        penstock.save(state, source, fsync=False)
    code = """
import sys, threading, time, ordeal, torch
from penstock._convert import convert
before, most, over = ordeal.resident(), 0, threading.Event()
def watch():
    global most
    while not over.wait(0.002):
        most = max(most, ordeal.resident())
watcher = threading.Thread(target=watch)
watcher.start()
report = convert([sys.argv[1]], sys.argv[2], dtype="bfloat16", progress=False)
over.set()
watcher.join()
print(most - before, report.peak_staging, report.threads)
"""
    grown, staging, threads = map(int, ordeal.run(code, source, tmp_path / "to").split())
    # Of 32 tensors, 8 MiB each when they are cast, those that a thread has a part of.
    assert 0 < grown <= staging + (64 << 20) + threads * (8 << 20) < 32 * (8 << 20)
    same(dict(penstock.open(tmp_path / "to").load()), {name: tensor.bfloat16() for name, tensor in state.items()})


def test_pickles_become_safetensors(tmp_path: Path, torch_cli: Command):
    weight = torch.randn(8, 4)
    parts = [{"embed": weight, "head": weight, "view": weight[2:4]}, {"norm": torch.ones(3, dtype=torch.bfloat16)}]
    for number, part in enumerate(parts, 1):
        torch.save(part, tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
    names = {name: f"pytorch_model-0000{n}-of-00002.bin" for n, part in enumerate(parts, 1) for name in part}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    for source in (tmp_path, tmp_path / "pytorch_model.bin.index.json"):
        done = torch_cli("convert", source, tmp_path / "st")
        assert done.returncode == 0, done.stderr
        opened = penstock.open(tmp_path / "st")
        assert opened.metadata == {"format": "pt", "head": "embed"}
        found = dict(opened.load())
        assert sorted(found) == ["embed", "norm", "view"]
        assert torch.equal(found["embed"], weight)
        assert torch.equal(found["view"], weight[2:4])


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("ran",))


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, torch_cli: Command):
    torch.save({"a": Evil()}, tmp_path / "evil.bin")
    done = torch_cli("convert", tmp_path / "evil.bin", tmp_path / "out")
    assert done.returncode == 2
    assert "weights_only" in done.stderr
    assert "ran" not in done.stdout
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_is_not_converted_into_its_own_directory(small: Path, cli: Command):
    before = sorted(path.name for path in small.iterdir())
    done = cli("convert", small, small)
    assert done.returncode == 2
    assert "give another folder" in done.stderr
    assert sorted(path.name for path in small.iterdir()) == before


def test_links_in_the_directory_are_replaced_and_not_followed(tmp_path: Path, torch_cli: Command):
    state = {"w": torch.randn(33, 7)}
    blob, to = tmp_path / "blob.safetensors", tmp_path / "to"
    penstock.save_file(state, blob, fsync=False)
    before = blob.read_bytes()
    to.mkdir()
    for name in ("model.safetensors", "model-00001-of-00001.safetensors"):
        (to / name).symlink_to("../blob.safetensors")
    assert torch_cli("convert", blob, to, "--dtype", "bfloat16").returncode == 0
    assert blob.read_bytes() == before
    assert [path.name for path in to.iterdir() if not path.is_symlink()] == ["model.safetensors"]
    assert len(list(to.iterdir())) == 1
    same(dict(penstock.open(to).load()), {"w": state["w"].bfloat16()})


def test_arguments_that_make_no_sense_are_refused(small: Path, tmp_path: Path, cli: Command):
    for more in (("--max-shard-size", "big"), ("--dtype", "int8")):
        assert cli("convert", small, tmp_path / "x", *more).returncode == 2
    assert cli("convert", tmp_path / "nothing", tmp_path / "x").returncode == 3
