"""Opening: what a source may be, and what a checkpoint says of itself."""

import copy
import pickle
from pathlib import Path

import penstock
import pytest
from conftest import LAYOUT, Oracle, descriptors
from penstock.bench.synth import Tensor

NAMES = [tensor.name for tensor in LAYOUT.tensors]


@pytest.mark.parametrize(
    "source",
    [
        lambda folder: folder,
        lambda folder: str(folder),
        lambda folder: folder / "model.safetensors.index.json",
        lambda folder: sorted(folder.glob("*.safetensors")),
        lambda folder: [str(path) for path in sorted(folder.glob("*.safetensors"))],
        lambda folder: tuple(sorted(folder.glob("*.safetensors"))),
    ],
    ids=["folder", "str", "index", "paths", "strings", "tuple"],
)
def test_every_kind_of_source_gives_the_same_checkpoint(small, source):
    checkpoint = penstock.open(source(small))
    assert checkpoint.keys() == NAMES
    assert len(checkpoint.files) == 3
    Oracle(small).same(checkpoint.load(framework="pt"))


def test_a_checkpoint_behaves_like_a_mapping(opened):
    assert len(opened) == len(NAMES)
    assert list(opened) == NAMES
    assert "step" in opened
    assert "stepp" not in opened
    assert 3 not in opened
    assert opened.nbytes == LAYOUT.nbytes
    assert opened.metadata == {"format": "pt"}
    assert opened.warnings == []


def test_tensor_info_says_where_the_bytes_are(opened, small):
    oracle = Oracle(small)
    for name in opened:
        info, entry = opened[name], oracle.entries[name]
        assert (info.name, info.dtype, info.shape, info.nbytes) == (name, entry.dtype, entry.shape, entry.nbytes)
        assert Path(info.file) == entry.file
        assert info.offsets == (entry.offset, entry.offset + entry.nbytes)
        with Path(info.file).open("rb") as file:
            file.seek(info.offsets[0])
            assert file.read(info.nbytes) == oracle[name]


def test_tensor_info_is_a_read_only_value(opened):
    info = opened["step"]
    with pytest.raises(AttributeError):
        info.dtype = "F32"
    assert info == opened["step"] == copy.copy(info) == pickle.loads(pickle.dumps(info))
    assert hash(info) == hash(opened["step"])
    assert info.shape == ()


def test_metadata_of_a_file_without_any_is_empty(write):
    assert penstock.open(write(Tensor("a", "U8", (4,)))).metadata == {}


def test_an_unknown_name_is_a_key_error_that_helps(opened):
    with pytest.raises(KeyError) as caught:
        opened["layers.0.attn.weigth"]
    error = caught.value
    assert isinstance(error, penstock.UnknownTensorError)
    assert isinstance(error, penstock.SafetensorError)
    assert "did you mean layers.0.attn.weight?" in str(error)
    assert "model-00001-of-00003.safetensors" in str(error)


@pytest.mark.parametrize("source", [3, None, b"x.safetensors", [3], object()])
def test_something_that_is_no_path_is_a_value_error(source):
    with pytest.raises(ValueError, match="source="):
        penstock.open(source)


def test_a_missing_file_is_a_file_not_found_error_with_its_name(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        penstock.open(tmp_path / "nothing.safetensors")
    assert isinstance(caught.value, penstock.PenstockError)
    assert caught.value.kind == "NotFound"
    assert "nothing.safetensors" in str(caught.value)
    assert caught.value.path.endswith("nothing.safetensors")


def test_a_broken_header_is_a_safetensor_error_with_the_files_name(tmp_path):
    path = tmp_path / "broken.safetensors"
    path.write_bytes((50).to_bytes(8, "little") + b"{" + b" " * 49)
    with pytest.raises(penstock.HeaderError) as caught:
        penstock.open(path)
    assert isinstance(caught.value, (penstock.SafetensorError, ValueError))
    assert "broken.safetensors" in str(caught.value)


def test_our_errors_are_caught_as_safetensors_own(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"1234567")
    with pytest.raises(safetensors.SafetensorError):
        penstock.open(path)


def test_a_checkpoint_is_a_harmless_context_manager(small):
    with penstock.open(small) as checkpoint:
        pass
    checkpoint.close()
    assert len(checkpoint.load(names="step")) == 1


def test_a_checkpoint_keeps_no_descriptor(small):
    before = len(descriptors())
    checkpoints = [penstock.open(small) for _ in range(5)]
    assert len(descriptors()) == before
    assert "11 tensors" in repr(checkpoints[0])
