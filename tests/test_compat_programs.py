"""Random files and random programs of calls, run on safetensors and on penstock side by side.

After each call the values are compared (of tensors class, dtype, shape and bytes), or the errors: whatever `except`
clause catches safetensors' has to catch penstock's. Where safetensors indexes by itself (numpy and the like, and
`backend="pread"`), it has fewer kinds of indices than the framework; what penstock then gives is compared with numpy.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import penstock
import pytest
import torch
from conftest import raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from penstock._dtypes import DTYPES
from penstock.synthetic import synth
from penstock.synthetic.synth import BITS, Tensor

safetensors = pytest.importorskip("safetensors", minversion="0.8")

FRAMEWORKS = {"pt": "torch", "np": "numpy", "jax": "jax"}

Step = tuple[str, Any, Any]


@st.composite
def files(draw: st.DrawFn) -> tuple[list[Tensor], dict[str, str] | None, int]:
    """Tensors in file order, metadata, and what the data is misaligned by."""
    tensors = []
    names = st.text(max_size=6).filter(lambda name: name != "__metadata__")
    for name in draw(st.lists(names, unique=True, max_size=7)):
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        if BITS[dtype] < 8:
            shape = [*shape, 8]  # whole bytes
        tensors.append(Tensor(name, dtype, tuple(shape)))
    metadata = draw(st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
    return tensors, metadata, draw(st.sampled_from([0, 0, 3]))


def parts(size: int) -> st.SearchStrategy[Any]:
    bound = st.none() | st.integers(-size - 1, size + 1)
    return st.one_of(
        st.builds(slice, bound, bound, st.none() | st.integers(1, 3)),
        st.builds(slice, st.none() | st.integers(0, size), st.none() | st.integers(0, size)),
        st.integers(-size - 1, size),
        st.integers(0, max(0, size - 1)),
        st.just(Ellipsis),
        st.none(),
        st.lists(st.integers(-size, size - 1), min_size=1, max_size=3) if size else st.just([0]),
        st.lists(st.booleans(), min_size=size, max_size=size),
        st.just("x"),
        st.just(1.5),
    )


@st.composite
def programs(draw: st.DrawFn, tensors: list[Tensor]) -> list[Step]:
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    name = st.sampled_from([*shapes, *shapes, *shapes, "no such name", "", None, 3, b"a"])
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 12))):
        what = draw(st.sampled_from(["list", "get", "get", "slice", "slice", "index", "index", "index", "end", "open"]))
        if what == "list":
            call = draw(st.sampled_from(["keys", "offset_keys", "metadata", "get_tensors", "__enter__"]))
            steps.append(("call", call, ()))
        elif what == "get":
            steps.append(("call", draw(st.sampled_from(["get_tensor", "get_slice"])), (draw(name),)))
        elif what == "slice":
            steps.append(("ask", draw(st.sampled_from(["get_shape", "get_dtype"])), draw(name)))
        elif what == "index":
            wanted = draw(name)
            shape = shapes.get(wanted, ()) if isinstance(wanted, str) else ()
            index = [draw(parts((*shape, 3)[i])) for i in range(draw(st.integers(0, len(shape) + 1)) % 4)][
                : len(shape) + 1
            ]
            steps.append(("index", index[0] if len(index) == 1 and draw(st.booleans()) else tuple(index), wanted))
        elif what == "end":
            steps.append(("call", "__exit__", (None, None, None)))
        else:
            steps.append(("open", draw(st.sampled_from(["mmap", "mmap", "pread", "smoke"])), None))
    return steps


class Machine:
    """Runs a program's steps on one package."""

    def __init__(self, package: ModuleType, path: Path, framework: str) -> None:
        self.package, self.path, self.framework = package, path, framework
        self.slices: dict[Any, Any] = {}
        self.handle: Any = package.safe_open(path, framework)

    def run(self, step: Step) -> Any:
        kind, what, more = step
        try:
            if kind == "open":
                self.handle = self.package.safe_open(self.path, self.framework, backend=what)
                self.slices = {}
                return "opened"
            if kind == "call":
                found = getattr(self.handle, what)(*more)
                if what == "get_slice":
                    self.slices[more[0]] = found
                    return "a slice"
                return "itself" if found is self.handle else found
            # A slice that was made before the file was closed is asked after it too
            part = self.slices.get(more) or self.handle.get_slice(more)
            self.slices[more] = part
            return getattr(part, what)() if kind == "ask" else part[what]
        except Exception as error:
            return error.with_traceback(None)  # whose frames would keep this file open until the garbage collector runs
        except BaseException as error:
            if self.package is penstock or kind != "index" or str(error) != "capacity overflow":
                raise
            # safetensors asks for a negative number of bytes (a slice that ends before it begins) in one of two ways
            return SystemError(str(error))


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        packed = value.clone(memory_format=torch.contiguous_format)
        return "torch", value.dtype, tuple(value.shape), raw(packed)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if hasattr(value, "dtype"):  # numpy, jax
        return type(value), str(value.dtype), value.shape, np.asarray(value).tobytes()
    return value


def as_numpy(path: Path, framework: str, name: Any, index: Any) -> Any:
    """What numpy, or torch, makes of the index on the whole tensor."""
    with penstock.safe_open(path, "pt" if framework == "pt" else "np") as file:
        whole = file.get_tensor(name)
    if framework != "pt":
        return np.asarray(whole[index])
    # torch indexes pairs of F4 as the bytes that they are
    return whole.view(torch.uint8)[index].view(whole.dtype) if whole.element_size() == 1 else whole[index]


def compare(theirs: Any, ours: Any, step: Step, path: Path, framework: str, own: bool, dtypes: dict[Any, str]) -> None:
    """``own``: whether safetensors indexes by itself."""
    if framework == "pt" and step[0] == "index" and dtypes.get(step[2]) == "F4":  # safetensors makes no slices of it
        if isinstance(ours, Exception):
            assert isinstance(ours, penstock.PenstockError), (step, ours)
        else:
            assert plain(ours) == plain(as_numpy(path, framework, step[2], step[1])), step
        return
    if not isinstance(theirs, Exception):
        assert plain(ours) == plain(theirs), (step, ours)
        if isinstance(ours, torch.Tensor):
            assert ours.is_contiguous() and (step[0] == "index" or ours.stride() == theirs.stride())
        return
    if not isinstance(ours, Exception):
        # penstock can more: dtypes, and indices that safetensors has none of
        kind, what, name = step
        assert kind == "index" or (kind, what) in (("call", "get_tensor"), ("call", "get_tensors")), (step, theirs)
        if kind == "index" and own:
            expected = as_numpy(path, framework, name, what)
            if framework == "jax":
                import jax.numpy as jnp

                expected = jnp.array(expected)
            assert plain(ours) == plain(expected), (step, theirs)
            return
        wanted = dtypes.values() if what == "get_tensors" else [dtypes[name if kind == "index" else name[0]]]
        lacking = [d for d in wanted if DTYPES[d].numpy is None and not (framework == "pt" and d != "F4")]
        assert lacking, (step, theirs)
        return
    accidents = (OverflowError, SystemError)  # of safetensors' own indexing
    assert isinstance(ours, type(theirs)) or (own and isinstance(theirs, accidents)), (step, theirs, ours)
    assert isinstance(ours, (penstock.PenstockError, type(theirs)))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_programs(tmp_path: Path, framework: str):
    if importlib.util.find_spec(FRAMEWORKS[framework]) is None:
        pytest.skip(f"{FRAMEWORKS[framework]} is not installed")
    count = 0

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(data=st.data())
    def program(data: st.DataObject) -> None:
        nonlocal count
        count += 1
        tensors, metadata, spaces = data.draw(files())
        path = synth.write_file(tmp_path / f"{count}.safetensors", tensors, align=8, spaces=spaces, metadata=metadata)
        dtypes = {tensor.name: tensor.dtype for tensor in tensors}
        theirs, ours = (Machine(m, path, framework) for m in (safetensors, penstock))
        own = framework != "pt"
        for step in data.draw(programs(tensors)):
            a, b = theirs.run(step), ours.run(step)
            if step[0] == "open" and not isinstance(a, Exception):
                own = framework != "pt" or step[1] == "pread"
            if step[1] in ("offset_keys", "get_tensors") and not isinstance(a, Exception):
                # Of several tensors at one offset safetensors knows no order: all but one are empty
                filled = [tensor.name for tensor in tensors if tensor.nbytes]
                assert [name for name in a if name in filled] == filled == [name for name in b if name in filled]
                a, b = (sorted(found) if isinstance(found, list) else found for found in (a, b))
            compare(a, b, step, path, framework, own, dtypes)
        path.unlink()

    program()
