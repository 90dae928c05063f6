"""Programs written for fastsafetensors, on its own code and on `penstock.compat.fastsafetensors`.

Where fastsafetensors is installed every program runs on it too, which shows that the test asks for nothing that it does
not do. What stands below "On this side alone" does not.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import fakegpu
import penstock
import pytest
import torch
from conftest import Oracle, raw
from fakegpu import fresh, torch_on
from penstock.compat import fastsafetensors as face
from penstock.synthetic.synth import Tensor

MIB = 1 << 20
#: Dtypes that fastsafetensors knows.
THEIRS = ["BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F16", "BF16", "F32", "F64"]
THEIRS += ["F8_E5M2", "F8_E4M3", "F8_E8M0", "F4"]

Write = Callable[..., Path]


@pytest.fixture(params=["penstock.compat.fastsafetensors", "fastsafetensors"])
def fst(request: pytest.FixtureRequest) -> ModuleType:
    """The module that the program imports."""
    return pytest.importorskip(request.param)


def of(fst: ModuleType, name: str) -> Any:
    """`DType`, `Device` or `TensorFrame`: here in the module itself, there in a submodule."""
    return getattr(fst if fst is face else importlib.import_module("fastsafetensors.st_types"), name)


@pytest.fixture
def pair(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """a.safetensors and b.safetensors, in the current directory."""
    monkeypatch.chdir(tmp_path)
    write(Tensor("a0", "F16", (16, 8)), Tensor("a1", "I64", ()), name="a.safetensors", metadata={"made": "here"})
    write(Tensor("b0", "F16", (16, 8)), Tensor("b1", "BF16", (3, 5)), name="b.safetensors", seed=1)
    return ["a.safetensors", "b.safetensors"]


def content(files: list[str]) -> Oracle:
    return Oracle([Path(file) for file in files])


@pytest.fixture
def many(write: Write) -> Path:
    """24 tensors of 4,000 bytes."""
    return write(*(Tensor(f"layers.{i}.weight", "F32", (1000,)) for i in range(24)), name="many.safetensors")


def described(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), raw(tensor)


# Programs


def test_the_example_for_one_process(fst, pair):
    device = torch.device("cpu")
    loader = fst.SafeTensorsFileLoader(fst.SingleGroup(), device, nogds=True, debug_log=False)
    loader.add_filenames({0: ["a.safetensors", "b.safetensors"]})
    fb = loader.copy_files_to_device()
    a0 = fb.get_tensor(tensor_name="a0")
    b0 = fb.get_tensor(tensor_name="b0")
    joined = torch.concat([a0, b0], dim=1)
    fb.close()
    loader.close()
    files = content(pair)
    assert joined.shape == (16, 16)
    assert (raw(a0), raw(b0)) == (files["a0"], files["b0"])
    assert raw(joined[:, 8:]) == files["b0"]


def test_the_example_that_uses_a_loader_twice(fst, pair):
    loader = fst.SafeTensorsFileLoader(fst.SingleGroup(), torch.device("cpu"), nogds=True)
    kept = {}
    for file in pair:
        loader.add_filenames({0: [file]})
        fb = loader.copy_files_to_device()
        for name in list(fb.key_to_rank_lidx.keys()):
            kept[name] = fb.get_tensor(name)
        fb.close()
        loader.reset()
    loader.close()
    content(pair).same(kept)


def test_the_example_of_fastsafe_open(fst, pair):
    kept = {}
    with fst.fastsafe_open(filenames=pair, nogds=True, device="cpu", debug_log=False) as f:
        for name in f.keys():  # noqa: SIM118
            kept[name] = f.get_tensor(name)
    content(pair).same(kept)


@pytest.mark.parametrize("shape", ["path", "list", "ranks"])
def test_what_fastsafe_open_takes_and_tells(fst, pair, shape):
    filenames = {"path": "a.safetensors", "list": ["a.safetensors"], "ranks": {0: ["a.safetensors"]}}[shape]
    with fst.fastsafe_open(filenames, framework="pt", nogds=True) as f:
        assert sorted(f.keys()) == ["a0", "a1"]
        assert f.metadata() == {"a.safetensors": {"made": "here"}}
        assert f.get_tensor_wrapped("a0").get_raw() is f.get_tensor("a0")
        assert f.get_tensor_wrapped("a0").get_shape() == [16, 8]
        with pytest.raises(ValueError):
            f.get_tensor("b0")
        f.fb = None  # as some programs do once they have what they want


def test_the_buffer_may_be_let_go_of_early(fst, pair):
    with fst.fastsafe_open(pair, nogds=True) as f:
        kept = f.get_tensor("b1")
        f.fb.close()
        f.fb = None
    assert raw(kept) == content(pair)["b1"]


def test_what_a_loader_tells_of_its_files(fst, pair):
    loader = fst.SafeTensorsFileLoader(None, "cpu", nogds=True)
    loader.add_filenames({0: ["b.safetensors", "a.safetensors"]})
    assert [name[0] for name in loader.get_keys()] == ["b", "b", "a", "a"]
    assert loader.get_shape("b1") == [3, 5]
    with pytest.raises(KeyError):
        loader.get_shape("none")
    first = min((loader.frames[name].data_offsets, name) for name in ("b0", "b1"))[1]
    begin, end = loader.frames[first].data_offsets
    assert (begin, end) == (0, len(content(pair)[first]))
    assert loader.frames["b1"].dtype == of(fst, "DType").BF16
    fb = loader.copy_files_to_device()
    assert {n: where for n, where in fb.key_to_rank_lidx.items() if n in ("a0", "b0")} == {"a0": (0, 0), "b0": (0, 1)}
    assert next(iter(fb.key_to_rank_lidx))[0] == "a"
    assert (fb.get_filename("b0"), fb.get_shape("b0")) == ("b.safetensors", [16, 8])
    for ask in (fb.get_tensor, fb.get_filename, fb.get_shape):
        with pytest.raises(ValueError):
            ask("none")
    fb.close()
    fb.close()
    loader.close()
    loader.close()
    assert loader.get_keys() == []


def test_tensors_are_the_same_each_time_and_writable_without_touching_the_file(fst, pair):
    before = Path("a.safetensors").read_bytes()
    with fst.fastsafe_open("a.safetensors", nogds=True) as f:
        f.get_tensor("a0").fill_(3)
        assert f.get_tensor("a0") is f.get_tensor("a0")
        assert (f.get_tensor("a0") == 3).all()
    assert Path("a.safetensors").read_bytes() == before


def test_tensors_outlive_the_files_bytes(fst, pair):
    whole = content(pair)["a0"]
    with fst.fastsafe_open("a.safetensors", nogds=True) as f:
        tensor = f.get_tensor("a0")
    Path("a.safetensors").write_bytes(b"")  # in place, under the tensor
    assert raw(tensor) == whole


def test_of_one_rank_a_shard_is_the_whole(fst, pair):
    loader = fst.SafeTensorsFileLoader(fst.SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: pair})
    fb = loader.copy_files_to_device()
    for tensor in (fb.get_sharded("a0", 1), fb.get_sharded("a0", dim=0), fb.push_tensor("a0", 0)):
        assert tensor is fb.get_tensor("a0")
    assert {name: t.get_raw() for name, t in fb.as_dict({"b0": -1, "a0": 0}).items()} == {
        "b0": fb.get_tensor("b0"),
        "a0": fb.get_tensor("a0"),
    }
    columns = fb.get_multi_cols(["b0", "a0"], dim=1).get_raw()
    assert raw(columns) == raw(torch.cat([fb.get_tensor("a0"), fb.get_tensor("b0")], dim=1))  # in the order of files
    assert fb.get_multi_cols(["a0"], dim=0, dtype=of(fst, "DType").F32).get_raw().dtype is torch.float32
    assert [(n, t.dtype) for n, t in fb.iter_local_tensors(["b1"])] == [("b1", torch.bfloat16)]
    fb.close()
    loader.close()


def test_a_filter_leaves_tensors_out(fst, pair):
    loader = fst.SafeTensorsFileLoader(None, "cpu", nogds=True)
    loader.set_tensor_filter(lambda name: name.endswith("0"))
    loader.add_filenames({0: pair})
    assert loader.get_keys() == ["a0", "b0"]
    fb = loader.copy_files_to_device()
    assert list(fb.key_to_rank_lidx) == ["a0", "b0"]
    assert raw(fb.get_tensor("b0")) == content(pair)["b0"]
    for ask in (loader.get_shape, fb.get_tensor, fb.get_filename):
        with pytest.raises(ValueError):
            ask("b1")
    fb.close()
    loader.close()


@pytest.mark.parametrize("target", ["F16", "BF16", "F8_E4M3", "I8"])
def test_dtypes_are_converted_as_the_files_are_loaded(fst, write, target):
    held = write(
        *(Tensor(dtype.lower(), dtype, (5, 4)) for dtype in ("F64", "F32", "BF16", "I64")), Tensor("e", "F32", (0,))
    )
    dtype = of(fst, "DType")[target]
    torch_dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}[
        target
    ]
    plain = penstock.open(held).load("cpu")
    loader = fst.SafeTensorsFileLoader(None, "cpu", nogds=True)
    loader.add_filenames({0: [str(held)]})
    fb = loader.copy_files_to_device(dtype=dtype)
    for name in loader.get_keys():
        assert described(fb.get_tensor(name)) == described(plain[name].to(torch_dtype)), name
    fb.close()
    loader.close()


def test_a_tensor_is_converted_as_it_is_taken(fst, pair):
    loader = fst.SafeTensorsFileLoader(None, "cpu", nogds=True)
    loader.add_filenames({0: pair})
    fb = loader.copy_files_to_device()
    wide = fb.get_tensor("b1", dtype=of(fst, "DType").F32, device=of(fst, "Device").from_str("cpu"))
    assert wide.dtype is torch.float32
    assert torch.equal(wide.to(torch.bfloat16).view(torch.int16), fb.get_tensor("b1").view(torch.int16))
    wrapped = fb.get_tensor_wrapped("b1").to(dtype=of(fst, "DType").F64)
    assert (wrapped.dtype, wrapped.get_raw().dtype) == (of(fst, "DType").F64, torch.float64)
    assert fb.get_sharded_wrapped("b1", 0)[1].clone().detach().contiguous().get_nbytes() == 10
    fb.close()
    loader.close()


@pytest.mark.parametrize("queue_size", [-1, 0, 2])
def test_a_parallel_loader_yields_every_tensor(fst, pair, queue_size):
    loader = fst.ParallelLoader(
        fst.SingleGroup(),
        hf_weights_files=pair,
        queue_size=queue_size,
        use_tqdm_on_load=False,
        device="cpu",
        nogds=True,
    )
    kept = dict(loader.iterate_weights())
    loader.close()
    content(pair).same(kept)
    assert [name[0] for name in kept] == ["a", "a", "b", "b"]


def test_a_parallel_loader_takes_what_engines_pass(fst, pair):
    loader = fst.ParallelLoader(
        None,
        pair,
        use_tqdm_on_load=False,
        nogds=True,
        tensor_filter=lambda name: name != "a0",
        all_local=True,
        max_batch_bytes=1 << 20,
        accumulate_resident=False,
        borrowed_tensors=True,
        broadcast_run_bytes=1 << 20,
        broadcast_run_tensors=8,
        overlap_io=False,
    )
    with contextlib.closing(loader.iterate_weights()) as weights:
        seen = {name: raw(tensor.clone()) for name, tensor in weights}
    loader.close()
    files = content(pair)
    assert seen == {name: files[name] for name in ("a1", "b0", "b1")}


def test_an_iteration_may_be_left_in_the_middle(fst, pair):
    loader = fst.ParallelLoader(None, pair, use_tqdm_on_load=False, nogds=True)
    with contextlib.closing(loader.iterate_weights()) as weights:
        next(weights)
    loader.close()


def test_a_budget_that_cannot_be_kept_is_refused(fst, pair):
    with pytest.raises(fst.BudgetInfeasibleError) as caught:
        fst.ParallelLoader(None, pair, use_tqdm_on_load=False, nogds=True, device_memory_budget=500)
    assert isinstance(caught.value, ValueError)
    roomy = fst.ParallelLoader(None, pair, use_tqdm_on_load=False, nogds=True, device_memory_budget=MIB)
    assert len(dict(roomy.iterate_weights())) == 4
    roomy.close()


@pytest.mark.parametrize("settings", [{"max_concurrent_producers": 2}, {"borrowed_tensors": True}])
def test_settings_of_a_parallel_loader_that_make_no_sense_are_refused(fst, pair, settings):
    with pytest.raises(ValueError):
        fst.ParallelLoader(None, pair, use_tqdm_on_load=False, nogds=True, **settings)
    with pytest.raises(ValueError):
        fst.ParallelLoader(None, pair, nogds=True, accumulate_resident=False, resident_tensor=lambda name: True)


@pytest.mark.parametrize("where", ["nowhere", "here", "named"])
def test_an_auto_loader_reads_its_configuration(fst, pair, monkeypatch, tmp_path, where):
    config = (
        '{"base": {"copier_type": "nogds", "max_threads": 3}, "parallel": {"use_tqdm_on_load": false}, "unknown": 1}'
    )
    if where == "here":
        Path("fastsafetensors.json").write_text(config)
    if where == "named":
        (tmp_path / "named.json").write_text(config)
        monkeypatch.setenv("FASTSAFETENSORS_CONFIG", str(tmp_path / "named.json"))
    loader = fst.AutoLoader(fst.SingleGroup(), pair, device="cpu")
    assert (loader.config.loader, loader.config.use_tqdm_on_load) == ("base", where == "nowhere")
    kept = dict(loader.iterate_weights())
    loader.close()
    content(pair).same(kept)


def test_a_configuration_that_is_not_there_is_an_error(fst, pair, monkeypatch, tmp_path):
    monkeypatch.setenv("FASTSAFETENSORS_CONFIG", str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError):
        fst.AutoLoader(fst.SingleGroup(), pair)


def test_loaders_that_iterate_open_their_files_when_they_do(fst, pair):
    late = ["late.safetensors"]
    loaders = [fst.AutoLoader(None, late), fst.ParallelLoader(None, late, use_tqdm_on_load=False, nogds=True)]
    for loader in loaders:
        with pytest.raises(FileNotFoundError, match="late"):
            dict(loader.iterate_weights())
        loader.close()
    loaders = [fst.AutoLoader(None, late), fst.ParallelLoader(None, late, use_tqdm_on_load=False, nogds=True)]
    Path("a.safetensors").rename("late.safetensors")
    for loader in loaders:
        content(late).same(dict(loader.iterate_weights()))
        loader.close()
    # A budget is compared with the files' tensors at once
    with pytest.raises(FileNotFoundError):
        fst.ParallelLoader(None, pair, use_tqdm_on_load=False, nogds=True, device_memory_budget=MIB)


SETTINGS = {
    "loader": "base",
    "base": {"copier_type": "nogds", "max_threads": 3, "framework": "pytorch", "debug_log": True, "set_numa": False},
    "3fs": {"mount_point": "/mnt", "disable_cache": True},
    "parallel": {"use_pipeline": True, "queue_size": 2, "max_batch_bytes": 4096, "unknown": 1},
    "debug": {"debug_log": True},
}


def test_a_configuration_gives_the_settings_of_a_loader_without_those_of_all(fst):
    config = fst.LoaderConfig.from_dict(SETTINGS)
    base = config.get_extension_config("base")
    assert base == {"copier_type": "nogds", "max_threads": 3}
    assert config.get_extension_config("3fs") == {"mount_point": "/mnt"}
    assert config.get_extension_config("none") == {}
    base.clear()
    assert config.get_extension_config("base") == {"copier_type": "nogds", "max_threads": 3}
    assert fst.LoaderConfig().get_extension_config("base") == {}


def test_a_configuration_gives_the_arguments_of_a_parallel_loader(fst, pair):
    memory = {"max_batch_bytes": None, "use_chunk_budget_as_allocation_size": False, "device_memory_budget": None}
    assert fst.LoaderConfig().create_parallel_kwargs() == {"queue_size": -1, **memory}
    arguments = fst.LoaderConfig.from_dict(SETTINGS).create_parallel_kwargs()
    assert arguments == {
        "max_concurrent_producers": 1,
        "queue_size": 2,
        "use_tqdm_on_load": True,
        **memory,
        "max_batch_bytes": 4096,
    }
    loader = fst.ParallelLoader(None, pair, nogds=True, **{**arguments, "use_tqdm_on_load": False})
    assert len(dict(loader.iterate_weights())) == 4
    loader.close()


def test_a_configuration_of_several_producers_is_refused_when_it_is_made(fst):
    with pytest.raises(ValueError, match="max_concurrent_producers"):
        fst.LoaderConfig(max_concurrent_producers=2)
    with pytest.raises(ValueError, match="max_concurrent_producers"):
        fst.LoaderConfig.from_dict({"parallel": {"max_concurrent_producers": 2}})


def test_what_is_wrong_with_files_is_an_error_as_they_are_added(fst, pair):
    loader = fst.SafeTensorsFileLoader(None, "cpu", nogds=True)
    with pytest.raises(FileNotFoundError):
        loader.add_filenames({0: ["none.safetensors"]})
    Path("bad.safetensors").write_bytes(b"none")
    with pytest.raises(Exception, match=r"bad\.safetensors"):
        loader.add_filenames({0: ["bad.safetensors"]})
    loader.close()


def test_a_name_in_two_files_is_an_error(fst, pair, write):
    write(Tensor("b0", "F16", (2,)), name="c.safetensors")
    loader = fst.SafeTensorsFileLoader(None, "cpu", nogds=True)
    with pytest.raises(Exception, match="b0"):
        loader.add_filenames({0: [*pair, "c.safetensors"]})
        loader.copy_files_to_device()
    loader.close()


def test_without_files_there_are_no_tensors(fst):
    loader = fst.SafeTensorsFileLoader(None, "cpu", nogds=True)
    assert loader.copy_files_to_device().key_to_rank_lidx == {}
    loader.close()


def test_a_framework_and_a_group_that_are_none_are_refused(fst):
    with pytest.raises(Exception, match="jax"):
        fst.SafeTensorsFileLoader(None, "cpu", framework="jax")
    with pytest.raises(Exception, match="pg"):
        fst.SafeTensorsFileLoader(7, "cpu")


def test_devices(fst):
    device = of(fst, "Device")
    kinds = of(fst, "DeviceType")
    assert device.from_str("cuda:1") == device(kinds.CUDA, 1)
    assert (device.from_str("CPU").as_str(), device.from_str("cuda:3").as_str(), device().as_str()) == (
        "cpu",
        "cuda:3",
        "cpu",
    )
    for wrong in ("meta", "cuda:x", ""):
        with pytest.raises(ValueError):
            device.from_str(wrong)
    loader = fst.SafeTensorsFileLoader(None, "cpu", nogds=True)
    assert loader.device == device()
    loader.close()


def test_a_group_of_one_rank_will_do(fst, pair):
    group = torch.distributed
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
    try:
        with fst.fastsafe_open(pair, pg=group.group.WORLD, nogds=True) as f:
            assert raw(f.get_tensor("a0")) == content(pair)["a0"]
    finally:
        group.destroy_process_group()


@pytest.mark.parametrize("seed", range(12))
def test_random_files_are_the_same_on_both(write, seed):
    original = pytest.importorskip("fastsafetensors")
    chance = random.Random(seed)
    files = []
    for number in range(chance.randrange(1, 5)):
        tensors = [
            Tensor(
                f"t{number}.{chance.randrange(1 << 30)}",
                chance.choice(THEIRS),
                (*(chance.randrange(0, 6) for _ in range(chance.randrange(0, 3))), 2 * chance.randrange(0, 20)),
            )
            for _ in range(chance.randrange(1, 12))
        ]
        metadata = {"metadata": {"seed": str(seed)}} if chance.random() < 0.5 else {}
        align = chance.choice([8, 16, 64])
        files.append(str(write(*tensors, name=f"{number}.safetensors", align=align, seed=seed, **metadata)))
    chance.shuffle(files)
    told = []
    for fst in (original, face):
        loader = fst.SafeTensorsFileLoader(None, "cpu", nogds=True)
        loader.add_filenames({0: files})
        fb = loader.copy_files_to_device()
        names = loader.get_keys()
        told.append(
            {
                "keys": names,
                "places": fb.key_to_rank_lidx,
                "order": list(fb.key_to_rank_lidx),
                "frames": [(f.dtype.name, f.shape, f.data_offsets) for f in (loader.frames[name] for name in names)],
                "shapes": [(loader.get_shape(name), fb.get_shape(name), fb.get_filename(name)) for name in names],
                "tensors": [described(fb.get_tensor(name)) for name in names],
                "wrapped": [
                    (w.dtype.name, w.device.as_str(), w.get_shape()) for w in map(fb.get_tensor_wrapped, names)
                ],
            }
        )
        fb.close()
        loader.close()
        with fst.fastsafe_open(files, nogds=True) as f:
            # Where there is none the original says ""
            told[-1]["metadata"] = {path: dict(held or {}) for path, held in f.metadata().items()}
            told[-1]["opened"] = f.keys()
        parallel = fst.ParallelLoader(None, sorted(files), use_tqdm_on_load=False, nogds=True)
        yielded = {name: described(tensor) for name, tensor in parallel.iterate_weights()}
        parallel.close()
        told[-1]["yielded"] = yielded
        # Those without elements come at any time here
        told[-1]["order of those with elements"] = [name for name, seen in yielded.items() if seen[-1]]
    for what, theirs in told[0].items():
        assert told[1][what] == theirs, what


# On this side alone


def test_what_the_first_readme_passes_as_its_group_is_taken(pair):
    loader = face.SafeTensorsFileLoader(face.SingleGroup, torch.device("cpu"), nogds=True, debug_log=True)
    loader.add_filenames({0: pair})
    fb = loader.copy_files_to_device()
    assert raw(fb.get_tensor(tensor_name="a0")) == content(pair)["a0"]
    loader.close()
    with face.fastsafe_open(pair) as f:
        assert f.get_keys() == f.keys()


class Ranks:
    """Says that it is a process group of several ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return 0


def test_a_group_that_this_process_is_not_in_is_refused(pair):
    """Real groups of several ranks are in `test_compat_groups.py`."""
    for make in (
        lambda: face.SafeTensorsFileLoader(Ranks(2), "cpu"),
        lambda: face.fastsafe_open(pair, pg=Ranks(8)),
        lambda: face.ParallelLoader(Ranks(2), pair),
        lambda: face.AutoLoader(Ranks(2), pair),
    ):
        with pytest.raises(penstock.InvalidError, match="not a member"):
            make()
    alone = face.ParallelLoader(Ranks(2), pair, all_local=True, use_tqdm_on_load=False)
    assert len(dict(alone.iterate_weights())) == 4
    with pytest.raises(penstock.InvalidError, match="not in that group"):
        face.SafeTensorsFileLoader(Ranks(-1), "cpu")
    loader = face.SafeTensorsFileLoader(None, "cpu")
    with pytest.raises(penstock.InvalidError, match="rank 1"):
        loader.add_filenames({0: pair[:1], 1: pair[1:]})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"framework": "jax"}, "pytorch"),
        ({"framework": "paddle"}, "pytorch"),
        ({"bbuf_size_kb": 0}, "bbuf_size_kb=0"),
        ({"max_threads": -1}, "max_threads=-1"),
        ({"max_threads": "8"}, "max_threads='8'"),
        ({"device": "nonsense!"}, "nonsense"),
    ],
)
def test_nonsense_is_refused(settings, said):
    with pytest.raises(penstock.PenstockError, match=said):
        face.SafeTensorsFileLoader(None, **settings)


def test_a_dtype_that_is_none_is_refused(pair):
    loader = face.SafeTensorsFileLoader(None, "cpu")
    loader.add_filenames({0: pair})
    with pytest.raises(penstock.InvalidError, match=r"BOOL, .*, AUTO"):
        loader.copy_files_to_device(dtype="float16")
    with pytest.raises(penstock.UnsupportedError, match="F6"):
        loader.copy_files_to_device(dtype=face.DType.F6_E2M3)
    assert loader.copy_files_to_device(dtype=torch.float64).get_tensor("a0").dtype is torch.float64  # wider: no error


def test_f4_is_converted_to_nothing(write):
    held = write(Tensor("f", "F4", (3, 8)))
    loader = face.SafeTensorsFileLoader(None, "cpu")
    loader.add_filenames({0: [held]})
    with pytest.raises(penstock.UnsupportedError, match=r"tensor f .*F4"):
        loader.copy_files_to_device(dtype=face.DType.F16)
    fb = loader.copy_files_to_device()
    assert (fb.get_shape("f"), list(fb.get_tensor("f").shape)) == ([3, 8], [3, 4])
    assert fb.get_multi_cols(["f", "f"], dim=1).get_shape() == [3, 16]


def test_dtypes_that_the_original_lacks(every):
    loader = face.SafeTensorsFileLoader(None, "cpu")
    loader.set_tensor_filter(lambda name: name.startswith(("c64", "f8")))
    loader.add_filenames({0: [every]})
    fb = loader.copy_files_to_device()
    files = Oracle(every)
    assert {face.DType.C64, face.DType.F8_E4M3FNUZ} <= {loader.frames[name].dtype for name in loader.get_keys()}
    for name in loader.get_keys():
        assert raw(fb.get_tensor(name)) == files[name]
        assert fb.get_tensor_wrapped(name).dtype is loader.frames[name].dtype


def test_what_was_closed_says_so(pair):
    loader = face.SafeTensorsFileLoader(None, "cpu")
    loader.add_filenames({0: pair})
    fb = loader.copy_files_to_device()
    fb.close()
    with pytest.raises(penstock.PenstockError, match="closed"):
        fb.get_tensor("a0")
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        loader.copy_files_to_device()
    parallel = face.ParallelLoader(None, pair, use_tqdm_on_load=False)
    parallel.close()
    with pytest.raises(RuntimeError, match="closed"):
        parallel.iterate_weights()


def test_errors_survive_pickling(pair):
    with face.fastsafe_open(pair) as f, pytest.raises(KeyError) as caught:
        f.get_tensor("none")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))
    assert isinstance(again, (ValueError, penstock.UnknownTensorError))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('{"loader": "3fs"}', penstock.UnsupportedError),
        ('{"loader": "none"}', ValueError),
        ('{"base": {"copier_type": "none"}}', ValueError),
        ('{"parallel": {"max_concurrent_producers": 2}}', ValueError),
        ("[]", ValueError),
        ("{", ValueError),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(pair, content, error):
    Path("fastsafetensors.json").write_text(content)
    with pytest.raises(error):
        face.AutoLoader(None, pair)


def test_settings_reach_the_engine(many, monkeypatch):
    seen: list[dict[str, Any]] = []
    for way in ("load", "stream"):
        real = getattr(penstock.Checkpoint, way)

        def noted(self, *args, real=real, **kwargs):
            seen.append(kwargs["options"])
            return real(self, *args, **kwargs)

        monkeypatch.setattr(penstock.Checkpoint, way, noted)

    def options(make: Callable[[], Any]) -> dict[str, Any]:
        seen.clear()
        make()
        [settings] = seen
        return settings

    def loader(borrowed: bool = False, **settings: Any) -> None:
        made = face.SafeTensorsFileLoader(None, "cpu", **settings)
        made.add_filenames({0: [many]})
        made.copy_files_to_device(borrowed_tensors=borrowed)

    def parallel(**settings: Any) -> None:
        made = face.ParallelLoader(None, [many], use_tqdm_on_load=False, **settings)
        assert len(dict(made.iterate_weights())) == 24

    assert options(loader) == {"copy": True}
    assert options(lambda: loader(borrowed=True)) == {}
    assert options(lambda: loader(bbuf_size_kb=64 << 10, max_threads=3)) == {
        "copy": True,
        "staging": 64 * MIB,
        "threads": 3,
    }
    assert options(lambda: loader(bbuf_size_kb=1)) == {"copy": True, "staging": 8 * MIB}
    assert options(parallel) == {"copy": True}
    assert options(lambda: parallel(max_batch_bytes=5_000)) == {"copy": True, "window": 5_000}
    assert options(lambda: parallel(device_memory_budget=100_000)) == {"copy": True, "window": 4_000}
    assert options(lambda: parallel(device_memory_budget=10_000, accumulate_resident=False)) == {
        "copy": True,
        "window": 6_000,
    }
    assert options(
        lambda: parallel(device_memory_budget=30_000, resident_tensor=lambda name: name.startswith("layers.2"))
    ) == {"copy": True, "window": 30_000 - 5 * 4_000 - 4_000}


def test_a_filter_reads_only_what_it_keeps(many):
    loader = face.SafeTensorsFileLoader(None, "cpu")
    loader.set_tensor_filter(lambda name: name == "layers.3.weight")
    loader.add_filenames({0: [many]})
    fb = loader.copy_files_to_device()
    report = fb._checkpoint.last_report
    assert report.nbytes == 4_000
    assert sum(route["bytes"] for route in report.routes.values()) < 4_000 + 2 * 4096


@pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)
def test_the_example_for_one_process_on_a_gpu(pair, monkeypatch):
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    files = content(pair)
    with fresh() as fake, torch_on(fake, monkeypatch) as gpu:
        loader = face.SafeTensorsFileLoader(
            face.SingleGroup(), torch.device("cuda:0"), nogds=False, bbuf_size_kb=8 << 10
        )
        assert loader.device == face.Device.from_str("cuda:0")
        loader.add_filenames({0: ["a.safetensors", "b.safetensors"]})
        fb = loader.copy_files_to_device()
        for name in loader.get_keys():
            tensor = fb.get_tensor(name)
            assert gpu.pool.contains(tensor.data_ptr())
            assert fake.read(tensor.data_ptr(), tensor.nbytes) == files[name]
        half = loader.copy_files_to_device(dtype=face.DType.BF16)
        assert {half.get_tensor(name).dtype for name in loader.get_keys()} == {torch.bfloat16}
        fb.close()
        half.close()
        loader.close()
        parallel = face.ParallelLoader(None, pair, use_tqdm_on_load=False, device="cuda:0", max_batch_bytes=MIB)
        for name, each in parallel.iterate_weights():
            assert fake.read(each.data_ptr(), each.nbytes) == files[name]
        del fb, half, tensor, each
