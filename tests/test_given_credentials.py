"""Credentials that a program gives by a callable: `storage={"credentials": ...}`."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import penstock
import pytest
from conftest import LAYOUT, Oracle
from penstock import cli as command_line
from s3_server import KEYS, Bucket, error, serving
from test_gcs import Google

FOLDER = "s3://bucket/m/"
NEAR = {"extent": 1 << 20, "staging": 16 << 20}


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch, tmp_path):
    import os

    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "GCE_", "STORAGE_EMULATOR_HOST", "PENSTOCK_STORAGE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture
def bucket(small: Path) -> Iterator[Bucket]:
    objects = {f"m/{path.name}": path.read_bytes() for path in small.iterdir() if path.is_file()}
    with serving(Bucket(objects)) as bucket:
        yield bucket


class Vault:
    """A callable that gives another key each time."""

    def __init__(self, **more: Any) -> None:
        self.calls = 0
        self.more = more
        self.threads: set[str] = set()

    def __call__(self) -> dict[str, Any]:
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        key = f"AKIDGIVEN{self.calls}"
        KEYS[key] = f"secret of {key}"
        given = {"access_key_id": key, "secret_access_key": KEYS[key], "session_token": "t/=="}
        return given | {name: value() if callable(value) else value for name, value in self.more.items()}


def storage(bucket: Bucket, credentials: Any, **more: Any) -> Any:
    return {"endpoint": bucket.endpoint, "credentials": credentials, **more}


# When it is called


def test_a_callable_is_asked_once_for_an_open_and_its_loads(bucket, small):
    vault = Vault()
    checkpoint = penstock.open(FOLDER, storage=storage(bucket, vault))
    for _ in range(2):
        Oracle(small).same(checkpoint.load(framework="np"))
    penstock.open(FOLDER, storage=storage(bucket, vault))
    assert vault.calls == 1
    assert {key for _, key in bucket.asked} == {"AKIDGIVEN1"}
    assert vault.threads == {"penstock-credentials"}


def test_it_wins_over_the_environment(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    penstock.open(FOLDER, storage=storage(bucket, Vault()))
    assert {key for _, key in bucket.asked} == {"AKIDGIVEN1"}


def test_it_is_asked_again_once_for_all_requests_that_a_server_refuses(bucket, quarter):
    bucket.objects = {"m/model.safetensors": quarter.read_bytes()}
    vault = Vault()
    checkpoint = penstock.open(FOLDER, storage=storage(bucket, vault))
    bucket.expired = {"AKIDGIVEN1"}
    Oracle(quarter).same(checkpoint.load(framework="np", options=NEAR))
    assert vault.calls == 2
    # One that gives what is refused is not asked without end
    bucket.expired = {f"AKIDGIVEN{n}" for n in range(100)}
    with pytest.raises(penstock.AccessError, match=r"ExpiredToken.*the callable in storage credentials"):
        checkpoint.load(framework="np", options=NEAR)
    assert vault.calls <= 2 + 16


@pytest.mark.parametrize("moment", [time.time, lambda: datetime.now(timezone.utc)], ids=["seconds", "datetime"])
def test_it_is_asked_again_before_the_credentials_expire(bucket, moment):
    later = 3600 if moment is time.time else timedelta(hours=1)
    vault = Vault(expires_at=lambda: moment() + later)
    checkpoint = penstock.open(FOLDER, storage=storage(bucket, vault))
    checkpoint.load(framework="np")
    assert vault.calls == 1
    soon = 3 if moment is time.time else timedelta(seconds=3)
    vault = Vault(expires_at=lambda: moment() + soon)
    checkpoint = penstock.open(FOLDER, storage=storage(bucket, vault))
    time.sleep(3.3)  # whatever was given until now has expired
    before = vault.calls
    bucket.asked.clear()
    checkpoint.load(framework="np")
    assert vault.calls > before
    assert "AKIDGIVEN1" not in {key for _, key in bucket.asked}


# What it may do


def test_the_gil_is_free_for_it(bucket, small):
    """It waits for another thread of Python, which runs only if the thread that opens does not keep it from it."""
    asked, may = threading.Event(), threading.Event()

    def elsewhere() -> None:
        asked.wait()
        may.set()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    vault = Vault()

    def call() -> dict[str, Any]:
        asked.set()
        assert may.wait(60)
        return vault()

    Oracle(small).same(penstock.open(FOLDER, storage=storage(bucket, call)).load(framework="np"))
    thread.join()


def test_it_may_load_with_penstock(bucket, small):
    vault, of_files = Vault(), penstock.open(str(small))

    def call() -> dict[str, Any]:
        of_files.load(framework="np")
        return vault()

    Oracle(small).same(penstock.open(FOLDER, storage=storage(bucket, call)).load(framework="np"))


def test_a_load_that_waits_for_it_can_be_cancelled(bucket):
    vault, asked, may = Vault(), threading.Event(), threading.Event()

    def call() -> dict[str, Any]:
        if vault.calls:
            asked.set()
            assert may.wait(60)
        return vault()

    checkpoint = penstock.open(FOLDER, storage=storage(bucket, call))
    bucket.expired = {"AKIDGIVEN1"}
    try:
        job = checkpoint.start(framework="np")
        assert asked.wait(60)
        job.cancel()
        with pytest.raises(penstock.CancelledError):
            job.result()
    finally:
        may.set()


PROGRAM = """
import sys, threading, time
import penstock

asked = threading.Event()

def hangs():
    asked.set()
    while True:
        {body}

def opens():
    penstock.open("s3://bucket/m/", storage={{"endpoint": "http://127.0.0.1:9", "credentials": hangs}})

threading.Thread(target=opens, daemon=True).start()
assert asked.wait(60)
print("ends")
"""


@pytest.mark.parametrize("body", ["time.sleep(3600)", "time.sleep(0)", "pass"])
def test_one_that_hangs_keeps_no_interpreter_from_ending(body):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


# What it does wrong


class VaultError(Exception):
    pass


def test_its_exception_is_the_cause_of_an_error_that_shows_no_secret(bucket):
    def call() -> Any:
        raise VaultError("sesame")

    with pytest.raises(penstock.AccessError) as caught:
        penstock.open(FOLDER, storage=storage(bucket, call))
    assert str(caught.value) == f"{FOLDER}: the callable in storage credentials failed: VaultError"
    assert isinstance(caught.value.__cause__, VaultError)
    assert "raise VaultError" in "".join(traceback.format_exception(caught.value.__cause__))
    assert bucket.asked == []


def test_its_exception_in_a_load_is_the_cause_too(bucket):
    vault = Vault()

    def call() -> Any:
        if vault.calls:
            raise VaultError("sesame")
        return vault()

    checkpoint = penstock.open(FOLDER, storage=storage(bucket, call))
    bucket.expired = {"AKIDGIVEN1"}
    with pytest.raises(penstock.AccessError, match="failed: VaultError") as caught:
        checkpoint.load(framework="np")
    assert isinstance(caught.value.__cause__, VaultError) and "sesame" not in str(caught.value)


def test_an_error_of_penstock_in_it_stays_what_it_is(bucket):
    def call() -> Any:
        raise penstock.AccessError("the vault is sealed")

    with pytest.raises(penstock.AccessError, match="the vault is sealed"):
        penstock.open(FOLDER, storage=storage(bucket, call))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "gave a NoneType: let it return a mapping with access_key_id, "),
        (["sesame"], "gave a list"),
        ({}, "gave no access_key_id and secret_access_key, which S3 needs"),
        ({"token": "sesame"}, "gave no access_key_id and secret_access_key, which S3 needs"),
        ({"access_key": "sesame"}, "gave access_key, which is not known: it may give access_key_id"),
        ({"access_key_id": b"sesame"}, "gave a bytes as access_key_id: let it be a string"),
        ({"access_key_id": "a b", "secret_access_key": "sesame"}, "spaces or control"),
        ({"access_key_id": "a", "secret_access_key": "sesame", "expires_at": "1"}, "gave a str as expires_at"),
        ({"access_key_id": "a", "secret_access_key": "sesame", "expires_at": datetime(2100, 1, 1)}, "time zone"),
    ],
)
def test_what_makes_no_sense_says_so(bucket, given, says):
    with pytest.raises(penstock.InvalidError, match=says) as caught:
        penstock.open(FOLDER, storage=storage(bucket, lambda: given))
    assert "sesame" not in repr(caught.value)
    assert bucket.asked == []


@pytest.mark.parametrize("expires_at", [0, -5.0, float("-inf"), 1.7e9])
def test_credentials_that_have_expired_are_refused(bucket, expires_at):
    with pytest.raises(penstock.AccessError, match="have expired already"):
        penstock.open(FOLDER, storage=storage(bucket, Vault(expires_at=expires_at)))
    assert bucket.asked == []


def test_it_is_a_callable_and_no_text(bucket, monkeypatch, capsys):
    for given in ({"access_key_id": "a"}, 3):
        with pytest.raises(TypeError, match="storage credentials: must be a callable"):
            penstock.open(FOLDER, storage=storage(bucket, given))
    assert command_line.main(["inspect", FOLDER, "--storage", "credentials=vault"]) != 0
    assert "storage credentials: is a callable, which a text cannot give" in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_STORAGE_CREDENTIALS", "vault")
    with pytest.raises(penstock.InvalidError, match="PENSTOCK_STORAGE_CREDENTIALS: is a callable"):
        penstock.open(FOLDER)


# Tokens


def test_tokens_for_google_cloud_storage(small):
    objects = {f"m/{path.name}": path.read_bytes() for path in small.iterdir() if path.is_file()}
    tokens: list[str] = []

    def call() -> dict[str, str]:
        tokens.append(f"token-{len(tokens)}")
        return {"token": tokens[-1]}

    with serving(Google(objects)) as bucket:
        bucket.readers = {"token-0", "token-1"}
        checkpoint = penstock.open("gs://bucket/m/", storage=storage(bucket, call))
        Oracle(small).same(checkpoint.load(framework="np"))
        assert {token for _, token in bucket.asked} == {"token-0"} == set(tokens)
        bucket.expired = {"token-0"}
        Oracle(small).same(checkpoint.load(framework="np"))
        assert tokens == ["token-0", "token-1"]
        for given, says in (({}, "gave no token"), ({"token": "a b"}, "spaces"), (None, "gave a NoneType")):
            with pytest.raises(penstock.InvalidError, match=says):
                penstock.open("gs://bucket/m/", storage=storage(bucket, lambda given=given: given))
        with pytest.raises(penstock.AccessError, match="failed: ZeroDivisionError"):
            penstock.open("gs://bucket/m/", storage=storage(bucket, lambda: 1 / 0))


@contextmanager
def guarded(content: bytes, tokens: set[str]) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """A web server that wants one of these tokens; below /moved/ it redirects to the same path of ``localhost``."""
    asked: list[tuple[str, str | None]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
            asked.append((f"{self.headers['Host'].split(':')[0]}{self.path}", token))
            body, status = b"", 403
            about = {}
            if self.path.startswith("/moved/"):
                port = self.headers["Host"].split(":")[1]
                status, about = 302, {"Location": f"http://localhost:{port}/open{self.path}"}
            elif token in tokens or self.path.startswith("/open/"):
                first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                body, status = content[first : last + 1], 206
                about = {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(content)}", "ETag": '"e"'}
            self.send_response(status)
            for name, value in {**about, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *about: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 128

        def handle_error(self, *about: object) -> None:
            """Clients close connections in the middle of an answer."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def counting() -> tuple[Callable[[], dict[str, str]], list[str]]:
    tokens: list[str] = []

    def call() -> dict[str, str]:
        tokens.append(f"token-{len(tokens)}")
        return {"token": tokens[-1]}

    return call, tokens


def test_tokens_for_web_servers(small):
    name = LAYOUT.files[0]
    call, tokens = counting()
    valid = {"token-0"}
    with guarded((small / name).read_bytes(), valid) as (server, asked):
        checkpoint = penstock.open(f"{server}/x/{name}", storage={"credentials": call})
        Oracle(small / name).same(checkpoint.load(framework="np"))
        assert {token for _, token in asked} == {"token-0"}
        valid |= {"token-1"}
        valid -= {"token-0"}
        Oracle(small / name).same(checkpoint.load(framework="np"))
        assert tokens == ["token-0", "token-1"]
        valid.clear()
        with pytest.raises(penstock.AccessError, match=r"403.*the token is from the callable in storage credentials"):
            checkpoint.load(framework="np")


def test_a_token_does_not_go_where_the_server_redirects_to(small):
    name = LAYOUT.files[0]
    call, _ = counting()
    with guarded((small / name).read_bytes(), set()) as (server, asked):
        checkpoint = penstock.open(f"{server}/moved/{name}", storage={"credentials": call})
        Oracle(small / name).same(checkpoint.load(framework="np"))
        assert {(where.split("/")[0], token is None) for where, token in asked} == {
            ("127.0.0.1", False),
            ("localhost", True),
        }


def test_a_token_is_not_sent_where_it_could_be_read(small):
    call, tokens = counting()
    with pytest.raises(penstock.InvalidError, match="a token would be readable"):
        penstock.open("http://192.0.2.1/model.safetensors", storage={"credentials": call})
    assert len(tokens) <= 1


def test_doctor_shows_nothing_of_it(bucket):
    from penstock import _doctor_network

    found = _doctor_network.examine(FOLDER, storage(bucket, Vault()), measure=False)
    assert found["ok"] and found["settings"]["credentials"] == {"value": "(set)", "from": "storage="}


def test_refusals_name_where_the_keys_are_from(bucket):
    bucket.script = lambda target, number: error(403, "AccessDenied", "x")
    with pytest.raises(penstock.AccessError, match=r"AccessDenied.*the callable in storage credentials"):
        penstock.open(FOLDER, storage=storage(bucket, Vault()))
