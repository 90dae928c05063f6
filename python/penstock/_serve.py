"""`penstock serve`: an HTTP server of a folder, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ._core import Server
from ._errors import InvalidError, ReadError

#: The token that clients must show. An argument would be seen by every user of the machine.
TOKEN = "PENSTOCK_SERVE_TOKEN"


class _Terminated(Exception):
    """SIGTERM has come."""


def _token(file: str | None) -> str | None:
    """The token of ``file``, or that of the environment."""
    token = os.environ.get(TOKEN)
    if file is not None:
        try:
            token = Path(file).read_text("utf-8").strip()
        except UnicodeDecodeError:
            raise InvalidError("the token is not visible ASCII", path=file) from None
        except OSError as error:
            raise ReadError(f"cannot read the token: {error.strerror}", path=file) from error
    elif token is not None:
        try:
            token.encode()
        except UnicodeEncodeError:
            raise InvalidError(f"{TOKEN}: must be UTF-8") from None
    return token


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


def run(args: argparse.Namespace, say: Callable[[dict[str, Any], str], None]) -> None:
    """Serves until a signal ends it. ``say`` prints a document, or its text."""
    token = _token(args.token_file)
    if token is not None and args.no_token:
        raise InvalidError(f"--no-token, and a token is given by {'--token-file' if args.token_file else TOKEN}")
    if (args.tls_cert is None) != (args.tls_key is None):
        raise InvalidError("--tls-cert and --tls-key go together")
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        server = Server.start(
            args.path,
            args.host,
            args.port,
            token=token,
            strangers=args.no_token,
            tls=(args.tls_cert, args.tls_key) if args.tls_cert else None,
            access_log=args.access_log,
            sends_files=not args.no_sendfile,
            connections=args.max_connections,
        )
        try:
            host, port = server.address
            host = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
            address = f"http{'s' * (args.tls_cert is not None)}://{host}:{port}"
            document = {"folder": args.path, "address": address, "token": token is not None}
            say(document, f"serving {args.path} at {address}/")
            while True:
                # Not pause(): a signal that comes just before it would not end it
                time.sleep(0.2)
        finally:
            server.stop()
    except (KeyboardInterrupt, _Terminated):
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
