"""`Checkpoint.load_into`: bytes into tensors that exist already."""

import itertools
import mmap
import pickle
import random

import numpy as np
import penstock
import pytest
import torch
from conftest import Oracle, raw
from penstock import _memory
from penstock.synthetic.synth import Tensor


class Model(torch.nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.register_buffer("table", torch.arange(6))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        if tied:
            self.head.weight = self.embed.weight


def model_file(write, *names):
    tensors = {
        "embed.weight": ("F32", (16, 8)),
        "norm.weight": ("F32", (8,)),
        "norm.bias": ("F32", (8,)),
        "head.weight": ("F32", (16, 8)),
        "table": ("I64", (6,)),
    }
    return write(*(Tensor(name, *tensors[name]) for name in names or tensors))


def empty(checkpoint, framework="pt"):
    """Destinations for all of a checkpoint."""
    return {
        name: torch.zeros_like(t) if framework == "pt" else np.zeros_like(t)
        for name, t in checkpoint.load(framework=framework).items()
    }


def test_a_module_gets_its_parameters_and_buffers(write):
    path, model = model_file(write), Model()
    places = {name: t.data_ptr() for name, t in model.state_dict().items()}
    report = penstock.open(path).load_into(model)
    oracle = Oracle(path)
    for name, tensor in model.state_dict().items():
        assert raw(tensor) == oracle[name], name
        assert tensor.data_ptr() == places[name]
    assert (report.missing, report.unexpected, report.copied_through) == ([], [], [])
    assert report.nbytes == sum(len(oracle[name]) for name in places)
    assert model.head.weight.requires_grad


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("io", ["auto", "buffered", "uring_buffered", "direct"])
def test_a_mapping_gets_every_byte(small, framework, io):
    if framework == "np":
        pytest.importorskip("ml_dtypes")
    checkpoint = penstock.open(small)
    to = empty(checkpoint, framework)
    checkpoint.load_into(to, options={"io": io})
    Oracle(small).same(to)


def test_every_dtype_of_torch_can_be_loaded_into(every):
    checkpoint = penstock.open(every)
    names = [name for name in checkpoint if not name.startswith("f6_") and name != "f4.hollow"]
    to = {name: torch.empty_like(t) for name, t in checkpoint.load(names=names).items()}
    checkpoint.load_into(to, names=names)
    oracle = Oracle(every)
    for name, tensor in to.items():
        assert raw(tensor) == oracle[name], name


def test_a_large_load_into_ordinary_tensors(big):
    checkpoint = penstock.open(big)
    to = empty(checkpoint)
    checkpoint.load_into(to)
    Oracle(big).same(to)


def test_tied_tensors_are_loaded_once(write):
    path, model = model_file(write), Model(tied=True)
    report = penstock.open(path).load_into(model)
    oracle = Oracle(path)
    assert report.nbytes == 4 * (128 + 8 + 8) + 48
    assert raw(model.embed.weight) == oracle["head.weight"]  # as load_state_dict: the last name wins
    reference = Model(tied=True)
    reference.load_state_dict(penstock.open(path).load())
    assert raw(reference.embed.weight) == raw(model.embed.weight)


@pytest.mark.parametrize("present", ["embed.weight", "head.weight"])
def test_one_name_of_a_tied_tensor_is_enough(write, present):
    path, model = model_file(write, present, "norm.weight", "norm.bias", "table"), Model(tied=True)
    assert penstock.open(path).load_into(model).missing == []
    assert raw(model.head.weight) == Oracle(path)[present]


def test_every_problem_is_listed_in_one_error_before_a_byte_moves(write):
    path = write(
        Tensor("shape", "F32", (4, 4)),
        Tensor("dtype", "F32", (4,)),
        Tensor("meta", "F32", (4,)),
        Tensor("frozen", "F32", (4,)),
        Tensor("one", "F32", (4,)),
        Tensor("two", "F32", (4,)),
        Tensor("extra", "F32", (4,)),
        Tensor("expanded", "F32", (3, 4)),
        Tensor("fine", "F32", (4,)),
        Tensor("sparse", "F32", (2, 2)),
    )
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    memory = torch.zeros(7)
    to = {
        "shape": torch.zeros(4, 5),
        "dtype": torch.zeros(4, dtype=torch.float16),
        "meta": torch.zeros(4, device="meta"),
        "frozen": frozen,
        "one": memory[:4],
        "two": memory[3:],
        "expanded": torch.zeros(1, 4).expand(3, 4),
        "lacking": torch.zeros(3),
        "fine": torch.zeros(4),
        "sparse": torch.eye(2).to_sparse(),
    }
    with pytest.raises(penstock.MismatchError) as caught:
        penstock.open(path).load_into(to)
    error = caught.value
    assert isinstance(error, ValueError)
    text = str(error)
    for name in ("shape", "dtype", "meta", "frozen", "two overlaps one", "expanded", "lacking is missing",
                 "extra is unexpected", "sparse"):  # fmt: skip
        assert name in text, name
    assert "fine" not in text
    assert "model.safetensors" in text
    assert len(error.problems) == 9
    assert error.touched == []
    assert not to["fine"].any()


def test_of_many_problems_ten_are_shown_and_all_are_listed(write):
    checkpoint = penstock.open(write(*(Tensor(f"t{i:02}", "F32", (4,)) for i in range(13))))
    with pytest.raises(penstock.MismatchError) as caught:
        checkpoint.load_into({f"t{i:02}": torch.zeros(5) for i in range(13)})
    error, text = caught.value, str(caught.value)
    assert "13 problems" in text
    assert [f"t{i:02}" in text for i in range(13)] == [True] * 10 + [False] * 3
    assert text.endswith("\n  and 3 more: .problems of this error lists all of them")
    assert [problem.split()[0] for problem in error.problems] == [f"t{i:02}" for i in range(13)]
    assert pickle.loads(pickle.dumps(error)).problems == error.problems


@pytest.mark.parametrize("count", [1, 10])
def test_few_problems_are_all_shown(write, count):
    checkpoint = penstock.open(write(*(Tensor(f"t{i}", "F32", (4,)) for i in range(count))))
    with pytest.raises(penstock.MismatchError) as caught:
        checkpoint.load_into({f"t{i}": torch.zeros(5) for i in range(count)})
    assert str(caught.value).splitlines()[1:] == [f"  {problem}" for problem in caught.value.problems]


def test_not_strict_reports_what_is_on_one_side_only(write):
    path = model_file(write, "embed.weight", "norm.weight", "head.weight")
    to = {"embed.weight": torch.zeros(16, 8), "other": torch.ones(2)}
    report = penstock.open(path).load_into(to, strict=False)
    assert report.missing == ["other"]
    assert report.unexpected == ["norm.weight", "head.weight"]
    assert raw(to["embed.weight"]) == Oracle(path)["embed.weight"]
    assert to["other"].all()
    assert report.nbytes == 512


def test_not_strict_still_refuses_wrong_shapes(write):
    with pytest.raises(penstock.MismatchError, match="shape"):
        penstock.open(model_file(write)).load_into({"table": torch.zeros(5, dtype=torch.int64)}, strict=False)


def test_names_and_slices_narrow_what_is_taken(write):
    path = model_file(write)
    to = {"head.weight": torch.zeros(16, 4)}
    penstock.open(path).load_into(to, names="head.*", slices={"head.weight": (..., slice(4, 8))})
    full = np.frombuffer(Oracle(path)["head.weight"], np.float32).reshape(16, 8)
    assert raw(to["head.weight"]) == full[:, 4:].tobytes()


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_destinations_that_are_not_contiguous_are_filled_in_place(write, framework):
    path = model_file(write)
    oracle = Oracle(path)
    if framework == "pt":
        wide = torch.zeros(16, 32)
        to = {
            "embed.weight": torch.zeros(8, 16).t(),
            "head.weight": wide[:, ::4],
            "table": torch.zeros(6, dtype=torch.long),
        }
    else:
        wide = np.zeros((16, 32), np.float32)
        to = {
            "embed.weight": np.zeros((8, 16), np.float32).T,
            "head.weight": wide[:, ::4],
            "table": np.zeros(6, np.int64),
        }
    report = penstock.open(path).load_into(to, names=list(to))
    for name, tensor in to.items():
        assert raw(np.ascontiguousarray(tensor) if framework == "np" else tensor) == oracle[name], name
    assert report.copied_through == []
    assert report.nbytes == 512 + 512 + 48
    assert not wide[:, 1::4].any()
    assert "not in place" not in str(report)


def test_arrays_with_negative_steps_are_filled_through_a_temporary_one_and_reported(write):
    path = model_file(write)
    backwards = np.zeros((16, 8), np.float32)
    to = {"embed.weight": backwards[::-1], "head.weight": np.zeros((8, 16), np.float32).T}
    report = penstock.open(path).load_into(to, names=list(to))
    for name, array in to.items():
        assert raw(np.ascontiguousarray(array)) == Oracle(path)[name], name
    assert report.copied_through == ["embed.weight"]
    assert "not in place" in str(report)


def test_memory_that_may_not_be_written_to_is_refused_not_a_crash(write):
    path = write(Tensor("a", "F32", (1024,)))
    mapped = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    array = np.frombuffer(mapped, np.float32, 1024, offset=0)
    with pytest.warns(UserWarning, match="not writable"):
        tensor = torch.from_numpy(array)
    with pytest.raises(penstock.MismatchError, match="may not write to"):
        penstock.open(path).load_into({"a": tensor})


@pytest.mark.parametrize("given", [3, [torch.zeros(3)], None, "x"])
def test_what_is_neither_module_nor_mapping_is_refused(opened, given):
    with pytest.raises(penstock.InvalidError, match="a torch module, a mapping of names to tensors"):
        opened.load_into(given)


@pytest.mark.parametrize("value", [3.0, [1, 2], None])
def test_a_value_that_is_no_tensor_is_refused_and_named(opened, value):
    with pytest.raises(penstock.InvalidError, match="step"):
        opened.load_into({"step": value})


def test_autograd_is_told_that_parameters_changed(write):
    path = model_file(write)
    model = Model()
    out = (model.head.weight * model.head.weight).sum()
    penstock.open(path).load_into(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_inference_tensors_can_be_loaded_into(write):
    path = model_file(write)
    with torch.inference_mode():
        model = Model()
        penstock.open(path).load_into(model)
    assert raw(model.head.weight) == Oracle(path)["head.weight"]


def test_nothing_to_load_is_no_error(opened):
    report = opened.load_into({}, strict=False)
    assert (report.nbytes, report.tensors, report.missing) == (0, 0, [])
    assert opened.load() and set(opened.last_report) - set(report) <= {"hand_out_seconds", "seconds_per_tensor"}


def test_a_load_that_fails_says_which_destinations_are_no_longer_what_they_were(write):
    path = write(*(Tensor(f"t{i}", "F32", (1 << 18,)) for i in range(16)))
    checkpoint = penstock.open(path)
    to = {name: torch.full((1 << 18,), 7.0) for name in checkpoint}

    # a file that shrinks between opening and loading
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(penstock.PenstockError) as caught:
        checkpoint.load_into(to)
    error = caught.value
    assert "model.safetensors" in str(error)
    changed = [name for name, tensor in to.items() if not bool((tensor == 7.0).all())]
    assert changed == error.touched
    assert ("overwritten, wholly or in part" in str(error)) == bool(error.touched)


@pytest.mark.parametrize(
    "views",
    [
        lambda x: (x[:4, :4], x[:4, :4].t()),
        lambda x: (x[0:4, 0:4], x[2:6, 2:6]),
        lambda x: (x[0:4, 0:8:2], x[0:4, 2:6]),
        lambda x: (x.view(-1)[:16].view(4, 4), x[0:4, 0:4]),
    ],
    ids=["transposed", "windows", "every second", "one contiguous"],
)
def test_views_that_share_bytes_are_refused(write, views):
    path = write(Tensor("a", "F32", (4, 4)), Tensor("b", "F32", (4, 4)))
    a, b = views(torch.zeros(8, 8))
    with pytest.raises(penstock.MismatchError, match="overlaps"):
        penstock.open(path).load_into({"a": a, "b": b})
    with pytest.raises(penstock.MismatchError, match="overlaps"):
        penstock.open(path).load_into({"a": b.numpy(), "b": a.numpy()})
    assert not a.any()
    assert not b.any()


def test_views_that_interleave_without_sharing_a_byte_are_filled(write):
    path = write(*(Tensor(name, "F32", (4, 4)) for name in "abc"))
    fused = torch.zeros(12, 8)
    to = {"a": fused[0:8:2, 0:4], "b": fused[1:9:2, 0:4], "c": fused[0:4, 4:8]}
    penstock.open(path).load_into(to)
    Oracle(path).same({name: tensor.contiguous() for name, tensor in to.items()})
    backwards = np.zeros((12, 8), "float32")
    given = {"a": backwards[7::-2, 0:4], "b": backwards[6::-2, 0:4], "c": backwards[0:4, 4:8]}
    penstock.open(path).load_into(given)
    Oracle(path).same({name: np.ascontiguousarray(array) for name, array in given.items()})


def test_thousands_of_columns_of_one_matrix_are_not_compared_in_pairs(write, monkeypatch):
    columns = 2000
    path = write(*(Tensor(f"{i:04}", "F32", (3,)) for i in range(columns)))
    compared: list[object] = []
    exact = np.shares_memory

    def counted(*arguments, **options):
        compared.append(arguments)
        return exact(*arguments, **options)

    monkeypatch.setattr(np, "shares_memory", counted)
    matrix = torch.zeros(3, columns)
    to = {f"{i:04}": matrix[:, i] for i in range(columns)}
    penstock.open(path).load_into(to)
    assert not compared
    Oracle(path).same({name: tensor.contiguous() for name, tensor in to.items()})
    with pytest.raises(penstock.MismatchError, match=r"0007 overlaps 000[456]"):
        penstock.open(path).load_into(to | {"0007": matrix.view(-1)[6 : 6 + 3 * columns : columns - 1][:3]})
    assert 0 < len(compared) < 10 * columns


def test_what_is_said_to_interleave_shares_no_byte():
    """Views of all kinds, sharing bytes and not: where the short way says that they share none, numpy does too."""
    chance = random.Random(5)
    said, apart = 0, 0
    for _ in range(3000):
        rows, columns = chance.randrange(2, 9), chance.randrange(2, 9)
        matrix = np.zeros((rows, columns), chance.choice(["uint8", "float32"]))
        views = []
        for _ in range(chance.randrange(2, 5)):
            ends = [sorted(chance.sample(range(n + 1), 2)) for n in matrix.shape]
            steps = [chance.choice([1, 1, 2, -1]) for _ in ends]
            view = matrix[ends[0][0] : ends[0][1], ends[1][0] : ends[1][1]][:: steps[0], :: steps[1]]
            views.append(view.T if chance.random() < 0.3 else view)
        group = [(to, *_memory._span(to)) for to in map(_memory._numpy_memory, views)]
        group.sort(key=lambda entry: entry[1])
        pairs = itertools.combinations(views, 2)
        none = not any(np.shares_memory(a, b) for a, b in pairs)
        apart += none
        if _memory._interleave(group):
            said += 1
            assert none, [(v.shape, v.strides, v.__array_interface__["data"][0]) for v in views]
    assert said > 200
    assert apart > said


def test_windows_that_slide_over_themselves_are_refused(write):
    path = write(Tensor("a", "F32", (4, 4)))
    sliding = torch.zeros(16).as_strided((4, 4), (2, 1))
    with pytest.raises(penstock.MismatchError, match="share memory"):
        penstock.open(path).load_into({"a": sliding})
