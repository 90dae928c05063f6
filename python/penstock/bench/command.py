"""`penstock bench`: its arguments, and a run from them.

Only what the arguments need is imported here: `penstock --help` must not wait for numpy.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._errors import InvalidError
from .presets import PRESETS, QUICK_BYTES, QUICK_MODELS, QUICK_SECONDS, SUMMARY, room
from .scenarios import CORE, SCENARIOS
from .scenarios import chosen as chosen_scenarios

if TYPE_CHECKING:
    from .checkpoints import Kind

SCHEMA = 3
#: Penstock as it comes, in a quick run of a published table.
PLAIN = ("penstock", "penstock copy", "penstock url", "penstock url, disk cache", "penstock save")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    quick = "0.1 GB, one round: shows that everything works, ranks no loader; a published table in at most 5 minutes"
    add("--quick", action="store_true", help=quick)
    tables = f"{SUMMARY.name}: cold and warm loads in minutes; or repeat a published comparison: {', '.join(PRESETS)}"
    add("--preset", choices=[SUMMARY.name, *PRESETS], metavar="NAME", help=tables)
    rounds = f"processes for each contestant and scenario (default: 3; {SUMMARY.name}: 4; --quick: 1)"
    add("--rounds", type=int, metavar="N", help=rounds)
    scenarios = f"run only this one: {', '.join(SCENARIOS)}; may be repeated; cold means cold-freed too"
    add("--scenario", action="append", choices=SCENARIOS, metavar="NAME", help=scenarios)
    named = "minilm, gpt2, dense, moe, huge, many, or a model of `penstock synth`"
    add("--checkpoint", action="append", metavar="NAME", help=f"load only this one: {named}; may be repeated")
    add("--contestant", action="append", metavar="NAME", help="run only this loader; may be repeated")
    add("--device", default="cpu", help='where to load to: "cpu" (default), "cuda:0", ...')
    add("--no-routes", dest="routes", action="store_false", help="leave out the loaders with a forced way of reading")
    help = "leave out what the machine allows, which takes half of the time"
    add("--no-ceilings", dest="ceilings", action="store_false", help=help)
    add("--no-traces", dest="traces", action="store_false", help="leave out the extra loads that make timelines")
    add(
        "--size",
        type=float,
        metavar="BYTES",
        help="the most bytes of a checkpoint that can be made smaller (default: what the disk allows)",
    )
    add("--loads", type=int, default=0, metavar="N", help="loads in one process, to measure latencies (default: 50)")
    tools = "folder of netbench and netbench-go, for the scenarios bucket (default: PATH); `make netbench` builds them"
    tools += ", and `make versitygw` the server of bucket-upload, which may be on the PATH too"
    add("--tools", type=Path, metavar="FOLDER", help=tools)
    link = "the link model of the scenarios bucket, such as rate-per-connection=8e6 or first-byte=50; may be repeated"
    add("--link", action="append", default=[], metavar="OPTION=VALUE", help=link)
    where = "where checkpoints are written (default: .bench/checkpoints); repeat it to spread the shards over drives"
    add("--folder", type=Path, action="append", help=where)
    add("--json", type=Path, metavar="FILE", help="write the results to FILE (default: .bench/results.json)")
    add("--html", type=Path, metavar="FILE", help="also write the results as an HTML page")
    only = "run nothing: print a file of results as Markdown tables (with --html as a page too)"
    add("--tables", type=Path, metavar="RESULTS", help=only)


def kinds(arguments: argparse.Namespace, folders: list[Path]) -> dict[str, Kind]:
    """The checkpoints of a run, by name."""
    from ..synthetic import layouts
    from .checkpoints import FULL, QUICK, Kind, fitted, small

    def model(name: str, allowed: float, scenarios: tuple[str, ...]) -> Kind:
        return Kind(lambda: fitted(name, allowed), scenarios, routes=True)

    chosen = arguments.checkpoint
    if arguments.preset == SUMMARY.name:
        # Quick, its models that are small here too
        of = {name: QUICK[name] for name in SUMMARY.models if name in QUICK} if arguments.quick else FULL
        known = {
            name: dataclasses.replace(of[name], scenarios=SUMMARY.scenarios) for name in SUMMARY.models if name in of
        }
    elif arguments.preset and arguments.quick:
        preset, nbytes = PRESETS[arguments.preset], arguments.size or QUICK_BYTES
        quick = preset.quick()
        known = {
            name: Kind(partial(small, name, nbytes), quick.get(name, preset.scenarios), routes=True)
            for name in preset.models
        }
        chosen = chosen or list(quick)
    elif arguments.preset:
        preset = PRESETS[arguments.preset]
        allowed = arguments.size or room(folders, len(preset.models), "tmpfs" in preset.scenarios)
        known = {name: model(name, allowed, preset.scenarios) for name in preset.models}
    else:
        known = dict(QUICK if arguments.quick else FULL)
        allowed = arguments.size or room(folders, 1, False)
        asked = set(arguments.checkpoint or ()) - set(known)
        known |= {name: model(name, allowed, CORE) for name in asked & set(layouts.MODELS)}
    chosen = chosen or list(known)
    unknown = set(chosen) - set(known)
    if unknown:
        raise InvalidError(
            f"no such checkpoint: {', '.join(sorted(unknown))} (there are {', '.join(known)}, and the models of "
            f"`penstock synth`: {', '.join(layouts.MODELS)})"
        )
    return {name: known[name] for name in chosen}


def link_of(given: list[str]) -> dict[str, str]:
    """Options of the link model, by name."""
    for one in given:
        if "=" not in one:
            raise InvalidError(f"--link {one}: not of the form OPTION=VALUE")
    return {name: value for name, _, value in (one.partition("=") for one in given)}


def run(arguments: argparse.Namespace) -> bool:
    """Runs the benchmark; whether all was well: every byte verified, and no load by penstock failed."""
    from . import bounds, starts, tables
    from .contestants import CONTESTANTS
    from .forkserver import Forkserver
    from .machine import machine
    from .results import summarise
    from .rounds import Bench, Settings, physical

    if arguments.tables:
        kept = json.loads(arguments.tables.read_text())
        tables.print_tables(kept)
        if arguments.html:
            from .page import write_page

            write_page(kept, arguments.html)
        return True

    if not re.fullmatch(r"cpu|cuda(:\d+)?", arguments.device):
        raise InvalidError(f'no such device: {arguments.device} (there are "cpu", "cuda", "cuda:1" and so on)')
    known = [one.name for one in CONTESTANTS]
    for name in arguments.contestant or ():
        if name not in known:
            raise InvalidError(f"no such contestant: {name} (there are {', '.join(known)})")
    summary = arguments.preset == SUMMARY.name
    preset = SUMMARY if summary else PRESETS[arguments.preset] if arguments.preset else None
    short = arguments.quick and preset is not None
    if short and len(arguments.checkpoint or ()) > QUICK_MODELS:
        raise InvalidError(f"--quick with --preset: at most {QUICK_MODELS} of --checkpoint")
    # Of a published table: what its rows stand beside, and penstock
    redone, beside = short and not summary, set()
    if preset is not None and redone and not (arguments.contestant or arguments.scenario):
        beside = preset.beside()
    part = arguments.preset if preset is not None and not summary else "quick" if arguments.quick else "full"
    part += "-quick" if redone else ""
    folders = [folder / part for folder in arguments.folder or [Path(".bench/checkpoints")]]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        rounds=arguments.rounds or (1 if arguments.quick else 4 if summary else 3),
        folders=folders,
        device=arguments.device,
        routes=arguments.routes,
        quick=arguments.quick,
        traces=arguments.traces and not summary and not short,
        ceilings=arguments.ceilings and not summary and not short,
        seconds=QUICK_SECONDS if short else None,
        preset=arguments.preset,
        contestants=tuple(
            arguments.contestant
            or (beside and (*PLAIN, *(name for _, _, name in beside)))
            or (preset.contestants if preset else ())
        ),
        beside=frozenset(beside),
        loads=arguments.loads or (5 if arguments.quick else 0),
        tools=arguments.tools,
        link=link_of(arguments.link),
    )
    chosen = kinds(arguments, folders)
    # In the processes that load, safetensors is to be itself
    os.environ.pop("PENSTOCK_PATCH", None)
    about = machine(folders, physical(settings.gpu) if settings.on_gpu else None)
    begun = datetime.datetime.now(datetime.timezone.utc)
    server = Forkserver()
    bench = Bench(settings, server)

    def result() -> dict[str, Any]:
        rows = summarise(bench.runs, bench.calibration, settings.on_gpu)
        ended = datetime.datetime.now(datetime.timezone.utc)
        return {
            "schema": SCHEMA,
            "time": begun.isoformat(timespec="seconds"),
            "seconds": round((ended - begun).total_seconds()),
            "command": shlex.join(["penstock", *sys.argv[1:]]),
            "preset": arguments.preset,
            "quick": arguments.quick,
            "machine": about,
            "load_average_at_end": list(os.getloadavg()),
            "absent": bench.absent,
            "checkpoints": bench.checkpoints,
            "calibration": bench.calibration,
            "rows": rows,
            "bounds": bounds.bounds(rows, judged=not arguments.quick),
            "states": starts.states(bench.runs),
            "runs": bench.runs,
            "traces": bench.traces,
        }

    place = arguments.json or Path(".bench/results.json")
    place.parent.mkdir(parents=True, exist_ok=True)
    # Each scenario adds to the file: what an hour has found is not lost with the rest of it.
    partial = place.with_name(place.name + ".partial")
    scenarios = {
        # Of a quick run of a published table one state of memory will do
        name: kind.scenarios
        if redone and not arguments.scenario
        else chosen_scenarios(arguments.scenario or kind.scenarios)
        for name, kind in chosen.items()
    }
    loads = sum(bench.planned(name, scenarios[name], kind.routes) for name, kind in chosen.items())
    most = f", none begins after {QUICK_SECONDS} s" if short else ""
    print(f"{loads} loads of {', '.join(chosen)}{most}", file=sys.stderr, flush=True)
    with server:
        for name, kind in chosen.items():
            for _scenario in bench.checkpoint(name, kind.layout(), scenarios[name], kind.routes):
                partial.write_text(json.dumps(result(), indent=1) + "\n")
                partial.replace(place)

    found = result()
    place.write_text(json.dumps(found, indent=1) + "\n")
    tables.print_results(found)
    print(f"\nevery load: {place}")
    if arguments.html:
        from .page import write_page

        write_page(found, arguments.html)
        print(f"in pictures: {arguments.html}")
    return not any(
        row.get("verified") is False or ("error" in row and row["kind"] == "penstock") for row in found["rows"]
    )
