"""Where cold mapped loads spend the processor: `python benches/mapped.py [CHECKPOINT] [--rounds N] [--idle S]`.

Penstock and safetensors map the same cold file in turn, each in a process of its own, and one thread reads a byte of
every page. CHECKPOINT is a path, or one of the benchmark by name (gpt2), which is generated where it is not there.
Right before each load, after its imports, another process takes twice the memory of the file and gives it back. With
`--idle 5` five seconds pass after that, and the host of a virtual machine has taken the memory again.

The first rows are times: seconds to the last byte touched, processor seconds, how long the disk was busy and with how
many reads (of the whole device, so of other programs too). Medians over the rounds, with least and most.

The others say what the processor did, by `perf` (as root): each sample belongs to the system call, page fault or
interrupt that it was taken in. `difference` is Penstock less safetensors, `share` is what a row has of the sum of
those rows in which Penstock takes more. The last line says how much of that the rows with a name explain. Samples are
taken in rounds of their own, since they slow the load down.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from copied import PREDECESSOR, found, put, run

LOADERS = ("penstock", "safetensors")

#: Maps one file and reads a byte of every page, after a line from its parent.
CHILD = """
import json, os, sys, time
import torch
if sys.argv[1] == "penstock":
    import penstock, penstock._torch
    load = lambda path: penstock.open(path).load(progress=False)
else:
    import safetensors.torch
    load = safetensors.torch.load_file
print("ready", flush=True)
sys.stdin.readline()
begun, processor = time.perf_counter(), time.process_time()
tensors = load(sys.argv[2])
loaded = time.perf_counter() - begun
for tensor in tensors.values():
    tensor.view(-1).view(torch.uint8)[:: os.sysconf("SC_PAGESIZE")].sum()
seconds, processor = time.perf_counter() - begun, time.process_time() - processor
print(json.dumps({"load": loaded, "all": seconds, "processor": processor}), flush=True)
os._exit(0)
"""

#: What the processor does, by a function of the call chain. The first that matches, from the innermost on, has the
#: sample.
ROWS = {
    "interrupts of disk and timer": r"^(asm_common_interrupt|asm_sysvec_.*|__softirqentry_text_start|handle_softirqs)$",
    "requests of 128 KiB (POSIX_FADV_WILLNEED)": r"^(__x64_sys_fadvise64|ksys_fadvise64_64)$",
    "populating (MADV_POPULATE_READ)": r"^(do_madvise|__x64_sys_madvise)$",
    "touching (process_vm_readv)": r"^(process_vm_rw|__x64_sys_process_vm_readv)$",
    "page faults": r"^(asm_exc_page_fault|exc_page_fault)$",
    "waiting and waking": r"^(__x64_sys_(futex|poll|read|write|clone3?)|ret_from_fork.*)$",
    "other system calls": r"^(do_syscall_64|entry_SYSCALL_64.*)$",
}
#: Everything that has none of these.
PROGRAM = "the program itself"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="gpt2", help="a file, or a name of the benchmark (gpt2)")
    help = "where checkpoints that are given by name lie"
    parser.add_argument("--folder", type=Path, default=Path(".bench/checkpoints/full"), help=help)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--idle", type=float, default=0)
    arguments = parser.parse_args()
    place = found(arguments.checkpoint, arguments.folder)
    path = place / "model.safetensors" if place.is_dir() else place
    size = path.stat().st_size
    print(f"{path.name}, {size / 1e9:.2f} GB, {arguments.rounds} rounds, {os.cpu_count()} cores, load average ", end="")
    print(f"{os.getloadavg()[0]:.1f} at the start")
    times: dict[str, list[dict[str, float]]] = {loader: [] for loader in LOADERS}
    samples: dict[str, list[Counter[str]]] = {loader: [] for loader in LOADERS}
    for number in range(2 * arguments.rounds if shutil.which("perf") else arguments.rounds):
        for loader in LOADERS if number % 4 < 2 else reversed(LOADERS):
            put([str(path)], "cold")
            child = begun(loader, path)
            run(PREDECESSOR, 2 * size)
            time.sleep(arguments.idle)
            if number % 2 == 0 or not shutil.which("perf"):
                times[loader].append(timed(child, path))
            else:
                samples[loader].append(sampled(child))
    show_times(times)
    if any(sum(each.values()) for of in samples.values() for each in of):
        show_samples(samples, size)
    else:
        print("\nno samples: this needs perf, and the right to use it")
    print(f"load average {os.getloadavg()[0]:.1f} at the end")


def begun(loader: str, path: Path) -> subprocess.Popen[str]:
    """A process that is about to load."""
    command = [sys.executable, "-c", CHILD, loader, str(path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    return child


def disk(path: Path) -> tuple[int, int]:
    """Reads of the device below a file, and the milliseconds that it was busy."""
    device = path.stat().st_dev
    fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    return int(fields[0]), int(fields[9])


def timed(child: subprocess.Popen[str], path: Path) -> dict[str, float]:
    before = disk(path)
    said, _ = child.communicate("go\n")
    after = disk(path)
    return json.loads(said) | {"reads": after[0] - before[0], "busy": (after[1] - before[1]) / 1e3}


def sampled(child: subprocess.Popen[str]) -> Counter[str]:
    """Milliseconds of processor time of a load, by row."""
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/perf.data"
        fifo = f"{folder}/acknowledged"
        os.mkfifo(fifo)
        os.mkfifo(f"{folder}/control")
        command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "4000", "-g", "-o", data, "-p", str(child.pid)]
        command += ["--delay=-1", f"--control=fifo:{folder}/control,{fifo}"]
        perf = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(f"{folder}/control", "w") as control, open(fifo) as acknowledged:
            control.write("enable\n")
            control.flush()
            acknowledged.readline()
            child.communicate("go\n")
        perf.wait()
        script = ["perf", "script", "-i", data, "-F", "ip,sym"]
        text = subprocess.run(script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return Counter({row: count / 4.0 for row, count in Counter(map(row_of, chains(text))).items()})


def chains(text: str) -> list[list[str]]:
    """The functions of each sample, innermost first."""
    blocks = (block.split("\n") for block in text.split("\n\n") if block.strip())
    return [[line.split(maxsplit=1)[1].strip() for line in block if len(line.split()) > 1] for block in blocks]


def row_of(chain: list[str]) -> str:
    for function in chain:
        for row, pattern in ROWS.items():
            if re.match(pattern, function):
                return row
    return PROGRAM


def show_times(times: dict[str, list[dict[str, float]]]) -> None:
    print("\n| | penstock | safetensors | ratio |\n|---|---|---|---|")
    rows = {"all": "to the last byte touched, s", "load": "to the end of the load, s", "processor": "processor, s"}
    for key, row in (rows | {"busy": "the disk was busy, s", "reads": "reads of the disk"}).items():
        columns = [[each[key] for each in times[loader]] for loader in LOADERS]
        medians = [statistics.median(column) for column in columns]
        digits = 0 if key == "reads" else 3
        cells = [
            f"{median:.{digits}f} ({min(column):.{digits}f} to {max(column):.{digits}f})"
            for median, column in zip(medians, columns, strict=True)
        ]
        print(f"| {row} | {' | '.join(cells)} | {medians[0] / max(medians[1], 1e-9):.2f} |")


def show_samples(samples: dict[str, list[Counter[str]]], size: int) -> None:
    rows = [*ROWS, PROGRAM]
    found = {
        loader: {row: statistics.median(each[row] for each in of) / (size / 1e9) for row in rows}
        for loader, of in samples.items()
    }
    more = {row: found["penstock"][row] - found["safetensors"][row] for row in rows}
    sum_of_more = sum(max(0.0, value) for value in more.values())
    print("\n| processor, ms per GB | penstock | safetensors | difference | share |\n|---|---|---|---|---|")
    for row in rows:
        share = f"{100 * more[row] / sum_of_more:.0f} %" if more[row] > 0 else ""
        ours, theirs = found["penstock"][row], found["safetensors"][row]
        print(f"| {row} | {ours:.1f} | {theirs:.1f} | {more[row]:+.1f} | {share} |")
    ours, theirs = (sum(found[loader].values()) for loader in LOADERS)
    print(f"| sum | {ours:.1f} | {theirs:.1f} | {ours - theirs:+.1f} | |")
    unnamed = sum(max(0.0, more[row]) for row in ("other system calls", PROGRAM))
    print(f"\nrows with a name have {100 * (1 - unnamed / max(sum_of_more, 1e-9)):.0f} % of what Penstock takes more")


if __name__ == "__main__":
    main()
