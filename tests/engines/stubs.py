"""What stands in for vLLM's compiled operators, `vllm._C`, which its wheel has for CUDA alone.

Loading needs none of them, except that some layers are not made without a kernel for them, and that online quantisation
needs one while it loads. What vLLM does to weights after a load needs more, on a CPU: it packs them for its kernels.
These are all the stubs there are:

| in place of | does | why |
|---|---|---|
| `layers.utils.check_cpu_sgl_kernel` | says no | `_C.convert_weight_packed`, on processors with AMX |
| `fused_moe.experts.cpu_moe.cpu_prepack_moe_weight` | copies | `_C.prepack_moe_weight` |
| `kernels.linear.scaled_mm.cpu.CPUFp8BlockScaledMMKernel.is_supported` | says yes | `_C.fp8_scaled_mm_cpu`, and AMX |
| that kernel's `process_weights_after_loading` | does nothing | `_C.convert_weight_packed` |
| `kernels.linear._POSSIBLE_NVFP4_KERNELS` | has vLLM's own emulation for CPUs too | it has kernels for GPUs alone |
| `cpu_moe.CPUExpertsInt4._supports_current_device` | says yes | AMX |
| `_supports_current_device` and `_supports_quant_scheme` of `TritonExperts` | say yes | Triton, and a GPU |
| `_custom_ops.scaled_fp8_quant` | the same in torch | `_C.static_scaled_fp8_quant` and others |
| `quantization.online.fp8.per_block_cast_to_fp8` | looks at memory first | on a GPU such a function may be a kernel |

The last two read the weights by their address, as kernels do, so that torch's dispatcher does not see it. The second
changes no byte, because vLLM 0.33 packs experts after a load and not after a reload, in any format: on a CPU a reload
of experts is right only if packing changes nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from vllm import _custom_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm import cpu
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts import cpu_moe, triton_moe
from vllm.model_executor.layers.quantization.online import fp8
from vllm.platforms.interface import PlatformEnum


def _packed(weight: torch.Tensor, isa: str) -> torch.Tensor:
    return weight.clone()


def _supported(compute_capability: int | None = None) -> tuple[bool, None]:
    return True, None


def _nothing(*args: Any) -> None:
    pass


def make_quantised_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has vLLM make the layers whose kernels it has for other processors or for GPUs alone."""
    monkeypatch.setattr(cpu.CPUFp8BlockScaledMMKernel, "is_supported", _supported)
    monkeypatch.setitem(linear._POSSIBLE_NVFP4_KERNELS, PlatformEnum.CPU, [linear.EmulationNvFp4LinearKernel])
    monkeypatch.setattr(cpu_moe.CPUExpertsInt4, "_supports_current_device", staticmethod(lambda: True))
    for name in ("_supports_current_device", "_supports_quant_scheme"):
        monkeypatch.setattr(triton_moe.TritonExperts, name, staticmethod(lambda *keys: True))


def process_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *shape_and_dtype: False)
    monkeypatch.setattr(cpu_moe, "cpu_prepack_moe_weight", _packed)
    monkeypatch.setattr(cpu.CPUFp8BlockScaledMMKernel, "process_weights_after_loading", _nothing)


def _seen(tensor: torch.Tensor) -> torch.Tensor:
    """What is in the memory of a contiguous tensor."""
    assert tensor.is_contiguous()
    copied = bytearray(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    return torch.frombuffer(copied, dtype=tensor.dtype).view(tensor.shape)


def _quantised(
    given: torch.Tensor, scale: torch.Tensor | None = None, *, use_per_token_if_dynamic: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    values, most = _seen(given).float(), torch.finfo(torch.float8_e4m3fn).max
    if scale is None:
        found = values.abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else values.abs().amax().view(1)
        scale = found / most
    return (values / scale).clamp(-most, most).to(torch.float8_e4m3fn), scale


def quantise_online(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = fp8.per_block_cast_to_fp8

    def looked_at(given: torch.Tensor, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = cast(_seen(given), **more)
        return found

    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", _quantised)
    monkeypatch.setattr(fp8, "per_block_cast_to_fp8", looked_at)
