"""Which servers a client asks for: a proxy that tells it, and reaches none."""

from __future__ import annotations

import http.server
from collections.abc import Iterator
from contextlib import contextmanager

from local_server import local_server


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """The address of the proxy, and what it was asked for. It refuses for good, so that nothing is asked again."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path if "://" in self.path else f"https://{self.path}")
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_CONNECT = do_GET

        def log_message(self, *about: object) -> None:
            pass

    with local_server(Handler) as place:
        yield f"http://{place}", asked
