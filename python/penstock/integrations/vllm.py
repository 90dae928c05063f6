"""vLLM: ``--load-format penstock``.

vLLM finds `register` by an entry point and calls it in every process. The loader is vLLM's own default loader, which
chooses the files and the tensors. It gets deferred tensors in place of real ones, so each rank reads the bytes of its
own parameters and no others.
"""

from __future__ import annotations

import logging
from typing import Any

from .._errors import UnsupportedError
from .._events import ENGINE_LOGGERS, in_engine
from ._drift import difference
from ._format import FORMAT
from ._known import VLLM

_logger = logging.getLogger("penstock")


def register() -> None:
    """Makes the load format ``penstock`` known to vLLM. May be called repeatedly.

    If a place that this hooks into has another form than the known one (`_known.VLLM`), a configuration or a loader of
    this format is an error that names it. With ``"strict": false`` it loads as ``safetensors`` does.
    """
    try:
        from vllm.model_executor.model_loader import (
            _LOAD_FORMAT_TO_MODEL_LOADER,
            register_model_loader,
        )
    except ImportError as error:
        _logger.warning("penstock: this vLLM takes no load formats of plugins (%s)", error)
        return
    in_engine("vllm")
    _forward_warnings()
    known = _LOAD_FORMAT_TO_MODEL_LOADER.get(FORMAT)
    if known is not None and known.__module__.startswith("penstock."):
        return
    unknown = difference(VLLM)
    try:
        loader = _loader(unknown)
    except Exception as error:  # an interface that has changed fails in ways of its own
        unknown = unknown or f"its interface differs from that of {VLLM.tested[-1]}, the last known version: {error!r}"
        try:
            loader = _loader(unknown)
        except ImportError:
            _logger.warning("penstock: no load format %s: %s", FORMAT, unknown)
            return
    register_model_loader(FORMAT)(loader)
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as error:
        _logger.warning("penstock: this vLLM takes no addresses of models, because its interface differs: %s", error)
        return
    from ._vllm_arguments import install

    install(EngineArgs, unknown)


def _loader(unknown: str | None) -> Any:
    """The class for this format. ``unknown``: what is not known of this vLLM."""
    if unknown is None:
        from ._vllm_loader import PenstockModelLoader

        return PenstockModelLoader
    from . import _vllm_fallback

    _vllm_fallback.unknown = unknown
    return _vllm_fallback.FallbackModelLoader


class _Forward(logging.Handler):
    """Gives the warnings of Penstock to vLLM's handlers too: vLLM configures no loggers but those below its own."""

    def emit(self, record: logging.LogRecord) -> None:
        vllm = logging.getLogger("vllm")
        # Where vLLM leaves its records to the root's handlers, that has got them already
        if vllm.handlers and not vllm.propagate:
            logging.getLogger(ENGINE_LOGGERS["vllm"]).handle(record)


def _forward_warnings() -> None:
    if not any(isinstance(handler, _Forward) for handler in _logger.handlers):
        _logger.addHandler(_Forward())


def register_lora() -> None:
    """Makes LoRA adapters below ``PENSTOCK_LORA_PREFIX`` known to vLLM, if that is set. May be called repeatedly.

    Raises:
        InvalidError: a variable has an impossible value.
        NotFoundError: the prefix is a folder that does not exist.
        UnsupportedError: this vLLM reads adapters in a way that is not known.
    """
    from ._lora_settings import PREFIX, lora_settings

    settings = lora_settings()
    if settings is None:
        return
    try:
        from . import _vllm_lora
    except ImportError as error:
        raise UnsupportedError(f"{PREFIX} is set, and this vLLM takes no resolvers of adapters: {error}") from error
    _vllm_lora.install(settings)
