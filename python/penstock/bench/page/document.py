"""The page itself: one HTML file with its style, its script and plotly inside, which fetches nothing.

A policy in the page (Content-Security-Policy) allows the two scripts by their digests and no connection at all, so that
neither a name in the results nor a mistake here can make a browser run or fetch anything else.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import charts, lanes, tables, theme, timeline
from .findings import Contest, Row, Verdict, sections, verdict, with_ceilings
from .markup import Html, data, join, tag
from .units import digits, duration, size

SCHEMA = 2

#: What each scenario is, in a line.
SCENARIOS = {
    "cold": "Nothing of the files in the page cache.",
    "warm": "All of the files in the page cache; any memory counts, a mapping of the files too.",
    "private": "All of the files in the page cache; tensors in memory of their own.",
    "load_into": "All of the files in the page cache; into existing parameters whose pages are in use.",
    "tmpfs": "The files lie in memory (tmpfs).",
    "half": "The first half of each file in the page cache.",
    "second": "The page cache as a cold load by the same loader left it.",
    "cast": "All of the files in the page cache; floating-point tensors cast to F16.",
    "two": "Nothing in the page cache; two processes load at once, and the slower one counts.",
    "beside-memory": "All of the files in the page cache; a neighbour copies memory meanwhile.",
    "beside-disk": "Nothing in the page cache; a neighbour reads from the same disk meanwhile.",
    "limited": "Nothing in the page cache; memory limited to 1.25 times the bytes.",
    "latency": "All of the files in the page cache; many loads in each process.",
}


def write_page(results: dict[str, Any], path: str | Path) -> None:
    """Writes the page of one run of the benchmark.

    Args:
        results: What `penstock bench --json` writes, schema 2.
        path: The HTML file to write; about 5 MB, nearly all of it plotly's script.

    Raises:
        ValueError: results of another schema.
        ModuleNotFoundError: plotly is not installed.
        OSError: the file cannot be written.
    """
    if results.get("schema") != SCHEMA:
        raise ValueError(f"the page shows results of schema {SCHEMA}, and these are of schema {results.get('schema')}")
    page = _Page()
    found = verdict(results)
    parts = [
        _top(results),
        _bar(results),
        tag(
            "main",
            _verdict(found, results),
            *_results(page, results, found),
            _timelines(page, results.get("traces") or []),
            _calibration(results.get("calibration") or []),
        ),
        _footer(),
    ]
    title = f"Penstock benchmark: {results['machine']['cpu']}, {results['time'][:10]}"
    Path(path).write_text(page.document(title, join(*parts)), "utf-8")


def write_trace(trace: dict[str, Any], path: str | Path, title: str = "One load") -> None:
    """Writes a page with the timeline of one load.

    Args:
        trace: What `penstock load --trace` writes.
        path: The HTML file to write.
        title: The heading.

    Raises:
        ValueError: this is no such trace.
        ModuleNotFoundError: plotly is not installed.
        OSError: the file cannot be written.
    """
    page = _Page()
    summary = timeline.summarise(trace)
    version = (trace.get("otherData") or {}).get("version")
    told = [f"{size(summary.nbytes)}" if summary.nbytes else None, f"penstock {version}" if version else None]
    lead = tag("p", " · ".join(part for part in told if part), class_="lead")
    top = tag("header", tag("h1", title), lead, class_="top")
    main = tag("main", _lanes(page, trace, None))
    Path(path).write_text(page.document(title, join(top, main, _footer())), "utf-8")


class _Page:
    """Counts charts, and puts the document around what it is given."""

    def __init__(self) -> None:
        charts.graph_objects()  # before any work, where plotly is missing
        self.charts = 0

    def chart(self, figures: dict[str, charts.Figure], label: str) -> Html:
        """A place for a chart and, beside it, the figures that the script draws there."""
        self.charts += 1
        height = next(iter(figures.values()))["layout"]["height"]
        place = tag(
            "div", id=f"chart-{self.charts}", class_="plot", style=f"height:{height}px", role="img", aria_label=label
        )
        return tag("figure", place, data(figures))

    def document(self, title: str, body: Html) -> Html:
        import plotly.offline

        here = Path(__file__).parent
        scripts = [plotly.offline.get_plotlyjs(), (here / "page.js").read_text("utf-8")]
        allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
        policy = (
            f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
            "base-uri 'none'; form-action 'none'"
        )
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", title),
            tag("style", Html(theme.variables() + (here / "page.css").read_text("utf-8"))),
        )
        needs = tag("noscript", tag("p", "The charts need JavaScript; the tables do not.", class_="notice"))
        settings = data({"dark": theme.dark_forms()}, id="settings")
        foot = [tag("script", Html(script)) for script in scripts]
        document = tag("html", head, "\n", tag("body", body, needs, settings, *foot), lang="en")
        return Html(f"<!DOCTYPE html>\n{document}\n")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# whose figures these are


def _top(results: dict[str, Any]) -> Html:
    machine: dict[str, Any] = results["machine"]
    when = datetime.datetime.fromisoformat(results["time"].replace("Z", "+00:00"))
    hour = when.strftime("%H:%M") + (" UTC" if when.utcoffset() == datetime.timedelta(0) else f" {when:%z}")
    gpu = machine.get("gpu")
    cores = f"{machine['cores']} core{'s' * (machine['cores'] != 1)}"
    lead = [str(machine["cpu"]), cores, size(machine["memory"]) + " memory"]
    if gpu:
        lead.append(str(gpu.get("name", "GPU")))
    facts: list[tuple[str, object]] = [
        ("Measured", join(f"{when.day} {when:%B %Y}, ", hour)),
        ("Processor", join(machine["cpu"], tag("span", f", {cores}", class_="aside"))),
        ("Memory", size(machine["memory"])),
        ("GPU", join(gpu.get("name"), _more(gpu, "name")) if gpu else "none used"),
        ("System", f"Linux {machine['kernel']}, {machine['file_system']}"),
        ("Load average at the start", _load(machine.get("load_average"))),
        ("Load average at the end", _load(results.get("load_average_at_end"))),
        ("Preset", results.get("preset") or "none"),
    ]
    listed = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts]
    versions = [("Python", machine["python"]), *machine.get("versions", {}).items()]
    shown = [
        tag("span", name, " ", tag("b", number) if number else tag("span", "not installed", class_="aside"))
        for name, number in versions
    ]
    listed.append(tag("div", tag("dt", "Versions"), tag("dd", *shown, class_="versions"), class_="wide"))
    listed.append(tag("div", tag("dt", "Command"), tag("dd", tag("code", results["command"])), class_="wide"))
    notices = []
    if results.get("quick"):
        notices.append("A quick run: too small to be judged, and no basis for a comparison.")
    before = (machine.get("load_average") or [0.0])[0]
    if before >= machine["cores"] / 2:
        told = f"{before:.1f} on {cores}"
        notices.append(f"The machine was not quiet when this began: load average {told}. Expect wider spreads.")
    return tag(
        "header",
        tag("h1", "Penstock benchmark"),
        tag("p", " · ".join(lead), class_="lead"),
        *(tag("p", notice, class_="notice") for notice in notices),
        tag("dl", *listed, class_="facts"),
        class_="top",
    )


def _more(of: dict[str, Any], *known: str) -> Html | None:
    rest = ", ".join(f"{key} {value}" for key, value in of.items() if key not in known and value is not None)
    return tag("span", f", {rest}", class_="aside") if rest else None


def _load(averages: Iterable[float] | None) -> object:
    if averages is None:
        return "not known"
    told = ", ".join(f"{each:.2f}" for each in averages)
    return join(told, " ", tag("span", "(1, 5, 15 min)", class_="aside"))


def _bar(results: dict[str, Any]) -> Html:
    links = [("#verdict", "Verdict")]
    links += [(f"#{_anchor(c)}", checkpoint) for c, checkpoint in enumerate(sections(results.get("rows", [])))]
    if results.get("traces"):
        links.append(("#timelines", "Timelines"))
    if results.get("calibration"):
        links.append(("#calibration", "Calibration"))
    switch = tag(
        "div",
        tag("button", "Seconds", type="button", value="seconds", aria_pressed="true"),
        tag("button", "GB/s", type="button", value="rate", aria_pressed="false"),
        class_="switch",
        role="group",
        aria_label="What bars show",
    )
    nav = tag("nav", *(tag("a", name, href=to) for to, name in links), aria_label="Sections")
    return tag("div", tag("div", nav, switch), class_="bar")


def _anchor(checkpoint: int, scenario: int | None = None) -> str:
    return f"c{checkpoint}" if scenario is None else f"c{checkpoint}-s{scenario}"


# what it comes to


def _verdict(found: Verdict, results: dict[str, Any]) -> Html:
    return tag(
        "section",
        tag("h2", "Verdict"),
        tag("div", *_cards(found), class_="cards"),
        _matrix(found, results),
        *_lists(found, results),
        id="verdict",
    )


def _card(what: str, figure: object, then: object, good: bool | None) -> Html:
    sign = None if good is None else tag("span", "✓ " if good else "✕ ", class_="sign")
    return tag(
        "div",
        tag("div", what, class_="what"),
        tag("div", sign, figure, class_="figure"),
        tag("div", then, class_="then"),
        class_="card" if good is None else f"card {'good' if good else 'bad'}",
    )


def _of(some: int, all_of_it: int) -> Html:
    return join(str(some), " ", tag("small", f"of {all_of_it}"))


def _cards(found: Verdict) -> list[Html]:
    judged = len(found.held) + len(found.missed)
    missed = "none missed" if not found.missed else f"{len(found.missed)} missed"
    if not judged:
        bounds = _card("Bounds that hold", "–", f"{len(found.unjudged)} not judged: too small a run", None)
    else:
        missed += f", {len(found.unjudged)} not judged" if found.unjudged else ""
        bounds = _card("Bounds that hold", _of(len(found.held), judged), missed, not found.missed)
    first = sum(contest.first for contest in found.contests)
    if found.contests:
        told = "first everywhere" if not found.behind else f"not first in {len(found.behind)}"
        firsts = _card("Penstock is first in", _of(first, len(found.contests)), told, not found.behind)
    else:
        firsts = _card("Penstock is first in", "–", "no other loader ran", None)
    faults = len(found.faults)
    above = "nothing is above its ceiling" if not faults else "faster than the ceiling: measured wrongly"
    checked = found.verified + len(found.unverified)
    wrong = [
        f"{len(found.unverified)} not" if found.unverified else "",
        f"{len(found.failed)} failed" if found.failed else "",
    ]
    told = ", ".join(part for part in wrong if part) or "every byte compared with the files"
    return [
        bounds,
        firsts,
        _card("Measurement faults", str(faults) if faults else "none", above, not faults),
        _card("Rows verified", _of(found.verified, checked), told, not found.unverified and not found.failed)
        if checked or found.failed
        else _card("Rows verified", "–", "no loader ran", None),
    ]


def _matrix(found: Verdict, results: dict[str, Any]) -> Html | None:
    """Checkpoints by scenarios: how many times as fast as the fastest other loader."""
    by_place = sections(results.get("rows", []))
    scenarios = list(dict.fromkeys(scenario for each in by_place.values() for scenario in each))
    if not found.contests:
        return None
    rows = []
    for c, (checkpoint, measured) in enumerate(by_place.items()):
        cells = []
        for scenario in scenarios:
            here = [k for k in found.contests if (k.checkpoint, k.scenario) == (checkpoint, scenario)]
            if not here:
                cells.append(tag("td", class_="none"))
                continue
            told = []
            for contest in here:
                sign = tag("span", "✓" if contest.first else "✕", class_=f"sign {'good' if contest.first else 'bad'}")
                told.append(tag("b", f"{digits(contest.times)}× ", sign))
                told.append(tag("small", f"{contest.what}: " if contest.what else None, _short(contest)))
            s = list(measured).index(scenario)
            link = tag("a", *told, href=f"#{_anchor(c, s)}")
            cells.append(tag("td", link, class_="good" if all(k.first for k in here) else "bad"))
        rows.append(tag("tr", tag("th", checkpoint, scope="row"), *cells))
    head = tag("tr", tag("th"), *(tag("th", scenario, scope="col") for scenario in scenarios))
    caption = "Times as fast as the fastest other loader of like semantics; below it the medians, penstock's first"
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="matrix")
    return join(tag("p", caption, class_="note"), tables.scroll(table, caption))


def _short(contest: Contest) -> str:
    return f"{duration(contest.ours[contest.key])} / {duration(contest.rival[contest.key])}"


def _lists(judged: Verdict, results: dict[str, Any]) -> list[Html]:
    """Everything that is not as one would wish, said in words."""
    parts: list[Html] = []

    def listed(title: str, items: list[Html]) -> None:
        if items:
            sign = tag("span", "✕", class_="sign bad")
            found = tag("ul", *(tag("li", sign, item) for item in items), class_="findings")
            parts.append(tag("div", tag("h4", title), found))

    listed("Where penstock is not first", [_behind(contest) for contest in judged.behind])
    listed("Bounds missed", [_missed(bound) for bound in judged.missed])
    listed("Measurement faults", [join(tag("b", _place(row)), f": {row['fault']}") for row in judged.faults])
    listed(
        "Rows that failed",
        [join(tag("b", _place(row)), f": {row.get('error', 'no figures')}") for row in judged.failed],
    )
    listed("Rows whose bytes are not verified", [tag("b", _place(row)) for row in judged.unverified])
    absent = results.get("absent") or {}
    if absent:
        items = [tag("li", tag("span", "–", class_="sign"), tag("b", name), f": {why}") for name, why in absent.items()]
        parts.append(tag("div", tag("h4", "Not here"), tag("ul", *items, class_="findings")))
    parts = [tag("div", *parts, class_="said")] if parts else []
    bounds = results.get("bounds") or []
    if bounds:
        parts.append(tag("details", tag("summary", f"All {len(bounds)} bounds"), tables.bounds_table(bounds)))
    return parts


def _place(row: Row) -> str:
    return f"{row['checkpoint']}, {row['scenario']}, {row['contestant']}"


def _missed(bound: Row) -> Html:
    wanted = f"{'at least' if bound['sign'] == '>=' else 'at most'} {bound['bound']:g}"
    return join(
        tag("b", bound["checkpoint"]), f", {bound['claim']}: ", tag("b", f"{bound['value']:.3g}"), f", wanted {wanted}"
    )


def _behind(contest: Contest) -> Html:
    what = f", {contest.what}" if contest.what else ""
    overlap = "; their spreads overlap" if contest.overlap else ""
    return join(
        tag("b", f"{contest.checkpoint}, {contest.scenario}{what}"),
        f": {contest.rival['contestant']} takes {duration(contest.rival[contest.key])}, ",
        f"{contest.ours['contestant']} {duration(contest.ours[contest.key])}{overlap}",
    )


# the rows


def _results(page: _Page, results: dict[str, Any], found: Verdict) -> list[Html]:
    parts = []
    for c, (checkpoint, scenarios) in enumerate(sections(results.get("rows", [])).items()):
        about = (results.get("checkpoints") or {}).get(checkpoint) or {}
        inside: list[object] = [tag("h2", checkpoint)]
        told = _about(about, scenarios)
        inside.append(tag("p", told, class_="note") if told else None)
        if c == 0:
            inside.append(_key(results))
        for s, (scenario, rows) in enumerate(scenarios.items()):
            here = [k for k in found.contests if (k.checkpoint, k.scenario) == (checkpoint, scenario)]
            inside.append(_scenario(page, results, scenario, rows, here, _anchor(c, s)))
        parts.append(tag("section", *inside, id=_anchor(c)))
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
    """What the marks of the bar charts mean; only those that occur."""
    rows = results.get("rows", [])
    ceilings = any(row.get("kind") == "ceiling" or row.get("ceiling") for row in rows)
    entries = [
        (True, tag("i", style="background:var(--accent)"), "penstock"),
        (True, tag("i", style="background:var(--neutral)"), "other loaders"),
        (ceilings, tag("i", class_="line"), "ceiling: no loader in the way (band: its spread)"),
        (True, tag("i", class_="spread"), "fastest to slowest"),
        (bool(results.get("runs")), tag("i", class_="load"), "one load"),
        (any(row.get("later_s") for row in rows), tag("i", class_="later"), "later loads of the same process"),
        (any(row.get("fault") for row in rows), tag("i", class_="fault"), "above its ceiling: measurement fault"),
    ]  # fmt: skip
    return tag("ul", *(tag("li", mark, name) for there, mark, name in entries if there), class_="key")


def _scenario(
    page: _Page, results: dict[str, Any], scenario: str, rows: list[Row], contests: list[Contest], anchor: str
) -> Html:
    checkpoint = rows[0]["checkpoint"]
    label = f"{checkpoint}, {scenario}"
    runs = results.get("runs") or []
    rows = with_ceilings(rows, runs)
    figures = charts.bars(rows, runs)
    chart = page.chart(figures, f"{label}: bars of all loaders; the table below has the figures") if figures else None
    said = [_said(contest) for contest in contests]
    return tag(
        "section",
        tag("h3", label),
        tag("p", SCENARIOS[scenario], class_="note") if scenario in SCENARIOS else None,
        *(tag("p", line, class_="verdict") for line in said),
        chart,
        tables.results_table(rows, f"{label}: all figures"),
        id=anchor,
    )


def _said(contest: Contest) -> Html:
    sign = tag("span", "✓" if contest.first else "✕", class_=f"sign {'good' if contest.first else 'bad'}")
    ours, rival = str(contest.ours["contestant"]), str(contest.rival["contestant"])
    told = f" {ours} {duration(contest.ours[contest.key])}, {rival} {duration(contest.rival[contest.key])}: "
    what = f" {contest.what}:" if contest.what else ""
    overlap = "; their spreads overlap" if contest.overlap else ""
    return join(sign, what, told, tag("b", f"{digits(contest.times)}× as fast"), overlap)


# one load over time


def _timelines(page: _Page, traces: list[dict[str, Any]]) -> Html | None:
    if not traces:
        return None
    parts = [
        _lanes(page, found["trace"], ", ".join(str(found[key]) for key in ("checkpoint", "scenario", "contestant")))
        for found in traces
    ]
    note = (
        "One load each. A lane for every worker; what lies above is the rate at which bytes arrived. "
        "Events too short to be told apart are drawn as one bar, paler where it was idle in between. "
        "Drag to look closer, double-click to go back."
    )
    return tag("section", tag("h2", "Timelines"), tag("p", note, class_="note"), *parts, id="timelines")


def _lanes(page: _Page, trace: dict[str, Any], title: str | None) -> Html:
    found = timeline.lanes(trace)
    said = timeline.summarise(trace, found).sentence()
    names = {
        "direct": "read, O_DIRECT",
        "buffered": "read, page cache",
        "mapped": "read, mapped",
        "wait": "engine waits",
    }
    key = [tag("li", tag("i", style=f"background:var(--{role})"), names.get(role, role)) for role in lanes.roles(found)]
    chart = page.chart({"lanes": lanes.figure(trace)}, f"Timeline: {said}") if found else None
    return tag(
        "div",
        tag("h3", title) if title else None,
        tag("p", said),
        tag("ul", *key, class_="key"),
        chart,
        class_="lanes",
    )


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


def _footer() -> Html:
    told = "GB are 1e9 bytes, seconds are wall clock. This page is complete in itself and fetches nothing."
    return tag("footer", tag("p", told, " Charts by plotly."))
