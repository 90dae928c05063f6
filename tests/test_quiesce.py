"""After `penstock.quiesce` a process has no thread and no descriptor of Penstock's. The next load is like the first."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakegpu
import ordeal
import penstock
import pytest
from ordeal import run
from penstock.integrations import _fetched
from penstock.integrations._remote import RemoteWeights
from ranks_together import Ranks
from s3_server import KEYS, Bucket, serving
from test_fetched import SMALL, settings
from test_fetched import temporary as temporary
from test_s3 import nothing_in_the_environment as nothing_in_the_environment

KEY, SECRET = next(iter(KEYS.items()))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 MB. Not to be written to."""
    return ordeal.write(tmp_path_factory.mktemp("quiesce") / "model.safetensors")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 GB of zeros that take no disk. Not to be written to."""
    return ordeal.write(tmp_path_factory.mktemp("quiesce-slow") / "slow.safetensors", 128, 32 << 20, sparse=True)


#: What a process has: descriptors by what they lead to, and threads of Penstock's and of the kernel's rings by name.
HEAD = """
import gc, json, os, sys, threading, time
import penstock, penstock._numpy, penstock._quiesce, penstock._safe_open, numpy
from penstock import _core

def there():
    descriptors, threads = [], []
    for number in os.listdir("/proc/self/fd"):
        try:
            to = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # that of this listing
        # The number of a socket or pipe is another each time
        descriptors.append(to.split(":[")[0] if to.startswith(("socket", "pipe")) else to)
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                threads += [name for name in [comm.read().strip()] if name.startswith(("penstock", "iou"))]
        except OSError:
            continue  # it has just ended
    return sorted(descriptors), sorted(threads)

def counts(report, is_fixed=True):
    found = {name: report[name] for name in ("nbytes", "tensors", "gap_bytes", "fallbacks")}
    # Otherwise the page cache decides, and other programs that use it
    if is_fixed:
        found["routes"] = report["routes"]
    if report["network"]:
        found["received"] = report["network"]["received_bytes"]
    return found
"""

#: What leaves something in a process, or could. Each is a function; what it returns is kept until the end.
KINDS = """
path, slow = sys.argv[1:3]
checkpoint = penstock.open(path)

def loads(**options):
    def load():
        job = penstock.open(path).start(framework="np", options=options)
        job.result()
        return job
    return load

def closed_early():
    stream = penstock.open(path).stream(framework="np", options=dict(copy=True, io="direct", window=2_000_000))
    next(stream)
    stream.close()
    return stream

def failed():
    broken = path + ".short"
    whole = open(path, "rb").read()
    with open(broken, "wb") as file:
        file.write(whole)
    opened = penstock.open(broken)
    os.truncate(broken, len(whole) - 5_000_000)
    try:
        opened.load(framework="np", options=dict(copy=True))
    except penstock.PenstockError as error:
        return error
    raise AssertionError("no error")

def one_by_one():
    handle = penstock.safe_open(path, "np", backend="pread")
    with open(path, "rb") as file:
        file.read()
    handle.get_slice("model.1")[10:20]  # a small part is copied out of the page cache, and the file stays open
    return handle

def fill():
    filling = penstock.open(slow)._core.fill()
    while "penstock-fill" not in there()[1] and filling.state == "running":
        time.sleep(0.001)
    return filling

def saved():
    penstock.save_file({"a": numpy.ones(3_000_000)}, path + ".saved")

kinds = dict(
    mapped=loads(), copied=loads(copy=True), direct=loads(io="direct", copy=True),
    uring_buffered=loads(io="uring_buffered", copy=True), threads=loads(io="threads", copy=True),
    closed_early=closed_early, failed=failed, one_by_one=one_by_one, fill=fill, saved=saved,
)
"""


def test_nothing_is_left_whatever_was_loaded(file: Path, slow: Path) -> None:
    program = (
        HEAD
        + KINDS
        + """
penstock.quiesce()
clean = there()
said = {}
for name, kind in kinds.items():
    kept = kind()
    left = there()
    is_fixed = name in ("direct", "uring_buffered", "threads")
    first = counts(kept.report, is_fixed) if isinstance(kept, penstock.Job) else None
    penstock.quiesce(timeout=60)
    found = there()
    penstock.quiesce(timeout=0)  # once more: there is nothing to wait for
    again = kind()
    second = counts(again.report, is_fixed) if isinstance(again, penstock.Job) else None
    if name == "fill":
        assert (kept.state, kept.reason) == ("stopped", "penstock.quiesce ended it"), kept
    if name == "one_by_one":
        assert (kept.get_slice("model.2")[5:9] == again.get_slice("model.2")[5:9]).all()
    del kept, again
    gc.collect()
    penstock.quiesce(timeout=60)
    said[name] = [found == clean, left != clean, first == second, repr(found), repr(first), repr(second)]
print(json.dumps(said))
"""
    )
    said = json.loads(run(program, file, slow, timeout=120))
    assert {name: found for name, found in said.items() if not found[0]} == {}
    assert {name: found for name, found in said.items() if not found[2]} == {}
    # Otherwise there would be nothing to end, and this test could not fail
    assert said["fill"][1] and said["one_by_one"][1]


def test_a_load_leaves_nothing_by_itself(file: Path) -> None:
    """No ring, no thread, no descriptor, also while its job is kept."""
    program = (
        HEAD
        + """
path = sys.argv[1]
penstock.open(path).load(framework="np", options=dict(copy=True))
penstock.quiesce()
clean, kept = there(), []
ways = [dict(io=io, copy=True) for io in ("direct", "threads", "buffered")]
for options in ({}, dict(copy=True, cache="keep"), *ways):
    job = penstock.open(path).start(framework="np", options=options)
    kept.append((job, job.result()))
    limit = time.monotonic() + 30
    while there() != clean:  # threads of the kernel's rings end a moment later
        assert time.monotonic() < limit, (options, there(), clean)
        time.sleep(0.01)
print("right")
"""
    )
    assert run(program, file) == "right\n"


def test_what_is_under_way_is_named_and_goes_on(file: Path, slow: Path, tmp_path: Path) -> None:
    program = (
        HEAD
        + """
path, slow, folder = sys.argv[1:4]
def refused():
    try:
        penstock.quiesce()
    except penstock.BusyError as error:
        assert isinstance(error, RuntimeError) and error.kind == "Busy"
        [one] = error.busy
        assert one in str(error) and "wait for it or close it" in str(error)
        return one
    raise AssertionError("nothing is under way")

quick = dict(io="threads", extent=4096, depth=1, threads=1)
job = penstock.open(slow).start(framework="np", options=quick)
assert refused() == f"a load of {slow} to cpu" and not job.done()
job.cancel()
penstock.quiesce()

for options in ({}, dict(copy=True, window=2_000_000)):
    stream = penstock.open(path).stream(framework="np", options=options)
    name, tensor = next(stream)
    assert refused() == f"an open stream of {path} to cpu"
    assert len(dict(stream)) == 23
    penstock.quiesce()

with penstock.safe_open(path, "np").prefetch() as loader:
    assert refused() == f"an open stream of {path} to cpu"
    loader.take("model.0")
penstock.quiesce()

# Its tensors need not be taken: nothing runs any more
job = penstock.open(path).start(framework="np")
job.wait()
penstock.quiesce()
assert len(job.result()) == 24

def refused_by_name():
    try:
        penstock.quiesce()
    except penstock.BusyError as error:
        return error.busy
    return []
found = []
from penstock import _saving
fill = _saving.fill
def watched(*arguments):
    found.append(refused_by_name())
    return fill(*arguments)
_saving.fill = watched
penstock.save_file({"a": numpy.ones((4, 4)).T, "b": numpy.arange(9)[::2]}, folder + "/saved.safetensors")
assert found and all(f"a save to {folder}" in one for names in found for one in names), found
penstock.quiesce()
print("right")
"""
    )
    assert run(program, file, slow, tmp_path, timeout=60) == "right\n"


def test_it_may_be_called_from_any_thread_and_in_a_child(file: Path, slow: Path) -> None:
    program = (
        HEAD
        + """
path, slow = sys.argv[1:3]
whole = penstock.open(path).load(framework="np", options=dict(copy=True))
fill = penstock.open(slow)._core.fill()
threads = [threading.Thread(target=penstock.quiesce) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert fill.state == "stopped"
clean = there()
job = penstock.open(slow).start(framework="np", options=dict(io="threads", extent=4096, depth=1, threads=1))
stream = penstock.open(path).stream(framework="np")
next(stream)
pid = os.fork()
if pid == 0:
    code = 1
    try:
        penstock.quiesce()  # what is under way is the parent's
        assert len(penstock.open(path).load(framework="np", options=dict(copy=True))) == 24
        penstock.quiesce()
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(pid, 0)[1] == 0
assert not job.done()
job.cancel()
stream.close()
penstock.quiesce()
assert there() == clean, (there(), clean)
print("right")
"""
    )
    assert run(program, file, slow, timeout=60) == "right\n"


def test_what_does_not_end_in_time_is_named(small: Path) -> None:
    """A program's callable for credentials hangs: the open leaves its thread behind."""
    goes_on = threading.Event()

    def hangs() -> dict[str, Any]:
        goes_on.wait()
        return {"access_key_id": KEY, "secret_access_key": SECRET}

    with serving(Bucket({f"m/{path.name}": path.read_bytes() for path in small.glob("[!.]*")})) as bucket:
        with pytest.raises(penstock.StalledError):
            asked: Any = {"endpoint": bucket.endpoint, "credentials": hangs}
            penstock.open("s3://bucket/m/", storage=asked, stall_timeout=0.3)
        with pytest.raises(penstock.StalledError, match=r"after 0.1 s there is still .*the thread penstock-") as caught:
            penstock.quiesce(timeout=0.1)
        assert isinstance(caught.value, TimeoutError)
        goes_on.set()
        penstock.quiesce(timeout=60)


@pytest.mark.parametrize(
    ("timeout", "error"),
    [("1", TypeError), (True, TypeError), (-1, ValueError), (float("nan"), ValueError)],
)
def test_a_timeout_that_is_none_is_refused(timeout: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"give .*seconds, or None"):
        penstock.quiesce(timeout)


# Servers


def test_nothing_is_left_of_loads_from_a_server(small: Path) -> None:
    program = (
        HEAD
        + """
endpoint, key, secret = sys.argv[1:4]
storage = dict(endpoint=endpoint, access_key_id=key, secret_access_key=secret)
penstock.quiesce()
clean, said = there(), []
for _ in range(2):
    checkpoint = penstock.open("s3://bucket/m/", storage=storage)
    tensors = checkpoint.load(framework="np")
    said.append([len(tensors), counts(checkpoint.last_report)])
    stream = checkpoint.stream(framework="np")
    next(stream)
    stream.close()
    penstock.quiesce(timeout=60)
    assert there() == clean, (there(), clean)
assert said[0] == said[1]
checkpoint.load(framework="np")  # one that was opened before
print("right")
"""
    )
    with serving(Bucket({f"m/{path.name}": path.read_bytes() for path in small.glob("[!.]*")})) as bucket:
        assert run(program, bucket.endpoint, KEY, SECRET) == "right\n"


# Ranks


def test_nothing_is_left_of_ranks_that_loaded_together(together: Callable[..., Ranks], file: Path) -> None:
    program = """
    checkpoint = penstock.open(path)
    checkpoint.load(group=group, options={"exchange": "on"})
    penstock.quiesce(timeout=60)
    clean = traces()
    said["first"] = clean[0]
    for _ in range(2):
        checkpoint.load(group=group, options={"exchange": "on"})
        stream = checkpoint.stream(group=group)
        next(stream)
        try:
            penstock.quiesce()
        except penstock.BusyError as error:
            said["busy"] = error.busy
        stream.close()
        penstock.quiesce(timeout=60)
        assert traces() == clean, (traces(), clean)
    with penstock.joined(group):
        try:
            penstock.quiesce()
        except penstock.BusyError as error:
            said["joined"] = error.busy
    penstock.quiesce(timeout=60)
    assert traces() == clean, (traces(), clean)
    """
    with together(program, 2, file) as ranks:
        for rank, said in enumerate(ranks.all()):
            watches = f"rank {rank} of 2 ranks that load together, which watches the others"
            assert said["first"] == []
            assert said["busy"] == [watches] and said["joined"] == [watches]


# GPUs


@pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)
def test_nothing_is_left_of_loads_to_a_gpu_and_the_next_one_registers_as_much(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    with fakegpu.fresh() as fake:
        idle, files = fakegpu.threads(), fakegpu.descriptors()
        registered = []
        for _ in range(2):
            before = fake.counter("calls.cuMemHostRegister_v2")
            tensors = penstock.open(file).load("cuda:0", framework="dlpack", options={"pinning_threads": 1})
            assert len(tensors) == 24
            del tensors
            fakegpu.settle(fakegpu.threads, idle)  # all is registered that was to be
            registered.append(fake.counter("calls.cuMemHostRegister_v2") - before)
            penstock.quiesce(timeout=60)
            assert fakegpu.threads() == idle and fakegpu.descriptors() == files
            assert penstock.release_staging() == 0
            assert fake.leaks == []
        assert registered[0] == registered[1] > 0


# The folders of small files that engines get


@pytest.fixture
def bucket(small: Path) -> Iterator[Bucket]:
    weights = {path.name: path.read_bytes() for path in small.glob("[!.]*")}
    with serving(Bucket({f"m/{name}": content for name, content in (weights | SMALL).items()})) as bucket:
        yield bucket


def opened(folder: str) -> list[str]:
    """Descriptors of this process that lead there."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(descriptor.readlink()))
        except OSError:
            continue
    return [path for path in found if path.startswith(folder)]


def test_a_folder_of_small_files_stays_without_its_lock(bucket: Bucket, temporary: Path) -> None:
    folder, _ = _fetched.fetch("s3://bucket/m/", settings(bucket))
    assert opened(folder) == [folder]
    penstock.quiesce()
    assert opened(folder) == []
    assert Path(folder, "config.json").read_bytes() == SMALL["config.json"]
    # Another process does not take it over while this one lives
    program = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from penstock.integrations import _fetched
from penstock.integrations._remote import RemoteWeights
print(_fetched._claimed(sys.argv[2]), end="")
"""
    name = Path(folder).name.removeprefix(f"penstock-{os.getuid()}-")
    assert run(program, temporary, name) == f"{folder}-1"
    assert _fetched.fetch("s3://bucket/m/", settings(bucket)).folder == folder
    assert opened(folder) == [folder]


def test_what_a_quiesced_process_has_left_the_next_one_takes_over(temporary: Path) -> None:
    program = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
import penstock
from penstock.integrations import _fetched
from penstock.integrations._remote import RemoteWeights
folder = _fetched._claimed("name")
penstock.quiesce()
print(folder, end="", flush=True)
os._exit(0)
"""
    folder = run(program, temporary)
    assert Path(folder, ".penstock-process").exists()
    assert _fetched._claimed("name") == folder


@pytest.mark.parametrize("quiesced", [False, True])
def test_a_folder_that_is_gone_is_made_anew(bucket: Bucket, temporary: Path, quiesced: bool) -> None:
    """As after a restore on another machine, the temporary directory included."""
    folder, _ = _fetched.fetch("s3://bucket/m/", settings(bucket))
    if quiesced:
        penstock.quiesce()
    shutil.rmtree(temporary)
    assert _fetched.fetch("s3://bucket/m/", settings(bucket)).folder == folder
    assert Path(folder, "config.json").read_bytes() == SMALL["config.json"]
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert opened(folder) == [folder]
    # The weights' own folder needs the directory too
    shutil.rmtree(temporary)
    weights = RemoteWeights("s3://bucket/m/", settings(bucket))
    assert Path(weights.folder).is_dir()
    weights.close()


def test_a_temporary_directory_that_cannot_be_made_is_named(bucket: Bucket, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file" / "temporary"))
    with pytest.raises(penstock.WriteError, match=r"is gone and cannot be made .*: make it"):
        RemoteWeights("s3://bucket/m/", settings(bucket))
