"""The memory of a process that saves to a bucket, beyond its tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fakegpu
import ordeal

MIB = 1 << 20
#: What a save may take besides its tensors and its staging memory.
ROOM = 64 * MIB
#: Tensors of 12.5 MB each: 600 MB, so that a copy of all of them would show.
TENSORS, SIDE = 48, 3536

#: Makes tensors, saves a small one, and then all of them. Prints how much its memory has grown at its peak.
PROGRAM = """
import gc, json, sys
from pathlib import Path
import numpy, penstock

spec = json.loads(sys.argv[1])

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

def tensors():
    if spec["kind"] == "gpu":
        return penstock.open(spec["source"]).load("cuda:0", framework="dlpack", progress=False)
    side = spec["side"]
    made = {f"layers.{i}.w": numpy.full((side, side), i % 250, numpy.uint8) for i in range(spec["tensors"])}
    return {name: tensor[::-1] for name, tensor in made.items()} if spec["kind"] == "packed" else made

def save(state, place):
    return penstock.save(state, place, storage=spec["storage"], options=spec["options"], progress=False)

state = tensors()
save({"small": numpy.arange(100)}, spec["place"] + "/small")
penstock.release_staging()
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS:")
report = save(state, spec["place"])
print(json.dumps({
    "grown": status("VmHWM:") - before, "nbytes": report.nbytes, "file_bytes": report.file_bytes,
    "peak_staging": report.peak_staging, "fallbacks": list(report.fallbacks), "resident": before,
}, default=str))
"""


def source(kind: str, folder: Path) -> Path | None:
    """The checkpoint that tensors of a GPU are loaded from: holes, which take no disk."""
    if kind != "gpu":
        return None
    return ordeal.write(folder / "source.safetensors", TENSORS, SIDE * SIDE, sparse=True)


def saved(kind: str, place: str, storage: Any, options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a process of its own tells of its save. ``kind``: tensors that are in order, to be packed, or of a GPU."""
    spec = {
        "kind": kind, "place": place, "storage": storage, "options": options, "tensors": TENSORS, "side": SIDE,
        "source": str(source(kind, folder)),
    }  # fmt: skip
    environment = dict(os.environ)
    if kind == "gpu":
        environment["PENSTOCK_GPU_LIBRARY"] = f"cuda:{fakegpu.LIBRARY}"
    command = [sys.executable, "-c", PROGRAM, json.dumps(spec, default=str)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=240 * ordeal.load_factor()
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def bounded(found: dict[str, Any], staging: int) -> None:
    """The save took no more memory than it may, and a copy of all tensors would have been more than that."""
    assert found["nbytes"] == TENSORS * SIDE * SIDE
    assert found["resident"] >= found["nbytes"], "the tensors are in this process"
    assert found["nbytes"] > 1.5 * (staging + ROOM)
    assert found["grown"] <= staging + ROOM, found
    assert found["peak_staging"] <= staging
