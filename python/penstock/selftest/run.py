"""Runs the suite part by part within a time budget, and writes what it found: results.json and results.md.

usage: python -m penstock.selftest.run --out FOLDER [--budget SECONDS] [--parts facts,bytes,...] [--quick]

Each part is a process of its own with a limit of its own; what it found is kept, however it ends. A test that ends its
process is marked lost, and the part goes on after it. Status 0: all passed; 1: something failed; 77: there is no
GPU here; 130: interrupted or terminated, after the report of what there was.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import importlib.metadata
import importlib.util
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import facts, results

HERE = Path(__file__).resolve().parent
PASSED, FAILED, NO_GPU, INTERRUPTED = 0, 1, 77, 130
#: Parts in their order: files, and the most seconds that each gets. What judges comes first, tables later.
PARTS = {
    "facts": (["test_facts.py"], 90),
    "bytes": (["test_bytes.py"], 110),
    "sweep": (["test_sweep.py"], 80),
    "fences": (["test_pool.py", "test_streams.py", "test_memory.py", "test_saving.py"], 110),
    "ranks": (["test_ranks.py"], 40),
    "peers": (["test_peers.py"], 230),
    # One of its tests breaks a context on purpose
    "processes": (["test_processes.py"], 100),
    "daemon": (["test_daemon.py"], 450),
}
#: Parts that need a package which this suite does not.
NEEDS = {"daemon": "vllm"}
#: Seconds of a test before it is given up, where that is not the usual.
LONGER = {"facts": 60, "processes": 60, "ranks": 35, "daemon": 440}
#: Seconds kept for writing the report.
LAST = 4.0
#: How often a part goes on after a test that took its process with it.
TRIES = 6
#: Seconds after which one test is given up: one that hangs must not cost its part.
ONE_TEST = 30
#: The fake driver sums every byte twice, on machines with few processors.
SLOWER_ON_THE_FAKE = 3
#: Seconds in which nothing moves before a load of the suite fails: a hang must be seen before the test is given up.
STALL = "10"

_PR_SET_PDEATHSIG = 1
#: Seconds after the budget at which this process is killed, whatever hangs: writing the report takes less.
LATE = 5


class Run:
    def __init__(self, out: Path, budget: float, quick: bool, command: str) -> None:
        self.out, self.end, self.command = out, time.monotonic() + budget, command
        # /tmp is memory on many machines, and these files are to be read from a disk
        self.files = Path(tempfile.mkdtemp(prefix="penstock-selftest-", dir=os.environ.get("TMPDIR", "/var/tmp")))
        self.environment = {
            "PENSTOCK_STALL_TIMEOUT": STALL,
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # others' plugins have no place in this
            results.FOLDER: str(out),
            "PENSTOCK_SELFTEST_FILES": str(self.files),
        }
        if quick:
            self.environment["PENSTOCK_SELFTEST_QUICK"] = "1"

    def left(self) -> float:
        return self.end - LAST - time.monotonic()

    def probe(self) -> dict[str, Any]:
        """The answer of `gpus.py`; a driver that does not answer is no GPU either."""
        command = [sys.executable, "-m", "penstock.selftest.gpus"]
        limit = max(10.0, min(90.0, self.left()))
        said, status = _output(command, limit, self.environment)
        if status is None:
            return {"reason": f"the driver does not answer within {limit:.0f} s.", "gpus": {}}
        try:
            found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
            return found
        except (IndexError, ValueError):
            return {"reason": f"looking for one failed: {said.strip()[-500:]}", "gpus": {}}

    def machine(self) -> None:
        """Where this runs, and with what."""
        versions = {"command": self.command}
        for name in ("torch", "numpy", "safetensors", "fastsafetensors", "instanttensor", "runai-model-streamer"):
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = "not installed"
        if revision := os.environ.get("PENSTOCK_SELFTEST_REVISION"):
            versions["revision"] = revision
        results.note(machine={**facts.machine(), **versions})

    def part(self, name: str) -> bool:
        """Whether nothing of it failed."""
        files, most = PARTS[name]
        needs = NEEDS.get(name)
        if needs is not None and importlib.util.find_spec(needs) is None:
            results.note(part=name, ended=f"skipped: {needs} is not installed in this environment", seconds=0)
            return True
        slower = SLOWER_ON_THE_FAKE if os.environ.get("PENSTOCK_SELFTEST_FAKE") == "1" else 1
        begun, limit = time.monotonic(), min(most * slower, self.left())
        if limit < 15:
            results.note(part=name, ended="no time left", seconds=0)
            return False
        deadline, ended = begun + limit, "cut off"
        environment = dict(self.environment)
        one_test = LONGER.get(name, ONE_TEST) * slower
        if name == "peers":  # one test, with an end of its own
            one_test = int(most) + 60
            environment["PENSTOCK_SELFTEST_PEERS"] = str(max(10.0, limit - 15))
        if name == "sweep":  # the tables behind the one of options need time too
            environment.setdefault("PENSTOCK_SELFTEST_SWEEP", str(min(45.0, limit / 4)))
        for _ in range(TRIES):
            status = self._pytest(files, environment, deadline - time.monotonic(), one_test)
            environment["PENSTOCK_SELFTEST_GO_ON"] = "1"
            if status is None:
                break
            if status in (0, 1, 5):  # all passed, some failed, none were left; 99: conftest.py, the context was lost
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
        return _status([*command, *(str(HERE / file) for file in files)], seconds, environment)

    def report(self) -> None:
        found = results.summary(results.read(self.out))
        shown = results.Anonymous(self.files)
        text = json.dumps(found, indent=1, default=str, ensure_ascii=False)  # escapes would hide names from the search
        (self.out / "results.json").write_text(shown.text(text) + "\n")
        (self.out / "results.md").write_text(shown.text(results.markdown(found)) + "\n")
        trace = self.out / "trace.json"
        if trace.exists():
            with trace.open("rb") as plain, gzip.open(trace.with_suffix(".json.gz"), "wb") as packed:
                shutil.copyfileobj(plain, packed)
            trace.unlink()
        outcomes = [test["outcome"] for test in found["tests"].values()]
        counts = ", ".join(f"{outcomes.count(name)} {name}" for name in ("passed", "failed", "lost", "skipped"))
        print(f"{counts}; {self.out / 'results.md'}", flush=True)


def _output(command: list[str], seconds: float, environment: dict[str, str]) -> tuple[str, int | None]:
    """The output of a command, and its status; None if it was cut off."""
    with tempfile.TemporaryFile("w+") as said:
        status = _status(command, seconds, environment, stdout=said, stderr=subprocess.STDOUT)
        said.seek(0)
        return said.read(), status


def _status(command: list[str], seconds: float, environment: dict[str, str], **streams: Any) -> int | None:
    """The status of a command; None where it was cut off. All that it started ends with it, and with this process."""
    # A group of its own, and no session: a session would be left alone where this whole run is killed
    with _guarded() as guard:
        process = subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent, **streams)
        os.write(guard, f"{process.pid}\n".encode())
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # One that hangs in the driver does not even die
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            os.write(guard, b"ended")


def _end_with_parent() -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


#: Reads the number of a process group, and kills that group at the end of the pipe, unless a word has come before.
_GUARD = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
group = sys.stdin.readline()
if group and not sys.stdin.read():
    try:
        os.killpg(int(group), signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


@contextlib.contextmanager
def _guarded() -> Iterator[int]:
    """A process that kills a group when this process ends, however it ends. Gives where to write the group's number."""
    out, into = os.pipe()  # not inherited: only this process holds the end to write to
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD], stdin=out, stdout=subprocess.DEVNULL, start_new_session=True
    )
    os.close(out)
    try:
        yield into
    finally:
        os.close(into)
        guard.wait()


class _Terminated(BaseException):
    """SIGTERM."""


def _terminate(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Terminated


def parts(text: str) -> list[str]:
    """The parts that a command line names, in the order in which they run."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"there is no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    return [name for name in PARTS if name in names]


def seconds(text: str) -> float:
    """A time that a command line gives, from 1 s to a day."""
    value = float(text)
    if not 1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text}: give 1 to 86400 seconds")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Path("penstock-selftest")
    help = f"the folder for the report, results.md and results.json (default: {default})"
    parser.add_argument("--out", type=Path, default=default, metavar="FOLDER", help=help)
    parser.add_argument(
        "--budget", type=seconds, default=530, metavar="SECONDS", help="the most seconds for all of it (530)"
    )
    help = f"some of the parts, separated by commas (default: {','.join(PARTS)})"
    parser.add_argument("--parts", type=parts, default=list(PARTS), metavar="NAMES", help=help)
    parser.add_argument("--quick", action="store_true", help="use small checkpoints: this tries the suite, not the GPU")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(chosen: argparse.Namespace) -> int:
    """Runs the suite as the arguments say. Gives the status."""
    out: Path = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in (results.JOURNAL, "results.json", "results.md"):  # of an earlier run
        (out / name).unlink(missing_ok=True)
    os.environ[results.FOLDER] = str(out)
    signal.signal(signal.SIGTERM, _terminate)
    if os.environ.get("PENSTOCK_SELFTEST_CHILD") == "1":  # of a script that may be killed alone
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.alarm(math.ceil(max(1.0, chosen.budget)) + LATE)
    command = ["penstock", "selftest", "--gpu", "--out", str(out), "--budget", f"{chosen.budget:g}"]
    command += ["--parts", ",".join(chosen.parts), *(["--quick"] if chosen.quick else [])]
    run = Run(out, chosen.budget, chosen.quick, shlex.join(command))
    try:
        return tried(run, chosen.parts)
    except (KeyboardInterrupt, _Terminated) as ended:
        results.note(part="the run", ended="interrupted" if isinstance(ended, KeyboardInterrupt) else "terminated")
        run.report()
        return INTERRUPTED
    finally:
        signal.alarm(0)
        shutil.rmtree(run.files, ignore_errors=True)


def tried(run: Run, names: list[str]) -> int:
    """Tries these parts, and gives the status."""
    try:
        run.machine()
    except Exception as error:  # what describes the machine must not end the run
        results.note(machine={"not described": f"{type(error).__name__}: {error}"})
    probed = run.probe()
    if reason := probed["reason"]:
        results.note(machine={"no GPU": reason})
        run.report()
        print(f"There is no GPU here: {reason}")
        return NO_GPU
    results.note(machine={"fake": True} if os.environ.get("PENSTOCK_SELFTEST_FAKE") == "1" else {})
    results.note(machine={"penstock": probed["penstock"], "as penstock sees it": probed["gpus"]})
    well = []
    for name in names:
        well.append(run.part(name))
        run.report()  # after each: a run that is killed leaves what there was
    return PASSED if all(well) else FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
