"""What stands in for vLLM's compiled operators, `vllm._C`, which its wheel has for CUDA alone.

Loading needs none of them, except that a layer of FP8 with block scales is not made without a kernel for it. What vLLM
does to weights after a load needs more, on a CPU: it packs them for its kernels. These are all the stubs there are:

| in place of | does | why |
|---|---|---|
| `layers.utils.check_cpu_sgl_kernel` | says no | `_C.convert_weight_packed`, on processors with AMX |
| `fused_moe.experts.cpu_moe.cpu_prepack_moe_weight` | copies | `_C.prepack_moe_weight` |
| `kernels.linear.scaled_mm.cpu.CPUFp8BlockScaledMMKernel.is_supported` | says yes | `_C.fp8_scaled_mm_cpu`, and AMX |

The second changes no byte, because vLLM 0.33 packs experts after a load and not after a reload, in any format: on a CPU
a reload of experts is right only if packing changes nothing.
"""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.kernels.linear.scaled_mm import cpu
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts import cpu_moe


def _packed(weight: torch.Tensor, isa: str) -> torch.Tensor:
    return weight.clone()


def _supported(compute_capability: int | None = None) -> tuple[bool, None]:
    return True, None


def make_layers_of_fp8_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.CPUFp8BlockScaledMMKernel, "is_supported", _supported)


def process_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *shape_and_dtype: False)
    monkeypatch.setattr(cpu_moe, "cpu_prepack_moe_weight", _packed)
