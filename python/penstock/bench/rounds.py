"""Rounds: every contestant and ceiling takes its turn on one checkpoint, in an order that rotates.

Every load runs in a fresh process; imports are not timed. After a load one byte of every page is read (timed apart,
with its page faults), then every byte is compared with the files. Seconds are those of the load, and where touching the
pages afterwards still read from the disk, of the touch as well. GB are 1e9 bytes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import reference, synth
from .ceilings import CALIBRATION, Ceilings
from .contestants import CONTESTANTS, Contestant
from .page_cache import evict, fill, free_memory, resident_bytes
from .process import load_once
from .results import Run


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
