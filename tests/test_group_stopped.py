"""Ranks that are stopped, killed or fail where no load is under way: between two windows, and before the first load."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ordeal
import pytest
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from ranks_together import Ranks

pytest.importorskip("torch.distributed")

WHOLE = os.environ.get("PENSTOCK_TEST_RANKS") == "1"
SILENCE = 1.5
SIZE = 4

#: What each rank runs around its work: when rank 1 has left, with which error the others end, and how long after that.
_AROUND = """
import resource
options = {"peer_timeout": SILENCE, "join_timeout": 20.0, "window": WINDOW}

def leave(how):
    store.set("left", str(time.time()))
    if how == "fail":
        raise ValueError("no such luck")
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)

def cpu():
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])

try:
    WORK
except (penstock.PeerError, ValueError) as error:
    said["peer"] = getattr(error, "rank", None)
    said["text"] = str(error)
    said["late"] = time.time() - float(store.get("left"))
"""


def program(work: str, window: int = 4 << 20) -> str:
    body = "\n    ".join(line for line in work.strip("\n").splitlines())
    return _AROUND.replace("SILENCE", str(SILENCE)).replace("WINDOW", str(window)).replace("WORK", body)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = [Tensor(f"{number:02}", "U8", (1 << 20,)) for number in range(24)]
    return synth.write_file(tmp_path_factory.mktemp("stopped") / "model.safetensors", tensors)


def named(ranks: Ranks, how: str, others: list[int]) -> list[dict[str, Any]]:
    """What the other ranks say, who all name rank 1 in time."""
    found = [ranks.said(rank) for rank in others]
    print("late:", [round(said.get("late", -1.0), 2) for said in found])
    limit = SILENCE + 1.0 if how == "stop" else 1.0
    for said in found:
        assert said.get("peer") == 1, said
        assert said["late"] <= min(limit * ordeal.load_factor(), 10.0), said  # and never join_timeout
    return found


#: After which tensor rank 1 leaves, how, and seconds that rank 2 takes for each tensor. With a window of one tensor no
#: load is under way then.
POINTS = [
    *((at, "stop", 0.0) for at in (1, 2, 9)),
    (5, "stop", 0.4),
    (9, "kill", 0.0),
    *((at, how, slow) for at in range(1, 23) for how in ("stop", "kill") for slow in (0.0, 0.4) if WHOLE),
]


@pytest.mark.sampled
@pytest.mark.parametrize("window", [1 << 20, 4 << 20])
@pytest.mark.parametrize(("at", "how", "slow"), POINTS)
def test_a_rank_that_is_stopped_between_two_windows_is_named_in_time(
    together: Callable[..., Ranks], model: Path, at: int, how: str, slow: float, window: int
) -> None:
    work = """
    for number, (name, tensor) in enumerate(penstock.open(path).stream(group=group, options=options), 1):
        said["found"] = number
        if rank == 1 and number == AT:
            leave("HOW")
        if rank == 2:
            time.sleep(SLOW)
    """
    text = work.replace("AT", str(at)).replace("HOW", how).replace("SLOW", str(slow))
    with together(program(text, window), SIZE, model) as ranks:
        for said in named(ranks, how, [0, 2, 3]):
            assert at <= said["found"] < 24


@pytest.mark.parametrize("how", ["stop", "kill", "fail"])
def test_a_rank_that_leaves_before_the_first_load_is_named_in_time_by_ranks_that_are_joined(
    together: Callable[..., Ranks], model: Path, how: str
) -> None:
    work = """
    with penstock.joined(group, options=options):
        if rank == 1:
            leave("HOW")
        time.sleep(0.2)                                 # its model is made
        penstock.open(path).load(group=group, options=options)
    """
    with together(program(work.replace("HOW", how)), SIZE, model) as ranks:
        for said in named(ranks, how, [0, 2, 3]):
            assert how != "fail" or "no such luck" in said["text"], said


@pytest.mark.parametrize("kind", ["load", "stream", "get_sharded"])
def test_joined_ranks_load_what_they_load_otherwise_and_leave_nothing(
    together: Callable[..., Ranks], model: Path, kind: str
) -> None:
    work = """
    left = counted()
    for _ in range(2):
        with penstock.joined(group, options=options):
            checkpoint = penstock.open(path)
            if "KIND" == "load":
                found = checkpoint.load(group=group, options=options)
            elif "KIND" == "stream":
                found = dict(checkpoint.stream(group=group, options=options))
            else:
                part = penstock.get_sharded(checkpoint, "00", 0, group, options=options)
                said["part"] = part.shape[0]
                found = checkpoint.load(group=group, options=options)
            said["same"] = same(found)
    """
    with together(program(work.replace("KIND", kind)), SIZE, model) as ranks:
        assert [one["same"] for one in ranks.all()] == [24] * SIZE
        if kind == "get_sharded":
            assert [one["part"] for one in ranks.all()] == [1 << 18] * SIZE


def test_joined_ranks_that_do_not_all_come_are_named(together: Callable[..., Ranks], model: Path) -> None:
    program = """
    try:
        if rank != 1:
            with penstock.joined(group, options={"join_timeout": 0.5}):
                pass
    except penstock.PeerError as error:
        said["peer"] = error.rank
    hold()
    """
    with together(program, 3, model) as ranks:
        ranks.held()
        ranks.release()
        assert [one.get("peer") for one in ranks.all()] == [1, None, 1]


@pytest.mark.machine
@pytest.mark.parametrize("kind", ["load", "stream"])
def test_a_rank_that_waits_for_another_one_takes_less_than_a_twentieth_of_a_core(
    together: Callable[..., Ranks], model: Path, kind: str
) -> None:
    work = """
    checkpoint = penstock.open(path)
    with penstock.joined(group, options=options):
        if "KIND" == "load":
            if rank == 1:
                time.sleep(6.0)
            begun, before = time.monotonic(), cpu()
            checkpoint.load(names=["00"], group=group, options=options)
        else:
            stream = checkpoint.stream(group=group, options=options)
            for number, _ in enumerate(stream, 1):
                if number == 8:                     # the last of those that are there
                    if rank == 1:
                        time.sleep(6.0)
                    begun, before = time.monotonic(), cpu()
                elif number > 8:
                    break
            stream.close()
        said["waited"], said["cpu"] = time.monotonic() - begun, cpu() - before
    """
    with together(program(work.replace("KIND", kind)), SIZE, model) as ranks:
        for said in (one for rank, one in enumerate(ranks.all()) if rank != 1):
            assert said["waited"] > 4.0, said
            # What the load itself takes is no waiting
            assert said["cpu"] < 0.05 * said["waited"] + 0.1, said


ATTEMPTS = """
from penstock.integrations._engine import Loads
said["ended"] = []
for attempt in range(4):
    loads = Loads(torch.device("cpu"), penstock.Options(peer_timeout=5.0, join_timeout=30.0))
    try:
        loads.join(lambda: group)
        with loads.barrier():
            if attempt == 1 and rank == 0:
                raise ValueError("no such luck")
            if attempt == 1:
                penstock._group.confirm(loads.group)
        said["ended"].append("well")
    except (penstock.PeerError, ValueError) as error:
        said["ended"].append(type(error).__name__)
"""


def test_a_load_of_an_engine_that_failed_on_one_rank_is_followed_by_others_that_do_not(
    together: Callable[..., Ranks], model: Path
) -> None:
    """SGLang makes one at once, with the weights that it had. Each attempt has keys of its own."""
    with together(ATTEMPTS, 2, model) as ranks:
        assert ranks.said(0)["ended"] == ["well", "ValueError", "well", "well"]
        assert ranks.said(1)["ended"] == ["well", "PeerError", "well", "well"]
