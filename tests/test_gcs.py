"""Checkpoints in Google Cloud Storage: tokens and where they come from, listings, and what errors say."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import object_stores as stores
import penstock
import pytest
from conftest import LAYOUT, Oracle
from s3_server import Answer, Bucket, error, serving

FOLDER = "gs://bucket/m/"
REFRESH, SECRET = "refresh/token+of a user", "secret&of=a client"
NAMES = ("GOOGLE_", "GCE_", "CLOUDSDK_", "STORAGE_EMULATOR_HOST", "NO_GCE_CHECK")


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch, tmp_path):
    """No credential of whoever runs the tests, and no question to a metadata server that this machine may have."""
    for name in os.environ:
        if name.startswith(NAMES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


class Google(Bucket):
    """One bucket in terms of the XML API, a metadata server, and what gives tokens to users."""

    #: Who may read; None: all
    readers: set[str] | None = None
    #: Public key (PEM) of the service account whose signature is a token
    account: Path | None = None
    #: The answer to who asks for a token, instead of one
    no_token: Answer | None = None
    #: So many get that answer
    until = 1 << 30

    def answer(self, method: str, target: str, fields: Mapping[str, str]) -> Answer:
        path = unquote(urlsplit(target).path)
        if not path.startswith("/bucket"):
            return self.tokens(method, path, fields)
        token = fields.get("authorization", "").removeprefix("Bearer ") or None
        with self.lock:
            self.asked.append((target, token))
            number = len(self.asked)
        if (told := self.script(target, number)) is not None:
            return told
        if token in self.expired or (token and not self.knows(token)):
            return error(401, "AuthenticationRequired", "Authentication required.")
        if self.readers is not None and token not in self.readers:
            who = f"{'<someone>' if token else 'Anonymous caller'} does not have storage.objects.get access"
            more = f"<Details>{who.replace('<', '&lt;')}</Details>"
            return error(403, "AccessDenied", "Access denied.", more, **{"X-GUploader-UploadID": "U7"})
        query = dict(parse_qsl(urlsplit(target).query))
        if query.get("list-type") == "2":
            return self.listing(query)
        return self.content(path.removeprefix("/bucket/"), fields)

    def knows(self, token: str) -> bool:
        if self.account is None:
            return token.startswith("token-")
        *signed, signature = token.split(".")
        file = self.account.with_name("signature")
        with self.lock:
            file.write_bytes(base64.urlsafe_b64decode(signature + "=="))
            command = ["openssl", "dgst", "-sha256", "-verify", str(self.account), "-signature", str(file)]
            found = subprocess.run(command, input=".".join(signed).encode(), capture_output=True)
        return found.returncode == 0

    def tokens(self, method: str, path: str, fields: Mapping[str, str]) -> Answer:
        with self.lock:
            self.credentials += 1
            token = f"token-{self.credentials}"
        if self.no_token is not None and self.credentials <= self.until:
            return self.no_token
        if path == "/computeMetadata/v1/instance/service-accounts/default/token":
            assert (method, fields["metadata-flavor"]) == ("GET", "Google")
        else:
            form = dict(parse_qsl(self.body.decode(), strict_parsing=True))
            assert (method, path) == ("POST", "/token")
            assert form == {
                "grant_type": "refresh_token", "client_id": "c", "client_secret": SECRET, "refresh_token": REFRESH,
            }  # fmt: skip
        return 200, {}, json.dumps({"access_token": token, "expires_in": 3600}).encode()


@pytest.fixture
def bucket(small: Path) -> Iterator[Google]:
    objects = {f"m/{path.name}": path.read_bytes() for path in small.iterdir() if path.is_file()}
    with serving(Google(objects)) as bucket:
        yield bucket


def public(bucket: Google) -> Any:
    return {"endpoint": bucket.endpoint, "anonymous": True}


# Objects


def test_a_folder_is_listed_page_by_page_and_loaded(bucket, small):
    stores.a_folder_is_listed_page_by_page_and_loaded(bucket, small, "gs", public(bucket))
    assert all(token is None for _, token in bucket.asked)


def test_an_index_and_files_need_no_listing(bucket, small):
    stores.an_index_and_files_need_no_listing(bucket, small, "gs", public(bucket))


def test_keys_with_odd_letters(bucket, small):
    stores.keys_may_have_odd_letters(bucket, small, "gs", public(bucket))


def test_an_object_that_is_replaced_is_changed(bucket):
    stores.an_object_that_is_replaced_is_changed(bucket, "gs", public(bucket))


def test_what_is_not_there_says_so(bucket):
    with pytest.raises(penstock.NotFoundError, match="NoSuchKey"):
        penstock.open(f"{FOLDER}none.safetensors", storage=public(bucket))
    with pytest.raises(penstock.NotFoundError, match="no object whose key begins with this"):
        penstock.open("gs://bucket/none/", storage=public(bucket))


def test_an_emulator_gets_no_token(bucket, small, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.endpoint.removeprefix("http://"))
    monkeypatch.delenv("NO_GCE_CHECK")
    monkeypatch.setenv("GCE_METADATA_HOST", bucket.endpoint.removeprefix("http://"))
    Oracle(small).same(penstock.open(FOLDER).load(framework="np"))
    assert bucket.credentials == 0 and all(token is None for _, token in bucket.asked)


# Tokens


def user_file(bucket: Google, **more: str) -> str:
    user = {"type": "authorized_user", "client_id": "c", "client_secret": SECRET, "refresh_token": REFRESH}
    return json.dumps({**user, "token_uri": f"{bucket.endpoint}/token", **more})


@pytest.fixture
def source(bucket, tmp_path, monkeypatch, request) -> str:
    """Tokens come from there. Returns what errors call it."""
    if request.param == "machine":
        monkeypatch.delenv("NO_GCE_CHECK")
        monkeypatch.setenv("GCE_METADATA_HOST", bucket.endpoint.removeprefix("http://"))
        return "the service account of this machine"
    if request.param == "gcloud":
        file = tmp_path / ".config/gcloud/application_default_credentials.json"
        file.parent.mkdir(parents=True)
    elif request.param == "gcloud elsewhere":
        file = tmp_path / "application_default_credentials.json"
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    else:
        file = tmp_path / "file.json"
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    file.write_text(user_file(bucket))
    if request.param == "service account":
        key, bucket.account = tmp_path / "key.pem", tmp_path / "public.pem"
        make = ["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", str(key)]
        subprocess.run(make, check=True, capture_output=True)
        subprocess.run(
            ["openssl", "pkey", "-in", str(key), "-pubout", "-out", str(bucket.account)],
            check=True,
            capture_output=True,
        )
        account = {"type": "service_account", "private_key": key.read_text(), "private_key_id": "7"}
        file.write_text(json.dumps({**account, "client_email": "someone@project.example"}))
    return str(file)


@pytest.mark.parametrize("source", ["machine", "gcloud", "gcloud elsewhere", "user", "service account"], indirect=True)
@pytest.mark.parametrize("address", [FOLDER, f"{FOLDER}model.safetensors.index.json"])
def test_where_tokens_come_from(bucket, small, source, address):
    checkpoint = penstock.open(address, storage={"endpoint": bucket.endpoint})
    Oracle(small).same(checkpoint.load(framework="np"))
    (token,) = {token for _, token in bucket.asked}
    assert bucket.credentials == (0 if bucket.account else 1)
    if bucket.account:
        claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
        assert claims["iss"] == "someone@project.example" and "cloud-platform" in claims["scope"]
    bucket.readers = set()
    with pytest.raises(penstock.AccessError, match="AccessDenied: <someone> does not have") as caught:
        penstock.open(address, storage={"endpoint": bucket.endpoint})
    assert f"the credentials are from {source}" in str(caught.value)
    for secret in (token, REFRESH, SECRET, "PRIVATE"):
        assert secret not in repr(caught.value)


@pytest.mark.parametrize("source", ["machine", "user"], indirect=True)
def test_an_expired_token_is_renewed_once_for_all_requests(bucket, quarter, source):
    storage, others = {"endpoint": bucket.endpoint}, {f"token-{n}" for n in range(100)}
    says = "AuthenticationRequired"
    stores.an_expired_credential_is_renewed_once(bucket, quarter, FOLDER, storage, "token-1", others, says)
    # The folder again
    bucket.expired = {f"token-{n}" for n in range(1, bucket.credentials + 1)}
    penstock.open(FOLDER, storage={"endpoint": bucket.endpoint})


@pytest.mark.parametrize("address", [FOLDER, f"{FOLDER}{LAYOUT.files[0]}"])
@pytest.mark.parametrize("asked", [True, False])
def test_a_refusal_says_that_there_was_no_token(bucket, address, asked):
    bucket.readers = set()
    with pytest.raises(penstock.AccessError, match="Anonymous caller does not have") as caught:
        penstock.open(address, storage={"endpoint": bucket.endpoint, "anonymous": asked})
    text = str(caught.value)
    assert ("(anonymous=True)" if asked else "no credentials were found: GOOGLE_APPLICATION_CREDENTIALS") in text
    bucket.readers = None
    penstock.open(address, storage={"endpoint": bucket.endpoint, "anonymous": asked})


def test_no_metadata_server_is_no_error_of_its_own(bucket, monkeypatch, small):
    monkeypatch.delenv("NO_GCE_CHECK")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    checkpoint = penstock.open(FOLDER, storage={"endpoint": bucket.endpoint})
    Oracle(small).same(checkpoint.load(framework="np"))
    assert all(token is None for _, token in bucket.asked)


@pytest.mark.parametrize("source", ["machine", "user"], indirect=True)
def test_who_gives_tokens_is_asked_again(bucket, small, source):
    bucket.no_token, bucket.until = (503, {}, b"later"), 2
    Oracle(small).same(penstock.open(FOLDER, storage={"endpoint": bucket.endpoint}).load(framework="np"))
    assert bucket.credentials == 3


@pytest.mark.parametrize("source", ["machine", "user"], indirect=True)
def test_no_token_is_an_error_with_the_reason(bucket, source):
    said = {"error": "invalid_grant", "error_description": "Token has been expired or revoked."}
    bucket.no_token = 400, {}, json.dumps(said).encode()
    with pytest.raises(penstock.AccessError, match="400 invalid_grant: Token has been expired or revoked") as caught:
        penstock.open(FOLDER, storage={"endpoint": bucket.endpoint})
    assert source in str(caught.value) and REFRESH not in repr(caught.value) and SECRET not in repr(caught.value)
    assert bucket.asked == []
    bucket.no_token = 200, {}, json.dumps({"access_token": "a\r\nb", "expires_in": 3600}).encode()
    with pytest.raises(penstock.InvalidError, match="spaces or control"):
        penstock.open(f"{FOLDER}x.safetensors", storage={"endpoint": bucket.endpoint, "connections": 3})


@pytest.mark.parametrize(
    ("content", "kind", "says"),
    [
        (None, penstock.NotFoundError, "GOOGLE_APPLICATION_CREDENTIALS"),
        ("{secret", penstock.InvalidError, "not a credentials file of Google"),
        ('{"type": "authorized_user", "client_id": "secret"}', penstock.InvalidError, "not a credentials file"),
        ('{"type": "service_account", "private_key": "secret"}', penstock.InvalidError, "no key of a service account"),
        ('{"type": "external_account", "x": "secret"}', penstock.UnsupportedError, "external_account.*gcloud auth"),
    ],
)
def test_files_that_are_none(bucket, monkeypatch, tmp_path, content, kind, says):
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    with pytest.raises(kind, match=says) as caught:
        penstock.open(FOLDER, storage={"endpoint": bucket.endpoint})
    assert str(file) in str(caught.value) and "secret" not in repr(caught.value)
    assert bucket.asked == []


def test_a_token_is_not_sent_where_others_could_read_it(bucket, monkeypatch, tmp_path):
    file = tmp_path / "file.json"
    file.write_text(user_file(bucket))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    for address in (FOLDER, f"{FOLDER}x.safetensors"):
        with pytest.raises(penstock.InvalidError, match="readable on the way"):
            penstock.open(address, storage={"endpoint": "http://storage.invalid"})
    file.write_text(user_file(bucket, token_uri="http://tokens.invalid/token"))
    with pytest.raises(penstock.InvalidError, match="token_uri"):
        penstock.open(FOLDER, storage={"endpoint": "https://storage.invalid"})
    with pytest.raises(penstock.InvalidError, match="the endpoint for Google Cloud Storage"):
        penstock.open(FOLDER, storage={"endpoint": "ftp://h", "anonymous": True})


def test_what_works_on_files_only_refuses_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stores.what_works_on_files_only_refuses_addresses("gs", tmp_path)
