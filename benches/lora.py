"""The time of a LoRA adapter in vLLM: ``python benches/lora.py FOLDER [--rounds N] [--size BYTES]``.

An adapter is resolved by its name, and loaded as vLLM's worker does: configuration, names, tensors in CPU memory. Then
one byte of each page is read, so that mapped files have been read too. Contestants take turns in one process, and the
one that goes first changes with each round:

| contestant | what it is |
|---|---|
| `vllm` | vLLM's own filesystem resolver, and safetensors |
| `folder` | Penstock's resolver, `PENSTOCK_LORA_PREFIX` is the same folder |
| `folder, no copies` | the same with `PENSTOCK_LORA_KEPT_BYTES=0`: the worker keeps no copy |
| `address` | `folder` with a web server of this machine (`netbench serve`), which sends from the page cache |

First alone, then beside a load: another process loads a checkpoint past the page cache, again and again. The page cache
has the adapter's files. Where a copy for the worker is made behind the load, the next turn begins when it is there. How
long that took is told, and is in no contestant's time. A table has the median, the 99th percentile, and the median of
the ratios to `vllm` in the same round: above 1 vLLM's takes longer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import math
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "engines")]

from on_cpu import ENVIRONMENT  # noqa: E402

os.environ.update(ENVIRONMENT)

import torch  # noqa: E402
from penstock.bench.machine import machine, version  # noqa: E402
from penstock.bench.rounds import rotated  # noqa: E402
from penstock.integrations import _vllm_lora  # noqa: E402
from penstock.integrations._lora_settings import KEPT_BYTES, PREFIX, lora_settings  # noqa: E402
from penstock.synthetic import synth  # noqa: E402
from penstock.synthetic.synth import Tensor  # noqa: E402
from vllm.lora import lora_model  # noqa: E402
from vllm.lora.lora_model import LoRAModel  # noqa: E402
from vllm.lora.peft_helper import PEFTHelper  # noqa: E402
from vllm.plugins.lora_resolvers.filesystem_resolver import FilesystemResolver  # noqa: E402

BASE = "org/base"
NAME = "adapter"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
HIDDEN, RANK = 4096, 64
PAGE = 4096
#: The threads that copy behind a load.
COPIES = "penstock-adapter"

#: Loads past the page cache until it is ended. It says when the first has ended.
LOADS = """
import sys, penstock
checkpoint = penstock.open(sys.argv[1])
while True:
    checkpoint.load(framework="np", options={"copy": True, "io": "direct"})
    print("loaded", flush=True)
"""


def make(folder: Path, size: int) -> Path:
    """An adapter of about so many bytes, and a checkpoint to load beside it."""
    layers = max(1, round(size / (len(MODULES) * 2 * HIDDEN * RANK * 2)))
    shapes = {"A": (RANK, HIDDEN), "B": (HIDDEN, RANK)}
    tensors = [
        Tensor(f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{side}.weight", "BF16", shape)
        for layer in range(layers)
        for module in MODULES
        for side, shape in shapes.items()
    ]
    place = folder / "adapters" / NAME
    place.mkdir(parents=True, exist_ok=True)
    synth.write_file(place / "adapter_model.safetensors", tensors)
    about = {"peft_type": "LORA", "base_model_name_or_path": BASE, "r": RANK, "lora_alpha": RANK}
    (place / "adapter_config.json").write_text(json.dumps({**about, "target_modules": list(MODULES)}))
    return synth.write_file(folder / "beside.safetensors", [Tensor(f"{n}", "U8", (32 << 20,)) for n in range(16)])


@contextlib.contextmanager
def served(folder: Path, netbench: Path) -> Iterator[str]:
    server = subprocess.Popen([netbench, "serve", folder], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{json.loads(server.stdout.readline())['port']}"
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def loading(file: Path) -> Iterator[None]:
    """Beside this another process loads."""
    child = subprocess.Popen([sys.executable, "-c", LOADS, file], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "loaded\n"
        yield
        assert child.poll() is None, "the load beside has ended"
    finally:
        child.kill()
        child.wait()


def read(folder: str) -> int:
    """Loads an adapter as vLLM's worker does, and reads a byte of each page. The sum of these bytes."""
    helper = PEFTHelper.from_local_dir(folder, 4096)
    model = LoRAModel.from_local_checkpoint(folder, set(MODULES), helper, device="cpu", dtype=torch.bfloat16)
    tensors = [one for layer in model.loras.values() for one in (layer.lora_a, layer.lora_b)]
    return sum(int(tensor.view(torch.uint8).flatten()[::PAGE].sum(dtype=torch.int64)) for tensor in tensors)


def contestants(folder: Path, address: str) -> dict[str, Callable[[], int]]:
    plain = lora_model.safetensors

    def timed(resolver: Any, seen: Any) -> Callable[[], int]:
        def run() -> int:
            lora_model.safetensors = seen
            try:
                found = asyncio.run(resolver.resolve_lora(BASE, NAME))
                assert found is not None
                return read(found.lora_path)
            finally:
                lora_model.safetensors = plain

        return run

    made = {"vllm": timed(FilesystemResolver(str(folder)), plain)}
    prefixes = {"folder": {PREFIX: str(folder)}, "address": {PREFIX: address}}
    prefixes["folder, no copies"] = {PREFIX: str(folder), KEPT_BYTES: "0"}
    for name, variables in prefixes.items():
        settings = lora_settings(variables)
        assert settings is not None
        made[name] = timed(_vllm_lora.PenstockResolver(settings), _vllm_lora._Safetensors(plain, settings))
    return made


def settle() -> float:
    """Waits for the copies that are made behind loads. The seconds that this took."""
    begun = time.perf_counter()
    for thread in threading.enumerate():
        if thread.name == COPIES:
            thread.join()
    return time.perf_counter() - begun


def measure(ways: dict[str, Callable[[], int]], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The seconds of each load, and those until the copy behind it was there."""
    sums = {name: way() for name, way in ways.items()}  # once, untimed
    assert len(set(sums.values())) == 1, sums
    settle()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    behind: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in rotated(list(ways), number):
            begun = time.perf_counter()
            found = ways[name]()
            seconds[name].append(time.perf_counter() - begun)
            behind[name].append(settle())
            assert found == sums[name], name
    return seconds, behind


def percentile(values: list[float], part: float) -> float:
    """The smallest value that so large a part of all does not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * part) - 1]


def show(result: dict[str, Any]) -> None:
    """Prints the tables of a result."""
    print("| state | contestant | median, ms | p99, ms | vllm / it |\n|---|---|---|---|---|")
    for state, seconds in result["seconds"].items():
        for name, values in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(seconds["vllm"], values, strict=True))
            middle, last = statistics.median(values) * 1e3, percentile(values, 0.99) * 1e3
            print(f"| {state} | {name} | {middle:.0f} | {last:.0f} | {ratio:.2f} |")
    for state, seconds in result.get("seconds_behind", {}).items():
        for name, values in seconds.items():
            if statistics.median(values) >= 1e-3:
                middle, last = statistics.median(values) * 1e3, percentile(values, 0.99) * 1e3
                print(f"{state}, {name}: the copy was there {middle:.0f} ms later (99th percentile {last:.0f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--size", type=int, default=200_000_000)
    parser.add_argument(
        "--netbench", type=Path, default=Path(os.environ.get("PENSTOCK_TEST_NETBENCH", "")) / "netbench"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tables", type=Path, help="prints the tables of a kept result, and measures nothing")
    given = parser.parse_args()
    if given.tables:
        show(json.loads(given.tables.read_text()))
        return
    random.seed(0)
    beside = make(given.folder, given.size)
    adapters = given.folder / "adapters"
    nbytes = (adapters / NAME / "adapter_model.safetensors").stat().st_size
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine([given.folder], None) | {"vllm": version("vllm")},
        "nbytes": nbytes,
        "rounds": given.rounds,
        "seconds": {},
        "seconds_behind": {},
    }
    with served(adapters, given.netbench) as address:
        ways = contestants(adapters, address)
        result["seconds"]["alone"], result["seconds_behind"]["alone"] = measure(ways, given.rounds)
        with loading(beside):
            result["seconds"]["beside a load"], result["seconds_behind"]["beside a load"] = measure(ways, given.rounds)
    result["load_average_at_the_end"] = list(os.getloadavg())
    if given.json:
        given.json.write_text(json.dumps(result) + "\n")
    print(f"an adapter of {nbytes / 1e6:.0f} MB, {given.rounds} rounds")
    show(result)


if __name__ == "__main__":
    main()
