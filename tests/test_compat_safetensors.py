"""docs/compatibility.md, row by row: the same call on safetensors and on penstock.

Where the table says that a name is the same, `alike` compares the values. Where safetensors raises, whatever `except`
clause catches its error has to catch penstock's. Where the table states a difference, `differ` asserts both sides of
it, so that a difference that is gone is noticed too. The last test compares the rows of the table with those tested.
"""

from __future__ import annotations

import ast
import concurrent.futures
import gc
import importlib.util
import json
import os
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import penstock
import penstock.numpy
import penstock.torch
import pytest
import torch
from conftest import raw
from penstock._dtypes import DTYPES
from penstock.synthetic import synth
from penstock.synthetic.synth import BITS, Tensor

safetensors = pytest.importorskip("safetensors", minversion="0.8")
import safetensors.numpy  # noqa: E402, F811
import safetensors.torch  # noqa: E402

PAGE = Path(__file__).parent.parent / "docs/compatibility.md"
SECTION = "Programs written for safetensors"

#: Rows of the table that some test here is for.
tested: set[str] = set()


def row(*names: str) -> Callable[[Any], Any]:
    """Says which rows of the table a test is for."""
    tested.update(names)
    return lambda test: test


Call = Callable[[ModuleType], Any]


def outcome(call: Call, module: ModuleType) -> Any:
    try:
        return call(module)
    except Exception as error:
        return error


def plain(value: Any) -> Any:
    """What is compared of a value: of tensors their class, dtype, shape, strides and bytes."""
    if isinstance(value, torch.Tensor):
        return "torch", value.dtype, tuple(value.shape), value.stride(), raw(value)
    if isinstance(value, np.ndarray):
        return "numpy", value.dtype, value.shape, value.flags.writeable, value.tobytes()
    if isinstance(value, dict):
        return [(name, plain(item)) for name, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [plain(item) for item in value]
    return value


def alike(call: Call, says: str = "", *, error: type[Exception] | None = None) -> None:
    """The same value from both, or errors that the same `except` clauses catch. ``says``: a pattern in both texts."""
    theirs, ours = outcome(call, safetensors), outcome(call, penstock)
    if isinstance(theirs, Exception):
        assert isinstance(ours, type(theirs)), (theirs, ours)
        assert isinstance(theirs, error or Exception)
        assert re.search(says, str(theirs)) and re.search(says, str(ours)), (theirs, ours)
        again = pickle.loads(pickle.dumps(ours))
        assert (type(again), str(again)) == (type(ours), str(ours))
    else:
        assert error is None and not says, theirs
        assert plain(ours) == plain(theirs)


def differ(call: Call, theirs: Any, ours: Any, says: str = "") -> None:
    """Each an exception class, or a function that is true of the value. ``says``: a pattern in penstock's error."""
    for module, expected in ((safetensors, theirs), (penstock, ours)):
        found = outcome(call, module)
        if isinstance(expected, type) and issubclass(expected, Exception):
            assert isinstance(found, expected), (module.__name__, found)
        else:
            assert not isinstance(found, Exception), (module.__name__, found)
            assert expected(found), (module.__name__, found)
        if module is penstock and isinstance(found, Exception):
            assert re.search(says, str(found)), found


def anything(value: Any) -> bool:
    return True


@pytest.fixture
def one(write: Callable[..., Path]) -> Path:
    """A file whose alphabetical and offset orders differ."""
    return write(
        Tensor("z.weight", "F32", (6, 8)),
        Tensor("a.weight", "BF16", (10,)),
        Tensor("m", "I32", ()),
        Tensor("e", "F16", (0, 3)),
        metadata={"k": "v"},
    )


def of_header(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


# safe_open


@row("`filename`")
def test_the_file(one: Path, tmp_path: Path):
    for path in (one, str(one)):
        alike(lambda m, path=path: m.safe_open(path, "pt").keys())
        alike(lambda m, path=path: m.safe_open(filename=path, framework="pt").keys())
    for path in (tmp_path / "none", "", str(tmp_path / "a" / "b")):
        alike(lambda m, path=path: m.safe_open(path, "pt"), "No such file or directory", error=FileNotFoundError)
    for path in (3, None, os.fsencode(one), object()):
        alike(lambda m, path=path: m.safe_open(path, "pt"), error=TypeError)
    (tmp_path / "folder").mkdir()
    alike(lambda m: m.safe_open(tmp_path / "folder", "pt"), error=OSError)
    alike(lambda m: m.safe_open(), error=TypeError)
    alike(lambda m: m.safe_open(one, "pt", nonsense=1), "unexpected keyword argument 'nonsense'", error=TypeError)
    alike(lambda m: m.safe_open(one, "pt", "cpu", "mmap"), error=TypeError)
    for several in (tmp_path, [one]):
        differ(lambda m, several=several: m.safe_open(several, "pt"), Exception, anything)


@row("`framework`")
def test_the_framework(one: Path):
    for name in ("pt", "torch", "pytorch", "np", "numpy"):
        alike(lambda m, name=name: m.safe_open(one, name).get_tensor("z.weight"))
        alike(lambda m, name=name: m.safe_open(one, framework=name).get_slice("z.weight")[2:4])
    for name in ("PT", "", "nonsense"):
        alike(lambda m, name=name: m.safe_open(one, name), error=safetensors.SafetensorError)
    for name in (3, b"pt", ["pt"]):
        alike(lambda m, name=name: m.safe_open(one, name), error=TypeError)
    differ(lambda m: m.safe_open(one), TypeError, anything)
    differ(lambda m: m.safe_open(one, None), TypeError, anything)
    differ(lambda m: m.safe_open(one, "dlpack"), safetensors.SafetensorError, anything)


ABSENT = """
import importlib, json, sys
packages = {"jax": "jax", "flax": "jax", "tf": "tensorflow", "paddle": "paddle", "mlx": "mlx"}
sys.modules.update(dict.fromkeys(packages.values()))
import penstock, safetensors
for name, package in packages.items():
    for module in (safetensors, penstock):
        when = "open"
        try:
            file = module.safe_open(sys.argv[1], name)
            when = "tensor"
            file.get_tensor("z.weight")
        except ImportError as error:
            unsupported = isinstance(error, penstock.UnsupportedError)
            print(json.dumps([name, module.__name__, when, unsupported, package in str(error)]))
    for module in ("safetensors", "penstock"):
        try:
            importlib.import_module(module + "." + {"jax": "flax"}.get(package, package))
        except ImportError as error:
            print(json.dumps([name, module, "import", False, package in str(error)]))
"""


@row("a framework that is not installed")
def test_a_framework_that_is_absent(one: Path, python: Callable[..., Any]):
    done = python(ABSENT, one)
    expected = []
    for name in ("jax", "flax", "tf", "paddle", "mlx"):
        expected.append([name, "safetensors", "open" if name == "paddle" else "tensor", False, True])
        expected.append([name, "penstock", "open", True, True])
        expected += [[name, module, "import", False, True] for module in ("safetensors", "penstock")]
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected, done.stderr


@row("`device`")
def test_the_device(one: Path):
    alike(lambda m: m.safe_open(one, "pt", "cpu").get_tensors())
    alike(lambda m: m.safe_open(one, "pt", None).get_tensors())
    alike(lambda m: m.safe_open(one, "pt", device="cpu").get_tensors())
    for device in ("cuda", "cuda:0", "cuda:7", 0, 3):  # opened, not looked for
        alike(lambda m, device=device: m.safe_open(one, "pt", device).keys())
    for device in ("CPU", "", "0", "cuda:0:1", "nonsense", -1, 1.5, b"cpu", object):
        alike(lambda m, device=device: m.safe_open(one, "pt", device), error=safetensors.SafetensorError)
    for device in ("cuda:x", "cuda:-1"):
        alike(lambda m, device=device: m.safe_open(one, "pt", device), error=ValueError)
    for device in ("cpu:0", torch.device("cpu"), torch.device("cuda:0"), torch.device("cpu", 0), "meta"):
        differ(lambda m, device=device: m.safe_open(one, "pt", device), safetensors.SafetensorError, anything)
    differ(lambda m: m.safe_open(one, "pt", "rocm:0"), safetensors.SafetensorError, anything)
    for device in ("mps", "npu:0", "xpu", "xla", "mlu:0", "musa", "hpu"):
        alike(lambda m, device=device: m.safe_open(one, "pt", device).keys())
    for device in ("cuda:99999", True):
        differ(
            lambda m, device=device: m.safe_open(one, "pt", device), anything, penstock.InvalidError, "is not a device"
        )
    for device in ("cuda:0", 0):
        alike(lambda m, device=device: m.safe_open(one, "np", device), error=safetensors.SafetensorError)


@row("`backend`")
def test_the_backend(one: Path):
    for backend in ("mmap", "pread"):
        for framework in ("pt", "np"):
            alike(lambda m, b=backend, f=framework: m.safe_open(one, f, backend=b).get_tensor("z.weight"))
    for backend in ("MMAP", "smoke", ""):
        alike(lambda m, backend=backend: m.safe_open(one, "pt", backend=backend), "mmap.*pread")
    alike(lambda m: m.safe_open(one, "pt", backend=3), error=TypeError)
    differ(lambda m: m.safe_open(one, "pt", backend=None), TypeError, anything)


@row("`keys()`, `offset_keys()`")
def test_the_names(one: Path):
    alike(lambda m: m.safe_open(one, "pt").keys())
    alike(lambda m: m.safe_open(one, "pt").offset_keys())
    assert penstock.safe_open(one, "pt").keys() == ["a.weight", "e", "m", "z.weight"]
    assert penstock.safe_open(one, "pt").offset_keys() == ["z.weight", "a.weight", "m", "e"]

    def changed(m: ModuleType) -> list[str]:
        file = m.safe_open(one, "pt")
        file.keys().append("x")
        return file.keys()

    alike(changed)
    alike(lambda m: m.safe_open(one, "pt").keys(1), error=TypeError)


@row("`metadata()`")
def test_the_metadata(one: Path, tmp_path: Path):
    alike(lambda m: m.safe_open(one, "pt").metadata())
    for number, written in enumerate(({}, None, {"a": "b", "ü": "\n"})):
        path = of_header(tmp_path / str(number), {"__metadata__": written})
        alike(lambda m, path=path: sorted((m.safe_open(path, "pt").metadata() or {"": "none"}).items()))
    alike(lambda m: m.safe_open(of_header(tmp_path / "x", {}), "pt").metadata())
    for number, written in enumerate(([], {"a": 1}, {"a": None}, "text")):
        path = of_header(tmp_path / str(number), {"__metadata__": written})
        alike(lambda m, path=path: m.safe_open(path, "pt"), error=safetensors.SafetensorError)


@row("`get_tensor(name)`")
def test_one_tensor(one: Path):
    for framework in ("pt", "np"):
        for name in ("z.weight", "m", "e"):
            alike(lambda m, f=framework, name=name: m.safe_open(one, f).get_tensor(name))
    alike(lambda m: m.safe_open(one, "pt").get_tensor(name="a.weight"))
    for name in ("nope", "", "Z.WEIGHT", "*"):
        alike(
            lambda m, name=name: m.safe_open(one, "pt").get_tensor(name),
            re.escape(f"File does not contain tensor {name}"),
            error=safetensors.SafetensorError,
        )
    for name in (None, 3, b"m", ["m"]):
        alike(lambda m, name=name: m.safe_open(one, "pt").get_tensor(name), error=TypeError)
    differ(lambda m: m.safe_open(one, "pt").get_tensor("nope"), safetensors.SafetensorError, KeyError)


@row("`get_tensors()`")
def test_all_tensors(one: Path):
    alike(lambda m: m.safe_open(one, "pt").get_tensors())  # in file order, too
    differ(lambda m: m.safe_open(one, "pt").get_tensors(["m"]), TypeError, lambda found: list(found) == ["m"])


@row("`get_slice(name)`")
def test_a_slice(one: Path):
    for name in ("z.weight", "a.weight", "m", "e"):
        alike(lambda m, name=name: m.safe_open(one, "pt").get_slice(name).get_shape())
        alike(lambda m, name=name: m.safe_open(one, "pt").get_slice(name).get_dtype())
    alike(lambda m: m.safe_open(one, "pt").get_slice(name="m").get_shape())
    alike(lambda m: m.safe_open(one, "pt").get_slice("nope"), "File does not contain tensor nope")
    for name in (None, 3, b"m"):
        alike(lambda m, name=name: m.safe_open(one, "pt").get_slice(name), error=TypeError)
    alike(lambda m: list(m.safe_open(one, "pt").get_slice("z.weight")))
    alike(lambda m: list(m.safe_open(one, "pt").get_slice("m")))
    alike(lambda m: len(m.safe_open(one, "pt").get_slice("z.weight")), error=TypeError)


#: What torch takes for an index, and what it does not. Of rows the strides are the same, of columns they are not.
TORCH = [..., (), slice(None), slice(2, 4), slice(-2, None), slice(0, 100), slice(10, 12), 0, -1, (3, 4)]
TORCH += [(1, ...), None, [0, 2], [True, False] * 3, torch.tensor([1, 0]), np.array([5]), True]
STRIDED = [
    slice(None, None, 2),
    slice(4, 2),
    (slice(None), 3),
    (slice(1, 3), slice(2, 6)),
    (..., slice(0, 2)),
    (..., 1),
]
STRIDED += [(None, slice(0, 2))]
WRONG = [6, -7, (0, 8), (0, 0, 0), (slice(None), -9), slice(None, None, -1), slice(None, None, 0), "x", 1.5]
WRONG += [slice("a", None), [9], [True], {}, (..., 9), object()]


@row("`slice[index]`, torch")
def test_indices_of_torch(one: Path):
    for index in TORCH:
        alike(lambda m, index=index: m.safe_open(one, "pt").get_slice("z.weight")[index])
    for index in STRIDED:

        def values(m: ModuleType, index: Any = index) -> Any:
            found = m.safe_open(one, "pt").get_slice("z.weight")[index]
            assert m is safetensors or found.is_contiguous()
            return found.clone(memory_format=torch.contiguous_format)

        alike(values)
    for name in ("z.weight", "m", "e"):
        for index in WRONG:
            if name == "z.weight" or isinstance(index, (int, tuple)):
                alike(lambda m, name=name, index=index: m.safe_open(one, "pt").get_slice(name)[index], error=Exception)
    with pytest.raises(penstock.SliceError, match=r"slice of z\.weight: .*out of bounds|out of range") as caught:
        penstock.safe_open(one, "pt").get_slice("z.weight")[6]
    assert caught.value.path == str(one)


@row('`slice[index]`, numpy and others, or `backend="pread"`')
@pytest.mark.parametrize(("framework", "backend"), [("np", "mmap"), ("np", "pread"), ("pt", "pread")])
def test_indices_of_numpy(one: Path, framework: str, backend: str):
    def of(index: Any, name: str = "z.weight") -> Call:
        return lambda m: m.safe_open(one, framework, backend=backend).get_slice(name)[index]

    for index in (..., (), slice(None), slice(1, 3), 0, -1, (1, 2), (slice(None), 3), (slice(None), slice(2, 4))):
        alike(of(index))
    for index in (slice(None, None, 2), slice(0, 5, 3), (slice(None), slice(1, 8, 3)), (..., 1), (1, ...)):
        alike(of(index))
    alike(of(..., "m"))
    for index in (6, -7, (0, 8), (0, 0, 0), slice(None, None, 0), "x", 1.5):
        alike(of(index), error=safetensors.SafetensorError)
    for index in (slice("a", None), slice(1.5, None)):
        alike(of(index), error=TypeError)
    # The framework's meaning, where safetensors has none, or one of its own
    whole = penstock.safe_open(one, framework).get_tensor("z.weight")
    for index in (slice(-2, None), slice(0, 100), slice(10, 12), slice(4, 2), None, [0, 2], [True, False] * 3):
        differ(of(index), Exception, lambda found, index=index: raw(found) == raw(whole[index]))
    for index in (True, torch.tensor([0])):
        differ(of(index), lambda found: found.shape == (8,), lambda found, i=index: raw(found) == raw(whole[i]))


@row("`get_tensor_meta(name)`, `prefetch(...)`")
def test_names_of_the_next_version(one: Path):
    with penstock.safe_open(one, "pt") as file:
        meta = file.get_tensor_meta("a.weight")
        assert (meta.dtype, meta.shape, meta.data_offsets) == ("BF16", [10], (192, 212))
        with pytest.raises(penstock.UnknownTensorError, match="File does not contain tensor nope"):
            file.get_tensor_meta("nope")
        with file.prefetch({"z.weight": slice(2, 4), "m": None}, device="cpu", threads=2) as loader:
            assert sorted(loader.names()) == ["m", "z.weight"] and len(loader) == 2
            assert raw(loader.take("z.weight")) == raw(file.get_tensor("z.weight")[2:4])
            assert [name for name, _ in loader] == ["m"]


def closed(module: ModuleType, path: Path) -> Any:
    with module.safe_open(path, "pt") as file:
        assert file.__enter__() is file
    return file


@row("`with`, after the end of it")
def test_a_closed_file(one: Path):
    for call in ("keys", "offset_keys", "metadata", "get_tensors"):
        alike(lambda m, call=call: getattr(closed(m, one), call)(), "File is closed", error=safetensors.SafetensorError)
    for call in ("get_tensor", "get_slice"):
        for name in ("m", "nope"):
            alike(lambda m, c=call, name=name: getattr(closed(m, one), c)(name), "File is closed")
        alike(lambda m, call=call: getattr(closed(m, one), call)(3), error=TypeError)
    alike(lambda m: closed(m, one).__exit__(None, None, None))
    alike(lambda m: m.safe_open(one, "pt").__exit__(ValueError, ValueError("x"), None))
    alike(lambda m: m.safe_open(one, "pt").__exit__(), error=TypeError)

    def entered_again(m: ModuleType) -> Any:
        with closed(m, one) as file:
            return file.keys()

    alike(entered_again, "File is closed")


@row("lifetime")
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_tensors_and_slices_outlive_the_handle(one: Path, framework: str):
    def kept(m: ModuleType) -> Any:
        with m.safe_open(one, framework) as file:
            tensor, part, later = (
                file.get_tensor("z.weight"),
                file.get_slice("z.weight")[1:],
                file.get_slice("z.weight"),
            )
        del file
        gc.collect()
        return [tensor, part, later[0:1]]

    alike(kept)


@row("writing to a tensor")
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_tensors_are_writable_and_the_file_stays_as_it_is(one: Path, framework: str):
    before = one.read_bytes()

    def written(m: ModuleType) -> Any:
        with m.safe_open(one, framework) as file:
            tensor = file.get_tensor("z.weight")
            tensor[0] = 7
            return [tensor, file.get_tensor("z.weight")]

    theirs, ours = written(safetensors), written(penstock)
    assert raw(ours[0]) == raw(theirs[0])
    # safetensors' tensors of one handle are views of one mapping; numpy's arrays are copies
    assert (raw(theirs[1]) == raw(theirs[0])) is (framework == "pt")
    assert raw(ours[1]) != raw(ours[0])
    assert one.read_bytes() == before


@row("strides, alignment")
def test_strides_and_alignment(one: Path, tmp_path: Path):
    alike(lambda m: {name: t.stride() for name, t in m.safe_open(one, "pt").get_tensors().items()})
    odd = synth.write_file(tmp_path / "odd", [Tensor("a", "F32", (600, 1000))], align=8, spaces=5)
    alike(lambda m: m.safe_open(odd, "pt").get_tensor("a").data_ptr() % 8)  # where the file has it
    assert penstock.safe_open(odd, "np").get_tensor("a").ctypes.data % 4 == 0
    alike(lambda m: m.safe_open(odd, "pt").get_slice("a")[:, 3:9].shape)
    differ(
        lambda m: m.safe_open(odd, "pt").get_slice("a")[:, 3:9],
        lambda part: part.untyped_storage().nbytes() > part.nbytes,
        lambda part: part.untyped_storage().nbytes() == part.nbytes,
    )


@row("`len`, `iter`, `in`, `[]`, pickling of a handle")
def test_what_a_handle_is_not(one: Path):
    alike(lambda m: len(m.safe_open(one, "pt")), "has no len", error=TypeError)
    alike(lambda m: iter(m.safe_open(one, "pt")), "not iterable", error=TypeError)
    alike(lambda m: "m" in m.safe_open(one, "pt"), error=TypeError)
    alike(lambda m: m.safe_open(one, "pt")["m"], "not subscriptable", error=TypeError)
    alike(lambda m: pickle.dumps(m.safe_open(one, "pt")), "cannot pickle", error=TypeError)
    alike(lambda m: pickle.dumps(m.safe_open(one, "pt").get_slice("m")), "cannot pickle", error=TypeError)
    alike(lambda m: isinstance(hash(m.safe_open(one, "pt")), int))


@row("threads")
def test_one_handle_for_many_threads(one: Path):
    def parts(m: ModuleType) -> list[Any]:
        with m.safe_open(one, "pt") as file, concurrent.futures.ThreadPoolExecutor(4) as pool:
            part = file.get_slice("z.weight")
            return [list(pool.map(lambda i: part[i % 6], range(24))), list(pool.map(file.get_tensor, file.keys() * 4))]

    alike(parts)


@row("`SafetensorError`")
def test_errors(one: Path, tmp_path: Path):
    assert penstock.SafetensorError is safetensors.SafetensorError
    assert penstock.torch.SafetensorError is penstock.numpy.SafetensorError is safetensors.SafetensorError
    public = [value for name, value in vars(penstock).items() if name.endswith("Error")]
    assert len(public) > 20
    assert all(issubclass(error, safetensors.SafetensorError) for error in public)
    of_kind = [value for value in vars(penstock._errors).values() if isinstance(value, type)]
    for error in (e for e in of_kind if issubclass(e, penstock.PenstockError)):
        made = error("why", path="/a/b", range=(0, 8), errno=5)
        again = pickle.loads(pickle.dumps(made))
        assert (type(again), str(again), again.path, again.range, again.errno) == (error, str(made), "/a/b", (0, 8), 5)


TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
DAMAGED: dict[str, bytes | tuple[Any, bytes]] = {
    "nothing": b"",
    "three bytes": b"abc",
    "zeros": b"\0" * 16,
    "a header longer than the file": struct.pack("<Q", 100) + b"{}",
    "a header longer than the limit": struct.pack("<Q", 1 << 40) + b"{}" + b" " * 50,
    "no JSON": (b"{nonsense", b""),
    "an array": (b"[]", b""),
    "no UTF-8": (b'{"\xff\xfe":1}', b""),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4),
    "an unknown dtype": ({"a": {**TENSOR, "dtype": "X9"}}, b"\0" * 4),
    "a negative dimension": ({"a": {**TENSOR, "shape": [-1]}}, b"\0" * 4),
    "a size that is not the shape's": ({"a": {**TENSOR, "shape": [2]}}, b"\0" * 4),
    "a shape that overflows": ({"a": {**TENSOR, "shape": [1 << 40, 1 << 40]}}, b"\0" * 4),
    "offsets the wrong way round": ({"a": {**TENSOR, "data_offsets": [4, 0]}}, b"\0" * 4),
    "a hole": ({"a": {**TENSOR, "data_offsets": [4, 8]}}, b"\0" * 8),
    "an overlap": ({"a": TENSOR, "b": {**TENSOR, "data_offsets": [2, 6]}}, b"\0" * 6),
    "too little data": ({"a": TENSOR}, b"\0" * 2),
    "too much data": ({"a": TENSOR}, b"\0" * 6),
    "half a byte": ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, b"\0" * 2),
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
    "a web page": b"<!DOCTYPE html><html>" + b"x" * 100,
    "something after the header": (b"{}\0\0", b""),
}
ODD: dict[str, tuple[Any, bytes]] = {
    "no tensors": ({}, b""),
    "spaces around the header": (b"  {}   ", b""),
    "unknown keys": ({"a": {**TENSOR, "more": 1}}, b"\0" * 4),
    "metadata that is null": ({"__metadata__": None, "a": TENSOR}, b"\0" * 4),
}


@row("damaged files")
@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file(tmp_path: Path, what: str):
    content = DAMAGED[what]
    path = tmp_path / "damaged.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        of_header(path, *content)
    alike(lambda m: m.safe_open(path, "pt"), error=safetensors.SafetensorError)
    alike(lambda m: m.torch.load_file(path), error=safetensors.SafetensorError)
    alike(lambda m: m.torch.load(path.read_bytes()), error=safetensors.SafetensorError)
    alike(lambda m: m.numpy.load(path.read_bytes()), error=safetensors.SafetensorError)
    assert "damaged.safetensors" in str(outcome(lambda m: m.safe_open(path, "pt"), penstock))


@row("damaged files")
@pytest.mark.parametrize("what", ODD)
def test_an_odd_file(tmp_path: Path, what: str):
    path = of_header(tmp_path / "odd", *ODD[what])
    alike(lambda m: [m.safe_open(path, "pt").get_tensors(), m.safe_open(path, "pt").metadata()])
    alike(lambda m: m.torch.load(path.read_bytes()))


@row("damaged files")
def test_a_name_that_is_there_twice(tmp_path: Path):
    path = of_header(tmp_path / "x", b'{"a":%b,"a":%b}' % ((json.dumps(TENSOR).encode(),) * 2), b"\0" * 4)
    differ(lambda m: m.safe_open(path, "pt"), anything, penstock.HeaderError, "duplicate key `a`")


@row("a file that is replaced while it is open")
def test_a_file_that_is_replaced(one: Path, tmp_path: Path):
    def after(m: ModuleType) -> Any:
        path = tmp_path / f"{m.__name__}.safetensors"
        path.write_bytes(one.read_bytes())
        with m.safe_open(path, "pt") as file:
            kept = file.get_tensor("a.weight")
            path.unlink()
            path.write_bytes(one.read_bytes())
            assert raw(kept) == raw(safetensors.torch.load_file(one)["a.weight"])
            return file.get_tensor("z.weight")

    differ(after, anything, penstock.ChangedError)


# Modules


MODULES = ("torch", "numpy", "flax", "tensorflow", "paddle", "mlx")
#: Public names of safetensors and its modules that penstock has not.
NOT_HERE = {"TensorSpec", "deserialize", "serialize", "serialize_file", "storage_ptr", "storage_size"}


def source(package: str, module: str) -> ast.Module:
    """The source of a module, which need not be possible to import."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.origin is not None
    return ast.parse((Path(found.origin).parent / f"{module}.py").read_text())


def functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}


def parameters(function: ast.FunctionDef) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """(name, default) of the positional parameters, and those of the others."""
    spec = function.args
    defaults = [""] * (len(spec.args) - len(spec.defaults)) + [ast.unparse(d) for d in spec.defaults]
    others = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    return (
        [(a.arg, d) for a, d in zip(spec.args, defaults, strict=True)],
        {a.arg: "" if d is None else ast.unparse(d) for a, d in others},
    )


@row("names and parameters", "names that are not here")
@pytest.mark.parametrize("module", MODULES)
def test_modules_have_the_functions_of_safetensors_with_their_parameters(module: str):
    theirs, ours = functions(source("safetensors", module)), functions(source("penstock", module))
    assert set(theirs) - NOT_HERE == set(ours)
    for name in ours:
        positional, keywords = parameters(theirs[name])
        found, more = parameters(ours[name])
        assert found == positional, name
        assert keywords.items() <= more.items(), name
        assert all(more.values()), name  # whatever else there is has a default


@row("names and parameters", "names that are not here")
def test_every_public_name_is_here_or_in_the_list_of_those_that_are_not():
    public = {name for name in vars(safetensors) if name[0] != "_"}
    public -= {name for name, value in vars(safetensors).items() if isinstance(value, ModuleType)}
    assert public - NOT_HERE == {"SafetensorError", "safe_open"} <= set(penstock.__all__)
    listed = re.findall(r"`(\w+)`", rows()["names that are not here"])
    assert set(listed) >= NOT_HERE


WHOLE = torch.zeros(10, 10)
STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(5), "s": torch.tensor(3), "e": torch.zeros(0, 3)}
LAYOUT = {penstock: {"layout": "compact"}, safetensors: {}}


@row('`torch.load_file(filename, device="cpu", *, backend="mmap")`')
def test_torch_load_file(one: Path, tmp_path: Path):
    alike(lambda m: m.torch.load_file(one))
    alike(lambda m: m.torch.load_file(filename=one, device="cpu", backend="pread"))
    alike(lambda m: m.torch.load_file(str(one), "cpu"))
    alike(lambda m: m.torch.load_file(tmp_path / "none"), "No such file", error=FileNotFoundError)
    alike(lambda m: m.torch.load_file(None), error=TypeError)
    alike(lambda m: m.torch.load_file(one, framework="np"), "unexpected keyword", error=TypeError)
    alike(lambda m: m.torch.load_file(one, backend="smoke"), error=safetensors.SafetensorError)
    alike(lambda m: m.torch.load_file(one, device="nonsense"), error=safetensors.SafetensorError)


@row("`torch.load(data)`")
def test_torch_load(one: Path):
    content = one.read_bytes()
    alike(lambda m: dict(sorted(m.torch.load(content).items())))
    alike(lambda m: dict(sorted(m.torch.load(data=content).items())))
    # safetensors gives the order of its own writer, penstock that of the file
    differ(lambda m: m.torch.load(content), anything, lambda found: list(found) == ["z.weight", "a.weight", "m", "e"])
    for data in (bytearray(content), memoryview(content), "text", None, 3):
        alike(lambda m, data=data: m.torch.load(data), error=TypeError)
    changed = penstock.torch.load(content)["z.weight"]
    changed[0] = 1
    assert one.read_bytes() == content


@row("`torch.save_file(tensors, filename, metadata=None)`")
def test_torch_save_file(tmp_path: Path):
    def saved(m: ModuleType, *args: Any, **more: Any) -> bytes:
        path = tmp_path / "saved.safetensors"
        assert m.torch.save_file(STATE, path, *args, **LAYOUT[m], **more) is None
        return path.read_bytes()

    alike(saved)
    alike(lambda m: saved(m, {"a": "b"}))
    alike(lambda m: saved(m, metadata={"a": "b"}))
    alike(lambda m: m.torch.save_file(tensors=STATE, filename=str(tmp_path / "x"), metadata=None))
    alike(lambda m: m.torch.save_file({}, tmp_path / "x"))
    alike(lambda m: m.torch.save_file(STATE, tmp_path / "x", nonsense=1), "unexpected keyword", error=TypeError)
    for path in (3, None, os.fsencode(tmp_path / "x"), [tmp_path]):
        alike(lambda m, path=path: m.torch.save_file(STATE, path), error=TypeError)
    for path in (tmp_path, tmp_path / "none" / "x", ""):
        alike(lambda m, path=path: m.torch.save_file(STATE, path), error=safetensors.SafetensorError)
    # As it comes the layout is another; what is in the file is the same
    penstock.torch.save_file(STATE, tmp_path / "aligned", {"a": "b"})
    safetensors.torch.save_file(STATE, tmp_path / "theirs", {"a": "b"})
    assert (tmp_path / "aligned").read_bytes() != (tmp_path / "theirs").read_bytes()
    for path in (tmp_path / "aligned", tmp_path / "theirs"):
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == {"a": "b"}
            assert {name: plain(file.get_tensor(name)) for name in file.keys()} == {  # noqa: SIM118
                name: plain(tensor) for name, tensor in STATE.items()
            }


@row("`torch.save(tensors, metadata=None)`")
def test_torch_save():
    for state in ({}, STATE, {"": WHOLE}, {"a\0b": WHOLE}, {"p": torch.nn.Parameter(torch.ones(3))}, {"v": WHOLE[2:4]}):
        alike(lambda m, state=state: m.torch.save(state))
    alike(lambda m: m.torch.save({"a": WHOLE[:2], "b": WHOLE[5:]}))
    alike(lambda m: m.torch.save(tensors=STATE, metadata={"a": "b"}))
    # safetensors: a UnicodeEncodeError, which is a ValueError too
    with pytest.raises(penstock.PenstockError, match="lone surrogate") as caught:
        penstock.torch.save({"\ud800": WHOLE})
    assert isinstance(caught.value, ValueError)


REFUSED: dict[str, tuple[Any, type[Exception]]] = {
    "no dict": ([("a", WHOLE)], ValueError),
    "nothing": (None, ValueError),
    "no tensor": ({"a": [1]}, ValueError),
    "an array": ({"a": np.zeros(3)}, ValueError),
    "a name that is no string": ({3: WHOLE}, TypeError),
    "sparse": ({"a": torch.zeros(4, 4).to_sparse()}, ValueError),
    "transposed": ({"a": torch.zeros(4, 3).T}, ValueError),
    "expanded": ({"a": torch.zeros(1).expand(3)}, ValueError),
    "channels last": ({"a": torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last)}, ValueError),
    "shared": ({"a": WHOLE, "b": WHOLE[2:]}, RuntimeError),
    "twice the same": ({"a": WHOLE, "b": WHOLE}, RuntimeError),
    "on the meta device": ({"a": torch.zeros(2, device="meta")}, NotImplementedError),
    "complex128": ({"a": torch.zeros(2, dtype=torch.complex128)}, KeyError),
}


@row("tensors that `torch.save_file` and `torch.save` refuse")
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_saved(tmp_path: Path, what: str):
    state, error = REFUSED[what]
    alike(lambda m: m.torch.save(state), error=error)
    alike(lambda m: m.torch.save_file(state, tmp_path / "x"), error=error)
    assert list(tmp_path.iterdir()) == []
    if isinstance(state, dict):
        assert str(next(iter(state))) in str(outcome(lambda m: m.torch.save(state), penstock))


@row("tensors that `torch.save_file` and `torch.save` refuse")
def test_what_safetensors_saves_otherwise():
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    plainly = {"a": conjugate.resolve_conj()}
    differ(
        lambda m: m.torch.save({"a": conjugate}),
        lambda found: found != safetensors.torch.save(plainly),
        lambda found: found == safetensors.torch.save(plainly),
    )
    differ(lambda m: m.torch.save({"__metadata__": WHOLE}), anything, penstock.InvalidError, "__metadata__")


@row("`metadata=` that is not strings by name")
def test_metadata_that_is_none():
    for metadata in ({"a": 1}, {1: "a"}, {"a": None}, "x", 3, [("a", "b")]):
        alike(lambda m, metadata=metadata: m.torch.save(STATE, metadata), error=TypeError)
        alike(lambda m, metadata=metadata: m.numpy.save({}, metadata), error=TypeError)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).T)


class Parts(torch.nn.Module):
    """Two parameters that overlap, of which neither is the whole."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.zeros(10)
        self.a, self.b = torch.nn.Parameter(whole[:6]), torch.nn.Parameter(whole[4:])


@row("`torch.save_model(model, filename, metadata=None, force_contiguous=True)`")
def test_torch_save_model(tmp_path: Path):
    model = Tied()

    def saved(m: ModuleType, *args: Any) -> bytes:
        path = tmp_path / "model.safetensors"
        assert m.torch.save_model(model, path, *args, **LAYOUT[m]) is None
        return path.read_bytes()

    alike(saved)
    alike(lambda m: saved(m, {"head.weight": "kept as it is"}))
    alike(lambda m: saved(m, None, True))
    alike(lambda m: saved(m, None, False), "force_contiguous=True", error=ValueError)
    alike(lambda m: m.torch.save_model(Parts(), tmp_path / "x"), error=RuntimeError)
    given: dict[str, str] = {"k": "v"}
    penstock.torch.save_model(model, tmp_path / "x", given)
    assert given == {"k": "v"}  # safetensors adds to it
    safetensors.torch.save_model(model, tmp_path / "x", given)
    assert given == {"k": "v", "head.weight": "embed.weight"}


@row('`torch.load_model(model, filename, strict=True, device="cpu", *, backend="mmap")`')
def test_torch_load_model(tmp_path: Path):
    model = Tied()
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_model(model, path)

    def loaded(m: ModuleType, **more: Any) -> Any:
        other = Tied()
        missing, unexpected = m.torch.load_model(other, path, **more)
        return [sorted(missing), sorted(unexpected), dict(other.state_dict())]

    alike(loaded)
    alike(lambda m: loaded(m, strict=False, device="cpu", backend="pread"))
    alike(lambda m: type(m.torch.load_model(Tied(), path)))
    alike(lambda m: tuple(map(type, m.torch.load_model(Tied(), path))))
    small = torch.nn.Sequential(torch.nn.Linear(2, 2))
    alike(lambda m: [sorted(names) for names in m.torch.load_model(small, path, strict=False)])
    for phrase in ("Sequential", r"Missing key\(s\) in state_dict: .0\.bias., .0\.weight.", r"Unexpected key\(s\)"):
        alike(lambda m: m.torch.load_model(small, path), phrase, error=RuntimeError)
    wrong = torch.nn.Module()
    wrong.turned = torch.nn.Parameter(torch.zeros(2))
    other_shape = Tied()
    other_shape.embed = torch.nn.Embedding(3, 5)
    for model in (small, other_shape, wrong):  # programs parse it
        with pytest.raises(RuntimeError) as theirs:
            safetensors.torch.load_model(model, path)
        with pytest.raises(RuntimeError) as ours:
            penstock.torch.load_model(model, path)
        assert str(ours.value) == str(theirs.value)
        assert "Error(s) in loading state_dict for " in str(theirs.value)
        assert ("size mismatch" in str(theirs.value)) == (model is not small)
    alike(lambda m: m.torch.load_model(wrong, path), "size mismatch for turned", error=RuntimeError)


# numpy


ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5),
    "s": np.array(3.0),
    "e": np.zeros((0, 3)),
}


@row("`numpy.load_file`, `numpy.load`, `numpy.save_file`, `numpy.save`")
def test_numpy(tmp_path: Path):
    alike(lambda m: m.numpy.save(ARRAYS))
    alike(lambda m: m.numpy.save(tensor_dict=ARRAYS, metadata={"a": "b"}))
    content, path = safetensors.numpy.save(ARRAYS), tmp_path / "x.safetensors"
    alike(lambda m: dict(sorted(m.numpy.load(content).items())))

    def saved(m: ModuleType) -> bytes:
        m.numpy.save_file(tensor_dict=ARRAYS, filename=path, metadata={"a": "b"}, **LAYOUT[m])
        return path.read_bytes()

    alike(saved)
    alike(lambda m: m.numpy.load_file(path))
    alike(lambda m: m.numpy.load_file(filename=path, backend="pread"))
    alike(lambda m: m.numpy.load_file(path, "cpu"), error=TypeError)
    for more in ({"a": np.ones(3, bool)}, {"a": np.zeros(2, ">f4")}, {"a": np.zeros(2, np.longlong)}, {}):
        alike(lambda m, more=more: m.numpy.save(more))
    alike(lambda m: m.numpy.save({"a": ARRAYS["a"], "b": ARRAYS["a"]}))  # shared memory is no obstacle


@row("arrays that `numpy.save_file` and `numpy.save` refuse, or save otherwise")
def test_arrays_that_are_not_saved():
    for dtype in (complex, "U3", object, "M8[s]", np.longdouble, [("x", "f4")]):
        alike(lambda m, dtype=dtype: m.numpy.save({"a": np.zeros(2, dtype)}), error=safetensors.SafetensorError)
    for tensors in ({"a": [1, 2]}, {"a": 3}, {"a": torch.zeros(2)}, [("a", ARRAYS["a"])], None):
        alike(lambda m, tensors=tensors: m.numpy.save(tensors), error=AttributeError)
    alike(lambda m: m.numpy.save({3: ARRAYS["a"]}), error=TypeError)
    differ(lambda m: m.numpy.save({"a": np.float32(3)}), AttributeError, anything)
    for view in (ARRAYS["a"].T, ARRAYS["a"][:, ::2], ARRAYS["a"][::-1], np.asfortranarray(ARRAYS["a"])):
        packed = safetensors.numpy.save({"a": np.ascontiguousarray(view)})
        differ(
            lambda m, view=view: m.numpy.save({"a": view}),
            lambda found, packed=packed: found != packed,
            lambda found, packed=packed: found == packed,
        )


# Dtypes


def numbers(dtype: str, shape: tuple[int, ...], path: Path) -> Path:
    return synth.write_file(path, [Tensor("t", dtype, shape)])


def has_ml_dtypes() -> bool:
    return importlib.util.find_spec("ml_dtypes") is not None


@row("dtypes in torch")
@pytest.mark.parametrize("dtype", sorted(BITS))
@pytest.mark.parametrize("shape", [(4,), (2, 4), (), (0,), (0, 4)], ids=str)
def test_every_dtype_in_torch(tmp_path: Path, dtype: str, shape: tuple[int, ...]):
    if BITS[dtype] < 8 and not shape:
        pytest.skip("not whole bytes")
    path = numbers(dtype, shape, tmp_path / "x.safetensors")
    alike(lambda m: m.safe_open(path, "pt").get_tensor("t"))  # of F6 the errors
    alike(lambda m: m.safe_open(path, "pt").get_tensors())
    alike(lambda m: m.safe_open(path, "pt").get_slice("t").get_dtype())
    alike(lambda m: m.torch.load_file(path))
    if dtype != "F4":  # of which safetensors makes no slices
        alike(lambda m: m.safe_open(path, "pt").get_slice("t")[...])
    if dtype.startswith("F6_"):
        with pytest.raises(penstock.UnsupportedError, match=f"tensor t is {dtype}, which torch .* lacks"):
            penstock.safe_open(path, "pt").get_slice("t")[...]
        alike(lambda m: m.torch.load(path.read_bytes()), error=KeyError)
        return
    loaded = penstock.torch.load_file(path)
    assert plain(penstock.torch.load(path.read_bytes())) == plain(loaded)
    alike(lambda m: m.torch.save(loaded))
    assert plain(penstock.torch.load(penstock.torch.save(loaded))) == plain(loaded)
    if dtype in ("F4", "F8_E8M0"):
        differ(lambda m: m.torch.load(path.read_bytes()), KeyError, anything)


@row("dtypes in numpy")
@pytest.mark.parametrize("dtype", sorted(BITS))
@pytest.mark.parametrize("shape", [(4,), (2, 4), (), (0, 4)], ids=str)
def test_every_dtype_in_numpy(tmp_path: Path, dtype: str, shape: tuple[int, ...]):
    if BITS[dtype] < 8 and not shape:
        pytest.skip("not whole bytes")
    path = numbers(dtype, shape, tmp_path / "x.safetensors")
    calls: list[Call] = [
        lambda m: m.safe_open(path, "np").get_tensor("t"),
        lambda m: m.safe_open(path, "np").get_tensors(),
        lambda m: m.numpy.load_file(path),
        lambda m: m.numpy.load(path.read_bytes()),
    ]
    if 0 not in shape:
        calls.append(lambda m: m.safe_open(path, "np").get_slice("t")[...])
    if DTYPES[dtype].numpy is not None:
        for call in calls:
            alike(call)
        loaded = penstock.numpy.load_file(path)
        alike(lambda m: m.numpy.save(loaded))
    elif DTYPES[dtype].ml_dtypes is not None and has_ml_dtypes():
        arrays = [penstock.numpy.load_file(path)["t"], penstock.numpy.load(path.read_bytes())["t"]]
        for array in arrays:
            assert array.dtype.name == DTYPES[dtype].ml_dtypes and array.shape == shape
            assert array.tobytes() == raw(penstock.safe_open(path, "dlpack").get_tensor("t"))
        assert penstock.numpy.load(penstock.numpy.save({"t": arrays[0]}))["t"].dtype == arrays[0].dtype
        alike(lambda m: m.numpy.save({"t": arrays[0]}))
    else:
        for call in calls:  # TypeError, AttributeError, KeyError or SafetensorError, by the call and the dtype
            alike(call, error=Exception)
            assert isinstance(outcome(call, penstock), penstock.UnsupportedError)
            assert f"tensor t is {dtype}, which numpy lacks" in str(outcome(call, penstock))


@row("dtypes in numpy")
def test_what_numpy_lacks_without_ml_dtypes(tmp_path: Path, python: Callable[..., Any]):
    path = numbers("BF16", (4,), tmp_path / "x.safetensors")
    code = """
import sys
sys.modules["ml_dtypes"] = None
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "ml_dtypes" else real(name, *a)
import penstock, safetensors
for module in (safetensors, penstock):
    try:
        module.safe_open(sys.argv[1], "np").get_tensor("t")
    except TypeError as error:
        print(module.__name__, type(error).__name__, error)
"""
    done = python(code, path)
    theirs, ours = done.stdout.splitlines()
    assert theirs.startswith("safetensors TypeError"), done.stderr
    assert ours.startswith("penstock MissingDtypeError") and "the package ml_dtypes adds it" in ours


# The table


def rows() -> dict[str, str]:
    """The rows of the section's tables, by the names in their first cells, with semicolons between them."""
    text = PAGE.read_text().partition(f"\n## {SECTION}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {name: " | ".join(line[1:]) for line in cells if line[0] != "what" for name in line[0].split("; ")}


def test_every_row_of_the_table_is_tested():
    import test_compat_frameworks  # noqa: F401 - it adds its own

    assert set(rows()) == tested
