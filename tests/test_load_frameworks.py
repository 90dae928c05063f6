"""Every dtype, shape and framework, against safetensors' own reader and numpy on the raw bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import penstock
import pytest
import torch
from models import ROUTES, UNICODE, Model, Way, flat
from pagecache import near
from penstock.synthetic import synth
from penstock.synthetic.synth import BITS

safetensors = pytest.importorskip("safetensors")
theirs_in_torch = pytest.importorskip("safetensors.torch")

#: What safetensors writes for us, so that it is its reading that ours is compared with.
THEIRS = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"),
]
SHAPES = [(), (0,), (1,), (3, 0, 2), (7,), (5, 3, 2), (1, 1, 1, 1), (33, 65)]


@pytest.fixture(scope="module")
def written(scratch: Path) -> Path:
    """A file that safetensors has written: every dtype of torch in every shape class."""
    random = np.random.default_rng(5)
    tensors = {}
    for dtype in THEIRS:
        kind = getattr(torch, dtype)
        for shape in SHAPES:
            if dtype.startswith("float4") and not shape:
                continue  # half a byte, which safetensors does not write
            size = torch.empty(shape, dtype=kind).nbytes
            raw = torch.from_numpy(random.integers(0, 2 if dtype == "bool" else 256, max(size, 1), dtype=np.uint8))
            tensors[f"{dtype}/{'x'.join(map(str, shape))}"] = raw[:size].view(kind).reshape(shape).clone()
    path = scratch / "written.safetensors"
    theirs_in_torch.save_file(tensors, path)
    return path


def alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Same type, shape and bits: NaN is not equal to itself, so values are not compared."""
    same = (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    return same and np.array_equal(flat(ours), flat(theirs))


@pytest.mark.parametrize("way", ROUTES, ids=str)
def test_torch_tensors_are_those_of_safetensors(written: Path, way: Way) -> None:
    near([written], "cold")
    ours = penstock.open(written).load(framework="pt", options=way.options)
    theirs = theirs_in_torch.load_file(written)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert alike(ours[name], tensor), name
        assert ours[name].data_ptr() % max(tensor.element_size(), 1) == 0, name
        assert ours[name].untyped_storage().nbytes() == tensor.nbytes, name


@pytest.mark.parametrize("way", ROUTES, ids=str)
def test_dlpack_tensors_are_those_of_safetensors(written: Path, way: Way) -> None:
    theirs = theirs_in_torch.load_file(written)
    for name, tensor in penstock.open(written).load(framework="dlpack", options=way.options).items():
        # torch takes not every dtype of DLPack: the bytes, where it does not
        assert np.array_equal(flat(tensor), flat(theirs[name])), name


@pytest.mark.parametrize("way", ROUTES, ids=str)
def test_numpy_arrays_are_those_of_safetensors(odd: Model, way: Way) -> None:
    known = {"BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "F16", "F32", "F64", "C64"}
    names = [name for name, entry in odd.entries.items() if entry.dtype in known]
    ours = penstock.open(odd.source).load(framework="np", names=names, options=way.options)
    for path in odd.files:
        with safetensors.safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in ours:
                    theirs = file.get_tensor(name)
                    array = ours.pop(name)
                    assert (array.dtype, array.shape) == (theirs.dtype, theirs.shape), name
                    assert array.tobytes() == theirs.tobytes(), name
                    assert array.flags.writeable
                    assert array.flags.aligned
                    assert array.flags.c_contiguous
    assert not ours


@pytest.mark.parametrize("way", ROUTES, ids=str)
@pytest.mark.parametrize("entrance", ["load", "start", "stream", "safe_open", "load_file"])
def test_every_dtype_comes_by_every_entrance(odd: Model, entrance: str, way: Way) -> None:
    # F6 has no torch dtype, nor has F4 with an odd last dimension
    names = [
        name
        for name, entry in odd.entries.items()
        if not entry.dtype.startswith("F6") and not (entry.dtype == "F4" and entry.shape[-1] % 2)
    ]
    assert {odd.entries[name].dtype for name in names} == {dtype for dtype in BITS if not dtype.startswith("F6")}
    checkpoint = penstock.open(odd.source)
    if entrance == "load":
        tensors = checkpoint.load(names=names, options=way.options)
    elif entrance == "start":
        with checkpoint.start(names=names, options=way.options) as job:
            tensors = job.result()
    elif entrance == "stream":
        tensors = dict(checkpoint.stream(names=names, options=way.options))
    elif entrance == "safe_open":
        with penstock.safe_open(odd.source, options=way.options) as file:
            tensors = {name: file.get_tensor(name) for name in names[::7]}
    else:
        with pytest.raises(penstock.UnsupportedError, match=r"is F[46]"):
            penstock.load_file(odd.source, options=way.options)
        tensors = penstock.load_file(odd.source, framework="dlpack", options=way.options)
        names = list(odd.entries)
    assert set(tensors) == set(names if entrance != "safe_open" else names[::7])
    for name, tensor in tensors.items():
        assert np.array_equal(flat(tensor), odd.bytes_of(name)), name


def test_every_dtype_fills_existing_tensors(written: Path) -> None:
    theirs = theirs_in_torch.load_file(written)
    ours = {name: torch.empty_like(tensor) for name, tensor in theirs.items()}
    penstock.open(written).load_into(ours)
    for name, tensor in theirs.items():
        assert alike(ours[name], tensor), name


def test_slices_are_those_of_safetensors(written: Path) -> None:
    cuts = [slice(None), slice(1, 3), slice(2, None), slice(0, 0), (slice(1, 4), slice(0, 2)), (slice(0, 1), 0), 1]
    with safetensors.safe_open(written, framework="pt") as them, penstock.safe_open(written, framework="pt") as us:
        for dtype in THEIRS:
            if dtype.startswith("float4"):
                continue  # safetensors counts its pairs, penstock the elements of the header
            for name in (f"{dtype}/5x3x2", f"{dtype}/33x65"):
                theirs, ours = them.get_slice(name), us.get_slice(name)
                assert ours.get_shape() == theirs.get_shape()
                assert ours.get_dtype() == theirs.get_dtype()
                for cut in cuts:
                    a, b = ours[cut], theirs[cut]
                    assert (a.dtype, a.shape) == (b.dtype, b.shape), (name, cut)
                    # Not `contiguous`: a dimension of one element may keep any stride there
                    a, b = (x.clone(memory_format=torch.contiguous_format).reshape(-1).flatten() for x in (a, b))
                    assert np.array_equal(flat(a), flat(b)), (name, cut)


@pytest.mark.parametrize("name", UNICODE, ids=ascii)
def test_names_of_any_unicode_are_found(odd: Model, name: str) -> None:
    checkpoint = penstock.open(odd.source)
    assert name in checkpoint
    assert checkpoint[name].shape == (3, 5)
    [(found, tensor)] = checkpoint.load(names=[name], framework="np").items()
    assert found == name
    assert tensor.tobytes() == odd.bytes_of(name).tobytes()


@pytest.mark.parametrize("spaces", range(9))
@pytest.mark.parametrize("copy", [None, True])
def test_tensors_are_aligned_wherever_their_bytes_lie(tmp_path: Path, spaces: int, copy: bool | None) -> None:
    tensors = [synth.Tensor(dtype, dtype, (5, 7)) for dtype in ("U8", "F64", "F16", "I32", "C64", "BF16")]
    path = synth.write_file(tmp_path / "shifted.safetensors", tensors, align=8, spaces=spaces)
    model = Model(path)
    for framework in ("pt", "np"):
        names = None if framework == "pt" else ["U8", "F64", "F16", "I32", "C64"]
        loaded = penstock.open(path).load(names=names, framework=framework, options={"copy": copy})
        for name, value in loaded.items():
            address = value.data_ptr() if framework == "pt" else value.ctypes.data
            # torch takes the mapping's own, wherever it begins
            assert address % (BITS[name] // 8) == 0 or (framework == "pt" and copy is None), name
            assert np.array_equal(flat(value), model.bytes_of(name)), name


def test_torch_takes_misaligned_tensors_from_the_mapping_and_others_get_aligned_copies(tmp_path: Path) -> None:
    tensors = [
        synth.Tensor("a", "F32", (512, 1024)),
        synth.Tensor("b", "BF16", (300, 64)),
        synth.Tensor("c", "F64", ()),
    ]
    path = synth.write_file(tmp_path / "model.safetensors", tensors, align=8, spaces=5)
    checkpoint = penstock.open(path)
    theirs = theirs_in_torch.load_file(path)
    ours = checkpoint.load(framework="pt", progress=False)
    assert set(checkpoint.last_report["routes"]) and not checkpoint.last_report["routes"]["buffered"]["bytes"]
    for name, tensor in theirs.items():
        assert alike(ours[name], tensor), name
        assert ours[name].data_ptr() % 8 == tensor.data_ptr() % 8 == 5, name
    ours["a"].zero_()  # a copy on write, not the file
    assert alike(checkpoint.load(names="a", framework="pt")["a"], theirs["a"])
    private = checkpoint.load(framework="pt", options={"copy": True}, progress=False)
    arrays = checkpoint.load(framework="np", names=["a", "c"], progress=False)
    capsules = checkpoint.load(framework="dlpack", progress=False)
    for name, tensor in theirs.items():
        assert alike(private[name], tensor) and private[name].data_ptr() % tensor.element_size() == 0, name
        assert torch.from_dlpack(capsules[name]).data_ptr() % tensor.element_size() == 0, name
    for name, array in arrays.items():
        assert array.flags.aligned and array.tobytes() == theirs[name].numpy().tobytes(), name
