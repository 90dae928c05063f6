"""penstock beside its peers and beside what the machine allows: `make bench`, or `make bench BENCH="--rounds 5"`.

Every load runs in a fresh process, in an order that rotates from round to round; imports are not timed. After a load
one byte of every page is read (timed apart, with its page faults), then every byte is compared with the files.

| scenario | page cache before | what is loaded |
|---|---|---|
| `cold` | empty (checked), and a raw O_DIRECT read of the same files just before | tensors, any memory |
| `warm` | full (checked) | tensors, any memory: zero copy is what is compared |
| `private` | full | tensors in memory of their own |
| `load_into` | full | existing parameters whose pages are in use |

Seconds are those of the load, and where touching the pages afterwards still read from the disk, of the touch as well.
GB are 1e9 bytes. Bounds are those the project set itself; a run with `--quick` is too small to be judged by them.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import importlib.metadata
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reference
import synth
from contestants import CONTESTANTS, Contestant

REPOSITORY = Path(__file__).resolve().parent.parent
SCHEMA = 1
SCENARIOS = ("cold", "warm", "private", "load_into")
CALIBRATION = {
    "direct": [
        ("--engine", "uring", "--depth", "2"),
        ("--engine", "uring", "--depth", "4"),
        ("--engine", "uring", "--depth", "8"),
        ("--engine", "uring", "--depth", "32"),
        ("--engine", "uring", "--depth", "16", "--block", "1048576"),
        ("--threads", "2"),
        ("--threads", "4"),
    ],
    "place": [("--threads", "4"), ("--threads", "8"), ("--threads", "16")],
    "fresh": [("--threads", "2", "--block", str(block << 20)) for block in (2, 4, 32)],
    "populate": [("--threads", "4"), ("--threads", "8"), ("--threads", "16")],
    "copy": [("--threads", str(threads), "--block", "2097152") for threads in (1, 2, 4)],
}

Run = dict[str, Any]


# --- the page cache --------------------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_CACHESTAT = 451  # Linux 6.5, the same number on every architecture


def resident_bytes(paths: Iterable[Path]) -> int | None:
    """Bytes of the files in the page cache; `None` where the kernel does not tell (before 6.5, or not our files)."""
    pages = 0
    for path in paths:
        with path.open("rb") as file:
            span = (ctypes.c_uint64 * 2)(0, 0)
            counts = (ctypes.c_uint64 * 5)()
            if _libc.syscall(_CACHESTAT, file.fileno(), span, counts, 0) != 0:
                return None
            pages += counts[0]
    return pages * os.sysconf("SC_PAGESIZE")


def evict(paths: Iterable[Path]) -> None:
    """Drops the files from the page cache. Only clean pages go, hence the sync."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill(paths: Iterable[Path]) -> None:
    """Reads the files into the page cache."""
    buffer = bytearray(8 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def free_memory(nbytes: int) -> None:
    """Uses and frees that much memory, so that it is there: a virtual machine gives free memory back to its host."""
    with mmap.mmap(-1, nbytes) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, nbytes)
        gc.collect()  # the view of it, or it cannot be closed


# --- processes -------------------------------------------------------------------------------------------------------


class Ceilings:
    """The example binary that moves the same bytes with no loader in the way."""

    def __init__(self) -> None:
        command = ["cargo", "build", "--release", "--quiet", "--package", "penstock-core", "--example", "ceilings"]
        subprocess.run(command, cwd=REPOSITORY, check=True)
        target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
        self.program = (REPOSITORY / target) / "release" / "examples" / "ceilings"

    def measure(self, measure: str, settings: Iterable[str], paths: list[Path]) -> dict[str, Any]:
        command = [self.program, measure, *settings, *paths]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def load_once(contestant: Contestant, scenario: str, folder: Path, before: Callable[[], dict[str, Any]]) -> Run:
    """One fresh process; `before` runs when it has imported everything, just before its clock starts."""
    command = [sys.executable, Path(__file__).with_name("contestants.py"), str(CONTESTANTS.index(contestant))]
    process = subprocess.Popen(
        [*command, scenario, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | contestant.environment,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        line = process.stdout.readline()
        found: dict[str, Any] = {}
        if line.strip() == "ready":
            found = before()
            process.stdin.write("go\n")
            process.stdin.flush()
            line = process.stdout.readline()
        _, errors = process.communicate()
    if line.startswith("{"):
        return found | json.loads(line)
    return found | {"error": (errors.strip().splitlines() or ["no output"])[-1], "status": process.returncode}


# --- one checkpoint --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    rounds: int
    scenarios: tuple[str, ...]
    routes: bool
    quick: bool
    folder: Path


class Bench:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ceilings = Ceilings()
        self.runs: list[Run] = []
        self.calibration: list[dict[str, Any]] = []
        self.absent: dict[str, str] = {}

    def checkpoint(self, name: str, layout: synth.Layout) -> None:
        folder = synth.write(layout, self.settings.folder / name)
        paths = reference.files_of(folder)
        evict(paths)
        best = {measure: self.best(name, measure, paths) for measure in CALIBRATION}
        for scenario in self.settings.scenarios:
            if name == "many" and scenario != "warm":
                continue  # 7 MB of data: only the time that each tensor costs is of interest
            self.scenario(name, scenario, folder, paths, best)

    def best(self, checkpoint: str, measure: str, paths: list[Path]) -> tuple[str, ...]:
        """The fastest settings of one ceiling on these files."""
        tried: dict[tuple[str, ...], float] = {}
        for settings in CALIBRATION[measure][:2] if self.settings.quick else CALIBRATION[measure]:
            seconds = []
            for _ in range(1 if self.settings.quick else 2):
                (evict if measure in ("direct", "place", "populate") else fill)(paths)
                found = self.ceilings.measure(measure, settings, paths)
                self.calibration.append({"checkpoint": checkpoint} | found)
                seconds.append(found["seconds"])
            tried[settings] = min(seconds)
        return min(tried, key=lambda settings: tried[settings])

    def scenario(self, name: str, scenario: str, folder: Path, paths: list[Path], best: dict[str, Any]) -> None:
        main = [contestant for contestant in CONTESTANTS if scenario in contestant.scenarios]
        routes = [contestant for contestant in CONTESTANTS if f"{scenario}-routes" in contestant.scenarios]

        def before() -> dict[str, Any]:
            # Each finds as much memory that was freed just now, whoever came before. Else the one after a contestant
            # that leaves no page cache gets memory that was free for long, which a virtual machine may have given back
            # to its host: a third slower to fill.
            fill(paths)
            free_memory(sum(path.stat().st_size for path in paths))
            if scenario != "cold":
                return {"resident_before": resident_bytes(paths)}
            evict(paths)
            raw = self.ceilings.measure("direct", best["direct"], paths)
            evict(paths)
            return {"resident_before": resident_bytes(paths), "raw_s": raw["seconds"]}

        # What the files allow takes its turn among the contestants.
        beside = {"cold": ("populate", "place"), "private": ("fresh",), "load_into": ("copy",)}.get(scenario, ())
        for number in range(self.settings.rounds):
            with_routes = self.settings.routes and number < 3
            entrants: list[Contestant | str] = [*main, *(routes if with_routes else []), *beside]
            turn = number % len(entrants)
            for entrant in entrants[turn:] + entrants[:turn]:
                if isinstance(entrant, str):
                    found = before()
                    measured = self.ceilings.measure(entrant, best[entrant], paths)
                    settings = " ".join(best[entrant]).replace("--", "")
                    run = found | {"load_s": measured["seconds"], "bytes": measured["bytes"], "ceiling": settings}
                    label = f"ceiling: {entrant}"
                else:
                    label = entrant.name
                    if label in self.absent:
                        continue
                    run = load_once(entrant, scenario, folder, before)
                    if "absent" in run:
                        self.absent[label] = run["absent"]
                        continue
                self.record(run | {"checkpoint": name, "scenario": scenario, "contestant": label, "round": number})

    def record(self, run: Run) -> None:
        if "load_s" in run:
            # A load that left its bytes on the disk is not over.
            lazy = run.get("touch_major_faults", 0) > 0
            run["seconds"] = run["load_s"] + (run["touch_s"] if lazy else 0)
        self.runs.append(run)
        told = f"{run['seconds']:.3f} s" if "seconds" in run else f"failed: {run.get('error')}"
        place = f"{run['checkpoint']:10} {run['scenario']:9}"
        print(f"{place} round {run['round'] + 1}  {run['contestant']:26} {told}", file=sys.stderr, flush=True)


# --- results ---------------------------------------------------------------------------------------------------------


def median(runs: Iterable[Run], key: str = "seconds") -> float:
    return statistics.median(run[key] for run in runs)


def summarise(runs: list[Run]) -> list[dict[str, Any]]:
    """One row per checkpoint, scenario and contestant: medians and spread."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["checkpoint"], run["scenario"], run["contestant"]), []).append(run)
    rows = []
    for (checkpoint, scenario, contestant), group in groups.items():
        row: dict[str, Any] = {"checkpoint": checkpoint, "scenario": scenario, "contestant": contestant}
        row["loads"] = len(group)
        failed = [run for run in group if "error" in run]
        if failed:
            rows.append(row | {"error": failed[0]["error"]})
            continue
        row |= {
            "median_s": median(group),
            "min_s": min(run["seconds"] for run in group),
            "max_s": max(run["seconds"] for run in group),
            "bytes": group[0]["bytes"],
            "gb_per_s": group[0]["bytes"] / 1e9 / median(group),
        }
        if "touch_s" in group[0]:
            row |= {"load_s": median(group, "load_s"), "touch_s": median(group, "touch_s")}
            row |= {"cpu_s": median(group, "cpu_s"), "memory": median(group, "memory")}
            if "open_s" in group[0]:
                row["open_s"] = median(group, "open_s")
            row["verified"] = all(run["verified_bytes"] == run["bytes"] and not run["different"] for run in group)
        if "raw_s" in group[0]:
            row["share_of_raw"] = statistics.median(run["raw_s"] / run["seconds"] for run in group)
        rows.append(row)
    return rows


def bounds(rows: list[dict[str, Any]], judged: bool) -> list[dict[str, Any]]:
    """What the project promises of itself, each with what was found."""
    table = {(row["checkpoint"], row["scenario"], row["contestant"]): row for row in rows if "median_s" in row}
    found = []

    def judge(checkpoint: str, claim: str, value: float, bound: float, sign: str = ">=") -> None:
        holds = value >= bound if sign == ">=" else value <= bound
        row = {"checkpoint": checkpoint, "claim": claim, "value": value, "sign": sign, "bound": bound}
        found.append(row | {"holds": holds, "judged": judged})

    for checkpoint in dict.fromkeys(row["checkpoint"] for row in rows):
        cold = {
            name: row for (owner, scenario, name), row in table.items() if (owner, scenario) == (checkpoint, "cold")
        }
        if "penstock" in cold:
            ours = cold["penstock"]
            judge(checkpoint, "cold: share of the raw O_DIRECT read beside it", ours["share_of_raw"], 0.9)
            if "ceiling: place" in cold:
                # Reads into a few buffers stay in the processor's cache; a load has to put its bytes somewhere.
                kept = ours["share_of_raw"] / cold["ceiling: place"]["share_of_raw"]
                judge(checkpoint, "cold: share of O_DIRECT into memory for all of it", kept, 0.9)
            for peer in ("safetensors", "fastsafetensors", "fastsafetensors buffered"):
                if peer in cold:
                    judge(checkpoint, f"cold: times as fast as {peer}", cold[peer]["median_s"] / ours["median_s"], 1.0)

        ours, theirs = (table.get((checkpoint, "warm", name), {}) for name in ("penstock", "safetensors"))
        if ours and theirs:
            # Alone, and with every page touched: neither may hide in the other.
            for what, keys in (("load", ("load_s",)), ("load and touch", ("load_s", "touch_s"))):
                mine, other = (sum(row[key] for key in keys) for row in (ours, theirs))
                allowed = max(other * 1.1, other + 0.010)
                judge(
                    checkpoint, f"warm: safetensors' {what} within 10% or 10 ms (1 is the limit)", allowed / mine, 1.0
                )

        def beside(
            scenario: str, ours: str, other: str, claim: str, bound: float, checkpoint: str = checkpoint
        ) -> None:
            mine, theirs = table.get((checkpoint, scenario, ours)), table.get((checkpoint, scenario, other))
            if mine and theirs:
                judge(checkpoint, claim, theirs["median_s"] / mine["median_s"], bound)

        beside(
            "load_into", "penstock load_into", "fastsafetensors copy_", "load_into: times as fast as fastsafetensors", 3
        )
        moe = "moe" in checkpoint
        beside(
            "private",
            "penstock copy",
            "fastsafetensors",
            "private: times as fast as fastsafetensors",
            1.2 if moe else 1.5,
        )
        beside("private", "penstock copy", "ceiling: fresh", "private: share of pread into fresh huge pages", 0.9)

    many = table.get(("many", "warm", "penstock"))
    if many:
        judge("many", "371,474 tensors: seconds to open", many["open_s"], 0.4, "<=")
        judge("many", "371,474 tensors: seconds to open and load warm", many["load_s"], 1.8, "<=")
    return found


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(folder: Path) -> dict[str, Any]:
    cpu = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    disk = subprocess.run(["df", "--output=fstype", folder], capture_output=True, text=True, check=True)
    packages = ("penstock", "safetensors", "fastsafetensors", "torch", "numpy")
    versions = {package: version(package) for package in packages}
    return {
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"),
        "kernel": platform.release(),
        "file_system": disk.stdout.split()[-1],
        "python": platform.python_version(),
        "versions": versions,
        "load_average": os.getloadavg(),
    }


def print_results(result: dict[str, Any]) -> None:
    about = result["machine"]
    memory = f"{about['memory'] / 2**30:.0f} GiB"
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    print(f"\n{about['cpu']}, {about['cores']} cores, {memory}, Linux {about['kernel']}, {about['file_system']}")
    print(f"Python {about['python']}, {versions}")
    print(
        f"load average {about['load_average'][0]:.1f} at the start, {result['load_average_at_end'][0]:.1f} at the end"
    )
    print(result["command"])

    columns = (
        f"{'median s':>9} {'min..max':>15} {'GB/s':>7} {'of raw':>7} {'load s':>8} {'touch s':>8} {'CPU s':>7}  bytes"
    )
    heading = None

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        return (row["checkpoint"], SCENARIOS.index(row["scenario"]), row.get("median_s", float("inf")))

    for row in sorted(result["rows"], key=order):
        if heading != (row["checkpoint"], row["scenario"]):
            heading = (row["checkpoint"], row["scenario"])
            size = f" ({row['bytes'] / 1e9:.2f} GB)" if "bytes" in row else ""
            print(f"\n{row['checkpoint']}{size}, {row['scenario']}\n  {'':26} {columns}")
        if "error" in row:
            print(f"  {row['contestant']:26} failed: {row['error']}")
            continue
        spread = f"{row['min_s']:.3f}..{row['max_s']:.3f}"
        raw = f"{row['share_of_raw']:.2f}" if "share_of_raw" in row else ""
        line = f"  {row['contestant']:26} {row['median_s']:9.3f} {spread:>15} {row['gb_per_s']:7.2f} {raw:>7}"
        if "touch_s" in row:
            line += f" {row['load_s']:8.3f} {row['touch_s']:8.3f} {row['cpu_s']:7.2f}  "
            line += "verified" if row["verified"] else "DIFFERENT"
        print(line)

    for name, why in result["absent"].items():
        print(f"\nnot here: {name} ({why})", end="")
    if result["bounds"]:
        print("\n\nbounds" + (" (a quick run is too small to be judged by them)" if result["quick"] else ""))
    for row in result["bounds"]:
        verdict = ("holds" if row["holds"] else "FAILS") if row["judged"] else ""
        print(
            f"  {row['checkpoint']:8} {row['claim']:64} {row['value']:6.2f} {row['sign']} {row['bound']:<4} {verdict}"
        )


def print_tables(result: dict[str, Any]) -> None:
    """The rows and bounds of one result file as Markdown, for docs/benchmarks.md."""
    headings = ("", "median s", "min..max", "GB/s", "of raw", "load s", "touch s", "CPU s", "loads")
    places = dict.fromkeys((row["checkpoint"], row["scenario"]) for row in result["rows"])
    for checkpoint, scenario in places:
        rows = [row for row in result["rows"] if (row["checkpoint"], row["scenario"]) == (checkpoint, scenario)]
        print(f"\n{checkpoint}, {scenario}:\n\n| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
        for row in sorted(rows, key=lambda row: row.get("median_s", float("inf"))):
            if "error" in row:
                print(f"| {row['contestant']} | failed: {row['error']} |{' |' * (len(headings) - 2)}")
                continue
            cells = [row["contestant"], f"{row['median_s']:.3f}", f"{row['min_s']:.3f}..{row['max_s']:.3f}"]
            cells += [f"{row['gb_per_s']:.2f}"]
            optional = (("share_of_raw", ".2f"), ("load_s", ".3f"), ("touch_s", ".3f"), ("cpu_s", ".2f"))
            cells += [format(row[key], how) if key in row else "" for key, how in optional]
            print(f"| {' | '.join([*cells, str(row['loads'])])} |")
    print("\n| checkpoint | bound | found | wanted | |\n|---|---|---|---|---|")
    for row in result["bounds"]:
        verdict = ("holds" if row["holds"] else "**missed**") if row["judged"] else "not judged"
        sign = "at least" if row["sign"] == ">=" else "at most"
        print(f"| {row['checkpoint']} | {row['claim']} | {row['value']:.2f} | {sign} {row['bound']} | {verdict} |")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare penstock with its peers and with what this machine allows.")
    parser.add_argument(
        "--quick", action="store_true", help="0.1 GB, two rounds: shows that everything works, judges nothing"
    )
    parser.add_argument("--rounds", type=int, help="loads per contestant (9; quick: 2)")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="only this one; may be repeated")
    parser.add_argument("--checkpoint", action="append", help="only this one: gpt2, dense, moe, many; may be repeated")
    parser.add_argument("--no-routes", dest="routes", action="store_false", help="penstock's own choice of route only")
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / ".bench" / "checkpoints", help="where checkpoints lie"
    )
    parser.add_argument("--json", type=Path, default=REPOSITORY / ".bench" / "results.json", help="where results go")
    parser.add_argument("--tables", type=Path, metavar="RESULTS", help="only print a result file as Markdown tables")
    arguments = parser.parse_args()
    if arguments.tables:
        print_tables(json.loads(arguments.tables.read_text()))
        return 0

    layouts: dict[str, Callable[[], synth.Layout]] = {
        "gpt2": synth.gpt2,
        "dense": lambda: synth.llama(3e9),
        "moe": lambda: synth.qwen3_moe(3e9),
        "many": synth.many_tensors,
    }
    if arguments.quick:
        layouts = {"dense": lambda: synth.llama(0.1e9), "moe": lambda: synth.qwen3_moe(0.1e9)}
    chosen = arguments.checkpoint or list(layouts)
    unknown = set(chosen) - set(layouts)
    if unknown:
        parser.error(f"no such checkpoint: {', '.join(sorted(unknown))} (there are {', '.join(layouts)})")

    rounds = arguments.rounds or (2 if arguments.quick else 9)
    folder = arguments.folder / ("quick" if arguments.quick else "full")
    scenarios = tuple(arguments.scenario or SCENARIOS)
    bench = Bench(Settings(rounds, scenarios, arguments.routes, arguments.quick, folder))
    folder.mkdir(parents=True, exist_ok=True)
    about = machine(folder)
    for name in chosen:
        bench.checkpoint(name, layouts[name]())

    rows = summarise(bench.runs)
    result = {
        "schema": SCHEMA,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benches/bench.py", *sys.argv[1:]]),
        "quick": arguments.quick,
        "machine": about,
        "load_average_at_end": os.getloadavg(),
        "absent": bench.absent,
        "calibration": bench.calibration,
        "rows": rows,
        "bounds": bounds(rows, judged=not arguments.quick),
        "runs": bench.runs,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print_results(result)
    print(f"\nevery load: {arguments.json}")
    wrong = [
        row for row in rows if row.get("verified") is False or ("error" in row and "penstock" in row["contestant"])
    ]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
