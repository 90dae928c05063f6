"""`Checkpoint.load`: every byte, in every framework, whole and in part."""

import gc
import mmap
import warnings
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import penstock
import pytest
import torch
from conftest import LAYOUT, Oracle, raw, text
from penstock import _core
from penstock.synthetic.synth import BITS, Tensor

F6 = ("F6_E2M3", "F6_E3M2")


# Bytes


@pytest.mark.parametrize("copy", [None, True], ids=["mapped", "private"])
@pytest.mark.parametrize("framework", ["pt", "np", "dlpack"])
def test_all_tensors_arrive_byte_for_byte(small, framework, copy):
    if framework == "np":
        pytest.importorskip("ml_dtypes")
    Oracle(small).same(penstock.open(small).load(framework=framework, options={"copy": copy}))


def test_torch_agrees_with_safetensors(small):
    load_file = pytest.importorskip("safetensors.torch").load_file
    loaded = penstock.open(small).load(framework="pt")
    for path in sorted(small.glob("*.safetensors")):
        for name, theirs in load_file(path).items():
            ours = loaded.pop(name)
            assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), name
            assert raw(ours) == raw(theirs), name
    assert not loaded


def test_every_dtype_that_torch_has(every):
    checkpoint = penstock.open(every)
    loaded = checkpoint.load(framework="pt", names=lambda name: not name.startswith("f6_") and name != "f4.hollow")
    oracle = Oracle(every)
    assert {checkpoint[name].dtype for name in loaded} == set(BITS) - set(F6)
    for name, tensor in loaded.items():
        info = checkpoint[name]
        shape = info.shape if info.dtype != "F4" else (*info.shape[:-1], info.shape[-1] // 2)
        assert tuple(tensor.shape) == shape, name
        assert raw(tensor) == oracle[name], name
    assert loaded["f4.block"].dtype is torch.float4_e2m1fn_x2
    assert loaded["f8_e8m0.block"].dtype is torch.float8_e8m0fnu


def test_every_dtype_that_numpy_has(every):
    names = [
        name for name in penstock.open(every) if name.split(".")[0].upper() in ("BOOL", "C64", "U16", "F16", "I64")
    ]
    oracle = Oracle(every)
    for name, array in penstock.open(every).load(framework="np", names=names).items():
        assert array.shape == oracle.shape(name)
        assert array.tobytes() == oracle[name], name


def test_dlpack_gives_what_it_has_a_type_for_and_bytes_of_the_rest(every):
    oracle = Oracle(every)
    for name, tensor in penstock.open(every).load(framework="dlpack").items():
        dtype = name.split(".")[0].upper()
        assert tensor.dtype == ("U8" if BITS[dtype] < 8 else dtype), name
        assert tensor.__dlpack_device__() == (1, 0)
        assert raw(tensor) == oracle[name], name
        if BITS[dtype] < 8:
            assert tensor.shape == (len(oracle[name]),)


def test_a_dlpack_tensor_may_be_taken_twice_and_shares_its_memory(small):
    tensor = penstock.open(small).load(framework="dlpack", names="wide")["wide"]
    one, two = torch.from_dlpack(tensor), torch.from_dlpack(tensor)
    one[0, 0] = 42.0
    assert two[0, 0] == 42.0


def test_a_dlpack_tensor_refuses_what_it_cannot_give(small):
    tensor = penstock.open(small).load(framework="dlpack", names="wide")["wide"]
    with pytest.raises(BufferError):
        tensor.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        tensor.__dlpack__(dl_device=(2, 0))


@pytest.mark.parametrize("framework", ["pt", "np", "dlpack"])
def test_raw_gives_bytes_of_every_dtype(every, framework):
    oracle = Oracle(every)
    loaded = penstock.open(every).load(framework=framework, dtype="raw")
    for name, value in loaded.items():
        assert tuple(value.shape) == (len(oracle[name]),)
        assert raw(value) == oracle[name]


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_a_dtype_that_the_framework_lacks_is_named_before_anything_is_read(every, framework):
    checkpoint = penstock.open(every)
    with pytest.raises(penstock.UnsupportedError) as caught:
        checkpoint.load(framework=framework, names=["u8.vector", "f6_e2m3.block"])
    assert "f6_e2m3.block" in str(caught.value)
    assert "F6_E2M3" in str(caught.value)
    assert "every.safetensors" in str(caught.value)
    assert 'dtype="raw"' in str(caught.value)
    assert checkpoint.last_report is None


def test_an_f4_tensor_with_an_odd_last_dimension_is_named(write):
    path = write(Tensor("odd", "F4", (2, 3)))
    with pytest.raises(penstock.UnsupportedError, match="odd is F4"):
        penstock.open(path).load(framework="pt")
    assert len(raw(penstock.open(path).load(dtype="raw")["odd"])) == 3


# What a tensor is


@pytest.mark.parametrize("copy", [None, True], ids=["mapped", "private"])
def test_every_tensor_has_a_storage_of_exactly_its_bytes(small, copy):
    for name, tensor in penstock.open(small).load(options={"copy": copy}).items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
        assert tensor.storage_offset() == 0
        assert tensor.is_contiguous()
        assert not tensor.requires_grad


def test_writing_to_a_tensor_never_changes_the_file(write):
    path = write(Tensor("a", "F32", (1000,)))
    before = path.read_bytes()
    for framework in ("pt", "np"):
        value = penstock.open(path).load(framework=framework)["a"]
        value[:] = 0
        assert raw(value) == bytes(4000)
    assert path.read_bytes() == before
    assert raw(penstock.open(path).load()["a"]) == Oracle(path)["a"]


def test_tensors_outlive_everything_else(small):
    checkpoint = penstock.open(small)
    tensor = checkpoint.load()["embed.weight"]
    del checkpoint
    gc.collect()
    assert raw(tensor) == Oracle(small)["embed.weight"]


@pytest.mark.machine
def test_a_kept_tensor_keeps_its_block_alone(big):
    def anonymous():
        text = Path("/proc/self/smaps_rollup").read_text()
        return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Anonymous:"))

    penstock.open(big).load(options={"copy": True})
    gc.collect()
    before = anonymous()
    kept = penstock.open(big).load(options={"copy": True})["layers.7.weight"]
    gc.collect()
    assert anonymous() - before < 48 << 20  # of 96 MB; one shared block is at most 32 MiB
    assert raw(kept) == Oracle(big)["layers.7.weight"]


def test_tensors_can_be_saved_and_copied(small, tmp_path):
    tensor = penstock.open(small).load()["wide"]
    torch.save(tensor, tmp_path / "t.pt")
    assert (tmp_path / "t.pt").stat().st_size < 4096
    again = torch.load(tmp_path / "t.pt")
    assert raw(again) == raw(tensor)


def test_numpy_arrays_are_ordinary_writable_arrays(small):
    array = penstock.open(small).load(framework="np", names="wide")["wide"]
    assert array.flags.writeable
    assert array.flags.c_contiguous
    assert array.flags.aligned
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of arrays that are not writable
        assert torch.from_numpy(array).shape == (5, 6)


def test_views_die_with_their_tensors(small):
    array = penstock.open(small).load(framework="np", names="wide")["wide"]
    base = array
    while getattr(base, "base", None) is not None:
        base = base.base
    assert not isinstance(base, mmap.mmap)
    ref = weakref.ref(array)
    del array, base
    assert ref() is None


# Names


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("step", ["step"]),
        ("layers.*.bias", ["layers.0.attn.bias", "layers.1.attn.bias"]),
        ("layers.[1]*.weight", ["layers.1.attn.weight"]),
        (["wide", "step"], ["wide", "step"]),
        (["wide", "layers.?.attn.bias", "wide"], ["wide", "layers.0.attn.bias", "layers.1.attn.bias"]),
        (lambda name: name.endswith("weight") and "1" in name, ["layers.1.attn.weight"]),
        (lambda name: False, []),
        ([], []),
        (("mask",), ["mask"]),
        ({"mask"}, ["mask"]),
        (iter(["mask"]), ["mask"]),
    ],
    ids=text,
)
def test_names_select_tensors(small, names, expected):
    assert list(penstock.open(small).load(names=names)) == expected


def test_a_name_that_looks_like_a_glob_is_a_name_first(write):
    path = write(Tensor("a[0]", "U8", (1,)), Tensor("a0", "U8", (1,)), Tensor("a*", "U8", (1,)))
    assert list(penstock.open(path).load(names="a[0]")) == ["a[0]"]
    assert list(penstock.open(path).load(names="a*")) == ["a*"]
    assert list(penstock.open(path).load(names="a[0-9]")) == ["a0"]


@pytest.mark.parametrize("names", ["steps", ["step", "nope"], "nope.*", ["step", "nope.*"]])
def test_a_name_that_nothing_matches_is_an_error(opened, names):
    with pytest.raises(penstock.UnknownTensorError, match=r"nope|steps"):
        opened.load(names=names)


@pytest.mark.parametrize("names", [3, [3], [None]])
def test_names_of_another_kind_are_refused(opened, names):
    with pytest.raises((ValueError, TypeError)):
        opened.load(names=names)


# Slices


@pytest.mark.parametrize("copy", [None, True], ids=["mapped", "private"])
@pytest.mark.parametrize(
    "cut",
    [
        slice(10, 20),
        (slice(10, 20),),
        (slice(None), slice(8, 16)),
        (slice(3, 48), slice(0, 1)),
        (..., slice(39, 40)),
        (slice(-4, None), slice(None, -30)),
        (slice(5, 5), slice(0, 40)),
        (slice(None), ...),
        (...,),
    ],
    ids=str,
)
def test_a_slice_is_what_numpy_says_it_is(small, cut, copy):
    name = "layers.1.attn.weight"
    full = np.frombuffer(Oracle(small)[name], np.float32).reshape(48, 40)
    for framework in ("pt", "np"):
        part = penstock.open(small).load(names=name, slices={name: cut}, framework=framework, options={"copy": copy})[
            name
        ]
        assert tuple(part.shape) == full[cut].shape
        assert raw(part) == full[cut].tobytes()


def test_slices_cut_some_tensors_and_leave_the_others_whole(opened, small):
    loaded = opened.load(slices={"embed.weight": slice(0, 32)})
    assert list(loaded) == opened.keys()
    assert tuple(loaded["embed.weight"].shape) == (32, 48)
    assert raw(loaded["embed.weight"]) == Oracle(small)["embed.weight"][: 32 * 48 * 2]
    assert raw(loaded["wide"]) == Oracle(small)["wide"]


def test_a_function_may_cut(opened):
    def rank_1_of_2(info):
        if not info.name.endswith("attn.weight"):
            return None
        half = info.shape[0] // 2
        return slice(half, 2 * half)

    loaded = opened.load(slices=rank_1_of_2)
    assert tuple(loaded["layers.0.attn.weight"].shape) == (24, 40)
    assert tuple(loaded["embed.weight"].shape) == (64, 48)


def test_two_ranks_together_are_the_tensor(opened, small):
    name = "embed.weight"
    for dimension in (0, 1):
        parts = []
        for rank in range(2):
            cut = tuple(slice(rank * n // 2, (rank + 1) * n // 2) if d == dimension else slice(None)
                        for d, n in enumerate((64, 48)))  # fmt: skip
            parts.append(opened.load(names=name, slices={name: cut})[name])
        assert raw(torch.cat(parts, dimension)) == Oracle(small)[name]


@pytest.mark.parametrize(
    "cut",
    [
        slice(0, 49),
        slice(-49, None),
        (slice(None), slice(0, 41)),
        slice(0, 49, 2),
        slice(None, None, -1),
        (slice(None),) * 3,
        (..., ...),
        3,
        "a",
        [1],
    ],
    ids=str,
)
def test_a_slice_that_does_not_fit_is_refused_and_named(opened, cut):
    with pytest.raises(penstock.SliceError) as caught:
        opened.load(slices={"layers.0.attn.weight": cut})
    assert "layers.0.attn.weight" in str(caught.value)
    assert "model-00001-of-00003.safetensors" in str(caught.value)


def test_slices_of_what_is_not_loaded_are_refused(opened):
    with pytest.raises(penstock.InvalidError, match="wide is not among"):
        opened.load(names="step", slices={"wide": slice(0, 1)})
    with pytest.raises(penstock.UnknownTensorError, match="nope"):
        opened.load(slices={"nope": slice(0, 1)})


# dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "BF16", "torch.bfloat16"], ids=str)
def test_dtype_casts_floating_tensors_and_leaves_the_rest(opened, small, dtype):
    loaded, plain = opened.load(dtype=dtype), opened.load()
    assert list(loaded) == list(plain)
    for name, tensor in loaded.items():
        if opened[name].dtype in ("F16", "F32", "F64", "BF16"):
            assert tensor.dtype is torch.bfloat16
            assert raw(tensor) == raw(plain[name].to(torch.bfloat16))
        else:
            assert tensor.dtype == plain[name].dtype
            assert raw(tensor) == raw(plain[name])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_dtype_casts_numpy_arrays(opened):
    loaded = opened.load(dtype=np.float32, framework="np", names=["wide", "norm.weight", "step", "mask"])
    assert [a.dtype.name for a in loaded.values()] == ["float32", "float32", "int64", "bool"]


@pytest.mark.parametrize("dtype", [torch.int8, "int8", torch.float8_e4m3fn, "nonsense", 3, np.dtype("i4")], ids=str)
def test_dtypes_that_nothing_is_cast_to_are_refused(opened, dtype):
    with pytest.raises(ValueError, match="bfloat16"):
        opened.load(dtype=dtype)


def test_a_cast_keeps_the_order_asked_for(opened):
    assert list(opened.load(names=["wide", "step", "embed.weight"], dtype="float32")) == [
        "wide",
        "step",
        "embed.weight",
    ]


# Arguments


@pytest.mark.parametrize("device", ["cpu", "cpu:0", None, torch.device("cpu"), torch.device("cpu", 0)], ids=str)
def test_ways_to_say_cpu(opened, device):
    assert opened.load(device, names="step")["step"].device.type == "cpu"


@pytest.mark.parametrize("framework", ["PT", "nonsense", "", 3])
def test_unknown_frameworks_are_refused_with_the_known_ones(opened, framework):
    with pytest.raises(ValueError, match="dlpack"):
        opened.load(framework=framework)


def test_numpy_on_a_gpu_is_refused(opened):
    with pytest.raises(penstock.UnsupportedError, match="dlpack"):
        opened.load("cuda:0", framework="np", names="step")


@pytest.mark.parametrize("order", ["file", "layer"])
def test_orders_give_the_same_tensors(small, order):
    Oracle(small).same(penstock.open(small).load(order=order))


def test_an_unknown_order_is_refused(opened):
    with pytest.raises(ValueError, match="layer"):
        opened.load(order="random")


def test_options_as_object_and_as_dict(small):
    for options in (penstock.Options(copy=True, staging="64MiB"), {"copy": True, "staging": 64 << 20}, {}, None):
        Oracle(small).same(penstock.open(small).load(options=options))


@pytest.mark.parametrize("make", [lambda **k: k, penstock.Options], ids=["dict", "Options"])
def test_an_unknown_option_is_a_value_error_that_lists_the_known_ones(opened, make):
    with pytest.raises(ValueError) as caught:
        opened.load(options=make(stagin=3))
    for name in _core.Options.names():
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"io": "magic"}, {"cache": "never"}, {"staging": "lots"}, {"depth": -1}, {"stall_timeout": -1.0}, {"extent": 0}],
    ids=str,
)
def test_values_that_make_no_sense_are_value_errors(opened, options):
    with pytest.raises((ValueError, OverflowError), match=next(iter(options))):
        opened.load(options=options)


def test_an_unknown_choice_lists_the_known_ones(opened):
    with pytest.raises(ValueError, match='must be one of "auto", "mapped", "buffered"') as refused:
        opened.load(options={"io": "aio"})
    assert str(refused.value).count('"aio"') == 0


def test_true_is_no_number(opened):
    with pytest.raises(TypeError, match="depth"):
        opened.load(options={"depth": True})


def test_options_of_another_kind_are_refused(opened):
    with pytest.raises(ValueError, match="options="):
        opened.load(options=3)


def test_options_read_their_overrides_from_the_environment(small, python):
    code = "import penstock, sys; print(penstock.Options().staging, penstock.Options(staging='96MiB').staging)"
    assert python(code).stdout.split() == [str(256 << 20), str(96 << 20)]
    run = python(code, PENSTOCK_STAGING="128MiB")
    assert run.stdout.split()[0] == str(128 << 20), run.stderr
    run = python(code, PENSTOCK_STAGING="lots")
    assert run.returncode == 1
    assert "PENSTOCK_STAGING" in run.stderr


# Report and progress


def test_the_report_counts_what_was_loaded(opened):
    assert opened.last_report is None
    opened.load()
    report = opened.last_report
    assert report.nbytes == report["nbytes"] == LAYOUT.nbytes
    assert report.tensors == len(opened)
    assert report.seconds > 0
    assert report.gbps == pytest.approx(report.nbytes / report.seconds / 1e9, rel=0.01)
    for key in ("first_tensor_seconds", "cpu_seconds", "peak_staging", "routes", "slack_bytes", "gap_bytes",
                "fallbacks", "waits", "bottleneck", "cache", "resident_bytes", "residency_probes", "warnings",
                "plan_seconds", "seconds_per_tensor", "rerouted_extents"):  # fmt: skip
        assert key in report, key
    assert "11 tensors" in str(report)
    with pytest.raises(AttributeError, match="seconds"):
        report.secs  # noqa: B018


def test_a_failed_load_leaves_the_last_report_alone(opened):
    opened.load(names="step")
    report = opened.last_report
    with pytest.raises(penstock.UnknownTensorError):
        opened.load(names="nope")
    assert opened.last_report is report


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_progress_is_told_in_bytes_and_ends_at_the_total(big, dtype):
    seen = []
    checkpoint = penstock.open(big)
    checkpoint.load(progress=lambda done, total: seen.append((done, total)), dtype=dtype, options={"copy": True})
    assert seen[-1] == (checkpoint.nbytes, checkpoint.nbytes)
    assert all(a[0] <= b[0] for a, b in pairwise(seen))


def test_an_exception_in_the_progress_callable_ends_the_load(big):
    def explode(done, total):
        raise ZeroDivisionError("from the callable")

    with pytest.raises(ZeroDivisionError):
        penstock.open(big).load(progress=explode)


def test_progress_of_another_kind_is_refused(opened):
    with pytest.raises(ValueError, match="progress="):
        opened.load(progress="yes")


def test_progress_bars_show_on_request_and_on_rank_0_only(small, monkeypatch, capfd):
    def shown(progress, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        penstock.open(small).load(progress=progress)
        return capfd.readouterr().err

    monkeypatch.delenv("RANK", raising=False)
    assert "load" in shown(True)
    assert shown(None) == ""  # not a terminal
    assert shown(False) == ""
    assert shown(True, RANK="1") == ""
    assert "load" in shown(True, RANK="0")


def test_a_function_that_is_given_for_progress_is_called_on_every_rank(opened, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    seen = []
    opened.load(progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (opened.nbytes, opened.nbytes)


def test_progress_bars_need_no_tqdm(small, torch_python):
    code = """
import sys
sys.modules["tqdm"] = sys.modules["tqdm.auto"] = None
import penstock
penstock.open(sys.argv[1]).load(progress=True)
"""
    run = torch_python(code, small)
    assert run.returncode == 0, run.stderr
    assert "(100%)" in run.stderr


# The collector


def test_the_garbage_collector_is_left_as_it_was(small):
    assert gc.isenabled()
    penstock.open(small).load()
    assert gc.isenabled()
    gc.disable()
    try:
        penstock.open(small).load()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_load_may_be_made_by_many_threads_at_once(opened, small):
    import concurrent.futures

    oracle = Oracle(small)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for loaded in pool.map(lambda _: opened.load(), range(16)):
            oracle.same(loaded)


def test_a_file_that_changed_since_it_was_opened_is_an_error(write):
    path = write(Tensor("a", "F32", (100,)))
    checkpoint = penstock.open(path)
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(penstock.ChangedError, match=r"model\.safetensors"):
        checkpoint.load()


def test_a_file_that_vanished_since_it_was_opened_is_an_error(write):
    path = write(Tensor("a", "F32", (100,)))
    checkpoint = penstock.open(path)
    path.unlink()
    with pytest.raises(penstock.PenstockError, match=r"model\.safetensors"):
        checkpoint.load()


def test_a_load_adds_to_its_own_report_although_another_has_ended_since(opened, monkeypatch):
    """As where two threads share a checkpoint."""
    others = penstock.Report(seconds=1.0, nbytes=0, tensors=0)
    own = []
    ended = type(opened)._ended

    def and_another(checkpoint, load):
        own.append(ended(checkpoint, load))
        checkpoint._last_report = others
        return own[-1]

    monkeypatch.setattr(type(opened), "_ended", and_another)
    opened.load(dtype=torch.float64)
    assert [report["tensors"] for report in own] == [len(opened)]
    assert "hand_out_seconds" in own[0] and others == {"seconds": 1.0, "nbytes": 0, "tensors": 0}
