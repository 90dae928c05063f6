"""What stands in for vLLM's compiled operators, `vllm._C`, which its wheel has for CUDA alone.

Loading needs none of them. What vLLM does to weights after a load does, on a CPU: it packs them for its kernels. These
are all the stubs there are:

| in place of | does | why |
|---|---|---|
| `layers.utils.check_cpu_sgl_kernel` | says no | `_C.convert_weight_packed`, on processors with AMX |
| `fused_moe.experts.cpu_moe.cpu_prepack_moe_weight` | copies | `_C.prepack_moe_weight` |

The second changes no byte, because vLLM 0.33 packs experts after a load and not after a reload, in any format: on a CPU
a reload of experts is right only if packing changes nothing.
"""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts import cpu_moe


def _packed(weight: torch.Tensor, isa: str) -> torch.Tensor:
    return weight.clone()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *shape_and_dtype: False)
    monkeypatch.setattr(cpu_moe, "cpu_prepack_moe_weight", _packed)
