"""The program that runs in a pod: it loads as it is told, and says what came of it, as one line of JSON.

    python inside.py SPECIFICATION

The specification is JSON: ``way`` is one of `WAYS`, ``source`` what to open; ``options`` and ``storage`` are those of
Penstock.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def begins() -> None:
    """From here on the pod's memory limit holds: besides what this process has now."""
    if pair := os.environ.get("PENSTOCK_POD_BEGINS"):
        told, answer = map(int, pair.split(","))
        os.write(told, b"x")
        os.read(answer, 1)


def digest(tensor: Any) -> str:
    # The digest that an emulated processor is quickest at
    return hashlib.md5(
        memoryview(tensor.numpy() if hasattr(tensor, "numpy") else tensor), usedforsecurity=False
    ).hexdigest()


def told(digests: dict[str, str], report: Any) -> dict[str, Any]:
    kept = ("fallbacks", "warnings", "cache", "cache_reason", "residency_probes", "resident_bytes", "network", "routes")
    return {"digests": digests, **{name: report.get(name) for name in kept}, "text": str(report)}


def opened(given: dict[str, Any]) -> Any:
    import numpy  # noqa: F401 - what an import needs is not the load's
    import penstock

    if given.get("framework") == "pt":
        import torch  # noqa: F401
    checkpoint = penstock.open(given["source"], storage=given.get("storage"))
    begins()
    return checkpoint


def load(given: dict[str, Any]) -> dict[str, Any]:
    checkpoint = opened(given)
    framework, options = given.get("framework", "np"), given.get("options", {})
    tensors = checkpoint.load(framework=framework, options=options, progress=False)
    return told({name: digest(one) for name, one in tensors.items()}, checkpoint.last_report)


def load_into(given: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    checkpoint = opened(given)
    tensors = {name: np.empty(checkpoint[name].shape, "uint8") for name in checkpoint}
    report = checkpoint.load_into(tensors, options=given.get("options", {}), progress=False)
    return told({name: digest(one) for name, one in tensors.items()}, report)


def stream(given: dict[str, Any]) -> dict[str, Any]:
    checkpoint = opened(given)
    digests = {}
    for name, tensor in checkpoint.stream(framework="np", options=given.get("options", {}), progress=False):
        digests[name] = digest(tensor)
    return told(digests, checkpoint.last_report)


def save(given: dict[str, Any]) -> dict[str, Any]:
    """What is loaded, written to ``to``; or the error."""
    import penstock

    checkpoint = opened(given)
    tensors = checkpoint.load(framework="np", progress=False)
    try:
        report = penstock.save_file(tensors, given["to"])
    except penstock.PenstockError as error:
        return {"error": type(error).__name__, "message": str(error), "os": isinstance(error, OSError)}
    return told({name: digest(one) for name, one in tensors.items()}, report)


def fetch(given: dict[str, Any]) -> dict[str, Any]:
    """The small files that an engine wants of a model at an address; or the error."""
    import penstock
    from penstock.integrations import _fetched

    try:
        found = _fetched.fetch(given["source"], given["storage"])
    except penstock.PenstockError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"files": sorted(path.name for path in Path(found.folder).iterdir())}


def rights(given: dict[str, Any]) -> dict[str, Any]:
    """What this process may and may not do."""
    libc = ctypes.CDLL(None, use_errno=True)

    def refused(call: Callable[[], int]) -> str:
        return "granted" if call() >= 0 else errno.errorcode[ctypes.get_errno()]

    def written(folder: str) -> str:
        path = Path(folder, "written")
        try:
            path.write_text("x")
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        path.unlink()
        return "granted"

    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    shm = os.statvfs("/dev/shm")
    ring = ctypes.create_string_buffer(120)
    return {
        "ids": [*os.getresuid(), *os.getresgid(), *os.getgroups()],
        "capabilities": [status[f"Cap{kind}"].strip() for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")],
        "no_new_privs": status["NoNewPrivs"],
        "seccomp": status["Seccomp"],
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "shm": shm.f_blocks * shm.f_frsize,
        "written": {folder: written(folder) for folder in ("/", "/tmp", "/etc", "/dev/shm", "/models")},
        "calls": {
            "io_uring_setup": refused(lambda: libc.syscall(425, 8, ring)),
            "unshare": refused(lambda: libc.unshare(0x10000000)),
            "mount": refused(lambda: libc.mount(b"t", b"/tmp", b"tmpfs", 0, None)),
            "bpf": refused(lambda: libc.syscall({"x86_64": 321, "aarch64": 280}[os.uname().machine], 0, 0, 0)),
            "memfd_create": refused(lambda: libc.memfd_create(b"x", 0)),
        },
        "pid": os.getpid(),
    }


def wait(given: dict[str, Any]) -> dict[str, Any]:
    """Another container of the pod: says its process's number, and stays until its standard input ends."""
    print(os.getpid(), flush=True)
    sys.stdin.read()
    sys.exit()


def limits(given: dict[str, Any]) -> dict[str, Any]:
    """Penstock's figures for this process: its memory limit, and the memory left; in bytes."""
    from penstock import _core, _doctor

    probe, group = _core.probe("/"), _doctor._cgroup()
    return {
        "limit": probe["cgroup_memory_limit"],
        "left": probe["memory_available"],
        "doctor": {name: group[name] for name in ("version", "limit")},
    }


WAYS = {one.__name__: one for one in (load, load_into, stream, save, fetch, rights, wait, limits)}

if __name__ == "__main__":
    specification = json.loads(sys.argv[1])
    print(json.dumps(WAYS[specification["way"]](specification)))
