"""The parts of the benchmark that look at the machine: page cache, neighbours, limits, what a load left behind."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FAKEGPU
from penstock import _ceiling
from penstock.bench import ceilings, checkpoints, child, contestants, page_cache, predecessor, reference
from penstock.bench.child import Order, gathered
from penstock.bench.contestants import CONTESTANTS, named
from penstock.bench.forkserver import Forkserver
from penstock.bench.job import Job
from penstock.bench.memory_limit import MemoryLimit, NoMemoryLimit
from penstock.bench.neighbour import Neighbour, NeighbourEnded
from penstock.bench.process import LoadFailed, LoadProcess, Sampled, memory_of
from penstock.bench.rounds import rotated
from penstock.bench.verification import torch_dtype, touch, verify
from penstock.synthetic import synth
from penstock.synthetic.synth import Layout, Tensor

PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = [Tensor(f"{i}", dtype, (64, 1000)) for i, dtype in enumerate(["F32", "BF16", "I64", "F16", "F8_E4M3"])]
    return synth.write_file(tmp_path_factory.mktemp("parts") / "x.safetensors", tensors)


def loaded(file: Path) -> dict[str, torch.Tensor]:
    return {
        entry.name: torch.from_numpy(reference.raw(entry)).view(torch_dtype(entry.dtype)).reshape(entry.shape)
        for entry in reference.entries_of(file).values()
    }


def order(file: Path, contestant: str, **more: object) -> Order:
    return Order(contestant, "cpu", [str(file)], str(file.parent), [str(file)], **more)  # type: ignore[arg-type]


def test_rounds_begin_one_further_on_each_time():
    assert [rotated(list("abc"), number) for number in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_half_of_a_file_can_leave_the_page_cache(tmp_path: Path):
    path = tmp_path / "half"
    path.write_bytes(os.urandom(32 << 20))
    page_cache.fill([path])
    page_cache.evict_second_half([path])
    resident = page_cache.resident_bytes([path])
    if resident is None:
        pytest.skip("this kernel does not tell what is resident")
    if _in_memory(tmp_path):
        pytest.skip("files lie in memory here")
    assert abs(resident - (16 << 20)) <= 2 << 20  # what lies in one huge page with the first half stays
    page_cache.evict([path])
    assert page_cache.resident_bytes([path]) == 0


def _in_memory(folder: Path) -> bool:
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=True)
    return kind.stdout.strip() in ("tmpfs", "ramfs")


def test_a_difference_of_one_bit_is_found(file: Path):
    state = loaded(file)
    found = verify(state, [file])
    assert found["verified_bytes"] == found["bytes"] == sum(e.nbytes for e in reference.entries_of(file).values())
    assert found["different"] == []
    flat = state["2"].view(torch.uint8).reshape(-1)
    flat[-1] ^= 1
    del state["3"]
    found = verify(state, [file])
    assert sorted(found["different"]) == ["2", "3"]
    assert found["verified_bytes"] < found["bytes"]


def test_casts_are_compared_with_torchs_own_and_what_cannot_be_cast_with_the_bytes(file: Path):
    state = {name: t.to(torch.float16) if name in "013" else t for name, t in loaded(file).items()}
    assert verify(state, [file], "F16")["different"] == []
    numbers = state["0"].nan_to_num().abs() < 1000
    state["0"][numbers] += 1
    state["1"] = state["1"].float()
    assert sorted(verify(state, [file], "F16")["different"]) == ["0", "1"]


def test_touching_reads_every_page_once():
    found = touch({"a": torch.ones(10 * PAGE, dtype=torch.uint8), "b": torch.ones(0)})
    assert found["touch_absent_bytes"] == 0
    assert {"touch_s", "touch_cpu_s", "touch_major_faults", "touch_minor_faults"} < set(found)


def test_tensors_are_touched_right_after_the_load_and_before_the_process_answers(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    done: list[str] = []

    def noted(what: str, result: object) -> Callable[..., Any]:
        def call(*_: object, **__: object) -> Any:
            done.append(what)
            return result

        return call

    one = dataclasses.replace(named("pread floor"), load=noted("load", {"a": torch.ones(PAGE, dtype=torch.uint8)}))
    monkeypatch.setattr(child, "named", lambda name: one)
    monkeypatch.setattr(child, "touch", noted("touch", {"touch_s": 7.0}))
    monkeypatch.setattr(child, "verify", noted("verify", {}))
    told = iter(["load", "verify", "load", "drop", "end"])
    said: list[dict[str, Any]] = []
    child.serve(order(file, "pread floor"), lambda: (done.append("hears"), next(told))[1], said.append)
    assert done == [*["hears", "load", "touch", "hears", "verify"], *["hears", "load", "touch", "hears"], "hears"]
    assert [run["touch_s"] for run in said if "load_s" in run] == [7.0, 7.0]


def test_the_second_start_waits_for_what_goes_on_in_the_background(file: Path, monkeypatch: pytest.MonkeyPatch):
    waited: list[str] = []
    fill = SimpleNamespace(seconds=0.5, nbytes=3, state="finished", reason="", wait=lambda: waited.append("waited"))

    def loads(job: Job) -> dict[str, Any]:
        contestants.note(job, {"cache_fill": fill})
        assert not waited
        return {"a": torch.ones(PAGE, dtype=torch.uint8)}

    monkeypatch.setattr(child, "named", lambda name: dataclasses.replace(named("pread floor"), load=loads))
    told = iter(["load", "settle", "end"])
    said: list[dict[str, Any]] = []
    child.serve(order(file, "pread floor"), lambda: next(told), said.append)
    assert waited == ["waited"]
    settled = {"fill_s": 0.5, "fill_bytes": 3, "fill_state": "finished", "fill_reason": ""}
    assert settled.items() <= said[-1].items()


def test_a_predecessor_maps_and_touches_the_files(tmp_path: Path):
    if _in_memory(tmp_path):
        pytest.skip("files lie in memory here")
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "empty"]
    for path, size in zip(paths, (3 * PAGE + 1, 8 << 20, 0), strict=True):
        path.write_bytes(os.urandom(size))
    page_cache.evict(paths)
    assert predecessor.run(predecessor.MAPPED, paths, 0) == {"kind": "mapped", "bytes": 3 * PAGE + 1 + (8 << 20)}
    assert page_cache.resident_bytes(paths) in (None, 4 * PAGE + (8 << 20))


def test_a_predecessor_that_fails_says_why(tmp_path: Path):
    with pytest.raises(predecessor.PredecessorFailed, match=r"No such file or directory: .*gone"):
        predecessor.run(predecessor.MAPPED, [tmp_path / "gone"], 0)


def test_a_predecessor_takes_private_memory_and_leaves_the_files_alone(tmp_path: Path):
    if _in_memory(tmp_path):
        pytest.skip("files lie in memory here")
    path = tmp_path / "a"
    path.write_bytes(os.urandom(8 << 20))
    page_cache.evict([path])
    assert predecessor.run(predecessor.FREED, [path], 32 << 20) == {"kind": "freed", "bytes": 32 << 20}
    assert page_cache.resident_bytes([path]) in (None, 0)


def test_bytes_that_a_mapping_left_on_the_disk_are_seen(tmp_path: Path):
    if _in_memory(tmp_path):
        pytest.skip("files lie in memory here")
    path = tmp_path / "mapped"
    path.write_bytes(os.urandom(8 << 20))
    page_cache.evict([path])
    state = {"a": torch.from_file(str(path), size=8 << 20, dtype=torch.uint8)}
    assert touch(state)["touch_absent_bytes"] > 7 << 20
    assert touch(state)["touch_absent_bytes"] == 0


@pytest.mark.machine
def test_the_time_of_the_first_tensor_is_taken_when_it_comes():
    def pairs():
        yield "a", 1
        time.sleep(0.05)
        yield "b", 2

    begun = time.perf_counter()
    state, first = gathered(pairs())
    assert state == {"a": 1, "b": 2}
    assert first - begun < 0.05 <= time.perf_counter() - begun
    assert gathered({"c": 3})[0] == {"c": 3}


@pytest.mark.machine
def test_a_peak_between_two_looks_at_a_process_is_seen():
    code = "import sys, time; sys.stdin.readline(); x = bytearray(50 << 20); time.sleep(0.3); del x; print(); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process, Sampled([lambda: memory_of(process.pid)]) as sampled:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        process.stdout.readline()
        process.communicate("\n")
    assert 45 << 20 < sampled.peaks["memory"] < 80 << 20


@pytest.mark.parametrize("what", ["memory", "disk"])
@pytest.mark.machine
def test_a_neighbour_works_until_it_is_stopped(what: str, file: Path):
    if what == "disk":
        try:
            os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            pytest.skip("no O_DIRECT here")
    with Neighbour(what, file) as neighbour:
        pid = neighbour._process.pid
        begun = _cpu_ticks(pid)
        deadline = time.monotonic() + 20
        while _cpu_ticks(pid) < begun + 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _cpu_ticks(pid) >= begun + 5
    assert neighbour._process.returncode is not None


def test_a_neighbour_that_ends_too_early_is_told(file: Path, tmp_path: Path):
    with pytest.raises(NeighbourEnded, match="while others were loading"), Neighbour("memory", file) as neighbour:
        neighbour._process.kill()
        neighbour._process.wait()
    with pytest.raises(NeighbourEnded), Neighbour("disk", tmp_path / "nothing") as neighbour:
        neighbour._process.wait()


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.machine
def test_a_limit_holds_what_it_is_told_to_hold():
    try:
        with MemoryLimit(40 << 20) as limit:
            code = "import sys; sys.stdin.readline(); x = bytearray(200 << 20); print(len(x))"
            pipe = subprocess.PIPE
            process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
            limit.hold(process.pid)
            said, _ = process.communicate("go\n")
            group = limit._group
    except NoMemoryLimit as error:
        pytest.skip(str(error))
    assert said == ""
    assert process.returncode == -9
    assert not group.exists()


def test_shards_are_spread_over_folders_and_read_from_there(tmp_path: Path):
    shards = tuple((Tensor(f"t{i}", "F32", (100,)),) for i in range(3))
    placed = checkpoints.place("x", Layout("x", shards), [tmp_path / "a", tmp_path / "b"])
    assert placed.folder is None
    assert [path.relative_to(tmp_path).parts[0] for path in placed.files] == ["a", "b", "a"]
    assert list(reference.entries_of(placed.files)) == ["t0", "t1", "t2"]
    assert len({path.read_bytes() for path in placed.files}) == 3
    again = checkpoints.place("x", Layout("x", shards), [tmp_path / "a", tmp_path / "b"])
    assert again == placed


@pytest.mark.parametrize(
    ("name", "nbytes", "whole", "tensors"),
    [("gpt2", 1e9, True, 160), ("llama-2-7b", 6e9, False, 83), ("qwen3-30b-a3b", 3e9, False, 18867)],
)
def test_models_are_cut_to_what_there_is_room_for(name: str, nbytes: float, whole: bool, tensors: int):
    layout = checkpoints.fitted(name, nbytes)
    assert layout.nbytes <= 1.02 * nbytes
    assert (layout.cut is None) is whole
    # With layers left out there are fewer tensors; where few layers fit, all tensors are thinner instead
    assert len(layout.tensors) == tensors if name != "llama-2-7b" else tensors < len(layout.tensors) < 323


def test_what_torch_saves_is_what_the_files_hold(file: Path):
    [saved] = named("torch.load").files([file])  # type: ignore[misc]
    state = torch.load(saved, weights_only=True)
    assert verify(state, [file])["different"] == []
    written = saved.stat().st_mtime_ns
    assert named("torch.load mmap").files([file]) == [saved]  # type: ignore[misc]
    assert saved.stat().st_mtime_ns == written


@pytest.mark.parametrize("name", [one.name for one in CONTESTANTS if one.module == "torch" or not one.rival])
def test_contestants_that_need_no_peer_load_every_byte(name: str, file: Path):
    one = named(name)
    if "cpu" not in one.devices:
        pytest.skip("loads to GPUs only")
    if one.semantics.startswith("served") or one.semantics == "kept":
        pytest.skip("loads from a web server: test_bench_served.py")
    if one.semantics == "sent":
        pytest.skip("saves to a bucket: tests/servers/test_bench_upload.py")
    files = one.files([file]) if one.files else [file]
    empty = {n: torch.zeros_like(t) for n, t in loaded(file).items()} if one.semantics == "into" else {}
    state, _ = gathered(one.load(Job(files, file.parent if files == [file] else None, "cpu", empty)))
    assert verify(state, [file])["different"] == []


def test_a_loader_that_is_not_installed_is_absent_with_its_reason(file: Path, torch_python: Any):
    code = """
import json, sys
sys.modules["safetensors"] = None
from penstock.bench.child import Order, serve
serve(Order(**json.loads(sys.argv[1])), lambda: "end", lambda said: print(json.dumps(said)))
"""
    asked = json.dumps(vars(order(file, "safetensors")))
    done = torch_python(code, asked)
    assert done.returncode == 0, done.stderr
    assert "safetensors" in json.loads(done.stdout)["absent"]


def test_a_load_that_fails_says_why_in_one_line(tmp_path: Path):
    missing = tmp_path / "missing.safetensors"
    with Forkserver() as server, LoadProcess(server, order(missing, "pread floor"), {}, 0) as process:
        assert process.hear() == {"ready": True}
        process.say("load")
        with pytest.raises(LoadFailed, match=r"missing\.safetensors"):
            process.hear()


def test_the_end_of_the_process_that_forks_is_a_failed_load_and_not_the_end_of_the_benchmark(file: Path):
    with Forkserver() as server:
        with (
            pytest.raises(LoadFailed, match="forked from"),
            LoadProcess(server, order(file, "pread floor"), {}, 0) as process,
        ):
            assert process.hear() == {"ready": True}
            assert server._process is not None
            server._process.kill()
            process.say("end")
        with pytest.raises(LoadFailed):
            LoadProcess(server, order(file, "pread floor"), {}, 0)


@pytest.mark.skipif(not FAKEGPU, reason="no fake GPU: `make test` builds one")
@pytest.mark.parametrize("measure", _ceiling.GPU)
def test_ceilings_of_a_gpu_are_measured_in_a_process_of_their_own(measure: str):
    # The fake driver is named by the environment, which the process inherits
    for settings in ceilings.settings(measure, quick=True):
        found = _ceiling.measure(measure, settings, [], device=0, nbytes=64 << 20)
        assert found["measure"] == measure
        assert found["bytes"] >= 64 << 20
        assert found["seconds"] > 0
    with pytest.raises(RuntimeError, match="no device 7"):
        _ceiling.measure(measure, {}, [], device=7, nbytes=1 << 20)


@pytest.mark.parametrize("measure", [*ceilings.COLD, *ceilings.WARM])
def test_every_setting_of_a_ceiling_can_be_measured(measure: str, file: Path):
    for settings in ceilings.settings(measure):
        try:
            assert _ceiling.measure(measure, settings, [file])["bytes"] == file.stat().st_size
        except RuntimeError as error:
            assert measure in ("direct", "place"), error  # a sandbox without io_uring, a file system without O_DIRECT
        if measure not in ("direct", "copy"):
            break  # they differ in numbers only


def test_the_offline_runner_says_which_wheels_it_lacks(tmp_path: Path):
    runner = Path(__file__).parents[1] / "tools" / "bench_offline.py"
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "numpy-2.0.0-py3-none-any.whl").touch()
    command = [sys.executable, runner, wheels, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "has no wheel of penstock" in done.stderr


def test_half_precision_on_the_reference_side_is_numpys_too():
    # The comparison of casts leans on torch; torch and numpy round alike
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    assert (torch.from_numpy(values).half().numpy() == values.astype(np.float16)).all()
