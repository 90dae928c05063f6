"""One rank of vLLM: makes models, loads them with vLLM's own format and with Penstock, and compares every parameter.

    python vllm_rank.py SPEC.json RANK

The specification has the size of the world, an address to meet at, and the models. What came of them goes to a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader

#: What memory holds before a load: no parameter may keep it, except padding.
POISON = 0xA7


def poison(model: torch.nn.Module) -> None:
    for tensor in tensors(model).values():
        flat = tensor.detach()
        if flat.numel():
            flat.untyped_storage().fill_(POISON) if flat.untyped_storage().nbytes() else None


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.zeros(0)


def digests(model: torch.nn.Module) -> dict[str, str]:
    return {
        name: hashlib.sha256(bytes(as_bytes(tensor).numpy())).hexdigest() + f" {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in tensors(model).items()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) or isinstance(tensor, torch.nn.Parameter)
    }


def load(args: dict[str, Any], load_format: str, extra: dict[str, Any] | None = None) -> tuple[Any, Any]:
    more = {"model_loader_extra_config": extra} if extra else {}
    engine = EngineArgs(
        **args,
        load_format=load_format,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        **more,
    )
    config = engine.create_engine_config()
    with set_current_vllm_config(config):
        loader = get_model_loader(config.load_config)
        torch.set_default_dtype(config.model_config.dtype)
        with torch.device("cpu"):
            model = loader.create_model(config, config.model_config)
            before = {name: t.data_ptr() for name, t in tensors(model).items()}
            buffers = {name: t.clone() for name, t in model.named_buffers()}
            poison(model)
            for name, tensor in model.named_buffers():
                tensor.copy_(buffers[name])
            loader.load_weights(model, config.model_config)
        torch.set_default_dtype(torch.float32)
        moved = [name for name, t in tensors(model).items() if before.get(name) != t.data_ptr()]
    return model, (loader, moved)


def one(args: dict[str, Any]) -> dict[str, Any]:
    theirs, _ = load(args, "safetensors")
    expected = digests(theirs)
    del theirs
    mine, (loader, moved) = load(args, "penstock")
    found = digests(mine)
    reports = loader.reports
    left = sum(int((as_bytes(t) == POISON).sum()) for t in mine.parameters())
    return {
        "loader": type(loader).__module__,
        "different": sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n)),
        "parameters": len(found),
        "parameter_bytes": sum(t.nbytes for t in mine.parameters()),
        "poisoned": left,
        "moved": moved,
        "reports": [
            {
                key: r.get(key)
                for key in ("nbytes", "loads", "copies", "materialised", "materialised_bytes", "copied_through")
            }
            | {"read": sum(way["bytes"] for way in r["routes"].values()), "gap_bytes": r["gap_bytes"]}
            for r in reports
        ],
    }


def main() -> None:
    spec, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    size = spec["tensor_parallel_size"] * spec.get("pipeline_parallel_size", 1)
    parallel = {key: spec[key] for key in spec if key.endswith("_size") or key.startswith("enable_")}
    # A model of experts: only for those vLLM makes a group of expert parallel ranks
    first = {**spec["models"][spec["first"]], **parallel}
    results: dict[str, Any] = {}
    config = EngineArgs(**first, skip_tokenizer_init=True, enforce_eager=True, max_model_len=128).create_engine_config()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(size, rank, f"tcp://127.0.0.1:{spec['port']}", rank, "gloo")
        parallel_state.initialize_model_parallel(spec["tensor_parallel_size"], spec.get("pipeline_parallel_size", 1))
    for name, args in spec["models"].items():
        try:
            results[name] = one({**args, **parallel})
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        Path(f"{spec['out']}.{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
