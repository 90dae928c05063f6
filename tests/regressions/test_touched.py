"""`load_into` fails after one of its parts has succeeded: what that part wrote is reported too."""

import penstock
import pytest
import torch
from penstock import _into
from synth import Tensor


def test_destinations_that_were_filled_before_the_failure_count_as_touched(write, monkeypatch):
    path = write(Tensor("straight", "F32", (8, 8)), Tensor("roundabout", "F32", (8, 8)))
    straight, roundabout = torch.zeros(8, 8), torch.zeros(8, 8).t()

    def fails(*_):
        raise penstock.PenstockError("on purpose")

    monkeypatch.setattr(_into, "_copy_through", fails)
    with pytest.raises(penstock.PenstockError) as caught:
        penstock.open(path).load_into({"straight": straight, "roundabout": roundabout})
    assert straight.any()
    assert caught.value.touched == ["straight"]
    assert "straight" in str(caught.value)
