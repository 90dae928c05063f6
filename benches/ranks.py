"""Ranks that load together, and ranks that load alone: `python benches/ranks.py FOLDER [--rounds N] [--rate BYTES]`.

FOLDER is on the disk to read from. Four ranks (--ranks) load a checkpoint with names and shapes of Llama-3-8B, with as
many layers as fit into --size, into CPU memory: all of it each (`dp`), or each its part (`tp`: rows of most matrices,
columns of `o_proj` and `down_proj`). For each rate of the disk, held for all ranks together by a control group
(tests/slow_disk.py, as root; 0: as it is), they take turns:

| way | what it is |
|---|---|
| `alone` | each rank loads what it wants, as without a group: through the page cache, where others find it |
| `alone, keep` | the same, but that everything stays in the page cache, however slow that is |
| `alone, bypass` | the same past the page cache, as on nodes of their own |
| `together` | one load of all ranks, past the page cache: one reads what several want, the others copy it from there |
| `together, sockets` | the same, but that it is sent to the others (`shared_slabs=False`) |
| `auto` | one load of all ranks that choose for themselves, and otherwise have their defaults |
| `auto, bypass` | the same past the page cache |
| `warm: ...` | with their defaults, and all files in the page cache |

With --into the tensors exist before the load, as parameters of an engine do. Otherwise making their memory is a part of
the load, and costs about as much as a copy.

The page cache holds nothing of the files before each load, or all of them where it is warm. The time goes from the
signal to all ranks to the end of the last one. *disk* is what the disk gave to all ranks (`/proc/PID/io`), *by least*
the time by what it takes at that rate to read each byte once. After every load each rank makes a checksum of every
tensor; they must be equal whichever way was taken.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import penstock
import slow_disk
import torch
import torch.distributed as dist
from penstock.bench.machine import machine
from penstock.bench.page_cache import evict, fill
from penstock.cli import main as penstock_command

RANKS = 4
#: The tensors exist before the load.
INTO = False
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"options": {"copy": True}},
    "alone, keep": {"options": {"copy": True, "cache": "keep"}},
    "alone, bypass": {"options": {"copy": True, "cache": "bypass"}},
    "together": {"options": {"cache": "bypass", "exchange": "on"}, "together": True},
    "together, sockets": {
        "options": {"cache": "bypass", "exchange": "on", "shared_slabs": False},
        "together": True,
    },
    "auto": {"options": {}, "together": True},
    "auto, bypass": {"options": {"cache": "bypass"}, "together": True},
    "warm: alone": {"options": {}, "warm": True},
    "warm: together": {"options": {"exchange": "on"}, "together": True, "warm": True},
    "warm: together, sockets": {
        "options": {"exchange": "on", "shared_slabs": False},
        "together": True,
        "warm": True,
    },
    "warm: auto": {"options": {}, "together": True, "warm": True},
}


def parts_of(rank: int, ranks: int | None = None) -> Callable[[Any], Any]:
    """What a rank of tensor parallelism wants of each tensor."""
    ranks = ranks or RANKS

    def cut(n: int) -> slice:
        return slice(n * rank // ranks, n * (rank + 1) // ranks)

    def part(info: Any) -> Any:
        if len(info.shape) < 2:
            return None
        return (
            (slice(None), cut(info.shape[1]))
            if ("o_proj" in info.name or "down_proj" in info.name)
            else cut(info.shape[0])
        )

    return part


def read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def rank_of(
    rank: int, folder: Path, wants: str, way: str, port: int, group: Path | None, begin: int, told: int
) -> None:
    """One rank: loads when it is told to, and says how that went."""
    if group is not None:
        group.write_text(str(os.getpid()))
    checkpoint = penstock.open(folder)
    how = dict(WAYS[way])
    arguments: dict[str, Any] = {"options": how["options"], "slices": parts_of(rank) if wants == "tp" else None}
    if how.get("together"):
        arguments["group"] = (dist.TCPStore("127.0.0.1", port, RANKS, rank == 0), rank, RANKS)
    penstock.open(folder).load(names=[checkpoint.keys()[-1]])  # starts what a first load starts
    state = {}
    if INTO:
        part = arguments["slices"] or (lambda info: None)
        for name in checkpoint:
            shape = torch.empty(checkpoint[name].shape, device="meta")[part(checkpoint[name]) or ...].shape
            state[name] = torch.ones(shape, dtype=torch.bfloat16)
    os.write(told, b"r")
    os.read(begin, 1)
    before, cpu = read_bytes(), time.process_time()
    if INTO:
        report = checkpoint.load_into(state, **arguments)
    else:
        state = checkpoint.load(**arguments)
        report = checkpoint.last_report
    end = time.time()
    found: dict[str, Any] = {"end": end, "disk": read_bytes() - before, "cpu": time.process_time() - cpu}
    found["exchange"] = report and report.exchange
    found["cache"] = f"{report.cache}: {report.cache_reason}"
    found["sums"] = zlib.crc32(
        json.dumps(sorted((n, zlib.crc32(t.contiguous().view(torch.uint8).numpy())) for n, t in state.items())).encode()
    )
    os.write(told, json.dumps(found).encode())


def forked(
    count: int, run: Callable[[int, int, int], None], ready: Callable[[], None]
) -> tuple[float, list[dict[str, Any]]]:
    """Processes that begin together: the time of the signal, and what each said.

    Each does `run(number, begin, told)`. It writes a byte to `told` when it is there, reads one from `begin`, and then
    writes what it has to say. `ready` is called when all are there.
    """
    pipes, pids = [], []
    go_read, go_write = os.pipe()
    for number in range(count):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                run(number, go_read, write)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(write)
        pipes.append(read)
        pids.append(pid)
    for pipe in pipes:
        assert os.read(pipe, 1) == b"r", "a rank has failed"
    ready()
    begun = time.time()
    os.write(go_write, b"g" * count)
    said = []
    for pipe in pipes:
        text = b""
        while more := os.read(pipe, 1 << 16):
            text += more
        os.close(pipe)
        said.append(json.loads(text))
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(go_read)
    os.close(go_write)
    return begun, said


def load(folder: Path, files: list[Path], wants: str, way: str, group: Path | None) -> dict[str, Any]:
    """One load of all ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # rank 0 hosts their store there: this process must not have its threads
    begun, said = forked(
        RANKS,
        lambda rank, begin, told: rank_of(rank, folder, wants, way, port, group, begin, told),
        lambda: fill(files) if WAYS[way].get("warm") else evict(files),
    )
    found = {"seconds": max(one["end"] for one in said) - begun, "disk": sum(one["disk"] for one in said)}
    found["cpu"] = sum(one["cpu"] for one in said)
    found["choices"] = [(one["exchange"] or {}).get("choice") for one in said]
    found["why"] = (said[0]["exchange"] or {}).get("reason") or "; ".join(one["cache"] for one in said)
    for key in ("sent", "lent"):
        found[key] = sum((one["exchange"] or {}).get(f"{key}_bytes", 0) for one in said)
    return found | {"sums": [one["sums"] for one in said]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--into", action="store_true", help="into tensors that exist before the load")
    parser.add_argument("--size", default="1.6GB", help="of the checkpoint; a layer takes 436 MB (1.6GB)")
    parser.add_argument("--scale", type=float, default=1, help="of the longest dimension of each tensor, for less (1)")
    parser.add_argument("--rate", type=float, action="append", help="bytes per second of the disk; 0: as it is")
    parser.add_argument("--wants", action="append", choices=["dp", "tp"])
    parser.add_argument("--way", action="append", choices=list(WAYS), help="of these ways (all)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    global RANKS, INTO
    RANKS, INTO = given.ranks, given.into
    folder = given.folder / "llama"
    if not folder.exists():
        made = ["synth", "llama-3-8b", str(folder), "--nbytes", given.size, "--scale", str(given.scale)]
        if status := penstock_command(made):
            raise SystemExit(status)  # it has said why
    files = sorted(folder.glob("*.safetensors"))
    nbytes = penstock.open(folder).nbytes
    runs: list[dict[str, Any]] = []
    for rate in given.rate or [100e6, 400e6]:
        for wants in given.wants or ["dp", "tp"]:
            for number in range(given.rounds):
                ways = given.way or list(WAYS)
                for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                    if rate:
                        with slow_disk.group(folder, int(rate)) as group:
                            found = load(folder, files, wants, way, group)
                    else:
                        found = load(folder, files, wants, way, None)
                    runs.append({"rate": rate, "wants": wants, "way": way, "round": number} | found)
                    what = f"{wants}, {rate / 1e6:.0f} MB/s, {way}"
                    print(f"{what}: {found['seconds']:.2f} s, {found['choices'][0]} ({found['why']})", flush=True)
            sums = {tuple(run["sums"]) for run in runs if (run["rate"], run["wants"]) == (rate, wants)}
            assert len(sums) == 1, "the ways gave different tensors"
    print(f"\n{RANKS} ranks, {nbytes / 1e9:.2f} GB in {len(files)} files; medians of {given.rounds}\n")
    print("| wants | disk MB/s | way | s | min..max | by least | disk GB | sent GB | of it lent | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    for rate in given.rate or [100e6, 400e6]:
        for wants in given.wants or ["dp", "tp"]:
            for way in given.way or WAYS:
                those = [run for run in runs if (run["rate"], run["wants"], run["way"]) == (rate, wants, way)]
                seconds = [run["seconds"] for run in those]
                row: dict[str, Any] = {"rate": rate, "wants": wants, "way": way, "loads": len(those)}
                row["choices"] = [run["choices"][0] for run in those]
                row |= {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
                for name, key in (
                    ("disk_bytes", "disk"),
                    ("sent_bytes", "sent"),
                    ("lent_bytes", "lent"),
                    ("cpu_s", "cpu"),
                ):
                    row[name] = statistics.median(run[key] for run in those)
                rows.append(row)
                by_least = f"{row['median_s'] / (nbytes / rate):.2f}" if rate else ""
                times = f"{row['median_s']:.2f} | {row['min_s']:.2f}..{row['max_s']:.2f}"
                print(
                    f"| {wants} | {rate / 1e6:.0f} | {way} | {times} | {by_least} | "
                    f"{row['disk_bytes'] / 1e9:.2f} | {row['sent_bytes'] / 1e9:.2f} | {row['lent_bytes'] / 1e9:.2f} | "
                    f"{row['cpu_s']:.2f} |"
                )
    if given.json:
        found = {
            "machine": machine([given.folder], None),
            "nbytes": nbytes,
            "ranks": RANKS,
            "into": INTO,
            "command": sys.argv[1:],
            "rows": rows,
        }
        given.json.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
