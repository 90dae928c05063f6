"""Settings that cannot be, and settings with what users' tools leave around them: no setting makes the core panic.

Every variable and every setting of each store gets every odd value, and so does every file that a variable names. What
comes is a checkpoint, or an error that is no bug of Penstock's. What only has spaces or quotes around it works.
"""

from __future__ import annotations

import http.server
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import penstock
import pytest
from conftest import LAYOUT, Oracle
from local_server import local_server
from s3_server import KEYS, Bucket, serving

KEY, SECRET = next(iter(KEYS.items()))
FILE = LAYOUT.files[0]

#: What becomes of a value that is right.
AROUND: dict[str, Callable[[str], str]] = {
    "newline": lambda text: f"{text}\n",
    "carriage return": lambda text: f"{text}\r\n",
    "spaces": lambda text: f"  {text} ",
    "double quotes": lambda text: f'"{text}"',
    "single quotes": lambda text: f"'{text}'\n",
}
#: Without a scheme: of addresses.
WRONG: dict[str, Callable[[str], str]] = {
    "inner newline": lambda text: f"{text[: len(text) // 2]}\n{text[len(text) // 2 :]}",
    "inner space": lambda text: f"{text[: len(text) // 2]} {text[len(text) // 2 :]}",
    "one quote": lambda text: f'"{text}',
    "no scheme": lambda text: text.split("://")[-1],
    "umlaut": lambda text: f"{text}ä",
    "escape": lambda text: f"{text}\x1b[31m",
    "percent": lambda text: f"{text}%zz",
    "braces": lambda text: f"{{{text}}}",
    "backslash": lambda text: f"{text}\\",
    "no text": lambda text: " ",
    "xn--": lambda text: "http://xn--a/",
    "four numbers": lambda text: "http://1.2.3.999/",
    "numbers": lambda text: "http://1.2.3.4.5/",
    "dots": lambda text: "http://a..b/",
    "no host": lambda text: "http://",
    "long": lambda text: text + "a" * 300,
    "bracket": lambda text: "http://[::1",
    "zone": lambda text: "http://[fe80::1%25eth0]/",
    "user": lambda text: text.replace("://", "://user:password@"),
    "port": lambda text: "http://h:99999/",
    "traversal": lambda text: "../../x",
    "xn": lambda text: "xn--a",
}


@pytest.fixture
def bucket(small: Path) -> Iterator[Bucket]:
    with serving(Bucket({f"m/{FILE}": (small / FILE).read_bytes()})) as bucket:
        yield bucket


@pytest.fixture(scope="module")
def denying() -> Iterator[str]:
    """A server, and proxy, that lets nobody to anything: it is asked once."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_PUT = do_CONNECT = do_GET

        def log_message(self, *about: object) -> None:
            pass

    with local_server(Handler) as place:
        yield place


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch, tmp_path, denying):
    for name in os.environ:
        if re.match("AWS_|AZURE_|GOOGLE_|GCE_|CLOUDSDK_|STORAGE_|IDENTITY_|PENSTOCK_STORAGE_|SSL_CERT", name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "AZURE_POD_IDENTITY_AUTHORITY_HOST"):
        monkeypatch.setenv(name, f"http://{denying}")
    monkeypatch.setenv("GCE_METADATA_HOST", denying)
    # Names of hosts lead there
    monkeypatch.setenv("ALL_PROXY", f"http://{denying}")


def environments(bucket: Bucket, folder: Path) -> dict[str, dict[str, str]]:
    """Of each source of credentials for S3 what is set, and what its files say."""
    (folder / "pod-token").write_text("pod-token")
    (folder / "web-token").write_text("web-token")
    (folder / "config").write_text(
        f"[profile work]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\nregion = us-east-1\n"
        f"endpoint_url = {bucket.endpoint}\n"
    )
    common = {"AWS_ENDPOINT_URL_S3": bucket.endpoint, "AWS_REGION": "us-east-1"}
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    return {
        "keys": common | keys,
        "session": common | keys | {"AWS_SESSION_TOKEN": "token"},
        "default region": {"AWS_ENDPOINT_URL": bucket.endpoint, "AWS_DEFAULT_REGION": "us-east-1"} | keys,
        "profile": {"AWS_PROFILE": "work", "AWS_CONFIG_FILE": str(folder / "config")},
        "pod": common
        | {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{bucket.endpoint}/pod",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(folder / "pod-token"),
        },
        "pod with a token": common
        | {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{bucket.endpoint}/pod",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN": "pod-token",
        },
        "web identity": common
        | {
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(folder / "web-token"),
            "AWS_ROLE_ARN": "arn:aws:iam::1:role/x",
            "AWS_ROLE_SESSION_NAME": "session",
            "AWS_ENDPOINT_URL_STS": f"{bucket.endpoint}/sts",
        },
        "machine": common | {"AWS_EC2_METADATA_SERVICE_ENDPOINT": bucket.endpoint},
        "penstock's": {
            "PENSTOCK_STORAGE_ENDPOINT": bucket.endpoint,
            "PENSTOCK_STORAGE_REGION": "us-east-1",
            "PENSTOCK_STORAGE_ACCESS_KEY_ID": KEY,
            "PENSTOCK_STORAGE_SECRET_ACCESS_KEY": SECRET,
        },
    }


SOURCES = (
    "keys", "session", "default region", "profile", "pod", "pod with a token", "web identity", "machine", "penstock's",
)  # fmt: skip


def opened(address: str, storage: Any = None) -> penstock.Checkpoint | penstock.PenstockError:
    """A checkpoint, or an error. Never a panic: that is an `InternalError`, or ends the load as if it hung."""
    try:
        return penstock.open(address, storage=storage)
    except penstock.PenstockError as error:
        assert not isinstance(error, penstock.InternalError), error
        assert error.kind not in ("Timeout", "Stalled"), error
        return error


@pytest.mark.parametrize("source", SOURCES)
def test_what_stands_around_a_value_is_not_meant(bucket, small, tmp_path, monkeypatch, source):
    environment = environments(bucket, tmp_path)[source]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    Oracle(small / FILE).same(penstock.open(f"s3://bucket/m/{FILE}").load(framework="np"))
    failed = []
    for name, value in environment.items():
        for how, around in AROUND.items():
            monkeypatch.setenv(name, around(value))
            found = opened(f"s3://bucket/m/{FILE}")
            if not isinstance(found, penstock.Checkpoint):
                failed.append((name, how, str(found)))
        monkeypatch.setenv(name, value)
    assert not failed


@pytest.mark.parametrize("source", SOURCES)
def test_no_value_of_s3_is_a_panic(bucket, tmp_path, monkeypatch, source):
    environment = environments(bucket, tmp_path)[source]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name, value in environment.items():
        for how, wrong in WRONG.items():
            monkeypatch.setenv(name, wrong(value))
            # With and without a listing
            for address in (f"s3://bucket/m/{FILE}", "s3://bucket/m/"):
                found = opened(address)
                # An empty variable is not set
                if isinstance(found, penstock.InvalidError) and how != "no text":
                    about = re.sub("PENSTOCK_STORAGE_", "", name).lower()
                    says = str(found).lower()
                    assert name.lower() in says or about in says or "session token" in says, (name, how, str(found))
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("file", ["pod-token", "web-token", "config"])
def test_no_content_of_a_file_is_a_panic(bucket, tmp_path, monkeypatch, file):
    source = {"pod-token": "pod", "web-token": "web identity", "config": "profile"}[file]
    for name, value in environments(bucket, tmp_path)[source].items():
        monkeypatch.setenv(name, value)
    right = (tmp_path / file).read_text()
    for how, wrong in WRONG.items():
        (tmp_path / file).write_text(wrong(right))
        opened(f"s3://bucket/m/{FILE}", {"connections": 1 + list(WRONG).index(how)})
    if file != "config":
        (tmp_path / file).write_text(f"{right}\n")
        assert isinstance(opened(f"s3://bucket/m/{FILE}", {"connections": 40}), penstock.Checkpoint)
    (tmp_path / file).write_bytes(b"\xff\x00")
    opened(f"s3://bucket/m/{FILE}", {"connections": 41})
    (tmp_path / file).unlink()
    found = opened(f"s3://bucket/m/{FILE}", {"connections": 42})
    assert file in str(found) or "no AWS profile" in str(found)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_no_setting_is_a_panic(bucket, denying, scheme):
    right: dict[str, Any] = {
        "endpoint": bucket.endpoint, "region": "us-east-1", "addressing": "virtual", "access_key_id": KEY,
        "secret_access_key": SECRET, "session_token": "t", "account_name": "a", "account_key": "c2VzYW1l",
        "sas_token": "sv=1&sig=x", "profile": "work", "proxy": f"http://{denying}", "ca": "/etc/passwd",
    }  # fmt: skip
    pairs = {"access_key_id": ("secret_access_key",), "secret_access_key": ("access_key_id",)}
    for name, value in right.items():
        needed = {other: right[other] for other in pairs.get(name, ("access_key_id", "secret_access_key"))}
        for changed in (*AROUND.values(), *WRONG.values(), lambda text: text):
            storage = {"endpoint": bucket.endpoint, "account_name": "a", **needed, name: changed(value)}
            for address in (
                f"{scheme}://bucket/m/{FILE}",
                f"{scheme}://bucket/m/",
                f"{scheme}://xn--a/m/x.safetensors",
            ):
                opened(address, storage)


@pytest.mark.parametrize("names", ["xn--a", "1.2.3", "a..b", "-", "a" * 70, "A_b", "a.b"])
@pytest.mark.parametrize("addressing", ["path", "virtual"])
def test_no_name_of_a_bucket_is_a_panic(bucket, names, addressing):
    keys = {"access_key_id": KEY, "secret_access_key": SECRET, "addressing": addressing}
    for endpoint in ({}, {"endpoint": bucket.endpoint}, {"endpoint": "http://h.invalid"}):
        for key in ("m/", "m/x.safetensors", f"m/{'ä' * 2000}.safetensors", "m/\x01\n.safetensors"):
            opened(f"s3://{names}/{key}", {**keys, **endpoint})


def test_an_endpoint_that_is_an_address_has_buckets_in_its_paths(bucket, small):
    """No name stands before an address, so "virtual" cannot be meant: other clients do so too."""
    keys = {"endpoint": bucket.endpoint, "access_key_id": KEY, "secret_access_key": SECRET, "addressing": "virtual"}
    Oracle(small / FILE).same(penstock.open(f"s3://bucket/m/{FILE}", storage=keys).load(framework="np"))  # type: ignore[arg-type]


GOOGLE = {
    "STORAGE_EMULATOR_HOST": "http://{denying}",
    "GCE_METADATA_HOST": "{denying}",
    "GCE_METADATA_IP": "{denying}",
    "GOOGLE_APPLICATION_CREDENTIALS": "{folder}/google.json",
    "CLOUDSDK_CONFIG": "{folder}",
    "NO_GCE_CHECK": "true",
}
AZURE = {
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=a;AccountKey=c2VzYW1l;BlobEndpoint=http://{denying}/a",
    "AZURE_STORAGE_ACCOUNT": "a",
    "AZURE_STORAGE_KEY": "c2VzYW1l",
    "AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=x",
    "AZURE_TENANT_ID": "t",
    "AZURE_CLIENT_ID": "c",
    "AZURE_CLIENT_SECRET": "s",
    "AZURE_AUTHORITY_HOST": "http://{denying}",
    "AZURE_FEDERATED_TOKEN_FILE": "{folder}/web-token",
    "AZURE_POD_IDENTITY_AUTHORITY_HOST": "http://{denying}",
    "IDENTITY_ENDPOINT": "http://{denying}/x",
    "IDENTITY_HEADER": "h",
}
#: What is set besides, so that the variable is looked at.
BESIDES = {
    "AZURE_TENANT_ID": ("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_AUTHORITY_HOST"),
    "AZURE_CLIENT_ID": ("AZURE_TENANT_ID", "AZURE_CLIENT_SECRET", "AZURE_AUTHORITY_HOST"),
    "AZURE_CLIENT_SECRET": ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_AUTHORITY_HOST"),
    "AZURE_AUTHORITY_HOST": ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET"),
    "AZURE_FEDERATED_TOKEN_FILE": ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_AUTHORITY_HOST"),
    "IDENTITY_ENDPOINT": ("IDENTITY_HEADER",),
    "IDENTITY_HEADER": ("IDENTITY_ENDPOINT",),
}


@pytest.mark.parametrize(("scheme", "name"), [*(("gs", name) for name in GOOGLE), *(("az", name) for name in AZURE)])
def test_no_value_of_google_or_azure_is_a_panic(tmp_path, monkeypatch, denying, scheme, name):
    variables = {of: value.format(folder=tmp_path, denying=denying) for of, value in {**GOOGLE, **AZURE}.items()}
    user = {"type": "authorized_user", "client_id": "c", "client_secret": "s", "refresh_token": "r"}
    (tmp_path / "google.json").write_text(json.dumps({**user, "token_uri": f"http://{denying}/t"}))
    (tmp_path / "web-token").write_text("web-token\n")
    if scheme == "az" and not name.startswith("AZURE_STORAGE"):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "a")
    for other in BESIDES.get(name, ()):
        monkeypatch.setenv(other, variables[other])
    for changed in (*AROUND.values(), *WRONG.values()):
        monkeypatch.setenv(name, changed(variables[name]))
        for key in ("m/", f"m/{FILE}"):
            found = opened(f"{scheme}://bucket/{key}")
            assert isinstance(found, penstock.PenstockError)
            if isinstance(found, penstock.InvalidError):
                says = str(found)
                assert name in says or "not a credentials file" in says or "storage account" in says, says


@pytest.mark.parametrize("field", ["client_id", "token_uri", "private_key", "type", "private_key_id", "client_email"])
def test_no_value_in_a_file_of_google_is_a_panic(tmp_path, monkeypatch, denying, field):
    file = tmp_path / "google.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    user = {"type": "authorized_user", "client_id": "c", "client_secret": "s", "refresh_token": "r"}
    account = {
        "type": "service_account", "client_email": "a@b", "private_key_id": "1",
        "private_key": "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
    }  # fmt: skip
    for content in (user, account):
        right = {"token_uri": f"http://{denying}/t", **content}
        for number, changed in enumerate((*AROUND.values(), *WRONG.values())):
            file.write_text(json.dumps({**right, field: changed(right.get(field, "x"))}))
            opened(f"gs://bucket/m/{FILE}", {"connections": 1 + number})
        file.write_text(json.dumps({**right, field: None}))
        opened(f"gs://bucket/m/{FILE}", {"connections": 50})
