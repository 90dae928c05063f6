"""`patch` under real libraries: what they load and save with it is, bit for bit, what they do without.

Every model is made here, tiny and random. A library that is not installed is skipped.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import penstock
import pytest
import torch
from conftest import Oracle, raw
from patched import IDS, both_ways, files_in, library, llama, local, names_in, nbytes_in, read, same
from penstock.bench import reference

load_file = pytest.importorskip("safetensors.torch").load_file


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)


# accelerate, peft, huggingface_hub


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model of transformers in shards. After each of them accelerate collects garbage: of what is there now, none."""
    llama().save_pretrained(tmp_path / "model", max_shard_size="48KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    gc.collect()
    gc.freeze()
    return tmp_path / "model"


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}], ids=["none", "cpu"])
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_accelerate_loads_a_checkpoint_into_a_model(checkpoint, loaded, reports, monkeypatch, device_map, dtype):
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
    monkeypatch.setenv("PENSTOCK_COPY", "true")
    del reports[:]
    with penstock.patch():
        load()
    assert read(reports) == nbytes_in(checkpoint)


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


def test_peft_loads_an_adapter(checkpoint, loaded, reports, monkeypatch, tmp_path):
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
    monkeypatch.setenv("PENSTOCK_COPY", "true")
    del reports[:]
    with penstock.patch():
        load()
    assert sorted(loaded) == sorted([*names_in(tmp_path / "adapter"), *names_in(checkpoint)])
    assert read(reports) == nbytes_in(tmp_path / "adapter") + nbytes_in(checkpoint)
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, theirs(IDS).logits)


def test_accelerate_saves_a_model_byte_for_byte_the_same(tmp_path):
    accelerate = library("accelerate")
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path / "theirs", max_shard_size="4KB")
    with penstock.patch():
        accelerate.Accelerator(cpu=True).save_model(model, tmp_path / "ours", max_shard_size="4KB")
    assert len(files_in(tmp_path / "ours")) > 1
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "theirs")


def test_peft_saves_an_adapter_byte_for_byte_the_same(checkpoint, tmp_path):
    peft = library("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), config)
    model.save_pretrained(tmp_path / "theirs")
    with penstock.patch():
        model.save_pretrained(tmp_path / "ours")
    ours, theirs = (files_in(tmp_path / name)["adapter_model.safetensors"] for name in ("ours", "theirs"))
    assert ours == theirs


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


@pytest.mark.parametrize("shards", ["5GB", "1KB"], ids=["one file", "shards"])
def test_the_hub_saves_a_model_byte_for_byte_the_same(tmp_path, shards):
    hub = library("huggingface_hub")
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))  # not tied: one key of metadata
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    hub.save_torch_model(model, tmp_path / "theirs", max_shard_size=shards)
    with penstock.patch():
        hub.save_torch_model(model, tmp_path / "ours", max_shard_size=shards)
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "theirs")


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
def test_diffusers_loads_a_model(loaded, reports, monkeypatch, tmp_path, shards, how):
    model = unet()
    model.save_pretrained(tmp_path, max_shard_size=shards)
    ours, theirs = both_ways(lambda: type(model).from_pretrained(tmp_path, **how), loaded)
    same(ours, theirs)
    monkeypatch.setenv("PENSTOCK_COPY", "true")
    del reports[:]
    with penstock.patch():
        type(model).from_pretrained(tmp_path, **how)
    assert read(reports) == nbytes_in(tmp_path)


def test_diffusers_saves_a_model_byte_for_byte_the_same(tmp_path):
    model = unet()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="12KB")
    with penstock.patch():
        model.save_pretrained(tmp_path / "ours", max_shard_size="12KB")
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "theirs")


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


def load_whole(folder: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint as safetensors loads them."""
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    return {name: tensors[name] for name in names}


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


def test_torchs_distributed_checkpoint_reads_of_a_rank_what_is_its_own(
    small, loaded, reports, read_alone, second_of_two
):
    storage = library("torch.distributed.checkpoint.hf_storage")
    dcp = library("torch.distributed.checkpoint")
    tensor = library("torch.distributed.tensor")
    # Rows of one, columns of another, the whole of a third
    how = {"layers.0.attn.weight": tensor.Shard(0), "embed.weight": tensor.Shard(1), "wide": tensor.Replicate()}
    whole = load_whole(small, how)

    def load() -> dict[str, Any]:
        state = {
            name: tensor.distribute_tensor(torch.zeros_like(whole[name]), second_of_two, [placed], src_data_rank=None)
            for name, placed in how.items()
        }
        dcp.load(state, storage_reader=storage.HuggingFaceStorageReader(str(small)), no_dist=True)
        return state

    expected = {
        "layers.0.attn.weight": whole["layers.0.attn.weight"][24:],
        "embed.weight": whole["embed.weight"][:, 24:],
        "wide": whole["wide"],
    }
    for state in both_ways(load, loaded):
        for name, part in expected.items():
            assert raw(local(state[name])) == raw(part), name
    assert read(reports, gaps=True) + sum(read_alone) == sum(part.nbytes for part in expected.values())


def test_torchs_distributed_checkpoint_learns_the_same_of_the_files(small, loaded):
    storage = library("torch.distributed.checkpoint.hf_storage")
    theirs = storage.HuggingFaceStorageReader(str(small)).read_metadata()
    with penstock.patch():
        ours = storage.HuggingFaceStorageReader(str(small)).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert {index.fqn for index in ours.storage_data} == set(names_in(small))
    assert loaded == []


def test_torchs_distributed_checkpoint_saves_the_same_tensors(tmp_path, small, monkeypatch):
    """Its metadata has three keys, which safetensors writes in any order: the rest is compared."""
    storage = library("torch.distributed.checkpoint.hf_storage")
    dcp = library("torch.distributed.checkpoint")
    # DCP finds nothing to save in a tensor without elements
    state = {name: tensor for name, tensor in load_whole(small, names_in(small)).items() if tensor.numel()}
    saved = []
    to_bytes = penstock._save.to_bytes
    monkeypatch.setattr(penstock._save, "to_bytes", lambda *a, **k: saved.append("bytes") or to_bytes(*a, **k))

    def save(folder: Path) -> tuple[dict[str, bytes], list[str]]:
        writer = storage.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(state, storage_writer=writer, no_dist=True)
        entries = Oracle(folder).entries
        return {name: reference.raw(entry).tobytes() for name, entry in entries.items()}, sorted(files_in(folder))

    theirs = save(tmp_path / "theirs")
    assert saved == []
    with penstock.patch():
        assert save(tmp_path / "ours") == theirs
    assert saved == ["bytes"]
    assert theirs[0] == {name: raw(tensor) for name, tensor in state.items()}
