"""What ``import penstock`` takes of the processor, here or beside another version.

    python benches/importing.py [--beside OTHER/python] [--runs 20]

Each number is the user and system time of a fresh process that imports penstock, less that of one that does nothing;
the median of the runs. The processes take turns, so that what else the machine does falls on all of them.
`OTHER/python` is the folder of another checkout, built with `make develop`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent.parent / "python"


def seconds(code: str, path: Path) -> float:
    """The processor time of a fresh process with this program, in seconds."""
    environment = os.environ | {"PYTHONPATH": str(path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise SystemExit(f"{code!r} with PYTHONPATH={path} ended with status {process.returncode}")
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="the python folder of another checkout")
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="of each (default: 20)")
    args = parser.parse_args()
    told = {"nothing": ("pass", HERE), "this": ("import penstock", HERE)}
    if args.beside is not None:
        told["other"] = ("import penstock", args.beside.resolve())
    for code, path in told.values():  # the first one writes bytecode
        seconds(code, path)
    took: dict[str, list[float]] = {name: [] for name in told}
    for _ in range(args.runs):
        for name, (code, path) in told.items():
            took[name].append(seconds(code, path))
    nothing = statistics.median(took["nothing"])
    found = {name: statistics.median(times) - nothing for name, times in took.items() if name != "nothing"}
    print(f"nothing: {nothing * 1e3:.1f} ms of CPU; medians of {args.runs} runs")
    for name, extra in found.items():
        print(f"import penstock, {name}: {extra * 1e3:.1f} ms more")
    if "other" in found:
        print(f"this / other: {found['this'] / found['other']:.3f}")


if __name__ == "__main__":
    main()
