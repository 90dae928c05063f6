"""Streams of several processes that load together: windows, unequal wants, and ranks that leave before the end."""

from __future__ import annotations

from pathlib import Path

import penstock
import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers in the reverse of their order, 8 KiB each and more, and tensors of no bytes between them."""
    torch.manual_seed(0)
    tensors = {"embed": torch.randn(301, 64), "scalar": torch.tensor(3.0)}
    for layer in reversed(range(6)):
        tensors[f"{layer}.norm"] = torch.randn(64, dtype=torch.float16)
        tensors[f"{layer}.up"] = torch.randn(107, 64).to(torch.bfloat16)
        tensors[f"{layer}.down"] = torch.randn(64, 128)
        tensors[f"{layer}.experts"] = torch.randint(-9, 9, (8, 32, 64), dtype=torch.int8)
        tensors[f"{layer}.none"] = torch.empty(0, 64)
    path: Path = tmp_path_factory.mktemp("stream") / "model.safetensors"
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("size", [2, 4])
def test_a_group_streams_what_each_rank_wants_in_the_order_of_reading_and_reads_it_once(together, model, size):
    program = """
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    checkpoint = penstock.open(path)
    said["read"] = 0
    for order in ("file", "layer"):
        alone = [name for name, tensor in checkpoint.stream(order=order) if tensor.numel()]
        for window in (1, 50_000, 1 << 30):
            options = {"cache": "keep", "gap": 0}
            stream = checkpoint.stream(
                slices=sharded, group=dist.group.WORLD, order=order, window=window, options=options
            )
            found = list(stream)
            assert [name for name, tensor in found if name in alone and checkpoint[name].nbytes] == alone
            assert same(dict(found), sharded) == len(checkpoint)
            report = checkpoint.last_report
            wanted = sum(tensor.nbytes for _, tensor in found)
            assert (report.nbytes, report.tensors) == (wanted, len(found))
            own = [way["bytes"] for lane, way in report.routes.items() if lane not in ("rank", "neighbour")]
            said["read"] += sum(own) - report.slack_bytes
            said["ranks"] = report.exchange["ranks"]
    half = dict(checkpoint.stream(group=dist.group.WORLD, dtype=torch.bfloat16, names=["embed"]))["embed"]
    assert torch.equal(half, checkpoint.load(names=["embed"])["embed"].to(torch.bfloat16))
    seen = []
    for _ in checkpoint.stream(group=dist.group.WORLD, window=50_000, progress=lambda *one: seen.append(one)):
        pass
    assert seen[-1] == (checkpoint.nbytes,) * 2 and seen == sorted(seen)
    meta = dict(checkpoint.stream("meta" if rank else "cpu", group=dist.group.WORLD, window=50_000))
    assert len(meta) == len(checkpoint) and meta["embed"].is_meta == (rank > 0)
    one = checkpoint.stream(group=(store, 0, 1), window=50_000)
    said["alone"] = same(dict(one))
    dist.destroy_process_group()
    """
    with together(program, size, model) as ranks:
        said = ranks.all()
    checkpoint = penstock.open(model)
    assert {one["ranks"] for one in said} == {size}
    assert {one["alone"] for one in said} == {len(checkpoint)}
    # Six streams, each of which reads every byte once
    assert sum(one["read"] for one in said) == 6 * checkpoint.nbytes


def test_ranks_want_different_tensors(together, model):
    """Filters that have nothing in common, and one that wants nothing: as where some ranks have a draft model too.

    With a group the order is that of the files, whatever that of a list of names.
    """
    program = """
    checkpoint, group = penstock.open(path), (store, rank, size)
    names = [["0.*"], [], lambda name: name.endswith(("up", "experts")), list(checkpoint)[::-1]][rank]
    for window in (1, 20_000, 1 << 20):
        found = dict(checkpoint.stream(names=names, group=group, window=window))
        assert list(found) == [n for n in checkpoint if n in checkpoint.load(names=names)]
        same(found)
    for _ in checkpoint.stream(names=[], group=group):
        raise AssertionError
    said["done"] = checkpoint.last_report["tensors"]
    """
    with together(program, 4, model) as ranks:
        assert [ranks.said(rank)["done"] for rank in range(4)] == [0] * 4


def test_no_more_than_a_window_is_ahead_of_the_consumer(together, model):
    program = """
    from penstock import _group_stream
    checkpoint, group, begun = penstock.open(path), (store, rank, size), []
    class Job(_group_stream.Job):
        def __init__(self, request, adapter):
            begun.extend(request.selection.names)
            super().__init__(request, adapter)
    _group_stream.Job = Job
    most, taken = 0, 0
    for name, tensor in checkpoint.stream(group=group, window=50_000):
        bytes_ahead = sum(checkpoint[n].nbytes for n in begun[taken:])
        assert bytes_ahead <= 50_000 or len([n for n in begun[taken:] if checkpoint[n].nbytes]) == 1, begun[taken:]
        most, taken = max(most, bytes_ahead), taken + 1
    said["most"], said["taken"] = most, taken
    """
    with together(program, 2, model) as ranks:
        for rank in range(2):
            said = ranks.said(rank)
            assert said["taken"] == len(penstock.open(model))
            assert said["most"] > 40_000  # there is something ahead


LEAVING = {
    # How a rank leaves its stream, and what it has taken by then
    "closed": ("stream.close()", 3),
    "dropped": ("del stream", 3),
    "late": ("stream.close()", 20),
    "not begun": ("stream.close()", 0),
    "never begun": ("del stream", 0),
    "raises": ("stream._steps.throw(ZeroDivisionError)", 3),
}


@pytest.mark.parametrize("how", LEAVING)
def test_a_rank_that_leaves_before_the_end_is_named_and_the_group_goes_on(together, model, how):
    leaves, taken = LEAVING[how]
    program = f"""
    checkpoint, group, found = penstock.open(path), (store, rank, size), {{}}
    other = checkpoint.stream(group=group, window=50_000)
    stream = checkpoint.stream(group=group, window=50_000)
    try:
        if rank == 1:
            for _ in range({taken}):
                name, tensor = next(stream)
                found[name] = tensor
            {leaves}
        else:
            for name, tensor in stream:
                found[name] = tensor
    except penstock.PeerError as error:
        said["peer"], said["text"] = error.rank, str(error)
    except ZeroDivisionError:
        pass
    said["found"] = same(found)
    said["again"] = same(checkpoint.load(group=group))
    said["other"] = same(dict(other))
    """
    with together(program, 3, model) as ranks:
        said = ranks.all()
    every = len(penstock.open(model))
    assert [one["again"] for one in said] == [one["other"] for one in said] == [every] * 3
    assert said[1]["found"] == taken
    for one in (said[0], said[2]):
        assert one["peer"] == 1
        assert "closed before" in one["text"] or "cancelled" in one["text"]
        assert every > one["found"] >= taken  # what all have read is handed out first


def test_a_rank_that_is_interrupted_while_it_waits_for_another_one_is_named(together, model):
    program = """
    def interrupt(*_):
        raise KeyboardInterrupt
    checkpoint, group, found = penstock.open(path), (store, rank, size), {}
    stream = checkpoint.stream(group=group, window=10_000)
    if rank == 1:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        for name, tensor in stream:
            found[name] = tensor
            while rank == 0 and not store.check(["go"]):
                time.sleep(0.01)
    except penstock.PeerError as error:
        said["peer"] = error.rank
    except KeyboardInterrupt:
        said["interrupted"] = True
        store.set("go", "")
    said["found"] = same(found)
    said["again"] = same(checkpoint.load(group=group))
    """
    with together(program, 3, model) as ranks:
        said = ranks.all()
    assert [one.get("peer") for one in said] == [1, None, 1]
    assert said[1]["interrupted"]
    assert all(one["found"] < one["again"] == len(penstock.open(model)) for one in said)


def test_a_rank_that_leaves_at_the_end_disturbs_nobody(together, model):
    """All windows are there by then: the others need nothing of it. Nothing is left of a stream either way."""
    program = """
    checkpoint, group = penstock.open(path), (store, rank, size)
    stream = checkpoint.stream(group=group, window=1 << 20)
    if rank == 1:
        next(stream)
        stream.close()
    else:
        assert same(dict(stream)) == len(checkpoint)
    said["again"] = same(dict(checkpoint.stream(group=group)))
    left = counted()
    for taken in range(3):
        stream = checkpoint.stream(group=group, window=50_000)
        for _ in range(taken if rank else 0):
            next(stream)
        try:
            stream.close() if rank else dict(stream)
        except penstock.PeerError:
            pass
    settled(left)
    """
    with together(program, 2, model) as ranks:
        assert [ranks.said(rank)["again"] for rank in range(2)] == [len(penstock.open(model))] * 2


def test_ranks_that_mean_different_streams_hear_which_one_differs(together, model):
    program = """
    checkpoint, group = penstock.open(path), (store, rank, size)
    for what in ({"window": 4096}, {"order": "layer"}):
        try:
            next(checkpoint.stream(group=group, **(what if rank == 2 else {})))
        except penstock.PlanMismatchError as error:
            said.setdefault("ranks", []).append(error.ranks)
            said.setdefault("texts", []).append(str(error))
    try:
        checkpoint.stream(group=group, names=["nowhere"]) if rank == 0 else next(checkpoint.stream(group=group))
    except penstock.UnknownTensorError:
        said["peer"] = "me"
    except penstock.PeerError as error:
        said["peer"], said["text"] = error.rank, str(error)
    try:
        if rank:
            next(checkpoint.stream(group=group, options={"join_timeout": 0.5}))
    except penstock.PeerError as error:
        said["missing"] = error.rank
    """
    with together(program, 3, model) as ranks:
        said = ranks.all()
    for one in said:
        assert one["ranks"] == [[2], [2]]
        assert "window of 4096 bytes" in one["texts"][0] and "by layer" in one["texts"][1]
    assert [one["peer"] for one in said] == ["me", 0, 0]
    assert "nowhere" in said[1]["text"]
    assert [one.get("missing") for one in said] == [None, 0, 0]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_dies_between_two_windows_is_named(together, model, which, late):
    """Rank 0 hosts the store of the group. Where rank 2 is late, another rank has given up when it looks."""
    program = f"""
    if rank == 0:
        own = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        store.set("port", str(own.port))
    else:
        own = dist.TCPStore("127.0.0.1", int(store.get("port")), None, False, timedelta(seconds=60))
    checkpoint, found = penstock.open(path), {{}}
    try:
        for name, tensor in checkpoint.stream(group=(own, rank, size), window=1):
            found[name] = tensor
            if rank == {which} and len(found) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 2 and len(found) == 4:
                time.sleep({late})
    except penstock.PeerError as error:
        said["peer"], said["text"] = error.rank, str(error)
    said["found"] = same(found)
    """
    with together(program, 3, model) as ranks:
        ranks.ended(which)
        for rank in {0, 1, 2} - {which}:
            said = ranks.said(rank)
            assert said["peer"] == which, said
            assert 4 <= said["found"] < 10
