"""Rows of results as HTML tables: figures in one unit per column, aligned to the right, sortable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...page.markup import Html, join, tag
from ...page.units import SIZES, TIMES, places, rate, size, unit_for
from ..results import TOUCHED
from .findings import SEMANTICS, Row, alike, ceiling_name


@dataclass(frozen=True)
class Column:
    """One column: what it is called, where its value is, and what kind of value that is."""

    title: str
    key: str
    kind: str = "text"  # load (seconds, in one unit for all such columns), seconds, bytes, number or text
    told: Callable[[Any], str] = str
    about: str = ""

    def value(self, row: Row) -> Any:
        return row.get(self.key)


COLUMNS = (
    Column("like", "semantics", told=lambda what: SEMANTICS.get(what, str(what)), about="what it is compared with"),
    Column("median", "median_s", "load"),
    Column("min", "min_s", "load"),
    Column("max", "max_s", "load"),
    Column("p99", "p99_s", "load", about="99 of 100 later loads took no longer"),
    Column("later", "later_s", "load", about="median of the later loads of the same process"),
    Column("GB/s", "gb_per_s", "number"),
    Column("ceiling", "ceiling", told=lambda name: ceiling_name(str(name)), about="what bounds it on this machine"),
    Column("share", "share", "number", about="of that ceiling"),
    Column("first tensor", "first_tensor_s", "seconds"),
    Column("open", "open_s", "seconds"),
    Column("load", "load_s", "seconds"),
    Column("touch", "touch_s", "seconds", about="reading one byte of every page afterwards"),
    Column("CPU", "cpu_s", "seconds", about="processor time of the load, all threads"),
    Column("CPU per GB", "cpu_s_per_gb", "seconds"),
    Column("memory", "memory", "bytes", about="peak of anonymous and shared memory beyond what there was before"),
    Column("pinned", "pinned", "bytes"),
    Column("device memory", "device_memory", "bytes", about="peak allocated beyond the weights"),
    Column("cache left", "cache_left", "bytes", about="of the files, in the page cache afterwards"),
    Column("set-up", "setup_s", "seconds", about="imports and context creation, not part of the load"),
    Column("first start", "first_s", "seconds", about="the load before a second start, touch included"),
    Column("fill", "fill_s", "seconds", about="filling the page cache after the first start, in the background"),
    Column("warm", "warm_s", "seconds", about="a warm load of the same run, beside the second start"),
    Column("loads", "loads", "number"),
    Column("every byte", "verified", told=lambda same: "verified" if same else "different"),
    Column("settings", "settings"),
    Column("fault", "fault", about="faster than its ceiling: the measurement is wrong"),
    Column("error", "error"),
)  # fmt: skip
#: The first columns of a table that is ranked by the last byte touched, instead of the median and the load.
_TO_LAST_BYTE = (
    Column("to last byte", "median_s", "load", about="median: the load, then one byte of every page touched"),
    Column("load alone", "load_s", "load", about="median, without the touch"),
)
#: Columns that a quick run, which judges nothing, has none of.
JUDGING = ("ceiling", "share", "fault")
#: Columns whose text may be long: they wrap.
LONG = ("settings", "fault", "error")


def scroll(table: Html, label: str) -> Html:
    """A box in which a wide table scrolls, reached by keyboard too."""
    return tag("div", table, class_="scroll", role="region", aria_label=label, tabindex="0")


def _cells(chosen: Column, rows: list[Row]) -> tuple[Html, list[Html]]:
    """The heading of a column, with its unit, and its cells."""
    values = [chosen.value(row) for row in rows]
    if chosen.kind == "text":
        texts = ["" if value is None else chosen.told(value) for value in values]
        kind = "text" if chosen.key in LONG else "left"
        cells = [tag("td", text or "–", class_=kind if text else "left none", data_value=text) for text in texts]
        return join(chosen.title), cells
    numbers = [float(value) for value in values if value is not None]
    # seconds of loads stand side by side: one unit and one number of decimals for all of them
    beside = [float(row[other.key]) for other in COLUMNS if other.kind == "load" for row in rows if row.get(other.key)]
    reference = beside if chosen.kind == "load" else numbers
    units = {"load": TIMES, "seconds": TIMES, "bytes": SIZES}.get(chosen.kind, (("", 1.0),))
    unit, scale = unit_for(reference, units)
    whole = chosen.kind == "number" and all(number == int(number) for number in numbers)
    decimals = 0 if whole else places([number / scale for number in reference])
    main = "main" if chosen.key == "median_s" else None
    cells = [
        tag("td", "–", class_="none", data_value="")
        if value is None
        else tag("td", f"{float(value) / scale:,.{decimals}f}", class_=main, data_value=value)
        for value in values
    ]
    return join(chosen.title, tag("small", unit) if unit else None), cells


def in_order(rows: list[Row]) -> list[Row]:
    """Loaders that give the like together, the fastest first and what failed last; then ceilings."""

    def speed(row: Row) -> tuple[bool, float]:
        return row.get("median_s") is None, float(row.get("median_s") or 0.0)

    loaders = [row for group in alike(rows).values() for row in sorted(group, key=speed)]
    return loaders + sorted((row for row in rows if row.get("kind") == "ceiling"), key=speed)


def results_table(rows: list[Row], label: str, in_turn: bool = False) -> Html:
    """Everything that is known of the loads of one scenario; columns without a value are left out.

    The fastest comes first, except with `in_turn`: then rows stand as they were measured, without what judges them.
    """
    rows = rows if in_turn else in_order(rows)
    known = [chosen for chosen in COLUMNS if not (in_turn and chosen.key in JUDGING)]
    if any(row.get("ranked") == TOUCHED for row in rows):
        place = [chosen.key for chosen in known].index("median_s")
        kept = [chosen for chosen in known if chosen.key not in ("median_s", "load_s")]
        known = [*kept[:place], *_TO_LAST_BYTE, *kept[place:]]
    columns = [chosen for chosen in known if any(chosen.value(row) is not None for row in rows)]
    made = [_cells(chosen, rows) for chosen in columns]
    head = [tag("th", tag("button", "contestant", type="button"), scope="col", class_="left")]
    for chosen, (title, _) in zip(columns, made, strict=True):
        button = tag("button", title, type="button", title=chosen.about or None)
        head.append(tag("th", button, scope="col", class_="left" if chosen.kind == "text" else None))
    body = []
    for number, row in enumerate(rows):
        name = str(row["contestant"])
        lead = tag("th", name, scope="row", data_value=name)
        kind = {"penstock": "ours", "ceiling": "ceiling"}.get(str(row.get("kind")))
        body.append(tag("tr", lead, *(cells[number] for _, cells in made), class_=kind))
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body), class_="stick")
    return scroll(table, label)


def plain_table(head: list[str], rows: list[list[object]], label: str, numbers: tuple[int, ...] = ()) -> Html:
    """A small table; the columns named in `numbers` are aligned to the right."""

    def cell(place: int, value: object) -> Html:
        return tag("td", value, class_=None if place in numbers else "left")

    heads = [tag("th", title, scope="col", class_=None if i in numbers else "left") for i, title in enumerate(head)]
    body = [tag("tr", *(cell(place, value) for place, value in enumerate(row))) for row in rows]
    return scroll(tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body)), label)


def bounds_table(bounds: list[Row]) -> Html:
    def verdict(bound: Row) -> Html:
        if not bound.get("judged"):
            return join("not judged")
        good = bound["holds"]
        return join(
            tag("span", "✓" if good else "✕", class_=f"sign {'good' if good else 'bad'}"),
            " ",
            "holds" if good else "missed",
        )

    rows: list[list[object]] = [
        [
            bound["checkpoint"], bound["claim"], f"{bound['value']:,.3g}",
            f"{'≥' if bound['sign'] == '>=' else '≤'} {bound['bound']:g}", verdict(bound),
        ]
        for bound in bounds
    ]  # fmt: skip
    return plain_table(["checkpoint", "bound", "found", "wanted", ""], rows, "Every bound", numbers=(2, 3))


def calibration_table(calibration: list[Row]) -> Html:
    """Each setting that was tried for a ceiling, fastest first; the fastest is the one that the run used."""
    known = ("checkpoint", "measure", "bytes", "seconds")
    groups: dict[tuple[str, str], list[Row]] = {}
    for tried in calibration:
        groups.setdefault((str(tried["checkpoint"]), str(tried["measure"])), []).append(tried)
    rows: list[list[object]] = []
    for (checkpoint, measure), group in groups.items():
        group = sorted(group, key=lambda tried: float(tried["seconds"]))
        for number, tried in enumerate(group):
            settings = ", ".join(f"{key} {_setting(key, tried[key])}" for key in tried if key not in known)
            cells: list[object] = [checkpoint, measure, settings, size(tried["bytes"]), f"{tried['seconds']:,.4f}"]
            cells.append(rate(tried["bytes"] / tried["seconds"]))
            rows.append([tag("b", cell) if number == 0 else cell for cell in cells])
    head = ["checkpoint", "ceiling", "settings", "bytes", "seconds", "rate"]
    return plain_table(head, rows, "Calibration of the ceilings", numbers=(3, 4, 5))


def _setting(key: str, value: Any) -> str:
    if key == "block" and isinstance(value, int) and value % (1 << 20) == 0:
        return f"{value >> 20} MiB"
    return str(value)
