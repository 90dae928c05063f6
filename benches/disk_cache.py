"""Loads through the disk cache beside loads without it: `python benches/disk_cache.py FOLDER --tools FOLDER`.

FOLDER is on the disk that is measured: it gets the checkpoint and the cache. --tools has `netbench` (`make netbench`
builds it). Links of 1 Gbit/s are pairs of network namespaces, as in benches/links.py, which needs root.

- `cost`: on such a link, loads with an empty cache and loads without one take turns. Time by time: at most 1.05. The
  share of the bytes that is cached 1 s after the load: at least 0.95.
- `writing`: the same from this machine, without a limit. Seconds of a processor that the cache costs for each GB: told.
- `second`: a second start, which asks the server for versions alone, beside a load of the same files from the same
  disk, out of the page cache and from the disk. Time by time, without the time of `open`: at most 1.05.
- `together`: two and eight processes that start at once on such a link. Bytes served by those of the checkpoint: at
  most 1.05. Time of the last one by that of one alone: at most 1.15 and 1.4.
- `left`: of two processes, one is killed or stopped in the middle. Time of the other by that of one alone: at most
  1.25.
- `slices`: four processes with tensor-parallel slices and no exchange. Bytes served by those of the checkpoint: at
  most 1.05.

Each load is a process of its own, into new memory. Its time goes from `open` to the last page touched; imports are not
timed. Every byte is compared by a checksum afterwards. Ratios are medians of pairs, or of medians. Processor seconds
are those of all processes that load. Where the processors limit and not the link, --gigabits names a slower one: its
name is in the results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from links import SERVER, NotHere, link
from penstock.bench.machine import machine
from penstock.bench.page_cache import evict, fill
from penstock.bench.served import NotServed, Served
from penstock.synthetic import synth
from penstock.synthetic.synth import Layout, Tensor

MIB = 1 << 20
SHARDS = 4
#: Rows of a tensor: each rank of four has as many.
ROWS = 1024

#: Loads when it is told to, and says what came of it.
PROGRAM = """
import json, resource, sys, time, zlib
import numpy as np, penstock
order = json.loads(sys.argv[1])
rank, ranks = order["rank"], order["ranks"]
storage = {"disk_cache": order["cache"], "disk_cache_free": 0} if order["cache"] else {}

def part(info):
    if info.name.endswith("down"):
        return (slice(None), slice(info.shape[1] * rank // ranks, info.shape[1] * (rank + 1) // ranks))
    return slice(info.shape[0] * rank // ranks, info.shape[0] * (rank + 1) // ranks)

def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

print("ready", flush=True)
sys.stdin.readline()
begun, cpu_begun = time.perf_counter(), cpu()
checkpoint = penstock.open(order["files"], storage=storage)
opened = time.perf_counter()
tensors = checkpoint.load(framework="np", progress=False, slices=part if ranks > 1 else None)
loaded = time.perf_counter()
for tensor in tensors.values():
    tensor.reshape(-1).view("uint8")[::4096].sum() if tensor.flags.c_contiguous else tensor.sum()
seconds, used = time.perf_counter() - begun, cpu() - cpu_begun
said = {"seconds": seconds, "open_s": opened - begun, "load_s": loaded - opened, "cpu_s": used}
report = checkpoint.last_report
said["routes"] = {lane: way["bytes"] for lane, way in report.routes.items() if way["bytes"]}
if (cache := report.disk_cache) is not None:
    cache.wait(max(0.0, 1.0 - (time.perf_counter() - loaded)))
    said["soon"] = (cache.written_bytes + cache.cached_bytes) / report.nbytes
    cache.wait(600)
    said["cached_s"] = time.perf_counter() - begun
    said["all_cpu_s"] = cpu() - cpu_begun
    said["cache"] = {name: getattr(cache, name) for name in (
        "cached_bytes", "network_bytes", "written_bytes", "dropped_bytes", "fetched_again_bytes", "cpu_seconds",
        "reason")}
said["crc"] = {name: zlib.crc32(np.ascontiguousarray(tensor)) for name, tensor in tensors.items()}
print(json.dumps(said), flush=True)
"""


class Load:
    """A process that loads when it is told to."""

    def __init__(self, files: Sequence[str], cache: Path | None, rank: int = 0, ranks: int = 1) -> None:
        order = {"files": list(files), "cache": str(cache) if cache else None, "rank": rank, "ranks": ranks}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(order)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to, self._of = self.process.stdin, self.process.stdout
        assert self._of.readline() == "ready\n", "the process did not start"

    def go(self) -> None:
        self._to.write("\n")
        self._to.flush()

    def said(self) -> dict[str, Any]:
        line = self._of.readline()
        assert line, "the load failed"
        self.end()
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Bench:
    """The common part of all measurements."""

    def __init__(self, folder: Path, tools: Path | None, size: float, rounds: int, gigabits: float) -> None:
        self.folder, self.tools, self.rounds, self.gigabits = folder, tools, rounds, gigabits
        self.found: list[dict[str, Any]] = []
        columns = max(1, int(size / SHARDS / 8 / ROWS / 4))
        shards = [
            tuple(
                Tensor(f"{shard}.{number}.{'down' if number % 4 == 3 else 'up'}", "F32", (ROWS, columns))
                for number in range(8)
            )
            for shard in range(SHARDS)
        ]
        model = synth.write(Layout("cached", tuple(shards)), folder / f"{size / 1e9:g}GB")
        self.files = sorted(model.glob("*.safetensors"))
        self.size = sum(file.stat().st_size for file in self.files)
        fill(self.files)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.cache)
        self._crc: dict[tuple[int, int], dict[str, int]] = {}

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def forget(self) -> None:
        """Empties the cache."""
        shutil.rmtree(self.cache, ignore_errors=True)
        os.sync()

    def is_right(self, said: dict[str, Any], rank: int = 0, ranks: int = 1) -> None:
        """Compares what was loaded with the files, by numpy alone."""
        if (rank, ranks) not in self._crc:
            from penstock.bench import reference

            found = {}
            for name, entry in reference.entries_of(self.files[0].parent).items():
                whole = reference.raw(entry).view("f4").reshape(entry.shape)
                axis = 1 if name.endswith("down") else 0
                length = whole.shape[axis]
                cut = slice(length * rank // ranks, length * (rank + 1) // ranks)
                found[name] = zlib.crc32(np.ascontiguousarray(whole[:, cut] if axis else whole[cut]))
            self._crc[rank, ranks] = found
        assert said["crc"] == self._crc[rank, ranks], "wrong bytes"

    def one(self, files: Sequence[str], cache: Path | None) -> dict[str, Any]:
        load = Load(files, cache)
        load.go()
        said = load.said()
        self.is_right(said)
        return said

    def keep(self, name: str, claim: str, value: float, bound: float | None, sign: str = "<=", **more: Any) -> None:
        holds = bound is None or (value <= bound if sign == "<=" else value >= bound)
        self.found.append({"name": name, "claim": claim, "value": value, "bound": bound, "holds": holds} | more)
        numbers = ", ".join(f"{key} {number:.3g}" for key, number in more.items() if isinstance(number, (int, float)))
        judged = "told" if bound is None else f"{sign} {bound}: {'holds' if holds else 'FAILS'}"
        print(f"{name}: {claim}: {value:.3f} ({judged}); {numbers}", flush=True)


def counted(served: Served, before: dict[str, int]) -> int:
    return served.counts()["bytes"] - before["bytes"]


@contextlib.contextmanager
def linked(bench: Bench) -> Iterator[Served]:
    """A server behind a link."""
    with (
        link(bench.gigabits) as inside,
        Served(bench.files[0].parent, bench.tools, prefix=inside, host=SERVER) as served,
    ):
        yield served


def median(runs: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def pairs(bench: Bench, urls: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Loads with an empty cache and loads without one, in turn."""
    runs: dict[str, list[dict[str, Any]]] = {"cached": [], "plain": []}
    for number in range(bench.rounds):
        for turn in list(runs)[:: 1 if number % 2 else -1]:
            bench.forget()
            runs[turn].append(bench.one(urls, bench.cache if turn == "cached" else None))
    return runs


def ratio(runs: dict[str, list[dict[str, Any]]], one: str, other: str, key: str = "seconds") -> float:
    return statistics.median(a[key] / b[key] for a, b in zip(runs[one], runs[other], strict=True))


def cost(bench: Bench) -> None:
    """A link of 1 Gbit/s."""
    with linked(bench) as served:
        runs = pairs(bench, served.urls(bench.files))
    bench.keep(
        "cost", "time by that without a cache", ratio(runs, "cached", "plain"), 1.05,
        seconds=median(runs["cached"], "seconds"), plain_seconds=median(runs["plain"], "seconds"),
        cpu_s=median(runs["cached"], "all_cpu_s"), plain_cpu_s=median(runs["plain"], "cpu_s"),
        dropped=max(run["cache"]["dropped_bytes"] for run in runs["cached"]), all=runs,
    )  # fmt: skip
    bench.keep("cost", "cached 1 s after the load", median(runs["cached"], "soon"), 0.95, ">=")


def writing(bench: Bench) -> None:
    """From this machine, without a limit."""
    with Served(bench.files[0].parent, bench.tools) as served:
        runs = pairs(bench, served.urls(bench.files))
    more = [a["all_cpu_s"] - b["cpu_s"] for a, b in zip(runs["cached"], runs["plain"], strict=True)]
    bench.keep(
        "writing", "seconds of a processor for each GB", statistics.median(more) / bench.size * 1e9, None,
        seconds=median(runs["cached"], "seconds"), plain_seconds=median(runs["plain"], "seconds"),
        told_by_report=statistics.median(run["cache"]["cpu_seconds"] for run in runs["cached"]) / bench.size * 1e9,
        dropped=statistics.median(run["cache"]["dropped_bytes"] for run in runs["cached"]), all=runs,
    )  # fmt: skip


def second(bench: Bench) -> None:
    """A second start beside a load of the same files."""
    bench.forget()
    with Served(bench.files[0].parent, bench.tools) as served:
        urls = served.urls(bench.files)
        while bench.one(urls, bench.cache)["cache"]["network_bytes"]:
            pass
        kept = sorted((bench.cache / "objects").glob("*/*.data"))
        paths = [str(file) for file in bench.files]
        for state in ("warm", "cold"):
            runs: dict[str, list[dict[str, Any]]] = {"second": [], "files": []}
            # Both come into the page cache in the same way: by how its pages came, a touch takes up to twice as long
            evict([*kept, *bench.files])
            for number in range(bench.rounds):
                for turn in list(runs)[:: 1 if number % 2 else -1]:
                    if state == "cold":
                        evict([*kept, *bench.files])
                    else:
                        fill([*kept, *bench.files])
                    if turn == "files":
                        runs[turn].append(bench.one(paths, None))
                        continue
                    before = served.counts()
                    runs[turn].append(bench.one(urls, bench.cache))
                    runs[turn][-1]["served"] = counted(served, before)
                    assert runs[turn][-1]["served"] < 1 * MIB, runs[turn][-1]
            for run in (*runs["second"], *runs["files"]):
                run["unopened_s"] = run["seconds"] - run["open_s"]
            bench.keep(
                f"second, {state}", "time by that of the files", ratio(runs, "second", "files", "unopened_s"), 1.05,
                seconds=median(runs["second"], "seconds"), files_seconds=median(runs["files"], "seconds"),
                version_requests_s=median(runs["second"], "open_s"), files_open_s=median(runs["files"], "open_s"),
                served_bytes=max(run["served"] for run in runs["second"]), all=runs,
            )  # fmt: skip


def alone(bench: Bench, served: Served) -> list[dict[str, Any]]:
    runs = []
    for _ in range(bench.rounds):
        bench.forget()
        runs.append(bench.one(served.urls(bench.files), bench.cache))
    return runs


def group(bench: Bench, served: Served, count: int, ranks: int = 1) -> tuple[list[dict[str, Any]], int]:
    """The words of processes that start at once, and the bytes that the server has sent."""
    bench.forget()
    loads = [Load(served.urls(bench.files), bench.cache, number % ranks, ranks) for number in range(count)]
    before = served.counts()
    for load in loads:
        load.go()
    said = [load.said() for load in loads]
    for number, one in enumerate(said):
        bench.is_right(one, number % ranks, ranks)
    return said, counted(served, before)


def together(bench: Bench) -> None:
    """Two and eight processes."""
    with linked(bench) as served:
        one = median(alone(bench, served), "seconds")
        for count, bound in ((2, 1.15), (8, 1.4)):
            rounds = [group(bench, served, count) for _ in range(bench.rounds)]
            name = f"together, {count} processes"
            last = statistics.median(max(map(seconds_of, said)) for said, _ in rounds)
            bench.keep(
                name, "time of the last by that of one", last / one, bound, seconds=last, alone_s=one,
                cpu_s=statistics.median(sum(run["all_cpu_s"] for run in said) for said, _ in rounds),
                all=[said for said, _ in rounds],
            )  # fmt: skip
            bench.keep(name, "bytes served", max(sent for _, sent in rounds) / bench.size, 1.05)


def seconds_of(run: dict[str, Any]) -> float:
    return float(run["seconds"])


def left(bench: Bench) -> None:
    """One of two is killed or stopped in the middle."""
    with linked(bench) as served:
        one = median(alone(bench, served), "seconds")
        for what in (signal.SIGKILL, signal.SIGSTOP):
            times: list[float] = []
            cpu: list[float] = []
            sent: list[int] = []
            for _ in range(bench.rounds):
                bench.forget()
                loads = [Load(served.urls(bench.files), bench.cache) for _ in range(2)]
                before = served.counts()
                for load in loads:
                    load.go()
                while counted(served, before) < bench.size / 2:
                    time.sleep(0.01)
                loads[0].process.send_signal(what)
                said = loads[1].said()
                bench.is_right(said)
                loads[0].end()
                times.append(said["seconds"])
                cpu.append(said["all_cpu_s"])
                sent.append(counted(served, before))
            bench.keep(
                f"left, {what.name}", "time by that of one alone", statistics.median(times) / one, 1.25,
                alone_s=one, cpu_s=statistics.median(cpu), served_by_size=statistics.median(sent) / bench.size,
                all=times,
            )  # fmt: skip


def slices(bench: Bench) -> None:
    """Four ranks that do not exchange."""
    with linked(bench) as served:
        rounds = [group(bench, served, 4, ranks=4) for _ in range(bench.rounds)]
    bench.keep(
        "slices, 4 processes", "bytes served", max(sent for _, sent in rounds) / bench.size, 1.05,
        seconds=statistics.median(max(map(seconds_of, said)) for said, _ in rounds),
        cpu_s=statistics.median(sum(run["all_cpu_s"] for run in said) for said, _ in rounds),
        all=[said for said, _ in rounds],
    )  # fmt: skip


MEASUREMENTS = {
    "cost": cost, "writing": writing, "second": second, "together": together, "left": left, "slices": slices,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--tools", type=Path, help="folder of netbench (default: PATH)")
    parser.add_argument("--size", type=float, default=1.2e9, help="bytes of the checkpoint")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gigabits", type=float, default=1, help="Gbit/s of the link (default: 1)")
    parser.add_argument("--only", choices=MEASUREMENTS, action="append", help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    # Or the namespace would stay
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    about = machine([arguments.folder], None)
    bench = Bench(arguments.folder, arguments.tools, arguments.size, arguments.rounds, arguments.gigabits)
    for name in arguments.only or MEASUREMENTS:
        try:
            MEASUREMENTS[name](bench)
        except (NotHere, NotServed) as error:
            bench.found.append({"name": name, "absent": str(error)})
            print(f"{name}: not here: {error}", file=sys.stderr, flush=True)
    bench.forget()
    if arguments.json:
        found = {"machine": about, "load_average_at_end": list(os.getloadavg()), "bytes": bench.size}
        found |= {"rounds": arguments.rounds, "gigabits": arguments.gigabits, "found": bench.found}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
