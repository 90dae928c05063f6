"""SGLang's default loader with deferred tensors. Imports SGLang."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.model_loader import loader as sglang_loader

from .._errors import MissingDtypeError, UnsupportedError
from .._events import NOTHING, Seen, around, observe, within
from .._group import say
from .._member import new_group
from .._paths import without_secrets
from .._report import Report
from ._drift import tested
from ._engine import Chosen, Loads, Settings
from ._formats import quantised_by_sglang_while_loaded, refuse_own_loader
from ._known import SGLANG
from ._pickles import naming_convert
from ._pins import pinned_in
from ._remote import RemoteWeights, is_remote
from ._sleep import install_in_worker
from ._startup import phase
from ._strict import not_used

_ENGINE = SGLANG.name

#: Functions that the default loader calls for the tensors of its files.
_ITERATE = ("buffered_multi_thread_safetensors_weights_iterator", "safetensors_weights_iterator")
#: SGLang copies tensors of the CPU in threads of its own, later, except those with this attribute.
_AT_ONCE = "_sglang_runai_streamer_tensor"

_loads: ContextVar[Loads | None] = ContextVar("penstock_sglang_loads", default=None)
_replacing = threading.Lock()
_installed = False

last_reports: list[Report] = []
"""Reports of the last load of this process that was one of Penstock's."""


def install() -> None:
    """Puts Penstock around methods of the default loader, once in a process.

    Raises:
        AttributeError: SGLang lacks one of the names that this needs, which `_known.SGLANG` lists. Nothing has changed.
    """
    global _installed
    with _replacing:
        if _installed:
            return
        default = sglang_loader.DefaultModelLoader
        # Not as hooks of SGLang's registry: it may have been applied to these methods already, and applies only once
        around = {
            "_prepare_weights": _around(default._prepare_weights, _prepared),
            "_get_weights_iterator": _around(default._get_weights_iterator, _iterated),
            "load_weights_only": staticmethod(_around(default.load_weights_only, _loaded)),
        }
        for name, function in around.items():
            setattr(default, name, function)
        for kind in (default, *_below(default)):
            if "load_model" in vars(kind):
                kind.load_model = _around(kind.load_model, _started)
        _installed = True


def _below(kind: Any) -> Iterator[Any]:
    """The classes that are derived from one."""
    derived: Any
    for derived in kind.__subclasses__():
        yield derived
        yield from _below(derived)


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return call


def _settings(loader: Any) -> Settings | None:
    """The settings that a configuration with format penstock carries."""
    found: Settings | None = getattr(loader.load_config, "penstock", None)
    return found


def _prepared(original: Any, loader: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """The files of one place. The model's own place is the first that a loader asks for; others are secondary.

    Where tensors are asked for that are no model's, as those of an adapter are, there is none (see `_iterated`).
    """
    settings = _settings(loader)
    if settings is not None:
        named = model
        first = vars(loader).setdefault("penstock_model", model)
        if model == first or not isinstance(settings.weights, str):
            model = settings.place_of(model)
        if is_remote(model):
            remote = RemoteWeights(model, settings.storage, settings.files, pinned=pinned_in(named))
            _remotes(loader)[remote.folder] = remote
            model = remote.folder
        with naming_convert(model, "SGLang"):
            return original(loader, model, *args, **kwargs)
    return original(loader, model, *args, **kwargs)


def _remotes(loader: Any) -> dict[str, RemoteWeights]:
    """By folder: what has been prepared and is still to be iterated over."""
    found: dict[str, RemoteWeights] = vars(loader).setdefault("penstock_remotes", {})
    return found


@contextmanager
def _iterated_by(make: Callable[[Any], Any]) -> Iterator[None]:
    """Has the default loader call other functions in place of its own iterators."""
    with _replacing:
        own = {name: getattr(sglang_loader, name) for name in _ITERATE if hasattr(sglang_loader, name)}
        for name, function in own.items():
            setattr(sglang_loader, name, make(function))
        try:
            yield
        finally:
            for name, function in own.items():
                setattr(sglang_loader, name, function)


def _iterated(original: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
    """The tensors of one place. If a model gets none, operators and the other ranks are told why."""
    source = args[0] if args else kwargs.get("source")
    settings, loads = _settings(loader), _loads.get()
    if settings is None or getattr(source, "model_config", None) is None:
        return _chosen(original, loader, source, *args, **kwargs)
    place = settings.place_of(str(getattr(source, "model_or_path", "")))
    # An update asks for its files before `_loaded` is called
    seen: Seen = NOTHING if loads is not None else observe("load", place, engine="sglang").begin()
    try:
        with within(seen):
            found = _chosen(original, loader, source, *args, **kwargs)
    except BaseException as error:
        if loads is not None:
            loads.engine, loads.strict = _ENGINE, settings.strict
            loads.seen.named(place)
        seen.end(error)
        if "penstock_met" not in vars(loader):  # an update; or `_started` tells them
            _tell(error)
        raise
    seen.forget()
    return found


def _chosen(original: Any, loader: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    """The tensors of one place: deferred if `_loaded` takes them, SGLang's own if anything else does.

    The files are chosen here, because an update takes an error of that for one that has changed nothing.
    """
    settings = _settings(loader)
    if settings is None:
        return original(loader, *args, **kwargs)
    asked = []
    model_config = getattr(source, "model_config", None)
    if model_config is None:
        vars(loader).setdefault("penstock_model", None)  # no model's: a place of its own
    why_not = "" if model_config is None else _own_way(model_config, settings)

    def make(own: Any) -> Any:
        def iterate(files: Sequence[str], *more: Any, **named: Any) -> Iterator[tuple[str, torch.Tensor]]:
            asked.append(files)
            remote = _remotes(loader).pop(str(Path(files[0]).parent), None)
            if remote is not None:
                remote.close()  # its files have been chosen
            chosen = Chosen(files, remote)

            def later() -> Iterator[tuple[str, torch.Tensor]]:
                loads = _loads.get()
                if loads is None:
                    yield from _outside(chosen, settings, lambda: own(files, *more, **named))
                else:
                    vars(loader)["penstock_used"] = True
                    loads.engine, loads.strict = _ENGINE, settings.strict
                    loads.options = settings.options
                    vars(loader)["penstock_met"] = True
                    loads.join(_ranks)
                    if why_not:
                        yield from loads.fall_back(why_not, chosen, lambda: own(files, *more, **named))
                        return
                    yield from loads.weights(chosen, None, lambda: own(files, *more, **named))

            return later()

        return iterate

    with _iterated_by(make):
        found = original(loader, *args, **kwargs)
    if not asked:
        place = without_secrets(str(getattr(source, "model_or_path", "its folder")))
        why = f"it has called none of {', '.join(_ITERATE)} for the files of {place} (tested: {tested(SGLANG)})"
        not_used(
            _ENGINE, why, settings.strict, "if they are no safetensors files, convert them with `penstock convert`"
        )
        vars(loader)["penstock_used"] = True  # that was said
    return found


def _outside(chosen: Chosen, settings: Settings, otherwise: Callable[[], Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are no load of a model's weights: of an adapter, or for a copy of experts. They are real.

    Raises:
        MissingDtypeError: torch has no such dtype.
        UnsupportedError: Penstock cannot give them, and ``otherwise`` cannot read them or the user has not accepted it.
    """
    try:
        checkpoint, keep = chosen.opened(None)
        names = None if keep is None else list(filter(keep, checkpoint))
        tensors = checkpoint.stream(names=names, framework="torch", options=settings.options)
    except MissingDtypeError:
        raise
    except UnsupportedError as error:
        chosen.refuse_fallback(str(error))
        not_used(_ENGINE, str(error), settings.strict)
        tensors = otherwise()
    yield from tensors


def _started(original: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
    """A model. What loads it in a way of its own, and never asks for tensors here, is noticed."""
    settings = _settings(loader)
    if settings is not None:
        install_in_worker()
        vars(loader)["penstock_used"] = vars(loader)["penstock_met"] = False
    try:
        if settings is not None:
            _own_way(args[0] if args else kwargs.get("model_config"), settings)
        model = original(loader, *args, **kwargs)
    except BaseException as error:
        if settings is not None and not vars(loader)["penstock_met"]:
            _tell(error)
        raise
    if settings is not None and not vars(loader)["penstock_used"]:
        vars(loader)["penstock_used"] = True
        not_used(_ENGINE, f"{type(loader).__name__} has asked for no tensors of the checkpoint", settings.strict)
    return model


def _own_way(model_config: Any, settings: Settings) -> str:
    """The reason that SGLang has to load this model in its own way, if the user accepts that; "" if it need not.

    Raises:
        UnsupportedError: the user does not accept it, or SGLang's default loader cannot load it either.
    """
    refuse_own_loader(_ENGINE, model_config)
    why = quantised_by_sglang_while_loaded(model_config)
    if why and settings.strict:
        not_used(_ENGINE, why, True)
    return why


def _tell(error: BaseException) -> None:
    """Tells the other ranks, which wait for this one or will, why it does not come to their load."""
    with suppress(BaseException):
        if (group := _ranks()) is not None:
            member = new_group(group)
            say(member, error)
            member.leave()


def _ranks() -> Any:
    """The ranks of tensor parallelism, which make the same model's load. None if this rank is alone."""
    group = parallel_state.get_tp_group()
    return group.cpu_group if group.world_size > 1 else None


def _loaded(original: Any, model: torch.nn.Module, weights: Any, target_device: torch.device) -> Any:
    """Records what the model's own loader copies, and loads that."""
    loads = Loads(torch.device(target_device), None, mark=_AT_ONCE)
    token = _loads.set(loads)
    try:
        with around(observe("load", engine="sglang")) as loads.seen:
            try:
                with loads.barrier():
                    with phase("recording"):
                        found = original(model, weights, target_device)
                    reports = loads.run(model)
            finally:
                if loads.engine != _ENGINE:
                    loads.seen.forget()  # SGLang loads in another format
    finally:
        _loads.reset(token)
    if reports:
        last_reports[:] = reports
    return found
