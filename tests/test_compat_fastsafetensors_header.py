"""What fastsafetensors says of files, experts and GPUs without a load: on its own code and on penstock's face of it."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import fakegpu
import penstock
import pytest
from fakegpu import fresh, torch_on
from penstock.compat import _fastsafetensors_types
from penstock.compat import fastsafetensors as face
from penstock.synthetic.synth import Tensor

NAMES = [f"model.layers.{layer}.mlp.experts.{expert}.w1.weight" for layer in (0, 1) for expert in range(10)]
NAMES += ["model.embed_tokens.weight", "model.layers.0.mlp.experts.gate", "experts.3.w", "x.experts.12.y"]


@pytest.fixture(params=["penstock.compat.fastsafetensors", "fastsafetensors"])
def fst(request: pytest.FixtureRequest) -> ModuleType:
    """The module that the program imports."""
    return pytest.importorskip(request.param)


def framework(fst: ModuleType) -> Any:
    """What programs pass as ``framework``."""
    return None if fst is face else importlib.import_module("fastsafetensors.frameworks._torch").TorchOp()


@pytest.fixture
def file(write: Callable[..., Path]) -> Path:
    """Four tensors of 64, 8, 0 and 4,800 bytes."""
    tensors = [Tensor("a", "F32", (4, 4)), Tensor("b", "F4", (16,)), Tensor("empty", "F16", (0, 3))]
    return write(*tensors, Tensor("far", "I64", (600,)), name="a.safetensors", metadata={"made": "here"})


def test_the_header_of_a_file(fst, file):
    meta = fst.SafeTensorsMetadata.from_file(str(file), framework(fst))
    (length,) = [int.from_bytes(file.read_bytes()[:8], "little")]
    assert (meta.header_length, meta.size_bytes, meta.src) == (length + 8, file.stat().st_size, str(file))
    assert meta.aligned == (meta.header_length % 16 == 0)
    assert meta.metadata == {"made": "here"}
    header = json.loads(file.read_bytes()[8 : 8 + length])
    assert sorted(meta.tensors) == ["a", "b", "empty", "far"]
    for name, frame in meta.tensors.items():
        assert (frame.dtype.value, frame.shape) == (header[name]["dtype"], header[name]["shape"])
        assert frame.data_offsets == header[name]["data_offsets"]
    assert "made" in repr(meta)


def test_the_header_by_descriptor_and_by_address(fst, file):
    with file.open("rb", buffering=0) as opened:
        by_descriptor = fst.SafeTensorsMetadata.from_fd(
            opened.fileno(), "a name", framework=framework(fst), keep_orig_dict=True
        )
        assert os.lseek(opened.fileno(), 0, os.SEEK_CUR) == by_descriptor.header_length
    assert by_descriptor.src == "a name" and list(by_descriptor.ser) == list(by_descriptor.tensors)
    held = ctypes.create_string_buffer(file.read_bytes(), file.stat().st_size)
    by_address = fst.SafeTensorsMetadata.from_buffer(
        ctypes.addressof(held), file.stat().st_size, "held", framework(fst)
    )
    assert list(by_address.tensors) == list(by_descriptor.tensors)
    assert by_address.header_length == by_descriptor.header_length


def test_byte_ranges_of_some_tensors(fst, file):
    meta = fst.SafeTensorsMetadata.from_file(str(file), framework(fst))
    begin = {name: meta.header_length + frame.data_offsets[0] for name, frame in meta.tensors.items()}
    end = {name: meta.header_length + frame.data_offsets[1] for name, frame in meta.tensors.items()}
    for kept in itertools.chain.from_iterable(itertools.combinations(meta.tensors, n) for n in range(5)):
        alone = meta.select_byte_ranges(kept.__contains__, -1)
        assert alone == [(begin[name], end[name]) for name in meta.tensors if name in kept and name != "empty"]
    assert meta.select_byte_ranges(lambda name: name in ("a", "b"), 0) in (
        [(begin["a"], end["b"])], [(begin["b"], end["a"])], [(begin["a"], end["a"]), (begin["b"], end["b"])],
        [(begin["b"], end["b"]), (begin["a"], end["a"])],
    )  # fmt: skip
    assert meta.select_byte_ranges(lambda name: True) == [(meta.header_length, file.stat().st_size)]
    assert meta.select_byte_ranges(lambda name: False) == []


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{",
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[1]}}',
        '{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    ],
)
def test_a_damaged_header_is_an_error(fst, header):
    with pytest.raises(Exception):  # noqa: B017 - the original has Exception itself
        fst.SafeTensorsMetadata(header, len(header) + 8, len(header) + 16, framework(fst))


@pytest.mark.parametrize(("experts", "size"), [(10, 1), (10, 2), (10, 3), (8, 4), (2, 4), (0, 2)])
def test_experts_of_each_rank(fst, experts, size):
    ranges = [fst.owned_expert_range(experts, size, rank) for rank in range(size)]
    assert [number for begin, end in ranges for number in range(begin, end)] == list(range(experts))
    assert all(a >= b for a, b in itertools.pairwise(end - begin for begin, end in ranges))
    for rank, (begin, end) in enumerate(ranges):
        keep = fst.expert_parallel_filter(experts, size, rank)
        for name in NAMES:
            number = re.search(r"\.experts\.(\d+)\.", name)
            assert keep(name) == (number is None or begin <= int(number[1]) < end), name
    keep = fst.expert_parallel_filter(4, 2, 1, pattern=re.compile(r"^e(\d)$"))
    assert [keep(name) for name in ("e0", "e1", "e2", "e3", "f0", NAMES[0])] == [False, False, True, True, True, True]


@pytest.mark.parametrize("numbers", [(4, 0, 0), (4, 2, 2), (4, 2, -1), (4, -1, 0)])
def test_experts_of_no_rank_are_an_error(fst, numbers):
    with pytest.raises(ValueError):
        fst.expert_parallel_filter(*numbers)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"EP_NUM_EXPERTS": "8", "EP_SIZE": "2", "EP_RANK": "1"}, None),
        ({"EP_SLICE": "1", "EP_SIZE": "2", "EP_RANK": "1"}, None),
        ({"EP_SLICE": "1", "EP_NUM_EXPERTS": "8"}, None),
        ({"EP_SLICE": "1", "EP_NUM_EXPERTS": "8", "EP_SIZE": "1", "EP_RANK": "0"}, None),
        ({"EP_SLICE": "1", "EP_NUM_EXPERTS": "8", "EP_SIZE": "2", "EP_RANK": "1"}, range(4, 8)),
        ({"EP_SLICE": "1", "EP_NUM_EXPERTS": "8", "WORLD_SIZE": "4", "RANK": "1"}, range(2, 4)),
        ({"EP_SLICE": "1", "EP_NUM_EXPERTS": "8", "EP_SIZE": "2", "WORLD_SIZE": "4", "RANK": "1"}, range(4, 8)),
    ],
)
def test_the_environment_asks_for_experts(fst, monkeypatch, variables, expected):
    for name in ("SLICE", "NUM_EXPERTS", "SIZE", "RANK"):
        monkeypatch.delenv(f"FASTSAFETENSORS_EP_{name}", raising=False)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"FASTSAFETENSORS_{name}" if name.startswith("EP_") else name, value)
    keep = fst.expert_parallel_filter_from_env()
    assert (keep is None) == (expected is None)
    if keep is not None and expected is not None:
        assert [number for number in range(8) if keep(f"x.experts.{number}.w")] == list(expected)


def test_a_loader_reads_the_experts_of_a_rank_alone(fst, write):
    names = [f"layers.0.experts.{number}.w" for number in range(4)]
    path = write(*(Tensor(name, "F32", (100,)) for name in [*names, "norm"]))
    loader = fst.SafeTensorsFileLoader(None, "cpu", nogds=True)
    loader.set_tensor_filter(fst.expert_parallel_filter(4, 2, 1))
    loader.add_filenames({0: [str(path)]})
    buffer = loader.copy_files_to_device()
    assert sorted(loader.get_keys()) == [*names[2:], "norm"]
    buffer.close()
    loader.close()


def test_the_numa_node_of_no_gpu(fst):
    assert fst.get_device_numa_node(None) is None


# On this side alone


def test_errors_of_headers_are_typed_and_name_the_file(tmp_path, file):
    for content, kind in ((b"1234567", penstock.TruncatedError), (b"\xff" * 16, penstock.HeaderError)):
        (tmp_path / "broken.safetensors").write_bytes(content)
        with pytest.raises(kind, match=r"broken\.safetensors"), (tmp_path / "broken.safetensors").open("rb") as opened:
            face.SafeTensorsMetadata.from_fd(opened.fileno(), "broken.safetensors")
    with pytest.raises(FileNotFoundError):
        face.SafeTensorsMetadata.from_file(tmp_path / "none.safetensors")
    with pytest.raises(penstock.HeaderError, match="a name twice"):
        face.SafeTensorsMetadata('{"a":{},"a":{}}', 20, 100)
    with pytest.raises(penstock.TruncatedError):
        face.SafeTensorsMetadata('{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}', 60, 68)


def test_a_variable_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("FASTSAFETENSORS_EP_SLICE", "1")
    monkeypatch.setenv("FASTSAFETENSORS_EP_NUM_EXPERTS", "many")
    with pytest.raises(penstock.InvalidError, match="FASTSAFETENSORS_EP_NUM_EXPERTS='many'"):
        face.expert_parallel_filter_from_env()


def test_the_numa_node_of_a_gpu_is_that_of_its_bus(monkeypatch, tmp_path):
    if not fakegpu.LIBRARY:
        pytest.skip(fakegpu.NO_LIBRARY)
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    monkeypatch.setattr(_fastsafetensors_types, "_PCI_BUSES", tmp_path)
    with fresh() as fake, torch_on(fake, monkeypatch, devices=2):
        pci = [gpu["pci"] for gpu in penstock._core.gpus()["gpus"]]
        node = tmp_path / pci[1].rpartition(":")[0].lower() / "device" / "numa_node"
        node.parent.mkdir(parents=True)
        node.write_text("3\n")
        assert [face.get_device_numa_node(device) for device in (0, 1, 2, None)] == [None, 3, None, None]


def test_it_asks_for_no_torch(python, file):
    code = """
import sys
from penstock.compat.fastsafetensors import SafeTensorsMetadata, expert_parallel_filter
assert len(SafeTensorsMetadata.from_file(sys.argv[1]).tensors) == 4 and expert_parallel_filter(2, 2, 1)("w")
print([m for m in ("torch", "numpy") if m in sys.modules])
"""
    run = python(code, file)
    assert run.stdout.strip() == "[]", run.stderr
