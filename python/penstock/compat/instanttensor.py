"""The interface of InstantTensor 0.2 on this engine: `safe_open`, `Backend`, `BackendPolicy`.

    from penstock.compat.instanttensor import safe_open

    with safe_open(files, framework="pt", device=0) as f:
        for name, tensor in f.tensors():
            ...

What its settings mean here, and what differs, is in docs/compatibility.md. Beyond the original: files on the CPU
(``device="cpu"``), `safe_open.get_tensor` (which InstantTensor had before 0.2), and iterating more than once.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args

from .. import _device, _dtypes
from .._checkpoint import Source, open_as
from .._choices import NameMatch
from .._core import Options
from .._errors import CancelledError, InvalidError, UnsupportedError
from .._frameworks import device_for, need, need_torch
from .._options import make_options
from .._paths import local_path
from .._request import Request, prepare
from .._selection import TensorInfo, unknown
from ._errors import ClosedError
from ._instanttensor_backends import Backend, BackendPolicy, Choice, candidates, io_for
from ._instanttensor_budget import share_of, window_within
from ._process_group import ranks_of, told, told_of_stream
from ._reading import MOST_READS, reading

if TYPE_CHECKING:
    from .._framework import Adapter
    from .._group_stream import GroupLoads

__all__ = ["Backend", "BackendPolicy", "safe_open"]

_SINGLES = 2
"""Tensors that `safe_open.get_tensor` loads one by one before a caller counts as one who wants them all."""


def _number(value: Any, name: str, least: int, most: int | None = None) -> int | None:
    """The whole number given as argument ``name``, or else in its environment variable."""
    where, variable = f"{name}={value!r}", f"INSTANTTENSOR_{name.upper()}"
    if value is None and (text := os.environ.get(variable)) is not None:
        where, value = f"{variable}={text!r}", int(text) if re.fullmatch(r"\s*[+-]?\d+\s*", text) else text
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise InvalidError(f"{where}: give None or a whole number of at least {least}{upper}")
    return value


def _matcher(patterns: Any, mode: str) -> Callable[[str], bool]:
    """Whether a whole name, in its own case, is matched by one of ``patterns``."""
    if mode not in get_args(NameMatch):
        raise InvalidError(f"tensor_name_match_mode={mode!r}: give one of {', '.join(get_args(NameMatch))}")
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"tensor_filter={patterns!r}: give None or a list of strings")
    # Literal names may be as many as there are tensors
    literal = {p for p in patterns if mode == "exact" or (mode == "glob" and not any(c in p for c in "*?["))}
    try:
        expressions = [
            re.compile(fnmatch.translate(pattern) if mode == "glob" else pattern)
            for pattern in patterns
            if pattern not in literal
        ]
    except re.error as error:
        raise InvalidError(f"tensor_filter: {error.pattern!r} is not a regular expression: {error}") from error
    return lambda name: name in literal or any(expression.fullmatch(name) for expression in expressions)


def _settings_for(
    on_cpu: bool, copy: bool, buffer_size: Any, chunk_size: Any, concurrency: Any, io_depth: Any
) -> dict[str, Any]:
    """Keywords of `Options` for what was asked for, by argument or else by environment variable."""
    settings: dict[str, Any] = {"copy": True} if copy and on_cpu else {}
    return settings | reading(
        extent=_number(chunk_size, "chunk_size", 1),
        window=_number(buffer_size, "buffer_size", 1),
        threads=_number(concurrency, "concurrency", 0),
        depth=_number(io_depth, "io_depth", 1, MOST_READS),
    )


class safe_open:
    """Opens safetensors files, from which `tensors` then yields every tensor while the next ones are being read.

    Args:
        filename: A file or a list of files; a directory or an index file does as well.
        framework: "pt".
        device: A GPU as a number, "cuda:0" or torch.device; or the CPU.
        process_group: None, or a process group. Its ranks load together: each gets every tensor that its filter leaves.
        buffer_size: Most bytes read ahead of the consumer; bounds staging memory too where it is less than that.
        chunk_size: Most bytes of one read, rounded up to whole pages.
        concurrency: Threads that read and copy; 0 adapts.
        io_depth: Most reads in flight, at most 1024.
        max_free_mem_usage: The share of the device's free memory that bytes read ahead may take: they become fewer, or
            it is an error if ``buffer_size`` or a group fixes their number. None: no such bound.
        load_now: Whether device and dtypes are checked here rather than by `tensors`. Reading starts with the first
            tensor.
        copy: On the CPU: private memory; else files are mapped where that is possible. No difference on a GPU, where
            memory is always the tensor's own.
        backend: A `Backend` or `BackendPolicy`, or a list of them. They are tried in order: the first one that the
            kernel and the file system grant is used.
        tensor_filter: Patterns of names; only tensors that one of them matches are there, and read.
        tensor_name_match_mode: "glob", "exact" or "regex", all of the whole name.

    buffer_size, chunk_size, concurrency, io_depth, max_free_mem_usage and backend default to the environment variables
    INSTANTTENSOR_ and their names in capitals.

    Attributes:
        total_tensor_size: Bytes of all tensors that the filter leaves.
        buffer_size: Most bytes read ahead.

    Raises:
        UnsupportedError: (a RuntimeError) a dtype that torch lacks; none of the backends can be used, and why not each;
            max_free_mem_usage leaves less than is to be read ahead.
        InvalidError: (a ValueError) settings that make no sense. It lists those that do.
        NotFoundError: (a FileNotFoundError) and every other PenstockError of `penstock.open`.
    """

    def __init__(
        self,
        filename: Source,
        framework: str,
        device: Any,
        process_group: Any = None,
        *,
        buffer_size: int | None = None,
        chunk_size: int | None = None,
        concurrency: int | None = None,
        io_depth: int | None = None,
        max_free_mem_usage: float | None = None,
        load_now: bool = True,
        copy: bool = True,
        backend: Choice | Sequence[Choice] | None = None,
        tensor_filter: list[str] | None = None,
        tensor_name_match_mode: NameMatch = "glob",
    ) -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise InvalidError(f'framework={framework!r}: give "pt" (or "torch", "pytorch")')
        need_torch()
        ranks = ranks_of(process_group, "process_group")
        share = share_of(max_free_mem_usage)
        matches = _matcher([] if tensor_filter is None else tensor_filter, tensor_name_match_mode)
        where = _device.parse_device(device)
        on_cpu = where.is_cpu
        self._settings = _settings_for(on_cpu, copy, buffer_size, chunk_size, concurrency, io_depth)
        window, backends = Options(**self._settings).window, candidates(backend)

        self.device, self.framework, self.copy, self.process_group = device, framework, copy, process_group
        self._group_loads = None if ranks is None else ranks.loads()
        with told_of_stream(self._group_loads):
            self._checkpoint = open_as("filename", filename, network=False)
            files = [local_path(file, "filename") for file in self._checkpoint.files]
            io = io_for(backends, files, mapped=on_cpu and not copy)
            if share is not None:
                within = window_within(share, where, window, "window" in self._settings, self._group_loads is not None)
                if within < window:
                    window = within
                    self._settings = _settings_for(on_cpu, copy, window, chunk_size, concurrency, io_depth)
        if io is not None:
            self._settings["io"] = io
        self._names = None if tensor_filter is None else [name for name in self._checkpoint if matches(name)]
        self._selected = None if self._names is None else set(self._names)
        self.total_tensor_size = (
            self._checkpoint.nbytes
            if self._names is None
            else sum(self._checkpoint[name].nbytes for name in self._names)
        )
        self.buffer_size = window
        self._closed = False
        self._running: list[Any] = []
        # Of `get_tensor`: the names in order, how many have been asked for in it, and the stream that follows
        self._order: list[str] | None = None
        self._asked = 0
        self._following: Generator[tuple[str, Any], None, None] | None = None
        self._checked = self._stream(self._names) if load_now else None

    def _stream(self, names: list[str] | None) -> Any:
        """An iterator that has checked device and dtypes, and not yet read anything."""
        group = None if self._group_loads is None else self._group_loads.member
        return self._checkpoint.stream(self.device, names, framework="pt", options=self._settings, group=group)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the safe_open context exited: it can no longer be read")

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, tensor) in file order, reading ahead. Tensors own their memory and may be kept.

        Raises:
            ClosedError: (a RuntimeError) the context exited, before or in the middle.
            PeerError: another rank has failed, or left its iterator before the end.
        """
        self._check_open()
        stream, self._checked = self._checked or self._stream(self._names), None
        return self._hand_out(stream)

    def _hand_out(self, stream: Any) -> Generator[tuple[str, Any], None, None]:
        self._check_open()
        self._running.append(stream)
        try:
            for name, tensor in stream:
                yield name, tensor
                del tensor
                self._check_open()  # the stream has been closed: it would end here as if that had been all
        finally:
            stream.close()
            if stream in self._running:
                self._running.remove(stream)

    def get_tensor(self, name: str) -> Any:
        """The tensor called ``name``. Asked for one after the other as in `keys`, tensors are read ahead.

        All ranks of a process group ask for the same tensors, in the same order.

        Raises:
            UnknownTensorError: (a KeyError) no such tensor, or the filter leaves it out.
            ClosedError: (a RuntimeError) the context exited.
        """
        with told(None if self._closed else self._group_loads):
            self._check_open()
            info = self._info(name)
        if self._order is None:
            self._order = self.keys()
        if self._asked < len(self._order) and self._order[self._asked] == name:
            self._asked += 1
            if self._following is None and self._asked > _SINGLES:
                self._following = self._hand_out(self._stream(self._order[self._asked - 1 :]))
            if self._following is not None and info.nbytes:  # an empty one may come at any time
                for found, tensor in self._following:
                    if found == name:
                        return tensor
        elif self._following is not None:
            self._following.close()
            self._following, self._asked = None, len(self._order)  # each alone from now on
        return self._alone(name) if self._group_loads is None else self._together(self._group_loads, name)

    def _alone(self, name: str) -> Any:
        alone = self._checkpoint.load(self.device, [name], framework="pt", progress=False, options=self._settings)
        return alone[name]

    def _together(self, loads: GroupLoads, name: str) -> Any:
        options = make_options(self._settings)

        def prepared() -> tuple[Request, Adapter]:
            return prepare(self._checkpoint, device_for(self.device, "pt"), [name], None, "pt", options)

        return loads.load(self._checkpoint._core, options, prepared)[name]

    def _info(self, name: str) -> TensorInfo:
        if self._selected is not None and name not in self._selected:
            raise unknown(self._checkpoint._core, name)
        return self._checkpoint[name]

    def keys(self) -> list[str]:
        """The tensors' names in file order."""
        return self._checkpoint.keys() if self._names is None else list(self._names)

    def offset_keys(self) -> list[str]:
        """The tensors' names in file order."""
        return self.keys()

    def metadata(self) -> dict[str, str]:
        """The files' ``__metadata__`` together; empty where there is none."""
        return self._checkpoint.metadata

    def get_tensor_metadata(self, name: str) -> tuple[Any, Any]:
        """(torch.dtype, torch.Size) of the tensor called ``name``, as `tensors` yields it; nothing is read.

        Raises:
            UnknownTensorError: (a KeyError) no such tensor, or the filter leaves it out.
            UnsupportedError: torch lacks the dtype.
        """
        need("pt")
        import torch

        info = self._info(name)
        dtype, shape = getattr(torch, _dtypes.DTYPES[info.dtype].torch or "", None), info.shape
        # Of F4 torch has pairs, along the last dimension
        odd = info.dtype == "F4" and (not shape or shape[-1] % 2)
        if dtype is None or odd:
            raise UnsupportedError(
                f"tensor {name} is {info.dtype} of shape {list(shape)}: torch {torch.__version__} has no such tensors",
                path=info.file,
                tensor=name,
            )
        return dtype, torch.Size((*shape[:-1], shape[-1] // 2) if info.dtype == "F4" else shape)

    def __enter__(self) -> safe_open:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asked = self._order is not None and not self._closed
        self._closed = True
        self._checked = self._following = None
        for stream in self._running:
            stream.close()
        self._running.clear()
        if self._group_loads is not None:
            if asked and self._asked < len(self.keys()):
                self._group_loads.say(CancelledError("its safe_open context exited"))
            self._group_loads.close()
