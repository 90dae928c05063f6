"""Checkpoints to load, and what is in them by a reader that shares nothing with penstock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock.bench import page_cache, reference
from penstock.synthetic import layouts, synth
from penstock.synthetic.synth import Layout, Tensor

MIB = 1 << 20
#: Small checkpoints everywhere: for a machine where only the suite itself is tried.
QUICK = os.environ.get("PENSTOCK_SELFTEST_QUICK") == "1"

#: Odd sizes, and data that the file aligns to nothing.
CROOKED = [
    Tensor("u8", "U8", (3,)),
    Tensor("f32", "F32", (1000, 7)),
    Tensor("scalar", "F32", ()),
    Tensor("bf16", "BF16", (5,)),
    Tensor("hollow", "F16", (0, 4)),
    Tensor("f64", "F64", (333,)),
    Tensor("bool", "BOOL", (13,)),
    Tensor("e4", "F8_E4M3", (11, 3)),
    Tensor("e5", "F8_E5M2", (64, 64)),
    Tensor("i8", "I8", (129,)),
    Tensor("wide", "BF16", (301, 4096)),
    Tensor("columns", "F32", (2048, 1024)),
]

NAMES = ["gpt2", "moe", "many", "crooked", "large", "sharded"]


def gpt2(width: int) -> Layout:
    """GPT-2's 160 tensors, narrower."""
    by = {768 * n: width * n for n in (1, 3, 4)} | {50257: 5025, 1024: 128}
    return Layout(
        "gpt2",
        tuple(
            tuple(Tensor(t.name, t.dtype, tuple(by.get(n, n) for n in t.shape)) for t in shard)
            for shard in layouts.build("gpt2").shards
        ),
    )


def write(name: str, folder: Path) -> Path:
    """Writes one of `NAMES`; a file, or a folder with shards and their index."""
    layers = 8 if QUICK else 40
    large = [Tensor(f"layers.{i}.w", "F32", (9, 1 << 18)) for i in range(layers)]
    if name == "gpt2":
        return synth.write(gpt2(128), folder / name)
    if name == "moe":
        return synth.write(synth.qwen3_moe(20e6 if QUICK else 100e6), folder / name)
    if name == "many":
        return synth.write(synth.many_tensors(1, 24, 1) if QUICK else synth.many_tensors(2, 48, 2), folder / name)
    if name == "crooked":
        return synth.write_file(folder / "crooked.safetensors", CROOKED, align=1, spaces=5)
    if name == "large":
        return synth.write_file(folder / "large.safetensors", large)
    third = len(large) // 3
    return synth.write(Layout(name, (tuple(large[:third]), tuple(large[third:]))), folder / name)


def content(source: Path) -> dict[str, bytes]:
    """The bytes of every tensor."""
    return {name: reference.raw(entry).tobytes() for name, entry in reference.entries_of(source).items()}


def evict(source: Path) -> None:
    page_cache.evict(reference.files_of(source))


def same(gpu: Any, tensors: dict[str, Any], expected: dict[str, bytes]) -> None:
    """Asserts that these are those tensors, byte for byte."""
    assert sorted(tensors) == sorted(expected)
    wrong = [name for name, tensor in tensors.items() if gpu.raw(tensor) != expected[name]]
    assert wrong == [], f"{len(wrong)} of {len(expected)} tensors differ, the first ones {wrong[:5]}"
