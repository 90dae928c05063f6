"""Tensors of a module that share memory: under which names they are saved, and that they come back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import penstock
import penstock.torch
import pytest
import safetensors.torch
import torch
from penstock._convert import convert
from torch import nn

ROWS, COLUMNS = 6, 4


class Views(nn.Module):
    """Parameters of which one is a view of another, as ``view`` makes it of a matrix of 6 rows and 4 columns."""

    def __init__(self, view: Any, whole_first: bool) -> None:
        super().__init__()
        whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + 1
        made = {"whole": nn.Parameter(whole), "view": nn.Parameter(view(whole))}
        for name in ("whole", "view") if whole_first else ("view", "whole"):
            self.register_parameter(name, made[name])


VIEWS = {
    "the first rows": lambda w: w[:2],
    "the last rows": lambda w: w[4:],
    "transposed": lambda w: w.t(),
    "reshaped": lambda w: w.view(COLUMNS, ROWS),
    "flat": lambda w: w.view(-1),
    "a column": lambda w: w[:, 1],
    "one number": lambda w: w[3, 2],
    "every second row": lambda w: w[::2],
    "rows transposed": lambda w: w[2:4].t(),
    "other bytes": lambda w: w.view(torch.int32).view(torch.float32)[1:5, :2],
}


def names_in(path: Path) -> list[str]:
    return sorted(penstock.open(path))


@pytest.mark.parametrize("whole_first", [True, False])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_is_saved_and_comes_back(tmp_path: Path, view: Any, whole_first: bool):
    module = Views(view, whole_first)
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    penstock.save(module, tmp_path, fsync=False)
    assert names_in(tmp_path) == ["view", "whole"]
    stored = penstock.open(tmp_path).load()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    # Into the same module, and its parts by name: nothing is missed, and nothing is refused
    for into in (module, dict(module.state_dict())):
        with torch.no_grad():
            module.whole.zero_()
        report = penstock.open(tmp_path).load_into(into)
        assert report.missing == []
        assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())
    # And into tensors that share nothing
    apart = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    penstock.open(tmp_path).load_into(apart)
    assert all(torch.equal(apart[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_that_a_file_lacks_is_not_missed(tmp_path: Path, view: Any):
    """As `safetensors.torch.save_model` writes it."""
    module = Views(view, True)
    safetensors.torch.save_file({"whole": module.whole.detach().clone()}, tmp_path / "model.safetensors")
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        module.whole.zero_()
    assert penstock.open(tmp_path).load_into(module).missing == []
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())


def test_a_whole_whose_parts_are_all_there_is_not_missed(tmp_path: Path):
    whole = torch.zeros(6, 4)
    parts = {f"part{n}": whole[2 * n : 2 * n + 2] for n in range(3)}
    stored = {name: torch.full((2, 4), 1.0 + n) for n, name in enumerate(parts)}
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    penstock.open(tmp_path).load_into({"whole": whole, **parts})
    assert whole[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    with pytest.raises(penstock.MismatchError, match="whole is missing"):
        penstock.open(tmp_path).load_into(
            {"whole": whole, "part0": parts["part0"], "part1": parts["part1"]}, names="part[01]"
        )


@pytest.mark.parametrize("order", [("whole", "a", "b"), ("b", "whole", "a"), ("a", "b", "whole"), ("b", "a", "whole")])
def test_of_values_that_disagree_the_last_one_counts_as_in_load_state_dict(tmp_path: Path, order: tuple[str, ...]):
    whole = torch.zeros(4, 4)
    tensors = {"whole": whole, "a": whole[:2], "b": whole[1]}
    stored = {"whole": torch.full((4, 4), 1.0), "a": torch.full((2, 4), 2.0), "b": torch.full((4,), 3.0)}
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    report = penstock.open(tmp_path).load_into({name: tensors[name] for name in order})
    reference = torch.zeros(4, 4)
    for name in order:
        {"whole": reference, "a": reference[:2], "b": reference[1]}[name].copy_(stored[name])
    assert torch.equal(whole, reference)
    assert set(report.copied_through) <= set(order[1:])


class Heads(nn.Module):
    """Two names of one tensor, registered in this order."""

    def __init__(self, names: tuple[str, ...], tied: Any = None) -> None:
        super().__init__()
        shared = nn.Parameter(torch.ones(3, 2))
        for name in names:
            part = nn.Module()
            part.weight = shared
            self.add_module(name, part)
        if tied is not None:
            self._tied_weights_keys = tied


@pytest.mark.parametrize(
    ("names", "said", "kept"),
    [
        (("model_embed", "a_head"), None, "model_embed"),
        (("a_head", "model_embed"), None, "a_head"),
        (("a_head", "model_embed"), {"a_head.weight": "model_embed.weight"}, "model_embed"),
        (("a_head", "model_embed"), ["a_head.weight"], "model_embed"),
        (("a_head", "model_embed"), [r"a_head\.weight", r"model_embed\.weight"], "a_head"),
        (("z", "y", "x"), None, "z"),
        (("z", "y", "x"), [r"^[zy]\."], "x"),
        (("z", "y", "x"), {}, "z"),
    ],
)
def test_the_order_of_the_state_and_the_tied_keys_say_which_name_is_kept(
    tmp_path: Path, names: tuple[str, ...], said: Any, kept: str
):
    for module, start in ((Heads(names, said), ""), (nn.ModuleDict({"inner": Heads(names, said)}), "inner.")):
        penstock.save(module, tmp_path, fsync=False)
        assert names_in(tmp_path) == [f"{start}{kept}.weight"]
        others = {f"{start}{name}.weight": f"{start}{kept}.weight" for name in names if name != kept}
        assert penstock.open(tmp_path).metadata == {"format": "pt", **others}
        with torch.no_grad():
            next(module.parameters()).zero_()
        penstock.open(tmp_path).load_into(module)
        assert next(module.parameters()).all()


@pytest.mark.parametrize("names", [("z.embed", "a.head"), ("a.head", "z.embed")])
def test_a_pickle_is_converted_with_the_first_name_of_its_state(tmp_path: Path, names: tuple[str, ...]):
    shared = torch.ones(3, 2)
    state = {names[0]: shared, "other": torch.ones(1), names[1]: shared, "view": shared[:2], "turned": shared.t()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    for sidecar in ("._pytorch_model.bin", "._model.safetensors", "._x.pt"):
        (tmp_path / sidecar).write_bytes(b"\0\5\x16\7")
    convert([str(tmp_path)], tmp_path / "out", progress=False)
    assert names_in(tmp_path / "out") == sorted([names[0], "other", "view", "turned"])
    assert penstock.open(tmp_path / "out").metadata[names[1]] == names[0]


def test_save_model_keeps_the_name_that_safetensors_keeps(tmp_path: Path):
    for number, names in enumerate([("z", "a"), ("a", "z"), ("m", "z", "a")]):
        ours, theirs = tmp_path / f"ours{number}.safetensors", tmp_path / f"theirs{number}.safetensors"
        penstock.torch.save_model(Heads(names), ours)
        safetensors.torch.save_model(Heads(names), theirs)
        assert (names_in(ours), penstock.open(ours).metadata) == (names_in(theirs), penstock.open(theirs).metadata)


def tiny_models() -> dict[str, Any]:
    """Models of transformers with tied embeddings, by the order and the kinds of their ties."""
    import transformers as t

    small = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    t5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**small, num_key_value_heads=2, tie_word_embeddings=True)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**small, num_key_value_heads=2, tie_word_embeddings=True)),
        "gemma": lambda: t.GemmaForCausalLM(t.GemmaConfig(**small, num_key_value_heads=2, head_dim=8)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2)),
        "opt": lambda: t.OPTForCausalLM(
            t.OPTConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
                        word_embed_proj_dim=16)
        ),
        "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**t5)),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**small)),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "gpt2", "opt", "t5", "bert"])
@pytest.mark.parametrize("way", ["save", "convert"])
def test_transformers_finds_every_weight_under_every_auto_class(tmp_path: Path, kind: str, way: str):
    transformers = pytest.importorskip("transformers")
    assert transformers.__version__.startswith(os.environ.get("PENSTOCK_TEST_TRANSFORMERS", "5."))
    torch.manual_seed(0)
    model = tiny_models()[kind]().eval()
    folder = tmp_path / "model"
    if way == "save":
        penstock.save(model, folder, fsync=False)
    else:
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        convert([str(tmp_path / "pytorch_model.bin")], folder, progress=False)
    model.config.save_pretrained(folder)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    head = {"t5": "AutoModelForSeq2SeqLM", "bert": "AutoModelForMaskedLM"}.get(kind, "AutoModelForCausalLM")
    for auto in ("AutoModel", head):
        again, info = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
        left = {name for name in info["missing_keys"] if not name.startswith(("pooler", "bert.pooler"))}
        assert not left, auto
        found = again.state_dict()
        prefix = (
            ""
            if auto == head
            else next((p for p in ("model.", "transformer.", "bert.") if p + next(iter(found)) in expected), "")
        )
        same = [name for name in found if prefix + name in expected]
        assert len(same) >= len(found) - 2, auto
        assert all(torch.equal(found[name], expected[prefix + name]) for name in same), auto
    # Into the model itself
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    penstock.open(folder).load_into(model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_expanded_tensors_that_see_their_memory_differently_are_not_tied(tmp_path: Path):
    row = torch.arange(3.0)
    module = nn.Module()
    module.register_buffer("across", row.expand(3, 3))
    module.register_buffer("down", row.unsqueeze(1).expand(3, 3))
    penstock.save(module, tmp_path / "saved", fsync=False)
    found = penstock.open(tmp_path / "saved").load("cpu", framework="pt")
    assert torch.equal(found["across"], row.expand(3, 3)) and torch.equal(found["down"], row.unsqueeze(1).expand(3, 3))


def test_what_a_file_lacks_is_found_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not for each of thousands of tensors anew."""
    spans: list[object] = []
    span = penstock._memory._span
    monkeypatch.setattr(penstock._memory, "_span", lambda to: (spans.append(to), span(to))[1])
    state = {f"{i:04}": torch.zeros(2) for i in range(2000)}
    penstock.save_file({name: state[name] for name in list(state)[:500]}, tmp_path / "part.safetensors", fsync=False)
    report = penstock.open(tmp_path / "part.safetensors").load_into(state, strict=False)
    assert len(report["missing"]) == 1500
    assert len(spans) <= 8 * len(state), len(spans)
