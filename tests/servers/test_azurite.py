"""Checkpoints in Azurite, Azure's own emulator of its storage, with and without TLS. `make test-servers` installs it.

PENSTOCK_TEST_SERVERS names the folder with its package. It checks signatures, and knows no identities.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import shutil
import ssl
import time
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import certificates
import numpy as np
import object_stores as stores
import penstock
import pytest
from azure_sas import sas
from conftest import LAYOUT, Oracle, raw
from penstock import _core
from real_server import RealServer, program
from s3_server import Answer, Bucket, serving

torch = pytest.importorskip("torch")

INDEX = "model.safetensors.index.json"
ACCOUNT, KEY = "penstock7", base64.b64encode(b"a key of the tests\xff\xfe\xfb").decode()
PROGRAM = program("azurite/node_modules/.bin/azurite-blob")
NODE = shutil.which("node")
if not PROGRAM.exists() or NODE is None:
    pytest.skip("Azurite was not installed: it needs Node", allow_module_level=True)


class Server(RealServer):
    """A server with one account and two containers: `models`, and `public`, which everybody may read."""

    def __init__(self, folder: Path, *certificate: Path) -> None:
        rest = ["--blobHost", "127.0.0.1", "--inMemoryPersistence", "--silent", "--disableTelemetry"]
        if certificate:
            rest += ["--cert", str(certificate[1]), "--key", str(certificate[2]), "--oauth", "basic"]
        account = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
        super().__init__(
            folder, lambda port: [str(NODE), PROGRAM, "--blobPort", str(port), *rest], certificate, account
        )
        self.endpoint += f"/{ACCOUNT}"
        self.put("models", "restype=container")
        self.put("public", "restype=container", **{"x-ms-blob-public-access": "container"})

    def put(self, path: str, query: str = "", content: bytes = b"", **fields: str) -> None:
        """Makes a container, or a blob in it: signed with the key of the account (Shared Key)."""
        target = f"/{ACCOUNT}/{quote(path, safe='/~')}"
        fields |= {"x-ms-version": "2023-11-03", "x-ms-date": formatdate(usegmt=True)}
        length = str(len(content) or "")
        named = "".join(f"{name}:{value}\n" for name, value in sorted(fields.items()))
        resource = f"/{ACCOUNT}{target}" + "".join(f"\n{part.replace('=', ':')}" for part in filter(None, [query]))
        text = f"PUT\n\n\n{length}\n\n\n\n\n\n\n\n\n{named}{resource}"
        signed = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")).decode()
        fields["Authorization"] = f"SharedKey {ACCOUNT}:{signed}"
        self.send("PUT", f"{target}?{query}", content, fields, 201)

    def put_blob(self, path: str, content: bytes) -> None:
        self.put(path, "", content, **{"x-ms-blob-type": "BlockBlob"})

    def storage(self, **more: Any) -> Any:
        trusted = {"ca": self.authority} if self.authority else {}
        return {"endpoint": self.endpoint, "account_name": ACCOUNT, "account_key": KEY, **trusted, **more}


@pytest.fixture(scope="module", params=["http", "https"])
def server(tmp_path_factory, small, big, request) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("azurite")
    certificate = certificates.made(tmp_path_factory.mktemp("authority")) if request.param == "https" else ()
    server = Server(folder, *certificate)
    try:
        for path in small.iterdir():
            for container in ("models", "public"):
                server.put_blob(f"{container}/small/{path.name}", path.read_bytes())
        for name in LAYOUT.files:
            server.put_blob(f"models/no index/{name}", (small / name).read_bytes())
        server.put_blob("models/no index/other/x.safetensors", b"")
        server.put_blob("models/big.safetensors", big.read_bytes())
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch):
    """No credential of whoever runs the tests, and no question to a metadata server that this machine may have."""
    for name in os.environ:
        if name.startswith(("AZURE_", "IDENTITY_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    "source",
    ["az://models/small/", "az://models/small", f"az://models/small/{INDEX}", "az://models/no index/",
     [f"az://models/no index/{name}" for name in LAYOUT.files]],
    ids=str,
)  # fmt: skip
def test_loads(server, small, source):
    checkpoint = penstock.open(source, storage=server.storage())
    Oracle(small).same(checkpoint.load(framework="pt"))
    Oracle(small).same(dict(checkpoint.stream(framework="pt")))


def test_many_requests(server, big):
    checkpoint = penstock.open("az://models/big.safetensors", storage=server.storage())
    Oracle(big).same(checkpoint.load(framework="pt", options={"extent": 1 << 20}))


def test_slices(server, small):
    checkpoint = penstock.open("az://models/small/", storage=server.storage())
    part = checkpoint.load(slices={"layers.0.attn.weight": np.s_[3:7, 5:]}, names=["layers.0.attn.weight"])
    whole = np.frombuffer(Oracle(small)["layers.0.attn.weight"], np.float32).reshape(48, 40)
    assert raw(part["layers.0.attn.weight"]) == whole[3:7, 5:].tobytes()


def test_keys_with_odd_letters(server, small):
    content = (small / LAYOUT.files[0]).read_bytes()
    for odd in ("a b", "\u00e4#?&=+%41", "$!'()*,;:@|^`{}~"):
        server.put_blob(f"models/{odd}/x.safetensors", content)
        checkpoint = penstock.open(f"az://models/{odd}/x.safetensors", storage=server.storage())
        Oracle(small / LAYOUT.files[0]).same(checkpoint.load(framework="np"))


def test_what_opens_an_account(server, small, monkeypatch):
    rest = {"account_name": None, "account_key": None}
    signed = server.storage(**rest, sas_token="?" + sas(ACCOUNT, KEY, "models", "rl"))
    public = server.storage(**rest, anonymous=True)
    for source, storage in (("az://models/small/", signed), ("az://public/small/", public)):
        Oracle(small).same(penstock.open(source, storage=storage).load(framework="np"))
    string = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={server.endpoint}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", string)
    trusted: Any = {"ca": server.authority} if server.authority else None
    Oracle(small).same(penstock.open("az://models/small/", storage=trusted).load(framework="np"))


def test_a_token_of_an_identity(server, small, monkeypatch):
    """A token in the form of Microsoft's: Azurite looks at its claims only, and takes it with TLS only."""
    if not server.authority:
        pytest.skip("there is no TLS")

    audience = "https://storage.azure.com"

    class Machine(Bucket):
        def answer(self, method: str, target: str, fields: Mapping[str, str]) -> Answer:
            now = int(time.time())
            tenant = "00000000-0000-0000-0000-000000000000"
            claims = {"aud": audience, "iss": f"https://sts.windows.net/{tenant}/", "tid": tenant}
            parts = ({"alg": "none", "typ": "JWT"}, {**claims, "iat": now, "nbf": now - 60, "exp": now + 3600})
            token = ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
            return 200, {}, json.dumps({"access_token": f"{token}.sig", "expires_in": "3600"}).encode()

    with serving(Machine({})) as machine:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", machine.endpoint)
        storage = server.storage(account_key=None)
        for source in ("az://models/small/", f"az://models/small/{INDEX}"):
            Oracle(small).same(penstock.open(source, storage=storage).load(framework="np"))
        audience = "https://elsewhere.example"
        with pytest.raises(penstock.AccessError, match="of this machine"):
            penstock.open(source, storage={**storage, "connections": 3})


OTHER = base64.b64encode(b"another key").decode()
ERRORS: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "no blob": ("az://models/none.safetensors", {}, penstock.NotFoundError, "BlobNotFound"),
    "no prefix": ("az://models/none/", {}, penstock.NotFoundError, "no object whose key begins"),
    "no container": ("az://nobody/x.safetensors", {}, penstock.NotFoundError, "ContainerNotFound"),
    "no container to list": ("az://nobody/x/", {}, penstock.NotFoundError, "ContainerNotFound"),
    "wrong key": ("az://models/small/", {"account_key": OTHER}, penstock.AccessError, "AuthorizationFailure|Authenti"),
    "wrong key of a file": (
        "az://models/big.safetensors",
        {"account_key": OTHER},
        penstock.AccessError,
        "AuthorizationFailure|AuthenticationFailed",
    ),
    "old signature": (
        "az://models/big.safetensors",
        {"account_key": None, "sas_token": sas(ACCOUNT, KEY, "models", "rl", minutes=-5)},
        penstock.AccessError,
        "AuthorizationFailure|AuthenticationFailed",
    ),
    "signature that may not list": (
        "az://models/small/",
        {"account_key": None, "sas_token": sas(ACCOUNT, KEY, "models", "r")},
        penstock.AccessError,
        "AuthorizationPermissionMismatch",
    ),
    "anonymous": ("az://models/big.safetensors", {"anonymous": True}, penstock.AccessError, "no credentials"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors(server, what):
    source, more, kind, says = ERRORS[what]
    with pytest.raises(kind, match=says) as caught:
        penstock.open(source, storage=server.storage(**more))
    assert not any(secret in repr(caught.value) for secret in (KEY, OTHER, "sig="))


def test_a_blob_that_is_replaced_is_changed(server, small):
    content = (small / LAYOUT.files[0]).read_bytes()
    server.put_blob("models/replaced.safetensors", content)
    checkpoint = penstock.open("az://models/replaced.safetensors", storage=server.storage())
    server.put_blob("models/replaced.safetensors", content[:-1] + b"?")
    with pytest.raises(penstock.ChangedError):
        checkpoint.load(framework="np")


def test_a_container_with_more_names_than_a_page(server, small):
    if server.authority:
        pytest.skip("5,000 names take long, and listings with TLS are tested elsewhere")
    name = LAYOUT.files[0]
    for number in range(5005):
        server.put_blob(f"models/many/{number:04}.txt", b"")
    server.put_blob(f"models/many/{name}", (small / name).read_bytes())
    Oracle(small / name).same(penstock.open("az://models/many/", storage=server.storage()).load(framework="np"))


def test_an_empty_blob_is_no_checkpoint(server):
    server.put_blob("models/empty.safetensors", b"")
    with pytest.raises(penstock.TruncatedError, match="0 bytes long"):
        penstock.open("az://models/empty.safetensors", storage=server.storage())


def test_only_an_authority_that_is_named_is_trusted(server):
    if not server.authority:
        pytest.skip("there is no TLS")
    with pytest.raises(penstock.ReadError, match="certificate is not trusted"):
        penstock.open("az://models/big.safetensors", storage=server.storage(ca=None))


def reader(server, prefix):
    trusted = ssl.create_default_context(cafile=str(server.authority)) if server.authority else None

    def read(name: str) -> bytes:
        with urlopen(f"{server.endpoint}/public/{prefix}/{quote(name)}", context=trusted) as answer:
            return answer.read()

    return read


def test_what_is_saved_comes_back(server, tmp_path):
    stores.what_is_saved_comes_back("az://public/saved", server.storage(), tmp_path, reader(server, "saved"))


def test_a_checkpoint_that_was_saved_meanwhile_stays(server):
    stores.a_checkpoint_that_was_saved_meanwhile_stays("az://public/saved twice", server.storage())


def test_what_is_pushed_comes_back(server, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_STATE_FOLDER", str(tmp_path / "state"))
    stores.what_is_pushed_comes_back("az://public/pushed", server.storage(), tmp_path, reader(server, "pushed"))


def test_what_a_killed_push_has_left_is_cleared_when_pushed_again(server, tmp_path):
    place, storage = "az://public/killed-pushed", server.storage()
    stores.what_a_killed_push_has_left_is_cleared(
        place, storage, tmp_path, lambda: set(_core.names_in(f"{place}/", None, storage))
    )
