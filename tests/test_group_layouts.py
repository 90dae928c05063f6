"""Ranks in every layout of parallelism, with every dtype: each gets its part, equal to slicing the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import penstock
import pytest
from penstock.synthetic import synth
from penstock.synthetic.synth import BITS, Layout, Tensor
from ranks_together import Ranks


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards with every dtype and kind of tensor, and some that are longer than one parcel."""
    tensors = []
    for dtype, bits in BITS.items():
        # Columns of less than a byte are cut where bytes end
        columns = 64 if bits < 8 else 61
        tensors += [
            Tensor(f"{dtype}.norm", dtype, (32,)),
            Tensor(f"{dtype}.up", dtype, (37, 32)),
            Tensor(f"{dtype}.down", dtype, (24, columns)),
            Tensor(f"{dtype}.experts", dtype, (7, 5, 32)),
            Tensor(f"{dtype}.none", dtype, (0, 32)),
        ]
        tensors += [Tensor(f"{dtype}.scalar", dtype, ())] if bits >= 8 else []
    middle = len(tensors) // 2
    long = [
        Tensor("long.up", "BF16", (3001, 400)),
        Tensor("long.down", "F32", (400, 2050)),
        # Columns that are read where they lie, and columns that are read as rows
        Tensor("wide.down", "F32", (3, 1 << 18)),
        Tensor("experts", "I8", (16, 40, 1000)),
    ]
    layout = Layout("kinds", (tuple(tensors[:middle]), tuple(tensors[middle:] + long)), align=1)
    return synth.write(layout, tmp_path_factory.mktemp("kinds"))


#: What a rank wants: a function from what is known of a tensor to a cut, and a choice of names.
PROGRAM = """
import numpy as np
from penstock.bench import reference
from penstock.synthetic.synth import BITS

entries = reference.entries_of(path)
numbers = {name: number for number, name in enumerate(entries)}

def part(n, at, of):
    return slice(n * at // of, n * (at + 1) // of)

def tensor_parallel(at, of):
    def cut(info):
        if info.name.endswith("down"):
            return (slice(None), part(info.shape[1], at, of))
        return part(info.shape[0], at, of) if info.name.endswith("up") else None
    return cut

def expert_parallel(at, of):
    return lambda info: part(info.shape[0], at, of) if info.name.endswith("experts") else None

def both(first, second):
    return lambda info: first(info) or second(info)

def stage(at, of):
    return lambda name: part(len(numbers), at, of).start <= numbers[name] < part(len(numbers), at, of).stop

def odd(info):
    "Steps, ranges that overlap those of the next rank, and nothing at all."
    if len(info.shape) == 2 and info.dtype not in ("F4", "F6_E2M3", "F6_E3M2"):
        rows, columns = info.shape
        return (slice(min(rows, rank % 3), None, 2), slice(0, columns * (rank + 1) // size, 1 + rank % 2))
    return slice(0, 0) if info.shape and rank == 1 else None

half = max(1, size // 2)
LAYOUTS = {
    "tensor parallel": (tensor_parallel(rank, size), None),
    "expert parallel": (expert_parallel(rank, size), None),
    "pipeline": (None, stage(rank, size)),
    "replicas": (None, None),
    "tensor parallel x replicas": (tensor_parallel(rank % half, half), None),
    "pipeline x tensor parallel": (tensor_parallel(rank % half, half), stage(rank // half, 2)),
    "expert x tensor parallel": (both(expert_parallel(rank, size), tensor_parallel(rank % half, half)), None),
    "odd": (odd, None),
    "draft model on every second rank": (None, (lambda name: rank % 2 == 0 and "norm" in name)),
}

def expected(name, cut):
    "By numpy, from the bytes of the file."
    entry = entries[name]
    bits = BITS[entry.dtype]
    found = reference.raw(entry)
    if not entry.shape:
        return found
    if bits >= 8:
        found = found.view(f"V{bits // 8}").reshape(entry.shape)
    else:
        found = found.reshape(*entry.shape[:-1], entry.shape[-1] * bits // 8)
        if isinstance(cut, tuple) and len(cut) == len(entry.shape):
            last = cut[-1]
            cut = (*cut[:-1], slice(last.start * bits // 8, last.stop * bits // 8))
    found = found if cut is None else found[cut]
    return np.frombuffer(found.tobytes(), np.uint8)

checkpoint = penstock.open(path)
said["reads"] = {}
for layout, (slices, names) in LAYOUTS.items():
    for cache in ("keep", "bypass"):
        found = checkpoint.load(names=names, slices=slices, dtype="raw", group=group, options={"cache": cache})
        wanted = [name for name in entries if names is None or names(name)]
        assert sorted(found) == sorted(wanted), layout
        for name, tensor in found.items():
            cut = None if slices is None else slices(checkpoint[name])
            assert np.array_equal(tensor.numpy(), expected(name, cut)), (layout, cache, name)
        report = checkpoint.last_report
        own = [way["bytes"] for lane, way in report.routes.items() if lane not in ("rank", "neighbour")]
        read = sum(own) - report.slack_bytes - report.gap_bytes
        said["reads"].setdefault(layout, []).append(read)
typed = lambda name: not name.startswith("F6")
found = checkpoint.load(names=typed, slices=LAYOUTS["expert x tensor parallel"][0], group=group)
said["typed"] = len(found)
for name, tensor in found.items():
    cut = LAYOUTS["expert x tensor parallel"][0](checkpoint[name])
    flat = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    assert np.array_equal(flat.numpy(), expected(name, cut)), name
"""


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_rank_gets_its_part_in_every_layout(together: Callable[..., Ranks], every_kind: Path, size: int) -> None:
    checkpoint = penstock.open(every_kind)
    with together(PROGRAM, size, every_kind) as ranks:
        said = ranks.all()
    assert {one["typed"] for one in said} == {len([name for name in checkpoint if not name.startswith("F6")])}
    reads = {
        layout: [sum(one["reads"][layout][number] for one in said) for number in (0, 1)] for layout in said[0]["reads"]
    }
    # Short holes are read with what is around them
    some = [reads.pop("draft model on every second rank"), reads.pop("odd")]
    # Everything that anybody wants is read once, whatever the cut
    assert reads == dict.fromkeys(reads, [checkpoint.nbytes] * 2)
    assert all(0 < read < checkpoint.nbytes for both in some for read in both)
