"""Saves from a GPU to a bucket, on the fake driver and a double of S3: byte for byte, through bounded staging."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fakegpu
import numpy as np
import penstock
import pytest
from fakegpu import FakeGpu, fresh
from penstock.synthetic import synth
from penstock.synthetic.synth import Layout, Tensor
from s3_server import error, serving
from upload_server import Uploads, settings

pytestmark = pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)

MIB = 1 << 20
PLACE = "s3://bucket/models/one"
#: 43 MB in tensors of all kinds of sizes: several parts of 16 MiB, and parts that begin in the middle of a tensor
SIZES = (1, 255, 256, 4096, 33_000, 1_000_003, 5 * MIB + 1, 12 * MIB)


@pytest.fixture(params=["cuda", "hip"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"{request.param}:{fakegpu.LIBRARY}")
    with fresh(request.param) as fake:
        yield fake


@pytest.fixture
def bucket() -> Iterator[Uploads]:
    with serving(Uploads()) as found:
        yield found


@pytest.fixture
def source(tmp_path: Any) -> Any:
    tensors = tuple(Tensor(f"w{i}", "U8", (SIZES[i % len(SIZES)],)) for i in range(18))
    return synth.write(Layout("odd", (tensors,)), tmp_path / "source")


def on_gpu(fake: FakeGpu, source: Any) -> dict[str, Any]:
    return penstock.open(source).load("cuda:0" if fake.vendor == "cuda" else "rocm:0", framework="dlpack")


def same(bucket: Uploads, source: Any) -> None:
    found = penstock.open(f"{PLACE}/", storage=settings(bucket)).load(framework="np")
    expected = penstock.open(source).load(framework="np")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("most", [None, "12MB"])
def test_tensors_of_a_gpu_go_to_the_bucket_through_staging(
    fake: FakeGpu, bucket: Uploads, source: Any, most: str | None
) -> None:
    state = on_gpu(fake, source)
    limits = {"staging": 64 * MIB}
    report = penstock.save(state, PLACE, max_shard_size=most, options=limits, storage=settings(bucket))
    same(bucket, source)
    assert 0 < report.peak_staging <= 64 * MIB, "each request keeps a slab of one part"
    assert report.nbytes <= fake.counter("bytes_d2h") <= report.nbytes + 256 * len(state)
    assert report.writes >= report.file_bytes / (16 * MIB) and report.direct_bytes == 0
    assert not bucket.under_way


def test_a_part_keeps_its_slab_until_the_server_has_it(fake: FakeGpu, bucket: Uploads, source: Any) -> None:
    """Two slabs: no more than two requests are under way, however many there may be."""
    state = on_gpu(fake, source)
    bucket.delay = 0.05
    limits = {"staging": 32 * MIB, "extent": 16 * MIB}
    penstock.save(state, PLACE, options=limits, storage=settings(bucket))
    assert bucket.most_at_once == 2
    same(bucket, source)


def test_a_snapshot_of_a_gpu_lets_go_of_its_tensors(fake: FakeGpu, bucket: Uploads, source: Any) -> None:
    state = on_gpu(fake, source)
    held = bucket.hold_parts()
    job = penstock.save(state, PLACE, wait=False, snapshot=True, storage=settings(bucket))
    assert job.copied(60) and not job.done()
    assert job.progress[0] == 0 and not bucket.objects
    stream = fake.control("stream_create", 0, 1)
    for number, tensor in enumerate(state.values()):  # other values, in the tensors' own memory
        fake.control("launch_write", stream, tensor._view.address, SIZES[number % len(SIZES)], 0x55, 0)
    fake.control("stream_synchronize", stream, 0)
    fake.control("stream_destroy", stream)
    held.set()
    report = job.result()
    same(bucket, source)
    assert report.peak_staging > 0 and report.nbytes <= fake.counter("bytes_d2h")


def test_a_save_in_the_background_reads_the_gpu_until_it_is_copied(fake: FakeGpu, bucket: Uploads, source: Any) -> None:
    state = on_gpu(fake, source)
    held = bucket.hold_parts()
    with penstock.save(state, PLACE, wait=False, storage=settings(bucket)) as job:
        assert not job.copied(0.1) and not job.done()
        held.set()
        assert job.copied() and job.wait()
        assert job.result().fallbacks == []
    same(bucket, source)


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_failure_in_the_middle_leaves_nothing(fake: FakeGpu, bucket: Uploads, source: Any, snapshot: bool) -> None:
    state = on_gpu(fake, source)
    bucket.refuses = lambda method, key, query: (
        error(400, "InvalidRequest", "on purpose") if query.get("partNumber") == "2" else None
    )
    with pytest.raises(penstock.PenstockError, match="on purpose"):
        if snapshot:
            penstock.save(state, PLACE, wait=False, snapshot=True, storage=settings(bucket)).result()
        else:
            penstock.save(state, PLACE, storage=settings(bucket))
    assert not bucket.objects and not bucket.under_way


def test_a_copy_that_fails_leaves_nothing(fake: FakeGpu, bucket: Uploads, source: Any) -> None:
    state = on_gpu(fake, source)
    name = "cuMemcpyDtoHAsync_v2" if fake.vendor == "cuda" else "hipMemcpyDtoHAsync"
    for snapshot in (False, True):
        fake.configure(strict=0, fail=f"{name}:2:999")
        with pytest.raises(penstock.DeviceError):
            penstock.save(state, PLACE, wait=False, snapshot=snapshot, storage=settings(bucket)).result()
        assert not bucket.objects and not bucket.under_way
