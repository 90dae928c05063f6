"""``placements=``: each rank of a `DeviceMesh` loads its local shard of each tensor, which becomes a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ._device import Device
from ._dtypes import RAW, cast_target
from ._errors import ArgumentTypeError, InvalidError, MissingFrameworkError, UnsupportedError
from ._frameworks import framework_named, need
from ._late_imports import importing
from ._member import coordinates_in, is_mesh
from ._placements import Mesh, cut_of, sharded_dim
from ._request import Finish
from ._selection import Cut, Rule, Selection, TensorInfo, info_of


class Placing:
    """The wants of one rank, if a rule places the tensors on a mesh, and the DTensors that its shards become."""

    def __init__(self, group: Any, rule: Rule, framework: str | None, dtype: Any) -> None:
        if not is_mesh(group):
            raise ArgumentTypeError(
                f"placements=: DTensors need a mesh: give group= a DeviceMesh, not a {type(group).__name__}"
            )
        if framework_named(framework) != "pt":
            raise UnsupportedError(f"placements=: DTensors are torch's: framework={framework!r} has none")
        if cast_target(dtype) == RAW:
            raise InvalidError(f'placements=: dtype="{RAW}" gives bytes, which have no dimensions to divide')
        need("pt")
        self._mesh = group
        self._place = Mesh(group.shape, coordinates_in(group), rule, "placements")
        self._of: dict[str, tuple[TensorInfo, list[Any]]] = {}

    def wants(self, selection: Selection) -> dict[str, Cut]:
        """This rank's part of each tensor of the selection that the rule places."""
        found: dict[str, Cut] = {}
        files = selection.core.files()
        self._place.check_names(selection.core)
        for want, name in enumerate(selection.names):
            info = info_of(selection.core, selection.tensor(want), files)
            placements = self._place.placements(info)
            if placements is not None:
                found[name] = cut_of(self._place.axes(info, placements))
                self._of[name] = info, placements
        return found

    def finish(self, device: Device, inner: Finish | None, names: Sequence[str]) -> Finish:
        """The adapter that makes DTensors of the shards that are loaded to ``device``.

        Raises:
            InvalidError: DTensors of this mesh live elsewhere.
        """
        kind = "cuda" if device.is_gpu else device.kind
        if kind != self._mesh.device_type and not device.is_meta:
            raise InvalidError(
                f"placements=: device={str(device)!r}, and tensors of this DeviceMesh are on {self._mesh.device_type!r}"
            )
        return _Distributing(inner, names, self._mesh, self._of)


class _Distributing:
    def __init__(
        self, inner: Finish | None, names: Sequence[str], mesh: Any, of: dict[str, tuple[TensorInfo, list[Any]]]
    ) -> None:
        try:
            with importing():
                from torch import Size
                from torch.distributed.tensor import DTensor

                from ._torch import torch_shape
        except ImportError as error:
            raise MissingFrameworkError(f"placements= needs DTensor, which this torch lacks: {error}") from None

        self._inner, self._names, self._mesh, self._of = inner, names, mesh, of
        self._type, self._size, self._shape = DTensor, Size, torch_shape

    def add(self, want: int, tensor: Any) -> tuple[bool, Any]:
        """As `Finish.add`."""
        complete, local = (True, tensor) if self._inner is None else self._inner.add(want, tensor)
        return complete, self._dtensor(self._names[want], local) if complete else None

    def _dtensor(self, name: str, local: Any) -> Any:
        info, placements = self._of[name]
        shape = self._shape(name, info.dtype, info.shape, info.file)
        stride = [prod(max(size, 1) for size in shape[d + 1 :]) for d in range(len(shape))]
        return self._type.from_local(
            local,
            self._mesh,
            [_counted(placement, len(shape)) for placement in placements],
            run_check=False,
            shape=self._size(shape),
            stride=tuple(stride),
        )


def _counted(placement: Any, ndim: int) -> Any:
    """The placement as `distribute_tensor` has it: dimensions counted from 0."""
    dim = sharded_dim(placement, ndim)
    if dim is None or dim == placement.dim:
        return placement
    split = getattr(placement, "split_factor", None)
    return type(placement)(dim) if split is None else type(placement)(dim, split_factor=split)
