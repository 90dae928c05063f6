"""Ranks that save together in the background: `penstock.save(..., group=..., wait=False)`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import penstock
import pytest
import torch
from conftest import raw
from ordeal import load_factor
from ranks_together import until
from s3_server import error, serving
from safetensors.torch import load_file
from test_into_dtensors import write_model
from test_save_ranks import SAVING, in_bucket, old_checkpoint, same
from test_uploads import INDEX, PLACE
from upload_server import Uploads, settings

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

#: The beginning of programs: a model of FSDP2, a step of the training, and an error in words.
BEGIN = (
    SAVING
    + """
import time
made, line = made("fsdp")

def step(job):
    flags = torch.tensor([float(job.done()), 1.0])
    dist.all_reduce(flags)
    assert flags[1] == size, "a collective of the training has met another one"
    return flags[0] == size

def tried(work):
    began = time.monotonic()
    try:
        work()
        found = [None, "", None]
    except (penstock.PenstockError, KeyboardInterrupt) as error:
        found = [type(error).__name__, str(error), getattr(error, "rank", None)]
    return [*found, time.monotonic() - began]
"""
)


@pytest.fixture
def bucket() -> Iterator[Uploads]:
    with serving(Uploads()) as found:
        yield found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path)


def by_number(files: dict[str, bytes]) -> dict[str, bytes]:
    """Shards by what follows their tag."""
    return {name.split("-", 2)[2]: content for name, content in files.items() if name.endswith(".safetensors")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_the_files_are_those_of_a_call_that_waits_while_training_goes_on(
    placed: Callable[..., Any], model: Path, bucket: Uploads, tmp_path: Path, size: int, snapshot: bool
) -> None:
    """The server answers no part until all ranks have trained, and have overwritten what was saved."""
    program = (
        BEGIN
        + """
more = {"max_shard_size": 600, "metadata": {"step": "7"}}
waited = saved(made, places["waited"], group=line, **more)
job = saved(made, places["folder"], group=dist.group.WORLD, wait=False, snapshot=snapshot, **more)
while not step(job):
    pass
assert job.result().files and job.copied(0)
job = saved(made, places["bucket"], group=line, wait=False, snapshot=snapshot, **more)
assert not snapshot or job.copied()
said["copied"] = job.copied(0)
if said["copied"]:
    emptied(made)
for _ in range(20):
    assert not step(job)
write(folder, f"trained.{rank}")
while not step(job):
    pass
report = job.result()
assert job.result() is report and job.done() and job.copied(0) and job.report is report
assert job.progress == (report.file_bytes, report.file_bytes)
for key in ("tensors", "nbytes", "fsync"):
    assert report[key] == waited[key], key
said["files"] = report.files
dist.barrier()
dist.destroy_process_group()
"""
    )
    held = bucket.hold_parts()
    places = {"waited": str(tmp_path / "waited"), "folder": str(tmp_path / "job"), "bucket": PLACE}
    with placed(program, size, model, places=places, snapshot=snapshot, given_storage=settings(bucket)) as ranks:
        ranks.held("trained")
        assert not bucket.objects
        held.set()
        said = ranks.all()
    # Only `steps` is no DTensor: without a snapshot, the rank that writes it reads it late
    assert sorted(one["copied"] for one in said) == [snapshot] + [True] * (size - 1)
    waited = by_number({path.name: path.read_bytes() for path in (tmp_path / "waited").iterdir()})
    assert len(waited) > size
    assert by_number({path.name: path.read_bytes() for path in (tmp_path / "job").iterdir()}) == waited
    assert by_number({Path(key).name: content for key, content in bucket.objects.items()}) == waited
    assert same(in_bucket(bucket), load_file(model))
    assert all(one["files"] == said[0]["files"] for one in said)
    assert {Path(key).name for key in bucket.objects} == set(said[0]["files"]) and not bucket.under_way


def test_the_call_waits_for_no_server(placed: Callable[..., Any], model: Path, bucket: Uploads) -> None:
    """Each rank writes 32 MB, in two parts; a call that waits has 8 MiB of it in memory, beside a part."""
    program = """
    mesh = init_device_mesh("cpu", (size,))
    def filled(number):
        whole = torch.full((2000, 1000), number, dtype=torch.int32)
        return distribute_tensor(whole, mesh, [S(0)], src_data_rank=None)
    state = {f"w{i}": filled(i) for i in range(8)}
    options = {"staging": 8 << 20, "threads": 1}
    job = penstock.save(state, place, group=mesh, storage=given_storage, options=options, wait=False)
    assert job.copied(0)
    for tensor in state.values():
        tensor.to_local().zero_()
    write(folder, f"called.{rank}")
    job.result()
    """
    bucket.knows_checksums = False  # to compute them takes longer than all else
    held = bucket.hold_parts()
    with placed(program, 2, model, place=PLACE, given_storage=settings(bucket)) as ranks:
        ranks.held("called")
        held.set()
        ranks.all()
    found = in_bucket(bucket)
    assert len(found) == 8 and all(bool((found[f"w{i}"] == i).all()) for i in range(8))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["cancel", "drop", "interrupt", "exit"])
def test_a_job_that_is_given_up_ends_those_of_all_ranks_and_nothing_stays(
    placed: Callable[..., Any], model: Path, bucket: Uploads, how: str, rank: int
) -> None:
    """The server answers no part before the others were told."""
    before = old_checkpoint(bucket)
    program = (
        BEGIN
        + """
import atexit, signal, threading, warnings
from penstock._save_meeting import SavingRanks
def told(self, error, tell=SavingRanks.tell):
    tell(self, error)
    write(folder, f"told.{rank}")
SavingRanks.tell = told

def ended():
    def refused(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")  # as Python does from 3.12 on
    started, threading.Thread.start = threading.Thread.start, refused
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            atexit._run_exitfuncs()
    finally:
        threading.Thread.start = started
    said["warned"] = [str(one.message) for one in caught]

job = saved(made, place, group=line, max_shard_size=1500, wait=False)
step(job)
if rank == who:
    if how == "drop":
        del job
    elif how == "exit":
        ended()
    elif how == "interrupt":
        threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
        said["raised"] = tried(job.result)
    else:
        job.cancel()
        said["result"] = tried(job.result)
    if how != "drop":
        assert job.done()
        said["again"] = tried(job.result)
        job.close()
else:
    said["result"] = tried(job.result)
    said["again"] = tried(job.wait)
"""
    )
    with placed(program, 2, model, place=PLACE, given_storage=settings(bucket), how=how, who=rank) as ranks:
        told = ranks.folder / f"told.{rank}"

        def until_told(method: str, key: str, query: dict[str, str]) -> None:
            limit = time.monotonic() + 60 * load_factor()
            while "partNumber" in query and not told.exists() and time.monotonic() < limit:
                time.sleep(0.005)

        bucket.refuses = until_told
        said = ranks.all()
    other = said[1 - rank]
    kind, text, of, seconds = other["result"]
    assert (kind, of) == ("PeerError", rank) and f"rank {rank}" in text and seconds < 20 * load_factor(), other
    assert "cannot save: CancelledError" in text and other["again"][:3] == other["result"][:3]
    if how != "drop":
        assert said[rank]["again"][0] == "CancelledError" and "before it was done" in said[rank]["again"][1]
    if how == "interrupt":
        assert said[rank]["raised"][0] == "KeyboardInterrupt"
    if how == "exit":
        assert any("was given up, because the program ended" in one for one in said[rank]["warned"])
    assert bucket.objects == before and not bucket.under_way


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_is_cancelled_while_rank_0_publishes_ends_well(
    placed: Callable[..., Any], model: Path, bucket: Uploads, rank: int
) -> None:
    """The index is put when the job is cancelled: it waits for the answer, as otherwise nobody would know."""
    old_checkpoint(bucket)
    program = (
        BEGIN
        + """
import threading
job = saved(made, place, group=line, wait=False)
if rank == who:
    while not os.path.exists(f"{folder}/puts"):
        time.sleep(0.005)
    threading.Timer(0.5, write, [folder, "answers"]).start()
    job.cancel()
said["result"] = tried(job.result)
said["fallbacks"] = [one["from"] for one in job.report.fallbacks]
"""
    )
    with placed(program, 2, model, place=PLACE, given_storage=settings(bucket), who=rank) as ranks:

        def puts_index(method: str, key: str, query: dict[str, str]) -> None:
            if method == "PUT" and key == INDEX:
                (ranks.folder / "puts").touch()
                until((ranks.folder / "answers").exists)

        bucket.refuses = puts_index
        said = ranks.all()
    assert [one["result"][0] for one in said] == [None, None], said
    assert same(in_bucket(bucket), load_file(model)) and not bucket.under_way
    # A rank 0 that is given up then removes nothing, and says so
    assert ("removing the earlier checkpoint" in said[0]["fallbacks"]) == (rank == 0)
    assert len(bucket.objects) == (5 if rank == 0 else 3)


def test_a_second_save_of_the_group_waits_for_the_first(
    placed: Callable[..., Any], model: Path, bucket: Uploads
) -> None:
    program = (
        BEGIN
        + """
first = saved(made, place, group=line, wait=False)
write(folder, f"second.{rank}")
second = saved({**made.state_dict(), "second": torch.ones(3)}, place, group=line, wait=False)
assert first.done() and first.result().files
report = saved(made, place, group=line)
assert second.done() and second.result().files and not set(second.result().files[:-1]) & set(report.files)
dist.barrier()
dist.destroy_process_group()
"""
    )
    held = bucket.hold_parts()
    with placed(program, 2, model, place=PLACE, given_storage=settings(bucket)) as ranks:
        ranks.held("second")
        until(lambda: bool(bucket.at_once))
        time.sleep(0.3)  # the second save would have begun
        assert len({key.split("-")[1] for _, key, query in list(bucket.requests) if "partNumber" in query}) == 1
        held.set()
        ranks.all()
    assert same(in_bucket(bucket), load_file(model)) and len(bucket.objects) == 3 and not bucket.under_way


def test_the_program_may_block_its_store_fork_and_leave_a_joined_block_meanwhile(
    placed: Callable[..., Any], model: Path, bucket: Uploads
) -> None:
    """The program waits in the very object that the ranks of the save have met in."""
    program = (
        BEGIN
        + """
import gc, os
with penstock.joined(line):
    job = saved(made, place, group=line, wait=False)
    if rank == 0:
        store.wait(["left"])
        time.sleep(0.5)  # rank 1 is gone from the block, and not from the save
if rank == 1:
    store.set("left", "")
child = os.fork()
if child == 0:
    kind = tried(job.result)[0]
    del job
    gc.collect()
    os._exit(7 if kind == "ForkedError" else 1)
said["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
write(folder, f"blocks.{rank}")
if rank == 0:
    store.wait(["over"])  # until rank 1 has its files, which takes the thread of this rank
said["result"] = tried(lambda: job.result(limit))
if rank == 1:
    store.set("over", "")
dist.barrier()
dist.destroy_process_group()
"""
    )
    held = bucket.hold_parts()
    with placed(program, 2, model, place=PLACE, given_storage=settings(bucket), limit=60 * load_factor()) as ranks:
        ranks.held("blocks")
        held.set()
        said = ranks.all()
    assert [one["child"] for one in said] == [7, 7] and [one["result"][0] for one in said] == [None, None], said
    assert same(in_bucket(bucket), load_file(model))


def test_a_job_that_fails_at_the_server_leaves_a_group_that_mixes_messages(
    placed: Callable[..., Any], model: Path, bucket: Uploads
) -> None:
    """All messages had come by then. Memory that is not there is an error on all ranks."""
    program = (
        BEGIN
        + """
from penstock import _gathering, _saving
_gathering._TAGGED = ()  # as if gloo were NCCL
def again():
    return saved(made, place, group=line, wait=False).result()
said["failed"] = tried(again)
write(folder, f"failed-once.{rank}")
while not os.path.exists(f"{folder}/goes-on"):
    time.sleep(0.01)
said["fine"] = tried(again)
said["shown"] = tried(lambda: saved(made, place, group=line, wait=False, progress=True))
class Full:
    def __getattr__(self, name):
        return getattr(core, name)
    def probe(self, path):
        return {"memory_available": 100}  # what rank 0 is told comes from `_save_room`
core = _saving._core
if rank == 1:
    _saving._core = Full()
said["full"] = tried(again)
"""
    )
    bucket.refuses = lambda method, key, query: (
        error(400, "InvalidRequest", "on purpose") if "partNumber" in query and "-00001-of" in key else None
    )
    with placed(program, 2, model, place=PLACE, given_storage=settings(bucket)) as ranks:
        ranks.held("failed-once")
        assert not bucket.objects and not bucket.under_way
        bucket.refuses = lambda method, key, query: None
        (ranks.folder / "goes-on").touch()
        said = ranks.all()
    assert "on purpose" in said[0]["failed"][1] and said[0]["failed"][0] != "PeerError"
    assert said[1]["failed"][0] == "PeerError" and said[1]["failed"][2] == 0 and "on purpose" in said[1]["failed"][1]
    assert [one["fine"][0] for one in said] == [None, None]
    assert said[1]["full"][0] == "OutOfMemoryError" and "100 are available; nothing was written" in said[1]["full"][1]
    assert said[0]["full"][0] == "PeerError" and "OutOfMemoryError" in said[0]["full"][1]
    assert all("ask its job" in one["shown"][1] for one in said), said
    assert same(in_bucket(bucket), load_file(model))


def test_a_tensor_on_a_gpu_has_left_when_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL sends on a stream: without a wait the program could change the tensor while it is read."""
    from penstock import _gathering

    done: list[str] = []
    device = SimpleNamespace(type="cuda", index=0)
    stream = SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr(_gathering, "_process_group", lambda *_: (None, range(2)))
    monkeypatch.setattr(_gathering, "packed", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.distributed, "send", lambda *_, **__: done.append("sent"))
    for settled, expected in ((False, ["sent"]), (True, ["sent", "waited"])):
        messages = _gathering.Messages(None, 0, 2, 1, settled=settled)
        messages.send(SimpleNamespace(device=device), 1, lambda: None)
        messages.close()
        assert done == expected
        done.clear()


def test_a_group_of_one_rank_has_a_job_too(tmp_path: Path) -> None:
    from placed_ranks import alone
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with alone(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        state = {"w": distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)], src_data_rank=None)}
        job = penstock.save(state, tmp_path, group=mesh, wait=False, snapshot=True)
        assert job.copied() and job.result().files == ["model.safetensors"]
    assert raw(load_file(tmp_path / "model.safetensors")["w"]) == raw(torch.arange(12.0).view(4, 3))


def test_a_save_of_ranks_whose_thread_cannot_start_is_an_error_on_all_of_them(
    placed: Callable[..., Any], model: Path, bucket: Uploads
) -> None:
    """A rank that writes nothing has a job as well. Jobs leave no thread, connection or socket."""
    program = (
        BEGIN
        + """
import threading
state = {"lone": torch.ones(3)} if rank == 0 else {}
started = threading.Thread.start
def refused(self):
    if self.name == "penstock-save-ranks":
        raise RuntimeError("can't start new thread")
    started(self)
if rank == 1:
    threading.Thread.start = refused
said["refused"] = tried(lambda: saved(state, place, group=group, wait=False).result())
threading.Thread.start = started
left = counted()
for snapshot in (False, True):
    job = saved(state, place, group=group, wait=False, snapshot=snapshot)
    assert job.copied() and job.result().files == job.report.files
    said["tensors"] = job.report.tensors
settled(left)
"""
    )
    with placed(program, 2, model, place=PLACE, given_storage=settings(bucket)) as ranks:
        said = ranks.all()
    assert said[1]["refused"][0] == "LimitError" and said[0]["refused"][0] == "PeerError", said
    assert [one["tensors"] for one in said] == [1, 0]
    assert same(in_bucket(bucket), {"lone": torch.ones(3)}) and not bucket.under_way
