"""Saves from a GPU, on the fake driver: byte for byte, in about as few copies as the load took, nothing left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fakegpu
import penstock
import pytest
from fakegpu import FakeGpu, fresh
from penstock.bench import reference
from penstock.synthetic import synth
from penstock.synthetic.synth import Layout, Tensor
from s3_server import serving
from test_uploads import PLACE, settings
from upload_server import Uploads

pytestmark = pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)

MIB = 1 << 20


@pytest.fixture(params=["cuda", "hip"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"{request.param}:{fakegpu.LIBRARY}")
    with fresh(request.param) as fake:
        yield fake


def odd() -> Layout:
    """Sizes of all kinds, which the device's memory has at multiples of 256 bytes."""
    sizes = (1, 255, 256, 257, 4096, 33_000, 1_000_003, 5 * MIB + 1)
    return Layout("odd", (tuple(Tensor(f"w{i}", "U8", (sizes[i % len(sizes)],)) for i in range(64)),))


LAYOUTS = {
    "experts": lambda: synth.qwen3_moe(30e6),
    "tiny": lambda: synth.many_tensors(2, 24, 2),
    "odd": odd,
}


def content_of(folder: Path) -> dict[str, bytes]:
    return {name: reference.raw(entry).tobytes() for name, entry in reference.entries_of(folder).items()}


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["aligned", "compact"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_save_takes_about_as_few_copies_as_the_load(fake: FakeGpu, tmp_path: Path, name: str, layout: str) -> None:
    source = synth.write(LAYOUTS[name](), tmp_path / "source")
    opened = penstock.open(source)
    state = opened.load("cuda:0" if fake.vendor == "cuda" else "rocm:0", framework="dlpack")
    loaded = fake.counter("copies")
    report = penstock.save(state, tmp_path / "saved", layout=layout, max_shard_size="16MiB")
    copies = fake.counter("copies") - loaded
    assert content_of(tmp_path / "saved") == content_of(source)
    # Every chunk begins a copy, and so does each layer for the small tensors that its experts part from others.
    chunks = -(-report.file_bytes // (4 * MIB)) + len(report.files)
    assert copies <= 4 * loaded + 2 * chunks, (copies, loaded, chunks)
    if name != "odd":
        assert copies < len(state) / 30
    assert report.nbytes <= fake.counter("bytes_d2h") <= report.nbytes + 256 * len(state)


def test_copies_to_memory_that_is_not_registered_are_never_submitted_together(fake: FakeGpu, tmp_path: Path) -> None:
    source = synth.write(odd(), tmp_path / "source")
    state = penstock.open(source).load("cuda:0" if fake.vendor == "cuda" else "rocm:0", framework="dlpack")
    penstock.release_staging()
    before = fake.counter("calls.cuMemcpyBatchAsync")
    fake.configure(strict=0, refuse_register=801)
    penstock.save(state, tmp_path / "saved")
    assert content_of(tmp_path / "saved") == content_of(source)
    assert fake.counter("calls.cuMemcpyBatchAsync") == before


def test_a_save_to_a_bucket_sends_the_bytes_that_a_folder_would_get(fake: FakeGpu, tmp_path: Path) -> None:
    source = synth.write(LAYOUTS["experts"](), tmp_path / "source")
    state = penstock.open(source).load("cuda:0" if fake.vendor == "cuda" else "rocm:0", framework="dlpack")
    penstock.save(state, tmp_path / "saved", max_shard_size="16MiB")
    with serving(Uploads()) as bucket:
        report = penstock.save(state, PLACE, max_shard_size="16MiB", storage=settings(bucket))
    assert 0 < report.peak_staging <= 256 * MIB
    found = {key.rpartition("/")[2]: content for key, content in bucket.objects.items()}
    assert found == {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
