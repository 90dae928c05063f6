"""fastsafetensors' loader of whole files: `SafeTensorsFileLoader`, and `fastsafe_open`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
from ._fastsafetensors_buffer import FilesBufferOnDevice, Place
from ._fastsafetensors_ranks import RanksBuffer
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
from ._process_group import Ranks, ranks_of, told

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_BOUNCE_KB, _THREADS = 16 * 1024, 16
"""The original's defaults of ``bbuf_size_kb`` and ``max_threads``: they ask for nothing in particular."""


class SingleGroup:
    """The process group of a process that is alone."""

    def size(self) -> int:
        """One rank."""
        return 1

    def rank(self) -> int:
        """The rank of this process, 0."""
        return 0


def group_of(pg: Any) -> Ranks | None:
    """The ranks of a group of several. The class `SingleGroup` does as well as one of it."""
    return None if pg is SingleGroup else ranks_of(pg, "pg")


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
        pg: None, `SingleGroup`, or a process group. Of several ranks each makes the same calls in the same order.
        device: "cpu", "cuda:0", a GPU number, a torch.device or a `Device`.
        bbuf_size_kb: Most staging memory, in KiB (at least two reads); the default leaves it to penstock.
        max_threads: Threads that read and copy; the default leaves it to penstock.
        framework: "pytorch".

    nogds, use_fgds, set_numa, disable_cache and debug_log are accepted, and mean nothing here.

    Raises:
        UnsupportedError: a framework other than torch.
        InvalidError: (a ValueError) settings that make no sense; a group that this process is not in.
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
        self._ranks = group_of(pg)
        self._settings = settings_for(device, bbuf_size_kb, max_threads)
        where = parse_device(device_for(device))
        self.pg: SingleGroup | Ranks = self._ranks or SingleGroup()
        self.device = Device() if where.is_cpu else Device(DeviceType.CUDA, where.number)
        self._target = device_for(device)
        self._keep: Callable[[str], bool] | None = None
        self._files: dict[str, Checkpoint] = {}
        self._rank_of: dict[str, int] = {}
        self._file_of: dict[str, str] = {}
        self._closed = False

    def add_filenames(self, filenames: Mapping[int, Paths]) -> None:
        """Reads the headers of files, given as {rank: [path, ...]}. All ranks give the same, and read all headers.

        Raises:
            InvalidError: files for a rank that is not in the group.
            PenstockError: as `penstock.open` does.
        """
        listed = {rank: _paths(paths) for rank, paths in filenames.items()}
        for rank, paths in listed.items():
            if paths and rank not in range(self.pg.size()):
                numbers = ", ".join(map(str, range(self.pg.size())))
                raise InvalidError(f"files for rank {rank!r}: the ranks of this group are {numbers}")
        # The first of each rank, then the second of each, as the original has them
        for turn in range(max(map(len, listed.values()), default=0)):
            for rank, paths in listed.items():
                if turn < len(paths):
                    self._add(paths[turn], rank)

    def _add(self, path: str, rank: int) -> None:
        self._files[path] = open_as("filenames", path, network=False)
        self._rank_of[path] = rank
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
        """The headers' entry of each tensor, filtered or not; made anew each time."""
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

        Where there are several ranks, it reads nothing yet: each call of the buffer does.

        Args:
            dtype: A `DType` or torch dtype that all tensors are converted to, on the device, while others are being
                read; AUTO leaves each its own.
            borrowed_tensors: On the CPU: map files where that is possible, rather than copy them into private memory.
                Tensors may be kept in either case.

        use_buf_register, max_copy_block_size and allow_inflight are accepted, and mean nothing here.

        Raises:
            UnsupportedError: a dtype that torch lacks, or does not convert.
            InvalidError: borrowed_tensors where there are several ranks.
            PenstockError: as `Checkpoint.load` does; two files with one tensor's name.
            ClosedError: the loader has been closed.
        """
        if self._closed:
            raise ClosedError("the loader has been closed")
        if self._ranks is not None and self._files:
            loads = self._ranks.loads()
            with told(loads):
                if borrowed_tensors:
                    raise InvalidError("borrowed_tensors=True: only where one rank is alone")
                checkpoint, places, paths = self._together()
                return RanksBuffer(checkpoint, places, paths, loads, self._target, self._settings, torch_dtype(dtype))
        target = torch_dtype(dtype)
        if not self._files:
            return FilesBufferOnDevice(None, {}, {}, {})
        checkpoint, places, paths = self._together()
        names = None if self._keep is None else list(places)
        settings = {name: value for name, value in self._settings.items() if not (borrowed_tensors and name == "copy")}
        if target is None:
            tensors = checkpoint.load(self._target, names, framework="pt", progress=False, options=settings)
        else:
            stream = checkpoint.stream(self._target, names, framework="pt", options=settings)
            tensors = {name: converted(tensor, None, target, name) for name, tensor in stream}
        return FilesBufferOnDevice(checkpoint, tensors, places, paths)

    def _together(self) -> tuple[Checkpoint, dict[str, Place], dict[Place, str]]:
        """All files as one checkpoint, where the tensors are that the filter keeps, and the paths by place."""
        paths: dict[Place, str] = {}
        for rank in range(self.pg.size()):
            mine = sorted(path for path in self._files if self._rank_of[path] == rank)
            paths.update({(rank, number): path for number, path in enumerate(mine)})
        checkpoint = next(iter(self._files.values())) if len(paths) == 1 else open(sorted(self._files))
        kept = self._keep or (lambda name: True)
        places = {name: place for place, path in paths.items() for name in self._files[path] if kept(name)}
        return checkpoint, places, paths

    def reset(self) -> None:
        """Forgets the files, for others to be added."""
        self._files, self._rank_of, self._file_of = {}, {}, {}

    def close(self) -> None:
        """Forgets the files; the loader is of no more use. Tensors and buffers stay."""
        self.reset()
        self._closed = True


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
