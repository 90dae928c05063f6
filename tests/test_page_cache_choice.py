"""`cache="auto"` where tensors are copied: whether cold bytes stay in the page cache is up to the pace of the disk."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ordeal
import pagecache
import penstock
import pytest
import slow_disk

pytestmark = pytest.mark.machine

MIB = 1 << 20
#: Above it a load tries the storage (`WORTH_A_TRIAL`); and what goes past the page cache until it is decided at last.
TENSORS, NBYTES = 24, 8 * MIB
TRIED = 224 * MIB
#: What at most goes through it while it is tried, and is read ahead behind that.
THROUGH = 48 * MIB

#: Loads once, in the control group of which it is told, and prints the report and a checksum.
PROGRAM = """
import json, os, sys, zlib
import numpy as np, penstock
source, group, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if group:
    with open(group, "w") as file:
        file.write(str(os.getpid()))
checkpoint = penstock.open(source)
tensors = checkpoint.load(framework="np", options=options, progress=False)
report = checkpoint.last_report
print(json.dumps({
    "cache": report.cache, "reason": report.cache_reason, "direct": report.routes["direct"]["bytes"],
    "sums": {name: zlib.crc32(array.tobytes()) for name, array in tensors.items()},
}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("choice") / "model.safetensors"
    ordeal.write(path, TENSORS, NBYTES)
    yield path
    path.unlink()


def load(model: Path, group: str = "", **options: Any) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(ordeal.run(PROGRAM, model, group, json.dumps(options)))
    return said


def settle(model: Path) -> None:
    """Waits until nothing more comes into the page cache: a process may leave reads of the kernel behind."""
    before, until = -1, time.monotonic() + 20
    while (now := pagecache.resident_bytes([model])) != before and time.monotonic() < until:
        before = now
        time.sleep(0.3)


def test_a_slow_disk_is_kept_and_a_fast_one_is_not(model: Path) -> None:
    """192 MiB at 100 MB/s, and without a limit: there the reason must agree with what was chosen, whatever the disk."""
    pagecache.put([model], "warm")
    warm = load(model, copy=True)
    assert (warm["cache"], warm["reason"]) == ("keep", "the page cache holds all wanted bytes")

    pagecache.put([model], "cold")
    as_it_is = load(model, copy=True)
    assert as_it_is["sums"] == warm["sums"]
    assert "the storage gives" in as_it_is["reason"]
    past, through = map(float, re.findall(r"([0-9.]+) GB/s", as_it_is["reason"]))
    # The figures are rounded to 0.01 GB/s
    agrees = {
        "keep" if through + rounding >= (0.5 if past - rounding < 0.25 else 0.9) * (past - rounding) else "fill"
        for rounding in (-0.01, 0.0, 0.01)
    }
    assert as_it_is["cache"] in agrees, as_it_is["reason"]
    # A load that tries again has read more through the page cache by then.
    if as_it_is["cache"] == "fill" and "tried again" not in as_it_is["reason"]:
        assert as_it_is["direct"] >= TENSORS * NBYTES - THROUGH

    settle(model)
    pagecache.put([model], "cold")
    try:
        with slow_disk.group(model, 100_000_000) as group:
            slow = load(model, str(group), copy=True)
    except slow_disk.NotHere as why:
        pytest.skip(str(why))
    assert slow["sums"] == warm["sums"]
    assert slow["cache"] == "keep", slow["reason"]
    assert 0 < slow["direct"] <= TRIED
    # What was tried past the page cache is read into it at the end, by the kernel, which nobody waits for. Pages may be
    # given up again at any time
    everything = -(-model.stat().st_size // pagecache.PAGE) * pagecache.PAGE

    def brought_in() -> int:
        return pagecache.resident_bytes([model]) + pagecache.given_up() * pagecache.PAGE

    until = time.monotonic() + 20
    while brought_in() < everything - MIB and time.monotonic() < until:
        time.sleep(0.1)
    assert brought_in() >= everything - MIB


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_what_was_tried_past_the_page_cache_is_requested_in_pieces_that_every_kernel_takes(
    model: Path, tmp_path: Path
) -> None:
    """The kernel may cut a request at the disk's read-ahead, which is 128 KiB by default."""
    log = tmp_path / "log"
    pagecache.put([model], "cold")
    try:
        with slow_disk.group(model, 100_000_000) as group:
            program = ["strace", "-f", "-qq", "-o", str(log), "-e", "trace=fadvise64", sys.executable, "-c", PROGRAM]
            done = subprocess.run(
                [*program, str(model), str(group), json.dumps({"copy": True})],
                capture_output=True,
                text=True,
                timeout=60 * ordeal.load_factor(),
                check=False,
            )
    except slow_disk.NotHere as why:
        pytest.skip(str(why))
    if done.returncode and "ptrace" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["cache"] == "keep", said["reason"]
    requests = [int(n) for n in re.findall(r"fadvise64\(\d+, \d+, (\d+), POSIX_FADV_WILLNEED", log.read_text())]
    assert sum(requests) >= said["direct"] > 0
    assert max(requests) <= 128 << 10


@pytest.mark.parametrize(
    ("options", "cache"),
    [({"copy": True, "cache": "keep"}, "keep"), ({"copy": True, "cache": "bypass"}, "bypass"), ({}, "keep")],
)
def test_nothing_is_tried_where_the_choice_was_made_or_costs_nothing(model: Path, options: Any, cache: str) -> None:
    pagecache.put([model], "cold")
    checkpoint = penstock.open(model)
    checkpoint.load(options=options, progress=False)
    report = checkpoint.last_report
    assert report.cache == cache
    assert "the storage gives" not in report.cache_reason
    assert bool(report.routes["direct"]["bytes"]) == (cache == "bypass")


def test_a_small_load_keeps_without_a_trial(model: Path) -> None:
    pagecache.put([model], "cold")
    checkpoint = penstock.open(model)
    names = checkpoint.keys()[:4]
    checkpoint.load(names=names, options={"copy": True}, progress=False)
    assert checkpoint.last_report.cache == "keep"
    assert checkpoint.last_report.routes["direct"]["bytes"] == 0


@pytest.mark.parametrize("options", [{"copy": True, "cache": "keep"}, {"io": "buffered"}], ids=str)
def test_parts_of_cold_tensors_are_read_through_the_page_cache_and_nothing_else_is(model: Path, options: Any) -> None:
    """The middle of each tensor, 3 MiB of 8: the kernel's read-ahead would bring up to 8 MiB behind each."""
    checkpoint = penstock.open(model)
    names = checkpoint.keys()
    slices = {name: slice(2 * MIB + 100, 5 * MIB + 100) for name in names}
    pagecache.put([model], "cold")
    before = pagecache.disk_bytes_of_process()
    tensors = checkpoint.load(slices=slices, options=options, progress=False)
    read = pagecache.disk_bytes_of_process() - before
    wanted = TENSORS * 3 * MIB
    assert sum(tensor.nbytes for tensor in tensors.values()) == wanted
    assert wanted <= read <= wanted + TENSORS * 2 * pagecache.PAGE
    assert wanted <= pagecache.resident_bytes([model]) <= wanted + TENSORS * 2 * pagecache.PAGE


def test_parts_of_mapped_files_bring_in_their_huge_pages_and_nothing_else(model: Path) -> None:
    checkpoint = penstock.open(model)
    names = checkpoint.keys()
    slices = {name: slice(2 * MIB + 100, 5 * MIB + 100) for name in names}
    pagecache.put([model], "cold")
    before = pagecache.disk_bytes_of_process()
    tensors = checkpoint.load(slices=slices, progress=False)
    read = pagecache.disk_bytes_of_process() - before
    assert checkpoint.last_report.routes["mapped"]["bytes"] >= TENSORS * 3 * MIB
    # 3 MiB lie in at most three pages of 2 MiB
    assert TENSORS * 3 * MIB <= read <= TENSORS * 6 * MIB
    # And once it is loaded the kernel takes these pages for what they are: not for the first to be given up
    flags = flags_of_mappings(model)
    assert flags and not any("rr" in line for line in flags), flags
    del tensors


def flags_of_mappings(path: Path) -> list[list[str]]:
    """What the kernel was advised of each mapping of a file."""
    found, ours = [], False
    with open("/proc/self/smaps") as file:
        for line in file:
            words = line.split()
            if words[0] == "VmFlags:":
                if ours:
                    found.append(words[1:])
            elif not words[0].endswith(":"):
                ours = words[-1] == str(path)
    return found
