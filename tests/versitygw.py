"""versitygw, a real S3 server. PENSTOCK_TEST_SERVERS names the folder of its binary; `make test-servers` builds it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from real_server import RealServer, program
from s3_server import signature

KEY, SECRET, REGION = "tests", "a-secret-of-the-tests", "eu-west-3"


class Server(RealServer):
    """A server with one bucket, `models`."""

    def __init__(self, folder: Path, *certificate: Path, versions: bool = False) -> None:
        """With ``versions`` a bucket may keep versions and lock them, and there may be other users (`allow`)."""
        self.data = folder / "data"
        self.data.mkdir()
        tls = ["--cert", certificate[1], "--key", certificate[2]] if certificate else []
        users, kept = ["--iam-dir", folder / "users"], ["--versioning-dir", folder / "versions"]
        if versions:
            (folder / "users").mkdir()
            (folder / "versions").mkdir()
        else:
            users, kept = [], []
        super().__init__(
            folder,
            lambda port: [
                program("versitygw"), "--port", f"127.0.0.1:{port}", "--region", REGION, *tls, *users,
                "posix", *kept, folder / "data",
            ],
            certificate,
            {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET},
        )  # fmt: skip
        self.put("", b"")

    def ask(
        self,
        method: str,
        path: str,
        content: bytes = b"",
        more: Mapping[str, str] | None = None,
        *,
        query: str = "",
        status: int = 200,
    ) -> bytes:
        """The body of the answer to a signed request for a bucket, or for an object in one: ``bucket/key``."""
        date = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        host = self.endpoint.split("//")[1]
        fields = {"host": host, "x-amz-content-sha256": "UNSIGNED-PAYLOAD", "x-amz-date": date, **(more or {})}
        scope, signed = f"{date[:8]}/{REGION}/s3/aws4_request", ";".join(sorted(fields))
        target = f"/{quote(path, safe='/~')}" + (f"?{query}" if query else "")
        found = signature(method, target, fields, signed, date, scope, SECRET)
        fields["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders={signed}, Signature={found}"
        )
        return self.send(method, target, content, fields, status)

    def put(self, key: str, content: bytes) -> None:
        """Makes the bucket, or an object in it."""
        self.ask("PUT", f"models/{key}" if key else "models", content)

    def allow(self, user: str, bucket: str, *actions: str) -> dict[str, str]:
        """Makes a user who has these rights in a bucket, and returns what `storage` takes for it."""
        secret = f"the secret of {user}"
        told = ["--access", KEY, "--secret", SECRET, "--region", REGION, "--endpoint-url", self.endpoint]
        made = ["create-user", "--access", user, "--secret", secret, "--role", "user"]
        subprocess.run([program("versitygw"), "admin", *told, *made], check=True, capture_output=True)
        statement = {
            "Effect": "Allow",
            "Principal": {"AWS": [user]},
            "Action": [f"s3:{action}" for action in actions],
            "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
        }
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]}).encode()
        self.ask("PUT", bucket, policy, query="policy=", status=204)
        return {"access_key_id": user, "secret_access_key": secret}

    def storage(self, **more: Any) -> Any:
        trusted = {"ca": self.authority} if self.authority else {}
        given = {"endpoint": self.endpoint, "region": REGION, "access_key_id": KEY, "secret_access_key": SECRET}
        return {**given, **trusted, **more}
