"""Loads over a network that is far away and loses packets; `make netem` runs it, on the machine of `tools/lab.sh`.

    python tests/netem_loads.py FOLDER

FOLDER has the programs of `make netbench`. netem delays the packets of the loopback device, which carry 1,500 bytes as
they do elsewhere, so this is for a machine of its own. Every byte is compared, and no request may be sent again because
a server seemed to be silent. Prints a line per case; exits with 1 if one is wrong.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import ordeal
import penstock
from penstock.bench.served import Served

MIB = 1 << 20
TENSORS, LENGTH = 12, 2 * MIB + 5
#: Milliseconds there and back, and percent of the packets that are lost.
CASES = ((0, 0.0), (50, 0.0), (200, 0.0), (200, 1.0))


def link(round_trip: int, lost: float) -> None:
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False, capture_output=True)
    if round_trip or lost:
        # Each way has half of the delay; a queue that is too short would lose packets itself
        netem = ["netem", "delay", f"{round_trip / 2:g}ms", "loss", f"{lost:g}%", "limit", "200000"]
        subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", *netem], check=True)


def load(served: Served, file: Path, into: bool) -> str:
    want = ordeal.contents(file)
    begun = time.monotonic()
    checkpoint = penstock.open(served.urls([file])[0], storage=storage(served))
    if into:
        tensors = {name: np.zeros(checkpoint[name].shape, "uint8") for name in checkpoint}
        report = checkpoint.load_into(tensors, progress=False)
    else:
        tensors = checkpoint.load(framework="np", progress=False)
        report = checkpoint.last_report
    ordeal.same(tensors, want)
    assert report is not None and report.network is not None
    network = report.network
    assert network["retries"] == 0, network
    # What moved to another connection may have been on its way already
    assert network["received_bytes"] <= 1.05 * sum(map(len, want.values())), network
    return f"right in {time.monotonic() - begun:.1f} s: {dict(network)}"


def storage(served: Served) -> penstock.Storage:
    authority = served.environment.get("SSL_CERT_FILE")
    return {"ca": authority} if authority else {}


def main(tools: Path) -> int:
    failed = 0
    subprocess.run(["modprobe", "sch_netem"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "mtu", "1500"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        file = ordeal.write(Path(folder) / "model.safetensors", TENSORS, LENGTH)
        for tls in (False, True):
            with Served(Path(folder), tools, tls=tls) as served:
                for round_trip, lost in CASES:
                    link(round_trip, lost)
                    try:
                        said = load(served, file, into=lost > 0)
                    except Exception as error:
                        failed += 1
                        said = f"WRONG: {type(error).__name__}: {error}"
                    name = f"{'https' if tls else 'http'}, {round_trip} ms, {lost:g}% lost"
                    print(f"{name:30}{said}", flush=True)
                    link(0, 0)
    print("all well" if not failed else f"{failed} wrong", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
