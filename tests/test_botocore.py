"""AWS profiles whose credentials others give (process, role, SSO), by the real botocore. STS and SSO are doubles."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import penstock
import pytest
from conftest import Oracle
from s3_server import KEYS, TOKEN, Answer, Bucket, serving

FOLDER = "s3://bucket/m/"
START = "https://people.awsapps.invalid/start"
SSO_TOKEN = "the-cached-token-of-sso"


class Services(Bucket):
    """One bucket; and STS, which gives roles, and the portal of SSO."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        #: What was asked for: (operation, what was sent with it)
        self.given: list[tuple[str, dict[str, str]]] = []
        self.lives = timedelta(hours=6)

    def service(self, method: str, path: str, target: str, fields: Mapping[str, str]) -> Answer:
        with self.lock:
            self.credentials += 1
            key = f"AKIDROLE{self.credentials}"
            KEYS[key] = f"secret of {key}"
        until = datetime.now(timezone.utc) + self.lives
        if path == "/federation/credentials":
            query = dict(parse_qsl(urlsplit(target).query))
            self.given.append(("sso", query))
            if fields.get("x-amz-sso_bearer_token") != SSO_TOKEN:
                return 401, {}, b'{"message": "Session token not found or invalid"}'
            role = {"accessKeyId": key, "secretAccessKey": KEYS[key], "sessionToken": TOKEN}
            answer = {"roleCredentials": role | {"expiration": int(until.timestamp() * 1000)}}
            return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()
        form = dict(parse_qsl(self.body.decode()))
        self.given.append((form.get("Action", path), form))
        if f"Credential={next(iter(KEYS))}/" not in fields.get("authorization", ""):
            body = "<ErrorResponse><Error><Code>AccessDenied</Code><Message>not you</Message></Error></ErrorResponse>"
            return 403, {"Content-Type": "text/xml"}, body.encode()
        inner = "".join(
            f"<{name}>{value}</{name}>"
            for name, value in {
                "AccessKeyId": key, "SecretAccessKey": KEYS[key], "SessionToken": TOKEN,
                "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }.items()
        )  # fmt: skip
        body = f"<AssumeRoleResult><Credentials>{inner}</Credentials></AssumeRoleResult>"
        return 200, {"Content-Type": "text/xml"}, f"<AssumeRoleResponse>{body}</AssumeRoleResponse>".encode()


@pytest.fixture
def bucket(small: Path) -> Iterator[Services]:
    objects = {f"m/{path.name}": path.read_bytes() for path in small.iterdir() if path.is_file()}
    with serving(Services(objects)) as bucket:
        yield bucket


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path, bucket) -> Path:
    for name in os.environ:
        if name.startswith(("AWS_", "PENSTOCK_STORAGE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for service in ("STS", "SSO", "S3"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", bucket.endpoint)
    (tmp_path / ".aws").mkdir()
    return tmp_path


def config(home: Path, text: str) -> None:
    (home / ".aws/config").write_text(text)


def opened(**storage: Any) -> penstock.Checkpoint:
    return penstock.open(FOLDER, storage={"profile": "people", **storage})


PROCESS = """
import json, pathlib, sys
count = pathlib.Path(sys.argv[1])
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
keys = {{"AccessKeyId": f"AKIDPROCESS{{number}}", "SecretAccessKey": "from a process"}}
print(json.dumps({{"Version": 1, **keys, {more}}}))
"""


@pytest.fixture
def process(home: Path) -> Path:
    """The profile takes its credentials from a program, which counts its runs in this file."""
    count = home / "count"
    program = home / "program.py"
    program.write_text(PROCESS.format(more='"SessionToken": "t"'))
    for number in range(1, 9):
        KEYS[f"AKIDPROCESS{number}"] = "from a process"
    config(home, f"[profile people]\nregion = us-east-1\ncredential_process = {sys.executable} {program} {count}\n")
    return count


def test_a_process_gives_the_credentials(bucket, small, process):
    pytest.importorskip("botocore")
    checkpoint = opened()
    for _ in range(2):
        Oracle(small).same(checkpoint.load(framework="np"))
    assert {key for _, key in bucket.asked} == {"AKIDPROCESS1"}
    bucket.expired = {"AKIDPROCESS1"}
    Oracle(small).same(checkpoint.load(framework="np"))
    assert process.read_text() == "2"


def test_a_process_that_fails_says_so_and_shows_nothing_that_it_prints(bucket, home, process):
    pytest.importorskip("botocore")
    (home / "program.py").write_text("import sys; sys.exit('sesame')")
    with pytest.raises(
        penstock.AccessError, match='botocore gets no credentials for the AWS profile "people"'
    ) as caught:
        opened()
    assert "sesame" not in str(caught.value)
    assert type(caught.value.__cause__).__name__ == "CredentialRetrievalError"
    assert bucket.asked == []


def role(home: Path, source: str) -> None:
    key, secret = next(iter(KEYS.items()))
    (home / ".aws/credentials").write_text(f"[base]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    config(home, f"[profile people]\nregion = us-east-1\nrole_arn = arn:aws:iam::123456789012:role/reader\n{source}\n")


@pytest.mark.parametrize("source", ["source_profile = base", "credential_source = Environment"])
def test_a_role_is_assumed(bucket, small, home, monkeypatch, source):
    pytest.importorskip("botocore")
    role(home, source)
    if "Environment" in source:
        (home / ".aws/credentials").unlink()
        key, secret = next(iter(KEYS.items()))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    checkpoint = opened()
    Oracle(small).same(checkpoint.load(framework="np"))
    assert [operation for operation, _ in bucket.given] == ["AssumeRole"]
    assert bucket.given[0][1]["RoleArn"] == "arn:aws:iam::123456789012:role/reader"
    assert {key for _, key in bucket.asked} == {"AKIDROLE1"}
    bucket.expired = {"AKIDROLE1"}
    Oracle(small).same(checkpoint.load(framework="np"))
    assert len(bucket.given) == 2


def test_a_role_goes_before_keys_of_the_same_profile(bucket, home):
    """As for the tools of AWS."""
    pytest.importorskip("botocore")
    role(home, "source_profile = base\naws_access_key_id = other\naws_secret_access_key = other")
    opened()
    assert {key for _, key in bucket.asked} == {"AKIDROLE1"}


def test_a_role_that_is_refused_says_what_sts_says(bucket, home):
    pytest.importorskip("botocore")
    role(home, "source_profile = base")
    file = home / ".aws/credentials"
    file.write_text(file.read_text().replace(next(iter(KEYS)), "AKIDOTHER"))
    with pytest.raises(
        penstock.AccessError, match=r"profile \"people\": ClientError: .*AccessDenied.*AssumeRole.*not you"
    ):
        opened()


def sso(home: Path, expires: timedelta) -> None:
    session = "sso_session = it\nsso_account_id = 123456789012\nsso_role_name = reader\nregion = us-east-1\n"
    config(
        home,
        f"[profile people]\n{session}[sso-session it]\nsso_start_url = {START}\nsso_region = us-east-1\n"
        "sso_registration_scopes = sso:account:access\n",
    )
    cache = home / ".aws/sso/cache"
    cache.mkdir(parents=True)
    until = (datetime.now(timezone.utc) + expires).strftime("%Y-%m-%dT%H:%M:%SZ")
    token = {"startUrl": START, "region": "us-east-1", "accessToken": SSO_TOKEN, "expiresAt": until}
    (cache / f"{hashlib.sha1(b'it').hexdigest()}.json").write_text(json.dumps(token))


IN_A_PROCESS = """
import penstock

try:
    print(len(penstock.open("s3://bucket/m/", storage={"profile": "people"}).load(framework="np")))
except penstock.AccessError as error:
    print(error)
"""


def alone(program: str) -> str:
    """What a process of its own prints. botocore looks for HOME when it is imported."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sso_gives_the_credentials_of_a_role(bucket, small, home):
    pytest.importorskip("botocore")
    sso(home, timedelta(hours=8))
    assert int(alone(IN_A_PROCESS)) == len(penstock.open(small))
    assert bucket.given == [("sso", {"role_name": "reader", "account_id": "123456789012"})]
    assert {key for _, key in bucket.asked} == {"AKIDROLE1"}


def test_sso_that_has_expired_says_so(bucket, home):
    pytest.importorskip("botocore")
    sso(home, timedelta(hours=-1))
    said = alone(IN_A_PROCESS)
    assert 'profile "people": ' in said and "expired" in said and SSO_TOKEN not in said
    assert bucket.asked == []


WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "botocore":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import penstock

try:
    penstock.open("s3://bucket/m/", storage={"profile": "people"})
except penstock.UnsupportedError as error:
    print(error)
    print(type(error.__cause__).__name__)
"""


def test_without_botocore_the_error_says_what_to_do(home, process):
    said = alone(WITHOUT)
    assert 'the AWS profile "people" takes its credentials from' in said
    assert "pip install botocore" in said and "aws configure export-credentials --profile people" in said
    assert said.splitlines()[1:] == ["ModuleNotFoundError"]


def test_botocore_is_imported_only_for_such_profiles(home, process, bucket):
    program = (
        "import sys, penstock\n"
        "storage = {'access_key_id': 'AKIDPROCESS1', 'secret_access_key': 'from a process'}\n"
        "penstock.open('s3://bucket/m/', storage=storage).load(framework='np')\n"
        "print('botocore' in sys.modules, 'penstock._credentials' in sys.modules)"
    )
    assert alone(program) == "False False\n"
