"""Lists of positions, long ones too: what is read for them, and in how many parts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Oracle, raw
from penstock import safe_open
from penstock._indexing import plan
from penstock._torch import indexing
from penstock.synthetic.synth import Tensor

ROWS, COLUMNS = 900, 700


@pytest.fixture
def table(write: Any) -> Any:
    return write(Tensor("w", "F32", (ROWS, COLUMNS)), Tensor("deep", "BF16", (40, 50, 60)))


def planned(table: Any, name: str, index: Any, near: int) -> Any:
    with safe_open(table) as file:
        how = indexing(file._checkpoint[name])
    return plan(index, how.shape, how.arrays, how.unit, near)


EVEN = [
    ([4, 0, 2], 1, 3),
    (list(range(0, 900, 7)), 1, 129),
    (torch.arange(ROWS) % 2 == 1, 1, 450),
    ([0, 2], 2, 2),
    ([0, 2, 5], 3, 3),
    ([1, 2, 3, 9], 2, 4),
]


@pytest.mark.parametrize(("index", "parts", "rows"), EVEN, ids=str)
def test_positions_that_are_evenly_apart_are_one_part(table: Any, index: Any, parts: int, rows: int) -> None:
    found = planned(table, "w", index, 0)
    assert len(found.parts) == parts
    assert sum(len(range(*part[0])) for part in found.parts) == rows
    with safe_open(table) as file:
        whole, cut = file.get_tensor("w").clone(), file.get_slice("w")[index]
    assert raw(cut) == raw(whole[index])


def test_two_lists_that_are_evenly_apart_are_read_exactly(table: Any) -> None:
    index = ([10, 20, 30, 40], [3, 5, 7, 9])
    [part] = planned(table, "w", index, 0).parts
    assert [list(range(*one)) for one in part] == [list(one) for one in index]
    with safe_open(table) as file:
        whole, cut = file.get_tensor("w").clone(), file.get_slice("w")[index]
        assert raw(cut) == raw(whole[index])
        assert file._checkpoint.last_report.nbytes == 16 * 4


def test_of_very_many_positions_near_ones_are_read_as_one(table: Any) -> None:
    """As many bytes as one by one: what lies between them is read in either case."""
    chosen = sorted(random.Random(5).sample(range(COLUMNS), 300))
    index = (slice(None), chosen)
    assert len(planned(table, "w", index, 0).parts) > 150
    assert len(planned(table, "w", index, 4096).parts) == 1
    few = (slice(0, 20), chosen)
    assert len(planned(table, "w", few, 4096).parts) > 150
    with safe_open(table, options={"io": "buffered"}) as file:
        cut = file.get_slice("w")[index]
        report = file._checkpoint.last_report
        begin = file._checkpoint["w"].offsets[0]
    assert raw(cut) == np.ascontiguousarray(elements(table)[:, chosen]).tobytes()
    first, last = begin + 4 * chosen[0], begin + 4 * ((ROWS - 1) * COLUMNS + chosen[-1] + 1)
    assert report.routes["buffered"]["bytes"] == last - first


def elements(table: Any) -> np.ndarray:
    return np.frombuffer(Oracle(table)["w"], np.uint32).reshape(ROWS, COLUMNS)


def test_positions_that_are_far_apart_stay_apart(table: Any) -> None:
    chosen = sorted({0, 5, *range(100, 300, 3), 301, *range(600, 700, 2)})
    index = (slice(None), chosen)
    found = planned(table, "w", index, 90)
    ranges = [range(*part[1]) for part in found.parts]
    assert [one[0] for one in ranges] == [0, 100, 600]
    assert [one[-1] for one in ranges] == [5, 301, 698]
    with safe_open(table, options={"gap": 4 * 90}) as file:
        assert raw(file.get_slice("w")[index]) == np.ascontiguousarray(elements(table)[:, chosen]).tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_near_positions_change_no_values(table: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With the limits of what is many at nothing, so that every list is closed up."""
    monkeypatch.setattr("penstock._indexing._MANY_RANGES", 0)
    draw = random.Random(seed)
    with safe_open(table) as file:
        whole = file.get_tensor("deep").clone()
        for gap in (0, 300, 20_000):
            other = safe_open(table, options={"gap": gap})
            for _ in range(20):
                index: list[Any] = [slice(None), slice(None), slice(None)]
                for axis in draw.sample(range(3), draw.randint(1, 2)):
                    size = draw.randint(1, 9)
                    index[axis] = [draw.randrange(whole.shape[axis]) for _ in range(size)]
                if sum(isinstance(part, list) for part in index) == 2:
                    lists = [part for part in index if isinstance(part, list)]
                    short = min(map(len, lists))
                    index = [part[:short] if isinstance(part, list) else part for part in index]
                assert raw(other.get_slice("deep")[tuple(index)].clone()) == raw(whole[tuple(index)].clone()), index
            mask = torch.tensor([draw.random() < 0.3 for _ in range(50)])
            assert raw(other.get_slice("deep")[:, mask].clone()) == raw(whole[:, mask].clone())
