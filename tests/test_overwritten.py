"""`touched` of a load that failed names exactly those destinations that have an overwritten byte.

All memory is filled with a byte before that no file has. So each write shows. Layouts and faults are random; every
failure compares what changed with what the error says.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
import slow_fs
import torch
from penstock import Destination

POISON = 0xEE
#: Bytes of a file are less: then no BF16 that an F32 is rounded to has the poison in its second byte.
MOST = 0xE0
SIZES = {"F32": 4, "BF16": 2, "U8": 1}
TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}

WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "buffered": {"io": "buffered", "threads": 3},
    "one thread": {"io": "buffered", "threads": 1, "depth": 1},
    "io_uring": {"io": "uring_buffered"},
    "direct": {"io": "direct"},
    "threads": {"io": "threads", "threads": 3},
    "past the page cache": {"cache": "bypass"},
}
EXPECTED = penstock.ReadError, penstock.TruncatedError, penstock.ChangedError, penstock.NotFoundError
by_way = pytest.mark.parametrize("way", WAYS)


class Layout:
    """A random checkpoint of some tensors, and random destinations for it."""

    def __init__(self, seed: int, folder: Path, files: int = 1) -> None:
        self.chance = random.Random(seed)
        self.paths = [folder / f"{seed}-{i}.safetensors" for i in range(files)]
        self.tensors: dict[str, tuple[str, tuple[int, int]]] = {}
        self.wide = self.chance.random() < 0.5
        for i, path in enumerate(self.paths):
            self._write(path, f"{i}.")

    def _write(self, path: Path, prefix: str) -> None:
        header, at = {}, 0
        # The largest elements first: none is misaligned, and each may be cast
        dtypes = sorted(self.chance.choices(list(SIZES), k=self.chance.randrange(2, 7)), key=SIZES.get, reverse=True)
        for i, dtype in enumerate(dtypes):
            columns = self.chance.randrange(4096, 9000) if self.wide else self.chance.randrange(1, 300)
            shape = self.chance.randrange(1, 13), columns
            past = at + SIZES[dtype] * shape[0] * shape[1]
            self.tensors[f"{prefix}{i}"] = dtype, shape
            header[f"{prefix}{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, past]}
            at = past
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        data = np.random.default_rng(at).integers(0, MOST, at, dtype=np.uint8)
        path.write_bytes(struct.pack("<Q", len(text)) + text + data.tobytes())

    def destinations(self) -> list[Destination]:
        """One or several for each tensor, in any order."""
        found = []
        for name, (_, (rows, columns)) in self.tensors.items():
            for _ in range(1 if self.wide else self.chance.randrange(1, 4)):
                a, b = sorted(self.chance.sample(range(rows + 1), 2))
                c, d = sorted(self.chance.sample(range(columns + 1), 2)) if not self.wide else (0, columns)
                found += self._of(name, (slice(a, b), slice(c, d)))
        self.chance.shuffle(found)
        return found

    def _of(self, name: str, cut: tuple[slice, slice]) -> list[Destination]:
        dtype, shape = self.tensors[name][0], [part.stop - part.start for part in cut]
        rows, columns = shape
        match self.chance.randrange(5 if self.wide else 9):
            case 0:  # a row of another one's matrix
                into = memory((rows, 2, columns), dtype)
                return [Destination(name, into[:, i], cut) for i in range(2)]
            case 1:  # columns that alternate; one is nobody's
                into = memory((rows, columns, 3), dtype)
                return [Destination(name, into[:, :, i], cut) for i in (0, 2)]
            case 5:
                return [Destination(name, memory((columns, rows), dtype), cut, axes=(1, 0))]
            case 6 if dtype == "F32":
                return [Destination(name, memory((rows, columns), "BF16"), cut, cast=True)]
            case 7:  # what the core does not fill
                into = np.full((rows, columns * SIZES[dtype]), POISON, np.uint8)
                view = into.view({"F32": np.float32, "U8": np.uint8}.get(dtype, np.uint16))
                return [Destination(name, view[::-1], cut)] if dtype != "BF16" else []
            case 8:  # one element for many
                one = slice(cut[0].start, cut[0].start + 1), slice(cut[1].start, cut[1].start + 1)
                return [Destination(name, memory((3, 4), dtype), one)]
        return [Destination(name, memory((rows, columns), dtype), cut)]


def memory(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    nbytes = SIZES[dtype] * int(np.prod(shape))
    return torch.full((nbytes,), POISON, dtype=torch.uint8).view(TORCH[dtype]).view(shape)


def is_changed(into: Any) -> bool:
    """Whether a byte is not what it was."""
    if isinstance(into, np.ndarray):
        return bool((np.ascontiguousarray(into).view(np.uint8) != POISON).any())
    elements = torch.empty(into.numel(), dtype=into.dtype).copy_(into.reshape(-1))
    return bool((elements.view(torch.uint8) != POISON).any())


def changed(destinations: list[Destination]) -> collections.Counter[str]:
    """How many destinations of each name are no longer what they were."""
    return collections.Counter(one.name for one in destinations if is_changed(one.into))


class Tally:
    """What became of the destinations of many loads."""

    def __init__(self) -> None:
        self.whole = self.none = self.partly = 0

    def fails(self, load: Callable[[], Any], destinations: list[Destination], seed: int) -> None:
        """The load fails, or finds what is left good enough; what its error says is what changed."""
        try:
            load()
        except EXPECTED as error:
            found = changed(destinations)
            assert collections.Counter(error.touched) == found, (seed, error)
            assert ("overwritten, wholly or in part" in str(error)) == bool(found)
            self.none += not found
            self.whole += found.total() == len(destinations)
            self.partly += 0 < found.total() < len(destinations)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[slow_fs.SlowFs, Path]]:
    """A file system whose files have bytes that cannot be read, and the folder behind it."""
    if (why := slow_fs.why_not()) is not None:
        pytest.skip(why)
    backing = tmp_path_factory.mktemp("broken")
    with slow_fs.mounted(backing) as fs:
        yield fs, backing


def data_begin(path: Path) -> int:
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


@by_way
def test_bytes_that_cannot_be_read(broken: tuple[slow_fs.SlowFs, Path], way: str) -> None:
    fs, backing = broken
    tally = Tally()
    for seed in range(30):
        layout = Layout(seed, backing, files=1 + seed % 2)
        checkpoint = penstock.open([fs.path / path.name for path in layout.paths])
        broken_file = layout.chance.choice(layout.paths)
        at = layout.chance.randrange(data_begin(broken_file), broken_file.stat().st_size)
        fs.tell(bad={broken_file.name: at})
        to = layout.destinations()
        options = {**WAYS[way], "extent": layout.chance.choice([4096, 65536, 1 << 20])}
        tally.fails(lambda: checkpoint.load_into(to, options=options, progress=False), to, seed)  # noqa: B023
        fs.tell(bad={})
        for path in layout.paths:
            path.unlink()
    assert tally.none + tally.partly + tally.whole > 10, vars(tally)
    # How far the others come when one fails is a matter of chance
    assert way != "one thread" or tally.partly >= 5, vars(tally)


def shrink(path: Path, to: int) -> None:
    os.truncate(path, to)


def vanish(path: Path, to: int) -> None:
    path.unlink()


def rewrite(path: Path, to: int) -> None:
    with path.open("r+b") as file:
        file.seek(to)
        file.write(b"\1")


@by_way
@pytest.mark.parametrize("change", [shrink, vanish, rewrite], ids=lambda change: change.__name__)
def test_files_that_change_during_the_load(tmp_path: Path, change: Callable[[Path, int], None], way: str) -> None:
    tally = Tally()
    for seed in range(12):
        layout = Layout(seed, tmp_path, files=3)
        checkpoint = penstock.open(layout.paths)
        to = layout.destinations()
        victim = layout.chance.choice(layout.paths)
        at = layout.chance.randrange(data_begin(victim), victim.stat().st_size)
        after = layout.chance.choice([0, 1, 100_000])

        def spoil(done: int, total: int, spoilt: list[bool] = []) -> None:  # noqa: B006 - remembers that it has
            if not spoilt and done >= after and victim.exists():  # noqa: B023
                spoilt.append(True)
                change(victim, at)  # noqa: B023

        options = {**WAYS[way], "extent": layout.chance.choice([4096, 65536]), "depth": 1, "threads": 1}
        tally.fails(lambda: checkpoint.load_into(to, options=options, progress=spoil), to, seed)  # noqa: B023
    assert tally.none + tally.partly + tally.whole, "no load failed"


@by_way
def test_files_that_shrink_before_the_load(tmp_path: Path, way: str) -> None:
    tally = Tally()
    for seed in range(8):
        layout = Layout(seed, tmp_path, files=2)
        checkpoint = penstock.open(layout.paths)
        to = layout.destinations()
        os.truncate(layout.paths[1], layout.paths[1].stat().st_size - 1)
        tally.fails(lambda: checkpoint.load_into(to, options=WAYS[way], progress=False), to, seed)  # noqa: B023
    assert tally.none + tally.partly + tally.whole == 8


def test_reads_that_hang_count_and_what_was_not_begun_does_not(broken: tuple[slow_fs.SlowFs, Path]) -> None:
    fs, backing = broken
    for seed in itertools.count():
        layout = Layout(seed, backing)
        if layout.wide and len(layout.tensors) > 4:
            break
    checkpoint = penstock.open(fs.path / layout.paths[0].name)
    to = [Destination(name, memory(shape, dtype)) for name, (dtype, shape) in layout.tensors.items()]
    fs.tell(hang=["read"], after=fs.tell()["requests"]["read"] + 1)
    options = {"io": "buffered", "threads": 1, "extent": 65536, "stall_timeout": 0.5}
    with pytest.raises(penstock.StalledError) as caught:
        checkpoint.load_into(to, options=options, progress=False)
    # One read is on its way, and may end when the server comes back
    assert set(changed(to)) <= set(caught.value.touched) < {one.name for one in to}
    fs.tell(hang=[])
