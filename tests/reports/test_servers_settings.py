"""Public reports about settings of servers: certificates, credentials, endpoints, engines by address.

The verdict is that of the code before these tests were written (commit 9c12921).

| report | what happens there | first verdict |
|---|---|---|
| k8s-ecr-login-renew#12 | a newline behind the region, from a secret | failed at first |
| aws-sdk-rust#85 | a space before the region | failed at first |
| aws-sdk-go#689 | a space behind the endpoint | failed at first |
| aws-sdk-go-v2#3234 | a region with an underscore | right at once |
| smithy-rs#1496, databend#4153, velero#641 | endpoints without a scheme | failed at first |
| minio-go#1499, minio-java#1182 | a container's service that wants no token | failed at first |
| aws-api#286 | the token of a container as a text | failed at first |
| n8n#21584 | a newline in the file with the token | failed at first |
| minio-go#1940 | the token of a pod is in a file | right at once |
| aws-sdk-go-v2#3330, terraform-provider-aws#147 | `~` in the variables of AWS's files | failed at first |
| aws-sdk-go-base#117 | `$HOME` there | failed at first |
| aws-cli#2806 | names of profiles with spaces, in double quotes | right at once |
| aws-sso-util#16, aws-sdk-rust#1097 | the same in single quotes | failed at first |
| aws-api#269, aws-sdk#229 | sections of services | failed at first |
| openobserve#5530, cert-manager#5455 | STS of China | failed at first |
| runai-model-streamer#46, amazon.aws#1712 | FIPS endpoints | failed at first |
| aws-sdk-js#3968 | dualstack endpoints | failed at first |
| mountpoint-s3-csi-driver#91 | buckets of S3 Express | failed at first |
| fluent-bit#7904, boto3#2779 | ARNs of access points and of buckets | failed at first |
| aws-sdk-rust#13 (lambdastackio) | an address as endpoint, buckets in names of hosts | failed at first |
| reqwest#2041, webpki#205, lakekeeper#438, lnd#5450 | `openssl req -x509` for a server | failed at first |
| minio#15330, minio-cpp#138 | a certificate without a list of names | failed at first |
| uv#16414, kserve#2897, rustls#540 | SSL_CERT_DIR | failed at first |
| kserve#3171, rustls#261 | no verification of certificates | failed at first |
| vllm#11929, ray#60344 | a file beside the model that no engine needs | failed at first |
| ray#62047 | chat templates in files | right at once |
| vllm#40765 | Mistral's own files beside those of transformers | failed at first |
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certificates
import penstock
import pytest
from asked_servers import listening
from conftest import LAYOUT, Oracle
from penstock.integrations import _fetched
from s3_server import KEYS, TOKEN, Answer, Bucket, serving
from test_s3 import nothing_in_the_environment  # noqa: F401
from test_web import INDEX
from test_web import serving as serving_files

KEY, SECRET = next(iter(KEYS.items()))
FILE = LAYOUT.files[0]
ADDRESS = f"s3://bucket/m/{FILE}"
KEYS_AS_VARIABLES = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


class Container(Bucket):
    """Besides: the service of a container, which wants this token, or none."""

    token: str | None = None

    def service(self, method: str, path: str, target: str, fields: Any) -> Answer:
        if path == "/creds":
            if fields.get("authorization") != self.token:
                return 401, {}, b"who are you?"
            self.credentials += 1
            given = {
                "AccessKeyId": KEY,
                "SecretAccessKey": SECRET,
                "Token": TOKEN,
                "Expiration": "2099-01-01T00:00:00Z",
            }
            return 200, {"Content-Type": "application/json"}, json.dumps(given).encode()
        return super().service(method, path, target, fields)


@pytest.fixture
def bucket(small: Path) -> Iterator[Container]:
    objects = {f"m/{path.name}": path.read_bytes() for path in small.iterdir() if path.is_file()}
    with serving(Container(objects)) as bucket:
        yield bucket


def loads(small: Path, monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    Oracle(small / FILE).same(penstock.open(ADDRESS).load(framework="np"))


def asks(monkeypatch: pytest.MonkeyPatch, storage: dict[str, Any] | None = None, **variables: str) -> str:
    """The server that is asked for the object."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    keys = {"access_key_id": KEY, "secret_access_key": SECRET}
    with listening() as (proxy, asked):
        with pytest.raises(penstock.PenstockError):
            penstock.open(ADDRESS, storage={"proxy": proxy, **(keys if storage is None else storage)})
        return asked[0]


@pytest.mark.parametrize("name", ["AWS_REGION", "AWS_DEFAULT_REGION"])
@pytest.mark.parametrize("region", ["af-south-1\n", " us-east-1", '"us-east-1"'])
def test_spaces_around_a_region(bucket, small, monkeypatch, name, region):
    """k8s-ecr-login-renew#12, aws-sdk-rust#85."""
    bucket.region = region.strip('"\n ')
    loads(small, monkeypatch, **KEYS_AS_VARIABLES, AWS_ENDPOINT_URL=bucket.endpoint, **{name: region})


def test_a_space_behind_an_endpoint(bucket, small, monkeypatch):
    """aws-sdk-go#689."""
    loads(small, monkeypatch, **KEYS_AS_VARIABLES, AWS_ENDPOINT_URL_S3=f"{bucket.endpoint} ")


def test_a_region_with_an_underscore(bucket, small, monkeypatch):
    """aws-sdk-go-v2#3234."""
    bucket.region = "example_region"
    loads(small, monkeypatch, **KEYS_AS_VARIABLES, AWS_ENDPOINT_URL=bucket.endpoint, AWS_REGION="example_region")


@pytest.mark.parametrize(
    "name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_STS", "AWS_EC2_METADATA_SERVICE_ENDPOINT",
             "AWS_CONTAINER_CREDENTIALS_FULL_URI"]
)  # fmt: skip
def test_an_endpoint_without_a_scheme_is_named(bucket, monkeypatch, tmp_path, name):
    """smithy-rs#1496, databend#4153, velero#641."""
    (tmp_path / "token").write_text("t")
    variables = {"AWS_ENDPOINT_URL_S3": bucket.endpoint, "AWS_EC2_METADATA_DISABLED": "false"}
    if name == "AWS_ENDPOINT_URL":
        variables = KEYS_AS_VARIABLES
    if name == "AWS_ENDPOINT_URL_STS":
        variables |= {"AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"), "AWS_ROLE_ARN": "arn:aws:iam::1:role/r"}
    if "CONTAINER" in name:
        variables |= {"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token")}
    for variable, value in {**variables, name: bucket.endpoint.removeprefix("http://")}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(penstock.InvalidError, match=rf"{name}.*it has no scheme"):
        penstock.open(ADDRESS)


@pytest.mark.parametrize("how", ["none", "text", "file", "file with a newline"])
def test_the_service_of_a_container(bucket, small, monkeypatch, tmp_path, how):
    """minio-go#1499, minio-java#1182 (none), aws-api#286 (text), minio-go#1940 (file), n8n#21584 (newline)."""
    variables = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{bucket.endpoint}/creds"}
    if how != "none":
        bucket.token = "Bearer t"
    if how == "text":
        variables["AWS_CONTAINER_AUTHORIZATION_TOKEN"] = "Bearer t"
    elif how.startswith("file"):
        (tmp_path / "token").write_text("Bearer t\n" if "newline" in how else "Bearer t")
        variables["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"] = str(tmp_path / "token")
    loads(small, monkeypatch, AWS_ENDPOINT_URL_S3=bucket.endpoint, **variables)
    assert bucket.credentials == 1


@pytest.mark.parametrize("home", ["~", "$HOME", "${HOME}"])
def test_files_below_home(bucket, small, monkeypatch, tmp_path, home):
    """aws-sdk-go-v2#3330, terraform-provider-aws#147 (~), aws-sdk-go-base#117 ($HOME)."""
    (tmp_path / "keys").write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    (tmp_path / "settings").write_text(f"[default]\nendpoint_url = {bucket.endpoint}\n")
    files = {"AWS_SHARED_CREDENTIALS_FILE": f"{home}/keys", "AWS_CONFIG_FILE": f"{home}/settings"}
    loads(small, monkeypatch, HOME=str(tmp_path), **files)


@pytest.mark.parametrize("header", ['profile "Foo Bar"', "profile 'Foo Bar'", "profile Foo\\ Bar"])
def test_a_profile_with_a_space_in_its_name(bucket, small, monkeypatch, tmp_path, header):
    """aws-cli#2806, aws-sso-util#16, aws-sdk-rust#1097."""
    (tmp_path / "c").write_text(
        f"[{header}]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\nendpoint_url = {bucket.endpoint}\n"
    )
    loads(small, monkeypatch, AWS_CONFIG_FILE=str(tmp_path / "c"), AWS_PROFILE="Foo Bar")


def test_sections_of_services(bucket, small, monkeypatch, tmp_path):
    """aws-api#269, aws-sdk#229."""
    (tmp_path / "c").write_text(
        f"[profile dev]\nservices = local\nendpoint_url = http://127.0.0.1:9\naws_access_key_id = {KEY}\n"
        f"aws_secret_access_key = {SECRET}\n[services local]\ns3 =\n  endpoint_url = {bucket.endpoint}\n"
    )
    loads(small, monkeypatch, AWS_CONFIG_FILE=str(tmp_path / "c"), AWS_PROFILE="dev")


def test_sts_of_china(monkeypatch, tmp_path):
    """openobserve#5530, cert-manager#5455."""
    (tmp_path / "token").write_text("t")
    role = {"AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"), "AWS_ROLE_ARN": "arn:aws-cn:iam::1:role/r"}
    assert asks(monkeypatch, {}, AWS_REGION="cn-northwest-1", **role) == (
        "https://sts.cn-northwest-1.amazonaws.com.cn:443"
    )


@pytest.mark.parametrize(
    ("variables", "server"),
    [
        ({"AWS_USE_FIPS_ENDPOINT": "true"}, "bucket.s3-fips.us-east-2.amazonaws.com"),
        ({"AWS_USE_DUALSTACK_ENDPOINT": "true"}, "bucket.s3.dualstack.us-east-2.amazonaws.com"),
        (
            {"AWS_USE_FIPS_ENDPOINT": "True", "AWS_USE_DUALSTACK_ENDPOINT": "TRUE"},
            "bucket.s3-fips.dualstack.us-east-2.amazonaws.com",
        ),
    ],
)
def test_variants_of_endpoints(monkeypatch, variables, server):
    """runai-model-streamer#46, amazon.aws#1712, aws-sdk-js#3968."""
    assert asks(monkeypatch, AWS_REGION="us-east-2", **variables) == f"https://{server}:443"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("models--usw2-az1--x-s3", "S3 Express"),
        ("arn:aws-cn:s3:cn-north-1:123456789012:accesspoint/mine", "access point.*alias"),
        ("arn:aws:s3:::models", "ARN of a bucket: give its name"),
        ("arn:aws:s3::123456789012:accesspoint/x.mrap", "multi-region"),
        ("arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-1/accesspoint/a", "Outposts"),
    ],
)
def test_what_is_no_bucket_is_named(name, says):
    """mountpoint-s3-csi-driver#91, fluent-bit#7904, boto3#2779."""
    storage: Any = {"access_key_id": KEY, "secret_access_key": SECRET, "endpoint": "http://127.0.0.1:9"}
    for key in ("m/", "m/model.safetensors"):
        with pytest.raises(penstock.UnsupportedError, match=says):
            penstock.open(f"s3://{name}/{key}", storage=storage)


def test_an_address_as_endpoint_with_buckets_in_names_of_hosts(bucket, small):
    """aws-sdk-rust#13 of lambdastackio."""
    storage: Any = {"access_key_id": KEY, "secret_access_key": SECRET, "addressing": "virtual"}
    checkpoint = penstock.open(ADDRESS, storage={**storage, "endpoint": bucket.endpoint})
    Oracle(small / FILE).same(checkpoint.load(framework="np"))


@pytest.mark.parametrize("kind", ["rsa", "p256"])
def test_a_certificate_that_has_signed_itself(small, tmp_path, kind):
    """reqwest#2041, webpki#205, lakekeeper#438, lnd#5450; without a list of names: minio#15330, minio-cpp#138."""
    certificate, key = certificates.own(tmp_path, key=kind)
    with serving_files(small, certificate, key) as web:
        Oracle(small).same(penstock.open(web(INDEX), storage={"ca": certificate}).load(framework="np"))


LOADED = "import sys, penstock; print(len(penstock.open(sys.argv[1]).load(framework='dlpack')))"


def test_a_folder_of_certificates(small, tmp_path, python):
    """uv#16414, kserve#2897, rustls#540."""
    trusted, certificate, key = certificates.made(tmp_path)
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs/own.pem").write_bytes(trusted.read_bytes())
    subprocess.run(["openssl", "rehash", str(tmp_path / "certs")], check=True, capture_output=True)
    with serving_files(small, certificate, key) as web:
        done = python(LOADED, web(INDEX), SSL_CERT_DIR=str(tmp_path / "certs"))
    assert done.stdout.strip() == str(len(LAYOUT.tensors)), done.stderr


def test_no_verification(small, tmp_path):
    """kserve#3171, rustls#261."""
    with serving_files(small, *certificates.own(tmp_path, subject="/CN=elsewhere")) as web:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            checkpoint = penstock.open(web(INDEX), storage={"tls_verify": False})  # type: ignore[typeddict-item]
        Oracle(small).same(checkpoint.load(framework="np"))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield
    _fetched.remove_all()


def engine(bucket: Bucket, **more: Any) -> set[str]:
    """The files that an engine gets."""
    bucket.objects["m/config.json"] = b"{}"
    storage: Any = {"access_key_id": KEY, "secret_access_key": SECRET, "endpoint": bucket.endpoint}
    folder, _ = _fetched.fetch("s3://bucket/m", storage, **more)
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


def test_a_file_that_no_engine_needs(bucket, temporary):
    """vllm#11929, ray#60344."""
    bucket.objects["m/trainer_state.json"] = b" " * (_fetched.MOST + 1)
    bucket.objects[f"m/{'n' * 300}.json"] = b"{}"
    assert "config.json" in engine(bucket)


def test_chat_templates_in_files(bucket, temporary):
    """ray#62047."""
    bucket.objects["m/chat_template.jinja"] = b"{{ messages }}"
    assert "chat_template.jinja" in engine(bucket)


def test_mistrals_own_files(bucket, small, temporary):
    """vllm#40765."""
    bucket.objects["m/consolidated.safetensors"] = (small / FILE).read_bytes()
    found = engine(bucket, which="consolidated")
    assert {name for name in found if name.endswith(".safetensors")} == {"consolidated.safetensors"}
