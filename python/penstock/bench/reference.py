"""Reads safetensors with `json` and numpy alone: the reader that penstock and its peers are compared with."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_COMPARE_BYTES = 8 << 20


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: `nbytes` bytes at `offset` of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


Source = str | os.PathLike[str] | list[Path]


def files_of(source: Source) -> list[Path]:
    """The shard files of a folder (those its index names, else all), or the file or files themselves."""
    if isinstance(source, list):
        return source
    source = Path(source)
    if source.is_file():
        return [source]
    indexes = sorted(source.glob("*.index.json"))
    if indexes:
        return [source / name for name in sorted(set(json.loads(indexes[0].read_text())["weight_map"].values()))]
    return sorted(source.glob("*.safetensors"))


def entries_of(source: Source) -> dict[str, Entry]:
    """Every tensor of a checkpoint by name, in the order of files and offsets."""
    found: dict[str, Entry] = {}
    for path in files_of(source):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = tensor["data_offsets"]
            found[name] = Entry(name, tensor["dtype"], tuple(tensor["shape"]), path, 8 + length + start, end - start)
    return found


def raw(entry: Entry) -> npt.NDArray[np.uint8]:
    """The bytes of one tensor, read from the file."""
    with entry.file.open("rb") as file:
        return np.fromfile(file, dtype=np.uint8, count=entry.nbytes, offset=entry.offset)


class Comparer:
    """Compares tensors in memory with their bytes in the files, keeping one descriptor per file open."""

    def __init__(self, source: Source) -> None:
        self.entries = entries_of(source)
        self._files: dict[Path, int] = {}
        self._buffer = np.empty(_COMPARE_BYTES, dtype=np.uint8)

    def same(self, name: str, data: npt.NDArray[np.uint8]) -> bool:
        """Whether `data` (flat, uint8) holds exactly the tensor's bytes."""
        entry = self.entries[name]
        if data.nbytes != entry.nbytes:
            return False
        file = self._files.get(entry.file)
        if file is None:
            file = self._files[entry.file] = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC)
        for start in range(0, entry.nbytes, _COMPARE_BYTES):
            size = min(_COMPARE_BYTES, entry.nbytes - start)
            expected = self._buffer[:size]
            if os.preadv(file, [expected.data], entry.offset + start) != size:
                raise EOFError(f"{entry.file}: ends within {name}")
            if not np.array_equal(expected, data[start : start + size]):
                return False
        return True

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
