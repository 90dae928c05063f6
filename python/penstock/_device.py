"""Device arguments: everything that people pass as ``device=``, as one small value."""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

from ._errors import InvalidError, UnsupportedError


class Device(NamedTuple):
    """Where tensors go."""

    kind: str
    """"cpu", "cuda", "rocm", or "gpu" where it does not matter whose."""
    number: int
    """Number of the GPU as this process sees it; 0 for the CPU."""

    @property
    def is_cpu(self) -> bool:
        """Whether this is host memory."""
        return self.kind == "cpu"

    def __str__(self) -> str:
        return self.kind if self.is_cpu else f"{self.kind}:{self.number}"


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


def parse_device(device: Any) -> Device:
    """The device meant by None, "cpu", 0, "gpu:0", "cuda", "cuda:1", "rocm:1" or ``torch.device(...)``.

    Raises:
        UnsupportedError: a device type that penstock does not load to.
        InvalidError: no device at all.
    """
    if device is None or (isinstance(device, str) and device == "cpu"):
        return CPU  # without the pattern, which takes a millisecond to compile
    if isinstance(device, str):
        text = device
    elif isinstance(device, int) and not isinstance(device, bool):
        text = f"gpu:{device}"
    else:  # torch.device
        number = getattr(device, "index", None)
        text = str(getattr(device, "type", "")) + ("" if number is None else f":{number}")
    match = re.fullmatch(r"([a-z]+)(?::([0-9]{1,4}))?", text)
    if match is None:
        raise InvalidError(f'device={device!r} is no device: give "cpu", "cuda:0", a GPU number or a torch.device')
    kind, which = match.group(1), match.group(2)
    if kind == "cpu":
        return CPU
    if kind not in ("cuda", "rocm", "hip", "gpu"):
        raise UnsupportedError(
            f"device={device!r}: penstock loads to the CPU and to CUDA and ROCm GPUs; "
            'load to "cpu" and move the tensors with the framework instead'
        )
    if kind == "hip" or (kind != "rocm" and _on_amd()):
        kind = "rocm"
    return Device(kind, _current_gpu() if which is None else int(which))
