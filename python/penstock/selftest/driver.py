"""The CUDA driver by ctypes: none of penstock's code, so that it can say what the driver does."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Any

MIB = 1 << 20
HUGE_PAGE = 2 * MIB

#: A function that only the fake driver exports.
MARK = "fakegpu_reset"


def library() -> str:
    """The driver's library: the system's, or the one that PENSTOCK_GPU_LIBRARY names."""
    return os.environ.get("PENSTOCK_GPU_LIBRARY", "").removeprefix("cuda:") or "libcuda.so.1"


class Refused(Exception):
    """A call of the driver gave a code other than 0."""


class Driver:
    """The driver's functions by name: `driver("cuInit", 0)` raises `Refused`, `driver.code("cuInit", 0)` does not."""

    def __init__(self, path: str | None = None) -> None:
        self._lib = ctypes.CDLL(path or library())

    @property
    def is_fake(self) -> bool:
        return self.has(MARK)

    def has(self, name: str) -> bool:
        return hasattr(self._lib, name)

    def code(self, name: str, *arguments: Any) -> int:
        return int(getattr(self._lib, name)(*arguments))

    def function(self, name: str, arguments: list[Any]) -> Any:
        """One that takes more than words and pointers."""
        found = getattr(self._lib, name)
        found.argtypes = arguments
        return found

    def __call__(self, name: str, *arguments: Any) -> None:
        if code := self.code(name, *arguments):
            raise Refused(f"{name} gave {code}")

    def version(self) -> int:
        found = ctypes.c_int()
        self("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def name(self, device: int) -> str:
        text = ctypes.create_string_buffer(128)
        self("cuDeviceGetName", text, 128, device)
        return text.value.decode()

    def attribute(self, number: int, device: int) -> int | str:
        found = ctypes.c_int()
        code = self.code("cuDeviceGetAttribute", ctypes.byref(found), number, device)
        return found.value if code == 0 else f"error {code}"

    def enter(self, device: int) -> ctypes.c_void_p:
        """Makes the primary context current on this thread. It is kept until the process ends."""
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(number), device)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self("cuCtxSetCurrent", context)
        return context

    def stream(self) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(made), 1)  # non-blocking
        return made

    def event(self, flags: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self("cuEventCreate", ctypes.byref(made), flags)
        return made

    def allocate(self, nbytes: int) -> int:
        made = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(made), ctypes.c_size_t(nbytes))
        return made.value

    def free(self, address: int) -> None:
        self("cuMemFree_v2", ctypes.c_uint64(address))

    def register(self, memory: Pages) -> None:
        self("cuMemHostRegister_v2", ctypes.c_void_p(memory.address), ctypes.c_size_t(memory.nbytes), 1)  # portable

    def unregister(self, memory: Pages) -> None:
        self("cuMemHostUnregister", ctypes.c_void_p(memory.address))

    def copy(self, to: int, source: int, nbytes: int, stream: ctypes.c_void_p) -> None:
        """Submits a copy from the host to the device."""
        size = ctypes.c_size_t(nbytes)
        self("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_void_p(source), size, stream)

    def wait(self, stream: ctypes.c_void_p) -> None:
        self("cuStreamSynchronize", stream)

    def is_pinned(self, address: int) -> bool:
        """Whether host memory is registered with the driver. False where it has no way to ask."""
        if not self.has("cuPointerGetAttribute"):
            return False
        kind = ctypes.c_uint()
        where = ctypes.c_uint64(address)
        return self.code("cuPointerGetAttribute", ctypes.byref(kind), 2, where) == 0 and kind.value == 1


class Pages:
    """Anonymous memory that begins at a huge page, touched unless told otherwise."""

    def __init__(self, nbytes: int, *, touched: bool = True) -> None:
        # Private, as staging memory is: shared memory, which is the default, has small pages
        self._memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.address, self.nbytes = -(-start // HUGE_PAGE) * HUGE_PAGE, nbytes
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        if touched:
            ctypes.memset(self.address, 1, nbytes)
