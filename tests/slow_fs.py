"""A passthrough file system that stalls, fails and shrinks on command: FUSE spoken straight to /dev/fuse.

No library: the kernel's protocol for a read-only file system is a dozen messages. The server is a process of its own,
so that a test which hangs in it can be let go by killing the server (every request under way then ends with an error).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, DESTROY, BATCH_FORGET = 26, 27, 28, 29, 36, 38, 42
DIRECT_IO = 1  # of an open file: no page cache is between its reads and the server (FOPEN_DIRECT_IO)
NAMES = {LOOKUP: "lookup", GETATTR: "getattr", OPEN: "open", READ: "read"}
ASYNC_READ, MAX_PAGES = 1 << 0, 1 << 22
MOST = 1 << 20
MNT_FORCE, MNT_DETACH = 1, 2
MS_NOSUID, MS_NODEV = 2, 4

libc = ctypes.CDLL(None, use_errno=True)


class Server:
    """Answers the kernel until the mount goes away; takes commands, one JSON object a line, from stdin."""

    def __init__(self, device: int, backing: Path) -> None:
        self.device = device
        self.nodes: dict[int, Path] = {0: backing, 1: backing}  # INIT and DESTROY are about node 0
        self.ids: dict[Path, int] = {backing: 1}
        self.pool = ThreadPoolExecutor(128)
        self.changed = threading.Condition()
        self.how: dict[str, Any] = {"latency": 0.0, "hang": [], "fail": [], "errno": errno.EIO, "after": 0}
        self.how |= {"sizes": {}, "bad": {}, "direct": True, "cached": True}
        self.requests: dict[str, int] = dict.fromkeys(NAMES.values(), 0)
        self.at_once = self.most_at_once = self.hanging = self.read_bytes = 0

    def serve(self) -> None:
        threading.Thread(target=self.listen, daemon=True).start()
        while True:
            try:
                message = os.read(self.device, MOST + 4096)
            except OSError as e:
                if e.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return  # ENODEV: unmounted
            (_, opcode, unique, node, *_) = struct.unpack_from("<IIQQIIIHH", message)
            if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            if opcode == INIT:  # before anything else may be answered
                self.handle(opcode, unique, node, message[40:])
            else:
                self.pool.submit(self.handle, opcode, unique, node, message[40:])

    def listen(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            with self.changed:
                self.how.update(command)
                told = {
                    "requests": dict(self.requests),
                    "read_bytes": self.read_bytes,
                    "at_once": self.at_once,
                    "most_at_once": self.most_at_once,
                    "hanging": self.hanging,
                }
                if command.get("forget"):
                    self.most_at_once = self.at_once
                    self.requests = dict.fromkeys(self.requests, 0)
                    self.read_bytes = 0
                self.changed.notify_all()
            print(json.dumps(told), flush=True)

    def handle(self, opcode: int, unique: int, node: int, body: bytes) -> None:
        name = NAMES.get(opcode)
        try:
            if name:
                with self.changed:
                    self.requests[name] += 1
                    nth = self.requests[name]
                    self.at_once += opcode == READ
                    self.most_at_once = max(self.most_at_once, self.at_once)
                try:
                    self.delay(opcode, name, nth)
                    data = self.answer(opcode, node, body)
                finally:
                    with self.changed:
                        self.at_once -= opcode == READ
                with self.changed:
                    self.read_bytes += len(data) * (opcode == READ)
            else:
                data = self.answer(opcode, node, body)
            error = 0
        except OSError as e:
            error, data = -(e.errno or errno.EIO), b""
        with contextlib.suppress(OSError):  # the asker may have been killed by now
            os.write(self.device, struct.pack("<IiQ", 16 + len(data), error, unique) + data)

    def delay(self, opcode: int, name: str, nth: int) -> None:
        if opcode == READ and self.how["latency"]:
            time.sleep(self.how["latency"])
        with self.changed:
            if name in self.how["hang"] and nth > self.how["after"]:
                self.hanging += 1
                self.changed.wait_for(lambda: name not in self.how["hang"])
                self.hanging -= 1
        if name in self.how["fail"] and nth > self.how["after"]:
            raise OSError(self.how["errno"], "as told")

    def attributes(self, path: Path) -> bytes:
        s = path.stat()
        size = self.how["sizes"].get(path.name, s.st_size)
        times = [int(t // 10**9) for t in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        nanos = [int(t % 10**9) for t in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        return struct.pack(
            "<6Q10I", s.st_ino, size, s.st_blocks, *times, *nanos, s.st_mode, s.st_nlink, s.st_uid, s.st_gid, 0, 4096, 0
        )

    def answer(self, opcode: int, node: int, body: bytes) -> bytes:
        path = self.nodes[node]
        if opcode == INIT:
            major, minor, read_ahead, flags = struct.unpack_from("<IIII", body)
            flags &= ASYNC_READ | MAX_PAGES
            return struct.pack(
                "<IIIIHHIIHHII6I",
                major,
                min(minor, 38),
                read_ahead,
                flags,
                64,
                48,
                4096,
                1,
                MOST // 4096,
                0,
                0,
                0,
                *[0] * 6,
            )
        if opcode == LOOKUP:
            child = path / os.fsdecode(body.rstrip(b"\0"))
            attributes = self.attributes(child)
            known = self.ids.setdefault(child, len(self.ids) + 1)
            self.nodes[known] = child
            return struct.pack("<QQQQII", known, 0, 0, 0, 0, 0) + attributes
        if opcode == GETATTR:
            return struct.pack("<QII", 0, 0, 0) + self.attributes(path)
        if opcode == OPEN:
            if struct.unpack_from("<I", body)[0] & os.O_DIRECT and not self.how["direct"]:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            flags = 0 if self.how["cached"] else DIRECT_IO
            return struct.pack("<QIi", os.open(path, os.O_RDONLY), flags, 0)
        if opcode == OPENDIR:
            return struct.pack("<QIi", 0, 0, 0)
        if opcode == READ:
            fh, offset, size = struct.unpack_from("<QQI", body)
            end = self.how["sizes"].get(path.name, 1 << 62)
            if 0 <= self.how["bad"].get(path.name, -1) - offset < size:
                raise OSError(errno.EIO, "a byte that cannot be read")
            return os.pread(fh, max(0, min(size, end - offset)), offset)
        if opcode == READDIR:
            _, offset, size = struct.unpack_from("<QQI", body)
            out = b""
            for i, entry in enumerate(sorted(os.scandir(path), key=lambda e: e.name)):
                name = os.fsencode(entry.name)
                kind = stat.S_IFMT(entry.stat().st_mode) >> 12
                record = struct.pack("<QQII", entry.inode(), i + 1, len(name), kind) + name
                record += b"\0" * (-len(record) % 8)
                if i >= offset and len(out) + len(record) <= size:
                    out += record
            return out
        if opcode == RELEASE:
            os.close(struct.unpack_from("<Q", body)[0])
            return b""
        if opcode in (RELEASEDIR, FLUSH, DESTROY):
            return b""
        if opcode == STATFS:
            return struct.pack("<5Q4I6I", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 20, 4096, 255, 4096, 0, *[0] * 6)
        raise OSError(errno.ENOSYS, "not needed")


class SlowFs:
    """A mount under test."""

    def __init__(self, path: Path, server: subprocess.Popen[str]) -> None:
        self.path = path
        self.server = server

    def tell(self, **command: Any) -> dict[str, Any]:
        """Changes how it behaves and says what it has seen.

        latency: seconds per read. hang, fail: lists of "lookup", "getattr", "open", "read"; after: how many of each are
        let through first. errno: of what fails. sizes: {name: size} to pretend. bad: {name: offset} of a byte that
        cannot be read. cached: whether files that are opened from now on are read through the page cache; otherwise
        each read is one request. forget: count from 0 again.
        """
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(command) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def hangs(self, at_least: int = 1, timeout: float = 60.0) -> None:
        """Waits until that many requests hang."""
        until = time.monotonic() + timeout
        while self.tell()["hanging"] < at_least:
            assert time.monotonic() < until, "nothing hangs"
            time.sleep(0.01)


def unmount(path: Path) -> None:
    """Takes it away, whoever uses it."""
    libc.umount2(os.fsencode(path), MNT_FORCE | MNT_DETACH)


@contextlib.contextmanager
def mounted(backing: Path) -> Iterator[SlowFs]:
    """The folder ``backing`` through a file system that can be told to misbehave."""
    path = Path(tempfile.mkdtemp(prefix="slow-fs-"))
    server = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(path), str(backing)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        if server.stdout.readline() != "mounted\n":
            raise OSError("the slow file system could not be mounted")
        yield SlowFs(path, server)
    finally:
        server.kill()
        server.wait()
        unmount(path)
        path.rmdir()


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot mount it; None where it can."""
    if not Path("/dev/fuse").exists():
        return "there is no /dev/fuse"
    if os.geteuid() != 0:
        return "mounting without a setuid program needs root"
    try:
        with tempfile.TemporaryDirectory() as folder, mounted(Path(folder)) as fs:
            list(fs.path.iterdir())
    except OSError as e:
        return f"FUSE cannot be mounted here: {e}"
    return None


def main(path: str, backing: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={MOST}"
    if libc.mount(b"slow", os.fsencode(path), b"fuse.slow", MS_NOSUID | MS_NODEV, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    Server(device, Path(backing)).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
