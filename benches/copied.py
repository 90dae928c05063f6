"""Copied loads, cold and warm: `python benches/copied.py CHECKPOINT... [--rounds N] [--ways A,B] [--warm N]`.

A checkpoint is a path, or one of the benchmark by name (gpt2, dense, moe), which is generated where it is not there.
What is copied (into private memory here, to a GPU elsewhere) can be read through the page cache by a pool of threads,
through it by io_uring, or past it with O_DIRECT. Without an option Penstock chooses. Each way loads each checkpoint:

- cold: nothing of it is in the page cache;
- warm: all of it is, as `penstock warm` or an earlier turn has put it there;
- second: a process loaded it cold in that way, waited until the page cache was filled where it is, and ended. Nothing
  was evicted since. Before that process free memory was left alone for `--idle` seconds. The host of a virtual machine
  takes it back then, so the page cache gets memory that the host has not given yet.

Every load has a process of its own. The turns of a round are in random order, each after the same predecessor: a
process that took twice the memory of a load and gave it back. Seconds are from the call to the last byte in place,
medians over the rounds. (Tests compare the bytes of every way.) At the end one process loads the checkpoint warm,
without an option, so many times as `--warm` says: median and 99th percentile. In turn with these loads the same process
reads as many bytes of the same files into fresh memory by plain system calls, on one thread (`read`): what their 99th
percentile is above their median comes from the machine.

Once per round the files are also populated after the same idle seconds, which touches no page. Then one thread reads
them twice: `first touch` and `second touch`, processor time a page. If the first is no slower, this machine cannot show
what an untouched page costs. The command says so, and the count of missing bytes alone decides.

The last lines say what the project promises of loads without an option: cold within 10% of the faster of `keep` and
`bypass`, no byte missing in the page cache after the fill, the second start within 10% or 10 ms of a warm load, and the
99th percentile of warm loads at most twice their median. `--json` keeps every load and the promises, `--tables FILE`
prints such a file again, as Markdown.
"""

from __future__ import annotations

import argparse
import datetime
import json
import mmap
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import penstock
from penstock.bench.checkpoints import FULL, place
from penstock.bench.machine import machine
from penstock.bench.results import percentile

#: Options of each way. The destination is private memory in all of them.
WAYS: dict[str, dict[str, Any]] = {
    "no option": {},
    "keep": {"cache": "keep"},
    "bypass": {"cache": "bypass"},
    "pool": {"io": "buffered"},
    "io_uring": {"io": "uring_buffered"},
    "O_DIRECT": {"io": "uring"},
}
SECOND = ("no option", "keep", "io_uring")
#: Microseconds a page that a slow first touch takes longer than a second one, in the mean of all pages. Where the host
#: has to give a page, it takes 5 to 20. Else it takes 0.3, since nothing is in the processor's caches.
SLOW_TOUCH = 1.0
#: `madvise` with this populates a mapping (Linux 5.14).
MADV_POPULATE_READ = 22

#: Takes and gives back so much memory. On a virtual machine free memory goes back to the host after a second or two,
#: and the next load would pay for getting it again.
PREDECESSOR = """
import mmap, sys
memory = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
for at in range(0, len(memory), mmap.PAGESIZE):
    memory[at] = 1
"""

#: In turn so many times: a warm load without an option, and the same bytes by plain reads into fresh memory.
REPEATED = """
import json, mmap, os, sys, time
import penstock, penstock._numpy
path, times = sys.argv[1], int(sys.argv[2])
files = [os.open(file, os.O_RDONLY) for file in penstock.open(path).files]
seconds = {"loads": [], "reads": []}
for _ in range(times):
    checkpoint = penstock.open(path)
    begun = time.perf_counter()
    tensors = checkpoint.load(framework="dlpack", options={"copy": True}, progress=False)
    seconds["loads"].append(time.perf_counter() - begun)
    del tensors
    begun = time.perf_counter()
    memory = mmap.mmap(-1, sum(os.fstat(fd).st_size for fd in files), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    place = memoryview(memory)
    for fd in files:
        offset = 0
        while got := os.preadv(fd, [place[: 4 << 20]], offset):
            place, offset = place[got:], offset + got
    seconds["reads"].append(time.perf_counter() - begun)
    del place
    memory.close()
print(json.dumps(seconds))
"""

#: Loads so many times, and says what each load took and chose, and at the end which bytes the page cache lacks: of a
#: stretch of 128 KiB that lacks a page, all.
LOADER = """
import json, sys, time
import penstock, penstock._numpy
path, options, times = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
said = []
for _ in range(times):
    checkpoint = penstock.open(path)
    begun = time.perf_counter()
    tensors = checkpoint.load(framework="dlpack", options={**options, "copy": True}, progress=False)
    seconds = time.perf_counter() - begun
    report = checkpoint.last_report
    said.append({"seconds": seconds, "cpu": report.cpu_seconds, "cache": report.cache, "reason": report.cache_reason})
if (fill := report.cache_fill) is not None:
    fill.wait()
    said[-1]["fill"] = {"state": fill.state, "reason": fill.reason, "seconds": fill.seconds, "nbytes": fill.nbytes}
known = [penstock._core.residency(str(file)) for file in checkpoint.files]
said[-1]["missing"] = sum(size - resident for resident, size, _ in known)
print(json.dumps(said))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", help=f"paths, or names: {', '.join(FULL)} (gpt2)")
    help = "where checkpoints that are given by name lie"
    parser.add_argument("--folder", type=Path, default=Path(".bench/checkpoints/full"), help=help)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--states", type=lambda text: text.split(","), default=["cold", "warm", "second"])
    help = "seconds before each load that begins a second start: until then the host has taken free memory back"
    parser.add_argument("--idle", type=float, default=5, help=help)
    parser.add_argument("--warm", type=int, default=200, help="warm loads of one process; 0: none")
    parser.add_argument("--json", type=Path, help="where every load goes")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="only print what --json wrote, as Markdown")
    arguments = parser.parse_args()
    if arguments.tables:
        show(json.loads(arguments.tables.read_text()))
        return
    paths = [found(name, arguments.folder) for name in arguments.checkpoints or ["gpt2"]]
    begun = datetime.datetime.now(datetime.timezone.utc)
    document: dict[str, Any] = {
        "time": begun.isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(paths, None),
        "rounds": arguments.rounds,
        "checkpoints": {},
    }
    for path in paths:
        document["checkpoints"][path.name] = of = {
            "nbytes": penstock.open(path).nbytes,
            "turns": measure(path, arguments.rounds, arguments.ways, arguments.states, arguments.idle),
        }
        if "second" in arguments.states:
            of["touches"] = [touches(path, arguments.idle) for _ in range(arguments.rounds)]
        if arguments.warm:
            of["warm loads"] = repeated(path, arguments.warm)
        of["promises"] = promises(of)
        now = datetime.datetime.now(datetime.timezone.utc)
        document |= {"seconds": round((now - begun).total_seconds()), "load_average_at_end": list(os.getloadavg())}
        if arguments.json:
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    show(document)


def found(checkpoint: str, folder: Path) -> Path:
    """The place of a checkpoint, made where it is one of the benchmark's and not there."""
    if checkpoint not in FULL or Path(checkpoint).exists():
        return Path(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    place(checkpoint, FULL[checkpoint].layout(), [folder])
    return folder / checkpoint


def run(program: str, *arguments: object) -> str:
    """What a program prints that runs in a Python of its own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def put(files: list[str], state: str) -> None:
    """Brings files into the page cache, or out of it."""
    command = "warm" if state == "warm" else "evict"
    subprocess.run([sys.executable, "-m", "penstock.cli", command, *files], check=True, stdout=subprocess.DEVNULL)


def rest(nbytes: int, idle: float) -> None:
    """Leaves free memory of twice that size to the host, which takes it back."""
    run(PREDECESSOR, 2 * nbytes)
    time.sleep(idle)


def touches(path: Path, idle: float) -> dict[str, float]:
    """Microseconds of processor time a page: a thread reads twice what the disk has filled."""
    checkpoint = penstock.open(path)
    files = list(map(str, checkpoint.files))
    put(files, "cold")
    rest(checkpoint.nbytes, idle)
    found = {"first": 0.0, "second": 0.0}
    pages = 0
    buffer = [memoryview(bytearray(256 << 10))]
    for file in files:
        with open(file, "rb") as opened:
            with mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                # Huge pages are made of the free memory that the host takes back. Small ones are not.
                mapped.madvise(mmap.MADV_HUGEPAGE)
                mapped.madvise(MADV_POPULATE_READ)
            pages += -(-os.fstat(opened.fileno()).st_size // mmap.PAGESIZE)
            for turn in found:
                begun, offset = time.thread_time(), 0
                while got := os.preadv(opened.fileno(), buffer, offset):
                    offset += got
                found[turn] += time.thread_time() - begun
    return {turn: seconds / pages * 1e6 for turn, seconds in found.items()}


def measure(
    path: Path, rounds: int, ways: list[str], states: list[str], idle: float
) -> dict[str, list[dict[str, Any]]]:
    checkpoint = penstock.open(path)
    files = list(map(str, checkpoint.files))
    turns = [(state, way) for state in states for way in ways if state != "second" or way in SECOND]
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    orders = random.Random(0)
    for _ in range(rounds):
        for state, way in orders.sample(turns, len(turns)):
            options = json.dumps(WAYS[way])
            put(files, state)
            before: dict[str, Any] = {}
            if state == "second":
                rest(checkpoint.nbytes, idle)
                first = json.loads(run(LOADER, path, options, 1))[0]
                before = {key: first[key] for key in ("fill", "missing") if key in first}
            run(PREDECESSOR, 2 * checkpoint.nbytes)
            said = json.loads(run(LOADER, path, options, 1))[0]
            found[f"{state}, {way}"].append({**said, **before})
    return dict(sorted(found.items()))


def medians(turns: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    return {turn: statistics.median(load["seconds"] for load in loads) for turn, loads in turns.items()}


def promises(of: dict[str, Any]) -> list[dict[str, Any]]:
    """What the project promises of loads without an option, with what was found, as far as it was measured."""
    turns, many = medians(of["turns"]), of.get("warm loads")
    made: list[dict[str, Any]] = []

    def promise(claim: str, value: float, most: float) -> None:
        made.append({"claim": claim, "value": value, "most": most, "holds": value <= most})

    def decides_nothing(claim: str, value: float, why: str) -> None:
        made.append({"claim": claim, "value": value, "most": None, "holds": None, "why": why})

    if {"cold, no option", "cold, keep", "cold, bypass"} <= set(turns):
        best = min(turns["cold, keep"], turns["cold, bypass"])
        promise("cold: times as long as the faster of keep and bypass", turns["cold, no option"] / best, 1.1)
    if {"second, no option", "warm, no option"} <= set(turns):
        lacking = [load.get("missing") for load in of["turns"]["second, no option"]]
        if all(count is not None for count in lacking):
            promise("second start: bytes that the page cache lacks after the fill, most of all rounds", max(lacking), 0)
        warm = turns["warm, no option"]
        value, most = turns["second, no option"] / warm, max(1.1, 1 + 0.01 / warm)
        claim = "second start, after the fill: times as long as a warm load (10% or 10 ms more)"
        if first_touch_is_slow(of):
            promise(claim, value, round(most, 2))
        else:
            decides_nothing(claim, value, "a first touch is not slower than a second one on this machine now")
    if many:
        promise("warm loads of one process: p99 by the median", many["p99"] / many["median"], 2.0)
    return made


def first_touch_is_slow(of: dict[str, Any]) -> bool:
    """Whether memory that the host had not given yet was slow to touch; of files that say nothing of it, yes."""
    found = of.get("touches")
    return not found or statistics.median(each["first"] - each["second"] for each in found) >= SLOW_TOUCH


def show(document: dict[str, Any]) -> None:
    """A document of `--json` as Markdown. Ratios are to the fastest way of the same state."""
    about = document["machine"]
    print(
        f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, {about['file_system']}, {document['time']}"
    )
    loads = [f"{averages[0]:.1f}" for averages in (about["load_average"], document["load_average_at_end"])]
    print(f"load average {loads[0]} at the start, {loads[1]} at the end; {document['seconds']} s")
    print(f"{document['command']}")
    for name, of in document["checkpoints"].items():
        print(f"\n{name}, {of['nbytes'] / 1e9:.2f} GB, medians of {document['rounds']}:\n")
        print("| | seconds | ratio | least | most | CPU s/GB | page cache |\n|---|---|---|---|---|---|---|")
        found = medians(of["turns"])
        for turn, loads in of["turns"].items():
            best = min(seconds for other, seconds in found.items() if other.split(",")[0] == turn.split(",")[0])
            seconds = [load["seconds"] for load in loads]
            cpu = statistics.median(load["cpu"] for load in loads) / (of["nbytes"] / 1e9)
            cells = [turn, f"{found[turn]:.3f}", f"{found[turn] / best:.2f}", f"{min(seconds):.3f}"]
            print(f"| {' | '.join([*cells, f'{max(seconds):.3f}', f'{cpu:.3f}', kept(loads)])} |")
        if many := of.get("warm loads"):
            print(
                f"\n{many['loads']} warm loads of one process: median {many['median']:.4f} s, p99 {many['p99']:.4f} s"
            )
            if read := many.get("read"):
                share = read["p99"] / read["median"]
                print(
                    f"plain reads: median {read['median']:.4f} s, p99 {read['p99']:.4f} s, {share:.2f} of their median"
                )
        if found := of.get("touches"):
            first, second = (statistics.median(each[turn] for each in found) for turn in ("first", "second"))
            print(f"\nfirst touch {first:.2f} us of processor time a page, second touch {second:.2f} us")
        print()
        for one in of["promises"]:
            verdict = "holds" if one["holds"] else "**missed**"
            if one["holds"] is None:
                print(f"- {one['claim']}: {one['value']:.2f}, decides nothing: {one['why']}")
            else:
                print(f"- {one['claim']}: {one['value']:.2f} (at most {one['most']}): {verdict}")


def kept(loads: list[dict[str, Any]]) -> str:
    """What became of the page cache, and how long filling it took after the load."""
    kinds = {kind: sum(load["cache"] == kind for load in loads) for kind in ("keep", "fill", "bypass")}
    said = ", ".join(f"{kind} {count}" for kind, count in kinds.items() if count)
    fills = [load["fill"] for load in loads if load.get("fill")]
    seconds = [fill["seconds"] for fill in fills if fill["state"] == "finished"]
    if seconds:
        said += f"; filled in {statistics.median(seconds):.2f} s"
    if len(seconds) < len(fills):
        said += f"; {len(fills) - len(seconds)} not filled"
    return said


def repeated(path: Path, times: int) -> dict[str, Any]:
    """Warm loads of one process, without an option; and plain reads in turn with them."""
    put(list(map(str, penstock.open(path).files)), "warm")
    seconds = json.loads(run(REPEATED, path, times))
    loads, reads = ({"median": statistics.median(s), "p99": percentile(s, 99)} for s in seconds.values())
    return {"loads": times, **loads, "read": reads, "seconds": seconds}


if __name__ == "__main__":
    main()
