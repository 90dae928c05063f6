"""The page itself: what it says, in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...page.document import Page, footer
from ...page.load import LOAD_ALONE, section
from ...page.markup import Html, anchor, join, tag
from ...page.units import digits, duration, size
from ..results import TOUCHED
from ..scenarios import SCENARIOS as KNOWN
from . import charts, masthead, tables, verdict
from .findings import Contest, Row, Verdict, judged, sections, with_ceilings

#: Schemas of results that have a page. Those of schema 2 rank every row by the load alone.
SCHEMAS = (2, 3)

#: The scenarios, one line each.
SCENARIOS = {
    "cold": "Nothing of the files in the page cache. Memory in use before: a process mapped and touched them.",
    "cold-freed": "Nothing of the files in the page cache. Before, a process took and gave back private memory.",
    "warm": "All of the files in the page cache; any memory counts, a mapping of the files too.",
    "private": "All of the files in the page cache; tensors in memory of their own.",
    "load_into": "All of the files in the page cache; into existing parameters whose pages are in use.",
    "tmpfs": "The files lie in memory (tmpfs).",
    "half": "The first half of each file in the page cache.",
    "second": "The page cache as a cold load by the same loader left it, after all that it did in the background.",
    "cast": "All of the files in the page cache; floating-point tensors cast to F16.",
    "two": "Nothing in the page cache; two processes load at once, and the slower one counts.",
    "beside-memory": "All of the files in the page cache; a neighbour copies memory meanwhile.",
    "beside-disk": "Nothing in the page cache; a neighbour reads from the same disk meanwhile.",
    "limited": "Nothing in the page cache; memory limited to 1.25 times the bytes.",
    "bucket": "From a web server on this machine, with a link model if the command has one; into private memory.",
    "bucket-tls": "From a web server on this machine, with TLS; into private memory.",
    "bucket-second": "Kept on the disk by a first start from that server; nothing of it in the page cache.",
    "bucket-upload": "Tensors in memory are saved to a bucket on this machine; nothing is loaded.",
    "latency": "All of the files in the page cache; many loads in each process.",
}


def write_page(results: dict[str, Any], path: str | Path) -> None:
    """Writes the page of one run of the benchmark.

    Args:
        results: What `penstock bench --json` writes, schema 2 or 3.
        path: The HTML file to write; about 5 MB, nearly all of it plotly's script.

    Raises:
        ValueError: results of another schema.
        ModuleNotFoundError: plotly is not installed.
        OSError: the file cannot be written.
    """
    if results.get("schema") not in SCHEMAS:
        known = " and ".join(map(str, SCHEMAS))
        raise ValueError(f"the page shows results of schemas {known}, and these are of schema {results.get('schema')}")
    page = Page()
    found = judged(results)
    parts = [
        masthead.masthead(results),
        masthead.bar(results),
        tag(
            "main",
            verdict.section(found, results),
            *_results(page, results, found),
            _timelines(page, results.get("traces") or [], results.get("calibration") or []),
            _calibration(results.get("calibration") or []),
        ),
        footer(),
    ]
    title = f"Penstock benchmark: {results['machine']['cpu']}, {results['time'][:10]}"
    Path(path).write_text(page.document(title, join(*parts)), "utf-8")


# the rows


def _results(page: Page, results: dict[str, Any], found: Verdict) -> list[Html]:
    parts, runs = [], sections(results.get("runs") or [])
    for c, (checkpoint, scenarios) in enumerate(sections(results.get("rows", [])).items()):
        about = (results.get("checkpoints") or {}).get(checkpoint) or {}
        inside: list[object] = [tag("h2", checkpoint)]
        told = _about(about, scenarios)
        inside.append(tag("p", told, class_="note") if told else None)
        if c == 0 and not results.get("quick"):
            inside.append(_key(results))
        for s, (scenario, rows) in enumerate(scenarios.items()):
            here = [k for k in found.contests if (k.checkpoint, k.scenario) == (checkpoint, scenario)]
            beside = runs.get(checkpoint, {}).get(scenario, [])
            inside.append(_scenario(page, scenario, rows, beside, here, anchor(c, s), bool(results.get("quick"))))
        parts.append(tag("section", *inside, id=anchor(c)))
    return parts


def _about(about: dict[str, Any], scenarios: dict[str, list[Row]]) -> str:
    nbytes = about.get("nbytes") or next(
        (row["bytes"] for rows in scenarios.values() for row in rows if row.get("bytes")), None
    )
    told = [
        f"layout {about['layout']}" if about.get("layout") else None,
        size(nbytes) if nbytes else None,
        f"{about['tensors']:,} tensors" if about.get("tensors") else None,
        _files(about.get("files")),
    ]
    return ", ".join(part for part in told if part)


def _files(files: Any) -> str | None:
    count = len(files) if isinstance(files, (list, tuple)) else files
    return f"{count:,} file{'s' * (count != 1)}" if count else None


def _key(results: dict[str, Any]) -> Html:
    """The meanings of the marks of the bar charts; only those that occur."""
    rows = results.get("rows", [])
    ceilings = any(row.get("kind") == "ceiling" or row.get("ceiling") for row in rows)
    entries = [
        (True, tag("i", style="background:var(--accent)"), "penstock"),
        (True, tag("i", style="background:var(--neutral)"), "other loaders"),
        (ceilings, tag("i", class_="line"), "ceiling: no loader in the way (band: its spread)"),
        (True, tag("i", class_="spread"), "fastest to slowest"),
        (bool(results.get("runs")), tag("i", class_="load"), "one load"),
        (any(row.get("ranked") == TOUCHED for row in rows), tag("i", class_="alone"), "the load alone"),
        (any(row.get("later_s") for row in rows), tag("i", class_="later"), "later loads of the same process"),
        (any(row.get("fault") for row in rows), tag("i", class_="fault"), "above its ceiling: measurement fault"),
    ]  # fmt: skip
    return tag("ul", *(tag("li", mark, name) for there, mark, name in entries if there), class_="key")


def _scenario(
    page: Page, scenario: str, rows: list[Row], runs: list[Row], contests: list[Contest], place: str, quick: bool
) -> Html:
    checkpoint = rows[0]["checkpoint"]
    label = f"{checkpoint}, {scenario}"
    rows = with_ceilings(rows, runs)
    # Bars beside each other rank, and a quick run does not
    figures = None if quick else charts.bars(rows, runs)
    chart = page.chart(figures, f"{label}: bars of all loaders; the table below has the figures") if figures else None
    said = [_said(contest) for contest in contests]
    return tag(
        "section",
        tag("h3", label),
        tag("p", _about_scenario(scenario, rows, quick), class_="note"),
        *(tag("p", line, class_="verdict") for line in said),
        chart,
        tables.results_table(rows, f"{label}: all figures", in_turn=quick),
        id=place,
    )


def _about_scenario(scenario: str, rows: list[Row], quick: bool) -> str:
    """A description of the scenario, and the time that ranks its rows."""
    touched = any(row.get("ranked") == TOUCHED for row in rows)
    # Older results have cold loads of one kind only, whatever the memory before
    about = SCENARIOS.get(scenario, "") if touched or scenario != "cold" else "Nothing of the files in the page cache."
    return " ".join(part for part in (about, "Not ranked." if quick else ranked_by(touched)) if part)


def ranked_by(touched: bool) -> str:
    """A sentence about the time that ranks the rows."""
    if touched:
        return "Ranked by the time to the last byte touched: the load, then one byte of every page read by one thread."
    return "Ranked by the time of the load alone."


def _said(contest: Contest) -> Html:
    sign = tag("span", "✓" if contest.first else "✕", class_=f"sign {'good' if contest.first else 'bad'}")
    ours, rival = str(contest.ours["contestant"]), str(contest.rival["contestant"])
    last = " to the last byte touched" if contest.touched else ""
    told = f" {ours} {duration(contest.ours[contest.key])}, {rival} {duration(contest.rival[contest.key])}{last}: "
    what = f" {contest.what}:" if contest.what else ""
    overlap = "; their spreads overlap" if contest.overlap else ""
    return join(sign, what, told, tag("b", f"{digits(contest.times)}× as fast"), overlap)


# one load over time


def _timelines(page: Page, traces: list[dict[str, Any]], calibration: list[Row]) -> Html | None:
    if not traces:
        return None
    parts = [
        section(
            page,
            found["trace"],
            ", ".join(str(found[key]) for key in ("checkpoint", "scenario", "contestant")),
            _disk(found, calibration),
        )
        for found in traces
    ]
    note = (
        f"{LOAD_ALONE} Where the bytes come from the disk, the dashed line is its ceiling. "
        "One load each. A lane for every worker; what lies above is the rate at which bytes arrived. "
        "Events too short to be told apart are drawn as one bar, paler where it was idle in between. "
        "Drag to look closer, double-click to go back."
    )
    return tag("section", tag("h2", "Timelines"), tag("p", note, class_="note"), *parts, id="timelines")


def _disk(found: dict[str, Any], calibration: list[Row]) -> float | None:
    """The fastest raw read of a checkpoint, in bytes a second, where a timeline is of a load from the disk."""
    scenario = KNOWN.get(str(found["scenario"]))
    if scenario is None or not scenario.from_disk:
        return None
    rates = [
        tried["bytes"] / tried["seconds"]
        for tried in calibration
        if (tried["checkpoint"], tried["measure"]) == (found["checkpoint"], "direct") and tried["seconds"]
    ]
    return max(rates, default=None)


# the rest


def _calibration(calibration: list[Row]) -> Html | None:
    if not calibration:
        return None
    told = (
        f"{len(calibration)} measurements; the fastest setting of each ceiling is the one that loads are compared with"
    )
    note = tag("p", told, class_="note")
    opened = tag("details", tag("summary", "Settings tried for each ceiling"), tables.calibration_table(calibration))
    return tag("section", tag("h2", "Calibration"), note, opened, id="calibration")
