"""Runs `load` (crates/load) under valgrind memcheck, once for each way that bytes can travel: `make valgrind`.

The checkpoint is made here: a few hundred tensors of odd sizes, scalars and empty ones among them. `load` compares
every byte with a plain read; valgrind adds that nothing reads or writes outside its memory, that
nothing uninitialised decides anything, and that nothing is lost.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

WAYS: list[list[str]] = [
    [],
    ["--copy"],
    ["--io", "buffered"],
    ["--io", "direct"],
    ["--io", "threads"],
]
MEMCHECK = [
    "valgrind",
    "--quiet",
    "--error-exitcode=9",
    "--leak-check=full",
    # Slabs kept for the next load stay reachable, on purpose.
    "--show-leak-kinds=definite,indirect",
    "--errors-for-leak-kinds=definite,indirect",
    # Threads take turns; by default one that computes can keep the others out for seconds.
    "--fair-sched=yes",
]


def checkpoint(path: Path, tensors: int = 300) -> None:
    """Writes a checkpoint of small tensors, always the same but for its random bytes."""
    pick = random.Random(0)
    header, at = {}, 0
    for i in range(tensors):
        dtype, size = pick.choice([("F32", 4), ("BF16", 2), ("U8", 1)])
        shape = pick.choice([[], [0, 3], [1], [2], [7], [64], [1000], [20000]])
        nbytes = size
        for extent in shape:
            nbytes *= extent
        header[f"t{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + os.urandom(at))


def main() -> int:
    """Status 0 where every way is clean."""
    [program] = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        checkpoint(path)
        for way in WAYS:
            print("memcheck: load", *way, flush=True)
            run = subprocess.run([*MEMCHECK, program, *way, str(path)], stdout=subprocess.PIPE, text=True)
            if run.returncode != 0 or "every byte is that of the files" not in run.stdout:
                print(run.stdout)
                print(f"memcheck: load {' '.join(way)}: status {run.returncode}")
                return 1
    print(f"memcheck: {len(WAYS)} ways, no error, no byte lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
