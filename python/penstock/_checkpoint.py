"""The checkpoint: what is in it, and the ways to get it out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _core, _load
from ._core import Options
from ._device import CPU
from ._errors import ArgumentTypeError, NotACheckpointError, NotFoundError
from ._paths import local_path
from ._progress import Progress
from ._report import Report, report_of
from ._selection import Names, Slices, TensorInfo, info_of, select, unknown

if TYPE_CHECKING:
    from ._hub import Snapshot

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A shard file, several, a directory, an index file, or the name of a repository in the local Hub cache."""


def _paths_of(source: Source, argument: str) -> list[str]:
    """The paths that ``source`` names."""
    try:
        listed = [source] if isinstance(source, (str, os.PathLike)) else list(source)
        paths = [os.fspath(path) for path in listed]
    except TypeError:
        listed, paths = [], [b""]  # type: ignore[list-item]
    if not all(isinstance(path, str) for path in paths):
        raise ArgumentTypeError(f"{argument}={source!r}: give a path (str or PathLike), or a list of paths")
    if not isinstance(source, str) or not source.startswith("hf://"):
        for path in listed:
            local_path(path, argument)
    return paths


class OneFile:
    """The path of one shard file: `open` takes no folder, no index and no repository for it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path


class Checkpoint:
    """One or more safetensors files, validated whole; `penstock.open` makes them.

    Holds no descriptor and no data. Behaves like a read-only mapping of names to `TensorInfo`, in file order (files in
    natural order of their names, tensors by offset). May be shared by threads, and used after a fork.
    """

    def __init__(self, core: _core.Checkpoint, snapshot: Snapshot | None = None) -> None:
        self._core = core
        self._snapshot = snapshot
        self._last_report: Report | None = None
        warnings = core.warnings()
        if warnings:
            import logging  # a third of what importing penstock would cost

            for warning in warnings:
                logging.getLogger("penstock").warning("%s", warning)

    # What is in it

    def keys(self) -> list[str]:
        """The tensors' names in file order."""
        return self._core.keys()

    def __len__(self) -> int:
        return len(self._core)

    def __iter__(self) -> Iterator[str]:
        return iter(self._core.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._core

    def __getitem__(self, name: str) -> TensorInfo:
        """What the checkpoint says of the tensor called ``name``. Raises UnknownTensorError, a KeyError."""
        if name not in self._core:
            raise unknown(self._core, name)
        return self._info(self._core.index(name))

    def _info(self, index: int) -> TensorInfo:
        return info_of(self._core, index)

    @property
    def metadata(self) -> dict[str, str]:
        """The files' ``__metadata__`` together; where files disagree the first one counts."""
        return self._core.metadata() or {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return self._core.nbytes()

    @property
    def files(self) -> list[str]:
        """Paths of the shard files, in natural order."""
        return self._core.files()

    @property
    def warnings(self) -> list[str]:
        """Oddities that were tolerated, such as a wrong ``total_size`` in the index."""
        return self._core.warnings()

    @property
    def last_report(self) -> Report | None:
        """The report of the last load of this checkpoint that ended well, or None."""
        return self._last_report

    def _ended(self, load: _core.Load) -> Report:
        self._last_report = report_of(load.report(), self.warnings)
        return self._last_report

    # Getting it out

    def load(
        self,
        device: Any = "cpu",
        names: Names = None,
        dtype: Any = None,
        framework: str | None = None,
        progress: Progress = None,
        options: Options | Mapping[str, Any] | None = None,
        *,
        slices: Slices = None,
        order: str = "file",
    ) -> dict[str, Any]:
        """Loads tensors.

        Args:
            device: "cpu", "cuda", "cuda:1", a GPU number, or a torch.device; for torch also "meta", for which nothing
                is read, and what torch alone reaches, such as "xpu".
            names: A glob ("model.layers.0.*"), a list of names and globs, or a predicate on the name; None is all.
            dtype: Casts floating-point tensors of 16 bits and more, on the device; others stay as they are. "raw" gives
                every tensor's bytes instead, as uint8 of shape (nbytes,).
            framework: "pt" (the default where torch is installed), "np", or "dlpack".
            progress: True, False, None (only on a terminal), or a callable (bytes done, bytes in all).
            options: `Options`, or a dict of its keywords.
            slices: What part of which tensor is wanted, as {name: slice or tuple of slices}, or as a function from
                `TensorInfo` to that or None. Only those bytes are read. Tensors without an entry come whole.
            order: "file", or "layer" to read layer by layer across files.

        Returns:
            Tensors by name, in the order of ``names`` (file order for globs and predicates). Every one has a storage of
            exactly its bytes, is writable, and may be kept for as long as anybody likes. Writing to one never changes
            the file.

        Raises:
            UnknownTensorError: a name that is not there.
            UnsupportedError: a dtype that the framework lacks, before anything is read.
            PenstockError: everything else, always with the file's name.
        """
        return _load.load(*self._prepare(device, names, dtype, framework, options, slices, order), progress)

    def start(
        self,
        device: Any = "cpu",
        names: Names = None,
        dtype: Any = None,
        framework: str | None = None,
        options: Options | Mapping[str, Any] | None = None,
        *,
        slices: Slices = None,
        order: str = "file",
    ) -> _load.Job:
        """The same as `load`, in the background: returns at once, with all memory on a GPU allocated on this thread."""
        return _load.Job(*self._prepare(device, names, dtype, framework, options, slices, order))

    def stream(
        self,
        device: Any = "cpu",
        names: Names = None,
        order: str = "file",
        window: int | str | None = None,
        dtype: Any = None,
        framework: str | None = None,
        progress: Progress = False,
        options: Options | Mapping[str, Any] | None = None,
        *,
        slices: Slices = None,
    ) -> Iterator[tuple[str, Any]]:
        """Yields (name, tensor) in the order of reading, while the next ones are being read.

        Arguments are checked at once; reading starts with the first tensor asked for. Tensors may be kept. Closing or
        dropping the iterator stops the load and leaves nothing running.

        Args:
            order: "file", or "layer" to get the tensors of one layer together even if they are in different files.
            window: Most bytes read ahead of the consumer, such as "1GiB" (the default), or the next tensor alone
                where that is larger.

        The other arguments, and the errors, are those of `load`.
        """
        if window is not None:
            options = _load.make_options(options, window=window)
        return _load.stream(*self._prepare(device, names, dtype, framework, options, slices, order), progress)

    def _prepare(
        self,
        device: Any,
        names: Names,
        dtype: Any,
        framework: str | None,
        options: Options | Mapping[str, Any] | None,
        slices: Slices,
        order: str,
    ) -> tuple[_load.Request, _load.Adapter]:
        where, made = _load.device_for(device, framework), _load.make_options(options)
        return _load.prepare(self, where, names, dtype, framework, made, slices, order)

    def load_into(
        self,
        module_or_mapping: Any,
        strict: bool = True,
        *,
        names: Names = None,
        slices: Slices = None,
        progress: Progress = None,
        options: Options | Mapping[str, Any] | None = None,
        order: str = "file",
    ) -> Report:
        """Loads straight into existing tensors: no staging on the device, no second copy.

        Args:
            module_or_mapping: A torch module (its parameters and persistent buffers), or a mapping of names to torch
                tensors or numpy arrays, which may be on several devices. Tied tensors are loaded once, under whichever
                of their names the checkpoint has. Non-contiguous ones are copied once more (the report says which).
            strict: Whether names on one side only are an error; else the report lists them as ``missing`` (no bytes for
                that destination) and ``unexpected`` (no destination for those bytes).
            names: Restricts what is taken from the checkpoint.
            slices: As in `load`: a destination then has the shape of its slice.

        Returns:
            The load's report.

        Raises:
            MismatchError: destinations do not fit: one error that lists every problem, before any byte has moved.
            PenstockError: the load failed. ``touched`` lists the names whose tensors are no longer what they were.
        """
        from . import _into

        _load.check_order(order)
        request = _load.Request(self, select(self._core, names, slices), CPU, _load.make_options(options), order)
        report = _into.load_into(request, module_or_mapping, strict, progress)
        self._last_report = report
        return report

    # Checking it

    def verify(self, progress: Progress = None, *, stall_timeout: float | None = None) -> dict[str, str | None]:
        """Reads every byte, several files at once, and compares with the digests that a local Hub cache has of them.

        Blobs of such a cache are named by the sha256 of their content, small ones by git's sha1. Of a checkpoint that
        was opened by the name of its repository, all files of the snapshot are compared, `config.json` and the like
        too.

        Args:
            progress: As in `load`; counts bytes.
            stall_timeout: Seconds in which no byte is read before the check fails; None is as in `open`.

        Returns:
            What each file was compared with, by path: "blob name", "tree listing" (the cache's copy of the Hub's list
            of files), or None where there is nothing to compare with, as for all files outside of a Hub cache.

        Raises:
            DigestError: files are damaged; names all of them.
            StalledError: the file system does not answer; names the file.
            PenstockError: a file cannot be read.
        """
        from . import _digest

        found = _digest.digests(self._all_files(stall_timeout), progress=progress, stall_timeout=stall_timeout)
        _digest.raise_for(found)
        return {digest.path: digest.expected.source if digest.expected else None for digest in found}

    def _all_files(self, stall_timeout: float | None = None) -> list[str]:
        """The shard files, then the other files of the snapshot that this was opened as."""
        files = self.files
        if self._snapshot is not None:
            from . import _hub
            from ._patience import patiently

            known, snapshot = set(files), self._snapshot
            found = patiently(lambda: _hub.files_of(snapshot), stall_timeout, str(snapshot.path))
            files += [path for path in found if path not in known]
        return files

    # Harmless, so that it can be used like a file

    def close(self) -> None:
        """Does nothing: a checkpoint holds no descriptor, and its tensors do not depend on it."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        files = self.files
        named = files[0] if len(files) == 1 else f"{len(files)} files, {files[0]} first" if files else "no files"
        return f"<penstock.Checkpoint: {len(self)} tensors, {self.nbytes / 1e9:.3f} GB, {named}>"


def open(source: Source, *, stall_timeout: float | None = None) -> Checkpoint:
    """Opens a safetensors checkpoint: reads and validates the headers, nothing else.

    Args:
        source: A shard file, a list of them, a directory, or an index file (``model.safetensors.index.json``). Or a
            repository of the local Hugging Face Hub cache: ``org/name``, ``org/name@revision`` (branch, tag or commit
            hash), ``hf://org/name@revision/folder``. What is on disk under such a name comes first, but for ``hf://``.
            Nothing is ever downloaded.
        stall_timeout: Seconds without an answer of the file system before the open fails. None: PENSTOCK_STALL_TIMEOUT,
            or 120. A header read or a file opened is an answer, and a long parse is not waited for.

    Raises:
        NotFoundError: (a FileNotFoundError) nothing is there, or not all of it.
        HeaderError, IndexFileError, TruncatedError, NotACheckpointError: something is, but not a whole checkpoint.
        StalledError: the file system does not answer; names the file.
        InvalidError: ``source`` is nothing that could be opened. A scheme such as ``s3://`` is a FileNotFoundError too.
    """
    return open_as("source", source, stall_timeout)


def open_as(argument: str, source: Source, stall_timeout: float | None = None) -> Checkpoint:
    """`open`, by a function whose callers know ``source`` as ``argument``."""
    paths = _paths_of(source, argument)
    absent = None
    if not isinstance(source, str) or not source.startswith("hf://"):
        try:
            core = _core.Checkpoint.open(paths, stall_timeout)
            if isinstance(source, OneFile) and core.files() != paths:
                raise NotACheckpointError("a folder or an index, not a shard file", path=source.path)
            return Checkpoint(core)
        except NotFoundError as error:
            if not isinstance(source, str):
                raise
            absent = error
    from . import _hub  # nobody pays for it who opens what is on disk
    from ._patience import patiently

    snapshot = patiently(lambda: _hub.find(source, absent), stall_timeout, source)
    return Checkpoint(_hub.open_snapshot(snapshot, stall_timeout), snapshot)
