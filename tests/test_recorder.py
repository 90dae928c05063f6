"""Deferred tensors do what eager ones do, and what is copied of them is one load."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock
import pytest
import torch
from conftest import all_are, raw, same
from penstock.integrations._deferred import Deferred
from penstock.integrations._recorder import Recorder
from penstock.synthetic.synth import Tensor

Write = Callable[..., Path]


@pytest.fixture
def path(write: Write) -> Path:
    return write(
        Tensor("gate", "BF16", (64, 32)),
        Tensor("up", "BF16", (64, 32)),
        Tensor("down", "BF16", (32, 64)),
        Tensor("norm", "F32", (32,)),
        Tensor("scale", "F32", ()),
        Tensor("quant", "F8_E4M3", (64, 32)),
        Tensor("qkv", "F32", (48, 16)),
    )


def deferred(recorder: Recorder) -> dict[str, torch.Tensor]:
    return dict(recorder.weights())


def test_copies_of_parts_are_one_load_of_their_bytes_and_no_others(path: Path):
    checkpoint, eager = penstock.open(path), penstock.open(path).load()
    recorder = Recorder(checkpoint)
    fused, column = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(32, 32, dtype=torch.bfloat16)
    with recorder.barrier():
        weights = deferred(recorder)
        fused[:32].copy_(weights["gate"].narrow(0, 32, 32))
        fused.narrow(0, 32, 32).copy_(weights["up"].chunk(2, 0)[1])
        column.copy_(weights["down"].narrow(1, 32, 32))
        assert (recorder.copies, recorder._reports) == (3, []), "nothing is read before `run`"
        report = recorder.run()
    assert same(fused, torch.cat([eager["gate"][32:], eager["up"][32:]]))
    assert same(column, eager["down"][:, 32:])
    assert report.nbytes == 3 * 32 * 32 * 2
    assert (report.loads, report.copies, report.materialised, report.copied_through) == (1, 3, {}, [])
    assert recorder.layout[2] == ("down", (slice(0, 32, 1), slice(32, 64, 1)))


def test_a_value_that_is_assigned_twice_is_loaded_once_with_all_others(path: Path):
    """Experts of ModelOpt: the scales of two matrices go to one place. torch calls `fill_` for each, not `copy_`."""
    checkpoint, eager = penstock.open(path), penstock.open(path).load()
    recorder = Recorder(checkpoint)
    scales, norm = torch.zeros(4, 2), torch.zeros(32)
    with recorder.barrier():
        weights = deferred(recorder)
        norm.copy_(weights["norm"])
        for _ in range(2):
            scales[2] = weights["scale"]
        report = recorder.run()
    assert (report.loads, report.materialised, recorder.overwritten) == (1, {}, 1)
    assert same(norm, eager["norm"]) and bool((scales[2] == eager["scale"]).all())


def test_what_is_copied_when_no_load_is_to_come_is_copied_at_once(path: Path):
    """An engine may keep tensors, and copy them when its load has ended."""
    checkpoint, eager = penstock.open(path), penstock.open(path).load()
    recorder = Recorder(checkpoint)
    with recorder.barrier():
        weights = deferred(recorder)
        recorder.run()
    recorder.end()
    fused, whole = torch.zeros(32, 16), torch.zeros(32)
    fused.copy_(weights["qkv"].narrow(0, 8, 32))
    whole.copy_(weights["norm"])
    assert same(fused, eager["qkv"][8:40]) and same(whole, eager["norm"])
    assert recorder.materialised == {"aten.copy_.default": 2}


def test_a_deferred_tensor_has_the_metadata_of_an_eager_one(path: Path):
    eager = penstock.open(path).load()
    for name, one in Recorder(penstock.open(path)).weights():
        for mine, theirs in (
            (one, eager[name]),
            (one.t() if one.dim() == 2 else one, eager[name].t() if one.dim() == 2 else eager[name]),
        ):
            assert (mine.shape, mine.dtype, mine.stride(), mine.storage_offset(), mine.device, mine.nbytes) == (
                theirs.shape, theirs.dtype, theirs.stride(), theirs.storage_offset(), theirs.device, theirs.nbytes
            )  # fmt: skip
            assert mine.is_contiguous() == theirs.is_contiguous()
            assert not mine.requires_grad


def test_a_transposed_and_a_permuted_copy_are_read_into_place(path: Path):
    checkpoint, eager = penstock.open(path), penstock.open(path).load()
    recorder = Recorder(checkpoint)
    turned, heads = torch.zeros(32, 64, dtype=torch.bfloat16), torch.zeros(16, 3, 16)
    with recorder.barrier():
        weights = deferred(recorder)
        turned.copy_(weights["gate"].t())
        heads.copy_(weights["qkv"].view(3, 16, 16).transpose(0, 1))
        report = recorder.run()
    assert same(turned, eager["gate"].t())
    assert same(heads, eager["qkv"].view(3, 16, 16).transpose(0, 1))
    assert (report.loads, report.materialised, report.copied_through) == (1, {}, [])


def test_copies_that_only_move_stay_deferred(path: Path):
    recorder = Recorder(penstock.open(path))
    with recorder.barrier():
        weight = deferred(recorder)["gate"]
        for one in (
            weight.contiguous(),
            weight.t().contiguous().narrow(0, 3, 4),
            weight.clone(),
            weight.to("cpu"),
            weight.to(torch.bfloat16),
            weight.to("cpu", copy=True).view(-1, 16)[4:],
            weight.detach(),
            weight.data,
            weight.reshape(-1),
            weight.t().reshape(-1),
        ):
            assert type(one) is Deferred
    assert recorder.materialised == {}


def test_the_device_that_is_claimed_is_the_models(path: Path):
    recorder = Recorder(penstock.open(path), device="cuda:0")
    assert deferred(recorder)["gate"].narrow(0, 0, 2).device == torch.device("cuda:0")
    assert deferred(recorder)["gate"].is_cuda


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda t: t.float(), "_to_copy"),
        (lambda t: t + 1, "add"),
        (lambda t: torch.cat([t, t]), "cat"),
        (lambda t: t.max(), "max"),
        (lambda t: t.sum().item(), "sum"),
        (lambda t: t[torch.tensor([1, 0])], "index"),
        (lambda t: t.tolist(), "tolist"),
        (lambda t: t.float().numpy(), "_to_copy"),
        (lambda t: torch.stack([t, t]), "stack"),
        (lambda t: t.view(torch.int32), "view"),
        (lambda t: f"{t[0, 0]:.3f}", "__format__"),
    ],
)
def test_what_needs_elements_gets_them_and_is_counted(path: Path, operation: Callable[..., Any], expected: str):
    eager = penstock.open(path).load()["gate"]
    recorder = Recorder(penstock.open(path))
    with recorder.barrier():
        found = operation(deferred(recorder)["gate"])
    wanted = operation(eager)
    assert type(found) is type(wanted)
    assert same(found, wanted) if isinstance(wanted, torch.Tensor) else str(found) == str(wanted)
    assert sum(expected in name for name in recorder.materialised) == 1, recorder.materialised


def test_only_the_part_that_is_needed_is_read_at_once(path: Path):
    checkpoint = penstock.open(path)
    recorder = Recorder(checkpoint)
    with recorder.barrier():
        deferred(recorder)["gate"].narrow(0, 8, 4).float()
    assert recorder.materialised_bytes == 4 * 32 * 2
    assert checkpoint.last_report is not None
    assert checkpoint.last_report.nbytes == 4 * 32 * 2


def test_data_that_is_assigned_is_memory_of_its_own(path: Path):
    eager = penstock.open(path).load()
    recorder, parameter = Recorder(penstock.open(path)), torch.nn.Parameter(torch.zeros(1))
    with recorder.barrier():
        parameter.data = deferred(recorder)["norm"]
        recorder.run()
    assert type(parameter) is torch.nn.Parameter
    assert same(parameter.data, eager["norm"])


def test_no_parameter_or_buffer_is_deferred_afterwards(path: Path):
    eager = penstock.open(path).load()
    recorder, model = Recorder(penstock.open(path)), torch.nn.Module()
    with recorder.barrier():
        weights = deferred(recorder)
        model.weight = torch.nn.Parameter(weights["gate"], requires_grad=False)
        model.register_buffer("scale", weights["scale"])
        assert isinstance(model.weight, Deferred)
        report = recorder.run(model)
    assert type(model.weight) is torch.nn.Parameter
    assert type(model.scale) is torch.Tensor
    assert same(model.weight, eager["gate"])
    assert same(model.scale, eager["scale"])
    assert report.materialised == {"parameter left": 1, "buffer left": 1}


def test_a_copy_into_a_meta_tensor_is_passed_on(path: Path):
    recorder = Recorder(penstock.open(path))
    seen = []

    class Counts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                seen.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    with recorder.barrier(), Counts():
        to = torch.empty(64, 32, dtype=torch.bfloat16, device="meta")
        assert to.copy_(deferred(recorder)["gate"]) is to
    assert seen == [64 * 32]
    assert (recorder.copies, recorder.materialised) == (0, {})


def test_a_scalar_may_be_copied_to_many_elements(path: Path):
    eager = penstock.open(path).load()
    recorder = Recorder(penstock.open(path))
    many, one, filled = torch.zeros(5, 3), torch.zeros(4), torch.zeros(7)
    with recorder.barrier():
        scale = deferred(recorder)["scale"]
        many.copy_(scale)
        one[2] = scale
        filled.fill_(scale)
        report = recorder.run()
    assert all_are(many, eager["scale"])
    assert all_are(filled, eager["scale"])
    assert one.tolist() == [0, 0, eager["scale"].item(), 0]
    assert (report.loads, report.materialised) == (1, {})


def test_floats_are_converted_and_bytes_are_taken_as_they_are(path: Path):
    eager = penstock.open(path).load()
    recorder = Recorder(penstock.open(path))
    wide, half = torch.zeros(64, 32), torch.zeros(16, 48, dtype=torch.float16).t()
    as_bytes = torch.zeros(64, 32, dtype=torch.uint8)
    float8 = torch.zeros(64, 32, dtype=torch.float8_e4m3fn)
    with recorder.barrier():
        weights = deferred(recorder)
        wide.copy_(weights["gate"])
        half.copy_(weights["qkv"])
        as_bytes.copy_(weights["quant"].view(torch.uint8))
        float8.view(torch.uint8).copy_(weights["quant"].view(torch.uint8))
        report = recorder.run()
    assert same(wide, eager["gate"].float())
    assert same(half, eager["qkv"].half())
    assert raw(as_bytes) == raw(float8) == raw(eager["quant"])
    assert (report.loads, report.materialised) == (1, {})


def test_a_dtype_that_is_not_converted_on_the_way_is_made_at_once(path: Path):
    eager = penstock.open(path).load()
    recorder, wide = Recorder(penstock.open(path)), torch.zeros(64, 32, dtype=torch.bfloat16)
    with recorder.barrier():
        wide.copy_(deferred(recorder)["quant"])
    assert same(wide, eager["quant"].bfloat16())
    assert recorder.materialised == {"aten.copy_.default": 1}


# --- The barrier ---


def test_an_operation_that_touches_no_outstanding_byte_does_not_split_the_load(path: Path):
    eager = penstock.open(path).load()
    recorder, embedding = Recorder(penstock.open(path)), torch.full((80, 32), 7.0, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(embedding, requires_grad=False)
    with recorder.barrier():
        weights = deferred(recorder)
        parameter[:64].data.copy_(weights["gate"])
        parameter[64:].data.fill_(0)
        torch.zeros(3).add_(1)
        report = recorder.run()
    assert report.loads == 1
    assert same(embedding[:64], eager["gate"])
    assert not embedding[64:].any()


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t.sum(),
        lambda t: t[:4].clone(),
        lambda t: t.add_(1),
        lambda t: t[3:5].fill_(0),
        lambda t: torch.empty(64, 32, dtype=t.dtype).copy_(t),
        lambda t: torch.equal(t, t),
        lambda t: torch._foreach_mul_([t], 2),
        lambda t: t.data.mul_(2),
        lambda t: torch.tensor(t.tolist(), dtype=torch.float64),
        lambda t: torch.from_numpy(t.view(torch.int16).numpy().copy()),
    ],
)
def test_an_operation_that_touches_outstanding_bytes_has_them_first(path: Path, operation: Callable[..., Any]):
    eager = penstock.open(path).load()["gate"]
    recorder, to = Recorder(penstock.open(path)), torch.zeros(64, 32, dtype=torch.bfloat16)
    with recorder.barrier():
        to.copy_(deferred(recorder)["gate"])
        found = operation(to)
        report = recorder.run()
    expected = operation(eager)
    assert same(to, eager)
    if isinstance(expected, torch.Tensor):
        assert same(found, expected)
    assert (report.loads, report.copies) == (1, 1)


def test_columns_beside_outstanding_columns_are_other_bytes(path: Path):
    recorder, to = Recorder(penstock.open(path)), torch.zeros(64, 64, dtype=torch.bfloat16)
    with recorder.barrier():
        to[:, :32].copy_(deferred(recorder)["gate"])
        to[:, 32:].fill_(3)
        to[:, 40] = 5
        assert not recorder._reports
        to[:, 31:33].sum()
        assert len(recorder._reports) == 1


def test_the_last_of_several_copies_to_one_place_counts(path: Path):
    eager = penstock.open(path).load()
    recorder, to = Recorder(penstock.open(path)), torch.zeros(64, 32, dtype=torch.bfloat16)
    with recorder.barrier():
        weights = deferred(recorder)
        to.copy_(weights["gate"])
        to.copy_(weights["up"])
        assert (recorder.overwritten, recorder._outstanding.count) == (1, 1)
        to[8:16].copy_(weights["gate"][:8])
        report = recorder.run()
    assert same(to[:8], eager["up"][:8])
    assert same(to[8:16], eager["gate"][:8])
    assert report.loads == 2, "a copy over a part of another one cannot be made in the same load"


# --- Writes to deferred tensors ---


def test_writes_to_a_deferred_tensor_are_seen_by_its_views_and_not_by_copies_made_before(path: Path):
    eager = penstock.open(path).load()["gate"].clone()
    recorder = Recorder(penstock.open(path))
    before, after = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    with recorder.barrier():
        weight = deferred(recorder)["gate"]
        view, copy = weight.t(), weight.clone()
        before.copy_(weight)
        weight[3:5].mul_(2)
        weight += 1
        after.copy_(view)
        assert same(copy, eager)
        recorder.run()
    assert same(before, eager)
    eager[3:5].mul_(2)
    assert same(after, eager.add(1).t())


def test_every_tensor_that_an_operation_gets_is_counted_in_bytes_and_the_operation_once(path: Path):
    eager = penstock.open(path).load()
    recorder = Recorder(penstock.open(path))
    to = torch.zeros(128, 32, dtype=torch.bfloat16)
    with recorder.barrier():
        weights = deferred(recorder)
        to.copy_(torch.cat([weights["gate"], weights["up"]]))
        report = recorder.run()
    assert same(to, torch.cat([eager["gate"], eager["up"]]))
    assert (report.materialised, report.materialised_bytes) == ({"aten.cat.default": 1}, 2 * 64 * 32 * 2)


# --- Random chains ---


def chain(rng: random.Random, tensor: Any, real: list[torch.Tensor], length: int) -> list[Any]:
    """Twenty operations on a tensor, those of engines' loaders. The same for a deferred and for an eager one."""
    seen = [tensor]
    results: list[Any] = []
    for _ in range(length):
        at = rng.randrange(len(seen))
        one = seen[at]
        d = rng.randrange(one.dim()) if one.dim() else 0
        n = one.shape[d] if one.dim() else 1
        kind, a, b = rng.randrange(15), rng.random(), rng.random()
        if one.dim() and n:
            if kind == 0:
                start = int(a * n)
                one = one.narrow(d, start, 1 + int(b * (n - start - 1)))
            elif kind == 1:
                one = one.chunk(1 + int(a * 4), d)[0]
            elif kind == 2:
                one = one.transpose(d, int(a * one.dim()))
            elif kind == 3:
                one = one.select(d, int(a * n))
            elif kind == 4:
                one = one.reshape(-1) if a < 0.5 else one.unsqueeze(d)
            elif kind == 5 and n % 2 == 0:
                one = one.unflatten(d, (2, n // 2) if a < 0.5 else (n // 2, 2))
            elif kind == 6 and one.dim() > 1 and one.is_contiguous():
                one = one.view(-1, one.shape[-1])
            elif kind == 7:
                one = one[(slice(None),) * d + (slice(int(a * n), None, 1 + int(b * 3)),)]
        if kind == 8:
            one = one.to("cpu", copy=a < 0.5)
        elif kind == 9:
            one = one.contiguous() if a < 0.5 else one.clone()
        elif kind == 10 and one.dim() and a < 0.3:
            one = torch.cat([one, one], d)
        elif kind == 11 and a < 0.3:
            one = one.to(torch.float64 if b < 0.5 else torch.float16)
        elif kind == 12 and a < 0.15:
            one.mul_(2)
        elif kind == 13 and a < 0.15:
            one.copy_(torch.full((), b).to(one.dtype))
        if rng.random() < 0.35:
            size = one.numel()
            memory = real[rng.randrange(len(real))]
            if 0 < size <= memory.numel():
                start = int(rng.random() * (memory.numel() - size))
                to = memory[start : start + size]
                wide = rng.random() < 0.3 and 2 * size <= memory.numel()
                to = memory[: 2 * size : 2] if wide else to
                to = to.view(one.shape) if not wide else to.unflatten(0, one.shape) if one.dim() else to[0]
                if one.dim() == 2 and rng.random() < 0.3 and not wide:
                    to = to.view(one.shape[1], one.shape[0]).t()
                to.copy_(one)
        if rng.random() < 0.05:
            results.append(real[rng.randrange(len(real))].double().sum())
        if rng.random() < 0.05:
            real[rng.randrange(len(real))][: int(rng.random() * 50)].fill_(1)
        if one.numel() and one.numel() <= 20_000:
            seen.append(one)
    results.extend(seen)
    return results


PARTS = 20
#: `make test-whole` runs 10,000.
CHAINS = 10_000 if os.environ.get("PENSTOCK_TEST_WHOLE") == "1" else 1_000


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", range(PARTS))
def test_random_chains_do_what_eager_tensors_do(tmp_path: Path, part: int):
    rng = random.Random(part)
    torch.manual_seed(part)
    kinds = [torch.bfloat16, torch.float32, torch.float16, torch.float64]
    shapes = [(24, 16), (6, 4, 8), (48,), (), (2, 3, 4, 5), (1, 40)]
    path = tmp_path / "model.safetensors"
    penstock.save_file({f"t{i}": torch.randn(shapes[i % 6]).to(kinds[i % 4]) for i in range(12)}, path)
    checkpoint, eager = penstock.open(path), penstock.open(path).load()
    copies = 0
    for number in range(CHAINS // PARTS):
        seed, name = rng.random(), f"t{rng.randrange(12)}"
        of_eager = [torch.zeros(2048, dtype=kind) for kind in (torch.float32, torch.bfloat16, torch.float64)]
        of_deferred = [one.clone() for one in of_eager]
        expected = chain(random.Random(seed), eager[name].clone(), of_eager, 20)
        recorder = Recorder(checkpoint, keep=lambda one, name=name: one == name)
        with recorder.barrier():
            [(_, tensor)] = recorder.weights()
            found = chain(random.Random(seed), tensor, of_deferred, 20)
            recorder.run()
        for one, other in zip(of_deferred, of_eager, strict=True):
            assert type(one) is torch.Tensor
            assert same(one, other), (part, number)
        for one, other in zip(found, expected, strict=True):
            value = one.value() if isinstance(one, Deferred) else one
            assert type(value) is torch.Tensor
            assert same(value.clone().reshape(other.shape), other), (part, number)
            assert one.shape == other.shape
        copies += recorder.copies
    assert copies > CHAINS // PARTS, "most chains copy something that can wait"


# --- Failures, threads, cost ---


def test_a_load_that_fails_changes_nothing_or_says_what(path: Path):
    recorder, to = Recorder(penstock.open(path)), torch.full((64, 32), 7.0, dtype=torch.bfloat16)
    with recorder.barrier():
        to.copy_(deferred(recorder)["gate"])
        path.write_bytes(path.read_bytes()[:-3000])
        with pytest.raises(penstock.PenstockError) as caught:
            recorder.run()
    assert caught.value.touched in ([], ["gate"])
    assert to.ne(7).any() == (caught.value.touched == ["gate"])


def test_an_error_names_what_earlier_loads_have_overwritten(path: Path):
    recorder = Recorder(penstock.open(path))
    first, second = torch.zeros(64, 32, dtype=torch.bfloat16), torch.full((32,), 7.0)
    with recorder.barrier():
        weights = deferred(recorder)
        first.copy_(weights["gate"])
        assert first.any(), "it is read, so it was loaded"
        second.copy_(weights["norm"])
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(penstock.ChangedError, match="overwritten before: gate") as caught:
            recorder.run()
    assert recorder.written == ["gate"]
    assert caught.value.touched == ["gate"]
    assert second.eq(7).all()


def test_many_threads_may_copy(path: Path):
    eager = penstock.open(path).load()["gate"]
    recorder = Recorder(penstock.open(path))
    weight = deferred(recorder)["gate"]
    to = torch.zeros(16, 64, 32, dtype=torch.bfloat16)

    def copy(first: int) -> None:
        for row in range(64):
            to[first, row].copy_(weight[row])

    threads = [threading.Thread(target=copy, args=(first,)) for first in range(16)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    report = recorder.run()
    assert all_are(to, eager)
    assert (report.loads, report.copies) == (1, 1024)


def test_names_that_are_not_kept_are_not_given(path: Path):
    recorder = Recorder(penstock.open(path), keep=lambda name: name.startswith("q"))
    assert [name for name, _ in recorder.weights(prefix="model.")] == ["model.quant", "model.qkv"]


def test_small_tensors_are_read_together_when_one_of_them_is_asked_for(write: Write):
    path = write(*(Tensor(f"scale.{i}", "F32", ()) for i in range(50)), Tensor("weight", "F32", (64, 64)))
    checkpoint, eager = penstock.open(path), penstock.open(path).load()
    recorder = Recorder(checkpoint, keep=lambda name: name != "scale.49")
    reports = []
    for name, tensor in recorder.weights():
        if name.startswith("scale"):
            found = torch.tensor(tensor.item(), dtype=torch.float32)
            assert same(found, eager[name]) or found.isnan()
            reports.append(checkpoint.last_report)
    assert all(report is reports[0] for report in reports)
    assert reports[0] is not None
    assert (reports[0].tensors, reports[0].nbytes) == (49, 49 * 4)


def test_an_attribute_of_a_module_that_is_deferred_becomes_real(path: Path):
    eager = penstock.open(path).load()["norm"]
    recorder, model = Recorder(penstock.open(path)), torch.nn.Linear(1, 1)
    with recorder.barrier():
        model.table = deferred(recorder)["norm"]
        recorder.run(model)
    assert type(model.table) is torch.Tensor
    assert same(model.table, eager)


def test_an_error_names_what_earlier_loads_and_single_copies_wrote(path: Path):
    checkpoint = penstock.open(path)
    recorder = Recorder(checkpoint)
    gate, up = (torch.zeros(64, 32, dtype=torch.bfloat16) for _ in range(2))
    quant = torch.zeros(64, 32)
    with recorder.barrier():
        weights = deferred(recorder)
        gate.copy_(weights["gate"])
        gate.sum()  # it is there
        quant.copy_(weights["quant"])  # of a dtype that is not converted on the way
        up.copy_(weights["up"])
        path.write_bytes(path.read_bytes()[: checkpoint["gate"].offsets[0] - 8])
        with pytest.raises(penstock.PenstockError) as caught:
            recorder.run()
    assert caught.value.touched == ["gate", "quant"]
    assert "overwritten before: gate, quant" in str(caught.value)
    assert not up.any()


def test_a_module_that_is_filled_column_by_column_is_one_load(write: Write):
    path = write(*(Tensor(f"t{i}", "F32", (32,)) for i in range(200)))
    eager = penstock.open(path).load()
    recorder, to = Recorder(penstock.open(path)), torch.zeros(32, 200)
    with recorder.barrier():
        for i, (_, tensor) in enumerate(recorder.weights()):
            to[:, i].copy_(tensor)
        report = recorder.run()
    assert report.loads == 1
    assert all(same(to[:, i], eager[f"t{i}"]) for i in range(200))


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: torch.zeros(0, dtype=t.dtype).copy_(t),
        lambda t: torch.zeros(5, dtype=t.dtype).copy_(t[:1, :1]),
        lambda t: torch.zeros(32, 64, dtype=t.dtype).copy_(t),
        lambda t: torch.zeros(64, 32, dtype=t.dtype).fill_(t),
        lambda t: torch.zeros(64, 16, dtype=t.dtype).copy_(t),
    ],
)
def test_what_torch_refuses_is_refused(path: Path, operation: Callable[..., Any]):
    eager = penstock.open(path).load()["gate"]
    recorder = Recorder(penstock.open(path))
    with pytest.raises(RuntimeError):
        operation(eager)
    with recorder.barrier(), pytest.raises(RuntimeError):
        operation(deferred(recorder)["gate"])
    assert (recorder.copies, recorder.written) == (0, [])


def test_pairs_of_f4_are_read_whole_and_copied_at_once(write: Write):
    path = write(Tensor("a", "F4", (8, 16)))
    eager = penstock.open(path).load()["a"]
    recorder = Recorder(penstock.open(path))
    whole, rows = (torch.zeros(n, 8, dtype=torch.uint8).view(eager.dtype) for n in (8, 3))
    with recorder.barrier():
        whole.copy_(deferred(recorder)["a"])
        rows.copy_(deferred(recorder)["a"].narrow(0, 2, 3))
        report = recorder.run()
    assert whole.view(torch.uint8).equal(eager.view(torch.uint8))
    assert rows.view(torch.uint8).equal(eager.view(torch.uint8)[2:5])
    assert report.copies == 0


def test_a_large_tensor_that_is_read_at_once_brings_no_small_ones(path: Path):
    checkpoint = penstock.open(path)
    recorder = Recorder(checkpoint)
    deferred(recorder)["norm"].tolist()
    assert checkpoint.last_report is not None
    assert checkpoint.last_report.nbytes == 32 * 4
    assert recorder._small is None


def test_a_thread_that_still_reads_does_not_block_the_run(path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is left deferred is read while another thread reads a small tensor: each needs what the other one has."""
    eager = penstock.open(path).load()["gate"]
    recorder, model = Recorder(penstock.open(path)), torch.nn.Module()
    weights = deferred(recorder)
    model.table = weights["gate"].view(-1)[5:40]  # no box: it cannot wait
    reading, settling = threading.Event(), threading.Event()
    small, settle = recorder._small_tensors, recorder._settle

    def read_late() -> Any:
        reading.set()
        assert settling.wait(60)
        return small()

    def settle_meanwhile(of: torch.nn.Module) -> None:
        settling.set()
        settle(of)

    monkeypatch.setattr(recorder, "_small_tensors", read_late)
    monkeypatch.setattr(recorder, "_settle", settle_meanwhile)
    reader = threading.Thread(target=weights["scale"].item, daemon=True)
    runner = threading.Thread(target=recorder.run, args=(model,), daemon=True)
    reader.start()
    assert reading.wait(60)
    runner.start()
    for thread in (reader, runner):
        thread.join(60)
        assert not thread.is_alive()
    assert same(model.table, eager.view(-1)[5:40])


def test_torchs_compiler_is_not_asked_about_each_operation():
    """That was a tenth of a recording."""
    from penstock.integrations._recorder import _Watch

    function = vars(_Watch)["__torch_dispatch__"]
    assert function.__module__ == _Watch.__module__ and not hasattr(function, "__wrapped__")
