"""Runs the benchmark on a machine that can fetch nothing: wheels in a folder, one command, results as JSON and HTML.

    python tools/bench_offline.py WHEELS OUT --device cuda:0 --preset instanttensor

Makes an environment in OUT/venv from the wheels alone (`pip --no-index`): penstock and numpy must be among them, every
other loader takes part if it is. torch comes from the wheels too, or from the interpreter that runs this. What follows
the two folders goes to `penstock bench`. Leaves OUT/results.json, OUT/results.html and OUT/bench.log.

Standard library only.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from pathlib import Path

from environment import OUTER_TORCH, has_torch, site_packages, torch_home

#: Without these nothing runs. The others are taken if they install.
NEEDED = ("penstock", "numpy")


def distributions(wheels: Path) -> list[str]:
    """Names of the distributions that the folder has wheels of."""
    found = {re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower() for wheel in wheels.glob("*.whl")}
    return sorted(found)


def install(python: Path, wheels: Path, packages: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "install", "--no-index", "--find-links", str(wheels), "--pre", "--quiet"]
    command += ["--disable-pip-version-check", *more, *packages]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def environment(wheels: Path, folder: Path) -> Path:
    """The interpreter of an environment made of the wheels. Ends the program where what is needed is not there."""
    there = distributions(wheels)
    missing = [name for name in NEEDED if name not in there]
    if missing:
        sys.exit(f"{wheels}: has no wheel of {' and '.join(missing)} (it has {', '.join(there) or 'none'})")
    python = folder / "bin" / "python"
    venv.EnvBuilder(clear=True, with_pip=True, symlinks=True).create(folder)
    done = install(python, wheels, list(NEEDED))
    if done.returncode != 0:
        sys.exit(f"penstock and numpy cannot be installed from {wheels}: {done.stderr.strip()}")
    if "torch" in there:
        done = install(python, wheels, ["torch"])
        if done.returncode != 0:
            sys.exit(f"torch cannot be installed from {wheels}: {done.stderr.strip()}")
    elif (home := torch_home()) is not None:
        (site_packages(python) / OUTER_TORCH).write_text(f"{home}\n")
    if not has_torch(python):
        sys.exit(f"no torch: neither {wheels} nor {sys.executable} has one")
    for name in there:
        if name in (*NEEDED, "torch"):
            continue
        # What a loader needs besides may be torch's, which is there
        if (done := install(python, wheels, [name])).returncode and install(
            python, wheels, [name], "--no-deps"
        ).returncode:
            print(f"{name} cannot be installed: {done.stderr.strip().splitlines()[-1]}", flush=True)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    arguments, passed_on = parser.parse_known_args()
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    python = environment(arguments.wheels.absolute(), out / "venv")
    command = [str(python), "-m", "penstock.cli", "bench", "--json", str(out / "results.json")]
    command += ["--html", str(out / "results.html")]
    if "--folder" not in passed_on:
        command += ["--folder", str(out / "checkpoints")]
    with (out / "bench.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *passed_on], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=out
        )
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            log.write(line)
            log.flush()
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
