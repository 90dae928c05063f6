"""Two Ray nodes in two network namespaces, whose actors load one checkpoint together; `make ray` runs it, as root.

Each namespace has a firewall that lets in Ray's ports, that of torch's store, and Penstock's, all of them named here.
One actor runs on each node. The first hosts a `TCPStore`; both give it to Penstock as ``group=(store, rank, size)``.
Every tensor is compared with what safetensors reads, in two loads: with one key on both nodes, and with another key on
one of them, which must be refused by name. Prints a line per case; exits with 1 if one is wrong, and with 77 where this
machine lacks something.

The actors get the key by the environment of their Ray node, as pods get it by that of their container: what is given to
Ray as ``runtime_env`` is shown in Ray's dashboard and logs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from two_nodes import PORTS, STORE, Node, missing, two_nodes

#: Of a Ray node, and of its workers. Ray's own names: --port, --node-manager-port and so on.
HEAD, MANAGER, OBJECTS, RUNTIME, METRICS, AGENT, LISTENS = range(6379, 6386)
WORKERS = (6400, 6439)
TRIES = 6
OPEN = (str(STORE), PORTS, f"{HEAD}-{LISTENS}", f"{WORKERS[0]}-{WORKERS[1]}")
KEYS = ("a key that both nodes have", "a key that one node has")

#: What runs on the first node, beside Ray's head.
JOB = """
import json, os, sys
import ray

path, store, ports, at = sys.argv[1:]

@ray.remote(num_cpus=1, max_restarts=0)
class Rank:
    def load(self, rank, size):
        import socket
        from datetime import timedelta
        import penstock, torch
        import torch.distributed as dist
        from safetensors.torch import load_file

        met = dist.TCPStore(at, int(store), None, rank == 0, timedelta(seconds=60), wait_for_workers=False)
        self.met = met  # rank 0 hosts it, for as long as this actor lives
        checkpoint, said = penstock.open(path), {"host": socket.gethostname(), "node": ray.util.get_node_ip_address()}
        options = {"ports": ports, "bind": said["node"], "exchange": "on", "cache": "bypass", "join_timeout": 120}
        try:
            found, expected = checkpoint.load(group=(met, rank, size), options=options), load_file(path)
        except penstock.PenstockError as error:
            said["refused"] = f"{type(error).__name__}: {error}"
        else:
            assert found.keys() == expected.keys()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
            said.update(tensors=len(found), received=checkpoint.last_report["exchange"]["received_bytes"])
        return said

ray.init(address=f"{at}:6379", _node_ip_address=at, logging_level="error", log_to_driver=False)
ranks = [Rank.options(resources={node: 1}).remote() for node in ("node_a", "node_b")]
print("said " + json.dumps(ray.get([one.load.remote(rank, 2) for rank, one in enumerate(ranks)], timeout=240)))
"""


def start(node: Node, name: str, folder: Path, key: str, head: str | None) -> subprocess.Popen[bytes]:
    """Ray on one node; `head`: the address of the other one, which is there already."""
    ports = [
        f"--node-manager-port={MANAGER}", f"--object-manager-port={OBJECTS}", f"--runtime-env-agent-port={RUNTIME}",
        f"--metrics-export-port={METRICS}", f"--dashboard-agent-grpc-port={AGENT}",
        f"--min-worker-port={WORKERS[0]}", f"--max-worker-port={WORKERS[1]}",
        f"--dashboard-agent-listen-port={LISTENS}",
    ]  # fmt: skip
    begins = (
        [
            "--head",
            f"--port={HEAD}",
            "--include-dashboard=false",
            f"--temp-dir={folder}",
        ]
        if head is None
        else [f"--address={head}:{HEAD}"]
    )
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--block", *begins, *ports,
        f"--node-ip-address={node.address}",
        "--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000", f'--resources={{"{name}": 1}}',
        "--disable-usage-stats",
    ]  # fmt: skip
    with open(folder / f"{name}.log", "w") as log:
        return subprocess.Popen(
            node.command(*command), env=environment(key), stdout=log, stderr=log, start_new_session=True
        )


def started(node: Node, name: str, folder: Path, key: str, head: str | None) -> subprocess.Popen[bytes]:
    """The same, once it is ready. Ray gives its agents 15 s to start: on a busy machine that takes several tries."""
    for _ in range(TRIES):
        ray, log = start(node, name, folder, key, head), folder / f"{name}.log"
        while ray.poll() is None:
            if "Ray runtime started" in log.read_text():
                return ray
            time.sleep(0.2)
    raise SystemExit(f"Ray does not start:\n{log.read_text()}")


def environment(key: str | None = None) -> dict[str, str]:
    more = {
        "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin",
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "RAY_DEDUP_LOGS": "0",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **({"PENSTOCK_PEER_KEY": key} if key is not None else {}),
    }
    return {**os.environ, **more}


def stop(ray: subprocess.Popen[bytes]) -> None:
    """`ray start --block` ends its own processes when it is told to end."""
    ray.terminate()
    try:
        ray.wait(60)
    except subprocess.TimeoutExpired:
        ray.kill()
        ray.wait()


def case(model: Path, folder: Path, keys: Sequence[str]) -> list[dict[str, object]]:
    """What both actors say, with these keys on their nodes."""
    folder.mkdir()
    running: list[subprocess.Popen[bytes]] = []
    with two_nodes(folder, boot_ids=True, ports=OPEN) as nodes:
        try:
            for name, node, key in zip(("node_a", "node_b"), nodes, keys, strict=True):
                running.append(started(node, name, folder, key, nodes[0].address if running else None))
            job = [sys.executable, "-c", JOB, str(model), str(STORE), PORTS, nodes[0].address]
            done = subprocess.run(
                nodes[0].command(*job), env=environment(), capture_output=True, text=True, timeout=420, check=False
            )
            said = [line for line in done.stdout.splitlines() if line.startswith("said ")]
            logs = "".join((folder / f"{name}.log").read_text() for name in ("node_a", "node_b"))
            assert said, f"{done.stdout}\n{done.stderr}\n{logs}"
            found: list[dict[str, object]] = json.loads(said[0].removeprefix("said "))
            return found
        finally:
            for ray in reversed(running):
                stop(ray)


def main() -> int:
    lacks = missing()
    if lacks:
        print(lacks)
        return 77
    # Ray's sockets have paths of 107 bytes at most
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    try:
        tensors = [Tensor(f"{number}", "U8", (1 << 20,)) for number in range(16)]
        model = synth.write_file(folder / "model.safetensors", tensors)
        said = case(model, folder / "a", (KEYS[0], KEYS[0]))
        print(f"one key: {said}")
        right = [one.get("tensors") for one in said] == [16, 16] and [one["host"] for one in said] == [
            "node-a",
            "node-b",
        ]
        right &= all(int(str(one["received"])) > 0 for one in said)
        said = case(model, folder / "b", KEYS)
        print(f"another key on one node: {said}")
        refused = [str(one.get("refused")) for one in said]
        right &= all("PENSTOCK_PEER_KEY differs" in text and not any(key in text for key in KEYS) for text in refused)
        return 0 if right else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
