"""A reader in a loop, in a process of its own, beside saves over the same prefix."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ordeal
import penstock

#: Reads until its input ends, then once more. A line for each read: the version that all tensors are of, or the error.
READER = """
import json, sys, threading
import numpy, penstock

place, storage, of = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()

def shapes(version):
    return {f"layers.{i}.w": [1000 + 10 * i + version % 7] for i in range(of)}

def read():
    try:
        state = penstock.open(place, storage=storage).load(framework="np", progress=False)
    except (penstock.ChangedError, penstock.NotFoundError) as e:
        return {"error": type(e).__name__, "says": str(e)}
    versions = sorted({int(value) for tensor in state.values() for value in numpy.unique(tensor)})
    found = {name: list(tensor.shape) for name, tensor in state.items()}
    if len(versions) != 1 or found != shapes(versions[0]):
        return {"mixture": versions, "found": found}
    return {"version": versions[0]}

while True:
    is_last = over.is_set()
    print(json.dumps(read()), flush=True)
    if is_last:
        break
"""
TENSORS = 8
#: Bytes of a shard: three tensors fit.
SHARD = 13_000


def state(version: int) -> dict[str, np.ndarray]:
    """Tensors whose values all are the version. Their shapes differ from those of the versions next to it."""
    return {f"layers.{i}.w": np.full(1000 + 10 * i + version % 7, version, np.int32) for i in range(TENSORS)}


class Reads:
    """The reads of another process so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self.arrived = threading.Condition()
        self.thread = threading.Thread(target=self._hear)
        self.thread.start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.arrived:
                self.lines.append(json.loads(line))
                self.arrived.notify_all()
        with self.arrived:
            self.arrived.notify_all()

    def wait(self, count: int) -> None:
        """Waits until there were so many reads."""
        with self.arrived:
            reached = self.arrived.wait_for(
                lambda: len(self.lines) >= count or not self.thread.is_alive(), 60 * ordeal.load_factor()
            )
            if not reached:
                raise ordeal.Hung(f"the reader made {len(self.lines)} reads")
            if len(self.lines) < count:
                raise ordeal.Died("the reader has ended: its traceback is on standard error")


@contextmanager
def reading(place: str, storage: Any) -> Iterator[Reads]:
    command = [sys.executable, "-c", READER, place, json.dumps(storage, default=str), str(TENSORS)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=dict(os.environ)) as process:
        reads = Reads(process)
        try:
            yield reads
        except BaseException:
            process.kill()
            raise
        finally:
            assert process.stdin is not None
            process.stdin.close()
            reads.thread.join()
    assert process.returncode == 0, "the reader ended with an error: its traceback is on standard error"


def each_read_is_one_version(place: str, storage: Any, saves: int) -> collections.Counter[str]:
    """So many saves, of a single file and of shards in turn; a reader meanwhile, which reads at least as often.

    Returns how its reads have ended.
    """
    penstock.save(state(0), place, storage=storage)
    with reading(f"{place}/", storage) as reads:
        for version in range(1, saves + 1):
            # A save begins at any moment of a read: it only waits for the one that was under way
            reads.wait(len(reads.lines) + version % 3)
            most = SHARD if version % 2 else None
            report = penstock.save(state(version), place, max_shard_size=most, storage=storage)
            assert len(report.files) == (4 if version % 2 else 1)
    lines = reads.lines
    assert not (mixed := [line for line in lines if "mixture" in line]), mixed
    versions = [line["version"] for line in lines if "version" in line]
    assert versions == sorted(versions), "an old version came back"
    assert lines[-1].get("version") == saves, "the last read, after all saves, is of the last version"
    return collections.Counter(line.get("error", "whole") for line in lines)
