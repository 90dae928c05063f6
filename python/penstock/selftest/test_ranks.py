"""Two ranks that load together onto one GPU, and exchange what both want: each is a process of its own."""

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
store = dist.FileStore(sys.argv[5], 2)
group = (store, rank, 2)
opened = penstock.open(source)
expected = checkpoints.content(source)
to = {n: torch.zeros(opened[n].shape, dtype=torch.float32, device=gpu.device()) for n in opened} if into else None
gpu.synchronize()
for number in range(2):
    begun = time.perf_counter()
    options = {"exchange": exchange, "cache": "keep"}
    if into:
        report, tensors = opened.load_into(to, group=group, options=options, progress=False), to
    else:
        tensors = opened.load(gpu.device(), group=group, options=options, progress=False)
        report = opened.last_report
    gpu.synchronize()
    seconds = time.perf_counter() - begun
    checkpoints.same(gpu, tensors, expected)
    del tensors
assert not [f for f in report.fallbacks if f["to"].endswith("staging memory")], report.fallbacks
print(json.dumps({"ms": seconds * 1e3, "exchange": dict(report.exchange or {})}, default=str))
"""


@pytest.mark.parametrize("way", ["new", "into"])
@pytest.mark.parametrize("exchange", ["on", "off"])
def test_two_ranks_on_one_gpu(sources: Callable[[str], Path], tmp_path: Path, exchange: str, way: str) -> None:
    if FAKE:
        pytest.skip("each process would have a fake GPU of its own: tests/test_group_memory.py")
    arguments = [str(sources("large")), exchange, way, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=25) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, (out, err)) in enumerate(zip(ranks, said, strict=True)):
        assert rank.returncode == 0, f"rank {number}\n{out[-500:]}\n{err[-2500:]}"
        results.row("two ranks on one GPU", exchange=exchange, into=way, rank=number, said=out.strip()[-400:])
