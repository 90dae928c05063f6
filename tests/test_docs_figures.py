"""Figures of README and docs come from the kept results in `benches/results`: each table of times, number by number.

A table that is not in `CHECKS` and has times is an error: keep its result, or take it out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from doc_figures import LOADERS, OURS, TOP, Table, check_loads, fits, kept, rows_of, scenario_of, tables
from penstock.bench import presets

#: Documents whose figures are of whole loads. `performance-notes.md` is a log of single experiments, and says so.
DOCUMENTS = ("README.md", "docs/benchmarks.md", "docs/engines.md", "docs/guides.md", "docs/tuning.md")


def program(name: str) -> ModuleType:
    """A program of `benches`."""
    path = TOP / "benches" / f"{name}.py"
    specification = importlib.util.spec_from_file_location(f"benches_{name}", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module  # dataclasses look there
    sys.path.insert(0, str(path.parent))
    try:
        specification.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def check_summary(table: Table) -> None:
    """The tables that `benches/readme.py` makes; `test_bench_results.py` has the same for whole documents."""
    name = "short" if table.document == "README.md" else "cold"
    readme = program("readme")
    made = readme.TABLES[name](readme.figures(kept("two-core-vm-summary"))).splitlines()
    assert [f"| {' | '.join(row)} |" for row in table.rows] == made[2:]


def shown(benchmark: str, result: str) -> list[str]:
    """What a program of `benches` prints of a kept result with `--tables`."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        program(benchmark).show(kept(result))
    return out.getvalue().splitlines()


def check_shown(table: Table, benchmark: str, results: Sequence[str]) -> None:
    """What `benches/NAME.py --tables` prints."""
    lines = [line for result in results for line in shown(benchmark, result)]
    for row in table.rows:
        assert f"| {' | '.join(row)} |" in lines, f"{table.place}: {row[0]}"


def check_processor(table: Table) -> None:
    """Processor seconds per GB of GPT-2."""
    rows = rows_of("two-core-vm")
    for first, ours, others in table.rows:
        scenario, semantics = scenario_of(first)
        assert fits(ours, rows["gpt2", scenario, OURS[semantics]]["cpu_s_per_gb"]), f"{table.place}: {first}"
        for one in others.split(", "):
            name, _, value = one.replace("`", "").rpartition(" ")
            theirs = rows["gpt2", scenario, LOADERS.get(name, name)]
            assert fits(value, theirs["cpu_s_per_gb"]), f"{table.place}: {first}, {one}"


def check_cold_copies(table: Table) -> None:
    rows = rows_of("two-core-vm-cold-copies")
    named = {
        'penstock, `cache="bypass"`': "penstock bypass",
        'penstock, `cache="auto"`': "penstock copy",
        'penstock, `cache="keep"`': "penstock copy keep",
    }
    for first, seconds, processor, left in table.rows:
        row = rows["dense", "cold", named.get(first, LOADERS.get(first, first))]
        told = re.match(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)(?:, ([\d.]+) of `(\w+)`)?", seconds)
        assert told is not None, seconds
        for text, key in zip(told.groups()[:3], ("median_s", "min_s", "max_s"), strict=True):
            assert fits(text, row[key]), f"{table.place}: {first}"
        if told[4] is not None:
            assert fits(told[4], row["share"]) and told[5] == row["ceiling"]
        left = left if left.endswith(" MB") else f"{left} MB"
        assert fits(processor, row["cpu_s_per_gb"]) and fits(left, row["cache_left"]), f"{table.place}: {first}"


def check_repeats(table: Table) -> None:
    """How many times as fast as the next best, in three runs."""
    for checkpoint, first, *found in table.rows:
        scenario, semantics = scenario_of(first)
        for text, result in zip(found, ("two-core-vm", "two-core-vm-earlier", "two-core-vm-later"), strict=True):
            rows = rows_of(result)
            if not text:
                continue
            ours = rows[checkpoint, scenario, OURS[semantics]]["median_s"]
            best = min(
                row["median_s"]
                for (made, at, _), row in rows.items()
                if (made, at, row.get("semantics"), row["kind"]) == (checkpoint, scenario, semantics, "rival")
                and "median_s" in row
            )
            where = f"{table.place}: {checkpoint}, {first}, {result}"
            assert fits(text, best / ours), f"{where}: {best / ours}"
            assert (best < ours) <= text.startswith("**"), where


def check_save(table: Table) -> None:
    result = kept("two-core-vm-save")
    for first, seconds, rate in table.rows:
        of = result["seconds"][first]
        middle, least, most = re.findall(r"[\d.]+", seconds)
        assert fits(middle, statistics.median(of)) and fits(least, min(of)) and fits(most, max(of)), first
        assert fits(rate, result["nbytes"] / statistics.median(of) / 1e9), first


def check_rocm(table: Table) -> None:
    """What `penstock bench --tables` prints of it."""
    made = presets.comparison(kept("two-core-vm-fastsafetensors-rocm")).splitlines()
    assert [f"| {' | '.join(row)} |" for row in table.rows] == [line for line in made if line.startswith("| ")][1:]


def check_web(table: Table) -> None:
    rows = rows_of("two-core-vm-web")
    named = {
        "bare loop into memory in use": "ceiling: loop touched",
        "penstock, existing tensors": "penstock url load_into",
        "bare loop into new memory": "ceiling: loop",
        "penstock, new tensors": "penstock url",
        "Go into one slice, no tensors": "ceiling: go",
        "Go to the disk, then safetensors": "go to disk, safetensors",
        "Go to `/dev/shm`, then safetensors": "go to memory, safetensors",
        "boto3 to the disk, then safetensors": "boto3 to disk, safetensors",
        "boto3 to `/dev/shm`, then safetensors": "boto3 to memory, safetensors",
        "Run:ai Model Streamer": "runai streamer s3",
    }
    for first, *cells in table.rows:
        plain, tls = (rows["llama-2-70b", scenario, named[first]] for scenario in ("bucket", "bucket-tls"))
        told = [(plain, "median_s"), (plain, "gb_per_s"), (plain, "cpu_s_per_gb"), (plain, "memory")]
        told += [(tls, "median_s"), (tls, "gb_per_s"), (tls, "cpu_s_per_gb")]
        for text, (row, key) in zip(cells, told, strict=True):
            if text:
                assert fits(f"{text} MB" if key == "memory" else text, row[key]), f"{table.place}: {first}, {key}"


def check_links(table: Table) -> None:
    values = [(one["value"], one["bound"]) for one in kept("two-core-vm-links")["found"]]
    assert len(values) == len(table.rows)
    for (first, found, bound), (value, most) in zip(table.rows, values, strict=True):
        assert fits(found, value) and float(bound) == most, f"{table.place}: {first}"


def check_disk_cache(table: Table) -> None:
    result = kept("two-core-vm-disk-cache")
    found = {one["name"]: one for one in reversed(result["found"])}
    for (first, ours, theirs, value, bound), name in zip(
        table.rows, ("cost", "second, cold", "second, warm"), strict=True
    ):
        one = found[name]
        assert fits(f"{ours} s", one["seconds"]) and fits(value, one["value"]), f"{table.place}: {first}"
        assert fits(f"{theirs} s", one.get("plain_seconds", one.get("files_seconds"))), f"{table.place}: {first}"
        assert float(bound) == one["bound"] and one["value"] <= one["bound"], f"{table.place}: {first}"


def check_serve(table: Table) -> None:
    found = kept("two-core-vm-serve")["found"]
    of = {server: [one for one in found if one["server"] == server] for server, *_ in table.rows}
    for server, *cells in table.rows:
        ratios = [theirs["seconds"] / ours["seconds"] for theirs, ours in zip(of["nginx"], of[server], strict=True)]
        values = [statistics.median(one["bytes"] / one["seconds"] / 1e9 for one in of[server])]
        values += [statistics.median(ratios)]
        values += [
            statistics.median(one[key] / one["bytes"] * 1e9 for one in of[server]) for key in ("server_cpu_s", "cpu_s")
        ]
        for text, value in zip(cells, values, strict=True):
            assert fits(text, value), f"{table.place}: {server}"


def check_nodes(table: Table) -> None:
    found = kept("two-core-vm-nodes")["found"]
    times = [one for one in found if one["claim"].startswith("time")]
    assert len(times) == len(table.rows)
    for (first, rate, time, bucket, processor), one in zip(table.rows, times, strict=True):
        sent = [other for other in found if (other["name"], other["gigabits"]) == (one["name"], one["gigabits"])][1:]
        assert float(rate) == one["gigabits"] and fits(time, one["value"]), f"{table.place}: {first}"
        assert [bool(bucket)] * len(sent) == [True] * bool(bucket), f"{table.place}: {first}"
        assert all(fits(bucket, other["value"]) for other in sent), f"{table.place}: {first}"
        told = processor.split(" + ") if processor else []
        assert all(fits(text, one[part]) for text, part in zip(told, ("loads_s", "servers_s"), strict=bool(told)))


def check_ranks(table: Table) -> None:
    result = kept("two-core-vm-ranks")
    rows = {(row["rate"], row["wants"], row["way"]): row for row in result["rows"]}
    wants, rate = "", 0.0
    said = {"all": "dp", "its part (TP=4)": "tp"}
    ways = {"the ranks' choice": "auto", "together": "together", "alone": "alone"}
    for first, disk, way, chosen, *cells in table.rows:
        wants = said.get(first, wants)
        rate = float(disk.partition(" ")[0]) * 1e6 if disk else rate
        warm, _, rest = way.rpartition("warm: ")
        name, _, option = rest.partition(", `cache=")
        key = f"{'warm: ' if warm or way.startswith('warm') else ''}{ways[name]}"
        key += f", {option.strip('`').strip(chr(34))}" if option else ""
        row = rows[rate, wants, key if (rate, wants, key) in rows else key.replace("warm: ", "warm, ")]
        where = f"{table.place}: {wants} {rate:.0f} {way}"
        least = row["median_s"] / (result["nbytes"] / rate)
        for text, value in zip(
            cells,
            (row["median_s"], least, row["disk_bytes"] / 1e9, row["sent_bytes"] / 1e9, row["cpu_s"]),
            strict=True,
        ):
            assert not text or fits(text, value), f"{where}: {text}, kept {value}"
        assert not chosen or set(row["choices"]) == {{"exchange": "on", "alone": "off"}[chosen]}, where


def check_slabs(table: Table) -> None:
    shown = []
    for result in kept("two-core-vm-slabs")["results"]:
        rows = {(row["wants"], row["way"]): row for row in result["rows"]}
        for wants in dict.fromkeys(wants for wants, _ in rows):
            slabs, sockets = rows[wants, "together"], rows[wants, "together, sockets"]
            values = [slabs["cpu_s"], sockets["cpu_s"], slabs["cpu_s"] / sockets["cpu_s"]]
            values += [slabs["median_s"], sockets["median_s"], slabs["lent_bytes"] / 1e9]
            assert slabs["lent_bytes"] == slabs["sent_bytes"] and sockets["lent_bytes"] == 0
            shown.append((wants, result["ranks"], result["into"], values))
    assert len(shown) == len(table.rows)
    for (wants, into, *cells), (kind, ranks, exists, values) in zip(table.rows, shown, strict=True):
        assert wants == {"dp": f"all, {ranks} ranks", "tp": f"its part, TP={ranks}"}[kind], table.place
        assert into == {True: "tensors that exist", False: "new tensors"}[exists], table.place
        for text, value in zip(cells, values, strict=True):
            assert fits(text, value), f"{table.place}: {wants}, {into}: {text}, kept {value}"


def check_drives(table: Table) -> None:
    rows = {(row["name"], row["wants"], row["ranks"], row["drives"]): row for row in kept("two-core-vm-drives")["rows"]}
    said = {"": "", "all": "dp", "its part (TP)": "tp"}
    for way, wants, ranks, drives, *cells in table.rows:
        key = (wants and said[wants], int(ranks), int(drives))
        candidates = [row for (_, *other), row in rows.items() if tuple(other) == key]
        found = [
            row
            for row in candidates
            if all(
                not text or fits(text, value)
                for text, value in zip(
                    cells,
                    (
                        row["median_s"], row["all"], row["nbytes"] / row["median_s"] / 1e6, row["of_plain"],
                        row["given"] / 1e6, row["sent"] / 1e6, row["cpu"],
                    ),
                    strict=True,
                )
            )
        ]  # fmt: skip
        assert found, f"{table.place}: {way}, {key}"


def check_lora(table: Table) -> None:
    kept_seconds = kept("two-core-vm-lora")["seconds"]
    assert [tuple(row[:2]) for row in table.rows] == [
        (state, name) for state, of in kept_seconds.items() for name in of
    ]
    for state, name, middle, last, ratio in table.rows:
        values, vllms = kept_seconds[state][name], kept_seconds[state]["vllm"]
        shown = statistics.median(values) * 1e3, sorted(values)[math.ceil(len(values) * 0.99) - 1] * 1e3
        assert fits(middle, shown[0]) and fits(last, shown[1]), f"{table.place}: {state}, {name}: {shown}"
        assert fits(ratio, statistics.median(a / b for a, b in zip(vllms, values, strict=True)))


#: The heading of a table and its first header cells: what compares it.
CHECKS: dict[tuple[str, str], Callable[[Table], Any]] = {
    ("Penstock", "GPT-2: cold"): check_summary,
    ("Cold loads, to the last byte touched", "Penstock"): check_summary,
    ("Copied loads of GPT-2 and dense", "seconds"): partial(
        check_shown, benchmark="copied", results=["two-core-vm-copied"]
    ),
    ("Tensors one at a time, beside safetensors", "loops"): partial(
        check_shown, benchmark="one_by_one", results=["two-core-vm-one-by-one"]
    ),
    ("vLLM's loaders, files in the page cache", "seconds"): partial(
        check_shown,
        benchmark="engines",
        results=["two-core-vm-engines-llama", "two-core-vm-engines", "two-core-vm-engines-one-rank"],
    ),
    ("LoRA adapters", "contestant"): check_lora,
    ("MiniLM, 91 MB", "penstock"): partial(check_loads, result="two-core-vm", checkpoint="minilm"),
    ("GPT-2, 548 MB", "penstock"): partial(check_loads, result="two-core-vm", checkpoint="gpt2"),
    ("dense, 2.95 GB", "penstock"): partial(check_loads, result="two-core-vm", checkpoint="dense"),
    ("moe, 2.93 GB in 9,266 tensors", "penstock"): partial(check_loads, result="two-core-vm", checkpoint="moe"),
    ("huge, one tensor of 1 GB", "penstock"): partial(check_loads, result="two-core-vm", checkpoint="huge"),
    ("371,474 tensors, warm", "penstock"): partial(check_loads, result="two-core-vm", checkpoint="many"),
    ("Run again after changes", "penstock"): partial(check_loads, result="two-core-vm-limited", checkpoint="gpt2"),
    ("Run again after changes", "seconds"): check_cold_copies,
    ("Repeat runs", "scenario"): check_repeats,
    ("Saving", "seconds"): check_save,
    ("A published table, run again: fastsafetensors on ROCm", "published as"): check_rocm,
    ("Loads from a web server on the same machine", "s"): check_web,
    ("Loads from a web server on the same machine", "found"): check_links,
    ("The disk cache", "with the cache, s"): check_disk_cache,
    ("A server beside nginx", "GB/s"): check_serve,
    ("Nodes that give each other what they fetched", "Gbit/s"): check_nodes,
    ("Ranks that load together", "disk"): check_ranks,
    ("Ranks that load together", "into"): check_slabs,
    ("Ranks that load from several drives", "every rank wants"): check_drives,
}
#: Checks of results that may not be kept yet: from then on the document must have their tables.
LATER: dict[str, tuple[tuple[str, str], Callable[[Table], Any]]] = {
    "two-core-vm-upload": (
        ("Saving to a bucket", "client"), partial(check_shown, benchmark="upload", results=["two-core-vm-upload"])
    ),
}  # fmt: skip
CHECKS |= dict(check for name, check in LATER.items() if (TOP / f"benches/results/{name}.json").exists())
#: Tables with numbers that are no measurements: bounds, meanings, counts that tests or `make replay` give.
NO_MEASUREMENTS = {
    "Published tables, run again", "What is measured", "Contestants", "Bounds the project set itself",
    "What is verified where", "What is read", "Everyday options", "Advanced options", "Containers",
}  # fmt: skip


def check_of(table: Table) -> Callable[[Table], Any] | None:
    if (table.heading, table.header[0]) == ("GPT-2, 548 MB", "") and table.header[1] == "penstock":
        return check_processor
    return CHECKS.get((table.heading, table.header[1]))


TABLES = [table for document in DOCUMENTS for table in tables(document)]
MEASURED = [table for table in TABLES if check_of(table) or table.heading not in NO_MEASUREMENTS]


@pytest.mark.parametrize("table", MEASURED, ids=lambda table: f"{table.document}:{table.line}")
def test_a_table_of_times_comes_from_a_kept_result(table):
    check = check_of(table)
    if check is not None:
        check(table)
    else:
        assert not table.is_measured(), f"{table.place}: no kept result: keep it, or take the table out"


@pytest.mark.parametrize(
    "table", [table for table in MEASURED if check_of(table)], ids=lambda table: f"{table.document}:{table.line}"
)
def test_a_figure_that_was_not_measured_is_found(table):
    wrong = dataclasses.replace(table, rows=[list(row) for row in table.rows])
    first, where = next(
        (row, n) for row in wrong.rows for n, cell in enumerate(row) if n and re.search(r"\d\.\d", cell)
    )
    first[where] = re.sub(r"\d+\.", lambda number: f"{int(number[0][:-1]) + 1}.", first[where], count=1)
    check = check_of(table)
    assert check is not None
    with pytest.raises(AssertionError):
        check(wrong)


def test_each_check_has_its_table():
    there = {(table.heading, table.header[1]) for table in TABLES}
    assert set(CHECKS) <= there, set(CHECKS) - there


def test_every_kept_result_is_named_in_the_documents():
    text = (TOP / "docs/benchmarks.md").read_text()
    for path in (TOP / "benches/results").iterdir():
        assert path.name in text, f"{path.name}: nobody would find it"


def test_sizes_of_the_readme_are_those_of_the_kept_checkpoints():
    sizes = re.search(r"machine \(([\d.]+), ([\d.]+) and ([\d.]+) GB\)", (TOP / "README.md").read_text())
    assert sizes is not None
    of = kept("two-core-vm-summary")["checkpoints"]
    assert [
        fits(f"{text} GB", of[name]["nbytes"])
        for text, name in zip(sizes.groups(), ("gpt2", "dense", "moe"), strict=True)
    ] == [True] * 3


def test_figures_in_the_text_beside_tables_are_kept_too():
    text = " ".join((TOP / "docs/benchmarks.md").read_text().split())
    warm = re.search(
        r"Warm, to the end of the load: gpt2 (\S+) ms beside (\S+) ms, dense (\S+) beside (\S+), "
        r"moe .*?\) (\d+) beside (\d+)\.",
        text,
    )
    assert warm is not None
    summary = rows_of("two-core-vm-summary")
    names = [(model, loader) for model in ("gpt2", "dense", "moe") for loader in ("penstock", "safetensors")]
    for told, (model, loader) in zip(warm.groups(), names, strict=True):
        assert fits(f"{told} ms", summary[model, "warm", loader]["load_s"]), (model, loader)
    tls = re.search(
        r"took (\S+) s \((\S+) to (\S+)\) and (\S+) s \((\S+) to (\S+)\), with (\S+) and (\S+) CPU s/GB", text
    )
    assert tls is not None
    ours, loop = (
        rows_of("two-core-vm-web-tls")["llama-2-70b", "bucket-tls", one] for one in ("penstock url", "ceiling: loop")
    )
    keys = ("median_s", "min_s", "max_s")
    kept_ones = [*(ours[key] for key in keys), *(loop[key] for key in keys), ours["cpu_s_per_gb"], loop["cpu_s_per_gb"]]
    assert all(fits(told, value) for told, value in zip(tls.groups(), kept_ones, strict=True))


def test_what_is_said_of_copied_loads_is_what_was_printed():
    text = (TOP / "docs/benchmarks.md").read_text().partition("### Copied loads of GPT-2 and dense")[2]
    told = text.partition("```text\n")[2].partition("```")[0].splitlines()
    assert told == [line for line in shown("copied", "two-core-vm-copied") if line.startswith("- ")]


def test_three_checkpoints_from_a_bucket_follow_from_the_table_of_what_is_read():
    [table] = [table for table in TABLES if table.heading == "What is read" and table.header[0] == "checkpoint"]
    row = next(row for row in table.rows if row[1] == "8")  # of Llama-3-8B, the first
    column, o_proj, down_proj = (float(cell.partition(",")[0]) for cell in row[2:])
    received = column + 8 * (o_proj + down_proj)
    text = " ".join((TOP / "docs/engines.md").read_text().split())
    told = re.search(r"11\.23 \+ 8 x \(1\.07 \+ 3\.76\) = (\S+) GB, (\S+) times the checkpoint", text)
    assert told is not None
    assert fits(told[1], received) and fits(told[2], received / (column + o_proj + down_proj))
    for document in ("README.md", "docs/engines.md"):
        assert "about three checkpoints" in " ".join((TOP / document).read_text().split())


@pytest.mark.parametrize(
    ("text", "value", "right"),
    [("0.26 s", 0.264, True), ("0.27 s", 0.264, False), ("46 ms", 0.0464, True), ("**1.01**", 1.0149, True),
     ("2,953 MB", 2.9529e9, True), ("2,953 MB", 2.9e9, False)],
)  # fmt: skip
def test_a_figure_is_compared_at_the_digits_that_it_has(text, value, right):
    assert fits(text, value) is right
