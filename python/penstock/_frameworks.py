"""The modules of the frameworks whose tensors are made, and the error where one of them cannot be imported."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
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


def need_torch() -> None:
    """Looks for torch and does not import it.

    Raises:
        MissingFrameworkError: it is not installed.
    """
    try:
        found = find_spec("torch")
    except (ImportError, ValueError) as error:
        raise MissingFrameworkError(f"framework='pt' needs torch: {error}") from None
    if found is None:
        raise MissingFrameworkError("framework='pt' needs torch: it is not installed")


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
