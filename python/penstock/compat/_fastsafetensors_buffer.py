"""The tensors that fastsafetensors' loader has loaded: `FilesBufferOnDevice`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._checkpoint import Checkpoint
from ._errors import ClosedError, MissingTensorError
from ._fastsafetensors_types import DType, TorchTensor, converted, torch_dtype

Place = tuple[int, int]
"""The rank that a file was given to, and the number of the file among that rank's sorted paths."""


class FilesBufferOnDevice:
    """Tensors of a `SafeTensorsFileLoader`. They may be kept when the buffer is closed.

    Attributes:
        key_to_rank_lidx: {name: (rank that its file was given to, number of the file among that rank's sorted paths)}.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        tensors: dict[str, Any] | None,
        places: dict[str, Place],
        paths: dict[Place, str],
    ) -> None:
        self._checkpoint = checkpoint
        self._tensors = tensors
        self._paths = paths
        self.key_to_rank_lidx = places

    def _place(self, name: str) -> Place:
        if name not in self.key_to_rank_lidx:
            raise MissingTensorError(f"tensor {name} is in none of the files, or is filtered out", tensor=name)
        return self.key_to_rank_lidx[name]

    def _tensor(self, name: str) -> Any:
        self._place(name)
        if self._tensors is None:
            raise ClosedError(f"tensor {name}: the buffer has been closed", tensor=name)
        return self._tensors[name]

    def get_filename(self, tensor_name: str) -> str:
        """Path of the tensor's file, as it was added."""
        return self._paths[self._place(tensor_name)]

    def get_shape(self, tensor_name: str) -> list[int]:
        """Extent per dimension, in elements, as in the header."""
        self._place(tensor_name)
        return [] if self._checkpoint is None else list(self._checkpoint[tensor_name].shape)

    def get_tensor(self, tensor_name: str, device: Any = None, dtype: Any = DType.AUTO) -> Any:
        """The tensor called ``tensor_name``, the same one each time; on another device, in another dtype, if asked.

        Raises:
            MissingTensorError: (a KeyError and a ValueError) no such tensor, or it is filtered out.
            ClosedError: the buffer has been closed.
        """
        tensor, target = self._tensor(tensor_name), torch_dtype(dtype)
        return tensor if device is None and target is None else converted(tensor, device, target, tensor_name)

    def get_tensor_wrapped(self, tensor_name: str, device: Any = None, dtype: Any = DType.AUTO) -> TorchTensor:
        """`get_tensor`, in a wrapper."""
        return TorchTensor.of(self.get_tensor(tensor_name, device, dtype))

    def get_sharded(self, tensor_name: str, dim: int, device: Any = None, dtype: Any = DType.AUTO) -> Any:
        """This rank's part of a tensor that is cut along ``dim``: of one rank, the whole."""
        return self.get_tensor(tensor_name, device, dtype)

    def get_sharded_wrapped(
        self, tensor_name: str, dim: int, device: Any = None, dtype: Any = DType.AUTO
    ) -> TorchTensor:
        """`get_sharded`, in a wrapper."""
        return TorchTensor.of(self.get_sharded(tensor_name, dim, device, dtype))

    def push_tensor(self, tensor_name: str, dst_rank: int, device: Any = None, dtype: Any = DType.AUTO) -> Any:
        """The tensor, for the rank that it is meant for: of one rank, this one."""
        return self.get_tensor(tensor_name, device, dtype)

    def get_multi_cols(
        self, tensor_names: Sequence[str], dim: int, device: Any = None, dtype: Any = DType.AUTO
    ) -> TorchTensor:
        """The tensors joined along ``dim``, those of one file together and files in order; in a wrapper."""
        names = sorted(tensor_names, key=self._place)
        return self._joined(names, [self._tensor(name) for name in names], dim, device, torch_dtype(dtype))

    def _joined(self, names: list[str], tensors: list[Any], dim: int, device: Any, target: Any) -> TorchTensor:
        import torch

        if len({tensor.dtype for tensor in tensors}) == 1 and tensors[0].element_size() == 1:
            # Not every torch joins every dtype of 8 bits and less
            one = torch.cat([tensor.view(torch.uint8) for tensor in tensors], dim=dim).view(tensors[0].dtype)
        else:
            one = torch.cat(tensors, dim=dim)
        return TorchTensor.of(converted(one, device, target, ", ".join(names)))

    def as_dict(self, tensor_shard_dim: Mapping[str, int]) -> dict[str, TorchTensor]:
        """The tensors named, each cut along its dimension: of one rank, whole; in wrappers."""
        return {name: self.get_tensor_wrapped(name) for name in tensor_shard_dim}

    def iter_local_tensors(self, tensor_names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Yields (name, tensor) of the tensors named."""
        for name in tensor_names:
            yield name, self._tensor(name)

    def close(self) -> None:
        """Lets go of the tensors. Those that somebody has stay. Idempotent."""
        self._tensors = None
