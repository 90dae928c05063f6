"""What ranks leave in their rendezvous store: nothing that grows with each load, stream or attempt of an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from ranks_together import Ranks

pytest.importorskip("torch.distributed")

PROGRAM = """
from penstock._core import Options
from penstock._group_stream import compare
from penstock.integrations._engine import Loads
group, checkpoint = (store, rank, size), penstock.open(path)
options = Options(join_timeout=20.0)

def meet(count=[0]):
    count[0] += 1
    if store.add("arrived", 1) == count[0] * size:
        store.set("met", str(count[0]))
    while int(store.get("met")) < count[0]:
        time.sleep(0.005)

def attempt(fails):
    loads = Loads(torch.device("cpu"), options)
    loads.join(lambda: group)
    with loads.barrier():
        checkpoint.load(group=loads.group, options=options)
        if fails and rank == 1:
            raise ValueError("no such luck")

def failing():
    try:
        attempt(True)
    except (ValueError, penstock.PeerError) as error:
        said["failed"] = type(error).__name__

def joined():
    with penstock.joined(group, options=options):
        pass

done = {
    "an attempt": lambda: attempt(False),
    "an attempt that fails": failing,
    "joined": joined,
    "a comparison": lambda: compare(group, checkpoint, options),
    "a stream": lambda: [name for name, _ in checkpoint.stream(group=group, window=1 << 20, options=options)],
    "a stream that ends early": lambda: next(checkpoint.stream(group=group, window=1 << 20, options=options)),
}
said["left"] = {}
for what, do in done.items():
    counts = []
    for number in range(3):
        do()
        meet()
        counts.append(store.num_keys())
        meet()
    said["left"][what] = counts
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return synth.write_file(tmp_path / "model.safetensors", [Tensor(str(n), "U8", (1 << 20,)) for n in range(4)])


def test_what_is_over_on_all_ranks_leaves_no_keys(together: Callable[..., Ranks], model: Path) -> None:
    with together(PROGRAM, 3, model) as ranks:
        said = ranks.said(0)
    for what, (first, *others) in said["left"].items():
        assert others == [first] * 2, (what, first, others)
