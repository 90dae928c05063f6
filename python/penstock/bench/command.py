"""`penstock bench`: its arguments, and a run from them.

Only what the arguments need is imported here: `penstock --help` must not wait for numpy.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._errors import InvalidError
from .scenarios import SCENARIOS

if TYPE_CHECKING:
    from .synth import Layout

SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="0.1 GB, two rounds: shows that everything works, judges nothing"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="loads per contestant (9; quick: 2)")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="only this one; may be repeated")
    parser.add_argument(
        "--checkpoint",
        action="append",
        metavar="NAME",
        help="only this one: gpt2, dense, moe, many; may be repeated",
    )
    parser.add_argument("--no-routes", dest="routes", action="store_false", help="penstock's own choice of route only")
    parser.add_argument(
        "--folder", type=Path, default=Path(".bench/checkpoints"), help="where checkpoints lie (.bench/checkpoints)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results go (.bench/results.json)")
    parser.add_argument("--tables", type=Path, metavar="RESULTS", help="only print a result file as Markdown tables")


def layouts(quick: bool) -> dict[str, Callable[[], Layout]]:
    """The checkpoints of a run, by name."""
    from . import synth

    if quick:
        return {"dense": lambda: synth.llama(0.1e9), "moe": lambda: synth.qwen3_moe(0.1e9)}
    return {
        "gpt2": synth.gpt2,
        "dense": lambda: synth.llama(3e9),
        "moe": lambda: synth.qwen3_moe(3e9),
        "many": synth.many_tensors,
    }


def run(arguments: argparse.Namespace) -> bool:
    """Runs the benchmark; whether all was well: every byte verified, and no load by penstock failed."""
    from . import bounds, machine, tables
    from .results import summarise
    from .rounds import Bench, Settings

    if arguments.tables:
        tables.print_tables(json.loads(arguments.tables.read_text()))
        return True

    known = layouts(arguments.quick)
    chosen = arguments.checkpoint or list(known)
    unknown = set(chosen) - set(known)
    if unknown:
        raise InvalidError(f"no such checkpoint: {', '.join(sorted(unknown))} (there are {', '.join(known)})")

    rounds = arguments.rounds or (2 if arguments.quick else 9)
    folder = arguments.folder / ("quick" if arguments.quick else "full")
    scenarios = tuple(arguments.scenario or SCENARIOS)
    bench = Bench(Settings(rounds, scenarios, arguments.routes, arguments.quick, folder))
    folder.mkdir(parents=True, exist_ok=True)
    about = machine.machine(folder)
    for name in chosen:
        bench.checkpoint(name, known[name]())

    rows = summarise(bench.runs)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["penstock", *sys.argv[1:]]),
        "quick": arguments.quick,
        "machine": about,
        "load_average_at_end": os.getloadavg(),
        "absent": bench.absent,
        "calibration": bench.calibration,
        "rows": rows,
        "bounds": bounds.bounds(rows, judged=not arguments.quick),
        "runs": bench.runs,
    }
    place = arguments.json or Path(".bench/results.json")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(result, indent=1) + "\n")
    tables.print_results(result)
    print(f"\nevery load: {place}")
    return not any(row.get("verified") is False or ("error" in row and "penstock" in row["contestant"]) for row in rows)
