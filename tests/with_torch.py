"""Programs in a process of their own that finds torch imported: forked from a process that has imported it.

To import torch takes 2 s of a processor. Most programs that use it want a process of their own, and no more. The one
that they are forked from has imported torch, numpy and safetensors. It has imported nothing of penstock, started no
thread and loaded nothing. A program that looks at what is imported, is patched when it starts (PENSTOCK_PATCH), or
measures memory wants an interpreter of its own: the fixtures `python` and `cli`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import ordeal
import pytest

#: An order is a line; the answers are two: a process id, and how that process has ended. A child leaves the loop and
#: comes to the end of this text, so that its interpreter ends as that of any program.
SERVER = r"""
import ctypes, gc, json, linecache, os, runpy, signal, sys, types
import numpy, torch, safetensors.numpy, safetensors.torch
gc.collect()
gc.freeze()

def server():
    libc, answers = ctypes.CDLL(None), os.dup(1)
    own = os.getpid()
    while line := sys.stdin.readline():
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no program outlives the server
            if os.getppid() != own:
                os._exit(1)
            os.close(answers)
            gc.unfreeze()
            return order
        os.write(answers, b"%d\n" % pid)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)

def prepare(order):
    for number, name in enumerate((os.devnull, order["out"], order["err"])):
        fd = os.open(name, os.O_RDWR)
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(order["folder"])
    for name in os.environ.keys() - order["environment"].keys():
        del os.environ[name]
    if (path := order["environment"].get("PYTHONPATH", "")) != os.environ.get("PYTHONPATH", ""):
        sys.path[1:1] = filter(None, path.split(os.pathsep))
    os.environ.update(order["environment"])
    sys.argv[1:] = order["arguments"]

order = server()
prepare(order)
if order["module"]:
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
else:
    linecache.cache["<program>"] = (len(order["program"]), None, order["program"].splitlines(True), "<program>")
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(order["program"], "<program>", "exec"), vars(sys.modules["__main__"]))
"""

#: What an interpreter reads when it starts: a program that needs one of them otherwise wants an interpreter of its own.
AT_START = ("PYTHON", "PENSTOCK_PATCH", "LD_", "OMP_", "OPENBLAS_", "MALLOC_", "TORCH", "GLIBC_")
#: What the program that is forked is given, and what torch's compiler sets in this process when it is used.
LATER = ("PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")


def at_start(environment: dict[str, str]) -> dict[str, str]:
    """Those variables of an environment that count when an interpreter starts."""
    return {n: value for n, value in environment.items() if n.startswith(AT_START) and n not in LATER}


class WithTorch:
    """The process that has imported torch. It starts with the first program."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._started: dict[str, str] = {}

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None and self._process.stdout is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()

    def _start(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        # A process that forks may have no other thread than the one that does
        self._started = at_start(environment)
        alone = {**environment, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-X", "faulthandler", "-c", SERVER]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, env=alone, start_new_session=True)

    def run(
        self, folder: Path, program: str, *arguments: object, module: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program, or a module as `python -m` does; what it writes lies in `folder` meanwhile."""
        whole = {**os.environ, **environment}
        if self._process is None:
            self._process = self._start(dict(os.environ))
        assert at_start(whole) == self._started, "an interpreter of its own is wanted"
        out, err = folder / "with_torch.out", folder / "with_torch.err"
        for file in (out, err):
            file.write_bytes(b"")
        order = {
            "program": program,
            "module": module,
            "arguments": [str(argument) for argument in arguments],
            "environment": whole,
            "folder": str(Path.cwd()),
            "out": str(out),
            "err": str(err),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        pid = self._answer(60.0)
        try:
            code = self._answer(120.0)
        except TimeoutError:
            os.kill(pid, signal.SIGABRT)  # faulthandler writes the stacks
            code = self._answer(60.0)
            raise ordeal.Hung(f"the program hangs\n{out.read_text()}\n{err.read_text()}") from None
        command = [sys.executable, *(["-m", module] if module else ["-c", program]), *order["arguments"]]
        done = subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())
        for file in (out, err):
            file.unlink()
        return done

    def _answer(self, seconds: float) -> int:
        assert self._process is not None and self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds * ordeal.load_factor())[0]:
            raise TimeoutError
        line = self._process.stdout.readline()
        if not line:
            raise ordeal.Died("the process that has imported torch is gone")
        return int(line)


@pytest.fixture(scope="session")
def with_torch() -> Iterator[WithTorch]:
    with contextlib.closing(WithTorch()) as found:
        yield found


@pytest.fixture
def torch_python(
    with_torch: WithTorch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As `python`, with torch: torch_python(code, *arguments, **environment)."""
    folder = tmp_path_factory.mktemp("with_torch")

    def run(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return with_torch.run(folder, code, *arguments, **environment)

    return run


@pytest.fixture
def torch_cli(
    with_torch: WithTorch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As `cli`, with torch: torch_cli("load", path, **environment)."""
    folder = tmp_path_factory.mktemp("with_torch")

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return with_torch.run(folder, "", *arguments, module="penstock.cli", **environment)

    return run
