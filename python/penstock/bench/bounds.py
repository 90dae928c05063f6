"""What the project promises of itself, each promise beside what a run of the benchmark found."""

from __future__ import annotations

from typing import Any


def bounds(rows: list[dict[str, Any]], judged: bool) -> list[dict[str, Any]]:
    """What the project promises of itself, each with what was found."""
    table = {(row["checkpoint"], row["scenario"], row["contestant"]): row for row in rows if "median_s" in row}
    found = []

    def judge(checkpoint: str, claim: str, value: float, bound: float, sign: str = ">=") -> None:
        holds = value >= bound if sign == ">=" else value <= bound
        row = {"checkpoint": checkpoint, "claim": claim, "value": value, "sign": sign, "bound": bound}
        found.append(row | {"holds": holds, "judged": judged})

    for checkpoint in dict.fromkeys(row["checkpoint"] for row in rows):
        cold = {
            name: row for (owner, scenario, name), row in table.items() if (owner, scenario) == (checkpoint, "cold")
        }
        if "penstock" in cold:
            ours = cold["penstock"]
            judge(checkpoint, "cold: share of the raw O_DIRECT read beside it", ours["share_of_raw"], 0.9)
            if "ceiling: place" in cold:
                # Reads into a few buffers stay in the processor's cache; a load has to put its bytes somewhere.
                kept = ours["share_of_raw"] / cold["ceiling: place"]["share_of_raw"]
                judge(checkpoint, "cold: share of O_DIRECT into memory for all of it", kept, 0.9)
            for peer in ("safetensors", "fastsafetensors", "fastsafetensors buffered"):
                if peer in cold:
                    judge(checkpoint, f"cold: times as fast as {peer}", cold[peer]["median_s"] / ours["median_s"], 1.0)

        ours, theirs = (table.get((checkpoint, "warm", name), {}) for name in ("penstock", "safetensors"))
        if ours and theirs:
            # Alone, and with every page touched: neither may hide in the other.
            for what, keys in (("load", ("load_s",)), ("load and touch", ("load_s", "touch_s"))):
                mine, other = (sum(row[key] for key in keys) for row in (ours, theirs))
                allowed = max(other * 1.1, other + 0.010)
                judge(
                    checkpoint, f"warm: safetensors' {what} within 10% or 10 ms (1 is the limit)", allowed / mine, 1.0
                )

        def beside(
            scenario: str, ours: str, other: str, claim: str, bound: float, checkpoint: str = checkpoint
        ) -> None:
            mine, theirs = table.get((checkpoint, scenario, ours)), table.get((checkpoint, scenario, other))
            if mine and theirs:
                judge(checkpoint, claim, theirs["median_s"] / mine["median_s"], bound)

        beside(
            "load_into", "penstock load_into", "fastsafetensors copy_", "load_into: times as fast as fastsafetensors", 3
        )
        moe = "moe" in checkpoint
        beside(
            "private",
            "penstock copy",
            "fastsafetensors",
            "private: times as fast as fastsafetensors",
            1.2 if moe else 1.5,
        )
        beside("private", "penstock copy", "ceiling: fresh", "private: share of pread into fresh huge pages", 0.9)

    many = table.get(("many", "warm", "penstock"))
    if many:
        judge("many", "371,474 tensors: seconds to open", many["open_s"], 0.4, "<=")
        judge("many", "371,474 tensors: seconds to open and load warm", many["load_s"], 1.8, "<=")
    return found
