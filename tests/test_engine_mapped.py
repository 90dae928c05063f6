"""Mapped tensors for an engine that copies out of them itself: right bytes whatever other programs do with the files,
and neither a lease nor a descriptor is left."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ordeal
import penstock
import pytest
import torch
from conftest import raw
from leases import leases_on
from penstock import _core
from penstock._options import make_options
from penstock.integrations import _engine, _mapped
from penstock.integrations._engine import Chosen, Loads, settings_of
from penstock.integrations._mapped import Mapped, NotMapped, close_all
from penstock.integrations._primed import PRIMED, primed
from penstock.integrations._reload import Reloader
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from ranks_together import Ranks

Write = Callable[..., Path]
NAMES = [f"layers.{number}.weight" for number in range(12)]
#: Seconds that a writer may wait. The kernel itself ends a lease after 45.
SOON = 20.0


@pytest.fixture
def path(write: Write) -> Path:
    found = write(*(Tensor(name, "I32", (64, 33)) for name in NAMES))
    found.read_bytes()
    return found


def mapped(path: Path, always: bool = True, **options: Any) -> Mapped:
    try:
        return Mapped(penstock.open(path), None, make_options(options), always)
    except NotMapped as why:
        if "no lease" in str(why) and "its file system gives none" in str(why):
            pytest.skip(str(why))
        raise


def is_free(path: Path) -> bool:
    """Whether another program may write to the file now."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except BlockingIOError:
        return False
    return True


def until(there: Callable[[], bool]) -> None:
    limit = time.monotonic() + SOON * ordeal.load_factor()
    while not there():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.005)


def descriptors(path: Path) -> int:
    found = 0
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += number.readlink() == path
    return found


def left_nothing(path: Path) -> None:
    until(lambda: descriptors(path) == 0 and leases_on(path) == 0)
    assert is_free(path)


WRITER = """
import sys, time
begun = time.monotonic()
with open(sys.argv[1], sys.argv[2]):
    print(time.monotonic() - begun, flush=True)
"""


def writer(path: Path, mode: str) -> subprocess.Popen[str]:
    """Another program that opens the file, which prints how long that took."""
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path), mode], stdout=subprocess.PIPE, text=True)


def waited(process: subprocess.Popen[str]) -> float:
    return float(process.communicate(timeout=60)[0])


def test_what_is_given_are_the_files_and_nothing_is_left(path: Path):
    expected = penstock.open(path).load()
    one = mapped(path)
    found = {}
    for name, tensor in one.weights():
        assert one.leased.alive == 1
        found[name] = tensor.clone()
        del tensor
    assert list(found) == NAMES
    assert all(raw(found[name]) == raw(expected[name]) for name in NAMES)
    until(lambda: one.leased.over)
    left_nothing(path)
    report = one.report()
    assert report.nbytes == sum(tensor.nbytes for tensor in expected.values())
    assert report.routes["mapped"]["bytes"] >= report.nbytes
    assert report.routes["buffered"]["bytes"] == report.routes["direct"]["bytes"] == 0
    assert (report.tensors, report.fallbacks) == (len(NAMES), [])


def test_tensors_come_layer_by_layer(write: Write):
    path = write(
        Tensor("layers.10.a", "F32", (2,)), Tensor("layers.2.b", "F32", (2,)), Tensor("layers.2.a", "F32", (3,))
    )
    assert [name for name, _ in mapped(path).weights("layer")] == ["layers.2.a", "layers.2.b", "layers.10.a"]


@pytest.mark.parametrize("mode", ["r+b", "wb"])
def test_a_program_that_opens_a_file_to_write_waits_for_no_consumer(path: Path, mode: str):
    expected = penstock.open(path).load()
    expected = {name: raw(tensor) for name, tensor in expected.items()}
    one, kept = mapped(path), {}
    weights = one.weights()
    for _ in range(3):
        name, tensor = next(weights)
        kept[name] = tensor
    process = writer(path, mode)
    took = waited(process)
    assert took < SOON * ordeal.load_factor()
    assert path.stat().st_size == 0 or mode != "wb"
    # The consumer has them still. Without memory of their own these were SIGBUS
    assert {name: raw(tensor) for name, tensor in kept.items()} == {name: expected[name] for name in NAMES[:3]}
    if mode == "wb":
        with pytest.raises(penstock.ChangedError) as caught:
            next(weights)
        assert caught.value.touched == NAMES[:3]
    else:
        kept.update(weights)
        assert {name: raw(tensor) for name, tensor in kept.items()} == expected
        report = one.report()
        [fallback] = report.fallbacks
        assert (fallback["from"], fallback["to"]) == ("mapped", "read") and str(path) in fallback["reason"]
        assert (report.tensors, report.nbytes) == (len(NAMES), sum(map(len, expected.values())))
    until(lambda: one.leased.over)
    left_nothing(path)


def test_views_of_what_was_given_become_private_too(path: Path):
    one = mapped(path)
    _, tensor = next(one.weights())
    part, expected = tensor.narrow(1, 3, 7), raw(tensor.narrow(1, 3, 7))
    del tensor
    assert waited(writer(path, "wb")) < SOON * ordeal.load_factor()
    assert raw(part) == expected


def test_a_file_that_is_open_for_writing_is_recorded(path: Path):
    mapped(path).close()
    with path.open("r+b"), pytest.raises(NotMapped, match=f"{path}.*open for writing"):
        mapped(path)
    left_nothing(path)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"exchange": "on"}, 'exchange="on"'),
        ({"cache": "keep"}, 'cache="keep"'),
        ({"io": "buffered"}, 'io="buffered"'),
        ({"copy": True}, "copy=True"),
    ],
)
def test_options_that_force_a_way_are_kept(path: Path, options: dict[str, Any], why: str):
    with pytest.raises(NotMapped, match=why):
        mapped(path, **options)


def test_where_copies_take_longer_than_to_record_them_they_are_recorded(path: Path, monkeypatch: pytest.MonkeyPatch):
    mapped(path, always=False).close()
    monkeypatch.setattr(_mapped, "COPYING", 1000.0)
    with pytest.raises(NotMapped, match="to record 12 tensors takes less time"):
        mapped(path, always=False)
    mapped(path, always=True).close()


@pytest.mark.parametrize(("missing", "recorded"), [(1.0, False), (0.99 / 64, False), (1.01 / 64, True), (None, True)])
def test_files_that_the_page_cache_lacks_are_recorded(
    path: Path, monkeypatch: pytest.MonkeyPatch, missing: float | None, recorded: bool
):
    asked = _core.missing_where_mappable

    def found(*arguments: Any) -> tuple[int, int] | str:
        real = asked(*arguments)
        assert not isinstance(real, str) and real[1] == 12 * 64 * 33 * 4
        return "on no disk" if missing is None else (int(real[1] * missing) if missing < 1 else 0, real[1])

    monkeypatch.setattr(_core, "missing_where_mappable", found)
    with pytest.raises(NotMapped, match=r"page cache|no disk") if recorded else contextlib.nullcontext():
        mapped(path).close()
    left_nothing(path)


def test_an_iterator_that_is_dropped_gives_the_leases_back(path: Path):
    one = mapped(path)
    weights = one.weights()
    next(weights)
    assert not one.leased.over
    del weights
    gc.collect()
    assert one.leased.over
    left_nothing(path)


def test_a_consumer_that_fails_keeps_tensors_and_no_lease(path: Path):
    kept = []

    def consume(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            kept.append(tensor)
            if len(kept) == 4:
                raise RuntimeError("a shape is wrong")

    one = mapped(path)
    expected = raw(penstock.open(path).load()[NAMES[3]])
    with pytest.raises(RuntimeError, match="a shape"):
        try:
            consume(one.weights())
        finally:
            one.close()
    left_nothing(path)
    path.write_bytes(b"")
    assert raw(kept[3]) == expected


def test_what_was_not_even_begun_gives_the_leases_back(path: Path):
    one = mapped(path)
    del one
    gc.collect()
    left_nothing(path)


def test_leases_last_as_long_as_a_tensor_does(path: Path):
    one = mapped(path)
    kept = [tensor for _, tensor in one.weights()][:1]
    part = kept.pop().view(-1)[5:9]
    time.sleep(0.6)  # two looks of the thread that watches
    assert one.leased.alive == 1 and not one.leased.over and leases_on(path) == 1
    del part
    until(lambda: one.leased.over)
    left_nothing(path)


def test_a_forked_child_keeps_no_lease(path: Path):
    one = mapped(path)
    weights = one.weights()
    next(weights)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(ready[1], b"x" if descriptors(path) == 0 else b"-")
            os.read(go[0], 1)
            status = 0
        finally:
            os._exit(status)
    try:
        assert os.read(ready[0], 1) == b"x", "the child has the descriptors"
        assert not one.leased.over
        weights.close()
        left_nothing(path)
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for end in (*ready, *go):
            os.close(end)


def test_the_process_has_no_handler_and_lives(path: Path):
    """By default the kernel sends SIGIO to the process that holds a lease, which ends it."""
    program = f"""
import signal, subprocess, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_engine_mapped as here
from pathlib import Path
one = here.mapped(Path({str(path)!r}))
weights = one.weights()
next(weights)
assert here.waited(here.writer(Path({str(path)!r}), "r+b")) < 40
assert len(list(weights)) == len(here.NAMES) - 1
assert signal.getsignal(signal.SIGIO) == signal.SIG_DFL
print("well")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


def test_a_rank_alone_gets_mapped_files_and_the_report_says_so(path: Path):
    loads = Loads(torch.device("cpu"), None)
    loads.mapped = "on"
    model = torch.nn.Module()
    with loads.barrier():
        for number, (_, tensor) in enumerate(loads.begun(loads.weights(Chosen([str(path)]), None, lambda: None))):
            assert type(tensor) is torch.Tensor
            model.register_buffer(f"b{number}", torch.empty_like(tensor).copy_(tensor))
            assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        [report] = loads.run(model)
    loads.settle()
    assert (report["given"], report["copies"], report["materialised"], report["loads"]) == ("mapped", 0, {}, 1)
    assert loads.cuts() is None
    left_nothing(path)


@pytest.mark.parametrize("when", ["auto", "on", "off", None])
def test_what_is_touched_is_watched_where_tensors_are_deferred(path: Path, when: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_mapped, "COPYING", 1.0)  # "auto" records
    loads = Loads(torch.device("cpu"), None)
    loads.mapped = when
    into = torch.zeros(64, 33, dtype=torch.int32)
    with loads.barrier():
        tensors = loads.weights(Chosen([str(path)]), None, lambda: None)
        for name, tensor in tensors if when is None else loads.begun(tensors):
            if name == NAMES[0]:
                into.copy_(tensor)
                # An operation that reads what is to come has it loaded first
                assert int(into.sum()) == int(penstock.open(path).load()[name].sum())
        [report] = loads.run(torch.nn.Module())
    loads.settle()
    assert report["given"] == ("mapped" if when == "on" else "deferred")
    assert bool(report["given_reason"]) == (when in ("auto", "off"))


@pytest.mark.parametrize(("processors", "given"), [({0}, "mapped"), ({0, 1}, "deferred")])
def test_ranks_that_have_every_processor_copy_themselves(
    path: Path, monkeypatch: pytest.MonkeyPatch, processors: set[int], given: str
):
    """No pool of a load is quicker then, however long the copies take."""
    monkeypatch.setattr(_mapped, "COPYING", 1.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: processors)
    loads = Loads(torch.device("cpu"), None)
    loads.mapped = "auto"
    loads.group = (torch.distributed.HashStore(), 0, 1)
    with loads.barrier():
        for _, tensor in loads.begun(loads.weights(Chosen([str(path)]), None, lambda: None)):
            torch.empty_like(tensor).copy_(tensor)
        [report] = loads.run(torch.nn.Module())
    loads.settle()
    assert report["given"] == given


PROGRAM = """
import os, time
from penstock.integrations._engine import Chosen, Loads
from penstock.integrations import _mapped
from penstock._options import make_options

if rank in refused:
    def refuse(self, always):
        return "not on this one"
    _mapped.Mapped._not_here = refuse
loads = Loads(torch.device("cpu"), make_options({"join_timeout": 60.0, "exchange": "auto"}))
loads.mapped = "on"
loads.join(lambda: group)
model = torch.nn.Module()
try:
    with loads.barrier():
        for number, (name, tensor) in enumerate(loads.begun(loads.weights(Chosen([path]), None, None))):
            model.register_buffer(name.replace(".", "_"), torch.empty_like(tensor).copy_(tensor))
            if number == 3 and rank in failing:
                raise RuntimeError("it fails here")
        reports = loads.run(model)
    said["given"] = [(report["given"], report["given_reason"]) for report in reports]
except (RuntimeError, penstock.PeerError) as error:
    said["error"] = [type(error).__name__, str(error)]
finally:
    loads.settle()
if not failing:
    said["right"] = all(
        torch.equal(model.get_buffer(name.replace(".", "_")), safe_open(path, "pt").get_tensor(name))
        for name in safe_open(path, "pt").keys()
    )
    # The next load of the group is numbered alike on all ranks
    said["again"] = len(penstock.open(path).load(group=group))
"""


@pytest.mark.parametrize("refused", [[], [1], [0, 1, 2]])
def test_all_ranks_get_mapped_files_or_none(together: Callable[..., Ranks], path: Path, refused: list[int]) -> None:
    with together(PROGRAM, 3, path, refused=refused, failing=[]) as ranks:
        said = ranks.all()
    for number, one in enumerate(said):
        assert one["right"] and one["again"] == len(NAMES)
        [(given, why)] = one["given"]
        assert given == ("deferred" if refused else "mapped")
        if refused:
            first = f"rank {refused[0]}: not on this one"
            assert why == ("not on this one" if number in refused else first)
    left_nothing(path)


def test_other_ranks_hear_of_one_that_fails_while_it_copies(together: Callable[..., Ranks], path: Path) -> None:
    with together(PROGRAM, 3, path, refused=[], failing=[1]) as ranks:
        said = ranks.all()
    assert [one["error"][0] for one in said] == ["PeerError", "RuntimeError", "PeerError"]
    assert "rank 1" in said[0]["error"][1]
    left_nothing(path)


def test_a_reload_without_the_cuts_of_the_first_load_reads_whole_tensors_and_learns(path: Path):
    learned: list[dict[str, tuple[slice, ...]]] = []
    expected = penstock.open(path).load()

    def copied(cuts: Any, learn: Any) -> Reloader:
        one = Reloader(penstock.open(path), None, torch.device("cpu"), make_options(None), cuts, learn)
        for name, tensor in one.weights():
            into = torch.empty(16, 33, dtype=torch.int32)
            into.copy_(tensor.narrow(0, 16, 16))
            assert raw(into) == raw(expected[name].narrow(0, 16, 16))
        return one

    first = copied(None, learned.append)
    assert first.read_besides == 0
    [cuts] = learned
    assert list(cuts) == NAMES and {(cut[0].start, cut[0].stop) for cut in cuts.values()} == {(16, 32)}
    assert copied(cuts, learned.append).read_besides == 0
    assert len(learned) == 1


def test_an_interrupt_at_any_step_leaves_no_lease(path: Path, monkeypatch: pytest.MonkeyPatch):
    """A signal's handler may raise between any two steps of the interpreter."""

    def let_go(self: Mapped) -> None:  # with no wait of its own
        self._load.let_go()
        self.leased.end()

    monkeypatch.setattr(Mapped, "close", let_go)
    code, before = Mapped.weights.__code__, sys.gettrace()

    def interrupted(number: int) -> bool:
        left = number

        def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
            nonlocal left
            if frame.f_code is not code:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
            return trace

        one = mapped(path)
        weights = one.weights()
        sys.settrace(trace)
        try:
            for _ in range(2):
                next(weights)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
            del weights
            one.close()
            until(lambda: one.leased.over)
        return False

    number = 0
    while interrupted(number):
        number += 1
    assert number > 50
    left_nothing(path)


def test_a_wait_for_what_is_being_handed_out_hears_an_interrupt(path: Path):
    one, go, begun = mapped(path), threading.Event(), threading.Event()

    def make() -> int:
        begun.set()
        go.wait(SOON)
        return 7

    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(one.leased.hand(0, make)))
    thread.start()
    assert begun.wait(SOON)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        with pytest.raises(KeyboardInterrupt):
            one.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        go.set()
        thread.join()
    assert made == [7]
    one.close()
    assert one.leased.hand(1, make) is None
    left_nothing(path)


def in_a_process(program: str, *arguments: Any, before: Sequence[str] = ()) -> str:
    """What a program prints that has this module as ``here``."""
    start = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nimport test_engine_mapped as here\n"
    command = [*before, sys.executable, "-c", start + program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


NO_MEMORY = """
import resource
from pathlib import Path
path = Path(sys.argv[1])
one = here.mapped(path)
kept = [tensor for _, tensor in one.weights()]
expected = [here.raw(tensor) for tensor in kept]
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
try:
    one.close()
except here.penstock.PenstockError as error:
    assert str(path) in str(error), error
    print(type(error).__name__)
assert not one.leased.over and here.leases_on(path) == 1
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
one.close()
here.left_nothing(path)
path.write_bytes(b"")
assert [here.raw(tensor) for tensor in kept] == expected
"""


def test_tensors_that_cannot_become_private_are_an_error(write: Write):
    path = write(*(Tensor(f"t{number}", "U8", (48 << 20,)) for number in range(2)))
    path.read_bytes()
    assert in_a_process(NO_MEMORY, path) == "OutOfMemoryError\n"


SHORT = """
import os, resource
from pathlib import Path
from penstock import _running
path, left = Path(sys.argv[1]), int(sys.argv[2])
here.mapped(path).close()
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
wait, held = _running.await_load, []

def full(*arguments):
    wait(*arguments)
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for _ in range(left):
        os.close(held.pop())

_running.await_load = full
try:
    here.mapped(path).close()
    print("mapped")
except here.NotMapped as why:
    print(why)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_shortage_of_descriptors_is_a_reason_and_no_error(path: Path, left: int):
    found = in_a_process(SHORT, path, left)
    assert found == "mapped\n" if left == 3 else ("descriptor" in found or "eventfd" in found or "open files" in found)


def test_an_engine_that_keeps_much_gets_the_rest_read(path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = {name: raw(tensor) for name, tensor in penstock.open(path).load().items()}
    monkeypatch.setattr(_mapped, "KEPT", 3 * 64 * 33 * 4)
    one = mapped(path)
    for name, tensor in one.weights():
        assert raw(tensor) == expected[name]
        del tensor
    assert one.report().fallbacks == []
    one = mapped(path)
    kept = dict(one.weights())
    assert one._given == 3
    left_nothing(path)
    path.write_bytes(b"")
    assert {name: raw(tensor) for name, tensor in kept.items()} == expected
    [fallback] = one.report().fallbacks
    assert (fallback["from"], fallback["to"]) == ("mapped", "read") and "the engine keeps" in fallback["reason"]


def test_a_forked_child_keeps_no_lease_of_a_tensor_whose_owner_is_gone(path: Path):
    one = mapped(path)
    [tensor] = one.leased.hand(0, partial(one._adapter.tensors, one._load, [0]))
    del one
    gc.collect()
    assert leases_on(path) == 1 and tensor.numel()
    ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(ready[1], b"x" if descriptors(path) == 0 else b"-")
        finally:
            os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"x", "the child has the descriptors"
        assert descriptors(path) == 1
    finally:
        os.waitpid(child, 0)
        for end in ready:
            os.close(end)
    del tensor
    left_nothing(path)


OVERLAY = """
import os, subprocess
from pathlib import Path
path, folder = Path(sys.argv[1]), Path(sys.argv[2])
for name in ("lower", "upper", "work", "merged"):
    (folder / name).mkdir()
os.link(path, folder / "lower" / path.name)
options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
mounted = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, folder / "merged"], check=False)
if mounted.returncode:
    print("no mount")
else:
    merged = folder / "merged" / path.name
    merged.read_bytes()
    try:
        here.mapped(merged)
    except here.NotMapped as why:
        print(why)
"""


def test_files_of_an_overlay_are_recorded(path: Path, tmp_path: Path):
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mounts here")
    said = in_a_process(OVERLAY, path, tmp_path, before=["unshare", "-m"])
    if said == "no mount\n":
        pytest.skip("no overlays here")
    assert "a lease on an overlay does not see" in said


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """Another place."""
    tensors = [Tensor(f"b{number}", "I32", (64, 33)) for number in range(3)]
    (tmp_path / "second").mkdir()
    found = synth.write_file(tmp_path / "second" / "model.safetensors", tensors)
    found.read_bytes()
    return found


@pytest.mark.parametrize("when", ["auto", "on", "off", None])
def test_a_deferred_place_behind_one_that_falls_back_is_watched(
    path: Path, second: Path, when: Any, monkeypatch: pytest.MonkeyPatch
):
    def refuse(self: Mapped, always: bool) -> str:
        return "not here"

    monkeypatch.setattr(Mapped, "_not_here", refuse)
    loads = Loads(torch.device("cpu"), None)
    loads.strict, loads.mapped = False, when
    expected = penstock.open(second).load()["b1"]
    into = torch.zeros(64, 33, dtype=torch.int32)

    def places() -> Iterator[tuple[str, torch.Tensor]]:
        yield from loads.fall_back("not read", Chosen([str(path)]), lambda: [("own", torch.ones(3))])
        yield from loads.weights(Chosen([str(second)]), None, lambda: None)

    read = None
    with loads.barrier():
        for name, tensor in places() if when is None else loads.begun(places()):
            if name == "b1":
                into.copy_(tensor)
                read = int(into.sum())
        loads.run(torch.nn.Module())
    assert read == int(expected.sum()) and torch.equal(into, expected)


def test_a_place_that_is_read_behind_a_mapped_one_is_in_a_report(path: Path, second: Path):
    loads = Loads(torch.device("cpu"), None)
    loads.mapped = "on"
    given: dict[str, Any] = {}

    def places() -> Iterator[tuple[str, torch.Tensor]]:
        yield from loads.weights(Chosen([str(path)]), None, lambda: None)
        with second.open("r+b"):
            yield from loads.weights(Chosen([str(second)]), None, lambda: None)

    with loads.barrier():
        for name, tensor in loads.begun(places()):
            given[name] = raw(tensor)
        first, read = loads.run(torch.nn.Module())
    assert len(given) == len(NAMES) + 3
    assert (first["given"], first["given_reason"], first["tensors"]) == ("mapped", "", len(NAMES))
    assert (read["given"], read["tensors"], read["nbytes"]) == ("read", 3, 3 * 64 * 33 * 4)
    assert str(second) in read["given_reason"] and "open for writing" in read["given_reason"]
    left_nothing(path)


def test_ranks_compare_a_place_that_is_read_behind_a_mapped_one(
    path: Path, second: Path, monkeypatch: pytest.MonkeyPatch
):
    compared: list[Any] = []
    monkeypatch.setattr(_engine, "compare", lambda group, checkpoint, options: compared.append(checkpoint.files))
    loads = Loads(torch.device("cpu"), None)
    loads.mapped = "on"
    assert len(list(loads.weights(Chosen([str(path)]), None, lambda: None))) == len(NAMES)
    loads.group = (torch.distributed.HashStore(), 0, 1)
    monkeypatch.setattr(Loads, "mapping", lambda *arguments: None)
    rest = loads.weights(Chosen([str(second)]), None, lambda: None)
    assert [list(files) for files in compared] == [[str(second)]]
    assert len(list(rest)) == 3
    loads.settle()


def test_all_are_closed_and_the_first_error_is_raised(path: Path):
    class Bad:
        def __init__(self, text: str) -> None:
            self.text = text

        def close(self) -> None:
            raise penstock.ChangedError(self.text)

    one = mapped(path)
    weights = one.weights()
    kept = [next(weights)]
    assert not one.leased.over
    several: list[Any] = [Bad("first"), Bad("second"), one]
    with pytest.raises(penstock.ChangedError, match="first"):
        close_all(several)
    assert one.leased.over and kept
    loads = Loads(torch.device("cpu"), None)
    loads.given = several
    with pytest.raises(RuntimeError, match="a shape"), loads.barrier():
        raise RuntimeError("a shape is wrong")
    with pytest.raises(penstock.ChangedError, match="first"), loads.barrier():
        pass


def test_only_vllm_takes_mapped():
    assert settings_of({"mapped": "on"}, "vLLM").mapped == "on"
    with pytest.raises(penstock.InvalidError, match="unknown options mapped; ") as caught:
        settings_of({"mapped": "on"}, "SGLang")
    assert " mapped," not in str(caught.value).partition(";")[2]


def test_what_is_never_mapped_has_a_reason(path: Path):
    for device, chosen, why in (
        ("meta", Chosen([str(path)]), "the parameters are on meta"),
        ("cpu", Chosen([str(path)], object()), "on a server"),  # type: ignore[arg-type]
    ):
        loads = Loads(torch.device(device), None)
        loads.mapped = "on"
        assert loads.mapping(chosen, penstock.open(path), None) is None
        assert why in loads.why


def test_a_generator_that_is_primed_ends_though_nobody_asks_it():
    done: list[str] = []

    def generator() -> Iterator[Any]:
        done.append("held")
        try:
            yield PRIMED
            yield 1
        finally:
            done.append("let go")

    one = primed(generator())
    assert done == ["held"]
    del one
    assert done == ["held", "let go"]
    assert list(primed(generator())) == [1]
