"""Quantisation that deferred tensors cannot serve: refused by name, before anything is read."""

from __future__ import annotations

from typing import Any

from .._errors import UnsupportedError

#: Quantisations for which an engine has a loader of its own, with a load format of this name.
_OWN_LOADERS = frozenset({"bitsandbytes", "gguf"})
#: Quantisations that SGLang makes while it copies tensors into parameters. Its kernels read memory that
#: torch's dispatcher does not see.
_WHILE_LOADING = frozenset({"nvfp4_online", "quark_int4fp8_moe", "quark_mxfp4"})
#: Quantisations that SGLang leaves to another library's model, if the checkpoint is not quantised.
_OTHER_LIBRARIES = {
    "auto-round-int8": "auto-round",
    "modelopt": "ModelOpt",
    "modelopt_fp8": "ModelOpt",
    "modelopt_mixed": "ModelOpt",
}


def refuse_own_loader(engine: str, model_config: Any) -> None:
    """Refuses a model whose quantisation has a loader of its own.

    Raises:
        UnsupportedError: it has. No option changes that: the default loader cannot load such a model either.
    """
    name = getattr(model_config, "quantization", None)
    if name in _OWN_LOADERS:
        raise UnsupportedError(
            f"{engine}: load format penstock cannot load quantization {name} of {_name_of(model_config)}: "
            f"{engine} has a loader of its own for it; give --load-format {name}"
        )


def quantised_by_sglang_while_loaded(model_config: Any) -> str:
    """The reason that SGLang has to load a model in its own way; "" if it need not."""
    name = getattr(model_config, "quantization", None)
    if name in _WHILE_LOADING or (name == "modelopt_fp4" and not _has_fp4(model_config)):
        return f"quantization {name} changes weights while they are copied"
    if name in _OTHER_LIBRARIES and not model_config._is_already_quantized():
        return f"{_OTHER_LIBRARIES[name]} loads the model by itself, and quantises it ({name})"
    return ""


def _has_fp4(model_config: Any) -> bool:
    """Whether a checkpoint for ModelOpt's FP4 has FP4: SGLang makes that of BF16 and of FP8, too."""
    about = getattr(model_config.hf_config, "quantization_config", None)
    method = about.get("quant_method") if isinstance(about, dict) else None
    return bool(model_config._is_already_quantized()) and method != "fp8"


def _name_of(model_config: Any) -> str:
    return str(getattr(model_config, "model", None) or getattr(model_config, "model_path", "this model"))
