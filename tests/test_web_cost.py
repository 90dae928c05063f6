"""What loads from a web server cost, seen from outside: bytes that the server gave, and memory of the process.

The server counts by itself (crates/netbench).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import penstock
import pytest
from conftest import Oracle
from penstock.bench.served import Served
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor

torch = pytest.importorskip("torch")

#: The folder of the server's program.
TOOLS = os.environ.get("PENSTOCK_TEST_NETBENCH")
# What a server gives twice is what did not come in time, so a busy machine makes more of it.
pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(not TOOLS, reason="PENSTOCK_TEST_NETBENCH names no folder: cargo build --release -p netbench"),
]

MIB = 1 << 20
TENSOR, COUNT = 4 * MIB, 64
STAGING, WINDOW, ROOM = 32 * MIB, 16 * MIB, 64 * MIB


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file of 268 MB: much more than a stream may hold."""
    folder = tmp_path_factory.mktemp("many")
    tensors = [Tensor(f"layers.{number}.weight", "F32", (1024, 1024)) for number in range(COUNT)]
    yield synth.write_file(folder / "many.safetensors", tensors)
    (folder / "many.safetensors").unlink()


def serving(file: Path, **link: str) -> Served:
    assert TOOLS
    return Served(file.parent, Path(TOOLS), link={name.replace("_", "-"): value for name, value in link.items()})


def columns(checkpoint: Any) -> Any:
    """A quarter of each row: 1 KiB of 4, with gaps that are smaller than a request is worth."""
    return checkpoint.load(slices=dict.fromkeys(checkpoint, np.s_[:, :256]))


def rows(checkpoint: Any) -> Any:
    return checkpoint.load(slices=dict.fromkeys(checkpoint, np.s_[100:300]))


def some(checkpoint: Any) -> Any:
    return checkpoint.load(names=list(checkpoint)[::5])


@pytest.mark.parametrize("load", [lambda c: c.load(), lambda c: dict(c.stream()), rows, columns, some],
                         ids=["all", "stream", "rows", "columns", "some"])  # fmt: skip
def test_the_server_gives_what_is_wanted_and_the_gaps(big: Path, load: Callable[[Any], Any]):
    with serving(big) as served:
        checkpoint = penstock.open(served.urls([big]))
        tensors = load(checkpoint)
        report, counts = checkpoint.last_report, served.counts()
    assert report is not None
    wanted = sum(tensor.nbytes for tensor in tensors.values())
    assert report.nbytes == wanted
    # The head of the file is read before it is known what is wanted
    assert wanted <= counts["bytes"] <= (wanted + report.gap_bytes) * 1.01 + (64 << 10), (counts, report.network)
    assert counts["connections"] <= 17 and counts["stalled"] == 0


def test_connections_over_the_servers_number_are_refused_and_every_byte_comes(big: Path):
    with serving(big, most_connections="12", over="refuse") as served:
        checkpoint = penstock.open(served.urls([big]))
        Oracle(big).same(checkpoint.load(framework="pt"))
        counts = served.counts()
    assert counts["refused"] > 0
    assert counts["bytes"] <= checkpoint.nbytes * 1.01


#: Loads when it is told to, and says what it holds. The consumer of a stream stops after its first tensor.
PROGRAM = """
import json, sys, time
import torch, penstock

spec = json.loads(sys.argv[1])
checkpoint = penstock.open(spec["url"])
print("ready", flush=True)
sys.stdin.readline()
if spec["stop"] is None:
    tensors = checkpoint.load(options=spec["options"], progress=False)
    found = {"nbytes": sum(tensor.nbytes for tensor in tensors.values())}
else:
    found = {"nbytes": 0}
    for number, (name, tensor) in enumerate(checkpoint.stream(options=spec["options"], progress=False)):
        found["nbytes"] += tensor.nbytes
        if number == 0:
            time.sleep(spec["stop"])
        del tensor
report = checkpoint.last_report
print(json.dumps(found | {"peak_staging": report.peak_staging}), flush=True)
sys.stdin.readline()
"""


def status(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


@contextlib.contextmanager
def loading(served: Served, file: Path, **spec: Any) -> Iterator[Callable[[], dict[str, int]]]:
    """A process that loads; what gives what the load took, once it is over.

    From outside: the highest resident memory of the process over what it had before.
    """
    asked = {"url": served.urls([file])[0], "stop": None, **spec}
    command = [sys.executable, "-c", PROGRAM, json.dumps(asked)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # The peak begins anew (proc(5)): importing takes more than a load may
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")
        before = status(process.pid, "VmRSS")
        print("go", file=process.stdin, flush=True)

        def ended() -> dict[str, int]:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "the load failed: its traceback is on standard error"
            found: dict[str, int] = json.loads(line)
            return found | {"peak": status(process.pid, "VmHWM") - before}

        yield ended
        print("end", file=process.stdin, flush=True)


def stopping(served: Served, file: Path) -> AbstractContextManager[Callable[[], dict[str, int]]]:
    """A stream whose consumer stops for longer than a connection may bring nothing."""
    return loading(served, file, options={"staging": STAGING, "window": WINDOW}, stop=10.5)


@pytest.fixture(scope="module", autouse=True)
def stopped(many: Path) -> Iterator[list[tuple[Served, Callable[[], dict[str, int]]]]]:
    """Such a stream that the first test of this module starts: the others run while it does nothing."""
    if not TOOLS:
        yield []
        return
    with serving(many) as served, stopping(served, many) as ended:
        yield [(served, ended)]


def test_a_load_takes_its_destination_and_staging(many: Path):
    with serving(many) as served, loading(served, many, options={"staging": STAGING}) as ended:
        found = ended()
        counts = served.counts()
    assert found["nbytes"] == TENSOR * COUNT
    assert found["nbytes"] <= found["peak"] <= found["nbytes"] + STAGING + ROOM, found
    assert counts["bytes"] <= found["nbytes"] * 1.01


def test_a_stream_whose_consumer_stops_takes_no_more_memory(many: Path, stopped: list[Any]):
    """For longer than a connection may bring nothing: time in which nothing is received is no stall."""
    with contextlib.ExitStack() as stack:
        if not stopped:  # tried again
            again = stack.enter_context(serving(many))
            stopped.append((again, stack.enter_context(stopping(again, many))))
        served, ended = stopped.pop()
        found = ended()
        counts = served.counts()
    assert found["nbytes"] == TENSOR * COUNT
    # What is ahead, and what the consumer holds
    assert found["peak"] <= WINDOW + TENSOR + STAGING + ROOM, found
    # No request was sent again
    assert counts["bytes"] <= found["nbytes"] * 1.01, counts
