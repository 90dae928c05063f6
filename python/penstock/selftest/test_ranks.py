"""Two ranks that load together onto one GPU, and exchange what both want: each is a process of its own.

Beside them one process alone: what two take longer is what they cost each other. Without a GPU each has a fake one
of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from . import results
from .gpus import FAKE

RANK = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import penstock
from penstock.selftest import checkpoints, gpus

rank, source, exchange, into = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "into"
gpu = gpus.attach()
ranks = 1 if exchange == "one process" else 2
group = (dist.FileStore(sys.argv[5], 2), rank, 2) if ranks == 2 else None
opened = penstock.open(source)
expected = checkpoints.content(source)
to = {n: gpu.busy_memory(tuple(opened[n].shape), torch.float32) for n in opened} if into else None
gpu.synchronize()
for number in range(2):
    begun = time.perf_counter()
    options = {"cache": "keep", **({"exchange": exchange} if group else {})}
    if into:
        report, tensors = opened.load_into(to, group=group, options=options, progress=False), to
    else:
        tensors = opened.load(gpu.device(), group=group, options=options, progress=False)
        report = opened.last_report
    gpu.synchronize()
    seconds = time.perf_counter() - begun
    checkpoints.same(gpu, tensors, expected)
    del tensors
refused = [f for f in report.fallbacks if f["to"].endswith("staging memory") or f["from"] == "shared slabs"]
assert not refused, refused
found = dict(report.exchange or {})
if exchange == "on":
    assert found["lent_bytes"] == found["sent_bytes"] > 0, found
print(json.dumps({"ms": seconds * 1e3, "gb_per_s": report.nbytes / seconds / 1e9, "exchange": found}, default=str))
"""


@pytest.mark.parametrize(
    ("exchange", "way"), [("on", "new"), ("on", "into"), ("off", "new"), ("off", "into"), ("one process", "new")]
)
def test_two_ranks_on_one_gpu(sources: Callable[[str], Path], tmp_path: Path, exchange: str, way: str) -> None:
    arguments = [str(sources("large")), exchange, way, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(1 if exchange == "one process" else 2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=75 if FAKE else 25) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, (out, err)) in enumerate(zip(ranks, said, strict=True)):
        assert rank.returncode == 0, f"rank {number}\n{out[-500:]}\n{err[-2500:]}"
        results.row("two ranks on one GPU", exchange=exchange, into=way, rank=number, said=out.strip()[-400:])
