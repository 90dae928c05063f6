"""The report, the page cache and the disk agree on what went which way."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pagecache
import penstock
import pytest
import torch
from models import MIB, ROUTES, WAYS, Model, Way, accounted
from penstock import _core

PAGE = 4096
#: Residency is told apart down to this many bytes; a boundary may lie anywhere within.
FINEST = 128 << 10


def cold_pages(model: Model) -> list[np.ndarray]:
    return [~pagecache.resident(path) for path in model.files]


@pytest.mark.parametrize("state", pagecache.STATES)
def test_residency_is_what_the_kernel_says(llama: Model, state: str) -> None:
    pagecache.put(llama.files, state)
    for path in llama.files:
        found, size, probes = _core.residency(str(path))
        truth = min(int(pagecache.resident(path).sum()) * PAGE, size)
        assert size == path.stat().st_size
        assert abs(found - truth) <= FINEST
        assert probes > 0


@pytest.mark.parametrize("way", [Way("auto", "bypass", None), Way("auto", "bypass", True)], ids=str)
def test_a_half_cached_file_travels_half_one_way_and_half_the_other(llama: Model, way: Way) -> None:
    checkpoint = penstock.open(llama.source)
    pagecache.put(llama.files, "half")
    before = [pagecache.resident(path) for path in llama.files]
    cold = sum(int((~pages).sum()) for pages in before) * PAGE
    process, device = pagecache.disk_bytes_of_process(), pagecache.disk_bytes_of_device(llama.files[0])
    tensors = checkpoint.load(options=way.options, progress=False)
    process = pagecache.disk_bytes_of_process() - process
    device = pagecache.disk_bytes_of_device(llama.files[0]) - device
    llama.same(tensors)
    report = checkpoint.last_report
    accounted(report, llama.nbytes)
    routes = report.routes
    # What was not resident came past the page cache, nothing else did, and the disk has seen the same bytes
    slop = len(llama.files) * FINEST
    assert abs(routes["direct"]["bytes"] - cold) <= slop
    assert routes["mapped"] == {"bytes": 0, "extents": 0}
    assert (
        routes["buffered"]["bytes"] == llama.nbytes + report.slack_bytes + report.gap_bytes - routes["direct"]["bytes"]
    )
    assert routes["direct"]["bytes"] <= process <= routes["direct"]["bytes"] + slop
    assert device >= process  # others read as well
    assert abs(report.resident_bytes - sum(int(pages.sum()) for pages in before) * PAGE) <= slop
    assert report.cache == "bypass"
    # And the page cache is what it was
    for path, pages in zip(llama.files, before, strict=True):
        assert np.array_equal(pagecache.resident(path), pages), path


@pytest.mark.parametrize("way", [Way("auto", "keep", None), Way("buffered", "keep", None)], ids=str)
def test_only_what_was_not_resident_is_read_from_disk_and_then_stays(llama: Model, way: Way) -> None:
    checkpoint = penstock.open(llama.source)
    pagecache.put(llama.files, "half")
    cold = sum(int(pages.sum()) for pages in cold_pages(llama)) * PAGE
    before = pagecache.disk_bytes_of_process()
    tensors = checkpoint.load(options=way.options, progress=False)
    from_disk = pagecache.disk_bytes_of_process() - before
    llama.same(tensors)
    assert checkpoint.last_report.cache == "keep"
    assert cold - len(llama.files) * FINEST <= from_disk <= cold + len(llama.files) * FINEST
    # All but the pages of the headers and what lies behind the last tensor
    assert sum(int(pages.sum()) for pages in cold_pages(llama)) * PAGE <= len(llama.files) * FINEST


@pytest.mark.parametrize("state", pagecache.STATES)
def test_mapped_pages_are_there_or_counted_as_left_to_their_first_touch(llama: Model, state: str) -> None:
    checkpoint = penstock.open(llama.source)
    pagecache.put(llama.files, state)
    tensors = checkpoint.load(options={"cache": "keep"}, progress=False)
    report = checkpoint.last_report
    absent = unmapped_bytes(tensors.values())
    assert report.routes["mapped"]["bytes"] >= llama.nbytes
    if state == "warm":
        # The pages that were touched to estimate the cost are mapped with their folios: of 2 MiB, four at most
        assert abs(report.first_touch_bytes - absent) <= len(llama.files) * FINEST + 4 * (2 << 20)
    else:  # a first touch might have to wait for the disk, or be killed where the file has shrunk meanwhile
        assert report.first_touch_bytes == 0
        assert absent == 0
    llama.same(tensors)


def unmapped_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors in pages that this process has not mapped, as its page tables say."""
    absent = set()
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        for tensor in tensors:
            first, past = tensor.data_ptr() // PAGE, -(-(tensor.data_ptr() + tensor.nbytes) // PAGE)
            entries = np.frombuffer(os.pread(file.fileno(), 8 * (past - first), 8 * first), dtype="<u8")
            absent.update((first + np.flatnonzero(entries >> 63 == 0)).tolist())
    return len(absent) * PAGE


@pytest.mark.pairwise
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_warm_load_reads_nothing_from_disk_unless_told_to(llama: Model, way: Way) -> None:
    checkpoint = penstock.open(llama.source)
    pagecache.put(llama.files, "warm")
    before = pagecache.disk_bytes_of_process()
    tensors = checkpoint.load(options=way.options, progress=False)
    from_disk = pagecache.disk_bytes_of_process() - before
    direct = checkpoint.last_report.routes["direct"]["bytes"]
    assert direct <= from_disk <= direct + PAGE * len(llama.files)
    past = way.io in ("direct", "uring", "threads")
    assert bool(direct) == past
    # What is there already stays, but nothing is added to it by what reads past it
    assert checkpoint.last_report.cache == ("bypass" if past else "keep")
    del tensors


@pytest.mark.pairwise
@pytest.mark.parametrize("state", ["cold", "half"])
@pytest.mark.parametrize("way", [way for way in WAYS if way.keeps_cold_bytes is False], ids=str)
def test_loads_that_bypass_the_page_cache_leave_it_as_it_was(llama: Model, way: Way, state: str) -> None:
    pagecache.put(llama.files, state)
    checkpoint = penstock.open(llama.source)  # reads the headers, with the kernel's read-ahead behind them
    headers = sum(_core.Checkpoint.open([str(llama.source)]).data_start(file) for file in range(len(llama.files)))
    before = [pagecache.resident(path) for path in llama.files]

    def unchanged() -> None:
        for path, pages in zip(llama.files, before, strict=True):
            assert np.array_equal(pagecache.resident(path), pages), path

    if state == "cold":
        assert sum(int(pages.sum()) for pages in before) * PAGE <= headers + len(llama.files) * FINEST
    tensors = checkpoint.load(options=way.options, progress=False)
    llama.same(tensors)
    assert checkpoint.last_report.cache == "bypass"
    unchanged()
    # Slices, streams and existing tensors too
    part = {name: slice(0, 7) for name in llama.entries}
    for _ in checkpoint.stream(slices=part, options=way.options):
        pass
    into = {name: np.empty(entry.shape, dtype=np.uint16) for name, entry in llama.entries.items()}
    import torch

    checkpoint.load_into(
        {name: torch.from_numpy(array).view(torch.bfloat16) for name, array in into.items()},
        options=way.options,
        progress=False,
    )
    unchanged()


@pytest.mark.parametrize("way", [way for way in WAYS if way.keeps_cold_bytes], ids=str)
def test_loads_that_keep_leave_everything_in_the_page_cache(llama: Model, way: Way) -> None:
    checkpoint = penstock.open(llama.source)
    pagecache.put(llama.files, "cold")
    llama.same(checkpoint.load(options=way.options, progress=False))
    assert sum(int(pages.sum()) for pages in cold_pages(llama)) * PAGE <= len(llama.files) * FINEST
    assert checkpoint.last_report.cache == "keep"


@pytest.mark.parametrize("extent", [1 * MIB, 4 * MIB, 8 * MIB])
@pytest.mark.parametrize("way", [way for way in ROUTES if way.io != "auto"], ids=str)
def test_a_file_is_read_in_as_few_reads_as_its_size_allows(gpt2: Path, way: Way, extent: int) -> None:
    """One stretch of 26 MB from the header's end to a tensor's end: known to the byte."""
    checkpoint = penstock.open(gpt2)
    names = checkpoint.keys()
    start = checkpoint[names[0]].offsets[0]
    last = next(i for i, name in enumerate(names) if checkpoint[name].offsets[1] - start > 26 * MIB)
    end = checkpoint[names[last]].offsets[1]
    path = gpt2 / "model.safetensors"
    pagecache.evict(path)
    tensors = checkpoint.load(names=names[: last + 1], options={**way.options, "extent": extent, "staging": 64 * MIB})
    report = checkpoint.last_report
    accounted(report, end - start)
    whole_pages = way.io != "buffered"
    first, past = (start // PAGE * PAGE, -(-end // PAGE) * PAGE) if whole_pages else (start, end)
    route = way.io if way.io in ("mapped", "buffered") else "direct"
    # The first extent of a buffered read ends on a page, so it may be a little shorter than the others
    reads, at = 0, first
    while past - at > extent:
        at = (at + extent) // PAGE * PAGE
        reads += 1
    assert report.routes[route] == {"bytes": past - first, "extents": reads + 1}
    assert (report.slack_bytes, report.gap_bytes) == (past - first - (end - start), 0)
    del tensors


def test_small_tensors_do_not_cost_a_read_each(moe: Model) -> None:
    checkpoint = penstock.open(moe.source)
    for way in ROUTES:
        tensors = checkpoint.load(options=way.options, progress=False)
        reads = sum(route["extents"] for route in checkpoint.last_report.routes.values())
        assert reads <= sum(-(-path.stat().st_size // (4 * MIB)) + 1 for path in moe.files)
        del tensors


def test_a_load_of_nothing_reads_nothing(llama: Model) -> None:
    checkpoint = penstock.open(llama.source)
    for way in ROUTES:
        assert checkpoint.load(names=[], options=way.options) == {}
        accounted(checkpoint.last_report, 0)
