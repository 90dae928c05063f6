"""vLLM reads LoRA adapters with `safetensors.safe_open`: `penstock.patch()` reaches it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import penstock
import pytest
import safetensors
import torch
from quantised import tensor
from tiny_models import Tensors, save
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm_model import as_bytes

RANK, HIDDEN, INNER = 8, 256, 512
MODULES = {"q_proj": (HIDDEN, HIDDEN), "o_proj": (HIDDEN, HIDDEN), "down_proj": (INNER, HIDDEN)}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    random.seed(0)
    tensors: Tensors = {}
    for layer in range(4):
        for module, (inputs, outputs) in MODULES.items():
            place = "mlp" if module == "down_proj" else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{place}.{module}"
            tensors[f"{name}.lora_A.weight"] = tensor("BF16", RANK, inputs)
            tensors[f"{name}.lora_B.weight"] = tensor("BF16", outputs, RANK)
    save(tmp_path / "adapter_model.safetensors", tensors)
    settings = {"r": RANK, "lora_alpha": RANK, "target_modules": list(MODULES), "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    return tmp_path


def load(adapter: Path) -> dict[str, torch.Tensor]:
    """All matrices of an adapter by name, as vLLM loads it."""
    helper = PEFTHelper.from_local_dir(str(adapter), 128)
    model = LoRAModel.from_local_checkpoint(str(adapter), set(MODULES), helper, device="cpu", dtype=torch.bfloat16)
    found = {}
    for name, layer in model.loras.items():
        found[f"{name}.a"], found[f"{name}.b"] = layer.lora_a, layer.lora_b
    return found


def test_an_adapter(adapter: Path, monkeypatch: pytest.MonkeyPatch):
    theirs = load(adapter)
    assert len(theirs) == 2 * 4 * len(MODULES)
    opened = []
    with penstock.patch():
        safe_open = safetensors.safe_open
        assert safe_open.__module__.startswith("penstock")
        monkeypatch.setattr(
            safetensors, "safe_open", lambda path, **more: opened.append(path) or safe_open(path, **more)
        )
        mine = load(adapter)
        monkeypatch.undo()
    assert opened == [str(adapter / "adapter_model.safetensors")]
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(as_bytes(mine[name]), as_bytes(theirs[name]))] == []
