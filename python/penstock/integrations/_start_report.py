"""Starts an engine in processes of its own, and reports how long each phase took. Imports no engine, and not torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import _core
from .._errors import EngineError, InvalidError, MissingFrameworkError, StalledError, UnsupportedError
from ._startup import ENGINES, PHASES, TIMEOUT

#: The program of each process. It finds modules where this one does.
_PROGRAM = """
import json, sys
sys.path[:] = json.load(open(sys.argv[1]))["path"]
from penstock.integrations._start_rank import main
main()
"""
#: The traceback has all that the rank wrote, as the cause of the error.
_HINT = " (all that it wrote: PENSTOCK_TRACEBACK=1)"
#: Lines of what a process said that go into an error, if it could not say why it ended.
_LINES = 5
#: Seconds between two looks at the processes.
_LOOK = 0.05
#: Arguments of engines that this command sets, and such as change the number of ranks in a way that it does not know.
_OURS = {
    *("model", "model_path", "load_format", "model_loader_extra_config", "device", "distributed_executor_backend"),
    *("tensor_parallel_size", "tp_size", "pp_size", "dp_size", "data_parallel_size", "nnodes", "world_size"),
}
#: Seconds that processes have for an orderly end, after which they are killed.
_GRACE = 5.0
#: Seconds in which the rank whose failure it is may end after one that only says so.
_CAUSE = 2.0


class _Said(Exception):
    """All that a process wrote: the cause of an error, which its traceback shows."""


class _Rank:
    """A process that was started."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.number = number
        self.process = process
        self.folder = folder
        self._gone = False

    def ended(self) -> int | None:
        """The exit status, or minus the signal; None as long as it runs. Its number stays taken until it is reaped."""
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def result(self) -> dict[str, Any] | None:
        """The result of the rank, if there is one."""
        with suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads((self.folder / f"{self.number}.json").read_text())
            return found
        return None

    def of_another(self) -> bool:
        """Whether it says that it has failed because another rank has."""
        error = (self.result() or {}).get("error")
        return error is not None and error["type"] == "PeerError"

    def phase(self) -> str:
        """Where it is: " in PHASE", or nothing."""
        with suppress(FileNotFoundError):
            name = (self.folder / f"{self.number}.phase").read_text().strip()
            return f" in {_words(name)}" if name else ""
        return ""

    def said(self) -> str:
        return (self.folder / f"{self.number}.log").read_text("utf-8", "replace")

    def stop(self, how: int) -> bool:
        """Sends a signal to it and to all processes that it has started. Says whether there are any."""
        if not self._gone:
            self.process.poll()  # which reaps it: a zombie counts as one of its group
            try:
                os.killpg(self.process.pid, how)
            except ProcessLookupError:
                self._gone = True  # from now on the number may be another's
        return not self._gone


def _words(phase: str) -> str:
    return phase.replace("_", " ")


def report(
    model: str,
    *,
    engine: str = "vllm",
    tensor_parallel_size: int = 1,
    load_format: str = "penstock",
    extra_config: Mapping[str, Any] | None = None,
    engine_args: Mapping[str, Any] | None = None,
    device: str | None = None,
    timeout: float = TIMEOUT,
) -> dict[str, Any]:
    """Starts an engine once and says how long each phase took, as JSON.

    Args:
        model: As the engine takes it: a folder, or the name of a repository.
        engine: "vllm" or "sglang".
        tensor_parallel_size: The number of ranks.
        load_format: One that the engine knows.
        extra_config: What the engine's ``--model-loader-extra-config`` would say.
        engine_args: More arguments, as the engine's Python class for them names them.
        device: "cpu" or "cuda"; None takes the GPU if there is one.
        timeout: Seconds that the start may take.

    Raises:
        MissingFrameworkError: the engine is not installed.
        EngineError: a rank failed. It names the rank and the cause.
        StalledError: the start took longer than ``timeout``.
    """
    if engine not in ENGINES:
        raise InvalidError(f"engine={engine!r}: give one of {', '.join(ENGINES)}")
    if device is None:
        device = "cuda" if _core.gpus()["gpus"] and engine == "vllm" else "cpu"
    if engine == "sglang" and "pipeline_parallel_size" in (engine_args or {}):
        raise UnsupportedError('engine="sglang" is measured without pipeline parallelism')
    if engine == "sglang" and device != "cpu":
        raise UnsupportedError('engine="sglang" is measured on a CPU alone: give device="cpu"')
    try:
        installed = version(engine)
    except PackageNotFoundError:
        raise MissingFrameworkError(
            f"engine={engine!r} needs the package {engine}, which is not installed here: "
            f"install penstock into the environment of the engine, or run `pip install {engine}`"
        ) from None
    more = dict(engine_args or {})
    if refused := sorted(_OURS & more.keys()):
        raise InvalidError(f"engine_args: {', '.join(refused)} cannot be given here: the report sets it itself")
    stages = more.get("pipeline_parallel_size", 1)
    if type(stages) is not int or stages < 1:
        raise InvalidError(f"engine_args: pipeline_parallel_size={stages!r} is not a number of ranks")
    specification: dict[str, Any] = {
        "engine": engine,
        "model": model,
        "load_format": load_format,
        "tensor_parallel_size": tensor_parallel_size,
        "device": device,
        "extra_config": dict(extra_config or {}),
        "engine_args": more,
    }
    head = {**specification, "engine_version": installed, "penstock_version": _core.__version__}
    found = run(specification, tensor_parallel_size * stages if device == "cpu" else 1, timeout)
    return {**head, **merged(found if device == "cpu" else found[0]["ranks"]), **found[0].get("serving", {})}


def merged(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of all ranks as one: for each phase the rank that took longest, and the ranks themselves."""
    phases: dict[str, Any] = {}
    for name in PHASES:
        took = [(rank["phases"][name]["seconds"], number) for number, rank in enumerate(ranks)]
        timed = [(seconds, number) for seconds, number in took if seconds is not None]
        if timed:
            seconds, slowest = max(timed, key=lambda one: one[0])
            phases[name] = {"seconds": seconds, "rank": slowest, "reason": None}
        else:
            phases[name] = {"seconds": None, "rank": None, "reason": ranks[0]["phases"][name]["reason"]}
    ready, slowest = max((rank["ready_seconds"], number) for number, rank in enumerate(ranks))
    phases["ready"] = {"seconds": ready, "rank": slowest, "reason": None}
    return {"phases": phases, "ranks": [{"rank": number, **rank} for number, rank in enumerate(ranks)]}


def run(specification: dict[str, Any], ranks: int, timeout: float) -> list[dict[str, Any]]:
    """One process for each rank; what they say. If one fails, all are ended.

    Raises:
        EngineError: a rank failed.
        StalledError: they took longer than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as made, _started(specification, ranks, Path(made)) as started:
        deadline = time.monotonic() + timeout
        patience = float("inf")
        while True:
            statuses = [rank.ended() for rank in started]
            if failed := [(rank, status) for rank, status in zip(started, statuses, strict=True) if status]:
                patience = min(patience, time.monotonic() + _CAUSE)
                causes = [(rank, status) for rank, status in failed if not rank.of_another()]
                if causes or None not in statuses or time.monotonic() > patience:
                    rank, status = (causes or failed)[0]
                    raise _failure(rank, status) from _Said(rank.said())
            if None not in statuses:
                break
            if time.monotonic() > deadline:
                late = [rank for rank, status in zip(started, statuses, strict=True) if status is None]
                where = ", ".join(f"rank {rank.number}{rank.phase()}" for rank in late)
                raise StalledError(f"the start has not ended after {timeout:g} s: {where}") from _Said(late[0].said())
            time.sleep(_LOOK)
        found = [rank.result() for rank in started]
        for rank, one in zip(started, found, strict=True):
            if one is None:
                raise _failure(rank, 0) from _Said(rank.said())
        return [one for one in found if one is not None]


@contextmanager
def _started(specification: dict[str, Any], ranks: int, folder: Path) -> Iterator[list[_Rank]]:
    """The processes, in sessions of their own. None of them is left afterwards, nor what they have started."""
    path = folder / "specification.json"
    path.write_text(json.dumps({**specification, "folder": str(folder), "path": [str(one) for one in sys.path]}))
    environment = dict(os.environ)
    if specification["device"] == "cpu":
        environment["VLLM_TARGET_DEVICE"] = "cpu"
        # SGLang makes communicators of NCCL for every group of ranks, if it finds the library: torch brings it
        environment["SGLANG_NCCL_SO_PATH"] = str(folder / "none")
    started: list[_Rank] = []
    try:
        for number in range(ranks):
            with (folder / f"{number}.log").open("wb") as log:
                command = [sys.executable, "-c", _PROGRAM, str(path), str(number), repr(time.monotonic())]
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            started.append(_Rank(number, process, folder))
        yield started
    finally:
        for rank in started:
            rank.stop(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and any(rank.stop(0) for rank in started):
            time.sleep(_LOOK)
        for rank in started:
            rank.stop(signal.SIGKILL)
            rank.process.wait()
            if rank.process.stdin is not None:
                rank.process.stdin.close()


def _failure(rank: _Rank, status: int) -> EngineError:
    """The reason that a rank ended: its own error, or else its last output."""
    found = rank.result() or {}
    if "error" in found:
        error, phase = found["error"], found["phase"]
        where = f" in {_words(phase)}" if phase else ""
        text = f"rank {rank.number} failed{where}: {error['type']}: {error['message']}"
        return EngineError(text + _HINT, path=error["path"], rank=rank.number)
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    last = [line for line in rank.said().splitlines() if line.strip()][-_LINES:]
    text = f"rank {rank.number} {how}{rank.phase()}, and said last: " + "\n".join(last or ["nothing"])
    return EngineError(text + _HINT, rank=rank.number)
