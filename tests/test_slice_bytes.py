"""A slice reads its runs, what fills up their pages, and gaps up to the stated limit: exactly, on every route.

What has to be read is worked out from the index alone (`planned_reads`) and compared with the report, with what the
kernel says was read from the disk, and with what is in the page cache afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import fakegpu
import numpy as np
import pagecache
import penstock
import pytest
import torch
from conftest import raw
from fakegpu import fresh, torch_on
from models import IO, MIB, Model, Way
from penstock.synthetic import synth
from penstock.synthetic.synth import BITS, Layout, Tensor
from planned_reads import HUGE, PAGE, Range, pages_of, reads, runs, within

GAP = 16 << 10
EXTENT = 4 * MIB

TENSORS = (
    Tensor("before", "U8", (3 * MIB + 40,)),
    Tensor("matrix", "F32", (512, 4096)),  # rows of 16 KiB
    Tensor("narrow", "BF16", (4096, 96)),
    Tensor("experts", "BF16", (8, 96, 512)),
    Tensor("odd", "U8", (4097,)),  # what follows is misaligned
    Tensor("wide", "U8", (24, 70001)),
    Tensor("crooked", "F32", (64, 3000)),
    Tensor("after", "U8", (9 * MIB,)),
    Tensor("last", "F64", (40, 40)),
)


@pytest.fixture(scope="module")
def cut(folder: Path) -> Model:
    """One file of 24 MB with tensors to cut, and others before and behind that nobody asks for."""
    return Model(synth.write(Layout("slices", (TENSORS,)), folder / "slices"))


class Cut(NamedTuple):
    """An index, and what is expected of it."""

    tensor: str
    index: Any
    one: bool = True
    """Whether each part of it is one range of bytes: then it can stay in a mapping of the file."""
    read: Any = None
    """What is read for it, as an index of numpy, where that is more than its elements."""


def _mask(*rows: int) -> torch.Tensor:
    mask = torch.zeros(512, dtype=torch.bool)
    mask[list(rows)] = True
    return mask


every = slice(None)

#: Slices alone, which `load(slices=)` takes as well.
SLICES = {
    "rows": Cut("matrix", slice(100, 140)),
    "one row": Cut("matrix", slice(-1, None)),
    "all rows but one": Cut("matrix", slice(1, None)),
    "rows two apart": Cut("matrix", slice(None, None, 2), one=False),  # gaps of exactly the limit
    "rows three apart": Cut("matrix", slice(None, None, 3), one=False),
    "rows a hundred apart": Cut("matrix", slice(50, None, 100), one=False),
    "a column": Cut("matrix", (every, slice(5, 6)), one=False),
    "columns": Cut("matrix", (every, slice(1024, 2048)), one=False),
    "columns far apart": Cut("wide", (every, slice(300, 5300)), one=False),
    "columns two apart": Cut("narrow", (every, slice(1, 90, 2)), one=False),
    "columns very far apart": Cut("wide", (every, slice(None, None, 30000)), one=False),
    "rows and columns": Cut("wide", (slice(1, None, 4), slice(None, None, 7)), one=False),
    "an expert": Cut("experts", slice(3, 4)),
    "experts": Cut("experts", (slice(2, 7), Ellipsis)),
    "experts two apart": Cut("experts", slice(1, None, 2), one=False),
    "rows of every expert": Cut("experts", (every, slice(10, 20)), one=False),
    "columns of every expert": Cut("experts", (..., slice(256, None)), one=False),
    "a block of some experts": Cut("experts", (slice(1, 7, 2), slice(5, 60, 11), slice(100, 200)), one=False),
    "strides everywhere": Cut("experts", (slice(0, 8, 3), slice(1, 96, 2), slice(0, 512, 5)), one=False),
    "misaligned rows": Cut("crooked", slice(10, 20)),
    "misaligned columns": Cut("crooked", (every, slice(100, 200, 3)), one=False),
    "the end of the file": Cut("last", slice(30, None)),
    "columns to the end of the file": Cut("last", (every, slice(39, None)), one=False),
    "nothing": Cut("matrix", slice(7, 7)),
}

#: What only an open slice takes.
INDICES = {
    "a number": Cut("matrix", 7),
    "numbers": Cut("experts", (-1, 95, slice(100, 200))),
    "the last dimension": Cut("narrow", (..., None, 0), one=False),
    "a list of rows": Cut("matrix", [400, 5, 6, 5]),
    "a mask of rows": Cut("matrix", _mask(3, 4, 5, 200, 511)),
    "a list of experts": Cut("experts", (torch.tensor([6, 0, 6]), slice(0, 96))),
    "rows of a list of experts": Cut("experts", ([6, 0], slice(90, None))),
    "a list of columns": Cut("wide", (every, [0, 69999]), one=False),
    "columns in a list of rows": Cut("matrix", ([0, 300, 301], slice(0, 4000, 3)), one=False),
    # Of two scattered dimensions the second is read from its first position to its last
    "two lists": Cut("wide", ([0, 5], [10, 20000]), read=np.ix_([0, 5], range(10, 20001))),
}


@dataclass(frozen=True)
class Read:
    """What a slice has to read by one way."""

    nbytes: int
    route: str
    planned: list[Range]
    wanted: list[Range]

    @property
    def read(self) -> int:
        return sum(past - first for first, past in self.planned)

    @property
    def slack(self) -> int:
        """Bytes before the first and behind the last wanted one of each read."""
        slack = 0
        for first, past in self.planned:
            inside = within(self.wanted, first, past)
            assert inside is not None
            slack += inside[0] - first + past - inside[1]
        return slack


def has_to_read(model: Model, cut: Cut, way: Way, *, gap: int = GAP, extent: int = EXTENT, warm: bool = False) -> Read:
    entry = model.entries[cut.tensor]
    index = cut.index if cut.read is None else cut.read
    if isinstance(index, torch.Tensor):
        index = index.numpy()
    elif isinstance(index, tuple):
        index = tuple(part.numpy() if isinstance(part, torch.Tensor) else part for part in index)
    wanted = runs(entry.offset, entry.shape, BITS[entry.dtype] // 8, index)
    past_the_cache = way.io in ("direct", "uring", "threads") or (way.cache == "bypass" and not warm)
    # Less than 64 KiB that are resident are read with what is not, if need be past the page cache
    past_the_cache |= way.cache == "bypass" and entry.nbytes < 64 << 10 and not cut.one
    maps = cut.one and not past_the_cache and way.copy is not True and way.io in ("auto", "mapped")
    route = "direct" if past_the_cache else "mapped" if maps else "buffered"
    nbytes = sum(b - a for a, b in wanted)
    planned = reads(
        wanted,
        entry.file.stat().st_size,
        extent=1 << 30 if maps and warm else extent,
        gap=gap,
        pages=route != "buffered",
        cut=HUGE if maps else PAGE,
    )
    return Read(nbytes, route, list(planned), wanted)


def check_report(report: Any, expected: Read) -> None:
    assert report.nbytes == expected.nbytes
    for route, found in report.routes.items():
        mine = route == expected.route
        assert found == {"bytes": expected.read * mine, "extents": len(expected.planned) * mine}, route
    assert report.slack_bytes == expected.slack
    assert report.gap_bytes == expected.read - expected.slack - expected.nbytes


def check_rows(report: Any, expected: Read) -> None:
    """Of resident rows: the plan is the most that is read. Some gaps are skipped that a disk would bring."""
    assert report.nbytes == expected.nbytes
    found = report.routes[expected.route]
    assert sum(way["extents"] for way in report.routes.values()) == found["extents"] <= len(expected.planned)
    assert found["bytes"] == report.nbytes + report.gap_bytes + report.slack_bytes <= expected.read
    assert report.slack_bytes == 0


def filled(report: Any) -> None:
    """Waits for what fills the page cache after a load: it would bring back what the next test has evicted."""
    if report is not None and report.cache_fill is not None:
        assert report.cache_fill.wait(60)


def check_values(tensor: torch.Tensor, model: Model, cut: Cut) -> None:
    whole = torch.from_numpy(model.bytes_of(cut.tensor).copy()).view(tensor.dtype)
    part = whole.view(model.entries[cut.tensor].shape)[cut.index]
    assert tensor.shape == part.shape
    assert raw(tensor) == raw(part)


def kind(name: str) -> tuple[object, ...]:
    """What a slice has in common with others: for `pairwise`."""
    cut = CUTS[name]
    dimensions = len(cut.index) if isinstance(cut.index, tuple) else 1
    return cut.tensor, cut.one, dimensions, name in SLICES


WAYS = [Way(io, "auto", None) for io in IO] + [Way("auto", "keep", True), Way("auto", "bypass", None)]
CUTS = SLICES | INDICES


@pytest.mark.pairwise(name=kind)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", CUTS)
def test_a_slice_reads_from_disk_what_it_needs_and_nothing_else(cut: Model, name: str, way: Way) -> None:
    wanted, [path] = CUTS[name], cut.files
    # What it runs may have to come from the disk too, once. A warm file: reads of a cold one may outlast the eviction
    pagecache.warm(path)
    with penstock.safe_open(path, options=way.options) as file:
        file.get_slice(wanted.tensor)[wanted.index]
    with penstock.safe_open(path, options=way.options) as file:
        pagecache.evict(path)
        with pagecache.FromDisk() as from_disk:
            tensor = file.get_slice(wanted.tensor)[wanted.index]
        report = file._checkpoint.last_report
        filled(report)
    pages = set(np.flatnonzero(pagecache.resident(path)).tolist())
    expected = has_to_read(cut, wanted, way)
    if expected.nbytes:
        check_report(report, expected)
    touched = pages_of(expected.planned)
    from_disk.check(len(touched) * PAGE, mapped=expected.route == "mapped")
    assert pages == (set() if expected.route == "direct" else touched)
    check_values(tensor, cut, wanted)


@pytest.mark.pairwise(name=kind)
@pytest.mark.parametrize("way", [way for way in WAYS if way.io not in ("direct", "uring")], ids=str)
@pytest.mark.parametrize("name", SLICES)
def test_a_load_of_slices_reads_the_same(cut: Model, name: str, way: Way) -> None:
    wanted, [path] = SLICES[name], cut.files
    checkpoint = penstock.open(path)
    pagecache.warm(path)
    expected = has_to_read(cut, wanted, way, warm=True)
    with pagecache.FromDisk() as from_disk:
        tensors = checkpoint.load(
            names=[wanted.tensor], slices={wanted.tensor: wanted.index}, options=way.options, progress=False
        )
    by_rows = expected.route == "buffered" and len(expected.wanted) > 1
    (check_rows if by_rows else check_report)(checkpoint.last_report, expected)
    nbytes = len(pages_of(expected.planned)) * PAGE if expected.route == "direct" else 0
    from_disk.check(nbytes, mapped=expected.route == "mapped")
    check_values(tensors[wanted.tensor], cut, wanted)


@pytest.mark.parametrize("gap", [0, 300, MIB])
@pytest.mark.parametrize("io", ["mapped", "buffered", "threads"])
def test_gaps_are_read_up_to_the_limit_that_is_set(cut: Model, io: str, gap: int) -> None:
    [path] = cut.files
    way = Way(io, "auto", None)
    for wanted in CUTS.values():
        with penstock.safe_open(path, options={**way.options, "gap": gap}) as file:
            pagecache.evict(path)
            with pagecache.FromDisk() as from_disk:
                tensor = file.get_slice(wanted.tensor)[wanted.index]
            report = file._checkpoint.last_report
            filled(report)
        expected = has_to_read(cut, wanted, way, gap=gap)
        if expected.nbytes:
            check_report(report, expected)
        from_disk.check(len(pages_of(expected.planned)) * PAGE, mapped=expected.route == "mapped")
        check_values(tensor, cut, wanted)
        del tensor  # a mapping keeps its pages


def bytes_read_by_calls() -> int:
    """Bytes that read, preadv and the like have given this process, from anywhere."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError("/proc/self/io has no rchar")


#: What a load reads besides: /proc/meminfo, control groups, counters to wake up by, and /proc/self/io itself.
CALLS = 24 << 10


@pytest.mark.parametrize("io", ["buffered", "threads"])
@pytest.mark.parametrize("name", ["rows", "columns", "columns two apart", "experts", "strides everywhere"])
def test_calls_ask_for_no_more_than_the_plan(cut: Model, name: str, io: str) -> None:
    wanted, [path] = CUTS[name], cut.files
    expected = has_to_read(cut, wanted, Way(io, "auto", None))
    pagecache.warm(path)
    with penstock.safe_open(path, options={"io": io}) as file:
        part = file.get_slice(wanted.tensor)
        before = bytes_read_by_calls()
        part[wanted.index]
        read = bytes_read_by_calls() - before
    assert expected.nbytes <= read <= expected.read + CALLS


def test_several_slices_of_one_tensor_share_the_reads_of_their_pages(cut: Model) -> None:
    """Two ranges on one page, and two whose pages touch: no page is read twice."""
    [path] = cut.files
    entry = cut.entries["narrow"]
    rows = [10, 12, 14, 500, 4000, 4001, 4003]  # of 192 bytes
    index = (np.array(rows), slice(None))
    for way in WAYS:
        expected = has_to_read(cut, Cut("narrow", index), way)
        assert len(expected.planned) == 3
        with penstock.safe_open(path, options=way.options) as file:
            pagecache.evict(path)
            with pagecache.FromDisk() as from_disk:
                tensor = file.get_slice("narrow")[rows]
            check_report(file._checkpoint.last_report, expected)
            filled(file._checkpoint.last_report)
        nbytes = len(pages_of(expected.planned)) * PAGE
        assert nbytes <= 4 * PAGE
        from_disk.check(nbytes, mapped=expected.route == "mapped")
        assert raw(tensor) == cut.elements_of("narrow")[rows].tobytes()
    assert entry.shape == (4096, 96)


@pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)
@pytest.mark.parametrize("io", ["auto", "buffered", "direct", "uring", "threads"])
def test_slices_in_any_dimension_on_a_gpu(cut: Model, monkeypatch: pytest.MonkeyPatch, io: str) -> None:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    [path] = cut.files
    # Nothing is mapped for a GPU
    way = Way("buffered" if io == "auto" else io, "auto", None)
    with fresh() as fake, torch_on(fake, monkeypatch) as gpu:
        with penstock.safe_open(path, device="cuda:0", options={"io": io}) as file:
            for wanted in CUTS.values():  # code that is not in the page cache comes from the disk too
                file.get_slice(wanted.tensor)[wanted.index]
        for name, wanted in CUTS.items():
            expected = has_to_read(cut, wanted, way)
            with penstock.safe_open(path, device="cuda:0", options={"io": io}) as file:
                pagecache.evict(path)
                copied, before = fake.counter("bytes_h2d"), pagecache.disk_bytes_of_process()
                tensor = file.get_slice(wanted.tensor)[wanted.index]
                copied, from_disk = (
                    fake.counter("bytes_h2d") - copied,
                    pagecache.disk_bytes_of_process() - before,
                )
                report = file._checkpoint.last_report
            if expected.nbytes:
                check_report(report, expected)
                # Of several parts small ones travel together, with what aligns them between
                assert expected.nbytes <= copied <= expected.nbytes + 256 * report.tensors, name
                assert report.tensors > 1 or gpu.pool.contains(tensor.data_ptr()), name
            assert from_disk == len(pages_of(expected.planned)) * PAGE, name
            check_values(tensor, cut, wanted)
            del tensor


@pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)
def test_a_load_of_slices_to_a_gpu(cut: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    [path] = cut.files
    slices = {
        "matrix": (slice(None), slice(7, 4000, 5)),
        "experts": (slice(1, 7, 2), slice(5, 60, 11), slice(100, 200)),
        "crooked": slice(10, 20),
        "narrow": (slice(0, 4096, 3), slice(90, 96)),
    }
    with fresh() as fake, torch_on(fake, monkeypatch) as gpu:
        checkpoint = penstock.open(path)
        tensors = checkpoint.load("cuda:0", names=list(slices), slices=slices)
        report = checkpoint.last_report
        nbytes = 0
        for name, index in slices.items():
            content = np.ascontiguousarray(cut.elements_of(name)[index]).tobytes()
            gpu.consume(tensors[name], content)
            assert fake.read(tensors[name].data_ptr(), len(content)) == content, name
            nbytes += len(content)
        assert report.nbytes == nbytes
        assert nbytes <= fake.counter("bytes_h2d") <= nbytes + 256 * len(slices)
        fake.control("stream_synchronize", gpu.consumer, 0)
        del tensors
