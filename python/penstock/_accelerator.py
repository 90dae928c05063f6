"""GPU memory from torch: the one place where penstock touches torch's CUDA side.

Block memory comes from torch's caching allocator, on the thread of whoever asked for the tensors, since torch's memory
pools and current streams belong to threads. The allocator may hand out memory whose last use is still queued on the
stream, so an event recorded after the allocation goes to the core, whose copy stream waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from . import _core
from ._device import Device, parse_device
from ._errors import DeviceError, OutOfMemoryError


def _torch() -> Any:
    import torch

    return torch


def device_of(tensor: Any) -> Device:
    """Where a torch tensor's memory is.

    Raises:
        UnsupportedError: on a device type that penstock does not load to.
    """
    return _device(tensor.device)


@cache  # of a few devices, for hundreds of thousands of tensors
def _device(device: Any) -> Device:
    return parse_device(device)


class Accelerator:
    """Memory of one load on one GPU as torch sees it. The same on ROCm, whose torch calls everything "cuda"."""

    dlpack_device: tuple[int, int] | None = None
    """The device that this memory's capsules carry; None: the core knows."""

    def __init__(self, device: Device) -> None:
        self._torch: Any = _torch()
        self.index = device.number
        self.check(device)
        self._sizes: list[int] = []
        self._places: list[tuple[int, int, int]] = []
        self._sole: set[int] = set()
        self._blocks: dict[int, Any] = {}

    def check(self, device: Device) -> None:
        """Raises DeviceError where torch cannot allocate on the GPU meant."""
        torch = self._torch
        if not torch.cuda.is_available():
            built = "is built without GPU support" if not torch.backends.cuda.is_built() else "finds no usable GPU"
            reason = str(_core.gpus().get("reason") or "").partition(". ")[0]
            raise DeviceError(
                f"device={str(device)!r}: torch {torch.__version__} {built}{f' ({reason})' if reason else ''}; "
                'load to "cpu" instead, and see `penstock doctor`'
            )
        if device.number >= torch.cuda.device_count():
            raise DeviceError(f"device={str(device)!r}: there are {torch.cuda.device_count()} GPUs, counted from 0")

    def empty(self, nbytes: int) -> Any:
        """A new uint8 tensor of ``nbytes`` bytes, for use on the current stream."""
        try:
            return self._torch.empty(nbytes, dtype=self._torch.uint8, device=f"cuda:{self.index}")
        except self._torch.cuda.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"cannot allocate {nbytes} bytes on GPU {self.index}: {error}; "
                "free GPU memory, load fewer tensors, or stream them"
            ) from error

    def fence(self) -> tuple[int, object]:
        """(event handle, what keeps it alive); passes once all that is queued on the current stream now has run."""
        event = self._torch.cuda.Event(enable_timing=False)
        event.record(self._torch.cuda.current_stream(self.index))
        return int(event.cuda_event), event

    def _learn(self, load: _core.Load) -> None:
        if not self._sizes:
            self._sizes, self._places = load.blocks(), load.places()
            shares = Counter(place[0] for place in self._places)
            self._sole = {b for b, _, n in self._places if shares[b] == 1 and n == self._sizes[b]}

    def grant(self, load: _core.Load, blocks: Sequence[int]) -> None:
        """Allocates these blocks and gives them to the load, behind one fence."""
        if not blocks:
            return
        self._learn(load)
        memory = [self.empty(self._sizes[b]) for b in blocks]
        handle, event = self.fence()
        for block, tensor in zip(blocks, memory, strict=True):
            load.grant(block, tensor.data_ptr(), (tensor, event), handle)
            if block in self._sole:
                self._blocks[block] = tensor

    def nbytes(self, load: _core.Load, want: int) -> int:
        """Size of a want in bytes."""
        self._learn(load)
        return self._places[want][2]

    def tensor(self, load: _core.Load, want: int, dtype: Any, shape: Sequence[int], capsule: Callable[[], Any]) -> Any:
        """A tensor on a ready want. Alone in its block, it takes over the allocator's own storage, so that
        ``record_stream`` and sharing between processes work as ever; ``capsule`` makes the tensor otherwise."""
        self._learn(load)  # a stream may begin with an empty tensor, before any block
        memory = self._blocks.pop(self._places[want][0], None)
        if memory is None:
            return capsule()
        load.views([want])  # taken and dropped: from here on the tensor alone keeps the memory
        tensor = self._torch.empty(0, dtype=dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), 0, tuple(shape))

    def let_go(self) -> None:
        """Lets go of the memory of blocks that no tensor was made of."""
        self._blocks.clear()
