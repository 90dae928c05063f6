"""What no file can hold: an error of penstock that names the tensor, its type and a way out, and each way out works."""

from __future__ import annotations

import copy
import io
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import penstock.numpy
import penstock.torch
import pytest
import torch
from penstock import Options
from torch import nn


class Quantized(torch.Tensor):
    """Like those of torchao and quanto: a subclass without memory, made of others."""

    data_: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Quantized:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.data_, made.scale = data, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], None

    def dequantize(self) -> torch.Tensor:
        return self.data_.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].data_, args[0].scale)
        raise NotImplementedError(func)


class Plain(Quantized):
    """One that says nothing of what it is made of."""

    dequantize = torch.Tensor.dequantize

    def __tensor_flatten__(self) -> Any:
        raise RuntimeError("not now")


def quantized(kind: type[Quantized] = Quantized) -> Quantized:
    return kind(torch.ones(3, 2, dtype=torch.int8), torch.tensor(0.5))


class WithState(nn.Linear):
    def __init__(self, state: Any) -> None:
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def module_with(tensor: Any) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2))
    made[0].register_buffer("odd", tensor)
    return made


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def cut(nbytes: int, step: int = 1) -> torch.Tensor:
    """Six numbers, of whose storage so many bytes are left: what FSDP makes of parameters between two steps."""
    made = torch.ones(6)[::step]
    made.untyped_storage().resize_(nbytes)
    return made


def fake() -> torch.Tensor:
    with torch._subclasses.FakeTensorMode():
        return torch.ones(3)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())


#: A module that cannot be saved, and what the error must say of it.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "extra state: bytes": (lambda: nn.Sequential(WithState(io.BytesIO())), ("0._extra_state", "BytesIO", "state.pop")),
    "extra state: dict": (lambda: nn.Sequential(WithState({"a": 1})), ("0._extra_state", "dict", "state.pop")),
    "extra state: None": (lambda: WithState(None), ("_extra_state", "NoneType", "state.pop")),
    "quantized": (lambda: module_with(quantized()), ("0.odd", "Quantized", "dequantize()", "data_, scale")),
    "quantized parameter": (
        lambda: nn.ParameterDict({"p": nn.Parameter(quantized(), requires_grad=False)}),
        ("p", "Quantized", "dequantize()"),
    ),
    "subclass": (lambda: module_with(quantized(Plain)), ("0.odd", "Plain", "made of")),
    "lazy": (lazy, ("0.weight", "UninitializedParameter", "Call the module once")),
    "sparse": (lambda: module_with(torch.eye(3).to_sparse()), ("0.odd", "sparse", "to_dense()")),
    "sparse csr": (lambda: module_with(torch.eye(3).to_sparse_csr()), ("0.odd", "sparse", "to_dense()")),
    "qint8": (
        lambda: module_with(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
        ("0.odd", "qint8", "dequantize()"),
    ),
    "complex128": (
        lambda: module_with(torch.ones(2, dtype=torch.complex128)),
        ("0.odd", "complex128", "torch.view_as_real"),
    ),
    "int1": (lambda: module_with(torch.zeros(4, dtype=torch.int1)), ("0.odd", "int1", ".view(torch.uint8)")),
    "nested": (lambda: module_with(nested(torch.strided)), ("0.odd", "nested", ".unbind()", ".to_padded_tensor(0)")),
    "jagged": (lambda: module_with(nested(torch.jagged)), ("0.odd", "nested", ".unbind()", ".to_padded_tensor(0)")),
    "freed": (lambda: module_with(cut(0)), ("0.odd", "needs 24 bytes", "has 0", "Gather it")),
    "cut": (lambda: module_with(cut(20)), ("0.odd", "needs 24 bytes", "has 20", "Gather it")),
    "cut view": (lambda: module_with(cut(20, 5)), ("0.odd", "needs 24 bytes", "has 20")),
    "fake": (lambda: module_with(fake()), ("0.odd", "FakeTensor", "no values")),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), ("weight", "meta", "no values")),
}


def ways(module: nn.Module, to: Path) -> dict[str, Callable[[], Any]]:
    """Every way to save a module."""
    return {
        "save": lambda: penstock.save(module, to),
        "save of its state": lambda: penstock.save(module.state_dict(), to),
        "save_file": lambda: penstock.save_file(module.state_dict(), to / "m.safetensors"),
        "torch.save_file": lambda: penstock.torch.save_file(module.state_dict(), to / "m.safetensors"),
        "torch.save": lambda: penstock.torch.save(module.state_dict()),
        "torch.save_model": lambda: penstock.torch.save_model(module, to / "m.safetensors"),
        "torch.save_model as it is": lambda: penstock.torch.save_model(module, to / "m.safetensors", None, False),
    }


@pytest.mark.parametrize("case", MODULES)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_saved_is_named_in_every_way(tmp_path: Path, case: str):
    make, said = MODULES[case]
    for how, save in ways(make(), tmp_path).items():
        with pytest.raises(penstock.PenstockError) as caught:
            save()
        told = str(caught.value)
        for word in said:
            assert word in told, (how, told)
    assert not list(tmp_path.iterdir())


def test_the_ways_out_work(tmp_path: Path):
    """What the errors say to do."""
    state = WithState({"a": 1}).state_dict()
    state.pop("_extra_state")
    penstock.save(state, tmp_path / "extra")
    tensor = quantized()
    penstock.save_file({"w": tensor.dequantize()}, tmp_path / "whole.safetensors")
    penstock.save_file({name: getattr(tensor, name) for name in ("data_", "scale")}, tmp_path / "parts.safetensors")
    module = lazy()
    module(torch.ones(2, 4))
    penstock.save(module, tmp_path / "lazy")
    penstock.torch.save_file({"w": torch.eye(3).to_sparse().to_dense()}, tmp_path / "dense.safetensors")
    whole = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    penstock.save_file({"w": whole.dequantize(), "i": whole.int_repr()}, tmp_path / "q.safetensors")
    pairs = torch.view_as_real(torch.ones(2, dtype=torch.complex128))
    penstock.torch.save_file(
        {"w": pairs, "i": torch.zeros(4, dtype=torch.int1).view(torch.uint8)}, tmp_path / "c.safetensors"
    )
    for layout in (torch.strided, torch.jagged):
        parts = {f"w{n}": part.clone() for n, part in enumerate(nested(layout).unbind())}
        penstock.torch.save_file(parts | {"w": nested(layout).to_padded_tensor(0)}, tmp_path / "nested.safetensors")
    assert dict(penstock.open(tmp_path / "lazy").load()).keys() == module.state_dict().keys()
    assert penstock.load_file(tmp_path / "whole.safetensors")["w"].tolist() == [[0.5, 0.5]] * 3
    tied = nn.Module()
    tied.register_buffer("a", torch.arange(6.0)[:4])
    tied.register_buffer("b", torch.arange(6.0)[:4])
    tied.b = tied.a[1:]
    with pytest.raises(penstock.PenstockError, match=r"\.clone\(\)|[Cc]lone"):
        penstock.torch.save_file(dict(tied.named_buffers()), tmp_path / "no.safetensors")
    penstock.torch.save_file({n: t.clone() for n, t in tied.named_buffers()}, tmp_path / "yes.safetensors")
    with pytest.raises(penstock.PenstockError, match=r"\.contiguous\(\)"):
        penstock.torch.save_file({"t": torch.ones(2, 3).t()}, tmp_path / "no.safetensors")
    penstock.torch.save_file({"t": torch.ones(2, 3).t().contiguous()}, tmp_path / "yes.safetensors")


def test_extra_state_that_is_a_tensor_is_saved(tmp_path: Path):
    penstock.save(WithState(torch.arange(3)), tmp_path)
    assert penstock.open(tmp_path).load()["_extra_state"].tolist() == [0, 1, 2]


def test_what_a_mask_hides_is_not_saved_without_a_word(tmp_path: Path):
    array = np.ma.masked_array(np.arange(3.0), [True, False, False])
    for save in (
        lambda: penstock.save({"w": array}, tmp_path),
        lambda: penstock.save_file({"w": array}, tmp_path / "m.safetensors"),
        lambda: penstock.numpy.save_file({"w": array}, tmp_path / "m.safetensors"),
    ):
        with pytest.raises(penstock.PenstockError, match=r"w has masked values.*\.filled\(\).*\.mask"):
            save()
    assert not list(tmp_path.iterdir())
    penstock.save_file({"w": array.filled(), "mask": array.mask}, tmp_path / "m.safetensors")
    penstock.save_file({"w": np.ma.masked_array(np.arange(3.0))}, tmp_path / "none.safetensors")


@pytest.mark.parametrize("kind", ["g", "G", "M8[D]", "m8[s]"])
def test_arrays_without_a_counterpart_and_the_ways_out(tmp_path: Path, kind: str):
    array = np.zeros(2, kind)
    with pytest.raises(penstock.PenstockError, match="w is an array of") as caught:
        penstock.save_file({"w": array}, tmp_path / "m.safetensors")
    way_out = str(caught.value).partition("Save `")[2].partition("`")[0]
    penstock.save_file({"w": eval(f"array{way_out}")}, tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "tied", [["(("], 5, "head.weight", [None, "head.weight"], [b"x"], {"head.weight": "embed.weight"}]
)
def test_tied_names_of_another_kind_stop_no_save(tmp_path: Path, tied: Any):
    """`_tied_weights_keys` is a name that other programs use too."""
    module = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    module["head"].weight = module["embed"].weight
    module._tied_weights_keys = tied
    penstock.save(module, tmp_path, fsync=False)
    assert list(penstock.open(tmp_path)) == ["embed.weight"]


# Names


SURROGATES = ["\ud800", "a\udfffb", "layer.\udc80.weight", "\ud800\udc00x"]


@pytest.mark.parametrize("name", SURROGATES)
def test_a_name_with_a_lone_surrogate_is_an_error_of_penstock_everywhere(tmp_path: Path, name: str):
    penstock.save_file({"a": np.ones(3, "f4")}, tmp_path / "m.safetensors", fsync=False)
    checkpoint = penstock.open(tmp_path / "m.safetensors")
    before = sorted(tmp_path.iterdir())
    numbers, tensors = {name: np.ones(3)}, {name: torch.ones(3)}
    calls: dict[str, Callable[[], Any]] = {
        "index": lambda: checkpoint[name],
        "load": lambda: checkpoint.load(names=[name]),
        "glob": lambda: checkpoint.load(names=name + "*"),
        "stream": lambda: list(checkpoint.stream(names=[name])),
        "slices": lambda: checkpoint.load(slices={name: (slice(0, 1),)}),
        "into": lambda: checkpoint.load_into({name: np.zeros(3, "f4")}),
        "save": lambda: penstock.save(numbers, tmp_path / "x"),
        "save_file": lambda: penstock.save_file(numbers, tmp_path / "x.safetensors"),
        "torch.save_file": lambda: penstock.torch.save_file(tensors, tmp_path / "x.safetensors"),
        "torch.save": lambda: penstock.torch.save(tensors),
        "numpy.save": lambda: penstock.numpy.save(numbers),
        "numpy.save_file": lambda: penstock.numpy.save_file(numbers, tmp_path / "x.safetensors"),
        "metadata key": lambda: penstock.save_file({"a": np.ones(1)}, tmp_path / "x.safetensors", {name: "v"}),
        "metadata value": lambda: penstock.torch.save({"a": torch.ones(1)}, {"k": name}),
        "name of the file": lambda: penstock.save_file({"a": np.ones(1)}, tmp_path / f"{name}\ud800.safetensors"),
        "open": lambda: penstock.open(f"{tmp_path}/{name}\ud800"),
        "module": lambda: penstock.save(module_named(name), tmp_path / "x"),
    }
    with penstock.safe_open(tmp_path / "m.safetensors", "np") as file:
        calls |= {"get_tensor": lambda: file.get_tensor(name), "get_slice": lambda: file.get_slice(name)}
        for how, call in calls.items():
            try:
                call()
            except penstock.SafetensorError:
                continue
            except Exception as error:
                pytest.fail(f"{how}: {type(error).__name__}: {error!a}")
            pytest.fail(f"{how}: no error")
    assert name not in checkpoint and sorted(tmp_path.iterdir()) == before


def module_named(name: str) -> nn.Module:
    made = nn.Module()
    made._buffers[name] = torch.ones(3)
    made._non_persistent_buffers_set.discard(name)
    return made


def test_a_file_name_of_other_bytes_is_no_lone_surrogate(tmp_path: Path):
    path = tmp_path / "m\udcff.safetensors"  # what Python makes of a byte that is not UTF-8
    penstock.save_file({"a": np.ones(3, "f4")}, path, fsync=False)
    assert len(penstock.open(path)) == 1


# Headers


@pytest.mark.parametrize("begin", [b"{", b"  {", b"\n{"])
def test_a_header_over_the_limit_is_called_that_and_not_damaged(tmp_path: Path, begin: bytes):
    length = 100_000_001
    with (tmp_path / "m.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", length) + begin + b"}")
        file.truncate(8 + length)
    with pytest.raises(penstock.HeaderError, match=r"100000001 bytes.*100000000.*max_shard_size") as caught:
        penstock.open(tmp_path / "m.safetensors")
    assert "damaged" not in str(caught.value)
    assert (caught.value.expected, caught.value.found) == (100_000_000, length)


def test_what_only_looks_so_is_still_damaged(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    for content in (struct.pack("<Q", 1 << 40) + b"{}" + bytes(100), struct.pack("<Q", 200_000_000) + b"x" * 100):
        path.write_bytes(content)
        with pytest.raises(penstock.HeaderError, match="damaged"):
            penstock.open(path)


def test_shards_are_split_where_their_header_is_full(tmp_path: Path):
    """Two headers of 100 MB would take long: the rule itself is held in the core (`save/plan.rs`)."""
    tensors = {f"{'n' * 60_000}{i}": np.zeros(0, "f4") for i in range(1700)}
    report = penstock.save(tensors, tmp_path, fsync=False)
    assert len(report.files) == 3
    for name in report.files[:2]:
        with (tmp_path / name).open("rb") as file:
            assert int.from_bytes(file.read(8), "little") <= 100_000_000
    assert len(json.loads((tmp_path / report.files[2]).read_text())["weight_map"]) == len(tensors)
    with pytest.raises(penstock.InvalidError, match=r"header.*penstock\.save with max_shard_size"):
        penstock.save_file(tensors, tmp_path / "one.safetensors")


# Options


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": "1MiB", "copy": True},
        {"gap": 0, "io": "buffered"},
        {"gap": "auto", "trace": "t-{pid}", "copy": False},
    ],
)
def test_options_pickle_and_copy(options: dict[str, Any], protocol: int):
    made = Options(**options)
    for again in (pickle.loads(pickle.dumps(made, protocol)), copy.copy(made), copy.deepcopy(made)):
        assert type(again) is Options and again == made and repr(again) == repr(made)


def test_options_are_those_of_the_process_that_made_them(monkeypatch: pytest.MonkeyPatch):
    made = pickle.dumps(Options(threads=3))
    monkeypatch.setenv("PENSTOCK_THREADS", "7")
    monkeypatch.setenv("PENSTOCK_WINDOW", "1MiB")
    assert pickle.loads(made).threads == 3
    assert pickle.loads(made).window == 1 << 30
