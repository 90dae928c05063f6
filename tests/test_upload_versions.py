"""Saves to buckets that keep versions, and trials of conditions there, against the double of S3 (`upload_server`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ordeal
import penstock
import pytest
from s3_server import Answer, error, serving
from test_uploads import GUARD, INDEX, KEPT, LOCKED, PLACE, SINGLE, TRIAL, load, same, shards, tensors, told
from upload_server import Uploads, settings

SHARDS = [f"models/one/model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
#: What a report says of a trial that stays
LEFT, OLD = ("removing a trial of conditions", "leaving it"), ("removing a trial of conditions", "an old version")


@pytest.fixture
def bucket() -> Iterator[Uploads]:
    with serving(Uploads()) as found:
        found.keeps_versions = True
        yield found


def eventually(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30 * ordeal.load_factor()
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def no_versions(status: int) -> Callable[[str, str, dict[str, str]], Answer | None]:
    """Refuses to list versions."""
    return lambda method, key, query: error(status, "X", "no versions for you") if "versions" in query else None


def begun(bucket: Uploads, seed: int, outcomes: dict[int, str]) -> threading.Thread:
    """A save of shards in a thread, which has begun all of its uploads."""
    many = len(bucket.under_way) + 3

    def run() -> None:
        try:
            penstock.save(**shards(seed), directory=PLACE, storage=settings(bucket))
            outcomes[seed] = "saved"
        except penstock.PenstockError as e:
            outcomes[seed] = type(e).__name__

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: len(bucket.under_way) == many)
    return thread


def test_two_saves_over_names_that_were_removed_do_not_mix(bucket: Uploads) -> None:
    """The first one ends a shard, or is refused it. The second one saves all of its own before the first goes on."""
    bucket.counts_removed = True
    penstock.save(**shards(0), directory=PLACE, storage=settings(bucket))
    penstock.save(tensors(1), PLACE, storage=settings(bucket))
    may_end, second_saved = threading.Event(), threading.Event()
    firsts: dict[str, str] = {}
    ends: list[str] = []  # of the first save's first shard
    outcomes: dict[int, str] = {}

    def interleaved(method: str, key: str, query: dict[str, str]) -> None:
        if "partNumber" in query:
            may_end.wait(60)
        if method != "POST" or "uploadId" not in query or TRIAL in key:
            return
        name = query["uploadId"]
        if name not in firsts:
            first = next(one for one, of in firsts.items() if "-00001-of-" in of)
            eventually(lambda: len(ends) > 1 or (len(ends) == 1 and first not in bucket.under_way))
            return
        if "-00001-of-" in key:
            ends.append(key)
        if "-00001-of-" not in key or len(ends) > 1:
            second_saved.wait(60)

    bucket.refuses = interleaved  # type: ignore[assignment]
    one = begun(bucket, 11, outcomes)
    firsts.update({name: upload.key for name, upload in bucket.under_way.items()})
    two = begun(bucket, 22, outcomes)
    may_end.set()
    two.join()
    second_saved.set()
    one.join()
    bucket.refuses = lambda *_: None
    assert outcomes == {11: "ChangedError", 22: "saved"}
    assert same(load(bucket), tensors(22)) and len(bucket.objects) == 4 and not bucket.under_way


def test_a_shard_is_never_written_without_its_condition(bucket: Uploads) -> None:
    """Its name is removed after the save has asked for such names."""
    bucket.counts_removed = True
    goes_on, outcomes = bucket.hold_parts(), {}
    saves = begun(bucket, 1, outcomes)
    bucket.removed.add(SHARDS[1])
    goes_on.set()
    saves.join()
    assert outcomes == {1: "ChangedError"} and not bucket.objects and not bucket.under_way
    assert SHARDS[1] not in [key for key, _ in bucket.history]


@pytest.mark.parametrize("may_ask", [True, False])
def test_shards_whose_names_were_removed_get_names_of_their_own(bucket: Uploads, may_ask: bool) -> None:
    """So they do if nobody may list versions."""
    bucket.counts_removed = True
    bucket.removed.update(SHARDS)
    if not may_ask:
        bucket.refuses = no_versions(403)
    report = penstock.save(**shards(1), directory=PLACE, storage=settings(bucket))
    assert same(load(bucket), tensors(1)) and not report.fallbacks
    assert len(bucket.objects) == 4 and not set(bucket.objects) & set(SHARDS)
    assert ("GET", "", {"prefix": "models/one/model-0000", "versions": ""}) in bucket.requests, "one list for all names"


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_service_without_a_list_of_versions_gets_usual_names(bucket: Uploads, status: int) -> None:
    bucket.refuses = no_versions(status)
    penstock.save(**shards(1), directory=PLACE, storage=settings(bucket))
    assert set(bucket.objects) == {*SHARDS, INDEX}


def test_a_shard_that_another_program_has_written_since_stays(bucket: Uploads) -> None:
    """The service ignores conditions, so its name was not the save's alone."""
    bucket.heeds_conditions = False

    def fails(method: str, key: str, query: dict[str, str]) -> Answer | None:
        if (method, key) != ("PUT", INDEX):
            return None
        bucket.stored(SHARDS[0], b"another's")
        return error(403, "AccessDenied", "no index")

    bucket.refuses = fails
    left = rf"no index.*could not be cleared: .*{SHARDS[0]}.*another program has written it meanwhile"
    with pytest.raises(penstock.AccessError, match=left):
        penstock.save(**shards(1), directory=PLACE, storage=settings(bucket))
    assert bucket.objects == {SHARDS[0]: b"another's"}


@pytest.mark.parametrize(
    ("status", "kind"), [(403, penstock.ChangedError), (503, penstock.PenstockError)], ids=["refused", "busy"]
)
def test_a_question_for_versions_that_fails_is_named_and_ends_soon(bucket: Uploads, status: int, kind: Any) -> None:
    bucket.counts_removed = True
    bucket.removed.add(SINGLE)
    bucket.refuses = no_versions(status)
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        penstock.save(tensors(1), PLACE, storage=settings(bucket))
    assert time.monotonic() - began < 40 * ordeal.load_factor(), "a busy service is otherwise asked for two minutes"
    text = str(caught.value)
    assert "could not be asked (s3:ListBucketVersions)" in text and "no versions for you" in text
    assert "another program" not in text and isinstance(caught.value, TimeoutError) == (status == 503)
    assert not bucket.objects and not bucket.under_way, "the request was refused, so nothing is there"


def test_a_save_that_is_cancelled_while_versions_are_asked_for_is_cancelled(bucket: Uploads) -> None:
    bucket.counts_removed = True
    bucket.removed.add(SINGLE)
    asked, goes_on = threading.Event(), threading.Event()

    def waits(method: str, key: str, query: dict[str, str]) -> None:
        if "versions" in query:
            asked.set()
            goes_on.wait(60)

    bucket.refuses = waits  # type: ignore[assignment]
    job = penstock.save(tensors(1), PLACE, storage=settings(bucket), wait=False)
    assert asked.wait(60)
    job.cancel()
    try:
        with pytest.raises(penstock.CancelledError):
            job.result()
    finally:
        goes_on.set()
    assert not bucket.objects and not bucket.under_way


@pytest.mark.parametrize("ignores", ["all", "ends"])
def test_a_trial_of_conditions_that_stays_as_an_old_version_is_told(bucket: Uploads, ignores: str) -> None:
    bucket.heeds_conditions, bucket.heeds_ends = ignores != "all", ignores != "ends"
    bucket.lock_rule = "<Mode>COMPLIANCE</Mode><Days>3</Days>"
    arguments = {"tensors_or_module": tensors(1)} if ignores == "ends" else shards(1)
    report = penstock.save(**arguments, directory=PLACE, storage=settings(bucket))
    assert told(report) == [OLD, (GUARD, "none"), LOCKED]
    (trial,) = {key for key, _ in bucket.history if TRIAL in key}
    assert f"{trial} stays as an old one" in report.fallbacks[0]["reason"]


def no_abort(method: str, key: str, query: dict[str, str]) -> Answer | None:
    refused = method == "DELETE" and "uploadId" in query
    return error(403, "AccessDenied", "no abort") if refused else None


def test_without_the_right_to_abort_the_outcome_of_a_trial_is_still_known(bucket: Uploads) -> None:
    bucket.refuses = no_abort
    for seed in (1, 2):
        report = penstock.save(tensors(seed), PLACE, storage=settings(bucket))
        assert told(report) == [LEFT] + [KEPT] * (seed > 1) and len(bucket.under_way) == seed
        assert "stays incomplete" in report.fallbacks[0]["reason"] and "no abort" in report.fallbacks[0]["reason"]


def test_a_trial_whose_end_has_no_answer_is_removed_without_the_right_to_abort(bucket: Uploads) -> None:
    bucket.keeps_versions = False

    def fails(method: str, key: str, query: dict[str, str]) -> Answer | None:
        if method == "POST" and TRIAL in key and "uploadId" in query:
            bucket.stored(key, b"\0")
            return error(500, "InternalError", "carried out all the same")
        return no_abort(method, key, query)

    bucket.refuses = fails
    report = penstock.save(tensors(1), PLACE, storage=settings(bucket))
    assert told(report) == [("upload", "sending it again"), LEFT, (GUARD, "not known")]
    assert "carried out all the same" in report.fallbacks[2]["reason"]
    assert set(bucket.objects) == {SINGLE}


def test_a_lock_on_new_objects_says_nothing_of_the_old_ones(bucket: Uploads) -> None:
    bucket.lock_rule = ""
    penstock.save(tensors(1), PLACE, storage=settings(bucket))
    bucket.lock_rule = "<Mode>COMPLIANCE</Mode><Days>3</Days>"
    report = penstock.save(tensors(2), PLACE, storage=settings(bucket))
    assert told(report) == [LOCKED, KEPT]
    reason = report.fallbacks[1]["reason"]
    assert "New objects are locked (COMPLIANCE for 3 days); whether the old ones are, no answer says" in reason
    assert "nobody can delete" not in reason
