"""Casts on the way into memory of another dtype, beside torch's own ``.to()``, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
import torch
from penstock import _core
from penstock.synthetic.synth import Tensor

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers: a NaN is not equal to itself."""
    return tensor.view(INTEGERS[tensor.element_size()])


def doubles() -> torch.Tensor:
    """What is hard to round in F64: values of the other types, what lies between two of them, and next to that."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    kinds = [halves.view(dtype).double() for dtype in (torch.float16, torch.bfloat16)]
    # A bit below the last one of each type, up to two places further, and one of F64 beside those
    between = [kind + torch.ldexp(kind.abs(), torch.tensor(-places)) for kind in kinds for places in range(8, 28)]
    edges = torch.tensor(
        [65504, 65519.99, 65520, 65536, 2.0**128, 3.4028235677973366e38, 2.0**-24, 2.0**-25, 2.0**-149]
    )
    noise = torch.from_numpy(np.random.default_rng(1).integers(-(2**63), 2**63, 1 << 18)).view(torch.float64)
    found = torch.cat([*kinds, *between, edges.double(), -edges.double(), noise])
    below, above = (torch.nextafter(found, torch.tensor(end, dtype=torch.float64)) for end in (-np.inf, np.inf))
    return torch.cat([found, below, above])


def source_of(dtype: str) -> torch.Tensor:
    """Elements of a dtype: every one of two bytes, and of the longer ones those that are hard to round."""
    if dtype in ("F16", "BF16"):
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    return doubles().to(DTYPES[dtype])


def file_of(path: Path, dtype: str, elements: torch.Tensor) -> Path:
    """A file of one tensor ``a``, whose data begin at a multiple of 8."""
    entry = f'{{"a":{{"dtype":"{dtype}","shape":[{elements.numel()}],"data_offsets":[0,{elements.nbytes}]}}}}'
    header = entry.ljust(-(-len(entry) // 8) * 8).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bits(elements).numpy().tobytes())
    return path


def cast(path: Path, to: torch.Tensor, dtype: str, dims: list[tuple[int, int]] | None = None) -> dict[str, Any]:
    span = to.nbytes if dims is None else sum((n - 1) * step for n, step in dims) + to.element_size()
    load = _core.Load.start(
        penstock.open(path)._core,
        _core.Options(),
        wants=[0],
        into=[(to.data_ptr(), span)],
        strides=None if dims is None else [(0, dims)],
        casts=[(0, dtype)],
        keep=to,
    )
    try:
        load.wait()
        return load.report()
    finally:
        load.close()


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit, except NaN: torch gives some of them other bits in vectors of a tensor than at its end."""
    nan = theirs.isnan()
    return bool(nan.equal(ours.isnan()) and bits(ours)[~nan].equal(bits(theirs)[~nan]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("source", "target"), list(permutations(DTYPES, 2)))
def test_every_cast_is_that_of_torch(tmp_path: Path, source: str, target: str) -> None:
    elements = source_of(source)
    path = file_of(tmp_path / "model.safetensors", source, elements)
    expected = elements.to(DTYPES[target])
    to = torch.empty_like(expected)
    report = cast(path, to, target)
    assert same(to, expected)
    assert report["nbytes"] == elements.nbytes
    # Every second element: none is contiguous
    wide = torch.zeros(elements.numel(), 2, dtype=DTYPES[target])
    cast(path, wide, target, [(elements.numel(), 2 * wide.element_size())])
    assert same(wide[:, 0], expected)
    assert not bits(wide)[:, 1].any()


@pytest.mark.parametrize(("source", "target"), [("F32", "BF16"), ("F32", "F16"), ("F16", "F32"), ("BF16", "F32")])
def test_a_nan_keeps_its_sign_and_payload_except_in_bf16(tmp_path: Path, source: str, target: str) -> None:
    elements = source_of(source)
    elements = elements[elements.isnan()]
    path = file_of(tmp_path / "model.safetensors", source, elements)
    to = torch.empty(elements.numel(), dtype=DTYPES[target])
    cast(path, to, target)
    known = bits(elements).numpy().astype(np.int64)
    sign, quiet = known < 0, 1 << 22
    expected = {
        "F32 BF16": np.full_like(known, 0x7FC0),
        "F32 F16": (sign << 15) | 0x7E00 | (known >> 13 & 0x3FF),
        "F16 F32": (sign << 31) | 0x7F800000 | quiet | ((known & 0x3FF) << 13),
        "BF16 F32": (known & 0xFFFF) << 16,
    }[f"{source} {target}"]
    found = bits(to).numpy().astype(np.int64) & (0xFFFFFFFF if target == "F32" else 0xFFFF)
    assert (found == expected).all()


def test_a_matrix_is_transposed_and_cast_in_one_load(tmp_path: Path) -> None:
    rows, columns = 1000, 1300
    elements = torch.randn(rows * columns, generator=torch.Generator().manual_seed(1))
    path = file_of(tmp_path / "model.safetensors", "F32", elements)
    to = torch.zeros(columns, rows, dtype=torch.bfloat16)
    report = cast(path, to, "BF16", [(rows, 2), (columns, 2 * rows)])
    assert to.equal(elements.view(rows, columns).t().bfloat16())
    assert sum(route["bytes"] for route in report["routes"].values()) == elements.nbytes


def test_casts_that_the_core_does_not_make_are_refused(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(Tensor("a", "I64", (8,)))
    with pytest.raises(penstock.UnsupportedError, match="I64 is not cast to F32"):
        cast(path, torch.zeros(8), "F32")
    with pytest.raises(ValueError, match="no dtype"):
        cast(path, torch.zeros(8), "float32")
    misaligned = file_of(tmp_path / "a.safetensors", "F32", torch.zeros(8))
    content = misaligned.read_bytes()
    length = int.from_bytes(content[:8], "little") + 1
    misaligned.write_bytes(length.to_bytes(8, "little") + content[8 : 7 + length] + b" " + content[7 + length :])
    with pytest.raises(penstock.UnsupportedError, match=r"`a`.*misaligned"):
        cast(misaligned, torch.zeros(8, dtype=torch.bfloat16), "BF16")
