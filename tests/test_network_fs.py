"""A slow, stalling, failing file system: deep parallel reads, never a mapping, and a bounded error when it hangs."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import ordeal
import penstock
import penstock.cli
import pytest
import slow_fs
from ordeal import await_line, begin, file_maps, finish, load_factor, same, soon

MIB = 1 << 20
TENSORS, NBYTES = 48, MIB

pytestmark = pytest.mark.skipif("slow_fs.why_not() is not None", reason="no FUSE here")


@pytest.fixture(scope="module")
def backing(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("backing")
    ordeal.write(folder / "model.safetensors", TENSORS, NBYTES)
    return folder


@pytest.fixture
def fs(backing):
    with slow_fs.mounted(backing) as fs:
        yield fs


@pytest.fixture
def remote(fs) -> Path:
    return fs.path / "model.safetensors"


def load(path, **options):
    checkpoint = penstock.open(path)
    return checkpoint.load(framework="np", options=options), checkpoint.last_report


@pytest.mark.parametrize("cache", ["auto", "keep", "bypass"])
@pytest.mark.machine
def test_a_slow_server_gets_many_reads_at_once_and_is_never_mapped(fs, remote, backing, cache):
    fs.tell(latency=0.02)
    tensors, report = load(remote, cache=cache, extent=MIB)
    same(tensors, backing / "model.safetensors")
    assert fs.tell()["most_at_once"] >= 8
    assert not [line for line in file_maps() if str(fs.path) in line]
    assert report.routes["mapped"]["bytes"] == 0


def test_what_cannot_go_past_the_page_cache_says_so(fs, remote, backing):
    """FUSE knows no RWF_DONTCACHE, and its O_DIRECT is for whoever asks for it by name."""
    tensors, report = load(remote, cache="bypass")
    same(tensors, backing / "model.safetensors")
    assert ("RWF_DONTCACHE", "page cache") in ordeal.told(report)
    assert ordeal.told(load(remote, cache="keep")[1]) == []


def test_a_warm_file_of_a_server_is_not_mapped_either(fs, remote, backing):
    remote.read_bytes()
    tensors, report = load(remote)
    assert report.routes["mapped"]["bytes"] == 0
    same(tensors, backing / "model.safetensors")
    assert not [line for line in file_maps() if str(fs.path) in line]


def test_asking_for_a_mapping_of_it_is_an_error_that_says_why(remote):
    with pytest.raises(penstock.UnsupportedError, match="never mapped") as e:
        load(remote, io="mapped")
    assert str(remote) in str(e.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("io", ["auto", "buffered", "direct", "threads"])
def test_reads_that_hang_end_in_an_error_that_names_file_and_bytes(fs, remote, io):
    fs.tell(hang=["read"], after=fs.tell()["requests"]["read"] + 12)
    checkpoint = penstock.open(remote)
    began = time.monotonic()
    with pytest.raises(penstock.StalledError, match="stall_timeout") as e:
        checkpoint.load(framework="np", options={"io": io, "stall_timeout": 1.0, "extent": MIB})
    assert 1.0 <= time.monotonic() - began < 8.0 * load_factor()
    assert str(remote) in str(e.value)
    assert e.value.range is not None
    assert isinstance(e.value, TimeoutError)
    fs.tell(hang=[])
    soon(lambda: not ordeal.threads())  # what was left behind ends when the server comes back


@pytest.mark.parametrize("threads", ["1", "4"])
def test_a_warm_of_a_file_that_hangs_ends_in_an_error(fs, remote, threads, capsys):
    fs.tell(hang=["read"], after=fs.tell()["requests"]["read"] + 12)
    status = penstock.cli.main(["warm", str(remote), "--threads", threads, "--stall-timeout", "1"])
    assert status == penstock.cli.ERROR
    said = capsys.readouterr().err
    assert "has not answered for 1.0 s" in said
    assert str(remote) in said
    fs.tell(hang=[])
    soon(lambda: not ordeal.threads())


@pytest.mark.parametrize("threads", [1, 4])
def test_ctrl_c_ends_a_warm_of_a_file_that_hangs(fs, remote, threads):
    program = """
import signal, sys, penstock.cli
signal.signal(signal.SIGINT, signal.default_int_handler)
print("ready", flush=True)
sys.exit(penstock.cli.main(["warm", sys.argv[1], "--threads", sys.argv[2]]))
"""
    fs.tell(hang=["read"], after=fs.tell()["requests"]["read"] + 12)
    child = begin(program, remote, threads)
    await_line(child, "ready")
    fs.hangs()
    child.send_signal(signal.SIGINT)
    try:
        code, _, err = finish(child)  # while the file still hangs
        assert (code, err) == (penstock.cli.INTERRUPTED, "penstock: interrupted\n")
    finally:
        fs.tell(hang=[])


def test_a_file_that_hangs_does_not_keep_others_from_loading(fs, remote, backing):
    checkpoint = penstock.open(remote)
    fs.tell(hang=["read"])
    failed = []

    def stuck():
        try:
            checkpoint.load(framework="np", options={"stall_timeout": 1.0, "io": "buffered"})
        except penstock.StalledError as e:
            failed.append(e)

    thread = threading.Thread(target=stuck)
    thread.start()
    fs.hangs()
    for _ in range(3):
        tensors, _ = load(backing / "model.safetensors", copy=True)
        same(tensors, backing / "model.safetensors")
    thread.join(10 * load_factor())
    assert not thread.is_alive()
    assert failed
    same(load(backing / "model.safetensors", io="direct")[0], backing / "model.safetensors")
    fs.tell(hang=[])
    soon(lambda: not ordeal.threads())
    same(load(remote)[0], backing / "model.safetensors")


#: A load that hangs in the way that the tests then choose.
STUCK = """
import os, sys, time, ordeal, penstock
import penstock._numpy
checkpoint = penstock.open(sys.argv[1])
print("opened", flush=True)
sys.stdin.readline()
"""
WAYS = {
    "load": "checkpoint.load(framework='np', options=o)",
    "stream": "list(checkpoint.stream(framework='np', options=o))",
    "wait": "checkpoint.start(framework='np', options=o).wait()",
    "result": "checkpoint.start(framework='np', options=o).result()",
    "load_into": (
        "import numpy; into = {n: numpy.zeros(checkpoint[n].shape, 'uint8') for n in checkpoint}; "
        "checkpoint.load_into(into, options=o)"
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_ends_a_load_that_hangs_and_the_process_can_exit(fs, remote, way):
    program = (
        STUCK
        + f"""
o = dict(io="buffered", extent=1 << 20)
began = None
try:
    {WAYS[way]}
except KeyboardInterrupt:
    began = time.monotonic()
print("interrupted" if began else "not interrupted", flush=True)
"""
    )
    child = begin(program, remote)
    await_line(child, "opened")
    fs.tell(hang=["read"])
    child.stdin.write("\n")
    child.stdin.flush()
    fs.hangs()
    time.sleep(0.2)
    # Reads under way are waited for at most 2 s before they are left behind
    ordeal.interrupt(child, within=6.0)
    fs.tell(hang=[])
    code, _out, err = finish(child, 20)
    assert code == 0, err


def test_cancelling_a_job_that_hangs_returns(fs, remote):
    checkpoint = penstock.open(remote)
    fs.tell(hang=["read"])
    job = checkpoint.start(framework="np", options={"io": "buffered"})
    fs.hangs()
    began = time.monotonic()
    job.cancel()
    assert time.monotonic() - began < 6.0 * load_factor()
    with pytest.raises(penstock.CancelledError):
        job.result()
    fs.tell(hang=[])
    soon(lambda: not ordeal.threads())


def test_a_process_exits_while_its_load_hangs(fs, remote):
    program = (
        STUCK
        + """
job = checkpoint.start(framework="np", options=dict(io="buffered"))
print("started", flush=True)
sys.stdin.readline()
"""
    )
    child = begin(program, remote)
    await_line(child, "opened")
    fs.tell(hang=["read"])
    child.stdin.write("\n")
    child.stdin.flush()
    fs.hangs()
    child.stdin.write("\n")
    child.stdin.flush()
    # A thread in a request that FUSE will not give up keeps the process a zombie until the server lets go, but Python
    # must have got that far by itself
    status = Path(f"/proc/{child.pid}/status")
    soon(lambda: "State:\tZ" in status.read_text(), 8)
    fs.tell(hang=[])
    code, _, err = finish(child, 10)
    assert code == 0, err


def hung(fs, remote, request, program, within=10.0):
    """Runs a program that hangs in `request` from its line "opened" on; gives its output."""
    child = begin(STUCK + program, remote)
    try:
        await_line(child, "opened")
        fs.tell(hang=[request])
        child.stdin.write("\n")
        child.stdin.flush()
        fs.hangs()
        began = time.monotonic()
        await_line(child, "ended")
        assert time.monotonic() - began < within * load_factor()
        return child.stdout.readline()
    finally:
        fs.tell(hang=[])
        finish(child, 20)


@pytest.mark.parametrize("request_", ["open", "getattr", "lookup"])
def test_a_server_that_hangs_before_the_first_read_ends_in_an_error(fs, remote, request_):
    program = """
try:
    checkpoint.load(framework="np", options=dict(stall_timeout=1.0))
    said = "loaded"
except penstock.StalledError as e:
    said = f"StalledError {sys.argv[1] in str(e)}"
print("ended", flush=True)
print(said, flush=True)
"""
    assert hung(fs, remote, request_, program) == "StalledError True\n"


def test_a_server_that_hangs_at_the_last_look_at_the_file_ends_in_an_error(fs, remote):
    """After the last byte the file is looked at once more: has it changed?"""
    program = """
stream = checkpoint.stream(framework="np", options=dict(stall_timeout=1.0, window=1 << 20, extent=1 << 20))
try:
    for i, _ in enumerate(stream):
        if i == 3:
            print("streaming", flush=True)
            sys.stdin.readline()
    said = "loaded"
except penstock.StalledError as e:
    said = f"StalledError {sys.argv[1] in str(e)}"
print("ended", flush=True)
print(said, flush=True)
"""
    child = begin(STUCK + program, remote)
    try:
        await_line(child, "opened")
        child.stdin.write("\n")
        child.stdin.flush()
        await_line(child, "streaming")
        fs.tell(hang=["getattr"])
        child.stdin.write("\n")
        child.stdin.flush()
        began = time.monotonic()
        await_line(child, "ended")
        assert time.monotonic() - began < 10.0 * load_factor()
        assert child.stdout.readline() == "StalledError True\n"
    finally:
        fs.tell(hang=[])
        finish(child, 20)


@pytest.mark.parametrize("io", ["auto", "buffered", "direct", "threads"])
def test_an_error_of_the_server_names_file_bytes_and_cause(fs, remote, io):
    checkpoint = penstock.open(remote)
    fs.tell(fail=["read"], after=fs.tell()["requests"]["read"] + 6)
    with pytest.raises(penstock.ReadError) as e:
        checkpoint.load(framework="np", options={"io": io, "extent": MIB})
    assert e.value.errno == 5
    assert str(remote) in str(e.value)
    assert e.value.range is not None
    assert not ordeal.threads()


def test_a_file_that_shrinks_on_the_server_is_truncated_or_changed(fs, remote):
    checkpoint = penstock.open(remote)
    fs.tell(latency=0.02)
    job = checkpoint.start(framework="np", options={"extent": MIB, "threads": 2, "depth": 2})
    soon(lambda: fs.tell()["requests"]["read"] > 4)
    fs.tell(sizes={"model.safetensors": 20 * MIB})
    with pytest.raises((penstock.TruncatedError, penstock.ChangedError)) as e:
        job.result()
    assert str(remote) in str(e.value)


def test_a_server_that_dies_is_an_error(backing):
    with slow_fs.mounted(backing) as fs:
        checkpoint = penstock.open(fs.path / "model.safetensors")
        fs.tell(hang=["read"])
        job = checkpoint.start(framework="np", options={"io": "buffered"})
        fs.hangs()
        fs.server.kill()
        with pytest.raises(penstock.PenstockError) as e:
            job.result(20 * load_factor())
        assert not isinstance(e.value, penstock.StalledError)
        assert "model.safetensors" in str(e.value)
        assert not ordeal.threads()


@pytest.mark.machine
def test_a_slow_source_is_what_bounds_the_load(fs, remote):
    fs.tell(latency=0.05)
    _, report = load(remote, extent=MIB, threads=2, depth=2)
    assert report.bottleneck == "source"
    assert report.waits["source"] > 0.6 * report.seconds


#: What opens the file, given the options of the process: `stall_timeout` as an argument, or as the variable.
OPENING = {
    "open": "penstock.open(path, stall_timeout=1.0)",
    "open a folder": "penstock.open(os.path.dirname(path), stall_timeout=1.0)",
    "open an index": "penstock.open(path.replace('.safetensors', '.safetensors.index.json'), stall_timeout=1.0)",
    "safe_open": "penstock.safe_open(path, framework='np', options=dict(stall_timeout=1.0))",
    "load_file": "penstock.load_file(path, framework='np', options=dict(stall_timeout=1.0))",
    "the variable": "os.environ.update(PENSTOCK_STALL_TIMEOUT='1'); penstock.open(path)",
    "the variable and safe_open": (
        "os.environ.update(PENSTOCK_STALL_TIMEOUT='1'); penstock.safe_open(path, framework='np')"
    ),
    "the variable and inspect": (
        "os.environ.update(PENSTOCK_STALL_TIMEOUT='1'); status = penstock.cli.main(['inspect', path])"
    ),
    "the variable and verify": (
        "os.environ.update(PENSTOCK_STALL_TIMEOUT='1'); status = penstock.cli.main(['verify', path])"
    ),
    "the variable and numpy": (
        "os.environ.update(PENSTOCK_STALL_TIMEOUT='1'); import penstock.numpy; penstock.numpy.load_file(path)"
    ),
    "inspect": "status = penstock.cli.main(['inspect', path, '--stall-timeout', '1'])",
    "verify on the command line": "status = penstock.cli.main(['verify', path, '--stall-timeout', '1'])",
    "load on the command line": "status = penstock.cli.main(['load', path, '-o', 'stall_timeout=1'])",
}


@pytest.mark.sampled
@pytest.mark.parametrize("request_", ["lookup", "getattr", "open", "read"])
@pytest.mark.parametrize("way", OPENING)
def test_an_open_that_hangs_ends_in_an_error_that_names_the_path(fs, remote, backing, way, request_):
    names = dict.fromkeys(ordeal.entries(backing / "model.safetensors")[1], "model.safetensors")
    (backing / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    if way == "open a folder" and request_ == "getattr":
        pytest.skip("the folder's own attributes are asked for by the lookup of its files")
    program = f"""
import contextlib, io, os, sys, time, penstock, penstock._numpy, penstock.cli
path = sys.argv[1]
said, status = io.StringIO(), "opened"
print("ready", flush=True)
sys.stdin.readline()
began = time.monotonic()
try:
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        {OPENING[way]}
except penstock.StalledError as e:
    status = 3
    said.write(str(e))
took = time.monotonic() - began
print("ended", flush=True)
print(status, "has not answered for 1.0 s" in said.getvalue(), os.path.dirname(path) in said.getvalue(), flush=True)
print(took, flush=True)
"""
    child = begin(program, remote)
    try:
        await_line(child, "ready")
        fs.tell(hang=[request_])
        child.stdin.write("\n")
        child.stdin.flush()
        await_line(child, "ended")
        assert child.stdout.readline() == "3 True True\n"
        assert 1.0 <= float(child.stdout.readline()) < 20.0
    finally:
        fs.tell(hang=[])
        finish(child, 20)


def test_an_open_of_a_slow_server_is_no_stall(fs, backing):
    """Every answer counts, however many files there are: twelve of 0.25 s each, and the limit is 1 s."""
    folder = backing / "slow"
    for i in range(12):
        ordeal.write(folder / f"model-{i}.safetensors", 2, 1000)
    fs.tell(latency=0.25)
    assert len(penstock.open(fs.path / "slow", stall_timeout=1.0)) == 24


def test_reads_that_hang_end_a_verify(fs, remote):
    checkpoint = penstock.open(remote)
    fs.tell(hang=["read"], after=fs.tell()["requests"]["read"] + 4)
    began = time.monotonic()
    with pytest.raises(penstock.StalledError, match=r"has not answered for 1\.0 s") as e:
        checkpoint.verify(progress=False, stall_timeout=1.0)
    assert time.monotonic() - began < 20.0 * load_factor()
    assert e.value.path == str(remote)
    fs.tell(hang=[])
    soon(lambda: not [t for t in threading.enumerate() if t.name.startswith("penstock-hash")])


@pytest.mark.parametrize("request_", ["lookup", "open"])
def test_a_verify_that_hangs_before_its_first_byte_ends(fs, remote, request_):
    checkpoint = penstock.open(remote)
    fs.tell(hang=[request_])
    with pytest.raises(penstock.StalledError) as e:
        checkpoint.verify(progress=False, stall_timeout=0.5)
    assert e.value.path == str(remote)
    fs.tell(hang=[])


def test_a_hub_cache_that_hangs_ends_the_open_of_a_repository(fs, backing):
    program = """
import os, sys, penstock
os.environ["HF_HUB_CACHE"] = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
try:
    penstock.open("org/name", stall_timeout=1.0)
    said = "opened"
except penstock.StalledError as e:
    said = f"StalledError {e.path.startswith(sys.argv[1])}"
print("ended", flush=True)
print(said, flush=True)
"""
    child = begin(program, fs.path)
    try:
        await_line(child, "ready")
        fs.tell(hang=["lookup"])
        child.stdin.write("\n")
        child.stdin.flush()
        await_line(child, "ended")
        assert child.stdout.readline() == "StalledError True\n"
    finally:
        fs.tell(hang=[])
        finish(child, 20)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf")])
def test_a_stall_timeout_that_is_none_is_refused(backing, wrong):
    with pytest.raises(ValueError, match="stall_timeout"):
        penstock.open(backing / "model.safetensors", stall_timeout=wrong)


def test_a_variable_that_makes_no_sense_is_told_by_its_name(backing, monkeypatch):
    monkeypatch.setenv("PENSTOCK_STALL_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="PENSTOCK_STALL_TIMEOUT"):
        penstock.open(backing / "model.safetensors")
