"""The modules of the frameworks whose tensors are made, and the error where one of them cannot be imported."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ._errors import MissingFrameworkError
from ._late_imports import importing


def module_named(module: str, framework: str, package: str) -> Any:
    """The module called so, which ``framework`` needs and ``package`` has.

    Raises:
        MissingFrameworkError: it cannot be imported.
    """
    found = sys.modules.get(module)
    if found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False):
        return found
    try:
        with importing():
            return importlib.import_module(module)
    except ImportError as error:
        raise MissingFrameworkError(f"framework={framework!r} needs {package}: {error}") from None


def need(framework: str) -> None:
    """Imports what makes this framework's tensors: one of the values of `_load.FRAMEWORKS`.

    Raises:
        MissingFrameworkError: it cannot be imported.
    """
    if framework == "dlpack":
        return
    if framework == "pt":
        module_named("torch", framework, "torch")
        return
    module_named("numpy", framework, "numpy")
    if framework != "np":
        from ._via_numpy import module_of

        module_of(framework)
