"""Ranks that are killed, stopped or starved, and stores that go away: who hears of it, when, and what is left.

`PENSTOCK_TEST_RANKS=1` (`make ranks`) runs all points of time and the long waits; otherwise a sample.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ordeal
import pytest
import slow_fs
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from ranks_together import Ranks, state, until

WHOLE = os.environ.get("PENSTOCK_TEST_RANKS") == "1"
SIZE = 4
#: Seconds of silence after which a rank counts as dead.
SILENCE = 2.0
JOIN = 8.0
#: Calls of the store after which a rank has told the others its address, at the latest.
KNOWN = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 parcels."""
    tensors = [Tensor(f"{number}", "U8", (2 << 20,)) for number in range(24)]
    return synth.write_file(tmp_path_factory.mktemp("failures") / "model.safetensors", tensors)


@pytest.fixture(scope="module")
def slow(model: Path) -> Iterator[str]:
    """The same file, where each read takes 80 ms: what is to happen in the middle of a load finds one that goes on."""
    why = slow_fs.why_not()
    if why is not None:
        pytest.skip(why)
    with slow_fs.mounted(model.parent) as fs:
        fs.tell(latency=0.08)
        yield str(fs.path / model.name)


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

def load(group, options, progress=None, checkpoint=penstock.open(path)):
    "How it ended: the number of tensors that are as they must be, or what the error says."
    try:
        found = checkpoint.load(group=group, options=options, progress=progress)
    except penstock.PeerError as error:
        told = dict(peer=error.rank, host=error.host, why=error.why, since=error.since)
        return dict(told, text=str(error), when=time.time())
    return dict(tensors=same(found), when=time.time())

through = penstock.open(slow)
"""

FAULT = (
    LOAD
    + """
options = {"cache": "bypass", "peer_timeout": silence, "join_timeout": join, "depth": 1, "threads": 1}
# Through sockets, and out of shared slabs
options["shared_slabs"] = which % 2 == 0
# What the first load of a process sets up
load((dist.PrefixStore("first", store), rank, size), {})
before = traces()
said["fault"] = load((Watched(store), rank, size), options, progress, through)
said["left"] = [before, traces()]
if rank != which:
    left = [r for r in range(size) if r != which]
    again = dist.TCPStore("127.0.0.1", int(wait_for(f"{folder}/again.go")), None, False, timedelta(seconds=60))
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
    return found if WHOLE else [found[number] for number in (0, 4, 6)]


def named(point: tuple[str, int, int, int]) -> str:
    stage, moment, which, fault = point
    return f"{signal.Signals(fault).name} of rank {which} at {stage} {moment}"


@pytest.fixture
def another_store() -> Any:
    import torch

    return torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.mark.parametrize("point", points(), ids=named)
def test_a_rank_that_is_killed_or_stopped_is_named_in_time_and_leaves_nothing(
    together: Callable[..., Ranks], model: Path, slow: str, another_store: Any, point: tuple[str, int, int, int]
) -> None:
    """The contract is a second, after `peer_timeout` for a rank that was stopped. Before it has told anybody its
    address it may as well be late: it is named when `join_timeout` is over.
    """
    stage, moment, which, fault = point
    given = {"stage": stage, "moment": moment, "which": which, "fault": int(fault), "silence": SILENCE, "join": JOIN}
    with together(FAULT, SIZE, model, slow=slow, **given) as ranks:
        ranks.release("again", str(another_store.port))
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
                unknown = stage == "store" and moment <= KNOWN
                most = JOIN if unknown else SILENCE if fault == signal.SIGSTOP else 0.0
                assert fault_told["when"] - fired < most + 1.0 * ordeal.load_factor(), (rank, one)
                assert fault_told["why"] in fault_told["text"], one
            assert one["again"].get("tensors") == 24, (rank, one)
            assert one["left"][0] == one["left"][1], (rank, one)
        if fault == signal.SIGSTOP:
            if stage == "bytes":
                # Who has noticed it says how long it was silent, and the others that it says so
                since = [one["fault"]["since"] for one in said.values() if one["fault"]["since"] is not None]
                assert since and min(since) >= SILENCE, said
                assert "has said nothing for" in one["fault"]["why"], said
            assert state(ranks.pids[which]) == "T"
            os.kill(ranks.pids[which], signal.SIGCONT)
            late = ranks.said(which)
            assert "peer" in late["fault"] or stage == "end", late
            assert late["left"][0] == late["left"][1], late


HOSTS = [("store", 4, signal.SIGKILL), ("bytes", 20 << 20, signal.SIGSTOP)]
HOSTS += [("store", 4, signal.SIGSTOP), ("bytes", 20 << 20, signal.SIGKILL)] if WHOLE else []


@pytest.mark.parametrize("point", HOSTS, ids=lambda point: f"{signal.Signals(point[2]).name} at {point[0]} {point[1]}")
def test_a_rank_that_hosts_the_store_is_like_any_other(
    together: Callable[..., Ranks], model: Path, slow: str, another_store: Any, point: tuple[str, int, int]
) -> None:
    """Its death may be seen first in the store, which has no rank: then the error names its host."""
    stage, moment, fault = point
    given = {"stage": stage, "moment": moment, "which": 0, "fault": int(fault), "silence": SILENCE, "join": JOIN}
    with together(FAULT, SIZE, model, hosted_by=0, slow=slow, **given) as ranks:
        ranks.release("again", str(another_store.port))
        until((ranks.folder / "fired").exists)
        fired = float((ranks.folder / "fired").read_text())
        for rank in range(1, SIZE):
            said = ranks.said(rank)
            told = said["fault"]
            assert told["peer"] == 0 or (told["peer"], told["host"]) == (None, "127.0.0.1"), told
            most = SILENCE if fault == signal.SIGSTOP else 0.0
            assert told["when"] - fired < most + 1.0 * ordeal.load_factor(), told
            assert said["again"].get("tensors") == 24, said


STORE = (
    LOAD
    + """
which, late = -1, size - 1
options = {"peer_timeout": silence, "join_timeout": join}
if moment == "before":
    load((dist.PrefixStore("first", store), rank, size), {})
    hold("ready")
    said["begun"] = time.time()
    said["fault"] = load(group, options)
elif moment == "waiting":
    # All but one wait for that one in the agreement.
    which, stage, moment = rank, "store", 8
    def at(what, value):
        if what == "store" and value == moment:
            write(folder, f"ready.{rank}")
    if rank == late:
        hold("ready")
    said["fault"] = load((Watched(store), rank, size), options)
else:
    # The store is not needed any more.
    def progress(done, total):
        if rank == 0 and 0 < done < total and not os.path.exists(f"{folder}/ready.go"):
            hold("ready")
    said["fault"] = load(group, {**options, "cache": "bypass", "depth": 1, "threads": 1}, progress, through)
again = dist.TCPStore("127.0.0.1", int(wait_for(f"{folder}/again.go")), None, False, timedelta(seconds=60))
said["again"] = load((again, rank, size), options)
"""
)


MOMENTS = [("before", signal.SIGKILL), ("waiting", signal.SIGSTOP), ("bytes", signal.SIGSTOP)]
MOMENTS += [("before", signal.SIGSTOP), ("waiting", signal.SIGKILL), ("bytes", signal.SIGKILL)] if WHOLE else []


@pytest.mark.parametrize(("moment", "fault"), MOMENTS, ids=lambda given: getattr(given, "name", given))
def test_a_store_whose_host_is_gone_is_a_peer_error_and_a_load_that_has_begun_goes_on(
    together: Callable[..., Ranks], model: Path, slow: str, another_store: Any, fault: int, moment: str
) -> None:
    with together(STORE, SIZE, model, slow=slow, moment=moment, silence=SILENCE, join=60.0) as ranks:
        ranks.held("ready", [0] if moment == "bytes" else range(SIZE))
        os.kill(ranks.hosts[0], fault)
        if fault == signal.SIGKILL:
            ranks.ended(None)
        else:
            until(lambda: state(ranks.hosts[0]) == "T")
        fired = time.time()
        ranks.release("ready")
        ranks.release("again", str(another_store.port))
        for rank in range(SIZE):
            said = ranks.said(rank)
            told = said["fault"]
            if moment == "bytes":
                assert told.get("tensors") == 24, told
            else:
                assert (told["peer"], told["host"]) == (None, "127.0.0.1"), told
                assert "rendezvous store at 127.0.0.1:" in told["text"], told
                # A store that does not answer is asked twice at most: for news, and to tell them
                most = 0.0 if fault == signal.SIGKILL else 2 * SILENCE
                assert told["when"] - fired < most + 1.0 * ordeal.load_factor(), told
            assert said["again"].get("tensors") == 24, said


def test_a_store_whose_name_nobody_knows_is_a_peer_error(together: Callable[..., Ranks], model: Path) -> None:
    program = """
    class Far:
        "A store that others reach by a name that this host cannot resolve."
        host, port = "store.invalid", 1234
        def __getattr__(self, name):
            return getattr(store, name)
    try:
        penstock.open(path).load(group=(Far(), rank, size), options={"join_timeout": 20})
    except penstock.PeerError as error:
        said.update(host=error.host, text=str(error))
    """
    with together(program, 2, model) as ranks:
        said = ranks.all()
    assert [one["host"] for one in said] == ["store.invalid"] * 2 or "store.invalid" in said[1]["text"]
    assert any("store.invalid:1234 cannot be reached" in one["text"] for one in said)


SELF = (
    LOAD
    + """
import resource
which, stage, moment, fault = 1, "bytes", 8 << 20, signal.SIGINT
options = {"cache": "bypass", "depth": 1, "threads": 1}
load((dist.PrefixStore("first", store), rank, size), {})
if why == "truncated":
    # A file of its own, with the same content
    if rank == which:
        through = penstock.open(slow.replace("model", "another"))
    def at(what, value):
        if rank == which and not os.path.exists(f"{folder}/fired") and value >= moment:
            os.truncate(path.replace("model", "another"), 10_000_000)
            write(folder, "fired", str(time.time()))
if why == "memory" and rank == which:
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    write(folder, "fired", str(time.time()))
    resource.setrlimit(resource.RLIMIT_AS, (now + (24 << 20), -1))
try:
    said["fault"] = load(group, options, None if why == "memory" else progress, through)
except (penstock.PenstockError, KeyboardInterrupt) as error:
    said["own"] = [type(error).__name__, str(error)]
said["when"] = time.time()
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
said["again"] = load((dist.PrefixStore("again", store), rank, size), {})
"""
)


@pytest.mark.parametrize(
    ("why", "own", "told"),
    [
        ("truncated", ["TruncatedError", "ChangedError"], ["has failed", ".safetensors"]),
        ("memory", ["OutOfMemoryError", "LimitError"], []),
        ("interrupted", ["KeyboardInterrupt"], ["cancelled"]),
    ],
    ids=["read error", "memory", "Ctrl-C"],
)
def test_the_failure_of_one_rank_reaches_the_others_as_cause_within_a_second(
    together: Callable[..., Ranks], model: Path, slow: str, why: str, own: list[str], told: list[str]
) -> None:
    if why == "truncated":
        shutil.copy(model, str(model).replace("model", "another"))
    with together(SELF, 3, model, slow=slow, why=why) as ranks:
        said = ranks.all()
        fired = float((ranks.folder / "fired").read_text())
    assert said[1]["own"][0] in own, said[1]
    for one in (said[0], said[2]):
        assert one["fault"]["peer"] == 1, one
        assert all(text in one["fault"]["text"] for text in told), one
        assert one["fault"]["why"] in one["fault"]["text"], one
        assert all(text in one["fault"]["why"] for text in told[-1:]) and one["fault"]["since"] is None, one
        assert one["fault"]["when"] - fired < 1.0 * ordeal.load_factor(), one
    assert [one["again"].get("tensors") for one in said] == [24] * 3, said
