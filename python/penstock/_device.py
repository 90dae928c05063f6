"""Device arguments: everything that people pass as ``device=``, as one small value."""

import operator
import re
import sys
from typing import Any, NamedTuple

from ._errors import InvalidError, UnsupportedError

GPUS = ("cuda", "rocm", "hip", "gpu")

MOVED = ("mps", "xpu", "npu", "hpu", "xla", "mlu", "musa")
"""Devices of torch's that safetensors knows and the core does not: loaded to the CPU, and moved by torch."""

SPELLINGS = f'"cpu", "cuda", "cuda:0", a GPU number or a torch.device; with torch also "meta", {", ".join(MOVED)}'

CURRENT = -1
"""The number of a device that was given without one."""


#: (A module that is always imported and has a NamedTuple has no annotations that are text: NamedTuple would compile
#: each of them, the first in 0.9 ms.)
class Device(NamedTuple):
    """Where tensors go."""

    kind: str
    """"cpu"; "cuda", "rocm", or "gpu" where it does not matter whose; with torch alone "meta" or one of `MOVED`."""
    number: int
    """Number of the GPU as this process sees it; 0 for the CPU; `CURRENT` where torch is to say."""

    @property
    def is_cpu(self) -> bool:
        """Whether this is host memory."""
        return self.kind == "cpu"

    @property
    def is_meta(self) -> bool:
        """Whether tensors there have no bytes, so that none are read."""
        return self.kind == "meta"

    @property
    def is_gpu(self) -> bool:
        """Whether the core loads there itself."""
        return self.kind in GPUS

    @property
    def of_core(self) -> str:
        """Where the core brings the bytes, as it spells it."""
        return str(self) if self.is_gpu else "cpu"

    def __str__(self) -> str:
        return self.kind if self.is_cpu or self.number == CURRENT else f"{self.kind}:{self.number}"


CPU = Device("cpu", 0)


def _current_gpu() -> int:
    """The GPU that "cuda" without a number means: torch's current one if torch has been set up for GPUs, else 0."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    return 0


def _on_amd() -> bool:
    """Whether torch is one for AMD. It says "cuda" there too; the core goes by the driver."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(getattr(torch.version, "hip", None))


def _counted(torch: Any) -> str:
    """The kind of device that a number without a kind means: to torch, one of the accelerator it was built for."""
    accelerator = getattr(torch, "accelerator", None)
    current = None if accelerator is None else accelerator.current_accelerator()
    return current.type if current is not None and current.type in MOVED else "gpu"


def any_device(device: Any) -> Device:
    """The device meant by None, "cpu", 0, "gpu:0", "cuda", "rocm:1", "meta", "xpu:0" or ``torch.device(...)``.

    Raises:
        InvalidError: no device at all.
    """
    if device is None or (isinstance(device, str) and device == "cpu"):
        return CPU  # without the pattern, which takes a millisecond to compile
    if isinstance(device, str):
        text = device
    elif hasattr(device, "__index__") and not isinstance(device, bool):
        text = f"{_counted(sys.modules.get('torch'))}:{operator.index(device)}"
    else:  # torch.device
        number = getattr(device, "index", None)
        text = str(getattr(device, "type", "")) + ("" if number is None else f":{number}")
    match = re.fullmatch(r"([a-z]+)(?::([0-9]{1,4}))?", text)
    kind, which = match.groups() if match else ("", None)
    if kind not in ("cpu", "meta", *GPUS, *MOVED):
        raise InvalidError(f"device={device!r} is not a device: give {SPELLINGS}")
    if kind == "cpu":
        return CPU
    if kind not in GPUS:
        return Device(kind, CURRENT if which is None or kind == "meta" else int(which))
    if kind == "hip" or (kind != "rocm" and _on_amd()):
        kind = "rocm"
    return Device(kind, _current_gpu() if which is None else int(which))


def parse_device(device: Any) -> Device:
    """As `any_device`, of those that the core loads to.

    Raises:
        UnsupportedError: a device that it does not load to.
        InvalidError: no device at all.
    """
    found = any_device(device)
    if not found.is_cpu and not found.is_gpu:
        raise UnsupportedError(
            f"device={device!r}: penstock loads to the CPU and to CUDA and ROCm GPUs; "
            'load to "cpu" and move the tensors with the framework instead'
        )
    return found
