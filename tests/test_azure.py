"""Checkpoints in Azure Blob Storage: keys, signatures and identities, listings, and what errors say."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import object_stores as stores
import penstock
import pytest
from azure_sas import VERSION, sas, signature
from conftest import LAYOUT, Oracle
from penstock import cli as command_line
from s3_server import Answer, Bucket, error, serving

FOLDER = "az://bucket/m/"
ACCOUNT, KEY = "account7", base64.b64encode(b"a key+of\xff\xfean account\x00").decode()
#: What no message may show
SECRET, HEADER, ASSERTION = "client/secret+of=a program", "identity-header", "an.assertion"


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch):
    """No credential of whoever runs the tests, and no question to a metadata server that this machine may have."""
    for name in os.environ:
        if name.startswith(("AZURE_", "IDENTITY_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", "http://127.0.0.1:9")


def refused(status: int, code: str, message: str, detail: str = "") -> Answer:
    more = f"<AuthenticationErrorDetail>{detail}</AuthenticationErrorDetail>" if detail else ""
    about = f"{message}\nRequestId:A7\nTime:2026-01-01T00:00:00.0000000Z"
    return error(status, code, about, more, **{"x-ms-request-id": "A7"})


class Azure(Bucket):
    """One container of one account, and what gives tokens: to programs of a tenant, to a service, to a machine."""

    #: Whether it asks for no credentials
    public = False
    #: The answer to who asks for a token, instead of one
    no_token: Answer | None = None
    #: So many get that answer
    until = 1 << 30

    def answer(self, method: str, target: str, fields: Mapping[str, str]) -> Answer:
        where = urlsplit(target)
        path, query = unquote(where.path), dict(parse_qsl(where.query, strict_parsing=bool(where.query)))
        if not path.startswith(f"/{ACCOUNT}/bucket"):
            return self.tokens(method, path, query, fields)
        token = fields.get("authorization", "").removeprefix("Bearer ") or query.get("sig")
        with self.lock:
            self.asked.append((target, token))
            number = len(self.asked)
        if (told := self.script(target, number)) is not None:
            return told
        assert fields["x-ms-version"] == VERSION
        needed = "l" if query.get("comp") == "list" else "r"
        if (told := self.refusal(token, query, needed)) is not None:
            return told
        if needed == "l":
            return self.page_of(query)
        return self.content(path.removeprefix(f"/{ACCOUNT}/bucket/"), fields)

    def refusal(self, token: str | None, query: dict[str, str], needed: str) -> Answer | None:
        if self.public and token is None:
            return None
        if token is None:
            return refused(404, "ResourceNotFound", "The specified resource does not exist.")
        failed = "Server failed to authenticate the request."
        if "sig" not in query:
            known = token.startswith("token-") and token not in self.expired
            return None if known else refused(401, "InvalidAuthenticationInfo", failed)
        if token != signature(ACCOUNT, KEY, "bucket", query) or query["sr"] != "c":
            detail = f"Signature did not match. String to sign used was {SECRET}"
            return refused(403, "AuthenticationFailed", failed, detail)
        if query["se"] < datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"):
            return refused(403, "AuthenticationFailed", failed, "Signature not valid in the specified time frame")
        if needed not in query["sp"]:
            return refused(403, "AuthorizationPermissionMismatch", "This request is not authorized.")
        return None

    def page_of(self, query: Mapping[str, str]) -> Answer:
        """A page of a listing."""
        assert (query["restype"], query["delimiter"]) == ("container", "/")
        with self.lock:
            self.listings += 1
        prefix, after = query["prefix"], query.get("marker", "")
        names = [name for name in sorted(self.objects) if name.startswith(prefix)]
        direct = [name for name in names if "/" not in name.removeprefix(prefix) and name > after]
        here, more = direct[: self.page], len(direct) > self.page
        blobs = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>Thu, 01 Jan 2026 00:00:00 GMT</Last-Modified>"
            f"<Etag>0x8D</Etag><Content-Length>1</Content-Length><Content-Type>x</Content-Type></Properties></Blob>"
            for name in here
        )
        body = f"<Blobs>{blobs}</Blobs><NextMarker>{escape(here[-1]) if more else ''}</NextMarker>"
        return 200, {}, f"<?xml version='1.0'?><EnumerationResults>{body}</EnumerationResults>".encode()

    def tokens(self, method: str, path: str, query: dict[str, str], fields: Mapping[str, str]) -> Answer:
        with self.lock:
            self.credentials += 1
            token = f"token-{self.credentials}"
        if self.no_token is not None and self.credentials <= self.until:
            return self.no_token
        if path == "/tenant/oauth2/v2.0/token":
            form = dict(parse_qsl(self.body.decode(), strict_parsing=True))
            assert (method, form.pop("scope")) == ("POST", "https://storage.azure.com/.default")
            assert (form.pop("grant_type"), form.pop("client_id")) == ("client_credentials", "program")
            kind = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
            proofs = ({"client_secret": SECRET}, {"client_assertion_type": kind, "client_assertion": ASSERTION})
            assert form in proofs
            return 200, {}, json.dumps({"access_token": token, "expires_in": 3599}).encode()
        assert query.pop("resource") == "https://storage.azure.com"
        assert query.pop("client_id", "program") == "program"
        if path == "/msi/token":
            assert (method, query, fields["x-identity-header"]) == ("GET", {"api-version": "2019-08-01"}, HEADER)
        else:
            assert (method, path) == ("GET", "/metadata/identity/oauth2/token")
            assert (query, fields["metadata"]) == ({"api-version": "2018-02-01"}, "true")
        until = str(int(time.time()) + 3600)
        return 200, {}, json.dumps({"access_token": token, "expires_on": until}).encode()


@pytest.fixture
def bucket(small: Path) -> Iterator[Azure]:
    objects = {f"m/{path.name}": path.read_bytes() for path in small.iterdir() if path.is_file()}
    with serving(Azure(objects)) as bucket:
        bucket.endpoint = f"{bucket.endpoint}/{ACCOUNT}"
        yield bucket


def settings(bucket: Azure, **more: Any) -> Any:
    return {"endpoint": bucket.endpoint, "account_name": ACCOUNT, "account_key": KEY, **more}


# Objects


def test_a_folder_is_listed_page_by_page_and_loaded(bucket, small):
    stores.a_folder_is_listed_page_by_page_and_loaded(bucket, small, "az", settings(bucket))


def test_an_index_and_files_need_no_listing(bucket, small):
    stores.an_index_and_files_need_no_listing(bucket, small, "az", settings(bucket))


def test_keys_with_odd_letters(bucket, small):
    stores.keys_may_have_odd_letters(bucket, small, "az", settings(bucket))


def test_an_object_that_is_replaced_is_changed(bucket):
    stores.an_object_that_is_replaced_is_changed(bucket, "az", settings(bucket))


def test_what_works_on_files_only_refuses_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stores.what_works_on_files_only_refuses_addresses("az", tmp_path)


def test_a_busy_server_is_asked_again(bucket, small):
    busy = refused(503, "ServerBusy", "The server is currently unable to receive requests.")
    bucket.script = lambda target, number: busy if number % 2 else None
    Oracle(small).same(penstock.open(FOLDER, storage=settings(bucket)).load(framework="np"))


def test_public_containers_need_no_credentials(bucket, small):
    bucket.public = True
    checkpoint = penstock.open(FOLDER, storage={"endpoint": bucket.endpoint, "anonymous": True})
    Oracle(small).same(checkpoint.load(framework="np"))
    assert {token for _, token in bucket.asked} == {None} and bucket.credentials == 0


# What opens an account


def test_a_signature_opens_one_container_for_a_while(bucket):
    checkpoint = penstock.open(FOLDER, storage=settings(bucket))
    checkpoint.load(framework="np")
    for target, _ in bucket.asked:
        query = dict(parse_qsl(urlsplit(target).query))
        assert (query["sr"], query["sp"]) == ("c", "rl") and KEY not in unquote(target)
        until = datetime.fromisoformat(query["se"].removesuffix("Z") + "+00:00")
        assert until - datetime.now(timezone.utc) <= timedelta(minutes=15)


@pytest.mark.parametrize("spelled", ["{}", "?{}", " {}\n", "decoded"])
@pytest.mark.parametrize("address", [FOLDER, f"{FOLDER}model.safetensors.index.json"])
def test_a_shared_access_signature(bucket, small, spelled, address):
    given = sas(ACCOUNT, KEY, "bucket", "rl")
    text = unquote(given) if spelled == "decoded" else spelled.format(given)
    storage = {"endpoint": bucket.endpoint, "sas_token": text}
    Oracle(small).same(penstock.open(address, storage=storage).load(framework="np"))
    assert {token for _, token in bucket.asked} == {dict(parse_qsl(given))["sig"]}


STRING = f"DefaultEndpointsProtocol=https;AccountName={ACCOUNT};BlobEndpoint={{endpoint}};"
SOURCES: dict[str, tuple[dict[str, str], str]] = {
    "key": ({"AZURE_STORAGE_ACCOUNT": ACCOUNT, "AZURE_STORAGE_KEY": KEY}, "AZURE_STORAGE_KEY"),
    "other names": ({"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}, "STORAGE_ACCOUNT_KEY"),
    "signature": ({"AZURE_STORAGE_SAS_TOKEN": "{sas}"}, "AZURE_STORAGE_SAS_TOKEN"),
    "string": ({"AZURE_STORAGE_CONNECTION_STRING": f"{STRING}AccountKey={KEY}"}, "AZURE_STORAGE_CONNECTION_STRING"),
    "string with a signature": (
        {"AZURE_STORAGE_CONNECTION_STRING": "BlobEndpoint={endpoint}/;SharedAccessSignature={sas}"},
        "AZURE_STORAGE_CONNECTION_STRING",
    ),
    "secret": (
        {"AZURE_TENANT_ID": "tenant", "AZURE_CLIENT_ID": "program", "AZURE_CLIENT_SECRET": SECRET,
         "AZURE_AUTHORITY_HOST": "{origin}/", "AZURE_FEDERATED_TOKEN_FILE": "later"},
        "AZURE_CLIENT_SECRET",
    ),
    "workload": (
        {"AZURE_TENANT_ID": "tenant", "AZURE_CLIENT_ID": "program", "AZURE_FEDERATED_TOKEN_FILE": "{folder}/assertion",
         "AZURE_AUTHORITY_HOST": "{origin}", "IDENTITY_ENDPOINT": "{origin}/later", "IDENTITY_HEADER": "later"},
        "assertion \\(AZURE_FEDERATED_TOKEN_FILE\\)",
    ),
    "service": (
        {"IDENTITY_ENDPOINT": "{origin}/msi/token", "IDENTITY_HEADER": HEADER},
        "the managed identity of this service",
    ),
    "machine": (
        {"AZURE_POD_IDENTITY_AUTHORITY_HOST": "{origin}", "AZURE_CLIENT_ID": "program"},
        "the managed identity of this machine",
    ),
}  # fmt: skip
IDENTITIES = ["secret", "workload", "service", "machine"]


@pytest.fixture
def source(bucket, tmp_path, monkeypatch, request) -> str:
    """What opens the account comes from there. Returns what errors call it."""
    variables, called = SOURCES[request.param]
    (tmp_path / "assertion").write_text(f"{ASSERTION}\n")
    values = {"endpoint": bucket.endpoint, "origin": bucket.endpoint.removesuffix(f"/{ACCOUNT}"), "folder": tmp_path}
    values["sas"] = sas(ACCOUNT, KEY, "bucket", "rl")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(**values))
    return called


@pytest.mark.parametrize("source", SOURCES, indirect=True)
@pytest.mark.parametrize("address", [FOLDER, f"{FOLDER}model.safetensors.index.json"])
def test_where_credentials_come_from(bucket, small, source, address):
    storage: Any = None if "STRING" in source else {"endpoint": bucket.endpoint}
    Oracle(small).same(penstock.open(address, storage=storage).load(framework="np"))
    identity = "STORAGE" not in source
    assert bucket.credentials == identity
    used = {token for _, token in bucket.asked}
    assert not identity or used == {"token-1"}
    told = refused(403, "AuthorizationPermissionMismatch", "This request is not authorized.")
    bucket.script = lambda target, number: told
    with pytest.raises(penstock.AccessError, match=r"AuthorizationPermissionMismatch: This.*Data Reader") as caught:
        penstock.open(address, storage=storage)
    assert "RequestId" not in str(caught.value)
    with pytest.raises(penstock.AccessError, match=f"the credentials are from .*{source}; "):
        penstock.open(f"{FOLDER}{LAYOUT.files[0]}", storage=storage)
    for secret in ({KEY, SECRET, HEADER, ASSERTION} | used) - {None}:
        assert secret not in repr(caught.value) and quote(secret, safe="") not in repr(caught.value)


@pytest.mark.parametrize("source", IDENTITIES, indirect=True)
def test_an_expired_token_is_renewed_once_for_all_requests(bucket, quarter, source):
    storage, others = {"endpoint": bucket.endpoint}, {f"token-{n}" for n in range(100)}
    says = "InvalidAuthenticationInfo"
    stores.an_expired_credential_is_renewed_once(bucket, quarter, FOLDER, storage, "token-1", others, says)
    bucket.expired = {f"token-{n}" for n in range(1, bucket.credentials + 1)}
    penstock.open(FOLDER, storage=storage)


def test_a_token_that_the_program_gives(bucket, small, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    calls = []

    def call() -> dict[str, str]:
        calls.append(None)
        return {"token": f"token-{len(calls)}"}

    checkpoint = penstock.open(FOLDER, storage={"endpoint": bucket.endpoint, "credentials": call})
    Oracle(small).same(checkpoint.load(framework="np"))
    assert {token for _, token in bucket.asked} == {"token-1"}
    bucket.expired = {"token-1"}
    Oracle(small).same(checkpoint.load(framework="np"))
    assert len(calls) == 2 and bucket.credentials == 0


@pytest.mark.parametrize("source", IDENTITIES, indirect=True)
def test_who_gives_tokens_is_asked_again(bucket, small, source):
    bucket.no_token, bucket.until = (503, {}, b"later"), 2
    Oracle(small).same(penstock.open(FOLDER, storage={"endpoint": bucket.endpoint}).load(framework="np"))
    assert bucket.credentials == 3


@pytest.mark.parametrize("source", IDENTITIES, indirect=True)
def test_no_token_is_an_error_with_the_reason(bucket, source):
    said = {"error": "invalid_client", "error_description": "AADSTS7000215: Invalid client secret provided."}
    bucket.no_token = 401, {}, json.dumps(said).encode()
    with pytest.raises(penstock.AccessError, match=f"{source}.*401 invalid_client: AADSTS7000215") as caught:
        penstock.open(FOLDER, storage={"endpoint": bucket.endpoint})
    assert not any(secret in repr(caught.value) for secret in (SECRET, HEADER, ASSERTION))
    assert bucket.asked == []


@pytest.mark.parametrize("address", [FOLDER, f"{FOLDER}x.safetensors"])
def test_no_credentials_are_an_error_that_says_where_they_were_looked_for(bucket, address):
    says = r"no credentials for Azure .*account_key.*AZURE_STORAGE_KEY.*of this machine: .*refused.*anonymous"
    with pytest.raises(penstock.AccessError, match=says):
        penstock.open(address, storage={"endpoint": bucket.endpoint})
    assert bucket.asked == []


def test_the_key_of_the_environment_is_for_its_account(bucket, monkeypatch):
    string = f"AccountName=another;AccountKey={KEY};BlobEndpoint=https://another.invalid"
    for variables in (
        {"AZURE_STORAGE_CONNECTION_STRING": string},
        {"AZURE_STORAGE_ACCOUNT": "another", "AZURE_STORAGE_KEY": KEY},
    ):
        with monkeypatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            with pytest.raises(penstock.AccessError, match="no credentials for Azure"):
                penstock.open(FOLDER, storage={"endpoint": bucket.endpoint, "account_name": ACCOUNT})
    assert bucket.asked == []


# Errors


@pytest.mark.parametrize("address", [f"{FOLDER}none/", f"{FOLDER}none.safetensors"])
@pytest.mark.parametrize(
    ("told", "kind", "says"),
    [
        (refused(404, "ContainerNotFound", "No."), penstock.NotFoundError, "404.*ContainerNotFound: No"),
        (refused(403, "AuthenticationFailed", "x", "Signature did not match. String to sign used was y"),
         penstock.AccessError, "AuthenticationFailed: x; Signature did not match.*storage=; is the account key right"),
        (refused(403, "AuthorizationFailure", "x"), penstock.AccessError, "firewall"),
        (refused(403, "KeyBasedAuthenticationNotPermitted", "x"), penstock.AccessError, "use an identity"),
        (refused(400, "InvalidAuthenticationInfo", "x"), penstock.AccessError, "InvalidAuthenticationInfo: x"),
        (refused(400, "InvalidResourceName", "<odd>"), penstock.ReadError, "InvalidResourceName: <odd>"),
        (refused(409, "BlobArchived", "x"), penstock.ReadError, "BlobArchived"),
        ((403, {}, b"x" * 100_000), penstock.AccessError, "refuses access \\(403"),
    ],
)  # fmt: skip
def test_errors_say_what_the_server_says(bucket, address, told, kind, says):
    bucket.script = lambda target, number: told
    with pytest.raises(kind, match=says) as caught:
        penstock.open(address, storage=settings(bucket))
    assert caught.value.path == address
    used = {quote(token, safe="") for _, token in bucket.asked}
    assert not any(secret in repr(caught.value) for secret in {KEY, "sig=", "String to sign", *used})
    assert len(bucket.asked) == 1, "a key that was given stays the same"


def test_what_is_not_there_says_so(bucket):
    with pytest.raises(penstock.NotFoundError, match="404") as caught:
        penstock.open(f"{FOLDER}none.safetensors", storage=settings(bucket))
    assert "private" not in str(caught.value)
    with pytest.raises(penstock.NotFoundError, match="no object whose key begins with this"):
        penstock.open("az://bucket/none/", storage=settings(bucket))


@pytest.mark.parametrize("address", [FOLDER, f"{FOLDER}{LAYOUT.files[0]}"])
def test_private_containers_say_that_there_were_no_credentials(bucket, address):
    public = {"endpoint": bucket.endpoint, "anonymous": True}
    with pytest.raises(penstock.NotFoundError, match=r"ResourceNotFound.*private containers"):
        penstock.open(address, storage=public)
    told = refused(409, "PublicAccessNotPermitted", "Public access is not permitted on this storage account.")
    bucket.script = lambda target, number: told
    with pytest.raises(penstock.AccessError, match=r"PublicAccessNotPermitted.*no credentials \(anonymous=True\)"):
        penstock.open(address, storage=public)


def test_a_signature_that_is_none_of_ours_or_too_old(bucket):
    old = {"endpoint": bucket.endpoint, "sas_token": sas(ACCOUNT, KEY, "bucket", "rl", minutes=-1)}
    with pytest.raises(penstock.AccessError, match=r"not valid in the specified time frame.*still valid") as caught:
        penstock.open(FOLDER, storage=old)
    assert caught.value.status == 403 and "sig=" not in repr(caught.value)
    other = base64.b64encode(b"another").decode()
    with pytest.raises(penstock.AccessError, match="did not match") as caught:
        penstock.open(f"{FOLDER}{LAYOUT.files[0]}", storage=settings(bucket, account_key=other))
    assert caught.value.request_id == "A7" and SECRET not in repr(caught.value) and other not in repr(caught.value)


@pytest.mark.parametrize(
    ("storage", "error", "says"),
    [
        (
            {"account_name": "a", "account_key": "no base64!"},
            penstock.InvalidError,
            "the account key from storage= is no base64",
        ),
        ({"sas_token": f"sv=1&se={SECRET}"}, penstock.InvalidError, "no shared access signature"),
        ({"sas_token": f"sv=1&sig=a%0d%0ab{SECRET}"}, penstock.InvalidError, "no shared access signature"),
        ({"account_key": KEY, "sas_token": "sig=x"}, penstock.InvalidError, "not both"),
        ({"account_key": KEY}, penstock.InvalidError, "account_name in storage="),
        ({"account_name": "a.b"}, penstock.InvalidError, "the name of the storage account"),
        ({"endpoint": None}, penstock.InvalidError, "no storage account is named.*AZURE_STORAGE_ACCOUNT"),
        ({"endpoint": "ftp://h"}, penstock.InvalidError, "the endpoint for Azure"),
        ({"endpoint": f"https://h?sig={SECRET}"}, penstock.InvalidError, "sas_token"),
        ({"account_key": b"x"}, TypeError, "a string"),
    ],
)
def test_settings_that_cannot_be(bucket, storage, error, says):
    with pytest.raises(error, match=says) as caught:
        penstock.open(FOLDER, storage={"endpoint": bucket.endpoint, **storage})
    assert SECRET not in repr(caught.value)
    assert bucket.asked == []


@pytest.mark.parametrize("address", [FOLDER, f"{FOLDER}x.safetensors"])
def test_nothing_secret_is_sent_where_others_could_read_it(bucket, monkeypatch, address):
    far = {"endpoint": "http://storage.invalid", "account_name": ACCOUNT}
    for more in ({"account_key": KEY}, {"sas_token": sas(ACCOUNT, KEY, "bucket", "rl")}, {}):
        with pytest.raises(penstock.InvalidError, match="readable on the way"):
            penstock.open(address, storage={**far, **more})
    monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
    monkeypatch.setenv("AZURE_CLIENT_ID", "program")
    monkeypatch.setenv("AZURE_CLIENT_SECRET", SECRET)
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", "http://login.invalid")
    with pytest.raises(penstock.InvalidError, match="AZURE_AUTHORITY_HOST"):
        penstock.open(address, storage={"endpoint": bucket.endpoint})
    monkeypatch.delenv("AZURE_CLIENT_SECRET")
    monkeypatch.setenv("AZURE_CLIENT_CERTIFICATE_PATH", "x.pem")
    monkeypatch.delenv("AZURE_AUTHORITY_HOST")
    with pytest.raises(penstock.UnsupportedError, match="AZURE_CLIENT_CERTIFICATE_PATH"):
        penstock.open(address, storage={"endpoint": bucket.endpoint})


def test_the_command_line_shows_no_secret(bucket, capsys, monkeypatch):
    string = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={bucket.endpoint}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", string)
    monkeypatch.setenv("IDENTITY_HEADER", HEADER)
    given = sas(ACCOUNT, KEY, "bucket", "rl")
    for more in ([], ["--storage", f"sas_token={given}"]):
        for command in (["inspect"], ["load", "--no-progress"], ["doctor"], ["doctor", "--json"]):
            assert command_line.main([*command, FOLDER, *more]) == 0
        bucket.script = lambda target, number: refused(403, "AuthenticationFailed", "x")
        for command in (["inspect"], ["doctor"], ["doctor", "--json"]):
            assert command_line.main([*command, FOLDER, *more]) != 0
        bucket.script = lambda target, number: None
    used = {quote(token, safe="") for _, token in bucket.asked}
    said = "".join(capsys.readouterr())
    assert "AuthenticationFailed" in said and "AZURE_STORAGE_CONNECTION_STRING" in said
    assert len(used) > 1 and not any(secret in said for secret in {KEY, HEADER, "sig=", *used, *map(unquote, used)})
