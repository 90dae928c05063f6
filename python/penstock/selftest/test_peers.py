"""Penstock beside its peers, in tables. It judges only that penstock loads, and that all load the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import results
from .gpus import FAKE
from .peers import NO_TIME

#: Seconds for all tables.
SECONDS = float(os.environ.get("PENSTOCK_SELFTEST_PEERS", "200"))


def test_peers_in_one_rotation(folder: Path, tmp_path: Path) -> None:
    """Without the `gpu` fixture: this process need not touch the GPU. Peers cannot use the fake driver."""
    device = "cpu" if FAKE else "cuda:0"
    noted = os.environ.get(results.FOLDER) or str(tmp_path)
    command = [sys.executable, "-m", "penstock.selftest.peers", device, str(folder), str(SECONDS)]
    environment = {**os.environ, results.FOLDER: noted}
    done = subprocess.run(command, check=False, timeout=SECONDS + 40, capture_output=True, text=True, env=environment)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[tuple[str, dict[str, Any]]] = [
        (line["table"], line["row"]) for line in results.read(Path(noted)) if "table" in line
    ]
    ours = [cells for _, cells in rows if cells.get("contestant") == "penstock"]
    assert ours and all(cells.get("error") in (None, NO_TIME) for cells in ours), ours
    assert not [table for table, cells in rows if cells.get("contestant") == "THE CONTENT DIFFERS"]
