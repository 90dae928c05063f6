"""JAX, TensorFlow, Paddle and MLX beside safetensors, each where it is installed: rows of docs/compatibility.md."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import penstock
import pytest
from conftest import Oracle
from penstock._frameworks import need
from penstock.synthetic import synth
from penstock.synthetic.synth import BITS, Tensor
from test_compat_safetensors import LAYOUT, alike, differ, outcome, row

safetensors = pytest.importorskip("safetensors", minversion="0.8")


class Framework(NamedTuple):
    name: str
    module: str
    """Last name of the modules of safetensors and penstock."""
    root: Any

    def of(self, package: ModuleType) -> Any:
        return importlib.import_module(f"{package.__name__}.{self.module}")

    def tensor(self, array: Any) -> Any:
        if self.name == "jax":
            return importlib.import_module("jax.numpy").asarray(array)
        if self.name == "tf":
            return self.root.constant(array)
        return self.root.to_tensor(array) if self.name == "paddle" else self.root.array(array)

    def plain(self, value: Any) -> Any:
        """What is compared of a tensor or of tensors by name: class, dtype, shape and bytes."""
        if isinstance(value, dict):
            return {name: self.plain(tensor) for name, tensor in value.items()}
        return type(value), str(value.dtype), tuple(value.shape), self.raw(value)

    def raw(self, tensor: Any) -> bytes:
        if self.name == "mlx":  # numpy does not take its BF16
            flat = tensor.reshape(-1)
            return np.array(flat.view(self.root.uint8)).tobytes() if flat.size else b""
        return np.asarray(tensor if self.name == "jax" else tensor.numpy()).tobytes()


@pytest.fixture(scope="module", params=["jax", "tf", "paddle", "mlx"])
def framework(request: pytest.FixtureRequest) -> Framework:
    imported, module = {
        "jax": ("jax", "flax"),
        "tf": ("tensorflow", "tensorflow"),
        "paddle": ("paddle", "paddle"),
        "mlx": ("mlx.core", "mlx"),
    }[request.param]
    return Framework(request.param, module, pytest.importorskip(imported))


@pytest.fixture
def few(write: Callable[..., Path]) -> Path:
    """Tensors that every framework has."""
    return write(
        Tensor("z.weight", "F32", (6, 8)),
        Tensor("half", "F16", (3, 5)),
        Tensor("m", "I32", ()),
        Tensor("flags", "BOOL", (7,)),
        metadata={"k": "v"},
    )


MODULES_ROW = "`flax`, `tensorflow`, `paddle`, `mlx`: `load_file`, `load`, `save_file`, `save`"


@row(MODULES_ROW)
def test_loading(framework: Framework, few: Path):
    alike(lambda m: framework.plain(framework.of(m).load_file(few)))
    backend = "mmap" if framework.name == "paddle" else "pread"  # which safetensors has not for Paddle
    alike(lambda m: framework.plain(framework.of(m).load_file(filename=str(few), backend=backend)))
    alike(lambda m: framework.plain(dict(sorted(framework.of(m).load(few.read_bytes()).items()))))
    alike(lambda m: framework.of(m).load_file(few.parent / "none"), "No such file", error=FileNotFoundError)
    alike(lambda m: framework.of(m).load(few.read_bytes()[:-1]), error=safetensors.SafetensorError)
    alike(lambda m: framework.plain(m.safe_open(few, framework.name).get_tensors()))
    for name in ("z.weight", "m"):
        alike(lambda m, name=name: framework.plain(m.safe_open(few, framework.name).get_tensor(name)))
    alike(lambda m: m.safe_open(few, framework.name).get_tensor("nope"), "File does not contain tensor nope")
    alike(lambda m: m.safe_open(few, framework.name).get_slice("half").get_shape())
    alike(lambda m: m.safe_open(few, framework.name, device="nonsense"), error=safetensors.SafetensorError)


@row(MODULES_ROW)
def test_saving(framework: Framework, tmp_path: Path):
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5, dtype=np.int32),
        "h": np.ones((3, 1), np.float16),
    }
    if framework.name != "tf":  # whose scalars safetensors does not save
        arrays["s"] = np.array(3.0, np.float32)
    state = {name: framework.tensor(array) for name, array in arrays.items()}
    path = tmp_path / "saved.safetensors"

    def saved(m: ModuleType) -> list[bytes]:
        framework.of(m).save_file(dict(state), path, {"k": "v"}, **LAYOUT[m])
        return [path.read_bytes(), framework.of(m).save(dict(state)), framework.of(m).save(dict(state), {"k": "v"})]

    alike(saved)
    framework.of(penstock).save_file(state, path)
    assert framework.plain(framework.of(safetensors).load_file(path)) == framework.plain(state)
    assert all(isinstance(tensor, type(framework.tensor(arrays[name]))) for name, tensor in state.items())
    for wrong in ([("a", 1)], None, {"a": 3}):
        with pytest.raises(penstock.InvalidError):
            framework.of(penstock).save(wrong)
    alike(lambda m: framework.of(m).save({3: state["a"]}), error=TypeError)


@row("`flax.save_file`, `flax.save`")
def test_jax_leaves_the_dictionary_as_it_is(tmp_path: Path):
    jax = pytest.importorskip("jax")
    for m, changed in ((safetensors, True), (penstock, False)):
        state = {"a": jax.numpy.zeros(3)}
        importlib.import_module(f"{m.__name__}.flax").save_file(state, tmp_path / "x")
        assert isinstance(state["a"], np.ndarray) is changed
    differ(
        lambda m: importlib.import_module(f"{m.__name__}.flax").save({"a": [1.0, 2.0]}),
        bool,
        penstock.InvalidError,
        "a is a list",
    )


@pytest.mark.pairwise
@row("dtypes in JAX", "dtypes in TensorFlow, Paddle, MLX")
@pytest.mark.parametrize("dtype", sorted(BITS))
@pytest.mark.parametrize("shape", [(2, 4), (), (0, 4)], ids=str)
def test_every_dtype(framework: Framework, tmp_path: Path, dtype: str, shape: tuple[int, ...]):
    if BITS[dtype] < 8 and not shape:
        pytest.skip("not whole bytes")
    path = synth.write_file(tmp_path / "x.safetensors", [Tensor("t", dtype, shape)])
    calls: list[Callable[[ModuleType], Any]] = [
        lambda m: framework.plain(m.safe_open(path, framework.name).get_tensor("t")),
        lambda m: framework.plain(framework.of(m).load_file(path)["t"]),
        lambda m: framework.plain(framework.of(m).load(path.read_bytes())["t"]),
    ]
    for call in calls:
        theirs, ours = outcome(call, safetensors), outcome(call, penstock)
        if not isinstance(ours, Exception):
            # The bytes of the file, or what the framework itself makes of 64 bits where it has 32
            halved = (framework.name == "jax" and BITS[dtype] == 64) or (framework.name, dtype) == ("mlx", "F64")
            assert halved is (ours[3] != Oracle(path)["t"]) or not ours[3] or dtype == "C64"
            assert ours[2] == shape
            if not isinstance(theirs, Exception):
                assert ours == theirs
            continue
        if (framework.name, dtype) == ("paddle", "U16") and not isinstance(theirs, Exception):
            assert theirs[1] == "paddle.bfloat16"  # of 16-bit whole numbers
            continue
        assert isinstance(theirs, Exception), (theirs, ours)
        assert isinstance(ours, penstock.UnsupportedError) and "tensor t is" in str(ours)
        # Of empty tensors safetensors asks Paddle for views that it does not make
        own = framework.name == "paddle" and 0 in shape and isinstance(theirs, (ValueError, AssertionError))
        assert isinstance(ours, type(theirs)) or own, (theirs, ours)
    try:
        tensor = framework.of(penstock).load_file(path)["t"]
    except penstock.UnsupportedError:
        assert need(framework.name).takes(dtype) is not None
        return
    again = framework.of(penstock).load(framework.of(penstock).save({"t": tensor}))["t"]
    assert framework.plain(again) == framework.plain(tensor)
    with penstock.safe_open(path, framework.name) as file:
        assert framework.plain(file.get_slice("t")[...]) == framework.plain(tensor)
        if shape == (2, 4):
            part = file.get_slice("t")[:, 1:3]
            elements = np.frombuffer(framework.raw(tensor), f"V{len(framework.raw(tensor)) // 8}").reshape(shape)
            assert framework.raw(part) == elements[:, 1:3].tobytes() and tuple(part.shape) == (2, 2)
        with file.prefetch() as loader:
            assert framework.plain(loader.take("t")) == framework.plain(tensor)
        assert [framework.plain(found) for _, found in file.tensors()] == [framework.plain(tensor)]


@row('`slice[index]`, numpy and others, or `backend="pread"`')
def test_indices(framework: Framework, few: Path):
    def of(index: Any) -> Callable[[ModuleType], Any]:
        return lambda m: framework.plain(m.safe_open(few, framework.name).get_slice("z.weight")[index])

    for index in (..., (), slice(None), slice(1, 3), 0, -1, (1, 2), (slice(None), 3), (slice(None), slice(2, 4))):
        alike(of(index))
    for index in (slice(None, None, 2), (slice(None), slice(1, 8, 3)), (..., 1), (1, ...)):
        alike(of(index))
    if framework.name == "paddle":  # safetensors has Paddle index its tensors
        for index in (6, -7, (0, 8)):
            alike(of(index), error=IndexError)
        return
    for index in (6, -7, (0, 8), (0, 0, 0), slice(None, None, 0), "x", 1.5):
        alike(of(index), error=safetensors.SafetensorError)
    whole = penstock.safe_open(few, "np").get_tensor("z.weight")
    for index in (slice(-2, None), slice(0, 100), slice(4, 2), None, [0, 2], [True, False] * 3, slice(None, None, -1)):
        expected = framework.plain(framework.tensor(np.ascontiguousarray(whole[index])))
        differ(of(index), Exception, lambda found, expected=expected: found == expected)


@row("lifetime")
def test_tensors_have_memory_of_their_own(framework: Framework, few: Path, python: Callable[..., Any]):
    """A mapping of a file that is truncated ends the process that reads it."""
    code = """
import os, sys, numpy, penstock
tensors = penstock.safe_open(sys.argv[1], sys.argv[2]).get_tensors()
os.truncate(sys.argv[1], 0)
print(float(sum(numpy.asarray(tensors["z.weight"]).astype("f8").ravel() != 0)))
"""
    done = python(code, few, framework.name)
    assert done.returncode == 0 and float(done.stdout.split()[-1]) > 0, done.stderr
