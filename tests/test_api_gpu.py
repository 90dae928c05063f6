"""The GPU path on a fake driver: every fence, every byte, nothing left behind. `make test` builds that driver.

Device memory is torch CPU memory that the fake adopts, so that what torch and penstock do to each other is exercised:
blocks granted from the caller's thread, work still queued on them when they are granted, events that outlive them.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import penstock
import pytest
import torch
from conftest import FAKEGPU, LAYOUT, Oracle, raw
from penstock import _accelerator, _into
from penstock._device import Device

pytestmark = pytest.mark.skipif(
    not FAKEGPU, reason="PENSTOCK_TEST_FAKEGPU names no libfakegpu.so: cargo build -p fakegpu"
)

#: How long work that was queued earlier goes on using memory that torch's allocator hands out again.
BUSY_MICROSECONDS = 3000


class FakeGpu:
    """The control interface of libfakegpu.so, and a stream and context such as torch would have."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(str(FAKEGPU))
        for name, result in {"fakegpu_stream_create": ctypes.c_size_t, "fakegpu_counter": ctypes.c_uint64}.items():
            getattr(self.lib, name).restype = result
        self.lib.fakegpu_misuse_clear()  # not a reset: penstock keeps slabs and streams for the process
        self.call("cuInit", 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.stream = self.lib.fakegpu_stream_create(0, 1)
        self.adopted: dict[int, torch.Tensor] = {}
        self.events = 0
        self.fenced = True  # False: events are not passed on, as if somebody had forgotten them

    def call(self, name: str, *arguments: Any) -> None:
        assert getattr(self.lib, name)(*arguments) == 0, name

    def text(self, name: str) -> list[str]:
        buffer = ctypes.create_string_buffer(1 << 16)
        size = getattr(self.lib, name)(buffer, ctypes.c_size_t(len(buffer)))
        return buffer.raw[:size].decode().splitlines()

    def counter(self, name: str) -> int:
        return int(self.lib.fakegpu_counter(name.encode()))

    def configure(self, key: str, value: object) -> None:
        assert self.lib.fakegpu_configure(key.encode(), str(value).encode()) == 0

    def adopt(self, tensor: torch.Tensor) -> None:
        if tensor.nbytes and tensor.data_ptr() not in self.adopted:
            address, size = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_uint64(tensor.nbytes)
            assert self.lib.fakegpu_adopt(address, size, 0) == 0
            self.adopted[tensor.data_ptr()] = tensor

    def busy(self, tensor: torch.Tensor) -> None:
        """What a kernel that still uses freed memory looks like to whom the memory is given next."""
        if tensor.nbytes:
            done = self.lib.fakegpu_pending_use(
                ctypes.c_size_t(self.stream), ctypes.c_uint64(tensor.data_ptr()), ctypes.c_uint64(tensor.nbytes),
                ctypes.c_uint64(BUSY_MICROSECONDS),
            )  # fmt: skip
            assert done == 0

    def read(self, address: int, size: int) -> bytes:
        """Bytes of device memory as the host sees them; a misuse unless all work on them has been waited for."""
        if size:
            self.lib.fakegpu_host_access(ctypes.c_uint64(address), ctypes.c_uint64(size), 0)
        return ctypes.string_at(address, size)

    def close(self) -> None:
        gc.collect()
        penstock.Options()  # what the engine's thread dropped without the GIL goes with the next call into the core
        self.call("fakegpu_stream_synchronize", ctypes.c_size_t(self.stream), 0)
        for address in self.adopted:
            assert self.lib.fakegpu_disown(ctypes.c_uint64(address)) == 0
        self.adopted.clear()
        self.call("fakegpu_stream_destroy", ctypes.c_size_t(self.stream))
        assert self.events == 0, "events of torch that penstock still keeps"
        self.call("cuDevicePrimaryCtxRelease_v2", 0)
        self.call("cuCtxSetCurrent", None)


class Event:
    """A torch.cuda.Event: destroyed with its last reference, after which nobody may wait for it."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.handle = ctypes.c_void_p()
        gpu.call("cuEventCreate", ctypes.byref(self.handle), 2)
        gpu.call("cuEventRecord", self.handle, ctypes.c_void_p(gpu.stream))
        gpu.events += 1

    def __del__(self) -> None:
        self.gpu.events -= 1
        self.gpu.lib.cuEventDestroy_v2(self.handle)


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()

    class FakeAccelerator(_accelerator.Accelerator):
        def check(self, device: Device) -> None:
            assert device.number == 0

        def empty(self, nbytes: int) -> torch.Tensor:
            tensor = torch.empty(nbytes, dtype=torch.uint8)
            fake.adopt(tensor)
            fake.busy(tensor)
            return tensor

        def fence(self) -> tuple[int, object]:
            event = Event(fake)
            return (event.handle.value or 0, event) if fake.fenced else (0, event)

        def tensor(self, load, want, dtype, shape, capsule: Callable[[], Any]) -> torch.Tensor:
            """As torch would see it: torch here has no GPU to import a capsule for, so the block's bytes are copied."""
            nbytes = self._places[want][2]
            data = bytearray(fake.read(load.address(want), nbytes)) if nbytes else None
            flat = torch.empty(0, dtype=torch.uint8) if data is None else torch.frombuffer(data, dtype=torch.uint8)
            return flat.view(dtype).reshape(tuple(shape))

    monkeypatch.setattr(_accelerator, "Accelerator", FakeAccelerator)
    yield fake
    fake.close()
    assert fake.text("fakegpu_misuse_log") == []


def test_a_load_to_the_gpu_is_byte_for_byte(gpu, small):
    checkpoint = penstock.open(small)
    Oracle(small).same(checkpoint.load("cuda:0"))
    assert gpu.counter("bytes_h2d") >= LAYOUT.nbytes
    assert checkpoint.last_report.nbytes == LAYOUT.nbytes


def test_every_dtype_goes_to_the_gpu(gpu, every):
    oracle = Oracle(every)
    names = [name for name in oracle.entries if not name.startswith("f6_") and name != "f4.hollow"]
    for name, tensor in penstock.open(every).load("cuda:0", names=names).items():
        assert raw(tensor) == oracle[name], name


@pytest.mark.parametrize("window", ["4MiB", "1GiB"])
def test_a_stream_to_the_gpu_grants_blocks_as_it_goes(gpu, big, window):
    Oracle(big).same(dict(penstock.open(big).stream("cuda:0", window=window)))


def test_a_stream_to_the_gpu_may_be_dropped(gpu, big):
    stream = penstock.open(big).stream("cuda:0", window="8MiB")
    next(stream)
    del stream


def test_a_job_to_the_gpu(gpu, big):
    with penstock.open(big).start("cuda:0") as job:
        Oracle(big).same(job.result())


def test_slices_and_casts_on_the_gpu(gpu, opened, small):
    name = "layers.0.attn.weight"
    cut = {name: (slice(8, 16), slice(4, 20))}
    whole = opened.load(names=name)[name]
    assert raw(opened.load("cuda:0", names=name, slices=cut)[name]) == raw(whole[8:16, 4:20])
    assert raw(opened.load("cuda:0", names=name, dtype="float16")[name]) == raw(whole.half())
    assert raw(opened.load("cuda:0", names=name, dtype="raw")[name]) == Oracle(small)[name]


def test_dlpack_on_the_gpu_needs_no_framework(gpu, small):
    oracle = Oracle(small)
    loaded = penstock.open(small).load("cuda:0", framework="dlpack")
    for name, tensor in loaded.items():
        assert tensor.__dlpack_device__() == (2, 0)
        assert gpu.read(tensor._view.address, tensor.nbytes) == oracle[name]
    assert gpu.counter("device_bytes") >= LAYOUT.nbytes
    del loaded, tensor
    gc.collect()
    assert gpu.counter("device_bytes") == 0


def test_load_into_gpu_tensors_waits_for_what_is_queued_on_them(gpu, small, monkeypatch):
    checkpoint = penstock.open(small)
    to = {name: torch.zeros_like(tensor) for name, tensor in checkpoint.load().items()}
    for tensor in to.values():
        gpu.adopt(tensor)
        gpu.busy(tensor)
    monkeypatch.setattr(_into, "parse_device", lambda device: Device("cuda", 0))
    checkpoint.load_into(to)
    for tensor in to.values():
        gpu.read(tensor.data_ptr(), tensor.nbytes)
    Oracle(small).same(to)


def test_without_the_fence_memory_that_is_still_in_use_is_overwritten(gpu, big):
    gpu.fenced = False
    penstock.open(big).load("cuda:0", names="layers.0.weight")
    gpu.lib.fakegpu_drain()
    log = gpu.text("fakegpu_misuse_log")
    assert any("unordered-access" in line for line in log), log
    gpu.lib.fakegpu_misuse_clear()


@pytest.mark.parametrize("fail", ["cuMemcpyHtoDAsync_v2:1:700", "cuMemcpyHtoDAsync_v2:4:2"])
def test_a_driver_that_fails_is_a_typed_error_and_leaves_nothing(gpu, big, fail):
    penstock.open(big).load("cuda:0", names="layers.0.weight")
    gpu.configure("fail", fail)
    with pytest.raises(penstock.PenstockError) as caught:
        penstock.open(big).load("cuda:0")
    assert caught.value.kind in ("Device", "OutOfMemory"), caught.value
    gpu.configure("fail", "")
    Oracle(big).same(penstock.open(big).load("cuda:0"))


def test_safe_open_on_a_gpu(gpu, small):
    with penstock.safe_open(small, framework="pt", device="cuda:0") as file:
        assert raw(file.get_tensor("wide")) == Oracle(small)["wide"]
        assert raw(file.get_slice("embed.weight")[3]) == Oracle(small)["embed.weight"][3 * 96 : 4 * 96]
