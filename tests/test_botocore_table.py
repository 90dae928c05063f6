"""botocore's answer beside ours, for a hundred environments that are made up: which keys, which region, which server.

What differs on purpose is not in them: AWS_REGION, which every other tool of AWS reads; and `s3.amazonaws.com`, an
older name of the region us-east-1.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import penstock
import pytest
from asked_servers import listening
from conftest import LAYOUT
from s3_server import KEYS, Answer, Bucket, serving

pytest.importorskip("botocore")
import botocore.session

FILE = LAYOUT.files[0]
COUNT = 100
SERVICES = {"pod": "AKIDPOD", "machine": "AKIDMACHINE", "web": "AKIDWEB", "role": "AKIDROLE"}
FILES = ("AKIDENV", "AKIDDEFAULT", "AKIDWORK", "AKIDSPACE", "AKIDCREDENTIALS", "AKIDPROCESS")


class Services(Bucket):
    """The bucket, and every service that gives credentials. Each gives a key of its own."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects, region="")
        #: Region and session token of each request for the bucket
        self.signed: list[tuple[str, str | None]] = []

    def answer(self, method: str, target: str, fields: Mapping[str, str]) -> Answer:
        if found := re.search(r"Credential=[^/]+/\d+/([^/]+)/s3/", fields.get("authorization", "")):
            self.region = found[1]
            self.signed.append((found[1], fields.get("x-amz-security-token")))
        return super().answer(method, target, fields)

    def service(self, method: str, path: str, target: str, fields: Mapping[str, str]) -> Answer:
        def given(key: str) -> dict[str, str]:
            until = (datetime.now(timezone.utc) + timedelta(hours=6)).strftime("%Y-%m-%dT%H:%M:%SZ")
            return {"AccessKeyId": key, "SecretAccessKey": KEYS[key], "Expiration": until}

        def answered(key: str) -> Answer:
            body = {
                **given(key),
                "Token": f"token-of-{key}",
                "Code": "Success",
                "LastUpdated": given(key)["Expiration"],
            }
            return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()

        if path == "/latest/api/token":
            return 200, {}, b"imds-token"
        if path.startswith("/latest/meta-data/iam/security-credentials"):
            return (200, {}, b"role") if path.endswith("/") else answered(SERVICES["machine"])
        if path == "/pod":
            wanted = fields.get("authorization")
            return answered(SERVICES["pod"]) if wanted in (None, "Bearer pod-token") else (403, {}, b"{}")
        form = dict(parse_qsl(self.body.decode())) | dict(parse_qsl(urlsplit(target).query))
        action = form.get("Action", "none")
        if action == "AssumeRoleWithWebIdentity" and form["WebIdentityToken"] != "web-token":
            return (
                403,
                {},
                b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>no</Message></Error></ErrorResponse>",
            )
        key = SERVICES["web" if "Web" in action else "role"]
        inner = "".join(
            f"<{name}>{value}</{name}>" for name, value in {**given(key), "SessionToken": f"token-of-{key}"}.items()
        )
        body = (
            f"<{action}Response><{action}Result><Credentials>{inner}</Credentials></{action}Result></{action}Response>"
        )
        return 200, {"Content-Type": "text/xml"}, body.encode()


class Environment(NamedTuple):
    variables: dict[str, str]
    config: str
    credentials: str

    def __str__(self) -> str:
        return f"{self.variables}\n{self.config}\n---\n{self.credentials}"


class Found(NamedTuple):
    """What a client would do. An error is no key, or no server."""

    key: str | None
    token: str | None
    region: str | None
    server: str | None


REGIONS = ("us-east-1", "eu-west-1", "cn-north-1", "us-gov-west-1", "us-iso-east-1", "eusc-de-east-1", "us-west-2")


def made_up(number: int, home: Path, endpoint: str) -> Environment:
    """An environment. What is likely in one is likely here."""
    chance = random.Random(number)

    def some(share: float) -> bool:
        return chance.random() < share

    def keys(key: str) -> list[str]:
        sep = chance.choice([" = ", "=", ": "])
        lines = [f"aws_access_key_id{sep}{key}", f"aws_secret_access_key{sep}{KEYS[key]}"]
        if some(0.3):
            lines.append(f"aws_session_token{sep}token-of-{key}")
        return lines

    def profile(key: str, header: str) -> str:
        lines: list[str] = []
        if some(0.4):
            lines.append(f"region = {chance.choice(REGIONS)}")
        if some(0.5):
            lines += keys(key)
        if some(0.15):
            lines.append(f"endpoint_url = http://{chance.choice('ab')}.profile.test:9000")
        if some(0.3):
            lines.append(f"services = {chance.choice(['local', 'my own', 'none', 'other'])}")
        if some(0.2):
            nested = [
                "addressing_style = " + chance.choice(["path", "virtual", "auto"]),
                "max_concurrent_requests = 20",
            ]
            nested += ["use_dualstack_endpoint = true"] * some(0.3)
            lines += ["s3 =", *(f"    {line}" for line in nested)]
        if some(0.15):
            lines.append("use_fips_endpoint = true")
        if some(0.1):
            lines.append("use_dualstack_endpoint = true")
        if some(0.1):
            lines.append("ignore_configured_endpoint_urls = true")
        if some(0.12):
            lines.append(f"credential_process = {sys.executable} {home}/process.py")
        if some(0.1):
            lines += ["role_arn = arn:aws:iam::123456789012:role/r", "source_profile = base"]
        elif some(0.08):
            lines += ["role_arn = arn:aws:iam::123456789012:role/r", f"web_identity_token_file = {home}/web-token"]
        chance.shuffle(groups := _grouped(lines))
        body = "\n".join(line for group in groups for line in group)
        comment = "# a comment\n; another\n" if some(0.3) else ""
        return f"{header}\n{comment}{body}\n"

    config = [
        profile("AKIDDEFAULT", chance.choice(["[default]", "[default]", "[profile default]"])) if some(0.6) else "",
        profile("AKIDWORK", "[profile work]") if some(0.8) else profile("AKIDWORK", "[work]"),
        profile("AKIDSPACE", chance.choice(['[profile "my work"]', "[profile 'my work']"])),
        "[services local]\ns3 =\n  endpoint_url = http://services.test:9000/base\nec2 =\n  endpoint_url = http://no.test\n",
        '[services "my own"]\ns3 = \n   endpoint_url = https://own.test\n',
        "[services other]\nec2 =\n  endpoint_url = http://no.test\n",
        f"[profile base]\naws_access_key_id = AKIDDEFAULT\naws_secret_access_key = {KEYS['AKIDDEFAULT']}\n",
    ]
    chance.shuffle(config)
    credentials = [profile_of for profile_of in (
        "\n".join(["[default]", *keys("AKIDCREDENTIALS")]) if some(0.3) else "",
        "\n".join(["[work]", *keys("AKIDCREDENTIALS")]) if some(0.4) else "",
        "\n".join(["[my work]", *keys("AKIDCREDENTIALS")]) if some(0.3) else "",
    ) if profile_of]  # fmt: skip
    variables = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL_STS": f"{endpoint}/sts"}
    if some(0.3):
        variables |= {"AWS_ACCESS_KEY_ID": "AKIDENV", "AWS_SECRET_ACCESS_KEY": KEYS["AKIDENV"]}
        if some(0.4):
            variables[chance.choice(["AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"])] = "token-of-AKIDENV"
    elif some(0.1):
        variables["AWS_SECRET_ACCESS_KEY"] = KEYS["AKIDENV"]
    if some(0.4):
        variables["AWS_DEFAULT_REGION"] = chance.choice(REGIONS)
    if some(0.6):
        variables["AWS_PROFILE"] = chance.choice(["work", "my work", "default", "nobody"])
    if some(0.15):
        variables["AWS_DEFAULT_PROFILE"] = chance.choice(["work", "my work", "default"])
    files = {"AWS_CONFIG_FILE": "config", "AWS_SHARED_CREDENTIALS_FILE": "credentials"}
    for name, file in files.items():
        if some(0.5):
            variables[name] = chance.choice(["~", "$HOME", "${HOME}", str(home)]) + f"/elsewhere/{file}"
    for name, share in (("AWS_ENDPOINT_URL", 0.15), ("AWS_ENDPOINT_URL_S3", 0.15)):
        if some(share):
            variables[name] = f"http://{name.lower().replace('_', '-')}.test:9000"
    for name in ("AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"):
        if some(0.2):
            variables[name] = chance.choice(["true", "True", "false"])
    if some(0.15):
        variables["AWS_WEB_IDENTITY_TOKEN_FILE"] = f"{home}/web-token"
        if some(0.8):
            variables["AWS_ROLE_ARN"] = "arn:aws:iam::123456789012:role/r"
    if some(0.3):
        variables["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = chance.choice(
            [f"{endpoint}/pod", f"{endpoint}/pod", "http://elsewhere.test/pod"]
        )
        how = chance.choice(["none", "text", "file"])
        if how == "text":
            variables["AWS_CONTAINER_AUTHORIZATION_TOKEN"] = "Bearer pod-token"
        elif how == "file":
            variables["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"] = f"{home}/pod-token"
    if some(0.3):
        variables["AWS_EC2_METADATA_DISABLED"] = "false"
        variables["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = endpoint + chance.choice(["", "/"])
    return Environment(variables, "\n".join(config), "\n".join(credentials))


def _grouped(lines: list[str]) -> list[list[str]]:
    """Lines with those that are indented below them."""
    groups: list[list[str]] = []
    for line in lines:
        if line.startswith(" "):
            groups[-1].append(line)
        else:
            groups.append([line])
    return groups


class Stop(Exception):
    """Before a request is sent."""


def of_botocore(loader: Any) -> Found:
    session = botocore.session.Session()
    session.register_component("data_loader", loader)
    key = token = None
    try:
        found = session.get_credentials()
        if found is not None:
            keys = found.get_frozen_credentials()
            assert KEYS[keys.access_key] == keys.secret_key
            key, token = keys.access_key, keys.token
    except Exception:
        key = token = None
    seen: list[Any] = []

    def stop(request: Any, **about: Any) -> None:
        seen.append(request)
        raise Stop

    try:
        # Whatever there is of credentials: where requests go does not depend on them
        client = session.create_client("s3", aws_access_key_id="AKIDENV", aws_secret_access_key=KEYS["AKIDENV"])
        client.meta.events.register("before-send.s3.GetObject", stop)
        client.get_object(Bucket="bucket", Key="m/x.safetensors")
    except Stop:
        pass
    except Exception:
        return Found(key, token, None, None)
    fields = {name.lower(): value for name, value in seen[0].headers.items()}
    field = fields["authorization"]
    field = field.decode() if isinstance(field, bytes) else field
    found_region = re.search(r"Credential=[^/]+/\d+/([^/]+)/s3/", field)
    assert found_region is not None
    return Found(key, token, found_region[1], _server(seen[0].url))


def _server(url: str) -> str:
    """The server, and how the bucket is named."""
    parts = urlsplit(url)
    host = re.sub(r"(^|\.)s3\.amazonaws\.com$", r"\1s3.us-east-1.amazonaws.com", parts.hostname or "")
    where = "" if host.startswith("bucket.") else parts.path.rpartition("/m/")[0]
    return f"{parts.scheme}://{host}:{parts.port or {'http': 80, 'https': 443}[parts.scheme]}{where}"


def of_penstock(bucket: Services, proxy: str, asked: list[str]) -> Found:
    key = token = region = None
    bucket.asked.clear()
    bucket.signed.clear()
    try:
        penstock.open(f"s3://bucket/m/{FILE}", storage={"endpoint": bucket.endpoint})
        key, (region, token) = bucket.asked[0][1], bucket.signed[0]
    except penstock.PenstockError as error:
        assert not isinstance(error, penstock.InternalError)
    asked.clear()
    server = None
    keys: Any = {"access_key_id": "AKIDENV", "secret_access_key": KEYS["AKIDENV"], "proxy": proxy}
    with pytest.raises(penstock.PenstockError):
        penstock.open("s3://bucket/m/x.safetensors", storage=keys)
    if asked:
        bucket_in_host = "://bucket." in asked[0]
        server = asked[0] if asked[0].startswith("http://") or bucket_in_host else f"{asked[0]}/bucket/m/x"
        server = _server(server if "/m/" in server else f"{server}/m/x")
    if region is None and server is not None:
        region = "unseen"
    return Found(key, token, region, server)


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    for key in (*FILES, *SERVICES.values()):
        KEYS[key] = f"secret-of-{key}"
    with serving(Services({})) as bucket:
        yield bucket


@pytest.mark.parametrize("first", range(0, COUNT, 20))
def test_botocores_answer_beside_ours(double, small, tmp_path, monkeypatch, first):
    double.objects = {f"m/{FILE}": (small / FILE).read_bytes()}
    loader = botocore.session.Session().get_component("data_loader")
    for name in os.environ:
        if name.startswith(("AWS_", "PENSTOCK_STORAGE_", "REQUESTS_CA")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    differ = []
    for number in range(first, first + 20):
        home = tmp_path / str(number)
        (home / ".aws").mkdir(parents=True)
        (home / "elsewhere").mkdir()
        (home / "web-token").write_text("web-token")
        (home / "pod-token").write_text("Bearer pod-token")
        keys = {"AccessKeyId": "AKIDPROCESS", "SecretAccessKey": KEYS["AKIDPROCESS"], "Version": 1}
        (home / "process.py").write_text(f"print({json.dumps(json.dumps(keys))})")
        environment = made_up(number, home, double.endpoint)
        for file, content in (("config", environment.config), ("credentials", environment.credentials)):
            variable = "AWS_CONFIG_FILE" if file == "config" else "AWS_SHARED_CREDENTIALS_FILE"
            folder = "elsewhere" if variable in environment.variables else ".aws"
            (home / folder / file).write_text(content)
        with monkeypatch.context() as patch, listening() as (proxy, asked):
            patch.setenv("HOME", str(home))
            for name, value in environment.variables.items():
                patch.setenv(name, value)
            theirs, ours = of_botocore(loader), of_penstock(double, proxy, asked)
        if ours.region in (None, "unseen") or theirs.region is None or theirs.key is None:
            # Without a key there is no signature, which names the region
            theirs, ours = theirs._replace(region=None), ours._replace(region=None)
        if theirs != ours:
            differ.append(f"{number}: botocore {theirs}, penstock {ours}\n{environment}")
    assert not differ, "\n\n".join(differ[:4]) + f"\n({len(differ)} of 20)"
