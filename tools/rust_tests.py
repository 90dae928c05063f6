"""Runs the Rust tests: those that compute side by side, then one program at a time those that observe the machine.

    python tools/rust_tests.py [--observing NAME]... [--slowest N] CARGO_ARGUMENT...

Builds all test programs with `cargo test --no-run CARGO_ARGUMENT...`, and runs each from the folder of its package, as
cargo does. A program that is named as observing (page cache, time, threads) is judged as `tests/machine.py` judges the
Python tests: what fails in it while others use the machine is tried again alone, and is skipped at last with a reason.
Wrong bytes and errors are failures on every machine. The examples in the documentation are tested at the end.

Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from neighbours import MOST, PREFIX, TRIES, Moment, is_quiet, pressure_before

#: A program that runs longer hangs: the slowest takes a minute on a quiet machine.
LIMIT = 900


@dataclass(frozen=True)
class Program:
    """A test program, the folder that it runs in, and the folder of libraries that it needs beside the system's."""

    name: str
    path: str
    folder: str
    libraries: str = ""


@dataclass
class Outcome:
    """What became of a program: the tests that passed and those that failed with what they said."""

    seconds: float
    output: str
    code: int
    passed: int = 0
    ignored: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def programs(arguments: list[str]) -> list[Program]:
    """Builds the test programs."""
    command = ["cargo", "test", "--no-run", "--message-format=json-render-diagnostics", *arguments]
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode:
        sys.exit(built.returncode)
    found = []
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] == "compiler-artifact" and message["profile"]["test"] and message["executable"]:
            folder = str(Path(message["manifest_path"]).parent)
            # The tests of a macro are linked to the standard library of the compiler that runs it
            libraries = target_libraries() if "proc-macro" in message["target"]["kind"] else ""
            found.append(Program(message["target"]["name"], message["executable"], folder, libraries))
    return sorted(found, key=lambda program: (program.name, program.path))


def target_libraries() -> str:
    """The folder of Rust's own libraries."""
    command = ["rustc", "--print", "target-libdir"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def run(program: Program, *arguments: str) -> Outcome:
    """Runs tests of a program."""
    environment = {**os.environ, "CARGO_MANIFEST_DIR": program.folder}
    if program.libraries:
        environment["LD_LIBRARY_PATH"] = program.libraries
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [program.path, *arguments],
            cwd=program.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=LIMIT, check=False,
        )  # fmt: skip
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        output = said.decode(errors="replace") if isinstance(said, bytes) else said
        output, code = f"{output}\n{program.name} hangs: it has run for {LIMIT} s\n", -1
    return judged(Outcome(time.monotonic() - begun, output, code))


def judged(outcome: Outcome) -> Outcome:
    """Reads the outcome of each test from what the program printed."""
    for result in re.findall(r"^test result: .*", outcome.output, re.MULTILINE):
        counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|ignored)", result)}
        # A test that runs its own program again prints a result of its own: the last one counts
        outcome.passed, outcome.ignored = counts["passed"], counts["ignored"]
    said = dict(re.findall(r"^---- (\S+) stdout ----\n(.*?)(?=^---- |^failures:$)", outcome.output, re.M | re.S))
    names = re.findall(r"^test (\S+)(?: - should panic)? \.\.\. FAILED$", outcome.output, re.MULTILINE)
    outcome.failed = {name: said.get(name, "") for name in [*names, *said]}
    if outcome.code and not outcome.failed:
        outcome.failed = {"": f"the program ended with {outcome.code}"}
    return outcome


def excusable(said: str) -> bool:
    """Whether a failure may come of what others do: an assertion, except about results; and no error."""
    panics = re.findall(r"panicked at .*:\n(.*)", said)
    return bool(panics) and not any("wrong bytes" in text or text.startswith("called `") for text in panics)


def observed(program: Program) -> tuple[Outcome, dict[str, str]]:
    """Runs a program that observes the machine; what failed at last, and what was skipped with the reason."""
    before = Moment.now()
    first = run(program)
    print(first.output, flush=True)
    reason = Moment.now().disturbance(before)
    skipped: dict[str, str] = {}
    for name, said in list(first.failed.items()):
        for _ in range(TRIES - 1):
            if reason is None or not excusable(said):
                break
            print(f"{program.name} {name}: tried again, {reason}", flush=True)
            before = Moment.now()
            again = run(program, "--exact", name, "--test-threads=1")
            print(again.output, flush=True)
            reason = Moment.now().disturbance(before)
            if not again.failed:
                del first.failed[name]
                first.passed += 1
                break
            said = first.failed[name] = again.failed.get(name, again.output)
        else:
            if reason is not None and excusable(said):
                skipped[f"{program.name} {name}"] = reason
                del first.failed[name]
    return first, skipped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--observing", action="append", default=[], metavar="NAME", help="observes the machine")
    parser.add_argument("--slowest", type=int, default=5, metavar="N", help="programs to name (default: 5)")
    options, arguments = parser.parse_known_args()

    pressure = pressure_before()
    every = programs(arguments)
    if missing := set(options.observing) - {program.name for program in every}:
        parser.error(f"no test program is called {', '.join(sorted(missing))}")
    computing = [program for program in every if program.name not in options.observing]
    outcomes: dict[str, Outcome] = {}
    skipped: dict[str, str] = {}
    # Each has as many threads as there are cores, and most wait now and then. The largest program has the most tests,
    # and begins first: the others fit in beside it
    computing.sort(key=lambda program: -Path(program.path).stat().st_size)
    with ThreadPoolExecutor(max(4, len(os.sched_getaffinity(0)) // 2)) as pool:
        for program, outcome in zip(computing, pool.map(run, computing), strict=True):
            print(f"{program.name}\n{outcome.output}", flush=True)
            outcomes[program.name] = outcome
    for program in every:
        if program not in computing:
            print(program.name, flush=True)
            outcomes[program.name], why = observed(program)
            skipped |= why
    examples = subprocess.run(["cargo", "test", "--doc", *arguments], check=False)

    print("slowest: " + ", ".join(
        f"{name} {outcome.seconds:.1f} s"
        for name, outcome in sorted(outcomes.items(), key=lambda pair: -pair[1].seconds)[: options.slowest]
    ))  # fmt: skip
    failed = [f"{program} {name}" for program, outcome in outcomes.items() for name in outcome.failed]
    for name, why in skipped.items():
        print(f"SKIPPED {name}: {PREFIX}{why}")
    for name in failed:
        print(f"FAILED {name}")
    passed = sum(outcome.passed for outcome in outcomes.values())
    ignored = sum(outcome.ignored for outcome in outcomes.values())
    print(f"Rust: {passed} passed, {len(failed)} failed, {len(skipped)} skipped, {ignored} ignored")
    if is_quiet(pressure) and len(skipped) > MOST * (passed + len(skipped)):
        print(f"FAILED: more than {MOST:.0%} of all tests were skipped on a machine that was quiet before ({pressure})")
        return 1
    return 1 if failed or examples.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
