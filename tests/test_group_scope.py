"""Ranks of which only those of one machine read for each other. Their machines are pretended; all else is real."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import penstock
import pytest
import torch
from ranks_together import Ranks, together
from safetensors.torch import save_file

__all__ = ["together"]  # a fixture

#: Two ranks on each machine, and the fifth one alone.
PRETENDED = """
from penstock import _group
_group._machine = lambda: f"machine {rank // 2}"
def sharded(info):
    if info.name.endswith("down"):
        return (slice(None), of(info.shape[1]))
    return of(info.shape[0]) if info.name.endswith("up") else None
"""


def pretended(program: str) -> str:
    return PRETENDED + textwrap.dedent(program)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    tensors = {"embed": torch.randn(4000, 512)}
    for layer in range(4):
        tensors[f"{layer}.up"] = torch.randn(2048, 512)
        tensors[f"{layer}.down"] = torch.randn(512, 2048).to(torch.bfloat16)
    path: Path = tmp_path_factory.mktemp("scope") / "model.safetensors"
    save_file(tensors, path)
    return path


def test_each_machine_reads_what_its_ranks_want_and_nothing_goes_to_another(
    together: Callable[..., Ranks], model: Path
) -> None:
    program = """
    checkpoint = penstock.open(path)
    options = {"scope": "node", "cache": "bypass", "gap": 0}
    said["replica"] = same(checkpoint.load(group=group, options=options))
    reports = [checkpoint.last_report]
    said["sharded"] = same(checkpoint.load(group=group, options=options, slices=sharded), sharded)
    reports.append(checkpoint.last_report)
    said["world"] = same(checkpoint.load(group=group, options={**options, "scope": "world"}))
    reports.append(checkpoint.last_report)
    said["exchange"] = [report.exchange for report in reports]
    own = lambda report: [w["bytes"] for lane, w in report.routes.items() if lane not in ("rank", "neighbour")]
    said["read"] = [sum(own(report)) for report in reports]
    """
    checkpoint = penstock.open(model)
    with together(pretended(program), 5, model) as ranks:
        said = ranks.all()
    for one in said:
        assert one["replica"] == one["sharded"] == one["world"] == len(checkpoint)
    exchanged = [[one["exchange"][load] for one in said] for load in range(3)]
    assert [[one["ranks"] for one in load] for load in exchanged] == [[2] * 4 + [5], [2] * 4 + [5], [5] * 5]
    for load in exchanged[:2]:
        assert [one["choice"] for one in load] == ["on"] * 4 + ["off"]
        assert load[4]["reason"] == 'scope="node", and no other rank is on this machine'
        # What one rank of a machine sends, the other one gets
        assert [load[rank]["sent_bytes"] for rank in range(4)] == [
            load[rank]["received_bytes"] for rank in (1, 0, 3, 2)
        ]
        assert all(load[rank]["sent_bytes"] > 0 for rank in range(4))
    replicas = [one["read"][0] for one in said]
    assert all(checkpoint.nbytes <= sum(pair) < 1.01 * checkpoint.nbytes for pair in (replicas[:2], replicas[2:4]))
    assert checkpoint.nbytes <= replicas[4] < 1.01 * checkpoint.nbytes
    assert sum(one["read"][2] for one in said) < 1.01 * checkpoint.nbytes


def test_a_rank_of_another_machine_that_dies_disturbs_nobody_and_one_of_the_same_is_named(
    together: Callable[..., Ranks], model: Path
) -> None:
    program = """
    if rank == 3:
        part = _group.Rendezvous._part
        def fall(*arguments):
            part(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        _group.Rendezvous._part = fall
    try:
        said["found"] = same(penstock.open(path).load(group=group, options={"scope": "node"}))
    except penstock.PeerError as error:
        said["peer"] = error.rank
    """
    with together(pretended(program), 4, model) as ranks:
        said = [ranks.said(rank) for rank in range(3)]
    assert [one.get("found") for one in said] == [len(penstock.open(model))] * 2 + [None]
    assert said[2]["peer"] == 3


def test_ranks_that_find_everything_in_their_page_cache_need_not_wait_for_those_of_another_machine(
    together: Callable[..., Ranks], model: Path
) -> None:
    program = """
    _group._rather_alone = lambda *_: _group._RESIDENT if rank < 2 else ""
    checkpoint = penstock.open(path)
    for _ in range(3):
        begun = time.monotonic()
        said["found"] = same(checkpoint.load(group=group, options={"scope": "node", "exchange": "auto"}))
    said["exchange"] = checkpoint.last_report.exchange
    """
    with together(pretended(program), 4, model) as ranks:
        said = ranks.all()
    assert {one["found"] for one in said} == {len(penstock.open(model))}
    assert [one["exchange"]["choice"] for one in said] == ["off", "off", "on", "on"]
    assert [one["exchange"]["ranks"] for one in said] == [4, 4, 2, 2]


def test_a_rank_with_another_scope_is_named(together: Callable[..., Ranks], model: Path) -> None:
    program = """
    try:
        penstock.open(path).load(group=group, options={"scope": "node" if rank == 1 else "world"})
    except penstock.PlanMismatchError as error:
        said["ranks"], said["text"] = error.ranks, str(error)
    """
    with together(program, 3, model) as ranks:
        said = ranks.all()
    assert [one["ranks"] for one in said] == [[1]] * 3
    assert "has another scope" in said[0]["text"]


def test_a_stream_within_machines_gives_every_rank_what_it_wants(together: Callable[..., Ranks], model: Path) -> None:
    program = """
    checkpoint = penstock.open(path)
    options = {"scope": "node", "cache": "bypass"}
    found = dict(checkpoint.stream(group=group, slices=sharded, window=8 << 20, options=options))
    said["found"], said["ranks"] = same(found, sharded), checkpoint.last_report.exchange["ranks"]
    """
    with together(pretended(program), 4, model) as ranks:
        assert [(one["found"], one["ranks"]) for one in ranks.all()] == [(len(penstock.open(model)), 2)] * 4
