"""Engines' own loaders in a restricted pod: the same parameters, and every refusal of the sandbox in the report.

`make engines` runs these tests as root, with the seccomp profile of `make pod`. All ranks of an engine are processes of
one pod. vLLM and SGLang want a folder to write to: an emptyDir at /tmp.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, WORLDS, World, ranks_of, specified
from on_cpu import ENVIRONMENT
from restricted_pods import Pods
from test_sglang import _port

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("PENSTOCK_TEST_PODS") or os.geteuid() != 0,
        reason="`make pod` writes the seccomp profile, and root makes pods",
    ),
    pytest.mark.timeout(3600),  # ranks import an engine each, which takes minutes on a busy machine
]

MODELS = ("llama", "qwen3-moe")
#: What of a load the profile refuses: which of the two happens depends on whether the files are in the page cache.
REFUSED = [[], [("io_uring", "threads")]]


def in_pod(pods: Pods, commands: list[list[str]], log: Path, *options: str, **variables: str) -> dict[str, Any]:
    """Ranks in a pod, which must all succeed; what came of its limits."""
    command = [sys.executable, str(HERE / "pod_ranks.py"), str(log), json.dumps(commands)]
    given = {**ENVIRONMENT, "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp", **variables}
    try:
        return pods.run(command, *options, **given).facts
    except AssertionError as error:
        said = "".join(f"\n--- {one.name} ---\n{one.read_text()[-4000:]}" for one in sorted(log.parent.glob("log.*")))
        pytest.fail(f"{error}{said}")


def fallbacks(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["from"], one["to"]) for one in report["fallbacks"]]


@pytest.fixture
def temporary(empty_dir: Path) -> str:
    """The emptyDir, as an option. It has what vLLM knows of its model classes: to learn it takes an import."""
    known = Path("~/.cache/vllm/modelinfos").expanduser()
    if known.is_dir():
        there = shutil.copytree(known, empty_dir / ".cache/vllm/modelinfos")
        for one in (empty_dir / ".cache", there.parent, there):
            one.chmod(0o777)
    return f"--volume={empty_dir}:/tmp:rw"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder that the pod may write to, at its own place."""
    folder = tmp_path / "out"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def readable(*folders: Path) -> list[str]:
    """Options that mount them at their own place, read-only, for everybody."""
    for folder in folders:
        folder.chmod(0o755)
        for file in folder.iterdir():
            file.chmod(0o644)
    return [f"--volume={folder}:{folder}" for folder in folders]


@pytest.mark.parametrize("world", ["tp1", "tp2"])
def test_vllm_loads_in_a_restricted_pod(
    pods: Pods, checkpoint: Callable[[str], Path], world: str, out: Path, temporary: str
):
    paths = {name: checkpoint(name) for name in MODELS}
    ranks = ranks_of(world)
    # Past the page cache: that is what the profile has something to refuse of
    direct = {"model_loader_extra_config": {"cache": "bypass", "io": "direct"}}
    specification = specified(world, paths, out, {name: [direct] * ranks for name in paths})
    commands = [[sys.executable, str(HERE / "vllm_rank.py"), str(specification), str(rank)] for rank in range(ranks)]
    folders = [folder for path in paths.values() for folder in (path, path.with_suffix(".inverse"))]
    in_pod(pods, commands, out / "log", f"--volume={out}:{out}:rw", temporary, *readable(*folders))
    came = World([json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)], "")
    for name in MODELS:
        for rank in range(ranks):
            found = came.of(name, rank)
            assert (found["different"], found["moved"], found["deferred"]) == ([], [], []), (name, rank)
            assert found["reports"]
            told = [fallbacks(report) for report in found["reports"]]
            assert all(one == [("io_uring", "threads")] for one in told), (name, rank, told)


@pytest.mark.parametrize("size", [1, 2])
def test_sglang_loads_in_a_restricted_pod(
    pods: Pods, checkpoint: Callable[[str], Path], size: int, out: Path, temporary: str
):
    paths = {name: checkpoint(name) for name in ("llama", "qwen3-moe")}
    tasks = [
        {"name": name, "do": "compare", "with": {"folder": str(path)}, "port": _port()} for name, path in paths.items()
    ]
    spec = out / "spec.json"
    logs = [str(out / f"log.rank{rank}") for rank in range(size)]
    spec.write_text(json.dumps({"size": size, "tasks": tasks, "out": str(out / "out"), "logs": logs}))
    commands = [[sys.executable, str(HERE / "sglang_rank.py"), str(spec)]]  # it forks the ranks
    in_pod(pods, commands, out / "log", f"--volume={out}:{out}:rw", temporary, *readable(*paths.values()))
    for name in paths:
        for rank in range(size):
            found = json.loads((out / f"out.{name}.{rank}.json").read_text())
            assert (found.get("error"), found["different"], found["left"]) == (None, [], []), (name, rank)
            assert found["reports"] and all(fallbacks(report) in REFUSED for report in found["reports"])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Llama of 2.2 GB with four layers."""
    import torch
    from safetensors.torch import save_file
    from tiny_models import _llama
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("large") / "model"
    folder.mkdir()
    config = _llama(hidden_size=4096, intermediate_size=11008, vocab_size=48000, num_attention_heads=32)
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in LlamaForCausalLM(config).state_dict().items()}
    torch.manual_seed(0)
    for number, names in enumerate([list(shapes)[i::3] for i in range(3)]):
        tensors = {name: torch.randint(-9999, 9999, shapes[name], dtype=torch.int16) for name in names}
        halves = {name: one.view(torch.bfloat16) for name, one in tensors.items()}
        save_file(halves, folder / f"model-{number + 1:05}-of-00003.safetensors", {"format": "pt"})
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("cache", ["auto", "keep", "bypass"])
@pytest.mark.parametrize("world", ["tp1", "tp2"])
def test_vllm_loads_2_gb_within_1_25_times_that(
    pods: Pods, large: Path, world: str, cache: str, out: Path, temporary: str
):
    from pagecache import evict

    ranks = ranks_of(world)
    nbytes = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert nbytes > 2_000_000_000
    found: dict[str, list[dict[str, Any]]] = {}
    for load_format in ("safetensors", "penstock"):
        args: dict[str, Any] = {"model": str(large), **WORLDS[world]}
        limit = []
        if load_format == "penstock":
            args["model_loader_extra_config"] = {"cache": cache}
            limit = ["--memory-besides", str(nbytes * 5 // 4)]
            for file in large.glob("*.safetensors"):
                evict(file)
        spec = {
            "args": args, "load_format": load_format, "ranks": ranks,
            "meeting": str(out / f"meeting.{load_format}"), "out": str(out / load_format),
        }  # fmt: skip
        specification = out / "specification.json"
        specification.write_text(json.dumps(spec))
        rank_of = [sys.executable, str(HERE / "vllm_pod_rank.py"), str(specification)]
        commands = [[*rank_of, str(rank)] for rank in range(ranks)]
        volumes = [f"--volume={out}:{out}:rw", temporary, *readable(large)]
        facts = in_pod(pods, commands, out / "log", *volumes, *limit)
        assert facts.get("oom_kill", 0) == 0
        found[load_format] = [json.loads((out / f"{load_format}.{rank}.json").read_text()) for rank in range(ranks)]
    for mine, theirs in zip(found["penstock"], found["safetensors"], strict=True):
        assert mine["digests"] == theirs["digests"]
        for report in mine["fallbacks"]:
            assert [(one["from"], one["to"]) for one in report] in REFUSED
