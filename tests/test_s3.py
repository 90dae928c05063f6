"""Checkpoints in S3: signatures, credentials and where they come from, regions, listings, and what errors say."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import object_stores as stores
import penstock
import pytest
from conftest import LAYOUT, Oracle
from penstock import cli as command_line
from s3_server import KEYS, Bucket, error, serving, signature

KEY, SECRET = next(iter(KEYS.items()))
GIVEN = {"access_key_id": KEY, "secret_access_key": SECRET}
FOLDER = "s3://bucket/m/"


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch, tmp_path):
    """No credential of whoever runs the tests, and no question to a service that this machine may have."""
    import os

    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def bucket(small: Path) -> Iterator[Bucket]:
    objects = {f"m/{path.name}": path.read_bytes() for path in small.iterdir() if path.is_file()}
    with serving(Bucket(objects)) as bucket:
        yield bucket


def settings(bucket: Bucket, **more: Any) -> Any:
    return {"endpoint": bucket.endpoint, **GIVEN, **more}


def test_the_signatures_of_these_tests_are_those_of_aws():
    """The example of a GET in AWS's description of Signature Version 4 for S3, and the one of a listing."""
    secret, date = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "20130524T000000Z"
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    fields = {"host": "examplebucket.s3.amazonaws.com", "x-amz-content-sha256": empty, "x-amz-date": date}
    scope = "20130524/us-east-1/s3/aws4_request"
    signed = "host;range;x-amz-content-sha256;x-amz-date"
    found = signature("GET", "/test.txt", {**fields, "range": "bytes=0-9"}, signed, date, scope, secret)
    assert found == "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    signed = "host;x-amz-content-sha256;x-amz-date"
    found = signature("GET", "/?max-keys=2&prefix=J", fields, signed, date, scope, secret)
    assert found == "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"


def test_a_folder_is_listed_page_by_page_and_loaded(bucket, small):
    stores.a_folder_is_listed_page_by_page_and_loaded(bucket, small, "s3", settings(bucket))
    assert all(key == KEY for _, key in bucket.asked)


def test_an_index_and_files_need_no_listing(bucket, small):
    stores.an_index_and_files_need_no_listing(bucket, small, "s3", settings(bucket))


def test_keys_with_odd_letters(bucket, small):
    stores.keys_may_have_odd_letters(bucket, small, "s3", settings(bucket))


def test_a_bucket_in_the_name_of_the_host(bucket, small):
    """No name server knows it, and the error says which one was asked for."""
    with pytest.raises(penstock.ReadError, match=r"bucket\.localhost-s3\.invalid"):
        storage = {**GIVEN, "endpoint": "http://localhost-s3.invalid", "addressing": "virtual"}
        penstock.open(f"{FOLDER}x.safetensors", storage=storage)


@pytest.mark.parametrize("address", [FOLDER, f"{FOLDER}{LAYOUT.files[0]}"])
@pytest.mark.parametrize("how", ["body", "field", "redirect"])
def test_a_wrong_region_is_corrected_once(bucket, address, how):
    penstock.open(address, storage=settings(bucket, connections=3))
    needed = len(bucket.asked)
    bucket.region = "eu-central-1"
    bucket.asked.clear()

    def script(target: str, number: int) -> Any:
        if how == "body" or number > 1:
            return None
        status = 301 if how == "redirect" else 400
        return error(status, "PermanentRedirect", "elsewhere", **{"x-amz-bucket-region": "eu-central-1"})

    bucket.script = script
    checkpoint = penstock.open(address, storage=settings(bucket))
    assert len(bucket.asked) == needed + 1
    checkpoint.load(framework="np")
    # The store remembers it
    bucket.script = lambda target, number: error(400, "AuthorizationHeaderMalformed", "x", "<Region>mars-1</Region>")
    with pytest.raises(penstock.ReadError, match="AuthorizationHeaderMalformed"):
        checkpoint.load(framework="np")


@pytest.mark.parametrize("address", [f"{FOLDER}none/", f"{FOLDER}none.safetensors"])
@pytest.mark.parametrize(
    ("told", "kind", "says"),
    [
        (error(404, "NoSuchBucket", "There is none"), penstock.NotFoundError, "404.*NoSuchBucket: There is none"),
        (error(403, "AccessDenied", "Access Denied"), penstock.AccessError, "AccessDenied: Access Denied.*storage="),
        (error(403, "SignatureDoesNotMatch", "x"), penstock.AccessError, "is the secret access key right"),
        (error(403, "InvalidAccessKeyId", "x"), penstock.AccessError, "is that key for this server"),
        (error(400, "ExpiredToken", "x"), penstock.AccessError, "get new ones"),
        (error(400, "InvalidBucketName", "<odd>"), penstock.ReadError, "InvalidBucketName: <odd>"),
        ((403, {}, b"<html>no</html>"), penstock.AccessError, "refuses access \\(403"),
        ((403, {}, b"x" * 100_000), penstock.AccessError, "refuses access \\(403"),
    ],
)
def test_errors_say_what_the_server_says(bucket, address, told, kind, says):
    status, fields, body = told
    body = body.replace(b"</Error>", f"<StringToSign>{SECRET}</StringToSign></Error>".encode())
    bucket.script = lambda target, number: (status, fields, body)
    with pytest.raises(kind, match=says) as caught:
        penstock.open(address, storage=settings(bucket, session_token="very-secret-token"))
    assert caught.value.path == address
    assert SECRET not in repr(caught.value) and "very-secret-token" not in repr(caught.value)


def test_what_is_not_there_says_so(bucket):
    with pytest.raises(penstock.NotFoundError, match="NoSuchKey"):
        penstock.open(f"{FOLDER}none.safetensors", storage=settings(bucket))
    with pytest.raises(penstock.NotFoundError, match="no object whose key begins with this"):
        penstock.open("s3://bucket/none/", storage=settings(bucket))
    with pytest.raises(penstock.NotFoundError, match="NoSuchKey"):
        penstock.open("s3://bucket/none", storage=settings(bucket))


def test_an_object_that_is_replaced_is_changed(bucket):
    stores.an_object_that_is_replaced_is_changed(bucket, "s3", settings(bucket))


def test_slow_down_is_asked_for_again(bucket, small):
    busy = error(503, "SlowDown", "Please reduce your request rate.")
    bucket.script = lambda target, number: busy if number % 2 else None
    Oracle(small).same(penstock.open(FOLDER, storage=settings(bucket)).load(framework="np"))


# Credentials


def test_anonymous_requests_are_not_signed(bucket, small):
    checkpoint = penstock.open(FOLDER, storage={"endpoint": bucket.endpoint, "anonymous": True})
    Oracle(small).same(checkpoint.load(framework="np"))
    assert all(key is None for _, key in bucket.asked)
    bucket.script = lambda target, number: error(403, "AccessDenied", "x")
    with pytest.raises(penstock.AccessError, match="was not signed"):
        checkpoint.load(framework="np")


SOURCES: dict[str, dict[str, str]] = {
    "variables": {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": "t"},
    "profile": {"AWS_PROFILE": "work"},
    "instance": {"AWS_EC2_METADATA_DISABLED": "false", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "{endpoint}/"},
    "pod": {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": "{endpoint}/pod",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "{folder}/pod-token",
    },
    "web identity": {
        "AWS_WEB_IDENTITY_TOKEN_FILE": "{folder}/web-token",
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/x",
        "AWS_ENDPOINT_URL_STS": "{endpoint}/sts",
    },
}


@pytest.fixture
def source(bucket, tmp_path, monkeypatch, request) -> str:
    """Credentials come from there; so does the endpoint."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        f"[default]\naws_access_key_id=other\naws_secret_access_key=x\n[work]\n"
        f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    )
    # S3's own settings are nested, and none of the profile's
    (tmp_path / ".aws/config").write_text("[profile work]\n# region = no\ns3 =\n  region = no\nregion = us-east-1\n")
    (tmp_path / "pod-token").write_text("pod-token")
    (tmp_path / "web-token").write_text("web-token")
    if request.param != "profile":
        (tmp_path / ".aws/credentials").unlink()
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.endpoint)
    for name, value in SOURCES[request.param].items():
        monkeypatch.setenv(name, value.format(endpoint=bucket.endpoint, folder=tmp_path))
    return request.param


@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_where_credentials_come_from(bucket, small, source):
    checkpoint = penstock.open(FOLDER)
    Oracle(small).same(checkpoint.load(framework="np"))
    assert len({key for _, key in bucket.asked}) == 1
    bucket.script = lambda target, number: error(403, "AccessDenied", "x")
    names = {"variables": "AWS_ACCESS_KEY_ID", "profile": '"work"', "instance": "machine", "pod": "pod"}
    with pytest.raises(penstock.AccessError, match=names.get(source, "AWS_ROLE_ARN")):
        penstock.open(f"{FOLDER}{LAYOUT.files[0]}")


@pytest.mark.parametrize("kind", ["container", "instance"])
def test_services_at_the_addresses_of_amazons_machines(small, kind):
    network = ["unshare", "--net"]
    try:
        subprocess.run([*network, "ip", "link"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespaces here")
    program = str(Path(__file__).with_name("fixed_addresses.py"))
    done = subprocess.run([*network, sys.executable, program, small, kind], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("source", ["instance", "pod", "web identity"], indirect=True)
def test_an_expired_credential_is_renewed_once_for_all_requests(bucket, quarter, source):
    others = {f"AKID{n}" for n in range(100)}
    stores.an_expired_credential_is_renewed_once(bucket, quarter, FOLDER, None, "AKID0", others, "ExpiredToken")


@pytest.mark.parametrize("source", ["profile"], indirect=True)
def test_keys_that_are_replaced_in_their_file_are_read_again(bucket, tmp_path, source, small):
    checkpoint = penstock.open(FOLDER)
    bucket.expired = {KEY}
    KEYS["AKIDNEW"] = "another secret"
    file = tmp_path / ".aws/credentials"
    file.write_text(file.read_text().replace(KEY, "AKIDNEW").replace(SECRET, KEYS["AKIDNEW"]))
    Oracle(small).same(checkpoint.load(framework="np"))


def test_many_opens_share_one_credential(bucket, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", bucket.endpoint)
    storage: Any = {"endpoint": bucket.endpoint}
    opens = [threading.Thread(target=lambda: penstock.open(FOLDER, storage=storage)) for _ in range(4)]
    for thread in opens:
        thread.start()
    for thread in opens:
        thread.join()
    assert bucket.credentials == 1


def test_no_credentials_are_an_error_that_says_where_they_were_looked_for(bucket, monkeypatch):
    with pytest.raises(penstock.AccessError, match=r"no credentials for S3 .*AWS_ACCESS_KEY_ID.*anonymous"):
        penstock.open(FOLDER, storage={"endpoint": bucket.endpoint})
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(penstock.AccessError, match=r"the role of this machine: .*Connection refused"):
        penstock.open(FOLDER, storage={"endpoint": bucket.endpoint})
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(penstock.InvalidError, match='no AWS profile "nobody" in'):
        penstock.open(FOLDER, storage={"endpoint": bucket.endpoint})
    assert bucket.asked == []


@pytest.mark.parametrize(
    ("storage", "error", "says"),
    [
        ({"access_key_id": "x"}, penstock.InvalidError, "belong together"),
        ({"access_key_id": "a\nb", "secret_access_key": SECRET}, penstock.InvalidError, "spaces or control"),
        ({**GIVEN, "session_token": f"{SECRET}\r\n"}, penstock.InvalidError, "spaces or control"),
        ({**GIVEN, "region": "a b"}, penstock.InvalidError, "region"),
        ({**GIVEN, "addressing": "virtuel"}, penstock.InvalidError, "addressing.*path"),
        ({**GIVEN, "anonymous": "perhaps"}, penstock.InvalidError, "true or false"),
        ({**GIVEN, "anonymous": 3}, TypeError, "True or False"),
        ({**GIVEN, "secret_access_key": b"x"}, TypeError, "a string"),
        ({**GIVEN, "endpoint": "ftp://h"}, penstock.InvalidError, "the endpoint for S3"),
    ],
)
def test_settings_that_cannot_be(bucket, storage, error, says):
    with pytest.raises(error, match=says) as caught:
        penstock.open(FOLDER, storage={"endpoint": bucket.endpoint, **storage})
    assert SECRET not in repr(caught.value)
    assert bucket.asked == []


def test_the_command_line(bucket, capsys, monkeypatch):
    monkeypatch.setenv("PENSTOCK_STORAGE_SECRET_ACCESS_KEY", SECRET)
    more = ["--storage", f"endpoint={bucket.endpoint}", "--storage", f"access_key_id={KEY}"]
    assert command_line.main(["inspect", FOLDER, *more]) == 0
    assert command_line.main(["load", FOLDER, *more, "--no-progress"]) == 0
    assert SECRET not in capsys.readouterr().out


def test_what_works_on_files_only_refuses_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stores.what_works_on_files_only_refuses_addresses("s3", tmp_path)
