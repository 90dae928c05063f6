"""`Ranks` of `test_group.py`, forked by a process that has torch already: an import of it takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_group
import torch

SERVER = """
import json, os, runpy, sys
import torch, torch.distributed, penstock, safetensors.torch
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        sys.argv = json.loads(line)
        runpy.run_path(sys.argv[0], run_name="__main__")
        os._exit(0)
    print(pid, flush=True)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """The process that forks them, for the tests of one file."""
    pipe = subprocess.PIPE
    # With files in the page cache ranks would have nothing to say to each other
    environment = {**os.environ, "PENSTOCK_EXCHANGE": "on"}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        yield process
        process.kill()


class Child:
    """What forks the ranks: a child of the server."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return 0
        return 0 if state == "Z" else None

    def wait(self) -> None:
        test_group.until(lambda: self.poll() is not None)


class Ranks(test_group.Ranks):
    def __init__(self, forks: subprocess.Popen[str], program: str, size: int, path: Path, folder: Path) -> None:
        self.folder = folder
        self.server = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        script = folder / "ranks.py"
        script.write_text(test_group.PRELUDE.replace("{program}", textwrap.indent(textwrap.dedent(program), "    ")))
        assert forks.stdin is not None and forks.stdout is not None
        order = [str(script), str(size), str(path), str(self.server.port), str(folder)]
        forks.stdin.write(json.dumps(order) + "\n")
        forks.stdin.flush()
        self.parent = Child(int(forks.stdout.readline()))  # type: ignore[assignment]
        test_group.until(lambda: (folder / "pids").exists() or self.parent.poll() is not None)
        self.pids = json.loads((folder / "pids").read_text())
