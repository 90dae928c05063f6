"""What recording costs: processor time per copy of a deferred tensor, and of planning and loading them.

    python benches/recording.py [--copies N]

Each copy is what an engine's loader does for a tensor-parallel expert: `narrow`, then `copy_` into a part of a fused
parameter. Beside it the same with tensors that are there.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import penstock
import torch
from penstock.integrations._recorder import Recorder
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor

ROWS, COLUMNS = 8, 16


def copy_all(weights: Iterator[tuple[str, torch.Tensor]], to: torch.Tensor) -> float:
    """Processor seconds of the copies."""
    began = time.process_time()
    for place, (_, tensor) in zip(to, weights, strict=True):
        place.copy_(tensor.narrow(0, 0, ROWS // 2))
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copies", type=int, default=100_000)
    copies = parser.parse_args().copies
    with tempfile.TemporaryDirectory() as folder:
        tensors = [Tensor(f"experts.{i}.weight", "BF16", (ROWS, COLUMNS)) for i in range(copies)]
        checkpoint = penstock.open(synth.write_file(Path(folder) / "model.safetensors", tensors))
        to = torch.zeros(copies, ROWS // 2, COLUMNS, dtype=torch.bfloat16)
        recorder = Recorder(checkpoint)
        with recorder.barrier():
            recording = copy_all(recorder.weights(), to)
            began = time.process_time()
            report = recorder.run()
            loading = time.process_time() - began
        again = torch.zeros_like(to)
        eager = copy_all(iter(checkpoint.load().items()), again)
    assert to.view(torch.int16).equal(again.view(torch.int16))
    for what, seconds in (
        ("recording", recording),
        ("planning and loading", loading),
        ("copies of eager tensors", eager),
    ):
        print(f"{what:24} {seconds / copies * 1e6:8.1f} us of processor time per copy")
    print(f"{report.loads} load of {report.copies} copies, {report.materialised or 'nothing'} materialised")


if __name__ == "__main__":
    main()
