"""The start of vLLM, phase by phase. Imports vLLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch._ops import _OpNamespace
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import base_loader, default_loader, get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from .._report import Report
from ._start_result import explain, result, summed
from ._startup import Phases, failed_in


class Watched:
    """The loaders of this process, which say when they make a model, load its weights and process them."""

    def __init__(self, phases: Phases) -> None:
        self.reports: list[Report] = []
        """Reports of Penstock's loads."""
        own: Callable[..., Any] = BaseModelLoader.load_model

        @wraps(own)
        def load_model(loader: Any, *args: Any, **kwargs: Any) -> Any:
            # Each format has a class of its own, and classes override these
            loader.create_model = phases.timed("model_creation", loader.create_model)
            loader.load_weights = phases.timed("reading", loader.load_weights)
            try:
                return own(loader, *args, **kwargs)
            finally:
                self.reports += getattr(loader, "reports", [])

        BaseModelLoader.load_model = load_model
        for module, name, phase in (
            (base_loader, "process_weights_after_loading", "post_processing"),
            (default_loader, "download_weights_from_hf", "download"),
        ):
            setattr(module, name, phases.timed(phase, getattr(module, name)))


def arguments(specification: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """The arguments of vLLM, with defaults that the user may overrule."""
    return {
        **defaults,
        "model": specification["model"],
        "load_format": specification["load_format"],
        "model_loader_extra_config": specification["extra_config"],
        "tensor_parallel_size": specification["tensor_parallel_size"],
        **specification["engine_args"],
    }


def start(specification: dict[str, Any], rank: int, phases: Phases) -> dict[str, Any]:
    """One rank on a CPU, as far as vLLM's loader goes."""
    watched = Watched(phases)
    with phases.phase("configuration"):
        given = arguments(specification, skip_tokenizer_init=True, enforce_eager=True)
        config = EngineArgs(**given).create_engine_config()
    parallel = config.parallel_config
    with set_current_vllm_config(config):
        meeting = f"file://{specification['folder']}/meeting"
        parallel_state.init_distributed_environment(parallel.world_size, rank, meeting, rank, "gloo")
        parallel_state.initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        try:
            get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)
        except AttributeError as error:
            # A wheel for GPUs has no operators for a CPU: nor can it run what they prepare the weights for
            if failed_in(error) != "post_processing" or not isinstance(error.obj, _OpNamespace):
                raise
            phases.reasons["post_processing"] = f"this vLLM lacks an operator for CPUs, {error.obj.name}.{error.name}"
    load = summed(watched.reports)
    explain(phases, specification, load)
    return result(phases, load)
