"""A web server in this process whose answers are bytes: what other servers write, to the letter."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Asked:
    """A request."""

    target: str
    fields: dict[str, str]

    def range(self, size: int) -> tuple[int, int]:
        """First byte, and the byte behind the last one, whether the object has it or not."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.fields.get("range", ""))
        return (int(asked[1]), int(asked[2]) + 1) if asked else (0, size)


@dataclass
class Raw:
    """A running server."""

    url: str
    asked: list[Asked] = field(default_factory=list)


def part(
    asked: Asked,
    content: bytes,
    *more: str,
    status: str = "206 Partial Content",
    chunked: int = 0,
    length: bool = True,
    end: int | None = None,
) -> bytes:
    """The answer with a part of an object; ``more`` are further fields, ``chunked`` the bytes of a chunk."""
    first, last = asked.range(len(content))
    body = content[first : end or min(last, len(content))]
    head = [f"HTTP/1.1 {status}", 'ETag: "one"', *more]
    if status.startswith("206"):
        head.append(f"Content-Range: bytes {first}-{first + len(body) - 1}/{len(content)}")
    else:
        body = content[:end]
    if chunked:
        head.append("Transfer-Encoding: chunked")
        body = chunks(body, chunked)
    elif length:
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


def chunks(body: bytes, size: int) -> bytes:
    """A body in chunks."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%X\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@contextmanager
def raw_server(answer: Callable[[Asked], bytes], address: tuple[str, int] = ("127.0.0.1", 0)) -> Iterator[Raw]:
    """A server that sends what ``answer`` gives. It closes the connection if that says so, or has no length."""
    listener = socket.create_server(address, backlog=128)
    served = Raw(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            received = b""
            while True:
                while b"\r\n\r\n" not in received:
                    got = connection.recv(1 << 16)
                    if not got:
                        return
                    received += got
                head, _, received = received.partition(b"\r\n\r\n")
                lines = head.decode().split("\r\n")
                pairs = [line.split(":", 1) for line in lines[1:]]
                asked = Asked(lines[0].split(" ")[1], {name.lower(): value.strip() for name, value in pairs})
                served.asked.append(asked)
                told = answer(asked)
                connection.sendall(told)
                about = told.partition(b"\r\n\r\n")[0].lower()
                if b"connection: close" in about or not (b"content-length" in about or b"chunked" in about):
                    return

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
