"""Processes that are no ranks of a load connect where its ranks wait for neighbours: they are turned away."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from ranks_together import Ranks, until
from slab_traces import TRACES

pytest.importorskip("torch.distributed")

SIZE = 4
LAST = SIZE - 1

#: The last rank is the one that connects to all others. It is late.
RANK = f"""{TRACES}
import resource
from penstock import _group
checkpoint = penstock.open(path)
options = {{"cache": "keep", "stall_timeout": 600}}
checkpoint.load(names=["0"], group=group, options=options)

def late(*args, agree=_group.Rendezvous.agree):
    agreed = agree(*args)
    if rank == size - 1:
        hold("late")
    return agreed

_group.Rendezvous.agree = late
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
found = checkpoint.load(group=group, options=options)
report = checkpoint.last_report
said.update(tensors=same(found), exchange=report.exchange, fallbacks=report.fallbacks)
said.update(socket=report.routes["rank"]["bytes"], left=slab_traces())
"""

STRANGER = """
import resource, socket
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
if user:
    os.seteuid(user)

def connected(name):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.settimeout(60)
    one.connect("\\0" + name)
    return one

def turned_away(one):
    try:
        return one.recv(512) == b""
    except ConnectionResetError:
        return True

held = [connected(name) for _ in range(count) for name in names]
for one in held if words else ():
    try:
        one.send(bytes(words))
    except OSError:
        pass  # it is closed already
said["turned away"] = sum(turned_away(one) for one in held) if words or user else None
os.seteuid(0) if user else None
hold("there")
"""


@pytest.fixture(scope="module")
def model(scratch: Path) -> Iterator[Path]:
    """21 MB."""
    file = synth.write_file(scratch / "strangers.safetensors", [Tensor(f"{i}", "U8", (1 << 20,)) for i in range(20)])
    yield file
    file.unlink()


def listener(pid: int) -> str | None:
    """The abstract name at which a process waits for its neighbours."""
    process = Path(f"/proc/{pid}")
    mine = {str(fd.readlink()) for fd in (process / "fd").iterdir()}
    for line in (process / "net/unix").read_text().splitlines():
        fields = line.split()
        # With the flag of a socket that accepts
        if fields[-1].startswith("@penstock-") and fields[3] == "00010000" and f"socket:[{fields[6]}]" in mine:
            return fields[-1].removeprefix("@")
    return None


HELLO = [0, LAST, 0, 0, 0, *range(16)]
#: User, how many at each of these ranks, and their words.
STRANGERS: dict[str, tuple[int, int, tuple[int, ...], list[int]]] = {
    "of another user": (65534, 10, (0, 1, 2), []),
    "without the secret": (0, 10, (0, 1, 2), HELLO + [7] * 16),
    "that say something else": (0, 10, (0, 1, 2), [9] * 40),
    "that welcome": (0, 10, (0, 1, 2), [1]),
    "that are silent": (0, 1000, (0,), []),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strangers", STRANGERS)
def test_strangers_are_turned_away_and_keep_no_neighbour_from_linking(
    together: Callable[..., Ranks], model: Path, strangers: str
) -> None:
    user, count, at, words = STRANGERS[strangers]
    if user and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with together(RANK, SIZE, model) as ranks:
        ranks.held("late", [LAST])
        until(lambda: all(listener(ranks.pids[rank]) for rank in at))
        names = [listener(ranks.pids[rank]) for rank in at]
        with together(STRANGER, 1, model, names=names, user=user, count=count, words=words) as others:
            others.held("there")
            descriptors = [len(list(Path(f"/proc/{ranks.pids[rank]}/fd").iterdir())) for rank in at]
            ranks.release("late")
            said = ranks.all()
            others.release("there")
            turned_away = others.said(0)["turned away"]
    assert turned_away == (count * len(at) if words or user else None)
    assert all(number < 200 for number in descriptors), descriptors
    for one in said:
        assert (one["tensors"], one["socket"], one["fallbacks"], one["left"]) == (20, 0, [], [])
        assert one["exchange"]["lent_bytes"] == one["exchange"]["sent_bytes"] > 0
