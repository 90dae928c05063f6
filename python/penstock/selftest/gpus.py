"""The GPU under test as torch sees it, in the few ways in which a test can touch it.

`Pretended` is the same on the fake driver of tests/fakegpu.py. It serves one test, which runs this suite without a GPU
so that its own mistakes are found before it meets one (PENSTOCK_SELFTEST_FAKE=1).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import penstock
from penstock import _core

from .driver import HUGE_PAGE, Driver

FAKE = os.environ.get("PENSTOCK_SELFTEST_FAKE") == "1"

#: Cycles that keep a GPU busy for some 50 ms: longer than a small load takes.
A_WHILE = 100_000_000

#: A kernel that writes to an address which nobody has allocated.
ILLEGAL = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry illegal()
{
    .reg .u64 %rd<2>;
    .reg .u32 %r<2>;
    mov.u64 %rd1, 16;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
\0"""


def find() -> tuple[str | None, dict[str, Any]]:
    """The reason that there is no GPU for this suite (None: there is one), and the core's facts of all GPUs."""
    if (named := os.environ.get("PENSTOCK_GPU_LIBRARY")) and not FAKE:
        # Asked before the core is: that would start the driver for all tests of this process
        with contextlib.suppress(OSError):
            if Driver(named.partition(":")[2]).is_fake:
                return "PENSTOCK_GPU_LIBRARY names the fake driver; this suite wants a real one.", {}
    found = _core.gpus()
    if not found.get("gpus"):
        return str(found.get("reason") or "the driver shows no GPU"), found
    if not FAKE:
        import torch

        if not torch.cuda.is_available():
            return f"torch {torch.__version__} finds no usable GPU.", found
    return None, found


class Gpu:
    """GPU 0 and the real torch."""

    fake = False

    def __init__(self) -> None:
        import torch

        self.torch: Any = torch
        self.vendor: str = _core.gpus()["vendor"]
        torch.zeros(1, device="cuda:0")
        self._driver = Driver() if self.vendor == "cuda" else None

    @property
    def count(self) -> int:
        return int(self.torch.cuda.device_count())

    def device(self, number: int = 0) -> str:
        return f"cuda:{number}"

    def raw(self, tensor: Any) -> bytes:
        """The bytes of a tensor, once all work on it is over."""
        if tensor.numel() == 0:
            return b""
        flat = tensor.detach().contiguous().reshape(-1).view(self.torch.uint8)
        return bytes(flat.cpu().numpy().tobytes())

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def busy_memory(self, shape: tuple[int, ...], dtype: Any, number: int = 0) -> Any:
        """A tensor to which work that is queued goes on writing for a while."""
        tensor = self.torch.empty(shape, dtype=dtype, device=self.device(number))
        self._write_later(tensor)
        return tensor

    def _write_later(self, tensor: Any) -> None:
        with self.torch.cuda.device(tensor.device):
            self.torch.cuda._sleep(A_WHILE)
            if tensor.numel():
                tensor.view(-1).view(self.torch.uint8).fill_(0x55)

    def freed_memory(self, nbytes: int, count: int) -> None:
        """Frees memory on which work is still queued: the allocator hands it out again at once."""
        blocks = [self.torch.empty(nbytes, dtype=self.torch.uint8, device="cuda:0") for _ in range(count)]
        self.torch.cuda._sleep(A_WHILE)
        for block in blocks:
            block.fill_(0x55)

    @contextmanager
    def another_stream(self) -> Iterator[None]:
        """A stream of its own is the current one meanwhile."""
        stream = self.torch.cuda.Stream()
        with self.torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def read_at_once(self, tensors: dict[str, Any], expected: dict[str, bytes]) -> None:
        """Work on another stream reads the tensors now, with no fence of its own, and must see the right bytes."""
        torch = self.torch
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            sums = {name: t.view(-1).view(torch.uint8).sum(dtype=torch.int64) for name, t in tensors.items()}
        stream.synchronize()
        for name, found in sums.items():
            content = torch.frombuffer(bytearray(expected[name]), dtype=torch.uint8)
            assert int(found) == int(content.sum(dtype=torch.int64)), name

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Another thread captures a graph meanwhile, in global mode as torch does by itself. It must not be broken."""
        torch = self.torch
        begun, end, failed = threading.Event(), threading.Event(), []
        value = torch.zeros(1 << 20, device="cuda:0")
        torch.cuda.synchronize()

        def capture() -> None:
            try:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    torch.add(value, 1)
                    begun.set()
                    end.wait(60)
                graph.replay()
                torch.cuda.synchronize()
            except Exception as error:
                failed.append(error)
            finally:
                begun.set()

        thread = threading.Thread(target=capture)
        thread.start()
        try:
            assert begun.wait(60)
            yield
        finally:
            end.set()
            thread.join()
        assert not failed, f"the capture was broken: {failed}"

    def forget(self) -> None:
        """torch's allocator gives back what it keeps."""
        gc.collect()
        self.torch.cuda.empty_cache()

    def in_use(self) -> int:
        """Bytes of the device that are not free, whoever has them."""
        self.forget()
        free, total = self.torch.cuda.mem_get_info()
        return int(total - free)

    @contextmanager
    def allocator_left_with(self, nbytes: int) -> Iterator[None]:
        """torch's allocator gives at most so much more."""
        torch = self.torch
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    @contextmanager
    def device_left_with(self, nbytes: int) -> Iterator[None]:
        """The device has about so many bytes left, for whoever asks."""
        gc.collect()
        self.torch.cuda.empty_cache()
        taken = []
        # In pieces: the driver need not give all that is free in one
        for piece in (1 << 30, 64 << 20, 2 << 20):
            while (free := self.torch.cuda.mem_get_info()[0] - nbytes) >= piece:
                try:
                    taken.append(self.torch.empty(free // piece * piece, dtype=self.torch.uint8, device="cuda:0"))
                except self.torch.cuda.OutOfMemoryError:
                    break
        try:
            yield
        finally:
            taken.clear()
            self.torch.cuda.empty_cache()

    def registrations(self) -> Any:
        """The registered part of the staging memory: equal before and after if nothing was registered or undone."""
        if self._driver is None:
            return None
        pinned = set()
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, mode, _, _, inode = line.split()[:5]
            start, end = (int(part, 16) for part in span.split("-"))
            if mode.startswith("rw") and inode == "0":
                first = -(-start // HUGE_PAGE) * HUGE_PAGE
                pinned |= {at for at in range(first, end, HUGE_PAGE) if self._driver.is_pinned(at)}
        return frozenset(pinned)

    def lose_context(self) -> None:
        """A kernel with an illegal address: the context is lost for this process."""
        assert self._driver is not None
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._driver("cuModuleLoadData", ctypes.byref(module), ILLEGAL)
        self._driver("cuModuleGetFunction", ctypes.byref(function), module, b"illegal")
        one, none = ctypes.c_uint(1), ctypes.c_uint(0)
        self._driver("cuLaunchKernel", function, one, one, one, one, one, one, none, None, None, None)
        assert self._driver.code("cuCtxSynchronize") == 700

    def close(self) -> None:
        """All is well on the way out."""


class Pretended(Gpu):
    """The fake driver's GPUs, and the stand-in for torch that knows them."""

    fake = True
    DEVICES = 2

    def __init__(self) -> None:
        import fakegpu  # type: ignore[import-not-found] # of the project's tests, which put it on the path
        import pytest

        self._fakegpu = fakegpu
        self._patch = pytest.MonkeyPatch()
        # What reused memory costs: thousands of parameters would be busy for longer than stall_timeout
        self._patch.setattr(fakegpu, "BUSY_MICROSECONDS", 200)
        self._all: Any = fakegpu.fresh()
        self._fake = self._all.__enter__()
        self._fake.configure(checksum=0, poison=0)  # what is tried here is the suite, not the core
        self._side: Any = fakegpu.torch_on(self._fake, self._patch, self.DEVICES)
        self._torch = self.torch = self._side.__enter__()
        self.vendor, self._driver = "cuda", None

    @property
    def count(self) -> int:
        return self.DEVICES

    def raw(self, tensor: Any) -> bytes:
        if tensor.is_contiguous() and self._torch.device_of(tensor).is_gpu:
            return bytes(self._fake.read(tensor.data_ptr(), tensor.nbytes))
        return super().raw(tensor)

    def synchronize(self) -> None:
        for number, side in enumerate(self._torch.sides):
            for stream in (side.stream, side.consumer):
                self._fake.control("stream_synchronize", stream, number)

    def busy_memory(self, shape: tuple[int, ...], dtype: Any, number: int = 0) -> Any:
        return self._torch.destination(self._torch.empty(shape, dtype=dtype, device=f"cuda:{number}"), number)

    def freed_memory(self, nbytes: int, count: int) -> None:
        blocks = [self._torch.pool.empty(nbytes) for _ in range(count)]
        del blocks

    @contextmanager
    def another_stream(self) -> Iterator[None]:
        side = self._torch.sides[0]
        before = side.stream
        self._fake.control("stream_synchronize", before, 0)  # or memory freed there is handed out here
        side.stream = side.pool._stream = self._fake.control("stream_create", 0, 1)
        try:
            yield
        finally:
            gc.collect()
            self._fake.control("stream_synchronize", side.stream, 0)
            self._fake.control("stream_destroy", side.stream)
            side.stream = side.pool._stream = before

    def read_at_once(self, tensors: dict[str, Any], expected: dict[str, bytes]) -> None:
        for name, tensor in tensors.items():
            self._torch.consume(tensor, expected[name])
        self._fake.control("stream_synchronize", self._torch.consumer, 0)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with self._fake.capturing(self._torch):
            yield

    def forget(self) -> None:
        gc.collect()

    def in_use(self) -> int:
        gc.collect()
        return sum(int(side.pool.live) for side in self._torch.sides)

    @contextmanager
    def allocator_left_with(self, nbytes: int) -> Iterator[None]:
        gc.collect()
        pool = self._torch.pool
        before, pool.limit = pool.limit, pool.live + nbytes
        try:
            yield
        finally:
            pool.limit = before

    @contextmanager
    def device_left_with(self, nbytes: int) -> Iterator[None]:
        self._fake.configure(memory=nbytes)
        try:
            yield
        finally:
            self._fake.configure(memory=1 << 36)

    def registrations(self) -> Any:
        calls = ("cuMemHostRegister_v2", "cuMemHostUnregister")
        return tuple(self._fake.counter(f"calls.{name}") for name in calls)

    def lose_context(self) -> None:
        self._fake.configure(sticky="1:700")

    def close(self) -> None:
        gc.collect()
        self._side.__exit__(None, None, None)
        self._all.__exit__(None, None, None)
        self._patch.undo()


def attach() -> Gpu:
    """The GPU, for a program of its own."""
    return Pretended() if FAKE else Gpu()


def threads() -> list[str]:
    """Names of this process' threads that are penstock's."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # it ended just now
            continue
    return sorted(name for name in names if name.startswith("penstock"))


def settle(done: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether it is so, waited for: what runs in the background ends within a moment."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def main() -> None:
    """Prints what `find` says, for those who start the suite."""
    reason, found = find()
    print(json.dumps({"reason": reason, "gpus": found, "penstock": penstock.__version__, "python": sys.version}))


if __name__ == "__main__":
    main()
