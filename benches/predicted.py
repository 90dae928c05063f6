"""Ranks that load together, planned and measured: `python benches/predicted.py FOLDER [--rate BYTES] [--ranks N ...]`.

FOLDER is on the disk to read from. As in benches/ranks.py, 2, 4 and 8 processes load a checkpoint with names and shapes
of Llama-3-8B past the page cache, all of it each (`dp`) or each its part (`tp`), from a disk that a control group holds
to a rate for all of them (as root). Beside what they took stands what `Checkpoint.plan` says they take at least at that
rate, and beside the bytes that the disk gave and the ranks sent, those of the plan. With `--bound 0.2` the command
fails where a median is further from the plan. A plan knows no storage, so it reads gaps of 16 KiB at most; here loads
do, too. By default they read longer ones where they find that a read takes long.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import penstock
import ranks as measured
import slow_disk  # benches/ranks.py has put its folder on the path
from penstock.bench.machine import machine
from penstock.cli import main as penstock_command

WAYS = {"alone": "as planned: alone", "together": "together"}
measured.WAYS[WAYS["alone"]] = {"options": {"copy": True, "cache": "bypass", "gap": "16KiB"}}


def planned(checkpoint: Any, wants: str, rate: float) -> dict[str, Any]:
    """What the plan says of as many ranks as `measured` has."""
    whole = (slice(None),)
    lists: list[Any] = [None] * measured.RANKS
    if wants == "tp":
        infos = checkpoint.values()
        for rank in range(measured.RANKS):
            part = measured.parts_of(rank)
            lists[rank] = {info.name: part(info) or (whole if info.shape else None) for info in infos}
    plan = checkpoint.plan(lists)
    times = plan.seconds(storage_rate=rate)
    return {
        way: {
            "seconds": times[way]["seconds"],
            "disk": plan[f"{way}_bytes"],
            "sent": plan.sent_bytes if way == "together" else 0,
        }
        for way in WAYS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", default="1.6GB", help="of the checkpoint (1.6GB)")
    parser.add_argument("--rate", type=float, default=100e6, help="bytes per second of the disk (100e6)")
    parser.add_argument("--ranks", type=int, action="append", help="how many processes (2, 4 and 8)")
    parser.add_argument("--wants", action="append", choices=["dp", "tp"])
    parser.add_argument("--way", action="append", choices=list(WAYS), help="alone, together (both)")
    parser.add_argument("--bound", type=float, help="fail if a median is further from the plan than this share of it")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folder = given.folder / "llama"
    if not folder.exists():
        penstock_command(["synth", "llama-3-8b", str(folder), "--nbytes", given.size])
    files, checkpoint = sorted(folder.glob("*.safetensors")), penstock.open(folder)
    rows: list[dict[str, Any]] = []
    for count in given.ranks or [2, 4, 8]:
        measured.RANKS = count
        for wants in given.wants or ["dp", "tp"]:
            expected = planned(checkpoint, wants, given.rate)
            for way in given.way or list(WAYS):
                found = []
                for _ in range(given.rounds):
                    with slow_disk.group(folder, int(given.rate)) as group:
                        found.append(measured.load(folder, files, wants, WAYS[way], group))
                row: dict[str, Any] = {"ranks": count, "wants": wants, "way": way, "planned": expected[way]}
                row |= {key: statistics.median(one[key] for one in found) for key in ("seconds", "disk", "sent")}
                row["off"] = row["seconds"] / expected[way]["seconds"] - 1
                rows.append(row)
                print(f"{count} ranks, {wants}, {way}: {row['seconds']:.2f} s, planned {row['planned']['seconds']:.2f}")
    print(f"\n{checkpoint.nbytes / 1e9:.2f} GB at {given.rate / 1e6:.0f} MB/s; medians of {given.rounds}\n")
    print("| ranks | wants | way | planned s | s | off | planned disk GB | disk GB | planned sent GB | sent GB |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        plan = row["planned"]
        sizes = [plan["disk"], row["disk"], plan["sent"], row["sent"]]
        print(
            f"| {row['ranks']} | {row['wants']} | {row['way']} | {plan['seconds']:.2f} | {row['seconds']:.2f} | "
            f"{row['off']:+.0%} | {' | '.join(f'{size / 1e9:.3f}' for size in sizes)} |"
        )
    if given.json:
        found = {"machine": machine([given.folder], None), "nbytes": checkpoint.nbytes, "rate": given.rate}
        found |= {"command": sys.argv[1:], "rows": rows}
        given.json.write_text(json.dumps(found, indent=1, default=str) + "\n")
    if given.bound is not None and any(abs(row["off"]) > given.bound for row in rows):
        sys.exit(f"further than {given.bound:.0%} from the plan")


if __name__ == "__main__":
    main()
