"""Opens and loads a model from a server whose name has several addresses, of which only the last one answers.

    unshare --mount --net python tests/dead_address.py FOLDER KIND

In namespaces of its own: it changes what names mean. KIND says what the other addresses do: `silent` (nothing) or
`refusing`.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import penstock
from conftest import LAYOUT, Oracle
from s3_server import KEYS, Bucket, serving
from test_listings import storage_of

#: What an address that says nothing costs: once, at most. The network's own patience is 10 s and more
MOST = 5.0
DEAD = ("127.0.0.2", "127.0.0.3")


def deaf(address: str, port: int) -> list[socket.socket]:
    """An address where connections wait for ever: one is in the queue, and no other gets in."""
    listener = socket.socket()
    listener.bind((address, port))
    listener.listen(0)
    held = [listener]
    while True:
        waiting = socket.socket()
        waiting.settimeout(0.2)
        held.append(waiting)
        try:
            waiting.connect((address, port))
        except OSError:
            return held


def main(folder: Path, kind: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.NamedTemporaryFile("w") as hosts:
        hosts.write("".join(f"{address} twin.test\n" for address in (*DEAD, "127.0.0.1")))
        hosts.flush()
        subprocess.run(["mount", "--bind", hosts.name, "/etc/hosts"], check=True)
        found = [about[4][0] for about in socket.getaddrinfo("twin.test", 1, type=socket.SOCK_STREAM)]
        assert set(found) == {*DEAD, "127.0.0.1"}, found
        objects = {f"m/{name}": (folder / name).read_bytes() for name in LAYOUT.files}
        with serving(Bucket(objects)) as bucket:
            port = int(bucket.endpoint.rpartition(":")[2])
            held = [deaf(address, port) for address in DEAD] if kind == "silent" else []
            storage = storage_of(bucket) | {"endpoint": f"http://twin.test:{port}", "access_key_id": next(iter(KEYS))}
            for address in ("s3://bucket/m/", [f"s3://bucket/m/{name}" for name in LAYOUT.files]):
                begun = time.monotonic()
                checkpoint = penstock.open(address, storage=storage)
                opened = time.monotonic()
                Oracle(folder).same(checkpoint.load(framework="np"))
                loaded = time.monotonic()
                print(f"opened in {opened - begun:.2f} s, loaded in {loaded - opened:.2f} s")
                assert opened - begun < MOST and loaded - opened < MOST
            del held


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
