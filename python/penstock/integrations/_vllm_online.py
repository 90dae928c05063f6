"""vLLM's online quantisation: layers that are quantised while the model's loader still copies. Imports vLLM.

The parameters of such a layer have no memory at first. vLLM keeps what the loader copies until the layer has all of its
tensors. Then it makes the parameters, copies into them, quantises them, and drops them. So a layer's bytes have to be
there in between: one load for each layer, by this rank alone. Kernels that quantise need not reach torch's dispatcher.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ._recorder import Recorder
from ._vllm_reload import loaded_before_processing

try:
    from vllm.model_executor.model_loader.reload import layerwise
except ImportError:  # a vLLM that quantises in another way
    layerwise = None

_PROCESS = "_layerwise_process"
"""The functions that vLLM calls for a layer that has all of its tensors."""
_replacing = threading.Lock()


def quantises(model: torch.nn.Module) -> bool:
    """Whether vLLM quantises layers of this model while it loads."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return any(getattr(method, "uses_meta_device", False) for method in methods)


def is_known() -> bool:
    """Whether this vLLM does so in the way that this module knows."""
    names = (_PROCESS, "get_layerwise_info", "is_deferred_attention_layer")
    return all(callable(getattr(layerwise, name, None)) for name in names)


@contextmanager
def layers_loaded(model: torch.nn.Module, recorders: list[Recorder]) -> Iterator[None]:
    """Within it, what is recorded of a layer is loaded before vLLM quantises it. ``recorders`` may become more.

    When it ends, the layers with padding are quantised: they never have all of their elements. vLLM would do it after
    the load, when nothing loads what it copies.
    """
    if not quantises(model) or not is_known():
        yield
        return
    with _replacing:
        own = getattr(layerwise, _PROCESS)

        @functools.wraps(own)
        def process(layer: torch.nn.Module, info: Any) -> Any:
            with loaded_before_processing(layer, recorders):
                return own(layer, info)

        setattr(layerwise, _PROCESS, process)
        try:
            yield
            _process_padded(model)
        finally:
            setattr(layerwise, _PROCESS, own)


def _process_padded(model: torch.nn.Module) -> None:
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        waits = info.can_load() and 0 < info.load_numel < info.load_numel_total
        if waits and not layerwise.is_deferred_attention_layer(layer):
            getattr(layerwise, _PROCESS)(layer, info)
