"""Ranks that are killed, stopped or starved, and stores that go away: who hears of it, when, and what is left.

`PENSTOCK_TEST_RANKS=1` (`make ranks`) runs all points of time and the long waits; otherwise a sample.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ordeal
import pytest
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from ranks_together import Ranks, state, until

WHOLE = os.environ.get("PENSTOCK_TEST_RANKS") == "1"
SIZE = 4
#: Seconds of silence after which a rank counts as dead.
SILENCE = 2.0
JOIN = 4.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough for a hundred parcels."""
    tensors = [Tensor(f"{number}", "U8", (2 << 20,)) for number in range(24)]
    return synth.write_file(tmp_path_factory.mktemp("failures") / "model.safetensors", tensors)


#: A load in which the rank `which` sends itself a signal, at a call of the store, at a byte, or when it has everything.
LOAD = """
class Watched:
    "The store, in which the rank counts its calls."
    def __init__(self, store):
        self.calls = 0
        self.store = self.underlying_store = store
    def __getattr__(self, name):
        def call(*args):
            self.calls += 1
            at("store", self.calls)
            return getattr(self.store, name)(*args)
        if name not in ("set", "get", "add", "check", "delete_key"):
            raise AttributeError(name)
        return call

fired = False
def at(what, value):
    global fired
    if rank == which and not fired and what == stage and value >= moment:
        fired = True
        write(folder, "fired", str(time.time()))
        os.kill(os.getpid(), fault)

def progress(done, total):
    at("bytes", done)
    if done == total:
        at("end", 1)

def load(group, options, progress=None):
    "How it ended: the number of tensors that are as they must be, or what the error says."
    try:
        found = checkpoint.load(group=group, options=options, progress=progress)
    except penstock.PeerError as error:
        return dict(peer=error.rank, host=error.host, text=str(error), when=time.time())
    return dict(tensors=same(found), when=time.time())

checkpoint = penstock.open(path)
"""

FAULT = (
    LOAD
    + """
options = {"cache": "bypass", "peer_timeout": silence, "join_timeout": join, "depth": 1, "threads": 1}
# What the first load of a process sets up
load((dist.PrefixStore("first", store), rank, size), {})
before = traces()
said["fault"] = load((Watched(store), rank, size), options, progress)
said["left"] = [before, traces()]
if rank != which:
    left = [r for r in range(size) if r != which]
    again = dist.TCPStore("127.0.0.1", int(wait_for(f"{folder}/again")), None, False, timedelta(seconds=60))
    said["again"] = load((again, left.index(rank), len(left)), options)
"""
)


def points() -> list[tuple[str, int, int, int]]:
    """(stage, moment, rank, signal), always the same."""
    found = []
    generator = random.Random(16)
    for number in range(50):
        stage = ["store", "bytes", "bytes", "store", "end"][number % 5]
        most = {"store": 8, "bytes": 40 << 20, "end": 1}[stage]
        moment = generator.randint(1, most)
        found.append((stage, moment, generator.randrange(SIZE), [signal.SIGKILL, signal.SIGSTOP][number // 5 % 2]))
    return found if WHOLE else [found[number] for number in (0, 1, 4, 6, 8, 13)]


def named(point: tuple[str, int, int, int]) -> str:
    stage, moment, which, fault = point
    return f"{signal.Signals(fault).name} of rank {which} at {stage} {moment}"


@pytest.fixture
def another_store() -> Any:
    import torch

    return torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.mark.parametrize("point", points(), ids=named)
def test_a_rank_that_is_killed_or_stopped_is_named_in_time_and_leaves_nothing(
    together: Callable[..., Ranks], model: Path, another_store: Any, point: tuple[str, int, int, int]
) -> None:
    """The contract is a second, after `peer_timeout` for a rank that was stopped. Before it has told anybody its
    address it may as well be late: it is named when `join_timeout` is over.
    """
    stage, moment, which, fault = point
    given = {"stage": stage, "moment": moment, "which": which, "fault": int(fault), "silence": SILENCE, "join": JOIN}
    with together(FAULT, SIZE, model, **given) as ranks:
        (ranks.folder / "again").write_text(str(another_store.port))
        others = [rank for rank in range(SIZE) if rank != which]
        until((ranks.folder / "fired").exists)
        fired = float((ranks.folder / "fired").read_text())
        said = {rank: ranks.said(rank) for rank in others}
        for rank, one in said.items():
            fault_told = one["fault"]
            if stage == "end" and "tensors" in fault_told:
                assert fault_told["tensors"] == 24  # the others had everything too
            else:
                assert fault_told.get("peer") == which, (rank, one)
                most = JOIN if stage == "store" else SILENCE if fault == signal.SIGSTOP else 0.0
                assert fault_told["when"] - fired < most + 1.0 * ordeal.load_factor(), (rank, one)
            assert one["again"].get("tensors") == 24, (rank, one)
            assert one["left"][0] == one["left"][1], (rank, one)
        if fault == signal.SIGSTOP:
            assert state(ranks.pids[which]) == "T"
            os.kill(ranks.pids[which], signal.SIGCONT)
            late = ranks.said(which)
            assert "peer" in late["fault"] or stage == "end", late
            assert late["left"][0] == late["left"][1], late
