"""torch: tensors on the bytes that a load has brought, and its devices that the core does not know: meta, whose tensors
have no bytes, and accelerators that only torch reaches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from . import _accelerator, _core
from ._device import CPU, Device
from ._dtypes import CASTABLE, DTYPES, RAW
from ._errors import DeviceError, MissingDtypeError, PenstockError, UnsupportedError
from ._framework import Adapter, Framework
from ._indexing import Arrays, Indexing
from ._selection import Selection, TensorInfo


@cache
def _from_dlpack() -> Callable[[object], Any]:
    """The C function that torch.from_dlpack ends in: 0.6 us a tensor where the Python wrapper takes 1.6."""
    function: Callable[[object], Any] | None = getattr(torch._C, "_from_dlpack", None)
    if function is None:
        from torch.utils.dlpack import from_dlpack

        function = from_dlpack
    return function


@cache
def _native() -> dict[str, tuple[int, int, int]]:
    """The dtypes that this torch imports over DLPack, as (code, bits, 1). They grew from release to release: each is
    sent round once, on the CPU whatever `torch.device` is in force."""
    found: dict[str, tuple[int, int, int]] = {}
    for name, dtype in DTYPES.items():
        kind = torch_dtype(name)
        if kind is None or dtype.dlpack is None:
            continue
        try:
            back = _from_dlpack()(torch.empty(2, dtype=kind, device="cpu").__dlpack__())
        except (RuntimeError, BufferError, TypeError, ValueError):
            continue
        if back.dtype == kind:
            found[name] = (*dtype.dlpack, 1)
    return found


@cache
def torch_dtype(name: str) -> Any:
    """torch's dtype for one of the format, such as ``torch.bfloat16`` for "BF16". None if this torch has none.

    Raises:
        KeyError: the format has no such dtype.
    """
    return getattr(torch, DTYPES[name].torch or "", None)


def torch_shape(name: str, dtype: str, shape: tuple[int, ...], file: str) -> tuple[int, ...]:
    """The shape in torch's elements: of F4 they are pairs along the last dimension."""
    if dtype != "F4":
        return shape
    if not shape or shape[-1] % 2:
        raise UnsupportedError(
            f"tensor {name} is F4 of shape {list(shape)}: torch holds F4 in pairs, and the last dimension is "
            'odd; dtype="raw" or framework="dlpack" gives its bytes',
            path=file,
            tensor=name,
        )
    return (*shape[:-1], shape[-1] // 2)


def of_bytes(data: bytes) -> dict[str, Any]:
    """Every tensor of a file's content by name, in memory of its own."""
    core = _core.Checkpoint.from_bytes(data)
    made: dict[str, Any] = {}
    for number in range(len(core)):
        name, dtype, shape, _, begin, end = core.info(number)
        kind = torch_dtype(dtype)
        if kind is None:
            raise MissingDtypeError(f"tensor {name} is {dtype}, which torch {torch.__version__} lacks", tensor=name)
        shape = torch_shape(name, dtype, shape, "bytes")
        if begin == end:
            made[name] = torch.empty(shape, dtype=kind, device="cpu")
            continue
        made[name] = torch.frombuffer(bytearray(memoryview(data)[begin:end]), dtype=torch.uint8).view(kind).view(shape)
    return made


def _index_array(part: Any) -> Any:
    # On the CPU whatever `torch.device` is in force
    array = part if isinstance(part, torch.Tensor) else torch.as_tensor(part, device="cpu")
    # torch takes an empty list for numbers although a tensor of it has floats
    return array.long() if isinstance(part, (list, tuple)) and array.numel() == 0 else array


def indexing(info: TensorInfo) -> Indexing:
    """How torch indexes a tensor of the checkpoint."""
    shape = torch_shape(info.name, info.dtype, info.shape, info.file)
    arrays = Arrays(
        _index_array, lambda numbers: torch.tensor(numbers, dtype=torch.long, device="cpu"), reversible=False
    )
    pairs = info.dtype == "F4"

    def take(tensor: Any, index: Any) -> Any:
        # torch gathers no pairs of F4, but bytes
        return tensor.view(torch.uint8)[index].view(tensor.dtype) if pairs else tensor[index]

    def probe(index: Any) -> object:
        # Not on the meta device, whose errors are of other classes
        return torch.empty((), dtype=torch.uint8, device="cpu").expand(shape)[index]

    return Indexing(arrays, shape, 2 if pairs else 1, probe, take)


class Torch(Adapter):
    """Makes the torch tensors of one load.

    Every tensor has a storage of exactly its bytes, is writable, and keeps its block of the load alive, nothing else.
    """

    # As with safetensors: torch computes with them as fast as with aligned ones (measured: products, sums, casts)
    misaligned = True

    def __init__(self, selection: Selection, device: Device, target: str | None) -> None:
        self._selection = selection
        self._raw = target == RAW
        self._target = None if target is None or self._raw else torch_dtype(target)
        self._castable = {torch_dtype(name) for name in CASTABLE}
        # Wants that have to go as bytes first, with dtype and shape
        self._as_bytes: dict[int, tuple[Any, tuple[int, ...]]] = {}
        if not self._raw:
            self._check()
        with self._naming():
            self._gpu = None if device.is_cpu else _accelerator.Accelerator(device)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Errors of the GPU's name the checkpoint that was to be loaded."""
        try:
            yield
        except PenstockError as error:
            error.path = error.path or self._selection.core.files()[0]
            raise

    def _check(self) -> None:
        for name, wants in self._selection.by_dtype().items():
            if name in _native():
                continue
            kind = torch_dtype(name)
            for want in wants:
                file = self._selection.file(want)
                if kind is None:
                    raise MissingDtypeError(
                        f"tensor {self._selection.names[want]} is {name}, which torch {torch.__version__} lacks; "
                        'dtype="raw" or framework="dlpack" gives its bytes',
                        path=file,
                        tensor=self._selection.names[want],
                    )
                _, shape = self._selection.describe(want)
                self._as_bytes[want] = (kind, torch_shape(self._selection.names[want], name, shape, file))

    @property
    def caller_blocks(self) -> bool:
        """Whether the load's block memory is granted from here."""
        return self._gpu is not None

    @property
    def dlpack_device(self) -> tuple[int, int] | None:
        """The DLPack device that capsules carry; None: the core knows."""
        return None if self._gpu is None else self._gpu.dlpack_device

    def grant(self, load: _core.Load, blocks: Sequence[int]) -> None:
        """Gives the load the memory of these blocks."""
        if self._gpu is not None:
            with self._naming():
                self._gpu.grant(load, blocks, self._kind_of)

    def _kind_of(self, want: int, nbytes: int) -> tuple[Any, Sequence[int]]:
        """dtype and shape of the tensor that is made on a want."""
        if self._raw:
            return torch.uint8, (nbytes,)
        if want in self._as_bytes:
            return self._as_bytes[want]
        name, shape = self._selection.describe(want)
        return torch_dtype(name), shape

    def tensors(self, load: _core.Load, wants: Sequence[int]) -> list[Any]:
        """Tensors on these ready wants."""
        if self._gpu is None:
            return self._on_views(load, wants)
        made = self._gpu.taken(load, wants)
        if not made:
            return self._on_views(load, wants)
        rest = iter(self._on_views(load, [want for want in wants if want not in made]))
        return [made[want] if want in made else next(rest) for want in wants]

    def _on_views(self, load: _core.Load, wants: Sequence[int]) -> list[Any]:
        if self._raw:
            return [self._bytes(load, want) for want in wants]
        if not self._as_bytes:
            return load.capsules(wants, _native(), _from_dlpack())
        plain = iter(load.capsules([w for w in wants if w not in self._as_bytes], _native(), _from_dlpack()))
        return [self._via_bytes(load, w) if w in self._as_bytes else next(plain) for w in wants]

    def _bytes(self, load: _core.Load, want: int) -> Any:
        [view] = load.views([want])
        return _from_dlpack()(view.capsule((1, 8), [view.nbytes]))

    def _via_bytes(self, load: _core.Load, want: int) -> Any:
        dtype, shape = self._as_bytes[want]
        return self._bytes(load, want).view(dtype).view(shape)

    def _as_target(self, tensor: Any) -> Any:
        return tensor.to(self._target)

    def let_go(self) -> None:
        """Lets go of the memory of blocks that no tensor was made of."""
        if self._gpu is not None:
            self._gpu.let_go()


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
            shape, dtype = (math.prod(shape) * DTYPES[name].bits // 8,), torch.uint8
        else:
            shape = torch_shape(self._selection.names[want], name, shape, self._selection.file(want))
            dtype = torch_dtype(name)
        return torch.empty(shape, dtype=dtype, device="meta")


def _there_is() -> str:
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
                f"device={str(device)!r}: torch {torch.__version__} cannot use it ({why}); there is {_there_is()}",
                path=selection.core.files()[0],
            ) from error

    def _place(self, device: Device) -> Any:
        where = torch.device(str(device))
        torch.empty(0, device=where)
        return where

    def tensors(self, load: _core.Load, wants: Sequence[int]) -> list[Any]:
        """Tensors on these ready wants."""
        return [tensor.to(self._where) for tensor in super().tensors(load, wants)]


class _Framework(Framework):
    def adapter(self, selection: Selection, device: Device, target: str | None) -> Adapter:
        if device.is_cpu or device.is_gpu:
            return Torch(selection, device, target)
        return Meta(selection, target) if device.is_meta else Moved(selection, device, target)

    def of_capsules(self) -> tuple[dict[str, tuple[int, int, int]], Callable[[object], Any]]:
        return _native(), _from_dlpack()

    def indexing(self, info: TensorInfo) -> Indexing:
        return indexing(info)

    def joined(self, parts: list[Any], axis: int) -> Any:
        if parts[0].dtype == getattr(torch, "float4_e2m1fn_x2", None):  # torch joins bytes, and none of these
            return torch.cat([part.view(torch.uint8) for part in parts], axis).view(parts[0].dtype)
        return torch.cat(parts, axis)


FRAMEWORK = _Framework()
