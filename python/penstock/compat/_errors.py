"""Errors that programs written for other loaders catch as something else than programs written for safetensors do."""

from __future__ import annotations

from .._errors import PenstockError, UnknownTensorError


class MissingTensorError(UnknownTensorError, ValueError):
    """A name that the files do not contain, or that the filter leaves out. fastsafetensors has both, by the method."""


class ClosedError(PenstockError, RuntimeError):
    """A handle, buffer or loader that has been closed was asked for something."""

    kind = "Invalid"
