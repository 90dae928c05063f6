"""`Weights`: tensors and shards by name, for engines that build their layers from a class of this shape.

Text Generation Inference and its relatives ask such a class for the tensors of each layer, one rank's shard at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from .._checkpoint import Source
from .._checkpoint import open as open_checkpoint
from .._destination import Destination
from .._dtypes import CASTABLE
from .._errors import InvalidError, SliceError, UnknownTensorError
from .._events import NOTHING, observe
from .._torch import torch_dtype


class ProcessGroup(Protocol):
    """The interface of a process group: torch's has it."""

    def rank(self) -> int:
        """The number of this rank."""

    def size(self) -> int:
        """How many ranks there are."""


class Weights:
    """The tensors of a checkpoint, for one rank.

    Args:
        filenames: As for `penstock.open`.
        device: Where the tensors go.
        dtype: What F16, BF16, F32 and F64 are converted to; None leaves them as they are.
        process_group: Of the ranks that share each sharded tensor.
        aliases: Other names of a tensor, by the name that is asked for. The first one that exists is taken.
        prefix: Put before a name that does not exist without it.
        options: As for `Checkpoint.load`.

    Raises:
        PenstockError: as `penstock.open` does.
    """

    def __init__(
        self,
        filenames: Source,
        device: Any,
        dtype: torch.dtype | None,
        process_group: ProcessGroup,
        aliases: Mapping[str, Sequence[str]] | None = None,
        prefix: str | None = None,
        options: Any = None,
    ) -> None:
        self.checkpoint = open_checkpoint(filenames)
        seen = observe("load", self.checkpoint, engine="tgis", kept=True)
        if seen is not NOTHING:
            self.checkpoint._within = seen  # one event, when the weights are dropped
        self.device = torch.device(device)
        self.dtype = dtype
        self.process_group = process_group
        self.aliases = dict(aliases or {})
        self.prefix = prefix
        self._options = options

    def get_filename(self, tensor_name: str) -> tuple[str, str]:
        """(path of the file, name in the file). Raises UnknownTensorError."""
        for name in (tensor_name, *self.aliases.get(tensor_name, ())):
            for candidate in (name, f"{self.prefix}.{name}") if self.prefix is not None else (name,):
                if candidate in self.checkpoint:
                    return self.checkpoint[candidate].file, candidate
        raise UnknownTensorError(f"no file contains tensor {tensor_name}", tensor=tensor_name)

    def get_shape(self, tensor_name: str) -> list[int]:
        """The whole tensor's shape, in elements."""
        return list(self.checkpoint[self.get_filename(tensor_name)[1]].shape)

    def get_tensor(self, tensor_name: str) -> torch.Tensor:
        """The whole tensor."""
        return self._one(tensor_name, None)

    def get_partial_sharded(self, tensor_name: str, dim: int) -> torch.Tensor:
        """This rank's shard. If the ranks do not divide the dimension evenly, the last shards are shorter."""
        return self._one(tensor_name, self._shard(tensor_name, dim, even=False))

    def get_sharded(self, tensor_name: str, dim: int) -> torch.Tensor:
        """This rank's shard. Raises SliceError if the ranks do not divide the dimension evenly."""
        return self._one(tensor_name, self._shard(tensor_name, dim, even=True))

    def get_multi_weights_col(self, prefixes: Sequence[str], quantize: None = None, dim: int = 0) -> torch.Tensor:
        """The rank's rows of ``PREFIX.weight`` for each prefix, joined along ``dim``, in one load."""
        if quantize is not None:
            raise InvalidError(f"quantize={quantize!r}: ask for the tensors of a quantized layer one by one")
        names = [self.get_filename(f"{prefix}.weight")[1] for prefix in prefixes]
        cuts = [self._shard(name, 0, even=True) for name in names]
        infos = [self.checkpoint[name] for name in names]
        shapes = [_shape_of(cut, info.shape) for cut, info in zip(cuts, infos, strict=True)]
        if any(shape[:dim] + shape[dim + 1 :] != shapes[0][:dim] + shapes[0][dim + 1 :] for shape in shapes):
            raise SliceError(f"{', '.join(names)}: shapes that cannot be joined along dimension {dim}: {shapes}")
        whole = [*shapes[0]]
        whole[dim] = sum(shape[dim] for shape in shapes)
        made = torch.empty(whole, dtype=self._made_as(infos[0].dtype), device=self.device)
        destinations, at = [], 0
        for name, cut, shape in zip(names, cuts, shapes, strict=True):
            destinations.append(Destination(name, made.narrow(dim, at, shape[dim]), cut, cast=True))
            at += shape[dim]
        self.checkpoint.load_into(destinations, progress=False, options=self._options)
        return made

    def get_multi_weights_row(self, prefix: str, quantize: None = None) -> torch.Tensor:
        """The rank's columns of ``PREFIX.weight``."""
        if quantize is not None:
            raise InvalidError(f"quantize={quantize!r}: ask for the tensors of a quantized layer one by one")
        return self.get_sharded(f"{prefix}.weight", 1)

    def _made_as(self, dtype: str) -> torch.dtype:
        if self.dtype is not None and dtype in CASTABLE:
            return self.dtype
        found: torch.dtype = torch_dtype(dtype)
        return found

    def _one(self, tensor_name: str, cut: tuple[slice, ...] | None) -> torch.Tensor:
        name = self.get_filename(tensor_name)[1]
        slices = None if cut is None else {name: cut}
        found = self.checkpoint.load(self.device, [name], self.dtype, "pt", False, self._options, slices=slices)
        tensor: torch.Tensor = found[name]
        return tensor

    def _shard(self, tensor_name: str, dim: int, even: bool) -> tuple[slice, ...]:
        shape = self.get_shape(tensor_name)
        rank, ranks = self.process_group.rank(), self.process_group.size()
        if not -len(shape) <= dim < len(shape):
            raise SliceError(f"{tensor_name} of shape {shape} has no dimension {dim}", tensor=tensor_name)
        size = shape[dim]
        if even and size % ranks:
            text = f"{tensor_name}: {ranks} ranks do not divide dimension {dim} of {shape}"
            raise SliceError(text, tensor=tensor_name)
        block = -(-size // ranks)
        cut = [slice(None)] * len(shape)
        cut[dim] = slice(min(size, rank * block), min(size, (rank + 1) * block))
        return tuple(cut)


def _shape_of(cut: Sequence[slice], shape: Sequence[int]) -> list[int]:
    return [len(range(*part.indices(n))) for part, n in zip(cut, shape, strict=True)]
