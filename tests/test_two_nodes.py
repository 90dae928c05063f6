"""Ranks in two network namespaces, as on two machines, behind firewalls that let in the named ports (`make nodes`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from two_nodes import ADDRESSES, PORTS, missing, run, two_nodes

if os.environ.get("PENSTOCK_TEST_NODES") != "1":
    pytest.skip("ranks in two namespaces: `make nodes` runs them", allow_module_level=True)
pytest.importorskip("torch.distributed")
if lacks := missing():
    pytest.skip(lacks, allow_module_level=True)

KEY, OTHER = "a key that all ranks have", "a key that only one rank has"
OPTIONS = {"exchange": "on", "scope": "world", "ports": PORTS, "cache": "bypass", "peer_timeout": 3, "join_timeout": 60}
#: Bytes of the checkpoint, of which the ranks of each node read a part for those of the other.
NBYTES = 16 * (2 << 20)

LOAD = """
checkpoint = penstock.open(path)
with penstock.joined(group, options=options):
    said["tensors"] = same(checkpoint.load(group=group, options=options))
said["exchange"] = checkpoint.last_report["exchange"]
said["streamed"] = same(dict(checkpoint.stream(group=group, options=options)))
"""
REFUSED = "refused(lambda: penstock.open(path).load(group=group, options=options))"
#: As if what the store says of keys had been changed: the connections themselves have to tell.
UNCOMPARED = "from penstock import _group\n_group._compare_keys = lambda *_: None\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = [Tensor(f"{number}", "U8", (2 << 20,)) for number in range(16)]
    return synth.write_file(tmp_path_factory.mktemp("nodes") / "model.safetensors", tensors)


def keys(*of_ranks: str | None) -> list[dict[str, str]]:
    return [{} if key is None else {"PENSTOCK_PEER_KEY": key} for key in of_ranks]


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
@pytest.mark.parametrize("boot_ids", [False, True], ids=["one-boot-id", "two-boot-ids"])
def test_ranks_load_together_across_firewalls_that_let_in_the_named_ports(
    model: Path, tmp_path: Path, family: str, boot_ids: bool
) -> None:
    at = ADDRESSES[0][family == "IPv6"]
    with two_nodes(tmp_path, boot_ids=boot_ids) as nodes:
        # By the interface, or by its address
        bind = "wire" if family == "IPv4" else None
        options = [{"PENSTOCK_BIND": bind or node.address6} for node in nodes]
        placed = (0, 0, 1, 1)
        environment = [{**options[node], "PENSTOCK_PEER_KEY": KEY} for node in placed]
        before = sum(node.sent() for node in nodes)
        said = run(
            nodes, LOAD, model, tmp_path / "ranks", ranks=placed, options=OPTIONS, environment=environment, at=at
        )
        assert [(one["tensors"], one["streamed"]) for one in said] == [(16, 16)] * 4
        crossed = sum(node.sent() for node in nodes) - before
        assert crossed > 2 * NBYTES, "each node has half of both loads, and sends it to two ranks"
        assert [node.dropped() for node in nodes] == [0, 0], "a rank has listened at another port"
    assert all(KEY not in one["log"] for one in said)


@pytest.mark.parametrize("program", [REFUSED, UNCOMPARED + REFUSED], ids=["compared", "by-the-connections"])
@pytest.mark.parametrize("key", [OTHER, None], ids=["another", "none"])
def test_a_wrong_key_is_refused_by_name_on_both_sides(
    model: Path, tmp_path: Path, program: str, key: str | None
) -> None:
    with two_nodes(tmp_path) as nodes:
        said = run(nodes, program, model, tmp_path / "ranks", ranks=(0, 1), options=OPTIONS, environment=keys(KEY, key))
    for one in said:
        assert one["kind"] == ("PlanMismatchError" if program == REFUSED else "PeerError"), one
        assert "PENSTOCK_PEER_KEY differs" in one["text"], one
        assert one["seconds"] < 30, one
        assert not any(secret in json for secret in (KEY, OTHER) for json in (one["text"], one["log"]))


def test_a_port_that_a_firewall_drops_is_named_in_time(model: Path, tmp_path: Path) -> None:
    """Rank 0 listens at ports that its own firewall does not let in."""
    closed = {"PENSTOCK_PORTS": "41000-41063"}
    options = {name: value for name, value in OPTIONS.items() if name != "ports"}
    with two_nodes(tmp_path) as nodes:
        environment = [closed, {"PENSTOCK_PORTS": PORTS}]
        said = run(nodes, REFUSED, model, tmp_path / "ranks", ranks=(0, 1), options=options, environment=environment)
        assert nodes[0].dropped() > 0
    for one in said:
        assert one["kind"] == "PeerError", one
        assert "cannot be reached at 198.18.0.1:41" in one["text"], one
        assert "firewall" in one["text"] and "ports=" in one["text"], one
        assert one["seconds"] < 30, "long before join_timeout"


def test_strangers_of_the_other_machine_do_not_hold_up_a_load(model: Path, tmp_path: Path) -> None:
    """They connect to every port of the range, and say nothing, garbage, or half of what a rank says."""
    program = """
    import socket, threading
    over = threading.Event()
    def strange():
        kept = []
        while not over.is_set():
            for port in range(40000, 40064):
                for text in (b"", b"GET / HTTP/1.1\\r\\n\\r\\n", b"penstock" + bytes(16)):
                    try:
                        one = socket.create_connection((at, port), 1)
                        one.sendall(text)
                        kept.append(one)
                    except OSError:
                        pass
            del kept[:-400]
    thread = threading.Thread(target=strange)
    if rank == 1:
        thread.start()
    try:
        checkpoint = penstock.open(path)
        said["tensors"] = [same(checkpoint.load(group=group, options=options)) for _ in range(3)]
    finally:
        over.set()
        if rank == 1:
            thread.join()
    """
    with two_nodes(tmp_path) as nodes:
        said = run(
            nodes, program, model, tmp_path / "ranks", ranks=(0, 1), options={**OPTIONS, "peer_timeout": 10},
            environment=keys(KEY, KEY),
        )  # fmt: skip
    assert [one["tensors"] for one in said] == [[16] * 3] * 2


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert not [name for name in Path("/run/netns").iterdir() if name.name.startswith(f"penstock{os.getpid()}")]
