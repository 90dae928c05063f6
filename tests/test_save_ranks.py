"""Ranks that save one checkpoint together: FSDP2, TP, HSDP and plain tensors, to a double of S3 and to a folder."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import penstock
import pytest
import torch
from conftest import raw
from ordeal import load_factor
from s3_server import error, serving
from safetensors.torch import load_file, save_file
from test_into_dtensors import MODEL, write_model
from test_uploads import INDEX, PLACE, load, states, visible
from upload_server import Uploads, carried_out, settings

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

#: What programs of ranks begin with: the model of `test_into_dtensors`, filled from a file, and how it is saved.
SAVING = (
    MODEL
    + """
storage = given_storage
def made(way):
    line = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp")) if size > 2 else None
    meshes = {
        "fsdp": {"dp": line}, "tp": {"tp": line},
        "hsdp": grid and {"dp": grid}, "fsdp and tp": grid and {"dp": grid["dp"], "tp": grid["tp"]},
    }[way]
    model = built(**meshes)
    checkpoint.load_into(model)
    return model, line

def saved(model, to, **more):
    return penstock.save(model, to, storage=storage, **more)
"""
)
WAYS = ["fsdp", "tp", "hsdp", "fsdp and tp"]


@pytest.fixture
def bucket() -> Iterator[Uploads]:
    with serving(Uploads()) as found:
        yield found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path)


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(raw(found[name]) == raw(expected[name]) for name in expected)


def in_bucket(bucket: Uploads) -> dict[str, torch.Tensor]:
    return penstock.open(f"{PLACE}/", storage=settings(bucket)).load()


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_the_bytes_are_those_that_dcp_consolidates(
    placed: Callable[..., Any], model: Path, bucket: Uploads, tmp_path: Path, size: int, way: str
) -> None:
    if size == 2 and way in ("hsdp", "fsdp and tp"):
        pytest.skip("a mesh of two dimensions has four ranks")
    program = (
        SAVING
        + """
made, line = made(way)
groups = {"bucket": dist.group.WORLD, "folder": line}
for at, group in groups.items():
    report = saved(made, places[at], group=group, max_shard_size=600, metadata={"step": "7"})
    said[at] = [report.files, report.tensors, report.nbytes]
from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
writer = HuggingFaceStorageWriter(f"{folder}/dcp", save_distributed=True, enable_consolidation=True)
# It consolidates floating point numbers only
save({name: t for name, t in made.state_dict().items() if t.is_floating_point()}, storage_writer=writer)
dist.barrier()
dist.destroy_process_group()
"""
    )
    places = {"bucket": PLACE, "folder": str(tmp_path / "saved")}
    with placed(program, size, model, way=way, places=places, given_storage=settings(bucket)) as ranks:
        said = ranks.all()
        consolidated: dict[str, torch.Tensor] = {}
        for file in (ranks.folder / "dcp").glob("*.safetensors"):
            consolidated |= load_file(file)
    expected = load_file(model)
    consolidated["steps"] = expected["steps"]
    assert same(consolidated, expected), "dcp has what the model was filled with"
    assert same(in_bucket(bucket), consolidated)
    opened = penstock.open(tmp_path / "saved")
    assert same(opened.load(), consolidated) and opened.metadata == {"step": "7", "format": "pt"}
    for at in places:
        assert len({tuple(one[at][0]) for one in said}) == 1, "every rank knows all files"
        assert sum(one[at][1] for one in said) == len(expected), "each tensor is written once"
        written = [one[at][2] for one in said]
        largest = max(tensor.nbytes for tensor in expected.values())
        assert max(written) - min(written) <= 2 * largest, written
    assert {Path(name).name for name in bucket.objects} == set(said[0]["bucket"][0])
    assert {path.name for path in (tmp_path / "saved").iterdir()} == set(said[0]["folder"][0])
    assert not bucket.under_way and [key for key, _ in bucket.history][-1] == INDEX


@pytest.mark.machine
def test_an_owner_gathers_no_more_than_it_can_send(placed: Callable[..., Any], bucket: Uploads, tmp_path: Path) -> None:
    """Each of two ranks writes 64 MB in tensors of 4, one part at a time, to a server slower than the other rank."""
    source = {f"w{i}": torch.arange(1_000_000, dtype=torch.int32).view(1000, 1000) * (i + 1) for i in range(32)}
    save_file(source, tmp_path / "large.safetensors")
    bucket.delay, bucket.knows_checksums = 0.1, False  # to compute them takes longer than all else
    program = """
    def memory(what):
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024
    mesh = init_device_mesh("cpu", (size,))
    state = {}
    for name in list(whole):
        state[name] = distribute_tensor(whole.pop(name).clone(), mesh, [S(0)], src_data_rank=None)
    small = {"x": distribute_tensor(torch.ones(size), mesh, [S(0)], src_data_rank=None)}
    penstock.save(small, place, group=mesh, storage=given_storage)  # what is imported now is there
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = memory("VmRSS")
    report = penstock.save(state, place, group=mesh, storage=given_storage, options={"staging": 8 << 20, "threads": 1})
    said["grown"], said["nbytes"] = memory("VmHWM") - before, report.nbytes
    dist.barrier()
    dist.destroy_process_group()
    """
    path = tmp_path / "large.safetensors"
    with placed(program, 2, path, place=PLACE, given_storage=settings(bucket)) as ranks:
        said = ranks.all()
    assert same(in_bucket(bucket), source)
    assert [one["nbytes"] for one in said] == [64_000_000] * 2
    # The tensors of a part of 16 MiB, those that `staging` has room for, a message, and what connections take
    assert all(one["grown"] < 20_000_000 + 8_400_000 + 2_000_000 + 12_000_000 for one in said), said


def test_plain_tensors_of_ranks_are_saved_once_or_by_the_rank_that_has_them(
    placed: Callable[..., Any], model: Path, bucket: Uploads
) -> None:
    """Stages of a pipeline, a tensor that must be packed, and one that all have; ranks meet in a store alone."""
    program = """
    state = {f"stage{rank}.w": torch.full((30, 20), float(rank)).t(), "shared": torch.arange(7)}
    if rank == 1:
        state["lone"] = torch.ones(2, 3)
    report = penstock.save(state, place, group=(store, rank, size), storage=given_storage, max_shard_size=None)
    said["files"], said["tensors"] = report.files, report.tensors
    """
    with placed(program, 3, model, place=PLACE, given_storage=settings(bucket)) as ranks:
        said = ranks.all()
    found = in_bucket(bucket)
    expected = {f"stage{rank}.w": torch.full((20, 30), float(rank)) for rank in range(3)}
    assert same(found, {**expected, "shared": torch.arange(7), "lone": torch.ones(2, 3)})
    assert sum(one["tensors"] for one in said) == 5 and len(said[0]["files"]) == 4


def test_of_a_group_of_one_rank_the_tensors_are_saved_as_ever(tmp_path: Path) -> None:
    from placed_ranks import alone
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with alone(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        state = {"w": distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)], src_data_rank=None)}
        report = penstock.save(state, tmp_path, group=mesh)
    assert report.files == ["model.safetensors"]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], torch.arange(12.0).view(4, 3))


def test_what_ranks_mean_differently_is_an_error_on_all_of_them(
    placed: Callable[..., Any], model: Path, bucket: Uploads
) -> None:
    program = """
    import time
    mesh = init_device_mesh("cpu", (size,))
    def tried(state, **more):
        try:
            penstock.save(state, place, group=mesh, storage=given_storage, **more)
        except penstock.PenstockError as error:
            return [type(error).__name__, str(error)]
    said["shape"] = tried({"w": torch.ones(3 + rank)})
    said["argument"] = tried({"w": torch.ones(3)}, max_shard_size=100 + rank)
    said["nothing"] = tried({})
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    said["sum"] = tried({"w": partial})
    said["one"] = tried({"w": torch.ones(3) if rank == 0 else "text"})
    for what, more in {"name": {"name": "a/b"}, "size": {"max_shard_size": "much"}, "job": {"wait": 7}}.items():
        began = time.monotonic()
        said[what] = tried({"w": torch.ones(3)}, **(more if rank == 1 else {}))
        said[what + " seconds"] = time.monotonic() - began
    uneven = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False, shape=(3,), stride=(1,))
    said["local"] = tried({"w": uneven})
    dist.barrier()
    dist.destroy_process_group()
    """
    with placed(program, 2, model, place=PLACE, given_storage=settings(bucket)) as ranks:
        said = ranks.all()
    for one in said:
        assert (
            one["shape"][0] == "PlanMismatchError" and "[3] on rank 0 and F32 of shape [4] on rank 1" in one["shape"][1]
        )
        assert (
            one["argument"][0] == "PlanMismatchError" and "rank 1 saves with max_shard_size=101" in one["argument"][1]
        )
        assert one["nothing"][0] == "PlanMismatchError"
        assert "P(sum)" in one["sum"][1] and "cannot be saved" in one["sum"][1]
    assert said[0]["one"][0] == "PeerError" and "cannot save: InvalidError: w is a str" in said[0]["one"][1]
    assert said[1]["one"][0] == "InvalidError"
    for what in ("name", "size", "job"):
        assert said[1][what][0] == "InvalidError", said[1][what]
        assert said[0][what][0] == "PeerError" and "cannot save: InvalidError" in said[0][what][1]
        assert said[0][what + " seconds"] < 20 * load_factor()
    assert "PeerError" in [one["local"][0] for one in said] and "InvalidError" in [one["local"][0] for one in said]
    assert not bucket.objects and not bucket.under_way


TRIED = (
    SAVING
    + """
import time
from penstock import _save_ranks
def begin(self, plan, begin=_save_ranks._RankSave._begin):
    begin(self, plan)
    said["mine"] = [file.name for file in plan.files if file.owner == rank]
_save_ranks._RankSave._begin = begin
made, line = made("fsdp")
dist.barrier()
write(folder, f"ready.{rank}")
began = time.monotonic()
try:
    report = saved(made, place, group=line, max_shard_size=1500)
    said["files"] = report.files
except penstock.PenstockError as error:
    said["error"], said["text"], said["rank"] = type(error).__name__, str(error), getattr(error, "rank", None)
said["seconds"] = time.monotonic() - began
"""
)


#: How a rank saves: by a call that waits, or by a job.
HOW = {
    "call": TRIED,
    "job": TRIED.replace("1500)", "1500, wait=False).result()"),
    "snapshot": TRIED.replace("1500)", "1500, wait=False, snapshot=True).result()"),
}


class Killer:
    """Kills a process when a request with this number comes to the server."""

    def __init__(self, number: int) -> None:
        self.left, self.pid, self.count = number, 0, 0
        self.lock = threading.Lock()

    def __call__(self, method: str, key: str, query: dict[str, str]) -> None:
        with self.lock:
            self.count += 1
            self.left -= 1
            due = self.left == -1
        if due and self.pid:
            os.kill(self.pid, signal.SIGKILL)


def old_checkpoint(bucket: Uploads) -> dict[str, bytes]:
    """Two shards and an index, as they were before the ranks save."""
    old = {f"old{i}": torch.full((50,), i) for i in range(4)}
    penstock.save(old, PLACE, max_shard_size=900, storage=settings(bucket))
    bucket.history.clear()
    bucket.requests.clear()
    return dict(bucket.objects)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("victim", ["first", "last"])
@pytest.mark.parametrize("point", range(20))
def test_a_rank_that_is_killed_leaves_the_old_checkpoint_or_the_new_one(
    placed: Callable[..., Any], model: Path, bucket: Uploads, size: int, victim: str, point: int, how: str
) -> None:
    before = old_checkpoint(bucket)
    old = visible(before)
    last = {2: 32, 4: 32}[size]  # the number of the last request of such a save
    killer = Killer(point * last // 19)
    bucket.refuses = killer
    number = 0 if victim == "first" else size - 1
    with placed(HOW[how], size, model, place=PLACE, given_storage=settings(bucket)) as ranks:
        killer.pid = ranks.pids[number]
        ranks.ended(number)
        was_killed = not (ranks.folder / f"said.{number}").exists()
        said = {rank: ranks.said(rank) for rank in range(size) if not was_killed or rank != number}
    carried_out(bucket)
    bucket.refuses = lambda *_: None
    new = visible(bucket.objects)
    assert all(state in (old, new) for state in states(bucket, before))
    assert all(one.get("error") in (None, "PeerError") for one in said.values()), said
    if new == old:
        assert was_killed and all("error" in one for one in said.values()), said
        assert all(one["seconds"] < 20 * load_factor() for one in said.values()), said
        assert all(one["rank"] in (number, None) for one in said.values()), said
        strays = {Path(key).name for key in bucket.objects if key not in before}
        assert all(strays.isdisjoint(one.get("mine", [])) for one in said.values()), (
            "only those of the rank that is gone"
        )
    else:
        assert same(in_bucket(bucket), load_file(model))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["call", "job"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", ["bucket", "folder"])
def test_a_rank_whose_save_fails_tells_the_others_and_nothing_stays(
    placed: Callable[..., Any], model: Path, bucket: Uploads, tmp_path: Path, rank: int, place: str, how: str
) -> None:
    before = old_checkpoint(bucket)
    folder = tmp_path / "saved"
    penstock.save({"old": torch.ones(3)}, folder)
    program = HOW[how]
    if place == "bucket":
        wanted = "-00001-of-" if rank == 0 else "-00009-of-00009"  # the first file of rank 0, the last of rank 1

        def refuses(method: str, key: str, query: dict[str, str]) -> Any:
            if wanted in key and "partNumber" in query:
                return error(400, "InvalidRequest", "on purpose")
            return None

        bucket.refuses = refuses
    else:
        program = HOW[how].replace(
            "began =",
            f"""
if rank == {rank}:
    from penstock import _save_ranks
    def failing(self, plan):
        raise penstock.WriteError("on purpose")
    _save_ranks._RankSave._publish = failing
began =""",
        )
    at = PLACE if place == "bucket" else str(folder)
    with placed(program, 2, model, place=at, given_storage=settings(bucket)) as ranks:
        said = ranks.all()
    assert "on purpose" in said[rank]["text"] and said[rank]["error"] != "PeerError"
    assert said[1 - rank]["error"] == "PeerError" and said[1 - rank]["rank"] == rank
    assert "on purpose" in said[1 - rank]["text"] and said[1 - rank]["seconds"] < 20 * load_factor()
    assert bucket.objects == before and not bucket.under_way
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["call", "job"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_when_files_are_whole_leaves_the_old_folder(
    placed: Callable[..., Any], model: Path, tmp_path: Path, rank: int, how: str
) -> None:
    folder = tmp_path / "saved"
    penstock.save({f"old{i}": torch.ones(300) for i in range(3)}, folder, max_shard_size=1200)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    program = HOW[how].replace(
        "began =",
        f"""
if rank == {rank}:
    import os, signal
    from penstock import _save_ranks
    def killed(self, plan):
        os.kill(os.getpid(), signal.SIGKILL)
    _save_ranks._RankSave._publish = killed
began =""",
    )
    with placed(program, 2, model, place=str(folder), given_storage=None) as ranks:
        ranks.ended(rank)
        other = ranks.said(1 - rank)
    assert other["error"] == "PeerError" and other["rank"] == rank and other["seconds"] < 20 * load_factor()
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: after[name] for name in before} == before
    strays = after.keys() - before.keys()
    assert strays, "files of the rank that was killed stay, and no index names them"
    assert sorted(penstock.open(folder).keys()) == ["old0", "old1", "old2"]
    for name in before:
        (folder / name).unlink()
    with pytest.raises(penstock.NotFoundError, match="no index names model-s"):  # as in a folder that was new
        penstock.open(folder)
    # The next save removes them
    penstock.save({"new": torch.ones(3)}, folder)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_ranks_replace_what_a_single_process_has_saved(
    placed: Callable[..., Any], model: Path, bucket: Uploads
) -> None:
    penstock.save({"old": torch.ones(3)}, PLACE, storage=settings(bucket))
    before, old = dict(bucket.objects), visible(bucket.objects)
    bucket.history.clear()
    with placed(TRIED, 2, model, place=PLACE, given_storage=settings(bucket)) as ranks:
        said = ranks.all()
    assert all("error" not in one for one in said), said
    new = visible(bucket.objects)
    assert all(state in (old, new) for state in states(bucket, before))
    assert same(in_bucket(bucket), load_file(model))
    assert {Path(key).name for key in bucket.objects} == set(said[0]["files"])
    assert load(bucket).keys() == load_file(model).keys()


@pytest.mark.parametrize("place", ["bucket", "folder"])
def test_nothing_of_a_new_place_can_be_opened_before_the_index_is_there(
    placed: Callable[..., Any], model: Path, bucket: Uploads, tmp_path: Path, place: str
) -> None:
    """Rank 1 has its files, and rank 0 none: nobody takes the one for a checkpoint."""
    program = TRIED.replace(
        "began =",
        """
if rank == 0:
    from penstock import _save_ranks
    def failing(self, *args):
        while not checked():
            time.sleep(0.01)
        raise penstock.WriteError("on purpose")
    def checked():
        try:
            penstock.open(place if "://" not in place else place + "/", storage=storage)
        except penstock.NotFoundError as error:
            said["refused"] = str(error)
            return "no index names" in str(error)
        said["opened"] = True
        return True
    _save_ranks._RankSave._check_files = failing
began =""",
    )
    at = PLACE if place == "bucket" else str(tmp_path / "new")
    with placed(program, 2, model, place=at, given_storage=settings(bucket)) as ranks:
        said = ranks.all()
    assert "opened" not in said[0] and "no index names model-s" in said[0]["refused"], said[0]
    assert said[0]["error"] == "WriteError" and said[1]["error"] == "PeerError"
    assert not bucket.objects and not list((tmp_path / "new").glob("*"))


def test_messages_of_a_failed_save_are_not_those_of_the_next_one(
    placed: Callable[..., Any], model: Path, bucket: Uploads
) -> None:
    """Rank 1 has begun to send a tensor when rank 0 fails. The next save of the same group has other values."""
    program = """
    import time
    from penstock import _gathering
    mesh = init_device_mesh("cpu", (size,))
    def state(value):
        return {"w": distribute_tensor(torch.full((400, 30), value), mesh, [S(0)], src_data_rank=None)}
    receive, send = _gathering.Messages.receive, _gathering.Messages.send
    def failing(self, *args):
        store.wait(["sent"])
        time.sleep(0.5)  # the message is on its way
        raise penstock.WriteError("on purpose")
    def sending(self, *args):
        store.set("sent", "")
        return send(self, *args)
    _gathering.Messages.receive, _gathering.Messages.send = failing, sending
    try:
        penstock.save(state(1.0), place, group=mesh, storage=given_storage)
    except penstock.PenstockError as error:
        said["error"] = type(error).__name__
    _gathering.Messages.receive, _gathering.Messages.send = receive, send
    penstock.save(state(2.0), place, group=mesh, storage=given_storage)
    """
    with placed(program, 2, model, place=PLACE, given_storage=settings(bucket)) as ranks:
        said = ranks.all()
    assert sorted(one["error"] for one in said) == ["PeerError", "WriteError"]
    assert torch.equal(in_bucket(bucket)["w"], torch.full((400, 30), 2.0))


def test_a_group_whose_backend_mixes_messages_is_refused_after_a_failed_save(
    placed: Callable[..., Any], model: Path, bucket: Uploads
) -> None:
    program = """
    from penstock import _gathering, _save_ranks
    mesh = init_device_mesh("cpu", (size,))
    _gathering._TAGGED = ()  # as if gloo were NCCL
    state = {"w": distribute_tensor(torch.ones(40, 30), mesh, [S(0)], src_data_rank=None)}
    def tried(**more):
        try:
            penstock.save(state, place, group=mesh, storage=given_storage, **more)
        except penstock.PenstockError as error:
            return [type(error).__name__, str(error)]
    said["unlike"] = tried(max_shard_size=100 + rank)
    said["fine"] = tried()
    if rank == 1:
        def failing(self, plan):
            raise penstock.WriteError("on purpose")
        _save_ranks._RankSave._publish = failing
    said["failed"] = tried()
    said["refused"] = tried()
    dist.barrier()
    dist.destroy_process_group()
    """
    with placed(program, 2, model, place=PLACE, given_storage=settings(bucket)) as ranks:
        said = ranks.all()
    assert [one["failed"][0] for one in said] == ["PeerError", "WriteError"]
    for one in said:
        assert one["unlike"][0] == "PlanMismatchError" and one["fine"] is None, "nothing was sent, or all of it"
        assert one["refused"][0] in ("InvalidError", "PeerError"), one
        assert "an earlier save with it has failed" in one["refused"][1] and "gloo" in one["refused"][1]


def test_a_backend_that_cannot_send_the_memory_is_refused_before_anything_begins(
    placed: Callable[..., Any], model: Path, bucket: Uploads
) -> None:
    program = """
    from penstock import _save_ranks
    mesh = init_device_mesh("cpu", (size,))
    _save_ranks.device_kind = lambda value: kind  # as if the parts were there
    try:
        state = {"w": distribute_tensor(torch.ones(40, 30), mesh, [S(0)], src_data_rank=None)}
        penstock.save(state, place, group=mesh, storage=given_storage)
    except penstock.PenstockError as error:
        said["error"], said["text"] = type(error).__name__, str(error)
    dist.barrier()
    dist.destroy_process_group()
    """
    for kind, text in {"cuda": "its backend for cuda devices is gloo", "tpu": "no backend for tpu devices"}.items():
        with placed(program, 2, model, place=PLACE, kind=kind, given_storage=settings(bucket)) as ranks:
            said = ranks.all()
        assert all(one["error"] == "InvalidError" and text in one["text"] for one in said), said
        assert not bucket.requests


def test_a_rank_outside_a_mesh_has_nothing_of_its_tensors(
    placed: Callable[..., Any], model: Path, bucket: Uploads
) -> None:
    program = """
    inner = DeviceMesh("cpu", [1, 2])
    state = {
        "w": distribute_tensor(torch.arange(12.0).view(4, 3), inner, [S(0)], src_data_rank=None),
        "scalar": DTensor.from_local(torch.tensor(7.0 if rank else 0.0), inner, [R], run_check=False),
        "all": torch.arange(5),
    }
    report = penstock.save(state, place, group=dist.group.WORLD, storage=given_storage)
    dist.barrier()
    dist.destroy_process_group()
    """
    with placed(program, 3, model, place=PLACE, given_storage=settings(bucket)) as ranks:
        ranks.all()
    expected = {"w": torch.arange(12.0).view(4, 3), "scalar": torch.tensor(7.0), "all": torch.arange(5)}
    assert same(in_bucket(bucket), expected)


def test_a_rank_that_writes_no_index_asks_nothing_about_the_place(
    placed: Callable[..., Any], model: Path, bucket: Uploads
) -> None:
    program = """
    state = {f"stage{rank}": torch.full((3, 2), float(rank))} if rank < 2 else {}
    penstock.save(state, place, group=(store, rank, size), storage=given_storage)
    """
    with placed(program, 3, model, place=PLACE, given_storage=settings(bucket)) as ranks:
        ranks.all()
    heads = [key for method, key, *_ in map(tuple, bucket.requests) if method == "HEAD"]
    assert not [key for key in heads if "-s" in key or key.rstrip("/") == PLACE.split("/", 3)[3]], heads


def test_work_of_the_current_streams_is_waited_for_also_for_tensors_that_are_packed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread packs and sends them, on a stream of its own."""
    from types import SimpleNamespace

    from penstock._describing import Described, synchronize

    waited: list[str] = []

    def current_stream(device: object) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(str(device)))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    late = SimpleNamespace(device=torch.device("cuda", 1))
    there = SimpleNamespace(device=torch.device("cuda", 0))
    synchronize([Described("F32", (2, 3), None, None, late), Described("F32", (6,), 0, 4096, there)])
    synchronize([Described("F32", (2, 3), None, None, torch.ones(3, 2).t())])
    assert sorted(waited) == ["0", "cuda:1"]
