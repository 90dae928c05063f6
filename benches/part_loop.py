"""A bare loop that puts parts: what an upload to S3 costs when nothing has to be prepared.

It sends bytes that are in memory, in equal parts, by threads with a connection each: `CreateMultipartUpload`,
`UploadPart`, `CompleteMultipartUpload`, and nothing else. Payloads are not signed, as Penstock's are not. Checksums, if
it sends any, are computed before its clock starts.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import re
import ssl
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote, urlsplit
from xml.sax.saxutils import escape

PAYLOAD = "UNSIGNED-PAYLOAD"
QUOTED = {'"': "&quot;"}


class Refused(Exception):
    """The server answers a request with an error; the message has its answer."""


@dataclass(frozen=True)
class Credentials:
    """The keys of a bucket's user, and the bucket's region."""

    key: str
    secret: str
    region: str

    def fields(
        self, method: str, host: str, path: str, query: Mapping[str, str], more: Mapping[str, str]
    ) -> dict[str, str]:
        """The fields of a signed request (Signature Version 4), with `more` of them."""
        date = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        scope = f"{date[:8]}/{self.region}/s3/aws4_request"
        pairs = "&".join(f"{quote(name, safe='~')}={quote(query[name], safe='~')}" for name in sorted(query))
        signed = {"host": host, "x-amz-content-sha256": PAYLOAD, "x-amz-date": date, **more}
        about = "".join(f"{name}:{signed[name]}\n" for name in sorted(signed))
        names = ";".join(sorted(signed))
        request = "\n".join([method, path, pairs, about, names, PAYLOAD])
        text = "\n".join(["AWS4-HMAC-SHA256", date, scope, hashlib.sha256(request.encode()).hexdigest()])
        key = f"AWS4{self.secret}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        found = hmac.new(key, text.encode(), "sha256").hexdigest()
        words = f"Credential={self.key}/{scope}, SignedHeaders={names}, Signature={found}"
        del signed["host"]  # http.client says it
        return {**signed, "Authorization": f"AWS4-HMAC-SHA256 {words}"}


class PartLoop:
    """An object that is to be put.

    Args:
        origin: Scheme, host and port of the server.
        path: Bucket and key, with a slash before each.
        content: The bytes.
        part: Bytes of each part but the last.
        connections: As many threads put parts.
        credentials: The signing keys.
        checksums: Whether each part is sent with its CRC32, which the server compares.
        authority: The certificate that is trusted, if the server speaks TLS.
    """

    def __init__(
        self, origin: str, path: str, content: memoryview, part: int, connections: int, credentials: Credentials, *,
        checksums: bool = False, authority: Path | None = None,
    ) -> None:  # fmt: skip
        self._where, self._path = urlsplit(origin), quote(path, safe="/~")
        self._credentials, self._threads = credentials, connections
        self._trusted = None if authority is None else ssl.create_default_context(cafile=str(authority))
        self._parts = [content[at : at + part] for at in range(0, len(content), part)]
        self._sums = [shown(zlib.crc32(part)) for part in self._parts] if checksums else None

    def connection(self) -> http.client.HTTPConnection:
        host = self._where.netloc
        if self._trusted is not None:
            return http.client.HTTPSConnection(host, context=self._trusted, timeout=120)
        return http.client.HTTPConnection(host, timeout=120)

    def ask(
        self, connection: http.client.HTTPConnection, method: str, query: Mapping[str, str],
        body: bytes | memoryview = b"", more: Mapping[str, str] | None = None,
    ) -> tuple[str, bytes]:  # fmt: skip
        """The ETag and the body of the answer.

        Raises:
            Refused: an answer that is an error.
        """
        fields = self._credentials.fields(method, self._where.netloc, self._path, query, more or {})
        target = "&".join(f"{name}={quote(value, safe='~')}" for name, value in query.items())
        connection.request(method, f"{self._path}?{target}", body, fields)
        answer = connection.getresponse()
        said = answer.read()
        if answer.status != 200 or b"<Error>" in said:
            raise Refused(f"{method} {self._path}?{target}: {answer.status} {said.decode(errors='replace')[:300]}")
        return answer.headers.get("ETag", ""), said

    def put(self) -> float:
        """Puts the object. Returns the seconds until its last part was there; the rest is the server's joining.

        Raises:
            Refused: an answer that is an error.
        """
        begun = time.perf_counter()
        connection = self.connection()
        algorithm = {} if self._sums is None else {"x-amz-checksum-algorithm": "CRC32"}
        told = self.ask(connection, "POST", {"uploads": ""}, more=algorithm)[1].decode()
        found = re.search(r"<UploadId>([^<]+)</UploadId>", told)
        if found is None:
            raise Refused(f"no number of the upload: {told[:300]}")
        tags = self._put_parts(found[1])
        seconds = time.perf_counter() - begun
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag, QUOTED)}</ETag>"
            + ("" if self._sums is None else f"<ChecksumCRC32>{self._sums[number - 1]}</ChecksumCRC32>")
            + "</Part>"
            for number, tag in enumerate(tags, 1)
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        self.ask(connection, "POST", {"uploadId": found[1]}, body)
        connection.close()
        return seconds

    def _put_parts(self, upload: str) -> list[str]:
        """The ETags of the parts, in order."""
        tags = [""] * len(self._parts)
        numbers, taking, failed = iter(range(len(self._parts))), threading.Lock(), list[Exception]()

        def work() -> None:
            try:
                connection = self.connection()
                for number in taken(numbers, taking):
                    more = {} if self._sums is None else {"x-amz-checksum-crc32": self._sums[number]}
                    query = {"partNumber": str(number + 1), "uploadId": upload}
                    tags[number] = self.ask(connection, "PUT", query, self._parts[number], more)[0]
                connection.close()
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(min(self._threads, len(self._parts)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return tags


def taken(numbers: Iterator[int], taking: threading.Lock) -> Iterator[int]:
    """The numbers that this thread takes, until there are none."""
    while True:
        with taking:
            number = next(numbers, None)
        if number is None:
            return
        yield number


def shown(crc: int) -> str:
    """A checksum as S3 writes it."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
