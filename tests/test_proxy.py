"""Servers behind a proxy: a small one of the tests' own, in this process, over real sockets."""

from __future__ import annotations

import base64
import contextlib
import http.client
import http.server
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import penstock
import pytest
from conftest import LAYOUT, Oracle
from penstock import cli as command_line
from s3_server import KEYS, Bucket
from s3_server import serving as serving_bucket
from test_hub_network import Hub
from test_web import INDEX, authority, serving, web  # noqa: F401

PASSWORD = "se/sa me@%"
USER = "me:se%2Fsa%20me%40%25"


class Proxy:
    """What is asked of it, and what it does."""

    def __init__(self) -> None:
        self.port = 0
        #: "CONNECT host:port", or the method and scheme, host and port of the address
        self.asked: list[str] = []
        #: Other places for hosts that no name server knows
        self.hosts: dict[str, tuple[str, int]] = {}
        #: What it answers instead
        self.status: int | None = None
        #: Whether it wants the password
        self.closed = False
        #: Fields that came with requests for servers
        self.seen: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def with_password(self, user: str = USER) -> str:
        return f"http://{user}@127.0.0.1:{self.port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: Proxy

    def refuses(self, said: str) -> bool:
        self.proxy.asked.append(said)
        status = self.proxy.status
        given = self.headers.get("Proxy-Authorization")
        wanted = f"Basic {base64.b64encode(f'me:{PASSWORD}'.encode()).decode()}"
        if self.proxy.closed and given != wanted:
            status = 407
        if status is None:
            return False
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True

    def place(self, host: str, port: int) -> tuple[str, int]:
        return self.proxy.hosts.get(host, (host, port))

    def do_CONNECT(self) -> None:
        if self.refuses(f"CONNECT {self.path}"):
            return
        host, _, port = self.path.rpartition(":")
        with socket.create_connection(self.place(host, int(port))) as server:
            self.send_response(200, "Connection established")
            self.end_headers()
            self.wfile.flush()

            def carry(source: socket.socket, to: socket.socket) -> None:
                with contextlib.suppress(OSError):
                    while part := source.recv(1 << 16):
                        to.sendall(part)
                for end in (source, to):
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)

            back = threading.Thread(target=carry, args=(server, self.connection))
            back.start()
            carry(self.connection, server)
            back.join()
        self.close_connection = True

    def do_GET(self) -> None:
        origin, _, rest = self.path.removeprefix("http://").partition("/")
        if self.refuses(f"{self.command} http://{origin}"):
            return
        host, _, port = origin.partition(":")
        fields = {name: value for name, value in self.headers.items() if name != "Proxy-Authorization"}
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server = http.client.HTTPConnection(*self.place(host, int(port or 80)))
        server.request(self.command, f"/{rest}", body=body, headers=fields)
        answer = server.getresponse()
        content = answer.read()
        self.send_response(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "date", "server", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        server.close()

    do_PUT = do_POST = do_GET

    def log_message(self, *about: object) -> None:
        pass


@contextlib.contextmanager
def serving_proxy() -> Iterator[Proxy]:
    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 128

        def handle_error(self, *about: object) -> None:
            """Clients close connections in the middle of an answer."""

    proxy = Proxy()
    handler = type("Handler", (Handler,), {"proxy": proxy})
    with Server(("127.0.0.1", 0), handler) as server:
        proxy.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with serving_proxy() as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch, tmp_path):
    for name in os.environ:
        if name.lower().endswith("_proxy") or name.startswith(("AWS_", "PENSTOCK_STORAGE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_a_server_without_tls_is_asked_for_by_the_proxy(proxy, web, small):  # noqa: F811
    checkpoint = penstock.open(web(INDEX), storage={"proxy": proxy.address})
    opened = len(proxy.asked)
    Oracle(small).same(checkpoint.load(framework="np"))
    assert opened == 1 + len(LAYOUT.files) < len(proxy.asked)
    assert set(proxy.asked) == {f"GET {web.address}"}
    assert len(web.close()) == len(proxy.asked)


def test_a_server_with_tls_is_reached_through_a_tunnel(proxy, authority, small):  # noqa: F811
    folder, *certificate = authority
    with serving(small, *certificate) as secure:
        storage: Any = {"proxy": proxy.with_password(), "ca": folder, "connections": 3}
        proxy.closed = True
        checkpoint = penstock.open(secure(INDEX), storage=storage)
        opened = len(proxy.asked)
        Oracle(small).same(checkpoint.load(framework="np"))
        assert set(proxy.asked) == {f"CONNECT localhost:{port_of(secure.address)}"}
        assert 0 < len(proxy.asked) - opened <= 3


def test_the_address_of_a_server_is_the_business_of_the_proxy(proxy, web, small, monkeypatch):  # noqa: F811
    proxy.hosts["models.invalid"] = ("127.0.0.1", port_of(web.address))
    for variable in ("http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, proxy.address)
        checkpoint = penstock.open(f"http://models.invalid/{INDEX}")
        Oracle(small).same(checkpoint.load(framework="np"))
        monkeypatch.delenv(variable)
    assert set(proxy.asked) == {"GET http://models.invalid"}


def test_what_the_environment_says(proxy, web, monkeypatch):  # noqa: F811
    """Loopback servers are asked directly; those of NO_PROXY too; `HTTP_PROXY` says nothing; a setting wins."""
    monkeypatch.setenv("http_proxy", proxy.address)
    penstock.open(web(INDEX))
    monkeypatch.setenv("NO_PROXY", "example.org,.invalid")
    with pytest.raises(penstock.ReadError, match=r"name server knows no address of the host models\.invalid"):
        penstock.open(f"http://models.invalid/{INDEX}")
    monkeypatch.delenv("NO_PROXY")
    with pytest.raises(penstock.ReadError, match="name server knows"):
        penstock.open(f"http://models.invalid/{INDEX}", storage={"proxy": ""})
    monkeypatch.delenv("http_proxy")
    monkeypatch.setenv("HTTP_PROXY", proxy.address)
    with pytest.raises(penstock.ReadError, match="name server knows"):
        penstock.open(f"http://models.invalid/{INDEX}")
    assert proxy.asked == []
    monkeypatch.setenv("HTTPS_PROXY", proxy.address)
    proxy.hosts["models.invalid"] = ("127.0.0.1", port_of(web.address))
    with pytest.raises(penstock.ReadError, match="TLS"):  # the server has none
        penstock.open(f"https://models.invalid/{INDEX}")
    assert set(proxy.asked) == {"CONNECT models.invalid:443"}
    monkeypatch.setenv("PENSTOCK_STORAGE_PROXY", "")
    with pytest.raises(penstock.ReadError, match="name server knows"):
        penstock.open(f"https://models.invalid/{INDEX}")


def test_a_bucket_is_listed_and_loaded_through_a_proxy(proxy, small):
    objects = {f"m/{path.name}": path.read_bytes() for path in small.iterdir() if path.is_file()}
    del objects[f"m/{INDEX}"]
    key, secret = next(iter(KEYS.items()))
    proxy.closed = True
    with serving_bucket(Bucket(objects)) as bucket:
        proxy.hosts["s3.invalid"] = ("127.0.0.1", port_of(bucket.endpoint))
        storage: Any = {
            "endpoint": "http://s3.invalid",
            "proxy": proxy.with_password(),
            "access_key_id": key,
            "secret_access_key": secret,
        }
        checkpoint = penstock.open("s3://bucket/m/", storage=storage)
        Oracle(small).same(checkpoint.load(framework="np"))
        assert any("list-type=2" in target for target, _ in bucket.asked)
        assert len(bucket.asked) == len(proxy.asked)
        for wrong, kind, says in (
            (proxy.address, penstock.AccessError, f"the proxy {proxy.address} answers 407"),
            (proxy.with_password("me:other"), penstock.AccessError, f"{proxy.address} answers 407"),
            ("http://127.0.0.1:9", penstock.ReadError, r"the proxy http://127\.0\.0\.1:9: .*refused"),
        ):
            with pytest.raises(kind, match=says):
                penstock.open("s3://bucket/m/", storage={**storage, "proxy": wrong})


def test_services_of_the_machine_are_asked_without_it(proxy, small, monkeypatch):
    objects = {f"m/{path.name}": path.read_bytes() for path in small.iterdir() if path.is_file()}
    with serving_bucket(Bucket(objects)) as bucket:
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", bucket.endpoint)
        storage: Any = {"endpoint": bucket.endpoint, "proxy": proxy.address}
        Oracle(small).same(penstock.open("s3://bucket/m/", storage=storage).load(framework="np"))
        assert bucket.credentials == 1
        assert len(proxy.asked) == len(bucket.asked)


def test_the_hub_with_tls_is_asked_through_a_tunnel(proxy, small, tmp_path, monkeypatch, authority):  # noqa: F811
    folder, *certificate = authority
    hub = Hub(tmp_path / "hub", *certificate)
    try:
        hub.add("org/model", small)
        proxy.closed = True
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        storage: Any = {"proxy": proxy.with_password(), "ca": folder}
        Oracle(small).same(penstock.open("hf://org/model", storage=storage).load(framework="np"))
        assert set(proxy.asked) == {f"CONNECT localhost:{port_of(at)}" for at in (hub.endpoint, hub.storage)}
        # A load may leave a connection that it did not need after all: the first one may still hear of it
        with serving_proxy() as another:
            another.closed = True
            refused = f"the proxy {another.address} answers 407: .* password"
            with pytest.raises(penstock.AccessError, match=refused) as caught:
                penstock.open("hf://org/model", storage={**storage, "proxy": another.with_password("me:sesame")})
            assert caught.value.status == 407 and "sesame" not in repr(vars(caught.value))
            assert len(another.asked) == 1
    finally:
        hub.process.kill()
        hub.process.wait()


def test_the_hub_is_asked_through_it(proxy, small, tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    try:
        hub.add("org/model", small)
        proxy.hosts["hub.invalid"] = ("127.0.0.1", port_of(hub.endpoint))
        proxy.closed = True
        monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NO_PROXY", "*")  # a setting wins
        checkpoint = penstock.open("hf://org/model", storage={"proxy": proxy.with_password()})
        Oracle(small).same(checkpoint.load(framework="np"))
        assert {"GET http://hub.invalid", f"GET {hub.storage}"} <= set(proxy.asked)
        proxy.asked.clear()
        with pytest.raises(penstock.AccessError, match=f"the proxy {proxy.address} answers 407: .* password") as caught:
            penstock.open("hf://org/model", storage={"proxy": proxy.with_password("me:sesame")})
        assert caught.value.status == 407 and "sesame" not in repr(vars(caught.value))
        assert len(proxy.asked) == 1
    finally:
        hub.process.kill()
        hub.process.wait()


@pytest.mark.parametrize(
    ("status", "kind", "says", "times"),
    [
        (407, penstock.AccessError, "a user's name and a password", 1),
        (403, penstock.AccessError, "does it allow this server", 1),
        (502, penstock.ReadError, "asked for 3 times", 3),
        (200, penstock.ReadError, "TLS", 1),  # and does not pass on what follows
    ],
)
def test_a_tunnel_that_is_refused_names_the_proxy(proxy, status, kind, says, times):
    proxy.status = status
    with pytest.raises(kind, match=says) as caught:
        penstock.open(f"https://models.invalid/{INDEX}", storage={"proxy": proxy.with_password()})
    assert proxy.address in str(caught.value) or status == 200
    assert (
        "models.invalid" in str(caught.value) and "se/sa" not in repr(caught.value) and USER not in repr(caught.value)
    )
    assert caught.value.status in (status, None)
    # Four connections are worth what the first request may bring
    assert times <= len(proxy.asked) <= 4 * times


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [(407, penstock.AccessError, "a user's name and a password"), (403, penstock.AccessError, "403")],
)
def test_a_request_that_is_refused_names_the_proxy(proxy, status, kind, says):
    proxy.status = status
    with pytest.raises(kind, match=says) as caught:
        penstock.open("http://models.invalid/model.safetensors", storage={"proxy": proxy.with_password()})
    assert f"through the proxy {proxy.address}" in str(caught.value)
    assert caught.value.status == status
    assert len(proxy.asked) == 1


def test_a_proxy_that_is_not_there_is_named(proxy):
    for scheme in ("http", "https"):
        with pytest.raises(
            penstock.ReadError, match=r"models\.invalid through the proxy http://127\.0\.0\.1:9.*refused"
        ):
            penstock.open(f"{scheme}://models.invalid/{INDEX}", storage={"proxy": "http://127.0.0.1:9"})
        with pytest.raises(penstock.ReadError, match=r"the proxy http://p\.invalid:1: the name server"):
            penstock.open(f"{scheme}://models.invalid/{INDEX}", storage={"proxy": "http://p.invalid:1"})


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ("socks5://sesame:x@h:1", penstock.InvalidError, "socks5:// are not supported: give http://host:port"),
        ("http://sesame@h:x", penstock.InvalidError, "no address of a proxy"),
        ("http://h:1/sesame", penstock.InvalidError, "no path"),
        (3, TypeError, "a string"),
    ],
)
def test_settings_that_cannot_be(given, error, says):
    with pytest.raises(error, match=says) as caught:
        penstock.open(f"http://models.invalid/{INDEX}", storage={"proxy": given})
    assert "sesame" not in repr(caught.value)


def test_a_variable_that_cannot_be_is_an_error_where_it_would_be_used(monkeypatch, web):  # noqa: F811
    monkeypatch.setenv("ALL_PROXY", "socks5://sesame@h:1")
    penstock.open(web(INDEX))
    with pytest.raises(penstock.UnsupportedError, match=r"the proxy in ALL_PROXY: .*socks5") as caught:
        penstock.open(f"http://models.invalid/{INDEX}")
    assert "sesame" not in repr(caught.value)


@pytest.mark.parametrize("source", [f"https://models.invalid/{INDEX}", "hf://org/model"])
def test_doctor_reports_a_variable_that_cannot_be(monkeypatch, tmp_path, capsys, source):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", "socks5://sesame@h:1")
    assert command_line.main(["doctor", source, "--no-measure"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "the proxy in ALL_PROXY: proxies of kind socks5:// are not supported" in said
    assert "cannot be opened: see the error" in said and "sesame" not in said


def test_doctor_names_the_proxy_of_a_hub_that_cannot_be_reached(proxy, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy.address)
    proxy.status = 407
    assert command_line.main(["doctor", "hf://org/model", "--no-measure"]) == 1
    assert f"through the proxy 127.0.0.1:{proxy.port}" in capsys.readouterr().out


def test_engines_which_log_their_arguments_refuse_its_password():
    from penstock.integrations import _engine

    with pytest.raises(penstock.InvalidError, match="logs its arguments") as caught:
        _engine.settings_of({"storage": {"proxy": "http://me:sesame@h:1"}}, "vllm")
    assert "sesame" not in str(caught.value)
    assert _engine.settings_of({"storage": {"proxy": "http://h:1"}}, "vllm").storage == {"proxy": "http://h:1"}


def test_commands_take_it_and_doctor_does_not_show_it(proxy, web, capsys):  # noqa: F811
    given = ["--storage", f"proxy={proxy.with_password()}"]
    assert command_line.main(["inspect", web(INDEX), *given]) == 0
    assert proxy.asked
    assert command_line.main(["doctor", web(INDEX), "--no-measure", *given]) == 0
    said = capsys.readouterr().out
    assert f"through the proxy 127.0.0.1:{proxy.port}" in said
    assert "(set)" in said and "se%2Fsa" not in said
