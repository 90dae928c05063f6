"""The disk cache after losses of power; `make power-loss` runs it, as root, with QEMU.

    python tests/power_loss.py NETBENCH [--points 10] [--seed N] [--file-systems ext4,xfs] [--mutant NAME]

A guest of `tools/lab.sh` loads two versions of a model through a disk cache on a drive that is kept between boots, in
turn, in part and then whole, until the power is lost: at a random byte, or at a random small write, of those to the
drive. The drive loses a random part of what was not flushed (`tools/volatile_drive.py`). The next boot repairs the file
system as a boot does, and looks:

- every block that a map says is synced has the bytes of its version, by this file's own reading of the format;
- what was synced before the loss (the cache said that its work was finished) is there: it is not received again;
- `penstock cache verify` finds nothing wrong, and all loads give the right bytes and leave a whole cache and no lock.

A point that the guest survives is repeated with fewer bytes. `--mutant` builds an extension with a mistake, with which
the run must fail: it exits with 0 if a point finds the mistake.

Prints a line per point; exits with 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import disk_caches
import ordeal

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent
#: Bytes of the drive, and of the cache on it: room for one version, so that a load evicts the other one.
DRIVE, ROOM = 400 * MIB, 120 * MIB
#: More than what is written before it is synced (64 MiB), and no whole number of blocks.
TENSORS, LENGTH = 12, 6 * MIB + 4097
#: The drive in the guest, where it is mounted, and the port of the server: an address is a part of the cache's key.
DEVICE, PLACE, PORT = "/dev/vda", Path("/srv/kept"), 8123
VERSIONS = ("one", "other")
POWER_LOST = 75
#: Bytes that may be asked for twice: the guest's processor is slow, and an answer that is late is asked for again.
LATE = 8 * MIB
#: `penstock` of this interpreter.
PENSTOCK = (sys.executable, "-c", "import sys; from penstock.cli import main; sys.exit(main(sys.argv[1:]))")
#: A text of the sources, what stands in its place in the mutant, and where.
MUTANTS = {
    "marks-before-fdatasync": ("entry.rs", "self.set(block, Slot::Written(crc))", "self.set(block, Slot::Synced(crc))")
}


# In the guest


def told(text: str) -> None:
    """A line for the host, which has it also if the power is lost now."""
    with open("/out/told", "a") as file:
        file.write(text + "\n")


def run(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ordeal.Wrong(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}{done.stderr}")


def mounted(kind: str, is_new: bool) -> Path:
    """The file system of the drive, repaired as a boot repairs it. Returns the folder of the cache."""
    PLACE.mkdir(parents=True, exist_ok=True)
    if is_new:
        run(f"mkfs.{kind}", *(("-q", "-F") if kind == "ext4" else ("-q", "-f")), DEVICE)
    elif kind == "ext4":
        done = subprocess.run(["e2fsck", "-p", DEVICE], capture_output=True, text=True, check=False)
        if done.returncode > 1:
            raise ordeal.Wrong(f"e2fsck: status {done.returncode}\n{done.stdout}{done.stderr}")
    run("mount", DEVICE, PLACE)
    if kind == "xfs" and not is_new:
        # Its log is replayed. Then nothing may be left to repair
        run("umount", PLACE)
        run("xfs_repair", "-n", DEVICE)
        run("mount", DEVICE, PLACE)
    return PLACE / "cache"


def synced(map_file: Path) -> list[int]:
    """The blocks that are synced, by a map."""
    return [number for number, tag in disk_caches.tags(map_file) if tag == disk_caches.SYNCED]


def version_of(map_file: Path, models: dict[str, Path]) -> str | None:
    """The version whose map it is; None: the map is not whole."""
    content = map_file.read_bytes()
    return next((name for name in models if f"/{name}.safetensors".encode() in content[:4096]), None)


class Guest:
    """Loads of both versions through one cache."""

    def __init__(self, order: dict[str, Any], cache: Path) -> None:
        from penstock.bench.served import Served

        self.cache = cache
        self.models = {name: Path(order["models"], f"{name}.safetensors") for name in VERSIONS}
        self.served = Served(Path(order["models"]), Path(order["tools"]), link={"bind": f"127.0.0.1:{PORT}"})

    def load(self, version: str, names: list[str] | None = None) -> Any:
        """Loads tensors, compares them, and waits for the cache. Returns its report."""
        import penstock

        gc.collect()  # what the last load mapped cannot be evicted
        [url] = self.served.urls([self.models[version]])
        storage = {"disk_cache": str(self.cache), "disk_cache_free": 0, "disk_cache_size": ROOM}
        checkpoint = penstock.open(url, storage=storage)
        found = checkpoint.load(framework="np", progress=False, names=names)
        ordeal.same(found, {name: self.whole(version)[name] for name in found})
        return disk_caches.finished(checkpoint.last_report)

    @functools.cache  # noqa: B019
    def whole(self, version: str) -> dict[str, bytes]:
        return ordeal.contents(self.models[version])

    def has(self, version: str) -> int:
        """Blocks of a version that are synced. Each of them is compared."""
        count = 0
        for map_file in disk_caches.files(self.cache, ".map"):
            data_file = map_file.with_suffix(".data")
            if version_of(map_file, self.models) != version or not data_file.exists():
                continue
            with data_file.open("rb") as data, self.models[version].open("rb") as truth:
                for number in synced(map_file):
                    data.seek(number * MIB)
                    truth.seek(number * MIB)
                    if data.read(MIB) != truth.read(MIB):
                        raise ordeal.Wrong(f"block {number} of {version} is synced and has other bytes")
                    count += 1
        return count

    def look(self, promise: dict[str, int]) -> str:
        """After a loss of power: what is there, and that loads give it and the rest. Returns what it saw."""
        counts: Counter[str] = Counter()
        for map_file in disk_caches.files(self.cache, ".map"):
            counts += disk_caches.states(map_file) if version_of(map_file, self.models) else Counter(unreadable=1)
        has = {version: self.has(version) for version in VERSIONS}
        for version, blocks in promise.items():
            if has[version] < blocks:
                raise ordeal.Wrong(f"{blocks} blocks of {version} had been synced, and {has[version]} are there")
        if (self.cache / "penstock-disk-cache").exists() and (self.cache / "penstock-disk-cache").stat().st_size:
            run(*PENSTOCK, "cache", "verify", "--disk-cache", self.cache)
        # The one that has more first: the other one may evict it
        for version in sorted(VERSIONS, key=lambda version: -has[version]):
            still = self.has(version)
            size = self.models[version].stat().st_size
            with disk_caches.Asked(self.served) as asked:
                report = self.load(version)
            most = size - still * MIB + LATE + report.fetched_again_bytes
            if asked.bytes > most:
                raise ordeal.Wrong(f"{version}: {asked.bytes} bytes received, {still} blocks were there")
            if report.reason or self.has(version) != -(-size // MIB):
                raise ordeal.Wrong(f"{version}: the cache has {self.has(version)} blocks of it: {report.reason}")
        if left := disk_caches.locks(self.cache):
            raise ordeal.Wrong(f"locks are left: {left}")
        if left := [path for path in self.cache.rglob("*") if path.suffix == ".part"]:
            raise ordeal.Wrong(f"files are left that were being made: {left}")
        states = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        return f"{states or 'no map'}; {sum(promise.values())} promised"

    def go_on(self, seed: str) -> None:
        """Loads until the power is lost, for a bounded time. Tells what is promised."""
        chance = random.Random(seed)
        names = list(self.whole(VERSIONS[0]))
        for _ in range(4):
            for version in chance.sample(VERSIONS, 2):
                prefix = f"{version}."
                part = [prefix + name.split(".", 1)[1] for name in chance.sample(names, chance.randint(1, TENSORS - 1))]
                for wanted in (part, None):
                    # It may evict the other one
                    told(json.dumps({"begins": version}))
                    self.load(version, wanted)
                    told(json.dumps({"promised": version, "blocks": self.has(version)}))
                if chance.random() < 0.3:
                    told(json.dumps({"begins": "removal"}))
                    shutil.rmtree(self.cache)


def guest(order: dict[str, Any]) -> None:
    cache = mounted(order["kind"], order["is_new"])
    loads = Guest(order, cache)
    if order["look"] is not None:
        print("looked:", loads.look(order["look"]), flush=True)
        # As if for the first time, or with what there is
        if random.Random(order["seed"]).random() < 0.5:
            shutil.rmtree(cache)
    if order["lose"]:
        promise = {version: loads.has(version) for version in VERSIONS} if cache.exists() else {}
        for version, blocks in promise.items():
            told(json.dumps({"promised": version, "blocks": blocks}))
        Path("/out/armed").touch()
        loads.go_on(order["seed"])
        Path("/out/armed").unlink()
    run("umount", PLACE)


# On the host


@dataclasses.dataclass
class Drive:
    """A drive with a file system, and what is promised of the cache on it."""

    kind: str
    work: Path
    command: list[str]
    is_new: bool = True
    promise: dict[str, int] | None = None

    def boot(self, seed: str, lose: str) -> tuple[int, str, dict[str, Any]]:
        """Looks, and loses power after so many bytes. Returns the status, what the guest said and the drive did."""
        image, out = self.work / f"{self.kind}.image", self.work / f"{self.kind}.out"
        if self.is_new:
            image.unlink(missing_ok=True)
            with image.open("wb") as file:
                file.truncate(DRIVE)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        order = {"kind": self.kind, "is_new": self.is_new, "look": self.promise, "seed": seed, "lose": lose != ""}
        order |= {"models": str(self.work / "models"), "tools": self.command[-1]}
        lab = [str(ROOT / "tools/lab.sh"), "--keep-drive", str(image), "--drives", "0", "--out", str(out)]
        lab += ["--timeout", "900", *(("--lose-power", f"{seed}:{lose}") if lose else ())]
        done = subprocess.run(
            [*lab, "--", *self.command[:-1], "--order", json.dumps(order)],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
        if done.returncode == POWER_LOST:
            # What it had said when the power was lost
            said = (out / "stdout").read_text() if (out / "stdout").exists() else ""
        report = json.loads((out / "drive.json").read_text())
        self.is_new = False
        self.promise = promised(out / "told")
        return done.returncode, said, report


def promised(path: Path) -> dict[str, int]:
    """The blocks of each version that were synced for good when the power was lost."""
    found: dict[str, int] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        one = json.loads(line)
        if "promised" in one:
            found[one["promised"]] = one["blocks"]
        else:
            # Blocks of this version stay; those of another one may go
            found = {version: blocks for version, blocks in found.items() if version == one["begins"]}
    return found


def mutant(name: str, work: Path) -> Path:
    """A package with this mistake in its extension. Returns the folder that has it."""
    file, text, other = MUTANTS[name]
    tree = work / "mutant"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    for part in ("Cargo.toml", "Cargo.lock", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, tree / part)
    shutil.copytree(ROOT / "crates", tree / "crates")
    shutil.copytree(ROOT / "python", tree / "python", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    source = tree / "crates/core/src/store/disk_cache" / file
    before = source.read_text()
    assert before.count(text) == 1, f"{file} has no longer the text that the mutant replaces"
    source.write_text(before.replace(text, other))
    target = work.with_name(f"{work.name}-mutants")  # kept: the next mutant is built in a part of the time
    command = ["cargo", "build", "--release", "--quiet", "-p", "penstock-python"]
    subprocess.run(command, cwd=tree, env=os.environ | {"CARGO_TARGET_DIR": str(target)}, check=True)
    shutil.copy(target / "release/lib_core.so", tree / "python/penstock/_core.abi3.so")
    return tree / "python"


def main() -> int:
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument("tools", nargs="?", type=Path)
    about.add_argument("--points", type=int, default=10)
    about.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    about.add_argument("--file-systems", default="ext4,xfs")
    about.add_argument("--work", type=Path, default=ROOT / "target/power-loss")
    about.add_argument("--mutant", choices=MUTANTS)
    about.add_argument("--order", help=argparse.SUPPRESS)
    options = about.parse_args()
    if options.order:
        guest(json.loads(options.order))
        return 0
    work = options.work.resolve()
    (work / "models").mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(VERSIONS):
        ordeal.write(work / "models" / f"{name}.safetensors", TENSORS, LENGTH, seed)
    package = mutant(options.mutant, work) if options.mutant else ROOT / "python"
    path = f"PYTHONPATH={package}:{ROOT / 'tests'}"
    command = ["env", "PYTHONDONTWRITEBYTECODE=1", path, sys.executable, __file__, str(options.tools.resolve())]
    drives = [Drive(kind, work, command) for kind in options.file_systems.split(",")]
    print(f"{options.points} losses of power, seed {options.seed}", flush=True)
    wrong = sum(points(drive, options) for drive in drives)
    if options.mutant or not wrong:
        # What was wrong is left to be looked at
        shutil.rmtree(work)
    if options.mutant:
        print(f"the mutant {options.mutant} {'is found' if wrong else 'is NOT found'}")
        return 0 if wrong else 1
    print("all well" if not wrong else f"{wrong} wrong")
    return int(wrong > 0)


def points(drive: Drive, options: argparse.Namespace) -> int:
    """The losses of a drive's share of the points. Returns how many were wrong."""
    count = -(-options.points // len(options.file_systems.split(",")))
    #: Bytes and small writes of a few loads, by the unit of `--lose-power`
    most = {"": 3 * TENSORS * LENGTH, "s": 200}
    done, attempts = 0, 0
    while done <= count:
        seed = f"{options.seed}-{drive.kind}-{attempts}"
        unit = "s" if done % 2 else ""
        number = random.Random(seed).randrange(1, most[unit])
        lose = "" if done == count else f"{number}{unit}"
        status, said, report = drive.boot(seed, lose)
        attempts += 1
        looked = next((line for line in said.splitlines() if line.startswith("looked:")), "")
        print(f"{drive.kind:6}{looked or 'new'}", flush=True)
        if status not in (0, POWER_LOST) or (status == 0 and report["lost"]):
            print(f"{drive.kind:6}WRONG, seed {seed}:\n{said}", flush=True)
            return 1
        if status == 0 and lose:
            # The guest came to its end
            most[unit] = number
            continue
        if lose:
            kept = f"of {report['volatile']} writes {report['kept']} kept, {report['lost_bytes']} bytes gone"
            where = f"at small write {number}" if unit else f"at byte {number}"
            print(f"{drive.kind:6}lost power {where}, {kept}", flush=True)
        done += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
