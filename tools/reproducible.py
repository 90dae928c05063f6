"""Builds a release of HEAD twice, in two folders, and compares every byte.

    python tools/reproducible.py [--target TRIPLE]... [--rehearsal] [--keep FOLDER]

Both run at the same time. The second has a longer path, another time zone, locale and umask. Prints a line for each
file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from crates import ROOT, TARGETS

SECOND = {"TZ": "Asia/Kathmandu", "LC_ALL": "C"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", action="append", choices=TARGETS, default=[])
    parser.add_argument("--rehearsal", action="store_true", help="do not optimise")
    parser.add_argument("--keep", type=Path, help="a folder for the first release, or for both if they differ")
    arguments = parser.parse_args()
    targets = [word for target in arguments.target for word in ("--target", target)]
    targets += ["--rehearsal"] * arguments.rehearsal
    with tempfile.TemporaryDirectory(prefix="penstock-reproducible-") as folder:
        places = (Path(folder, "a"), Path(folder, "another", "and-longer"))
        running = []
        for place, more, mask in zip(places, ({}, SECOND), (0o022, 0o077), strict=True):
            command = [sys.executable, ROOT / "tools" / "release.py", "--work", place / "work", "--out", place / "dist"]
            running.append(subprocess.Popen([*command, *targets], env={**os.environ, **more}, umask=mask))
        statuses = [build.wait() for build in running]
        if any(statuses):
            return 1
        first, second = (place / "dist" for place in places)
        names = {file.name for folder in (first, second) for file in folder.iterdir()}
        failed = 0
        for name in sorted(names):
            paths = first / name, second / name
            same = all(path.exists() for path in paths) and paths[0].read_bytes() == paths[1].read_bytes()
            failed += not same
            print(f"{'pass' if same else 'FAIL'} {name} is {'the same' if same else 'not the same'} in two builds")
        if arguments.keep is not None:
            shutil.copytree(first if not failed else Path(folder), arguments.keep, dirs_exist_ok=True)
        print(f"{len(names) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
