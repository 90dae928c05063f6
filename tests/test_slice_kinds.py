"""Every kind of object as an index of a numpy slice: what numpy makes of it, by numpy itself."""

from __future__ import annotations

import array
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from penstock import safe_open
from penstock.synthetic.synth import Tensor

SHAPE = (5, 4, 3)


class Indexed:
    """Has `__index__` and nothing else."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __index__(self) -> int:
        return self.at

    def __repr__(self) -> str:
        return f"Indexed({self.at})"


class Arrayed:
    """Has `__array__` and a shape, and maybe `__index__`, as tensors of other frameworks do."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)
        self.shape = self.values.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values if dtype is None else self.values.astype(dtype)

    def __index__(self) -> int:
        return int(self.values.item())

    def __repr__(self) -> str:
        return f"Arrayed({self.values.tolist()})"


class Sequenced:
    """A sequence that is no list."""

    def __init__(self, *values: int) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: int) -> int:
        return self.values[at]

    def __repr__(self) -> str:
        return f"Sequenced{self.values}"


KINDS: list[Any] = [
    2,
    -1,
    True,
    False,
    None,
    ...,
    slice(1, 3),
    slice(None, None, -2),
    slice(np.int64(0), torch.tensor(2)),
    np.int64(2),
    np.uint8(1),
    np.bool_(True),
    np.array(2),
    np.array([2]),
    np.array([[2]]),
    np.array([[[1]]]),
    np.array([2, 0]),
    np.array([1], np.uint8),
    np.array([1], np.uint64),
    np.array([1], ">i4"),
    np.array([1], object),
    np.array(1.0),
    np.array([1.0]),
    np.array([], int),
    np.array([], float),
    np.array(True),
    np.array([True]),
    np.array([True, False, True]),
    np.array([True, False, True, False]),
    np.array([True, False, True, False, True]),
    np.ma.masked_array([1, 2], [False, True]),
    torch.tensor(2),
    torch.tensor([2]),
    torch.tensor([[2]]),
    torch.tensor([2, 0]),
    torch.tensor([1], dtype=torch.uint8),
    torch.tensor(1, dtype=torch.uint8),
    torch.tensor([1], dtype=torch.int32),
    torch.tensor([1.0]),
    torch.tensor(1.0),
    torch.tensor(True),
    torch.tensor([True]),
    torch.tensor([True, False, True, False, True]),
    torch.tensor([], dtype=torch.long),
    torch.tensor([]),
    [2],
    [[2]],
    [2, 0],
    [],
    [[]],
    [True],
    [True, False, True],
    [1, True],
    [1.0],
    ["1"],
    [np.int64(2)],
    [np.array(2)],
    [np.array([2])],
    [torch.tensor(2)],
    [torch.tensor([2])],
    [Indexed(2)],
    [slice(0, 1)],
    [None],
    [...],
    (2,),
    ([2],),
    ((2, 0),),
    ((2,),),
    range(2),
    range(1),
    array.array("q", [2]),
    memoryview(b"\x01"),
    b"\x01",
    "1",
    1.0,
    2j,
    {1},
    {1: 2},
    object(),
    Indexed(2),
    Indexed(9),
    Arrayed(2),
    Arrayed([2]),
    Arrayed([[2]]),
    Arrayed([2, 0]),
    Arrayed([True, False, True, False, True]),
    Sequenced(2),
    Sequenced(2, 0),
    9,
    np.array([9]),
    torch.tensor([9]),
    torch.tensor([-6]),
]

PAIRED = [1, None, ..., slice(1, 3), np.array([1]), torch.tensor([1]), [0, 1], True, Arrayed([1]), Indexed(1)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from penstock.synthetic import synth

    return synth.write_file(tmp_path_factory.mktemp("kinds") / "x.safetensors", [Tensor("x", "I32", SHAPE)])


def outcome(thing: Any, index: Any) -> Any:
    try:
        found = thing[index]
    except Exception as error:
        return next(kind.__name__ for kind in (IndexError, TypeError, ValueError, Exception) if isinstance(error, kind))
    return np.asarray(found).shape, np.asarray(found).tobytes()


@pytest.mark.filterwarnings("ignore")
def test_an_index_of_any_kind_is_what_numpy_makes_of_it(three: Any):
    with safe_open(three, "np") as file:
        whole, part = file.get_tensor("x").copy(), file.get_slice("x")
        wrong = []
        for index in KINDS:
            theirs, ours = outcome(whole, index), outcome(part, index)
            if theirs != ours:
                wrong.append((index, *(made[0] if isinstance(made, tuple) else made for made in (ours, theirs))))
        assert not wrong


@pytest.mark.filterwarnings("ignore")
def test_two_kinds_in_one_index_are_what_numpy_makes_of_them(three: Any):
    with safe_open(three, "np") as file:
        whole, part = file.get_tensor("x").copy(), file.get_slice("x")
        wrong = []
        for first, second in [*product(KINDS, PAIRED), *product(PAIRED, KINDS)]:
            index = first, second
            theirs, ours = outcome(whole, index), outcome(part, index)
            if theirs != ours:
                wrong.append((index, *(made[0] if isinstance(made, tuple) else made for made in (ours, theirs))))
        assert not wrong
