"""What the machine allows: programs that move the same bytes with no loader in the way."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]

#: Settings that are tried for each ceiling; the best on the files at hand is what loaders are put beside.
CALIBRATION: dict[str, list[tuple[str, ...]]] = {
    "direct": [
        ("--engine", "uring", "--depth", "2"),
        ("--engine", "uring", "--depth", "4"),
        ("--engine", "uring", "--depth", "8"),
        ("--engine", "uring", "--depth", "32"),
        ("--engine", "uring", "--depth", "16", "--block", "1048576"),
        ("--threads", "2"),
        ("--threads", "4"),
    ],
    "place": [("--threads", "4"), ("--threads", "8"), ("--threads", "16")],
    "fresh": [("--threads", "2", "--block", str(block << 20)) for block in (2, 4, 32)],
    "populate": [("--threads", "4"), ("--threads", "8"), ("--threads", "16")],
    "copy": [("--threads", str(threads), "--block", "2097152") for threads in (1, 2, 4)],
}


class Ceilings:
    """The example binary that moves the same bytes with no loader in the way."""

    def __init__(self) -> None:
        command = ["cargo", "build", "--release", "--quiet", "--package", "penstock-core", "--example", "ceilings"]
        subprocess.run(command, cwd=REPOSITORY, check=True)
        target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
        self.program = (REPOSITORY / target) / "release" / "examples" / "ceilings"

    def measure(self, measure: str, settings: Iterable[str], paths: list[Path]) -> dict[str, Any]:
        command = [str(self.program), measure, *settings, *map(str, paths)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found
