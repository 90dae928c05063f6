"""The frameworks, by the names that people write, and the checks of a device before one is imported."""

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _choices
from ._device import Device, any_device
from ._dtypes import RAW, cast_target
from ._errors import ArgumentTypeError, InvalidError, MissingFrameworkError, UnsupportedError
from ._framework import Adapter, Framework
from ._late_imports import importing
from ._selection import Selection

if TYPE_CHECKING:
    from ._pieces import Joining


class _Known(NamedTuple):
    """A framework that has a file."""

    file: str
    """Its module in this package."""
    package: str
    """The package to install."""
    gpus: bool
    """Whether tensors may be on a GPU."""
    spellings: tuple[_choices.Framework, ...]
    """Other names that people write."""


_KNOWN: dict[_choices.Framework, _Known] = {
    "pt": _Known("_torch", "torch", True, ("torch", "pytorch")),
    "np": _Known("_numpy", "numpy", False, ("numpy",)),
    "jax": _Known("flax", "jax", True, ("flax",)),
    "tf": _Known("tensorflow", "tensorflow", False, ("tensorflow",)),
    "paddle": _Known("paddle", "paddlepaddle", False, ()),
    "mlx": _Known("mlx", "mlx", False, ()),
    "dlpack": _Known("_dlpack", "penstock", True, ()),
}

FRAMEWORKS: dict[str, _choices.Framework] = {
    spelling: name for name, known in _KNOWN.items() for spelling in (name, *known.spellings)
}
"""The names that people write for a framework, and its name here."""


@cache
def _torch_is_installed() -> bool:
    return find_spec("torch") is not None


def framework_named(framework: str | None) -> _choices.Framework:
    """One of the values of `FRAMEWORKS` for what people write; None is torch where it is installed, else numpy."""
    if framework is None:
        return "pt" if _torch_is_installed() else "np"
    found = FRAMEWORKS.get(framework) if isinstance(framework, str) else None
    if found is None:
        wrong = InvalidError if isinstance(framework, str) else ArgumentTypeError
        raise wrong(
            f'framework={framework!r}: give one of {", ".join(FRAMEWORKS)}. For any other framework give "dlpack"'
        )
    return found


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


def need(name: _choices.Framework) -> Framework:
    """Imports a framework: one of the values of `FRAMEWORKS`.

    Raises:
        MissingFrameworkError: it cannot be imported.
    """
    known = _KNOWN[name]
    try:
        with importing():
            found: Framework = import_module(f"{__package__}.{known.file}").FRAMEWORK
    except ImportError as error:
        raise MissingFrameworkError(f"framework={name!r} needs {known.package}: {error}") from None
    return found


def device_for(device: Any, framework: str | None) -> Device:
    """The device meant by what people write, in the words of their framework: torch says "cuda" on AMD too."""
    where = any_device(device)
    if where.is_cpu:
        return where
    if framework_named(framework) != "pt":
        if not where.is_gpu:
            raise UnsupportedError(
                f"device={str(device)!r} is a device of torch: framework={framework!r} cannot load to it. Give "
                'framework="pt", or another device such as "cpu"'
            )
        return where
    if "torch" not in sys.modules:
        need("pt")
        where = any_device(device)
    return where


def check_device(framework: _choices.Framework, device: Device) -> None:
    """Raises UnsupportedError if the framework (one of the values of `FRAMEWORKS`) has tensors on the CPU alone."""
    if device.is_cpu or _KNOWN[framework].gpus:
        return
    if framework == "np":
        why = 'numpy arrays live in CPU memory; framework="dlpack" or "pt" loads to a GPU'
    else:
        why = f"framework={framework!r} loads to the CPU only"
    raise UnsupportedError(f"device={str(device)!r}: {why}")


def make_adapter(framework: str | None, selection: Selection, device: Device, dtype: Any) -> Adapter:
    """The adapter of ``framework``; imports the framework.

    Raises:
        MissingFrameworkError: it cannot be imported.
        UnsupportedError: before a byte moves, if it lacks a wanted dtype.
    """
    name, target = framework_named(framework), cast_target(dtype)
    check_device(name, device)
    return need(name).adapter(selection, device, target)


def make_joining(framework: str | None, selection: Selection, dtype: Any) -> "tuple[Selection, Joining]":
    """A selection whose scattered wants are taken apart, and what joins their pieces; imports the framework.

    Raises:
        UnsupportedError: this framework joins no tensors.
    """
    name = framework_named(framework)
    found = need(name)
    if cast_target(dtype) == RAW or not found.joins:
        what = f'dtype="{RAW}"' if found.joins else f"framework={name!r}"
        want = selection.names[min(selection.scattered)]
        raise UnsupportedError(
            f"slice of {want}: {what} takes one slice per dimension, and joins no tensors of several", tensor=want
        )
    with importing():
        from ._pieces import Joining, apart

    parts, grids = apart(selection)
    return parts, Joining(grids, found.joined)
