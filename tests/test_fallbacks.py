"""Each route refused for real, at the start of a load and in the middle: the bytes are right and the report says so.

Every test refuses in a process of its own, by a seccomp filter, a resource limit, another user or a cgroup.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ordeal
import pagecache
import penstock
import pytest
from ordeal import begin, finish, run
from penstock.synthetic.synth import Tensor

LIMIT = 60.0

#: The head of every program: a checkpoint that is out of the page cache, and what the tests say.
HEAD = """
import errno, json, os, resource, sys
import ordeal, penstock
from ordeal import same, told
from refusals import *
import penstock._numpy  # what an import needs is not what is under test
penstock._numpy.numpy_dtype("BF16")  # imports ml_dtypes, where that is installed
path = sys.argv[1]

def stream(options, middle):
    "Loads as a stream; what `middle` does, it does after the second tensor, with most of the file unread."
    checkpoint, tensors = penstock.open(path), {}
    options = {"window": 2_000_000, "cache": "bypass", "extent": 65536, **options}
    for name, tensor in checkpoint.stream(framework="np", options=options):
        tensors[name] = tensor
        if len(tensors) == 2:
            middle()
    same(tensors, path)
    return checkpoint.last_report

def load(options, *refusals):
    checkpoint = penstock.open(path)
    refuse(*refusals)
    same(checkpoint.load(framework="np", options={"cache": "bypass", **options}), path)
    return checkpoint.last_report
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """24 MB on a disk, with tensors at odd places. Not to be written to."""
    return ordeal.write(tmp_path_factory.mktemp("fallbacks") / "model.safetensors", 24, 999_999)


@pytest.fixture
def cold(file) -> Path:
    ordeal.evict(file)
    return file


@pytest.fixture(scope="module")
def interfaces(file) -> dict[str, bool]:
    """Whether this machine has io_uring and O_DIRECT when nothing is refused."""
    ordeal.evict(file)
    checkpoint = penstock.open(file)
    checkpoint.load(framework="np", options={"io": "uring", "cache": "bypass"})
    refused = {f["from"] for f in checkpoint.last_report.fallbacks}
    return {name: name not in refused for name in ("io_uring", "O_DIRECT")}


def needs(interfaces: dict[str, bool], *names: str) -> None:
    missing = [n for n in names if not interfaces[n]]
    if missing:
        pytest.skip(f"refused here before any test refuses it: {', '.join(missing)}")


STARTS = {
    "io_uring refused": ("direct", "NO_URING", [("io_uring", "threads")]),
    "io_uring refused where it was asked for": ("uring", "NO_URING", [("io_uring", "threads")]),
    "io_uring set up but not to be entered": (
        "direct",
        'Refusal("io_uring_enter")',
        [("io_uring", "threads")],
    ),
    "io_uring without registration": ("direct", 'Refusal("io_uring_register")', [("io_uring", "threads")]),
    "opening with O_DIRECT refused": ("direct", "NO_DIRECT", [("O_DIRECT", "buffered")]),
    "opening with O_DIRECT refused to threads": ("threads", "NO_DIRECT", [("O_DIRECT", "buffered")]),
    "everything refused": (
        "direct",
        "NO_URING, NO_DIRECT",
        [("io_uring", "threads"), ("O_DIRECT", "buffered")],
    ),
}


@pytest.mark.parametrize("what", STARTS)
def test_what_is_refused_from_the_start_goes_another_way(cold, interfaces, what):
    io, refusals, expected = STARTS[what]
    needs(interfaces, *({first for first, _ in expected} & interfaces.keys()))
    program = f"report = load(dict(io={io!r}), {refusals})\nprint(json.dumps([told(report), report.rerouted_extents]))"
    found, rerouted = json.loads(run(HEAD + program, cold, timeout=LIMIT))
    assert found == [list(pair) for pair in expected]
    # Another interface is no other route.
    assert (rerouted > 0) == (("O_DIRECT", "buffered") in expected)


MIDDLES = {
    "io_uring": ("direct", 'Refusal("io_uring_enter")', [("io_uring", "threads")]),
    "O_DIRECT reads by threads": ("threads", "", [("O_DIRECT", "buffered")]),
}


@pytest.mark.parametrize("what", MIDDLES)
def test_what_is_refused_in_the_middle_goes_another_way(cold, interfaces, what):
    io, refusals, expected = MIDDLES[what]
    needs(interfaces, *({first for first, _ in expected} & interfaces.keys()))
    if what == "O_DIRECT reads by threads":
        # A filter cannot tell one descriptor from another by its flags, but it can by its number
        refusals = """*[Refusal("pread64", errno.EINVAL, argument=0, value=int(fd))
            for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fdinfo/{fd}")
            and int(open(f"/proc/self/fdinfo/{fd}").read().split("flags:")[1].split()[0], 8) & O_DIRECT]"""
    out = run(
        HEAD + f"print(json.dumps(told(stream(dict(io={io!r}), lambda: refuse({refusals})))))", cold, timeout=LIMIT
    )
    assert eval(out) == [list(pair) for pair in expected]


def test_the_report_names_the_cause(cold, interfaces):
    needs(interfaces, "io_uring")
    out = run(HEAD + "print(load(dict(io='direct'), NO_URING))", cold, timeout=LIMIT)
    assert "fell back" in out
    assert "not permitted" in out


def test_a_mapping_that_cannot_be_populated_is_read_instead(cold):
    program = (
        HEAD
        + """
checkpoint = penstock.open(path)
refuse(NO_POPULATE)
same(checkpoint.load(framework="np", options={"io": "mapped", "cache": "keep"}), path)
print(json.dumps(told(checkpoint.last_report)), checkpoint.last_report.routes["mapped"]["bytes"] > 23_000_000)
"""
    )
    out = run(program, cold, timeout=LIMIT)
    assert out == '[["MADV_POPULATE_READ", "pread"]] True\n'


@pytest.mark.parametrize(("refusals", "fallbacks"), [("", []), ("NO_POPULATE", [["MADV_POPULATE_READ", "pread"]])])
def test_cold_copies_that_cannot_fill_the_page_cache_are_only_read(cold, refusals, fallbacks):
    program = HEAD + f"print(json.dumps(told(load(dict(copy=True, cache='keep'), {refusals}))))"
    assert json.loads(run(program, cold, timeout=LIMIT)) == fallbacks


def test_populating_refused_in_the_middle_of_a_stream(cold):
    out = run(
        HEAD + "print(json.dumps(told(stream(dict(io='mapped', cache='keep'), lambda: refuse(NO_POPULATE)))))",
        cold,
        timeout=LIMIT,
    )
    assert out == '[["MADV_POPULATE_READ", "pread"]]\n'


TOUCH = "[('touching populated pages', 'first use')]"


@pytest.mark.parametrize("error", ["errno.EPERM", "errno.ENOSYS"])
def test_touching_refused_leaves_the_pages_to_their_first_use_and_is_told_once(cold, error):
    program = (
        HEAD
        + f"""
checkpoint = penstock.open(path)
refuse(Refusal("process_vm_readv", {error}))
same(checkpoint.load(framework="np", options={{"io": "mapped", "cache": "keep"}}), path)
report = checkpoint.last_report
print(told(report) == {TOUCH}, "process_vm_readv" in report.fallbacks[0]["reason"], report.touched_pages)
# Of a warm load it is not known then what the first touch will cost
same(checkpoint.load(framework="np"), path)
report = checkpoint.last_report
print(told(report), report.first_touch_bytes > 23_000_000, report.first_touch_seconds, "about" in str(report))
"""
    )
    assert run(program, cold, timeout=LIMIT).splitlines() == ["True True 0", "[] True None False"]


def test_touching_refused_in_the_middle_of_a_stream(cold):
    out = run(
        HEAD + f"print(told(stream(dict(io='mapped', cache='keep'), lambda: refuse(NO_TOUCH))) == {TOUCH})",
        cold,
        timeout=LIMIT,
    )
    assert out == "True\n"


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.machine
def test_cachestat_refused_is_sampled_instead(cold, warm):
    if warm:
        cold.read_bytes()
    program = (
        HEAD
        + """
checkpoint = penstock.open(path)
refuse(NO_CACHESTAT)
same(checkpoint.load(framework="np", options={"cache": "keep"}), path)
r = checkpoint.last_report
print(r.residency_probes > 10, r.resident_bytes)
"""
    )
    probed, found = run(program, cold, timeout=LIMIT).split()
    assert probed == "True"
    size = cold.stat().st_size
    assert int(found) == size if warm else int(found) < size / 2


def test_who_does_not_own_the_file_loads_it_warm_and_cold(file):
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        mine = Path(folder) / "model.safetensors"
        shutil.copy(file, mine)
        mine.chmod(0o644)
        program = (
            HEAD
            + """
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for _ in range(2):
    checkpoint = penstock.open(path)
    same(checkpoint.load(framework="np", options={"cache": "keep"}), path)
    print(checkpoint.last_report.resident_bytes)
"""
        )
        pagecache.evict(mine)
        first, second = map(int, run(program, mine, timeout=LIMIT).split())
        # mincore would tell a stranger that all of it was resident; what is asked instead does not
        assert first < mine.stat().st_size / 2
        assert second == mine.stat().st_size


def test_no_memory_may_be_locked(cold):
    program = (
        HEAD
        + """
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
for io in ("auto", "direct", "uring", "threads"):
    ordeal.evict(path)
    report = load(dict(io=io, copy=True))
    print(io, report.nbytes)
"""
    )
    if os.geteuid() == 0:  # root may lock what it likes
        Path(cold).parent.chmod(0o755)
        for folder in Path(cold).parents:
            if not folder.stat().st_mode & 0o005:
                folder.chmod(folder.stat().st_mode | 0o055)
        program = program.replace(
            "setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))",
            "setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)); os.setgid(65534); os.setuid(65534)",
        )
    assert run(program, cold, timeout=LIMIT).split() == [
        w for io in ("auto", "direct", "uring", "threads") for w in (io, str(24 * 999_999))
    ]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """1,100 shards of one 4 kB tensor each. Not to be written to."""
    folder = tmp_path_factory.mktemp("shards")
    for i in range(1100):
        path = folder / f"model-{i:05}-of-01100.safetensors"
        head = b'{"t.%d":{"dtype":"U8","shape":[4001],"data_offsets":[0,4001]}}' % i
        path.write_bytes(len(head).to_bytes(8, "little") + head + bytes([i % 251]) * 4001)
    return folder


@pytest.mark.parametrize("io", ["auto", "buffered", "direct", "threads"])
def test_more_shards_than_descriptors(shards, io):
    program = (
        HEAD
        + """
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
checkpoint = penstock.open(path)
for copy in (None, True):
    copy = copy if sys.argv[2] == "auto" else None
    tensors = checkpoint.load(framework="np", options={"io": sys.argv[2], "copy": copy})
    assert len(tensors) == 1100
    for name, tensor in tensors.items():
        assert ordeal.raw(tensor) == bytes([int(name[2:]) % 251]) * 4001, name
del tensors, tensor
taken = dict(checkpoint.stream(framework="np", options={"io": sys.argv[2]}))
assert all(ordeal.raw(t) == bytes([int(n[2:]) % 251]) * 4001 for n, t in taken.items()) and len(taken) == 1100
print(len(os.listdir("/proc/self/fd")) < 64)
"""
    )
    assert run(program, shards, io, timeout=LIMIT) == "True\n"


def test_no_descriptor_left_at_all_is_an_error_that_says_so(file):
    program = (
        HEAD
        + """
checkpoint = penstock.open(path)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
full = []
try:
    while True: full.append(os.dup(0))
except OSError: pass
for spare in (0, 1, 2, 3, 4, 5, 6, 8, 12):
    os.closerange(64 - spare, 64)
    try:
        checkpoint.load(framework="np", options={"copy": True})
        print("loaded")
    except penstock.PenstockError as e:
        print(type(e).__name__)
    for fd in range(64 - spare, 64):
        try: os.fstat(fd)
        except OSError: os.dup2(1, fd)
os.closerange(20, 64)
same(checkpoint.load(framework="np", options={"copy": True}), path)
print("loaded at last")
"""
    )
    lines = run(program, file, timeout=LIMIT).split("\n")
    assert lines[0] == "LimitError"
    assert set(lines[:9]) <= {"LimitError", "loaded"}, lines
    assert lines[9] == "loaded at last"


def test_an_address_space_too_small_is_an_error_that_says_so(file):
    program = (
        HEAD
        + """
from pathlib import Path
checkpoint = penstock.open(path)
checkpoint.load(framework="np")  # everything that is set up once is
used = int([l for l in open("/proc/self/status") if l.startswith("VmSize")][0].split()[1]) * 1024
for room in (10, 16, 20, 30, 200):
    resource.setrlimit(resource.RLIMIT_AS, (used + (room << 20), -1))
    for options in ({"copy": True, "cache": "keep"}, {"io": "mapped"}, {"io": "direct"}):
        try:
            checkpoint.load(framework="np", options=options)
            print("loaded")
        except (penstock.OutOfMemoryError, penstock.LimitError) as e:
            print(type(e).__name__)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
same(checkpoint.load(framework="np", options={"copy": True}), path)
assert not ordeal.threads()
"""
    )
    lines = run(program, file, timeout=LIMIT).split()
    assert lines[0] == "OutOfMemoryError"
    assert "loaded" in lines[-3:]


@pytest.mark.parametrize("call", ["eventfd2", "epoll_create1"])
def test_what_the_engine_cannot_do_without_is_an_error_that_says_so(file, call):
    program = (
        HEAD
        + f"""
checkpoint = penstock.open(path)
refuse(Refusal({call!r}, errno.EMFILE))
try:
    checkpoint.load(framework="np", options={{"copy": True}})
except penstock.PenstockError as e:
    print(type(e).__name__, not ordeal.threads(), e)
"""
    )
    kind, clean, *text = run(program, file, timeout=LIMIT).split()
    assert (kind, clean) == ("LimitError", "True"), text


def test_no_thread_can_be_started(file):
    """RLIMIT_NPROC does not bind root, and a container's pid limit looks the same: clone fails with EAGAIN."""
    program = (
        HEAD
        + """
checkpoint = penstock.open(path)
refuse(*NO_THREADS)
for options in ({"copy": True}, {"io": "mapped"}, {"io": "threads"}):
    try:
        checkpoint.load(framework="np", options=options)
    except penstock.PenstockError as e:
        print(type(e).__name__, "thread" in str(e), ordeal.threads())
"""
    )
    assert run(program, file, timeout=LIMIT).splitlines() == ["LimitError True []"] * 3


def test_threads_refused_in_the_middle(cold):
    out = run(
        HEAD
        + """
report = stream(dict(io="buffered", cache="keep"), lambda: refuse(*NO_THREADS))
print(report.nbytes)""",
        cold,
        timeout=LIMIT,
    )
    assert out == f"{24 * 999_999}\n"


@pytest.mark.machine
def test_io_uring_switched_off_by_the_administrator(cold, interfaces):
    switch = Path("/proc/sys/kernel/io_uring_disabled")
    needs(interfaces, "io_uring")
    if not switch.exists() or not os.access(switch, os.W_OK):
        pytest.skip("kernel.io_uring_disabled cannot be set here")
    before = switch.read_text()
    try:
        switch.write_text("2")
        out = run(HEAD + "print(json.dumps(told(load(dict(io='direct')))))", cold, timeout=LIMIT)
    finally:
        switch.write_text(before)
    assert eval(out) == [["io_uring", "threads"]]


def empty_cgroup(*places: tuple[str, str]) -> Iterator[tuple[Path, str]]:
    """A new cgroup in the first of these places that has the limit file named beside it."""
    for root, limit in places:
        group = Path(root) / f"penstock-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                yield group, limit
                return
        finally:
            ordeal.soon(lambda group=group: not (group / "cgroup.procs").read_text())
            group.rmdir()
    pytest.skip(f"no cgroup with {limit} can be made here")


@pytest.fixture
def cgroup() -> Iterator[tuple[Path, str]]:
    """An empty memory cgroup and the name of its limit file."""
    yield from empty_cgroup(("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))


@pytest.fixture
def pids_cgroup() -> Iterator[tuple[Path, str]]:
    yield from empty_cgroup(("/sys/fs/cgroup/pids", "pids.max"), ("/sys/fs/cgroup", "pids.max"))


@pytest.mark.machine
def test_io_uring_without_threads_of_its_own(cold, interfaces, pids_cgroup):
    """Reads into fresh memory are handed to the kernel's worker threads, which count against the limit too."""
    needs(interfaces, "io_uring")
    group, limit = pids_cgroup
    out = run(
        HEAD
        + """
checkpoint = penstock.open(path)
group, limit = sys.argv[2:]
open(group + "/cgroup.procs", "w").write(str(os.getpid()))
alone = int(open(group + "/pids.current").read())
for engine_and_workers in (1, 100):
    open(f"{group}/{limit}", "w").write(str(alone + engine_and_workers))
    tensors = checkpoint.load(framework="np", options=dict(io="uring", cache="bypass"))
    same(tensors, path)
    report = checkpoint.last_report
    print(told(report), report.routes["direct"]["extents"] > 0)
    del tensors
    ordeal.evict(path)
""",
        cold,
        group,
        limit,
        timeout=LIMIT,
    )
    assert out.splitlines() == ["[] True"] * 2


#: In a memory cgroup of so many bytes: opens the checkpoint, and compares rows of its tensors with the file, of which
#: little is read at a time.
IN_CGROUP = (
    HEAD
    + """
group, limit, most = sys.argv[2:]
open(f"{group}/cgroup.procs", "w").write(str(os.getpid()))
open(f"{group}/{limit}", "w").write(most)
checkpoint = penstock.open(path)

def same_rows(tensors, first=0):
    data, header = ordeal.entries(path)
    with open(path, "rb", buffering=0) as f:
        for name, tensor in tensors.items():
            rows = tensor.reshape(-1, tensor.shape[-1])
            at, end = header[name]["data_offsets"]
            row = (end - at) // (header[name]["shape"][0] if tensor.ndim > 1 else 1)
            for i in range(len(rows)):
                f.seek(data + at + (first + i) * row)
                assert rows[i].tobytes() == f.read(rows.shape[1]), (name, i)
"""
)


def in_cgroup(program: str, path: Path, cgroup: tuple[Path, str], most: int) -> list[str]:
    """Lines that the program prints."""
    code, out, err = finish(begin(IN_CGROUP + program, path, *cgroup, most), LIMIT)
    assert code == 0, f"{code}: killed for its memory? {err}"
    return out.splitlines()


@pytest.mark.machine
def test_a_copy_that_fills_its_cgroup_goes_past_the_page_cache(tmp_path, cgroup):
    path = ordeal.write(tmp_path / "model.safetensors", 20, 10_000_000)
    ordeal.evict(path)
    program = """
tensors = checkpoint.load(framework="np", options=dict(copy=True))
assert len(tensors) == 20
same_rows(tensors)
r = checkpoint.last_report
print(r.cache, r.routes["direct"]["bytes"] > 190_000_000)
print(r.cache_reason)
"""
    told, reason = in_cgroup(program, path, cgroup, 350_000_000)
    assert told == "bypass True"
    assert "do not fit" in reason


@pytest.mark.machine
def test_a_checkpoint_that_is_larger_than_its_cgroup_is_mapped(tmp_path, cgroup):
    """The kernel drops pages of a mapping and reads them again, where private memory gets the process killed."""
    path = ordeal.write(tmp_path / "model.safetensors", 20, 10_000_000)
    ordeal.evict(path)
    program = """
tensors = checkpoint.load(framework="np")
assert len(tensors) == 20
same_rows(tensors)
r = checkpoint.last_report
print(r.cache, r.cache_reason, r.routes["mapped"]["bytes"] >= r.nbytes)
"""
    assert in_cgroup(program, path, cgroup, 120_000_000) == ["keep 200.00 MB of cold bytes are mapped, not copied True"]


@pytest.mark.machine
def test_column_slices_that_fill_the_cgroup_go_past_the_page_cache_beside_rows_that_are_mapped(write, cgroup):
    path = write(Tensor("columns", "U8", (1000, 250_000)), Tensor("rows", "U8", (1000, 60_000)))
    ordeal.evict(path)
    program = """
slices = {"columns": (slice(None), slice(0, 200_000)), "rows": slice(100, 900)}
tensors = checkpoint.load(slices=slices, framework="np")
assert [tensors[name].shape for name in slices] == [(1000, 200_000), (800, 60_000)]
same_rows({"columns": tensors["columns"]})
same_rows({"rows": tensors["rows"]}, first=100)
r = checkpoint.last_report
print(r.cache, r.routes["direct"]["bytes"] > 200_000_000, r.routes["mapped"]["bytes"] >= 48_000_000)
print(r.cache_reason)
"""
    told, reason = in_cgroup(program, path, cgroup, 350_000_000)
    assert told == "bypass True True"
    assert reason.startswith("200.00 MB of cold bytes do not fit into half of the memory left")
    assert reason.endswith("; 48000000 more are mapped, not copied")


@pytest.mark.machine
def test_copies_larger_than_the_cgroup_are_refused_before_anything_is_read(tmp_path, cgroup):
    with open("/proc/meminfo", encoding="ascii") as f:
        swap = next(int(line.split()[1]) for line in f if line.startswith("SwapTotal:")) * 1024
    path = ordeal.write(tmp_path / "model.safetensors", 16, (swap + (1200 << 20)) // 16, sparse=True)
    program = """
try:
    checkpoint.load(framework="np", options=dict(copy=True))
except penstock.OutOfMemoryError as e:
    print(e)
stream = checkpoint.stream(framework="np", options=dict(copy=True, window=64 << 20))
print(sum(tensor.nbytes for _, tensor in stream) == checkpoint.nbytes)
"""
    refusal, streamed = in_cgroup(program, path, cgroup, 600 << 20)
    for told in (f"{(600 << 20) + swap} of memory and swap", "instead of copying them", str(path)):
        assert told in refusal
    assert streamed == "True"


@pytest.mark.machine
def test_a_checkpoint_that_fits_its_cgroup_stays_in_the_page_cache(tmp_path, cgroup):
    path = ordeal.write(tmp_path / "model.safetensors", 5, 10_000_000)
    ordeal.evict(path)
    program = """
same(checkpoint.load(framework="np"), path)
print(checkpoint.last_report.cache, checkpoint.last_report.cache_reason)
"""
    [told] = in_cgroup(program, path, cgroup, 350_000_000)
    assert told.startswith("keep ")


def test_the_limits_of_this_test_process_are_untouched():
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
