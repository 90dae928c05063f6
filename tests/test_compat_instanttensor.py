"""Programs written for InstantTensor, on `penstock.compat.instanttensor`: on the CPU, and on a GPU that is fakegpu.

InstantTensor loads to GPUs only. Where it is installed and there is one, the programs run on it as well.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import fakegpu
import ordeal
import penstock
import pytest
import torch
from conftest import Oracle, raw
from fakegpu import FakeTorch, fresh, torch_on
from penstock._device import parse_device
from penstock.compat import _instanttensor_budget
from penstock.compat import instanttensor as face
from penstock.compat._instanttensor_backends import candidates
from penstock.compat.instanttensor import Backend, BackendPolicy
from penstock.synthetic.synth import Tensor

MIB = 1 << 20
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]

Write = Callable[..., Path]


class Place:
    """Where a program loads to, with which module, and how to see what arrived there."""

    def __init__(self, module: ModuleType, device: Any, gpu: FakeTorch | None = None) -> None:
        self.module, self.device, self.gpu = module, device, gpu

    def same(self, tensors: Mapping[str, torch.Tensor], files: Oracle, names: list[str] | None = None) -> None:
        """Asserts that these tensors, all of the files' or those named, have their bytes."""
        assert sorted(tensors) == sorted(files.entries if names is None else names)
        for name, tensor in tensors.items():
            assert tuple(tensor.shape) == files.shape(name)
            if self.gpu is None:
                assert raw(tensor) == files[name], name
            else:
                assert self.gpu.fake.read(tensor.data_ptr(), tensor.nbytes) == files[name], name

    def parameters(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Uninitialised tensors on the device."""
        if self.gpu is not None:
            return {name: self.gpu.destination(tensor) for name, tensor in like.items()}
        where = "cpu" if self.device == "cpu" else f"cuda:{self.device}"
        return {name: torch.empty_like(tensor, device=where) for name, tensor in like.items()}


@pytest.fixture(params=["cpu", "fakegpu", "instanttensor"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name in [name for name in os.environ if name.startswith("INSTANTTENSOR_")]:
        monkeypatch.delenv(name)
    if request.param == "cpu":
        yield Place(face, "cpu")
    elif request.param == "instanttensor":
        if not torch.cuda.is_available() or importlib.util.find_spec("instanttensor") is None:
            pytest.skip("InstantTensor wants a GPU")
        yield Place(importlib.import_module("instanttensor"), 0)
    else:
        if not fakegpu.LIBRARY:
            pytest.skip(fakegpu.NO_LIBRARY)
        monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
        with fresh() as fake, torch_on(fake, monkeypatch) as gpu:
            yield Place(face, 0, gpu)
            gc.collect()


@pytest.fixture
def files(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Oracle:
    """A checkpoint of two shards in the current directory, and model.safetensors."""
    monkeypatch.chdir(tmp_path)
    first = [Tensor("model.embed_tokens.weight", "BF16", (60, 16)), Tensor("model.layers.0.w", "F32", (33, 8))]
    second = [Tensor("model.layers.1.w", "F32", (33, 8)), Tensor("model.layers.10.b", "I64", (3,))]
    write(*first, name=FILES[0], metadata={"format": "pt", "made": "here"})
    write(*second, name=FILES[1], metadata={"format": "pt"}, seed=1)
    write(*first, *second, name="model.safetensors", seed=2)
    return Oracle([Path(file) for file in FILES])


def single() -> Oracle:
    return Oracle(Path("model.safetensors"))


# The programs of the README


def test_quick_start(place, files):
    tensors = {}
    with place.module.safe_open("model.safetensors", framework="pt", device=place.device) as f:
        for name, tensor in f.tensors():
            tensors[name] = tensor
    place.same(tensors, single())


def test_several_files(place, files):
    tensors = {}
    with place.module.safe_open(list(FILES), framework="pt", device=place.device) as f:
        for name, tensor in f.tensors():
            tensors[name] = tensor.clone() if place.gpu is None else tensor
    place.same(tensors, files)


def test_in_a_process_group(place, files):
    dist = torch.distributed
    dist.init_process_group(
        "nccl" if place.module is not face else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        group, tensors = dist.GroupMember.WORLD, {}
        with place.module.safe_open(list(FILES), framework="pt", device=place.device, process_group=group) as f:
            for name, tensor in f.tensors():
                tensors[name] = tensor
    finally:
        dist.destroy_process_group()
    place.same(tensors, files)


def test_selective_loading(place, files):
    patterns = ["model.embed_tokens.weight", "model.layers.1.*"]
    tensors = {}
    with place.module.safe_open(list(FILES), framework="pt", device=place.device, tensor_filter=patterns) as f:
        assert f.total_tensor_size == sum(len(files[name]) for name in f.keys())  # noqa: SIM118
        for name, tensor in f.tensors():
            tensors[name] = tensor
    place.same(tensors, files, ["model.embed_tokens.weight", "model.layers.1.w"])


@pytest.mark.parametrize(
    ("patterns", "mode", "names"),
    [
        (["*.w"], "glob", ["model.layers.0.w", "model.layers.1.w"]),
        (["model.layers.[0-9].?", "none"], "glob", ["model.layers.0.w", "model.layers.1.w"]),
        (["MODEL.*", "layers"], "glob", []),
        (["model.layers.0.w", "model.layers.1", "*"], "exact", ["model.layers.0.w"]),
        ([r"model\.layers\.\d+\..", "embed"], "regex", ["model.layers.0.w", "model.layers.1.w", "model.layers.10.b"]),
        ([], "glob", []),
        ([], "regex", []),
    ],
)
def test_how_names_are_matched(place, files, patterns, mode, names):
    opened = place.module.safe_open(
        list(FILES),
        framework="pt",
        device=place.device,
        load_now=False,
        tensor_filter=patterns,
        tensor_name_match_mode=mode,
    )
    assert opened.keys() == names
    if names:
        with opened as f:
            place.same(dict(f.tensors()), files, names)


def test_into_parameters_that_exist(place, files):
    model = place.parameters(penstock.open("model.safetensors").load("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with place.module.safe_open(list(FILES), framework="pt", device=place.device, copy=False) as f:
            for name, tensor in f.tensors():
                if place.gpu is not None:  # what torch's allocator has queued there
                    place.gpu.fake.control("drain")
                model[name].copy_(tensor)
    place.same(model, files)


def test_backends(place, files):
    backends, policies = place.module.Backend, place.module.BackendPolicy
    for backend in (
        backends.URING,
        backends.AIO,
        backends.MMAP,
        [backends.URING, backends.AIO],
        policies.BUFFERED,
        [policies.BUFFERED, backends.AIO_BUFFERED],
    ):
        with place.module.safe_open("model.safetensors", framework="pt", device=place.device, backend=backend) as f:
            place.same(dict(f.tensors()), single())
    assert [backend.name for backend in backends] == [backend.name for backend in Backend]
    assert [backend.value for backend in backends] == [backend.value for backend in Backend]
    assert [policy.value for policy in policies] == [policy.value for policy in BackendPolicy]


@pytest.mark.parametrize("named", ["URING,AIO", "BUFFERED", " MMAP "])
def test_a_backend_by_environment(place, files, monkeypatch, named):
    monkeypatch.setenv("INSTANTTENSOR_BACKEND", named)
    with place.module.safe_open("model.safetensors", framework="pt", device=place.device) as f:
        place.same(dict(f.tensors()), single())


def test_destinations_made_of_the_metadata_alone(place, files):
    opened = place.module.safe_open(list(FILES), framework="pt", device=place.device, load_now=False)
    assert opened.keys() == opened.offset_keys() == list(files.entries)
    described = {name: opened.get_tensor_metadata(name) for name in opened.keys()}  # noqa: SIM118
    assert described["model.layers.0.w"] == (torch.float32, torch.Size([33, 8]))
    assert described["model.embed_tokens.weight"] == (torch.bfloat16, torch.Size([60, 16]))
    assert opened.metadata()["format"] == "pt"
    with opened as f:
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in f.tensors()} == described


def test_tensors_stay_when_the_context_is_left(place, files):
    with place.module.safe_open("model.safetensors", framework="pt", device=place.device) as f:
        kept = list(f.tensors())
        assert (f.total_tensor_size, f.buffer_size > 0) == (sum(len(files[name]) for name in files.entries), True)
    assert len({tensor.data_ptr() for _, tensor in kept}) == len(kept)
    place.same(dict(kept), single())
    with pytest.raises(RuntimeError, match="context exited"):
        next(iter(f.tensors()))


def test_a_small_buffer_changes_nothing(place, files):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with place.module.safe_open(
            "model.safetensors", framework="pt", device=place.device, copy=True, buffer_size=64 << 10, chunk_size=4096
        ) as f:
            place.same(dict(f.tensors()), single())


def test_a_loop_may_be_left_in_the_middle(place, files):
    with place.module.safe_open(list(FILES), framework="pt", device=place.device) as f:
        for _ in f.tensors():
            break
    with (
        pytest.raises(ZeroDivisionError),
        place.module.safe_open(list(FILES), framework="pt", device=place.device) as f,
    ):
        for _ in f.tensors():
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"framework": "np"}, ValueError),
        ({"backend": "URING"}, TypeError),
        ({"backend": []}, ValueError),
        ({"tensor_filter": "model.*"}, TypeError),
        ({"tensor_filter": ["("], "tensor_name_match_mode": "regex"}, ValueError),
        ({"tensor_filter": ["x"], "tensor_name_match_mode": "prefix"}, ValueError),
    ],
)
def test_nonsense_is_refused(place, files, settings, error):
    with pytest.raises(error):
        place.module.safe_open("model.safetensors", **{"framework": "pt", "device": place.device, **settings})


# On this side alone


@pytest.fixture
def held(write: Write) -> Path:
    """24 tensors of 400,000 bytes: 9.6 MB."""
    return write(*(Tensor(f"layers.{i}.weight", "F32", (1000, 100)) for i in range(24)), name="held.safetensors")


def load(path: Path, **settings: Any) -> penstock.Report:
    """The report of loading it all to the CPU."""
    with face.safe_open(path, "pt", "cpu", **settings) as f:
        loaded = dict(f.tensors())
        report = f._checkpoint.last_report
    Oracle(path).same(loaded)
    assert report is not None
    return report


def routes(report: penstock.Report) -> set[str]:
    return {route for route, way in report.routes.items() if way["bytes"]}


@pytest.mark.parametrize(
    ("given", "io", "taken"),
    [
        ({"backend": Backend.URING}, "uring", "direct"),
        ({"backend": Backend.AIO}, "threads", "direct"),
        ({"backend": [Backend.CUFILE, Backend.AIO, Backend.MMAP]}, "threads", "direct"),
        ({"backend": [Backend.AIO, Backend.MMAP]}, "threads", "direct"),
        ({"backend": Backend.URING_BUFFERED}, "uring_buffered", "buffered"),
        ({"backend": Backend.AIO_BUFFERED}, "buffered", "buffered"),
        ({"backend": Backend.MMAP}, "buffered", "buffered"),
        ({"backend": BackendPolicy.BUFFERED}, "uring_buffered", "buffered"),
        ({"backend": Backend.MMAP, "copy": False}, "mapped", "mapped"),
        ({"copy": False}, None, "mapped"),
    ],
)
def test_a_backend_is_a_route(held, given, io, taken):
    assert settings(held, **given).get("io") == io
    penstock._core.warm(str(held))
    report = load(held, **given)
    # What is granted at opening may still be refused in the middle
    assert routes(report) == {taken} or (taken == "direct" and report.fallbacks)


def test_the_environment_is_asked_where_an_argument_is_missing(held, monkeypatch):
    monkeypatch.setenv("INSTANTTENSOR_BACKEND", "URING, AIO")
    assert settings(held)["io"] == "uring"
    assert settings(held, backend=Backend.AIO_BUFFERED)["io"] == "buffered"


@pytest.fixture
def refused(held, torch_python) -> Callable[..., str]:
    """What a program prints to which the kernel refuses these: refused(refusals, backends, path, **environment)."""

    def run(refusals: str, backends: str, path: Path = held, **environment: str) -> str:
        code = f"""
import sys
from refusals import *
from penstock.compat.instanttensor import Backend, BackendPolicy, safe_open
refuse({refusals})
try:
    with safe_open(sys.argv[1], "pt", "cpu", backend={backends}) as f:
        print(f._settings["io"], len(dict(f.tensors())))
except RuntimeError as error:
    print(type(error).__name__, error)
"""
        here = str(Path(__file__).parent)
        done = torch_python(
            code, path, **{"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]), **environment}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def needs(path: Path, *interfaces: str) -> None:
    found = penstock._core.probe(str(path))
    for name in interfaces:
        if found[name] is not None:
            pytest.skip(f"{name} is refused here: {found[name]}")


@pytest.mark.parametrize(
    ("refusals", "backends", "taken"),
    [
        ("NO_URING", "[Backend.URING, Backend.AIO]", "threads 24"),
        ("NO_URING, NO_DIRECT", "[Backend.URING, Backend.AIO, Backend.URING_BUFFERED, Backend.MMAP]", "buffered 24"),
        ("NO_DIRECT", "[Backend.CUFILE, Backend.AIO, Backend.URING_BUFFERED]", "uring_buffered 24"),
        ("NO_URING", "(Backend.URING_BUFFERED, BackendPolicy.BUFFERED)", "buffered 24"),
        ("NO_DIRECT", "[Backend.AIO, BackendPolicy.BUFFERED]", "uring_buffered 24"),
        ("NO_DIRECT", "[Backend.URING_BUFFERED, Backend.AIO]", "uring_buffered 24"),
    ],
)
def test_the_first_backend_of_a_list_that_is_granted_is_used(held, refused, refusals, backends, taken):
    needs(held, "io_uring")
    assert refused(refusals, backends) == taken


def test_the_backends_of_the_variable_are_tried_in_order_too(held, refused):
    assert refused("NO_URING", "None", INSTANTTENSOR_BACKEND="URING,AIO") == "threads 24"


def test_backends_that_are_all_refused_are_one_error_with_each_reason(held, refused):
    said = refused("NO_URING, NO_DIRECT", "[Backend.URING, Backend.URING_BUFFERED, Backend.AIO]")
    kind, said = said.split(" ", 1)
    assert kind == "UnsupportedError"
    reasons = said[said.index("(") + 1 : said.rindex(")")].split("; ")
    assert [reason.split(": ")[0] for reason in reasons] == ["URING", "URING_BUFFERED", "AIO"]
    assert all("io_uring" in reason and "not permitted" in reason for reason in reasons[:2])
    assert "refuses O_DIRECT (Invalid argument)" in reasons[2]
    assert str(held) in said and "AIO_BUFFERED and MMAP work everywhere" in said


def test_cufile_is_refused_with_its_reason_in_the_order_of_the_list(held, monkeypatch):
    """InstantTensor refuses CUFILE where there is no cuFile, and Penstock has no GPUDirect Storage anywhere."""
    for given in ({"backend": Backend.CUFILE}, {}):
        if not given:
            monkeypatch.setenv("INSTANTTENSOR_BACKEND", "CUFILE")
        with pytest.raises(RuntimeError, match="CUFILE: cuFile is not available: Penstock has no GPUDirect Storage"):
            face.safe_open(held, "pt", "cpu", **given)
    assert settings(held, backend=[Backend.CUFILE, Backend.MMAP, Backend.AIO])["io"] == "buffered"


def test_a_policy_is_the_list_that_instanttensor_has_for_it():
    expected = [Backend.AIO, Backend.URING_BUFFERED, Backend.MMAP]
    assert list(candidates([Backend.AIO, BackendPolicy.BUFFERED])) == expected


def test_one_backend_that_is_refused_is_an_error_as_in_a_list(held, refused):
    assert refused("NO_URING", "Backend.URING").startswith("UnsupportedError")


def test_a_file_system_without_o_direct_rejects_the_backends_that_need_it(held, refused, tmp_path_factory):
    said = refused("NO_DIRECT", "[Backend.AIO, Backend.URING]")
    assert said.count("refuses O_DIRECT (Invalid argument)") == 2 and said.count(str(held)) == 2
    memory = Path("/dev/shm") / f"{tmp_path_factory.mktemp('held').name}-{os.getpid()}.safetensors"
    try:
        memory.write_bytes(held.read_bytes())
    except OSError as error:
        pytest.skip(f"no tmpfs to write to: {error}")
    try:
        with pytest.raises(RuntimeError, match=f"AIO: the file system of {memory}, tmpfs, refuses O_DIRECT"):
            face.safe_open(str(memory), "pt", "cpu", backend=Backend.AIO)
        assert settings(memory, backend=[Backend.AIO, Backend.MMAP])["io"] == "buffered"
    finally:
        memory.unlink()


def settings(path: Path, device: Any = "cpu", **given: Any) -> dict[str, Any]:
    return face.safe_open(path, "pt", device, load_now=False, **given)._settings


def test_settings_reach_the_engine(held, monkeypatch):
    assert settings(held) == {"copy": True}
    assert settings(held, copy=False) == {}
    assert settings(held, 0, backend=Backend.MMAP, copy=False) == {"io": "buffered"}
    assert settings(held, 0) == settings(held, "cuda:3") == settings(held, torch.device("cuda")) == {}
    assert settings(held, copy=False, buffer_size=5 << 30) == {"window": 5 << 30}
    assert settings(held, copy=False, buffer_size=100 * MIB) == {"window": 100 * MIB, "staging": 100 * MIB}
    assert settings(held, copy=False, buffer_size=1) == {"window": 1, "staging": 8 * MIB}
    assert settings(held, copy=False, chunk_size=5000) == {"extent": 8192}
    assert settings(held, copy=False, chunk_size=512 * MIB) == {"extent": 512 * MIB, "staging": 1024 * MIB}
    assert settings(held, copy=False, concurrency=3, io_depth=9) == {"threads": 3, "depth": 9}
    assert settings(held, copy=False, concurrency=0) == {}
    for name, text in (("BUFFER_SIZE", "20971520"), ("CHUNK_SIZE", "4096"), ("CONCURRENCY", "2"), ("IO_DEPTH", "7")):
        monkeypatch.setenv(f"INSTANTTENSOR_{name}", text)
    by_name = {"window": 20 * MIB, "staging": 20 * MIB, "extent": 4096, "threads": 2, "depth": 7}
    assert settings(held, copy=False) == by_name
    assert settings(held, copy=False, io_depth=1) == {**by_name, "depth": 1}
    assert face.safe_open(held, "pt", "cpu").buffer_size == 20 * MIB
    assert load(held).tensors == 24


def test_max_free_mem_usage_bounds_what_is_read_ahead(held, monkeypatch):
    free = 200 * MIB
    monkeypatch.setattr(_instanttensor_budget, "_free_on", lambda device: free)
    assert settings(held, copy=False, max_free_mem_usage=0.5) == {"window": 100 * MIB, "staging": 100 * MIB}
    assert settings(held, copy=False, max_free_mem_usage=0.5, buffer_size=100 * MIB)["window"] == 100 * MIB
    opened = face.safe_open(held, "pt", "cpu", max_free_mem_usage=0.01)
    assert opened.buffer_size == 2 * MIB
    with opened as f:
        Oracle(held).same(dict(f.tensors()))
    monkeypatch.setenv("INSTANTTENSOR_MAX_FREE_MEM_USAGE", "0.25")
    assert face.safe_open(held, "pt", "cpu").buffer_size == 50 * MIB
    with pytest.raises(RuntimeError, match=r"0\.25 leaves 52428800 bytes of cpu .* a smaller buffer"):
        face.safe_open(held, "pt", "cpu", buffer_size=50 * MIB + 1)
    free = 0
    with pytest.raises(RuntimeError, match="leaves 0 bytes"):
        face.safe_open(held, "pt", "cpu")
    free = 1 << 40
    assert settings(held, copy=False) == {}


def test_max_free_mem_usage_never_shrinks_the_window_of_one_rank_of_several(monkeypatch):
    monkeypatch.setattr(_instanttensor_budget, "_free_on", lambda device: 100)
    here = parse_device("cpu")
    assert _instanttensor_budget.window_within(0.5, here, 50, False, True) == 50
    with pytest.raises(RuntimeError, match="the same smaller buffer_size to all ranks"):
        _instanttensor_budget.window_within(0.5, here, 51, False, True)


def test_what_is_free_is_asked_of_the_device(held, monkeypatch):
    assert _instanttensor_budget._free_on(parse_device("cpu")) > MIB
    if not fakegpu.LIBRARY:
        pytest.skip(fakegpu.NO_LIBRARY)
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    with fresh() as fake, torch_on(fake, monkeypatch, devices=2) as gpu:
        gpu.cuda.mem_get_info = lambda index: ([7, 6][index] * MIB, 8 * MIB)
        opened = face.safe_open(held, "pt", "cuda:1", max_free_mem_usage=0.5, load_now=False)
        assert opened.buffer_size == 3 * MIB


@pytest.mark.parametrize(
    "name", ["BUFFER_SIZE", "CHUNK_SIZE", "CONCURRENCY", "IO_DEPTH", "MAX_FREE_MEM_USAGE", "BACKEND"]
)
def test_a_variable_that_makes_no_sense_is_refused(held, monkeypatch, name):
    for wrong in ("-1", "many", ""):
        monkeypatch.setenv(f"INSTANTTENSOR_{name}", wrong)
        with pytest.raises(penstock.InvalidError, match=rf"(?i){name}"):
            face.safe_open(held, "pt", "cpu")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"framework": "jax"}, '"pt"'),
        ({"buffer_size": 0}, "buffer_size=0"),
        ({"buffer_size": 1.5}, "buffer_size=1.5"),
        ({"chunk_size": 2 << 30}, "1 GiB"),
        ({"io_depth": 0}, "io_depth=0"),
        ({"io_depth": 1025}, "io_depth=1025: give None or a whole number of at least 1 and at most 1024"),
        ({"concurrency": -1}, "concurrency=-1"),
        ({"concurrency": True}, "concurrency=True"),
        ({"max_free_mem_usage": 1.5}, "max_free_mem_usage=1.5"),
        ({"max_free_mem_usage": 0}, "max_free_mem_usage=0"),
        ({"max_free_mem_usage": float("nan")}, "max_free_mem_usage=nan"),
        ({"max_free_mem_usage": True}, "max_free_mem_usage=True"),
        ({"backend": []}, "URING_BUFFERED"),
        ({"tensor_name_match_mode": "prefix"}, "glob, exact, regex"),
        ({"process_group": "world"}, "process_group='world'"),
    ],
)
def test_what_makes_sense_is_listed(held, given, said):
    with pytest.raises(ValueError) as caught:
        face.safe_open(held, **{"framework": "pt", "device": "cpu", **given})
    assert said in str(caught.value)


class Ranks:
    def size(self) -> int:
        return 4

    def rank(self) -> int:
        return 1


def test_a_group_that_this_process_is_not_in_is_refused(held):
    """Real groups of several ranks are in `test_compat_groups.py`."""
    with pytest.raises(penstock.InvalidError, match="not a member"):
        face.safe_open(held, "pt", "cpu", Ranks())


def test_files_that_are_not_there_or_not_whole(held, tmp_path):
    with pytest.raises(FileNotFoundError):
        face.safe_open(str(tmp_path / "none.safetensors"), framework="pt", device="cpu")
    held.write_bytes(held.read_bytes()[:-1])
    with pytest.raises(penstock.TruncatedError):
        face.safe_open(held, "pt", "cpu")


def test_a_gpu_that_is_not_there_is_an_error_at_once_unless_nothing_is_to_be_loaded_now(held, torch_python):
    code = """
import sys
from penstock.compat.instanttensor import safe_open
print(len(safe_open(sys.argv[1], "pt", 0, load_now=False).keys()))
try:
    safe_open(sys.argv[1], "pt", 0)
except RuntimeError as error:
    print(type(error).__name__)
"""
    run = torch_python(code, held, PENSTOCK_GPU_LIBRARY="cuda:/nowhere.so")
    assert run.stdout.split() == ["24", "DeviceError"], run.stderr


def test_it_may_be_iterated_again_and_side_by_side(held):
    with face.safe_open(held, "pt", "cpu") as f:
        pairs = list(zip(f.tensors(), f.tensors(), strict=True))
        assert len(pairs) == 24
        assert all(raw(a) == raw(b) and a.data_ptr() != b.data_ptr() for (_, a), (_, b) in pairs)


def test_leaving_the_context_ends_what_is_running_with_an_error(held):
    with face.safe_open(held, "pt", "cpu", buffer_size=MIB) as f:
        tensors = f.tensors()
        next(tensors)
    assert not ordeal.threads(2.0)
    with pytest.raises(RuntimeError, match="context exited") as caught:
        next(tensors)
    assert isinstance(caught.value, penstock.PenstockError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    for ask in (f.tensors, lambda: f.get_tensor("layers.0.weight"), f.__enter__):
        with pytest.raises(RuntimeError, match="context exited"):
            ask()


@pytest.mark.parametrize("order", ["forward", "backward", "ends", "repeated", "skipping"])
def test_tensors_by_name_as_before_0_2(write, order):
    """24 tensors, and empty ones between them, which come whenever they like."""
    tensors = [Tensor(f"t{i}", "F32", (0,) if i % 5 == 2 else (100, i + 1)) for i in range(24)]
    held = write(*tensors)
    contents = Oracle(held)
    names = penstock.open(held).keys()
    asked = {
        "forward": names,
        "backward": names[::-1],
        "ends": [names[0], *names[:6], names[-1], *names[6:9]],
        "repeated": [name for name in names for _ in range(2)],
        "skipping": [*names[:7], *names[9:]],
    }[order]
    with face.safe_open(held, "pt", "cpu") as f:
        for name in asked:
            tensor = f.get_tensor(name)
            assert len(f._running) <= 1
            assert (raw(tensor), tuple(tensor.shape)) == (contents[name], contents.shape(name))
        assert bool(f._running) == (order == "forward"), "what is read ahead is let go of by the first one out of order"
        with pytest.raises(KeyError, match="none"):
            f.get_tensor("none")
        with pytest.raises(KeyError):
            f.get_tensor_metadata("none")


@pytest.mark.parametrize("empty", [0, 5])
def test_tensors_by_name_in_order_are_one_load(write, monkeypatch, empty):
    held = write(*(Tensor(f"t{i}", "F32", (100 if i > 2 + empty else 0 if i > 2 else 7,)) for i in range(24)))
    loads = []
    real = penstock.Checkpoint.load
    monkeypatch.setattr(penstock.Checkpoint, "load", lambda self, *a, **k: loads.append(a) or real(self, *a, **k))
    with face.safe_open(held, "pt", "cpu") as f:
        kept = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    Oracle(held).same(kept)
    assert len(loads) == 2 + empty


def test_what_the_filter_leaves_out_is_not_there_and_not_read(held):
    with face.safe_open(held, "pt", "cpu", tensor_filter=["layers.7.*"]) as f:
        assert (f.keys(), f.total_tensor_size) == (["layers.7.weight"], 400_000)
        [(name, _)] = f.tensors()
        report = f._checkpoint.last_report
        assert (name, report.nbytes) == ("layers.7.weight", 400_000)
        for ask in (f.get_tensor, f.get_tensor_metadata):
            with pytest.raises(KeyError):
                ask("layers.8.weight")


def test_a_copy_does_not_depend_on_the_file(held):
    contents = {name: Oracle(held)[name] for name in Oracle(held).entries}
    with face.safe_open(held, "pt", "cpu") as f:
        kept = dict(f.tensors())
    held.write_bytes(b"")  # in place, under the tensors
    assert {name: raw(tensor) for name, tensor in kept.items()} == contents


def test_every_dtype_as_its_metadata_says(every):
    names = [name for name in penstock.open(every) if not name.startswith("f6_") and name != "f4.hollow"]
    with face.safe_open(every, "pt", "cpu", tensor_filter=names, tensor_name_match_mode="exact") as f:
        for name, tensor in f.tensors():
            assert (tensor.dtype, tensor.shape) == f.get_tensor_metadata(name), name
        assert f.metadata() == penstock.open(every).metadata
    with face.safe_open(every, "pt", "cpu", load_now=False) as f:
        lacking = [name for name in f.keys() if name not in names]  # noqa: SIM118
        for name in lacking:
            with pytest.raises(penstock.UnsupportedError, match=name):
                f.get_tensor_metadata(name)
    assert {name[:2] for name in lacking} == {"f4", "f6"}
    with pytest.raises(penstock.UnsupportedError, match=r"f4\.hollow"):
        face.safe_open(every, "pt", "cpu")


def test_the_faces_import_neither_torch_nor_what_they_stand_for(python, small):
    code = """
import sys
from penstock.compat import fastsafetensors, instanttensor
opened = instanttensor.safe_open(sys.argv[1], "pt", "cpu", load_now=False)
loader = fastsafetensors.SafeTensorsFileLoader(fastsafetensors.SingleGroup(), "cpu")
loader.add_filenames({0: [sys.argv[1]]})
assert opened.keys() == loader.get_keys() and loader.get_shape("step") == []
print([m for m in ("torch", "numpy", "instanttensor", "fastsafetensors") if m in sys.modules])
"""
    run = python(code, small)
    assert run.stdout.strip() == "[]", run.stderr


def test_everything_that_is_public_is_documented():
    from penstock.compat import fastsafetensors

    for module in (face, fastsafetensors):
        for name in module.__all__:
            assert getattr(module, name).__doc__, name
