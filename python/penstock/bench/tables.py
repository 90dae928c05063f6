"""Results as text: a table for the terminal, and Markdown for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .presets import PRESETS, comparison
from .results import ALONE, TOUCHED
from .scenarios import SCENARIOS, SECOND

Row = dict[str, Any]

#: Heading, and how the cell is made of a row; absent fields leave it empty.
Column = tuple[str, Callable[[Row], str]]
_COLUMNS: list[Column] = [
    ("min..max", lambda row: f"{row['min_s']:.3f}..{row['max_s']:.3f}"),
    ("later s", lambda row: f"{row['later_s']:.4f}"),
    ("p99 s", lambda row: f"{row['p99_s']:.4f}"),
    ("GB/s", lambda row: f"{row['gb_per_s']:.2f}"),
    ("share", lambda row: f"{row['share']:.2f} of {row['ceiling']}"),
    ("warm s", lambda row: f"{row['warm_s']:.3f}"),
    ("first start s", lambda row: f"{row['first_s']:.3f}" if row["scenario"] == SECOND else ""),
    ("kept s", lambda row: f"{row['kept_s']:.3f}"),
    ("fill s", lambda row: f"{row['fill_s']:.3f}"),
    ("first s", lambda row: f"{row['first_tensor_s']:.3f}"),
    ("touch s", lambda row: f"{row['touch_s']:.3f}"),
    ("CPU s/GB", lambda row: f"{row['cpu_s_per_gb']:.3f}"),
    ("memory MB", lambda row: f"{row['memory'] / 1e6:.0f}"),
    ("pinned MB", lambda row: f"{row['pinned'] / 1e6:.0f}"),
    ("GPU MB", lambda row: f"{row['device_memory'] / 1e6:.0f}"),
    ("cached MB", lambda row: f"{row['cache_left'] / 1e6:.0f}"),
    ("served MB", lambda row: f"{row['served_bytes'] / 1e6:.1f}"),
    ("requests", lambda row: str(row["served_requests"])),
    ("connections", lambda row: str(row["served_connections"])),
    ("loads", lambda row: str(row["loads"])),
]
#: The first columns of a table that is ranked by the load alone, or by the last byte touched: there a
#: ceiling, which touches nothing, stands beside the load alone.
_ALONE: list[Column] = [("median s", lambda row: f"{row['median_s']:.3f}")]
_TOUCHED: list[Column] = [
    ("last byte s", lambda row: f"{row['median_s']:.3f}" if row.get("ranked") == TOUCHED else ""),
    ("load s", lambda row: f"{row['load_s']:.3f}"),
]


def ranked_by(rows: list[Row]) -> str:
    """The time that the rows of a scenario are ranked by, as rows name it."""
    return next((str(row["ranked"]) for row in rows if "ranked" in row), ALONE)


def _ranking(scenario: str, rows: list[Row]) -> str:
    """The state before a scenario's loads, and what they are ranked by."""
    state = SCENARIOS[scenario].state if scenario in SCENARIOS and any("ranked" in row for row in rows) else None
    told = {
        TOUCHED: "ranked by the time to the last byte touched",
        ALONE: "ranked by the time of the load alone",
    }[ranked_by(rows)]
    return f"{state}; {told}" if state else told


def _cells(row: Row, columns: list[Column]) -> list[str]:
    cells = []
    for _, cell in columns:
        try:
            cells.append(cell(row))
        except KeyError:
            cells.append("")
    return cells


def _verdict(row: Row) -> str:
    if "fault" in row:
        return "MEASUREMENT FAULT"
    if "verified" not in row:
        return str(row.get("settings", ""))
    return "verified" if row["verified"] else "DIFFERENT"


def _tables(result: dict[str, Any]) -> list[tuple[str, str, list[Row]]]:
    """Rows by checkpoint and scenario, the fastest first."""
    return [
        (*place, sorted(rows, key=lambda row: row.get("median_s", float("inf"))))
        for place, rows in _in_turn(result["rows"]).items()
    ]


def _in_turn(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by checkpoint and scenario, as they were measured."""
    places: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        places.setdefault((row["checkpoint"], row["scenario"]), []).append(row)
    checkpoints, scenarios = list(dict.fromkeys(checkpoint for checkpoint, _ in places)), list(SCENARIOS)
    return dict(sorted(places.items(), key=lambda item: (checkpoints.index(item[0][0]), scenarios.index(item[0][1]))))


def _used(rows: list[Row]) -> list[Column]:
    """The columns that some row has something in."""
    leading = _TOUCHED if ranked_by(rows) == TOUCHED else _ALONE
    return [column for column in (*leading, *_COLUMNS) if any(_cells(row, [column])[0] for row in rows)]


def print_results(result: dict[str, Any]) -> None:
    """All of a result, for people at a terminal."""
    about = result["machine"]
    memory = f"{about['memory'] / 2**30:.0f} GiB"
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    print(f"\n{about['cpu']}, {about['cores']} cores, {memory}, Linux {about['kernel']}, {about['file_system']}")
    if about.get("gpu"):
        print(", ".join(str(value) for value in about["gpu"].values()))
    print(f"Python {about['python']}, {versions}")
    print(
        f"load average {about['load_average'][0]:.1f} at the start, {result['load_average_at_end'][0]:.1f} at the end"
    )
    print(result["command"])
    if result["quick"]:
        _print_quick(result)
        if result.get("preset") in PRESETS:
            print(comparison(result))
        return
    for checkpoint, scenario, rows in _tables(result):
        size = next((f" ({row['bytes'] / 1e9:.2f} GB)" for row in rows if "bytes" in row), "")
        columns = _used(rows)
        lines = [["", *(heading for heading, _ in columns), ""]]
        for row in rows:
            cells = _cells(row, columns) if "median_s" in row else [""] * len(columns)
            lines.append([row["contestant"], *cells, _verdict(row) if "median_s" in row else f"failed: {row['error']}"])
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns) + 1)]
        print(f"\n{checkpoint}{size}, {scenario}: {_ranking(scenario, rows)}")
        for line in lines:
            cells = [cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:], strict=True)]
            print("  " + "  ".join([line[0].ljust(widths[0]), *cells, line[-1]]).rstrip())
    for row in result["rows"]:
        if "fault" in row:
            print(f"\nmeasurement fault: {row['checkpoint']}, {row['scenario']}, {row['contestant']}: {row['fault']}")
    _print_absent(result)
    if result["bounds"]:
        print("\nbounds")
        width = max(len(row["claim"]) for row in result["bounds"])
    for row in result["bounds"]:
        verdict = ("holds" if row["holds"] else "FAILS") if row["judged"] else ""
        found = f"{row['value']:7.2f} {row['sign']} {row['bound']:<4.3g}"
        print(f"  {row['checkpoint']:8} {row['claim']:{width}} {found} {verdict}")
    if result.get("preset") in PRESETS:
        print(comparison(result))


def _print_quick(result: dict[str, Any]) -> None:
    """The table of a quick run: each loader's load, and whether every byte is right. No times, hence no ranking."""
    print("\nA quick run is too small to be judged: it shows that everything works, and ranks no loader.")
    for (checkpoint, scenario), rows in _in_turn(result["rows"]).items():
        print(f"\n{checkpoint}, {scenario}")
        width = max(len(row["contestant"]) for row in rows)
        for row in rows:
            said = f"failed: {row['error']}" if "error" in row else _quickly(row)
            print(f"  {row['contestant'].ljust(width)}  {said}")
    _print_absent(result)


def _quickly(row: Row) -> str:
    if row["kind"] == "ceiling":
        return "measured"
    loads = f"{row['loads']} load{'s' * (row['loads'] != 1)} of {row['bytes'] / 1e6:.0f} MB"
    return f"{loads}, {'every byte verified' if row.get('verified') else 'DIFFERENT'}"


def _print_absent(result: dict[str, Any]) -> None:
    print()
    for name, why in result["absent"].items():
        print(f"not here: {name} ({why})")


def print_tables(result: dict[str, Any]) -> None:
    """The rows and bounds of one result file as Markdown, for docs/benchmarks.md."""
    for checkpoint, scenario, rows in _tables(result):
        columns = _used(rows)
        print(f"\n{checkpoint}, {scenario}: {_ranking(scenario, rows)}:\n")
        print(f"| | {' | '.join(heading for heading, _ in columns)} |")
        print(f"|{'---|' * (len(columns) + 1)}")
        for row in rows:
            if "error" in row:
                print(f"| {row['contestant']} | failed: {row['error']} |{' |' * (len(columns) - 1)}")
                continue
            fault = " (measurement fault)" if "fault" in row else ""
            print(f"| {row['contestant']}{fault} | {' | '.join(_cells(row, columns))} |")
    print("\n| checkpoint | bound | found | wanted | |\n|---|---|---|---|---|")
    for row in result["bounds"]:
        verdict = ("holds" if row["holds"] else "**missed**") if row["judged"] else "not judged"
        sign = "at least" if row["sign"] == ">=" else "at most"
        print(f"| {row['checkpoint']} | {row['claim']} | {row['value']:.2f} | {sign} {row['bound']:.3g} | {verdict} |")
    if result.get("preset") in PRESETS:
        print(comparison(result))
