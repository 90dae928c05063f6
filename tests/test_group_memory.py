"""Memory that ranks which exchange take beyond their tensors: staging, and nothing that grows with the checkpoint.

What a rank has read for others stays in its slabs until they have taken it, so here one rank is late: it has agreed
with the others, who know that it is alive, and takes nothing. They go on until their staging is full. The kernel counts
what each process holds at most (`VmHWM`), all of it: slabs, lists, what is received and has no place yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakegpu
import pagecache
import penstock
import pytest
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from ranks_together import Ranks, until

MIB = 1 << 20
STAGING = 16 * MIB
#: Threads, the plan, the list of tensors, code that runs for the first time.
ROOM = 12 * MIB
#: What a load to a GPU registers beside the slabs, for small tensors.
SCRATCH = 2 * MIB
#: Loads wait for the late rank as long as it takes.
OPTIONS = {"staging": STAGING, "extent": MIB, "exchange": "on", "stall_timeout": 600}


@pytest.fixture(scope="module")
def usual(scratch: Path) -> Iterator[Path]:
    """254 MB, most of it in matrices whose columns are divided."""
    tensors: list[Tensor] = []
    for layer in range(12):
        tensors += [
            Tensor(f"{layer}.norm", "BF16", (2048,)),
            Tensor(f"{layer}.columns", "BF16", (4096, 2048)),
            Tensor(f"{layer}.rows", "BF16", (1024, 2048)),
        ]
    file = synth.write_file(scratch / "group-memory.safetensors", tensors)
    yield file
    file.unlink()


@pytest.fixture(scope="module")
def narrow(scratch: Path) -> Iterator[Path]:
    """134 MB with rows of 8 bytes: a list of what a rank wants of them takes more memory than they do."""
    tensors = [Tensor("0.norm", "BF16", (2048,))]
    tensors += [Tensor(f"{layer}.columns", "BF16", (1 << 20, 4)) for layer in range(16)]
    file = synth.write_file(scratch / "group-narrow.safetensors", tensors)
    yield file
    file.unlink()


#: Rank 0 stays at `hold("late")` when all have agreed.
LATE = """
from penstock import _group

def late(*args, agree=_group.Rendezvous.agree):
    agreed = agree(*args)
    if rank == 0:
        hold("late")
    return agreed

_group.Rendezvous.agree = late
"""


PROGRAM = (
    """
import gc

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))

def divided(info):
    if len(info.shape) < 2:
        return None
    return (slice(None), of(info.shape[1])) if info.name.endswith("columns") else of(info.shape[0])

slices = None if layout == "replicas" else divided
checkpoint = penstock.open(path)
destination = {}
if turned:
    # Shapes as wanted, and columns where rows are in the file: what arrives cannot be received to its place
    for name in checkpoint:
        shape = list(checkpoint[name].shape)
        destination[name] = torch.ones(shape[::-1], dtype=torch.bfloat16).permute(*reversed(range(len(shape))))
# What the first load of a process sets up
checkpoint.load(names=["0.norm"], group=group, options=options)
penstock._core.release_staging()
gc.collect()

"""
    + LATE
    + """with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM begins anew
before = status("VmRSS")
if turned:
    report, found = checkpoint.load_into(destination, group=group, options=options), destination
else:
    found = checkpoint.load(slices=slices, group=group, options=options)
    report = checkpoint.last_report
said["peak"] = status("VmHWM") - before
said["nbytes"], said["staging"] = report.nbytes, report.peak_staging
said["exchanged"] = report.exchange["received_bytes"]
said["direct"] = report.routes["direct"]["bytes"]
said["tensors"] = same(found, slices)
"""
)


def growth_has_ended(pids: list[int]) -> Callable[[], bool]:
    """Whether processes have held as much memory, to 64 KiB, in the last hundred looks."""
    seen: list[int] = []
    unchanged = 0

    def ended() -> bool:
        nonlocal seen, unchanged
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
        same = len(seen) == len(pages) and all(abs(a - b) <= 16 for a, b in zip(seen, pages, strict=True))
        seen, unchanged = (seen, unchanged + 1) if same else (pages, 0)
        time.sleep(0.005)
        return unchanged == 100

    return ended


def loaded_while_one_is_late(
    together: Callable[..., Ranks], file: Path, size: int, cache: str, **given: Any
) -> list[dict[str, Any]]:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system lets nobody begin its peak anew")
    if cache == "bypass":
        pagecache.put([file], "cold")
    with together(PROGRAM, size, file, options={**OPTIONS, "cache": cache}, **given) as ranks:
        ranks.held("late", [0])
        # Nothing can be said of when their staging is full. The later the other rank goes on, the fuller it is
        until(growth_has_ended(ranks.pids[1:]))
        ranks.release("late")
        said = ranks.all()
    for one in said:
        assert one["tensors"] == len(penstock.open(file))
        assert one["exchanged"] > 0
        assert 0 < one["staging"] <= STAGING, said
        assert (one["direct"] > 0) == (cache == "bypass")
    return said


@pytest.mark.sampled
@pytest.mark.parametrize("cache", ["keep", "bypass"])
@pytest.mark.parametrize("layout", ["tensor parallel", "replicas"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_load_takes_its_tensors_and_staging_however_late_another_rank_is(
    together: Callable[..., Ranks], usual: Path, size: int, layout: str, cache: str
) -> None:
    for one in loaded_while_one_is_late(together, usual, size, cache, layout=layout, turned=False):
        assert one["nbytes"] <= one["peak"] <= one["nbytes"] + STAGING + ROOM, one


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 4])
def test_no_row_of_narrow_columns_takes_memory_while_it_waits_to_be_sent(
    together: Callable[..., Ranks], narrow: Path, size: int
) -> None:
    for one in loaded_while_one_is_late(together, narrow, size, "keep", layout="tensor parallel", turned=False):
        assert one["nbytes"] <= one["peak"] <= one["nbytes"] + STAGING + ROOM, one


@pytest.mark.parametrize("cache", ["keep", "bypass"])
def test_what_is_received_and_copied_then_waits_in_staging(
    together: Callable[..., Ranks], usual: Path, cache: str
) -> None:
    """Into transposed tensors, which exist before the load."""
    for one in loaded_while_one_is_late(together, usual, 4, cache, layout="replicas", turned=True):
        assert one["peak"] <= STAGING + ROOM, one


GPU_PROGRAM = """
import os, sys
sys.path.insert(0, tests)
os.environ["PENSTOCK_GPU_LIBRARY"] = f"cuda:{library}"
import gc
import fakegpu
from penstock import _accelerator, _core

def divided(info):
    if len(info.shape) < 2:
        return None
    return (slice(None), of(info.shape[1])) if info.name.endswith("columns") else of(info.shape[0])

slices = None if layout == "replicas" else divided
fake = fakegpu.FakeGpu()
gpu = fakegpu.FakeTorch(fake)
_accelerator._torch = lambda: gpu
_accelerator.device_of = gpu.device_of
_accelerator.Accelerator.dlpack_device = 1, 0

checkpoint = penstock.open(path)
destination = {name: gpu.destination(torch.empty(checkpoint[name].shape, dtype=torch.bfloat16)) for name in into}
before = gpu.pool.live
if into:
    report, found = checkpoint.load_into(destination, group=group, options=options), dict(destination)
else:
    found = checkpoint.load("cuda:0", slices=slices, group=group, options=options)
    report = checkpoint.last_report
said.update(
    nbytes=report.nbytes, tensors=report.tensors, staging=report.peak_staging, fallbacks=report.fallbacks,
    received=report.exchange["received_bytes"],
    sent=report.exchange["sent_bytes"], lent=report.exchange["lent_bytes"],
    copied=fake.counter("bytes_h2d"), registered=fake.counter("peak_registered_bytes"),
    # What torch's allocator has given, and what was taken of the driver beside it
    device=gpu.pool.peak - before, beside=fake.counter("peak_device_bytes"),
)
fake.control("drain")
for tensor in found.values():
    fake.control("host_access", tensor.data_ptr(), tensor.nbytes, 0)
said["same"] = same(found, slices)
del found, destination, tensor
gc.collect()
said["live"] = gpu.pool.live
gpu.close()
_core.release_staging()
said["misuses"], said["leaks"] = fake.misuses, fake.leaks
said["left"] = {name: fake.counter(name) for name in ("device_bytes", "registered_bytes", "events", "streams")}
"""


@pytest.fixture(scope="module")
def few(scratch: Path) -> Iterator[Path]:
    """67 MB: the fake driver looks at every byte."""
    tensors: list[Tensor] = []
    for layer in range(6):
        tensors += [
            Tensor(f"{layer}.norm", "BF16", (2048,)),
            Tensor(f"{layer}.columns", "BF16", (2048, 2048)),
            Tensor(f"{layer}.rows", "BF16", (640, 2048)),
        ]
    file = synth.write_file(scratch / "group-gpu.safetensors", tensors)
    yield file
    file.unlink()


@pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)
@pytest.mark.parametrize("way", ["tensor parallel", "replicas", "into tensors"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_load_to_gpus_takes_no_device_memory_beyond_the_shard_and_leaves_none(
    together: Callable[..., Ranks], few: Path, size: int, way: str
) -> None:
    """On the fake driver, which each rank has of its own. Two rounds of the exchange may be on the device at most.

    None is: what comes from other ranks is copied out of staging memory, straight to its place.
    """
    checkpoint = penstock.open(few)
    into = list(checkpoint) if way == "into tensors" else []
    layout = "tensor parallel" if way == "tensor parallel" else "replicas"
    given = {"tests": str(Path(__file__).parent), "library": fakegpu.LIBRARY, "layout": layout, "into": into}
    with together(GPU_PROGRAM, size, few, options=OPTIONS, **given) as ranks:
        said = ranks.all()
    padding = (fakegpu.Pool.ROUNDING + 256) * len(checkpoint)
    for one in said:
        assert one["same"] == one["tensors"] == len(checkpoint)
        assert one["received"] > 0
        assert 0 < one["staging"] <= STAGING
        # Its own, and its neighbours': each rank's driver registers both.
        assert 0 < one["registered"] <= size * STAGING + SCRATCH
        # Each wanted byte once, with what aligns tensors
        assert one["nbytes"] <= one["copied"] <= one["nbytes"] + padding
        assert one["device"] <= (0 if into else one["nbytes"] + padding)
        assert one["beside"] == one["live"] == 0
        assert one["fallbacks"] == one["misuses"] == one["leaks"] == []
        assert set(one["left"].values()) == {0}, one["left"]


@pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)
def test_slabs_of_neighbours_that_a_driver_does_not_register_are_left_for_sockets(
    together: Callable[..., Ranks], few: Path
) -> None:
    """Rank 0's driver registers its own slabs and then no more. What it wants of others is sent from then on."""
    own = STAGING // 2 + SCRATCH
    given: dict[str, Any] = {"tests": str(Path(__file__).parent), "library": fakegpu.LIBRARY, "into": []}
    limited = GPU_PROGRAM.replace(
        "gpu = fakegpu.FakeTorch(fake)",
        f"gpu = fakegpu.FakeTorch(fake)\nif rank == 0:\n    fake.configure(register_limit={own})",
    )
    with together(limited, 2, few, options=OPTIONS, layout="replicas", **given) as ranks:
        said = ranks.all()
    assert [one["same"] for one in said] == [one["tensors"] for one in said]
    assert [one["leaks"] for one in said] == [[], []]
    assert said[0]["lent"] == said[0]["sent"] > 0
    assert said[1]["misuses"] == said[1]["fallbacks"] == []
    # Copies of what was on its way are made from plain memory
    assert all(misuse.startswith("unregistered-memory") for misuse in said[0]["misuses"])
    # Its own slabs and those of rank 1 are registered by two threads
    ways = {("shared slabs", "sockets"), ("registered staging memory", "plain staging memory")}
    told = {(one["from"], one["to"]) for one in said[0]["fallbacks"]}
    assert told and told <= ways, told
    if ("shared slabs", "sockets") in told:  # rank 1 lends only what was on its way
        assert said[1]["lent"] < said[1]["sent"]
