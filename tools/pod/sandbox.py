"""What a restricted pod gives its process: a root of its own that is read-only, and none of the rights of root.

The steps are those of a container runtime (OCI runtime specification 1.2), in its order: namespaces, mounts,
pivot_root, limits, capabilities, user, no_new_privs, seccomp.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from dataclasses import dataclass, field
from pathlib import Path

from memory import Group
from seccomp import Filter

# <sched.h>, <linux/mount.h>, <linux/prctl.h>, <linux/capability.h>
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWPID = 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _RECURSIVE, _HERE = 442, 0x8000, -100
_CAPBSET_DROP, _NO_NEW_PRIVS, _CAP_AMBIENT, _CLEAR_ALL, _PDEATHSIG, _SIGKILL = 24, 38, 47, 4, 1, 9
_VERSION_3 = 0x20080522

#: Folders of this machine that every image has.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
#: Those files of /proc that runtimes hide.
_MASKED = ("kcore", "keys", "latency_stats", "timer_list", "sched_debug")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Volume:
    """A file or folder of this machine, and its place in the pod."""

    source: Path
    place: Path
    writable: bool = False


@dataclass
class Pod:
    """What the process gets. Sizes are in bytes.

    Attributes:
        filter: Its system calls.
        user: Its uid and gid.
        image: Folders of this machine that are part of its image, at the same place.
        volumes: What is mounted besides.
        shm: The size of /dev/shm; 0: it is read-only like all else.
        memlock: How much memory it may lock.
        share_pid: It sees the processes of this machine, as with ``shareProcessNamespace`` those of other containers.
    """

    filter: Filter | None
    user: int = 65534
    image: list[Path] = field(default_factory=list)
    volumes: list[Volume] = field(default_factory=list)
    shm: int = 64 << 20
    memlock: int = 8 << 20
    share_pid: bool = False

    def unshare(self, group: Group | None) -> None:
        """Leaves this machine's namespaces. What is forked now is the pod's first process."""
        _prctl(_PDEATHSIG, _SIGKILL)
        flags = _NEWNS | _NEWUTS | _NEWIPC
        if group is not None:
            group.join()
            # With version 1, runtimes leave the namespace of control groups alone
            flags |= _NEWCGROUP if group.version == 2 else 0
        _call("unshare", flags if self.share_pid else flags | _NEWPID)

    def enter(self, root: Path, group: Group | None) -> None:
        """Builds the root in an empty folder, goes there, and gives up every right. There is no way back.

        Raises:
            OSError: the kernel refuses a step; the message says which.
        """
        _mount(None, "/", None, _REC | _PRIVATE)
        _mount("tmpfs", root, "tmpfs", _NOSUID, "mode=755,size=16m")
        self._image(root)
        self._kernel(root, group)
        self._devices(root)
        # A volume may lie in another one
        for volume in sorted(self.volumes, key=lambda one: one.place):
            _bind(volume.source, root / volume.place.relative_to("/"), read_only=not volume.writable)
        os.chdir(root)
        if _libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b".") != 0:
            raise _failed("pivot_root")
        _call("umount2", b".", _DETACH)
        _read_only("/", recursive=False)
        os.chdir("/")
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (self.memlock, self.memlock))
        self._without_rights()

    def _image(self, root: Path) -> None:
        for folder in map(Path, _SYSTEM):
            if folder.is_symlink():
                (root / folder.name).symlink_to(folder.readlink())
            elif folder.is_dir():
                _bind(folder, root / folder.name)
        inside: list[Path] = []
        for folder in sorted(self.image):
            # What lies in a folder that is there already comes with it
            if not any(folder.is_relative_to(one) for one in [*map(Path, _SYSTEM), *inside]):
                inside.append(folder)
                _bind(folder, root / folder.relative_to("/"))
        for name in ("tmp", "run"):
            (root / name).mkdir(exist_ok=True)

    @staticmethod
    def _kernel(root: Path, group: Group | None) -> None:
        for name in ("proc", "sys"):
            (root / name).mkdir()
        _mount("proc", root / "proc", "proc", _NOSUID | _NODEV | _NOEXEC)
        _bind(root / "proc/sys", root / "proc/sys")
        for name in _MASKED:
            if (root / "proc" / name).exists():
                _mount("/dev/null", root / "proc" / name, None, _BIND)
        _mount("sysfs", root / "sys", "sysfs", _RDONLY | _NOSUID | _NODEV | _NOEXEC)
        groups = root / "sys/fs/cgroup"
        if group is None:
            return
        if group.version == 2:
            _mount("cgroup", groups, "cgroup2", _RDONLY | _NOSUID | _NODEV | _NOEXEC)
        else:
            _mount("cgroup", groups, "tmpfs", _NOSUID | _NODEV | _NOEXEC, "mode=755,size=64k")
            (groups / "memory").mkdir()
            _mount(group.folder, groups / "memory", None, _BIND)
            _read_only(groups, recursive=True)

    def _devices(self, root: Path) -> None:
        folder = root / "dev"
        folder.mkdir()
        _mount("tmpfs", folder, "tmpfs", _NOSUID, "mode=755,size=64k")
        for name in _DEVICES:
            (folder / name).touch()
            _mount(f"/dev/{name}", folder / name, None, _BIND)
        for name, to in {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
            (folder / name).symlink_to(f"/proc/self/{to}")
        (folder / "shm").mkdir()
        if self.shm:
            _mount("shm", folder / "shm", "tmpfs", _NOSUID | _NODEV | _NOEXEC, f"mode=1777,size={self.shm}")
        _read_only(folder, recursive=False)

    def _without_rights(self) -> None:
        for capability in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
            _prctl(_CAPBSET_DROP, capability)
        _prctl(_CAP_AMBIENT, _CLEAR_ALL)
        os.setgroups([])
        os.setresgid(self.user, self.user, self.user)
        os.setresuid(self.user, self.user, self.user)
        _prctl(_PDEATHSIG, _SIGKILL)  # another user's process: the kernel has forgotten it
        none = ctypes.create_string_buffer(struct.pack("=6I", 0, 0, 0, 0, 0, 0))
        _call("capset", ctypes.create_string_buffer(struct.pack("=Ii", _VERSION_3, 0)), none)
        _prctl(_NO_NEW_PRIVS, 1)
        if self.filter is not None:
            self.filter.load()


def _failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        raise _failed(name)


def _prctl(*arguments: int) -> None:
    given = [ctypes.c_ulong(one) for one in (*arguments, 0, 0, 0, 0)[:5]]
    if _libc.prctl(*given) != 0:
        raise _failed(f"prctl{arguments}")


def _mount(
    source: str | Path | None, place: str | Path, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [None if one is None else os.fsencode(one) for one in (source, place, kind)]
    if _libc.mount(*texts, ctypes.c_ulong(flags), None if options is None else options.encode()) != 0:
        raise _failed(f"mount {kind or source} at {place}")


def _bind(source: Path, place: Path, *, read_only: bool = True) -> None:
    if source != place:
        if source.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
    _mount(source, place, None, _BIND | _REC)
    if read_only:
        _read_only(place, recursive=True)


def _read_only(place: str | Path, *, recursive: bool) -> None:
    """`mount_setattr` (Linux 5.12): the only way that reaches the mounts below, too."""
    attributes = ctypes.create_string_buffer(struct.pack("=4Q", _RDONLY | _NOSUID, 0, 0, 0))
    flags = _RECURSIVE if recursive else 0
    if _libc.syscall(_MOUNT_SETATTR, _HERE, os.fsencode(place), flags, attributes, ctypes.c_size_t(32)) != 0:
        raise _failed(f"mount_setattr of {place}")
