"""One tensor for the ranks of a group: a shard for each, or the whole for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import _load
from ._checkpoint import Checkpoint
from ._choices import Framework
from ._core import Options
from ._errors import ArgumentTypeError, SliceError
from ._events import observe
from ._group import Rendezvous
from ._member import place_in
from ._placements import chunk, cut_of, paired
from ._selection import Axes, Cut, TensorInfo


def get_sharded(
    checkpoint: Checkpoint,
    name: str,
    dim: int,
    group: Any,
    device: Any = "cpu",
    *,
    dtype: Any = None,
    framework: Framework | None = None,
    options: Options | Mapping[str, Any] | None = None,
) -> Any:
    """Each rank's shard of one tensor, divided along a dimension. Every rank of the group makes the same call.

    Args:
        checkpoint: What `open` gives.
        name: The tensor's name.
        dim: The dimension to divide; negative ones count from the end. The parts are those of `torch.chunk`: all of the
            same size, except that the last ones may be smaller, or empty.
        group: As in `Checkpoint.load`. In a `DeviceMesh` of several dimensions, the last one counts fastest.
        device: As in `Checkpoint.load`.
        dtype: As in `Checkpoint.load`.
        framework: As in `Checkpoint.load`.
        options: As in `Checkpoint.load`.

    Raises:
        UnknownTensorError: there is no such tensor.
        SliceError: the tensor has no such dimension.
        PenstockError: as `Checkpoint.load`.
    """
    rank, size = place_in(group)

    def shard(info: TensorInfo) -> Cut:
        ndim = len(info.shape)
        if not isinstance(dim, int) or not -ndim <= dim < ndim:
            why = f"dim={dim!r}: {name} has shape {list(info.shape)}"
            raise SliceError(why, path=info.file, tensor=name)

        def part(shape: Any) -> Axes:
            first, past = chunk(shape[dim], size, rank)
            return [[(first, past, 1) if d == dim % ndim else (0, n, 1)] for d, n in enumerate(shape)]

        return cut_of(paired(info.dtype, info.shape, part))

    return _one(checkpoint, name, shard, group, device, dtype, framework, options)


def broadcast(
    checkpoint: Checkpoint,
    name: str,
    group: Any,
    device: Any = "cpu",
    *,
    dtype: Any = None,
    framework: Framework | None = None,
    options: Options | Mapping[str, Any] | None = None,
) -> Any:
    """One whole tensor on each rank. Every rank of the group makes the same call.

    Each rank reads a part of it, and sends that to the others, where `Options.exchange` chooses that. Arguments and
    errors are those of `get_sharded`.
    """
    return _one(checkpoint, name, None, group, device, dtype, framework, options)


def _one(
    checkpoint: Checkpoint,
    name: str,
    shard: Callable[[TensorInfo], Cut] | None,
    group: Any,
    device: Any,
    dtype: Any,
    framework: Framework | None,
    options: Options | Mapping[str, Any] | None,
) -> Any:
    if not isinstance(checkpoint, Checkpoint):
        raise ArgumentTypeError(f"checkpoint={checkpoint!r}: give what penstock.open returns")
    with observe("load", checkpoint) as seen, Rendezvous(group) as rendezvous:
        info = checkpoint[name]  # so no name is taken for a glob
        cuts = None if shard is None else {name: shard(info)}
        request, adapter = checkpoint._prepare(device, [name], dtype, framework, options, cuts, "file")
        return _load.load(request._replace(group=rendezvous, seen=seen), adapter, False)[name]
