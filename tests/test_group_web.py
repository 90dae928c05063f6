"""Ranks that load from a web server together: what lies between the reads of one is the others', and comes once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import penstock
import pytest
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from ranks_together import Ranks
from test_web import Web

pytest.importorskip("torch.distributed")

PROGRAM = """
def tensor_parallel(info):
    if len(info.shape) < 2:
        return None
    return (slice(None), of(info.shape[1])) if info.name.endswith("down") else of(info.shape[0])

checkpoint = penstock.open(url)
found = checkpoint.load(slices=tensor_parallel, group=group)
said["tensors"] = same(found, tensor_parallel)
said["received"] = checkpoint.last_report.network["received_bytes"]
said["exchange"] = checkpoint.last_report.exchange
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """32 MB. Ranks divide its weights into turns that are shorter than the gap that one request takes otherwise."""
    folder = tmp_path_factory.mktemp("served")
    tensors = []
    for layer in range(8):
        tensors += [Tensor(f"{layer}.norm", "BF16", (1024,)), Tensor(f"{layer}.up", "BF16", (1024, 1024))]
        tensors += [Tensor(f"{layer}.down", "BF16", (1024, 1024))]
    path = synth.write_file(folder / "model.safetensors", tensors)
    web = Web(folder)
    yield path, web("model.safetensors")
    web.close()


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_byte_leaves_the_server_once(together: Callable[..., Ranks], served: tuple[Path, str], ranks: int) -> None:
    path, url = served
    checkpoint = penstock.open(path)
    with together(PROGRAM.replace("url", repr(url)), ranks, path) as started:
        said = started.all()
    assert [one["tensors"] for one in said] == [len(checkpoint)] * ranks
    assert [one["exchange"]["choice"] for one in said] == ["on"] * ranks
    received = sum(one["received"] for one in said)
    assert checkpoint.nbytes <= received <= 1.01 * checkpoint.nbytes, (received, checkpoint.nbytes)
