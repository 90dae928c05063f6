"""SGLang's default loader with deferred tensors. Imports SGLang."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader import loader as sglang_loader

from .._core import Options
from .._report import Report
from ._engine import Loads, settings_of

#: What the default loader calls for the tensors of the files that it has chosen.
_ITERATE = ("buffered_multi_thread_safetensors_weights_iterator", "safetensors_weights_iterator")
#: SGLang copies tensors of the CPU in threads of its own, later, except those with this attribute.
_AT_ONCE = "_sglang_runai_streamer_tensor"
#: Keys that belong to SGLang's own iterators, and mean nothing here.
_THEIRS = ("enable_multithread_load", "num_threads")

_loads: ContextVar[Loads | None] = ContextVar("penstock_sglang_loads", default=None)
_replacing = threading.Lock()

last_reports: list[Report] = []
"""Of the last call of the loader in this process."""


def claim(config: Any) -> None:
    """Takes a configuration whose format is penstock: to SGLang it is safetensors."""
    extra = dict(config.model_loader_extra_config or {})
    settings = settings_of({key: value for key, value in extra.items() if key not in _THEIRS}, "SGLang")
    config.load_format = LoadFormat.SAFETENSORS
    config.model_loader_extra_config = {key: extra[key] for key in _THEIRS if key in extra}
    config.penstock = settings


@contextmanager
def _iterated_by(make: Any) -> Iterator[None]:
    with _replacing:
        own = {name: getattr(sglang_loader, name) for name in _ITERATE}
        for name, function in own.items():
            setattr(sglang_loader, name, make(function))
        try:
            yield
        finally:
            for name, function in own.items():
                setattr(sglang_loader, name, function)


def iterated(original: Any, loader: Any, options: Options, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """The tensors of one place: deferred within `loaded`, SGLang's own elsewhere. They are asked for before that."""
    loads = _loads.get()
    if loads is None:
        yield from original(loader, *args, **kwargs)
        return
    loads.options = options

    def make(own: Any) -> Any:
        def iterate(files: Sequence[str], *more: Any, **named: Any) -> Any:
            return loads.weights(files, None, lambda: own(files, *more, **named))

        return iterate

    with _iterated_by(make):
        found = original(loader, *args, **kwargs)
    yield from found


def loaded(original: Any, model: torch.nn.Module, weights: Any, target_device: torch.device) -> Any:
    """Records what the model's own loader copies, and loads that."""
    loads = Loads(torch.device(target_device), None, mark=_AT_ONCE)
    token = _loads.set(loads)
    try:
        with loads.barrier():
            found = original(model, weights, target_device)
            last_reports[:] = loads.run(model)
        return found
    finally:
        _loads.reset(token)
