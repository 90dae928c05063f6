"""Writes THIRD-PARTY-LICENSES.txt: the licences of all that the wheel contains beside Penstock.

    python tools/licences.py [--check]

The texts are those that the crates bring, for each crate that is linked into the extension module on any platform that
has wheels; those of Rust's standard library from the toolchain; that of the unwinder, which zig links. Equal texts
stand once. `--check` writes nothing. It fails where the list of crates in the file is not that of Cargo.lock.

Standard library only.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from crates import ROOT, Crate, crates

PAGE = ROOT / "THIRD-PARTY-LICENSES.txt"
NAMES = re.compile(r"(un)?licen[sc]e|copying|notice|copyright", re.IGNORECASE)
RULE = "=" * 100
#: What each licence of the standard library and its crates is called in the toolchain's documentation.
STANDARD = ("Apache-2.0", "MIT", "LLVM-exception", "Unicode-3.0", "BSD-2-Clause")


def texts(crate: Crate) -> list[str]:
    """The licence texts in a crate's folder. Raises SystemExit for a crate that has none."""
    files = sorted(path for path in crate.folder.iterdir() if path.is_file() and NAMES.match(path.name))
    found = [path.read_text(errors="replace") for path in files if path.suffix not in (".rs", ".html")]
    if not found and crate.checksum is None:
        found = [(ROOT / "LICENSE").read_text()]  # of this project
    if not found:
        sys.exit(f"{crate.key} brings no licence text: add the text of {crate.licence} to tools/licences.py")
    return found


def rows(found: list[Crate]) -> list[str]:
    return [f"{crate.name:<24} {crate.version:<12} {crate.licence}" for crate in found if crate.linked]


def _sysroot() -> Path:
    said = subprocess.run(["rustc", "--print", "sysroot"], check=True, capture_output=True, text=True).stdout.strip()
    return Path(said) / "share" / "doc" / "rust" / "licenses"


def page(found: list[Crate]) -> str:
    """The whole file."""
    by_text: dict[str, list[str]] = defaultdict(list)

    def add(text: str, of: str) -> None:
        by_text["\n".join(line.rstrip() for line in text.strip().splitlines())].append(of)

    for crate in found:
        if crate.linked:
            for text in texts(crate):
                add(text, crate.key)
    for name in STANDARD:
        add((_sysroot() / f"{name}.txt").read_text(), "the standard library of Rust")
    zig = importlib.util.find_spec("ziglang")
    if zig is None or zig.origin is None:
        sys.exit("ziglang is not installed here, which has the licence of the unwinder that it links: make wheel")
    unwinder = Path(zig.origin).parent / "lib" / "libunwind" / "LICENSE.TXT"
    add(unwinder.read_text(), "libunwind, and what LLVM's compiler-rt adds")
    add((Path(zig.origin).parent / "LICENSE").read_text(), "zig's own compiler-rt")
    parts = [
        "What the wheel of Penstock contains beside Penstock, and its licences. tools/licences.py writes this file.\n",
        "\n".join(rows(found)),
        "the standard library of Rust          MIT OR Apache-2.0, and what its crates add",
        "libunwind (LLVM)                      Apache-2.0 WITH LLVM-exception",
        "compiler-rt (zig)                     MIT\n",
    ]
    for text, users in sorted(by_text.items(), key=lambda item: (item[1][0], item[0])):
        parts.append(f"{RULE}\n{', '.join(dict.fromkeys(users))}\n{RULE}\n\n{text}\n")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if crates are missing or too many")
    check: bool = parser.parse_args().check
    found = crates()
    if check:
        head = PAGE.read_text().partition(RULE)[0]
        wanted, there = set(rows(found)), {line for line in head.splitlines() if re.match(r"[\w-]+ +\d+\.", line)}
        for row in sorted(wanted ^ there):
            print(f"{PAGE.name}: {'lacks' if row in wanted else 'has, and the wheel has not:'} {row}")
        return 1 if wanted ^ there else 0
    PAGE.write_text(page(found))
    print(f"{PAGE.name}: {len(rows(found))} crates")
    return 0


if __name__ == "__main__":
    sys.exit(main())
