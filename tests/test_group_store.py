"""What ranks leave in their rendezvous store: nothing that grows with each load, stream or attempt of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from penstock._group_store import RendezvousStore
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from ranks_together import Ranks

pytest.importorskip("torch.distributed")

PROGRAM = """
from penstock._core import Options
from penstock._group_stream import compare
from penstock.integrations._engine import Loads
group, checkpoint = (store, rank, size), penstock.open(path)
options = Options(join_timeout=20.0)

def meet(count=[0]):
    count[0] += 1
    if store.add("arrived", 1) == count[0] * size:
        store.set("met", str(count[0]))
    while int(store.get("met")) < count[0]:
        time.sleep(0.005)

def attempt(fails):
    loads = Loads(torch.device("cpu"), options)
    loads.join(lambda: group)
    with loads.barrier():
        checkpoint.load(group=loads.group, options=options)
        if fails and rank == 1:
            raise ValueError("no such luck")

def failing():
    try:
        attempt(True)
    except (ValueError, penstock.PeerError) as error:
        said["failed"] = type(error).__name__

def joined():
    with penstock.joined(group, options=options):
        pass

done = {
    "an attempt": lambda: attempt(False),
    "an attempt that fails": failing,
    "joined": joined,
    "a comparison": lambda: compare(group, checkpoint, options),
    "a stream": lambda: [name for name, _ in checkpoint.stream(group=group, window=1 << 20, options=options)],
    "a stream that ends early": lambda: next(checkpoint.stream(group=group, window=1 << 20, options=options)),
}
said["left"] = {}
for what, do in done.items():
    counts = []
    for number in range(3):
        do()
        meet()
        counts.append(store.num_keys())
        meet()
    said["left"][what] = counts
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return synth.write_file(tmp_path / "model.safetensors", [Tensor(str(n), "U8", (1 << 20,)) for n in range(4)])


def test_what_is_over_on_all_ranks_leaves_no_keys(together: Callable[..., Ranks], model: Path) -> None:
    with together(PROGRAM, 3, model) as ranks:
        said = ranks.said(0)
    for what, (first, *others) in said["left"].items():
        assert others == [first] * 2, (what, first, others)


class SlowStore:
    """A store that takes its time for each answer, and counts the questions."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.asked = seconds, list[str]()

    def answer(self, what: str) -> None:
        self.asked.append(what)
        time.sleep(self.seconds)

    def set(self, key: str, value: Any) -> None:
        self.answer("set")

    def get(self, key: str) -> bytes:
        self.answer("get")
        return key.encode()

    def add(self, key: str, amount: int) -> int:
        self.answer("add")
        return amount

    def check(self, keys: list[str]) -> bool:
        self.answer("check")
        return keys != ["failed"] and len(self.asked) > 4

    def delete_key(self, key: str) -> bool:
        self.answer("delete")
        return True


class ExtendedStore(SlowStore):
    """One that gives several values at once."""

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.answer("multi_get")
        return [key.encode() for key in keys]


def test_each_answer_of_a_store_has_the_whole_limit():
    seconds, limit = 0.3, 1.0  # four answers take longer
    keys = ["a", "b", "c", "d"]
    for store in (SlowStore(seconds), ExtendedStore(seconds)):
        patient = RendezvousStore(store, limit)
        assert patient.get_all(keys, 1) == [b"a", b"b", b"c", b"d"]
        patient.delete(keys)
        assert len(store.asked) == 8
    store = SlowStore(seconds)
    assert RendezvousStore(store, limit).wait(keys, "failed", time.monotonic() - 1, 60)


def test_values_come_in_as_few_questions_as_may_be():
    store = ExtendedStore(0)
    patient = RendezvousStore(store, 60)
    assert patient.get_all([]) == [] and patient.delete([]) is None
    assert store.asked == []
    keys = [str(number) for number in range(9)]
    assert patient.get_all(keys, 4) == [key.encode() for key in keys]
    assert store.asked == ["multi_get"] * 3


COUNTING = """
from collections import Counter
from penstock._core import Options

class Counted:
    def __init__(self):
        self.underlying_store, self.calls = store, Counter()

    def __getattr__(self, name):
        found = getattr(store, name)
        if name not in ("set", "get", "add", "delete_key", "multi_get"):
            return found

        def call(*arguments):
            self.calls[name] += 1
            return found(*arguments)

        return call

counted, checkpoint = Counted(), penstock.open(path)
said["calls"] = {}
for exchange in ("auto", "on"):
    options = Options(join_timeout=20.0, exchange=exchange)
    for _ in range(3):
        counted.calls.clear()
        checkpoint.load(group=(counted, rank, size), options=options)
    said["calls"][exchange] = counted.calls.total()
"""


def test_a_load_takes_few_questions(together: Callable[..., Ranks], model: Path):
    """Besides `check`, which is asked for as long as a rank waits. `benches/rendezvous.py` counts both."""
    with together(COUNTING, 4, model) as ranks:
        said = [ranks.said(rank)["calls"] for rank in range(4)]
    # Of all ranks: which of them deletes a key that one has made, depends on who came first
    assert {exchange: sum(of_rank[exchange] for of_rank in said) for exchange in said[0]} == {"auto": 31, "on": 24}
