"""Every byte arrives on every route, whatever the page cache holds, and every byte read is accounted for."""

from __future__ import annotations

import numpy as np
import pagecache
import penstock
import pytest
from models import EVERY_WAY, INTO, ROUTES, WAYS, Model, Way, accounted, flat


def extents(report: penstock.Report) -> dict[str, int]:
    return {name: route["extents"] for name, route in report.routes.items()}


@pytest.mark.pairwise
@pytest.mark.parametrize("state", pagecache.STATES)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_byte_arrives(llama: Model, way: Way, state: str) -> None:
    checkpoint = penstock.open(llama.source)
    pagecache.put(llama.files, state)
    tensors = checkpoint.load(options=way.options, progress=False)
    llama.same(tensors)
    report = checkpoint.last_report
    accounted(report, llama.nbytes)
    assert report.tensors == len(llama.entries)
    if way.io != "auto":
        route = way.io if way.io in ("mapped", "buffered") else "direct"
        assert {name for name, count in extents(report).items() if count} == {route}
    elif way.copy is False:
        assert not extents(report)["buffered"]
        assert not extents(report)["direct"]
    elif way.copy is True or (way.cache == "bypass" and state != "warm"):
        # Private memory: what is resident is copied, what is not comes as the page cache is to be left
        assert not extents(report)["mapped"]
        if way.cache == "bypass" and state != "warm":
            assert extents(report)["direct"]
            assert bool(extents(report)["buffered"]) == (state == "half")
        if way.cache == "keep" or state == "warm":
            assert not extents(report)["direct"]
    else:
        assert state != "warm" or extents(report)["mapped"]


@pytest.mark.parametrize("way", [way for way in EVERY_WAY if way.contradicts_itself], ids=str)
def test_options_that_contradict_each_other_are_refused(llama: Model, way: Way) -> None:
    with pytest.raises(ValueError, match=r"contradict|asks for mapped files"):
        penstock.open(llama.source).load(options=way.options)


@pytest.mark.pairwise
@pytest.mark.parametrize("state", pagecache.STATES)
@pytest.mark.parametrize("way", [w for w in WAYS if w.cache != "auto" or w.io not in ("auto", "direct")], ids=str)
def test_shapes_names_and_offsets_of_every_kind(odd: Model, way: Way, state: str) -> None:
    checkpoint = penstock.open(odd.source)
    odd.near(state)
    tensors = checkpoint.load(options=way.options, dtype="raw", framework="np", progress=False)
    odd.same(tensors)
    accounted(checkpoint.last_report, odd.nbytes)


@pytest.mark.pairwise
@pytest.mark.parametrize("way", INTO, ids=str)
@pytest.mark.parametrize("state", pagecache.STATES)
def test_existing_tensors_are_filled(llama: Model, way: Way, state: str) -> None:
    # Addresses that suit O_DIRECT, that suit only the elements, and a destination that is not contiguous
    into = {}
    for number, (name, entry) in enumerate(llama.entries.items()):
        room = np.full(entry.nbytes + 64, 0xEE, dtype=np.uint8)[2 * (number % 3) :][: entry.nbytes]
        into[name] = room.view(np.float16).reshape(entry.shape)
    name = next(name for name, entry in llama.entries.items() if len(entry.shape) == 2)
    into[name] = np.full(llama.entries[name].shape[::-1], np.nan, dtype=np.float16).T
    import torch

    tensors = {key: torch.from_numpy(array).view(torch.bfloat16) for key, array in into.items()}
    checkpoint = penstock.open(llama.source)
    llama.near(state)
    report = checkpoint.load_into(tensors, options=way.options, progress=False)
    llama.same({key: tensor.contiguous() for key, tensor in tensors.items()})
    accounted(report, llama.nbytes)
    assert report.copied_through == []


@pytest.mark.parametrize("way", ROUTES, ids=str)
@pytest.mark.parametrize("order", ["file", "layer"])
def test_streams_give_every_tensor_once(llama: Model, way: Way, order: str) -> None:
    checkpoint = penstock.open(llama.source)
    llama.near("half")
    largest = max(entry.nbytes for entry in llama.entries.values())
    found = {}
    for name, tensor in checkpoint.stream(order=order, window=largest, options=way.options):
        assert name not in found
        found[name] = tensor
        assert np.array_equal(flat(tensor), llama.bytes_of(name)), name
    # Nothing that came later has changed what came earlier
    llama.same({name: found[name] for name in llama.entries})
    accounted(checkpoint.last_report, llama.nbytes)
    if order == "layer":
        layers = [int(name.split(".")[2]) for name in found if name.startswith("model.layers.")]
        assert layers == sorted(layers)
    else:
        assert list(found) == list(llama.entries)


@pytest.mark.parametrize("way", ROUTES, ids=str)
def test_background_loads_give_the_same(llama: Model, way: Way) -> None:
    checkpoint = penstock.open(llama.source)
    llama.near("cold")
    with checkpoint.start(options=way.options) as first, checkpoint.start(options=way.options) as second:
        llama.same(first.result())
        llama.same(second.result())


@pytest.mark.parametrize("way", ROUTES, ids=str)
def test_safe_open_gives_the_same(llama: Model, way: Way) -> None:
    llama.near("cold")
    with penstock.safe_open(llama.files, framework="pt", options=way.options) as file:
        assert file.offset_keys() == list(llama.entries)
        llama.same({name: file.get_tensor(name) for name in file.offset_keys()})
        llama.same(dict(file.tensors()))
        llama.same({name: file.get_slice(name)[:] for name in file.offset_keys()})
    llama.same(penstock.load_file(llama.files, options=way.options))


@pytest.mark.pairwise
@pytest.mark.parametrize("extent", ["4KiB", "64KiB", "1MiB", "64MiB"])
@pytest.mark.parametrize("way", ROUTES, ids=str)
def test_reads_of_any_size_and_number(llama: Model, way: Way, extent: str) -> None:
    checkpoint = penstock.open(llama.source)
    llama.near("half")
    for depth in (1, 7):
        options = {**way.options, "extent": extent, "staging": "128MiB", "depth": depth, "threads": 3}
        tensors = checkpoint.load(options=options, progress=False)
        llama.same(tensors)
        accounted(checkpoint.last_report, llama.nbytes)
        del tensors
