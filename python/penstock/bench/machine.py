"""The machine that the figures belong to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from .gpu_memory import GpuMemory

#: Distributions whose versions matter.
_PACKAGES = (
    "penstock",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai-model-streamer",
    "torch",
    "numpy",
)


def version(package: str) -> str | None:
    """The installed version of a distribution."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(folders: list[Path], gpu: int | None) -> dict[str, Any]:
    """Processor, memory, kernel, file systems of the folders, versions, and the GPU of that number."""
    from penstock import __version__

    cpu = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    command = ["df", "--output=fstype", *map(str, folders)]
    disks = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[1:]
    return {
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"),
        "kernel": platform.release(),
        "file_system": ", ".join(disks),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in _PACKAGES} | {"penstock": __version__},
        "gpu": None if gpu is None else accelerator(gpu),
        "load_average": list(os.getloadavg()),
    }


def accelerator(number: int) -> dict[str, Any]:
    """Name and driver of a GPU, as far as its driver tells."""
    try:
        there = GpuMemory(number)
    except OSError:
        from penstock import _core

        found = _core.gpus()
        name = found["gpus"][number]["name"] if number < len(found["gpus"]) else found["reason"]
        return {"name": name, "driver": found.get("driver_version")}
    return {"name": there.name(), "driver": there.driver()}
