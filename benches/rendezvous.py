"""Questions of ranks to their rendezvous store: `python benches/rendezvous.py [--ranks N] [--rounds N]`.

Ranks on this machine have a `torch.distributed.TCPStore` in rank 0, and next to nothing to load. In each round they

- join, compare their files, confirm and leave, as vLLM's loader does (`join to leave`);
- load out of the page cache, each alone (`a load of each alone`);
- load with `exchange="on"` (`a load with exchange`);
- wait a second for rank 0, which then confirms like the others (`rank 0 comes a second later`).

A line has the mean number of calls of the store by a rank, without `check` and with it, the median time of the slowest
rank, and the median processor time of all ranks together, that of the store in rank 0 included. The first two rounds do
not count. `check` is asked while a rank waits: its number depends on the time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import penstock
import torch
import torch.distributed as dist
from penstock._group import Rendezvous, confirm
from penstock._member import new_group
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor

#: Rounds that do not count.
UNTIMED = 2
CALLS = ("set", "get", "add", "check", "delete_key", "multi_get")


class Counted:
    """A store that counts its calls."""

    def __init__(self, store: Any) -> None:
        self.underlying_store = store
        self.calls = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.underlying_store, name)
        if name not in CALLS:
            return found

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return found(*arguments)

        return call


Found = dict[str, tuple[int, int, float, float]]
"""For each part of a round: calls without `check`, and with it; seconds; seconds of the processor."""


def rank_of(rank: int, size: int, port: int, path: str, rounds: int, out: Any, barrier: Any) -> None:
    """One rank. Puts what it found in each round."""
    if rank > 0:
        barrier.wait()
    inner = dist.TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    if rank == 0:
        barrier.wait()
    store = Counted(inner)
    group = (store, rank, size)
    options = penstock.Options(join_timeout=60.0)
    checkpoint = penstock.open(path)
    found: list[Found] = [{} for _ in range(rounds)]

    @contextmanager
    def part(number: int, name: str) -> Iterator[None]:
        barrier.wait()
        store.calls.clear()
        begun, processor = time.perf_counter(), time.process_time()
        yield
        seconds, used = time.perf_counter() - begun, time.process_time() - processor
        calls = store.calls.total()
        found[number][name] = calls - store.calls["check"], calls, seconds, used

    for number in range(rounds):
        with part(number, "join to leave"), penstock.joined(group, options=options):
            member = new_group(group)
            with Rendezvous(member) as rendezvous:
                rendezvous.vote(checkpoint._core, options, "")
            confirm(member)
            member.leave()
        with part(number, "a load of each alone"):
            checkpoint.load(group=group, options=options)
        with part(number, "a load with exchange"):
            checkpoint.load(group=group, options={"exchange": "on", "join_timeout": 60.0})
        with part(number, "rank 0 comes a second later"):
            if rank == 0:
                time.sleep(1)
            confirm(group)
    out.put((rank, found))
    barrier.wait()  # the store is in rank 0


def main() -> None:
    """Runs the ranks, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    rounds = max(asked.rounds, UNTIMED + 1)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        path = synth.write_file(Path(folder, "model.safetensors"), [Tensor(str(n), "U8", (1 << 16,)) for n in range(4)])
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        out, barrier = context.Queue(), context.Barrier(asked.ranks)
        of_all = (asked.ranks, port, str(path), rounds, out, barrier)
        ranks = [context.Process(target=rank_of, args=(rank, *of_all)) for rank in range(asked.ranks)]
        for process in ranks:
            process.start()
        found = [rounds_of for _, rounds_of in sorted(out.get() for _ in ranks)]
        for process in ranks:
            process.join()
    print(f"{asked.ranks} ranks, {rounds - UNTIMED} rounds, torch {torch.__version__}, {os.cpu_count()} processors")
    print("| part | calls of a rank | with `check` | ms | processor ms of all |\n|---|---|---|---|---|")
    for name in found[0][0]:
        timed = [[one[name] for one in of_rank[UNTIMED:]] for of_rank in found]
        calls, checked = (statistics.mean(one[at] for of_rank in timed for one in of_rank) for at in (0, 1))
        slowest = statistics.median(max(one[2] for one in each) for each in zip(*timed, strict=True))
        processor = statistics.median(sum(one[3] for one in each) for each in zip(*timed, strict=True))
        print(f"| {name} | {calls:.1f} | {checked:.1f} | {slowest * 1e3:.1f} | {processor * 1e3:.1f} |")


if __name__ == "__main__":
    main()
