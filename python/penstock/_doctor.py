"""Facts of this machine that matter for a load, and advice: ``penstock doctor``."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import re
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import _core
from ._built import build, unread_patch_variable
from ._dtypes import DTYPES
from ._paths import local_path, without_secrets
from ._report import size_text

#: How /proc/self/mountinfo writes blanks, tabs, line breaks and backslashes.
_ESCAPED = re.compile(r"\\([0-7]{3})")

_MEASURED = 256 << 20
"""Bytes read and copied to measure a rate: enough for a tenth of a second at 2.5 GB/s."""
_CHUNK = 4 << 20


def _text(path: str) -> str | None:
    """The text of a file of /proc or /sys; None if the file is missing or unreadable."""
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:
        return None


def _is_there(path: Path) -> bool:
    """True if this user can see the path. A container may hide /sys, or parts of it."""
    try:
        return path.exists()
    except OSError:
        return False


def _number(path: str) -> int | None:
    text = _text(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def _chosen(path: str) -> str | None:
    """The bracketed word of "always [madvise] never"."""
    match = re.search(r"\[(\S+)\]", _text(path) or "")
    return match.group(1) if match else None


def _meminfo() -> dict[str, int]:
    fields = re.findall(r"^(\w+):\s+(\d+) kB", _text("/proc/meminfo") or "", re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in fields}


def _cgroup() -> dict[str, Any]:
    """This process' cgroup and the tightest memory limit on the way up from it, for v1 and v2."""
    found: dict[str, Any] = {"version": None, "path": None, "limit": None, "used": None, "cpus": None}
    for line in (_text("/proc/self/cgroup") or "").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and controllers == "" and _is_there(Path("/sys/fs/cgroup/cgroup.controllers")):
            version, root, limit_name, used_name = 2, "/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            version, root, limit_name, used_name = (
                1,
                "/sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        found.update(version=version, path=path)
        # In a container the path may be the host's; the mount then starts at the container's own group
        at = Path(root + path) if _is_there(Path(root + path)) else Path(root)
        for group in [at, *at.parents]:
            if not str(group).startswith(root):
                break
            limit = _number(str(group / limit_name))
            # v1 says "no limit" with a number near 2^63
            if limit is not None and limit < 1 << 60 and (found["limit"] is None or limit < found["limit"]):
                found["limit"], found["used"] = limit, _number(str(group / used_name))
            quota = re.fullmatch(r"(\d+) (\d+)", _text(str(group / "cpu.max")) or "")
            if quota:
                cpus = int(quota.group(1)) / int(quota.group(2))
                found["cpus"] = cpus if found["cpus"] is None else min(found["cpus"], cpus)
        break
    return found


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _numa_nodes() -> list[int]:
    """The numbers of the NUMA nodes; empty if this user cannot see them."""
    try:
        names = [one.name for one in Path("/sys/devices/system/node").iterdir()]
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"node(\d+)", name)))


def _system() -> dict[str, Any]:
    memory = _meminfo()
    nodes = _numa_nodes()
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory.get("MemTotal"),
        "available_bytes": memory.get("MemAvailable"),
        "page_cache_bytes": memory.get("Cached"),
        "cgroup": _cgroup(),
        "memlock_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "huge_pages": {
            "transparent": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
            "defrag": _chosen("/sys/kernel/mm/transparent_hugepage/defrag"),
            "reserved": _number("/proc/sys/vm/nr_hugepages"),
        },
        "numa_nodes": nodes or [0],
        "max_map_count": _number("/proc/sys/vm/max_map_count"),
        "io_uring_disabled": _number("/proc/sys/kernel/io_uring_disabled"),
    }


def _mount_line(path: str) -> tuple[list[str], list[str]] | None:
    """The two halves of the line of mountinfo for the mount that ``path`` is on, or None if no list has it.

    By the mount's number, not by its place: ``/proc/PID/root/models`` is in another process's namespace, where places
    mean something else. Numbers are those of the whole machine, and some process's list has it.
    """
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        number = re.search(r"^mnt_id:\s*(\d+)", _text(f"/proc/self/fdinfo/{descriptor}") or "", re.MULTILINE)
    finally:
        os.close(descriptor)
    if number is None:
        return None
    for process in itertools.chain(["self"], (one.name for one in Path("/proc").iterdir() if one.name.isdigit())):
        for line in (_text(f"/proc/{process}/mountinfo") or "").splitlines():
            if line.startswith(f"{number[1]} "):
                left, _, right = line.partition(" - ")
                return left.split(), right.split()
    return None


def _mount(path: str) -> dict[str, Any]:
    """The file system under ``path``, and the block device below it."""
    stat = Path(path).stat()
    device = f"{os.major(stat.st_dev)}:{os.minor(stat.st_dev)}"
    line = _mount_line(path)
    space = os.statvfs(path)
    found: dict[str, Any] = {
        "path": path,
        "type": line[1][0] if line else None,
        "mounted_at": _ESCAPED.sub(lambda found: chr(int(found[1], 8)), line[0][4]) if line else None,
        "from": line[1][1] if line and len(line[1]) > 1 else None,
        "device": device,
        "free_bytes": space.f_bavail * space.f_frsize,
    }
    queue = Path(f"/sys/dev/block/{device}")
    for where in (queue / "queue", queue / ".." / "queue"):  # a partition's queue is its disk's
        if _is_there(where):
            found["rotational"] = _number(str(where / "rotational")) == 1
            found["read_ahead_bytes"] = (_number(str(where / "read_ahead_kb")) or 0) * 1024
            found["scheduler"] = _chosen(str(where / "scheduler"))
            break
    return found


def _largest(path: str) -> tuple[int, Path]:
    """The largest shard of a folder, with its bytes; the path itself, if it has none."""
    at = Path(path)
    shards = [at] if at.is_file() else sorted(at.glob("*.safetensors"))
    return max(((p.stat().st_size, p) for p in shards if p.is_file()), default=(0, at))


@contextmanager
def _sample(path: str) -> Iterator[str | None]:
    """A file to read on the file system of ``path``: its largest shard or a temporary one; None if neither can be."""
    at, big = Path(path), _largest(path)
    if big[0] >= 16 << 20:
        yield str(big[1])
        return
    folder = at if at.is_dir() else at.parent
    try:
        space = os.statvfs(folder)
        if space.f_bavail * space.f_frsize < 4 * _MEASURED:
            yield None
            return
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".penstock-doctor-") as file:
            block = os.urandom(_CHUNK)
            for _ in range(_MEASURED // _CHUNK):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            yield file.name
    except OSError:
        yield None


def _in_threads(count: int, work: Any) -> float:
    """Seconds that ``work(0) .. work(count - 1)`` take side by side. Raises what any of them raised."""
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    return seconds


def _read_rate(path: str, direct: bool) -> dict[str, Any]:
    """GB/s of reading the start of a file with 4 threads of 4 MiB reads."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        nbytes = min(_MEASURED, os.fstat(fd).st_size // _CHUNK * _CHUNK)
        if nbytes == 0:
            return {"error": "the file is too small to measure"}
        threads = 4
        buffers = [mmap.mmap(-1, _CHUNK) for _ in range(threads)]  # page-aligned, as O_DIRECT wants it

        def read(i: int) -> None:
            for offset in range(i * _CHUNK, nbytes, threads * _CHUNK):
                os.preadv(fd, [buffers[i]], offset)

        seconds = _in_threads(threads, read)
        for buffer in buffers:
            buffer.close()
        return {"gbps": nbytes / seconds / 1e9, "bytes": nbytes}
    except OSError as error:
        return {"error": error.strerror}
    finally:
        os.close(fd)


def _copy_rate() -> dict[str, Any]:
    """GB/s of copying memory with as many threads as there are CPUs, at most 4, into memory touched before."""
    count = max(1, min(4, len(os.sched_getaffinity(0))))
    share = _MEASURED // 4
    pairs = [(mmap.mmap(-1, share), mmap.mmap(-1, share)) for _ in range(count)]
    views = [((ctypes.c_char * share).from_buffer(a), (ctypes.c_char * share).from_buffer(b)) for a, b in pairs]
    for a, b in views:
        ctypes.memset(a, 1, share)
        ctypes.memset(b, 2, share)
    seconds = _in_threads(count, lambda i: ctypes.memmove(views[i][0], views[i][1], share))
    return {"gbps": count * share / seconds / 1e9, "threads": count}


def _measure(path: str) -> dict[str, Any]:
    rates: dict[str, Any] = {"copy": _copy_rate()}
    with _sample(path) as sample:
        if sample is None:
            rates["direct"] = rates["cached"] = {
                "error": "no file of 16 MiB or more, and no room or right to write one"
            }
            return rates
        try:
            rates["direct"] = _read_rate(sample, direct=True)
        except OSError as error:
            rates["direct"] = {"error": f"O_DIRECT refused: {error.strerror}"}
        try:
            _read_rate(sample, direct=False)  # into the page cache first
            rates["cached"] = _read_rate(sample, direct=False)
        except OSError as error:
            rates["cached"] = {"error": error.strerror}
    return rates


def _frameworks() -> dict[str, str | None]:
    """Versions of what penstock works with, without importing any of it."""
    from importlib import metadata

    found: dict[str, str | None] = {}
    for name in ("torch", "numpy", "ml_dtypes", "safetensors", "tqdm"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _conclusions(found: dict[str, Any]) -> list[str]:
    """The behaviour of loads here, and changes that would make them faster."""
    system, probe, gpus = found["system"], found["probe"], found["gpus"]
    kind = probe["kind"]
    said = []
    if kind == "memory":
        said.append("files here are in memory already: a load to the CPU maps them, a load to a GPU copies from them")
    elif kind == "network":
        said.append("this file system may stall: deep parallel reads into private memory, never a mapping")
    else:
        said.append("files in the page cache are mapped for the CPU (no copy) and copied through staging for a GPU")
    if kind == "local":
        room = size_text(probe["memory_available"] / 2)
        past = "too: this file system has no O_DIRECT"
        if probe.get("direct_align"):
            past = "are read past it with O_DIRECT, and so are smaller ones where the disk is faster that way"
        said.append(
            f"cold bytes that are mapped, and copies up to {room} (half of the memory left), stay in the page cache as "
            f"long as there is room, and the next start is warm; larger copies {past}"
        )
    if probe.get("direct_align"):
        way = "io_uring" if not probe.get("io_uring") else "a pool of threads"
        said.append(f"direct reads go through {way}")
    limit = system["cgroup"]["limit"]
    if limit is not None:
        said.append(
            f"the cgroup allows {size_text(limit)}: private copies must fit into it; "
            "pages of mapped files that do not fit are dropped and read again"
        )
    if system["huge_pages"]["transparent"] == "never":
        said.append("transparent huge pages are off: private copies cost 512 times as many page faults")
    if (system["open_files"] or 1 << 20) < 1024:
        said.append(f"{system['open_files']} open files allowed: many shards are read a few at a time")
    if gpus.get("gpus"):
        said.append(f'device="cuda:0" loads to {gpus["gpus"][0].get("name", "the first GPU")}')
    else:
        said.append('device="cuda:0" is an error: there is no GPU or no driver (see above)')
    if found["frameworks"]["torch"] is None:
        said.append("torch is not installed: load() gives numpy arrays")
    elif found["frameworks"]["numpy"] and not found["frameworks"]["ml_dtypes"]:
        said.append('framework="np" cannot hold BF16 and F8 unless ml_dtypes is installed')
    if (unread := unread_patch_variable()) is not None:
        said.append(unread)
    return said


def examine(path: str, *, measure: bool = True) -> dict[str, Any]:
    """Everything that `describe` shows, for the file system of ``path``: sizes in bytes, rates in GB/s.

    Measuring reads up to 256 MB three times, from a shard file if there is one, else from a temporary file.
    """
    path = local_path(path, "path")
    Path(path).stat()  # raises for what is not there
    found: dict[str, Any] = {
        "penstock": _core.__version__,
        "build": build(),
        "executable": sys.executable,
        "system": _system(),
        "file_system": _mount(path),
        # Of an overlay, a file says what it lies on. A folder does not.
        "probe": _core.probe(str(_largest(path)[1])),
        "gpus": _core.gpus(),
        "frameworks": _frameworks(),
        "dtypes": list(DTYPES),
        "rates": _measure(path) if measure else {},
        "environment": environment(re.compile("PENSTOCK_")),
    }
    found["therefore"] = _conclusions(found)
    return found


#: Names of variables and settings whose values nobody is shown.
_SECRET = re.compile("secret|token|key|password|proxy|credential|connection_string|identity_header", re.IGNORECASE)


def shown(name: str, value: object) -> str:
    """The value of a variable or setting of this name, for people."""
    return "(set)" if _SECRET.search(name) else without_secrets(str(value))


def environment(names: re.Pattern[str]) -> dict[str, str]:
    """The variables whose names begin like this, without secrets."""
    return {name: shown(name, value) for name, value in sorted(os.environ.items()) if names.match(name)}


def _say(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_say(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, (list, tuple)):
        return "; ".join(_say(v) for v in value) if value else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def describe(found: dict[str, Any]) -> str:
    """`examine`'s result for people."""
    system, mount, probe = found["system"], found["file_system"], found["probe"]

    def size(nbytes: int | None) -> str:
        return "unlimited" if nbytes is None else size_text(nbytes)

    cgroup = system["cgroup"]
    rows = [
        ("penstock", f"{found['penstock']}, commit {found['build']['commit']}"),
        ("system", f"Linux {system['kernel']} on {system['machine']}, Python {system['python']}"),
        ("CPUs", f"{system['cpus']} usable, NUMA nodes {_say(system['numa_nodes'])}"),
        ("memory", f"{size(system['memory_bytes'])}, {size(system['available_bytes'])} available"),
        (
            "cgroup",
            f"v{cgroup['version']}, memory limit {size(cgroup['limit'])}"
            + (f", {size(cgroup['used'])} used" if cgroup["limit"] is not None else "")
            + (f", {cgroup['cpus']:g} CPUs" if cgroup["cpus"] else "")
            if cgroup["version"]
            else "none",
        ),
        ("limits", f"locked memory {size(system['memlock_bytes'])}, open files {system['open_files'] or 'unlimited'}"),
        ("huge pages", _say(system["huge_pages"])),
        (
            "file system",
            f"{mount['type']} ({probe['kind']}) at {mount['mounted_at']}, {size(mount['free_bytes'])} free",
        ),
    ]
    if "rotational" in mount:
        disk = "rotating" if mount["rotational"] else "solid state"
        rows.append(("disk", f"{disk}, read-ahead {size(mount['read_ahead_bytes'])}, scheduler {mount['scheduler']}"))
    align = probe.get("direct_align")
    rows.append(("O_DIRECT", f"reads in multiples of {align} bytes" if align else "not supported"))
    rows.append(("io_uring", f"refused: {probe['io_uring']}" if probe.get("io_uring") else "granted"))
    if found["gpus"].get("gpus"):
        rows += [("GPU", _say(gpu)) for gpu in found["gpus"]["gpus"]]
    else:
        reason = found["gpus"].get("reason") or "no driver found"
        rows.append(("GPU", "none: " + reason.partition(". ")[0].partition(";")[0]))
    rows.append(("with", ", ".join(f"{k} {v}" for k, v in found["frameworks"].items() if v)))
    names = {"copy": "memory copy", "direct": "O_DIRECT read", "cached": "cached read"}
    for key, rate in found["rates"].items():
        rows.append((names[key], f"{rate['gbps']:.2f} GB/s" if "gbps" in rate else rate["error"]))
    if found["environment"]:
        rows.append(("environment", ", ".join(f"{k}={v}" for k, v in found["environment"].items())))
    width = max(len(label) for label, _ in rows) + 2
    lines = [f"{label:<{width}}{text}" for label, text in rows]
    return "\n".join([*lines, "", "penstock will therefore:", *(f"  - {said}" for said in found["therefore"])])
