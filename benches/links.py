"""Loads over links that are slower than this machine: `python benches/links.py FOLDER --tools FOLDER`.

FOLDER is for the checkpoint, --tools has `netbench` (`make netbench` builds it). Three measurements:

- `shaped`: network namespaces, joined by a veth pair that `tc tbf` holds to 1 and to 5 Gbit/s; needs root. Penstock's
  time by that of the bare loop: at most 1.05.
- `paced`: a server that gives each of at most 128 connections 8 MB/s, 50 ms after it was asked. The rate from two
  seconds after the start on, by the sum of all connections: at least 0.9.
- `stalled`: a server that stops 1% of its answers in the middle, takes 64 connections, and gives each a pace at which
  a load takes 10 s without stalls. The time by that of the same load without: at most 1.25.

Loads go into existing tensors, and the bare loop into memory whose pages are in use. They take turns, and every byte
that Penstock loads is compared. A table has medians. Namespaces are removed at the end, also after an error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.bench.checkpoints import fitted
from penstock.bench.child import Order
from penstock.bench.forkserver import Forkserver
from penstock.bench.machine import machine
from penstock.bench.page_cache import fill
from penstock.bench.process import LoadProcess
from penstock.bench.rounds import rotated
from penstock.bench.served import NotServed, Served
from penstock.synthetic import synth

OURS, LOOP = "penstock url load_into", "loop touched"
#: Addresses of the two ends: of a range that is kept for tests (RFC 2544).
SERVER, CLIENT = "198.18.0.1", "198.18.0.2"
#: The link model of `paced`: bytes per second of a connection, milliseconds to the first byte, connections.
PACE, FIRST_BYTE, MOST = 8e6, 50, 128
#: Seconds after which a load is to have found its connections.
SETTLED = 2.0


class NotHere(Exception):
    """This machine does not allow it; the message says what was refused."""


@dataclasses.dataclass
class Bench:
    """What all measurements share."""

    folder: Path
    tools: Path | None
    rounds: int
    forks: Forkserver
    found: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def checkpoint(self, nbytes: float) -> list[Path]:
        """About so many bytes with the tensors of Llama-3-8B, in the page cache."""
        folder = synth.write(fitted("llama-3-8b", nbytes), self.folder / f"{nbytes / 1e9:g}GB")
        files = sorted(folder.glob("*.safetensors"))
        fill(files)
        return files

    def load(self, served: Served, files: list[Path], during: Any = None) -> dict[str, Any]:
        """One load by Penstock in a process of its own, every byte compared. `during` runs while it loads."""
        paths = [str(file) for file in files]
        order = Order(OURS, "cpu", paths, str(files[0].parent), paths, into=True, urls=served.urls(files))
        size = sum(file.stat().st_size for file in files)
        with LoadProcess(self.forks, order, served.environment, 100 * size) as process:
            process.hear()
            before = served.counts()
            with during or contextlib.nullcontext():
                process.say("load")
                run = process.hear()
            process.say("verify")
            run |= process.hear()
            process.say("end")
        now = served.counts()
        assert run["verified_bytes"] == run["bytes"] and not run["different"], "wrong bytes"
        return run | {f"served_{name}": now[name] - before[name] for name in now}

    def keep(self, name: str, claim: str, value: float, bound: float, sign: str, **more: Any) -> None:
        holds = value <= bound if sign == "<=" else value >= bound
        self.found.append({"name": name, "claim": claim, "value": value, "bound": bound, "holds": holds} | more)
        told = ", ".join(f"{key} {number:.3g}" for key, number in more.items() if isinstance(number, (int, float)))
        print(f"{name}: {claim}: {value:.3f} ({sign} {bound}: {'holds' if holds else 'FAILS'}); {told}", flush=True)


def shaped(bench: Bench) -> None:
    """Links of 1 and of 5 Gbit/s."""
    files = bench.checkpoint(1e9)
    for gigabits in (1, 5):
        with link(gigabits) as inside, Served(files[0].parent, bench.tools, prefix=inside, host=SERVER) as served:
            times: dict[str, list[float]] = {OURS: [], LOOP: []}
            cpu: dict[str, list[float]] = {OURS: [], LOOP: []}
            for number in range(bench.rounds):
                for turn in rotated(list(times), number):
                    if turn == OURS:
                        run = bench.load(served, files)
                        seconds = run["load_s"]
                    else:
                        run = served.fetch(LOOP, files)
                        seconds = run["seconds"]
                    times[turn].append(seconds)
                    cpu[turn].append(run["cpu_s"])
        ours, loop = (statistics.median(times[turn]) for turn in (OURS, LOOP))
        bench.keep(
            f"shaped, {gigabits} Gbit/s", "time by that of the bare loop", ours / loop, 1.05, "<=",
            seconds=ours, loop_seconds=loop, cpu_s=statistics.median(cpu[OURS]),
            loop_cpu_s=statistics.median(cpu[LOOP]), all=times,
        )  # fmt: skip


@contextlib.contextmanager
def link(gigabits: float) -> Iterator[list[str]]:
    """A namespace whose bytes come at that rate. Gives what begins a command that runs in it.

    Raises:
        NotHere: if this machine does not allow it.
    """
    name = f"penstock-{os.getpid()}"
    here, there = f"pst{os.getpid()}a"[:15], f"pst{os.getpid()}b"[:15]

    def run(*command: str) -> None:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise NotHere(f"there is no {command[0]}, which iproute2 has") from None
        except subprocess.CalledProcessError as error:
            raise NotHere(f"{' '.join(command)}: {error.stderr.strip()}") from None

    inside = ["ip", "netns", "exec", name]
    try:
        run("ip", "netns", "add", name)
        run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        run("ip", "address", "add", f"{CLIENT}/30", "dev", here)
        run("ip", "link", "set", here, "up")
        run(*inside, "ip", "address", "add", f"{SERVER}/30", "dev", there)
        run(*inside, "ip", "link", "set", there, "up")
        # A segment of the kernel's own offload has 64 KiB: the bucket holds a few
        rate = f"{round(gigabits * 1000)}mbit"
        run(*inside, "tc", "qdisc", "add", "dev", there, "root", "tbf", "rate", rate, "burst", "512kb", "limit", "4mb")
        yield inside
    finally:
        # With the namespace goes its end of the pair, and with that the other
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", here], check=False, capture_output=True)


class Watched:
    """Looks at what a server has sent, ten times a second, while its context is open."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        #: Seconds since the start, and bytes that had been sent by then.
        self.seen: list[tuple[float, int]] = []

    def _look(self) -> None:
        begun, first = time.perf_counter(), self._served.counts()["bytes"]
        while not self._over.wait(0.1):
            now = self._served.counts()["bytes"] - first
            self.seen.append((time.perf_counter() - begun, now))

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def rate(self, after: float, until: float) -> float:
        """Bytes per second, from so many seconds on until so many bytes were sent."""
        part = [(seconds, sent) for seconds, sent in self.seen if seconds >= after and sent <= until]
        if len(part) < 5:
            raise NotServed(f"the load was too short to have a rate after {after:g} s")
        return (part[-1][1] - part[0][1]) / (part[-1][0] - part[0][0])


def paced(bench: Bench) -> None:
    """A distant server that gives each connection little."""
    files = bench.checkpoint(4e9)
    model = {"rate-per-connection": f"{PACE:g}", "first-byte": str(FIRST_BYTE), "most-connections": str(MOST)}
    with Served(files[0].parent, bench.tools, link=model) as served:
        runs, rates = [], []
        for _ in range(bench.rounds):
            watched = Watched(served)
            runs.append(bench.load(served, files, watched))
            # Not the end, when there are fewer requests than connections
            rates.append(watched.rate(SETTLED, 0.85 * runs[-1]["bytes"]))
    rate = statistics.median(rates)
    bench.keep(
        "paced", f"rate after {SETTLED:g} s by the sum of {MOST} connections", rate / (PACE * MOST), 0.9, ">=",
        mb_per_s=rate / 1e6, seconds=statistics.median(run["load_s"] for run in runs),
        connections=statistics.median(run["served_connections"] for run in runs),
        served_by_wanted=statistics.median(run["served_bytes"] / run["bytes"] for run in runs), all=rates,
    )  # fmt: skip


def stalled(bench: Bench) -> None:
    """A server that forgets some of its answers."""
    files = bench.checkpoint(4e9)
    size = sum(file.stat().st_size for file in files)
    model = {"rate-per-connection": f"{size / 10 / 64:g}", "first-byte": str(FIRST_BYTE), "most-connections": "64"}
    times: dict[str, list[float]] = {"none": [], "1%": []}
    runs = []
    for number in range(bench.rounds):
        for turn in rotated(list(times), number):
            # Each round stalls others. Of few requests there are seeds that stall none: these say nothing
            more = {"stall-percent": "1", "seed": str(number + 1)} if turn == "1%" else {}
            with Served(files[0].parent, bench.tools, link=model | more) as served:
                run = bench.load(served, files)
            times[turn].append(run["load_s"])
            if turn == "1%":
                runs.append(run)
    without, stalling = (statistics.median(times[turn]) for turn in ("none", "1%"))
    bench.keep(
        "stalled", "time by that without", stalling / without, 1.25, "<=", seconds=stalling, without=without,
        stalls=statistics.mean(run["served_stalled"] for run in runs),
        served_by_wanted=max(run["served_bytes"] / run["bytes"] for run in runs), all=times,
    )  # fmt: skip


MEASUREMENTS = {"shaped": shaped, "paced": paced, "stalled": stalled}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoints are written: 6 GB")
    parser.add_argument("--tools", type=Path, help="folder of netbench (default: PATH)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=MEASUREMENTS, action="append", help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    # Or the namespace would stay
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    about = machine([arguments.folder], None)
    with Forkserver() as forks:
        bench = Bench(arguments.folder, arguments.tools, arguments.rounds, forks)
        for name in arguments.only or MEASUREMENTS:
            try:
                MEASUREMENTS[name](bench)
            except (NotHere, NotServed) as error:
                bench.found.append({"name": name, "absent": str(error)})
                print(f"{name}: not here: {error}", file=sys.stderr, flush=True)
    if arguments.json:
        found = {"machine": about, "load_average_at_end": list(os.getloadavg()), "found": bench.found}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
