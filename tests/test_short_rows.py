"""Short rows out of the page cache: one system call for a row that is far from the next, one for many that are near.

The kernel counts calls and their bytes for this process: ``syscr`` and ``rchar`` of `/proc/self/io`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakegpu
import pagecache
import penstock
import pytest
import torch
from conftest import same
from fakegpu import FakeTorch
from penstock.bench import reference
from penstock.synthetic.synth import Tensor
from test_gpu_loads import fake, gpu

__all__ = ["fake", "gpu"]  # fixtures

Write = Callable[..., Path]

#: Rows of 28,672 bytes (`down_proj` of Llama-3-8B): a quarter is 7,168. Of 1,536 (Qwen3-30B-A3B): a quarter is 384.
FAR = Tensor("far", "BF16", (300, 14336))
NEAR = Tensor("near", "BF16", (2000, 768))
#: Besides rows: what a load reads of `/proc` and its eventfds.
OTHER_CALLS = 150


def kernel_counts() -> tuple[int, int]:
    """Calls that read, and the bytes that they brought, of all threads of this process."""
    of = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(of["syscr"]), int(of["rchar"])


def quarter(tensor: Tensor) -> tuple[slice, slice]:
    width = tensor.shape[1] // 4
    return slice(0, tensor.shape[0]), slice(width, 2 * width)


def whole(path: Path, tensor: Tensor) -> torch.Tensor:
    bits = torch.from_numpy(reference.raw(reference.entries_of(path)[tensor.name]).copy())
    return bits.view(torch.bfloat16).view(tensor.shape)


def expected(path: Path, tensor: Tensor) -> torch.Tensor:
    return whole(path, tensor)[quarter(tensor)].contiguous()


def loaded(path: Path, tensor: Tensor, into: torch.Tensor, **options: Any) -> tuple[penstock.Report, int, int]:
    """The report of a load of a quarter of the columns; calls that read, and their bytes."""
    parts = [penstock.Destination(tensor.name, into, quarter(tensor), cast=into.dtype != torch.bfloat16)]
    checkpoint = penstock.open(path)
    calls, nbytes = kernel_counts()
    report = checkpoint.load_into(parts, progress=False, options=options)
    now = kernel_counts()
    return report, now[0] - calls, now[1] - nbytes


@pytest.mark.parametrize("options", [{}, {"gap": 0}, {"io": "buffered"}, {"io": "uring_buffered"}], ids=str)
def test_a_row_that_is_far_from_the_next_is_one_call_and_its_bytes_are_copied_once(
    write: Write, options: dict[str, Any]
) -> None:
    path = write(FAR)
    pagecache.hold(path)
    into = torch.zeros(300, 3584, dtype=torch.bfloat16)
    report, calls, nbytes = loaded(path, FAR, into, **options)
    assert same(into, expected(path, FAR))
    extents = sum(way["extents"] for way in report.routes.values())
    assert report.nbytes == into.nbytes == report.routes["buffered"]["bytes"]
    assert (report.gap_bytes, report.slack_bytes) == (0, 0)
    assert extents <= 3, "the engine moves stretches of 4 MiB, not rows"
    # A row may be divided between two extents.
    assert 300 <= calls <= 300 + extents + OTHER_CALLS
    assert into.nbytes <= nbytes <= into.nbytes + (256 << 10)


def test_rows_that_are_near_are_read_together_within_the_gaps_that_the_report_counts(write: Write) -> None:
    path = write(NEAR)
    pagecache.hold(path)
    into = torch.zeros(2000, 192, dtype=torch.bfloat16)
    report, calls, nbytes = loaded(path, NEAR, into)
    assert same(into, expected(path, NEAR))
    # 3 MB, by 512 KiB
    assert calls <= 8 + OTHER_CALLS
    read = report.routes["buffered"]["bytes"]
    assert read == into.nbytes + report.gap_bytes == 1999 * 1536 + 384
    assert report.gaps == {"near": report.gap_bytes}
    assert nbytes <= read + (256 << 10)


def test_a_gap_that_was_asked_for_is_the_longest_that_is_read(write: Write) -> None:
    path = write(NEAR)
    pagecache.hold(path)
    into = torch.zeros(2000, 192, dtype=torch.bfloat16)
    report, calls, _ = loaded(path, NEAR, into, gap=1000)
    assert same(into, expected(path, NEAR))
    assert (report.gap_bytes, report.routes["buffered"]["bytes"]) == (0, into.nbytes)
    assert calls >= 2000


def test_strided_memory_and_other_dtypes_take_rows_too(write: Write) -> None:
    path = write(FAR, NEAR)
    pagecache.hold(path)
    for tensor in (FAR, NEAR):
        rows, width = tensor.shape[0], tensor.shape[1] // 4
        right = expected(path, tensor)
        for into in (
            torch.zeros(width, rows, dtype=torch.bfloat16).t(),
            torch.zeros(rows, 2 * width, dtype=torch.bfloat16)[:, :width],
            torch.zeros(rows, width),
            torch.zeros(width, rows, dtype=torch.float64).t(),
        ):
            report, _, _ = loaded(path, tensor, into)
            assert into.contiguous().view(torch.uint8).equal(right.to(into.dtype).view(torch.uint8))
            assert sum(way["extents"] for way in report.routes.values()) <= 3


def test_new_tensors_and_streams_take_rows_too(write: Write) -> None:
    path = write(FAR, NEAR)
    pagecache.hold(path)
    cuts = {tensor.name: quarter(tensor) for tensor in (FAR, NEAR)}
    checkpoint = penstock.open(path)
    found = checkpoint.load(slices=cuts)
    streamed = dict(checkpoint.stream(slices=cuts, options={"window": 1 << 20}))
    for tensor in (FAR, NEAR):
        assert same(found[tensor.name], expected(path, tensor))
        assert same(streamed[tensor.name], expected(path, tensor))


@pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)
@pytest.mark.parametrize("tensor", [FAR, NEAR], ids=lambda tensor: tensor.name)
def test_to_a_gpu_rows_lie_in_slabs_without_the_gaps_between_them(gpu: FakeTorch, write: Write, tensor: Tensor) -> None:
    path = write(tensor)
    pagecache.hold(path)
    right = expected(path, tensor)
    checkpoint = penstock.open(path)
    found = checkpoint.load("cuda:0", slices={tensor.name: quarter(tensor)})[tensor.name]
    report = checkpoint.last_report
    assert report is not None
    content = right.view(torch.uint8).numpy().tobytes()
    gpu.consume(found, content)
    assert gpu.fake.read(found.data_ptr(), found.nbytes) == content
    gpu.fake.control("stream_synchronize", gpu.consumer, 0)
    extents = sum(way["extents"] for way in report.routes.values())
    assert extents <= 3
    assert report.nbytes <= gpu.fake.counter("bytes_h2d") <= report.nbytes + 256
    # One contiguous transfer for each slab, where every row was one.
    assert gpu.fake.counter("copies") <= extents + 1


#: Rows of 8 KiB. Both destinations take three quarters of each, so half of each is there twice.
WIDE = Tensor("wide", "BF16", (1500, 4096))
OVERLAPPING = [(slice(0, 1500), slice(0, 3072)), (slice(0, 1500), slice(1024, 4096))]


def test_rows_that_several_destinations_take_are_no_more_than_a_slab_has(write: Write) -> None:
    path = write(WIDE)
    pagecache.hold(path)
    everything = whole(path, WIDE)
    into = [torch.full((1500, 3072), -1.0) for _ in OVERLAPPING]
    parts = [penstock.Destination("wide", to, cut, cast=True) for to, cut in zip(into, OVERLAPPING, strict=True)]
    report = penstock.open(path).load_into(parts, progress=False)
    for to, cut in zip(into, OVERLAPPING, strict=True):
        assert same(to, everything[cut].to(torch.float32))
    # Each row once, as a whole: by rows it would be one and a half of them.
    assert report.routes["buffered"]["bytes"] == 1500 * 8192
    assert (report.gap_bytes, report.slack_bytes) == (0, 0)


@pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)
def test_to_a_gpu_rows_that_several_destinations_take_are_no_more_than_a_slab_has(gpu: FakeTorch, write: Write) -> None:
    path = write(WIDE)
    pagecache.hold(path)
    everything = whole(path, WIDE)
    right = [everything[cut].contiguous() for cut in OVERLAPPING]
    into = [gpu.destination(tensor) for tensor in right]
    parts = [penstock.Destination("wide", to, cut) for to, cut in zip(into, OVERLAPPING, strict=True)]
    report = penstock.open(path).load_into(parts, progress=False)
    for to, tensor in zip(into, right, strict=True):
        content = tensor.view(torch.uint8).numpy().tobytes()
        gpu.consume(to, content)
        assert gpu.fake.read(to.data_ptr(), to.nbytes) == content
    gpu.fake.control("stream_synchronize", gpu.consumer, 0)
    assert report.routes["buffered"]["bytes"] == 1500 * 8192
