"""GPU memory from torch: the one place where penstock touches torch's CUDA side.

Block memory comes from torch's caching allocator, on the thread of whoever asked for the tensors, since torch's memory
pools and current streams belong to threads. The allocator may hand out memory whose last use is still queued on the
stream, so an event recorded after the allocation goes to the core, whose copy stream waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from . import _core
from ._device import Device
from ._errors import DeviceError


class Accelerator:
    """Memory of one load on one GPU as torch sees it. The same on ROCm, whose torch calls everything "cuda"."""

    def __init__(self, device: Device) -> None:
        import torch

        self._torch: Any = torch
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
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device=f"cuda:{self.index}")

    def fence(self) -> tuple[int, object]:
        """(event handle, what keeps it alive); passes once all that is queued on the current stream now has run."""
        event = self._torch.cuda.Event(enable_timing=False)
        event.record(self._torch.cuda.current_stream(self.index))
        return int(event.cuda_event), event

    def grant(self, load: _core.Load, blocks: Sequence[int]) -> None:
        """Allocates these blocks and gives them to the load, behind one fence."""
        if not blocks:
            return
        if not self._sizes:
            self._sizes, self._places = load.blocks(), load.places()
            shares = Counter(place[0] for place in self._places)
            self._sole = {b for b, _, n in self._places if shares[b] == 1 and n == self._sizes[b]}
        memory = [self.empty(self._sizes[b]) for b in blocks]
        handle, event = self.fence()
        for block, tensor in zip(blocks, memory, strict=True):
            load.grant(block, tensor.data_ptr(), (tensor, event), handle)
            if block in self._sole:
                self._blocks[block] = tensor

    def tensor(self, load: _core.Load, want: int, dtype: Any, shape: Sequence[int], capsule: Callable[[], Any]) -> Any:
        """A tensor on a ready want. Alone in its block, it takes over the allocator's own storage, so that
        ``record_stream`` and sharing between processes work as ever; ``capsule`` makes the tensor otherwise."""
        memory = self._blocks.pop(self._places[want][0], None)
        if memory is None:
            return capsule()
        tensor = self._torch.empty(0, dtype=dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), 0, tuple(shape))
