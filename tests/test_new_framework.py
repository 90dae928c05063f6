"""A framework is one file, and one line that names it: a made-up one loads, streams, slices, casts and saves."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import penstock
import pytest
from conftest import Oracle
from penstock import _frameworks, _save

#: The file: what `penstock/mlx.py` is for MLX. Its tensors are lists of numbers with a dtype and a shape.
FILE = """
import numpy
from penstock._via_numpy import ViaNumpy

class Tensor:
    def __init__(self, array):
        if array.dtype.kind == "c":
            raise TypeError("no complex numbers")
        self.dtype, self.shape, self.numbers = array.dtype, array.shape, array.ravel().tolist()

    def array(self):
        return numpy.array(self.numbers, self.dtype).reshape(self.shape)

FRAMEWORK = ViaNumpy("made_up", None, Tensor, Tensor.array)
"""


@pytest.fixture
def tensor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of the made-up framework's tensors."""
    module = ModuleType("penstock.made_up")
    exec(FILE, vars(module))
    monkeypatch.setitem(sys.modules, "penstock.made_up", module)
    known: Any = {"made_up": _frameworks._Known("made_up", "made-up", False, ("made-up",))}
    monkeypatch.setattr(_frameworks, "_KNOWN", _frameworks._KNOWN | known)
    names = {"made_up": "made_up", "made-up": "made_up"}
    monkeypatch.setattr(_frameworks, "FRAMEWORKS", _frameworks.FRAMEWORKS | names)
    return module.Tensor


@pytest.mark.parametrize("name", ["made_up", "made-up"])
def test_it_loads_and_saves_in_every_way(tensor: Any, name: Any, small: Path) -> None:
    file = sorted(small.glob("*.safetensors"))[0]
    infos = penstock.open(file).items()
    known = {key: info for key, info in infos if info.dtype in ("F32", "I64") and info.shape}
    assert known

    def right(found: dict[str, Any], cut: Any = ...) -> None:
        assert found.keys() == known.keys()
        for key, made in found.items():
            assert type(made) is tensor
            whole = np.frombuffer(Oracle(file)[key], made.dtype).reshape(known[key].shape)
            assert np.array_equal(made.array(), whole[cut], equal_nan=True), key

    checkpoint, names = penstock.open(file), list(known)
    right(checkpoint.load(framework=name, names=names))
    right(dict(checkpoint.stream(framework=name, names=names)))
    right(checkpoint.start(framework=name, names=names).result())
    cast = checkpoint.load(framework=name, names=names, dtype="float64")
    assert {made.dtype for made in cast.values()} <= {np.dtype("f8"), np.dtype("i8")}
    with penstock.safe_open(file, name) as opened:
        right({key: opened.get_tensor(key) for key in names})
        right({key: opened.get_slice(key)[::2] for key in names}, np.s_[::2])
        with opened.prefetch(dict.fromkeys(names)) as loader:
            right(dict(loader))
    made = _frameworks.need(name.replace("-", "_"))
    content = _save.to_bytes(made.arrays_of(checkpoint.load(framework=name, names=names)), None, layout="compact")
    right(made.of_bytes(content))


def test_what_it_lacks_is_refused_before_a_byte_moves(tensor: Any, write: Any) -> None:
    from penstock.synthetic.synth import Tensor

    path = write(Tensor("c", "C64", (2,)))
    with pytest.raises(
        penstock.UnsupportedError, match=r"tensor c is C64, which framework='made_up' lacks \(no complex"
    ):
        penstock.open(path).load(framework="made_up")
    with pytest.raises(penstock.UnsupportedError, match="framework='made_up' loads to the CPU only"):
        penstock.open(path).load("cuda:0", framework="made_up")
