"""Checkpoints with the layouts of public models, written once and kept in pytest's cache folder (0.9 GB).

They stay below the folder of the project, not in /tmp: that is often a tmpfs, which has neither a disk nor O_DIRECT.
`pytest --cache-clear` writes them anew. Nobody writes to them.
"""

from __future__ import annotations

import fcntl
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pagecache
import pytest
from ordeal import results
from penstock.bench import reference
from penstock.synthetic import layouts, synth
from penstock.synthetic.synth import BITS, Layout, Tensor

MIB = 1 << 20


@dataclass
class Model:
    """A checkpoint and what its files hold."""

    source: Path

    def __post_init__(self) -> None:
        # At once: read later, between a load and a look at the page cache, it would be what filled that
        self.entries = reference.entries_of(self.source)
        self.held = {file: np.fromfile(file, dtype=np.uint8) for file in self.files}

    @property
    def files(self) -> list[Path]:
        return list(dict.fromkeys(entry.file for entry in self.entries.values()))

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, in memory that has nothing to do with the page cache."""
        entry = self.entries[name]
        return self.held[entry.file][entry.offset : entry.offset + entry.nbytes]

    def elements_of(self, name: str) -> npt.NDArray[Any]:
        """A tensor with its shape and elements of its size, whatever its dtype (of whole bytes) means."""
        entry = self.entries[name]
        return self.bytes_of(name).view(f"V{BITS[entry.dtype] // 8}").reshape(entry.shape)

    def near(self, state: str) -> None:
        """Brings the files near a state of the page cache.

        For tests whose results are the same in every state: they run beside others, and the route of a load varies.
        """
        pagecache.near(self.files, state)

    @results
    def same(self, tensors: dict[str, Any]) -> None:
        """Asserts that these are all tensors of the files, in file order, byte for byte."""
        assert list(tensors) == list(self.entries)
        for name, tensor in tensors.items():
            assert np.array_equal(flat(tensor), self.bytes_of(name)), name


def flat(value: Any) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous torch tensor, numpy array or DLPack object, where they lie."""
    import torch

    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return value.reshape(-1).view(np.uint8)
    if not isinstance(value, torch.Tensor):
        value = torch.from_dlpack(value)
    assert value.is_contiguous()
    if not value.numel():
        return np.empty(0, dtype=np.uint8)
    return value.reshape(-1).view(torch.uint8).numpy()


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest) -> Path:
    """Where generated checkpoints are kept."""
    assert request.config.cache is not None
    return request.config.cache.mkdir("checkpoints")


@pytest.fixture(scope="session")
def scratch(request: pytest.FixtureRequest) -> Path:
    """Beside it, for files that every session writes anew: each of several processes that run tests has one."""
    assert request.config.cache is not None
    return request.config.cache.mkdir(f"scratch-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}")


def kept(layout: Layout, folder: Path, **how: Any) -> Path:
    """Writes a checkpoint unless it is there: one process does, the others wait."""
    with open(folder.parent / ".writing", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return synth.write(layout, folder, **how)


@pytest.fixture(scope="session")
def gpt2(folder: Path) -> Path:
    """GPT-2's 160 tensors in one file of 548 MB."""
    return kept(layouts.build("gpt2", align=8), folder / "gpt2")


@pytest.fixture(scope="session")
def llama(folder: Path) -> Model:
    """Llama's tensors with four narrow layers, in three files with an index, 20 MB."""
    return Model(kept(synth.llama(20e6, shards=3), folder / "llama"))


@pytest.fixture(scope="session")
def moe(folder: Path) -> Model:
    """128 experts a layer: 9,266 tensors in four files, 66 MB."""
    return Model(kept(synth.qwen3_moe(90e6), folder / "moe"))


@pytest.fixture(scope="session")
def many(folder: Path) -> Path:
    """371,474 tensors in 11 files, 37 MB of headers."""
    return kept(synth.many_tensors(), folder / "many")


@pytest.fixture(scope="session")
def experts(folder: Path) -> Model:
    """Experts stacked in 3-D tensors, in one file of 29 MB."""
    shapes = {"gate_up_proj": (16, 96, 512), "down_proj": (16, 256, 96), "router": (16, 256), "scales": (16, 3, 8)}
    tensors = [Tensor(f"layers.{layer}.{name}", "BF16", shape) for layer in range(6) for name, shape in shapes.items()]
    return Model(kept(Layout("experts", (tuple(tensors),)), folder / "experts"))


#: Where the tensors of the sparse file lie: below, across and beyond 4 GiB, and beyond 6 GiB.
SPARSE = (
    Tensor("below", "F32", (1000, 300)),
    Tensor("hole.0", "U8", ((4 << 30) - 3 * MIB,), hole=True),
    Tensor("across", "F32", (2048, 512)),
    Tensor("hole.1", "U8", (2 << 30,), hole=True),
    Tensor("beyond", "BF16", (333, 1024)),
    Tensor("last", "U8", (12_345,)),
)


@pytest.fixture(scope="session")
def sparse(folder: Path) -> Path:
    """A file of 6.4 GB, nearly all of it holes, with tensors below, across and beyond the offset of 4 GiB."""
    return kept(Layout("sparse", (SPARSE,)), folder / "sparse") / "model.safetensors"


UNICODE = ("模型.权重", "ночь.вес", "🧠.weight", "é.é́", "a b\tc", 'quo"te', "back\\slash", "\u202ertl", "nul\0byte", "")


@pytest.fixture(scope="session")
def odd(scratch: Path) -> Model:
    """Every dtype, scalars, empty tensors and names of any Unicode, in files whose data starts at an odd offset.

    One file is ordered so that nothing is misaligned within its data, one at random, one has no tensors, one no data.
    """
    folder = scratch / "odd"
    folder.mkdir(exist_ok=True)
    plain = synth.every_dtype()
    mixed = [Tensor(f"mixed.{t.name}", t.dtype, t.shape) for t in plain]
    mixed += [Tensor(name, "F32", (3, 5)) for name in UNICODE]
    mixed += [Tensor(f"large.{dtype}", dtype, (1031, 1033)) for dtype in ("F64", "BF16", "U8", "F32", "C64")]
    mixed += [Tensor("byte", "U8", (1,))]
    random.Random(7).shuffle(mixed)
    hollow = [Tensor("nothing", "F32", (0,)), Tensor("nothing.much", "I64", (4, 0, 2))]
    for number, (tensors, align, spaces) in enumerate(((plain, 1, 1), (mixed, 1, 3), ((), 8, 0), (hollow, 1, 0))):
        synth.write_file(
            folder / f"odd-{number}.safetensors", tensors, seed=number, metadata=None, align=align, spaces=spaces
        )
    return Model(folder)


@dataclass(frozen=True)
class Way:
    """One combination of options that a load can travel by."""

    io: str
    cache: str
    copy: bool | None

    @property
    def options(self) -> dict[str, Any]:
        return {"io": self.io, "cache": self.cache, "copy": self.copy}

    @property
    def contradicts_itself(self) -> bool:
        """Mapped files are the page cache and no copies; every io but "auto" goes either through it or past it."""
        maps = self.io == "mapped" or self.copy is False
        through = maps or self.io == "buffered"
        past = self.io in ("direct", "uring", "threads")
        return (
            (maps and (self.copy is True or self.io not in ("auto", "mapped")))
            or (through and self.cache == "bypass")
            or (past and self.cache == "keep")
        )

    @property
    def keeps_cold_bytes(self) -> bool | None:
        """Whether bytes that were not in the page cache are there afterwards. None: the machine decides."""
        if self.cache == "auto" and self.io == "auto" and self.copy is not False:
            return None
        return self.cache != "bypass" and self.io not in ("direct", "uring", "threads")

    def __str__(self) -> str:
        copy = {None: "", True: "-copy", False: "-map"}[self.copy]
        return f"{self.io}-{self.cache}{copy}"


IO = ("auto", "mapped", "buffered", "direct", "uring", "threads")
EVERY_WAY = [Way(io, cache, copy) for io in IO for cache in ("auto", "keep", "bypass") for copy in (None, True, False)]
WAYS = [way for way in EVERY_WAY if not way.contradicts_itself]
#: One way for each route and interface.
ROUTES = [Way(io, "auto", None) for io in IO] + [Way("auto", "keep", True), Way("auto", "bypass", None)]
#: Those that can fill existing tensors.
INTO = [way for way in ROUTES if way.io != "mapped"]


@results
def accounted(report: Any, nbytes: int) -> None:
    """Asserts that a report's bytes add up: what was read is what was wanted, slack, and gaps."""
    assert report.nbytes == nbytes
    read = sum(route["bytes"] for route in report.routes.values())
    assert read == nbytes + report.slack_bytes + report.gap_bytes
    extents = sum(route["extents"] for route in report.routes.values())
    assert (extents > 0) == (nbytes > 0)
    assert report.slack_bytes < 2 * 4096 * max(extents, 1)
    assert report.peak_staging >= 0
    # Containers often refuse io_uring; nothing else may give way here
    assert {fallback["from"] for fallback in report.fallbacks} <= {"io_uring"}
