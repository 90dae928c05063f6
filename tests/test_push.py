"""`penstock push`, and what killed pushes leave, against a double of S3 (`upload_server`). `convert` to addresses."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
from conftest import Oracle
from penstock import _core, _journal, _pull, _push
from penstock._convert import convert
from penstock._options import make_options
from penstock._push import _TAGGED, clear_bucket, push
from s3_server import KEYS, error, serving
from test_uploads import INDEX, PLACE, TRIAL, load, same, settings, shards, tensors, visible
from upload_server import Parts, Uploads, carried_out

Command = Callable[..., Any]
CONFIG = b'{"model_type": "x"}'
#: A shard, the index, a tokenizer's package of code
SMALL = {"config.json": CONFIG, "tokenizer.json": b"{}" * 5000, "1_Pooling/config.json": b"{}"}


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    monkeypatch.setenv(_journal.VARIABLE, str(tmp_path / "state"))
    with serving(Uploads()) as found:
        yield found


def model(folder: Path, seed: int = 0, *, single: bool = False) -> Path:
    """A folder with a checkpoint and what lies beside it."""
    penstock.save(tensors(seed), folder, max_shard_size=None if single else 6100)
    for name, content in SMALL.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    (folder / "optimizer.pt").write_bytes(b"not of a load")
    (folder / ".penstock-pull.json").write_text("{}")
    return folder


def pushed(bucket: Uploads, folder: Path, at: str = PLACE, **more: Any) -> _push.Pushed:
    return push(folder, at, storage=settings(bucket), **more)


def journals(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "state").rglob("*.*"))


@pytest.mark.parametrize("single", [True, False])
def test_the_files_of_a_folder_are_objects_byte_for_byte(bucket: Uploads, tmp_path: Path, single: bool) -> None:
    folder = model(tmp_path / "m", single=single)
    found = pushed(bucket, folder)
    expected = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("optimizer.pt", ".penstock-pull.json")
    }
    assert {key.removeprefix("models/one/"): content for key, content in bucket.objects.items()} == expected
    assert {(file.path, file.nbytes) for file in found.files} == {(k, len(v)) for k, v in expected.items()}
    keys = [key.removeprefix("models/one/") for key, _ in bucket.history]
    last = "model.safetensors" if single else "model.safetensors.index.json"
    assert keys[-1] == last and not bucket.under_way
    assert all(keys.index(name) > keys.index(shard) for name in SMALL for shard in keys if "-of-" in shard)
    assert same(load(bucket), tensors()) and not journals(tmp_path)


def test_what_is_pushed_is_what_is_pulled(bucket: Uploads, tmp_path: Path, cli: Command) -> None:
    folder = model(tmp_path / "m")
    storage = [f"--storage={name}={value}" for name, value in settings(bucket).items()]
    done = cli("push", folder, f"{PLACE}/", "--json", *storage)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] and told["nbytes"] == sum(map(len, bucket.objects.values()))
    assert cli("pull", PLACE, tmp_path / "back", *storage).returncode == 0
    for file in told["files"]:
        assert (tmp_path / "back" / file["path"]).read_bytes() == (folder / file["path"]).read_bytes()
    assert len(told["files"]) == 3 + 1 + len(SMALL) + 1


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_a_reader_sees_the_old_checkpoint_or_the_pushed_one(
    bucket: Uploads, tmp_path: Path, first: bool, second: bool
) -> None:
    pushed(bucket, model(tmp_path / "old", 1, single=first))
    before, old = dict(bucket.objects), visible(bucket.objects)
    bucket.history.clear()
    folder = model(tmp_path / "new", 2, single=second)
    found = pushed(bucket, folder)
    objects = dict(before)
    new = visible(bucket.objects)
    assert new != old and new is not None
    for key, content in bucket.history:
        if content is None:
            del objects[key]
        else:
            objects[key] = content
        assert visible(objects) in (old, new)
    assert same(load(bucket), tensors(2))
    for file in found.files:
        content = bucket.objects[file.address.removeprefix("s3://bucket/")]
        assert content == (folder / file.path).read_bytes() or file.path.endswith(".index.json")
    left = {f"s3://bucket/{key}" for key in bucket.objects}
    assert left == {file.address for file in found.files}, "the shards of the old one are gone"


def test_shards_that_would_replace_others_get_new_names_again_and_again(bucket: Uploads, tmp_path: Path) -> None:
    before: set[str] = set()
    folder = tmp_path / "0"
    for seed in range(4):
        pushed(bucket, model(folder, 7) if seed == 0 else folder)
        names = {key for key in bucket.objects if "-of-" in key}
        assert len(names) == 3 and not names & before and same(load(bucket), tensors(7))
        assert all(name.count("-s") <= 1 for name in names), "one tag takes the place of another"
        before = names
        folder = tmp_path / str(seed + 1)  # what is pushed may itself have tags
        _pull.pull(PLACE, str(folder), storage=settings(bucket), progress=False)


def test_files_without_an_index_get_one(bucket: Uploads, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for part in "ab":
        penstock.save_file({f"{part}.w": np.full(9, ord(part), np.uint8)}, folder.joinpath(f"{part}.safetensors"))
    for _ in range(2):
        pushed(bucket, folder)
        assert set(json.loads(bucket.objects[INDEX])["weight_map"]) == {"a.w", "b.w"}
        assert load(bucket)["b.w"].tolist() == [98] * 9
        assert len(bucket.objects) == 3


def test_large_files_go_in_parts_through_bounded_memory(bucket: Uploads, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    large = {"w": np.random.default_rng(1).integers(0, 255, 50_000_000, np.uint8)}
    penstock.save_file(large, tmp_path / "m/model.safetensors")
    found = pushed(bucket, tmp_path / "m", options={"staging": 64 << 20})
    assert bucket.objects["models/one/model.safetensors"] == (tmp_path / "m/model.safetensors").read_bytes()
    parts = [query["partNumber"] for _, key, query in bucket.requests if "partNumber" in query and TRIAL not in key]
    assert sorted(parts) == ["1", "2", "3"]
    assert 0 < found.report.peak_staging <= 64 << 20


@pytest.mark.parametrize("how", ["written", "replaced", "truncated", "removed"])
def test_a_file_that_changes_while_it_is_read_is_an_error_and_nothing_is_visible(
    bucket: Uploads, tmp_path: Path, how: str
) -> None:
    pushed(bucket, model(tmp_path / "old", 1))
    before = dict(bucket.objects)
    folder = model(tmp_path / "new", 2)
    shard = folder / "model-00002-of-00003.safetensors"

    def change(method: str, key: str, query: dict[str, str]) -> None:
        if "partNumber" in query:
            bucket.refuses = lambda *_: None
            if how == "replaced":
                (folder / "other").write_bytes(shard.read_bytes())
                (folder / "other").replace(shard)
            elif how == "removed":
                shard.unlink()
            elif how == "truncated":
                os.truncate(shard, 100)
            else:
                with shard.open("r+b") as file:
                    file.write(b"x")
                os.utime(shard, ns=(1, 1))

    bucket.refuses = change  # type: ignore[assignment]
    with pytest.raises(penstock.ChangedError, match="model-00002-of-00003"):
        pushed(bucket, folder, options={"threads": 1})
    assert bucket.objects == before and not bucket.under_way and not journals(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("how", ["written", "replaced"])
def test_a_small_file_or_index_that_changes_is_an_error_and_nothing_is_visible(
    bucket: Uploads, tmp_path: Path, name: str, how: str
) -> None:
    pushed(bucket, model(tmp_path / "old", 1))
    before = dict(bucket.objects)
    folder = model(tmp_path / "new", 2)

    def change(method: str, key: str, query: dict[str, str]) -> None:
        if "partNumber" in query:
            bucket.refuses = lambda *_: None
            at = folder / ("other" if how == "replaced" else name)
            at.write_bytes((folder / name).read_bytes().replace(b"{", b"[", 1))
            if how == "replaced":
                at.replace(folder / name)

    bucket.refuses = change  # type: ignore[assignment]
    with pytest.raises(penstock.ChangedError, match=name):
        pushed(bucket, folder, options={"threads": 1})
    assert bucket.objects == before and not bucket.under_way and not journals(tmp_path)


def test_the_folder_is_read_after_clearing(bucket: Uploads, tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    line = {"object": f"{PLACE}/m-s0000abcd.safetensors"}
    noted(bucket, line, {**line, "upload": "x"})

    def change(method: str, key: str, query: dict[str, str]) -> None:
        if method == "DELETE":
            (folder / "config.json").write_bytes(b'{"model_type": "y"}')

    bucket.refuses = change  # type: ignore[assignment]
    pushed(bucket, folder)
    assert bucket.objects["models/one/config.json"] == b'{"model_type": "y"}'


def test_small_files_stay_if_another_program_has_written_the_index(bucket: Uploads, tmp_path: Path) -> None:
    pushed(bucket, model(tmp_path / "old", 1))
    before = dict(bucket.objects)
    folder = model(tmp_path / "new", 2)
    (folder / "config.json").write_bytes(b"{}")

    def between(method: str, key: str, query: dict[str, str]) -> None:
        if method == "POST" and "uploadId" in query:
            bucket.objects[INDEX] = before[INDEX] + b" "

    bucket.refuses = between  # type: ignore[assignment]
    with pytest.raises(penstock.ChangedError, match="nothing was replaced"):
        pushed(bucket, folder)
    assert bucket.objects == {**before, INDEX: before[INDEX] + b" "} and not bucket.under_way


def test_the_error_of_a_push_names_the_small_files_that_are_replaced(bucket: Uploads, tmp_path: Path) -> None:
    pushed(bucket, model(tmp_path / "old", 1))
    bucket.refuses = lambda method, key, query: (
        error(400, "InvalidRequest", "on purpose") if method == "PUT" and key == INDEX else None
    )
    with pytest.raises(penstock.PenstockError, match=r"on purpose.*new ones already: .*config\.json.*tokenizer\.json"):
        pushed(bucket, model(tmp_path / "new", 2))
    assert same(load(bucket), tensors(1))


@pytest.mark.parametrize("there", ["model.safetensors", "model.safetensors.index.json"])
def test_another_checkpoint_that_readers_prefer_is_told(bucket: Uploads, tmp_path: Path, there: str) -> None:
    bucket.stored(f"models/one/{there}", b"{}")
    (tmp_path / "m").mkdir()
    penstock.save_file(tensors(), tmp_path / "m/consolidated.safetensors")
    told = pushed(bucket, tmp_path / "m").report.fallbacks
    assert [f["from"] for f in told] == ["the pushed checkpoint"] and told[0]["reason"].startswith(f"{there} ")
    assert pushed(bucket, tmp_path / "m", "s3://bucket/alone").report.fallbacks == []


def folder_of(folder: Path, *names: str) -> Path:
    """A checkpoint with an index and shards of these names."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        penstock.save_file({f"w{number}": np.full(9, number, np.uint8)}, folder / name)
    index = {"metadata": {}, "weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    (folder / "x.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_in_folders_replace_none_and_none_hides_the_index(bucket: Uploads, tmp_path: Path) -> None:
    taken = "models/one/sub/a.safetensors"
    bucket.stored(taken, b"another's")
    found = pushed(bucket, folder_of(tmp_path / "m", "sub/a.safetensors", "b.safetensors"))
    names = {file.path: file.address.removeprefix(f"{PLACE}/") for file in found.files}
    assert bucket.objects[taken] == b"another's"
    assert _TAGGED.fullmatch(names["sub/a.safetensors"]) and names["sub/a.safetensors"].startswith("sub/a-s")
    assert load(bucket)["w0"].tolist() == [0] * 9
    # Readers of a folder with such a file do not look for its index, so no such folder can be given
    folder = folder_of(tmp_path / "n", "model.safetensors", "b.safetensors")
    files = [(name, str(folder / name)) for name in ("model.safetensors", "b.safetensors")]
    index = "x.safetensors.index.json"
    given = (files, (index, (folder / index).read_text(), str(folder / index)), [], "x.safetensors", _journal.new())
    save = _core.Save.push("s3://bucket/two", *given, _journal.machine(), make_options(None), settings(bucket))
    assert save.wait(60) and save.report()
    assert _TAGGED.fullmatch(save.files()[0]) and "two/model.safetensors" not in bucket.objects
    save.close()


def test_a_failure_at_any_request_leaves_the_old_checkpoint_or_the_pushed_one(bucket: Uploads, tmp_path: Path) -> None:
    pushed(bucket, model(tmp_path / "old", 1))
    before, old = dict(bucket.objects), visible(bucket.objects)
    folder = model(tmp_path / "new", 2)
    number = 0
    while True:
        bucket.objects.clear()
        bucket.objects.update(before)
        left = [number]
        lock = threading.Lock()

        def refuses(method: str, key: str, query: dict[str, str], left: list[int] = left, lock: Any = lock) -> Any:
            with lock:
                left[0] -= 1
                return error(400, "InvalidRequest", "on purpose") if left[0] == -1 else None

        bucket.refuses = refuses
        try:
            pushed(bucket, folder)
        except penstock.PenstockError as e:
            assert "on purpose" in str(e) or "answered 400" in str(e)
        bucket.refuses = lambda *_: None
        if left[0] >= 0:
            break
        new = visible(bucket.objects)
        assert not bucket.under_way and (new == old or same(load(bucket), tensors(2)))
        if new == old:
            assert {key for key in bucket.objects if "-of-" in key} == {key for key in before if "-of-" in key}
            assert not journals(tmp_path)
        number += 1
    assert number > 15


def test_a_push_that_is_given_up_leaves_nothing(bucket: Uploads, tmp_path: Path) -> None:
    bucket.delay = 0.2

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pushed(bucket, model(tmp_path / "m"), progress=interrupted)
    assert not bucket.objects and not bucket.under_way and not journals(tmp_path)


def head_of(**more: Any) -> dict[str, Any]:
    """The head of a journal of this machine."""
    head = {"format": 1, "folder": PLACE, "index": "model.safetensors.index.json", "tag": "s0000abcd"}
    return {**head, "machine": _journal.machine(), **more}


def noted(bucket: Uploads, *lines: dict[str, Any], **more: Any) -> Path:
    """The journal of a killed push to the bucket, with these lines behind its head."""
    identity = _core.Bucket(PLACE, settings(bucket)).identity()
    path = Path(_journal.new())
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    path.touch(0o600)
    path.write_text("".join(json.dumps(line) + "\n" for line in [head_of(identity=identity, **more), *lines]))
    return path


def cleared(bucket: Uploads) -> _push.Cleared:
    """What the next push clears: to a folder that nothing else uses."""
    return _push._clear_dead("s3://bucket/elsewhere", settings(bucket))


@pytest.mark.parametrize(
    ("name", "version", "goes", "told"),
    [
        ("m-s0000abcd-00001-of-00002.safetensors", "this", True, False),
        ("m-s0000abcd.safetensors", None, True, False),
        ("m-s0000abcd-00001-of-00002.safetensors", "another", False, False),
        ("m-s0000aaaa-00001-of-00002.safetensors", "this", False, True),
        ("m-s0000aaaa-00001-of-00002.safetensors", "another", False, False),
        ("m-00001-of-00002.safetensors", None, False, True),
        ("m-00001-of-00002.safetensors", "this", False, True),
        ("../one-too/m-s0000abcd.safetensors", None, False, False),
        ("../../other/m-s0000abcd.safetensors", None, False, False),
    ],
)
def test_a_journal_removes_what_its_own_push_has_named(
    bucket: Uploads, name: str, version: str | None, goes: bool, told: bool
) -> None:
    address = os.path.normpath(f"models/one/{name}") if name.startswith("../o") else f"models/one/{name}"
    bucket.stored(address, b"content")
    bucket.written[address] -= timedelta(days=9)  # nothing goes because it is old
    line = {"object": f"s3://bucket/{address}"}
    versions = {"this": bucket.tag(address), "another": '"1"'}
    journal = noted(bucket, line, *([{**line, "version": versions[version]}] if version else []))
    found = cleared(bucket)
    assert (address not in bucket.objects) == goes == bool(found.objects)
    assert [text.startswith(f"s3://bucket/{address}: ") for text in found.left] == [True] * told
    assert journal.exists() == told, "what was skipped keeps the journal"


def test_a_journal_ends_the_uploads_that_it_names_and_those_with_its_own_tag(bucket: Uploads) -> None:
    keys = {
        "named": "m-00001-of-00002.safetensors", "of it too": "m-s0000abcd-00001-of-00002.safetensors",
        "theirs": "m-00002-of-00002.safetensors", "not below": "../m-s0000abcd-00001-of-00002.safetensors",
    }  # fmt: skip
    for upload, key in keys.items():
        began = datetime.now(timezone.utc) - timedelta(days=9)
        bucket.under_way[upload] = Parts(os.path.normpath(f"models/one/{key}"), began=began)
    below = f"s3://bucket/{bucket.under_way['not below'].key}"
    lines = [{"object": f"{PLACE}/{key}"} for key in keys.values()]
    journal = noted(
        bucket, *lines, {**lines[0], "upload": "named"}, {"object": below}, {"object": below, "upload": "not below"}
    )
    found = cleared(bucket)
    assert set(bucket.under_way) == {"theirs", "not below"} and len(found.uploads) == 2
    assert len(found.left) == 1 and keys["theirs"] in found.left[0] and journal.exists()
    del bucket.under_way["theirs"]
    assert cleared(bucket) == ([found.uploads[0]], [], [], []) and not journal.exists()


def test_without_the_right_to_list_uploads_the_known_ones_and_the_shards_go(bucket: Uploads) -> None:
    keys = [f"m-s0000abcd-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    bucket.under_way["one"] = Parts(f"models/one/{keys[0]}")
    bucket.stored(f"models/one/{keys[1]}", b"x")
    lines = [{"object": f"{PLACE}/{key}"} for key in keys]
    journal = noted(bucket, *lines, {**lines[0], "upload": "one"}, {**lines[1], "version": None})
    bucket.refuses = lambda method, key, query: (
        error(403, "AccessDenied", "no list") if method == "GET" and "uploads" in query else None
    )
    found = cleared(bucket)
    assert not bucket.under_way and not bucket.objects
    assert len(found.left) == 1 and "no list" in found.left[0] and journal.exists()
    bucket.refuses = lambda *_: None
    assert cleared(bucket).left == [] and not journal.exists()


@pytest.mark.parametrize("how", ["file", "folder", "owner", "link", "machine", "head", "tag"])
def test_a_journal_of_another_user_or_machine_is_passed_over(
    bucket: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    key = "models/one/m-s0000abcd-00001-of-00002.safetensors"
    bucket.stored(key, b"x")
    more = {"machine": {"machine": "another"}, "tag": {"tag": ".*"}}.get(how, {})
    journal = noted(bucket, {"object": f"s3://bucket/{key}"}, **more)
    if how in ("file", "folder"):
        (journal if how == "file" else journal.parent).chmod(0o770)
    elif how == "owner":
        us = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    elif how == "link":
        (tmp_path / "there").write_text(journal.read_text())
        journal.unlink()
        journal.symlink_to(tmp_path / "there")
    elif how == "head":
        journal.write_text("".join(journal.read_text().splitlines(True)[1:]))
    found = cleared(bucket)
    assert key in bucket.objects and journal.exists() and not found.objects
    says = {"file": "may write to it", "folder": "may write to it", "owner": "another user", "link": "no regular file"}
    assert [says[how] in text and str(journal.parent) in text for text in found.left] == [True] * (how in says)


@pytest.mark.parametrize("how", ["open", "lock", "home", "folder"])
def test_journals_that_cannot_be_read_are_told_with_their_place(
    bucket: Uploads, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    place = noted(bucket)

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as change:
        if how == "open":
            change.setattr(os, "open", refused)
        elif how == "lock":
            change.setattr(fcntl, "flock", refused)
        elif how == "folder":
            change.setattr(Path, "iterdir", refused)
            place = place.parent
        else:
            change.delenv(_journal.VARIABLE)
            change.delenv("XDG_STATE_HOME", raising=False)
            change.delenv("HOME", raising=False)
            change.setattr(pwd, "getpwuid", lambda uid: {}[uid])
            place = Path("~/.local/state/penstock/push")
        with pytest.raises(penstock.WriteError, match=_journal.VARIABLE) as caught:
            cleared(bucket)
    assert str(place) in str(caught.value)


def test_an_upload_whose_begin_had_no_answer_keeps_the_journal(bucket: Uploads, tmp_path: Path) -> None:
    pushed(bucket, model(tmp_path / "old", 1))
    bucket.loses = lambda method, key, query: method == "POST" and "uploads" in query and "-00002-of-" in key
    with pytest.raises(penstock.PenstockError):
        pushed(bucket, model(tmp_path / "new", 2), options={"stall_timeout": 2})
    assert bucket.under_way and len(journals(tmp_path)) == 1
    bucket.loses = lambda *_: False
    assert cleared(bucket).uploads and not bucket.under_way and not journals(tmp_path)


def test_a_line_of_a_journal_that_breaks_off_is_passed_over() -> None:
    head = json.dumps(head_of(identity=f"here {PLACE}"))
    lines = [head, json.dumps({"object": f"{PLACE}/x"}), json.dumps({"object": f"{PLACE}/x", "upload": "u"})]
    for cut, uploads in ((0, [(f"{PLACE}/x", "u")]), (3, [])):
        text = "\n".join(lines)
        journal = _journal.Journal(Path("x"), text[: len(text) - cut])
        assert (journal.address, journal.objects(), journal.uploads()) == (PLACE, [f"{PLACE}/x"], uploads)
    assert _journal.Journal(Path("x"), head[:-3]).address == ""


class Killed:
    """A push of three shards in a process of its own, which waits at a request and can be killed there."""

    def __init__(self, bucket: Uploads, folder: Path, at: Callable[[str, str, dict[str, str]], bool]) -> None:
        self._reached, self._goes_on = threading.Event(), threading.Event()
        self._bucket, come, lock = bucket, [0], threading.Lock()

        def waits(method: str, key: str, query: dict[str, str]) -> None:
            if at(method, key, query):
                with lock:
                    come[0] += 1
                if come[0] == (3 if "partNumber" in query else 1):  # all parts: each upload is known by then
                    self._reached.set()
                self._goes_on.wait(60)

        bucket.refuses = waits  # type: ignore[assignment]
        storage = [f"--storage={name}={value}" for name, value in settings(bucket).items()]
        program = [sys.executable, "-m", "penstock.cli", "push", str(folder), PLACE, *storage]
        self.process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._reached.wait(60), self.process.communicate(timeout=5)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()
        self.go_on()
        carried_out(self._bucket)

    def go_on(self) -> None:
        self._bucket.refuses = lambda *_: None
        self._goes_on.set()

    def end(self) -> None:
        self.go_on()
        _, error = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, error


#: Requests at which a push is killed: what it leaves then
POINTS: dict[str, Callable[[str, str, dict[str, str]], bool]] = {
    "begun": lambda method, key, query: method == "POST" and "uploads" in query and "-00002-of-" in key,
    "part": lambda method, key, query: "partNumber" in query,
    "end": lambda method, key, query: method == "POST" and "uploadId" in query and "-00001-of-" in key,
    "index": lambda method, key, query: method == "PUT" and key == INDEX,
}


@pytest.mark.parametrize("before", [True, False], ids=["replaces", "new"])
@pytest.mark.parametrize("point", POINTS)
def test_the_next_push_clears_what_a_killed_one_has_left(
    bucket: Uploads, tmp_path: Path, point: str, before: bool
) -> None:
    if before:
        pushed(bucket, model(tmp_path / "old", 1))
    known, old = set(bucket.objects), visible(bucket.objects)
    killed = Killed(bucket, model(tmp_path / "killed", 2), POINTS[point])
    (journal,) = journals(tmp_path)
    text = journal.read_text()
    assert stat.S_IMODE(journal.stat().st_mode) == 0o600 and stat.S_IMODE(journal.parent.stat().st_mode) == 0o700
    assert not any(key in text or secret in text for key, secret in KEYS.items())
    killed.kill()
    if point != "index":  # the server still carries that one out
        assert visible(bucket.objects) == old
    assert bucket.under_way or set(bucket.objects) - known
    found = pushed(bucket, model(tmp_path / "next", 3), "s3://bucket/elsewhere")
    # A name without a tag may be another program's by now
    index = json.loads(bucket.objects[INDEX])["weight_map"].values() if INDEX in bucket.objects else ()
    below = {key.removeprefix("models/one/") for key in set(bucket.objects) - known if key.startswith("models/one/")}
    new = below - set(index)
    left = [*(key for key in new if "-of-" in key), *(parts.key[11:] for parts in bucket.under_way.values())]
    assert sorted(text.split(": ")[0] for text in found.cleared.left) == sorted(
        f"s3://bucket/models/one/{key}" for key in left
    )
    assert bool(left) == (not before and point in ("begun", "end")) and not any("-s" in key for key in left)
    if found.cleared.left:
        assert not before and journals(tmp_path) == [journal]
        for key in left:
            bucket.objects.pop(f"models/one/{key}", None)
        bucket.under_way.clear()
        assert pushed(bucket, tmp_path / "next", "s3://bucket/elsewhere").cleared.left == []
    assert not bucket.under_way and not journals(tmp_path)
    named = json.loads(bucket.objects[INDEX])["weight_map"].values() if INDEX in bucket.objects else ()
    assert {key for key in bucket.objects if key.startswith("models/one/") and "-of-" in key} == {
        *(f"models/one/{name}" for name in named),
        *({key for key in known if "-of-" in key} if point == "index" else ()),
    }
    pushed(bucket, tmp_path / "next")
    assert same(load(bucket), tensors(3))


def test_a_push_that_runs_is_not_touched(bucket: Uploads, tmp_path: Path) -> None:
    pushed(bucket, model(tmp_path / "old", 1))
    running = Killed(bucket, model(tmp_path / "live", 2), POINTS["part"])
    bucket.refuses = lambda *_: None
    uploads = set(bucket.under_way)
    for parts in bucket.under_way.values():
        parts.began -= timedelta(days=3)
    for key in bucket.objects:
        bucket.written[key] = datetime.now(timezone.utc) - timedelta(days=3)
    cleared = clear_bucket(PLACE, storage=settings(bucket))
    assert cleared == ([], [], [], []) and set(bucket.under_way) == uploads
    found = pushed(bucket, model(tmp_path / "other", 3), "s3://bucket/other", clear=True)
    assert found.cleared == ([], [], [], []) and uploads <= set(bucket.under_way)
    running.end()
    assert same(load(bucket), tensors(2)) and not bucket.under_way and not journals(tmp_path)


def test_journals_of_another_service_stay(bucket: Uploads, tmp_path: Path) -> None:
    killed = Killed(bucket, model(tmp_path / "killed", 2), POINTS["part"])
    killed.kill()
    with serving(Uploads()) as other:
        assert pushed(other, tmp_path / "killed").cleared == ([], [], [], [])
    assert bucket.under_way and len(journals(tmp_path)) == 1
    assert pushed(bucket, tmp_path / "killed").cleared.uploads and not bucket.under_way


def test_what_is_older_than_a_day_is_cleared_on_request(bucket: Uploads, cli: Command) -> None:
    ago = datetime.now(timezone.utc)
    for number, (key, hours) in enumerate([("a", 25), ("b/c", 30), ("d", 23), ("../x", 99), ("e", 26), ("f", 1)]):
        place = key.removeprefix("../") if key.startswith("../") else f"models/one/{key}"
        bucket.under_way[f"old-{number}"] = Parts(place, began=ago - timedelta(hours=hours))
    penstock.save(**shards(1), directory=PLACE, storage=settings(bucket))
    penstock.save(**shards(2), directory=PLACE, storage=settings(bucket))
    stray, young = (
        "models/one/model-s00000001-00001-of-00002.safetensors",
        "models/one/x-s00000002-00001-of-00002.safetensors",
    )
    odd, variant = "models/one/x-s00000004.safetensors", "models/one/m-s00000003-00001-of-00001.safetensors"
    bucket.objects |= dict.fromkeys([stray, young, odd, variant, "models/one/mine.safetensors"], b"x")
    named = {"weight_map": {"w": f"./{variant.rpartition('/')[2]}"}}
    bucket.objects["models/one/m.safetensors.index.fp16.json"] = json.dumps(named).encode()
    for key in bucket.objects:
        bucket.written[key] = ago - timedelta(days=3)
    bucket.written[young] = ago - timedelta(hours=3)
    before = set(bucket.objects)
    storage = [f"--storage={name}={value}" for name, value in settings(bucket).items()]
    done = cli("push", "--clear", PLACE, "--json", *storage)
    assert done.returncode == 0, done.stderr
    assert before - set(bucket.objects) == {stray}
    assert {parts.key for parts in bucket.under_way.values()} == {"models/one/d", "x", "models/one/f"}
    cleared = json.loads(done.stdout)["cleared"]
    assert cleared["objects"] == [f"s3://bucket/{stray}"] and len(cleared["uploads"]) == 3
    assert [text.split(": ")[0] for text in cleared["left"]] == [f"s3://bucket/{key}" for key in sorted([young, odd])]
    assert same(load(bucket), tensors(2))
    assert cleared["kept"] == []
    assert "not cleared: " in cli("push", "--clear", PLACE, *storage).stdout
    assert "nothing to clear" in cli("push", "--clear", "s3://bucket/elsewhere", *storage).stdout


def test_a_shard_that_is_removed_and_kept_as_an_old_version_is_told(bucket: Uploads, cli: Command) -> None:
    bucket.keeps_versions = True
    stray = "models/one/model-s00000001-00001-of-00002.safetensors"
    bucket.stored(stray, b"x")
    bucket.written[stray] -= timedelta(days=2)
    bucket.stored(INDEX, b'{"weight_map": {}}')
    storage = [f"--storage={name}={value}" for name, value in settings(bucket).items()]
    told = cli("push", "--clear", PLACE, *storage).stdout
    assert f"removed a shard that no index names: s3://bucket/{stray}" in told.replace("\n", " ")
    assert "the bytes of 1 of these may stay as old ones" in " ".join(told.split())
    bucket.stored(stray, b"x")
    bucket.written[stray] -= timedelta(days=2)
    found = clear_bucket(PLACE, storage=settings(bucket))
    assert found.objects == found.kept == [f"s3://bucket/{stray}"] and stray not in bucket.objects


def test_a_shard_is_not_kept_where_versions_are_suspended(bucket: Uploads) -> None:
    """The mark of its removal replaces the version `null`, which are its bytes."""
    bucket.keeps_versions = bucket.is_suspended = True
    stray = "models/one/model-s00000001-00001-of-00002.safetensors"
    bucket.stored(stray, b"x")
    bucket.written[stray] -= timedelta(days=2)
    bucket.stored(INDEX, b'{"weight_map": {}}')
    found = clear_bucket(PLACE, storage=settings(bucket))
    assert found.objects == [f"s3://bucket/{stray}"] and found.kept == []


@pytest.mark.parametrize("index", [None, b"{", b'{"weight_map": {}}'], ids=["none", "broken", "whole"])
def test_a_shard_is_removed_only_where_an_index_tells_that_it_is_of_no_use(
    bucket: Uploads, index: bytes | None
) -> None:
    stray = "models/one/model-s00000001-00001-of-00002.safetensors"
    bucket.stored(stray, b"x")
    bucket.written[stray] -= timedelta(days=2)
    bucket.stored("models/one/other.safetensors.index.json", b'{"weight_map": {}}') if index == b"{" else None
    if index is not None:
        bucket.stored(INDEX, index)
    found = clear_bucket(PLACE, storage=settings(bucket))
    assert (stray not in bucket.objects) == (index == b'{"weight_map": {}}')
    assert [text.split(": ")[0] for text in found.left] == [f"s3://bucket/{stray}"] * (stray in bucket.objects)


def test_a_folder_that_is_none_and_an_address_that_is_none(bucket: Uploads, tmp_path: Path, cli: Command) -> None:
    (tmp_path / "empty").mkdir()
    model(tmp_path / "good")
    for folder, at, kind, says in [
        (tmp_path / "nowhere", PLACE, penstock.NotFoundError, "no such folder"),
        (tmp_path / "empty", PLACE, penstock.PenstockError, "the directory is empty"),
        (tmp_path / "good", str(tmp_path), penstock.InvalidError, "no address"),
        (tmp_path / "good", "s3://", penstock.InvalidError, "names no bucket"),
        (tmp_path / "good", "hf://org/name", penstock.InvalidError, "hf upload"),
        (tmp_path / "good", "https://host/x", penstock.UnsupportedError, "cannot be written to"),
    ]:
        with pytest.raises(kind, match=says):
            pushed(bucket, folder, at)
    assert not bucket.objects
    assert cli("push", PLACE).returncode == 2
    assert cli("push", tmp_path / "good", "ftp://x/y").returncode == 2


def test_a_journal_that_cannot_be_written_is_an_error(
    bucket: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(_journal.VARIABLE, str(tmp_path / "file"))
    with pytest.raises(penstock.PenstockError, match="PENSTOCK_STATE_FOLDER"):
        pushed(bucket, model(tmp_path / "m2"))
    assert not bucket.objects
    monkeypatch.setenv(_journal.VARIABLE, "relative")
    with pytest.raises(penstock.InvalidError, match="absolute path"):
        pushed(bucket, tmp_path / "m2")


# convert


def test_a_checkpoint_is_converted_to_an_address(bucket: Uploads, small: Path, tmp_path: Path, cli: Command) -> None:
    storage = [f"--storage={name}={value}" for name, value in settings(bucket).items()]
    done = cli("convert", small, PLACE, "--max-shard-size", "none", "--json", *storage)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["into"] == PLACE
    oracle = Oracle(small)
    oracle.same({name: load(bucket)[name] for name in oracle.entries})
    # From one address to another one
    report = convert([PLACE], "s3://bucket/two", max_shard_size="20KB", progress=False, storage=settings(bucket))
    assert len(report.files) > 2
    found = load(bucket, "s3://bucket/two/")
    oracle.same({name: found[name] for name in oracle.entries})
    with pytest.raises(penstock.InvalidError, match="is the folder of the checkpoint"):
        convert(["s3://bucket/two/"], "s3://bucket/two", progress=False, storage=settings(bucket))
    with pytest.raises(penstock.InvalidError, match="is the folder of the checkpoint"):
        convert([PLACE], f"{PLACE}/", progress=False, storage=settings(bucket))


@pytest.mark.parametrize(
    ("into", "says"),
    [
        ("s3://bucket/there?X-Amz-Signature=SECRET", "credentials in storage="),
        ("az://c/there?sv=1&sig=SECRET", "credentials in storage="),
        ("https://host/x?X-Amz-Signature=SECRET", "cannot be written to"),
        ("ftp://host/x?token=SECRET", "cannot be written to"),
        ("hf://org/name?sig=SECRET", "hf upload"),
    ],
)
def test_an_address_that_takes_nothing_is_told_without_its_signature(
    small: Path, cli: Command, into: str, says: str
) -> None:
    for command in ("convert", "push"):
        done = cli(command, small, into)
        assert done.returncode in (2, 3) and says in done.stderr and "SECRET" not in done.stderr + done.stdout


def test_where_journals_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(_journal.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _journal.folder() == tmp_path / ".local/state/penstock/push"
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert _journal.folder() == Path("/x/penstock/push")
    monkeypatch.setenv(_journal.VARIABLE, "/y")
    assert _journal.folder() == Path("/y/push")
