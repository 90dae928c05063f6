"""371,474 tensors in 11 files with 37 MB of headers: opened and loaded in the time that the project promises."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pagecache
import penstock
import pytest
from models import accounted
from penstock.bench import reference

TENSORS = 371_474
#: Tries: other programs share the machine.
TRIES = 6
#: Seconds that Python's json takes for the same headers where the bounds hold. The processors of a virtual machine are
#: slower at times, by 1.7, without a word; then json takes longer too, measured before and after in the same process.
#: The bounds grow with it, to twice as much at most.
PYTHON = 0.62

#: Opens and loads a checkpoint in a process of its own, with torch imported, and prints what it took. "waited" is the
#: time for which the main thread was ready to run and others had the core: on a machine of its own there is none.
PROGRAM = """
import gc, glob, json, sys, time
import torch, penstock

def python_reads_the_headers():
    texts = []
    for path in glob.glob(sys.argv[1] + "/*.safetensors"):
        with open(path, "rb") as file:
            texts.append(file.read(int.from_bytes(file.read(8), "little")))
    gc.disable()
    begun, before = time.perf_counter(), waited()
    read = [json.loads(text) for text in texts]
    took = time.perf_counter() - begun - (waited() - before)
    gc.enable()
    return took

def waited():
    return int(open("/proc/thread-self/schedstat").read().split()[1]) / 1e9

penstock.open(sys.argv[2]).load(progress=False)  # what the first load of a process sets up
python = python_reads_the_headers()
begun, before = time.perf_counter(), waited()
checkpoint = penstock.open(sys.argv[1])
opened, between = time.perf_counter(), waited()
tensors = checkpoint.load(progress=False, options=json.loads(sys.argv[3]))
loaded, after = time.perf_counter(), waited()
python = (python + python_reads_the_headers()) / 2
assert len(tensors) == len(checkpoint) == 371_474
assert len({tensor.data_ptr() for tensor in tensors.values()}) == 371_474
report = {key: value for key, value in checkpoint.last_report.items() if isinstance(value, (int, float))}
print(json.dumps({
    "open": opened - begun, "load": loaded - opened,
    "open_waited": between - before, "load_waited": after - between, "python": python, "report": report,
}))
"""


@pytest.fixture
def files(many: Path) -> list[Path]:
    return sorted(many.glob("*.safetensors"))


@pytest.fixture(scope="module")
def entries(many: Path) -> dict[str, reference.Entry]:
    return reference.entries_of(many)


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
        slower = min(2.0, max(1.0, took["python"] / PYTHON))
        if opening <= 0.4 * slower and both <= 1.8 * slower:
            return
    raise AssertionError(f"{TRIES} tries: {json.dumps(seen, indent=1)}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("copy", [None, True], ids=["mapped", "private"])
def test_every_byte_of_every_tensor(
    many: Path, files: list[Path], entries: dict[str, reference.Entry], copy: bool | None
) -> None:
    checkpoint = penstock.open(many)
    tensors = checkpoint.load(options={"copy": copy}, progress=False)
    accounted(checkpoint.last_report, checkpoint.nbytes)
    assert list(tensors) == list(entries)
    held = {path: path.read_bytes() for path in files}
    for (name, tensor), entry in zip(tensors.items(), entries.values(), strict=True):
        assert tensor.shape == entry.shape and tensor.nbytes == entry.nbytes, name
        found = ctypes.string_at(tensor.data_ptr(), entry.nbytes)
        assert found == held[entry.file][entry.offset : entry.offset + entry.nbytes], name


def test_one_rank_of_many_tensors(many: Path, entries: dict[str, reference.Entry]) -> None:
    checkpoint = penstock.open(many)

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
