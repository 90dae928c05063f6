"""One rank of SGLang that loads quantised checkpoints: as `sglang_rank.py`, whose functions these are beside.

python sglang_formats.py SPEC.json RANK
"""

from __future__ import annotations

import sys
from typing import Any

import sglang_rank
import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.layers.quantization import fp8
from sglang.srt.layers.quantization.awq import awq
from sglang.srt.model_loader import loader as sglang_loader
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.plugins import load_plugins
from sglang_rank import OWN_WAY, POISONS, Rank, _caught, different, digests, kept, left, reports, updater


def _capability(device: Any = None) -> tuple[int, int]:
    return 9, 0


def _quantised(
    given: torch.Tensor, scale: torch.Tensor | None = None, *, use_per_token_if_dynamic: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    values, most = given.float(), torch.finfo(torch.float8_e4m3fn).max
    if scale is None:
        found = values.abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else values.abs().amax().view(1)
        scale = found / most
    return (values / scale).clamp(-most, most).to(torch.float8_e4m3fn), scale


def stand_in(process: bool) -> None:
    """What has to stand in for a GPU here: see `test_sglang_formats.py`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.srt.layers.quantization") and hasattr(module, "get_device_capability"):
            module.get_device_capability = _capability
    torch.cuda.get_device_capability = _capability
    awq._is_cuda = True
    fp8.scaled_fp8_quant = _quantised
    if not process:
        DefaultModelLoader.postprocess_weights = staticmethod(lambda model, target_device: None)


def quantised(rank: Rank, folder: str, args: dict[str, Any], process: bool) -> Any:
    """Loads a model both ways."""
    load_plugins()
    stand_in(process)
    config = rank.join(folder, **args)
    initialize_moe_config()
    # What neither load touches is the same then
    poison = POISONS["safetensors"] = POISONS["penstock"]
    theirs = rank.load(config, "safetensors")
    expected, methods, untouched = digests(theirs), _methods(theirs), kept(theirs, poison)
    del theirs
    mine = rank.load(config, "penstock")
    return {
        "quantization": config.quantization,
        "methods": methods,
        "different": different(expected, digests(mine)),
        "kept": [untouched, kept(mine, poison)],
        "left": left(mine),
        "parameters": len(list(mine.parameters())),
        "reports": reports(),
        "said": rank.lines.of_penstock(),
    }


def _methods(model: torch.nn.Module) -> list[str]:
    """The classes that quantise layers."""
    found = (getattr(module, "quant_method", None) for module in model.modules())
    return sorted({type(one).__name__ for one in found if one is not None})


def refused(rank: Rank, folder: str, unreadable: str, bits_and_bytes: str, online: list[str]) -> Any:
    """Starts and updates that end before anything is read. ``unreadable`` has a configuration, and no weights."""
    load_plugins()
    found = {
        "bitsandbytes, quantised before": _caught(_start, rank, bits_and_bytes),
        "bitsandbytes, in flight": _caught(_start, rank, unreadable, quantization="bitsandbytes"),
    }
    for name in online:
        config = rank.join(unreadable)
        config.quantization = name
        found[name] = _caught(rank.load, config, "penstock")
    config = rank.join(folder)
    model = rank.load(config, "penstock")
    before = digests(model)
    for name in ("bitsandbytes", "gguf", *online):
        config.quantization = name
        found[f"{name} update"] = _caught(updater(model, config).update_weights_from_disk, unreadable, "penstock")
    return {"found": found, "different": different(before, digests(model)), "said": rank.lines.of_penstock()}


def _start(rank: Rank, folder: str, **args: Any) -> None:
    rank.load(rank.join(folder, **args), "penstock")


def accepted(rank: Rank, folder: str) -> Any:
    """A load of what SGLang quantises while it loads, in SGLang's own way: the user has accepted that.

    The model is a plain one. So what this shows is that SGLang's own tensors come, and that it is said.
    """
    load_plugins()
    config = rank.join(folder)
    expected = digests(rank.load(config, "safetensors"))
    from penstock.integrations import _sglang_loader

    loader = sglang_loader.get_model_loader(
        LoadConfig(load_format="penstock", model_loader_extra_config=OWN_WAY), config
    )
    model = sglang_loader._initialize_model(config, loader.load_config, None).to(config.dtype)
    config.quantization = "nvfp4_online"
    source = DefaultModelLoader.Source.init_new(config, model)
    loader.load_weights_only(model, loader._get_weights_iterator(source), torch.device("cpu"))
    return {
        "different": different(expected, digests(model)),
        "fallbacks": _sglang_loader.last_reports[0]["fallbacks"],
        "said": rank.lines.of_penstock(),
    }


if __name__ == "__main__":
    sglang_rank.main({one.__name__: one for one in (quantised, refused, accepted)})
