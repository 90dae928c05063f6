"""Saves of ranks in the background: beside other saves to their folder, and given up at bad moments."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import penstock
import pytest
import torch
from penstock._save_room import Room, lack_of_room
from penstock._save_thread import SaveHandle, SaveThread
from s3_server import serving
from safetensors.torch import load_file
from test_into_dtensors import write_model
from test_save_ranks import in_bucket, old_checkpoint, same
from test_save_ranks_jobs import BEGIN
from test_uploads import INDEX, PLACE
from upload_server import Uploads, settings

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture
def bucket() -> Iterator[Uploads]:
    with serving(Uploads()) as found:
        yield found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path)


#: The first save of a program publishes when all ranks have begun a second one, and 1 s later.
FIRST_IS_SLOW = (
    BEGIN
    + """
from penstock._save_meeting import SavingRanks
def late(self, what, decide=SavingRanks.decide):
    decided = decide(self, what)
    if not os.path.exists(f"{folder}/first"):
        write(folder, "first")
        while not all(os.path.exists(f"{folder}/second.{each}") for each in range(size)):
            time.sleep(0.005)
        time.sleep(1.0)
    return decided
SavingRanks.decide = late
def first():
    return saved({f"b{rank}": torch.ones(1000)}, place, group=dist.group.WORLD, wait=False)
"""
)


@pytest.mark.parametrize("kind", ["group", "alone", "alone, first", "called", "called, first", "linked"])
def test_a_save_waits_for_one_of_another_group_or_thread_to_the_same_folder(
    placed: Callable[..., Any], model: Path, tmp_path: Path, kind: str
) -> None:
    """Each would remove the other's files before their index names them."""
    program = (
        FIRST_IS_SLOW
        + """
import threading
other = dist.new_group()
if kind == "linked":
    os.makedirs(place, exist_ok=True)
    if rank == 0:
        os.symlink(place, f"{place}.link")
if kind == "alone, first":
    from penstock import _running
    class Slow:
        def done(self):
            return os.path.exists(f"{folder}/third")
    if rank == 0:
        job = saved({"b": torch.zeros(1000)}, place, wait=False)
        slow = Slow()  # as if it still ran
        [_running._targets[slow]] = list(_running._targets.values())
        threading.Timer(1.0, write, [folder, "third"]).start()
    write(folder, f"second.{rank}")
    job = first()
    assert os.path.exists(f"{folder}/third")
    said["first"] = said["second"] = tried(job.result)
elif kind == "called, first":
    from penstock._described import Described
    begun, other_said = threading.Event(), [None]
    def fill(memory):
        begun.set()
        wait_for(f"{folder}/third")
    def call():
        other_said[:] = tried(lambda: saved({"b": Described("F32", (1000,), None, None, None, fill)}, place))
    if rank == 0:
        thread = threading.Thread(target=call)
        thread.start()
        begun.wait()
        threading.Timer(1.0, write, [folder, "third"]).start()
    write(folder, f"second.{rank}")
    job = first()
    assert os.path.exists(f"{folder}/third")
    said["first"] = tried(job.result) if other_said[0] is None else other_said
elif kind == "called":
    from penstock import _running
    def call():
        said["first"] = tried(lambda: saved({f"b{rank}": torch.ones(1000)}, place, group=dist.group.WORLD))
    thread = threading.Thread(target=call)
    thread.start()
    while not _running._targets:
        time.sleep(0.005)
    write(folder, f"second.{rank}")
    if rank == 0:
        saved({"b": torch.zeros(1000)}, place)
        said["done"] = "first" in said
    thread.join()
else:
    job = first()
    dist.barrier()
    to = f"{place}.link" if kind == "linked" else place
    write(folder, f"second.{rank}")
    if kind == "alone":
        if rank == 0:
            saved({"b": torch.zeros(1000)}, to)
    else:
        saved({f"b{rank}": torch.zeros(1000)}, to, group=other, wait=False).result()
    said["done"] = job.done() or kind == "alone" and rank == 1
    said["first"] = tried(job.result)
dist.barrier()
said["sums"] = {name: float(tensor.sum()) for name, tensor in penstock.open(place).load().items()}
dist.barrier()
dist.destroy_process_group()
"""
    )
    with placed(program, 2, model, place=str(tmp_path / "to"), kind=kind, given_storage=None) as ranks:
        said = ranks.all()
    assert [one["first"][0] for one in said] == [None, None], said
    own = {"b0": 1000.0, "b1": 1000.0}
    sums = {"alone": {"b": 0.0}, "called": {"b": 0.0}, "alone, first": own, "called, first": own}
    expected = sums.get(kind, {"b0": 0.0, "b1": 0.0})
    assert [one["sums"] for one in said] == [expected, expected]
    assert all(one.get("done", True) for one in said), said


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors"])
def test_a_folder_that_another_program_has_saved_to_meanwhile_keeps_its_checkpoint(
    placed: Callable[..., Any], model: Path, tmp_path: Path, name: str
) -> None:
    """As in a bucket: the later save fails."""
    program = (
        BEGIN
        + """
from penstock._save_meeting import SavingRanks
def late(self, what, value=b"", say=SavingRanks.say):
    if what == "sealed" and rank == 1:
        wait_for(f"{folder}/written")
    say(self, what, value)
SavingRanks.say = late
job = saved({f"b{rank}": torch.ones(1000)}, place, group=dist.group.WORLD, wait=False)
if rank == 0:
    with open(f"{place}/{name}", "w") as file:
        file.write("of another program")
    write(folder, "written")
said["result"] = tried(job.result)
dist.barrier()
said["files"] = sorted(os.listdir(place))
dist.barrier()
dist.destroy_process_group()
"""
    )
    with placed(program, 2, model, place=str(tmp_path / "to"), name=name, given_storage=None) as ranks:
        said = ranks.all()
    assert said[0]["result"][0] == "ChangedError" and name in said[0]["result"][1], said
    assert said[1]["result"][0] == "PeerError" and "since this save began" in said[1]["result"][1], said
    assert said[0]["files"] == [name]
    assert (tmp_path / "to" / name).read_text() == "of another program"


@pytest.mark.parametrize("how", ["cancel", "kill"])
def test_a_rank_that_leaves_while_rank_0_publishes_fails_nobody(
    placed: Callable[..., Any], model: Path, bucket: Uploads, how: str
) -> None:
    """The answer to the index takes more than three times as long as the store may take to answer."""
    old_checkpoint(bucket)
    program = (
        BEGIN
        + """
from penstock._save_meeting import SavingRanks
def apart(self, *more, go_apart=SavingRanks.go_apart):
    go_apart(self, *more)
    self._store.limit = 1.0
SavingRanks.go_apart = apart
job = saved(made, place, group=line, wait=False)
write(folder, f"called.{rank}")
if rank == 1:
    wait_for(f"{folder}/puts")
    if how == "cancel":
        job.cancel()
said["result"] = tried(job.result)
"""
    )
    with placed(program, 4, model, place=PLACE, given_storage=settings(bucket), how=how) as ranks:

        def puts_index(method: str, key: str, query: dict[str, str]) -> None:
            if method == "PUT" and key == INDEX:
                ranks.held("called")
                (ranks.folder / "puts").touch()
                if how == "kill":
                    os.kill(ranks.pids[1], signal.SIGKILL)
                time.sleep(4.5 if how == "cancel" else 1.5)

        bucket.refuses = puts_index
        said = [ranks.said(rank) for rank in range(4) if how == "cancel" or rank != 1]
    assert [one["result"][0] for one in said] == [None] * len(said), said
    assert same(in_bucket(bucket), load_file(model)) and len(bucket.objects) == 5 and not bucket.under_way


def test_a_store_that_fails_when_the_checkpoint_is_visible_fails_no_rank(
    placed: Callable[..., Any], model: Path, bucket: Uploads
) -> None:
    program = (
        BEGIN
        + """
from penstock._save_meeting import SavingRanks
def fails(self, what, value=b"", say=SavingRanks.say):
    if what != "outcome" or rank == 0:
        say(self, what, value)
    if what == "outcome":
        raise penstock.PeerError("the rendezvous store is gone")
SavingRanks.say = fails
said["result"] = tried(saved(made, place, group=line, wait=False).result)
"""
    )
    with placed(program, 2, model, place=PLACE, given_storage=settings(bucket)) as ranks:
        said = ranks.all()
    assert [one["result"][0] for one in said] == [None, None], said
    assert same(in_bucket(bucket), load_file(model))


def test_a_rank_0_that_hangs_after_it_has_published_says_that_readers_may_see_the_checkpoint(
    placed: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    program = (
        BEGIN
        + """
from penstock import _save_ranks
class Hangs:
    "As if a call into the folder hung after the index has its name."
    def __init__(self, save):
        self.save, self.approved = save, False
    def __getattr__(self, name):
        return getattr(self.save, name)
    def approve(self):
        self.approved = True
        self.save.approve()
        self.save.wait()
        write(folder, f"published.{rank}")
    def wait(self, timeout=None):
        if not self.approved:
            return self.save.wait(timeout)
        time.sleep(0.01)
        return False
if rank == 0:
    _save_ranks.begin = lambda *more, begin=_save_ranks.begin, **named: Hangs(begin(*more, **named))
job = saved({f"b{rank}": torch.ones(1000)}, place, group=dist.group.WORLD, wait=False)
if rank == 0:
    wait_for(f"{folder}/published.0")
    job.cancel()
said["result"] = tried(job.result)
dist.barrier()
dist.destroy_process_group()
"""
    )
    with placed(program, 2, model, place=str(tmp_path / "to"), given_storage=None) as ranks:
        said = ranks.all()
    assert said[0]["result"][0] == "CancelledError" and said[1]["result"][0] == "PeerError", said
    assert all("the new checkpoint may be visible" in one["result"][1] for one in said), said
    assert len(list((tmp_path / "to").iterdir())) == 3


@pytest.mark.parametrize("clone", ["", "clone = fails"])
def test_a_store_that_cannot_be_cloned_is_refused_before_anything_is_written(
    placed: Callable[..., Any], model: Path, tmp_path: Path, clone: str
) -> None:
    """The thread would share the program's connection: a program that waits in the store would fail its own save."""
    program = (
        BEGIN
        + f"""
class Old:
    def __init__(self, of):
        self.of = of
    set = lambda self, *more: self.of.set(*more)
    get = lambda self, *more: self.of.get(*more)
    add = lambda self, *more: self.of.add(*more)
    check = lambda self, *more: self.of.check(*more)
    def fails(self):
        raise RuntimeError("no clones here")
    {clone}
state = {{f"b{{rank}}": torch.ones(1000)}}
said["result"] = tried(lambda: saved(state, place, group=(Old(store), rank, size), wait=False))
said["waits"] = tried(lambda: saved(state, place + ".waits", group=(Old(store), rank, size)))
"""
    )
    with placed(program, 2, model, place=str(tmp_path / "to"), given_storage=None) as ranks:
        said = ranks.all()
    why = "no clones here" if clone else "from 2.8 on"
    for one in said:
        assert one["result"][0] == "InvalidError" and why in one["result"][1], said
        assert "nothing was written. Save with wait=True" in one["result"][1]
        assert one["waits"][0] is None, said
    assert not (tmp_path / "to").exists()


def test_the_store_may_take_as_long_as_the_peer_timeout_of_the_call(
    placed: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    program = (
        BEGIN
        + """
from penstock._save_meeting import SavingRanks
def apart(self, *more, go_apart=SavingRanks.go_apart):
    said["limit"] = self._store.limit
    go_apart(self, *more)
SavingRanks.go_apart = apart
saved({f"b{rank}": torch.ones(9)}, place, group=group, wait=False, options={"peer_timeout": 77}).result()
"""
    )
    with placed(program, 2, model, place=str(tmp_path / "to"), given_storage=None) as ranks:
        assert [one["limit"] for one in ranks.all()] == [77, 77]


def test_an_error_of_the_thread_that_nobody_expects_is_a_bug_with_its_cause(
    placed: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    program = (
        BEGIN
        + """
from penstock._save_meeting import SavingRanks
def fails(self, what):
    raise ZeroDivisionError("nobody expects it")
SavingRanks.decide = fails
job = saved({f"b{rank}": torch.ones(9)}, place, group=group, wait=False)
if rank == 0:
    while not job.done():
        time.sleep(0.005)
    job.close()
    try:
        job.result()
    except penstock.InternalError as error:
        said["cause"] = repr(error.__cause__)
said["result"] = tried(job.result)
"""
    )
    with placed(program, 2, model, place=str(tmp_path / "to"), given_storage=None) as ranks:
        said = ranks.all()
    assert said[0]["result"][0] == "InternalError" and "nobody expects it" in said[0]["result"][1], said
    assert said[0]["cause"] == "ZeroDivisionError('nobody expects it')"
    assert not list((tmp_path / "to").glob("*.json"))


def test_copied_waits_no_longer_than_its_timeout_for_a_thread_that_clears() -> None:
    cleared = threading.Event()

    def clears() -> None:
        cleared.wait()
        raise penstock.WriteError("on purpose")

    def failed(timeout: float | None) -> bool:
        raise penstock.CancelledError("the save was given up")

    thread = SaveThread(clears, ExitStack(), threading.Event())
    thread.start()
    handle = SaveHandle(SimpleNamespace(copied=failed), thread, [], True)  # type: ignore[arg-type]
    try:
        assert handle.copied(0.05) is False and handle.copied(0) is False
    finally:
        cleared.set()
    with pytest.raises(penstock.WriteError, match="on purpose"):
        handle.copied()


def test_ctrl_c_when_the_thread_has_just_started_ends_the_save(
    placed: Callable[..., Any], model: Path, bucket: Uploads
) -> None:
    program = (
        BEGIN
        + """
import threading
from penstock._save_thread import SaveThread
def interrupted(self, start=SaveThread.start):
    start(self)
    time.sleep(0.1)
    raise KeyboardInterrupt
if rank == 0:
    SaveThread.start = interrupted
said["result"] = tried(lambda: saved(made, place, group=line, wait=False).result())
said["left"] = [one.name for one in threading.enumerate() if one.name == "penstock-save-ranks"]
"""
    )
    bucket.delay = 0.5
    with placed(program, 2, model, place=PLACE, given_storage=settings(bucket)) as ranks:
        said = ranks.all()
    assert [one["result"][0] for one in said] == ["KeyboardInterrupt", "PeerError"], said
    assert not said[0]["left"] and not bucket.objects and not bucket.under_way


@pytest.mark.parametrize("snapshot", [False, True])
def test_ranks_that_have_room_each_and_not_together_are_refused_on_all_ranks(
    placed: Callable[..., Any], model: Path, tmp_path: Path, snapshot: bool
) -> None:
    """Each of two ranks keeps 4 MB: gathered parts, or a snapshot. There is room for 6."""
    program = (
        BEGIN
        + """
from penstock import _save_room, _saving
class Full:
    def __getattr__(self, name):
        return getattr(core, name)
    def probe(self, path):
        return {"memory_available": room}
core = _saving._core
_saving._core = _save_room._core = Full()
mesh = init_device_mesh("cpu", (size,))
whole = torch.ones(1000, 1000)
state = {f"w{i}": distribute_tensor(whole, mesh, [S(0)], src_data_rank=None) for i in range(2)}
if snapshot:
    state = {f"w{rank}": whole}
def tries():
    return saved(state, place, group=mesh, wait=False, snapshot=snapshot).result()
room = 6_000_000
said["full"] = tried(tries)
room = 9_000_000
said["fits"] = tried(tries)
dist.barrier()
dist.destroy_process_group()
"""
    )
    place = tmp_path / "to"
    with placed(program, 2, model, place=str(place), snapshot=snapshot, given_storage=None) as ranks:
        said = ranks.all()
    for one in said:
        assert one["full"][0] == "OutOfMemoryError", said
        assert "rank 0, 1 together: 8000000 bytes" in one["full"][1] and "6000000 are available" in one["full"][1]
        assert one["fits"][0] is None, said
    assert len(list(place.iterdir())) == 3


def test_room_is_counted_for_each_machine_and_each_control_group() -> None:
    here = [Room("a", "pod 1", 100, 60), Room("a", "pod 1", 100, 61), Room("a", "pod 2", 99, 99)]
    there = [Room("b", "pod 1", 1000, 1000)]
    assert lack_of_room([30, 30, 39, 1000], here + there) == ""
    assert "rank 0, 1 together: 61 bytes of memory of one machine, and 60" in lack_of_room([31, 30, 0, 0], here + there)
    assert "rank 0, 1, 2 together: 100 bytes" in lack_of_room([30, 30, 40, 0], here + there)
    assert "rank 3 together: 1001 bytes" in lack_of_room([0, 0, 0, 1001], here + there)
    assert lack_of_room([0, 0], [Room("a", "pod", 0, 0)] * 2) == ""
    assert lack_of_room([30, 30], [Room("a", "", 60, 60)] * 2) == ""
