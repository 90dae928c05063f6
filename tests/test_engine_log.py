"""What the log says of an engine's load that read more than its rank wanted."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
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
    loads = Loads(torch.device("cpu"), None)
    loads.recorders = [SimpleNamespace(run=lambda model, group: of, end=lambda: None)]
    with caplog.at_level(logging.WARNING, "penstock"):
        loads.run(torch.nn.Module())
    assert "MB were read for 1.05 MB that this rank wants, 4.0 times as many: row-parallel" in caplog.text


def test_a_tensor_of_the_index_that_no_shard_has_is_told(small: Path, tmp_path: Path, caplog: Any) -> None:
    from penstock.integrations._engine import Chosen

    folder = shutil.copytree(small, tmp_path / "model")
    (index,) = folder.glob("*.index.json")
    shards = sorted(map(str, folder.glob("*.safetensors")))

    def said(files: list[str]) -> list[str]:
        caplog.clear()
        Chosen(files).opened(None)
        return [text for text in caplog.messages if "in no shard file" in text]

    assert said(shards) == []
    found = json.loads(index.read_text())
    last = Path(shards[-1]).name
    found["weight_map"] |= {"gone": last, "lost": last}
    index.write_text(json.dumps(found))
    (text,) = said(shards)
    lacking = f"2 tensors of the index are in no shard file, so this checkpoint lacks them: 'gone' ({last}), 'lost'"
    assert text.startswith(f"penstock: {index}: {lacking}")
    assert said(shards[:2]) == [], "an engine may choose some of the files"
    index.write_text("[]")
    assert said(shards) == []
