"""`safe_open` and `load_file`: the interface of safetensors, on this engine."""

from __future__ import annotations

import _thread
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from . import _load
from ._checkpoint import Checkpoint, OneFile, Source, open_as, seen_failing
from ._choices import Backend, Framework, Order, Storage
from ._core import Options
from ._device import Device
from ._dtypes import DTYPES
from ._errors import (
    ArgumentTypeError,
    InvalidError,
    PenstockError,
    SliceError,
    SliceIndexError,
    SliceTypeError,
    UnsupportedError,
)
from ._event_words import Measured, by_source
from ._events import NOTHING, observe
from ._framework import Adapter
from ._frameworks import check_device, device_for, framework_named, need
from ._indexing import Indexing, Plan, plan, plan_of_slices
from ._late_imports import importing
from ._options import make_options
from ._paths import is_web
from ._prefetch import PrefetchLoader
from ._report import Report
from ._request import Request, prepare
from ._selection import Names, Region, Selection, unknown
from ._single_reads import SingleReads

_SINGLES = 4
"""Tensors that are loaded one by one before a caller counts as one who wants them all."""
_PATIENCE = 1.0
"""Seconds that a thread waits for a tensor that another thread maps with its neighbours, before it loads it alone."""
_AHEAD_BYTES, _AHEAD_TENSORS = 256 << 20, 4096
"""The most that one load then maps. A load costs 0.2 ms whatever its size, and its tensors keep a mapping, of which a
process may have 65,530."""

_FEW_PARTS = 64
"""Parts of a slice that are read one after the other. More of them are worth a load."""

_BACKENDS: dict[str | None, dict[str, Any]] = {None: {}, "mmap": {}, "pread": {"copy": True}}


def _state(file: str) -> tuple[int, ...] | None:
    """The identity of the file, to notice a change; None if the file cannot be examined."""
    try:
        now = os.stat(file)  # noqa: PTH116 - pathlib takes 3 ms to import
    except OSError:
        return None
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


class TensorMeta(NamedTuple):
    """The header's entry of one tensor."""

    dtype: str
    """As spelled in the header, such as ``"BF16"``."""
    shape: list[int]
    """The size of each dimension, in elements."""
    data_offsets: tuple[int, int]
    """(first, past-the-last) byte, counted from the start of the file's data."""


class Slice:
    """One tensor of an open file, not read yet. Index it to read a part. It stays valid after the file is closed."""

    def __init__(self, opened: safe_open, name: str) -> None:
        self._opened = opened
        self._name = name
        self._info = opened._checkpoint[name]

    def get_shape(self) -> list[int]:
        """The size of each dimension, in elements."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """The dtype as spelled in the header, such as "BF16"."""
        return self._info.dtype

    def __getitem__(self, index: Any) -> Any:
        """The same values as indexing the whole tensor, but only the wanted part is read.

        Numbers and slices (also with steps) read the elements that they name. A list, an array of numbers or a mask
        reads the positions that it names. An index with several lists reads the product of them; the second list and
        those after it are read from their first to their last position, unless the distances are equal. Several ranges
        are read one by one and joined, which takes their size once more for a moment. If there are very many, ranges
        nearer than ``Options.gap`` are read as one.

        Raises:
            SliceError: the index is invalid or out of range. It is also the IndexError, TypeError or ValueError that
                the framework's own tensors raise.
        """
        try:
            return self._take(index)
        except PenstockError:
            raise
        except (IndexError, OverflowError) as error:
            raise SliceIndexError(f"slice of {self._name}: {error}", **self._where()) from error
        except TypeError as error:
            raise SliceTypeError(f"slice of {self._name}: {error}", **self._where()) from error
        except ValueError as error:
            raise SliceError(f"slice of {self._name}: {error}", **self._where()) from error

    def _where(self) -> dict[str, Any]:
        """The words for the tensor in an error."""
        return {"path": self._info.file, "tensor": self._name}

    def _take(self, index: Any) -> Any:
        opened, info = self._opened, self._info
        opened._made_by.check_slice(info)
        # torch's F4 are pairs
        planned = None if info.dtype == "F4" else plan_of_slices(index, info.shape)
        if planned is None:
            indexing = self._indexing
            near = opened._options._least_gap * 8 // (DTYPES[info.dtype].bits * indexing.unit)
            planned = plan(index, indexing.shape, indexing.arrays, indexing.unit, near)
            if planned is None:
                indexing.probe(index)
                return opened._made(indexing.take(opened._whole(self._name), index), info.dtype)
        if opened._framework == "dlpack" and (planned.rest or len(planned.parts) > 1):
            raise SliceError(
                f'slice of {self._name}: framework="dlpack" takes one slice per dimension, no other index',
                **self._where(),
            )
        if planned.parts == [[(0, size, 1) for size in info.shape]]:
            if not planned.rest:
                return opened._one(self._name)
            tensor = opened._whole(self._name)
        else:
            opened._reads_ahead = False  # who takes parts, as one rank of several does, does not want the rest
            tensor = opened._parts(self._name, planned, info.dtype)
        return opened._made(self._indexing.take(tensor, planned.rest) if planned.rest else tensor, info.dtype)

    def _bound_for(self, device: Any, least: int) -> Slice:
        """The same, but that what is read of it goes to ``device``. Tensors of less than ``least`` bytes do not."""
        where = device_for(device, self._opened._framework)
        if where.is_cpu:
            return self
        self._opened._elsewhere = least
        return self if self._info.nbytes < least else Slice(self._opened._bound_for(where), self._name)

    @property
    def _indexing(self) -> Indexing:
        """How the framework that makes the handle's slices indexes this tensor."""
        with importing():
            return self._opened._sliced_by.indexing(self._info)


class _Coming(NamedTuple):
    """The process and thread that map a tensor now. A forked child ignores the claims of its parent."""

    process: int
    thread: int
    #: Held until the load is over.
    over: _thread.LockType


def _in_this_process(coming: _Coming | None) -> bool:
    return coming is not None and coming.process == os.getpid()


class safe_open:
    """Opens safetensors files and loads tensors when you ask for them, as ``safetensors.safe_open`` does.

    Args:
        filename: A file. Also a list of files, a folder, an index file, or the name of a repository of the Hub, as in
            `penstock.open`.
        framework: Whose tensors to make: "pt" (torch), "np" (numpy), "jax", "tf", "paddle", "mlx", another name of one
            of them, or "dlpack". None is torch if it is installed, else numpy.
        device: As in `Checkpoint.load`. A GPU is used when the first tensor is loaded, not before.
        backend: As in safetensors: "mmap" changes nothing, "pread" gives private copies.
        options: `Options`, or a dict with the same keywords.
        storage: As in `penstock.open`.
        variant: As in `penstock.open`.

    You can use it with or without ``with``. Tensors and slices stay valid after it is closed.

    Raises:
        MissingFrameworkError: (an ImportError) the framework cannot be imported.
        PenstockError: the errors of `penstock.open`.
    """

    def __init__(
        self,
        filename: Source,
        framework: Framework | None = "pt",
        device: Any = "cpu",
        *,
        backend: Backend | None = None,
        options: Options | Mapping[str, Any] | None = None,
        storage: Storage | None = None,
        variant: str | None = None,
    ) -> None:
        if not isinstance(backend, (str, type(None))) or backend not in _BACKENDS:
            wrong = InvalidError if isinstance(backend, str) else ArgumentTypeError
            raise wrong(f'backend={backend!r}: give "mmap" or "pread", or leave it out')
        self._framework: Framework = framework_named(framework)
        self._device = device_for(device, framework)
        check_device(self._framework, self._device)
        self._made_by = need(self._framework)
        self._sliced_by = self._made_by.sliced_by(self._device)
        self._options = make_options(options, **_BACKENDS[backend])
        try:
            self._checkpoint: Checkpoint = open_as(
                "filename", filename, self._options.stall_timeout, storage, variant=variant
            )
        except PenstockError as error:
            if not isinstance(filename, OneFile):  # or safetensors is asked next, which may open it
                seen_failing(filename, error)
            raise
        self._seen = observe("safe_open", self._checkpoint, kept=True)
        if self._seen is not NOTHING:
            self._checkpoint._within = self._seen
        self._closed = False
        self._single = SingleReads(self._checkpoint._core, self._options)
        # Counts requests that found no tensor mapped ahead. Taking a number is one step, so threads need no lock
        self._asked = itertools.count()
        # Other frameworks copy mapped bytes into their own memory. Copies that nobody has asked for would be wasted
        self._reads_ahead = self._device.is_cpu and self._options.copy is not True and self._made_by.views
        # Tensors of as many bytes and more are not wanted on this device
        self._elsewhere = sys.maxsize
        # Mapped, not yet asked for, with their file and its state before
        self._ahead: dict[str, tuple[Any, str, tuple[int, ...]]] = {}
        # Names that a load maps now
        self._coming: dict[str, _Coming] = {}
        # Names that were asked for, which no load maps ahead. The second request for one of them begins anew
        self._given: set[str] = set()

    def _open(self) -> Checkpoint:
        if self._closed:
            raise PenstockError("File is closed", path=self._checkpoint.files[0])
        return self._checkpoint

    def _bound_for(self, device: Device) -> safe_open:
        """The same open files, loaded onto ``device``."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _device=device, _reads_ahead=False)
        return twin

    def _load(self, names: Names, slices: Any = None) -> dict[str, Any]:
        prepared = prepare(self._checkpoint, self._device, names, None, self._framework, self._options, slices)
        return _load.load(prepared[0]._replace(seen=self._seen.part()), prepared[1], False)

    def _whole(self, name: str) -> Any:
        """The tensor called ``name`` of the framework that makes the slices."""
        if self._sliced_by is self._made_by:
            return self._one(name)
        info = self._checkpoint[name]
        return self._parts(name, Plan([[(0, size, 1) for size in info.shape]], 0, ()), info.dtype)

    def _adapter(self, selection: Selection, device: Device) -> Adapter:
        return self._made_by.adapter(selection, device, None)

    def _made(self, part: Any, dtype: str) -> Any:
        """The handle's framework's tensor of a slice of a tensor of this dtype."""
        return part if self._sliced_by is self._made_by else self._made_by.of_slice(part, dtype)

    def _parts(self, name: str, planned: Plan, dtype: str) -> Any:
        """Parts of the tensor called ``name``, joined."""
        core = self._checkpoint._core
        number, count = core.index(name), len(planned.parts)
        if count <= _FEW_PARTS and self._device.is_cpu:
            made = []
            for region in planned.parts:
                part = self._read(number, name, dtype, region, self._sliced_by, self._made_by.slices)
                if part is None:
                    break
                made.append(part)
            else:
                return made[0] if count == 1 else self._sliced_by.joined(made, planned.axis)
        names = [name] if count == 1 else [f"{name} (part {part})" for part in range(count)]
        selection = Selection(core, names, [number] * count, list(planned.parts))
        adapter = self._made_by.slices(selection, self._device)
        request = Request(self._checkpoint, selection, self._device, self._options, "file", seen=self._seen.part())
        parts = list(_load.load(request, adapter, False).values())
        return parts[0] if count == 1 else self._sliced_by.joined(parts, planned.axis)

    def _read(self, number: int, name: str, dtype: str, region: Region | None, of: Any, adapter: Any) -> Any:
        """The tensor, if it is read without a load, or None; see `SingleReads.tensor`."""
        if self._seen is NOTHING:
            return self._single.tensor(number, name, dtype, region, of, adapter)
        begun = time.perf_counter()
        try:
            tensor = self._single.tensor(number, name, dtype, region, of, adapter)
        except PenstockError as error:
            self._seen.fail(error)
            raise
        if tensor is not None:
            info = self._checkpoint[name]
            nbytes = info.nbytes
            if region is not None:
                for part, size in zip(region, info.shape, strict=True):
                    nbytes = nbytes * len(range(*part)) // max(1, size)
            near, far = (0, nbytes) if is_web(info.file) else (nbytes, 0)
            seconds = time.perf_counter() - begun
            self._seen.count(Measured(nbytes, 1, seconds, by_source(buffered=near, network=far), move=seconds))
        return tensor

    def _one(self, name: str) -> Any:
        """The whole tensor called ``name``; from the fifth one on its neighbours in the file are mapped with it."""
        if self._device.is_cpu:
            core = self._checkpoint._core
            number = core.index(name)
            _, dtype, _, shard, _, _ = core.info(number)
            if self._single.is_distant(shard):
                tensor = self._read(number, name, dtype, None, self._made_by, self._adapter)
                if tensor is not None:
                    return tensor
        if not self._reads_ahead:
            return self._load([name])[name]
        if name in self._given:
            self._given.clear()
        self._given.add(name)  # before the look at what comes: a load that claims this tensor later lets go of it
        self._wait_for(name)
        # Without a lock: several threads may be here, and in the middle of any line a signal handler, a `__del__` or a
        # garbage collection may call this again. Each step is one operation on a dict, which nothing interrupts
        tensor, file, state = self._ahead.pop(name, (None, "", None))
        if tensor is not None and state == _state(file):
            return tensor
        file = self._checkpoint[name].file
        # Another load that still maps this tensor does not keep it for later
        coming = _in_this_process(self._coming.pop(name, None))
        # Of a file that has changed since, a load of the one tensor tells what is wrong
        alone = tensor is not None or coming or next(self._asked) < _SINGLES
        state = None if alone else _state(file)
        names = [name]
        over = _thread.allocate_lock()
        over.acquire()
        try:
            if state is not None:
                self._claim_neighbours(names, _Coming(os.getpid(), _thread.get_ident(), over))
            loaded = self._load_with(name, names)
            report = self._checkpoint.last_report or Report()
            if any(way["bytes"] for route, way in report.routes.items() if route != "mapped"):
                self._reads_ahead = False  # reading ahead into private memory would be a second checkpoint's worth
            tensor = loaded.pop(name)
            if state is not None:
                there = {other: (mapped, file, state) for other, mapped in loaded.items() if other in self._coming}
                self._ahead.update(there)
        finally:
            over.release()  # first: Ctrl-C may end the loop, and other threads wait
            for other in names[1:]:
                self._coming.pop(other, None)
        if self._closed:
            self._ahead.clear()
        return tensor

    def _wait_for(self, name: str) -> None:
        """Waits while another thread maps this tensor with its neighbours, so that it is not mapped twice.

        A thread never waits for its own load: a signal handler may ask for a tensor in the middle of one. The wait has
        a limit, because two threads may wait for each other.
        """
        coming = self._coming.get(name)
        if coming is None or not _in_this_process(coming):
            return
        if coming.thread != _thread.get_ident() and coming.over.acquire(timeout=_PATIENCE):
            coming.over.release()

    def _load_with(self, name: str, names: list[str]) -> dict[str, Any]:
        """These tensors; of them ``name`` alone where the framework lacks the dtype of another."""
        try:
            return self._load(names)
        except UnsupportedError:
            if len(names) == 1:
                raise
            self._reads_ahead = False
            return self._load([name])

    def _claim_neighbours(self, names: list[str], claim: _Coming) -> None:
        """Extends ``names`` by the neighbours of its one tensor that nobody has mapped or wants yet, within limits.

        A load maps what lies between its tensors too, so they end where others' begin.
        """
        core = self._checkpoint._core
        at = core.index(names[0])
        first, last = core.file_tensors(core.info(at)[3])
        left = _AHEAD_BYTES
        for direction in (range(at + 1, last), range(at - 1, first - 1, -1)):
            for number in direction:
                other, _, _, _, begin, end = core.info(number)
                if end - begin >= min(self._elsewhere, _AHEAD_BYTES + 1):
                    continue
                if len(names) >= _AHEAD_TENSORS or end - begin > left or not self._claim(other, claim):
                    break
                names.append(other)
                left -= end - begin

    def _claim(self, name: str, claim: _Coming) -> bool:
        """Whether nobody else has or wants this tensor: then it is claimed."""
        if name in self._ahead or name in self._given:
            return False
        # One step: two threads never claim the same one
        there = self._coming.setdefault(name, claim)
        if there is not claim and _in_this_process(there):
            return False
        self._coming[name] = claim
        # Another thread has put it there since the first look, and dropped its claim, or wants it itself
        if name in self._ahead or name in self._given:
            self._coming.pop(name, None)
            return False
        return True

    def _check_name(self, name: object) -> None:
        """Raises what is wrong with the name of a tensor."""
        if not isinstance(name, str):
            raise ArgumentTypeError(f"the name of a tensor is a string, not {name!r}", path=self._checkpoint.files[0])
        if name not in self._open():
            raise unknown(self._checkpoint._core, name)

    def keys(self) -> list[str]:
        """The tensors' names, sorted."""
        return sorted(self._open().keys())

    def offset_keys(self) -> list[str]:
        """The tensors' names in file order."""
        return self._open().keys()

    def metadata(self) -> dict[str, str] | None:
        """The ``__metadata__`` of the files, or None if there is none."""
        return self._open()._core.metadata()

    def get_tensor(self, name: str) -> Any:
        """The tensor ``name``. Raises UnknownTensorError, which is a SafetensorError and a KeyError."""
        self._check_name(name)
        return self._one(name)

    def get_tensors(self, names: Names = None) -> dict[str, Any]:
        """All tensors by name, or those that ``names`` asks for, as in `Checkpoint.load`."""
        self._open()
        return self._load(names)

    def get_slice(self, name: str) -> Slice:
        """The tensor ``name`` as a `Slice`, which you index to read a part. Raises the errors of `get_tensor`."""
        self._check_name(name)
        return Slice(self, name)

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Dtype, shape and offsets of the tensor ``name``. Raises the errors of `get_tensor`."""
        self._check_name(name)
        info = self._checkpoint[name]
        core = self._checkpoint._core
        data = core.data_start(core.info(core.index(name))[3])
        begin, end = info.offsets
        return TensorMeta(info.dtype, list(info.shape), (begin - data, end - data))

    def prefetch(
        self, plan: Mapping[str, Any] | None = None, *, device: Any = None, threads: int | None = None
    ) -> PrefetchLoader:
        """Starts to load tensors in the background. Take them by name, or in the order in which they come.

        Args:
            plan: Which tensors, as {name: None for the whole tensor, or a slice, or one slice per dimension}. None is
                all tensors.
            device: Where to load to. The default is the device of this handle.
            threads: As ``Options.threads``.
        """
        checkpoint = self._open()
        if plan is not None and not isinstance(plan, Mapping):
            raise ArgumentTypeError(f"plan={plan!r}: give a dict of None or slices, by name")
        for name in plan or ():
            self._check_name(name)
        where = self._device if device is None else device_for(device, self._framework)
        options = self._options if threads is None else make_options(self._options, threads=threads)
        names = None if plan is None else sorted(plan, key=checkpoint._core.index)
        slices = None if plan is None else {name: cut for name, cut in plan.items() if cut is not None}
        request, adapter = prepare(checkpoint, where, names, None, self._framework, options, slices)
        if request.finish is not None:
            raise SliceError("prefetch: a plan takes one slice per dimension, and no list of them")
        return PrefetchLoader(request._replace(seen=self._seen.part()), adapter)

    def tensors(self, names: Names = None, order: Order = "file") -> Iterator[tuple[str, Any]]:
        """Yields (name, tensor) and reads ahead. ``names`` and ``order`` are those of `Checkpoint.stream`."""
        return self._open().stream(str(self._device), names, order, framework=self._framework, options=self._options)

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._ahead.clear()
        self._single.release()
        self._seen.end(error if isinstance(error, PenstockError) else None)


def load_file(
    filename: Source,
    device: Any = "cpu",
    *,
    framework: Framework | None = None,
    backend: Backend | None = None,
    options: Options | Mapping[str, Any] | None = None,
    storage: Storage | None = None,
) -> dict[str, Any]:
    """Loads all tensors of one or more files, by name. It replaces ``load_file`` of safetensors.

    Args:
        filename: As in `safe_open`.
        device: As in `Checkpoint.load`.
        framework: As in `Checkpoint.load`.
        backend: As in `safe_open`.
        options: `Options`, or a dict with the same keywords.
        storage: As in `penstock.open`.

    Raises:
        The errors of `penstock.open` and of `Checkpoint.load`.
    """
    opened = safe_open(filename, framework, device, backend=backend, options=options, storage=storage)
    opened._seen.called("load_file")
    with opened._seen:
        return opened.get_tensors()
