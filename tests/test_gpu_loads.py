"""Whole loads to a GPU, on the fake driver: byte for byte, every fence in place, every copy counted, nothing left.

Every test ends with an empty log of misuse, no leak in the driver, and the threads and descriptors there were before.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakegpu
import penstock
import pytest
import torch
from conftest import raw
from fakegpu import FakeGpu, FakeTorch, fresh, settle, torch_on, without
from penstock.bench import reference
from penstock.synthetic import layouts, synth
from penstock.synthetic.synth import Layout, Tensor

pytestmark = pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)

MIB = 1 << 20
#: The largest gathered transfer, twice: what the core registers beside the slabs.
SCRATCH = 2 * MIB
#: Larger tensors are never gathered.
GATHERED = 32 << 10
ROUTES = ["auto", "buffered", "uring_buffered", "direct", "uring", "threads"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    with fresh() as fake:
        yield fake


@pytest.fixture
def gpu(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    with torch_on(fake, monkeypatch) as side:
        yield side


def gpt2(width: int = 128) -> Layout:
    """GPT-2's 160 tensors, a sixth as wide."""
    by = {768 * n: width * n for n in (1, 3, 4)} | {50257: 5025, 1024: 128}
    shards = [
        tuple(Tensor(t.name, t.dtype, tuple(by.get(n, n) for n in t.shape)) for t in shard)
        for shard in layouts.build("gpt2").shards
    ]
    return Layout("gpt2", tuple(shards))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gpu")
    crooked = [
        Tensor("a", "U8", (3,)),
        Tensor("b", "F32", (1000, 7)),
        Tensor("c", "BF16", (5,)),
        Tensor("d", "F64", (333,)),
    ]
    return {
        "gpt2": synth.write(gpt2(), folder / "gpt2"),
        "moe": synth.write(synth.qwen3_moe(40e6), folder / "moe"),
        "tiny": synth.write(synth.many_tensors(2, 24, 2), folder / "tiny"),
        "misaligned": synth.write_file(folder / "misaligned.safetensors", crooked, align=1, spaces=5),
        "large": synth.write_file(
            folder / "large.safetensors", [Tensor(f"layers.{i}.w", "F32", (9, 1 << 18)) for i in range(20)]
        ),
    }


def content_of(source: Path) -> dict[str, bytes]:
    return {name: reference.raw(entry).tobytes() for name, entry in reference.entries_of(source).items()}


def check(gpu: FakeTorch, tensors: dict[str, torch.Tensor], content: dict[str, bytes]) -> None:
    """A kernel on another stream reads every tensor as soon as it is handed out, then the host does."""
    assert list(tensors) == list(content)
    for name, tensor in tensors.items():
        gpu.consume(tensor, content[name])
    for name, tensor in tensors.items():
        assert gpu.fake.read(tensor.data_ptr(), tensor.nbytes) == content[name], name
    gpu.fake.control("stream_synchronize", gpu.consumer, 0)


def accounted(fake: FakeGpu, opened: penstock.Checkpoint, staging: int = 256 * MIB) -> None:
    """Every wanted byte was copied once, with at most the padding behind each tensor; few copies; bounded staging."""
    report = opened.last_report
    assert report is not None
    copied, extents = fake.counter("bytes_h2d"), sum(r["extents"] for r in report.routes.values())
    assert report.nbytes <= copied <= report.nbytes + 256 * report.tensors
    # Neighbours are one transfer where the file aligns them as the device does; else small ones are gathered, up to
    # 1 MiB at a time, and large ones go alone.
    large = sum(opened[name].nbytes > GATHERED for name in opened)
    assert fake.counter("copies") <= 2 * (extents + large + copied / MIB)
    assert fake.counter("peak_registered_bytes") <= staging + SCRATCH
    assert fake.counter("calls.cuEventSynchronize") <= extents + copied / MIB + 8
    assert fake.counter("calls.cuStreamSynchronize") <= 1 + extents / 8


@pytest.mark.parametrize("name", ["gpt2", "moe", "tiny", "misaligned", "large"])
def test_a_load_is_byte_for_byte_and_accounted_for(gpu: FakeTorch, checkpoints: dict[str, Path], name: str) -> None:
    opened = penstock.open(checkpoints[name])
    tensors = opened.load("cuda:0")
    report = opened.last_report
    accounted(gpu.fake, opened)
    check(gpu, tensors, content_of(checkpoints[name]))
    # Beyond the weights: what aligns each tensor to 256 bytes, and nothing that stays on the device.
    assert gpu.pool.peak <= report.nbytes + 256 * report.tensors + gpu.pool.ROUNDING * len(tensors)
    assert gpu.fake.counter("peak_device_bytes") == 0
    kept = tensors.popitem()[1]
    del tensors
    gc.collect()
    assert gpu.pool.live <= 32 * MIB or kept.nbytes > 8 * MIB


@pytest.mark.parametrize("io", ROUTES)
@pytest.mark.parametrize("name", ["gpt2", "misaligned"])
def test_every_route_leads_to_the_gpu(gpu: FakeTorch, checkpoints: dict[str, Path], name: str, io: str) -> None:
    opened = penstock.open(checkpoints[name])
    for file in opened.files:
        penstock._core.evict(file)
    tensors = opened.load("cuda:0", options={"io": io, "staging": "16MiB", "extent": "1MiB"})
    check(gpu, tensors, content_of(checkpoints[name]))
    accounted(gpu.fake, opened, 16 * MIB)
    assert gpu.fake.counter("peak_registered_bytes") <= 16 * MIB + SCRATCH


def test_every_dtype_and_shape_class(gpu: FakeTorch, every: Path) -> None:
    content = content_of(every)
    names = [name for name in content if not name.startswith("f6_") and name != "f4.hollow"]
    tensors = penstock.open(every).load("cuda:0", names=names)
    check(gpu, tensors, {name: content[name] for name in names})
    check(gpu, penstock.open(every).load("cuda:0", dtype="raw"), content)


@pytest.mark.parametrize("order", ["file", "layer"])
@pytest.mark.parametrize("name", ["gpt2", "moe", "tiny"])
def test_a_stream_hands_out_complete_tensors(
    gpu: FakeTorch, checkpoints: dict[str, Path], name: str, order: str
) -> None:
    content, seen = content_of(checkpoints[name]), []
    for key, tensor in penstock.open(checkpoints[name]).stream("cuda:0", order=order, window="8MiB"):
        gpu.consume(tensor, content[key])
        assert gpu.fake.read(tensor.data_ptr(), tensor.nbytes) == content[key], key
        seen.append(key)
        gpu.fake.control("stream_synchronize", gpu.consumer, 0)
    del tensor
    assert sorted(seen) == sorted(content)
    if order == "file":
        assert seen == list(content)
    else:
        layers = [
            int(key.split("layers.")[1].split(".")[0]) for key in seen if key.startswith(("layers.", "model.layers."))
        ]
        assert layers == sorted(layers)


def test_a_stream_may_begin_with_an_empty_tensor(gpu: FakeTorch, tmp_path: Path) -> None:
    tensors = [Tensor("empty", "F32", (0,)), Tensor("one", "F32", (3, 100)), Tensor("two", "F32", (5,))]
    file = synth.write_file(tmp_path / "x.safetensors", [*tensors, Tensor("none", "F32", (4, 0))])
    opened, content = penstock.open(file), content_of(file)
    names = ["empty", "two", "none"]
    for streamed in (opened.stream("cuda:0", names=names), opened.stream("cuda:0", names=names, dtype="raw")):
        tensors = dict(streamed)
        assert list(tensors) == names
        check(gpu, tensors, {name: content[name] for name in names})
    check(gpu, opened.load("cuda:0"), content)
    only = opened.load("cuda:0", names=["none", "empty"])
    assert [tuple(t.shape) for t in only.values()] == [(4, 0), (0,)]


def test_memory_of_a_stream_is_given_back_as_tensors_are_dropped(gpu: FakeTorch, checkpoints: dict[str, Path]) -> None:
    opened = penstock.open(checkpoints["large"])
    largest = opened["layers.0.w"].nbytes
    for _, tensor in opened.stream("cuda:0", window="20MiB"):
        # The stand-in for a cast or a copy: queued on the current stream and not waited for when the tensor is dropped.
        gpu.fake.control("pending_use", gpu.stream, tensor.data_ptr(), tensor.nbytes, 500)
        del tensor
    assert gpu.pool.peak <= 20 * MIB + 3 * largest < opened.nbytes / 2
    assert gpu.pool.reused > 10, "the allocator handed memory out again while it was in use"


def test_kept_tensors_keep_their_bytes(gpu: FakeTorch, checkpoints: dict[str, Path]) -> None:
    content = content_of(checkpoints["large"])
    tensors = dict(penstock.open(checkpoints["large"]).stream("cuda:0", window="10MiB"))
    again = penstock.open(checkpoints["large"]).load("cuda:0")
    check(gpu, tensors, content)
    check(gpu, again, content)


def test_slices_of_both_dimensions_are_read_and_copied_exactly(gpu: FakeTorch, checkpoints: dict[str, Path]) -> None:
    opened = penstock.open(checkpoints["gpt2"])
    whole = opened.load("cpu")
    name = "wte.weight"
    cuts = [
        (slice(0, 5025), slice(0, 64)),  # columns: wide rows, copied as such
        (slice(7, 1000), slice(120, 126)),  # narrow rows, gathered
        (slice(100, 200),),
        (slice(5024, 5025), slice(127, 128)),
    ]
    for cut in cuts:
        before = gpu.fake.counter("bytes_h2d")
        tensor = opened.load("cuda:0", names=[name], slices={name: cut})[name]
        expected = whole[name][cut].contiguous()
        gpu.consume(tensor, expected.numpy().tobytes())
        assert gpu.fake.counter("bytes_h2d") - before <= expected.nbytes + 256
        gpu.fake.control("stream_synchronize", gpu.consumer, 0)
    for rank in range(4):
        half = {
            n: (slice(None),) * (t.dim() - 1) + (slice(t.shape[-1] * rank // 4, t.shape[-1] * (rank + 1) // 4),)
            for n, t in whole.items()
        }
        part = opened.load("cuda:0", slices=half)
        for n, tensor in part.items():
            gpu.consume(tensor, whole[n][half[n]].contiguous().numpy().tobytes())
        gpu.fake.control("stream_synchronize", gpu.consumer, 0)


def test_casts_run_on_the_device_within_the_window(gpu: FakeTorch, checkpoints: dict[str, Path]) -> None:
    opened = penstock.open(checkpoints["large"])
    whole = opened.load("cpu")
    half = opened.load("cuda:0", dtype="float16", options={"window": "20MiB"})
    assert all(raw(half[name]) == raw(whole[name].half()) for name in whole)
    assert gpu.pool.peak < opened.nbytes / 2


def test_load_into_waits_for_what_is_queued_on_the_parameters(gpu: FakeTorch, checkpoints: dict[str, Path]) -> None:
    for name in ("gpt2", "tiny", "misaligned"):
        opened, content = penstock.open(checkpoints[name]), content_of(checkpoints[name])
        module = {key: gpu.destination(tensor) for key, tensor in opened.load("cpu").items()}
        live, before = gpu.pool.live, gpu.fake.counter("bytes_h2d")
        report = opened.load_into(module)
        check(gpu, module, content)
        assert gpu.pool.peak == live, "no second copy on the device"
        assert gpu.fake.counter("bytes_h2d") - before == report.nbytes == opened.nbytes, "no padding in foreign memory"
        del module
        gc.collect()
        gpu.pool.peak = gpu.pool.live


def test_load_into_strided_parameters_takes_no_memory_of_the_device(
    gpu: FakeTorch, checkpoints: dict[str, Path]
) -> None:
    opened = penstock.open(checkpoints["gpt2"])
    name = "h.0.mlp.c_fc.weight"
    whole = opened.load("cpu", names=[name])[name]
    memory = gpu.pool.empty(2 * whole.nbytes).view(torch.float32).reshape(whole.shape[1], -1)
    gpu.fake.control("stream_synchronize", gpu.stream, 0)
    to = memory[:, : whole.shape[0]].t()
    assert not to.is_contiguous()
    live = gpu.pool.live
    report = opened.load_into({name: to}, strict=False)
    assert raw(to) == raw(whole)
    assert (report.copied_through, gpu.pool.peak) == ([], live)


def test_parts_of_tensors_go_to_their_destinations(gpu: FakeTorch, checkpoints: dict[str, Path]) -> None:
    """Halves of rows, columns, both in one tensor; casts on the device, through a temporary tensor."""
    opened, name = penstock.open(checkpoints["gpt2"]), "h.0.mlp.c_fc.weight"
    whole = opened.load("cpu", names=[name])[name]
    rows, columns = whole.shape
    memory = gpu.pool.empty(whole.nbytes).view(torch.float32).reshape(rows, columns)
    half = gpu.pool.empty(whole.nbytes // 4).view(torch.float16).reshape(rows // 2, columns)
    gpu.fake.control("stream_synchronize", gpu.stream, 0)
    left, right = memory[:, : columns // 2], memory[:, columns // 2 :]
    report = opened.load_into(
        [
            penstock.Destination(name, left, (slice(None), slice(columns // 2, None))),
            penstock.Destination(name, right, (slice(None), slice(0, columns // 2))),
        ]
    )
    assert raw(left) == raw(whole[:, columns // 2 :])
    assert raw(right) == raw(whole[:, : columns // 2])
    assert report.copied_through == []
    report = opened.load_into([penstock.Destination(name, half, slice(0, rows // 2), cast=True)])
    assert torch.allclose(half.float(), whole[: rows // 2].half().float(), equal_nan=True)
    assert report.copied_through == [name]


def test_copies_begin_before_the_last_memory_is_allocated(
    gpu: FakeTorch, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is granted in groups: of 180 MiB the first 16 MiB, so that the rest is allocated while bytes travel."""
    content, copied = content_of(checkpoints["large"]), []
    allocate = gpu.pool.empty

    def slowly(nbytes: int) -> torch.Tensor:
        if len(copied) == 19:  # the last one comes when something has been copied
            assert settle(lambda: gpu.fake.counter("bytes_h2d") > 0, True)
        copied.append(gpu.fake.counter("bytes_h2d"))
        return allocate(nbytes)

    monkeypatch.setattr(gpu.pool, "empty", slowly)
    tensors = penstock.open(checkpoints["large"]).load("cuda:0")
    assert len(copied) == 20 and copied[0] == copied[1] == 0
    check(gpu, tensors, content)


@pytest.mark.parametrize("left", [10, 40, 100, 170])
def test_a_load_that_runs_out_of_memory_between_two_groups_leaves_nothing(
    gpu: FakeTorch, checkpoints: dict[str, Path], left: int
) -> None:
    opened = penstock.open(checkpoints["large"])
    gpu.pool.limit = gpu.pool.live + left * MIB
    with pytest.raises(penstock.OutOfMemoryError, match="GPU 0") as caught:
        opened.load("cuda:0")
    caught.value.__traceback__ = None
    del caught
    gc.collect()
    assert gpu.pool.live == 0
    gpu.pool.limit = 1 << 40
    check(gpu, opened.load("cuda:0"), content_of(checkpoints["large"]))


@pytest.mark.parametrize("way", ["load", "start", "stream", "load_into", "load_file"])
def test_a_load_on_a_thread_that_captures_a_graph_is_refused_before_anything_is_allocated(
    gpu: FakeTorch, checkpoints: dict[str, Path], way: str
) -> None:
    """Its copies would be recorded into the graph, and not made."""
    source = checkpoints["tiny"]
    opened = penstock.open(source)
    to = {name: gpu.destination(t) for name, t in opened.load("cpu").items()} if way == "load_into" else {}
    before, copies = gpu.pool.live, gpu.fake.counter("copies")
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: opened.load("cuda:0"),
        "start": lambda: opened.start("cuda:0").result(),
        "stream": lambda: list(opened.stream("cuda:0")),
        "load_into": lambda: opened.load_into(to),
        "load_file": lambda: penstock.load_file(next(source.glob("*.safetensors")), device="cuda:0"),
    }
    gpu.captures = True
    with pytest.raises(penstock.DeviceError, match=r"cuda:0.*captures a CUDA graph"):
        calls[way]()
    assert (gpu.pool.live, gpu.fake.counter("copies")) == (before, copies)
    gpu.captures = False
    calls[way]()


def test_a_stream_whose_consumer_begins_to_capture_says_so(gpu: FakeTorch, checkpoints: dict[str, Path]) -> None:
    stream = penstock.open(checkpoints["large"]).stream("cuda:0", window="10MiB")
    next(stream)
    gpu.captures = True
    with pytest.raises(penstock.DeviceError, match="captures a CUDA graph"):
        list(stream)
    gpu.captures = False


def test_a_job_loads_in_the_background(gpu: FakeTorch, checkpoints: dict[str, Path]) -> None:
    job = penstock.open(checkpoints["moe"]).start("cuda:0")
    tensors = job.result()
    check(gpu, tensors, content_of(checkpoints["moe"]))
    name, tensor = tensors.popitem()
    assert tensor.numel() and name
    job.close()


def test_several_loads_at_once_share_the_ring(gpu: FakeTorch, checkpoints: dict[str, Path]) -> None:
    options = {"staging": "16MiB", "extent": "2MiB"}
    jobs = [penstock.open(checkpoints[n]).start("cuda:0", options=options) for n in ("gpt2", "moe", "large", "tiny")]
    stalled = penstock.open(checkpoints["large"]).stream("cuda:0", window="10MiB", options=options)
    next(stalled)
    for job, name in zip(jobs, ("gpt2", "moe", "large", "tiny"), strict=True):
        check(gpu, job.result(), content_of(checkpoints[name]))
    assert gpu.fake.counter("peak_registered_bytes") <= 16 * MIB + 6 * SCRATCH
    stalled.close()


def test_safe_open_reads_tensors_and_slices(gpu: FakeTorch, checkpoints: dict[str, Path]) -> None:
    content = content_of(checkpoints["gpt2"])
    file = checkpoints["gpt2"] / "model.safetensors"
    with penstock.safe_open(file, framework="pt", device="cuda:0") as f:
        tensor = f.get_tensor("wpe.weight")
        gpu.consume(tensor, content["wpe.weight"])
        gpu.fake.control("stream_synchronize", gpu.consumer, 0)
        row = f.get_slice("wpe.weight")[3]
        assert gpu.fake.read(row.data_ptr(), row.nbytes) == content["wpe.weight"][3 * 512 : 4 * 512]
        check(gpu, dict(f.tensors()), content)
    check(gpu, penstock.load_file(file, device="cuda:0"), content)


def dlpack(fake: FakeGpu, tensors: dict[str, Any], content: dict[str, bytes], device: tuple[int, int]) -> None:
    assert list(tensors) == list(content)
    for name, tensor in tensors.items():
        assert tensor.__dlpack_device__() == device
        assert fake.read(tensor._view.address, tensor.nbytes) == content[name], name


@pytest.mark.parametrize("name", ["gpt2", "moe", "misaligned"])
def test_without_a_framework_the_memory_is_our_own(fake: FakeGpu, checkpoints: dict[str, Path], name: str) -> None:
    opened, content = penstock.open(checkpoints[name]), content_of(checkpoints[name])
    tensors = opened.load("cuda:0", framework="dlpack")
    dlpack(fake, tensors, content, (2, 0))
    accounted(fake, opened)
    assert fake.counter("peak_device_bytes") <= opened.nbytes + 256 * len(content)
    assert fake.counter("contexts_made") == 1
    del tensors
    gc.collect()
    assert fake.counter("device_bytes") == 0


def test_our_own_memory_of_a_stream_is_given_back(fake: FakeGpu, checkpoints: dict[str, Path]) -> None:
    opened, content = penstock.open(checkpoints["large"]), content_of(checkpoints["large"])
    for name, tensor in opened.stream("cuda:0", framework="dlpack", window="20MiB"):
        dlpack(fake, {name: tensor}, {name: content[name]}, (2, 0))
        del tensor
    assert fake.counter("peak_device_bytes") <= 20 * MIB + 3 * opened["layers.0.w"].nbytes
    assert fake.counter("device_bytes") == 0


def test_only_the_gpu_asked_for_is_touched(fake: FakeGpu, checkpoints: dict[str, Path]) -> None:
    fake.configure(devices=4, expect_devices=0b100)
    loaded = penstock.open(checkpoints["misaligned"]).load("cuda:2", framework="dlpack")
    dlpack(fake, loaded, content_of(checkpoints["misaligned"]), (2, 2))


def test_the_second_load_makes_no_context_and_registers_nothing(fake: FakeGpu, checkpoints: dict[str, Path]) -> None:
    opened = penstock.open(checkpoints["misaligned"])
    calls = ("cuDevicePrimaryCtxRetain", "cuMemHostRegister_v2")
    kept = opened.load("cuda:0", framework="dlpack")
    first = [fake.counter(f"calls.{name}") for name in calls]
    again = opened.load("cuda:0", framework="dlpack")
    second = [fake.counter(f"calls.{name}") for name in calls]
    # The scratch buffer for small tensors belongs to the load.
    assert second[0] == first[0] == 1
    assert second[1] <= first[1] + 1
    assert list(kept) == list(again)


def test_hip_takes_the_same_way(monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, Path]) -> None:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"hip:{fakegpu.LIBRARY}")
    with fresh("hip") as fake:
        for name in ("gpt2", "misaligned", "moe"):
            opened, content = penstock.open(checkpoints[name]), content_of(checkpoints[name])
            dlpack(fake, opened.load("rocm:0", framework="dlpack"), content, (10, 0))
            for key, tensor in opened.stream("rocm:0", framework="dlpack", window="4MiB"):
                dlpack(fake, {key: tensor}, {key: content[key]}, (10, 0))
            del tensor
        gc.collect()
        assert fake.counter("device_bytes") == 0
        with torch_on(fake, monkeypatch) as gpu:
            check(gpu, penstock.open(checkpoints["gpt2"]).load("rocm:0"), content_of(checkpoints["gpt2"]))
            gc.collect()


@pytest.mark.parametrize(("vendor", "its", "other"), [("cuda", "cuda:0", "rocm:0"), ("hip", "rocm:0", "cuda:0")])
def test_a_gpu_of_one_vendor_is_refused_where_the_driver_is_the_others(
    monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, Path], vendor: str, its: str, other: str
) -> None:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"{vendor}:{fakegpu.LIBRARY}")
    with fresh(vendor):
        opened = penstock.open(checkpoints["gpt2"])
        with pytest.raises(penstock.UnsupportedError, match=f"{other}.* {vendor.upper()} .*{its}") as caught:
            opened.load(other, framework="dlpack")
        assert str(checkpoints["gpt2"]) in str(caught.value)
        for device in (its, 0, "gpu:0"):
            assert list(opened.load(device, framework="dlpack")) == list(opened)
        gc.collect()


@pytest.mark.machine
def test_the_engine_takes_little_cpu_beside_the_copies(fake: FakeGpu, checkpoints: dict[str, Path]) -> None:
    """9,266 tensors. What the fake driver itself checks is switched off: the rest is reading, copying and us."""
    fake.configure(checksum=0, strict=0, poison=0)
    opened = penstock.open(checkpoints["moe"])
    best = 1.0
    for _ in range(5):
        tensors = opened.load("cuda:0", framework="dlpack", options={"io": "buffered"})
        report = opened.last_report
        best = min(best, report.engine_cpu_seconds / report.cpu_seconds)
        del tensors
    assert best < 0.1, f"{report.engine_cpu_seconds} of {report.cpu_seconds} CPU seconds"


def test_gpus_and_doctor_show_the_driver(fake: FakeGpu, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock import cli

    found = penstock._core.gpus()
    assert (found["vendor"], len(found["gpus"]), found["reason"]) == ("cuda", 1, None)
    assert cli.main(["doctor"]) == 0
    assert found["gpus"][0]["name"] in capsys.readouterr().out
    assert fake.counter("contexts_made") == 0, "looking makes no context"


def test_a_driver_is_found_by_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    library = os.fsencode(tmp_path) + b"/lib\xff\xfe.so"
    Path(os.fsdecode(library)).symlink_to(fakegpu.LIBRARY)
    program = "import penstock; found = penstock._core.gpus(); print(found.get('vendor'), ascii(found['reason']))"
    for name, expected in ((library, b"cuda None"), (library + b".not", b"No such file or directory")):
        run = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            env={**os.environb, b"PENSTOCK_GPU_LIBRARY": b"cuda:" + name},
            check=False,
        )
        assert expected in run.stdout


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9,000 small parameters."""
    tensors = [Tensor(f"layers.{i % 36}.w{i}", "F32", (10, 20 + i % 5)) for i in range(9000)]
    return synth.write_file(tmp_path_factory.mktemp("gpu") / "small.safetensors", tensors)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing writes to memory that the allocator hands out: with 9,000 parameters that would be 18 s of it."""
    monkeypatch.setattr(fakegpu, "BUSY_MICROSECONDS", 0)


def submissions(fake: FakeGpu) -> int:
    """Calls that submit copies to the device."""
    names = ("cuMemcpyHtoDAsync_v2", "cuMemcpy2DAsync_v2", "cuMemcpyBatchAsync")
    return sum(fake.counter(f"calls.{name}") for name in names)


@pytest.mark.usefixtures("idle")
def test_many_small_parameters_are_filled_by_few_calls_of_the_driver(gpu: FakeTorch, small: Path) -> None:
    opened, content = penstock.open(small), content_of(small)
    to = {name: gpu.destination(tensor) for name, tensor in opened.load("cpu").items()}
    opened.load_into(to)
    assert 1 <= gpu.fake.counter("calls.cuMemcpyBatchAsync") <= submissions(gpu.fake) <= 50
    assert gpu.fake.counter("bytes_h2d") == opened.nbytes
    check(gpu, to, content)


@pytest.mark.usefixtures("idle")
def test_copies_from_memory_that_is_not_registered_are_never_submitted_together(gpu: FakeTorch, small: Path) -> None:
    """What `cuMemcpyBatchAsync` makes of pageable memory is documented for devices that can access it alone."""
    opened, content = penstock.open(small), content_of(small)
    to = {name: gpu.destination(tensor) for name, tensor in opened.load("cpu").items()}
    gpu.fake.configure(strict=0, refuse_register=801)
    report = opened.load_into(to)
    assert [fallback["to"] for fallback in report["fallbacks"]] == ["plain staging memory"]
    assert gpu.fake.counter("calls.cuMemcpyBatchAsync") == 0
    check(gpu, to, content)


def test_large_parameters_among_small_ones_go_alone(gpu: FakeTorch, checkpoints: dict[str, Path]) -> None:
    opened, content = penstock.open(checkpoints["gpt2"]), content_of(checkpoints["gpt2"])
    to = {name: gpu.destination(tensor) for name, tensor in opened.load("cpu").items()}
    opened.load_into(to)
    assert gpu.fake.counter("calls.cuMemcpyHtoDAsync_v2") > 0
    assert submissions(gpu.fake) < gpu.fake.counter("copies")
    check(gpu, to, content)


@pytest.mark.usefixtures("idle")
def test_a_driver_without_batch_copies_fills_them_one_by_one(
    monkeypatch: pytest.MonkeyPatch, small: Path, tmp_path: Path
) -> None:
    library = without(tmp_path / "libfakegpu.so", "cuMemcpyBatchAsync", "cuThreadExchangeStreamCaptureMode")
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{library}")
    with fresh(library=library) as fake, torch_on(fake, monkeypatch) as gpu:
        opened, content = penstock.open(small), content_of(small)
        to = {name: gpu.destination(tensor) for name, tensor in opened.load("cpu").items()}
        opened.load_into(to)
        assert submissions(fake) >= len(to)
        check(gpu, to, content)
        del to
        gc.collect()


@pytest.mark.usefixtures("idle")
def test_a_driver_that_has_batch_copies_and_refuses_them_is_asked_once(gpu: FakeTorch, small: Path) -> None:
    gpu.fake.configure(fail="cuMemcpyBatchAsync:1:801:0")
    opened, content = penstock.open(small), content_of(small)
    to = {name: gpu.destination(tensor) for name, tensor in opened.load("cpu").items()}
    opened.load_into(to)
    assert gpu.fake.counter("calls.cuMemcpyBatchAsync") == 1
    check(gpu, to, content)


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_a_load_beside_a_capture_neither_breaks_it_nor_fails(
    monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, Path], vendor: str
) -> None:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"{vendor}:{fakegpu.LIBRARY}")
    name = {"cuda": "cuda:0", "hip": "rocm:0"}[vendor]
    with fresh(vendor) as fake:
        opened, content = penstock.open(checkpoints["misaligned"]), content_of(checkpoints["misaligned"])
        with torch_on(fake, monkeypatch) as side:
            with fake.capturing(side):
                # Registers, allocates, waits for events and frees, all on threads that capture nothing.
                for _ in range(2):
                    tensors = opened.load(name, framework="dlpack")
                    assert {n: fake.read(t._view.address, t.nbytes) for n, t in tensors.items()} == content
                    del tensors
                dict(opened.stream(name, framework="dlpack"))
                gc.collect()
                penstock.release_staging()
            assert fake.misuses == []


def calls_of_handing_out(opened: penstock.Checkpoint, device: str) -> int:
    """Calls of Python and C functions while a load is handed out."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    job = opened.start(device)
    job.wait()
    sys.setprofile(count)
    try:
        job.result()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.machine
def test_handing_out_on_a_gpu_costs_hardly_more_than_on_the_cpu(gpu: FakeTorch, small: Path) -> None:
    gpu.fake.configure(checksum=0, poison=0)
    opened = penstock.open(small)
    few, calls = calls_of_handing_out(opened, "cpu"), calls_of_handing_out(opened, "cuda:0")
    # Not a call per tensor: the core makes them all in one.
    assert calls <= few + 300 < len(opened) / 10, (few, calls)
    seconds: dict[str, list[float]] = {"cpu": [], "cuda:0": []}
    # By turns: what disturbs one disturbs the other
    for _ in range(9):
        for device, taken in seconds.items():
            tensors = opened.load(device)
            taken.append(opened.last_report["hand_out_seconds"])
            del tensors
            gc.collect()
    assert min(seconds["cuda:0"]) <= 1.5 * min(seconds["cpu"]), seconds
