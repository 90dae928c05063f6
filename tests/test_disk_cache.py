"""The disk cache: loads that take from it what was received before, in every way of loading, and what it refuses."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakegpu
import numpy as np
import ordeal
import penstock
import pytest
import slow_fs
from disk_caches import (
    MIB,
    NOBODY,
    Asked,
    as_root,
    blocks,
    files,
    finished,
    locks,
    open_to_all,
    right_blocks,
    serving,
    settings,
    small_disk,
    states,
    there,
    user,
    wants_server,
)
from penstock import _core
from penstock.bench.served import Served
from s3_server import KEYS, Bucket, error
from s3_server import serving as bucket_of
from test_memory import ROOM
from test_web import serving as web_serving

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
    rows = dict.fromkeys(names, np.s_[: LENGTH // 2])
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


class Hosted:
    """A checkpoint and small files in a bucket, and what was asked for since."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.sent = 0
        answer = bucket.answer

        def counted(*about: Any) -> Any:
            told = answer(*about)
            self.sent += len(told[2])
            return told

        bucket.answer = counted  # type: ignore[method-assign]

    def settings(self, folder: Path, **more: Any) -> Any:
        key, secret = next(iter(KEYS.items()))
        told = {"endpoint": self.bucket.endpoint, "access_key_id": key, "secret_access_key": secret}
        return settings(folder, **told, **more)

    def open(self, folder: Path, name: str = "model.safetensors", **more: Any) -> penstock.Checkpoint:
        return penstock.open(f"s3://bucket/m/{name}", storage=self.settings(folder, **more))

    def asked(self) -> int:
        """Requests since it was asked last."""
        count = len(self.bucket.asked)
        self.bucket.asked.clear()
        self.sent = 0
        return count


SMALL = 4


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 tensors of 1 MiB and 7 bytes: for a server that is written in Python. Not to be written to."""
    return ordeal.write(tmp_path_factory.mktemp("little") / "model.safetensors", SMALL, MIB + 7)


@pytest.fixture
def hosted(little: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hosted]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    tokenizer = os.urandom(4 * MIB).hex().encode()
    objects = {"m/model.safetensors": little.read_bytes(), "m/config.json": b"{}", "m/tokenizer.json": tokenizer}
    with bucket_of(Bucket(objects)) as bucket:
        yield Hosted(bucket)


def contents(hosted: Hosted, folder: Path, *names: str, **more: Any) -> list[bytes]:
    storage = hosted.settings(folder, **more)
    return _core.contents([f"s3://bucket/m/{name}" for name in names], 64 * MIB, None, storage)


def until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20 * ordeal.load_factor()
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_small_files_come_from_the_cache_the_second_time(hosted, folder):
    names = ["config.json", "tokenizer.json"]
    expected = [hosted.bucket.objects[f"m/{name}"] for name in names]
    assert contents(hosted, folder, *names) == expected
    # What was read whole is written beside the program
    until(lambda: there(folder) == 9 * MIB)
    hosted.asked()
    assert contents(hosted, folder, *names) == expected
    assert (hosted.sent, hosted.asked()) == (2, 2)


def test_listings_are_asked_for_each_time_and_serve_loads_that_are_offline(hosted, little, folder):
    for _ in range(2):
        hosted.bucket.listings = 0
        checkpoint = hosted.open(folder, "")
        assert hosted.bucket.listings > 0
        ordeal.same(load(checkpoint)[0], little)
    # A model that is renamed is found at once
    hosted.bucket.objects["m/other.safetensors"] = hosted.bucket.objects.pop("m/model.safetensors")
    assert hosted.open(folder, "").files == ["s3://bucket/m/other.safetensors"]
    hosted.bucket.objects["m/model.safetensors"] = hosted.bucket.objects.pop("m/other.safetensors")
    hosted.open(folder, "")
    hosted.asked()
    tensors, report = load(hosted.open(folder, "", offline=True))
    ordeal.same(tensors, little)
    assert hosted.asked() == 0
    assert report.disk_cache.network_bytes == 0 < report.disk_cache.cached_bytes


def test_offline_takes_what_is_there_and_names_what_is_not(hosted, little, folder):
    with pytest.raises(penstock.NotFoundError, match="offline=True asks no server"):
        hosted.open(folder, offline=True)
    load(hosted.open(folder), names=["model.0"])
    hosted.asked()
    checkpoint = hosted.open(folder, offline=True)
    ordeal.same(load(checkpoint, names=["model.0"])[0], {"model.0": ordeal.contents(little)["model.0"]})
    with pytest.raises(penstock.NotFoundError, match="the disk cache does not have this, and offline=True") as caught:
        load(checkpoint)
    assert caught.value.path == "s3://bucket/m/model.safetensors"
    assert hosted.asked() == 0
    ordeal.same(load(hosted.open(folder))[0], little)


def test_another_version_is_another_object(hosted, little, folder, tmp_path):
    other = ordeal.write(tmp_path / "model.safetensors", SMALL, MIB + 7, seed=1)
    load(hosted.open(folder))
    before = hosted.open(folder)
    hosted.bucket.objects["m/model.safetensors"] = other.read_bytes()
    ordeal.same(load(hosted.open(folder))[0], other)
    # One that was opened before stays what it was: all of it is there
    ordeal.same(load(before)[0], little)
    assert len(files(folder, ".data")) == 2
    hosted.asked()
    ordeal.same(load(hosted.open(folder))[0], other)
    assert hosted.sent == 1
    assert right_blocks(files(folder, ".data"), [little, other]) == 10


def test_an_object_that_changes_before_all_of_it_is_there_is_an_error_and_no_mixture(hosted, little, folder, tmp_path):
    other = ordeal.write(tmp_path / "model.safetensors", SMALL, MIB + 7, seed=1)
    before = hosted.open(folder)
    load(before, names=["model.0"])
    hosted.bucket.objects["m/model.safetensors"] = other.read_bytes()
    with pytest.raises(penstock.ChangedError, match="the object changed after the checkpoint was opened"):
        load(before)
    ordeal.same(load(hosted.open(folder))[0], other)
    right_blocks(files(folder, ".data"), [little, other])


@pytest.mark.parametrize("kind", ["weak", "dated"])
def test_without_a_strong_version_nothing_is_cached_and_the_report_says_so(little, folder, kind):
    with web_serving(little.parent) as web:
        for _ in range(2):
            checkpoint = penstock.open(web(f"{kind}/{little.name}"), storage=settings(folder))
            tensors, report = load(checkpoint)
            ordeal.same(tensors, little)
            assert "no strong ETag" in report.disk_cache.reason
            assert report.network["received_bytes"] >= report.nbytes
            assert "no strong ETag" in str(report)
    assert not folder.exists() or there(folder) == 0


@pytest.mark.parametrize(
    ("status", "kind"), [(401, penstock.AccessError), (403, penstock.AccessError), (404, penstock.NotFoundError)]
)
def test_a_server_that_refuses_is_believed_whatever_the_cache_has(hosted, little, folder, status, kind):
    ordeal.same(load(hosted.open(folder))[0], little)
    hosted.bucket.script = lambda target, number: error(status, "AccessDenied" if status != 404 else "NoSuchKey", "No")
    with pytest.raises(kind):
        hosted.open(folder)
    with pytest.raises(kind):
        contents(hosted, folder, "model.safetensors")
    with pytest.raises(kind):
        hosted.open(folder, "")


def test_credentials_of_somebody_else_get_nothing_from_the_cache(hosted, folder):
    load(hosted.open(folder))
    other = {**hosted.settings(folder), "secret_access_key": "another"}
    with pytest.raises(penstock.AccessError, match="SignatureDoesNotMatch"):
        penstock.open("s3://bucket/m/model.safetensors", storage=other)


def test_a_server_that_cannot_be_reached_is_an_error_unless_offline(little, folder):
    with web_serving(little.parent) as web:
        address = web(little.name)
        load(penstock.open(address, storage=settings(folder)))
    with pytest.raises(penstock.ReadError, match="refused"):
        penstock.open(address, storage=settings(folder, patience=0))
    ordeal.same(load(penstock.open(address, storage=settings(folder, offline=True)))[0], little)


# The folder


def refused(little: Path, folder: Path, match: str, kind: type[Exception] = penstock.AccessError, **more: Any) -> None:
    with web_serving(little.parent) as web, pytest.raises(kind, match=match) as caught:
        penstock.open(web(little.name), storage=settings(folder, **more))
    assert str(folder) in str(caught.value)


@pytest.mark.skipif("slow_fs.why_not() is not None", reason="no FUSE here")
def test_a_file_system_of_another_process_is_refused(little, tmp_path):
    """As network file systems are: nobody knows which nodes see its locks."""
    backing = tmp_path / "backing"
    with web_serving(little.parent) as web:
        load(penstock.open(web(little.name), storage=settings(backing)))
    with slow_fs.mounted(backing) as fs:
        refused(little, fs.path, r"disk cache refuses it: its file system \(fuse.*", penstock.UnsupportedError)


@pytest.mark.parametrize(("mode", "says"), [(0o777, "others may write to it"), (0o770, "its group may write to it")])
def test_a_folder_that_others_may_write_to_is_refused(little, folder, mode, says):
    folder.mkdir()
    folder.chmod(mode)
    refused(little, folder, f"disk cache refuses it: {says}")


def test_a_file_of_the_cache_that_others_may_write_to_is_not_taken(served, model, folder):
    load(opened(served, model, folder))
    [data] = files(folder, ".data")
    data.chmod(0o666)
    with Asked(served) as asked:
        tensors, report = load(opened(served, model, folder))
    ordeal.same(tensors, model)
    assert asked.bytes >= model.stat().st_size
    assert "others may write to it" in report.disk_cache.reason
    assert report.disk_cache.cached_bytes == 0


def test_a_folder_with_other_files_is_refused(little, folder):
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    refused(little, folder, "not empty: .*thesis.tex", penstock.InvalidError)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


@as_root
def test_a_folder_of_another_user_is_refused_also_for_root(little, folder):
    folder.mkdir(0o700)
    os.chown(folder, NOBODY, NOBODY)
    refused(little, folder, rf"it belongs to another user \({NOBODY}\)")


@as_root
def test_a_cache_of_root_is_read_only_for_another_user(served, model):
    """It serves what it has. The rest comes from the server, and is not written."""
    with open_to_all() as place:
        folder = place / "cache"
        whole = ordeal.contents(model)
        load(opened(served, model, folder), names=["model.0", "model.1"])
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        before = there(folder)
        with Asked(served) as asked, user(NOBODY):
            tensors, report = load(opened(served, model, folder))
        ordeal.same(tensors, whole)
        size = model.stat().st_size
        assert size - before <= asked.bytes <= 1.01 * (size - before)
        assert there(folder) == before
        assert report.disk_cache.written_bytes == 0 < report.disk_cache.cached_bytes
        # Objects that it does not have at all
        with web_serving(model.parent) as web, user(NOBODY):
            tensors, report = load(penstock.open(web(model.name), storage=settings(folder)))
        ordeal.same(tensors, whole)
        assert "can only be read" in report.disk_cache.reason


@as_root
def test_a_read_only_mount_with_the_whole_model_maps_it(served, model, tmp_path):
    folder, mounted = tmp_path / "cache", tmp_path / "mounted"
    load(opened(served, model, folder))
    mounted.mkdir()
    subprocess.run(["mount", "--bind", folder, mounted], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", mounted], check=True)
        with Asked(served) as asked:
            tensors, report = load(opened(served, model, mounted))
        ordeal.same(tensors, model)
        assert asked.bytes == 1
        assert report.disk_cache.cached_bytes >= report.nbytes
        del tensors
        gc.collect()
    finally:
        subprocess.run(["umount", "-l", mounted], check=True)


@as_root
def test_users_of_a_group_share_a_cache(served, model):
    with open_to_all() as place:
        folder = place / "cache"
        folder.mkdir()
        os.chown(folder, 0, NOBODY)
        folder.chmod(0o2770)
        load(opened(served, model, folder, disk_cache_shared=True), names=["model.0"])
        with user(NOBODY):
            load(opened(served, model, folder, disk_cache_shared=True))
        with Asked(served) as asked:
            ordeal.same(load(opened(served, model, folder, disk_cache_shared=True))[0], model)
        assert asked.bytes == 1
        assert {path.stat().st_mode & 0o7777 for path in folder.rglob("*") if path.is_file()} <= {0o660, 0o600}
        with pytest.raises(penstock.AccessError, match="its group may write to it"):
            opened(served, model, folder)


@as_root
@pytest.mark.parametrize("mebibytes", [0, 1, 3, 10])
def test_a_full_disk_costs_the_cache_and_not_the_load(served, model, tmp_path, mebibytes):
    mounted, size = tmp_path / "mounted", model.stat().st_size
    with small_disk(mounted, mebibytes * MIB + 64 * 1024 * (mebibytes > 0) or 4096):
        for _ in range(2):
            with Asked(served) as asked:
                tensors, report = load(opened(served, model, mounted / "cache"))
            ordeal.same(tensors, model)
            cache = report.disk_cache
            assert cache.reason
            assert asked.bytes <= 1.01 * size + cache.fetched_again_bytes
        right_blocks(files(mounted / "cache", ".data"), [model])
        # Once there is room, the rest is kept
        subprocess.run(["mount", "-o", "remount,size=64m", mounted], check=True)
        tensors, report = load(opened(served, model, mounted / "cache"))
        ordeal.same(tensors, model)
        assert there(mounted / "cache") >= size
        assert report.disk_cache.reason == ""
        del tensors
        gc.collect()


@as_root
@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(20))
def test_a_disk_that_is_full_at_a_random_byte_costs_the_cache_and_not_the_load(served, model, tmp_path, seed):
    mounted, size = tmp_path / "mounted", model.stat().st_size
    with small_disk(mounted, random.Random(seed).randrange(4096, size)):
        for _ in range(2):
            with Asked(served) as asked:
                tensors, report = load(opened(served, model, mounted / "cache"))
            ordeal.same(tensors, model)
            assert report.disk_cache.reason
            assert asked.bytes <= 1.01 * size + report.disk_cache.fetched_again_bytes
            del tensors
        assert right_blocks(files(mounted / "cache", ".data"), [model]) < -(-size // MIB)
        assert locks(mounted / "cache") == []
        gc.collect()


# Eviction


def test_what_was_used_longest_ago_goes_first_and_never_what_is_open(served, model, little, tmp_path, folder):
    """Room for two of three objects."""
    models = [ordeal.write(tmp_path / "m" / f"{name}.safetensors", 4, 2 * MIB, seed) for seed, name in enumerate("abc")]
    most = 20 * MIB
    with serving(models[0].parent) as server:

        def start(file: Path) -> tuple[dict[str, Any], int]:
            with Asked(server) as asked:
                checkpoint = opened(server, file, folder, disk_cache_size=most)
                tensors, report = load(checkpoint)
                ordeal.same(tensors, file)
                assert report.disk_cache.reason == "", report.disk_cache
            return tensors, asked.bytes

        start(models[0])
        start(models[1])
        kept, received = start(models[0])
        assert received == 1
        start(models[2])
        assert sum(path.stat().st_blocks * 512 for path in files(folder, ".data")) <= most
        # The second one went: the first is newer, and its tensors are mapped
        ordeal.same(kept, models[0])
        assert start(models[0])[1] == 1
        assert start(models[1])[1] > 8 * MIB
        ordeal.same(kept, models[0])


def test_a_reader_keeps_its_object_while_others_need_room(served, model, folder, tmp_path):
    other = ordeal.write(tmp_path / "m" / "other.safetensors", 4, 2 * MIB, seed=5)
    load(opened(served, model, folder))
    stream = iter(opened(served, model, folder).stream(framework="np"))
    found = dict([next(stream)])
    with serving(other.parent) as server:
        tensors, report = load(opened(server, other, folder, disk_cache_size=26 * MIB))
        ordeal.same(tensors, other)
        assert "no room left" in report.disk_cache.reason
        assert report.disk_cache.dropped_bytes > 0
        found |= stream
        ordeal.same(found, model)
        assert len(files(folder, ".data")) == 2
        # Nobody has it any more
        del found, stream, tensors
        gc.collect()
        _, report = load(opened(server, other, folder, disk_cache_size=26 * MIB))
        assert report.disk_cache.reason == ""
        [left] = files(folder, ".data")
        assert left.read_bytes() == other.read_bytes()


# What disks do


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("whole", [True, False])
def test_a_flipped_byte_is_found_by_disk_cache_verify_alone(served, model, folder, whole):
    names = None if whole else ["model.0", "model.1", "model.2"]
    load(opened(served, model, folder), names=names)
    [data] = files(folder, ".data")
    flip(data, MIB + MIB // 2)
    found, _ = load(opened(served, model, folder), names=names)
    with pytest.raises(ordeal.Wrong, match=r"model\.0"):
        expected = ordeal.contents(model)
        ordeal.same(found, {name: expected[name] for name in found})
    del found
    size = model.stat().st_size
    for most in (MIB + 1 if whole else size, 1):
        with Asked(served) as asked:
            tensors, report = load(opened(served, model, folder, disk_cache_verify=True))
        ordeal.same(tensors, model)
        assert asked.bytes <= most
        assert report.routes["mapped"]["bytes"] == 0
    assert data.read_bytes() == model.read_bytes()
    ordeal.same(load(opened(served, model, folder))[0], model)


@pytest.mark.parametrize("how", ["map", "data", "cut map", "cut data", "garbage"])
def test_files_that_are_not_whole_are_replaced(served, model, folder, how):
    load(opened(served, model, folder))
    # Threads of the cache have it open for a moment longer
    until(lambda: not locks(folder))
    [data], [map_file] = files(folder, ".data"), files(folder, ".map")
    if how in ("map", "data"):
        (map_file if how == "map" else data).unlink()
    elif how == "garbage":
        map_file.write_bytes(os.urandom(map_file.stat().st_size))
    else:
        file = map_file if how == "cut map" else data
        os.truncate(file, file.stat().st_size - 8)
    with Asked(served) as asked:
        tensors, report = load(opened(served, model, folder))
    ordeal.same(tensors, model)
    assert asked.bytes >= 20 * MIB and report.disk_cache.reason == ""
    with Asked(served) as asked:
        ordeal.same(load(opened(served, model, folder))[0], model)
    assert asked.bytes == 1


def test_a_folder_that_was_removed_is_made_again(served, model, folder):
    load(opened(served, model, folder))
    shutil.rmtree(folder)
    for most in (1.01 * model.stat().st_size, 1):
        with Asked(served) as asked:
            ordeal.same(load(opened(served, model, folder))[0], model)
        assert asked.bytes <= most


def test_a_block_that_is_written_again_by_a_late_process_does_not_disturb_a_reader(served, model, folder):
    """A process that was stopped writes the bytes that are there. Only the file's time changes."""
    load(opened(served, model, folder))
    checkpoint = opened(served, model, folder)
    stream = iter(checkpoint.stream(framework="np"))
    found = dict([next(stream)])
    [data] = files(folder, ".data")
    with data.open("r+b") as file:
        part = file.read(MIB)
        file.seek(0)
        file.write(part)
    found |= stream
    ordeal.same(found, model)
    ordeal.same(load(checkpoint)[0], model)


# What others see


SECRETS = ("a1b2c3d4-signature", "very-secret-token")


def test_nothing_secret_is_in_names_maps_and_lists(hosted, model, served, folder):
    [url] = served.urls([model])
    signed = f"{url}?X-Amz-Signature={SECRETS[0]}"
    load(penstock.open(signed, storage=settings(folder)))
    load(hosted.open(folder, "", session_token=SECRETS[1]))
    until(lambda: there(folder) > 24 * MIB)
    _, secret = next(iter(KEYS.items()))
    key = next(iter(KEYS))
    for path in folder.rglob("*"):
        assert not any(text in str(path) for text in (*SECRETS, secret, key, "model"))
        if path.is_file() and path.suffix != ".data":
            content = path.read_bytes()
            assert not any(text.encode() in content for text in (*SECRETS, secret, key)), path
            assert path.stat().st_mode & 0o077 == 0
        else:
            assert path.stat().st_mode & 0o077 == 0
    # Another signature of the same object finds it
    with Asked(served) as asked:
        load(penstock.open(f"{url}?X-Amz-Signature=other", storage=settings(folder)))
    assert asked.bytes == 1


# What is left in the process


SHARDS = """
import json, resource, sys
import ordeal, penstock
told = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
storage = {"disk_cache": told["folder"], "disk_cache_free": 0}
checkpoint = penstock.open(told["urls"], storage=storage)
found = checkpoint.load(framework="np", progress=False, options=told["options"])
expected = {name: content for path in told["paths"] for name, content in ordeal.contents(path).items()}
ordeal.same(found, expected)
cache = checkpoint.last_report.disk_cache
assert cache.wait(60)
print(json.dumps([cache.cached_bytes, cache.network_bytes, cache.dropped_bytes, cache.reason]))
"""


@pytest.mark.machine
def test_two_hundred_shards_are_loaded_with_few_descriptors(folder, tmp_path):
    """256, and the cache has two files of each shard. Once into it, once half from it, and twice from it."""
    models = [ordeal.write(tmp_path / "m" / f"{number:03}.safetensors", 1, 200_000, number) for number in range(200)]
    with serving(models[0].parent) as server:
        told = {"urls": server.urls(models), "folder": str(folder), "paths": list(map(str, models))}
        for round_, options in enumerate(({}, {}, {}, {"copy": True})):
            with Asked(server) as asked:
                said = ordeal.run(SHARDS, json.dumps(told | {"options": options}), timeout=60)
            cached, network, dropped, reason = json.loads(said)
            assert (dropped, reason) == (0, "")
            there = files(folder, ".data")
            assert {path.read_bytes() for path in there} == {path.read_bytes() for path in models}
            if round_ == 0:
                # Half of them are received again
                for data_file in there[::2]:
                    data_file.unlink()
        assert asked.bytes == len(models) and network == 0 and cached >= 200 * 200_000
    assert locks(folder) == []


def test_nothing_is_left_when_the_work_has_ended(served, model, folder):
    load(opened(served, model, folder))
    with ordeal.Unchanged():
        for _ in range(3):
            tensors, report = load(opened(served, model, folder))
            del tensors, report
        tensors, report = load(opened(served, model, folder.parent / "other"))
        del tensors, report
    assert not any(str(folder.parent) in path for path in ordeal.descriptors())
    assert locks(folder) == locks(folder.parent / "other") == []


def test_quiesce_ends_the_work_of_the_cache(served, model, folder):
    checkpoint = opened(served, model, folder)
    report = checkpoint.load(framework="np", progress=False, options={"staging": 16 * MIB}) and checkpoint.last_report
    penstock.quiesce()
    assert report.disk_cache.wait(10)
    assert ordeal.threads() == []
    assert not any(str(folder) in path for path in ordeal.descriptors())
    assert locks(folder) == []
    right_blocks(files(folder, ".data"), [model])
    ordeal.same(load(opened(served, model, folder))[0], model)
    assert there(folder) >= model.stat().st_size


def test_a_load_that_fails_leaves_no_claim(hosted, little, folder):
    checkpoint = hosted.open(folder)
    hosted.bucket.script = lambda target, number: error(403, "AccessDenied", "No")
    with pytest.raises(penstock.AccessError):
        checkpoint.load(framework="np", progress=False)
    gc.collect()
    assert locks(folder) == []
    hosted.bucket.script = lambda target, number: None
    ordeal.same(load(hosted.open(folder))[0], little)


FORKED = """
import os, sys
import ordeal, penstock
url, folder, path = sys.argv[1:]
storage = {"disk_cache": folder, "disk_cache_free": 0}
checkpoint = penstock.open(url, storage=storage)
stream = iter(checkpoint.stream(framework="np"))
found = dict([next(stream)])
pid = os.fork()
if pid == 0:
    # Its own load, beside the one of the parent, whose descriptors it has
    try:
        ordeal.same(penstock.open(url, storage=storage).load(framework="np", progress=False), path)
        os._exit(0)
    except BaseException as error:
        print(error, flush=True)
        os._exit(1)
found |= stream
ordeal.same(found, path)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert checkpoint.last_report.disk_cache.wait(60)
print("right")
"""


def test_a_forked_child_loads_by_itself(served, model, folder):
    [url] = served.urls([model])
    assert ordeal.run(FORKED, url, folder, model, timeout=60) == "right\n"
    right_blocks(files(folder, ".data"), [model])
    assert locks(folder) == []
    with Asked(served) as asked:
        ordeal.same(load(opened(served, model, folder))[0], model)
    assert asked.bytes <= 1


MEMORY = """
import json, sys, threading, time
import ordeal, penstock, numpy as np
url, folder, staging, hot = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
storage = {"disk_cache": folder, "disk_cache_free": 0}
checkpoint = penstock.open(url, storage=storage)
into = {name: np.ones(checkpoint[name].shape, "uint8") for name in checkpoint}
before, peak, over = ordeal.resident(), 0, threading.Event()
def watch():
    global peak
    while not over.wait(0.0005):
        peak = max(peak, ordeal.resident())
thread = threading.Thread(target=watch)
thread.start()
checkpoint.load_into(into, options={"staging": staging}, progress=False)
checkpoint.last_report.disk_cache.wait(60)
over.set()
thread.join()
ordeal.same(into, hot)
print(json.dumps([peak - before, checkpoint.last_report.peak_staging]))
"""


@pytest.mark.machine
@pytest.mark.parametrize("staging", [16 * MIB, 64 * MIB])
def test_the_cache_takes_its_memory_out_of_the_staging_memory(served, folder, staging, tmp_path):
    """96 MiB, of which half are there."""
    model = ordeal.write(tmp_path / "m" / "model.safetensors", 48, 2 * MIB)
    with serving(model.parent) as server:
        load(opened(server, model, folder), names=[f"model.{number}" for number in range(24)])
        [url] = server.urls([model])
        grown, peak = json.loads(ordeal.run(MEMORY, url, folder, staging, model, timeout=60))
    assert peak <= staging
    assert grown <= staging + ROOM, grown
