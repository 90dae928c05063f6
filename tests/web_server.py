"""A web server with range requests and ETags, for a process of its own.

``python web_server.py FOLDER [CERTIFICATE KEY]`` prints its port, and then a line for each request: path and query,
range, status.

The files of the folder are also below /moved/ (redirects to the file), /locked/ (403), /weak/ (weak ETags), /dated/ (no
ETag), /closing/ (each connection is closed) and /whole/ (no ranges).
"""

from __future__ import annotations

import http.server
import os
import re
import ssl
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

told = threading.Lock()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder: Path

    def do_GET(self) -> None:
        where = urlsplit(self.path)
        kind, _, rest = where.path[1:].partition("/")
        if kind not in ("weak", "dated", "closing", "whole"):
            kind, rest = "", where.path
        file = self.folder / unquote(rest).lstrip("/")
        if where.path.startswith("/locked/"):
            self.refuse(403)
            return
        if where.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", where.path.removeprefix("/moved"))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if not file.is_file():
            self.refuse(404)
            return
        with file.open("rb") as opened:
            stat = os.fstat(opened.fileno())
            tag = f'"{stat.st_ino:x}-{stat.st_mtime_ns:x}-{stat.st_size:x}"'
            if self.headers.get("If-Match", tag) != tag:
                self.refuse(412)
                return
            asked = kind != "whole" and re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            first, last = (int(asked[1]), min(int(asked[2]), stat.st_size - 1)) if asked else (0, stat.st_size - 1)
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{last}/{stat.st_size}")
            if kind == "dated":
                self.send_header("Last-Modified", self.date_time_string(int(stat.st_mtime)))
            else:
                self.send_header("ETag", f"W/{tag}" if kind == "weak" else tag)
            if kind == "closing":
                self.send_header("Connection", "close")
            self.send_header("Content-Length", str(last - first + 1))
            self.end_headers()
            left = last - first + 1
            self.wfile.flush()
            if isinstance(self.connection, ssl.SSLSocket):
                opened.seek(first)
                while left and (part := opened.read(min(left, 1 << 18))):
                    self.wfile.write(part)
                    left -= len(part)
            else:
                while left and (sent := os.sendfile(self.connection.fileno(), opened.fileno(), first, left)):
                    first, left = first + sent, left - sent

    def refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_request(self, code: object = "-", size: object = "-") -> None:
        with told:
            print(self.path, self.headers.get("Range"), int(code), flush=True)  # type: ignore[call-overload]

    def log_message(self, *about: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # with less, connections that come together wait a second for their second attempt

    def handle_error(self, *about: object) -> None:
        """Clients close connections in the middle of an answer: when a load is given up."""


def main(folder: str, *certificate: str) -> None:
    Handler.folder = Path(folder)
    with Server(("127.0.0.1", 0), Handler) as server:
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            # The handshake is done by the thread of the connection, when it first reads
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        print(server.server_port, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
