"""Models at addresses: the small files beside their weights, for engines that want a folder."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import penstock
import pytest
from conftest import LAYOUT
from penstock import _core
from penstock.integrations import _fetched, _sglang_arguments
from penstock.integrations._remote import RemoteWeights, file_name
from penstock.integrations._vllm_arguments import install
from s3_server import KEYS, Bucket, serving
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


def settings(bucket: Bucket, **more: Any) -> Any:
    return {"endpoint": bucket.endpoint, "access_key_id": KEY, "secret_access_key": SECRET, **more}


def held(folder: str) -> dict[str, bytes]:
    """The files in a folder, by their paths."""
    root = Path(folder)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


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


def test_small_files_of_such_names_are_an_error_too(bucket, temporary):
    bucket.objects["m/" + "a" * 246 + ".json"] = b"{}"
    with pytest.raises(penstock.UnsupportedError, match=rf"^{FOLDER}: no file can be called 'a+\.json'"):
        _fetched.fetch(FOLDER, settings(bucket))


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


# Arguments of an engine. tests/engines has the engines' own


@dataclass
class Arguments:
    """Stands in for vLLM's: the fields that are read or changed."""

    model: str
    load_format: str = "penstock"
    tokenizer: str | None = None
    hf_config_path: str | None = None
    revision: str | None = None
    code_revision: str | None = None
    tokenizer_revision: str | None = None
    trust_remote_code: bool = False
    served_model_name: str | None = None
    speculative_config: dict[str, Any] | None = None
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)

    def create_engine_config(self) -> dict[str, Any]:
        return vars(self).copy()

    create_model_config = create_engine_config


@pytest.fixture
def arguments() -> type[Arguments]:
    """A class of its own, with Penstock installed."""
    pytest.importorskip("torch")
    made = dataclass(type("Own", (Arguments,), {}))
    install(made)
    return made


@pytest.fixture
def extra(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the user gives the loader."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return {"storage": {"endpoint": bucket.endpoint}}


def test_arguments_get_a_folder_and_the_address_of_the_weights(arguments, bucket, extra, temporary):
    bucket.objects |= {f"d/{name.removeprefix('m/')}": content for name, content in bucket.objects.items()}
    bucket.objects["t/tokenizer.json"] = b"{}"
    draft = {"model": "s3://bucket/d", "num_speculative_tokens": 2}
    given = arguments(FOLDER, tokenizer="s3://bucket/t", speculative_config=draft, model_loader_extra_config=extra)
    made = given.create_engine_config()
    folder, other, tokenizer = made["model"], made["speculative_config"]["model"], made["tokenizer"]
    assert set(map(str, temporary.iterdir())) == {folder, other, tokenizer} and tokenizer != folder
    weights = {folder: FOLDER, other: "s3://bucket/d"}
    assert made == {
        **vars(arguments(folder)),
        "tokenizer": tokenizer,
        "served_model_name": FOLDER,
        "speculative_config": {**draft, "model": other},
        "model_loader_extra_config": {**extra, "weights": weights},
    }
    assert (draft["model"], "weights" in extra) == ("s3://bucket/d", False), "what the user gave is as it was"
    bucket.asked.clear()
    assert given.create_model_config() == made and bucket.asked == []


@pytest.mark.parametrize("change", [{"load_format": "auto"}, {"model": "org/name"}, {"model": "/models/m"}])
def test_other_arguments_are_as_they_were(arguments, temporary, change):
    given = {"model": FOLDER, **change}
    assert arguments(**given).create_engine_config() == vars(Arguments(**given))
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"revision": "main"}, "revision='main': this is an address, which has none"),
        ({"code_revision": "main"}, f"^{FOLDER}: code_revision='main': "),
        ({"tokenizer_revision": "v1"}, f"^{FOLDER}: tokenizer_revision='v1': "),
        ({"tokenizer_revision": "v1", "tokenizer": "s3://bucket/t"}, "^s3://bucket/t: tokenizer_revision='v1': "),
        ({"speculative_config": {"model": "s3://bucket/d", "revision": "v2"}}, "^s3://bucket/d: revision='v2': "),
        ({"speculative_config": {"method": "mtp", "code_revision": "v2"}}, f"^{FOLDER}: code_revision='v2': "),
        ({"model_loader_extra_config": {"weights": "s3://bucket/other"}}, "weights='s3://bucket/other' is another"),
        ({"model_loader_extra_config": {"storage": {"secret_access_key": "x"}}}, "logs its arguments"),
        ({"model_loader_extra_config": "{sesame"}, "give an object of JSON"),
    ],
)
def test_arguments_that_cannot_be(arguments, bucket, extra, temporary, more, says):
    if "weights" in str(more):
        more = {"model_loader_extra_config": {**extra, **more["model_loader_extra_config"]}}
    with pytest.raises(penstock.InvalidError, match=says) as caught:
        arguments(FOLDER, **more).create_engine_config()
    assert "sesame" not in str(caught.value)


def test_a_revision_of_what_is_no_address_is_left_to_the_engine(arguments, bucket, extra, temporary):
    named = {
        "tokenizer": "org/tokenizer",
        "tokenizer_revision": "v1",
        "speculative_config": {"model": "org/draft", "revision": "v2"},
    }
    made = arguments(FOLDER, model_loader_extra_config=extra, **named).create_engine_config()
    assert {name: made[name] for name in named} == named


def test_where_the_interface_differs_addresses_are_an_error_and_nothing_else_is(temporary):
    own = dataclass(type("Own", (Arguments,), {"create_engine_config": None}))
    # What `vllm serve` makes is of a subclass, which was there before
    served = dataclass(type("Served", (own,), {}))
    install(own)
    for made in (own, served):
        for given in (made("/models/m"), made(FOLDER, load_format="auto")):
            assert given.create_model_config() == vars(given)
        with pytest.raises(penstock.UnsupportedError, match=r"lacks create_engine_config\): give a folder .* weights"):
            made(FOLDER).create_model_config()


def test_where_nothing_of_the_interface_is_left_arguments_with_addresses_cannot_be_made(temporary):
    after = {"__post_init__": lambda self: None, "create_engine_config": None, "create_model_config": None}
    own = dataclass(type("Own", (Arguments,), after))
    served = dataclass(type("Served", (own,), {}))
    install(own)
    for made in (own, served):
        assert made("/models/m").model == "/models/m"
        with pytest.raises(penstock.UnsupportedError, match="lacks create_engine_config, create_model_config"):
            made(FOLDER)


def test_arguments_of_sglang(bucket, extra, temporary):
    pytest.importorskip("torch")
    bucket.objects |= {f"d/{name.removeprefix('m/')}": content for name, content in bucket.objects.items()}

    def given(**more: Any) -> Any:
        plain = dict.fromkeys(("tokenizer_path", "revision", "served_model_name", "speculative_draft_model_path"))
        about = {"model_path": FOLDER, "trust_remote_code": False, "speculative_draft_model_revision": None}
        return SimpleNamespace(**plain | about | {"model_loader_extra_config": extra} | more)

    for config in (extra, json.dumps(extra)):
        made = _sglang_arguments._resolved(given(model_loader_extra_config=config))
        assert json.loads(made["model_loader_extra_config"]) == {**extra, "weights": {made["model_path"]: FOLDER}}
    draft = {"speculative_draft_model_path": "s3://bucket/d"}
    made = _sglang_arguments._resolved(given(**draft, speculative_draft_model_revision="main"))
    assert "config.json" in held(made["speculative_draft_model_path"])
    for more, says in (
        ({"revision": "v1"}, f"^{FOLDER}: revision='v1': this is an address"),
        ({**draft, "speculative_draft_model_revision": "v1"}, "^s3://bucket/d: speculative_draft_model_revision='v1'"),
        ({"model_loader_extra_config": "{sesame"}, "give an object of JSON"),
        ({"model_loader_extra_config": 3}, "give an object of JSON"),
    ):
        with pytest.raises(penstock.InvalidError, match=says) as caught:
            _sglang_arguments._resolved(given(**more))
        assert "sesame" not in str(caught.value)


def test_an_sglang_without_the_step_refuses_addresses():
    for load_format in ("penstock", "Penstock"):
        with pytest.raises(penstock.UnsupportedError, match="this SGLang is not one that Penstock knows"):
            _sglang_arguments.refuse(SimpleNamespace(load_format=load_format, model_path=FOLDER))
    _sglang_arguments.refuse(SimpleNamespace(load_format="auto", model_path=FOLDER))
