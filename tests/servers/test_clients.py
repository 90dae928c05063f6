"""Objects that real clients (boto3, the AWS command line, rclone) have put into versitygw, with and without TLS.

`make test-servers` installs the clients beside the server, except rclone, which is taken from the PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import certificates
import penstock
import pytest
from conftest import LAYOUT, Oracle
from penstock import _core
from real_server import program
from versitygw import KEY, REGION, SECRET, Server

INDEX = "model.safetensors.index.json"
CLIENTS = program("clients/bin")
#: What boto3's `upload_file` does with a folder. It frames what it sends over TLS, and names that as an encoding
BOTO3 = """
import sys, boto3
from pathlib import Path

endpoint, folder, prefix, encoding = sys.argv[1:]
client = boto3.client("s3", endpoint_url=endpoint)
more = {"ContentEncoding": encoding} if encoding else {}
for path in Path(folder).glob("[!.]*"):
    client.upload_file(str(path), "models", prefix + path.name, ExtraArgs=more)
"""


@pytest.fixture(scope="module", params=["http", "https"])
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    certificate = certificates.made(tmp_path_factory.mktemp("authority")) if request.param == "https" else ()
    server = Server(tmp_path_factory.mktemp("versitygw"), *certificate)
    try:
        yield server
    finally:
        server.close()


def run(server: Server, *command: str | Path) -> None:
    """Runs a client with the credentials of the server."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RCLONE_"))}
    environment |= {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    if server.authority:
        # rclone knows the one that every program in Go knows, and not the other
        name = "SSL_CERT_FILE" if Path(command[0]).name == "rclone" else "AWS_CA_BUNDLE"
        environment[name] = str(server.authority)
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def boto3(server: Server, folder: Path, prefix: str, encoding: str = "") -> None:
    if not (CLIENTS / "python").exists():
        pytest.skip("no boto3: make test-servers")
    run(server, CLIENTS / "python", "-c", BOTO3, server.endpoint, folder, prefix, encoding)


def aws(server: Server, folder: Path, prefix: str) -> None:
    if not (CLIENTS / "aws").exists():
        pytest.skip("no AWS command line: make test-servers")
    more = ["--endpoint-url", server.endpoint, "--exclude", ".*", "--recursive"]
    run(server, CLIENTS / "aws", "s3", "cp", folder, f"s3://models/{prefix}", *more)


def rclone(server: Server, folder: Path, prefix: str) -> None:
    found = shutil.which("rclone")
    if not found:
        pytest.skip("no rclone on the PATH")
    remote = f":s3,provider=Other,env_auth=true,region={REGION},endpoint='{server.endpoint}':models/{prefix}"
    run(server, found, "copy", folder, remote, "--exclude", ".*", "--s3-no-check-bucket")


@pytest.mark.parametrize("client", [boto3, aws, rclone])
def test_what_a_client_has_put_is_loaded(server: Server, small: Path, client: Callable[..., None]):
    prefix = f"{client.__name__}/"
    client(server, small, prefix)
    for source in (f"s3://models/{prefix}", f"s3://models/{prefix}{INDEX}"):
        checkpoint = penstock.open(source, storage=server.storage())
        Oracle(small).same(checkpoint.load(framework="np"))
    files = [f"s3://models/{prefix}{name}" for name in (INDEX, *LAYOUT.files)]
    assert _core.contents(files, 1 << 26, None, server.storage()) == [
        (small / name).read_bytes() for name in (INDEX, *LAYOUT.files)
    ]


def test_large_files_are_put_in_parts(server: Server, big: Path, tmp_path: Path):
    (tmp_path / "model.safetensors").symlink_to(big)
    boto3(server, tmp_path, "parts/")
    Oracle(big).same(penstock.open("s3://models/parts/", storage=server.storage()).load(framework="np"))


@pytest.mark.parametrize("encoding", ["gzip", "binary", "utf-8", "br"])
def test_an_encoding_that_was_put_with_an_object_says_nothing_of_its_bytes(server: Server, small: Path, encoding: str):
    boto3(server, small, f"{encoding}/", encoding)
    Oracle(small).same(penstock.open(f"s3://models/{encoding}/", storage=server.storage()).load(framework="np"))


def test_odd_keys_do_not_stop_a_listing(server: Server, small: Path):
    """As far as the server, which keeps objects as files, takes such keys."""
    server.put("odd/a\tb.txt", b"")
    server.put("odd/sub/deep/x.txt", b"")
    server.put("odd/\u00e4 +&.txt", b"")
    boto3(server, small, "odd/")
    Oracle(small).same(penstock.open("s3://models/odd/", storage=server.storage()).load(framework="np"))
    names = _core.names_in("s3://models/odd/", None, server.storage())
    assert {"a\tb.txt", "\u00e4 +&.txt"} < set(names)
