"""`penstock serve`: loads from it, versions, tokens, TLS, and how it starts and ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import certificates
import ordeal
import penstock
import pytest
from conftest import LAYOUT, Oracle
from penstock import cli as command_line
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor

INDEX = "model.safetensors.index.json"
SECRET = "s3cr3t-t0k3n"


@contextlib.contextmanager
def serving(folder: Path, *options: str, **variables: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a server over a folder, and its process."""
    words = [sys.executable, "-m", "penstock.cli", "serve", str(folder), "--port", "0", "--json", *options]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables}
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            lines = []
            while not lines or lines[-1].rstrip() != "}":
                lines.append(process.stdout.readline())
                assert lines[-1], process.stderr.read()
            yield json.loads("".join(lines))["address"], process
        finally:
            process.kill()


def get(address: str, path: str, **fields: str) -> tuple[int, bytes]:
    """Status and body of a request for a path, as it is spelled."""
    where = urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname or "", where.port or 0, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in fields.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_a_checkpoint_is_loaded_from_it(small):
    oracle = Oracle(small)
    with serving(small) as (address, _):
        checkpoint = penstock.open(f"{address}/{INDEX}")
        oracle.same(checkpoint.load(framework="np"))
        assert checkpoint.files == [f"{address}/{name}" for name in LAYOUT.files]
        found = penstock.open(f"{address}/{LAYOUT.files[0]}")
        version = penstock._core.look(found.files[0])
        assert version is not None and version["validator"] == "strong ETag"
        network = checkpoint.last_report.network
        assert network["retries"] == 0
        _, listed = get(address, "/", Accept="application/json")
        sizes = {entry["name"]: entry["size"] for entry in json.loads(listed)["entries"]}
        assert sizes == {path.name: path.stat().st_size for path in small.iterdir() if path.name[0] != "."}


def test_a_file_that_changed_after_the_open_is_an_error(tmp_path):
    path = synth.write_file(tmp_path / "model.safetensors", [Tensor("a", "F32", (1 << 18,))])
    with serving(tmp_path) as (address, _):
        checkpoint = penstock.open(f"{address}/{path.name}")
        Oracle(path).same(checkpoint.load(framework="np"))
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(penstock.ChangedError, match=path.name):
            checkpoint.load(framework="np")
        Oracle(path).same(penstock.open(f"{address}/{path.name}").load(framework="np"))


def test_a_token_goes_over_tls(small, tmp_path):
    authority, certificate, key = certificates.made(tmp_path)
    (tmp_path / "token").write_text(f"{SECRET}\n")
    options = ("--tls-cert", str(certificate), "--tls-key", str(key), "--token-file", str(tmp_path / "token"))
    with serving(small, *options, "--access-log") as (address, process):
        source = f"https://localhost:{urlsplit(address).port}/{INDEX}"
        storage = {"ca": str(authority), "credentials": lambda: {"token": SECRET}}
        Oracle(small).same(penstock.open(source, storage=storage).load(framework="np"))
        for wrong in ({}, {"credentials": lambda: {"token": "other"}}):
            with pytest.raises(penstock.AccessError):
                penstock.open(source, storage={"ca": str(authority), **wrong})
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=30)
        assert f'"GET /{LAYOUT.files[0]} HTTP/1.1" 206 ' in logged
        assert SECRET not in logged and "other" not in logged


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_a_second(tmp_path, number):
    with open(tmp_path / "big", "wb") as file:
        file.truncate(1 << 30)
    with serving(tmp_path) as (address, process):
        where = urlsplit(address)
        with socket.create_connection((where.hostname, where.port)) as client:
            client.sendall(b"GET /big HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
            begun = time.monotonic()
            process.send_signal(number)
            assert process.wait(60) == 0
            assert time.monotonic() - begun < ordeal.load_factor()
        assert process.stderr is not None and process.stderr.read() == ""


def test_the_token_of_the_environment(small):
    with serving(small, PENSTOCK_SERVE_TOKEN=SECRET) as (address, _):
        assert get(address, f"/{INDEX}")[0] == 401
        assert get(address, f"/{INDEX}", Authorization=f"Bearer {SECRET}")[0] == 200
        assert get(address, "/-/health") == (200, b'{"status":"ok"}\n')
        assert get(address, "/-/metrics", Authorization=f"Bearer {SECRET}")[1].startswith(b"# HELP penstock_serve_")


@pytest.mark.parametrize(
    ("options", "says", "status"),
    [
        (("--host", "0.0.0.0"), "--no-token", 2),
        (("--host", "nowhere"), "is no address of this machine", 2),
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1", 3),
        (("--token-file", "/nowhere"), "cannot read the token", 3),
        (("--token-file", "/dev/null"), "the token is empty", 2),
        (("--tls-cert", "/nowhere"), "go together", 2),
        (("--tls-cert", "/nowhere", "--tls-key", "/nowhere"), "/nowhere", 3),
        (("--tls-cert", "/dev/null", "--tls-key", "/dev/null"), "/dev/null", 2),
        (("--port", "65536"), "is not a port", 2),
    ],
)
def test_wrong_options_are_told(tmp_path, options, says, status, capsys):
    given = options if "--port" in options else (*options, "--port", "0")
    assert command_line.main(["serve", str(tmp_path), *given]) == status
    assert says in capsys.readouterr().err


def test_a_token_that_is_not_utf_8_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_SERVE_TOKEN", os.fsdecode(b"\xff\xfe"))
    assert command_line.main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "PENSTOCK_SERVE_TOKEN: must be UTF-8" in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_SERVE_TOKEN", SECRET)
    assert command_line.main(["serve", str(tmp_path), "--port", "0", "--no-token"]) == 2


def test_a_port_or_a_folder_that_cannot_be_had_is_told(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command_line.main(["serve", str(tmp_path), "--port", str(port)]) == 3
    assert f"another program listens on 127.0.0.1:{port}" in capsys.readouterr().err
    (tmp_path / "file").touch()
    for path, says in (("none", "No such file"), ("file", "this is no folder")):
        assert command_line.main(["serve", str(tmp_path / path), "--port", "0"]) in (2, 3)
        assert says in capsys.readouterr().err


def test_the_snapshot_of_a_hub_cache_is_served_from_the_folder_of_its_repository(tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    synth.write_file(repository / "blobs" / "d1", [Tensor("a", "F32", (8,))])
    (snapshot / "model.safetensors").symlink_to("../../blobs/d1")
    with serving(repository) as (address, _):
        tensors = penstock.open(f"{address}/snapshots/abc/model.safetensors").load(framework="np")
        Oracle(snapshot / "model.safetensors").same(tensors)
    with serving(snapshot) as (address, _):
        assert get(address, "/model.safetensors")[0] == 404  # the link leads out of the folder
