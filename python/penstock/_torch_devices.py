"""torch's other devices: meta, whose tensors have no bytes, and accelerators that only torch itself reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import _core
from ._device import CPU, Device
from ._dtypes import DTYPES
from ._errors import DeviceError
from ._selection import Selection
from ._torch import Torch, _torch_shape, torch_dtype


class Meta(Torch):
    """Makes tensors that have a dtype and a shape: not a byte is read for them."""

    def __init__(self, selection: Selection, target: str | None) -> None:
        super().__init__(selection, CPU, target)

    def tensors(self, load: _core.Load, wants: Sequence[int]) -> list[Any]:
        """Tensors for these wants."""
        return [self._of(want) for want in wants]

    def _of(self, want: int) -> Any:
        name, shape = self._selection.describe(want)
        if self._raw:
            shape, dtype = (math.prod(shape) * DTYPES[name].bits // 8,), self._torch.uint8
        else:
            shape = _torch_shape(self._selection.names[want], name, shape, self._selection.file(want))
            dtype = torch_dtype(name)
        return self._torch.empty(shape, dtype=dtype, device="meta")


def _there_is(torch: Any) -> str:
    """The devices that this torch can use."""
    found = ["cpu", "meta"]
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        kind = accelerator.current_accelerator().type
        found += [f"{kind}:{number}" for number in range(accelerator.device_count())]
    return ", ".join(found)


class Moved(Torch):
    """Makes tensors in CPU memory and has torch move them, as safetensors does."""

    def __init__(self, selection: Selection, device: Device, target: str | None) -> None:
        super().__init__(selection, CPU, target)
        try:
            self._where = self._place(device)
        except Exception as error:  # of whatever class the module for that device likes
            why = str(error).partition("\n")[0]
            raise DeviceError(
                f"device={str(device)!r}: torch {self._torch.__version__} cannot use it ({why}); "
                f"there is {_there_is(self._torch)}",
                path=selection.core.files()[0],
            ) from error

    def _place(self, device: Device) -> Any:
        where = self._torch.device(str(device))
        self._torch.empty(0, device=where)
        return where

    def tensors(self, load: _core.Load, wants: Sequence[int]) -> list[Any]:
        """Tensors on these ready wants."""
        return [tensor.to(self._where) for tensor in super().tensors(load, wants)]
