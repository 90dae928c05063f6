"""vLLM's reloads with deferred tensors: one load into the parameters that are served. Imports vLLM.

vLLM reloads layer by layer. It keeps what the model's loader copies until a layer has all of its tensors. Then it makes
new parameters, copies into these, processes them, and copies the result into the parameters that are served. Here the
first copy is recorded, and the last one redirects it: the bytes go straight to the parameters that are served, in one
load when all tensors have been given. If something reads or writes the new parameters in between, what goes to them is
loaded before.

vLLM processes a layer by code that need not reach torch's dispatcher (kernels of Triton). So processing that is not
known to leave weights alone begins with a load of what is outstanding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise

from .._errors import CancelledError, PenstockError
from .._events import Seen
from .._report import Report
from ._deferred import Deferred
from ._mapped import Mapped, close_all
from ._recorder import Recorder, watching

try:
    from vllm.model_executor.model_loader.reload import inplace
except ImportError:  # before 0.32 the runner reloads, and does this itself
    inplace = None

#: Methods whose work on weights, if there is any, goes through torch's dispatcher.
_DISPATCHED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
#: Methods of fused experts that are not quantised, by name: their module has moved before.
_EXPERTS = "UnquantizedFusedMoEMethod"
#: Recorders of reloads that have begun and not ended.
_under_way: list[Recorder] = []
#: Mapped files of such reloads.
_lent: list[Mapped] = []
#: The operations of these reloads.
_seen: list[Seen] = []


def waits(model: torch.nn.Module, is_remote: bool) -> bool:
    """Whether a reload of this model may put copies off.

    Not if weights are quantised: each layer is loaded on its own then, and parts that are read ahead are better. With
    fused experts that holds for files on servers, where each load takes a round trip. Nor if weights come from several
    places: a layer may have copies of two recorders then, and only one of them can put off all of its bytes.
    """
    if getattr(model, "secondary_weights", ()):
        return False

    def known(method: Any) -> bool:
        return type(method) in _DISPATCHED or (not is_remote and type(method).__name__ == _EXPERTS)

    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return _hooked() and all(known(one) for one in methods if isinstance(one, QuantizeMethodBase))


def has_experts(model: torch.nn.Module) -> bool:
    """Whether a reload that puts copies off has to load before it processes such layers."""
    return any(type(getattr(module, "quant_method", None)).__name__ == _EXPERTS for module in model.modules())


def ends() -> bool:
    """Whether the end of a reload is heard of: without that, leases would last until the next one."""
    return _hooked()


def begin() -> None:
    """Begins a reload, of one place or several: what one that failed has left is nobody's any more."""
    _under_way.clear()
    _end_seen(CancelledError("vLLM has not ended this reload"))
    with suppress(PenstockError):  # it has failed already
        _take_back()


def lend(mapped: Mapped) -> None:
    """Gives vLLM mapped files, whose leases are given back when the reload has ended, or the next one begins."""
    _lent.append(mapped)


@contextmanager
def until_end(seen: Seen) -> Iterator[None]:
    """Keeps the operation of a reload open until vLLM ends it. Layers may wait for their copies until then."""
    seen.begin()
    _seen.append(seen)
    try:
        yield
    except BaseException as error:
        seen.end(error)
        raise


def _end_seen(error: BaseException | None = None) -> None:
    while _seen:
        _seen.pop(0).end(error)


def _take_back() -> None:
    lent = list(_lent)
    _lent.clear()
    close_all(lent)


def weights(recorder: Recorder, group: Any, done: Callable[[Report], None]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields deferred tensors of one place, layer by layer. Behind the last one all copies are made, in one load of all
    ranks. Layers that wait for tensors of another place keep theirs until vLLM processes them."""
    _under_way.append(recorder)
    yield from recorder.weights(order="layer")
    done(recorder.run(None, group))


def _waiting_for(info: Any) -> list[Recorder]:
    """The recorders whose tensors vLLM has kept for a layer."""
    found: list[Recorder] = []
    for _, arguments in info.loaded_weights:
        for value in arguments.arguments.values():
            if isinstance(value, Deferred):
                one: Any = value._root.recording
                if one in _under_way and one not in found:
                    found.append(one)
    return found


def _flush(recorders: list[Recorder]) -> None:
    for recorder in recorders:
        recorder.flush()


@contextmanager
def loaded_before_processing(layer: torch.nn.Module, recorders: list[Recorder]) -> Iterator[None]:
    """Within it, what processes the layer's weights finds them, however it looks at them."""
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase) or type(method) in _DISPATCHED:
        yield
        return
    name = "process_weights_after_loading"
    before, process = vars(method).get(name), getattr(method, name)

    def loaded(*args: Any, **kwargs: Any) -> Any:
        _flush(recorders)
        return process(*args, **kwargs)

    setattr(method, name, loaded)
    try:
        yield
    finally:
        delattr(method, name) if before is None else setattr(method, name, before)


def _processing(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of what copies a layer's tensors and processes them."""

    @functools.wraps(original)
    def process(layer: torch.nn.Module, info: Any) -> Any:
        recorders = _waiting_for(info)
        if not recorders:
            return original(layer, info)
        with watching(recorders), loaded_before_processing(layer, recorders):
            return original(layer, info)

    return process


def _restoring(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of what copies a layer's new tensors into those that are served."""

    @functools.wraps(original)
    def restore(layer: torch.nn.Module, info: Any) -> Any:
        if _under_way and info.kernel_tensors is not None:
            for served in info.kernel_tensors:
                for name, to in served.items():
                    made = getattr(layer, name, None)
                    if made is not None and any(one.redirect(made, to) for one in _under_way):
                        setattr(layer, name, to)  # vLLM copies it onto itself then
        return original(layer, info)

    return restore


def _ending(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of what ends a reload: layers that did not get all of their elements, and attention."""

    @functools.wraps(original)
    def end(*args: Any, **kwargs: Any) -> Any:
        try:
            _flush(_under_way)
            found = original(*args, **kwargs)
            _flush(_under_way)
            _under_way.clear()
            _take_back()
        except BaseException as error:
            _under_way.clear()
            _end_seen(error)
            with suppress(PenstockError):  # the first error is the one that is raised
                _take_back()
            raise
        _end_seen()
        return found

    return end


#: The replaced functions in modules of vLLM's reload, with the functions that make the replacements.
_HOOKS = (
    (layerwise, "_layerwise_process", _processing),
    (layerwise, "_reload_attention_scales", _processing),
    (layerwise, "_copy_and_restore_kernel_tensors", _restoring),
    # `inplace` has its own name for what ends a reload; the runner's calls this one
    (inplace, "finalize_layerwise_reload", _ending)
    if inplace is not None
    else (layerwise, "finalize_layerwise_processing", _ending),
)


@functools.cache
def _hooked() -> bool:
    """Replaces vLLM's functions, once. False: this vLLM has others."""
    if not all(callable(getattr(module, name, None)) for module, name, _ in _HOOKS):
        return False
    for module, name, replacement in _HOOKS:
        setattr(module, name, replacement(getattr(module, name)))
    return True
