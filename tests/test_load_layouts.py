"""Whole checkpoints with the layouts of public models, against safetensors' own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
import torch
from models import ROUTES, SPARSE, Model, Way, accounted, flat
from pagecache import near
from penstock.bench import reference

load_file = pytest.importorskip("safetensors.torch").load_file


@pytest.mark.parametrize(
    ("way", "state"),
    [
        (Way("auto", "auto", None), "warm"),
        (Way("auto", "keep", None), "cold"),
        (Way("auto", "bypass", None), "half"),
        (Way("direct", "auto", None), "cold"),
    ],
    ids=str,
)
def test_gpt2(gpt2: Path, way: Way, state: str) -> None:
    near([gpt2 / "model.safetensors"], state)
    checkpoint = penstock.open(gpt2)
    ours = checkpoint.load(options=way.options, progress=False)
    theirs = load_file(gpt2 / "model.safetensors")
    assert len(ours) == 160
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        # As integers: random bits are NaN now and then
        assert torch.equal(ours[name].view(torch.int32), tensor.view(torch.int32)), name
    accounted(checkpoint.last_report, 548_090_880)


def test_gpt2_into_a_module(gpt2: Path) -> None:
    """Tied weights and all: the output layer shares the embedding, as in the model."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = torch.nn.Embedding(50257, 768)
            self.head = torch.nn.Linear(768, 50257, bias=False)
            self.head.weight = self.wte.weight
            self.wpe = torch.nn.Embedding(1024, 768)

    module = Model()
    checkpoint = penstock.open(gpt2)
    report = checkpoint.load_into(module, names=["wte.weight", "wpe.weight"], progress=False)
    theirs = load_file(gpt2 / "model.safetensors")
    for name in ("wte.weight", "wpe.weight"):
        ours = dict(module.named_parameters())[name].detach()
        assert torch.equal(ours.view(torch.int32), theirs[name].view(torch.int32))
    assert module.head.weight is module.wte.weight
    accounted(report, theirs["wte.weight"].nbytes + theirs["wpe.weight"].nbytes)
    assert report.tensors == 2


@pytest.mark.sampled
@pytest.mark.parametrize("way", ROUTES, ids=str)
@pytest.mark.parametrize("state", ["warm", "cold"])
def test_a_mixture_of_9266_tensors_in_four_files(moe: Model, way: Way, state: str) -> None:
    assert len(moe.entries) == 9266
    assert len(moe.files) == 4
    checkpoint = penstock.open(moe.source)
    moe.near(state)
    ours = checkpoint.load(options=way.options, progress=False)
    accounted(checkpoint.last_report, moe.nbytes)
    theirs: dict[str, Any] = {}
    for path in moe.files:
        theirs |= load_file(path)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].view(torch.int16), tensor.view(torch.int16)), name


@pytest.mark.parametrize("order", ["file", "layer"])
def test_one_rank_of_a_mixture_streams_its_experts(moe: Model, order: str) -> None:
    checkpoint = penstock.open(moe.source)

    def mine(name: str) -> bool:
        return ".experts." not in name or int(name.split(".experts.")[1].split(".")[0]) % 4 == 1

    found = {}
    for name, tensor in checkpoint.stream(names=mine, order=order, window="1MiB"):
        assert np.array_equal(flat(tensor), moe.bytes_of(name)), name
        found[name] = tensor.nbytes
    assert set(found) == set(filter(mine, moe.entries))
    accounted(checkpoint.last_report, sum(found.values()))


@pytest.mark.parametrize("way", ROUTES, ids=str)
def test_offsets_beyond_4_gib(sparse: Path, way: Way) -> None:
    names = [tensor.name for tensor in SPARSE if not tensor.hole]
    entries = reference.entries_of(sparse)
    assert entries["across"].offset < 4 << 30 < entries["across"].offset + entries["across"].nbytes
    assert entries["last"].offset > 6 << 30
    checkpoint = penstock.open(sparse)
    assert checkpoint["last"].offsets == (entries["last"].offset, sparse.stat().st_size)
    near([sparse], "cold")
    tensors = checkpoint.load(names=names, options=way.options, progress=False)
    for name, tensor in tensors.items():
        assert np.array_equal(flat(tensor), reference.raw(entries[name])), name
    accounted(checkpoint.last_report, sum(entries[name].nbytes for name in names))
    # A column slice there, and rows of a hole that end where it does
    part = checkpoint.load(
        names=["beyond", "hole.1"],
        slices={"beyond": (slice(None), slice(100, 356)), "hole.1": slice((2 << 30) - 5000, None)},
        options=way.options,
        progress=False,
    )
    whole = reference.raw(entries["beyond"]).view(np.uint16).reshape(333, 1024)
    assert np.array_equal(flat(part["beyond"]).view(np.uint16).reshape(333, 256), whole[:, 100:356])
    assert part["hole.1"].shape == (5000,)
    assert not part["hole.1"].any()
