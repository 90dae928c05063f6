"""The disk cache from outside: its settings, its files as their format says, its locks as the kernel says, and a server
that counts.

Nothing here uses Penstock's own reading of the cache.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ordeal
import pytest
from penstock.bench.served import Served

MIB = 1 << 20
#: The folder of the server's program.
TOOLS = os.environ.get("PENSTOCK_TEST_NETBENCH")
wants_server = pytest.mark.skipif(
    not TOOLS, reason="PENSTOCK_TEST_NETBENCH names no folder: cargo build --release -p netbench"
)
#: Tags of slots that are synced, claimed, and given back to a silent holder. Another one that is not 0 is of this boot.
SYNCED, CLAIMED, GIVEN_BACK = 0x636E7953, 0x6D696C43, 0x6B636142


def settings(folder: Path, **more: Any) -> Any:
    """`storage=` with a cache. The machines of tests have full disks: nothing has to stay free."""
    return {"disk_cache": str(folder), "disk_cache_free": 0, **more}


def serving(folder: Path, **link: str) -> Served:
    assert TOOLS
    return Served(folder, Path(TOOLS), link={name.replace("_", "-"): text for name, text in link.items()})


class Asked:
    """Requests and bytes of bodies that a server has answered with since."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._before = served.counts()
        self.requests = self.bytes = 0

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        # The answer of the first question was counted behind it
        now = self._served.counts()
        self.requests = now["requests"] - self._before["requests"]
        self.bytes = now["bytes"] - self._before["bytes"]


def files(folder: Path, ending: str) -> list[Path]:
    """The cache's files of entries that end so."""
    return sorted((folder / "objects").glob(f"??/*{ending}"))


def tags(map_file: Path) -> list[tuple[int, int]]:
    """Each block with the tag of its state, by a map."""
    content = map_file.read_bytes()
    length, size = struct.unpack_from("<I", content, 24)[0], struct.unpack_from("<Q", content, 16)[0]
    first = -(-(64 + length) // 4096) * 4096
    slots = struct.unpack_from(f"<{-(-size // MIB)}Q", content, first)
    return [(number, slot >> 32) for number, slot in enumerate(slots)]


def blocks(map_file: Path) -> list[int]:
    """The blocks that are there, by a map."""
    return [number for number, tag in tags(map_file) if tag not in (0, CLAIMED, GIVEN_BACK)]


def states(map_file: Path) -> Counter[str]:
    """How many blocks are missing, claimed, written and synced, by a map."""
    names = {0: "missing", CLAIMED: "claimed", GIVEN_BACK: "claimed", SYNCED: "synced"}
    return Counter(names.get(tag, "written") for _, tag in tags(map_file))


def there(folder: Path) -> int:
    """Bytes that the cache has, by its maps: the last block of a file counts as a whole one."""
    return sum(len(blocks(map_file)) for map_file in files(folder, ".map")) * MIB


def locks(folder: Path) -> list[str]:
    """The locks on files of the cache, of all processes."""
    inodes = {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}
    found = []
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.replace("->", "").split()
        if int(words[5].split(":")[2]) in inodes:
            found.append(line)
    return found


def right_blocks(data_files: list[Path], versions: list[Path]) -> int:
    """Asserts that blocks that are there have the bytes of one of these files. Returns how many there are."""
    count = 0
    contents = [path.read_bytes() for path in versions]
    for data_file in data_files:
        data, there = data_file.read_bytes(), blocks(data_file.with_suffix(".map"))

        def has(content: bytes, data: bytes = data, there: list[int] = there) -> bool:
            parts = (slice(number * MIB, (number + 1) * MIB) for number in there)
            return len(content) == len(data) and all(data[part] == content[part] for part in parts)

        if not any(map(has, contents)):
            raise ordeal.Wrong(f"{data_file} has other bytes than every version")
        count += len(there)
    return count


def finished(report: Any) -> Any:
    """The work of the cache for a load, when it has ended."""
    assert report.disk_cache.wait(60 * ordeal.load_factor()), report.disk_cache
    return report.disk_cache


#: A user who is not root.
NOBODY = 65534
as_root = pytest.mark.skipif("os.geteuid() != 0", reason="only root can be another user, and mount")


@contextlib.contextmanager
def user(number: int) -> Iterator[None]:
    """This process as another user, without the rights of root."""
    os.setegid(number)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@contextlib.contextmanager
def open_to_all() -> Iterator[Path]:
    """A temporary folder that every user can enter."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


@contextlib.contextmanager
def small_disk(at: Path, size: int) -> Iterator[None]:
    """A file system in memory of so many bytes."""
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "penstock-test", at], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", at], check=True)
