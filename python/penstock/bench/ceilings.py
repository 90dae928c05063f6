"""Rates of the machine: the measurements, and the settings that are tried for each.

The settings that count are those that were the fastest on the files at hand.
"""

from __future__ import annotations

import os

from .._ceiling import Settings

MIB = 1 << 20

#: Measurements of cold files, and of files in the page cache.
COLD, WARM = ("direct", "place", "populate"), ("copy", "fresh")


def settings(measure: str, quick: bool = False) -> list[Settings]:
    """Settings that are tried for a ceiling: numbers of workers up to twice the cores, and sizes that matter to it."""
    cores = len(os.sched_getaffinity(0))
    workers = sorted({count for count in (1, 2, 4, 8, 16, cores, 2 * cores) if count <= max(4, 2 * cores)})
    tried: dict[str, list[Settings]] = {
        "direct": [
            *({"engine": "uring", "depth": depth} for depth in (4, 2, 8, 32)),
            {"engine": "uring", "depth": 16, "block": MIB},
            *({"threads": count} for count in (2, 4, 16)),
        ],
        "place": [{"threads": count} for count in (4, 8, 16)],
        "populate": [{"threads": count} for count in (4, 8, 16)],
        "copy": [
            *({"threads": count, "block": 2 * MIB} for count in workers),
            *({"threads": count, "block": 2 * MIB, "engine": "mapped"} for count in workers if count >= cores),
        ],
        "fresh": [
            *({"threads": count, "block": block * MIB} for count in workers if count >= cores for block in (2, 4, 32)),
            {"threads": cores, "block": 4 * MIB, "engine": "mapped"},
        ],
        "host_to_device": [
            {"threads": streams, "depth": 4, "block": block * MIB} for block in (4, 16, 64) for streams in (1, 2)
        ],
        "device_alloc": [{"block": block * MIB} for block in (2, 32, 512)],
    }
    return tried[measure][:2] if quick else tried[measure]


def text(chosen: Settings) -> str:
    """Settings as they stand in a table."""
    sizes = {name: f"{value >> 20} MiB" if name == "block" else value for name, value in chosen.items()}
    return " ".join(f"{name} {value}" for name, value in sizes.items())
