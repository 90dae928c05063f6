"""Nodes that give each other what they fetched: `python benches/nodes.py FOLDER --tools FOLDER`, as root.

Nodes are network namespaces, each with a link of its own to one switch. The bucket is one too: netbench. Both
directions of each link are held to a rate by `tc tbf`. Each node has a disk cache in FOLDER, `penstock serve` on it
(https with a certificate of our own, and a token), and the other nodes as `mirrors`.

- `fleet`: all nodes start within 1 s. The time from the first start until the last node has the checkpoint, by that of
  one node alone from the bucket: at most 2. Bytes that the bucket sent, by those of the checkpoint: at most 1.3. Link
  rates are tried from the fastest on, until one leaves at least 15% of the processors idle: there the links limit.
- `plain`: the same over http and without a token, as in a network of one's own.
- `later`: half of the nodes start when the bucket has sent half of the checkpoint. The same bounds, by own starts.
- `killed`: one node and its server are killed in the middle. The same bounds for the others.
- `version`, `altered`, `rights`: one node with one mirror. It has another version of the checkpoint; it gives other
  bytes under the right name; it wants another token. Time by that of one node without mirrors: at most 1.25.
- `refused`, `silent`: one node with seven mirrors, where nobody listens, or from which nothing comes back. Time by that
  of one without mirrors: at most 1.25.

A time goes from `open` to the last page touched, in a process of its own, whose start is not timed. Every byte is
compared by a checksum. Processor seconds: of all loads, of all servers of nodes, of the bucket, and of the whole
machine with its kernel threads and whatever else runs there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from links import NotHere
from penstock.bench import reference
from penstock.bench.machine import machine
from penstock.bench.page_cache import fill
from penstock.bench.served import NotServed, Served, certify
from penstock.synthetic import synth
from penstock.synthetic.synth import Layout, Tensor

PORT, BUCKET_PORT, TOKEN = 8080, 9000, "a-token-of-the-bench"
#: Addresses of a range that is kept for tests (RFC 2544).
NET, BUCKET, HERE = "198.18.0", "198.18.0.1", "198.18.0.254"
SHARDS, MIB = 4, 1 << 20
#: Seconds in which a process must be there.
PATIENCE = 60.0
#: The share of the processors up to which the links limit, and not these.
BUSY = 0.85
#: Rates of links, in Gbit/s.
RATES = [1.0, 0.8, 0.6, 0.4, 0.2]

#: Loads when it is told to, and says what came of it.
PROGRAM = """
import json, resource, sys, time, zlib
import numpy as np, penstock
order = json.loads(sys.argv[1])

def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

print("ready", flush=True)
sys.stdin.readline()
begun, cpu_begun = time.monotonic(), cpu()
checkpoint = penstock.open(order["files"], storage=order["storage"])
tensors = checkpoint.load(framework="np", progress=False)
for tensor in tensors.values():
    tensor.reshape(-1).view("uint8")[::4096].sum()
ended = time.monotonic()
report = checkpoint.last_report
report.disk_cache.wait(600)
said = {"begun": begun, "ended": ended, "seconds": ended - begun, "cpu_s": cpu() - cpu_begun}
said["routes"] = {lane: way["bytes"] for lane, way in report.routes.items() if way["bytes"]}
said["dropped_bytes"] = report.disk_cache.dropped_bytes
said["fallbacks"] = [str(one) for one in report.fallbacks]
print("loaded", flush=True)
said["crc"] = {name: zlib.crc32(np.ascontiguousarray(tensor)) for name, tensor in tensors.items()}
print(json.dumps(said), flush=True)
"""


def run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise NotHere(f"there is no {command[0]}, which iproute2 has") from None
    except subprocess.CalledProcessError as error:
        raise NotHere(f"{' '.join(command)}: {error.stderr.strip()}") from None


class Network:
    """The namespaces: a switch, a bucket, and nodes. They are gone when the context is left."""

    def __init__(self, nodes: int) -> None:
        self._name = f"pst{os.getpid()}"
        self._spaces: list[str] = []
        #: The ends of links: the namespace and the device of each.
        self._ends: list[tuple[str, str]] = []
        self._nodes = nodes

    def __enter__(self) -> Network:
        try:
            switch = self._space("s")
            run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
            run("ip", "-n", switch, "link", "set", "switch", "up")
            for number, address in enumerate([BUCKET, *map(self.address, range(self._nodes))]):
                space = self._space(str(number))
                run(
                    "ip",
                    "-n",
                    space,
                    "link",
                    "add",
                    "wire",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"p{number}",
                    "netns",
                    switch,
                )
                run("ip", "-n", space, "address", "add", f"{address}/24", "dev", "wire")
                self._plug(space, "wire", switch, f"p{number}")
                self._ends += [(space, "wire"), (switch, f"p{number}")]
            # This process asks the bucket for its counts
            run("ip", "link", "add", self._name, "type", "veth", "peer", "name", "here", "netns", switch)
            run("ip", "address", "add", f"{HERE}/24", "dev", self._name)
            run("ip", "link", "set", self._name, "up")
            run("ip", "-n", switch, "link", "set", "here", "master", "switch", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # A second signal would leave some of them
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # With a namespace go its ends of links, and with these the others
        for space in self._spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", self._name], check=False, capture_output=True)

    def _space(self, name: str) -> str:
        space = f"{self._name}-{name}"
        run("ip", "netns", "add", space)
        self._spaces.append(space)
        run("ip", "-n", space, "link", "set", "lo", "up")
        return space

    @staticmethod
    def _plug(space: str, device: str, switch: str, port: str) -> None:
        run("ip", "-n", space, "link", "set", device, "up")
        run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")

    @staticmethod
    def address(node: int) -> str:
        return f"{NET}.{10 + node}"

    def inside(self, node: int | None) -> list[str]:
        """The begin of a command that runs on a node; None: on the bucket's."""
        return ["ip", "netns", "exec", f"{self._name}-{0 if node is None else 1 + node}"]

    def limit(self, gigabits: float) -> None:
        """Holds each direction of each link to that rate."""
        for space, device in self._ends:
            # A segment of the kernel's own offload has 64 KiB: the bucket holds a few
            run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{gigabits * 1000:g}mbit",
                "burst", "512kb", "limit", "4mb")  # fmt: skip

    def silence(self, node: int, others: Sequence[int]) -> Any:
        """Gives a node hardware addresses of others that nobody has: all that it sends them is lost."""

        def neighbours(*what: str) -> None:
            for other in others:
                run(
                    "ip",
                    "-n",
                    f"{self._name}-{1 + node}",
                    "neigh",
                    what[0],
                    self.address(other),
                    *what[1:],
                    "dev",
                    "wire",
                )

        @contextlib.contextmanager
        def silent() -> Iterator[None]:
            neighbours("replace", "lladdr", "02:00:00:00:00:fe", "nud", "permanent")
            try:
                yield
            finally:
                neighbours("del")

        return silent()


def used(pid: int) -> float:
    """Processor seconds of a process."""
    with contextlib.suppress(FileNotFoundError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def busy() -> float:
    """Processor seconds of the machine: also those of the kernel."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class Process:
    """A process of a node, which says when it is ready."""

    def __init__(self, command: Sequence[str], **variables: str) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | variables
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to, self._of = self.process.stdin, self.process.stdout

    def hear(self) -> str:
        line = self._of.readline()
        assert line, f"{' '.join(map(str, self.process.args))[:200]}: it ended"  # type: ignore[arg-type]
        return line

    def go(self) -> None:
        self._to.write("\n")
        self._to.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Bench:
    """The part that all measurements share."""

    def __init__(self, arguments: argparse.Namespace, network: Network, made: Path) -> None:
        self.folder, self.tools, self.rounds = arguments.folder, arguments.tools, arguments.rounds
        self.nodes, self.network = arguments.nodes, network
        self.found: list[dict[str, Any]] = []
        self.files = self.checkpoint(arguments.size, 0)
        self.size = sum(file.stat().st_size for file in self.files)
        self.crc = self.checksums(self.files)
        names = [f"IP:{network.address(node)}" for node in range(self.nodes)]
        self.authority, self.certificate, self.key = certify(made, names)
        self.token = made / "token"
        self.token.write_text(TOKEN)
        self.gigabits = 0.0
        self.bucket = self.begin()

    def begin(self) -> Served:
        """The bucket, always at the same address."""
        link = {"bind": f"{BUCKET}:{BUCKET_PORT}"}
        return Served(self.files[0].parent, self.tools, link=link, prefix=self.network.inside(None), host=BUCKET)

    def change(self, files: list[Path]) -> None:
        """The bucket has other files from now on."""
        self.bucket.__exit__(None, None, None)
        self.files = files
        self.bucket = self.begin()

    def checkpoint(self, size: float, seed: int) -> list[Path]:
        columns = max(1, int(size / SHARDS / 8 / 4096))
        shards = [
            tuple(Tensor(f"{shard}.{number}", "F32", (1024, columns)) for number in range(8)) for shard in range(SHARDS)
        ]
        model = synth.write(Layout("fetched", tuple(shards)), self.folder / f"{size / 1e9:g}GB-{seed}", seed=seed)
        files = sorted(model.glob("*.safetensors"))
        fill(files)
        return files

    @staticmethod
    def checksums(files: Sequence[Path]) -> dict[str, int]:
        """By numpy alone."""
        entries = reference.entries_of(files[0].parent)
        return {name: zlib.crc32(reference.raw(entry).view("u1")) for name, entry in entries.items()}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.bucket.__exit__(None, None, None)
        for node in range(self.nodes):
            shutil.rmtree(self.cache(node), ignore_errors=True)

    def cache(self, node: int) -> Path:
        return self.folder / f"cache-{node}"

    def forget(self) -> None:
        for node in range(self.nodes):
            shutil.rmtree(self.cache(node), ignore_errors=True)
            self.cache(node).mkdir(mode=0o700)

    def limit(self, gigabits: float) -> None:
        self.network.limit(gigabits)
        self.gigabits = gigabits

    def serve(self, node: int, *, secure: bool = True, token: Path | None = None) -> Process:
        words = [
            sys.executable,
            "-m",
            "penstock.cli",
            "serve",
            str(self.cache(node)),
            "--host",
            self.network.address(node),
        ]
        words += ["--port", str(PORT), "--json"]
        if secure:
            words += [
                "--token-file",
                str(token or self.token),
                "--tls-cert",
                str(self.certificate),
                "--tls-key",
                str(self.key),
            ]
        else:
            words += ["--no-token"]
        served = Process([*self.network.inside(node), *words])
        while served.hear().rstrip() != "}":
            pass
        return served

    def load(self, node: int, mirrors: Sequence[int], *, secure: bool = True) -> Process:
        storage: dict[str, Any] = {"disk_cache": str(self.cache(node)), "disk_cache_free": 0}
        if mirrors:
            storage["mirrors"] = [f"http{'s' * secure}://{self.network.address(other)}:{PORT}" for other in mirrors]
        if mirrors and secure:
            storage |= {"mirror_token": TOKEN, "ca": str(self.authority)}
        order = {"files": self.bucket.urls(self.files), "storage": storage}
        loads = Process([*self.network.inside(node), sys.executable, "-c", PROGRAM, json.dumps(order)])
        assert loads.hear() == "ready\n"
        return loads

    def others(self, node: int) -> list[int]:
        return [other for other in range(self.nodes) if other != node]

    def said(self, load: Process, crc: dict[str, int] | None = None, loaded: bool = False) -> dict[str, Any]:
        assert loaded or load.hear() == "loaded\n"
        found: dict[str, Any] = json.loads(load.hear())
        load.end()
        assert found.pop("crc") == (crc or self.crc), "wrong bytes"
        return found

    def sent(self) -> int:
        return self.bucket.counts()["bytes"]

    def alone(self) -> dict[str, Any]:
        """One node, from the bucket."""
        self.forget()
        before, machine_before = self.sent(), busy()
        load = self.load(0, [])
        load.go()
        assert load.hear() == "loaded\n"
        machine_s = busy() - machine_before
        return self.said(load, loaded=True) | {"sent": self.sent() - before, "machine_s": machine_s}

    def fleet(self, *, secure: bool = True, late: float = 0.0, kill: bool = False) -> dict[str, Any]:
        """All nodes at once. `late`: half of them start when the bucket has sent so much of the checkpoint. `kill`: the
        first node ends when it has sent half of it."""
        self.forget()
        with contextlib.ExitStack() as stack:
            servers = [self.serve(node, secure=secure) for node in range(self.nodes)]
            [stack.callback(server.end) for server in servers]
            loads = [self.load(node, self.others(node), secure=secure) for node in range(self.nodes)]
            [stack.callback(load.end) for load in loads]
            before, bucket_before, machine_before = self.sent(), self.used(), busy()
            server_before = sum(used(server.process.pid) for server in servers)
            for node, load in enumerate(loads):
                if late and node == self.nodes // 2:
                    self.wait_for(before, late)
                load.go()
                time.sleep(0.8 / self.nodes)
            if kill:
                self.wait_for(before, 0.5)
                loads[0].process.kill()
                servers[0].process.kill()
            assert all(load.hear() == "loaded\n" for load in loads[int(kill) :])
            machine_s = busy() - machine_before
            said = [self.said(load, loaded=True) for load in loads[int(kill) :]]
            return {
                "seconds": max(one["ended"] for one in said) - min(one["begun"] for one in said),
                "longest_s": max(one["seconds"] for one in said),
                "sent": self.sent() - before,
                "loads_s": sum(one["cpu_s"] for one in said),
                "servers_s": sum(used(server.process.pid) for server in servers) - server_before,
                "bucket_s": self.used() - bucket_before,
                "machine_s": machine_s,
                "dropped": sum(one["dropped_bytes"] for one in said),
                "mirrored": sum(one["routes"].get("mirror", 0) for one in said),
                "fallbacks": [one["fallbacks"] for one in said if one["fallbacks"]],
                "each": [round(one["seconds"], 3) for one in said],
            }

    def used(self) -> float:
        return used(self.bucket.pid)

    def wait_for(self, before: int, share: float) -> None:
        """Waits until the bucket has sent this share of the checkpoint."""
        begun = time.monotonic()
        while self.sent() - before < share * self.size:
            assert time.monotonic() - begun < 10 * PATIENCE
            time.sleep(0.02)

    def keep(self, name: str, claim: str, value: float, bound: float, **more: Any) -> None:
        holds = value <= bound
        about = {
            "name": name,
            "gigabits": self.gigabits,
            "claim": claim,
            "value": value,
            "bound": bound,
            "holds": holds,
        }
        self.found.append(about | {"rounds": self.rounds} | more)
        numbers = ", ".join(f"{key} {number:.3g}" for key, number in more.items() if isinstance(number, (int, float)))
        judged = f"<= {bound}: {'holds' if holds else 'FAILS'}"
        print(f"{name}, {self.gigabits:g} Gbit/s: {claim}: {value:.3f} ({judged}); {numbers}", flush=True)


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        key: statistics.median(run[key] for run in runs)
        for key, value in runs[0].items()
        if isinstance(value, (int, float))
    }


def fleets(bench: Bench, name: str, **how: Any) -> bool:
    """Fleets beside one node alone, in turn. True if the links limited them."""
    alone, runs = [], []
    for _ in range(bench.rounds):
        alone.append(bench.alone())
        runs.append(bench.fleet(**how))
        print(f"  alone {alone[-1]}\n  fleet {runs[-1]}", file=sys.stderr, flush=True)
    middle = medians(runs)
    cores = os.cpu_count() or 1
    share = middle["machine_s"] / middle["seconds"] / cores
    own = sum(middle[part] for part in ("loads_s", "servers_s", "bucket_s")) / middle["seconds"] / cores
    one = statistics.median(run["seconds"] for run in alone)
    # Of nodes that start later, each from its own start
    seconds = middle["longest_s" if how.get("late") else "seconds"]
    bench.keep(
        name, "time of the last by that of one alone", seconds / one, 2.0, alone_s=one,
        alone_machine_s=statistics.median(run["machine_s"] for run in alone), busy=share, busy_with_it=own, **middle,
        all=runs,
    )  # fmt: skip
    bench.keep(
        name, "bytes from the bucket by those of the checkpoint", max(run["sent"] for run in runs) / bench.size, 1.3
    )
    return share <= BUSY


def fleet(bench: Bench, rates: Sequence[float]) -> None:
    """Until the links limit."""
    for gigabits in rates:
        bench.limit(gigabits)
        if fleets(bench, "fleet"):
            return


def plain(bench: Bench) -> None:
    fleets(bench, "plain", secure=False)


def later(bench: Bench) -> None:
    fleets(bench, "later", late=0.5)


def killed(bench: Bench) -> None:
    fleets(bench, "killed", kill=True)


def beside(bench: Bench, name: str, claim: str, prepare: Any, mirrors: Sequence[int]) -> None:
    """One node with mirrors that are of no use, beside one without."""
    times, alone, sent = [], [], []
    for _ in range(bench.rounds):
        alone.append(bench.alone()["seconds"])
        bench.forget()
        with prepare():
            before = bench.sent()
            load = bench.load(0, mirrors)
            load.go()
            said = bench.said(load)
        times.append(said["seconds"])
        sent.append(bench.sent() - before)
    bench.keep(name, claim, statistics.median(times) / statistics.median(alone), 1.25, seconds=statistics.median(times),
               alone_s=statistics.median(alone), sent_by_size=max(sent) / bench.size, fallbacks=said["fallbacks"],
               all=times)  # fmt: skip


def filled(bench: Bench, which: str) -> None:
    """Node 1 has what it will give."""
    fetched = bench.load(1, [])
    fetched.go()
    bench.said(fetched, bench.checksums(bench.files))
    if which == "altered":
        for data in bench.cache(1).glob("objects/*/*.data"):
            with data.open("r+b") as file:
                for at in range(0, data.stat().st_size, MIB):
                    file.seek(at)
                    [byte] = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte ^ 1]))


def faults(bench: Bench, which: str) -> None:
    other = bench.token.with_name("other-token")
    other.write_text(f"another-{TOKEN}")

    @contextlib.contextmanager
    def prepare() -> Iterator[None]:
        if which == "version":
            bench.change(bench.checkpoint(bench.size, 1))
        filled(bench, which)
        if which == "version":
            bench.change(bench.checkpoint(bench.size, 0))
        server = bench.serve(1, token=other if which == "rights" else None)
        try:
            yield
        finally:
            server.end()

    beside(bench, which, "time by that without mirrors", prepare, [1])


def version(bench: Bench) -> None:
    faults(bench, "version")


def altered(bench: Bench) -> None:
    faults(bench, "altered")


def rights(bench: Bench) -> None:
    faults(bench, "rights")


def refused(bench: Bench) -> None:
    beside(bench, "refused", "time by that without mirrors", contextlib.nullcontext, bench.others(0))


def silent(bench: Bench) -> None:
    others = bench.others(0)
    beside(bench, "silent", "time by that without mirrors", lambda: bench.network.silence(0, others), others)


MEASUREMENTS = {
    "plain": plain, "later": later, "killed": killed, "version": version, "altered": altered, "rights": rights,
    "refused": refused, "silent": silent,
}  # fmt: skip


def write(into: Path, about: dict[str, Any], bench: Bench, measured: list[dict[str, Any]]) -> None:
    """Adds results to the file. Other parts of it stay."""
    found = {"machine": about, "load_average_at_end": list(os.getloadavg()), "bytes": bench.size}
    found |= {"nodes": bench.nodes, "found": measured}
    if into.exists():
        names = {(one["name"], one["gigabits"]) for one in measured}
        earlier = json.loads(into.read_text())["found"]
        found["found"] = [one for one in earlier if (one["name"], one["gigabits"]) not in names] + measured
    into.write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the checkpoint and the caches: 10 GB, best in memory")
    parser.add_argument("--tools", type=Path, help="folder of netbench (default: PATH)")
    parser.add_argument("--size", type=float, default=1.05e9, help="bytes of the checkpoint")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, action="append", help="Gbit/s of a link; may be repeated")
    parser.add_argument("--only", choices=["fleet", *MEASUREMENTS], action="append", help="may be repeated")
    parser.add_argument("--json", type=Path, help="add the results to this file")
    arguments = parser.parse_args()
    # Or the namespaces would stay
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    about = machine([arguments.folder], None)
    rates = arguments.rate or RATES
    measured: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory() as made, Network(arguments.nodes) as network:
            bench = Bench(arguments, network, Path(made))
            measured = bench.found
            bench.limit(rates[0])
            with bench:
                for name in arguments.only or ["fleet", *MEASUREMENTS]:
                    fleet(bench, rates) if name == "fleet" else MEASUREMENTS[name](bench)
    except (NotHere, NotServed) as error:
        print(f"not here: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        # An interrupt leaves what was measured before
        if arguments.json and measured:
            write(arguments.json, about, bench, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
