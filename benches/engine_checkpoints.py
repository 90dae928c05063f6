"""Checkpoints for vLLM: names and shapes of public models, with few layers and a small vocabulary."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from penstock.synthetic import layouts, synth
from penstock.synthetic.synth import Layout, Tensor

#: Files of each checkpoint: one for each rank, as fastsafetensors deals files to ranks.
FILES = 4
#: Rows of the embeddings and of the head. With their own vocabularies these would be most of a model of few layers.
VOCABULARY = 8192

_SHARED = {
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "num_attention_heads": 32,
}


@dataclasses.dataclass(frozen=True)
class Source:
    """A public model, and what vLLM has to know of it."""

    layout: str
    """Its name in `penstock.synthetic.layouts`."""
    vocabulary: int
    widths: dict[str, int]
    """Keys of the configuration that shrink with the width."""
    config: dict[str, Any]


SOURCES = {
    "llama": Source(
        "llama-3-8b",
        128256,
        {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 8},
    ),
    "qwen3-moe": Source(
        "qwen3-30b-a3b",
        151936,
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "head_dim": 128},
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
    ),
}


def build(name: str, nbytes: float) -> tuple[Layout, dict[str, Any]]:
    """The layout of a model of about so many bytes, and its configuration.

    It has as many whole layers as fit, at least one. If one does not fit, all widths are divided by 2 or 4.
    """
    source = SOURCES[name]
    most = len(layouts.model(source.layout).layers)

    def made(layers: int, divisor: int) -> list[Tensor]:
        whole = layouts.build(source.layout, layers=layers)
        return [_thinner(tensor, source.vocabulary, divisor) for tensor in whole.tensors]

    def size(layers: int, divisor: int) -> int:
        return sum(tensor.nbytes for tensor in made(layers, divisor))

    divisor = next((n for n in (1, 2) if size(1, n) <= nbytes), 4)
    one = size(1, divisor)
    layers = max(1, min(most, 1 + int((nbytes - one) // (size(2, divisor) - one))))
    widths = {key: width // divisor for key, width in source.widths.items()}
    config = {**_SHARED, **source.config, **widths, "num_hidden_layers": layers, "vocab_size": VOCABULARY // divisor}
    cut = f"{layers} of {most} layers, vocabulary {VOCABULARY // divisor}"
    cut += f", widths divided by {divisor}" * (divisor > 1)
    return Layout(source.layout, synth._shard(made(layers, divisor), FILES), cut=cut), config


def _thinner(tensor: Tensor, vocabulary: int, divisor: int) -> Tensor:
    """A tensor with the small vocabulary, and with all widths divided. The number of experts is no width."""
    counts = 1 if tensor.name.endswith("mlp.gate.weight") else 0
    shape = [VOCABULARY if n == vocabulary else n for n in tensor.shape]
    shape[counts:] = [n // divisor for n in shape[counts:]]
    return dataclasses.replace(tensor, shape=tuple(shape))


def write(name: str, nbytes: float, folder: Path) -> Path:
    """Writes such a model below ``folder``, where it is not there, and gives its own folder."""
    layout, config = build(name, nbytes)
    place = folder / f"{name}-{layout.nbytes // 10**6}MB"
    if not synth.in_place(layout, place):
        print(f"writing {place.name}: {layout.name}, {layout.cut}", file=sys.stderr, flush=True)
    synth.write(layout, place)
    (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return place
