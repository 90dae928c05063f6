"""The header of one file, as fastsafetensors reads it without a load: `SafeTensorsMetadata`."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from .._checkpoint import OneFile, open_as
from .._dtypes import DTYPES
from .._errors import HeaderError, TruncatedError
from .._paths import local_path
from ._fastsafetensors_types import DType, TensorFrame

_LARGEST = 100_000_000
"""Most bytes of a header, in safetensors and in the original."""
_ALIGN = 16
"""The alignment of tensors on a GPU in the original."""


class SafeTensorsMetadata:
    """The header of one file: read by `from_file`, `from_fd` or `from_buffer`, or given as the text of its JSON.

    Attributes:
        src: The file's name.
        metadata: Its ``__metadata__``; "" if there is none.
        tensors: A `TensorFrame` by name, in file order.
        header_length: Bytes in front of the data.
        size_bytes: Bytes of the file.
        aligned: Whether the data begins at a multiple of 16 bytes.
        framework: What was given as such; it means nothing here.
        ser: The header as read, without its ``__metadata__``; only with ``keep_orig_dict``.

    Raises:
        HeaderError: (a ValueError) the header is damaged.
        TruncatedError: (an EOFError) the file is shorter than its header says.
    """

    def __init__(
        self,
        string: str,
        header_length: int,
        size_bytes: int,
        framework: Any = None,
        src: str = "",
        keep_orig_dict: bool = False,
    ) -> None:
        self.src, self.framework = src, framework
        self.header_length, self.size_bytes = header_length, size_bytes
        self.aligned = header_length % _ALIGN == 0
        header = _parsed(string, src)
        self.metadata: Any = header.pop("__metadata__", "")
        if keep_orig_dict:
            self.ser = header
        self.tensors: dict[str, TensorFrame] = {}
        end = 0
        frames = {name: _frame(name, entry, src) for name, entry in header.items()}
        for name, frame in sorted(frames.items(), key=lambda item: item[1].data_offsets[0]):
            if frame.data_offsets[0] != end:
                raise HeaderError(
                    f"tensor {name} begins at byte {frame.data_offsets[0]} of the data, and byte {end} comes next",
                    path=src or None,
                )
            self.tensors[name] = frame
            end = frame.data_offsets[1]
        if header_length + end > size_bytes:
            raise TruncatedError(
                f"{header_length + end} bytes expected, {size_bytes} are there: download the file again",
                path=src or None,
            )

    @classmethod
    def from_file(cls, filename: str | os.PathLike[str], framework: Any = None) -> SafeTensorsMetadata:
        """The header of a file. Raises NotFoundError too, and every other PenstockError of `penstock.open`."""
        path = os.fspath(filename) if isinstance(filename, str) else local_path(filename, "filename")
        open_as("filename", OneFile(path), network=False)  # looks at it as every load does, and waits as patiently
        with open(path, "rb", buffering=0) as file:
            return cls.from_fd(file.fileno(), path, framework)

    @classmethod
    def from_fd(
        cls, fd: int, filename: str, framework: Any = None, keep_orig_dict: bool = False
    ) -> SafeTensorsMetadata:
        """The header at the position of a descriptor, which then stands where the data begins."""
        size = os.fstat(fd).st_size
        length = _length(_read(fd, 8, filename), size, filename)
        text = _text(_read(fd, length, filename), filename)
        return cls(text, length + 8, size, framework, filename, keep_orig_dict)

    @classmethod
    def from_buffer(cls, buf: int, buffer_len: int, filename: str, framework: Any = None) -> SafeTensorsMetadata:
        """The header of a file that lies in memory, at the address ``buf``."""
        start = ctypes.string_at(buf, 8) if buffer_len >= 8 else b""
        length = _length(start, buffer_len, filename)
        text = _text(ctypes.string_at(buf + 8, length), filename)
        return cls(text, length + 8, buffer_len, framework, filename)

    def select_byte_ranges(self, keep_tensor: Callable[[str], bool], merge_gap: int = 4096) -> list[tuple[int, int]]:
        """The ranges (first, past-the-last byte of the file) of the tensors that ``keep_tensor`` says yes to.

        Ranges at most ``merge_gap`` bytes apart are one.
        """
        ranges: list[tuple[int, int]] = []
        for name, frame in self.tensors.items():  # in file order
            start, end = (self.header_length + offset for offset in frame.data_offsets)
            if start == end or not keep_tensor(name):
                continue
            if ranges and start - ranges[-1][1] <= merge_gap:
                start = ranges.pop()[0]
            ranges.append((start, end))
        return ranges

    def __repr__(self) -> str:
        return str({"__metadata__": self.metadata, "tensors": self.tensors})


def _length(start: bytes, size: int, filename: str) -> int:
    """The length of the JSON, as the first eight bytes of a file say it."""
    if len(start) < 8:
        raise TruncatedError(f"{size} bytes are too few for a header", path=filename)
    length = int.from_bytes(start, "little")
    if length > _LARGEST:
        raise HeaderError(f"a header of {length} bytes: at most {_LARGEST} are allowed", path=filename)
    if length > size - 8:
        raise TruncatedError(f"a header of {length} bytes in a file of {size}", path=filename)
    return length


def _read(fd: int, count: int, filename: str) -> bytes:
    found = b""
    while len(found) < count:
        more = os.read(fd, count - len(found))
        if not more:
            raise TruncatedError(f"the file ended {count - len(found)} bytes early", path=filename)
        found += more
    return found


def _text(content: bytes, filename: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise HeaderError(f"the header is not UTF-8: {error}", path=filename) from error


def _parsed(string: str, src: str) -> OrderedDict[str, Any]:
    """The header's entries; a name may be there once."""

    def once(pairs: list[tuple[str, Any]]) -> OrderedDict[str, Any]:
        entries = OrderedDict(pairs)
        if len(entries) < len(pairs):
            raise HeaderError("the header has a name twice", path=src or None)
        return entries

    try:
        header = json.loads(string, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, HeaderError):
            raise
        raise HeaderError(f"the header is not JSON: {error}", path=src or None) from error
    if not isinstance(header, OrderedDict):
        raise HeaderError("the header is not a JSON object", path=src or None)
    return header


def _frame(name: str, entry: Any, src: str) -> TensorFrame:
    """The entry of one tensor, checked: its bytes are those that its dtype and shape need."""
    why = None
    try:
        dtype, shape, offsets = DType(entry["dtype"]), list(entry["shape"]), list(entry["data_offsets"])
        start, end = offsets
        if dtype is DType.AUTO or any(type(number) is not int or number < 0 for number in (*shape, start, end)):
            why = "its dtype, shape or offsets make no sense"
        elif 8 * (end - start) != math.prod(shape) * DTYPES[dtype.value].bits:
            why = f"{end - start} bytes for {dtype.value} of shape {shape}"
    except (KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
    if why is not None:
        raise HeaderError(f"tensor {name}: {why}", path=src or None, tensor=name)
    return TensorFrame(dtype, shape, offsets)
