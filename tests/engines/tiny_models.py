"""Tiny models of public architectures: a configuration, and a checkpoint as transformers itself saves it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

SHARED: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def _llama(**more: Any) -> Any:
    return transformers.LlamaConfig(**{**SHARED, **more}, architectures=["LlamaForCausalLM"])


def _qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(
        **SHARED,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        head_dim=32,
        decoder_sparse_step=1,
        architectures=["Qwen3MoeForCausalLM"],
    )


def _qwen3() -> Any:
    return transformers.Qwen3Config(**SHARED, head_dim=32, architectures=["Qwen3ForCausalLM"])


def _mixtral() -> Any:
    return transformers.MixtralConfig(
        **SHARED, num_local_experts=8, num_experts_per_tok=2, architectures=["MixtralForCausalLM"]
    )


def _deepseek() -> Any:
    return transformers.DeepseekV3Config(
        **{**SHARED, "num_key_value_heads": 8},
        moe_intermediate_size=128,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=64,
        q_lora_rank=96,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        architectures=["DeepseekV3ForCausalLM"],
    )


def _gpt_oss() -> Any:
    return transformers.GptOssConfig(
        **{**SHARED, "head_dim": 32},
        num_local_experts=8,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        architectures=["GptOssForCausalLM"],
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen3-moe": _qwen3_moe,
    "mixtral": _mixtral,
    "deepseek": _deepseek,
    "gpt-oss": _gpt_oss,
}


def _wide(name: str) -> Any:
    """A model whose weights are whole blocks of 128 by 128 on each of two ranks."""
    config = _qwen3() if name == "qwen3" else CONFIGS[name]()
    wide = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256}
    config.update({key: value for key, value in wide.items() if hasattr(config, key)})
    if name != "deepseek":
        config.head_dim = 64
    return config


def _llava() -> Any:
    """With an activation that vLLM has without its compiled operators: CLIP's own, `quick_gelu`, is one of those."""
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
        "projection_dim": 64,
        "hidden_act": "gelu",
    }
    return transformers.LlavaConfig(
        text_config=_llama(num_hidden_layers=2),
        vision_config=transformers.CLIPVisionConfig(**vision),
        image_token_index=999,
        architectures=["LlavaForConditionalGeneration"],
    )


def _eighths() -> Any:
    """Two layers of DeepSeek whose weights are whole blocks of 128 by 128 on each of eight ranks."""
    config = _deepseek()
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    heads |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "qk_head_dim": 128, "v_head_dim": 64, "head_dim": 64}
    config.update({"intermediate_size": 1024, "moe_intermediate_size": 1024, "num_hidden_layers": 2, **heads})
    return config


#: For some tests alone.
MORE: dict[str, Callable[[], Any]] = {
    # vLLM pads a vocabulary to a multiple of 64, and zeroes the padding. This one has none.
    "tied-llama": lambda: _llama(tie_word_embeddings=True),
    "unpadded": lambda: _llama(vocab_size=1024),
    "llava": _llava,
    # 97 MB, in one file: what is read to open it is little of it
    "long-llama": lambda: _llama(hidden_size=1024, intermediate_size=2816),
    "eighths-deepseek": _eighths,
    "wide-qwen3": lambda: _wide("qwen3"),
    "wide-llama": lambda: _wide("llama"),
    "wide-qwen3-moe": lambda: _wide("qwen3-moe"),
    "wide-deepseek": lambda: _wide("deepseek"),
}


def write(name: str, folder: Path, seed: int = 0) -> Path:
    """Writes the model of this name: random bytes of ordinary size, in two shards and more."""
    torch.manual_seed(seed)
    config = {**CONFIGS, **MORE}[name]()
    kind = transformers.AutoModelForImageTextToText if name == "llava" else transformers.AutoModelForCausalLM
    with torch.device("cpu"):
        model = kind.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(folder, max_shard_size="1GB" if name == "long-llama" else "4MB")
    if name == "llava":  # as published checkpoints have it, and vLLM wants it
        edited(folder, lambda found: {key.replace("_tower.", "_tower.vision_model."): found[key] for key in found})
    written = json.loads((folder / "config.json").read_text())
    written["torch_dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def add_draft(folder: Path) -> None:
    """Adds the layer for predicting more tokens (MTP) to a checkpoint of DeepSeek. vLLM makes a draft model of it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    layers, hidden, vocabulary = (config[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    random.seed(0)
    layer: Tensors = {}
    for file in folder.glob("*.safetensors"):
        layer |= {
            new + name.removeprefix(last): (dtype, shape, random.randbytes(len(data)))
            for name, (dtype, shape, data) in read(file).items()
            if name.startswith(last)
        }
    shapes = {
        "enorm": [hidden],
        "hnorm": [hidden],
        "eh_proj": [hidden, 2 * hidden],
        "embed_tokens": [vocabulary, hidden],
        "shared_head.norm": [hidden],
        "shared_head.head": [vocabulary, hidden],
    }
    for name, shape in shapes.items():
        layer[f"{new}{name}.weight"] = "BF16", shape, random.randbytes(2 * math.prod(shape))
    save(folder / "model-mtp.safetensors", layer)
    edited(folder, lambda tensors: tensors)
    path.write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


_FLIPPED = bytes(255 - byte for byte in range(256))


def inverted(folder: Path, to: Path) -> Path:
    """The same checkpoint with every bit of every tensor inverted: each byte that comes from a file is another one."""
    to.mkdir()
    for file in folder.iterdir():
        raw = file.read_bytes()
        if file.suffix == ".safetensors":
            begin = 8 + int.from_bytes(raw[:8], "little")
            raw = raw[:begin] + raw[begin:].translate(_FLIPPED)
        (to / file.name).write_bytes(raw)
    return to


def item_sizes(folder: Path) -> dict[str, float]:
    """By name: bytes of one element of the tensor in the checkpoint."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, entry in header.items():
            elements = math.prod(entry["shape"]) if name != "__metadata__" else 0
            if elements:
                found[name] = (entry["data_offsets"][1] - entry["data_offsets"][0]) / elements
    return found


#: Of a file: dtype, shape and bytes of each tensor by name.
Tensors = dict[str, tuple[str, list[int], bytes]]


def read(file: Path) -> Tensors:
    """The tensors of a file, in its order."""
    raw = file.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    header.pop("__metadata__", None)
    places = {name: [begin + at for at in entry["data_offsets"]] for name, entry in header.items()}
    return {name: (entry["dtype"], entry["shape"], raw[slice(*places[name])]) for name, entry in header.items()}


def save(file: Path, tensors: Tensors) -> None:
    """Writes a file, of any dtype that has a name."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at := at + len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def edited(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Has ``change`` make other tensors of those of each file. The index follows."""
    index = folder / "model.safetensors.index.json"
    places = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = change(read(file))
        save(file, tensors)
        places.update(dict.fromkeys(tensors, file.name))
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
