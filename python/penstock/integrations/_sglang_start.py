"""The start of one rank of SGLang on a CPU, phase by phase. Imports SGLang."""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.model_loader import loader as loader_module
from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
from sglang.srt.models import registry  # noqa: F401 - imports every model, as its server does
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs

from ._start_result import explain, result, summed
from ._startup import Phases


def start(specification: dict[str, Any], rank: int, phases: Phases) -> dict[str, Any]:
    """As far as SGLang's loader goes."""
    size = specification["tensor_parallel_size"]
    with phases.phase("configuration"):
        load_plugins()
        given = {
            "skip_tokenizer_init": True,
            "model_path": specification["model"],
            "load_format": specification["load_format"],
            "model_loader_extra_config": json.dumps(specification["extra_config"]),
            "device": "cpu",
            "tp_size": size,
            **specification["engine_args"],
        }
        args = ServerArgs(**given)
        args.resolve_once()
        said = resolving_view(args)
        load_config = LoadConfig(load_format=said.load_format, model_loader_extra_config=said.model_loader_extra_config)
    _watch(phases)
    meeting = f"file://{specification['folder']}/meeting"
    parallel_state.init_distributed_environment(size, rank, meeting, rank, "gloo")
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    get_parallel().override_permanently(world_group=parallel_state._WORLD)
    parallel_state.initialize_model_parallel(backend="gloo")
    with phases.phase("configuration"):
        config = ModelConfig.from_server_args(args)
        loader = get_model_loader(load_config, config)
    loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
    load = None
    if specification["load_format"] == "penstock":
        from ._sglang_loader import last_reports

        load = summed(last_reports)
    explain(phases, specification, load)
    return result(phases, load)


def _watch(phases: Phases) -> None:
    """Has the default loader of this process say when it makes a model, loads its weights and processes them."""
    for name, phase in (("load_weights_only", "reading"), ("postprocess_weights", "post_processing")):
        setattr(DefaultModelLoader, name, staticmethod(phases.timed(phase, getattr(DefaultModelLoader, name))))
    for name, phase in (("_initialize_model", "model_creation"), ("download_weights_from_hf", "download")):
        setattr(loader_module, name, phases.timed(phase, getattr(loader_module, name)))
