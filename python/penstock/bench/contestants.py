"""The loaders that the benchmark compares, a few lines each.

A contestant loads the checkpoint of a `Job`, opening included, onto a device, and gives the tensors: as a mapping of
names to tensors, or one by one as pairs. To add a rival, write one function here and name it in `CONTESTANTS`.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import reference
from .job import Job, Pairs, State, Tensors
from .scenarios import COLD
from .uploads import by_penstock as penstock_save
from .uploads import uploaded
from .verification import torch_dtype
from .web_loads import (
    by_boto3,
    by_go,
    by_penstock,
    by_safetensors,
    by_urllib,
    downloaded,
    downloaded_once,
    runai_streamer_s3,
    shards,
)


@dataclass(frozen=True)
class Contestant:
    """A loader, and what it may be compared with.

    `semantics` says where its tensors lie: `any` (where it likes: a mapping of the file counts), `private` (memory of
    their own), `into` (parameters that existed before). `served`: it fetches from a web server into memory
    of its own; `served into`: into parameters that existed before. `kept`: the first start fetches from a web server
    and leaves something on the disk, and the second one takes that; its tensors lie where the loader likes. `sent`: it
    loads nothing, and saves tensors that existed before to a bucket.
    """

    name: str
    module: str
    load: Callable[[Job], Tensors]
    semantics: str = "any"
    devices: tuple[str, ...] = ("cpu", "cuda")
    rival: bool = True
    #: Takes part in these scenarios only; none named: in all that suit its semantics.
    scenarios: tuple[str, ...] = ()
    #: One of several routes or settings of one loader: left out with --no-routes.
    route: bool = False
    #: Does what `Job.dtype` asks for by itself; for the others the benchmark calls `Tensor.to`.
    casts: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    #: Makes files that it needs besides the checkpoint, untimed; gives those that it reads instead.
    files: Callable[[list[Path]], list[Path]] | None = None
    #: The weights among what its first start has kept in a folder.
    kept: Callable[[Path], list[Path]] = shards
    #: Most tensors that it is asked for: what takes minutes for a load would make a run take days.
    most_tensors: float = math.inf
    #: Takes part in this preset only.
    preset: str | None = None
    #: The reason that it cannot run here, or None; asked after its module was imported.
    obstacle: Callable[[], str | None] = lambda: None


# --- penstock --------------------------------------------------------------------------------------------------------


def penstock(**options: Any) -> Callable[[Job], Tensors]:
    def load(job: Job) -> Tensors:
        import penstock

        chosen = options | ({"trace": job.trace} if job.trace else {})
        begun = time.perf_counter()
        checkpoint = penstock.open(job.urls or job.source)
        job.noted["open_s"] = time.perf_counter() - begun
        chosen_options = penstock.Options(**chosen) if chosen else None
        state = checkpoint.load(job.device, dtype=job.dtype, progress=False, options=chosen_options)
        note(job, checkpoint.last_report)
        return state

    return load


def penstock_cached(job: Job) -> Tensors:
    """Through a disk cache in the folder of the first start. It may have all of the disk that the run has found."""
    import penstock

    begun = time.perf_counter()
    storage: Any = {"disk_cache": job.kept, "disk_cache_free": 0}
    checkpoint = penstock.open(job.urls, storage=storage)
    job.noted["open_s"] = time.perf_counter() - begun
    state = checkpoint.load(job.device, progress=False)
    note(job, checkpoint.last_report)
    return state


def cached_files(folder: Path) -> list[Path]:
    """The weights in a disk cache."""
    return sorted((folder / "objects").glob("*/*.data"))


def note(job: Job, report: Any) -> None:
    """Keeps a report of penstock for the JSON, and the way to wait for what goes on after the load."""
    job.noted["report"] = plain(report)
    if (cache := report.get("disk_cache")) is not None:
        returned = time.perf_counter()
        job.background.append(lambda: cached(cache, returned))
    if (fill := report.get("cache_fill")) is not None:
        job.background.append(lambda: filled(fill))


def filled(fill: Any) -> dict[str, Any]:
    """Waits until the page cache is filled."""
    fill.wait()
    return {"fill_s": fill.seconds, "fill_bytes": fill.nbytes, "fill_state": fill.state, "fill_reason": fill.reason}


def penstock_stream(job: Job) -> Pairs:
    import penstock

    return penstock.open(job.source).stream(job.device, dtype=job.dtype, progress=False)


def penstock_load_into(job: Job) -> Tensors:
    import penstock

    options = {"trace": job.trace} if job.trace else None
    checkpoint = penstock.open(job.urls or job.source)
    note(job, checkpoint.load_into(job.parameters, progress=False, options=options))
    return job.parameters


def plain(value: Any) -> Any:
    """A report as JSON can hold it."""
    return dict(value) if isinstance(value, Mapping) else repr(value)


def cached(cache: Any, returned: float) -> dict[str, Any]:
    """Waits until the disk cache has what came."""
    cache.wait()
    seconds = time.perf_counter() - returned
    return {"kept_s": seconds, "kept_bytes": cache.written_bytes, "kept_reason": cache.reason}


# --- safetensors -----------------------------------------------------------------------------------------------------


def safetensors(**arguments: Any) -> Callable[[Job], Tensors]:
    def load(job: Job) -> Pairs:
        from safetensors.torch import load_file

        for path in job.files:
            yield from load_file(path, device=job.device, **arguments).items()

    return load


def safetensors_clone(job: Job) -> Pairs:
    from safetensors import safe_open

    for path in job.files:
        with safe_open(path, framework="pt", device=job.device) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name).clone()


def safetensors_prefetch(job: Job) -> Pairs:
    from safetensors import safe_open

    # One file after the other, as its `prefetch` is for one file; the next one's reads start when its turn comes.
    for path in job.files:
        with safe_open(path, framework="pt", device=job.device) as file, file.prefetch() as loader:
            yield from loader


def without_prefetch() -> str | None:
    from safetensors import safe_open

    return None if hasattr(safe_open, "prefetch") else "safe_open has no prefetch before safetensors 0.9"


def copied_into(load: Callable[[Job], Tensors]) -> Callable[[Job], Tensors]:
    """The tensors of `load`, each copied into the parameter of its name."""

    def copy(job: Job) -> Tensors:
        loaded = load(job)
        for name, tensor in loaded.items() if isinstance(loaded, Mapping) else loaded:
            job.parameters[name].copy_(tensor)
        return job.parameters

    return copy


# --- fastsafetensors -------------------------------------------------------------------------------------------------


def fastsafetensors(nogds: bool = True) -> Callable[[Job], Tensors]:
    def load(job: Job) -> Pairs:
        from fastsafetensors import fastsafe_open

        with fastsafe_open(filenames=job.paths, nogds=nogds, device=job.device) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)

    return load


def fastsafetensors_sized(threads: int, megabytes: int, block: int | None = None) -> Callable[[Job], Tensors]:
    """With as many threads and that much bounce buffer in all, as its benchmark for ROCm varies them.

    `block` is the most MB of one request to its readers, `max_copy_block_size`; without it the loader's own default.
    """
    blocks = {} if block is None else {"max_copy_block_size": block << 20}

    def load(job: Job) -> Tensors:
        from fastsafetensors import SafeTensorsFileLoader

        loader = SafeTensorsFileLoader(None, job.device, bbuf_size_kb=megabytes << 10, max_threads=threads, nogds=True)
        loader.add_filenames({0: job.paths})
        buffers = loader.copy_files_to_device(**blocks)
        state = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        loader.close()
        return state

    return load


def without_cufile() -> str | None:
    import ctypes.util

    return None if ctypes.util.find_library("cufile") else "there is no libcufile here (GPUDirect Storage)"


# --- others ----------------------------------------------------------------------------------------------------------


def instanttensor(backend: str | None = None) -> Callable[[Job], Tensors]:
    def load(job: Job) -> Pairs:
        from instanttensor import Backend, safe_open

        chosen = {} if backend is None else {"backend": Backend[backend]}
        with safe_open(job.paths, framework="pt", device=job.device, **chosen) as file:
            yield from file.tensors()

    return load


def runai_streamer(job: Job) -> Pairs:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(job.paths, device=job.device)
        yield from streamer.get_tensors()


def pickled(files: list[Path]) -> list[Path]:
    """The same weights as torch saves them, a file for each shard, beside the checkpoint. Made once."""
    import torch

    made = []
    for path in files:
        saved = path.with_name(path.stem + ".pt")
        made.append(saved)
        if saved.exists() and saved.stat().st_mtime_ns >= path.stat().st_mtime_ns:
            continue
        state = {}
        for entry in reference.entries_of(path).values():
            flat = torch.from_numpy(reference.raw(entry)) if entry.nbytes else torch.empty(0, dtype=torch.uint8)
            state[entry.name] = flat.view(torch_dtype(entry.dtype)).reshape(entry.shape)
        partial = saved.with_name(saved.name + ".partial")
        torch.save(state, partial)
        partial.rename(saved)
    return made


def torch_load(mmap: bool) -> Callable[[Job], Tensors]:
    def load(job: Job) -> Pairs:
        import torch

        for path in job.files:
            yield from torch.load(path, map_location=job.device, weights_only=True, mmap=mmap).items()

    return load


_FLOOR_CHUNK = 8 << 20


def pread_floor(job: Job) -> State:
    """Threads that take chunks of all files from one queue and pread them to where they belong, and nothing else.

    On a GPU each thread has a pinned buffer and a stream of its own.
    """
    import torch

    cuda: Any = torch.cuda
    blocks = {path: torch.empty(path.stat().st_size, dtype=torch.uint8, device=job.device) for path in job.files}
    chunks = iter([(path, at) for path, block in blocks.items() for at in range(0, len(block), _FLOOR_CHUNK)])
    descriptors = {path: os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in job.files}
    taking = threading.Lock()

    def work() -> None:
        on_gpu = job.device != "cpu"
        pinned = torch.empty(_FLOOR_CHUNK, dtype=torch.uint8, pin_memory=True) if on_gpu else None
        with cuda.stream(cuda.Stream(job.device)) if on_gpu else contextlib.nullcontext():
            while True:
                with taking:
                    path, at = next(chunks, (None, 0))
                if path is None:
                    return
                part = blocks[path][at : at + _FLOOR_CHUNK]
                into = part if pinned is None else pinned[: len(part)]
                pread_fully(descriptors[path], into.numpy().data, at)
                if pinned is not None:
                    part.copy_(into, non_blocking=True)
                    cuda.current_stream().synchronize()

    with ThreadPoolExecutor(min(16, 2 * (os.cpu_count() or 1))) as pool:
        for done in [pool.submit(work) for _ in range(pool._max_workers)]:
            done.result()
    for descriptor in descriptors.values():
        os.close(descriptor)
    state: State = {}
    for path, block in blocks.items():
        for entry in reference.entries_of(path).values():
            part = block[entry.offset : entry.offset + entry.nbytes]
            dtype = torch_dtype(entry.dtype)
            aligned = part if part.data_ptr() % dtype.itemsize == 0 else part.clone()
            state[entry.name] = aligned.view(dtype).reshape(entry.shape)
    return state


def pread_fully(descriptor: int, into: memoryview, at: int) -> None:
    while into:
        count = os.preadv(descriptor, [into], at)
        if count == 0:
            raise EOFError("a file ended early")
        into, at = into[count:], at + count


# --- all of them -----------------------------------------------------------------------------------------------------

# fastsafetensors reads with O_DIRECT unless told otherwise. Warm, that would be a race against the disk: there it has
# the page cache, its better setting; cold it runs with both.
_BUFFERED = {"FASTSAFETENSORS_ODIRECT": "0"}
#: Scenarios whose bytes come, at least in part, from the disk.
_FROM_DISK = (*COLD, "half", "second", "two", "beside-disk", "limited")
#: Scenarios whose bytes are in memory.
_FROM_MEMORY = ("warm", "private", "tmpfs", "cast", "beside-memory", "latency")
#: Scenarios that pickled weights take part in: another format, whose loader has other work to do.
_PICKLED = (*COLD, "warm", "private", "tmpfs")
_CPU, _CUDA = ("cpu",), ("cuda",)


def _ours(
    name: str, load: Callable[[Job], Tensors], semantics: str = "any", devices: tuple[str, ...] = (*_CPU, *_CUDA),
    scenarios: Iterable[str] = (), route: bool = False, kept: Callable[[Path], list[Path]] = shards,
) -> Contestant:  # fmt: skip
    return Contestant(
        name, "penstock", load, semantics, devices, rival=False, scenarios=tuple(scenarios), route=route, casts=True,
        kept=kept,
    )  # fmt: skip


CONTESTANTS: list[Contestant] = [
    _ours("penstock", penstock()),
    _ours("penstock copy", penstock(copy=True), "private", _CPU),
    _ours("penstock stream", penstock_stream, scenarios=(*COLD, "warm")),
    _ours("penstock load_into", penstock_load_into, "into"),
    _ours("penstock keep", penstock(cache="keep"), scenarios=(*COLD, "second"), route=True),
    _ours("penstock bypass", penstock(cache="bypass"), scenarios=(*COLD, "second"), route=True),
    _ours("penstock copy keep", penstock(copy=True, cache="keep"), "private", _CPU, (*COLD, "second"), route=True),
    _ours("penstock mapped", penstock(io="mapped"), "any", _CPU, (*COLD, "warm"), route=True),
    _ours("penstock buffered", penstock(io="buffered"), "private", scenarios=(*COLD, "private", "warm"), route=True),
    _ours(
        "penstock uring buffered", penstock(io="uring_buffered"), "private", scenarios=(*COLD, "private", "warm"),
        route=True,
    ),
    _ours("penstock uring", penstock(io="uring"), "private", scenarios=(*COLD, "private", "warm"), route=True),
    _ours("penstock threads", penstock(io="threads"), "private", scenarios=COLD, route=True),
    Contestant("safetensors", "safetensors", safetensors()),
    Contestant("safetensors pread", "safetensors", safetensors(backend="pread"), "private"),
    Contestant("safetensors clone", "safetensors", safetensors_clone, "private", _CPU),
    Contestant("safetensors copy_", "safetensors", copied_into(safetensors()), "into"),
    Contestant("safetensors prefetch", "safetensors", safetensors_prefetch, devices=_CUDA, obstacle=without_prefetch),
    Contestant("fastsafetensors", "fastsafetensors", fastsafetensors(), "private", scenarios=_FROM_DISK),
    Contestant(
        "fastsafetensors buffered", "fastsafetensors", fastsafetensors(), "private", environment=_BUFFERED,
        scenarios=(*_FROM_DISK, *_FROM_MEMORY),
    ),
    Contestant(
        "fastsafetensors gds", "fastsafetensors", fastsafetensors(nogds=False), devices=_CUDA, obstacle=without_cufile
    ),
    Contestant(
        "fastsafetensors copy_", "fastsafetensors", copied_into(fastsafetensors()), "into", environment=_BUFFERED
    ),
    Contestant("instanttensor", "instanttensor", instanttensor(), devices=_CUDA),
    *(
        Contestant(f"instanttensor {name}", "instanttensor", instanttensor(name.upper()), devices=_CUDA, route=True)
        for name in ("uring", "aio", "uring_buffered", "aio_buffered", "mmap")
    ),
    Contestant(
        "instanttensor cufile", "instanttensor", instanttensor("CUFILE"), devices=_CUDA, route=True,
        obstacle=without_cufile,
    ),
    Contestant("runai streamer", "runai_model_streamer", runai_streamer, "private"),
    Contestant(
        "torch.load", "torch", torch_load(mmap=False), "private", files=pickled, most_tensors=1e5, scenarios=_PICKLED
    ),
    Contestant(
        "torch.load mmap", "torch", torch_load(mmap=True), files=pickled, most_tensors=1e5, scenarios=_PICKLED
    ),
    Contestant("pread floor", "torch", pread_floor, "private"),
    _ours("penstock url", penstock(), "served"),
    _ours("penstock url load_into", penstock_load_into, "served into", _CPU),
    _ours("penstock url, disk cache", penstock_cached, "kept", kept=cached_files),
    _ours("urllib to disk once, penstock", downloaded_once(by_urllib, by_penstock), "kept"),
    *(
        Contestant(f"{tool} to disk once, safetensors", module, downloaded_once(download, by_safetensors), "kept")
        for tool, module, download in (
            ("urllib", "safetensors", by_urllib), ("go", "safetensors", by_go), ("boto3", "boto3", by_boto3)
        )
    ),
    _ours("penstock save", penstock_save, "sent"),
    *(
        Contestant(f"safetensors to {name}, boto3", "boto3", uploaded(folder), "sent")
        for name, folder in (("disk", None), ("memory", "/dev/shm"))
    ),
    Contestant("runai streamer s3", "runai_model_streamer_s3", runai_streamer_s3, "served"),
    Contestant(
        "runai streamer s3, 16", "runai_model_streamer_s3", runai_streamer_s3, "served",
        environment={"RUNAI_STREAMER_CONCURRENCY": "16", "RUNAI_STREAMER_OBJ_CONCURRENCY": "16"},
    ),
    *(
        Contestant(f"{tool} to {name}, safetensors", module, downloaded(download, folder), "served")
        for tool, module, download in (("go", "safetensors", by_go), ("boto3", "boto3", by_boto3))
        for name, folder in (("disk", None), ("memory", "/dev/shm"))
    ),
    *(
        Contestant(
            f"fastsafetensors {threads} threads, {megabytes} MB{'' if block is None else f', blocks of {block} MB'}",
            "fastsafetensors", fastsafetensors_sized(threads, megabytes, block), "private",
            preset="fastsafetensors-rocm",
        )
        for threads, megabytes, block in ((8, 8, None), (16, 16, None), (32, 32, None), (16, 16, 160), (32, 32, 160))
    ),
]  # fmt: skip


def named(name: str) -> Contestant:
    """The contestant of that name."""
    return next(contestant for contestant in CONTESTANTS if contestant.name == name)
