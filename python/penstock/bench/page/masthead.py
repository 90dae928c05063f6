"""The head of the page: whose figures these are, and the way to them."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

from ...page.markup import Html, anchor, join, tag
from ...page.units import size
from .findings import sections


def masthead(results: dict[str, Any]) -> Html:
    """Machine, versions, command, date and load averages, so that a reader sees where the figures come from."""
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


def bar(results: dict[str, Any]) -> Html:
    """Links to the sections, and the switch between seconds and rates."""
    links = [("#verdict", "Verdict")]
    links += [(f"#{anchor(c)}", checkpoint) for c, checkpoint in enumerate(sections(results.get("rows", [])))]
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
