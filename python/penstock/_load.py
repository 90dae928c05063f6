"""Loads: in one go, in the background, or as a stream."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import cache
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args

from . import _core
from ._choices import Framework, Order
from ._core import Options
from ._device import Device, any_device
from ._dtypes import cast_target
from ._errors import (
    ArgumentTypeError,
    CancelledError,
    InvalidError,
    PenstockError,
    StalledError,
    UnsupportedError,
    raise_if_forked,
)
from ._frameworks import need
from ._late_imports import importing
from ._paths import local_path
from ._progress import INTERVAL, Meter, Progress
from ._report import Report, report_of
from ._selection import Names, Selection, Slices, select

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._checkpoint import Checkpoint

FRAMEWORKS: dict[str, Framework] = {
    "pt": "pt",
    "torch": "pt",
    "pytorch": "pt",
    "np": "np",
    "numpy": "np",
    "jax": "jax",
    "flax": "jax",
    "tf": "tf",
    "tensorflow": "tf",
    "paddle": "paddle",
    "mlx": "mlx",
    "dlpack": "dlpack",
}
"""What people write for a framework, and what it is called here."""
ORDERS: tuple[Order, ...] = get_args(Order)


class Adapter(Protocol):
    """Makes one framework's tensors for one load."""

    framework: str

    @property
    def caller_blocks(self) -> bool:
        """Whether the load's block memory is granted by the adapter."""

    @property
    def casts(self) -> bool:
        """Whether `cast` may change anything."""

    misaligned: bool
    """Whether tensors may begin at any address, and so stay in a mapping where the file misaligns them."""

    @property
    def dlpack_device(self) -> tuple[int, int] | None:
        """The DLPack device that capsules carry; None: the core knows."""

    def grant(self, load: _core.Load, blocks: Sequence[int]) -> None:
        """Gives the load the memory of these blocks."""

    def tensors(self, load: _core.Load, wants: Sequence[int]) -> list[Any]:
        """Tensors on these ready wants."""

    def cast(self, tensor: Any) -> Any:
        """The tensor in the dtype asked for, where that applies to it."""

    def let_go(self) -> None:
        """Lets go of the memory of blocks that no tensor was made of: their load has failed, or is over."""


@cache
def _torch_is_installed() -> bool:
    return find_spec("torch") is not None


def framework_named(framework: str | None) -> Framework:
    """One of the values of `FRAMEWORKS` for what people write; None is torch where it is installed, else numpy."""
    if framework is None:
        return "pt" if _torch_is_installed() else "np"
    found = FRAMEWORKS.get(framework) if isinstance(framework, str) else None
    if found is None:
        wrong = InvalidError if isinstance(framework, str) else ArgumentTypeError
        raise wrong(
            f'framework={framework!r}: give one of {", ".join(FRAMEWORKS)}. For any other framework give "dlpack"'
        )
    return found


def device_for(device: Any, framework: str | None) -> Device:
    """The device meant by what people write, in the words of their framework: torch says "cuda" on AMD too."""
    where = any_device(device)
    if where.is_cpu:
        return where
    if framework_named(framework) != "pt":
        if not where.is_gpu:
            raise UnsupportedError(
                f"device={str(where)!r} is a device of torch: framework={framework!r} cannot load to it. Give "
                'framework="pt", or another device such as "cpu"'
            )
        return where
    if "torch" not in sys.modules:
        need("pt")
        where = any_device(device)
    return where


def check_device(framework: str, device: Device) -> None:
    """Raises UnsupportedError if the framework (one of the values of `FRAMEWORKS`) has tensors on the CPU alone."""
    if device.is_cpu or framework in ("pt", "jax", "dlpack"):
        return
    if framework == "np":
        why = 'numpy arrays live in CPU memory; framework="dlpack" or "pt" loads to a GPU'
    else:
        why = f"framework={framework!r} loads to the CPU only"
    raise UnsupportedError(f"device={str(device)!r}: {why}")


def make_adapter(framework: str | None, selection: Selection, device: Device, dtype: Any) -> Adapter:
    """The adapter of ``framework``; imports the framework.

    Raises:
        MissingFrameworkError: it cannot be imported.
        UnsupportedError: before a byte moves, if it lacks a wanted dtype.
    """
    name, target = framework_named(framework), cast_target(dtype)
    check_device(name, device)
    need(name)
    if name == "pt":
        with importing():
            from ._torch import Torch
        if device.is_cpu or device.is_gpu:
            return Torch(selection, device, target)
        from ._torch_devices import Meta, Moved

        return Meta(selection, target) if device.is_meta else Moved(selection, device, target)
    if name == "np":
        with importing():
            from ._numpy import Numpy
        return Numpy(selection, target)
    if name != "dlpack":
        from ._via_numpy import ViaNumpy

        return ViaNumpy(name, selection, device, target)
    from ._dlpack import DLPack

    return DLPack(selection, device, target)


def options_listed() -> str:
    """The names of all options by group, for an error."""
    return "; ".join(f"{group} options: {', '.join(names)}" for group, names in Options.groups().items())


def make_options(options: Options | Mapping[str, Any] | None, **changes: Any) -> Options:
    """The options meant by an `Options`, a mapping of its keywords, or None, with ``changes`` applied."""
    if isinstance(options, Options):
        if not changes:
            return _checked(options)
        given = {name: getattr(options, name) for name in Options.names()}
    elif options is None:
        given = {}
    elif isinstance(options, Mapping):
        given = dict(options)
    else:
        raise InvalidError(f"options={options!r}: give penstock.Options(...) or a dict with the same keywords")
    given.update(changes)
    unknown = [str(name) for name in given if name not in Options.names()]
    if unknown:
        import difflib

        close = [name for word in unknown for name in difflib.get_close_matches(word, Options.names(), 1)]
        raise InvalidError(
            f"unknown option{'s' * (len(unknown) > 1)} {', '.join(unknown)}"
            + f" (did you mean {', '.join(close)}?)" * bool(close)
            + f"; {options_listed()}"
        )
    if isinstance(given.get("trace"), os.PathLike):
        given["trace"] = local_path(given["trace"], "trace")
    return _checked(Options(**given))


def _checked(options: Options) -> Options:
    if options.trace:
        local_path(options.trace, "trace")
    return options


class Request(NamedTuple):
    """What of a checkpoint is wanted, where and how."""

    checkpoint: Checkpoint
    selection: Selection
    device: Device
    options: Options
    order: Order


def check_order(order: str) -> None:
    """Raises InvalidError for what is no order."""
    if order not in ORDERS:
        raise InvalidError(f"order={order!r}: give one of {', '.join(ORDERS)}")


def prepare(
    checkpoint: Checkpoint,
    device: Device,
    names: Names,
    dtype: Any,
    framework: Framework | None,
    options: Options,
    slices: Slices = None,
    order: Order = "file",
) -> tuple[Request, Adapter]:
    """What is meant by the arguments that every way to load takes. Imports the framework; reads nothing."""
    selection = select(checkpoint._core, names, slices)
    adapter = make_adapter(framework, selection, device, dtype)
    check_order(order)
    return Request(checkpoint, selection, device, options, order), adapter


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile: with 371,474 new tensors it would scan all of them again and again."""
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()


#: Loads that somebody still has, running or not.
_begun: weakref.WeakSet[_core.Load] = weakref.WeakSet()


def _stop_fills() -> None:
    _core.stop_fills("the process forked", 1)


# A thread that runs during a fork makes Python warn, and the child has none
os.register_at_fork(before=_stop_fills)


@atexit.register
def _end_all() -> None:
    """Ends what still runs when the interpreter exits: a GPU driver that is being torn down must not be called."""
    _core.exiting()
    _core.stop_fills("the process ends", 0)
    for load in _still_there():
        load.close()


def _still_there() -> list[_core.Load]:
    while True:
        try:
            return list(_begun)
        except RuntimeError:  # a daemon thread has begun one meanwhile
            continue


def begin(
    request: Request,
    adapter: Adapter | None,
    *,
    stream: bool = False,
    into: Sequence[tuple[int, int]] | None = None,
    keep: object = None,
    fence: int = 0,
) -> _core.Load:
    """Starts a load in the core. Whoever calls this closes it."""
    selection, nothing = request.selection, request.device.is_meta
    caller_blocks = adapter is not None and adapter.caller_blocks
    load = _core.Load.start(
        selection.core,
        request.options,
        wants=[] if nothing else selection.wants,
        regions=None if nothing else selection.regions,
        device=request.device.of_core,
        order=request.order,
        stream=stream,
        caller_blocks=caller_blocks,
        into=into,
        keep=keep,
        fence=fence,
        dlpack_device=None if adapter is None else adapter.dlpack_device,
        misaligned=adapter is not None and adapter.misaligned,
    )
    _begun.add(load)
    if caller_blocks and not stream and adapter is not None:
        try:
            adapter.grant(load, range(len(load.blocks())))
        except BaseException:
            load.close()
            adapter.let_go()
            raise
    return load


def write_trace(load: _core.Load, report: Report) -> None:
    """Writes the trace of a load that asked for one. Where that fails the tensors are there all the same: a warning."""
    if load.traced:
        import json  # one load in a thousand

        try:
            load.write_trace(json.dumps(report, default=str))
        except (PenstockError, OSError) as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)


def await_load(load: _core.Load, meter: Meter) -> None:
    """Waits for the end of the load, showing its progress. Raises its error."""
    while not load.wait(INTERVAL if meter.active else None):
        meter.update(*load.progress())
    meter.update(*load.progress(), final=True)


def _copy_of(error: Exception) -> Exception:
    try:
        return copy(error)
    except Exception:  # one whose arguments are not those that it is made of
        return error


class Job:
    """A load that runs in the background. `Checkpoint.start` makes one, and it runs from then on.

    Use it as a context manager, or call `result`, `cancel` or `close`: after each of them nothing is running. If you
    drop a job, it is cancelled. A job belongs to its process: in a forked child every method raises `ForkedError`.
    """

    def __init__(self, request: Request, adapter: Adapter) -> None:
        self._owner = os.getpid()
        self._checkpoint = request.checkpoint
        self._names = request.selection.names
        self._adapter = adapter
        self._cancelled = False
        self._result: dict[str, Any] | None = None
        self._error: Exception | None = None
        self._report: Report | None = None
        # Held while the tensors are made. A thread that waits for it waits for another that makes them, and can be
        # interrupted. A thread that has it already is in a signal handler or a `__del__`: see `_makes`
        self._handing_out = threading.RLock()
        self._makes = False
        self._load = begin(request, adapter)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until every byte is in place, at most ``timeout`` seconds (None: without limit).

        Returns True if every byte is in place, False if the time is over. Raises the error of a load that failed.
        """
        raise_if_forked(self._owner, "job")
        if self._result is not None:
            return True
        return self._load.wait(timeout)

    def done(self) -> bool:
        """Whether the load has ended, with success or with an error."""
        raise_if_forked(self._owner, "job")
        return self._result is not None or self._load.done()

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes in place, bytes wanted)."""
        raise_if_forked(self._owner, "job")
        return self._load.progress()

    @property
    def report(self) -> Report:
        """The report of the load. It is empty until the load has ended; `progress` says how far the load is."""
        raise_if_forked(self._owner, "job")
        return self._report if self._report is not None else report_of(self._load.report(), self._checkpoint.warnings)

    def cancel(self) -> None:
        """Stops the load and waits until it has stopped. `result` then raises `CancelledError`."""
        raise_if_forked(self._owner, "job")
        if self._result is None:
            self._cancelled = True
            self._load.cancel()
        self.close()

    def close(self) -> None:
        """Cancels a load that still runs, and frees its memory.

        `result` still gives the tensors of a load that has ended before: drop the job to free them. You may call this
        more than once. It never raises the error of the load.
        """
        raise_if_forked(self._owner, "job")
        self._load.close()
        try:
            self._load.wait(0)
        except PenstockError:
            self._let_go()
        if (self._cancelled or self._error is not None) and not self._makes:
            self._let_go()

    def _let_go(self) -> None:
        """There will be no result. What holds on to the job, as a traceback does, must not hold on to gigabytes."""
        self._load.let_go()
        self._adapter.let_go()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Waits for the tensors and returns them by name, in the order asked for; each time the same dictionary.

        With ``dtype=`` the tensors are cast here, on the calling thread.

        Raises:
            StalledError: (a TimeoutError) the load is not done after ``timeout`` seconds. It goes on.
            CancelledError: the job was cancelled.
            InvalidError: called by a signal handler or a ``__del__`` while its own thread makes the result.
            PenstockError: the load failed. Each call raises this error.
        """
        raise_if_forked(self._owner, "job")
        if self._result is not None:
            return self._result
        if timeout is not None and not isinstance(timeout, (int, float)):
            raise ArgumentTypeError(f"timeout={timeout!r}: give a number of seconds, or None")
        self._raise_again()
        try:
            ended = self._load.wait(timeout)
        except BaseException as error:
            self._remember(error)
            raise
        if not ended:
            done, total = self._load.progress()
            raise StalledError(
                f"the load is not done after {timeout} s ({done} of {total} bytes are there); it goes on"
            )
        with self._handing_out:  # each tensor can be made once, and several threads may be waiting for them
            if self._result is not None:
                return self._result
            self._raise_again()
            if self._makes:
                raise InvalidError(
                    "this very thread is making the result just now: a signal handler or a __del__ that runs in the "
                    "middle of that cannot have it; it is there once the thread goes on"
                )
            self._makes = True
            try:
                return self._hand_out()
            except BaseException as error:
                if not (self._cancelled and isinstance(error, PenstockError)):
                    self._remember(error)
                    raise
                self._raise_again()  # cancelled by another thread in the middle of it
                raise
            finally:
                self._makes = False
                if self._result is None:
                    self._let_go()

    def _raise_again(self) -> None:
        """Raises what an earlier `result` has raised. It cannot be found again: the load is closed."""
        if self._error is not None:
            raise _copy_of(self._error)
        if self._cancelled:
            raise CancelledError("the job was cancelled before it was done")

    def _remember(self, error: BaseException) -> None:
        """Ends the job with this error."""
        if isinstance(error, Exception):
            # Not the error itself: it will hold the frames of whoever catches it, and all that is in them
            self._error = _copy_of(error)
        else:
            self._cancelled = self._result is None
        self.close()

    def _hand_out(self) -> dict[str, Any]:
        adapter, names = self._adapter, self._names
        try:
            start = time.perf_counter()
            with collector_paused():
                tensors = adapter.tensors(self._load, range(len(names)))
                made = None if adapter.casts else dict(zip(names, tensors, strict=True))
            self._report = self._checkpoint._ended(self._load)
            self._report.handed_out(time.perf_counter() - start, cast=self._adapter.casts)
            self._load.mark("hand-out", start, time.perf_counter())
            write_trace(self._load, self._report)
        finally:
            self._load.close()
        if made is None:
            for i, tensor in enumerate(tensors):
                tensors[i] = adapter.cast(tensor)
            made = dict(zip(names, tensors, strict=True))
        self._result = made
        return made

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._result is None:
            self._cancelled = True
        self.close()


def load(request: Request, adapter: Adapter, progress: Progress) -> dict[str, Any]:
    """Every want's tensor by name."""
    if adapter.casts:
        # As a stream, so that at no time more than the window exists in both dtypes
        start = time.perf_counter()
        arrived = dict(stream(request, adapter, progress))
        report = request.checkpoint.last_report
        if report is not None:
            report.handed_out(max(0.0, time.perf_counter() - start - report["seconds"]), cast=adapter.casts)
        return {name: arrived[name] for name in request.selection.names}
    with Meter(progress, "load") as meter, Job(request, adapter) as job:
        await_load(job._load, meter)
        # Until the tensors are the caller's: a collection just before would go through all of them, and find nothing
        with collector_paused():
            return job.result()


def stream(request: Request, adapter: Adapter, progress: Progress) -> Iterator[tuple[str, Any]]:
    """Yields (name, tensor) as tensors become ready; blocks are granted on the thread of whoever iterates."""
    owner, names = os.getpid(), request.selection.names
    with Meter(progress, "load") as meter:
        load = begin(request, adapter, stream=True)
        try:
            if request.device.is_meta:
                for name, tensor in zip(names, adapter.tensors(load, range(len(names))), strict=True):
                    yield name, adapter.cast(tensor)
            while True:
                want = load.next(INTERVAL if meter.active else None)
                if want is None:
                    break
                if meter.active:
                    meter.update(*load.progress())
                if want is True:
                    adapter.grant(load, load.wanted_blocks())
                    continue
                if want is False:
                    continue
                [tensor] = adapter.tensors(load, [want])
                load.take(want)
                if adapter.casts:
                    tensor = adapter.cast(tensor)
                begun = time.perf_counter() if load.traced else 0.0
                yield names[want], tensor
                del tensor  # or the frame would keep it until the next one is there
                if begun:
                    load.mark("consume", begun, time.perf_counter())
                raise_if_forked(owner, "stream")
            load.wait()
            meter.update(*load.progress(), final=True)
            write_trace(load, request.checkpoint._ended(load))
        finally:
            if os.getpid() == owner:
                load.let_go()
                adapter.let_go()
