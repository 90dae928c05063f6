"""What ``PENSTOCK_PATCH=1`` starts: waits for safetensors to be imported, and calls `penstock.patch` then.

The line in ``penstock_patch.pth`` imports this module when an interpreter starts with the variable set. It stands
outside the package and imports next to nothing: a part of `penstock` would bring all of it, and every program that
never loads a checkpoint would pay for that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any


class After:
    """A finder on ``sys.meta_path`` that finds nothing itself: it has a function called after modules were imported."""

    def __init__(self, names: Iterable[str], then: Callable[[ModuleType], object]) -> None:
        self._names = frozenset(names)
        self._then = then

    def install(self) -> None:
        """Begins to watch. Idempotent."""
        sys.meta_path[:] = [self, *[finder for finder in sys.meta_path if finder is not self]]

    def remove(self) -> None:
        """Ends it. Idempotent."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """What the other finders find, with a loader that calls the function at the end."""
        if name not in self._names:
            return None
        for finder in list(sys.meta_path):
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self._then)
                return spec
        return None


class _Loader:
    """Another loader, and a function that is called with the module once that has executed it."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], object]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module, which sees its own loader and not this one."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)


def _imported(_: ModuleType) -> None:
    """Patches as soon as both safetensors and penstock are there."""
    penstock = sys.modules.get("penstock")
    if "safetensors" not in sys.modules or (penstock is not None and "patch" not in vars(penstock)):
        return  # it is penstock that imports safetensors, and is not done with itself: then this is called again
    _finder.remove()
    global _patched
    if _patched:
        return
    _patched = True
    try:
        from penstock import patch

        patch()
    except Exception as error:  # the program did not ask for this with a line of its own, and runs without it
        _warn(f"PENSTOCK_PATCH=1: safetensors stays as it is: {type(error).__name__}: {error}")


def _warn(text: str) -> None:
    import warnings

    warnings.warn(text, RuntimeWarning, stacklevel=3)


#: Either may come first; the one that imports the other is complete last.
_finder = After(("safetensors", "penstock"), _imported)
_patched = False


def start() -> None:
    """Patches as soon as the program imports safetensors; at once where it has."""
    value = os.environ.get("PENSTOCK_PATCH", "0")
    if value in ("", "0"):
        return
    if value != "1":
        _warn(f"PENSTOCK_PATCH={value!r}: give 1 or 0; safetensors stays as it is")
    elif "safetensors" in sys.modules:
        _imported(sys.modules["safetensors"])
    elif _finder not in sys.meta_path:
        _finder.install()
