"""A seccomp filter from a profile of the OCI runtime specification, loaded by libseccomp, as runc and crun load it."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
from typing import Any

#: Actions and comparisons of seccomp.h (libseccomp) by their names in the specification.
_ACTIONS = {
    "SCMP_ACT_ALLOW": 0x7FFF0000,
    "SCMP_ACT_LOG": 0x7FFC0000,
    "SCMP_ACT_ERRNO": 0x00050000,
    "SCMP_ACT_TRAP": 0x00030000,
    "SCMP_ACT_KILL": 0x00000000,
    "SCMP_ACT_KILL_THREAD": 0x00000000,
    "SCMP_ACT_KILL_PROCESS": 0x80000000,
}
_COMPARISONS = {
    "SCMP_CMP_NE": 1,
    "SCMP_CMP_LT": 2,
    "SCMP_CMP_LE": 3,
    "SCMP_CMP_EQ": 4,
    "SCMP_CMP_GE": 5,
    "SCMP_CMP_GT": 6,
    "SCMP_CMP_MASKED_EQ": 7,
}


class _Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp`"""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("how", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


class Filter:
    """The filter of a profile. It holds from `load` on, for the calling thread and what that starts.

    Args:
        profile: ``linux.seccomp`` of the OCI runtime specification.

    Raises:
        OSError: libseccomp is not here, or refuses a rule.
        KeyError: the profile has an action or a comparison that is not known here.
    """

    def __init__(self, profile: dict[str, Any]) -> None:
        name = ctypes.util.find_library("seccomp")
        if name is None:
            raise FileNotFoundError(errno.ENOENT, "libseccomp is not installed (Debian: libseccomp2)")
        self._library = library = ctypes.CDLL(name)
        library.seccomp_init.restype = ctypes.c_void_p
        library.seccomp_init.argtypes = [ctypes.c_uint32]
        library.seccomp_arch_resolve_name.restype = ctypes.c_uint32
        library.seccomp_arch_add.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
        library.seccomp_rule_add_array.argtypes = [
            ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Comparison)
        ]  # fmt: skip
        library.seccomp_load.argtypes = [ctypes.c_void_p]
        #: System calls of the profile that this libseccomp does not know. As runc does, the filter goes without them.
        self.unknown: list[str] = []
        otherwise = _action(profile["defaultAction"], profile.get("defaultErrnoRet"))
        self._filter = library.seccomp_init(otherwise)
        for architecture in profile.get("architectures") or ():
            token = library.seccomp_arch_resolve_name(architecture.removeprefix("SCMP_ARCH_").lower().encode())
            self._expect(library.seccomp_arch_add(self._filter, token), architecture, but=errno.EEXIST)
        for rule in profile.get("syscalls") or ():
            action = _action(rule["action"], rule.get("errnoRet"))
            if action == otherwise:
                continue
            compared = [
                _Comparison(one["index"], _COMPARISONS[one["op"]], one.get("value", 0), one.get("valueTwo", 0))
                for one in rule.get("args") or ()
            ]
            for call in rule["names"]:
                number = library.seccomp_syscall_resolve_name(call.encode())
                if number == -1:
                    self.unknown.append(call)
                    continue
                array = (_Comparison * len(compared))(*compared)
                code = library.seccomp_rule_add_array(self._filter, action, number, len(compared), array)
                self._expect(code, call)

    def load(self) -> None:
        """The kernel refuses from here on what the profile does not allow."""
        self._expect(self._library.seccomp_load(self._filter), "seccomp_load")

    @staticmethod
    def _expect(code: int, what: str, but: int = 0) -> None:
        if code < 0 and -code != but:
            raise OSError(-code, f"libseccomp: {what}: {os.strerror(-code)}")


def _action(name: str, error: int | None) -> int:
    action = _ACTIONS[name]
    return action | (errno.EPERM if error is None else error) if name == "SCMP_ACT_ERRNO" else action
