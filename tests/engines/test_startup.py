"""The start report with the real engines on a CPU: fresh processes, from their first line to the loaded model.

Each start imports an engine, which takes longer than all the rest. Of a start on a GPU, what needs none is tried: the
request, and what workers measure.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from penstock import EngineError
from penstock.integrations import _start_report
from penstock.integrations._startup import PHASES

RANKS = 2
#: The starts that are measured: engine and load format.
STARTS = [("vllm", "penstock"), ("vllm", "safetensors"), ("sglang", "penstock")]


def processes() -> set[int]:
    """Those of ranks."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"_start_rank" in command:
            found.add(int(path.parent.name))
    return found


@pytest.fixture(autouse=True)
def _none_left():
    before = processes()
    yield
    assert processes() <= before


def command(model: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "penstock.cli", "engines", "report", str(model), "--json", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def report(checkpoint: Callable[[str], Path]) -> Callable[[str, str], dict[str, Any]]:
    """What the command says of a start."""
    made: dict[tuple[str, str], dict[str, Any]] = {}

    def find(engine: str, load_format: str) -> dict[str, Any]:
        if (engine, load_format) not in made:
            arguments = ["--engine", engine, "--load-format", load_format, "--tensor-parallel-size", str(RANKS)]
            if (engine, load_format) == ("vllm", "penstock"):
                # So small a model would be mapped, and nothing recorded
                arguments += ["--model-loader-extra-config", '{"mapped": "off"}']
            done = command(checkpoint("qwen3-moe"), *arguments)
            assert done.returncode == 0, done.stderr
            assert done.stderr == ""
            made[engine, load_format] = json.loads(done.stdout)
        return made[engine, load_format]

    return find


@pytest.fixture(params=STARTS, ids="-".join)
def found(request: pytest.FixtureRequest, report: Callable[[str, str], dict[str, Any]]) -> dict[str, Any]:
    return report(*request.param)


#: Phases that every start on a CPU has.
ALWAYS = {"import", "configuration", "model_creation", "reading"}


def absent(found: dict[str, Any]) -> set[str]:
    """Phases that did not take place."""
    none = {"download", "compilation"}
    none |= {"post_processing"} if found["engine"] == "vllm" else set()
    return none | ({"recording"} if found["load_format"] != "penstock" else set())


def test_every_phase_has_its_seconds_or_a_reason(found: dict[str, Any]):
    assert list(found["phases"]) == [*PHASES, "ready"]
    assert [rank["rank"] for rank in found["ranks"]] == list(range(RANKS))
    for rank in found["ranks"]:
        phases = rank["phases"]
        assert list(phases) == list(PHASES)
        assert {name for name in PHASES if phases[name]["seconds"] is None} == absent(found)
        assert {name for name in PHASES if phases[name]["reason"]} == absent(found)
        assert all(phases[name]["seconds"] > 0 for name in ALWAYS)


def test_an_operator_that_vllm_lacks_is_told(report: Callable[[str, str], dict[str, Any]]):
    for rank in report("vllm", "penstock")["ranks"]:
        assert "lacks an operator for CPUs, _C." in rank["phases"]["post_processing"]["reason"]


def test_the_phases_add_up(found: dict[str, Any]):
    for rank in found["ranks"]:
        seconds = sum(phase["seconds"] or 0 for phase in rank["phases"].values())
        assert rank["other_seconds"] >= 0
        assert seconds + rank["other_seconds"] == pytest.approx(rank["ready_seconds"])


def test_the_slowest_rank_is_named(found: dict[str, Any]):
    for name in ALWAYS:
        phase, seconds = found["phases"][name], [rank["phases"][name]["seconds"] for rank in found["ranks"]]
        assert phase["seconds"] == max(seconds) == seconds[phase["rank"]]
    assert found["phases"]["ready"]["seconds"] == max(rank["ready_seconds"] for rank in found["ranks"])


def test_each_rank_says_what_it_read(found: dict[str, Any], checkpoint: Callable[[str], Path]):
    everything = sum(file.stat().st_size for file in checkpoint("qwen3-moe").glob("*.safetensors"))
    for rank in found["ranks"]:
        load = rank["load"]
        if found["load_format"] != "penstock":
            assert load is None
            continue
        assert load["loads"] == 1
        assert load["copies"] > 0
        assert load["materialised"] == {}
        assert load["fallbacks"] == []
        assert 0 < load["wanted_bytes"] < everything * 0.6
        assert load["read_bytes"] <= everything
        assert load["wanted_bytes"] <= load["read_bytes"] + load["received_bytes"]


def test_a_model_that_cannot_be_loaded(checkpoint: Callable[[str], Path], tmp_path: Path):
    broken = shutil.copytree(checkpoint("llama"), tmp_path / "broken")
    shard = max(broken.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 100)
    done = command(broken, "--tensor-parallel-size", str(RANKS))
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert (error["kind"], error["path"]) == ("Engine", str(shard))
    assert "failed in recording: TruncatedError" in error["message"]
    assert error["message"].startswith(("rank 0 ", "rank 1 "))
    assert done.stderr.count("\n") == 1


def test_an_argument_that_the_engine_refuses(checkpoint: Callable[[str], Path]):
    with pytest.raises(EngineError, match=r"(?s)rank 0 failed in configuration: .*zzz") as caught:
        _start_report.report(str(checkpoint("llama")), engine_args={"quantization": "zzz"}, device="cpu")
    assert caught.value.rank == 0
    assert "Traceback" in str(caught.value.__cause__)


#: What happens in a worker on a GPU, and what is asked of the engine there, as far as that needs no GPU.
ON_A_GPU = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.renderers import renderer_from_config
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu_worker import Worker
from penstock.integrations import _vllm_serve
from penstock.integrations._startup import Phases
from penstock.integrations._vllm_start import arguments

model, folder = sys.argv[1:]
specification = {"model": model, "load_format": "penstock", "tensor_parallel_size": 1, "device": "cuda"}
specification |= {"extra_config": {"mapped": "off"}}
specification |= {"engine_args": {"skip_tokenizer_init": True, "enforce_eager": True}}
config = EngineArgs(**arguments(specification, worker_extension_cls=_vllm_serve.WORKER)).create_engine_config()

class Engine:  # takes a request as vLLM's engine does, and answers it with tokens made up here
    request, steps = None, 0
    def add_request(self, name, prompt, sampling):
        processor = InputProcessor(config, renderer_from_config(config))
        self.request = processor.process_inputs(name, prompt, sampling, supported_tasks=("generate",))
    def has_unfinished_requests(self):
        return self.steps < self.request.sampling_params.max_tokens
    def step(self):
        from types import SimpleNamespace as Made
        self.steps += 1
        return [Made(outputs=[Made(token_ids=[7] * self.steps)])]

engine, phases = Engine(), Phases()
answer = _vllm_serve.answered(engine, phases.began)

# As a worker does: import the class by its name, load, answer
extension = resolve_obj_by_qualname(config.parallel_config.worker_extension_cls)
conflicts = [name for name in dir(extension) if not name.startswith("__") and hasattr(Worker, name)]
with set_current_vllm_config(config):
    parallel_state.init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1)
    try:
        get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)
    except AttributeError:
        pass  # operators for a CPU
worker = extension()
worker.vllm_config = config
config.compilation_config.compilation_time = 1.5
phases.seconds |= {"import": 2.0, "configuration": 3.0}
ranked = _vllm_serve.ranked(specification, phases, phases.began + 100, worker.penstock_start())
request = [len(engine.request.prompt_token_ids), engine.request.sampling_params.max_tokens]
request.append(engine.request.sampling_params.ignore_eos)
print(json.dumps({"conflicts": conflicts, "request": request, "answer": answer, "rank": ranked}))
"""


def test_what_can_be_tried_of_a_start_on_a_gpu(checkpoint: Callable[[str], Path], tmp_path: Path):
    words = [sys.executable, "-c", ON_A_GPU, str(checkpoint("llama")), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["conflicts"] == []
    assert found["request"] == [263, 128, True]
    answer = found["answer"]
    assert (answer["prompt_tokens"], answer["generated_tokens"]) == (263, 128)
    assert 0 < answer["request_seconds"] < answer["seconds"] < answer["last_token_seconds"]
    phases = found["rank"]["phases"]
    assert [phases[name]["seconds"] for name in ("import", "configuration", "compilation")] == [2, 3, 1.5]
    assert all(phases[name]["seconds"] > 0 for name in ("model_creation", "recording", "reading"))
    assert found["rank"]["load"]["loads"] == 1
    assert found["rank"]["ready_seconds"] == 100
