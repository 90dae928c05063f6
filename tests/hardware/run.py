"""Runs the suite part by part within a time budget, and writes what it found: results.json and results.md.

usage: python hardware/run.py --out FOLDER [--budget SECONDS] [--parts facts,bytes,...] [--quick]

Each part is a process of its own with a limit of its own; what it found is kept, however it ends. A test that ends its
process is marked lost, and the part goes on behind it. Status 0: all passed; 1: something failed; 77: there is no
GPU here.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from hardware import results  # noqa: E402

NO_GPU = 77
#: Parts in their order: files, and the most seconds that each gets. What judges comes first, tables later.
PARTS = {
    "facts": (["test_facts.py"], 105),
    "bytes": (["test_bytes.py"], 120),
    "fences": (["test_pool.py", "test_streams.py", "test_memory.py", "test_saving.py"], 110),
    "processes": (["test_processes.py"], 90),
    "sweep": (["test_sweep.py"], 80),
    "peers": (["test_peers.py"], 250),
}
#: Seconds kept for writing the report.
LAST = 4.0
#: How often a part goes on behind a test that took its process with it.
TRIES = 6
#: Seconds after which one test is given up.
ONE_TEST = 100


class Run:
    def __init__(self, out: Path, budget: float, quick: bool) -> None:
        self.out, self.end = out, time.monotonic() + budget
        # /tmp is memory on many machines, and these files are to be read from a disk
        self.files = Path(tempfile.mkdtemp(prefix="penstock-hardware-", dir=os.environ.get("TMPDIR", "/var/tmp")))
        path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.environment = {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # others' plugins have no place in this
            results.FOLDER: str(out),
            "PENSTOCK_HARDWARE_FILES": str(self.files),
        }
        if quick:
            self.environment["PENSTOCK_HARDWARE_QUICK"] = "1"

    def left(self) -> float:
        return self.end - LAST - time.monotonic()

    def probe(self) -> dict[str, Any]:
        """What `gpus.py` says; a driver that does not answer is no GPU either."""
        command = [sys.executable, "-m", "hardware.gpus"]
        try:
            said = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=90, env=self.environment
            )
        except subprocess.TimeoutExpired:
            return {"reason": "the driver does not answer within 90 s.", "gpus": {}}
        lines = said.stdout.strip().splitlines()
        try:
            found: dict[str, Any] = json.loads(lines[-1])
            return found
        except (IndexError, ValueError):
            return {"reason": f"looking for one failed: {said.stderr.strip()[-500:]}", "gpus": {}}

    def machine(self) -> None:
        """Where this runs, and with what."""
        from hardware import facts

        versions = {"command": shlex.join(sys.argv)}
        for name in ("torch", "numpy", "safetensors", "fastsafetensors", "instanttensor", "runai-model-streamer"):
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = "not installed"
        revision = HERE.parent / "HEAD"
        if revision.exists():
            versions["revision"] = revision.read_text().strip()
        results.note(machine={**facts.machine(), **versions})

    def part(self, name: str) -> bool:
        """Whether nothing of it failed."""
        files, most = PARTS[name]
        begun, limit = time.monotonic(), min(most, self.left())
        if limit < 15:
            results.note(part=name, ended="no time left", seconds=0)
            return False
        deadline, ended = begun + limit, "cut off"
        environment = dict(self.environment)
        one_test = ONE_TEST
        if name == "peers":  # one test, with an end of its own
            one_test = int(most) + 60
            environment["PENSTOCK_HARDWARE_PEERS"] = str(max(10.0, limit - 30))
        for _ in range(TRIES):
            status = self._pytest(files, environment, deadline - time.monotonic(), one_test)
            environment["PENSTOCK_HARDWARE_GO_ON"] = "1"
            if status is None:
                break
            if status in (0, 1, 5):  # all passed, some failed, none were left
                ended = "to its end"
                break
        tests = results.summary(results.read(self.out))["tests"]
        ours = {t: f for t, f in tests.items() if any(file in t for file in files)}
        well = (
            bool(ours) and ended == "to its end" and all(f["outcome"] in ("passed", "skipped") for f in ours.values())
        )
        results.note(part=name, ended=ended, seconds=round(time.monotonic() - begun, 1), tests=len(ours))
        return well

    def _pytest(self, files: list[str], environment: dict[str, str], seconds: float, one_test: int) -> int | None:
        """Its status; None where it was cut off."""
        if seconds < 3:
            return None
        command = [sys.executable, "-m", "pytest", "-q", "-c", str(HERE / "alone.ini"), "--rootdir", str(HERE)]
        command += ["--confcutdir", str(HERE), "--basetemp", str(self.files / "tmp"), "--tb=short"]
        if importlib.util.find_spec("pytest_timeout"):
            command += ["-p", "pytest_timeout", "--timeout", str(one_test), "--timeout-method", "thread"]
        process = subprocess.Popen(
            [*command, *(str(HERE / file) for file in files)], env=environment, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # All that it started, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def report(self) -> None:
        found = results.summary(results.read(self.out))
        (self.out / "results.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
        (self.out / "results.md").write_text(results.markdown(found) + "\n")
        trace = self.out / "trace.json"
        if trace.exists():
            with trace.open("rb") as plain, gzip.open(trace.with_suffix(".json.gz"), "wb") as packed:
                shutil.copyfileobj(plain, packed)
            trace.unlink()
        outcomes = [test["outcome"] for test in found["tests"].values()]
        counts = ", ".join(f"{outcomes.count(name)} {name}" for name in ("passed", "failed", "lost", "skipped"))
        print(f"{counts}; {self.out / 'results.md'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for what is found")
    parser.add_argument("--budget", type=float, default=530, help="seconds for all of it")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of the parts, in their order")
    parser.add_argument("--quick", action="store_true", help="small checkpoints: tries the suite itself")
    chosen = parser.parse_args()
    names = chosen.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / results.JOURNAL).unlink(missing_ok=True)
    os.environ[results.FOLDER] = str(out)
    run = Run(out, chosen.budget, chosen.quick)
    try:
        run.machine()
        probed = run.probe()
        if reason := probed["reason"]:
            results.note(machine={"no GPU": reason})
            run.report()
            print(f"There is no GPU here: {reason}")
            return NO_GPU
        results.note(machine={"fake": True} if os.environ.get("PENSTOCK_HARDWARE_FAKE") == "1" else {})
        results.note(machine={"penstock": probed["penstock"], "as penstock sees it": probed["gpus"]})
        well = [run.part(name) for name in names]
        run.report()
        return 0 if all(well) else 1
    finally:
        shutil.rmtree(run.files, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
