"""A double of the Hugging Face Hub, for a process of its own: its API, and the storage that it redirects to.

``python hub_server.py FOLDER [CERTIFICATE KEY]`` prints the ports of the two. ``FOLDER/log`` gets a line of JSON for
each request, before it is answered. ``FOLDER/state.json`` is read for each request, and says what there is:

    repositories    by name: {"refs": {revision: commit}}, "private", "gated", "disabled"; or {"moved": another name},
                    perhaps {"to": another server}
    tokens          by token: the private and gated repositories that it has access to
    small           how files that are not LFS files are sent: "direct" (whole, whatever the range), "ranges", "cache"
    expire_at       all locations that were given out expire with these requests to the storage
    busy            {"on": "api", "resolve" or "storage", "times": n, "status": 503, "retry_after": s}: the first n
    hang            "api", "resolve" or "storage": it is not answered while this is so
    own_etags       a request for a redirect must name the ETag that the redirect has, if it names one
    garbage         the API answers with this text
    digests         by path: what the API says that a file hashes to, instead of what it does; "" for nothing
    secret          a text that every location holds

Files are in ``FOLDER/<repository>/<commit>/``. Those that end in .safetensors or .bin are LFS files.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import secrets
import ssl
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

COMMIT = re.compile(r"[0-9a-f]{40}")
REPOSITORY = r"(?P<repository>[^/]+/[^/]+|[^/]+)"
API = re.compile(rf"/api/models/{REPOSITORY}/revision/(?P<revision>[^/]+)")
TREE = re.compile(rf"/api/models/{REPOSITORY}/tree/(?P<revision>[^/]+)")
RESOLVE = re.compile(rf"/{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
CACHED = re.compile(rf"/api/resolve-cache/models/{REPOSITORY}/(?P<revision>[^/]+)/(?P<path>.+)")


class Shared:
    """What all connections know."""

    def __init__(self, folder: Path, scheme: str) -> None:
        self.folder, self.scheme = folder, scheme
        self.lock = threading.Lock()
        self.log = (folder / "log").open("a")
        self.storage_port = 0
        self.epoch = self.stored = 0
        self.locations: dict[str, Path] = {}
        self.refused: dict[str, int] = {}

    def state(self) -> dict[str, Any]:
        return json.loads((self.folder / "state.json").read_text())  # type: ignore[no-any-return]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    shared: Shared
    kind = ""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.state = self.shared.state()
        where = urlsplit(self.path)
        for kind, pattern in (("api", API), ("tree", TREE), ("resolve", CACHED), ("resolve", RESOLVE)):
            if found := pattern.fullmatch(where.path):
                self.kind = kind
                break
        else:
            return self.refuse(404)
        if self.is_busy():
            return None
        asked = {name: unquote(value) for name, value in found.groupdict().items()}
        return self.about(asked, pattern)

    def about(self, asked: dict[str, str], pattern: re.Pattern[str]) -> None:
        name, revision = asked["repository"], asked["revision"]
        repository = self.state["repositories"].get(name, {})
        if moved := repository.get("moved"):
            there = repository.get("to", "") + self.path.replace(f"/{name}/", f"/{moved}/", 1)
            return self.redirect(307, there)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.state.get("tokens", {}):
            return self.refuse(401, None, "Invalid credentials in Authorization header")
        granted = name in self.state.get("tokens", {}).get(token, [])
        if not repository or (repository.get("private") and not granted):
            return self.refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        if repository.get("disabled"):
            return self.refuse(403, None, "Access to this resource is disabled.")
        commit = repository["refs"].get(revision) or (revision if COMMIT.fullmatch(revision) else "")
        folder = self.shared.folder / name / commit
        if not commit or not folder.is_dir():
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if self.kind == "api":
            if "garbage" in self.state:
                return self.send(200, self.state["garbage"].encode())
            siblings: list[dict[str, Any]] = [{"rfilename": path} for path in files(folder)]
            if parse_qs(urlsplit(self.path).query).get("blobs") == ["true"]:
                siblings = [blob(folder, path, self.state.get("digests", {})) for path in files(folder)]
            return self.json({"id": name, "sha": commit, "gated": bool(repository.get("gated")), "siblings": siblings})
        if repository.get("gated") and not granted:
            return self.refuse(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted.")
        if self.kind == "tree":
            return self.json([entry(folder, path) for path in files(folder)])
        return self.resolve(name, commit, asked["path"], pattern is CACHED)

    def resolve(self, name: str, commit: str, path: str, cached: bool) -> None:
        file = self.shared.folder / name / commit / path
        if not file.is_file():
            return self.refuse(404, "EntryNotFound", "Entry not found")
        content = file.read_bytes()
        tag = f'"{git_sha1(content)}"'
        fields = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes", "ETag": tag}
        if is_lfs(path):
            digest = hashlib.sha256(content).hexdigest()
            fields |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{digest}"', "ETag": f'"{digest}"'}
            if self.state.get("own_etags") and self.headers.get("If-Match", fields["ETag"]) != fields["ETag"]:
                return self.refuse(412)
            shared = self.shared
            with shared.lock:
                shared.locations[digest] = file
                query = f"X-Epoch={shared.epoch}&X-Signature={secrets.token_hex(8)}{self.state.get('secret', '')}"
            return self.redirect(302, f"{shared.scheme}:{shared.storage_port}/{digest}?{query}", fields)
        small = self.state.get("small", "direct")
        if small == "cache" and not cached:
            return self.redirect(307, f"/api/resolve-cache/models/{name}/{commit}/{quote(path)}?etag=x", fields)
        return self.send(200, content, fields, ranges=small != "direct")

    def is_busy(self) -> bool:
        if self.state.get("hang") == self.kind:
            self.note(0)
            while self.state.get("hang") == self.kind:
                time.sleep(0.02)
                self.state = self.shared.state()
        busy = self.state.get("busy", {})
        if busy.get("on") == self.kind:
            with self.shared.lock:
                times = self.shared.refused[self.kind] = self.shared.refused.get(self.kind, 0) + 1
            if times <= busy["times"]:
                self.refuse(busy["status"], fields={"Retry-After": str(busy.get("retry_after", 0))})
                return True
        return False

    # Answers

    def json(self, said: object) -> None:
        self.send(200, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def redirect(self, status: int, to: str, fields: dict[str, str] | None = None) -> None:
        self.send(status, b"Redirecting", {**(fields or {}), "Location": to})

    def refuse(
        self, status: int, code: str | None = None, message: str | None = None, fields: dict[str, str] | None = None
    ) -> None:
        said = {"X-Error-Code": code, "X-Error-Message": message, "X-Request-Id": "Root=1-abc"}
        self.send(status, b"{}", {**{k: v for k, v in said.items() if v is not None}, **(fields or {})})

    def send(self, status: int, body: bytes, fields: dict[str, str] | None = None, ranges: bool = False) -> None:
        fields = dict(fields or {})
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and ranges:
            first, last = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
            fields["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            status, body = 206, body[first : last + 1]
        self.note(status)
        self.send_response(status)
        for name, value in {**fields, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def note(self, status: int) -> None:
        """Tells of the request before anybody can know of its answer."""
        fields = {name: self.headers.get(name) for name in ("Range", "Authorization", "If-Match", "User-Agent")}
        line = json.dumps({"kind": self.kind, "method": self.command, "path": self.path, "status": status, **fields})
        with self.shared.lock:
            self.shared.log.write(line + "\n")
            self.shared.log.flush()

    def log_message(self, *about: object) -> None:
        pass


class Storage(Handler):
    """Where the LFS files are."""

    kind = "storage"

    def do_GET(self) -> None:
        shared, where = self.shared, urlsplit(self.path)
        self.state = shared.state()
        if self.is_busy():
            return None
        with shared.lock:
            shared.stored += 1
            if shared.stored in self.state.get("expire_at", []):
                shared.epoch += 1
            valid = parse_qs(where.query).get("X-Epoch") == [str(shared.epoch)]
            file = shared.locations.get(where.path[1:])
        if self.headers.get("Authorization"):
            return self.refuse(400)  # as S3 does, if a request is signed in two ways
        if not valid or file is None:
            return self.refuse(403)
        tag = f'"stored-{where.path[1:9]}"'
        if self.headers.get("If-Match", tag) != tag:
            return self.refuse(412)
        return self.send(200, file.read_bytes(), {"ETag": tag, "Accept-Ranges": "bytes"}, ranges=True)


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, *about: object) -> None:
        """Clients close connections in the middle of an answer: when a load is given up."""


def is_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".bin"))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(folder: Path, path: str) -> dict[str, Any]:
    """What the list of a tree says of a file."""
    content = (folder / path).read_bytes()
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_sha1(content)}
    if is_lfs(path):
        found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return found


def blob(folder: Path, path: str, digests: dict[str, str]) -> dict[str, Any]:
    """What the API says of a file if it is asked for blobs."""
    about = entry(folder, path)
    found = {"rfilename": path, "size": about["size"], "blobId": about["oid"]}
    digest = digests.get(path, about.get("lfs", {}).get("oid"))
    if digest is None:
        return found
    if len(digest) == 40:
        return {**found, "blobId": digest}
    lfs = {"sha256": digest, "size": about["size"], "pointerSize": 130}
    return {"rfilename": path} if digest == "" else {**found, "lfs": lfs}


def main(folder: str, *certificate: str) -> None:
    host = "https://localhost" if certificate else "http://127.0.0.1"
    Handler.shared = Shared(Path(folder), host)
    hub, storage = (Server(("127.0.0.1", 0), kind) for kind in (Handler, Storage))
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        for server in (hub, storage):
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    Handler.shared.storage_port = storage.server_port
    print(hub.server_port, storage.server_port, flush=True)
    threading.Thread(target=storage.serve_forever, daemon=True).start()
    hub.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
