"""The cost of one event for a load, in microseconds, with each output off and on.

    python benches/events.py [--rounds N]

The program repeats the work for operators without a load: it writes an event with the report of a real load, and counts
one more read of a handle, which writes one event for all its reads. Each output is measured in its own process. The
least of many short rounds counts, because other programs only add to a time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import sys, time
where, path, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
if where == "span":
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    trace.set_tracer_provider(TracerProvider())
import penstock
from penstock._event_words import Measured
from penstock._events import NOTHING, observe
checkpoint = penstock.open(path)
checkpoint.load(framework="dlpack")
report = checkpoint.last_report
handle = observe("safe_open", checkpoint, kept=True)

def event():
    with observe("load", checkpoint) as seen:
        seen.add(report)

def read():
    if handle is not NOTHING:
        begun = time.perf_counter()
        handle.count(Measured(8, 1, time.perf_counter() - begun, (0, 8, 0, 0, 0)))

for work in (event, read):
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(20):
            work()
        times.append((time.perf_counter() - begun) / 20)
    print(min(times) * 1e6)
"""

OUTPUTS: dict[str, dict[str, str]] = {
    "nothing": {},
    "text": {"PENSTOCK_LOG": "text"},
    "json": {"PENSTOCK_LOG": "json"},
    "metrics": {"PENSTOCK_METRICS": ""},
    "span": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="rounds of 20 events (200)")
    asked = parser.parse_args()
    from penstock.synthetic import synth
    from penstock.synthetic.synth import Tensor

    with tempfile.TemporaryDirectory() as folder:
        path = synth.write_file(Path(folder, "model.safetensors"), [Tensor("one", "U8", (64,))])
        print(f"{'output':<10}{'a load':>12}{'a read of a handle':>22}   microseconds")
        for name, switches in OUTPUTS.items():
            plain = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
            environment = plain | {key: value or folder for key, value in switches.items()}
            command = [sys.executable, "-c", PROGRAM, name, str(path), str(asked.rounds)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{name:<10}{'not measured':>12}: {done.stderr.strip().splitlines()[-1]}")
                continue
            load, read = map(float, done.stdout.split())
            print(f"{name:<10}{load:12.1f}{read:22.1f}")


if __name__ == "__main__":
    main()
