"""`safe_open.prefetch`: tensors by name or as they come, once each; and what the header says of them."""

from __future__ import annotations

from pathlib import Path

import penstock
import pytest
from conftest import Oracle, raw
from penstock._prefetch import PrefetchLoader
from penstock.synthetic.synth import Tensor

safetensors = pytest.importorskip("safetensors")


def test_every_tensor_comes_once(small: Path):
    with penstock.safe_open(small) as file, file.prefetch() as loader:
        assert loader.names() == file.offset_keys()
        assert len(loader) == len(file.keys())
        Oracle(small).same(dict(loader))
        assert list(loader) == []
        with pytest.raises(penstock.UnknownTensorError, match="before"):
            loader.take("step")


@pytest.mark.parametrize("window", [1, "1GiB"])
def test_tensors_are_taken_by_name_in_any_order(big: Path, window: object):
    whole = penstock.load_file(big)
    with penstock.safe_open(big, options={"window": window, "copy": True}) as file:
        loader = file.prefetch()
        for name in reversed(loader.names()):
            assert raw(loader.take(name)) == raw(whole[name])
        loader.close()


def test_what_was_taken_is_not_iterated_over(small: Path):
    with penstock.safe_open(small) as file, file.prefetch() as loader:
        assert loader.take("norm.weight").shape == (37,)
        assert "norm.weight" not in dict(loader)


def test_a_plan_says_which_tensors_and_which_part(small: Path):
    plan = {"layers.0.attn.weight": slice(4, 12), "wide": (slice(None), slice(2, 4)), "step": None}
    with penstock.safe_open(small) as file:
        whole = file.get_tensors()
        with file.prefetch(plan, threads=2) as loader:
            assert sorted(loader.names()) == sorted(plan)
            assert raw(loader.take("wide")) == raw(whole["wide"][:, 2:4].contiguous())
            assert raw(loader.take("layers.0.attn.weight")) == raw(whole["layers.0.attn.weight"][4:12])
            with pytest.raises(penstock.UnknownTensorError, match="not in the plan"):
                loader.take("mask")
        with pytest.raises(penstock.UnknownTensorError):
            file.prefetch({"nothing": None})


def test_a_closed_loader_says_so_and_its_tensors_live_on(small: Path):
    with penstock.safe_open(small) as file:
        loader = file.prefetch()
    tensor = loader.take("wide")
    loader.close()
    loader.close()
    assert raw(tensor) == Oracle(small)["wide"]
    with pytest.raises(penstock.InvalidError, match="closed"):
        loader.take("step")


def test_a_loader_that_is_dropped_leaves_nothing_running(big: Path):
    with penstock.safe_open(big, options={"copy": True}) as file:
        loader: PrefetchLoader = file.prefetch()
        next(iter(loader))
        del loader


def test_what_the_header_says_of_a_tensor(small: Path):
    for path in sorted(small.glob("*.safetensors")):
        with penstock.safe_open(path) as file, safetensors.safe_open(path, framework="pt") as theirs:
            end = 0
            for name in file.offset_keys():
                meta, slice_ = file.get_tensor_meta(name), theirs.get_slice(name)
                assert (meta.dtype, meta.shape) == (slice_.get_dtype(), slice_.get_shape())
                assert meta.data_offsets[0] == end
                end = meta.data_offsets[1]
            with pytest.raises(penstock.UnknownTensorError):
                file.get_tensor_meta("nothing")


def test_a_tensor_that_is_lost_on_its_way_out_is_an_error_and_no_endless_wait(write, monkeypatch):
    path = write(*(Tensor(name, "F32", (8,)) for name in "abc"))
    opened = penstock.safe_open(path, "np")
    loader = opened.prefetch()
    cast, armed = loader._adapter.cast, []

    def interrupted(tensor):
        if armed:
            armed.clear()
            raise KeyboardInterrupt
        return cast(tensor)

    monkeypatch.setattr(loader._adapter, "cast", interrupted)
    loader.take("a")
    armed.append(True)
    with pytest.raises(KeyboardInterrupt):
        loader.take("b")
    assert loader.take("c") is not None
    with pytest.raises(penstock.CancelledError, match="tensor b is lost"):
        loader.take("b")
    with pytest.raises(penstock.CancelledError, match="tensor b is lost"):
        list(loader)
