"""Public models: the tensor names, shapes, dtypes, order and files of their checkpoints.

    from penstock.synthetic import layouts, synth
    synth.write(layouts.build("llama-3-8b"), "/big/llama-3-8b")                 # four files, 16.06 GB
    synth.write(layouts.build("llama-3-8b", nbytes=3e9), "/small/cut")          # as many whole layers as fit
    synth.write(layouts.build("deepseek-r1", scale=0.001), "/small/thin")       # every tensor, thinner

Names, shapes, dtypes and files are facts about checkpoints on the Hugging Face Hub; each function says what its layout
was compared with. Where it says "to the byte", every file comes out as large as the published one, header included:
the header holds all names, shapes and offsets, so that a wrong one would show. `tests/test_synth_layouts.py` holds the
published figures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from .._errors import InvalidError
from .._report import size_text
from .sharding import Block, Model, by_block, by_elements, by_layer, by_size
from .synth import Layout, Tensor

Shapes = Mapping[str, tuple[int, ...]]

# --- models ----------------------------------------------------------------------------------------------------------


def _tensors(prefix: str, dtype: str, shapes: Shapes) -> tuple[Tensor, ...]:
    return tuple(Tensor(prefix + name, dtype, shape) for name, shape in shapes.items())


def _gpt2(repository: str, width: int, layers: int) -> Model:
    """F32 with the `attn.bias` masks, in one file whose data starts at an odd offset, as files of 2022 do.

    gpt2-medium is so to the byte. In gpt2 the tensors lie in an order without a rule (that of a hash table); here they
    lie by name, which takes 56 more bytes of header.
    """
    layer: Shapes = {
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
    blocks = [Block(_tensors("", "F32", {"wte.weight": (50257, width), "wpe.weight": (1024, width)}))]
    blocks += [Block(_tensors(f"h.{n}.", "F32", layer), n) for n in range(layers)]
    blocks += [Block(_tensors("ln_f.", "F32", {"weight": (width,), "bias": (width,)}))]
    return Model(repository, tuple(blocks), by_size(math.inf), align=1)


def minilm() -> Model:
    """A sentence encoder of 91 MB: six BERT layers in F32, and positions in I64. To the byte."""
    width, inner = 384, 1536
    layer: dict[str, tuple[int, ...]] = {}
    for name, shape in {
        "attention.self.query": (width, width),
        "attention.self.key": (width, width),
        "attention.self.value": (width, width),
        "attention.output.dense": (width, width),
        "attention.output.LayerNorm": (width,),
        "intermediate.dense": (inner, width),
        "output.dense": (width, inner),
        "output.LayerNorm": (width,),
    }.items():
        layer |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    embeddings: Shapes = {
        "word_embeddings.weight": (30522, width),
        "position_embeddings.weight": (512, width),
        "token_type_embeddings.weight": (2, width),
        "LayerNorm.weight": (width,),
        "LayerNorm.bias": (width,),
    }
    first = (Tensor("embeddings.position_ids", "I64", (1, 512)), *_tensors("embeddings.", "F32", embeddings))
    blocks = [Block(first)]
    blocks += [Block(_tensors(f"encoder.layer.{n}.", "F32", layer), n) for n in range(6)]
    blocks += [Block(_tensors("pooler.dense.", "F32", {"weight": (width, width), "bias": (width,)}))]
    return Model("sentence-transformers/all-MiniLM-L6-v2", tuple(blocks), by_size(math.inf))


def _llama(
    repository: str,
    dtype: str,
    vocabulary: int,
    width: int,
    inner: int,
    layers: int,
    keys: int,
    limit: float,
    inv: bool,
) -> Model:
    """Llama in files of at most `limit` bytes; 2 has the rotary frequencies of each layer beside the weights, in F32.

    To the byte: llama-2-7b, llama-2-13b, llama-3-8b. llama-2-70b: to the total of its index and the number of files.
    """
    attention: Shapes = {
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (keys * 128, width),
        "self_attn.v_proj.weight": (keys * 128, width),
        "self_attn.o_proj.weight": (width, width),
    }
    rest: Shapes = {
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    blocks = [Block((Tensor("model.embed_tokens.weight", dtype, (vocabulary, width)),))]
    for n in range(layers):
        prefix = f"model.layers.{n}."
        rotary = (Tensor(f"{prefix}self_attn.rotary_emb.inv_freq", "F32", (64,)),) if inv else ()
        blocks.append(Block((*_tensors(prefix, dtype, attention), *rotary, *_tensors(prefix, dtype, rest)), n))
    last = {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}
    blocks.append(Block(_tensors("", dtype, last)))
    return Model(repository, tuple(blocks), by_size(limit))


def falcon_40b() -> Model:
    """Compared with the total of the index and the number of files (nine, of at most 10 GB).

    Its head is tied to the embeddings but written as well. Where the files are cut follows from the order of the
    modules in the model's code, and was not compared.
    """
    width, dtype = 8192, "BF16"
    layer: dict[str, tuple[int, ...]] = {}
    for norm in ("ln_attn", "ln_mlp"):
        layer |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
    layer |= {
        "self_attention.query_key_value.weight": (width + 2 * 8 * 64, width),  # 128 heads of 64, 8 for keys and values
        "self_attention.dense.weight": (width, width),
        "mlp.dense_h_to_4h.weight": (4 * width, width),
        "mlp.dense_4h_to_h.weight": (width, 4 * width),
    }
    blocks = [Block((Tensor("transformer.word_embeddings.weight", dtype, (65024, width)),))]
    blocks += [Block(_tensors(f"transformer.h.{n}.", dtype, layer), n) for n in range(60)]
    last = {"transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,), "lm_head.weight": (65024, width)}
    blocks.append(Block(_tensors("", dtype, last)))
    return Model("tiiuae/falcon-40b", tuple(blocks), by_size(10e9))


def bloom_176b() -> Model:
    """A file for the embeddings, one for each layer, one for the last norm. Names, files and total as its index has."""
    width, dtype = 14336, "BF16"
    layer: dict[str, tuple[int, ...]] = {}
    for name, shape in {
        "input_layernorm": (width,),
        "self_attention.query_key_value": (3 * width, width),
        "self_attention.dense": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.dense_h_to_4h": (4 * width, width),
        "mlp.dense_4h_to_h": (width, 4 * width),
    }.items():
        layer |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    first = {
        "word_embeddings.weight": (250880, width),
        "word_embeddings_layernorm.weight": (width,),
        "word_embeddings_layernorm.bias": (width,),
    }
    blocks = [Block(_tensors("", dtype, first))]
    blocks += [Block(_tensors(f"h.{n}.", dtype, layer), n) for n in range(70)]
    blocks.append(Block(_tensors("ln_f.", dtype, {"weight": (width,), "bias": (width,)})))
    return Model("bigscience/bloom", tuple(blocks), by_block, files="model_{number:05}-of-{count:05}.safetensors")


def qwen3_30b_a3b() -> Model:
    """128 experts a layer, 18,867 tensors in 16 files of at most 4 GB. To the byte (compared with the 2507 release).

    The router after the experts, and of each expert `up_proj` first, is the order that gives these files. (`gate_proj`
    and `down_proj` may be the other way round: the sizes of the files leave that open.)
    """
    width, inner, dtype = 2048, 768, "BF16"
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (4096, width),
        "self_attn.k_proj.weight": (512, width),
        "self_attn.v_proj.weight": (512, width),
        "self_attn.o_proj.weight": (width, 4096),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
    }
    for expert in range(128):
        layer[f"mlp.experts.{expert}.up_proj.weight"] = (inner, width)
        layer[f"mlp.experts.{expert}.gate_proj.weight"] = (inner, width)
        layer[f"mlp.experts.{expert}.down_proj.weight"] = (width, inner)
    layer["mlp.gate.weight"] = (128, width)
    layer |= {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
    blocks = [Block((Tensor("model.embed_tokens.weight", dtype, (151936, width)),))]
    blocks += [Block(_tensors(f"model.layers.{n}.", dtype, layer), n) for n in range(48)]
    blocks.append(Block(_tensors("", dtype, {"model.norm.weight": (width,), "lm_head.weight": (151936, width)})))
    return Model("Qwen/Qwen3-30B-A3B", tuple(blocks), by_size(4e9))


def gpt_oss_20b() -> Model:
    """MXFP4: of each layer's experts one U8 tensor of nibbles and one of scales (E8M0) a projection. To the byte.

    Three files of at most 4.8 GB, counted from zero and said to be two; the layers in the order 0, 1, 10, 11, ..., 2,
    20, ...; no metadata.
    """
    width, experts = 2880, 32

    def layer(prefix: str) -> tuple[Tensor, ...]:
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (width,),
            "self_attn.o_proj.bias": (width,),
            "self_attn.o_proj.weight": (width, 4096),
            "self_attn.q_proj.bias": (4096,),
            "self_attn.k_proj.bias": (512,),
            "self_attn.v_proj.bias": (512,),
            "self_attn.q_proj.weight": (4096, width),
            "self_attn.k_proj.weight": (512, width),
            "self_attn.v_proj.weight": (512, width),
            "self_attn.sinks": (64,),
            "mlp.router.bias": (experts,),
            "mlp.router.weight": (experts, width),
        }
        for name, rows in {"gate_up_proj": 2 * width, "down_proj": width}.items():
            shapes[f"mlp.experts.{name}_bias"] = (experts, rows)
            shapes[f"mlp.experts.{name}_blocks"] = (experts, rows, width // 32, 16)  # 32 elements in 16 bytes
            shapes[f"mlp.experts.{name}_scales"] = (experts, rows, width // 32)
        shapes["post_attention_layernorm.weight"] = (width,)
        return tuple(
            Tensor(prefix + name, "U8" if name.endswith(("_blocks", "_scales")) else "BF16", shape)
            for name, shape in shapes.items()
        )

    blocks = [Block(layer(f"model.layers.{n}."), n) for n in sorted(range(24), key=str)]
    last = {"model.embed_tokens.weight": (201088, width), "model.norm.weight": (width,)}
    blocks.append(Block(_tensors("", "BF16", {**last, "lm_head.weight": (201088, width)})))
    return Model(
        "openai/gpt-oss-20b",
        tuple(blocks),
        by_size(4.8e9),
        files="model-{index:05}-of-{last:05}.safetensors",
        metadata=None,
    )


Quantised = Callable[[str, int, int], tuple[Tensor, ...]]


def _fp8_blocks(name: str, rows: int, columns: int) -> tuple[Tensor, ...]:
    """A projection in FP8 with an F32 scale for each block of 128 x 128."""
    scales = (math.ceil(rows / 128), math.ceil(columns / 128))
    return (
        Tensor(f"{name}.weight", "F8_E4M3", (rows, columns)),
        Tensor(f"{name}.weight_scale_inv", "F32", scales),
    )


def _fp8_rows(name: str, rows: int, columns: int) -> tuple[Tensor, ...]:
    """A projection in FP8 with a BF16 scale for each output row, as compressed-tensors writes it."""
    return (
        Tensor(f"{name}.weight", "F8_E4M3", (rows, columns)),
        Tensor(f"{name}.weight_scale", "BF16", (rows, 1)),
    )


def _deepseek_v3(
    n: int, quantised: Quantised, heads: int, dense: int, experts: int, inv: int = 0
) -> tuple[Tensor, ...]:
    """Layer `n` of DeepSeek-V3's architecture: latent attention, a dense MLP in the first `dense` layers, else MoE."""
    width, prefix = 7168, f"model.layers.{n}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

    def projections(name: str, inner: int) -> tuple[Tensor, ...]:
        return (
            *quantised(f"{name}.gate_proj", inner, width),
            *quantised(f"{name}.up_proj", inner, width),
            *quantised(f"{name}.down_proj", width, inner),
        )

    found = [
        *quantised(f"{attention}.q_a_proj", 1536, width),
        Tensor(f"{attention}.q_a_layernorm.weight", "BF16", (1536,)),
        *quantised(f"{attention}.q_b_proj", heads * 192, 1536),
        *quantised(f"{attention}.kv_a_proj_with_mqa", 576, width),
        Tensor(f"{attention}.kv_a_layernorm.weight", "BF16", (512,)),
        *quantised(f"{attention}.kv_b_proj", heads * 256, 512),
        *quantised(f"{attention}.o_proj", width, heads * 128),
    ]
    if inv:
        found.append(Tensor(f"{attention}.rotary_emb.inv_freq", "BF16", (inv,)))
    if n < dense:
        found += projections(mlp, 18432)
    else:
        found.append(Tensor(f"{mlp}.gate.weight", "BF16", (experts, width)))
        found.append(Tensor(f"{mlp}.gate.e_score_correction_bias", "F32", (experts,)))
        found += projections(f"{mlp}.shared_experts", 2048)
        for expert in range(experts):
            found += projections(f"{mlp}.experts.{expert}", 2048)
    found += _tensors(f"{prefix}.", "BF16", {"input_layernorm.weight": (width,)})
    found += _tensors(f"{prefix}.", "BF16", {"post_attention_layernorm.weight": (width,)})
    return tuple(found)


def _ends(vocabulary: int, width: int = 7168) -> tuple[Block, Block]:
    """Embeddings, and the last norm with the head."""
    first = _tensors("model.", "BF16", {"embed_tokens.weight": (vocabulary, width)})
    last = _tensors("", "BF16", {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)})
    return Block(first), Block(last)


def deepseek_r1() -> Model:
    """FP8 with scales: 91,991 tensors in 163 files, with the layer that predicts a second token (61). To the byte.

    Compared with the sum of all files, the first file, and the sizes of all 163 to 0.1 GiB. The files were written by
    eight pipeline stages, each closing a file once it held 2**32 elements; their tensors lie in the order of the model,
    not by dtype and name, and their headers are not padded. Our index has the true total, the published one has that of
    a BF16 copy.
    """
    vocabulary, width = 129280, 7168

    layers = [Block(_deepseek_v3(n, _fp8_blocks, heads=128, dense=3, experts=256), n) for n in range(62)]
    more = {
        "embed_tokens.weight": (vocabulary, width),
        "enorm.weight": (width,),
        "hnorm.weight": (width,),
        "eh_proj.weight": (width, 2 * width),
        "shared_head.norm.weight": (width,),
        "shared_head.head.weight": (vocabulary, width),
    }
    second = Block(layers.pop().tensors + _tensors("model.layers.61.", "BF16", more), 61)
    first, last = _ends(vocabulary)
    return Model(
        "deepseek-ai/DeepSeek-R1",
        (first, *layers, last, second),
        by_elements(2**32, stages=(7, 15, 23, 31, 39, 47, 54)),
        files="model-{number:05}-of-{count:06}.safetensors",
        sort=tuple,
        align=1,
    )


def deepseek_r1_fp8_dynamic() -> Model:
    """DeepSeek-R1 as compressed-tensors writes FP8-Dynamic: a scale for each output row; no layer 61.

    Derived from `deepseek_r1` and from what that writer does (BF16 scales of shape [rows, 1]; router, embeddings and
    head left alone), in files of `save_pretrained`'s 5 GB. Not compared with the published files.
    """
    first, last = _ends(129280)
    layers = [Block(_deepseek_v3(n, _fp8_rows, heads=128, dense=3, experts=256), n) for n in range(61)]
    return Model("EmbeddedLLM/deepseek-r1-FP8-Dynamic", (first, *layers, last), by_size(5e9))


def kimi_k2() -> Model:
    """1.03 TB: 139,644 tensors in 61 files, one for each layer, without metadata. Names, shapes and total as published.

    The header of the second file is as long as the published one. The frequencies of each layer are 56 BF16 numbers.
    """
    first, last = _ends(163840)
    layers = [Block(_deepseek_v3(n, _fp8_blocks, heads=64, dense=1, experts=384, inv=56), n) for n in range(61)]
    return Model(
        "moonshotai/Kimi-K2-Instruct",
        (first, *layers, last),
        by_layer,
        files="model-{number}-of-{count}.safetensors",
        metadata=None,
    )


MODELS: dict[str, Callable[[], Model]] = {
    "all-minilm-l6-v2": minilm,
    "gpt2": lambda: _gpt2("openai-community/gpt2", 768, 12),
    "gpt2-medium": lambda: _gpt2("openai-community/gpt2-medium", 1024, 24),
    "llama-2-7b": lambda: _llama("meta-llama/Llama-2-7b-hf", "F16", 32000, 4096, 11008, 32, 32, 10e9, True),
    "llama-2-13b": lambda: _llama("meta-llama/Llama-2-13b-hf", "F16", 32000, 5120, 13824, 40, 40, 10e9, True),
    "llama-2-70b": lambda: _llama("meta-llama/Llama-2-70b-hf", "F16", 32000, 8192, 28672, 80, 8, 10e9, True),
    "llama-3-8b": lambda: _llama("meta-llama/Meta-Llama-3-8B", "BF16", 128256, 4096, 14336, 32, 8, 5e9, False),
    "falcon-40b": falcon_40b,
    "bloom-176b": bloom_176b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "gpt-oss-20b": gpt_oss_20b,
    "deepseek-r1": deepseek_r1,
    "deepseek-r1-fp8-dynamic": deepseek_r1_fp8_dynamic,
    "kimi-k2": kimi_k2,
}


# --- made smaller ----------------------------------------------------------------------------------------------------


def model(name: str) -> Model:
    """A model by its name in `MODELS`. Raises InvalidError, which lists them."""
    if name not in MODELS:
        raise InvalidError(f"no layout named {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name]()


def build(
    name: str,
    *,
    layers: int | None = None,
    nbytes: float | None = None,
    scale: float = 1,
    align: int | None = None,
) -> Layout:
    """The layout of a public model, whole or made smaller. Its `cut` says what was taken away.

    Args:
        name: One of `MODELS`.
        layers: Keep the first so many layers (by number), with embeddings and head.
        nbytes: Keep as many whole layers as fit into so many bytes of data, with embeddings and head if they fit with
            at least one layer, else without. What is left is put into files by the model's own rule: fewer files.
        scale: Shrink the longest dimension of every tensor to this share (0 < scale <= 1) of its length, at least 1.
            Names, dtypes, order and files stay as they are. Applied before `nbytes`.
        align: What the data of each file starts at a multiple of; by default as in the published files.

    Raises:
        InvalidError: Unknown name, a value out of its range, or no layer fits.
    """
    whole = model(name)
    if not 0 < scale <= 1:
        raise InvalidError(f"scale is {scale}; it must be above 0 and at most 1")
    if layers is not None and not 1 <= layers <= len(whole.layers):
        raise InvalidError(f"layers is {layers}; {name} has 1 to {len(whole.layers)}")
    if align is not None and align < 1:
        raise InvalidError(f"align is {align}; it must be at least 1")
    kept = set(sorted(whole.layers)[:layers])
    blocks = [block for block in whole.blocks if block.layer is None or block.layer in kept]
    if nbytes is not None:
        blocks = _fitting(name, blocks, nbytes, scale)
    return Layout(
        name,
        tuple(tuple(_scaled(tensor, scale) for tensor in whole.sort(file)) for file in whole.split(blocks)),
        metadata=whole.metadata,
        align=whole.align if align is None else align,
        pattern=whole.files,
        cut=_cut(whole, blocks, scale),
    )


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    if scale == 1 or not tensor.shape:
        return tensor
    axis = tensor.shape.index(max(tensor.shape))
    length = max(1, round(tensor.shape[axis] * scale))
    return dataclasses.replace(tensor, shape=(*tensor.shape[:axis], length, *tensor.shape[axis + 1 :]))


def _fitting(name: str, blocks: Sequence[Block], nbytes: float, scale: float) -> list[Block]:
    """The blocks that fit into `nbytes`, in their order."""
    sizes = {block: sum(_scaled(tensor, scale).nbytes for tensor in block.tensors) for block in blocks}
    layers = sorted((block for block in blocks if block.layer is not None), key=lambda block: block.layer or 0)
    kept = {block for block in blocks if block.layer is None}
    room = nbytes - sum(sizes[block] for block in kept)
    if room < sizes[layers[0]]:
        kept, room = set(), nbytes
    if room < sizes[layers[0]]:
        raise InvalidError(
            f"no layer of {name} fits into {size_text(nbytes)}: the first takes {size_text(sizes[layers[0]])}; "
            "give more bytes, or a scale"
        )
    for block in layers:
        room -= sizes[block]
        if room < 0:
            break
        kept.add(block)
    return [block for block in blocks if block in kept]


def _cut(whole: Model, blocks: Sequence[Block], scale: float) -> str | None:
    """The missing parts, in words."""
    parts = []
    layers = sum(block.layer is not None for block in blocks)
    if layers < len(whole.layers):
        parts.append(f"{layers} of {len(whole.layers)} layers")
    if len(blocks) - layers < len(whole.blocks) - len(whole.layers):
        parts.append("no embeddings, last norm and head")
    if scale != 1:
        parts.append(f"the longest dimension of every tensor times {scale:g}")
    return ", ".join(parts) or None
