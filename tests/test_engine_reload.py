"""Reloads copy at once, from parts that are read ahead; `tgis.Weights` gives shards by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import penstock
import pytest
import torch
from conftest import same
from penstock._errors import MissingDtypeError
from penstock.integrations._deferred import Deferred
from penstock.integrations._recorder import Recorder
from penstock.integrations._reload import Reloader, cuts_of
from penstock.integrations.tgis import Weights
from penstock.synthetic.synth import Tensor

Write = Callable[..., Path]


LAYERS = [
    *(Tensor(f"layers.{i}.down", "BF16", (32, 64)) for i in range(3)),
    *(Tensor(f"layers.{i}.up", "F32", (64, 32)) for i in range(3)),
    Tensor("norm", "F32", (32,)),
    Tensor("scale", "F32", ()),
    Tensor("unused", "F32", (128, 128)),
]


@pytest.fixture
def path(write: Write) -> Path:
    return write(*LAYERS)


class Model(torch.nn.Module):
    """Half of the columns of `down`, half of the rows of `up`, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.down = [torch.zeros(32, 32, dtype=torch.bfloat16) for _ in range(3)]
        self.up = [torch.zeros(32, 32) for _ in range(3)]
        self.norm, self.scale = torch.zeros(32), torch.zeros(4)

    def load_weights(self, weights) -> list[str]:
        order = []
        for name, tensor in weights:
            assert isinstance(tensor, Deferred)
            order.append(name)
            if name == "norm":
                self.norm.copy_(tensor)
            elif name == "scale":
                self.scale[2] = tensor
            elif name.endswith("down"):
                self.down[int(name.split(".")[1])].copy_(tensor.narrow(1, 32, 32))
            elif name.endswith("up"):
                self.up[int(name.split(".")[1])].copy_(tensor.t().chunk(2, 1)[0])
        return order

    def bytes(self) -> bytes:
        return b"".join(t.view(torch.uint8).numpy().tobytes() for t in [*self.down, *self.up, self.norm, self.scale])


def test_a_reload_copies_at_once_what_was_read_ahead_layer_by_layer(path: Path):
    checkpoint = penstock.open(path)
    first, again = Model(), Model()
    recorder = Recorder(checkpoint)
    with recorder.barrier():
        first.load_weights(recorder.weights())
        recorder.run()
    reloader = Reloader(checkpoint, None, torch.device("cpu"), None, cuts_of(recorder.layout))
    seen = []

    def weights():
        for name, tensor in reloader.weights():
            yield name, tensor
            if name == "layers.0.up":
                seen.append(again.up[0].clone())

    order = again.load_weights(weights())
    assert again.bytes() == first.bytes()
    assert seen[0].any(), "the copy was made before the next tensor came"
    assert reloader.read_besides == 0
    layered = [name for name in order if name.startswith("layers")]
    assert [name.split(".")[1] for name in layered] == ["0", "0", "1", "1", "2", "2"]
    assert checkpoint.last_report is not None
    assert checkpoint.last_report.nbytes == 3 * 32 * 32 * 2 + 3 * 32 * 32 * 4 + 32 * 4 + 4, "and nothing of `unused`"


def test_what_was_not_read_ahead_is_read_when_it_is_needed(path: Path):
    checkpoint = penstock.open(path)
    first, again = Model(), Model()
    recorder = Recorder(checkpoint)
    with recorder.barrier():
        first.load_weights(recorder.weights())
        recorder.run()
    cuts = cuts_of(recorder.layout)
    del cuts["norm"]
    cuts["layers.1.down"] = (slice(0, 16), slice(32, 64))  # a part of what is copied
    cuts["layers.2.up"] = (slice(0, 640), slice(0, 32))  # of a tensor of another shape
    reloader = Reloader(checkpoint, None, torch.device("cpu"), None, cuts)
    again.load_weights(reloader.weights())
    assert again.bytes() == first.bytes()
    assert reloader.read_besides == 32 * 32 * 2 + 32 * 32 * 4 + 32 * 4


def test_a_dtype_that_torch_lacks_is_an_error_before_anything_is_read(write: Write):
    path = write(Tensor("a", "F32", (4,)), Tensor("b", "F6_E2M3", (8,)))
    with pytest.raises(MissingDtypeError, match="F6_E2M3") as caught:
        Reloader(penstock.open(path), None, torch.device("cpu"), None, {})
    assert caught.value.tensor == "b"
    reloader = Reloader(penstock.open(path), lambda name: name == "a", torch.device("cpu"), None, {})
    assert [name for name, _ in reloader.weights()] == ["a"]


# --- tgis ---


class Group:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_get_their_shards(path: Path, ranks: int):
    eager = penstock.open(path).load()
    for rank in range(ranks):
        weights = Weights(path, "cpu", torch.bfloat16, Group(rank, ranks), {"final": ["gone", "norm"]}, "layers")
        rows, columns = 64 // ranks, 64 // ranks
        up, down = eager["layers.0.up"].bfloat16(), eager["layers.0.down"]
        assert weights.get_shape("0.up") == [64, 32]
        assert same(weights.get_tensor("final"), eager["norm"].bfloat16())
        assert same(weights.get_sharded("0.up", 0), up[rank * rows : (rank + 1) * rows])
        assert same(weights.get_partial_sharded("0.down", 1), down[:, rank * columns : (rank + 1) * columns])
    assert weights.get_filename("final") == (str(path), "norm")


def test_shards_of_several_tensors_are_one_tensor_and_one_load(write: Write):
    path = write(*(Tensor(f"{name}.weight", "F32", (rows, 16)) for name, rows in (("q", 32), ("k", 8), ("v", 8))))
    eager = penstock.open(path).load()
    for rank in range(2):
        weights = Weights(path, "cpu", torch.float16, Group(rank, 2))
        expected = [eager[f"{n}.weight"].half().chunk(2)[rank] for n in "qkv"]
        assert same(weights.get_multi_weights_col(["q", "k", "v"]), torch.cat(expected))
        assert weights.checkpoint.last_report.tensors == 3
        assert same(weights.get_multi_weights_row("q"), eager["q.weight"].half().chunk(2, 1)[rank])


def test_uneven_shards_and_unknown_names_are_errors(path: Path):
    weights = Weights(path, "cpu", None, Group(2, 3))
    assert weights.get_partial_sharded("norm", 0).shape == (10,)
    with pytest.raises(penstock.SliceError, match="3 ranks do not divide"):
        weights.get_sharded("norm", 0)
    with pytest.raises(penstock.SliceError, match="no dimension 1"):
        weights.get_sharded("norm", 1)
    with pytest.raises(penstock.UnknownTensorError, match="nothing"):
        weights.get_tensor("nothing")
    with pytest.raises(penstock.InvalidError, match="quantize"):
        weights.get_multi_weights_row("norm", "gptq")
