"""What the plugins for engines share: the options that they take, and the loads of one start-up or of one reload."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .._checkpoint import open as open_checkpoint
from .._collector import collector_paused
from .._core import Options
from .._errors import InvalidError, MissingDtypeError, UnsupportedError
from .._options import make_options
from .._report import Report
from ._recorder import Recorder, say_written, watching
from ._reload import Cuts, Reloader, cuts_of

logger = logging.getLogger("penstock")

WEIGHTS = "weights"
"""The key that names another place for the weights."""


def settings_of(given: Mapping[str, Any], engine: str) -> tuple[Options, str | None]:
    """The options of loads and the other place for the weights, in what the user gave the engine for its loader.

    Raises:
        InvalidError: an unknown key. The error lists the known ones.
    """
    known = [WEIGHTS, *Options.names()]
    unknown = sorted(set(given) - set(known))
    if unknown:
        text = f"{engine}: unknown options {', '.join(unknown)}; load format penstock takes {', '.join(known)}"
        raise InvalidError(text)
    weights = given.get(WEIGHTS)
    if weights is not None and not isinstance(weights, str):
        raise InvalidError(f"{engine}: {WEIGHTS}={weights!r} is not a path: give a string")
    return make_options({key: value for key, value in given.items() if key != WEIGHTS}), weights


class Loads:
    """The loads of one call of an engine's loader: one for each place that it takes weights from."""

    def __init__(self, device: torch.device, options: Options | None, mark: str | None = None) -> None:
        self.recorders: list[Recorder] = []
        self.fallbacks: list[str] = []
        """Why the engine's own way was taken, for each place where it was."""
        self.options = options
        self._device = device
        self._mark = mark

    def weights(
        self, files: Sequence[str], keep: Callable[[str], bool] | None, otherwise: Callable[[], Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Deferred tensors of these files, or what ``otherwise`` gives if they cannot be deferred.

        Raises:
            MissingDtypeError: torch has no such dtype. The engine's own way would meet it in the middle of its load.
        """
        try:
            recorder = Recorder(open_checkpoint(list(files)), keep, self._device, self.options)
            recorder.check()
        except MissingDtypeError:
            raise
        except UnsupportedError as error:
            return self.fall_back(str(error), otherwise)
        self.recorders.append(recorder)
        return self._marked(recorder)

    def fall_back(self, why: str, otherwise: Callable[[], Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """What the engine's own way gives. The reason goes into the reports."""
        self.fallbacks.append(why)
        logger.warning("penstock: loading as the engine does: %s", why)
        return iter(otherwise())

    def _marked(self, recorder: Recorder) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in recorder.weights():
            if self._mark is not None:
                setattr(tensor, self._mark, True)
            yield name, tensor

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """See `Recorder.barrier`; for all of them."""
        with collector_paused(), watching(self.recorders):  # hundreds of thousands of objects, none of them garbage
            yield

    def run(self, model: torch.nn.Module) -> list[Report]:
        """Makes the loads."""
        reports: list[Report] = []
        for number, recorder in enumerate(self.recorders):
            try:
                reports.append(recorder.run(model))
            except BaseException as error:
                say_written(error, [name for before in self.recorders[:number] for name in before.written])
                raise
        if self.fallbacks and not reports:
            reports.append(Report(tensors=0, nbytes=0, seconds=0.0, loads=0, copies=0))
        for report in reports:
            report["fallbacks"] = [
                *report.get("fallbacks", ()),
                *({"from": "penstock", "to": "the engine's own loader", "reason": why} for why in self.fallbacks),
            ]
            logger.info("penstock: %s", report)
        return reports

    def cuts(self) -> Cuts:
        """What was copied, for reloads."""
        return cuts_of(part for recorder in self.recorders for part in recorder.layout)


def reloaded(
    files: Sequence[str],
    keep: Callable[[str], bool] | None,
    device: torch.device,
    options: Options,
    cuts: Cuts,
    otherwise: Callable[[], Any],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of these files, layer by layer, whose copies are made at once; or what ``otherwise`` gives.

    Raises:
        MissingDtypeError: torch has no such dtype.
    """
    try:
        return Reloader(open_checkpoint(list(files)), keep, device, options, cuts).weights()
    except MissingDtypeError:
        raise
    except UnsupportedError as error:
        logger.warning("penstock: reloading as the engine does: %s", error)
        return iter(otherwise())
