"""Presets: a short run for a summary of a machine, and the runs behind published tables, done again.

Beside a published table's rerun its published figures are printed. They are in `published.json`, each table with its
machine and what makes it another measurement than ours, and each of its rows with its source, what is timed, what the
source says of the page cache, and what it does not say.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import starts
from .scenarios import BUCKET, SECOND, UPLOAD

GIB = 2**30
#: The share of a folder's free space for all checkpoints of a preset. Those of torch.load come on top.
_SHARE_OF_DISK = 0.4
#: The share of the memory for one checkpoint: it lies in the page cache and in private memory at once.
_SHARE_OF_MEMORY = 0.35
#: A quick run of a published table: most models, bytes of each, and seconds after which no further load begins.
QUICK_MODELS, QUICK_BYTES, QUICK_SECONDS = 2, 0.1e9, 270


@dataclass(frozen=True)
class Preset:
    name: str
    about: str
    #: Names of public models, as `penstock synth` knows them; of checkpoints of the benchmark in `SUMMARY`.
    models: tuple[str, ...]
    scenarios: tuple[str, ...]
    #: Names of contestants; none: all of them.
    contestants: tuple[str, ...] = ()

    def beside(self) -> set[tuple[str, str, str]]:
        """Checkpoint, scenario and contestant of every published row, and of second starts and saves.

        On a CPU `private` may stand for `warm`.
        """
        rows = [row for row in published(self.name)["rows"] if row["contestant"] is not None]
        found = {(row["checkpoint"], row["scenario"], row["contestant"]) for row in rows}
        for one in {SECOND, UPLOAD} & set(self.scenarios):  # nothing is published: they stand beside stock ones
            stock = {state.stock for state in starts.STATES if state.scenario == one}
            found |= {(model, one, name) for model in self.models for name in stock}
        return found | {(model, "private", name) for model, scenario, name in found if scenario == "warm"}

    def quick(self) -> dict[str, tuple[str, ...]]:
        """The models of a quick run: the first ones that have published rows, and the scenarios of these rows."""
        there = {(model, scenario) for model, scenario, _ in self.beside()}
        models = {name: tuple(one for one in self.scenarios if (name, one) in there) for name in self.models}
        return dict([(name, scenarios) for name, scenarios in models.items() if scenarios][:QUICK_MODELS])


#: No published table: Penstock and the loaders that are the fastest on a CPU, where it matters most. Without ceilings
#: and timelines it takes minutes.
SUMMARY = Preset(
    "summary",
    "GPT-2, a dense and a mixture checkpoint: cold in both states of memory, and warm",
    ("gpt2", "dense", "moe"),
    ("cold", "warm"),
    ("penstock", "penstock copy", "safetensors", "fastsafetensors", "runai streamer"),
)
PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "fastsafetensors-rocm",
            "GPT-2 and GPT-2 Medium: threads by buffer size, mmap, cast to F16",
            ("gpt2", "gpt2-medium"),
            ("warm", "private", "cold", "cast"),
            ("penstock", "penstock copy", "safetensors", "safetensors clone", "fastsafetensors",
             "fastsafetensors buffered", "fastsafetensors 8 threads, 8 MB", "fastsafetensors 16 threads, 16 MB",
             "fastsafetensors 32 threads, 32 MB", "fastsafetensors 16 threads, 16 MB, blocks of 160 MB",
             "fastsafetensors 32 threads, 32 MB, blocks of 160 MB"),
        ),
        Preset(
            "instanttensor",
            "Qwen3-30B-A3B and DeepSeek-R1 from storage and from tmpfs",
            ("qwen3-30b-a3b", "deepseek-r1"),
            ("cold", "tmpfs", "load_into"),
        ),
        Preset(
            "fastsafetensors-paper",
            "Llama-2, Falcon and Bloom, cold and beside a neighbour that copies memory",
            ("llama-2-7b", "llama-2-13b", "llama-2-70b", "falcon-40b", "bloom-176b"),
            ("cold", "beside-memory"),
        ),
        Preset(
            "anyscale-model-loader",
            "Llama-2-70B from a web server, plain and with TLS, its second start from the disk, and back to a bucket",
            ("llama-2-70b",),
            (*BUCKET, SECOND, UPLOAD),
        ),
        Preset(
            "io-uring-study",
            "every loader and route, cold and warm",
            ("gpt2-medium", "llama-2-7b"),
            ("cold", "warm", "private"),
        ),
    )
}  # fmt: skip


def room(folders: list[Path], models: int, tmpfs: bool) -> float:
    """Bytes that each of so many checkpoints may have, so that they fit the disks, the memory and the tmpfs."""
    disk = sum(shutil.disk_usage(folder).free for folder in folders) * _SHARE_OF_DISK / models
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") * _SHARE_OF_MEMORY
    return min(disk, memory / 2 if tmpfs else memory)


def published(preset: str) -> dict[str, Any]:
    """The published table that a preset redoes. Its `rows` have what their group says of all of them."""
    tables: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
    table = tables[preset]
    about = ("source", "measures", "cache", "not_said")
    table["rows"] = [{key: group[key] for key in about} | row for group in table["groups"] for row in group["rows"]]
    return table


def comparison(result: dict[str, Any]) -> str:
    """Published and rerun figures side by side, as Markdown, and what is not comparable."""
    table = published(result["preset"])
    rows = {(row["checkpoint"], row["scenario"], row["contestant"]): row for row in result["rows"]}
    lines = [
        f"\n{table['title']}",
        f"{table['source']}, on {table['machine']}",
        "",
        "| checkpoint | published as | timed there | page cache there | s | GB/s "
        "| here: scenario | contestant | s | GB/s | penstock s | GB/s |",
        f"|{'---|' * 12}",
    ]
    factor = GIB / 1e9 if table["unit"] == "GiB/s" else 1.0
    for one in table["rows"]:
        there = [one["checkpoint"], one["as"], one["measures"], one["cache"]]
        there += [f"{one['seconds']:g}" if "seconds" in one else "", _rate(one.get("rate"), factor)]
        # Into CPU memory, loaders whose tensors are private are compared in a scenario of their own
        scenario = one["scenario"]
        mine = "penstock url" if scenario in BUCKET else "penstock"
        if scenario == "warm" and (one["checkpoint"], scenario, one["contestant"]) not in rows:
            scenario, mine = "private", "penstock copy"
        same = rows.get((one["checkpoint"], scenario, one["contestant"]))
        ours = rows.get((one["checkpoint"], scenario, mine))
        here = [scenario, one["contestant"] or "not run here", *_figures(same), *_figures(ours)]
        lines.append(f"| {' | '.join([*there, *here])} |")
    lines += starts.table(result.get("states", ()))
    if result.get("quick"):
        lines.append("- here a quick run: one round of small checkpoints shows that it works, and ranks no loader")
    for name, about in result["checkpoints"].items():
        if about.get("cut"):
            lines.append(f"- here {name} is cut: {about['cut']}")
    lines += [f"- {reason}" for reason in table["not_comparable"]]
    for group in table["groups"]:
        kinds = f"{group['measures']}, page cache {group['cache']}"
        lines.append(
            f"- not said of '{group['rows'][0]['as']}' and the like ({kinds}; {group['source']}): {group['not_said']}"
        )
    return "\n".join(lines)


def _rate(rate: float | None, factor: float) -> str:
    return "" if rate is None else f"{rate * factor:.2f}"


def _figures(row: dict[str, Any] | None) -> list[str]:
    if row is None or "median_s" not in row:
        return ["", ""]
    return [f"{row['median_s']:.3f}", f"{row['gb_per_s']:.2f}"]
