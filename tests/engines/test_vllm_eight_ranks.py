"""Each of eight ranks in turn, in one process: loading exchanges nothing, so vLLM only has to believe its rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import stubs
from vllm.distributed import parallel_state
from vllm_model import loaded_twice

RANKS = 8


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("rank", range(RANKS))
def test_deepseek_with_fp8_blocks(rank: int, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    stubs.make_quantised_layers(monkeypatch)
    group = parallel_state.get_tp_group()
    monkeypatch.setattr(group, "world_size", RANKS)
    monkeypatch.setattr(group, "rank_in_group", rank)
    folder = checkpoint("eighths-deepseek.fp8-blocks")
    result = loaded_twice({"model": str(folder)}, folder.with_suffix(".inverse"))
    assert result["different"] == result["deferred"] == result["moved"] == []
    (report,) = result["reports"]
    assert report["loads"] == 1
    assert report["copied_through"] == []
    assert report["materialised"] == {}
    assert report["nbytes"] == result["from_files"]
    everything = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert report["nbytes"] < everything / 2
