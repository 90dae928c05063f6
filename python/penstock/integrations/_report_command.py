"""``penstock engines report``: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .._report import size_text, time_text
from .._terminal import styled, table
from ._startup import DEVICES, ENGINES, TIMEOUT


def add_arguments(engines: argparse.ArgumentParser) -> None:
    """Adds the commands below ``penstock engines``."""
    commands = engines.add_subparsers(dest="engines", required=True, metavar="COMMAND")
    help = "start an engine once, and report how long each phase of the start took"
    made = commands.add_parser("report", help=help, description=help[0].upper() + help[1:] + ".")
    made.add_argument("model", metavar="MODEL", help="a folder or the name of a repository, as the engine takes it")
    made.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    made.add_argument("--engine", choices=ENGINES, default="vllm", help="the engine to start (default: vllm)")
    made.add_argument("--tensor-parallel-size", type=_count, default=1, metavar="N", help="the number of ranks")
    help = "how the engine loads the weights: penstock (default), or another format that it knows, to compare"
    made.add_argument("--load-format", default="penstock", metavar="FORMAT", help=help)
    help = "as for the engine itself: options of the load format"
    made.add_argument("--model-loader-extra-config", type=_object, default={}, metavar="JSON", help=help)
    help = 'more arguments of the engine, such as {"max_model_len": 4096}'
    made.add_argument("--engine-args", type=_object, default={}, metavar="JSON", help=help)
    help = "where to start it (default: a GPU if there is one)"
    made.add_argument("--device", choices=DEVICES, help=help)
    help = f"fail if the start takes longer (default: {TIMEOUT:g})"
    made.add_argument("--timeout", type=_seconds, default=TIMEOUT, metavar="SECONDS", help=help)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks")
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return found


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not an object of JSON")
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Starts the engine; see `penstock.integrations._start_report.report`."""
    from ._start_report import report

    return report(
        args.model,
        engine=args.engine,
        tensor_parallel_size=args.tensor_parallel_size,
        load_format=args.load_format,
        extra_config=args.model_loader_extra_config,
        engine_args=args.engine_args,
        device=args.device,
        timeout=args.timeout,
    )


def described(found: dict[str, Any]) -> str:
    """A report as text."""
    ranks = found["ranks"]
    many = f"{len(ranks)} ranks" if len(ranks) > 1 else "1 rank"
    head = f"{found['engine']} {found['engine_version']}, load format {found['load_format']}, {many}, {found['device']}"
    rows = []
    for name, phase in found["phases"].items():
        seconds, slowest = phase["seconds"], phase["rank"]
        which = f"rank {slowest}" if seconds is not None and len(ranks) > 1 else ""
        said = "-" if seconds is None else time_text(seconds)
        rows.append([name.replace("_", " "), said, phase["reason"] or which])
    return "\n\n".join([styled(head, "bold"), table(rows, right=(1,), narrow=2), *_loads(ranks), *_serving(found)])


def _loads(ranks: list[dict[str, Any]]) -> list[str]:
    lines = []
    for rank in ranks:
        load = rank["load"]
        if load is not None:
            cached = load["disk_cache_bytes"]
            lines.append(
                f"rank {rank['rank']}: wanted {size_text(load['wanted_bytes'])}, read {size_text(load['read_bytes'])}, "
                + ("" if cached is None else f"{size_text(cached)} from the disk cache, ")
                + f"{load['loads']} load{'s' * (load['loads'] != 1)}, {load['copies']} copies"
            )
            lines += [
                f"  {count} x {operation} needed bytes at once" for operation, count in load["materialised"].items()
            ]
            lines += [f"  fell back to {one['to']}: {one['reason']}" for one in load["fallbacks"]]
    return ["\n".join(lines)] if lines else []


def _serving(found: dict[str, Any]) -> list[str]:
    if "first_token" not in found:
        return []
    answer = found["first_token"]
    lines = [] if answer["seconds"] is None else [f"first token after {time_text(answer['seconds'])}"]
    lines += [
        f"rank {number}: {size_text(memory['free_bytes'])} of {size_text(memory['total_bytes'])} free"
        for number, memory in enumerate(found["device_memory"])
    ]
    return ["\n".join(lines)]
