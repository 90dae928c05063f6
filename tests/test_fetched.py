"""Models at addresses: the small files beside their weights, for engines that want a folder."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import penstock
import pytest
from conftest import LAYOUT
from penstock import _core
from penstock.integrations import _fetched
from penstock.integrations._pins import PINS, pinned_in
from penstock.integrations._remote import RemoteWeights, file_name
from s3_server import KEYS, Bucket, error, serving
from test_gcs import Google
from test_hub_network import COMMIT, Hub, home, hub  # noqa: F401
from test_s3 import nothing_in_the_environment  # noqa: F401

KEY, SECRET = next(iter(KEYS.items()))
FOLDER = "s3://bucket/m/"
INDEX = "model.safetensors.index.json"
SMALL = {
    "config.json": b'{"model_type": "made-up"}',
    "tokenizer.json": b"{}",
    "tokenizer.model.v3": b"\0",
    "tokenizer.tok": b"\0",
    "merges.txt": b"",
    "chat_template.jinja": b"{{ messages }}",
}
OTHERS = {
    "modeling.py": b"raise SystemExit",
    "tokenizer.py": b"raise SystemExit",
    "tokenizer.bin": b"weights",
    "tokenizer.safetensors": b"weights",
    "README.md": b"# A model",
    "pytorch_model.bin": b"weights",
    "pytorch_model.bin.index.json": b"{}",
}


@pytest.fixture
def bucket(small: Path) -> Iterator[Bucket]:
    """A model, with more names than a page of a listing has."""
    weights = {path.name: path.read_bytes() for path in small.glob("[!.]*")}
    with serving(Bucket({f"m/{name}": content for name, content in (weights | SMALL | OTHERS).items()})) as bucket:
        yield bucket


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made. Nothing is left there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    _fetched.remove_all()
    assert list(folder.iterdir()) == []


def test_without_a_folder_to_write_to_the_error_says_what_to_do(bucket, monkeypatch):
    """As in a pod whose root is read-only, without an emptyDir."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    with pytest.raises(penstock.WriteError, match=r"can be written to.*/proc.*emptyDir.*TMPDIR") as caught:
        _fetched.fetch("s3://bucket/m/", settings(bucket))
    assert isinstance(caught.value, OSError)
    with pytest.raises(penstock.WriteError, match="TMPDIR"):
        RemoteWeights("s3://bucket/m/", settings(bucket))


def settings(bucket: Bucket, **more: Any) -> Any:
    return {"endpoint": bucket.endpoint, "access_key_id": KEY, "secret_access_key": SECRET, **more}


def held(folder: str) -> dict[str, bytes]:
    """The files in a folder, by their paths."""
    root = Path(folder)
    files = [path for path in root.rglob("*") if path.is_file() and path.name != PINS]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


# What the core reads


def test_names_and_contents(bucket, small):
    storage = settings(bucket)
    names = [path.name for path in small.glob("[!.]*")]
    assert sorted(_core.names_in(FOLDER, None, storage)) == sorted([*names, *SMALL, *OTHERS])
    assert sorted(_core.names_in(str(small))) == sorted(path.name for path in small.iterdir())
    files = [*SMALL, INDEX]
    expected = [bucket.objects[f"m/{name}"] for name in files]
    assert _core.contents([FOLDER + name for name in files], 1 << 20, None, storage) == expected
    assert _core.contents([str(small / INDEX)], 1 << 20) == [(small / INDEX).read_bytes()]
    assert _core.contents([], 1) == []
    assert all(key == KEY for _, key in bucket.asked)


def test_one_request_for_each_small_file(bucket):
    _core.contents([FOLDER + name for name in SMALL], 1 << 20, None, settings(bucket, connections=1))
    assert len(bucket.asked) == len(SMALL)


def test_what_is_too_long_or_not_there_is_an_error_that_names_it(bucket, small):
    size = len(SMALL["config.json"])
    assert _core.contents([f"{FOLDER}config.json"], size, None, settings(bucket)) == [SMALL["config.json"]]
    with pytest.raises(penstock.UnsupportedError, match=rf"has {size} bytes, and {size - 1} are read") as caught:
        _core.contents([f"{FOLDER}merges.txt", f"{FOLDER}config.json"], size - 1, None, settings(bucket))
    assert caught.value.path == f"{FOLDER}config.json"
    with pytest.raises(penstock.NotFoundError, match="NoSuchKey") as caught_too:
        _core.contents([f"{FOLDER}none.json"], 1, None, settings(bucket))
    assert caught_too.value.path == f"{FOLDER}none.json"
    with pytest.raises(penstock.NotFoundError, match="no object whose key begins with this"):
        _core.names_in("s3://bucket/none/", None, settings(bucket))
    for file in (str(small / INDEX), f"{FOLDER}{INDEX}"):
        with pytest.raises(penstock.InvalidError, match="this is a file, not a folder"):
            _core.names_in(file, None, settings(bucket))
    with pytest.raises(penstock.NotFoundError, match="web servers list no files"):
        _core.names_in("https://127.0.0.1:9/folder/")


# The folder


@pytest.mark.parametrize("place", [FOLDER, "s3://bucket/m", f"{FOLDER}{INDEX}"])
@pytest.mark.parametrize("code", [False, True])
def test_a_folder_has_what_an_engine_wants_besides_weights(bucket, small, temporary, place, code):
    folder, weights = _fetched.fetch(place, settings(bucket), code=code)
    assert weights == place
    found = held(folder)
    headers = {name: found.pop(name) for name in LAYOUT.files}
    trusted = {name: content for name, content in OTHERS.items() if code and name.endswith(".py")}
    assert found == {**SMALL, INDEX: (small / INDEX).read_bytes(), **trusted}
    about = Path(folder).stat()
    assert Path(folder).parent == temporary and stat.S_IMODE(about.st_mode) == 0o700
    for name, header in headers.items():
        whole = (small / name).read_bytes()
        length = 8 + int.from_bytes(whole[:8], "little")
        assert len(header) == 8 + int.from_bytes(header[:8], "little")
        assert json.loads(header[8:]) == json.loads(whole[8:length])


def test_a_bucket_of_google(small, temporary):
    weights = {f"m/{path.name}": path.read_bytes() for path in small.glob("[!.]*")}
    with serving(Google({**weights, **{f"m/{name}": content for name, content in SMALL.items()}})) as bucket:
        storage: Any = {"endpoint": bucket.endpoint, "anonymous": True}
        folder, place = _fetched.fetch("gs://bucket/m", storage)
    assert place == "gs://bucket/m"
    assert held(folder).keys() == {*SMALL, INDEX, *LAYOUT.files}


def test_nothing_can_be_loaded_from_it(bucket, temporary):
    safetensors = pytest.importorskip("safetensors")
    folder, _ = _fetched.fetch(FOLDER, settings(bucket))
    for name in LAYOUT.files:
        with pytest.raises(safetensors.SafetensorError, match=r"MetadataIncompleteBuffer|not fully covered"):
            safetensors.safe_open(Path(folder, name), "np")
    with pytest.raises(penstock.TruncatedError):
        penstock.open(folder)


def test_modules_of_a_sentence_transformers_model(bucket, temporary):
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Normalize"}, {"path": "../other"}]
    bucket.objects |= {"m/modules.json": json.dumps(modules).encode(), "m/1_Pooling/config.json": b"{}"}
    bucket.objects["other/config.json"] = b"no"
    folder, _ = _fetched.fetch(FOLDER, settings(bucket))
    assert {name for name in held(folder) if "/" in name} == {"1_Pooling/config.json"}


TOO_LONG = b" " * (_fetched.MOST + 1)


def fetched(bucket: Bucket, code: bool = False, **more: Any) -> set[str]:
    folder, _ = _fetched.fetch(FOLDER, settings(bucket), code=code, **more)
    return held(folder).keys() - {*SMALL, INDEX, *LAYOUT.files, "modeling.py", "tokenizer.py"}


@pytest.mark.parametrize("name", ["trainer_state.json", "eval_results.json", "log.txt", "notes.yaml", "x.vocab"])
def test_what_no_engine_needs_may_be_too_long(bucket, temporary, caplog, name):
    bucket.objects |= {f"m/{name}": TOO_LONG, "m/training.json": b"{}"}
    assert fetched(bucket) == {"training.json"}
    (said,) = [text for text in caplog.messages if text.startswith("penstock: ")]
    assert f"'{name}' of {FOLDER} is passed over" in said and "67108865 bytes" in said


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "vocab.json", "merges.txt", "spiece.model"])
def test_what_an_engine_needs_may_not(bucket, temporary, name):
    bucket.objects[f"m/{name}"] = TOO_LONG
    with pytest.raises(penstock.UnsupportedError, match="67108865 bytes, and 67108864 are read") as caught:
        fetched(bucket)
    assert caught.value.path == f"{FOLDER}{name}"


@pytest.mark.parametrize("name", ["x" * 251 + ".json", "ü" * 124 + ".txt", f"{'y' * 600}.jinja"])
def test_what_no_engine_needs_may_have_a_name_that_no_file_has(bucket, temporary, caplog, name):
    bucket.objects[f"m/{name}"] = b"{}"
    assert fetched(bucket) == set()
    (said,) = [text for text in caplog.messages if text.startswith("penstock: ")]
    assert repr(name[:80])[:-1] in said and "no file can be called so" in said


@pytest.mark.parametrize("name", ["with a\ttab.json", "\t.txt"])
def test_a_name_with_a_tab_is_a_name(bucket, temporary, caplog, name):
    bucket.objects[f"m/{name}"] = b"{}"
    assert fetched(bucket) == {name}
    assert [text for text in caplog.messages if text.startswith("penstock: ")] == []


def test_a_first_byte_that_is_refused_without_a_size_is_no_empty_object(bucket, temporary):
    bare = error(416, "InvalidRange", "The requested range is not satisfiable")
    bucket.script = lambda target, number: bare if target.endswith((".txt", ".json")) else None
    for name in ("merges.txt", "config.json"):
        with pytest.raises(penstock.ReadError, match="neither bytes nor a size"):
            _core.contents([FOLDER + name], 1 << 20, None, settings(bucket))
    # A listing says how long they are
    assert "merges.txt" in _core.names_in(FOLDER, None, settings(bucket))
    assert _core.contents([f"{FOLDER}merges.txt"], 1 << 20, None, settings(bucket)) == [SMALL["merges.txt"]] == [b""]
    with pytest.raises(penstock.ReadError, match="neither bytes nor a size"):
        _core.contents([f"{FOLDER}config.json"], 1 << 20, None, settings(bucket))


def test_an_index_that_was_left_over_is_not_copied(bucket, small, temporary):
    """An engine would look for its shards, and find nothing."""
    whole = {name: small.joinpath(name).read_bytes() for name in LAYOUT.files}
    for name in whole:
        del bucket.objects[f"m/{name}"]
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    bucket.objects["m/model.safetensors"] = len(header).to_bytes(8, "little") + header + b"x"
    folder, _ = _fetched.fetch(FOLDER, settings(bucket))
    assert held(folder).keys() == {*SMALL, "model.safetensors"}


FOLDERS = (
    "additional_chat_templates/tool_use.jinja",
    "additional_chat_templates/rag.jinja",
    "qformer_tokenizer/tokenizer.json",
    "decoder_tokenizer/vocab.txt",
    "image_processor/preprocessor_config.json",
    "my_own_tokenizer/tokenizer_config.json",
    "spoken words/vocab.json",  # its name stands nowhere
)


def test_a_folder_that_has_only_folders_has_their_names(bucket):
    bucket.objects["above/below/config.json"] = b"{}"
    assert _core.names_in("s3://bucket/above/", None, settings(bucket), folders=True) == ["below/"]
    for place, folders in (("s3://bucket/above/", False), ("s3://bucket/beyond/", True)):
        with pytest.raises(penstock.NotFoundError, match="no object whose key begins with this"):
            _core.names_in(place, None, settings(bucket), folders=folders)


def test_folders_that_engines_read(bucket, temporary):
    bucket.objects |= {f"m/{path}": b"{}" for path in FOLDERS}
    bucket.objects |= {"m/vocab.bpe": b"#version", "m/model.yaml": b"a: 1", "m/checkpoint-10/config.json": b"{}"}
    bucket.objects |= {"m/onnx/config.json": b"{}", "m/checkpoint-10/tokenizer_config.json": b"{}"}
    bucket.objects["m/additional_chat_templates/model.safetensors"] = b"no"
    plain = {"vocab.bpe", "model.yaml"}
    assert fetched(bucket) == {*plain, *(path for path in FOLDERS if path.startswith("additional"))}
    bucket.objects["m/processor_config.json"] = json.dumps({"my_own_tokenizer": {}, "processor_class": "X"}).encode()
    assert fetched(bucket) == {*plain, "processor_config.json", *FOLDERS}


def test_packages_that_python_files_import(bucket, temporary):
    """As transformers follows imports, and no further."""
    files = {
        "modeling.py": "from .layers.attention import A\nfrom . import other\nimport torch.nn\n",
        "other.py": "  from .helpers import b\n",
        "layers/__init__.py": "from .deep.er import C\n",
        "layers/attention.py": "from ..kernels import D\nfrom ...outside import E\n",
        "layers/deep/er.py": "",
        "kernels/__init__.py": "",
        "helpers/__init__.py": "import .more\n",
        "helpers/more/x.py": "",
        "unused/__init__.py": "",
        "layers/weights.bin": "no",
        "layers/config.json": "{}",
    }
    bucket.objects |= {f"m/{path}": text.encode() for path, text in files.items()}
    expected = {
        "other.py", "layers/__init__.py", "layers/attention.py", "layers/deep/er.py", "kernels/__init__.py",
        "helpers/__init__.py", "helpers/more/x.py",
    }  # fmt: skip
    assert fetched(bucket, code=True) == expected
    assert fetched(bucket) == set()


@pytest.mark.parametrize("sharded", [False, True])
def test_mistrals_own_files(bucket, small, temporary, sharded):
    """They lie beside those of transformers; `files` says which are meant."""
    shards = [name for name in LAYOUT.files if name.endswith(".safetensors")]
    own = {name: f"consolidated-{number:05}.safetensors" for number, name in enumerate(shards)}
    index = json.loads((small / INDEX).read_bytes())
    index["weight_map"] = {tensor: own[name] for tensor, name in index["weight_map"].items()}
    if sharded:
        bucket.objects |= {f"m/{name}": (small / old).read_bytes() for old, name in own.items()}
        bucket.objects["m/consolidated.safetensors.index.json"] = json.dumps(index).encode()
        expected = set(own.values())
    else:
        bucket.objects["m/consolidated.safetensors"] = (small / shards[0]).read_bytes()
        expected = {"consolidated.safetensors"}
    bucket.objects["m/params.json"] = b"{}"
    folder, weights = _fetched.fetch(FOLDER, settings(bucket), which="consolidated")
    assert {name for name in held(folder) if name.endswith(".safetensors")} == expected
    remote = RemoteWeights(weights, settings(bucket), "consolidated")
    assert {path.name for path in Path(remote.folder).iterdir()} == expected
    remote.close()
    for name in [name for name in bucket.objects if "consolidated" in name]:
        del bucket.objects[name]
    with pytest.raises(penstock.NotFoundError, match=r'neither consolidated.*files="consolidated" asks for'):
        _fetched.fetch(FOLDER, settings(bucket), which="consolidated")


def test_a_tokenizer_needs_no_weights(bucket, temporary):
    bucket.objects["t/tokenizer.json"] = b"{}"
    folder, _ = _fetched.fetch("s3://bucket/t", settings(bucket), weights=False)
    assert held(folder) == {"tokenizer.json": b"{}"}


def test_it_has_one_path_in_every_run_and_is_what_the_bucket_has_now(bucket, temporary):
    first, _ = _fetched.fetch(FOLDER, settings(bucket))
    Path(first, "stale.json").touch()
    bucket.objects["m/config.json"] = b'{"model_type": "another"}'
    second, _ = _fetched.fetch(FOLDER, settings(bucket))
    assert second == first
    assert Path(second, "config.json").read_bytes() == bucket.objects["m/config.json"]
    assert not Path(second, "stale.json").exists()
    bucket.objects |= {f"n/{name.removeprefix('m/')}": content for name, content in bucket.objects.items()}
    assert _fetched.fetch("s3://bucket/n", settings(bucket)).folder != first


#: Fetches, prints the folder, and waits until its standard input ends.
FETCH = """
import json, os, sys, tempfile
from penstock.integrations._fetched import fetch
tempfile.tempdir = sys.argv[1]
print(fetch(sys.argv[2], json.loads(sys.argv[3])).folder, flush=True)
sys.stdin.read()
if sys.argv[4:] == ["fork"]:
    if os.fork() == 0:
        sys.exit()
    os.wait()
print(os.listdir(tempfile.tempdir))
"""


def fetching(bucket: Bucket, temporary: Path, *more: str) -> tuple[subprocess.Popen[str], str]:
    """A process that has fetched, and its folder."""
    arguments = [str(temporary), FOLDER, json.dumps(settings(bucket)), *more]
    process = subprocess.Popen(
        [sys.executable, "-c", FETCH, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_two_processes_have_a_folder_each_and_leave_none(bucket, temporary):
    (one, first), (other, second) = fetching(bucket, temporary), fetching(bucket, temporary)
    assert first and second and first != second
    assert held(first) == held(second) != {}
    for process, folder in ((one, first), (other, second)):
        process.communicate()
        assert process.returncode == 0 and not Path(folder).exists()
    again, third = fetching(bucket, temporary)
    assert third == first, "the name is free again"
    again.communicate()


def test_the_second_process_too_has_one_path_in_every_run_and_for_every_fetch(bucket, temporary):
    one, first = fetching(bucket, temporary)
    other, second = fetching(bucket, temporary)
    assert (Path(first).parent, second) == (temporary, f"{first}-1")
    other.kill()
    other.communicate()
    assert [_fetched.fetch(FOLDER, settings(bucket)).folder for _ in range(2)] == [second, second]
    one.communicate()
    assert _fetched.fetch(FOLDER, settings(bucket)).folder == second


def test_where_no_number_is_free_a_process_has_one_folder_of_any_name(bucket, temporary):
    first = Path(_fetched.fetch(FOLDER, settings(bucket)).folder)
    _fetched.remove_all()
    taken = [first, *(Path(f"{first}-{number}") for number in range(1, 32))]
    for path in taken:
        path.touch()
    folder = Path(_fetched.fetch(FOLDER, settings(bucket)).folder)
    assert folder not in taken and "config.json" in held(str(folder))
    assert Path(_fetched.fetch(FOLDER, settings(bucket)).folder) == folder
    for path in taken:
        path.unlink()


# Names of files


@pytest.mark.parametrize("last", ["a.safetensors", "?x.safetensors", "..?x.safetensors", "model#1.safetensors"])
def test_in_a_key_a_question_mark_is_a_character_like_others(bucket, small, temporary, last):
    bucket.objects = {f"m/{last}": (small / LAYOUT.files[0]).read_bytes(), "m/config.json": b"{}"}
    folder, _ = _fetched.fetch(FOLDER, settings(bucket))
    assert held(folder).keys() == {"config.json", last}
    weights = RemoteWeights(FOLDER, settings(bucket))
    assert held(weights.folder) == {last: b""}
    weights.close()
    assert file_name("https://h/m/a.safetensors?sig=/x/y#/z") == "a.safetensors"


@pytest.mark.parametrize("last", ["", ".", "..", "?x", "..?x/y", "..#x", "a\0", "é" * 125 + "a"])
def test_what_no_file_can_be_called_is_an_error(last):
    for scheme in ("https", "s3"):
        if scheme == "s3" and last[-2:] in ("?x", "/y", "#x"):
            continue
        with pytest.raises(penstock.UnsupportedError, match=rf"^{scheme}://h/m/.*: no file can be called") as caught:
            file_name(f"{scheme}://h/m/{last}")
        assert file_name(f"{scheme}://h/{'a' * 250}") == "a" * 250
        assert "?" not in str(caught.value)


def test_a_forked_child_that_ends_leaves_the_folder(bucket, temporary):
    process, folder = fetching(bucket, temporary, "fork")
    said, _ = process.communicate()
    assert process.returncode == 0 and said.strip() == str([Path(folder).name])
    assert not Path(folder).exists()


def test_what_a_killed_process_has_left_is_taken_over(bucket, temporary):
    process, folder = fetching(bucket, temporary)
    process.kill()
    process.communicate()
    assert folder and held(folder) != {}
    Path(folder, "stale.json").touch()
    assert _fetched.fetch(FOLDER, settings(bucket)).folder == folder
    assert not Path(folder, "stale.json").exists()


@pytest.mark.parametrize("what", ["link", "file", "open to others"])
def test_a_path_that_somebody_else_may_have_made_is_not_used(bucket, temporary, tmp_path, what):
    taken = Path(_fetched.fetch(FOLDER, settings(bucket)).folder)
    _fetched.remove_all()
    if what == "link":
        taken.symlink_to(tmp_path)
    elif what == "file":
        taken.touch()
    else:
        taken.mkdir()
        taken.chmod(0o777)
    folder, _ = _fetched.fetch(FOLDER, settings(bucket))
    assert folder != str(taken) and "config.json" in held(folder)
    assert not (tmp_path / "config.json").exists()
    taken.rmdir() if what == "open to others" else taken.unlink()


@pytest.mark.parametrize(
    ("place", "error", "says"),
    [
        ("https://localhost:9/m/", penstock.InvalidError, "does not say which files it has: give a folder"),
        ("http://localhost:9/m?sesame", penstock.InvalidError, "^http://localhost:9/m: a web server"),
        ("s3://bucket/none", penstock.NotFoundError, "no object whose key begins with this"),
        ("s3://bucket/bare/", penstock.NotFoundError, "no config.json or params.json beside the weights, only x.txt"),
        ("s3://bucket/no weights/", penstock.NotFoundError, "no safetensors file"),
        ("s3://bucket/long/", penstock.UnsupportedError, "config.json.*has 67108865 bytes"),
    ],
)
def test_what_is_not_a_model_is_an_error(bucket, temporary, place, error, says):
    bucket.objects |= {"bare/x.txt": b"", "no weights/config.json": b"{}"}
    bucket.objects["long/config.json"] = bytes(_fetched.MOST + 1)
    with pytest.raises(error, match=says) as caught:
        _fetched.fetch(place, settings(bucket))
    assert "sesame" not in repr(caught.value)


# The Hub


@pytest.mark.parametrize("within", ["", "text"])
def test_a_repository_of_the_hub_at_its_commit(hub, small, temporary, tmp_path, within):  # noqa: F811
    files = tmp_path / "files"
    (files / "1_Pooling").mkdir(parents=True)
    for name, content in {**SMALL, **OTHERS, "modules.json": b'[{"path": "1_Pooling"}]'}.items():
        (files / name).write_bytes(content)
    hub.add("org/model", small, within=within)
    add_files(hub, "org/model", files, within)
    inner = hub.folder / "org/model" / COMMIT / within / "1_Pooling"
    inner.mkdir()
    (inner / "config.json").write_bytes(b"{}")
    folder, weights = _fetched.fetch(f"hf://org/model{f'/{within}' if within else ''}", None)
    assert weights == f"hf://org/model@{COMMIT}{f'/{within}' if within else ''}"
    found = held(folder)
    assert {name: found[name] for name in SMALL} == SMALL
    assert "1_Pooling/config.json" in found and set(LAYOUT.files) <= set(found) and "modeling.py" not in found
    assert penstock.open(weights).keys() == penstock.open(small).keys()


def add_files(hub: Hub, name: str, folder: Path, within: str) -> None:  # noqa: F811
    """The files of a folder, without the folders in it."""
    for path in folder.iterdir():
        if path.is_file():
            hub.add(name, path, within=within)


def test_the_hub_is_not_asked_offline(hub, temporary, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(penstock.NotFoundError, match="HF_HUB_OFFLINE is set: give the name without hf://"):
        _fetched.fetch("hf://org/name", None)
    assert hub.asked() == []


def replaced(bucket: Bucket, names: list[str]) -> None:
    """Puts others with equal headers and sizes."""
    for name in names:
        content = bucket.objects[name]
        start = 8 + int.from_bytes(content[:8], "little") if name.endswith(".safetensors") else 0
        bucket.objects[name] = content[:start] + bytes(byte ^ 255 for byte in content[start:])


@pytest.mark.parametrize("point", ["after the headers", "after the small files"])
def test_a_model_that_is_replaced_while_it_is_fetched_is_an_error_that_names_the_object(
    bucket, temporary, monkeypatch, point
):
    shards = [name for name in bucket.objects if name.startswith("m/model") and name.endswith(".safetensors")]
    small = _fetched.small_files

    def during(*args: Any) -> Any:
        if point == "after the headers":
            replaced(bucket, shards)
        found = small(*args)
        if point == "after the small files":
            replaced(bucket, shards)
        return found

    monkeypatch.setattr(_fetched, "small_files", during)
    with pytest.raises(penstock.ChangedError, match="has changed since this start began") as caught:
        _fetched.fetch(FOLDER, settings(bucket))
    assert any(str(caught.value.path).endswith(name) for name in shards)


def test_ranks_take_the_version_that_was_fetched_or_none(bucket, temporary):
    shards = [name for name in bucket.objects if name.startswith("m/model") and name.endswith(".safetensors")]
    found = _fetched.fetch(FOLDER, settings(bucket))
    pinned = pinned_in(found.folder)
    assert pinned is not None and sorted(pinned) == [f"s3://bucket/{name}" for name in sorted(shards)]
    RemoteWeights(found.weights, settings(bucket), pinned=pinned).close()
    replaced(bucket, shards[:1])
    with pytest.raises(penstock.ChangedError, match="has changed since its configuration was fetched"):
        RemoteWeights(found.weights, settings(bucket), pinned=pinned)
    RemoteWeights(found.weights, settings(bucket)).close()  # as a reload does
    again = _fetched.fetch(FOLDER, settings(bucket))
    RemoteWeights(again.weights, settings(bucket), pinned=pinned_in(again.folder)).close()
