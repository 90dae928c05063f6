"""Saves to a bucket: `python benches/upload.py FOLDER... --tools FOLDER [--gigabytes N] [--rounds N] [--tls]`.

The bucket is that of versitygw on this machine (`make versitygw` builds it; --tools has it). It keeps objects as files
in FOLDER: on a disk, or in memory (/dev/shm). Each FOLDER is measured for itself. Tensors of random bytes go there:

- `penstock.save`, as it comes;
- `safetensors, boto3`: `safetensors.torch.save_file` to a file, then boto3's `upload_file`, as it comes (the result
  has its TransferConfig). The file is on --disk (a folder; not synced, so it is in the page cache) or in /dev/shm;
- `loop`: as many bytes by a bare loop (`part_loop.py`), with parts of the same size and as many connections as
  Penstock's. It sends no checksums. `loop, checksums`: it sends some that it has computed before, and the server
  compares them, as it compares Penstock's.

Every turn has a process of its own, whose imports and tensors are ready before the clock starts. The order rotates.
Before a turn as much memory as the server takes is used and freed: a virtual machine gives free memory back to its
host. Seconds are medians. Processor seconds per GB are those of the client, and of the server meanwhile. Memory is the
peak of the client beyond its tensors. In the first round the file that the server has is compared with what was sent,
byte by byte.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.bench.bucket import BUCKET, KEY, REGION, SECRET, BucketServer
from penstock.bench.machine import machine, version
from penstock.bench.page_cache import free_memory
from penstock.bench.rounds import rotated
from penstock.bench.served import NotServed

MIB = 1 << 20
#: Bytes of Penstock's parts, and its connections. The first round checks the former.
PART, CONNECTIONS = 16 * MIB, 16
OURS, LOOP, CHECKED = "penstock.save", "loop", "loop, checksums"
DISK, MEMORY = "safetensors, boto3, file on the disk", "safetensors, boto3, file in memory"
CONTESTANTS = (OURS, DISK, MEMORY, LOOP, CHECKED)
#: The bounds, each as Penstock's rate by that of another: the project's, see docs/benchmarks.md.
BOUNDS = {DISK: 1.3, MEMORY: 1.3, LOOP: 0.85, CHECKED: 0.85}
NAME = "model.safetensors"
Order = dict[str, Any]
Run = dict[str, Any]


class Absent(Exception):
    """A contestant that cannot be had here; the message says why."""


# --- the process of a turn -------------------------------------------------------------------------------------------


@functools.cache
def pattern() -> Any:
    """16 MiB of random bytes."""
    import torch

    return torch.frombuffer(bytearray(os.urandom(PART)), dtype=torch.uint8)


def noise(nbytes: int) -> Any:
    """Random bytes, whose pages are in use: the pattern again and again, with its number in each."""
    import torch

    made = torch.empty(nbytes, dtype=torch.uint8)
    for number, at in enumerate(range(0, nbytes, PART)):
        piece = made[at : at + PART]
        piece.copy_(pattern()[: len(piece)])
        piece[:1] = number % 251
    return made


def layout(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Layers as a transformer has them, in BF16: large matrices, small norms. At most so many bytes, and one tensor."""
    layer = {"attn": (4096, 2048), "mlp": (2048, 8192), "norm": (2048,)}
    count = nbytes // (2 * sum(math.prod(shape) for shape in layer.values()))
    found = {f"layers.{i}.{name}.weight": shape for i in range(count) for name, shape in layer.items()}
    return found or {"w": (nbytes // 2,)}


def size_of(nbytes: int) -> int:
    """Bytes of all tensors of `layout`."""
    return 2 * sum(math.prod(shape) for shape in layout(nbytes).values())


def tensors(nbytes: int) -> dict[str, Any]:
    """The tensors of `layout`, each with memory of its own."""
    import torch

    made = {name: noise(2 * math.prod(shape)) for name, shape in layout(nbytes).items()}
    return {name: made[name].view(torch.bfloat16).reshape(shape) for name, shape in layout(nbytes).items()}


def by_penstock(order: Order) -> tuple[Callable[[], Any], Any]:
    import penstock

    state = tensors(order["nbytes"])
    at = f"s3://{BUCKET}/"

    def save() -> dict[str, Any]:
        report = penstock.save(state, at, storage=order["storage"], progress=False)
        return {"parts": report.writes, "retries": report.retries, "fallbacks": list(report.fallbacks)}

    return save, state


def by_boto3(order: Order) -> tuple[Callable[[], Any], Any]:
    try:
        import boto3
    except ImportError as error:
        raise Absent(f"boto3 is not installed here ({error})") from None
    from boto3.s3.transfer import TransferConfig
    from safetensors.torch import save_file

    state = tensors(order["nbytes"])
    client = boto3.client("s3")  # its endpoint and keys are in the environment
    config = TransferConfig()
    path = Path(order["file"])

    def save() -> dict[str, Any]:
        begun = time.perf_counter()
        save_file(state, path)
        written = time.perf_counter() - begun
        client.upload_file(str(path), BUCKET, NAME)
        names = ("multipart_threshold", "multipart_chunksize", "max_request_concurrency", "preferred_transfer_client")
        told = {name: getattr(config, name, None) for name in names}
        return {"file_s": written, "transfer_config": told, "boto3": boto3.__version__}

    return save, state


def by_loop(order: Order) -> tuple[Callable[[], Any], Any]:
    from part_loop import Credentials, PartLoop

    content = noise(size_of(order["nbytes"]))
    authority = order["storage"].get("ca")
    loop = PartLoop(
        order["storage"]["endpoint"], f"/{BUCKET}/{NAME}", memoryview(content.numpy()), PART, CONNECTIONS,
        Credentials(KEY, SECRET, REGION), checksums=order["contestant"] == CHECKED,
        authority=None if authority is None else Path(authority),
    )  # fmt: skip
    return lambda: {"parts_s": loop.put(), "parts": -(-content.nbytes // PART)}, content


def compare(sent: Any, path: Path) -> None:
    """Ends the process if the file has other bytes than were sent."""
    import torch

    if isinstance(sent, torch.Tensor):
        there = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        same = torch.equal(there, sent)
    else:
        from safetensors.torch import load_file

        loaded = load_file(path)
        same = loaded.keys() == sent.keys() and all(
            torch.equal(loaded[name].view(torch.uint8), sent[name].view(torch.uint8)) for name in sent
        )
    if not same:
        sys.exit(f"{path} has other bytes than were sent")


def peak() -> int:
    """The most memory that this process had at once, since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def forget_peak() -> None:
    """The peak is what the process has now, from here on."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def turn(order: Order) -> None:
    """The process of one turn: it prepares, says so, waits for a line, sends, and tells of it."""
    ways = {OURS: by_penstock, DISK: by_boto3, MEMORY: by_boto3, LOOP: by_loop, CHECKED: by_loop}
    try:
        send, sent = ways[order["contestant"]](order)
    except Absent as error:
        print(json.dumps({"absent": str(error)}), flush=True)
        return
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    forget_peak()
    before, usage, begun = peak(), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    told = send()
    seconds = time.perf_counter() - begun
    now = resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - usage.ru_utime - usage.ru_stime
    run = {"seconds": seconds, "cpu_s": cpu, "memory": peak() - before} | told
    print(json.dumps(run, default=str), flush=True)
    if sys.stdin.readline().strip() == "compare":
        compare(sent, Path(order["kept"]))
    print(json.dumps({"over": True}), flush=True)


# --- the turns -------------------------------------------------------------------------------------------------------


def one(order: Order, server: BucketServer, is_first: bool) -> Run:
    """One turn; a client that ends with an error ends the run."""
    command = [sys.executable, __file__, "--turn", json.dumps(order)]
    environment = os.environ | server.environment
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None

        def hear() -> Run:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                sys.exit(f"{order['contestant']}: it ended with status {process.wait()}")
            found: Run = json.loads(line)
            return found

        def say(what: str) -> None:
            assert process.stdin is not None
            print(what, file=process.stdin, flush=True)

        if (told := hear()).get("absent"):
            raise Absent(told["absent"])
        free_memory(2 * order["nbytes"])  # the parts, and the object that they are joined to
        cpu = server.processor_seconds()
        say("go")
        run = hear() | {"server_cpu_s": server.processor_seconds() - cpu}
        say("compare" if is_first else "end")
        hear()
    size = server.objects.joinpath(NAME).stat().st_size
    if order["contestant"] == OURS and run["parts"] != -(-size // PART):
        sys.exit(f"Penstock sent {run['parts']} parts: they have not {PART} bytes")
    return run | {"bytes": size}


def place(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds with a server that keeps its objects in one folder."""
    nbytes = int(arguments.gigabytes * 1e9)
    runs: dict[str, list[Run]] = {name: [] for name in CONTESTANTS}
    absent: dict[str, str] = {}
    with (
        BucketServer(folder, arguments.tools, tls=arguments.tls) as server,
        tempfile.TemporaryDirectory(prefix="penstock-file-", dir=arguments.disk) as disk,
        tempfile.TemporaryDirectory(prefix="penstock-file-", dir="/dev/shm") as memory,
    ):
        for number in range(arguments.rounds):
            for name in rotated([name for name in CONTESTANTS if name not in absent], number):
                where = memory if name == MEMORY else disk
                order = {"contestant": name, "nbytes": nbytes, "storage": server.storage,
                         "file": f"{where}/{NAME}", "kept": str(server.objects / NAME)}  # fmt: skip
                os.sync()
                try:
                    runs[name].append(one(order, server, number == 0))
                except Absent as error:
                    absent[name] = str(error)
                    continue
                finally:
                    server.clear()
                    Path(order["file"]).unlink(missing_ok=True)
                print(f"{folder} round {number + 1}  {name:40} {runs[name][-1]['seconds']:.3f} s", flush=True)
    kind = machine([folder], None)["file_system"]
    return {"folder": str(folder), "file_system": kind, "absent": absent, "runs": runs}


def median(runs: list[Run], key: str) -> float:
    return float(statistics.median(run[key] for run in runs))


def rate(runs: list[Run]) -> float:
    """GB/s, of the median."""
    return runs[0]["bytes"] / median(runs, "seconds") / 1e9


def claims(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """The bounds at one place, each beside what was found."""
    runs = measured["runs"]
    if not runs[OURS]:
        return []
    found = []
    for other, bound in BOUNDS.items():
        if runs[other]:
            value = rate(runs[OURS]) / rate(runs[other])
            of = "times as fast as" if bound > 1 else "share of the rate of"
            found.append({"claim": f"{of} {other}", "value": value, "bound": bound, "holds": value >= bound})
    return found


def show(result: dict[str, Any]) -> None:
    """The table of docs/benchmarks.md, and the bounds."""
    print("| bucket on | client | s | GB/s | client CPU s/GB | server CPU s/GB | memory MB |")
    print(f"|{'---|' * 7}")
    for measured in result["places"]:
        for name, runs in measured["runs"].items():
            if not runs:
                continue
            seconds = [run["seconds"] for run in runs]
            per_gb = [median(runs, key) / (runs[0]["bytes"] / 1e9) for key in ("cpu_s", "server_cpu_s")]
            cells = [measured["file_system"], name, f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to "
                     f"{max(seconds):.2f})", f"{rate(runs):.2f}", *(f"{value:.2f}" for value in per_gb),
                     f"{median(runs, 'memory') / 1e6:.0f}"]  # fmt: skip
            print(f"| {' | '.join(cells)} |")
    print()
    for measured in result["places"]:
        for claim in measured["claims"]:
            held = "holds" if claim["holds"] else "**missed**"
            told = f"{claim['claim']}: {claim['value']:.2f} (bound {claim['bound']}: {held})"
            print(f"- {measured['file_system']}: {told}")
        for name, why in measured["absent"].items():
            print(f"- {measured['file_system']}: no {name}: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="*")
    parser.add_argument("--tools", type=Path, help="the folder of versitygw (default: the PATH)")
    parser.add_argument("--disk", type=Path, default=Path(), help="where the file of `safetensors, boto3` is written")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tables", type=Path, help="run nothing: print a result")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turn:
        turn(json.loads(arguments.turn))
    elif arguments.tables:
        show(json.loads(arguments.tables.read_text()))
    elif not arguments.folder:
        parser.error("name at least one folder")
    else:
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """All places, printed, and kept as `--json` says."""
    places = []
    # What a program of an environment says of S3 is not for this server
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    for folder in [*arguments.folder, arguments.disk]:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        for folder in arguments.folder:
            places.append(place(folder, arguments))
            places[-1]["claims"] = claims(places[-1])
    except NotServed as error:
        sys.exit(str(error))
    about = machine([arguments.disk], None)
    packages = ("boto3", "botocore", "s3transfer")
    about["versions"] |= {package: version(package) for package in packages}
    result = {"machine": about, "arguments": sys.argv[1:], "gigabytes": arguments.gigabytes, "rounds": arguments.rounds,
              "tls": arguments.tls, "part": PART, "connections": CONNECTIONS, "places": places}  # fmt: skip
    show(result)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
