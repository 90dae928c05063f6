"""vLLM's default loader with deferred tensors. Imports vLLM."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader import default_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from .._errors import UnsupportedError
from .._events import Seen, around, observe, within
from .._group import confirm
from .._paths import without_secrets
from .._report import Report
from ._drift import tested
from ._engine import Chosen, Loads, reloaded, settings_of
from ._formats import refuse_own_loader
from ._known import VLLM
from ._mapped import Mapped
from ._pickles import naming_convert
from ._pins import pinned_in
from ._primed import PRIMED, primed
from ._recorder import Recorder
from ._reload import Cuts
from ._remote import RemoteWeights, is_remote
from ._sleep import install_in_worker
from ._startup import phase
from ._strict import not_used
from ._vllm_online import is_known, layers_loaded, quantises
from ._vllm_reload import begin, ends, has_experts, lend, until_end, waits, weights

_ENGINE = VLLM.name
_ITERATE = "safetensors_weights_iterator"
"""The function that the default loader calls for the tensors of its files."""


class _First(NamedTuple):
    """Facts of the first load that a reload needs."""

    name: str
    """The name of the model, or its path."""
    cuts: Cuts | None
    """The copied parts; None if they are not known: vLLM has copied them out of mapped files itself."""


#: By model. A reload makes a loader of its own.
_first_loads: WeakKeyDictionary[torch.nn.Module, _First] = WeakKeyDictionary()
_replacing = threading.Lock()


@contextmanager
def _iterated_by(function: Callable[..., Any]) -> Iterator[None]:
    """Has the default loader call ``function`` in place of its own iterator."""
    with _replacing:
        own = getattr(default_loader, _ITERATE, None)
        if own is None:  # nothing calls it then
            yield
            return
        setattr(default_loader, _ITERATE, function)
        try:
            yield
        finally:
            setattr(default_loader, _ITERATE, own)


class PenstockModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Load format ``penstock``: the default loader's files and tensors, and of these each rank's own bytes."""

    def __init__(self, load_config: Any) -> None:
        self.settings = settings_of(load_config.model_loader_extra_config or {}, _ENGINE)
        # The default loader refuses formats and keys that it does not know
        plain = copy.copy(load_config)
        plain.load_format, plain.model_loader_extra_config = self.settings.engine_format, {}
        super().__init__(plain)
        self.reports: list[Report] = []
        """Reports of the loads of the last call of `load_weights`."""
        self.fallbacks: list[str] = []
        """The reasons that the call loaded as vLLM does, one for each place of weights."""
        self._loads: Loads | None = None
        self._model: torch.nn.Module | None = None
        self._name: str | None = None
        self._asked = 0
        """Places whose tensors were asked for, of this loader or as vLLM gives them where that was accepted."""

    def load_model(self, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """vLLM's own: makes the model, calls `load_weights`, and processes the weights."""
        refuse_own_loader(_ENGINE, model_config)
        made: torch.nn.Module = super().load_model(vllm_config, model_config, *args, **kwargs)
        return made

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Records what the model's own loader copies, and loads that."""
        refuse_own_loader(_ENGINE, model_config)
        with around(observe("load", engine="vllm")) as seen:
            try:
                self._load_weights(model, model_config, seen)
            except BaseException:
                seen.named(self._place(model_config.model))  # a load whose files are not found has no name yet
                raise

    def _load_weights(self, model: torch.nn.Module, model_config: Any, seen: Seen) -> None:
        install_in_worker()
        self._loads = loads = Loads(_device_of(model), self.settings.options)
        loads.seen = seen
        loads.engine, loads.strict, loads.mapped = _ENGINE, self.settings.strict, self.settings.mapped
        loads.fresh = model
        loads.join(_ranks)
        self.reports, self.fallbacks, self._asked = [], loads.fallbacks, 0
        try:
            with loads.barrier():
                with phase("recording"), layers_loaded(model, loads.recorders):
                    super().load_weights(model, model_config)
                    self._check_asked()
                self.reports = loads.run(model)
        finally:
            self._loads = None
        _first_loads[model] = _First(model_config.model, loads.cuts())

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors. Outside of `load_weights`, as in a reload, their copies are made at once."""
        self._model, self._name, self._asked = model, model_config.model, 0
        if self._loads is not None:
            return self._loads.begun(self._checked(model_config, model))
        return self._checked(model_config, model)

    def _checked(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        if self._loads is None:
            begin()
        for found in super().get_all_weights(model_config, model):
            self._check_asked()  # before a tensor of vLLM's own is copied
            yield found

    def _reload_mapped(self, mapped: Mapped, loads: Loads, model: torch.nn.Module) -> Any:
        """Mapped tensors for a reload, which vLLM copies. To be primed."""
        lend(mapped)
        with until_end(loads.seen), loads.joined():
            yield PRIMED
            yield from mapped.weights("layer")
            self.reports += loads.run(model)
            if loads.group is not None:
                confirm(loads.group)

    def _reload(self, recorder: Recorder, loads: Loads) -> Any:
        """Deferred tensors for a reload; its ranks make one load. To be primed."""
        with until_end(loads.seen), loads.joined():
            yield PRIMED
            yield from weights(recorder, loads.group, self.reports.append)
            if loads.group is not None:
                confirm(loads.group)

    def _check_asked(self) -> None:
        """Raises UnsupportedError if tensors come that this loader was not asked for, unless the user accepts that."""
        if self._asked == 0:
            self._asked = 1  # said once
            why = "this vLLM does not ask its loader for tensors where it used to (_get_weights_iterator)"
            why = f"{why}; tested: {tested(VLLM)}"
            if self._loads is not None or self._name is None:
                self._refuse(why)
                return
            with self._reload_seen(self._name) as seen:
                self._refuse(why)
                seen.forget()  # vLLM loads in its own way

    def _refuse(self, why: str, way_out: str = "") -> None:
        not_used(_ENGINE, why, self.settings.strict, way_out)
        if self._loads is not None and why not in self._loads.fallbacks:
            self._loads.fallbacks.append(why)
            self._loads.seen.fell_back(why)

    def _prepare_weights(self, model_name_or_path: str, *args: Any, **kwargs: Any) -> Any:
        place = self._place(model_name_or_path)
        with naming_convert(place, "vLLM"):
            return super()._prepare_weights(place, *args, **kwargs)

    def download_model(self, model_config: Any) -> None:
        """Downloads the files, if they are not to be read from where they are."""
        if not is_remote(self._place(model_config.model)):
            super().download_model(model_config)

    def _place(self, name: str) -> str:
        """Where the weights of a model are: at ``weights=``, for the one that is served."""
        if not isinstance(self.settings.weights, str):
            return self.settings.place_of(name)
        if self._name not in (None, name):
            return name
        first = None if self._model is None else _first_loads.get(self._model)
        # A reload may name another model: that one is meant then
        return self.settings.weights if first is None or first.name == name else name

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if self._loads is not None:
            return self._found(source, self._loads.seen)  # `load_weights` ends it
        with self._reload_seen(source.model_or_path) as seen:
            return self._found(source, seen)

    @contextmanager
    def _reload_seen(self, name: str) -> Iterator[Seen]:
        """Reports a reload of a model to operators. An error in this block ends the report."""
        seen = observe("reload", engine="vllm").begin()
        try:
            with within(seen):
                yield seen
        except BaseException as error:
            seen.named(self._place(name))  # as in `load_weights`
            seen.end(error)
            raise

    def _found(self, source: Any, seen: Seen) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of one place."""
        place = self._place(source.model_or_path)
        if not is_remote(place):
            return self._iterator(source, None, seen)
        # A reload takes what is there then
        pinned = pinned_in(source.model_or_path) if self._loads is not None else None
        remote = RemoteWeights(place, self.settings.storage, self.settings.files, pinned=pinned)
        try:
            # A filter of shards looks into them; tensors that nothing copies are not read anyway
            unfiltered = {"is_unused_weight": None} if hasattr(source, "is_unused_weight") else {}
            return self._iterator(dataclasses.replace(source, model_or_path=remote.folder, **unfiltered), remote, seen)
        finally:
            remote.close()

    def _iterator(self, source: Any, remote: RemoteWeights | None, seen: Seen) -> Iterator[tuple[str, torch.Tensor]]:
        own: Any = getattr(default_loader, _ITERATE, None)
        asked = []

        def iterate(files: Sequence[str], *args: Any, local_expert_ids: Any = None, **kwargs: Any) -> Any:
            chosen = Chosen(files, remote)
            asked.append(chosen)

            def keep(name: str) -> bool:
                return not should_skip_weight(name, local_expert_ids)

            def otherwise() -> Any:
                return own(files, *args, local_expert_ids=local_expert_ids, **kwargs)

            if self._loads is not None and self.load_config.safetensors_load_strategy == "torchao":
                # vLLM makes tensors of torchao's own classes of them
                return self._loads.fall_back("the checkpoint holds tensors of torchao's classes", chosen, otherwise)
            if self._loads is not None and self._model is not None and quantises(self._model) and not is_known():
                why = "this vLLM quantises layers while it loads them, in a way that Penstock does not know"
                return self._loads.fall_back(why, chosen, otherwise)
            if self._loads is not None:
                return self._loads.weights(chosen, keep, otherwise)
            model = self._model
            first = None if model is None else _first_loads.get(model)
            device = torch.device("cpu") if model is None else _device_of(model)
            loads = Loads(device, self.settings.options)
            loads.seen = seen
            return reload(chosen, keep, otherwise, loads, model, first)

        def reload(
            chosen: Chosen,
            keep: Callable[[str], bool],
            otherwise: Callable[[], Any],
            loads: Loads,
            model: torch.nn.Module | None,
            first: _First | None,
        ) -> Any:
            later = model is not None and waits(model, remote is not None)
            if model is not None and remote is None and ends():
                loads.mapped = self.settings.mapped
                # A layer with experts has to be there before it is processed: little can be put off
                always = not later or has_experts(model)
                mapped = loads.reload_mapped(_ranks, chosen, keep, always)
                if mapped is not None:
                    return primed(self._reload_mapped(mapped, loads, model))
            if later:
                recorder = loads.reloading(_ranks, chosen, keep)
                if recorder is not None:
                    return primed(self._reload(recorder, loads))
            loads.part()
            cuts: Cuts | None = {} if first is None else first.cuts

            def learn(found: Cuts) -> None:
                if model is not None and first is not None:
                    _first_loads[model] = _First(first.name, found)

            how = self.settings.options, cuts, otherwise, self._refuse, _ranks(), learn, loads.seen
            return reloaded(chosen, keep, loads.device, *how)

        with _iterated_by(iterate):
            found: Iterator[tuple[str, torch.Tensor]] = super()._get_weights_iterator(source)
        self._asked += 1
        if not asked:
            # vLLM has chosen other files, or reads these in a way that is not known
            place = without_secrets(source.model_or_path if remote is None else remote.place)
            why = f"its loader has not called {_ITERATE} for the files of {place} (tested: {tested(VLLM)})"
            if remote is not None:
                raise UnsupportedError(f"{place}: {why}, and nothing else can read them there")
            ways = "if they are no safetensors files, convert them with `penstock convert`"
            self._refuse(why, ways)
            if self._loads is None:
                seen.forget()  # vLLM loads in its own way
        return found


def _ranks() -> Any:
    """The ranks that make the same model's load: those of tensor parallelism. None if this rank is alone.

    A draft model may be loaded by the ranks of one pipeline stage only, and then they are these.
    """
    try:
        group = parallel_state.get_tp_group()
    except AssertionError:  # vLLM has no ranks yet
        return None
    return group.cpu_group if group is not None and group.world_size > 1 else None


def _device_of(model: torch.nn.Module) -> torch.device:
    """Where the parameters of a model are."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    return torch.get_default_device()
