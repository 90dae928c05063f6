"""Tensors without bytes that remember which part of a checkpoint they are.

A deferred tensor is a view of a `Root`: a tensor of the checkpoint, or a copy of a view of one. Views of it stay
deferred. `copy_` into real memory is given to its recorder. Every other operation gets a real tensor in its place, and
is counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_map

from .._destination import Destination
from .._dtypes import CASTABLE
from .._errors import MissingDtypeError
from .._selection import TensorInfo
from .._torch import torch_dtype, torch_shape
from ._region import Box, Step, box_of, composed

aten = torch.ops.aten


class Recording(Protocol):
    """The receiver of copies. It also reads tensors that cannot wait."""

    def copied(self, to: torch.Tensor, source: Deferred) -> bool:
        """Takes a copy of ``source`` to real memory. False: it has to be made at once."""

    def read(self, tensor: Root, box: Box, to: torch.Tensor) -> None:
        """Fills a new tensor with a box of a tensor of the checkpoint."""

    def about_to_touch(self, tensor: torch.Tensor) -> None:
        """Says that an operation reads or writes the bytes of a real tensor."""

    def count(self, operation: str, nbytes: int) -> None:
        """Counts an operation that got a real tensor, and its bytes."""

    def wrote(self, index: int) -> None:
        """Says that an operation wrote what tensor number ``index`` gave to a real tensor."""


_CASTABLE = frozenset(torch_dtype(name) for name in CASTABLE)
_PAIRS = torch_dtype("F4")


def kind_of(info: TensorInfo) -> tuple[torch.dtype, tuple[int, ...]]:
    """torch's dtype and shape for a tensor of the checkpoint.

    Raises:
        MissingDtypeError: torch has no such dtype.
        UnsupportedError: torch has no tensor of such a shape.
    """
    dtype = torch_dtype(info.dtype)
    if dtype is None:
        text = f"tensor {info.name} is {info.dtype}, which torch {torch.__version__} lacks"
        raise MissingDtypeError(text, path=info.file, tensor=info.name)
    return dtype, torch_shape(info.name, info.dtype, info.shape, info.file)


_realising = threading.RLock()
"""Held while a root becomes real, and while elements are read: so both are seen whole."""


class Root:
    """The tensor that several deferred tensors are views of."""

    __slots__ = ("dtype", "index", "parent", "part", "real", "recording", "shape")

    def __init__(
        self,
        recording: Recording,
        index: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        parent: tuple[Root, tuple[int, ...], int] | None = None,
    ) -> None:
        self.recording = recording
        self.index = index
        """Number of the tensor in the checkpoint."""
        self.shape = shape
        """In the order of memory: contiguous."""
        self.dtype = dtype
        """As the file has it."""
        self.parent = parent
        """For a copy: what it is a copy of, with the strides and the offset of the view that was copied."""
        self.part: tuple[tuple[slice, ...], torch.Tensor] | None = None
        """A cut of it that has been read."""
        self.real: torch.Tensor | None = None
        """All of it, once something has written to it."""

    def tensor(self) -> Root:
        """The tensor of the checkpoint that this is, or is a copy of."""
        root = self
        while root.parent is not None:
            root = root.parent[0]
        return root

    def box(self, steps: Sequence[Step], offset: int) -> Box | None:
        """The box of the checkpoint's tensor that a view of this is."""
        if self.dtype == _PAIRS:
            return None
        root, found = self, box_of(self.shape, steps, offset)
        while root.parent is not None and found is not None:
            root, strides, start = root.parent
            steps, offset = composed(found, strides, start)
            found = box_of(root.shape, steps, offset)
        return found

    def value(self, size: Sequence[int], stride: Sequence[int], offset: int, device: torch.device) -> torch.Tensor:
        """A real tensor with the elements of a view. It is new, unless all of this is real already."""
        if self.real is not None:
            return self.real.as_strided(size, stride, offset)
        return self._read(size, stride, offset, device)

    def _read(self, size: Sequence[int], stride: Sequence[int], offset: int, device: torch.device) -> torch.Tensor:
        """A new tensor with the elements of a view as the file has them, whatever has been written to this since."""
        dtype = self.dtype
        # With dimensions in the order of memory that a copy of an eager tensor would have
        like = torch.empty_like(torch.empty_strided(size, stride, dtype=dtype, device="meta"))
        made = torch.empty_strided(size, like.stride(), dtype=dtype, device=device)
        if made.numel() == 0:
            return made
        steps = [(n, own, to) for n, own, to in zip(size, stride, made.stride(), strict=True) if n > 1]
        box = self.box(steps, offset)
        if box is not None:
            self.recording.read(self.tensor(), box, made)
        elif self.parent is not None:
            parent, strides, start = self.parent
            copied = parent._read(self.shape, strides, start, device).contiguous()
            made.copy_(copied.as_strided(size, stride, offset))
        else:
            shape = self.shape
            whole = torch.empty(shape, dtype=dtype, device=device)
            dims = [(d, n, step) for d, (n, step) in enumerate(zip(shape, whole.stride(), strict=True)) if n > 1]
            self.recording.read(self, Box(tuple((0, n, 1) for n in shape), dims), whole)
            made.copy_(whole.as_strided(size, stride, offset))
        return made

    def realise(self, device: torch.device) -> torch.Tensor:
        """Makes all of it real, for good: something is about to write to it."""
        with _realising:
            if self.real is None:
                strides: list[int] = []
                step = 1
                for n in reversed(self.shape):
                    strides.insert(0, step)
                    step *= n
                self.real = self.value(self.shape, strides, 0, device).contiguous()
            return self.real


class Planned(NamedTuple):
    """A copy of a deferred tensor that can be made later."""

    tensor: Root
    """The tensor that it is a copy of a part of."""
    cut: tuple[slice, ...]
    """The part."""
    box: Box
    """The same, and how it lies at its destination."""
    into: torch.Tensor
    """Where it goes: one dimension for each one of the box, or any shape if the box has one element."""
    axes: tuple[int, ...] | None
    """The dimension of the tensor behind each one of ``into``; None: one element for all of it."""
    cast: bool


def _cut_of(box: Box) -> tuple[slice, ...]:
    return tuple([slice(*part) for part in box.cut])


def destination_of(name: str, tensor: Root, box: Box, to: torch.Tensor) -> Destination:
    """Where a box of a tensor of the checkpoint goes that is read at once."""
    if tensor.dtype == _PAIRS:  # only whole ones are read: the file counts elements, torch pairs of them
        return Destination(name, to)
    return Destination(name, arranged(to, box), _cut_of(box), tuple([d for d, _, _ in box.dims]))


def planned(to: torch.Tensor, source: Deferred) -> Planned | None:
    """``to.copy_(source)`` as something that can be made later; None if it cannot. ``to`` has elements."""
    if source.is_real or type(to) not in (torch.Tensor, torch.nn.Parameter) or to.layout is not torch.strided:
        return None
    wanted, given = source.dtype, to.dtype
    cast = wanted != given
    if cast and (source.reinterpreted or wanted not in _CASTABLE or given not in _CASTABLE):
        return None
    if source.reinterpreted:
        to = to.view(source._root.dtype)
    tensor = source._root.tensor()
    if source.dim() > to.dim():
        return None  # torch refuses it
    if source.numel() == 1 and to.numel() != 1:
        box = source.box([])
        return None if box is None else Planned(tensor, _cut_of(box), box, to, None, cast)
    if source.shape != to.shape:
        if source.numel() != to.numel():
            return None  # elements that are copied several times
        source = source.expand(to.shape)  # type: ignore[assignment]
    box = source.box(source.steps(to))
    if box is None:
        return None
    return Planned(tensor, _cut_of(box), box, arranged(to, box), tuple([d for d, _, _ in box.dims]), cast)


def piece_of(box: Box, cut: Sequence[slice], part: torch.Tensor) -> torch.Tensor | None:
    """A box out of a part of the same tensor, with the box's dimensions; None if the part does not have all of it."""
    if any(first < own.start or past > own.stop for own, (first, past, _) in zip(cut, box.cut, strict=True)):
        return None
    index = tuple(slice(a - own.start, b - own.start, s) for own, (a, b, s) in zip(cut, box.cut, strict=True))
    return part[index].reshape([n for _, n, _ in box.dims])


def arranged(to: torch.Tensor, box: Box) -> torch.Tensor:
    """A destination with the dimensions of a box, in their order."""
    sizes, strides = tuple(n for _, n, _ in box.dims), tuple(step for _, _, step in box.dims)
    return to if (tuple(to.size()), to.stride()) == (sizes, strides) else to.as_strided(sizes, strides)


#: Views by another name, which differ from a view only in what autograd makes of them.
_ALIASES = {aten._unsafe_view.default, aten.lift_fresh.default}
#: Operations that make a copy that may wait.
_COPIES = {aten.clone.default, aten._to_copy.default}
#: Operations that need nothing of a tensor except its shape, strides, dtype and device.
_LIKE = {
    getattr(aten, name).default
    for name in (
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty_strided",
    )
}
_COPY, _FILL, _VIEW_AS = aten.copy_.default, aten.fill_.Tensor, aten.view.dtype


class Deferred(torch.Tensor):
    """A view of a `Root`. It has a shape, strides, a dtype and a device, and no bytes."""

    _root: Root
    _twin: torch.Tensor
    """On the meta device: the same view of a tensor of the root's shape."""
    _value: torch.Tensor | None

    @staticmethod
    def __new__(cls, root: Root, twin: torch.Tensor, device: torch.device) -> Deferred:
        make: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
        made: Deferred = make(
            cls,
            twin.size(),
            strides=twin.stride(),
            storage_offset=twin.storage_offset(),
            dtype=twin.dtype,
            device=device,
        )
        made._root, made._twin, made._value = root, twin, None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Deferred({tuple(self.shape)}, {self.dtype}, {self.device})"

    def steps(self, to: torch.Tensor) -> list[Step]:
        """The steps of a copy of this to a tensor of the same shape."""
        found = zip(self._twin.size(), self._twin.stride(), to.stride(), strict=True)
        return [(n, own, step) for n, own, step in found if n > 1]

    def box(self, steps: Sequence[Step]) -> Box | None:
        """The box of the checkpoint's tensor that this is, with these steps."""
        return self._root.box(steps, int(self._twin.storage_offset()))

    @property
    def is_real(self) -> bool:
        """Whether something has written to what this is a view of."""
        return self._root.real is not None

    @property
    def reinterpreted(self) -> bool:
        """Whether it shows the bytes of another dtype."""
        return self._twin.dtype != self._root.dtype

    def value(self) -> torch.Tensor:
        """A real tensor with these elements, to be read. If `is_real`, writes to it are seen by all views."""
        root, twin = self._root, self._twin
        if root.real is None and self._value is not None:
            return self._value
        with _realising:
            found = root.value(twin.size(), twin.stride(), int(twin.storage_offset()), self.device)
        if self.reinterpreted:
            found = found.view(twin.dtype)
        if root.real is None:
            self._value = found
        return found

    def realised(self) -> torch.Tensor:
        """A real tensor that may be written to, which all views of the same root see."""
        self._root.realise(self.device)
        return self.value()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _NOT_DISPATCHED.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Deferred):
            if not first.is_real:
                if func.is_view or func in _ALIASES:
                    found = _view(func, first, args, kwargs)
                    if found is not None:
                        return found
                elif func in _COPIES:
                    found = _copy_of(func, first, kwargs)
                    if found is not None:
                        return found
            if func in _LIKE:
                like = torch.empty_strided(first.size(), first.stride(), dtype=first.dtype, device=first.device)
                return func(like, *args[1:], **kwargs)
        elif func is _COPY or func is _FILL:
            source = args[1]
            if isinstance(source, Deferred) and isinstance(first, torch.Tensor):
                if first.is_meta:
                    return func(first, source._twin.to(device="meta"), *args[2:], **kwargs)
                if (func is _COPY or source.dim() == 0) and source._root.recording.copied(first, source):
                    return first
        return _at_once(func, args, kwargs)


def _view(func: Any, first: Deferred, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The deferred view or views that an operation makes; None if it has to be a real one."""
    if func is _VIEW_AS and args[1].itemsize != first.dtype.itemsize:
        return None
    found = func(first._twin, *args[1:], **kwargs)
    root, device = first._root, first.device
    if isinstance(found, torch.Tensor):
        return Deferred(root, found, device)
    return type(found)(Deferred(root, one, device) for one in found)


def _copy_of(func: Any, first: Deferred, kwargs: dict[str, Any]) -> Deferred | None:
    """A deferred copy, if its elements are the same."""
    dtype = kwargs.get("dtype")
    if (dtype is not None and dtype != first.dtype) or first.reinterpreted:
        return None
    if kwargs.get("layout") not in (None, torch.strided) or kwargs.get("pin_memory"):
        return None
    device = torch.device(kwargs.get("device") or first.device)
    if device.type == "meta":
        return None
    kept = {"memory_format": kwargs["memory_format"]} if kwargs.get("memory_format") is not None else {}
    twin = aten.clone.default(first._twin, **kept)
    # The root is contiguous: its dimensions are those of the copy in the order of memory
    order = sorted(range(twin.dim()), key=lambda d: (twin.stride(d), twin.size(d)), reverse=True)
    shape = tuple(twin.size(d) for d in order)
    step = 1
    for d in reversed(order):
        if twin.size(d) > 1:
            if twin.stride(d) != step:
                return None
            step *= twin.size(d)
    view = first._twin
    parent = (first._root, tuple(view.stride(d) for d in order), int(view.storage_offset()))
    return Deferred(Root(first._root.recording, first._root.index, shape, first._root.dtype, parent), twin, device)


@cache
def _writes(func: Any) -> tuple[frozenset[int], frozenset[str]]:
    """The arguments that an operation writes to: their positions, and their names."""
    positions, names = set(), set()
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            positions.add(position)
            names.add(argument.name)
    return frozenset(positions), frozenset(names)


def _at_once(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes an operation with real tensors in place of deferred ones."""
    positions, names = _writes(func)
    views = func.is_view or func in _ALIASES
    told: list[Root] = []
    nbytes = 0

    def real(value: Any, write: bool) -> Any:
        nonlocal nbytes
        if not isinstance(value, Deferred):
            return value
        # What views a real tensor may be written to later
        found = value.realised() if write or views else value.value()
        told.append(value._root)
        nbytes += found.numel() * found.element_size()
        return found

    made = [
        tree_map(lambda value, write=position in positions: real(value, write), argument)
        for position, argument in enumerate(args)
    ]
    named = {
        name: tree_map(lambda value, write=name in names: real(value, write), argument)
        for name, argument in kwargs.items()
    }
    if told:
        told[0].recording.count(str(func), nbytes)
    if told and not views:

        def touch(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                told[0].recording.about_to_touch(value)
            return value

        tree_map(touch, (made, named))
    found = func(*made, **named)
    if any(position < len(args) and not isinstance(args[position], Deferred) for position in positions):
        for root in told:
            root.recording.wrote(root.index)
    # An operation in place returns what it was given
    for position in positions:
        if position < len(args) and isinstance(args[position], Deferred) and found is made[position]:
            return args[position]
    return found


def _with_real(function: Callable[..., Any], real: Callable[[Deferred], torch.Tensor]) -> Callable[..., Any]:
    """An operation that never reaches the dispatcher, made with a real tensor."""

    def call(first: Deferred, *args: Any, **kwargs: Any) -> Any:
        found = real(first)
        first._root.recording.count(function.__name__, found.nbytes)
        return function(found, *args, **kwargs)

    return call


SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def assign_data(to: torch.Tensor, source: Deferred) -> None:
    """``to.data = source``: memory of its own, which is filled like any other. torch asks only ``to`` about it."""
    to.data = with_memory(source)


def with_memory(source: Deferred) -> torch.Tensor:
    """A real tensor of the same shape, strides, dtype and device, into which this is copied."""
    made = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device=source.device)
    return made.copy_(source.detach())


#: Methods that read elements and do not reach `__torch_dispatch__`.
_READS = ("tolist", "__format__")
#: And what shows memory, which may then be written to.
_SHOWS = (
    "numpy",
    "data_ptr",
    "untyped_storage",
    "storage",
    "__array__",
    "__dlpack__",
    "__reduce_ex__",
    "__deepcopy__",
    "share_memory_",
    "is_shared",
    "pin_memory",
)
#: The functions that are called in place of them.
_NOT_DISPATCHED: dict[Any, Callable[..., Any]] = {
    torch.Tensor.data.__get__: torch.Tensor.detach,  # type: ignore[attr-defined]
    **{getattr(torch.Tensor, name): _with_real(getattr(torch.Tensor, name), Deferred.value) for name in _READS},
    **{getattr(torch.Tensor, name): _with_real(getattr(torch.Tensor, name), Deferred.realised) for name in _SHOWS},
}
