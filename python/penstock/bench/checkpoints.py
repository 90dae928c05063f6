"""The checkpoints of a run: which layouts, and where their files lie."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from ..synthetic import layouts, synth
from ..synthetic.synth import Layout, Tensor
from . import reference
from .scenarios import CORE

#: Memory in which files can lie.
TMPFS = Path("/dev/shm")


@dataclass(frozen=True)
class Kind:
    """A layout, and the scenarios in which it is compared unless others are asked for."""

    layout: Callable[[], Layout]
    scenarios: tuple[str, ...]
    #: Whether forced routes take part: on one checkpoint they say what they have to say.
    routes: bool = False


def minilm() -> Layout:
    """all-MiniLM-L6-v2: a sentence encoder of 103 tensors and 90.9 MB."""
    return layouts.build("all-minilm-l6-v2")


def gpt2() -> Layout:
    """GPT-2 as it would be saved today: aligned, unlike the published file."""
    return layouts.build("gpt2", align=8)


def huge(nbytes: float = 1e9) -> Layout:
    """One tensor."""
    return Layout("huge", ((Tensor("weight", "BF16", (int(nbytes) // 2 // 4096, 4096)),),))


#: Layers of a model that are left at least where whole layers are taken away.
_LAYERS = 8


def fitted(name: str, nbytes: float) -> Layout:
    """A public model of at most about so many bytes: whole, or with fewer layers, or with all of its tensors thinner.

    One layer of hundreds would have the tensors of no model at all: where not even a few layers fit, each tensor is
    made thinner, and their number, names and files stay.
    """
    whole = layouts.build(name)
    if whole.nbytes <= nbytes:
        return whole
    if layouts.build(name, layers=_LAYERS).nbytes <= nbytes:
        return layouts.build(name, nbytes=nbytes)
    return layouts.build(name, scale=nbytes / whole.nbytes)


#: Layers of a model in a quick run of a published table.
_QUICK_LAYERS = 4


def small(name: str, nbytes: float) -> Layout:
    """A public model for a quick run: its first layers with all tensors thinner, at most about so many bytes."""
    whole = layouts.build(name)
    if whole.nbytes <= nbytes:
        return whole
    layers = min(_QUICK_LAYERS, len(layouts.model(name).layers))
    few = layouts.build(name, layers=layers)
    return layouts.build(name, layers=layers, scale=min(1.0, nbytes / few.nbytes))


# What moves many bytes takes minutes a scenario: those that are about the machine's state are compared on the half
# gigabyte of GPT-2, and the large ones where it is size and number of tensors that count.
FULL: dict[str, Kind] = {
    "minilm": Kind(minilm, ("cold", "warm", "latency")),
    "gpt2": Kind(
        gpt2,
        (*CORE, "second", "cast", "tmpfs", "half", "two", "beside-memory", "beside-disk", "limited"),
        routes=True,
    ),
    "dense": Kind(lambda: synth.llama(3e9), CORE),
    "moe": Kind(lambda: synth.qwen3_moe(3e9), CORE),
    "huge": Kind(huge, ("cold", "private")),
    "many": Kind(synth.many_tensors, ("warm",)),  # 7 MB of data: only the time that each tensor costs is of interest
}
QUICK: dict[str, Kind] = {
    "minilm": Kind(minilm, ("latency",)),
    "dense": Kind(lambda: synth.llama(0.1e9), CORE),
    "moe": Kind(lambda: synth.qwen3_moe(0.1e9), CORE),
}


@dataclass(frozen=True)
class Placed:
    """A checkpoint on a file system: its shards, and the folder that holds them all with their index, if one does."""

    name: str
    layout: str
    files: list[Path]
    folder: Path | None
    nbytes: int
    tensors: int
    #: The parts of the named model that the layout lacks.
    cut: str | None = None

    @property
    def size(self) -> int:
        """Bytes of the files, headers included."""
        return sum(path.stat().st_size for path in self.files)

    def about(self) -> dict[str, object]:
        """The checkpoint's entry in a result file."""
        about = {"layout": self.layout, "nbytes": self.nbytes, "tensors": self.tensors, "files": len(self.files)}
        return about | ({} if self.cut is None else {"cut": self.cut})


def place(name: str, layout: Layout, folders: list[Path]) -> Placed:
    """Writes a checkpoint, unless it is there. Several folders, on as many drives, take its shards in turn."""

    def placed(files: list[Path], folder: Path | None) -> Placed:
        return Placed(name, layout.name, files, folder, layout.nbytes, len(layout.tensors), layout.cut)

    if len(folders) == 1:
        folder = synth.write(layout, folders[0] / name)
        return placed(reference.files_of(folder), folder)
    files = []
    for number, shard in enumerate(layout.shards):
        part = Layout(layout.name, (shard,), layout.metadata, layout.align)
        folder = synth.write(part, folders[number % len(folders)] / name / f"shard-{number + 1:05}", seed=number)
        files += reference.files_of(folder)
    return placed(files, None)


class NoRoom(Exception):
    """The files do not fit; the message says where."""


@contextmanager
def in_memory(placed: Placed) -> Iterator[Placed]:
    """A copy of the checkpoint in memory, while the context is open.

    Raises:
        NoRoom: where there is no tmpfs with room for it.
    """
    if not TMPFS.is_dir() or shutil.disk_usage(TMPFS).free < 1.05 * placed.size:
        raise NoRoom(f"{TMPFS} has no room for {placed.size / 1e9:.1f} GB")
    folder = Path(mkdtemp(prefix="penstock-bench-", dir=TMPFS))
    try:
        if placed.folder is not None:
            for index in placed.folder.glob("*.index.json"):
                shutil.copyfile(index, folder / index.name)
        files = []
        for number, path in enumerate(placed.files):
            name = path.name if placed.folder is not None else f"shard-{number + 1:05}-{path.name}"
            files.append(Path(shutil.copyfile(path, folder / name)))
        whole = folder if placed.folder is not None else None
        yield dataclasses.replace(placed, files=files, folder=whole)
    finally:
        shutil.rmtree(folder)
