"""The small types of fastsafetensors: devices, dtypes, what the header says of a tensor, tensors in a wrapper."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from .. import _core
from .._dtypes import DTYPES
from .._errors import InvalidError, UnsupportedError
from .._frameworks import need


class DeviceType(Enum):
    """Kinds of devices."""

    CPU = "cpu"
    CUDA = "cuda"
    GPU = "gpu"


@dataclass(frozen=True)
class Device:
    """A device: its kind and, of several, its number."""

    type: DeviceType = DeviceType.CPU
    index: int | None = None

    def as_str(self) -> str:
        """The device as torch spells it, such as "cuda:0"."""
        return self.type.value if self.index is None else f"{self.type.value}:{self.index}"

    @classmethod
    def from_str(cls, s: str) -> Device:
        """The device that "cpu", "cuda" or "cuda:0" means."""
        kind, colon, number = s.partition(":")
        kinds = {known.value: known for known in DeviceType}
        if kind.lower() not in kinds or (colon and not number.isdecimal()):
            raise InvalidError(f"{s!r} is not a device: give one of {', '.join(kinds)}, with or without :NUMBER")
        return cls(kinds[kind.lower()], int(number) if colon else None)


class DType(Enum):
    """The format's dtypes as headers spell them, and AUTO: each tensor's own. The original lacks C64, F6 and FNUZ."""

    BOOL = "BOOL"
    F4 = "F4"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"
    U8 = "U8"
    I8 = "I8"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    C64 = "C64"
    F64 = "F64"
    I64 = "I64"
    U64 = "U64"
    AUTO = "AUTO"


_PCI_BUSES = Path("/sys/class/pci_bus")


def get_device_numa_node(device: int | None) -> int | None:
    """The NUMA node of a GPU, by the driver's number of it.

    -1: the kernel knows none. None: there is no such GPU or no driver, or ``device`` is None.
    """
    if device is None:
        return None
    gpus = _core.gpus()["gpus"]
    if not 0 <= device < len(gpus):
        return None
    bus = ":".join(gpus[device]["pci"].split(":")[:2]).lower()
    try:
        return int((_PCI_BUSES / bus / "device" / "numa_node").read_text())
    except FileNotFoundError:
        return None


def device_for(device: Any) -> Any:
    """The device for penstock, from a `Device` or a device of torch."""
    return device.as_str() if isinstance(device, Device) else device


def torch_dtype(dtype: Any) -> Any:
    """torch's dtype for a `DType`, its spelling or torch's own; None for AUTO and None.

    Raises:
        InvalidError: no dtype at all.
        UnsupportedError: one that torch lacks.
    """
    need("pt")
    import torch

    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    name = dtype.value if isinstance(dtype, DType) else dtype
    if name == "AUTO":
        return None
    if name not in DTYPES:
        raise InvalidError(f"dtype={dtype!r}: give a torch dtype or one of {', '.join(DTYPES)}, AUTO")
    found = getattr(torch, DTYPES[name].torch or "", None)
    if found is None:
        raise UnsupportedError(f"dtype={dtype!r}: torch {torch.__version__} lacks it")
    return found


def converted(tensor: Any, device: Any, dtype: Any, name: str) -> Any:
    """``tensor`` on ``device`` and in the torch dtype ``dtype``; None leaves either as it is."""
    if dtype is not None and dtype is not tensor.dtype and "float4_e2m1fn_x2" in f"{dtype} {tensor.dtype}":
        why = f"tensor {name} is {tensor.dtype}: torch converts to and from no F4 (here to {dtype})"
        raise UnsupportedError(why, tensor=name)
    return tensor.to(device=device_for(device), dtype=dtype)


class TensorFrame(NamedTuple):
    """The header's entry of one tensor."""

    dtype: DType
    shape: list[int]
    """Extent per dimension, in elements; of F4 that is twice what torch says."""
    data_offsets: list[int]
    """[first, past-the-last] byte, counted from the start of the file's data."""


@dataclass
class TorchTensor:
    """A tensor in the wrapper that methods named ``..._wrapped``, and a few others, return."""

    device: Device
    dtype: DType
    real_tensor: Any

    @classmethod
    def of(cls, tensor: Any) -> TorchTensor:
        """The tensor in its wrapper."""
        spelled = {dtype.torch: name for name, dtype in DTYPES.items() if dtype.torch}
        dtype = DType[spelled[str(tensor.dtype).removeprefix("torch.")]]
        return cls(Device.from_str(str(tensor.device)), dtype, tensor)

    def get_raw(self) -> Any:
        """The torch tensor."""
        return self.real_tensor

    def get_shape(self) -> list[int]:
        """Extent per dimension as in the header: F4 counts single elements, torch pairs of them."""
        shape = list(self.real_tensor.shape)
        if self.dtype is DType.F4:
            shape[-1] *= 2
        return shape

    def get_nbytes(self) -> int:
        """Size in bytes."""
        return int(self.real_tensor.nbytes)

    def to(self, device: Device | None = None, dtype: DType = DType.AUTO) -> TorchTensor:
        """The same tensor on a device, in a dtype."""
        return TorchTensor.of(converted(self.real_tensor, device, torch_dtype(dtype), "(wrapped)"))

    def clone(self) -> TorchTensor:
        """A copy."""
        return TorchTensor.of(self.real_tensor.clone())

    def detach(self) -> TorchTensor:
        """The same memory, without a history."""
        return TorchTensor.of(self.real_tensor.detach())

    def contiguous(self) -> TorchTensor:
        """The same tensor, contiguous."""
        return TorchTensor.of(self.real_tensor.contiguous())

    def __getitem__(self, index: Any) -> TorchTensor:
        return TorchTensor.of(self.real_tensor[index])
