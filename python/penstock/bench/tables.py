"""Results as text: a table for the terminal, and Markdown for docs/benchmarks.md."""

from __future__ import annotations

from typing import Any

from .scenarios import SCENARIOS


def print_results(result: dict[str, Any]) -> None:
    about = result["machine"]
    memory = f"{about['memory'] / 2**30:.0f} GiB"
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    print(f"\n{about['cpu']}, {about['cores']} cores, {memory}, Linux {about['kernel']}, {about['file_system']}")
    print(f"Python {about['python']}, {versions}")
    print(
        f"load average {about['load_average'][0]:.1f} at the start, {result['load_average_at_end'][0]:.1f} at the end"
    )
    print(result["command"])

    columns = (
        f"{'median s':>9} {'min..max':>15} {'GB/s':>7} {'of raw':>7} {'load s':>8} {'touch s':>8} {'CPU s':>7}  bytes"
    )
    heading = None

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        return (row["checkpoint"], SCENARIOS.index(row["scenario"]), row.get("median_s", float("inf")))

    for row in sorted(result["rows"], key=order):
        if heading != (row["checkpoint"], row["scenario"]):
            heading = (row["checkpoint"], row["scenario"])
            size = f" ({row['bytes'] / 1e9:.2f} GB)" if "bytes" in row else ""
            print(f"\n{row['checkpoint']}{size}, {row['scenario']}\n  {'':26} {columns}")
        if "error" in row:
            print(f"  {row['contestant']:26} failed: {row['error']}")
            continue
        spread = f"{row['min_s']:.3f}..{row['max_s']:.3f}"
        raw = f"{row['share_of_raw']:.2f}" if "share_of_raw" in row else ""
        line = f"  {row['contestant']:26} {row['median_s']:9.3f} {spread:>15} {row['gb_per_s']:7.2f} {raw:>7}"
        if "touch_s" in row:
            line += f" {row['load_s']:8.3f} {row['touch_s']:8.3f} {row['cpu_s']:7.2f}  "
            line += "verified" if row["verified"] else "DIFFERENT"
        print(line)

    for name, why in result["absent"].items():
        print(f"\nnot here: {name} ({why})", end="")
    if result["bounds"]:
        print("\n\nbounds" + (" (a quick run is too small to be judged by them)" if result["quick"] else ""))
    for row in result["bounds"]:
        verdict = ("holds" if row["holds"] else "FAILS") if row["judged"] else ""
        print(
            f"  {row['checkpoint']:8} {row['claim']:64} {row['value']:6.2f} {row['sign']} {row['bound']:<4} {verdict}"
        )


def print_tables(result: dict[str, Any]) -> None:
    """The rows and bounds of one result file as Markdown, for docs/benchmarks.md."""
    headings = ("", "median s", "min..max", "GB/s", "of raw", "load s", "touch s", "CPU s", "loads")
    places = dict.fromkeys((row["checkpoint"], row["scenario"]) for row in result["rows"])
    for checkpoint, scenario in places:
        rows = [row for row in result["rows"] if (row["checkpoint"], row["scenario"]) == (checkpoint, scenario)]
        print(f"\n{checkpoint}, {scenario}:\n\n| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
        for row in sorted(rows, key=lambda row: row.get("median_s", float("inf"))):
            if "error" in row:
                print(f"| {row['contestant']} | failed: {row['error']} |{' |' * (len(headings) - 2)}")
                continue
            cells = [row["contestant"], f"{row['median_s']:.3f}", f"{row['min_s']:.3f}..{row['max_s']:.3f}"]
            cells += [f"{row['gb_per_s']:.2f}"]
            optional = (("share_of_raw", ".2f"), ("load_s", ".3f"), ("touch_s", ".3f"), ("cpu_s", ".2f"))
            cells += [format(row[key], how) if key in row else "" for key, how in optional]
            print(f"| {' | '.join([*cells, str(row['loads'])])} |")
    print("\n| checkpoint | bound | found | wanted | |\n|---|---|---|---|---|")
    for row in result["bounds"]:
        verdict = ("holds" if row["holds"] else "**missed**") if row["judged"] else "not judged"
        sign = "at least" if row["sign"] == ">=" else "at most"
        print(f"| {row['checkpoint']} | {row['claim']} | {row['value']:.2f} | {sign} {row['bound']} | {verdict} |")
