"""SGLang's real loader, found by entry point, with load format penstock beside its own safetensors.

SGLang 0.5.23 on a machine without a GPU and without sgl-kernel, with its CPU engine off (SGLANG_USE_CPU_ENGINE). No
part of it is stubbed: `load_model` runs whole, post-processing included.

| model class | made | of note |
|---|---|---|
| LlamaForCausalLM, Qwen3MoeForCausalLM, MixtralForCausalLM | yes | |
| GptOssForCausalLM, BF16 experts | yes | biases are cast to F32 as they are loaded |
| DeepseekV3ForCausalLM, also its draft, ...NextN | yes | only with rope scaling "yarn" and a `moe_layer_freq` |
| any, SGLANG_USE_CPU_ENGINE=1 | no | importing the loader imports `copy_all_layer_kv_cache_cpu` of sgl_kernel |

Groups of several ranks get no NCCL communicator: SGLang would make one of the library that torch's wheel brings.
A forward pass, the server, captured graphs and quantised models are not reached here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ordeal
import pytest
import tiny_models
import torch
from penstock.integrations import _drift
from penstock.integrations._known import SGLANG
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
#: Has SGLang and Penstock.
PYTHON = os.environ.get("PENSTOCK_ENGINES_PYTHON", sys.executable)
#: Seconds for all tasks of the ranks of one size: importing SGLang alone has taken 155.
LIMIT = 900 * ordeal.load_factor()
MODELS = ("llama", "qwen3-moe", "mixtral", "gpt-oss", "deepseek")
#: The class of each model, and how many parameters one has.
MADE = {
    "llama": ["LlamaForCausalLM", 27],
    "qwen3-moe": ["Qwen3MoeForCausalLM", 39],
    "experts": ["Qwen3MoeForCausalLM", 39],
    "mixtral": ["MixtralForCausalLM", 31],
    "gpt-oss": ["GptOssForCausalLM", 55],
    "deepseek": ["DeepseekV3ForCausalLM", 55],
    "draft": ["DeepseekV3ForCausalLMNextN", 20],
}
MIB = 1 << 20
DRIFTS = {
    "choices": "cannot import name 'add_load_format_choices'",
    "steps": "has no attribute 'register_resolution_hook'",
    "verify": "no attribute '_verify_load_format'",
    "class": "cannot import name 'LoadConfig'",
    "prepare": "no attribute '_prepare_weights'",
    "iterator": "no attribute '_get_weights_iterator'",
    "function": "no attribute 'safetensors_weights_iterator'",
    "threads": "no attribute 'buffered_multi_thread_safetensors_weights_iterator'",
    "load": "no attribute 'load_weights_only'",
    "arguments": "takes model, weights, target_device, extra, not model, weights, target_device",
    "renamed": "does not call safetensors_weights_iterator, buffered_multi_thread_safetensors_weights_iterator",
    "later": "has called none of",
    "model": "has asked for no tensors",
}
#: What only a load shows: all places have the form that is known.
LATE = ("later", "model")


def _add_head(folder: Path) -> None:
    """Adds a head that predicts a second token: the last layer again, with what the head has besides."""
    tensors = {name: one for path in _shards(folder) for name, one in load_file(path).items()}
    head = {name.replace(".3.", ".4.", 1): one for name, one in tensors.items() if name.startswith("model.layers.3.")}
    for name, shape in {"eh_proj": (256, 512), "enorm": (256,), "hnorm": (256,), "shared_head.norm": (256,)}.items():
        head[f"model.layers.4.{name}.weight"] = torch.randn(shape).bfloat16()
    for name, other in {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}.items():
        head[f"model.layers.4.{name}.weight"] = tensors[f"{other}.weight"]
    save_file({name: one.clone() for name, one in head.items()}, folder / "model-head.safetensors")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(head, "model-head.safetensors")
    path.write_text(json.dumps(index))


def _have_old_version(folder: Path) -> None:
    """Adds an old version of a tensor of the first shard to the last one. The index does not say so."""
    first, *_, last = _shards(folder)
    name, tensor = next((n, t) for n, t in load_file(first).items() if n.endswith("down_proj.weight"))
    save_file({**load_file(last), name: -tensor}, last, {"format": "pt"})


def _port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _with_shape_of_one_turned(path: Path) -> None:
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    name = [one for one in header if one.endswith("down_proj.weight")][-1]
    header[name]["shape"].reverse()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints: one of each model, another one of Llama, and what is left of that when it is broken."""
    root = tmp_path_factory.mktemp("sglang")
    found = {
        name: root / name for name in (*MODELS, "other", "truncated", "missing", "shape", "torn", "twice", "pickled")
    }
    for model, name, seed in (*((name, name, 0) for name in MODELS), ("llama", "other", 1)):
        tiny_models.write(model, found[name], seed)
    assert all(len(_shards(found[name])) > 1 for name in (*MODELS, "other"))
    config = json.loads((found["deepseek"] / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
    _add_head(found["deepseek"])
    config |= {
        "num_nextn_predict_layers": 1,
        "moe_layer_freq": 1,
        "rope_parameters": rope | {"mscale": 1.0, "mscale_all_dim": 1.0},
    }
    (found["deepseek"] / "config.json").write_text(json.dumps(config))
    for name in ("truncated", "missing", "shape", "torn", "twice", "pickled"):
        shutil.copytree(found["other"], found[name])
    last = {name: _shards(found[name])[-1] for name in found}
    os.truncate(last["truncated"], last["truncated"].stat().st_size - 1000)
    last["missing"].unlink()
    _with_shape_of_one_turned(last["shape"])
    _have_old_version(found["twice"])
    for shard in _shards(found["pickled"]):
        shard.rename(shard.with_name(f"pytorch_{shard.stem}.bin"))
    (found["pickled"] / "model.safetensors.index.json").unlink()
    return found


class Run:
    """What ranks were told to do, and what came of it."""

    def __init__(self, size: int, tasks: list[dict[str, Any]], folder: Path, program: str = "sglang_rank.py") -> None:
        self.size, self._out, self._logs = size, folder / "out", [folder / f"log.{rank}" for rank in range(size)]
        self._code: int | None = None
        spec = folder / "spec.json"
        tasks = [task | {"port": _port()} for task in tasks]
        logs = list(map(str, self._logs))
        spec.write_text(json.dumps({"size": size, "tasks": tasks, "out": str(self._out), "logs": logs}))
        with (folder / "log").open("w") as log:
            ranks = subprocess.Popen(
                [PYTHON, HERE / program, spec],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # What is kept counts, not over how many arenas malloc spreads what threads free
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
            try:
                ranks.wait(LIMIT)
            except subprocess.TimeoutExpired:
                pass  # a result is missing: its test says so, with the log
            finally:
                if ranks.poll() != 0:
                    with suppress(ProcessLookupError):
                        os.killpg(ranks.pid, 9)
                self._code = ranks.wait()
        self._logs = [log if log.exists() else folder / "log" for log in self._logs]

    def of(self, name: str) -> list[dict[str, Any]]:
        """What came of a task, by rank."""
        found = []
        for rank, log in enumerate(self._logs):
            path = Path(f"{self._out}.{name}.{rank}.json")
            one = json.loads(path.read_text()) if path.exists() else {"error": f"no result, exit {self._code}"}
            if "error" in one:
                pytest.fail(f"{name}, rank {rank} of {self.size}: {one['error']}\n\n{log.read_text()[-4000:]}")
            found.append(one)
        return found


def _compared(places: dict[str, Path]) -> list[dict[str, Any]]:
    draft = {"folder": str(places["deepseek"]), "draft": True}
    models = [{"name": name, "do": "compare", "with": {"folder": str(places[name])}} for name in MODELS]
    return [*models, {"name": "draft", "do": "compare", "with": draft}]


def _updated(places: dict[str, Path]) -> dict[str, Any]:
    folders = [str(places["llama"]), str(places["other"])]
    return {"name": "updates", "do": "updates", "with": {"folders": folders, "times": 20}}


@pytest.fixture(scope="session")
def single(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """All that one rank does."""
    llama = str(places["llama"])
    broken = {name: str(places[name]) for name in ("truncated", "missing", "shape", "pickled")}
    torn = {"torn": str(places["torn"]), "shard": str(_shards(places["torn"])[0])}
    tasks = [
        *_compared(places),
        _updated(places),
        {"name": "parses", "do": "parses", "with": {"folder": llama}},
        {"name": "fallback", "do": "fallback", "with": {"folder": llama}},
        {"name": "outside", "do": "outside", "with": {"folder": llama}},
        {"name": "adapter", "do": "adapter", "with": {"folder": llama, "weights": str(places["other"])}},
        {"name": "elsewhere", "do": "elsewhere", "with": {"folder": llama, "weights": str(places["other"])}},
        {"name": "twice", "do": "elsewhere", "with": {"folder": llama, "weights": str(places["twice"])}},
        {"name": "failures", "do": "failures", "with": {"folder": llama, "broken": broken, **torn}},
        *({"name": f"drift {kind}", "do": "drift", "with": {"folder": llama, "kind": kind}} for kind in DRIFTS),
        {"name": "untried", "do": "untried", "with": {"folder": llama}},
        {"name": "strict", "do": "fallback", "with": {"folder": llama, "strict": True}},
    ]
    yield Run(1, tasks, tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="session")
def pair(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """All that two ranks do."""
    experts = {"folder": str(places["qwen3-moe"]), "args": {"ep_size": 2}}
    tasks = [*_compared(places), {"name": "experts", "do": "compare", "with": experts}, _updated(places)]
    yield Run(2, tasks, tmp_path_factory.mktemp("pair"))


#: (copies, materialised operations, their bytes, bytes of these that a load then need not read), each for the ranks
#: that differ. DeepSeek: `torch.cat` of two projections, four times. GPT-OSS: ranks other than the first write zeros
#: over a bias that all of them would add.
_PLAIN: dict[str, tuple[int, dict[str, int], int, int]] = {
    "llama": (39, {}, 0, 0),
    "qwen3-moe": (135, {}, 0, 0),
    "experts": (87, {}, 0, 0),
    "mixtral": (127, {}, 0, 0),
    "gpt-oss": (71, {}, 0, 0),
    "deepseek": (121, {"aten.cat.default": 4}, 393216, 393216),
    "draft": (40, {"aten.cat.default": 1}, 98304, 98304),
}
_SECOND: dict[str, tuple[int, dict[str, int], int, int]] = {
    **_PLAIN,
    "gpt-oss": (67, {"aten.zero_.default": 4, "aten.copy_.default": 4}, 32768, 16384),
}


def _check_equal(name: str, ranks: list[dict[str, Any]]) -> None:
    for number, found in enumerate(ranks):
        # A draft model is given the target's vocabulary after its load
        without = ["lm_head.weight", "model.embed_tokens.weight"] if name == "draft" else []
        copies, materialised, nbytes, elsewhere = (_SECOND if number else _PLAIN)[name]
        assert found["untouched"], "the load with safetensors came first, and nothing but the check was hooked"
        assert (found["different"], found["kept"], found["left"]) == (without, without, [])
        assert [found["model"], found["parameters"]] == MADE[name]
        assert found["said"] == []
        [report] = found["reports"]
        assert report == {
            "nbytes": 2 * found["elements"] - elsewhere,  # the checkpoint is BF16; without the padding
            "loads": 1,
            "copies": copies,
            "materialised": materialised,
            "materialised_bytes": nbytes,
            "copied_through": [],
            "fallbacks": [],
        }


@pytest.mark.parametrize("name", [*MODELS, "draft"])
def test_one_rank_gets_what_safetensors_gives_in_one_load(single: Run, name: str):
    _check_equal(name, single.of(name))


@pytest.mark.parametrize("name", [*MODELS, "draft", "experts"])
def test_each_of_two_ranks_gets_its_part_in_one_load_of_no_other_bytes(pair: Run, name: str):
    _check_equal(name, pair.of(name))


def test_the_format_is_an_argument_once_plugins_are_loaded_and_then_means_safetensors(single: Run):
    [found] = single.of("parses")
    assert (found["before"], found["after"]) == ("exit 2", "penstock")
    assert found["choices"] == 1, "register was called four times"
    assert found["mine"] == [True, {}, "/elsewhere"]
    assert found["loader"] == "DefaultModelLoader"
    assert found["said"] == []


def test_a_configuration_of_another_format_changes_nothing(single: Run):
    [found] = single.of("parses")
    assert found["plain"] == ["safetensors", {"num_threads": 2}, False]
    assert found["wrapped before"] == [False, False, False]
    assert not found["loaded before"]
    assert found["still unknown"]["text"] == "'rocket' is not a valid LoadFormat"


def test_unknown_keys_are_refused_and_the_known_ones_listed(single: Run):
    [found] = single.of("parses")
    assert "ValueError" in found["unknown"]["bases"]
    assert "unknown options bogus; load format penstock takes weights, storage, " in found["unknown"]["text"]
    assert ", threads, " in found["unknown"]["text"]
    assert "ValueError" in found["not an object"]["bases"]
    assert "give an object of JSON" in found["not an object"]["text"]


def test_weights_names_another_place(single: Run, places: dict[str, Path]):
    [found] = single.of("elsewhere")
    assert found["different"] == []
    assert found["path"] == str(places["llama"])
    assert found["reports"][0]["loads"] == 1


def test_what_cannot_be_recorded_is_loaded_as_sglang_does_and_the_report_says_why(single: Run):
    [found] = single.of("fallback")
    assert found["different"] == []
    reason = {"from": "penstock", "to": "the engine's own loader", "reason": "no such luck"}
    assert (found["report"]["loads"], found["report"]["fallbacks"]) == (0, [reason])
    assert found["said"] == ["penstock: loading as SGLang does: no such luck"]


def test_what_cannot_be_recorded_is_an_error_unless_the_user_accepts_sglangs_own_way(single: Run):
    [found] = single.of("strict")
    assert found["refused"]["type"] == "UnsupportedError"
    assert "SGLang would load in its own way: no such luck" in found["refused"]["text"]


def test_tensors_that_are_asked_for_outside_of_a_load_are_real(single: Run, places: dict[str, Path]):
    [found] = single.of("outside")
    assert found == {name: ["Tensor", text] for name, text in _digests(places["llama"]).items()}


def _digests(folder: Path) -> dict[str, str]:
    expected = {}
    for path in _shards(folder):
        whole = path.read_bytes()
        length = int.from_bytes(whole[:8], "little")
        for name, info in json.loads(whole[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + at for at in info["data_offsets"])
                text = f"{hashlib.sha256(whole[begin:end]).hexdigest()} {tuple(info['shape'])} torch.bfloat16"
                expected[name] = text
    return expected


def test_an_adapter_is_loaded_from_its_own_place_where_weights_names_one_for_the_model(
    single: Run, places: dict[str, Path]
):
    [found] = single.of("adapter")
    assert found["adapter"] == {"returned": found["expected"]}
    assert found["model"] == _digests(places["other"])


def test_tensors_outside_of_a_load_that_penstock_refuses_are_an_error_unless_the_user_accepts_sglangs_own(single: Run):
    [found] = single.of("adapter")
    assert found["strict"]["type"] == "UnsupportedError"
    assert "SGLang would load in its own way: no such luck" in found["strict"]["text"]
    assert found["accepted"] == {"returned": found["expected"]}
    assert found["said"] == ["penstock: loading as SGLang does: no such luck"]


@pytest.mark.parametrize("size", ["single", "pair"])
def test_twenty_updates_from_disk_change_values_and_neither_addresses_nor_memory(
    size: str, request: pytest.FixtureRequest
):
    for found in request.getfixturevalue(size).of("updates"):
        assert found["said"] == [[True, "Succeeded to update model weights."]] * 20
        assert found["checkpoints differ in"] == found["parameters"] == 27
        assert found["different"] == [] and found["moved"] == []
        assert [(one["loads"], one["copied_through"]) for one in found["reports"]] == [(1, [])] * 20
        assert max(found["resident"][5:]) - found["resident"][4] <= MIB
        assert found["with 64 MiB more"] >= 60 * MIB, "memory is measured"


def test_a_truncated_shard_is_an_error_with_a_type_that_changes_nothing(single: Run):
    [found] = single.of("failures")
    for when in ("update", "start"):
        assert found[f"{when} truncated"]["type"] == "TruncatedError"
        assert "1000 bytes short" in found[f"{when} truncated"]["text"]
    assert not found["update truncated"]["different"] and not found["update truncated"]["moved"]


def test_a_missing_shard_is_what_sglang_makes_of_it_and_changes_nothing(single: Run):
    [found] = single.of("failures")
    good, text = found["update missing"]["returned"]
    assert not good
    assert text.startswith("Failed to get weights iterator: ") and "1 shard file(s) missing" in text
    assert not found["update missing"]["different"] and not found["update missing"]["moved"]
    assert found["start missing"]["type"] == "RuntimeError"


def test_of_a_tensor_in_two_shards_the_index_says_which(single: Run):
    """`twice` has an old version of one tensor in its last shard, and is otherwise `other`."""
    [found] = single.of("twice")
    [expected] = single.of("elsewhere")
    assert found["digests"] == expected["digests"]


def test_only_pickles_are_an_error_that_names_convert(single: Run):
    [found] = single.of("failures")
    assert found["start pickled"]["type"] == "UnsupportedError"
    assert "penstock convert" in found["start pickled"]["text"]


def test_a_wrong_shape_is_an_error_of_the_model_that_changes_nothing(single: Run):
    [found] = single.of("failures")
    for when in ("update", "start"):
        assert found[f"{when} shape"]["type"] == "AssertionError"
        assert "[512, 512]" in found[f"{when} shape"]["text"]
    assert not found["update shape"]["different"] and not found["update shape"]["moved"]


def test_a_file_that_is_cut_short_during_the_load_is_an_error_that_says_what_was_overwritten(single: Run):
    [found] = single.of("failures")
    torn = found["torn"]
    assert "PenstockError" in torn["bases"]
    assert torn["touched"], f"cut too late {torn['attempts']} times"
    assert torn["changed"] == torn["of touched"]
    assert not torn["moved"]


@pytest.mark.parametrize("kind", DRIFTS)
def test_an_sglang_with_other_names_loads_its_own_way_and_one_line_says_why(single: Run, kind: str):
    [found] = single.of(f"drift {kind}")
    [said] = found["said"]
    assert DRIFTS[kind] in said
    # The load that is refused, where SGLang had begun it, is an event
    assert all(re.match("penstock: load \\(sglang\\) of .*failed.*UnsupportedError", one) for one in found["errors"])
    assert len(found["errors"]) == (kind == "later")
    assert found["known"] == (kind not in ("choices", "verify", "class"))
    if found["known"]:
        assert found["strict"]["type"] == "UnsupportedError"
        assert DRIFTS[kind] in found["strict"]["text"] and "PENSTOCK_STRICT=0" in found["strict"]["text"]
        if kind not in LATE:
            assert f"{SGLANG.tested[-1]}, the last known version: " in found["strict"]["text"]
            assert _drift.way_out(SGLANG) in found["strict"]["text"]
    assert found["different"] == ([] if found["known"] else None)
    if kind == "steps":
        assert found["address"]["type"] == "UnsupportedError"
        assert "give a folder" in found["address"]["text"]


def test_a_release_of_sglang_that_nobody_has_tried_says_so_once_and_loads(single: Run):
    [found] = single.of("untried")
    assert found["different"] == []
    said = found["said"][-1]
    assert found["said"] == [*found["before"], said]
    assert said.startswith("penstock: SGLang 0.9.0 is not a release that Penstock was tested with (SGLang ")
    assert found["loads"] == [1, 1], "both loads are Penstock's"


def test_this_release_of_sglang_starts_without_a_word_if_it_was_tested(single: Run):
    [found] = single.of("untried")
    assert len(found["before"]) == (0 if found["tested"] else 1)
