"""A drive with a volatile write cache, for the guest of `tools/lab.sh --keep-drive`: a server of NBD for one image.

    python3 tools/volatile_drive.py IMAGE SOCKET REPORT [--qemu PIDFILE] [--lose SEED:N --armed FILE]

A write that was answered is in the cache, and reads see it. A flush puts into the image what was answered before the
flush came. With `--lose` the power is lost when the guest has written N bytes since FILE is there, or with `SEED:Ns` N
small writes (64 KiB at most), which are mostly those of metadata and maps. QEMU is killed first. Then a part of the
writes that were not flushed goes into the image, by the seed: none, all, any of them, any of their sectors (512
bytes), the small ones or the large ones. The rest is gone.

A drive may do more than this: lose what was flushed, mix the bytes of a sector, or write beside the place. That is not
modelled.

The protocol: https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md (fixed newstyle, simple replies).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import signal
import socket
import struct
from pathlib import Path
from typing import Any

SECTOR = 512
#: Bytes of a write that is small: a map or metadata, not a block of the disk cache.
SMALL = 64 << 10

MAGIC, OPTION, REPLY = b"NBDMAGIC", b"IHAVEOPT", 0x3E889045565A9
GO, ABORT, ACK, INFO, UNSUPPORTED = 7, 2, 1, 3, 1 << 31 | 1
#: Of the handshake: fixed newstyle, no zeros. Of the export: it has flags, and takes flushes.
NEWSTYLE, EXPORT = 1 | 2, 1 | 4
REQUEST, SIMPLE = 0x25609513, 0x67446698
HEADER = struct.Struct(">IHHQQI")
READ, WRITE, DISCONNECT, FLUSH = 0, 1, 2, 3
INVALID = 22


class Ended(Exception):
    """The other side is gone."""


def receive(link: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = link.recv(count - len(found))
        if not part:
            raise Ended
        found += part
    return bytes(found)


def shake_hands(link: socket.socket, size: int) -> None:
    link.sendall(MAGIC + OPTION + struct.pack(">H", NEWSTYLE))
    receive(link, 4)
    while True:
        magic, option, length = struct.unpack(">8sII", receive(link, 16))
        if magic != OPTION:
            raise Ended
        receive(link, length)

        def answer(kind: int, data: bytes = b"", option: int = option) -> None:
            link.sendall(struct.pack(">QIII", REPLY, option, kind, len(data)) + data)

        if option == GO:
            answer(INFO, struct.pack(">HQH", 0, size, EXPORT))
            return answer(ACK)
        answer(ACK if option == ABORT else UNSUPPORTED)


class Drive:
    """The image, and what is on its way to it."""

    def __init__(self, image: Path) -> None:
        self.file = image.open("r+b")
        self.size = os.fstat(self.file.fileno()).st_size
        #: The image with all writes: reads see it. Pages that nobody wrote are the image's.
        self.live = mmap.mmap(self.file.fileno(), self.size, access=mmap.ACCESS_COPY)
        #: Writes that were answered and not flushed, in order.
        self.volatile: list[tuple[int, bytes]] = []
        self.counts = {"written": 0, "writes": 0, "small": 0, "flushes": 0}

    def write(self, at: int, data: bytes) -> None:
        self.live[at : at + len(data)] = data
        self.volatile.append((at, data))
        self.counts["written"] += len(data)
        self.counts["writes"] += 1
        self.counts["small"] += len(data) <= SMALL

    def keep(self, writes: list[tuple[int, bytes]]) -> None:
        for at, data in writes:
            os.pwrite(self.file.fileno(), data, at)

    def flush(self) -> None:
        self.keep(self.volatile)
        self.volatile.clear()
        self.counts["flushes"] += 1

    def lose_power(self, seed: str) -> dict[str, Any]:
        """Keeps a part of what was not flushed. Returns what came of it."""
        chance = random.Random(seed)
        how = chance.choice(["none", "all", "some", "some", "torn", "small", "large"])
        share = chance.uniform(0.1, 0.9)
        kept: list[tuple[int, bytes]] = []
        for at, data in self.volatile:
            if how == "torn":
                sectors = range(0, len(data), SECTOR)
                kept += [(at + one, data[one : one + SECTOR]) for one in sectors if chance.random() < share]
            elif {
                "none": False,
                "all": True,
                "some": chance.random() < share,
                "small": len(data) <= SMALL,
                "large": len(data) > SMALL,
            }[how]:
                kept.append((at, data))
        self.keep(kept)
        lost = sum(len(data) for _, data in self.volatile) - sum(len(data) for _, data in kept)
        return {"kept": how, "volatile": len(self.volatile), "lost_bytes": lost}


class Served:
    """The requests of one guest."""

    def __init__(self, link: socket.socket, drive: Drive, armed: Path | None, most: str) -> None:
        self.link, self.drive, self.armed = link, drive, armed
        self.count, self.most = "small" if most.endswith("s") else "written", int(most.rstrip("s") or 0)
        self.since: int | None = None
        self.buffer = bytearray()

    def requests(self) -> list[tuple[int, int, int, int, bytes]]:
        """The requests that are there, at least one: command, handle, offset, length, data."""
        found: list[tuple[int, int, int, int, bytes]] = []
        while True:
            while len(self.buffer) >= HEADER.size:
                magic, _, command, handle, at, length = HEADER.unpack_from(self.buffer)
                if magic != REQUEST:
                    raise Ended
                whole = HEADER.size + (length if command == WRITE else 0)
                if len(self.buffer) < whole:
                    break
                found.append((command, handle, at, length, bytes(self.buffer[HEADER.size : whole])))
                del self.buffer[:whole]
            self.link.setblocking(not found)
            try:
                part = self.link.recv(4 << 20)
            except BlockingIOError:
                self.link.setblocking(True)
                return found
            if not part:
                raise Ended
            self.buffer += part

    def answer(self, handle: int, error: int = 0, data: bytes = b"") -> None:
        self.link.sendall(struct.pack(">IIQ", SIMPLE, error, handle) + data)

    def is_over(self) -> bool:
        """True if the power is lost now."""
        if self.armed is None:
            return False
        if self.since is None and self.armed.exists():
            self.since = self.drive.counts[self.count]
        return self.since is not None and self.drive.counts[self.count] - self.since >= self.most

    def serve(self) -> bool:
        """Answers requests until the guest ends (False), or the power is lost (True)."""
        while True:
            # A flush covers what was answered before it came, and nothing that came with it.
            for command, handle, at, length, data in sorted(self.requests(), key=lambda one: one[0] != FLUSH):
                if command == FLUSH:
                    self.drive.flush()
                    self.answer(handle)
                elif command == WRITE:
                    self.drive.write(at, data)
                    if self.is_over():
                        return True
                    self.answer(handle)
                elif command == READ and at + length <= self.drive.size:
                    self.answer(handle, 0, self.drive.live[at : at + length])
                elif command == DISCONNECT:
                    return False
                else:
                    self.answer(handle, INVALID)


def main() -> None:
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument("image", type=Path)
    about.add_argument("socket", type=Path)
    about.add_argument("report", type=Path)
    about.add_argument("--qemu", type=Path)
    about.add_argument("--lose", default="")
    about.add_argument("--armed", type=Path)
    told = about.parse_args()
    seed, _, most = told.lose.partition(":")
    drive = Drive(told.image)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(told.socket))
        listener.listen(1)
        link, _ = listener.accept()
    is_lost = False
    with link, contextlib.suppress(Ended, ConnectionError):
        shake_hands(link, drive.size)
        is_lost = Served(link, drive, told.armed if told.lose else None, most).serve()
        if is_lost:
            os.kill(int(told.qemu.read_text()), signal.SIGKILL)
    report: dict[str, Any] = {"lost": is_lost}
    if is_lost:
        report |= drive.lose_power(seed)
    else:
        # The machine was switched off: the drive has the time to write all
        drive.flush()
    os.fsync(drive.file.fileno())
    told.report.write_text(json.dumps(report | drive.counts))


if __name__ == "__main__":
    main()
