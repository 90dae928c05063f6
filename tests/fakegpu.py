"""The fake GPU driver from Python, and a torch whose GPU it is.

`FakeGpu` is the control interface of libfakegpu.so (crates/fakegpu/src/lib.rs). `FakeTorch` stands in for torch where
penstock meets torch's CUDA side (`penstock._accelerator`). Its "GPU memory" is host memory that the fake adopts, so all
of that code runs, and everything it forgets is a line in the fake's log. Its allocator behaves as the real one does
where it matters: memory that is freed is handed out again at once, while work on it is still queued.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from penstock import _accelerator, _core
from penstock._device import Device

if TYPE_CHECKING:  # programs that only want the driver need not wait for it
    import torch

LIBRARY = os.environ.get("PENSTOCK_TEST_FAKEGPU")
NO_LIBRARY = "PENSTOCK_TEST_FAKEGPU names no libfakegpu.so: cargo build -p fakegpu"

#: Set: torch's events do not reach penstock. For the test that shows that the others then fail.
UNFENCED = "PENSTOCK_TEST_UNFENCED"

#: How long work queued earlier goes on writing to memory that the allocator hands out again.
BUSY_MICROSECONDS = 2000

_I32, _U64, _SIZE, _TEXT = ctypes.c_int32, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_char_p
_CONTROL: dict[str, tuple[Any, list[Any]]] = {
    "reset": (_U64, []),
    "configure": (_I32, [_TEXT, _TEXT]),
    "misuse_count": (_U64, []),
    "misuse_log": (_SIZE, [ctypes.c_void_p, _SIZE]),
    "misuse_clear": (None, []),
    "leaks": (_SIZE, [ctypes.c_void_p, _SIZE]),
    "counter": (_U64, [_TEXT]),
    "adopt": (_I32, [_U64, _U64, _I32]),
    "disown": (_I32, [_U64]),
    "stream_create": (_U64, [_I32, _I32]),
    "stream_destroy": (_I32, [_U64]),
    "stream_synchronize": (_I32, [_U64, _I32]),
    "launch_write": (_I32, [_U64, _U64, _U64, ctypes.c_uint8, _U64]),
    "launch_check": (_I32, [_U64, _U64, _U64, _U64, _U64]),
    "pending_use": (_I32, [_U64, _U64, _U64, _U64]),
    "host_access": (_I32, [_U64, _U64, _I32]),
    "drain": (None, []),
    "is_idle": (_I32, []),
    "release_hang": (None, []),
    "fnv": (_U64, [ctypes.c_void_p, _SIZE]),
}


class FakeGpu:
    """The fake driver: what it is told to do wrong, and what it saw others do wrong."""

    def __init__(self, vendor: str = "cuda", library: Path | None = None) -> None:
        self.vendor = vendor
        self._lib = ctypes.CDLL(str(library or LIBRARY))
        for name, (result, arguments) in _CONTROL.items():
            function = getattr(self._lib, f"fakegpu_{name}")
            function.restype, function.argtypes = result, arguments

    def control(self, name: str, *arguments: Any) -> Any:
        """A function of the control interface; one that says that its arguments make no sense is a failure."""
        result = getattr(self._lib, f"fakegpu_{name}")(*arguments)
        assert result != -1, f"fakegpu_{name}{arguments}"
        return result

    def driver(self, cuda: str, hip: str, *arguments: Any) -> None:
        """A function of the driver, called as a framework would call it."""
        name = cuda if self.vendor == "cuda" else hip
        assert getattr(self._lib, name)(*arguments) == 0, name

    @contextmanager
    def capturing(self, side: Any) -> Iterator[None]:
        """Another thread captures a graph in global mode meanwhile, as torch does. It must not be broken."""
        begun, end, codes = threading.Event(), threading.Event(), []
        names = {"cuda": ("cuStreamBeginCapture_v2", "cuStreamEndCapture")}
        begin, finish = names.get(self.vendor, ("hipStreamBeginCapture", "hipStreamEndCapture"))

        def capture() -> None:
            side._enter(0)
            graph = ctypes.c_void_p()
            stream = ctypes.c_void_p(self.control("stream_create", 0, 1))
            codes.append(getattr(self._lib, begin)(stream, 0))
            begun.set()
            end.wait(60)
            codes.append(getattr(self._lib, finish)(stream, ctypes.byref(graph)))
            self.control("stream_destroy", stream.value)

        thread = threading.Thread(target=capture)
        thread.start()
        try:
            assert begun.wait(60)
            yield
        finally:
            end.set()
            thread.join()
        assert codes == [0, 0], f"beginning and ending the capture gave {codes}"

    def configure(self, **settings: object) -> None:
        for key, value in settings.items():
            self.control("configure", key.encode(), str(value).encode())

    def counter(self, name: str) -> int:
        value = self.control("counter", name.encode())
        assert value != (1 << 64) - 1, f"no counter {name}"
        return int(value)

    def _lines(self, name: str) -> list[str]:
        size = self.control(name, None, 0)
        while True:
            buffer = ctypes.create_string_buffer(max(size, 1))
            whole = self.control(name, buffer, size)
            if whole <= size:
                return buffer.raw[:whole].decode().splitlines()
            size = whole

    @property
    def misuses(self) -> list[str]:
        return self._lines("misuse_log")

    @property
    def leaks(self) -> list[str]:
        return self._lines("leaks")

    def fnv(self, content: bytes) -> int:
        return int(self.control("fnv", content, len(content)))

    def read(self, address: int, size: int) -> bytes:
        """Device memory as the host sees it: a misuse unless all work on it has been waited for."""
        if size == 0:
            return b""
        self.control("host_access", address, size, 0)
        return ctypes.string_at(address, size)


class _Event:
    """A torch.cuda.Event. Destroyed with its last reference, after which nobody may wait for it."""

    alive = 0

    def __init__(self, fake: FakeGpu, enter: Any) -> None:
        self._fake, self._enter, self._handle = fake, enter, ctypes.c_void_p()
        self._device: int | None = None
        _Event.alive += 1

    def _make(self, device: int) -> None:
        """As torch does: on the device of the stream that it is first recorded on."""
        self._device = device
        self._enter(device)
        self._fake.driver("cuEventCreate", "hipEventCreateWithFlags", ctypes.byref(self._handle), 2)

    @property
    def cuda_event(self) -> int:
        return int(self._handle.value or 0)

    def record(self, stream: Any) -> None:
        if self._device is None:
            self._make(stream.device_index)
        self._enter(stream.device_index)
        self._fake.driver("cuEventRecord", "hipEventRecord", self._handle, ctypes.c_void_p(stream.cuda_stream))

    def __del__(self) -> None:
        _Event.alive -= 1
        if self._device is not None:
            self._enter(self._device)
            self._fake.driver("cuEventDestroy_v2", "hipEventDestroy", self._handle)


class Pool:
    """The caching allocator of one device: freed memory stays with it and is handed out again while it is in use."""

    ROUNDING = 512

    def __init__(self, fake: FakeGpu, stream: int, device: int = 0) -> None:
        self._fake, self._stream, self._device = fake, stream, device
        self._memory: dict[int, mmap.mmap] = {}
        #: Their addresses, ascending: thousands of tensors are asked where they are.
        self._addresses: list[int] = []
        self._free: dict[int, list[int]] = {}
        self.limit = 1 << 40
        self.live = self.peak = self.reused = 0

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory in which something queued earlier still writes."""
        import torch

        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        size = -(-nbytes // self.ROUNDING) * self.ROUNDING
        if self.live + size > self.limit:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes.")
        cached = self._free.get(size)
        if cached:
            address = cached.pop()
            self.reused += 1
        else:
            memory = mmap.mmap(-1, size)
            address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
            self._memory[address] = memory
            bisect.insort(self._addresses, address)
            self._fake.control("adopt", address, size, self._device)
        self.live += size
        self.peak = max(self.peak, self.live)
        self._fake.control("launch_write", self._stream, address, size, 0x55, BUSY_MICROSECONDS)
        array = np.frombuffer(self._memory[address], dtype=np.uint8, count=nbytes)
        weakref.finalize(array, self._freed, address, size).atexit = False
        return torch.from_numpy(array)

    def _freed(self, address: int, size: int) -> None:
        # On the stream of whoever frees, as the allocator believes that all use was on that stream.
        self._fake.control("launch_write", self._stream, address, size, 0xEE, 0)
        self.live -= size
        self._free.setdefault(size, []).append(address)

    def contains(self, address: int) -> bool:
        at = bisect.bisect_right(self._addresses, address)
        if at == 0:
            return False
        start = self._addresses[at - 1]
        return address < start + len(self._memory[start])

    def close(self) -> None:
        for address in self._memory:
            self._fake.control("disown", address)
        self._memory.clear()
        self._addresses.clear()
        self._free.clear()


class _Side:
    """One device as torch sees it: its current stream, another one for whoever consumes, its allocator."""

    def __init__(self, fake: FakeGpu, device: int) -> None:
        self.stream = fake.control("stream_create", device, 1)
        self.consumer = fake.control("stream_create", device, 1)
        self.pool = Pool(fake, self.stream, device)


class FakeTorch:
    """torch, but that its devices "cuda:N" are the fake's. `fenced = False`: its events are never recorded.

    `stream`, `consumer` and `pool` are those of device 0.
    """

    def __init__(self, fake: FakeGpu, devices: int = 1) -> None:
        import torch

        self.fake = fake
        fake.configure(strict=1, devices=devices)
        self._contexts = [ctypes.c_void_p() for _ in range(devices)]
        if fake.vendor == "cuda":
            fake.driver("cuInit", "hipInit", 0)
            for device, context in enumerate(self._contexts):
                fake.driver("cuDevicePrimaryCtxRetain", "", ctypes.byref(context), device)
        self._enter(0)
        self.sides = [_Side(fake, device) for device in range(devices)]
        self.captures = False  # the calling thread's stream, a graph
        self.stream, self.consumer, self.pool = self.sides[0].stream, self.sides[0].consumer, self.sides[0].pool
        self.closed = False
        self.fenced = UNFENCED not in os.environ
        torch_side = self

        class Event(_Event):
            def __init__(self, enable_timing: bool = False) -> None:
                assert not enable_timing
                super().__init__(fake, torch_side._enter)

            def record(self, stream: Any) -> None:
                super().record(stream)

            @property
            def cuda_event(self) -> int:
                return super().cuda_event if torch_side.fenced else 0

        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            is_current_stream_capturing=lambda: self.captures,
            device_count=lambda: devices,
            current_stream=lambda index: SimpleNamespace(cuda_stream=self.sides[index].stream, device_index=index),
            Event=Event,
            OutOfMemoryError=torch.cuda.OutOfMemoryError,
        )

    def _enter(self, device: int) -> None:
        if self.fake.vendor == "cuda":
            self.fake.driver("cuCtxSetCurrent", "", self._contexts[device])
        else:
            self.fake.driver("", "hipSetDevice", device)

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    def empty(self, shape: Any, *, dtype: Any, device: str) -> torch.Tensor:
        import torch

        nbytes = math.prod(shape) * dtype.itemsize
        flat = self.sides[int(device.removeprefix("cuda:"))].pool.empty(nbytes)
        # Not a view of it: torch's own would be none either.
        return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, tuple(shape))

    def device_of(self, tensor: torch.Tensor) -> Device:
        for number, side in enumerate(self.sides):
            if side.pool.contains(tensor.data_ptr()):
                return Device("cuda" if self.fake.vendor == "cuda" else "rocm", number)
        return Device("cpu", 0)

    def destination(self, like: torch.Tensor, device: int = 0) -> torch.Tensor:
        """A parameter on the GPU that something queued still writes to."""
        import torch

        flat = self.sides[device].pool.empty(like.nbytes)
        return flat.view(like.dtype).reshape(like.shape) if like.nbytes else torch.empty_like(like)

    def consume(self, tensor: torch.Tensor, content: bytes, delay: int = 0, device: int = 0) -> None:
        """Queues a kernel on another stream that reads the tensor, with no fence of its own, and checks its bytes."""
        assert tensor.untyped_storage().nbytes() == tensor.nbytes == len(content)
        if content:
            address, expected = tensor.data_ptr(), self.fake.fnv(content)
            consumer = self.sides[device].consumer
            self.fake.control("launch_check", consumer, address, len(content), expected, delay)

    def close(self) -> None:
        self.closed = True
        gc.collect()
        self.fake.control("drain")
        for device, side in enumerate(self.sides):
            self.fake.control("stream_synchronize", side.stream, device)
            self.fake.control("stream_synchronize", side.consumer, device)
            assert side.pool.live == 0, f"{side.pool.live} bytes of torch's memory on GPU {device} are still kept"
        assert _Event.alive == 0, "events of torch that are still kept"
        for device, side in enumerate(self.sides):
            side.pool.close()
            self.fake.control("stream_destroy", side.stream)
            self.fake.control("stream_destroy", side.consumer)
            if self.fake.vendor == "cuda":
                self.fake.driver("cuDevicePrimaryCtxRelease_v2", "", device)
        if self.fake.vendor == "cuda":
            self.fake.driver("cuCtxSetCurrent", "", None)


def without(path: Path, *names: str) -> Path:
    """A copy of the fake driver that lacks functions, as older drivers do; it has a state of its own.

    The loader finds a symbol by a hash of its name and then compares the names: one that reads otherwise is not found.
    """
    library = Path(str(LIBRARY)).read_bytes()
    for name in names:
        entry = b"\0" + name.encode() + b"\0"
        assert entry in library, name
        library = library.replace(entry, b"\0-" + entry[2:])
    path.write_bytes(library)
    return path


def threads() -> list[str]:
    """Names of this process' threads that are penstock's."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # it ended just now
            continue
    return sorted(name for name in names if name.startswith("penstock"))


def descriptors() -> list[str]:
    """What this process has open, without numbers."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(fd.readlink()).split(":")[0])
        except OSError:  # the descriptor of this listing
            continue
    return sorted(found)


def settle(probe: Any, wanted: Any, seconds: float = 60.0) -> Any:
    """`probe()`, once it is `wanted` or the time is up: what ends in the background ends within a moment."""
    deadline = time.monotonic() + seconds
    while (found := probe()) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@contextmanager
def fresh(vendor: str = "cuda", *, checked: bool = True, library: Path | None = None) -> Iterator[FakeGpu]:
    """The fake driver, reset, and on the way out: no misuse, no leak, no thread, no descriptor."""
    fake = FakeGpu(vendor, library)
    gc.collect()
    _core.release_staging()
    fake.control("reset")
    fake.configure(strict=1)
    idle, files = threads(), descriptors()
    yield fake
    gc.collect()
    _core.release_staging()
    if checked:
        assert not fake.misuses, fake.misuses
        assert not fake.leaks, fake.leaks
        assert settle(threads, idle) == idle, threads()
        assert settle(descriptors, files) == files, descriptors()
    fake.control("reset")


@contextmanager
def torch_on(fake: FakeGpu, monkeypatch: Any, devices: int = 1) -> Iterator[FakeTorch]:
    """torch with the fake's devices as its GPUs, as penstock sees it."""
    side = FakeTorch(fake, devices)
    monkeypatch.setattr(_accelerator, "_torch", lambda: side)
    monkeypatch.setattr(_accelerator, "device_of", side.device_of)
    monkeypatch.setattr(_accelerator.Accelerator, "dlpack_device", (1, 0))
    yield side
    if not side.closed:
        side.close()
