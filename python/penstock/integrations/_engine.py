"""The common parts of the plugins for engines: their options, and the loads of one start-up or of one reload."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import torch

from .. import _event_lines as _event_lines  # each load writes one, at its end
from .._checkpoint import Checkpoint
from .._checkpoint import open as open_checkpoint
from .._choices import Storage
from .._collector import collector_paused
from .._core import Options, storage_settings, storage_table
from .._errors import (
    CancelledError,
    InvalidError,
    MissingDtypeError,
    PenstockError,
    StalledError,
    UnsupportedError,
)
from .._events import NOTHING, Seen, through
from .._group import Rendezvous, confirm
from .._group_stream import compare
from .._joined import joined
from .._member import new_group, place_in
from .._options import make_options
from .._report import Report
from .._unwanted import read_besides
from ._first_touch import Parameters, touching
from ._index import absent
from ._mapped import Mapped, NotMapped, close_all
from ._recorder import Recorder, say_written, watching
from ._reload import Cuts, Reloader, cuts_of
from ._remote import Files, RemoteWeights
from ._startup import phase
from ._strict import STRICT, not_used, strict_of

logger = logging.getLogger("penstock")

WEIGHTS, STORAGE, FILES, MAPPED = "weights", "storage", "files", "mapped"
"""The keys: another place for the weights, how its server is asked, which files of it are meant, and whether the engine
copies out of mapped files."""
_SECRET = [setting["name"] for setting in storage_table() if setting["form"] == "Secret"]
"""Settings of servers that engines would log: they log the arguments that they are given."""


_MAPPING = "vLLM"
"""The engine that can be given mapped files."""

When = Literal["auto", "on", "off"]
"""Where that takes less time, wherever it is possible, or nowhere."""


class Settings(NamedTuple):
    """The options that the user gave the engine for its loader."""

    options: Options
    weights: str | Mapping[str, str] | None
    """The other place for the weights of the model, or of models by their paths."""
    storage: Storage | None
    files: Files = "model"
    """The set of weights to load, if a model has several side by side."""
    strict: bool = True
    """Whether a load of the engine's own is an error."""
    mapped: When = "auto"
    """When the engine gets mapped files, and copies out of them itself."""

    @property
    def engine_format(self) -> str:
        """The engines' name for the format of these files."""
        return "mistral" if self.files == "consolidated" else "safetensors"

    def place_of(self, model: str) -> str:
        """Where the weights of a model are that the engine knows by this path."""
        if self.weights is None or isinstance(self.weights, str):
            return self.weights or model
        return self.weights.get(model, model)


def settings_of(given: Mapping[str, Any], engine: str) -> Settings:
    """The settings in what the user gave the engine for its loader.

    Raises:
        InvalidError: an unknown key. The error lists the known ones.
    """
    known = [WEIGHTS, STORAGE, FILES, *([MAPPED] if engine == _MAPPING else []), STRICT, *Options.names()]
    unknown = sorted(set(given) - set(known))
    if unknown:
        text = f"{engine}: unknown options {', '.join(unknown)}; load format penstock takes {', '.join(known)}"
        raise InvalidError(text)
    weights, storage = given.get(WEIGHTS), given.get(STORAGE)
    places = weights.values() if isinstance(weights, Mapping) else [weights]
    if weights is not None and not all(isinstance(place, str) for place in places):
        text = f"{engine}: {WEIGHTS}={weights!r} is not a path or an address: give a string, or strings by model"
        raise InvalidError(text)
    if storage is not None:
        _check_storage(storage, engine)
    files = given.get(FILES, "model")
    if files not in get_args(Files):
        choices = " or ".join(f'"{choice}"' for choice in get_args(Files))
        raise InvalidError(f"{engine}: {FILES}={files!r}: give {choices} (Mistral's consolidated*.safetensors)")
    mapped = given.get(MAPPED, "auto")
    if mapped not in get_args(When):
        choices = ", ".join(f'"{choice}"' for choice in get_args(When))
        raise InvalidError(f"{engine}: {MAPPED}={mapped!r}: give one of {choices}")
    options = {key: value for key, value in given.items() if key not in (WEIGHTS, STORAGE, FILES, MAPPED, STRICT)}
    return Settings(make_options(options), weights, storage, files, strict_of(given, engine), mapped)


def _check_storage(storage: Any, engine: str) -> None:
    known = [name for name in storage_settings() if name not in _SECRET]
    if not isinstance(storage, Mapping):
        raise InvalidError(f"{engine}: {STORAGE} is no object of settings: give one with {', '.join(known)}")
    if secret := [name for name in _SECRET if storage.get(name) is not None]:
        raise InvalidError(
            f"{engine}: {' and '.join(secret)} in {STORAGE}: {engine} logs its arguments; give credentials in the "
            "environment (AWS_SECRET_ACCESS_KEY, AZURE_STORAGE_KEY), in a profile, or as the machine's role"
        )
    if "@" in str(storage.get("proxy")):
        raise InvalidError(f"{engine}: a password in proxy of {STORAGE}: {engine} logs its arguments; set HTTPS_PROXY")
    if unknown := sorted(set(storage) - set(known)):
        raise InvalidError(f"{engine}: unknown settings {', '.join(unknown)} of {STORAGE}; it takes {', '.join(known)}")


class Chosen(NamedTuple):
    """The files that an engine has chosen."""

    files: Sequence[str]
    remote: RemoteWeights | None = None
    """The weights on a server that these stand for, or None."""

    def opened(self, keep: Callable[[str], bool] | None) -> tuple[Checkpoint, Callable[[str], bool] | None]:
        """The checkpoint, and which of its tensors are meant."""
        if self.remote is None:
            checkpoint = open_checkpoint(list(self.files))
            for warning in absent(self.files, checkpoint):
                logger.warning("penstock: %s", warning)
            return checkpoint, keep
        within = self.remote.keeping(self.files)
        if keep is None or within is None:
            return self.remote.checkpoint, within or keep
        return self.remote.checkpoint, lambda name: within(name) and keep(name)

    def refuse_fallback(self, why: str) -> None:
        """Raises UnsupportedError if the engine's own loader cannot read the files."""
        if self.remote is not None:
            text = f"{why}; this is for the engine's own loader, which reads from disks: copy the files to one"
            raise UnsupportedError(text)


def belongs(seen: Seen, chosen: Chosen, checkpoint: Checkpoint) -> None:
    """Has every load of the checkpoint be a part of what operators see, on whatever thread of the engine."""
    if seen is not NOTHING:
        seen.named(list(chosen.files) if chosen.remote is None else chosen.remote.place)
        checkpoint._within = seen


_STOPPED = "the model's own loader has stopped before it had all tensors; the log of this rank says why"


def _not_recorded() -> dict[str, Any]:
    """The further keys of a recorded load's report, for a load in which nothing was recorded."""
    return {"loads": 1, "copies": 0, "materialised": {}, "materialised_bytes": 0, "copied_through": []}


class Loads:
    """The loads of one call of an engine's loader: one for each place that it takes weights from."""

    def __init__(self, device: torch.device, options: Options | None, mark: str | None = None) -> None:
        self.engine, self.strict = "the engine", True
        """The engine of this load, and whether a load in the engine's own way is an error."""
        self.recorders: list[Recorder] = []
        self.fallbacks: list[str] = []
        """The reasons that the engine's own way was taken, one for each place."""
        self.options = options
        self.group: Any = None
        """The ranks that load together, if they do: each makes one load of each place with the others."""
        self.mapped: When | None = None
        """When tensors are given as mapped files; None: never, as in an engine that must know what is overwritten."""
        self.fresh: torch.nn.Module | None = None
        """The model whose parameters were just made, until the engine copies into them."""
        self._parameters: Parameters | None = None
        self.given: list[Mapped] = []
        """The checkpoints that were mapped."""
        self.why = ""
        """The reason that others were not."""
        self._read: list[tuple[Report, str]] = []
        """Reports of checkpoints that were not mapped though others before them were, with the reasons."""
        self.seen: Seen = NOTHING
        """The operation of these loads: one event."""
        self.device = device
        self._mark = mark
        self._joined = ExitStack()
        self._watched = ExitStack()

    def join(self, ranks: Callable[[], Any]) -> None:
        """Loads with these ranks: all of them one version, or none.

        On a GPU nothing is exchanged unless it was asked for.

        From here to the end of `barrier` a rank that is gone or was stopped is noticed.
        """
        if self.group is None and (group := ranks()) is not None:
            self._joined.enter_context(joined(group, options=self.options))
            # Keys of its own: a rank that fails does not come as far as the others, and the next attempt begins anew
            self.group = new_group(group)
            self._joined.push(self._leave)

    def _leave(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Says that this rank does nothing more with these keys. A store that did not answer is not asked again."""
        if not isinstance(error, StalledError):
            self.group.leave(None if self.options is None else self.options.peer_timeout)

    def _opened(
        self, chosen: Chosen, keep: Callable[[str], bool] | None
    ) -> tuple[Checkpoint, Callable[[str], bool] | None]:
        """As `Chosen.opened`; what is loaded of it is a part of what operators see."""
        checkpoint, kept = chosen.opened(keep)
        belongs(self.seen, chosen, checkpoint)
        return checkpoint, kept

    def reloading(
        self, ranks: Callable[[], Any], chosen: Chosen, keep: Callable[[str], bool] | None
    ) -> Recorder | None:
        """The recorder for a reload of these files, by these ranks; None if they cannot be deferred.

        Raises:
            MissingDtypeError: torch has no such dtype.
        """
        self.join(ranks)
        recorder = None
        try:
            with self._told():
                try:
                    recorder = Recorder(*self._opened(chosen, keep), self.device, self.options)
                    recorder.check()
                except MissingDtypeError:
                    raise
                except UnsupportedError:
                    recorder = None
        finally:
            if recorder is None:
                self._joined.close()
        return recorder

    def reload_mapped(
        self, ranks: Callable[[], Any], chosen: Chosen, keep: Callable[[str], bool] | None, always: bool
    ) -> Mapped | None:
        """The tensors of these files for a reload by these ranks, as `mapping` gives them."""
        self.join(ranks)
        try:
            with self._told():
                try:
                    checkpoint, kept = self._opened(chosen, keep)
                except MissingDtypeError:
                    raise
                except UnsupportedError:  # whoever reads them otherwise says so
                    return None
                return self.mapping(chosen, checkpoint, kept, always)
        except BaseException:
            self.part()
            raise

    def part(self) -> None:
        """This rank does nothing more with the others. Idempotent."""
        self._joined.close()

    def weights(
        self, chosen: Chosen, keep: Callable[[str], bool] | None, otherwise: Callable[[], Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Mapped or deferred tensors of these files, or what ``otherwise`` gives if they cannot be deferred.

        Raises:
            MissingDtypeError: torch has no such dtype. The engine's own way would meet it in the middle of its load.
            UnsupportedError: they cannot be deferred, and ``otherwise`` cannot read them.
        """
        try:
            checkpoint, kept = self._opened(chosen, keep)
            if not self.recorders and (mapped := self.mapping(chosen, checkpoint, kept, self._crowded())) is not None:
                return self._touching(mapped)
            recorder = Recorder(checkpoint, kept, self.device, self.options)
            recorder.check()
        except MissingDtypeError:
            raise
        except UnsupportedError as error:
            return self.fall_back(str(error), chosen, otherwise)
        if self.given:
            # A loader that copies already is not watched: what it gets has its bytes
            names = [name for name in checkpoint if kept is None or kept(name)]
            if self.group is not None:
                compare(self.group, checkpoint, self.options if self.options is not None else Options())
            return self._reading(checkpoint, names, self.why)
        self.recorders.append(recorder)
        # With several places, ranks could differ in whose tensors they touch first
        for one in self.recorders:
            one.expect(self.group if len(self.recorders) == 1 else None)
        return self._marked(recorder)

    def _touching(self, mapped: Mapped) -> Iterator[tuple[str, torch.Tensor]]:
        """Mapped tensors, which the engine copies into parameters that it has just made."""
        if self.fresh is not None:
            self._parameters, self.fresh = Parameters(self.fresh, mapped.page_timing), None
        if self._parameters is None:
            return mapped.weights()
        return touching(mapped.weights(), mapped.sizes(), self._parameters)

    def _crowded(self) -> bool:
        """Whether the ranks have every processor: no copies of a load are quicker then than the engine's own."""
        return self.group is not None and place_in(self.group)[1] >= len(os.sched_getaffinity(0))

    def mapping(
        self, chosen: Chosen, checkpoint: Checkpoint, keep: Callable[[str], bool] | None, always: bool = False
    ) -> Mapped | None:
        """The tensors as mapped files, on all ranks; None if one of them cannot or need not have them so.

        ``always``: the engine's copies are better even where recording takes less time than they do.
        """
        self.why = ""
        if self.mapped is None:
            return None
        if chosen.remote is not None:
            self.why = "the weights are on a server"
        elif self.device.type != "cpu":
            self.why = f"the parameters are on {self.device}, not in the memory of the CPU"
        if self.why:
            return None  # on all ranks
        found: Mapped | None = None
        options = self.options if self.options is not None else Options()
        try:
            if self.mapped == "off":
                raise NotMapped(f'{MAPPED}="off" was asked for')
            found = Mapped(checkpoint, keep, options, always or self.mapped == "on", self.seen)
        except NotMapped as why:
            self.why = str(why)
        if self.group is not None:
            try:
                with Rendezvous(self.group) as rendezvous:
                    self.why = rendezvous.vote(checkpoint._core, options, self.why)
            except BaseException:
                if found is not None:
                    found.close()
                raise
            if found is not None and self.why:
                found.close()
                found = None
        if found is not None:
            self.given.append(found)
        return found

    def _reading(self, checkpoint: Checkpoint, names: list[str], why: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from checkpoint.stream(self.device, names, framework="pt", options=self.options)
        if (report := checkpoint.last_report) is not None:
            self._read.append((report, why))

    def begun(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, of which the first is there: what touches deferred ones is watched from now on.

        Not if the first ones are mapped: none is deferred then, and what watches takes a part of the time that the
        engine's own copies take.
        """
        first = next(tensors, None)
        if self.given:
            self._watched.enter_context(phase("reading"))
        else:
            self._watched.enter_context(watching(self.recorders))  # of the next place, too
        return tensors if first is None else chain((first,), tensors)

    def settle(self) -> None:
        """Gives the leases of mapped files back. What the engine has of them becomes private memory.

        Raises:
            PenstockError: the first error of `Mapped.close`. All were closed.
        """
        if self._parameters is not None:
            self._parameters.end()
        close_all(self.given)

    def fall_back(self, why: str, chosen: Chosen, otherwise: Callable[[], Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the engine's own way. The reason goes into the reports.

        Raises:
            UnsupportedError: the user has not accepted the engine's own way, or it cannot read the files.
        """
        chosen.refuse_fallback(why)
        not_used(self.engine, why, self.strict)
        self.fallbacks.append(why)
        self.seen.fell_back(why)
        if self.group is not None:
            # Ranks that do not fall back would wait for this one
            with suppress(BaseException), Rendezvous(self.group):
                raise UnsupportedError(f"it loads as the engine does: {why}")
        return iter(otherwise())

    def _marked(self, recorder: Recorder) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in recorder.weights():
            if self._mark is not None:
                setattr(tensor, self._mark, True)
            yield name, tensor

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Until its end a rank that is gone or was stopped is noticed."""
        with self._joined, self._told():
            yield

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """See `Recorder.barrier`; for all of them."""
        # Ranks that are still to load, or to say that they have, hear why this one ends
        with self._joined, self._closed():
            # Hundreds of thousands of objects, none of them garbage
            with self._told(), collector_paused(), self._watched:
                if self.mapped is None:
                    self._watched.enter_context(watching(self.recorders))
                yield
                self.settle()
            if self.group is not None:
                # One that has loaded alone knows nothing of the others
                confirm(self.group)

    @contextmanager
    def _closed(self) -> Iterator[None]:
        """After an error gives the leases back. The first error is the one that is raised."""
        try:
            yield
        except BaseException:
            with suppress(PenstockError):
                self.settle()
            raise

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tells the other ranks of an error, where they wait for this one or will."""
        try:
            yield
        except BaseException as error:
            if self.group is not None:
                with suppress(BaseException), Rendezvous(self.group):
                    if isinstance(error, GeneratorExit):
                        raise CancelledError(_STOPPED) from error
                    raise error
            raise

    def run(self, model: torch.nn.Module) -> list[Report]:
        """Makes the loads."""
        reports: list[Report] = []
        for mapped in self.given:
            reports.append(mapped.report())
            self.seen.add(reports[-1])
            reports[-1].update(given="mapped", **_not_recorded())
        for report, why in self._read:
            reports.append(report)
            report.update(given="read", given_reason=why, **_not_recorded())
        for number, recorder in enumerate(self.recorders):
            try:
                reports.append(recorder.run(model, self.group))
            except BaseException as error:
                say_written(error, [name for before in self.recorders[:number] for name in before.written])
                raise
        for recorder in self.recorders:
            recorder.end()
        for report in reports:
            report.setdefault("given", "deferred")
            report.setdefault("given_reason", self.why if report["given"] == "deferred" else "")
        if self.fallbacks and not reports:
            reports.append(Report(tensors=0, nbytes=0, seconds=0.0, loads=0, copies=0))
        for report in reports:
            report["fallbacks"] = [
                *report.get("fallbacks", ()),
                *({"from": "penstock", "to": "the engine's own loader", "reason": why} for why in self.fallbacks),
            ]
            logger.debug("penstock: %s", report)
            if said := read_besides(report):
                logger.warning("penstock: %s", said)
        return reports

    def cuts(self) -> Cuts | None:
        """The copied parts, for reloads; None if they are not known."""
        if self.given:
            return None
        return cuts_of(part for recorder in self.recorders for part in recorder.layout)


def reloaded(
    chosen: Chosen,
    keep: Callable[[str], bool] | None,
    device: torch.device,
    options: Options,
    cuts: Cuts | None,
    otherwise: Callable[[], Any],
    refuse: Callable[[str], None],
    group: Any = None,
    learn: Callable[[Cuts], None] | None = None,
    seen: Seen = NOTHING,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of these files, layer by layer, whose copies are made at once; or what ``otherwise`` gives.

    Args:
        cuts: What is copied of each; None if that is not known.
        refuse: Raises the error for a reload of the engine's own, if that is one. Gets the reason.
        group: The ranks that make the same reload: of one version, or none does.
        learn: Gets what is copied of each, when all tensors were given, if that was not known.
        seen: What operators see of it.

    Raises:
        MissingDtypeError: torch has no such dtype.
        UnsupportedError: they cannot be given, and ``otherwise`` cannot read them or may not.
    """
    try:
        checkpoint, kept = chosen.opened(keep)
        belongs(seen, chosen, checkpoint)
        if group is not None:
            compare(group, checkpoint, options)
        return through(seen, Reloader(checkpoint, kept, device, options, cuts, learn).weights())
    except MissingDtypeError:
        raise
    except UnsupportedError as error:
        chosen.refuse_fallback(str(error))
        refuse(str(error))
        seen.fell_back(str(error))
        return through(seen, iter(otherwise()))
