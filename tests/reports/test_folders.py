"""Public reports of folders, indexes and names, each as a program. What was said of them at first:

| report | what it is about | at first |
|---|---|---|
| diffusers#14719 | a variant's index, or an old one, beside a file that was just saved | failed |
| diffusers#14769 | a new file beside an older save's shards and index | failed: nothing said, refused without shards |
| diffusers#11182 | default shards beside a variant's | failed |
| vllm#40765 | `consolidated*` beside shards | failed: nothing said, and both loaded without an index |
| sglang#33671 (new) | `consolidated.safetensors` beside `model.safetensors` | failed |
| InfiniLM#467 (new) | `consolidated-00001-of-00003`, and nothing else | right at once |
| mistral-inference#205 (new) | the same with its own index | right at once |
| vllm#54230 | a shard with tensors that the index assigns to others | failed |
| 1Cat-vLLM#407 | a shard that is reused for a few of its tensors | failed |
| colibri#1479 | an overlay that supersedes tensors of base shards | failed |
| spark-vllm-docker#134 | a name in two shards | failed |
| qwen38-27b-rtx3090#123 (new) | a superseded tensor that is to be told before anything is loaded | failed |
| vmlx-swift#388 (new) | an index without the tensors of one of its shards | right at once |
| huggingface_hub#4391 | a name of the index that no shard has | failed |
| mlx-vlm#1827 | an index whose shards were renamed | failed |
| CoSER#3 (new) | an index of 30 shards beside a set of 15 | failed |
| mlx-vlm#624 | an index that is left over beside one file | failed |
| mlx-vlm#1464 (new) | a stray `model.safetensors` beside shards, which transformers takes | failed: nothing said |
| vllm-omni#6234 (new) | old shards beside those that the index names | right at once, but nothing said |
| SceneWorks#1333 | `._model.safetensors` | failed |
| mlx-engine#79 | the same, for each of many shards | failed |
| omlx#3679 | `._model.safetensors.index.json` | failed |
| lmstudio-bug-tracker#486 (new) | sidecars on a disk of another system | failed |
| Kolors#7 (new) | a folder with a variant alone | right at once, but nothing said |
| diffusers#8974 (new) | `model.fp16.safetensors` without `model.safetensors` | failed: nothing said |
| diffusers#10634 (new) | shards of a variant beside default ones, and `variant=` | failed: no such argument |
| transformers#38870 | the head is kept, and the embedding is random | failed |
| transformers#41038 | names of ties in the metadata | failed |
| transformers#30202 | tied names of a model's own class | failed |
| safetensors#652 | `save_model` and the first name of the alphabet | right at once: as safetensors |
| transformers#34759 (new) | `embed_tokens` is missing after a save | right at once |
| transformers#30125 (new) | the base class misses its embedding | failed |
| transformers#43159 (new) | OPT: head and decoder | right at once |
| text-generation-inference#501 (new) | the name that was left out is in the metadata | failed: the other name |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
import torch
from penstock.cli import main
from safetensors.numpy import save_file
from torch import nn

INDEX = "model.safetensors.index.json"
SIDECAR = b"\0\5\x16\7\0\2\0\0Mac OS X        " + b"\0" * 40


def put(path: Path, **values: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.full(3, value, "float32") for name, value in values.items()}, path)
    return path


def index(path: Path, mapping: Mapping[str, str]) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": dict(mapping)}))


def values(source: Any, **options: Any) -> dict[str, float]:
    return {name: float(tensor[0]) for name, tensor in penstock.open(source, **options).load(framework="np").items()}


def told(source: Any, *names: str) -> None:
    """Has the warnings name these."""
    text = " ".join(penstock.open(source).warnings)
    assert all(name in text for name in names), text


def sharded(folder: Path, stem: str, value: float, spelled: str | None = None, count: int = 2) -> Path:
    """Shards, with a tensor each, and their index."""
    files = [f"{stem}-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    for n, file in enumerate(files):
        put(folder / file, **{f"w{n}": value})
    index(folder / (spelled or f"{stem}.safetensors.index.json"), {f"w{n}": file for n, file in enumerate(files)})
    return folder


@pytest.mark.parametrize("spelled", ["model.fp16.safetensors.index.json", "model.safetensors.index.ema.json", INDEX])
def test_diffusers_14719_a_save_beside_an_older_index(tmp_path: Path, spelled: str):
    sharded(tmp_path, spelled.partition(".safetensors")[0], 1, spelled)
    put(tmp_path / "model.safetensors", w0=2, w1=2)
    assert values(tmp_path) == {"w0": 2, "w1": 2}
    told(tmp_path, spelled)


def test_diffusers_14769_a_new_file_beside_old_shards_of_diffusers(tmp_path: Path):
    sharded(tmp_path, "diffusion_pytorch_model", 1)
    put(tmp_path / "diffusion_pytorch_model.safetensors", w0=2, w1=2)
    assert values(tmp_path) == {"w0": 1, "w1": 1}, "diffusers takes the index"
    told(tmp_path, "diffusion_pytorch_model.safetensors")
    for shard in tmp_path.glob("*-of-*"):
        shard.unlink()
    assert values(tmp_path) == {"w0": 2, "w1": 2}
    told(tmp_path, "diffusion_pytorch_model.safetensors.index.json", "none of its shard files")


def test_diffusers_11182_default_shards_beside_those_of_a_variant(tmp_path: Path):
    for stem, value in (("model.bf16", 1.0), ("model", 2.0)):
        sharded(tmp_path, stem, value)
    assert values(tmp_path) == {"w0": 2, "w1": 2}
    (tmp_path / INDEX).unlink()
    assert values(tmp_path) == {"w0": 2, "w1": 2}
    told(tmp_path, "model.bf16.safetensors.index.json", "model.bf16-00001-of-00002.safetensors")


def test_vllm_40765_consolidated_beside_shards(tmp_path: Path):
    put(tmp_path / "consolidated.safetensors", **{"layers.0.attention.wq.weight": 5})
    sharded(tmp_path, "model", 1)
    assert values(tmp_path) == {"w0": 1, "w1": 1}
    told(tmp_path, "consolidated.safetensors")
    (tmp_path / INDEX).unlink()
    assert values(tmp_path) == {"w0": 1, "w1": 1}


def test_sglang_33671_consolidated_beside_one_file(tmp_path: Path):
    put(tmp_path / "consolidated.safetensors", **{"layers.0.attention.wq.weight": 5})
    put(tmp_path / "model.safetensors", w0=1)
    assert values(tmp_path) == {"w0": 1}
    told(tmp_path, "consolidated.safetensors")


def test_infinilm_467_consolidated_shards_alone(tmp_path: Path):
    for n in range(3):
        put(tmp_path / f"consolidated-{n + 1:05}-of-00003.safetensors", **{f"w{n}": n})
    assert values(tmp_path) == {"w0": 0, "w1": 1, "w2": 2}


def test_mistral_inference_205_consolidated_shards_with_their_index(tmp_path: Path):
    sharded(tmp_path, "consolidated", 4)
    assert values(tmp_path) == {"w0": 4, "w1": 4}


@pytest.mark.parametrize("as_list", [False, True])
def test_vllm_54230_the_index_assigns_a_name_to_one_shard(tmp_path: Path, as_list: bool):
    put(tmp_path / "model-00001-of-00002.safetensors", a=1, b=1)
    put(tmp_path / "model-00002-of-00002.safetensors", a=2, c=2)
    for owner, value in (("1", 1.0), ("2", 2.0)):
        files = {name: f"model-0000{n}-of-00002.safetensors" for name, n in {"a": owner, "b": "1", "c": "2"}.items()}
        index(tmp_path / INDEX, files)
        source = sorted(tmp_path.glob("model-*")) if as_list else tmp_path
        assert values(source) == {"a": value, "b": 1, "c": 2}


def test_1cat_vllm_407_a_shard_that_is_reused_for_a_few_tensors(tmp_path: Path):
    put(tmp_path / "reused.safetensors", keep=1, **{f"experts.{n}": 1 for n in range(64)})
    put(tmp_path / "awq.safetensors", **{f"experts.{n}": 2 for n in range(64)})
    index(tmp_path / INDEX, {"keep": "reused.safetensors", **{f"experts.{n}": "awq.safetensors" for n in range(64)}})
    assert values(tmp_path) == {"keep": 1, **{f"experts.{n}": 2 for n in range(64)}}
    told(tmp_path, "64 tensors: passed over")


def test_colibri_1479_an_overlay_supersedes_tensors_of_base_shards(tmp_path: Path):
    put(tmp_path / "model-00001-of-00002.safetensors", a=1, b=1)
    put(tmp_path / "model-00002-of-00002.safetensors", c=1)
    put(tmp_path / "model-overlay-1.safetensors", a=9, c=9)
    overlay, base = "model-overlay-1.safetensors", "model-00001-of-00002.safetensors"
    index(tmp_path / INDEX, {"a": overlay, "b": base, "c": overlay, "d": "model-00002-of-00002.safetensors"})
    assert values(tmp_path) == {"a": 9, "b": 1, "c": 9}
    told(tmp_path, "1 tensor: passed over", "`d`")


def test_spark_vllm_docker_134_a_name_in_two_listed_files_without_an_index(tmp_path: Path):
    files = [put(tmp_path / "a.safetensors", w=1), put(tmp_path / "b.safetensors", w=2)]
    with pytest.raises(penstock.HeaderError, match=r"`w` is also in .*a\.safetensors"):
        penstock.open(files)
    index(tmp_path / INDEX, {"w": "b.safetensors"})
    assert values(files) == {"w": 2}


def test_qwen38_123_verify_tells_what_is_in_two_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    put(tmp_path / "main.safetensors", **{"mtp.fc.weight_packed": 1, "x": 1})
    put(tmp_path / "mtp.safetensors", **{"mtp.fc.weight_packed": 4})
    index(tmp_path / INDEX, {"mtp.fc.weight_packed": "mtp.safetensors", "x": "main.safetensors"})
    assert main(["verify", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "main.safetensors: 1 tensor: passed over" in said
    assert "`mtp.fc.weight_packed` (mtp.safetensors)" in said


def test_vmlx_swift_388_tensors_that_the_index_omits_are_told(tmp_path: Path):
    put(tmp_path / "a.safetensors", w=1, **{"mtp.0": 2})
    index(tmp_path / INDEX, {"w": "a.safetensors"})
    assert values(tmp_path) == {"w": 1}
    told(tmp_path, "mtp.0")
    assert values([tmp_path / "a.safetensors"]) == {"w": 1, "mtp.0": 2}


def test_huggingface_hub_4391_a_name_that_no_shard_has(tmp_path: Path):
    sharded(tmp_path, "model", 1)
    mapping = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    index(tmp_path / INDEX, {**mapping, "lm_head.weight": mapping["w0"]})
    assert values(tmp_path) == {"w0": 1, "w1": 1}
    told(tmp_path, "lm_head.weight")


def test_mlx_vlm_1827_an_index_whose_shards_were_renamed(tmp_path: Path):
    sharded(tmp_path, "model", 1, count=3)
    for shard in tmp_path.glob("*-of-*"):
        shard.unlink()
    put(tmp_path / "model-00001-of-00001.safetensors", w0=2, w1=2, w2=2)
    assert values(tmp_path) == {"w0": 2, "w1": 2, "w2": 2}
    told(tmp_path, INDEX)
    (tmp_path / "model-00001-of-00001.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(penstock.NotFoundError, match="3 of the 3 shard files"):
        penstock.open(tmp_path)


def test_coser_3_an_index_of_30_shards_beside_15(tmp_path: Path):
    index(tmp_path / INDEX, {f"w{n}": f"model-{n + 1:05}-of-00030.safetensors" for n in range(15)})
    for n in range(15):
        put(tmp_path / f"model-{n + 1:05}-of-00015.safetensors", **{f"w{n}": n})
    assert values(tmp_path) == {f"w{n}": n for n in range(15)}
    (tmp_path / "model-00007-of-00015.safetensors").unlink()
    with pytest.raises(penstock.NotFoundError):
        penstock.open(tmp_path)


def test_mlx_vlm_624_an_index_that_is_left_over(tmp_path: Path):
    sharded(tmp_path, "model", 1)
    for shard in tmp_path.glob("*-of-*"):
        shard.unlink()
    put(tmp_path / "model.safetensors", w0=2)
    assert values(tmp_path) == {"w0": 2}
    told(tmp_path, INDEX)


def test_mlx_vlm_1464_one_of_two_checkpoints_and_the_other_is_told(tmp_path: Path):
    sharded(tmp_path, "model", 1)
    put(tmp_path / "model.safetensors", w0=4, **{"w0.scales": 4})
    assert values(tmp_path) == {"w0": 4, "w0.scales": 4}
    told(tmp_path, INDEX, "model-00002-of-00002.safetensors")


def test_vllm_omni_6234_old_shards_beside_those_of_the_index(tmp_path: Path):
    sharded(tmp_path / "transformer", "diffusion_pytorch_model", 1)
    for n in range(8):
        put(tmp_path / "transformer" / f"diffusion_pytorch_model-{n + 1:05}-of-00008.safetensors", w0=7, w1=7)
    assert values(tmp_path / "transformer") == {"w0": 1, "w1": 1}
    told(tmp_path / "transformer", "diffusion_pytorch_model-00008-of-00008.safetensors")


@pytest.mark.parametrize("report", ["SceneWorks#1333", "lmstudio-bug-tracker#486"])
def test_sidecars_of_macos(tmp_path: Path, report: str):
    folder = tmp_path / report.partition("#")[0]
    put(folder / ("model.safetensors" if report.startswith("S") else "weights.safetensors"), w=1)
    for path in [*folder.iterdir()]:
        path.with_name(f"._{path.name}").write_bytes(SIDECAR)
    (folder / ".DS_Store").write_bytes(SIDECAR)
    assert values(folder) == {"w": 1}


def test_mlx_engine_79_a_sidecar_of_each_shard(tmp_path: Path):
    for n in range(3):
        put(tmp_path / f"model-{n + 1:05}-of-00003.safetensors", **{f"w{n}": n})
        (tmp_path / f"._model-{n + 1:05}-of-00003.safetensors").write_bytes(SIDECAR)
    assert values(tmp_path) == {"w0": 0, "w1": 1, "w2": 2}


def test_omlx_3679_a_sidecar_of_the_index(tmp_path: Path):
    put(tmp_path / "a.safetensors", w=1)
    (tmp_path / f"._{INDEX}").write_bytes(SIDECAR)
    (tmp_path / ".safetensors").write_bytes(b"")
    assert values(tmp_path) == {"w": 1}
    with pytest.raises(penstock.NotFoundError, match="only hidden files"):
        (tmp_path / "a.safetensors").unlink()
        penstock.open(tmp_path)


def test_kolors_7_a_variant_alone(tmp_path: Path):
    put(tmp_path / "diffusion_pytorch_model.fp16.safetensors", w=1)
    assert values(tmp_path) == {"w": 1}
    told(tmp_path, 'variant="fp16"')


def test_diffusers_8974_a_variant_where_the_default_is_expected(tmp_path: Path):
    put(tmp_path / "model.fp16.safetensors", w=1)
    told(tmp_path, 'only the variant "fp16"')
    put(tmp_path / "model.fp32.safetensors", w=2)
    with pytest.raises(penstock.IndexFileError, match=r"model\.fp16\.safetensors, model\.fp32\.safetensors"):
        penstock.open(tmp_path)


def test_diffusers_10634_a_variant_is_asked_for(tmp_path: Path):
    sharded(tmp_path, "model.bf16", 1, "model.safetensors.index.bf16.json")
    sharded(tmp_path, "model", 2)
    assert values(tmp_path, variant="bf16") == {"w0": 1, "w1": 1}
    assert values(tmp_path) == {"w0": 2, "w1": 2}


# Tied names


def tiny(kind: str) -> Any:
    import transformers as t

    small = {
        "vocab_size": 32,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**small, num_key_value_heads=2, tie_word_embeddings=True))
    if kind == "opt":
        config = t.OPTConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16,
                             word_embed_proj_dim=8)  # fmt: skip
        return t.OPTForCausalLM(config)
    return t.LayoutLMForMaskedLM(t.LayoutLMConfig(**small, max_position_embeddings=16))


@pytest.mark.parametrize(
    ("report", "kind", "auto", "embedding"),
    [
        ("transformers#38870", "llama", "AutoModel", "embed_tokens.weight"),
        ("transformers#34759", "llama", "AutoModelForCausalLM", "model.embed_tokens.weight"),
        ("transformers#30125", "layoutlm", "AutoModel", "embeddings.word_embeddings.weight"),
        ("transformers#43159", "opt", "AutoModelForCausalLM", "model.decoder.embed_tokens.weight"),
    ],
)
def test_the_embedding_is_saved_under_its_own_name(tmp_path: Path, report: str, kind: str, auto: str, embedding: str):
    transformers = pytest.importorskip("transformers")
    model = tiny(kind)
    penstock.save(model, tmp_path, fsync=False)
    model.config.save_pretrained(tmp_path)
    again = getattr(transformers, auto).from_pretrained(tmp_path)
    assert torch.equal(again.state_dict()[embedding], model.get_input_embeddings().weight), report


class Own(nn.Module):
    """A head that is registered before the embedding that it is tied to."""

    _tied_weights_keys = ["head.weight"]  # noqa: RUF012 - as transformers has it

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6, bias=False)
        self.tokens = nn.Embedding(6, 4)
        self.head.weight = self.tokens.weight


@pytest.mark.parametrize("report", ["transformers#41038", "transformers#30202", "text-generation-inference#501"])
def test_the_name_that_was_left_out_is_in_the_metadata(tmp_path: Path, report: str):
    model = Own()
    penstock.save(model, tmp_path, fsync=False)
    checkpoint = penstock.open(tmp_path)
    assert (list(checkpoint), checkpoint.metadata["head.weight"]) == (["tokens.weight"], "tokens.weight"), report
    expected = model.tokens.weight.detach().clone()
    with torch.no_grad():
        model.head.weight.zero_()
    checkpoint.load_into(model)
    assert torch.equal(model.head.weight, expected)


def test_safetensors_652_save_model_is_as_theirs(tmp_path: Path):
    import penstock.torch
    import safetensors.torch

    penstock.torch.save_model(Own(), tmp_path / "ours.safetensors")
    safetensors.torch.save_model(Own(), tmp_path / "theirs.safetensors")
    ours, theirs = (penstock.open(tmp_path / f"{whose}.safetensors") for whose in ("ours", "theirs"))
    assert (list(ours), ours.metadata) == (list(theirs), theirs.metadata)
