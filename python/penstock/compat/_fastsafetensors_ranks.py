"""fastsafetensors' buffer where several ranks load together: each call is a load of all of them, or of one alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .._checkpoint import Checkpoint
from .._errors import CancelledError, InvalidError, UnsupportedError
from .._events import NOTHING, observe
from .._frameworks import device_for, make_adapter
from .._options import make_options
from .._request import Request, prepare
from .._selection import Selection
from ._errors import ClosedError
from ._fastsafetensors_buffer import FilesBufferOnDevice, Place
from ._fastsafetensors_types import DType, TorchTensor, converted, torch_dtype
from ._process_group import told

if TYPE_CHECKING:
    from .._framework import Adapter
    from .._group_stream import GroupLoads

#: Tensors that are asked for whole and in order, before a program counts as one that wants them all.
_SINGLES = 4


class RanksBuffer(FilesBufferOnDevice):
    """Tensors of the files of several ranks, which are read when they are asked for.

    Every rank makes the same calls in the same order. What several ranks want is read by one of them, and sent to the
    others. What each rank wants for itself alone, it reads without a word to the others: rows (``dim=0``), and what
    `push_tensor` gives. So the files must be where every rank reads them, as for the original.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        places: dict[str, Place],
        paths: dict[Place, str],
        loads: GroupLoads,
        device: Any,
        settings: dict[str, Any],
        dtype: Any,
    ) -> None:
        super().__init__(checkpoint, {}, places, paths)
        self._opened = checkpoint
        self._seen = observe("load", checkpoint, engine="fastsafetensors", kept=True)
        if self._seen is not NOTHING:
            checkpoint._within = self._seen
        self._loads, self._device, self._settings, self._dtype = loads, device, settings, dtype
        self._size, self._rank = loads.member.size, loads.member.rank
        self._untaken = set(places)
        # Of whole tensors: their names in order, how many have been asked for in it, and the stream that follows
        self._order = list(places)
        self._asked = 0
        self._following: Any = None

    # What is asked for

    def get_tensor(self, tensor_name: str, device: Any = None, dtype: Any = DType.AUTO) -> Any:
        """The whole tensor, on every rank; a new one each time. Asked for in order, tensors are read ahead."""
        with self._asking(tensor_name):
            target = torch_dtype(dtype)
        return self._converted(self._whole(tensor_name), device, target, tensor_name)

    def get_sharded(self, tensor_name: str, dim: int, device: Any = None, dtype: Any = DType.AUTO) -> Any:
        """This rank's part of a tensor that is cut along ``dim`` into parts of equal size.

        The last parts are smaller, or empty, where the size is no multiple of the number of ranks. -1: all of it.
        """
        if dim == -1:
            return self.get_tensor(tensor_name, device, dtype)
        [tensor] = self._parts({tensor_name: dim}, dtype).values()
        return self._converted(tensor, device, torch_dtype(dtype), tensor_name)

    def push_tensor(self, tensor_name: str, dst_rank: int, device: Any = None, dtype: Any = DType.AUTO) -> Any:
        """The whole tensor on rank ``dst_rank``, None on the others."""
        with self._asking(tensor_name):
            target = torch_dtype(dtype)
            if dst_rank not in range(self._size):
                raise InvalidError(f"dst_rank={dst_rank!r}: the ranks of this group are 0 to {self._size - 1}")
        self._follow_no_more()
        self._untaken.discard(tensor_name)
        if dst_rank != self._rank:
            return None
        [tensor] = self._loaded([tensor_name], None, together=False).values()
        return self._converted(tensor, device, target, tensor_name)

    def get_multi_cols(
        self, tensor_names: Sequence[str], dim: int, device: Any = None, dtype: Any = DType.AUTO
    ) -> TorchTensor:
        """This rank's parts of the tensors, joined along ``dim``: those of one file together, files in order."""
        parts = self._parts(dict.fromkeys(tensor_names, dim), dtype, whole=False)
        names = sorted(tensor_names, key=self._place)
        return self._joined(names, [parts[name] for name in names], dim, device, torch_dtype(dtype))

    def as_dict(self, tensor_shard_dim: Mapping[str, int]) -> dict[str, TorchTensor]:
        """The tensors named, each cut along its dimension (-1: whole), by one load; in wrappers."""
        parts = self._parts(dict(tensor_shard_dim), DType.AUTO)
        return {name: TorchTensor.of(parts[name]) for name in tensor_shard_dim}

    def iter_local_tensors(self, tensor_names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Refused, as by the original: a rank has no tensors that others do not have."""
        raise UnsupportedError("iter_local_tensors: only where one rank is alone")

    def close(self) -> None:
        """Ends it: the other ranks get an error if they go on. Tensors stay. Idempotent."""
        if self._tensors is None:
            return
        self._tensors = None
        self._follow_no_more()
        if self._untaken:
            self._loads.say(CancelledError("its buffer was closed"))
        self._loads.close()
        self._seen.end()

    # How it is had

    @contextmanager
    def _asking(self, *names: str) -> Iterator[None]:
        """Checks the names. What is wrong is told to the other ranks, which wait for this one by then."""
        with told(self._loads if self._tensors is not None else None):
            for name in names:
                self._place(name)
            if self._tensors is None:
                raise ClosedError(f"tensor {', '.join(names)}: the buffer has been closed")
            yield

    def _parts(self, dims: dict[str, int], dtype: Any, *, whole: bool = True) -> dict[str, Any]:
        """This rank's part of each tensor. Rows are no other rank's too: it reads them alone."""
        with self._asking(*dims):
            torch_dtype(dtype)
            slices = {name: self._cut(name, dim) for name, dim in dims.items() if not (whole and dim == -1)}
        self._follow_no_more()
        self._untaken.difference_update(dims)
        return self._loaded(list(dims), slices, together=any(dim != 0 for dim in dims.values()))

    def _cut(self, name: str, dim: int) -> tuple[slice, ...]:
        shape = self.get_shape(name)
        if isinstance(dim, bool) or not isinstance(dim, int) or dim not in range(len(shape)):
            raise InvalidError(f"tensor {name} has shape {shape}: it cannot be cut along dimension {dim!r}")
        block = -(-shape[dim] // self._size)
        start, stop = (min(number * block, shape[dim]) for number in (self._rank, self._rank + 1))
        return (*[slice(None)] * dim, slice(start, stop))

    def _loaded(self, names: list[str], slices: Any, *, together: bool) -> dict[str, Any]:
        if not together:
            tensors = self._opened.load(
                self._device, names, framework="pt", progress=False, options=self._settings, slices=slices or None
            )
        else:
            options = make_options(self._settings)

            def prepared() -> tuple[Request, Adapter]:
                where = device_for(self._device, "pt")
                request, adapter = prepare(self._opened, where, names, None, "pt", options, slices or None)
                return request._replace(seen=self._seen.part()), adapter

            tensors = self._loads.load(self._opened._core, options, prepared)
        return {name: self._converted(tensor, None, self._dtype, name) for name, tensor in tensors.items()}

    @staticmethod
    def _converted(tensor: Any, device: Any, dtype: Any, name: str) -> Any:
        return tensor if device is None and dtype is None else converted(tensor, device, dtype, name)

    def _whole(self, name: str) -> Any:
        """A tensor that every rank wants: the next one of the stream, or one that is loaded alone."""
        self._untaken.discard(name)
        if self._asked < len(self._order) and self._order[self._asked] == name:
            self._asked += 1
            if self._following is None and self._asked > _SINGLES:
                self._following = self._stream(self._order[self._asked - 1 :])
            if self._following is not None:
                try:
                    _, tensor = next(self._following)
                except BaseException:
                    self._follow_no_more()
                    raise
                return self._converted(tensor, None, self._dtype, name)
        else:
            self._follow_no_more()
        return self._loaded([name], None, together=True)[name]

    def _follow_no_more(self) -> None:
        """Each is loaded alone from now on. All ranks come here in the same call."""
        following, self._following, self._asked = self._following, None, len(self._order)
        if following is not None:
            following.close()

    def _stream(self, names: list[str]) -> Any:
        from .._group_stream import stream

        where = device_for(self._device, "pt")

        def adapter(part: Selection) -> Adapter:
            return make_adapter("pt", part, where, None)

        def request() -> Request:
            request, _ = prepare(self._opened, where, names, None, "pt", make_options(self._settings))
            return request._replace(seen=self._seen.part())

        sequence = [self._opened._core.index(name) for name in names]
        return stream(self._loads.member, request, adapter, False, lambda report: None, sequence)
