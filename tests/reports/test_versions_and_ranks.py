"""Public reports: versions that change, formats that are not used, ranks that hang, servers with too much to do.

Each test is the program of a report of its kind. First verdicts, of the code before these tests:

| report | what it is about | first verdict |
|---|---|---|
| marin#7525 | S3 answers SlowDown at a scale-up, and the load fails | failed at first |
| vllm#44245, vllm PR 47402 | workers retry in lockstep: the pauses have no jitter | failed at first |
| StarRocks#39917 | SlowDown uses up all tries, and no setting changes that | failed at first |
| mountpoint-s3#743 | ranks of a training are refused by S3 | failed at first |
| nao-mgs-workflow#816, s3fs-fuse#499 | the processes of a node have too many connections together | failed at first |
| presto#6718 | threads that were refused wake up together | failed at first |
| sglang#5457 | one rank is done, and nobody says which is not, and why | failed at first |
| torchtitan#3065 | ranks come to a load at different times and hang | failed at first |
| sglang#39128, sglang#39629 | a slow rank is taken for one that hangs | right at once |
| transformers#48228 | ranks end their loads far apart | right at once |
| serving#1086 (tensorflow) | a model is picked up while it is uploaded | failed at first |
| modelexpress#643 | the weights are of another revision than the configuration | failed at first |
| vllm PR 45196 | a loader's options that are not valid fall back to the default without a word | right at once |
| feldera#3261, ruff#17537 | a panic on a thread: waiters hang (`crates/core/tests/threads.rs`) | by reading |
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ordeal
import penstock
import pytest
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from ranks_together import Ranks
from test_busy_server import SLOW_DOWN, busy, moody
from test_fetched import FOLDER, bucket, replaced, settings, temporary  # noqa: F401
from test_s3 import nothing_in_the_environment  # noqa: F401


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return ordeal.write(tmp_path / "model.safetensors", 1, 100_000)


@pytest.mark.sampled(0)
def test_marin_7525_a_load_outlasts_slow_down(one: Path):
    with moody(one, [(503, SLOW_DOWN)] * 9) as (url, asked):
        assert len(penstock.open(url).load(framework="np")) == 1
    assert len(asked) >= 10


def test_vllm_44245_workers_that_are_refused_together_do_not_come_back_together(one: Path):
    pauses = []
    for _ in range(8):
        with moody(one, [(503, b"")]) as (url, asked):
            penstock.open(url).load(framework="np")
        pauses.append(asked[-1] - asked[-2])
    assert max(pauses) - min(pauses) > 0.06, pauses


@pytest.mark.sampled(0)
def test_starrocks_39917_a_setting_makes_reads_outlast_failures(one: Path):
    with moody(one, [(500, b"")] * 9) as (url, _):
        assert len(penstock.open(url, storage={"patience": 120}).load(framework="np")) == 1


@pytest.mark.sampled(0)
def test_mountpoint_s3_743_the_patience_has_a_variable(one: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_STORAGE_PATIENCE", "120")
    with moody(one, [(502, b"")] * 9) as (url, _):
        assert len(penstock.open(url).load(framework="np")) == 1


def test_nao_mgs_workflow_816_processes_of_a_node_share_a_budget_of_connections(tmp_path: Path):
    path = ordeal.write(tmp_path / "model.safetensors", 24, 1 << 20, sparse=True)
    program = "import sys, penstock; penstock.open(sys.argv[1]).load(framework='np')"
    environment = {
        "PENSTOCK_STORAGE_CONNECTIONS_PER_NODE": "3",
        "PENSTOCK_STORAGE_NODE_FOLDER": str(tmp_path / "node"),
        "PENSTOCK_STORAGE_REQUEST_BYTES": "65536",
    }
    with busy(path, 1e9, "second") as ([port], counted):
        url = f"http://127.0.0.1:{port}/model.safetensors"
        command = [sys.executable, "-c", program, url]
        children = [subprocess.Popen(command, env={**os.environ, **environment}) for _ in range(5)]
        assert [child.wait(120 * ordeal.load_factor()) for child in children] == [0] * 5
    assert counted["most"] == {str(port): counted["most"][str(port)]}
    assert counted["most"][str(port)] <= 3


def test_presto_6718_requests_that_are_refused_at_once_come_back_over_a_while(tmp_path: Path):
    path = ordeal.write(tmp_path / "model.safetensors", 16, 1 << 20, sparse=True)
    with busy(path, 8, "bucket") as ([port], counted):
        storage = {"request_bytes": 1 << 20}
        penstock.open(f"http://127.0.0.1:{port}/model.safetensors", storage=storage).load(framework="np")
    refused = [when for when, *_, status in counted["requests"] if status == 503]
    again = [when for when, *_ in counted["requests"] if refused and when > refused[0] + 0.05]
    assert refused
    for begin in again:
        assert sum(begin <= when < begin + 0.05 for when in again) <= 4, "a wave"


# Ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = [Tensor(f"{number:02}", "U8", (1 << 20,)) for number in range(12)]
    return synth.write_file(tmp_path_factory.mktemp("reports") / "model.safetensors", tensors)


def test_sglang_5457_a_rank_that_cannot_load_is_named_with_its_reason(together: Callable[..., Ranks], model: Path):
    """It fails before its first load, of memory."""
    program = """
    try:
        with penstock.joined(group, options={"peer_timeout": 2.0}):
            if rank == 1:
                raise MemoryError("out of memory on this rank")
            penstock.open(path).load(group=group)
    except (penstock.PeerError, MemoryError) as error:
        said["rank"], said["text"] = getattr(error, "rank", None), str(error)
    """
    with together(program, 3, model) as ranks:
        for said in (ranks.said(0), ranks.said(2)):
            assert said["rank"] == 1 and "out of memory on this rank" in said["text"], said


def test_torchtitan_3065_a_rank_that_hangs_between_two_parts_of_a_load_is_an_error(
    together: Callable[..., Ranks], model: Path
):
    program = """
    options = {"peer_timeout": 1.5, "join_timeout": 20.0, "window": 1 << 20}
    try:
        for number, _ in enumerate(penstock.open(path).stream(group=group, options=options), 1):
            if rank == 1 and number == 9:
                store.set("left", str(time.time()))
                os.kill(os.getpid(), signal.SIGSTOP)
    except penstock.PeerError as error:
        said["rank"], said["late"] = error.rank, time.time() - float(store.get("left"))
    """
    with together(program, 3, model) as ranks:
        for said in (ranks.said(0), ranks.said(2)):
            assert said["rank"] == 1 and said["late"] <= min(2.5 * ordeal.load_factor(), 10.0), said


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["stream", "load"])
def test_sglang_39128_a_rank_that_is_slow_is_not_taken_for_one_that_hangs(
    together: Callable[..., Ranks], model: Path, kind: str
):
    program = """
    options, checkpoint = {"peer_timeout": 1.0, "window": 2 << 20}, penstock.open(path)
    for turn in range(2):
        if rank == 1:
            time.sleep(3.0)
        if "KIND" == "load":
            found = checkpoint.load(group=group, options=options)
        else:
            found = {}
            for number, (name, tensor) in enumerate(checkpoint.stream(group=group, options=options)):
                found[name] = tensor
                if rank == 2 and number == 4:
                    time.sleep(3.0)
        said["same"] = same(found)
    """
    with together(program.replace("KIND", kind), 3, model) as ranks:
        assert [one["same"] for one in ranks.all()] == [12] * 3


def test_transformers_48228_ranks_may_end_their_loads_far_apart(together: Callable[..., Ranks], model: Path):
    program = """
    options = {"peer_timeout": 1.0, "exchange": "off", "window": 2 << 20}
    found = {}
    for name, tensor in penstock.open(path).stream(group=group, options=options):
        found[name] = tensor
        time.sleep(0.3 if rank == 1 else 0)
    said["same"] = same(found)
    """
    with together(program, 3, model) as ranks:
        assert [one["same"] for one in ranks.all()] == [12] * 3


# Versions


def test_serving_1086_a_model_that_is_being_uploaded_is_not_picked_up_in_part(
    bucket: Any,  # noqa: F811
    temporary: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    """The small files are there already, and then come the shards, one after the other."""
    pytest.importorskip("torch")
    from penstock.integrations import _fetched

    shards = sorted(name for name in bucket.objects if name.endswith(".safetensors") and name.startswith("m/model"))
    small = _fetched.small_files

    def uploads(*args: Any) -> Any:
        found = small(*args)
        replaced(bucket, shards[:1])
        return found

    monkeypatch.setattr(_fetched, "small_files", uploads)
    with pytest.raises(penstock.ChangedError, match="has changed"):
        _fetched.fetch(FOLDER, settings(bucket))


def test_modelexpress_643_the_weights_are_of_the_revision_that_the_configuration_is_of(
    bucket: Any,  # noqa: F811
    temporary: Path,  # noqa: F811
):
    pytest.importorskip("torch")
    from penstock.integrations import _fetched
    from penstock.integrations._pins import pinned_in
    from penstock.integrations._remote import RemoteWeights

    found = _fetched.fetch(FOLDER, settings(bucket))
    replaced(bucket, [name for name in bucket.objects if name.endswith(".safetensors") and name.startswith("m/model")])
    with pytest.raises(penstock.ChangedError, match="since its configuration was fetched"):
        RemoteWeights(found.weights, settings(bucket), pinned=pinned_in(found.folder))


@pytest.mark.parametrize(
    "given", [{"stict": False}, {"strict": "lazy"}, {"strict": 0}, {"exchange": "of"}, {"storage": {"pationce": 3}}]
)
def test_vllm_45196_options_that_are_not_valid_are_refused(given: dict[str, Any]):
    pytest.importorskip("torch")
    from penstock.integrations._engine import settings_of

    with pytest.raises((ValueError, TypeError)):
        settings_of(given, "vLLM")
