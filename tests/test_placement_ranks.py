"""Tensor- and expert-parallel ranks get exactly their part of every tensor, and read no more than the plan says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pagecache
import penstock
import pytest
from models import INTO, MIB, ROUTES, Model, Way, accounted, flat
from planned_reads import PAGE, Range, reads, runs

Plan = Callable[[str, tuple[int, ...]], int | None]
SMALL = {"extent": 64 << 10, "staging": 8 * MIB}


def megatron(name: str, shape: tuple[int, ...]) -> int | None:
    """The dimension along which Megatron cuts a transformer's weights: None where every rank has the whole."""
    kind = name.split(".")[-2]
    if kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
        return 0
    return 1 if kind in ("o_proj", "down_proj") else None


def rows(name: str, shape: tuple[int, ...]) -> int | None:
    return 0 if shape else None


def columns(name: str, shape: tuple[int, ...]) -> int | None:
    return len(shape) - 1 if shape else None


def by_expert(name: str, shape: tuple[int, ...]) -> int | None:
    return 0 if len(shape) == 3 else None


def within_experts(name: str, shape: tuple[int, ...]) -> int | None:
    if len(shape) < 3:
        return None
    return 2 if "down_proj" in name else 1


def cut(shape: tuple[int, ...], dimension: int | None, rank: int, ranks: int) -> tuple[slice, ...] | None:
    if dimension is None:
        return None
    size = shape[dimension]
    return (slice(None),) * dimension + (slice(size * rank // ranks, size * (rank + 1) // ranks),)


def parts(model: Model, plan: Plan, rank: int, ranks: int) -> dict[str, tuple[slice, ...]]:
    """The `slices=` of one rank."""
    found = {}
    for name, entry in model.entries.items():
        part = cut(entry.shape, plan(name, entry.shape), rank, ranks)
        if part is not None:
            found[name] = part
    return found


def expected(model: Model, slices: dict[str, tuple[slice, ...]]) -> dict[str, np.ndarray]:
    whole = (slice(None),)
    return {
        name: np.ascontiguousarray(model.elements_of(name)[slices.get(name, whole)] if entry.shape else b"")
        for name, entry in model.entries.items()
    }


def check(model: Model, tensors: dict[str, Any], slices: dict[str, tuple[slice, ...]]) -> int:
    """Asserts that the tensors are what the slices ask for, and gives their bytes."""
    nbytes = 0
    wanted = expected(model, slices)
    assert list(tensors) == list(wanted)
    for name, part in wanted.items():
        assert tuple(tensors[name].shape) == part.shape, name
        assert np.array_equal(flat(tensors[name]), part.reshape(-1).view(np.uint8)), name
        nbytes += part.nbytes
    return nbytes


PLANS = [("llama", megatron), ("llama", rows), ("llama", columns), ("experts", by_expert), ("experts", within_experts)]


@pytest.fixture(params=PLANS, ids=lambda plan: f"{plan[0]}-{plan[1].__name__}")
def planned(request: pytest.FixtureRequest) -> tuple[Model, Plan]:
    return request.getfixturevalue(request.param[0]), request.param[1]


@pytest.mark.pairwise
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("way", ROUTES, ids=str)
def test_ranks_together_have_everything_once(planned: tuple[Model, Plan], way: Way, ranks: int) -> None:
    model, plan = planned
    model.near("half")
    checkpoint = penstock.open(model.source)
    alone, nbytes = 0, 0
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in model.entries}
    for rank in range(ranks):
        slices = parts(model, plan, rank, ranks)
        tensors = checkpoint.load(slices=slices, options=way.options, progress=False)
        size = check(model, tensors, slices)
        report = checkpoint.last_report
        accounted(report, size)
        nbytes += size
        for name, tensor in tensors.items():
            if name in slices:
                entry = model.entries[name]
                pieces[name].append(
                    flat(tensor).view(f"V{entry.nbytes // int(np.prod(entry.shape))}").reshape(tensor.shape)
                )
            elif rank == 0:
                alone += tensor.nbytes
    for name, found in pieces.items():
        if found:
            together = np.concatenate(found, axis=plan(name, model.entries[name].shape))
            assert np.array_equal(flat(together), model.bytes_of(name)), name
    assert nbytes == model.nbytes + (ranks - 1) * alone


@pytest.mark.parametrize("framework", ["pt", "np", "dlpack"])
def test_every_framework_gets_the_same_part(experts: Model, framework: str) -> None:
    checkpoint = penstock.open(experts.source)
    slices = parts(experts, within_experts, 1, 4)
    raw = {"dtype": "raw"} if framework == "np" else {}
    tensors = checkpoint.load(slices=slices, framework=framework, **raw)
    for name, part in expected(experts, slices).items():
        assert np.array_equal(flat(tensors[name]), part.reshape(-1).view(np.uint8)), name


def test_rectangles_that_are_cut_in_every_dimension(experts: Model) -> None:
    checkpoint = penstock.open(experts.source)

    def middle(info: penstock.TensorInfo) -> tuple[slice, ...]:
        return tuple(slice(size // 4, -(size // 3)) for size in info.shape)

    slices = {name: middle(checkpoint[name]) for name in checkpoint}
    for way in ROUTES:
        tensors = checkpoint.load(slices=middle, options=way.options, progress=False)
        accounted(checkpoint.last_report, check(experts, tensors, slices))


def test_slices_of_other_names_are_refused_and_only_the_wanted_names_come(experts: Model) -> None:
    checkpoint = penstock.open(experts.source)
    tensors = checkpoint.load(names="layers.3.*", slices={"layers.3.router": slice(2, 5)})
    assert set(tensors) == {name for name in experts.entries if name.startswith("layers.3.")}
    assert tensors["layers.3.router"].shape == (3, 256)
    with pytest.raises(ValueError, match=r"layers\.4\.router"):
        checkpoint.load(names="layers.3.*", slices={"layers.4.router": slice(2, 5)})


# Known plans: the reads as the documentation of `gap` and `extent` says, computed here from the header alone


def wanted_rows(model: Model, slices: dict[str, tuple[slice, ...]], file: Path) -> list[Range]:
    """Wanted byte ranges of a file, ascending."""
    found: list[Range] = []
    for name, entry in model.entries.items():
        if entry.file == file and entry.nbytes:
            size = entry.nbytes // int(np.prod(entry.shape))
            found += runs(entry.offset, entry.shape, size, slices.get(name, (slice(None),)))
    return sorted(found)


# A read that brings parts of many tensors into a slab is shorter, for room to move them apart: such plans are not here.
KNOWN = [(model, plan, gap) for model, plan in PLANS for gap in (0, 300)]
KNOWN += [(model, plan, 16 << 10) for model, plan in PLANS[3:]]


@pytest.mark.pairwise
@pytest.mark.parametrize(("model", "plan", "gap"), KNOWN)
@pytest.mark.parametrize("way", [way for way in INTO if way.io != "auto"], ids=str)
def test_known_plans_are_read_as_planned(
    request: pytest.FixtureRequest, model: Any, plan: Plan, way: Way, gap: int
) -> None:
    model = request.getfixturevalue(model)
    slices = parts(model, plan, 1, 4)
    direct = way.io != "buffered"
    into = {name: np.empty_like(part).view(np.uint16) for name, part in expected(model, slices).items()}
    import torch

    tensors = {name: torch.from_numpy(array).view(torch.bfloat16) for name, array in into.items()}
    planned_reads = [
        (first, past)
        for file in model.files
        for first, past in reads(
            wanted_rows(model, slices, file), file.stat().st_size, extent=SMALL["extent"], gap=gap, pages=direct
        )
    ]
    checkpoint = penstock.open(model.source)
    pagecache.put(model.files, "cold")
    before = pagecache.disk_bytes_of_process()
    report = checkpoint.load_into(tensors, slices=slices, options={**way.options, **SMALL, "gap": gap}, progress=False)
    from_disk = pagecache.disk_bytes_of_process() - before
    nbytes = check(model, tensors, slices)
    accounted(report, nbytes)
    route = report.routes["direct" if direct else "buffered"]
    assert route == {"bytes": sum(b - a for a, b in planned_reads), "extents": len(planned_reads)}
    if direct:
        # The last sector of a file is read whole
        assert route["bytes"] <= from_disk <= route["bytes"] + PAGE * len(model.files)
        assert pagecache.resident_bytes(model.files) == 0
    else:
        assert report.slack_bytes == 0
    assert report.peak_staging <= SMALL["staging"]
