"""Ranks of one machine that cannot share slabs with one of them: its bytes go through sockets, and reports say why."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import penstock
import pytest
from ranks_together import Ranks
from safetensors.torch import save_file
from slab_traces import TRACES

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

SIZE = 4
HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    """20 MB, for everybody to read: a rank may be another user."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{i}": torch.randint(0, 255, (1 << 20,), dtype=torch.uint8, generator=generator) for i in range(20)}
    path = folder / "model.safetensors"
    save_file(tensors, path)
    path.chmod(0o644)
    yield path
    shutil.rmtree(folder)


@dataclass(frozen=True)
class Refused:
    """What one rank is refused before its load."""

    #: The rank, and what happens there
    rank: int
    does: str
    #: Others to which it cannot lend, and from which it cannot borrow
    to: tuple[int, ...]
    of: tuple[int, ...]
    #: What its report says, and what theirs say (patterns); empty: nothing
    says: str
    others_say: str
    options: str = "{}"
    afterwards: str = ""


OTHERS = {rank: tuple(other for other in range(SIZE) if other != rank) for rank in range(SIZE)}
FILES = r"cannot make memory that other processes can map \(memfd_create\): "
REFUSED = {
    "files in memory": Refused(
        1, "refuse(Refusal('memfd_create'))", OTHERS[1], OTHERS[1],
        FILES + "Operation not permitted", "rank 1 shares no slabs: " + FILES,
    ),
    "sockets": Refused(
        2, "refuse(Refusal('socket', argument=0, value=socket.AF_UNIX))", OTHERS[2], OTHERS[2],
        "cannot open a unix socket: Operation not permitted", "rank 2 shares no slabs: cannot open a unix socket",
    ),
    # The later one of two ranks connects. An address of 44 bytes is that of a neighbour
    "connections": Refused(
        2, "refuse(Refusal('connect', argument=2, value=44))", (0, 1), (0, 1),
        "connect to the unix socket of another rank: Operation not permitted",
        "connect to the unix socket of another rank: Operation not permitted",
    ),
    "descriptors of connections": Refused(
        1, "refuse(Refusal('accept4', errno.EMFILE, argument=3, bit=socket.SOCK_NONBLOCK))", (2, 3), (2, 3),
        "cannot accept a connection of another rank: Too many open files",
        # It hears why, or finds out before
        "rank 1 shares no slabs with this one: cannot accept|Connection refused|has closed its link|reset by peer",
    ),
    "mappings": Refused(
        1, "refuse(Refusal('fcntl', argument=1, value=fcntl.F_GET_SEALS))", (), OTHERS[1],
        "its size is not sealed", "rank 1 refuses them: ",
    ),
    "the same user": Refused(
        1, "os.seteuid(65534)", OTHERS[1], OTHERS[1],
        "another user's process listens there", "another user's process", afterwards="os.seteuid(0)",
    ),
    "by its options": Refused(3, "pass", OTHERS[3], OTHERS[3], "", "", options="{'shared_slabs': False}"),
}  # fmt: skip

PROGRAM = f"""{TRACES}
import errno, fcntl, resource, socket, sys
sys.path.insert(0, here)
from refusals import Refusal, refuse
checkpoint = penstock.open(path)
options = {{"cache": "keep", "gap": 0, "extent": 1 << 20}}
checkpoint.load(names=["0"], group=group, options=options)
if rank == refused:
    options.update(eval(more))
    exec(does)
found = checkpoint.load(group=group, options=options)
if rank == refused:
    exec(afterwards)
report = checkpoint.last_report
routes = {{lane: way["bytes"] for lane, way in report.routes.items()}}
said.update(tensors=same(found), exchange=report.exchange, fallbacks=report.fallbacks)
said.update(socket=routes.pop("rank"), slab=routes.pop("neighbour"), own=sum(routes.values()) - report.slack_bytes)
said["left"] = slab_traces()
"""


@pytest.mark.parametrize("what", REFUSED)
def test_bytes_to_and_from_a_rank_that_is_refused_something_go_through_sockets(
    together: Callable[..., Ranks], model: Path, what: str
) -> None:
    one = REFUSED[what]
    if "seteuid" in one.does and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    given = {"refused": one.rank, "does": one.does, "more": one.options, "afterwards": one.afterwards, "here": HERE}
    with together(PROGRAM, SIZE, model, **given) as ranks:
        said = ranks.all()
    checkpoint = penstock.open(model)
    assert [found["tensors"] for found in said] == [len(checkpoint)] * SIZE
    assert sum(found["own"] for found in said) == checkpoint.nbytes
    far = {(one.rank, other) for other in one.to} | {(other, one.rank) for other in one.of}
    for rank, found in enumerate(said):
        # Every rank wants everything, so it gets all that another one reads
        by_socket = sum(said[other]["own"] for other in OTHERS[rank] if (other, rank) in far)
        assert (found["socket"], found["socket"] + found["slab"]) == (by_socket, checkpoint.nbytes - found["own"])
        through_sockets = found["own"] * sum((rank, other) in far for other in OTHERS[rank])
        exchanged = found["exchange"]
        assert exchanged["sent_bytes"] == (SIZE - 1) * found["own"]
        assert exchanged["lent_bytes"] == exchanged["sent_bytes"] - through_sockets
        assert found["left"] == []
    for rank, found in enumerate(said):
        reasons = [each["reason"] for each in found["fallbacks"]]
        assert all((each["from"], each["to"]) == ("shared slabs", "sockets") for each in found["fallbacks"])
        concerned = rank == one.rank or rank in one.to + one.of
        says = (one.says if rank == one.rank else one.others_say) if concerned else ""
        assert bool(reasons) == bool(says), (rank, reasons)
        assert all(re.search(says, reason) for reason in reasons) and len(set(reasons)) == len(reasons), (rank, reasons)


MAPPED = f"""{TRACES}
import resource
from penstock import _group
checkpoint = penstock.open(path)
destination = {{name: torch.empty(checkpoint[name].shape, dtype=torch.uint8) for name in checkpoint}}
checkpoint.load_into(destination, group=group, options=options)
for tensor in destination.values():
    tensor.zero_()
penstock._core.release_staging()

def late(*args, agree=_group.Rendezvous.agree):
    agreed = agree(*args)
    if rank != 1:
        hold("late")
    return agreed

def limits():
    while not any("penstock-slab" in line for line in open("/proc/self/maps")):
        time.sleep(0.002)
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + (7 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    write(folder, "limited.1")

_group.Rendezvous.agree = late
if rank == 1:
    threading.Thread(target=limits).start()
report = checkpoint.load_into(destination, group=group, options=options)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
said.update(tensors=same(destination), exchange=report.exchange, left=slab_traces())
said["reasons"] = [each["reason"] for each in report.fallbacks if each["from"] == "shared slabs"]
said.update(socket=report.routes["rank"]["bytes"], slab=report.routes["neighbour"]["bytes"])
"""


def test_a_rank_without_addresses_for_neighbours_slabs_gets_their_bytes_through_sockets(
    together: Callable[..., Ranks], model: Path
) -> None:
    """The others are late. When the rank has slabs of its own it has no addresses left for 8 MiB more."""
    options = {"cache": "keep", "gap": 0, "extent": 8 << 20, "staging": 256 << 20, "stall_timeout": 600}
    with together(MAPPED, SIZE, model, options=options) as ranks:
        ranks.held("late", OTHERS[1])
        ranks.held("limited", [1])
        ranks.release("late")
        said = ranks.all()
    assert [(one["tensors"], one["left"]) for one in said] == [(len(penstock.open(model)), [])] * SIZE
    assert [one["slab"] == 0 for one in said] == [False, True, False, False]
    assert [one["socket"] == 0 for one in said] == [True, False, True, True]
    assert len(said[1]["reasons"]) == 1 and "Cannot allocate memory" in said[1]["reasons"][0], said[1]
    for rank in OTHERS[1]:
        assert said[rank]["reasons"] == [f"rank 1 refuses them: {said[1]['reasons'][0]}"], said[rank]


FEW_DESCRIPTORS = f"""{TRACES}
import resource
checkpoint = penstock.open(path)
options = {{"cache": "keep", "extent": 1 << 20, "staging": 16 << 20, "peer_timeout": 20.0}}
same(checkpoint.load(group=group, options=options))
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
outcomes = []
for number, more in enumerate(rooms):
    if rank == 1:
        most = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + more, hard))
    try:
        found = checkpoint.load(group=(dist.PrefixStore(str(number), store), rank, size), options=options)
        outcomes.append(checkpoint.last_report.exchange["lent_bytes"])
    except (penstock.PenstockError, OSError) as error:
        found = {{}}
        outcomes.append(f"{{type(error).__name__}}: {{error}}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    same(found)
    assert slab_traces() == [], (more, slab_traces())
said["outcomes"] = outcomes
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rooms", [[12, 24, 100], list(range(12, 50, 2))], ids=["few", "many"])
def test_a_rank_with_too_few_descriptors_loads_or_says_so_and_nobody_hangs(
    together: Callable[..., Ranks], model: Path, rooms: list[int]
) -> None:
    with together(FEW_DESCRIPTORS, SIZE, model, rooms=rooms) as ranks:
        said = [one["outcomes"] for one in ranks.all()]
    for room, *outcomes in zip(rooms, *said, strict=True):
        failed = [isinstance(outcome, str) for outcome in outcomes]
        assert len(set(failed)) == 1, (room, outcomes)
        assert not failed[0] or "Too many open files" in outcomes[1], (room, outcomes)
    assert not isinstance(said[1][-1], str) and said[1][-1] > 0, said
