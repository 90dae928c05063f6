"""Tensors and slices asked for one at a time, beside safetensors: ``python benches/one_by_one.py [--rounds N]``.

    sudo make bench-one-by-one

First over a FUSE file system of this machine (`tests/slow_fs.py`, as root) that waits 0, 1 and 5 ms before it answers
a read. Each open drops what the kernel has of the file, so the client's cache is cold. Then small parts of a local
file in the page cache. The ways take turns in one process, and the one that goes first changes with each round. Every
byte is touched. A line has the medians, and the median of our time / theirs over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import penstock
import safetensors
import torch
from penstock.synthetic.synth import Tensor, write_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import slow_fs

LATENCIES = (0.0, 1.0, 5.0)
"""Milliseconds."""
#: Name: tensors and their shape, as F32.
FILES = {"1000 of 4 KiB": (1000, (32, 32)), "200 of 64 KiB": (200, (128, 128)), "32 of 1 MiB": (32, (512, 512))}
LOCAL = "local, in the page cache"
#: What a loop may take, in times of safetensors: 1.2 elsewhere.
BOUNDS = {LOCAL: 2.0}


def touch(tensor: torch.Tensor) -> int:
    """Reads every byte."""
    return len(tensor.contiguous().numpy().tobytes())


def shuffled(values: list[Any]) -> list[Any]:
    random.Random(7).shuffle(values)
    return values


def names_in(file: Any) -> list[str]:
    return list(file.keys())  # safetensors' handles are no mappings


def tensors(file: Any) -> int:
    return sum(touch(file.get_tensor(name)) for name in names_in(file))


def backwards(file: Any) -> int:
    return sum(touch(file.get_tensor(name)) for name in reversed(file.keys()))


def out_of_order(file: Any) -> int:
    return sum(touch(file.get_tensor(name)) for name in shuffled(file.keys()))


def whole_slices(file: Any) -> int:
    return sum(touch(file.get_slice(name)[:]) for name in names_in(file))


def halves(file: Any) -> int:
    parts = [file.get_slice(name) for name in names_in(file)]
    return sum(touch(part[: part.get_shape()[0] // 2]) for part in parts)


def columns(file: Any) -> int:
    parts = [file.get_slice(name) for name in names_in(file)]
    return sum(touch(part[:, : part.get_shape()[1] // 2]) for part in parts)


def rows(file: Any) -> int:
    """Eight rows of each of 100 tensors."""
    parts = [file.get_slice(name) for name in file.keys()[:100]]
    steps = [(part, part.get_shape()[0] // 8) for part in parts]
    return sum(touch(part[at * step : at * step + 1]) for part, step in steps for at in range(8))


REMOTE = (tensors, backwards, out_of_order, whole_slices, halves, columns, rows)


def random_rows(file: Any) -> int:
    part, chosen = file.get_slice("table"), random.Random(1)
    return sum(touch(part[at : at + 1]) for at in [chosen.randrange(4096) for _ in range(2000)])


def first_rows(file: Any) -> int:
    return sum(touch(file.get_slice(name)[0:1]) for name in names_in(file) if name != "table")


def some_columns(file: Any) -> int:
    return sum(touch(file.get_slice(name)[:, 3:9]) for name in names_in(file) if name != "table")


def stretches(file: Any) -> int:
    """256 rows, which are 1 MiB."""
    part = file.get_slice("table")
    return sum(touch(part[at : at + 256]) for at in range(0, 3840, 30))


NEAR = (random_rows, first_rows, some_columns, stretches)

Run = Callable[[], None]


def opened(safe_open: Any, path: str, work: Callable[[Any], int]) -> Run:
    def run() -> None:
        with safe_open(path, "pt") as file:
            work(file)

    return run


def from_pretrained(folder: str) -> Run:
    import transformers

    def run() -> None:
        model = transformers.GPT2LMHeadModel.from_pretrained(folder)
        for tensor in model.state_dict().values():
            touch(tensor)

    return run


def beside(name: str, place: str, runs: dict[str, Run], rounds: int) -> dict[str, Any]:
    """The ways of one row, in turns."""
    took: dict[str, list[float]] = {way: [] for way in runs}
    ways = list(runs)
    for number in range(rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            with penstock.patch() if way == "patched" else nullcontext():
                began = time.perf_counter()
                runs[way]()
                took[way].append(time.perf_counter() - began)
    row: dict[str, Any] = {"place": place, "row": name, "seconds": took}
    row["ratios"] = {
        way: statistics.median(a / b for a, b in zip(times, took["safetensors"], strict=True))
        for way, times in took.items()
        if way != "safetensors"
    }
    shown = "  ".join(f"{way} {statistics.median(times) * 1e3:8.1f} ms" for way, times in took.items())
    ratios = "  ".join(f"{way} {ratio:.2f} x" for way, ratio in row["ratios"].items())
    print(f"{place:26} {name:32} {shown}   {ratios}", flush=True)
    return row


def ways(path: str, work: Callable[[Any], int]) -> dict[str, Run]:
    theirs = opened(safetensors.safe_open, path, work)

    def by_name() -> None:  # looked up when it is called, so that a patch is seen
        opened(safetensors.safe_open, path, work)()

    return {"safetensors": theirs, "penstock": opened(penstock.safe_open, path, work), "patched": by_name}


def network(folder: Path, rounds: int) -> list[dict[str, Any]]:
    for name, (count, shape) in FILES.items():
        write_file(folder / f"{name}.safetensors", [Tensor(f"t{at:04}", "F32", shape) for at in range(count)])
    model = True
    try:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        config = transformers.GPT2Config(n_layer=12, n_embd=256, n_head=4, vocab_size=5000, n_positions=256)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    except ImportError:
        print("transformers is not installed: from_pretrained is left out")
        model = False
    found = []
    with slow_fs.mounted(folder) as fs:
        for latency in LATENCIES:
            fs.tell(latency=latency / 1000)
            place = f"FUSE, {latency:g} ms a request"
            for name in FILES:
                for work in REMOTE:
                    path = str(fs.path / f"{name}.safetensors")
                    found.append(beside(f"{name}, {work.__name__}", place, ways(path, work), rounds))
            if model:
                run = from_pretrained(str(fs.path / "gpt2"))
                run()
                runs = {"safetensors": run, "patched": run}
                found.append(beside("from_pretrained, 46 MB", place, runs, rounds))
    return found


def near(folder: Path, rounds: int) -> list[dict[str, Any]]:
    small = [Tensor(f"t{at:04}", "F32", (32, 32)) for at in range(1000)]
    path = write_file(folder / "local.safetensors", [Tensor("table", "F32", (4096, 1024)), *small])
    path.read_bytes()
    return [beside(work.__name__, LOCAL, ways(str(path), work), rounds) for work in NEAR]


def over(rows: list[dict[str, Any]]) -> list[str]:
    """The loops that take longer than their bounds allow: where, which, how, and the ratio."""
    return [
        f"{row['place']}: {row['row']}, {way} {ratio:.2f} x"
        for row in rows
        for way, ratio in row["ratios"].items()
        if ratio > BOUNDS.get(row["place"], 1.2)
    ]


def show(document: dict[str, Any]) -> None:
    """A document of `--json` as Markdown: of the loops of each place the middle ratio, the least and the most."""
    print(document["machine"])
    print("\n| where | loops | Penstock / safetensors | under `patch()` | most | bound |\n" + "|---" * 6 + "|")
    for place in dict.fromkeys(row["place"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["place"] == place]
        cells = []
        for way in ("penstock", "patched"):
            ratios = [row["ratios"][way] for row in rows if way in row["ratios"]]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        most = max(rows, key=lambda row: max(row["ratios"].values()))
        print(f"| {place} | {len(rows)} | {' | '.join(cells)} | {most['row']} | {BOUNDS.get(place, 1.2)} |")
    print("\nover their bound:", *(over(document["rows"]) or ["none"]), sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--only", choices=("network", "local"), help="default: both")
    parser.add_argument("--json", metavar="FILE", help="the times of all rounds")
    parser.add_argument("--tables", metavar="FILE", help="print a file of --json, and measure nothing")
    options = parser.parse_args()
    if options.tables:
        show(json.loads(Path(options.tables).read_text()))
        return
    torch.set_num_threads(1)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} processors, Linux {platform.release()}, load {os.getloadavg()[0]:.1f},"
        f" torch {torch.__version__}, safetensors {safetensors.__version__}, penstock {penstock.__version__}"
    )
    print(machine)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "local":
            why = slow_fs.why_not()
            if why is None:
                found += network(Path(folder), options.rounds)
            else:
                print(f"{why}: the network file system is left out")
        if options.only != "network":
            found += near(Path(folder), options.rounds)
    document = {"machine": machine, "rounds": options.rounds, "rows": found}
    show(document)
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
