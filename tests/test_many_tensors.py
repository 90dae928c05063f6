"""371,474 tensors in 11 files with 37 MB of headers: opened and loaded in the time that the project promises."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pagecache
import penstock
import pytest
import torch
from models import accounted
from penstock.bench import reference

TENSORS = 371_474
#: Tries: other programs share the machine.
TRIES = 3

#: Opens and loads a checkpoint in a process of its own, with torch imported, and prints what it took. "waited" is the
#: time for which the main thread was ready to run and others had the core: on a machine of its own there is none.
PROGRAM = """
import gc, json, sys, time
import torch, penstock

def waited():
    return int(open("/proc/thread-self/schedstat").read().split()[1]) / 1e9

penstock.open(sys.argv[2]).load(progress=False)  # what the first load of a process sets up
begun, before = time.perf_counter(), waited()
checkpoint = penstock.open(sys.argv[1])
opened, between = time.perf_counter(), waited()
tensors = checkpoint.load(progress=False, options=json.loads(sys.argv[3]))
loaded, after = time.perf_counter(), waited()
assert len(tensors) == len(checkpoint) == 371_474
assert len({tensor.data_ptr() for tensor in tensors.values()}) == 371_474
report = {key: value for key, value in checkpoint.last_report.items() if isinstance(value, (int, float))}
print(json.dumps({
    "open": opened - begun, "load": loaded - opened,
    "open_waited": between - before, "load_waited": after - between, "report": report,
}))
"""


@pytest.fixture
def files(many: Path) -> list[Path]:
    return sorted(many.glob("*.safetensors"))


def test_the_layout_is_as_large_as_promised(many: Path, files: list[Path]) -> None:
    assert len(penstock.open(many)) == TENSORS
    assert len(files) == 11
    headers = sum(int.from_bytes(path.open("rb").read(8), "little") for path in files)
    assert 36e6 < headers < 40e6


@pytest.mark.parametrize("copy", [None, True], ids=["mapped", "private"])
def test_opened_within_400_ms_and_loaded_within_1800_ms(
    many: Path, files: list[Path], python: Callable[..., Any], tmp_path: Path, copy: bool | None
) -> None:
    from penstock.synthetic import synth

    small = synth.write_file(tmp_path / "small.safetensors", [synth.Tensor("a", "F32", (8,))])
    pagecache.put(files, "warm")
    seen = []
    for _ in range(TRIES):
        done = python(PROGRAM, many, small, json.dumps({"copy": copy}))
        assert done.returncode == 0, done.stderr
        took = json.loads(done.stdout)
        seen.append(took)
        opening = took["open"] - took["open_waited"]
        both = opening + took["load"] - took["load_waited"]
        report = took["report"]
        assert report["tensors"] == TENSORS
        assert 0 < report["seconds_per_tensor"] < 1e-4
        if opening <= 0.4 and both <= 1.8:
            return
    raise AssertionError(f"{TRIES} tries: {json.dumps(seen, indent=1)}")


@pytest.mark.parametrize("copy", [None, True], ids=["mapped", "private"])
def test_every_byte_of_every_tensor(many: Path, files: list[Path], copy: bool | None) -> None:
    checkpoint = penstock.open(many)
    tensors = checkpoint.load(options={"copy": copy}, progress=False)
    accounted(checkpoint.last_report, checkpoint.nbytes)
    entries = reference.entries_of(many)
    assert list(tensors) == list(entries)
    held = {path: np.fromfile(path, dtype=np.uint8) for path in files}
    for name, entry in entries.items():
        data = held[entry.file][entry.offset : entry.offset + entry.nbytes]
        tensor = tensors[name]
        assert tensor.shape == entry.shape, name
        # A view as bytes needs a dimension, which a scalar has not
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == data.tobytes(), name


def test_one_rank_of_many_tensors(many: Path) -> None:
    checkpoint = penstock.open(many)
    entries = reference.entries_of(many)

    def mine(name: str) -> bool:
        return ".experts." in name and int(name.split(".experts.")[1].split(".")[0]) % 64 == 5

    found = 0
    for name, array in checkpoint.stream(names=mine, framework="np", dtype="raw"):
        assert array.tobytes() == reference.raw(entries[name]).tobytes()
        found += 1
    assert found == 60 * 8 * 3 * 4


@pytest.mark.machine
def test_taking_a_few_costs_the_same_however_many_there_are(many: Path, gpt2: Path) -> None:
    def cpu_seconds(checkpoint: penstock.Checkpoint) -> float:
        """CPU time of the whole process for a load of ten tensors, at its least: other programs share the cores."""
        names = list(checkpoint.keys())[:: len(checkpoint) // 10][:10]
        seen = []
        for _ in range(30):
            begun = time.process_time()
            tensors = checkpoint.load(names=names, progress=False)
            seen.append(time.process_time() - begun)
            assert list(tensors) == names
        return min(seen)

    few, of_many = cpu_seconds(penstock.open(gpt2)), cpu_seconds(penstock.open(many))
    # Ten of 160 against ten of 371,474, which lie in more files
    assert of_many < 4 * few, (few, of_many)
