"""`safe_open` and `load_file`: what code written for safetensors expects."""

import gc
import os

import numpy as np
import penstock
import pytest
import torch
from conftest import Oracle, raw
from penstock.synthetic.synth import Tensor

safetensors = pytest.importorskip("safetensors")


@pytest.fixture
def one(write):
    """A file whose alphabetical and offset orders differ."""
    return write(
        Tensor("z.weight", "F32", (6, 8)),
        Tensor("a.weight", "BF16", (10,)),
        Tensor("m", "I32", ()),
        Tensor("e", "F16", (0, 3)),
        metadata={"k": "v"},
    )


@pytest.fixture
def theirs(one):
    with safetensors.safe_open(one, framework="pt") as file:
        yield file


@pytest.fixture
def ours(one):
    with penstock.safe_open(one, framework="pt") as file:
        yield file


def test_names_and_metadata_are_those_of_safetensors(ours, theirs):
    assert ours.keys() == theirs.keys() == ["a.weight", "e", "m", "z.weight"]
    assert ours.offset_keys() == theirs.offset_keys() == ["z.weight", "a.weight", "m", "e"]
    assert ours.metadata() == theirs.metadata() == {"k": "v"}


def test_metadata_is_none_where_there_is_none(write):
    with penstock.safe_open(write(Tensor("a", "U8", (1,))), framework="pt") as file:
        assert file.metadata() is None


def test_tensors_are_those_of_safetensors(ours, theirs):
    for name in theirs.keys():  # noqa: SIM118
        mine, yours = ours.get_tensor(name), theirs.get_tensor(name)
        assert (mine.dtype, mine.shape) == (yours.dtype, yours.shape)
        assert raw(mine) == raw(yours)
    assert {k: raw(v) for k, v in ours.get_tensors().items()} == {k: raw(v) for k, v in theirs.get_tensors().items()}


def test_tensors_iterates_in_file_order(ours, one):
    Oracle(one).same(dict(ours.tensors()))


INDICES = [
    ...,
    (),
    slice(None),
    slice(2, 4),
    slice(-2, None),
    slice(0, 100),
    slice(4, 2),
    slice(None, None, 2),
    0,
    -1,
    (slice(None), 3),
    (2, slice(1, 5)),
    (slice(1, 3), slice(2, 6)),
    (slice(None), slice(None, None, 3)),
    (..., slice(0, 2)),
    (..., 1),
    (1, ...),
    (3, 4),
    None,
    (None, slice(0, 2)),
    [0, 2],
    (slice(0, 4), [1, 3]),
    torch.tensor([1, 0]),
    torch.tensor([True, False] * 3),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_a_slice_takes_any_index_that_safetensors_takes(ours, theirs, index):
    mine, yours = ours.get_slice("z.weight"), theirs.get_slice("z.weight")
    assert mine.get_shape() == yours.get_shape() == [6, 8]
    assert mine.get_dtype() == yours.get_dtype() == "F32"
    a, b = mine[index], yours[index]
    assert a.shape == b.shape
    assert torch.equal(a, b)


@pytest.mark.parametrize("index", [6, -7, (0, 8), (0, 0, 0)], ids=str)
def test_an_index_out_of_range_is_an_index_error(ours, index):
    with pytest.raises(IndexError):
        ours.get_slice("z.weight")[index]


def test_a_scalar_and_an_empty_tensor_can_be_sliced(ours):
    assert ours.get_slice("m")[...].shape == ()
    assert ours.get_slice("e")[...].shape == (0, 3)
    assert ours.get_slice("e")[:, 1:].shape == (0, 2)
    assert ours.get_slice("m").get_shape() == []


def test_numpy_slices_are_numpys(one):
    with penstock.safe_open(one, framework="np") as file:
        full = file.get_tensor("z.weight")
        for index in INDICES[:22]:
            assert np.array_equal(file.get_slice("z.weight")[index], full[index])


@pytest.mark.parametrize("call", ["get_tensor", "get_slice"])
def test_an_unknown_tensor_is_a_safetensor_error_that_names_it(ours, call):
    with pytest.raises(safetensors.SafetensorError, match="File does not contain tensor nope"):
        getattr(ours, call)("nope")


def test_a_closed_file_says_so_and_its_tensors_live_on(one):
    with penstock.safe_open(one, framework="pt") as file:
        tensor, part, later = file.get_tensor("z.weight"), file.get_slice("z.weight")[1:], file.get_slice("z.weight")
    for call in (file.keys, file.offset_keys, file.metadata, file.get_tensors, file.tensors):
        with pytest.raises(safetensors.SafetensorError, match="File is closed"):
            call()
    for call in (file.get_tensor, file.get_slice):
        with pytest.raises(safetensors.SafetensorError, match="File is closed"):
            call("m")
    del file
    gc.collect()
    expected = Oracle(one)["z.weight"]
    assert raw(tensor) == expected
    assert raw(part) == expected[32:]
    assert raw(later[0:1]) == expected[:32]


def test_it_works_without_with_and_closes_as_callers_do(one):
    file = penstock.safe_open(filename=one, framework="pt", device="cpu", backend="mmap")
    assert file.get_tensor("m").shape == ()
    assert hash(file) == hash(file)
    file.__exit__(None, None, None)
    with pytest.raises(penstock.SafetensorError):
        file.keys()


@pytest.mark.parametrize("backend", [None, "mmap", "pread"])
def test_backends_give_the_same_bytes(one, backend):
    with penstock.safe_open(one, framework="pt", backend=backend) as file:
        Oracle(one).same(file.get_tensors())


def test_some_tensors_of_a_handle(small):
    with penstock.safe_open(small) as file:
        wanted = [name for name in file.offset_keys() if name.startswith("layers.0.")]
        assert wanted
        found = file.get_tensors("layers.0.*")
        assert list(found) == wanted
        assert [name for name, _ in file.tensors(names="layers.0.*")] == wanted
        assert {name: raw(tensor) for name, tensor in found.items()} == {
            name: raw(file.get_tensor(name)) for name in wanted
        }
        assert list(file.get_tensors(["step"])) == ["step"]


def test_an_unknown_backend_is_refused(one):
    with pytest.raises(ValueError, match="backend"):
        penstock.safe_open(one, backend="smoke")


@pytest.mark.parametrize("framework", ["pt", "torch", "pytorch", "np", "numpy", "dlpack"])
def test_framework_aliases(one, framework):
    with penstock.safe_open(one, framework=framework, device="cpu") as file:
        assert raw(file.get_tensor("m")) == Oracle(one)["m"]


def test_other_frameworks_are_refused_when_opening(one):
    with pytest.raises(ValueError, match="dlpack"):
        penstock.safe_open(one, framework="nonsense")


def test_several_files_and_folders_open_as_one(small):
    files = sorted(small.glob("*.safetensors"))
    for source in (small, files, [str(f) for f in files], small / "model.safetensors.index.json"):
        with penstock.safe_open(source, framework="pt") as file:
            assert len(file.keys()) == 11
            assert raw(file.get_tensor("wide")) == Oracle(small)["wide"]


def test_a_missing_file_is_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        penstock.safe_open(tmp_path / "nothing.safetensors", framework="pt")


def test_a_gpu_that_is_not_there_is_an_error_at_the_first_tensor(one, torch_python):
    code = """
import sys, penstock
with penstock.safe_open(sys.argv[1], framework="pt", device="cuda:0") as file:
    print(len(file.keys()))
    try:
        file.get_tensor("m")
    except penstock.DeviceError as error:
        print(error)
"""
    run = torch_python(code, one, PENSTOCK_GPU_LIBRARY="", CUDA_VISIBLE_DEVICES="")
    assert run.stdout.startswith("4\n"), run.stderr
    assert "penstock doctor" in run.stdout


def test_slices_are_views_of_nothing_else(ours):
    part = ours.get_slice("z.weight")[:, 2:4]
    assert part.untyped_storage().nbytes() == part.nbytes


def test_a_dtype_that_torch_lacks_opens_and_fails_by_name(write):
    path = write(Tensor("six", "F6_E2M3", (4,)), Tensor("a", "U8", (1,)))
    with penstock.safe_open(path, framework="pt") as file:
        assert file.get_slice("six").get_dtype() == "F6_E2M3"
        assert file.get_tensor("a").shape == (1,)
        with pytest.raises(penstock.UnsupportedError, match="six"):
            file.get_tensor("six")


def test_load_file_is_safetensors_load_file(one, small):
    from safetensors.torch import load_file

    assert {k: raw(v) for k, v in penstock.load_file(one).items()} == {k: raw(v) for k, v in load_file(one).items()}
    Oracle(small).same(penstock.load_file(small))
    Oracle(small).same(penstock.load_file(sorted(small.glob("*.safetensors")), device="cpu"))


def test_many_threads_may_slice_one_file(one):
    import concurrent.futures

    expected = Oracle(one)["z.weight"]
    with penstock.safe_open(one, framework="pt") as file, concurrent.futures.ThreadPoolExecutor(4) as pool:
        part = file.get_slice("z.weight")
        rows = list(pool.map(lambda i: raw(part[i % 6]), range(48)))
    assert rows == [expected[32 * (i % 6) : 32 * (i % 6) + 32] for i in range(48)]


def test_tensors_asked_for_one_by_one_are_soon_loaded_together(write, monkeypatch):
    path = write(*(Tensor(f"t{i:03}", "F32", (64,)) for i in range(300)))
    oracle, loads = Oracle(path), []
    with penstock.safe_open(path, framework="pt") as file:
        load = file._load
        monkeypatch.setattr(file, "_load", lambda names, slices=None: loads.append(len(names)) or load(names, slices))
        for name in reversed(file.keys()):
            assert raw(file.get_tensor(name)) == oracle[name]
        assert len(loads) < 10
        first, again = file.get_tensor("t000"), file.get_tensor("t000")
        first.zero_()
        assert raw(again) == oracle["t000"]


def test_reading_ahead_never_fails_for_a_neighbour(write):
    path = write(*(Tensor(f"t{i}", "U8", (8,)) for i in range(9)), Tensor("six", "F6_E2M3", (4,)))
    oracle = Oracle(path)
    with penstock.safe_open(path, framework="pt") as file:
        for i in range(9):
            assert raw(file.get_tensor(f"t{i}")) == oracle[f"t{i}"]


def test_private_copies_are_not_read_ahead(write):
    path = write(*(Tensor(f"t{i}", "U8", (8,)) for i in range(9)))
    with penstock.safe_open(path, framework="pt", backend="pread") as file:
        for i in range(9):
            file.get_tensor(f"t{i}")
        assert not file._ahead


@pytest.mark.parametrize("change", ["rewritten", "truncated"])
def test_a_tensor_that_was_read_ahead_is_not_handed_out_once_its_file_has_changed(write, change):
    path = write(*(Tensor(f"t{i}", "F32", (4096,)) for i in range(9)))
    with penstock.safe_open(path, framework="pt") as file:
        for i in range(6):
            file.get_tensor(f"t{i}")
        assert "t8" in file._ahead
        if change == "rewritten":
            with path.open("r+b") as f:
                f.seek(-4096, 2)
                f.write(b"\xee" * 4096)
        else:
            os.truncate(path, path.stat().st_size - 16384)
        with pytest.raises(penstock.ChangedError, match=path.name):
            file.get_tensor("t8")
