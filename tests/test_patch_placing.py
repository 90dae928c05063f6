"""`patch` and transformers' ``device_map``: bytes go to the GPU meant, and what is made of them is a plain tensor.

The GPU is the fake driver. Its memory is host memory, and a tensor in it a CPU tensor to torch, which therefore cannot
move one there: ``Tensor.to`` is stood in for where the fake is named.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fakegpu
import penstock
import pytest
import torch
from conftest import Oracle, raw
from fakegpu import FakeTorch, fresh, torch_on
from penstock.bench import reference
from penstock.synthetic.synth import Tensor

safetensors = pytest.importorskip("safetensors")

pytestmark = pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)

WHERE = "transformers.core_model_loading"
GPUS = ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)]
LARGE = Tensor("large", "F32", (600, 512))
OTHER = Tensor("other", "BF16", (1024, 700))
SMALL = [Tensor(f"small.{i}", "F16", (3, 5)) for i in range(3)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    """The fake GPU, and a ``Tensor.to`` that knows it; ``moved`` has the shapes of what was not there before."""
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    to = torch.Tensor.to
    with fresh() as fake, torch_on(fake, monkeypatch) as side:
        side.moved = []

        def stand_in(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") not in GPUS:
                return to(tensor, *args, **kwargs)
            if not side.pool.contains(tensor.data_ptr()):
                side.moved.append(tuple(tensor.shape))
            return to(tensor, **{**kwargs, "device": None})

        monkeypatch.setattr(torch.Tensor, "to", stand_in)
        yield side


@pytest.fixture
def one(write: Callable[..., Path]) -> Path:
    return write(SMALL[0], LARGE, SMALL[1], OTHER, SMALL[2])


def spawn_materialize(
    thread_pool: ThreadPoolExecutor | None, tensor: Any, device: Any = None, dtype: Any = None, index: Any = ...
) -> Any:
    """What transformers' function of this name does, with any index."""

    def job() -> torch.Tensor:
        return tensor[index].to(device=device, dtype=dtype)

    return job if thread_pool is None else thread_pool.submit(job)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that stands where transformers has its own."""
    module = type(importlib)(WHERE)
    module.spawn_materialize = spawn_materialize
    monkeypatch.setattr(spawn_materialize, "__module__", WHERE)
    monkeypatch.setitem(importlib.import_module("sys").modules, WHERE, module)
    return module


@pytest.mark.parametrize("device", GPUS, ids=repr)
def test_a_slice_is_loaded_onto_the_gpu_that_it_is_moved_to(gpu, made_up, one, device):
    expected = Oracle(one)
    with penstock.patch():
        file = safetensors.safe_open(one, framework="pt", device="cpu", backend="mmap")
        before = gpu.fake.counter("bytes_h2d")
        tensor = made_up.spawn_materialize(None, file.get_slice("large"), device, torch.float32)()
        assert gpu.fake.counter("bytes_h2d") - before == len(expected["large"])
    assert gpu.moved == []
    assert type(tensor) is torch.Tensor
    assert gpu.pool.contains(tensor.data_ptr())
    assert gpu.fake.read(tensor.data_ptr(), tensor.nbytes) == expected["large"]
    del tensor
    file.__exit__(None, None, None)


def test_of_an_index_only_its_bytes_go_to_the_gpu(gpu, made_up, one):
    whole = torch.frombuffer(bytearray(Oracle(one)["other"]), dtype=torch.bfloat16).reshape(OTHER.shape)
    with penstock.patch():
        part = safetensors.safe_open(one, "pt").get_slice("other")
        before = gpu.fake.counter("bytes_h2d")
        tensor = made_up.spawn_materialize(None, part, "cuda:0", index=(slice(256, 512), slice(None)))()
        assert gpu.fake.counter("bytes_h2d") - before == 256 * 700 * 2
    assert gpu.moved == []
    assert gpu.fake.read(tensor.data_ptr(), tensor.nbytes) == raw(whole[256:512])


def test_a_cast_comes_after_the_way_to_the_gpu(gpu, made_up, one):
    with penstock.patch():
        part = safetensors.safe_open(one, "pt").get_slice("large")
        before = gpu.fake.counter("bytes_h2d")
        tensor = made_up.spawn_materialize(None, part, "cuda:0", torch.float16)()
        assert gpu.fake.counter("bytes_h2d") - before == len(Oracle(one)["large"])
        plain = made_up.spawn_materialize(None, part, "cpu", torch.float16)()
    assert (tensor.dtype, type(tensor)) == (torch.float16, torch.Tensor)
    assert raw(tensor) == raw(plain)
    assert gpu.moved == []


def test_small_tensors_are_mapped_together_without_the_large_ones_and_moved(gpu, made_up, one, reports, monkeypatch):
    monkeypatch.setattr(penstock._safe_open, "_SINGLES", 0)
    expected = Oracle(one)
    with penstock.patch():
        file = safetensors.safe_open(one, "pt")
        for tensor in SMALL:
            made = made_up.spawn_materialize(None, file.get_slice(tensor.name), "cuda:0")()
            assert raw(made) == expected[tensor.name]
        file.__exit__(None, None, None)
    assert gpu.moved == [tensor.shape for tensor in SMALL]
    assert [report.nbytes for report in reports] == [sum(len(expected[tensor.name]) for tensor in SMALL)]
    assert gpu.fake.counter("copies") == 0


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")], ids=repr)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_on_the_cpu_it_is_what_it_is_without(gpu, made_up, one, device, dtype):
    with penstock.patch():
        part = safetensors.safe_open(one, "pt").get_slice("large")
        tensor = made_up.spawn_materialize(None, part, device, dtype)()
        report = part._opened._checkpoint.last_report
    assert type(tensor) is torch.Tensor
    assert (tensor.dtype, tensor.device) == (dtype or torch.float32, torch.device("cpu"))
    assert report.nbytes == len(Oracle(one)["large"])
    assert [route for route, way in report.routes.items() if way["bytes"]] == ["mapped"]
    assert gpu.fake.counter("bytes_h2d") == 0


@pytest.mark.parametrize("device", ["mps", "xpu:0", "meta", "nonsense", 1.5], ids=repr)
def test_on_a_device_that_penstock_does_not_load_to_it_is_what_it_is_without(gpu, made_up, one, device):
    with penstock.patch():
        part = safetensors.safe_open(one, "pt").get_slice("large")
        job = made_up.spawn_materialize(None, part, device)
    assert {"tensor": part, "device": device}.items() <= inspect.getclosurevars(job).nonlocals.items()


def test_what_is_no_slice_of_penstock_is_left_alone(gpu, made_up, one):
    tensor = torch.ones(1 << 19)
    theirs = safetensors.safe_open(one, "pt").get_slice("large")
    with penstock.patch():
        assert made_up.spawn_materialize(None, tensor, "cuda:0")().data_ptr() == tensor.data_ptr()
        assert raw(made_up.spawn_materialize(None, theirs, "cuda:0")()) == Oracle(one)["large"]
        with pytest.raises(TypeError):
            made_up.spawn_materialize()
    assert gpu.fake.counter("bytes_h2d") == 0


def test_after_the_patch_slices_are_moved_by_torch(gpu, made_up, one):
    theirs = made_up.spawn_materialize
    with penstock.patch() as patched:
        assert f"{WHERE}.spawn_materialize" in patched.places
        kept = made_up.spawn_materialize
        part = safetensors.safe_open(one, "pt").get_slice("large")
    assert made_up.spawn_materialize is theirs
    assert raw(kept(None, part, "cuda:0")()) == Oracle(one)["large"]
    assert gpu.moved == [LARGE.shape]


def test_threads_load_at_once_and_the_handle_may_be_closed(gpu, made_up, one):
    expected = Oracle(one)
    started = threading.Barrier(4)
    with penstock.patch(), ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(started.wait)
        file = safetensors.safe_open(one, "pt")
        parts = [file.get_slice(name) for name in ("large", "other")] * 4
        jobs = [made_up.spawn_materialize(pool, part, "cuda:0") for part in parts]
        file.__exit__(None, None, None)
        tensors = [job.result() for job in jobs]
    for part, tensor in zip(parts, tensors, strict=True):
        assert gpu.fake.read(tensor.data_ptr(), tensor.nbytes) == expected[part._name]
    del tensor, tensors, jobs, pool


# transformers itself


def model_of(transformers: Any, kind: str) -> Any:
    """A model whose weights are large enough to travel by themselves."""
    tiny = {"hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    if kind == "text":
        config = transformers.LlamaConfig(**tiny, vocab_size=1024, intermediate_size=640, tie_word_embeddings=True)
        return transformers.LlamaForCausalLM(config)
    config = transformers.MixtralConfig(**tiny, vocab_size=64, intermediate_size=640, num_local_experts=3)
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["text", "moe"])
def test_transformers_fills_a_model_on_the_gpu(gpu, tmp_path, kind, dtype):
    """Its own function, with converters and threads, between slices and a model on the meta device."""
    transformers = pytest.importorskip("transformers")
    loading = importlib.import_module(WHERE)
    utils = importlib.import_module("transformers.modeling_utils")
    mapping = importlib.import_module("transformers.conversion_mapping")
    torch.manual_seed(0)
    original = model_of(transformers, kind)
    original.save_pretrained(tmp_path)
    expected = {name: to.to(dtype=dtype) for name, to in original.state_dict().items()}
    with torch.device("meta"):
        model = type(original)(original.config).to(dtype=dtype)
    with penstock.patch():
        file = utils.safe_open(tmp_path / "model.safetensors", framework="pt", device="cpu", backend="mmap")
        parts = {name: file.get_slice(name) for name in reference.entries_of(tmp_path)}
        direct = [name for name, part in parts.items() if part._info.nbytes >= penstock._patch._OWN_LOAD_BYTES]
        wanted = sum(len(Oracle(tmp_path)[name]) for name in direct)
        report, _ = loading.convert_and_load_state_dict_in_model(
            model=model,
            state_dict=parts,
            load_config=utils.LoadStateDictConfig(
                device_map={"": "cuda:0"},
                dtype=dtype,
                weight_mapping=mapping.get_model_conversion_mapping(model),
            ),
        )
        file.__exit__(None, None, None)
    assert not report.conversion_errors
    assert len(direct) >= 5
    assert gpu.fake.counter("bytes_h2d") == wanted
    assert len(gpu.moved) == len(file._checkpoint) - len(direct)
    loaded = {name: p for name, p in model.named_parameters(remove_duplicate=False) if not p.is_meta}
    assert loaded.keys() >= expected.keys() - {"lm_head.weight"}
    for name, parameter in loaded.items():
        assert type(parameter) is torch.nn.Parameter, name
        assert type(parameter.data) is torch.Tensor, name
        assert (parameter.dtype, raw(parameter)) == (dtype, raw(expected[name])), name
    if dtype == torch.float32 and kind == "text":  # no cast and no conversion: they are what was loaded
        assert all(gpu.pool.contains(p.data_ptr()) for p in loaded.values() if p.nbytes >= 1 << 20)
    del model, loaded, parameter, report
