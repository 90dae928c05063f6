"""`Checkpoint.load_into`: memory that cannot be filled is found out before a byte moves, whatever its layout.

What went wrong here killed the process. So each case runs in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import penstock
import pytest
import torch
from conftest import Oracle, raw
from penstock.synthetic.synth import Tensor

#: Loads "bad" (64 x 64, F32) into a destination that cannot be filled, with "fine" beside it; prints the problems.
PROGRAM = """
import ctypes, json, mmap, sys, warnings
import numpy as np, torch
import penstock
from penstock._errors import MismatchError

warnings.simplefilter("ignore")
NBYTES = 4 * 64 * 64


def mapped(prot, nbytes=NBYTES):
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=prot)


def read_only():
    return torch.from_numpy(np.frombuffer(mapped(mmap.PROT_READ), np.float32).reshape(64, 64))


def half_read_only():
    memory = mapped(mmap.PROT_READ | mmap.PROT_WRITE, 2 * NBYTES)
    array = np.frombuffer(memory, np.float32)
    at = array.__array_interface__["data"][0]
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at + NBYTES), NBYTES, mmap.PROT_READ) == 0
    return torch.from_numpy(array[2048:6144].reshape(64, 64))


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def short(tensor, nbytes=64):
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def unmapped():
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    at = libc.mmap(None, NBYTES, 3, 0x22, -1, 0)
    array = np.frombuffer((ctypes.c_char * NBYTES).from_address(at), np.float32).reshape(64, 64)
    libc.munmap(ctypes.c_void_p(at), NBYTES)
    return array


def truncated(shared):
    with open(sys.argv[2], "w+b") as file:
        file.truncate(NBYTES)
        memory = mmap.mmap(file.fileno(), NBYTES, flags=mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
        file.truncate(4096)
    return np.frombuffer(memory, np.float32).reshape(64, 64)


def sealed():
    array = np.frombuffer(mapped(mmap.PROT_READ), np.float32).reshape(64, 64)
    assert not array.flags.writeable
    return array


def masked():
    return np.ma.masked_array(np.zeros((64, 128), np.float32), mask=True)[:, ::2]


CASES = {
    "read-only": read_only,
    "read-only, transposed": lambda: read_only().t(),
    "read-only, every second column": lambda: torch.from_numpy(
        np.frombuffer(mapped(mmap.PROT_READ, 2 * NBYTES), np.float32).reshape(64, 128)
    )[:, ::2],
    "half of it read-only": half_read_only,
    "half of it read-only, transposed": lambda: half_read_only().t(),
    "read-only numpy": sealed,
    "read-only numpy, transposed": lambda: sealed().T,
    "freed": lambda: freed(torch.zeros(64, 64)),
    "freed, transposed": lambda: freed(torch.zeros(64, 64).t()),
    "freed parameter": lambda: torch.nn.Parameter(freed(torch.zeros(64, 64))),
    "short": lambda: short(torch.zeros(64, 64)),
    "short, transposed": lambda: short(torch.zeros(64, 64).t()),
    "short by one element": lambda: short(torch.zeros(64, 64), NBYTES - 4),
    "short by the elements of a view's end": lambda: short(torch.zeros(64, 128)[:, ::2], 2 * NBYTES - 8),
    "unmapped numpy": unmapped,
    "unmapped numpy, reversed": lambda: unmapped()[::-1, ::-1],
    "unmapped torch, transposed": lambda: torch.from_numpy(unmapped()).t(),
    "a truncated file, shared": lambda: truncated(True),
    "a truncated file, shared, transposed": lambda: truncated(True).T,
    "a truncated file, private": lambda: truncated(False),
    "meta, transposed": lambda: torch.zeros(64, 64, device="meta").t(),
    "expanded": lambda: torch.zeros(64, 1).expand(64, 64),
    "broadcast numpy": lambda: np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (64, 64), (0, 4)),
    "sliding": lambda: torch.zeros(256).as_strided((64, 64), (2, 1)),
    "sparse": lambda: torch.zeros(64, 64).to_sparse(),
    "compressed rows": lambda: torch.zeros(64, 64).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(64, 64), 0.1, 0, torch.qint8),
    "negated": lambda: torch.zeros(64, 64, dtype=torch.complex64).conj().imag,
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(64), torch.zeros(32)]),
    "a parameter without a shape yet": lambda: torch.nn.LazyLinear(64).weight,
    "of a subclass": lambda: torch.zeros(64, 64).as_subclass(type("Mine", (torch.Tensor,), {})),
    "masked": masked,
}

fine = {"before": torch.zeros(64, 64), "between": torch.zeros(64, 64).t(), "last": np.zeros((64, 64), np.float32)}
checkpoint = penstock.open(sys.argv[1])
print(json.dumps(sorted(CASES)))
for name in sys.argv[3:]:
    try:
        checkpoint.load_into({"bad": CASES[name](), **fine})
    except MismatchError as error:
        print(json.dumps([name, error.problems, any(bool(t.any()) for t in fine.values())]), flush=True)
    else:
        print(json.dumps([name, "loaded", None]), flush=True)
"""


@pytest.fixture
def file(write: Callable[..., Path]) -> Path:
    """Four matrices of 64 x 64."""
    return write(*(Tensor(name, "F32", (64, 64)) for name in ("bad", "before", "between", "last")))


#: What the only problem says, by case.
SAID = {
    "read-only": "may not write to",
    "read-only, transposed": "may not write to",
    "read-only, every second column": "may not write to",
    "half of it read-only": "may not write to",
    "half of it read-only, transposed": "may not write to",
    "read-only numpy": "is read-only",
    "read-only numpy, transposed": "is read-only",
    "freed": "has no memory: its storage has 0 bytes",
    "freed, transposed": "has no memory: its storage has 0 bytes",
    "freed parameter": "has no memory: its storage has 0 bytes",
    "short": "storage has 64 bytes",
    "short, transposed": "storage has 64 bytes",
    "short by one element": "storage has 16380 bytes",
    "short by the elements of a view's end": "storage has 32760 bytes",
    "unmapped numpy": "no longer mapped",
    "unmapped numpy, reversed": "no longer mapped",
    "unmapped torch, transposed": "no longer mapped",
    "a truncated file, shared": "the file that it maps has become shorter",
    "a truncated file, shared, transposed": "the file that it maps has become shorter",
    "a truncated file, private": "the file that it maps has become shorter",
    "meta, transposed": "meta",
    "expanded": "is expanded",
    "broadcast numpy": "is broadcast",
    "sliding": "is expanded",
    "sparse": "layout torch.sparse_coo",
    "compressed rows": "layout torch.sparse_csr",
    "quantized": "torch.qint8",
    "negated": "negated",
    "nested": "is nested",
    "a parameter without a shape yet": "UninitializedParameter",
    "of a subclass": "is a Mine",
    "masked": "MaskedArray",
}


def test_every_destination_that_cannot_be_filled_is_a_mismatch_and_no_crash(
    file: Path, tmp_path: Path, torch_python: Callable[..., CompletedProcess[str]]
) -> None:
    left, wrong = list(SAID), {}
    while left:
        done = torch_python(PROGRAM, file, tmp_path / "truncated", *left)
        cases, *lines = done.stdout.splitlines() or [f"{left}"]
        assert sorted(SAID) == json.loads(cases), done.stderr
        for line in lines:
            name, problems, others_written = json.loads(line)
            if len(problems) != 1 or SAID[name] not in problems[0] or others_written:
                wrong[name] = problems, others_written
        ended = [json.loads(line)[0] for line in lines]
        assert ended == left[: len(ended)]
        left = left[len(ended) :]
        if left:
            wrong[left.pop(0)] = f"ended with {done.returncode}: {done.stderr[-300:]}"
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


def test_all_that_is_wrong_with_memory_comes_in_one_error(write: Callable[..., Path]) -> None:
    path = write(*(Tensor(f"t{i}", "F32", (8, 8)) for i in range(6)))
    freed, short = torch.zeros(8, 8).t(), torch.zeros(8, 8)
    freed.untyped_storage().resize_(0)
    short.untyped_storage().resize_(100)
    frozen = np.zeros((8, 8), np.float32).T
    frozen.flags.writeable = False
    shared = torch.zeros(8, 12)
    to = {"t0": freed, "t1": short, "t2": frozen, "t3": shared[:, :8], "t4": shared[:, 4:], "t5": torch.zeros(8, 8)}
    with pytest.raises(penstock.MismatchError) as caught:
        penstock.open(path).load_into(to)
    assert [problem.split()[0] for problem in caught.value.problems] == ["t0", "t1", "t2", "t4"]
    assert caught.value.touched == []
    assert not to["t5"].any() and not shared.any()


def test_empty_destinations_need_no_memory(write: Callable[..., Path]) -> None:
    path = write(Tensor("a", "F32", (0, 8)), Tensor("b", "F32", (4,)))
    empty = torch.zeros(0, 8)
    empty.untyped_storage().resize_(0)
    to = {"a": empty, "b": torch.zeros(4)}
    penstock.open(path).load_into(to)
    assert raw(to["b"]) == Oracle(path)["b"]


@pytest.mark.parametrize("inside", [False, True])
def test_inference_tensors_of_any_layout_are_filled(write: Callable[..., Path], inside: bool) -> None:
    path = write(*(Tensor(name, "F32", (8, 8)) for name in "abc"))
    with torch.inference_mode():
        to = {"a": torch.zeros(8, 8), "b": torch.zeros(8, 8).t()}
    to["c"] = torch.zeros(8, 8).t()
    with torch.inference_mode(inside):
        report = penstock.open(path).load_into(to)
    Oracle(path).same({name: tensor.contiguous() for name, tensor in to.items()})
    assert report.copied_through == []


def test_autograd_is_told_of_strided_parameters_too(write: Callable[..., Path]) -> None:
    path = write(Tensor("a", "F32", (8, 8)))
    weight = torch.nn.Parameter(torch.ones(8, 8).t())
    out = (weight * weight).sum()
    penstock.open(path).load_into({"a": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_tensors_mapped_by_an_earlier_load_are_destinations(write: Callable[..., Path]) -> None:
    names = [f"t{i}" for i in range(4)]
    first = write(*(Tensor(name, "F32", (512, 512)) for name in names), name="first.safetensors")
    path = write(*(Tensor(name, "F32", (512, 512)) for name in reversed(names)))
    to = penstock.open(first).load(options={"copy": False})
    before = Oracle(first)["t0"]
    penstock.open(path).load_into(to)
    for name in names:
        assert raw(to[name]) == Oracle(path)[name]
    assert Oracle(first)["t0"] == before
