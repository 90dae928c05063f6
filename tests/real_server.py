"""A server of another project, on a free port of this machine. `make test-servers` builds or installs them.

PENSTOCK_TEST_SERVERS names the folder with their programs.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def program(path: str) -> Path:
    """The program of a server."""
    return Path(os.environ["PENSTOCK_TEST_SERVERS"], path).resolve()


class RealServer:
    """A running server. ``command`` says how one starts that listens on a port of 127.0.0.1.

    With a ``certificate`` (of its authority, its own, its key) it speaks TLS, as localhost.
    """

    def __init__(
        self,
        folder: Path,
        command: Callable[[int], Sequence[str | Path]],
        certificate: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.authority = certificate[0] if certificate else None
        self.endpoint = f"https://localhost:{self.port}" if certificate else f"http://127.0.0.1:{self.port}"
        self._said = (folder / "said").open("w")
        environment = {**os.environ, **(environment or {})}
        self._process = subprocess.Popen(
            command(self.port), env=environment, cwd=folder, stdout=self._said, stderr=self._said
        )
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                break
            assert self._process.poll() is None and time.monotonic() < until, (folder / "said").read_text()
            time.sleep(0.05)

    def send(self, method: str, target: str, content: bytes, fields: Mapping[str, str], status: int) -> bytes:
        """The body of the answer to a request that is answered with this status."""
        connection: http.client.HTTPConnection
        if self.authority:
            trusted = ssl.create_default_context(cafile=str(self.authority))
            connection = http.client.HTTPSConnection("localhost", self.port, context=trusted)
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port)
        with contextlib.closing(connection):
            connection.request(method, target, content, dict(fields))
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == status, body
        return body

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._said.close()
