"""Files that are truncated, rewritten, replaced or deleted while they are loaded: an error that names the file, or the
bytes that were there before; never a mixture, never a killed process.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import ordeal
import penstock
import pytest
from ordeal import contents, run, same

NBYTES, TENSORS = 1_000_000, 24
ROUTES = {
    "mapped": {"io": "mapped", "cache": "keep"},
    "buffered": {"io": "buffered"},
    "direct": {"io": "direct"},
    "threads": {"io": "threads"},
}
Changed = (penstock.ChangedError, penstock.TruncatedError)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """24 MB, and beside it the same tensors with other bytes. Not to be written to."""
    folder = tmp_path_factory.mktemp("original")
    ordeal.write(folder / "other" / "model.safetensors", TENSORS, NBYTES, seed=9)
    return ordeal.write(folder / "model.safetensors", TENSORS, NBYTES)


@pytest.fixture
def file(original, tmp_path) -> Path:
    return copy(original, tmp_path / "model.safetensors")


def copy(original: Path, path: Path) -> Path:
    """A file that a test may change, and the one that `replace` puts in its place."""
    (path.parent / "other").mkdir(exist_ok=True)
    shutil.copyfile(original.parent / "other" / original.name, path.parent / "other" / path.name)
    shutil.copyfile(original, path)
    return path


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewrite(path: Path) -> None:
    """The same file, the same size, other bytes: as `torch.save` over an old checkpoint does."""
    data, _ = ordeal.entries(path)
    with path.open("r+b") as f:
        f.seek(data)
        f.write(b"\xee" * (path.stat().st_size - data))


def replace(path: Path) -> None:
    (path.parent / "other" / path.name).replace(path)


def delete(path: Path) -> None:
    path.unlink()


def grow(path: Path) -> None:
    with path.open("ab") as f:
        f.write(b"more")


CHANGES = [truncate, rewrite, replace, delete, grow]
of_change = pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
by_route = pytest.mark.parametrize("route", ROUTES)


@of_change
@by_route
def test_changed_between_open_and_load(file, change, route):
    checkpoint = penstock.open(file)
    change(file)
    with pytest.raises((*Changed, penstock.NotFoundError)) as e:
        checkpoint.load(framework="np", options=ROUTES[route])
    assert str(file) in str(e.value)
    assert not ordeal.threads()


@of_change
@by_route
def test_changed_in_the_middle_of_a_stream(file, change, route):
    before = contents(file)
    ordeal.evict(file)
    checkpoint = penstock.open(file)
    stream = checkpoint.stream(framework="np", options={**ROUTES[route], "window": 2 * NBYTES, "extent": 65536})
    taken = dict([next(stream), next(stream)])
    if route == "mapped":
        # What was handed out is the file itself, as documented: it is looked at before the file changes
        assert all(bytes(memoryview(taken[n])) == before[n] for n in taken)
        taken.clear()
    change(file)
    with pytest.raises(Changed) as e:
        for name, tensor in stream:
            taken[name] = tensor if route != "mapped" else None
    assert str(file) in str(e.value)
    for name, tensor in taken.items():
        assert tensor is None or bytes(memoryview(tensor)) == before[name], f"{name} is not what it was"
    assert not ordeal.threads()


@pytest.mark.sampled(7)
@of_change
@by_route
def test_changed_by_somebody_else_at_any_moment(original, tmp_path, change, route):
    """A race, run often: the load is whole and old, or an error."""
    path = tmp_path / "model.safetensors"
    before = contents(original)
    for round_ in range(8):
        copy(original, path)
        if round_ % 2:
            ordeal.evict(path)
        checkpoint = penstock.open(path)
        begun = threading.Event()

        def racer(delay, begun=begun):
            begun.wait()
            time.sleep(delay)
            change(path)

        thread = threading.Thread(target=racer, args=(round_ * 0.001,))
        thread.start()
        begun.set()
        try:
            tensors = checkpoint.load(framework="np", options={**ROUTES[route], "extent": 65536})
        except (*Changed, penstock.NotFoundError) as e:
            assert str(path) in str(e)
        else:
            if route != "mapped":
                assert all(bytes(memoryview(tensors[n])) == before[n] for n in before), "a mixture"
        finally:
            thread.join()
        assert not ordeal.threads()


def test_a_job_whose_file_changes_before_it_ends(file):
    before = contents(file)
    for change in (rewrite, truncate):
        ordeal.write(file, TENSORS, NBYTES)
        ordeal.evict(file)
        checkpoint = penstock.open(file)
        job = checkpoint.start(framework="np", options={"io": "threads", "extent": 4096, "depth": 1, "threads": 1})
        while job.progress[0] == 0:
            time.sleep(0.001)
        assert not job.done()
        change(file)
        with pytest.raises(Changed):
            job.result()
    ordeal.write(file, TENSORS, NBYTES)
    assert contents(file) == before


def test_load_into_says_what_it_touched_when_the_file_changes(file):
    import numpy as np

    ordeal.evict(file)
    checkpoint = penstock.open(file)
    into = {name: np.zeros(NBYTES, np.uint8) for name in checkpoint}
    options = {"io": "threads", "extent": 4096, "depth": 1, "threads": 1}

    def spoil(done, total, spoilt=[]):  # noqa: B006 - remembers that it has
        if 0 < done < total and not spoilt:
            spoilt.append(True)
            rewrite(file)

    with pytest.raises(penstock.ChangedError) as e:
        checkpoint.load_into(into, progress=spoil, options=options)
    assert set(e.value.touched) == {name for name, array in into.items() if array.any()}


def test_one_shard_of_many_changes(tmp_path):
    paths = [ordeal.write(tmp_path / f"s{i}.safetensors", 4, NBYTES, seed=i) for i in range(5)]
    checkpoint = penstock.open(paths)
    stream = checkpoint.stream(framework="np", options={"window": 2 * NBYTES, "io": "buffered", "extent": 65536})
    taken = dict([next(stream)])
    rewrite(paths[3])
    with pytest.raises(penstock.ChangedError) as e:
        taken.update(stream)
    assert str(paths[3]) in str(e.value)
    whole = {n: b for p in paths[:3] for n, b in contents(p).items()}
    assert all(bytes(memoryview(t)) == whole[n] for n, t in taken.items()), "a tensor of the changed shard came out"


def test_a_shard_that_vanished_between_open_and_load(tmp_path):
    paths = [ordeal.write(tmp_path / f"s{i}.safetensors", 2, 10_000, seed=i) for i in range(3)]
    checkpoint = penstock.open(paths)
    paths[1].unlink()
    with pytest.raises((penstock.ChangedError, penstock.NotFoundError)) as e:
        checkpoint.load(framework="np")
    assert str(paths[1]) in str(e.value)
    # What does not need that shard still loads
    tensors = checkpoint.load(framework="np", names=["s0.0", "s2.1"])
    assert bytes(memoryview(tensors["s2.1"])) == contents(paths[2])["s2.1"]


@pytest.mark.machine
def test_a_shard_that_became_a_fifo_does_not_hang(file):
    checkpoint = penstock.open(file)
    file.unlink()
    os.mkfifo(file)
    began = time.monotonic()
    with pytest.raises(penstock.ChangedError) as e:
        checkpoint.load(framework="np")
    assert time.monotonic() - began < 5
    assert str(file) in str(e.value)


def test_a_shard_that_may_not_be_read_any_more(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    path = ordeal.write(tmp_path / "model.safetensors", 2, 10_000)
    path.chmod(0o600)
    program = """
import os, sys, ordeal, penstock, penstock._numpy
checkpoint = penstock.open(sys.argv[1])
os.setgid(65534); os.setuid(65534)
for act in (lambda: checkpoint.load(framework="np"), lambda: penstock.open(sys.argv[1])):
    try:
        act()
    except penstock.AccessError as e:
        print(isinstance(e, PermissionError), sys.argv[1] in str(e), e.errno)
"""
    assert run(program, path).splitlines() == ["True True 13"] * 2


def test_truncated_under_a_mapping_before_its_pages_are_there(file):
    """Populating says EFAULT where touching would kill the process; held up until the file is short."""
    program = """
import os, sys, ordeal, penstock, penstock._numpy
path = sys.argv[1]
for part in (2, 3, 10, 100):
    os.truncate(path, int(sys.argv[2]))
    checkpoint = penstock.open(path)
    stream = checkpoint.stream(framework="np", options=dict(io="mapped", window=2_000_000, extent=65536))
    first = next(stream)
    os.truncate(path, int(sys.argv[2]) // part)
    try:
        for name, tensor in stream:
            bytes(memoryview(tensor))
        print("loaded")
    except (penstock.TruncatedError, penstock.ChangedError) as e:
        print(path in str(e))
"""
    assert run(program, file, file.stat().st_size).split() == ["True"] * 4


def test_old_bytes_of_a_replaced_file_are_never_taken_for_the_new_one(file):
    checkpoint = penstock.open(file)
    kept = checkpoint.load(framework="np")
    before = contents(file)
    replace(file)
    # A mapping keeps the old file alive: replacing is the safe way to change one
    assert all(bytes(memoryview(t)) == before[n] for n, t in kept.items())
    with pytest.raises(penstock.ChangedError, match="replaced"):
        checkpoint.load(framework="np")
    same(penstock.open(file).load(framework="np"), file)
