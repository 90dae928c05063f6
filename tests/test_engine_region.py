"""Views as boxes: what `box_of` says of a view is what torch's own strides say, element by element."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from penstock.integrations._region import Box, box_of, composed, dense


def places(box: Box, shape: tuple[int, ...]) -> dict[int, int]:
    """Where each element of the box goes: its offset at the destination, by its offset in the tensor."""
    strides = dense(shape)
    ranges = [range(*part) for part in box.cut]
    found, dims = {}, box.dims
    for at, position in enumerate(itertools.product(*ranges)):
        to, rest = 0, at
        for _, count, step in reversed(dims):
            rest, digit = divmod(rest, count)
            to += digit * step
        assert rest == 0
        found[sum(i * stride for i, stride in zip(position, strides, strict=True))] = to
    return found


def elements(view: torch.Tensor, to: torch.Tensor) -> dict[int, int]:
    """The same by torch: both are views of tensors that hold their own offsets."""
    return dict(zip(view.flatten().tolist(), to.flatten().tolist(), strict=True))


def steps_of(view: torch.Tensor, to: torch.Tensor) -> list[tuple[int, int, int]]:
    return [(n, a, b) for n, a, b in zip(view.shape, view.stride(), to.stride(), strict=True) if n > 1]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def factors(n: int, rng: random.Random) -> list[int]:
    """Numbers whose product is ``n``."""
    found = []
    while n > 1 and rng.random() < 0.6:
        one = rng.choice([d for d in range(2, n + 1) if n % d == 0])
        found.append(one)
        n //= one
    return [*found, n]


def changed(view: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """A view of a view."""
    d = rng.randrange(view.dim()) if view.dim() else 0
    kind = rng.randrange(9) if view.dim() else 8
    n = view.shape[d] if view.dim() else 1
    if kind == 0:
        start = rng.randrange(n)
        return view.narrow(d, start, rng.randint(1, n - start))
    if kind == 1:
        return rng.choice(view.chunk(rng.randint(1, 4), d))
    if kind == 2:
        return view.transpose(d, rng.randrange(view.dim()))
    if kind == 3:
        return view.permute(rng.sample(range(view.dim()), view.dim()))
    if kind == 4:
        return view.select(d, rng.randrange(n))
    if kind == 5:
        index = [slice(None)] * view.dim()
        index[d] = slice(rng.randrange(n), None, rng.randint(1, 3))
        return view[tuple(index)]
    if kind == 6:
        return view.unflatten(d, factors(n, rng))
    if kind == 7:
        parts = [part for n in view.shape for part in factors(n, rng)]
        joined = view.reshape(parts).flatten(0, 1) if len(parts) > 1 else view
        # What cannot be a view is a copy
        return joined if joined.untyped_storage().data_ptr() == view.untyped_storage().data_ptr() else view
    return view.unsqueeze(rng.randint(0, view.dim()))


@pytest.mark.parametrize("seed", range(20))
def test_random_views_are_the_boxes_that_torch_says(seed: int):
    rng, boxes = random.Random(seed), 0
    for _ in range(250):
        shape = tuple(rng.choice([1, 2, 3, 4, 6, 8, 12]) for _ in range(rng.randint(1, 4)))
        view = numbered(shape)
        for _ in range(rng.randint(0, 8)):
            view = changed(view, rng)
        # The destination lies in any order in memory
        order = rng.sample(range(view.dim()), view.dim())
        to = numbered(tuple(view.shape[d] for d in order)).permute([order.index(d) for d in range(view.dim())])
        box = box_of(shape, steps_of(view, to), view.storage_offset())
        if box is not None:
            boxes += 1
            assert places(box, shape) == elements(view, to), (shape, view.shape, view.stride())
    assert boxes > 200, boxes


@pytest.mark.parametrize("seed", range(10))
def test_boxes_of_copies_are_boxes_of_what_was_copied(seed: int):
    rng, boxes = random.Random(1000 + seed), 0
    for _ in range(200):
        shape = tuple(rng.choice([1, 2, 3, 4, 6, 8]) for _ in range(rng.randint(1, 4)))
        view = numbered(shape)
        for _ in range(rng.randint(0, 4)):
            view = changed(view, rng)
        copy = numbered(tuple(view.shape))
        again = copy
        for _ in range(rng.randint(0, 4)):
            again = changed(again, rng)
        to = numbered(tuple(again.shape))
        box = box_of(tuple(copy.shape), steps_of(again, to), again.storage_offset())
        if box is None:
            continue
        steps, offset = composed(box, view.stride(), view.storage_offset())
        whole = box_of(shape, steps, offset)
        if whole is None:
            continue
        boxes += 1
        original = view.flatten()  # the copy's elements, by their offsets in it
        expected = {int(original[at]): to for at, to in elements(again, to).items()}
        assert places(whole, shape) == expected
    assert boxes > 100, boxes


@pytest.mark.parametrize(
    ("shape", "steps", "offset"),
    [
        ((4, 8), [(5, 1, 1)], 6),  # it goes on in the next row, which it does not fill
        ((4, 8), [(3, 0, 1)], 0),  # an element several times
        ((4, 8), [(3, 11, 1)], 0),  # along a diagonal
        ((4, 8), [(2, 32, 1)], 0),  # behind the tensor
        ((4, 8), [(1, 1, 1)], 40),
        ((4, 8), [(2, 16, 2), (2, 1, 1)], 31),
        ((6,), [(2, 3, 2), (2, 1, 1)], 0),  # two of each three
    ],
)
def test_what_is_no_box_is_none(shape: tuple[int, ...], steps: list[tuple[int, int, int]], offset: int):
    assert box_of(shape, steps, offset) is None


def test_split_and_joined_dimensions_are_boxes():
    # 8 x 16 as 2 x 4 x 16, the first two exchanged
    assert box_of((8, 16), [(4, 16, 32), (2, 64, 16), (16, 1, 1)], 0) == Box(
        ((0, 8, 1), (0, 16, 1)), [(0, 2, 16), (0, 4, 32), (1, 16, 1)]
    )
    # All of it in a row
    assert box_of((8, 16), [(128, 1, 1)], 0) == Box(((0, 8, 1), (0, 16, 1)), [(0, 8, 16), (1, 16, 1)])
