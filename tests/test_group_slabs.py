"""Ranks of one machine that share slabs: bytes from storage, through sockets, into slabs and to their places; memory.

The kernel counts bytes of disks (`read_bytes`) and of the loopback device, the server bytes of a bucket, the fake
driver bytes that go to a GPU, and Penstock's reports all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import fakegpu
import pagecache
import penstock
import pytest
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from ranks_together import Ranks, until
from s3_server import KEYS, Answer, Bucket, serving
from test_group_memory import GPU_PROGRAM, LATE, SCRATCH, growth_has_ended

sys.path.append(str(Path(__file__).parent.parent / "tools/pod"))
from memory import Group, NoGroup

MIB = 1 << 20
KEY, SECRET = next(iter(KEYS.items()))
#: The layouts, and how many ranks have each.
RANKS = {"tensor parallel": 8, "replicas": 4}


def written(path: Path, layers: int) -> Path:
    tensors: list[Tensor] = []
    for layer in range(layers):
        tensors += [
            Tensor(f"{layer}.norm", "BF16", (2048,)),
            Tensor(f"{layer}.columns", "BF16", (1024, 2048)),
            Tensor(f"{layer}.rows", "BF16", (1024, 2048)),
        ]
    return synth.write_file(path, tensors)


@pytest.fixture(scope="module")
def few(scratch: Path) -> Iterator[Path]:
    """34 MB, half of it in matrices whose columns are divided."""
    file = written(scratch / "group-slabs.safetensors", 4)
    yield file
    file.unlink()


@pytest.fixture(scope="module")
def many(scratch: Path) -> Iterator[Path]:
    """269 MB."""
    file = written(scratch / "group-slabs-many.safetensors", 32)
    yield file
    file.unlink()


PROGRAM = """
def divided(info):
    if len(info.shape) < 2:
        return None
    return (slice(None), of(info.shape[1])) if info.name.endswith("columns") else of(info.shape[0])

slices = None if layout == "replicas" else divided
checkpoint = penstock.open(source, storage=storage)
destination = {}
for name in checkpoint if into else ():
    cut = (slices and slices(checkpoint[name])) or slice(None)
    destination[name] = torch.empty(torch.empty(checkpoint[name].shape, device="meta")[cut].shape, dtype=torch.bfloat16)
# What the first load of a process sets up
checkpoint.load(names=["0.norm"], group=group)
hold("ready")
if into:
    report, found = checkpoint.load_into(destination, slices=slices, group=group, options=options), destination
else:
    found = checkpoint.load(slices=slices, group=group, options=options)
    report = checkpoint.last_report
hold("loaded")
said.update(tensors=same(found, slices), nbytes=report.nbytes, exchange=report.exchange, fallbacks=report.fallbacks)
said["routes"] = {lane: way["bytes"] for lane, way in report.routes.items()}
said["received"] = report.network and report.network["received_bytes"]
"""


@cache
def can_fence() -> bool:
    """Whether this user may make a network namespace."""
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "--net", "true"], capture_output=True).returncode == 0


def judge(said: list[dict[str, Any]], nbytes: int, layout: str) -> None:
    """Judges the reports of ranks that have loaded `nbytes` together: bytes into slabs, and between ranks."""
    exchanged = [one["exchange"] for one in said]
    sockets = sum(one["sent_bytes"] - one["lent_bytes"] for one in exchanged)
    assert sockets < 0.01 * nbytes, exchanged
    by_lane = {lane: sum(one["routes"][lane] for one in said) for lane in said[0]["routes"]}
    from_ranks = by_lane.pop("rank") + by_lane.pop("neighbour")
    assert nbytes <= sum(by_lane.values()) <= 1.01 * nbytes, by_lane
    assert sum(one["received_bytes"] for one in exchanged) == sum(one["sent_bytes"] for one in exchanged)
    assert all(one["lent_bytes"] > 0 for one in exchanged)
    if layout == "replicas":
        assert from_ranks == (len(said) - 1) * nbytes
    assert [one["fallbacks"] for one in said] == [[]] * len(said)


@pytest.mark.sampled
@pytest.mark.parametrize("cache", ["keep", "bypass"])
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("layout", RANKS)
def test_a_disk_gives_each_byte_once_and_sockets_carry_none(
    together: Callable[..., Ranks], few: Path, layout: str, into: bool, cache: str
) -> None:
    """A hundredth more is allowed for pages in which two ranks meet; on the wire 1 MiB more, for agreement."""
    size, checkpoint = RANKS[layout], penstock.open(few)
    given = {"source": str(few), "storage": None, "layout": layout, "into": into, "options": {"cache": cache}}
    with together(PROGRAM, size, few, fenced=can_fence(), **given) as ranks:
        ranks.held("ready")
        pagecache.put([few], "cold")
        before, sent = [ranks.read_bytes(rank) for rank in range(size)], ranks.loopback_bytes()
        ranks.release("ready")
        ranks.held("loaded")
        read = sum(ranks.read_bytes(rank) - before[rank] for rank in range(size))
        sent = ranks.loopback_bytes() - sent
        ranks.release("loaded")
        said = ranks.all()
    assert [one["tensors"] for one in said] == [len(checkpoint)] * size
    assert 0.99 * checkpoint.nbytes <= read <= 1.01 * checkpoint.nbytes, (read, checkpoint.nbytes)
    if can_fence():
        assert sent < 0.01 * checkpoint.nbytes + MIB, sent
    judge(said, checkpoint.nbytes, layout)


class Counted(Bucket):
    """A bucket that counts the bytes of objects that it gives."""

    given = 0

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.tags = {key: hashlib.md5(content).hexdigest() for key, content in objects.items()}

    def content(self, key: str, fields: Mapping[str, str]) -> Answer:
        content = self.objects[key]
        first, last = map(int, fields["range"].removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        with self.lock:
            self.given += len(part)
        about = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        return 206, {"ETag": f'"{self.tags[key]}"', "Content-Range": about}, part


@pytest.mark.sampled(1)
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("layout", RANKS)
def test_a_byte_of_a_bucket_is_received_once_per_machine(
    together: Callable[..., Ranks], few: Path, layout: str, into: bool
) -> None:
    size, checkpoint = RANKS[layout], penstock.open(few)
    with serving(Counted({"few.safetensors": few.read_bytes()})) as bucket:
        storage = {"endpoint": bucket.endpoint, "access_key_id": KEY, "secret_access_key": SECRET}
        given = {"source": "s3://bucket/few.safetensors", "storage": storage, "layout": layout, "into": into}
        with together(PROGRAM, size, few, options={}, **given) as ranks:
            ranks.held("ready")
            before = bucket.given
            ranks.release("ready")
            ranks.held("loaded")
            received = bucket.given - before
            ranks.release("loaded")
            said = ranks.all()
    assert [one["tensors"] for one in said] == [len(checkpoint)] * size
    assert checkpoint.nbytes <= received <= 1.01 * checkpoint.nbytes, (received, checkpoint.nbytes)
    assert sum(one["received"] for one in said) == received
    judge(said, checkpoint.nbytes, layout)


@pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("cache", ["keep", "bypass"])
@pytest.mark.parametrize("way", ["tensor parallel", "replicas", "into tensors"])
def test_each_gpu_gets_each_byte_once_out_of_slabs_that_were_written_once(
    together: Callable[..., Ranks], few: Path, way: str, cache: str
) -> None:
    """On the fake driver, which each rank has of its own. It registers a rank's own slabs and its neighbours'."""
    layout, checkpoint = "tensor parallel" if way == "tensor parallel" else "replicas", penstock.open(few)
    size, staging = RANKS[layout], 16 * MIB
    program = f"""{GPU_PROGRAM}
said["exchange"], said["routes"] = report.exchange, {{lane: way["bytes"] for lane, way in report.routes.items()}}
said["mapped"] = [line for line in open("/proc/self/maps") if "penstock-slab" in line]
"""
    given = {"tests": str(Path(__file__).parent), "library": fakegpu.LIBRARY, "layout": layout}
    given["into"] = list(checkpoint) if way == "into tensors" else []
    options = {"staging": staging, "extent": MIB, "cache": cache, "stall_timeout": 600}
    with together(program, size, few, options=options, **given) as ranks:
        said = ranks.all()
    padding = (fakegpu.Pool.ROUNDING + 256) * len(checkpoint)
    for one in said:
        assert one["same"] == one["tensors"] == len(checkpoint)
        assert one["nbytes"] <= one["copied"] <= one["nbytes"] + padding, one
        assert 0 < one["registered"] <= size * staging + SCRATCH
        assert one["misuses"] == one["leaks"] == one["mapped"] == []
        assert set(one["left"].values()) == {0}, one["left"]
    judge(said, checkpoint.nbytes, layout)


HELD = (
    """
checkpoint = penstock.open(path)
checkpoint.load(names=["0.norm"], group=group, options=options)

"""
    + LATE
    + """found = checkpoint.load(group=group, options=options)
said["tensors"] = same(found)
said["staging"], said["fallbacks"] = checkpoint.last_report.peak_staging, checkpoint.last_report.fallbacks
"""
)


def shared_slabs(pid: int) -> dict[str, int]:
    """Bytes of a process' mappings of shared slabs: their resident pages, and their part of each (`Rss`, `Pss`)."""
    found = {"Rss": 0, "Pss": 0}
    of_slab = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split()[0] and " " in name:
            of_slab = "/memfd:penstock-slab" in line
        elif of_slab and name in found:
            found[name] += int(rest.split()[0]) << 10
    return found


def files_in_memory(pid: int) -> dict[int, int]:
    """The shared slabs that a process owns: their inodes, and the bytes that each takes."""
    found = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:penstock-slab" in str(fd.readlink()):
            facts = fd.stat()
            found[facts.st_ino] = facts.st_blocks * 512
    return found


@pytest.mark.parametrize("cache", ["keep", "bypass"])
@pytest.mark.sampled(1)
def test_a_shared_slab_takes_memory_once_however_many_ranks_map_it(
    together: Callable[..., Ranks], many: Path, cache: str
) -> None:
    """Rank 0 is late. The others go on until as many of their slabs as may wait to be taken do wait for it."""
    size, staging = 4, 64 * MIB
    options = {"staging": staging, "extent": MIB, "cache": cache, "stall_timeout": 600}
    with together(HELD, size, many, options=options) as ranks:
        ranks.held("late", [0])
        until(growth_has_ended(ranks.pids[1:]))
        mapped = [shared_slabs(pid) for pid in ranks.pids]
        owned = [files_in_memory(pid) for pid in ranks.pids]
        ranks.release("late")
        said = ranks.all()
    assert [(one["tensors"], one["fallbacks"]) for one in said] == [(len(penstock.open(many)), [])] * size
    together_owned = sum(sum(files.values()) for files in owned)
    assert len({inode for files in owned for inode in files}) == sum(map(len, owned)), "each has one owner"
    assert all(sum(files.values()) <= staging for files in owned), owned
    resident, counted_once = (sum(one[kind] for one in mapped) for kind in ("Rss", "Pss"))
    assert together_owned >= 3 * 4 * MIB
    # The kernel rounds each mapping's part down
    assert 0.99 * together_owned <= counted_once <= together_owned, (mapped, owned)
    assert resident >= 2.5 * counted_once, mapped
    assert all(one["staging"] <= staging for one in said)


LIMITED = """
def divided(info):
    if len(info.shape) < 2:
        return None
    return (slice(None), of(info.shape[1])) if info.name.endswith("columns") else of(info.shape[0])

checkpoint = penstock.open(path)
checkpoint.load(names=["0.norm"], group=group)
penstock._core.release_staging()
hold("ready")
found = checkpoint.load(slices=divided, group=group, options=options)
hold("loaded")
said["tensors"] = same(found, divided)
said["lent"] = checkpoint.last_report.exchange["lent_bytes"]
said["staging"] = checkpoint.last_report.peak_staging
"""


def lift(limited: Group) -> None:
    """Takes a control group's limit away. The limit that counts swap too may not be the lower one."""
    names, most = ("memory.memsw.limit_in_bytes", "memory.limit_in_bytes"), "-1"
    if limited.version == 2:
        names, most = ("memory.swap.max", "memory.max"), "max"
    for name in names:
        with contextlib.suppress(OSError):
            (limited.folder / name).write_text(most)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cache", ["keep", "bypass"])
def test_four_ranks_load_their_parts_in_memory_of_a_quarter_more_than_the_checkpoint(
    together: Callable[..., Ranks], many: Path, cache: str
) -> None:
    """Beside what they have before the load. Pages of the page cache count too, and the kernel takes them back."""
    try:
        limited = Group()
    except NoGroup as error:
        pytest.skip(str(error))
    checkpoint = penstock.open(many)
    try:
        with together(LIMITED, 4, many, options={"cache": cache}) as ranks:
            ranks.held("ready")
            pagecache.put([many], "cold")
            limited.restrict(int(1.25 * checkpoint.nbytes))
            for pid in ranks.pids:
                (limited.folder / "cgroup.procs").write_text(str(pid))
            ranks.release("ready")
            ranks.held("loaded")
            facts = limited.facts()
            lift(limited)  # what compares maps the files too
            ranks.release("loaded")
            said = ranks.all()
    finally:
        limited.close()
    assert [one["tensors"] for one in said] == [len(checkpoint)] * 4
    assert all(one["lent"] > 0 for one in said)
    assert facts["oom_kill"] == 0, facts
