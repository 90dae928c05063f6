"""fastsafetensors' loader of whole files: `SafeTensorsFileLoader`, the buffer that it makes, and `fastsafe_open`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from .._checkpoint import Checkpoint, open, open_as
from .._core import Options
from .._device import parse_device
from .._errors import InvalidError, UnsupportedError
from .._frameworks import need_torch
from .._paths import local_path
from .._selection import TensorInfo
from ._errors import ClosedError, MissingTensorError
from ._fastsafetensors_types import (
    Device,
    DeviceType,
    DType,
    TensorFrame,
    TorchTensor,
    converted,
    device_for,
    torch_dtype,
)
from ._process_group import check_alone

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_BOUNCE_KB, _THREADS = 16 * 1024, 16
"""The original's defaults of ``bbuf_size_kb`` and ``max_threads``: they ask for nothing in particular."""


class SingleGroup:
    """The process group of a process that is alone."""

    def size(self) -> int:
        """One rank."""
        return 1

    def rank(self) -> int:
        """Of number 0."""
        return 0


def check_group(pg: Any) -> None:
    """Raises UnsupportedError for a group of several ranks. The class `SingleGroup` does as well as one of it."""
    if pg is not SingleGroup:
        check_alone(pg, "pg")


def check_framework(framework: str) -> None:
    """Raises for a framework that is not torch."""
    if framework == "paddle":
        raise UnsupportedError('framework="paddle": only "pytorch" is supported here')
    if framework not in ("pt", "pytorch", "torch"):
        raise InvalidError(f'framework={framework!r}: give "pytorch" (or "pt", "torch")')
    need_torch()


def settings_for(device: Any, bbuf_size_kb: int, max_threads: int) -> dict[str, Any]:
    """Keywords of `Options` for the original's settings. On the CPU tensors are in private memory, as theirs are."""
    for name, value in (("bbuf_size_kb", bbuf_size_kb), ("max_threads", max_threads)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidError(f"{name}={value!r}: give a whole number of at least 1")
    settings: dict[str, Any] = {"copy": True} if parse_device(device_for(device)).is_cpu else {}
    if bbuf_size_kb != _BOUNCE_KB:
        settings["staging"] = max(bbuf_size_kb * 1024, 2 * Options().extent)
    if max_threads != _THREADS:
        settings["threads"] = max_threads
    return settings


def _paths(paths: Paths) -> list[str]:
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    return [path if isinstance(path, str) else local_path(path, "filenames") for path in listed]


class SafeTensorsFileLoader:
    """Loads whole files: `add_filenames`, `copy_files_to_device`, then tensors from the buffer which that returns.

    Args:
        pg: None, `SingleGroup`, or a group of one rank.
        device: "cpu", "cuda:0", a GPU number, a torch.device or a `Device`.
        bbuf_size_kb: Most staging memory, in KiB (at least two reads); the default leaves it to penstock.
        max_threads: Threads that read and copy; the default leaves it to penstock.
        framework: "pytorch".

    nogds, use_fgds, set_numa, disable_cache and debug_log are accepted, and mean nothing here.

    Raises:
        UnsupportedError: a group of several ranks, or a framework other than torch.
        InvalidError: (a ValueError) settings that make no sense.
    """

    def __init__(
        self,
        pg: Any,
        device: Any = "cpu",
        bbuf_size_kb: int = _BOUNCE_KB,
        max_threads: int = _THREADS,
        nogds: bool = False,
        set_numa: bool = True,
        disable_cache: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        use_fgds: bool = False,
    ) -> None:
        check_framework(framework)
        check_group(pg)
        self._settings = settings_for(device, bbuf_size_kb, max_threads)
        where = parse_device(device_for(device))
        self.pg = SingleGroup()
        self.device = Device() if where.is_cpu else Device(DeviceType.CUDA, where.number)
        self._target = device_for(device)
        self._keep: Callable[[str], bool] | None = None
        self._files: dict[str, Checkpoint] = {}
        self._file_of: dict[str, str] = {}
        self._closed = False

    def add_filenames(self, filenames: Mapping[int, Paths]) -> None:
        """Reads the headers of files, given as {0: [path, ...]}: there is one rank, number 0.

        Raises:
            InvalidError: files for another rank.
            PenstockError: as `penstock.open` does.
        """
        for rank, paths in filenames.items():
            listed = _paths(paths)
            if listed and rank != 0:
                raise InvalidError(f"files for rank {rank!r}: one process loads them all, give {{0: [...]}}")
            for path in listed:
                self._files[path] = open_as("filenames", path, network=False)
                self._file_of.update(dict.fromkeys(self._files[path].keys(), path))

    def set_tensor_filter(self, keep_tensor: Callable[[str], bool] | None) -> None:
        """From now on only tensors whose names ``keep_tensor`` says yes to are there, and read; None: all."""
        self._keep = keep_tensor

    def get_keys(self) -> list[str]:
        """Names of the tensors: files as they were added, tensors in file order."""
        return [name for name in self._file_of if self._keep is None or self._keep(name)]

    def _info(self, name: str) -> TensorInfo:
        if name not in self._file_of or not (self._keep is None or self._keep(name)):
            why = "is filtered out" if name in self._file_of else "is in none of the files"
            raise MissingTensorError(f"tensor {name} {why}", tensor=name)
        return self._files[self._file_of[name]][name]

    def get_shape(self, tensor_name: str) -> list[int]:
        """Extent per dimension, in elements, as in the header. Raises MissingTensorError, a KeyError and ValueError."""
        return list(self._info(tensor_name).shape)

    @property
    def frames(self) -> dict[str, TensorFrame]:
        """What the headers say of each tensor, filtered or not; made anew each time."""
        frames: dict[str, TensorFrame] = {}
        starts: dict[str, int] = {}
        for name, path in self._file_of.items():
            info = self._files[path][name]
            # A file's first tensor begins where its data does: the format allows no gap
            start = starts.setdefault(info.file, info.offsets[0])
            offsets = [offset - start for offset in info.offsets]
            frames[name] = TensorFrame(DType(info.dtype), list(info.shape), offsets)
        return frames

    def copy_files_to_device(
        self,
        dtype: Any = DType.AUTO,
        use_buf_register: bool = True,
        max_copy_block_size: int = 16 << 30,
        allow_inflight: bool = False,
        borrowed_tensors: bool = False,
    ) -> FilesBufferOnDevice:
        """Loads every tensor of the files added, and returns once they are there.

        Args:
            dtype: A `DType` or torch dtype that all tensors are converted to, on the device, while others are being
                read; AUTO leaves each its own.
            borrowed_tensors: On the CPU: map files where that is possible, rather than copy them into private memory.
                Tensors may be kept in either case.

        use_buf_register, max_copy_block_size and allow_inflight are accepted, and mean nothing here.

        Raises:
            UnsupportedError: a dtype that torch lacks, or does not convert.
            PenstockError: as `Checkpoint.load` does; two files with one tensor's name.
            ClosedError: the loader has been closed.
        """
        if self._closed:
            raise ClosedError("the loader has been closed")
        target = torch_dtype(dtype)
        paths = sorted(self._files)
        kept = {name: i for i, path in enumerate(paths) for name in self._files[path]}
        if self._keep is not None:
            kept = {name: i for name, i in kept.items() if self._keep(name)}
        if not paths:
            return FilesBufferOnDevice(None, {}, kept, paths)
        checkpoint = self._files[paths[0]] if len(paths) == 1 else open(paths)
        names = None if self._keep is None else list(kept)
        settings = {name: value for name, value in self._settings.items() if not (borrowed_tensors and name == "copy")}
        if target is None:
            tensors = checkpoint.load(self._target, names, framework="pt", progress=False, options=settings)
        else:
            stream = checkpoint.stream(self._target, names, framework="pt", options=settings)
            tensors = {name: converted(tensor, None, target, name) for name, tensor in stream}
        return FilesBufferOnDevice(checkpoint, tensors, kept, paths)

    def reset(self) -> None:
        """Forgets the files, for others to be added."""
        self._files, self._file_of = {}, {}

    def close(self) -> None:
        """Forgets the files; the loader is of no more use. Tensors and buffers stay."""
        self.reset()
        self._closed = True


class FilesBufferOnDevice:
    """Tensors of a `SafeTensorsFileLoader`. They may be kept when the buffer is closed.

    Attributes:
        key_to_rank_lidx: {name: (0, number of its file among the sorted paths)}.
    """

    def __init__(
        self, checkpoint: Checkpoint | None, tensors: dict[str, Any], files: dict[str, int], paths: list[str]
    ) -> None:
        self._checkpoint = checkpoint
        self._tensors: dict[str, Any] | None = tensors
        self._paths = paths
        self.key_to_rank_lidx = {name: (0, number) for name, number in files.items()}

    def _file(self, name: str) -> int:
        if name not in self.key_to_rank_lidx:
            raise MissingTensorError(f"tensor {name} is in none of the files, or is filtered out", tensor=name)
        return self.key_to_rank_lidx[name][1]

    def _tensor(self, name: str) -> Any:
        self._file(name)
        if self._tensors is None:
            raise ClosedError(f"tensor {name}: the buffer has been closed", tensor=name)
        return self._tensors[name]

    def get_filename(self, tensor_name: str) -> str:
        """Path of the tensor's file, as it was added."""
        return self._paths[self._file(tensor_name)]

    def get_shape(self, tensor_name: str) -> list[int]:
        """Extent per dimension, in elements, as in the header."""
        self._file(tensor_name)
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
        return self.get_tensor_wrapped(tensor_name, device, dtype)

    def push_tensor(self, tensor_name: str, dst_rank: int, device: Any = None, dtype: Any = DType.AUTO) -> Any:
        """The tensor, for the rank that it is meant for: of one rank, this one."""
        return self.get_tensor(tensor_name, device, dtype)

    def get_multi_cols(
        self, tensor_names: Sequence[str], dim: int, device: Any = None, dtype: Any = DType.AUTO
    ) -> TorchTensor:
        """The tensors joined along ``dim``, those of one file together and files in order; in a wrapper."""
        import torch

        names = sorted(tensor_names, key=self._file)
        tensors = [self._tensor(name) for name in names]
        if len({tensor.dtype for tensor in tensors}) == 1 and tensors[0].element_size() == 1:
            # Not every torch joins every dtype of 8 bits and less
            one = torch.cat([tensor.view(torch.uint8) for tensor in tensors], dim=dim).view(tensors[0].dtype)
        else:
            one = torch.cat(tensors, dim=dim)
        return TorchTensor.of(converted(one, device, torch_dtype(dtype), ", ".join(names)))

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


class fastsafe_open:
    """Opens files, with every tensor loaded at once.

    Args:
        filenames: A path, several, or {0: paths}.
        framework: "pt" or "pytorch".
        pg, device, nogds, debug_log, use_fgds: As in `SafeTensorsFileLoader`.

    max_copy_block_size is accepted, and means nothing here.
    """

    def __init__(
        self,
        filenames: Paths | Mapping[int, Paths],
        framework: str = "pt",
        pg: Any = None,
        device: Any = "cpu",
        nogds: bool = False,
        debug_log: bool = False,
        max_copy_block_size: int = 16 << 30,
        use_fgds: bool = False,
    ) -> None:
        self.loader = SafeTensorsFileLoader(pg, device, framework=framework)
        self.loader.add_filenames(filenames if isinstance(filenames, Mapping) else {0: filenames})
        self.fb = self.loader.copy_files_to_device()

    def metadata(self) -> dict[str, dict[str, str]]:
        """Each file's ``__metadata__`` by its path; empty where a file has none."""
        return {path: checkpoint.metadata for path, checkpoint in self.loader._files.items()}

    def keys(self) -> list[str]:
        """Names of the tensors: files by their paths, sorted; tensors in file order."""
        return list(self.fb.key_to_rank_lidx)

    def get_keys(self) -> list[str]:
        """`keys`, by its name of before 0.2."""
        return self.keys()

    def get_tensor(self, name: str) -> Any:
        """The tensor called ``name``, which may be kept. Raises MissingTensorError, a KeyError and ValueError."""
        return self.fb.get_tensor(name)

    def get_tensor_wrapped(self, name: str) -> TorchTensor:
        """`get_tensor`, in a wrapper."""
        return self.fb.get_tensor_wrapped(name)

    def __enter__(self) -> fastsafe_open:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.fb is not None:  # programs set it to None to let go of the buffer early
            self.fb.close()
        self.loader.close()
