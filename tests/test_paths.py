"""Paths as arguments: names that are not UTF-8 go all the way, and what begins with a scheme is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import ordeal
import penstock
import penstock.numpy
import pytest
from penstock import cli

ODD = os.fsdecode(b"m\xff\xfe.safetensors")
ODD_FOLDER = os.fsdecode(b"f\xe9")


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    file = tmp_path / ODD_FOLDER / ODD
    file.parent.mkdir()
    return ordeal.write(tmp_path / "m.safetensors", 12, 5000).rename(file)


@pytest.mark.parametrize("which", ["file", "folder", "list"])
def test_a_name_that_is_not_utf8_is_listed_as_it_is(odd, which):
    source = {"file": odd, "folder": odd.parent, "list": [str(odd)]}[which]
    checkpoint = penstock.open(source)
    assert checkpoint.files == [str(odd)]
    name = checkpoint.keys()[0]
    assert checkpoint[name].file == str(odd)
    ordeal.same(checkpoint.load(framework="np"), odd)


def test_a_name_that_is_not_utf8_is_verified(odd):
    assert penstock.open(odd).verify(progress=False) == {str(odd): None}


def test_a_name_that_is_not_utf8_is_read_ahead(odd):
    with penstock.safe_open(odd, framework="np") as opened:
        for name in opened.offset_keys():
            opened.get_tensor(name)
        assert next(opened._asked) <= 5, "from the fifth tensor on the others are mapped with it"


def test_a_name_that_is_not_utf8_is_saved_to(tmp_path):
    file = tmp_path / ODD
    tensors = {"a": np.arange(5)}
    report = penstock.save_file(tensors, file)
    assert report.tensors == 1
    assert [os.fsencode(found.name) for found in tmp_path.iterdir()] == [os.fsencode(ODD)]
    np.testing.assert_array_equal(penstock.numpy.load_file(file)["a"], tensors["a"])
    penstock.save(tensors, tmp_path / ODD_FOLDER)
    assert penstock.open(tmp_path / ODD_FOLDER).keys() == ["a"]


def test_a_checkpoint_is_not_named_by_what_an_index_could_not_say(tmp_path):
    with pytest.raises(penstock.InvalidError, match="not UTF-8"):
        penstock.save({"a": np.arange(5)}, tmp_path, name=ODD)
    assert list(tmp_path.iterdir()) == []


def test_an_error_names_a_file_that_is_not_utf8(odd):
    odd.write_bytes(b"123")
    with pytest.raises(penstock.TruncatedError) as e:
        penstock.open(odd)
    assert e.value.path == str(odd)


def test_the_command_line_writes_the_bytes_of_the_name(odd):
    command = [sys.executable, "-m", "penstock.cli"]
    for arguments in (["inspect", odd], ["verify", odd], ["verify", odd, "--json"]):
        done = subprocess.run([*command, *arguments], capture_output=True, env={**os.environ, "COLUMNS": "500"})
        assert done.returncode == 0, done.stderr
        assert os.fsencode(odd) in done.stdout or b"\\udcff" in done.stdout


# Schemes

URL = "oss://bucket/x"
TENSORS = {"a": np.arange(3)}


def _fastsafetensors():
    pytest.importorskip("torch")
    from penstock.compat import fastsafetensors

    return fastsafetensors


def _instanttensor():
    pytest.importorskip("torch")
    from penstock.compat import instanttensor

    return instanttensor


def _torch(way):
    torch = pytest.importorskip("torch")
    import penstock.torch

    return way(penstock.torch, torch.nn.Linear(2, 2))


def _into_patched(way):
    pytest.importorskip("safetensors")
    import safetensors.numpy

    with penstock.patch():
        way(safetensors)


PLACES = {
    "open": ("source", lambda: penstock.open(URL)),
    "open a list": ("source", lambda: penstock.open([URL])),
    "open a Path": ("source", lambda: penstock.open(Path(URL))),
    "save": ("directory", lambda: penstock.save(TENSORS, URL)),
    "save to a Path": ("directory", lambda: penstock.save(TENSORS, Path(URL))),
    "save_file": ("filename", lambda: penstock.save_file(TENSORS, URL)),
    "safe_open": ("filename", lambda: penstock.safe_open(URL, framework="np")),
    "load_file": ("filename", lambda: penstock.load_file(URL, framework="np")),
    "numpy.load_file": ("filename", lambda: penstock.numpy.load_file(URL)),
    "numpy.save_file": ("filename", lambda: penstock.numpy.save_file(TENSORS, URL)),
    "patched safe_open": ("filename", lambda: _into_patched(lambda s: s.safe_open(URL, framework="np"))),
    "patched load_file": ("filename", lambda: _into_patched(lambda s: s.numpy.load_file(URL))),
    "patched save_file": ("filename", lambda: _into_patched(lambda s: s.numpy.save_file(TENSORS, URL))),
    "fastsafetensors": (
        "filenames",
        lambda: _fastsafetensors().SafeTensorsFileLoader(None, "cpu").add_filenames({0: [URL]}),
    ),
    "fastsafe_open": ("filenames", lambda: _fastsafetensors().fastsafe_open([URL]).__enter__()),
    "ParallelLoader": (
        "hf_weights_files",
        lambda: list(_fastsafetensors().ParallelLoader(None, [URL]).iterate_weights()),
    ),
    "AutoLoader": ("hf_weights_files", lambda: list(_fastsafetensors().AutoLoader(None, [URL]).iterate_weights())),
    "save_sharded": ("base", lambda: _fastsafetensors().save_sharded([], URL)),
    "InstantTensor": ("filename", lambda: _instanttensor().safe_open([URL], framework="pt", device="cpu")),
    "torch.load_file": ("filename", lambda: _torch(lambda face, _: face.load_file(URL))),
    "torch.save_file": ("filename", lambda: _torch(lambda face, model: face.save_file(model.state_dict(), URL))),
    "torch.load_model": ("filename", lambda: _torch(lambda face, model: face.load_model(model, URL))),
    "torch.save_model": ("filename", lambda: _torch(lambda face, model: face.save_model(model, URL))),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_scheme_is_refused_by_name_and_nothing_is_made(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    argument, call = PLACES[place]
    with pytest.raises(penstock.InvalidError, match="oss:// is not supported") as e:
        call()
    assert str(e.value).startswith(f"{argument}=")
    assert isinstance(e.value, FileNotFoundError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", URL],
        ["load", URL],
        ["verify", URL],
        ["verify", ".", "--digests", URL],
        ["warm", URL],
        ["evict", URL],
        ["doctor", URL],
        ["convert", URL, "there"],
        ["convert", ".", URL],
        ["synth", "gpt2", URL],
        ["trace", URL],
        ["trace", "file", "--html", URL],
        ["load", ".", "--trace", URL],
        ["load", ".", "-o", f"trace={URL}"],
    ],
    ids=" ".join,
)
def test_the_command_line_refuses_a_scheme(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == cli.USAGE
    assert "oss:// is not supported" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_scheme_is_refused_for_a_trace(tmp_path, monkeypatch):
    file = ordeal.write(tmp_path / "m.safetensors", 2, 1000)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(penstock.InvalidError, match="trace="):
        penstock.open(file).load(framework="np", options={"trace": URL})


def test_a_folder_with_a_colon_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ordeal.write(tmp_path / "oss:" / "x" / "model.safetensors", 2, 1000)
    for source in ("oss:/x", "./oss://x", Path("oss:/x"), tmp_path / "oss:" / "x", f"{tmp_path}/oss://x"):
        assert len(penstock.open(source)) == 2
    with pytest.raises(penstock.InvalidError, match=r"'\./oss:/x'"):
        penstock.open("oss://x")


@pytest.mark.parametrize(
    ("url", "save", "open"),
    [
        ("file:///m", "without file://", "without file://"),
        ("hf://org/name", "`hf upload REPOSITORY FOLDER`", "only where a checkpoint is opened, as one string"),
    ],
)
def test_what_to_do_instead_is_said(tmp_path, monkeypatch, url, save, open):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(penstock.InvalidError, match=save):
        penstock.save(TENSORS, url)
    with pytest.raises(penstock.InvalidError, match=open):
        penstock.open([url, "other"])
