"""versitygw, a real S3 server. PENSTOCK_TEST_SERVERS names the folder of its binary; `make test-servers` builds it."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from real_server import RealServer, program
from s3_server import signature

KEY, SECRET, REGION = "tests", "a-secret-of-the-tests", "eu-west-3"


class Server(RealServer):
    """A server with one bucket, `models`."""

    def __init__(self, folder: Path, *certificate: Path) -> None:
        self.data = folder / "data"
        self.data.mkdir()
        tls = ["--cert", certificate[1], "--key", certificate[2]] if certificate else []
        super().__init__(
            folder,
            lambda port: [
                program("versitygw"), "--port", f"127.0.0.1:{port}", "--region", REGION, *tls, "posix", folder / "data"
            ],
            certificate,
            {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET},
        )  # fmt: skip
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
        self.send("PUT", target, content, fields, 200)

    def storage(self, **more: Any) -> Any:
        trusted = {"ca": self.authority} if self.authority else {}
        given = {"endpoint": self.endpoint, "region": REGION, "access_key_id": KEY, "secret_access_key": SECRET}
        return {**given, **trusted, **more}
