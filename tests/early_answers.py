"""A server of S3 that answers parts before it has read them, and closes the connection."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from s3_server import Answer, error


class Early:
    """What the server was asked."""

    endpoint = ""
    #: Parts whose heads came, and those that were answered
    parts = 0
    answered = 0


def _said(answer: Answer) -> bytes:
    status, fields, body = answer
    about = "".join(f"{name}: {value}\r\n" for name, value in {"Content-Length": str(len(body)), **fields}.items())
    return f"HTTP/1.1 {status} X\r\n{about}Connection: close\r\n\r\n".encode() + body


def _serve(connection: socket.socket, refusal: Answer, seen: Early, lock: threading.Lock) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        got = connection.recv(4096)
        if not got:
            return
        head += got
    if b"partNumber=" in head:
        with lock:
            seen.parts += 1
        connection.sendall(_said(refusal))
        with lock:
            seen.answered += 1
    elif head.startswith(b"POST"):
        text = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
        connection.sendall(_said((200, {}, text)))
    elif head.startswith(b"DELETE"):
        connection.sendall(_said((204, {}, b"")))
    else:
        connection.sendall(_said(error(404, "NoSuchKey", "none")))


@contextmanager
def answering(refusal: Answer, certificate: tuple[Path, Path, Path] | None = None) -> Iterator[Early]:
    """The server, which answers parts with ``refusal``."""
    seen, lock, threads = Early(), threading.Lock(), []
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate[1], certificate[2])

    def one(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            if context is None:
                _serve(connection, refusal, seen, lock)
            else:
                with context.wrap_socket(connection, server_side=True) as wrapped:
                    _serve(wrapped, refusal, seen, lock)

    def accept() -> None:
        with suppress(OSError):
            while True:
                thread = threading.Thread(target=one, args=(listener.accept()[0],))
                threads.append(thread)
                thread.start()

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    seen.endpoint = f"https://localhost:{port}" if certificate else f"http://127.0.0.1:{port}"
    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield seen
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for thread in threads:
            thread.join()
