"""Row-parallel weights out of the page cache: processor time of `load_into` and of copies out of a mapping.

    python benches/rows.py [--rounds N]

One rank of four takes a quarter of each row, as `o_proj` and `down_proj` of public models are divided. The mapping is
that of safetensors, and torch copies. Both ways take turns; destinations are memory in use. Bytes are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import penstock
import safetensors
import torch
from penstock.synthetic.synth import Tensor, write_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import pagecache

RANKS = 4
SHAPES = {
    "Llama-3-8B, 3 layers": [("o_proj", (4096, 4096)), ("down_proj", (4096, 14336))] * 3,
    "Qwen3-30B-A3B, 1 layer": [("o_proj", (2048, 4096)), *[("down_proj", (2048, 768))] * 128],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for model, shapes in SHAPES.items():
            tensors = [Tensor(f"{number}.{name}", "BF16", shape) for number, (name, shape) in enumerate(shapes)]
            path = write_file(Path(folder) / "model.safetensors", tensors)
            pagecache.hold(path)
            cuts = {one.name: (slice(0, one.shape[0]), slice(0, one.shape[1] // RANKS)) for one in tensors}

            def memory(tensors: list[Tensor] = tensors) -> dict[str, torch.Tensor]:
                return {t.name: torch.ones(t.shape[0], t.shape[1] // RANKS, dtype=torch.bfloat16) for t in tensors}

            ours, theirs = memory(), memory()
            took: dict[str, list[float]] = {"load_into": [], "mapping": []}
            for number in range(rounds):
                for way in sorted(took, reverse=number % 2 == 0):
                    began = time.process_time()
                    if way == "load_into":
                        parts = [penstock.Destination(name, ours[name], cut) for name, cut in cuts.items()]
                        report = penstock.open(path).load_into(parts, progress=False)
                    else:
                        with safetensors.safe_open(path, "pt") as file:
                            for name, cut in cuts.items():
                                theirs[name].copy_(file.get_tensor(name)[cut])
                    took[way].append(time.process_time() - began)
            assert all(ours[name].view(torch.int16).equal(theirs[name].view(torch.int16)) for name in cuts)
            reads = sum(way["extents"] for way in report["routes"].values())
            nbytes = sum(way["bytes"] for lane, way in report["routes"].items() if lane != "rank")
            print(f"{model}: {report['nbytes'] / 1e6:.0f} MB wanted, {nbytes / 1e6:.0f} MB in {reads} reads")
            for way, seconds in took.items():
                middle = statistics.median(seconds)
                print(f"  {way:10} {middle:.3f} s of processor time ({min(seconds):.3f} to {max(seconds):.3f})")


if __name__ == "__main__":
    main()
