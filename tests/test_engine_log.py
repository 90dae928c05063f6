"""What the log says of an engine's load that read more than its rank wanted."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import penstock
import pytest
from penstock.integrations import _read_besides
from penstock.integrations._read_besides import read_besides
from penstock.synthetic.synth import Tensor

torch = pytest.importorskip("torch")
MB = 10**6


OFF = {"choice": "off", "reason": "asked for"}


def report(wanted: int, read: int, **more: Any) -> penstock.Report:
    return penstock.Report(nbytes=wanted, routes={"buffered": {"bytes": read, "extents": 1}}, **more)


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (report(100 * MB, 100 * MB), None),
        (report(100 * MB, 124 * MB, exchange=OFF), None),
        (report(10 * MB, 20 * MB, exchange=OFF), None),  # too few bytes to speak of
        (report(100 * MB, 300 * MB), None),  # one rank alone: nobody could read for it
        (report(100 * MB, 300 * MB, exchange=OFF), "300.00 MB were read for 100.00 MB that this rank wants, 3.0 times"),
        (
            report(100 * MB, 100 * MB, exchange=OFF, network={"received_bytes": 310 * MB}),
            "310.00 MB were read for 100.00 MB",
        ),
        (report(100 * MB, 300 * MB, exchange={"choice": "on", "reason": "asked for"}), None),
    ],
)
def test_a_load_that_read_much_more_than_it_wanted_says_so_and_what_helps(of, said):
    found = read_besides(of)
    assert (found is None) == (said is None)
    if said is not None:
        assert said in found and "row-parallel" in found and '\'{"exchange": "on"}\'' in found


def test_what_ranks_have_found_out_is_told_and_not_advised_against():
    found = read_besides(report(100 * MB, 300 * MB, exchange={"choice": "off", "reason": "tried: 1.0 s, 2.0 s"}))
    assert found is not None and "tried: 1.0 s" in found and '"exchange"' not in found


def test_a_quarter_of_the_columns_is_such_a_load(write, monkeypatch, caplog):
    """As a rank of four wants it of a row-parallel weight: rows of 2 KiB, and 6 KiB between them."""
    from penstock.integrations._engine import Loads

    monkeypatch.setattr(_read_besides, "_LEAST", 1 << 20)
    path = write(Tensor("down_proj.weight", "BF16", (512, 4096)))
    target = torch.empty(512, 1024, dtype=torch.bfloat16)
    of = penstock.open(path).load_into(
        {"down_proj.weight": target}, slices={"down_proj.weight": (slice(None), slice(0, 1024))}, progress=False
    )
    assert of["nbytes"] == 1 << 20
    of["exchange"] = OFF  # as of a rank of a group
    loads = Loads.__new__(Loads)
    loads.recorders, loads.fallbacks, loads.group = [SimpleNamespace(run=lambda model, group: of)], [], None
    with caplog.at_level(logging.WARNING, "penstock"):
        loads.run(torch.nn.Module())
    assert "MB were read for 1.05 MB that this rank wants, 4.0 times as many: row-parallel" in caplog.text
