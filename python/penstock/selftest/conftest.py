"""The GPU of a run, and what is written down of each test. Without a GPU every test is skipped, with the reason."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("numpy")

import penstock

from . import checkpoints, gpus, results
from .gpus import Gpu

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if not ours:
        return
    if checkpoints.QUICK and os.environ.get("PENSTOCK_TEST_WHOLE") != "1":
        items[:] = [item for item in items if item not in ours or item in _few(ours)]
    # A run that goes on after one that was cut off leaves out what that one has begun
    begun = os.environ.get("PENSTOCK_SELFTEST_GO_ON") == "1"
    folder = os.environ.get(results.FOLDER)
    if begun and folder:
        known = {line["started"] for line in results.read(Path(folder)) if "started" in line}
        items[:] = [item for item in items if item.nodeid not in known]


@cache
def _missing() -> str | None:
    """The reason that there is no GPU, asked once."""
    return gpus.find()[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # Not marks: what is skipped here is one line of pytest's summary
    if (reason := _missing()) is not None:
        pytest.skip(f"no GPU: {reason}")


def _few(items: list[pytest.Item]) -> list[pytest.Item]:
    """Every test with its first and its last parameters."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for several in by_test.values() for item in (several[0], several[-1])]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    results.note(started=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2]
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(crash.message if crash else report.longrepr)
        results.note(test=report.nodeid, outcome=report.outcome, reason=reason, seconds=round(report.duration, 3))
        if report.failed and _context_is_lost():
            # All further tests would fail by that alone. The run goes on behind this one, in a new process
            os._exit(99)


def _context_is_lost() -> bool:
    torch = sys.modules.get("torch")
    if gpus.FAKE or torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # of whatever class torch likes
        return True
    return False


@pytest.fixture(scope="session")
def gpu() -> Iterator[Gpu]:
    """The GPU, in this process."""
    found = gpus.attach()
    yield found
    gc.collect()
    penstock.release_staging()
    found.close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A test leaves no thread of a load, and no GPU memory that is in nobody's hands."""
    yield
    gc.collect()
    assert gpus.settle(lambda: not gpus.threads()), gpus.threads()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints are written."""
    chosen = os.environ.get("PENSTOCK_SELFTEST_FILES")
    if chosen:
        Path(chosen).mkdir(parents=True, exist_ok=True)
    return Path(chosen) if chosen else tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def sources(folder: Path) -> Callable[[str], Path]:
    """A checkpoint by its name in `checkpoints.NAMES`, written when it is first asked for."""
    there: dict[str, Path] = {}

    def source(name: str) -> Path:
        if name not in there:
            there[name] = checkpoints.write(name, folder)
        return there[name]

    return source


@pytest.fixture(scope="session")
def contents(sources: Callable[[str], Path]) -> Callable[[str], dict[str, bytes]]:
    """The bytes of the tensors of a checkpoint."""
    there: dict[str, dict[str, bytes]] = {}

    def content(name: str) -> dict[str, bytes]:
        if name not in there:
            there[name] = checkpoints.content(sources(name))
        return there[name]

    return content


PRELUDE = """
import gc, json, os, signal, sys, threading, time
from pathlib import Path
from penstock.selftest import checkpoints, gpus
import penstock
gpu = gpus.attach()
device = gpu.device()
"""


@pytest.fixture
def program() -> Callable[..., str]:
    """Runs a program that has `gpu` and `device`, in a process of its own; what it prints. It must end well."""

    def run(code: str, *arguments: object, timeout: float = 100.0, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, **environment},
        )
        assert done.returncode == 0, f"status {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        return done.stdout

    return run
