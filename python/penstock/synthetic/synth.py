"""Writes checkpoints: files of random bytes with given tensor names, shapes and dtypes.

The files are written here byte by byte (8-byte length, JSON header, data), not by any safetensors library, so that
they can be an oracle for one. The same layout and seed always give the same bytes, whatever the number of threads, and
a checkpoint that is already in place is not written again.

    from penstock.synthetic.synth import llama, write
    folder = write(llama(3e9), "/tmp/llama", seed=0)     # three files and an index

The layouts at the end of this file are made for tests and for the benchmark: cut to a size, or wilder than any model.
Those of public models are in `layouts`; `penstock synth` writes them.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._errors import InvalidError, LimitError
from .._report import size_text

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
#: Bytes that one thread makes and writes at a time. Each chunk of a file has a random stream of its own, so that any
#: number of threads writes the same bytes.
_CHUNK = 4 << 20
_THREADS = 4
_RECORD = ".synth.json"
_INDEX = "model.safetensors.index.json"


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
    """The shards of a checkpoint, each a tuple of tensors in the order of their data.

    `pattern` names the files where there are several: {number} of {count}, or {index} up to {last}, from zero. `align`
    is what the data of each file starts at a multiple of (1: wherever the header ends, as older writers left it).
    `cut` says what is missing of the model that the layout is named after. `metadata=None` leaves it out of the header.
    """

    name: str
    shards: tuple[tuple[Tensor, ...], ...]
    metadata: Mapping[str, str] | None = field(default_factory=lambda: {"format": "pt"})
    align: int = 8
    pattern: str = "model-{number:05}-of-{count:05}.safetensors"
    cut: str | None = None

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
        return [
            self.pattern.format(number=index + 1, count=count, index=index, last=count - 1) for index in range(count)
        ]


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


def _partial(path: Path) -> Path:
    """The name of a file until it is whole."""
    return path.with_name(path.name + ".partial")


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

    The file appears under its name when it is whole; nothing is left of one that failed or was interrupted.
    """
    path = Path(path)
    header = header_bytes(tensors, metadata, align, spaces)
    partial = _partial(path)
    try:
        with partial.open("wb", buffering=0) as file:
            file.write(header)
            file.truncate(len(header) + sum(tensor.nbytes for tensor in tensors))
            _write_data(file.fileno(), len(header), tensors, [seed] if isinstance(seed, int) else list(seed))
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def _write_data(fd: int, start: int, tensors: Sequence[Tensor], seed: list[int]) -> None:
    """Fills the file from `start` on, chunk by chunk."""
    bools: list[tuple[int, int]] = []  # ranges within the data, in order
    holes: list[tuple[int, int]] = []
    total = 0
    for tensor in tensors:
        begin, total = total, total + tensor.nbytes
        if tensor.hole or tensor.dtype == "BOOL":
            (holes if tensor.hole else bools).append((begin, total))

    def chunk(number: int) -> None:
        first, last = number * _CHUNK, min((number + 1) * _CHUNK, total)
        left = list(_between(first, _overlaps(holes, first, last), last))
        if not left:
            return
        stream = np.random.SFC64(np.random.SeedSequence([*seed, number]))
        data: npt.NDArray[np.uint8] = stream.random_raw(-(-(last - first) // 8)).view(np.uint8)
        for begin, end in _overlaps(bools, first, last):
            data[begin - first : end - first] &= 1
        for begin, end in left:
            _write_at(fd, data[begin - first : end - first].data, start + begin)

    count = -(-total // _CHUNK)
    if count < 2:
        for number in range(count):
            chunk(number)
        return
    with ThreadPoolExecutor(min(_THREADS, count, len(os.sched_getaffinity(0)))) as threads:
        try:
            for _ in threads.map(chunk, range(count)):
                pass
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)  # leaving the `with` waits for what is being written
            raise


def _overlaps(ranges: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """The parts of these ranges (in order, apart from each other) that lie in first..last."""
    at = bisect.bisect_right(ranges, first, key=lambda span: span[1])
    found = []
    while at < len(ranges) and ranges[at][0] < last:
        found.append((max(ranges[at][0], first), min(ranges[at][1], last)))
        at += 1
    return found


def _between(first: int, ranges: Iterable[tuple[int, int]], last: int) -> Iterable[tuple[int, int]]:
    """The parts of first..last that lie in none of these ranges."""
    for begin, end in [*ranges, (last, last)]:
        if first < begin:
            yield first, begin
        first = end


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _fingerprint(layout: Layout, seed: int, align: int) -> str:
    # Of the text, not of a dictionary: dataclasses.asdict takes 10 s for 371,474 tensors
    return hashlib.sha256(repr((layout, seed, align, "writer 3")).encode()).hexdigest()


def in_place(layout: Layout, folder: str | os.PathLike[str], *, seed: int = 0, align: int | None = None) -> bool:
    """Whether a folder holds this layout with this seed, as `write` left it."""
    folder = Path(folder)
    record = folder / _RECORD
    if not record.exists():
        return False
    written = json.loads(record.read_text())
    sizes = {name: (folder / name).stat().st_size for name in written["sizes"] if (folder / name).exists()}
    align = layout.align if align is None else align
    return bool(written["sizes"] == sizes and written.get("fingerprint") == _fingerprint(layout, seed, align))


def write(layout: Layout, folder: str | os.PathLike[str], *, seed: int = 0, align: int | None = None) -> Path:
    """Writes every shard, and `model.safetensors.index.json` where there are several. Returns the folder.

    A folder that already holds this layout with this seed is left alone; what else was written there by this function
    is replaced. After a failure or an interruption nothing of it is left.

    Raises:
        InvalidError: The folder holds files that were not written here. Folders in it do not count.
        LimitError: Too little space (errno ENOSPC); nothing was touched.
    """
    folder = Path(folder)
    record = folder / _RECORD
    align = layout.align if align is None else align
    if in_place(layout, folder, seed=seed, align=align):
        return folder
    before: list[Path] = []
    if record.exists():
        before = [folder / name for name in (*json.loads(record.read_text())["sizes"], _INDEX)]
    names = [*layout.files, *([_INDEX] if len(layout.shards) > 1 else [])]
    if foreign := _foreign(folder, before):
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise InvalidError(
            f"holds {foreign[0]}{more}, not written here: choose another folder, or an empty one", path=str(folder)
        )
    _check_space(layout, folder, before)
    for path in before:
        path.unlink(missing_ok=True)
        _partial(path).unlink(missing_ok=True)

    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # First, so that files of a write that was killed are known as ours
        record.write_text(json.dumps({"sizes": dict.fromkeys(layout.files)}))
        sizes = {}
        metadata = _ABSENT if layout.metadata is None else layout.metadata
        for number, (name, shard) in enumerate(zip(layout.files, layout.shards, strict=True)):
            path = write_file(folder / name, shard, seed=(seed, number), metadata=metadata, align=align)
            sizes[name] = path.stat().st_size
        if len(layout.shards) > 1:
            index = {
                "metadata": {"total_size": layout.nbytes},
                "weight_map": {
                    tensor.name: name
                    for name, shard in zip(layout.files, layout.shards, strict=True)
                    for tensor in shard
                },
            }
            (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        record.write_text(json.dumps({"fingerprint": _fingerprint(layout, seed, align), "sizes": sizes}))
    except BaseException:
        for name in (*names, _RECORD):
            (folder / name).unlink(missing_ok=True)
        if made:
            with contextlib.suppress(OSError):  # somebody else has put something there
                folder.rmdir()
        raise
    return folder


def _foreign(folder: Path, ours: Iterable[Path]) -> list[str]:
    """The files of a folder that are not among ``ours``, nor what a killed write leaves of those."""
    known = {_RECORD, *(path.name for path in ours), *(_partial(path).name for path in ours)}
    there = folder.iterdir() if folder.is_dir() else ()
    return sorted(path.name for path in there if path.name not in known and not path.is_dir())


def _check_space(layout: Layout, folder: Path, before: Iterable[Path]) -> None:
    """Raises LimitError where the file system has less space than the layout takes."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    system = os.statvfs(there)
    free = system.f_bavail * system.f_frsize
    free += sum(path.stat().st_blocks * 512 for path in before if path.exists())
    # A name stands in the header of its file (with some 100 bytes of shape and offsets) and in the index
    needed = sum((0 if t.hole else t.nbytes) + 2 * len(t.name) + 160 for t in layout.tensors)
    if needed > free:
        raise LimitError(
            f"{size_text(needed)} are needed for {layout.name}, and {size_text(free)} are free there",
            path=str(folder),
            errno=errno.ENOSPC,
        )


# --- layouts ---------------------------------------------------------------------------------------------------------


def file_order(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
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
    return tuple(file_order(shard) for shard in shards)


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

    widths = range(16, 2048 + 1, 16)
    fitting = bisect.bisect_right(widths, nbytes, key=lambda width: sum(tensor.nbytes for tensor in tensors(width)))
    return Layout("qwen3_moe", _shard(tensors(widths[max(fitting - 1, 0)]), shards))


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
    return list(file_order(tensors))
