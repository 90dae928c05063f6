"""Rounds: every contestant and ceiling takes its turn on one checkpoint, in an order that rotates.

Every load runs in a fresh process; imports are not timed. Right after a load one thread reads one byte of every page of
every tensor (timed apart, with its page faults); then every byte is compared with the files. Loads from the disk into
CPU memory are ranked by the time to the last byte touched: load and touch. All other loads are ranked by the load
alone; where the touch still read from the disk, the touch is added. GB are 1e9 bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from .. import _ceiling
from ..synthetic.synth import Layout
from . import ceilings, predecessor
from .bucket import BucketServer
from .checkpoints import NoRoom, Placed, in_memory, place
from .child import Order
from .contestants import CONTESTANTS, Contestant
from .forkserver import Forkserver
from .gpu_memory import GpuMemory
from .memory_limit import MemoryLimit, NoMemoryLimit
from .neighbour import Neighbour, NeighbourEnded
from .page_cache import evict, evict_all, evict_second_half, fill, free_memory, is_full, resident_bytes
from .process import LoadFailed, LoadProcess, Probe, Sampled, memory_of
from .results import ALONE, TOUCHED, Run, alone, beyond, left_on_disk, together
from .scenarios import COLD, SCENARIOS, Scenario, accepts
from .scenarios import ceilings as bounding
from .served import CLIENTS, NotServed, Served

#: Bytes of a trace that are kept: of hundreds of thousands of tensors it would be larger than all other results.
_LARGEST_TRACE = 8 << 20
#: Seconds after which memory that a process has freed is with the host again (Linux reports it after two).
GIVEN_BACK = 2.6


Turn = TypeVar("Turn")


class Absent(Exception):
    """A contestant or scenario that cannot be had here; the message says why."""


@dataclass(frozen=True)
class Settings:
    rounds: int
    folders: list[Path]
    device: str = "cpu"
    routes: bool = True
    quick: bool = False
    traces: bool = True
    #: Whether ceilings are measured beside the loaders.
    ceilings: bool = True
    preset: str | None = None
    #: Names of contestants; none: all of them.
    contestants: tuple[str, ...] = ()
    #: Loads of one process in the scenario `latency`; 0: as many as it says.
    loads: int = 0
    #: Where `netbench` and `netbench-go` are; without it they are looked for on the PATH.
    tools: Path | None = None
    #: Options of `netbench serve`: the link model of the scenarios `bucket`.
    link: dict[str, str] = field(default_factory=dict)
    #: Seconds after which no further load begins; None: all take place.
    seconds: float | None = None
    #: Checkpoint, scenario and contestant: rivals take part in no others; none: in all.
    beside: frozenset[tuple[str, str, str]] = frozenset()

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def gpu(self) -> int:
        """The GPU's number among those that this process sees."""
        return int(self.device.partition(":")[2] or 0)


@dataclass
class Bench:
    settings: Settings
    server: Forkserver
    runs: list[Run] = field(default_factory=list)
    calibration: list[dict[str, Any]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    checkpoints: dict[str, Any] = field(default_factory=dict)
    traces: list[dict[str, Any]] = field(default_factory=list)
    _gpu_memory: GpuMemory | None = None
    _routes: bool = True
    _made: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    #: The web server of a scenario that has one.
    _served: Served | None = None
    #: The bucket of a scenario that has one.
    _bucket: BucketServer | None = None
    _begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        kind = self.settings.device.partition(":")[0]
        for one in CONTESTANTS:
            if kind not in one.devices and not one.route and one.preset is None:
                self.absent[one.name] = f"does not load to {kind}"
        if self.settings.on_gpu:
            with contextlib.suppress(OSError):
                self._gpu_memory = GpuMemory(physical(self.settings.gpu))

    def checkpoint(
        self, name: str, layout: Layout, scenarios: Iterable[str], routes: bool = True
    ) -> Iterator[Scenario]:
        """Every scenario on one checkpoint, each given when it is over.

        Without `routes`, forced ones take part only where they were asked for by name.
        """
        self._routes = routes and self.settings.routes
        placed = place(name, layout, self.settings.folders)
        self.checkpoints[name] = placed.about()
        evict(placed.files)
        best: dict[str, _ceiling.Settings] = {}
        for scenario in (SCENARIOS[one] for one in scenarios):
            try:
                if scenario.tmpfs:
                    with in_memory(placed) as there:
                        self.scenario(scenario, there, best)
                elif scenario.takes:
                    with self.taking(placed):
                        self.scenario(scenario, placed, best)
                elif scenario.served:
                    with self.serving(scenario, placed):
                        self.scenario(scenario, placed, best)
                else:
                    self.scenario(scenario, placed, best)
            except (Absent, NeighbourEnded, NoMemoryLimit, NoRoom, NotServed) as error:
                self.absent[f"scenario {scenario.name}"] = str(error)
                print(f"{name}: no {scenario.name}: {error}", file=sys.stderr, flush=True)
            yield scenario

    @contextlib.contextmanager
    def serving(self, scenario: Scenario, placed: Placed) -> Iterator[None]:
        """A web server over the checkpoint, while the context is open."""
        if placed.folder is None:
            raise Absent("a web server serves one folder")
        settings = self.settings
        with Served(placed.folder, settings.tools, tls=scenario.served == "https", link=settings.link) as self._served:
            try:
                yield
            finally:
                self._served = None

    @contextlib.contextmanager
    def taking(self, placed: Placed) -> Iterator[None]:
        """A bucket on the disk of the checkpoint, while the context is open."""
        with BucketServer(placed.files[0].parent, self.settings.tools) as self._bucket:
            try:
                yield
            finally:
                self._bucket = None

    # What is compared

    def entrants(self, scenario: Scenario, checkpoint: str) -> list[Contestant]:
        """The contestants of a scenario: those that are installed, as far as is known."""
        settings, kind = self.settings, self.settings.device.partition(":")[0]
        return [
            one
            for one in CONTESTANTS
            if kind in one.devices
            and accepts(scenario, one.semantics, settings.on_gpu)
            and (not one.scenarios or scenario.name in one.scenarios)
            and (one.preset is None or one.preset == settings.preset)
            and (one.name in settings.contestants if settings.contestants else self._routes or not one.route)
            and (not one.rival or not settings.beside or (checkpoint, scenario.name, one.name) in settings.beside)
        ]

    def planned(self, name: str, scenarios: Iterable[str], routes: bool) -> int:
        """Loads of one checkpoint, ceilings and timelines not counted, of the loaders that are installed."""
        self._routes = routes and self.settings.routes
        return sum(
            self.settings.rounds * self.loads_of(scenario) * scenario.processes
            for scenario in (SCENARIOS[one] for one in scenarios)
            for one in self.entrants(scenario, name)
            if find_spec(one.module) is not None
        )

    def is_over(self) -> bool:
        """Whether the time for loads is over."""
        seconds = self.settings.seconds
        return seconds is not None and time.monotonic() - self._begun >= seconds

    def measures(self, scenario: Scenario, entrants: list[Contestant]) -> list[str]:
        """Ceilings that take their turn among the contestants. The raw read does not: it precedes each cold load."""
        if not self.settings.ceilings:
            return []
        on_gpu = self.settings.on_gpu
        if scenario.served and not scenario.from_disk:
            return [*CLIENTS, *(["host_to_device"] if on_gpu else [])]
        wanted = dict.fromkeys(
            stage for one in entrants for way in bounding(scenario, one.semantics, on_gpu) for stage in way
        )
        if scenario.name in COLD:
            wanted |= {"place": None} if not on_gpu else {"device_alloc": None}
        return [stage for stage in wanted if stage != "direct"]

    def best(self, placed: Placed, measure: str, best: dict[str, _ceiling.Settings]) -> _ceiling.Settings | None:
        """The fastest settings of a ceiling on these files; `None` where it cannot be measured."""
        if measure in best or f"ceiling: {measure}" in self.absent:
            return best.get(measure)
        tried: list[tuple[float, int, _ceiling.Settings]] = []
        for settings in ceilings.settings(measure, self.settings.quick):
            for _ in range(1 if self.settings.quick else 2):
                if measure not in _ceiling.GPU:
                    (evict if measure in ceilings.COLD else fill)(placed.files)
                try:
                    found = self.measured(placed, measure, settings)
                except RuntimeError as error:
                    self.absent.setdefault(f"ceiling: {measure}", str(error))
                    continue
                self.calibration.append({"checkpoint": placed.name} | found)
                tried.append((found["seconds"] / max(found["bytes"], 1), len(tried), settings))
        if not tried:
            return None
        self.absent.pop(f"ceiling: {measure}", None)  # some settings work
        best[measure] = min(tried)[2]
        return best[measure]

    def measured(self, placed: Placed, measure: str, settings: _ceiling.Settings) -> dict[str, Any]:
        nbytes = min(placed.nbytes, 8 << 30)
        return _ceiling.measure(measure, settings, placed.files, self.settings.gpu, nbytes)

    def scenario(self, scenario: Scenario, placed: Placed, best: dict[str, _ceiling.Settings]) -> None:
        """All rounds of one scenario on one checkpoint."""
        entrants = self.entrants(scenario, placed.name)
        for one in [one for one in entrants if placed.tensors > one.most_tensors]:
            entrants.remove(one)
            self.absent[f"{one.name}, {placed.name}"] = f"takes a minute and more for {placed.tensors:,} tensors"
        if not entrants:
            raise Absent("no loader to compare; on a GPU all memory is private, and `warm` compares all of it")
        if scenario.limited:
            with MemoryLimit(placed.nbytes):
                pass  # raises where there can be none
        measures = self.measures(scenario, entrants)
        for measure in ["direct", *measures] if scenario.from_disk and self.settings.ceilings else measures:
            if measure not in CLIENTS:
                self.best(placed, measure, best)
        main = [one for one in entrants if not one.route]
        if scenario.cache == "full" and not scenario.tmpfs:
            # In the folios that plain reads leave, not in those of the loader before.
            evict(placed.files)
            fill(placed.files)
        for number in range(self.settings.rounds):
            turns: list[Contestant | str] = [*entrants, *measures]
            for entrant in rotated(turns, number):
                label = f"ceiling: {entrant}" if isinstance(entrant, str) else entrant.name
                if label in self.absent:
                    continue
                if self.is_over():
                    self.absent.setdefault(f"{label}, {placed.name}, {scenario.name}", "no time was left")
                    continue
                about: Run = {"checkpoint": placed.name, "scenario": scenario.name, "contestant": label}
                try:
                    if isinstance(entrant, str):
                        runs = [self.ceiling(entrant, scenario, placed, best.get(entrant))]
                        about["kind"] = "ceiling"
                    else:
                        about |= {"kind": "rival" if entrant.rival else "penstock", "semantics": entrant.semantics}
                        runs = self.loads(entrant, scenario, placed, best.get("direct"))
                except Absent as error:
                    self.absent[label] = str(error)
                    continue
                for run in runs:
                    self.record(run | about | {"round": number})
        if self.settings.traces and not scenario.takes:
            self.trace(next((one for one in main if not one.rival), None), scenario, placed)

    # One turn

    def before(self, scenario: Scenario, files: list[Path], raw: _ceiling.Settings | None = None) -> Run:
        """Puts page cache and memory into the scenario's state; with settings for it, reads the cold files raw.

        Every contestant finds the same, whichever came before it. For loads from the disk a process sees to that, the
        predecessor. For loads from the page cache as much memory is taken and given back here as their tensors can
        want: a virtual machine may have given memory that was free for long back to its host, and then it is a third
        slower to fill.
        """
        size = sum(path.stat().st_size for path in files)
        found: Run = {}
        if scenario.from_disk and raw is not None:
            evict(files)
            found["raw_s"] = _ceiling.measure("direct", raw, files)["seconds"]
        if scenario.from_disk:
            if scenario.predecessor == predecessor.FREED:
                evict(files)
            found["predecessor"] = predecessor.run(scenario.predecessor, files, size)
        if scenario.cache == "empty":
            evict(files)
        elif scenario.cache == "kept":
            evict_all(files)
        elif scenario.cache == "half":
            fill(files)
            evict_second_half(files)
        if not scenario.from_disk:
            if scenario.served:
                # The kernel gives the host all free memory two seconds after somebody has freed some. Whoever loads
                # prepares its own memory after that, and has two seconds for the load
                time.sleep(GIVEN_BACK)
            else:
                free_memory(self.wanted_memory(size))
        if scenario.cache == "full" and not is_full(files):
            fill(files)  # last: taking memory may cost some of it
        resident = resident_bytes(files)
        if scenario.cache == "kept" and resident:
            raise LoadFailed(f"{resident} bytes of what was kept stay in the page cache")
        if scenario.cache == "half" and "raw_s" in found:
            found["raw_s"] *= 0.5 if resident is None else 1 - resident / size
        return found | {"resident_before": resident}

    def wanted_memory(self, size: int) -> int:
        """How much the tensors of a checkpoint of `size` bytes want here."""
        return min(size, 512 << 20) if self.settings.on_gpu else size

    def ceiling(self, measure: str, scenario: Scenario, placed: Placed, settings: _ceiling.Settings | None) -> Run:
        with neighbour(scenario, placed):
            found: Run = {}
            try:
                found = self.before(scenario, placed.files) if measure not in _ceiling.GPU else {}
                if settings is None:
                    return found | self.fetched(measure, placed)
                measured = self.measured(placed, measure, settings)
            except (RuntimeError, predecessor.PredecessorFailed) as error:
                return found | {"error": str(error)}
        run = {"load_s": measured["seconds"], "bytes": measured["bytes"], "ceiling": ceilings.text(settings)}
        return found | run

    def fetched(self, client: str, placed: Placed) -> Run:
        """The files by a client that makes no tensors."""
        assert self._served is not None
        before = self._served.counts()
        if client == "go":  # the bare loop does so itself
            free_memory(self.wanted_memory(sum(path.stat().st_size for path in placed.files)))
        try:
            measured = self._served.fetch(client, placed.files)
        except NotServed as error:
            raise Absent(str(error)) from None
        told = {"load_s": measured["seconds"], "cpu_s": measured["cpu_s"], "bytes": measured["bytes"]}
        return told | {"ceiling": f"16 connections, {client}"} | self.served_since(before)

    def served_since(self, before: dict[str, int]) -> Run:
        """The work of the web server since then."""
        if self._served is None:
            return {}
        now = self._served.counts()
        return {f"served_{name}": now[name] - before[name] for name in ("bytes", "requests", "connections", "stalled")}

    def process(self, contestant: Contestant, order: Order, placed: Placed) -> LoadProcess:
        there = self._served or self._bucket
        more = there.environment if there is not None else {}
        return LoadProcess(self.server, order, more | contestant.environment, placed.nbytes)

    def loads(
        self, contestant: Contestant, scenario: Scenario, placed: Placed, raw: _ceiling.Settings | None
    ) -> list[Run]:
        """The loads of one process, or of as many as the scenario has load at once."""
        runs: list[Run] = []
        found: Run = {}
        try:
            with contextlib.ExitStack() as stack:
                order, files, first = stack.enter_context(self.started(contestant, scenario, placed))
                limit = stack.enter_context(MemoryLimit(int(1.25 * placed.nbytes))) if scenario.limited else None
                processes = [
                    stack.enter_context(self.process(contestant, order, placed)) for _ in range(scenario.processes)
                ]
                for process in processes:
                    said = process.hear()
                    if "absent" in said:
                        raise Absent(said["absent"])
                    if limit is not None:
                        limit.hold(process.pid)
                probes: list[Probe] = [partial(memory_of, process.pid) for process in processes]
                if self._gpu_memory is not None:
                    probes.append(self._gpu_memory.in_use)
                for number in range(self.loads_of(scenario)):
                    with neighbour(scenario, placed):
                        found = first | self.before(scenario, files, raw) if number == 0 else {}
                        counted = self._served.counts() if self._served is not None else {}
                        with Sampled(probes) as sampled:
                            for process in processes:
                                process.say("load")
                            loaded = [process.hear() for process in processes]
                    found["cache_left"] = resident_bytes(files)
                    found |= self.served_since(counted)
                    if self._bucket is not None:
                        found["taken_bytes"] = sum(path.stat().st_size for path in self._bucket.files())
                    for process in processes:
                        process.say("verify")
                    verified = [process.hear() for process in processes]
                    run = found | together([one | more for one, more in zip(loaded, verified, strict=True)])
                    runs.append(run | beyond(sampled.peaks, run, placed.nbytes))
                for process in processes:
                    process.say("end")
            if scenario.cache == "left":
                runs[0]["warm_s"] = self.warm_start(contestant, order, placed, files)
        except (LoadFailed, predecessor.PredecessorFailed) as error:
            why = " (killed: the memory of its control group was used up)" if scenario.limited else ""
            return [*runs, found | {"error": str(error) + (why if str(error).endswith("-9") else "")}]
        finally:
            if self._bucket is not None:
                self._bucket.clear()
        return runs

    def loads_of(self, scenario: Scenario) -> int:
        """Loads of one process."""
        return self.settings.loads if scenario.name == "latency" and self.settings.loads else scenario.loads

    @contextlib.contextmanager
    def started(
        self, contestant: Contestant, scenario: Scenario, placed: Placed
    ) -> Iterator[tuple[Order, list[Path], Run]]:
        """The job of a load, its files, and the facts about its first start, if the scenario has one."""
        order = self.order(contestant, scenario, placed)
        files = [Path(path) for path in order.files]
        if scenario.cache == "left":
            yield order, files, self.first_start(contestant, order, placed, files)
        elif scenario.cache == "kept":
            with tempfile.TemporaryDirectory(prefix="penstock-kept-", dir=placed.folder) as folder:
                order = replace(order, kept=folder)
                first = self.first_start(contestant, order, placed, files, "bucket")
                yield order, self.kept_files(contestant, Path(folder), placed), first
        else:
            yield order, files, {}

    def first_start(
        self, contestant: Contestant, order: Order, placed: Placed, files: list[Path], state: str = "cold"
    ) -> Run:
        """A load whose tensors are used, by a process of its own: what it leaves in page cache or on disk counts.

        It begins as the loads of the scenario `state`. The process lives until the loader has ended what it does in the
        background. Gives what it tells of that.
        """
        prepared = self.wanted_memory(placed.nbytes) if SCENARIOS[state].served else 0
        counted = self._served.counts() if self._served is not None else {}
        with self.process(contestant, replace(order, prepared=prepared), placed) as process:
            said = process.hear()
            if "absent" in said:
                raise Absent(said["absent"])
            self.before(SCENARIOS[state], files)
            process.say("load")
            loaded = process.hear()
            process.say("settle")
            settled = {name: value for name, value in process.hear().items() if name.startswith(("fill_", "kept_"))}
            process.say("end")
        found: Run = {"first_s": loaded["load_s"] + loaded.get("touch_s", 0.0)} | settled
        return found | {f"first_{name}": count for name, count in self.served_since(counted).items()}

    def kept_files(self, contestant: Contestant, folder: Path, placed: Placed) -> list[Path]:
        """The weights that a first start has left on the disk.

        Raises:
            LoadFailed: they are not as many bytes as the checkpoint's.
        """
        files = contestant.kept(folder)
        there, wanted = (sum(path.stat().st_size for path in paths) for paths in (files, placed.files))
        if there != wanted:
            raise LoadFailed(f"the first start has kept {there} of {wanted} bytes")
        return files

    def warm_start(self, contestant: Contestant, order: Order, placed: Placed, files: list[Path]) -> float:
        """Seconds of a warm load by one more process, for the second start to stand beside."""
        with self.process(contestant, order, placed) as process:
            process.hear()
            self.before(SCENARIOS["warm"], files)
            process.say("load")
            warm = process.hear()
            process.say("end")
        return alone(warm)

    def order(self, contestant: Contestant, scenario: Scenario, placed: Placed) -> Order:
        compared = [str(path) for path in placed.files]
        return Order(
            contestant=contestant.name,
            device=self.settings.device,
            files=self.files_of(contestant, compared),
            folder=None if placed.folder is None else str(placed.folder),
            compared=compared,
            into=contestant.semantics in ("into", "served into"),
            urls=[] if self._served is None else self._served.urls(placed.files),
            tools=None if self.settings.tools is None else str(self.settings.tools),
            bucket=None if self._bucket is None else self._bucket.storage,
            objects=None if self._bucket is None else str(self._bucket.objects),
            dtype=scenario.dtype,
            prepared=self.wanted_memory(placed.nbytes) if scenario.served and not scenario.from_disk else 0,
        )

    def files_of(self, contestant: Contestant, paths: list[str]) -> list[str]:
        """The files of a contestant: the checkpoint, or files made from it by a process with the needed imports."""
        if contestant.files is None:
            return paths
        key = (str(contestant.files), "\n".join(paths))
        if key not in self._made:
            code = (
                "import json, sys; from pathlib import Path; from penstock.bench.contestants import named\n"
                "files = named(sys.argv[1]).files([Path(path) for path in sys.argv[2:]])\n"
                "print(json.dumps([str(path) for path in files]))"
            )
            command = [sys.executable, "-c", code, contestant.name, *paths]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise Absent((done.stderr.strip().splitlines() or ["its files cannot be made"])[-1])
            self._made[key] = json.loads(done.stdout)
        return self._made[key]

    def record(self, run: Run) -> None:
        if "load_s" in run and "error" not in run:
            touched = run["kind"] != "ceiling" and SCENARIOS[run["scenario"]].from_disk and "touch_s" in run
            if run["kind"] != "ceiling":
                run["ranked"] = TOUCHED if touched else ALONE
            run["seconds"] = run["load_s"] + run["touch_s"] if touched else alone(run)
            if touched or left_on_disk(run):
                run["cpu_s"] += run["touch_cpu_s"]
        self.runs.append(run)
        if run.get("load", 0) > 0:
            return
        told = f"{run['seconds']:.3f} s" if "seconds" in run else f"failed: {run.get('error')}"
        place = f"{run['checkpoint']:10} {run['scenario']:13}"
        print(f"{place} round {run['round'] + 1}  {run['contestant']:26} {told}", file=sys.stderr, flush=True)

    def trace(self, contestant: Contestant | None, scenario: Scenario, placed: Placed) -> None:
        """One more load by penstock, not timed, for its timeline; where this build can trace."""
        from penstock import _core

        if contestant is None or "trace" not in _core.Options.names():
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            order = Order(**(vars(self.order(contestant, scenario, placed)) | {"trace": str(file)}))
            try:
                with (
                    self.process(contestant, order, placed) as process,
                    neighbour(scenario, placed),
                ):
                    process.hear()
                    self.before(scenario, placed.files)
                    for what in ("load", "drop"):
                        process.say(what)
                        process.hear()
                    process.say("end")
            except (LoadFailed, predecessor.PredecessorFailed) as error:
                self.absent[f"trace of {placed.name}, {scenario.name}"] = str(error)
                return
            if not file.exists() or file.stat().st_size > _LARGEST_TRACE:
                why = f"larger than {_LARGEST_TRACE >> 20} MiB" if file.exists() else "none was written"
                self.absent[f"trace of {placed.name}, {scenario.name}"] = why
                return
            about = {"checkpoint": placed.name, "scenario": scenario.name, "contestant": contestant.name}
            self.traces.append(about | {"trace": json.loads(file.read_text())})


def rotated(turns: list[Turn], number: int) -> list[Turn]:
    """The order of a round: each begins one further on."""
    begin = number % len(turns)
    return turns[begin:] + turns[:begin]


def neighbour(scenario: Scenario, placed: Placed) -> contextlib.AbstractContextManager[Any]:
    """The scenario's neighbour, if it has one. It reads a file of the checkpoint past the page cache."""
    if scenario.neighbour is None:
        return contextlib.nullcontext()
    return Neighbour(scenario.neighbour, placed.files[0])


def physical(number: int) -> int:
    """The number that the machine gives to the GPU that this process sees as `number`."""
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return int(visible[number]) if number < len(visible) and visible[number].strip().isdigit() else number
