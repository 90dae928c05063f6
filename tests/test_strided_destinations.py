"""`load_into` tensors and arrays that are not contiguous: slices, steps, transposed and permuted dimensions.

What has to be in them is what numpy itself assigns to a view of the same kind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import numpy as np
import penstock
import pytest
import torch
from conftest import Oracle, raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from penstock import _core
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor

TORCH = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
    "C64": torch.complex64,
}
NUMPY = {"U8": np.uint8, "U16": np.uint16, "F32": np.float32, "I64": np.int64, "C64": np.complex64}


class Lie(NamedTuple):
    """How a view lies in its memory, by dimension of the view."""

    order: list[int]
    """The dimensions in the order of memory, outermost first."""
    more: list[int]
    """Elements that the memory has more."""
    steps: list[int]
    """The steps that it is sliced with."""

    def of(self, array: Any, shape: tuple[int, ...]) -> Any:
        """The view of that shape in `array`, which has all elements of the memory in a row."""
        array = array.reshape([shape[d] * self.steps[d] + self.more[d] for d in self.order])
        back = [self.order.index(d) for d in range(len(shape))]
        turned = array.permute(back) if isinstance(array, torch.Tensor) else array.transpose(back)
        cuts = zip(self.more, shape, self.steps, strict=True)
        return turned[tuple(slice(first, first + n * step, step) for first, n, step in cuts)]

    def elements(self, shape: tuple[int, ...]) -> int:
        """Elements of the memory."""
        return math.prod(n * step + more for n, step, more in zip(shape, self.steps, self.more, strict=True))


@st.composite
def lies(draw: st.DrawFn, rank: int) -> Lie:
    order = list(draw(st.permutations(range(rank))))
    more = [draw(st.sampled_from([0, 0, 0, 1, 5])) for _ in order]
    return Lie(order, more, [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in order])


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[slice, ...]:
    found = []
    for n in shape:
        start = draw(st.integers(0, n - 1))
        part = slice(start, draw(st.integers(start + 1, n)), draw(st.integers(1, 3)))
        found.append(draw(st.sampled_from([slice(None), part])))
    return tuple(found)


small = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple)
SHAPES = small | st.tuples(st.integers(1, 300), st.integers(1, 90))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_view_of_any_kind_gets_its_bytes_and_nothing_else_is_touched(tmp_path: Path, data: st.DataObject) -> None:
    of_torch = data.draw(st.booleans())
    kinds: dict[str, Any] = TORCH if of_torch else NUMPY
    names = [f"t{i}" for i in range(data.draw(st.integers(1, 4)))]
    tensors = [Tensor(name, data.draw(st.sampled_from(sorted(kinds))), data.draw(SHAPES)) for name in names]
    # The header's length, and so the alignment of the data, is any
    spaces = " " * data.draw(st.integers(0, 8))
    path = synth.write_file(tmp_path / "model.safetensors", tensors, metadata={"": spaces})
    oracle = Oracle(path)
    to, slices, memory = {}, {}, {}
    for name, dtype, shape in ((t.name, t.dtype, tuple(t.shape)) for t in tensors):
        size = len(oracle[name]) // math.prod(shape)
        slices[name] = data.draw(cuts(shape))
        source = np.frombuffer(oracle[name], f"V{size}").reshape(shape)[slices[name]]
        lie = data.draw(lies(len(shape)))
        there, expected = (np.full(lie.elements(source.shape) * size, 0xEE, np.uint8) for _ in range(2))
        lie.of(expected.view(f"V{size}"), source.shape)[...] = source
        typed = torch.from_numpy(there).view(kinds[dtype]) if of_torch else there.view(kinds[dtype])
        to[name] = lie.of(typed, source.shape)
        memory[name] = there, expected
    extent, gap = data.draw(st.sampled_from([4096, 8192, 1 << 22])), data.draw(st.sampled_from([0, 16384]))
    report = penstock.open(path).load_into(to, slices=slices, options={"extent": extent, "gap": gap})
    assert report.copied_through == []
    for name, (there, expected) in memory.items():
        assert there.tobytes() == expected.tobytes(), (name, slices[name])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(1, 8).expand(8, 8),
        lambda: torch.zeros(8).as_strided((8, 8), (0, 1)),
        lambda: torch.zeros(64).as_strided((8, 8), (4, 1)),
        lambda: np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (8, 8), (16, 4)),
    ],
    ids=["expanded", "of step 0", "sliding", "sliding array"],
)
def test_elements_that_share_memory_are_refused(write: Callable[..., Path], make: Callable[[], Any]) -> None:
    with pytest.raises(penstock.MismatchError, match=r"share memory|same memory"):
        penstock.open(write(Tensor("a", "F32", (8, 8)))).load_into({"a": make()})


def test_elements_of_half_a_byte_are_filled_in_pairs(write: Callable[..., Path]) -> None:
    path = write(Tensor("a", "F4", (16, 32)))
    to = torch.zeros(16, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).t()
    report = penstock.open(path).load_into({"a": to})
    assert raw(to.view(torch.uint8).contiguous()) == Oracle(path)["a"]
    assert report.copied_through == []


def test_tensors_of_every_layout_are_filled_in_one_load(write: Callable[..., Path]) -> None:
    """Contiguous and strided ones, torch's and numpy's, beside arrays with negative steps."""
    path = write(*(Tensor(name, "F32", (64, 64)) for name in "abcd"))
    to = {
        "a": torch.zeros(64, 64),
        "b": torch.zeros(64, 64).t(),
        "c": np.zeros((64, 128), np.float32)[:, ::2],
        "d": np.zeros((64, 64), np.float32)[::-1],
    }
    report = penstock.open(path).load_into(to)
    for name, value in to.items():
        assert raw(np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value) == Oracle(path)[name]
    assert (report.nbytes, report.copied_through) == (4 * 64 * 64 * 4, ["d"])


#: Loads a matrix in parts into destinations of its own. Prints whether they are right, the report and the peak memory.
PROGRAM = """
import json, os, re, sys
import penstock, torch
from penstock import _core

parts, turned = json.loads(sys.argv[2]), sys.argv[3] == "turned"
checkpoint = penstock.open(sys.argv[1])
source = checkpoint.load(options={"copy": True})["a"]
# As integers: a NaN is not equal to itself
size = source.element_size()
source = source.view({2: torch.int16, 4: torch.int32}[size])
views, rests = [], []
for number, ((top, bottom), (left, right)) in enumerate(parts):
    rows, columns = bottom - top, right - left
    # The left half of the first matrix, the right half of the second, and so on
    whole = torch.full((columns, 2 * rows) if turned else (rows, 2 * columns), -1, dtype=source.dtype)
    halves = whole.chunk(2, dim=1)
    views.append(halves[number % 2].t() if turned else halves[number % 2])
    rests.append(halves[1 - number % 2])

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

into = [(v.data_ptr(), sum((n - 1) * s for n, s in zip(v.shape, v.stride())) * size + size) for v in views]
strides = [(i, [(n, s * size) for n, s in zip(v.shape, v.stride())]) for i, v in enumerate(views)]
regions = [[(start, stop, 1) for start, stop in part] for part in parts]
counted = os.access("/proc/self/clear_refs", os.W_OK)
if counted:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM begins anew
before = status("VmRSS")
options = _core.Options(staging=32 << 20, cache="keep")
load = _core.Load.start(
    checkpoint._core, options, wants=[0] * len(parts), regions=regions, into=into, strides=strides, keep=views
)
load.wait()
peak = status("VmHWM") - before if counted else None
report = load.report()
load.close()
right = all(view.equal(source[a:b, c:d]) for view, ((a, b), (c, d)) in zip(views, parts))
untouched = all(bool((rest == -1).all()) for rest in rests)
print(json.dumps([right and untouched, report, peak], default=str))
"""


@pytest.mark.sampled
@pytest.mark.parametrize("turned", ["straight", "turned"])
@pytest.mark.parametrize("parts", ["halves", "128 pieces"])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_a_matrix_in_parts_is_one_load_with_exact_reads_and_no_temporary(
    write: Callable[..., Path], torch_python: Callable[..., CompletedProcess[str]], dtype: str, parts: str, turned: str
) -> None:
    rows, columns = 4096, 8192
    path = write(Tensor("a", dtype, (rows, columns)))
    regions = [[(0, rows), (0, columns // 2)], [(0, rows), (columns // 2, columns)]]
    if parts == "128 pieces":
        regions = [[(at, at + 32), (0, columns)] for at in range(0, rows, 32)]
    done = torch_python(PROGRAM, path, json.dumps(regions), turned)
    assert done.returncode == 0, done.stderr
    right, report, peak = json.loads(done.stdout)
    assert right
    assert sum(route["bytes"] for route in report["routes"].values()) == path.stat().st_size - data_start(path)
    assert (report["gap_bytes"], report["slack_bytes"]) == (0, 0)
    if peak is None:
        pytest.skip("all but the memory was compared: this system lets nobody begin its peak anew")
    # Beyond the slabs: threads, the plan, and what the kernel's counters are late by
    assert peak <= report["peak_staging"] + (8 << 20) <= (40 << 20)


def data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_a_transposed_matrix_is_one_load_with_exact_reads(write: Callable[..., Path]) -> None:
    path = write(Tensor("a", "BF16", (4096, 8192)))
    to = torch.zeros(8192, 4096, dtype=torch.bfloat16).t()
    report = penstock.open(path).load_into({"a": to}, options={"cache": "keep"})
    assert raw(to) == Oracle(path)["a"]
    assert report.copied_through == []
    assert sum(route["bytes"] for route in report.routes.values()) == 2 * 4096 * 8192
    assert (report.gap_bytes, report.slack_bytes) == (0, 0)


def test_the_core_refuses_strides_that_do_not_fit(write: Callable[..., Path]) -> None:
    checkpoint = penstock.open(write(Tensor("a", "F32", (8, 8))))
    memory = np.zeros(4096, np.uint8)
    address = memory.__array_interface__["data"][0]

    def fill(nbytes: int, dims: list[tuple[int, int]] | None, want: int = 0) -> None:
        load = _core.Load.start(
            checkpoint._core,
            _core.Options(),
            wants=[0],
            into=[(address, nbytes)],
            strides=None if dims is None else [(want, dims)],
            keep=memory,
        )
        try:
            load.wait()
        finally:
            load.close()

    fill(256, [(8, 4), (8, 32)])
    assert memory[:256].any()
    memory[:] = 0
    for nbytes, dims, error in [
        (255, [(8, 4), (8, 32)], penstock.InvalidError),
        (4096, [(8, 0), (8, 4)], penstock.InvalidError),
        (4096, [(8, 28), (8, 4)], penstock.InvalidError),
        (256, [(8, 32)], penstock.MismatchError),
        (256, [(9, 32), (8, 4)], penstock.MismatchError),
        (255, None, penstock.MismatchError),
    ]:
        with pytest.raises(error, match=r"model\.safetensors"):
            fill(nbytes, dims)
    with pytest.raises(IndexError):
        fill(256, [(8, 32), (8, 4)], want=1)
    with pytest.raises(OverflowError):
        fill(256, [(8, -32), (8, 4)])
    assert not memory.any()


def test_dimensions_of_a_destination_are_its_own(write: Callable[..., Path]) -> None:
    """One of the tensor's divided into two that change places, and all of them joined."""
    path = write(Tensor("a", "F32", (6, 40)), Tensor("b", "F32", (6, 40)))
    source = np.frombuffer(Oracle(path)["a"], np.float32).reshape(6, 4, 10)
    divided, joined = np.zeros((4, 6, 10), np.float32), np.zeros((240, 3), np.float32)
    load = _core.Load.start(
        penstock.open(path)._core,
        _core.Options(),
        wants=[0, 1],
        into=[(divided.ctypes.data, divided.nbytes), (joined.ctypes.data, joined.nbytes - 8)],
        strides=[(0, [(6, 40), (4, 240), (10, 4)]), (1, [(240, 12)])],
        keep=(divided, joined),
    )
    load.wait()
    load.close()
    assert divided.tobytes() == source.transpose(1, 0, 2).tobytes()
    assert joined[:, 0].tobytes() == Oracle(path)["b"]
    assert not joined[:, 1:].any()
