"""System calls that the kernel refuses to this process from now on: a seccomp filter, installed without any library.

There is no way back, so this is for processes made for one test.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from dataclasses import dataclass

#: Numbers by machine: x86_64, aarch64.
_CALLS = {
    "openat": (257, 56),
    "openat2": (437, 437),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "pwritev": (296, 70),
    "fallocate": (285, 47),
    "fsync": (74, 82),
    "ftruncate": (77, 46),
    "linkat": (265, 37),
    "rename": (82, 38),  # arm has renameat alone
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "madvise": (28, 233),
    "mmap": (9, 222),
    "statx": (332, 291),
    "clone3": (435, 435),
    "clone": (56, 220),
    "eventfd2": (290, 19),
    "epoll_create1": (291, 20),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "cachestat": (451, 451),
    "preadv2": (327, 286),
    "process_vm_readv": (310, 270),
    "memfd_create": (319, 279),
    "socket": (41, 198),
    "connect": (42, 203),
    "accept4": (288, 242),
    "fcntl": (72, 25),
    "seccomp": (317, 277),
}
_ARM = platform.machine() == "aarch64"
_LD, _JEQ, _JSET, _RET = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_MODE_FILTER, _ALL_THREADS = 1, 1

O_DIRECT = os.O_DIRECT
MADV_POPULATE_READ = 22


def number(call: str) -> int:
    """The number of a system call on this machine."""
    return _CALLS[call][_ARM]


@dataclass(frozen=True)
class Refusal:
    """A system call that fails with ``error``; only where argument ``argument`` is ``value``, or has ``bit``."""

    call: str
    error: int = errno.EPERM
    argument: int | None = None
    value: int | None = None
    bit: int | None = None


def refuse(*refusals: Refusal) -> None:
    """From here on the kernel refuses these to every thread of this process and its children."""
    program: list[tuple[int, int, int, int]] = []
    for r in refusals:
        test: list[tuple[int, int, int, int]] = []
        if r.argument is not None:  # struct seccomp_data: the number at 0, arguments of 8 bytes from 16 on
            how, operand = (_JEQ, r.value) if r.bit is None else (_JSET, r.bit)
            test = [(_LD, 0, 0, 16 + 8 * r.argument), (how, 0, 1, operand or 0)]
        program += [(_LD, 0, 0, 0), (_JEQ, 0, len(test) + 1, number(r.call)), *test, (_RET, 0, 0, _ERRNO | r.error)]
    program.append((_RET, 0, 0, _ALLOW))
    code = b"".join(struct.pack("=HBBI", *statement) for statement in program)
    buffer = ctypes.create_string_buffer(code)
    head = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) != 0:  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "prctl")
    if libc.syscall(number("seccomp"), _MODE_FILTER, _ALL_THREADS, ctypes.create_string_buffer(head)) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


NO_URING = Refusal("io_uring_setup")
NO_DIRECT = Refusal("openat", errno.EINVAL, argument=2, bit=O_DIRECT)
NO_POPULATE = Refusal("madvise", errno.EINVAL, argument=2, value=MADV_POPULATE_READ)
NO_TOUCH = Refusal("process_vm_readv")
NO_CACHESTAT = Refusal("cachestat")
NO_THREADS = (Refusal("clone3", errno.EAGAIN), Refusal("clone", errno.EAGAIN))
