"""Saves to a bucket, against a double of S3 that checks signatures, checksums and conditions (`upload_server`)."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import certificates
import early_answers as early
import numpy as np
import ordeal
import penstock
import pytest
from s3_server import Answer, error, serving
from upload_server import Uploads, crc32c, settings

PLACE = "s3://bucket/models/one"
#: Names of readers such as transformers: the single file hides the index
SINGLE, INDEX = "models/one/model.safetensors", "models/one/model.safetensors.index.json"
#: In the name of an object that a service is asked to write on a condition that does not hold
TRIAL = "/.penstock-"


@pytest.fixture
def bucket() -> Iterator[Uploads]:
    with serving(Uploads()) as found:
        yield found


def tensors(seed: int = 0, count: int = 6, size: int = 3000) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"layers.{i}.w": random.integers(0, 255, size + i, np.uint8) for i in range(count)}


def shards(seed: int = 0) -> dict[str, Any]:
    """Arguments that make three shards."""
    return {"tensors_or_module": tensors(seed), "max_shard_size": 6100}


def same(found: dict[str, Any], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all((found[name] == expected[name]).all() for name in expected)


def load(bucket: Uploads, at: str = f"{PLACE}/") -> dict[str, Any]:
    return penstock.open(at, storage=settings(bucket)).load(framework="np")


def visible(objects: dict[str, bytes]) -> dict[str, bytes] | None:
    """The files of the checkpoint that a reader of the prefix takes for it; None: there is none.

    Raises:
        KeyError: one of them is not there.
    """
    if SINGLE in objects:
        return {SINGLE: objects[SINGLE]}
    if INDEX not in objects:
        return None
    named = set(json.loads(objects[INDEX])["weight_map"].values())
    return {name: objects[f"models/one/{name}"] for name in sorted(named)}


def states(bucket: Uploads, before: dict[str, bytes]) -> list[dict[str, bytes] | None]:
    """What a reader saw at each moment since `before`."""
    objects, found = dict(before), [visible(before)]
    for key, content in bucket.history:
        if content is None:
            del objects[key]
        else:
            objects[key] = content
        found.append(visible(objects))
    assert objects == bucket.objects
    return found


class Counted:
    """Refuses the request with this number."""

    def __init__(self, number: int) -> None:
        self.left, self.was_reached = number, False
        self.lock = threading.Lock()

    def __call__(self, method: str, key: str, query: dict[str, str]) -> Any:
        with self.lock:
            self.left -= 1
            if self.left != -1:
                return None
            self.was_reached = True
        return error(400, "InvalidRequest", "on purpose")


def test_a_file_in_a_bucket_is_the_file_that_a_folder_would_get(bucket: Uploads, tmp_path: Path) -> None:
    for metadata in (None, {"format": "pt"}):
        for layout in ("aligned", "compact"):
            at = f"{PLACE}/x y.safetensors"
            report = penstock.save_file(tensors(), at, metadata, layout=layout, storage=settings(bucket))
            penstock.save_file(tensors(), tmp_path / "x", metadata, layout=layout)
            assert bucket.objects["models/one/x y.safetensors"] == (tmp_path / "x").read_bytes()
            assert (report.file_bytes, report.writes, report.retries, report.fallbacks) == (
                (tmp_path / "x").stat().st_size, 1, 0, [],
            )  # fmt: skip
    assert same(load(bucket, at), tensors())
    assert not bucket.under_way


def test_parts_are_equal_and_go_side_by_side(bucket: Uploads) -> None:
    bucket.delay = 0.05
    large = {"w": np.random.default_rng(1).integers(0, 255, 37_000_000, np.uint8)}
    report = penstock.save_file(large, f"{PLACE}/w.safetensors", storage=settings(bucket))
    assert crc32c(bucket.objects["models/one/w.safetensors"][-37_000_000:]) == crc32c(large["w"].tobytes())
    parts = [query["partNumber"] for _, key, query in bucket.requests if "partNumber" in query and TRIAL not in key]
    assert sorted(parts) == ["1", "2", "3"] and report.writes == 3
    assert bucket.most_at_once >= 2
    one = {"threads": 1, "extent": 8 << 20}
    bucket.requests.clear()
    bucket.most_at_once = 0
    penstock.save_file(large, f"{PLACE}/w.safetensors", options=one, storage=settings(bucket))
    assert bucket.most_at_once == 1


def test_the_index_comes_last(bucket: Uploads) -> None:
    report = penstock.save(**shards(), directory=PLACE, storage=settings(bucket))
    assert report.files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + ["model.safetensors.index.json"]
    assert [key for key, _ in bucket.history][-1] == INDEX and len(bucket.history) == 4
    assert same(load(bucket), tensors())
    # The prefix may be spelled as a folder, and be a bucket
    penstock.save(tensors(), "s3://bucket/", storage=settings(bucket))
    assert bucket.objects["model.safetensors"]


@pytest.mark.parametrize("first", ["single", "shards"])
@pytest.mark.parametrize("second", ["single", "shards"])
def test_a_reader_sees_the_old_checkpoint_or_the_new_one(bucket: Uploads, first: str, second: str) -> None:
    arguments = {"single": lambda seed: {"tensors_or_module": tensors(seed)}, "shards": shards}
    penstock.save(**arguments[first](1), directory=PLACE, storage=settings(bucket))
    before, old = dict(bucket.objects), visible(bucket.objects)
    bucket.objects["models/one/config.json"] = b"{}"  # not of the save
    before["models/one/config.json"] = b"{}"
    bucket.history.clear()
    report = penstock.save(**arguments[second](2), directory=PLACE, storage=settings(bucket))
    new = visible(bucket.objects)
    assert new != old and all(state in (old, new) for state in states(bucket, before))
    assert same(load(bucket), tensors(2))
    left = {key.rpartition("/")[2] for key in bucket.objects} - {"config.json"}
    assert left == set(report.files), "what was visible before is gone"


@pytest.mark.parametrize("first", ["single", "shards"])
@pytest.mark.parametrize("second", ["single", "shards"])
def test_a_failure_at_any_request_leaves_the_old_checkpoint_or_the_new_one(
    bucket: Uploads, first: str, second: str
) -> None:
    arguments = {"single": lambda seed: {"tensors_or_module": tensors(seed)}, "shards": shards}
    penstock.save(**arguments[first](1), directory=PLACE, storage=settings(bucket))
    old, before = visible(bucket.objects), dict(bucket.objects)
    refused_at, outcomes = 0, set()
    while True:
        bucket.objects.clear()
        bucket.objects.update(before)
        bucket.requests.clear()
        bucket.history.clear()
        number = Counted(refused_at)
        bucket.refuses = number
        try:
            penstock.save(**arguments[second](2), directory=PLACE, storage=settings(bucket))
        except penstock.PenstockError as e:
            assert "on purpose" in str(e) or "answered 400" in str(e)  # an answer to HEAD has no body
        bucket.refuses = lambda *_: None
        if not number.was_reached:
            break
        new = visible(bucket.objects)
        assert all(state in (old, new) for state in states(bucket, before))
        outcomes.add(new == old)
        if new == old:
            strays = {key for key in bucket.objects if key not in before}
            assert not strays and not bucket.under_way, (refused_at, strays, bucket.under_way)
        else:
            assert same(load(bucket), tensors(2))
        refused_at += 1
    # A list, the versions of what is there, three requests of each object
    assert refused_at >= (5 if second == "single" else 12), refused_at
    assert True in outcomes and (False in outcomes or first == second == "single"), "what was visible is removed last"


@pytest.mark.parametrize("how", ["busy", "lost"])
def test_what_may_go_better_later_is_sent_again(bucket: Uploads, how: str) -> None:
    """Each request fails once: the server is busy, or does what it is asked and the answer is lost."""
    penstock.save(tensors(1), PLACE, storage=settings(bucket))
    seen: set[tuple[str, str, str]] = set()

    def first(method: str, key: str, query: dict[str, str]) -> bool:
        what = (method, key.partition("-s")[0] + key[-20:], "".join(sorted(query)) + query.get("partNumber", ""))
        if what in seen:
            return False
        seen.add(what)
        return True

    if how == "busy":
        bucket.refuses = lambda *a: error(503, "SlowDown", "Please reduce your request rate.") if first(*a) else None
    else:
        bucket.loses = first
    bucket.history.clear()
    before = dict(bucket.objects)
    report = penstock.save(**shards(2), directory=PLACE, storage=settings(bucket))
    bucket.refuses, bucket.loses = (lambda *_: None), (lambda *_: False)
    assert report.retries >= (10 if how == "busy" else 1) and len(seen) > 10
    assert same(load(bucket), tensors(2))
    states(bucket, before)
    assert "sending it again" in str(report.fallbacks)


def test_of_two_saves_to_one_prefix_the_later_one_fails(bucket: Uploads) -> None:
    penstock.save(**shards(1), directory=PLACE, storage=settings(bucket))

    def between(method: str, key: str, query: dict[str, str]) -> None:
        if (method, key) == ("PUT", INDEX):
            bucket.refuses = lambda *_: None
            penstock.save(**shards(3), directory=PLACE, storage=settings(bucket))

    bucket.refuses = between  # type: ignore[assignment]
    with pytest.raises(penstock.ChangedError, match=r"index\.json.*another program has written this object meanwhile"):
        penstock.save(**shards(2), directory=PLACE, storage=settings(bucket))
    assert same(load(bucket), tensors(3)) and not bucket.under_way
    assert len(bucket.objects) == 4, "the shards of the save that failed are gone"


def denied(*methods: str) -> Any:
    return lambda method, key, query: (
        error(403, "AccessDenied", "Access Denied")
        if (method in methods and "uploadId" not in query) or ("list" in methods and "list-type" in query)
        else None
    )


def test_without_the_right_to_delete_a_save_succeeds_where_the_new_checkpoint_is_visible(bucket: Uploads) -> None:
    penstock.save(**shards(1), directory=PLACE, storage=settings(bucket))
    bucket.refuses = denied("DELETE")
    report = penstock.save(**shards(2), directory=PLACE, storage=settings(bucket))
    assert "model-00001-of-00003.safetensors" in str(report.fallbacks) and "stay" in str(report.fallbacks)
    bucket.refuses = lambda *_: None
    assert same(load(bucket), tensors(2))


def test_without_the_right_to_delete_an_old_single_file_stays_the_checkpoint(bucket: Uploads) -> None:
    penstock.save(tensors(1), PLACE, storage=settings(bucket))
    bucket.refuses = denied("DELETE")
    with pytest.raises(penstock.AccessError, match=r"cannot remove it.*the old checkpoint stays"):
        penstock.save(**shards(2), directory=PLACE, storage=settings(bucket))
    bucket.refuses = lambda *_: None
    assert same(load(bucket), tensors(1))


def test_without_the_right_to_list_shards_get_names_of_their_own(bucket: Uploads) -> None:
    penstock.save(**shards(1), directory=PLACE, storage=settings(bucket))
    old = dict(bucket.objects)
    bucket.refuses = denied("list")
    report = penstock.save(**shards(2), directory=PLACE, storage=settings(bucket))
    assert "listing the prefix" in str(report.fallbacks)
    bucket.refuses = lambda *_: None
    assert same(load(bucket, f"s3://bucket/{INDEX}"), tensors(2))
    assert all(bucket.objects[key] == old[key] for key in old if key != INDEX)


def test_a_save_that_is_given_up_leaves_nothing(bucket: Uploads) -> None:
    bucket.delay = 0.2

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        penstock.save(**shards(1), directory=PLACE, progress=interrupted, storage=settings(bucket))
    assert not bucket.objects and not bucket.under_way


def test_bytes_that_change_on_the_way_are_refused(bucket: Uploads) -> None:
    taken = bucket.part
    bucket.part = lambda upload, number, fields, body: taken(upload, number, fields, body[:-1] + b"\0")  # type: ignore[method-assign]
    with pytest.raises(penstock.PenstockError, match=r"model\.safetensors.*BadDigest"):
        penstock.save({"w": np.full(100, 7, np.uint8)}, PLACE, storage=settings(bucket))
    assert not bucket.objects and not bucket.under_way


def test_a_server_without_checksums_is_told(bucket: Uploads) -> None:
    bucket.knows_checksums = False
    report = penstock.save(tensors(), PLACE, storage=settings(bucket))
    assert "says no checksum" in str(report.fallbacks)
    assert same(load(bucket), tensors())


def test_tensors_that_are_made_when_their_turn_comes(bucket: Uploads) -> None:
    torch = pytest.importorskip("torch")
    state = {f"w{i}": torch.randn(64, 48).t() for i in range(20)}
    penstock.save(state, PLACE, max_shard_size=40_000, storage=settings(bucket))
    found = penstock.open(f"{PLACE}/", storage=settings(bucket)).load()
    assert all(torch.equal(found[name], state[name]) for name in state) and len(found) == 20


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("hf://org/model", "hf upload"),
        ("https://host/model", "cannot be written to"),
        ("ftp://host/model", "cannot be written to"),
        ("s3://", "bucket"),
    ],
)
def test_addresses_that_take_nothing(at: str, message: str) -> None:
    with pytest.raises(penstock.PenstockError, match=message):
        penstock.save(tensors(), at)
    with pytest.raises(penstock.PenstockError, match=message if at != "s3://" else "folder"):
        penstock.save_file(tensors(), f"{at}/x.safetensors" if at != "s3://" else at)


def test_a_server_that_is_silent_ends_the_save(bucket: Uploads) -> None:
    goes_on = threading.Event()
    bucket.refuses = lambda method, key, query: goes_on.wait(30) and None if "partNumber" in query else None  # type: ignore[assignment,func-returns-value]
    try:
        with pytest.raises(penstock.PenstockError, match="does not answer"):
            penstock.save(tensors(), PLACE, options={"stall_timeout": 0.5}, storage=settings(bucket))
    finally:
        goes_on.set()
    assert not bucket.objects


@pytest.mark.parametrize("silent", ["GET", "HEAD"])
def test_ctrl_c_ends_the_first_questions_of_a_save(bucket: Uploads, silent: str) -> None:
    """The server is silent from the listing on, or from the question for the version of what is there."""
    penstock.save(tensors(1), PLACE, storage=settings(bucket))
    asked, goes_on = threading.Event(), threading.Event()

    def waits(method: str, key: str, query: dict[str, str]) -> None:
        if method == silent:
            asked.set()
            goes_on.wait(60)

    def interrupt() -> None:
        asked.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    bucket.refuses = waits  # type: ignore[assignment]
    thread = threading.Thread(target=interrupt)
    thread.start()
    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            penstock.save(**shards(2), directory=PLACE, storage=settings(bucket))
        assert time.monotonic() - begun < 10 * ordeal.load_factor()
    finally:
        goes_on.set()
        thread.join()
    bucket.refuses = lambda *_: None
    assert same(load(bucket), tensors(1)) and not bucket.under_way


def test_shards_of_a_save_that_is_under_way_are_not_those_of_the_old_checkpoint(bucket: Uploads) -> None:
    """A second save lists shards of a first one, and the server ignores conditions: both end, the last one is whole."""
    bucket.heeds_conditions = False
    penstock.save(**shards(1), directory=PLACE, storage=settings(bucket))

    def between(method: str, key: str, query: dict[str, str]) -> None:
        if (method, key) == ("PUT", INDEX):
            bucket.refuses = lambda *_: None
            report = penstock.save(**shards(3), directory=PLACE, storage=settings(bucket))
            assert "ignores the conditions" in str(report.fallbacks)
            assert same(load(bucket), tensors(3))

    bucket.refuses = between  # type: ignore[assignment]
    penstock.save(**shards(2), directory=PLACE, storage=settings(bucket))
    assert same(load(bucket), tensors(2))


def test_an_earlier_index_that_cannot_be_read_keeps_its_shards(bucket: Uploads) -> None:
    penstock.save(**shards(1), directory=PLACE, storage=settings(bucket))
    old = set(bucket.objects)
    bucket.refuses = lambda method, key, query: (
        error(403, "AccessDenied", "Access Denied") if method == "GET" and key else None
    )
    report = penstock.save(**shards(2), directory=PLACE, storage=settings(bucket))
    assert "leaving its shards" in str(report.fallbacks) and old <= set(bucket.objects)
    bucket.refuses = lambda *_: None
    assert same(load(bucket), tensors(2))


def test_shards_become_objects_side_by_side(bucket: Uploads) -> None:
    """The server answers no request that ends an upload before three are there."""
    ends = threading.Barrier(3)

    def together(method: str, key: str, query: dict[str, str]) -> None:
        if method == "POST" and "uploadId" in query:
            ends.wait(30)

    bucket.refuses = together  # type: ignore[assignment]
    penstock.save(**shards(), directory=PLACE, storage=settings(bucket))
    assert not ends.broken and same(load(bucket), tensors())


GUARD = "guard against a second writer"
KEPT = ("removing the earlier checkpoint", "old versions stay")
LOCKED = ("objects that can be deleted", "locked versions")


def told(report: Any) -> list[tuple[str, str]]:
    """The replacements of a report."""
    return [(fallback["from"], fallback["to"]) for fallback in report.fallbacks]


def test_a_bucket_that_keeps_versions_is_told(bucket: Uploads) -> None:
    bucket.keeps_versions = True
    first = penstock.save(**shards(1), directory=PLACE, storage=settings(bucket))
    assert first.fallbacks == [], "nothing was replaced"
    second = penstock.save(**shards(2), directory=PLACE, storage=settings(bucket))
    assert told(second) == [KEPT] and "until a lifecycle rule removes those" in second.fallbacks[0]["reason"]


def days_from_now(days: int) -> str:
    return (datetime.now(timezone.utc) + timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%S.000Z")


@pytest.mark.parametrize("how", ["of objects", "of the bucket"])
@pytest.mark.parametrize("mode", ["GOVERNANCE", "COMPLIANCE"])
def test_a_lock_on_new_objects_is_told(bucket: Uploads, how: str, mode: str) -> None:
    bucket.keeps_versions = True
    until = days_from_now(3)
    if how == "of objects":
        bucket.locks[INDEX] = {"x-amz-object-lock-mode": mode, "x-amz-object-lock-retain-until-date": until}
    else:
        bucket.lock_rule = f"<Mode>{mode}</Mode><Days>3</Days>"
    says = f"{mode} until {until}" if how == "of objects" else f"{mode} for 3 days"
    says += ", except for those with s3:BypassGovernanceRetention" * (mode == "GOVERNANCE")
    first = penstock.save(**shards(1), directory=PLACE, storage=settings(bucket))
    assert told(first) == [LOCKED] and f"({says})" in first.fallbacks[0]["reason"]
    second = penstock.save(**shards(2), directory=PLACE, storage=settings(bucket))
    assert told(second) == [LOCKED, KEPT] and all(f"({says})" in f["reason"] for f in second.fallbacks)
    assert "lifecycle" not in str(second.fallbacks), "no rule removes what is locked"


def test_a_lock_on_the_earlier_checkpoint_alone_is_told(bucket: Uploads) -> None:
    bucket.keeps_versions = True
    bucket.lock_rule = ""
    penstock.save(tensors(1), PLACE, storage=settings(bucket))
    bucket.locks[SINGLE] = {"x-amz-object-lock-legal-hold": "ON"}
    report = penstock.save(**shards(2), directory=PLACE, storage=settings(bucket))
    assert told(report) == [KEPT] and "(a legal hold)" in report.fallbacks[0]["reason"]


def test_a_lock_that_is_over_or_that_nobody_may_see_is_not_told(bucket: Uploads) -> None:
    bucket.keeps_versions = True
    over = {"x-amz-object-lock-mode": "COMPLIANCE", "x-amz-object-lock-retain-until-date": days_from_now(-1)}
    bucket.locks[INDEX] = {**over, "x-amz-object-lock-legal-hold": "OFF"}
    bucket.lock_rule = "<Mode>COMPLIANCE</Mode><Years>7</Years>"
    bucket.refuses = lambda method, key, query: (
        error(403, "AccessDenied", "Access Denied") if "object-lock" in query else None
    )
    for seed in (1, 2):
        report = penstock.save(**shards(seed), directory=PLACE, storage=settings(bucket))
    assert told(report) == [KEPT] and "A lock on them would delay that" in report.fallbacks[0]["reason"]
    assert "COMPLIANCE" not in str(report.fallbacks)


def test_each_object_and_part_is_sent_with_a_checksum(bucket: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 takes no other ones for buckets with object lock."""
    sent = []

    def checked(fields: Any, body: bytes, checked: Any = bucket.checked) -> Any:
        sent.append("x-amz-checksum-crc32c" in fields)
        return checked(fields, body)

    monkeypatch.setattr(bucket, "checked", checked)
    penstock.save(**shards(1), directory=PLACE, storage=settings(bucket))
    assert len(sent) == 4 and all(sent), "three parts and the index"


def test_a_service_that_counts_a_removed_object_as_one_that_is_there_is_told(bucket: Uploads) -> None:
    """As versitygw 1.8 does in a bucket with versions: the condition that nothing is there never holds again."""
    bucket.keeps_versions = bucket.counts_removed = True
    for seed, arguments in enumerate(
        [{"tensors_or_module": tensors(0)}, shards(1), {"tensors_or_module": tensors(2)}, shards(3)]
    ):
        report = penstock.save(**arguments, directory=PLACE, storage=settings(bucket))
        assert same(load(bucket), tensors(seed)) and not bucket.under_way
        again = [(GUARD, "a question before the request")] * (seed > 1)
        assert told(report) == again + [KEPT] * (seed > 0), seed


def test_a_service_that_counts_removed_objects_keeps_those_of_others(bucket: Uploads) -> None:
    """Another program writes the object again before the save ends; or nobody may list versions."""
    bucket.keeps_versions = bucket.counts_removed = True
    bucket.removed.add(SINGLE)

    def between(method: str, key: str, query: dict[str, str]) -> Answer | None:
        if method == "POST" and key == SINGLE and "uploadId" in query:
            bucket.stored(SINGLE, b"another's")
        return None

    bucket.refuses = between
    with pytest.raises(penstock.ChangedError):
        penstock.save(tensors(1), PLACE, storage=settings(bucket))
    assert bucket.objects == {SINGLE: b"another's"} and not bucket.under_way
    del bucket.objects[SINGLE]
    bucket.removed.add(SINGLE)
    bucket.refuses = lambda method, key, query: error(403, "AccessDenied", "No") if "versions" in query else None
    with pytest.raises(penstock.ChangedError):
        penstock.save(tensors(1), PLACE, storage=settings(bucket))
    assert not bucket.objects and not bucket.under_way


@pytest.mark.parametrize("ignores", ["all", "ends"])
def test_a_service_that_ignores_conditions_is_told_and_nothing_of_the_question_stays(
    bucket: Uploads, ignores: str
) -> None:
    """Some services keep to the conditions of a PUT, and ignore those of CompleteMultipartUpload."""
    bucket.heeds_conditions, bucket.heeds_ends = ignores != "all", ignores != "ends"
    reports = [
        penstock.save(tensors(1), PLACE, storage=settings(bucket)),
        penstock.save_file(tensors(1), f"{PLACE}/x.safetensors", storage=settings(bucket)),
    ]
    for report in reports:
        assert told(report) == [(GUARD, "none")] and "an upload in parts" in report.fallbacks[0]["reason"]
    assert {key.rpartition("/")[2] for key in bucket.objects} == {"model.safetensors", "x.safetensors"}
    report = penstock.save(**shards(2), directory=f"{PLACE}/shards", storage=settings(bucket))
    assert told(report) == [(GUARD, "none")] * (ignores == "all"), "the index is put at once"
    assert not [key for key in bucket.objects if TRIAL in key] and not bucket.under_way


def test_a_service_that_keeps_to_conditions_is_asked_by_a_request_like_the_visible_one(bucket: Uploads) -> None:
    def asked(**arguments: Any) -> list[str]:
        bucket.requests.clear()
        assert penstock.save(**arguments, directory=PLACE, storage=settings(bucket)).fallbacks == []
        assert not bucket.under_way and not [key for key, _ in bucket.history if TRIAL in key]
        return [method for method, key, _ in bucket.requests if TRIAL in key]

    assert asked(tensors_or_module=tensors(1)) == ["POST", "PUT", "POST", "DELETE"], "begun, a part, the end, given up"
    assert asked(**shards(2)) == ["PUT"]


def test_a_trial_of_conditions_without_an_answer_is_told(bucket: Uploads) -> None:
    bucket.refuses = lambda method, key, query: error(403, "AccessDenied", "not there") if TRIAL in key else None
    for arguments in ({"tensors_or_module": tensors(1)}, shards(2)):
        report = penstock.save(**arguments, directory=PLACE, storage=settings(bucket))
        assert told(report) == [(GUARD, "not known")] and "not there" in report.fallbacks[0]["reason"]


def test_a_trial_of_conditions_that_stays_incomplete_is_told(bucket: Uploads) -> None:
    bucket.refuses = lambda method, key, query: (
        error(403, "AccessDenied", "no end") if method == "DELETE" and TRIAL in key else None
    )
    report = penstock.save(tensors(1), PLACE, storage=settings(bucket))
    assert told(report) == [("removing a trial of conditions", "leaving it")] and len(bucket.under_way) == 1
    reason = report.fallbacks[0]["reason"]
    assert "an upload of one byte" in reason and "stays incomplete: " in reason and TRIAL in reason


def test_without_the_right_to_look_there_is_no_guard_and_this_is_told(bucket: Uploads) -> None:
    penstock.save(tensors(1), PLACE, storage=settings(bucket))
    bucket.refuses = denied("HEAD")
    report = penstock.save(tensors(2), PLACE, storage=settings(bucket))
    assert told(report) == [(GUARD, "none")] and f"look at s3://bucket/{SINGLE}" in report.fallbacks[0]["reason"]
    bucket.refuses = lambda *_: None
    assert same(load(bucket), tensors(2))


def test_a_trial_of_conditions_that_cannot_be_removed_is_told(bucket: Uploads) -> None:
    bucket.heeds_conditions = False
    bucket.refuses = lambda method, key, query: (
        error(403, "AccessDenied", "no removal") if method == "DELETE" and ".penstock-" in key else None
    )
    report = penstock.save(tensors(1), PLACE, storage=settings(bucket))
    assert told(report) == [("removing a trial of conditions", "leaving it"), (GUARD, "none")]
    (trial,) = (key for key in bucket.objects if TRIAL in key)
    reason = report.fallbacks[0]["reason"]
    assert f"{trial} stays" in reason and "no removal" in reason


def test_an_object_that_another_program_has_written_meanwhile_is_not_removed(bucket: Uploads) -> None:
    shard = "models/one/model-00002-of-00003.safetensors"

    def between(method: str, key: str, query: dict[str, str]) -> None:
        if method == "POST" and "uploadId" in query and key == shard:
            bucket.objects[shard] = b"another's"

    bucket.refuses = between  # type: ignore[assignment]
    with pytest.raises(penstock.ChangedError, match="00002-of-00003"):
        penstock.save(**shards(1), directory=PLACE, storage=settings(bucket))
    assert bucket.objects == {shard: b"another's"} and not bucket.under_way


def test_an_object_stays_if_nobody_knows_whose_it_is(bucket: Uploads) -> None:
    """The end of its upload brings errors only. The name is one that another save gives too."""
    shard = "models/one/model-00001-of-00003.safetensors"

    def fails(method: str, key: str, query: dict[str, str]) -> Answer | None:
        if method == "POST" and key == shard and "uploadId" in query:
            bucket.objects[shard] = b"another's"
            return error(500, "InternalError", "We encountered an internal error.")
        return None

    bucket.refuses = fails
    with pytest.raises(penstock.PenstockError, match=f"could not be cleared: .*{shard}.*another program's"):
        penstock.save(**shards(), directory=PLACE, storage=settings(bucket))
    assert bucket.objects == {shard: b"another's"}


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_an_answer_that_comes_while_a_part_is_sent_counts(tls: bool, tmp_path: Path) -> None:
    """The server answers a part before it has read it, and closes the connection."""
    certificate = certificates.made(tmp_path) if tls else None
    with early.answering(error(403, "AccessDenied", "no part for you"), certificate) as server:
        more = {"ca": certificate[0]} if certificate else {}
        large = {"w": np.zeros(64 << 20, np.uint8)}
        with pytest.raises(penstock.AccessError, match="no part for you"):
            penstock.save_file(large, f"{PLACE}/x.safetensors", storage=settings(server, **more))
    assert server.parts == server.answered, "no part was sent again"
