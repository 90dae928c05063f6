"""The local Hub cache: what a name stands for, what is said where something is missing, and digests."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import os
import pickle
from pathlib import Path

import penstock
import pytest
from conftest import LAYOUT, Oracle
from local_server import local_server
from penstock import _hub
from penstock._errors import InvalidError, NotFoundError
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor

COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40
VARIABLES = (
    "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
)  # fmt: skip


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Cache:
    """A Hub cache as huggingface_hub lays it out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def storage(self, repository: str) -> Path:
        return self.folder / ("models--" + repository.replace("/", "--"))

    def snapshot(self, repository: str, commit: str = COMMIT) -> Path:
        return self.storage(repository) / "snapshots" / commit

    def blob(self, repository: str, content: bytes, lfs: bool) -> Path:
        blob = self.storage(repository) / "blobs" / (hashlib.sha256(content).hexdigest() if lfs else git_sha1(content))
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        return blob

    def add(self, repository: str, name: str, content: bytes, commit: str = COMMIT, links: bool = True) -> Path:
        """A file of a snapshot. Weights are LFS files, as on the Hub."""
        file = self.snapshot(repository, commit) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if links:
            blob = self.blob(repository, content, lfs=name.endswith((".safetensors", ".bin")))
            file.symlink_to(os.path.relpath(blob, file.parent))
        else:
            file.write_bytes(content)
        return file

    def folder_of(self, repository: str, source: Path, commit: str = COMMIT, within: str = "") -> Path:
        """A snapshot with the files of a folder."""
        for file in source.iterdir():
            if file.suffix in (".safetensors", ".json") and not file.name.startswith("."):
                self.add(repository, within + file.name, file.read_bytes(), commit)
        return self.snapshot(repository, commit)

    def ref(self, repository: str, revision: str, commit: str = COMMIT) -> Path:
        ref = self.storage(repository) / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
        return ref


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """An empty cache, which HF_HOME names, and no network. The current folder is an empty one."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder = tmp_path / "home" / "hub"
    folder.mkdir(parents=True)
    return Cache(folder)


@pytest.fixture
def weights(tmp_path: Path) -> bytes:
    """A shard file."""
    return synth.write_file(tmp_path / "weights.safetensors", [Tensor("a", "F32", (100,))]).read_bytes()


@pytest.fixture
def cached(cache: Cache, small: Path) -> Cache:
    """The small checkpoint as org/name, at main and at a tag with a slash."""
    cache.folder_of("org/name", small)
    cache.add("org/name", "config.json", b"{}")
    cache.ref("org/name", "main")
    cache.ref("org/name", "release/1")
    return cache


# What a name stands for


@pytest.mark.parametrize(
    "source",
    [
        "org/name", "org/name@main", f"org/name@{COMMIT}", "org/name@release/1", "hf://org/name", "hf://org/name@main",
        "hf://models/org/name", "hf://org/name@release%2F1", "hf://org/name/model.safetensors.index.json",
    ],
)  # fmt: skip
def test_a_name_opens_its_snapshot(cached, small, source):
    checkpoint = penstock.open(source)
    assert [Path(file) for file in checkpoint.files] == [cached.snapshot("org/name") / name for name in LAYOUT.files]
    Oracle(small).same(checkpoint.load(framework="pt"))


def test_nothing_of_the_hub_is_imported_and_no_socket_is_made(cached, python):
    code = """
import sys, socket
def refuse(*a, **k): raise AssertionError("a socket")
socket.socket = socket.create_connection = refuse
import penstock
assert "penstock._hub" not in sys.modules
assert len(penstock.open("org/name")) == 11
print([m for m in ("huggingface_hub", "torch", "numpy", "httpx", "requests") if m in sys.modules])
"""
    run = python(code)
    assert run.stdout.strip() == "[]", run.stderr


def test_commits_that_no_ref_names_are_opened_by_their_hash(cache, weights):
    cache.add("org/pinned", "model.safetensors", weights, OTHER)
    assert len(penstock.open(f"org/pinned@{OTHER}")) == 1
    with pytest.raises(NotFoundError) as caught:  # main may be any other commit
        penstock.open("org/pinned")
    assert f"there: {OTHER}" in str(caught.value)


def test_each_revision_has_its_own_files(cached, weights):
    cached.add("org/name", "model.safetensors", weights, OTHER)
    cached.ref("org/name", "refs/pr/1", OTHER)
    for source in ("org/name@refs/pr/1", "hf://org/name@refs/pr/1", "hf://org/name@refs/pr/1/model.safetensors"):
        assert penstock.open(source).keys() == ["a"], source
    assert len(penstock.open("org/name")) == len(LAYOUT.tensors)


def test_a_repository_without_an_owner(cache, weights):
    cache.add("tiny", "model.safetensors", weights)
    cache.ref("tiny", "main")
    for source in ("tiny", "tiny@main", "hf://tiny"):
        assert penstock.open(source).keys() == ["a"]


def test_what_is_on_disk_comes_first(cached, weights):
    for name in ("org/name", "org/name@main", "hf:/org/name"):
        path = Path(name)
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(weights)
        assert penstock.open(name).files == [f"{name}/model.safetensors"]
    assert len(penstock.open("hf://org/name")) == len(LAYOUT.tensors)  # which is never a path


def test_a_folder_without_a_checkpoint_comes_first_too(cached):
    Path("org/name").mkdir(parents=True)
    with pytest.raises(NotFoundError, match="the directory is empty"):
        penstock.open("org/name")


def test_only_a_string_is_a_name(cached):
    for source in (Path("org/name"), ["org/name"], ["org/name", "org/other"]):
        with pytest.raises(NotFoundError) as caught:
            penstock.open(source)
        assert "Hub" not in str(caught.value)


def test_a_part_of_a_repository(cache, small, weights):
    cache.folder_of("org/pipeline", small, within="unet/")
    cache.add("org/pipeline", "vae/model.safetensors", weights)
    cache.add("org/pipeline", "model_index.json", b"{}")
    cache.ref("org/pipeline", "main")
    assert len(penstock.open("hf://org/pipeline/unet")) == len(LAYOUT.tensors)
    assert penstock.open("hf://org/pipeline@main/vae/").keys() == ["a"]
    assert penstock.open("hf://org/pipeline/vae/model.safetensors").keys() == ["a"]
    with pytest.raises(NotFoundError) as caught:
        penstock.open("org/pipeline")
    assert "Folders of it have some: unet, vae; open hf://org/pipeline@main/unet" in str(caught.value)
    with pytest.raises(NotFoundError) as caught:
        penstock.open("hf://org/pipeline/text_encoder")
    assert "the snapshot has no text_encoder; it holds model_index.json, unet, vae" in str(caught.value)


def test_safe_open_takes_a_name(cached, small):
    with penstock.safe_open("org/name", framework="pt") as file:
        assert sorted(file.keys()) == sorted(Oracle(small).entries)


# Which cache


def _environments(folder: str) -> list[dict[str, str]]:
    return [
        {},
        {"HF_HOME": f"{folder}/a"},
        {"HF_HOME": "~/b"},
        {"HF_HOME": "$HOME/c"},
        {"XDG_CACHE_HOME": f"{folder}/d"},
        {"XDG_CACHE_HOME": f"{folder}/d", "HF_HOME": f"{folder}/a"},
        {"HF_HUB_CACHE": f"{folder}/e", "HF_HOME": f"{folder}/a"},
        {"HF_HUB_CACHE": "~/f"},
        {"HF_HUB_CACHE": "relative"},
        {"HUGGINGFACE_HUB_CACHE": f"{folder}/g", "HF_HOME": f"{folder}/a"},
        {"HUGGINGFACE_HUB_CACHE": f"{folder}/g", "HF_HUB_CACHE": f"{folder}/e"},
        {"HUGGINGFACE_HUB_CACHE": "$HOME/g"},
    ]


@pytest.mark.parametrize(
    ("environment", "expected"),
    list(zip(_environments("/x"), [
        "~/.cache/huggingface/hub", "/x/a/hub", "~/b/hub", "~/c/hub", "/x/d/huggingface/hub", "/x/a/hub", "/x/e", "~/f",
        "relative", "/x/g", "/x/e", "~/g",
    ], strict=True)),
    ids=str,
)  # fmt: skip
def test_the_variables_name_the_cache(cache, monkeypatch, environment, expected):
    monkeypatch.delenv("HF_HOME")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _hub.cache_folder() == Path(expected).expanduser()


def test_the_environment_is_asked_each_time(cached, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(NotFoundError, match="elsewhere"):
        penstock.open("org/name")
    monkeypatch.setenv("HF_HUB_CACHE", str(cached.folder))
    assert len(penstock.open("org/name")) == len(LAYOUT.tensors)


# What is missing


def refused(source: str) -> str:
    with pytest.raises(FileNotFoundError) as caught:
        penstock.open(source)
    assert isinstance(caught.value, NotFoundError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


def test_a_repository_that_is_not_there(cached, monkeypatch):
    said = refused("org/nothing@v2")
    assert "org/nothing@v2: No such file or directory, and no such repository in the local Hub cache" in said
    assert str(cached.storage("org/nothing")) in said
    assert "`hf download org/nothing --revision v2`, with HF_HUB_OFFLINE unset fetches" in said
    assert "penstock writes nothing there, and reads it from the Hub if HF_HUB_OFFLINE is unset" in said
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "yes")
    assert "`hf download org/nothing`, with TRANSFORMERS_OFFLINE unset" in refused("org/nothing")
    assert "No such file or directory" not in refused("hf://org/nothing")
    assert "nothing: No such file or directory, and no such repository" in refused("nothing")


def test_a_name_that_comes_close_is_offered(cached):
    assert "there is org/name" in refused("Org/Name")
    assert "there is org" not in refused("other/thing")


def test_a_cache_that_does_not_exist(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere" / "hub" / "models--org--name") in refused("org/name")


def test_a_revision_that_is_not_there(cached, weights):
    cached.add("org/name", "model.safetensors", weights, OTHER)
    for source in ("org/name@v9", "org/name@" + "a" * 40, "org/name@release", "org/name@main/x"):
        said = refused(source)
        assert f"Revisions that are there: main ({COMMIT[:8]}), release/1 ({COMMIT[:8]}), {OTHER}" in said
        assert f"--revision {source.partition('@')[2]}`" in said


def test_a_revision_of_which_nothing_has_been_downloaded(cached):
    cached.ref("org/name", "v2", OTHER)
    said = refused("org/name@v2")
    assert f"v2 is commit {OTHER}, and none of its files has been downloaded" in said
    assert "main (" in said
    assert "v2 (" not in said


@pytest.mark.parametrize("content", [b"", b"../../../etc", b"\xff\xfe", b"main"])
def test_a_ref_that_holds_no_commit(cached, content):
    cached.ref("org/name", "odd").write_bytes(content)
    said = refused("org/name@odd")
    assert str(cached.storage("org/name") / "refs" / "odd") in said
    assert "holds no commit hash" in said


def test_white_space_after_a_commit_does_not_matter(cached):
    cached.ref("org/name", "edited").write_text(COMMIT + "\n")
    assert len(penstock.open("org/name@edited")) == len(LAYOUT.tensors)


def test_a_download_that_has_not_ended(cache):
    cache.add("org/name", "config.json", b"{}")
    cache.ref("org/name", "main")
    (cache.storage("org/name") / "blobs" / ("a" * 64 + ".12ab34cd.incomplete")).write_bytes(b"x" * 2000)
    said = refused("org/name")
    assert "no safetensors file" in said
    assert "a download that has not ended (2.00 kB in" in said
    assert "`hf download org/name`, with HF_HUB_OFFLINE unset fetches what is missing" in said


def test_a_snapshot_without_safetensors_files(cache):
    cache.add("org/old", "pytorch_model.bin", b"x")
    cache.ref("org/old", "main")
    said = refused("org/old")
    assert "pytorch_model.bin" in said
    assert str(cache.snapshot("org/old")) in said
    (cache.storage("org/old") / "trees").mkdir()
    files = {name: {"size": 1, "blob_id": "0" * 40} for name in ("model.safetensors", "pytorch_model.bin")}
    listing = json.dumps({"format_version": 1, "files": files})
    (cache.storage("org/old") / "trees" / f"{COMMIT}.json").write_text(listing)
    assert "The repository also has model.safetensors, not downloaded yet" in refused("org/old")


@pytest.mark.parametrize("listing", ["", "[]", '{"format_version": 2, "files": {"x.safetensors": {}}}', '{"files": 3}'])
def test_a_tree_listing_that_is_not_understood_is_not_believed(cache, listing):
    cache.add("org/old", "pytorch_model.bin", b"x")
    cache.ref("org/old", "main")
    (cache.storage("org/old") / "trees").mkdir()
    (cache.storage("org/old") / "trees" / f"{COMMIT}.json").write_text(listing)
    assert "not downloaded" not in refused("org/old")


def test_blobs_that_are_gone(cached, cache, weights):
    gone = cached.snapshot("org/name") / LAYOUT.files[1]
    gone.resolve().unlink()
    said = refused("org/name")
    assert "blobs are missing, links to nothing: " + gone.name + " -> ../../blobs/" in said
    assert "`hf download org/name`, with HF_HUB_OFFLINE unset fetches what is missing" in said
    cache.add("org/single", "model.safetensors", weights).resolve().unlink()
    cache.ref("org/single", "main")
    assert "links to nothing: model.safetensors" in refused("org/single")
    assert "links to nothing: model.safetensors" in refused("hf://org/single/model.safetensors")


def test_shards_that_are_gone(cached):
    (cached.snapshot("org/name") / LAYOUT.files[1]).unlink()
    said = refused("org/name")
    assert "1 of the 3 shard files of this index are missing" in said
    assert LAYOUT.files[1] in said


def test_a_part_of_the_shards_without_an_index_is_no_checkpoint(cached):
    index = cached.snapshot("org/name") / "model.safetensors.index.json"
    whole = index.resolve()
    index.unlink()
    assert len(penstock.open("org/name")) == len(LAYOUT.tensors)  # all of the files are there
    (cached.snapshot("org/name") / LAYOUT.files[2]).unlink()
    assert "2 of the 3 shard files of 'model' are there, by their names, and no index" in refused("org/name")
    assert len(penstock.open(f"hf://org/name/{LAYOUT.files[0]}")) == 4  # one file is asked for on purpose
    assert len(penstock.open(cached.snapshot("org/name"))) == 8  # and so is a folder
    index.symlink_to(whole)
    assert "1 of the 3 shard files of this index are missing" in refused("org/name")


def test_an_index_knows_better_than_names(cache, weights):
    name = "model-00001-of-00003.safetensors"
    cache.add("org/renamed", name, weights)
    cache.add("org/renamed", "model.safetensors.index.json", json.dumps({"weight_map": {"a": name}}).encode())
    cache.ref("org/renamed", "main")
    assert penstock.open("org/renamed").keys() == ["a"]


def test_a_cache_that_cannot_be_looked_at(cached):
    for path in (cached.storage("org/loop"), cached.storage("org/name") / "refs" / "loop"):
        path.symlink_to(path.name)
    for source in ("org/loop", "org/name@loop"):
        with pytest.raises(penstock.ReadError, match="cannot look into the local Hub cache") as caught:
            penstock.open(source)
        assert caught.value.errno == errno.ELOOP


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look at everything")
def test_a_cache_that_may_not_be_looked_at(cached):
    cached.folder.chmod(0)
    try:
        with pytest.raises(penstock.AccessError, match="cannot look into the local Hub cache"):
            penstock.open("org/name")
    finally:
        cached.folder.chmod(0o700)


@pytest.mark.parametrize(
    "source",
    [
        "org/name@", "org/name@../../../x", "org/name@a b", "org/name@/etc", "org/name@.hidden", "org/name@a//b",
        "org/name@x\0y", "hf://", "hf:///", "hf://org/name@", "hf://org/name/../x", "hf://org/name@main/a//b",
        "hf://org/na..me", "hf://a--b/c", "hf://datasets/org/name", "hf://org/name@..%2Fx", "hf://org/n ame",
    ],
)  # fmt: skip
def test_names_that_make_no_sense(cached, source):
    with pytest.raises((InvalidError, NotFoundError)) as caught:
        penstock.open(source)
    assert isinstance(caught.value, InvalidError)
    assert source.partition("@")[0] in str(caught.value)


@pytest.mark.parametrize(
    "source",
    ["org/model.safetensors", "a/b/c", "./name", "/org/name", "org/", "na--me", "model.safetensors.index.json", "a b"],
)
def test_paths_that_are_not_there_are_no_names(cached, source):
    said = refused(source)
    assert said == f"{source}: cannot open: No such file or directory (os error 2)"


# Digests


def flip(path: Path) -> None:
    """Changes the last byte: of a shard file, one of a tensor."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_verify_compares_every_file_of_a_snapshot(cached):
    snapshot = cached.snapshot("org/name")
    found = penstock.open("org/name").verify(progress=False)
    assert found == {str(path): "blob name" for path in snapshot.iterdir()}
    assert len(found) == 5
    damaged = [snapshot / LAYOUT.files[1], snapshot / "config.json"]
    for file in damaged:
        flip(file.resolve())
    checkpoint = penstock.open("org/name")
    with pytest.raises(ValueError, match="2 files") as caught:
        checkpoint.verify(progress=False)
    error = caught.value
    assert isinstance(error, penstock.DigestError)
    assert error.kind == "Digest"
    assert error.path == str(damaged[0])
    assert [problem.partition(": ")[0] for problem in error.problems] == [str(file) for file in damaged]
    assert "sha256" in error.problems[0]
    assert "git-sha1" in error.problems[1]
    assert str(damaged[0].resolve()) in error.problems[0]  # what to remove
    assert pickle.loads(pickle.dumps(error)).problems == error.problems


def test_verify_of_a_folder_compares_its_shards_alone(cached, small):
    found = penstock.open(cached.snapshot("org/name")).verify(progress=False)
    assert [Path(path).name for path in found] == LAYOUT.files
    assert set(found.values()) == {"blob name"}
    assert set(penstock.open(small).verify(progress=False).values()) == {None}


def test_a_blob_may_be_a_link_to_a_store_of_the_whole_cache(cached):
    # Whose names are Xet hashes: as long as a sha256, and another one
    file = cached.snapshot("org/name") / LAYOUT.files[0]
    blob = cached.storage("org/name") / "blobs" / file.readlink().name
    store = cached.folder / "blobs" / "ab" / ("ab" * 32)
    store.parent.mkdir(parents=True)
    blob.rename(store)
    blob.symlink_to(os.path.relpath(store, blob.parent))
    assert penstock.open("org/name").verify(progress=False)[str(file)] == "blob name"
    flip(store)
    with pytest.raises(penstock.DigestError, match=blob.name):
        penstock.open("org/name").verify(progress=False)


def test_links_to_a_snapshot_are_followed(cached, tmp_path):
    link = tmp_path / "mine.safetensors"
    link.symlink_to(cached.snapshot("org/name") / LAYOUT.files[0])
    assert penstock.open(link).verify(progress=False) == {str(link): "blob name"}


def test_without_links_the_listing_of_the_repository_has_the_digests(cache, weights):
    file = cache.add("org/copied", "sub/model.safetensors", weights, links=False)
    config = cache.add("org/copied", "sub/config.json", b"{}", links=False)
    cache.ref("org/copied", "main")
    source = "hf://org/copied/sub"
    assert penstock.open(source).verify(progress=False) == {str(file): None, str(config): None}
    (cache.storage("org/copied") / "trees").mkdir()
    files = {
        "sub/model.safetensors": {
            "size": len(weights),
            "blob_id": "0" * 40,  # of the LFS pointer
            "lfs_sha256": hashlib.sha256(weights).hexdigest(),
            "lfs_size": len(weights),
        },
        "sub/config.json": {"size": 2, "blob_id": git_sha1(b"{}")},
    }
    listing = json.dumps({"format_version": 1, "files": files})
    (cache.storage("org/copied") / "trees" / f"{COMMIT}.json").write_text(listing)
    assert set(penstock.open(source).verify(progress=False).values()) == {"tree listing"}
    flip(file)
    with pytest.raises(penstock.DigestError, match=r"model\.safetensors: sha256"):
        penstock.open(source).verify(progress=False)


def test_a_file_that_cannot_be_read_is_named(cached):
    checkpoint = penstock.open("org/name")
    (cached.snapshot("org/name") / LAYOUT.files[1]).resolve().unlink()
    with pytest.raises(NotFoundError, match=LAYOUT.files[1]):
        checkpoint.verify(progress=False)


def test_blobs_of_other_files_that_are_gone_are_noticed_and_pipes_are_not_read(cached):
    os.mkfifo(cached.snapshot("org/name") / "pipe")
    config = cached.snapshot("org/name") / "config.json"
    config.resolve().unlink()
    with pytest.raises(NotFoundError) as caught:
        penstock.open("org/name").verify(progress=False)
    assert caught.value.path == str(config)


def test_verify_counts_its_bytes(cached):
    seen = []
    checkpoint = penstock.open("org/name")
    checkpoint.verify(progress=lambda done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in cached.snapshot("org/name").iterdir())
    assert seen[-1] == (total, total)


def test_an_error_in_the_callback_ends_the_check(cached):
    class Enough(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        penstock.open("org/name").verify(progress=stop)


@pytest.mark.parametrize("size", [0, 1, (4 << 20) - 1, 4 << 20, (8 << 20) + 5])
def test_digests_are_those_of_hashlib(cache, size):
    from penstock._digest import digests

    content = bytes(range(256)) * (size // 256 + 1)
    content = content[:size]
    files = [cache.add("org/sizes", name, content) for name in ("large.bin", "small.txt")]
    large, small = digests([str(file) for file in files])
    assert (large.algorithm, large.digest) == ("sha256", hashlib.sha256(content).hexdigest())
    assert (small.algorithm, small.digest) == ("git-sha1", git_sha1(content))
    assert large.error is small.error is None


# The command line


def test_commands_take_names(cached, cli):
    snapshot = str(cached.snapshot("org/name"))
    for command in ("inspect", "verify", "warm", "evict", "doctor"):
        more = ["--no-measure"] if command == "doctor" else []
        run = cli(command, "org/name@release/1", "--json", *more)
        assert run.returncode == 0 or command == "evict", run.stderr
        assert snapshot in run.stdout, command
    run = cli("load", "hf://org/name", "--json", "--framework", "dlpack")
    assert json.loads(run.stdout)["nbytes"] == LAYOUT.nbytes, run.stderr


@pytest.mark.parametrize("command", ["inspect", "load", "warm", "doctor"])
def test_what_is_missing_is_one_line(cached, cli, command):
    run = cli(command, "org/name@v9")
    assert run.returncode == 3
    assert run.stderr.count("\n") == 1
    assert f"main ({COMMIT[:8]})" in run.stderr


def test_verify_on_the_command_line(cached, cli):
    run = cli("verify", "org/name")
    assert run.returncode == 0, run.stdout
    assert "--sha256 compares" in run.stdout
    run = cli("verify", "org/name", "--sha256")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("(blob name)") == 5
    assert "git-sha1" in run.stdout
    assert "--sha256 compares" not in run.stdout
    file = cached.snapshot("org/name") / LAYOUT.files[2]
    flip(file.resolve())
    run = cli("verify", "org/name", "--sha256", "--json")
    assert run.returncode == 1
    found = json.loads(run.stdout)
    assert [problem["path"] for problem in found["problems"]] == [str(file)]
    assert [entry["path"] for entry in found["files"] if not entry["ok"]] == [str(file)]
    config = cached.snapshot("org/name") / "config.json"
    entry = {"path": str(config), "ok": True, "git_sha1": git_sha1(b"{}"), "compared_with": "blob name"}
    assert entry in found["files"]
    assert cli("verify", "org/name@nothing").returncode == 3  # nothing is there to be checked


# The package that writes such caches


def test_the_cache_is_where_huggingface_hub_has_it(cache, python, tmp_path):
    pytest.importorskip("huggingface_hub")
    # Each of its own process, in which the package is imported anew: what it imports itself is there
    code = """
import json, os, sys, penstock._hub, huggingface_hub.constants
for name in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
    del sys.modules[name]
del os.environ["HF_HOME"]
for environment in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update(environment)
        import huggingface_hub.constants
        print(json.dumps([huggingface_hub.constants.HF_HUB_CACHE, str(penstock._hub.cache_folder())]), flush=True)
        os._exit(0)
    os.wait()
"""
    environments = [*_environments(str(tmp_path)), {"HF_HUB_CACHE": ""}, {"HF_HOME": ""}]
    run = python(code, json.dumps(environments))
    found = [json.loads(line) for line in run.stdout.splitlines()]
    for environment, (theirs, ours) in zip(environments, found, strict=True):
        assert Path(theirs) == Path(ours), (environment, run.stderr)


def test_huggingface_hub_finds_the_same_files(cached, weights):
    hub = pytest.importorskip("huggingface_hub")
    cached.add("org/name", "model.safetensors", weights, OTHER)
    cached.ref("org/name", "refs/pr/1", OTHER)
    scanned = hub.scan_cache_dir(cached.folder)
    assert not scanned.warnings  # what the tests write is a cache to it
    [repository] = scanned.repos
    assert repository.repo_id == "org/name"
    for revision in repository.revisions:
        for name in (revision.commit_hash, *revision.refs):
            for file in penstock.open(f"org/name@{name}").files:
                theirs = hub.try_to_load_from_cache("org/name", Path(file).name, cached.folder, revision=name)
                assert theirs == file
    assert {name for revision in repository.revisions for name in revision.refs} == {"main", "release/1", "refs/pr/1"}
    folder = hub.snapshot_download("org/name", cache_dir=cached.folder, local_files_only=True)
    assert Path(folder) == Path(penstock.open("org/name").files[0]).parent
    for source in ("org/absent", "org/name@absent"):
        name, _, revision = source.partition("@")
        theirs = hub.try_to_load_from_cache(name, LAYOUT.files[0], cached.folder, revision=revision or None)
        assert theirs is None
        refused(source)


@pytest.mark.parametrize(
    "name", ["org/name", "a", "a.b-c_d/e.f", "-a/b", "a/b-", "a/.b", "a..b/c", "a--b", "a/b/c", "é/b", "a b", "a" * 97]
)
def test_huggingface_hub_takes_the_same_names(cache, name):
    validators = pytest.importorskip("huggingface_hub.utils")
    try:
        validators.validate_repo_id(name)
        theirs = True
    except validators.HFValidationError:
        theirs = False
    assert (_hub.parse(name) is not None) == theirs


@pytest.mark.parametrize(
    "source",
    [
        "hf://org/name", "hf://org/name@v1", "hf://org/name@refs/pr/1/x/y", "hf://org/name@a%2Fb/x", "hf://org/name/x/y",
        "hf://models/org/name@v1/x", "hf://org/name@refs/convert/parquet", "hf://org/name/x@y",
    ],
)  # fmt: skip
def test_huggingface_hub_reads_addresses_alike(source):
    uris = pytest.importorskip("huggingface_hub.utils._hf_uris")
    theirs, ours = uris.parse_hf_uri(source), _hub.parse(source)
    assert (theirs.id, theirs.revision or "main", theirs.path_in_repo) == tuple(ours)


class Server(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as one download of a file asks for: the headers that huggingface_hub reads."""

    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, whole: bool) -> None:
        name = self.path.partition("/resolve/main/")[2]
        content = self.files.get(name)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        lfs = name.endswith(".safetensors")
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest() if lfs else git_sha1(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if whole:
            self.wfile.write(content)

    def log_message(self, *about: object) -> None:
        pass


def test_what_huggingface_hub_downloads_is_opened_and_verified(cache, small, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    files = {path.name: path.read_bytes() for path in small.iterdir() if not path.name.startswith(".")}
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    handler = type("Files", (Server,), {"files": files})
    with local_server(handler) as place:

        def download() -> None:
            for name in files:
                hub.hf_hub_download("org/name", name, cache_dir=cache.folder, endpoint=f"http://{place}")

        download()
        checkpoint = penstock.open("org/name")
        Oracle(small).same(checkpoint.load(framework="pt"))
        found = checkpoint.verify(progress=False)
        assert sorted(Path(path).name for path in found) == sorted(files)
        assert set(found.values()) == {"blob name"}
        assert penstock.open(f"org/name@{COMMIT}").files == checkpoint.files
        # What the errors advise: nothing else makes it fetch a damaged blob again
        damaged = Path(checkpoint.files[0]).resolve()
        flip(damaged)
        download()
        with pytest.raises(penstock.DigestError, match=f"remove {damaged} and download it again"):
            checkpoint.verify(progress=False)
        damaged.unlink()
        assert "links to nothing" in refused("org/name")
        download()
        assert penstock.open("org/name").verify(progress=False) == found


def test_a_variant_of_a_repository_is_opened_and_what_is_passed_over_is_told(cache, weights):
    for name in ("model.safetensors", "model.fp16.safetensors", "consolidated.safetensors"):
        cache.add("org/name", name, weights)
    cache.ref("org/name", "main")
    plain, variant = penstock.open("org/name"), penstock.open("hf://org/name", variant="fp16")
    assert [Path(file).name for file in plain.files] == ["model.safetensors"]
    assert "consolidated.safetensors, model.fp16.safetensors" in plain.warnings[0]
    assert [Path(file).name for file in variant.files] == ["model.fp16.safetensors"]
    with pytest.raises(NotFoundError, match='variant="fp8"'):
        penstock.open("org/name", variant="fp8")


def test_an_index_of_the_cache_is_never_one_that_is_left_over(cache, weights):
    """Its files can still be fetched, and another whole file beside it is another checkpoint."""
    cache.add("org/name", "model.safetensors.index.json", b'{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    cache.add("org/name", "consolidated.safetensors", weights)
    cache.ref("org/name", "main")
    with pytest.raises(NotFoundError, match="1 of the 1 shard files of this index are missing"):
        penstock.open("org/name")
