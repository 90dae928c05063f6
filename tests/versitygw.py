"""versitygw, a real S3 server. PENSTOCK_TEST_SERVERS names the folder of its binary; `make test-servers` builds it."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from s3_server import signature

KEY, SECRET, REGION = "tests", "a-secret-of-the-tests", "eu-west-3"


class Server:
    """A server with one bucket, `models`."""

    def __init__(self, folder: Path, *certificate: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.authority = certificate[0] if certificate else None
        (folder / "data").mkdir()
        tls = ["--cert", str(certificate[1]), "--key", str(certificate[2])] if certificate else []
        program = Path(os.environ["PENSTOCK_TEST_SERVERS"], "versitygw").resolve()
        environment = {**os.environ, "ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}
        self._said = (folder / "said").open("w")
        self._process = subprocess.Popen(
            [program, "--port", f"127.0.0.1:{self.port}", "--region", REGION, *tls, "posix", str(folder / "data")],
            env=environment, cwd=folder, stdout=self._said, stderr=self._said,
        )  # fmt: skip
        self.endpoint = f"https://localhost:{self.port}" if certificate else f"http://127.0.0.1:{self.port}"
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                break
            assert self._process.poll() is None and time.monotonic() < until, (folder / "said").read_text()
            time.sleep(0.05)
        self.put("", b"")

    def put(self, key: str, content: bytes) -> None:
        """Makes the bucket, or an object in it."""
        date = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        scope, signed = f"{date[:8]}/{REGION}/s3/aws4_request", "host;x-amz-content-sha256;x-amz-date"
        host = self.endpoint.split("//")[1]
        fields = {"host": host, "x-amz-content-sha256": "UNSIGNED-PAYLOAD", "x-amz-date": date}
        target = f"/models/{quote(key, safe='/~')}" if key else "/models"
        found = signature("PUT", target, fields, signed, date, scope, SECRET)
        fields["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders={signed}, Signature={found}"
        )
        if self.authority:
            trusted = ssl.create_default_context(cafile=str(self.authority))
            connection: Any = http.client.HTTPSConnection("localhost", self.port, context=trusted)
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port)
        with contextlib.closing(connection):
            connection.request("PUT", target, content, fields)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._said.close()

    def storage(self, **more: Any) -> Any:
        trusted = {"ca": self.authority} if self.authority else {}
        given = {"endpoint": self.endpoint, "region": REGION, "access_key_id": KEY, "secret_access_key": SECRET}
        return {**given, **trusted, **more}
