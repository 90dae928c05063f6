"""Ranks that load together from several drives, beside plain readers: `python benches/drives.py FOLDER...`.

Each FOLDER is an empty one on a drive of its own; `make drives` makes four in an emulated machine. A checkpoint of
--size bytes of data, with names and shapes of Llama-3-8B's layers and random bytes, has one shard on each. Nothing is
in the page cache before a load. These take turns:

| way | what it is |
|---|---|
| `plain` | a process for each drive reads its shard with O_DIRECT: 1 MiB reads, 8 at a time |
| `world` | ranks that load together past the page cache: `exchange="on"`, `scope="world"` |
| `node` | the same with `scope="node"`: all ranks are on one machine, so it must be the same |
| `two machines` | the same, but that the ranks believe that they are on two machines: each reads what its ranks want |
| `strong` | `world` by fewer ranks |
| `weak` | `world` by fewer ranks, with one drive and its shard for each |

Every rank wants everything (`dp`), or its part (`tp`: rows of most matrices, columns of `o_proj` and `down_proj`).

*s* goes from the first read to the last byte: from the moment when the first rank has its plan until the last rank has
everything, and has heard that all have. So it lacks the agreement before the first read, and has the end that ranks
agree on. *all* goes from the signal to the ranks to the end of the last one. *MB/s* is the data of the checkpoint by
*s*, and *of plain* that by the rate of as many plain readers as there are drives. *given* and *busy* are what the
kernel counts for the drives: bytes that were read, and the share of *s* in which the least busy drive had a request.
*sent* went between ranks. After every load each rank compares each tensor with the bytes that were read from the files
with nothing of Penstock.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import penstock
import penstock._group
import penstock._torch  # what a first load imports, no load imports
import torch
import torch.distributed as dist
from penstock.bench.machine import machine
from penstock.bench.page_cache import evict
from penstock.synthetic.layouts import build
from penstock.synthetic.synth import write_file
from ranks import forked, parts_of

MIB = 1 << 20
#: Reads of a plain reader that are under way at a time.
DEPTH = 8


class Way(NamedTuple):
    """What takes a turn: how it loads, its ranks, and the drives that hold its checkpoint."""

    name: str
    wants: str
    ranks: int
    drives: int


class Known(NamedTuple):
    """A tensor as it is in its file."""

    name: str
    shape: tuple[int, ...]
    raw: Any


def ways_with(drives: int) -> list[Way]:
    """All turns of a round."""
    fewer = [count for count in (1, 2) if count < drives]
    found = [Way("plain", "", count, count) for count in [*fewer, drives]]
    for wants in ("dp", "tp"):
        found += [Way(name, wants, drives, drives) for name in ("world", "node", "two machines")]
        found += [Way("strong", wants, count, drives) for count in fewer]
        found += [Way("weak", wants, count, count) for count in fewer]
    return found


def write(folders: Sequence[Path], nbytes: float) -> list[Path]:
    """Writes the shards, of about the same size."""
    # Four layers, each tensor shorter than in the model: one whole layer would do, but cannot be dealt evenly
    layout = build("llama-3-8b", layers=4)
    scale = nbytes / sum(tensor.nbytes for tensor in layout.tensors if ".layers." in tensor.name)
    tensors = [one for one in build("llama-3-8b", layers=4, scale=scale).tensors if ".layers." in one.name]
    shards: list[list[Any]] = [[] for _ in folders]
    for tensor in sorted(tensors, key=lambda tensor: -tensor.nbytes):
        min(shards, key=lambda shard: sum(one.nbytes for one in shard)).append(tensor)
    files = []
    for number, (folder, shard) in enumerate(zip(folders, shards, strict=True)):
        shard.sort(key=lambda tensor: tensor.name)
        files.append(
            write_file(folder / f"shard{number}.safetensors", shard, seed=number, metadata=dict(layout.metadata or {}))
        )
    return files


def contents(path: Path) -> dict[str, Known]:
    """What a file holds, without Penstock."""
    raw = numpy.fromfile(path, numpy.uint8)
    begin = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    found = {}
    for name, info in json.loads(raw[8:begin].tobytes()).items():
        if name != "__metadata__":
            first, past = info["data_offsets"]
            found[name] = Known(name, tuple(info["shape"]), torch.from_numpy(raw[begin + first : begin + past]))
    return found


def compare(state: dict[str, Any], known: dict[str, Known], rank: int, way: Way) -> None:
    """Raises an error if a rank did not get what it wanted."""
    assert state.keys() == known.keys(), "not the tensors of the checkpoint"
    part = parts_of(rank, way.ranks) if way.wants == "tp" else lambda _: None
    for name, found in state.items():
        want = known[name].raw.view(found.dtype).reshape(known[name].shape)
        cut = part(known[name])
        want = want if cut is None else want[cut]
        assert found.shape == want.shape, name
        assert torch.equal(found.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)), name


def counted(devices: Sequence[int]) -> list[tuple[int, float]]:
    """Of each drive: bytes that it gave, and seconds in which it had a request."""
    found = []
    for device in devices:
        fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
        found.append((int(fields[2]) * 512, int(fields[9]) / 1000))
    return found


def plain(path: Path, begin: int, told: int) -> None:
    """One plain reader: threads of which each reads the next MiB into memory of its own."""
    file, size = os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size
    buffers = [mmap.mmap(-1, MIB) for _ in range(DEPTH)]
    for buffer in buffers:
        buffer.write(b"x" * MIB)  # its pages are in use
    offsets, lock = iter(range(0, size, MIB)), threading.Lock()
    read, go = [0] * DEPTH, threading.Event()

    def work(number: int) -> None:
        go.wait()
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            read[number] += os.preadv(file, [buffers[number]], offset)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(DEPTH)]
    for thread in threads:
        thread.start()
    os.write(told, b"r")
    os.read(begin, 1)
    first, cpu = time.time(), time.process_time()
    go.set()
    for thread in threads:
        thread.join()
    last = time.time()
    assert sum(read) == size, "the file was not read whole"
    found = {"first": first, "last": last, "end": last, "cpu": time.process_time() - cpu, "sent": 0}
    os.write(told, json.dumps(found).encode())


def rank_of(
    rank: int, way: Way, files: Sequence[Path], known: dict[str, Known], store: str, begin: int, told: int
) -> None:
    """One rank: loads when it is told to, and says how that went."""
    torch.set_num_threads(1)
    checkpoint = penstock.open(list(files))
    options: dict[str, Any] = {"cache": "bypass", "exchange": "on", "scope": "world", "peer_timeout": 60}
    if way.name in ("node", "two machines"):
        options["scope"] = "node"
    if way.name == "two machines":
        penstock._group._machine = lambda: f"machine {rank * 2 // way.ranks}"
    slices = parts_of(rank, way.ranks) if way.wants == "tp" else None
    # Starts what a first load starts
    penstock.open(list(files)).load(names=[min(checkpoint, key=lambda name: checkpoint[name].nbytes)])
    group = (dist.FileStore(store, way.ranks), rank, way.ranks)  # type: ignore[attr-defined]
    os.write(told, b"r")
    os.read(begin, 1)
    cpu = time.process_time()
    state = checkpoint.load(group=group, options=options, slices=slices)
    end, cpu = time.time(), time.process_time() - cpu
    report = checkpoint.last_report
    assert report is not None
    assert not report.fallbacks, report.fallbacks
    assert {name for name, route in report.routes.items() if route["bytes"]} <= {"direct"}, report.routes
    last = end - report.hand_out_seconds
    found = {"first": last - report.seconds + report.plan_seconds, "last": last, "end": end, "cpu": cpu}
    found["sent"] = (report.exchange or {}).get("sent_bytes", 0)
    found["waits"], found["engine_cpu"] = dict(report.waits), report.engine_cpu_seconds
    compare(state, known, rank, way)
    os.write(told, json.dumps(found).encode())


def turn(way: Way, files: Sequence[Path], known: dict[str, Known]) -> dict[str, Any]:
    """One load by all ranks."""
    files = files[: way.drives]
    devices = sorted({path.stat().st_dev for path in files})
    store = tempfile.mktemp(prefix="penstock-drives-")
    before: list[tuple[int, float]] = []

    def ready() -> None:
        evict(files)
        before.extend(counted(devices))

    def run(number: int, begin: int, told: int) -> None:
        if way.name == "plain":
            plain(files[number], begin, told)
        else:
            rank_of(number, way, files, known, store, begin, told)

    begun, said = forked(way.ranks, run, ready)
    after = counted(devices)
    Path(store).unlink(missing_ok=True)
    seconds = max(one["last"] for one in said) - min(one["first"] for one in said)
    return {
        "seconds": seconds,
        "all": max(one["end"] for one in said) - begun,
        "given": sum(now[0] - then[0] for then, now in zip(before, after, strict=True)),
        "busy": min(now[1] - then[1] for then, now in zip(before, after, strict=True)) / seconds,
        "cpu": sum(one["cpu"] for one in said),
        "sent": sum(one["sent"] for one in said),
        "ranks_said": said,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=float, default=400e6, help="bytes of the checkpoint (4e8)")
    parser.add_argument("--way", action="append", help="of these ways, beside plain (all)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    files = write(given.folder, given.size)
    known = [contents(path) for path in files]
    nbytes = [sum(tensor.raw.numel() for tensor in one.values()) for one in known]
    whole = {
        count: {name: one for part in known[:count] for name, one in part.items()} for count in range(1, len(files) + 1)
    }
    ways = [way for way in ways_with(len(files)) if not given.way or way.name in ("plain", *given.way)]
    runs: dict[Way, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(given.rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            found = turn(way, files, whole[way.drives])
            runs[way].append(found)
            rate = sum(nbytes[: way.drives]) / found["seconds"] / 1e6
            print(
                f"{' '.join(map(str, way))}: {found['seconds']:.2f} s, {rate:.1f} MB/s, {found['ranks_said']}",
                flush=True,
            )
    print(f"\n{sum(nbytes) / 1e6:.0f} MB, one shard on each of {len(files)} drives; medians of {given.rounds}\n")
    print(
        "| way | wants | ranks | drives | s | min..max | all, s | MB/s | of plain | given MB | busy | sent MB | CPU s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    usual = {way.drives: statistics.median(run["seconds"] for run in runs[way]) for way in ways if way.name == "plain"}
    for way in ways:
        seconds = [run["seconds"] for run in runs[way]]
        row: dict[str, Any] = {**way._asdict(), "loads": len(seconds), "nbytes": sum(nbytes[: way.drives])}
        row |= {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
        row["of_plain"] = usual[way.drives] / row["median_s"]
        for name in ("all", "given", "busy", "sent", "cpu"):
            row[name] = statistics.median(run[name] for run in runs[way])
        rows.append(row)
        cells = [
            way.name,
            way.wants,
            way.ranks,
            way.drives,
            f"{row['median_s']:.2f}",
            f"{min(seconds):.2f}..{max(seconds):.2f}",
        ]
        cells += [f"{row['all']:.2f}", f"{row['nbytes'] / row['median_s'] / 1e6:.1f}", f"{row['of_plain']:.3f}"]
        cells += [f"{row['given'] / 1e6:.0f}", f"{row['busy']:.2f}", f"{row['sent'] / 1e6:.0f}", f"{row['cpu']:.1f}"]
        print("| " + " | ".join(map(str, cells)) + " |")
    if given.json:
        found = {"machine": machine(given.folder, None), "drives": len(files), "rounds": given.rounds, "rows": rows}
        given.json.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
