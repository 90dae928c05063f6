"""vLLM loads models with `--load-format penstock` alone: the same parameters, each rank its own bytes, in one load.

What is compared is what vLLM has before it processes weights for its kernels. Of each format:

| format | models | operations that need bytes at once |
|---|---|---|
| none | Llama, Qwen3-MoE, Mixtral, DeepSeek-V3, GPT-OSS | GPT-OSS: `zero_` and `copy_` of a bias, except on rank 0 |
| none | LLaVA | none |
| none | the draft model (MTP) of DeepSeek-V3 | none |
| FP8 with block scales | Llama, Qwen3-MoE, DeepSeek-V3 | none |
| compressed-tensors FP8, scales by channel | Llama, Qwen3-MoE, DeepSeek-V3 | none |
| compressed-tensors WNA16 | Llama, Qwen3-MoE | Qwen3-MoE: `copy_` of each expert's `weight_shape`, from I64 to BF16 |
| GPTQ, AWQ | Llama, Qwen3-MoE | none |
| MXFP4 | GPT-OSS | as without a format |
| ModelOpt FP8, compressed-tensors NVFP4 | Llama, Qwen3-MoE | none |
| ModelOpt NVFP4 | Llama, Qwen3-MoE, DeepSeek-V3 | none |

vLLM makes all of these on a CPU without its compiled operators. Some need stubs in place of checks for kernels
(stubs.py). What vLLM makes of the last two rows, and what it quantises while it loads: `test_vllm_formats.py`. Not
reached here:

| what | why |
|---|---|
| Qwen2-VL, and CLIP with its own activation | making the model asks for `_C.gelu_quick` |
| kernels, and so what GPTQ, AWQ and MXFP4 make of weights after a load | `_C`, or a GPU |

LLaVA, drafts and quantised models are loaded in the worlds `tp1` and `tp2`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import WORLDS, World, models_of, ranks_of


def materialised(model: str, world: str, rank: int) -> tuple[dict[str, int], int]:
    """The operations that need bytes at once, and the bytes of parameters that no recorded copy fills."""
    if model.startswith("gpt-oss") and world in ("tp2", "tp4") and rank > 0:
        # One rank alone adds the bias of a layer's output. The others zero what they were given, in each of 4 layers
        return {"aten.zero_.default": 4, "aten.copy_.default": 4}, 0
    if model == "qwen3-moe.ct-wna16":
        # The shapes of weights are I64, and vLLM keeps those of experts as BF16: 3 copies for 8 experts in 4 layers, of
        # which the one for `up` overwrites the one for `gate`
        return {"aten.copy_.default": 96}, 2 * 8 * 4 * 2 * torch.bfloat16.itemsize
    return {}, 0


CASES = [(world, model, rank) for world in WORLDS for model in models_of(world) for rank in range(ranks_of(world))]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request: pytest.FixtureRequest) -> tuple[str, str, int]:
    found: tuple[str, str, int] = request.param
    return found


@pytest.fixture
def result(case: tuple[str, str, int], world: Callable[[str], World]) -> dict[str, Any]:
    name, model, rank = case
    return world(name).of(model, rank)


def test_the_entry_point_alone_makes_the_format_known(result: dict[str, Any]):
    assert result["loader"] == "penstock.integrations._vllm_loader"


def test_parameters_are_the_same_and_where_they_were(result: dict[str, Any]):
    assert result["parameters"] > 0
    assert result["different"] == []
    assert result["deferred"] == []
    assert result["moved"] == []


def test_one_load_without_detours(result: dict[str, Any], case: tuple[str, str, int]):
    (report,) = result["reports"]
    name, model, rank = case
    assert report["loads"] == 1
    assert report["copied_through"] == []
    assert report["fallbacks"] == []
    assert report["materialised"] == materialised(model, name, rank)[0]


def test_a_rank_wants_its_own_bytes_exactly(result: dict[str, Any], case: tuple[str, str, int]):
    (report,) = result["reports"]
    name, model, rank = case
    assert report["nbytes"] == result["from_files"] - materialised(model, name, rank)[1]
    # Where the kernel has taken pages back, ranks send each other what they read
    received = (report["exchange"] or {}).get("received_bytes", 0)
    assert report["read"] + received >= report["nbytes"]


def test_what_vllm_copies_out_of_mapped_files_is_the_same(result: dict[str, Any], case: tuple[str, str, int]):
    found, [recorded] = result["mapped"], result["reports"]
    assert (found["different"], found["moved"]) == ([], [])
    [report] = found["reports"]
    assert report.pop("given") == "mapped"
    # The keys are those of a load that was recorded
    assert report.keys() == recorded.keys()
    assert (report["loads"], report["copies"], report["materialised"], report["fallbacks"]) == (1, 0, {}, [])
    assert report["nbytes"] >= recorded["nbytes"] - recorded["materialised_bytes"]
