"""Fails if a shared object needs a newer glibc than wheels promise.

    python tools/glibc.py [--most 2.28] FILE...

A FILE is a wheel, of which every shared object is read, or a shared object. Its section `.gnu.version_r` (type
SHT_GNU_verneed; LSB 5.0, "Symbol Versioning") lists the versions of symbols that it needs of other libraries. The
highest `GLIBC_` among them is the oldest glibc that can load it. This reads the file, and runs nothing on that glibc.

Standard library only.
"""

from __future__ import annotations

import argparse
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

MOST = "2.28"
_VERNEED = 0x6FFFFFFE
_MACHINES = {62: "x86_64", 183: "aarch64"}


def number(version: str) -> tuple[int, ...]:
    """(2, 28) for "2.28"."""
    return tuple(int(part) for part in version.split("."))


def _name(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def machine(data: bytes) -> str:
    """The processor that an ELF file is for."""
    return _MACHINES.get(struct.unpack_from("<H", data, 18)[0], "unknown")


def needed(data: bytes) -> dict[str, set[str]]:
    """The libraries that an ELF file needs versions of symbols of, and those versions.

    Raises:
        ValueError: this is no 64-bit little-endian ELF file with a table of sections.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit little-endian ELF file")
    table = struct.unpack_from("<Q", data, 40)[0]
    size, count = struct.unpack_from("<HH", data, 58)
    if table == 0 or count == 0:
        raise ValueError("no table of sections: what it needs cannot be read")
    # type, offset, size, link (the section with the names), info (how many libraries)
    sections = [struct.unpack_from("<4xI16xQQII", data, table + i * size) for i in range(count)]
    found: dict[str, set[str]] = {}
    for kind, offset, _, link, libraries in sections:
        if kind != _VERNEED:
            continue
        strings = data[sections[link][1] : sections[link][1] + sections[link][2]]
        at = offset
        for _ in range(libraries):
            _, versions, file, first, following = struct.unpack_from("<HHIII", data, at)
            names = found.setdefault(_name(strings, file), set())
            entry = at + first
            for _ in range(versions):
                name, more = struct.unpack_from("<8xII", data, entry)
                names.add(_name(strings, name))
                entry += more
            at += following
    return found


def glibc(data: bytes) -> list[str]:
    """The versions of glibc that an ELF file needs symbols of, the newest last: ["2.2.5", "2.28"]."""
    names = {name.removeprefix("GLIBC_") for names in needed(data).values() for name in names}
    return sorted((name for name in names if name[0].isdigit()), key=number)


def shared_objects(path: Path) -> Iterator[tuple[str, bytes]]:
    """The shared objects of a wheel, or the one that the file is, and how to name each."""
    if path.suffix != ".whl":
        yield str(path), path.read_bytes()
        return
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            data = wheel.read(name)
            if data[:4] == b"\x7fELF":
                yield f"{path.name}: {name}", data


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most", default=MOST, metavar="VERSION", help=f"the newest glibc allowed (default: {MOST})")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    given = parser.parse_args()
    failed = False
    for path in given.files:
        objects = list(shared_objects(path))
        if not objects:
            print(f"FAIL {path}: no shared object in it")
            failed = True
        for name, data in objects:
            versions = glibc(data)
            newest = versions[-1] if versions else "none"
            wrong = bool(versions) and number(newest) > number(given.most)
            failed |= wrong
            word = "FAIL" if wrong else "pass"
            print(f"{word} {name} ({machine(data)}): newest GLIBC_ {newest}, allowed {given.most}; not run on it")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
