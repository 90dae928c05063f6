"""Checkpoints on a web server: opened, inspected and loaded by their addresses, with and without TLS."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certificates
import fakegpu
import numpy as np
import penstock
import pytest
from conftest import LAYOUT, Oracle, raw
from penstock import cli as command_line
from penstock.synthetic.synth import Tensor

torch = pytest.importorskip("torch")

INDEX = "model.safetensors.index.json"
SECRET = "X-Signature=a1b2c3"


class Web:
    """A server in a process of its own, and what it was asked for."""

    def __init__(self, folder: Path, *certificate: Path) -> None:
        program = Path(__file__).with_name("web_server.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program), str(folder), *map(str, certificate)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._said = self._process.stdout
        port = self._said.readline().strip()
        scheme, host = ("https", "localhost") if certificate else ("http", "127.0.0.1")
        self.address = f"{scheme}://{host}:{port}"
        self.asked: list[str] = []
        self._thread = threading.Thread(target=lambda: self.asked.extend(line.strip() for line in self._said))
        self._thread.start()

    def __call__(self, path: str) -> str:
        return f"{self.address}/{path}"

    def close(self) -> list[str]:
        """Ends it, and returns its requests."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        self._said.close()
        return self.asked


@contextlib.contextmanager
def serving(folder: Path, *certificate: Path) -> Iterator[Web]:
    web = Web(folder, *certificate)
    try:
        yield web
    finally:
        web.close()


@pytest.fixture
def web(small: Path) -> Iterator[Web]:
    with serving(small) as web:
        yield web


def files(web: Web) -> list[str]:
    return [web(name) for name in LAYOUT.files]


def test_an_index_is_opened_with_its_shards_and_loaded_bit_equal(web, small):
    checkpoint = penstock.open(web(INDEX))
    assert checkpoint.files == files(web)
    oracle = Oracle(small)
    oracle.same(checkpoint.load(framework="pt"))
    oracle.same(checkpoint.load(framework="dlpack"))
    assert checkpoint.metadata == penstock.open(small).metadata


def test_a_list_of_files_is_loaded_also_with_files_of_a_disk(web, small):
    oracle = Oracle(small)
    oracle.same(penstock.open(files(web)).load(framework="pt"))
    mixed = [files(web)[0], str(small / LAYOUT.files[1]), files(web)[2]]
    checkpoint = penstock.open(mixed)
    found = checkpoint.load(framework="pt")
    assert {name: raw(tensor) for name, tensor in found.items()} == {name: oracle[name] for name in oracle.entries}


def test_streams_slices_and_existing_tensors(web, small):
    oracle, checkpoint = Oracle(small), penstock.open(web(INDEX))
    oracle.same(dict(checkpoint.stream(framework="pt")))
    into = {name: torch.zeros(oracle.shape(name), dtype=tensor.dtype) for name, tensor in checkpoint.load().items()}
    checkpoint.load_into(into)
    assert {name: raw(tensor) for name, tensor in into.items()} == {name: oracle[name] for name in oracle.entries}
    part = checkpoint.load(slices={"layers.0.attn.weight": np.s_[3:7, 5:]}, names=["layers.0.attn.weight"])
    whole = np.frombuffer(oracle["layers.0.attn.weight"], np.float32).reshape(48, 40)
    assert raw(part["layers.0.attn.weight"]) == whole[3:7, 5:].tobytes()


def test_safe_open_and_load_file(web, small):
    oracle, first = Oracle(small / LAYOUT.files[0]), files(web)[0]
    oracle.same(penstock.load_file(first, framework="pt"))
    with penstock.safe_open(f"{first}?{SECRET}", framework="np") as opened:
        assert sorted(opened.keys()) == sorted(oracle.entries)
        weight = np.frombuffer(oracle["layers.0.attn.weight"], np.float32).reshape(48, 40)
        assert raw(opened.get_tensor("layers.0.attn.weight")) == weight.tobytes()
        assert raw(opened.get_slice("layers.0.attn.weight")[:, 3:5]) == weight[:, 3:5].tobytes()


@pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)
def test_onto_a_gpu(big, monkeypatch):
    """Each byte goes through a slab, which is taken when its answer is there."""
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    oracle, options = Oracle(big), {"staging": 16 << 20, "extent": 1 << 20}
    with fakegpu.fresh() as fake, fakegpu.torch_on(fake, monkeypatch), serving(big.parent) as web:
        checkpoint = penstock.open(web(big.name))
        tensors = checkpoint.load("cuda:0", framework="pt", options=options)
        for name, tensor in tensors.items():
            assert fake.read(tensor.data_ptr(), tensor.nbytes) == oracle[name], name
        report = checkpoint.last_report
        assert report is not None and 0 < report.peak_staging <= options["staging"]
        del tensors, tensor


def test_what_is_copied_through_slabs(web, small):
    """A dtype that is converted needs staging, which is taken when bytes arrive."""
    oracle = Oracle(small)
    checkpoint = penstock.open(web(INDEX))
    into = torch.zeros((48, 40), dtype=torch.float64)
    checkpoint.load_into([penstock.Destination("layers.1.attn.weight", into, cast=True)])
    weight = torch.frombuffer(bytearray(oracle["layers.1.attn.weight"]), dtype=torch.float32).reshape(48, 40)
    assert raw(into) == raw(weight.to(torch.float64))


def test_large_tensors_come_in_several_requests_and_no_byte_twice(big):
    with serving(big.parent) as web:
        checkpoint = penstock.open(web(big.name))
        Oracle(big).same(checkpoint.load(framework="pt"))
        asked = web.close()
    ranges = [line.split()[1] for line in asked]
    sizes = [int(last) - int(first) + 1 for first, last in (r.removeprefix("bytes=").split("-") for r in ranges)]
    assert len(sizes) > 10 and len(set(ranges)) == len(ranges)
    # The first request is the open's
    assert sum(sizes[1:]) <= checkpoint.nbytes * 1.01


@pytest.mark.parametrize("path", ["", "moved/"])
def test_a_connection_that_is_there_at_once_is_used_and_not_replaced(big, path):
    with serving(big.parent) as web:
        checkpoint = penstock.open(web(path + big.name), storage={"connections": 1})
        Oracle(big).same(checkpoint.load(framework="pt"))
    network = checkpoint.last_report.network
    assert network["requests"] > 3 and network["retries"] == 0
    # The one that was redirected is not used again
    assert network["connections"] == (2 if path else 1)


def test_a_redirect_is_followed(web, small):
    Oracle(small).same(penstock.open(web(f"moved/{INDEX}")).load(framework="pt"))


@pytest.mark.parametrize(
    ("path", "error", "says"),
    [
        ("none.safetensors", penstock.NotFoundError, "404"),
        ("locked/x.safetensors", penstock.AccessError, "403"),
        ("", penstock.NotFoundError, "web servers list no files"),
        ("README.md", penstock.PenstockError, ""),
    ],
)
def test_errors_name_the_address_and_never_the_query(web, path, error, says):
    with pytest.raises(error) as caught:
        penstock.open(web(f"{path}?{SECRET}"))
    assert caught.value.path == web(path)
    assert says in str(caught.value) and SECRET not in repr(caught.value) + str(caught.value)


def test_a_file_that_is_replaced_is_changed(tmp_path, small):
    folder = tmp_path / "copy"
    shutil.copytree(small, folder)
    with serving(folder) as web:
        checkpoint = penstock.open(web(INDEX))
        name = LAYOUT.files[1]
        shutil.copy(small / name, folder / "new")
        (folder / "new").rename(folder / name)
        with pytest.raises(penstock.ChangedError) as caught:
            checkpoint.load(framework="pt")
        assert caught.value.path == web(name)


def test_the_command_line_inspects_and_loads(web, cli):
    for command in (["inspect", "--json"], ["load", "--json", "--framework", "dlpack"]):
        done = cli(command[0], f"{web(INDEX)}?{SECRET}", *command[1:])
        assert done.returncode == 0, done.stderr
        assert SECRET not in done.stdout + done.stderr
        json.loads(done.stdout)


REFUSED: dict[str, tuple[Any, type[penstock.PenstockError], str]] = {
    "save": (lambda url: penstock.save({"a": np.arange(3)}, url), penstock.UnsupportedError, "cannot be written to"),
    "save_file": (
        lambda url: penstock.save_file({"a": np.arange(3)}, url),
        penstock.UnsupportedError,
        "cannot be written to",
    ),
    "Path": (lambda url: penstock.open(Path(url)), penstock.InvalidError, "is not supported here; web addresses"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_works_on_files_only_refuses_addresses(tmp_path, monkeypatch, web, what):
    monkeypatch.chdir(tmp_path)
    call, error, says = REFUSED[what]
    with pytest.raises(error, match=says) as caught:
        call(f"{files(web)[0]}?{SECRET}")
    assert SECRET not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["warm", "evict"])
def test_commands_for_the_page_cache_refuse_addresses(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    assert command_line.main([command, f"http://127.0.0.1:9/x?{SECRET}"]) == command_line.USAGE
    said = capsys.readouterr().err
    assert said.endswith(f"no page cache has it: {command} is for files of this machine\n") and SECRET not in said
    assert said.count("\n") == 1 and list(tmp_path.iterdir()) == []


# TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return certificates.made(tmp_path_factory.mktemp("authority"))


LOADED = """
import hashlib, sys, penstock
found = penstock.open(sys.argv[1]).load(framework="dlpack")
import torch
for name, tensor in found.items():
    flat = torch.from_dlpack(tensor).contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    print(name, hashlib.sha256(raw).hexdigest())
"""


def test_https_with_an_authority_of_our_own(authority, small, torch_python):
    import hashlib

    trusted, certificate, key = authority
    with serving(small, certificate, key) as web:
        # The store reads the authorities once, so each process is one of its own
        done = torch_python(LOADED, web(INDEX), SSL_CERT_FILE=str(trusted))
        assert done.returncode == 0, done.stderr
        oracle = Oracle(small)
        expected = {name: hashlib.sha256(oracle[name]).hexdigest() for name in oracle.entries}
        assert dict(line.split() for line in done.stdout.splitlines()) == expected
        done = torch_python(LOADED, f"{web(INDEX)}?{SECRET}")
        assert done.returncode != 0
        assert "certificate is not trusted" in done.stderr and "SSL_CERT_FILE" in done.stderr
        assert SECRET not in done.stderr
        named = web(INDEX).replace("localhost", "127.0.0.1")
        done = torch_python(LOADED, named, SSL_CERT_FILE=str(trusted))
        assert done.returncode != 0 and "certificate is not trusted" in done.stderr


def test_an_authority_that_storage_names(authority, small, tmp_path):
    trusted, certificate, key = authority
    with serving(small, certificate, key) as web:
        checkpoint = penstock.open(web(INDEX), storage={"ca": trusted})
        Oracle(small).same(checkpoint.load(framework="pt"))
        with penstock.safe_open(files(web)[0], framework="pt", storage={"ca": str(trusted)}) as opened:
            Oracle(small / LAYOUT.files[0]).same(opened.get_tensors())
        with pytest.raises(penstock.ReadError, match="certificate is not trusted"):
            penstock.open(web(INDEX))
        with pytest.raises(penstock.UnsupportedError, match=r"none\.pem"):
            penstock.open(web(INDEX), storage={"ca": tmp_path / "none.pem"})


# storage=


@pytest.mark.parametrize(
    ("storage", "error", "says"),
    [
        ({"connection": 3}, penstock.InvalidError, "setting 'connection'; there are: connections, request_bytes, ca"),
        ({3: 3}, penstock.InvalidError, "no storage setting 3"),
        ({"connections": 0}, penstock.InvalidError, "from 1 to 1024"),
        ({"connections": True}, TypeError, "a whole number"),
        ({"connections": 1.5}, TypeError, "a whole number"),
        ({"ca": 3}, TypeError, "a path"),
        ({"ca": ""}, penstock.InvalidError, "must not be empty"),
        ({"interfaces": ["lo", "eth77"]}, penstock.InvalidError, r'no network interface "eth77"; there are: .*\blo\b'),
        ({"interfaces": []}, penstock.InvalidError, "must not be empty"),
        ({"interfaces": "lo,"}, penstock.InvalidError, 'no network interface ""'),
        ({"interfaces": [3]}, TypeError, "a list of strings"),
        ({"bandwidth": 65_535}, penstock.InvalidError, r"65536 \(64 KiB\) or more"),
        ({"bandwidth": -1}, penstock.InvalidError, "must be bytes"),
        ({"bandwidth": "1 MB/s"}, penstock.InvalidError, "MiB or GiB"),
        ({"bandwidth": True}, TypeError, "a whole number or a size"),
        ("connections", penstock.InvalidError, "give a dict of settings"),
    ],
)
def test_settings_that_are_none_are_refused_before_anything_is_asked_for(web, storage, error, says):
    with pytest.raises(error, match=says):
        penstock.open(web(INDEX), storage=storage)
    assert web.close() == []


def test_connections_are_bound_to_interfaces(web, small):
    for given in (["lo"], "lo", ("lo", "lo")):
        storage: Any = {"interfaces": given}
        Oracle(small).same(penstock.open(web(INDEX), storage=storage).load(framework="dlpack"))
    assert command_line.main(["inspect", web(INDEX), "--storage", "interfaces=lo"]) == 0
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    if not others:
        pytest.skip("this machine has no other interface than lo, from which loopback cannot be reached")
    bound: Any = {"interfaces": others[:1]}
    with pytest.raises((penstock.ReadError, penstock.StalledError)):
        penstock.open(web(INDEX), storage=bound, stall_timeout=5)


def test_a_limit_on_the_rate_is_kept(write, monkeypatch):
    rate = 128 << 10
    path = write(Tensor("w", "U8", (3 * rate,)))
    monkeypatch.setenv("PENSTOCK_STORAGE_BANDWIDTH", str(rate))
    with serving(path.parent) as web:
        checkpoint = penstock.open(web(path.name))
        begun = time.perf_counter()
        Oracle(path).same(checkpoint.load(framework="dlpack"))
        seconds = time.perf_counter() - begun
    assert checkpoint.last_report is not None
    network = checkpoint.last_report["network"]
    # What is received in one second may come at once
    least = (network["received_bytes"] - rate) / rate
    assert seconds >= least >= 1.9
    assert network["retries"] == 0


def test_an_environment_variable_is_a_default_that_code_wins_over(web, monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_STORAGE_CONNECTIONS", "many")
    with pytest.raises(penstock.InvalidError, match="PENSTOCK_STORAGE_CONNECTIONS: must be a whole number"):
        penstock.open(web(INDEX))
    monkeypatch.setenv("PENSTOCK_STORAGE_CONNECTIONS", "2")
    monkeypatch.setenv("PENSTOCK_STORAGE_CA", "there/is/none.pem")
    penstock.open(web(INDEX), storage={"connections": None})
    assert command_line.main(["inspect", web(INDEX), "--storage", "connections=3", "--storage", "ca=x"]) == 0
    assert command_line.main(["load", web(INDEX), "--storage", "speed=3"]) == command_line.USAGE
    assert "connections, request_bytes, ca" in capsys.readouterr().err


def test_nothing_of_it_is_there_before_an_address_is_opened(python, small):
    """No thread and no socket: only an address makes them."""
    done = python(
        "import os, sys, penstock; penstock.open(sys.argv[1]).load(framework='dlpack'); "
        "fds = [f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd')]; "
        "threads = [open(f'/proc/self/task/{task}/comm').read().strip() for task in os.listdir('/proc/self/task')]; "
        "print([os.readlink(fd) for fd in fds if os.path.lexists(fd)], threads)",
        small,
    )
    assert done.returncode == 0, done.stderr
    assert "socket:" not in done.stdout and "penstock-net" not in done.stdout and "penstock-dns" not in done.stdout
