"""`load_into` fails after one of its parts has succeeded: what that part wrote is reported too."""

import sys

import numpy as np
import penstock
import pytest
import torch
from penstock import _into
from penstock.synthetic.synth import Tensor


def test_destinations_that_were_filled_before_the_failure_count_as_touched(write, monkeypatch):
    path = write(Tensor("straight", "F32", (8, 8)), Tensor("roundabout", "F32", (8, 8)))
    straight, roundabout = torch.zeros(8, 8), np.zeros((8, 8), np.float32)[::-1]

    def fails(*_):
        raise penstock.PenstockError("on purpose")

    monkeypatch.setattr(_into._Detour, "run", fails)
    with pytest.raises(penstock.PenstockError) as caught:
        penstock.open(path).load_into({"straight": straight, "roundabout": roundabout})
    assert straight.any()
    assert caught.value.touched == ["straight"]
    assert "straight" in str(caught.value)


@pytest.mark.parametrize("straight_first", [True, False])
def test_after_ctrl_c_too_it_is_known_which_destinations_changed(write, monkeypatch, straight_first):
    path = write(Tensor("a", "F32", (8, 8)), Tensor("b", "F32", (8, 8)))
    into = {name: torch.zeros(8, 8) for name in "ab"}
    if straight_first:
        into["b"] = into["b"].numpy()[::-1]

    def interrupted(*_):
        raise KeyboardInterrupt

    # Between the two halves, or before anything has been read
    monkeypatch.setattr(*((_into._Detour, "run") if straight_first else (_into, "_Part")), interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        penstock.open(path).load_into(into)
    assert caught.value.touched == [name for name in "ab" if into[name].any()] == (["a"] if straight_first else [])
    if sys.version_info >= (3, 11):
        said = "overwritten, wholly or in part: a (" if straight_first else "no destination was changed"
        assert said in caught.value.__notes__[0]
