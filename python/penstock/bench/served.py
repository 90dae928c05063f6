"""A web server over a checkpoint, with a link model, and the clients that are no loaders: for the scenarios `bucket`.

The programs are no part of the package: `make netbench` builds them. Server and bare loop are crates/netbench, the
other client is benches/go.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

#: The name of the server's folder in addresses of S3.
BUCKET = "models"
#: Clients that make no tensors: the ceiling, into new memory and into memory whose pages are in use, and Go's.
CLIENTS = ("loop", "loop touched", "go")
#: Seconds that the server has to start and to end, and a client for its bytes.
_PATIENCE = 600.0


class NotServed(Exception):
    """A program or certificate that is missing, or does not work; the message says which and why."""


def program(name: str, tools: Path | None) -> Path:
    """A program of `make netbench`: in the folder `tools`, or on the PATH.

    Raises:
        NotServed: if there is none.
    """
    found = shutil.which(name, path=None if tools is None else str(tools))
    if found is None:
        where = "on the PATH" if tools is None else f"in {tools}"
        raise NotServed(f"there is no {name} {where}: `make netbench` builds it, and --tools names its folder")
    return Path(found)


def certify(folder: Path, names: Iterable[str] = ("DNS:localhost",)) -> tuple[Path, Path, Path]:
    """An authority of our own, and the certificate that it gives these names, with its key: three files in `folder`.

    Raises:
        NotServed: if there is no openssl, which makes them.
    """

    def openssl(*arguments: str) -> None:
        try:
            subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise NotServed("there is no openssl here, which makes the certificates") from None
        except subprocess.CalledProcessError as error:
            raise NotServed(f"openssl made no certificate: {error.stderr.strip()}") from None

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "30", "-subj", "/CN=Penstock's own",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip
    openssl("req", *key, "-keyout", "key.pem", "-out", "asked.csr", "-subj", "/CN=localhost")
    (folder / "names").write_text(f"subjectAltName={','.join(names)}\nbasicConstraints=CA:FALSE\n")
    openssl("x509", "-req", "-in", "asked.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30",
            "-extfile", "names", "-out", "cert.pem")  # fmt: skip
    return folder / "ca.pem", folder / "cert.pem", folder / "key.pem"


def download(urls: Iterable[str], folder: Path, tools: Path | None) -> None:
    """Writes the files into a folder, by Go's client with 16 connections.

    Raises:
        NotServed: if the client is not there, or fails.
    """
    command = [str(program("netbench-go", tools)), "-connections", "16", "-folder", str(folder), *urls]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    if done.returncode:
        raise NotServed(done.stderr.strip() or f"the download ended with status {done.returncode}")


class Served:
    """A server over a folder, until its context is left.

    Args:
        folder: What it serves.
        tools: Where its program is.
        tls: Whether it speaks TLS.
        link: Options of `netbench serve`, by name.
        prefix: What the server's command begins with, to run it elsewhere (``ip netns exec NAME``).
        host: What addresses name; by default this machine.
    """

    def __init__(
        self, folder: Path, tools: Path | None, *, tls: bool = False, link: dict[str, str] | None = None,
        prefix: Iterable[str] = (), host: str | None = None,
    ) -> None:  # fmt: skip
        self._tools = tools
        self._tls = tls
        self._made = tempfile.TemporaryDirectory(prefix="penstock-served-")
        # As S3 names things, one folder is a bucket
        root = Path(self._made.name) / "root"
        root.mkdir()
        (root / BUCKET).symlink_to(folder.resolve())
        options = dict(link or {})
        options.setdefault("bind", f"{host or '127.0.0.1'}:0")
        self._authority: Path | None = None
        try:
            if tls:
                self._authority, certificate, key = certify(Path(self._made.name))
                options |= {"certificate": str(certificate), "key": str(key)}
            given = [text for name, value in options.items() for text in (f"--{name}", value)]
            command = [*prefix, str(program("netbench", tools)), "serve", str(root), *given]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        except BaseException:
            self._made.cleanup()
            raise
        assert self._process.stdout is not None and self._process.stderr is not None
        said = self._process.stdout.readline()
        if not said:
            why = self._process.stderr.read().strip()
            self._end()
            raise NotServed(why or "the server ended at once")
        #: Scheme, host and port.
        self.origin = f"{'https' if tls else 'http'}://{host or ('localhost' if tls else '127.0.0.1')}"
        self.origin += f":{json.loads(said)['port']}"

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._made.cleanup()

    @property
    def pid(self) -> int:
        """The process of the server."""
        return self._process.pid

    def urls(self, files: Iterable[Path]) -> list[str]:
        """The addresses of files in the folder."""
        return [f"{self.origin}/{BUCKET}/{file.name}" for file in files]

    @property
    def environment(self) -> dict[str, str]:
        """The environment for programs that trust the server and take it for S3."""
        found = {
            "AWS_ENDPOINT_URL": self.origin,
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        }
        if self._authority is not None:
            found |= {"SSL_CERT_FILE": str(self._authority), "AWS_CA_BUNDLE": str(self._authority)}
        return found

    def counts(self) -> dict[str, int]:
        """The counts of the server so far: connections, requests, bytes of bodies, stalled and refused answers."""
        import ssl

        context = ssl.create_default_context(cafile=str(self._authority)) if self._tls else None
        # Not through a proxy that this machine may have
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if context is not None:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        with urllib.request.build_opener(*handlers).open(f"{self.origin}/_counts", timeout=60) as answer:
            found: dict[str, int] = json.load(answer)
        return found

    def fetch(
        self, client: str, files: Iterable[Path], connections: int = 16, prefix: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Fetches files into memory by one of `CLIENTS`: seconds, processor seconds, bytes.

        Raises:
            NotServed: if the program is not there, or fails.
        """
        urls = self.urls(files)
        if client == "go":
            command = [str(program("netbench-go", self._tools)), "-connections", str(connections), *urls]
        else:
            command = [str(program("netbench", self._tools)), "receive", *urls, "--connections", str(connections)]
            command += ["--memory", "touched" if client == "loop touched" else "huge"]
            command += [] if self._authority is None else ["--authority", str(self._authority)]
        done = subprocess.run(
            [*prefix, *command], capture_output=True, text=True, check=False, timeout=_PATIENCE,
            env=os.environ | self.environment,
        )  # fmt: skip
        if done.returncode:
            raise NotServed(done.stderr.strip() or f"{client} ended with status {done.returncode}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found
