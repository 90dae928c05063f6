"""The example programs of InstantTensor's and fastsafetensors' READMEs, unchanged, on penstock's faces of them.

They are taken from the description that an installed package carries: those of the tests' own environment, or of the
benchmark's. Where neither has it these tests are skipped; `test_compat_instanttensor.py` and
`test_compat_fastsafetensors.py` have programs of our own words.
"""

from __future__ import annotations

import gc
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import fakegpu
import pytest
import torch
from conftest import Oracle, raw
from fakegpu import FakeTorch, fresh, torch_on
from penstock.compat import fastsafetensors, instanttensor
from penstock.synthetic.synth import Tensor

#: Where `make bench` installs the peers.
BENCH = sorted(str(path) for path in Path(__file__).parents[1].glob(".bench/venv/lib/python3*/site-packages"))
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def programs(package: str) -> list[str]:
    """The blocks of Python in a package's description, in order."""
    found = next(metadata.distributions(name=package), None) or next(
        metadata.distributions(name=package, path=BENCH), None
    )
    if found is None:
        pytest.skip(f"{package} is not installed")
    described = found.metadata
    text = described["Description"] or described.get_payload()
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]


@pytest.fixture
def files(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Oracle:
    """What the programs open, in the current directory, by the names that they have there."""
    monkeypatch.chdir(tmp_path)
    first = [Tensor("model.embed_tokens.weight", "BF16", (60, 16)), Tensor("model.layers.0.w", "F32", (33, 8))]
    second = [Tensor("model.layers.1.w", "F32", (33, 8)), Tensor("model.layers.10.b", "I64", (3,))]
    write(*first, name=FILES[0], metadata={"format": "pt"})
    write(*second, name=FILES[1], metadata={"format": "pt"}, seed=1)
    write(*first, *second, name="model.safetensors", seed=2)
    return Oracle([Path(file) for file in FILES])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    """A GPU, of which there is one, and a process group for it, of this process alone."""
    if not fakegpu.LIBRARY:
        pytest.skip(fakegpu.NO_LIBRARY)
    dist = torch.distributed
    begin = dist.init_process_group

    def init_process_group(backend: str) -> None:
        assert backend == "nccl"
        begin("gloo", store=dist.HashStore(), rank=0, world_size=1)

    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with fresh() as fake, torch_on(fake, monkeypatch) as side:
        yield side
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


def same(gpu: FakeTorch, tensors: dict[str, torch.Tensor], files: Oracle) -> None:
    """Asserts that all tensors of the files are there, on the GPU, byte for byte."""
    assert sorted(tensors) == sorted(files.entries)
    for name, tensor in tensors.items():
        assert gpu.pool.contains(tensor.data_ptr())
        assert gpu.fake.read(tensor.data_ptr(), tensor.nbytes) == files[name], name


def test_programs_for_instanttensor(files: Oracle, gpu: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    written = programs("instanttensor")
    assert len(written) >= 5
    monkeypatch.setitem(sys.modules, "instanttensor", instanttensor)
    single = Oracle(Path("model.safetensors"))
    # What the programs take for given: a model with parameters by name
    model = {name: torch.zeros(files.shape(name), dtype=dtype_of(files, name)) for name in files.entries}
    space: dict[str, Any] = {"model_param": model}
    ran = set()
    for program in written:
        space.pop("tensors", None) if "tensors = {}" in program else None
        exec(compile(program, "README", "exec"), space)
        if "tensors = {}" in program:
            same(gpu, space["tensors"], files if "files = [" in program else single)
            ran.add("into a dict")
        if "tensor_filter=" in program:
            same(gpu, space["tensors"], files)
            ran.add("filtered")
        if "model_param[" in program:
            assert {name: raw(tensor) for name, tensor in model.items()} == {name: files[name] for name in model}
            ran.add("copied")
        if "BackendPolicy" in program:
            ran.add("backends")
    assert ran == {"into a dict", "filtered", "copied", "backends"}
    space.clear()


def dtype_of(files: Oracle, name: str) -> torch.dtype:
    return {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}[files.entries[name].dtype]


def test_programs_for_fastsafetensors(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the CPU. Those of two ranks wait for process groups; 0.5 has none in its README, 0.1 to 0.3 have."""
    written = [program for program in programs("fastsafetensors") if "torch.distributed" not in program]
    if not written:
        pytest.skip("the README of this fastsafetensors has no program for one process in Python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "fastsafetensors", fastsafetensors)
    write(Tensor("a0", "F16", (16, 8)), name="a.safetensors")
    write(Tensor("b0", "F16", (16, 8)), name="b.safetensors", seed=1)
    expected = Oracle(Path("a.safetensors"))["a0"]
    for program in written:
        # What some of them take for given
        space: dict[str, Any] = {"fastsafe_open": fastsafetensors.fastsafe_open, "filename": "a.safetensors"}
        exec(compile(program, "README", "exec"), space)
        assert expected in [raw(value) for value in space.values() if isinstance(value, torch.Tensor)]
