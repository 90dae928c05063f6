"""A server that takes objects as S3 does (tests/s3_server.py), parts and conditions included; in this process."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

import numpy as np
import ordeal
from s3_server import KEYS, Answer, Bucket, error

#: The polynomial of CRC32C, reflected.
_POLYNOMIAL = 0x82F63B78
#: Steps of two bytes that a lane takes: numpy works on all lanes at once, and each step costs as much as 10,000 bytes.
_STEPS = 128


def _table() -> np.ndarray:
    """For each value of the lower two bytes of a CRC: what they become after 16 steps of one bit."""
    entries = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(16):
        entries = np.where(entries & 1, (entries >> 1) ^ np.uint32(_POLYNOMIAL), entries >> 1).astype(np.uint32)
    return entries


_TABLE = _table()


def _moved(crcs: np.ndarray, by: np.ndarray) -> np.ndarray:
    """CRCs after a number of zero bytes. ``by``: what each value of each byte of a CRC becomes after these."""
    return by[0][crcs & 255] ^ by[1][crcs >> 8 & 255] ^ by[2][crcs >> 16 & 255] ^ by[3][crcs >> 24]


def crc32c(data: bytes) -> int:
    """The CRC32C of bytes (RFC 3720). Many lanes of them take their steps together, and are joined in pairs."""
    if len(data) < 4:
        crc = 0xFFFFFFFF
        for byte in data:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        return crc ^ 0xFFFFFFFF
    steps = min(_STEPS, -(-len(data) // 2))
    lanes = 1 << (-(-len(data) // (2 * steps)) - 1).bit_length()
    whole = np.zeros(2 * steps * lanes, np.uint8)  # zeros before the first byte leave a CRC of 0 as it is
    whole[len(whole) - len(data) :] = np.frombuffer(data, np.uint8)
    whole[len(whole) - len(data) :][:4] ^= 0xFF  # the initial value
    crcs = np.zeros(lanes, np.uint32)
    by = np.arange(256, dtype=np.uint32)[None, :] << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    for words in np.ascontiguousarray(whole.view("<u2").reshape(lanes, steps).T):
        crcs = _TABLE[(crcs ^ words) & 0xFFFF] ^ crcs >> 16
        by = _TABLE[by & 0xFFFF] ^ by >> 16
    while len(crcs) > 1:
        crcs = _moved(crcs[::2], by) ^ crcs[1::2]
        by = _moved(by, by)
    return int(crcs[0]) ^ 0xFFFFFFFF


def shown(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def settings(bucket: Uploads, **more: Any) -> Any:
    """What `storage=` takes for it."""
    key, secret = next(iter(KEYS.items()))
    given = {"endpoint": bucket.endpoint, "region": "us-east-1", "access_key_id": key, "secret_access_key": secret}
    return {**given, **more}


def carried_out(bucket: Uploads) -> None:
    """Waits until every request of clients that are dead is carried out. The kernel lists a connection whose other end
    is closed until the server closes it, also one that the server has not accepted."""
    port, closed = urlsplit(bucket.endpoint).port, "08"  # CLOSE_WAIT, in proc_net_tcp.txt of Linux

    def is_left(row: str) -> bool:
        _, local, _, state, *_ = row.split()
        return state == closed and int(local.partition(":")[2], 16) == port

    ordeal.soon(lambda: not any(map(is_left, Path("/proc/net/tcp").read_text().splitlines()[1:])), 20)


@dataclass
class Parts:
    """An upload in parts that has begun."""

    key: str
    parts: dict[int, bytes] = field(default_factory=dict)
    began: datetime = field(default_factory=lambda: datetime.now(timezone.utc))


class Uploads(Bucket):
    """A bucket that objects are written to."""

    #: Bytes of a part, unless it is the last
    LEAST = 5 << 20

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        super().__init__(objects if objects is not None else {})
        self.page = 1000
        self.under_way: dict[str, Parts] = {}
        #: (method, key, query) of each request, in order
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        #: Objects that were there, and when they came or went: (key, content or None)
        self.history: list[tuple[str, bytes | None]] = []
        #: What it says instead: of method, key and query
        self.refuses: Callable[[str, str, dict[str, str]], Answer | None] = lambda method, key, query: None
        #: True: it does what is asked, and closes the connection instead of an answer
        self.loses: Callable[[str, str, dict[str, str]], bool] = lambda method, key, query: False
        self.knows_checksums = True
        #: False: it ignores the conditions of requests
        self.heeds_conditions = True
        #: False: it ignores those of requests that end an upload in parts
        self.heeds_ends = True
        #: True: it keeps what is replaced or removed, and says so
        self.keeps_versions = False
        #: True: it did so once, and does no more for what is written or removed now
        self.is_suspended = False
        #: Keys whose newest version is a removal
        self.removed: set[str] = set()
        #: True: for conditions such a key is one of an object that is there
        self.counts_removed = False
        #: What the answer to HEAD says of locks, by key
        self.locks: dict[str, dict[str, str]] = {}
        #: The rule for locks of new objects
        self.lock_rule: str | None = None
        #: When each object was written
        self.written: dict[str, datetime] = {}
        #: Uploads on a page of their list
        self.uploads_on_a_page = 2
        self.delay = 0.0
        #: Requests that are being answered, and the most at once
        self.at_once = self.most_at_once = 0
        self.numbers = itertools.count(1)
        self.guard = threading.RLock()

    def hold_parts(self) -> threading.Event:
        """Nothing is answered to parts until the event is set."""
        goes_on = threading.Event()

        def waits(method: str, key: str, query: dict[str, str]) -> None:
            if "partNumber" in query:
                goes_on.wait(120)

        self.refuses = waits
        return goes_on

    def received(self, method: str, target: str, fields: Mapping[str, str], body: bytes) -> Answer:
        key = unquote(urlsplit(target).path).removeprefix("/bucket").lstrip("/")
        query = dict(parse_qsl(urlsplit(target).query, True))
        with self.guard:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self.requests.append((method, key, query))
        try:
            if self.delay:
                time.sleep(self.delay)
            if (refused := self.refuses(method, key, query)) is not None:
                return refused
            if method == "GET" and key:
                return self.answer(method, target, fields)
            if (refused := self.refusal(method, target, fields)) is not None:
                return refused
            with self.guard:
                answer = self.taken(method, key, query, fields, body)
            if self.loses(method, key, query):
                raise ConnectionResetError
            return answer
        finally:
            with self.guard:
                self.at_once -= 1

    def taken(self, method: str, key: str, query: dict[str, str], fields: Mapping[str, str], body: bytes) -> Answer:
        if query.get("list-type") == "2":
            return self.listing(query)
        if method == "HEAD":
            return self.head(key)
        if method == "GET" and "uploads" in query:
            return self.unfinished(query)
        if method == "GET" and "versions" in query:
            return self.versions(query)
        if method == "GET" and "object-lock" in query:
            return self.lock_configuration()
        if method == "DELETE" and "uploadId" in query:
            self.under_way.pop(query["uploadId"], None)
            return 204, {}, b""
        if method == "DELETE":
            if self.objects.pop(key, None) is not None:
                self.history.append((key, None))
            if not self.keeps_versions:
                return 204, {}, b""
            self.removed.add(key)
            return 204, {"x-amz-delete-marker": "true", **self.version()}, b""
        if method == "POST" and "uploads" in query:
            number = f"upload-{next(self.numbers)}"
            self.under_way[number] = Parts(key)
            return (
                200,
                {},
                f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>".encode(),
            )
        if "uploadId" in query:
            upload = self.under_way.get(query["uploadId"])
            if upload is None or upload.key != key:
                return error(404, "NoSuchUpload", "The specified upload does not exist.")
            if method == "PUT":
                return self.part(upload, int(query["partNumber"]), fields, body)
            return self.complete(query["uploadId"], upload, fields, body)
        if method == "PUT":
            if (refused := self.condition(key, fields)) is not None:
                return refused
            told = self.checked(fields, body)
            if isinstance(told, tuple):
                return told
            self.stored(key, body)
            return 200, {"ETag": self.tag(key), **told, **self.version()}, b""
        return error(405, "MethodNotAllowed", "No")

    def stored(self, key: str, content: bytes) -> None:
        self.objects[key] = content
        self.removed.discard(key)
        self.written[key] = datetime.now(timezone.utc)
        self.history.append((key, content))

    def checked(self, fields: Mapping[str, str], body: bytes) -> dict[str, str] | Answer:
        """The fields that tell a checksum, or the refusal of another one."""
        said = fields.get("x-amz-checksum-crc32c")
        if said is None or not self.knows_checksums:
            return {}
        if said != shown(crc32c(body)):
            return error(400, "BadDigest", "The CRC32C you specified did not match what was received")
        return {"x-amz-checksum-crc32c": said}

    def condition(self, key: str, fields: Mapping[str, str]) -> Answer | None:
        if not self.heeds_conditions:
            return None
        there = self.tag(key) if key in self.objects else None
        wanted = fields.get("if-match")
        is_there = there is not None or (self.counts_removed and key in self.removed)
        if (fields.get("if-none-match") == "*" and is_there) or (wanted is not None and wanted != there):
            return error(412, "PreconditionFailed", "At least one of the preconditions did not hold")
        return None

    def part(self, upload: Parts, number: int, fields: Mapping[str, str], body: bytes) -> Answer:
        told = self.checked(fields, body)
        if isinstance(told, tuple):
            return told
        upload.parts[number] = body
        tag = hashlib.md5(body, usedforsecurity=False).hexdigest()
        return 200, {"ETag": f'"{tag}"', **told}, b""

    def complete(self, name: str, upload: Parts, fields: Mapping[str, str], body: bytes) -> Answer:
        listed = re.findall(r"<PartNumber>(\d+)</PartNumber><ETag>&quot;([0-9a-f]+)&quot;</ETag>", body.decode())
        numbers = [int(number) for number, _ in listed]
        tags = [hashlib.md5(upload.parts.get(n, b""), usedforsecurity=False).hexdigest() for n in numbers]
        if numbers != sorted(set(numbers)) or tags != [tag for _, tag in listed] or set(numbers) - set(upload.parts):
            return error(400, "InvalidPart", "One or more of the specified parts could not be found.")
        if any(len(upload.parts[n]) < self.LEAST for n in numbers[:-1]):
            return error(400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size")
        if self.heeds_ends and (refused := self.condition(upload.key, fields)) is not None:
            return refused
        self.stored(upload.key, b"".join(upload.parts[n] for n in numbers))
        del self.under_way[name]
        told = ""
        if self.knows_checksums:
            sums = b"".join(crc32c(upload.parts[n]).to_bytes(4, "big") for n in numbers)
            self.sums = {**getattr(self, "sums", {}), upload.key: f"{shown(crc32c(sums))}-{len(numbers)}"}
            told = f"<ChecksumCRC32C>{self.sums[upload.key]}</ChecksumCRC32C>"
        tag = self.tag(upload.key).strip('"')
        text = f"<CompleteMultipartUploadResult><ETag>&quot;{tag}&quot;</ETag>{told}</CompleteMultipartUploadResult>"
        return 200, self.version(), text.encode()

    def version(self) -> dict[str, str]:
        """The field that names the version of what was written."""
        if not self.keeps_versions:
            return {}
        return {"x-amz-version-id": "null" if self.is_suspended else f"version-{next(self.numbers)}"}

    def versions(self, query: dict[str, str]) -> Answer:
        """The newest version of each key."""
        kinds = {**dict.fromkeys(self.objects, "Version"), **dict.fromkeys(self.removed, "DeleteMarker")}
        text = "".join(
            f"<{kind}><Key>{escape(key)}</Key><VersionId>v</VersionId><IsLatest>true</IsLatest></{kind}>"
            for key, kind in sorted(kinds.items())
            if key.startswith(query["prefix"])
        )
        return 200, {}, f"<ListVersionsResult><IsTruncated>false</IsTruncated>{text}</ListVersionsResult>".encode()

    def lock_configuration(self) -> Answer:
        if self.lock_rule is None:
            return error(404, "ObjectLockConfigurationNotFoundError", "Object Lock configuration does not exist")
        rule = f"<Rule><DefaultRetention>{self.lock_rule}</DefaultRetention></Rule>" if self.lock_rule else ""
        text = f"<ObjectLockEnabled>Enabled</ObjectLockEnabled>{rule}"
        return 200, {}, f"<ObjectLockConfiguration>{text}</ObjectLockConfiguration>".encode()

    def unfinished(self, query: dict[str, str]) -> Answer:
        """A page of the uploads that have not ended, by key and number."""
        behind = (query.get("key-marker", ""), query.get("upload-id-marker", ""))
        all_ = sorted((parts.key, name, parts.began) for name, parts in self.under_way.items())
        found = [one for one in all_ if one[0].startswith(query.get("prefix", "")) and one[:2] > behind]
        page, rest = found[: self.uploads_on_a_page], found[self.uploads_on_a_page :]
        text = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{name}</UploadId><Initiated>{began:%Y-%m-%dT%H:%M:%S.000Z}"
            "</Initiated></Upload>"
            for key, name, began in page
        )
        more = f"<IsTruncated>{str(bool(rest)).lower()}</IsTruncated>"
        if rest:
            more += f"<NextKeyMarker>{escape(page[-1][0])}</NextKeyMarker>"
            more += f"<NextUploadIdMarker>{page[-1][1]}</NextUploadIdMarker>"
        return 200, {}, f"<ListMultipartUploadsResult>{more}{text}</ListMultipartUploadsResult>".encode()

    def head(self, key: str) -> Answer:
        if key not in self.objects:
            return 404, {}, b""
        content = self.objects[key]
        told = getattr(self, "sums", {}).get(key, shown(crc32c(content)))
        about = {"x-amz-checksum-crc32c": told} if self.knows_checksums else {}
        about |= self.locks.get(key, {})
        about["Last-Modified"] = format_datetime(self.written.get(key, datetime.now(timezone.utc)), usegmt=True)
        return 200, {"ETag": self.tag(key), "Content-Length": str(len(content)), **about}, b""
