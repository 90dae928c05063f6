"""Models of vLLM on a CPU: made and loaded through its own loader classes, as its workers do, and compared."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import penstock
import torch
from penstock.integrations._deferred import Deferred
from tiny_models import item_sizes
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader

try:
    from vllm.model_executor.model_loader.reload.inplace import reload_weights
except ImportError:

    def reload_weights(
        config: Any, model: torch.nn.Module, weights: Any, path: str | None, is_checkpoint: bool
    ) -> None:
        """As the runner of vLLM 0.31 does, without the rest of it."""
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        nothing = dict.fromkeys(("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"), lambda: None)
        about = {name: getattr(config, name) for name in ("lora_config", "load_config", "model_config")}
        runner = SimpleNamespace(get_model=lambda: model, **about, **nothing)
        GPUModelRunner.reload_weights(runner, weights, path, is_checkpoint)


__all__ = ["reload_weights"]

#: What memory holds before a load.
POISON = 0xA7
MIB = 1 << 20


def configured(args: dict[str, Any], load_format: str = "safetensors", mapped: str = "off") -> Any:
    """vLLM's configuration, as its command line would make it of these arguments. A draft is of the same checkpoint.

    ``mapped``: Penstock's option. Checkpoints of tests are so small that all of them would be mapped.
    """
    if load_format == "penstock":
        args = {**args, "model_loader_extra_config": {"mapped": mapped, **args.get("model_loader_extra_config", {})}}
    if "speculative_config" in args:
        args = {**args, "speculative_config": {**args["speculative_config"], "model": args["model"]}}
    fixed = {"dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128}
    return EngineArgs(**{**fixed, **args}, load_format=load_format).create_engine_config()


def joined(config: Any, size: int, rank: int, meeting: Path) -> None:
    """Makes this process a rank of a world, which meets by way of a file: a port could be taken meanwhile."""
    parallel = config.parallel_config
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(size, rank, f"file://{meeting}", rank, "gloo")
        parallel_state.initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)


@contextmanager
def current(config: Any) -> Iterator[None]:
    """As vLLM's workers have it while they load."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with set_current_vllm_config(config), torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def model_config_of(config: Any) -> Any:
    """Of the model to load: the draft, where there is one. vLLM loads that after the model it drafts for."""
    draft = config.speculative_config
    return config.model_config if draft is None else draft.draft_model_config


def created(config: Any) -> tuple[Any, torch.nn.Module]:
    """The loader that vLLM chooses, and a model whose parameters hold poison."""
    loader = get_model_loader(config.load_config)
    with current(config):
        model = loader.create_model(config, model_config_of(config))
    poison(model)
    return loader, model


def load(loader: Any, model: torch.nn.Module, config: Any) -> None:
    with current(config):
        loader.load_weights(model, model_config_of(config))


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def poison(model: torch.nn.Module, byte: int = POISON) -> None:
    """Overwrites the memory of all parameters. Buffers keep their values: many are computed when a model is made."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for parameter in model.parameters():
        storage = parameter.detach().untyped_storage()
        if storage.nbytes():
            storage.fill_(byte)
    for buffer, value in kept:
        buffer.copy_(value)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in rows of one element each."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).view(flat.numel(), tensor.element_size())


def digests(model: torch.nn.Module) -> dict[str, str]:
    """By name: shape, dtype and a digest of the bytes."""
    return {
        name: f"{tuple(tensor.shape)} {tensor.dtype} " + hashlib.sha256(as_bytes(tensor).numpy().tobytes()).hexdigest()
        for name, tensor in tensors(model).items()
    }


def addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors(model).items()}


def left_deferred(model: torch.nn.Module) -> list[str]:
    return [name for name, tensor in tensors(model).items() if isinstance(tensor, Deferred)]


def bytes_of_files(one: torch.nn.Module, other: torch.nn.Module, folder: Path) -> int:
    """Bytes of a checkpoint that a model holds.

    Args:
        one: Loaded from the checkpoint.
        other: Loaded from the same checkpoint with all bits inverted. What does not differ is padding.
        folder: The checkpoint. An element counts as it is there, even if the parameter has another dtype.
    """
    found, sizes = 0.0, item_sizes(folder)
    mine, inverted = tensors(one), tensors(other)
    for name, tensor in mine.items():
        elements = int((as_bytes(tensor) != as_bytes(inverted[name])).any(1).sum())
        found += elements * sizes.get(name.replace(".mtp_block", ""), tensor.element_size())
    return round(found)


def with_gaps(folder: Path, cuts: dict[str, tuple[slice, ...]], most: int) -> int:
    """Bytes of a checkpoint's files from the first to the last of each part, with the gaps of at most ``most`` between.

    The gaps within a part are counted too, whatever their length: those between the rows of a tiny model are short.
    """
    spans = []
    for info in penstock.open(folder).values():
        if info.name in cuts:
            first = last = 0
            for part, length in zip(cuts[info.name], info.shape, strict=True):
                first, last = first * length + part.start, last * length + part.stop - 1
            item = info.nbytes // math.prod(info.shape)
            spans.append((info.file, info.offsets[0] + first * item, info.offsets[0] + (last + 1) * item))
    found, end, of = 0, 0, ""
    for file, begin, stop in sorted(spans):
        near = file == of and begin - end <= most
        found += stop - (end if near else begin)
        end, of = stop, file
    return found


def loaded_twice(args: dict[str, Any], inverse: Path, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Loads a model with vLLM's own format and with Penstock's. What there is to say about it, as JSON.

    Args:
        args: Of vLLM. ``model`` is the checkpoint.
        inverse: The checkpoint with all bits inverted.
        more: Arguments of vLLM for the load with Penstock.
    """
    config = configured(args)
    try:
        loader, theirs = created(config)
    except NotImplementedError as error:
        # vLLM's kernels for some experts want instructions that not every processor has
        return {"vLLM has no kernel": str(error)}
    load(loader, theirs, config)
    expected = digests(theirs)
    config = configured({**args, "model": str(inverse)})
    loader, other = created(config)
    load(loader, other, config)
    from_files = bytes_of_files(theirs, other, Path(args["model"]))
    del theirs, other
    config = configured({**args, **(more or {})}, "penstock")
    loader, mine = created(config)
    before = addresses(mine)
    load(loader, mine, config)
    after = addresses(mine)
    left = left_deferred(mine)
    found = digests(mine)
    cuts = _vllm_loader()._first_loads[mine].cuts
    parameters = len(dict(mine.named_parameters()))
    del mine  # there is one model at a time
    return {
        "mapped": loaded_mapped(args, expected) if not more else None,
        "loader": type(loader).__module__,
        "parameters": parameters,
        "deferred": left,
        "different": sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)),
        "moved": sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)),
        "from_files": from_files,
        "with_gaps": with_gaps(Path(args["model"]), cuts, MIB),
        "reports": [told(report) for report in loader.reports],
    }


def loaded_mapped(args: dict[str, Any], expected: dict[str, str]) -> dict[str, Any]:
    """The same for a load in which vLLM copies out of mapped files itself."""
    config = configured(args, "penstock", "on")
    loader, model = created(config)
    before = addresses(model)
    for path in Path(args["model"]).glob("*.safetensors"):
        path.read_bytes()  # the kernel may have taken back pages, and what is not there is not mapped
    load(loader, model, config)
    found, after = digests(model), addresses(model)
    return {
        "different": sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)),
        "moved": sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)),
        "reports": [{**told(report), "given": report["given"]} for report in loader.reports],
    }


def _vllm_loader() -> Any:
    from penstock.integrations import _vllm_loader  # the entry point has imported it before

    return _vllm_loader


def told(report: penstock.Report) -> dict[str, Any]:
    """What of a report is plain."""
    return {
        **{key: report[key] for key in ("loads", "copies", "materialised", "materialised_bytes")},
        **{key: report[key] for key in ("nbytes", "copied_through", "fallbacks", "gap_bytes", "network")},
        **{key: report[key] for key in ("slack_bytes", "exchange")},
        "read": sum(way["bytes"] for lane, way in report["routes"].items() if lane not in ("rank", "neighbour")),
    }
