"""Loads of every kind in which ranks of one machine share slabs: the bytes are right, and no slab stays behind."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks_together import Ranks
from safetensors.torch import save_file
from slab_traces import TRACES

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

SIZE = 4

#: Each program loads with these options, and leaves bytes that were lent in `lent`.
PRELUDE = f"""{TRACES}
checkpoint, lent = penstock.open(path), []
options = {{"cache": "keep", "extent": 1 << 20, "staging": 16 << 20}}

def loaded(found, slices=None):
    exchange = checkpoint.last_report.exchange
    lent.append(exchange["lent_bytes"])
    assert exchange["lent_bytes"] == exchange["sent_bytes"]
    assert checkpoint.last_report.fallbacks == []
    assert same(found, slices) == len(checkpoint)

def settled_slabs():
    limit = time.monotonic() + 5
    while slab_traces():
        assert time.monotonic() < limit, slab_traces()
        time.sleep(0.01)
"""

WAYS = {
    "stream": """
        for window in (1, 4 << 20, 1 << 30):
            loaded(dict(checkpoint.stream(group=group, window=window, options=options)))
        loaded(dict(checkpoint.stream(slices=sharded, group=group, window=4 << 20, options=options)), sharded)
    """,
    "strided": """
        into = {}
        for name in checkpoint:
            shape = checkpoint[name].shape
            into[name] = torch.empty(shape[::-1], dtype=penstock.torch_dtype(checkpoint[name].dtype)).t()
        checkpoint.load_into(into, group=group, options=options)
        loaded(into)
    """,
    "cast": """
        into = [penstock.Destination(name, torch.empty(checkpoint[name].shape, dtype=torch.float64), cast=True)
                for name in checkpoint]
        checkpoint.load_into(into, group=group, options=options)
        wide = {one.name: one.into for one in into}
        narrow = {name: tensor.to(penstock.torch_dtype(checkpoint[name].dtype)) for name, tensor in wide.items()}
        loaded(narrow)
    """,
    "node": """
        from penstock import _group
        _group._machine = lambda: f"machine {rank // 2}"
        loaded(checkpoint.load(group=group, options={**options, "scope": "node"}))
        assert checkpoint.last_report.exchange["ranks"] == 2
        loaded(checkpoint.load(slices=sharded, group=group, options={**options, "scope": "node"}), sharded)
    """,
    "again and again": """
        loaded(checkpoint.load(group=group, options=options))
        left = counted()
        for number in range(6):
            slices = sharded if number % 2 else None
            loaded(checkpoint.load(slices=slices, group=group, options=options), slices)
            settled(left)
    """,
    "two groups of a process": """
        jobs = [checkpoint.start(group=(dist.PrefixStore(name, store), rank, size), options=options) for name in "ab"]
        for job in jobs:
            found = job.result()
            loaded(found)
    """,
    "two groups beside each other": """
        half = dist.PrefixStore(str(rank % 2), store)
        for _ in range(3):
            loaded(checkpoint.load(group=(half, rank // 2, size // 2), options=options))
    """,
    "two files at once": """
        job = checkpoint.start(group=(dist.PrefixStore("file", store), rank, size), options=options)
        other = penstock.open(path)
        found = dict(other.stream(group=(dist.PrefixStore("stream", store), rank, size), options=options))
        assert same(found) == len(other)
        loaded(job.result())
    """,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 MB. Names tell how tensor-parallel ranks divide them (`sharded`)."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(4):
        tensors[f"{layer}.up"] = torch.randn(1024, 1024, generator=generator).to(torch.bfloat16)
        tensors[f"{layer}.down"] = torch.randn(512, 1024, generator=generator)
        tensors[f"{layer}.all"] = torch.randn(1024, 1024, generator=generator).to(torch.float16)
    path: Path = tmp_path_factory.mktemp("ways") / "model.safetensors"
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("way", WAYS)
def test_slabs_serve_loads_of_every_kind_and_none_stays(together: Callable[..., Ranks], model: Path, way: str) -> None:
    program = PRELUDE + textwrap.dedent(WAYS[way]) + "\nsettled_slabs()\nsaid['lent'] = lent\n"
    with together(program, SIZE, model) as ranks:
        lent = [one["lent"] for one in ranks.all()]
    assert all(sum(loads) > 0 for loads in zip(*lent, strict=True)) and all(map(sum, lent)), lent


ENDED = """
from penstock import _group

def late(*args, agree=_group.Rendezvous.agree):
    agreed = agree(*args)
    if rank == 3 and "late" not in said:
        said["late"] = True
        hold("late")
    return agreed

_group.Rendezvous.agree = late
job = checkpoint.start(group=group, options={**options, "peer_timeout": 3.0})
if rank == 1:
    while not any("penstock-slab" in line for line in open("/proc/self/maps")):
        time.sleep(0.002)
    left = slab_traces()
    assert left[0].startswith("/memfd:") and "@penstock-" in left[-1], left
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    job.cancel()
    write(folder, "cancelled.1")
try:
    job.result()
except (penstock.PeerError, penstock.CancelledError) as error:
    said["error"] = str(error)
settled_slabs()
if rank != 1:
    others = [other for other in range(size) if other != 1]
    loaded(checkpoint.load(group=(dist.PrefixStore("again", store), others.index(rank), 3), options=options))
    settled_slabs()
said["lent"] = lent
"""


@pytest.mark.parametrize("killed", [True, False])
def test_a_load_that_fails_in_the_middle_leaves_no_slab(
    together: Callable[..., Ranks], model: Path, killed: bool
) -> None:
    """While slabs wait for a rank that is late, one of those that have lent them is killed, or cancels its load."""
    with together(PRELUDE + ENDED, SIZE, model, killed=killed) as ranks:
        ranks.held("late", [3])
        if killed:
            ranks.ended(1)
        else:
            ranks.held("cancelled", [1])
        ranks.release("late")
        for rank in (0, 2, 3):
            said = ranks.said(rank)
            assert "rank 1" in said["error"] and said["lent"][0] > 0, said
        if not killed:
            assert ranks.said(1)["lent"] == []


CLOSED = """
stream = checkpoint.stream(group=group, window=2 << 20, options={**options, "peer_timeout": 10.0})
found = {}
try:
    for name, tensor in stream:
        found[name] = tensor
        if rank == 1 and len(found) == 3:
            stream.close()
            break
except penstock.PeerError as error:
    said["error"] = str(error)
assert same(found) == len(found) >= (3 if rank == 1 else 1)
settled_slabs()
loaded(checkpoint.load(group=(dist.PrefixStore("again", store), rank, size), options=options))
settled_slabs()
said["lent"] = lent
"""


def test_a_rank_that_closes_its_stream_early_leaves_no_slab_to_others(
    together: Callable[..., Ranks], model: Path
) -> None:
    with together(PRELUDE + CLOSED, SIZE, model) as ranks:
        said = ranks.all()
    assert ["rank 1" in one.get("error", "") for one in said] == [True, False, True, True]
    assert all(one["lent"][0] > 0 for one in said)
