"""What people write as ``device=``: where it leads, and what is said of what leads nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pagecache
import penstock
import pytest
import torch
from conftest import Oracle, raw, text
from penstock import DeviceError, InvalidError, UnsupportedError
from penstock._device import CURRENT, MOVED, Device, any_device, parse_device
from penstock._torch import Moved
from penstock.synthetic.synth import Tensor

SPELLED = [
    (None, ("cpu", 0)),
    ("cpu", ("cpu", 0)),
    ("cpu:0", ("cpu", 0)),
    (torch.device("cpu"), ("cpu", 0)),
    (torch.device("cpu", 0), ("cpu", 0)),
    (0, ("gpu", 0)),
    (1, ("gpu", 1)),
    (np.int64(1), ("gpu", 1)),
    ("gpu:2", ("gpu", 2)),
    ("cuda", ("cuda", 0)),
    ("cuda:0", ("cuda", 0)),
    ("cuda:1", ("cuda", 1)),
    (torch.device("cuda"), ("cuda", 0)),
    (torch.device("cuda:7"), ("cuda", 7)),
    ("rocm", ("rocm", 0)),
    ("hip:1", ("rocm", 1)),
    ("meta", ("meta", CURRENT)),
    (torch.device("meta"), ("meta", CURRENT)),
    ("mps", ("mps", CURRENT)),
    ("xpu:1", ("xpu", 1)),
    (torch.device("xpu", 1), ("xpu", 1)),
    ("npu", ("npu", CURRENT)),
]

NO_DEVICE = ["", "cuda:x", "CUDA", " cpu", "cuda:-1", "tpu", -1, True, 1.5, object(), ["cpu"], "cuda:123456"]


@pytest.mark.parametrize(("device", "meant"), SPELLED, ids=str)
def test_every_spelling(device: Any, meant: tuple[str, int]) -> None:
    assert any_device(device) == Device(*meant)
    assert any_device(str(Device(*meant))) == Device(*meant)


@pytest.mark.parametrize("device", NO_DEVICE, ids=text)
def test_what_is_no_device_is_refused_with_a_list_of_those_there_are(opened: penstock.Checkpoint, device: Any) -> None:
    for take in (any_device, opened.load, opened.stream, lambda d: penstock.safe_open(opened.files[0], device=d)):
        with pytest.raises(InvalidError, match=r'not a device: give "cpu", "cuda".*"meta"') as caught:
            take(device)
        assert isinstance(caught.value, ValueError)
        assert all(kind in str(caught.value) for kind in MOVED)


def test_spellings_of_safetensors_are_taken(every: Path) -> None:
    """Those that its own `safe_open` does not refuse."""
    safetensors = pytest.importorskip("safetensors")
    for device in ["cpu", "cuda", "cuda:1", 0, 1, None, *MOVED, "xpu:0", "npu:3", "cpu:0", "tpu"]:
        try:
            with safetensors.safe_open(every, "pt", device=device):
                taken = True
        except safetensors.SafetensorError:
            taken = False
        if taken:
            penstock.safe_open(every, "pt", device=device)


def test_a_number_is_one_of_the_accelerator_that_torch_was_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert any_device(1) == Device("xpu", 1)
    assert any_device("gpu:1") == Device("gpu", 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert any_device(1) == Device("gpu", 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "rocm:0", 0])
def test_a_gpu_that_is_not_there(opened: penstock.Checkpoint, device: Any) -> None:
    with pytest.raises(DeviceError, match=r'torch .* load to "cpu" instead') as caught:
        opened.load(device)
    assert caught.value.path in opened.files


# Without bytes


@pytest.fixture
def several(write: Any) -> Path:
    return write(
        Tensor("w", "BF16", (40, 96)),
        Tensor("f4", "F4", (3, 8)),
        Tensor("n", "I64", ()),
        Tensor("hollow", "F16", (0, 3)),
    )


def described(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (tensor.dtype, tuple(tensor.shape), tensor.stride()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("device", ["meta", torch.device("meta")], ids=str)
def test_meta_tensors_are_like_the_others_but_for_their_bytes(several: Path, device: Any) -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no F4")
    checkpoint = penstock.open(several)
    expected = described(checkpoint.load())
    slices = {"w": (slice(1, 30, 2), slice(0, 7))}
    ways = {
        "load": checkpoint.load(device),
        "start": checkpoint.start(device).result(),
        "stream": dict(checkpoint.stream(device)),
        "load_file": penstock.load_file(several, device),
    }
    with penstock.safe_open(several, device=device) as file:
        ways["get_tensors"] = file.get_tensors()
        ways["get_tensor"] = {name: file.get_tensor(name) for name in file.offset_keys()}
        ways["tensors"] = dict(file.tensors())
        with file.prefetch() as loader:
            ways["prefetch"] = {name: loader.take(name) for name in loader.names()}
        with file.prefetch({"w": slice(3, 5)}) as loader:
            assert [(name, tensor.shape) for name, tensor in loader] == [("w", (2, 96))]
    for way, tensors in ways.items():
        assert {tensor.device.type for tensor in tensors.values()} == {"meta"}, way
        assert described(tensors) == expected, way
    cut = checkpoint.load(device, names="w", slices=slices)["w"]
    assert (cut.device.type, tuple(cut.shape), cut.stride()) == ("meta", (15, 7), (7, 1))
    assert described(checkpoint.load(device, dtype="raw")) == described(checkpoint.load(dtype="raw"))
    cast = [checkpoint.load(where, names=["w", "n"], dtype=torch.float32) for where in ("cpu", device)]
    assert described(cast[0]) == described(cast[1])


@pytest.mark.parametrize(
    "index",
    [
        ...,
        3,
        slice(2, 20, 3),
        (slice(None), slice(5, 9)),
        [7, 1, 1],
        (slice(None), [0, 95]),
        ([0, 3], [1, 2]),
        torch.arange(40) % 3 == 0,
        torch.tensor([[1, 2], [3, 0]]),
        (None, -1, ..., None),
    ],
    ids=str,
)
def test_slices_on_meta_have_the_shape_of_the_others(several: Path, index: Any) -> None:
    with penstock.safe_open(several) as file, penstock.safe_open(several, device="meta") as bare:
        expected, found = file.get_slice("w")[index], bare.get_slice("w")[index]
    assert found.device.type == "meta"
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)


def test_not_a_byte_is_read_for_meta(several: Path) -> None:
    checkpoint = penstock.open(several)
    pagecache.evict(several)
    before = pagecache.disk_bytes_of_process()
    checkpoint.load("meta")
    dict(checkpoint.stream("meta"))
    assert pagecache.disk_bytes_of_process() == before
    assert not pagecache.resident(several).any()
    assert checkpoint.last_report.nbytes == 0


def test_meta_is_torch_s_alone(several: Path) -> None:
    for framework in ("np", "dlpack"):
        with pytest.raises(UnsupportedError, match="is a device of torch"):
            penstock.open(several).load("meta", framework=framework)
        with pytest.raises(UnsupportedError, match="is a device of torch"):
            penstock.safe_open(several, framework, "xpu:0")


# Through torch


@pytest.mark.parametrize("device", [kind for kind in MOVED if kind != "xla"])
def test_an_accelerator_that_is_not_there(opened: penstock.Checkpoint, device: str) -> None:
    if getattr(torch.accelerator.current_accelerator(), "type", None) == device:
        pytest.skip(f"there is one: {device}")
    for load in (opened.load, lambda d: dict(opened.stream(d))):
        with pytest.raises(DeviceError, match=f"device='{device}'.*there is cpu, meta") as caught:
            load(device)
        assert caught.value.path in opened.files


def test_torch_moves_what_the_core_does_not_load(
    opened: penstock.Checkpoint, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stand-in: nothing here has such an accelerator. What `to` is told is a device of the kind asked for."""
    asked = []

    class Elsewhere(torch.Tensor):
        pass

    def place(adapter: Any, device: Device) -> torch.device:
        asked.append(str(device))
        return torch.device("cpu")

    def to(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
        return tensor.clone().as_subclass(Elsewhere)

    monkeypatch.setattr(Moved, "_place", place)
    monkeypatch.setattr(torch.Tensor, "to", to)
    tensors = opened.load("xpu:1")
    assert asked == ["xpu:1"]
    assert {type(tensor) for tensor in tensors.values()} == {Elsewhere}
    Oracle(small).same({name: tensor.as_subclass(torch.Tensor) for name, tensor in tensors.items()})
    part = opened.load("xpu:1", names="embed.weight", slices={"embed.weight": slice(3, 5)})["embed.weight"]
    assert raw(part.as_subclass(torch.Tensor)) == Oracle(small)["embed.weight"][3 * 96 : 5 * 96]


def test_parameters_elsewhere_are_not_filled_by_the_core() -> None:
    for device in ("meta", "xpu:0", torch.device("meta")):
        with pytest.raises(UnsupportedError, match="move the tensors with the framework"):
            parse_device(device)


def test_loads_within_a_device_of_torch_stay_where_they_are_asked_for(torch_python, several):
    code = """
import sys, torch, penstock, penstock.torch
from penstock._torch import _native
path = sys.argv[1]
lists = [0, 2], [], torch.tensor([1], device="cpu"), (..., [[0, 1], [2, 3]]), (slice(None), [True, False] * 48), 3
with torch.device("meta"):
    whole = penstock.open(path).load()
    of_bytes = penstock.torch.load(open(path, "rb").read())
    with penstock.safe_open(path) as file:
        parts = [file.get_slice("w")[index] for index in lists]
native = dict(_native())
_native.cache_clear()
assert native == _native() and "BF16" in native, native
assert {t.device.type for t in (*whole.values(), *of_bytes.values(), *parts)} == {"cpu"}
expected = penstock.open(path).load()
for name in ("w", "f4", "hollow"):
    for found in (whole, of_bytes):
        assert torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)), name
words = expected["w"].view(torch.int16)  # some are no numbers
assert all(torch.equal(part.view(torch.int16), words[index]) for part, index in zip(parts, lists))
print("well")
"""
    run = torch_python(code, several)
    assert run.stdout == "well\n", run.stderr
