"""Parameters that an engine copies into for the first time have huge pages, where the system gives them on request."""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import penstock
import pytest
import torch
from conftest import raw
from penstock import _core
from penstock._options import make_options
from penstock.integrations._engine import Chosen, Loads
from penstock.integrations._first_touch import LEAST, Parameters, memory_of, touching
from penstock.synthetic.synth import Tensor

Write = Callable[..., Path]
HUGE = 2 << 20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LARGE = SETTING.parent.parent / "hugepages-2048kB/enabled"


def is_by_advice() -> bool:
    """True if this system gives huge pages only where a program asks for them."""
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


class Asked:
    """`_core.FirstTouch`, and what was said to it. Pages are slow once so many bytes were looked at."""

    def __init__(self, slow_after: int = 1 << 62) -> None:
        self.slow_after = slow_after
        self.places: list[list[int]] = []
        self.said: list[tuple[int, int]] = []
        self.small: list[int] = []
        self.ended: list[list[int]] = []

    def ask(self, places: Sequence[tuple[int, int]], page_timing: bool | None) -> Asked:
        assert page_timing is None
        self.places = [[address, nbytes // HUGE * HUGE] for address, nbytes in places]
        self.nbytes = sum(nbytes for _, nbytes in self.places)
        return self

    @property
    def are_slow(self) -> bool:
        return sum(nbytes for _, nbytes in self.said) >= self.slow_after

    def ahead(self, place: int, nbytes: int) -> int:
        found = 0 if self.are_slow else min(self.places[place][1], -(-nbytes // HUGE) * HUGE)
        self.places[place][1] -= found
        self.said.append((place, found))
        return found

    def turn_small(self, places: Sequence[int]) -> None:
        self.small += places

    def end(self, places: Sequence[int]) -> None:
        self.ended.append(list(places))


def model_of(*shapes: int) -> torch.nn.Module:
    """A model whose parameters have memory of their own, of so many huge pages each."""
    model = torch.nn.Module()
    for number, pages in enumerate(shapes):
        model.register_parameter(f"p{number}", torch.nn.Parameter(mapping(pages * HUGE), requires_grad=False))
    return model


def parameters_of(model: torch.nn.Module, asked: Asked) -> Parameters:
    return Parameters(model, None, asked.ask)  # type: ignore[arg-type]


def test_places_are_large_private_memory_of_the_cpu_and_each_counts_once():
    asked, model = Asked(), torch.nn.Module()
    model.absent = torch.nn.UninitializedParameter()
    model.large = torch.nn.Parameter(torch.empty(LEAST // 4))
    model.same = torch.nn.Parameter(model.large.data[10:])
    model.small = torch.nn.Parameter(torch.empty(LEAST // 4 - 1))
    model.shared = torch.nn.Parameter(torch.empty(LEAST // 4).share_memory_())
    model.meta = torch.nn.Parameter(torch.empty(LEAST // 4, device="meta"))
    parameters = parameters_of(model, asked)
    assert asked.places == [[model.large.data_ptr(), LEAST]] and parameters.nbytes == LEAST


class Own(torch.nn.Parameter):
    """A parameter of an engine's own class, which has an error of its own as soon as it is asked for its memory."""

    fails = True

    def untyped_storage(self) -> torch.UntypedStorage:
        if self.fails:
            raise AttributeError("no such attribute: 'scales'")
        return super().untyped_storage()


def own(pages: int) -> Own:
    return Own(mapping(pages * HUGE), requires_grad=False)


def test_a_parameter_whose_class_fails_is_left_out_and_the_log_says_so(caplog: pytest.LogCaptureFixture):
    asked, model = Asked(), model_of(2)
    model.layer = torch.nn.Module()
    model.layer.own, model.layer.later = own(3), own(4)
    model.layer.later.fails = False
    with caplog.at_level(logging.DEBUG, logger="penstock"):
        parameters = parameters_of(model, asked)
        assert parameters.nbytes == 6 * HUGE and len(asked.places) == 2
        [said] = caplog.messages
        assert "layer.own, a Own, gets no huge pages" in said and "AttributeError: no such attribute" in said
        model.layer.later.fails = True
        parameters.end()
    assert asked.ended == [[0]] and "layer.later" in caplog.messages[1] and len(caplog.messages) == 2


class Wrapper(torch.Tensor):
    """A tensor that wraps others."""

    @staticmethod
    def __new__(cls, size: int) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (size,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, given: Any = (), more: Any = None) -> Any:
        raise AssertionError("nothing is computed with it")


def test_tensors_without_memory_of_their_own_are_no_error_and_nothing_is_said(caplog: pytest.LogCaptureFixture):
    dense = torch.ones(1024, LEAST // 4096)
    with caplog.at_level(logging.DEBUG, logger="penstock"):
        for none in (dense.to_sparse(), Wrapper(LEAST // 4), torch.nn.UninitializedParameter(), torch.ones(3)):
            assert memory_of(none) == (0, 0)
    assert memory_of(dense) == (dense.data_ptr(), LEAST) and not caplog.messages


def test_a_model_without_such_memory_asks_for_nothing():
    parameters = Parameters(torch.nn.Linear(3, 3), None, lambda *_: pytest.fail("it asked"))
    parameters.ahead(1)
    parameters.end()
    assert parameters.nbytes == 0


def test_a_part_of_the_memory_is_ahead_of_each_tensor_of_the_same_part_of_the_bytes():
    asked, model = Asked(), model_of(3, 5)
    parameters = parameters_of(model, asked)
    sizes = {"a": 100, "b": 0, "c": 300}
    seen = []
    for name, _ in touching(iter([("a", 1), ("b", 2), ("c", 3)]), sizes, parameters):
        seen.append((name, sum(nbytes for _, nbytes in asked.said) // HUGE))
    assert seen == [("a", 2), ("b", 2), ("c", 8)]
    assert [place for place, nbytes in asked.said if nbytes] == [0, 0, 1]
    parameters.end()
    parameters.end()
    assert asked.ended == [[0, 1]] and not asked.small


def test_memory_that_the_engine_has_replaced_is_left_alone():
    asked, model = Asked(slow_after=6 * HUGE), model_of(2, 4, 4, 4)
    parameters = parameters_of(model, asked)
    parameters.ahead(HUGE)
    model.p1.data = mapping(4 * HUGE)
    del model.p3
    parameters.ahead(6 * HUGE)
    assert [place for place, nbytes in asked.said if nbytes] == [0, 0, 2]
    assert asked.are_slow and asked.small == [0, 2]
    parameters.ahead(HUGE)
    parameters.end()
    assert asked.ended == [[0, 2]]


@pytest.mark.skipif(not is_by_advice(), reason="this system gives huge pages everywhere, or nowhere")
@pytest.mark.parametrize("fresh", [True, False])
def test_an_engine_copies_into_huge_pages_the_first_time(write: Write, fresh: bool):
    tensors = [Tensor(f"layers.{number}.weight", "F32", (1024, 2048)) for number in range(2)]
    path = write(*tensors)
    path.read_bytes()
    model = model_of(4, 4)
    assert not any("hg" in flags(inside(parameter)) for parameter in model.parameters())
    loads = Loads(torch.device("cpu"), make_options({"page_timing": False}))
    loads.mapped = "on"
    if fresh:
        loads.fresh = model
    with loads.barrier():
        weights = loads.begun(loads.weights(Chosen([str(path)]), None, lambda: None))
        for (_, tensor), parameter in zip(weights, model.parameters(), strict=True):
            parameter.copy_(tensor.flatten())
        [report] = loads.run(model)
    loads.settle()
    if "its file system gives none" in report["given_reason"]:
        pytest.skip(report["given_reason"])
    assert report["given"] == "mapped"
    assert all(("hg" in flags(inside(parameter))) is fresh for parameter in model.parameters())
    expected = penstock.open(path).load()
    assert [raw(parameter) for parameter in model.parameters()] == [raw(tensor) for tensor in expected.values()]


@pytest.mark.skipif(is_by_advice(), reason="this system gives huge pages on request")
def test_where_asking_is_of_no_use_nobody_asks():
    memory = mapping(4 * HUGE)
    assert _core.FirstTouch.ask([(memory.data_ptr(), memory.nbytes)]).nbytes == 0
    assert "hg" not in flags(inside(memory))
