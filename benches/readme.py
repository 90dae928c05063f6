"""Tables of README and docs/benchmarks.md from a result file, and what is kept of one.

    python benches/readme.py RESULTS [--keep FILE] [--write FILE...]

RESULTS is what `penstock bench --preset summary --json RESULTS` writes, or what `--keep` has kept of it. All figures
are of first loads, to the last byte touched: the load, then one byte of every page read by one thread. Each is the
median, then the fastest and the slowest.

- `short`: loaders on every checkpoint, cold ("memory in use before") and warm: medians. Bold: the fastest of a column.
- `cold`: every loader on every checkpoint in both states of memory. Bold: another column is faster. The last column is
  Penstock's time divided by that of safetensors.

`--write` puts each table where a file has `<!-- figures: NAME -->` and `<!-- end -->`, in place of what stands there.
`--keep` writes everything that a table shows, of any result of `penstock bench`, and no single load: a tenth of the
size. `benches/results` has such files.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = dict[str, Any]
#: What is kept of the loads of one row: `loads`, `verified`, and `touched_s` and `cpu_s_per_gb` as `Spread`.
Figures = dict[str, Any]
#: Median, least, most.
Spread = list[float]

#: What a result file has of single loads.
RAW = ("runs", "traces")

#: The columns of `cold`: the benchmark's name of a loader, and the heading.
LOADERS = {
    "penstock": "Penstock",
    "safetensors": "safetensors",
    "penstock copy": "Penstock, copy",
    "fastsafetensors": "fastsafetensors",
    "runai streamer": "Run:ai",
}

#: Those of them that `short` has.
BESIDE = ("penstock", "safetensors", "fastsafetensors", "runai streamer")

#: The columns of `short`: the benchmark's name of a checkpoint, and the heading.
CHECKPOINTS = {"gpt2": "GPT-2", "dense": "Llama", "moe": "experts"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write what is kept of these results")
    parser.add_argument("--write", type=Path, nargs="+", default=[], metavar="FILE", help="fill in the tables there")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    about = results["machine"]
    print(f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, {results['time']}: {results['command']}")
    if arguments.keep:
        arguments.keep.write_text(json.dumps(kept(results), indent=1) + "\n")
    if results.get("preset") != "summary" and arguments.keep and not arguments.write:
        return  # it has other tables: `penstock bench --tables FILE` prints them
    for table in TABLES.values():
        print(f"\n{table(figures(results))}")
    for file in arguments.write:
        file.write_text(filled(file.read_text(), results, str(file)))


def kept(results: dict[str, Any]) -> dict[str, Any]:
    """A result without its single loads, and with what tables show of them."""
    return {key: value for key, value in results.items() if key not in RAW} | {"figures": figures(results)}


def figures(results: dict[str, Any]) -> list[Figures]:
    """What first loads took, by row, in the order of the rows."""
    if "figures" in results:
        return list(results["figures"])
    rows: dict[tuple[str, str, str], list[Run]] = {}
    for run in results["runs"]:
        if run.get("load", 0) == 0 and run.get("kind") != "ceiling":
            rows.setdefault((run["checkpoint"], run["scenario"], run["contestant"]), []).append(run)
    return [
        dict(zip(("checkpoint", "scenario", "contestant"), row, strict=True)) | _figures(of) for row, of in rows.items()
    ]


def _figures(runs: list[Run]) -> Figures:
    found: Figures = {"loads": len(runs)}
    found["verified"] = not any("error" in run or run["verified_bytes"] != run["bytes"] for run in runs)
    done = [run for run in runs if "error" not in run]
    if done and all("touch_s" in run for run in done):
        found["touched_s"] = spread([run["load_s"] + run["touch_s"] for run in done])
        # In a cold run `cpu_s` holds that of the touch too
        found["cpu_s_per_gb"] = spread([run["cpu_s"] / (run["bytes"] / 1e9) for run in done])
    chosen = Counter(run["report"]["cache"] for run in done if "report" in run)
    if chosen:
        found["cache"] = dict(chosen)  # how many loads kept the page cache, and how many went past it
    return found


def spread(values: list[float]) -> Spread:
    return [statistics.median(values), min(values), max(values)]


def filled(text: str, results: dict[str, Any], file: str) -> str:
    """A document with its tables made anew.

    Raises:
        SystemExit: It has no place for a table; or loads are missing, or not all of them were verified.
    """
    text, places = re.subn(
        r"(<!-- figures: (\w+) -->\n).*?(\n<!-- end -->)",
        lambda place: place[1] + TABLES[place[2]](figures(results)) + place[3],
        text,
        flags=re.DOTALL,
    )
    if not places:
        raise SystemExit(f"{file} has no <!-- figures: NAME -->: nothing was written")
    return text


def short(found: list[Figures]) -> str:
    columns = [(checkpoint, scenario) for scenario in ("cold", "warm") for checkpoint in CHECKPOINTS]
    rows = [("", *(f"{CHECKPOINTS[checkpoint]}: {scenario}" for checkpoint, scenario in columns))]
    rows.append(("---",) * len(rows[0]))
    medians = {
        (column, who): row(found, *column, who)["touched_s"][0]
        for column in columns
        for who in BESIDE
        if who in ("penstock", "safetensors")
        or any(one["contestant"] == who and (one["checkpoint"], one["scenario"]) == column for one in found)
    }
    for who in BESIDE:
        cells = []
        for column in columns:
            least = min(seconds for (of, _), seconds in medians.items() if of == column)
            seconds = medians.get((column, who))
            cell = "" if seconds is None else median(seconds)
            cells.append(f"**{cell}**" if seconds == least else cell)
        rows.append((LOADERS[who], *cells))
    return table(rows)


def cold(found: list[Figures]) -> str:
    rows: list[tuple[str, ...]] = [("", *LOADERS.values(), "Penstock / safetensors"), ("---",) * (len(LOADERS) + 2)]
    for checkpoint in dict.fromkeys(one["checkpoint"] for one in found):
        for scenario in ("cold", "cold-freed"):
            those = {who: row(found, checkpoint, scenario, who) for who in LOADERS}
            medians = {who: of["touched_s"][0] for who, of in those.items()}
            cells = [time(of) for of in those.values()]
            if medians["penstock"] > min(medians.values()):
                cells[0] = f"**{cells[0]}**"
            ratio = medians["penstock"] / medians["safetensors"]
            rows.append((f"{checkpoint}, {scenario}", *cells, f"{ratio:.2f}"))
    return table(rows)


#: The tables by the names that documents call them by.
TABLES: dict[str, Callable[[list[Figures]], str]] = {"short": short, "cold": cold}


def row(found: list[Figures], checkpoint: str, scenario: str, contestant: str) -> Figures:
    """The figures of a contestant.

    Raises:
        SystemExit: There is no load, or not all of them were verified.
    """
    wanted = {"checkpoint": checkpoint, "scenario": scenario, "contestant": contestant}
    for one in found:
        if wanted.items() <= one.items() and one["verified"]:
            return one
    raise SystemExit(f"no verified loads of {', '.join(wanted.values())}: make bench-summary")


def time(of: Figures) -> str:
    """Seconds from the call to the last byte touched."""
    values = of["touched_s"]
    if values[0] < 0.1:
        return text_of([1e3 * value for value in values], " ms", ".0f" if max(values) >= 0.01 else ".1f")
    return text_of(values, " s", ".2f")


def median(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.2f} s"


def text_of(values: Spread, unit: str, digits: str) -> str:
    middle, least, most = (format(value, digits) for value in values)
    return f"{middle}{unit} ({least} to {most})"


def table(rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"|{'|'.join(row)}|" if row[0] == "---" else f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
