"""The layouts of public models against figures that others published: counts, totals, sizes of files to the byte."""

from __future__ import annotations

import json
import math

import pytest
from penstock import InvalidError
from penstock.synthetic import layouts, synth
from penstock.synthetic.synth import Layout


def file_sizes(layout: Layout) -> list[int]:
    """Bytes of each file, headers included, without writing any."""
    return [len(header(layout, number)) + sum(t.nbytes for t in shard) for number, shard in enumerate(layout.shards)]


def header(layout: Layout, number: int) -> bytes:
    more = {} if layout.metadata is None else {"metadata": layout.metadata}
    return synth.header_bytes(layout.shards[number], align=layout.align, **more)


#: Tensors, bytes of data and files. Sources, all of the Hub's repository that the layout names:
#: gpt2: 160 tensors and the bytes behind a header of 14,283 + 8 in the file of 548,105,171.
#: gpt2-medium: its file less our header; the size of the file is checked below.
#: all-minilm-l6-v2: tensors and bytes as a listing of its header has them (22,713,728 elements).
#: llama-2-7b, llama-2-70b, llama-3-8b, falcon-40b, bloom-176b, qwen3-30b-a3b, gpt-oss-20b, kimi-k2: `total_size` and
#: files of model.safetensors.index.json. Tensors of llama-2-7b (323), gpt-oss-20b (459), kimi-k2 (139,644): counted in
#: its weight_map by others. llama-2-13b: 13,015,864,320 parameters in two bytes and 40 x 64 frequencies in four.
#: deepseek-r1: 91,991 tensors of 684,531,386,000 elements (the Hub's count, below); bytes follow from dtypes.
#: deepseek-r1-fp8-dynamic: none; counted by hand in test_fp8_dynamic_is_counted_by_hand.
PUBLISHED = {
    "all-minilm-l6-v2": (104, 90_856_960, 1),
    "gpt2": (160, 548_090_880, 1),
    "gpt2-medium": (None, 1_519_955_968, 1),
    "llama-2-7b": (323, 13_476_839_424, 2),
    "llama-2-13b": (None, 13_015_864_320 * 2 + 40 * 64 * 4, 3),
    "llama-2-70b": (None, 137_953_316_864, 15),
    "llama-3-8b": (291, 16_060_522_496, 4),
    "falcon-40b": (None, 83_671_941_120, 9),
    "bloom-176b": (None, 352_494_542_848, 72),
    "qwen3-30b-a3b": (18_867, 61_064_245_248, 16),
    "gpt-oss-20b": (459, 13_761_264_768, 3),
    "deepseek-r1": (91_991, None, 163),
    "kimi-k2": (139_644, 1_029_173_256_720, 61),
}

#: Bytes of the published files, as the Hub lists them (qwen3-30b-a3b: those of its 2507 release, which has the same
#: tensors).
FILE_SIZES = {
    "all-minilm-l6-v2": [90_868_376],
    "gpt2-medium": [1_519_984_962],
    "llama-2-7b": [9_976_578_928, 3_500_297_344],
    "llama-2-13b": [9_948_693_272, 9_904_129_368, 6_178_962_272],
    "llama-3-8b": [4_976_698_672, 4_999_802_720, 4_915_916_176, 1_168_138_808],
    "qwen3-30b-a3b": [
        *(3_998_893_112, 3_999_974_192, 3_997_360_832, 3_999_975_056, 3_999_975_400, 3_999_975_400),
        *(3_999_975_472, 3_997_362_064, 3_999_975_408, 3_999_975_400, 3_999_975_408, 3_987_924_896),
        *(3_999_975_088, 3_999_975_400, 3_999_975_400, 1_085_307_128),
    ],
    "gpt-oss-20b": [4_792_272_488, 4_798_702_184, 4_170_342_232],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensors_bytes_and_files_are_the_published_ones(name):
    layout = layouts.build(name)
    tensors, nbytes, files = PUBLISHED[name]
    names = [tensor.name for tensor in layout.tensors]
    assert len(set(names)) == len(names)
    assert tensors in (None, len(names))
    assert nbytes in (None, layout.nbytes)
    assert len(layout.shards) == files
    assert layout.cut is None


@pytest.mark.parametrize("name", FILE_SIZES)
def test_files_are_as_large_as_the_published_ones_to_the_byte(name):
    assert file_sizes(layouts.build(name)) == FILE_SIZES[name]


def test_every_layout_is_compared_with_something():
    assert {*PUBLISHED, "deepseek-r1-fp8-dynamic"} == set(layouts.MODELS)


def test_gpt2_differs_from_the_published_file_in_56_bytes_of_header():
    # There the tensors lie in an order without a rule: h.10.ln_1.weight at 223,154,176, h.2.attn.c_attn.weight last
    [size] = file_sizes(layouts.build("gpt2"))
    assert size == 548_105_171 + 56
    assert (size - 548_090_880) % 8 != 0


def test_deepseek_r1_has_the_published_files():
    layout = layouts.build("deepseek-r1")
    assert sum(math.prod(tensor.shape) for tensor in layout.tensors) == 684_531_386_000
    sizes = file_sizes(layout)
    assert sum(sizes) == 688_586_727_753
    assert sizes[0] == 5_234_139_343
    # Tenths of a GiB, rounded up, as `ls -lh` lists the folder
    tenths = [math.ceil(size * 10 / 2**30) for size in sizes]
    stage = [41] * 21 + [17]
    assert tenths == [49] + [41] * 10 + [13] + stage * 5 + [41] * 18 + [30] + [41] * 18 + [49, 41, 41, 62]
    assert layout.files[0] == "model-00001-of-000163.safetensors"
    where = {tensor.name: number for number, shard in enumerate(layout.shards, 1) for tensor in shard}
    assert where["model.embed_tokens.weight"] == where["model.layers.2.mlp.up_proj.weight"] == 1
    assert where["lm_head.weight"] == where["model.norm.weight"] == 160
    assert where["model.layers.61.eh_proj.weight"] == where["model.layers.61.shared_head.head.weight"] == 163


def test_fp8_dynamic_is_counted_by_hand():
    layout = layouts.build("deepseek-r1-fp8-dynamic")
    # A layer: five projections of attention, three of the MLP or of each of 257 experts, with a scale each; four norms;
    # and a router with its bias in 58 of the 61
    projections = 3 * (5 + 3) + 58 * (5 + 3 * 257)
    assert len(layout.tensors) == 2 * projections + 4 * 61 + 2 * 58 + 3
    blocks = {t.name: t for t in layouts.build("deepseek-r1").tensors}
    for tensor in layout.tensors:
        if tensor.name.endswith(".weight_scale"):
            weight = blocks[tensor.name.removesuffix("_scale")]
            assert (weight.dtype, tensor.dtype, tensor.shape) == ("F8_E4M3", "BF16", (weight.shape[0], 1))
        else:
            assert blocks[tensor.name] == tensor
    assert max(sum(t.nbytes for t in shard) for shard in layout.shards) <= 5e9


def test_kimi_k2_has_the_published_header_in_its_second_file():
    layout = layouts.build("kimi-k2")
    text = header(layout, 1)
    assert int.from_bytes(text[:8], "little") == 293_368
    entry = json.loads(text[8:])["model.layers.1.mlp.experts.0.gate_proj.weight"]
    assert entry == {"dtype": "F8_E4M3", "shape": [2048, 7168], "data_offsets": [24_383_824, 39_063_888]}
    assert (layout.files[0], layout.files[60]) == ("model-1-of-61.safetensors", "model-61-of-61.safetensors")


def test_bloom_has_a_file_for_each_layer():
    layout = layouts.build("bloom-176b")
    assert layout.files[0] == "model_00001-of-00072.safetensors"
    assert {tensor.name for tensor in layout.shards[0]} == {
        *("word_embeddings.weight", "word_embeddings_layernorm.weight", "word_embeddings_layernorm.bias")
    }
    assert all(tensor.name.startswith("h.69.") for tensor in layout.shards[70])
    assert {tensor.name for tensor in layout.shards[71]} == {"ln_f.weight", "ln_f.bias"}


def test_gpt_oss_is_cut_within_layers_and_counts_files_from_zero():
    layout = layouts.build("gpt-oss-20b")
    assert layout.files == [f"model-0000{index}-of-00002.safetensors" for index in range(3)]
    where = {tensor.name: number for number, shard in enumerate(layout.shards) for tensor in shard}
    assert where["model.layers.18.self_attn.v_proj.bias"] == 0
    assert where["model.layers.18.self_attn.q_proj.weight"] == where["model.layers.6.mlp.router.weight"] == 1
    assert where["model.layers.6.mlp.experts.gate_up_proj_blocks"] == where["model.embed_tokens.weight"] == 2


def test_aligning_changes_where_the_data_starts_and_nothing_else():
    published, aligned = layouts.build("gpt2"), layouts.build("gpt2", align=8)
    assert published.shards == aligned.shards and published.metadata == aligned.metadata
    starts = [len(synth.header_bytes(one.shards[0], one.metadata, one.align)) for one in (published, aligned)]
    assert starts[0] % 4 != 0 and starts[1] % 8 == 0
    shapes = {tensor.name: tensor.shape for tensor in aligned.tensors}
    assert len(shapes) == 160
    assert shapes["wte.weight"] == (50257, 768) and shapes["h.11.attn.bias"] == (1, 1, 1024, 1024)
    assert shapes["h.0.attn.c_attn.weight"] == (768, 2304) and shapes["h.11.mlp.c_proj.weight"] == (3072, 768)


@pytest.mark.parametrize("name", layouts.MODELS)
def test_layers_are_kept_whole(name):
    whole = {tensor.name: tensor for tensor in layouts.build(name).tensors}
    layout = layouts.build(name, layers=2)
    kept = {tensor.name: tensor for tensor in layout.tensors}
    assert kept.items() <= whole.items()
    numbers = {int(part) for tensor in kept for part in tensor.split(".") if part.isdigit() and "experts" not in tensor}
    assert numbers == {0, 1}
    ends = {tensor for tensor in whole if not any(part.isdigit() for part in tensor.split("."))}
    assert ends <= kept.keys()
    assert layout.cut.startswith("2 of ")
    assert "embeddings" not in layout.cut


def test_nbytes_keeps_as_many_layers_as_fit():
    layout = layouts.build("llama-3-8b", nbytes=3e9)
    layer = sum(t.nbytes for t in layout.tensors if ".layers.0." in t.name)
    assert layout.nbytes <= 3e9 < layout.nbytes + layer
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= {tensor.name for tensor in layout.tensors}
    assert layout.cut == "2 of 32 layers"
    # 2.1 GB of embeddings and head leave no room for a layer of 436 MB
    layout = layouts.build("llama-3-8b", nbytes=2.2e9)
    assert layout.cut == "5 of 32 layers, no embeddings, last norm and head"
    assert layout.nbytes == 5 * layer


def test_nbytes_that_hold_everything_cut_nothing():
    assert layouts.build("gpt2", nbytes=548_090_880) == layouts.build("gpt2")


@pytest.mark.parametrize("name", layouts.MODELS)
def test_scale_keeps_names_dtypes_order_and_files(name):
    whole, thin = layouts.build(name), layouts.build(name, scale=0.01)
    assert thin.files == whole.files
    for before, after in zip(whole.shards, thin.shards, strict=True):
        assert [(t.name, t.dtype, len(t.shape)) for t in after] == [(t.name, t.dtype, len(t.shape)) for t in before]
    assert thin.nbytes == pytest.approx(whole.nbytes * 0.01, rel=0.03)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": "llama-4"}, "there are all-minilm-l6-v2, gpt2, "),
        ({"name": "gpt2", "layers": 13}, "1 to 12"),
        ({"name": "gpt2", "layers": 0}, "1 to 12"),
        ({"name": "gpt2", "scale": 0}, "above 0"),
        ({"name": "gpt2", "scale": 1.5}, "at most 1"),
        ({"name": "gpt2", "align": 0}, "at least 1"),
        ({"name": "kimi-k2", "nbytes": 1e6}, "no layer of kimi-k2 fits into 1.00 MB"),
    ],
)
def test_wrong_values_are_told(wrong, said):
    with pytest.raises(InvalidError, match=said):
        layouts.build(**wrong)
