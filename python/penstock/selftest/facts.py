"""Facts of the CUDA driver here, by ctypes: one row each. It runs in a process of its own, without torch.

Penstock rests on these: what a thread without a context may do, what registering costs, whether it waits for unrelated
copies, how fast each kind of copy is, and what another thread may do while one captures a graph.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import results
from .driver import MIB, Driver, Pages, Refused

K = 1 << 10
QUICK = os.environ.get("PENSTOCK_SELFTEST_QUICK") == "1"

#: Numbers of device attributes in cuda.h that a loader may go by.
ATTRIBUTES = {
    "integrated": 18,
    "copy engines": 40,
    "unified addressing": 41,
    "compute capability, major": 75,
    "compute capability, minor": 76,
    "pageable memory access": 88,
    "host pointer usable for registered memory": 91,
    "registering supported": 99,
    "registering read-only memory supported": 113,
    "GPUDirect RDMA": 116,
    "pageable access by the host's page tables": 100,
    "NUMA node of the host": 134,
}

#: Functions that older drivers lack.
OPTIONAL = (
    "cuMemcpyBatchAsync",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamGetCaptureInfo",
    "cuPointerGetAttribute",
)


def fact(name: str, value: Any, unit: str = "") -> None:
    results.row("facts of the driver", fact=name, value=value, unit=unit)


def took(work: Callable[[], Any]) -> float:
    """Milliseconds."""
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1e3


def rate(nbytes: int, work: Callable[[], Any]) -> float:
    """GB/s, the second time."""
    work()
    return nbytes / took(work) / 1e6


def attempt(name: str, measure: Callable[[], None]) -> None:
    """One measurement; a driver that refuses it is a fact too."""
    try:
        measure()
    except (Refused, AttributeError, OSError) as error:
        fact(name, f"{type(error).__name__}: {error}")


class Facts:
    def __init__(self) -> None:
        self.cu = Driver()
        fact("cuInit", took(lambda: self.cu("cuInit", 0)), "ms")
        fact("driver interface", self.cu.version())
        fact("device", self.cu.name(0))
        total, free = ctypes.c_size_t(), ctypes.c_size_t()
        fact("making the primary context", took(lambda: self.cu.enter(0)), "ms")
        self.cu("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        fact("device memory", total.value, "bytes")
        fact("device memory free", free.value, "bytes")
        for name, number in ATTRIBUTES.items():
            fact(f"attribute: {name}", self.cu.attribute(number, 0))
        for name in OPTIONAL:
            fact(f"has {name}", self.cu.has(name))
        self.stream = self.cu.stream()
        self.slab = (1 if QUICK else 4) * MIB
        self.ring = [Pages(self.slab) for _ in range(8 if QUICK else 64)]
        self.large = Pages(8 * MIB if QUICK else 256 * MIB)
        self.total = 16 * MIB if QUICK else 4 << 30

    def bare_thread(self) -> None:
        """A thread on which no context is current, as the core's waiting thread was once."""
        event, codes = self.cu.event(3), {}
        self.cu("cuEventRecord", event, self.stream)

        def ask() -> None:
            calls = (("cuEventQuery", event), ("cuEventSynchronize", event), ("cuStreamSynchronize", self.stream))
            codes.update({name: self.cu.code(name, handle) for name, handle in calls})

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        fact("codes on a thread without a context", codes)

    def registering(self) -> None:
        fresh = Pages(self.large.nbytes, touched=False)
        for name, slabs in (("slabs", self.ring), ("one large", [self.large])):
            times = [took(lambda s=s: self.cu.register(s)) for s in slabs]  # type: ignore[misc]
            size = f"{slabs[0].nbytes >> 20} MiB"
            fact(f"registering {len(slabs)} x {size}: the first", times[0], "ms")
            fact(f"registering {len(slabs)} x {size}: the median", statistics.median(times), "ms")
            fact(f"registering {len(slabs)} x {size}: all", sum(times), "ms")
            if name == "one large":
                code = self.cu.code(
                    "cuMemHostRegister_v2", ctypes.c_void_p(slabs[0].address), ctypes.c_size_t(slabs[0].nbytes), 1
                )
                fact("registering what is registered: code", code)
                fact("its pointer says that it is registered", self.cu.is_pinned(slabs[0].address))
            undone = [took(lambda s=s: self.cu.unregister(s)) for s in slabs]  # type: ignore[misc]
            fact(f"unregistering {len(slabs)} x {size}: all", sum(undone), "ms")
        fact("the pointer of plain memory says that it is registered", self.cu.is_pinned(fresh.address))
        fact(f"registering {fresh.nbytes >> 20} MiB untouched", took(lambda: self.cu.register(fresh)), "ms")
        self.cu.unregister(fresh)

        def several(part: list[Pages]) -> None:
            self.cu.enter(0)
            for slab in part:
                self.cu.register(slab)

        workers = [threading.Thread(target=several, args=(self.ring[i::4],)) for i in range(4)]

        def all_of_them() -> None:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()

        fact(f"registering {len(self.ring)} slabs by 4 threads", took(all_of_them), "ms")
        self.cu.register(self.large)

    def link(self) -> None:
        room = self.cu.allocate(max(self.large.nbytes, len(self.ring) * self.slab))
        self.room = room
        for size in (256 * K, MIB, 4 * MIB, 16 * MIB, 64 * MIB):
            if size > self.large.nbytes:
                continue

            def copies(size: int = size) -> None:
                for i in range(self.total // size):
                    at = i * size % self.large.nbytes
                    self.cu.copy(room + at, self.large.address + at, size, self.stream)
                self.cu.wait(self.stream)

            fact(f"copies of {size >> 10} KiB to the device, one stream", rate(self.total, copies), "GB/s")
        second = self.cu.stream()

        def two_streams() -> None:
            for i in range(self.total // self.slab):
                slab, stream = self.ring[i % len(self.ring)], (self.stream, second)[i % 2]
                self.cu.copy(room + i % len(self.ring) * self.slab, slab.address, self.slab, stream)
            self.cu.wait(self.stream)
            self.cu.wait(second)

        fact("slabs, two streams", rate(self.total, two_streams), "GB/s")

        def to_the_host() -> None:
            for i in range(self.total // self.slab):
                at, size = i % len(self.ring), ctypes.c_size_t(self.slab)
                place = ctypes.c_uint64(room + at * self.slab)
                self.cu("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(self.ring[at].address), place, size, self.stream)
            self.cu.wait(self.stream)

        fact("slabs to the host, one stream", rate(self.total, to_the_host), "GB/s")
        for flags, how in ((3, "blocking"), (2, "spinning")):
            self._events(flags, how)

    def _events(self, flags: int, how: str) -> None:
        events = [self.cu.event(flags) for _ in self.ring]

        def slabs() -> None:
            for i in range(self.total // self.slab):
                j = i % len(self.ring)
                if i >= 4:
                    self.cu("cuEventSynchronize", events[(i - 4) % len(self.ring)])
                self.cu.copy(self.room + j * self.slab, self.ring[j].address, self.slab, self.stream)
                self.cu("cuEventRecord", events[j], self.stream)
            self.cu.wait(self.stream)

        fact(f"slabs, an event each, 4 in flight, {how} wait", rate(self.total, slabs), "GB/s")
        waits = []
        for _ in range(100):
            self.cu.copy(self.room, self.large.address, 4 * K, self.stream)
            self.cu("cuEventRecord", events[0], self.stream)
            waits.append(took(lambda: self.cu("cuEventSynchronize", events[0])) * 1e3)
        fact(f"from a copy of 4 KiB to the {how} wake-up", statistics.median(waits), "us")

    def beside_copies(self) -> None:
        """Whether registering and unregistering wait for copies that have nothing to do with the memory."""
        for name in ("unregistering", "registering"):
            lone = Pages(4 * MIB)
            if name == "unregistering":
                self.cu.register(lone)
            for _ in range(8):
                self.cu.copy(self.room, self.large.address, self.large.nbytes, self.stream)
            undo = self.cu.unregister if name == "unregistering" else self.cu.register
            fact(f"{name} an idle slab beside 8 large copies", took(lambda f=undo, s=lone: f(s)), "ms")  # type: ignore[misc]
            fact(f"until those copies were over, after {name}", took(lambda: self.cu.wait(self.stream)), "ms")
            if name == "registering":
                self.cu.unregister(lone)

    def beside_registering(self) -> None:
        """The slowdown of copies while another thread registers, as in the first load of a process."""
        fresh, ended = [Pages(4 * MIB) for _ in range(4 if QUICK else 32)], threading.Event()

        def registers() -> None:
            self.cu.enter(0)
            while not ended.is_set():
                for slab in fresh:
                    self.cu.register(slab)
                for slab in fresh:
                    self.cu.unregister(slab)

        def copies() -> None:
            for i in range(self.total // self.slab):
                at = i % len(self.ring)
                self.cu.copy(self.room + at * self.slab, self.ring[at].address, self.slab, self.stream)
            self.cu.wait(self.stream)

        thread = threading.Thread(target=registers)
        thread.start()
        try:
            fact("slabs, one stream, while another thread registers", rate(self.total, copies), "GB/s")
        finally:
            ended.set()
            thread.join()

    def making(self) -> None:
        """The objects of each load: a stream, and an event for each slab in flight."""
        for name, make, undo in (
            ("stream", self.cu.stream, "cuStreamDestroy_v2"),
            ("event", lambda: self.cu.event(3), "cuEventDestroy_v2"),
        ):
            times = []
            for _ in range(32):
                made: list[ctypes.c_void_p] = []
                make_ms = took(lambda m=made, f=make: m.append(f()))  # type: ignore[misc]
                times.append((make_ms, took(lambda m=made, u=undo: self.cu(u, m[0]))))  # type: ignore[misc]
            fact(f"making a {name}: the first", times[0][0] * 1e3, "us")
            fact(f"making a {name}", statistics.median(t[0] for t in times) * 1e3, "us")
            fact(f"giving a {name} back", statistics.median(t[1] for t in times) * 1e3, "us")

    def file_pages(self) -> None:
        """Whether the page cache itself can be registered, what that costs, and how fast copies out of it are."""
        size = self.large.nbytes
        path = Path(os.environ.get("PENSTOCK_SELFTEST_FILES", "/var/tmp"), f"facts-{os.getpid()}")
        path.write_bytes(b"\1" * size)
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
                at = _address(mapped)
                place = (ctypes.c_void_p(at), ctypes.c_size_t(size))
                for flags, how in ((1 | 8, "read-only"), (1, "as any memory")):
                    codes: list[int] = []
                    spent = took(
                        lambda f=flags, c=codes: c.append(self.cu.code("cuMemHostRegister_v2", *place, f))  # type: ignore[misc]
                    )
                    fact(f"registering {size >> 20} MiB of a mapped file, {how}: code", codes[0])
                    if codes[0]:
                        continue
                    fact(f"registering {size >> 20} MiB of a mapped file, {how}", spent, "ms")

                    def copies() -> None:
                        self.cu.copy(self.room, at, size, self.stream)
                        self.cu.wait(self.stream)

                    fact("copies out of it", rate(size, copies), "GB/s")
                    fact("unregistering it", took(lambda: self.cu("cuMemHostUnregister", place[0])), "ms")
        finally:
            path.unlink()

    def small_copies(self) -> None:
        count, size, step = (100 if QUICK else 1000), 4 * K, 8 * K

        def one_by_one() -> None:
            for i in range(count):
                self.cu.copy(self.room + i * step, self.large.address + i * step, size, self.stream)
            self.cu.wait(self.stream)

        one_by_one()
        fact(f"{count} copies of 4 KiB, each", took(one_by_one) * 1e3 / count, "us")
        if not self.cu.has("cuMemcpyBatchAsync"):
            return
        addresses, sizes = ctypes.c_uint64 * count, ctypes.c_size_t * count
        to = addresses(*(self.room + i * step for i in range(count)))
        source = addresses(*(self.large.address + i * step for i in range(count)))
        lengths, first, bad = sizes(*[size] * count), ctypes.c_size_t(0), ctypes.c_size_t(0)

        class Attributes(ctypes.Structure):
            _fields_ = [("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint)]

        attributes, n, one = Attributes(1), ctypes.c_size_t(count), ctypes.c_size_t(1)

        def together() -> None:
            pointers = (ctypes.byref(attributes), ctypes.byref(first), one, ctypes.byref(bad))
            self.cu("cuMemcpyBatchAsync", to, source, lengths, n, *pointers, self.stream)
            self.cu.wait(self.stream)

        together()
        fact("the same in one cuMemcpyBatchAsync, each", took(together) * 1e3 / count, "us")

    def rows(self) -> None:
        names = ["sx", "sy", "st", "sh", "sd", "sa", "sp", "dx", "dy", "dt", "dh", "dd", "da", "dp", "w", "h"]

        class Copy2D(ctypes.Structure):
            _fields_ = [(name, ctypes.c_uint64) for name in names]

        for width in (256, 512, 1024, 3584, 8192):
            count = self.large.nbytes // 4 // width // 2
            copy = Copy2D(st=1, sh=self.large.address, sp=2 * width, dt=2, dd=self.room, dp=width, w=width, h=count)

            def rectangle(copy: Copy2D = copy) -> None:
                self.cu("cuMemcpy2DAsync_v2", ctypes.byref(copy), self.stream)
                self.cu.wait(self.stream)

            fact(f"rows of {width} bytes", rate(width * count, rectangle), "GB/s")

    def pageable(self) -> None:
        plain = Pages(self.large.nbytes)

        def copy() -> None:
            self.cu.copy(self.room, plain.address, plain.nbytes, self.stream)
            self.cu.wait(self.stream)

        fact("from memory that is not registered", rate(plain.nbytes, copy), "GB/s")

    def allocating(self) -> None:
        for count, size in ((64, 16 * MIB), (32, 112 * MIB), (4, 1 << 30)):
            if QUICK and size > 16 * MIB:
                return
            made: list[int] = []
            spent = took(lambda n=count, s=size, m=made: m.extend(self.cu.allocate(s) for _ in range(n)))  # type: ignore[misc]
            fact(f"allocating {count} x {size >> 20} MiB", spent, "ms")
            fact(f"allocating {count} x {size >> 20} MiB, a GiB", spent / (count * size / (1 << 30)), "ms")
            fact(f"freeing {count} x {size >> 20} MiB", took(lambda m=made: self._free(m)), "ms")  # type: ignore[misc]

    def _free(self, addresses: list[int]) -> None:
        for address in addresses:
            self.cu.free(address)

    def end(self) -> None:
        """Unregisters all slabs. The driver refuses slabs that a failed measurement did not register: this is fine."""
        for slab in (*self.ring, self.large):
            self.cu.code("cuMemHostUnregister", ctypes.c_void_p(slab.address))
        self.cu.wait(self.stream)


def _address(mapped: mmap.mmap) -> int:
    """Where a mapping that cannot be written to lies: ctypes tells of writable memory only."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f"facts-{os.getpid()}" in line:
            return int(line.split("-")[0], 16)
    raise OSError(f"no mapping of {len(mapped)} bytes in /proc/self/maps")


def gds() -> None:
    """Whether cuFile starts here, what it says of itself, and how fast it reads: in compatibility mode, if at all."""

    class Error(ctypes.Structure):
        _fields_ = [("code", ctypes.c_int), ("driver", ctypes.c_int)]

    class Description(ctypes.Structure):
        _fields_ = [("kind", ctypes.c_int), ("fd", ctypes.c_uint64), ("operations", ctypes.c_void_p)]  # a union with fd

    def say(name: str, value: Any, unit: str = "") -> None:
        results.row("other ways", fact=name, value=value, unit=unit)

    libraries = [f for p in sys.path for f in Path(p).glob("nvidia/*/lib/libcufile.so.0")]
    try:
        lib = ctypes.CDLL(str(libraries[0]) if libraries else "libcufile.so.0")
    except OSError as error:
        return say("library", str(error)[:200])
    say("library", str(libraries[0]) if libraries else "the system's")
    say("module nvidia-fs", Path("/proc/driver/nvidia-fs").exists())
    cu = Driver()
    cu("cuInit", 0)
    cu.enter(0)
    for name in ("cuFileDriverOpen", "cuFileDriverGetProperties", "cuFileHandleRegister", "cuFileBufRegister"):
        getattr(lib, name).restype = Error
    lib.cuFileRead.restype = ctypes.c_ssize_t
    opened: list[Any] = []
    say("cuFileDriverOpen", took(lambda: opened.append(lib.cuFileDriverOpen())), "ms")
    say("cuFileDriverOpen: code", opened[0].code)
    if opened[0].code:
        return None
    properties = (ctypes.c_uint8 * 256)()
    if lib.cuFileDriverGetProperties(properties).code == 0:
        words = (ctypes.c_uint32 * 64).from_buffer(properties)
        say("version of nvidia-fs", f"{words[0]}.{words[1]}")
        say("status flags, control flags, features", f"{words[6]:#x} {words[7]:#x} {words[8]:#x}")
    size = (8 if QUICK else 256) * MIB
    folder = os.environ.get("PENSTOCK_SELFTEST_FILES", "/var/tmp")
    path = Path(folder, f"cufile-{os.getpid()}")
    path.write_bytes(b"\1" * size)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        os.fsync(fd)
        handle, description = ctypes.c_void_p(), Description(1, fd)
        code = lib.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(description)).code
        say("cuFileHandleRegister: code", code)
        if code:
            return None
        room = cu.allocate(size)
        arguments = (handle, ctypes.c_void_p(room), ctypes.c_size_t(size), ctypes.c_int64(0), ctypes.c_int64(0))
        got: list[int] = []
        spent = took(lambda: got.append(lib.cuFileRead(*arguments)))
        say("cuFileRead: bytes, or an error", got[0])
        if got[0] > 0:
            say("cuFileRead, one thread", got[0] / spent / 1e6, "GB/s")
    finally:
        os.close(fd)
        path.unlink()


def between_processes() -> None:
    """Device memory of another process: whether it can be opened here, and how fast copies out of it are."""
    size = (8 if QUICK else 256) * MIB
    to_child, from_child = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(25)
        os.close(to_child[1])
        try:
            said = f"{_out_of_another(os.read(to_child[0], 64), size):.4g} GB/s"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(from_child[1], said.encode())
        os._exit(0)
    os.close(from_child[1])
    try:
        cu = Driver()
        cu("cuInit", 0)
        cu.enter(0)
        room, handle = cu.allocate(size), ctypes.create_string_buffer(64)
        code = cu.code("cuIpcGetMemHandle", handle, ctypes.c_uint64(room))
        results.row("other ways", fact="cuIpcGetMemHandle: code", value=code, unit="")
        os.write(to_child[1], handle.raw)
        with os.fdopen(from_child[0], "rb") as pipe:
            results.row("other ways", fact="copies out of another process' memory", value=pipe.read().decode(), unit="")
    finally:
        os.close(to_child[1])
        os.waitpid(child, 0)


def _out_of_another(handle: bytes, size: int) -> float:
    """GB/s of copies out of the device memory of the process that sent the handle."""

    class Handle(ctypes.Structure):
        _fields_ = [("reserved", ctypes.c_char * 64)]

    if len(handle) < 64:
        raise Refused("there is no handle")
    cu = Driver()
    cu("cuInit", 0)
    cu.enter(0)
    stream, own, theirs = cu.stream(), cu.allocate(size), ctypes.c_uint64()
    opening = cu.function("cuIpcOpenMemHandle_v2", [ctypes.c_void_p, Handle, ctypes.c_uint])
    if code := opening(ctypes.byref(theirs), Handle.from_buffer_copy(handle), 1):
        raise Refused(f"cuIpcOpenMemHandle gave {code}")

    def copies() -> None:
        cu("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(own), theirs, ctypes.c_size_t(size), stream)
        cu.wait(stream)

    return rate(size, copies)


#: The calls of another thread while one captures. "nothing" is the control.
CALLS = (
    "nothing",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamSynchronize",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemAlloc",
    "cuMemcpyHtoDAsync",
    "cuStreamCreate",
)


def beside_a_capture(call: str, mode: int) -> dict[str, Any]:
    """The result of a call while another thread captures in global mode, and the state of the capture."""
    cu = Driver()
    cu("cuInit", 0)
    cu.enter(0)
    capturing, other, event = cu.stream(), cu.stream(), cu.event(3)
    cu("cuEventRecord", event, other)
    plain, pinned, room = Pages(4 * MIB), Pages(4 * MIB), cu.allocate(4 * MIB)
    cu.register(pinned)
    cu.wait(other)
    calls: dict[str, Callable[[], int]] = {
        "nothing": lambda: 0,
        "cuEventQuery": lambda: cu.code("cuEventQuery", event),
        "cuEventSynchronize": lambda: cu.code("cuEventSynchronize", event),
        "cuStreamSynchronize": lambda: cu.code("cuStreamSynchronize", other),
        "cuMemHostRegister": lambda: cu.code(
            "cuMemHostRegister_v2", ctypes.c_void_p(plain.address), ctypes.c_size_t(plain.nbytes), 1
        ),
        "cuMemHostUnregister": lambda: cu.code("cuMemHostUnregister", ctypes.c_void_p(pinned.address)),
        "cuMemAlloc": lambda: cu.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(MIB)),
        "cuMemcpyHtoDAsync": lambda: cu.code(
            "cuMemcpyHtoDAsync_v2", ctypes.c_uint64(room), ctypes.c_void_p(pinned.address), ctypes.c_size_t(MIB), other
        ),
        "cuStreamCreate": lambda: cu.code("cuStreamCreate", ctypes.byref(ctypes.c_void_p()), 1),
    }
    found: dict[str, Any] = {}

    def disturb() -> None:
        cu.enter(0)
        chosen = ctypes.c_int(mode)
        cu("cuThreadExchangeStreamCaptureMode", ctypes.byref(chosen))
        found["code"] = calls[call]()

    cu("cuStreamBeginCapture_v2", capturing, 0)
    thread = threading.Thread(target=disturb)
    thread.start()
    thread.join(20)
    found["ending the capture"] = cu.code("cuStreamEndCapture", capturing, ctypes.byref(ctypes.c_void_p()))
    return found


def captures() -> None:
    """Each case in a process of its own: a broken capture must not spoil the next."""
    cases = [(call, mode) for call in CALLS for mode in (0, 2)]
    for call, mode in cases[:4] if QUICK else cases:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(25)
            try:
                found = beside_a_capture(call, mode)
            except BaseException as error:
                found = {"code": f"{type(error).__name__}: {error}"}
            os.write(write, json.dumps(found).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        found = json.loads(text) if text else {"code": f"the process ended with status {status}"}
        how = "relaxed" if mode == 2 else "global"
        results.row("beside a graph capture", call=call, **{"mode of its thread": how}, **found)


def machine() -> dict[str, Any]:
    """Where this runs."""

    def said(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""

    def line(path: str) -> str:
        try:
            return Path(path).read_text().strip()
        except OSError:
            return ""

    query = "name,driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,memory.total,"
    query += "persistence_mode"
    files = os.environ.get("TMPDIR", "/var/tmp")
    settings = "PREEMPT_NONE|PREEMPT_LAZY|HZ|DEVICE_PRIVATE|PCI_P2PDMA"
    config = said("sh", "-c", f"zcat /proc/config.gz | grep -E 'CONFIG_({settings})='")
    sockets = said("sh", "-c", "lscpu | grep -E 'Thread|Core|Socket|NUMA node\\(|L3'")
    flags = set(line("/proc/cpuinfo").partition("flags")[2].partition("\n")[0].split())
    cpus = [text for text in line("/proc/cpuinfo").splitlines() if text.startswith("model name")]
    found = {
        "GPUs": said("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader") or said("rocm-smi", "-i"),
        "kernel": os.uname().release,
        "processor": f"{os.cpu_count()} x {cpus[0].partition(':')[2].strip() if cpus else os.uname().machine}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGESIZE') / 1e9:.0f} GB",
        "huge pages": line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "io_uring_disabled": line("/proc/sys/kernel/io_uring_disabled"),
        "huge pages of shared memory": line("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "kernel's settings": config.replace("\n", " "),
        "locked memory": said("sh", "-c", "ulimit -l"),
        "files": said("df", "-h", "--output=fstype,size,avail", files).replace("\n", " "),
        "disk": said("lsblk", "-dno", "NAME,SIZE,ROTA,MODEL").replace("\n", "; "),
        "/proc/meminfo": ", ".join(line("/proc/meminfo").splitlines()[:3]),
        "processor's copies": " ".join(sorted(flags & {"erms", "fsrm", "avx512f", "clzero"})),
        "sockets and caches": sockets.replace("\n", "; "),
        "driver": line("/proc/driver/nvidia/version").partition("\n")[0],
        "Python": sys.version.split()[0],
    }
    return {name: value for name, value in found.items() if value}


def main() -> None:
    if sys.argv[1:] == ["captures"]:
        return captures()
    if sys.argv[1:] == ["others"]:
        attempt("between processes", between_processes)  # before this process has a context
        return attempt("cuFile", gds)
    facts = Facts()
    for name in (
        "bare_thread",
        "registering",
        "making",
        "link",
        "beside_copies",
        "beside_registering",
        "file_pages",
        "small_copies",
        "rows",
        "pageable",
        "allocating",
    ):
        attempt(name, getattr(facts, name))
    return facts.end()


if __name__ == "__main__":
    main()
