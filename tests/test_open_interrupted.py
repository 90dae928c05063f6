"""Ctrl-C at every point of `penstock.open`: a large index, many files, large headers, on known disks and new ones."""

from __future__ import annotations

import json
import signal
import struct
from pathlib import Path

import ordeal
import pytest
from ordeal import await_line, begin, finish

INDEX = "model.safetensors.index.json"
#: The signal is sent when the program has gone on for so long, in seconds.
MOMENTS = (0.01, 0.05, 0.15, 0.3)
#: Seconds from the signal to the exception, at most.
WITHIN = 0.2


def empty(path: Path, tensors: int = 0) -> Path:
    """A file of so many tensors without elements: its header is all that there is."""
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"{path.stem}.layers.{i}.weight": entry for i in range(tensors)}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


@pytest.fixture(scope="module")
def large_index(tmp_path_factory) -> Path:
    """An index of 60 MB: each of 800,000 tensors is said to be in a file of its own, and none of those is there."""
    folder = tmp_path_factory.mktemp("large-index")
    entries = (f'"model.layers.{i}.weight": "model-{i:07}.safetensors"' for i in range(800_000))
    (folder / INDEX).write_text('{"weight_map": {' + ",".join(entries) + "}}")
    return folder / INDEX


@pytest.fixture(scope="module")
def many_files(tmp_path_factory) -> Path:
    """A folder of 20,000 files of one tensor each."""
    folder = tmp_path_factory.mktemp("many-files")
    for i in range(20_000):
        empty(folder / f"model-{i:05}.safetensors", 1)
    return folder


@pytest.fixture(scope="module")
def large_headers(tmp_path_factory) -> Path:
    """A folder of three files with headers of 40 MB."""
    folder = tmp_path_factory.mktemp("large-headers")
    first = empty(folder / "a.safetensors", 450_000).read_bytes()
    for name in "bc":  # the same names: the last step of the open refuses them
        (folder / f"{name}.safetensors").write_bytes(first)
    return folder


PROGRAM = """
import signal, sys, threading, time
import ordeal, penstock
import penstock._numpy
source, known, moment = sys.argv[1], sys.argv[2], float(sys.argv[3])
if known:
    penstock.open(known).load(framework="np")
sent = []
def send():
    sent.append(time.monotonic())
    print("now", flush=True)
timer = threading.Timer(moment, send)
timer.daemon = True
print("ready", flush=True)
timer.start()
try:
    penstock.open(source)
    print("opened", flush=True)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - sent[0], flush=True)
except penstock.PenstockError as e:
    print("failed", type(e).__name__, flush=True)
# What was left behind ends soon
ordeal.soon(lambda: not ordeal.threads(), 20)
"""


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("disk", ["known", "new"])
@pytest.mark.parametrize("what", ["large_index", "many_files", "large_headers"])
@pytest.mark.machine
def test_ctrl_c_ends_an_open_at_once(request, tmp_path, what, disk, moment):
    source = request.getfixturevalue(what)
    known = str(ordeal.write(tmp_path / "small.safetensors", 2, 1000)) if disk == "known" else ""
    child = begin(PROGRAM, source, known, moment)
    await_line(child, "ready")
    assert child.stdout is not None
    line = child.stdout.readline()
    if line == "now\n":
        child.send_signal(signal.SIGINT)
        line = child.stdout.readline()
    code, _, err = finish(child)
    if not line.startswith("interrupted"):
        pytest.skip(f"the open was over by then: {line}")
    assert code == 0, err
    assert float(line.split()[1]) < WITHIN
