"""Parameters that an engine copies into for the first time have huge pages, where the system gives them to who asks."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import penstock
import pytest
import torch
from penstock import _core
from penstock._options import make_options
from penstock.integrations._engine import Chosen, Loads
from penstock.integrations._first_touch import LEAST, places, touching
from penstock.integrations._mapped import NotMapped
from penstock.synthetic.synth import Tensor

Write = Callable[..., Path]
HUGE = 2 << 20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LARGE = SETTING.parent.parent / "hugepages-2048kB/enabled"


def is_by_advice() -> bool:
    """Whether this system gives huge pages to who asks, and only there."""
    chosen = [re.findall(r"\[(\w+)]", path.read_text()) for path in (SETTING, LARGE) if path.exists()]
    values = [value for [value] in chosen if value != "inherit"]
    return bool(values) and values[-1] == "madvise"


def flags(address: int) -> set[str]:
    """The flags of the mapping at an address: `hg` and `nh` are the advice for its pages."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(found[1], 16) <= address < int(found[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    pytest.fail(f"nothing is mapped at {address:#x}")


def inside(tensor: torch.Tensor) -> int:
    """An address in a huge page that the tensor has whole."""
    return -(-tensor.data_ptr() // HUGE) * HUGE


def mapping(nbytes: int) -> torch.Tensor:
    """Memory of its own that nobody has asked anything for. What malloc gives, numpy may have had, which asks."""
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.float32)


class Counted:
    """`_core.FirstTouch`, and what was said to it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.said: list[int] = []

    def ahead(self, nbytes: int) -> None:
        self.said.append(nbytes)


def test_places_are_large_private_memory_of_the_cpu_and_each_counts_once():
    model = torch.nn.Module()
    model.large = torch.nn.Parameter(torch.empty(LEAST // 4))
    model.same = torch.nn.Parameter(model.large.data[10:])
    model.small = torch.nn.Parameter(torch.empty(LEAST // 4 - 1))
    model.shared = torch.nn.Parameter(torch.empty(LEAST // 4).share_memory_())
    model.absent = torch.nn.Parameter(torch.empty(LEAST // 4, device="meta"))
    assert places(model) == [(model.large.data_ptr(), LEAST)]


def test_a_part_of_the_memory_is_ahead_of_each_tensor_of_the_same_part_of_the_bytes():
    touch = Counted(100)
    given: list[str] = []

    def tensors() -> Iterator[tuple[str, int]]:
        for name in ("a", "b", "c"):
            given.append(name)
            yield name, len(name)

    sizes = {"a": 100, "b": 0, "c": 300}
    seen = []
    for name, _ in touching(tensors(), sizes, touch):  # type: ignore[arg-type]
        seen.append((name, list(touch.said)))
    assert seen == [("a", [25]), ("b", [25, 0]), ("c", [25, 0, 75])]
    assert list(touching(iter([]), {}, touch)) == []  # type: ignore[arg-type]


@pytest.mark.skipif(not is_by_advice(), reason="this system does not give huge pages to who asks, or gives them to all")
@pytest.mark.parametrize("fresh", [True, False])
def test_an_engine_copies_into_huge_pages_the_first_time(write: Write, fresh: bool):
    tensors = [Tensor(f"layers.{number}.weight", "F32", (1024, 2048)) for number in range(2)]
    path = write(*tensors)
    path.read_bytes()
    model = torch.nn.Module()
    for number in range(2):
        model.register_parameter(
            f"p{number}", torch.nn.Parameter(mapping(8 << 20).reshape(1024, 2048), requires_grad=False)
        )
    assert not any("hg" in flags(inside(parameter)) for parameter in model.parameters())
    loads = Loads(torch.device("cpu"), make_options({"page_timing": False}))
    loads.mapped = "on"
    if fresh:
        loads.fresh = model
    with loads.barrier():
        try:
            weights = loads.begun(loads.weights(Chosen([str(path)]), None, lambda: None))
        except NotMapped as why:
            pytest.skip(str(why))
        for (_, tensor), parameter in zip(weights, model.parameters(), strict=True):
            parameter.copy_(tensor)
        [report] = loads.run(model)
    loads.settle()
    if report["given"] != "mapped":
        pytest.skip(report["given_reason"])  # its file system gives no lease
    assert all(("hg" in flags(inside(parameter))) is fresh for parameter in model.parameters())
    expected = penstock.open(path).load()
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(model.parameters(), expected.values(), strict=True)
    )


@pytest.mark.skipif(is_by_advice(), reason="this system gives huge pages to who asks")
def test_where_asking_is_of_no_use_nobody_asks():
    memory = torch.empty(LEAST)
    assert _core.FirstTouch.ask([(memory.data_ptr(), memory.nbytes)]) is None


@pytest.mark.skipif(not is_by_advice(), reason="this system does not give huge pages to who asks, or gives them to all")
def test_memory_that_is_no_longer_mapped_is_left_alone():
    """What an engine replaced in the middle of its load."""
    memory = mapping(32 * HUGE)
    touch = _core.FirstTouch.ask([(memory.data_ptr(), memory.nbytes), (memory.data_ptr(), 10)], True)
    assert touch is not None and 31 * HUGE <= touch.nbytes <= 32 * HUGE
    del memory
    touch.ahead(1 << 40)
    touch.ahead(0)
    assert touch.nbytes > 0
