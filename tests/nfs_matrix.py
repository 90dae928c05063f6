"""A matrix of loads on a real NFS mount, for the machine that `tools/lab.sh --nfs` boots; `make nfs` runs it.

    python tests/nfs_matrix.py FOLDER EXPORT

FOLDER is the mount, EXPORT the same folder on the server, which is this machine too. The server is stopped and started,
so this is for a machine of its own. Prints a line per case; exits with 1 if one is wrong.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ordeal
import penstock

STALL = 2.0
#: An emulated processor is 10 to 30 times slower: the error comes after `STALL` seconds, and not much later.
WITHIN = 30.0
MIB = 1 << 20


def right(folder: Path, export: Path) -> Callable[[dict[str, Any]], None]:
    want = ordeal.contents(export / "model.safetensors")

    def check(options: dict[str, Any]) -> None:
        checkpoint = penstock.open(folder / "model.safetensors")
        ordeal.evict(folder / "model.safetensors")
        into = options.pop("into", False)
        if into:
            tensors = {name: np.zeros(checkpoint[name].shape, "uint8") for name in checkpoint}
            checkpoint.load_into(tensors, options=options, progress=False)
        else:
            tensors = checkpoint.load(framework="np", options=options, progress=False)
        ordeal.same(tensors, want)

    return check


def routes() -> list[dict[str, Any]]:
    ways: list[dict[str, Any]] = [
        {"io": io, "cache": cache}
        for io, cache in itertools.product(
            ("auto", "buffered", "direct", "uring", "threads"), ("auto", "keep", "bypass")
        )
        if (io == "buffered", cache) != (True, "bypass")
        and not (io in ("direct", "uring", "threads") and cache == "keep")
    ]
    return [*ways, {"copy": True}, {"copy": False}, {"into": True}, {"into": True, "io": "direct"}]


def raises(kind: type[BaseException], what: Callable[[], object], names: str) -> str:
    began = time.monotonic()
    try:
        what()
    except kind as error:
        assert names in str(error), error
        return f"{type(error).__name__} after {time.monotonic() - began:.1f} s"
    raise AssertionError(f"no {kind.__name__}")


def server(threads: int) -> None:
    # NFS 4 alone: there is no rpcbind
    subprocess.run(["rpc.nfsd", "-N", "3", "-V", "4.2", str(threads)], check=True)


def cli(*arguments: str) -> None:
    """A command of penstock, as an exception where it fails with status 3."""
    done = subprocess.run([sys.executable, "-m", "penstock.cli", *arguments], capture_output=True, text=True)
    if done.returncode == 3 and "has not answered" in done.stderr:
        raise penstock.StalledError(done.stderr)
    raise AssertionError(f"status {done.returncode}: {done.stderr}")


def main(folder: Path, export: Path) -> int:
    failed = 0

    def case(name: str, work: Callable[[], Any]) -> None:
        nonlocal failed
        try:
            said = work() or "right"
        except Exception as error:
            failed += 1
            said = f"WRONG: {type(error).__name__}: {error}"
        print(f"{name:60}{said}", flush=True)

    file = ordeal.write(export / "model.safetensors", 12, 2 * MIB + 5)
    check = right(folder, export)
    for options in routes():
        case(" ".join(f"{k}={v}" for k, v in options.items()), lambda o=options: check(dict(o)))

    def changed(change: Callable[[], object]) -> str:
        shutil.copy(file, export / "other.safetensors")
        checkpoint = penstock.open(folder / "other.safetensors")
        change()
        time.sleep(1.5)
        kinds = (penstock.ChangedError, penstock.TruncatedError)
        return raises(kinds, lambda: checkpoint.load(framework="np"), "other.safetensors")  # type: ignore[arg-type]

    other = export / "other.safetensors"
    case(
        "a file that was replaced",
        lambda: changed(lambda: (shutil.copy(file, export / "new"), (export / "new").rename(other))),
    )
    case("a file that was truncated", lambda: changed(lambda: other.open("r+b").truncate(3 * MIB)))

    near = str(folder / "model.safetensors")
    opened = penstock.open(near)
    stall = {"stall_timeout": STALL}
    hangs: dict[str, Callable[[], object]] = {
        "load": lambda: opened.load(framework="np", options=stall),
        "open": lambda: penstock.open(near, stall_timeout=STALL),
        "safe_open": lambda: penstock.safe_open(near, framework="np", options=stall),
        "verify": lambda: opened.verify(progress=False, stall_timeout=STALL),
        "penstock inspect": lambda: cli("inspect", near, "--stall-timeout", str(STALL)),
        "penstock verify": lambda: cli("verify", near, "--stall-timeout", str(STALL)),
    }
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    server(0)
    try:
        for name, work in hangs.items():
            case(f"{name}, the server stopped", lambda w=work: raises(penstock.StalledError, w, "model.safetensors"))
    finally:
        server(8)
    case("the same load, the server back", lambda: check({"io": "buffered"}))
    print("all well" if not failed else f"{failed} wrong", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
