"""Host memory beyond the destination, and what becomes of it when tensors are kept, dropped, copied and written to."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import penstock
import pytest
import torch
from models import MIB, ROUTES, Model, Way, flat, kept
from pagecache import near
from penstock.synthetic import synth
from penstock.synthetic.synth import Layout, Tensor

#: What a load may take besides its destination and its staging memory, and what it may take for each tensor besides.
ROOM, PER_TENSOR = 64 * MIB, 1 << 10

#: For every line of input, one load in a fork of this process (which has not loaded anything yet), whose anonymous and
#: shared memory a thread looks at all the while. Prints the growth from before the checkpoint was opened: at its peak,
#: with all tensors kept, and with none kept.
PROGRAM = """
import gc, json, os, sys, threading, time
import torch, penstock

for line in sys.stdin:
    if os.fork() == 0:
        break
    if os.wait()[1]:
        print("null", flush=True)
else:
    sys.exit()

spec = json.loads(line)

def anonymous():
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon:", "RssShmem:")))

peak, stop = 0, threading.Event()

def watch():
    global peak
    while not stop.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.0005)

def load():
    checkpoint = penstock.open(spec["source"])
    slices = None
    if spec["rank"] is not None:
        rank, ranks = spec["rank"]
        def slices(info):
            if len(info.shape) < 2:
                return None
            size = info.shape[-1]
            return (..., slice(size * rank // ranks, size * (rank + 1) // ranks))
    if spec["into"]:
        return checkpoint, checkpoint.load_into(into, slices=slices, options=spec["options"], progress=False)
    if spec["stream"]:
        for name, tensor in checkpoint.stream(slices=slices, options=spec["options"]):
            del tensor
        return checkpoint, None
    return checkpoint, checkpoint.load(slices=slices, options=spec["options"], progress=False)

if spec["into"]:
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    checkpoint = penstock.open(spec["source"])
    into = {name: torch.zeros(checkpoint[name].shape, dtype=dtypes[checkpoint[name].dtype]) for name in checkpoint}
    for tensor in into.values():
        tensor.fill_(1)  # all of it is resident before the load begins
    del checkpoint
penstock.open(spec["small"]).load(progress=False)
gc.collect()
before = peak = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
checkpoint, tensors = load()
after = anonymous()
stop.set()
watcher.join()
report = checkpoint.last_report
del tensors, checkpoint
gc.collect()
print(json.dumps({
    "peak": max(peak, after) - before, "kept": after - before, "dropped": anonymous() - before,
    "nbytes": report.nbytes, "tensors": report.tensors, "peak_staging": report.peak_staging,
    "routes": report.routes, "idle": 64 << 20,
}), flush=True)
"""


#: Rows of 4 KiB: one tensor of 32 MiB, and 56 of 4 MiB.
WIDE = (Tensor("embed", "F32", (8192, 1024)), *(Tensor(f"layers.{i}.w", "F32", (1024, 1024)) for i in range(56)))
LARGEST = 32 * MIB


@pytest.fixture(scope="module")
def wide(folder: Path) -> Path:
    """One file of 268 MB: much more than staging and what a load may take besides."""
    return kept(Layout("wide", (WIDE,)), folder / "wide")


@pytest.fixture(scope="module")
def measure(folder: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Loads what it is told in a process of its own and says what memory that took."""
    small = synth.write_file(folder / "small.safetensors", [synth.Tensor("a", "F32", (8,))])
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def measure(source: Path, options: dict[str, Any], **spec: Any) -> dict[str, Any]:
            spec = {"source": str(source), "small": str(small), "options": options, "rank": None, "into": False,
                    "stream": False, **spec}  # fmt: skip
            print(json.dumps(spec), file=process.stdin, flush=True)
            seen = json.loads(process.stdout.readline())
            assert seen is not None, "the load failed: its traceback is on standard error"
            return seen

        yield measure
        process.stdin.close()


STAGING = 32 * MIB
BOUNDED = {"staging": STAGING, "extent": 2 * MIB}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("way", "state"),
    [*((way, "cold") for way in ROUTES), *((way, "half") for way in ROUTES if way.io == "auto")],
    ids=str,
)
def test_memory_beyond_the_destination(wide: Path, measure: Any, way: Way, state: str) -> None:
    path = wide / "model.safetensors"
    near([path], state)
    seen = measure(wide, {**way.options, **BOUNDED})
    # Mapped files are page cache, not anonymous memory
    mapped = seen["routes"]["mapped"]["bytes"] > 0
    destination = 0 if mapped else seen["nbytes"]
    beyond = seen["peak"] - destination
    assert beyond <= STAGING + ROOM + PER_TENSOR * seen["tensors"], seen
    assert mapped or seen["kept"] >= seen["nbytes"] * 0.99, seen
    assert seen["peak_staging"] <= STAGING
    # Idle slabs stay for the next load
    assert seen["dropped"] <= min(STAGING, seen["idle"]) + 16 * MIB, seen


@pytest.mark.parametrize("way", [way for way in ROUTES if way.io != "mapped"], ids=str)
def test_memory_of_a_column_slice_of_everything(wide: Path, measure: Any, way: Way) -> None:
    """Rows too short for a read each go through staging memory: here 268 MB of them, through 32 MiB."""
    near([wide / "model.safetensors"], "cold")
    seen = measure(wide, {**way.options, **BOUNDED}, rank=[1, 4])
    assert seen["peak"] - seen["nbytes"] <= STAGING + ROOM + PER_TENSOR * seen["tensors"], seen
    assert 0 < seen["peak_staging"] <= STAGING
    assert seen["dropped"] <= STAGING + 16 * MIB, seen


@pytest.mark.parametrize(
    "way", [Way("buffered", "auto", None), Way("direct", "auto", None), Way("auto", "bypass", None)], ids=str
)
def test_memory_of_a_load_into_existing_tensors(wide: Path, measure: Any, way: Way) -> None:
    near([wide / "model.safetensors"], "cold")
    seen = measure(wide, {**way.options, **BOUNDED}, into=True)
    assert seen["peak"] <= STAGING + ROOM + PER_TENSOR * seen["tensors"], seen
    assert seen["peak_staging"] <= STAGING


@pytest.mark.parametrize("io", ["buffered", "uring_buffered", "direct", "threads"])
def test_memory_of_a_stream_whose_tensors_are_dropped(wide: Path, measure: Any, io: str) -> None:
    """Read-ahead is the window or the next tensor alone, whatever the size of the checkpoint."""
    near([wide / "model.safetensors"], "cold")
    seen = measure(wide, {"io": io, **BOUNDED, "window": "16MiB"}, stream=True)
    assert seen["peak"] <= max(16 * MIB, LARGEST) + LARGEST + STAGING + ROOM + PER_TENSOR * seen["tensors"], seen
    assert seen["peak"] < 0.75 * seen["nbytes"]


@pytest.mark.parametrize(
    "way", [Way("auto", "auto", None), Way("auto", "keep", True), Way("direct", "auto", None)], ids=str
)
def test_memory_for_many_tensors(moe: Model, measure: Any, way: Way) -> None:
    seen = measure(moe.source, {**way.options, **BOUNDED})
    destination = 0 if seen["routes"]["mapped"]["bytes"] else seen["nbytes"]
    assert seen["peak"] - destination <= STAGING + ROOM + PER_TENSOR * seen["tensors"], seen


@pytest.mark.pairwise
@pytest.mark.parametrize("staging", [8 * MIB, 16 * MIB, 64 * MIB])
@pytest.mark.parametrize("way", [way for way in ROUTES if way.io != "mapped"], ids=str)
def test_staging_stays_under_its_limit(experts: Model, way: Way, staging: int) -> None:
    checkpoint = penstock.open(experts.source)
    experts.near("cold")
    slices = {name: (..., slice(0, checkpoint[name].shape[-1] // 2)) for name in checkpoint}
    jobs = [checkpoint.start(slices=slices, options={**way.options, "staging": staging}) for _ in range(3)]
    results = [job.result() for job in jobs]
    reports = [job.report for job in jobs if job.report is not None]
    assert len(reports) == 3 and all(report.peak_staging <= staging for report in reports)
    assert any(report.peak_staging > 0 for report in reports)  # what another one has brought in needs none
    for tensors in results:
        for name, tensor in tensors.items():
            half = experts.elements_of(name)[..., : checkpoint[name].shape[-1] // 2]
            assert flat(tensor).tobytes() == half.tobytes(), name


# What tensors are, once they are there


PRIVATE = [Way("auto", "keep", True), Way("direct", "auto", None), Way("buffered", "auto", None)]
ANY = [*PRIVATE, Way("auto", "auto", None)]


def anonymous() -> int:
    text = Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(("RssAnon:", "RssShmem:")))


def anonymous_at(addresses: Iterable[int]) -> int:
    """The anonymous memory of the mappings that these addresses are in: others of the process may come and go."""
    places, nbytes, counts = list(addresses), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(bound, 16) for bound in mapping.groups())
            counts = any(start <= address < end for address in places)
        elif counts and line.startswith("Anonymous:"):
            nbytes += int(line.split()[1]) << 10
    return nbytes


@pytest.mark.parametrize("way", PRIVATE, ids=str)
@pytest.mark.machine
def test_a_kept_tensor_does_not_keep_the_others(gpt2: Path, way: Way) -> None:
    gc.collect()
    before = anonymous()
    tensors = penstock.open(gpt2).load(options=way.options, progress=False)
    assert anonymous_at(tensor.data_ptr() for tensor in tensors.values()) > 500 * MIB
    kept = [tensors.pop("h.5.ln_1.bias"), tensors.pop("ln_f.weight")]
    want = [hashlib.sha256(flat(tensor)).digest() for tensor in kept]
    tensors.clear()
    gc.collect()
    # Each keeps the huge page that it lies in, and the process its idle slabs
    assert anonymous() - before <= 2 * 4 * MIB + 64 * MIB
    assert [hashlib.sha256(flat(tensor)).digest() for tensor in kept] == want


@pytest.mark.parametrize("framework", ["pt", "np", "dlpack"])
@pytest.mark.parametrize("way", ANY, ids=str)
def test_tensors_outlive_load_and_checkpoint_and_other_loads(moe: Model, way: Way, framework: str) -> None:
    raw = {"dtype": "raw"} if framework == "np" else {}
    checkpoint = penstock.open(moe.source)
    tensors = checkpoint.load(framework=framework, options=way.options, **raw)
    del checkpoint
    gc.collect()
    for _ in range(2):  # which would overwrite memory that had been given back
        penstock.open(moe.source).load(options={**way.options, "io": way.io})
    kept = {name: tensors[name] for name in list(tensors)[::97]}
    del tensors
    gc.collect()
    penstock.open(moe.source).load(options=way.options)
    for name, tensor in kept.items():
        assert flat(tensor).tobytes() == moe.bytes_of(name).tobytes(), name


@pytest.mark.parametrize("way", ANY, ids=str)
def test_every_storage_is_exactly_its_tensor(moe: Model, llama: Model, way: Way, tmp_path: Path) -> None:
    for model in (moe, llama):
        tensors = penstock.open(model.source).load(options=way.options)
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            assert storage.nbytes() == tensor.nbytes == model.entries[name].nbytes, name
            assert tensor.storage_offset() == 0
            assert tensor.is_contiguous()
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == len(tensors)
    name, tensor = next((name, tensor) for name, tensor in tensors.items() if tensor.dim() == 1)
    torch.save({name: tensor}, tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < tensor.nbytes + 4096
    for again in (
        torch.load(tmp_path / "one.pt")[name],
        copy.deepcopy(tensor),
        pickle.loads(pickle.dumps(tensor)),
        tensor.clone(),
    ):
        assert again.data_ptr() != tensor.data_ptr()
        assert flat(again).tobytes() == llama.bytes_of(name).tobytes()


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("way", [*ANY, Way("mapped", "keep", False)], ids=str)
def test_writing_changes_neither_the_file_nor_other_tensors(experts: Model, way: Way, framework: str) -> None:
    raw = {"dtype": "raw"} if framework == "np" else {}
    [path] = experts.files
    before = hashlib.sha256(path.read_bytes()).digest()
    tensors = penstock.open(path).load(framework=framework, options=way.options, **raw)
    others = penstock.open(path).load(framework=framework, options=way.options, **raw)
    for tensor in list(tensors.values())[::2]:
        tensor[...] = 0
    for name, tensor in list(tensors.items())[1::2]:
        assert flat(tensor).tobytes() == experts.bytes_of(name).tobytes(), name
    for tensor in list(tensors.values())[::2]:
        assert not flat(tensor).any()
    experts.same(others)
    assert hashlib.sha256(path.read_bytes()).digest() == before
    experts.same(penstock.open(path).load(framework=framework, options=way.options, **raw))
