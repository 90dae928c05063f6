"""Quantised checkpoints: the tensors that a format has in place of each weight, with random bytes.

No kernel computes with them here. What counts is that they have the names, shapes and dtypes of real ones.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_models import Tensors, edited

GROUP = 64
"""Rows that share a scale, in GPTQ, AWQ and compressed-tensors."""

BLOCK = 128
"""Rows and columns that share a scale, in FP8 with block scales."""

SIXTEEN = 16
"""Columns that share a scale, in NVFP4."""

_SIZES = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I64": 8}

#: The weights that formats quantise: those of linear layers, without routers, embeddings and heads.
_LINEAR = re.compile(
    r"(.*\.(?:self_attn|mlp|experts\.\d+|shared_experts)\.(?:\w+_(?:proj|a_proj_with_mqa)|w[123]))\.weight"
)


def tensor(dtype: str, *shape: int) -> tuple[str, list[int], bytes]:
    """A tensor of random bytes."""
    return dtype, list(shape), random.randbytes(_SIZES[dtype] * math.prod(shape))


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


def _scale(*shape: int) -> tuple[str, list[int], bytes]:
    """Scales as a checkpoint has them: small positive numbers."""
    count = math.prod(shape)
    return "F32", list(shape), struct.pack(f"<{count}f", *(random.uniform(0.001, 0.01) for _ in range(count)))


def _fp8_scales(*shape: int) -> tuple[str, list[int], bytes]:
    """Scales in FP8: positive numbers, no NaN."""
    return "F8_E4M3", list(shape), bytes(random.choices(range(0x30, 0x60), k=math.prod(shape)))


def _nvfp4(name: str, rows: int, columns: int) -> Tensors:
    """As ModelOpt saves it: two elements in a byte, 16 share a scale, and all of a matrix share another one."""
    return {
        f"{name}.weight": tensor("U8", rows, columns // 2),
        f"{name}.weight_scale": _fp8_scales(rows, columns // SIXTEEN),
        f"{name}.weight_scale_2": _scale(),
        f"{name}.input_scale": _scale(),
    }


def _packed_nvfp4(name: str, rows: int, columns: int) -> Tensors:
    """The same in compressed-tensors, whose scales of a matrix are the reciprocals."""
    return {
        f"{name}.weight_packed": tensor("U8", rows, columns // 2),
        f"{name}.weight_scale": _fp8_scales(rows, columns // SIXTEEN),
        f"{name}.weight_global_scale": _scale(1),
        f"{name}.input_global_scale": _scale(1),
    }


def _fp8_matrix(name: str, rows: int, columns: int) -> Tensors:
    """As ModelOpt saves it: one scale for a matrix, and one for what it is multiplied with."""
    return {
        f"{name}.weight": tensor("F8_E4M3", rows, columns),
        f"{name}.weight_scale": _scale(),
        f"{name}.input_scale": _scale(),
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


def _four_bits(dynamic: bool | str) -> dict[str, Any]:
    kind = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": SIXTEEN, "symmetric": True}
    return {**kind, "dynamic": dynamic}


#: The modules that ModelOpt leaves alone: the head, and routers. A name without a wildcard is any part of one for vLLM.
_PLAIN = ["lm_head", "*.mlp.gate", "*.mlp.gate.*"]

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
    "fp8": ({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static"}, _fp8_matrix),
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
    "modelopt-fp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": SIXTEEN, "ignore": _PLAIN},
        _nvfp4,
    ),
    "ct-nvfp4": (_compressed("nvfp4-pack-quantized", _four_bits(False), _four_bits("local")), _packed_nvfp4),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": _PLAIN}, _fp8_matrix),
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
    if form in ("fp8", "fp8-blocks"):
        settings = {**settings, "modules_to_not_convert": plain}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))


def unreadable(folder: Path, to: Path, about: dict[str, Any] | None) -> Path:
    """A copy of a checkpoint whose configuration alone can be read. ``about``: what that says of quantisation."""
    shutil.copytree(folder, to)
    for path in to.glob("*.safetensors"):
        path.write_bytes(b"nothing that anybody can read")
    if about is not None:
        path = to / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": about}))
    return to
