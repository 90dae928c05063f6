"""Tiny checkpoints, and worlds of vLLM's ranks. `make engines` runs these tests, in an environment of their own.

The engines are large, and want other versions of packages than the other tests. So `pytest tests` does not look in here
(tests/conftest.py), unless PENSTOCK_TEST_ENGINES=1.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

import ordeal
import pytest
from on_cpu import ENVIRONMENT
from penstock.integrations import _fetched
from quantised import quantise
from tiny_models import CONFIGS, add_draft, inverted, write

# Before vLLM is imported, here or by a rank
os.environ.update(ENVIRONMENT)

HERE = Path(__file__).parent

#: A choice of models, for tools/engine_versions.py. Ranks are forks of the process of the tests, which has imported
#: vLLM: to import it takes 30 s of a processor.
CHOSEN = os.environ.get("PENSTOCK_TEST_ENGINES_CHOSEN") == "1"

#: The worlds that models are loaded in, as arguments of vLLM.
WORLDS: dict[str, dict[str, Any]] = {
    "tp1": {"tensor_parallel_size": 1},
    "tp2": {"tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "pp2": {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
}

#: Seconds until a world is given up: 15 s on an idle machine, most of it imports.
PATIENCE = 600 * ordeal.load_factor()


def ranks_of(world: str) -> int:
    sizes = WORLDS[world]
    return int(sizes["tensor_parallel_size"] * sizes.get("pipeline_parallel_size", 1))


#: Quantised checkpoints.
QUANTISED = [
    *(
        f"{model}.{form}"
        for model in ("llama", "qwen3-moe")
        for form in ("fp8", "ct-fp8", "ct-wna16", "gptq", "awq", "modelopt-fp4", "ct-nvfp4", "modelopt-fp8")
    ),
    "deepseek.ct-fp8",
    "deepseek.modelopt-fp4",
    "gpt-oss.mxfp4",
    *(f"wide-{model}.fp8-blocks" for model in ("llama", "qwen3-moe", "deepseek")),
]
#: A draft model of a checkpoint, with its arguments.
DRAFTS: dict[str, dict[str, Any]] = {
    "deepseek-mtp": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
}

WORLDS_OF_VARIANTS = ("tp1", "tp2")


def models_of(world: str) -> list[str]:
    """The models that a world loads. vLLM refuses expert parallel ranks for a model without experts."""
    plain = [name for name in CONFIGS if name != "llama" or not WORLDS[world].get("enable_expert_parallel")]
    if CHOSEN:
        return [*plain, "llama.gptq"] if world == "tp2" else []
    return plain + (["llava", *QUANTISED, *DRAFTS] if world in WORLDS_OF_VARIANTS else [])


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint by its name: ``model`` or ``model.format``. The inverted one is beside it."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name) / "model"
            plain, _, form = name.partition(".")
            if name in DRAFTS:
                made[name] = shutil.copytree(find(name.removesuffix("-mtp")), folder)
                add_draft(folder)
            elif form:
                made[name] = shutil.copytree(find(plain), folder)
                quantise(folder, form)
            else:
                made[name] = write(name, folder)
            inverted(folder, folder.with_suffix(".inverse"))
        return made[name]

    return find


class Forked:
    """A fork of this process that does the same as a program of this folder. It has what is used of a `Popen`."""

    def __init__(self, program: str, arguments: list[str], output: IO[bytes]) -> None:
        import vllm.model_executor.models.registry as registry

        # vLLM asks another process what a model is like, and that one imports it
        registry._run_in_subprocess = lambda look: look()
        self._process = multiprocessing.get_context("fork").Process(
            target=self._do, args=(program, arguments, output.fileno())
        )
        self._process.start()
        self.pid = self._process.pid

    @staticmethod
    def _do(program: str, arguments: list[str], output: int) -> None:
        import torch

        torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        sys.argv = [program, *arguments]
        importlib.import_module(program).main()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0)
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def started(program: str, arguments: list[str], output: IO[bytes]) -> Any:
    """A program of this folder, in a process and a session of its own."""
    if CHOSEN:
        return Forked(program, arguments, output)
    command = [sys.executable, str(HERE / f"{program}.py"), *arguments]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


class World:
    """What the ranks of one world made of all models."""

    def __init__(self, results: list[dict[str, Any]], trouble: str) -> None:
        self._results = results
        self._trouble = trouble

    def of(self, model: str, rank: int) -> dict[str, Any]:
        """What a rank says about a model; fails with the log of all ranks if it says nothing."""
        if rank >= len(self._results) or self._trouble:
            pytest.fail(self._trouble)
        found: dict[str, Any] = self._results[rank][model]
        if "error" in found:
            pytest.fail(found["error"])
        # A plain model is made on every processor: only those with quantised experts may be missing
        if (reason := found.get("vLLM has no kernel")) and model in QUANTISED:
            pytest.skip(f"vLLM itself does not make this model on this processor: {reason[:80]}")
        return found


def specified(
    world: str, models: dict[str, Path], folder: Path, more: dict[str, list[dict[str, Any]]] | None = None
) -> Path:
    """The file that tells `vllm_rank` what to load, in the folder where the ranks meet and leave their results.

    ``more``: by model, arguments of each rank for its load with Penstock.
    """
    ranks = ranks_of(world)
    spec = {
        "world": WORLDS[world],
        "ranks": ranks,
        "meeting": str(folder / "meeting"),
        "out": str(folder),
        "first": {"model": str(models["qwen3-moe"])},
        "models": {
            name: {
                "args": {"model": str(path), **DRAFTS.get(name, {})},
                "inverse": str(path.with_suffix(".inverse")),
                "more": (more or {}).get(name, [{}] * ranks),
            }
            for name, path in models.items()
        },
    }
    specification = folder / "specification.json"
    specification.write_text(json.dumps(spec))
    return specification


def run_world(
    world: str, models: dict[str, Path], folder: Path, more: dict[str, list[dict[str, Any]]] | None = None
) -> World:
    """One process for each rank. As soon as one fails, or time is up, all are ended: the others would wait for it.

    ``more``: as in `specified`.
    """
    ranks = ranks_of(world)
    specification = specified(world, models, folder, more)
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            processes.append(started("vllm_rank", [str(specification), str(rank)], output))
    with ThreadPoolExecutor(ranks) as pool:
        waiting = {pool.submit(process.wait, PATIENCE) for process in processes}
        trouble = ""
        while waiting and not trouble:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for one in done:
                if one.exception() is not None:
                    trouble = f"{world}: no end after {PATIENCE} s"
                elif one.result() != 0:
                    trouble = f"{world}: a rank ended with status {one.result()}"
        for process in processes:
            process.kill()
    if trouble:
        said = "".join(f"\n--- rank {rank} ---\n{log.read_text()[-4000:]}" for rank, log in enumerate(logs))
        return World([], trouble + said)
    return World([json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)], "")


@pytest.fixture(scope="session")
def world(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    """What a world made of all models. It runs once: an engine takes long to import."""
    ran: dict[str, World] = {}

    def find(name: str) -> World:
        if name not in ran:
            models = {model: checkpoint(model) for model in models_of(name)}
            ran[name] = run_world(name, models, tmp_path_factory.mktemp(name))
        return ran[name]

    return find


@pytest.fixture(scope="session")
def alone(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Makes this process the only rank of vLLM, for any model."""
    from vllm_model import configured, joined

    joined(configured({"model": str(checkpoint("qwen3-moe"))}), 1, 0, tmp_path_factory.mktemp("alone") / "meeting")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made. In the end all of them are removed."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    _fetched.remove_all()
    assert list(folder.iterdir()) == []
