"""After vLLM's ranks have loaded together: reloads, adapters; and a rank that is killed in the middle of their load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ordeal
import pytest
import slow_fs
from conftest import started
from test_vllm_lora import adapter

__all__ = ["adapter"]  # a fixture

#: Past the page cache, which would hide what is read twice.
TOGETHER = {"exchange": "on", "cache": "bypass", "gap": 0}
#: Seconds that tell a hang from work: most are the imports of vLLM.
PATIENCE = 400 * ordeal.load_factor()


def until(there: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    limit = time.monotonic() + PATIENCE
    while not there():
        assert process.poll() is None or there(), log.read_text()[-4000:]
        assert time.monotonic() < limit, f"it did not come:\n{log.read_text()[-4000:]}"
        time.sleep(0.005)


class Group:
    """Processes that do the same function of vllm_group.py."""

    def __init__(self, folder: Path, ranks: int, process: subprocess.Popen[bytes]) -> None:
        self.folder, self.ranks, self._process = folder, ranks, process

    def come(self, name: str, ranks: list[int] | None = None) -> list[Any]:
        """What each rank writes under a name, when it has."""
        paths = [self.folder / f"{name}.{rank}" for rank in (range(self.ranks) if ranks is None else ranks)]
        until(lambda: all(path.exists() for path in paths), self._process, self.folder / "log")
        return [json.loads(path.read_text() or "null") for path in paths]

    def said(self) -> list[dict[str, Any]]:
        """What all ranks say when they have ended."""
        self.come("ended")
        for rank in range(self.ranks):
            error = self.folder / f"error.{rank}"
            assert not error.exists(), f"rank {rank}: {error.read_text()}"
        return self.come("said")


@contextmanager
def group(place: Path, ranks: int, do: str, program: str = "vllm_group.py", **given: Any) -> Iterator[Group]:
    place.mkdir()
    spec = place / "specification.json"
    spec.write_text(json.dumps({"folder": str(place), "ranks": ranks, "do": do, "with": given}))
    with (place / "log").open("wb") as log:
        process = started(program.removesuffix(".py"), [str(spec)], log)
    try:
        yield Group(place, ranks, process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def exchanged(found: list[dict[str, Any]]) -> None:
    """The ranks have read for each other."""
    assert [one["fallbacks"] for one in found] == [[]] * len(found)
    both = [one["exchange"] for one in found]
    assert sum(one["sent_bytes"] for one in both) == sum(one["received_bytes"] for one in both) > 0
    assert all(one["lent_bytes"] == one["sent_bytes"] for one in both), "in shared memory, not by sockets"


@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
def test_reloads_after_a_load_together(model: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folders = [checkpoint(model), checkpoint(model).with_suffix(".inverse")]
    given = {"folders": list(map(str, folders)), "options": TOGETHER, "times": 4}
    with group(tmp_path / "ranks", 2, "reloads", **given) as ranks:
        found = ranks.said()
    exchanged(found)
    for one in found:
        assert one["differ"]
        assert (one["first"], one["reloads"], one["moved"]) == ([], [[]] * 4, [])
    # Ranks read for each other again, except experts, which are loaded layer by layer
    for number in range(4):
        both = [one["exchanges"][number] for one in found]
        if model == "llama":
            assert [one["loads"] for one in both] == [1, 1]
            assert both[0]["exchange"]["sent_bytes"] == both[1]["exchange"]["received_bytes"] > 0


def test_an_adapter_on_a_model_that_ranks_have_loaded_together(
    adapter: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    given = {"folder": str(checkpoint("llama")), "adapter": str(adapter), "options": TOGETHER}
    with group(tmp_path / "ranks", 2, "adapters", **given) as ranks:
        found = ranks.said()
    exchanged(found)
    for one in found:
        assert one["different"] == []
        assert one["of adapter"] >= one["not zero"] == 4 * 3 * 2  # two matrices of three modules of four layers


@pytest.mark.parametrize("which", [0, 2])
def test_a_rank_that_is_killed_in_the_middle_of_a_load_is_named_by_all_others_and_they_end(
    which: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    if (why := slow_fs.why_not()) is not None:
        pytest.skip(why)
    options = {**TOGETHER, "io": "direct", "depth": 1, "threads": 1, "extent": 1 << 18}
    with slow_fs.mounted(checkpoint("long-llama")) as fs:
        given = {"folder": str(fs.path), "options": options}
        with group(tmp_path / "ranks", 4, "loads", **given) as ranks:
            others = [rank for rank in range(4) if rank != which]
            ranks.come("ready")
            pid = ranks.come("pid", [which])[0]
            fs.tell(latency=0.1, forget=True)
            (ranks.folder / "go").write_text("")
            # The headers of one file are a few reads for each rank; the load is hundreds
            limit = time.monotonic() + PATIENCE
            while fs.tell()["requests"]["read"] < 100:
                assert time.monotonic() < limit
                time.sleep(0.01)
            os.kill(pid, signal.SIGKILL)
            failed = ranks.come("failed", others)
            ended = ranks.come("ended")
    died, slack = ended[which]["when"], 0.25 * ordeal.load_factor()
    print("seconds from its death to their errors:", [round(one["when"] - died, 3) for one in failed])
    for rank, one in zip(others, failed, strict=True):
        assert one["rank"] == which and f"rank {which}" in one["text"], (rank, one)
        assert one["when"] - died <= 1.0 + slack, (rank, one)
    assert [one["status"] for one in ended] == [-signal.SIGKILL if rank == which else 1 for rank in range(4)]
