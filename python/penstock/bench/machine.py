"""What the machine is that the figures belong to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(folder: Path) -> dict[str, Any]:
    cpu = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    disk = subprocess.run(["df", "--output=fstype", str(folder)], capture_output=True, text=True, check=True)
    packages = ("penstock", "safetensors", "fastsafetensors", "torch", "numpy")
    versions = {package: version(package) for package in packages}
    return {
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"),
        "kernel": platform.release(),
        "file_system": disk.stdout.split()[-1],
        "python": platform.python_version(),
        "versions": versions,
        "load_average": os.getloadavg(),
    }
