"""The interface of the Run:ai model streamer 0.17 on this engine.

    from penstock.compat.runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device="cuda:0")
        for name, tensor in streamer.get_tensors():
            ...

`list_safetensors`, `pull_files` and `ObjectStorageModel` are for buckets, `FileStreamer` and `DistributedStreamer` for
byte ranges of any files. What the settings and the environment variables RUNAI_STREAMER_... mean here, and what
differs, is in docs/compatibility.md.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Sequence
from types import TracebackType
from typing import Any

from .._checkpoint import Checkpoint, open_as
from .._errors import ArgumentTypeError, InvalidError
from ._errors import MissingTensorError, value_errors
from ._runai_buckets import ObjectStorageModel, list_safetensors, pull_files
from ._runai_files import DistributedStreamer, FileChunks, FileStreamer
from ._runai_metadata import Described, SafetensorMetadata
from ._runai_settings import CUDA_ALIGNMENT as RUNAI_STREAMER_CUDA_ALIGNMENT_ENV_VAR
from ._runai_settings import MEMORY_LIMIT as RUNAI_STREAMER_MEMORY_LIMIT_ENV_VAR_NAME
from ._runai_settings import S3Credentials, storage_for
from ._runai_stream import Streams

__all__ = [
    "RUNAI_STREAMER_CUDA_ALIGNMENT_ENV_VAR",
    "RUNAI_STREAMER_MEMORY_LIMIT_ENV_VAR_NAME",
    "DistributedStreamer",
    "FileChunks",
    "FileStreamer",
    "ObjectStorageModel",
    "S3Credentials",
    "SafetensorsStreamer",
    "list_safetensors",
    "pull_files",
]


class SafetensorsStreamer:
    """Streams the tensors of safetensors files: `stream_files`, then `get_tensors`, inside a ``with``.

    Attributes:
        files_to_tensors_metadata: For each file, by its number in ``paths``, its wanted tensors: name, shape, dtype,
            offsets.
        total_size: Bytes of all wanted tensors.
        device_str: The device that was asked for.
        unaligned_copies: Tensors that were copied because their file has them where their dtype cannot be read from.
    """

    def __init__(self) -> None:
        self.files_to_tensors_metadata: dict[int, Sequence[SafetensorMetadata]] = {}
        self.total_size = 0
        self.device_str: Any = None
        self.unaligned_copies = 0
        self._streams = Streams()

    def __enter__(self) -> SafetensorsStreamer:
        self._streams.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._streams.leave()

    def stream_file(
        self,
        path: str,
        s3_credentials: Any = None,
        device: Any = "cpu",
        is_distributed: bool = False,
        tensor_names: Collection[str] | None = None,
        owned: bool = True,
    ) -> None:
        """`stream_files` of one file."""
        self.stream_files([path], s3_credentials, device, is_distributed, tensor_names, owned)

    def stream_files(
        self,
        paths: Sequence[str],
        s3_credentials: Any = None,
        device: Any = "cpu",
        is_distributed: bool = False,
        tensor_names: Collection[str] | None = None,
        owned: bool = True,
    ) -> None:
        """Opens files and asks for their tensors. Reading starts with the first one that `get_tensors` yields.

        Args:
            paths: Files, or addresses (s3://, gs://, az://).
            s3_credentials: `S3Credentials`, or None for those of the environment.
            device: "cpu", "cuda:0", a torch.device or what else `Checkpoint.stream` takes; None is the CPU.
            is_distributed: The ranks of torch.distributed read for each other, if it has been initialized. All make
                the same call, and each gets every tensor.
            tensor_names: Only these tensors are there, and read. None: all.
            owned: Tensors are the caller's own either way.

        Raises:
            ValueError: no such file, damage, arguments that make no sense, or the stream before is under way. They are
                also the errors of `penstock.open`.
        """
        with value_errors():
            wanted, listed = _wanted(tensor_names), _listed(paths)
            self.files_to_tensors_metadata, self.total_size, self.device_str = {}, 0, device
            if not listed:
                self._streams.nothing()
                return

            def opening() -> tuple[Checkpoint, list[str] | None]:
                opened = open_as("paths", listed, storage=storage_for(listed, s3_credentials), network=False)
                return opened, None if wanted is None else _chosen(opened, wanted)

            checkpoint = self._streams.begin(listed, opening, device, is_distributed)
            if checkpoint is not None:
                self._describe(checkpoint, listed, wanted)

    def _describe(self, checkpoint: Checkpoint, paths: list[str], wanted: frozenset[str] | None) -> None:
        core, places = checkpoint._core, {path: number for number, path in enumerate(checkpoint.files)}
        for number, path in enumerate(paths):
            file = places.get(path)
            if file is None:  # a folder or an index: its files are no paths that were given
                continue
            self.files_to_tensors_metadata[number] = Described(core, file, wanted)
        chosen = checkpoint if wanted is None else wanted
        self.total_size = checkpoint.nbytes if wanted is None else sum(checkpoint[name].nbytes for name in chosen)

    def get_tensors(self) -> Generator[tuple[str, Any], None, None]:
        """Yields (name, tensor), while the next ones are being read.

        Tensors own their memory and may be kept. They are contiguous, and aligned to their dtype.

        Raises:
            ValueError: a read failed, an object is cut short, or the context ended.
            PeerError: another rank has failed, or left its iterator before the end.
        """
        self.unaligned_copies = 0
        for name, tensor in self._streams.pairs():
            if tensor.data_ptr() % tensor.element_size():  # mapped, in a file that packs odd sizes
                tensor = tensor.clone()
                self.unaligned_copies += 1
            yield name, tensor
            del tensor  # or this frame would keep it until the next one is there


def _listed(paths: Any) -> list[str]:
    listed = [] if isinstance(paths, str) else [os.fspath(p) if isinstance(p, os.PathLike) else p for p in paths]
    if isinstance(paths, str) or not all(isinstance(path, str) for path in listed):
        raise ArgumentTypeError(f"paths={paths!r}: give a list of paths; stream_file takes one")
    return listed


def _wanted(names: Collection[str] | None) -> frozenset[str] | None:
    if isinstance(names, str):
        raise InvalidError(f"tensor_names={names!r}: give a collection of names, or None for all")
    if names is not None and not names:
        raise InvalidError("tensor_names is empty: give None for all")
    return None if names is None else frozenset(names)


def _chosen(checkpoint: Checkpoint, wanted: frozenset[str]) -> list[str]:
    """These names, in file order."""
    missing = sorted(name for name in wanted if name not in checkpoint)
    if missing:
        text = f"tensor_names: the files have no {', '.join(missing[:12])}"
        raise MissingTensorError(text + f" and {len(missing) - 12} more" * (len(missing) > 12), tensor=missing[0])
    return [name for name in checkpoint if name in wanted]
