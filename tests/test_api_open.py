"""Opening: what a source may be, and what a checkpoint says of itself."""

import copy
import os
import pickle
import shutil
from html.parser import HTMLParser
from pathlib import Path

import penstock
import pytest
from conftest import LAYOUT, Oracle, descriptors
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor

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


# As a mapping of names to what the header says


def test_items_and_values_are_what_indexing_gives_in_file_order(opened):
    assert opened.items() == [(name, opened[name]) for name in opened.keys()]  # noqa: SIM118
    assert opened.values() == [opened[name] for name in opened]
    assert dict(opened) == dict(opened.items())


def test_items_of_a_part_of_a_checkpoint_read_nothing(small, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(small, copied)
    checkpoint = penstock.open(copied)
    shutil.rmtree(copied)
    assert len(checkpoint.items()) == len(checkpoint.values()) == 11


def test_get_is_none_or_the_default_for_a_name_that_is_not_there(opened):
    assert opened.get("step") == opened["step"]
    assert opened.get("nothing") is None
    assert opened.get("nothing", 3) == 3


# In a notebook


def test_a_notebook_completes_the_names_of_tensors(opened):
    assert opened._ipython_key_completions_() == opened.keys()


def test_ipython_completes_a_key(opened):
    completer = pytest.importorskip("IPython.core.completer")
    shell = completer.IPCompleter(namespace={"checkpoint": opened}, use_jedi=False)
    with completer.provisionalcompleter():
        typed = 'checkpoint["layers.1.'
        found = [match.text for match in shell.completions(typed, len(typed))]
    assert [word.rstrip('"]') for word in found] == ["layers.1.attn.bias", "layers.1.attn.weight"]


class Table(HTMLParser):
    """The text of a page, and whether every element that was opened was closed in its turn."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_notebook_shows_files_dtypes_sizes_and_the_first_tensors(opened, small):
    shown = Table(opened._repr_html_())
    text = " ".join(shown.words)
    assert "11 tensors" in text and "3 files" in text
    for path in sorted(small.glob("*.safetensors")):
        assert str(path) in text
    for dtype in {opened[name].dtype for name in opened}:
        assert dtype in shown.words
    for name in opened:
        assert name in shown.words
    assert "[64, 48]" in shown.words and "6.14 kB" in shown.words
    assert "format" in text and "pt" in text


def test_a_notebook_shows_the_beginning_of_a_large_checkpoint(tmp_path):
    for shard in range(30):
        tensors = [Tensor(f"t{shard}.{i}", "U8", (1,)) for i in range(30)]
        synth.write_file(tmp_path / f"model-{shard:05}.safetensors", tensors)
    text = " ".join(Table(penstock.open(tmp_path)._repr_html_()).words)
    assert "t0.0" in text and "t29.29" not in text
    assert "model-00000.safetensors" in text and "model-00029.safetensors" not in text
    assert "20 more files" in text and "880 more tensors" in text


def test_what_stands_in_a_file_cannot_be_markup_in_a_notebook(tmp_path):
    folder = tmp_path / "<i>&amp;"
    folder.mkdir()
    path = synth.write_file(
        folder / "model.safetensors",
        [Tensor('<script>alert("1")</script>', "U8", (1,))],
        metadata={"<em>": "<img src=x onerror=alert(1)>"},
    )
    shown = Table(penstock.open(path)._repr_html_())
    assert not {"script", "em", "img", "i"} & shown.tags
    assert '<script>alert("1")</script>' in shown.words
    assert any("<i>&amp;" in word for word in shown.words)


def test_a_notebook_shows_a_file_name_that_is_not_utf_8(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    Path(folder).mkdir()
    page = penstock.open(synth.write_file(Path(folder) / "a.safetensors", [Tensor("a", "U8", (1,))]))._repr_html_()
    assert "caf\ufffd" in page
    page.encode()


def test_a_checkpoint_without_tensors_has_a_summary_too(write):
    assert "0 tensors" in penstock.open(write())._repr_html_()
