"""Libraries that load with safetensors: tiny models for them, and what they do patched and unpatched."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import penstock
import pytest
import torch
from conftest import raw
from penstock.bench import reference

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def library(name: str) -> Any:
    """A library, imported, or the test is skipped."""
    pytest.importorskip(name.partition(".")[0])
    return importlib.import_module(name)


def names_in(folder: Path) -> list[str]:
    """The names of all tensors in the files of a folder."""
    return sorted(name for path in folder.glob("*.safetensors") for name in reference.entries_of(path))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What a rank holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def ties(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names that stand for the same memory."""
    at: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        at.setdefault(local(tensor).data_ptr(), []).append(name)
    return sorted(names for names in at.values() if len(names) > 1)


def same(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Asserts that two modules have the same tensors: names, kinds, dtypes, devices, ties and bits."""
    mine, yours = ours.state_dict(keep_vars=True), theirs.state_dict(keep_vars=True)
    assert list(mine) == list(yours)
    assert ties(mine) == ties(yours)
    for name, tensor in yours.items():
        other = mine[name]
        assert type(other) is type(tensor), name
        assert (other.dtype, other.device, other.shape) == (tensor.dtype, tensor.device, tensor.shape), name
        assert (other.stride(), other.requires_grad) == (tensor.stride(), tensor.requires_grad), name
        assert type(local(other).data) is torch.Tensor, name
        assert raw(local(other)) == raw(local(tensor)), name


def both_ways(load: Callable[[], Any], loaded: list[str]) -> tuple[Any, Any]:
    """What ``load`` gives patched and unpatched; only patched anything is loaded by penstock."""
    theirs = load()
    assert loaded == []
    with penstock.patch():
        ours = load()
    assert loaded
    del loaded[:]
    again = load()
    assert loaded == []
    if isinstance(again, torch.nn.Module):
        same(again, theirs)
    return ours, theirs


def read(reports: Iterable[Any], gaps: bool = False) -> int:
    """Bytes of tensors that loads have read, having checked that they have read nothing else but what fills pages.

    With ``gaps`` also what lies between the pieces of a part: test_slices.py has the limits.
    """
    for report in reports:
        extents = sum(route["extents"] for route in report.routes.values())
        moved = sum(route["bytes"] for route in report.routes.values())
        assert moved == report.nbytes + report.slack_bytes + report.gap_bytes
        assert report.slack_bytes < 2 * 4096 * max(extents, 1)
        assert gaps or report.gap_bytes == 0
    return sum(report.nbytes for report in reports)


def nbytes_in(folder: Path) -> int:
    """Bytes of all tensors in the files of a folder."""
    return sum(e.nbytes for path in folder.glob("*.safetensors") for e in reference.entries_of(path).values())


def files_in(folder: Path) -> dict[str, bytes]:
    """The files of a folder and what they hold."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(**more: Any) -> Any:
    transformers = library("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, num_hidden_layers=3, **more))


def mixtral() -> Any:
    transformers = library("transformers")
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**TINY, num_hidden_layers=2, num_local_experts=4))


def t5() -> Any:
    transformers = library("transformers")
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "text": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "bf16": lambda: llama().to(torch.bfloat16),
    "moe": mixtral,
    "shared": t5,
}
