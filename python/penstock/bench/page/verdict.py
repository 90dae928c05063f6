"""The verdict before any chart: kept promises, missed ones, and contests in which penstock is not first."""

from __future__ import annotations

from typing import Any

from ...page.markup import Html, anchor, join, tag
from ...page.units import digits, duration
from . import tables
from .findings import Contest, Row, Verdict, sections


def section(found: Verdict, results: dict[str, Any]) -> Html:
    return tag(
        "section",
        tag("h2", "Verdict"),
        tag("div", *_cards(found, bool(results.get("quick"))), class_="cards"),
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


def _cards(found: Verdict, quick: bool) -> list[Html]:
    """Four figures. A quick run is no basis for a comparison: it has no contests."""
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
        told = "a quick run ranks no loader" if quick else "no other loader ran"
        firsts = _card("Penstock is first in", "–", told, None)
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
    """Scenarios by checkpoints: how many times as fast as the fastest other loader."""
    if not found.contests:
        return None
    measured = sections(results.get("rows", []))
    rows = []
    for scenario in dict.fromkeys(scenario for each in measured.values() for scenario in each):
        cells = []
        for c, (checkpoint, scenarios) in enumerate(measured.items()):
            here = [k for k in found.contests if (k.checkpoint, k.scenario) == (checkpoint, scenario)]
            cells.append(_cell(here, anchor(c, list(scenarios).index(scenario))) if here else tag("td", class_="none"))
        rows.append(tag("tr", tag("th", scenario, scope="row"), *cells))
    head = tag("tr", tag("th"), *(tag("th", checkpoint, scope="col") for checkpoint in measured))
    caption = "Times as fast as the fastest other loader of like semantics, by median; times: penstock / the other"
    touched = dict.fromkeys(contest.scenario for contest in found.contests if contest.touched)
    if touched:
        caption += f". Time to the last byte touched: {', '.join(touched)}; the others: the load alone"
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="matrix")
    return join(tag("p", caption, class_="note"), tables.scroll(table, caption))


def _cell(contests: list[Contest], to: str) -> Html:
    """One contest with its medians, or several in a line each."""
    told = []
    for contest in contests:
        sign = tag("span", "✓" if contest.first else "✕", class_=f"sign {'good' if contest.first else 'bad'}")
        medians = f"{duration(contest.ours[contest.key])} / {duration(contest.rival[contest.key])}"
        told.append(tag("b", f"{digits(contest.times)}× ", sign))
        told.append(tag("small", medians if len(contests) == 1 else contest.what or "first loads", title=medians))
    link = tag("a", *told, href=f"#{to}", class_=None if len(contests) == 1 else "several")
    return tag("td", link, class_="good" if all(contest.first for contest in contests) else "bad")


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
        " (to the last byte touched)" if contest.touched else "",
        f": {contest.rival['contestant']} takes {duration(contest.rival[contest.key])}, ",
        f"{contest.ours['contestant']} {duration(contest.ours[contest.key])}{overlap}",
    )
