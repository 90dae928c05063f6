"""Which servers' certificates are trusted, which rule one breaks, and what `tls_verify=False` says."""

from __future__ import annotations

import itertools
import ssl
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certificates
import penstock
import pytest
from conftest import LAYOUT, Oracle
from s3_server import KEYS, Bucket
from s3_server import serving as serving_bucket
from test_web import serving

INDEX = "model.safetensors.index.json"
FILE = LAYOUT.files[0]
#: What is known of servers is kept by settings: each test has others.
_number = itertools.count(2)


def opened(address: str, **storage: Any) -> penstock.Checkpoint:
    return penstock.open(address, storage={"connections": next(_number), **storage})  # type: ignore[typeddict-item]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "PENSTOCK_STORAGE_CA"):
        monkeypatch.delenv(name, raising=False)


NO_AUTHORITY = "basicConstraints=CA:FALSE\n"
#: Certificates that have signed themselves. Each is trusted where it is `ca`, and nowhere else.
TRUSTED: dict[str, dict[str, Any]] = {
    "openssl req -x509": {},
    "rsa": {"key": "rsa"},
    "p384": {"key": "p384"},
    "no authority": {"extensions": NO_AUTHORITY},
    "no authority, with its name": {"extensions": NO_AUTHORITY + "subjectAltName=DNS:localhost\n"},
    "an authority, with its name": {"extensions": "basicConstraints=CA:TRUE\nsubjectAltName=DNS:localhost\n"},
    "its name besides others": {"extensions": "subjectAltName=DNS:a.test,DNS:localhost,IP:127.0.0.1\n"},
    "for servers": {"extensions": "extendedKeyUsage=serverAuth,clientAuth\n"},
    "a name in large letters": {"subject": "/O=People/CN=LocalHost"},
    "several names": {"subject": "/CN=other/CN=localhost"},
}


@pytest.mark.parametrize("kind", TRUSTED)
def test_a_certificate_that_is_ca_byte_for_byte_is_trusted(small, tmp_path, kind):
    certificate, key = certificates.own(tmp_path, **TRUSTED[kind])
    with serving(small, certificate, key) as web:
        Oracle(small).same(opened(web(INDEX), ca=certificate).load(framework="np"))
        with pytest.raises(penstock.ReadError, match="certificate is not trusted: "):
            opened(web(INDEX))
        # Nor is one that has the same name, and is another
        (other := tmp_path / "other").mkdir()
        with pytest.raises(penstock.ReadError, match="certificate is not trusted: "):
            opened(web(INDEX), ca=certificates.own(other, **TRUSTED[kind])[0])


#: What is wrong with a certificate, and what the error says. It stands in `ca` byte for byte.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another common name": ({"subject": "/CN=other.test"}, r"\(CN\) is \"other.test\".*not for localhost"),
    "no common name": ({"subject": "/O=People"}, "it is not for localhost"),
    "another name besides": (
        {"extensions": NO_AUTHORITY + "subjectAltName=DNS:other.test\n"},
        "it is for other.test, and not for localhost",
    ),
    "an address for a name": (
        {"extensions": "subjectAltName=IP:127.0.0.1\n"},
        "it is for 127.0.0.1, and not for localhost",
    ),
    "expired": ({"dates": "past"}, r"it has expired: it was valid until 20\d\d-"),
    "expired, with a name": (
        {"dates": "past", "extensions": NO_AUTHORITY + "subjectAltName=DNS:localhost\n"},
        "it has expired",
    ),
    "not yet valid": ({"dates": "future"}, "not valid yet, only from 2095-01-01 .*clock"),
    "not for servers": ({"extensions": "extendedKeyUsage=clientAuth\n"}, "not for servers"),
    "version 1": ({"version": 1}, "X.509 version 1"),
    "p521": ({"key": "p521"}, "P-521"),
    "p521 with a name": ({"key": "p521", "extensions": "subjectAltName=DNS:localhost\n"}, "P-521"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_error_says_which_rule_a_certificate_breaks(small, tmp_path, kind):
    how, says = REFUSED[kind]
    certificate, key = certificates.own(tmp_path, **how)
    with serving(small, certificate, key) as web:
        with pytest.raises(penstock.ReadError, match=f"certificate is not trusted: .*{says}"):
            opened(web(INDEX), ca=certificate)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            Oracle(small).same(opened(web(INDEX), tls_verify=False).load(framework="np"))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return certificates.made(tmp_path_factory.mktemp("authority"))


@pytest.mark.parametrize(
    ("subject", "extensions", "says"),
    [
        ("/CN=localhost", "basicConstraints=CA:FALSE\n", "no subjectAltName.*CN localhost.*trusted certificates"),
        ("/CN=x", "subjectAltName=DNS:*.test,IP:10.0.0.1\n", r"it is for \*.test, 10.0.0.1, and not for localhost"),
        ("/CN=x", "extendedKeyUsage=clientAuth\nsubjectAltName=DNS:localhost\n", "not for servers"),
        ("/CN=x", "basicConstraints=CA:TRUE\nsubjectAltName=DNS:localhost\n", "an authority's own certificate"),
    ],
)
def test_what_an_authority_has_signed_has_to_keep_all_rules(small, tmp_path, authority, subject, extensions, says):
    trusted = authority[0]
    certificate, key = certificates.signed(tmp_path, trusted, trusted.with_name("ca.key"), subject, extensions)
    said = pytest.raises(penstock.ReadError, match=f"certificate is not trusted: .*{says}")
    with serving(small, certificate, key) as web, said:
        opened(web(INDEX), ca=trusted)


def test_one_that_an_authority_has_signed_may_stand_for_itself(small, tmp_path, authority):
    trusted = authority[0]
    certificate, key = certificates.signed(
        tmp_path, trusted, trusted.with_name("ca.key"), "/CN=localhost", "basicConstraints=CA:FALSE\n"
    )
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("some words\n" + trusted.read_text() + certificate.read_text())
    with serving(small, certificate, key) as web:
        Oracle(small).same(opened(web(INDEX), ca=bundle).load(framework="np"))


def test_nobody_has_signed_it(small, authority, tmp_path):
    certificate, key = certificates.own(tmp_path, extensions="subjectAltName=DNS:localhost\n")
    said = pytest.raises(penstock.ReadError, match=r"no trusted authority signed it.*ca in storage=")
    with serving(small, certificate, key) as web, said:
        opened(web(INDEX), ca=authority[0])


LOADED = "import sys, penstock; print(len(penstock.open(sys.argv[1]).load(framework='dlpack')))"


@pytest.mark.parametrize("hashed", [True, False])
def test_a_folder_of_certificates(small, tmp_path, authority, python, hashed):
    trusted, certificate, key = authority
    folder = tmp_path / "trusted"
    folder.mkdir()
    (folder / "mine.pem").write_bytes(trusted.read_bytes())
    (folder / "README").write_text("no certificate")
    if hashed:
        subprocess.run(["openssl", "rehash", str(folder)], check=True, capture_output=True)
    (folder / "none.pem").symlink_to("gone")
    with serving(small, certificate, key) as web:
        for variables in (
            {"SSL_CERT_DIR": str(folder)},
            {"SSL_CERT_DIR": f"/nonexistent:{folder}"},
            {"SSL_CERT_DIR": str(folder), "SSL_CERT_FILE": ""},
            {"SSL_CERT_DIR": "/nonexistent", "SSL_CERT_FILE": f" {trusted}\n"},
            {"SSL_CERT_DIR": "", "PENSTOCK_STORAGE_CA": str(folder)},
        ):
            done = python(LOADED, web(INDEX), **variables)
            assert done.stdout.strip() == str(len(LAYOUT.tensors)), (variables, done.stderr)
        Oracle(small).same(opened(web(INDEX), ca=folder).load(framework="np"))


def test_an_empty_variable_is_not_set(small, authority, python, tmp_path):
    """As for OpenSSL, curl and Go: the system's authorities are meant."""
    trusted, certificate, key = authority
    with serving(small, certificate, key) as web:
        done = python(LOADED, web(INDEX), SSL_CERT_FILE="", SSL_CERT_DIR="")
        # The system's do not have it, or there are none
        assert "certificate is not trusted" in done.stderr or "install ca-certificates" in done.stderr, done.stderr
        assert "there is no :" not in done.stderr and "there is no ," not in done.stderr
        done = python(LOADED, web(INDEX), SSL_CERT_FILE="", PENSTOCK_STORAGE_CA=str(trusted))
        assert done.stdout.strip() == str(len(LAYOUT.tensors)), done.stderr
    with pytest.raises(penstock.UnsupportedError, match="no certificate"):
        (tmp_path / "empty").mkdir()
        opened("https://localhost:1/x", ca=tmp_path / "empty")


@pytest.fixture
def bucket(small: Path, tmp_path: Path) -> Iterator[tuple[Bucket, Path]]:
    """A bucket behind a certificate as `openssl req -x509` makes it."""
    certificate, key = certificates.own(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    objects = {f"m/{path.name}": path.read_bytes() for path in small.iterdir() if path.is_file()}
    with serving_bucket(Bucket(objects), tls=context) as bucket:
        yield bucket, certificate


def keys() -> dict[str, str]:
    key, secret = next(iter(KEYS.items()))
    return {"access_key_id": key, "secret_access_key": secret}


def test_listings_trust_what_loads_trust(bucket, small):
    served, certificate = bucket
    storage = {"endpoint": served.endpoint, **keys()}
    Oracle(small).same(opened("s3://bucket/m/", ca=certificate, **storage).load(framework="np"))
    advice = "certificate is not trusted: .*name the file with that certificate in SSL_CERT_FILE, or as ca in storage="
    with pytest.raises(penstock.ReadError, match=advice):
        opened("s3://bucket/m/", **storage)


def test_what_is_not_checked_is_said_once_for_each_host(small, bucket, python, tmp_path):
    served, _ = bucket
    with serving(small, *certificates.own(tmp_path)) as web:
        code = (
            "import sys, warnings, penstock\n"
            "with warnings.catch_warnings(record=True) as told:\n"
            "    warnings.simplefilter('always')\n"
            "    for address in sys.argv[1:]:\n"
            "        try: penstock.open(address).load(framework='dlpack')\n"
            "        except penstock.PenstockError as error: print(error)\n"
            "print([(one.category.__name__, str(one.message).split(' is ')[0]) for one in told])"
        )
        named = web(INDEX)
        numbered = named.replace("localhost", "127.0.0.1")
        given = keys()
        done = python(
            code, named, numbered, named, "s3://bucket/m/", "https://127.0.0.2:1/x.safetensors",
            PENSTOCK_STORAGE_TLS_VERIFY="false", PENSTOCK_STORAGE_ENDPOINT=served.endpoint,
            AWS_ACCESS_KEY_ID=given["access_key_id"], AWS_SECRET_ACCESS_KEY=given["secret_access_key"],
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    hosts = ["localhost", "127.0.0.1", "127.0.0.2"]
    expected = [("RuntimeWarning", f"the certificate of {host}") for host in hosts]
    assert done.stdout.splitlines()[-1] == repr(expected), done.stdout + done.stderr


def test_checking_is_on(small, bucket):
    served, certificate = bucket
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened("s3://bucket/m/", ca=certificate, tls_verify=True, endpoint=served.endpoint, **keys())
    with pytest.raises(penstock.InvalidError, match="tls_verify: must be true or false"):
        penstock.open("s3://bucket/m/", storage={"tls_verify": "perhaps"})  # type: ignore[typeddict-item]
    with pytest.raises(TypeError, match="True or False"):
        penstock.open("s3://bucket/m/", storage={"tls_verify": 0.5})  # type: ignore[typeddict-item]


def test_the_hub_trusts_the_same(small, tmp_path, python):
    from test_hub_network import serving as serving_hub

    certificate, key = certificates.own(tmp_path)
    code = "import sys, penstock; print(len(penstock.open('hf://org/name').load(framework='dlpack')))"
    with serving_hub(tmp_path / "hub", certificate, key) as hub:
        hub.add("org/name", small)
        more = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": ""}
        done = python(code, PENSTOCK_STORAGE_CA=str(certificate), **more)
        assert done.stdout.strip() == str(len(LAYOUT.tensors)), done.stderr
        done = python(code, **more)
        assert "is not trusted" in done.stderr
        done = python(code, PENSTOCK_STORAGE_TLS_VERIFY="0", **more)
        assert done.stdout.strip() == str(len(LAYOUT.tensors)), done.stderr
        assert "RuntimeWarning: the certificate of localhost is not checked" in done.stderr
