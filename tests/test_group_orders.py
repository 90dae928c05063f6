"""Loads of groups beside everything else that a program does with its groups: no deadlock, and the right bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import slow_fs
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from ranks_together import Ranks

WHOLE = os.environ.get("PENSTOCK_TEST_RANKS") == "1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = [Tensor(f"{number}", "F32", (1000, 100)) for number in range(6)]
    return synth.write_file(tmp_path_factory.mktemp("orders") / "model.safetensors", tensors)


def test_collectives_of_the_program_may_come_in_another_order_on_every_rank(
    together: Callable[..., Ranks], model: Path
) -> None:
    """In each round a rank starts a load over a group, and sums over this and another group, in an order of its own."""
    program = """
    import random, threading
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    world, other = dist.group.WORLD, dist.new_group(list(range(size)))
    checkpoint, order = penstock.open(path), random.Random(rank)

    def load():
        found.update(checkpoint.load(group=world, slices=lambda info: of(info.shape[0])))

    def total(group, value):
        tensor = torch.tensor([value])
        dist.all_reduce(tensor, group=group)
        sums.append(int(tensor))

    for number in range(rounds):
        found, sums = {}, []
        doing = [(load, ()), (total, (world, number)), (total, (other, -number))]
        order.shuffle(doing)
        threads = [threading.Thread(target=what, args=args) for what, args in doing]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(sums) == sorted([size * number, -size * number]), sums
        assert same(found, lambda info: of(info.shape[0])) == 6
    said["rounds"] = number + 1
    dist.destroy_process_group()
    """
    rounds = 1000 if WHOLE else 12
    with together(program, 4, model, rounds=rounds) as ranks:
        assert [one["rounds"] for one in ranks.all()] == [rounds] * 4


def test_some_ranks_load_a_draft_model_and_groups_overlap(together: Callable[..., Ranks], model: Path) -> None:
    """Ranks 1 and 2 load with two groups at once, from two threads; ranks 2 and 3 load another time, by themselves."""
    program = """
    import threading
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    groups = {members: dist.new_group(list(members)) for members in ((0, 1, 2), (1, 2, 3), (2, 3))}
    checkpoint, done = penstock.open(path), {}

    def load(members):
        done[members] = same(checkpoint.load(group=groups[members]))

    for number in range(5):
        mine = [members for members in ((0, 1, 2), (1, 2, 3)) if rank in members]
        threads = [threading.Thread(target=load, args=(members,)) for members in mine]
        threads = threads if rank % 2 else threads[::-1]
        for thread in threads:
            thread.start()
        if rank in (2, 3):
            load((2, 3))
        for thread in threads:
            thread.join()
    said["done"] = sorted(map(str, done.values()))
    said["whole"] = same(checkpoint.load(group=dist.group.WORLD))
    dist.destroy_process_group()
    """
    with together(program, 4, model) as ranks:
        said = ranks.all()
    assert [len(one["done"]) for one in said] == [1, 2, 3, 2]
    assert {found for one in said for found in one["done"]} == {"6"}
    assert [one["whole"] for one in said] == [6] * 4


def test_ranks_that_make_more_loads_than_others_hear_who_does_not_come(
    together: Callable[..., Ranks], model: Path
) -> None:
    program = """
    checkpoint = penstock.open(path)
    for number in range(2 if rank == 0 else 1):
        try:
            said["tensors"] = same(checkpoint.load(group=group, options={"join_timeout": 1.5}))
        except penstock.PeerError as error:
            said["peer"], said["text"] = error.rank, str(error)
    """
    with together(program, 3, model) as ranks:
        said = ranks.all()
    assert said[0]["peer"] == 1 and "ranks 1, 2 of 3 did not come" in said[0]["text"]
    assert [one["tensors"] for one in said] == [6] * 3
    assert "peer" not in said[1] and "peer" not in said[2]


@pytest.mark.parametrize("how", ["close", "cancel", "drop"])
def test_a_job_that_one_rank_closes_early_ends_on_all(together: Callable[..., Ranks], model: Path, how: str) -> None:
    program = """
    import gc
    checkpoint = penstock.open(path)
    job = penstock.open(slow).start(group=group, options={"cache": "bypass", "depth": 1, "threads": 1})
    if rank == 1:
        if how == "cancel":
            job.cancel()
            try:
                job.result()
            except penstock.CancelledError:
                said["cancelled"] = True
        elif how == "close":
            job.close()
        del job
        gc.collect()
    else:
        try:
            said["tensors"] = same(job.result())
        except penstock.PeerError as error:
            said.update(peer=error.rank, text=str(error))
    said["again"] = same(checkpoint.load(group=group))
    """
    why = slow_fs.why_not()
    if why is not None:
        pytest.skip(why)
    with slow_fs.mounted(model.parent) as fs:
        fs.tell(latency=0.2)  # nobody has everything before it is closed
        with together(program, 3, model, how=how, slow=str(fs.path / model.name)) as ranks:
            said = ranks.all()
    for one in (said[0], said[2]):
        assert one["peer"] == 1, one
        assert "cancelled" in one["text"] or "given up" in one["text"], one
    assert [one["again"] for one in said] == [6] * 3
