"""Saves to buckets of versitygw that keep versions and lock them (object lock). `make test-servers` runs this."""

from __future__ import annotations

import hashlib
import os
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import penstock
import pytest
from penstock import _journal
from penstock._push import clear_bucket, push
from test_uploads import GUARD, KEPT, LOCKED, told
from versitygw import Server

#: A service that counts removed objects as objects that are there (versitygw 1.8) gets no condition for these.
DROPPED = (GUARD, "a question before the request")
MODES = ["GOVERNANCE", "COMPLIANCE"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("versitygw"), versions=True)
    try:
        yield server
    finally:
        server.close()


def asked(server: Server, method: str, path: str, text: str, query: str) -> None:
    """Sends XML, with the checksum that S3 demands of such requests."""
    body = text.encode()
    sum_ = b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
    server.ask(method, path, body, {"content-md5": sum_}, query=query)


def bucket_with_lock(server: Server, name: str, mode: str | None, days: int = 2) -> str:
    """Makes a bucket with object lock, whose new objects have this retention."""
    server.ask("PUT", name, more={"x-amz-bucket-object-lock-enabled": "true"})
    if mode is not None:
        rule = f"<Rule><DefaultRetention><Mode>{mode}</Mode><Days>{days}</Days></DefaultRetention></Rule>"
        enabled = "<ObjectLockEnabled>Enabled</ObjectLockEnabled>"
        asked(
            server, "PUT", name, f"<ObjectLockConfiguration>{enabled}{rule}</ObjectLockConfiguration>", "object-lock="
        )
    return name


def versions(server: Server, bucket: str) -> list[tuple[str, str]]:
    """The key and the version of everything that the bucket keeps, except marks of removals."""
    root = ElementTree.fromstring(server.ask("GET", bucket, query="versions="))
    space = root.tag.partition("}")[0] + "}"
    found = [(one.findtext(f"{space}Key"), one.findtext(f"{space}VersionId")) for one in root.iter(f"{space}Version")]
    return [(str(key), str(version)) for key, version in found]


def locked(server: Server, bucket: str) -> None:
    """Nothing that the bucket keeps can be deleted."""
    kept = versions(server, bucket)
    assert kept
    for key, version in kept:
        answer = server.ask("DELETE", f"{bucket}/{key}", query=f"versionId={version}", status=403)
        assert b"AccessDenied" in answer
    assert versions(server, bucket) == kept


def state(number: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    return {f"w{i}": random.integers(0, 255, 3_000_000 + i, np.uint8) for i in range(4)}


def loads(server: Server, place: str, number: int) -> bool:
    found = penstock.open(f"{place}/", storage=server.storage()).load(framework="np")
    expected = state(number)
    return found.keys() == expected.keys() and all((found[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize("mode", MODES)
def test_saves_over_each_other_work_and_say_that_nothing_can_be_deleted(server: Server, mode: str) -> None:
    bucket = bucket_with_lock(server, f"saved-{mode.lower()}", mode)
    place, objects = f"s3://{bucket}/run", 0
    for number, most in enumerate([None, "7MB", "7MB", None, None, "7MB"]):
        report = penstock.save(state(number), place, max_shard_size=most, storage=server.storage())
        assert loads(server, place, number)
        # A single file or shards whose names were removed before
        again = [DROPPED] if number in (3, 5) else []
        assert told(report) == again + [LOCKED] + [KEPT] * (number > 0), (number, report.fallbacks)
        assert f"({mode} for 2 days" in report.fallbacks[-1]["reason"]
        objects += len(report.files)
        assert len(versions(server, bucket)) == objects, "all that was ever written, and no trial"
        assert b"<Upload>" not in server.ask("GET", bucket, query="uploads=")
    locked(server, bucket)


def test_a_reader_beside_saves_gets_one_version_or_is_told_of_the_change(server: Server) -> None:
    """One that opened the old checkpoint: its shards are hidden by now, not gone."""
    bucket = bucket_with_lock(server, "beside", "COMPLIANCE")
    place = f"s3://{bucket}/run"
    penstock.save(state(0), place, max_shard_size="7MB", storage=server.storage())
    old = penstock.open(f"{place}/", storage=server.storage())
    penstock.save(state(1), place, storage=server.storage())
    with pytest.raises((penstock.NotFoundError, penstock.ChangedError)):
        old.load(framework="np")
    assert loads(server, place, 1)


@pytest.mark.parametrize("mode", MODES)
def test_pushes_work_and_what_is_cleared_stays_as_a_version(
    server: Server, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_journal.VARIABLE, str(tmp_path / "state"))
    bucket = bucket_with_lock(server, f"pushed-{mode.lower()}", mode)
    place = f"s3://{bucket}/run"
    for number, most in enumerate([None, "7MB", "7MB", None]):
        folder = tmp_path / str(number)
        penstock.save(state(number), folder, max_shard_size=most)
        (folder / "config.json").write_text(f'{{"number": {number}}}')
        pushed = push(folder, place, storage=server.storage())
        assert loads(server, place, number)
        assert [LOCKED, KEPT][: 1 + (number > 0)] == [one for one in told(pushed.report) if one != DROPPED]
        assert not list((tmp_path / "state").rglob("*.*")), "nothing is left to be cleared"
    penstock.save(state(4), place, max_shard_size="7MB", storage=server.storage())
    stray = f"{bucket}/run/model-s00000001-00001-of-00002.safetensors"
    server.ask("PUT", stray, b"of a push that was killed")
    of_file = server.data / stray
    os.utime(of_file, (time.time() - 3 * 86400,) * 2)
    before = versions(server, bucket)
    cleared = clear_bucket(place, storage=server.storage())
    assert cleared.objects == cleared.kept == [f"s3://{stray}"] and not cleared.left
    assert versions(server, bucket) and len(versions(server, bucket)) == len(before)
    server.ask("GET", stray, status=404)
    locked(server, bucket)
    assert loads(server, place, 4)


def test_a_save_that_fails_leaves_the_old_checkpoint(server: Server) -> None:
    """Its shards are whole when the index is refused, because another program writes that."""
    bucket = bucket_with_lock(server, "failed", "GOVERNANCE")
    place = f"s3://{bucket}/run"
    penstock.save(state(0), place, max_shard_size="7MB", storage=server.storage())
    begun: list[int] = []

    def second(done: int, total: int) -> None:
        if not begun:
            begun.append(1)
            penstock.save(state(1), place, max_shard_size="7MB", storage=server.storage())

    with pytest.raises(penstock.ChangedError):
        slow = server.storage(bandwidth="20MB")
        penstock.save(state(2), place, max_shard_size="7MB", progress=second, storage=slow)
    assert loads(server, place, 1)
    assert len(versions(server, bucket)) == 3 + 3 + 2, "two shards that were removed at once are locked too"
    locked(server, bucket)


def test_locks_of_single_objects_are_told(server: Server) -> None:
    bucket = bucket_with_lock(server, "single", None)
    place, key = f"s3://{bucket}/run", f"{bucket}/run/model.safetensors"

    def saved(number: int) -> Any:
        return penstock.save(state(number), place, storage=server.storage())

    assert told(saved(0)) == []
    asked(server, "PUT", key, "<LegalHold><Status>ON</Status></LegalHold>", "legal-hold=")
    report = saved(1)
    assert told(report) == [KEPT] and "(a legal hold)" in report.fallbacks[0]["reason"]
    until = (datetime.now(timezone.utc) + timedelta(days=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = f"<Retention><Mode>COMPLIANCE</Mode><RetainUntilDate>{until}</RetainUntilDate></Retention>"
    asked(server, "PUT", key, text, "retention=")
    report = saved(2)
    assert told(report) == [KEPT] and f"(COMPLIANCE until {until})" in report.fallbacks[0]["reason"]
    report = saved(3)
    assert told(report) == [KEPT] and "until a lifecycle rule removes those" in report.fallbacks[0]["reason"]


#: The rights that `docs/guides.md` names for a training
RIGHTS = ["PutObject", "GetObject", "DeleteObject", "AbortMultipartUpload", "ListBucket"]


def test_without_the_right_to_see_a_lock_nothing_false_is_said(server: Server) -> None:
    bucket = bucket_with_lock(server, "unseen", "COMPLIANCE")
    place = f"s3://{bucket}/run"
    storage = server.storage(**server.allow("trainer", bucket, *RIGHTS))
    for number, most in enumerate([None, "7MB"]):
        report = penstock.save(state(number), place, max_shard_size=most, storage=storage)
        assert loads(server, place, number)
        assert told(report) == [KEPT] * number
    assert "A lock on them would delay that; the answers show none" in report.fallbacks[0]["reason"]
    locked(server, bucket)
