"""vLLM: ``--load-format penstock``.

vLLM finds `register` by an entry point and calls it in every process. The loader is vLLM's own default loader, which
chooses the files and the tensors. It gets deferred tensors in place of real ones, so each rank reads the bytes of its
own parameters and no others.
"""

from __future__ import annotations

import logging

from ._format import FORMAT

_logger = logging.getLogger("penstock")


def register() -> None:
    """Makes the load format ``penstock`` known to vLLM. May be called repeatedly.

    If vLLM's interface has changed too much, one line is logged, and a loader of this format is an error. With
    ``"strict": false`` it loads as ``safetensors`` does.
    """
    try:
        from vllm.model_executor.model_loader import (
            _LOAD_FORMAT_TO_MODEL_LOADER,
            register_model_loader,
        )
    except ImportError as error:
        _logger.warning("penstock: this vLLM takes no load formats of plugins (%s)", error)
        return
    known = _LOAD_FORMAT_TO_MODEL_LOADER.get(FORMAT)
    if known is not None and known.__module__.startswith("penstock."):
        return
    unknown = None
    try:
        from ._vllm_loader import PenstockModelLoader as loader
    except Exception as error:  # an interface that has changed fails in ways of its own
        unknown = repr(error)
        _logger.warning("penstock: this vLLM is not one that it knows (%s)", unknown)
        from . import _vllm_fallback

        _vllm_fallback.unknown = unknown
        loader = _vllm_fallback.FallbackModelLoader  # type: ignore[misc]
    register_model_loader(FORMAT)(loader)
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as error:
        _logger.warning("penstock: this vLLM takes no addresses of models, because its interface differs: %s", error)
        return
    from ._vllm_arguments import install

    install(EngineArgs, unknown)
