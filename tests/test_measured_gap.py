"""`gap="auto"`: where a load has thousands of holes, reads are timed, and holes that cost less are read."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pagecache
import penstock
import pytest
import slow_fs
import torch
import torch.distributed as dist
from penstock.synthetic.synth import Tensor, write_file

ROWS, ROW, PART = 5000, 24 << 10, 4 << 10
LEAST = 16 << 10

needs_fuse = pytest.mark.skipif("slow_fs.why_not() is not None", reason="no FUSE here")


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 24 KiB."""
    folder = tmp_path_factory.mktemp("matrix")
    write_file(folder / "model.safetensors", [Tensor("matrix", "U8", (ROWS, ROW))])
    return folder


def load_part(path: Path, folder: Path, rows: int = ROWS, **options: Any) -> penstock.Report:
    """Loads the first 4 KiB of each of the first rows: holes of 20 KiB. The file is in `folder` too."""
    into = torch.zeros(rows, PART, dtype=torch.uint8)
    destination = penstock.Destination("matrix", into, (slice(0, rows), slice(0, PART)))
    report = penstock.open(path).load_into([destination], options=options, progress=False)
    backing = folder / "model.safetensors"
    stored = np.memmap(backing, np.uint8, "r", backing.stat().st_size - ROWS * ROW, (ROWS, ROW))
    assert np.array_equal(into.numpy(), stored[:rows, :PART])
    return report


def reads(report: penstock.Report) -> int:
    return sum(way["extents"] for way in report["routes"].values())


@needs_fuse
def test_holes_are_read_where_a_read_takes_long(matrix: Path) -> None:
    with slow_fs.mounted(matrix) as fs:
        path = fs.path / "model.safetensors"
        fs.tell(latency=0.003)
        report = load_part(path, matrix)
        assert ROW - PART < report["gap_limit"] <= 512 << 10
        assert reads(report) < ROWS / 10
        assert report["gap_bytes"] == report["gaps"]["matrix"]
        assert report["gap_bytes"] > 0.9 * ROWS * (ROW - PART), "all but those between two reads"
        fs.tell(latency=0.0)
        pagecache.evict(path)
        report = load_part(path, matrix, gap=LEAST)
        assert (reads(report), report["gap_limit"], report["gap_bytes"]) == (ROWS, LEAST, 0)


@needs_fuse
def test_nothing_is_timed_for_few_holes(matrix: Path) -> None:
    with slow_fs.mounted(matrix) as fs:
        fs.tell(latency=0.003)
        report = load_part(fs.path / "model.safetensors", matrix, rows=100)
        assert (reads(report), report["gap_limit"]) == (100, LEAST)


@needs_fuse
def test_nothing_is_timed_for_columns_that_ranks_exchange(matrix: Path) -> None:
    ranks, store, found = 4, dist.HashStore(), {}

    def load(rank: int, path: Path) -> None:
        columns = {"matrix": (slice(None), slice(rank * ROW // ranks, (rank + 1) * ROW // ranks))}
        checkpoint = penstock.open(path)
        checkpoint.load(slices=columns, group=(store, rank, ranks), options={"cache": "bypass"}, progress=False)
        found[rank] = checkpoint.last_report

    with slow_fs.mounted(matrix) as fs:
        path = fs.path / "model.safetensors"
        fs.tell(latency=0.003)
        threads = [threading.Thread(target=load, args=(rank, path)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert [found[rank]["gap_limit"] for rank in range(ranks)] == [LEAST] * ranks


@needs_fuse
def test_a_file_system_that_refuses_o_direct_is_not_timed(matrix: Path) -> None:
    with slow_fs.mounted(matrix) as fs:
        path = fs.path / "model.safetensors"
        fs.tell(direct=False)
        report = load_part(path, matrix, io="direct")
        assert report["gap_limit"] == LEAST
        assert report["fallbacks"]
        assert "O_DIRECT" in str(report["fallbacks"])


@needs_fuse
@pytest.mark.machine  # a file system of Python that gets no processor for two seconds hangs
def test_storage_that_answers_slowly_is_not_taken_for_hung(matrix: Path) -> None:
    with slow_fs.mounted(matrix) as fs:
        fs.tell(latency=0.1)
        report = load_part(fs.path / "model.safetensors", matrix, stall_timeout=2.0)
        assert report["gap_bytes"] >= 0


def test_the_option_says_auto_and_takes_it() -> None:
    assert penstock.Options().gap == penstock.Options(gap="auto").gap == "auto"
    assert penstock.Options(gap=0).gap == 0
    assert penstock.Options(gap="64KiB").gap == 65536
    with pytest.raises(ValueError, match=r'gap.*or "auto"'):
        penstock.Options(gap="automatic")
