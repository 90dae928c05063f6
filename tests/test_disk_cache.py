"""The disk cache: loads that take from it what was received before, in every way of loading, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakegpu
import numpy as np
import ordeal
import penstock
import pytest
from disk_caches import MIB, Asked, blocks, files, finished, settings, states, there, wants_server
from disk_caches import serving as serving
from penstock.bench.served import Served

pytestmark = wants_server

TENSORS, LENGTH = 12, 2 * MIB + 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 MiB in 12 tensors, none of which ends with a block. Not to be written to."""
    return ordeal.write(tmp_path_factory.mktemp("cached") / "model.safetensors", TENSORS, LENGTH)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with serving(model.parent) as served:
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def opened(served: Served, model: Path, folder: Path, **more: Any) -> penstock.Checkpoint:
    return penstock.open(served.urls([model])[0], storage=settings(folder, **more))


def load(checkpoint: penstock.Checkpoint, **more: Any) -> tuple[dict[str, Any], Any]:
    """The tensors, and the report, when the work of the cache has ended."""
    tensors = checkpoint.load(framework="np", progress=False, **more)
    finished(checkpoint.last_report)
    return tensors, checkpoint.last_report


# The same bytes again


def test_the_second_start_asks_for_the_version_and_maps_the_files_of_the_cache(served, model, folder):
    size = model.stat().st_size
    with Asked(served) as first:
        tensors, report = load(opened(served, model, folder))
    ordeal.same(tensors, model)
    assert size <= first.bytes <= 1.01 * size
    cache = report.disk_cache
    assert (cache.state, cache.reason, cache.cached_bytes, cache.dropped_bytes) == ("finished", "", 0, 0)
    assert (cache.network_bytes, cache.written_bytes) == (size, size)
    assert 0 < cache.cpu_seconds < cache.seconds
    [map_file] = files(folder, ".map")
    assert states(map_file) == {"synced": -(-size // MIB)}
    assert files(folder, ".data")[0].read_bytes() == model.read_bytes()

    with Asked(served) as second:
        tensors, report = load(opened(served, model, folder))
    ordeal.same(tensors, model)
    assert (second.requests, second.bytes) == (1, 1)
    cache = report.disk_cache
    assert cache.network_bytes == cache.written_bytes == cache.fetched_again_bytes == 0
    assert cache.cached_bytes >= report.nbytes
    assert report.routes["mapped"]["bytes"] + report.routes["buffered"]["bytes"] >= report.nbytes
    assert "from it, 0 B from servers, 0 B written" in str(report)


def test_the_rest_of_a_file_that_slices_left_in_part_comes_from_the_server(served, model, folder):
    size = model.stat().st_size
    names = [f"model.{number}" for number in range(0, TENSORS, 2)]
    rows = {name: np.s_[: LENGTH // 2] for name in names}
    found, _ = load(opened(served, model, folder), names=names, slices=rows)
    whole = ordeal.contents(model)
    ordeal.same(found, {name: whole[name][: LENGTH // 2] for name in names})
    [map_file] = files(folder, ".map")
    has = len(blocks(map_file)) * MIB
    assert 0.25 * size < has < 0.75 * size
    with Asked(served) as asked:
        tensors, report = load(opened(served, model, folder))
    ordeal.same(tensors, model)
    missing = size - has
    assert missing <= asked.bytes <= 1.01 * missing
    assert report.disk_cache.network_bytes == missing
    assert report.disk_cache.cached_bytes >= has
    assert 0 < report.routes["disk_cache"]["bytes"] <= has
    with Asked(served) as asked:
        ordeal.same(load(opened(served, model, folder))[0], model)
    assert asked.bytes <= 1


def into(checkpoint: penstock.Checkpoint) -> dict[str, Any]:
    tensors = {name: np.zeros(checkpoint[name].shape, "uint8") for name in checkpoint}
    checkpoint.load_into(tensors, progress=False)
    return tensors


def streamed(checkpoint: penstock.Checkpoint) -> dict[str, Any]:
    # Kept tensors of a stream stay valid
    return dict(checkpoint.stream(framework="np"))


def loaded(checkpoint: penstock.Checkpoint) -> dict[str, Any]:
    return checkpoint.load(framework="np", progress=False)


def little_memory(checkpoint: penstock.Checkpoint) -> dict[str, Any]:
    return checkpoint.load(framework="np", progress=False, options={"staging": 16 * MIB})


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("way", [loaded, into, streamed, little_memory])
def test_every_way_of_loading_fills_the_cache_and_takes_from_it(served, model, folder, way, verify):
    """With little memory a load has few blocks for the writer, so that some are dropped and fetched again."""
    size = model.stat().st_size
    for most in (1.01 * size, 1):
        with Asked(served) as asked:
            checkpoint = opened(served, model, folder, disk_cache_verify=verify)
            ordeal.same(way(checkpoint), model)
            cache = finished(checkpoint.last_report)
        assert cache.fetched_again_bytes == cache.dropped_bytes
        assert cache.dropped_bytes == 0 or way is little_memory
        assert asked.bytes <= most + cache.fetched_again_bytes
    assert there(folder) >= size


def test_tensors_that_are_asked_for_one_at_a_time(served, model, folder):
    size = model.stat().st_size
    for most in (1.05 * size, 1):
        with Asked(served) as asked, penstock.safe_open(
            served.urls([model])[0], framework="np", storage=settings(folder)
        ) as file:  # fmt: skip
            ordeal.same({name: file.get_tensor(name) for name in file.keys()}, model)  # noqa: SIM118
        assert asked.bytes <= most


@pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)
def test_onto_a_gpu(served, model, folder, monkeypatch):
    """Each block goes through a slab: from the server, and from the cache."""
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    whole, size, options = ordeal.contents(model), model.stat().st_size, {"staging": 32 * MIB, "extent": MIB}
    with fakegpu.fresh() as fake, fakegpu.torch_on(fake, monkeypatch):
        for most in (1.01 * size, 1):
            with Asked(served) as asked:
                checkpoint = opened(served, model, folder)
                tensors = checkpoint.load("cuda:0", framework="pt", options=options)
                for name, tensor in tensors.items():
                    assert fake.read(tensor.data_ptr(), tensor.nbytes) == whole[name], name
                report = checkpoint.last_report
                cache = finished(report)
                del tensors, tensor
            assert report is not None and 0 < report.peak_staging <= options["staging"]
            assert asked.bytes <= most + cache.fetched_again_bytes


RANKS = """
checkpoint = penstock.open(url, storage=storage)
found = checkpoint.load(slices=lambda info: of(info.shape[0]), group=group)
said["tensors"] = same(found, lambda info: of(info.shape[0]))
report = checkpoint.last_report
said["finished"] = report.disk_cache.wait(60)
said["received"] = report.network["received_bytes"] if report.network else 0
said["again"] = report.disk_cache.fetched_again_bytes
said["cached"] = report.disk_cache.cached_bytes
"""


@pytest.mark.parametrize("exchange", [True, False])
def test_ranks_receive_each_byte_once_together(together, served, model, folder, exchange):
    size, [url] = model.stat().st_size, served.urls([model])
    program = RANKS.replace("url", repr(url)).replace("=storage", f"={settings(folder)!r}")
    program = program if exchange else program.replace(", group=group", "")
    for most in (1.05 * size, 8):
        with Asked(served) as asked, together(program, 2, model) as started:
            said = started.all()
        assert [one["tensors"] for one in said] == [TENSORS] * 2 and all(one["finished"] for one in said)
        assert asked.bytes <= most + sum(one["again"] for one in said), said


# Small files, listings, other versions
