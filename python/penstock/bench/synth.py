"""Writes checkpoints with the tensor names, shapes, dtypes and sharding of public models, filled with random bytes.

The files are written here byte by byte (8-byte length, JSON header, data), not by any safetensors library, so that
they can be an oracle for one. The same layout and seed always give the same bytes, and a checkpoint that is already in
place is not written again.

    from penstock.bench.synth import gpt2, write
    folder = write(gpt2(), "/tmp/gpt2", seed=0)     # /tmp/gpt2/model.safetensors

On the command line: `python -m penstock.bench.synth gpt2 FOLDER [--nbytes 500e6] [--seed 0]`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

#: Bits per element of every dtype of the format.
BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}

_ABSENT: Any = object()
_POOL_BYTES = 8 << 20
_RECORD = ".synth.json"


@dataclass(frozen=True)
class Tensor:
    """One tensor of a header. `hole=True` leaves its bytes unwritten: zeros that take no room on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    hole: bool = False

    @property
    def nbytes(self) -> int:
        bits = math.prod(self.shape) * BITS[self.dtype]
        if bits % 8:
            raise ValueError(f"{self.name}: {self.shape} of {self.dtype} ends within a byte")
        return bits // 8


@dataclass(frozen=True)
class Layout:
    """The shards of a checkpoint, each a tuple of tensors in the order of their data."""

    name: str
    shards: tuple[tuple[Tensor, ...], ...]
    metadata: Mapping[str, str] | None = field(default_factory=lambda: {"format": "pt"})

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for shard in self.shards for tensor in shard]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def files(self) -> list[str]:
        """File names as the Hub spells them: one `model.safetensors`, or `model-00001-of-00004.safetensors`, ..."""
        count = len(self.shards)
        if count == 1:
            return ["model.safetensors"]
        return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


# --- files -----------------------------------------------------------------------------------------------------------


def header_bytes(tensors: Iterable[Tensor], metadata: Any = _ABSENT, align: int = 8, spaces: int = 0) -> bytes:
    """Length and JSON of a header whose data starts at a multiple of `align`, then shifted by `spaces` more bytes.

    `metadata` is a mapping, `None` for JSON null, or left out. `align=1` adds no padding, as older writers did.
    """
    document: dict[str, Any] = {} if metadata is _ABSENT else {"__metadata__": metadata}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        document[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % align + spaces)
    return len(text).to_bytes(8, "little") + text


def write_file(
    path: str | os.PathLike[str],
    tensors: Sequence[Tensor],
    *,
    seed: int | Sequence[int] = 0,
    metadata: Any = _ABSENT,
    align: int = 8,
    spaces: int = 0,
) -> Path:
    """Writes one safetensors file of random bytes and returns its path. BOOL tensors hold only 0 and 1.

    The file appears under its name when it is whole.
    """
    path = Path(path)
    header = header_bytes(tensors, metadata, align, spaces)
    total = len(header) + sum(tensor.nbytes for tensor in tensors)
    random = np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed)))
    pool = np.empty(0, dtype=np.uint8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb", buffering=1 << 20) as file:
        file.write(header)
        for tensor in tensors:
            if tensor.hole:
                file.seek(tensor.nbytes, os.SEEK_CUR)
                continue
            left = tensor.nbytes
            while left:
                if not pool.size:
                    pool = random.integers(0, 1 << 64, _POOL_BYTES // 8, dtype=np.uint64).view(np.uint8)
                data, pool = pool[:left], pool[left:]
                file.write((data & np.uint8(1) if tensor.dtype == "BOOL" else data).data)
                left -= data.size
        file.truncate(total)
    partial.rename(path)
    return path


def write(layout: Layout, folder: str | os.PathLike[str], *, seed: int = 0, align: int = 8) -> Path:
    """Writes every shard, and `model.safetensors.index.json` where there are several. Returns the folder.

    A folder that already holds this layout with this seed is left alone; one that holds something else of ours is
    replaced.
    """
    folder = Path(folder)
    record = folder / _RECORD
    # Of the text, not of a dictionary: dataclasses.asdict takes 10 s for 371,474 tensors
    fingerprint = hashlib.sha256(repr((layout, seed, align, "writer 2")).encode()).hexdigest()
    if record.exists():
        written = json.loads(record.read_text())
        sizes = {name: (folder / name).stat().st_size for name in written["sizes"] if (folder / name).exists()}
        if written["fingerprint"] == fingerprint and written["sizes"] == sizes:
            return folder
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)

    sizes = {}
    for number, (name, shard) in enumerate(zip(layout.files, layout.shards, strict=True)):
        path = write_file(folder / name, shard, seed=(seed, number), metadata=layout.metadata, align=align)
        sizes[name] = path.stat().st_size
    if len(layout.shards) > 1:
        index = {
            "metadata": {"total_size": layout.nbytes},
            "weight_map": {
                tensor.name: name for name, shard in zip(layout.files, layout.shards, strict=True) for tensor in shard
            },
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    record.write_text(json.dumps({"fingerprint": fingerprint, "sizes": sizes}))
    return folder


# --- layouts ---------------------------------------------------------------------------------------------------------


def _file_order(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The order in which safetensors' own writer puts tensors: widest dtype first, then by name."""
    return tuple(sorted(tensors, key=lambda tensor: (-BITS[tensor.dtype], tensor.name)))


def _shard(tensors: Sequence[Tensor], count: int) -> tuple[tuple[Tensor, ...], ...]:
    """Cuts tensors in model order into `count` shards of about equal bytes."""
    total = sum(tensor.nbytes for tensor in tensors)
    shards: list[list[Tensor]] = [[] for _ in range(count)]
    taken = 0
    for tensor in tensors:
        shards[min(count - 1, taken * count // max(total, 1))].append(tensor)
        taken += tensor.nbytes
    return tuple(_file_order(shard) for shard in shards)


def gpt2() -> Layout:
    """GPT-2 (124M) as the Hub's `gpt2` holds it: 160 F32 tensors with the `attn.bias` masks, 548,090,880 bytes."""
    width = 768
    tensors = [
        Tensor("wte.weight", "F32", (50257, width)),
        Tensor("wpe.weight", "F32", (1024, width)),
        Tensor("ln_f.weight", "F32", (width,)),
        Tensor("ln_f.bias", "F32", (width,)),
    ]
    for layer in range(12):
        shapes: dict[str, tuple[int, ...]] = {
            "ln_1.weight": (width,),
            "ln_1.bias": (width,),
            "attn.bias": (1, 1, 1024, 1024),
            "attn.c_attn.weight": (width, 3 * width),
            "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (width, width),
            "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,),
            "ln_2.bias": (width,),
            "mlp.c_fc.weight": (width, 4 * width),
            "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (4 * width, width),
            "mlp.c_proj.bias": (width,),
        }
        tensors += [Tensor(f"h.{layer}.{name}", "F32", shape) for name, shape in shapes.items()]
    return Layout("gpt2", (_file_order(tensors),))


def llama(nbytes: float = 3e9, shards: int = 3, dtype: str = "BF16") -> Layout:
    """Llama-2-7B's tensors with as many of its 32 layers as fit into `nbytes` (at least one).

    Below about 0.7 GB, where two embeddings and one layer do not fit, the widths shrink and four layers are kept.
    """
    vocabulary, width, inner, layers = 32000, 4096, 11008, 32

    def tensors(vocabulary: int, width: int, inner: int, layers: int) -> list[Tensor]:
        square = (width, width)
        found = [Tensor("model.embed_tokens.weight", dtype, (vocabulary, width))]
        for layer in range(layers):
            shapes: dict[str, tuple[int, ...]] = {
                "self_attn.q_proj.weight": square,
                "self_attn.k_proj.weight": square,
                "self_attn.v_proj.weight": square,
                "self_attn.o_proj.weight": square,
                "mlp.gate_proj.weight": (inner, width),
                "mlp.up_proj.weight": (inner, width),
                "mlp.down_proj.weight": (width, inner),
                "input_layernorm.weight": (width,),
                "post_attention_layernorm.weight": (width,),
            }
            found += [Tensor(f"model.layers.{layer}.{name}", dtype, shape) for name, shape in shapes.items()]
        found += [Tensor("model.norm.weight", dtype, (width,)), Tensor("lm_head.weight", dtype, (vocabulary, width))]
        return found

    def size(*dimensions: int) -> int:
        return sum(tensor.nbytes for tensor in tensors(*dimensions))

    empty, one = size(vocabulary, width, inner, 0), size(vocabulary, width, inner, 1)
    if one <= nbytes:
        layers = min(layers, int((nbytes - empty) // (one - empty)))
    else:
        layers = 4
        while size(vocabulary, width, inner, layers) > nbytes and width > 64:
            width -= 64
            vocabulary, inner = width * 32000 // 4096, width * 11008 // 4096
    return Layout("llama", _shard(tensors(vocabulary, width, inner, layers), shards))


def qwen3_moe(nbytes: float = 3e9, shards: int = 4, dtype: str = "BF16") -> Layout:
    """Qwen3-MoE's names with 128 experts a layer, cut to 9,266 tensors, widths shrunk to fit into `nbytes`.

    23 whole layers, a last one that keeps 72 of its experts, and tied embeddings.
    """
    layers, experts, last_experts = 24, 128, 72

    def tensors(width: int) -> list[Tensor]:
        # Ratios of Qwen3-30B-A3B: hidden 2048, expert 768, 32 query and 4 key/value heads of 128, vocabulary 151,936.
        head, inner = width // 16, width * 768 // 2048
        queries, keys, vocabulary = 32 * head, 4 * head, width * 151936 // 2048
        found = [Tensor("model.embed_tokens.weight", dtype, (vocabulary, width))]
        for layer in range(layers):
            count = experts if layer + 1 < layers else last_experts
            shapes: dict[str, tuple[int, ...]] = {
                "self_attn.q_proj.weight": (queries, width),
                "self_attn.k_proj.weight": (keys, width),
                "self_attn.v_proj.weight": (keys, width),
                "self_attn.o_proj.weight": (width, queries),
                "self_attn.q_norm.weight": (head,),
                "self_attn.k_norm.weight": (head,),
                "mlp.gate.weight": (count, width),
                "input_layernorm.weight": (width,),
                "post_attention_layernorm.weight": (width,),
            }
            for expert in range(count):
                shapes[f"mlp.experts.{expert}.gate_proj.weight"] = (inner, width)
                shapes[f"mlp.experts.{expert}.up_proj.weight"] = (inner, width)
                shapes[f"mlp.experts.{expert}.down_proj.weight"] = (width, inner)
            found += [Tensor(f"model.layers.{layer}.{name}", dtype, shape) for name, shape in shapes.items()]
        found.append(Tensor("model.norm.weight", dtype, (width,)))
        return found

    width = 2048
    while width > 16 and sum(tensor.nbytes for tensor in tensors(width)) > nbytes:
        width -= 16
    return Layout("qwen3_moe", _shard(tensors(width), shards))


def many_tensors(layers: int = 60, experts: int = 512, shards: int = 11) -> Layout:
    """A 512-expert MoE in NVFP4, tiny data: 371,474 tensors in 11 shards with 37 MB of headers, as large as they get.

    Each expert's projection is packed nibbles (U8), block scales (F8_E4M3) and two scalar scales (F32). Fewer layers
    or experts give a smaller one.
    """

    def quantised(name: str) -> list[Tensor]:
        return [
            Tensor(f"{name}.weight", "U8", (4, 16)),
            Tensor(f"{name}.weight_scale", "F8_E4M3", (4, 2)),
            Tensor(f"{name}.weight_scale_2", "F32", ()),
            Tensor(f"{name}.input_scale", "F32", ()),
        ]

    found = [Tensor("model.embed_tokens.weight", "BF16", (256, 32))]
    for layer in range(layers):
        block = f"layers.{layer}"
        attention = "self_attn" if layer % 4 == 3 else "linear_attn"
        for name in ("input_layernorm", "post_attention_layernorm", f"{attention}.norm", f"{attention}.conv1d"):
            found.append(Tensor(f"{block}.{name}.weight", "BF16", (32,)))
        for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"):
            found += quantised(f"{block}.{attention}.{name}")
        found += [Tensor(f"{block}.{attention}.{name}", "F32", (4,)) for name in ("A_log", "dt_bias")]
        found += [Tensor(f"{block}.mlp.{name}.weight", "BF16", (8, 32)) for name in ("gate", "shared_expert_gate")]
        for projection in ("gate_proj", "up_proj", "down_proj"):
            found += quantised(f"{block}.mlp.shared_expert.{projection}")
        for expert in range(experts):
            for projection in ("w1", "w2", "w3"):
                found += quantised(f"{block}.mlp.experts.{expert}.{projection}")
    found += [Tensor("model.norm.weight", "BF16", (32,)), Tensor("lm_head.weight", "BF16", (256, 32))]
    if (layers, experts) == (60, 512):
        parts = ("attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias", "norm1.weight", "norm1.bias")
        visual = [f"visual.blocks.{block}.{part}" for block in range(72) for part in parts]
        found += [Tensor(name, "BF16", (32,)) for name in visual[: 371_474 - len(found)]]
    return Layout("many_tensors", _shard(found, shards))


def every_dtype() -> list[Tensor]:
    """A scalar, an empty tensor, a vector and a block of every dtype of the format, in an order that misaligns none.

    A scalar needs a whole byte, so F4 and F6 have none.
    """
    tensors = []
    for dtype, bits in BITS.items():
        shapes: dict[str, tuple[int, ...]] = {"empty": (0,), "hollow": (3, 0, 5), "vector": (24,), "block": (3, 4, 8)}
        if bits >= 8:
            shapes |= {"scalar": (), "odd": (7, 11)}
        tensors += [Tensor(f"{dtype.lower()}.{kind}", dtype, shape) for kind, shape in shapes.items()]
    return list(_file_order(tensors))


LAYOUTS: dict[str, Callable[..., Layout]] = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen3_moe": qwen3_moe,
    "many_tensors": many_tensors,
}


def natural_order(name: str) -> list[tuple[int, int | str]]:
    """Sort key in which `layers.2` comes before `layers.10`."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint with the layout of a public model.")
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nbytes", type=float, help="bytes of the layouts that can be cut: llama, qwen3_moe")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    layout = LAYOUTS[arguments.layout](**({} if arguments.nbytes is None else {"nbytes": arguments.nbytes}))
    folder = write(layout, arguments.folder, seed=arguments.seed)
    print(f"{folder}: {len(layout.tensors):,} tensors, {layout.nbytes:,} bytes, {len(layout.shards)} file(s)")


if __name__ == "__main__":
    main()
