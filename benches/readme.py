"""The figures of README's table, from a result file: `python benches/readme.py RESULTS [--write README.md]`.

RESULTS is what `penstock bench --preset summary --json RESULTS` writes. Each figure is the median of GPT-2's first
loads and, in parentheses, the fastest and the slowest. All of them are to the last byte touched: the load, then one
byte of every page read by one thread; the processor time too. `cold` is the state "memory in use before"; the same
figures of the other state stand below, for comparison. `--write` puts the figures where README has their names.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

Run = dict[str, Any]

#: README's names for the two loaders' figures: with and without the ending.
LOADERS = {"penstock": "", "safetensors": "-S"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the names of the figures in this file")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    made = figures(results["runs"])
    about = results["machine"]
    print(f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, {results['time']}: {results['command']}")
    for name, told in made.items():
        print(f"{name:20} {told}")
    if arguments.write:
        text = arguments.write.read_text()
        # The longest first: some names begin with another
        for name in sorted(made, key=len, reverse=True):
            text = text.replace(name, made[name])
        arguments.write.write_text(text)


def figures(runs: list[Run]) -> dict[str, str]:
    """Each of README's figures by its name.

    Raises:
        SystemExit: Loads are missing, or not all of them were verified.
    """
    made = {}
    for what, scenario, figure in (
        ("FIGURE-COLD", "cold", seconds),
        ("FIGURE-CPU", "cold", processor),
        ("FIGURE-WARM", "warm", seconds),
        ("FREED-COLD", "cold-freed", seconds),
        ("FREED-CPU", "cold-freed", processor),
    ):
        for loader, ending in LOADERS.items():
            first = [
                run
                for run in runs
                if (run["checkpoint"], run["scenario"], run["contestant"]) == ("gpt2", scenario, loader)
                and run.get("load", 0) == 0
            ]
            if not first or any("error" in run or run["verified_bytes"] != run["bytes"] for run in first):
                raise SystemExit(f"no verified loads of gpt2, {scenario}, {loader}: make bench-summary")
            made[what + ending] = figure(first)
    return made


def seconds(runs: list[Run]) -> str:
    """From the call to the last byte touched."""
    values = [run["load_s"] + run["touch_s"] for run in runs]
    if statistics.median(values) < 0.1:
        return spread([1e3 * value for value in values], " ms", ".0f" if max(values) >= 0.01 else ".1f")
    return spread(values, " s", ".2f")


def processor(runs: list[Run]) -> str:
    """Processor seconds for each gigabyte, of load and touch. (In a cold run `cpu_s` holds both.)"""
    return spread([run["cpu_s"] / (run["bytes"] / 1e9) for run in runs], " s", ".2f")


def spread(values: list[float], unit: str, digits: str) -> str:
    middle, least, most = (format(value, digits) for value in (statistics.median(values), min(values), max(values)))
    return f"{middle}{unit} ({least} to {most})"


if __name__ == "__main__":
    main()
