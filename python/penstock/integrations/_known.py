"""The serving engines: the releases that Penstock was tested with, and the places that it hooks into.

This is the one list of both. `_drift` compares an engine with it at each start. `make engines-versions` runs the tests
with each release, and `docs/engines.md` shows what they passed.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SGLANG", "VLLM", "Engine", "Hook"]


class Hook(NamedTuple):
    """A place in an engine that Penstock calls, replaces or derives from."""

    place: str
    """``module:name``; the name may have dots."""
    takes: str | None = None
    """The names of its parameters, in order. ``...`` stands for any number of others. None: they do not matter."""
    calls: tuple[str, ...] = ()
    """Names that its code has to use, because Penstock replaces what stands behind them."""
    fields: tuple[str, ...] = ()
    """The fields of a dataclass that Penstock reads or changes."""
    since: tuple[int, ...] = ()
    """The first minor release that has it. Earlier ones do without, and so does Penstock."""


class Engine(NamedTuple):
    """An engine: its releases that were tested, and the places that have to have a known form."""

    name: str
    """As users write it."""
    module: str
    """The package to import. It has the version."""
    digits: int
    """How many numbers of a version make a minor release: a release with another one may change any place."""
    tested: tuple[str, ...]
    """Versions that passed `make engines`, or its part in `make engines-versions`. The newest is the last."""
    hooks: tuple[Hook, ...]


_LOADER = "vllm.model_executor.model_loader"
_DEFAULT = f"{_LOADER}.default_loader"
_LAYERWISE = f"{_LOADER}.reload.layerwise"
_LAYERS = "vllm.model_executor.layers"
_ARGUMENTS = "vllm.engine.arg_utils:EngineArgs"

VLLM = Engine(
    name="vLLM",
    module="vllm",
    digits=2,
    tested=("0.31.0", "0.32.0", "0.33.0"),
    hooks=(
        Hook(f"{_LOADER}:_LOAD_FORMAT_TO_MODEL_LOADER"),
        Hook(f"{_LOADER}:register_model_loader", "load_format"),
        Hook("vllm.config.load:LoadConfig", fields=("load_format", "model_loader_extra_config")),
        Hook(f"{_DEFAULT}:DefaultModelLoader.__init__", "self, load_config"),
        Hook(f"{_DEFAULT}:DefaultModelLoader.download_model", "self, model_config"),
        Hook(f"{_DEFAULT}:DefaultModelLoader.load_weights", "self, model, model_config", calls=("get_all_weights",)),
        Hook(
            f"{_DEFAULT}:DefaultModelLoader.get_all_weights",
            "self, model_config, model",
            calls=("_get_weights_iterator",),
        ),
        Hook(
            f"{_DEFAULT}:DefaultModelLoader._get_weights_iterator",
            "self, source",
            calls=("_prepare_weights", "safetensors_weights_iterator"),
        ),
        Hook(f"{_DEFAULT}:DefaultModelLoader._prepare_weights", "self, model_name_or_path, ..."),
        Hook(f"{_DEFAULT}:DefaultModelLoader.Source", fields=("model_or_path",)),
        Hook(f"{_DEFAULT}:safetensors_weights_iterator", "hf_weights_files, ..., local_expert_ids, ..."),
        Hook(f"{_LOADER}.ep_weight_filter:should_skip_weight", "weight_name, local_expert_ids"),
        Hook("vllm.distributed.parallel_state:get_tp_group", ""),
        Hook(f"{_LAYERS}.linear:UnquantizedLinearMethod"),
        Hook(f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod"),
        Hook(f"{_LAYERS}.quantization.base_config:QuantizeMethodBase.process_weights_after_loading", "self, layer"),
        Hook(f"{_LAYERWISE}:_layerwise_process", "layer, info"),
        Hook(f"{_LAYERWISE}:_reload_attention_scales", "layer, info"),
        Hook(f"{_LAYERWISE}:_copy_and_restore_kernel_tensors", "layer, info"),
        Hook(f"{_LAYERWISE}:get_layerwise_info", "layer"),
        # Which layers are quantised while they load: their copies must not be recorded
        Hook(f"{_LAYERS}.quantization.base_config:QuantizeMethodBase.uses_meta_device"),
        Hook(
            f"{_LOADER}.reload.types:LayerReloadingInfo",
            fields=("loaded_weights", "kernel_tensors", "load_numel", "load_numel_total"),
        ),
        Hook(f"{_LOADER}.reload.types:LayerReloadingInfo.can_load", "self"),
        Hook(f"{_LOADER}.reload.inplace:finalize_layerwise_reload", since=(0, 32)),
        Hook(f"{_LAYERWISE}:finalize_layerwise_processing", "model, model_config"),
        Hook(f"{_ARGUMENTS}.create_engine_config", "self, ..."),
        Hook(f"{_ARGUMENTS}.create_model_config", "self, ..."),
        Hook(
            _ARGUMENTS,
            fields=(
                *("model", "tokenizer", "hf_config_path", "trust_remote_code", "served_model_name", "load_format"),
                *("model_loader_extra_config", "speculative_config"),
                *("revision", "code_revision", "tokenizer_revision"),
            ),
        ),
    ),
)

_SRT = "sglang.srt"
_SGLANG_LOADER = f"{_SRT}.model_loader.loader"

SGLANG = Engine(
    name="SGLang",
    module="sglang",
    digits=3,  # 0.5.22 and 0.5.23 are a month and a thousand changes apart
    tested=("0.5.22", "0.5.23"),
    hooks=(
        Hook(f"{_SRT}.arg_groups.choices:LOAD_FORMAT_CHOICES"),
        Hook(f"{_SRT}.arg_groups.choices:add_load_format_choices"),
        Hook(f"{_SRT}.plugins.hook_registry:HookRegistry.register"),
        Hook(f"{_SRT}.plugins.hook_registry:HookType.AROUND"),
        Hook(f"{_SRT}.arg_groups.resolution_hooks:register_resolution_hook"),
        Hook(f"{_SRT}.arg_groups.overrides:declare_resolution", "server_args, source, ..."),
        Hook(f"{_SRT}.arg_groups.overrides:resolving_view"),
        Hook(f"{_SRT}.configs.load_config:LoadConfig", fields=("load_format", "model_loader_extra_config")),
        Hook(f"{_SRT}.configs.load_config:LoadConfig._verify_load_format", "self"),
        Hook(f"{_SGLANG_LOADER}:DefaultModelLoader._prepare_weights", "self, model_name_or_path, ..."),
        Hook(
            f"{_SGLANG_LOADER}:DefaultModelLoader._get_weights_iterator",
            "self, source, ...",
            calls=("safetensors_weights_iterator", "buffered_multi_thread_safetensors_weights_iterator"),
        ),
        Hook(f"{_SGLANG_LOADER}:DefaultModelLoader.load_weights_only", "model, weights, target_device"),
        Hook(f"{_SGLANG_LOADER}:DefaultModelLoader.load_model", "self, model_config, device_config"),
        Hook(f"{_SGLANG_LOADER}:safetensors_weights_iterator", "hf_weights_files, ..."),
        Hook(f"{_SGLANG_LOADER}:buffered_multi_thread_safetensors_weights_iterator", "hf_weights_files, ..."),
        Hook(f"{_SRT}.distributed.parallel_state:get_tp_group", ""),
    ),
)
