"""vLLM's loaders beside each other on the CPU: `python benches/engines.py FOLDER [--rounds N] [--rate BYTES]`.

Several ranks load a checkpoint into one model, tensor parallel, with vLLM's own loader classes. FOLDER is on the disk
to read from. Each load has processes of its own that are forked from one that has imported everything. The time goes
from a barrier, when the models are there, to the barrier behind the last rank. Parameters are as vLLM makes them:
memory that nothing has touched.

| state | the page cache | the disk |
|---|---|---|
| cold | holds nothing of the files | held to --rate for all ranks together (tests/slow_disk.py) |
| warm | holds all files | the same |
| cold, no limit | holds nothing of the files | as it is |

With --reload each load is followed by vLLM's `reload_weights`, in the same state of the page cache: what a wake from
sleep of level 2 does, and a start from a snapshot. Its time and its ratio stand in columns of their own. vLLM processes
the weights for serving before, which is not timed.

First each contestant loads once, untimed, into poisoned parameters. The memory that a load takes besides the parameters
is measured there. Then contestants and ceilings take turns, in an order that rotates. After every load the digests of
all parameters are compared with those of `safetensors`. A table has medians, and the ratio to Penstock's time in the
same round: above 1 Penstock is faster. The range contains the median of such ratios with a probability of at least 95%,
from 6 rounds on.

The ceilings: `direct`, one process that reads each byte of the files once, with O_DIRECT; `copy`, which copies each
byte once from the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
#: Where this program and the processes that it starts find what they share with the tests.
SHARED = [str(TESTS), str(TESTS / "engines"), str(Path(__file__).resolve().parent)]
sys.path[:0] = SHARED

import engine_checkpoints  # noqa: E402
import slow_disk  # noqa: E402
from on_cpu import ENVIRONMENT  # noqa: E402
from pairs import interval  # noqa: E402
from penstock import _ceiling  # noqa: E402
from penstock.bench import predecessor  # noqa: E402
from penstock.bench.machine import machine, version  # noqa: E402
from penstock.bench.page_cache import evict, fill, is_full  # noqa: E402
from penstock.bench.process import Sampled, memory_of  # noqa: E402
from penstock.bench.rounds import rotated  # noqa: E402

#: Seconds until a load is given up.
PATIENCE = 900
#: What all others are compared with, and whose parameters are right.
OURS, RIGHT = "penstock", "safetensors"


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A way to load, in vLLM's words."""

    load_format: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    on_cpu: bool = False
    """Whether fastsafetensors is told to use the CPU."""
    extra: bool = False
    """Whether it takes part only if it is named, or with --extras."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """What the ranks find in it."""


def _options(load_format: str, environment: dict[str, str] | None = None, **options: Any) -> Contestant:
    return Contestant(load_format, {"model_loader_extra_config": options}, extra=True, environment=environment or {})


#: Run:ai's ranks read for each other over gloo only if they are told to; else each reads everything.
_TOGETHER = {"RUNAI_STREAMER_DIST": "1"}
_PAST_THE_CACHE = {"RUNAI_STREAMER_FS_STRATEGY": "io_uring_direct", "RUNAI_STREAMER_FS_QUEUE_DEPTH": "8"}


CONTESTANTS = {
    OURS: Contestant("penstock"),
    RIGHT: Contestant("safetensors"),
    "fastsafetensors": Contestant("fastsafetensors"),
    "fastsafetensors, its device set to cpu": Contestant("fastsafetensors", on_cpu=True),
    "runai_streamer": Contestant("runai_streamer"),
    "penstock, recorded": _options("penstock", mapped="off"),
    "penstock, mapped": _options("penstock", mapped="on"),
    "penstock keep": _options("penstock", cache="keep"),
    "penstock bypass": _options("penstock", cache="bypass"),
    "penstock bypass, exchange off": _options("penstock", exchange="off", cache="bypass"),
    "penstock bypass, exchange on": _options("penstock", exchange="on", cache="bypass"),
    "safetensors prefetch": Contestant("safetensors", {"safetensors_load_strategy": "prefetch"}, extra=True),
    "safetensors multithread": _options("safetensors", enable_multithread_load=True),
    "runai_streamer past the cache": _options("runai_streamer", _PAST_THE_CACHE),
    "runai_streamer distributed": _options("runai_streamer", _TOGETHER, distributed=True),
    "runai_streamer distributed, past the cache": _options(
        "runai_streamer", {**_TOGETHER, **_PAST_THE_CACHE}, distributed=True
    ),
}

#: How a ceiling is measured, and in which state of the page cache.
CEILINGS = {
    "ceiling: direct": ("direct", {"engine": "uring", "depth": 4}, "cold"),
    "ceiling: copy": ("copy", {"threads": len(os.sched_getaffinity(0)), "block": 2 << 20}, "warm"),
}


@dataclasses.dataclass(frozen=True)
class State:
    """The page cache and the disk before a load."""

    cache: str
    """"cold" or "warm"."""
    limited: bool

    @property
    def name(self) -> str:
        return self.cache if self.limited else f"{self.cache}, no limit"


class LoadFailed(Exception):
    """A rank did not load; the message says why."""


#: What a load took, or what a ceiling is.
Turn = dict[str, Any]


class Bench:
    """Loads of one checkpoint."""

    def __init__(self, context: Any, folder: Path, ranks: int, group: Path | None, reload: bool = False) -> None:
        self.folder = folder
        self.files = sorted(folder.glob("*.safetensors"))
        self._nbytes = sum(file.stat().st_size for file in self.files)
        self._context = context
        self._ranks = ranks
        self._group = group
        self._reload = reload
        self._right: list[dict[str, str]] | None = None
        """Digests of each rank's parameters. Those of the first load are right."""
        self._right_again: list[dict[str, str]] | None = None
        """Those of the first reload."""
        self.shared_memory: set[str] = set()
        """What ranks had of it."""

    def load(self, contestant: Contestant, state: State, first: bool = False) -> Turn:
        """What one load took, for all ranks together; ``wrong``: parameters that are not those of the first load.

        Args:
            contestant: How to load.
            state: Of the page cache and the disk.
            first: Into poisoned parameters, with ``peak``: the most memory that it had besides them.

        Raises:
            LoadFailed: a rank did not load.
        """
        from engine_rank import Order, main

        with contextlib.ExitStack() as stack:
            # That of ranks that were killed, or failed, too
            stack.callback(lambda: [Path(name).unlink(missing_ok=True) for name in self.shared_memory])
            meeting = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "meeting"
            processes, pipes = [], []
            stack.callback(lambda: [process.join() for process in processes])
            stack.callback(lambda: [process.kill() for process in processes])
            for rank in range(self._ranks):
                mine, theirs = self._context.Pipe()
                order = Order(
                    self.folder,
                    rank,
                    self._ranks,
                    meeting,
                    contestant.load_format,
                    contestant.arguments,
                    contestant.on_cpu,
                    first,
                    contestant.environment,
                )
                process = self._context.Process(target=main, args=(order, theirs))
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(mine)
            self.shared_memory.update(name for rank in self._heard(pipes) for name in rank["shared"])
            self._prepare(state)
            probes = [lambda pid=process.pid: memory_of(pid) for process in processes] if first else []
            with Sampled(probes) if first else contextlib.nullcontext() as sampled:
                for pipe in pipes:
                    pipe.send(self._group if state.limited else None)
                ranks = self._heard(pipes)
            digests = self._told(pipes, "digests")
            again, reload = self._again(pipes, state, first) if self._reload else ([], {})
            for pipe in pipes:
                pipe.send("end")
            for process in processes:
                process.join(PATIENCE)
        self._right = self._right or digests
        self._right_again = self._right_again or again
        return {
            "seconds": max(rank["seconds"] for rank in ranks),
            "own": [rank["own"] for rank in ranks],
            "cpu": sum(rank["cpu"] for rank in ranks),
            "disk": sum(rank["disk"] for rank in ranks),
            "reports": [report for rank in ranks for report in rank["reports"]],
            "parameters": sum(rank["parameters"] for rank in ranks),
            "wrong": _different(self._right, digests) + _different(self._right_again if again else [], again),
            **reload,
            **({"peak": sampled.peaks["memory"]} if sampled is not None else {}),
        }

    def _again(self, pipes: list[Connection], state: State, first: bool) -> tuple[list[dict[str, str]], Turn]:
        """Reloads. The first time into poisoned parameters: gives the digests too."""
        self._told(pipes, "process")
        if first:
            self._told(pipes, "poison")
        self._prepare(state)
        try:
            ranks = self._told(pipes, "reload")
        except LoadFailed as error:
            raise LoadFailed(f"reload: {error}") from None
        found = {"reload": max(rank["seconds"] for rank in ranks), "reload_cpu": sum(rank["cpu"] for rank in ranks)}
        return self._told(pipes, "digests") if first else [], found

    def _told(self, pipes: list[Connection], what: str) -> list[Any]:
        """What all ranks say to that."""
        for pipe in pipes:
            pipe.send(what)
        return self._heard(pipes)

    def _heard(self, pipes: list[Connection]) -> list[Any]:
        """The next thing that each rank says. The first error ends the waiting: other ranks may wait for that one."""
        said: dict[int, Any] = {}
        while len(said) < len(pipes):
            ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in said], PATIENCE)
            if not ready:
                raise LoadFailed(f"no answer within {PATIENCE} s")
            for rank, pipe in enumerate(pipes):
                if pipe in ready:
                    try:
                        said[rank] = pipe.recv()
                    except EOFError:
                        raise LoadFailed(f"rank {rank} ended without a word") from None
                    if "error" in said[rank]:
                        raise LoadFailed(said[rank]["error"])
        return [said[rank] for rank in range(len(pipes))]

    def _prepare(self, state: State) -> None:
        """Brings the page cache into its state. Then as much memory as a load needs is used and given back."""
        evict(self.files)
        for _attempt in range(3 if state.cache == "warm" else 0):
            fill(self.files)
            if is_full(self.files):
                break
        else:
            if state.cache == "warm":
                raise LoadFailed("the page cache does not hold all files: there is too little memory")
        predecessor.run(predecessor.FREED, [], 2 * self._nbytes)

    def ceiling(self, name: str, state: State) -> Turn:
        """One measurement, in the control group if the state is limited."""
        measure, settings, _ = CEILINGS[name]
        self._prepare(state)
        mine, theirs = self._context.Pipe()
        group = self._group if state.limited else None
        process = self._context.Process(target=_measured, args=(theirs, group, measure, settings, self.files))
        process.start()
        theirs.close()
        (found,) = self._heard([mine])
        process.join()
        return found


def _different(right: list[dict[str, str]] | None, found: list[dict[str, str]]) -> int:
    """How many parameters of all ranks are not right."""
    pairs = zip(right or [], found, strict=True) if found else ()
    return sum(one[name] != other.get(name) for one, other in pairs for name in one)


def _measured(pipe: Connection, group: Path | None, *order: Any) -> None:
    if group is not None:
        group.write_text(str(os.getpid()))
    try:
        pipe.send(_ceiling.measure(*order))
    except RuntimeError as error:
        pipe.send({"error": str(error)})


def checked(bench: Bench, names: list[str]) -> dict[str, Turn]:
    """The first load of each contestant, untimed; ``error`` if it fails.

    Raises:
        LoadFailed: Penstock's loader failed, or the one whose parameters are right: nothing could be compared.
    """
    found: dict[str, Turn] = {}
    for name in [RIGHT, *(name for name in names if name != RIGHT)]:
        try:
            found[name] = bench.load(CONTESTANTS[name], State("warm", False), first=True)
        except LoadFailed as error:
            if name in (OURS, RIGHT):
                raise LoadFailed(f"{name}: {error}") from error
            found[name] = {"error": str(error)}
    return found


Turns = dict[str, dict[str, list[Turn]]]


def measured(bench: Bench, names: list[str], states: list[State], rounds: int) -> Iterator[Turns]:
    """All rounds; after each, what was found so far: by state and contestant."""
    found: Turns = {state.name: {} for state in states}
    for number in range(rounds):
        for state in states:
            for name in rotated([*names, *CEILINGS], number):
                if name in CEILINGS and CEILINGS[name][2] == state.cache:
                    turn = bench.ceiling(name, state)
                elif name not in CEILINGS:
                    turn = bench.load(CONTESTANTS[name], state)
                else:
                    continue
                found[state.name].setdefault(name, []).append(turn)
                print(f"round {number + 1}, {state.name}, {name}: {turn['seconds']:.2f} s", file=sys.stderr, flush=True)
        yield found


def wrong(of: dict[str, Any]) -> dict[str, str]:
    """Contestants that have not always loaded the same parameters as vLLM's `safetensors`, and how often."""
    found = {}
    for name in CONTESTANTS:
        loads = [one for turns in of["turns"].values() for one in turns.get(name, [])]
        loads += [one for one in [of["checks"].get(name, {})] if "wrong" in one]
        if bad := [one["wrong"] for one in loads if one["wrong"]]:
            found[name] = f"{len(bad)} of {len(loads)} loads, up to {max(bad)} parameters"
    return found


def show(document: dict[str, Any]) -> None:
    """A document of `--json` as Markdown."""
    about = document["machine"]
    print(
        f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, {about['file_system']}, {document['time']}"
    )
    rate = document["rate"]
    held = f"held to {rate / 1e6:.0f} MB/s" if rate else "not held to a rate"
    print(f"vLLM {about['versions']['vllm']}, {document['ranks']} ranks, {document['rounds']} rounds, the disk {held}")
    for name, of in document["checkpoints"].items():
        print(f"\n{name}: {of['cut']}; {of['nbytes'] / 1e9:.2f} GB in {of['tensors']} tensors, {of['files']} files")
        for contestant, check in of["checks"].items():
            if "error" in check:
                print(f"- {contestant} does not run: {check['error']}")
        for contestant, often in wrong(of).items():
            print(f"- **{contestant} has loaded other parameters than {RIGHT}**: {often}")
        for state, turns in of["turns"].items():
            print(
                f"\n| {name}, {state} | seconds | beside Penstock | processor s | disk GB | memory GB |"
                + (" reload s | beside Penstock |\n|" + "---|" * 8 if document.get("reload") else "\n|" + "---|" * 6)
            )
            for contestant, loads in turns.items():
                row = cells(contestant, loads, turns.get(OURS, []), of["checks"])
                row += reload_cells(contestant, loads, turns.get(OURS, [])) if document.get("reload") else []
                print(f"| {' | '.join(row)} |")


def cells(name: str, loads: list[Turn], ours: list[Turn], checks: dict[str, Turn]) -> list[str]:
    """One row of a table."""
    told = [name, *_times(name, loads, ours, "seconds")]
    if name in CEILINGS:
        return [*told, "", "", ""]
    told.append(f"{statistics.median(load['cpu'] for load in loads):.2f}")
    told.append(f"{statistics.median(load['disk'] for load in loads) / 1e9:.2f}")
    return [*told, f"{checks[name]['peak'] / 1e9:.2f}"]


def reload_cells(name: str, loads: list[Turn], ours: list[Turn]) -> list[str]:
    """The columns of reloads."""
    return ["", ""] if name in CEILINGS else _times(name, loads, ours, "reload")


def _times(name: str, loads: list[Turn], ours: list[Turn], key: str) -> list[str]:
    """Seconds, and their ratio to Penstock's in the same round."""
    seconds = [load[key] for load in loads]
    told = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
    ratios = [load[key] / own[key] for load, own in zip(loads, ours, strict=False)]
    if name == OURS or not ratios:
        return [told, ""]
    low, high = interval(ratios)
    return [told, f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"]


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """What ends the whole run, in one line."""
    try:
        yield
    except (LoadFailed, slow_disk.NotHere, predecessor.PredecessorFailed) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="for the checkpoints, on the disk to read from")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="print a file of --json, and measure nothing")
    parser.add_argument("--checkpoint", action="append", choices=[*engine_checkpoints.SOURCES])
    parser.add_argument("--size", type=float, default=1.5e9, help="bytes of a checkpoint, about (%(default)g)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rate", type=float, default=500e6, help="bytes a second; 0: no limit, and no rights needed")
    parser.add_argument(
        "--contestant", action="append", choices=[*CONTESTANTS], help="besides penstock and safetensors"
    )
    parser.add_argument("--extras", action="store_true", help="with options of Penstock's and of its peers")
    parser.add_argument("--state", action="append", help='"cold", "warm", "cold, no limit" or "warm, no limit"')
    parser.add_argument("--reload", action="store_true", help="time a reload after each load")
    quick = "0.4 GB, two rounds, only penstock and safetensors, warm, with reloads: 3 to 5 minutes"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.quick:
        parser.set_defaults(size=4e8, rounds=2, rate=0, reload=True)
        given = parser.parse_args()
        given.contestant, given.state = given.contestant or [OURS], given.state or ["warm, no limit"]
    if given.tables:
        show(json.loads(given.tables.read_text()))
        return
    if given.folder is None:
        parser.error("give a folder")
    possible = [
        State(cache, limited) for limited in (True, False) if given.rate or not limited for cache in ("cold", "warm")
    ]
    # Without a limit a warm load is the same, except of what reads past the page cache
    wanted = given.state or [
        state.name for state in possible if state.limited or state.cache == "cold" or not given.rate
    ]
    states = [state for state in possible if state.name in wanted]
    if len(states) != len(wanted):
        parser.error(f"states are: {'; '.join(state.name for state in possible)}")
    names = [
        name
        for name, one in CONTESTANTS.items()
        if name in (OURS, RIGHT) or (name in given.contestant if given.contestant else given.extras or not one.extra)
    ]
    given.folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(ENVIRONMENT, PYTHONPATH=os.pathsep.join([*SHARED, *filter(None, sys.path)]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine_rank"])
    now = datetime.datetime.now(datetime.timezone.utc)
    document: dict[str, Any] = {
        "time": now.isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "machine": machine([given.folder], None),
        "rate": given.rate,
        "ranks": given.ranks,
        "rounds": given.rounds,
        "reload": given.reload,
        "shared_memory": [],
        "checkpoints": {},
    }
    document["machine"]["versions"]["vllm"] = version("vllm")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_said())
        group = stack.enter_context(slow_disk.group(given.folder, int(given.rate))) if given.rate else None
        for name in given.checkpoint or engine_checkpoints.SOURCES:
            layout, _ = engine_checkpoints.build(name, given.size)
            folder = engine_checkpoints.write(name, given.size, given.folder)
            bench = Bench(context, folder, given.ranks, group, given.reload)
            evict(bench.files)  # on the disk, if they were written just now
            checks = checked(bench, names)
            document["checkpoints"][name] = of = {
                "cut": f"{layout.name}, {layout.cut}",
                "nbytes": layout.nbytes,
                "tensors": len(layout.tensors),
                "files": len(layout.shards),
                "checks": checks,
            }
            for turns in measured(bench, [one for one in names if "error" not in checks[one]], states, given.rounds):
                of["turns"] = turns
                document["shared_memory"] = sorted({*document["shared_memory"], *bench.shared_memory})
                document["load_average_at_end"] = list(os.getloadavg())
                if given.json:
                    given.json.write_text(json.dumps(document, indent=1) + "\n")
    show(document)
    if failed := [name for name, of in document["checkpoints"].items() if any(OURS in one for one in wrong(of))]:
        raise SystemExit(f"penstock has loaded other parameters than {RIGHT}: {', '.join(failed)}")


if __name__ == "__main__":
    main()
