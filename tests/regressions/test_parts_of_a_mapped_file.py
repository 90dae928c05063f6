"""A load of every second tensor of a mapped file failed with "a block was used before it was granted" (November 2026).

The tensors of one stretch of a file land at a distance from its first block. The engine thread let go of that block
when its own tensors were complete, and reads that started later did not find it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock
import pytest
from conftest import Oracle, raw
from penstock.synthetic.synth import Tensor


@pytest.mark.parametrize("options", [{}, {"copy": True}, {"copy": True, "gap": 1 << 20}], ids=str)
@pytest.mark.parametrize("streamed", [False, True])
def test_blocks_of_one_stretch_arrive_one_after_the_other(
    write: Callable[..., Path], options: dict[str, Any], streamed: bool
) -> None:
    path = write(*(Tensor(f"t{i}", "U8", (32768,)) for i in range(200)))
    names = [f"t{i}" for i in range(0, 200, 2)]
    checkpoint = penstock.open(path)
    options = {**options, "extent": 65536}
    found = (
        dict(checkpoint.stream(names=names, options=options))
        if streamed
        else checkpoint.load(names=names, options=options)
    )
    oracle = Oracle(path)
    assert list(found) == names
    for name, tensor in found.items():
        assert raw(tensor) == oracle[name]
