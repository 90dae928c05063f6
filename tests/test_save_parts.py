"""Which rank writes which tensor, and in which order the parts come: the plan of `penstock.save(..., group=...)`."""

from __future__ import annotations

import itertools
import json

import penstock
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock._placements import chunk
from penstock._save_parts import Had, Owned, Plan, nbytes_of, planned, sent_kinds, sequence


def rows(size: int, ranks: int, rank: int, columns: int = 4) -> list[list[tuple[int, int, int]]]:
    """The part that `Shard(0)` gives a rank."""
    first, past = chunk(size, ranks, rank)
    return [[(first, past, 1)], [(0, columns, 1)]]


def one_each(tensors: list[Owned]) -> list[list[int]]:
    return [[number] for number in range(len(tensors))]


def all_in_one(tensors: list[Owned]) -> list[list[int]]:
    return [list(range(len(tensors)))]


def named(number: int, count: int) -> str:
    return f"{number}-of-{count}"


def sharded(ranks: int, sizes: list[int]) -> list[list[Had]]:
    return [
        [Had(f"t{i}", "F32", (size, 4), rows(size, ranks, rank), "cpu") for i, size in enumerate(sizes)]
        for rank in range(ranks)
    ]


@given(st.integers(1, 6), st.lists(st.integers(6, 60), min_size=1, max_size=30))
def test_ranks_write_about_as_many_bytes_each(ranks: int, sizes: list[int]) -> None:
    plan = planned(sharded(ranks, sizes), all_in_one, named)
    loads = [sum(t.nbytes for t in plan.tensors if t.owner == rank) for rank in range(ranks)]
    assert max(loads) - sum(loads) / ranks <= max(t.nbytes for t in plan.tensors)
    assert sorted(number for file in plan.files for number in file.tensors) == list(range(len(sizes)))
    assert all(plan.tensors[number].owner == file.owner for file in plan.files for number in file.tensors)
    assert [file.name for file in plan.files] == [named(n, len(plan.files)) for n in range(1, len(plan.files) + 1)]
    for tensor in plan.tensors:
        given_parts = [piece.axes for piece in tensor.pieces if piece.axes is not None]
        assert sum((r[0][0][1] - r[0][0][0]) for r in given_parts) == (tensor.shape[0] if given_parts else 0)
    assert Plan.unpacked(json.loads(json.dumps(plan))).packed() == json_like(plan)


def json_like(plan: Plan) -> list[object]:
    """The plan with lists where JSON has them."""
    tensors = [
        t._replace(pieces=[p._replace(axes=p.axes and json.loads(json.dumps(p.axes))) for p in t.pieces])
        for t in plan.tensors
    ]
    return [tensors, plan.files]


@given(st.integers(1, 5), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_each_owner_gets_its_tensors_in_the_order_of_its_files(ranks: int, sizes: list[int]) -> None:
    plan = planned(sharded(ranks, sizes), one_each, named)
    order = sequence(plan)
    assert sorted(order) == [n for n, tensor in enumerate(plan.tensors) if tensor.is_gathered]
    for rank in range(ranks):
        mine = [number for file in plan.files if file.owner == rank for number in file.tensors]
        assert [number for number in order if plan.tensors[number].owner == rank] == [n for n in mine if n in order]


def test_owners_take_turns() -> None:
    plan = planned(sharded(3, [8] * 9), all_in_one, named)
    owners = [plan.tensors[number].owner for number in sequence(plan)]
    assert owners == [0, 1, 2] * 3


def test_replicas_are_written_once_and_nothing_is_sent_for_them() -> None:
    had = [[Had(f"t{i}", "BF16", (8, 8), None, "cpu") for i in range(6)] for _ in range(3)]
    plan = planned(had, all_in_one, named)
    assert [tensor.owner for tensor in plan.tensors] == [0, 0, 1, 1, 2, 2]
    assert not any(tensor.is_gathered for tensor in plan.tensors) and sequence(plan) == []


def test_of_replicas_of_a_part_its_owner_takes_its_own_and_the_ranks_that_have_sent_least_the_others() -> None:
    """HSDP: two replicas of two shards, on ranks 0 to 3."""
    had = [[Had(f"t{i}", "F32", (8, 4), rows(8, 2, rank % 2), "cpu") for i in range(8)] for rank in range(4)]
    plan = planned(had, all_in_one, named)
    assert sorted(tensor.owner for tensor in plan.tensors) == [0, 0, 1, 1, 2, 2, 3, 3]
    sent = [0] * 4
    for tensor in plan.tensors:
        assert len(tensor.pieces) == 2 and tensor.owner in [piece.rank for piece in tensor.pieces]
        for piece in tensor.pieces:
            sent[piece.rank] += piece.rank != tensor.owner
    assert sent == [2] * 4


def test_a_tensor_that_one_rank_has_is_written_by_it_and_the_others_make_up_for_it() -> None:
    had = [[Had(f"t{i}", "U8", (100,), None, "cpu") for i in range(4)] for _ in range(2)]
    had[1].append(Had("large", "U8", (400,), None, "cpu"))
    plan = planned(had, all_in_one, named)
    owner = {tensor.name: tensor.owner for tensor in plan.tensors}
    assert owner == {"t0": 0, "t1": 0, "t2": 0, "t3": 0, "large": 1}


def test_tensors_without_elements_are_written_by_somebody() -> None:
    had = [[Had("none", "F32", (0, 4), rows(0, 3, rank), "cpu")] for rank in range(3)]
    plan = planned(had, all_in_one, named)
    assert len(plan.files) == 1 and sequence(plan) == []


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Had("t0", "F32", (9, 4), rows(9, 2, 1), "cpu"), r"F32 of shape \[8, 4\] on rank 0 and F32 of shape \[9, 4\]"),
        (Had("t0", "BF16", (8, 4), rows(8, 2, 1), "cpu"), "and BF16 of shape"),
        (Had("t0", "F32", (8, 4), rows(8, 2, 0), "cpu"), "they have 16 of 32 elements"),
        (Had("t0", "F32", (8, 4), [[(0, 8, 1)], [(0, 2, 1)]], "cpu"), "do not make a whole"),
    ],
)
def test_what_does_not_fit_together_is_named(other: Had, message: str) -> None:
    with pytest.raises(penstock.PlanMismatchError, match=message) as caught:
        planned([sharded(2, [8])[0], [other]], all_in_one, named)
    assert caught.value.tensor == "t0" and 1 in caught.value.ranks


def test_bytes_of_tensors() -> None:
    for dtype, shape in itertools.product(("F32", "F4", "U8"), ((), (3, 2), (0,))):
        count = {(): 1, (3, 2): 6, (0,): 0}[shape]
        bits = {"F32": 32, "F4": 4, "U8": 8}[dtype]
        assert nbytes_of(dtype, shape) == count * bits // 8


def test_the_kinds_of_memory_that_are_sent() -> None:
    had = [[Had("t", "F32", (8, 4), rows(8, 2, rank), ("cpu", "cuda")[rank])] for rank in range(2)]
    plan = planned(had, all_in_one, named)
    assert plan.tensors[0].owner == 0 and sent_kinds(plan) == {"cuda"}
    whole = [[Had("t", "F32", (8, 4), None, "cuda")] for _ in range(2)]
    assert sent_kinds(planned(whole, all_in_one, named)) == set()
