"""Ranks of one machine that load together from a real S3 server: a byte is received once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import penstock
import pytest
from ranks_together import Ranks
from test_group_slabs import PROGRAM, RANKS, judge, written
from versitygw import Server

pytest.importorskip("torch.distributed")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("few") / "few.safetensors", 4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, few: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("versitygw"))
    server.put("few.safetensors", few.read_bytes())
    yield server
    server.close()


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("layout", RANKS)
def test_a_byte_of_a_bucket_is_received_once_per_machine(
    together: Callable[..., Ranks], server: Server, few: Path, layout: str, into: bool
) -> None:
    checkpoint = penstock.open(few)
    given = {"source": "s3://models/few.safetensors", "storage": server.storage(), "options": {}}
    with together(PROGRAM, RANKS[layout], few, layout=layout, into=into, **given) as ranks:
        for name in ("ready", "loaded"):
            ranks.release(name)
        said = ranks.all()
    assert [one["tensors"] for one in said] == [len(checkpoint)] * len(said)
    received = sum(one["received"] for one in said)
    assert checkpoint.nbytes <= received <= 1.01 * checkpoint.nbytes, (received, checkpoint.nbytes)
    judge(said, checkpoint.nbytes, layout)
