"""Slices of an open file beside those of the framework itself: values, and the bytes that were read for them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
import torch
from conftest import raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from penstock._indexing import plan
from penstock._numpy import indexing as numpy_indexing
from penstock._torch import indexing as torch_indexing
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor

SHAPES = [(), (1,), (7,), (0, 3), (6, 8), (1, 5), (3, 4, 5), (2, 3, 0), (2, 3, 4, 5)]
DTYPES = ["F32", "BF16", "U8", "I64", "BOOL"]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor of each shape and dtype."""
    tensors = [Tensor(f"{dtype} {shape}", dtype, shape) for shape, dtype in product(SHAPES, DTYPES)]
    return synth.write_file(tmp_path_factory.mktemp("shapes") / "shapes.safetensors", tensors)


def parts(size: int, sizes: tuple[int, ...], backwards: bool) -> st.SearchStrategy[Any]:
    """Parts of an index for a dimension of this size."""
    bound = st.none() | st.integers(-size - 2, size + 2)
    step = st.none() | (st.integers(-3, 3).filter(bool) if backwards else st.integers(1, 4))
    position = st.integers(-size - 1, size)  # sometimes one too far
    numbers = st.lists(st.integers(-size, size - 1), max_size=6) if size else st.just([])
    mask = st.lists(st.booleans(), min_size=size, max_size=size)
    kinds = [
        st.builds(slice, bound, bound, step),
        st.builds(slice, bound, bound, step),
        position,
        numbers,
        mask.map(lambda flags: torch.tensor(flags, dtype=torch.bool)),
        numbers.map(lambda found: torch.tensor(found, dtype=torch.long)),
        st.lists(numbers.filter(bool), min_size=1, max_size=1),
        st.none(),
        st.booleans(),
        st.integers(0, max(size - 1, 0)).map(np.int64),
    ]
    return st.one_of(kinds)


@st.composite
def indexed(draw: st.DrawFn, backwards: bool) -> tuple[tuple[int, ...], str, Any]:
    shape = draw(st.sampled_from(SHAPES))
    dtype = draw(st.sampled_from(DTYPES))
    count = draw(st.integers(0, len(shape) + (draw(st.integers(0, 9)) == 0)))
    index = [draw(parts((*shape, 3)[i], shape, backwards)) for i in range(count)]
    if draw(st.booleans()):
        index.insert(draw(st.integers(0, len(index))), Ellipsis)
    if len(index) == 1 and draw(st.booleans()):
        return shape, dtype, index[0]
    return shape, dtype, tuple(index)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without holes, also of what torch holds for contiguous (one element and a stride)."""
    return tensor.clone(memory_format=torch.contiguous_format)


def outcome(of: Any) -> Any:
    """A value, or the class of the error that came instead."""
    try:
        return of()
    except Exception as error:
        return type(error)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=indexed(backwards=True))
def test_torch_slices_are_those_of_the_whole_tensor(shapes: Path, case: tuple[tuple[int, ...], str, Any]):
    shape, dtype, index = case
    with penstock.safe_open(shapes, framework="pt") as file:
        whole = file.get_tensor(f"{dtype} {shape}").clone()
        expected, found = outcome(lambda: whole[index]), outcome(lambda: file.get_slice(f"{dtype} {shape}")[index])
    if isinstance(expected, type):
        assert isinstance(found, type) and issubclass(found, expected), index
        assert issubclass(found, penstock.SliceError), index
        return
    assert isinstance(found, torch.Tensor), (index, found)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), index
    assert raw(packed(found)) == raw(packed(expected)), index


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=indexed(backwards=True))
def test_numpy_slices_are_those_of_the_whole_array(shapes: Path, case: tuple[tuple[int, ...], str, Any]):
    shape, dtype, index = case
    if dtype == "BF16":
        dtype = "F32"

    def plain(part: Any) -> Any:
        return np.asarray(part) if isinstance(part, torch.Tensor) else part

    as_numpy = tuple(map(plain, index)) if isinstance(index, tuple) else plain(index)
    with penstock.safe_open(shapes, framework="np") as file:
        whole = file.get_tensor(f"{dtype} {shape}").copy()
        expected = outcome(lambda: whole[as_numpy])
        found = outcome(lambda: file.get_slice(f"{dtype} {shape}")[as_numpy])
    if isinstance(expected, type):
        assert isinstance(found, type) and issubclass(found, expected), index
        assert issubclass(found, penstock.SliceError), index
        return
    assert np.shape(found) == np.shape(expected), index
    assert np.array_equal(found, expected), index


ROWS = [
    (slice(2, 5), 3 * 8),
    (slice(None, None, 2), 3 * 8),
    (4, 8),
    ((slice(None), slice(2, 5)), 6 * 3),
    ((slice(None), slice(0, 8, 3)), 6 * 3),
    ((slice(1, 6, 2), slice(1, 8, 3)), 3 * 3),
    ([5, 0, 0], 2 * 8),
    ((slice(None), [7, 1]), 6 * 2),
    (([0, 1], [2, 3]), 2 * 2),
    # Of two scattered dimensions the second is read from its first to its last position
    (([0, 5], [0, 7]), 2 * 8),
    (torch.tensor([True, False, False, True, True, False]), 3 * 8),
    ((None, 0, None, slice(1)), 1),
    (slice(3, 3), 0),
]


@pytest.mark.parametrize(("index", "elements"), ROWS, ids=str)
def test_a_plan_has_the_elements_of_the_index_and_no_others(shapes: Path, index: Any, elements: int):
    info = penstock.open(shapes)["F32 (6, 8)"]
    for framework in (torch_indexing(info), numpy_indexing(info)):
        planned = plan(index, framework.shape, framework.arrays)
        assert planned is not None
        assert sum(np.prod([len(range(*axis)) for axis in part], dtype=int) for part in planned.parts) == elements


def test_pairs_of_four_bit_numbers_are_sliced_as_torch_has_them(write: Any):
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no F4")
    path = write(Tensor("w", "F4", (6, 16)))
    with penstock.safe_open(path) as file:
        whole = file.get_tensor("w").view(torch.uint8)
        assert whole.shape == (6, 8)
        for index in (
            slice(1, 3),
            (slice(None), slice(2, 5)),
            (..., 7),
            (slice(0, 6, 2), slice(None, None, 3)),
            [4, 1],
        ):
            assert torch.equal(file.get_slice("w")[index].view(torch.uint8), whole[index]), index
