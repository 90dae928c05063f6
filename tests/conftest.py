"""Checkpoints to load, readers to compare with, and the fake GPU.

Checkpoints are written by `penstock.synthetic.synth` and compared with what `penstock.bench.reference` reads: neither
uses any other part of penstock.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ordeal
import pagecache
import penstock
import penstock._patch
import penstock._safe_open
import penstock._save
import penstock._single_reads
import pytest
from penstock.bench import reference
from penstock.synthetic import synth
from penstock.synthetic.synth import Layout, Tensor

# A busy machine takes longer than 200 ms for any example. The engines' environments have no hypothesis.
with contextlib.suppress(ImportError):
    import hypothesis

    hypothesis.settings.register_profile("busy", deadline=None)
    hypothesis.settings.load_profile("busy")

torch = pytest.importorskip("torch")

#: What failed tests leave; hooks for the marks `machine`, `pairwise` and `sampled`; checkpoints with the layouts of
#: public models; processes that load together; pods; programs that find torch imported.
pytest_plugins = [
    "aftermath",
    "machine",
    "models",
    "pairwise",
    "ranks_together",
    "placed_ranks",
    "restricted_pods",
    "with_torch",
]

#: The tests of serving engines need an environment with those engines: `make engines`.
collect_ignore_glob = [] if os.environ.get("PENSTOCK_TEST_ENGINES") == "1" else ["engines"]
#: Those of real servers need these: `make test-servers`.
collect_ignore_glob += [] if os.environ.get("PENSTOCK_TEST_SERVERS") else ["servers"]
#: Those of restricted pods need root and a profile: `make pod`.
collect_ignore_glob += [] if os.environ.get("PENSTOCK_TEST_PODS") else ["pods"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # What a shell starts in the background ignores Ctrl-C, and so would the programs that tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What looks like the name of a repository is not asked for on the Hub, except where a test has one of its own
os.environ["HF_HUB_OFFLINE"] = "1"

FAKEGPU = os.environ.get("PENSTOCK_TEST_FAKEGPU")
if FAKEGPU:
    # Before anything in this process asks for a GPU: the core looks for its driver once
    os.environ["PENSTOCK_GPU_LIBRARY"] = f"cuda:{FAKEGPU}"


def pytest_report_header(config: pytest.Config) -> str:
    """What is free where tests write: a full disk fails them in a thousand ways."""
    folders = (config.rootpath, Path(tempfile.gettempdir()))
    return "free: " + ", ".join(f"{shutil.disk_usage(folder).free / 1e9:.1f} GB in {folder}" for folder in folders)


def text(parameter: object) -> str:
    """The name of a parameter, as `str` without an address: processes of a parallel run must agree on names."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(parameter))


def pytest_itemcollected(item: pytest.Item) -> None:
    """A name with an address is another in each process, and a parallel run stops before its first test."""
    if " at 0x" in item.nodeid:
        raise pytest.UsageError(f"{item.nodeid}: name its parameters with `ids=text`")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What libraries and tests are made of is no garbage, and each of many collections would look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def libraries_are_no_garbage() -> Iterator[None]:
    """Nor is what the tests of a module have imported: the next module's collections leave it out."""
    yield
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()


def raw(value: Any) -> bytes:
    """The bytes of a torch tensor, numpy array or DLPack object."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return raw(torch.from_dlpack(value))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and all bytes are the same: random bytes are NaN now and then."""
    return a.shape == b.shape and a.dtype == b.dtype and raw(_compact(a)) == raw(_compact(b))


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in a row: `contiguous` leaves odd strides of single elements as they are."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))


def all_are(many: torch.Tensor, one: torch.Tensor) -> bool:
    """Whether the last dimensions of a tensor are the same as another one, each time."""
    return same(many, one.expand(many.shape))


def descriptors() -> dict[str, str]:
    """This process' open descriptors and what they are."""
    found = {}
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing is gone by now
            found[fd.name] = str(fd.readlink())
    return found


class Oracle:
    """What the files say, by `json` and numpy alone."""

    def __init__(self, source: Any) -> None:
        self.entries = reference.entries_of(source)

    def __getitem__(self, name: str) -> bytes:
        return reference.raw(self.entries[name]).tobytes()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    @ordeal.results
    def same(self, tensors: dict[str, Any]) -> None:
        """Asserts that these are all tensors of the files, in file order (empty ones anywhere), byte for byte."""
        assert sorted(tensors) == sorted(self.entries)
        filled = [name for name, entry in self.entries.items() if entry.nbytes]
        assert [name for name in tensors if self.entries[name].nbytes] == filled
        for name, tensor in tensors.items():
            assert raw(tensor) == self[name], name


#: Three shards with names that sort naturally only, a scalar, an empty tensor and odd sizes.
LAYOUT = Layout(
    "small",
    (
        (
            Tensor("embed.weight", "BF16", (64, 48)),
            Tensor("layers.0.attn.weight", "F32", (48, 40)),
            Tensor("layers.0.attn.bias", "F32", (40,)),
            Tensor("step", "I64", ()),
        ),
        (
            Tensor("layers.1.attn.weight", "F32", (48, 40)),
            Tensor("layers.1.attn.bias", "F32", (40,)),
            Tensor("hollow", "F16", (0, 4)),
            Tensor("mask", "BOOL", (13,)),
        ),
        (Tensor("norm.weight", "F16", (37,)), Tensor("quant", "F8_E4M3", (11, 3)), Tensor("wide", "F64", (5, 6))),
    ),
)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three shards and their index. Not to be written to."""
    return synth.write(LAYOUT, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file with every dtype and shape class. Not to be written to."""
    return synth.write_file(tmp_path_factory.mktemp("every") / "every.safetensors", synth.every_dtype())


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of 96 MB in 24 tensors: more than one extent, block and window. Not to be written to."""
    tensors = [Tensor(f"layers.{i}.weight", "F32", (1000, 1000)) for i in range(24)]
    return synth.write_file(tmp_path_factory.mktemp("big") / "big.safetensors", tensors)


@pytest.fixture(scope="session")
def quarter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of 24 MB in 24 tensors: `big` for servers that are written in Python. Not to be written to."""
    tensors = [Tensor(f"layers.{i}.weight", "F32", (500, 500)) for i in range(24)]
    return synth.write_file(tmp_path_factory.mktemp("quarter") / "quarter.safetensors", tensors)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes one file: write(Tensor(...), ..., name="x.safetensors", **synth.write_file's)."""

    def write(*tensors: Tensor, name: str = "model.safetensors", **more: Any) -> Path:
        return synth.write_file(tmp_path / name, tensors, **more)

    return write


@pytest.fixture
def shard(write: Callable[..., Path]) -> Path:
    """A file of 300 kB: larger than what is asked for when it is opened."""
    return write(Tensor("a", "F32", (250, 300)), Tensor("b", "U8", (77,)))


@pytest.fixture
def tiny(write: Callable[..., Path]) -> Path:
    """A file that comes whole when it is opened."""
    return write(Tensor("a", "F32", (5, 7)), name="tiny.safetensors")


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in a Python of its own: python(code, *arguments, **environment)."""

    def run(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120 * ordeal.load_factor(),
            env={**os.environ, **environment},
            check=False,
        )

    return run


@pytest.fixture
def cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line: cli("inspect", path, **environment)."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "penstock.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120 * ordeal.load_factor(),
            env={**os.environ, **environment},
            check=False,
        )

    return run


#: Seconds in which the threads of a load are to end once its test has: a hang is longer, on any machine.
MOMENT = 20.0


def _opened_since(before: set[str]) -> dict[str, str]:
    return {fd: path for fd, path in descriptors().items() if fd not in before and ".safetensors" in path}


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """A test must not leave a thread or a descriptor of a load behind.

    That holds for reads that hang too: their file system lets them go, or is gone, when the test's own fixtures end,
    which is before this one does.
    """
    before = set(descriptors())
    yield
    pagecache.let_go()
    penstock._core.stop_fills("the test is over", 30)
    if ordeal.threads():
        gc.collect()  # a load in a cycle, such as a traceback makes, ends with it
    if left := ordeal.threads(MOMENT, fills=True):
        ordeal.give_up_threads()  # those that this test started are not of the next ones
        pytest.fail(f"left running: {left}")
    if _opened_since(before):
        gc.collect()  # a file in a cycle, the same
    # An open that hung, and was left behind, closes its file a moment after its file system is gone.
    until = time.monotonic() + MOMENT
    while _opened_since(before) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _opened_since(before), "left open"


@pytest.fixture
def opened(small: Path) -> penstock.Checkpoint:
    """The small checkpoint, opened."""
    return penstock.open(small)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that penstock has loaded since, in part or whole."""
    names: list[str] = []
    begin = penstock._running.begin

    def counted(request: Any, adapter: Any, **more: Any) -> Any:
        selection = request.selection
        known = selection.core.keys()
        names.extend(known[selection.tensor(want)] for want in range(len(selection)))
        return begin(request, adapter, **more)

    monkeypatch.setattr(penstock._running, "begin", counted)
    tensor = penstock._single_reads.SingleReads.tensor

    def read_alone(self: Any, number: int, name: str, *more: Any) -> Any:
        found = tensor(self, number, name, *more)
        if found is not None:
            names.append(name)
        return found

    monkeypatch.setattr(penstock._single_reads.SingleReads, "tensor", read_alone)
    return names


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[penstock.Report]:
    """The reports of the loads that have ended since, on whatever thread."""
    found: list[penstock.Report] = []
    ended = penstock.Checkpoint._ended

    def kept(checkpoint: penstock.Checkpoint, load: Any) -> penstock.Report:
        report = ended(checkpoint, load)
        found.append(report)
        return report

    monkeypatch.setattr(penstock.Checkpoint, "_ended", kept)
    return found


@pytest.fixture
def read_alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each tensor, or part of one, that a handle has read since without a load."""
    found: list[int] = []
    tensor = penstock._single_reads.SingleReads.tensor

    def kept(self: Any, *more: Any) -> Any:
        made = tensor(self, *more)
        if made is not None:
            found.append(made.nbytes)
        return made

    monkeypatch.setattr(penstock._single_reads.SingleReads, "tensor", kept)
    return found


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A device mesh of two ranks of which this process is the second; there is no first, and nobody to talk to."""
    distributed = pytest.importorskip("torch.distributed")
    pretended = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    distributed.init_process_group("fake", rank=1, world_size=2, store=pretended.FakeStore())
    try:
        yield distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    finally:
        distributed.destroy_process_group()
