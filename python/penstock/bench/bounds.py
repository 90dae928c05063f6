"""The promises of the project, each beside the finding of a benchmark run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .scenarios import BUCKET, COLD, SECOND, UPLOAD

Row = dict[str, Any]

#: Scenarios in which the fastest loader is asked for, among those whose tensors lie in like memory.
_COMPARED = (*COLD, "warm", "private", "load_into", "tmpfs", "half", "second", "cast", "two", "beside-memory",
             "beside-disk", "limited", "latency")  # fmt: skip
#: A bound of 10% as a quotient.
_TENTH = 1 / 1.1


def bounds(rows: list[Row], judged: bool) -> list[Row]:
    """The promises of the project, each with its finding."""
    table = {(row["checkpoint"], row["scenario"], row["contestant"]): row for row in rows if "median_s" in row}
    found: list[Row] = []

    def judge(checkpoint: str, claim: str, value: float, bound: float, sign: str = ">=") -> None:
        holds = value >= bound if sign == ">=" else value <= bound
        row = {"checkpoint": checkpoint, "claim": claim, "value": value, "sign": sign, "bound": bound}
        found.append(row | {"holds": holds, "judged": judged})

    def beside(checkpoint: str, scenario: str, ours: str, other: str, claim: str, bound: float) -> None:
        """How many times as fast ours is."""
        mine, theirs = table.get((checkpoint, scenario, ours)), table.get((checkpoint, scenario, other))
        if mine and theirs:
            judge(checkpoint, claim, theirs["median_s"] / mine["median_s"], bound)

    for checkpoint in dict.fromkeys(row["checkpoint"] for row in rows):
        for scenario in COLD:
            ours = table.get((checkpoint, scenario, "penstock"), {})
            if ours.get("ceiling") in ("direct", "populate"):
                claim = f"{scenario}: share of what reads fastest ({ours['ceiling']})"
                judge(checkpoint, claim, ours["share"], 0.9)
            # Reads into a few buffers stay in the processor's cache; a load has to put its bytes somewhere.
            claim = f"{scenario}: share of O_DIRECT into memory for all of it"
            beside(checkpoint, scenario, "penstock", "ceiling: place", claim, 0.9)
            claim = f"{scenario}, to the last byte touched: times as fast as safetensors (0.8 of its time)"
            beside(checkpoint, scenario, "penstock", "safetensors", claim, 1.25)
            for auto, copied in (("penstock", ""), ("penstock copy", ", copied")):
                names = (auto, f"{auto} keep", "penstock bypass")  # which copies anyway
                mine, keep, bypass = (table.get((checkpoint, scenario, name)) for name in names)
                if mine and keep and bypass:
                    best = min(keep["median_s"], bypass["median_s"])
                    claim = f"{scenario}{copied}: auto beside the faster of keep and bypass"
                    judge(checkpoint, claim, best / mine["median_s"], _TENTH)

        for scenario in _COMPARED:
            for semantics in ("any", "private", "into"):
                _first(checkpoint, scenario, semantics, table.values(), judge)

        ours, theirs = (table.get((checkpoint, "warm", name), {}) for name in ("penstock", "safetensors"))
        if "touch_s" in ours and "touch_s" in theirs:
            # Alone, and with every page touched: neither may hide in the other.
            for what, keys in (("load", ("load_s",)), ("load and touch", ("load_s", "touch_s"))):
                mine, other = (sum(row[key] for key in keys) for row in (ours, theirs))
                allowed = max(other * 1.1, other + 0.010)
                claim = f"warm: safetensors' {what} within 10% or 10 ms (1 is the limit)"
                judge(checkpoint, claim, allowed / mine, 1.0)
        for name, copied in (("penstock", ""), ("penstock copy", ", copied")):
            second = table.get((checkpoint, "second", name), {})
            if "warm_s" in second:
                claim = f"second{copied}: start after a cold one and its fill, beside a warm one"
                allowed = max(second["warm_s"] * 1.1, second["warm_s"] + 0.010)
                judge(checkpoint, f"{claim}: within 10% or 10 ms (1 is the limit)", allowed / second["median_s"], 1.0)

        claim, name = "load_into: times as fast as fastsafetensors", "fastsafetensors copy_"
        beside(checkpoint, "load_into", "penstock load_into", name, claim, 3)
        claim, bound = "private: times as fast as fastsafetensors", 1.2 if "moe" in checkpoint else 1.5
        beside(checkpoint, "private", "penstock copy", "fastsafetensors buffered", claim, bound)
        claim = "private: share of pread into fresh huge pages"
        beside(checkpoint, "private", "penstock copy", "ceiling: fresh", claim, 0.9)

        for scenario in BUCKET:
            _served(checkpoint, scenario, table, judge)
        _second(checkpoint, table, judge)
        for row in [row for row in table.values() if row["kind"] == "rival"]:
            claim = f"{UPLOAD}: times as fast as {row['contestant']}"
            beside(checkpoint, UPLOAD, "penstock save", row["contestant"], claim, 1.3)

    small = table.get(("minilm", "latency", "penstock"))
    if small and "later_s" in small:
        judge("minilm", "latency: ms of the first load of a process", small["median_s"] * 1e3, 15, "<=")
        judge("minilm", "latency: ms of a later load, median", small["later_s"] * 1e3, 5, "<=")
        judge("minilm", "latency: p99 of later loads by their median", small["p99_s"] / small["later_s"], 2, "<=")
    many = table.get(("many", "warm", "penstock"))
    if many:
        judge("many", "371,474 tensors: seconds to open", many["open_s"], 0.4, "<=")
        judge("many", "371,474 tensors: seconds to open and load warm", many["load_s"], 1.8, "<=")
        judge("many", "371,474 tensors: us for each, opening included", many["load_s"] / 371_474 * 1e6, 3, "<=")
    return found


def _served(checkpoint: str, scenario: str, table: dict[tuple[str, str, str], Row], judge: Any) -> None:
    """Loads from a web server beside the bare loop and the ways that others have."""
    for ours, loop, memory in (
        ("penstock url", "ceiling: loop", "private memory"),
        ("penstock url load_into", "ceiling: loop touched", "existing tensors"),
    ):
        mine, bare = table.get((checkpoint, scenario, ours)), table.get((checkpoint, scenario, loop))
        if mine and bare:
            cost = mine["cpu_s_per_gb"] / bare["cpu_s_per_gb"]
            claim = f"{scenario}, {memory}: processor seconds per GB by those of the bare loop"
            judge(checkpoint, claim, cost, 1.2, "<=")
            share = mine["gb_per_s"] / bare["gb_per_s"]
            judge(checkpoint, f"{scenario}, {memory}: share of the bare loop's rate", share, 0.9)
        if mine:
            claim = f"{scenario}, {memory}: bytes served by those wanted"
            judge(checkpoint, claim, mine["served_bytes"] / mine["bytes"], 1.01, "<=")
    url = table.get((checkpoint, scenario, "penstock url"))
    for row in [row for row in table.values() if (row["checkpoint"], row["scenario"]) == (checkpoint, scenario)]:
        if url and row["kind"] == "rival":
            claim = f"{scenario}: times as fast as {row['contestant']}"
            judge(checkpoint, claim, row["median_s"] / url["median_s"], 2)


def _second(checkpoint: str, table: dict[tuple[str, str, str], Row], judge: Any) -> None:
    """A second start from the disk cache: no bytes of weights from the server, and no slower than downloaded files."""
    mine = table.get((checkpoint, SECOND, "penstock url, disk cache"))
    if mine is None:
        return
    judge(checkpoint, f"{SECOND}: MiB served", mine["served_bytes"] / (1 << 20), 1.0, "<=")
    for row in [row for place, row in table.items() if place[:2] == (checkpoint, SECOND)]:
        if row["kind"] == "rival":
            claim = f"{SECOND}: times as fast as {row['contestant']}"
            judge(checkpoint, claim, row["median_s"] / mine["median_s"], 1.0)
    if files := table.get((checkpoint, SECOND, "urllib to disk once, penstock")):
        claim = f"{SECOND}: time by that of downloaded files, without the time of opening"
        judge(checkpoint, claim, _unopened(mine) / _unopened(files), 1.05, "<=")


def _unopened(row: Row) -> float:
    """Seconds of a start without those in which versions are asked for."""
    return float(row["median_s"] - row.get("open_s", 0.0))


def _first(checkpoint: str, scenario: str, semantics: str, rows: Iterable[Row], judge: Any) -> None:
    """Whether the fastest of ours is the fastest of all with like semantics, and uses the least of the processor."""
    like = [
        row
        for row in rows
        if (row["checkpoint"], row["scenario"], row.get("semantics")) == (checkpoint, scenario, semantics)
    ]
    # What penstock does when nothing is asked for, not the best of its routes after the fact
    ours = [row for row in like if row["contestant"] in ("penstock", "penstock copy", "penstock load_into")]
    rivals = [row for row in like if row["kind"] == "rival"]
    if not ours or not rivals:
        return
    mine, best = ours[0], min(rivals, key=lambda row: float(row["median_s"]))
    kind = {"any": "any memory", "private": "private memory", "into": "existing tensors"}[semantics]
    claim = f"{scenario}, {kind}: times as fast as the fastest rival ({best['contestant']})"
    judge(checkpoint, claim, best["median_s"] / mine["median_s"], 1.0)
    thrifty = min(rivals, key=lambda row: float(row["cpu_s"]))
    if scenario in (*COLD, "warm", "private") and mine["cpu_s"] > 0:
        claim = f"{scenario}, {kind}: CPU seconds of the thriftiest rival ({thrifty['contestant']}) by ours"
        judge(checkpoint, claim, thrifty["cpu_s"] / mine["cpu_s"], 1.0)
