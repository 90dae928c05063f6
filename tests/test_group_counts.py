"""What ranks that load together take from storage and send to each other, counted by the kernel."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pagecache
import penstock
import pytest
from penstock.synthetic import synth
from penstock.synthetic.synth import Layout, Tensor
from ranks_together import Ranks

MIB = 1 << 20


@pytest.fixture(scope="module")
def llama(scratch: Path) -> Iterator[Path]:
    """Shapes as in Llama, with two shards, 260 MB."""
    wide, hidden = 1024, 3584
    shards: list[tuple[Tensor, ...]] = []
    for shard in range(2):
        tensors = [Tensor("embed" if shard == 0 else "head", "BF16", (16000, wide))]
        for layer in range(shard * 4, shard * 4 + 4):
            tensors += [
                Tensor(f"{layer}.norm1", "BF16", (wide,)),
                Tensor(f"{layer}.q_proj", "BF16", (wide, wide)),
                Tensor(f"{layer}.k_proj", "BF16", (256, wide)),
                Tensor(f"{layer}.v_proj", "BF16", (256, wide)),
                Tensor(f"{layer}.o_proj", "BF16", (wide, wide)),
                Tensor(f"{layer}.norm2", "BF16", (wide,)),
                Tensor(f"{layer}.gate_proj", "BF16", (hidden, wide)),
                Tensor(f"{layer}.up_proj", "BF16", (hidden, wide)),
                Tensor(f"{layer}.down_proj", "BF16", (wide, hidden)),
            ]
        shards.append(tuple(tensors))
    folder = scratch / "group-counts"
    yield synth.write(Layout("counts", tuple(shards)), folder)
    for file in folder.iterdir():
        file.unlink()


PROGRAM = """
def tensor_parallel(info):
    if len(info.shape) < 2:
        return None
    return (slice(None), of(info.shape[1])) if info.name.endswith(("o_proj", "down_proj")) else of(info.shape[0])

slices = {"tensor parallel": tensor_parallel, "replicas": None}[layout]
checkpoint = penstock.open(path)
# What the first load of a process sets up
checkpoint.load(names=["0.norm1"], group=group)
hold("ready")
found = checkpoint.load(slices=slices, group=group, options={"cache": "bypass", "shared_slabs": shared_slabs})
hold("loaded")
said["tensors"] = same(found, slices)
said["nbytes"] = sum(tensor.nbytes for tensor in found.values())
said["exchange"] = checkpoint.last_report.exchange
"""


@pytest.mark.parametrize("shared_slabs", [False, True])
@pytest.mark.parametrize("layout", ["tensor parallel", "replicas"])
def test_storage_gives_each_byte_once_and_the_network_carries_each_share_once_or_none(
    together: Callable[..., Ranks], llama: Path, layout: str, shared_slabs: bool
) -> None:
    """Counted by the kernel: `read_bytes` of each process, past the page cache, and the loopback device.

    A hundredth more is allowed for pages: two ranks with neighbouring rows read the page in which they meet. 3% and
    1 MiB more on the wire, for the headers of packets, and for agreement. Ranks that share slabs have only that there.
    """
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--net", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs unshare, and the right to make a network namespace")
    checkpoint = penstock.open(llama)
    with together(PROGRAM, 4, llama, fenced=True, layout=layout, shared_slabs=shared_slabs) as ranks:
        ranks.held("ready")
        pagecache.put(list(llama.glob("*.safetensors")), "cold")
        before, sent = [ranks.read_bytes(rank) for rank in range(4)], ranks.loopback_bytes()
        ranks.release("ready")
        ranks.held("loaded")
        read = [ranks.read_bytes(rank) - before[rank] for rank in range(4)]
        sent = ranks.loopback_bytes() - sent
        ranks.release("loaded")
        said: list[dict[str, Any]] = ranks.all()
    assert [one["tensors"] for one in said] == [len(checkpoint)] * 4
    assert checkpoint.nbytes <= sum(read) <= 1.01 * checkpoint.nbytes, (read, checkpoint.nbytes)
    received = sum(one["exchange"]["received_bytes"] for one in said)
    if layout == "replicas":
        assert received == 3 * checkpoint.nbytes
    lent = sum(one["exchange"]["lent_bytes"] for one in said)
    if shared_slabs:
        assert lent == received and sent < 0.01 * checkpoint.nbytes + MIB, (sent, lent, received)
    else:
        assert lent == 0 and received < sent <= 1.03 * received + MIB, (sent, received)
