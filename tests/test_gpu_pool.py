"""The pool of registered staging memory: shared by its loads and GPUs, given back in one call."""

from __future__ import annotations

import gc
import json
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fakegpu
import penstock
import pytest
from fakegpu import FakeGpu, FakeTorch, fresh, settle, threads, torch_on
from penstock.bench import reference
from penstock.synthetic import layouts, synth
from penstock.synthetic.synth import Tensor

pytestmark = pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)

MIB = 1 << 20
#: What small tensors are gathered in: one such buffer for each load at a time.
SCRATCH = 2 * MIB


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    with fresh() as fake:
        yield fake


def hollow(path: Path, tensors: Iterable[Tensor]) -> Path:
    """A checkpoint that takes no room on the disk: a header and a hole."""
    entries, at = {}, 0
    for tensor in tensors:
        past = at + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, past]}
        at = past
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + at)
    return path


@pytest.fixture(scope="module")
def gigabyte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 GB, with small tensors that are gathered: the file aligns them otherwise than the device."""
    sizes = [3000 + i % 7 for i in range(200)]
    sizes += [24 * MIB + 5] * 40 + sizes
    tensors = [Tensor(f"layers.{i}.w", "U8", (size,)) for i, size in enumerate(sizes)]
    return hollow(tmp_path_factory.mktemp("gpu") / "1g.safetensors", tensors)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = [Tensor(f"layers.{i}.w", "F32", (4, 1 << 18)) for i in range(16)]
    tensors += [Tensor(f"layers.{i}.small", "BF16", (77,)) for i in range(50)]
    return synth.write_file(tmp_path_factory.mktemp("gpu") / "x.safetensors", tensors)


def content_of(file: Path) -> dict[str, bytes]:
    return {name: reference.raw(entry).tobytes() for name, entry in reference.entries_of(file).items()}


def consumed(gpu: FakeTorch, tensors: dict[str, Any], content: dict[str, bytes], device: int = 0) -> None:
    """A kernel on another stream reads every tensor, and is waited for."""
    assert list(tensors) == list(content)
    for name, tensor in tensors.items():
        gpu.consume(tensor, content[name], device=device)
    gpu.fake.control("stream_synchronize", gpu.sides[device].consumer, device)


def quick(fake: FakeGpu) -> None:
    """Nothing is summed and nothing moved: what is counted are the calls."""
    fake.configure(checksum=0, poison=0, move_bytes=0)


def grown() -> None:
    """Waits until nothing registers in the background any more."""
    assert settle(threads, []) == [], threads()


def registered(fake: FakeGpu) -> tuple[int, int]:
    """Calls that registered, and that unregistered, of either vendor."""
    by_vendor = {
        "cuda": ("cuMemHostRegister_v2", "cuMemHostUnregister"),
        "hip": ("hipHostRegister", "hipHostUnregister"),
    }
    first, second = by_vendor[fake.vendor]
    return fake.counter(f"calls.{first}"), fake.counter(f"calls.{second}")


def test_once_the_pool_has_grown_a_later_load_registers_and_unregisters_nothing(fake: FakeGpu, gigabyte: Path) -> None:
    quick(fake)
    opened = penstock.open(gigabyte)
    assert opened.nbytes > 10**9
    opened.load("cuda:0", framework="dlpack")
    grown()
    first = registered(fake)
    assert 2 <= first[0] <= 256 // 4 + 1 and first[1] == 0, first
    assert fake.counter("registered_bytes") <= 256 * MIB + SCRATCH
    for _ in range(3):
        opened.load("cuda:0", framework="dlpack")
        assert opened.last_report.fallbacks == []
        grown()
        assert registered(fake) == first


@pytest.mark.parametrize("way", ["load", "stream", "load_into"])
def test_the_pool_serves_every_way_to_load(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, file: Path, way: str
) -> None:
    content = content_of(file)
    with torch_on(fake, monkeypatch) as gpu:
        opened = penstock.open(file)
        counts = []
        for _ in range(3):
            if way == "load_into":
                to = {name: gpu.destination(tensor) for name, tensor in opened.load("cpu").items()}
                opened.load_into(to)
            else:
                to = opened.load("cuda:0") if way == "load" else dict(opened.stream("cuda:0"))
            consumed(gpu, to, content)
            grown()
            counts.append(registered(fake))
            del to
            gc.collect()
        assert counts[1] == counts[2] == counts[0], counts


def test_a_small_load_registers_little_and_a_larger_one_the_rest(fake: FakeGpu, file: Path, gigabyte: Path) -> None:
    quick(fake)
    opened = penstock.open(file)
    opened.load("cuda:0", framework="dlpack", names="layers.0.*")
    grown()
    few = fake.counter("registered_bytes")
    assert few <= 8 * MIB + SCRATCH
    penstock.open(gigabyte).load("cuda:0", framework="dlpack")
    grown()
    assert few < fake.counter("registered_bytes") <= 256 * MIB + SCRATCH
    assert registered(fake)[1] == 0, "what was there is kept"


def test_a_load_of_smaller_extents_takes_what_is_there(fake: FakeGpu, gigabyte: Path) -> None:
    quick(fake)
    opened = penstock.open(gigabyte)
    opened.load("cuda:0", framework="dlpack")
    grown()
    before = registered(fake)
    opened.load("cuda:0", framework="dlpack", options={"extent": "1MiB", "staging": "64MiB"})
    grown()
    assert registered(fake) == before
    assert opened.last_report.peak_staging <= 64 * MIB


def test_staging_memory_is_given_back_by_one_call(fake: FakeGpu, file: Path) -> None:
    opened = penstock.open(file)
    opened.load("cuda:0", framework="dlpack")
    grown()
    there = fake.counter("registered_bytes")
    assert there > 0
    assert penstock.release_staging() >= there
    assert (fake.counter("registered_bytes"), fake.counter("contexts_retained")) == (0, 0)
    assert penstock.release_staging() == 0
    assert len(opened.load("cuda:0", framework="dlpack")) == 66, "the next load makes it anew"


def test_staging_memory_that_a_load_uses_is_not_given_back(fake: FakeGpu, file: Path) -> None:
    content = content_of(file)
    stream = penstock.open(file).stream("cuda:0", framework="dlpack", window="8MiB")
    for name, tensor in stream:
        penstock.release_staging()
        assert fake.read(tensor._view.address, tensor.nbytes) == content[name]
        del tensor
    assert registered(fake)[0] > 0


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_loads_to_two_devices_in_turn_share_the_pool(monkeypatch: pytest.MonkeyPatch, file: Path, vendor: str) -> None:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"{vendor}:{fakegpu.LIBRARY}")
    content, kind = content_of(file), {"cuda": "cuda", "hip": "rocm"}[vendor]
    with fresh(vendor) as fake, torch_on(fake, monkeypatch, devices=2) as gpu:
        opened = penstock.open(file)
        counts = []
        for turn in range(6):
            device = turn % 2
            tensors = opened.load(f"{kind}:{device}")
            assert opened.last_report.fallbacks == []
            consumed(gpu, tensors, content, device)
            grown()
            counts.append(registered(fake))
            del tensors
            gc.collect()
        assert len(set(counts)) == 1, f"each slab is registered once, whichever device it is for: {counts}"


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_loads_to_two_devices_at_once_share_the_pool(monkeypatch: pytest.MonkeyPatch, file: Path, vendor: str) -> None:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"{vendor}:{fakegpu.LIBRARY}")
    content, kind = content_of(file), {"cuda": "cuda", "hip": "rocm"}[vendor]
    with fresh(vendor) as fake, torch_on(fake, monkeypatch, devices=2) as gpu:
        fake.configure(copy_delay_us=300)
        for _ in range(3):
            opened = [penstock.open(file) for _ in range(2)]
            jobs = [each.start(f"{kind}:{device}") for device, each in enumerate(opened)]
            for device, job in enumerate(jobs):
                consumed(gpu, job.result(), content, device)
            assert [each.last_report.fallbacks for each in opened] == [[], []]
            del job, jobs
            gc.collect()
        grown()
        calls, undone = registered(fake)
        assert undone == 0
        # Slabs, and a scratch buffer for each of the two.
        assert fake.counter("registered_bytes") <= 256 * MIB + 2 * SCRATCH
        assert calls <= fake.counter("registered_bytes") // (4 * MIB) + 2


def test_load_into_two_devices_fills_both(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    content = content_of(file)
    with torch_on(fake, monkeypatch, devices=2) as gpu:
        opened = penstock.open(file)
        whole = opened.load("cpu").items()
        to = {name: gpu.destination(tensor, i % 2) for i, (name, tensor) in enumerate(whole)}
        fake.configure(copy_delay_us=20000)  # both are busy most of the time, at once
        began, cpu = time.perf_counter(), time.process_time()
        report = opened.load_into(to)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        assert report["fallbacks"] == []
        assert 0.02 < report["seconds"] <= took
        assert report["cpu_seconds"] <= cpu
        assert report["gbps"] == pytest.approx(report["nbytes"] / report["seconds"] / 1e9)
        for i, (name, tensor) in enumerate(to.items()):
            gpu.consume(tensor, content[name], device=i % 2)
        for device, side in enumerate(gpu.sides):
            fake.control("stream_synchronize", side.consumer, device)
        del to, tensor


def test_a_load_waits_for_registered_memory_rather_than_for_more_of_it(fake: FakeGpu, gigabyte: Path) -> None:
    """Registering is not done by the thread that submits: copies out of what is registered go on meanwhile."""
    quick(fake)
    fake.configure(cost="cuMemHostRegister_v2:400000")
    opened = penstock.open(gigabyte)
    opened.load("cuda:0", framework="dlpack")
    so_far = registered(fake)[0]
    penstock.release_staging()  # ends what is registered in the background
    # 250 slabs' worth of bytes went through those few. At 0.4 s each, all of the pool would take 13 s.
    assert so_far <= 24, so_far


def test_the_report_ends_when_the_caller_can_go_on(fake: FakeGpu, tmp_path: Path) -> None:
    """Waiting for the stream and taking down threads is part of the load, and of its time."""
    small = [
        Tensor(f"t{i}", "U8", (100,)) for i in range(50)
    ]  # gathered in scratch memory, which is awaited at the end
    opened = penstock.open(synth.write_file(tmp_path / "small.safetensors", small))
    opened.load("cuda:0", framework="dlpack")
    fake.configure(cost="cuStreamSynchronize:300000")
    begun = time.monotonic()
    opened.load("cuda:0", framework="dlpack")
    took, told = time.monotonic() - begun, opened.last_report.seconds
    assert 0.3 <= told <= took, (told, took)


def test_a_later_load_makes_neither_a_stream_nor_an_event(fake: FakeGpu, file: Path, gigabyte: Path) -> None:
    """They are kept with the context, and go with it."""

    quick(fake)
    opened = penstock.open(gigabyte)
    for _ in range(10):
        opened.load("cuda:0", framework="dlpack")
        list(penstock.open(file).stream("cuda:0", framework="dlpack"))
    grown()
    assert (fake.counter("calls.cuStreamCreate"), fake.counter("calls.cuStreamDestroy_v2")) == (1, 0)
    # As many as slabs at a time, and two for the scratch buffer: not as many as loads
    assert 2 <= fake.counter("calls.cuEventCreate") <= 32 + 2
    gc.collect()
    penstock.release_staging()
    assert fake.counter("streams") == fake.counter("events") == 0


def test_a_stream_on_which_a_copy_failed_is_not_used_again(fake: FakeGpu, file: Path) -> None:
    opened = penstock.open(file)
    opened.load("cuda:0", framework="dlpack")
    fake.configure(fail="cuMemcpyHtoDAsync_v2:1:999")
    with pytest.raises(penstock.PenstockError):
        opened.load("cuda:0", framework="dlpack")
    fake.configure(fail="")
    gc.collect()
    assert fake.counter("calls.cuStreamDestroy_v2") == 1
    opened.load("cuda:0", framework="dlpack")


@pytest.mark.parametrize("count", [1, 4])
def test_so_many_threads_register_the_pool_as_are_asked_for(fake: FakeGpu, gigabyte: Path, count: int) -> None:
    """Each slab once, and no more than the pool is to have."""
    quick(fake)
    fake.configure(cost="cuMemHostRegister_v2:20000")
    opened = penstock.open(gigabyte)
    options = {"pinning_threads": count}
    job = opened.start("cuda:0", framework="dlpack", options=options)
    seen = 0
    while not job.done():
        seen = max(seen, threads().count("penstock-gpupin"))
    job.result()
    assert seen == count
    grown()
    first = registered(fake)
    assert fake.counter("registered_bytes") <= 128 * MIB + SCRATCH
    opened.load("cuda:0", framework="dlpack", options=options)
    grown()
    assert registered(fake) == first


def test_a_refused_registration_ends_all_threads_that_register(fake: FakeGpu, gigabyte: Path) -> None:
    quick(fake)
    fake.configure(strict=0, refuse_register=801)
    opened = penstock.open(gigabyte)
    opened.load("cuda:0", framework="dlpack", options={"pinning_threads": 4})
    grown()
    assert [f["to"] for f in opened.last_report.fallbacks] == ["plain staging memory"]
    assert fake.counter("calls.cuMemHostRegister_v2") <= 4 + 1


def test_a_registration_that_is_refused_in_the_second_load_is_told_of(
    fake: FakeGpu, file: Path, gigabyte: Path
) -> None:
    quick(fake)
    penstock.open(file).load("cuda:0", framework="dlpack", names="layers.0.w")
    grown()
    fake.configure(strict=0, refuse_register=801)
    opened = penstock.open(gigabyte)
    opened.load("cuda:0", framework="dlpack")
    assert [f["to"] for f in opened.last_report.fallbacks] == ["plain staging memory"]


def test_growing_in_the_background_ends_with_the_process(python: Any, file: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    script = """
import sys, penstock
penstock.open(sys.argv[1]).load("cuda:0", framework="dlpack")
print("well")
"""
    here = Path(__file__).parent
    run = python(
        script,
        file,
        PENSTOCK_GPU_LIBRARY=f"cuda:{fakegpu.LIBRARY}",
        PYTHONPATH=f"{here}:{Path(penstock.__file__).parents[1]}",
        FAKEGPU_REPORT=str(report),
        FAKEGPU_COST="cuMemHostRegister_v2:50000",
    )
    assert (run.returncode, run.stdout.strip()) == (0, "well"), run.stderr
    assert not [line for line in report.read_text().splitlines() if not line.startswith("leak:")]


def test_loads_in_many_threads_share_the_pool(fake: FakeGpu, file: Path) -> None:
    content = content_of(file)
    wrong: list[str] = []

    def work() -> None:
        for _ in range(3):
            tensors = penstock.open(file).load("cuda:0", framework="dlpack", options={"staging": "32MiB"})
            wrong.extend(name for name, t in tensors.items() if fake.read(t._view.address, t.nbytes) != content[name])

    workers = [threading.Thread(target=work) for _ in range(4)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    assert wrong == []
    grown()
    assert fake.counter("peak_registered_bytes") <= 32 * MIB + 4 * SCRATCH
    assert registered(fake)[1] == 0


@pytest.mark.machine
def test_plan_and_hand_out_of_gpt2_leave_the_rest_of_15_ms_to_the_link(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GPT-2's 548 MB are to be there in 15 ms where source and link carry 55 GB/s. `engine/virtual_time.rs` shows that
    moving them takes at most 11."""
    quick(fake)
    fake.configure(strict=0)
    monkeypatch.setattr(fakegpu, "BUSY_MICROSECONDS", 0)
    [shard] = layouts.build("gpt2").shards
    opened = penstock.open(hollow(tmp_path / "model.safetensors", shard))
    assert (len(opened), opened.nbytes) == (160, 548_090_880)
    with torch_on(fake, monkeypatch):
        best = 1.0
        for _ in range(12):
            tensors = opened.load("cuda:0")
            report = opened.last_report
            assert report is not None
            best = min(best, report["plan_seconds"] + report["hand_out_seconds"])
            del tensors
            gc.collect()
    assert best <= 0.004, best
