"""What ``PENSTOCK_PATCH=1`` starts: waits for safetensors to be imported, and calls `penstock.patch` then.

The line in ``penstock_patch.pth`` imports this module when an interpreter starts with the variable set. It stands
outside the package and imports next to nothing: a part of `penstock` would bring all of it, and every program that
never loads a checkpoint would pay for that.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from _penstock_after import After


def _imported(_: ModuleType) -> None:
    """Patches as soon as both safetensors and penstock are there."""
    penstock = sys.modules.get("penstock")
    if "safetensors" not in sys.modules or (penstock is not None and "__dir__" not in vars(penstock)):
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
