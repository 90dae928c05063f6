"""Two network namespaces that stand for two machines: an address and a firewall each, and a wire between them.

What is real: the kernel's TCP over a device that is not loopback, routes, nftables that drops what is not named, host
names, and (where asked for) another boot id, by which Penstock tells machines apart. What is not: there is one kernel,
one clock, one page cache, one disk, and no switch or card between the two.

Needs root, `ip` (iproute2), `nft` (nftables) and `unshare`, and a kernel that has namespaces and nf_tables.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: Addresses of a range that is kept for tests (RFC 2544), and unique local ones (RFC 4193).
ADDRESSES = (("198.18.0.1", "fd00:77::1"), ("198.18.0.2", "fd00:77::2"))
#: Ports of the rendezvous store and of the ranks. Nobody else is in these namespaces.
STORE, PORTS = 29400, "40000-40063"
#: Both processes' import of torch, on a machine with other work.
LONG = 300.0

RANK = r"""
import json, os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import penstock
from safetensors.torch import load_file

order = json.loads(sys.argv[1])
rank, size, path, folder, at = (order[name] for name in ("rank", "size", "path", "folder", "at"))
options, said = order["options"], {}

def write(name, text=""):
    with open(f"{folder}/{name}.new", "w") as file:
        file.write(text)
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}")

def same(tensors):
    expected = load_file(path)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    return len(tensors)

def refused(load):
    begun = time.monotonic()
    try:
        load()
    except penstock.PenstockError as error:
        said.update(kind=type(error).__name__, text=str(error), seconds=time.monotonic() - begun)
    else:
        said.update(kind=None, text="it loaded")

store = dist.TCPStore(at, order["port"], None, rank == 0, timedelta(seconds=60), wait_for_workers=False)
group = (store, rank, size)
try:
    exec(compile(order["program"], "<program>", "exec"), globals())
finally:
    write(f"said.{rank}", json.dumps(said))
    # Rank 0 hosts the store
    while rank == 0 and not all(os.path.exists(f"{folder}/said.{other}") for other in range(size)):
        time.sleep(0.01)
os._exit(0)
"""


def missing() -> str:
    """What this machine lacks for it; "" if nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = [name for name in ("ip", "nft", "unshare") if shutil.which(name, path=path) is None]
    if absent:
        return f"there is no {', '.join(absent)} here (Debian: iproute2 nftables util-linux)"
    tried = subprocess.run(["unshare", "--net", "nft", "list", "tables"], capture_output=True, text=True, env=_env())
    return f"no namespaces, or no nf_tables: {tried.stderr.strip()}" if tried.returncode else ""


def _env(more: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin", **(more or {})}


def _do(*command: str, text: str | None = None) -> str:
    run = subprocess.run(command, capture_output=True, text=True, input=text, env=_env())
    assert run.returncode == 0, f"{' '.join(command)}: {run.stderr}"
    return run.stdout


class Node(NamedTuple):
    """One of the two."""

    namespace: str
    host: str
    address: str
    address6: str
    #: A file with its boot id; None: that of this machine.
    boot_id: Path | None

    def command(self, *command: str) -> list[str]:
        """The same command there."""
        script = f"hostname {self.host}; "
        if self.boot_id is not None:
            script += f"mount --bind {self.boot_id} /proc/sys/kernel/random/boot_id; "
        shell = ["sh", "-ec", script + 'exec "$@"', "-", *command]
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", *shell]

    def dropped(self) -> int:
        """Packets that its firewall has dropped."""
        rules = json.loads(_do("ip", "netns", "exec", self.namespace, "nft", "-j", "list", "table", "inet", "guard"))
        counters = [rule["counter"] for rule in rules["nftables"] if "counter" in rule]
        return sum(counter["packets"] for counter in counters)

    def sent(self) -> int:
        """Bytes that it has sent to the other one, with all headers."""
        found = json.loads(_do("ip", "-n", self.namespace, "-j", "-s", "link", "show", "dev", "wire"))
        return int(found[0]["stats64"]["tx"]["bytes"])


def _guard(node: Node, ports: Sequence[str]) -> None:
    """Nothing comes in except to these ports, and answers."""
    named = ", ".join(ports)
    rules = f"""
    table inet guard {{
      counter refused {{ }}
      chain input {{
        type filter hook input priority 0; policy drop;
        iifname "lo" accept
        ct state established,related accept
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        tcp dport {{ {named} }} accept
        counter name refused drop
      }}
    }}
    """
    _do("ip", "netns", "exec", node.namespace, "nft", "-f", "-", text=rules)


@contextlib.contextmanager
def two_nodes(
    folder: Path, *, boot_ids: bool = False, ports: Sequence[str] = (str(STORE), PORTS)
) -> Iterator[list[Node]]:
    """Makes them. `boot_ids`: each has one of its own. `ports`: those that their firewalls let in."""
    nodes = []
    for number, (address, address6) in enumerate(ADDRESSES):
        boot_id = folder / f"boot_id{number}" if boot_ids else None
        if boot_id is not None:
            boot_id.write_text(f"{uuid.uuid4()}\n")
        name = f"penstock{os.getpid()}{'ab'[number]}"
        nodes.append(Node(name, f"node-{'ab'[number]}", address, address6, boot_id))
    first, second = nodes
    try:
        for node in nodes:
            _do("ip", "netns", "add", node.namespace)
        _do(
            "ip", "-n", first.namespace, "link", "add", "wire", "type", "veth",
            "peer", "name", "wire", "netns", second.namespace,
        )  # fmt: skip
        for node in nodes:
            at = ["ip", "-n", node.namespace]
            _guard(node, ports)
            _do(*at, "address", "add", f"{node.address}/24", "dev", "wire")
            _do(*at, "address", "add", f"{node.address6}/64", "dev", "wire", "nodad")
            for device in ("lo", "wire"):
                _do(*at, "link", "set", device, "up")
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "delete", node.namespace], capture_output=True, env=_env())


def run(
    nodes: Sequence[Node],
    program: str,
    path: Path,
    folder: Path,
    *,
    ranks: Sequence[int],
    options: Mapping[str, Any],
    environment: Sequence[Mapping[str, str]] = (),
    at: str = ADDRESSES[0][0],
) -> list[dict[str, Any]]:
    """What ranks say that run a program, each on the node with this number.

    `options`: of their loads. `environment`: more variables of each rank. `at`: the address of the store, which rank 0
    hosts.
    """
    folder.mkdir()
    processes = []
    try:
        for rank, node in enumerate(ranks):
            order = {
                "rank": rank,
                "size": len(ranks),
                "path": str(path),
                "folder": str(folder),
                "at": at,
                "port": STORE,
            }
            order |= {"options": {**options}, "program": textwrap.dedent(program)}
            more = {
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
                **(environment[rank] if environment else {}),
            }
            with open(folder / f"log.{rank}", "w") as log:
                processes.append(
                    subprocess.Popen(
                        nodes[node].command(sys.executable, "-c", RANK, json.dumps(order)),
                        stdout=log, stderr=log, env=_env(more), start_new_session=True,
                    )
                )  # fmt: skip
        limit, said = time.monotonic() + LONG, []
        for rank, process in enumerate(processes):
            process.wait(max(1.0, limit - time.monotonic()))
            log = (folder / f"log.{rank}").read_text()
            assert process.returncode == 0, f"rank {rank}:\n{log}"
            said.append({**json.loads((folder / f"said.{rank}").read_text()), "log": log})
        return said
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
