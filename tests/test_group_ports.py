"""Where ranks listen (`ports=`, `bind=`), and the key that shows that they belong together (`PENSTOCK_PEER_KEY`)."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import penstock
import pytest
from penstock import Options, _core
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from ranks_together import Ranks

KEY, OTHER = "a key that all ranks have", "a key that only one rank has"

#: The ports at which this process listens, of which a load of `group` within `joined` has four.
LISTENS = """
def listens():
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass  # that of this listing
    found = []
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/self/net/{table}").readlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.append([words[1].split(":")[0], int(words[1].split(":")[1], 16)])
    return found

checkpoint, during = penstock.open(path), []
from penstock import _group
def join(*args, compare=_group._compare_keys):
    during[:] = listens()  # its seat is taken
    compare(*args)
"""

#: What becomes of a load, a stream and a meeting.
REFUSED = """
def refused(call):
    try:
        call()
    except penstock.PenstockError as error:
        return [type(error).__name__, str(error)]
    return [None, ""]

def joins():
    with penstock.joined(group, options=options):
        pass
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = [Tensor(f"{number}", "U8", (1 << 16,)) for number in range(8)]
    return synth.write_file(tmp_path_factory.mktemp("ports") / "model.safetensors", tensors)


@contextlib.contextmanager
def taken(ports: range, host: str = "127.0.0.1") -> Iterator[None]:
    """Another program listens there. Raises OSError if a port is taken already."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()
        yield


@contextlib.contextmanager
def some(count: int, others: int = 0) -> Iterator[tuple[str, range]]:
    """A range of so many ports, of which another program has the first `others`; none that the kernel gives out."""
    for _ in range(200):
        first = random.randrange(10_000, 30_000)
        ports = range(first, first + count)
        with contextlib.suppress(OSError):
            with taken(ports):
                pass
            with taken(ports[:others]):
                yield f"{ports[0]}-{ports[-1]}", ports[others:]
                return
    pytest.skip(f"there are no {count} free ports in a row")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"ports": "40000"}, "must be a range"),
        ({"ports": "40100-40000"}, "lower port"),
        ({"ports": "40000-40000"}, "two ports or more"),
        ({"ports": "0-40000"}, "must be a range"),
        ({"ports": "40000-65536"}, "must be a range"),
        ({"ports": "40000 - 40100"}, "must be a range"),
        ({"bind": "0.0.0.0"}, "others can reach"),
        ({"bind": "fe80::1"}, "link-local"),
        ({"bind": "10.0.0.7:40000"}, "must be an address"),
        ({"bind": "eth 0"}, "must be an address"),
        ({"bind": "eth0:"}, "must be an address"),
    ],
)
def test_what_is_no_range_of_ports_and_no_place_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Options(**wrong)


def test_ports_are_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="ports must be a string"):
        Options(ports=40000)  # type: ignore[arg-type]
    monkeypatch.setenv("PENSTOCK_PORTS", "40000-40100")
    monkeypatch.setenv("PENSTOCK_BIND", "lo")
    assert (Options().ports, Options().bind, Options(ports="", bind="::1").ports) == ("40000-40100", "lo", "")


def test_ranks_of_one_machine_listen_at_different_ports_of_the_range(
    together: Callable[..., Ranks], model: Path
) -> None:
    """Three at once, in a range that has two ports more than they need, and of which another program has four."""
    program = LISTENS + textwrap.dedent("""
    _group._compare_keys = join
    with penstock.joined(group, options=options):
        said["tensors"] = same(checkpoint.load(group=group, options=options))
        said["during"] = list(during)
    said["streamed"] = same(dict(checkpoint.stream(group=group, options=options)))
    said["left"] = listens()
    """)
    with (
        some(18, 4) as (ports, free),
        together(program, 3, model, options={"ports": ports, "bind": "127.0.0.1", "exchange": "on"}) as ranks,
    ):
        said = ranks.all()
    assert [(one["tensors"], one["streamed"], one["left"]) for one in said] == [(8, 8, [])] * 3
    found = [[port for _, port in one["during"]] for one in said]
    assert all(set(ports) <= set(free) for ports in found), "outside of the range"
    # The question whether it is there, for `joined`, whose connections are made by then; and two for the load
    assert [len(set(ports)) for ports in found] == [3, 3, 3]
    assert len(set().union(*found)) == 9, "a port of two ranks"


def test_a_range_that_is_full_is_named(together: Callable[..., Ranks], model: Path) -> None:
    program = REFUSED + textwrap.dedent("""
    said["error"] = refused(lambda: penstock.open(path).load(group=group, options=options if rank else {}))
    """)
    with (
        some(4, 3) as (ports, _),
        together(program, 2, model, options={"ports": ports}) as ranks,
    ):
        said = ranks.all()
    kind, text = said[1]["error"]
    assert kind == "LimitError" and f"ports={ports}" in text and "4 ports of this range are taken" in text, text
    kind, text = said[0]["error"]
    assert kind == "PeerError" and f"ports={ports}" in text, "the others hear why it does not come"


@pytest.mark.parametrize("bind", ["127.0.0.1", "lo", "::1"])
def test_ranks_listen_where_they_are_told_to(together: Callable[..., Ranks], model: Path, bind: str) -> None:
    if bind == "::1":
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
    program = LISTENS + textwrap.dedent("""
    _group._compare_keys = join
    said["tensors"] = same(checkpoint.load(group=group, options={"bind": bind}))
    said["at"] = sorted({at for at, _ in during})
    """)
    with together(program, 2, model, bind=bind) as ranks:
        said = ranks.all()
    at = "00000000000000000000000001000000" if bind == "::1" else "0100007F"
    assert [(one["tensors"], one["at"]) for one in said] == [(8, [at])] * 2


def test_an_address_has_the_label_that_linux_gives_it_in_place_of_the_interface() -> None:
    """What `ifconfig eth0:1` and `ip address add ... label eth0:1` make."""
    network = ["unshare", "--net"]
    try:
        subprocess.run([*network, "ip", "link"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespaces here")
    made = 'ip address add 127.0.0.9/8 dev lo label lo:1 && ip link set lo up && exec "$@"'
    program = "from penstock import _group; print([_group._address_of(name) for name in ('lo', 'lo:1')])"
    command = [*network, "sh", "-c", made, "-", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "['127.0.0.1', '127.0.0.9']\n", done.stderr


@pytest.mark.parametrize(("bind", "why"), [("none0", "no interface"), ("192.0.2.1", "does not have this address")])
def test_a_place_of_another_machine_is_refused_with_those_there_are(
    together: Callable[..., Ranks], model: Path, bind: str, why: str
) -> None:
    program = REFUSED + textwrap.dedent("""
    said["error"] = refused(lambda: penstock.open(path).load(group=group, options={"bind": bind}))
    """)
    with together(program, 2, model, bind=bind) as ranks:
        said = ranks.all()
    for one in said:
        kind, text = one["error"]
        assert kind in ("InvalidError", "PeerError") and why in text and "lo (127.0.0.1)" in text, text
    assert any(one["error"][0] == "InvalidError" for one in said)


def test_ranks_with_one_key_load_and_nobody_sees_it(
    together: Callable[..., Ranks], model: Path, tmp_path: Path
) -> None:
    """One has it in a file. All that goes through the store is looked at, and all that the load says."""
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    program = """
    import logging
    class Seen:
        "The store, which remembers what is said there."
        def __init__(self, store):
            self.underlying_store, self.said = store, []
        def __getattr__(self, name):
            what = getattr(self.underlying_store, name)
            def asked(*args):
                found = what(*args)
                self.said.append(f"{name}{args} {found}")
                return found
            return asked if callable(what) else what
    if rank == 0:
        os.environ["PENSTOCK_PEER_KEY_FILE"] = file
    else:
        os.environ["PENSTOCK_PEER_KEY"] = key
    seen = Seen(store)
    group = (seen, rank, size)
    with penstock.joined(group):
        checkpoint = penstock.open(path)
        said["tensors"] = same(checkpoint.load(group=group, options={"exchange": "on"}))
        said["streamed"] = same(dict(checkpoint.stream(group=group)))
    said["seen"] = "".join(seen.said)
    known = penstock._core.Pass(rank, bytes(16))
    said["shown"] = f"{checkpoint.last_report} {penstock.Options()} {known!r} {vars(penstock._group)}"
    from penstock._doctor import environment
    import re
    said["doctor"] = str(environment(re.compile("PENSTOCK_")))
    """
    with together(program, 3, model, key=KEY, file=str(file)) as ranks:
        said = ranks.all()
    assert [(one["tensors"], one["streamed"]) for one in said] == [(8, 8)] * 3
    for one in said:
        assert "rank/0" in one["seen"], "the store was looked at"
        for text in (one["seen"], one["shown"], one["doctor"]):
            assert KEY not in text and KEY.encode().hex() not in text
        assert "PENSTOCK_PEER_KEY" in one["doctor"]


@pytest.mark.parametrize("mine", [OTHER, None], ids=["another", "none"])
def test_a_wrong_key_is_refused_by_name_on_all_ranks(
    together: Callable[..., Ranks], model: Path, mine: str | None
) -> None:
    program = REFUSED + textwrap.dedent("""
    key = mine if rank == 1 else key
    if key is not None:
        os.environ["PENSTOCK_PEER_KEY"] = key
    checkpoint, options = penstock.open(path), {"exchange": "on"}
    said["load"] = refused(lambda: checkpoint.load(group=group, options=options))
    said["stream"] = refused(lambda: dict(checkpoint.stream(group=group, options=options)))
    said["joined"] = refused(joins)
    """)
    with together(program, 3, model, key=KEY, mine=mine) as ranks:
        said = ranks.all()
    for one in said:
        for kind, text in one.values():
            assert kind == "PlanMismatchError" and "PENSTOCK_PEER_KEY differs: rank 1 " in text, text
            assert KEY not in text and OTHER not in text


@pytest.mark.parametrize("mine", [OTHER, None], ids=["another", "none"])
def test_connections_refuse_a_wrong_key_whatever_the_store_says(
    together: Callable[..., Ranks], model: Path, mine: str | None
) -> None:
    program = REFUSED + textwrap.dedent("""
    from penstock import _group
    _group._compare_keys = lambda *_: None
    key = mine if rank == 1 else key
    if key is not None:
        os.environ["PENSTOCK_PEER_KEY"] = key
    options = {"exchange": "on", "join_timeout": 600, "peer_timeout": 60}
    said["load"] = refused(lambda: penstock.open(path).load(group=group, options=options))
    said["joined"] = refused(joins)
    """)
    with together(program, 2, model, key=KEY, mine=mine) as ranks:
        said = ranks.all()
    for one in said:
        for kind, text in one.values():
            assert kind == "PeerError" and "PENSTOCK_PEER_KEY differs" in text, text


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"PENSTOCK_PEER_KEY": "hunter2"}, "PENSTOCK_PEER_KEY has 7 bytes"),
        ({"PENSTOCK_PEER_KEY": ""}, "PENSTOCK_PEER_KEY is empty"),
        ({"PENSTOCK_PEER_KEY": KEY, "PENSTOCK_PEER_KEY_FILE": "/dev/null"}, "are both set"),
        ({"PENSTOCK_PEER_KEY_FILE": "/dev/null"}, "/dev/null: PENSTOCK_PEER_KEY_FILE is empty"),
        ({"PENSTOCK_PEER_KEY_FILE": "/none/here"}, "/none/here: cannot read PENSTOCK_PEER_KEY_FILE"),
    ],
)
def test_a_key_that_is_none_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], why: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(penstock.PenstockError, match=why) as refused:
        _core.Pass(0, bytes(16))
    assert "hunter2" not in str(refused.value) and KEY not in str(refused.value)
