"""`Checkpoint.load_into` a list of `Destination`: any part of a tensor to any place, any number of times."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
import torch
from conftest import all_are, raw, same
from penstock import Destination
from penstock.synthetic.synth import Tensor

Write = Callable[..., Path]


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits are the same, except those of NaN: torch's own code keeps others of them from CPU to CPU."""
    return same(torch.where(a.isnan(), 0, a), torch.where(b.isnan(), 0, b)) and a.isnan().equal(b.isnan())


def misaligned(checkpoint: penstock.Checkpoint, name: str) -> bool:
    """Whether an element of it may lie in two reads."""
    return (
        checkpoint[name].offsets[0] % torch.empty(0, dtype=penstock.torch_dtype(checkpoint[name].dtype)).element_size()
        != 0
    )


@pytest.fixture
def path(write: Write) -> Path:
    return write(
        Tensor("gate", "BF16", (64, 32)),
        Tensor("up", "BF16", (64, 32)),
        Tensor("qkv", "F32", (48, 16)),
        Tensor("scale", "F32", ()),
        Tensor("one", "F16", (1, 1)),
        Tensor("quant", "F8_E4M3", (16, 8)),
        Tensor("steps", "I64", (7,)),
        Tensor("hollow", "F32", (0, 4)),
        Tensor("wide", "F64", (5, 6)),
        Tensor("fp4", "F4", (8, 16)),
    )


def test_one_tensor_has_any_number_of_destinations_in_one_load(path: Path):
    checkpoint, eager = penstock.open(path), penstock.open(path).load(names=["gate", "up"])
    fused, again = torch.zeros(128, 32, dtype=torch.bfloat16), torch.zeros(3, 64, 32, dtype=torch.bfloat16)
    report = checkpoint.load_into(
        [
            Destination("gate", fused[:64]),
            Destination("up", fused[64:]),
            *(Destination("gate", again[i]) for i in range(3)),
        ]
    )
    assert same(fused, torch.cat([eager["gate"], eager["up"]]))
    assert all_are(again, eager["gate"])
    assert (report.tensors, report.copied_through, report.missing, report.unexpected) == (5, [], [], [])
    assert sum(way["bytes"] for way in report.routes.values()) < 3 * 64 * 32 * 2, "each byte is read once"


def test_cuts_axes_and_split_dimensions(path: Path):
    checkpoint, eager = penstock.open(path), penstock.open(path).load(names=["gate", "qkv"])
    part, turned = torch.zeros(16, 32, dtype=torch.bfloat16), torch.zeros(32, 16, dtype=torch.bfloat16)
    row, heads = torch.zeros(1, 32, 1, dtype=torch.bfloat16), torch.zeros(16, 3, 16)
    checkpoint.load_into(
        [
            Destination("gate", part, slice(16, 32)),
            Destination("gate", turned, (slice(0, 64, 4), ...), axes=(1, 0)),
            Destination("gate", row, slice(3, 4), axes=(None, 1, None)),
            # qkv.view(3, 16, 16).transpose(0, 1)
            Destination("qkv", heads.transpose(0, 1), axes=(0, 0, 1)),
        ]
    )
    assert same(part, eager["gate"][16:32])
    assert same(turned, eager["gate"][::4].t())
    assert same(row.flatten(), eager["gate"][3])
    assert same(heads, eager["qkv"].view(3, 16, 16).transpose(0, 1))


def test_arrays_of_numpy_take_parts_too_backwards_as_well(path: Path):
    checkpoint, eager = penstock.open(path), penstock.open(path).load(names=["qkv"])["qkv"].numpy()
    turned, backwards = np.zeros((16, 24), np.float32), np.zeros((48, 16), np.float32)
    report = checkpoint.load_into(
        [
            Destination("qkv", turned, slice(0, 24), axes=(1, 0)),
            Destination("qkv", backwards[::-1, ::-1]),
            Destination("hollow", np.zeros((0, 4), np.float32)),
        ]
    )
    assert turned.tobytes() == eager[:24].T.tobytes()
    assert backwards[::-1, ::-1].tobytes() == eager.tobytes()
    assert report.copied_through == ["qkv"]


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats_are_converted_as_torch_does(path: Path, kind: torch.dtype):
    checkpoint, names = penstock.open(path), ["gate", "qkv", "one", "wide", "scale"]
    eager = checkpoint.load(names=names)
    to = {name: torch.zeros(eager[name].shape, dtype=kind) for name in names}
    turned = torch.zeros(16, 24, dtype=kind)
    report = checkpoint.load_into(
        [
            *(Destination(name, to[name], cast=True) for name in names),
            Destination("qkv", turned, slice(24, 48), axes=(1, 0), cast=True),
        ]
    )
    for name in names:
        assert same_numbers(to[name], eager[name].to(kind)), name
    assert same_numbers(turned, eager["qkv"][24:].to(kind).t())
    assert set(report.copied_through) == {
        name for name in names if misaligned(checkpoint, name) and eager[name].dtype != kind
    }


def test_a_tensor_of_bytes_takes_any_dtype_of_eight_bits(path: Path):
    to, of_mapping = torch.zeros(16, 8, dtype=torch.uint8), torch.zeros(16, 8, dtype=torch.uint8)
    checkpoint = penstock.open(path)
    checkpoint.load_into([Destination("quant", to.t(), axes=(1, 0))])
    checkpoint.load_into({"quant": of_mapping}, strict=False)
    assert raw(to) == raw(of_mapping) == raw(checkpoint.load(names=["quant"])["quant"])


def test_one_element_may_go_to_many(path: Path):
    checkpoint = penstock.open(path)
    eager = checkpoint.load(names=["scale", "one", "gate"])
    many, cast, strided = torch.zeros(5, 3), torch.zeros(7), np.zeros((4, 4), np.float32)
    cell = torch.zeros(2, 2, dtype=torch.bfloat16)
    checkpoint.load_into(
        [
            Destination("scale", many),
            Destination("one", cast, cast=True),
            Destination("scale", strided[:, 1]),
            Destination("gate", cell, (slice(5, 6), slice(7, 8))),
        ]
    )
    assert all_are(many, eager["scale"])
    assert all_are(cast, eager["one"].float().reshape(()))
    assert strided[:, 1].tobytes() == 4 * raw(eager["scale"])
    assert not strided[:, 2].any()
    assert all_are(cell, eager["gate"][5:6, 7:8])


def test_halves_of_bytes_go_in_pairs(path: Path):
    checkpoint = penstock.open(path)
    to = torch.zeros(8, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    part = torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    checkpoint.load_into([Destination("fp4", to), Destination("fp4", part, (slice(2, 6), slice(8, 16)))])
    expected = checkpoint.load(names=["fp4"], dtype="raw")["fp4"]
    assert raw(to.view(torch.uint8)) == raw(expected)
    assert same(part.view(torch.uint8), expected.view(8, 8)[2:6, 4:8])


def test_every_problem_is_listed_before_a_byte_moves(path: Path):
    gate = torch.full((64, 32), 7.0, dtype=torch.bfloat16)
    shared = torch.zeros(64, 32, dtype=torch.bfloat16)
    wrong = {
        "shape [64, 32]": Destination("gate", torch.zeros(32, 64, dtype=torch.bfloat16)),
        "is BF16": Destination("gate", torch.zeros(64, 32)),
        "cast=True converts": Destination("quant", torch.zeros(16, 8), cast=True),
        "no such tensor|does not contain": Destination("gat", gate),
        "outside dimension": Destination("gate", gate, slice(60, 70)),
        "axes for a destination": Destination("gate", gate, axes=(0,)),
        "axes[1] is 2": Destination("gate", gate, axes=(0, 2)),
        "axes[1] is None": Destination("gate", gate, axes=(0, None)),
        "dimension 1 has 32 wanted": Destination("gate", gate[:, :16], axes=(0, 1)),
        "meta": Destination("up", torch.zeros(64, 32, dtype=torch.bfloat16, device="meta")),
        "last dimension": Destination(
            "fp4", torch.zeros(8, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).t(), axes=(1, 0)
        ),
        "overlaps": Destination("gate", shared),
    }
    with pytest.raises(penstock.MismatchError) as caught:
        penstock.open(path).load_into([*wrong.values(), Destination("up", shared)])
    problems = "\n".join(caught.value.problems)
    for text in wrong:
        assert any(part in problems for part in text.split("|")), (text, problems)
    assert caught.value.touched == []
    assert gate.eq(7).all()


def test_names_that_the_checkpoint_lacks_may_be_left_out(path: Path):
    to = torch.zeros(64, 32, dtype=torch.bfloat16)
    report = penstock.open(path).load_into([Destination("gate", to), Destination("nope", to)], strict=False)
    assert (report.missing, report.tensors) == (["nope"], 1)


def test_what_goes_with_names_does_not_go_with_destinations(path: Path):
    checkpoint = penstock.open(path)
    for more in ({"names": ["gate"]}, {"slices": {}}):
        with pytest.raises(penstock.InvalidError, match="list of destinations"):
            checkpoint.load_into([], **more)
    with pytest.raises(penstock.InvalidError, match="torch module"):
        checkpoint.load_into([("gate", torch.zeros(1))])
    with pytest.raises(penstock.InvalidError, match="not a torch tensor"):
        checkpoint.load_into([Destination("gate", [1])])
    with pytest.raises(TypeError, match="name"):
        Destination(3, torch.zeros(1))  # type: ignore[arg-type]


def test_nothing_is_loaded_into_no_destinations(path: Path):
    report = penstock.open(path).load_into([])
    assert (report.tensors, report.nbytes) == (0, 0)


def test_a_load_that_fails_says_which_destinations_were_overwritten(path: Path):
    checkpoint = penstock.open(path)
    first, last = torch.full((64, 32), 7.0, dtype=torch.bfloat16), torch.full((5, 6), 7.0, dtype=torch.float64)
    path.write_bytes(path.read_bytes()[: checkpoint["wide"].offsets[0] + 8])
    with pytest.raises(penstock.PenstockError) as caught:
        checkpoint.load_into([Destination("gate", first), Destination("wide", last)])
    assert first.ne(7).any() == ("gate" in caught.value.touched)
    assert last.ne(7).any() == ("wide" in caught.value.touched)


def test_a_destination_says_what_it_is():
    text = repr(Destination("gate", torch.zeros(2, 3), slice(0, 2), (0, 1), cast=True))
    assert text == "Destination('gate', torch.float32 of shape [2, 3], cut=slice(0, 2, None), axes=(0, 1), cast=True)"


@pytest.mark.parametrize("seed", range(8))
def test_random_parts_in_random_places(write: Write, seed: int):
    """Beside what torch copies: cuts with steps, permuted and divided dimensions, gaps between, and casts."""
    rng = random.Random(seed)
    kinds = {
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F16": torch.float16,
        "F64": torch.float64,
        "I16": torch.int16,
    }
    shapes = [tuple(rng.choice([1, 2, 3, 4, 6, 8, 24]) for _ in range(rng.randint(1, 4))) for _ in range(12)]
    tensors = [Tensor(f"t{i}", rng.choice(list(kinds)), shape) for i, shape in enumerate(shapes)]
    path = write(*tensors)
    checkpoint, eager = penstock.open(path), penstock.open(path).load()
    for _ in range(10):
        destinations, expected = [], []
        for _ in range(rng.randint(1, 40)):
            tensor = rng.choice(tensors)
            cut = []
            for n in tensor.shape:
                start = rng.randrange(n)
                cut.append(slice(start, rng.randint(start + 1, n), rng.choice([1, 1, 2, 3])))
            want = eager[tensor.name][tuple(cut)]
            # Divide dimensions, then put them in any order
            sizes, axes = [], []
            for d, n in enumerate(want.shape):
                factor = rng.choice([f for f in range(1, n + 1) if n % f == 0])
                parts = [factor, n // factor] if rng.random() < 0.4 else [n]
                sizes += parts
                axes += [d] * len(parts)
            order = list(range(len(sizes)))
            rng.shuffle(order)
            # Those of one dimension stay in their order: the first is the outermost
            by_axis = {a: iter([i for i in range(len(axes)) if axes[i] == a]) for a in axes}
            order = [next(by_axis[axes[i]]) for i in order]
            wanted = want.reshape(sizes).permute(order)
            cast = rng.random() < 0.5 and tensor.dtype != "I16"
            kind = rng.choice([k for k in kinds.values() if k != torch.int16]) if cast else kinds[tensor.dtype]
            gaps = [rng.choice([0, 0, 1]) for _ in wanted.shape]
            memory = torch.zeros([n + g for n, g in zip(wanted.shape, gaps, strict=True)], dtype=kind)
            memory.untyped_storage().fill_(0xEE)
            again = memory.clone()
            where = tuple(slice(0, n) for n in wanted.shape)
            if rng.random() < 0.5:  # in another order in memory
                turn = list(range(wanted.dim()))
                rng.shuffle(turn)
                memory = memory.permute(turn).contiguous().permute([turn.index(d) for d in range(wanted.dim())])
                again = memory.clone()
            destinations.append(Destination(tensor.name, memory[where], tuple(cut), [axes[i] for i in order], cast))
            again[where].copy_(wanted)
            expected.append((memory, again))
        options: dict[str, Any] = {"extent": rng.choice([4096, 1 << 22]), "gap": rng.choice([0, 16384])}
        report = checkpoint.load_into(destinations, options=options)
        assert all(misaligned(checkpoint, name) for name in report.copied_through)
        for destination, (found, wanted) in zip(destinations, expected, strict=True):
            if destination.cast:
                assert same_numbers(found, wanted), destination
            else:
                assert same(found, wanted), destination


def test_gaps_are_told_by_tensor(write: Write):
    """Half of each row of one tensor, every row of another, and a tensor between them that nobody wants."""
    path = write(Tensor("a", "BF16", (64, 32)), Tensor("between", "U8", (100,)), Tensor("b", "BF16", (8, 32)))
    left = torch.zeros(64, 16, dtype=torch.bfloat16)
    twice = [torch.zeros(64, 8, dtype=torch.bfloat16) for _ in range(2)]
    whole = torch.zeros(8, 32, dtype=torch.bfloat16)
    columns = (slice(None), slice(0, 16))
    checkpoint = penstock.open(path)
    report = checkpoint.load_into([Destination("a", left, columns), Destination("b", whole)])
    # Out of the page cache rows are read apart from what comes after them
    assert report.gaps in ({"a": 63 * 32}, {"a": 63 * 32 + 32 + 100})
    assert sum(report.gaps.values()) == report.gap_bytes
    report = checkpoint.load_into([Destination("a", to, (slice(None), slice(8, 16))) for to in twice])
    # What two want is read once, and out of the page cache for each
    assert report.gaps in ({"a": 63 * 48}, {"a": 2 * 63 * 48})
    assert checkpoint.load().keys() == {"a", "between", "b"}
    assert checkpoint.last_report is not None
    assert checkpoint.last_report.gaps == {}
