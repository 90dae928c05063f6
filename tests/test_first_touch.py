"""First touches: which pages a load leaves to them, which it touches itself, and what the report says of both."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pagecache
import penstock
import pytest
from conftest import Oracle
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor

MIB = 1 << 20


@pytest.fixture
def file(folder: Path) -> Path:
    """A file of 96 MB in three tensors, on the disk that the project is on."""
    return (
        synth.write(
            synth.Layout("touch", (tuple(Tensor(f"t.{i}", "F32", (2000, 4000)) for i in range(3)),)), folder / "touch"
        )
        / "model.safetensors"
    )


def read_in_small_pages(path: Path) -> None:
    """Fills the page cache 4 KiB at a time, as a program does that reads here and there."""
    pagecache.evict(path)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while file.read(4096):
            pass
    pagecache.hold(path)


@pytest.mark.parametrize("read", [read_in_small_pages, pagecache.warm])
@pytest.mark.machine
def test_resident_pages_are_left_to_their_first_touch_and_reported(file, read):
    read(file)
    checkpoint = penstock.open(file)
    tensors = checkpoint.load()
    report = checkpoint.last_report
    assert report["routes"]["mapped"]["bytes"] >= checkpoint.nbytes
    assert checkpoint.nbytes <= report["first_touch_bytes"] <= file.stat().st_size
    # An estimate from few pages. They are in memory, and no disk is waited for.
    assert 0 <= report["first_touch_seconds"] < 10
    assert "first touch" in str(report) and ": about" in str(report)
    assert report["touched_pages"] == report["touch_calls"] == 0
    Oracle(file).same(tensors)


@pytest.mark.machine
def test_without_page_timing_there_is_no_estimate(file):
    pagecache.warm(file)
    checkpoint = penstock.open(file)
    Oracle(file).same(checkpoint.load(options={"page_timing": False}))
    report = checkpoint.last_report
    assert report["first_touch_bytes"] >= checkpoint.nbytes
    assert report["first_touch_seconds"] is None
    assert "first touch" in str(report) and ": about" not in str(report)


@pytest.mark.parametrize("options", [{"copy": True}, {"io": "direct"}, {"io": "buffered"}])
@pytest.mark.machine
def test_private_memory_leaves_nothing(file, options):
    read_in_small_pages(file)
    checkpoint = penstock.open(file)
    checkpoint.load(options=options)
    assert checkpoint.last_report["first_touch_bytes"] == 0
    assert checkpoint.last_report["first_touch_seconds"] == 0
    assert "first touch" not in str(checkpoint.last_report)


@pytest.mark.parametrize("wanted", [0, 60 * MIB])
def test_of_a_file_that_is_not_all_resident_every_page_is_populated(file, wanted):
    # The start of the file is in small pages, the rest is cold
    pagecache.evict(file)
    with file.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while opened.tell() < wanted:
            opened.read(4096)
    pagecache.hold(file, wanted)
    checkpoint = penstock.open(file)
    checkpoint.load(options={"cache": "keep"})
    assert checkpoint.last_report["routes"]["mapped"]["bytes"] >= checkpoint.nbytes
    assert checkpoint.last_report["first_touch_bytes"] == 0


#: Pages of each 2 MiB that are touched to learn what touching costs, at least.
SAMPLED = 16
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def cold(file: Path) -> Path:
    pagecache.evict(file)
    return file


def test_cold_pages_are_sampled_and_touched_at_most_once(cold):
    checkpoint = penstock.open(cold)
    tensors = checkpoint.load(options={"cache": "keep"})
    report = checkpoint.last_report
    pages = -(-cold.stat().st_size // PAGE) + 1
    assert report.routes["mapped"]["bytes"] >= checkpoint.nbytes
    # How many of them depends on what a touch costs here: the samples, or all
    assert SAMPLED * (checkpoint.nbytes // (2 * MIB)) <= report.touched_pages <= pages
    # A call for the samples of each 2 MiB, and one for the rest
    stretches = checkpoint.nbytes // (2 * MIB) + 2
    assert stretches - 2 <= report.touch_calls <= 2 * (stretches + report.routes["mapped"]["extents"])
    assert f"{report.touched_pages} pages in {report.touch_calls} calls" in str(report)
    assert report.fallbacks == []
    assert (report.first_touch_bytes, report.first_touch_seconds) == (0, 0)
    Oracle(cold).same(tensors)


@pytest.mark.parametrize("options", [{"copy": True}, {"io": "direct"}, {"io": "buffered"}, {"page_timing": False}])
def test_copied_bytes_are_not_touched_nor_any_without_page_timing(cold, options):
    checkpoint = penstock.open(cold)
    checkpoint.load(options=options)
    assert checkpoint.last_report["touched_pages"] == checkpoint.last_report["touch_calls"] == 0


STRANGER = """
import sys
import numpy, penstock, penstock._numpy
import os
os.setgroups([]); os.setgid(65534); os.setuid(65534)
checkpoint = penstock.open(sys.argv[1])
tensors = checkpoint.load(framework="np")
report = checkpoint.last_report
print(report.resident_bytes >= checkpoint.nbytes, report.first_touch_bytes)
"""


def read_where_samples_are_taken(path: Path) -> None:
    """Of a cold file, brings the page in the middle of each MiB into the page cache."""
    pagecache.evict(path)
    with path.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        size = os.fstat(opened.fileno()).st_size
        for start in range(0, size, MIB):
            os.pread(opened.fileno(), 1, start + (min(start + MIB, size) - start) // 2)
    assert pagecache.resident(path).sum() < 2 * (size // MIB + 1)


def test_what_a_stranger_could_only_sample_is_populated_and_not_left(file, python):
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        theirs = Path(shutil.copy(file, folder))
        theirs.chmod(0o644)
        for _ in range(5):
            read_where_samples_are_taken(theirs)
            done = python(STRANGER, theirs)
            # The kernel may take one of these pages back before the stranger asks: then the samples say so
            if not done.stdout.startswith("False"):
                break
        assert done.stdout == "True 0\n", done.stderr
        assert pagecache.resident(theirs).mean() > 0.9
