"""Fresh processes that have imported torch already.

Importing torch takes 2 s of a core, which is most of a benchmark of small checkpoints and no part of a load. So one
process imports it and does nothing else: it starts no thread, makes no GPU's context and imports no loader. Each load
gets a child of it, as new as if it had started by itself.

(Python's own forkserver hands functions to its children; these are to be programs, with pipes and an environment.)
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import IO


class ServerEnded(Exception):
    """There is no server any more; the message is the last line that it wrote."""


class Forkserver:
    """Forks processes that run `child.main`. It starts with the first of them and ends with its context."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> Forkserver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.wait()
        if self._errors is not None:
            self._errors.close()

    def fork(self, environment: Mapping[str, str], stdin: int, stdout: int, stderr: int) -> int:
        """A new process with these descriptors and this environment besides the server's; its number.

        Raises:
            ServerEnded: if it cannot be had.
        """
        return self._ask({"environment": dict(environment)}, [stdin, stdout, stderr])

    def wait(self, pid: int) -> int:
        """The exit status of a process once it has ended; negative where a signal has ended it."""
        return self._ask({"wait": pid}, [])

    def _ask(self, what: object, descriptors: list[int]) -> int:
        with self._one_at_a_time:
            if self._socket is None:
                self._start()
            assert self._socket is not None and self._process is not None and self._errors is not None
            reply = b""
            with contextlib.suppress(ConnectionError):
                socket.send_fds(self._socket, [json.dumps(what).encode()], descriptors)
                reply = self._socket.recv(64)
            if reply:
                return int(reply)
            status = self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            raise ServerEnded(lines[-1] if lines else f"the process that imports torch ended with status {status}")

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        command = [sys.executable, "-m", "penstock.bench.forkserver"]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self._errors
            )


def serve(asked: socket.socket) -> bool:
    """Forks as it is told; `True` in a child, whose descriptors are what was sent, `False` at the end."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, 1 << 16, 3)
        if not message:
            return False
        what = json.loads(message)
        if "wait" in what:
            _, status = os.waitpid(what["wait"], 0)
            asked.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            asked.detach()  # its number becomes the child's stdin
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            os.environ.update(what["environment"])
        for descriptor in descriptors:
            os.close(descriptor)
        if pid == 0:
            return True
        asked.send(str(pid).encode())


def main() -> None:
    import torch  # noqa: F401

    from . import child

    gc.collect()
    gc.freeze()  # or the collector would write to every page that a child shares with us
    if serve(socket.socket(fileno=0)):
        gc.unfreeze()
        child.main()


if __name__ == "__main__":
    main()
