"""A load does not open shards that hold none of its tensors."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pagecache
import penstock
import pytest
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor

HOW: list[dict[str, Any]] = [{"cache": "keep", "copy": True}, {"io": "uring_buffered"}, {}]


@pytest.mark.parametrize("options", HOW, ids=["pool", "io_uring", "no option"])
def test_a_cold_load_opens_only_the_shards_of_its_tensors(tmp_path: Path, options: dict[str, Any]) -> None:
    for shard in "ab":
        synth.write_file(tmp_path / f"{shard}.safetensors", [Tensor(shard, "F32", (300_000,))])
    wanted, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    pagecache.evict(wanted)
    checkpoint = penstock.open([wanted, other])
    job = checkpoint.start(names="a", options=options)
    seen = _open_files()  # the planning opens what it asks about, on this thread; a load keeps its descriptors
    job.result()
    assert str(other) not in seen


def _open_files() -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(str(link.readlink()))
    return found
