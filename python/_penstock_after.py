"""Calls a function once certain modules have been imported: for `_penstock_patch` and for `penstock.patch`.

It stands outside the package, as `_penstock_patch` does, which must import no part of `penstock`.
"""

from __future__ import annotations

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
