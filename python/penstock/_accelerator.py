"""GPU memory from torch: the one place where penstock touches torch's CUDA side.

Block memory comes from torch's caching allocator, on the thread that asked for the tensors, since torch's memory
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

#: dtype and shape of a want's tensor, by want and size in bytes.
KindOf = Callable[[int, int], tuple[Any, Sequence[int]]]


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
        # By block: the want that has it to itself
        self._sole: dict[int, int] = {}
        # By want: the tensor whose memory is its block
        self._made: dict[int, Any] = {}

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
        self._refuse_capture()

    def _refuse_capture(self) -> None:
        """Raises DeviceError while this thread captures a graph.

        An event recorded on the capturing stream would pull our stream into the capture: the copies would be recorded,
        and not made.
        """
        if self._torch.cuda.is_current_stream_capturing():
            raise DeviceError(
                f"device='cuda:{self.index}': this thread captures a CUDA graph, and a load cannot be part of a graph; "
                "load before the capture, or on another thread"
            )

    def free(self) -> int:
        """Bytes of the GPU's memory that nobody has, as its driver counts them."""
        return int(self._torch.cuda.mem_get_info(self.index)[0])

    def empty(self, shape: Sequence[int], dtype: Any, nbytes: int) -> Any:
        """A new tensor, ``nbytes`` bytes, for use on the current stream."""
        try:
            return self._torch.empty(shape, dtype=dtype, device=f"cuda:{self.index}")
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

    def grant(self, load: _core.Load, blocks: Sequence[int], kind_of: KindOf) -> None:
        """Allocates these blocks and gives them to the load, behind one fence.

        A want that has a block to itself gets its tensor now, and that is the block's memory: the allocator's own, so
        that ``record_stream`` and sharing between processes work as ever.
        """
        if not blocks:
            return
        self._refuse_capture()
        if not self._sizes:
            places = load.places()
            self._sizes, shares = load.blocks(), Counter(block for block, _, _ in places)
            alone = ((block, want) for want, (block, _, n) in enumerate(places) if n == self._sizes[block])
            self._sole = {block: want for block, want in alone if shares[block] == 1}
        memory = []
        for block in blocks:
            nbytes, want = self._sizes[block], self._sole.get(block)
            dtype, shape = (self._torch.uint8, (nbytes,)) if want is None else kind_of(want, nbytes)
            memory.append(self.empty(shape, dtype, nbytes))
        handle, event = self.fence()
        for block, tensor in zip(blocks, memory, strict=True):
            load.grant(block, tensor.data_ptr(), (tensor, event), handle)
            if block in self._sole:
                self._made[self._sole[block]] = tensor

    def taken(self, load: _core.Load, wants: Sequence[int]) -> dict[int, Any]:
        """The tensors of those ready wants that have a block to themselves, from here on the caller's."""
        found = ((want, self._made.pop(want, None)) for want in wants) if self._made else ()
        made = {want: tensor for want, tensor in found if tensor is not None}
        if made:
            load.views(list(made))  # taken and dropped: the tensors alone keep the memory
        return made

    def let_go(self) -> None:
        """Lets go of the memory of blocks that no tensor was made of."""
        self._made.clear()
