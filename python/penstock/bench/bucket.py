"""A bucket on this machine that objects are written to: versitygw, an S3 server that keeps them as files.

`make versitygw` builds it. Its posix backend writes each part to a file, and joins the parts when the upload ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from .served import NotServed, certify

#: The name of the bucket.
BUCKET = "models"
REGION, KEY, SECRET = "us-east-1", "penstock", "a-secret-of-the-benchmark"
#: Seconds that the server has to start and to end.
_PATIENCE = 60.0


def server(tools: Path | None) -> Path:
    """The program of the server: in the folder `tools`, or on the PATH.

    Raises:
        NotServed: if there is none.
    """
    found = shutil.which("versitygw", path=None if tools is None else str(tools)) or shutil.which("versitygw")
    if found is None:
        where = "on the PATH" if tools is None else f"in {tools}, nor on the PATH"
        raise NotServed(f"there is no versitygw {where}: `make versitygw` builds it into .servers")
    return Path(found)


class BucketServer:
    """A server with one bucket, until its context is left.

    Args:
        folder: Where it keeps objects, in a folder of its own that is removed at the end.
        tools: Where its program is.
        tls: Whether it speaks TLS.
    """

    def __init__(self, folder: Path, tools: Path | None, *, tls: bool = False) -> None:
        program = server(tools)
        self._made = tempfile.TemporaryDirectory(prefix="penstock-bucket-", dir=folder)
        made = Path(self._made.name)
        #: The folder that has each object as a file.
        self.objects = made / "data" / BUCKET
        self.objects.mkdir(parents=True)
        #: The authority that its certificate is of.
        self.authority: Path | None = None
        self._said = made / "said"
        try:
            more: list[str] = []
            if tls:
                self.authority, certificate, key = certify(made)
                more = ["--cert", str(certificate), "--key", str(key)]
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [str(program), "--port", f"127.0.0.1:{port}", "--region", REGION, *more]
            command += ["posix", str(made / "data")]
            keys = {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}
            with self._said.open("w") as said:
                self._process = subprocess.Popen(command, env=os.environ | keys, stdout=said, stderr=said)
        except BaseException:
            self._made.cleanup()
            raise
        #: Scheme, host and port.
        self.origin = f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
        try:
            self._wait(port)
        except BaseException:
            self._end()
            raise

    def _wait(self, port: int) -> None:
        until = time.monotonic() + _PATIENCE
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            if self._process.poll() is not None or time.monotonic() > until:
                lines = self._said.read_text().strip().splitlines()
                raise NotServed(f"versitygw did not start: {lines[-1] if lines else 'it said nothing'}")
            time.sleep(0.02)

    def __enter__(self) -> BucketServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._made.cleanup()

    @property
    def storage(self) -> dict[str, Any]:
        """Penstock's `storage` for the bucket."""
        keys = {"access_key_id": KEY, "secret_access_key": SECRET}
        trusted = {} if self.authority is None else {"ca": str(self.authority)}
        return {"endpoint": self.origin, "region": REGION} | keys | trusted

    @property
    def environment(self) -> dict[str, str]:
        """The environment for programs that take the server for S3 and trust it."""
        found = {
            "AWS_ENDPOINT_URL": self.origin,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        if self.authority is not None:
            found |= {"SSL_CERT_FILE": str(self.authority), "AWS_CA_BUNDLE": str(self.authority)}
        return found

    def files(self) -> list[Path]:
        """The objects, as the server keeps them."""
        return sorted(path for path in self.objects.glob("**/*.safetensors") if ".sgwtmp" not in path.parts)

    def clear(self) -> None:
        """Removes every object and every part that was left."""
        for path in self.objects.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def processor_seconds(self) -> float:
        """The processor time of the server so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
