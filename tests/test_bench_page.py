"""The page of `penstock bench --html`: what it says, what it never does, and how it looks in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import made_up
import pytest
from browser import Browser, program

pytest.importorskip("plotly", reason="the page is drawn by plotly")

from penstock.bench.page import document, findings, write_page
from penstock.bench.scenarios import SCENARIOS
from penstock.page import lanes, markup, theme, timeline, write_trace

EVIL = '<script>document.title="caught"</script><img src=x onerror="document.title=1">'


class Parsed(HTMLParser):
    """The elements of a page with their attributes, the text outside scripts, and the scripts."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles = ""
        self.headings: list[tuple[str, str | None]] = []
        self._inside = ""
        self.feed(page.read_text("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        elif tag == "button":
            self._inside, about = tag, dict(attrs).get("title")
            self.headings.append(("", about))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = attrs, text + data
        elif self._inside == "style":
            self.styles += data
        else:
            if self._inside == "button":
                text, about = self.headings[-1]
                self.headings[-1] = text + data, about
            self.text += data + " "

    @property
    def figures(self) -> list[dict[str, Any]]:
        """What the script draws: one entry per chart, its figures by name."""
        return [json.loads(text) for attrs, text in self.scripts if attrs.get("type") and "id" not in attrs]


def write(folder: Path, results: dict[str, Any] | None = None) -> Path:
    page = folder / "page.html"
    write_page(made_up.results() if results is None else results, page)
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def parsed(page: Path) -> Parsed:
    return Parsed(page)


# what it says


def test_says_whose_figures_they_are(parsed: Parsed) -> None:
    for told in (
        "Made-up CPU", "4 cores", "Linux 0.0", "ext4", "Python", "3.11.0", "rival", "1.2", "penstock bench --made-up",
        "2 January 2026", "03:04 UTC", "3.50", "2.25",
    ):  # fmt: skip
        assert told in parsed.text, told
    assert "not quiet" in parsed.text  # 3.5 on 4 cores before it began
    assert "quick run" not in parsed.text.lower()


def test_a_quick_run_says_that_it_is_no_basis(tmp_path: Path) -> None:
    results = made_up.results() | {"quick": True}
    results["bounds"] = [bound | {"judged": False} for bound in results["bounds"]]
    page = Parsed(write(tmp_path, results))
    assert "A quick run" in page.text
    assert "2 not judged" in page.text
    cards = [
        attributes["class"] for _, attributes in page.elements if (attributes.get("class") or "").startswith("card")
    ]
    assert cards[1:] == ["card", "card", "card bad", "card bad"]  # neither bounds nor who is first
    assert "a quick run ranks no loader" in page.text
    assert "as fast" not in page.text
    assert "share" not in [text for text, _ in page.headings]
    assert len(page.figures) == 1  # the timeline: bars beside each other would rank


def test_says_plainly_what_is_not_as_one_would_wish(parsed: Parsed) -> None:
    text = re.sub(r"\s+", " ", parsed.text)
    assert "a, warm : rival takes 3.00 ms, penstock 12.0 ms" in text
    assert "cold: share: 0.8 , wanted at least 0.9" in text
    assert "above direct" in text
    assert "RuntimeError: no room" in text
    assert "No module named 'absent_one'" in text


def test_contests_are_penstock_as_it_comes_beside_the_fastest_of_like_semantics() -> None:
    rows = made_up.results()["rows"]
    rows.append(made_up.row("a", "cold", "slow rival", "rival", [9.0]))
    rows.append(made_up.row("a", "cold", "private rival", "rival", [0.1], semantics="private"))
    found = {(k.checkpoint, k.scenario): k for k in findings.contests(rows) if k.semantics == "any"}
    assert set(found) == {("a", "cold"), ("a", "warm"), ("b", "cold")}
    [private] = [k for k in findings.contests(rows) if k.semantics == "private"]  # none without penstock in it
    assert (private.checkpoint, private.ours["contestant"], private.what) == ("b", "penstock copy", "private memory")
    assert found["a", "cold"].ours["contestant"] == "penstock"  # not the forced route, which is faster here
    assert found["a", "cold"].times == pytest.approx(2.0)
    assert not found["a", "warm"].first
    assert not found["a", "warm"].overlap


def test_spreads_that_overlap_are_called_so() -> None:
    rows = [
        made_up.row("a", "cold", "penstock", "penstock", [1.0, 1.2, 1.4]),
        made_up.row("a", "cold", "rival", "rival", [1.0, 1.1, 1.3]),
    ]
    [contest] = findings.contests(rows)
    assert not contest.first
    assert contest.overlap


def test_later_loads_are_a_contest_of_their_own() -> None:
    rows = [
        made_up.row("a", "warm", "penstock", "penstock", [1.0], later_s=0.5),
        made_up.row("a", "warm", "rival", "rival", [2.0], later_s=0.4),
    ]
    assert [(k.loads, k.first) for k in findings.contests(rows)] == [("first", True), ("later", False)]


def test_every_load_is_a_dot_and_the_spread_is_the_slowest_and_the_fastest(parsed: Parsed) -> None:
    chart = parsed.figures[0]["seconds"]
    [ours] = [trace for trace in chart["data"] if trace["name"] == "penstock"]
    assert ours["x"] == [0.9, 1.0]  # medians of both of penstock's rows, the fastest first
    assert ours["error_x"]["array"] == pytest.approx([0.1, 0.1])
    [dots] = [trace for trace in chart["data"] if trace["name"] == "loads"]
    assert sorted(dots["x"]) == pytest.approx(sorted([0.9, 1.0, 1.1, 0.8, 0.9, 1.0, 1.9, 2.0, 2.1]))
    [later] = [trace for trace in chart["data"] if trace["name"] == "later"]
    assert later["x"] == [0.95]


def test_says_which_time_is_ranked(parsed: Parsed) -> None:
    text = re.sub(r"\s+", " ", parsed.text)
    assert text.count("Ranked by the time to the last byte touched") == 2  # cold of both checkpoints
    assert text.count("Ranked by the time of the load alone") == 1
    assert "rival 2.00 s to the last byte touched" in text
    assert "Time to the last byte touched: cold; the others: the load alone" in text
    assert "cold loads are ranked by the time to the last byte touched" in text  # above the timelines
    titles = [title for title, _ in parsed.headings]
    assert titles.count("to last byte") == titles.count("load alone") == 2
    assert titles.count("median") == 1
    assert titles[titles.index("to last byte") + 1] == "load alone"


def test_bars_of_cold_loads_go_to_the_last_byte_touched_and_show_the_load_alone(parsed: Parsed) -> None:
    chart = parsed.figures[0]["seconds"]
    [ours] = [trace for trace in chart["data"] if trace["name"] == "penstock"]
    assert ours["x"] == [0.9, 1.0]
    [alone] = [trace for trace in chart["data"] if trace["name"] == "load alone"]
    assert alone["x"] == pytest.approx([0.45, 0.5, 1.0])
    assert "to the last byte touched" in ours["hovertext"][0]
    assert not [trace for trace in parsed.figures[1]["seconds"]["data"] if trace["name"] == "load alone"]


def test_results_that_were_ranked_by_the_load_alone_still_say_so(tmp_path: Path) -> None:
    results = made_up.results() | {"schema": 2}
    for row in results["rows"]:
        for key in ("ranked", "load_s", "touch_s", "ceiling_s"):
            row.pop(key, None)
    text = Parsed(write(tmp_path, results)).text
    assert text.count("Ranked by the time of the load alone") == 3
    assert "Ranked by the time to the last byte" not in text
    assert "mapped and touched" not in text  # nobody saw to the memory before


def lines(chart: dict[str, Any]) -> dict[str, float]:
    return {
        shape["name"].removeprefix("ceiling: "): shape["x0"]
        for shape in chart["layout"]["shapes"]
        if shape.get("name", "").startswith("ceiling")
    }


@pytest.mark.parametrize("of", ["made up", "raw reads of their own", "another size"])
def test_a_bars_share_is_of_the_ceiling_that_is_drawn(of: str, tmp_path: Path) -> None:
    results = made_up.results()
    if of == "raw reads of their own":  # before each load the disk was as fast as it happened to be
        for run in results["runs"]:
            run |= {"bytes": made_up.GB, "kind": "rival", "raw_s": 0.5 if run["contestant"] == "rival" else 0.8}
    elif of == "another size":  # a ceiling that moved half of the bytes
        for row in results["rows"]:
            if row["kind"] == "ceiling":
                row["bytes"] //= 2
    page = Parsed(write(tmp_path, results))
    for number, checkpoint in ((0, "a"), (2, "b")):
        for unit, length in (("seconds", lambda row: row["median_s"]), ("rate", lambda row: row["gb_per_s"])):
            at = lines(page.figures[number][unit])
            for row in results["rows"]:
                if (row["checkpoint"], row["scenario"]) == (checkpoint, "cold") and "share" in row:
                    share = at[row["ceiling"]] / length(row)
                    assert (share if unit == "seconds" else 1 / share) == pytest.approx(row["share"]), row


def test_later_loads_of_a_process_are_marked_apart(parsed: Parsed) -> None:
    chart = {trace["name"]: trace for trace in parsed.figures[2]["seconds"]["data"]}
    assert len(chart["loads"]["x"]) == 12
    assert chart["later loads"]["x"] == [0.5]
    assert chart["later"]["x"] == [0.5]


def test_loaders_that_give_the_like_stand_together(parsed: Parsed) -> None:
    chart = parsed.figures[2]["seconds"]["layout"]
    names = [re.sub("<[^>]*>", "", name) for name in chart["yaxis"]["ticktext"]]
    assert names == ["penstock", "rival", "private rival", "penstock copy", "other"]
    places = chart["yaxis"]["tickvals"]
    failed = places.pop()
    assert places[:2] < [failed] < places[2:]  # other failed, and belongs to the first group
    headings = [a["text"] for a in chart["annotations"] if a["text"] in findings.SEMANTICS.values()]
    assert headings == ["any memory", "private memory"]
    assert not [a for a in parsed.figures[0]["seconds"]["layout"]["annotations"] if "memory" in a["text"]]


def test_every_scenario_of_the_benchmark_is_described() -> None:
    assert set(SCENARIOS) <= set(document.SCENARIOS)


def test_the_rates_are_the_same_loads(parsed: Parsed) -> None:
    chart = parsed.figures[0]["rate"]
    [rival] = [trace for trace in chart["data"] if trace["name"] == "rival"]
    assert rival["x"] == pytest.approx([0.5])
    assert rival["error_x"]["array"] == pytest.approx([1 / 1.9 - 0.5])
    assert rival["error_x"]["arrayminus"] == pytest.approx([0.5 - 1 / 2.1])
    lines = {shape["name"]: shape["x0"] for shape in chart["layout"]["shapes"] if "ceiling" in shape.get("name", "")}
    assert lines == pytest.approx({"ceiling: direct": 1 / 0.8, "ceiling: place": 1 / 0.85})


def test_colours_of_charts_all_have_a_dark_form(parsed: Parsed) -> None:
    assert len(theme.dark_forms()) == len(theme.COLOURS)  # no light colour stands for two roles
    used = set(re.findall(r"#[0-9a-fA-F]{3,8}\b", json.dumps(parsed.figures)))
    assert used
    assert used <= set(theme.dark_forms())


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21, by the definition of the Web Content Accessibility Guidelines 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [0, 1])
def test_text_and_bars_stand_out_from_what_is_behind_them(dark: int) -> None:
    def colour(role: str) -> str:
        return theme.COLOURS[role][dark]

    behind = {"text": ("page", "surface", "accent-soft", "good-soft", "bad-soft"), "accent": ("page", "accent-soft")}
    behind |= {"muted": ("page", "surface", "good-soft", "bad-soft"), "good": ("page", "good-soft")}
    behind |= {"bad": ("page", "bad-soft")}
    for role, grounds in behind.items():
        for ground in grounds:
            assert contrast(colour(role), colour(ground)) >= 4.5, (role, ground)
    for role in ("accent", "neutral", "direct", "buffered", "copy", "device"):
        assert contrast(colour(role), colour("page")) >= 2.9, role


@pytest.mark.parametrize("absent", ["traces", "calibration", "bounds", "runs", "absent", "checkpoints", "rows"])
def test_parts_that_are_not_there_are_left_out(absent: str, tmp_path: Path) -> None:
    results = made_up.results()
    del results[absent]
    assert Parsed(write(tmp_path, results)).elements


def test_results_of_another_schema_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="schemas 2 and 3, and these are of schema 1"):
        write_page(made_up.results() | {"schema": 1}, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_without_plotly_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ModuleNotFoundError, match="pip install plotly"):
        write(tmp_path)


# what it never does


def test_nothing_is_fetched_from_anywhere(parsed: Parsed) -> None:
    for element, attributes in parsed.elements:
        assert element not in ("link", "iframe", "object", "embed", "img", "base", "form"), element
        for name in ("src", "srcset", "action", "data", "background", "poster"):
            assert name not in attributes, (element, attributes)
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), attributes
        assert "url(" not in (attributes.get("style") or "")
    assert "url(" not in parsed.styles
    assert "@import" not in parsed.styles
    [policy] = [a["content"] for e, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy


def test_plotly_is_inside_once(parsed: Parsed) -> None:
    run = [text for attributes, text in parsed.scripts if not attributes.get("type")]
    assert [len(text) > 1_000_000 for text in run] == [True, False]


def evil() -> dict[str, Any]:
    """Results in which every text that comes from outside tries to be HTML."""
    results = made_up.results()
    rename = {"rival": f"rival {EVIL}", "a": f"a {EVIL}", "cold": f"cold {EVIL}", "direct": f"direct {EVIL}"}

    def spoiled(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {
                rename.get(k, k) if key in ("checkpoints", "absent") else k: spoiled(v, k) for k, v in value.items()
            }
        if isinstance(value, list):
            return [spoiled(each, key) for each in value]
        if isinstance(value, str) and key not in ("time", "sign", "kind", "ph", "cat", "schema"):
            return rename.get(value, value if value.startswith("ceiling") else f"{value} {EVIL}")
        return value

    found = {key: spoiled(value, key) for key, value in results.items()}
    for row in found["rows"]:
        row["contestant"] = (
            row["contestant"].removesuffix(f" {EVIL}") if "penstock" in row["contestant"] else row["contestant"]
        )
    for event in found["traces"][0]["trace"]["traceEvents"]:  # what makes it a trace
        event["name"] = "thread_name" if event["ph"] == "M" else event["name"]
    return found


def test_names_are_shown_and_never_become_elements(tmp_path: Path) -> None:
    plain, spoiled = Parsed(write(tmp_path)), Parsed(write(tmp_path, evil()))
    assert spoiled.text.count("onerror") > 10
    assert not [element for element, _ in spoiled.elements if element == "img"]
    # the same scripts to run, and each chart's data is still one whole document
    run = [[text for attributes, text in page.scripts if not attributes.get("type")] for page in (plain, spoiled)]
    assert run[0] == run[1]
    drawn = json.dumps(spoiled.figures)
    assert "&lt;script&gt;" in drawn
    assert "<script" not in drawn
    assert "<img" not in drawn


def test_nothing_in_the_data_of_a_chart_ends_its_element() -> None:
    made = markup.data({"name": "</script><!-- & \u2028"})
    assert made.count("<") == 2
    assert "\u2028" not in made
    assert json.loads(made[made.index(">") + 1 : made.rindex("<")]) == {"name": "</script><!-- & \u2028"}


# one load over time


def test_the_sentence_above_a_timeline_adds_up_what_overlaps_once() -> None:
    def event(tid: int, ts: float, dur: float, cat: str = "direct", name: str = "read") -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": {"bytes": 10}}

    names = {1: "read 0", 2: "read 1", 3: "copy 0", 4: "engine"}
    trace = {
        "otherData": {"report": {"bottleneck": "source", "seconds": 1e-3}},
        "traceEvents": [
            *({"ph": "M", "name": "thread_name", "pid": 1, "tid": t, "args": {"name": n}} for t, n in names.items()),
            event(1, 0, 500), event(2, 300, 400), event(3, 900, 100, "copy", "copy"),
            event(4, 0, 300, "wait", "wait: source"), event(4, 400, 50, "wait", "wait: device"),
        ],
    }  # fmt: skip
    found = timeline.summarise(trace)
    assert found.total == pytest.approx(1e-3)
    assert found.reading == pytest.approx(0.7)
    assert found.copies == pytest.approx(0.1)
    assert found.waiting == pytest.approx(0.35)
    assert found.waited_for == "source"
    assert found.sentence() == (
        "1.00 ms in total, bound by source. Reads under way 70% of the time, copies 10%; "
        "the engine waited 35%, most of it for source."
    )
    assert [lane.name for lane in timeline.lanes(trace)] == ["engine", "read 0", "read 1", "copy 0"]


def test_ten_thousand_events_are_few_bars_and_none_is_lost() -> None:
    trace = made_up.trace(extent=50_000, readers=32)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) > 40_000
    figure = lanes.figure(trace)
    bars = [
        (t["y"][i], b, b + x)
        for t in figure["data"]
        if t["type"] == "bar"
        for i, (b, x) in enumerate(zip(t["base"], t["x"], strict=True))
    ]
    assert len(bars) < 6_000
    assert len(json.dumps(figure)) < 1_500_000
    found = timeline.lanes(trace)
    step = timeline.summarise(trace, found).total * 1e6 / timeline.STEPS
    drawn = [bar for lane in found for bar in timeline.drawn_together(lane.events, step)]
    assert sum(len(bar.events) for bar in drawn) == len(events)
    assert sum(event.nbytes for bar in drawn for event in bar.events) == sum(e["args"].get("bytes", 0) for e in events)


def test_long_events_are_not_drawn_together() -> None:
    events = [timeline.Event("read", "direct", begin, begin + 10.0) for begin in (0.0, 10.1, 20.2)]
    assert len(timeline.drawn_together(events, step=1.0)) == 3
    [one] = timeline.drawn_together(events, step=5.0)
    assert one.busy == pytest.approx(30.0)


def test_a_trace_has_a_page_of_its_own(tmp_path: Path) -> None:
    write_trace(made_up.trace(), tmp_path / "trace.html", f"Load of {EVIL}")
    found = Parsed(tmp_path / "trace.html")
    assert "bound by source" in found.text
    assert len(found.figures) == 1
    assert not [element for element, _ in found.elements if element == "img"]
    with pytest.raises(ValueError, match="traceEvents"):
        write_trace({}, tmp_path / "none.html")


def test_the_disks_ceiling_is_drawn_above_a_timeline(parsed: Parsed, tmp_path: Path) -> None:
    def ceiling(page: Parsed) -> list[float]:
        layout = page.figures[-1]["lanes"]["layout"]
        assert all(shape["y0"] < layout["yaxis2"]["range"][1] for shape in layout["shapes"])
        return [shape["y0"] for shape in layout["shapes"] if shape["name"] == "ceiling: disk"]

    # Of a benchmark: the fastest raw read of the checkpoint's files, 1 GB in 0.8 s
    assert ceiling(parsed) == [pytest.approx(1.25)]
    write_trace(made_up.trace(), tmp_path / "trace.html", disk=7.5e9)
    page = Parsed(tmp_path / "trace.html")
    assert ceiling(page) == [7.5]
    assert "The disk's ceiling: 7.50 GB/s" in page.text
    write_trace(made_up.trace(), tmp_path / "trace.html", disk="the files are gone")
    page = Parsed(tmp_path / "trace.html")
    assert ceiling(page) == []
    assert "The disk's ceiling is not drawn: the files are gone" in page.text


def test_warm_loads_have_no_line_for_the_disk(tmp_path: Path) -> None:
    results = made_up.results()
    results["traces"][0]["scenario"] = "warm"
    layout = Parsed(write(tmp_path, results)).figures[-1]["lanes"]["layout"]
    assert "ceiling: disk" not in [shape["name"] for shape in layout["shapes"]]


def test_the_command_line_measures_the_disk_of_a_load(cli: Any, big: Path, tmp_path: Path) -> None:
    trace, page, checkpoint = tmp_path / "trace.json", tmp_path / "page.html", tmp_path / "a.safetensors"
    shutil.copy(big, checkpoint)
    assert cli("load", checkpoint, "--trace", trace).returncode == 0
    for arguments, told in (
        ([], r"The disk's ceiling: .* GB/s|The disk's ceiling is not drawn: "),  # a file system without O_DIRECT
        (["--no-measure"], "is not drawn: it was not measured"),
    ):
        done = cli("trace", trace, "--html", page, *arguments)
        assert done.returncode == 0, done.stderr
        assert re.search(told, Parsed(page).text)
    checkpoint.unlink()
    assert cli("trace", trace, "--html", page).returncode == 0
    assert "No such file" in Parsed(page).text


def test_the_command_line_tells_what_bounded_a_load(cli: Any, tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    trace.write_text(json.dumps(made_up.trace()))
    done = cli("trace", trace, "--html", page)
    assert done.returncode == 0, done.stderr
    assert "bound by source. Reads under way" in done.stdout
    assert len(Parsed(page).figures) == 1
    assert json.loads(cli("trace", trace, "--json").stdout)["bound_by"] == "source"
    trace.write_text('{"traceEvents": 3}')
    done = cli("trace", trace)
    assert done.returncode == 2
    assert str(trace) in done.stderr


# in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = program()
    if path is None:
        pytest.skip("no Chromium here: neither chromium nor google-chrome is on the PATH")
    found = Browser(path)
    yield found
    found.close()


DRAWN = "[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('.main-svg'))"


def draw(browser: Browser) -> None:
    """Scrolls through the page as a reader does: charts are drawn as they come into view."""
    count = browser.evaluate("document.querySelectorAll('.plot').length")
    for number in range(count):
        plot = f"document.querySelectorAll('.plot')[{number}]"
        browser.evaluate(f"{plot}.scrollIntoView()")
        browser.wait(f"{plot}.querySelector('.main-svg') !== null")


@pytest.mark.parametrize(("dark", "width", "phone"), [(False, 1280, False), (True, 1280, False), (False, 390, True)])
def test_opens_without_a_complaint_and_fits(browser: Browser, page: Path, dark: bool, width: int, phone: bool) -> None:
    browser.open(page, width=width, dark=dark, phone=phone)
    draw(browser)
    assert browser.problems == []
    assert [url[:60] for url in browser.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    small = browser.evaluate("""
        [...document.querySelectorAll("body *")].filter((e) => !e.closest("script, style, .modebar, noscript")
            && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())
            && parseFloat(getComputedStyle(e).fontSize) < 12).map((e) => e.outerHTML.slice(0, 120))
    """)
    assert small == []
    cut = browser.evaluate("""
        [...document.querySelectorAll(".plot text")].filter((text) => {
            const box = text.getBoundingClientRect(), plot = text.closest(".plot").getBoundingClientRect();
            return box.width && (box.left < plot.left - 1 || box.right > plot.right + 1 || box.top < plot.top - 1);
        }).map((text) => text.textContent)
    """)
    assert cut == []


def test_draws_a_bar_for_every_row_and_a_line_for_every_ceiling(browser: Browser, page: Path) -> None:
    browser.open(page)
    draw(browser)
    bars = browser.evaluate(
        "[...document.querySelectorAll('.plot')].map((p) => p.querySelectorAll('.barlayer .point').length)"
    )
    assert bars[:3] == [3, 2, 4]
    assert len(bars) == 4
    assert bars[3] > 200  # the timeline of 239 extents, read and copied
    named = "at = document.querySelectorAll('.plot')[%d]; (at.layout.shapes || []).map((shape) => shape.name || '')"
    lines = [browser.evaluate(named % number) for number in range(3)]
    ceilings = [sorted(name for name in names if name.startswith("ceiling")) for names in lines]
    # the last one is no row: the raw read is timed right before each load
    assert ceilings == [["ceiling: direct", "ceiling: place"], [], ["ceiling: direct"]]
    drawn = "document.querySelectorAll('.plot')[0].querySelectorAll('.shapelayer path').length"
    assert browser.evaluate(drawn) == 4  # two lines, the spread of one of them, and what joins one to its name
    text = browser.evaluate("document.querySelectorAll('.plot')[0].textContent")
    for told in ("penstock uring", "rival", "ceiling direct 800 ms", "1.00 s", "seconds, shorter is better"):
        assert told in text, told
    assert "failed: RuntimeError: no room" in browser.evaluate("document.querySelectorAll('.plot')[2].textContent")


def test_the_switch_turns_seconds_into_rates(browser: Browser, page: Path) -> None:
    browser.open(page)
    draw(browser)
    browser.evaluate("document.querySelector('button[value=rate]').click()")
    browser.wait("document.querySelector('.plot').textContent.includes('GB/s, longer is better')")
    text = browser.evaluate("document.querySelector('.plot').textContent")
    assert "1.00 GB/s" in text
    assert browser.evaluate("document.querySelector('button[value=rate]').ariaPressed") == "true"
    assert browser.problems == []


def test_a_pointer_on_a_lane_names_file_offset_and_bytes(browser: Browser, page: Path) -> None:
    browser.open(page)
    draw(browser)
    x, y = browser.evaluate("""(() => {
        const lanes = document.querySelectorAll(".plot")[3];
        lanes.scrollIntoView({ block: "center", behavior: "instant" });
        const read = lanes.data.findIndex((trace) => trace.name === "direct");
        const bar = lanes.querySelectorAll(".barlayer .trace")[read].querySelectorAll("path")[20];
        const box = bar.getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2];
    })()""")
    for nudge in (-1, 0):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + nudge, y=y)
    browser.wait("document.querySelector('.hoverlayer .hovertext') !== null")
    told = browser.evaluate("document.querySelector('.hoverlayer .hovertext').textContent")
    assert re.search(r"read \d.*\+ .*ms.*MB, .*GB/s.*model\.safetensors at [\d,]+", told), told


def test_charts_follow_the_readers_colours(browser: Browser, page: Path) -> None:
    shown = "getComputedStyle(document.querySelector('.barlayer .point path')).fill"

    def colour(which: int) -> str:
        red, green, blue = (int(theme.COLOURS["accent"][which][i : i + 2], 16) for i in (1, 3, 5))
        return f"rgb({red}, {green}, {blue})"

    browser.open(page)
    draw(browser)
    assert browser.evaluate(shown) == colour(0)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.wait(f"{shown} === '{colour(1)}'")
    assert browser.problems == []


def test_a_click_on_a_heading_sorts(browser: Browser, page: Path) -> None:
    browser.open(page)
    names = "[...document.querySelector('#c0-s0 tbody').rows].map((row) => row.cells[0].textContent)"
    assert browser.evaluate(names)[0] == "penstock uring"
    heading = "[...document.querySelectorAll('#c0-s0 th button')].find((b) => b.textContent.startsWith('to last'))"
    browser.evaluate(f"{heading}.click()")
    ascending = browser.evaluate(names)
    assert ascending[0] == "ceiling: direct"
    browser.evaluate(f"{heading}.click()")
    assert browser.evaluate(names) == ascending[::-1]
    assert browser.evaluate(names)[0] == "rival"


def test_prints_every_chart_in_light_colours(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.open(page, dark=True)
    browser.evaluate("""addEventListener("beforeprint", () => setTimeout(() => {}, 0));
        addEventListener("beforeprint", () => { window.printed = [...document.querySelectorAll(".plot")].map(
            (p) => [p.querySelectorAll(".main-svg").length > 0, p.layout.paper_bgcolor, p.layout.width]); })""")
    browser.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    printed = browser.evaluate("window.printed")
    assert len(printed) == 4
    assert all(drawn and colour == theme.light("page") for drawn, colour, _ in printed)
    assert browser.problems == []


def test_names_that_try_to_be_html_do_nothing_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    browser.open(write(tmp_path, evil()))
    draw(browser)
    title = browser.evaluate("document.title")
    assert title.startswith("Penstock benchmark")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.problems == []
    assert "<script>" in browser.evaluate("document.querySelector('.plot').textContent")
