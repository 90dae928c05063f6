"""Every byte, on every way into GPU memory, compared with a reader that shares nothing with penstock."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.synthetic import synth

from . import checkpoints
from .checkpoints import MIB, NAMES, content, same
from .gpus import Gpu

ROUTES = ["auto", "buffered", "uring_buffered", "direct", "uring", "threads"]
Sources = Callable[[str], Path]
Contents = Callable[[str], dict[str, bytes]]

#: Names of fallbacks that concern the GPU. There may be none of these; other interfaces may be missing.
ABOUT_THE_GPU = ("staging memory",)


def well(report: Any) -> None:
    """No fallback on the way from staging memory to the device."""
    lost = [fallback for fallback in report.fallbacks if fallback["to"].endswith(ABOUT_THE_GPU)]
    assert lost == [], lost


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("io", ROUTES)
def test_cold(gpu: Gpu, sources: Sources, contents: Contents, io: str, name: str) -> None:
    opened = penstock.open(sources(name))
    checkpoints.evict(sources(name))
    tensors = opened.load(gpu.device(), options={"io": io}, progress=False)
    same(gpu, tensors, contents(name))
    well(opened.last_report)


@pytest.mark.parametrize("name", NAMES)
def test_warm_and_twice(gpu: Gpu, sources: Sources, contents: Contents, name: str) -> None:
    opened = penstock.open(sources(name))
    first = opened.load(gpu.device(), progress=False)
    second = opened.load(gpu.device(), progress=False)
    well(opened.last_report)
    same(gpu, first, contents(name))
    same(gpu, second, contents(name))


@pytest.mark.parametrize("name", ["gpt2", "crooked", "sharded"])
@pytest.mark.parametrize("options", [{"staging": "16MiB", "extent": "1MiB"}, {"staging": "512MiB", "extent": "16MiB"}])
def test_little_and_much_staging_memory(
    gpu: Gpu, sources: Sources, contents: Contents, name: str, options: dict[str, str]
) -> None:
    opened = penstock.open(sources(name))
    same(gpu, opened.load(gpu.device(), options=options, progress=False), contents(name))
    well(opened.last_report)


@pytest.mark.parametrize("order", ["file", "layer"])
@pytest.mark.parametrize("name", NAMES)
def test_streamed(gpu: Gpu, sources: Sources, contents: Contents, name: str, order: Any) -> None:
    expected, seen = contents(name), []
    for key, tensor in penstock.open(sources(name)).stream(gpu.device(), order=order, window="16MiB", progress=False):
        assert gpu.raw(tensor) == expected[key], key
        seen.append(key)
        del tensor
    assert sorted(seen) == sorted(expected)


def test_streamed_and_kept(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    kept = dict(penstock.open(sources("large")).stream(gpu.device(), window="10MiB", progress=False))
    again = penstock.open(sources("large")).load(gpu.device(), progress=False)
    same(gpu, kept, contents("large"))
    same(gpu, again, contents("large"))


@pytest.mark.parametrize("name", NAMES)
def test_into_parameters_that_queued_work_writes_to(gpu: Gpu, sources: Sources, contents: Contents, name: str) -> None:
    opened = penstock.open(sources(name))
    like = opened.load("cpu", progress=False)
    # Each of many would cost its while
    to = {
        key: gpu.busy_memory(tuple(tensor.shape), tensor.dtype)
        if i < 20
        else gpu.torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=gpu.device())
        for i, (key, tensor) in enumerate(like.items())
    }
    well(opened.load_into(to, progress=False))
    same(gpu, to, contents(name))


def test_into_a_transposed_parameter(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    opened = penstock.open(sources("crooked"))
    like = opened.load("cpu", names=["columns"], progress=False)["columns"]
    to = gpu.busy_memory((like.shape[1], like.shape[0]), like.dtype).t()
    opened.load_into({"columns": to}, strict=False, progress=False)
    same(gpu, {"columns": to}, {"columns": contents("crooked")["columns"]})


def test_into_parameters_that_begin_at_odd_addresses(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    opened = penstock.open(sources("crooked"))
    like = opened.load("cpu", names=["u8", "i8", "bool"], progress=False)
    memory = gpu.busy_memory((4096,), gpu.torch.uint8)
    to, at = {}, 1
    for name, tensor in like.items():
        to[name] = memory[at : at + tensor.nbytes].view(tensor.dtype)
        at += tensor.nbytes + 2
    opened.load_into(to, strict=False, progress=False)
    same(gpu, to, {name: contents("crooked")[name] for name in to})


def test_every_dtype_and_shape_class(gpu: Gpu, folder: Path) -> None:
    source = synth.write_file(folder / "every.safetensors", synth.every_dtype())
    expected = content(source)
    names = [name for name in expected if not name.startswith("f6_") and name != "f4.hollow"]
    same(gpu, penstock.open(source).load(gpu.device(), names=names, progress=False), {n: expected[n] for n in names})
    same(gpu, penstock.open(source).load(gpu.device(), dtype="raw", progress=False), expected)


def test_slices_of_rows_and_columns(gpu: Gpu, sources: Sources) -> None:
    opened = penstock.open(sources("crooked"))
    whole = opened.load("cpu", names=["columns"], progress=False)["columns"]
    cuts: list[tuple[slice, ...]] = [
        (slice(3, 900), slice(None)),
        (slice(None), slice(512, 1024)),
        (slice(5, 6), slice(1, 1000)),
        (slice(7, 2000), slice(120, 126)),
        (slice(2047, 2048), slice(1023, 1024)),
    ]
    for cut in cuts:
        part = opened.load(gpu.device(), names=["columns"], slices={"columns": cut}, progress=False)["columns"]
        assert gpu.raw(part) == whole[cut].contiguous().numpy().tobytes(), cut


@pytest.mark.parametrize("rank", range(4))
def test_the_columns_of_one_rank(gpu: Gpu, sources: Sources, rank: int) -> None:
    opened = penstock.open(sources("gpt2"))
    whole = opened.load("cpu", progress=False)
    cuts = {
        name: (slice(None),) * (t.dim() - 1) + (slice(t.shape[-1] * rank // 4, t.shape[-1] * (rank + 1) // 4),)
        for name, t in whole.items()
    }
    part = opened.load(gpu.device(), slices=cuts, progress=False)
    wrong = [n for n, t in part.items() if gpu.raw(t) != whole[n][cuts[n]].contiguous().numpy().tobytes()]
    assert wrong == []


def test_safe_open_with_slices_and_steps(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    expected = contents("crooked")
    with penstock.safe_open(sources("crooked"), framework="pt", device=gpu.device()) as file:
        for name in ("f32", "columns", "scalar", "bool"):
            assert gpu.raw(file.get_tensor(name)) == expected[name], name
        whole = penstock.open(sources("crooked")).load("cpu", names=["columns"], progress=False)["columns"]
        part = file.get_slice("columns")
        for cut in ((slice(0, 2048, 8), slice(0, 7)), (slice(9, 10), slice(None)), (3, slice(1, 900))):
            assert gpu.raw(part[cut]) == whole[cut].contiguous().numpy().tobytes(), cut


def test_load_file(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    same(gpu, penstock.load_file(sources("crooked"), device=gpu.device()), contents("crooked"))


def test_cast_on_the_device(gpu: Gpu, sources: Sources) -> None:
    opened = penstock.open(sources("large"))
    whole = opened.load("cpu", progress=False)
    half = opened.load(gpu.device(), dtype="float16", options={"window": "20MiB"}, progress=False)
    gpu.synchronize()
    wrong = [name for name in whole if not gpu.torch.equal(half[name].cpu(), whole[name].half())]
    # Not a number is unequal to itself
    wrong = [n for n in wrong if not _equal_but_for_nan(gpu, half[n].cpu(), whole[n].half())]
    assert wrong == []


def _equal_but_for_nan(gpu: Gpu, one: Any, other: Any) -> bool:
    torch = gpu.torch
    return bool(torch.equal(torch.isnan(one), torch.isnan(other)) and torch.allclose(one, other, equal_nan=True))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_framework(gpu: Gpu, sources: Sources, contents: Contents, name: str) -> None:
    """The memory is penstock's own; torch takes it by way of DLPack."""
    opened = penstock.open(sources(name))
    loaded = opened.load(gpu.device(), framework="dlpack", progress=False)
    expected = contents(name)
    if gpu.fake:
        assert all(tensor.__dlpack_device__() == (2, 0) for tensor in loaded.values())
        return
    taken = {key: gpu.torch.from_dlpack(tensor) for key, tensor in loaded.items() if expected[key]}
    assert all(tensor.is_cuda for tensor in taken.values())
    del loaded
    gc.collect()
    same(gpu, taken, {key: expected[key] for key in taken})


def test_cupy_takes_it(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    cupy = pytest.importorskip("cupy")
    if gpu.fake:
        pytest.skip("cupy knows no fake driver")
    loaded = penstock.open(sources("gpt2")).load(gpu.device(), framework="dlpack", progress=False)
    for name, tensor in loaded.items():
        assert cupy.asnumpy(cupy.from_dlpack(tensor)).tobytes() == contents("gpt2")[name], name


def test_jax_takes_it(gpu: Gpu, sources: Sources, program: Callable[..., str]) -> None:
    """In a process of its own: JAX takes most of the device's memory unless it is told not to."""
    jax = pytest.importorskip("jax")
    if gpu.fake:
        pytest.skip("JAX knows no fake driver")
    del jax
    said = program(
        """
import jax, numpy
if jax.default_backend() != "gpu":
    print("no GPU for JAX")
    raise SystemExit
expected = checkpoints.content(Path(sys.argv[1]))
loaded = penstock.open(sys.argv[1]).load(device, framework="jax", progress=False)
wrong = [name for name, array in loaded.items() if numpy.asarray(array).tobytes() != expected[name]]
assert not wrong, wrong[:5]
print({str(d) for array in loaded.values() for d in array.devices()})
""",
        sources("gpt2"),
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
    )
    if "no GPU" in said:
        pytest.skip("JAX here has no GPU")


def test_a_job_and_several_loads_at_once(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    options = {"staging": "16MiB", "extent": "2MiB"}
    jobs = {name: penstock.open(sources(name)).start(gpu.device(), options=options) for name in NAMES}
    large = penstock.open(sources("large"))
    stalled: Any = large.stream(gpu.device(), window="10MiB", options=options, progress=False)
    next(stalled)
    for name, job in jobs.items():
        same(gpu, job.result(), contents(name))
    stalled.close()


def test_every_gpu_in_turn_and_at_once(gpu: Gpu, sources: Sources, contents: Contents) -> None:
    if gpu.count < 2:
        pytest.skip("there is one GPU")
    for number in (0, 1, 0):
        opened = penstock.open(sources("sharded"))
        same(gpu, opened.load(gpu.device(number), progress=False), contents("sharded"))
        well(opened.last_report)
    opened_twice = [penstock.open(sources("sharded")) for _ in range(2)]
    jobs = [opened.start(gpu.device(number)) for number, opened in enumerate(opened_twice)]
    for job, opened in zip(jobs, opened_twice, strict=True):
        same(gpu, job.result(), contents("sharded"))
        well(opened.last_report)


def test_copies_go_no_further_than_staging_allows(gpu: Gpu, sources: Sources) -> None:
    opened = penstock.open(sources("large"))
    opened.load(gpu.device(), options={"staging": "32MiB"}, progress=False)
    report = opened.last_report
    assert report and report.peak_staging <= 32 * MIB
