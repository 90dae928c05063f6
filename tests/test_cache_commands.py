"""`penstock pull` and `penstock cache`: what they fetch, write and print, and how they exit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import penstock
import pytest
from disk_caches import as_root
from penstock import _core, _pull
from penstock import cli as command_line
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from s3_server import Bucket, serving
from test_hub_network import GOOD, Hub, home, hub  # noqa: F401
from test_web import serving as serving_web

FAILED, USAGE, ERROR, INTERRUPTED = 1, 2, 3, 130
#: Bytes of a block of the cache.
BLOCK = 1 << 20
TOKENIZER = b'{"model": "' + b"x" * (3 * BLOCK // 2) + b'"}'
NAMES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model of two shards, by the names of its files; some of these are in folders."""
    folder = tmp_path_factory.mktemp("model")
    maps: dict[str, str] = {}
    for number, name in enumerate(NAMES):
        tensors = [Tensor(f"{number}.{part}", "F32", (700, 1000)) for part in range(2)]
        synth.write_file(folder / name, tensors, seed=number)
        maps |= {tensor.name: name for tensor in tensors}
    files = {name: (folder / name).read_bytes() for name in NAMES}
    return {
        **files,
        "model.safetensors.index.json": json.dumps({"weight_map": maps}).encode(),
        "config.json": b"{}",
        "empty.txt": b"",
        "tokenizer.json": TOKENIZER,
        "additional_chat_templates/one.jinja": b"{{ x }}",
        "README.md": b"no engine reads it",
        "original/consolidated.00.pth": b"nor this",
    }


#: The files that an engine wants.
WANTED = {*NAMES, "model.safetensors.index.json", "config.json", "empty.txt", "tokenizer.json"}
WANTED |= {"additional_chat_templates/one.jinja"}


@pytest.fixture
def bucket(model: dict[str, bytes]) -> Iterator[Bucket]:
    made = Bucket({f"m/{name}": content for name, content in model.items()})
    with serving(made):
        yield made


def served(bucket: Bucket, *names: str) -> list[str]:
    """Requests for these objects, or for all, without those of one byte, which ask for the version."""
    targets = [target.partition("?")[0].removeprefix("/bucket/m/") for target, _ in bucket.asked]
    return [name for name in targets if not names or name in names]


@pytest.fixture
def run(bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> Callable[..., Any]:
    """Runs a command: (status, its JSON)."""
    monkeypatch.setenv("PENSTOCK_STORAGE_ENDPOINT", bucket.endpoint)
    monkeypatch.setenv("PENSTOCK_STORAGE_ANONYMOUS", "true")
    monkeypatch.setenv("PENSTOCK_STORAGE_DISK_CACHE_FREE", "1")

    def command(*arguments: object) -> tuple[int, Any]:
        status = command_line.main([*map(str, arguments), "--json"])
        return status, json.loads(capsys.readouterr().out)

    return command


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Any) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PENSTOCK_STORAGE_DISK_CACHE", str(folder))
    return folder


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


# pull ADDRESS


def test_a_model_that_was_pulled_is_loaded_from_the_cache(run, cache, bucket, model):
    status, found = run("pull", "s3://bucket/m/")
    assert status == 0 and found["ok"]
    assert {file["path"] for file in found["files"]} == WANTED
    assert found["nbytes"] == sum(len(model[name]) for name in WANTED)
    assert not any(file["was_there"] for file in found["files"] if file["path"] in NAMES)
    bucket.asked.clear()
    checkpoint = penstock.open("s3://bucket/m/")
    state = checkpoint.load(framework="np")
    assert checkpoint.last_report.disk_cache.network_bytes == 0
    assert len(state) == 4
    # Listings and versions alone
    ranges = served(bucket, *NAMES)
    assert len(ranges) <= 2 * len(NAMES)
    status, found = run("pull", "s3://bucket/m/")
    assert status == 0 and found["received_bytes"] == 0
    assert all(file["was_there"] for file in found["files"])


def test_pull_fetches_only_what_is_missing(run, cache, bucket, model):
    assert run("pull", "s3://bucket/m/")[0] == 0
    _, found = run("cache", "ls")
    [entry] = [entry for entry in found["entries"] if entry["address"].endswith(NAMES[1])]
    flip(Path(entry["path"]), BLOCK + 17)
    status, checked = run("cache", "verify")
    assert status == FAILED
    address = f"s3://bucket/m/{NAMES[1]}"
    assert [(bad["address"], bad["begin"], bad["end"]) for bad in checked["bad"]] == [(address, BLOCK, 2 * BLOCK)]
    status, found = run("pull", "s3://bucket/m/")
    assert status == 0 and BLOCK <= found["received_bytes"] < 2 * BLOCK
    assert run("cache", "verify")[0] == 0
    assert Path(entry["path"]).read_bytes() == model[NAMES[1]]


def test_a_cache_that_is_too_small_ends_a_pull_with_the_reason(run, cache, bucket, capsys):
    status, found = run("pull", "s3://bucket/m/", "--storage", "disk_cache_size=1MB")
    assert status == ERROR and "disk_cache_size" in found["error"]["message"]


@pytest.mark.parametrize("why", ["too small", pytest.param("read-only", marks=as_root), "the disk has to stay free"])
def test_a_cache_that_takes_nothing_is_asked_first(run, cache, bucket, model, monkeypatch, request, why):
    """Nothing is received in vain, and nothing that there is room for is evicted."""
    bucket.objects["old/model.safetensors"] = model[NAMES[0]]
    assert run("pull", "s3://bucket/old/model.safetensors")[0] == 0
    [before] = run("cache", "ls")[1]["entries"]
    if why == "read-only":
        # Also for root
        subprocess.run(["mount", "--bind", cache, cache], check=True)
        request.addfinalizer(lambda: subprocess.run(["umount", "-l", cache], check=True))
        subprocess.run(["mount", "-o", "remount,bind,ro", cache], check=True)
    setting = {"too small": f"disk_cache_size={8 * BLOCK}", "the disk has to stay free": "disk_cache_free=1000000GB"}
    sent: list[int] = []
    answer = bucket.answer

    def counted(*about: Any) -> Any:
        told = answer(*about)
        sent.append(len(told[2]))
        return told

    monkeypatch.setattr(bucket, "answer", counted)
    more = ("--storage", setting[why]) if why in setting else ()
    status, found = run("pull", "s3://bucket/m/", *more)
    assert status == ERROR and "takes nothing of it" in found["error"]["message"], found
    # Headers, listings, and small files that name others: nothing of the weights
    assert sum(sent) < len(TOKENIZER) + BLOCK < len(model[NAMES[0]])
    assert max(sent) <= len(TOKENIZER)
    if why != "the disk has to stay free":
        left = {entry["id"]: entry["there"] for entry in run("cache", "ls")[1]["entries"]}
        assert left[before["id"]] == before["size"]


def test_what_has_no_strong_version_is_not_called_cached(run, cache, tmp_path, model):
    for name in NAMES:
        (tmp_path / name).write_bytes(model[name])
    (tmp_path / "model.safetensors.index.json").write_bytes(model["model.safetensors.index.json"])
    with serving_web(tmp_path) as server:
        status, found = run("pull", server("weak/model.safetensors.index.json"))
        assert status == ERROR and "strong ETag" in found["error"]["message"]
        status, found = run("pull", server("model.safetensors.index.json"))
        assert status == 0 and len(found["files"]) == 3


def test_pull_says_where_to_if_it_is_not_told(run, bucket, monkeypatch):
    monkeypatch.delenv("PENSTOCK_STORAGE_DISK_CACHE", raising=False)
    status, found = run("pull", "s3://bucket/m/")
    assert status == USAGE and "--disk-cache" in found["error"]["message"]
    status, found = run("pull", "some/folder", "x")
    assert status == USAGE and "no address" in found["error"]["message"]


# pull ADDRESS FOLDER


def files_in(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found.pop(_pull.MANIFEST)
    return found


@pytest.mark.parametrize("with_cache", [False, True])
def test_a_folder_gets_the_files_of_the_model(run, tmp_path, bucket, model, monkeypatch, with_cache):
    if with_cache:
        monkeypatch.setenv("PENSTOCK_STORAGE_DISK_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    status, found = run("pull", "s3://bucket/m", folder)
    assert status == 0
    assert files_in(folder) == {name: model[name] for name in WANTED}
    assert penstock.open(folder).keys() == penstock.open("s3://bucket/m/").keys()
    # Again: nothing of the weights is asked for, except their versions
    (folder / NAMES[0]).unlink()
    (folder / "config.json").write_text("changed here")
    status, found = run("pull", "s3://bucket/m", folder)
    assert status == 0
    there = {file["path"]: file["was_there"] for file in found["files"]}
    # S3 tells no version of an empty object
    assert there == {name: name not in (NAMES[0], "config.json", "empty.txt") for name in WANTED}
    if not with_cache:
        assert len(model[NAMES[0]]) < found["received_bytes"] + BLOCK < len(model[NAMES[0]]) + 2 * BLOCK
    assert files_in(folder) == {name: model[name] for name in WANTED}
    # And what the server has anew
    bucket.objects["m/config.json"] = b'{"new": 1}'
    assert run("pull", "s3://bucket/m", folder)[0] == 0
    assert (folder / "config.json").read_bytes() == b'{"new": 1}'


@pytest.mark.parametrize("how", ["edited", "edited, with the old time", "replaced", "touched", "copied"])
def test_a_file_that_was_edited_is_fetched_again_and_one_that_was_not_stays(run, tmp_path, bucket, model, how):
    """Its size tells nothing, and its time may have been set back."""
    folder, name = tmp_path / "folder", NAMES[1]
    assert run("pull", "s3://bucket/m", folder)[0] == 0
    file = folder / name
    about = file.stat()
    if how.startswith("edited"):
        flip(file, BLOCK + 3)
        if "old time" in how:
            os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    elif how == "replaced":
        other = tmp_path / "other"
        other.write_bytes(os.urandom(about.st_size))
        os.utime(other, ns=(about.st_atime_ns, about.st_mtime_ns))
        other.replace(file)
    elif how == "touched":
        os.utime(file)
    else:
        folder = shutil.copytree(folder, tmp_path / "copy")
    is_whole = how in ("touched", "copied")
    for _ in range(2):
        status, found = run("pull", "s3://bucket/m", folder)
        assert status == 0
        assert files_in(folder) == {name: model[name] for name in WANTED}
        there = {one["path"]: one["was_there"] for one in found["files"]}
        # S3 tells no version of an empty object
        assert there == {one: one != "empty.txt" and (one != name or is_whole) for one in WANTED}
        is_whole = True


def test_without_a_server_a_folder_comes_from_the_cache(run, cache, tmp_path, bucket, model):
    del bucket.objects["m/empty.txt"]  # S3 tells no version of an empty object
    assert run("pull", "s3://bucket/m/")[0] == 0
    bucket.asked.clear()
    folder = tmp_path / "folder"
    status, found = run("pull", "s3://bucket/m/", folder, "--storage", "offline=true")
    assert status == 0, found
    assert files_in(folder) == {name: model[name] for name in WANTED - {"empty.txt"}} and not bucket.asked


def test_further_folders_come_along_whole(run, tmp_path, bucket, model):
    compiled = {"v1/h100/kernel.so": os.urandom(3 * BLOCK), "v1/index": b"1", "empty": b""}
    bucket.objects |= {f"compiled/{name}": content for name, content in compiled.items()}
    here = tmp_path / "here"
    (here / "deep").mkdir(parents=True)
    (here / "deep" / "file").write_bytes(b"local")
    folder = tmp_path / "folder"
    status, _ = run("pull", "s3://bucket/m/", folder, "--also", "s3://bucket/compiled/", "--also", here)
    assert status == 0
    expected = {f"compiled/{name}": content for name, content in compiled.items()} | {"here/deep/file": b"local"}
    assert files_in(folder) == {**{name: model[name] for name in WANTED}, **expected}


def test_a_folder_that_leads_back_to_itself_is_an_error(run, tmp_path, bucket):
    """Of a machine by a link, of a server by its names."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "back").symlink_to(here)
    (here / "file").write_bytes(b"1")
    bucket.objects["deep/" + "a/" * 50 + "file"] = b"1"
    for place in (here, "s3://bucket/deep"):
        status, found = run("pull", "s3://bucket/m/", tmp_path / "folder", "--also", place)
        assert status == ERROR and "more than 32 folders" in found["error"]["message"], found
        assert found["error"]["kind"] == "Limit"


def test_with_a_cache_alone_a_folder_of_this_machine_is_refused(run, cache, tmp_path, bucket):
    bucket.objects["compiled/kernel"] = b"1" * 100
    status, found = run("pull", "s3://bucket/m/", "--also", "s3://bucket/compiled")
    assert status == 0 and "compiled/kernel" in [file["path"] for file in found["files"]]
    status, found = run("pull", "s3://bucket/m/", "--also", tmp_path)
    assert status == USAGE and "without FOLDER" in found["error"]["message"]


@pytest.mark.parametrize("name", ["../out", "a/../../out", "a/./b", "a/\0b", _pull.MANIFEST])
def test_no_name_of_a_listing_leads_out_of_the_folder(run, tmp_path, bucket, name):
    bucket.objects[f"also/{name}"] = b"evil"
    with pytest.raises(penstock.UnsupportedError, match="no file"):
        _pull.checked(name, "s3://bucket/also")
    if "\0" in name:  # XML has no such letter
        return
    # Keys with such parts have no address: the store passes them over
    status, found = run("pull", "s3://bucket/m/", tmp_path / "folder", "--also", "s3://bucket/also")
    assert status == ERROR and found["error"]["kind"] in ("Unsupported", "NotFound"), found
    assert not (tmp_path / "out").exists() and not (tmp_path / "folder" / "out").exists()


def test_a_pull_that_ends_early_leaves_no_file_that_is_not_whole(run, tmp_path, bucket, model):
    asked: list[str] = []

    def script(target: str, number: int) -> Any:
        asked.append(target)
        if NAMES[1] in target and len([one for one in asked if NAMES[1] in one]) > 4:
            return 403, {}, b""
        return None

    bucket.script = script
    folder = tmp_path / "folder"
    status, _ = run("pull", "s3://bucket/m/", folder)
    assert status == ERROR
    left = [path for path in folder.rglob("*") if path.is_file() and path.name != _pull.MANIFEST]
    assert all(path.read_bytes() == model[path.name] for path in left)
    assert not (folder / "config.json").exists(), "small files come last"


def test_two_pulls_into_one_folder_do_not_mix(run, tmp_path, bucket):
    folder = tmp_path / "folder"
    with _pull._Folder(str(folder)).held():
        status, found = run("pull", "s3://bucket/m/", folder)
    assert status == ERROR and found["error"]["kind"] == "Busy"


def test_ctrl_c_leaves_no_half_file(tmp_path, bucket, model):
    begun = tmp_path / "begun"

    def script(target: str, number: int) -> Any:
        if NAMES[1] in target:
            begun.touch()
            time.sleep(0.3)
        return None

    bucket.script = script
    folder = tmp_path / "folder"
    environment = {"PENSTOCK_STORAGE_ENDPOINT": bucket.endpoint, "PENSTOCK_STORAGE_ANONYMOUS": "1"}
    command = [sys.executable, "-m", "penstock.cli", "pull", "s3://bucket/m/", str(folder)]
    with subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True) as running:
        while not begun.exists() and running.poll() is None:
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == INTERRUPTED, said
    left = [path for path in folder.rglob("*") if path.is_file() and path.name != _pull.MANIFEST]
    assert all(path.read_bytes() == model[path.name] for path in left), left
    assert NAMES[1] not in [path.name for path in left]


def test_a_repository_of_the_hub_is_pulled(run, tmp_path, hub, monkeypatch):  # noqa: F811
    folder = tmp_path / "folder"
    status, found = run("pull", "hf://org/name", folder)
    assert status == 0, found
    names = [file["path"] for file in found["files"]]
    assert any(name.endswith(".safetensors") for name in names)
    assert len(penstock.open(folder)) == len(penstock.open("hf://org/name"))
    monkeypatch.setenv("PENSTOCK_STORAGE_DISK_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        status, found = run("pull", "hf://org/name")
        assert status == 0, found
    assert all(file["was_there"] for file in found["files"])
    state = penstock.open("hf://org/name").load(framework="np")
    assert len(state) == len(penstock.open(folder))


def test_no_secret_of_an_address_is_kept(run, cache, tmp_path, model, capsys):
    (tmp_path / "web").mkdir()
    path = tmp_path / "web" / NAMES[0]
    path.write_bytes(model[NAMES[0]])
    with serving_web(tmp_path / "web") as server:
        for folder in ([], [tmp_path / "folder"]):
            status, found = run("pull", f"{server(NAMES[0])}?X-Signature=SECRET", *folder)
            assert status == 0, found
            assert "SECRET" not in json.dumps(found)
    assert (tmp_path / "folder" / NAMES[0]).read_bytes() == model[NAMES[0]]
    status, found = run("cache", "ls")
    assert status == 0 and "SECRET" not in json.dumps(found)
    for place in (cache, tmp_path / "folder"):
        for file in place.rglob("*"):
            assert "SECRET" not in file.name
            assert not file.is_file() or b"SECRET" not in file.read_bytes()


# cache


def test_without_a_cache_its_commands_say_so(run, tmp_path, monkeypatch):
    monkeypatch.delenv("PENSTOCK_STORAGE_DISK_CACHE", raising=False)
    for command in (("ls",), ("prune", "--all"), ("verify",)):
        status, found = run("cache", *command)
        assert status == USAGE and "--disk-cache FOLDER" in found["error"]["message"]
    status, found = run("cache", "ls", "--disk-cache", tmp_path)
    assert status == ERROR and "there is no disk cache here" in found["error"]["message"]
    assert not list(tmp_path.iterdir())


def test_ls_lists_objects_sums_and_limits(run, cache, bucket, model, capsys, monkeypatch):
    penstock.open("s3://bucket/m/").load(names=["0.0"])
    assert run("pull", f"s3://bucket/m/{NAMES[1]}")[0] == 0
    status, found = run("cache", "ls")
    assert status == 0
    by_name = {entry["address"].rpartition("/")[2]: entry for entry in found["entries"]}
    whole, part = by_name[NAMES[1]], by_name[NAMES[0]]
    assert whole["there"] == whole["size"] == len(model[NAMES[1]]) and not whole["open"]
    assert 0 < part["there"] < part["size"]
    assert found["total"]["there"] == sum(entry["there"] for entry in found["entries"])
    assert found["limits"] == {"free": 1, "size": None} and found["writable"] and found["private"]
    monkeypatch.setenv("COLUMNS", "80")
    assert command_line.main(["cache", "ls"]) == 0
    assert all(len(line) <= 80 or " " not in line for line in capsys.readouterr().out.splitlines())
    monkeypatch.setenv("COLUMNS", "")
    assert command_line.main(["cache", "ls", "--storage", "disk_cache_size=5GB"]) == 0
    said = capsys.readouterr().out
    assert "address" in said and "100%" in said and "at most 5.00 GB in the cache" in said
    assert re.search(r"s3://bucket/m/model-00002\S* +[0-9a-f]{11}…", said)


def test_prune_removes_what_it_is_told_and_never_what_is_open(run, cache, bucket, monkeypatch):
    assert run("pull", "s3://bucket/m/")[0] == 0
    assert run("cache", "prune")[0] == USAGE
    assert run("cache", "prune", "--all", "--to", "1GB")[0] == USAGE
    _, before = run("cache", "ls")
    count = len(before["entries"])
    for how in (["--all"], ["--to", "0"], ["--older-than", "0s"], ["s3://bucket/"]):
        status, found = run("cache", "prune", *how, "--dry-run")
        assert (status, len(found["gone"]), len(found["kept"])) == (0, count, 0)
    status, found = run("cache", "prune", "--older-than", "1h")
    assert (status, found["gone"], len(found["kept"])) == (0, [], count)
    status, found = run("cache", "prune", f"s3://bucket/m/{NAMES[0]}")
    assert (status, [entry["address"] for entry in found["gone"]]) == (0, [f"s3://bucket/m/{NAMES[0]}"])
    # A load keeps what it reads
    checkpoint = penstock.open("s3://bucket/m/")
    stream = checkpoint.stream(names=["1.*"])
    next(stream)
    status, found = run("cache", "prune", "--all")
    held = [entry["address"].rpartition("/")[2] for entry in found["open"]]
    assert status == 0 and NAMES[1] in held and len(found["gone"]) == count - 1 - len(set(held) - {NAMES[0]})
    stream.close()
    checkpoint = None
    assert run("cache", "prune", "--to", "1GB")[1]["gone"] == []
    assert command_line.main(["cache", "prune", "--to", "0"]) == 0


def test_verify_names_bad_blocks_and_leaves_them_if_told(run, cache, bucket, model, capsys):
    assert run("pull", "s3://bucket/m/")[0] == 0
    _, found = run("cache", "ls")
    used = {entry["id"]: entry["used"] for entry in found["entries"]}
    paths = {entry["address"].rpartition("/")[2]: Path(entry["path"]) for entry in found["entries"]}
    status, found = run("cache", "verify")
    assert status == 0 and found["ok"] and found["nbytes"] == sum(len(model[name]) for name in WANTED)
    _, found = run("cache", "ls")
    assert {entry["id"]: entry["used"] for entry in found["entries"]} == used, "no use is recorded"
    last = len(model[NAMES[0]]) - 1
    flip(paths[NAMES[0]], last)
    flip(paths["tokenizer.json"], 0)
    for _ in range(2):
        status, found = run("cache", "verify", "--keep")
        assert status == FAILED and not found["ok"]
        blocks = [(bad["address"].rpartition("/")[2], bad["begin"], bad["end"]) for bad in found["bad"]]
        begin = last // BLOCK * BLOCK
        assert blocks == [(NAMES[0], begin, last + 1), ("tokenizer.json", 0, BLOCK)]
    assert run("cache", "verify", f"s3://bucket/m/{NAMES[1]}")[0] == 0
    assert command_line.main(["cache", "verify", "--no-progress"]) == FAILED
    said = " ".join(capsys.readouterr().out.split())  # its lines are as long as the terminal
    assert "2 bad blocks" in said and "fetches them again" in said
    assert run("cache", "verify")[0] == 0, "they are missing now"
    state = penstock.open("s3://bucket/m/").load(framework="np")
    assert state["0.0"].nbytes == 700 * 1000 * 4


def test_verify_of_a_checkpoint_compares_the_cache_too(run, cache, bucket, model, caplog):
    assert run("pull", "s3://bucket/m/")[0] == 0
    _, found = run("cache", "ls")
    [path] = [Path(entry["path"]) for entry in found["entries"] if entry["address"].endswith(NAMES[0])]
    flip(path, 2 * BLOCK + 1)
    checkpoint = penstock.open("s3://bucket/m/")
    found = checkpoint.verify()
    assert set(found) == set(checkpoint.files)
    assert f"{NAMES[0]}: bytes {2 * BLOCK} to {3 * BLOCK} in the disk cache are not those that came" in caplog.text
    assert path.read_bytes() == model[NAMES[0]], "the hash has fetched it again"
    caplog.clear()
    checkpoint.verify()
    assert not caplog.text


def test_verify_of_a_cache_that_can_only_be_read_needs_keep(run, cache, bucket, monkeypatch):
    assert run("pull", "s3://bucket/m/")[0] == 0
    _, found = run("cache", "ls")
    flip(Path(found["entries"][0]["path"]), 0)
    opened = _core.CacheFolder({"disk_cache": str(cache)})
    assert opened.access() == (True, True)
    assert opened.verify(found["entries"][0]["id"], 0, 9, False)[1]
    assert opened.verify("0" * 32, 0, 9, False) is None


def test_files_of_a_folder_have_the_usual_mode(run, tmp_path, bucket):
    before = os.umask(0o027)
    with contextlib.ExitStack() as stack:
        stack.callback(os.umask, before)
        assert run("pull", "s3://bucket/m/", tmp_path / "folder")[0] == 0
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "folder").glob("*.safetensors")} == {0o640}
