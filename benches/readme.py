"""Tables of README and docs/benchmarks.md from a result file: `python benches/readme.py RESULTS [--write FILE...]`.

RESULTS is what `penstock bench --preset summary --json RESULTS` writes. All figures are of first loads, to the last
byte touched: the load, then one byte of every page read by one thread. Each is the median, then the fastest and the
slowest.

- `short`: Penstock beside safetensors, cold ("memory in use before") and warm: seconds, and processor seconds per GB.
- `cold`: every loader on every checkpoint in both states of memory. Bold: another column is faster. The last column is
  Penstock's time divided by that of safetensors.

`--write` puts each table where a file has `<!-- figures: NAME -->` and `<!-- end -->`, in place of what stands there.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = dict[str, Any]

#: The columns of `cold`: the benchmark's name of a loader, and the heading.
LOADERS = {
    "penstock": "Penstock",
    "safetensors": "safetensors",
    "penstock copy": "Penstock, copy",
    "fastsafetensors": "fastsafetensors",
    "runai streamer": "Run:ai",
}

#: The rows of `short`: the benchmark's name of a checkpoint, and the heading.
CHECKPOINTS = {"gpt2": "GPT-2", "dense": "part of a Llama", "moe": "mixture of experts"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--write", type=Path, nargs="+", default=[], metavar="FILE", help="fill in the tables there")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    about = results["machine"]
    print(f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, {results['time']}: {results['command']}")
    for table in TABLES.values():
        print(f"\n{table(results['runs'])}")
    for file in arguments.write:
        file.write_text(filled(file.read_text(), results["runs"], str(file)))


def filled(text: str, runs: list[Run], file: str) -> str:
    """A document with its tables made anew.

    Raises:
        SystemExit: It has no place for a table; or loads are missing, or not all of them were verified.
    """
    text, places = re.subn(
        r"(<!-- figures: (\w+) -->\n).*?(\n<!-- end -->)",
        lambda place: place[1] + TABLES[place[2]](runs) + place[3],
        text,
        flags=re.DOTALL,
    )
    if not places:
        raise SystemExit(f"{file} has no <!-- figures: NAME -->: nothing was written")
    return text


def short(runs: list[Run]) -> str:
    rows = [("", "Penstock", "safetensors"), ("---",) * 3]
    for title, scenario, figure in (
        ("cold", "cold", time),
        ("cold, processor seconds per GB", "cold", processor),
        ("warm", "warm", time),
    ):
        for checkpoint, name in CHECKPOINTS.items():
            found = (figure(loads(runs, checkpoint, scenario, who)) for who in ("penstock", "safetensors"))
            rows.append((f"{name}: {title}", *found))
    return table(rows)


def cold(runs: list[Run]) -> str:
    rows: list[tuple[str, ...]] = [("", *LOADERS.values(), "Penstock / safetensors"), ("---",) * (len(LOADERS) + 2)]
    for checkpoint in dict.fromkeys(run["checkpoint"] for run in runs):
        for scenario in ("cold", "cold-freed"):
            found = {who: loads(runs, checkpoint, scenario, who) for who in LOADERS}
            medians = {who: statistics.median(map(seconds, of)) for who, of in found.items()}
            cells = [time(of) for of in found.values()]
            if medians["penstock"] > min(medians.values()):
                cells[0] = f"**{cells[0]}**"
            ratio = medians["penstock"] / medians["safetensors"]
            rows.append((f"{checkpoint}, {scenario}", *cells, f"{ratio:.2f}"))
    return table(rows)


#: The tables by the names that documents call them by.
TABLES: dict[str, Callable[[list[Run]], str]] = {"short": short, "cold": cold}


def loads(runs: list[Run], checkpoint: str, scenario: str, contestant: str) -> list[Run]:
    """The first loads of a contestant.

    Raises:
        SystemExit: There is none, or not all of them were verified.
    """
    row = (checkpoint, scenario, contestant)
    found = [
        run
        for run in runs
        if (run["checkpoint"], run["scenario"], run["contestant"]) == row and run.get("load", 0) == 0
    ]
    if not found or any("error" in run or run["verified_bytes"] != run["bytes"] for run in found):
        raise SystemExit(f"no verified loads of {', '.join(row)}: make bench-summary")
    return found


def seconds(run: Run) -> float:
    """From the call to the last byte touched."""
    return float(run["load_s"] + run["touch_s"])


def time(runs: list[Run]) -> str:
    values = list(map(seconds, runs))
    if statistics.median(values) < 0.1:
        return spread([1e3 * value for value in values], " ms", ".0f" if max(values) >= 0.01 else ".1f")
    return spread(values, " s", ".2f")


def processor(runs: list[Run]) -> str:
    """Processor seconds for each gigabyte, of load and touch. (In a cold run `cpu_s` holds both.)"""
    return spread([run["cpu_s"] / (run["bytes"] / 1e9) for run in runs], " s", ".2f")


def spread(values: list[float], unit: str, digits: str) -> str:
    middle, least, most = (format(value, digits) for value in (statistics.median(values), min(values), max(values)))
    return f"{middle}{unit} ({least} to {most})"


def table(rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"|{'|'.join(row)}|" if row[0] == "---" else f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
