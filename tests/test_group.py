"""Several processes that load one checkpoint together, over groups of torch.distributed and over bare stores."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import penstock
import pytest
import torch
from ordeal import load_factor
from ranks_together import until_stopped
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {"embed": torch.randn(3001, 64), "scalar": torch.tensor(3.0), "none": torch.empty(0, 64)}
    for layer in range(3):
        tensors[f"{layer}.norm"] = torch.randn(64, dtype=torch.float16)
        tensors[f"{layer}.up"] = torch.randn(1027, 64).to(torch.bfloat16)
        tensors[f"{layer}.down"] = torch.randn(64, 1024)
        tensors[f"{layer}.experts"] = torch.randint(-9, 9, (8, 32, 64), dtype=torch.int8)
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("size", [2, 4])
def test_a_group_loads_what_each_rank_wants_and_reads_it_once(together, model, size):
    program = """
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    checkpoint = penstock.open(path)
    for group in (dist.group.WORLD, (dist.PrefixStore("mine", store), rank, size)):
        for cache in ("keep", "bypass"):
            options = {"cache": cache, "gap": 0}
            said["sharded"] = same(checkpoint.load(slices=sharded, group=group, options=options), sharded)
            report = checkpoint.last_report
            own = [way["bytes"] for lane, way in report.routes.items() if lane not in ("rank", "neighbour")]
            read = sum(own) - report.slack_bytes
            said["read"] = said.get("read", 0) + read
            said["nbytes"], said["exchange"] = report.nbytes, report.exchange
            assert report.routes["neighbour"]["bytes"] == report.exchange["received_bytes"] > 0
            assert report.exchange["lent_bytes"] == report.exchange["sent_bytes"] > 0
            said["whole"] = same(checkpoint.load(group=group, options=options))
    assert "other ranks" in str(checkpoint.last_report)
    half = checkpoint.load(group=dist.group.WORLD, dtype=torch.bfloat16, names=["embed"])["embed"]
    whole = checkpoint.load(names=["embed"])["embed"]
    assert torch.equal(half, whole.to(torch.bfloat16))
    into = {name: torch.empty_like(tensor.t().contiguous().t() if tensor.dim() == 2 else tensor)
            for name, tensor in checkpoint.load().items()}
    checkpoint.load_into(into, group=dist.group.WORLD)
    said["into"] = same(into)
    dist.destroy_process_group()
    """
    with together(program, size, model) as ranks:
        said = ranks.all()
    checkpoint = penstock.open(model)
    assert [one["whole"] for one in said] == [len(checkpoint)] * size
    assert sum(one["read"] for one in said) == 4 * checkpoint.nbytes  # four loads, each of which reads every byte once
    exchanged = [one["exchange"] for one in said]
    assert sum(e["sent_bytes"] for e in exchanged) == sum(e["received_bytes"] for e in exchanged) > 0
    assert {e["ranks"] for e in exchanged} == {size}


def test_odd_wants_are_no_exception(together, model):
    """One rank wants nothing, one has no memory, one wants the same many times, in memory that is not contiguous."""
    program = """
    checkpoint, group = penstock.open(path), (store, rank, size)
    if rank == 0:
        assert checkpoint.load(names=[], group=group) == {}
        meta = checkpoint.load("meta", group=group)
        assert meta["embed"].is_meta and len(meta) == len(checkpoint)
    elif rank == 1:
        same(checkpoint.load(group=group))
        left = counted()
        same(checkpoint.load(group=group))
        settled(left)
    else:
        into = [torch.empty(64, 3001, dtype=torch.bfloat16).t() for _ in range(9)]
        checkpoint.load_into([penstock.Destination("embed", one, cast=True) for one in into], group=group)
        expected = checkpoint.load(names=["embed"])["embed"].to(torch.bfloat16)
        assert all(torch.equal(one, expected) for one in into)
        job = checkpoint.start(slices={"embed": (slice(None, None, 3), slice(1, 64, 2))}, group=group)
        assert torch.equal(job.result()["embed"], checkpoint.load(names=["embed"])["embed"][::3, 1::2])
    said["done"] = True
    """
    with together(program, 3, model) as ranks:
        assert [ranks.said(rank)["done"] for rank in range(3)] == [True] * 3


def test_ranks_with_different_checkpoints_hear_which_one_differs(together, model, tmp_path):
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(3)}, other)
    program = f"""
    try:
        penstock.open({str(other)!r} if rank == 2 else path).load(group=(store, rank, size))
    except penstock.PlanMismatchError as error:
        said["ranks"], said["text"] = error.ranks, str(error)
    """
    with together(program, 3, model) as ranks:
        for rank in range(3):
            said = ranks.said(rank)
            assert said["ranks"] == [2]
            assert "1 tensors" in said["text"] and "15 tensors" in said["text"]


def test_another_content_is_found_where_headers_are_equal(together, model, tmp_path):
    """As of two training steps, on two machines. A copy of the same bytes is the same checkpoint."""
    copied, stepped = tmp_path / "copied.safetensors", tmp_path / "stepped.safetensors"
    copied.write_bytes(model.read_bytes())
    content = bytearray(model.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = bytes(byte ^ 1 for byte in content[start:])
    stepped.write_bytes(content)
    program = f"""
    said["same"] = same(penstock.open({str(copied)!r} if rank == 1 else path).load(group=(store, rank, size)))
    try:
        penstock.open({str(stepped)!r} if rank == 1 else path).load(group=(store, rank, size))
    except penstock.PlanMismatchError as error:
        said["ranks"], said["text"] = error.ranks, str(error)
    left = (f"penstock/{{n}}/{{what}}/{{r}}" for n in (1, 2) for what in ("rank", "samples") for r in range(size))
    said["again"] = same(penstock.open(path).load(group=(store, rank, size)))
    said["keys"] = [key for key in left if store.check([key]) and key.endswith(str(rank))]
    """
    with together(program, 3, model) as ranks:
        for rank in range(3):
            said = ranks.said(rank)
            assert said["ranks"] == [1]
            assert "another content in file 1 of 1" in said["text"]
            assert (said["same"], said["again"], said["keys"]) == (15, 15, [])


def test_a_rank_that_cannot_begin_tells_the_others_why(together, model):
    program = """
    try:
        penstock.open(path).load(names=["nowhere"] if rank == 1 else None, group=(store, rank, size))
    except penstock.UnknownTensorError as error:
        said["unknown"] = rank
    except penstock.PeerError as error:
        said["peer"], said["text"] = error.rank, str(error)
    begun = time.monotonic()
    said["after"] = same(penstock.open(path).load(group=(store, rank, size)))
    """
    with together(program, 3, model) as ranks:
        said = ranks.all()
    assert said[1]["unknown"] == 1
    assert [one.get("peer") for one in said] == [1, None, 1]
    assert "nowhere" in said[0]["text"]
    assert [one["after"] for one in said] == [15] * 3


def test_a_rank_that_does_not_come_is_named(together, model):
    program = """
    begun = time.monotonic()
    if rank != 1:
        try:
            penstock.open(path).load(group=(store, rank, size), options={"join_timeout": 1.0})
        except penstock.PeerError as error:
            said["peer"], said["text"] = error.rank, str(error)
    said["seconds"] = time.monotonic() - begun
    """
    with together(program, 3, model) as ranks:
        for rank in (0, 2):
            said = ranks.said(rank)
            assert said["peer"] == 1 and "rank 1 of 3 did not come" in said["text"]
            assert said["seconds"] < 10 * load_factor()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("large") / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    tensors = {f"{i}": torch.randint(0, 255, (4 << 20,), dtype=torch.uint8, generator=generator) for i in range(40)}
    save_file(tensors, path)
    return path


def test_ranks_that_find_everything_in_the_page_cache_load_alone(together, model):
    program = """
    checkpoint = penstock.open(path)
    for exchange in ("auto", "off"):
        said[exchange] = same(checkpoint.load(group=(store, rank, size), options={"exchange": exchange}))
        said[exchange] = checkpoint.last_report.exchange
    into = {name: torch.empty_like(tensor) for name, tensor in checkpoint.load().items()}
    said["into"] = checkpoint.load_into(into, group=(store, rank, size), options={"exchange": "auto"}).exchange
    same(into)
    if rank == 0:
        store.set("over", "")
    store.wait(["over"])
    """
    model.read_bytes()
    with together(program, 3, model) as ranks:
        for rank in range(3):
            said = ranks.said(rank)
            for found in said.values():
                assert (found["ranks"], found["choice"], found["sent_bytes"], found["received_bytes"]) == (
                    3,
                    "off",
                    0,
                    0,
                )
            assert said["off"]["reason"] == "asked for"
            assert "page cache" in said["auto"]["reason"] and said["into"] == said["auto"]


def test_a_rank_that_hosts_the_store_may_end_when_its_load_has(together, model):
    """Others may not have read what it says when it knows that each loads alone."""
    program = """
    if rank == 0:
        own = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        store.set("port", str(own.port))
    else:
        own = dist.TCPStore("127.0.0.1", int(store.get("port")), None, False)
    for _ in range(3):
        checkpoint = penstock.open(path)
        said["tensors"] = len(checkpoint.load(group=(own, rank, size), options={"exchange": "auto"}))
    said["choice"] = checkpoint.last_report.exchange["choice"]
    """
    model.read_bytes()
    with together(program, 4, model) as ranks:
        assert [ranks.said(rank)["choice"] for rank in range(4)] == ["off"] * 4


@pytest.mark.parametrize("wants", ["whole", "sharded"])
def test_ranks_try_both_ways_and_decide_alike(together, large, wants):
    """Past the page cache, so that it does not matter what that holds."""
    program = f"""
    checkpoint = penstock.open(path)
    slices = None if {wants!r} == "whole" else lambda info: slice(rank, None) if int(info.name) % 2 else None
    options = {{"exchange": "auto", "io": "direct"}}
    said["tensors"] = same(checkpoint.load(group=(store, rank, size), slices=slices, options=options), slices)
    said["first"] = checkpoint.last_report.exchange
    job = checkpoint.start(group=(store, rank, size), slices=slices, options=options)
    said["tensors"] = same(job.result(), slices)
    own = [way["bytes"] for lane, way in checkpoint.last_report.routes.items() if lane not in ("rank", "neighbour")]
    said["reads"] = sum(own)
    said["second"] = checkpoint.last_report.exchange
    """
    with together(program, 3, large) as ranks:
        said = ranks.all()
    for load in ("first", "second"):
        found = [one[load] for one in said]
        assert len({(one["choice"], one["reason"]) for one in found}) == 1, found
        assert found[0]["reason"].startswith("tried: ")
        sent, received = (sum(one[key] for one in found) for key in ("sent_bytes", "received_bytes"))
        assert sent == received > 2 * (40 << 20)  # what was tried together


def test_ranks_that_were_asked_for_different_exchange_are_told(together, model):
    program = """
    checkpoint = penstock.open(path)
    try:
        checkpoint.load(group=(store, rank, size), options={"exchange": "off" if rank == 1 else "on"})
    except penstock.PlanMismatchError as error:
        said.update(ranks=error.ranks, text=str(error))
    """
    with together(program, 3, model) as ranks:
        for rank in range(3):
            assert ranks.said(rank)["ranks"] == [1] and "has another exchange" in ranks.said(rank)["text"]


FAULTS = {
    # What the rank does in the middle of its load, and what the others say of it
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "gone", 1.0),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "has said nothing", 2.0 + 1.0),
    "interrupted": ("raise KeyboardInterrupt", "cancelled", 1.0),
}


@pytest.mark.sampled
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("which", "exchange"), [(0, "on"), (2, "on"), (2, "auto")])
def test_a_rank_that_fails_in_the_middle_is_named_by_all_others_and_they_load_again(
    together, large, fault, which, exchange
):
    does, says, limit = FAULTS[fault]
    program = f"""
    def progress(done, total):
        if rank == {which} and done and "at" not in said:  # once: it may be told more when it goes on
            said["at"] = done
            {does}
    checkpoint = penstock.open(path)
    options = {{"io": "direct", "peer_timeout": 2.0, "depth": 1, "threads": 1, "exchange": {exchange!r}}}
    try:
        checkpoint.load(group=(store, rank, size), options=options, progress=progress)
    except penstock.PeerError as error:
        said.update(peer=error.rank, text=str(error), when=time.time())
    except KeyboardInterrupt:
        said["interrupted"] = time.time()
    if rank != {which}:
        left = [r for r in range(size) if r != {which}]
        again = checkpoint.load(group=(dist.PrefixStore("again", store), left.index(rank), len(left)), options=options)
        said["again"] = same(again)
    """
    with together(program, 4, large) as ranks:
        others = [rank for rank in range(4) if rank != which]
        if fault == "stopped":
            until_stopped(ranks.pids[which])
        else:
            ranks.ended(which)
        ended = time.time()
        for rank in others:
            said = ranks.said(rank)
            assert said["peer"] == which, said
            assert says in said["text"], said
            assert said["again"] == 40
            if fault != "interrupted":
                assert said["when"] < ended + limit, (said["when"] - ended, said)
        if fault == "stopped":
            os.kill(ranks.pids[which], signal.SIGCONT)
            assert "says so" in ranks.said(which)["text"] or "has failed" in ranks.said(which)["text"]


@pytest.mark.parametrize("exchange", ["off", "on", "auto"])
@pytest.mark.parametrize("how", ["in its place", "of equal time"])
def test_a_file_that_is_replaced_between_two_opens_is_told_before_a_byte_moves(
    together, model, exchange, how, tmp_path
):
    """Of one size and header. Every rank hears which file it is; then all load the new one."""
    program = """
    import shutil
    place = f"{folder}/model.safetensors"
    if rank == 0:
        shutil.copy(path, f"{place}.new")
        os.rename(f"{place}.new", place)
        checkpoint = penstock.open(place)
        content = bytearray(open(path, "rb").read())
        content[-1000:] = bytes(255 - byte for byte in content[-1000:])
        with open(f"{place}.new", "wb") as file:
            file.write(content)
        if HOW:
            was = os.stat(place)
            os.utime(f"{place}.new", ns=(was.st_atime_ns, was.st_mtime_ns))
        os.rename(f"{place}.new", place)
        hold("replaced")
    else:
        hold("replaced")
        checkpoint = penstock.open(place)
    try:
        checkpoint.load(group=group, options={"exchange": "EXCHANGE"})
    except penstock.PenstockError as error:
        said.update(kind=type(error).__name__, text=str(error))
    again = penstock.open(place)
    said["again"] = len(again.load(group=group, options={"exchange": "EXCHANGE"}))
    """
    text = program.replace("EXCHANGE", exchange).replace("HOW", str(how == "of equal time"))
    with together(text, 2, model) as ranks:
        ranks.held("replaced")
        ranks.release("replaced")
        for said in ranks.all():
            assert said["kind"] in ("ChangedError", "PeerError") and "model.safetensors" in said["text"], said
            assert said["again"] > 0
