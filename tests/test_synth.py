"""Writing checkpoints: what lies on disk, what is refused, what an interruption leaves; and `penstock synth`."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import penstock
import pytest
import torch
from conftest import raw
from penstock.bench import reference
from penstock.synthetic import layouts, synth
from penstock.synthetic.synth import Layout, Tensor
from safetensors import safe_open

MIXED = [
    Tensor("a", "F32", (3_000_001,)),
    Tensor("mask", "BOOL", (2_500_003,)),
    Tensor("hole", "U8", (9_000_000,), hole=True),
    Tensor("b", "BF16", (1001, 77)),
    Tensor("flag", "BOOL", ()),
    Tensor("empty", "F16", (0, 3)),
    Tensor("c", "U8", (11_000_000,)),
]
TWO = Layout("two", ((Tensor("a", "F32", (9,)),), (Tensor("b", "F32", (3_000_000,)),)))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_bytes_are_random_and_bools_are_bools(tmp_path):
    path = synth.write_file(tmp_path / "x.safetensors", MIXED, seed=5)
    held = {name: reference.raw(entry) for name, entry in reference.entries_of(path).items()}
    assert {name: data.nbytes for name, data in held.items()} == {tensor.name: tensor.nbytes for tensor in MIXED}
    for name in ("a", "b", "c"):
        data = held[name]
        assert 120 < data.mean() < 135
        # No part of it is zeros, none is another part again
        pieces = {data[at : at + 64].tobytes() for at in range(0, data.size - 64, 64)}
        assert len(pieces) == len(range(0, data.size - 64, 64))
        assert bytes(64) not in pieces
    assert set(held["mask"].tolist()) == {0, 1}
    assert set(held["flag"].tolist()) <= {0, 1}
    assert not held["hole"].any()


def test_the_same_seed_gives_the_same_bytes_with_any_number_of_threads(tmp_path, monkeypatch):
    one = synth.write_file(tmp_path / "one.safetensors", MIXED, seed=(1, 2)).read_bytes()
    monkeypatch.setattr(synth, "_THREADS", 1)
    assert synth.write_file(tmp_path / "two.safetensors", MIXED, seed=(1, 2)).read_bytes() == one
    assert synth.write_file(tmp_path / "three.safetensors", MIXED, seed=(1, 3)).read_bytes() != one


def test_holes_take_no_room(tmp_path):
    path = synth.write_file(tmp_path / "x.safetensors", [Tensor("hole", "U8", (1 << 30,), hole=True)])
    assert path.stat().st_size > 1 << 30
    assert path.stat().st_blocks * 512 < 1 << 20


def test_a_checkpoint_in_place_is_left_alone_and_another_of_ours_replaced(tmp_path):
    folder = synth.write(TWO, tmp_path / "x")
    first = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert synth.in_place(TWO, folder)
    synth.write(TWO, folder)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == first
    assert not synth.in_place(TWO, folder, seed=1)
    (folder / "lost+found").mkdir()
    synth.write(Layout("one", (TWO.shards[0],)), folder)
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", ".synth.json", "lost+found"}


def test_files_of_somebody_else_are_not_touched(tmp_path):
    (tmp_path / "model-00002-of-00002.safetensors").write_text("precious")
    with pytest.raises(penstock.InvalidError, match="not written here"):
        synth.write(TWO, tmp_path)
    assert files(tmp_path) == {"model-00002-of-00002.safetensors": b"precious"}


@pytest.mark.parametrize("name", ["mine.txt", "other.safetensors", ".hidden", "config.json"])
@pytest.mark.parametrize("ours", [True, False])
def test_nothing_is_written_beside_files_of_somebody_else(tmp_path, cli, name, ours):
    folder = tmp_path / "x"
    if ours:
        synth.write(TWO, folder)
    else:
        folder.mkdir()
    (folder / name).write_text("precious")
    before = files(folder)
    with pytest.raises(penstock.InvalidError, match="not written here: choose another folder") as caught:
        synth.write(Layout("one", (TWO.shards[0],)), folder)
    assert name in str(caught.value)
    run = cli("synth", "gpt2", folder, "--layers", "1", "--scale", "0.01")
    assert run.returncode == 2
    assert name in run.stderr
    assert files(folder) == before


def test_too_little_space_is_told_before_anything_is_touched(tmp_path, monkeypatch):
    synth.write(TWO, tmp_path / "x")
    before = files(tmp_path / "x")
    monkeypatch.setattr(synth.os, "statvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=4096))
    for folder in ("x", "y/z"):
        with pytest.raises(penstock.LimitError, match=r"90\.\d+ MB are needed for all-minilm-l6-v2") as caught:
            synth.write(layouts.build("all-minilm-l6-v2"), tmp_path / folder)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.path == str(tmp_path / folder)
    assert files(tmp_path / "x") == before
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("new", [True, False])
def test_nothing_is_left_of_a_write_that_failed(tmp_path, monkeypatch, new):
    folder = tmp_path / "x"
    if not new:
        folder.mkdir()
    written = []

    def pwrite(fd, data, offset):
        written.append(len(data))
        if len(written) > 2:  # the first file is whole, the second begun
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(fd, data)

    monkeypatch.setattr(synth, "os", SimpleNamespace(**{**vars(os), "pwrite": pwrite}))
    with pytest.raises(OSError, match="No space"):
        synth.write(TWO, folder)
    assert len(written) > 2
    assert folder.exists() is not new
    assert new or not list(folder.iterdir())


def test_what_a_killed_write_left_is_replaced(tmp_path):
    folder = tmp_path / "x"
    code = (
        "import os\n"
        "from penstock.synthetic import synth\n"
        "from penstock.synthetic.synth import Layout, Tensor\n"
        "two = Layout('two', ((Tensor('a', 'F32', (9,)),), (Tensor('b', 'F32', (3_000_000,)),)))\n"
        "calls = []\n"
        "def _write_at(*arguments):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 1:\n"
        "        os._exit(9)\n"
        "synth._write_at = _write_at\n"
        f"synth.write(two, {str(folder)!r})\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert "model-00001-of-00002.safetensors" in files(folder)
    synth.write(TWO, folder)
    assert synth.in_place(TWO, folder)
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("name", layouts.MODELS)
def test_penstock_and_safetensors_read_a_small_one_of_every_model(tmp_path, name):
    layout = layouts.build(name, layers=min(4, len(layouts.model(name).layers)), scale=0.002)
    folder = synth.write(layout, tmp_path / name)
    checkpoint = penstock.open(folder)
    assert sorted(Path(file).name for file in checkpoint.files) == sorted(layout.files)
    assert not checkpoint.warnings
    assert {(t, checkpoint[t].dtype, checkpoint[t].shape) for t in checkpoint} == {
        (t.name, t.dtype, t.shape) for t in layout.tensors
    }
    state = checkpoint.load("cpu")
    for file, shard in zip(layout.files, layout.shards, strict=True):
        with safe_open(folder / file, framework="pt") as theirs:
            assert sorted(theirs.keys()) == sorted(tensor.name for tensor in shard)
            for tensor in shard[:: max(1, len(shard) // 50)]:
                expected = theirs.get_tensor(tensor.name)
                assert state[tensor.name].dtype == expected.dtype
                assert state[tensor.name].shape == expected.shape == torch.Size(tensor.shape)
                assert raw(state[tensor.name]) == raw(expected)


def test_the_command_writes_a_checkpoint_and_says_what_it_cut(cli, tmp_path):
    run = cli("synth", "all-minilm-l6-v2", tmp_path / "x", "--nbytes", "60MB", "--seed", 3)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"{tmp_path / 'x'}: all-minilm-l6-v2, ")
    assert "cut to 1 of 6 layers\n" in run.stdout
    assert penstock.open(tmp_path / "x").nbytes <= 60e6
    assert "in place already" in cli("synth", "all-minilm-l6-v2", tmp_path / "x", "--nbytes=60MB", "--seed=3").stdout
    run = cli("synth", "all-minilm-l6-v2", tmp_path / "x", "--scale", 0.01, "--layers", 6, "--align", 64, "--json")
    document = json.loads(run.stdout)
    assert (document["written"], document["tensors"], document["files"]) == (True, 104, ["model.safetensors"])
    assert document["cut"] == "the longest dimension of every tensor times 0.01"
    assert penstock.open(tmp_path / "x").nbytes == document["nbytes"]
    assert reference.entries_of(tmp_path / "x")["embeddings.position_ids"].offset % 64 == 0


def test_the_command_lists_what_there_is(cli):
    listed = json.loads(cli("synth", "--list", "--json").stdout)["layouts"]
    assert [layout["name"] for layout in listed] == list(layouts.MODELS)
    assert {"files": 163, "tensors": 91991, "nbytes": 688_574_839_360}.items() <= listed[-3].items()
    assert "kimi-k2" in cli("synth", "--list").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gpt3", "x"), "there are all-minilm-l6-v2, gpt2"),
        (("gpt2",), "NAME of a model and a FOLDER"),
        (("gpt2", "x", "--nbytes", "3 pounds"), "such as 3GB"),
        (("gpt2", "x", "--nbytes", "1e3"), "no layer of gpt2 fits"),
        (("gpt2", "x", "--scale", "2"), "at most 1"),
    ],
)
def test_wrong_usage_of_the_command_exits_with_2(cli, tmp_path, arguments, said):
    name, *rest = arguments
    run = cli("synth", name, *(tmp_path / "x" if word == "x" else word for word in rest))
    assert run.returncode == 2
    assert said in run.stderr
    assert not (tmp_path / "x").exists()


def test_an_interrupted_command_leaves_nothing(tmp_path):
    folder = tmp_path / "x"
    command = [sys.executable, "-m", "penstock.cli", "synth", "llama-2-7b", str(folder), "--nbytes", "2GB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        partial = folder / "model.safetensors.partial"
        until = time.monotonic() + 30
        while not (partial.exists() and partial.stat().st_blocks > 2000) and time.monotonic() < until:
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "penstock: interrupted\n")
    assert not folder.exists()


def test_the_command_needs_numpy_and_the_rest_of_the_command_line_does_not(python):
    code = "import sys\nsys.modules['numpy'] = None\nfrom penstock import cli\nsys.exit(cli.main(sys.argv[1:]))"
    run = python(code, "synth", "--list")
    assert run.returncode == 3
    assert run.stderr == "penstock synth: penstock synth needs numpy, which is not installed here: pip install numpy\n"
    assert python(code, "doctor", "--no-measure").returncode == 0
