"""The Hub over the network: what the local cache lacks is read from it, and nothing is written."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
from conftest import LAYOUT, Oracle, raw
from ordeal import await_line, begin, finish, soon
from penstock import _hub_network
from penstock import cli as command_line
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from test_web import authority  # noqa: F401

torch = pytest.importorskip("torch")

COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40
INDEX = "model.safetensors.index.json"
GOOD, OF_NOBODY = "hf_goodToken123", "hf_otherToken456"
VARIABLES = (
    "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "SSL_CERT_FILE",
    "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy",
)  # fmt: skip


class Hub:
    """A double of the Hub in a process of its own, what it has, and what it was asked."""

    def __init__(self, folder: Path, *certificate: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.state: dict[str, Any] = {"repositories": {}, "tokens": {GOOD: ["org/gated", "org/private"], OF_NOBODY: []}}
        self.set()
        program = Path(__file__).with_name("hub_server.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(folder), *map(str, certificate)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        ports = self.process.stdout.readline().split()
        host = "https://localhost" if certificate else "http://127.0.0.1"
        self.endpoint, self.storage = (f"{host}:{port}" for port in ports)

    def set(self, **changes: Any) -> None:
        self.state |= changes
        new = self.folder / "new.json"
        new.write_text(json.dumps(self.state))
        new.rename(self.folder / "state.json")

    def add(
        self, name: str, source: Path, *revisions: str, commit: str = COMMIT, within: str = "", **about: Any
    ) -> None:
        """A repository with a copy of the files in ``source``; ``revisions`` are this commit, by default main."""
        there = self.folder / name / commit / within
        there.mkdir(parents=True, exist_ok=True)
        for file in [source] if source.is_file() else source.iterdir():
            if not file.name.startswith("."):
                shutil.copy(file, there)
        repository = self.state["repositories"].setdefault(name, {"refs": {}})
        repository["refs"] |= dict.fromkeys(revisions or ("main",), commit)
        repository |= about
        self.set()

    def asked(self, kind: str = "") -> list[dict[str, Any]]:
        """The requests until now."""
        lines = [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]
        return [line for line in lines if kind in ("", line["kind"])]

    def counts(self) -> dict[str, int]:
        found = self.asked()
        return {kind: sum(line["kind"] == kind for line in found) for kind in ("api", "resolve", "storage")}

    def forget(self) -> None:
        os.truncate(self.folder / "log", 0)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def serving(folder: Path, *certificate: Path) -> Iterator[Hub]:
    hub = Hub(folder, *certificate)
    try:
        yield hub
    finally:
        hub.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HF_HOME, with nothing in it, an empty current folder, and no other variable that matters."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


@pytest.fixture
def hub(tmp_path: Path, home: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that has the small checkpoint as org/name."""
    with serving(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.add("org/name", small)
        yield hub


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A folder with one shard file of a tensor."""
    (tmp_path / "one").mkdir()
    return synth.write_file(tmp_path / "one" / "model.safetensors", [Tensor("a", "F32", (100,))]).parent


def same(checkpoint: penstock.Checkpoint, folder: Path) -> None:
    Oracle(folder).same(checkpoint.load(framework="pt"))


DOWNLOAD = """
import sys, huggingface_hub
name, _, revision = sys.argv[1].partition("@")
print(huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=sys.argv[2:] or None))
"""


# What is opened


@pytest.mark.parametrize("source", ["org/name", "hf://org/name", f"hf://org/name/{INDEX}", "hf://models/org/name@main"])
def test_what_the_cache_lacks_is_read_from_the_hub_and_not_kept(hub, small, home, source):
    checkpoint = penstock.open(source)
    assert checkpoint.files == [f"{hub.endpoint}/org/name/resolve/{COMMIT}/{name}" for name in LAYOUT.files]
    # One of the API, one for each file, and one more where it redirects to
    assert hub.counts() == {"api": 1, "resolve": 4, "storage": 3}
    same(checkpoint, small)
    there = penstock.open(small)
    assert checkpoint.keys() == there.keys() and checkpoint.metadata == there.metadata
    assert not home.exists() and not any(Path().iterdir())


REPOSITORIES = {
    "shards and index": (["org/name"], "small", ""),
    "one file": (["org/name", "hf://org/name/model.safetensors"], "one", ""),
    "shards alone": (["org/name"], "shards", ""),
    "a part": (["hf://org/name/unet", f"hf://org/name/unet/{LAYOUT.files[1]}"], "small", "unet"),
}


@pytest.mark.parametrize("what", REPOSITORIES)
def test_it_is_what_huggingface_hub_would_have_downloaded(hub, small, one, home, python, tmp_path, what, monkeypatch):
    pytest.importorskip("huggingface_hub")
    sources, kind, within = REPOSITORIES[what]
    folder = {"small": small, "one": one}.get(kind)
    if folder is None:
        folder = tmp_path / "shards"
        shutil.copytree(small, folder, ignore=shutil.ignore_patterns("*.json"))
    (tmp_path / "README.md").write_text("a model")
    hub.state["repositories"].clear()
    shutil.rmtree(hub.folder / "org")
    hub.add("org/name", folder, within=within)
    hub.add("org/name", tmp_path / "README.md")
    found = {}
    for source in sources:
        checkpoint = penstock.open(source)
        found[source] = (checkpoint.keys(), checkpoint.metadata, checkpoint.warnings), checkpoint.load(framework="pt")
    assert not home.exists()
    done = python(DOWNLOAD, "org/name")
    assert done.returncode == 0, done.stderr
    snapshot = Path(done.stdout.strip())
    assert {file.name: file.read_bytes() for file in (snapshot / within).iterdir() if "safetensors" in file.name} == {
        file.name: file.read_bytes() for file in folder.iterdir() if "safetensors" in file.name
    }
    hub.forget()
    for source in sources:
        checkpoint = penstock.open(source)
        assert all(file.startswith(str(snapshot)) for file in checkpoint.files)
        about, tensors = found[source]
        assert (checkpoint.keys(), checkpoint.metadata, checkpoint.warnings) == about
        theirs = checkpoint.load(framework="pt")
        assert list(theirs) == list(tensors)
        assert {name: raw(tensor) for name, tensor in theirs.items()} == {n: raw(t) for n, t in tensors.items()}
    assert hub.asked() == []


def test_every_revision_is_found_and_pinned(hub, one):
    hub.add("org/name", one, "v1", "release/1", "refs/pr/1", commit=OTHER)
    for revision in ("v1", "release/1", "refs/pr/1", OTHER):
        assert penstock.open(f"org/name@{revision}").keys() == ["a"]
    for source in ("hf://org/name@refs/pr/1", "hf://org/name@release%2F1", f"hf://org/name@{OTHER}/model.safetensors"):
        assert penstock.open(source).keys() == ["a"]
    assert len(penstock.open(f"org/name@{COMMIT}")) == len(LAYOUT.tensors)
    # A slash in a revision is no slash of the path, and the files are those of the commit
    paths = {line["path"] for line in hub.asked("api")}
    assert "/api/models/org/name/revision/refs%2Fpr%2F1" in paths and all(path.count("/") == 6 for path in paths)
    assert all(f"/resolve/{OTHER}/" in line["path"] or f"/{COMMIT}/" in line["path"] for line in hub.asked("resolve"))


def test_a_branch_that_moves_does_not_change_what_was_opened(hub, small, one):
    checkpoint = penstock.open("org/name")
    stream = checkpoint.stream(framework="pt", options={"window": 1})
    first = dict([next(stream)])
    shutil.rmtree(hub.folder / "org" / "name" / COMMIT / "unet", ignore_errors=True)
    hub.add("org/name", one, "main", commit=OTHER)
    Oracle(small).same(first | dict(stream))
    same(checkpoint, small)
    assert penstock.open("org/name").keys() == ["a"]


def test_a_repository_that_was_renamed_is_found_by_its_old_name(hub, small):
    hub.state["repositories"] |= {"old/name": {"moved": "org/name"}, "short": {"moved": "org/name"}}
    hub.set()
    for source in ("old/name", "hf://short"):
        checkpoint = penstock.open(source)
        same(checkpoint, small)
        assert all("/org/name/" in file for file in checkpoint.files)


@pytest.mark.parametrize("small_files", ["direct", "ranges", "cache"])
def test_small_files_may_come_whole_in_parts_or_from_elsewhere(hub, small, small_files):
    hub.set(small=small_files)
    same(penstock.open("org/name"), small)


def test_streams_slices_existing_tensors_and_safe_open(hub, small):
    oracle, checkpoint = Oracle(small), penstock.open("org/name")
    oracle.same(dict(checkpoint.stream(framework="pt")))
    into = {name: torch.zeros(oracle.shape(name), dtype=tensor.dtype) for name, tensor in checkpoint.load().items()}
    checkpoint.load_into(into)
    assert {name: raw(tensor) for name, tensor in into.items()} == {name: oracle[name] for name in oracle.entries}
    part = checkpoint.load(slices={"layers.0.attn.weight": np.s_[3:7, 5:]}, names=["layers.0.attn.weight"])
    whole = np.frombuffer(oracle["layers.0.attn.weight"], np.float32).reshape(48, 40)
    assert raw(part["layers.0.attn.weight"]) == whole[3:7, 5:].tobytes()
    with penstock.safe_open("org/name", framework="np") as file:
        assert sorted(file.keys()) == sorted(oracle.entries)
        assert raw(file.get_tensor("layers.0.attn.weight")) == oracle["layers.0.attn.weight"]


# The storage that the Hub redirects to


@pytest.fixture
def large(hub: Hub, tmp_path: Path) -> Path:
    """A file of 8 MB on the Hub: org/large."""
    (tmp_path / "large").mkdir()
    tensors = [Tensor(f"t{i}", "F32", (250_000,)) for i in range(8)]
    folder = synth.write_file(tmp_path / "large" / "model.safetensors", tensors).parent
    hub.add("org/large", folder)
    return folder


def test_locations_that_expire_in_the_middle_of_a_load_are_renewed(hub, large):
    checkpoint = penstock.open("org/large", storage={"request_bytes": 1 << 18})
    # Several reads are on their way when the location of all of them expires
    hub.set(expire_at=[4, 9, 15])
    Oracle(large).same(checkpoint.load(framework="pt", options={"extent": 1 << 18, "gap": 0}))
    statuses = [line["status"] for line in hub.asked("storage")]
    assert statuses.count(403) >= 3 and statuses.count(206) > 20


def test_one_read_asks_where_a_file_is_and_the_others_go_there(hub, large):
    checkpoint = penstock.open("org/large", storage={"request_bytes": 1 << 18})
    hub.forget()
    Oracle(large).same(checkpoint.load(framework="pt", options={"extent": 1 << 18, "gap": 0}))
    counts = hub.counts()
    assert counts["resolve"] == 1 and counts["storage"] > 20


def test_locations_that_are_refused_for_good_are_an_error(hub, large):
    checkpoint = penstock.open("org/large")
    hub.set(expire_at=list(range(1000)), secret="S3CRET")
    with pytest.raises(penstock.AccessError, match="403") as caught:
        checkpoint.load(framework="pt")
    assert caught.value.path == checkpoint.files[0]
    assert "Signature" not in str(caught.value) and "S3CRET" not in str(caught.value)


def test_the_hub_may_have_other_etags_than_the_storage(hub, large):
    hub.set(own_etags=True)
    same(penstock.open("org/large"), large)
    assert 412 in [line["status"] for line in hub.asked("resolve")]


@pytest.mark.parametrize("on", ["api", "resolve", "storage"])
@pytest.mark.parametrize("status", [429, 503])
def test_what_is_busy_is_asked_again(hub, small, on, status):
    hub.set(busy={"on": on, "times": 2, "status": status})
    same(penstock.open("org/name"), small)
    assert [line["status"] for line in hub.asked(on)][:2] == [status, status]


# The token


def test_the_token_is_sent_to_the_hub_and_to_nobody_else(hub, small, monkeypatch, caplog):
    caplog.set_level(0)
    for name in ("org/private", "org/gated"):
        hub.add(name, small, **{name[4:]: True})
    hub.set(small="cache", secret=GOOD)
    monkeypatch.setenv("HF_TOKEN", GOOD)
    for name in ("org/private", "org/gated", "org/name"):
        checkpoint = penstock.open(name)
        same(checkpoint, small)
        for shown in (checkpoint, checkpoint._core, checkpoint.files, checkpoint.last_report, checkpoint.warnings):
            assert GOOD not in repr(shown)
    asked = hub.asked()
    assert {line["kind"] for line in asked} == {"api", "resolve", "storage"}
    for line in asked:
        assert line["Authorization"] == (None if line["kind"] == "storage" else f"Bearer {GOOD}")
    assert GOOD not in caplog.text and GOOD not in repr(_hub_network.token())


def test_the_token_does_not_follow_a_redirect_of_the_api_to_another_server(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", GOOD)
    hub.state["repositories"]["org/away"] = {"moved": "org/name", "to": hub.storage}
    hub.set()
    refused(penstock.AccessError, "org/away")
    [there] = hub.asked("storage")
    assert "/api/models/org/name/" in there["path"] and there["Authorization"] is None
    assert hub.asked("api")[0]["Authorization"] == f"Bearer {GOOD}"


def _tokens(folder: str) -> list[dict[str, str]]:
    return [
        {},
        {"HF_TOKEN": "hf_a"},
        {"HF_TOKEN": " hf_a\n"},
        {"HUGGING_FACE_HUB_TOKEN": "hf_b"},
        {"HF_TOKEN": "hf_a", "HUGGING_FACE_HUB_TOKEN": "hf_b"},
        {"HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": "hf_b"},
        {"HF_TOKEN": " "},
        {"HF_TOKEN_PATH": f"{folder}/there"},
        {"HF_TOKEN_PATH": f"{folder}/none"},
        {"HF_TOKEN_PATH": f"{folder}/empty"},
        {"HF_TOKEN_PATH": "$HF_HOME/../there"},
        {"HF_HOME": f"{folder}/none"},
        {"HF_HOME": f"{folder}/none", "HF_TOKEN": "hf_a"},
    ]


def test_the_token_is_the_one_that_huggingface_hub_finds(home, tmp_path, python):
    pytest.importorskip("huggingface_hub")
    home.mkdir()
    (home / "token").write_text("hf_ofHome\n")
    (tmp_path / "there").write_text("hf_there")
    (tmp_path / "empty").write_text("\n")
    # Each of its own process, in which the package is imported anew: what it imports itself is there
    code = """
import json, os, sys, penstock._hub_network, huggingface_hub
huggingface_hub.get_token
for name in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
    del sys.modules[name]
for environment in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update(environment)
        import huggingface_hub
        print(json.dumps([huggingface_hub.get_token(), (penstock._hub_network.token() or [None])[0]]), flush=True)
        os._exit(0)
    os.wait()
"""
    environments = _tokens(str(tmp_path))
    run = python(code, json.dumps(environments))
    found = [json.loads(line) for line in run.stdout.splitlines()]
    for environment, (theirs, ours) in zip(environments, found, strict=True):
        assert theirs == ours, (environment, run.stderr)


def test_a_token_may_be_kept_back(hub, monkeypatch, small):
    hub.add("org/private", small, private=True)
    monkeypatch.setenv("HF_TOKEN", GOOD)
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    with pytest.raises(penstock.NotFoundError, match="no token was sent"):
        penstock.open("org/private")
    assert {line["Authorization"] for line in hub.asked()} == {None}


@pytest.mark.parametrize("text", ["hf_ab cd", "hf_ab\r\nX: y", "hf_äb"])
def test_what_is_no_token_is_refused_and_not_shown(hub, monkeypatch, text):
    monkeypatch.setenv("HF_TOKEN", text)
    with pytest.raises(penstock.InvalidError, match="HF_TOKEN holds no token") as caught:
        penstock.open("org/name")
    assert text not in str(caught.value)
    assert hub.asked() == []


# What goes wrong


def refused(kind: type[Exception], source: str, token: str | None = None) -> str:
    with pytest.raises(kind) as caught:
        penstock.open(source)
    error = caught.value
    assert type(error) is kind
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    for text in (GOOD, OF_NOBODY, "hf_unknown"):
        assert text not in repr(error) + str(error) + str(error.__cause__) + str(error.__context__)
    return str(error)


ANSWERS = [
    ("org/none", None, penstock.NotFoundError, ["there is no repository org/none on", "or it is private",
     "RepoNotFound", "`hf auth login`, or HF_TOKEN",
     "No such file or directory, and no such repository in the local Hub cache"]),
    ("hf://org/none", GOOD, penstock.NotFoundError, ["org/none", "the token from HF_TOKEN was sent"]),
    ("org/private", None, penstock.NotFoundError, ["or it is private (401, RepoNotFound, request Root=1-abc)"]),
    ("org/private", OF_NOBODY, penstock.NotFoundError, ["or it is private (404, RepoNotFound", "HF_TOKEN was sent"]),
    ("org/name", "hf_unknown", penstock.AccessError, ["does not know the token from HF_TOKEN"]),
    ("org/gated", None, penstock.AccessError, ["must be granted first", "ask for it at", "GatedRepo",
     "/org/gated, then give a token", "`hf auth login`, or HF_TOKEN"]),
    ("hf://org/gated", OF_NOBODY, penstock.AccessError, ["(http", "403", "token from HF_TOKEN has not got it"]),
    ("org/disabled", None, penstock.AccessError, ["Access to this resource is disabled"]),
    ("org/name@v9", None, penstock.NotFoundError, ["org/name has no revision v9 on", "RevisionNotFound"]),
    (f"hf://org/name@{'a' * 40}", None, penstock.NotFoundError, [f"has no revision {'a' * 40}"]),
    ("hf://org/name/vae", None, penstock.NotFoundError, ["there is no vae; the repository holds model-"]),
    ("org/folders", None, penstock.NotFoundError, ["Folders of it have some: unet; open hf://org/folders@main/unet"]),
    ("org/other", None, penstock.NotFoundError, ["no safetensors file", "pytorch_model.bin, a torch.save file"]),
    ("org/partial", None, penstock.NotFoundError, ["2 of the 3 shard files of 'model' are there, by their names"]),
    ("hf://org/indexed", None, penstock.NotFoundError, ["1 of the 3 shard files of this index are missing"]),
    ("org/indexes", None, penstock.IndexFileError, ["several indexes"]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "token", "kind", "says"), ANSWERS, ids=lambda value: str(value)[:20])
def test_an_error_says_what_is_missing_and_what_to_do(
    hub, small, one, tmp_path, monkeypatch, source, token, kind, says
):
    for name in ("private", "gated", "disabled"):
        hub.add(f"org/{name}", one, **{name: True})
    hub.add("org/folders", small, within="unet")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    hub.add("org/other", tmp_path / "pytorch_model.bin")
    for name in LAYOUT.files[:2]:
        hub.add("org/partial", small / name)
        hub.add("org/indexed", small / name)
    hub.add("org/indexed", small / INDEX)
    for name in ("a", "b"):
        shutil.copy(small / INDEX, tmp_path / f"{name}.safetensors.index.json")
        hub.add("org/indexes", tmp_path / f"{name}.safetensors.index.json")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    said = refused(kind, source)
    for text in says:
        assert text in said, said
    assert "hf download" not in said


def test_a_hub_that_stays_busy_is_an_error(hub):
    hub.set(busy={"on": "api", "times": 1000, "status": 503})
    assert "is busy or broken (503" in refused(penstock.ReadError, "hf://org/name")
    assert hub.counts() == {"api": _hub_network.TRIES, "resolve": 0, "storage": 0}
    hub.set(busy={"on": "api", "times": 1000, "status": 429})
    # As offline: nothing here has that name
    assert "has had too many requests from here (429" in refused(penstock.NotFoundError, "org/name")


@pytest.mark.parametrize("answer", ["<html>log in</html>", "[]", "{}", '{"sha": "main", "siblings": []}', '{"sha": 3}'])
def test_what_is_no_hub_is_an_error(hub, answer):
    hub.set(garbage=answer)
    assert "does HF_ENDPOINT name a Hub?" in refused(penstock.ReadError, "hf://org/name")


def test_a_hub_that_cannot_be_reached_is_an_error(hub, monkeypatch):
    hub.close()
    said = refused(penstock.ReadError, "hf://org/name")
    assert f"cannot reach {hub.endpoint}: " in said and "no such repository in the local Hub cache" in said
    assert f"cannot reach {hub.endpoint}: " in refused(penstock.NotFoundError, "org/name")
    monkeypatch.setenv("HF_ENDPOINT", "http://no-such-host.invalid")
    assert "cannot reach http://no-such-host.invalid: " in refused(penstock.ReadError, "hf://org/name")


@pytest.mark.parametrize(
    "value",
    ["hub.example", "ftp://hub", "https://me:secret@hub", "https://hub?x=secret", "", "http://[::1", "http://h:x"],
)
def test_an_endpoint_that_is_none_is_refused(hub, monkeypatch, value):
    monkeypatch.setenv("HF_ENDPOINT", value)
    with pytest.raises(penstock.InvalidError, match="HF_ENDPOINT") as caught:
        penstock.open("hf://org/name")
    assert "secret" not in str(caught.value)


# The cache, and what keeps penstock from the network


def cached(home: Path, source: Path, commit: str = COMMIT, ref: str | None = "main", but: str = "") -> Path:
    """A snapshot of org/name in the cache, without the file ``but``."""
    storage = home / "hub" / "models--org--name"
    snapshot = storage / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != but and not file.name.startswith("."):
            shutil.copy(file, snapshot)
    if ref is not None:
        (storage / "refs").mkdir(exist_ok=True)
        (storage / "refs" / ref).write_text(commit)
    return snapshot


def test_a_commit_that_the_cache_has_whole_is_not_asked_for(hub, home, small, one):
    snapshot = cached(home, small)
    hub.add("org/name", one, "main", commit=OTHER)
    for source in ("org/name", "hf://org/name", f"org/name@{COMMIT}"):
        assert penstock.open(source).files[0].startswith(str(snapshot))
    assert hub.asked() == []


@pytest.mark.parametrize("but", [LAYOUT.files[1], INDEX])
def test_a_commit_of_which_the_cache_lacks_files_is_read_from_the_hub_whole(hub, home, small, but, caplog):
    snapshot = cached(home, small, but=but)
    if but == INDEX:
        (snapshot / LAYOUT.files[0]).unlink()
    before = sorted(home.rglob("*"))
    for source in ("org/name", "hf://org/name"):
        caplog.clear()
        checkpoint = penstock.open(source)
        assert all(file.startswith(hub.endpoint) and COMMIT in file for file in checkpoint.files)
        same(checkpoint, small)
        [record] = caplog.records
        assert record.levelno == logging.WARNING and "shard files" in record.getMessage()
    assert sorted(home.rglob("*")) == before


def test_a_branch_of_which_the_cache_lacks_files_is_what_it_is_now(hub, home, small, one):
    cached(home, small, but=LAYOUT.files[1])
    hub.add("org/name", one, "main", commit=OTHER)
    assert penstock.open("org/name").keys() == ["a"]
    assert f"{hub.endpoint}/org/name/resolve/{OTHER}/model.safetensors" in penstock.open("org/name").files


def test_a_commit_that_the_cache_has_without_its_name_is_taken_from_there(hub, home, small):
    snapshot = cached(home, small, ref=None)
    for source in ("org/name", f"hf://org/name/{LAYOUT.files[0]}"):
        assert penstock.open(source).files[0].startswith(str(snapshot))
    assert hub.counts() == {"api": 2, "resolve": 0, "storage": 0}
    assert len(penstock.open("org/name").verify(progress=False)) == 4


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_nothing_is_asked(hub, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    for source in ("org/name", "hf://org/name"):
        said = refused(penstock.NotFoundError, source)
        assert f"reads it from the Hub if {variable} is unset" in said
    assert hub.asked() == []


def test_what_is_on_disk_is_not_asked_for_and_what_looks_like_a_path_neither(hub, one):
    hub.add("name", one)
    shutil.copytree(one, "org/name")
    assert penstock.open("org/name").files == ["org/name/model.safetensors"]
    Path("org/empty").mkdir()
    for source in ("org/empty", "name", "org/x.safetensors", "./org/other", "a/b/c", Path("org/other"), ["org/other"]):
        with pytest.raises(penstock.NotFoundError):
            penstock.open(source)
    assert hub.asked() == []
    assert penstock.open("hf://name").keys() == ["a"]


def test_patched_libraries_never_ask(hub):
    safetensors = pytest.importorskip("safetensors")
    with penstock.patch(), pytest.raises(FileNotFoundError), safetensors.safe_open("org/name", framework="pt"):
        pass
    assert hub.asked() == []


def test_what_needs_files_never_asks(hub):
    from penstock.compat import fastsafetensors, instanttensor

    for call in (
        lambda: instanttensor.safe_open("org/name", framework="pt", device="cpu"),
        lambda: fastsafetensors.SafeTensorsFileLoader(None, "cpu").add_filenames({0: ["org/name"]}),
    ):
        with pytest.raises(penstock.NotFoundError):
            call()
    assert hub.asked() == []


def test_a_name_without_a_scheme_is_a_warning_and_an_address_is_none(hub, caplog):
    caplog.set_level(logging.INFO)
    for source, level in (("org/name", logging.WARNING), ("hf://org/name", logging.INFO)):
        caplog.clear()
        penstock.open(source)
        [record] = [record for record in caplog.records if record.name == "penstock"]
        assert record.levelno == level
        assert COMMIT in record.getMessage() and "keeps nothing" in record.getMessage()


def test_the_command_line_reads_from_the_hub_where_it_needs_no_files(hub, cli, capsys):
    for command in (["inspect", "--json"], ["load", "--json", "--framework", "dlpack"]):
        done = cli(command[0], "org/name", *command[1:])
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)
    hub.forget()
    for command in ("warm", "evict"):
        assert command_line.main([command, "hf://org/name"]) not in (0, 1)
        assert "`hf download org/name` fetches" in capsys.readouterr().err
    assert hub.asked() == []


def test_nothing_of_it_is_imported_before_it_is_needed(hub, small, python):
    code = """
import sys, penstock
penstock.open(sys.argv[1])
print([name for name in ("penstock._hub_network", "urllib.request", "http.client", "ssl") if name in sys.modules])
penstock.open("org/name")
print([name for name in ("penstock._hub_network", "huggingface_hub", "requests", "httpx") if name in sys.modules])
"""
    done = python(code, small)
    assert done.stdout.splitlines() == ["[]", "['penstock._hub_network']"], done.stderr


# Waiting


@pytest.mark.parametrize("on", ["api", "resolve", "storage"])
def test_ctrl_c_ends_an_open_that_waits(hub, on):
    hub.set(hang=on)
    child = begin(
        "import penstock\n"
        "print('ready', flush=True)\n"
        "try: penstock.open('org/name')\n"
        "except KeyboardInterrupt: print('interrupted', flush=True)"
    )
    await_line(child, "ready")
    soon(lambda: any(line["kind"] == on for line in hub.asked()), 20)
    child.send_signal(signal.SIGINT)
    await_line(child, "interrupted")
    code, _, err = finish(child)
    assert code == 0, err


@pytest.mark.parametrize("on", ["api", "resolve", "storage"])
def test_a_hub_that_does_not_answer_is_a_stall(hub, on):
    hub.set(hang=on)
    with pytest.raises(penstock.StalledError) as caught:
        penstock.open("org/name", stall_timeout=0.5)
    assert str(caught.value.path).startswith(hub.endpoint)
    assert "has not answered for 0.5 s" in str(caught.value) and "file system" not in str(caught.value)


def test_what_nobody_waits_for_is_not_asked_again(hub):
    hub.set(hang="api")
    with pytest.raises(penstock.StalledError):
        penstock.open("org/name", stall_timeout=0.5)
    hub.set(hang="", busy={"on": "api", "times": 1000, "status": 503})
    soon(lambda: not [thread for thread in threading.enumerate() if thread.name == "penstock-ask"], 20)
    assert [line["status"] for line in hub.asked("api")] == [0, 503]


# TLS


def test_https_with_an_authority_of_our_own(tmp_path, home, small, python, authority):  # noqa: F811
    trusted, certificate, key = authority
    code = "import sys, penstock; print(len(penstock.open('hf://org/name').load(framework='dlpack')))"
    with serving(tmp_path / "hub", certificate, key) as hub:
        hub.add("org/name", small)
        done = python(code, HF_ENDPOINT=hub.endpoint, SSL_CERT_FILE=str(trusted))
        assert done.stdout.strip() == str(len(LAYOUT.tensors)), done.stderr
        done = python(code, HF_ENDPOINT=hub.endpoint)
        assert "is not trusted" in done.stderr and "SSL_CERT_FILE" in done.stderr
        assert len(hub.asked("api")) == 1


def test_a_variant_is_chosen_among_the_names_that_the_hub_lists(hub, one, tmp_path):
    for name in ("model.safetensors", "model.fp16.safetensors", "consolidated.safetensors"):
        (tmp_path / "both").mkdir(exist_ok=True)
        (tmp_path / "both" / name).write_bytes((one / "model.safetensors").read_bytes())
    hub.add("org/both", tmp_path / "both", "main", commit=OTHER)
    plain, variant = penstock.open("org/both"), penstock.open("hf://org/both", variant="fp16")
    assert [file.rpartition("/")[2] for file in plain.files] == ["model.safetensors"]
    assert "consolidated.safetensors, model.fp16.safetensors" in plain.warnings[0]
    assert [file.rpartition("/")[2] for file in variant.files] == ["model.fp16.safetensors"]
