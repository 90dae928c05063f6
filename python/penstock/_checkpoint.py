"""The checkpoint: what is in it, and the ways to get it out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _core, _load
from ._choices import ORDERS, Framework, Order, Scope, Storage, check_choice, check_variant
from ._core import Options
from ._device import CPU
from ._errors import ArgumentTypeError, InvalidError, NotACheckpointError, NotFoundError, PenstockError
from ._events import Seen, observe
from ._framework import Adapter
from ._frameworks import device_for, make_adapter
from ._job import Job
from ._late_imports import importing
from ._options import make_options
from ._paths import is_web, source_path, without_secrets
from ._progress import Progress
from ._report import Report, report_of
from ._request import Request, prepare
from ._selection import Names, Rule, Selection, Slices, TensorInfo, info_of, select, unknown
from ._tls import warn_of_unchecked

if TYPE_CHECKING:
    from ._digest import Digest
    from ._group import Rendezvous
    from ._hub import Expected, Snapshot
    from ._hub_network import Digests
    from ._plan import Plan, Wants

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A shard file, several files, a folder, an index file, web addresses of files or of an index, or the name of a
repository of the Hub."""


def _paths_of(source: Source, argument: str) -> list[str]:
    """The paths that ``source`` names."""
    try:
        listed = [source] if isinstance(source, (str, os.PathLike)) else list(source)
        paths = [os.fspath(path) for path in listed]
    except TypeError:
        listed, paths = [], [b""]  # type: ignore[list-item]
    if not all(isinstance(path, str) for path in paths):
        given = without_secrets(repr(source))
        raise ArgumentTypeError(f"{argument}={given}: give a path (str or PathLike), or a list of paths")
    if not isinstance(source, str) or not source.startswith("hf://"):
        for path in listed:
            source_path(path, argument)
    return paths


class OneFile:
    """The path of one shard file: `open` takes no folder, no index and no repository for it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path


class Checkpoint:
    """One or more safetensors files whose headers and index are valid. `penstock.open` makes one.

    It behaves like a read-only mapping of names to `TensorInfo`, in file order: files in natural order of their names
    (2 before 10), tensors by their offset. It holds no open file and no data. Threads may share it, and a forked child
    may use it.
    """

    _named: Any = None
    """The name, path or address that it was opened as."""
    _engine: str | None = None
    """The engine whose loader opened it."""
    _within: Seen | None = None
    """The operation that its loads are parts of, for operators; None if there is none."""

    def __init__(self, core: _core.Checkpoint, snapshot: Snapshot | None = None, listed: Digests | None = None) -> None:
        self._core = core
        self._snapshot = snapshot
        self._listed = listed
        self._last_report: Report | None = None
        warnings = core.warnings()
        if warnings:
            # A program that cannot read the standard library loads without logging
            with suppress(ImportError, OSError):
                with importing():
                    import logging
                for warning in warnings:
                    logging.getLogger("penstock").warning("%s", warning)

    # What is in it

    def keys(self) -> list[str]:
        """The tensors' names in file order."""
        return self._core.keys()

    def values(self) -> list[TensorInfo]:
        """The `TensorInfo` of each tensor, in file order. Reads nothing; `stream` gives the tensors."""
        files = self.files
        return [info_of(self._core, index, files) for index in range(len(self))]

    def items(self) -> list[tuple[str, TensorInfo]]:
        """(name, `TensorInfo`) of each tensor, in file order, as in ``checkpoint[name]``.

        Reads nothing. `stream` gives (name, tensor) one after the other, `load` all tensors.
        """
        return [(info.name, info) for info in self.values()]

    def get(self, name: str, default: Any = None) -> Any:
        """The `TensorInfo` of the tensor ``name``, or ``default`` if there is no such tensor."""
        return self._info(self._core.index(name)) if name in self._core else default

    def __len__(self) -> int:
        return len(self._core)

    def __iter__(self) -> Iterator[str]:
        return iter(self._core.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._core

    def __getitem__(self, name: str) -> TensorInfo:
        """Dtype, shape, size and place of the tensor ``name``. Raises UnknownTensorError, which is a KeyError."""
        if name not in self._core:
            raise unknown(self._core, name)
        return self._info(self._core.index(name))

    def _info(self, index: int) -> TensorInfo:
        return info_of(self._core, index)

    @property
    def metadata(self) -> dict[str, str]:
        """The ``__metadata__`` of all files. If files disagree about a key, the first file counts."""
        return self._core.metadata() or {}

    @property
    def nbytes(self) -> int:
        """The size of all tensors together, in bytes."""
        return self._core.nbytes()

    @property
    def files(self) -> list[str]:
        """The paths of the shard files, in natural order."""
        return self._core.files()

    @property
    def warnings(self) -> list[str]:
        """Tolerated oddities, such as a wrong ``total_size`` in the index; and files that were passed over."""
        return self._core.warnings()

    @property
    def last_report(self) -> Report | None:
        """The report of the last load of this checkpoint that succeeded, or None."""
        return self._last_report

    def _ended(self, load: _core.Load) -> Report:
        self._last_report = report_of(load.report(), self._core)
        return self._last_report

    # Getting it out

    def for_rank(
        self, rank: int, mesh_shape: int | Sequence[int], rule: Rule
    ) -> dict[str, tuple[slice | list[slice], ...]]:
        """The wants of one rank of a mesh: the part of each tensor that DTensor's placements give it.

        Nothing is read, no other rank is asked, and torch is not needed, except to write placements.

            wants = checkpoint.for_rank(3, (2, 4), rule)
            state = checkpoint.load(names=wants, slices=wants)

        Args:
            rank: Its number in the mesh, from 0; the last dimension counts fastest.
            mesh_shape: The ranks in each dimension of the mesh, such as ``(2, 4)``, or one number.
            rule: A function that takes a `TensorInfo` and returns its placements: a list with ``Shard(dim)``,
                ``Replicate()`` or ``_StridedShard(dim, split_factor=...)`` of `torch.distributed.tensor` for each
                dimension of the mesh, or None if this rank does not want the tensor. If it has two arguments without a
                default, the second is the rank's coordinates in the mesh, a tuple: so stages of a pipeline can be told
                apart. Or a dict of placements by name, where tensors that it lacks are not wanted.

        Returns:
            By name, in file order, what `load` takes for ``slices``: a slice for each dimension, or a list of slices
            where the part is not contiguous. Tensors are divided as `torch.chunk` does: the last parts may be smaller,
            or empty. The names that are missing are not wanted.

        Raises:
            InvalidError: no such rank or mesh, or placements that a tensor cannot have.
            UnknownTensorError: a dict has a name that the checkpoint lacks.
        """
        with importing():
            from ._placements import Mesh, at_rank, cut_of

        mesh, wants = Mesh(*at_rank(rank, mesh_shape), rule), {}
        mesh.check_names(self._core)
        for info in self.values():
            placements = mesh.placements(info)
            if placements is not None:
                wants[info.name] = cut_of(mesh.axes(info, placements))
        return wants

    def load(
        self,
        device: Any = "cpu",
        names: Names = None,
        dtype: Any = None,
        framework: Framework | None = None,
        progress: Progress = None,
        options: Options | Mapping[str, Any] | None = None,
        *,
        slices: Slices = None,
        order: Order = "file",
        group: Any = None,
        placements: Rule | None = None,
    ) -> dict[str, Any]:
        """Loads tensors.

        Args:
            device: "cpu", "cuda", "cuda:1", the number of a GPU, or a torch.device. With torch also "meta" (nothing is
                read) and devices that only torch reaches, such as "xpu".
            names: Which tensors: a glob ("model.layers.0.*"), a list of names and globs, or a function that takes a
                name and returns True or False. None loads all. The name of a tensor is no glob, however it looks.
            dtype: Casts F16, BF16, F32 and F64 tensors to this dtype, on the device. Other tensors are not cast. "raw"
                gives the bytes of every tensor instead, as uint8 of shape (nbytes,).
            framework: Whose tensors to make: "pt" (torch, the default if it is installed), "np" (numpy), "jax", "tf",
                "paddle", "mlx", or "dlpack".
            progress: True, False, None (a progress bar on a terminal only), or a function that takes (bytes done, bytes
                in all).
            options: `Options`, or a dict with the same keywords.
            slices: Loads only a part of some tensors: {name: slice or tuple of slices}, or a function that takes a
                `TensorInfo` and returns such a slice or None. Only the bytes of that part are read. All other tensors
                are loaded whole. In place of a slice of one dimension, a list of slices gives what they name, one after
                the other.
            order: "file", or "layer" to read layer by layer across files.
            group: The ranks that load together, each what it wants: a process group, a `DeviceMesh`, or (store, rank,
                size) with a rendezvous store of torch.distributed. All of them make the same call. What several want is
                read by one of them and sent to the others. The call returns when all have everything. The ranks of a
                mesh of several dimensions meet in the store of the default process group.
            placements: Where each tensor goes on the mesh, with ``group=`` a `DeviceMesh`: the ``rule`` of `for_rank`.
                Each rank loads its local shard, on the mesh's kind of device, and the tensors are DTensors. The rule
                must say the same on every rank. Not with ``slices``.

        Returns:
            Tensors by name, in the order of ``names`` (in file order for globs and functions). Each tensor has its own
            storage of exactly its bytes. You may write to it, which never changes the file, and keep it.

        Raises:
            UnknownTensorError: no tensor has this name.
            UnsupportedError: the framework lacks a dtype. Nothing has been read.
            PeerError: another rank of ``group`` has failed, died or does not answer.
            PlanMismatchError: the ranks of ``group`` have different checkpoints. Nothing has been read.
            InvalidError: placements that a tensor cannot have, or that do not go with another argument.
            PenstockError: any other failure, with the name of the file.
        """
        with observe("load", self) as seen, _rendezvous(group) as rendezvous:
            request, adapter = self._prepare(device, names, dtype, framework, options, slices, order, group, placements)
            return _load.load(request._replace(group=rendezvous, seen=seen), adapter, progress)

    def start(
        self,
        device: Any = "cpu",
        names: Names = None,
        dtype: Any = None,
        framework: Framework | None = None,
        options: Options | Mapping[str, Any] | None = None,
        *,
        slices: Slices = None,
        order: Order = "file",
        group: Any = None,
        placements: Rule | None = None,
    ) -> Job:
        """Starts a `load` in the background and returns at once. `Job.result` gives the tensors.

        The arguments and errors are those of `load`. Memory on a GPU is allocated here, on the calling thread. With
        ``group`` the call returns when all ranks have made it.
        """
        seen = observe("start", self)
        try:
            with _rendezvous(group) as rendezvous:
                prepared = self._prepare(device, names, dtype, framework, options, slices, order, group, placements)
                request, adapter = prepared
                return Job(request._replace(group=rendezvous, seen=seen), adapter)
        except BaseException as error:
            seen.begin().end(error)
            raise

    def stream(
        self,
        device: Any = "cpu",
        names: Names = None,
        order: Order = "file",
        window: int | str | None = None,
        dtype: Any = None,
        framework: Framework | None = None,
        progress: Progress = False,
        options: Options | Mapping[str, Any] | None = None,
        *,
        slices: Slices = None,
        group: Any = None,
    ) -> Iterator[tuple[str, Any]]:
        """Yields (name, tensor) while the next tensors are being read.

        They come in the order of ``names``, if that is a list, and otherwise in the order of the files.

        The call checks its arguments. Reading starts when the first tensor is asked for. You may keep the tensors. If
        you close or drop the iterator, the load stops.

        Args:
            order: "file", or "layer" to get the tensors of one layer together, even if they are in different files.
                With "layer", and with ``group``, the order of ``names`` does not count.
            window: The most bytes that are read ahead of the consumer, such as "1GiB" (the default). A next tensor that
                is larger is read alone.
            group: As in `load`. Ranks may want different tensors. They go on together, half a window at a time: a rank
                waits where another one takes longer to consume its half, at most ``join_timeout``. If a rank closes the
                iterator early, the others get what all have read, and then a PeerError.

        The other arguments, and the errors, are those of `load`; give them by name. ``progress`` is False by default.
        """

        seen = observe("stream", self)

        def prepared() -> tuple[Request, Adapter]:
            made = options if window is None else make_options(options, window=window)
            try:
                request, adapter = self._prepare(device, names, dtype, framework, made, slices, order)
            except BaseException as error:
                seen.begin().end(error)
                raise
            return request._replace(seen=seen), adapter

        if group is None:
            request, made = prepared()
            return _load.stream(request.as_asked(names), made, progress)
        with importing():
            from . import _group_stream

        def adapter(part: Selection) -> Adapter:
            return make_adapter(framework, part, device_for(device, framework), dtype)

        def ended(report: Report) -> None:
            self._last_report = report

        return _group_stream.stream(group, lambda: prepared()[0], adapter, progress, ended)

    def _prepare(
        self,
        device: Any,
        names: Names,
        dtype: Any,
        framework: Framework | None,
        options: Options | Mapping[str, Any] | None,
        slices: Slices,
        order: Order,
        group: Any = None,
        placements: Rule | None = None,
    ) -> tuple[Request, Adapter]:
        where, made = device_for(device, framework), make_options(options)
        if placements is None:
            return prepare(self, where, names, dtype, framework, made, slices, order)
        if slices is not None:
            raise InvalidError("placements= and slices= both choose a part of a tensor: give one of them")
        with importing():
            from ._placed import Placing

        placing = Placing(group, placements, framework, dtype)
        wants = placing.wants(select(self._core, names))
        request, adapter = prepare(self, where, wants, dtype, framework, made, wants, order)
        return request._replace(finish=placing.finish(where, request.finish, request.selection.names)), adapter

    def load_into(
        self,
        into: Any,
        strict: bool = True,
        *,
        names: Names = None,
        slices: Slices = None,
        progress: Progress = None,
        options: Options | Mapping[str, Any] | None = None,
        order: Order = "file",
        group: Any = None,
    ) -> Report:
        """Loads straight into existing tensors, without a second copy.

        Args:
            into: A torch module (its parameters and persistent buffers are filled), a mapping of names to torch tensors
                or numpy arrays, or a list of `Destination`. They may be on several devices, and they may be strided.
                Of a DTensor the local shard is filled, with the part of the tensor that its placements give this rank.
                If FSDP2 under TP does not divide a dimension evenly, the shard's size says who has divided it.
                Tied tensors of a module or mapping are loaded once; the checkpoint needs only one of their names. A
                U8 tensor takes the bytes of any dtype of 8 bits. A few are filled through a temporary copy, and the
                report lists them in ``copied_through``: numpy arrays with negative strides, and destinations with
                ``cast`` on a GPU, or of a tensor that its file misaligns.
            strict: True: a name that only one side has is an error. False: the report lists such names, as ``missing``
                (the checkpoint has no such tensor) and ``unexpected`` (there is no destination for this tensor). If
                ``into`` is a list, tensors without a destination are not wanted, and not unexpected.
            names: Loads only these tensors of the checkpoint, as in `load`. Not with a list.
            slices: As in `load`. A destination then has the shape of its slice. Not with a list: `Destination` has a
                ``cut``.
            progress: As in `load`.
            options: As in `load`.
            order: As in `load`.
            group: As in `load`. Destinations on one device of each rank take part: the one that gets most bytes.
                Others, and those that need a temporary copy, are loaded by the rank alone.

        Returns:
            The report of the load.

        Raises:
            MismatchError: destinations do not fit. One error, before any byte has moved: its text shows the first ten
                problems, ``problems`` lists all of them.
            PenstockError: the load failed. ``touched`` lists the names of the tensors that were overwritten, wholly or
                in part, one for each destination. No other destination was changed.
        """
        with importing():
            from . import _into

        with observe("load_into", self) as seen, _rendezvous(group) as rendezvous:
            check_choice("order", order, ORDERS)
            if _into.is_list(into):
                if names is not None or slices is not None:
                    raise InvalidError("load_into: names= and slices= do not go with a list of destinations: omit them")
                selection = Selection(self._core, [], [])
            else:
                selection = select(self._core, names, slices)
            request = Request(self, selection, CPU, make_options(options), order, rendezvous, seen=seen)
            report = _into.load_into(request, into, strict, progress)
        self._last_report = report
        return report

    # Planning

    def plan(self, wants: Sequence[Wants], nodes: int | Sequence[int] | None = None, *, scope: Scope = "world") -> Plan:
        """Bytes that ranks read, send and receive if they load this checkpoint with ``group=``. Reads nothing.

        Every rank of such a load finds the same plan from the same wants, so this is what they will do.

        Args:
            wants: What each rank wants, in the order of the ranks: a mapping from names to slices (as in ``slices=``;
                None is the whole tensor, and a name that is missing is not wanted), or None for everything.
            nodes: How many nodes there are; the ranks are divided among them in their order. Or the number of each
                rank's node. None: all ranks are on one.
            scope: Which ranks read for each other, as in `Options`: "world" (all) or "node" (those of one node).

        Returns:
            A `Plan`, a dictionary whose keys are attributes too. ``alone`` is a load of each rank without the others,
            ``together`` one load of all. Sizes are in bytes, and reads those past the page cache, or from a server:

            - ``nbytes``: the size of the checkpoint; ``wanted_bytes``: what the ranks want, in sum.
            - ``alone_bytes``, ``together_bytes``: what the storage gives to all. ``sent_bytes``: what ranks send.
            - ``alone_unwanted_bytes``, ``together_unwanted_bytes``: bytes of these that their rank, and that no rank,
              wants: gaps between columns, and the rest of whole pages.
            - ``nodes``: for each node ``together_bytes``, ``alone_bytes``, and what it exchanges with other nodes,
              ``sent_bytes`` and ``received_bytes``.
            - ``ranks``: for each rank ``rank``, ``node``, ``wanted_bytes``, ``together_bytes`` in ``reads`` reads,
              ``parcels`` (those that others want too), ``sent_bytes``, ``received_bytes``, ``alone_bytes`` in
              ``alone_reads`` reads, and both unwanted ones.

            ``plan.seconds(...)`` gives the least time of both, from rates. ``plan.unwanted()`` says what unwanted bytes
            cost, and which option ends that; "" if they are few.

        Raises:
            UnknownTensorError, SliceError: a rank wants what is not there.
            LimitError: slices with too many holes, as in a load.
            InvalidError: no ranks, nodes that do not fit them, or another scope.
        """
        with importing():
            from ._plan import plan

        return plan(self._core, wants, nodes, scope)

    # Checking it

    def verify(self, progress: Progress = None, *, stall_timeout: float | None = None) -> dict[str, str | None]:
        """Reads every byte, and compares the files with the digests that the Hub, or its local cache, has of them.

        A Hub cache names its files by the sha256 of their content, small files by the sha1 of git. If the checkpoint
        was opened by the name of its repository, all files of the snapshot are compared, also `config.json`. If the
        files are read from the Hub, it is asked for their digests. Of files on other servers no digest is known: what
        comes is of the size and version that were opened, and nothing else is compared.

        Args:
            progress: As in `load`; counts bytes.
            stall_timeout: The check fails if no byte is read for so many seconds. None: as in `open`.

        Returns:
            What each file was compared with, by path: "blob name", "tree listing" (the cache's copy of the Hub's list
            of files), "Hub" (what it says now), or None if there is nothing to compare with, as for all files outside
            of the Hub and its cache.

        Raises:
            DigestError: files are damaged. It names all of them.
            ChangedError: a file on a server is no longer the one that was opened.
            StalledError: the file system or the server does not answer. It names the file.
            PenstockError: a file cannot be read.
        """
        with importing():
            from . import _digest

        found = self._hashed({}, progress, stall_timeout)
        _digest.raise_for(found)
        return {digest.path: digest.expected.source if digest.expected else None for digest in found}

    def _hashed(self, listed: Mapping[str, Expected], progress: Progress, stall_timeout: float | None) -> list[Digest]:
        """The verdict on each file; ``listed`` has the hashes that the caller expects."""
        with importing():
            from . import _digest
            from ._patience import patiently

        files, ask = self._all_files(stall_timeout), self._listed
        if ask is not None:
            listed = {**patiently(lambda: ask(files), stall_timeout), **listed}
        with observe("verify", self) as seen:
            found = _digest.digests(files, listed, progress, stall_timeout, self._core, seen)
            if damaged := next((digest.error for digest in found if digest.error is not None), None):
                seen.end(damaged)
        return found

    def _all_files(self, stall_timeout: float | None = None) -> list[str]:
        """The shard files, then the other files of the snapshot that this was opened as."""
        files = self.files
        if self._snapshot is not None:
            with importing():
                from . import _hub
                from ._patience import patiently

            known, snapshot = set(files), self._snapshot
            found = patiently(lambda: _hub.files_of(snapshot), stall_timeout, str(snapshot.path))
            files += [path for path in found if path not in known]
        return files

    # Harmless, so that it can be used like a file

    def close(self) -> None:
        """Does nothing: a checkpoint holds no open file, and its tensors do not depend on it."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ipython_key_completions_(self) -> list[str]:
        """The completions of IPython and notebooks after ``checkpoint["``."""
        return self.keys()

    def _repr_html_(self) -> str:
        """The view in a notebook: files, dtypes, sizes, and the first tensors."""
        with importing():
            from ._notebook import page

        return page(self._core)

    def __repr__(self) -> str:
        files = self.files
        named = files[0] if len(files) == 1 else f"{len(files)} files, {files[0]} first" if files else "no files"
        return f"<penstock.Checkpoint: {len(self)} tensors, {self.nbytes / 1e9:.3f} GB, {named}>"


def _rendezvous(group: Any) -> AbstractContextManager[Rendezvous | None]:
    """The ranks that load together, before they do; None if there is no group."""
    if group is None:
        return nullcontext()
    with importing():
        from ._group import Rendezvous

    return nullcontext(group) if isinstance(group, Rendezvous) else Rendezvous(group)


def open(
    source: Source,
    *,
    stall_timeout: float | None = None,
    storage: Storage | None = None,
    variant: str | None = None,
) -> Checkpoint:
    """Opens a safetensors checkpoint: reads and checks the headers and the index, and no tensor.

    Args:
        source: A shard file, a list of shard files, a folder, or an index file (``model.safetensors.index.json``). Or
            the name of a repository of the Hugging Face Hub: ``org/name``, ``org/name@revision`` (a branch, a tag or a
            commit hash), ``hf://org/name@revision/folder``. If a path on disk has such a name, the path is opened;
            ``hf://`` always means the Hub. Its local cache comes first. What that lacks is read over the network
            (experimental), unless HF_HUB_OFFLINE is set. Files, lists and indexes may also be on a web server
            (``https://...``), in S3 (``s3://bucket/folder/``), Google Cloud Storage (``gs://bucket/folder/``) or Azure
            Blob Storage (``az://container/folder/``), all experimental. Either way tensors are received into their
            memory, and nothing is downloaded to a disk unless ``storage`` names a disk cache.
        stall_timeout: The call fails if the file system does not answer for so many seconds. None:
            PENSTOCK_STALL_TIMEOUT, or 120.
        storage: How servers are asked: a dict of `Storage` settings. Loads of the checkpoint use them too.
        variant: Of a folder or a repository, the files of this variant: "fp16" is ``model.fp16.safetensors``. None: the
            files without one. Files that are passed over are in `Checkpoint.warnings`.

    Returns:
        A `Checkpoint`. It holds no open file.

    Raises:
        NotFoundError: (a FileNotFoundError) there is nothing, or some files are missing.
        AccessError: (a PermissionError) files may not be read; a repository of the Hub is gated.
        HeaderError, IndexFileError, TruncatedError, NotACheckpointError: what is there is not a valid checkpoint.
        StalledError: the file system does not answer. It names the file.
        InvalidError: ``source`` is not a path or such an address. Another scheme is a FileNotFoundError too. Or
            ``variant`` is given for something else than a folder.
    """
    try:
        return open_as("source", source, stall_timeout, storage, variant=variant)
    except PenstockError as error:
        seen_failing(source, error)
        raise


def seen_failing(source: Source, error: PenstockError) -> None:
    """Operators see of the opening of a checkpoint that it has failed, and otherwise its loads."""
    known = isinstance(source, (str, os.PathLike, list, tuple))
    observe("open", source if known else None).begin().end(error)


def open_as(
    argument: str,
    source: Source,
    stall_timeout: float | None = None,
    storage: Storage | None = None,
    *,
    network: bool = True,
    variant: str | None = None,
) -> Checkpoint:
    """`open`, by a function whose callers know ``source`` as ``argument``. ``network``: the Hub may be asked."""
    paths = _paths_of(source, argument)
    check_variant(variant)
    absent = None
    if not isinstance(source, str) or not source.startswith("hf://"):
        try:
            core = _core.Checkpoint.open(paths, stall_timeout, storage, variant=variant)
            if isinstance(source, OneFile) and core.files() != paths:
                raise NotACheckpointError("this is a folder or an index, not a shard file", path=source.path)
            return _opened(Checkpoint(core), source)
        except NotFoundError as error:
            if not isinstance(source, str) or is_web(source):
                raise
            absent = error
        finally:
            warn_of_unchecked()
    with importing():  # nobody pays for it who opens what is on disk
        from . import _hub
        from ._patience import patiently

    lacking = kept = None
    try:
        snapshot = patiently(lambda: _hub.find(source, absent), stall_timeout, source)
        if network and _hub.asks_first(snapshot.reference, storage) and _hub.asks_network(source, storage):
            kept = snapshot
        else:
            return _opened(Checkpoint(_hub.open_snapshot(snapshot, stall_timeout, variant), snapshot), source)
    except NotFoundError as error:
        if error is absent or not network or not _hub.asks_network(source, storage):
            raise
        lacking = error
    finally:
        absent = None  # an error keeps this frame, and would keep itself with it
    with importing():
        from . import _hub_network

    try:
        return _opened(
            Checkpoint(*_hub_network.open_repository(source, lacking, kept, stall_timeout, storage, variant)), source
        )
    finally:
        warn_of_unchecked()
        lacking = None


def _opened(checkpoint: Checkpoint, source: Source) -> Checkpoint:
    """A checkpoint that knows what it was opened as."""
    checkpoint._named = source if isinstance(source, (str, os.PathLike)) else list(source)
    if isinstance(source, OneFile):
        checkpoint._engine = "patch"
    return checkpoint
