"""A server that speaks as much of S3's protocol as loading needs, and checks each signature; in this process.

It also is a double of the services that give credentials to machines and containers. Signatures are computed here from
the description of Signature Version 4, and `test_s3.py` holds that against the examples that AWS publishes.
"""

from __future__ import annotations

import hashlib
import hmac
import http.server
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import BinaryIO, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

KEYS = {"AKIDEXAMPLE": "wJalrXUtnFEMI/very+secret"}
TOKEN = "a.session/token=="
Answer = tuple[int, dict[str, str], bytes]
B = TypeVar("B", bound="Bucket")


def signature(
    method: str, target: str, fields: Mapping[str, str], signed: str, date: str, scope: str, secret: str
) -> str:
    """The signature of a request (Signature Version 4, S3): ``fields`` by lower-case name."""
    where = urlsplit(target)
    pairs = sorted((quote(k, safe="~"), quote(v, safe="~")) for k, v in parse_qsl(where.query, True))
    canonical = "\n".join(
        [
            method,
            where.path,
            "&".join(f"{k}={v}" for k, v in pairs),
            *(f"{name}:{' '.join(fields[name].split())}" for name in signed.split(";")),
            "",
            signed,
            fields["x-amz-content-sha256"],
        ]
    )
    text = "\n".join(["AWS4-HMAC-SHA256", date, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def error(status: int, code: str, message: str, more: str = "", **fields: str) -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{escape(message)}</Message>{more}</Error>"
    return status, {"x-amz-request-id": "R7", **fields}, body.encode()


class Bucket:
    """One bucket, and what was asked."""

    def __init__(self, objects: dict[str, bytes], region: str = "us-east-1") -> None:
        self.objects = objects
        #: The tag of each object that was asked for, and the bytes that it is of: many requests ask for one object.
        self._tags: dict[str, tuple[bytes, str]] = {}
        self.region = region
        #: (target, access key) of each request for the bucket
        self.asked: list[tuple[str, str | None]] = []
        #: Requests for credentials
        self.credentials = 0
        #: What it says instead: of the target and the number of the request
        self.script: Callable[[str, int], Answer | None] = lambda target, number: None
        #: Access keys that are not valid any more
        self.expired: set[str] = set()
        self.endpoint = ""
        #: Of the last request that had one
        self.body = b""
        self.page = 2
        #: Pages of listings
        self.listings = 0
        self.lock = threading.Lock()

    def body_of(self, connection: BinaryIO, length: int) -> bytes:
        """The body of a request. One that is cut short is no request."""
        body = connection.read(length)
        if len(body) < length:
            raise ConnectionResetError
        return body

    def received(self, method: str, target: str, fields: Mapping[str, str], body: bytes) -> Answer:
        """The answer to a request with this body."""
        return self.answer(method, target, fields)

    def answer(self, method: str, target: str, fields: Mapping[str, str]) -> Answer:
        path = unquote(urlsplit(target).path)
        if not path.startswith("/bucket"):
            return self.service(method, path, target, fields)
        if (told := self.refusal(method, target, fields)) is not None:
            return told
        query = dict(parse_qsl(urlsplit(target).query))
        if query.get("list-type") == "2":
            return self.listing(query)
        return self.content(path.removeprefix("/bucket/"), fields)

    def refusal(self, method: str, target: str, fields: Mapping[str, str]) -> Answer | None:
        """The answer to a request that is not carried out: the signature is wrong, or `script` says so."""
        given = re.fullmatch(
            r"AWS4-HMAC-SHA256 Credential=([^/]+)/([^,]+), SignedHeaders=([^,]+), Signature=([0-9a-f]{64})",
            fields.get("authorization", ""),
        )
        with self.lock:
            self.asked.append((target, given[1] if given else None))
            number = len(self.asked)
        if (told := self.script(target, number)) is not None:
            return told
        if given:
            key, scope, signed, found = given.groups()
            if key not in KEYS:
                return error(403, "InvalidAccessKeyId", "There is no such key")
            if key in self.expired:
                return error(400, "ExpiredToken", "The provided token has expired.")
            expected = signature(method, target, fields, signed, fields["x-amz-date"], scope, KEYS[key])
            if expected != found or not {"host", "x-amz-date", "x-amz-content-sha256"} <= set(signed.split(";")):
                return error(403, "SignatureDoesNotMatch", "No", f"<StringToSign>{KEYS[key]}</StringToSign>")
            if scope.split("/")[1] != self.region:
                more = f"<Region>{self.region}</Region>"
                return error(400, "AuthorizationHeaderMalformed", f"the region is wrong; expecting {self.region}", more)
        return None

    def tag(self, key: str, content: bytes | None = None) -> str:
        """The tag of an object, or of these bytes of it, as S3 makes it of one that was put whole."""
        content = self.objects[key] if content is None else content
        known = self._tags.get(key)
        if known is None or known[0] is not content:
            known = content, f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
            self._tags[key] = known
        return known[1]

    def content(self, key: str, fields: Mapping[str, str]) -> Answer:
        content = self.objects.get(key)
        if content is None:
            return error(404, "NoSuchKey", "The specified key does not exist.")
        tag = self.tag(key, content)
        if fields.get("if-match", tag) != tag:
            return error(412, "PreconditionFailed", "At least one of the preconditions did not hold")
        first, last = map(int, fields["range"].removeprefix("bytes=").split("-"))
        if first >= len(content):
            size = f"<ActualObjectSize>{len(content)}</ActualObjectSize>"
            return error(416, "InvalidRange", "The requested range is not satisfiable", size)
        part = content[first : last + 1]
        about = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        return 206, {"ETag": tag, "Content-Range": about}, part

    def listing(self, query: Mapping[str, str]) -> Answer:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        with self.lock:
            self.listings += 1
        names = [name for name in sorted(self.objects) if name.startswith(prefix)]
        direct = [name for name in names if "/" not in name.removeprefix(prefix) and name > after]
        folders = {
            prefix + name.removeprefix(prefix).split("/")[0] + "/" for name in names if "/" in name[len(prefix) :]
        }
        here, more = direct[: self.page], len(direct) > self.page
        contents = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;e&quot;</ETag><Size>{len(self.objects[name])}</Size></Contents>"
            for name in here
        )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders)
        token = f"<NextContinuationToken>{escape(here[-1])}</NextContinuationToken>" if more else ""
        body = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{contents}{common}{token}"
        return 200, {"Content-Type": "application/xml"}, f"{body}</ListBucketResult>".encode()

    def service(self, method: str, path: str, target: str, fields: Mapping[str, str]) -> Answer:
        """Services of a machine (IMDS), of a container, of a pod, and STS."""
        until = (datetime.now(timezone.utc) + timedelta(hours=6)).strftime("%Y-%m-%dT%H:%M:%SZ")
        with self.lock:
            key = f"AKID{self.credentials}"
        KEYS[key] = f"secret of {key}"
        given = {"AccessKeyId": key, "SecretAccessKey": KEYS[key], "Token": TOKEN, "Expiration": until}
        if path == "/latest/api/token" and method == "PUT":
            return 200, {}, b"imds-token"
        if path == "/latest/meta-data/iam/security-credentials/":
            return 200, {}, b"role"
        pod = path == "/pod" and fields.get("authorization") == "pod-token"
        pod = pod or path == "/v2/credentials/task"
        if path == "/latest/meta-data/iam/security-credentials/role":
            pod = fields.get("x-aws-ec2-metadata-token") == "imds-token"
        sts = dict(parse_qsl(urlsplit(target).query)) if path == "/sts" else {}
        if not pod and sts.get("WebIdentityToken") != "web-token":
            return 403, {}, b"who are you?"
        with self.lock:
            self.credentials += 1
        if not sts:
            return 200, {"Content-Type": "application/json"}, json.dumps(given).encode()
        given["SessionToken"] = given.pop("Token")
        inner = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in given.items())
        body = f"<Credentials>{inner}</Credentials>"
        for name in ("AssumeRoleWithWebIdentityResult", "AssumeRoleWithWebIdentityResponse"):
            body = f"<{name}>{body}</{name}>"
        return 200, {}, body.encode()


@contextmanager
def serving(bucket: B, address: tuple[str, int] = ("127.0.0.1", 0), tls: ssl.SSLContext | None = None) -> Iterator[B]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            fields = {name.lower(): value for name, value in self.headers.items()}
            body = bucket.body_of(self.rfile, int(fields.get("content-length", 0)))
            bucket.body = body or bucket.body
            status, about, told = bucket.received(self.command, self.path, fields, body)
            self.send_response(status)
            if status != 204:
                about = {"Content-Length": str(len(told)), **about}
            for name, value in about.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(told)

        do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

        def log_message(self, *about: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 128

        def handle_error(self, *about: object) -> None:
            """Clients close connections in the middle of an answer."""

    with Server(address, Handler) as server:
        bucket.endpoint = f"http://127.0.0.1:{server.server_port}"
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
            bucket.endpoint = f"https://localhost:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield bucket
        finally:
            server.shutdown()
            thread.join()
