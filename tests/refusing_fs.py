"""A writable passthrough file system that refuses the calls that it is told to: FUSE spoken straight to /dev/fuse.

It stands for file systems of other processes: mountpoint-s3 (no rename, bytes in order, a file shows when it is
closed), HDFS (no ftruncate), and those that know no fsync. `slow_fs.py` is the read-only one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOOKUP, FORGET, GETATTR, SETATTR, MKNOD, MKDIR, UNLINK, RMDIR = 1, 2, 3, 4, 8, 9, 10, 11
RENAME, LINK, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH = 12, 13, 14, 15, 16, 17, 18, 20, 25
INIT, OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, CREATE, INTERRUPT = 26, 27, 28, 29, 30, 35, 36
DESTROY, BATCH_FORGET, FALLOCATE, RENAME2, TMPFILE = 38, 42, 43, 45, 51
NAMES = {
    RENAME: "rename",
    RENAME2: "rename",
    LINK: "link",
    FSYNC: "fsync",
    FSYNCDIR: "fsyncdir",
    FLUSH: "flush",
    CREATE: "create",
    MKNOD: "create",
    UNLINK: "unlink",
    FALLOCATE: "fallocate",
    WRITE: "write",
    MKDIR: "mkdir",
    OPEN: "open",
    READ: "read",
}
MOST = 1 << 17
FATTR_MODE, FATTR_SIZE = 1, 8
FOPEN_DIRECT_IO = 1
libc = ctypes.CDLL(None, use_errno=True)


class Server:
    """Answers the kernel, one request after the other; takes commands, one JSON object a line, from stdin."""

    def __init__(self, device: int, backing: Path, how: dict[str, Any]) -> None:
        self.device = device
        self.nodes: dict[int, Path] = {0: backing, 1: backing}
        self.ids: dict[Path, int] = {backing: 1}
        #: refuse: {call: errno}; after: {call: how many are let through first}; sequential: bytes in order, and a file
        #: is there when it is closed; direct: whether O_DIRECT opens
        self.how: dict[str, Any] = {"refuse": {}, "after": {}, "sequential": False, "direct": True} | how
        self.counts: dict[str, int] = {}
        self.ends: dict[int, int] = {}
        self.poisoned: set[int] = set()
        self.reads: list[tuple[int, int]] = []
        self.written: list[int] = []

    def serve(self) -> None:
        while True:
            try:
                message = os.read(self.device, MOST + 8192)
            except OSError as e:
                if e.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return
            (_, opcode, unique, node, *_) = struct.unpack_from("<IIQQIIIHH", message)
            if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            try:
                if opcode == WRITE:
                    self.poisoned.add(struct.unpack_from("<Q", message, 40)[0])  # unless this one succeeds
                self.refuse(NAMES.get(opcode))
                data, error = self.answer(opcode, node, message[40:]), 0
            except OSError as e:
                data, error = b"", -(e.errno or errno.EIO)
            with contextlib.suppress(OSError):
                os.write(self.device, struct.pack("<IiQ", 16 + len(data), error, unique) + data)

    def refuse(self, name: str | None) -> None:
        if name is None:
            return
        self.counts[name] = self.counts.get(name, 0) + 1
        refused = self.how["refuse"].get(name)
        if refused and self.counts[name] > self.how["after"].get(name, 0):
            raise OSError(refused, "as told")

    def attributes(self, path: Path) -> bytes:
        s = path.lstat()
        times = [int(t // 10**9) for t in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        nanos = [int(t % 10**9) for t in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        return struct.pack(
            "<6Q10I",
            s.st_ino,
            s.st_size,
            s.st_blocks,
            *times,
            *nanos,
            s.st_mode,
            s.st_nlink,
            s.st_uid,
            s.st_gid,
            0,
            4096,
            0,
        )

    def entry(self, path: Path) -> bytes:
        attributes = self.attributes(path)
        known = self.ids.setdefault(path, len(self.ids) + 1)
        self.nodes[known] = path
        return struct.pack("<QQQQII", known, 0, 0, 0, 0, 0) + attributes

    def opened(self, fd: int) -> bytes:
        return struct.pack("<QIi", fd, 0, 0)

    def rename(self, old: Path, new: Path) -> bytes:
        old.rename(new)
        node = self.ids.pop(old, None)
        self.ids.pop(new, None)
        if node is not None:
            self.ids[new], self.nodes[node] = node, new
        return b""

    def answer(self, opcode: int, node: int, body: bytes) -> bytes:
        path = self.nodes[node]
        text = [os.fsdecode(part) for part in body.split(b"\0")]
        if opcode == INIT:
            major, minor, ahead, _ = struct.unpack_from("<IIII", body)
            return struct.pack(
                "<IIIIHHIIHHII6I", major, min(minor, 38), ahead, 0, 16, 12, MOST, 1, 32, 0, 0, 0, *[0] * 6
            )
        if opcode == LOOKUP:
            return self.entry(path / text[0])
        if opcode == GETATTR:
            return struct.pack("<QII", 0, 0, 0) + self.attributes(path)
        if opcode == SETATTR:
            valid, _, _, size = struct.unpack_from("<IIQQ", body)
            if valid & FATTR_SIZE:
                self.refuse("ftruncate")
                os.truncate(path, size)
            if valid & FATTR_MODE:
                self.refuse("chmod")
                path.chmod(struct.unpack_from("<I", body, 68)[0] & 0o7777)
            return struct.pack("<QII", 0, 0, 0) + self.attributes(path)
        if opcode == MKDIR:
            made = path / os.fsdecode(body[8:].rstrip(b"\0"))
            made.mkdir()
            return self.entry(made)
        if opcode in (UNLINK, RMDIR):
            gone = path / text[0]
            gone.unlink() if opcode == UNLINK else gone.rmdir()
            self.ids.pop(gone, None)
            return b""
        if opcode in (RENAME, RENAME2):
            folder = struct.unpack_from("<Q", body)[0]
            old, new = body[8 if opcode == RENAME else 16 :].split(b"\0")[:2]
            return self.rename(path / os.fsdecode(old), self.nodes[folder] / os.fsdecode(new))
        if opcode == LINK:
            old = self.nodes[struct.unpack_from("<Q", body)[0]]
            new = path / os.fsdecode(body[8:].rstrip(b"\0"))
            os.link(old, new)
            return self.entry(new)
        if opcode == OPEN:
            flags = struct.unpack_from("<I", body)[0]
            if flags & os.O_DIRECT and not self.how["direct"]:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            fd = os.open(path, flags & ~(os.O_DIRECT | os.O_CREAT | os.O_EXCL | os.O_APPEND))
            self.ends[fd] = 0
            return self.opened(fd)
        if opcode == CREATE:
            flags, mode = struct.unpack_from("<II", body)
            made = path / os.fsdecode(body[16:].rstrip(b"\0"))
            fd = os.open(made, flags & ~os.O_DIRECT | os.O_CREAT, mode & 0o7777)
            self.ends[fd] = 0
            return self.entry(made) + self.opened(fd)
        if opcode == READ:
            fh, offset, size = struct.unpack_from("<QQI", body)
            self.reads.append((fh, offset))
            return os.pread(fh, size, offset)
        if opcode == WRITE:
            fh, offset, size = struct.unpack_from("<QQI", body)
            self.written.append(offset)
            if self.how["sequential"] and offset != self.ends[fh]:
                self.ends[fh] = -1
                raise OSError(errno.EINVAL, "out of order")
            self.ends[fh] = offset + size
            self.poisoned.discard(fh)
            return struct.pack("<II", os.pwrite(fh, body[40 : 40 + size], offset), 0)
        if opcode == RELEASE:
            fh = struct.unpack_from("<Q", body)[0]
            if self.how["sequential"] and fh in self.poisoned:  # such an upload never shows
                with contextlib.suppress(OSError):
                    Path(f"/proc/self/fd/{fh}").readlink().unlink()
                self.poisoned.discard(fh)
            os.close(fh)
            return b""
        if opcode == FSYNC:
            os.fsync(struct.unpack_from("<Q", body)[0])
            return b""
        if opcode == OPENDIR:
            return struct.pack("<QIi", 0, 0, 0)
        if opcode == READDIR:
            _, offset, size = struct.unpack_from("<QQI", body)
            out = b""
            for i, entry in enumerate(sorted(os.scandir(path), key=lambda e: e.name)):
                name = os.fsencode(entry.name)
                record = struct.pack("<QQII", entry.inode(), i + 1, len(name), stat.S_IFMT(entry.stat().st_mode) >> 12)
                record += name + b"\0" * (-len(name) % 8)
                if i >= offset and len(out) + len(record) <= size:
                    out += record
            return out
        if opcode in (RELEASEDIR, FLUSH, DESTROY, FSYNCDIR):
            return b""
        if opcode == STATFS:
            return struct.pack("<5Q4I6I", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 20, 4096, 255, 4096, 0, *[0] * 6)
        raise OSError(errno.ENOSYS, "not needed")

    def told(self) -> dict[str, Any]:
        return {"counts": self.counts, "reads": self.reads, "written": self.written}


class RefusingFs:
    """A mount under test."""

    def __init__(self, path: Path, backing: Path, server: subprocess.Popen[str], report: Path) -> None:
        self.path = path
        self.backing = backing
        self._server = server
        self._report = report

    def inside(self) -> list[str]:
        """Names of what is there, hidden ones too, as the process behind it sees them."""
        return sorted(entry.name for entry in self.backing.iterdir())

    def end(self) -> dict[str, Any]:
        """Takes it away, and says what it has seen."""
        libc.umount2(os.fsencode(self.path), 2)
        self._server.wait(30)
        return json.loads(self._report.read_text())


@contextlib.contextmanager
def mounted(backing: Path, source: str = "refusing", **how: Any) -> Iterator[RefusingFs]:
    """The folder ``backing`` through a file system that refuses; for ``how`` see `Server`."""
    with tempfile.TemporaryDirectory(prefix="refusing-fs-") as place:
        path, report = Path(place) / "mount", Path(place) / "report"
        path.mkdir()
        command = [sys.executable, "-I", "-S", __file__, path, backing, source, json.dumps(how), report]
        server = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            if server.stdout.readline() != "mounted\n":
                raise OSError("the refusing file system could not be mounted")
            yield RefusingFs(path, backing, server, report)
        finally:
            libc.umount2(os.fsencode(path), 3)
            server.kill()
            server.wait()


def main(path: str, backing: str, source: str, how: str, report: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={MOST}"
    if libc.mount(source.encode(), os.fsencode(path), b"fuse.refusing", 2 | 4, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    server = Server(device, Path(backing), json.loads(how))
    server.serve()
    Path(report).write_text(json.dumps(server.told()))


if __name__ == "__main__":
    main(*sys.argv[1:])
