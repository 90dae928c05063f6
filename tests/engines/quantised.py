"""Quantised checkpoints: the tensors that a format has in place of each weight, with random bytes.

No kernel computes with them here. What counts is that they have the names, shapes and dtypes of real ones.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_models import Tensors, edited

GROUP = 64
"""Rows that share a scale, in GPTQ, AWQ and compressed-tensors."""

BLOCK = 128
"""Rows and columns that share a scale, in FP8 with block scales."""

_SIZES = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I64": 8}

#: The weights that formats quantise: those of linear layers, without routers, embeddings and heads.
_LINEAR = re.compile(
    r"(.*\.(?:self_attn|mlp|experts\.\d+|shared_experts)\.(?:\w+_(?:proj|a_proj_with_mqa)|w[123]))\.weight"
)


def tensor(dtype: str, *shape: int) -> tuple[str, list[int], bytes]:
    """A tensor of random bytes."""
    nbytes = _SIZES[dtype]
    for n in shape:
        nbytes *= n
    return dtype, list(shape), random.randbytes(nbytes)


def _fp8_blocks(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight": tensor("F8_E4M3", rows, columns),
        f"{name}.weight_scale_inv": tensor("F32", -(-rows // BLOCK), -(-columns // BLOCK)),
    }


def _fp8_channels(name: str, rows: int, columns: int) -> Tensors:
    return {f"{name}.weight": tensor("F8_E4M3", rows, columns), f"{name}.weight_scale": tensor("F32", rows, 1)}


def _packed(name: str, rows: int, columns: int) -> Tensors:
    shape = b"".join(n.to_bytes(8, "little") for n in (rows, columns))
    return {
        f"{name}.weight_packed": tensor("I32", rows, columns // 8),
        f"{name}.weight_scale": tensor("BF16", rows, columns // GROUP),
        f"{name}.weight_shape": ("I64", [2], shape),
    }


def _gptq(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.qweight": tensor("I32", columns // 8, rows),
        f"{name}.qzeros": tensor("I32", columns // GROUP, rows // 8),
        f"{name}.scales": tensor("F16", columns // GROUP, rows),
        f"{name}.g_idx": (
            "I32",
            [columns],
            b"".join((column // GROUP).to_bytes(4, "little") for column in range(columns)),
        ),
    }


def _awq(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.qweight": tensor("I32", columns, rows // 8),
        f"{name}.qzeros": tensor("I32", columns // GROUP, rows // 8),
        f"{name}.scales": tensor("F16", columns // GROUP, rows),
    }


def _mxfp4(name: str, *shape: int) -> Tensors:
    """Of the experts of GPT-OSS: 32 elements share a scale. A checkpoint without quantisation has them transposed."""
    experts, columns, rows = shape
    return {
        f"{name}_blocks": tensor("U8", experts, rows, columns // 32, 16),
        f"{name}_scales": tensor("U8", experts, rows, columns // 32),
    }


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations},
        },
    }


#: By format: what a configuration says of it, and the tensors in place of a weight.
FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Tensors]]] = {
    "fp8-blocks": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
        _fp8_blocks,
    ),
    "ct-fp8": (
        _compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
        ),
        _fp8_channels,
    ),
    "ct-wna16": (
        _compressed(
            "pack-quantized",
            {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": GROUP,
                "symmetric": True,
                "dynamic": False,
            },
            None,
        ),
        _packed,
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False},
        _gptq,
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        _awq,
    ),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, _mxfp4),
}


def quantise(folder: Path, form: str) -> None:
    """Makes a checkpoint one of a format. Weights that the format leaves alone stay as they are."""
    settings, make = FORMATS[form]
    random.seed(0)
    plain: list[str] = []

    def change(tensors: Tensors) -> Tensors:
        made: Tensors = {}
        for name, found in tensors.items():
            linear = _LINEAR.fullmatch(name)
            experts = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
            if form == "mxfp4" and experts:
                made.update(make(name, *found[1]))
            elif form != "mxfp4" and linear is not None:
                made.update(make(linear[1], *found[1]))
            else:
                made[name] = found
                if len(found[1]) == 2:
                    plain.append(name.removesuffix(".weight"))
        return made

    edited(folder, change)
    path = folder / "config.json"
    if form == "fp8-blocks":
        settings = {**settings, "modules_to_not_convert": plain}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
