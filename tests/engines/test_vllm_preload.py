"""`vllm preload --load-format penstock`: vLLM's weight daemons load with Penstock, and engines map what they hold.

`preloading.py` says what of vLLM is replaced on a machine without a GPU: CUDA IPC, and no more than that needs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_vllm_group import TOGETHER, group

pytest.importorskip("vllm.model_executor.model_loader.weight_cache", reason="this vLLM has no weight daemons")

RANKS = 2


@pytest.mark.parametrize(("model", "options"), [("llama", {}), ("qwen3-moe", TOGETHER)], ids=["llama", "qwen3-moe"])
def test_daemons_load_with_penstock_and_an_engine_maps_the_parameters_that_safetensors_gives(
    model: str, options: dict[str, Any], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as sockets:
        given = {"folder": str(checkpoint(model)), "options": options, "sockets": sockets}
        with group(tmp_path / "ranks", RANKS, "preloaded", **given) as ranks:
            found = ranks.said()
    for one in found:
        assert one["daemon"]["loader"] == ["penstock.integrations._vllm_loader"]
        assert one["daemon"]["left"] == []
        (report,) = one["daemon"]["reports"]
        assert (report["loads"], report["fallbacks"], report["materialised"]) == (1, [], {})
        assert one["engine"] == "IpcModelLoader"
        assert one["tensors"] > 0 and one["different"] == []
    if options:
        both = [one["daemon"]["reports"][0]["exchange"] for one in found]
        assert sum(e["sent_bytes"] for e in both) == sum(e["received_bytes"] for e in both) > 0
