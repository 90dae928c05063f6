"""What tensor-parallel ranks read of public models: vLLM's own loader is recorded, its copies are loaded.

    make replay

or, in the engines' environment, `python benches/replay.py`, with `--help` for what can be chosen.

Bytes and reads are counted. The checkpoints have the names, shapes, dtypes and files of the published ones, and holes
for bytes: nothing is timed. So gaps are read up to 16 KiB, if `--gap` says nothing else.
The model is made on memory that nobody touches, so that a machine smaller than the model can record it. Then the copies
are loaded with real reads, layer by layer, and the memory is given back after each.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import penstock
import pytest
import torch
import transformers
from penstock.synthetic import layouts, synth

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines"))

from on_cpu import ENVIRONMENT

os.environ.update(ENVIRONMENT)

import stubs
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader import get_model_loader
from vllm_model import configured, current, joined, load, model_config_of

MADV_DONTNEED = 4
PAGE = 4096


def _llama3_8b() -> Any:
    return transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )


def _qwen3_30b_a3b() -> Any:
    return transformers.Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )


def _deepseek_r1() -> Any:
    config = transformers.DeepseekV3Config(
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        vocab_size=129280,
        max_position_embeddings=163840,
        tie_word_embeddings=False,
        architectures=["DeepseekV3ForCausalLM"],
    )
    config.quantization_config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    return config


@dataclasses.dataclass(frozen=True)
class Case:
    config: Callable[[], Any]
    layers: int | None = None
    """The first so many layers; None: all of them."""


#: Four of the 61 layers of DeepSeek-R1: three dense ones and one with its 256 experts.
CASES = {
    "llama-3-8b": Case(_llama3_8b),
    "qwen3-30b-a3b": Case(_qwen3_30b_a3b),
    "deepseek-r1": Case(_deepseek_r1, layers=4),
}


def write(name: str, folder: Path) -> Path:
    """The checkpoint of a case, with holes for bytes."""
    case = CASES[name]
    layout = layouts.build(name, layers=case.layers)
    holes = tuple(tuple(dataclasses.replace(tensor, hole=True) for tensor in file) for file in layout.shards)
    synth.write(dataclasses.replace(layout, shards=holes), folder)
    config = case.config()
    if case.layers is not None:
        config.num_hidden_layers = case.layers
    config.torch_dtype = "bfloat16"
    config.save_pretrained(folder)
    return folder


def recorded(folder: Path) -> tuple[penstock.Checkpoint, list[penstock.Destination], Any]:
    """What vLLM copies into a model of its own, as this rank. The model comes along: it owns the destinations."""
    found: list[tuple[penstock.Checkpoint, list[penstock.Destination]]] = []
    own = penstock.Checkpoint.load_into

    def keep(checkpoint: penstock.Checkpoint, into: Any, **options: Any) -> Any:
        found.append((checkpoint, list(into)))
        return own(checkpoint, [], **options)

    config = configured({"model": str(folder)}, "penstock")
    loader = get_model_loader(config.load_config)
    with current(config):
        model = loader.create_model(config, model_config_of(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(penstock.Checkpoint, "load_into", keep)
        load(loader, model, config)
    (report,) = loader.reports
    assert not report["materialised"], report["materialised"]
    assert not report["fallbacks"], report["fallbacks"]
    ((checkpoint, destinations),) = found
    return checkpoint, destinations, model


def kind(checkpoint: penstock.Checkpoint, to: penstock.Destination) -> str:
    """Which dimension of its tensor a destination has a part of, as models of PyTorch lay out weights."""
    shape = checkpoint[to.name].shape
    cut = to.cut or ()
    parts = [
        n for n, (part, length) in enumerate(zip(cut, shape, strict=False)) if part.indices(length) != (0, length, 1)
    ]
    if not parts:
        return "whole"
    if parts == [0]:
        return "column-parallel"
    return "row-parallel " + re.sub(r"\.(\d+\.)?", ".", to.name).split(".")[-2]


def by_load(
    checkpoint: penstock.Checkpoint, destinations: list[penstock.Destination]
) -> Iterator[tuple[str, list[penstock.Destination]]]:
    """Those of one kind and one layer: what is loaded at once."""
    loads: dict[tuple[str, str], list[penstock.Destination]] = defaultdict(list)
    for to in destinations:
        layer = re.search(r"\.(\d+)\.", to.name)
        loads[kind(checkpoint, to), layer.group(1) if layer else ""].append(to)
    for (of, _), those in loads.items():
        yield of, those


def give_back(tensors: list[torch.Tensor]) -> None:
    """Has the kernel take the pages of these tensors. Their bytes are lost."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for tensor in tensors:
        storage = tensor.untyped_storage()
        first = -(-storage.data_ptr() // PAGE) * PAGE
        last = (storage.data_ptr() + storage.nbytes()) // PAGE * PAGE
        if last > first and madvise(first, last - first, MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


Sums = dict[str, dict[str, int]]


def replay(folder: Path, gap: str, sums: Sums) -> None:
    """Adds what this rank wants and reads, by kind."""
    checkpoint, destinations, model = recorded(folder)
    for of, those in by_load(checkpoint, destinations):
        report = checkpoint.load_into(those, options={"gap": gap}, progress=False)
        assert not report["copied_through"]
        one = sums.setdefault(of, dict.fromkeys(("copies", "wanted", "read", "slack", "gaps", "reads"), 0))
        one["copies"] += len(those)
        one["wanted"] += report["nbytes"]
        one["read"] += sum(way["bytes"] for lane, way in report["routes"].items() if lane != "rank")
        one["reads"] += sum(way["extents"] for way in report["routes"].values())
        one["slack"] += report["slack_bytes"]
        one["gaps"] += report["gap_bytes"]
        give_back([to.into for to in those])
    del checkpoint, destinations, model
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8], help="sizes of tensor-parallel groups")
    parser.add_argument("--gap", default="16KiB", help="option of the loads")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    results: dict[str, dict[int, Sums]] = {}
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        stubs.make_layers_of_fp8_blocks(patch)
        folders = {name: write(name, Path(temporary) / name) for name in CASES}
        # vLLM makes a group of expert parallel ranks only for a model that has experts
        joined(configured({"model": str(folders["qwen3-30b-a3b"])}), 1, 0, Path(temporary) / "meeting")
        group = parallel_state.get_tp_group()
        for name in args.models:
            for ranks in args.ranks:
                sums: Sums = {}
                for rank in range(ranks):
                    patch.setattr(group, "world_size", ranks)
                    patch.setattr(group, "rank_in_group", rank)
                    replay(folders[name], args.gap, sums)
                results.setdefault(name, {})[ranks] = sums
                print(f"{name}, TP={ranks}, all ranks")
                for of, one in sorted(sums.items()):
                    ratio = one["read"] / one["wanted"]
                    print(
                        f"  {of:28} {one['copies']:7} copies {one['wanted'] / 1e9:8.3f} GB wanted"
                        f" {one['read'] / 1e9:8.3f} GB read {ratio:6.3f} {one['reads']:8} reads"
                    )
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
